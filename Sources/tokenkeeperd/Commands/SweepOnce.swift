internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

struct SweepOnce: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "sweep",
        abstract: "Sweep now, and print what was deleted.",
        discussion: """
            With the rights of tokenkeeper_daemon, sweeps in this process. With those of tokenkeeper_operator, asks \
            the running daemons, whose settings then apply, and waits for the end. Without --force, refuses to prune \
            too large a share of a topic (sweep.max_prune_share, sweep.prune_allowance).
            """)

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Only count.")
    var dryRun = false

    @Flag(help: "Prune everything that is due, whatever its share of a topic.")
    var force = false

    @Flag(help: "Print JSON.")
    var json = false

    func run() throws {
        let configuration = try options.load()
        let stop = ShutdownRequest.bySignal()
        try configuration.withLedger(as: "tokenkeeper_daemon or tokenkeeper_operator") { connection in
            let report: SweepReport
            if let lease = try claim(on: &connection) {
                report = try Sweep(lease, configuration.sweepPlan, lockTimeout: configuration.lockTimeout)
                    .perform(on: &connection) { !stop.request.isAsked }
            } else {
                report = try askDaemons(until: stop.request, on: &connection)
            }
            print(json ? try JSONOutput.text(report) : Self.text(report))
            if report.outcome != .finished || (report.refused > 0 && !dryRun) {
                throw ExitCode(ExitStatus.failed.rawValue)
            }
        }
        withExtendedLifetime(stop) {}
    }

    /// - Returns: Nil if the role may not sweep.
    private func claim(on connection: inout Connection) throws -> SweepLease? {
        do {
            if let lease = try SweepLease.claim(
                .new(.cli, dryRun: dryRun, forced: force), holder: Daemon.uniqueName, on: &connection)
            {
                return lease
            }
        } catch  where error.sqlState == "42501" {
            return nil
        }
        ConfigurationOptions.complain("another sweep is running; see tokenkeeper.sweep_run")
        throw ExitCode(ExitStatus.busy.rawValue)
    }

    private func askDaemons(
        until stop: ShutdownRequest, on connection: inout Connection
    ) throws -> SweepReport {
        guard try RequestedSweep.hasDaemon(on: &connection) else {
            ConfigurationOptions.complain(
                "no daemon is running on this database, and this role may not sweep itself: start a daemon, or connect as a member of tokenkeeper_daemon"
            )
            throw ExitCode(ExitStatus.unavailable.rawValue)
        }
        let request = try RequestedSweep(dryRun: dryRun, forced: force, on: &connection)
        ConfigurationOptions.complain(
            "this role may not sweep itself: requested sweep \(request.runID) from the running daemons; waiting for its end"
        )
        let bell = Wakeup()
        stop.alsoRing(bell)
        while !stop.isAsked {
            switch try request.progress(on: &connection) {
            case .ended(let report): return report
            case .waiting: bell.wait(for: .milliseconds(500))
            case .abandoned:
                ConfigurationOptions.complain(
                    "the daemons have stopped; the next one performs sweep \(request.runID): see tokenkeeper.sweep_run")
                throw ExitCode(ExitStatus.unavailable.rawValue)
            }
        }
        ConfigurationOptions.complain(
            "no longer waiting; the daemons perform sweep \(request.runID) all the same: see tokenkeeper.sweep_run")
        throw ExitCode(ExitStatus.failed.rawValue)
    }

    static func text(_ report: SweepReport) -> String {
        let verb = report.dryRun ? "would delete" : "deleted"
        var lines = [
            "sweep \(report.runID) \(report.outcome.rawValue)\(report.message.map { ": " + $0 } ?? "")"
        ]
        lines += report.topics.map { due in
            let fate =
                due.refused
                ? "refused, because more than \(due.maxTokens ?? 0) of \(due.ofTokens ?? 0) are due"
                : report.dryRun ? "would be pruned" : due.tokens == 1 ? "was due" : "were due"
            return
                "  \(due.topic) (\(due.environment)), \(due.cause): \(counted(due.tokens, "token", "tokens")) \(fate)"
                + (due.samples.isEmpty ? "" : "; such as " + due.samples.joined(separator: " "))
        }
        lines += [
            "\(verb) \(counted(report.prunedSuppressed, "suppressed token", "suppressed tokens")) past sweep.suppressed_retention",
            "\(verb) \(counted(report.prunedDormant, "token", "tokens")) past sweep.dormant_after",
            report.refused > 0
                ? "refused to delete \(counted(report.refused, "token", "tokens")): see --force" : nil,
            (report.dryRun ? "did not count events" : "deleted \(counted(report.deletedEvents, "event", "events"))")
                + " past sweep.event_retention",
            "\(verb) \(counted(report.deletedRejected, "rejected result", "rejected results")) past sweep.rejected_retention",
            "\(verb) \(counted(report.deletedHeld, "held result", "held results")) past sweep.held_retention",
            "\(verb) \(counted(report.deletedRuns, "old sweep run", "old sweep runs"))",
            "\(verb) \(counted(report.deletedSends, "suppressed or failed request", "suppressed and failed requests"))",
        ].compactMap { $0 }
        return lines.map(HistoryText.plain).joined(separator: "\n")
    }
}
