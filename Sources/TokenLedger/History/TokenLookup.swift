/// What somebody asks about, and the way to it in ledger, history and among the held results.
public struct TokenLookup: Sendable {
    public enum Subject: Sendable {
        /// A whole token, or the beginning of one.
        case token(TokenDigits)
        /// All tokens of a device: those that it has and those that it had.
        case device(String)
    }

    /// What was found.
    public enum Answer: Sendable {
        /// Nobody knows it, but for so many rejected results with such a token, counted up to 1000.
        case nothing(rejected: Int)
        /// Ordered by topic, environment and token.
        case histories([TokenHistory])
        /// More than can be told at once: the first of them, without their events, and whether there are still others.
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

    /// As many tokens as are told by their beginning; a person means one of them.
    static let mostByBeginning = 10
    /// As many as are told by a whole token, or by a device: every one is meant.
    static let mostByName = 1000

    /// Looks everything up as of one moment. Writes nothing and works on a standby.
    ///
    /// - Throws: When a statement takes longer than 30 seconds (57014), or the role lacks the rights of `tokenkeeper_reader` (42501).
    public func answer(on connection: inout Connection) throws(DatabaseError) -> Answer {
        // Sequential scans are off for the sake of a ledger whose statistics have not been gathered yet, as in the functions.
        try connection.transaction(
            """
            BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
            SET LOCAL statement_timeout = '30s';
            SET LOCAL lock_timeout = '5s';
            SET LOCAL idle_in_transaction_session_timeout = '60s';
            SET LOCAL timezone = 'UTC';
            SET LOCAL enable_seqscan = off;
            SET LOCAL jit = off;
            """
        ) { connection throws(DatabaseError) in
            let (found, most) = try find(on: &connection)
            if found.isEmpty { return .nothing(rejected: try countRejected(on: &connection)) }
            if found.count > most {
                return .tooMany(Array(found.prefix(Self.mostByName)), andMore: found.count > Self.mostByName)
            }
            return .histories(try HistoryReading.complete(found, on: &connection))
        }
    }

    /// One more than may be told, so that it can be known.
    private func find(on connection: inout Connection) throws(DatabaseError) -> (found: [TokenHistory], most: Int) {
        switch subject {
        case .device(let device):
            return (try find(Self.byDevice, [.text(device)], on: &connection), Self.mostByName)
        case .token(let digits):
            // A token that is just that is meant by it, whatever others begin so.
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

    /// The topics of held results, from one to the next: a reader sees no table that lists their numbers, and the results' index
    /// begins with those.
    static let heldTopics = """
        held_topic AS (
            (SELECT h.topic_id FROM tokenkeeper.held_result AS h ORDER BY h.topic_id LIMIT 1)
            UNION ALL
            SELECT (SELECT h.topic_id FROM tokenkeeper.held_result AS h WHERE h.topic_id > o.topic_id ORDER BY h.topic_id LIMIT 1)
            FROM held_topic AS o WHERE o.topic_id IS NOT NULL)
        """

    /// Topic by topic, because the ledger's keys begin with the topic. OFFSET 0 keeps it so: where the statistics are still those of a
    /// small ledger, the planner would else join all of it.
    private static let byKey = """
        WITH RECURSIVE \(heldTopics), known AS (
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
            FROM held_topic AS o
            CROSS JOIN LATERAL (
                SELECT r.environment, r.topic, r.token_key FROM tokenkeeper.held_result AS r
                WHERE r.topic_id = o.topic_id AND r.token_key BETWEEN decode($4, 'hex') AND decode($5, 'hex') OFFSET 0) AS h)
        """

    private static let byDevice = """
        WITH known AS (
            SELECT v.environment, v.topic, v.token_key
            FROM tokenkeeper.topic_policy AS p
            CROSS JOIN LATERAL (
                SELECT t.environment, t.topic, t.token_key FROM tokenkeeper.token AS t
                WHERE t.topic = p.topic AND t.environment = p.environment AND t.device_id = $4 OFFSET 0) AS v
            UNION
            SELECT e.environment, e.topic, e.token_key FROM tokenkeeper.token_event AS e WHERE e.device_id = $4)
        """

    private func find(
        _ known: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [TokenHistory] {
        let rows = try connection.query(
            """
            \(known)
            SELECT k.environment, k.topic, encode(k.token_key, 'hex'), v.device_id, v.state,
                   p.gate IS NOT DISTINCT FROM 'observe', \(HistoryMoment.sql("v.registered_at")),
                   \(HistoryMoment.sql("v.invalidated_at")), v.reason,
                   json_build_object('environment', k.environment, 'topic', k.topic, 'token', encode(k.token_key, 'hex'),
                       'device_id', v.device_id, 'state', v.state,
                       'sendable', coalesce(v.sendable, true) OR p.gate IS NOT DISTINCT FROM 'observe',
                       'observed', p.gate IS NOT DISTINCT FROM 'observe', 'registered_at', v.registered_at,
                       'invalidated_at', v.invalidated_at, 'reason', v.reason)::text, v.cause
            FROM (SELECT n.environment, n.topic, n.token_key FROM known AS n
                  WHERE ($1::text IS NULL OR n.topic = $1) AND ($2::text IS NULL OR n.environment = $2)
                  ORDER BY n.topic, n.environment, n.token_key LIMIT $3) AS k
            LEFT JOIN tokenkeeper.topic_policy AS p ON p.topic = k.topic AND p.environment = k.environment
            LEFT JOIN LATERAL (
                SELECT t.* FROM tokenkeeper.token AS t
                WHERE t.topic = k.topic AND t.environment = k.environment AND t.token_key = k.token_key LIMIT 1) AS v ON true
            ORDER BY k.topic, k.environment, k.token_key
            """,
            [.text(topic), .text(environment), .int8(Int64(Self.mostByName + 1))] + parameters)
        return (0..<rows.count).map { row in
            var history = TokenHistory(
                environment: rows.text(row, 0) ?? "", topic: rows.text(row, 1) ?? "", token: rows.text(row, 2) ?? "")
            history.deviceID = rows.text(row, 3)
            history.state = rows.text(row, 4)
            history.isObserved = rows.bool(row, 5) ?? false
            history.registeredAt = rows.moment(row, 6)
            history.invalidatedAt = rows.moment(row, 7)
            history.reason = rows.text(row, 8)
            history.json = rows.text(row, 9) ?? "{}"
            history.cause = rows.text(row, 10)
            return history
        }
    }

    private func countRejected(on connection: inout Connection) throws(DatabaseError) -> Int {
        guard case .token(let digits) = subject else { return 0 }
        let rows = try connection.query(
            """
            SELECT count(*) FROM (
                SELECT FROM tokenkeeper.rejected_result AS r WHERE starts_with(lower(r.token), $1) LIMIT 1000) AS r
            """, [.text(digits.text)])
        return Int(rows.integer(0, 0) ?? 0)
    }
}
