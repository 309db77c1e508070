internal import TokenModel

/// That the mass-failure guard of a topic has opened or closed.
public struct GuardTransition: Equatable, Sendable {
    public var environment: String
    public var topic: String
    /// False when it has closed.
    public var opened: Bool
    /// Tokens that suspects have suppressed, or would have, within a day.
    public var tokens: Int64
    /// The active tokens of the topic; nil when they were not counted.
    public var active: Int64?
    /// The command that undoes what was recorded before it opened; nil when it has closed.
    public var undo: String?

    init(
        _ environment: Environment, _ topic: Topic, opened: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        let guardRow = try connection.query(
            "SELECT tokens, active, undo FROM tokenkeeper.guard WHERE environment = $1 AND topic = $2",
            [.text(environment.rawValue), .text(topic.name)]
        ).first { row throws(DatabaseError) in
            (tokens: try row.read(Int64.self), active: try row.read(Int64?.self), undo: try row.read(String?.self))
        }
        self.environment = environment.rawValue
        self.topic = topic.name
        self.opened = opened
        tokens = guardRow?.tokens ?? 0
        active = guardRow?.active
        undo = guardRow?.undo
    }
}

/// The guards of topics in which it has become quiet.
public enum MassFailureGuard {
    /// Closes those of topics without a suspect for ten minutes, and few within the last day.
    ///
    /// - Returns: Which.
    public static func closeQuiet(
        _ limits: GuardLimits, on connection: inout Connection
    ) throws(DatabaseError) -> [(environment: String, topic: String)] {
        // Cheaper than a transaction, every time but a few.
        let open = try connection.query("SELECT FROM tokenkeeper.guard WHERE tripped LIMIT 1")
        if open.count == 0 { return [] }
        return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                "SELECT environment, topic FROM tokenkeeper.reset_guards($1, $2 / 1000000::numeric)",
                [.int8(limits.allowance), .int8(limits.maxShare.millionths)]
            ).decode { row throws(DatabaseError) in (try row.read(), try row.read()) }
        }
    }
}
