/// Drains one partition of a queue, a turn at a time: performs the steps that `PartitionTurn` decides on.
struct PartitionDrain {
    enum Ending {
        /// The caller wants the pass to end.
        case stopped
        /// The time slice is over, and rows may be left.
        case yielded
        /// Nothing is left to do here in this pass.
        case finished
    }

    /// What holds for one turn.
    struct Conditions {
        /// The size of the partition when the pass began.
        var pages: Int
        /// Whether applications have stopped writing to the partition, so that it may be truncated.
        var isSealed: Bool
        var deadline: ContinuousClock.Instant
        /// The unread pages of other partitions.
        var elsewhere: Drain.UnreadPages
    }

    let partition: Partition
    let role: Drain.Role
    private(set) var cursor = PartitionCursor()
    private var size = BatchSize()

    init(_ partition: Partition, _ role: Drain.Role) {
        self.partition = partition
        self.role = role
    }

    mutating func beginPass(pages: Int) { cursor.beginPass(pages: pages) }

    /// How many pages lie behind the cursor.
    func unreadPages(of pages: Int) -> Int { max(0, pages - cursor.page) }

    /// - Throws: When the connection is lost, or the partition cannot be searched.
    mutating func takeTurn(
        _ conditions: Conditions, _ runner: BatchRunner, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report, betweenBatches goesOn: Drain.GoesOn
    ) throws(DatabaseError) -> Ending {
        // Blocked ranges still wait: `LockWatch` must learn of them throughout the pass, and not only once.
        if !cursor.blocked.isEmpty { pass.lockWaits += 1 }
        var turn = PartitionTurn(
            cursor, role: role, pages: conditions.pages, isSealed: conditions.isSealed,
            suitsBulkRead: partition.queue.backlog != nil && !partition.isBacklog
                && SealedPartition.bulkReadSizes.contains(conditions.pages),
            deadline: conditions.deadline)
        defer { cursor = turn.cursor }
        while true {
            // An attempt in the retry partition takes a whole range. If it fails, the rows are tried one by one.
            if !partition.isRetry { turn.pagesPerBatch = size.pages }
            switch turn.next(now: .now, mayHelp: role == .helper && runner.pair.mayHelp(partition)) {
            case .yield: return .yielded
            case .leave: return .finished
            case .done:
                if role == .primary { runner.pair.isDone(partition) }
                return .finished
            case let step:
                let wasBatch = try perform(step, &turn, runner, into: &pass, on: &connection, report: report)
                guard wasBatch else { continue }
                var unread = conditions.elsewhere
                unread[partition.queue] += turn.unreadPages
                if try !goesOn(&connection, pass, unread) { return .stopped }
            }
        }
    }

    /// - Returns: Whether a batch or a bulk read has run, so that the caller is asked whether to go on.
    private mutating func perform(
        _ step: PartitionTurn.Step, _ turn: inout PartitionTurn, _ runner: BatchRunner, into pass: inout Drain.Pass,
        on connection: inout Connection, report: Drain.Report
    ) throws(DatabaseError) -> Bool {
        let sealed = SealedPartition(partition: partition, transaction: runner.transaction)
        switch step {
        case .look(let ranges):
            turn.looked(foundAt: try firstRow(ranges, runner.transaction, on: &connection), now: .now)
        case .sample(let page):
            turn.sampled(isMostlyAccepted: try sealed.isMostlyAccepted(from: page, on: &connection))
        case .bulkRead:
            let outcome = try bulkRead(sealed, runner.pair, into: &pass, on: &connection, report: report)
            turn.bulkRead(outcome)
            return outcome == .taken
        case .batch(let pages):
            let began = ContinuousClock.now
            let settledBefore = pass.settled
            let outcome = try runner.run(pages, of: partition, into: &pass, on: &connection, report: report)
            turn.ran(pages, outcome)
            size.took(began.duration(to: .now), for: pages.count, rows: pass.settled - settledBefore)
            return outcome != .partitionLocked
        case .truncate:
            turn.truncated(isEmpty: try sealed.truncateIfEmpty(on: &connection))
        case .yield, .leave, .done: break
        }
        return false
    }

    /// Reads the partition in one statement and truncates it.
    private func bulkRead(
        _ sealed: SealedPartition, _ pair: DrainPair, into pass: inout Drain.Pass, on connection: inout Connection,
        report: Drain.Report
    ) throws(DatabaseError) -> PartitionTurn.BulkReadOutcome {
        pair.reads(true)
        defer { pair.reads(false) }
        let began = ContinuousClock.now
        do {
            guard let taken = try sealed.take(on: &connection) else {
                pair.couldNotRead(partition, triesAgain: true)
                return .refused
            }
            pass.accepted += taken.accepted
            pass.movedToBacklog += taken.moved
            pass.bulkReads += 1
            report(.committed(taken.counts, took: began.duration(to: .now)))
            return .taken
        } catch {
            if error.remedy == .reconnect { throw error }
            // Batches can still take its rows.
            report(.bulkReadFailed(error))
            pair.couldNotRead(partition, triesAgain: false)
            return .failed
        }
    }

    /// - Parameter ranges: Pages, in the order in which to search them.
    /// - Returns: The page of the first row; nil when there is none, or another session has locked the partition.
    private func firstRow(
        _ ranges: [Range<Int>], _ transaction: BatchTransaction, on connection: inout Connection
    ) throws(DatabaseError) -> Int? {
        let looks = ranges.map { pages in
            "(SELECT (ctid::text::point)[0]::bigint FROM \(partition.table) WHERE \(RowRange.pages(pages).predicate) LIMIT 1)"
        }
        do {
            // NOWAIT: do not wait for a daemon that reads the partition in bulk.
            return try connection.run(
                """
                \(transaction.settings)
                SET LOCAL synchronize_seqscans = off; -- With it, a scan may begin in the middle.
                LOCK TABLE \(partition.table) IN ACCESS SHARE MODE NOWAIT;
                SELECT page FROM (\(looks.joined(separator: " UNION ALL "))) AS look (page) LIMIT 1
                """
            ).first { row throws(DatabaseError) in try row.read() }
        } catch let error where error.remedy == .retry {
            return nil
        }
    }
}
