internal import TokenModel

/// What a scrape gets: metrics in Prometheus' text format, version 0.0.4. Pure.
///
/// https://prometheus.io/docs/instrumenting/exposition_formats/
struct MetricsText {
    static let contentType = "text/plain; version=0.0.4; charset=utf-8"

    enum Kind: String { case counter, gauge, histogram }

    typealias Labels = [(name: String, value: String)]

    /// What the names of our metrics begin with.
    static let own = "tokenkeeper_"
    /// What the names of the metrics begin with that are added next.
    var prefix = own

    private(set) var text = ""

    /// Adds a metric with all its samples. A metric without samples is left out.
    ///
    /// - Parameters:
    ///   - name: Without the prefix. A counter's ends in `_total`.
    ///   - samples: Each with other labels.
    mutating func add(_ name: String, _ kind: Kind, _ help: String, _ samples: [(labels: Labels, value: Double)]) {
        if samples.isEmpty { return }
        head(name, kind, help)
        for sample in samples { line(name, sample.labels, sample.value) }
    }

    /// Adds a metric with one sample and no label; nothing if there is no value.
    mutating func add(_ name: String, _ kind: Kind, _ help: String, _ value: Double?) {
        add(name, kind, help, value.map { [([], $0)] } ?? [])
    }

    /// Adds a metric whose labels are texts already; see `text(_:)`. For metrics with thousands of samples.
    mutating func add(
        _ name: String, _ kind: Kind, _ help: String, rendered samples: [(labels: String, value: Double)]
    ) {
        if samples.isEmpty { return }
        head(name, kind, help)
        for sample in samples { line(name, sample.labels, sample.value) }
    }

    /// Adds a histogram, in seconds.
    ///
    /// - Parameter name: Ends in `_seconds`.
    mutating func add(
        _ name: String, _ help: String, _ samples: [(labels: Labels, counts: DurationHistogram.Counts)]
    ) {
        if samples.isEmpty { return }
        head(name, .histogram, help)
        for (labels, counts) in samples {
            var sum = 0
            for (bound, count) in zip(DurationHistogram.bounds, counts.buckets) {
                sum += count
                line("\(name)_bucket", labels + [("le", Self.text(bound / .seconds(1)))], Double(sum))
            }
            sum += counts.buckets[DurationHistogram.bounds.count]
            line("\(name)_bucket", labels + [("le", "+Inf")], Double(sum))
            line("\(name)_sum", labels, counts.sum / .seconds(1))
            line("\(name)_count", labels, Double(sum))
        }
    }

    private mutating func head(_ name: String, _ kind: Kind, _ help: String) {
        text += "# HELP \(prefix)\(name) \(Self.escaped(help, quotes: false))\n"
        text += "# TYPE \(prefix)\(name) \(kind.rawValue)\n"
    }

    private mutating func line(_ name: String, _ labels: Labels, _ value: Double) {
        line(name, Self.text(labels), value)
    }

    private mutating func line(_ name: String, _ labels: String, _ value: Double) {
        text += prefix
        text += name
        text += labels
        text += " "
        text += Self.text(value)
        text += "\n"
    }

    /// Labels as they follow the name of a metric: `{topic="a",status="200"}`. Empty if there are none.
    static func text(_ labels: Labels) -> String {
        if labels.isEmpty { return "" }
        let pairs = labels.map { "\($0.name)=\"\(escaped($0.value, quotes: true))\"" }
        return "{\(pairs.joined(separator: ","))}"
    }

    /// Whole numbers have no decimals, as people read them. Beyond 2^53 a Double has no odd numbers anyway.
    private static func text(_ value: Double) -> String {
        value.rounded() == value && abs(value) < 0x1p53 ? String(Int64(value)) : "\(value)"
    }

    private static func escaped(_ text: String, quotes: Bool) -> String {
        var escaped = ""
        for scalar in text.unicodeScalars {
            switch scalar {
            case "\\": escaped += "\\\\"
            case "\n": escaped += "\\n"
            case "\"" where quotes: escaped += "\\\""
            default: escaped.unicodeScalars.append(scalar)
            }
        }
        return escaped
    }
}
