public import TokenModel

/// The drain: takes results from the queue and records what they say, batch by batch.
///
/// It remembers how far it has read into each partition, as a hint where to look first and never as a claim about what is
/// there: a row can be committed late, before that point, and PostgreSQL fills room on earlier pages. So it also looks behind,
/// again and again.
public struct Drain {
    let interpret: @Sendable (SendResult) -> Verdict
    /// How long the daemon waits for a lock before it yields.
    public var lockTimeout: Duration
    public var guardLimits: GuardLimits
    /// Whether sealed partitions are truncated: not where standbys are read from, where a TRUNCATE is replayed with its lock.
    public var truncates: Bool
    let rejectedAllowance: RejectedAllowance
    private let isSecond: Bool
    let pair: DrainPair?
    private var hints: [Partition: Hint] = [:]
    /// First pages of the ranges that a lock of another session has refused in this pass. Each attempt costs two lock timeouts, more than a
    /// partition's turn: without this, a partition would spend each of its turns on the same range. The next pass tries them again.
    private var blocked: [Partition: Set<Int>] = [:]
    private var retryAgainAt = ContinuousClock.now
    private let clock = ContinuousClock()

    /// How many rejected results may be kept within an hour.
    public var rejectedPerHour: Int64 {
        get { rejectedAllowance.perHour }
        nonmutating set { rejectedAllowance.perHour = newValue }
    }

    var transaction: BatchTransaction { BatchTransaction(lockTimeout: lockTimeout) }

    /// Where to look first in a partition.
    private struct Hint {
        /// Everything before this page was seen drained.
        var page = 0
        /// Of a sealed partition: whether it is worth reading whole. Nil until one has looked.
        var isMostlyAccepted: Bool?
        var behind = RescanSchedule()
    }

    /// - Parameters:
    ///   - lockTimeout: How long the daemon waits for a lock before it yields.
    ///   - guardLimits: How much suspects may silence, where the topic's policy says nothing else.
    ///   - truncates: Whether sealed partitions are truncated: not where standbys are read from, where a TRUNCATE is replayed with its lock.
    ///   - rejectedPerHour: How many rejected results may be kept within an hour; a result counts as one for each 8 KiB of its text.
    ///   - isSecond: It drains beside another one, and leaves to that what is to be read whole or truncated: they would be in each
    ///     other's way.
    ///   - pair: What it has in common with that other one.
    ///   - interpret: The verdict on a result; pure and total.
    public init(
        lockTimeout: Duration, guardLimits: GuardLimits, truncates: Bool = true, rejectedPerHour: Int64 = 10_000,
        isSecond: Bool = false, pair: DrainPair? = nil, interpret: @escaping @Sendable (SendResult) -> Verdict
    ) {
        self.lockTimeout = lockTimeout
        self.guardLimits = guardLimits
        self.truncates = truncates
        rejectedAllowance = RejectedAllowance(perHour: rejectedPerHour)
        self.isSecond = isSecond
        self.pair = pair
        self.interpret = interpret
    }

    /// A pass ends after so long, whatever is left: the ring moves on, and what is left for a retry waits for its turn.
    private static let longestPass = Duration.seconds(5)

    /// Where there is work in several partitions, each has its turn for so long.
    private static let slice = Duration.milliseconds(100)

    /// Goes through the queue: the partitions in turn, the current one first, then those left for a retry; for some five seconds at most.
    ///
    /// - Parameters:
    ///   - tell: Called with what people should know, when it holds.
    ///   - betweenBatches: Called before the first and after each, with what has been done so far and the number of pages that have
    ///     not been read yet; answers whether to go on. Stopping here loses nothing.
    /// - Throws: When the connection is lost, or the queue cannot be looked at. What one range meets ends in the pass's `trouble`.
    public mutating func pass(
        on connection: inout Connection,
        report: (Incident) -> Void,
        betweenBatches goesOn: (inout Connection, _ soFar: Pass, _ pagesLeft: Int) throws(DatabaseError) -> Bool
    ) throws(DatabaseError) -> Pass {
        var pass = Pass()
        blocked = [:]
        let sizes = try PartitionSizes(on: &connection, transaction)
        pass.lockWaits += sizes.locked
        // One that has been truncated since begins anew.
        hints = hints.filter { partition, hint in hint.page < sizes.pages(of: partition) }
        var others = sizes.othersToVisit
        guard try goesOn(&connection, pass, unread(of: [sizes.current] + others, sizes)) else { return pass }
        let enough = clock.now + Self.longestPass
        while clock.now < enough {
            var isDrained = false
            // The current one comes again in each round: what is queued now does not wait for a backlog.
            for partition in [sizes.current] + others {
                let pagesBehind = unread(of: others.filter { $0 != partition }, sizes)
                let slice = clock.now + Self.slice
                let partitionsTaken = pass.partitionsTaken
                var stopped = false
                let isDone = try drain(
                    partition, sizes, pagesBehind: pagesBehind, into: &pass, on: &connection, report: report
                ) { connection, soFar, pagesLeft throws(DatabaseError) in
                    stopped = try !goesOn(&connection, soFar, pagesLeft)
                    return !stopped && ContinuousClock.now < slice
                }
                if stopped { return pass }
                if partition == sizes.current { isDrained = isDone }
                if isDone { others.removeAll { $0 == partition } }
                if pass.partitionsTaken > partitionsTaken {
                    if !others.contains(.backlog) { others.append(.backlog) }
                    break
                }
            }
            if isDrained && others.isEmpty { break }
        }
        if sizes.pages(of: .retry) > 0, clock.now >= retryAgainAt {
            let before = pass
            // A slice of the time: what comes fresh must not wait for what has been waiting.
            let enough = clock.now + .milliseconds(200)
            _ = try drain(.retry, sizes, pagesBehind: 0, into: &pass, on: &connection, report: report) {
                connection, soFar, pagesLeft throws(DatabaseError) in
                try goesOn(&connection, soFar, pagesLeft) && ContinuousClock.now < enough
            }
            // What an application holds for long is tried again now and then, not in every pass.
            if pass.taken == before.taken { retryAgainAt = clock.now + .milliseconds(500) }
        }
        return pass
    }

    /// How many pages of some partitions lie behind the point up to which they were drained.
    private func unread(of partitions: [Partition], _ sizes: PartitionSizes) -> Int {
        partitions.map { max(0, sizes.pages(of: $0) - (hints[$0]?.page ?? 0)) }.reduce(0, +)
    }

    /// So many ranges of a partition that cannot be drained, for a lacking right or a full disk, end its pass.
    private static let mostTroubles = 3

    /// - Parameter pagesBehind: What lies in the partitions whose turn comes later.
    /// - Returns: False when `goesOn` has said to stop; true when there is nothing more to do here now: it is drained, failed, or
    ///   left to the first drain.
    private mutating func drain(
        _ partition: Partition, _ sizes: PartitionSizes, pagesBehind: Int, into pass: inout Pass,
        on connection: inout Connection,
        report: (Incident) -> Void, betweenBatches goesOn: (inout Connection, Pass, Int) throws(DatabaseError) -> Bool
    ) throws(DatabaseError) -> Bool {
        let pages = sizes.pages(of: partition)
        var hint = hints[partition] ?? Hint()
        defer { hints[partition] = hint }
        var page = max(0, hint.page - RescanSchedule.near)
        // The last page that is known to be there.
        var last = max(0, pages - 1)
        var batches = 0
        var troubles = 0
        var tried = blocked[partition] ?? []
        // They still wait: whoever watches the locks must hear of it throughout the pass, and not only once.
        if !tried.isEmpty { pass.lockWaits += 1 }
        let past =
            truncates && !sizes.isInUse(partition) && partition != .retry
            ? SealedPartition(partition: partition, transaction: transaction) : nil
        if past == nil { hint.isMostlyAccepted = nil }
        if isLeftToTheFirst(partition, hint) { return true }
        while true {
            var found: Int?
            let behind = hint.behind.next(before: hint.page, except: tried, now: clock.now)
            if !behind.isEmpty {
                found = try firstRow(in: partition, behind, on: &connection)
                hint.behind.looked(foundAt: found, now: clock.now)
            }
            if found == nil {
                found = try firstRow(in: partition, [page..<Int(Int32.max)], on: &connection)
                if let found { hint.behind.note(found, before: hint.page) }
            }
            guard let found else { break }
            last = max(last, found)
            let first = found / Partition.pagesPerRange * Partition.pagesPerRange
            let range = first..<first + Partition.pagesPerRange
            if blocked[partition]?.contains(first) == true {
                page = max(page, range.upperBound)
                continue
            }
            if batches == 0, let past, past.isWorthReading(pages) {
                if hint.isMostlyAccepted == nil {
                    hint.isMostlyAccepted = try past.isMostlyAccepted(from: found, on: &connection)
                }
                if hint.isMostlyAccepted == true, !isSecond {
                    do {
                        pair?.reads(true)
                        defer { pair?.reads(false) }
                        if let taken = try past.take(on: &connection) {
                            pass.accepted += taken.accepted
                            pass.takenOut += taken.moved
                            pass.partitionsTaken += 1
                            hint = Hint()
                            pair?.isDone(partition)
                            return try goesOn(&connection, pass, pagesBehind)
                        }
                    } catch {
                        if error.remedy == .reconnect { throw error }
                        // Its rows can still be had range by range; another attempt would fail like this one.
                        hint.isMostlyAccepted = false
                        report(.partitionNotRead(error))
                    }
                    pair?.couldNotRead(partition, triesAgain: hint.isMostlyAccepted == true)
                }
            }
            if isLeftToTheFirst(partition, hint) { return true }
            tried.insert(first)
            do {
                switch try settle(range, of: partition, into: &pass, on: &connection, report: report) {
                case .erasure, .partition:
                    // The other ranges would meet it too. How far the partition is drained stays as it was.
                    pass.lockWaits += 1
                    return true
                case .range, nil: break
                }
            } catch {
                if error.remedy == .reconnect { throw error }
                // These stay where they are. Where it is not for their own sake, there is no use in going on.
                if error.remedy == .retry {
                    blocked[partition, default: []].insert(first)
                    // The hint moves past them: so that later passes look here too, however far that is behind.
                    hint.behind.note(found, before: found + 1)
                } else {
                    pass.trouble = error
                }
                if error.remedy == .fixSetup {
                    troubles += 1
                    if troubles == Self.mostTroubles { break }
                }
            }
            batches += 1
            page = max(page, range.upperBound)
            hint.page = max(hint.page, page)
            guard try goesOn(&connection, pass, max(0, pages - hint.page) + pagesBehind) else { return false }
        }
        hint.page = last
        hint.isMostlyAccepted = nil
        if !isSecond { pair?.isDone(partition) }
        if batches == 0, !isSecond, pages >= PartitionSizes.worthTruncating,
            let isEmpty = try past?.truncateIfEmpty(on: &connection)
        {
            // What is left in it was not where one has looked.
            hint = isEmpty ? Hint() : Hint(behind: hint.behind)
        }
        return true
    }

    /// Whether this is the second drain, and the partition one that the first wants to itself.
    private func isLeftToTheFirst(_ partition: Partition, _ hint: Hint) -> Bool {
        isSecond && hint.isMostlyAccepted == true && pair?.mayHelp(partition) != true
    }

    private func firstRow(
        in partition: Partition, _ places: [Range<Int>], on connection: inout Connection
    ) throws(DatabaseError) -> Int? {
        let looks = places.map { pages in
            "(SELECT (ctid::text::point)[0]::bigint FROM \(partition.table) WHERE \(RowRange.pages(pages).predicate) LIMIT 1)"
        }
        do {
            // NOWAIT: what another daemon reads whole is not waited for.
            let rows = try connection.run(
                """
                \(transaction.settings)
                SET LOCAL synchronize_seqscans = off; -- Or the first one found need not be the first.
                LOCK TABLE \(partition.table) IN ACCESS SHARE MODE NOWAIT;
                SELECT page FROM (\(looks.joined(separator: " UNION ALL "))) AS look (page) LIMIT 1
                """)
            return rows.count == 0 ? nil : rows.text(0, 0).flatMap { Int($0) }
        } catch let error where error.remedy == .retry {
            return nil
        }
    }
}
