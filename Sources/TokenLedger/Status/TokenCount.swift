/// Counts the tokens by topic and state, for `status`: at most a hundredth of the time goes into it.
public struct TokenCount {
    private var again = ContinuousClock.now
    private var writesSeen: Int64 = -1
    private let clock = ContinuousClock()

    /// The shortest pause between two counts.
    static let pause: Duration = .seconds(10)

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
        if writes == writesSeen { return }
        let began = clock.now
        do {
            try connection.run(
                """
                BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
                SET LOCAL synchronous_commit = off;
                SET LOCAL lock_timeout = '100ms';
                SET LOCAL statement_timeout = '10min';
                SET LOCAL jit = off;
                """)
            let free = try connection.run(
                "SELECT pg_try_advisory_xact_lock(\(Advisory.lockClass), \(Advisory.tokenCount))"
            ).text(0, 0)
            if free == "t" {
                _ = try connection.query(
                    """
                    WITH counted AS MATERIALIZED (
                        SELECT l.topic_id, CASE WHEN NOT l.suppressed THEN 'active'
                            ELSE tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) END AS word,
                            count(*) AS tokens
                        FROM tokenkeeper.ledger AS l GROUP BY 1, 2
                    ), cleared AS (
                        DELETE FROM tokenkeeper.token_count AS c
                        WHERE NOT EXISTS (SELECT FROM counted AS n WHERE n.topic_id = c.topic_id AND \(Self.stateInSQL) = c.state)
                    )
                    INSERT INTO tokenkeeper.token_count AS c (topic_id, state, tokens, counted_at)
                    SELECT n.topic_id, \(Self.stateInSQL), n.tokens, clock_timestamp() FROM counted AS n
                    ON CONFLICT (topic_id, state) DO UPDATE SET tokens = excluded.tokens, counted_at = excluded.counted_at
                    """, cancelWhen: stop)
            }
            try connection.commit()
        } catch {
            connection.rollback()
            if error.remedy != .retry { throw error }
            // Cut off: it would be, again. Next time after the same share of time as if it had come to its end.
            again = max(again, clock.now + began.duration(to: clock.now) * 100)
            return
        }
        writesSeen = writes
        again = max(again, clock.now + began.duration(to: clock.now) * 100)
    }

    private static let stateInSQL =
        "CASE n.word WHEN 'dead' THEN 'stale' WHEN 'unregistered' THEN 'unregistered_by_app' ELSE n.word END"
}
