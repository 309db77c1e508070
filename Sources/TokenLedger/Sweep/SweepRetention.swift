internal import TokenModel

/// What has been kept for its time. Every statement looks at a bounded part: a table never grows too large to be cleared.
extension Sweep {
    /// Results and requests that wait for a person who does not come, and reports of old sweeps.
    func clearAwayResults(
        into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        for (column, table, key, since, retention) in [
            ("deleted_rejected", "rejected_result", "rejected_id", "rejected_at", plan.rejectedRetention),
            ("deleted_held", "held_result", "held_id", "held_at", plan.heldRetention),
            ("deleted_sends", "suppressed_send", "suppressed_id", "suppressed_at", plan.sendRetention),
            ("deleted_sends", "failed_send", "failed_id", "failed_at", plan.sendRetention),
            ("deleted_runs", "sweep_run", "run_id", "finished_at", plan.eventRetention),
        ] {
            try attempt("tokenkeeper.\(table)", into: &findings) {
                try clearAway(
                    table, by: key, since, retention, countedIn: column, on: &connection, while: goesOn)
            }
        }
    }

    /// Deletes old rows of a table whose keys grow with time, from the front, until a slice has none.
    ///
    /// Not by an index on the time, which would cost each insert: the keys tell where the old rows are. A row that somebody holds
    /// locked is left to the next sweep.
    private func clearAway(
        _ table: String, by key: String, _ since: String, _ retention: Duration, countedIn column: String,
        on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        var size = SliceSize(plan.batch, in: min(plan.batch, 10)...plan.batch)
        var last: Int64? = Int64.min
        while let after = last {
            last = try slice(&size, settings: Self.byIndex, on: &connection, while: goesOn) { connection, size in
                let row = try connection.query(
                    """
                    WITH met AS MATERIALIZED (
                        SELECT r.ctid AS place, r.\(key) AS key,
                               coalesce(r.\(since) < now() - $1 * interval '1 microsecond', false) AS due
                        FROM tokenkeeper.\(table) AS r WHERE r.\(key) > $2 ORDER BY r.\(key) LIMIT $3
                    ), free AS MATERIALIZED (
                        SELECT r.ctid AS place FROM tokenkeeper.\(table) AS r
                        WHERE NOT $4 AND r.ctid = ANY (ARRAY(SELECT m.place FROM met AS m WHERE m.due)) FOR UPDATE SKIP LOCKED
                    ), gone AS (
                        DELETE FROM tokenkeeper.\(table) AS r WHERE r.ctid = ANY (ARRAY(SELECT f.place FROM free AS f)) RETURNING 1
                    )
                    SELECT count(*) FILTER (WHERE m.due), max(m.key), (SELECT count(*) FROM gone) FROM met AS m
                    """,
                    [.int8(retention.microseconds), .int8(after), .int8(Int64(size)), .bool(lease.dryRun)])
                let due = row.integer(0, 0) ?? 0
                let deleted = lease.dryRun ? due : row.integer(0, 2) ?? 0
                return (due > 0 ? row.integer(0, 1) : nil, [(column, deleted)])
            }
        }
    }

    /// Counts, the log of operations, and what belongs to rows that are gone.
    func tidyCounts(
        into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        // The old ones first: there is no use in adding up what is to be deleted.
        try attempt("tokenkeeper.result_count", into: &findings) {
            try deleteOldCounts(on: &connection, while: goesOn)
            while try step(
                on: &connection, while: goesOn,
                { connection in
                    let isMore = try connection.query("SELECT tokenkeeper.roll_up_result_count()").bool(0, 0)
                    return (isMore == true, [("refused", 0)])
                })
            {}
        }
        try attempt("tokenkeeper.sweep_topic", into: &findings) {
            try deleteTopicsOfOldRuns(on: &connection, while: goesOn)
        }
        for (table, at, retention) in [
            ("operation", "at", plan.eventRetention),
            // No window of the guard reaches further back than two days; a backlog may.
            ("topic_guard_count", "bucket", .seconds(8 * 86_400)),
            ("background_send", "latest_at", .seconds(3600)),
            ("crowded_device", "named_at", .seconds(30 * 86_400)),
        ] {
            try delete(
                from: table, where: "r.\(at) < now() - $1 * interval '1 microsecond'", retention, into: &findings,
                on: &connection, while: goesOn)
        }
        // A suspect of a token that is suppressed may be undone as long as it is.
        try delete(
            from: "suspect",
            where: """
                r.queued_at < now() - coalesce((SELECT t.suppressed_retention FROM tokenkeeper.topic AS t WHERE t.topic_id = r.topic_id),
                                               $1 * interval '1 microsecond')
                AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l
                                WHERE l.topic_id = r.topic_id AND l.token_key = r.token_key AND l.suppressed)
                """, plan.suppressedRetention, into: &findings, on: &connection, while: goesOn)
    }

    /// By the index on the hour, from where the slice before ended: from the front, each would first pass all that are deleted.
    private func deleteOldCounts(on connection: inout Connection, while goesOn: () -> Bool) throws {
        var size = SliceSize(10_000, in: 100...100_000)
        var last: Instant? = .distantPast
        while let since = last {
            last = try slice(&size, settings: Self.byIndex, on: &connection, while: goesOn) { connection, size in
                let row = try connection.query(
                    """
                    WITH gone AS (
                        DELETE FROM tokenkeeper.result_count AS r WHERE r.ctid = ANY (ARRAY(
                            SELECT c.ctid FROM tokenkeeper.result_count AS c
                            WHERE c.hour >= $1 AND c.hour < now() - $2 * interval '1 microsecond' ORDER BY c.hour LIMIT $3))
                        RETURNING r.hour
                    )
                    SELECT max(g.hour) FROM gone AS g
                    """, [.instant(since), .int8(plan.eventRetention.microseconds), .int8(Int64(size))])
                return (row.instant(0, 0), [("refused", 0)])
            }
        }
    }

    /// Runs are deleted in their order, so that what belongs to runs that are gone lies before all others.
    private func deleteTopicsOfOldRuns(on connection: inout Connection, while goesOn: () -> Bool) throws {
        var size = SliceSize(10_000, in: 100...100_000)
        var last: Int64? = Int64.min
        while let after = last {
            last = try slice(&size, settings: Self.byIndex, on: &connection, while: goesOn) { connection, size in
                let row = try connection.query(
                    """
                    WITH gone AS (
                        DELETE FROM tokenkeeper.sweep_topic AS r WHERE r.ctid = ANY (ARRAY(
                            SELECT s.ctid FROM tokenkeeper.sweep_topic AS s
                            WHERE s.run_id >= $1 AND s.run_id < (SELECT min(o.run_id) FROM tokenkeeper.sweep_run AS o)
                            ORDER BY s.run_id LIMIT $2))
                        RETURNING r.run_id
                    )
                    SELECT max(g.run_id) FROM gone AS g
                    """, [.int8(after), .int8(Int64(size))])
                return (row.integer(0, 0), [("refused", 0)])
            }
        }
    }

    /// Deletes what meets a condition, page by page: for tables that have no index that would find it.
    ///
    /// - Parameter condition: On the row `r`, with the retention in microseconds as $1.
    private func delete(
        from table: String, where condition: String, _ retention: Duration, into findings: inout Findings,
        on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let table = "tokenkeeper.\(table)"
        try attempt(table, into: &findings) {
            do {
                try eachSlice(of: table, largest: 4096, on: &connection, while: goesOn) { connection, pages in
                    _ = try connection.query(
                        "DELETE FROM \(table) AS r WHERE \(Self.on(pages, alias: "r.")) AND \(condition)",
                        [.int8(retention.microseconds)])
                    return [("refused", 0)]
                }
            } catch let error as DatabaseError where error.sqlState == "55P03" {
                // Somebody holds a row of it locked: the next sweep will do.
            }
        }
    }
}
