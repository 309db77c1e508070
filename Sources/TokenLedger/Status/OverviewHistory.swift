public import TokenModel

/// What the status page shows of the past. It takes longer to read than `Overview`, so it is read once a minute.
public struct OverviewHistory: Sendable {
    /// How many results of the last 24 hours had a status and a reason.
    public struct Kind: Sendable {
        /// Nil if HTTP has no such status.
        public let status: Int32?
        /// As in `result_stat`; nil if there was none.
        public let reason: String?
        public let results: Int64
    }

    /// The tokens of a topic.
    public struct TopicTokens: Sendable {
        public let environment: String
        public let topic: String
        public let active: Int64
        /// In any state but `active`.
        public let suppressed: Int64
        /// Active tokens that have turned stale within the last 24 clock hours.
        public let newlyStale: Int64
        /// How many were active before.
        public let activeBefore: Int64
    }

    /// A row of `tokenkeeper.sweep_run`.
    public struct Sweep: Sendable {
        /// `run_id`.
        public let number: Int64
        public let trigger: String
        public let outcome: String
        public let isDryRun: Bool
        public let startedAt: Instant?
        public let finishedAt: Instant?
        /// How many tokens it has pruned.
        public let pruned: Int64
        /// How many tokens it refused to prune.
        public let refused: Int64
        public let message: String?
    }

    /// The last 24 hours and the current one, also those without results.
    public let hours: [ResultHour]
    /// The 12 most frequent.
    public let kinds: [Kind]
    /// The 20 topics with the most tokens.
    public let topics: [TopicTokens]
    /// How many topics there are.
    public let topicCount: Int64
    /// The last ten.
    public let sweeps: [Sweep]
    /// Tokens by state, as in `Overview.states`, hour by hour within the last 31 days.
    public let tokens: [[(at: Instant, value: Int64)]]
}

extension OverviewHistory {
    /// Reads it.
    ///
    /// - Parameter limit: How long a statement may take.
    public init(within limit: Duration, on connection: inout Connection) throws(DatabaseError) {
        self = try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            try OverviewHistory(on: &connection)
        }
    }

    private init(on connection: inout Connection) throws(DatabaseError) {
        self.init(
            hours: try ResultHour.latest(of: .all, on: &connection), kinds: try Self.kinds(on: &connection),
            topics: try Self.topics(on: &connection),
            topicCount: try connection.query("SELECT count(*) FROM tokenkeeper.topic", []).value(),
            sweeps: try Self.sweeps(on: &connection), tokens: try Self.tokens(on: &connection))
    }

    private static func kinds(on connection: inout Connection) throws(DatabaseError) -> [Kind] {
        try connection.query(
            """
            SELECT c.status, c.reason, sum(c.results)::bigint AS results
            FROM tokenkeeper.result_count AS c WHERE c.hour > now() - interval '24 hours'
            GROUP BY c.status, c.reason ORDER BY results DESC, c.status, c.reason LIMIT 12
            """, []
        ).decode { row throws(DatabaseError) in
            Kind(status: try row.read(), reason: try row.read(), results: try row.read())
        }
    }

    private static func topics(on connection: inout Connection) throws(DatabaseError) -> [TopicTokens] {
        try connection.query(
            """
            SELECT t.environment, t.topic, c.active, c.suppressed, coalesce(s.newly_stale, 0), coalesce(s.active, c.active)
            FROM (SELECT c.topic_id, coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)::bigint AS active,
                         coalesce(sum(c.tokens) FILTER (WHERE c.state <> 'active'), 0)::bigint AS suppressed
                  FROM tokenkeeper.token_count AS c GROUP BY c.topic_id ORDER BY sum(c.tokens) DESC, c.topic_id LIMIT 20) AS c
            JOIN tokenkeeper.topic AS t USING (topic_id)
            LEFT JOIN tokenkeeper.stale_share AS s ON s.topic = t.topic AND s.environment = t.environment AND s.period = 'day'
            ORDER BY c.active + c.suppressed DESC, t.topic, t.environment
            """, []
        ).decode { row throws(DatabaseError) in
            TopicTokens(
                environment: try row.read(), topic: try row.read(), active: try row.read(), suppressed: try row.read(),
                newlyStale: try row.read(), activeBefore: try row.read())
        }
    }

    private static func sweeps(on connection: inout Connection) throws(DatabaseError) -> [Sweep] {
        try connection.query(
            """
            SELECT s.run_id, s.trigger, s.outcome, s.dry_run, s.started_at, s.finished_at,
                   s.pruned_suppressed + s.pruned_dormant, s.refused, s.message
            FROM tokenkeeper.sweep_run AS s ORDER BY s.run_id DESC LIMIT 10
            """, []
        ).decode { row throws(DatabaseError) in
            Sweep(
                number: try row.read(), trigger: try row.read(), outcome: try row.read(), isDryRun: try row.read(),
                startedAt: try row.read(), finishedAt: try row.read(), pruned: try row.read(), refused: try row.read(),
                message: try row.read())
        }
    }

    private static func tokens(on connection: inout Connection) throws(DatabaseError) -> [[(at: Instant, value: Int64)]]
    {
        var samples = Overview.states.map { _ in [(at: Instant, value: Int64)]() }
        let read = try connection.query(
            """
            SELECT h.hour, array_position($1, h.state) - 1, h.tokens
            FROM tokenkeeper.token_count_hour AS h
            WHERE h.hour > now() - interval '31 days' AND h.state = ANY ($1) ORDER BY h.hour
            """, [.texts(Overview.states)]
        ).decode { row throws(DatabaseError) in
            (at: try row.read(Instant.self), state: try row.read(Int.self), tokens: try row.read(Int64.self))
        }
        for sample in read { samples[sample.state].append((sample.at, sample.tokens)) }
        return samples
    }
}
