internal import TokenModel

/// The tokens that a sweep prunes: counted by topic first, then deleted in batches.
extension Sweep {
    /// So many topics are looked at in one statement for anything that is due.
    private static let topicsAtOnce = 1000

    func pruneTokens(
        into findings: inout Findings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let topics = try DueTokens.Topic.all(plan, on: &connection)
        let prunedToday = try prunedToday(on: &connection)
        var survey = DueSurvey(self)
        var dormant: [Int32: (tokens: Int64, samples: [String])] = [:]
        var pages: [Range<Int>] = []
        try attempt("tokens that nobody registers again", into: &findings) {
            (dormant, pages) = try survey.dormant(in: topics, on: &connection, while: goesOn)
        }
        var toPrune: [DueTokens] = []
        for first in stride(from: 0, to: topics.count, by: Self.topicsAtOnce) {
            let some = topics[first..<min(first + Self.topicsAtOnce, topics.count)]
            let suppressed = try withAnyDue(some, on: &connection, while: goesOn)
            for topic in some where suppressed.contains(topic.number) || dormant[topic.number] != nil {
                let found = try attempt(topic.words, into: &findings) {
                    let due = try survey.due(
                        in: topic, suppressed: suppressed.contains(topic.number), dormant: dormant[topic.number],
                        prunedToday: prunedToday[topic.words] ?? 0, on: &connection, while: goesOn)
                    try note(due, on: &connection, while: goesOn)
                    if !lease.dryRun, !due.isRefused { try pruneSuppressed(topic, on: &connection, while: goesOn) }
                    return due
                }
                guard let found else { continue }
                if found.isRefused {
                    findings.refusals.append(found.refusal)
                } else if found.dormant > 0 {
                    toPrune.append(found)
                }
            }
        }
        if lease.dryRun { return }
        try attempt("tokens that nobody registers again", into: &findings) {
            try pruneDormant(toPrune, pages, on: &connection, while: goesOn)
        }
    }

    /// Of some topics, those in which any suppressed token is due; all of them, if that cannot be told in time.
    private func withAnyDue(
        _ topics: ArraySlice<DueTokens.Topic>, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Set<Int32> {
        do {
            return try step(settings: Self.byIndex, on: &connection, while: goesOn) { connection in
                (try DueSurvey.withAnyDue(topics, on: &connection), [("refused", 0)])
            }
        } catch let error as DatabaseError where error.remedy == .retry {
            return Set(topics.map(\.number))
        }
    }

    /// How many tokens sweeps have pruned within the last day without force, by topic.
    private func prunedToday(on connection: inout Connection) throws(DatabaseError) -> [String: Int64] {
        let rows = try connection.query(
            """
            SELECT s.topic || ' (' || s.environment || ')', sum(s.pruned)::bigint
            FROM tokenkeeper.sweep_run AS r JOIN tokenkeeper.sweep_topic AS s USING (run_id)
            WHERE NOT r.forced AND r.started_at > now() - interval '1 day' AND s.pruned > 0
            GROUP BY 1
            """)
        return Dictionary(
            (0..<rows.count).map { (rows.text($0, 0) ?? "", rows.integer($0, 1) ?? 0) }, uniquingKeysWith: +)
    }

    /// Writes down what is due in a topic; a dry run counts it.
    private func note(_ due: DueTokens, on connection: inout Connection, while goesOn: () -> Bool) throws {
        try step(on: &connection, while: goesOn) { connection in
            try due.note(run: lease.runID, on: &connection)
            if lease.dryRun, !due.isRefused {
                return ((), [("pruned_suppressed", due.total - due.dormant), ("pruned_dormant", due.dormant)])
            }
            return ((), [("refused", due.isRefused ? due.total : 0)])
        }
    }

    /// Tokens that have been suppressed for longer than the retention, the longest first.
    private func pruneSuppressed(
        _ topic: DueTokens.Topic, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let prune = prune("l.suppressed_since >= $3", isDue: DueSurvey.isStale, order: "ORDER BY l.suppressed_since")
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

    /// Tokens that no app has registered again for too long, on the pages where the survey has found some: no index knows them.
    private func pruneDormant(
        _ due: [DueTokens], _ pages: [Range<Int>], on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        // An import of old registrations may add some meanwhile: not more than were counted, or at most a batch more in each but the last of several topics.
        var left = Dictionary(uniqueKeysWithValues: due.map { (Int64($0.topic.number), $0.dormant) })
        // So many pages hold some tens of rows each: about a batch.
        let step = max(plan.batch / 64, 1)
        for range in pages {
            for page in stride(from: range.lowerBound, to: range.upperBound, by: step) {
                var pruned: Int64
                repeat {
                    let topics = due.map(\.topic).filter { left[Int64($0.number), default: 0] > 0 }
                    if topics.isEmpty { return }
                    let prune = prune(
                        Self.on(page..<min(page + step, range.upperBound), alias: "l."),
                        isDue: DueSurvey.isDormant(before: "p.before"), by: "unnest($1, $2) AS p (topic_id, before)",
                        most: left.values.filter { $0 > 0 }.reduce(0, +))
                    let parameters: [Parameter] = [
                        .int4s(topics.map(\.number)), .instants(topics.map(\.dormantBefore)),
                    ]
                    pruned = try batch(
                        "pruned_dormant", settings: Self.byIndex, prune, parameters, on: &connection, while: goesOn
                    ) { counts in
                        for row in 0..<counts.count {
                            if let topic = counts.integer(row, 1) {
                                left[topic, default: 0] -= counts.integer(row, 0) ?? 0
                            }
                        }
                    }
                } while pruned > 0
            }
        }
    }

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
            RETURNING l.*, CASE WHEN l.suppressed THEN \(DueSurvey.causeInSQL) ELSE 'dormant' END AS cause
        ), counts AS MATERIALIZED (
            SELECT g.topic_id, g.cause, count(*) AS tokens FROM gone AS g GROUP BY 1, 2
        ), counted AS (
            UPDATE tokenkeeper.sweep_topic AS s SET pruned = s.pruned + c.tokens
            FROM counts AS c JOIN tokenkeeper.topic AS t USING (topic_id)
            WHERE s.run_id = \(lease.runID) AND s.environment = t.environment AND s.topic = t.topic AND s.cause = c.cause
        ), pruned AS (
            -- Its history keeps the topic.
            INSERT INTO tokenkeeper.topic_prune AS p (topic_id) SELECT DISTINCT c.topic_id FROM counts AS c
            ON CONFLICT (topic_id) DO UPDATE SET pruned_at = excluded.pruned_at
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
                   CASE g.cause WHEN 'stale' THEN g.stale_reason WHEN 'suspect' THEN g.suspect_reason END, g.device_id,
                   nullif(g.registered_at, '-infinity'), greatest(g.stale_at, g.suspect_at, g.unregistered_by_app_at, g.superseded_at)
            FROM gone AS g
        )
        SELECT coalesce(c.tokens, 0), c.topic_id, d.since
        FROM (SELECT max(d.suppressed_since) AS since FROM due AS d) AS d LEFT JOIN counts AS c ON true
        """
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
}
