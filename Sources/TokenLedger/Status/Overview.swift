public import TokenModel

/// What the status page shows of the database at this moment. `OverviewHistory` has the rest.
public struct Overview: Sendable {
    /// By the server's clock.
    public let at: Instant
    /// The row of `status`.
    public let status: StatusReport
    /// The running ones first; at most 20.
    public let daemons: [Daemon]
    /// Up to 20 that have not ended, or ended within a day: those that are being sent first, then the newest.
    public let campaigns: [CampaignProgress]
    /// By name; at most 20.
    public let attachments: [Attachment]

    /// The number in a column of `status`; nil while another session has locked a table against reading, which a warning says.
    public subscript(column: String) -> Int64? { status.number(column) }

    /// By state, in the order of `states`. Nil as above.
    public var tokens: [Int64?] { Self.states.map { self["tokens_" + $0] } }

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
        self = try connection.snapshot(within: limit) { connection throws(DatabaseError) in
            let daemons = try Self.daemons(on: &connection)
            let attachments = try Self.attachments(on: &connection)
            let campaigns = try CampaignProgress.current(20, on: &connection)
            return Overview(
                at: try connection.query("SELECT clock_timestamp()", []).value(),
                status: try StatusReport.read(on: &connection), daemons: daemons, campaigns: campaigns,
                attachments: attachments)
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
