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
            var intake = Intake(configuration, pair: backlog.pair)
            var heartbeat = try Heartbeat(
                daemonID: daemonID, version: Daemon.version, lockTimeout: configuration.lockTimeout, on: &connection)
            var beatAt: ContinuousClock.Instant?
            defer { digest.tell() }
            var pause = configuration.pollBusy
            var unreported = false

            var trouble: DatabaseError?

            func beatIfDue(_ connection: inout Connection, pagesLeft: Int) throws(DatabaseError) {
                if let last = beatAt, last.duration(to: .now) < Self.beatEvery { return }
                duty.report.sees(
                    try heartbeat.beat(
                        sweepInterval: configuration.sweepInterval, pagesLeft: pagesLeft, trouble: trouble,
                        on: &connection))
                beatAt = .now
            }

            while !duty.stop.isAsked {
                configuration = duty.configuration
                intake.follow(configuration)
                heartbeat.lockTimeout = configuration.lockTimeout
                let pass = try intake.pass(on: &connection, tell: { digest.note($0) }) {
                    connection, soFar, pagesLeft throws(DatabaseError) in
                    backlog.tell(soFar, pagesLeft: pagesLeft)
                    try beatIfDue(&connection, pagesLeft: pagesLeft)
                    // A pass over a backlog is long: that the database is back is said with its first batch.
                    if troubledAt == nil, soFar.trouble == nil, soFar.moved { succeeded() }
                    return !duty.stop.isAsked
                }
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
                } else if troubledAt.map({ $0.duration(to: .now) > Self.troubleLasts }) ?? true {
                    troubledAt = nil
                    succeeded()
                }
                digest.add(pass)
                pause = pass.moved ? configuration.pollBusy : min(pause * 2, configuration.pollIdle)
                duty.rest(bell, for: pause)
            }
            try heartbeat.farewell(on: &connection)
        }
    }
}
