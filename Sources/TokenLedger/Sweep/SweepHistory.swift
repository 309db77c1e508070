internal import TokenModel

/// The sweep's steps for the history (its months and transaction ids), and for topics that nothing refers to any more.
extension Sweep {
    func tidyHistory(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        // Apart: without new months, for example because an event trigger forbids new tables, events go to token_event_log_other.
        try attempt("new months of the history", into: &findings) {
            try unlessLocked {
                try step(on: &connection, while: goesOn) { connection, _ in
                    _ = try connection.query("SELECT tokenkeeper.prepare_event_months()")
                }
            }
        }
        try attempt("old months of the history", into: &findings) {
            try unlessLocked { while try forgetMonth(on: &connection, while: goesOn) {} }
        }
        try attempt("the history's transaction ids", into: &findings) {
            try resetTransactionIDs(on: &connection, while: goesOn)
        }
    }

    /// A long transaction may be reading the history. The next sweep is soon enough: months are prepared well ahead.
    private func unlessLocked(_ work: () throws -> Void) throws {
        do { try work() } catch let error as DatabaseError where error.sqlState == "55P03" {}
    }

    /// One month per transaction: its lock keeps registrations waiting.
    ///
    /// - Returns: False if no month is old enough.
    private func forgetMonth(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        try step(on: &connection, while: goesOn) { connection, counts in
            let events = try connection.query(
                "SELECT tokenkeeper.forget_event_month(now() - $1 * interval '1 microsecond')",
                [.int8(plan.eventRetention.microseconds)]
            ).value(Int64?.self)
            counts.deletedEvents = events ?? 0
            return events != nil
        }
    }

    /// After a restore from a dump into a younger cluster, the transaction ids of the events lie in the future: a reader that
    /// follows the history by transaction id would miss old events and see new ones out of order. The id of the last sweep
    /// reveals this at no cost.
    private func resetTransactionIDs(on connection: inout Connection, while goesOn: () -> Bool) throws {
        let isAhead = try connection.query(
            """
            SELECT coalesce(p.transaction_id >= pg_snapshot_xmax(pg_current_snapshot()), true)
            FROM tokenkeeper.sweep_progress AS p
            """
        ).value(Bool.self)
        if isAhead { try resetTransactionIDsOfAllMonths(on: &connection, while: goesOn) }
        try step(on: &connection, while: goesOn) { connection, _ in
            _ = try connection.query("UPDATE tokenkeeper.sweep_progress SET transaction_id = pg_current_xact_id()")
        }
    }

    private func resetTransactionIDsOfAllMonths(on connection: inout Connection, while goesOn: () -> Bool) throws {
        let months = try connection.query(
            """
            SELECT i.inhrelid::bigint, i.inhrelid::regclass::text FROM pg_catalog.pg_inherits AS i
            WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass
            """
        ).decode { row throws(DatabaseError) in (table: try row.read(Int64.self), name: try row.read(String.self)) }
        for (table, name) in months {
            try eachSlice(of: name, largest: 1024, on: &connection, while: goesOn) { connection, counts, pages in
                counts.resetEvents = try connection.query(
                    "SELECT tokenkeeper.reset_transaction_ids($1::oid, $2, $3)",
                    [.int8(table), .int8(Int64(pages.lowerBound)), .int8(Int64(pages.upperBound))]
                ).value()
            }
        }
    }

    /// After this many attempts in a row without the lock on `topic`, the rest is left to the next sweep.
    private static let maxAttempts = 50

    /// Deletes topics that nothing refers to any more: a sender can invent them.
    func reapTopics(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        try attempt("tokenkeeper.topic", into: &findings) {
            var last: Int32? = 0
            var attempts = 0
            while let after = last, attempts < Self.maxAttempts {
                do {
                    last = try step(on: &connection, while: goesOn) { connection, counts in
                        let (last, reaped) = try connection.query(
                            "SELECT last_id, reaped FROM tokenkeeper.reap_topics($1, now() - $2 * interval '1 microsecond')",
                            [.int4(after), .int8(plan.eventRetention.microseconds)]
                        ).one { row throws(DatabaseError) in (try row.read(Int32?.self), try row.read(Int64.self)) }
                        counts.reapedTopics = reaped
                        return last
                    }
                    attempts = 0
                } catch let error as DatabaseError where error.sqlState == "55P03" {
                    attempts += 1
                }
            }
        }
    }
}
