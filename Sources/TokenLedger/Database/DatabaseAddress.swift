internal import CLibPQ
internal import FoundationEssentials
internal import Glibc

/// Where the database is, in libpq's terms: a `postgresql://` URL, a `key=value` string, or nothing, and then libpq's own
/// variables and files (`PGHOST`, `PGSERVICE`, `~/.pgpass`, …) decide.
///
/// https://www.postgresql.org/docs/current/libpq-connect.html
public struct DatabaseAddress: Sendable, Equatable {
    private let text: String?
    private let passwordFile: String?

    /// - Parameter passwordFile: A file that holds the password and nothing else; read anew for each connection, so that
    ///   it can be changed under a running daemon.
    /// - Throws: What libpq has against the text; never the text itself, which may hold a password.
    public init(_ text: String?, passwordFile: String? = nil) throws(DatabaseError) {
        self.text = text
        self.passwordFile = passwordFile
        guard let text else { return }
        var complaint: UnsafeMutablePointer<CChar>?
        let options = unsafe PQconninfoParse(text, &complaint)
        defer {
            unsafe PQconninfoFree(options)
            unsafe PQfreemem(complaint)
        }
        if unsafe options == nil {
            // libpq quotes parts of the text in its message: only the kind of mistake is safe to tell.
            throw DatabaseError(
                sqlState: nil,
                message:
                    "not a connection string that libpq understands, expected postgresql://user@host/database or host=… dbname=…"
            )
        }
    }

    /// The password that stands in the text, so that it can be wiped from where it does not belong.
    public var password: String? {
        guard let text, let options = unsafe PQconninfoParse(text, nil) else { return nil }
        return unsafe Self.take(options)["password"]
    }

    /// The longest that one attempt to connect may take: libpq's timeout, for each host and each of its (two, say)
    /// addresses, and a minute for names to be looked up.
    var patience: Duration {
        let known = knownToLibpq
        let hosts = (known["host"] ?? "").split(separator: ",").count
        let timeout = Self.ownDefaults(beside: known).first { $0.keyword == "connect_timeout" }?.value
        let seconds = Int(timeout ?? known["connect_timeout"] ?? "") ?? 0
        // A timeout of nought means none: then the kernel's.
        return .seconds(60 + 2 * max(hosts, 1) * (seconds > 0 ? seconds : 130))
    }

    /// libpq's keywords and values in order; what comes later wins.
    ///
    /// - Parameter writes: Whether a standby will not do.
    /// - Throws: When the password file cannot be read.
    func parameters(writes: Bool) throws(DatabaseError) -> [(keyword: String, value: String)] {
        let known = knownToLibpq
        var parameters = [("fallback_application_name", "tokenkeeperd")] + Self.ownDefaults(beside: known)
        if let text { parameters.append(("dbname", text)) }
        if let passwordFile { parameters.append(("password", try Self.readPassword(passwordFile))) }
        parameters.append(("client_encoding", "UTF8"))
        if writes, known["target_session_attrs"] ?? "any" == "any" {
            parameters.append(("target_session_attrs", "primary"))
        }
        return parameters
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

    /// Two arrays as libpq takes them, both ended by a null.
    static func withCStrings<Answer>(
        _ parameters: [(keyword: String, value: String)],
        _ use: ([UnsafePointer<CChar>?], [UnsafePointer<CChar>?]) -> Answer
    ) -> Answer {
        let keywords = unsafe parameters.map { unsafe UnsafePointer(strdup($0.keyword)) }
        let values = unsafe parameters.map { unsafe UnsafePointer(strdup($0.value)) }
        defer {
            for index in parameters.indices {
                unsafe free(UnsafeMutableRawPointer(mutating: keywords[index]))
                unsafe free(UnsafeMutableRawPointer(mutating: values[index]))
            }
        }
        return unsafe use(keywords + [nil], values + [nil])
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

    private static func readPassword(_ path: String) throws(DatabaseError) -> String {
        guard let bytes = try? Data(contentsOf: URL(filePath: path)),
            let text = String(validating: bytes, as: UTF8.self)
        else { throw DatabaseError(sqlState: nil, message: "the password file \(path) cannot be read") }
        let password = text.prefix { !$0.isNewline }
        if password.isEmpty { throw DatabaseError(sqlState: nil, message: "the password file \(path) is empty") }
        return String(password)
    }
}
