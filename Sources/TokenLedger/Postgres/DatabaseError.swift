/// Something the database, or the way to it, refused. It says what to do about it.
///
/// SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
public struct DatabaseError: Error, Equatable {
    /// What helps.
    public enum Remedy: Equatable, Sendable {
        /// The connection is gone, or leads to a server that cannot write; or the schema has moved on since it was checked (a function is
        /// missing): make a new one, which checks the schema.
        case reconnect
        /// Somebody else was in the way (a lock, a deadlock, a timeout): the same again later may succeed.
        case retry
        /// The data of this very statement is at fault: the same again fails again.
        case fixData
        /// A person has to act: privileges, disk space, a missing object. Worth another try after a pause.
        case fixSetup
    }

    /// The five characters of the SQL standard, or nil when the error arose on this side of the wire.
    public let sqlState: String?
    /// The primary message, in one line. Never the detail, which may show a token; except for 2BP01, whose detail names the objects that
    /// depend on one that was to be dropped.
    public let message: String

    public init(sqlState: String?, message: String) {
        self.sqlState = sqlState
        self.message = message
    }

    public var remedy: Remedy {
        guard let sqlState else { return .reconnect }
        switch sqlState {
        case "57P01", "57P02", "57P03", "57P05", "25006", "25P03", "42883": return .reconnect
        case "55P03", "40001", "40P01", "57014": return .retry
        case "54000", "XX000": return .fixData
        default: break
        }
        switch sqlState.prefix(2) {
        case "08": return .reconnect
        case "21", "22", "23", "P0": return .fixData
        default: return .fixSetup
        }
    }
}

extension DatabaseError: CustomStringConvertible {
    public var description: String {
        sqlState.map { "\(message) (SQLSTATE \($0))" } ?? message
    }
}
