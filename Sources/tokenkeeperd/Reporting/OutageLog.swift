internal import Logging
internal import Synchronization
internal import TokenLedger

/// Logs once that the database is unavailable or refuses statements, and once that it works again, however many workers notice it
/// and however often they try. A problem that comes and goes is logged at most once a minute.
final class OutageLog: Sendable {
    /// Problems that are logged as one: a lost connection with all its consequences, a lock, or a refusal by its SQLSTATE.
    private enum Outage: Hashable {
        case away
        /// The server refuses the password, the role or the database.
        case login
        /// Who holds the lock on which table. Another lock is another problem.
        case locked(String)
        case refused(String?)
        /// The schema is missing, or of another release.
        case unfit

        /// Why the daemon cannot work with PostgreSQL; nil if it can.
        var away: Away? {
            switch self {
            case .away: .connect
            case .login: .login
            case .unfit: .schema
            case .refused(let sqlState): Away(refusedWith: sqlState)
            case .locked: nil
            }
        }
        var isLock: Bool { if case .locked = self { true } else { false } }
    }

    private struct State {
        /// The problem of each worker.
        var held: [ServiceState.Part: Outage] = [:]
        /// Problems that have been logged and are not over.
        var open: Set<Outage> = []
        /// Since when something has been in the way; nil if nothing is.
        var since: ContinuousClock.Instant?
        /// The server that a worker connected to last.
        var host = ""
        var toldAt: [Outage: ContinuousClock.Instant] = [:]
    }

    private let state = Mutex(State())
    private let report: ServiceNotifier
    private let metrics: ProcessMetrics
    private let logger: Logger

    /// The time after which a problem is logged again: one that lasts, and one that comes back.
    private static let pause: (whileOpen: Duration, again: Duration) = (.seconds(600), .seconds(60))

    init(report: ServiceNotifier, metrics: ProcessMetrics, logger: Logger) {
        self.report = report
        self.metrics = metrics
        self.logger = logger
    }

    /// - Parameters:
    ///   - chore: What the worker cannot do, if it can do the rest.
    ///   - migrates: Whether the error arose while applying migrations.
    ///   - holders: The sessions that hold locks, if it is a lock.
    func lost(
        _ error: DatabaseError, _ part: ServiceState.Part, chore: String? = nil, migrates: Bool = false,
        holders: [LockHolder] = []
    ) {
        metrics.add(error)
        let (outage, words): (Outage, String) =
            switch error.remedy {
            // A function is missing: the schema was upgraded, or somebody's trigger calls a missing function. The server is available.
            case .reconnect where error.sqlState == "42883": (.refused("42883"), "PostgreSQL refuses")
            case .reconnect: (error.kind == .login ? .login : .away, Self.away)
            case .retry: (Self.locked(by: holders), Self.waiting)
            case .fixData, .fixSetup: (.refused(error.sqlState), "PostgreSQL refuses")
            }
        let who = holders.isEmpty ? "" : "; \(holders.words)"
        let what = chore.map { " to \($0)" } ?? ""
        report.inTheWay("\(words)\(what): \(error)\(who)", away: chore == nil ? outage.away : nil, of: part)
        if !isNews(outage, of: part) { return }
        var details = Self.details(holders).merging(["worker": "\(part.rawValue)", "error": "\(error)"]) { $1 }
        details["chore"] = chore.map { "\($0)" }
        switch outage {
        case .login:
            logger.error(
                "PostgreSQL refuses this login: check the password, the role and the database; trying again",
                metadata: details)
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
        case .refused, .unfit:
            logger.error("PostgreSQL refuses; trying again", metadata: details)
        }
    }

    /// The schema does not fit. The daemon looks again every few seconds.
    func unfit(_ error: SchemaError, _ part: ServiceState.Part) {
        report.inTheWay("waits for migrate: \(error)", away: .schema, of: part)
        if isNews(.unfit, of: part) { logger.critical("waits for migrate", metadata: ["error": "\(error)"]) }
    }

    /// A statement of a worker has had no answer for too long: PostgreSQL hangs, or the network drops its packets.
    func silent(_ part: ServiceState.Part, for duration: Duration) {
        if !isNews(.away, of: part, since: .now - duration) { return }
        logger.warning(
            "\(Self.away)",
            metadata: ["worker": "\(part.rawValue)", "error": "no answer for \(Self.text(duration))"])
    }

    /// Locks of other sessions block a part of a worker's work. The rest continues.
    func waits(for holders: [LockHolder], _ part: ServiceState.Part) {
        report.inTheWay("\(Self.waiting): \(holders.words)", knowsQueue: true, of: part)
        if !isNews(Self.locked(by: holders), of: part) { return }
        logger.warning(
            "\(Self.waiting)", metadata: Self.details(holders).merging(["worker": "\(part.rawValue)"]) { $1 })
    }

    /// Records the problem of a worker.
    ///
    /// - Returns: Whether to log it now.
    private func isNews(
        _ outage: Outage, of part: ServiceState.Part, since: ContinuousClock.Instant = .now
    ) -> Bool {
        state.withLock { state in
            state.held[part] = outage
            state.since = state.since ?? since
            let pause = state.open.contains(outage) ? Self.pause.whileOpen : Self.pause.again
            if let last = state.toldAt[outage], last.duration(to: .now) < pause { return false }
            // Holders come and go, so old entries are removed.
            state.toldAt = state.toldAt.filter { $0.value.duration(to: .now) < Self.pause.whileOpen }
            state.toldAt[outage] = .now
            state.open.insert(outage)
            return true
        }
    }

    private static func locked(by holders: [LockHolder]) -> Outage {
        .locked(holders.first.map { "\($0.table) \($0.pid ?? 0) \($0.prepared ?? "")" } ?? "")
    }

    /// In seconds.
    private static func text(_ duration: Duration) -> String { "\(duration.components.seconds) s" }

    private static let away = "waiting for PostgreSQL"
    private static let waiting = "waiting for a lock in PostgreSQL"

    /// The first session that holds a lock, field by field, and the others in words.
    private static func details(_ holders: [LockHolder]) -> Logger.Metadata {
        guard let first = holders.first else { return [:] }
        var details: Logger.Metadata = [
            "table": "tokenkeeper.\(first.table)", "lock": "\(first.mode)", "held": "\(first.words)",
        ]
        details["pid"] = first.pid.map { "\($0)" }
        details["prepared"] = first.prepared.map { "\($0)" }
        details["role"] = first.role.map { "\($0)" }
        details["application_name"] = first.application.map { "\($0)" }
        if holders.count > 1 { details["also"] = "\(Array(holders.dropFirst()).words)" }
        return details
    }

    /// PostgreSQL responds to a worker again. The next statement shows whether it still refuses.
    ///
    /// - Parameter host: The server, as in `db1.example.com:5432`.
    func connected(_ part: ServiceState.Part, to host: String) {
        report.connected(part)
        state.withLock { $0.host = host }
        if state.withLock({ $0.held[part]?.away?.isUnreachable ?? false }) { reached(part) }
    }

    /// A worker has made progress.
    func reached(_ part: ServiceState.Part) {
        report.inTheWay(nil, of: part)
        let (over, since, host) = state.withLock { state in
            state.held[part] = nil
            guard state.held.isEmpty else { return (Set<Outage>(), ContinuousClock.Instant?.none, "") }
            defer { (state.open, state.since) = ([], nil) }
            return (state.open, state.since, state.host)
        }
        if over.isEmpty { return }
        let lasted: Logger.Metadata = ["after": "\(Self.text(since?.duration(to: .now) ?? .zero))"]
        if over.contains(where: \.isLock) {
            logger.notice("no longer waiting for a lock in PostgreSQL", metadata: lasted)
        }
        if over.contains(.unfit) { logger.notice("the schema fits", metadata: lasted) }
        if over.contains(where: { !$0.isLock && $0 != .unfit }) {
            logger.notice("PostgreSQL is back", metadata: lasted.merging(["host": "\(host)"]) { $1 })
        }
    }
}
