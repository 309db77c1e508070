import Foundation

/// A median with the least and the greatest.
struct Spread {
    let median: Double
    let least: Double
    let greatest: Double

    init(_ values: [Double]) {
        let sorted = values.sorted()
        least = sorted.first ?? .nan
        greatest = sorted.last ?? .nan
        median =
            sorted.isEmpty ? .nan : (sorted[(sorted.count - 1) / 2] + sorted[sorted.count / 2]) / 2
    }

    func text(_ digits: Int = 2) -> String {
        func number(_ value: Double) -> String { String(format: "%.\(digits)f", value) }
        return least == greatest ? number(median) : "\(number(median)) (\(number(least)) to \(number(greatest)))"
    }
}
