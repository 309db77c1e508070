public import TokenModel

/// What started a sweep. The raw value is stored in `sweep_run.trigger`.
public enum SweepTrigger: String, Encodable, Sendable, ColumnDecodable {
    case timer
    case signal
    case sql
    case cli
}

/// What a sweep deletes.
public struct SweepPlan: Equatable, Sendable {
    /// Deletes tokens that have been suppressed for longer than this, counted from when the ledger learned of it.
    public var suppressedRetention: Duration
    /// Deletes tokens that have not been registered for longer than this; nil for never.
    public var dormantAfter: Duration?
    /// Deletes months of history that ended longer ago than this. Sweep runs and counts are kept for the same time.
    public var eventRetention: Duration
    /// Deletes rejected results older than this.
    public var rejectedRetention: Duration
    /// Deletes results that the mass-failure guard has held for longer than this.
    public var heldRetention: Duration
    /// Deletes requests that were suppressed or failed longer ago than this.
    public var sendRetention: Duration
    /// This many tokens of a topic may be pruned within a day, whatever their share.
    public var allowance: Int64
    /// Beyond that, this share of the topic's tokens, unless the sweep is forced. A topic's policy overrides its retentions and limits.
    public var maxShare: Share
    /// How many tokens, results or runs one transaction deletes at most, 1 to 10,000.
    public var batch: Int

    public init(
        suppressedRetention: Duration, dormantAfter: Duration?, eventRetention: Duration, rejectedRetention: Duration,
        heldRetention: Duration, sendRetention: Duration, allowance: Int64, maxShare: Share, batch: Int
    ) {
        self.suppressedRetention = suppressedRetention
        self.dormantAfter = dormantAfter
        self.eventRetention = eventRetention
        self.rejectedRetention = rejectedRetention
        self.heldRetention = heldRetention
        self.sendRetention = sendRetention
        self.allowance = allowance
        self.maxShare = maxShare
        self.batch = batch
    }
}

/// How a sweep ended; a row of `tokenkeeper.sweep_run`.
public struct SweepReport: Encodable, Equatable, Sendable {
    public enum Outcome: String, Encodable, Sendable, ColumnDecodable {
        case finished
        case failed
        case interrupted
    }

    public var runID: Int64
    public var trigger: SweepTrigger
    public var dryRun: Bool
    public var forced: Bool
    public var outcome: Outcome
    public var prunedSuppressed: Int64
    public var prunedDormant: Int64
    public var deletedEvents: Int64
    public var deletedRejected: Int64
    public var deletedHeld: Int64
    public var deletedRuns: Int64
    public var deletedSends: Int64
    /// Tokens that were due but not pruned, because they were too large a share of their topic.
    public var refused: Int64
    public var message: String?
    /// What was due, by topic and cause.
    public var topics: [Topic]

    /// What a sweep found due in a topic for one cause; a row of `tokenkeeper.sweep_topic`.
    public struct Topic: Encodable, Equatable, Sendable {
        public var environment: String
        public var topic: String
        /// `stale`, `suspect`, `unregistered_by_app`, `superseded` or `dormant`.
        public var cause: String
        public var tokens: Int64
        public var refused: Bool
        /// All tokens of the topic; nil if too few were due for it to matter.
        public var ofTokens: Int64?
        /// The most that could be pruned within this day; nil if there was no limit.
        public var maxTokens: Int64?
        /// The first 8 digits of some of these tokens.
        public var samples: [String]
    }

    /// How many rows the sweep deleted, or would have deleted in a dry run.
    public var total: Int64 {
        prunedSuppressed + prunedDormant + deletedEvents + deletedRejected + deletedHeld + deletedRuns
            + deletedSends
    }
}

extension SweepReport {
    /// Reads what a run has recorded; nil if it has not ended.
    static func ended(_ run: Int64, on connection: inout Connection) throws(DatabaseError) -> SweepReport? {
        let topics = try Topic.all(of: run, on: &connection)
        return try connection.query(
            """
            SELECT trigger, dry_run, forced, outcome, pruned_suppressed, pruned_dormant, deleted_events, deleted_rejected,
                   deleted_held, deleted_runs, deleted_sends, refused, message
            FROM tokenkeeper.sweep_run WHERE run_id = $1 AND outcome NOT IN ('requested', 'running')
            """, [.int8(run)]
        ).first { row throws(DatabaseError) in
            SweepReport(
                runID: run, trigger: try row.read(), dryRun: try row.read(), forced: try row.read(),
                outcome: try row.read(), prunedSuppressed: try row.read(), prunedDormant: try row.read(),
                deletedEvents: try row.read(), deletedRejected: try row.read(), deletedHeld: try row.read(),
                deletedRuns: try row.read(), deletedSends: try row.read(), refused: try row.read(),
                message: try row.read(), topics: topics)
        }
    }
}

extension SweepReport.Topic {
    /// Reads what a run has recorded of each topic.
    static func all(of run: Int64, on connection: inout Connection) throws(DatabaseError) -> [SweepReport.Topic] {
        try connection.query(
            """
            SELECT environment, topic, cause, tokens, refused, of_tokens, max_tokens, samples
            FROM tokenkeeper.sweep_topic WHERE run_id = $1 ORDER BY topic, environment, cause
            """, [.int8(run)]
        ).decode { row throws(DatabaseError) in
            SweepReport.Topic(
                environment: try row.read(), topic: try row.read(), cause: try row.read(), tokens: try row.read(),
                refused: try row.read(), ofTokens: try row.read(), maxTokens: try row.read(), samples: try row.read())
        }
    }
}
