public import TokenModel

/// What a daemon reports about itself and the queues, in its row of `tokenkeeper.daemon`.
public struct Heartbeat {
    private let daemonID: String
    private let version: Version
    /// How long a statement waits for a lock.
    public var lockTimeout: Duration
    private let startedAt: Instant

    private var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// Whether a daemon, the row `d` of `tokenkeeper.daemon`, runs and reports: a condition, as in the view `status`.
    static let isLiveInSQL = "d.heartbeat_at > clock_timestamp() - interval '30 seconds' AND d.stopped_at IS NULL"

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

    /// The state of a queue.
    public struct Queue: Equatable, Sendable {
        public var depth: Int64
        /// False if the depth was estimated.
        public var exact: Bool
        /// When the oldest row was queued; nil if there is none, or if it is not known. If the depth was estimated, another row
        /// may be older.
        public var oldest: Instant?
        /// How many of them wait for another attempt.
        public var retries: Int64

        public init(depth: Int64, exact: Bool, oldest: Instant? = nil, retries: Int64 = 0) {
            self.depth = depth
            self.exact = exact
            self.oldest = oldest
            self.retries = retries
        }
    }

    /// What a daemon reports about a queue.
    public struct QueueReport: Sendable {
        public var queue: Queue
        /// What a person must fix, for the warnings of `status`.
        public var trouble: DatabaseError?
        /// Why rows wait, in words.
        public var reason: String?
        /// How many rows this daemon was done with per second since its heartbeat before.
        public var perSecond: Double

        public init(_ queue: Queue, trouble: DatabaseError? = nil, reason: String? = nil, perSecond: Double = 0) {
            self.queue = queue
            self.trouble = trouble
            self.reason = reason
            self.perSecond = perSecond
        }
    }

    /// The locks of other sessions that keep rows in the queues.
    public struct Locks: Sendable {
        /// The tables and who holds them, in words.
        public var words: String
        /// How long this daemon has been meeting them, by its own clock.
        public var metFor: Duration

        public init(words: String, metFor: Duration) {
            self.words = words
            self.metFor = metFor
        }
    }

    /// The settings of each live daemon: its `daemon_id`, and `key=value` for those that are not the default.
    public static func settings(on connection: inout Connection) throws(DatabaseError) -> [(String, [String])] {
        try connection.query(
            "SELECT d.daemon_id, d.settings FROM tokenkeeper.daemon AS d WHERE \(isLiveInSQL) ORDER BY 1"
        ).decode { row throws(DatabaseError) in (try row.read(String.self), try row.read([String].self)) }
    }

    /// Looks at a queue. If another session has locked a part of it, that part is estimated.
    ///
    /// - Parameter pagesLeft: The number of pages that the drain has not read yet: a long queue is estimated from it.
    public func look(
        at name: QueueName = .results, pagesLeft: Int, on connection: inout Connection
    ) throws(DatabaseError) -> Queue {
        do {
            let queue = try count(name, on: &connection)
            if queue.depth <= Self.countedExactly { return queue }
            // A page holds 52 results of usual size if they are 200s, and 38 if they are 410s.
            return Queue(
                depth: max(queue.depth, Int64(pagesLeft) * 50), exact: false, oldest: try oldest(name, on: &connection),
                retries: queue.retries)
        } catch let error where error.remedy == .retry {
            return try connection.query(
                """
                SELECT greatest(q.queued, $1), q.oldest_queued_at FROM tokenkeeper.look_at_queue($2) AS q
                """, [.int8(Int64(pagesLeft) * 50), .text(name.rawValue)]
            ).one { row throws(DatabaseError) in
                Queue(depth: try row.read(), exact: false, oldest: try row.read())
            }
        }
    }

    private func count(_ name: QueueName, on connection: inout Connection) throws(DatabaseError) -> Queue {
        try connection.run(
            """
            \(transaction.settings)
            SELECT count(*), (extract(epoch FROM min(w.queued_at)) * 1000000)::bigint,
                   count(*) FILTER (WHERE w.partition_number = \(name.retry.number))
            FROM (SELECT queued_at, partition_number FROM \(name.table) LIMIT \(Self.countedExactly + 1)) AS w
            """
        ).one { row throws(DatabaseError) in
            Queue(
                depth: try row.read(), exact: true, oldest: try row.read(Int64?.self).map(Instant.init(microseconds:)),
                retries: try row.read())
        }
    }

    /// Of a long queue, the first rows of each partition: they are the oldest, as a rule.
    private func oldest(_ name: QueueName, on connection: inout Connection) throws(DatabaseError) -> Instant? {
        let first = name.partitions.map { "(SELECT queued_at FROM \($0.table) LIMIT 100)" }
        return try connection.run(
            """
            \(transaction.settings)
            SELECT (extract(epoch FROM min(w.queued_at)) * 1000000)::bigint FROM (\(first.joined(separator: " UNION ALL "))) AS w
            """
        ).one { row throws(DatabaseError) in try row.read(Int64?.self).map(Instant.init(microseconds:)) }
    }

    /// Reports the state of the queues.
    ///
    /// - Parameters:
    ///   - sweepInterval: Nil if the timer is off.
    ///   - locks: Which locks of other sessions keep rows in the queues.
    ///   - chores: What the daemon's workers cannot do, in words.
    ///   - settings: Those in force that are not the default, as `key=value`.
    /// - Returns: False if another session has locked the table: the drain does not need it, and continues.
    @discardableResult
    public func beat(
        results: QueueReport, registrations: QueueReport, sweepInterval: Duration?, locks: Locks? = nil,
        chores: [String] = [], settings: [String] = [], on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        let values: [Parameter] = [
            .text(daemonID), .text(version.description), .instant(startedAt), .int8(results.queue.depth),
            .bool(results.queue.exact), .instant(results.queue.oldest), .int8(sweepInterval?.microseconds),
            .text(results.trouble?.description), .text(locks?.words), .int8(locks?.metFor.microseconds),
            .text(results.reason), .int8(registrations.queue.depth), .bool(registrations.queue.exact),
            .instant(registrations.queue.oldest), .text(registrations.trouble?.description),
            .text(registrations.reason), .texts(chores), .texts(settings), .int8(Self.tenths(results.perSecond)),
            .int8(Self.tenths(registrations.perSecond)),
        ]
        do {
            try connection.transaction(transaction) { connection throws(DatabaseError) in
                _ = try connection.query(
                    """
                    INSERT INTO tokenkeeper.daemon AS d (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact, oldest_queued_at,
                        sweep_interval, problem, waiting_for, waiting_since, wait_reason, registration_depth, registration_depth_exact,
                        oldest_registration_at, registration_problem, registration_wait_reason, failing_chores, settings, results_per_second, registrations_per_second)
                    VALUES ($1, $2, $3, clock_timestamp(), $4, $5, $6, $7 * interval '1 microsecond', $8, $9, clock_timestamp() - $10 * interval '1 microsecond',
                            $11, $12, $13, $14, $15, $16, $17, $18, round($19 / 10.0, 1), round($20 / 10.0, 1))
                    ON CONFLICT (daemon_id) DO UPDATE SET heartbeat_at = excluded.heartbeat_at, queue_depth = excluded.queue_depth,
                        queue_depth_exact = excluded.queue_depth_exact, oldest_queued_at = excluded.oldest_queued_at,
                        sweep_interval = excluded.sweep_interval, problem = excluded.problem,
                        waiting_for = excluded.waiting_for, waiting_since = excluded.waiting_since, wait_reason = excluded.wait_reason,
                        registration_depth = excluded.registration_depth, registration_depth_exact = excluded.registration_depth_exact,
                        oldest_registration_at = excluded.oldest_registration_at, registration_problem = excluded.registration_problem,
                        registration_wait_reason = excluded.registration_wait_reason, failing_chores = excluded.failing_chores,
                        settings = excluded.settings, results_per_second = excluded.results_per_second, registrations_per_second = excluded.registrations_per_second
                    """, values)
                try connection.run(
                    "DELETE FROM tokenkeeper.daemon WHERE heartbeat_at < clock_timestamp() - interval '1 day'")
            }
            return true
        } catch let error where error.remedy == .retry {
            return false
        }
    }

    /// A rate as it is stored: with one decimal.
    static func tenths(_ rate: Double) -> Int64 { Int64((rate * 10).rounded()) }

    /// Signs off: this daemon stops as intended.
    public func signOff(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction) { connection throws(DatabaseError) in
            _ = try connection.query(
                "UPDATE tokenkeeper.daemon SET stopped_at = clock_timestamp(), heartbeat_at = clock_timestamp() WHERE daemon_id = $1",
                [.text(daemonID)])
        }
    }
}
