internal import Logging
internal import Synchronization
internal import TokenLedger

/// Says once that the database is away and once that it is back, however many duties find out and however often they try.
final class Availability: Sendable {
    private struct State {
        var away: String?
        var toldAt = ContinuousClock.now
    }

    private let state = Mutex(State())
    private let part: Vitals.Part
    private let report: ServiceReport
    private let logger: Logger

    /// While it stays away, it is said again this often.
    private static let reminder: Duration = .seconds(600)

    init(of part: Vitals.Part, report: ServiceReport, logger: Logger) {
        self.part = part
        self.report = report
        self.logger = logger
    }

    func lost(_ error: DatabaseError) {
        let isAway = error.remedy == .reconnect
        report.inTheWay("\(isAway ? "waiting for PostgreSQL" : "PostgreSQL refuses"): \(error)", isAway: isAway, of: part)
        // One of the two speaks of the connection: the other's is to the same server.
        if isAway && part != .drain { return }
        let tell = state.withLock { state in
            let cause = error.sqlState ?? "lost"
            defer { state.away = cause }
            // What follows upon a loss (refused, starting up, …) is the same story.
            let isSameStory = state.away == cause || (state.away != nil && error.remedy == .reconnect)
            if isSameStory && state.toldAt.duration(to: .now) < Self.reminder { return false }
            state.toldAt = .now
            return true
        }
        if !tell { return }
        if error.remedy == .reconnect {
            logger.warning("waiting for PostgreSQL", metadata: ["error": "\(error)"])
        } else if error.sqlState == "42501" {
            logger.error(
                "PostgreSQL refuses: run `tokenkeeperd grants`, and GRANT tokenkeeper_daemon TO this role",
                metadata: ["error": "\(error)"])
        } else {
            logger.error("PostgreSQL refuses; trying again", metadata: ["error": "\(error)"])
        }
    }

    func reached() {
        report.inTheWay(nil, of: part)
        if state.withLock({ state in state.away.take() }) != nil {
            logger.notice("PostgreSQL is back")
        }
    }
}
