/// A table of the provider, as people name it.
public enum AttachedTable {
    /// The schema and name of a table, quoted where SQL needs it.
    ///
    /// A name without a schema is looked for in the schemas of the login's path, as psql would. Only the name of a table is looked up
    /// there: the path of the transaction stays our own (`OwnNames`).
    ///
    /// - Parameter table: As in SQL.
    /// - Throws: SQLSTATE 42P01 if there is no such table.
    public static func name(of table: String, on connection: inout Connection) throws(DatabaseError) -> String {
        try connection.query(
            """
            SELECT format('%I.%I', n.nspname, c.relname) FROM pg_catalog.pg_class AS c
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
            WHERE c.oid = coalesce(
                (SELECT f.found
                 FROM pg_catalog.pg_settings AS s
                 CROSS JOIN LATERAL unnest(string_to_array(s.reset_val, ',')) WITH ORDINALITY AS p (part, place)
                 CROSS JOIN LATERAL (SELECT btrim(p.part, ' "') AS name) AS w
                 CROSS JOIN LATERAL (
                     SELECT to_regclass(format('%I.%s', CASE w.name WHEN '$user' THEN current_user::text ELSE w.name END, $1)) AS found) AS f
                 WHERE s.name = 'search_path' AND w.name <> '' AND cardinality(parse_ident($1)) = 1 AND f.found IS NOT NULL
                 ORDER BY p.place LIMIT 1),
                -- Not as $1::regclass, which the planner would evaluate.
                (SELECT t.name::regclass FROM (SELECT $1::text AS name OFFSET 0) AS t))
            """, [.text(table)]
        ).value()
    }
}
