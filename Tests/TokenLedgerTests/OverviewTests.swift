import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `What the status page shows of the database` {
    @Test func `while a table is locked against reading, the counts are unknown, and a warning says why`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        func look() throws -> Overview { try Overview(within: .seconds(5), on: &daemon) }
        #expect(try look().rejected == 0)
        #expect(try look().tokens == [0, 0, 0, 0, 0])
        var owner = try database.connect()
        try owner.execute("BEGIN; LOCK TABLE tokenkeeper.token_count")
        let locked = try look()
        #expect(locked.rejected == nil && locked.tokens == [nil, nil, nil, nil, nil])
        #expect(locked.warnings.contains { $0.contains("tokenkeeper.token_count is locked") }, "\(locked.warnings)")
        try owner.execute("COMMIT")
        #expect(try look().rejected == 0)
    }
}
