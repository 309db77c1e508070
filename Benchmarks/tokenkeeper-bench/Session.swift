import LedgerTestSupport
import TokenLedger

/// A connection that several threads use, one at a time. Statements may take an hour.
final class Session: @unchecked Sendable {  // One thread at a time.
    private var connection: Connection

    init(_ connection: consuming Connection) {
        self.connection = connection
    }

    func run(_ script: String) throws {
        try connection.run(script, patience: .seconds(3600))
    }

    /// Runs a `COPY … FROM STDIN` in a transaction of its own.
    func copy(_ statement: String, rows: [UInt8]) throws {
        try run("BEGIN")
        _ = try connection.copy(statement, rows: rows)
        try run("COMMIT")
    }

    /// The only column of the first row.
    func text(_ script: String) throws -> String? {
        let rows = try connection.run(script, patience: .seconds(3600))
        return rows.count == 0 ? nil : try rows.at(0) { row throws(DatabaseError) in try row.read(String?.self) }
    }

    func number(_ script: String) throws -> Double {
        try text(script).flatMap(Double.init) ?? 0
    }

    /// The only column of all rows.
    func texts(_ script: String) throws -> [String] {
        try connection.run(script, patience: .seconds(3600)).values()
    }
}
