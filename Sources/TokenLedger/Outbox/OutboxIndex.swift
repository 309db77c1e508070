/// SQL that steps along the index of unclaimed requests from topic to topic, instead of reading every request.
enum OutboxIndex {
    /// The expressions of the index, as in `0007_outbox.sql`. `r` is a row of `send_request`.
    private static let topic = "left(coalesce(r.topic, ''), 513)"
    private static let environment = "left(coalesce(r.environment, 'production'), 20)"
    private static let dueAt = "coalesce(r.scheduled_at, r.queued_at)"

    /// The settings of a transaction that uses `oldestByTopic`: without them, a plan may read the whole table.
    static let settings = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"

    /// A WITH clause. Its relation `scope` has a row for each topic and environment with an unclaimed request, with the columns `topic`,
    /// `environment`, `due_at` (of the request that is or will be due first) and `number` (from 1, in the order of the index).
    ///
    /// - Parameters:
    ///   - topic: Like `environment`, a parameter of the statement: where to begin. Its value is null to begin with the first topic.
    ///   - most: The most rows, as SQL. Senders may write any text as a topic, so there may be many.
    static func oldestByTopic(after topic: String, _ environment: String, most: String) -> String {
        let next = """
            SELECT \(Self.topic) AS topic, \(Self.environment) AS environment, \(dueAt) AS due_at
            FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL
            """
        let order = "ORDER BY \(Self.topic), \(Self.environment), \(dueAt) LIMIT 1"
        let begin = "(\(topic)::text IS NULL OR (\(Self.topic), \(Self.environment)) > (\(topic), \(environment)))"
        return """
            WITH RECURSIVE scope AS (
                (SELECT n.*, 1 AS number FROM (\(next) AND \(begin) \(order)) AS n)
                UNION ALL
                SELECT n.*, p.number + 1 FROM scope AS p CROSS JOIN LATERAL (
                    \(next) AND (\(Self.topic), \(Self.environment)) > (p.topic, p.environment) \(order)) AS n
                WHERE p.number < \(most)
            )
            """
    }
}
