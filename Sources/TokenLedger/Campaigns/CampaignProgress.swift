/// A row of the view `tokenkeeper.campaign_progress`: what a campaign is, and what has become of its requests so far.
public struct CampaignProgress: Equatable, Sendable {
    public var number: Int64
    public var name: String?
    public var environment: String
    public var topic: String
    /// waiting, running, paused, cancelled or ended.
    public var state: String
    /// Who is meant, in words: `tags: news && !muted`.
    public var audience: String
    /// An estimate of the audience, made at the start; nil if there is none.
    public var expected: Int64?
    /// Whether the whole audience has been addressed. Then `addressed` is final.
    public var isAddressed: Bool
    /// How many tokens have got a request so far.
    public var addressed: Int64
    /// Requests that have not ended: not sent yet, in flight, or to be retried.
    public var waiting: Int64
    /// How many requests ended in each way, in the view's order.
    public var outcomes: [(name: String, requests: Int64)] {
        zip(Self.outcomeNames, ended).map { (name: $0, requests: $1) }
    }
    /// In the order of `outcomeNames`.
    public var ended: [Int64]
    public var perSecond: Double?
    /// These are in UTC, to the second; nil if unknown.
    public var expectedEnd: String?
    public var createdAt: String
    public var createdBy: String
    public var scheduledAt: String?
    public var startedAt: String?
    public var endedAt: String?
    /// Why it does not move, in words; nil if it moves, or nothing is in its way.
    public var waitsBecause: String?

    /// The ways in which a request can end.
    public static let outcomeNames = ["accepted", "stale", "suspect", "suppressed", "failed", "cancelled", "forgotten"]

    /// Whether no request will be sent any more, and all have ended.
    public var isOver: Bool { endedAt != nil }

    /// How many requests there will be; an estimate until all are addressed, and nil if there is none.
    public var total: Int64? {
        isAddressed || isOver || state == "cancelled" ? addressed : expected.map { max($0, addressed) }
    }

    /// How many requests have ended.
    public var done: Int64 { ended.reduce(0, +) }

    private static let reading = BatchTransaction(
        mode: .snapshot, lockTimeout: .seconds(3), statementTimeout: .seconds(30), isInUTC: true)

    /// One campaign; nil if there is none with this number, or this role may not see it.
    public static func find(_ number: Int64, on connection: inout Connection) throws(DatabaseError) -> CampaignProgress?
    {
        try read("WHERE p.campaign_id = $1", [.int8(number)], on: &connection).first
    }

    /// The latest campaigns, the newest first.
    public static func latest(_ most: Int, on connection: inout Connection) throws(DatabaseError) -> [CampaignProgress]
    {
        try read("ORDER BY p.campaign_id DESC LIMIT $1", [.int8(Int64(most))], on: &connection)
    }

    /// Those that are being sent, the newest first.
    public static func running(_ most: Int, on connection: inout Connection) throws(DatabaseError) -> [CampaignProgress]
    {
        try read(
            "WHERE p.state = 'running' AND p.ended_at IS NULL ORDER BY p.campaign_id DESC LIMIT $1",
            [.int8(Int64(most))], on: &connection)
    }

    private static func read(
        _ which: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [CampaignProgress] {
        try connection.transaction(reading) { connection throws(DatabaseError) in
            try rows(which, parameters, on: &connection)
        }
    }

    /// One campaign, and why its requests failed: the five most frequent errors among 10,000. Nil as above.
    public static func detail(
        _ number: Int64, within limit: Duration, on connection: inout Connection
    ) throws(DatabaseError) -> (progress: CampaignProgress, failures: [(error: String, requests: Int64)])? {
        try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            guard let progress = try rows("WHERE p.campaign_id = $1", [.int8(number)], on: &connection).first
            else { return nil }
            let failures = try connection.query(
                """
                SELECT f.error, count(*) FROM (
                    SELECT left(s.error, 300) AS error FROM tokenkeeper.failed_send AS s WHERE s.campaign_id = $1 LIMIT 10000) AS f
                GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 5
                """, [.int8(number)]
            ).decode { row throws(DatabaseError) in
                (error: try row.read(String.self), requests: try row.read(Int64.self))
            }
            return (progress, failures)
        }
    }

    /// Those that have not ended, or ended within a day: those that are being sent first, then the newest. In the caller's transaction.
    static func current(_ most: Int, on connection: inout Connection) throws(DatabaseError) -> [CampaignProgress] {
        try rows(
            """
            WHERE p.ended_at IS NULL OR p.ended_at > clock_timestamp() - interval '1 day'
            ORDER BY p.state = 'running' AND p.ended_at IS NULL DESC, p.campaign_id DESC LIMIT $1
            """, [.int8(Int64(most))], on: &connection)
    }

    private static func rows(
        _ which: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [CampaignProgress] {
        try connection.query(
            """
            SELECT p.campaign_id, p.name, p.environment, p.topic, p.state, p.audience, p.expected, p.is_addressed, p.addressed, p.waiting::bigint,
                   \(outcomeNames.map { "p.\($0)::bigint" }.joined(separator: ", ")), p.per_second::float8,
                   \(inUTC("p.expected_end")), \(inUTC("p.created_at")), p.created_by, \(inUTC("p.scheduled_at")),
                   \(inUTC("p.started_at")), \(inUTC("p.ended_at")), w.reason
            FROM tokenkeeper.campaign_progress AS p LEFT JOIN tokenkeeper.campaign_wait AS w ON w.campaign_id = p.campaign_id
            \(which)
            """, parameters
        ).decode { row throws(DatabaseError) in try CampaignProgress(&row) }
    }

    /// One campaign as an object of JSON, with the view's columns and `waits_because`; nil if there is none.
    public static func json(_ number: Int64, on connection: inout Connection) throws(DatabaseError) -> String? {
        try json("WHERE p.campaign_id = $1", [.int8(number)], on: &connection).first
    }

    /// The latest campaigns as objects of JSON, the newest first.
    public static func latestJSON(_ most: Int, on connection: inout Connection) throws(DatabaseError) -> [String] {
        try json("ORDER BY p.campaign_id DESC LIMIT $1", [.int8(Int64(most))], on: &connection)
    }

    private static func json(
        _ which: String, _ parameters: [Parameter], on connection: inout Connection
    ) throws(DatabaseError) -> [String] {
        try connection.transaction(reading) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT row_to_json(c)::text FROM (
                    SELECT p.*, w.reason AS waits_because
                    FROM tokenkeeper.campaign_progress AS p LEFT JOIN tokenkeeper.campaign_wait AS w ON w.campaign_id = p.campaign_id
                    \(which)) AS c
                """, parameters
            ).values()
        }
    }
}

extension CampaignProgress {
    fileprivate init(_ row: inout Row) throws(DatabaseError) {
        number = try row.read()
        name = try row.read()
        environment = try row.read()
        topic = try row.read()
        state = try row.read()
        audience = try row.read()
        expected = try row.read()
        isAddressed = try row.read()
        addressed = try row.read()
        waiting = try row.read()
        ended = []
        for _ in Self.outcomeNames { ended.append(try row.read()) }
        perSecond = try row.read()
        expectedEnd = try row.read()
        createdAt = try row.read()
        createdBy = try row.read()
        scheduledAt = try row.read()
        startedAt = try row.read()
        endedAt = try row.read()
        waitsBecause = try row.read()
    }
}

/// What can be done with a campaign. The functions raise 22023 for an unknown one, and 42501 for one of another role.
public enum CampaignChange: Sendable {
    case pause, resume, cancel
    /// Requests per second, 1 to 1,000,000; nil for no limit.
    case rate(Int?)

    /// - Returns: False if there was nothing to change.
    public func apply(to number: Int64, on connection: inout Connection) throws(DatabaseError) -> Bool {
        let (call, parameters): (String, [Parameter]) =
            switch self {
            case .pause: ("pause_campaign($1)", [])
            case .resume: ("resume_campaign($1)", [])
            case .cancel: ("cancel_campaign($1)", [])
            case .rate(let rate): ("set_campaign_rate($1, $2::integer)", [.int8(rate.map(Int64.init))])
            }
        return try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query("SELECT tokenkeeper.\(call)", [.int8(number)] + parameters).value()
        }
    }
}
