internal import TokenModel

/// The mass-failure guard of a topic has tripped or reset.
public struct GuardTransition: Equatable, Sendable {
    /// What a guard holds. A topic has a guard for each.
    public enum Cause: String, Equatable, Sendable, ColumnDecodable {
        case suspect
        /// Logouts that a source reported: an attached table, a backfill or a file.
        case unregisteredByApp = "unregistered_by_app"
    }

    public var cause: Cause
    public var environment: String
    public var topic: String
    /// False if the guard has reset.
    public var tripped: Bool
    /// Tokens that suspects, or logouts, have suppressed, or would have, within a day.
    public var tokens: Int64
    /// The active tokens of the topic; nil if they have not been counted.
    public var active: Int64?
    /// The command that undoes what was recorded before the guard tripped; nil if it has reset.
    public var undo: String?

    /// Of suspects, as `record` reports it.
    init(
        _ environment: Environment, _ topic: Topic, tripped: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        try self.init(.suspect, environment.rawValue, topic.name, tripped: tripped, on: &connection)
    }

    /// Of logouts, as `apply_registrations` reports it, by the topic's number.
    init(
        logoutsOf topicNumber: Int32, tripped: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        let (environment, topic) = try connection.query(
            "SELECT environment, topic FROM tokenkeeper.topic WHERE topic_id = $1", [.int4(topicNumber)]
        ).one { row throws(DatabaseError) in (try row.read(String.self), try row.read(String.self)) }
        try self.init(.unregisteredByApp, environment, topic, tripped: tripped, on: &connection)
    }

    private init(
        _ cause: Cause, _ environment: String, _ topic: String, tripped: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        let guardRow = try connection.query(
            "SELECT tokens, active, undo FROM tokenkeeper.guard WHERE environment = $1 AND topic = $2 AND cause = $3",
            [.text(environment), .text(topic), .text(cause.rawValue)]
        ).first { row throws(DatabaseError) in
            (tokens: try row.read(Int64.self), active: try row.read(Int64?.self), undo: try row.read(String?.self))
        }
        self.cause = cause
        self.environment = environment
        self.topic = topic
        self.tripped = tripped
        tokens = guardRow?.tokens ?? 0
        active = guardRow?.active
        undo = guardRow?.undo
    }
}

/// Resets the mass-failure guard of topics that have become quiet.
public enum MassFailureGuard {
    /// Resets each guard that has judged nothing for ten minutes, and has counted little within the last day.
    ///
    /// - Returns: The topics whose guard was reset, and what it held.
    public static func resetQuiet(
        _ limits: GuardLimits, on connection: inout Connection
    ) throws(DatabaseError) -> [(environment: String, topic: String, cause: GuardTransition.Cause)] {
        // Usually no guard has tripped, and this takes one round trip.
        let tripped = try connection.run("SELECT FROM tokenkeeper.guard WHERE tripped LIMIT 1")
        if tripped.count == 0 { return [] }
        return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                "SELECT environment, topic, cause FROM tokenkeeper.reset_guards($1, $2 / 1000000::numeric)",
                [.int8(limits.allowance), .int8(limits.maxShare.millionths)]
            ).decode { row throws(DatabaseError) in (try row.read(), try row.read(), try row.read()) }
        }
    }
}
