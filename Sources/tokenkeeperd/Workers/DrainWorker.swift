internal import Logging
internal import TokenLedger

/// Drains the queue: briskly while there is work, quietly when there is none; and reports a heartbeat.
struct DrainWorker {
    let worker: Worker
    let daemonID: String
    let bell: Wakeup
    let summary: DrainSummary
    let backlog: BacklogWorker.Backlog

    private static let beatEvery: Duration = .seconds(5)

    /// Trouble is over when it has not been met for so long: not every pass comes by what is left for a retry.
    private static let troubleLasts: Duration = .seconds(2)

    func run() {
        var troubledAt: ContinuousClock.Instant?
        worker.run(bell: bell) { connection, succeeded in
            var configuration = worker.configuration
            var drain = Drain(configuration, pair: backlog.pair, summary: summary)
            var heartbeat = try Heartbeat(
                daemonID: daemonID, version: Daemon.version, lockTimeout: configuration.lockTimeout, on: &connection)
            var beatAt: ContinuousClock.Instant?
            /// When a lock of another session kept the last heartbeat from being written; nil when none did.
            var beatRefusedAt: ContinuousClock.Instant?
            defer { summary.report() }
            var pause = configuration.pollBusy
            var unreported = false

            var trouble: DatabaseError?
            var locks = LockWatch()

            /// Looks up who holds locks, when they have been in the way for some time, and reports it.
            func watchLocks(
                _ pass: Drain.Pass, since before: Drain.Pass, on connection: inout Connection
            ) throws(DatabaseError) {
                let wasReported = locks.reported
                // The heartbeat is tried again only now and then; the lock is there meanwhile.
                locks.note(
                    waits: pass.lockWaits - before.lockWaits + (beatRefusedAt == nil ? 0 : 1),
                    settled: pass.settled - before.settled, now: .now)
                if locks.wantsLook(now: .now) {
                    locks.saw(try LockHolder.all(on: &connection), now: .now)
                    if let holders = locks.reported { worker.outages.waits(for: holders, worker.part) }
                }
                // Status shall soon show it.
                if (locks.reported == nil) != (wasReported == nil) { beatAt = nil }
            }

            func beatIfDue(_ connection: inout Connection, pagesLeft: Int) throws(DatabaseError) {
                if let last = beatRefusedAt ?? beatAt, last.duration(to: .now) < Self.beatEvery { return }
                let (queue, isReported) = try heartbeat.beat(
                    sweepInterval: configuration.sweepInterval, pagesLeft: pagesLeft, trouble: trouble,
                    waitingFor: locks.reported?.words, on: &connection)
                worker.report.sees(queue)
                beatAt = .now
                beatRefusedAt = isReported ? nil : .now
            }

            while !worker.stop.isAsked {
                configuration = worker.configuration
                drain.follow(configuration)
                heartbeat.lockTimeout = configuration.lockTimeout
                var watched = Drain.Pass()
                let pass = try drain.pass(on: &connection, report: { summary.note($0) }) {
                    connection, soFar, pagesLeft throws(DatabaseError) in
                    backlog.report(soFar, pagesLeft: pagesLeft)
                    try watchLocks(soFar, since: watched, on: &connection)
                    watched = soFar
                    try beatIfDue(&connection, pagesLeft: pagesLeft)
                    // A pass over a backlog is long: that the database is back is said with its first batch.
                    if troubledAt == nil, soFar.trouble == nil, locks.reported == nil, soFar.moved { succeeded() }
                    return !worker.stop.isAsked
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
                    worker.outages.lost(trouble, worker.part)
                } else if locks.reported == nil,
                    troubledAt.map({ $0.duration(to: .now) > Self.troubleLasts }) ?? true
                {
                    troubledAt = nil
                    succeeded()
                }
                summary.add(pass)
                pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
                if locks.isMeeting { pause = min(pause, .seconds(1)) }
                worker.rest(bell, for: pause)
            }
            try heartbeat.signOff(on: &connection)
        }
    }
}
