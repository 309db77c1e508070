internal import TokenModel

/// The transactions of a sweep: each is short, and renews the lease.
extension Sweep {
    /// Small statistics and a large table: no plan shall then read all of it.
    static let byIndex = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"

    /// One transaction of the sweep, which renews the lease.
    ///
    /// - Parameter work: Returns what comes of it, and what to add to which counts of the run.
    func step<Value>(
        settings: String = "", on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection) throws -> (value: Value, counts: [(column: String, rows: Int64)])
    ) throws -> Value {
        guard goesOn() else { throw Ended.stopped }
        do {
            try connection.run(transaction.begin + settings)
            let done = try work(&connection)
            for (column, rows) in done.counts {
                // Another daemon may have taken over: what was done here is then undone.
                guard try note(column, rows, on: &connection) else { throw Ended.leaseLost }
            }
            try connection.commit()
            return done.value
        } catch {
            connection.rollback()
            throw error
        }
    }

    /// One transaction that looks at a slice; a smaller slice if that runs into its time limit.
    func slice<Value>(
        _ size: inout SliceSize, settings: String = "", on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, _ size: Int) throws -> (value: Value, counts: [(column: String, rows: Int64)])
    ) throws -> Value {
        while true {
            let began = ContinuousClock.now
            do {
                let value = try step(settings: settings, on: &connection, while: goesOn) { connection in
                    try work(&connection, size.value)
                }
                size.took(began.duration(to: .now))
                return value
            } catch let error as DatabaseError where error.sqlState == "57014" && size.timedOut() {
                // Once more, with less.
            }
        }
    }

    /// Goes through a table from its first page to its last, a slice of pages per transaction.
    ///
    /// - Parameters:
    ///   - table: Its name in SQL.
    ///   - largest: The most pages of a slice.
    ///   - work: Gets the condition on `ctid` that selects the slice, with an alias if it needs one.
    func eachSlice(
        of table: String, largest: Int, settings: String = "", on connection: inout Connection,
        while goesOn: () -> Bool,
        _ work: (inout Connection, Range<Int>) throws -> [(column: String, rows: Int64)]
    ) throws {
        let pages = try connection.query(
            "SELECT pg_relation_size(to_regclass($1)) / current_setting('block_size')::bigint", [.text(table)]
        ).integer(0, 0)
        // Dropped meanwhile.
        guard let pages else { return }
        var size = SliceSize(largest / 8, in: 1...largest)
        var page = 0
        while page < pages {
            page = try slice(&size, settings: settings, on: &connection, while: goesOn) { connection, size in
                (page + size, try work(&connection, page..<page + size))
            }
        }
    }

    /// The condition that selects some pages.
    static func on(_ pages: Range<Int>, alias: String = "") -> String {
        "\(alias)ctid >= '(\(pages.lowerBound),0)' AND \(alias)ctid < '(\(min(pages.upperBound, Int(UInt32.max) - 1)),0)'"
    }

    /// Adds to a count of the run, and renews the lease: in the transaction that did the work.
    private func note(_ column: String, _ rows: Int64, on connection: inout Connection) throws(DatabaseError) -> Bool {
        try connection.query(
            """
            UPDATE tokenkeeper.sweep_run SET heartbeat_at = clock_timestamp(), \(column) = \(column) + $2
            WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $3
            """, [.int8(lease.runID), .int8(rows), .text(lease.holder)]
        ).affected == 1
    }
}
