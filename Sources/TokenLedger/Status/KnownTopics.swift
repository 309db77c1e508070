/// The topics of a database.
public enum KnownTopics {
    /// Those that have tokens, each once, in order, whatever its environments. Without those that have moved to another database.
    public static func withTokens(on connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query(
            """
            SELECT t.topic FROM tokenkeeper.topic AS t JOIN tokenkeeper.token_count AS c USING (topic_id)
            WHERE t.moved_to IS NULL GROUP BY t.topic HAVING sum(c.tokens) > 0 ORDER BY 1
            """
        ).values()
    }

    /// Those that have moved to another database, each with its name, and whose move has not ended.
    public static func moved(on connection: inout Connection) throws(DatabaseError) -> [(topic: String, to: String)] {
        try connection.query(
            "SELECT DISTINCT t.topic, t.moved_to FROM tokenkeeper.topic AS t WHERE t.moved_to IS NOT NULL ORDER BY 1"
        ).decode { row throws(DatabaseError) in (try row.read(), try row.read()) }
    }

    /// All of them, also those that only have a policy.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query("SELECT DISTINCT t.topic FROM tokenkeeper.topic AS t ORDER BY 1").values()
    }
}
