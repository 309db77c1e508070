internal import TokenLedger

/// Decides when a lock of another session is worth reporting: when results wait for locks, and the same transaction holds one for seconds. Pure.
///
/// A batch that meets a lock is nothing special: an application that registers a token holds its row. So the sessions are looked up
/// only after locks have been met for a while, and named when they are found again and again.
struct LockWatch {
    /// Locks have been met for so long before the first look.
    static let patience: Duration = .seconds(1)
    /// So long the same transaction has been seen before it is reported.
    static let seenFor: Duration = .seconds(3)
    /// Between two looks, until something is reported and afterwards.
    static let lookEvery: (before: Duration, after: Duration) = (.milliseconds(500), .seconds(5))
    /// When no lock has been met for so long, it is over. Not every pass comes by what waits.
    static let quiet: Duration = .seconds(3)
    /// Where nothing gets done for so long, that is reported even if nobody is found who holds a lock for long.
    static let standstill: Duration = .seconds(6)

    private var since: ContinuousClock.Instant?
    private var metAt: ContinuousClock.Instant?
    private var workedAt: ContinuousClock.Instant?
    private var lookedAt: ContinuousClock.Instant?
    private var firstSeen: [LockHolder.Identity: ContinuousClock.Instant] = [:]

    /// Who is to be reported, those that hold whole tables first. Nil when nothing is; empty when nobody is found who holds a lock for long.
    private(set) var reported: [LockHolder]?

    /// Whether locks are being met at the moment.
    var isMeeting: Bool { since != nil }

    /// Takes what the drain has met since the last time.
    ///
    /// - Parameters:
    ///   - waits: How many locks of other sessions kept results in the queue.
    ///   - settled: How many results are done with.
    mutating func note(waits: Int, settled: Int, now: ContinuousClock.Instant) {
        if settled > 0 { workedAt = now }
        if waits > 0 {
            since = since ?? now
            metAt = now
        } else if let last = metAt, last.duration(to: now) > Self.quiet {
            self = LockWatch()
        }
    }

    /// Whether it is time to look up who holds locks.
    func wantsLook(now: ContinuousClock.Instant) -> Bool {
        guard let since, since.duration(to: now) >= Self.patience else { return false }
        let every = reported == nil ? Self.lookEvery.before : Self.lookEvery.after
        return lookedAt.map { $0.duration(to: now) >= every } ?? true
    }

    /// Takes what a look has shown.
    mutating func saw(_ holders: [LockHolder], now: ContinuousClock.Instant) {
        lookedAt = now
        firstSeen = Dictionary(
            holders.map { ($0.identity, firstSeen[$0.identity] ?? now) }, uniquingKeysWith: { first, _ in first })
        // A daemon that reads a partition whole shares the work: nobody needs to hear of it, and meanwhile it is no standstill.
        let others = holders.filter { $0.kind != .reading }
        let lasting = others.filter { holder in
            firstSeen[holder.identity].map { $0.duration(to: now) >= Self.seenFor } ?? false
        }
        // Where somebody holds a table, those that hold rows of it matter no more.
        let tables = lasting.filter(\.isOfWholeTable)
        let isStandstill =
            others.count == holders.count
            && since.map { start in
                max(start, workedAt ?? start).duration(to: now) >= Self.standstill
            } ?? false
        reported = !lasting.isEmpty ? (tables.isEmpty ? lasting : tables) : isStandstill ? [] : nil
    }
}

extension [LockHolder] {
    /// Who is in the way, in words; of many sessions the first three.
    var words: String {
        if isEmpty { return "no session holds one for long" }
        let more = count > 3 ? "; and \(count - 3) more" : ""
        return prefix(3).map(\.words).joined(separator: "; ") + more
    }
}
