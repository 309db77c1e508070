/// An instant as it is told: UTC, with microseconds, `2026-11-06 20:00:00.000000`. Ordered by time.
public struct HistoryMoment: Hashable, Comparable, Sendable {
    /// As `sql(_:)` has PostgreSQL write it.
    public let text: String

    public init(_ text: String) {
        self.text = text
    }

    /// To the second, rounded down: `2026-11-06 20:00:00 UTC`.
    public var toTheSecond: String { "\(text.prefix(19)) UTC" }

    /// To the microsecond: `2026-11-06 20:00:00.000000 UTC`.
    public var exact: String { "\(text) UTC" }

    /// As options of commands take it: `2026-11-06T20:00:00.000000Z`.
    public var option: String { text.replacing(" ", with: "T") + "Z" }

    /// Two instants that are held against each other: to the microsecond where the second does not tell them apart.
    static func pair(_ one: HistoryMoment, _ other: HistoryMoment) -> (String, String) {
        one != other && one.toTheSecond == other.toTheSecond
            ? (one.exact, other.exact) : (one.toTheSecond, other.toTheSecond)
    }

    public static func < (left: HistoryMoment, right: HistoryMoment) -> Bool { left.text < right.text }

    /// What selects such a text; the transaction's time zone has to be UTC.
    static func sql(_ expression: String) -> String { "to_char(\(expression), 'YYYY-MM-DD HH24:MI:SS.US')" }
}

extension Rows {
    /// A column that `HistoryMoment.sql(_:)` selects; nil for null.
    func moment(_ row: Int, _ column: Int) -> HistoryMoment? { text(row, column).map { HistoryMoment($0) } }
}
