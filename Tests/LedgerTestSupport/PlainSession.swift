import CLibPQ
import Foundation

/// A session that shares no code with the daemon's connections.
final class PlainSession {
    private let handle: OpaquePointer

    init(_ url: String) throws {
        guard let handle = PQconnectdb(url) else { throw TestFailure("out of memory") }
        guard PQstatus(handle) == CONNECTION_OK else {
            defer { PQfinish(handle) }
            throw TestFailure(String(cString: PQerrorMessage(handle)))
        }
        PQsetNoticeProcessor(handle, { _, _ in }, nil)
        self.handle = handle
    }

    deinit { PQfinish(handle) }

    /// Whether the server has closed the connection or is about to: an idle session has nothing to read.
    var isLost: Bool {
        var watched = pollfd(fd: PQsocket(handle), events: Int16(POLLIN), revents: 0)
        return PQstatus(handle) != CONNECTION_OK || poll(&watched, 1, 0) != 0
    }

    /// All rows of all statements, one line per row: columns joined by `|`, null as an empty text.
    func run(_ sql: String) throws -> String {
        guard PQsendQuery(handle, sql) == 1 else { throw TestFailure(String(cString: PQerrorMessage(handle))) }
        var lines: [String] = []
        var failure: TestFailure?
        while let result = PQgetResult(handle) {
            defer { PQclear(result) }
            switch PQresultStatus(result) {
            case PGRES_TUPLES_OK:
                let columns = 0..<PQnfields(result)
                for row in 0..<PQntuples(result) {
                    lines.append(columns.map { String(cString: PQgetvalue(result, row, $0)) }.joined(separator: "|"))
                }
            case PGRES_COMMAND_OK: break
            default: failure = failure ?? TestFailure(String(cString: PQresultErrorMessage(result)))
            }
        }
        if let failure { throw failure }
        return lines.joined(separator: "\n").trimmingCharacters(in: .newlines)
    }

    /// Resets everything that a statement may have changed in the session.
    ///
    /// - Returns: False if that is not possible, such as in an open transaction.
    func reset() -> Bool { (try? run("DISCARD ALL")) != nil }
}

/// Sessions that can be reused. As many are open as were ever needed at once.
public final class IdleSessions: @unchecked Sendable {  // Behind the lock; a taken session has one user.
    private let lock = NSLock()
    private var idle: [String: [PlainSession]] = [:]

    public init() {}

    /// A statement that fails ends its session.
    @discardableResult
    public func run(_ sql: String, user: String, url: String) throws -> String {
        var taken = lock.withLock { idle[user]?.popLast() }
        if taken?.isLost == true { taken = nil }
        let session = try taken ?? PlainSession(url)
        let output = try session.run(sql)
        if session.reset() { lock.withLock { idle[user, default: []].append(session) } }
        return output
    }
}
