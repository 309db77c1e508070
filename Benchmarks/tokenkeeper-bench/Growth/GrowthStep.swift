import Foundation

/// What was measured at one size of the ledger.
struct GrowthStep {
    struct Cost {
        let name: String
        let pages: Double
        let milliseconds: Double
        let longest: Double
        let walBytes: Double
        let wholePages: Double
    }

    typealias Time = (name: String, value: Double)

    /// How many tokens the ledger has had, and how many rows it has.
    let tokens: Int
    var rows = 0.0
    var sizes: [(relation: String, bytes: Double)] = []
    /// The bytes of an event of the history, with its indexes.
    var bytesOfEvent = 0.0
    private(set) var costs: [Cost] = []
    var drainedPerSecond = 0.0
    var drainMicroseconds = 0.0
    /// Bytes of WAL for each drained result.
    var drainWAL = 0.0
    /// The longest statement of a daemon's work, in milliseconds.
    var longest: [Time] = []
    /// What a vacuum of the ledger takes, in seconds.
    var vacuums: [Time] = []

    init(tokens: Int) {
        self.tokens = tokens
    }

    /// The bytes of tables and indexes for each row of the ledger.
    var bytes: Double { sizes.reduce(0) { $0 + $1.bytes } / rows }

    subscript(name: String) -> Cost? { costs.first { $0.name == name } }

    mutating func add(_ name: String, _ cost: CallCost) {
        costs.append(
            Cost(
                name: name, pages: cost.pages, milliseconds: cost.milliseconds, longest: cost.longest,
                walBytes: cost.walBytes, wholePages: cost.wholePages))
    }

    mutating func add(_ name: String, pages: Double, milliseconds: Double, longest: Double = .nan) {
        costs.append(
            Cost(
                name: name, pages: pages, milliseconds: milliseconds, longest: longest, walBytes: .nan, wholePages: .nan
            ))
    }

    /// For the progress.
    var lines: [String] {
        costs.map {
            String(format: "%@: %.2f pages, %.4f ms, longest %.3f ms", $0.name, $0.pages, $0.milliseconds, $0.longest)
        }
            + [
                String(
                    format: "drain: %.0f results a second, %.2f µs of the server each", drainedPerSecond,
                    drainMicroseconds)
            ]
            + longest.map { String(format: "the longest statement of %@: %.0f ms", $0.name, $0.value) }
            + vacuums.map { String(format: "vacuum %@: %.1f s", $0.name, $0.value) }
    }
}
