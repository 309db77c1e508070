internal import FoundationEssentials
internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Sweeps on the timer, on SIGUSR1, and when SQL requests it. In between, it resets guards, looks for waves of 410s and at attached
/// tables, undoes the results of reinstated windows, and finishes erasures. Each of these chores fails alone.
struct SweepWorker {
    /// The requests of the signal handlers and the timer to this worker.
    final class Bells: Sendable {
        let wakeup = Wakeup()
        private let signalled = Atomic(false)
        private let due = Atomic(true)

        func signal() {
            signalled.store(true, ordering: .releasing)
            wakeup.ring()
        }

        /// A sweep may be due: the timer has fired, or the interval has changed.
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

    /// The pause between two turns of a second each, while results are being undone.
    private static let undoEvery: Duration = .milliseconds(50)

    /// What the worker remembers between two turns.
    private struct State {
        var statusCache: StatusCache
        /// When to look for waves of 410s again.
        var wavesAgain = ContinuousClock.now
        /// When to finish erasures again.
        var erasuresAgain = ContinuousClock.now
        var attachments: AttachmentWatch
        var campaigns = CampaignLog()
        var moved = MovedRows()
        /// The topics that the last sweep refused. The timer's sweeps refuse the same topics every hour, which is logged once.
        var refused: Set<String> = []
        var chores = Chores()
        /// Whether a sweep that an earlier connection had begun is marked as interrupted.
        var isReleased = false

        init(_ timing: Timing) {
            statusCache = StatusCache(timing)
            attachments = AttachmentWatch(every: timing.attachments)
        }
    }

    func run() {
        let timer = SweepTimer { [bells] in bells.maybeDue() }
        var state = State(worker.timing)
        worker.run(bell: bells.wakeup) { connection, schema, succeeded in
            state.isReleased = false
            bells.markDue()
            while !worker.stop.isAsked {
                let pause = try round(timer, &state, schema, on: &connection)
                report(state, on: &connection, succeeded)
                if let pause { worker.rest(bells.wakeup, for: pause) }
            }
        }
    }

    /// Does each chore once.
    ///
    /// - Returns: How long to rest; nil for not at all.
    private func round(
        _ timer: SweepTimer, _ state: inout State, _ schema: CheckedSchema, on connection: inout Connection
    ) throws(DatabaseError) -> Duration? {
        @discardableResult func attempt<Value>(
            _ chore: String, _ work: (inout State, inout Connection) throws(DatabaseError) -> Value
        ) throws(DatabaseError) -> Value? {
            var chores = state.chores
            defer { state.chores = chores }
            return try chores.run(chore, on: &connection, isRefusal: schema.isMissingFunction) {
                connection throws(DatabaseError) in try work(&state, &connection)
            }
        }
        let goesOn = { !worker.stop.isAsked }
        if !state.isReleased {
            state.isReleased =
                try attempt("mark an interrupted sweep") { _, connection throws(DatabaseError) in
                    try SweepLease.release(holder: daemonID, on: &connection)
                } != nil
        }
        try attempt("request a sweep") { _, connection throws(DatabaseError) in
            try requestIfSignalled(on: &connection)
        }
        try attempt("reset guards") { _, connection throws(DatabaseError) in try resetQuietGuards(on: &connection) }
        try attempt("look for waves of 410s") { state, connection throws(DatabaseError) in
            try warnOfWaves(&state, on: &connection)
        }
        try attempt("finish erasures") { state, connection throws(DatabaseError) in
            if ContinuousClock.now < state.erasuresAgain { return }
            state.erasuresAgain = .now + worker.timing.erasures
            while try Erasures.finishNext(on: &connection) > 0, goesOn() {}
        }
        try attempt("look at attached tables") { state, connection throws(DatabaseError) in
            try state.attachments.look(on: &connection, worker.logger)
        }
        try attempt("log what becomes of campaigns") { state, connection throws(DatabaseError) in
            try state.campaigns.look(on: &connection, worker.logger)
        }
        try attempt("pass on rows of topics that have moved") { state, connection throws(DatabaseError) in
            try state.moved.passOn(
                from: &connection, worker.configuration, every: worker.timing.chores, worker.logger)
        }
        let undoes = try attempt("undo what was reinstated") { _, connection throws(DatabaseError) in
            try Reinstatement.undo(within: .seconds(1), on: &connection, while: goesOn)
        }
        let hasSwept = try attempt("sweep on request") { state, connection throws(DatabaseError) in
            try sweepIfRequested(&state, on: &connection)
        }
        if hasSwept == true { return nil }
        let wasDue = try attempt("sweep") { state, connection throws(DatabaseError) in
            try sweepIfDue(timer, &state, on: &connection)
        }
        if wasDue == true { return nil }
        try attempt("look for warnings") { state, connection throws(DatabaseError) in
            try state.statusCache.refresh(on: &connection)
        }
        return undoes == true ? Self.undoEvery : worker.timing.chores
    }

    private func report(_ state: State, on connection: inout Connection, _ succeeded: () -> Void) {
        let failures = state.chores.failures
        worker.report(failures, on: &connection)
        if !failures.isEmpty { return }
        if let trouble = state.statusCache.trouble {
            worker.outages.lost(trouble, worker.part)
        } else {
            succeeded()
        }
    }

    private func requestIfSignalled(on connection: inout Connection) throws(DatabaseError) {
        guard bells.takeSignal() else { return }
        do {
            try SweepLease.request(.signal, on: &connection)
        } catch {
            // Requested again when the database is back.
            bells.signal()
            throw error
        }
    }

    private func resetQuietGuards(on connection: inout Connection) throws(DatabaseError) {
        for reset in try MassFailureGuard.resetQuiet(worker.configuration.guardLimits, on: &connection) {
            GuardLog(worker.logger).noteReset(
                of: reset.cause, ["environment": "\(reset.environment)", "topic": "\(reset.topic)"])
        }
    }

    /// Warns of each wave of 410s once, whichever daemon notices it. Takes at most one hundredth of the time.
    private func warnOfWaves(_ state: inout State, on connection: inout Connection) throws(DatabaseError) {
        let began = ContinuousClock.now
        if began < state.wavesAgain { return }
        for wave in try StaleWave.noticeNew(on: &connection) {
            worker.logger.warning(
                "far more tokens than usual have turned stale: if that is a mistake, fix its cause and undo it",
                metadata: [
                    "environment": "\(wave.environment)", "topic": "\(wave.topic)", "tokens": "\(wave.tokens)",
                    "active": "\(wave.active)", "share": "\(wave.share)", "since": "\(wave.since)",
                    "undo": "\(wave.undo)",
                ])
        }
        let waves = worker.timing.waves
        state.wavesAgain = .now + min(max(waves.shortest, began.duration(to: .now) * 100), waves.longest)
    }

    /// - Returns: Whether a sweep was requested and this daemon ran it.
    private func sweepIfRequested(
        _ state: inout State, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        let look = try SweepLease.look(on: &connection)
        if let last = look.last { worker.report.lastSweep(at: last.endedAt.date, outcome: last.outcome) }
        guard look.isRequested, let lease = try SweepLease.claim(.requested, holder: daemonID, on: &connection) else {
            return false
        }
        try sweep(lease, &state, on: &connection)
        return true
    }

    /// - Returns: Whether the timer has fired. Then the caller sets it again.
    private func sweepIfDue(
        _ timer: SweepTimer, _ state: inout State, on connection: inout Connection
    ) throws(DatabaseError) -> Bool {
        guard let interval = worker.configuration.sweepInterval, bells.takeDue() else { return false }
        // Until the timer is set again, it remains due.
        var isSet = false
        defer { if !isSet { bells.markDue() } }
        if let lease = try SweepLease.claim(.due(interval: interval), holder: daemonID, on: &connection) {
            try sweep(lease, &state, on: &connection)
        }
        timer.schedule(in: max(try SweepLease.untilDue(interval: interval, on: &connection), .seconds(1)))
        isSet = true
        return true
    }

    private func sweep(
        _ lease: SweepLease, _ state: inout State, on connection: inout Connection
    ) throws(DatabaseError) {
        worker.report.sweeps(true)
        defer { worker.report.sweeps(false) }
        let sweep = Sweep(lease, worker.configuration.sweepPlan, lockTimeout: worker.configuration.lockTimeout)
        let report = try sweep.perform(on: &connection) { !worker.stop.isAsked }
        if !report.dryRun { warnOfRefusals(report, &state) }
        log(report)
    }

    private func warnOfRefusals(_ report: SweepReport, _ state: inout State) {
        let refused = Set(report.topics.filter(\.refused).map { "\($0.topic) (\($0.environment))" })
        if !refused.subtracting(state.refused).isEmpty {
            worker.logger.warning(
                "the sweep refused to prune, because too much is due: see `tokenkeeperd sweep --dry-run` and --force",
                metadata: [
                    "run_id": "\(report.runID)", "tokens": "\(report.refused)",
                    "topics": "\(refused.sorted().joined(separator: ", "))",
                ])
        }
        state.refused = refused
    }

    private func log(_ report: SweepReport) {
        var level: Logger.Level = report.outcome == .failed ? .error : .info
        // An hourly sweep that found nothing is not worth a line.
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
            ].merging(report.message.map { ["message": "\($0)"] } ?? [:]) { $1 })
    }
}
