/// An instant as text, in UTC and with microseconds: `2026-11-06 20:00:00.000000`. Ordered by time.
public struct HistoryMoment: Hashable, Comparable, Sendable {
    /// As PostgreSQL writes the expression of `sql(_:)`.
    public let text: String

    public init(_ text: String) {
        self.text = text
    }

    /// To the second, rounded down: `2026-11-06 20:00:00 UTC`.
    public var toTheSecond: String { "\(text.prefix(19)) UTC" }

    /// To the microsecond: `2026-11-06 20:00:00.000000 UTC`.
    public var exact: String { "\(text) UTC" }

    /// As an option of a command: `2026-11-06T20:00:00.000000Z`.
    public var option: String { text.replacing(" ", with: "T") + "Z" }

    /// Two instants to compare: to the microsecond if they differ by less than a second.
    static func pair(_ one: HistoryMoment, _ other: HistoryMoment) -> (String, String) {
        one != other && one.toTheSecond == other.toTheSecond
            ? (one.exact, other.exact) : (one.toTheSecond, other.toTheSecond)
    }

    public static func < (left: HistoryMoment, right: HistoryMoment) -> Bool { left.text < right.text }

    /// The SQL that selects such a text. The transaction's time zone must be UTC.
    static func sql(_ expression: String) -> String { "to_char(\(expression), 'YYYY-MM-DD HH24:MI:SS.US')" }
}

extension HistoryMoment: ColumnDecodable {
    /// A column that `HistoryMoment.sql(_:)` selects.
    package init(column: borrowing Row) throws(DatabaseError) { self.init(try String(column: column)) }
}
