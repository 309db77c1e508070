internal import Logging
internal import Synchronization
internal import TokenLedger
internal import TokenModel

/// What the drain did, on one connection or two, in at most one line of each kind a minute: the log is quiet at rest, and no flood
/// under load.
final class DrainSummary: Sendable {
    private struct State {
        var sum = Drain.Pass()
        var toldAt = ContinuousClock.now
        var refusals: (batches: Int, rows: Int, first: DatabaseError)?
        var notTaken: DatabaseError?
    }

    private let state = Mutex(State())
    private let logger: Logger

    /// The reasons that were told once. Not more: senders write what they like there.
    private let undocumented = Mutex<Set<String>>([])

    private static let every: Duration = .seconds(60)
    private static let mostReasons = 100

    init(logger: Logger) {
        self.logger = logger
    }

    func add(_ pass: Drain.Pass) {
        let isDue = state.withLock { state in
            state.sum.add(pass)
            return state.toldAt.duration(to: .now) >= Self.every
        }
        if isDue { report() }
    }

    /// Says what has come together since the last time.
    func report() {
        let told = state.withLock { state in
            defer { state = State() }
            return state
        }
        if let refusals = told.refusals {
            logger.warning(
                "PostgreSQL refused results; those are in tokenkeeper.rejected_result",
                metadata: [
                    "batches": "\(refusals.batches)", "results": "\(refusals.rows)", "first_error": "\(refusals.first)",
                ])
        }
        if let notTaken = told.notTaken {
            logger.warning(
                "a sealed partition of the queue could not be read whole, and is drained in place",
                metadata: ["error": "\(notTaken)"])
        }
        let sum = told.sum
        guard sum.moved else { return }
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

    /// At once: a person should act.
    private func report(_ turn: GuardTransition) {
        var about: Logger.Metadata = [
            "environment": "\(turn.environment)", "topic": "\(turn.topic)", "tokens": "\(turn.tokens)",
        ]
        guard turn.opened else {
            logger.notice("the mass-failure guard is closed: suspects are recorded again", metadata: about)
            return
        }
        about["active"] = turn.active.map { "\($0)" }
        about["undo"] = turn.undo.map { "\($0)" }
        logger.warning(
            "the mass-failure guard is open: suspects are held, see `tokenkeeperd held list` for what to do",
            metadata: about)
    }

    /// Warns once of each reason that Apple has not documented for a 410.
    func note(undocumented reason: String) {
        let reason = Verdict.countable(reason)
        let isNew = undocumented.withLock { known in
            known.count < Self.mostReasons && known.insert(reason).inserted
        }
        if !isNew { return }
        logger.warning(
            "a 410 has a reason that this version does not know; its token is stale like any other",
            metadata: ["reason": "\(reason)"])
    }

    func note(_ incident: Drain.Incident) {
        switch incident {
        case .guardChanged(let turn): report(turn)
        case .partitionNotRead(let error): state.withLock { $0.notTaken = error }
        case .batchSetAside(let error): note(error, batches: 1, rows: 0)
        case .rowRejected(let error): note(error, batches: 0, rows: 1)
        }
    }

    private func note(_ refusal: DatabaseError, batches: Int, rows: Int) {
        state.withLock { state in
            let known = state.refusals ?? (0, 0, refusal)
            state.refusals = (known.batches + batches, known.rows + rows, known.first)
        }
    }
}
