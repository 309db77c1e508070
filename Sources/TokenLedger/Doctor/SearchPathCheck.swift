/// Who else may create functions and operators where sessions look for names.
///
/// The daemon and its commands resolve only their own names (`OwnNames`). Whoever works with psql, and every program of the provider that
/// calls the schema's functions, has the login's path.
extension DatabaseCheck {
    static let searchPath = DatabaseCheck("search path") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT DISTINCT n.nspname::text, quote_ident(n.nspname), g.rolname::text
            FROM pg_catalog.pg_roles AS l
            CROSS JOIN LATERAL (
                SELECT coalesce(
                    (SELECT substring(c.setting FROM 13)
                     FROM pg_catalog.pg_db_role_setting AS d CROSS JOIN LATERAL unnest(d.setconfig) AS c (setting)
                     WHERE d.setrole IN (l.oid, 0) AND (d.setdatabase = 0 OR d.setdatabase = (
                               SELECT b.oid FROM pg_catalog.pg_database AS b WHERE b.datname = current_database()))
                       AND c.setting LIKE 'search_path=%'
                     ORDER BY d.setrole = 0, d.setdatabase = 0 LIMIT 1),
                    (SELECT s.reset_val FROM pg_catalog.pg_settings AS s WHERE s.name = 'search_path')) AS path) AS s
            CROSS JOIN LATERAL unnest(string_to_array(s.path, ',')) AS p (part)
            JOIN pg_catalog.pg_namespace AS n
              ON n.nspname = CASE btrim(p.part, ' "') WHEN '$user' THEN l.rolname::text ELSE btrim(p.part, ' "') END
            CROSS JOIN LATERAL aclexplode(n.nspacl) AS a
            LEFT JOIN pg_catalog.pg_roles AS g ON g.oid = a.grantee
            WHERE l.rolcanlogin AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND g.rolsuper IS NOT TRUE
              AND (l.rolsuper OR EXISTS (
                   SELECT FROM unnest($1) AS o (name) JOIN pg_catalog.pg_roles AS r ON r.rolname = o.name
                   WHERE pg_has_role(l.oid, r.oid, 'MEMBER')))
            ORDER BY 3 NULLS FIRST, 1
            """, [.texts(Grants.roles)]
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            guard let role = try row.read(String?.self) else {
                return Finding(
                    .problem, "search path",
                    "every login may create in the schema \(name), where sessions look for functions and operators: they would run with the rights "
                        + "of whoever uses their names",
                    fixedBy: ["REVOKE CREATE ON SCHEMA \(quoted) FROM PUBLIC;"])
            }
            return Finding(
                .note, "search path",
                "\(role) may create in the schema \(name), where sessions look for functions and operators: trust that role as far as those who "
                    + "use psql here")
        }
        return problems(found, "search path", elseFine: "no other role may create in its schemas")
    }
}
