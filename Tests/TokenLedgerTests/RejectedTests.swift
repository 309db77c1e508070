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
        let groups = try RejectedRows(.results).groups(on: &reader)
        #expect(
            groups.map { "\($0.rows) \($0.error)" } == [
                "2 device token * (* bytes of text) is not hex of * to * bytes",
                "2 timestamp * is before *, expected milliseconds since * (not seconds)",
                "1 topic is missing, expected the apns-topic header",
            ])
        #expect(groups[1].latest.contains(": timestamp 179400000"), "not masked: \(groups[1].latest)")
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
        #expect(try RejectedRows(.results).requeue(.error("topic is missing"), on: &someone) == 1)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT token, invalidated_at AT TIME ZONE 'UTC' FROM tokenkeeper.token")
                == "cc|2025-12-31 23:55:00")
        #expect(
            try database.psql("SELECT operation, rows, done_by FROM tokenkeeper.operation")
                == "rejected_results_requeued|1|a_operator")
    }

    @Test func `count their attempts and keep their original queued_at when they are rejected again`() throws {
        let first = try database.psql("SELECT min(queued_at), max(queued_at) FROM tokenkeeper.rejected_result")
        var someone = try database.connect(user: "a_operator")
        var daemon = try database.connect(user: "a_daemon")
        for _ in 1...2 {
            #expect(try RejectedRows(.results).requeue(.all, on: &someone) == 5)
            #expect(try drainAll(&daemon).rejected == 5)
        }
        #expect(try database.psql("SELECT min(queued_at), max(queued_at) FROM tokenkeeper.rejected_result") == first)
        #expect(try database.psql("SELECT DISTINCT attempts FROM tokenkeeper.rejected_result") == "2")
        #expect(try RejectedRows(.results).groups(on: &someone).allSatisfy { $0.attempts == 2 })
    }

    @Test func `are requeued and discarded by rejected_id, by error, or all`() throws {
        var someone = try database.connect(user: "a_operator")
        let ids = try RejectedRows(.results).groups(on: &someone)[0].samples.split(separator: " ").compactMap {
            Int64($0)
        }
        #expect(try RejectedRows(.results).discard(.ids(ids), on: &someone) == 2)
        #expect(try RejectedRows(.results).discard(.ids(ids), on: &someone) == 0)
        #expect(try RejectedRows(.results).discard(.error("timestamp 1794000001"), on: &someone) == 1)
        #expect(try RejectedRows(.results).discard(.error("timestamp * is"), on: &someone) == 1)
        #expect(try RejectedRows(.results).requeue(.ids([-1]), on: &someone) == 0)
        #expect(try RejectedRows(.results).discard(.all, on: &someone) == 1)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "0")
    }
}

@Suite(.ownThread) struct `The status of a queued result` {
    let database: TestDatabase

    init() throws { database = try TestCluster.shared.database() }

    @Test func `is a number or text, by INSERT, INSERT … SELECT, COPY or a parameter of any integer type`() throws {
        try database.psql(
            """
            CREATE TABLE response (n integer, small smallint, big bigint, short char(5));
            INSERT INTO response VALUES (410, 410, 410, '410');
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'a1', 410), ('t', 'a2', '410'), ('t', 'a3', ' 410 ');
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'a4', n FROM response;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'a5', small FROM response;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'a6', big FROM response;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'a7', short FROM response;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'a8', s FROM unnest(ARRAY[410]) AS s;
            """)
        try database.psql(
            "COPY tokenkeeper.send_result (topic, token, status) FROM STDIN", user: "a_sender", input: "t\ta9\t410\n")
        // The driver says that the parameters are integers, as psycopg and libpq do.
        var sender = try database.connect(user: "a_sender")
        let insert = "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', $1, $2)"
        _ = try sender.query(insert, [.text("b1"), .int4(410)])
        _ = try sender.query(insert, [.text("b2"), .int8(410)])
        _ = try sender.query(insert, [.text("b3"), .text("410")])
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).recorded == 12)
        #expect(
            try database.psql("SELECT state, count(*) FROM tokenkeeper.token GROUP BY 1") == "suspect|12",
            "a 410 without a body")
    }

    @Test func `of a 200 counts on the server, and with blanks around it like any other`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'a1', 200), ('t', 'a2', '200'), ('t', 'a3', ' 200');
            """)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.accepted == 2 && pass.recorded == 1)
        #expect(
            try database.psql("SELECT status, reason, sum(results) FROM tokenkeeper.result_stat GROUP BY 1, 2")
                == "200||3")
    }

    @Test func `that is none leaves the rest of the INSERT alone, and can be fixed`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES
                ('t', 'a1', 'failed'), ('t', 'a2', '410 Gone'), ('t', 'a3', '410')
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.recorded == 1 && pass.rejected == 2)
        #expect(
            try database.psql("SELECT token, status, error FROM tokenkeeper.rejected_result ORDER BY token")
                == """
                a1|failed|status is 'failed', expected an HTTP status from 100 to 599
                a2|410 Gone|status is '410 Gone', expected an HTTP status from 100 to 599
                """)
        try database.psql(
            """
            UPDATE tokenkeeper.rejected_result SET status = left(status, 3) WHERE status LIKE '410%';
            SELECT tokenkeeper.requeue_rejected_results()
            """, user: "a_operator")
        #expect(try drainAll(&daemon).recorded == 1)
    }
}
