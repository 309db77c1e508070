internal import TokenModel

/// What a daemon tells of itself and of the queue, in its row of `tokenkeeper.daemon`.
public struct Heartbeat {
    private let daemonID: String
    private let version: Version
    private let transaction: BatchTransaction
    private let startedAt: Instant

    /// More waiting results than this are estimated and not counted.
    static let countedExactly = 20_000

    /// - Parameter daemonID: Unique among all daemons of the database, such as `host/pid/start`.
    public init(daemonID: String, version: Version, lockTimeout: Duration, on connection: inout Connection)
        throws(DatabaseError)
    {
        self.daemonID = daemonID
        self.version = version
        transaction = BatchTransaction(lockTimeout: lockTimeout)
        startedAt = try connection.query("SELECT clock_timestamp()").instant(0, 0) ?? .distantPast
    }

    /// Looks at the queue and reports. Where somebody has locked the queue, it reports what it knew before.
    public func beat(sweepInterval: Duration?, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            let limit = Self.countedExactly
            // An empty queue has no pages: then nothing is read at all.
            let seen = try connection.query(
                """
                SELECT count(*), min(w.queued_at),
                       (SELECT sum(pg_relation_size(i.inhrelid)) FROM pg_catalog.pg_inherits AS i
                        WHERE i.inhparent = 'tokenkeeper.send_result'::regclass)::bigint
                FROM (SELECT queued_at FROM tokenkeeper.send_result LIMIT \(limit + 1)) AS w
                """)
            let counted = seen.integer(0, 0) ?? 0
            let exact = counted <= limit
            // A result of usual size takes about a hundred bytes. What was drained and not yet truncated counts too: an estimate.
            let depth = exact ? counted : max(counted, (seen.integer(0, 2) ?? 0) / 120)
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.daemon AS d (daemon_id, version, started_at, beat_at, queue_depth, queue_depth_exact,
                                                     oldest_queued_at, sweep_interval)
                VALUES ($1, $2, $3, clock_timestamp(), $4, $5, $6, $7 * interval '1 microsecond')
                ON CONFLICT (daemon_id) DO UPDATE SET beat_at = excluded.beat_at, queue_depth = excluded.queue_depth,
                    queue_depth_exact = excluded.queue_depth_exact, oldest_queued_at = excluded.oldest_queued_at,
                    sweep_interval = excluded.sweep_interval
                """,
                [
                    .text(daemonID), .text(version.description), .instant(startedAt), .int8(depth), .bool(exact),
                    .instant(seen.instant(0, 1)), .int8(sweepInterval?.microseconds),
                ])
            try connection.run("DELETE FROM tokenkeeper.daemon WHERE beat_at < clock_timestamp() - interval '1 day'")
        }
    }

    /// Says that this daemon leaves, in order.
    public func farewell(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            _ = try connection.query(
                "UPDATE tokenkeeper.daemon SET stopped_at = clock_timestamp(), beat_at = clock_timestamp() WHERE daemon_id = $1",
                [.text(daemonID)])
        }
    }
}
