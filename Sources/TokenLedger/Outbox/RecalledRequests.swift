/// Requests that a daemon has claimed, and must no longer send.
extension Outbox {
    /// What changed for requests since the claim.
    public struct Recalled: Sendable {
        /// An operator, or another daemon, has paused their topic. They go back to the outbox.
        public var paused: Set<Int64> = []

        public init() {}

        public var isEmpty: Bool { paused.isEmpty }
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
            SELECT n.request_id
            FROM unnest($1::bigint[]) AS n (request_id) CROSS JOIN LATERAL (
                SELECT r.topic, coalesce(r.environment, 'production') AS environment
                FROM tokenkeeper.send_request AS r WHERE r.request_id = n.request_id OFFSET 0) AS r
            WHERE EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = r.topic AND p.environment = r.environment)
            """, [.int8s(numbers)])
        var recalled = Recalled()
        recalled.paused = Set(try rows.values(Int64.self))
        return recalled
    }
}
