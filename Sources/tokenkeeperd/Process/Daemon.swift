internal import Dispatch
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import Synchronization
internal import TokenLedger

/// The long-running process: the duties on threads of their own, and the signals.
struct Daemon {
    static let version = Version(major: 0, minor: 1, patch: 0)

    /// Where a reload finds the configuration.
    let options: ConfigurationOptions
    let configuration: Configuration
    /// What it sends with; none where it does not send.
    let credentials: [LoadedCredential]
    let migrates: Bool

    /// How long a stop waits for the batches in hand. What is cut off then, PostgreSQL rolls back: nothing is lost.
    private static let patience: DispatchTimeInterval = .seconds(25)

    /// How the process is to end, once something has said so.
    private final class Ending: Sendable {
        private let status = Mutex<ExitStatus?>(nil)
        private let said = DispatchSemaphore(value: 0)

        /// The first word counts, and is told before the end begins.
        func say(_ status: ExitStatus, tell: () -> Void) {
            self.status.withLock { known in
                if known == nil { tell() }
                known = known ?? status
            }
            said.signal()
        }

        func wait() -> ExitStatus {
            said.wait()
            return status.withLock { $0 ?? .success }
        }
    }

    /// Runs until a signal, or until something that a restart would not mend.
    func run() -> ExitStatus {
        let logger = configuration.logger()
        let settings = LiveConfiguration(configuration)
        let report = ServiceReport(environment: ProcessInfo.processInfo.environment)
        let reportTimer = report.timer()
        let ending = Ending()
        let stop = Stop()
        let drainBell = Wakeup()
        let sweepBells = SweepDuty.Bells()
        stop.alsoRing(drainBell)
        stop.alsoRing(sweepBells.wakeup)

        let signals = Signals()
        for (number, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT")] {
            signals.on(number) {
                ending.say(.success) {
                    report.stopping(failure: nil)
                    logger.notice("stopping", metadata: ["signal": "\(name)"])
                }
            }
        }
        signals.on(SIGUSR1) { sweepBells.signal() }
        let reload = Reload(options: options, settings: settings, report: report, logger: logger)
        signals.on(SIGHUP) {
            reload.perform()
            drainBell.ring()
            sweepBells.maybeDue()
        }

        let daemonID = Self.uniqueName
        let atWork = DispatchGroup()
        let availability = Availability(report: report, logger: logger)
        let migration = migrates ? MigrationStep(ringing: sweepBells.wakeup) : nil
        func duty(_ part: Vitals.Part) -> Duty {
            Duty(
                part: part, settings: settings, stop: stop, atWork: atWork,
                availability: availability, report: report,
                giveUp: { error in
                    ending.say(.configuration) {
                        report.stopping(failure: "\(error)")
                        logger.critical("\(error)")
                    }
                }, migration: migration, logger: logger)
        }
        let digest = DrainDigest(logger: logger)
        let backlog = SecondDrainDuty.Backlog()
        stop.alsoRing(backlog.wakeup)
        let drain = DrainDuty(
            duty: duty(.drain), daemonID: daemonID, bell: drainBell, digest: digest, backlog: backlog)
        let secondDrain = SecondDrainDuty(duty: duty(.secondDrain), backlog: backlog, digest: digest)
        let sweep = SweepDuty(duty: duty(.sweep), daemonID: daemonID, bells: sweepBells)
        let sendBell = Wakeup()
        stop.alsoRing(sendBell)
        let send = SendDuty(duty: duty(.send), daemonID: daemonID, credentials: credentials, bell: sendBell)
        logger.notice("started", metadata: ["version": "\(Self.version)", "daemon_id": "\(daemonID)"])
        if report.cannotBeHeard { logger.warning("NOTIFY_SOCKET names no socket that can be sent to") }
        DutyThread.start(Vitals.Part.drain.rawValue) { drain.run() }
        DutyThread.start(Vitals.Part.secondDrain.rawValue) { secondDrain.run() }
        DutyThread.start(Vitals.Part.sweep.rawValue) { sweep.run() }
        if !credentials.isEmpty { DutyThread.start(Vitals.Part.send.rawValue) { send.run() } }

        // Shutting down, in order: no new batch, the batches in hand, the end.
        let status = ending.wait()
        stop.ask()
        let inTime = atWork.wait(timeout: .now() + Self.patience) == .success
        if !inTime {
            logger.warning(
                "a batch did not end in time; PostgreSQL rolls it back, and the next start takes it up again")
        }
        withExtendedLifetime((signals, reportTimer)) { logger.notice("stopped") }
        report.stopped(inTime: inTime)
        return status
    }

    /// `host/pid/start`, the name of this run in `tokenkeeper.daemon` and `sweep_run`.
    static var uniqueName: String {
        "\(hostName)/\(getpid())/\(Int(Date.now.timeIntervalSince1970))"
    }

    private static var hostName: String {
        var name = [CChar](repeating: 0, count: 256)
        _ = unsafe gethostname(&name, name.count - 1)
        return String(decoding: name.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self)
    }
}
