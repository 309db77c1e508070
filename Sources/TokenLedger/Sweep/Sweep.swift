internal import TokenModel

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
            message = try clearAway(on: &connection, while: goesOn)
            outcome = .finished
        } catch Ended.stopped {
            (outcome, message) = (
                .interrupted,
                lease.forced
                    ? "it was stopped; ask for another one, with force"
                    : "it was stopped; the next sweep goes on from there"
            )
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

    /// - Returns: What it has refused, in words.
    private func clearAway(on connection: inout Connection, while goesOn: () -> Bool) throws -> String? {
        var refusals: [String] = []
        var dormant: [DueTokens] = []
        for topic in try DueTokens.topics(plan, on: &connection) {
            let due = try survey(topic, on: &connection, while: goesOn)
            if due.isRefused {
                refusals.append(due.refusal)
            } else {
                if !lease.dryRun { try pruneSuppressed(topic, on: &connection, while: goesOn) }
                if due.dormant > 0 { dormant.append(due) }
            }
        }
        if !lease.dryRun { try pruneDormant(dormant, on: &connection, while: goesOn) }
        try clearAwayResults(on: &connection, while: goesOn)
        if !lease.dryRun {
            try forgetHistory(on: &connection, while: goesOn)
        }
        var messages = refusals.isEmpty ? [] : ["refused: " + refusals.joined(separator: "; ")]
        if let left = try leftOver(on: &connection) { messages.append(left) }
        return messages.isEmpty ? nil : messages.joined(separator: "; ")
    }

    /// Counts what is due in a topic before anything is deleted.
    private func survey(
        _ topic: DueTokens.Topic, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> DueTokens {
        try step(on: &connection, while: goesOn) { connection in
            let due = try DueTokens(in: topic, forced: lease.forced, on: &connection)
            try due.note(run: lease.runID, on: &connection)
            if lease.dryRun, !due.isRefused {
                return (due, [("pruned_suppressed", due.total - due.dormant), ("pruned_dormant", due.dormant)])
            }
            return (due, [("refused", due.isRefused ? due.total : 0)])
        }
    }

    /// What was due, not refused, and is there still, in words.
    private func leftOver(on connection: inout Connection) throws(DatabaseError) -> String? {
        if lease.dryRun { return nil }
        let left =
            try connection.query(
                "SELECT sum(tokens - pruned)::bigint FROM tokenkeeper.sweep_topic WHERE run_id = $1 AND NOT refused AND tokens > pruned",
                [.int8(lease.runID)]
            ).integer(0, 0) ?? 0
        return left > 0
            ? "\(left) tokens that were due are left to the next sweep: an application holds them locked, or they came back"
            : nil
    }

    /// Results and requests that wait for a person who does not come, and what was told of sweeps long ago.
    private func clearAwayResults(on connection: inout Connection, while goesOn: () -> Bool) throws {
        for (column, table, key, since, retention) in [
            ("deleted_rejected", "rejected_result", "rejected_id", "rejected_at", plan.rejectedRetention),
            ("deleted_held", "held_result", "held_id", "held_at", plan.heldRetention),
            ("deleted_sends", "suppressed_send", "suppressed_id", "suppressed_at", plan.sendRetention),
            ("deleted_sends", "failed_send", "failed_id", "failed_at", plan.sendRetention),
            ("deleted_runs", "sweep_run", "run_id", "finished_at", plan.eventRetention),
        ] {
            let isDue = "\(since) < now() - $1 * interval '1 microsecond'"
            let parameters: [Parameter] = [.int8(retention.microseconds)]
            if lease.dryRun {
                let count = "SELECT count(*) FROM tokenkeeper.\(table) WHERE \(isDue)"
                try batch(column, count, parameters, on: &connection, while: goesOn)
                continue
            }
            let delete = """
                WITH gone AS (
                    DELETE FROM tokenkeeper.\(table)
                    WHERE \(key) IN (SELECT \(key) FROM tokenkeeper.\(table) WHERE \(isDue)
                                     ORDER BY \(key) LIMIT \(plan.batch) FOR UPDATE SKIP LOCKED)
                    RETURNING 1
                )
                SELECT count(*) FROM gone
                """
            while try batch(column, settings: Self.byIndex, delete, parameters, on: &connection, while: goesOn) > 0 {}
        }
    }

    /// Tokens that have been suppressed for longer than the retention, the longest first.
    private func pruneSuppressed(
        _ topic: DueTokens.Topic, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let prune = prune("l.suppressed_since >= $3", isDue: DueTokens.isStale, order: "ORDER BY l.suppressed_since")
        // From where the batch before ended: from the front, each would first go past all that have been deleted.
        var since = Instant.distantPast
        var goesFurther: Bool
        repeat {
            let parameters: [Parameter] = [.int4(topic.number), .instant(topic.staleBefore), .instant(since)]
            var reached = since
            let pruned = try batch(
                "pruned_suppressed", settings: Self.byIndex, prune, parameters, on: &connection, while: goesOn
            ) { counts in
                reached = counts.instant(0, 2) ?? since
            }
            // All of them may have been changed by an application just then: there can be more behind them.
            goesFurther = pruned > 0 || reached > since
            since = reached
        } while goesFurther
    }

    /// Tokens that no app has registered again for too long. They bear no index: the ledger is read from front to end.
    private func pruneDormant(
        _ due: [DueTokens], on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        // An import of old registrations may add some meanwhile: not more than were counted, or at most a batch more in each but the last of several topics.
        var left = Dictionary(uniqueKeysWithValues: due.map { (Int64($0.topic.number), $0.dormant) })
        if left.isEmpty { return }
        let pages =
            try connection.query(
                "SELECT pg_relation_size('tokenkeeper.ledger') / current_setting('block_size')::bigint"
            ).integer(0, 0) ?? 0
        // So many pages hold some tens of rows each: about a batch.
        let step = max(Int64(plan.batch) / 64, 1)
        for page in stride(from: 0, to: pages, by: Int(step)) {
            var pruned: Int64
            repeat {
                let topics = due.map(\.topic).filter { left[Int64($0.number), default: 0] > 0 }
                if topics.isEmpty { return }
                let prune = prune(
                    "l.ctid >= '(\(page),0)' AND l.ctid < '(\(page + step),0)'",
                    isDue: DueTokens.isDormant(before: "p.before"), by: "unnest($1, $2) AS p (topic_id, before)",
                    most: left.values.filter { $0 > 0 }.reduce(0, +))
                let parameters: [Parameter] = [.int4s(topics.map(\.number)), .instants(topics.map(\.dormantBefore))]
                pruned = try batch(
                    "pruned_dormant", settings: Self.byIndex, prune, parameters, on: &connection, while: goesOn
                ) { counts in
                    for row in 0..<counts.count {
                        if let topic = counts.integer(row, 1) { left[topic, default: 0] -= counts.integer(row, 0) ?? 0 }
                    }
                }
            } while pruned > 0
        }
    }

    /// Small statistics and a large ledger: no plan shall then read all of it.
    private static let byIndex = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"

    /// Deletes what is due at some places of the ledger, with all that is kept for it, and tells it in the history. The predicate
    /// stands twice: a token that came back between the look and the delete survives. What an application holds locked is left to
    /// the next sweep.
    ///
    /// - Parameters:
    ///   - retentions: Rows `p` that the predicate needs, of which the one with the token's topic_id is meant.
    ///   - most: No more than so many.
    private func prune(
        _ places: String, isDue: String, by retentions: String? = nil, order: String = "", most: Int64? = nil
    ) -> String {
        """
        WITH due AS MATERIALIZED (
            SELECT l.ctid AS place, l.suppressed_since
            FROM tokenkeeper.ledger AS l \(retentions.map { "JOIN \($0) ON p.topic_id = l.topic_id" } ?? "")
            WHERE \(places) AND \(isDue) \(order)
            LIMIT \(min(Int64(plan.batch), most ?? .max)) FOR UPDATE OF l SKIP LOCKED
        ), gone AS (
            -- Where they were found: a join could be planned as a look at the whole ledger.
            DELETE FROM tokenkeeper.ledger AS l \(retentions.map { "USING \($0)" } ?? "")
            -- Not as a condition that an index knows: its entries would be gone through, each compared with all those places.
            WHERE l.ctid = ANY (ARRAY(SELECT d.place FROM due AS d)) AND CASE WHEN \(isDue) THEN true END
              \(retentions == nil ? "" : "AND p.topic_id = l.topic_id + 0")
            RETURNING l.*, CASE WHEN l.suppressed THEN \(DueTokens.causeInSQL) ELSE 'dormant' END AS cause
        ), counts AS MATERIALIZED (
            SELECT g.topic_id, g.cause, count(*) AS tokens FROM gone AS g GROUP BY 1, 2
        ), counted AS (
            UPDATE tokenkeeper.sweep_topic AS s SET pruned = s.pruned + c.tokens
            FROM counts AS c JOIN tokenkeeper.topic AS t USING (topic_id)
            WHERE s.run_id = \(lease.runID) AND s.environment = t.environment AND s.topic = t.topic AND s.cause = c.cause
        ), suspects AS (
            DELETE FROM tokenkeeper.suspect AS s USING gone AS g
            WHERE g.suspect_at IS NOT NULL AND s.topic_id = g.topic_id AND s.token_key = g.token_key
        ), devices AS (
            DELETE FROM tokenkeeper.device AS d WHERE d.ctid = ANY (ARRAY(
                SELECT e.ctid FROM tokenkeeper.device AS e
                JOIN gone AS g ON g.topic_id = e.topic_id AND g.device_id = e.device_id
                WHERE NOT EXISTS (
                    SELECT FROM tokenkeeper.ledger AS o WHERE o.topic_id + 0 = e.topic_id AND o.device_id = e.device_id
                      -- NOT IN is hashed; NOT EXISTS would read all that is gone for each.
                      AND (o.topic_id, o.token_key) NOT IN (SELECT w.topic_id, w.token_key FROM gone AS w))
                FOR UPDATE OF e SKIP LOCKED))
        ), told AS (
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
                registered_before, invalidated_before)
            SELECT g.topic_id, g.token_key, 'pruned', g.cause,
                   CASE g.cause WHEN 'dead' THEN g.dead_reason WHEN 'suspect' THEN g.suspect_reason END, g.device_id,
                   nullif(g.registered_at, '-infinity'), greatest(g.dead_at, g.suspect_at, g.unregistered_at, g.superseded_at)
            FROM gone AS g
        )
        SELECT coalesce(c.tokens, 0), c.topic_id, d.since
        FROM (SELECT max(d.suppressed_since) AS since FROM due AS d) AS d LEFT JOIN counts AS c ON true
        """
    }

    /// History and counts: months of it, and small things of one statement each.
    private func forgetHistory(on connection: inout Connection, while goesOn: () -> Bool) throws {
        do {
            try tidy("SELECT tokenkeeper.prepare_event_months()", [], on: &connection, while: goesOn)
            while try forgetMonth(on: &connection, while: goesOn) {}
        } catch let error as DatabaseError where error.sqlState == "55P03" {
            // Somebody reads the history at length: the next sweep will do. Months are prepared well ahead.
        }
        try tidy("SELECT tokenkeeper.roll_up_result_count()", [], on: &connection, while: goesOn)
        for (table, at, retention) in [
            ("result_count", "hour", plan.eventRetention), ("operation", "at", plan.eventRetention),
            // No window of the guard reaches further back than two days; a backlog may.
            ("topic_guard_count", "bucket", .seconds(8 * 86_400)),
            ("background_send", "latest_at", .seconds(3600)),
        ] {
            try tidy(
                "DELETE FROM tokenkeeper.\(table) WHERE \(at) < now() - $1 * interval '1 microsecond'",
                [.int8(retention.microseconds)], on: &connection, while: goesOn)
        }
        try tidy(
            "DELETE FROM tokenkeeper.sweep_topic AS s WHERE NOT EXISTS (SELECT FROM tokenkeeper.sweep_run AS r WHERE r.run_id = s.run_id)",
            [], on: &connection, while: goesOn)
        // Those of a token that is suppressed may be undone as long as it is.
        let suspects = """
            DELETE FROM tokenkeeper.suspect AS d WHERE d.ctid = ANY (ARRAY(
                SELECT s.ctid FROM tokenkeeper.suspect AS s JOIN tokenkeeper.topic AS t USING (topic_id)
                WHERE s.queued_at < now() - coalesce(t.stale_retention, $1 * interval '1 microsecond')
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l
                                  WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key AND l.suppressed)
                LIMIT 10000))
            """
        while try tidy(suspects, [.int8(plan.staleRetention.microseconds)], on: &connection, while: goesOn) > 0 {}
    }

    /// One statement in a transaction of its own, which renews the lease.
    ///
    /// - Returns: How many rows it has changed, or answered.
    @discardableResult
    private func tidy(
        _ statement: String, _ parameters: [Parameter], on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Int {
        try step(on: &connection, while: goesOn) { connection in
            (try connection.query(statement, parameters).affected, [("refused", 0)])
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

    /// One transaction of the sweep that deals with rows of one kind.
    ///
    /// - Parameters:
    ///   - column: Where the run counts them.
    ///   - settings: What to SET LOCAL for it.
    ///   - statement: Answers how many rows it has dealt with, or several numbers of which that is the sum.
    ///   - look: Gets what the statement answered.
    /// - Returns: How many rows.
    @discardableResult
    private func batch(
        _ column: String, settings: String = "", _ statement: String, _ parameters: [Parameter],
        on connection: inout Connection, while goesOn: () -> Bool, look: (borrowing Rows) -> Void = { _ in }
    ) throws -> Int64 {
        try step(settings: settings, on: &connection, while: goesOn) { connection in
            let counts = try connection.query(statement, parameters)
            let rows = (0..<counts.count).reduce(0) { $0 + (counts.integer($1, 0) ?? 0) }
            look(counts)
            return (rows, [(column, rows)])
        }
    }

    /// One transaction of the sweep, which renews the lease.
    ///
    /// - Parameter work: Answers what comes of it, and what to add to which counts of the run.
    private func step<Value>(
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
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                UPDATE tokenkeeper.sweep_run SET outcome = $2, message = $3, finished_at = clock_timestamp()
                WHERE run_id = $1 AND outcome = 'running' AND daemon_id = $4
                """, [.int8(lease.runID), .text(outcome.rawValue), .text(message), .text(lease.holder)])
        }
        let row = try connection.query(
            """
            SELECT outcome, message, pruned_suppressed, pruned_dormant, deleted_events, deleted_rejected, deleted_held,
                   deleted_runs, refused, deleted_sends
            FROM tokenkeeper.sweep_run WHERE run_id = $1
            """, [.int8(lease.runID)])
        return SweepReport(
            runID: lease.runID, trigger: lease.trigger, dryRun: lease.dryRun, forced: lease.forced,
            outcome: row.text(0, 0).flatMap(SweepReport.Outcome.init(rawValue:)) ?? outcome,
            prunedSuppressed: row.integer(0, 2) ?? 0, prunedDormant: row.integer(0, 3) ?? 0,
            deletedEvents: row.integer(0, 4) ?? 0, deletedRejected: row.integer(0, 5) ?? 0,
            deletedHeld: row.integer(0, 6) ?? 0, deletedRuns: row.integer(0, 7) ?? 0,
            deletedSends: row.integer(0, 9) ?? 0, refused: row.integer(0, 8) ?? 0,
            message: row.text(0, 1), topics: try SweepReport.Topic.all(of: lease.runID, on: &connection))
    }
}
