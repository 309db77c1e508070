/// Finds tokens by their digits or device: in the ledger, the history and the held results.
///
/// Start here for `explain`: the search finds tokens, `HistoryReading` reads their events, `Explanation` puts them into words.
public struct TokenLookup: Sendable {
    public enum Subject: Sendable {
        /// A whole token, or the beginning of one.
        case token(TokenDigits)
        /// All tokens that a device has or had.
        case device(String)
        /// All tokens that a user has or had.
        case user(String)
    }

    /// What was found.
    public enum Answer: Sendable {
        /// Nothing, except this many of the latest 10,000 rejected results.
        case nothing(rejected: Int)
        /// Ordered by topic, environment and token.
        case histories([TokenHistory])
        /// Too many: the first of them, without their events, and whether there are more.
        case tooMany([TokenHistory], andMore: Bool)
    }

    public var subject: Subject
    /// Nil for all.
    public var topic: String?
    /// `production`, `sandbox`, or nil for both.
    public var environment: String?

    public init(_ subject: Subject, topic: String? = nil, environment: String? = nil) {
        self.subject = subject
        self.topic = topic
        self.environment = environment
    }

    /// The most tokens to explain by their first digits: a person means one of them.
    static let mostByBeginning = 10
    /// The most tokens to explain by a whole token, a device or a user: a person means all of them.
    static let mostByName = 1000

    /// Looks up everything as of one moment. Writes nothing and works on a standby.
    ///
    /// - Parameter limit: How long a statement may take.
    /// - Throws: If a statement takes longer (57014), or the role lacks the rights of `tokenkeeper_reader` (42501).
    public func answer(
        within limit: Duration = .seconds(30), on connection: inout Connection
    ) throws(DatabaseError) -> Answer {
        let transaction = BatchTransaction(
            mode: .snapshot, lockTimeout: min(limit, .seconds(5)), statementTimeout: limit, isInUTC: true)
        // A ledger that has just been filled has no statistics: a sequential scan would then look cheap.
        return try connection.transaction(transaction, settings: "SET LOCAL enable_seqscan = off") {
            connection throws(DatabaseError) in
            let (found, most) = try find(on: &connection)
            if found.isEmpty { return .nothing(rejected: try countRejected(on: &connection)) }
            if found.count > most {
                return .tooMany(Array(found.prefix(Self.mostByName)), andMore: found.count > Self.mostByName)
            }
            return .histories(try HistoryReading.complete(found, on: &connection))
        }
    }

    /// Whether the topic is known, in the environment if one is given. True without a topic.
    public func isKnownTopic(on connection: inout Connection) throws(DatabaseError) -> Bool {
        guard let topic else { return true }
        return try connection.query(
            """
            SELECT EXISTS (
                SELECT FROM tokenkeeper.topic_policy AS p
                WHERE p.topic = $1 COLLATE "C" AND p.environment = coalesce($2, p.environment))
            """, [.text(topic), .text(environment)]
        ).value()
    }

    /// Finds up to one token more than may be explained, to know whether there are too many.
    private func find(on connection: inout Connection) throws(DatabaseError) -> (found: [TokenHistory], most: Int) {
        switch subject {
        case .device(let device):
            return (
                try find(Self.by("device_id", "tokenkeeper.device_name($4)"), [.text(device)], on: &connection),
                Self.mostByName
            )
        case .user(let user):
            return (try find(Self.by("user_id", "$4"), [.text(user)], on: &connection), Self.mostByName)
        case .token(let digits):
            // A token that equals the digits is meant, even if others begin with them.
            if digits.canBeWhole {
                let whole = try find(Self.byKey, [.text(digits.text), .text(digits.text)], on: &connection)
                if !whole.isEmpty { return (whole, Self.mostByName) }
            }
            let keys = digits.keys
            return (
                try find(Self.byKey, [.text(keys.first), .text(keys.last)], on: &connection), Self.mostByBeginning
            )
        }
    }

    /// Topic by topic, because the keys of the ledger begin with the topic. OFFSET 0 enforces this: with the statistics of a small
    /// ledger, the planner would otherwise join all of it.
    private static let byKey = """
        WITH known AS (
            SELECT v.environment, v.topic, v.token_key
            FROM tokenkeeper.topic_policy AS p
            CROSS JOIN LATERAL (
                SELECT t.environment, t.topic, t.token_key FROM tokenkeeper.token AS t
                WHERE t.topic = p.topic AND t.environment = p.environment
                  AND t.token_key BETWEEN decode($4, 'hex') AND decode($5, 'hex') OFFSET 0) AS v
            UNION
            SELECT e.environment, e.topic, e.token_key FROM tokenkeeper.token_event AS e
            WHERE e.token_key BETWEEN decode($4, 'hex') AND decode($5, 'hex')
            UNION
            SELECT coalesce(h.environment, 'production'), h.topic, h.token_key
            FROM tokenkeeper.topic AS o
            CROSS JOIN LATERAL (
                SELECT r.environment, r.topic, r.token_key FROM tokenkeeper.held_result AS r
                WHERE r.topic_id = o.topic_id AND r.token_key BETWEEN decode($4, 'hex') AND decode($5, 'hex') OFFSET 0) AS h)
        """

    /// The tokens that a device or a user has, and those whose events name it.
    ///
    /// - Parameter name: An SQL expression.
    private static func by(_ column: String, _ name: String) -> String {
        """
        WITH known AS (
            SELECT v.environment, v.topic, v.token_key
            FROM tokenkeeper.topic_policy AS p
            CROSS JOIN LATERAL (
                SELECT t.environment, t.topic, t.token_key FROM tokenkeeper.token AS t
                WHERE t.topic = p.topic AND t.environment = p.environment AND t.\(column) = \(name) OFFSET 0) AS v
            UNION
            SELECT e.environment, e.topic, e.token_key FROM tokenkeeper.token_event AS e WHERE e.\(column) = \(name))
        """
    }

    private func find(
        _ known: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [TokenHistory] {
        try connection.query(
            """
            \(known)
            SELECT k.environment, k.topic, encode(k.token_key, 'hex'), v.device_id, v.state,
                   p.gate IS NOT DISTINCT FROM 'observe', \(HistoryMoment.sql("v.registered_at")),
                   \(HistoryMoment.sql("v.invalidated_at")), v.reason,
                   json_build_object('environment', k.environment, 'topic', k.topic, 'token', encode(k.token_key, 'hex'),
                       'device_id', v.device_id, 'state', v.state,
                       'sendable', coalesce(v.sendable, true) OR p.gate IS NOT DISTINCT FROM 'observe',
                       'observed', p.gate IS NOT DISTINCT FROM 'observe', 'registered_at', v.registered_at,
                       'invalidated_at', v.invalidated_at, 'reason', v.reason, 'tags', v.tags, 'moved_to', o.moved_to)::text, v.cause, v.user_id,
                   array_to_string(v.tags, ', '), \(HistoryMoment.sql("r.since")), \(HistoryMoment.sql("r.until")),
                   o.moved_to
            FROM (SELECT n.environment, n.topic, n.token_key FROM known AS n
                  WHERE ($1::text IS NULL OR n.topic = $1) AND ($2::text IS NULL OR n.environment = $2)
                  ORDER BY n.topic, n.environment, n.token_key LIMIT $3) AS k
            LEFT JOIN tokenkeeper.topic_policy AS p ON p.topic = k.topic AND p.environment = k.environment
            LEFT JOIN LATERAL (
                SELECT t.* FROM tokenkeeper.token AS t
                WHERE t.topic = k.topic AND t.environment = k.environment AND t.token_key = k.token_key LIMIT 1) AS v ON true
            LEFT JOIN tokenkeeper.topic AS o ON o.topic = k.topic AND o.environment = k.environment
            LEFT JOIN LATERAL (
                SELECT min(c.received_at) AS since, max(c.received_at) AS until FROM tokenkeeper.receipt AS c
                WHERE c.topic_id = o.topic_id AND c.token_key = k.token_key AND c.cause = v.state
                  AND c.invalidated_at >= coalesce(v.registered_at, '-infinity')) AS r ON true
            ORDER BY k.topic, k.environment, k.token_key
            """,
            [.text(topic), .text(environment), .int8(Int64(Self.mostByName + 1))] + parameters
        ).decode { row throws(DatabaseError) in
            var history = TokenHistory(environment: try row.read(), topic: try row.read(), token: try row.read())
            history.deviceID = try row.read()
            history.state = try row.read()
            history.isObserved = try row.read()
            history.registeredAt = try row.read()
            history.invalidatedAt = try row.read()
            history.reason = try row.read()
            history.json = try row.read()
            history.cause = try row.read()
            history.userID = try row.read()
            history.tags = try row.read()
            history.receivedSince = try row.read()
            history.receivedUntil = try row.read()
            history.movedTo = try row.read()
            return history
        }
    }

    private func countRejected(on connection: inout Connection) throws(DatabaseError) -> Int {
        guard case .token(let digits) = subject else { return 0 }
        // No index finds the beginning of a token.
        return try connection.query(
            """
            SELECT count(*) FROM (SELECT r.token FROM tokenkeeper.rejected_result AS r ORDER BY r.rejected_id DESC LIMIT 10000) AS r
            WHERE starts_with(lower(r.token), $1)
            """, [.text(digits.text)]
        ).value()
    }
}
