internal import Logging
internal import Synchronization
internal import TokenLedger

/// Says once that the database is away, or refuses, and once that all is well again, however many workers find out and however often
/// they try; of what comes and goes, once a minute.
final class OutageLog: Sendable {
    /// What is told as one: a loss with all that follows upon it, a lock, or a refusal by its SQLSTATE.
    private enum Outage: Hashable {
        case away
        /// By whose lock on what: another one is another story.
        case locked(String)
        case refused(String?)

        var isLock: Bool { if case .locked = self { true } else { false } }
    }

    private struct State {
        /// What is in the way of whom.
        var held: [ServiceState.Part: Outage] = [:]
        /// What has been told and is not over.
        var open: Set<Outage> = []
        var toldAt: [Outage: ContinuousClock.Instant] = [:]
    }

    private let state = Mutex(State())
    private let report: ServiceNotifier
    private let logger: Logger

    /// While it stays so, and when it comes back, it is said again after this.
    private static let pause: (whileOpen: Duration, again: Duration) = (.seconds(600), .seconds(60))

    init(report: ServiceNotifier, logger: Logger) {
        self.report = report
        self.logger = logger
    }

    /// - Parameters:
    ///   - migrates: Whether it came of applying migrations.
    ///   - holders: Who holds locks, where it is a lock.
    func lost(
        _ error: DatabaseError, _ part: ServiceState.Part, migrates: Bool = false, holders: [LockHolder] = []
    ) {
        let (history, words): (Outage, String) =
            switch error.remedy {
            case .reconnect: (.away, "waiting for PostgreSQL")
            case .retry: (Self.locked(by: holders), Self.waiting)
            case .fixData, .fixSetup: (.refused(error.sqlState), "PostgreSQL refuses")
            }
        let who = holders.isEmpty ? "" : "; \(holders.words)"
        report.inTheWay("\(words): \(error)\(who)", isAway: history == .away, of: part)
        if !isNews(history, of: part) { return }
        let details = Self.details(holders).merging(["worker": "\(part.rawValue)", "error": "\(error)"]) { $1 }
        switch history {
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

    /// Locks of other sessions keep a worker from a part of its work. The rest goes on.
    func waits(for holders: [LockHolder], _ part: ServiceState.Part) {
        report.inTheWay("\(Self.waiting): \(holders.words)", knowsQueue: true, of: part)
        if !isNews(Self.locked(by: holders), of: part) { return }
        logger.warning(
            "\(Self.waiting)", metadata: Self.details(holders).merging(["worker": "\(part.rawValue)"]) { $1 })
    }

    /// Notes what is in the way of a worker, and whether that is to be told now.
    private func isNews(_ history: Outage, of part: ServiceState.Part) -> Bool {
        state.withLock { state in
            state.held[part] = history
            let pause = state.open.contains(history) ? Self.pause.whileOpen : Self.pause.again
            if let last = state.toldAt[history], last.duration(to: .now) < pause { return false }
            // Holders come and go: what was told long ago is forgotten.
            state.toldAt = state.toldAt.filter { $0.value.duration(to: .now) < Self.pause.whileOpen }
            state.toldAt[history] = .now
            state.open.insert(history)
            return true
        }
    }

    private static func locked(by holders: [LockHolder]) -> Outage {
        .locked(holders.first.map { "\($0.table) \($0.pid ?? 0)" } ?? "")
    }

    private static let waiting = "waiting for a lock in PostgreSQL"

    /// The first of those that hold locks, column by column, and in words the others.
    private static func details(_ holders: [LockHolder]) -> Logger.Metadata {
        guard let first = holders.first else { return [:] }
        var details: Logger.Metadata = [
            "table": "tokenkeeper.\(first.table)", "lock": "\(first.mode)", "held": "\(first.words)",
        ]
        details["pid"] = first.pid.map { "\($0)" }
        details["role"] = first.role.map { "\($0)" }
        details["application_name"] = first.application.map { "\($0)" }
        if holders.count > 1 { details["also"] = "\(Array(holders.dropFirst()).words)" }
        return details
    }

    /// PostgreSQL has answered a worker again. Whether it refuses still, its work will show.
    func connected(_ part: ServiceState.Part) {
        report.connected(part)
        if state.withLock({ $0.held[part] }) == .away { reached(part) }
    }

    /// A worker has got something done.
    func reached(_ part: ServiceState.Part) {
        report.inTheWay(nil, of: part)
        let over = state.withLock { state -> Set<Outage> in
            state.held[part] = nil
            guard state.held.isEmpty else { return [] }
            defer { state.open = [] }
            return state.open
        }
        if over.contains(where: \.isLock) { logger.notice("no longer waiting for a lock in PostgreSQL") }
        if over.contains(where: { !$0.isLock }) { logger.notice("PostgreSQL is back") }
    }
}
