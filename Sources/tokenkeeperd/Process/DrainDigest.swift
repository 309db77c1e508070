internal import Logging
internal import TokenLedger

/// What the drain did, in at most one line of each kind a minute: the log is quiet at rest, and no flood under load.
struct DrainDigest {
    private var sum = Intake.Pass()
    private var toldAt = ContinuousClock.now
    private var refusals: (batches: Int, rows: Int, first: DatabaseError)?
    private var notTaken: DatabaseError?
    private let logger: Logger

    private static let every: Duration = .seconds(60)

    init(logger: Logger) {
        self.logger = logger
    }

    mutating func add(_ pass: Intake.Pass) {
        sum.add(pass)
        if toldAt.duration(to: .now) >= Self.every { tell() }
    }

    mutating func tell() {
        toldAt = .now
        if let refusals {
            logger.warning(
                "PostgreSQL refused results; those are in tokenkeeper.rejected_result",
                metadata: [
                    "batches": "\(refusals.batches)", "results": "\(refusals.rows)", "first_error": "\(refusals.first)",
                ])
        }
        refusals = nil
        if let notTaken {
            logger.warning(
                "a past leaf of the queue could not be read whole, and is drained in place",
                metadata: ["error": "\(notTaken)"])
        }
        notTaken = nil
        guard sum.moved else { return }
        logger.info(
            "drained",
            metadata: [
                "accepted": "\(sum.accepted)", "recorded": "\(sum.recorded)", "rejected": "\(sum.rejected)",
                "set_aside": "\(sum.putAside)", "held": "\(sum.held)",
            ])
        if sum.rejected > 0 {
            logger.warning(
                "results could not be understood; see tokenkeeper.rejected_result",
                metadata: ["results": "\(sum.rejected)"])
        }
        if !sum.sendersFaults.isEmpty {
            let reasons = sum.sendersFaults.sorted { $0.key < $1.key }.map { "\($0.key) \($0.value)" }
            logger.warning("APNs blames the sender", metadata: ["reasons": "\(reasons.joined(separator: ", "))"])
        }
        sum = Intake.Pass()
    }

    /// At once: a person should act.
    private func tell(_ turn: GuardTurn) {
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

    mutating func note(_ incident: Intake.Incident) {
        switch incident {
        case .guardTurned(let turn): tell(turn)
        case .leafNotTaken(let error): notTaken = error
        case .batchSetAside(let error):
            refusals = ((refusals?.batches ?? 0) + 1, refusals?.rows ?? 0, refusals?.first ?? error)
        case .rowRejected(let error):
            refusals = (refusals?.batches ?? 0, (refusals?.rows ?? 0) + 1, refusals?.first ?? error)
        }
    }
}
