import TokenModel

/// The sending daemons, each with its row in `tokenkeeper.sending_daemon`. When one ends, another takes over its requests.
extension Outbox {
    /// Writes this daemon's heartbeat.
    ///
    /// - Parameters:
    ///   - credentials: A JSON array of objects with `name`, `kind`, `topics` and, of a certificate, `expires_at`; never a secret.
    ///   - trouble: What keeps requests waiting, one sentence each.
    public func beat(
        credentials: String, trouble: [String], on connection: inout Connection
    ) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.sending_daemon AS d (daemon_id, process_scope, heartbeat_at, credentials, problems)
                VALUES ($1, $2, clock_timestamp(), $3::text::jsonb, $4)
                ON CONFLICT (daemon_id) DO UPDATE SET heartbeat_at = excluded.heartbeat_at, credentials = excluded.credentials, problems = excluded.problems,
                    stopped_at = NULL
                """, [.text(daemonID), .text(processScope), .text(credentials), .texts(trouble)])
            try connection.run(
                """
                DELETE FROM tokenkeeper.sending_daemon AS d WHERE d.heartbeat_at < clock_timestamp() - interval '1 day'
                  AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.claimed_by = d.daemon_id)
                """)
        }
    }

    /// Signs off: this daemon stops, and has claimed nothing.
    public func signOff(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                "UPDATE tokenkeeper.sending_daemon SET stopped_at = clock_timestamp() WHERE daemon_id = $1",
                [.text(daemonID)])
        }
    }

    /// Returns the requests of ended daemons to the outbox. A daemon has ended if it signed off, was silent for a minute, or ran
    /// in this process scope and its process is gone.
    ///
    /// Such a request may have been sent already, so `interruptions` counts this. After the second interruption it fails instead
    /// of being sent again.
    ///
    /// - Parameters:
    ///   - silentToo: Whether silence counts. False after an outage of the database, when every daemon has been silent.
    ///   - isAlive: Whether a daemon of this process scope still runs.
    /// - Returns: How many requests were returned.
    @discardableResult
    public func takeOver(
        silentToo: Bool = true, on connection: inout Connection, isAlive: (_ daemonID: String) -> Bool
    ) throws(DatabaseError) -> Int {
        let gone = try connection.query(
            """
            SELECT h.claimed_by, d.process_scope, d.stopped_at IS NULL AND (NOT $2 OR d.heartbeat_at > clock_timestamp() - $1 * interval '1 microsecond')
            FROM (SELECT DISTINCT r.claimed_by FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NOT NULL) AS h
            LEFT JOIN tokenkeeper.sending_daemon AS d ON d.daemon_id = h.claimed_by
            """, [.int8(Self.silence.microseconds), .bool(silentToo)]
        ).decode { row throws(DatabaseError) in
            // A daemon without a row of its own has neither a scope nor a heartbeat.
            (holder: try row.read(String.self), scope: try row.read(String?.self), beats: try row.read(Bool?.self))
        }.filter {
            $0.holder != daemonID && !($0.beats == true && ($0.scope != processScope || isAlive($0.holder)))
        }.map(\.holder)
        if gone.isEmpty { return 0 }
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                UPDATE tokenkeeper.send_request SET claimed_by = NULL, attempts = attempts + 1, interruptions = interruptions + 1
                WHERE request_id = ANY (ARRAY(SELECT r.request_id FROM tokenkeeper.send_request AS r WHERE r.claimed_by = ANY ($1)
                                              FOR UPDATE SKIP LOCKED))
                """, [.texts(gone)]
            ).affected
        }
    }
}
