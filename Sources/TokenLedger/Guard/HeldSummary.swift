/// What the mass-failure guard holds of a topic, for the operator who decides about it: its results, or its logouts.
public struct HeldSummary: Sendable {
    public let environment: String
    public let topic: String
    /// Suspects; 410s that `guard.hold_stale_share` holds; or logouts.
    public let cause: GuardTransition.Cause
    /// How many results, or logouts.
    public let results: Int64
    /// The number of different tokens.
    public let tokens: Int64
    /// When the first and the last of them were queued, in UTC; nil if none is held.
    public let queued: (first: String, last: String)?
    /// The reasons, with the number of results of each: `BadDeviceToken 99500, DeviceTokenNotForTopic 3`; of logouts, the sources:
    /// `shop.devices 99500`. Nil if none is held.
    public let reasons: String?
    /// When the guard tripped, in UTC; nil if it has not.
    public let trippedAt: String?
    /// The command that undoes what was recorded before the guard tripped; nil if it has not.
    public let undo: String?

    /// All topics with held results or logouts, or a tripped guard.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [HeldSummary] {
        let rows = try connection.query(
            """
            WITH row AS (
                SELECT h.cause, h.environment, h.topic, h.topic_id, h.token_key, h.reason, h.queued_at
                FROM tokenkeeper.held_result AS h
                UNION ALL
                SELECT 'unregistered_by_app', h.environment, h.topic, h.topic_id, h.token_key,
                       coalesce((SELECT s.name FROM tokenkeeper.registration_source AS s WHERE s.source_id = h.source_id), 'source ' || h.source_id),
                       h.queued_at
                FROM tokenkeeper.held_registration AS h
            ), held AS (
                SELECT h.cause, coalesce(h.environment, 'production') AS environment, h.topic, h.reason, count(*) AS results,
                       min(h.queued_at) AS first, max(h.queued_at) AS last
                FROM row AS h GROUP BY 1, 2, 3, 4
            ), held_topic AS (
                SELECT h.cause, h.environment, h.topic, sum(h.results)::bigint AS results, min(h.first) AS first, max(h.last) AS last,
                       string_agg(h.reason || ' ' || h.results, ', ' ORDER BY h.results DESC) AS reasons
                FROM held AS h GROUP BY 1, 2, 3
            ), token AS (
                SELECT k.cause, k.topic_id, count(*) AS tokens, min(k.environment) AS environment, min(k.topic) AS topic FROM (
                    SELECT h.cause, h.topic_id, h.token_key, min(coalesce(h.environment, 'production')) AS environment, min(h.topic) AS topic
                    FROM row AS h GROUP BY 1, 2, 3) AS k
                GROUP BY 1, 2
            )
            SELECT environment, topic, cause, coalesce(h.results, 0), coalesce(k.tokens, 0), \(inUTC("h.first")), \(inUTC("h.last")),
                   h.reasons, \(inUTC("g.tripped_at")), g.undo
            FROM held_topic AS h
            FULL JOIN (SELECT * FROM tokenkeeper.guard WHERE tripped) AS g USING (environment, topic, cause)
            LEFT JOIN token AS k USING (environment, topic, cause)
            ORDER BY topic, environment, cause
            """)
        return try rows.decode { row throws(DatabaseError) in
            HeldSummary(
                environment: try row.read(), topic: try row.read(), cause: try row.read(), results: try row.read(),
                tokens: try row.read(), queued: Self.range(try row.read(), try row.read()), reasons: try row.read(),
                trippedAt: try row.read(), undo: try row.read())
        }
    }

    /// Both are null, or neither.
    private static func range(_ first: String?, _ last: String?) -> (first: String, last: String)? {
        if let first, let last { (first, last) } else { nil }
    }

    /// Releases all held results and logouts of a topic. A daemon records them within seconds.
    ///
    /// - Parameter cause: Only what is held for it: suspect, stale or unregistered_by_app; nil for all.
    /// - Returns: How many.
    public static func release(
        topic: String, environment: String, cause: String?, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        try decide("release_held", topic, environment, cause, on: &connection)
    }

    /// Deletes all held results and logouts of a topic. They will never count.
    ///
    /// - Parameter cause: As for `release`.
    /// - Returns: How many.
    public static func discard(
        topic: String, environment: String, cause: String?, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        try decide("discard_held", topic, environment, cause, on: &connection)
    }

    private static func decide(
        _ function: String, _ topic: String, _ environment: String, _ cause: String?, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT tokenkeeper.\(function)($1, $2, $3)", [.text(topic), .text(environment), .text(cause)]
            ).value()
        }
    }
}
