/// A sweep under way: clears away, in bounded batches, each a short transaction of its own.
///
/// A batch that is interrupted is rolled back; what the batches before it did stays, and the next sweep goes on from there.
public struct Sweep {
    private let lease: SweepLease
    private let plan: SweepPlan
    private let transaction: BatchTransaction

    public init(_ lease: SweepLease, _ plan: SweepPlan, lockTimeout: Duration) {
        self.lease = lease
        self.plan = plan
        self.transaction = BatchTransaction(lockTimeout: lockTimeout)
    }

    /// Why a sweep did not come to its end by itself.
    private enum Ended: Error {
        case stopped
        case leaseLost
    }

    /// Sweeps to the end, and says in `sweep_run` how it went.
    ///
    /// - Parameter goesOn: Asked before each batch.
    /// - Throws: Only when the outcome could not be written down, because the connection is lost; then the run shows as
    ///   interrupted once its heartbeat is old.
    public func perform(on connection: inout Connection, while goesOn: () -> Bool) throws(DatabaseError) -> SweepReport
    {
        let outcome: SweepReport.Outcome
        let message: String?
        do {
            try clearAway(on: &connection, while: goesOn)
            (outcome, message) = (.finished, nil)
        } catch Ended.stopped {
            (outcome, message) = (.interrupted, "the daemon was stopped; the next sweep goes on where this one stopped")
        } catch Ended.leaseLost {
            (outcome, message) = (.interrupted, nil)
        } catch let error as DatabaseError {
            if error.remedy == .reconnect { throw error }
            (outcome, message) = (.failed, error.description)
        } catch {
            (outcome, message) = (.failed, "\(error)")
        }
        return try finish(outcome, message, on: &connection)
    }

    private func clearAway(on connection: inout Connection, while goesOn: () -> Bool) throws {
        let topics = try connection.query("SELECT topic_id FROM tokenkeeper.topic ORDER BY topic_id")
        for topic in (0..<topics.count).compactMap({ topics.integer($0, 0) }) {
            try pruneSuppressed(Int32(topic), on: &connection, while: goesOn)
        }
        if let dormantAfter = plan.dormantAfter {
            try pruneDormant(dormantAfter, on: &connection, while: goesOn)
        }
        try batches("deleted_rejected", on: &connection, while: goesOn) { limit in
            (
                """
                DELETE FROM tokenkeeper.rejected_result
                WHERE rejected_id IN (SELECT rejected_id FROM tokenkeeper.rejected_result
                                      WHERE rejected_at < now() - $1 * interval '1 microsecond'
                                      ORDER BY rejected_id LIMIT \(limit) FOR UPDATE SKIP LOCKED)
                RETURNING 1
                """,
                "SELECT count(*) FROM tokenkeeper.rejected_result WHERE rejected_at < now() - $1 * interval '1 microsecond'",
                [.int8(plan.rejectedRetention.microseconds)]
            )
        }
        try batches("deleted_runs", on: &connection, while: goesOn) { limit in
            (
                """
                DELETE FROM tokenkeeper.sweep_run
                WHERE run_id IN (SELECT run_id FROM tokenkeeper.sweep_run
                                 WHERE finished_at < now() - $1 * interval '1 microsecond'
                                 ORDER BY run_id LIMIT \(limit) FOR UPDATE SKIP LOCKED)
                RETURNING 1
                """,
                "SELECT count(*) FROM tokenkeeper.sweep_run WHERE finished_at < now() - $1 * interval '1 microsecond'",
                [.int8(plan.eventRetention.microseconds)]
            )
        }
        if !lease.dryRun {
            try forgetHistory(on: &connection, while: goesOn)
        }
    }

    /// Tokens that have been suppressed for longer than the retention.
    private func pruneSuppressed(_ topic: Int32, on connection: inout Connection, while goesOn: () -> Bool) throws {
        let isDue =
            "l.topic_id = $1 AND l.suppressed AND l.suppressed_since < now() - $2 * interval '1 microsecond'"
        try batches("pruned_suppressed", on: &connection, while: goesOn) { limit in
            (
                Self.prune(isDue, order: "ORDER BY l.suppressed_since LIMIT \(limit)"),
                "SELECT count(*) FROM tokenkeeper.ledger AS l WHERE \(isDue)",
                [.int4(topic), .int8(plan.staleRetention.microseconds)]
            )
        }
    }

    /// Tokens that no app has registered again for too long. They bear no index: the ledger is read from front to end.
    private func pruneDormant(_ age: Duration, on connection: inout Connection, while goesOn: () -> Bool) throws {
        let isDue =
            "NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < now() - $1 * interval '1 microsecond'"
        let pages =
            try connection.query(
                "SELECT pg_relation_size('tokenkeeper.ledger') / current_setting('block_size')::bigint"
            ).integer(0, 0) ?? 0
        // So many pages hold some tens of rows each: about a batch.
        let step = max(Int64(plan.batch) / 64, 1)
        if lease.dryRun {
            try batches("pruned_dormant", on: &connection, while: goesOn) { _ in
                ("", "SELECT count(*) FROM tokenkeeper.ledger AS l WHERE \(isDue)", [.int8(age.microseconds)])
            }
            return
        }
        for page in stride(from: 0, to: pages, by: Int(step)) {
            let inRange = "l.ctid >= '(\(page),0)' AND l.ctid < '(\(page + step),0)' AND \(isDue)"
            let prune = Self.prune(isDue, due: inRange, order: "LIMIT \(plan.batch)")
            while try batch("pruned_dormant", prune, [.int8(age.microseconds)], on: &connection, while: goesOn) > 0 {}
        }
    }

    /// Deletes what is due, and tells it in the history. The predicate stands twice: a token that came back between the
    /// look and the delete survives. What an application holds locked is left to the next sweep.
    private static func prune(_ isDue: String, due: String? = nil, order: String) -> String {
        """
        WITH due AS MATERIALIZED (
            SELECT l.topic_id, l.token_key FROM tokenkeeper.ledger AS l WHERE \(due ?? isDue) \(order) FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM tokenkeeper.ledger AS l USING due AS d
            WHERE l.topic_id = d.topic_id AND l.token_key = d.token_key AND \(isDue)
            RETURNING l.*
        )
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, invalidated_before)
        SELECT g.topic_id, g.token_key, 'pruned', coalesce(c.cause, 'dormant'),
               CASE c.cause WHEN 'dead' THEN g.dead_reason WHEN 'suspect' THEN g.suspect_reason END, g.device_id,
               nullif(g.registered_at, '-infinity'), greatest(g.dead_at, g.suspect_at, g.unregistered_at, g.superseded_at)
        FROM gone AS g
        CROSS JOIN LATERAL (SELECT CASE WHEN g.suppressed
            THEN tokenkeeper.cause_of(g.dead_at, g.suspect_at, g.unregistered_at, g.superseded_at) END AS cause) AS c
        RETURNING 1
        """
    }

    /// History and counts: small things that are one statement each.
    private func forgetHistory(on connection: inout Connection, while goesOn: () -> Bool) throws {
        try inTransaction("SELECT tokenkeeper.roll_up_result_count()", [], on: &connection)
        try inTransaction(
            "DELETE FROM tokenkeeper.result_count WHERE hour < now() - $1 * interval '1 microsecond'",
            [.int8(plan.eventRetention.microseconds)], on: &connection)
        do {
            try inTransaction("SELECT tokenkeeper.prepare_event_months()", [], on: &connection)
            while try forgetMonth(on: &connection, while: goesOn) {}
        } catch let error as DatabaseError where error.sqlState == "55P03" {
            // Somebody reads the history at length: the next sweep will do. Months are prepared well ahead.
        }
    }

    /// One month a transaction: its lock keeps registrations waiting.
    private func forgetMonth(on connection: inout Connection, while goesOn: () -> Bool) throws -> Bool {
        guard goesOn() else { throw Ended.stopped }
        do {
            try connection.run(transaction.begin)
            let events = try connection.query(
                "SELECT tokenkeeper.forget_event_month(now() - $1 * interval '1 microsecond')",
                [.int8(plan.eventRetention.microseconds)]
            ).integer(0, 0)
            guard try note("deleted_events", events ?? 0, on: &connection) else { throw Ended.leaseLost }
            try connection.commit()
            return events != nil
        } catch {
            connection.rollback()
            throw error
        }
    }

    private func inTransaction(
        _ statement: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            _ = try connection.query(statement, parameters)
        }
    }

    /// Repeats a batch until it finds nothing; in a dry run counts once.
    private func batches(
        _ column: String, on connection: inout Connection, while goesOn: () -> Bool,
        _ statements: (_ limit: Int) -> (delete: String, count: String, parameters: [Parameter])
    ) throws {
        let (delete, count, parameters) = statements(plan.batch)
        if lease.dryRun {
            try batch(column, count, parameters, on: &connection, while: goesOn)
        } else {
            while try batch(column, delete, parameters, on: &connection, while: goesOn) > 0 {}
        }
    }

    @discardableResult
    private func batch(
        _ column: String, _ statement: String, _ parameters: [Parameter], on connection: inout Connection,
        while goesOn: () -> Bool
    ) throws -> Int64 {
        guard goesOn() else { throw Ended.stopped }
        do {
            try connection.run(transaction.begin)
            let found = try connection.query(statement, parameters)
            let rows = lease.dryRun ? found.integer(0, 0) ?? 0 : Int64(found.count)
            // Another daemon may have taken over: what this batch did is then undone.
            guard try note(column, rows, on: &connection) else { throw Ended.leaseLost }
            try connection.commit()
            return rows
        } catch {
            connection.rollback()
            throw error
        }
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

    private func finish(
        _ outcome: SweepReport.Outcome, _ message: String?, on connection: inout Connection
    ) throws(DatabaseError) -> SweepReport {
        try inTransaction(
            """
            UPDATE tokenkeeper.sweep_run SET outcome = $2, message = $3, finished_at = clock_timestamp()
            WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $4
            """, [.int8(lease.runID), .text(outcome.rawValue), .text(message), .text(lease.holder)], on: &connection)
        let row = try connection.query(
            """
            SELECT outcome, message, pruned_suppressed, pruned_dormant, deleted_events, deleted_rejected, deleted_runs
            FROM tokenkeeper.sweep_run WHERE run_id = $1
            """, [.int8(lease.runID)])
        return SweepReport(
            runID: lease.runID, trigger: lease.trigger, dryRun: lease.dryRun,
            outcome: row.text(0, 0).flatMap(SweepReport.Outcome.init(rawValue:)) ?? outcome,
            prunedSuppressed: row.integer(0, 2) ?? 0, prunedDormant: row.integer(0, 3) ?? 0,
            deletedEvents: row.integer(0, 4) ?? 0, deletedRejected: row.integer(0, 5) ?? 0,
            deletedRuns: row.integer(0, 6) ?? 0, message: row.text(0, 1))
    }
}
