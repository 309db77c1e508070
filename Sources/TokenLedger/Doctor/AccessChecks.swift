/// Roles and rights, and the daemons that use them.
extension DatabaseCheck {
    static let roles = DatabaseCheck("roles") { connection throws(DatabaseError) in
        let missing = try connection.query(
            """
            SELECT w.name FROM unnest($1) AS w (name)
            WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r WHERE r.rolname = w.name) ORDER BY 1
            """, [.texts(Grants.roles)]
        ).values(String.self)
        if !missing.isEmpty {
            return [
                Finding(
                    .problem, "roles", "these roles do not exist: \(missing.joined(separator: ", "))",
                    fixedBy: ["tokenkeeperd grants"])
            ]
        }
        let (role, held, isSuperuser) = try connection.query(
            """
            SELECT current_user::text,
                   ARRAY(SELECT w.name FROM unnest($1) AS w (name) WHERE pg_has_role(current_user, w.name, 'USAGE') ORDER BY 1),
                   r.rolsuper
            FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user
            """, [.texts(Grants.roles)]
        ).one { row throws(DatabaseError) in
            (try row.read(String.self), try row.read([String].self), try row.read(Bool.self))
        }
        let rights =
            isSuperuser ? "a superuser" : held.isEmpty ? "a member of no group" : "with " + held.joined(separator: ", ")
        return [Finding(.passed, "roles", "all exist; this session is \(role), \(rights)")]
    }

    /// The schema's functions run with their owner's rights: what it has and does not need is worth an attack.
    static let owner = DatabaseCheck("owner") { connection throws(DatabaseError) in
        let (name, excess, fix) = try connection.query(
            """
            SELECT r.rolname::text, array_remove(ARRAY[
                       CASE WHEN r.rolsuper THEN 'SUPERUSER' END, CASE WHEN r.rolcreaterole THEN 'CREATEROLE' END,
                       CASE WHEN r.rolcreatedb THEN 'CREATEDB' END, CASE WHEN r.rolreplication THEN 'REPLICATION' END,
                       CASE WHEN r.rolbypassrls THEN 'BYPASSRLS' END], NULL),
                   -- The first superuser of a cluster cannot lose its rights.
                   CASE WHEN r.oid <> 10 THEN format('ALTER ROLE %I', r.rolname) END
            FROM pg_catalog.pg_roles AS r WHERE r.rolname = \(SchemaOwner.sql)
            """
        ).one { row throws(DatabaseError) in
            (try row.read(String.self), try row.read([String].self), try row.read(String?.self))
        }
        if excess.isEmpty { return [Finding(.passed, "owner", "\(name) has no more rights than it needs")] }
        let command = fix.map { ["\($0) \(excess.map { "NO\($0)" }.joined(separator: " "));"] } ?? []
        return [
            Finding(
                .problem, "owner",
                "\(name) owns the schema, whose functions run with its rights, and has \(excess.joined(separator: ", "))"
                    + (command.isEmpty ? ": let another role own the schema" : ""), fixedBy: command)
        ]
    }

    /// What each role cannot work without. `grants.sql` has all of it.
    static let rights = DatabaseCheck("rights") { connection throws(DatabaseError) in
        let lacking = try connection.query(
            """
            SELECT r.rolname::text, w.what
            FROM pg_catalog.pg_roles AS r
            JOIN (
                SELECT g.name AS role, 'USAGE on the schema' AS what, NOT has_schema_privilege(g.name, n.oid, 'USAGE') AS lacks
                FROM unnest($1) AS g (name)
                CROSS JOIN (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'tokenkeeper') AS n
                UNION ALL
                SELECT t.role, t.privilege || ' on ' || t.name, NOT has_any_column_privilege(t.role, c.oid, t.privilege)
                FROM (VALUES ('tokenkeeper_sender', 'send_result', 'INSERT'), ('tokenkeeper_sender', 'send_request', 'INSERT'),
                             ('tokenkeeper_app', 'registration', 'INSERT'),
                             ('tokenkeeper_reader', 'status', 'SELECT'), ('tokenkeeper_monitor', 'stale_share', 'SELECT'),
                             ('tokenkeeper_operator', 'status', 'SELECT'),
                             ('tokenkeeper_operator', 'topic_policy', 'UPDATE'), ('tokenkeeper_daemon', 'ledger', 'UPDATE'),
                             ('tokenkeeper_daemon', 'token_event_log', 'INSERT'), ('tokenkeeper_daemon', 'daemon', 'INSERT'),
                             ('tokenkeeper_daemon', 'sweep_run', 'INSERT'), ('tokenkeeper_daemon', 'send_request', 'UPDATE'))
                     AS t (role, name, privilege)
                JOIN pg_catalog.pg_class AS c ON c.relname = t.name
                     AND c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'tokenkeeper')
                UNION ALL
                SELECT 'tokenkeeper_daemon', 'DELETE on ' || c.relname, NOT has_table_privilege('tokenkeeper_daemon', c.oid, 'DELETE')
                FROM pg_catalog.pg_class AS c
                WHERE c.relname ~ '^(send_result|registration)_([0-7]|retry|backlog)$' AND c.relkind = 'r'
                  AND c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'tokenkeeper')
                UNION ALL
                SELECT f.role, 'EXECUTE on ' || p.proname, NOT has_function_privilege(f.role, p.oid, 'EXECUTE')
                FROM (VALUES ('tokenkeeper_sender', 'is_sendable'), ('tokenkeeper_sender', 'enqueue'), ('tokenkeeper_app', 'register'),
                             ('tokenkeeper_operator', 'reinstate'), ('tokenkeeper_operator', 'resume_sending'),
                             ('tokenkeeper_operator', 'request_sweep'), ('tokenkeeper_daemon', 'record'),
                             ('tokenkeeper_daemon', 'apply_registrations'), ('tokenkeeper_daemon', 'lock_batch'),
                             ('tokenkeeper_daemon', 'claim_requests')) AS f (role, name)
                JOIN pg_catalog.pg_proc AS p ON p.proname = f.name
                     AND p.pronamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'tokenkeeper')
            ) AS w ON w.role = r.rolname AND w.lacks
            ORDER BY 1, 2 LIMIT 10
            """, [.texts(Grants.roles)]
        ).decode { row throws(DatabaseError) in "\(try row.read(String.self)) lacks \(try row.read(String.self))" }
        return problems(
            lacking.map { Finding(.problem, "rights", $0, fixedBy: ["tokenkeeperd grants"]) }, "rights",
            elseFine: "each role has what it needs")
    }

    /// The view `status` says whether they work; this says whether they run as they should.
    static let daemons = DatabaseCheck("daemons") { connection throws(DatabaseError) in
        let versions = try connection.query(
            """
            SELECT d.daemon_id, d.version FROM tokenkeeper.daemon AS d
            WHERE \(Heartbeat.isLiveInSQL) ORDER BY 1
            """
        ).decode { row throws(DatabaseError) in (try row.read(String.self), try row.read(String.self)) }
        if versions.isEmpty {
            return [
                Finding(
                    .problem, "daemons", "no daemon is running on this database",
                    fixedBy: ["systemctl start tokenkeeperd", "journalctl -u tokenkeeperd -n 50"])
            ]
        }
        let superusers = try connection.query(
            """
            SELECT DISTINCT a.usename::text FROM pg_catalog.pg_stat_activity AS a JOIN pg_catalog.pg_roles AS r ON r.oid = a.usesysid
            WHERE a.datname = current_database() AND a.application_name = 'tokenkeeperd' AND r.rolsuper AND a.pid <> pg_backend_pid()
            ORDER BY 1
            """
        ).values(String.self)
        var found = superusers.map {
            Finding(
                .problem, "daemons",
                "a daemon or a command is connected as the superuser \($0), and needs only tokenkeeper_daemon",
                fixedBy: ["CREATE ROLE tokenkeeperd LOGIN IN ROLE tokenkeeper_daemon;"])
        }
        if Set(versions.map(\.1)).count > 1 {
            found.append(
                Finding(
                    .problem, "daemons",
                    "daemons of different versions are running: "
                        + versions.map { "\($0.0) is \($0.1)" }.joined(separator: ", "),
                    fixedBy: ["systemctl restart tokenkeeperd"]))
        }
        return problems(
            found, "daemons",
            elseFine: (versions.count == 1 ? "one is running" : "\(versions.count) are running")
                + ", version \(versions[0].1)")
    }

    static let warnings = DatabaseCheck("warnings") { connection throws(DatabaseError) in
        let count = try connection.query("SELECT cardinality(warnings) FROM tokenkeeper.status").value(Int.self)
        return count == 0
            ? [Finding(.passed, "warnings", "status has none")]
            : [
                Finding(
                    .problem, "warnings", count == 1 ? "status has a warning" : "status has \(count) warnings",
                    fixedBy: ["tokenkeeperd status"])
            ]
    }
}
