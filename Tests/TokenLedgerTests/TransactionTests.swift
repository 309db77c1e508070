import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Transactions` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let settings = """
        SELECT current_setting('transaction_isolation') || ' ' || current_setting('transaction_read_only'),
               current_setting('lock_timeout'), current_setting('statement_timeout'), current_setting('timezone'),
               current_setting('synchronous_commit')
        """

    @Test(arguments: [
        (BatchTransaction(lockTimeout: .milliseconds(100)), "read committed off|100ms|1min|Asia/Tokyo|off"),
        (
            BatchTransaction(mode: .snapshot, lockTimeout: .seconds(5), statementTimeout: .seconds(30), isInUTC: true),
            "repeatable read on|5s|30s|UTC|off"
        ),
        (BatchTransaction.command, "read committed off|1min|2h|UTC|on"),
    ])
    func `a transaction opens with its settings, and leaves none behind`(
        transaction: BatchTransaction, settings: String
    ) throws {
        var connection = try database.connect()
        try connection.run("SET timezone = 'Asia/Tokyo'; SET statement_timeout = '2h'; SET synchronous_commit = on")
        let before = try connection.lines(Self.settings, columns: 5)
        let within = try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(Self.settings).one { row throws(DatabaseError) in
                [try row.read(String.self), try row.read(), try row.read(), try row.read(), try row.read()]
            }
        }
        #expect(within.joined(separator: "|") == settings)
        #expect(try connection.lines(Self.settings, columns: 5) == before)
    }

    private struct Stopped: Error {}

    @Test func `an error rolls back, whatever its kind`() throws {
        var connection = try database.connect()
        try connection.run("CREATE TEMPORARY TABLE note (words text)")
        let transaction = BatchTransaction(lockTimeout: .seconds(1))
        #expect(throws: Stopped.self) {
            try connection.transaction(transaction) { connection in
                try connection.run("INSERT INTO note VALUES ('one')")
                throw Stopped()
            }
        }
        #expect(throws: DatabaseError.self) {
            try connection.transaction(transaction) { connection throws(DatabaseError) in
                try connection.run("INSERT INTO note VALUES ('two')")
                try connection.run("SELECT 1 / 0")
            }
        }
        #expect(try connection.query("SELECT count(*) FROM note").value(Int.self) == 0)
    }
}
