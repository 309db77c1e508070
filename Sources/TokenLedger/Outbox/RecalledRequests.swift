/// Requests that a daemon has claimed, and must no longer send.
extension Outbox {
    /// What changed for requests since the claim.
    public struct Recalled: Sendable {
        /// An operator, or another daemon, has paused their topic. They go back to the outbox.
        public var paused: Set<Int64> = []
        /// They were deleted, as `forget` does, or another daemon has taken them over. Nothing more is to be done with them.
        public var gone: Set<Int64> = []

        public init() {}

        public var isEmpty: Bool { paused.isEmpty && gone.isEmpty }
    }

    /// Looks up whether requests may still be sent. Reads each by its number, and locks nothing.
    ///
    /// - Parameter numbers: Some that this daemon has claimed.
    public func recalled(
        among numbers: [Int64], on connection: inout Connection
    ) throws(DatabaseError) -> Recalled {
        // OFFSET: one request after the other, by the primary key.
        let rows = try connection.query(
            """
            SELECT n.request_id, r.topic IS NULL
            FROM unnest($1::bigint[]) AS n (request_id) LEFT JOIN LATERAL (
                SELECT r.topic, coalesce(r.environment, 'production') AS environment
                FROM tokenkeeper.send_request AS r
                WHERE r.request_id = n.request_id AND (r.claimed_by = $2) IS TRUE OFFSET 0) AS r ON true
            WHERE r.topic IS NULL
               OR EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = r.topic AND p.environment = r.environment)
            """, [.int8s(numbers), .text(daemonID)])
        let changed = try rows.decode { row throws(DatabaseError) in
            (number: try row.read(Int64.self), isGone: try row.read(Bool.self))
        }
        var recalled = Recalled()
        for (number, isGone) in changed {
            if isGone { recalled.gone.insert(number) } else { recalled.paused.insert(number) }
        }
        return recalled
    }
}
