import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Undo` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func suspect(_ token: String, at: String, reason: String = "BadDeviceToken", topic: String = "t") throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, queued_at)
            VALUES ('\(topic)', '\(token)', 400, '{"reason":"\(reason)"}', '\(at)', '\(at)')
            """)
    }

    private func reinstate(_ since: String, _ until: String) throws -> String {
        try database.reinstate(since, until, cause: "suspect")
    }

    @Test func `the undo restores the ledger row by row, even when the same results arrive again`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z', device_id => 'd' || t) FROM unnest('{01,02,03,04,05,06}'::text[]) AS t;
            SELECT tokenkeeper.unregister('02', 't', at => '2025-01-02Z');
            SELECT tokenkeeper.register('03', 't', registered_at => '2025-03-01Z');
            SELECT tokenkeeper.register('66', 't', registered_at => '2025-01-03Z', device_id => 'd06');
            """)
        var daemon = try database.connect(user: "a_daemon")
        try suspect("04", at: "2025-01-10Z", reason: "DeviceTokenNotForTopic")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '05', 410, '{\"reason\":\"Unregistered\",\"timestamp\":1736000000000}')"
        )
        try drainAll(&daemon)
        var owner = try database.connect()
        let before = try owner.ledger()
        // All of them, one unregistered token, and one suspect that is a day later.
        for round in 1...2 {
            for token in ["01", "02", "03", "04", "05", "06", "66", "77"] { try suspect(token, at: "2025-02-01Z") }
            try drainAll(&daemon)
            #expect(
                try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE state = 'suspect'")
                    == (round == 1 ? "7" : "1"),
                "all but 03, which was registered later; and the second time 04, as before")
            if round == 1 {
                #expect(try owner.ledger() != before)
                #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "3", "01, 66 and 77 may be sent to again")
            }
            #expect(try owner.ledger() == before)
        }
        #expect(
            try owner.lines(
                "SELECT token, event, cause, reason FROM tokenkeeper.token_event WHERE event = 'reinstated' ORDER BY token LIMIT 2",
                columns: 4) == ["01|reinstated|operator|BadDeviceToken", "02|reinstated|operator|BadDeviceToken"])
        #expect(
            try owner.lines("SELECT operation, topic, rows, done_by FROM tokenkeeper.operation", columns: 4)
                == ["reinstated|t|3|a_operator"])
    }

    @Test func `an older suspect, 410 or unregistration under the undone one counts again`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{01,02,03}'::text[]) AS t;
            SELECT tokenkeeper.unregister('02', 't', at => '2025-01-05Z');
            """)
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-01-05Z", reason: "DeviceTokenNotForTopic")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '03', 410, '{\"reason\":\"Unregistered\",\"timestamp\":1736035200000}')"
        )
        for token in ["01", "02", "03"] { try suspect(token, at: "2025-02-01Z") }
        try drainAll(&daemon)
        let report =
            "SELECT token, state, invalidated_at AT TIME ZONE 'UTC', reason FROM tokenkeeper.token ORDER BY token"
        #expect(
            try database.psql("SELECT DISTINCT state FROM tokenkeeper.token") == "suspect")
        #expect(try reinstate("2025-01-31Z", "2025-02-02Z") == "0")
        #expect(
            try database.psql(report) == """
                01|suspect|2025-01-05 00:00:00|DeviceTokenNotForTopic
                02|unregistered_by_app|2025-01-05 00:00:00|unregistered by the app
                03|stale|2025-01-05 00:00:00|Unregistered
                """)
        // And both windows, in either order.
        #expect(try reinstate("2025-01-01Z", "2025-01-06Z") == "1")
        #expect(try database.psql("SELECT token FROM tokenkeeper.sendable_token") == "01")
    }

    @Test func `suspects outside the window, or of other topics and environments, stay`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try suspect("02", at: "2025-02-03Z")
        try suspect("01", at: "2025-02-01Z", topic: "u")
        try drainAll(&daemon)
        #expect(try reinstate("2025-02-01Z", "2025-02-02T23:59:59Z") == "1")
        #expect(try database.psql("SELECT topic, token FROM tokenkeeper.token ORDER BY 1") == "t|02\nu|01")
    }

    @Test func `suspects that are recorded during the undo are undone, too`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try drainAll(&daemon)
        var operatorSession = try database.connect()
        try operatorSession.execute(
            "BEGIN; SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-10Z')")
        try suspect("01", at: "2025-02-05Z")
        var drain = Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        #expect(try !drain.onePass(on: &daemon).moved, "it waits for the operator")
        try operatorSession.execute("COMMIT")
        try drainAll(&daemon)
        try undo(&daemon)
        #expect(try database.psql("SELECT state FROM tokenkeeper.token") == "active")
    }

    @Test(arguments: [
        ("'t', 'production', NULL, now()", "22023"), ("'t', 'production', now(), now() - interval '1 s'", "22023"),
        ("'t', 'production', '-infinity', now()", "22023"), ("'typo', 'production', now(), now()", "22023"),
        ("'t', 'production', now() + interval '1 day', now() + interval '2 days'", "22023"),
        ("'t', 'staging', now(), now()", "22023"), ("NULL, NULL, now(), now()", "22023"),
    ])
    func `an invalid window or topic is a clear error`(_ arguments: String, _ state: String) throws {
        try database.psql("SELECT tokenkeeper.register('01', 't')")
        var owner = try database.connect()
        let error = #expect(throws: DatabaseError.self) {
            try owner.execute("SELECT tokenkeeper.reinstate(\(arguments))")
        }
        #expect(error?.sqlState == state)
    }

    @Test func `under an older snapshot it refuses`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't')")
        var owner = try database.connect()
        let error = #expect(throws: DatabaseError.self) {
            try owner.execute(
                "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT tokenkeeper.reinstate('t', 'production', now(), now())")
        }
        #expect(error?.sqlState == "25001")
    }

    @Test func `a window that ends in the future ends now, and repeating a window adds none`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        #expect(try reinstate("2025-02-01Z", "2100-01-01Z") == "0")
        #expect(
            try database.psql("SELECT until <= now() FROM tokenkeeper.reinstatement", user: "a_operator") == "t")
        #expect(try reinstate("2025-03-01Z", "2025-04-01Z") == "0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.reinstatement") == "1")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.operation") == "1")
    }

    @Test func `the records do not depend on the operator's session settings`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't')")
        var someone = try database.connect(user: "a_operator")
        try someone.execute(
            "SET datestyle = 'German'; SET timezone = 'Asia/Tokyo'; SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')"
        )
        #expect(
            try database.psql("SELECT message FROM tokenkeeper.operation")
                == "suspects received from 2025-02-01 00:00:00+00 to 2025-02-02 00:00:00+00 do not count")
    }

    @Test func `a 410 that came after an undone suspect is kept for its whole retention`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try drainAll(&daemon)
        try database.psql("UPDATE tokenkeeper.suppression SET since = now() - interval '85 days'")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '01', 410, '{\"reason\":\"Unregistered\",\"timestamp\":1737331200000}')"
        )
        try drainAll(&daemon)
        #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "0")
        #expect(
            try database.psql(
                "SELECT t.state, s.since > now() - interval '5 minutes' FROM tokenkeeper.token AS t JOIN tokenkeeper.suppression AS s USING (token_key)"
            ) == "stale|t")
    }

    /// Tokens number 1 to `count`, registered and suspect since.
    private func suspects(_ count: Int, _ daemon: inout Connection) throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z')) FROM generate_series(1, \(count)) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, queued_at)
            SELECT 't', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}', timestamptz '2025-02-01Z' + i / 10 * interval '1 s'
            FROM generate_series(1, \(count)) AS i;
            """)
        try drainAll(&daemon)
    }

    private static let left = "SELECT remaining, tokens, finished_at IS NOT NULL FROM tokenkeeper.reinstatement"
    private static let states =
        "SELECT string_agg(state || ' ' || tokens, ', ' ORDER BY state) FROM (SELECT state, count(*) AS tokens FROM tokenkeeper.token GROUP BY 1) AS s"

    @Test func `reinstate records the window and returns at once; steps undo it, and the view shows the rest`()
        throws
    {
        var daemon = try database.connect(user: "a_daemon")
        try suspects(1000, &daemon)
        #expect(
            try database.psql(
                "SELECT tokenkeeper.would_reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')",
                user: "a_operator")
                == "1000")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')", user: "a_operator")
                == "1000")
        #expect(try database.psql(Self.left) == "1000|0|f")
        #expect(try database.psql(Self.states) == "suspect 1000", "not undone yet: the gate still says no")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.operation") == "0")
        // The operator's role takes one step, the daemon's role the next.
        #expect(try database.psql("SELECT tokenkeeper.undo_next(100)", user: "a_operator") == "100")
        #expect(try database.psql("SELECT tokenkeeper.undo_next(200)", user: "a_daemon") == "200")
        #expect(try database.psql(Self.left) == "700|300|f")
        #expect(try database.psql(Self.states) == "active 300, suspect 700")
        // The rest is undone in a new session, too.
        try undo(&daemon)
        #expect(try database.psql(Self.left) == "0|1000|t")
        #expect(try database.psql(Self.states) == "active 1000")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.receipt") == "0")
        #expect(
            try database.psql("SELECT operation, rows, done_by FROM tokenkeeper.operation")
                == "reinstated|1000|a_operator")
        #expect(try database.psql("SELECT tokenkeeper.undo_next()", user: "a_daemon") == "")
    }

    @Test func `a token that an application has locked is left for later, and others do not wait`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try suspects(50, &daemon)
        try database.psql("SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('00000007', 't')")
        #expect(try !Reinstatement.undo(within: .seconds(5), on: &daemon) { true }, "nothing to do at once")
        #expect(try database.psql(Self.left) == "1|49|f")
        try app.execute("COMMIT")
        try undo(&daemon)
        #expect(try database.psql(Self.left) == "0|49|t", "one token was registered again")
        #expect(try database.psql(Self.states) == "active 50")
    }

    @Test func `an undo that has to wait in one topic does not delay another topic`() throws {
        var daemon = try database.connect(user: "a_daemon")
        for topic in ["a", "b"] {
            try database.psql("SELECT tokenkeeper.register('01', '\(topic)', registered_at => '2025-01-01Z')")
            try suspect("01", at: "2025-02-01Z", topic: topic)
        }
        try drainAll(&daemon)
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('01', 'a')")
        for topic in ["a", "b"] {
            try database.psql("SELECT tokenkeeper.reinstate('\(topic)', 'production', '2025-02-01Z', '2025-02-02Z')")
        }
        _ = try Reinstatement.undo(within: .seconds(5), on: &daemon) { true }
        #expect(
            try database.psql("SELECT topic FROM tokenkeeper.reinstatement WHERE finished_at IS NOT NULL") == "b")
        try app.execute("COMMIT")
        try undo(&daemon)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token WHERE sendable") == "2")
    }

    @Test func `a suspect in two windows never counts again, whichever is undone first`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        try suspect("01", at: "2025-02-01Z")
        try suspect("01", at: "2025-02-03Z")
        try drainAll(&daemon)
        try database.psql(
            """
            SELECT tokenkeeper.reinstate('t', 'production', '2025-02-03Z', '2025-02-03Z');
            SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-01Z');
            """)
        #expect(try database.psql("SELECT tokenkeeper.undo_next(1)") == "2", "both of the token at once")
        #expect(try database.psql("SELECT state FROM tokenkeeper.token") == "active")
        try undo(&daemon)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.exclusion WHERE finished_at IS NULL") == "0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'reinstated'") == "1")
    }

    @Test func `of a token that is reported for ever, the greatest instant can be undone`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        for minute in 0..<60 {
            // The thirtieth is the latest.
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, queued_at)
                SELECT 't', '01', 400, '{"reason":"BadDeviceToken"}', q - CASE \(minute) WHEN 30 THEN interval '1 s' ELSE interval '2 hours' END, q
                FROM (SELECT timestamptz '2025-02-01Z' + \(minute) * interval '1 minute' AS q) AS r
                """)
            if minute.isMultiple(of: 20) { try drainAll(&daemon) }
        }
        try drainAll(&daemon)
        #expect(try database.psql("SELECT count(*) BETWEEN 40 AND 42 FROM tokenkeeper.receipt") == "t")
        #expect(try reinstate("2025-02-01Z", "2025-02-02Z") == "1")
        #expect(try database.psql("SELECT state FROM tokenkeeper.token") == "active")
    }

    @Test func `a token of which something else is known stays`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, user_id, tags, returned, queued_at) VALUES ('t', '01', 'anna', '{news}', true, '2025-02-02Z')
            """)
        try drainAll(&daemon)
        try suspect("01", at: "2025-02-03Z")
        try drainAll(&daemon)
        #expect(try reinstate("2025-02-03Z", "2025-02-03Z") == "1")
        try database.psql("SELECT tokenkeeper.unregister('01', 't', at => '2025-02-01Z')")
        #expect(
            try database.psql("SELECT l.user_id, l.tags, l.suppressed FROM tokenkeeper.ledger AS l") == "anna|{news}|f",
            "it was taken back later")
    }

    @Test func `the guard's counts fall with each step of an undo`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try suspects(100, &daemon)
        try database.psql("SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')")
        let counts = "SELECT coalesce(sum(tokens), 0) FROM tokenkeeper.suppression_count"
        #expect(try database.psql(counts) == "100")
        #expect(try database.psql("SELECT tokenkeeper.undo_next(50)") == "50")
        #expect(try database.psql(counts) == "50")
        try undo(&daemon)
        #expect(try database.psql(counts) == "0")
    }

    @Test func `arguments of any collation are accepted`() throws {
        try database.psql(
            """
            CREATE COLLATION public.nd (provider = icu, locale = 'und', deterministic = false);
            CREATE TABLE public.mine (
                c_topic text COLLATE "C" DEFAULT 't', icu_topic text COLLATE "und-x-icu" DEFAULT 't', nd_topic text COLLATE public.nd DEFAULT 't',
                c_place text COLLATE "C" DEFAULT 'production', icu_place text COLLATE "und-x-icu" DEFAULT 'production',
                nd_place text COLLATE public.nd DEFAULT 'production');
            INSERT INTO public.mine DEFAULT VALUES;
            """, user: "postgres")
        var daemon = try database.connect(user: "a_daemon")
        for topic in ["c_topic", "icu_topic", "nd_topic"] {
            for place in ["c_place", "icu_place", "nd_place"] {
                try suspect("01", at: "2025-02-01Z")
                try drainAll(&daemon)
                for call in [
                    "tokenkeeper.would_reinstate(m.\(topic), m.\(place), '2025-02-01Z', '2025-02-02Z')",
                    "tokenkeeper.reinstate(m.\(topic), m.\(place), '2025-02-01Z', '2025-02-02Z')",
                    "tokenkeeper.discard_held(m.\(topic), m.\(place))",
                ] {
                    #expect(throws: Never.self) {
                        try database.psql("SELECT \(call) FROM public.mine AS m", user: "postgres")
                    }
                }
            }
        }
    }
}
