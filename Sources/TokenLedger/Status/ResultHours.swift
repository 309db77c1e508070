public import TokenModel

/// Which results are counted: those of all topics, or of one.
public enum ResultScope: Sendable {
    case all
    case topic(String, environment: String)

    /// A condition on a row `c` of `result_count`, with the parameters $1 and $2.
    fileprivate static let condition = "($1::text IS NULL OR (c.topic = $1 AND c.environment = $2))"

    fileprivate var parameters: [Parameter] {
        switch self {
        case .all: [.text(nil), .text(nil)]
        case .topic(let topic, let environment): [.text(topic), .text(environment)]
        }
    }
}

/// Results of an hour.
public struct ResultHour: Sendable {
    /// When the hour began.
    public let at: Instant
    /// The 200s.
    public let accepted: Int64
    /// The 410s.
    public let stale: Int64
    /// All others.
    public let other: Int64

    public init(at: Instant, accepted: Int64, stale: Int64, other: Int64) {
        (self.at, self.accepted, self.stale, self.other) = (at, accepted, stale, other)
    }

    public var total: Int64 { accepted + stale + other }

    /// The last 24 hours and the current one, also those without results. Reads the counts of 26 hours of all topics.
    static func latest(of scope: ResultScope, on connection: inout Connection) throws(DatabaseError) -> [ResultHour] {
        try connection.query(
            """
            SELECT h.hour, coalesce(c.accepted, 0)::bigint, coalesce(c.stale, 0)::bigint, coalesce(c.other, 0)::bigint
            FROM generate_series(\(ResultCounts.hourInSQL) - interval '24 hours', \(ResultCounts.hourInSQL), interval '1 hour') AS h (hour)
            LEFT JOIN (
                SELECT c.hour, sum(c.results) FILTER (WHERE c.status = 200) AS accepted,
                       sum(c.results) FILTER (WHERE c.status = 410) AS stale,
                       sum(c.results) FILTER (WHERE c.status IS DISTINCT FROM 200 AND c.status IS DISTINCT FROM 410) AS other
                FROM tokenkeeper.result_count AS c
                WHERE c.hour > now() - interval '26 hours' AND \(ResultScope.condition) GROUP BY c.hour) AS c USING (hour)
            ORDER BY h.hour
            """, scope.parameters
        ).decode { row throws(DatabaseError) in
            ResultHour(at: try row.read(), accepted: try row.read(), stale: try row.read(), other: try row.read())
        }
    }
}

/// Which share of the results of an hour is usually a 410.
public struct UsualShare: Sendable {
    /// Nine of ten hours of the two weeks before the last day are between these; nil with fewer than 24 such hours.
    public let band: ClosedRange<Double>?
    /// The first hour with results in these two weeks and the day after them; nil if there was none.
    public let since: Instant?

    /// An hour with fewer results says nothing.
    public static let fewest = 20

    public init(band: ClosedRange<Double>?, since: Instant?) {
        (self.band, self.since) = (band, since)
    }

    /// Reads the counts of two weeks, of all topics.
    public init(
        of scope: ResultScope, within limit: Duration, on connection: inout Connection
    ) throws(DatabaseError) {
        self = try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT count(u.share), percentile_cont(0.05) WITHIN GROUP (ORDER BY u.share), percentile_cont(0.95) WITHIN GROUP (ORDER BY u.share),
                       min(u.hour)
                FROM (SELECT c.hour, CASE WHEN sum(c.results) >= \(Self.fewest) AND c.hour < \(ResultCounts.hourInSQL) - interval '24 hours'
                                          THEN coalesce(sum(c.results) FILTER (WHERE c.status = 410), 0)::float8 / sum(c.results)::float8 END AS share
                      FROM tokenkeeper.result_count AS c
                      WHERE c.hour > now() - interval '15 days' AND \(ResultScope.condition) GROUP BY c.hour) AS u
                """, scope.parameters
            ).one { row throws(DatabaseError) in
                let hours = try row.read(Int64.self)
                let low = try row.read(Double?.self)
                let high = try row.read(Double?.self)
                let band = low.flatMap { low in high.map { low...max(low, $0) } }
                return UsualShare(band: hours < 24 ? nil : band, since: try row.read())
            }
        }
    }
}
