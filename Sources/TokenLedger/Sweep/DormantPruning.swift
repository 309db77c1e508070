internal import TokenModel

/// The tokens that no app has registered again. They are in no index: they are pruned on the pages where `DueSurvey` has found some.
extension Sweep {
    /// How many dormant tokens may still be pruned, by the topic's number. An import of old registrations may add dormant tokens
    /// after the survey. No more tokens are pruned than were counted, except for one batch at most in every topic but the last.
    private struct Allowance {
        private let topics: [DueTokens.Topic]
        private var left: [Int32: Int64]

        init(_ due: [DueTokens]) {
            topics = due.map(\.topic)
            left = Dictionary(uniqueKeysWithValues: due.map { ($0.topic.number, $0.dormant) })
        }

        /// The topics whose allowance is not used up.
        var unspent: [DueTokens.Topic] { topics.filter { left[$0.number, default: 0] > 0 } }

        /// How many tokens may still be pruned in all topics together.
        var total: Int64 { left.values.filter { $0 > 0 }.reduce(0, +) }

        mutating func take(_ tokens: Int64, of topic: Int32) { left[topic, default: 0] -= tokens }
    }

    func pruneDormant(
        _ due: [DueTokens], _ pages: [Range<Int>], on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        var allowance = Allowance(due)
        // This many pages hold about a batch: each page has some tens of rows.
        let some = max(plan.batch / 64, 1)
        for range in pages {
            for page in stride(from: range.lowerBound, to: range.upperBound, by: some) {
                let pages = page..<min(page + some, range.upperBound)
                while try pruneDormantBatch(on: pages, &allowance, on: &connection, while: goesOn) {}
            }
        }
    }

    /// - Returns: False if nothing was pruned: nothing is due on these pages any more, or nothing is left of the allowance.
    private func pruneDormantBatch(
        on pages: Range<Int>, _ allowance: inout Allowance, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Bool {
        let (topics, limit) = (allowance.unspent, allowance.total)
        if topics.isEmpty { return false }
        let pruned = try step(settings: Self.byIndex, on: &connection, while: goesOn) { connection, counts in
            let pruned = try pruneBatch(of: topics, on: pages, limit: limit, on: &connection)
            counts.prunedDormant = pruned.reduce(0) { $0 + $1.tokens }
            return pruned
        }
        for (topic, tokens) in pruned { allowance.take(tokens, of: topic) }
        return !pruned.isEmpty
    }

    /// Prunes a batch of dormant tokens on some pages of the ledger, like a batch of suppressed tokens.
    ///
    /// - Returns: How many of each topic were pruned.
    private func pruneBatch(
        of topics: [DueTokens.Topic], on pages: Range<Int>, limit: Int64, on connection: inout Connection
    ) throws(DatabaseError) -> [(topic: Int32, tokens: Int64)] {
        try connection.query(
            """
            WITH due AS MATERIALIZED (
                SELECT l.ctid AS place
                FROM tokenkeeper.ledger AS l JOIN unnest($2, $3) AS p (topic_id, before) ON p.topic_id = l.topic_id
                WHERE \(Self.on(pages, alias: "l"))
                  AND NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < p.before
                LIMIT $4 FOR UPDATE OF l SKIP LOCKED
            ), gone AS (
                DELETE FROM tokenkeeper.ledger AS l USING unnest($2, $3) AS p (topic_id, before)
                WHERE l.ctid = ANY (ARRAY(SELECT d.place FROM due AS d)) AND p.topic_id = l.topic_id + 0
                  AND CASE WHEN NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < p.before THEN true END
                RETURNING l.*, 'dormant' AS cause
            ), \(Self.bookkeeping)
            SELECT c.topic_id, c.tokens FROM counts AS c
            """,
            [
                .int8(lease.runID), .int4s(topics.map(\.number)), .instants(topics.map(\.dormantBefore)),
                .int8(min(Int64(plan.batch), limit)),
            ]
        ).decode { row throws(DatabaseError) in (topic: try row.read(), tokens: try row.read()) }
    }
}
