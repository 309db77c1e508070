import LedgerTestSupport

/// The metrics that a daemon serves, as a test reads them.
struct MetricsPage {
    let text: String
    private let values: [String: String]

    init(port: Int) {
        self.init(PlainClient.get("/metrics", port))
    }

    init(_ text: String) {
        self.text = text
        values = Dictionary(
            text.split(separator: "\n").filter { $0.hasPrefix("tokenkeeper_") }.compactMap { line in
                line.lastIndex(of: " ").map {
                    (String(line[..<$0].dropFirst("tokenkeeper_".count)), String(line[line.index(after: $0)...]))
                }
            }, uniquingKeysWith: { first, second in "\(first) and \(second)" })
    }

    /// The value of a sample, named as in the page but without `tokenkeeper_`; nil if it is absent.
    subscript(sample: String) -> String? { values[sample] }

    /// The labels and values of a metric's samples, in order.
    func samples(_ metric: String) -> [String] {
        values.filter { $0.key.hasPrefix(metric + "{") }.map { "\($0.key.dropFirst(metric.count)) \($0.value)" }
            .sorted()
    }
}
