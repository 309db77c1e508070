internal import Logging
internal import TokenLedger

/// Drains the queue: briskly while there is work, quietly when there is none; and reports a heartbeat.
struct DrainDuty {
    let duty: Duty
    let daemonID: String
    let bell: Wakeup
    let digest: DrainDigest
    let backlog: SecondDrainDuty.Backlog

    private static let beatEvery: Duration = .seconds(5)

    /// Trouble is over when it has not been met for so long: not every pass comes by what is set aside.
    private static let troubleLasts: Duration = .seconds(2)

    func run() {
        var troubledAt: ContinuousClock.Instant?
        duty.run(bell: bell) { connection, succeeded in
            var configuration = duty.configuration
            var intake = Intake(configuration, pair: backlog.pair, digest: digest)
            var heartbeat = try Heartbeat(
                daemonID: daemonID, version: Daemon.version, lockTimeout: configuration.lockTimeout, on: &connection)
            var beatAt: ContinuousClock.Instant?
            /// When a lock of another session kept the last heartbeat from being written; nil when none did.
            var beatRefusedAt: ContinuousClock.Instant?
            defer { digest.tell() }
            var pause = configuration.pollBusy
            var unreported = false

            var trouble: DatabaseError?
            var locks = LockWatch()

            /// Looks up who holds locks, when they have been in the way for some time, and reports it.
            func watchLocks(
                _ pass: Intake.Pass, since before: Intake.Pass, on connection: inout Connection
            ) throws(DatabaseError) {
                let wasReported = locks.reported
                // The heartbeat is tried again only now and then; the lock is there meanwhile.
                locks.note(
                    waits: pass.lockWaits - before.lockWaits + (beatRefusedAt == nil ? 0 : 1),
                    settled: pass.settled - before.settled, now: .now)
                if locks.wantsLook(now: .now) {
                    locks.saw(try LockHolder.all(on: &connection), now: .now)
                    if let holders = locks.reported { duty.availability.waits(for: holders, duty.part) }
                }
                // Status shall soon show it.
                if (locks.reported == nil) != (wasReported == nil) { beatAt = nil }
            }

            func beatIfDue(_ connection: inout Connection, pagesLeft: Int) throws(DatabaseError) {
                if let last = beatRefusedAt ?? beatAt, last.duration(to: .now) < Self.beatEvery { return }
                let (queue, isReported) = try heartbeat.beat(
                    sweepInterval: configuration.sweepInterval, pagesLeft: pagesLeft, trouble: trouble,
                    waitingFor: locks.reported?.words, on: &connection)
                duty.report.sees(queue)
                beatAt = .now
                beatRefusedAt = isReported ? nil : .now
            }

            while !duty.stop.isAsked {
                configuration = duty.configuration
                intake.follow(configuration)
                heartbeat.lockTimeout = configuration.lockTimeout
                var watched = Intake.Pass()
                let pass = try intake.pass(on: &connection, tell: { digest.note($0) }) {
                    connection, soFar, pagesLeft throws(DatabaseError) in
                    backlog.tell(soFar, pagesLeft: pagesLeft)
                    try watchLocks(soFar, since: watched, on: &connection)
                    watched = soFar
                    try beatIfDue(&connection, pagesLeft: pagesLeft)
                    // A pass over a backlog is long: that the database is back is said with its first batch.
                    if troubledAt == nil, soFar.trouble == nil, locks.reported == nil, soFar.moved { succeeded() }
                    return !duty.stop.isAsked
                }
                try watchLocks(pass, since: watched, on: &connection)
                // When the last of the work is done, or something is in its way, status shall soon show it.
                unreported = pass.moved || pass.trouble != trouble || unreported
                trouble = pass.trouble
                if unreported, !pass.moved, beatAt.map({ $0.duration(to: .now) > .seconds(1) }) ?? true {
                    beatAt = nil
                    unreported = false
                }
                try beatIfDue(&connection, pagesLeft: 0)
                if let trouble {
                    troubledAt = .now
                    duty.availability.lost(trouble, duty.part)
                } else if locks.reported == nil,
                    troubledAt.map({ $0.duration(to: .now) > Self.troubleLasts }) ?? true
                {
                    troubledAt = nil
                    succeeded()
                }
                digest.add(pass)
                pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
                if locks.isMeeting { pause = min(pause, .seconds(1)) }
                duty.rest(bell, for: pause)
            }
            try heartbeat.farewell(on: &connection)
        }
    }
}
