public import TokenModel

/// What the view `tokenkeeper.status` says beyond the queue of results: for the daemon's own `Status:` line.
public struct StatusSummary: Equatable, Sendable {
    /// Requests that wait or are in flight, those of campaigns included.
    public var requests: Int64 = 0
    /// Whether there may be more of them.
    public var hasMoreRequests = false
    /// Since when the oldest request has been due; nil if none is.
    public var oldestDue: Instant?
    /// In the view's order.
    public var warnings: [String] = []

    public init() {}

    /// Takes some milliseconds; at most 200 ms if a table of the schema is locked.
    public init(on connection: inout Connection) throws(DatabaseError) {
        let rows = try connection.query(
            """
            SELECT coalesce(s.requests, 0), coalesce(s.requests - s.campaign_requests, 0) = 10000, clock_timestamp() - s.oldest_due_request_age, w.words
            FROM tokenkeeper.status AS s LEFT JOIN LATERAL unnest(s.warnings) WITH ORDINALITY AS w (words, position) ON true
            ORDER BY w.position
            """
        ).decode { row throws(DatabaseError) in
            (
                requests: try row.read(Int64.self), hasMore: try row.read(Bool.self),
                oldestDue: try row.read(Instant?.self),
                warning: try row.read(String?.self)
            )
        }
        requests = rows.first?.requests ?? 0
        hasMoreRequests = rows.first?.hasMore ?? false
        oldestDue = rows.first?.oldestDue
        warnings = rows.compactMap(\.warning)
    }
}
