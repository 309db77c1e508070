import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `The hourly limit on rejected results` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func makeDrain(_ perHour: Int64) -> Drain {
        Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, rejectedPerHour: perHour,
            interpret: Interpretation.verdict(on:))
    }

    private func garbage(_ rows: Int, body: String = "NULL") throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', 'x' || i, 410, \(body) FROM generate_series(1, \(rows)) AS i"
        )
    }

    private func stat() throws -> String {
        try database.psql("SELECT status, reason, results FROM tokenkeeper.result_stat ORDER BY reason")
    }

    private func kept() throws -> String { try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") }

    @Test func `results beyond it are counted and not kept`() throws {
        try garbage(1200)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon, drain: makeDrain(1000))
        #expect(pass.rejected == 1200 && pass.notKept == 200)
        #expect(try kept() == "1000")
        #expect(try stat() == "410|(rejected)|1000\n410|(rejected, not kept)|200")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
    }

    @Test func `it holds across daemons, and ends with the hour`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try garbage(8)
        #expect(try drainAll(&daemon, drain: makeDrain(10)).notKept == 0)
        try garbage(8)
        #expect(try drainAll(&daemon, drain: makeDrain(10)).notKept == 6)
        try database.psql("UPDATE tokenkeeper.rejected_result SET rejected_at = rejected_at - interval '61 minutes'")
        try garbage(8)
        #expect(try drainAll(&daemon, drain: makeDrain(10)).notKept == 0)
        #expect(try kept() == "18")
    }

    @Test func `a long result counts once for each 8 KiB, and is kept whole or not at all`() throws {
        try garbage(3, body: "repeat('x', 40000)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon, drain: makeDrain(10)).notKept == 1)
        #expect(try database.psql("SELECT DISTINCT length(body) FROM tokenkeeper.rejected_result") == "40000")
        #expect(try kept() == "2")
    }

    @Test func `a requeued result is always kept`() throws {
        try garbage(10)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon, drain: makeDrain(10))
        var someone = try database.connect(user: "a_operator")
        #expect(try RejectedRows(.results).requeue(.all, on: &someone) == 10)
        try garbage(10)
        let pass = try drainAll(&daemon, drain: makeDrain(5))
        #expect(pass.rejected == 20 && pass.notKept == 5)
        #expect(
            try database.psql("SELECT attempts, count(*) FROM tokenkeeper.rejected_result GROUP BY 1 ORDER BY 1")
                == "1|10\n|5")
    }

    @Test func `a batch that is rolled back uses nothing of it`() throws {
        // This makes the whole batch fail, but not its single rows.
        try database.psql("ALTER TABLE tokenkeeper.result_count ADD CHECK (results < 3)")
        try garbage(3)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon, drain: makeDrain(3))
        #expect(pass.rejected == 3 && pass.notKept == 0)
        #expect(try kept() == "3")
    }

    @Test func `a row larger than the limit is kept if it is the first of the hour`() throws {
        let allowance = RejectedAllowance(perHour: 10, of: ResultQueue(interpret: Interpretation.verdict(on:)))
        let bytes = 8192 * 100
        #expect(allowance.takes(bytes: bytes))
        #expect(!allowance.takes(bytes: 1))
        let other = RejectedAllowance(perHour: 10, of: ResultQueue(interpret: Interpretation.verdict(on:)))
        #expect(other.takes(bytes: 1))
        #expect(!other.takes(bytes: bytes))
        #expect(other.takes(bytes: 1))
    }

    @Test func `a row that vanishes before it is rejected does not count`() throws {
        // The trigger keeps the row, as if another session had been faster.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number) VALUES ('t', 'aa', 410, repeat('x', 16777217), 8);
            CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER keep BEFORE DELETE ON tokenkeeper.send_result_retry FOR EACH ROW EXECUTE FUNCTION public.keep()
            """, user: "postgres")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain(2100)
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.rejected == 0 && !pass.moved)
        #expect(try kept() == "0")
        try database.psql("DROP TRIGGER keep ON tokenkeeper.send_result_retry")
        // It counts as 2049, and has not been counted before. The retry comes after half a second.
        try eventually("it is rejected") { try drain.onePass(on: &daemon).rejected == 1 }
        #expect(try kept() == "1")
    }

    @Test func `a sender that invents statuses does not create a count row for each`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'aa', 100000 + i FROM generate_series(1, 50) AS i"
        )
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon, drain: makeDrain(1000)).rejected == 50)
        #expect(try stat() == "|(rejected)|50")
    }
}
