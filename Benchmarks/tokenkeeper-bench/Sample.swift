/// The time of one contestant in one round.
struct Sample {
    var rows: Int
    var seconds: Double
    var serverSeconds = 0.0
    var daemonSeconds = 0.0
    /// The part of `daemonSeconds` that the threads of the drain took.
    var drainSeconds = 0.0
    /// The part of `daemonSeconds` that the threads of the client for APNs took.
    var clientSeconds = 0.0
    /// Rows per second in each quarter of the rows, if they were measured.
    var quarters: [Double] = []

    /// The last quarter's rate over the first's.
    var lastOverFirst: Double { (quarters.last ?? .nan) / (quarters.first ?? .nan) }

    var rate: Double { Double(rows) / seconds }
}
