internal import Logging
internal import Synchronization
internal import TokenLedger

/// Says once that the database is away, or refuses, and once that all is well again, however many duties find out and however often
/// they try.
final class Availability: Sendable {
    private struct State {
        /// Those that something is in the way of.
        var held: Set<Vitals.Part> = []
        /// What has been told of it, by SQLSTATE or as a loss, and when.
        var told: [String: ContinuousClock.Instant] = [:]
    }

    private let state = Mutex(State())
    private let report: ServiceReport
    private let logger: Logger

    /// While it stays so, it is said again this often.
    private static let reminder: Duration = .seconds(600)

    init(report: ServiceReport, logger: Logger) {
        self.report = report
        self.logger = logger
    }

    func lost(_ error: DatabaseError, _ part: Vitals.Part) {
        let isAway = error.remedy == .reconnect
        report.inTheWay(
            "\(isAway ? "waiting for PostgreSQL" : "PostgreSQL refuses"): \(error)", isAway: isAway, of: part)
        let tell = state.withLock { state in
            state.held.insert(part)
            // What follows upon a loss (refused, starting up, …) is the same story.
            let story = isAway ? "away" : error.sqlState ?? ""
            if let last = state.told[story], last.duration(to: .now) < Self.reminder { return false }
            state.told[story] = .now
            return true
        }
        if !tell { return }
        let details: Logger.Metadata = ["duty": "\(part.rawValue)", "error": "\(error)"]
        if isAway {
            logger.warning("waiting for PostgreSQL", metadata: details)
        } else if error.sqlState == "42501" {
            logger.error(
                "PostgreSQL refuses: this role lacks a right; see `tokenkeeperd grants`, and GRANT tokenkeeper_daemon TO it",
                metadata: details)
        } else {
            logger.error("PostgreSQL refuses; trying again", metadata: details)
        }
    }

    func reached(_ part: Vitals.Part) {
        report.inTheWay(nil, of: part)
        let isOver = state.withLock { state in
            state.held.remove(part)
            guard state.held.isEmpty, !state.told.isEmpty else { return false }
            state.told = [:]
            return true
        }
        if isOver { logger.notice("PostgreSQL is back") }
    }
}
