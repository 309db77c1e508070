internal import TokenModel

/// The server: its role, and the settings that matter to the daemon, as this session sees them.
extension DatabaseCheck {
    static let standby = DatabaseCheck("server") { connection throws(DatabaseError) in
        let (isStandby, version) = try connection.query(
            "SELECT pg_is_in_recovery(), current_setting('server_version')"
        ).one { row throws(DatabaseError) in (try row.read(Bool.self), try row.read(String.self)) }
        return [
            isStandby
                ? Finding(
                    .note, "server", "this is a standby (PostgreSQL \(version)): the daemon works on the primary only")
                : Finding(.passed, "server", "PostgreSQL \(version), the primary")
        ]
    }

    /// - Parameter lockTimeout: The setting `drain.lock_timeout`.
    static func settings(lockTimeout: Duration) -> DatabaseCheck {
        DatabaseCheck("settings") { connection throws(DatabaseError) in
            var found: [Finding] = []
            let (deadlockTimeout, readOnly) = try connection.query(
                """
                SELECT (SELECT s.setting::bigint FROM pg_catalog.pg_settings AS s WHERE s.name = 'deadlock_timeout'),
                       ARRAY(SELECT CASE WHEN s.setrole = 0 THEN 'DATABASE ' || quote_ident(current_database())
                                         ELSE 'ROLE ' || quote_ident(r.rolname)
                                              || CASE s.setdatabase WHEN 0 THEN '' ELSE ' IN DATABASE ' || quote_ident(current_database()) END END
                             FROM pg_catalog.pg_db_role_setting AS s LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = s.setrole
                             WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database()))
                               AND (s.setrole = 0 OR pg_has_role(s.setrole, 'tokenkeeper_daemon', 'USAGE'))
                               AND EXISTS (SELECT FROM unnest(s.setconfig) AS c (line)
                                           WHERE c.line ~* '^default_transaction_read_only=(on|true|yes|1)$')
                             ORDER BY 1)
                """
            ).one { row throws(DatabaseError) in (try row.read(Int64.self), try row.read([String].self)) }
            if deadlockTimeout <= lockTimeout.milliseconds {
                found.append(
                    Finding(
                        .problem, "settings",
                        "deadlock_timeout is \(deadlockTimeout) ms, and drain.lock_timeout \(lockTimeout.milliseconds) ms, expected less: "
                            + "in a deadlock, your application would be the victim",
                        fixedBy: [
                            "ALTER SYSTEM SET deadlock_timeout = '\(lockTimeout.milliseconds * 2)ms';",
                            "SELECT pg_reload_conf();",
                        ]))
            }
            found += readOnly.map {
                Finding(
                    .problem, "settings", "default_transaction_read_only is on for \($0): your programs cannot write",
                    fixedBy: ["ALTER \($0) RESET default_transaction_read_only;"])
            }
            let isServerReadOnly = try connection.query(
                "SELECT s.reset_val = 'on' AND s.source NOT IN ('database', 'user', 'database user') FROM pg_catalog.pg_settings AS s WHERE s.name = 'default_transaction_read_only'"
            ).value(Bool.self)
            if isServerReadOnly {
                found.append(
                    Finding(
                        .problem, "settings", "default_transaction_read_only is on: your programs cannot write",
                        fixedBy: ["ALTER SYSTEM RESET default_transaction_read_only;", "SELECT pg_reload_conf();"]))
            }
            return problems(
                found, "settings",
                elseFine:
                    "deadlock_timeout (\(deadlockTimeout) ms) is longer than drain.lock_timeout (\(lockTimeout.milliseconds) ms)"
            )
        }
    }

    static let durability = DatabaseCheck("durability") { connection throws(DatabaseError) in
        let off = try connection.query(
            """
            SELECT s.name FROM pg_catalog.pg_settings AS s
            WHERE s.name IN ('fsync', 'full_page_writes') AND s.setting = 'off' ORDER BY 1
            """
        ).values(String.self)
        var found = off.map {
            Finding(
                .problem, "durability", "\($0) is off: a crash of the machine can destroy the database",
                fixedBy: ["ALTER SYSTEM RESET \($0);", "SELECT pg_reload_conf();"])
        }
        let commit = try connection.query(
            "SELECT s.reset_val FROM pg_catalog.pg_settings AS s WHERE s.name = 'synchronous_commit'"
        ).value(String.self)
        if commit == "off" {
            found.append(
                Finding(
                    .note, "durability",
                    "synchronous_commit is off: a crash loses the last results and registrations of your programs, which were told they are safe"
                ))
        }
        return problems(
            found, "durability", elseFine: "fsync and full_page_writes are on, synchronous_commit is \(commit)")
    }

    /// Most connections of the server are yours. The daemon needs a handful at a time: see docs/architecture.md.
    static let connections = DatabaseCheck("connections") { connection throws(DatabaseError) in
        let (used, most) = try connection.query(
            """
            SELECT (SELECT count(*) FROM pg_catalog.pg_stat_activity AS a WHERE a.datid IS NOT NULL),
                   current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
            """
        ).one { row throws(DatabaseError) in (try row.read(Int64.self), try row.read(Int64.self)) }
        if used * 10 < most * 9 {
            return [Finding(.passed, "connections", "\(used) of \(most) are used")]
        }
        return [
            Finding(
                .problem, "connections",
                "\(used) of \(most) are used: soon the daemon may get none after a reconnect; raise max_connections (needs a restart), or use a pooler",
                fixedBy: [
                    "SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2 ORDER BY 3 DESC;"
                ])
        ]
    }
}
