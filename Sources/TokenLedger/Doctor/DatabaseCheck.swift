/// Start here: a check of `tokenkeeperd doctor` that asks the server. Each is one short read-only transaction, which locks no table of ours
/// in a way that would stop the daemon.
public struct DatabaseCheck: Sendable {
    /// What was checked, in two words.
    let subject: String
    /// The right that the check needs beyond those of `tokenkeeper_reader`; nil for none.
    let needs: String?
    let look: @Sendable (inout Connection) throws(DatabaseError) -> [Finding]

    init(
        _ subject: String, needs: String? = nil,
        _ look: @escaping @Sendable (inout Connection) throws(DatabaseError) -> [Finding]
    ) {
        self.subject = subject
        self.needs = needs
        self.look = look
    }

    private static let reading = BatchTransaction(
        mode: .snapshot, lockTimeout: .seconds(3), statementTimeout: .seconds(10), isInUTC: true)

    /// All checks, in the order of the report.
    ///
    /// - Parameter lockTimeout: The setting `drain.lock_timeout`.
    public static func all(lockTimeout: Duration) -> [DatabaseCheck] {
        [
            roles, owner, rights, searchPath, daemons, warnings, publications, slots, oldTransactions, prepared,
            autovacuum,
            deadRows,
            freezing,
        ]
            + [standby, settings(lockTimeout: lockTimeout), durability, connections]
    }

    /// Runs the check. A check that the role may not run is a finding, too.
    ///
    /// - Throws: If the connection is lost.
    public func findings(on connection: inout Connection) throws(DatabaseError) -> [Finding] {
        do {
            return try connection.transaction(Self.reading, look)
        } catch {
            switch error.sqlState {
            case "42501": return [Finding(.notChecked, subject, "needs \(needs ?? "the rights of tokenkeeper_reader")")]
            case "55P03":
                return [
                    Finding(.notChecked, subject, "another session has locked what this check reads: see the locks")
                ]
            case "57014": return [Finding(.notChecked, subject, "the server took longer than ten seconds")]
            case nil: throw error
            default: return [Finding(.notChecked, subject, "\(error)")]
            }
        }
    }

    /// One finding for each problem; if there is none, that all is well.
    static func problems(_ found: [Finding], _ subject: String, elseFine words: String) -> [Finding] {
        found.isEmpty ? [Finding(.passed, subject, words)] : found
    }
}
