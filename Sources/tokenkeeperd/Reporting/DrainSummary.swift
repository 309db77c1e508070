internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// Summarizes what the drain did, on one connection or two, in at most one log line of each kind per minute: the log is quiet at rest,
/// and not flooded under load.
final class DrainSummary: Sendable {
    private struct State {
        var sum = Drain.Pass()
        var loggedAt = ContinuousClock.now
        var refusals: [QueueName: (batches: Int, rows: Int, first: DatabaseError)] = [:]
        var bulkReadFailure: DatabaseError?
    }

    private let state = Mutex(State())
    private let metrics: ProcessMetrics
    private let logger: Logger

    /// What both connections are done with since it was last taken, batch by batch: a pass may be long.
    private let settled = Mutex((results: 0, registrations: 0))

    /// The undocumented reasons already warned of; a bounded set, because senders may write anything.
    private let undocumented = Mutex<Set<String>>([])

    private static let every: Duration = .seconds(60)
    private static let maxReasons = 100

    init(metrics: ProcessMetrics, logger: Logger) {
        self.metrics = metrics
        self.logger = logger
    }

    func add(_ pass: Drain.Pass) {
        metrics.add(pass)
        let isDue = state.withLock { state in
            state.sum.add(pass)
            return state.loggedAt.duration(to: .now) >= Self.every
        }
        if isDue { report() }
    }

    /// Takes what a pass has done since it had done less.
    func settled(_ soFar: Drain.Pass, since before: Drain.Pass) {
        settled.withLock {
            $0.results += soFar.settledResults - before.settledResults
            $0.registrations += soFar.registrations.settled - before.registrations.settled
        }
    }

    /// How many results and registrations both connections are done with since the last call.
    func takeSettled() -> (results: Int, registrations: Int) {
        settled.withLock { settled in
            defer { settled = (0, 0) }
            return settled
        }
    }

    /// Logs what has accumulated since the last call.
    func report() {
        let state = state.withLock { state in
            defer { state = State() }
            return state
        }
        logFailures(state)
        let sum = state.sum
        // What has moved is not only registrations.
        if sum.taken + sum.bulkReads > sum.registrations.taken { log(sum) }
        if sum.registrations.taken > 0 { log(sum.registrations) }
    }

    private func logFailures(_ state: State) {
        if let refusals = state.refusals[.results] {
            logger.warning(
                "PostgreSQL refuses results; they wait, and each is tried again alone",
                metadata: [
                    "batches": "\(refusals.batches)", "results": "\(refusals.rows)", "first_error": "\(refusals.first)",
                ])
        }
        if let refusals = state.refusals[.registrations] {
            logger.warning(
                "PostgreSQL refuses registrations; they wait, and each is tried again alone",
                metadata: [
                    "batches": "\(refusals.batches)", "registrations": "\(refusals.rows)",
                    "first_error": "\(refusals.first)",
                ])
        }
        if let error = state.bulkReadFailure {
            logger.warning(
                "a partition of the queue could not be read in bulk and is drained in batches",
                metadata: ["error": "\(error)"])
        }
    }

    private func log(_ sum: Drain.Pass) {
        logger.info(
            "drained",
            metadata: [
                "accepted": "\(sum.accepted)", "recorded": "\(sum.recorded)", "rejected": "\(sum.rejected)",
                "set_aside": "\(sum.putBack)", "held": "\(sum.held)",
            ])
        if sum.rejected > 0 {
            logger.warning(
                "results could not be understood; see tokenkeeper.rejected_result",
                metadata: ["results": "\(sum.rejected)"])
        }
        if sum.notKept > 0 {
            logger.warning(
                "rejected results were counted but not kept: more than drain.rejected_per_hour",
                metadata: ["results": "\(sum.notKept)"])
        }
        if !sum.sendersFaults.isEmpty {
            let reasons = sum.sendersFaults.sorted { $0.key < $1.key }.map { "\($0.key) \($0.value)" }
            logger.warning("APNs blames the sender", metadata: ["reasons": "\(reasons.joined(separator: ", "))"])
        }
    }

    private func log(_ sum: Drain.Pass.Registrations) {
        logger.info(
            "applied registrations",
            metadata: [
                "applied": "\(sum.applied)", "rejected": "\(sum.rejected)", "set_aside": "\(sum.putBack)",
                "held": "\(sum.held)",
            ])
        if sum.rejected > 0 {
            logger.warning(
                "registrations could not be understood; see tokenkeeper.rejected_registration",
                metadata: ["registrations": "\(sum.rejected)"])
        }
        if sum.notKept > 0 {
            logger.warning(
                "rejected registrations were counted but not kept: more than drain.rejected_per_hour",
                metadata: ["registrations": "\(sum.notKept)"])
        }
    }

    /// Warns once about each reason that Apple has not documented for a 410.
    func note(undocumented reason: String) {
        let reason = Verdict.countable(reason)
        let isNew = undocumented.withLock { known in
            known.count < Self.maxReasons && known.insert(reason).inserted
        }
        if !isNew { return }
        logger.warning(
            "a 410 has a reason that this version does not know; its token is stale like any other",
            metadata: ["reason": "\(reason)"])
    }

    func note(_ incident: Drain.Incident) {
        switch incident {
        case .committed(let counts, let duration): metrics.add(counts, took: duration)
        case .guardChanged(let transition): GuardLog(logger).note(transition)
        case .bulkReadFailed(let error): state.withLock { $0.bulkReadFailure = error }
        case .batchSetAside(let queue, let error): note(error, of: queue, batches: 1, rows: 0)
        case .rowRefused(let queue, let error): note(error, of: queue, batches: 0, rows: 1)
        }
    }

    /// Counts batches and rows that PostgreSQL refused.
    private func note(_ refusal: DatabaseError, of queue: QueueName, batches: Int, rows: Int) {
        state.withLock { state in
            let known = state.refusals[queue] ?? (0, 0, refusal)
            state.refusals[queue] = (known.batches + batches, known.rows + rows, known.first)
        }
    }
}
