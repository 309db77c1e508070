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
    public var staleRetention: Duration
    /// Tokens not registered again for longer than this; nil for never.
    public var dormantAfter: Duration?
    /// Months of history that ended longer ago than this. Sweep runs and counts are kept as long.
    public var eventRetention: Duration
    /// Rejected results older than this.
    public var rejectedRetention: Duration
    /// How many rows one transaction deletes at most, 1 to 10,000.
    public var batch: Int

    public init(
        staleRetention: Duration, dormantAfter: Duration?, eventRetention: Duration, rejectedRetention: Duration,
        batch: Int
    ) {
        self.staleRetention = staleRetention
        self.dormantAfter = dormantAfter
        self.eventRetention = eventRetention
        self.rejectedRetention = rejectedRetention
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
    public var outcome: Outcome
    public var prunedSuppressed: Int64
    public var prunedDormant: Int64
    public var deletedEvents: Int64
    public var deletedRejected: Int64
    public var deletedRuns: Int64
    public var message: String?

    /// How many rows it deleted, or in a dry run would have.
    public var total: Int64 { prunedSuppressed + prunedDormant + deletedEvents + deletedRejected + deletedRuns }
}
