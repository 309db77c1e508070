public import TokenModel

/// Counts the tokens by topic and state, for `status`, the guard's share and the sweep's limit. It takes at most 1 % of the daemon's time.
///
/// Topics are counted one by one, in slices. Another daemon, or the next start, continues where a count stopped. Half of the slices go
/// to the topic with the oldest count, so that no topic waits forever. The other half go to topics that cost little for the age of
/// their count, so that a small topic does not wait for a large one.
public struct TokenCount {
    private var again = ContinuousClock.now
    /// When the share of time spent is down to 1 % again.
    private var rested = ContinuousClock.now
    private var writesSeen: Int64 = -1
    /// When this daemon last noticed that something had been written, by the server's clock.
    private var writtenAt = Instant.distantPast
    private var confirmAgain = ContinuousClock.now
    /// The number of tokens in a slice.
    private var slice = 20_000
    private var adapts = true
    private let clock = ContinuousClock()

    /// The shortest pause between two turns.
    let pause: Duration
    /// How long a turn lasts: usually; while some topic has never been counted; and when it looks only at new topics.
    private static let turn: (usual: Duration, first: Duration, new: Duration) = (
        .milliseconds(100), .seconds(5), .milliseconds(20)
    )
    /// How long a slice should take.
    private static let wanted = Duration.milliseconds(25)...Duration.milliseconds(100)
    private static let tokens = 1000...200_000
    /// How often a count is confirmed. The guard trusts it for a day.
    private static let confirmEvery: Duration = .seconds(600)

    public init(_ timing: Timing) { pause = timing.tokenCount }

    /// - Parameters:
    ///   - slice: Tokens in each slice, however long a slice takes.
    ///   - writtenAt: When the ledger was last written; nil for long ago.
    init(slice: Int, writtenAt: Instant? = nil) {
        self.init(.production)
        self.slice = slice
        adapts = false
        self.writtenAt = writtenAt ?? .distantPast
    }

    /// Counts for a turn, if it is time and the ledger has been written since the last count.
    ///
    /// - Parameter stop: Cancels the current slice, which is then counted again.
    public mutating func refresh(on connection: inout Connection, stop: Wakeup) throws(DatabaseError) {
        guard clock.now >= again else { return }
        let began = clock.now
        again = began + pause
        let (writes, seenAt) = try connection.query(
            """
            SELECT pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid),
                   clock_timestamp()
            FROM pg_catalog.pg_class AS c WHERE c.oid = 'tokenkeeper.ledger'::regclass
            """
        ).one { row throws(DatabaseError) in (try row.read(Int64.self), try row.read(Instant.self)) }
        if writes != writesSeen {
            writesSeen = writes
            writtenAt = seenAt
        }
        let due = try due(on: &connection)
        if due.isEmpty { return try confirm(on: &connection) }
        let isRested = clock.now >= rested
        let end =
            began + (!isRested ? Self.turn.new : due.contains(where: \.isFirst) ? Self.turn.first : Self.turn.usual)
        // This holds after a slice that timed out, too: the next one would also time out.
        defer { if isRested { rested = clock.now + began.duration(to: clock.now) * 100 } }
        var turns = due.filter { isRested || $0.isNew }
        while !turns.isEmpty {
            var counts = false
            for topic in turns {
                if clock.now >= end { return }
                do {
                    if try count(topic.number, on: &connection, stop: stop) { counts = true }
                } catch {
                    if error.remedy != .retry { throw error }
                    slice = max(slice / 2, Self.tokens.lowerBound)
                    return
                }
            }
            // Topics that are not finished continue; the order has changed.
            turns = isRested && counts ? try self.due(on: &connection) : []
        }
    }

    /// Counts a slice of a topic, in a transaction of its own.
    ///
    /// - Returns: False if the topic is gone, or another daemon is counting it.
    @discardableResult
    mutating func count(
        _ topic: Int32, on connection: inout Connection, stop: Wakeup
    ) throws(DatabaseError) -> Bool {
        let began = clock.now
        let most = slice
        let counted = try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.count_tokens($1, $2)", [.int4(topic), .int4(Int32(most))], cancelWhen: stop
            ).value(Int64?.self)
        }
        let took = began.duration(to: clock.now)
        if !adapts { return counted != nil }
        if took > Self.wanted.upperBound { slice = max(slice / 2, Self.tokens.lowerBound) }
        if took < Self.wanted.lowerBound, counted == Int64(slice) { slice = min(slice * 2, Self.tokens.upperBound) }
        return counted != nil
    }

    /// A topic to be counted.
    struct Due {
        var number: Int32
        /// Whether the topic has never been counted completely.
        var isFirst: Bool
        /// Whether no slice of the topic has been counted.
        var isNew: Bool
    }

    /// The topics to be counted, in the order of their turns.
    func due(on connection: inout Connection) throws(DatabaseError) -> [Due] {
        try connection.query(
            """
            SELECT d.topic_id, d.counted_at IS NULL, d.counted_at IS NULL AND d.begun_at IS NULL FROM (
                SELECT t.topic_id, p.counted_at, p.begun_at,
                       row_number() OVER (ORDER BY p.counted_at NULLS FIRST, p.begun_at NULLS LAST, t.topic_id) AS by_age,
                       -- A topic without a counted slice may be small: the first slice shows it.
                       row_number() OVER (ORDER BY coalesce(
                           extract(epoch FROM clock_timestamp() - coalesce(p.counted_at, p.begun_at))
                           / greatest(coalesce(p.counted, p.tokens), 1000), 'infinity') DESC, t.topic_id) AS by_cost
                FROM tokenkeeper.topic AS t LEFT JOIN tokenkeeper.token_count_progress AS p ON p.topic_id = t.topic_id
                WHERE coalesce(p.counted_at < $1, true)) AS d
            ORDER BY least(2 * d.by_age, 2 * d.by_cost + 1), d.by_age LIMIT 1000
            """, [.instant(writtenAt)]
        ).decode { row throws(DatabaseError) in
            Due(number: try row.read(), isFirst: try row.read(), isNew: try row.read())
        }
    }

    /// Confirms all counts, because nothing has been written since, and deletes the counts of topics that are gone.
    private mutating func confirm(on connection: inout Connection) throws(DatabaseError) {
        guard clock.now >= confirmAgain else { return }
        confirmAgain = clock.now + Self.confirmEvery
        do {
            try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
                connection throws(DatabaseError) in
                for table in ["token_count", "token_count_part", "token_count_progress"] {
                    try connection.run(
                        """
                        DELETE FROM tokenkeeper.\(table) AS c
                        WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.topic_id = c.topic_id)
                        """)
                }
                try connection.run("UPDATE tokenkeeper.token_count SET counted_at = clock_timestamp()")
            }
        } catch let error where error.remedy == .retry {
            // Another daemon is doing the same.
        }
    }
}
