internal import CLibPQ
internal import FoundationEssentials
internal import Glibc
internal import TokenModel

/// Where the database is, in libpq's terms: a `postgresql://` URL or a `key=value` string. Without either, libpq's own variables
/// and files (`PGHOST`, `PGSERVICE`, `~/.pgpass`, …) decide.
///
/// https://www.postgresql.org/docs/current/libpq-connect.html
public struct DatabaseAddress: Sendable, Equatable {
    private let text: String?
    private let explicit: [String: String]

    /// A file that holds the password and nothing else. It is read for each connection, so it can change while the daemon runs.
    public var passwordFile: String?

    /// - Throws: What is wrong with the text; never the text itself, which may contain a password.
    public init(_ text: String?, passwordFile: String? = nil) throws(DatabaseError) {
        self.text = text
        self.passwordFile = passwordFile
        guard let text else {
            explicit = [:]
            return
        }
        // libpq's message would quote parts of the text: only the kind of mistake is safe to report.
        guard let options = unsafe PQconninfoParse(text, nil) else {
            throw DatabaseError(
                .configuration,
                "not a connection string that libpq understands, expected postgresql://user@host/database or host=… dbname=…"
            )
        }
        explicit = unsafe Self.take(options)
        func isNumber(_ text: Substring) -> Bool { UInt16(text).map { $0 > 0 } ?? text.isEmpty }
        if explicit["host"]?.contains(where: { $0 == "@" || $0.isWhitespace }) == true
            || explicit["port"]?.split(separator: ",").allSatisfy(isNumber) == false
        {
            throw DatabaseError(
                .configuration,
                "not a usable host and port; in a password in a URL, @ is written %40, : %3A, / %2F, % %25")
        }
        if let timeout = explicit["connect_timeout"], Int(timeout) == nil {
            throw DatabaseError(.configuration, "not a whole number of seconds in connect_timeout")
        }
    }

    /// Whether the database is named anywhere. Otherwise libpq takes the database with the user's name.
    public var namesDatabase: Bool {
        let known = knownToLibpq
        let isInEnvironment = unsafe getenv("PGDATABASE").map { unsafe $0.pointee != 0 } ?? false
        return explicit["dbname"] != nil || isInEnvironment || known["dbname"] != known["user"]
    }

    /// Whether anybody has said anything about where the database is: in the text, or in libpq's variables and files.
    public var isGiven: Bool {
        let variables = ["PGHOST", "PGHOSTADDR", "PGPORT", "PGUSER", "PGSERVICE"]
        return text != nil || namesDatabase
            || variables.contains { unsafe getenv($0).map { unsafe $0.pointee != 0 } ?? false }
    }

    /// The options in the text itself, by libpq's keywords.
    var options: [String: String] { explicit }

    /// The password in the text, so that the process list can be wiped of it.
    public var password: String? { explicit["password"] }

    /// How to connect.
    struct Attempt {
        /// libpq's keywords and values in order; later ones win.
        var parameters: [(keyword: String, value: String)]
        /// From the password file.
        var password: SecretBytes?
        /// How long the attempt may take.
        var patience: Duration
    }

    /// - Parameters:
    ///   - writes: Whether the primary is needed.
    ///   - isUrgent: Whether somebody waits: then each host has two seconds to answer, the shortest time of libpq.
    /// - Throws: If the password file cannot be read.
    func attempt(writes: Bool, isUrgent: Bool = false) throws(DatabaseError) -> Attempt {
        var known = knownToLibpq
        let own = Self.ownDefaults(without: known)
        known.merge(own) { $1 }
        var parameters = [("fallback_application_name", "tokenkeeperd")] + own
        if let text { parameters.append(("dbname", text)) }
        var password: SecretBytes?
        if let passwordFile { password = try Self.readPassword(passwordFile) }
        parameters.append(("client_encoding", "UTF8"))
        if isUrgent { parameters.append(("connect_timeout", "2")) }
        // libpq's default is "any". In a service file, "any" and the default cannot be told apart.
        let isSaid = unsafe explicit["target_session_attrs"] != nil || getenv("PGTARGETSESSIONATTRS") != nil
        if writes, !isSaid, known["target_session_attrs"] ?? "any" == "any" {
            parameters.append(("target_session_attrs", "primary"))
        }
        return Attempt(parameters: parameters, password: password, patience: Self.patience(known))
    }

    /// libpq's timeout applies to each address of each host, and name lookups add to it. Too long a time only delays the
    /// detection of a hang; too short a time reports a hang where there is none.
    private static func patience(_ known: [String: String]) -> Duration {
        func count(_ keyword: String) -> Int { (known[keyword] ?? "").split(separator: ",").count }
        let timeout = known["connect_timeout"].flatMap { Int($0) } ?? 0
        // A timeout of 0 means none: then the kernel's limit applies.
        return .seconds(max(count("host"), count("hostaddr"), 1) * (90 + 8 * (timeout > 0 ? timeout : 130)))
    }

    /// A server that disappears without closing its connections is noticed within a minute, not within hours. Explicit settings win.
    private static func ownDefaults(without known: [String: String]) -> [(keyword: String, value: String)] {
        [
            ("connect_timeout", "10"), ("keepalives_idle", "30"), ("keepalives_interval", "10"),
            ("keepalives_count", "3"), ("tcp_user_timeout", "30000"),
        ].filter { known[$0.0] == nil }
    }

    /// What libpq would use, from the text, the environment and service files together. libpq reveals this only for a connection,
    /// so this starts one to an impossible port: libpq refuses the port before it looks up any host.
    private var knownToLibpq: [String: String] {
        unsafe Self.withCStrings((text.map { [("dbname", $0)] } ?? []) + [("port", "0")]) { keywords, values in
            let connection = unsafe PQconnectStartParams(keywords, values, 1)
            defer { unsafe PQfinish(connection) }
            guard let options = unsafe PQconninfo(connection) else { return [:] }
            return unsafe Self.take(options)
        }
    }

    /// Passes two null-terminated arrays, as libpq takes them. The copies are wiped afterwards.
    ///
    /// - Parameter password: Overrides a password in the parameters.
    static func withCStrings<Answer>(
        _ parameters: [(keyword: String, value: String)], password: SecretBytes? = nil,
        _ use: ([UnsafePointer<CChar>?], [UnsafePointer<CChar>?]) -> Answer
    ) -> Answer {
        let keywords = unsafe parameters.map { unsafe UnsafePointer(strdup($0.keyword)) }
        let values = unsafe parameters.map { unsafe UnsafePointer(strdup($0.value)) }
        defer {
            for index in parameters.indices {
                unsafe free(UnsafeMutableRawPointer(mutating: keywords[index]))
                // A connection string may contain a password.
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

    /// Copies the options that have a value, and frees all.
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
        let password: SecretBytes
        do {
            password = try SecretBytes(contentsOf: path).firstLine
        } catch {
            throw DatabaseError(.configuration, "the password file \(path) cannot be read: \(error)")
        }
        if password.count == 0 || password.contains(0) {
            throw DatabaseError(.configuration, "the password file \(path) holds no password")
        }
        return password
    }
}
