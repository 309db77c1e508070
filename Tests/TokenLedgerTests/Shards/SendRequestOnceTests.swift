import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Requests through the view `send_request_once`, where routers write.
@Suite(.ownThread) struct `Requests that are taken once` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let columns = "topic, token, payload, priority, apns_id"

    /// Requests with the apns_ids 1 to `count`.
    private func insert(_ count: Int) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request_once (\(Self.columns))
            SELECT 't', 'aa', '{"aps":{}}', 5, lpad(i::text, 32, '0')::uuid FROM generate_series(1, \(count)) AS i
            """, user: "a_sender")
    }

    private func queued() throws -> String {
        try database.psql("SELECT count(*) || ' ' || count(DISTINCT apns_id) FROM tokenkeeper.send_request")
    }

    @Test func `a repetition is ignored, also after the request was sent`() throws {
        try insert(3)
        try insert(5)
        #expect(try queued() == "5 5")
        try database.psql("DELETE FROM tokenkeeper.send_request")
        try insert(6)
        #expect(try queued() == "1 1")
    }

    @Test func `COPY and INSERT queue what send_request would get, and without an apns_id each is a request`() throws {
        let both = ["send_request", "send_request_once"]
        for table in both {
            try database.psql(
                "INSERT INTO tokenkeeper.\(table) (token, payload) VALUES ('aa', '{\"aps\":{}}'), (NULL, NULL)",
                user: "a_sender")
            try database.psql(
                """
                INSERT INTO tokenkeeper.\(table)
                    (environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id)
                VALUES ('sandbox', 't', 'aa', '{}', 'voip', 1, 'infinity', 'c', '2030-01-01', NULL)
                """, user: "a_sender")
            try database.psql(
                "COPY tokenkeeper.\(table) (topic, token) FROM STDIN", user: "a_sender", input: "t\tbb\nt\tbb\n")
        }
        #expect(try queued() == "10 9")
        let shapes = try database.psql(
            """
            SELECT count(*) FROM (
                SELECT to_jsonb(r) - 'request_id' - 'queued_at' - 'apns_id' AS shape FROM tokenkeeper.send_request AS r
                GROUP BY 1 HAVING count(*) % 2 = 1) AS s
            """)
        #expect(shapes == "0")
    }

    @Test func `a repetition waits for the transaction that it repeats`() throws {
        var first = try database.connect(user: "a_sender")
        try first.run("BEGIN")
        let statement = """
            INSERT INTO tokenkeeper.send_request_once (\(Self.columns))
            VALUES ('t', 'aa', '{"aps":{}}', 5, lpad('1', 32, '0')::uuid)
            """
        try first.run(statement)
        let database = database
        let failures = Failures()
        // One repetition, after which the first transaction is rolled back: the repetition counts.
        atOnce(2) { worker in
            do {
                if worker == 0 {
                    var second = try database.connect(user: "a_sender")
                    try second.run(statement)
                } else {
                    try eventually("the repetition waits") {
                        try database.psql(
                            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                            user: "postgres") == "1"
                    }
                    try database.psql(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'",
                        user: "postgres")
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [])
        #expect(try queued() == "1 1")
    }

    @Test func `the sweep forgets after a day what was taken`() throws {
        try insert(3)
        try database.psql(
            "UPDATE tokenkeeper.taken_request SET taken_at = now() - interval '25 hours' WHERE apns_id = lpad('2', 32, '0')::uuid"
        )
        var daemon = try database.connect(user: "a_daemon")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 1000, maxShare: .percent(10), batch: 1)
        try SweepLease.request(.cli, on: &daemon)
        let lease = try #require(try SweepLease.claim(.requested, holder: "me", on: &daemon))
        _ = try Sweep(lease, plan, lockTimeout: .milliseconds(100)).perform(on: &daemon) { true }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.taken_request") == "2")
    }
}
