internal import TokenLedger

/// Why the daemon cannot work with PostgreSQL: the label `reason` of a metric.
enum Away: String, CaseIterable, Sendable {
    /// PostgreSQL refuses the password, the role or the database.
    case login
    /// The role lacks a right.
    case rights
    /// No connection can be made, or the server does not respond.
    case connect
    /// The schema is missing, or of another release.
    case schema
    /// The disk of the server is full.
    case disk

    /// Whether a connection that works ends it. Otherwise only a statement that succeeds does.
    var isUnreachable: Bool { [.login, .connect, .schema].contains(self) }

    /// - Parameter sqlState: Nil if PostgreSQL did not report the error.
    init?(refusedWith sqlState: String?) {
        switch sqlState {
        case "42501": self = .rights
        case "53100": self = .disk
        default: return nil
        }
    }
}
