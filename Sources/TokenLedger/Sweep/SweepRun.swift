/// What set a sweep off. The raw value stands in `sweep_run.trigger`.
public enum SweepTrigger: String, Sendable {
    case timer
    case signal
    case sql
    case cli
}

/// What a sweep clears away.
public struct SweepPlan: Equatable, Sendable {
    /// Tokens suppressed for longer than this, counted from when the ledger learned of it.
    public var suppressedRetention: Duration
    /// Tokens not registered again for longer than this; nil for never.
    public var dormantAfter: Duration?
    /// Months of history that ended longer ago than this. Sweep runs and counts are kept as long.
    public var eventRetention: Duration
    /// Rejected results older than this.
    public var rejectedRetention: Duration
    /// Results that the mass-failure guard has held for longer than this.
    public var heldRetention: Duration
    /// Requests that were suppressed or failed longer ago than this.
    public var sendRetention: Duration
    /// So many tokens of a topic may be pruned within a day in any case.
    public var allowance: Int64
    /// Beyond that, this share of the topic's tokens, unless forced. Retentions and limits of the topic's policy come first.
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
public struct SweepReport: Equatable, Sendable {
    public enum Outcome: String, Sendable {
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
    /// Tokens that were due and are too large a share of their topic.
    public var refused: Int64
    public var message: String?
    /// What was due, by topic and cause.
    public var topics: [Topic]

    /// What a sweep found due in a topic for one cause; a row of `tokenkeeper.sweep_topic`.
    public struct Topic: Equatable, Sendable {
        public var environment: String
        public var topic: String
        /// `dead`, `suspect`, `unregistered`, `superseded` or `dormant`.
        public var cause: String
        public var tokens: Int64
        public var refused: Bool
        /// All tokens of the topic; nil when they were too few to matter.
        public var ofTokens: Int64?
        /// The most that could be pruned within this day; nil when there was no limit.
        public var maxTokens: Int64?
        /// The first 8 digits of some of them.
        public var samples: [String]
    }

    /// How many rows it deleted, or in a dry run would have.
    public var total: Int64 {
        prunedSuppressed + prunedDormant + deletedEvents + deletedRejected + deletedHeld + deletedRuns
            + deletedSends
    }
}
