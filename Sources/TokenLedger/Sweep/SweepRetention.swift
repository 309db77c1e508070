internal import TokenModel

/// Deletes rows that are older than their retention. Every statement reads a bounded part, so no table grows too large to sweep.
///
/// Start here: `deleteOldRows` and `tidyCounts` list the tables.
extension Sweep {
    /// A table whose keys grow with time.
    private struct AgingTable {
        var name: String
        var key: String
        var agesFrom: String
        var retention: Duration
        var countedIn: WritableKeyPath<RunCounts, Int64>
    }

    /// Deletes rejected and held results and registrations, suppressed and failed requests, and the reports of old sweeps.
    func deleteOldRows(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let tables = [
            AgingTable(
                name: "tokenkeeper.rejected_result", key: "rejected_id", agesFrom: "rejected_at",
                retention: plan.rejectedRetention, countedIn: \.deletedRejected),
            AgingTable(
                name: "tokenkeeper.rejected_registration", key: "rejected_id", agesFrom: "rejected_at",
                retention: plan.rejectedRetention, countedIn: \.deletedRejected),
            AgingTable(
                name: "tokenkeeper.held_result", key: "held_id", agesFrom: "held_at",
                retention: plan.heldRetention, countedIn: \.deletedHeld),
            AgingTable(
                name: "tokenkeeper.held_registration", key: "held_id", agesFrom: "held_at",
                retention: plan.heldRetention, countedIn: \.deletedHeld),
            AgingTable(
                name: "tokenkeeper.suppressed_send", key: "suppressed_id", agesFrom: "suppressed_at",
                retention: plan.sendRetention, countedIn: \.deletedSends),
            AgingTable(
                name: "tokenkeeper.failed_send", key: "failed_id", agesFrom: "failed_at",
                retention: plan.sendRetention, countedIn: \.deletedSends),
            AgingTable(
                name: "tokenkeeper.sweep_run", key: "run_id", agesFrom: "finished_at",
                retention: plan.eventRetention, countedIn: \.deletedRuns),
        ]
        for table in tables {
            try attempt(table.name, into: &findings) {
                try deleteOldRows(of: table, on: &connection, while: goesOn)
            }
        }
    }

    /// Deletes old rows from the front, until a slice has none.
    ///
    /// An index on the time would cost every insert, and the keys already show where the old rows are. A row that another session
    /// has locked is left for the next sweep.
    private func deleteOldRows(
        of table: AgingTable, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        var size = SliceSize(plan.batch, in: min(plan.batch, 10)...plan.batch)
        try eachSlice(after: Int64.min, &size, on: &connection, while: goesOn) { connection, counts, after, size in
            let (due, last, deleted) = try connection.query(
                """
                WITH met AS MATERIALIZED (
                    SELECT r.ctid AS place, r.\(table.key) AS key,
                           coalesce(r.\(table.agesFrom) < now() - $1 * interval '1 microsecond', false) AS due
                    FROM \(table.name) AS r WHERE r.\(table.key) > $2 ORDER BY r.\(table.key) LIMIT $3
                ), free AS MATERIALIZED (
                    SELECT r.ctid AS place FROM \(table.name) AS r
                    WHERE NOT $4 AND r.ctid = ANY (ARRAY(SELECT m.place FROM met AS m WHERE m.due)) FOR UPDATE SKIP LOCKED
                ), gone AS (
                    DELETE FROM \(table.name) AS r WHERE r.ctid = ANY (ARRAY(SELECT f.place FROM free AS f)) RETURNING 1
                )
                SELECT count(*) FILTER (WHERE m.due), max(m.key), (SELECT count(*) FROM gone) FROM met AS m
                """,
                [.int8(table.retention.microseconds), .int8(after), .int8(Int64(size)), .bool(lease.dryRun)]
            ).one { row throws(DatabaseError) in
                (try row.read(Int64.self), try row.read(Int64?.self), try row.read(Int64.self))
            }
            counts[keyPath: table.countedIn] = lease.dryRun ? due : deleted
            return due > 0 ? last : nil
        }
    }

    /// Deletes old counts, the log of operations, and rows whose run or token is gone.
    func tidyCounts(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        try attempt("tokenkeeper.result_count", into: &findings) {
            // Delete old counts first: there is no point in adding up what will be deleted.
            try deleteOldCounts(on: &connection, while: goesOn)
            while try rollUpCounts(on: &connection, while: goesOn) {}
        }
        try attempt("tokenkeeper.sweep_topic", into: &findings) {
            try deleteRowsOfOldRuns(from: "tokenkeeper.sweep_topic", on: &connection, while: goesOn)
        }
        try attempt("tokenkeeper.receipt", into: &findings) {
            while try deleteOldReceipts(on: &connection, while: goesOn) {}
        }
        // After failed_send, which refers to them.
        try attempt("tokenkeeper.campaign", into: &findings) {
            while try deleteOldCampaigns(on: &connection, while: goesOn) {}
        }
        for (table, condition, retention) in [
            ("tokenkeeper.operation", "r.at < now() - $1 * interval '1 microsecond'", plan.eventRetention),
            ("tokenkeeper.amended_registration", "r.hour < now() - $1 * interval '1 microsecond'", plan.eventRetention),
            ("tokenkeeper.dropped_registration", "r.hour < now() - $1 * interval '1 microsecond'", plan.eventRetention),
            ("tokenkeeper.token_count_hour", "r.hour < now() - $1 * interval '1 microsecond'", plan.eventRetention),
            ("tokenkeeper.suppression_count", "r.hour < now() - $1 * interval '1 microsecond'", plan.eventRetention),
            ("tokenkeeper.background_send", "r.latest_at < now() - $1 * interval '1 microsecond'", .seconds(3600)),
            ("tokenkeeper.crowded_token", "r.next_at < now() - $1 * interval '1 microsecond'", .seconds(3600)),
            ("tokenkeeper.alert_send", "r.day < now() - $1 * interval '1 microsecond'", .seconds(2 * 86_400)),
        ] {
            try attempt(table, into: &findings) {
                try delete(from: table, where: condition, retention, on: &connection, while: goesOn)
            }
        }
    }

    /// - Returns: Whether there may be more.
    private func deleteOldCampaigns(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        try step(on: &connection, while: goesOn) { connection, counts in
            let (deleted, hasMore) = try connection.query(
                "SELECT d.deleted, d.has_more FROM tokenkeeper.delete_campaigns(now() - $1 * interval '1 microsecond', $2) AS d",
                [.int8(plan.sendRetention.microseconds), .int4(Int32(clamping: plan.batch))]
            ).one { row throws(DatabaseError) in (try row.read(Int64.self), try row.read(Bool.self)) }
            counts.deletedSends = deleted
            return hasMore
        }
    }

    /// - Returns: Whether there is more to add up.
    private func rollUpCounts(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        try step(on: &connection, while: goesOn) { connection, _ in
            try connection.query("SELECT tokenkeeper.roll_up_result_count()").value(Bool.self)
        }
    }

    /// Deletes receipts of tokens that are not suppressed any more. As long as a token is suppressed, they can be undone.
    ///
    /// - Returns: Whether there may be more.
    private func deleteOldReceipts(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        do {
            return try step(settings: Self.byIndex, on: &connection, while: goesOn) { connection, _ in
                // By topic and cause, so that it finds them by the index. By place: a row that another session has deleted is gone.
                // As long as a token is suppressed, what suppresses it can be undone.
                try connection.query(
                    """
                    WITH gone AS (
                        DELETE FROM tokenkeeper.receipt AS r WHERE r.ctid = ANY (ARRAY(
                            SELECT o.place FROM tokenkeeper.topic AS t
                            CROSS JOIN unnest('{stale,suspect,unregistered_by_app}'::text[]) AS c (cause)
                            CROSS JOIN LATERAL (
                                SELECT s.ctid AS place FROM tokenkeeper.receipt AS s
                                WHERE s.topic_id + 0 = t.topic_id AND s.cause = c.cause COLLATE "C"
                                  AND s.received_at < now() - coalesce(t.suppressed_retention, $1 * interval '1 microsecond')
                                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l
                                                  WHERE l.topic_id = t.topic_id AND l.token_key = s.token_key AND l.suppressed)
                                ORDER BY s.received_at LIMIT $2) AS o
                            LIMIT $2))
                        RETURNING 1
                    )
                    SELECT count(*) > 0 FROM gone
                    """, [.int8(plan.suppressedRetention.microseconds), .int8(Int64(plan.batch))]
                ).value(Bool.self)
            }
        } catch let error as DatabaseError where error.sqlState == "55P03" {
            // An undo has locked a row: the next sweep deletes the rest.
            return false
        }
    }

    /// Finds them by the index on the hour.
    private func deleteOldCounts(on connection: inout Connection, while goesOn: () -> Bool) throws {
        var size = SliceSize(10_000, in: 100...100_000)
        try eachSlice(after: Instant.distantPast, &size, on: &connection, while: goesOn) { connection, _, since, size in
            try connection.query(
                """
                WITH gone AS (
                    DELETE FROM tokenkeeper.result_count AS r WHERE r.ctid = ANY (ARRAY(
                        SELECT c.ctid FROM tokenkeeper.result_count AS c
                        WHERE c.hour >= $1 AND c.hour < now() - $2 * interval '1 microsecond' ORDER BY c.hour LIMIT $3))
                    RETURNING r.hour
                )
                SELECT max(g.hour) FROM gone AS g
                """, [.instant(since), .int8(plan.eventRetention.microseconds), .int8(Int64(size))]
            ).value(Instant?.self)
        }
    }

    /// Runs are deleted in their order, so the topics and tables of deleted runs lie before all others.
    private func deleteRowsOfOldRuns(
        from table: String, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        var size = SliceSize(10_000, in: 100...100_000)
        try eachSlice(after: Int64.min, &size, on: &connection, while: goesOn) { connection, _, after, size in
            try connection.query(
                """
                WITH gone AS (
                    DELETE FROM \(table) AS r WHERE r.ctid = ANY (ARRAY(
                        SELECT s.ctid FROM \(table) AS s
                        WHERE s.run_id >= $1 AND s.run_id < (SELECT min(o.run_id) FROM tokenkeeper.sweep_run AS o)
                        ORDER BY s.run_id LIMIT $2))
                    RETURNING r.run_id
                )
                SELECT max(g.run_id) FROM gone AS g
                """, [.int8(after), .int8(Int64(size))]
            ).value(Int64?.self)
        }
    }

    /// Deletes the rows that meet a condition, page by page: for tables without an index that would find them.
    ///
    /// - Parameter condition: On the row `r`, with the retention in microseconds as $1.
    private func delete(
        from table: String, where condition: String, _ retention: Duration, on connection: inout Connection,
        while goesOn: () -> Bool
    ) throws {
        do {
            try eachSlice(of: table, largest: 4096, on: &connection, while: goesOn) { connection, _, pages in
                _ = try connection.query(
                    "DELETE FROM \(table) AS r WHERE \(Self.on(pages, alias: "r")) AND \(condition)",
                    [.int8(retention.microseconds)])
            }
        } catch let error as DatabaseError where error.sqlState == "55P03" {
            // Another session has locked a row: the next sweep deletes it.
        }
    }
}
