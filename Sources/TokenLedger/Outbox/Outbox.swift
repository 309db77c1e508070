public import TokenModel

/// Start here: the outbox as a sending daemon uses it. The daemon looks for due topics, claims their requests, and writes what
/// became of them.
///
/// The daemon that claims a request finishes it. If that daemon dies first, another one takes the request over.
public struct Outbox: Sendable {
    /// Unique among all daemons of the database, such as `host/pid/start`.
    public let daemonID: String
    /// The machine's boot and PID namespace.
    public let processScope: String
    /// How long a statement waits for a lock.
    public var lockTimeout: Duration
    /// After a claim that took longer, other daemons may already have taken over what it has claimed.
    var standstill = Self.silence / 2

    public init(daemonID: String, processScope: String, lockTimeout: Duration) {
        self.daemonID = daemonID
        self.processScope = processScope
        self.lockTimeout = lockTimeout
    }

    var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// For work that must not be lost once it is committed: what was sent to APNs in between cannot be rolled back.
    var durable: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout, isDurable: true) }

    /// A daemon may be silent for this long before another takes over its claimed requests. No request takes as long.
    public static let silence: Duration = .seconds(60)

    /// One page of the topics that have unclaimed requests.
    public struct Scopes: Sendable {
        /// The topics with at least one request that is due, except paused topics.
        public var due: [TopicScope] = []
        /// All topics of the page: their requests may be due, scheduled for later or paused.
        public var waiting: [TopicScope] = []
        /// The last topic of the page; nil if there are no more.
        public var last: TopicScope?
    }

    /// Reads one page of the topics that have unclaimed requests.
    ///
    /// - Parameters:
    ///   - scope: The last topic of the previous page; nil for the first page.
    ///   - most: The length of a page: 1 or more. The number of topics has no limit, because senders may write any text as a topic.
    /// - Returns: All topics of the page, and those from which requests can be claimed now.
    public func scopes(
        after scope: TopicScope? = nil, most: Int = 200, on connection: inout Connection
    ) throws(DatabaseError) -> Scopes {
        try connection.transaction(transaction, settings: OutboxIndex.settings) { connection throws(DatabaseError) in
            let found = try connection.query(
                """
                \(OutboxIndex.oldestByTopic(after: "$1", "$2", most: "$3"))
                SELECT s.environment, s.topic,
                       s.due_at <= now()
                       AND NOT EXISTS (SELECT FROM tokenkeeper.paused_topic AS h WHERE h.topic = s.topic AND h.environment = s.environment)
                FROM scope AS s ORDER BY s.number
                """, [.text(scope?.topic), .text(scope?.environment), .int4(Int32(clamping: most))]
            ).decode { row throws(DatabaseError) in
                (scope: TopicScope(environment: try row.read(), topic: try row.read()), isDue: try row.read(Bool.self))
            }
            return Scopes(
                due: found.filter(\.isDue).map(\.scope), waiting: found.map(\.scope),
                last: found.count == most ? found.last?.scope : nil)
        }
    }

    /// The outcome of a claim.
    public struct Claim: Sendable {
        /// The requests to send, in the order of their numbers.
        public var requests: [ClaimedRequest] = []
        /// How many requests the gate withheld; they moved to `suppressed_send`.
        public var suppressed = 0
        /// How many requests cannot be sent; they moved to `failed_send`.
        public var failed = 0
        /// When the last request that the claim looked at was due; nil if it found none.
        public var dueAt: Instant?
        /// How many requests it looked at.
        var looked = 0
        /// Whether it looked at all requests that were due.
        public var isComplete = false
        /// When the rate lets the last of `requests` be sent; nil without a rate.
        public var lastSendAt: ContinuousClock.Instant? { requests.last?.sendAt }

        public init() {}
    }

    /// A claim of a topic or campaign with a rate gets what may be sent within the next second, and nothing while more than this
    /// much of it is claimed. As `slots_ahead` in the database.
    public static let pacedAhead: Duration = .milliseconds(500)

    /// Claims due requests, the oldest first, and asks the gate in the same transaction.
    ///
    /// - Parameters:
    ///   - most: The most requests to look at.
    ///   - since: Skips requests that were due earlier: the index may still have dead entries of claimed requests there.
    ///   - backgroundPerHour: How many background pushes a device may have within an hour, unless the topic's policy says otherwise; 0 for no limit.
    /// - Returns: Without requests that another daemon has taken over in the meantime.
    public func claim(
        _ scope: TopicScope, most: Int, since: Instant = .distantPast, backgroundPerHour: Int,
        on connection: inout Connection
    ) throws(DatabaseError) -> Claim {
        let claims = try claim(on: &connection) { connection throws(DatabaseError) in
            let rows = try connection.query(
                """
                SELECT c.outcome, c.due_at, c.request_id, encode(c.token_key, 'hex'), c.payload, c.push_type, c.priority, c.expiration,
                       c.collapse_id, c.apns_id, c.attempts, c.first_sent_at, c.refusals, c.others_accepted, c.send_in
                FROM tokenkeeper.claim_requests($1, $2, $3, $4, $5, $6) AS c ORDER BY c.request_id
                """,
                [
                    .text(scope.environment), .text(scope.topic), .text(daemonID), .int4(Int32(clamping: most)),
                    .int4(Int32(clamping: backgroundPerHour)), .instant(since),
                ])
            let now = ContinuousClock.now
            return [
                try rows.decode { row throws(DatabaseError) in try ClaimedRow(&row, of: scope, at: now) }
                    .reduce(into: Claim()) { claim, row in claim.add(row) }
            ]
        }
        return claims[0]
    }

    /// What to claim of one topic. See the parameters of `claim`.
    public struct Asked: Sendable {
        var scope: TopicScope
        /// The most requests: 1 or more.
        public var most: Int
        var since: Instant

        public init(_ scope: TopicScope, most: Int, since: Instant = .distantPast) {
            (self.scope, self.most, self.since) = (scope, most, since)
        }
    }

    /// Claims due requests of several topics in one transaction: with many topics that have a few requests each, a transaction for
    /// each would cost more than the requests.
    ///
    /// - Parameter asked: Each topic once.
    /// - Returns: One claim per topic, in the same order.
    public func claim(
        _ asked: [Asked], backgroundPerHour: Int, on connection: inout Connection
    ) throws(DatabaseError) -> [Claim] {
        try claim(on: &connection) { connection throws(DatabaseError) in
            let rows = try connection.query(
                """
                SELECT c.environment, c.topic, c.outcome, c.due_at, c.request_id, encode(c.token_key, 'hex'), c.payload, c.push_type, c.priority,
                       c.expiration, c.collapse_id, c.apns_id, c.attempts, c.first_sent_at, c.refusals, c.others_accepted, c.send_in
                FROM tokenkeeper.claim_topics($1, $2, $3, $4, $5, $6) AS c ORDER BY c.request_id
                """,
                [
                    .texts(asked.map(\.scope.environment)), .texts(asked.map(\.scope.topic)), .text(daemonID),
                    .int4s(asked.map { Int32(clamping: $0.most) }), .int4(Int32(clamping: backgroundPerHour)),
                    .instants(asked.map(\.since)),
                ])
            let now = ContinuousClock.now
            let places = Dictionary(uniqueKeysWithValues: asked.enumerated().map { ($1.scope, $0) })
            var claims = Array(repeating: Claim(), count: asked.count)
            for (place, row) in try rows.decode({ row throws(DatabaseError) in
                let scope = TopicScope(environment: try row.read(), topic: try row.read())
                guard let place = places[scope] else {
                    throw DatabaseError(.unexpectedRow, "claim_topics returned \(scope), which was not asked for")
                }
                return (place, try ClaimedRow(&row, of: scope, at: now))
            }) { claims[place].add(row) }
            // A rate may have kept others back.
            for (place, asked) in asked.enumerated() {
                claims[place].isComplete = claims[place].looked < asked.most && claims[place].lastSendAt == nil
            }
            return claims
        }
    }

    /// Claims in one transaction.
    ///
    /// - Returns: Without requests that another daemon has taken over in the meantime.
    func claim(
        on connection: inout Connection, _ work: (inout Connection) throws(DatabaseError) -> [Claim]
    ) throws(DatabaseError) -> [Claim] {
        let start = ContinuousClock.now
        // The claim must survive a crash of the server before anything is sent.
        var claims = try connection.transaction(durable, work)
        // This process may have been stopped after the COMMIT.
        if start.duration(to: .now) > standstill, claims.contains(where: { !$0.requests.isEmpty }) {
            let claimed = try self.claimed(on: &connection)
            for place in claims.indices { claims[place].requests.removeAll { !claimed.contains($0.number) } }
        }
        return claims
    }

    /// The requests that this daemon has claimed, according to the database.
    public func claimed(on connection: inout Connection) throws(DatabaseError) -> Set<Int64> {
        Set(
            try connection.query(
                """
                SELECT r.request_id FROM tokenkeeper.send_request AS r WHERE r.claimed_by = $1
                UNION ALL SELECT c.number FROM tokenkeeper.claimed_campaign_requests($1) AS c (number)
                """, [.text(daemonID)]
            ).values(Int64.self))
    }

    /// The result of writing a set of endings.
    public struct Finished: Sendable {
        /// How many requests this daemon still had, and has no more.
        public var requests = 0
        /// The numbers of those that another session has locked. This daemon still has them, and their endings are not written.
        public var locked: Set<Int64> = []
    }

    /// Writes what became of requests, those in campaigns' batches in one transaction and then the single ones in another: responses enter
    /// the queue, and requests leave the outbox or wait again.
    ///
    /// After an error, some of them may be written. To write all again is harmless.
    @discardableResult
    public func finish(
        _ endings: [RequestEnding], on connection: inout Connection
    ) throws(DatabaseError) -> Finished {
        if endings.isEmpty { return Finished() }
        do {
            return try write(endings, on: &connection)
        } catch  where error.remedy == .fixData {
            // A server may respond with characters that this database's encoding does not have.
            return try write(endings.map(\.inASCII), on: &connection)
        }
    }

    private func write(
        _ endings: [RequestEnding], on connection: inout Connection
    ) throws(DatabaseError) -> Finished {
        // Requests in a campaign's batch have negative numbers. They go first, so that a locked single request does not delay them.
        var requests = 0
        for part in [endings.filter { $0.number < 0 }, endings.filter { $0.number > 0 }] where !part.isEmpty {
            requests += try connection.transaction(durable) { connection throws(DatabaseError) in
                try connection.query(
                    """
                    SELECT tokenkeeper.finish_requests($1, ARRAY(SELECT ROW(e.*)::tokenkeeper.request_ending FROM unnest(
                        $2::bigint[], $3::text[], $4::integer[], $5::text[], $6::text[], $7::timestamptz[], $8::bigint[], $9::text[], $10::text[]) AS e))
                    """,
                    [
                        .text(daemonID), .int8s(part.map(\.number)), .texts(part.map(\.fate.word)),
                        .int4s(part.map { $0.answer?.status }), .texts(part.map { $0.answer?.body }),
                        .texts(part.map { $0.answer?.apnsID }), .instants(part.map(\.sentAt)),
                        .int8s(part.map { $0.fate.pause?.microseconds }), .texts(part.map(\.fate.error)),
                        .texts(part.map { $0.answer?.meaning.rawValue }),
                    ]
                ).value(Int.self)
            }
        }
        if requests == endings.count { return Finished(requests: requests) }
        // The others are those that this daemon no longer had, and those that are locked.
        let locked = try claimed(on: &connection).intersection(endings.map(\.number))
        return Finished(requests: requests, locked: locked)
    }

    /// Which topics a person has resumed, or wanted to be tried at once.
    ///
    /// - Parameter operation: The last one that is known, by its `operation_id`; nil to learn it.
    /// - Returns: The last one now, and the topics since.
    public func resumed(
        after operation: Int64?, on connection: inout Connection
    ) throws(DatabaseError) -> (last: Int64, topics: [TopicScope]) {
        let rows = try connection.query(
            """
            SELECT l.last, o.environment, o.topic
            FROM (SELECT coalesce(max(m.operation_id), 0) AS last FROM tokenkeeper.operation AS m) AS l
            LEFT JOIN tokenkeeper.operation AS o ON o.operation_id > $1 AND o.operation_id <= l.last AND o.operation = 'sending_resumed'
            """, [.int8(operation)]
        ).decode { row throws(DatabaseError) in
            (
                last: try row.read(Int64.self), environment: try row.read(String?.self),
                topic: try row.read(String?.self)
            )
        }
        let topics = rows.compactMap { row -> TopicScope? in
            guard let environment = row.environment, let topic = row.topic else { return nil }
            return TopicScope(environment: environment, topic: topic)
        }
        return (rows.first?.last ?? 0, topics)
    }
}
