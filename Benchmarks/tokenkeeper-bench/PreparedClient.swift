import CLibPQ
import Foundation
import LedgerTestSupport

/// A client like an application's: a warm session over the local socket, with prepared statements.
final class PreparedClient: @unchecked Sendable {  // One thread at a time.
    private let handle: OpaquePointer

    /// - Parameters:
    ///   - user: The role of the session.
    ///   - flushes: Whether each commit waits for its flush, as by default in PostgreSQL.
    init(_ database: Database, user: String = "postgres", flushes: Bool = false) throws {
        guard let handle = PQconnectdb(database.url(user: user)), PQstatus(handle) == CONNECTION_OK else {
            throw TestFailure("no connection to \(database.name)")
        }
        self.handle = handle
        // The same for both sides of each comparison: otherwise most of the time would be the flush of each commit.
        if !flushes { try check(PQexec(handle, "SET synchronous_commit = off")) }
    }

    deinit { PQfinish(handle) }

    func prepare(_ name: String, _ statement: String) throws {
        try check(PQprepare(handle, name, statement, 0, nil))
    }

    /// Runs a prepared statement.
    ///
    /// - Returns: The first column of the first row.
    @discardableResult
    func call(_ name: String, _ values: [String]) throws -> String? {
        let copies = values.map { strdup($0) }
        defer { for copy in copies { free(copy) } }
        let result = PQexecPrepared(handle, name, Int32(values.count), copies.map { UnsafePointer($0) }, nil, nil, 0)
        defer { PQclear(result) }
        let status = PQresultStatus(result)
        guard status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK else {
            throw TestFailure(String(cString: PQerrorMessage(handle)))
        }
        guard PQntuples(result) > 0, PQgetisnull(result, 0, 0) == 0 else { return nil }
        return String(cString: PQgetvalue(result, 0, 0))
    }

    /// Runs a statement that is parsed and planned for this call.
    func run(_ statement: String) throws {
        try check(PQexec(handle, statement))
    }

    private func check(_ result: OpaquePointer?) throws {
        defer { PQclear(result) }
        guard PQresultStatus(result) == PGRES_COMMAND_OK else {
            throw TestFailure(String(cString: PQerrorMessage(handle)))
        }
    }
}
