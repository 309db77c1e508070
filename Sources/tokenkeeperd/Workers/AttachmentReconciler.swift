internal import Logging
internal import TokenLedger
internal import TokenModel

/// Reconciles the attached tables on a schedule, a second at a time: in between, the sweep worker does its other work.
///
/// The first reconciliation of a table is due one interval after it was attached, so that a backfill comes first. If two daemons begin at
/// once, both do the same, which does no harm.
struct AttachmentReconciler {
    private var current: Comparison?
    /// When to look for what is due again.
    private var again = ContinuousClock.now
    /// The tables that could not be compared, and until when they are left alone.
    private var failed: [String: ContinuousClock.Instant] = [:]

    /// Planning a batch takes as long as some thousand rows.
    private static let rows = 5000
    private static let slice: Duration = .seconds(1)
    private static let lookEvery: Duration = .seconds(60)
    private static let afterFailure: Duration = .seconds(3600)

    /// Goes on with what is under way, or begins with a table that is due.
    ///
    /// - Parameter interval: Nil if daemons do not reconcile.
    /// - Returns: Whether there is more to do now.
    mutating func work(
        every interval: Duration?, on connection: inout Connection, _ logger: Logger, while goesOn: () -> Bool
    ) throws(DatabaseError) -> Bool {
        guard let interval else {
            current = nil
            return false
        }
        if current == nil {
            try begin(every: interval, on: &connection, logger)
        }
        guard var comparison = current else { return false }
        let began = ContinuousClock.now
        do {
            while goesOn(), began.duration(to: .now) < Self.slice {
                let isLast = try comparison.next(Self.rows, on: &connection)
                current = comparison
                if isLast {
                    current = nil
                    Self.log(try comparison.findings(on: &connection), of: comparison, logger)
                    return true
                }
            }
            return true
        } catch {
            current = nil
            // Without the note, it would take as long each hour, and nobody would see it.
            if error.sqlState == "57014" { try comparison.noteTimeout(on: &connection) }
            try give(up: comparison.table, because: error, logger)
            return false
        }
    }

    private mutating func begin(
        every interval: Duration, on connection: inout Connection, _ logger: Logger
    ) throws(DatabaseError) {
        let now = ContinuousClock.now
        if now < again { return }
        again = now + Self.lookEvery
        failed = failed.filter { $0.value > now }
        let due = try Comparison.due(every: interval, on: &connection)
        guard let table = due.first(where: { failed[$0] == nil }) else { return }
        do {
            current = try Comparison(of: table, isRepaired: true, on: &connection)
            // The next table follows at once.
            again = now
        } catch {
            try give(up: table, because: error, logger)
        }
    }

    /// What is wrong with one table must not keep the sweep from its work. A missing function may be one that the table's own
    /// expressions call.
    private mutating func give(
        up table: String, because error: DatabaseError, _ logger: Logger
    ) throws(DatabaseError) {
        if error.remedy == .reconnect, error.sqlState != "42883" { throw error }
        failed[table] = .now + Self.afterFailure
        logger.warning(
            "an attached table could not be reconciled", metadata: ["table": "\(table)", "error": "\(error)"])
    }

    private static func log(_ findings: [Comparison.Finding], of comparison: Comparison, _ logger: Logger) {
        let differences = findings.filter { $0.isDifference && $0.number > 0 }
        let words = differences.map { "\($0.kind) \($0.number)" }.joined(separator: ", ")
        logger.log(
            level: differences.isEmpty ? .debug : .notice, "an attached table was reconciled",
            metadata: [
                "table": "\(comparison.table)", "compared": "\(comparison.compared)",
                "differences": "\(differences.reduce(0) { $0 + $1.number })", "kinds": "\(words)",
                "source": "\(comparison.repairs ?? 0)",
            ])
    }
}
