internal import TokenModel

/// The tokens that a sweep prunes: counted by topic first (`DueSurvey`), then deleted in batches.
extension Sweep {
    /// One statement checks this many topics for due tokens.
    private static let topicsAtOnce = 1000

    func pruneTokens(
        into findings: inout SweepFindings, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let topics = try DueTokens.Topic.all(plan, on: &connection)
        var survey = try DueSurvey(self, on: &connection)
        try attempt("tokens that nobody registers again", into: &findings) {
            try survey.findDormant(in: topics, on: &connection, while: goesOn)
        }
        var dormant: [DueTokens] = []
        for first in stride(from: 0, to: topics.count, by: Self.topicsAtOnce) {
            let some = topics[first..<min(first + Self.topicsAtOnce, topics.count)]
            dormant += try pruneSuppressed(some, &survey, into: &findings, on: &connection, while: goesOn)
        }
        if lease.dryRun { return }
        try attempt("tokens that nobody registers again", into: &findings) {
            try pruneDormant(dormant, survey.dormantPages, on: &connection, while: goesOn)
        }
    }

    /// Surveys some topics, and prunes the suppressed tokens of the topics that are not refused.
    ///
    /// - Returns: The topics that are not refused and have dormant tokens due.
    private func pruneSuppressed(
        _ topics: ArraySlice<DueTokens.Topic>, _ survey: inout DueSurvey, into findings: inout SweepFindings,
        on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> [DueTokens] {
        let suppressed = try survey.withAnyDue(topics, on: &connection, while: goesOn)
        var dormant: [DueTokens] = []
        for topic in topics where suppressed.contains(topic.number) || survey.dormant[topic.number] != nil {
            try attempt(topic.words, into: &findings) {
                let due = try survey.due(
                    in: topic, suppressed: suppressed.contains(topic.number), on: &connection, while: goesOn)
                try record(due, on: &connection, while: goesOn)
                if !lease.dryRun, !due.isRefused { try pruneSuppressed(topic, on: &connection, while: goesOn) }
                return due
            }.map { due in
                if due.isRefused {
                    findings.refusals.append(due.refusal)
                } else if due.dormant > 0 {
                    dormant.append(due)
                }
            }
        }
        return dormant
    }

    /// Records what is due in a topic. A dry run counts it as pruned.
    private func record(_ due: DueTokens, on connection: inout Connection, while goesOn: () -> Bool) throws {
        try step(on: &connection, while: goesOn) { connection, counts in
            try due.record(run: lease.runID, on: &connection)
            if due.isRefused {
                counts.refused = due.total
            } else if lease.dryRun {
                (counts.prunedSuppressed, counts.prunedDormant) = (due.total - due.dormant, due.dormant)
            }
        }
    }

    /// Prunes the tokens of a topic that have been suppressed for longer than the retention, the oldest first.
    private func pruneSuppressed(
        _ topic: DueTokens.Topic, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        // Each batch begins where the previous one ended: from the front, it would first skip all tokens that have been deleted.
        var since = Instant.distantPast
        // From the disk, a token takes about a millisecond.
        var batch = SliceSize(500, in: min(plan.batch, 50)...plan.batch)
        while true {
            let (pruned, reached) = try slice(&batch, settings: Self.byIndex, on: &connection, while: goesOn) {
                connection, counts, most in
                let (pruned, reached) = try pruneBatch(of: topic, since: since, most: most, on: &connection)
                counts.prunedSuppressed = pruned
                return (pruned, reached ?? since)
            }
            // An application may have changed every token of a batch in the meantime, so there can be more behind it.
            if pruned == 0, reached == since { return }
            since = reached
        }
    }

    /// Prunes a batch of suppressed tokens. A token that has changed since the statement began survives: its new row has another `ctid`, which the
    /// statement does not see. Rows that an application has locked are left for the next sweep.
    ///
    /// - Returns: How many tokens were pruned, and the latest `since` of the due tokens' suppressions; nil if none was due.
    private func pruneBatch(
        of topic: DueTokens.Topic, since: Instant, most: Int, on connection: inout Connection
    ) throws(DatabaseError) -> (pruned: Int64, reached: Instant?) {
        try connection.query(
            """
            WITH due AS MATERIALIZED (
                SELECT l.place, s.since
                FROM (SELECT d.* FROM tokenkeeper.suppression AS d
                      WHERE d.topic_id + 0 = $2 AND d.since < $3 AND d.since >= $4 ORDER BY d.since OFFSET 0) AS s
                CROSS JOIN LATERAL (
                    SELECT k.ctid AS place FROM tokenkeeper.ledger AS k
                    WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key AND k.suppressed FOR UPDATE SKIP LOCKED) AS l
                LIMIT $5
            ), gone AS (
                -- By place: a join could be planned as a scan of the whole ledger.
                DELETE FROM tokenkeeper.ledger AS l
                WHERE l.ctid = ANY (ARRAY(SELECT d.place FROM due AS d))
                  -- CASE keeps the condition from an index, whose entries would each be compared with all those places.
                  AND CASE WHEN l.topic_id = $2 AND l.suppressed THEN true END
                RETURNING l.*,
                    tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS cause
            ), \(Self.bookkeeping)
            SELECT coalesce((SELECT sum(c.tokens) FROM counts AS c), 0)::bigint,
                   (SELECT max(d.since) FROM due AS d)
            """,
            [
                .int8(lease.runID), .int4(topic.number), .instant(topic.suppressedBefore), .instant(since),
                .int8(Int64(most)),
            ]
        ).one { row throws(DatabaseError) in (try row.read(), try row.read()) }
    }

    /// What follows from the rows `gone` with their `cause`: their receipts are deleted; the run ($1), the topics and the
    /// history record it.
    static let bookkeeping = """
        counts AS MATERIALIZED (
            SELECT g.topic_id, g.cause, count(*) AS tokens FROM gone AS g GROUP BY 1, 2
        ), counted AS (
            UPDATE tokenkeeper.sweep_topic AS s SET pruned = s.pruned + c.tokens
            FROM counts AS c JOIN tokenkeeper.topic AS t USING (topic_id)
            WHERE s.run_id = $1 AND s.environment = t.environment AND s.topic = t.topic AND s.cause = c.cause
        ), pruned AS (
            -- The history keeps the topic.
            INSERT INTO tokenkeeper.topic_prune AS p (topic_id) SELECT DISTINCT c.topic_id FROM counts AS c
            ON CONFLICT (topic_id) DO UPDATE SET pruned_at = excluded.pruned_at
        ), receipts AS (
            DELETE FROM tokenkeeper.receipt AS r USING gone AS g
            WHERE r.topic_id = g.topic_id AND r.token_key = g.token_key
            RETURNING r.topic_id, r.token_key, r.received_at, r.cause, g.cause AS of_token
        ), not_restorable AS (
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens, pruned)
            SELECT tokenkeeper.hour_of(l.received_at), l.topic_id, l.cause, 0, count(*)
            FROM (SELECT r.topic_id, r.cause, max(r.received_at) AS received_at FROM receipts AS r WHERE r.cause = r.of_token
                  GROUP BY r.topic_id, r.token_key, r.cause) AS l
            GROUP BY 1, 2, 3
        ), history AS (
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
                registered_before, invalidated_before)
            SELECT g.topic_id, g.token_key, 'pruned', g.cause,
                   CASE g.cause WHEN 'stale' THEN g.stale_reason WHEN 'suspect' THEN g.suspect_reason END, g.device_id, g.user_id,
                   nullif(g.registered_at, '-infinity'), greatest(g.stale_at, g.suspect_at, g.logged_out_at, g.superseded_at)
            FROM gone AS g
        )
        """
}
