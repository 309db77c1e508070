public import TokenModel

/// What the status page shows of the database at this moment. `OverviewHistory` has the rest.
public struct Overview: Sendable {
    /// By the server's clock.
    public let at: Instant
    /// As in the view `status`: what a person should look at, in words, the critical ones first.
    public let warnings: [String]
    /// How many of them are critical: somebody has to get up for these.
    public let critical: Int
    /// Results in the queue, as the latest daemon saw them; nil if no daemon ever ran.
    public let queueDepth: Int64?
    public let isQueueEstimated: Bool
    /// How long the oldest result has been waiting; nil if there was none.
    public let oldestResultAge: Duration?
    /// Rows of `rejected_result`. Here and in the next three, 10,000 means 10,000 or more, and nil that another session has locked a table
    /// against reading, which a warning says.
    public let rejected: Int64?
    /// Rows of `held_result`.
    public let held: Int64?
    /// Rows of `send_request`.
    public let requests: Int64?
    /// Rows of `failed_send`.
    public let failedSends: Int64?
    /// By state, in the order of `states`. Nil as above.
    public let tokens: [Int64?]
    /// The running ones first; at most 20.
    public let daemons: [Daemon]
    /// Those that have not ended, or ended within a day, the newest first; at most 10.
    public let campaigns: [CampaignProgress]
    /// By name; at most 20.
    public let attachments: [Attachment]

    /// The states of a token, with `active` first.
    public static let states = ["active", "stale", "suspect", "superseded", "unregistered_by_app"]

    /// An attached table.
    public struct Attachment: Sendable {
        /// The schema and name of the table.
        public let table: String
        public let attachedAt: Instant
        /// Why its changes do not arrive; nil if they do.
        public let fault: String?
        /// How many changes could not be queued since it was attached.
        public let failures: Int64
    }

    /// A row of `tokenkeeper.daemon`.
    public struct Daemon: Sendable {
        /// `daemon_id`.
        public let name: String
        public let version: String
        public let startedAt: Instant
        public let heartbeatAt: Instant
        /// When it shut down in order; nil while it runs, or if it ended otherwise.
        public let stoppedAt: Instant?
        /// Whether it also sends.
        public let sends: Bool

        /// Whether it has reported within the last 30 seconds, as the view `status` defines it.
        public func isLive(at now: Instant) -> Bool {
            stoppedAt == nil && now < heartbeatAt.advanced(byMicroseconds: 30_000_000)
        }
    }
}

extension Overview {
    /// Reads it. The view answers within milliseconds at any size.
    ///
    /// - Parameter limit: How long a statement may take.
    public init(within limit: Duration, on connection: inout Connection) throws(DatabaseError) {
        let transaction = BatchTransaction(mode: .snapshot, lockTimeout: .milliseconds(100), statementTimeout: limit)
        self = try connection.transaction(transaction) { connection throws(DatabaseError) in
            let daemons = try Self.daemons(on: &connection)
            let attachments = try Self.attachments(on: &connection)
            let campaigns = try CampaignProgress.current(10, on: &connection)
            return try connection.query(
                """
                SELECT clock_timestamp(), s.warnings, cardinality(s.critical_warnings), s.queue_depth, coalesce(s.queue_depth_estimated, false),
                       (extract(epoch FROM s.oldest_result_age) * 1000000)::bigint,
                       s.rejected, s.held, s.requests, s.failed_sends,
                       s.tokens_active, s.tokens_stale, s.tokens_suspect, s.tokens_superseded, s.tokens_unregistered_by_app
                FROM tokenkeeper.status AS s
                """, []
            ).one { row throws(DatabaseError) in
                Overview(
                    at: try row.read(), warnings: try row.read(), critical: try row.read(),
                    queueDepth: try row.read(),
                    isQueueEstimated: try row.read(),
                    oldestResultAge: try row.read(Int64?.self).map { .microseconds($0) },
                    rejected: try row.read(), held: try row.read(), requests: try row.read(),
                    failedSends: try row.read(),
                    tokens: [try row.read(), try row.read(), try row.read(), try row.read(), try row.read()],
                    daemons: daemons, campaigns: campaigns, attachments: attachments)
            }
        }
    }

    private static func attachments(on connection: inout Connection) throws(DatabaseError) -> [Attachment] {
        try connection.query(
            """
            SELECT a.name, a.attached_at, a.fault, a.failures FROM tokenkeeper.attachment AS a ORDER BY a.name LIMIT 20
            """, []
        ).decode { row throws(DatabaseError) in
            Attachment(
                table: try row.read(), attachedAt: try row.read(), fault: try row.read(), failures: try row.read())
        }
    }

    private static func daemons(on connection: inout Connection) throws(DatabaseError) -> [Daemon] {
        try connection.query(
            """
            SELECT d.daemon_id, d.version, d.started_at, d.heartbeat_at, d.stopped_at,
                   EXISTS (SELECT FROM tokenkeeper.sending_daemon AS s WHERE s.daemon_id = d.daemon_id)
            FROM tokenkeeper.daemon AS d ORDER BY d.stopped_at IS NOT NULL, d.heartbeat_at DESC LIMIT 20
            """, []
        ).decode { row throws(DatabaseError) in
            Daemon(
                name: try row.read(), version: try row.read(), startedAt: try row.read(), heartbeatAt: try row.read(),
                stoppedAt: try row.read(), sends: try row.read())
        }
    }
}
