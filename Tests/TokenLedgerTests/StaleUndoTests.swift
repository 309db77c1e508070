import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// 410s are undone by when they were received, never by their timestamp.
@Suite(.ownThread) struct `The undo of 410s` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// A 410 of January 10 unless `at` says otherwise.
    private func gone(
        _ tokens: [String], received: String, at: String = "2025-01-10Z", reason: String = "Unregistered"
    ) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, queued_at, body)
            SELECT 't', t, 410, '\(received)',
                   '{"reason":"\(reason)","timestamp":' || (extract(epoch FROM timestamptz '\(at)') * 1000)::bigint || '}'
            FROM unnest('{\(tokens.joined(separator: ","))}'::text[]) AS t
            """)
    }

    private func reinstate(_ since: String, _ until: String) throws -> String {
        try database.reinstate(since, until, cause: "stale")
    }

    private func states() throws -> String {
        try database.psql(
            "SELECT string_agg(token || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token")
    }

    private func sweep(_ daemon: inout Connection) throws -> SweepReport {
        let lease = try #require(try SweepLease.claim(.new(.cli, dryRun: false), holder: "test", on: &daemon))
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 1000, maxShare: .percent(100), batch: 7)
        return try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }
    }

    @Test func `it restores the ledger row by row, and the same 410 received later counts`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z', device_id => 'd' || t) FROM unnest('{01,02,03,04,05,06}'::text[]) AS t;
            SELECT tokenkeeper.unregister('02', 't', at => '2025-01-02Z');
            SELECT tokenkeeper.register('03', 't', registered_at => '2025-03-01Z');
            SELECT tokenkeeper.register('66', 't', registered_at => '2025-01-03Z', device_id => 'd06');
            """)
        // 04 is stale already, and 05 had a 410 before its registration.
        try gone(["04"], received: "2025-02-01Z", at: "2025-01-05Z")
        try gone(["05"], received: "2025-02-01Z", at: "2024-12-05Z", reason: "ExpiredToken")
        try drainAll(&daemon)
        var owner = try database.connect()
        let before = try owner.ledger()
        let wave = ["01", "02", "03", "04", "05", "06", "66", "77"]
        for round in 1...2 {
            // The second time, they are recorded after the undo.
            try gone(wave, received: "2025-02-10T12:00:00Z")
            try drainAll(&daemon)
            if round == 1 {
                #expect(try owner.ledger() != before)
                #expect(
                    try database.psql(
                        "SELECT tokenkeeper.would_reinstate('t', 'production', '2025-02-10Z', '2025-02-11Z', 'stale')",
                        user: "a_operator") == "4")
                #expect(try reinstate("2025-02-10Z", "2025-02-11Z") == "4", "01, 05, 66, and 77, which is unknown")
            }
            #expect(try owner.ledger() == before)
            #expect(try database.psql("SELECT count(*) FROM tokenkeeper.receipt WHERE cause = 'stale'") == "2")
        }
        #expect(
            try owner.lines(
                "SELECT DISTINCT event, cause, reason FROM tokenkeeper.token_event WHERE event = 'reinstated'",
                columns: 3) == ["reinstated|operator|Unregistered"])
        #expect(
            try database.psql("SELECT operation, rows, done_by, message FROM tokenkeeper.operation")
                == "reinstated|4|a_operator|410s received from 2025-02-10 00:00:00+00 to 2025-02-11 00:00:00+00 do not count"
        )
        // APNs repeats itself: the very same timestamp.
        try gone(wave, received: "2025-02-12Z")
        try drainAll(&daemon)
        #expect(
            try states()
                == "01 stale, 02 stale, 03 active, 04 stale, 05 stale, 06 stale, 66 stale, 77 stale")
    }

    @Test func `a suspect window undoes no 410, and a 410 window no suspect`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try gone(["01"], received: "2025-02-01Z")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, queued_at)
            VALUES ('t', '02', 400, '{"reason":"BadDeviceToken"}', '2025-02-01Z', '2025-02-01Z')
            """)
        try drainAll(&daemon)
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', '2025-01-01Z', '2025-01-31Z', c) FROM unnest('{suspect,stale}'::text[]) AS c"
        )
        try undo(&daemon)
        #expect(try states() == "01 stale, 02 suspect", "its timestamp lies in the window, but it was received later")
        #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "1")
        #expect(try states() == "02 suspect")
    }

    @Test func `the greatest of the 410s that remain counts again`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        // In one batch; the same one twice; and two reasons at the same instant.
        try gone(["01"], received: "2025-02-01Z", at: "2025-01-10Z")
        try gone(["01"], received: "2025-02-02Z", at: "2025-01-20Z")
        try gone(["01"], received: "2025-02-03Z", at: "2025-01-20Z", reason: "ExpiredToken")
        try gone(["01"], received: "2025-02-04Z", at: "2025-01-05Z")
        try gone(["01"], received: "2025-02-05Z", at: "2025-01-05Z")
        try drainAll(&daemon)
        let stale =
            "SELECT coalesce(max((l.stale_at AT TIME ZONE 'UTC')::date || ' ' || l.stale_reason), 'none') FROM tokenkeeper.ledger AS l"
        #expect(try database.psql(stale) == "2025-01-20 Unregistered")
        #expect(try reinstate("2025-02-02Z", "2025-02-02Z") == "0")
        #expect(try database.psql(stale) == "2025-01-20 ExpiredToken")
        #expect(try reinstate("2025-02-03Z", "2025-02-03Z") == "0")
        #expect(try database.psql(stale) == "2025-01-10 Unregistered")
        #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "0")
        #expect(try database.psql(stale) == "2025-01-05 Unregistered")
        #expect(try reinstate("2025-02-05Z", "2025-02-05Z") == "0")
        #expect(try database.psql(stale) == "2025-01-05 Unregistered", "it was received twice")
        #expect(try reinstate("2025-02-04Z", "2025-02-04Z") == "1")
        #expect(try database.psql(stale) == "none")
    }

    /// A sender that does not ask the gate, for a hundred days; in one batch, and in two.
    @Test(arguments: [1, 2])
    func `of a token that gets 410s forever, the first and the last receipts are kept`(batches: Int) throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{01,02}'::text[]) AS t")
        try gone(["01", "02"], received: "2025-02-01Z")
        if batches == 2 { try drainAll(&daemon) }
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, queued_at, body)
            SELECT 't', '01', 410, '2025-02-01Z'::timestamptz + n * interval '1 day', '{"reason":"Unregistered","timestamp":1736467200000}'
            FROM generate_series(1, 100) AS n
            """)
        try gone(["02"], received: "2025-02-02Z")
        try drainAll(&daemon)
        let kept =
            "SELECT encode(token_key, 'hex'), count(*), count(*) FILTER (WHERE counted), min(received_at)::date, max(received_at)::date FROM tokenkeeper.receipt GROUP BY 1 ORDER BY 1"
        #expect(
            try database.psql(kept) == "01|40|1|2025-02-01|2025-05-12\n02|2|1|2025-02-01|2025-02-02")
        // Either end is enough.
        #expect(try reinstate("2025-02-01Z", "2025-05-11Z") == "1", "02")
        #expect(try states() == "01 stale, 02 active")
        #expect(try reinstate("2025-05-12Z", "2025-05-12Z") == "1")
        #expect(try database.psql("SELECT sum(tokens) FROM tokenkeeper.suppression_count") == "0")
    }

    @Test func `of the 410s of one batch, those of an undone window do not count`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{01,02}'::text[]) AS t")
        #expect(try reinstate("2025-02-01Z", "2025-02-02Z") == "0")
        try gone(["01", "02"], received: "2025-02-01T12:00:00Z", at: "2025-01-20Z")
        try gone(["01"], received: "2025-02-03Z", at: "2025-01-10Z")
        try gone(["01"], received: "2025-02-04Z", at: "2025-01-10Z")
        try drainAll(&daemon)
        #expect(try states() == "01 stale, 02 active")
        #expect(
            try database.psql("SELECT invalidated_at = '2025-01-10Z' FROM tokenkeeper.token WHERE token = '01'") == "t")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.receipt") == "2")
    }

    @Test func `no 410 is recorded between the look at the windows and the undo`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        var operatorSession = try database.connect()
        try operatorSession.execute(
            "BEGIN; SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-10Z', 'stale')")
        try gone(["01"], received: "2025-02-05Z")
        var drain = Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        #expect(try !drain.onePass(on: &daemon).moved, "it waits for the operator")
        try operatorSession.execute("COMMIT")
        try drainAll(&daemon)
        #expect(try states() == "01 active")
    }

    @Test func `tokens that were pruned meanwhile are counted as not restorable`() throws {
        var daemon = try database.connect(user: "a_daemon")
        let tokens = (10..<40).map(String.init)
        try database.psql(
            "SELECT tokenkeeper.register(i::text, 't', registered_at => '2025-01-01Z') FROM generate_series(10, 39) AS i"
        )
        try gone(tokens, received: "yesterday")
        try drainAll(&daemon)
        try database.psql(
            "UPDATE tokenkeeper.suppression SET since = now() - interval '100 days' WHERE token_key < '\\x30'")
        let report = try sweep(&daemon)
        #expect(report.prunedSuppressed == 20)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.receipt") == "10")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.pruned_since('t', 'production', 'yesterday', 'yesterday', 'stale')",
                user: "a_operator")
                == "20")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.pruned_since('t', 'production', '2025-01-01Z', now() - interval '3 days', 'stale')")
                == "0")
        #expect(try reinstate("yesterday", "yesterday") == "10")
    }

    @Test func `410s of a token that came back are kept for the retention, and then swept`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{01,02,03}'::text[]) AS t"
        )
        try gone(["01", "02"], received: "2025-02-01Z")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '03', 410, \(goneBody))")
        try drainAll(&daemon)
        try database.psql("SELECT tokenkeeper.register(t, 't') FROM unnest('{01,03}'::text[]) AS t")
        _ = try sweep(&daemon)
        #expect(
            try database.psql(
                "SELECT string_agg(encode(token_key, 'hex'), ' ' ORDER BY token_key) FROM tokenkeeper.receipt")
                == "02 03", "01 is active and its 410 is old; 02 is still suppressed")
    }

    @Test(arguments: ["'both'", "NULL", "''"])
    func `an unknown cause is a clear error`(_ cause: String) throws {
        try database.psql("SELECT tokenkeeper.register('01', 't')")
        var owner = try database.connect()
        for function in ["reinstate", "would_reinstate"] {
            let error = #expect(throws: DatabaseError.self) {
                try owner.execute("SELECT tokenkeeper.\(function)('t', 'production', now(), now(), \(cause))")
            }
            #expect(error?.sqlState == "22023")
        }
    }
}
