import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Rejected results` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', 'zz', 410, NULL), ('t', 'yy', 410, NULL), ('t', 'aa', 410, '{"timestamp":1794000000}'),
                ('t', 'bb', 410, '{"timestamp":1794000001}'), (NULL, 'cc', 410, NULL)
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
    }

    @Test func `are listed by kind of error`() throws {
        var reader = try database.connect(user: "a_reader")
        let groups = try RejectedResults.groups(on: &reader)
        #expect(
            groups.map { "\($0.results) \($0.error)" } == [
                "2 device token * (* bytes of text) is not hex of * to * bytes",
                "2 timestamp * is before *, expected milliseconds since * (not seconds)",
                "1 topic is missing, expected the apns-topic header",
            ])
        #expect(groups.map(\.samples.count) == [3, 3, 1] && groups.allSatisfy { $0.attempts == 0 })
    }

    @Test func `are all kept unchanged, however many a batch has`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, apns_id) SELECT 't', 'x' || i, 410, i FROM generate_series(1, 1201) AS i"
        )
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).rejected == 1201)
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result WHERE token = 'x' || apns_id") == "1201"
        )
    }

    @Test func `count once they are fixed and requeued, with their original queued_at`() throws {
        try database.psql(
            """
            UPDATE tokenkeeper.rejected_result SET queued_at = '2026-01-01Z' WHERE topic IS NULL;
            """)
        try database.psql(
            "UPDATE tokenkeeper.rejected_result SET topic = 't' WHERE topic IS NULL", user: "a_operator")
        var someone = try database.connect(user: "a_operator")
        #expect(try RejectedResults.requeue(.error("topic is missing"), on: &someone) == 1)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT token, invalidated_at AT TIME ZONE 'UTC' FROM tokenkeeper.token")
                == "cc|2025-12-31 23:55:00")
        #expect(
            try database.psql("SELECT operation, rows, done_by FROM tokenkeeper.operation")
                == "rejected_requeued|1|a_operator")
    }

    @Test func `count their attempts and keep their original queued_at when they are rejected again`() throws {
        let first = try database.psql("SELECT min(queued_at), max(queued_at) FROM tokenkeeper.rejected_result")
        var someone = try database.connect(user: "a_operator")
        var daemon = try database.connect(user: "a_daemon")
        for _ in 1...2 {
            #expect(try RejectedResults.requeue(.all, on: &someone) == 5)
            #expect(try drainAll(&daemon).rejected == 5)
        }
        #expect(try database.psql("SELECT min(queued_at), max(queued_at) FROM tokenkeeper.rejected_result") == first)
        #expect(try database.psql("SELECT DISTINCT attempts FROM tokenkeeper.rejected_result") == "2")
        #expect(try RejectedResults.groups(on: &someone).allSatisfy { $0.attempts == 2 })
    }

    @Test func `are requeued and discarded by rejected_id, by error, or all`() throws {
        var someone = try database.connect(user: "a_operator")
        let ids = try RejectedResults.groups(on: &someone)[0].samples.split(separator: " ").compactMap { Int64($0) }
        #expect(try RejectedResults.discard(.ids(ids), on: &someone) == 2)
        #expect(try RejectedResults.discard(.ids(ids), on: &someone) == 0)
        #expect(try RejectedResults.discard(.error("timestamp 1794000001"), on: &someone) == 1)
        #expect(try RejectedResults.discard(.error("timestamp * is"), on: &someone) == 1)
        #expect(try RejectedResults.requeue(.ids([-1]), on: &someone) == 0)
        #expect(try RejectedResults.discard(.all, on: &someone) == 1)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "0")
    }
}
