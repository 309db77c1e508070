internal import TokenModel

/// What a daemon reports about itself and the queue, in its row of `tokenkeeper.daemon`.
public struct Heartbeat {
    private let daemonID: String
    private let version: Version
    /// How long a statement waits for a lock.
    public var lockTimeout: Duration
    private let startedAt: Instant

    private var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// A longer queue is estimated, not counted.
    static let countedExactly = 20_000

    /// - Parameter daemonID: Unique among all daemons of the database, such as `host/pid/start`.
    public init(daemonID: String, version: Version, lockTimeout: Duration, on connection: inout Connection)
        throws(DatabaseError)
    {
        self.daemonID = daemonID
        self.version = version
        self.lockTimeout = lockTimeout
        startedAt = try connection.query("SELECT clock_timestamp()").value()
    }

    /// The state of the queue.
    public struct Queue: Equatable, Sendable {
        public var depth: Int64
        /// False if the depth was estimated.
        public var exact: Bool

        public init(depth: Int64, exact: Bool) {
            self.depth = depth
            self.exact = exact
        }
    }

    /// Looks at the queue and reports.
    ///
    /// - Parameters:
    ///   - sweepInterval: Nil if the timer is off.
    ///   - pagesLeft: The number of pages that the drain has not read yet: a long queue is estimated from it.
    ///   - trouble: What a person must fix, for the warnings of `status`.
    ///   - waitingFor: Which locks of other sessions keep results in the queue, in words.
    /// - Returns: The state of the queue, and whether it was reported: false if another session has locked the table.
    @discardableResult
    public func beat(
        sweepInterval: Duration?, pagesLeft: Int, trouble: DatabaseError?, waitingFor: String? = nil,
        on connection: inout Connection
    ) throws(DatabaseError) -> (queue: Queue, isReported: Bool) {
        let limit = Self.countedExactly
        let depth: Int64?
        let oldest: Instant?
        do {
            (depth, oldest) = try connection.run(
                """
                \(transaction.settings)
                SELECT count(*), (extract(epoch FROM min(w.queued_at)) * 1000000)::bigint
                FROM (SELECT queued_at FROM tokenkeeper.send_result LIMIT \(limit + 1)) AS w
                """
            ).one { row throws(DatabaseError) in
                (try row.read(), try row.read(Int64?.self).map(Instant.init(microseconds:)))
            }
        } catch let error where error.remedy == .retry {
            // Another session has locked a part of the queue. The daemon can still report that it is alive.
            (depth, oldest) = (nil, nil)
        }
        let exact = depth.map { $0 <= Int64(limit) } ?? false
        // A page holds 52 results of usual size if they are 200s, and 38 if they are 410s.
        let told = exact ? depth ?? 0 : max(depth ?? 0, Int64(pagesLeft) * 50)
        let queue = Queue(depth: told, exact: exact)
        do {
            try write(queue, oldest, sweepInterval, trouble, waitingFor, on: &connection)
        } catch let error where error.remedy == .retry {
            // Another session has locked the table `daemon`. The drain does not need it, and continues.
            return (queue, false)
        }
        return (queue, true)
    }

    private func write(
        _ queue: Queue, _ oldest: Instant?, _ sweepInterval: Duration?, _ trouble: DatabaseError?,
        _ waitingFor: String?, on connection: inout Connection
    ) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.daemon AS d (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact,
                                                     oldest_queued_at, sweep_interval, problem, waiting_for)
                VALUES ($1, $2, $3, clock_timestamp(), $4, $5, $6, $7 * interval '1 microsecond', $8, $9)
                ON CONFLICT (daemon_id) DO UPDATE SET heartbeat_at = excluded.heartbeat_at, queue_depth = excluded.queue_depth,
                    queue_depth_exact = excluded.queue_depth_exact, oldest_queued_at = excluded.oldest_queued_at,
                    sweep_interval = excluded.sweep_interval, problem = excluded.problem,
                    waiting_for = excluded.waiting_for
                """,
                [
                    .text(daemonID), .text(version.description), .instant(startedAt), .int8(queue.depth),
                    .bool(queue.exact), .instant(oldest), .int8(sweepInterval?.microseconds),
                    .text(trouble?.description), .text(waitingFor),
                ])
            try connection.run(
                "DELETE FROM tokenkeeper.daemon WHERE heartbeat_at < clock_timestamp() - interval '1 day'")
        }
    }

    /// Signs off: this daemon stops as intended.
    public func signOff(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                "UPDATE tokenkeeper.daemon SET stopped_at = clock_timestamp(), heartbeat_at = clock_timestamp() WHERE daemon_id = $1",
                [.text(daemonID)])
        }
    }
}
