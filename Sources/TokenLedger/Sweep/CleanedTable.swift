internal import TokenModel

/// What a sweep found to clean in an attached table, and what it did; a row of `tokenkeeper.sweep_table`.
public struct CleanedTable: Equatable, Sendable {
    /// Schema and name.
    public var name: String
    /// `mark` or `delete`.
    public var mode: String
    public var rows: Int64
    /// How many of the rows have a token that has been stale for long enough.
    public var due: Int64
    /// The most that could be cleaned; nil if there was no limit.
    public var maxRows: Int64?
    /// Why nothing was cleaned, or not all; nil if nothing was in the way.
    public var refused: String?
    /// How many rows were marked or deleted.
    public var cleaned: Int64
    /// How many rows the table refused to change or delete, because of a foreign key for example.
    public var failed: Int64

    /// Reads what a run has recorded of each table.
    static func all(of run: Int64, on connection: inout Connection) throws(DatabaseError) -> [CleanedTable] {
        try connection.query(
            """
            SELECT name, mode, rows, due, max_rows, refused, cleaned, failed FROM tokenkeeper.sweep_table WHERE run_id = $1 ORDER BY name
            """, [.int8(run)]
        ).decode { row throws(DatabaseError) in
            CleanedTable(
                name: try row.read(), mode: try row.read(), rows: try row.read(), due: try row.read(),
                maxRows: try row.read(), refused: try row.read(), cleaned: try row.read(), failed: try row.read())
        }
    }

    /// Sets the limit. It holds for a day, as for tokens: otherwise hourly sweeps would clean bit by bit what a single sweep may not.
    ///
    /// - Parameter today: How many of its rows sweeps have cleaned within the last day.
    mutating func limit(_ plan: SweepPlan, today: Int64) {
        if plan.maxShare >= .percent(100) { return }
        // Marked rows are still in the table.
        let all = mode == "delete" ? rows + today : rows
        let share = all.multipliedFullWidth(by: plan.maxShare.millionths)
        maxRows = max(max(plan.allowance, Int64(1_000_000).dividingFullWidth(share).quotient) - today, 0)
    }

    /// Whether more rows are due than may be cleaned.
    var isOverLimit: Bool { maxRows.map { due > $0 } ?? false }

    var refusal: String {
        "\(name): \(counted(due, "row is", "rows are")) due of \(rows), more than \(maxRows ?? 0)"
    }
}
