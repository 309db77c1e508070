public import TokenModel

/// Takes results and registrations off their queues and records what they say, batch by batch.
///
/// Start here: a `pass` gives the partitions of both queues their turns. `TurnOrder` decides whose turn it is, `PartitionTurn` what happens
/// during a turn, `PartitionDrain` does it, and `BatchRunner` runs each batch in one transaction. What a batch does with its rows is in
/// `Record/`: see `Queue`.
public struct Drain {
    /// Which of the two drains of a process this is.
    public enum Role: Sendable {
        case primary
        /// Drains on a second connection while there is a backlog. It never reads in bulk and never truncates: that would get in
        /// the primary's way.
        case helper
    }

    /// How many pages of each queue have not been read yet.
    public struct UnreadPages: Sendable {
        public var results = 0
        public var registrations = 0

        public init(results: Int = 0, registrations: Int = 0) {
            self.results = results
            self.registrations = registrations
        }

        public var total: Int { results + registrations }

        subscript(queue: QueueName) -> Int {
            get { queue == .results ? results : registrations }
            set { if queue == .results { results = newValue } else { registrations = newValue } }
        }
    }

    public typealias Report = (Incident) -> Void
    public typealias GoesOn =
        (inout Connection, _ soFar: Pass, _ unread: UnreadPages) throws(DatabaseError) -> Bool

    /// Whether sealed partitions are truncated. Turn it off where standbys serve reads: they replay the TRUNCATE with its lock.
    public var truncates: Bool
    /// In the order of their turns.
    private var queues: [QueueDrain]
    private let clock = ContinuousClock()

    /// How long the daemon waits for a lock before it gives way.
    public var lockTimeout: Duration {
        didSet { for queue in queues.indices { queues[queue].runner.transaction.lockTimeout = lockTimeout } }
    }

    public var guardLimits: GuardLimits {
        didSet { for queue in queues.indices { queues[queue].runner.guardLimits = guardLimits } }
    }

    /// How many rejected rows of each queue may be kept within an hour.
    public var rejectedPerHour: Int64 {
        didSet { for queue in queues { queue.runner.rejectedAllowance.perHour = rejectedPerHour } }
    }

    /// - Parameters:
    ///   - lockTimeout: How long the daemon waits for a lock before it gives way.
    ///   - guardLimits: How many tokens suspects may suppress, unless the topic's policy says otherwise.
    ///   - truncates: Whether sealed partitions are truncated; see `truncates`.
    ///   - rejectedPerHour: How many rejected rows of each queue may be kept within an hour. A row counts once for each 8 KiB of its text.
    ///   - pair: What the two drains of a process share.
    ///   - interpret: The verdict on a result: a pure function.
    public init(
        lockTimeout: Duration, guardLimits: GuardLimits, truncates: Bool = true, rejectedPerHour: Int64 = 10_000,
        role: Role = .primary, pair: DrainPair = DrainPair(), interpret: @escaping @Sendable (SendResult) -> Verdict
    ) {
        self.truncates = truncates
        self.lockTimeout = lockTimeout
        self.guardLimits = guardLimits
        self.rejectedPerHour = rejectedPerHour
        let queues: [any Queue] = [ResultQueue(interpret: interpret), RegistrationQueue()]
        // The helper begins with the other queue: then the two connections seldom want the same rows.
        self.queues = (role == .primary ? queues : queues.reversed()).map { queue in
            QueueDrain(
                BatchRunner(
                    queue: queue, rejectedAllowance: RejectedAllowance(perHour: rejectedPerHour, of: queue), pair: pair,
                    transaction: BatchTransaction(lockTimeout: lockTimeout), guardLimits: guardLimits),
                role)
        }
    }

    /// A pass ends after this time, whatever is left: the clock moves on to the next partition, and the retry partition needs a
    /// turn.
    private static let longestPass = Duration.seconds(5)

    /// The longest turn: of a partition of the ring or the backlog, and of the retry partition.
    private static let (slice, retrySlice) = (Duration.milliseconds(100), Duration.milliseconds(200))

    /// Goes through the queues for about five seconds at most: the partitions in turn, the current ones first, then the retry
    /// partitions.
    ///
    /// - Parameters:
    ///   - report: Called with incidents, once they are committed.
    ///   - betweenBatches: Called before the first batch and after each one, with what the pass has done so far and the number of unread
    ///     pages. Returns whether to go on. Stopping here loses nothing.
    /// - Throws: If the connection is lost, or a queue cannot be searched. If single ranges fail, the pass continues, and its
    ///   `trouble` says why.
    public mutating func pass(
        on connection: inout Connection, report: Report, betweenBatches goesOn: GoesOn
    ) throws(DatabaseError) -> Pass {
        var pass = Pass()
        let sizes = try PartitionSizes.all(
            of: queues.map(\.name), on: &connection, BatchTransaction(lockTimeout: lockTimeout))
        for queue in queues.indices { queues[queue].beginPass(sizes[queue]) }
        pass.lockWaits += sizes.map(\.locked).reduce(0, +)
        var orders = sizes.map(TurnOrder.init)
        guard try goesOn(&connection, pass, unreadPages(orders, sizes)),
            try takeTurns(&orders, sizes, into: &pass, on: &connection, report: report, betweenBatches: goesOn)
        else { return pass }
        for queue in queues.indices {
            let goesOn = try queues[queue].retry(
                sizes[queue], for: Self.retrySlice, into: &pass, on: &connection, report: report, betweenBatches: goesOn
            )
            if !goesOn { break }
        }
        for queue in queues {
            let refused = queue.runner.refused
            guard let error = refused.error else { continue }
            if error.remedy == .fixSetup {
                pass.note(error, of: queue.name)
            } else {
                pass.refusals[queue.name] = .init(rows: refused.count, error: error)
            }
        }
        return pass
    }

    /// Lets the queues have their turns alternately until all partitions are drained, or the pass has taken long enough. So the rows of one
    /// queue wait for one turn of the other, and not for its backlog.
    ///
    /// - Returns: False when `goesOn` has ended the pass.
    private mutating func takeTurns(
        _ orders: inout [TurnOrder], _ sizes: [PartitionSizes], into pass: inout Pass, on connection: inout Connection,
        report: Report, betweenBatches goesOn: GoesOn
    ) throws(DatabaseError) -> Bool {
        let passEnds = clock.now + Self.longestPass
        var isFirst = true
        while clock.now < passEnds, !orders.allSatisfy(\.isFinished) {
            for queue in queues.indices {
                // At first there is nothing in it. Later, rows may have come during the turn of the other queue.
                if isFirst, orders[queue].isFinished { continue }
                let bulkReadsBefore = pass.bulkReads
                let partition = orders[queue].next()
                let ending = try queues[queue].turn(
                    of: partition, sizes[queue], truncates: truncates, until: clock.now + Self.slice,
                    elsewhere: unreadPages(orders, sizes, except: partition), into: &pass, on: &connection,
                    report: report, betweenBatches: goesOn)
                if ending == .stopped { return false }
                orders[queue].ended(
                    partition, isDrained: ending == .finished, hasReadInBulk: pass.bulkReads > bulkReadsBefore)
            }
            isFirst = false
        }
        return true
    }

    /// The unread pages of the partitions that still have a turn.
    private func unreadPages(
        _ orders: [TurnOrder], _ sizes: [PartitionSizes], except partition: Partition? = nil
    ) -> UnreadPages {
        var unread = UnreadPages()
        for queue in queues.indices {
            let visited = ([orders[queue].current] + orders[queue].others).filter { $0 != partition }
            unread[queues[queue].name] = queues[queue].unreadPages(of: visited, sizes[queue])
        }
        return unread
    }
}
