/// Requests that a daemon has claimed, and must no longer send.
extension Outbox {
    /// What changed for requests since the claim.
    public struct Recalled: Sendable {
        /// Somebody has paused their topic or campaign, or cancelled their campaign. They go back to the outbox.
        public var paused: Set<Int64> = []
        /// They were deleted, as `forget` does, or another daemon has taken them over. Nothing more is to be done with them.
        public var gone: Set<Int64> = []

        public init() {}

        public var isEmpty: Bool { paused.isEmpty && gone.isEmpty }
    }

    /// Looks up whether requests may still be sent. Locks nothing.
    ///
    /// - Parameter numbers: Some that this daemon has claimed.
    public func recalled(
        among numbers: [Int64], on connection: inout Connection
    ) throws(DatabaseError) -> Recalled {
        let changed = try connection.query(
            "SELECT r.number, r.is_gone FROM tokenkeeper.recalled_requests($1, $2) AS r",
            [.text(daemonID), .int8s(numbers)]
        ).decode { row throws(DatabaseError) in
            (number: try row.read(Int64.self), isGone: try row.read(Bool.self))
        }
        var recalled = Recalled()
        for (number, isGone) in changed {
            if isGone { recalled.gone.insert(number) } else { recalled.paused.insert(number) }
        }
        return recalled
    }
}
