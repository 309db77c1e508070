public import TokenModel

/// Takes results off the queue and records what they say, batch by batch.
///
/// Start here: a `pass` gives the partitions of the queue their turns. `PartitionTurn` decides what happens during a turn,
/// `PartitionDrain` does it, and `BatchRunner` runs each batch in one transaction. What a batch does with its results is in `Record/`.
public struct Drain {
    /// Which of the two drains of a process this is.
    public enum Role: Sendable {
        case primary
        /// Drains on a second connection while there is a backlog. It never reads in bulk and never truncates: that would get in
        /// the primary's way.
        case helper
    }

    public typealias Report = (Incident) -> Void
    public typealias GoesOn =
        (inout Connection, _ soFar: Pass, _ pagesLeft: Int) throws(DatabaseError) -> Bool

    /// Whether sealed partitions are truncated. Turn it off where standbys serve reads: they replay the TRUNCATE with its lock.
    public var truncates: Bool
    private let role: Role
    private var runner: BatchRunner
    private var partitions: [Partition: PartitionDrain] = [:]
    private var nextRetry = ContinuousClock.now
    private let clock = ContinuousClock()

    /// How long the daemon waits for a lock before it gives way.
    public var lockTimeout: Duration {
        get { runner.transaction.lockTimeout }
        set { runner.transaction.lockTimeout = newValue }
    }

    public var guardLimits: GuardLimits {
        get { runner.guardLimits }
        set { runner.guardLimits = newValue }
    }

    /// How many rejected results may be kept within an hour.
    public var rejectedPerHour: Int64 {
        get { runner.rejectedAllowance.perHour }
        nonmutating set { runner.rejectedAllowance.perHour = newValue }
    }

    /// - Parameters:
    ///   - lockTimeout: How long the daemon waits for a lock before it gives way.
    ///   - guardLimits: How many tokens suspects may suppress, unless the topic's policy says otherwise.
    ///   - truncates: Whether sealed partitions are truncated; see `truncates`.
    ///   - rejectedPerHour: How many rejected results may be kept within an hour. A result counts once for each 8 KiB of its text.
    ///   - pair: What the two drains of a process share.
    ///   - interpret: The verdict on a result: a pure function.
    public init(
        lockTimeout: Duration, guardLimits: GuardLimits, truncates: Bool = true, rejectedPerHour: Int64 = 10_000,
        role: Role = .primary, pair: DrainPair = DrainPair(), interpret: @escaping @Sendable (SendResult) -> Verdict
    ) {
        self.truncates = truncates
        self.role = role
        runner = BatchRunner(
            interpret: interpret, rejectedAllowance: RejectedAllowance(perHour: rejectedPerHour), pair: pair,
            transaction: BatchTransaction(lockTimeout: lockTimeout), guardLimits: guardLimits)
    }

    /// A pass ends after this time, whatever is left: the clock moves on to the next partition, and the retry partition needs a
    /// turn.
    private static let longestPass = Duration.seconds(5)

    /// The longest turn: of a partition of the ring or the backlog, and of the retry partition.
    private static let (slice, retrySlice) = (Duration.milliseconds(100), Duration.milliseconds(200))

    /// The pause after a retry in which every result still had to wait: an application may hold their tokens locked for long.
    private static let retryPause = Duration.milliseconds(500)

    /// Goes through the queue for about five seconds at most: the partitions in turn, the current one first, then the retry
    /// partition.
    ///
    /// - Parameters:
    ///   - report: Called with incidents, once they are committed.
    ///   - betweenBatches: Called before the first batch and after each one, with what the pass has done so far and the number of unread
    ///     pages. Returns whether to go on. Stopping here loses nothing.
    /// - Throws: If the connection is lost, or the queue cannot be searched. If single ranges fail, the pass continues, and its
    ///   `trouble` says why.
    public mutating func pass(
        on connection: inout Connection, report: Report, betweenBatches goesOn: GoesOn
    ) throws(DatabaseError) -> Pass {
        var pass = Pass()
        let sizes = try PartitionSizes(on: &connection, runner.transaction)
        pass.lockWaits += sizes.locked
        for partition in partitions.keys { partitions[partition]?.beginPass(pages: sizes.pages(of: partition)) }
        let unread = unreadPages(of: [sizes.current] + sizes.othersToVisit, sizes)
        guard try goesOn(&connection, pass, unread),
            try takeTurns(sizes, into: &pass, on: &connection, report: report, betweenBatches: goesOn)
        else { return pass }
        if sizes.pages(of: .retry) > 0, clock.now >= nextRetry {
            let takenBefore = pass.taken
            _ = try turn(
                of: .retry, sizes, until: clock.now + Self.retrySlice, pagesElsewhere: 0, into: &pass,
                on: &connection, report: report, betweenBatches: goesOn)
            if pass.taken == takenBefore { nextRetry = clock.now + Self.retryPause }
        }
        return pass
    }

    /// Visits the partitions in rounds until they are drained, or the pass has taken long enough.
    ///
    /// - Returns: False when `goesOn` has ended the pass.
    private mutating func takeTurns(
        _ sizes: PartitionSizes, into pass: inout Pass, on connection: inout Connection, report: Report,
        betweenBatches goesOn: GoesOn
    ) throws(DatabaseError) -> Bool {
        var others = sizes.othersToVisit
        let passEnds = clock.now + Self.longestPass
        while clock.now < passEnds {
            var isCurrentFinished = false
            // Every round begins with the current partition: new results do not wait for a backlog.
            for partition in [sizes.current] + others {
                let bulkReadsBefore = pass.bulkReads
                let ending = try turn(
                    of: partition, sizes, until: clock.now + Self.slice,
                    pagesElsewhere: unreadPages(of: others.filter { $0 != partition }, sizes), into: &pass,
                    on: &connection, report: report, betweenBatches: goesOn)
                if ending == .stopped { return false }
                if ending == .finished {
                    if partition == sizes.current { isCurrentFinished = true }
                    others.removeAll { $0 == partition }
                }
                if pass.bulkReads > bulkReadsBefore {
                    // The backlog has rows now, and the current partition has waited: begin the next round.
                    if !others.contains(.backlog) { others.append(.backlog) }
                    break
                }
            }
            if isCurrentFinished && others.isEmpty { break }
        }
        return true
    }

    private mutating func turn(
        of partition: Partition, _ sizes: PartitionSizes, until deadline: ContinuousClock.Instant, pagesElsewhere: Int,
        into pass: inout Pass, on connection: inout Connection, report: Report, betweenBatches goesOn: GoesOn
    ) throws(DatabaseError) -> PartitionDrain.Ending {
        let conditions = PartitionDrain.Conditions(
            pages: sizes.pages(of: partition),
            isSealed: truncates && !sizes.isInUse(partition) && partition != .retry, deadline: deadline,
            pagesElsewhere: pagesElsewhere)
        var drain = partitions[partition] ?? PartitionDrain(partition, role)
        defer { partitions[partition] = drain }
        return try drain.takeTurn(
            conditions, runner, into: &pass, on: &connection, report: report, betweenBatches: goesOn)
    }

    private func unreadPages(of partitions: [Partition], _ sizes: PartitionSizes) -> Int {
        partitions.map { partition in
            let pages = sizes.pages(of: partition)
            return self.partitions[partition]?.unreadPages(of: pages) ?? pages
        }.reduce(0, +)
    }
}
