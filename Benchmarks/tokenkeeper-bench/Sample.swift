/// What one contestant took in one round.
struct Sample {
    var rows: Int
    var seconds: Double
    var serverSeconds = 0.0
    var daemonSeconds = 0.0
    /// Rows a second in each quarter of the rows, where it was followed.
    var quarters: [Double] = []

    /// Whether it became slower as it went on.
    var lastOverFirst: Double { (quarters.last ?? .nan) / (quarters.first ?? .nan) }

    var rate: Double { Double(rows) / seconds }
}
