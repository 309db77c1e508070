internal import CLibPQ
internal import Glibc

/// Where the database is, in libpq's terms: a `postgresql://` URL, a `key=value` string, or nothing, and then libpq's own
/// variables and files (`PGHOST`, `PGSERVICE`, `~/.pgpass`, …) decide.
///
/// https://www.postgresql.org/docs/current/libpq-connect.html
public struct DatabaseAddress: Sendable {
    private let text: String?

    /// - Throws: What libpq has against the text; never the text itself, which may hold a password.
    public init(_ text: String?) throws(DatabaseError) {
        self.text = text
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
        defer { unsafe PQconninfoFree(options) }
        var option = unsafe options
        while let keyword = unsafe option.pointee.keyword {
            if unsafe strcmp(keyword, "password") == 0 {
                return unsafe option.pointee.val.map { unsafe String(cString: $0) }
            }
            unsafe option += 1
        }
        return nil
    }

    /// libpq's keywords and values in order: what comes later wins, so ours are defaults only.
    var parameters: [(keyword: String, value: String)] {
        var parameters = [
            ("fallback_application_name", "tokenkeeperd"),
            // A server that is gone without a word is noticed within a minute, not within hours.
            ("keepalives_idle", "30"), ("keepalives_interval", "10"), ("keepalives_count", "3"),
            ("tcp_user_timeout", "30000"),
        ]
        if unsafe getenv("PGCONNECT_TIMEOUT") == nil { parameters.append(("connect_timeout", "10")) }
        if let text { parameters.append(("dbname", text)) }
        parameters.append(("client_encoding", "UTF8"))
        return parameters
    }
}
