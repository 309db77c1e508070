import Foundation

/// The tokens and results, the same for every contestant: token n is the SHA-256 of the number n.
///
/// In addition to its active tokens, a ledger has a tenth as many (every eleventh token) that have been stale for longer than the
/// retention. Every thousandth token has a tag.
struct Workload: Sendable {
    /// How many active tokens the ledger has.
    let tokens: Int

    static let topics = ["com.example.app", "com.example.app.voip", "com.example.news"]

    /// Milliseconds since 1970. The timestamps of all 410s are after this, all registrations before.
    static let base = Int64(Date.now.timeIntervalSince1970 - 86_400) * 1000

    /// The tag of one token in a thousand.
    static let rareTag = "one_in_a_thousand"

    /// Coprime to a power of ten, so consecutive results concern tokens from all over the ledger, each once per lap.
    private static let stride = 618_033_989

    /// Fills the empty ledger of a database.
    func fill(_ session: Session) throws {
        for topic in Self.topics {
            try session.run("INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', '\(topic)')")
        }
        try session.run(
            """
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, stale_at, stale_reason, tags)
            SELECT \(Self.topicID("n")), \(Self.key("n")),
                   b.base - CASE WHEN n % 11 = 0 THEN interval '200 days' ELSE interval '10 days' END + n % 86400 * interval '1 s',
                   CASE WHEN n % 11 = 0 THEN b.base - interval '150 days' END,
                   CASE WHEN n % 11 = 0 THEN 'Unregistered' END,
                   CASE WHEN n % 1000 = 0 THEN ARRAY['\(Self.rareTag)'] END
            FROM generate_series(1, \(tokens / 10 * 11)) AS n, (SELECT to_timestamp(\(Self.base / 1000)) AS base) AS b
            """)
        try session.run(
            """
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
            SELECT to_timestamp(\(Self.base / 1000)) - interval '100 days', topic_id, token_key FROM tokenkeeper.ledger WHERE suppressed
            """)
        try session.run("VACUUM (ANALYZE) tokenkeeper.ledger")
        try session.run("VACUUM (ANALYZE) tokenkeeper.suppression")
        try session.run("VACUUM (ANALYZE) tokenkeeper.topic")
    }

    /// How many rows of the ledger a sweep should prune.
    var stale: Int { tokens / 10 }

    private static func topicID(_ number: String) -> String { "1 + (\(number))::integer % 3" }
    private static func key(_ number: String) -> String { "sha256((\(number))::text::bytea)" }

    /// The number of the active token that a position stands for, as an SQL expression.
    func number(_ position: String) -> String {
        let k = "((\(position))::bigint * \(Self.stride) % \(tokens))"
        return "(\(k) / 10 * 11 + \(k) % 10 + 1)"
    }

    /// The hex text of a token, and its topic, by position.
    func token(_ position: String) -> String { "encode(\(Self.key(number(position))), 'hex')" }
    func topic(_ position: String) -> String {
        "(ARRAY['\(Self.topics.joined(separator: "','"))'])[\(Self.topicID(number(position)))]"
    }

    /// The hex texts of tokens from all over the ledger, as an SQL query. One in eleven has been stale for long.
    func tokens(_ positions: Range<Int>, of topic: Int) -> String {
        let number = "(i * \(Self.stride) % \(tokens / 10 * 11) + 1)"
        return """
            SELECT encode(\(Self.key(number)), 'hex') FROM generate_series(\(positions.lowerBound)::bigint, \(positions.upperBound - 1)) AS i
            WHERE \(Self.topicID(number)) = \(topic)
            """
    }

    /// Results as a sender queues them, with the columns environment, topic, token, status, body, sent_at.
    ///
    /// - Parameter deadEvery: Every n-th result is a 410, the others are 200s.
    func results(_ positions: Range<Int>, deadEvery: Int) -> String {
        // Each 410 concerns a different token, as long as there are any left.
        let position = "CASE WHEN i % \(deadEvery) = 0 THEN i / \(deadEvery) ELSE i END"
        return """
            SELECT 'production' AS environment, \(topic(position)) AS topic, \(token(position)) AS token,
                   CASE WHEN i % \(deadEvery) = 0 THEN 410 ELSE 200 END AS status,
                   CASE WHEN i % \(deadEvery) = 0 THEN '{"reason":"Unregistered","timestamp":' || \(Self.base) + i || '}' END AS body,
                   to_timestamp((\(Self.base) + i) / 1000) AS sent_at
            FROM generate_series(\(positions.lowerBound)::bigint, \(positions.upperBound - 1)) AS i
            """
    }

    /// Queues results in a partition of the daemon's ring.
    func queue(_ positions: Range<Int>, deadEvery: Int, in partition: Partition, on session: Session) throws {
        try session.run(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, sent_at, partition_number)
            SELECT r.*, \(partition.number) FROM (\(results(positions, deadEvery: deadEvery))) AS r
            """)
        try session.run("ANALYZE \(partition.table)")
    }
}
