internal import TokenModel

/// The mass-failure guard of a topic has tripped or reset.
public struct GuardTransition: Equatable, Sendable {
    public var environment: String
    public var topic: String
    /// Whether it is the guard of logouts from a source; otherwise that of suspects.
    public var isOfUnregistrations: Bool
    /// False if the guard has reset.
    public var tripped: Bool
    /// Tokens that suspects have suppressed, or would have, within a day.
    public var tokens: Int64
    /// The active tokens of the topic; nil if they have not been counted.
    public var active: Int64?
    /// The command that undoes what was recorded before the guard tripped; nil if it has reset.
    public var undo: String?

    init(
        _ environment: Environment, _ topic: Topic, tripped: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        let guardRow = try connection.query(
            "SELECT tokens, active, undo FROM tokenkeeper.guard WHERE environment = $1 AND topic = $2",
            [.text(environment.rawValue), .text(topic.name)]
        ).first { row throws(DatabaseError) in
            (tokens: try row.read(Int64.self), active: try row.read(Int64?.self), undo: try row.read(String?.self))
        }
        self.environment = environment.rawValue
        self.topic = topic.name
        self.isOfUnregistrations = false
        self.tripped = tripped
        tokens = guardRow?.tokens ?? 0
        active = guardRow?.active
        undo = guardRow?.undo
    }

    /// The guard of logouts.
    init(unregistrationsOf topicID: Int32, tripped: Bool, on connection: inout Connection) throws(DatabaseError) {
        let guardRow = try connection.query(
            """
            SELECT t.environment, t.topic, g.tokens, g.active, g.undo
            FROM tokenkeeper.topic AS t LEFT JOIN tokenkeeper.guard AS g ON g.topic = t.topic AND g.environment = t.environment
            WHERE t.topic_id = $1
            """, [.int4(topicID)]
        ).one { row throws(DatabaseError) in
            (
                environment: try row.read(String.self), topic: try row.read(String.self),
                tokens: try row.read(Int64?.self), active: try row.read(Int64?.self), undo: try row.read(String?.self)
            )
        }
        environment = guardRow.environment
        topic = guardRow.topic
        isOfUnregistrations = true
        self.tripped = tripped
        tokens = guardRow.tokens ?? 0
        active = guardRow.active
        undo = guardRow.undo
    }
}

/// Resets the mass-failure guard of topics that have become quiet.
public enum MassFailureGuard {
    /// Resets the guard of each topic that has had no suspect for ten minutes, and few within the last day.
    ///
    /// - Returns: The topics whose guard was reset.
    public static func resetQuiet(
        _ limits: GuardLimits, on connection: inout Connection
    ) throws(DatabaseError) -> [(environment: String, topic: String)] {
        // Usually no guard has tripped, and this query is cheaper than a transaction.
        let tripped = try connection.query("SELECT FROM tokenkeeper.guard WHERE tripped LIMIT 1")
        if tripped.count == 0 { return [] }
        return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                "SELECT environment, topic FROM tokenkeeper.reset_guards($1, $2 / 1000000::numeric)",
                [.int8(limits.allowance), .int8(limits.maxShare.millionths)]
            ).decode { row throws(DatabaseError) in (try row.read(), try row.read()) }
        }
    }
}
