import Foundation

/// A median with minimum and maximum.
struct Spread {
    let median: Double
    let least: Double
    let greatest: Double
    private let count: Int

    init(_ values: [Double]) {
        let sorted = values.sorted()
        count = sorted.count
        least = sorted.first ?? .nan
        greatest = sorted.last ?? .nan
        median =
            sorted.isEmpty ? .nan : (sorted[(sorted.count - 1) / 2] + sorted[sorted.count / 2]) / 2
    }

    func text(_ digits: Int = 2, unit: String = "") -> String {
        func number(_ value: Double) -> String { String(format: "%.\(digits)f", value) }
        if count == 1 { return number(median) + unit + ", once" }
        return number(least) == number(greatest)
            ? number(median) + unit : "\(number(median)) (\(number(least)) to \(number(greatest)))\(unit)"
    }
}
