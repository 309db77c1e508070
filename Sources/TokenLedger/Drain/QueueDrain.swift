internal import TokenModel

/// Drains one of the queues on a connection: what a `Drain` keeps of it from pass to pass.
struct QueueDrain {
    private let role: Drain.Role
    var runner: BatchRunner
    private var partitions: [Partition: PartitionDrain] = [:]
    private var nextRetry = ContinuousClock.now
    /// While only a person can help, each attempt costs an error in the server's log.
    private var trouble: (error: DatabaseError, until: ContinuousClock.Instant, times: Int)?
    private static let troubleBackoff = Backoff(from: .seconds(1), to: .seconds(15))

    var name: QueueName { runner.queue.name }

    init(_ runner: BatchRunner, _ role: Drain.Role) {
        self.runner = runner
        self.role = role
    }

    /// The pause after a retry in which every row still had to wait: an application may hold their tokens locked for long.
    private static let retryPause = Duration.milliseconds(500)

    mutating func beginPass(_ sizes: PartitionSizes) {
        for partition in partitions.keys { partitions[partition]?.beginPass(pages: sizes.pages(of: partition)) }
    }

    /// How many pages of these partitions are still unread.
    func unreadPages(of visited: [Partition], _ sizes: PartitionSizes) -> Int {
        visited.map { partition in
            let pages = sizes.pages(of: partition)
            return partitions[partition]?.unreadPages(of: pages) ?? pages
        }.reduce(0, +)
    }

    /// - Parameter elsewhere: The unread pages of all other partitions.
    mutating func turn(
        of partition: Partition, _ sizes: PartitionSizes, truncates: Bool, until deadline: ContinuousClock.Instant,
        elsewhere: Drain.UnreadPages, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report, betweenBatches goesOn: Drain.GoesOn
    ) throws(DatabaseError) -> PartitionDrain.Ending {
        let conditions = PartitionDrain.Conditions(
            pages: sizes.pages(of: partition),
            isSealed: truncates && !sizes.isInUse(partition) && !partition.isRetry, deadline: deadline,
            elsewhere: elsewhere)
        if let trouble, .now < trouble.until {
            pass.note(trouble.error, of: name)
            return .finished
        }
        var drain = partitions[partition] ?? PartitionDrain(partition, role)
        defer { partitions[partition] = drain }
        let (takenBefore, troubleBefore) = (pass.taken, pass.troubles[name])
        let ending = try drain.takeTurn(
            conditions, runner, into: &pass, on: &connection, report: report, betweenBatches: goesOn)
        // A row of the retry partition rests alone.
        let isOfQueue = !partition.isRetry || runner.refused.areAll
        if let error = pass.troubles[name], troubleBefore == nil, pass.taken == takenBefore, isOfQueue {
            let times = trouble?.times ?? 0
            trouble = (error, .now + Self.troubleBackoff.pause(after: times).jittered(), times + 1)
        } else if pass.taken > takenBefore {
            trouble = nil
        }
        return ending
    }

    /// Gives the retry partition its turn, if it has rows and it is time.
    ///
    /// - Returns: Whether the caller goes on.
    mutating func retry(
        _ sizes: PartitionSizes, for slice: Duration, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report, betweenBatches goesOn: Drain.GoesOn
    ) throws(DatabaseError) -> Bool {
        guard sizes.pages(of: name.retry) > 0, .now >= nextRetry else { return true }
        let takenBefore = pass.taken
        let ending = try turn(
            of: name.retry, sizes, truncates: false, until: .now + slice, elsewhere: Drain.UnreadPages(), into: &pass,
            on: &connection, report: report, betweenBatches: goesOn)
        if pass.taken == takenBefore { nextRetry = .now + Self.retryPause }
        return ending != .stopped
    }
}
