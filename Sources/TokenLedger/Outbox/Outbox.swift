internal import TokenModel

/// The outbox as a daemon that sends sees it: what waits, what it takes in hand, and what has become of that.
///
/// Every request that is claimed is finished by the one who claimed it; or, when that one has ended without a word, taken over by another.
public struct Outbox: Sendable {
    /// Unique among all daemons of the database, such as `host/pid/start`.
    public let daemonID: String
    /// The machine's boot and space of process numbers.
    public let place: String
    /// How long it waits for a lock.
    public var lockTimeout: Duration

    public init(daemonID: String, place: String, lockTimeout: Duration) {
        self.daemonID = daemonID
        self.place = place
        self.lockTimeout = lockTimeout
    }

    var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// So long a daemon may be silent before another takes over what it has in hand: longer than a request may take.
    static let silence: Duration = .seconds(60)

    /// A topic that has requests, as they name it: it may be none at all.
    public struct Lane: Hashable, Sendable {
        public var environment: String
        /// Empty where it is missing.
        public var topic: String

        public init(environment: String, topic: String) {
            self.environment = environment
            self.topic = topic
        }
    }

    /// The topics of which requests are due, but for those that are halted.
    public func lanes(on connection: inout Connection) throws(DatabaseError) -> [Lane] {
        // From one to the next along the index: not one look a request.
        let next = """
            SELECT coalesce(r.topic, '') AS topic, coalesce(r.environment, 'production') AS environment
            FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL
            """
        let order = "ORDER BY coalesce(r.topic, ''), coalesce(r.environment, 'production') LIMIT 1"
        return try connection.transaction(transaction.begin + "SET LOCAL enable_seqscan = off;") {
            connection throws(DatabaseError) in
            let rows = try connection.query(
                """
                WITH RECURSIVE lane AS (
                    (\(next) \(order))
                    UNION ALL
                    SELECT n.topic, n.environment FROM lane AS p CROSS JOIN LATERAL (
                        \(next) AND (coalesce(r.topic, ''), coalesce(r.environment, 'production')) > (p.topic, p.environment) \(order)) AS n
                )
                SELECT l.environment, l.topic FROM lane AS l
                WHERE EXISTS (\(next) AND coalesce(r.topic, '') = l.topic AND coalesce(r.environment, 'production') = l.environment
                              AND coalesce(r.not_before, r.queued_at) <= now())
                  AND NOT EXISTS (SELECT FROM tokenkeeper.send_halt AS h WHERE h.topic = l.topic AND h.environment = l.environment)
                """)
            return (0..<rows.count).map { Lane(environment: rows.text($0, 0) ?? "", topic: rows.text($0, 1) ?? "") }
        }
    }

    /// Takes requests in hand that are due, the oldest first. The gate is asked in the same statement: those it keeps back are
    /// in `suppressed_send` then, and those that cannot be sent in `failed_send`.
    ///
    /// - Parameters:
    ///   - most: How many at most are dealt with.
    ///   - backgroundPerHour: How many background pushes a device may have within an hour, unless the topic's policy says otherwise; 0 for no limit.
    public func claim(
        _ lane: Lane, most: Int, backgroundPerHour: Int, on connection: inout Connection
    ) throws(DatabaseError) -> [ClaimedRequest] {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            let rows = try connection.query(
                """
                SELECT c.request_id, encode(c.token_key, 'hex'), c.payload, c.push_type, c.priority, c.expiration, c.collapse_id, c.apns_id,
                       c.attempts, c.first_sent_at
                FROM tokenkeeper.claim_requests($1, $2, $3, $4, $5) AS c ORDER BY c.request_id
                """,
                [
                    .text(lane.environment), .text(lane.topic), .text(daemonID), .int4(Int32(clamping: most)),
                    .int4(Int32(clamping: backgroundPerHour)),
                ])
            guard let environment = Environment(rawValue: lane.environment), let topic = Topic(lane.topic) else {
                return []
            }
            return (0..<rows.count).compactMap { row in
                guard let number = rows.integer(row, 0), let token = rows.text(row, 1).flatMap(DeviceToken.init(hex:)),
                    let pushType = rows.text(row, 3).flatMap(PushType.init(rawValue:))
                else { preconditionFailure("claim_requests answers what its own checks refuse") }
                return ClaimedRequest(
                    number: number,
                    request: PushRequest(
                        address: TokenAddress(environment: environment, topic: topic, token: token),
                        payload: compactJSON(rows.text(row, 2) ?? ""), pushType: pushType,
                        priority: rows.integer(row, 4).map { Int($0) }, expiration: rows.integer(row, 5),
                        collapseID: rows.text(row, 6), id: rows.text(row, 7) ?? ""),
                    attempts: Int(rows.integer(row, 8) ?? 0), firstSentAt: rows.instant(row, 9) ?? .distantPast)
            }
        }
    }

    /// Says what has become of requests, in one transaction: answers go into the queue of results, requests out of the outbox or back.
    ///
    /// - Returns: How many were still in this daemon's hand.
    @discardableResult
    public func finish(_ endings: [RequestEnding], on connection: inout Connection) throws(DatabaseError) -> Int {
        if endings.isEmpty { return 0 }
        do {
            return try write(endings, on: &connection)
        } catch  where error.remedy == .fixData {
            // A server may answer anything, such as what this database's encoding has no character for.
            return try write(endings.map(\.inASCII), on: &connection)
        }
    }

    private func write(_ endings: [RequestEnding], on connection: inout Connection) throws(DatabaseError) -> Int {
        let parameters: [Parameter] = [
            .text(daemonID), .int8s(endings.map(\.number)), .texts(endings.map(\.fate.word)),
            .int4s(endings.map { $0.answer?.status }),
            .texts(endings.map { $0.answer?.body }), .texts(endings.map { $0.answer?.apnsID }),
            .instants(endings.map(\.sentAt)), .int8s(endings.map { $0.fate.pause?.microseconds }),
            .texts(endings.map(\.fate.error)),
        ]
        return try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            Int(
                try connection.query(
                    "SELECT tokenkeeper.finish_requests($1, $2, $3, $4, $5, $6, $7, $8, $9)", parameters
                ).integer(0, 0) ?? 0)
        }
    }

    /// Stops a topic: its requests wait until `resume_sending`.
    ///
    /// - Returns: False when it was stopped already.
    public func halt(
        _ lane: Lane, reason: String, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.halt_sending($1, $2, $3)",
                [.text(lane.topic), .text(lane.environment), .text(reason)]
            ).bool(0, 0) ?? false
        }
    }
}
