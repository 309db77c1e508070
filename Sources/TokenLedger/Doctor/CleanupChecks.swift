/// What holds back the cleanup of dead rows, or slows the queue down: publications, slots, old transactions, autovacuum.
extension DatabaseCheck {
    /// Matches the tables whose rows come and go: the queues and the outbox.
    private static let queues =
        "'^(send_result|registration)(_[0-9]|_retry|_backlog)?$|^(send_request|campaign_batch|moved_row)$'"

    static let publications = DatabaseCheck("publications") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT u.pubname::text, quote_ident(u.pubname), u.puballtables,
                   (SELECT string_agg('tokenkeeper.' || quote_ident(c.relname), ', ' ORDER BY c.relname)
                    FROM pg_catalog.pg_publication_rel AS r JOIN pg_catalog.pg_class AS c ON c.oid = r.prrelid
                    WHERE r.prpubid = u.oid AND c.relname ~ \(queues)
                      AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper'))
            FROM pg_catalog.pg_publication AS u
            WHERE EXISTS (SELECT FROM pg_catalog.pg_publication_tables AS p
                          WHERE p.pubname = u.pubname AND p.schemaname = 'tokenkeeper' AND p.tablename ~ \(queues))
            ORDER BY 1
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            let (isOfAll, tables) = (try row.read(Bool.self), try row.read(String?.self))
            let command =
                isOfAll
                ? "DROP PUBLICATION \(quoted);"
                : "ALTER PUBLICATION \(quoted) DROP "
                    + (tables.map { "TABLE \($0);" } ?? "TABLES IN SCHEMA tokenkeeper;")
            return Finding(
                .problem, "publications",
                "publication \(name) includes a queue, and no subscriber keeps up with that"
                    + (isOfAll
                        ? "; it is FOR ALL TABLES: make one that names its tables (docs/how-to/back-up-and-restore.md)"
                        : ""),
                fixedBy: [command])
        }
        return problems(found, "publications", elseFine: "none includes a queue")
    }

    static let slots = DatabaseCheck("slots") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT s.slot_name::text, quote_literal(s.slot_name), s.active, s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL,
                   coalesce(greatest(age(s.xmin), age(s.catalog_xmin)), 0)
            FROM pg_catalog.pg_replication_slots AS s
            WHERE NOT s.active OR age(s.xmin) > 1000000 ORDER BY 1
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            let (isActive, holds, age) = (try row.read(Bool.self), try row.read(Bool.self), try row.read(Int64.self))
            return Finding(
                .problem, "slots",
                "replication slot \(name) " + (isActive ? "is used" : "has no consumer") + " and keeps WAL"
                    + (holds ? " and dead rows (of \(age) transactions)" : "")
                    + (isActive ? "; its consumer is far behind" : "; if its consumer does not come back, drop it"),
                fixedBy: isActive
                    ? ["SELECT * FROM pg_stat_replication;"] : ["SELECT pg_drop_replication_slot(\(quoted));"])
        }
        return problems(found, "slots", elseFine: "none is without a consumer")
    }

    /// A dump of a large database takes a quarter of an hour: see `CleanupHolder`.
    static let oldTransactions = DatabaseCheck("transactions") { connection throws(DatabaseError) in
        var found = try connection.query(
            """
            SELECT a.pid, coalesce(a.usename, '(none)')::text, coalesce(nullif(a.application_name, ''), '(none)'), a.state,
                   extract(epoch FROM clock_timestamp() - a.xact_start)::bigint
            FROM pg_catalog.pg_stat_activity AS a
            WHERE a.xact_start < clock_timestamp() - interval '15 minutes' AND (a.datid IS NULL OR a.datname = current_database())
              AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL OR a.state LIKE 'idle in transaction%')
              AND a.pid NOT IN (SELECT v.pid FROM pg_catalog.pg_stat_progress_vacuum AS v)
            ORDER BY a.xact_start LIMIT 5
            """
        ).decode { row throws(DatabaseError) in
            let pid = try row.read(Int32.self)
            let (role, application) = (try row.read(String.self), try row.read(String.self))
            let (state, seconds) = (try row.read(String?.self), try row.read(Int64.self))
            return Finding(
                .problem, "transactions",
                "session \(pid) of \(role), application \(application), has had a transaction open for \(seconds / 60) min"
                    + (state.map { " (\($0))" } ?? "") + ": dead rows stay until it ends",
                fixedBy: ["SELECT pg_terminate_backend(\(pid));"])
        }
        let mayRead = try connection.query("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')").value(
            Bool.self)
        if found.isEmpty, mayRead { found = [Finding(.passed, "transactions", "none is older than 15 minutes")] }
        if !mayRead {
            let words = found.isEmpty ? "those of other roles: " : "more of them, of other roles: "
            found.append(Finding(.notChecked, "transactions", words + "needs pg_read_all_stats or pg_monitor"))
        }
        return found
    }

    static let prepared = DatabaseCheck("prepared transactions") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT left(p.gid, 60), quote_literal(p.gid), p.owner::text, extract(epoch FROM clock_timestamp() - p.prepared)::bigint
            FROM pg_catalog.pg_prepared_xacts AS p
            WHERE p.database = current_database() AND p.prepared < clock_timestamp() - interval '5 minutes' ORDER BY p.prepared LIMIT 5
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            let (owner, seconds) = (try row.read(String.self), try row.read(Int64.self))
            return Finding(
                .problem, "prepared transactions",
                "prepared transaction \(name) of \(owner) has been waiting for \(seconds / 60) min: it keeps its locks and dead rows",
                fixedBy: ["COMMIT PREPARED \(quoted);", "ROLLBACK PREPARED \(quoted);"])
        }
        return problems(found, "prepared transactions", elseFine: "none is older than five minutes")
    }

    static let autovacuum = DatabaseCheck("autovacuum") { connection throws(DatabaseError) in
        let isOn = try connection.query(
            "SELECT current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean"
        ).value(Bool.self)
        var found: [Finding] = []
        if !isOn {
            found.append(
                Finding(
                    .problem, "autovacuum", "it is off in the whole server, or track_counts is: tables only grow",
                    fixedBy: [
                        "ALTER SYSTEM RESET autovacuum;", "ALTER SYSTEM RESET track_counts;",
                        "SELECT pg_reload_conf();",
                    ]))
        }
        // The tables lock_* never have a row.
        found += try connection.query(
            """
            SELECT c.relname::text, quote_ident(c.relname) FROM pg_catalog.pg_class AS c
            JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'tokenkeeper'
            WHERE c.relkind = 'r' AND c.relname !~ '^lock_' AND EXISTS (
                SELECT FROM unnest(c.reloptions) AS o (option) WHERE o.option ~* '^autovacuum_enabled=(false|off|no|0|f|n)$')
            ORDER BY 1
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            return Finding(
                .problem, "autovacuum", "it is off for tokenkeeper.\(name)",
                fixedBy: ["ALTER TABLE tokenkeeper.\(quoted) RESET (autovacuum_enabled);"])
        }
        return problems(found, "autovacuum", elseFine: "on, for all our tables")
    }

    /// More dead rows than twice what lets autovacuum begin: it does not keep up, or something holds it back.
    /// A note: after a large batch, autovacuum needs some minutes. `status` warns if it takes longer.
    static let deadRows = DatabaseCheck("dead rows") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT s.relname::text, quote_ident(s.relname), s.n_dead_tup, s.n_live_tup
            FROM pg_catalog.pg_stat_user_tables AS s
            WHERE \(StatusWarning.tooManyDeadRows)
            ORDER BY s.n_dead_tup DESC LIMIT 5
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            let (dead, live) = (try row.read(Int64.self), try row.read(Int64.self))
            return Finding(
                .note, "dead rows",
                "tokenkeeper.\(name) has \(dead) dead rows and \(live) live ones; if autovacuum does not remove them within 15 minutes, `status` warns",
                fixedBy: ["VACUUM (VERBOSE, ANALYZE) tokenkeeper.\(quoted);"])
        }
        return problems(found, "dead rows", elseFine: "autovacuum keeps up")
    }

    static let freezing = DatabaseCheck("freezing") { connection throws(DatabaseError) in
        let found = try connection.query(
            """
            SELECT c.relname::text, quote_ident(c.relname), age(c.relfrozenxid)
            FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'tokenkeeper'
            WHERE c.relkind = 'r' AND \(StatusWarning.isOverdue("age(c.relfrozenxid)", freezesAt: "current_setting('autovacuum_freeze_max_age')"))
            ORDER BY age(c.relfrozenxid) DESC LIMIT 5
            """
        ).decode { row throws(DatabaseError) in
            let (name, quoted) = (try row.read(String.self), try row.read(String.self))
            return Finding(
                .problem, "freezing",
                "tokenkeeper.\(name) was last frozen \(try row.read(Int64.self)) transactions ago; PostgreSQL stops at 2 billion",
                fixedBy: ["VACUUM (FREEZE, VERBOSE) tokenkeeper.\(quoted);"])
        }
        return problems(found, "freezing", elseFine: "no table is overdue")
    }
}
