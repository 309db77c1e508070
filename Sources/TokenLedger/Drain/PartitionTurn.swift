/// Decides what a drain does next during one turn of a partition. Pure: it touches neither the database nor the clock.
///
/// The caller asks for the `next` step, performs it, reports the result (`looked`, `sampled`, `bulkRead`, `ran`, `truncated`), and asks
/// again, until the step is `yield`, `leave` or `done`. `PartitionDrain` is that caller.
struct PartitionTurn {
    /// What the caller does next.
    enum Step: Equatable {
        /// Find the first row on these pages, which are searched in this order.
        case look([Range<Int>])
        /// Find out whether the first rows, from this page on, are mostly 200s.
        case sample(from: Int)
        /// Read the whole partition in one statement and truncate it.
        case bulkRead
        /// Take the rows of these pages off the queue.
        case batch(Range<Int>)
        /// Truncate the partition if it is empty.
        case truncate
        /// The time slice is over: let other partitions have their turn, and come back within this pass.
        case yield
        /// Another drain or session keeps this partition: come back in the next pass.
        case leave
        /// The partition is drained, or the error budget is spent.
        case done
    }

    enum BulkReadOutcome {
        case taken
        /// Another session is using the partition.
        case refused
        /// PostgreSQL refused the statement; another attempt would fail like this one.
        case failed
    }

    enum BatchOutcome: Equatable {
        /// The rows were taken.
        case taken
        /// There was nothing to take: another daemon is working on the rows, or they still have to wait.
        case left
        /// No batch of this partition can begin: it is locked as a whole, or an operator has locked out the drains.
        case partitionLocked
        /// Another session has locked rows of the range.
        case rowsLocked
        /// PostgreSQL refused the data, and refused to set it aside.
        case dataRefused
        /// A missing privilege, a full disk: other ranges will most likely fail, too.
        case setupFailed
    }

    /// After this many ranges have failed because of the setup, the turn ends.
    static let errorBudget = 3

    let role: Drain.Role
    /// The size of the partition when the pass began.
    let pages: Int
    /// Whether applications have stopped writing to the partition, so that it may be truncated.
    let isSealed: Bool
    /// Whether a sealed partition has the right size for a bulk read.
    let suitsBulkRead: Bool
    /// When the time slice is over.
    let deadline: ContinuousClock.Instant
    private(set) var cursor: PartitionCursor
    /// How many pages a batch takes at most.
    var pagesPerBatch = Partition.pagesPerRange

    private enum Phase {
        case started
        case lookingBehind
        case lookingAhead
        case found(page: Int)
        case ranBatch
        case drained
        case over(Step)
    }

    private var phase = Phase.started
    /// Where to look ahead from.
    private var page: Int
    /// The last page known to exist.
    private var lastPage: Int
    /// First pages of the ranges that have been tried in this turn, or were found blocked or refused before.
    private var tried: Set<Int>
    private var hasTriedBulkRead = false
    private var batches = 0
    private var setupErrors = 0

    init(
        _ cursor: PartitionCursor, role: Drain.Role, pages: Int, isSealed: Bool, suitsBulkRead: Bool,
        deadline: ContinuousClock.Instant
    ) {
        self.cursor = cursor
        self.role = role
        self.pages = pages
        self.isSealed = isSealed
        self.suitsBulkRead = suitsBulkRead
        self.deadline = deadline
        page = max(0, cursor.page - RescanSchedule.near)
        lastPage = max(0, pages - 1)
        tried = cursor.waiting
        // A partition that is not sealed is not read in bulk.
        if !isSealed { self.cursor.isMostlyAccepted = nil }
    }

    /// How many pages of the partition are still unread.
    var unreadPages: Int {
        if case .over(.done) = phase { 0 } else { max(0, pages - cursor.page) }
    }

    /// - Parameter mayHelp: Whether the helper may drain a partition that the primary wants to read in bulk.
    mutating func next(now: ContinuousClock.Instant, mayHelp: Bool) -> Step {
        while true {
            switch phase {
            case .started:
                phase = leavesToPrimary(mayHelp) ? .over(.leave) : .lookingBehind
            case .lookingBehind:
                let ranges = cursor.rescan.next(before: cursor.page, except: tried, now: now)
                if !ranges.isEmpty { return .look(ranges) }
                phase = .lookingAhead
            case .lookingAhead:
                return .look([page..<Int(Int32.max)])
            case .found(let found):
                if let step = step(at: found, mayHelp) { return step }
            case .ranBatch:
                phase = now < deadline ? .lookingBehind : .over(.yield)
            case .drained:
                if batches == 0, role == .primary, isSealed, pages >= PartitionSizes.worthTruncating {
                    return .truncate
                }
                phase = .over(.done)
            case .over(let step):
                return step
            }
        }
    }

    /// The step for the first row found; nil to look for another one.
    private mutating func step(at found: Int, _ mayHelp: Bool) -> Step? {
        let range = Self.range(around: found)
        if cursor.waiting.contains(range.lowerBound) {
            page = max(page, range.upperBound)
            phase = .lookingBehind
            return nil
        }
        if isSealed, suitsBulkRead, batches == 0 {
            guard let isMostlyAccepted = cursor.isMostlyAccepted else { return .sample(from: found) }
            if isMostlyAccepted, role == .primary, !hasTriedBulkRead { return .bulkRead }
        }
        if leavesToPrimary(mayHelp) {
            phase = .over(.leave)
            return nil
        }
        // The rescan passes over the rest of a range behind the cursor.
        let most = found < page ? Partition.pagesPerRange : pagesPerBatch
        return .batch(found..<min(found + most, range.upperBound))
    }

    private func leavesToPrimary(_ mayHelp: Bool) -> Bool {
        role == .helper && cursor.isMostlyAccepted == true && !mayHelp
    }

    /// The range that a page belongs to. Ranges are aligned, so that all daemons lock the same ones.
    private static func range(around page: Int) -> Range<Int> {
        let first = page / Partition.pagesPerRange * Partition.pagesPerRange
        return first..<first + Partition.pagesPerRange
    }
}

/// What the caller reports after each step.
extension PartitionTurn {
    /// - Parameter found: The page of the first row; nil when there is none on the pages looked at.
    mutating func looked(foundAt found: Int?, now: ContinuousClock.Instant) {
        if case .lookingBehind = phase {
            cursor.rescan.looked(foundAt: found, now: now)
            phase = .lookingAhead
        } else if let found {
            cursor.rescan.note(found, before: cursor.page)
        } else {
            finish()
        }
        guard let found else { return }
        lastPage = max(lastPage, found)
        phase = .found(page: found)
    }

    mutating func sampled(isMostlyAccepted: Bool) {
        cursor.isMostlyAccepted = isMostlyAccepted
    }

    mutating func bulkRead(_ outcome: BulkReadOutcome) {
        hasTriedBulkRead = true
        switch outcome {
        case .taken:
            cursor.restart()
            phase = .over(.done)
        case .refused: break
        case .failed: cursor.isMostlyAccepted = false
        }
    }

    mutating func ran(_ pages: Range<Int>, _ outcome: BatchOutcome) {
        guard case .found(let found) = phase else { return }
        let range = Self.range(around: pages.lowerBound)
        // The rest of a range is tried as well, unless this part of it has failed.
        let end = outcome == .taken ? pages.upperBound : range.upperBound
        if end == range.upperBound { tried.insert(range.lowerBound) }
        switch outcome {
        case .taken, .left: break
        case .dataRefused: cursor.refused.insert(range.lowerBound)
        case .partitionLocked:
            // Other ranges would meet the same lock. The cursor stays where it was.
            phase = .over(.leave)
            return
        case .rowsLocked:
            cursor.blocked.insert(range.lowerBound)
            // The cursor moves past these rows. Later passes look here again, however far behind this is by then.
            cursor.rescan.note(found, before: found + 1)
        case .setupFailed:
            setupErrors += 1
            if setupErrors == Self.errorBudget { return finish() }
        }
        batches += 1
        page = max(page, end)
        cursor.page = max(cursor.page, page)
        phase = .ranBatch
    }

    /// - Parameter isEmpty: Whether the partition was empty, and is truncated now; nil when another session was using it.
    mutating func truncated(isEmpty: Bool?) {
        switch isEmpty {
        case true?: cursor.restart()
        // The rows left in it are on pages that this turn has not looked at.
        case false?: cursor.page = 0
        case nil: break
        }
        phase = .over(.done)
    }

    private mutating func finish() {
        cursor.page = lastPage
        // All other rows have had their turn.
        cursor.refused = []
        cursor.isMostlyAccepted = nil
        phase = .drained
    }
}
