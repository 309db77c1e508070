extension DatabaseCheck {
    /// Triggers that `attach` has generated elsewhere: a dump has brought them. What they queue is rejected, because nobody knows its source.
    static let strayTriggers = DatabaseCheck("attached tables") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT format('%I.%I', n.nspname, c.relname), quote_literal(format('%I.%I', n.nspname, c.relname)),
                   string_agg(t.tgname::text, ', ' ORDER BY t.tgname)
            FROM pg_catalog.pg_trigger AS t
            JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
            WHERE t.tgparentid = 0 AND t.tgname ~ '^tokenkeeper_(insert|update|delete)_[0-9]+$'
              AND NOT EXISTS (SELECT FROM tokenkeeper.attachment AS a
                              WHERE a.table_id = c.oid AND a.source_id::text = substring(t.tgname FROM '[0-9]+$'))
            GROUP BY 1, 2 ORDER BY 1
            """
        ).decode { row throws(DatabaseError) in
            let (table, literal, triggers) = (
                try row.read(String.self), try row.read(String.self), try row.read(String.self)
            )
            return Finding(
                .problem, "attached tables",
                "\(table) has triggers of an attachment that this database does not know, and what they queue is rejected: \(triggers)",
                fixedBy: ["SELECT tokenkeeper.detach(\(literal));"])
        }
        return problems(found, "attached tables", elseFine: "every trigger belongs to an attachment")
    }
}
