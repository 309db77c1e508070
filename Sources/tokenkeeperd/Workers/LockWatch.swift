internal import TokenLedger

/// Decides when a lock of another session is worth reporting: when results wait, and the same transaction holds a lock for
/// seconds. Pure.
///
/// It is normal that a batch meets a lock: an application that registers a token holds its row. So sessions are looked up only after
/// locks have been met for a while, and reported only if they are found repeatedly.
struct LockWatch {
    /// Locks are met for this long before the first look.
    static let patience: Duration = .seconds(1)
    /// A transaction is reported after it has been seen for this long.
    static let seenFor: Duration = .seconds(3)
    /// The time between two looks: before and after something is reported.
    static let lookEvery: (before: Duration, after: Duration) = (.milliseconds(500), .seconds(5))
    /// The problem is over when no lock has been met for this long. Not every pass reads the waiting results.
    static let quiet: Duration = .seconds(3)
    /// Without any progress for this long, the wait is reported even if no session holds a lock for long.
    static let standstill: Duration = .seconds(6)

    private var since: ContinuousClock.Instant?
    private var metAt: ContinuousClock.Instant?
    private var workedAt: ContinuousClock.Instant?
    private var lookedAt: ContinuousClock.Instant?
    private var firstSeen: [LockHolder.Identity: ContinuousClock.Instant] = [:]

    /// The sessions to report, starting with those that lock whole tables. Nil if there is nothing to report; empty if no session
    /// holds a lock for long.
    private(set) var reported: [LockHolder]?

    /// Whether locks are being met now.
    var isMeeting: Bool { since != nil }

    /// How long locks have been met, by this machine's clock: each of our own waits ends at `lock_timeout`.
    func metFor(at now: ContinuousClock.Instant) -> Duration { since.map { $0.duration(to: now) } ?? .zero }

    /// Takes what the drain has met since the last call.
    ///
    /// - Parameters:
    ///   - waits: How many locks of other sessions kept results in the queue.
    ///   - settled: How many results were recorded or left for a retry.
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

    /// Takes the result of a look.
    mutating func saw(_ holders: [LockHolder], now: ContinuousClock.Instant) {
        lookedAt = now
        firstSeen = Dictionary(
            holders.map { ($0.identity, firstSeen[$0.identity] ?? now) }, uniquingKeysWith: { first, _ in first })
        // A daemon that reads a whole partition shares the work: it is not reported, and this is not a standstill.
        let others = holders.filter { $0.kind != .reading }
        let lasting = others.filter { holder in
            firstSeen[holder.identity].map { $0.duration(to: now) >= Self.seenFor } ?? false
        }
        // If a session holds a table, sessions that hold rows of it do not matter.
        let tables = lasting.filter(\.isOfWholeTable)
        let isStandstill =
            others.count == holders.count
            && since.map { start in
                max(start, workedAt ?? start).duration(to: now) >= Self.standstill
            } ?? false
        reported = !lasting.isEmpty ? (tables.isEmpty ? lasting : tables) : isStandstill ? [] : nil
    }
}
