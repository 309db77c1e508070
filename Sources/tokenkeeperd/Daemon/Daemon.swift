internal import Dispatch
internal import FoundationEssentials
internal import Glibc
internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// The long-running process: the workers, each on a thread of its own, and the signals.
///
/// Start here: `run` starts everything, waits for the end, and shuts down in order.
struct Daemon {
    static let version = Version(major: 0, minor: 1, patch: 0)

    /// Where a reload reads the configuration.
    let options: ConfigurationOptions
    let configuration: Configuration
    /// The credentials for APNs; empty if the daemon does not send.
    let credentials: [CredentialSource]
    let migrates: Bool
    let timing: Timing

    /// How long a shutdown waits for running batches. PostgreSQL rolls back a batch that takes longer, and nothing is lost.
    private static let patience: DispatchTimeInterval = .seconds(25)

    /// The exit status of the process, once something has ended it.
    private final class Ending: Sendable {
        private let status = Mutex<ExitStatus?>(nil)
        private let said = DispatchSemaphore(value: 0)

        /// Takes the first status only, and reports it before the shutdown begins.
        func say(_ status: ExitStatus, report: () -> Void) {
            self.status.withLock { known in
                if known == nil { report() }
                known = known ?? status
            }
            said.signal()
        }

        func wait() -> ExitStatus {
            said.wait()
            return status.withLock { $0 ?? .success }
        }
    }

    /// Runs until a signal, or until an error that a restart would not fix.
    func run() -> ExitStatus {
        let logger = configuration.logger()
        let settings = LiveConfiguration(configuration)
        let report = ServiceNotifier(environment: ProcessInfo.processInfo.environment)
        let reportTimer = report.timer()
        let ending = Ending()
        let stop = ShutdownRequest()
        let drainBell = Wakeup()
        let sweepBells = SweepWorker.Bells()
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
        let refresh = CredentialRefresh()
        signals.on(SIGHUP) {
            reload.perform()
            refresh.ask()
            drainBell.ring()
            sweepBells.maybeDue()
        }

        let daemonID = Self.uniqueName
        let atWork = DispatchGroup()
        let topicLabels = configuration.metricsAddress.map { _ in TopicLabels() }
        let metrics = ProcessMetrics(topicLabels: topicLabels)
        let outages = OutageLog(report: report, metrics: metrics, logger: logger)
        let migration = migrates ? MigrationStep(ringing: sweepBells.wakeup) : nil
        func worker(_ part: ServiceState.Part) -> Worker {
            Worker(
                part: part, settings: settings, timing: timing, stop: stop, atWork: atWork,
                statements: metrics.statements, outages: outages, report: report,
                migration: migration, logger: logger)
        }
        let summary = DrainSummary(metrics: metrics, logger: logger)
        let backlog = BacklogWorker.Backlog()
        stop.alsoRing(backlog.wakeup)
        let drain = DrainWorker(
            worker: worker(.drain), daemonID: daemonID, bell: drainBell, summary: summary, backlog: backlog,
            topicLabels: topicLabels)
        let backlogWorker = BacklogWorker(worker: worker(.backlog), backlog: backlog, summary: summary)
        let sweep = SweepWorker(worker: worker(.sweep), daemonID: daemonID, bells: sweepBells)
        let sendBell = Wakeup()
        stop.alsoRing(sendBell)
        let audiences = SlowAudiences()
        stop.alsoRing(audiences.wakeup)
        let send = SendWorker(
            worker: worker(.send), daemonID: daemonID, credentials: credentials, refresh: refresh, bell: sendBell,
            audiences: audiences,
            metrics: metrics.sending)
        let addressing = AddressingWorker(worker: worker(.addressing), daemonID: daemonID, audiences: audiences)
        stop.alsoRing(addressing.cancel)
        let monitorBell = Wakeup()
        stop.alsoRing(monitorBell)
        let overviews = OverviewCache()
        let lookups = PageLookups()
        stop.alsoRing(lookups.wakeup)
        let monitor = topicLabels.map {
            MonitorWorker(
                worker: worker(.monitor), bell: monitorBell, labels: $0, metrics: metrics.database,
                overviews: configuration.pageAccess == .off ? nil : overviews)
        }
        logger.notice("started", metadata: ["version": "\(Self.version)", "daemon_id": "\(daemonID)"])
        let monitoring = Monitoring.serve(
            configuration.metricsAddress, as: configuration.hostNames, metrics,
            ServedPage(configuration.pageAccess, overviews, lookups, settings), settings, report, logger)
        defer { monitoring?.stop() }
        if report.cannotBeHeard { logger.warning("NOTIFY_SOCKET names no socket that can be sent to") }
        WorkerThread.start(ServiceState.Part.drain.rawValue) { drain.run() }
        WorkerThread.start(ServiceState.Part.backlog.rawValue) { backlogWorker.run() }
        WorkerThread.start(ServiceState.Part.sweep.rawValue) { sweep.run() }
        if !credentials.isEmpty {
            WorkerThread.start(ServiceState.Part.send.rawValue) { send.run() }
            WorkerThread.start(ServiceState.Part.addressing.rawValue) { addressing.run() }
        }
        if let monitor { WorkerThread.start(ServiceState.Part.monitor.rawValue) { monitor.run() } }
        if monitor?.overviews != nil { WorkerThread.start("page") { lookups.run(settings, until: stop) } }

        // Shutdown, in order: no new batches, then the running batches end, then the process.
        let status = ending.wait()
        stop.ask()
        let inTime = atWork.wait(timeout: .now() + Self.patience) == .success
        if !inTime {
            logger.warning(
                "a batch did not end in time; PostgreSQL rolls it back, and it runs again after the next start")
        }
        withExtendedLifetime((signals, reportTimer)) { logger.notice("stopped") }
        report.stopped(inTime: inTime)
        return status
    }

    /// `host/pid/start`: the name of this process in `tokenkeeper.daemon` and `sweep_run`.
    static var uniqueName: String {
        "\(hostName)/\(getpid())/\(Int(Date.now.timeIntervalSince1970))"
    }

    /// This machine's name.
    static var hostName: String {
        var name = [CChar](repeating: 0, count: 256)
        _ = unsafe gethostname(&name, name.count - 1)
        return String(decoding: name.prefix { $0 != 0 }.map { UInt8(bitPattern: $0) }, as: UTF8.self)
    }
}
