import LedgerTestSupport
import Testing

@testable import TokenLedger

@Suite struct `A turn of a partition` {
    private static let start = ContinuousClock.now
    private static let ahead = Int(Int32.max)

    private func turn(
        _ cursor: PartitionCursor = PartitionCursor(), role: Drain.Role = .primary, pages: Int,
        isSealed: Bool = false, suitsBulkRead: Bool = false
    ) -> PartitionTurn {
        PartitionTurn(
            cursor, role: role, pages: pages, isSealed: isSealed, suitsBulkRead: suitsBulkRead,
            deadline: Self.start + .milliseconds(100))
    }

    private func next(
        _ turn: inout PartitionTurn, after milliseconds: Int = 0, mayHelp: Bool = false
    ) -> PartitionTurn.Step {
        turn.next(now: Self.start + .milliseconds(milliseconds), mayHelp: mayHelp)
    }

    /// Brings a turn to the first row, which is on this page.
    private func find(_ page: Int?, _ turn: inout PartitionTurn) {
        guard case .look = next(&turn) else {
            Issue.record("it does not look for rows")
            return
        }
        turn.looked(foundAt: page, now: Self.start)
    }

    @Test func `an empty partition takes one look`() {
        var turn = turn(pages: 0)
        #expect(next(&turn) == .look([0..<Self.ahead]))
        turn.looked(foundAt: nil, now: Self.start)
        #expect(next(&turn) == .done)
        #expect(turn.cursor.page == 0)
    }

    @Test func `a batch takes the first row and the rest of its aligned range, and the next look is behind it`() {
        var turn = turn(pages: 200)
        find(70, &turn)
        #expect(next(&turn) == .batch(70..<128))
        #expect(turn.unreadPages == 200)
        turn.ran(70..<128, .taken)
        #expect(turn.unreadPages == 72)
        #expect(next(&turn) == .look([128..<Self.ahead]))
        turn.looked(foundAt: nil, now: Self.start)
        #expect(next(&turn) == .done)
        #expect(turn.cursor.page == 199, "the last page may still be filled")
    }

    @Test func `a small batch takes a part of its range, the next one the rest, and the size may change in between`() {
        var turn = turn(pages: 200)
        turn.pagesPerBatch = 20
        find(70, &turn)
        #expect(next(&turn) == .batch(70..<90))
        turn.ran(70..<90, .taken)
        #expect(next(&turn) == .look([90..<Self.ahead]), "in the same range")
        turn.looked(foundAt: 90, now: Self.start)
        turn.pagesPerBatch = 40
        #expect(next(&turn) == .batch(90..<128), "a batch ends with its range")
        turn.ran(90..<128, .taken)
        #expect(next(&turn) == .look([128..<Self.ahead]))
        #expect(turn.unreadPages == 72)
    }

    @Test(arguments: [
        PartitionTurn.BatchOutcome.left, .rowsLocked, .dataRefused, .setupFailed,
    ])
    func `a small batch that takes nothing leaves the rest of its range for later`(outcome: PartitionTurn.BatchOutcome)
    {
        var turn = turn(pages: 200)
        turn.pagesPerBatch = 20
        find(70, &turn)
        turn.ran(70..<90, outcome)
        #expect(next(&turn) == .look([128..<Self.ahead]))
    }

    @Test func `what was committed late, far behind, is taken with the rest of its range`() {
        var cursor = PartitionCursor()
        cursor.page = 5000
        var turn = turn(cursor, pages: 5001)
        turn.pagesPerBatch = 8
        find(900, &turn)
        #expect(next(&turn) == .batch(900..<960), "the rescan goes on behind the range")
    }

    @Test func `a row committed late, just behind the cursor, is found at the next turn`() {
        var cursor = PartitionCursor()
        cursor.page = 5000
        var turn = turn(cursor, pages: 5001)
        #expect(next(&turn) == .look([0..<5000 - RescanSchedule.near]), "the rescan comes first")
        turn.looked(foundAt: nil, now: Self.start)
        #expect(next(&turn) == .look([5000 - RescanSchedule.near..<Self.ahead]))
        turn.looked(foundAt: 4990, now: Self.start)
        #expect(next(&turn) == .batch(4990..<4992))
    }

    @Test func `what is behind a refused range comes first, and the range again once the end was reached`() {
        var first = turn(pages: 500)
        find(0, &first)
        #expect(next(&first) == .batch(0..<64))
        first.ran(0..<64, .dataRefused)
        #expect(next(&first, after: 200) == .yield)
        var cursor = first.cursor
        cursor.beginPass(pages: 500)
        var second = turn(cursor, pages: 500)
        find(0, &second)
        #expect(next(&second) == .look([64..<Self.ahead]))
        second.looked(foundAt: 64, now: Self.start)
        #expect(next(&second) == .batch(64..<128))
        second.ran(64..<128, .taken)
        find(nil, &second)
        #expect(next(&second) == .done)
        cursor = second.cursor
        cursor.beginPass(pages: 500)
        var third = turn(cursor, pages: 500)
        find(0, &third)
        #expect(next(&third) == .batch(0..<64))
    }

    @Test func `at the end of the time slice it yields, and the next turn continues there`() {
        var first = turn(pages: 500)
        find(0, &first)
        #expect(next(&first, after: 200) == .batch(0..<64), "every turn runs one batch at least")
        first.ran(0..<64, .taken)
        #expect(next(&first, after: 200) == .yield)
        var second = turn(first.cursor, pages: 500)
        find(64, &second)
        #expect(next(&second) == .batch(64..<128))
        #expect(second.unreadPages == 436)
    }

    @Test func `a sealed partition of mostly 200s is read in bulk`() {
        var turn = turn(pages: 100, isSealed: true, suitsBulkRead: true)
        find(3, &turn)
        #expect(next(&turn) == .sample(from: 3))
        turn.sampled(isMostlyAccepted: true)
        #expect(next(&turn) == .bulkRead)
        turn.bulkRead(.taken)
        #expect(next(&turn) == .done)
        #expect(turn.cursor.page == 0 && turn.cursor.isMostlyAccepted == nil && turn.unreadPages == 0)
    }

    @Test(arguments: [
        (false, true, true), (true, false, true), (true, true, false),
    ])
    func `any other partition is drained in batches`(isSealed: Bool, suits: Bool, mostlyAccepted: Bool) {
        for role in [Drain.Role.primary, .helper] {
            var turn = turn(role: role, pages: 100, isSealed: isSealed, suitsBulkRead: suits)
            find(3, &turn)
            if case .sample = next(&turn) { turn.sampled(isMostlyAccepted: mostlyAccepted) }
            #expect(next(&turn) == .batch(3..<64))
        }
    }

    @Test func `a refused bulk read is tried again at the next turn, and batches continue meanwhile`() {
        var first = turn(pages: 500, isSealed: true, suitsBulkRead: true)
        find(3, &first)
        #expect(next(&first) == .sample(from: 3))
        first.sampled(isMostlyAccepted: true)
        #expect(next(&first) == .bulkRead)
        first.bulkRead(.refused)
        #expect(next(&first) == .batch(3..<64))
        first.ran(3..<64, .taken)
        find(64, &first)
        #expect(next(&first) == .batch(64..<128))
        var second = turn(first.cursor, pages: 500, isSealed: true, suitsBulkRead: true)
        find(128, &second)
        #expect(next(&second) == .bulkRead, "without sampling again")
    }

    @Test func `a bulk read that fails is not tried again until the partition is drained`() {
        var first = turn(pages: 500, isSealed: true, suitsBulkRead: true)
        find(3, &first)
        _ = next(&first)
        first.sampled(isMostlyAccepted: true)
        first.bulkRead(.failed)
        #expect(next(&first) == .batch(3..<64))
        var second = turn(first.cursor, pages: 500, isSealed: true, suitsBulkRead: true)
        find(3, &second)
        #expect(next(&second) == .batch(3..<64))
        second.ran(3..<64, .taken)
        find(nil, &second)
        #expect(next(&second) == .done)
        #expect(second.cursor.isMostlyAccepted == nil)
    }

    @Test func `the helper leaves bulk reads to the primary, unless it may help`() {
        var first = turn(role: .helper, pages: 500, isSealed: true, suitsBulkRead: true)
        find(3, &first)
        #expect(next(&first) == .sample(from: 3))
        first.sampled(isMostlyAccepted: true)
        #expect(next(&first) == .leave)
        var second = turn(first.cursor, role: .helper, pages: 500, isSealed: true, suitsBulkRead: true)
        #expect(next(&second) == .leave, "without a look")
        var third = turn(first.cursor, role: .helper, pages: 500, isSealed: true, suitsBulkRead: true)
        #expect(next(&third, mayHelp: true) == .look([0..<Self.ahead]))
        third.looked(foundAt: 3, now: Self.start)
        #expect(next(&third, mayHelp: true) == .batch(3..<64))
        third.ran(3..<64, .taken)
        _ = next(&third, mayHelp: true)
        third.looked(foundAt: 64, now: Self.start)
        #expect(next(&third, mayHelp: false) == .leave, "the primary tries again")
        var unsealed = turn(first.cursor, role: .helper, pages: 500)
        #expect(next(&unsealed) == .look([0..<Self.ahead]), "senders write to it again")
    }

    @Test func `a locked partition is left, and the cursor stays`() {
        var turn = turn(pages: 500)
        find(130, &turn)
        #expect(next(&turn) == .batch(130..<192))
        turn.ran(130..<192, .partitionLocked)
        #expect(next(&turn) == .leave)
        #expect(turn.cursor.page == 0 && turn.cursor.blocked.isEmpty)
    }

    @Test func `a range with locked rows is skipped for the rest of the pass`() {
        var first = turn(pages: 500)
        find(0, &first)
        #expect(next(&first) == .batch(0..<64))
        first.ran(0..<64, .rowsLocked)
        #expect(next(&first) == .look([64..<Self.ahead]))
        var second = turn(first.cursor, pages: 500)
        find(5, &second)
        #expect(next(&second) == .look([64..<Self.ahead]))
        var cursor = second.cursor
        cursor.beginPass(pages: 500)
        var third = turn(cursor, pages: 500)
        find(5, &third)
        #expect(next(&third) == .batch(5..<64))
    }

    @Test func `three setup errors end the turn, however many rows are left`() {
        var turn = turn(pages: 1000)
        for (range, outcome) in [
            PartitionTurn.BatchOutcome.setupFailed, .dataRefused, .setupFailed, .taken, .setupFailed,
        ].enumerated() {
            find(range * 64, &turn)
            #expect(next(&turn) == .batch(range * 64..<range * 64 + 64))
            turn.ran(range * 64..<range * 64 + 64, outcome)
        }
        #expect(next(&turn) == .done)
    }

    @Test(arguments: [
        (Drain.Role.primary, true, 16, true), (Drain.Role.primary, true, 15, false),
        (Drain.Role.primary, false, 16, false), (Drain.Role.helper, true, 16, false),
    ])
    func `the primary truncates a sealed partition in which it finds nothing`(
        role: Drain.Role, isSealed: Bool, pages: Int, truncates: Bool
    ) {
        var turn = turn(role: role, pages: pages, isSealed: isSealed)
        find(nil, &turn)
        #expect(next(&turn) == (truncates ? .truncate : .done))
        #expect(turn.cursor.page == pages - 1)
        guard truncates else { return }
        let outcomes: [(isEmpty: Bool?, page: Int)] = [(true, 0), (false, 0), (nil, pages - 1)]
        for (isEmpty, page) in outcomes {
            var copy = turn
            copy.truncated(isEmpty: isEmpty)
            #expect(next(&copy) == .done)
            #expect(copy.cursor.page == page)
        }
    }

    @Test func `a cursor behind the end of its partition starts again`() {
        var cursor = PartitionCursor()
        cursor.page = 50
        cursor.beginPass(pages: 51)
        #expect(cursor.page == 50)
        cursor.beginPass(pages: 50)
        #expect(cursor.page == 0)
    }
}

@Suite struct `The size of a batch` {
    @Test func `grows while batches are quick, and follows slow ones at once`() {
        var size = BatchSize()
        #expect(size.pages == 8)
        size.took(.milliseconds(1), for: 8, rows: 31)
        #expect(size.pages == 8, "few rows")
        for pages in [16, 32, 64, 64] {
            size.took(.milliseconds(1), for: size.pages, rows: 4 * size.pages)
            #expect(size.pages == pages)
        }
        size.took(.milliseconds(500), for: 64, rows: 2000)
        #expect(size.pages == 64)
        size.took(.seconds(5), for: 64, rows: 10)
        #expect(size.pages == 6)
        size.took(.milliseconds(1), for: 5, rows: 200)
        #expect(size.pages == 6, "the rest of a range")
        size.took(.seconds(50), for: 6, rows: 200)
        #expect(size.pages == 1)
    }
}

/// A partition with senders that commit late, locks of other sessions, and errors, drained by turns as `Drain` takes them.
@Suite struct `A simulated partition` {
    @Test(arguments: 0..<40)
    func `is drained completely, late rows are found, and every rule of the turn holds`(seed: Int) {
        var simulation = Simulation(seed: UInt64(seed))
        simulation.run()
        #expect(simulation.violations == [])
        #expect(simulation.rows.isEmpty && simulation.uncommitted.isEmpty, "rows are left")
        #expect(simulation.taken == simulation.inserted)
    }

    private struct Simulation {
        var chance: SeededChance
        /// How many rows each page holds.
        var rows: [Int: Int] = [:]
        /// Rows of open transactions, which nobody else sees yet.
        var uncommitted: [Int: Int] = [:]
        var pages: Int
        var inserted = 0
        var taken = 0
        var violations: [String] = []
        /// First pages of ranges in which another session has locked rows.
        var locked: Set<Int> = []
        /// First pages of ranges that meet a setup error.
        var failing: Set<Int> = []
        /// First pages of ranges whose data PostgreSQL refuses.
        var refusing: Set<Int> = []
        var refusedSinceEnd: Set<Int> = []
        /// First pages of ranges on which another daemon is working.
        var busy: Set<Int> = []
        var isPartitionLocked = false
        let role: Drain.Role
        let isSealed: Bool
        let isMostlyAccepted: Bool
        /// The outcome of a bulk read that no lock prevents.
        let bulkReadOutcome: PartitionTurn.BulkReadOutcome
        var cursor = PartitionCursor()
        var now = ContinuousClock.now
        var blockedInPass: Set<Int> = []

        init(seed: UInt64) {
            chance = SeededChance(seed: seed)
            role = Bool.random(using: &chance) ? .primary : .helper
            isSealed = Bool.random(using: &chance)
            isMostlyAccepted = Bool.random(using: &chance)
            bulkReadOutcome = [.taken, .refused, .failed].randomElement(using: &chance)!
            pages = Int.random(in: 1...20_000, using: &chance)
            for _ in 0..<Int.random(in: 0...60, using: &chance) { insert() }
        }

        mutating func insert() {
            let first = Int.random(in: 0..<max(pages, 1), using: &chance)
            let count = Int.random(in: 0..<4, using: &chance) == 0 ? 50 : 1
            pages = max(pages, first + count)
            inserted += count
            let isLate = Int.random(in: 0..<4, using: &chance) == 0
            for page in first..<first + count {
                if isLate { uncommitted[page, default: 0] += 1 } else { rows[page, default: 0] += 1 }
            }
        }

        mutating func commit() {
            rows.merge(uncommitted, uniquingKeysWith: +)
            uncommitted = [:]
        }

        mutating func run() {
            for pass in 0..<200 {
                let isDisturbed = pass < 12
                if isDisturbed {
                    disturb()
                } else {
                    commit()
                    (locked, failing, refusing, busy, isPartitionLocked) = ([], [], [], [], false)
                }
                cursor.beginPass(pages: pages)
                blockedInPass = []
                for _ in 0..<Int.random(in: 1...3, using: &chance) { turn(mayHelp: !isDisturbed) }
                now += .milliseconds(50)
                if !isDisturbed, rows.isEmpty { return }
            }
        }

        private mutating func disturb() {
            if Int.random(in: 0..<3, using: &chance) == 0 { commit() }
            // Nobody writes to a sealed partition any more.
            if !isSealed { for _ in 0..<Int.random(in: 0...6, using: &chance) { insert() } }
            let ranges = Set(rows.keys.map { $0 / Partition.pagesPerRange * Partition.pagesPerRange }).sorted()
            locked = Set(ranges.filter { _ in Int.random(in: 0..<10, using: &chance) == 0 })
            failing = Set(ranges.filter { _ in Int.random(in: 0..<10, using: &chance) == 0 })
            refusing = Set(ranges.filter { _ in Int.random(in: 0..<10, using: &chance) == 0 })
            busy = Set(ranges.filter { _ in Int.random(in: 0..<10, using: &chance) == 0 })
            isPartitionLocked = Int.random(in: 0..<5, using: &chance) == 0
        }

        private mutating func turn(mayHelp: Bool) {
            var turn = PartitionTurn(
                cursor, role: role, pages: pages, isSealed: isSealed,
                suitsBulkRead: SealedPartition.bulkReadSizes.contains(pages), deadline: now + .milliseconds(100))
            defer { cursor = turn.cursor }
            var setupErrors = 0
            var batches = 0
            for _ in 0..<5000 {
                if Int.random(in: 0..<4, using: &chance) == 0 {
                    turn.pagesPerBatch = Int.random(in: 1...Partition.pagesPerRange, using: &chance)
                }
                let mayTouch = role == .primary || turn.cursor.isMostlyAccepted != true || mayHelp
                switch turn.next(now: now, mayHelp: mayHelp) {
                case .look(let ranges):
                    now += .microseconds(500)
                    turn.looked(foundAt: firstRow(ranges), now: now)
                case .sample: turn.sampled(isMostlyAccepted: isMostlyAccepted)
                case .bulkRead: turn.bulkRead(bulkRead())
                case .batch(let range):
                    if !mayTouch { violations.append("the helper has taken what the primary wants to read in bulk") }
                    batches += 1
                    let outcome = batch(range)
                    if outcome == .setupFailed { setupErrors += 1 }
                    turn.ran(range, outcome)
                case .truncate:
                    if role == .helper || !isSealed { violations.append("truncated") }
                    let isEmpty = rows.isEmpty && uncommitted.isEmpty
                    if isEmpty { pages = 0 }
                    turn.truncated(isEmpty: uncommitted.isEmpty ? isEmpty : nil)
                case .yield:
                    if batches == 0 { violations.append("yielded without a batch") }
                    return
                case .leave: return
                case .done:
                    refusedSinceEnd = []
                    if setupErrors > PartitionTurn.errorBudget { violations.append("\(setupErrors) setup errors") }
                    return
                }
            }
            violations.append("the turn does not end")
        }

        /// The page of the first row on these pages, which are searched in this order.
        private func firstRow(_ ranges: [Range<Int>]) -> Int? {
            for range in ranges {
                if let page = rows.keys.lazy.filter(range.contains).min() { return page }
            }
            return nil
        }

        private mutating func bulkRead() -> PartitionTurn.BulkReadOutcome {
            if role == .helper || !isSealed { violations.append("read in bulk") }
            if isPartitionLocked || !uncommitted.isEmpty || !locked.isEmpty { return .refused }
            guard bulkReadOutcome == .taken else { return bulkReadOutcome }
            taken += rows.values.reduce(0, +)
            rows = [:]
            pages = 0
            return .taken
        }

        private mutating func batch(_ pages: Range<Int>) -> PartitionTurn.BatchOutcome {
            now += .milliseconds(5)
            if isPartitionLocked { return .partitionLocked }
            let range = pages.lowerBound / Partition.pagesPerRange * Partition.pagesPerRange
            if pages.upperBound > range + Partition.pagesPerRange { violations.append("\(pages) are two ranges") }
            if blockedInPass.contains(range) { violations.append("\(range) was tried twice in a pass") }
            if locked.contains(range) {
                blockedInPass.insert(range)
                return .rowsLocked
            }
            if failing.contains(range) { return .setupFailed }
            if refusing.contains(range) {
                if !refusedSinceEnd.insert(range).inserted {
                    violations.append("\(range) was refused twice before the end")
                }
                return .dataRefused
            }
            if busy.contains(range) { return .left }
            let takenBefore = taken
            for page in pages { taken += rows.removeValue(forKey: page) ?? 0 }
            return taken > takenBefore ? .taken : .left
        }
    }
}
