internal import Logging
internal import TokenLedger

/// Logs at once when a mass-failure guard trips or resets, because a person should act.
struct GuardLog: Sendable {
    private let logger: Logger

    init(_ logger: Logger) { self.logger = logger }

    func note(_ transition: GuardTransition) {
        var about: Logger.Metadata = [
            "environment": "\(transition.environment)", "topic": "\(transition.topic)",
            "tokens": "\(transition.tokens)",
        ]
        guard transition.tripped else { return noteReset(of: transition.cause, about) }
        about["active"] = transition.active.map { "\($0)" }
        about["undo"] = transition.undo.map { "\($0)" }
        switch transition.cause {
        case .suspect:
            logger.warning(
                "the mass-failure guard has tripped: suspects are held; see `tokenkeeperd held list` for what to do",
                metadata: about)
        case .stale:
            logger.warning(
                "the mass-failure guard has tripped: 410s are held; see `tokenkeeperd held list` for what to do",
                metadata: about)
        case .unregisteredByApp:
            logger.warning(
                "the mass-failure guard has tripped: logouts are held; see `tokenkeeperd held list` for what to do",
                metadata: about)
        }
    }

    func noteReset(of cause: GuardTransition.Cause, _ about: Logger.Metadata) {
        switch cause {
        case .suspect:
            logger.notice("the mass-failure guard has reset: suspects are recorded again", metadata: about)
        case .stale:
            logger.notice("the mass-failure guard has reset: 410s are recorded again", metadata: about)
        case .unregisteredByApp:
            logger.notice("the mass-failure guard has reset: logouts are recorded again", metadata: about)
        }
    }
}
