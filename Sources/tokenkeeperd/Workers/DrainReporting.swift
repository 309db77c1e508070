internal import TokenLedger

/// Reports what the drain does: heartbeats, the locks in its way, and what it cannot record.
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

    private static let beatEvery: Duration = .seconds(5)

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
        let (queue, isReported) = try heartbeat.beat(
            sweepInterval: configuration.sweepInterval, pagesLeft: pagesLeft, trouble: trouble,
            waitingFor: locks.reported?.words, on: &connection)
        worker.report.sees(queue)
        beatAt = .now
        beatRefusedAt = isReported ? nil : .now
    }
}
