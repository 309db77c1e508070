internal import Logging
internal import Synchronization
internal import TokenLedger

/// Says once that the database is away, or refuses, and once that all is well again, however many duties find out and however often
/// they try; of what comes and goes, once a minute.
final class Availability: Sendable {
    /// What is told as one: a loss with all that follows upon it, a lock, or a refusal by its SQLSTATE.
    private enum Story: Hashable {
        case away, locked
        case refused(String?)
    }

    private struct State {
        /// What is in the way of whom.
        var held: [Vitals.Part: Story] = [:]
        /// What has been told and is not over.
        var open: Set<Story> = []
        var toldAt: [Story: ContinuousClock.Instant] = [:]
    }

    private let state = Mutex(State())
    private let report: ServiceReport
    private let logger: Logger

    /// While it stays so, and when it comes back, it is said again after this.
    private static let pause: (whileOpen: Duration, again: Duration) = (.seconds(600), .seconds(60))

    init(report: ServiceReport, logger: Logger) {
        self.report = report
        self.logger = logger
    }

    /// - Parameter migrates: Whether it came of applying migrations.
    func lost(_ error: DatabaseError, _ part: Vitals.Part, migrates: Bool = false) {
        let (story, words): (Story, String) =
            switch error.remedy {
            case .reconnect: (.away, "waiting for PostgreSQL")
            case .retry: (.locked, "waiting for a lock in PostgreSQL")
            case .fixData, .fixSetup: (.refused(error.sqlState), "PostgreSQL refuses")
            }
        report.inTheWay("\(words): \(error)", isAway: story == .away, of: part)
        let tell = state.withLock { state in
            state.held[part] = story
            let pause = state.open.contains(story) ? Self.pause.whileOpen : Self.pause.again
            if let last = state.toldAt[story], last.duration(to: .now) < pause { return false }
            state.toldAt[story] = .now
            state.open.insert(story)
            return true
        }
        if !tell { return }
        let details: Logger.Metadata = ["duty": "\(part.rawValue)", "error": "\(error)"]
        switch story {
        case .away, .locked:
            logger.warning("\(words)", metadata: details)
        case .refused("42501") where migrates:
            logger.error(
                "PostgreSQL refuses: this role cannot migrate; `tokenkeeperd migrate --help` says what it needs",
                metadata: details)
        case .refused("42501"):
            logger.error(
                "PostgreSQL refuses: this role lacks a right; see `tokenkeeperd grants`, and GRANT tokenkeeper_daemon TO it",
                metadata: details)
        case .refused:
            logger.error("PostgreSQL refuses; trying again", metadata: details)
        }
    }

    /// PostgreSQL has answered a duty again. Whether it refuses still, its work will show.
    func connected(_ part: Vitals.Part) {
        report.connected(part)
        if state.withLock({ $0.held[part] }) == .away { reached(part) }
    }

    /// A duty has got something done.
    func reached(_ part: Vitals.Part) {
        report.inTheWay(nil, of: part)
        let isOver = state.withLock { state in
            state.held[part] = nil
            guard state.held.isEmpty, !state.open.isEmpty else { return false }
            state.open = []
            return true
        }
        if isOver { logger.notice("PostgreSQL is back") }
    }
}
