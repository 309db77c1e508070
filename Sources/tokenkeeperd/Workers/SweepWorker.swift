internal import FoundationEssentials
internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Sweeps: on the timer, on SIGUSR1, and when SQL asks for it. In between it counts the tokens for `status`, and undoes what `reinstate` has left
/// to do.
struct SweepWorker {
    /// What the signal handlers and the timer leave for this worker.
    final class Bells: Sendable {
        let wakeup = Wakeup()
        private let signalled = Atomic(false)
        private let due = Atomic(true)

        func signal() {
            signalled.store(true, ordering: .releasing)
            wakeup.ring()
        }

        /// A sweep may be due: the timer has fired, or the interval is another one.
        func maybeDue() {
            markDue()
            wakeup.ring()
        }

        fileprivate func markDue() { due.store(true, ordering: .releasing) }

        fileprivate func takeSignal() -> Bool { signalled.exchange(false, ordering: .acquiring) }
        fileprivate func takeDue() -> Bool { due.exchange(false, ordering: .acquiring) }
    }

    let worker: Worker
    let daemonID: String
    let bells: Bells

    /// Requests by SQL are looked for this often. Polled, so that it works behind any pooler.
    private static let lookEvery: Duration = .seconds(2)
    /// While suspects are being undone, the pause between two turns of a second each.
    private static let undoEvery: Duration = .milliseconds(50)

    func run() {
        let timer = SweepTimer { [bells] in bells.maybeDue() }
        var count = TokenCount()
        var statusCache = StatusCache()
        var refusedTopics: Set<String> = []
        worker.run(bell: bells.wakeup) { connection, succeeded in
            try SweepLease.release(holder: daemonID, on: &connection)
            bells.markDue()
            while !worker.stop.isAsked {
                if bells.takeSignal() {
                    do {
                        try SweepLease.request(.signal, on: &connection)
                    } catch {
                        // Asked for again when the database is back.
                        bells.signal()
                        throw error
                    }
                }
                for closed in try MassFailureGuard.closeQuiet(worker.configuration.guardLimits, on: &connection) {
                    worker.logger.notice(
                        "the mass-failure guard is closed: suspects are recorded again",
                        metadata: ["environment": "\(closed.environment)", "topic": "\(closed.topic)"])
                }
                let undoes = try Reinstatement.undo(within: .seconds(1), on: &connection) { !worker.stop.isAsked }
                let look = try SweepLease.look(on: &connection)
                if let last = look.last {
                    worker.report.lastSweep(at: last.endedAt.date, outcome: last.outcome)
                }
                if look.isRequested,
                    let lease = try SweepLease.claim(.requested, holder: daemonID, on: &connection)
                {
                    try sweep(lease, told: &refusedTopics, on: &connection)
                    succeeded()
                    continue
                }
                if let interval = worker.configuration.sweepInterval, bells.takeDue() {
                    if let lease = try SweepLease.claim(.due(interval: interval), holder: daemonID, on: &connection) {
                        try sweep(lease, told: &refusedTopics, on: &connection)
                    }
                    timer.schedule(in: max(try SweepLease.untilDue(interval: interval, on: &connection), .seconds(1)))
                    continue
                }
                // A count can take minutes: any bell ends it.
                try count.refresh(on: &connection, stop: bells.wakeup)
                try statusCache.refresh(on: &connection)
                succeeded()
                worker.rest(bells.wakeup, for: undoes ? Self.undoEvery : Self.lookEvery)
            }
        }
    }

    /// - Parameter told: The topics of which it has been logged that they were refused.
    private func sweep(
        _ lease: SweepLease, told: inout Set<String>, on connection: inout Connection
    ) throws(DatabaseError) {
        worker.report.sweeps(true)
        defer { worker.report.sweeps(false) }
        let sweep = Sweep(lease, worker.configuration.sweepPlan, lockTimeout: worker.configuration.lockTimeout)
        let report = try sweep.perform(on: &connection) { !worker.stop.isAsked }
        var level: Logger.Level = report.outcome == .failed ? .error : .info
        let refused = Set(report.topics.filter(\.refused).map { "\($0.topic) (\($0.environment))" })
        // A timer refuses the same each hour: once is enough.
        if !report.dryRun, !refused.subtracting(told).isEmpty {
            worker.logger.warning(
                "the sweep refused to prune, because too much is due: see `tokenkeeperd sweep --dry-run` and --force",
                metadata: [
                    "run_id": "\(report.runID)", "tokens": "\(report.refused)",
                    "topics": "\(refused.sorted().joined(separator: ", "))",
                ])
        }
        if !report.dryRun { told = refused }
        var more: Logger.Metadata = [:]
        more["message"] = report.message.map { "\($0)" }
        if report.outcome == .failed, report.message?.contains("SQLSTATE 55P03") == true {
            let holders = ((try? LockHolder.all(on: &connection)) ?? []).filter(\.isOfWholeTable)
            if !holders.isEmpty { more["held"] = "\(holders.words)" }
        }
        // An hourly sweep that found nothing is no news.
        if report.outcome == .finished, report.trigger == .timer, report.total == 0 { level = .debug }
        worker.logger.log(
            level: level, "sweep \(report.outcome.rawValue)",
            metadata: [
                "run_id": "\(report.runID)", "trigger": "\(report.trigger.rawValue)", "dry_run": "\(report.dryRun)",
                "pruned_suppressed": "\(report.prunedSuppressed)", "pruned_dormant": "\(report.prunedDormant)",
                "deleted_events": "\(report.deletedEvents)", "deleted_rejected": "\(report.deletedRejected)",
                "deleted_held": "\(report.deletedHeld)", "deleted_runs": "\(report.deletedRuns)",
                "deleted_sends": "\(report.deletedSends)",
                "refused": "\(report.refused)",
            ].merging(more) { $1 })
    }
}
