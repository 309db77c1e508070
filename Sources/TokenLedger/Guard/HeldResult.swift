internal import TokenModel

/// A suspect or 410 that the mass-failure guard holds, and what it would be recorded as.
struct HeldResult {
    /// The result's row in its batch.
    var row: Int
    var address: TokenAddress
    /// Otherwise a 410.
    var isSuspect: Bool
    var at: Instant
    var reason: String

    /// The columns of `held_result` that the queue does not have: topic_id, cause, token_key, invalidated_at, reason.
    static func parameters(
        _ held: ArraySlice<HeldResult>, on connection: inout Connection
    ) throws(DatabaseError) -> [Parameter] {
        let topics = try connection.query(
            """
            SELECT t.environment, t.topic, t.topic_id FROM tokenkeeper.topic AS t
            WHERE (t.environment, t.topic) IN (SELECT * FROM unnest($1, $2))
            """,
            [.texts(held.map(\.address.environment.rawValue)), .texts(held.map(\.address.topic.name))])
        let numbers: [String: Int32] = Dictionary(
            uniqueKeysWithValues: try topics.decode { row throws(DatabaseError) in
                ("\(try row.read(String.self)) \(try row.read(String.self))", try row.read())
            })
        return [
            .int4s(held.map { numbers["\($0.address.environment.rawValue) \($0.address.topic.name)"] }),
            .texts(held.map { $0.isSuspect ? "suspect" : "stale" }),
            .byteas(held.map(\.address.token.bytes)), .instants(held.map(\.at)), .texts(held.map(\.reason)),
        ]
    }
}
