public import TokenModel

/// What the status page shows of one topic.
public struct TopicDetail: Sendable {
    public let environment: String
    public let topic: String
    public let firstSeen: Instant
    /// Whether its gate only observes.
    public let isObserved: Bool
    /// The database that it has moved to; nil if it is here.
    public let movedTo: String?
    /// Why sending is paused, and since when; nil if it is not.
    public let pause: (reason: String, since: Instant)?
    /// What the guard suppressed or held within a day, by cause.
    public let guards: [Guard]
    /// In the order of `Overview.states`.
    public let tokens: [Int64]
    /// What differs from the defaults, by the column of `topic_policy`.
    public let policy: [(name: String, value: String)]
    /// The hour and the day with the newly stale tokens.
    public let stale: [StaleShare]
    public let hours: [ResultHour]
    /// Nil if it took too long to read, as below.
    public internal(set) var usual: UsualShare?
    /// The tokens that were revived most often within 30 days, at least three times; at most ten.
    public internal(set) var returning: [Returning]?

    public struct Guard: Sendable {
        public let cause: String
        public let hasTripped: Bool
        public let tokens: Int64
    }

    /// A row of `stale_share`.
    public struct StaleShare: Sendable {
        public let period: String
        public let tokens: Int64
        /// As shares of the active tokens; nil if there is no active token.
        public let share: Double?
        public let usualShare: Double?
        public let isWave: Bool
    }

    /// A token that dies and returns again and again.
    public struct Returning: Sendable {
        /// The first digits.
        public let digits: String
        public let times: Int64
        public let lastAt: Instant
        /// Nil if the ledger does not know it any more.
        public let state: String?
    }

    /// Reads it.
    ///
    /// - Returns: Nil if there is no such topic.
    public static func find(
        _ topic: String, environment: String, within limit: Duration, on connection: inout Connection
    ) throws(DatabaseError) -> TopicDetail? {
        let key: [Parameter] = [.text(topic), .text(environment)]
        let found = try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            try read(key, .topic(topic, environment: environment), on: &connection)
        }
        guard var detail = found else { return nil }
        var ignored: DatabaseError?
        detail.usual = try connection.attempt(noting: &ignored) { connection throws(DatabaseError) in
            try UsualShare(of: .topic(topic, environment: environment), within: limit, on: &connection)
        }
        detail.returning = try connection.attempt(noting: &ignored) { connection throws(DatabaseError) in
            try connection.snapshot(within: limit) { connection throws(DatabaseError) in
                try returning(key, on: &connection)
            }
        }
        return detail
    }

    /// The topics whose names contain the text, in their order; one more than `most` if there are more.
    public static func names(
        like text: String, _ most: Int, within limit: Duration, on connection: inout Connection
    ) throws(DatabaseError) -> [(environment: String, topic: String)] {
        try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT t.environment, t.topic FROM tokenkeeper.topic AS t WHERE position(lower($1) IN lower(t.topic)) > 0
                ORDER BY t.topic, t.environment LIMIT $2
                """, [.text(text), .int8(Int64(most + 1))]
            ).decode { row throws(DatabaseError) in (environment: try row.read(), topic: try row.read()) }
        }
    }
}

extension TopicDetail {
    private static func read(
        _ key: [Parameter], _ scope: ResultScope, on connection: inout Connection
    ) throws(DatabaseError) -> TopicDetail? {
        let tokens = try tokens(key, on: &connection)
        let (guards, stale) = (try guards(key, on: &connection), try stale(key, on: &connection))
        let policy = try policy(key, on: &connection)
        let hours = try ResultHour.latest(of: scope, on: &connection)
        return try connection.query(
            """
            SELECT t.environment, t.topic, t.first_seen, t.gate IS NOT DISTINCT FROM 'observe', t.moved_to, p.reason, p.paused_at
            FROM tokenkeeper.topic AS t
            LEFT JOIN tokenkeeper.paused_topic AS p ON p.topic = t.topic AND p.environment = t.environment
            WHERE t.topic = $1 AND t.environment = $2
            """, key
        ).first { row throws(DatabaseError) in
            let (environment, topic) = (try row.read(String.self), try row.read(String.self))
            let (firstSeen, isObserved) = (try row.read(Instant.self), try row.read(Bool.self))
            let movedTo = try row.read(String?.self)
            let reason = try row.read(String?.self)
            let since = try row.read(Instant?.self)
            return TopicDetail(
                environment: environment, topic: topic, firstSeen: firstSeen, isObserved: isObserved, movedTo: movedTo,
                pause: since.map { (reason ?? "", $0) }, guards: guards, tokens: tokens, policy: policy, stale: stale,
                hours: hours)
        }
    }

    private static func tokens(_ key: [Parameter], on connection: inout Connection) throws(DatabaseError) -> [Int64] {
        try connection.query(
            """
            SELECT coalesce(sum(c.tokens), 0)::bigint FROM unnest($3::text[]) WITH ORDINALITY AS s (state, place)
            LEFT JOIN (SELECT c.state, c.tokens FROM tokenkeeper.topic AS t JOIN tokenkeeper.token_count AS c USING (topic_id)
                       WHERE t.topic = $1 AND t.environment = $2) AS c ON c.state = s.state
            GROUP BY s.place ORDER BY s.place
            """, key + [.texts(Overview.states)]
        ).values()
    }

    private static func guards(_ key: [Parameter], on connection: inout Connection) throws(DatabaseError) -> [Guard] {
        try connection.query(
            """
            SELECT g.cause, g.tripped, g.tokens FROM tokenkeeper.guard AS g WHERE g.topic = $1 AND g.environment = $2 ORDER BY g.cause
            """, key
        ).decode { row throws(DatabaseError) in
            Guard(cause: try row.read(), hasTripped: try row.read(), tokens: try row.read())
        }
    }

    private static func stale(
        _ key: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [StaleShare] {
        try connection.query(
            """
            SELECT s.period, s.newly_stale, s.share::float8, s.usual_share::float8, s.is_wave FROM tokenkeeper.stale_share AS s
            WHERE s.topic = $1 AND s.environment = $2 ORDER BY s.period DESC
            """, key
        ).decode { row throws(DatabaseError) in
            StaleShare(
                period: try row.read(), tokens: try row.read(), share: try row.read(), usualShare: try row.read(),
                isWave: try row.read())
        }
    }

    private static func policy(
        _ key: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [(name: String, value: String)] {
        try connection.query(
            """
            SELECT e.key, e.value #>> '{}' FROM tokenkeeper.topic_policy AS p CROSS JOIN LATERAL json_each(row_to_json(p)) AS e
            WHERE p.topic = $1 AND p.environment = $2 AND e.key NOT IN ('environment', 'topic', 'first_seen') AND e.value::text <> 'null'
            ORDER BY e.key
            """, key
        ).decode { row throws(DatabaseError) in (name: try row.read(), value: try row.read()) }
    }

    private static func returning(
        _ key: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [Returning] {
        try connection.query(
            """
            SELECT left(encode(e.token_key, 'hex'), \(TokenDigits.shown)), e.times, e.last_at, v.state
            FROM (SELECT e.token_key, count(*) AS times, max(e.at) AS last_at FROM tokenkeeper.token_event AS e
                  WHERE e.topic = $1 AND e.environment = $2 AND e.event = 'revived' AND e.at > now() - interval '30 days'
                  GROUP BY e.token_key HAVING count(*) >= 3 ORDER BY 2 DESC, 3 DESC LIMIT 10) AS e
            LEFT JOIN LATERAL (
                SELECT t.state FROM tokenkeeper.token AS t
                WHERE t.topic = $1 AND t.environment = $2 AND t.token_key = e.token_key LIMIT 1) AS v ON true
            ORDER BY e.times DESC, e.last_at DESC
            """, key
        ).decode { row throws(DatabaseError) in
            Returning(digits: try row.read(), times: try row.read(), lastAt: try row.read(), state: try row.read())
        }
    }
}
