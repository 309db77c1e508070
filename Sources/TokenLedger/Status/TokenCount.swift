/// Counts the tokens by topic and state, for `status`, the guard's share and the sweep's limit: at most a hundredth of the time goes into it.
public struct TokenCount {
    private var again = ContinuousClock.now
    private var writesSeen: Int64 = -1
    private var confirmAgain = ContinuousClock.now
    private let clock = ContinuousClock()

    /// The shortest pause between two counts.
    static let pause: Duration = .seconds(10)
    /// How often it is said of a count that it still holds.
    private static let confirmEvery: Duration = .seconds(600)

    public init() {}

    /// Counts if it is time, something was written since, and no other daemon is counting.
    ///
    /// - Parameter stop: Ends a count that is under way; it is then made up for later.
    public mutating func refresh(on connection: inout Connection, stop: Wakeup) throws(DatabaseError) {
        guard clock.now >= again else { return }
        again = clock.now + Self.pause
        let writes =
            try connection.query(
                """
                SELECT pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid)
                FROM pg_catalog.pg_class AS c WHERE c.oid = 'tokenkeeper.ledger'::regclass
                """
            ).integer(0, 0) ?? 0
        if writes == writesSeen {
            // The guard believes a count for an hour.
            if clock.now >= confirmAgain {
                confirmAgain = clock.now + Self.confirmEvery
                try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100)).begin) {
                    connection throws(DatabaseError) in
                    try connection.run("UPDATE tokenkeeper.token_count SET counted_at = clock_timestamp()")
                }
            }
            return
        }
        confirmAgain = clock.now + Self.confirmEvery
        let began = clock.now
        // Also after one that was cut off: it would be, again.
        defer { again = max(again, clock.now + began.duration(to: clock.now) * 100) }
        do {
            let free = try connection.run(
                """
                \(BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: .seconds(600)).begin)
                SELECT pg_try_advisory_xact_lock(\(Advisory.lockClass), \(Advisory.tokenCount))
                """
            ).text(0, 0)
            if free == "t" {
                _ = try connection.query(
                    """
                    WITH counted AS MATERIALIZED (
                        SELECT l.topic_id, tokenkeeper.state_of(l) AS state, count(*) AS tokens,
                               nullif(max(l.registered_at), '-infinity') AS last_registered_at
                        FROM tokenkeeper.ledger AS l GROUP BY 1, 2
                    ), mixed_up AS MATERIALIZED (
                        SELECT l.topic_id, count(*) AS tokens
                        FROM tokenkeeper.ledger AS l
                        JOIN tokenkeeper.topic AS t ON t.topic_id = l.topic_id
                        JOIN tokenkeeper.topic AS o ON o.topic = t.topic AND o.environment <> t.environment
                        JOIN tokenkeeper.ledger AS e ON e.topic_id = o.topic_id AND e.token_key = l.token_key
                        WHERE l.suppressed AND l.registered_at > '-infinity' AND tokenkeeper.state_of(l) = 'suspect'
                          AND NOT e.suppressed AND e.registered_at > '-infinity'
                        GROUP BY 1
                    ), cleared AS (
                        DELETE FROM tokenkeeper.token_count AS c
                        WHERE NOT EXISTS (SELECT FROM counted AS n WHERE n.topic_id = c.topic_id AND n.state = c.state)
                    )
                    INSERT INTO tokenkeeper.token_count AS c (topic_id, state, tokens, last_registered_at, elsewhere, counted_at)
                    SELECT n.topic_id, n.state, n.tokens, n.last_registered_at,
                           CASE n.state WHEN 'suspect' THEN coalesce(m.tokens, 0) ELSE 0 END, clock_timestamp()
                    FROM counted AS n LEFT JOIN mixed_up AS m USING (topic_id)
                    ON CONFLICT (topic_id, state) DO UPDATE SET tokens = excluded.tokens, counted_at = excluded.counted_at,
                        last_registered_at = excluded.last_registered_at, elsewhere = excluded.elsewhere
                    """, cancelWhen: stop)
            }
            try connection.commit()
            writesSeen = writes
        } catch {
            connection.rollback()
            if error.remedy != .retry { throw error }
        }
    }
}
