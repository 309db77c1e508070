import APNsFeedback
import LedgerTestSupport
import Testing

@testable import TokenLedger

@Suite struct `Undo` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let ledger = """
        SELECT topic_id, encode(token_key, 'hex'), registered_at, dead_at, dead_reason, suspect_at, suspect_reason, unregistered_at,
               superseded_at, suppressed_since, device_id
        FROM tokenkeeper.ledger ORDER BY topic_id, token_key
        """

    private func suspect(_ token: String, at: String, reason: String = "BadDeviceToken", topic: String = "t") throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            VALUES ('\(topic)', '\(token)', 400, '{"reason":"\(reason)"}', '\(at)')
            """)
    }

    private func reinstate(_ since: String, _ until: String) throws -> String {
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', '\(since)', '\(until)')", user: "a_operator")
    }

    @Test func `undone, the ledger is row by row what it was, and stays so when the same comes again`() throws {
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
        try drain(&daemon)
        var owner = try database.connect()
        let before = try owner.lines(Self.ledger, columns: 11)
        // All of them, one that nobody has registered, and one that is a day later.
        for round in 1...2 {
            for token in ["01", "02", "03", "04", "05", "06", "66", "77"] { try suspect(token, at: "2025-02-01Z") }
            try drain(&daemon)
            #expect(
                try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE state = 'suspect'")
                    == (round == 1 ? "7" : "1"),
                "all but 03, which was registered later; and the second time 04, as before")
            if round == 1 {
                #expect(try owner.lines(Self.ledger, columns: 11) != before)
                #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "3", "01, 66 and 77 may be sent to again")
            }
            #expect(try owner.lines(Self.ledger, columns: 11) == before)
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
            "INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at) VALUES ('t', '03', 410, '2025-01-05Z')"
        )
        for token in ["01", "02", "03"] { try suspect(token, at: "2025-02-01Z") }
        try drain(&daemon)
        let tell =
            "SELECT token, state, invalidated_at AT TIME ZONE 'UTC', reason FROM tokenkeeper.token ORDER BY token"
        #expect(
            try database.psql("SELECT DISTINCT state FROM tokenkeeper.token") == "suspect")
        #expect(try reinstate("2025-01-31Z", "2025-02-02Z") == "0")
        #expect(
            try database.psql(tell) == """
                01|suspect|2025-01-05 00:00:00|DeviceTokenNotForTopic
                02|unregistered_by_app|2025-01-05 00:00:00|unregistered by the app
                03|stale|2025-01-05 00:00:00|(none given)
                """)
        // And both windows, in whatever order.
        #expect(try reinstate("2025-01-01Z", "2025-01-06Z") == "1")
        #expect(try database.psql("SELECT token FROM tokenkeeper.sendable_token") == "01")
    }

    @Test func `suspects outside the window, of other topics and environments stand`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try suspect("02", at: "2025-02-03Z")
        try suspect("01", at: "2025-02-01Z", topic: "u")
        try drain(&daemon)
        #expect(try reinstate("2025-02-01Z", "2025-02-02T23:59:59Z") == "1")
        #expect(try database.psql("SELECT topic, token FROM tokenkeeper.token ORDER BY 1") == "t|02\nu|01")
    }

    @Test func `what is recorded at the same time is undone too`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try drain(&daemon)
        var operatorSession = try database.connect()
        try operatorSession.execute(
            "BEGIN; SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-10Z')")
        try suspect("01", at: "2025-02-05Z")
        var intake = Intake(
            lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        #expect(try intake.onePass(on: &daemon).putAside == 1, "it waits for the operator")
        try operatorSession.execute("COMMIT")
        try drain(&daemon)
        #expect(try database.psql("SELECT state FROM tokenkeeper.token") == "active")
    }

    @Test(arguments: [
        ("'t', 'production', NULL, now()", "22023"), ("'t', 'production', now(), now() - interval '1 s'", "22023"),
        ("'t', 'production', '-infinity', now()", "22023"), ("'typo', 'production', now(), now()", "22023"),
        ("'t', 'staging', now(), now()", "22023"), ("NULL, NULL, now(), now()", "22023"),
    ])
    func `a window or a topic that is none is a clear error`(_ arguments: String, _ state: String) throws {
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

    @Test func `a window that ends in the future ends now, and one that is there already is no other`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        #expect(try reinstate("2025-02-01Z", "2100-01-01Z") == "0")
        #expect(
            try database.psql("SELECT until <= now() FROM tokenkeeper.reinstatement", user: "a_operator") == "t")
        #expect(try reinstate("2025-03-01Z", "2025-04-01Z") == "0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.reinstatement") == "1")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.operation") == "1")
    }

    @Test func `what is written down does not depend on the operator's session`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't')")
        var someone = try database.connect(user: "a_operator")
        try someone.execute(
            "SET datestyle = 'German'; SET timezone = 'Asia/Tokyo'; SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-02Z')"
        )
        #expect(
            try database.psql("SELECT message FROM tokenkeeper.operation")
                == "suspects from 2025-02-01 00:00:00+00 to 2025-02-02 00:00:00+00 do not count")
    }

    @Test func `a 410 that came after the undone suspect has its whole retention before it`() throws {
        try database.psql("SELECT tokenkeeper.register('01', 't', registered_at => '2025-01-01Z')")
        var daemon = try database.connect(user: "a_daemon")
        try suspect("01", at: "2025-02-01Z")
        try drain(&daemon)
        try database.psql("UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '85 days'")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at) VALUES ('t', '01', 410, '2025-01-20Z')"
        )
        try drain(&daemon)
        #expect(try reinstate("2025-02-01Z", "2025-02-01Z") == "0")
        #expect(
            try database.psql(
                "SELECT t.state, l.suppressed_since > now() - interval '5 minutes' FROM tokenkeeper.token AS t JOIN tokenkeeper.ledger AS l USING (token_key)"
            ) == "stale|t")
    }
}
