public import TokenModel

/// The drain: takes results from the queue and records what they say, batch by batch.
///
/// It remembers how far it has read into each leaf, as a hint where to look first and never as a claim about what is
/// there: a row can be committed late, before that point. So each leaf is also read from its front again and again.
public struct Intake {
    private let interpret: @Sendable (SendResult) -> Verdict
    /// How long the daemon waits for a lock before it yields.
    public var lockTimeout: Duration
    public var guardLimits: GuardLimits
    private var hints: [Leaf: Hint] = [:]
    private var asideAgain = ContinuousClock.now
    private let clock = ContinuousClock()

    private var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// Where to look first in a leaf.
    private struct Hint {
        /// Everything before this page was seen drained.
        var page = 0
        /// When to read from the front again.
        var frontAgain: ContinuousClock.Instant
    }

    /// - Parameters:
    ///   - lockTimeout: How long the daemon waits for a lock before it yields.
    ///   - guardLimits: How much suspects may silence, where the topic's policy says nothing else.
    ///   - interpret: The verdict on a result; pure and total.
    public init(
        lockTimeout: Duration, guardLimits: GuardLimits, interpret: @escaping @Sendable (SendResult) -> Verdict
    ) {
        self.lockTimeout = lockTimeout
        self.guardLimits = guardLimits
        self.interpret = interpret
    }

    /// Goes once through the queue, the current leaf first, then those set aside.
    ///
    /// - Parameter betweenBatches: Called after each, with what has been done so far and the number of pages that have not
    ///   been read yet; answers whether to go on. Stopping here loses nothing.
    public mutating func pass(
        on connection: inout Connection,
        tell: (Incident) -> Void,
        betweenBatches goesOn: (inout Connection, _ soFar: Pass, _ pagesLeft: Int) throws(DatabaseError) -> Bool
    ) throws(DatabaseError) -> Pass {
        var pass = Pass()
        let sizes = try LeafSizes(on: &connection, transaction)
        var pagesBehind = sizes.leavesToVisit.map(sizes.pages).reduce(0, +)
        for leaf in sizes.leavesToVisit where leaf != .aside {
            pagesBehind -= sizes.pages(of: leaf)
            guard
                try drain(
                    leaf, sizes, pagesBehind: pagesBehind, into: &pass, on: &connection, tell: tell,
                    betweenBatches: goesOn)
            else { return pass }
        }
        if sizes.pages(of: .aside) > 0, clock.now >= asideAgain {
            let before = pass
            // A slice of the time: what comes fresh must not wait for what has been waiting.
            let enough = clock.now + .milliseconds(200)
            _ = try drain(.aside, sizes, pagesBehind: 0, into: &pass, on: &connection, tell: tell) {
                connection, soFar, pagesLeft throws(DatabaseError) in
                try goesOn(&connection, soFar, pagesLeft) && ContinuousClock.now < enough
            }
            // What an application holds for long is tried again now and then, not in every pass.
            if pass == before { asideAgain = clock.now + .milliseconds(500) }
        }
        return pass
    }

    /// So many ranges of a leaf that cannot be drained, for a cause that a person must mend, end its pass.
    private static let mostTroubles = 3

    /// - Parameter pagesBehind: What lies in the leaves whose turn comes later.
    /// - Returns: False when `goesOn` has said to stop.
    private mutating func drain(
        _ leaf: Leaf, _ sizes: LeafSizes, pagesBehind: Int, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void, betweenBatches goesOn: (inout Connection, Pass, Int) throws(DatabaseError) -> Bool
    ) throws(DatabaseError) -> Bool {
        let pages = sizes.pages(of: leaf)
        var hint = hints[leaf] ?? Hint(frontAgain: clock.now)
        let fromFront = clock.now >= hint.frontAgain || hint.page >= pages
        // Not quite from where it stopped: those who insert at the same time fill several pages at once.
        var page = fromFront ? 0 : max(0, hint.page - Leaf.pagesPerRange)
        var batches = 0
        var troubles = 0
        var looking = Duration.zero
        while true {
            let lookedAt = clock.now
            let found = try firstRow(in: leaf, from: page, on: &connection)
            looking += clock.now - lookedAt
            guard let found else { break }
            let first = found / Leaf.pagesPerRange * Leaf.pagesPerRange
            let range = first..<first + Leaf.pagesPerRange
            do {
                try settle(range, of: leaf, into: &pass, on: &connection, tell: tell)
            } catch let error where error.remedy == .fixSetup {
                // These stay where they are. If it is not for these alone, there is no use in going on.
                pass.trouble = error
                troubles += 1
                if troubles == Self.mostTroubles { break }
            }
            for turn in pass.turns { tell(.guardTurned(turn)) }
            pass.turns = []
            batches += 1
            page = range.upperBound
            hint.page = page
            guard try goesOn(&connection, pass, max(0, pages - page) + pagesBehind) else {
                hints[leaf] = hint
                return false
            }
        }
        hint.page = max(0, pages - 1)
        if fromFront {
            // Reading over what is gone costs something: at most a twentieth of the time.
            hint.frontAgain = clock.now + looking * 20
            if batches == 0, pages >= LeafSizes.worthTruncating, !leaf.isInUse(current: sizes.current) {
                try truncateIfEmpty(leaf, on: &connection)
            }
        }
        hints[leaf] = hint
        return true
    }

    private func firstRow(in leaf: Leaf, from page: Int, on connection: inout Connection) throws(DatabaseError) -> Int?
    {
        let rows = try connection.run(
            "\(transaction.settings) SELECT (ctid::text::point)[0]::bigint FROM \(leaf.table) WHERE ctid >= '(\(page),0)' LIMIT 1"
        )
        return rows.count == 0 ? nil : rows.text(0, 0).flatMap { Int($0) }
    }

    /// A past leaf that is empty is truncated, so that nothing waits for vacuum.
    private func truncateIfEmpty(_ leaf: Leaf, on connection: inout Connection) throws(DatabaseError) {
        do {
            try connection.run(transaction.begin)
            // The lock before the look: a row committed in between would be lost. NOWAIT: a dump or a late sender is not disturbed.
            try connection.run("LOCK TABLE \(leaf.table) IN ACCESS EXCLUSIVE MODE NOWAIT")
            if try connection.run("SELECT 1 FROM \(leaf.table) LIMIT 1").count == 0 {
                try connection.run("TRUNCATE \(leaf.table)")
            }
            try connection.commit()
        } catch {
            connection.rollback()
            if error.remedy == .reconnect { throw error }
        }
    }

    /// One batch; if it fails for a cause of its own, its rows are set aside, and there looked at one by one.
    private func settle(
        _ pages: Range<Int>, of leaf: Leaf, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void
    ) throws(DatabaseError) {
        do {
            try settle(.pages(pages), of: leaf, asideUnseen: false, into: &pass, on: &connection)
            if leaf == .aside { try settleRowByRow(pages, onlyBulky: true, into: &pass, on: &connection, tell: tell) }
        } catch {
            if error.remedy == .reconnect { throw error }
            if leaf == .aside {
                try settleRowByRow(pages, onlyBulky: false, into: &pass, on: &connection, tell: tell)
            } else {
                if error.remedy == .fixData { tell(.batchSetAside(error)) }
                do {
                    try settle(.pages(pages), of: leaf, asideUnseen: true, into: &pass, on: &connection)
                } catch let error where error.remedy == .retry {
                    // Somebody holds rows of the queue itself. They stay where they are.
                }
            }
        }
    }

    /// Looks at rows that were set aside one by one: those that are bulky, and those that made their batch fail.
    private func settleRowByRow(
        _ pages: Range<Int>, onlyBulky: Bool, into pass: inout Pass, on connection: inout Connection,
        tell: (Incident) -> Void
    ) throws(DatabaseError) {
        let left = try connection.run(
            """
            \(transaction.settings)
            SELECT (ctid::text::point)[0]::bigint, (ctid::text::point)[1]::bigint, \(Batch.length)
            FROM \(Leaf.aside.table)
            WHERE \(Portion.pages(pages).predicate) \(onlyBulky ? "AND \(Batch.length) > \(Batch.bulky)" : "")
            -- So that none is always behind those that block.
            ORDER BY random() LIMIT 1000
            """)
        var blocked = 0
        var trouble: DatabaseError?
        for row in 0..<left.count {
            guard let page = left.text(row, 0).flatMap({ Int($0) }), let line = left.text(row, 1).flatMap({ Int($0) }),
                let length = left.text(row, 2).flatMap({ Int($0) })
            else { continue }
            do {
                let before = pass
                try settleRow(.row(page: page, line: line), length, into: &pass, on: &connection, tell: tell)
                if pass == before { blocked += 1 }
            } catch {
                if error.remedy == .reconnect { throw error }
                if error.remedy == .fixSetup { trouble = error }
                blocked += 1
            }
            // Each of them may cost a lock timeout: the others in the queue must not wait for them.
            if blocked == 10 { break }
        }
        if let trouble { throw trouble }
    }

    private func settleRow(
        _ row: Portion, _ length: Int, into pass: inout Pass, on connection: inout Connection, tell: (Incident) -> Void
    ) throws(DatabaseError) {
        do {
            if length > Self.largestRow {
                try reject(
                    row, error: "the row is \(length) bytes long, expected at most \(Self.largestRow)", on: &connection)
                pass.rejected += 1
            } else {
                try settle(row, of: .aside, asideUnseen: false, into: &pass, on: &connection)
            }
        } catch let error where error.remedy == .fixData {
            try reject(row, error: "the database refused to record it: \(error)", on: &connection)
            pass.rejected += 1
            tell(.rowRejected(error))
        }
    }

    /// A row of more than 16 MiB of text is not fetched to look what it means: memory stays bounded.
    private static let largestRow = 1 << 24

    private func reject(_ portion: Portion, error: String, on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(transaction.begin) { connection throws(DatabaseError) in
            try connection.run(
                "SELECT pg_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.forgetting))")
            try Batch.reject(portion, of: .aside, error: error, on: &connection)
        }
    }

    private func settle(
        _ portion: Portion, of leaf: Leaf, asideUnseen: Bool, into pass: inout Pass, on connection: inout Connection
    ) throws(DatabaseError) {
        do {
            let locked = try connection.run(
                """
                \(transaction.begin)
                SELECT pg_try_advisory_xact_lock(\(Advisory.lockClass), \(Advisory.range(leaf: leaf, firstPage: portion.firstPage)))
                       AND pg_try_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.forgetting))
                """
            ).text(0, 0)
            // Another daemon is at it, or `forget` is at work.
            guard locked == "t" else { return connection.rollback() }
            let batch = try Batch(
                taking: portion, of: leaf, asideUnseen: asideUnseen, interpret: interpret, on: &connection)
            guard batch.taken > 0, let settled = try batch.settle(from: leaf, guardLimits, on: &connection)
            else {
                return connection.rollback()
            }
            try connection.commit()
            pass.add(settled)
        } catch {
            connection.rollback()
            throw error
        }
    }
}
