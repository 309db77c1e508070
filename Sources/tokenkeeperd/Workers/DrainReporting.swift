internal import Logging
internal import TokenLedger
internal import TokenModel

/// Reports what the drain does: heartbeats, the locks in its way, what it cannot record, and how long rows have been waiting.
struct DrainReporting {
    private let worker: Worker
    private let summary: DrainSummary
    private var heartbeat: Heartbeat
    private var configuration: Configuration
    private var beatAt: ContinuousClock.Instant?
    /// When a lock of another session prevented the last heartbeat; nil if none did.
    private var beatRefusedAt: ContinuousClock.Instant?
    private var locks: LockWatch
    private var troubles: [QueueName: DatabaseError] = [:]
    private var refusals: [QueueName: Drain.Pass.Refusal] = [:]
    /// What the pass had done when its locks were last counted.
    private var counted = Drain.Pass()
    /// Whether rows have moved since the last heartbeat of an idle pass.
    private var isUnreported = false
    /// When the queues were last looked at.
    private var lookedAt = ContinuousClock.now
    private var lateResults = LateRows(.results)
    private var lateRegistrations = LateRows(.registrations)
    /// What it reports must not keep the drain from its work.
    private var chores = Chores()

    init(
        _ worker: Worker, daemonID: String, _ summary: DrainSummary, on connection: inout Connection
    ) throws(DatabaseError) {
        self.worker = worker
        self.summary = summary
        configuration = worker.configuration
        locks = LockWatch(worker.timing)
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
        _ soFar: Drain.Pass, _ unread: Drain.UnreadPages, on connection: inout Connection
    ) throws(DatabaseError) {
        try report(soFar, unread, on: &connection)
    }

    private mutating func report(
        _ pass: Drain.Pass, _ unread: Drain.UnreadPages, on connection: inout Connection
    ) throws(DatabaseError) {
        var chores = chores
        defer { self.chores = chores }
        try chores.run("look for locks", on: &connection) { connection throws(DatabaseError) in
            try watchLocks(pass, on: &connection)
        }
        try chores.run("write its heartbeat", on: &connection) { connection throws(DatabaseError) in
            try beatIfDue(unread, on: &connection)
        }
        worker.report.cannot(chores.failures, worker.part)
    }

    mutating func passEnded(_ pass: Drain.Pass, on connection: inout Connection) throws(DatabaseError) {
        // Once the last of the work is done, or something is in its way, `status` should soon show it.
        isUnreported = pass.moved || pass.troubles != troubles || isUnreported
        (troubles, refusals) = (pass.troubles, pass.refusals)
        if isUnreported, !pass.moved, beatAt.map({ $0.duration(to: .now) > worker.timing.soon }) ?? true {
            beatAt = nil
            isUnreported = false
        }
        try report(pass, Drain.UnreadPages(), on: &connection)
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
        summary.settled(pass, since: counted)
        counted = pass
        if locks.wantsLook(now: .now) {
            locks.saw(try LockHolder.all(on: &connection), now: .now)
            if let holders = locks.reported { worker.outages.waits(for: holders, worker.part) }
        }
        // `status` should soon show it.
        if isHeldUp != wasHeldUp { beatAt = nil }
    }

    private mutating func beatIfDue(
        _ unread: Drain.UnreadPages, on connection: inout Connection
    ) throws(DatabaseError) {
        if let last = beatRefusedAt ?? beatAt, last.duration(to: .now) < worker.timing.heartbeat { return }
        let seen = (
            results: try heartbeat.look(at: .results, pagesLeft: unread.results, on: &connection),
            registrations: try heartbeat.look(at: .registrations, pagesLeft: unread.registrations, on: &connection)
        )
        let now = ContinuousClock.now
        let period = lookedAt.duration(to: now)
        let settled = summary.takeSettled()
        let results = report(of: .results, seen.results, settled: settled.results, period)
        let registrations = report(of: .registrations, seen.registrations, settled: settled.registrations, period)
        lookedAt = now
        let isReported = try heartbeat.beat(
            results: results, registrations: registrations, sweepInterval: configuration.sweepInterval,
            locks: locks.reported.map { Heartbeat.Locks(words: $0.words, metFor: locks.metFor(at: now)) },
            chores: worker.report.current.failingChores, settings: configuration.chosen, on: &connection)
        lateResults.warn(results, worker.logger)
        lateRegistrations.warn(registrations, worker.logger)
        worker.report.sees(results, registrations, try summary(on: &connection))
        beatAt = .now
        beatRefusedAt = isReported ? nil : .now
    }

    private func report(
        of name: QueueName, _ queue: Heartbeat.Queue, settled: Int, _ period: Duration
    ) -> Heartbeat.QueueReport {
        let reason = WaitReason(
            trouble: troubles[name], refusal: refusals[name], holders: locks.reported, settled: settled, period: period)
        return Heartbeat.QueueReport(
            queue, trouble: troubles[name], reason: reason.words(for: queue),
            perSecond: Double(settled) / max(period / .seconds(1), 0.001))
    }

    /// What `status` warns of. If the view is refused, the drain goes on without.
    private func summary(on connection: inout Connection) throws(DatabaseError) -> StatusSummary? {
        do { return try StatusSummary(on: &connection) } catch {
            if error.remedy == .reconnect { throw error }
            return nil
        }
    }
}
