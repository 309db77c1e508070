/// What holds back the cleanup of dead rows, and when this daemon first saw it.
///
/// While an old snapshot exists, PostgreSQL cannot reuse the space of earlier row versions. A registration then writes to the indexes
/// too: HOT updates fall from 96 to 15 percent. None of our settings can prevent that, so `status` names the holder.
struct CleanupHolder {
    /// A session, a prepared transaction or a replication slot, with the transaction id that it holds back.
    struct Sighting: Equatable {
        var what: String
        var transactionID: String

        init(what: String, transactionID: String) {
            self.what = what
            self.transactionID = transactionID
        }

        /// The oldest holder; nil if there is none. Any role sees the horizon of every session, but not how long it has existed.
        init?(on connection: inout Connection) throws(DatabaseError) {
            let oldest = try connection.query(
                """
                SELECT h.what, h.xid::text FROM (
                    SELECT 'session ' || a.pid || ' of ' || coalesce(a.usename, '(none)') AS what,
                           CASE WHEN age(a.backend_xid) > age(a.backend_xmin) THEN a.backend_xid ELSE coalesce(a.backend_xmin, a.backend_xid) END AS xid
                    FROM pg_catalog.pg_stat_activity AS a
                    WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND (a.datid IS NULL OR a.datname = current_database())
                      AND a.pid <> pg_backend_pid()
                      -- A VACUUM has a horizon that holds nothing back.
                      AND a.pid NOT IN (SELECT v.pid FROM pg_catalog.pg_stat_progress_vacuum AS v)
                    UNION ALL
                    SELECT 'prepared transaction ' || quote_literal(left(p.gid, 60)), p.transaction
                    FROM pg_catalog.pg_prepared_xacts AS p WHERE p.database = current_database()
                    UNION ALL
                    SELECT 'replication slot ' || s.slot_name, s.xmin FROM pg_catalog.pg_replication_slots AS s WHERE s.xmin IS NOT NULL) AS h
                ORDER BY age(h.xid) DESC LIMIT 1
                """
            ).first { row throws(DatabaseError) in
                Sighting(what: try row.read(), transactionID: try row.read())
            }
            guard let oldest else { return nil }
            self = oldest
        }
    }

    private var since: (sighting: Sighting, at: ContinuousClock.Instant)?

    /// A dump of a large database takes a quarter of an hour.
    static let tolerated: Duration = .seconds(900)

    /// - Parameter seen: The oldest holder; nil for none.
    /// - Returns: The warning, once the same holder has existed for longer than is tolerated.
    mutating func note(_ seen: Sighting?, at now: ContinuousClock.Instant) -> String? {
        guard let seen else {
            since = nil
            return nil
        }
        if since?.sighting != seen { since = (seen, now) }
        guard let first = since?.at, first + Self.tolerated < now else { return nil }
        return
            "\(seen.what) has held back the cleanup of dead rows for more than 15 minutes: registrations write more until it ends"
    }
}
