/// Durations as people write them: a whole number and a unit, `250ms`, `90s`, `5m`, `1h`, `30d`.
enum DurationText {
    private static let units: [(suffix: String, milliseconds: Int)] = [
        ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("ms", 1), ("s", 1000),
    ]

    /// - Returns: Nil for anything else: without a unit, with a fraction, a sign or white space, or more than 10,000 days.
    static func duration(_ text: String) -> Duration? {
        let digits = text.prefix { $0.isASCII && $0.isNumber }
        guard let count = Int(digits), let unit = units.first(where: { $0.suffix == text.dropFirst(digits.count) }),
            count <= 10_000 * 86_400_000 / unit.milliseconds
        else { return nil }
        return .milliseconds(count * unit.milliseconds)
    }

    /// The shortest text of a duration: 90,000 ms are `90s`.
    static func text(_ duration: Duration) -> String {
        let milliseconds = Int(duration / .milliseconds(1))
        for suffix in ["d", "h", "m", "s"] {
            if let unit = units.first(where: { $0.suffix == suffix }), milliseconds.isMultiple(of: unit.milliseconds),
                milliseconds > 0
            {
                return "\(milliseconds / unit.milliseconds)\(suffix)"
            }
        }
        return "\(milliseconds)ms"
    }
}
