/// The transactions of other sessions that keep a migration from a lock.
enum OpenTransactions {
    /// The error of a migration that did not get a lock. It names the transactions that may be in the way.
    ///
    /// It looks afterwards, because a session that waits cannot look. So it names all that have been open for as long as the migration
    /// has waited, and that hold a lock on anything in the schema.
    static func named(in error: DatabaseError, on connection: inout Connection) -> DatabaseError {
        let sessions = (try? sessions(on: &connection)) ?? []
        let blame =
            sessions.isEmpty ? "" : "; these transactions may be in the way: \(sessions.joined(separator: "; "))"
        return DatabaseError(
            error.kind, "\(error.message); nothing was changed, and `tokenkeeperd migrate` can be run again\(blame)")
    }

    private static let transaction = BatchTransaction(mode: .snapshot, lockTimeout: .seconds(1))

    /// The oldest first; at most five.
    private static func sessions(on connection: inout Connection) throws(DatabaseError) -> [String] {
        // As the login role: the owner, which an administrator works as, may not see when other roles' transactions began.
        try connection.transaction(transaction, settings: "SET LOCAL ROLE NONE;") { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT concat_ws(', ', coalesce('pid ' || l.pid, 'a prepared transaction (see pg_prepared_xacts)'), 'role ' || a.usename,
                                 'application ' || nullif(a.application_name, ''),
                                 'since ' || to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'))
                FROM (SELECT DISTINCT k.pid, k.virtualtransaction
                      FROM pg_catalog.pg_locks AS k JOIN pg_catalog.pg_class AS c ON c.oid = k.relation
                      WHERE k.locktype = 'relation' AND k.granted AND k.pid IS DISTINCT FROM pg_backend_pid()
                        AND k.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
                        AND c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper')) AS l
                LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
                -- A migration waits for five seconds at least. A role that may not see the instant sees all.
                WHERE coalesce(a.xact_start < clock_timestamp() - interval '4 seconds', true)
                ORDER BY a.xact_start LIMIT 5
                """
            ).values()
        }
    }
}
