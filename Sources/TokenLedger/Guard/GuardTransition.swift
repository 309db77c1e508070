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
        let row = try connection.query(
            "SELECT tokens, active, undo FROM tokenkeeper.guard WHERE environment = $1 AND topic = $2",
            [.text(environment.rawValue), .text(topic.name)])
        self.environment = environment.rawValue
        self.topic = topic.name
        self.opened = opened
        tokens = row.count == 1 ? row.integer(0, 0) ?? 0 : 0
        active = row.count == 1 ? row.integer(0, 1) : nil
        undo = row.count == 1 ? row.text(0, 2) : nil
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
        return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100)).begin) {
            connection throws(DatabaseError) in
            let closed = try connection.query(
                "SELECT environment, topic FROM tokenkeeper.reset_guards($1, $2 / 1000000::numeric)",
                [.int8(limits.allowance), .int8(limits.maxShare.millionths)])
            return (0..<closed.count).map { (closed.text($0, 0) ?? "", closed.text($0, 1) ?? "") }
        }
    }
}
