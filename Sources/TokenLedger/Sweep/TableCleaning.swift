internal import TokenModel

/// Cleans attached tables whose owner has asked for it with `set_cleaning`: marks or deletes the rows whose token has been stale for long.
///
/// The rows that are due are counted first, and the table is refused if they are too many. They are found by the suppressed tokens of the
/// ledger, or if that cannot work (`tokenkeeper.cleaning_plan`), by reading the table. `tokenkeeper.clean_next` cleans a batch: it locks
/// tokens and rows without waiting, and looks at each again.
extension Sweep {
    /// How many rows of a table, or tokens of the ledger, one transaction reads.
    private static let mostRows = 1000

    private struct Batch {
        var next: String?
        var rows: Int64
        var due: Int64
        var cleaned: Int64
        var failed: Int64
        var obstacle: String?
    }

    func cleanTables(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let tables = try connection.query(
            "SELECT source_id, name, mode FROM tokenkeeper.cleaning ORDER BY source_id"
        ).decode { row throws(DatabaseError) in
            (source: try row.read(Int64.self), name: try row.read(String.self), mode: try row.read(String.self))
        }
        for table in tables {
            try attempt(table.name, into: &findings) {
                try clean(table.source, table.name, table.mode, on: &connection, while: goesOn)
            }.map { if let refused = $0 { findings.refusals.append(refused) } }
        }
    }

    /// - Returns: Why nothing was cleaned, or not all, in words; nil if nothing was in the way.
    private func clean(
        _ source: Int64, _ name: String, _ mode: String, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> String? {
        var found = CleanedTable(name: name, mode: mode, rows: 0, due: 0, cleaned: 0, failed: 0)
        var obstacle: String?
        let plan = try connection.query("SELECT by_token, rows FROM tokenkeeper.cleaning_plan($1)", [.int8(source)]).one
        { row throws(DatabaseError) in
            (isByToken: try row.read(Bool.self), rows: try row.read(Int64?.self))
        }
        var read: Int64 = 0
        try eachBatch(of: source, byToken: plan.isByToken, dryRun: true, on: &connection, while: goesOn) {
            connection, batch in
            read += batch.rows
            found.due += batch.due
            obstacle = obstacle ?? batch.obstacle
            return true
        }
        found.rows = plan.rows ?? read
        let today = try connection.query(
            """
            SELECT count(*) FROM tokenkeeper.cleaned_row AS c
            WHERE c.source_id = $1 AND c.cleaned_at > now() - interval '1 day'
            """, [.int8(source)]
        ).value(Int64.self)
        if !lease.forced { found.limit(self.plan, today: today) }
        // A foreign key that cascades is in the way before any row is read.
        if let obstacle, found.due > 0 || read == 0 {
            found.refused = "\(name): \(obstacle)"
        } else if found.isOverLimit {
            found.refused = found.refusal
        }
        try step(on: &connection, while: goesOn) { connection, _ in
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.sweep_table AS t (run_id, source_id, name, mode, rows, due, max_rows, refused)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                ON CONFLICT (run_id, source_id) DO UPDATE
                SET rows = excluded.rows, due = excluded.due, max_rows = excluded.max_rows, refused = excluded.refused
                """,
                [
                    .int8(lease.runID), .int8(source), .text(name), .text(mode), .int8(found.rows), .int8(found.due),
                    .int8(found.maxRows), .text(found.refused),
                ])
        }
        if lease.dryRun || found.due == 0 || found.refused != nil {
            return found.refused
        }
        try eachBatch(of: source, byToken: plan.isByToken, dryRun: false, on: &connection, while: goesOn) {
            connection, batch in
            // A guard has tripped meanwhile, or a wave of 410s has begun.
            if let obstacle = batch.obstacle { found.refused = "\(name): \(obstacle)" }
            found.cleaned += batch.cleaned
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_table SET cleaned = cleaned + $3, failed = failed + $4, refused = $5
                WHERE run_id = $1 AND source_id = $2
                """,
                [
                    .int8(lease.runID), .int8(source), .int8(batch.cleaned), .int8(batch.failed), .text(found.refused),
                ])
            // More may have become due since they were counted.
            return found.refused == nil && found.maxRows.map { found.cleaned < $0 } ?? true
        }
        return found.refused
    }

    /// Goes through the ledger's suppressed tokens, or through a table by its key, a batch per transaction.
    ///
    /// - Parameter work: In the transaction of the batch. Returns whether to go on.
    private func eachBatch(
        of source: Int64, byToken: Bool, dryRun: Bool, on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, Batch) throws -> Bool
    ) throws {
        var next: String?
        var goesFurther = true
        var size = SliceSize(Self.mostRows, in: 10...Self.mostRows)
        while goesFurther {
            (next, goesFurther) = try slice(&size, on: &connection, while: goesOn) { connection, _, size in
                let batch = try connection.query(
                    "SELECT next, rows, due, cleaned, failed, obstacle FROM tokenkeeper.clean_next($1, $2, $3, $4, $5)",
                    [.int8(source), .bool(byToken), .text(next), .int4(Int32(size)), .bool(dryRun)]
                ).one { row throws(DatabaseError) in
                    Batch(
                        next: try row.read(), rows: try row.read(), due: try row.read(), cleaned: try row.read(),
                        failed: try row.read(), obstacle: try row.read())
                }
                let goesOn = try work(&connection, batch)
                return (batch.next, goesOn && batch.next != nil)
            }
        }
    }
}
