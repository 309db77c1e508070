public import TokenModel

/// The sending daemons, each with its row in `tokenkeeper.sending_daemon`. When one ends, another takes over its requests.
extension Outbox {
    /// Writes this daemon's heartbeat. It is durable, as claims are: while no COMMIT becomes durable, because the standby is away, for example, a
    /// daemon that has claimed nothing would go on otherwise, and take over the requests of one whose claim or ending hangs.
    ///
    /// - Parameters:
    ///   - credentials: A JSON array of objects with `name`, `kind`, `topics` and, of a certificate, `expires_at`; never a secret.
    ///   - trouble: What keeps requests waiting, one sentence each.
    ///   - perSecond: How many requests have ended per second since the heartbeat before.
    /// - Returns: The server's time of day.
    @discardableResult public func beat(
        credentials: String, trouble: [String], perSecond: Double = 0, on connection: inout Connection
    ) throws(DatabaseError) -> Instant {
        try connection.transaction(durable) { connection throws(DatabaseError) in
            let now = try connection.query(
                """
                INSERT INTO tokenkeeper.sending_daemon AS d (daemon_id, process_scope, heartbeat_at, credentials, problems, requests_per_second)
                VALUES ($1, $2, clock_timestamp(), $3::text::jsonb, $4, round($5 / 10.0, 1))
                ON CONFLICT (daemon_id) DO UPDATE SET heartbeat_at = excluded.heartbeat_at, credentials = excluded.credentials, problems = excluded.problems,
                    requests_per_second = excluded.requests_per_second, stopped_at = NULL
                RETURNING clock_timestamp()
                """,
                [
                    .text(daemonID), .text(processScope), .text(credentials), .texts(trouble),
                    .int8(Heartbeat.tenths(perSecond)),
                ]
            ).value(Instant.self)
            try connection.run(
                """
                DELETE FROM tokenkeeper.sending_daemon AS d WHERE d.heartbeat_at < clock_timestamp() - interval '1 day'
                  AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.claimed_by = d.daemon_id)
                  AND NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b WHERE b.claimed_by = d.daemon_id)
                """)
            return now
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

    /// The requests that were taken over.
    public struct TakenOver: Sendable, Equatable {
        /// All of them.
        public var requests = 0
        /// Those that may have been sent.
        public var interrupted = 0

        public init(requests: Int = 0, interrupted: Int = 0) {
            self.requests = requests
            self.interrupted = interrupted
        }

        static func += (left: inout TakenOver, right: TakenOver) {
            left.requests += right.requests
            left.interrupted += right.interrupted
        }
    }

    /// Returns the requests of ended daemons to the outbox. A daemon has ended if it signed off, was silent for a minute, or ran
    /// in this process scope and its process is gone.
    ///
    /// For a request that may have been sent, `interruptions` counts this. After the second interruption it fails instead of being sent
    /// again. Any other request returns as if it had not been tried.
    ///
    /// - Parameters:
    ///   - isSilent: Called with the heartbeat of each daemon that has claimed requests: whether it counts once it is a minute old.
    ///     See `SilenceWatch`.
    ///   - isAlive: Whether a daemon of this process scope still runs.
    ///   - sent: The requests that a daemon of this process scope whose process is gone may have sent; nil if that is not known. Then
    ///     it may have sent all of them.
    @discardableResult
    public func takeOver(
        on connection: inout Connection,
        isSilent: (_ daemonID: String, _ heartbeat: Instant) -> Bool = { _, _ in true },
        isAlive: (_ daemonID: String) -> Bool, sent: (_ daemonID: String) -> Set<Int64>? = { _ in nil }
    ) throws(DatabaseError) -> TakenOver {
        let holders = try connection.query(
            """
            SELECT h.claimed_by, d.process_scope, CASE WHEN d.stopped_at IS NULL THEN d.heartbeat_at END,
                   d.heartbeat_at < clock_timestamp() - $1 * interval '1 microsecond'
            FROM (SELECT r.claimed_by FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NOT NULL
                  UNION SELECT b.claimed_by FROM tokenkeeper.campaign_batch AS b WHERE b.claimed_by IS NOT NULL) AS h
            LEFT JOIN tokenkeeper.sending_daemon AS d ON d.daemon_id = h.claimed_by
            """, [.int8(Self.silence.microseconds)]
        ).decode { row throws(DatabaseError) in
            // A daemon without a row of its own has neither a scope nor a heartbeat. One that signed off has no heartbeat any more.
            (
                name: try row.read(String.self), scope: try row.read(String?.self),
                heartbeat: try row.read(Instant?.self), isOld: try row.read(Bool?.self) ?? true
            )
        }
        var taken = TakenOver()
        for holder in holders where holder.name != daemonID {
            // A silent daemon may go on sending, so what it has sent so far says nothing.
            let isGone = holder.scope == processScope && !isAlive(holder.name)
            let hasEnded = holder.heartbeat.map { isSilent(holder.name, $0) && holder.isOld } ?? true
            if !hasEnded && !isGone { continue }
            let sent = isGone ? sent(holder.name) : nil
            taken += try takeOver(holder.name, sent: sent, on: &connection)
        }
        return taken
    }

    private func takeOver(
        _ holder: String, sent: Set<Int64>?, on connection: inout Connection
    ) throws(DatabaseError) -> TakenOver {
        try connection.transaction(durable) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT t.requests, t.interrupted FROM tokenkeeper.take_over($1, $2, $3) AS t",
                [.text(holder), .bool(sent == nil), .int8s(Array(sent ?? []))]
            ).one { row throws(DatabaseError) in
                TakenOver(requests: try row.read(), interrupted: try row.read())
            }
        }
    }

    /// Finds the ended daemons from which nothing is left to take over. A daemon counts only after a minute without a heartbeat: until
    /// then, its last claim may still be committed.
    ///
    /// - Parameter daemonIDs: Daemons that have ended.
    public func finished(among daemonIDs: [String], on connection: inout Connection) throws(DatabaseError) -> [String] {
        try connection.query(
            """
            SELECT n.daemon_id FROM unnest($1::text[]) AS n (daemon_id)
            WHERE NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.claimed_by = n.daemon_id)
              AND NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b WHERE b.claimed_by = n.daemon_id)
              AND NOT EXISTS (SELECT FROM tokenkeeper.sending_daemon AS d WHERE d.daemon_id = n.daemon_id
                              AND d.heartbeat_at > clock_timestamp() - $2 * interval '1 microsecond')
            """, [.texts(daemonIDs), .int8(Self.silence.microseconds)]
        ).values(String.self)
    }
}
