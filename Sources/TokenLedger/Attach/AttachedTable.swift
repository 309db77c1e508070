/// A table of the provider, as people name it.
public enum AttachedTable {
    /// The schema and name of a table, quoted where SQL needs it.
    ///
    /// - Parameter table: As in SQL; the session's search_path applies.
    /// - Throws: SQLSTATE 42P01 if there is no such table.
    public static func name(of table: String, on connection: inout Connection) throws(DatabaseError) -> String {
        try connection.query(
            """
            SELECT format('%I.%I', n.nspname, c.relname) FROM pg_catalog.pg_class AS c
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = $1::regclass
            """, [.text(table)]
        ).value()
    }
}
