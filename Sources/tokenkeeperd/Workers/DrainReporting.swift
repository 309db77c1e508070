internal import Logging
internal import TokenLedger
internal import TokenModel

/// Reports what the drain does: heartbeats, the locks in its way, what it cannot record, and how long results have been waiting.
struct DrainReporting {
    private let worker: Worker
    private var heartbeat: Heartbeat
    private var configuration: Configuration
    private var beatAt: ContinuousClock.Instant?
    /// When a lock of another session prevented the last heartbeat; nil if none did.
    private var beatRefusedAt: ContinuousClock.Instant?
    private var locks = LockWatch()
    private var trouble: DatabaseError?
    /// What the pass had done when its locks were last counted.
    private var counted = Drain.Pass()
    /// Whether rows have moved since the last heartbeat of an idle pass.
    private var isUnreported = false
    /// How many results this pass and the earlier ones have settled since the last look at the queue, and when that was.
    private var settled = 0
    private var lookedAt = ContinuousClock.now
    /// Since when results have been late, and whether the log says so.
    private var late: (since: ContinuousClock.Instant, isLogged: Bool)?

    private static let beatEvery: Duration = .seconds(5)

    /// Older results are worth a warning, here and in the view `status`.
    private static let lateAfter: Duration = .seconds(300)
    /// By then, the cause is known.
    private static let logsAfter: Duration = .seconds(8)

    init(_ worker: Worker, daemonID: String, on connection: inout Connection) throws(DatabaseError) {
        self.worker = worker
        configuration = worker.configuration
        heartbeat = try Heartbeat(
            daemonID: daemonID, version: Daemon.version, lockTimeout: configuration.lockTimeout, on: &connection)
    }

    /// Whether locks of other sessions are in the way at the moment.
    var isMeetingLocks: Bool { locks.isMeeting }

    /// Whether locks of other sessions have been in the way long enough to be reported.
    var isHeldUp: Bool { locks.reported != nil }

    mutating func passBegins(_ configuration: Configuration) {
        self.configuration = configuration
        heartbeat.lockTimeout = configuration.lockTimeout
        counted = Drain.Pass()
    }

    mutating func batchEnded(
        _ soFar: Drain.Pass, pagesLeft: Int, on connection: inout Connection
    ) throws(DatabaseError) {
        try watchLocks(soFar, on: &connection)
        try beatIfDue(pagesLeft: pagesLeft, on: &connection)
    }

    mutating func passEnded(
        _ pass: Drain.Pass, trouble now: DatabaseError?, on connection: inout Connection
    ) throws(DatabaseError) {
        try watchLocks(pass, on: &connection)
        // Once the last of the work is done, or something is in its way, `status` should soon show it.
        isUnreported = pass.moved || now != trouble || isUnreported
        trouble = now
        if isUnreported, !pass.moved, beatAt.map({ $0.duration(to: .now) > .seconds(1) }) ?? true {
            beatAt = nil
            isUnreported = false
        }
        try beatIfDue(pagesLeft: 0, on: &connection)
    }

    /// Records that this daemon stops as intended.
    func signOff(on connection: inout Connection) throws(DatabaseError) {
        try heartbeat.signOff(on: &connection)
    }

    /// Looks up which sessions hold locks, once locks have been in the way for some time, and reports them.
    private mutating func watchLocks(
        _ pass: Drain.Pass, on connection: inout Connection
    ) throws(DatabaseError) {
        let wasHeldUp = isHeldUp
        // A refused heartbeat is retried only from time to time. Until then, assume that its lock remains.
        locks.note(
            waits: pass.lockWaits - counted.lockWaits + (beatRefusedAt == nil ? 0 : 1),
            settled: pass.settled - counted.settled, now: .now)
        settled += pass.settled - counted.settled
        counted = pass
        if locks.wantsLook(now: .now) {
            locks.saw(try LockHolder.all(on: &connection), now: .now)
            if let holders = locks.reported { worker.outages.waits(for: holders, worker.part) }
        }
        // `status` should soon show it.
        if isHeldUp != wasHeldUp { beatAt = nil }
    }

    private mutating func beatIfDue(pagesLeft: Int, on connection: inout Connection) throws(DatabaseError) {
        if let last = beatRefusedAt ?? beatAt, last.duration(to: .now) < Self.beatEvery { return }
        let queue = try heartbeat.look(pagesLeft: pagesLeft, on: &connection)
        let now = ContinuousClock.now
        let reason = WaitReason(
            trouble: trouble, holders: locks.reported, settled: settled, period: lookedAt.duration(to: now)
        ).words(for: queue)
        (settled, lookedAt) = (0, now)
        let isReported = try heartbeat.beat(
            queue, sweepInterval: configuration.sweepInterval, trouble: trouble,
            locks: locks.reported.map { Heartbeat.Locks(words: $0.words, metFor: locks.metFor(at: now)) },
            reason: reason, on: &connection)
        warnIfLate(queue, reason)
        worker.report.sees(queue, because: reason, try summary(on: &connection))
        beatAt = .now
        beatRefusedAt = isReported ? nil : .now
    }

    /// What `status` warns of. If the view is refused, the drain goes on without.
    private func summary(on connection: inout Connection) throws(DatabaseError) -> StatusSummary? {
        do { return try StatusSummary(on: &connection) } catch {
            if error.remedy == .reconnect { throw error }
            return nil
        }
    }

    private mutating func warnIfLate(_ queue: Heartbeat.Queue, _ reason: String?) {
        guard let oldest = queue.oldest, oldest.advanced(byMicroseconds: Self.lateAfter.microseconds) < .now else {
            if late?.isLogged == true {
                worker.logger.notice(
                    "no result has been waiting for longer than five minutes any more",
                    metadata: ["results": "\(queue.depth)"])
            }
            late = nil
            return
        }
        let since = late?.since ?? .now
        guard late?.isLogged != true, since.duration(to: .now) >= Self.logsAfter else {
            late = (since, late?.isLogged ?? false)
            return
        }
        late = (since, true)
        worker.logger.warning(
            "results have been waiting for longer than five minutes",
            metadata: [
                "results": "\(queue.depth)", "oldest": "\(ServiceState.text(oldest.date))",
                "because": "\(reason ?? "")",
            ])
    }
}
