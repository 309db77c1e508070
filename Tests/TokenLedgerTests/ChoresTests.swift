import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `The chores of a worker` {
    private static let refusal = DatabaseError(sqlState: "42501", message: "permission denied for table x")

    @Test func `a chore that fails leaves the others alone, and is tried again later and later`() throws {
        let database = try TestCluster.shared.database()
        var connection = try database.connect()
        var chores = Chores()
        var done: [String] = []
        let start = ContinuousClock.now
        func round(at seconds: Int) throws {
            done = []
            let now = start + .seconds(seconds)
            for (chore, statement) in [("a", "SELECT 1"), ("b", "SELECT 1 / 0"), ("c", "SELECT 1")] {
                try chores.run(chore, on: &connection, now: now) { connection throws(DatabaseError) in
                    done.append(chore)
                    try connection.run(statement)
                }
            }
        }
        var tries: [Int] = []
        for second in 0...200 {
            try round(at: second)
            #expect(done.filter { $0 != "b" } == ["a", "c"])
            if done.contains("b") { tries.append(second) }
            #expect(chores.failures.map(\.words) == ["a daemon cannot b: division by zero (SQLSTATE 22012)"])
        }
        #expect(tries == [0, 1, 3, 7, 15, 31, 63, 123, 183])
        try chores.run("b", on: &connection, now: start + .seconds(300)) { _ throws(DatabaseError) in }
        #expect(chores.failures.isEmpty && !chores.isPaused("b", at: start))
    }

    @Test func `only a lost connection ends the round`() throws {
        let database = try TestCluster.shared.database()
        var connection = try database.connect()
        var chores = Chores()
        for state in ["55P03", "22003", "42501", "53200"] {
            #expect(
                try chores.run("do \(state)", on: &connection) { _ throws(DatabaseError) -> Int in
                    throw DatabaseError(sqlState: state, message: "x")
                } == nil)
        }
        #expect(chores.failures.map(\.chore) == ["do 55P03", "do 22003", "do 42501", "do 53200"])
        let missing = DatabaseError(sqlState: "42883", message: "x")
        #expect(throws: missing) {
            try chores.run("e", on: &connection) { _ throws(DatabaseError) in throw missing }
        }
        func isRefusal(_: DatabaseError, _: inout Connection) -> Bool { true }
        try chores.run("e", on: &connection, isRefusal: isRefusal) { _ throws(DatabaseError) in throw missing }
        #expect(chores.failures.count == 5)
        let lost = DatabaseError(.connection, "x")
        #expect(throws: lost) { try chores.run("f", on: &connection) { _ throws(DatabaseError) in throw lost } }
    }

    @Test(arguments: [
        ("22P02", "invalid input syntax for type bigint: \"anna@example.com\"", "invalid input syntax for type bigint"),
        (
            "23505", "duplicate key value violates unique constraint \"x\"",
            "duplicate key value violates unique constraint"
        ),
        ("P0001", "the user 'anna' is wrong", "the user"), ("22003", "integer out of range", "integer out of range"),
        ("42501", "permission denied for table \"x\"", "permission denied for table \"x\""),
        ("XX000", "bad \(String(repeating: "ab", count: 32)) here", "bad abababab… here"),
    ])
    func `what is said about a failure has no data of rows`(state: String, message: String, shown: String) {
        #expect(DatabaseError(sqlState: state, message: message).withoutData.message == shown)
        let long = DatabaseError(sqlState: "42501", message: String(repeating: "x", count: 5000)).withoutData
        #expect(long.message.count == 200 && long.sqlState == "42501")
    }
}
