internal import CLibPQ
internal import FoundationEssentials
internal import Glibc
internal import TokenModel

/// Where the database is, in libpq's terms: a `postgresql://` URL, a `key=value` string, or nothing, and then libpq's own
/// variables and files (`PGHOST`, `PGSERVICE`, `~/.pgpass`, …) decide.
///
/// https://www.postgresql.org/docs/current/libpq-connect.html
public struct DatabaseAddress: Sendable, Equatable {
    private let text: String?
    /// What stands in the text itself, by libpq's keywords.
    private let explicit: [String: String]

    /// A file that holds the password and nothing else; read anew for each connection, so that it can be changed under a
    /// running daemon.
    public var passwordFile: String?

    /// - Throws: What libpq has against the text; never the text itself, which may hold a password.
    public init(_ text: String?, passwordFile: String? = nil) throws(DatabaseError) {
        self.text = text
        self.passwordFile = passwordFile
        guard let text else {
            explicit = [:]
            return
        }
        // libpq would quote parts of the text in its message: only the kind of mistake is safe to tell.
        guard let options = unsafe PQconninfoParse(text, nil) else {
            throw DatabaseError(
                sqlState: nil,
                message:
                    "not a connection string that libpq understands, expected postgresql://user@host/database or host=… dbname=…"
            )
        }
        explicit = unsafe Self.take(options)
        func isNumber(_ text: Substring) -> Bool { UInt16(text).map { $0 > 0 } ?? text.isEmpty }
        if explicit["host"]?.contains(where: { $0 == "@" || $0.isWhitespace }) == true
            || explicit["port"]?.split(separator: ",").allSatisfy(isNumber) == false
        {
            throw DatabaseError(
                sqlState: nil,
                message:
                    "not a usable host and port; in a password in a URL, @ is written %40, : %3A, / %2F, % %25"
            )
        }
        if let timeout = explicit["connect_timeout"], Int(timeout) == nil {
            throw DatabaseError(sqlState: nil, message: "not a whole number of seconds in connect_timeout")
        }
    }

    /// Whether anything says which database: without that libpq takes the one that bears the user's name.
    public var namesDatabase: Bool {
        let known = knownToLibpq
        let isInEnvironment = unsafe getenv("PGDATABASE").map { unsafe $0.pointee != 0 } ?? false
        return explicit["dbname"] != nil || isInEnvironment || known["dbname"] != known["user"]
    }

    /// The password that stands in the text, so that it can be wiped from where it does not belong.
    public var password: String? { explicit["password"] }

    /// How to connect.
    struct Attempt {
        /// libpq's keywords and values in order; what comes later wins.
        var parameters: [(keyword: String, value: String)]
        /// From the password file.
        var password: SecretBytes?
        /// The longest that it may take.
        var patience: Duration
    }

    /// - Parameter writes: Whether a standby will not do.
    /// - Throws: When the password file cannot be read.
    func attempt(writes: Bool) throws(DatabaseError) -> Attempt {
        var known = knownToLibpq
        let own = Self.ownDefaults(beside: known)
        known.merge(own) { $1 }
        var parameters = [("fallback_application_name", "tokenkeeperd")] + own
        if let text { parameters.append(("dbname", text)) }
        var password: SecretBytes?
        if let passwordFile { password = try Self.readPassword(passwordFile) }
        parameters.append(("client_encoding", "UTF8"))
        // libpq takes "any" where nothing is said. In a service file the two cannot be told apart.
        let isSaid = unsafe explicit["target_session_attrs"] != nil || getenv("PGTARGETSESSIONATTRS") != nil
        if writes, !isSaid, known["target_session_attrs"] ?? "any" == "any" {
            parameters.append(("target_session_attrs", "primary"))
        }
        return Attempt(parameters: parameters, password: password, patience: Self.patience(known))
    }

    /// libpq's timeout holds for each address of each host, and names take their time. What is too much here only delays
    /// that a hang is noticed; too little would be taken for one.
    private static func patience(_ known: [String: String]) -> Duration {
        func count(_ keyword: String) -> Int { (known[keyword] ?? "").split(separator: ",").count }
        let timeout = known["connect_timeout"].flatMap { Int($0) } ?? 0
        // A timeout of nought means none: then the kernel's.
        return .seconds(max(count("host"), count("hostaddr"), 1) * (90 + 8 * (timeout > 0 ? timeout : 130)))
    }

    /// A server that is gone without a word is noticed within a minute, not within hours; unless somebody has said otherwise.
    private static func ownDefaults(beside known: [String: String]) -> [(keyword: String, value: String)] {
        [
            ("connect_timeout", "10"), ("keepalives_idle", "30"), ("keepalives_interval", "10"),
            ("keepalives_count", "3"), ("tcp_user_timeout", "30000"),
        ].filter { known[$0.0] == nil }
    }

    /// What libpq would use, from the text, the environment and service files together. It only tells that of a
    /// connection, so one is begun to a port that cannot be: libpq refuses that before it looks for any host.
    private var knownToLibpq: [String: String] {
        unsafe Self.withCStrings((text.map { [("dbname", $0)] } ?? []) + [("port", "0")]) { keywords, values in
            let connection = unsafe PQconnectStartParams(keywords, values, 1)
            defer { unsafe PQfinish(connection) }
            guard let options = unsafe PQconninfo(connection) else { return [:] }
            return unsafe Self.take(options)
        }
    }

    /// Two arrays as libpq takes them, both ended by a null. What was copied for that is wiped afterwards.
    ///
    /// - Parameter password: It wins over one in the parameters.
    static func withCStrings<Answer>(
        _ parameters: [(keyword: String, value: String)], password: SecretBytes? = nil,
        _ use: ([UnsafePointer<CChar>?], [UnsafePointer<CChar>?]) -> Answer
    ) -> Answer {
        let keywords = unsafe parameters.map { unsafe UnsafePointer(strdup($0.keyword)) }
        let values = unsafe parameters.map { unsafe UnsafePointer(strdup($0.value)) }
        defer {
            for index in parameters.indices {
                unsafe free(UnsafeMutableRawPointer(mutating: keywords[index]))
                // A connection string may have a password in it.
                if let value = unsafe values[index] {
                    unsafe explicit_bzero(UnsafeMutablePointer(mutating: value), strlen(value))
                }
                unsafe free(UnsafeMutableRawPointer(mutating: values[index]))
            }
        }
        guard let password else { return unsafe use(keywords + [nil], values + [nil]) }
        return unsafe password.withCString { secret in
            unsafe "password".withCString { unsafe use(keywords + [$0, nil], values + [secret, nil]) }
        }
    }

    /// Copies the options that have a value, and frees them.
    private static func take(_ options: UnsafeMutablePointer<PQconninfoOption>) -> [String: String] {
        defer { unsafe PQconninfoFree(options) }
        var known: [String: String] = [:]
        var option = unsafe options
        while let keyword = unsafe option.pointee.keyword {
            if let value = unsafe option.pointee.val, unsafe value.pointee != 0 {
                unsafe known[String(cString: keyword)] = String(cString: value)
            }
            unsafe option += 1
        }
        return known
    }

    private static func readPassword(_ path: String) throws(DatabaseError) -> SecretBytes {
        guard let password = SecretBytes(contentsOf: path)?.firstLine else {
            throw DatabaseError(sqlState: nil, message: "the password file \(path) cannot be read")
        }
        if password.count == 0 || password.contains(0) {
            throw DatabaseError(sqlState: nil, message: "the password file \(path) holds no password")
        }
        return password
    }
}
