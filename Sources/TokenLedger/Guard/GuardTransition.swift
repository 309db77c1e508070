internal import TokenModel

/// The mass-failure guard of a topic has tripped or reset.
public struct GuardTransition: Equatable, Sendable {
    /// What a guard holds. A topic has a guard for each.
    public enum Cause: String, Equatable, Sendable, ColumnDecodable {
        case suspect
        /// A 410. Its guard holds only with `guard.hold_stale_share`.
        case stale
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
    /// The active tokens of the topic; nil if the guard has reset.
    public var active: Int64?
    /// The command that undoes what was recorded before the guard tripped; nil if it has reset.
    public var undo: String?

    /// What `record` and `apply_registrations` return as `changes`, as columns of a query.
    static let columns = """
        ARRAY(SELECT c.topic_id FROM unnest(changes) AS c), ARRAY(SELECT c.cause FROM unnest(changes) AS c),
        ARRAY(SELECT c.tripped FROM unnest(changes) AS c)
        """

    /// Reads `columns`.
    static func read(
        _ topics: [Int32], _ causes: [String], _ tripped: [Bool], on connection: inout Connection
    ) throws(DatabaseError) -> [GuardTransition] {
        // Nearly always there is none.
        if topics.isEmpty { return [] }
        return try connection.query(
            """
            SELECT t.environment, t.topic, c.cause, c.tripped, coalesce(g.tokens, 0), g.active, g.undo
            FROM unnest($1, $2, $3) AS c (topic_id, cause, tripped) JOIN tokenkeeper.topic AS t USING (topic_id)
            LEFT JOIN tokenkeeper.guard AS g ON g.environment = t.environment AND g.topic = t.topic AND g.cause = c.cause COLLATE "C"
            ORDER BY t.topic, t.environment, c.cause
            """, [.int4s(topics), .texts(causes), .bools(tripped)]
        ).decode { row throws(DatabaseError) in
            let (environment, topic) = (try row.read(String.self), try row.read(String.self))
            return GuardTransition(
                cause: try row.read(), environment: environment, topic: topic, tripped: try row.read(),
                tokens: try row.read(), active: try row.read(), undo: try row.read())
        }
    }
}

/// Resets the mass-failure guard of topics that have become quiet.
public enum MassFailureGuard {
    /// Resets each guard that has held nothing for ten minutes, if little was suppressed within the last day.
    ///
    /// - Returns: The topics whose guard was reset, and what it held.
    public static func resetQuiet(
        _ limits: GuardLimits, on connection: inout Connection
    ) throws(DatabaseError) -> [(environment: String, topic: String, cause: GuardTransition.Cause)] {
        // Usually no guard has tripped, and this takes one round trip.
        let tripped = try connection.run("SELECT FROM tokenkeeper.tripped_guard LIMIT 1")
        if tripped.count == 0 { return [] }
        return try connection.transaction(BatchTransaction(lockTimeout: .milliseconds(100))) {
            connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT environment, topic, cause
                FROM tokenkeeper.reset_guards($1, $2 / 1000000::numeric, $3 / 1000000::numeric)
                """,
                [
                    .int8(limits.allowance), .int8(limits.maxShare.millionths),
                    .int8(limits.holdStaleShare.millionths),
                ]
            ).decode { row throws(DatabaseError) in (try row.read(), try row.read(), try row.read()) }
        }
    }
}
