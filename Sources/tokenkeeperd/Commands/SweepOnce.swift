internal import ArgumentParser
internal import Glibc
internal import TokenLedger

struct SweepOnce: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "sweep",
        abstract: "Sweep now, in this process, and say what was cleared away.",
        discussion: "Leaves with 75 when another sweep is running, with 70 when this one failed.")

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Count only: delete nothing.")
    var dryRun = false

    func run() throws {
        let configuration = try options.load()
        let stop = Stop()
        let signals = Signals()
        signals.on(SIGTERM) { stop.ask() }
        signals.on(SIGINT) { stop.ask() }
        try configuration.withConnection { connection in
            try Migrator(daemon: Daemon.version).check(&connection)
            guard
                let lease = try SweepLease.claim(
                    .new(.cli, dryRun: dryRun), holder: Daemon.uniqueName, on: &connection)
            else {
                ConfigurationOptions.complain("another sweep is running; see tokenkeeper.sweep_run")
                throw ExitCode(ExitStatus.busy.rawValue)
            }
            let report = try Sweep(lease, configuration.sweepPlan, lockTimeout: configuration.lockTimeout)
                .perform(on: &connection) { !stop.isAsked }
            print(Self.text(report))
            if report.outcome != .finished { throw ExitCode(ExitStatus.failed.rawValue) }
        }
        withExtendedLifetime(signals) {}
    }

    static func text(_ report: SweepReport) -> String {
        let verb = report.dryRun ? "would delete" : "deleted"
        return """
            sweep \(report.runID) \(report.outcome.rawValue)\(report.message.map { ": " + $0 } ?? "")
            \(verb) \(report.prunedSuppressed) suppressed tokens past sweep.stale_retention
            \(verb) \(report.prunedDormant) tokens past sweep.dormant_after
            \(report.dryRun ? "does not count" : "deleted \(report.deletedEvents)") events past sweep.event_retention
            \(verb) \(report.deletedRejected) rejected results past sweep.rejected_retention
            \(verb) \(report.deletedRuns) old sweep runs
            """
    }
}
