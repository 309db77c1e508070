/// An error of the database, or on the way to it. It says what to do about it.
public struct DatabaseError: Error, Equatable {
    /// Where the error arose.
    public enum Kind: Equatable, Sendable {
        /// The server reported it, with the five characters of the SQLSTATE:
        /// https://www.postgresql.org/docs/current/errcodes-appendix.html
        case server(sqlState: String)
        /// The server refuses the password, the role or the database.
        case login
        /// No connection could be made, or the server stopped responding, or the connection was lost.
        case connection
        /// The connection string or the password file cannot be used.
        case configuration
        /// The server returned other rows or values than the code expects: a programming error, or a schema of another release.
        case unexpectedRow
    }

    /// What helps.
    public enum Remedy: Equatable, Sendable {
        /// The connection is lost, or leads to a server that cannot write, or a function is missing because the schema has been
        /// upgraded since it was checked, perhaps. Make a new connection, which checks the schema.
        case reconnect
        /// Another session was in the way (a lock, a deadlock, a timeout): the same statement may succeed later.
        case retry
        /// The data of this statement is at fault: the same statement would fail again.
        case fixData
        /// A person has to act: privileges, disk space, a missing object. Worth another try after a pause.
        case fixSetup
    }

    public let kind: Kind
    /// The primary message, in one line. Without the detail, which may show a token, except for 2BP01, whose detail names the objects that
    /// depend on the object to be dropped.
    public let message: String
    /// What the server advises, in one line; nil if it gave no advice.
    public private(set) var hint: String?

    /// Whether the server refuses any data, whatever it says: a person has to act.
    private var isOfSetup = false

    /// The same error, as one that any data meets.
    var ofSetup: Self {
        var error = self
        error.isOfSetup = true
        return error
    }

    public init(_ kind: Kind, _ message: String) {
        self.kind = kind
        self.message = message
    }

    /// - Parameter sqlState: Nil for an error of the connection.
    public init(sqlState: String?, message: String) {
        self.init(sqlState.map { .server(sqlState: $0) } ?? .connection, message)
    }

    /// - Parameters:
    ///   - detail: The server's, in one line; nil if it gave none.
    ///   - hint: In the same way.
    init(reported sqlState: String, _ message: String, detail: String?, hint: String? = nil) {
        let shown = sqlState == "2BP01" ? [message, detail].compactMap(\.self).joined(separator: ": ") : message
        self.init(.server(sqlState: sqlState), shown)
        self.hint = hint
    }

    /// Nil unless the server reported the error.
    public var sqlState: String? {
        if case .server(let sqlState) = kind { sqlState } else { nil }
    }

    public var remedy: Remedy {
        if isOfSetup { return .fixSetup }
        return switch kind {
        // An internal error: an object went away in the middle of a statement ("cache lookup failed for function …" during a migration), and no
        // row is to blame. But a row may be too large for PostgreSQL. PostgreSQL never translates these messages.
        case .server("XX000"): message.contains("memory alloc request size") ? .fixData : .fixSetup
        case .server(let sqlState): Self.remedy(for: sqlState)
        // The password file is read for each connection: once it is fixed, the next attempt succeeds.
        case .login, .connection, .configuration: .reconnect
        case .unexpectedRow: .fixSetup
        }
    }

    /// An attempt to connect has failed. libpq has no SQLSTATE for that, and the server words its message in the language of its
    /// `lc_messages`: in another language than English, the kind is `connection`.
    init(connecting message: String) {
        let isLogin = [
            "authentication failed for user", "no password supplied", "no pg_hba.conf entry", "pg_hba.conf rejects",
            "is not permitted to log in",
        ].contains { message.contains($0) }
        let isMissing =
            ["role \"", "database \""].contains { message.contains($0) } && message.contains("\" does not exist")
        self.init(isLogin || isMissing ? .login : .connection, message)
    }

    private static func remedy(for sqlState: String) -> Remedy {
        switch sqlState {
        case "57P01", "57P02", "57P03", "57P05", "25006", "25P03", "42883": return .reconnect
        case "55P03", "40001", "40P01", "57014": return .retry
        case "54000": return .fixData
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
