/// The topics of a database.
public enum KnownTopics {
    /// Each once, in order, whatever its environments.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query("SELECT DISTINCT t.topic FROM tokenkeeper.topic AS t ORDER BY 1").decode {
            row throws(DatabaseError) in
            try row.read(String.self)
        }
    }
}
