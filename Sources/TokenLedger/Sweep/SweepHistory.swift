internal import TokenModel

/// The history's months and transaction ids, and the topics that nothing refers to any more.
extension Sweep {
    func tidyHistory(
        into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        try attempt("the history", into: &findings) {
            do {
                try step(on: &connection, while: goesOn) { connection in
                    _ = try connection.query("SELECT tokenkeeper.prepare_event_months()")
                    return ((), [("refused", 0)])
                }
                while try forgetMonth(on: &connection, while: goesOn) {}
            } catch let error as DatabaseError where error.sqlState == "55P03" {
                // Somebody reads the history at length: the next sweep will do. Months are prepared well ahead.
            }
        }
        try attempt("the history's transaction ids", into: &findings) {
            try resetTransactionIDs(on: &connection, while: goesOn)
        }
    }

    /// One month a transaction: its lock keeps registrations waiting.
    private func forgetMonth(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        try step(on: &connection, while: goesOn) { connection in
            let events = try connection.query(
                "SELECT tokenkeeper.forget_event_month(now() - $1 * interval '1 microsecond')",
                [.int8(plan.eventRetention.microseconds)]
            ).integer(0, 0)
            return (events != nil, [("deleted_events", events ?? 0)])
        }
    }

    /// After a restore from a dump into a younger cluster, the events' transaction ids lie in the future: who follows the history by
    /// them would see nothing of it, and what comes then out of order. The last sweep's own id tells that at no cost.
    private func resetTransactionIDs(on connection: inout Connection, while goesOn: () -> Bool) throws {
        let isAhead = try connection.query(
            "SELECT coalesce(p.transaction_id >= pg_snapshot_xmax(pg_current_snapshot()), true) FROM tokenkeeper.sweep_progress AS p"
        ).bool(0, 0)
        if isAhead == true {
            let partitions = try connection.query(
                "SELECT i.inhrelid::bigint, i.inhrelid::regclass::text FROM pg_catalog.pg_inherits AS i WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass"
            )
            for row in 0..<partitions.count {
                guard let partition = partitions.integer(row, 0), let name = partitions.text(row, 1) else { continue }
                try eachSlice(of: name, largest: 1024, on: &connection, while: goesOn) { connection, pages in
                    let events = try connection.query(
                        "SELECT tokenkeeper.reset_transaction_ids($1::oid, $2, $3)",
                        [.int8(partition), .int8(Int64(pages.lowerBound)), .int8(Int64(pages.upperBound))]
                    ).integer(0, 0)
                    return [("reset_events", events ?? 0)]
                }
            }
        }
        try step(on: &connection, while: goesOn) { connection in
            _ = try connection.query("UPDATE tokenkeeper.sweep_progress SET transaction_id = pg_current_xact_id()")
            return ((), [("refused", 0)])
        }
    }

    /// So many times in a row the lock on topic is not to be had, before that is left to the next sweep.
    private static let mostTries = 50

    /// Deletes topics that nothing refers to any more: a sender can invent them.
    func reapTopics(into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool) throws {
        try attempt("tokenkeeper.topic", into: &findings) {
            var last: Int64? = 0
            var tries = 0
            while let after = last, tries < Self.mostTries {
                do {
                    last = try step(on: &connection, while: goesOn) { connection in
                        let row = try connection.query(
                            "SELECT last_id, reaped FROM tokenkeeper.reap_topics($1, now() - $2 * interval '1 microsecond')",
                            [.int4(Int32(truncatingIfNeeded: after)), .int8(plan.eventRetention.microseconds)])
                        return (row.integer(0, 0), [("reaped_topics", row.integer(0, 1) ?? 0)])
                    }
                    tries = 0
                } catch let error as DatabaseError where error.sqlState == "55P03" {
                    tries += 1
                }
            }
        }
    }
}
