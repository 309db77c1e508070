internal import TokenLedger
internal import TokenModel

/// Decides when a lock of another session is worth reporting: when results wait, and the same transaction holds a lock for
/// seconds. Pure.
///
/// It is normal that a batch meets a lock: an application that registers a token holds its row. So sessions are looked up only after
/// locks have been met for a while, and reported only if they are found repeatedly.
struct LockWatch {
    private let timing: Timing
    private var since: ContinuousClock.Instant?
    private var metAt: ContinuousClock.Instant?
    private var workedAt: ContinuousClock.Instant?
    private var lookedAt: ContinuousClock.Instant?
    private var firstSeen: [LockHolder.Identity: ContinuousClock.Instant] = [:]

    /// The sessions to report, starting with those that lock whole tables. Nil if there is nothing to report; empty if no session
    /// holds a lock for long.
    private(set) var reported: [LockHolder]?

    init(_ timing: Timing) { self.timing = timing }

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
        } else if let last = metAt, last.duration(to: now) > timing.lockQuiet {
            self = LockWatch(timing)
        }
    }

    /// Whether it is time to look up who holds locks.
    func wantsLook(now: ContinuousClock.Instant) -> Bool {
        guard let since, since.duration(to: now) >= timing.lockPatience else { return false }
        let every = reported == nil ? timing.lockLooks.before : timing.lockLooks.after
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
            firstSeen[holder.identity].map { $0.duration(to: now) >= timing.lockSeen } ?? false
        }
        // If a session holds a table, sessions that hold rows of it do not matter.
        let tables = lasting.filter(\.isOfWholeTable)
        let isStandstill =
            others.count == holders.count
            && since.map { start in
                max(start, workedAt ?? start).duration(to: now) >= timing.standstill
            } ?? false
        reported = !lasting.isEmpty ? (tables.isEmpty ? lasting : tables) : isStandstill ? [] : nil
    }
}
