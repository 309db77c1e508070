import APNsFeedback
import LedgerTestSupport
import Testing

@testable import TokenLedger

@Suite struct `Status` {
    @Test func `it tells what a daemon saw and what was counted, and warns in words`() throws {
        let database = try TestCluster.shared.database()
        let look =
            "SELECT queue_depth, queue_depth_estimated, rejected, held, tokens_active, tokens_stale, live_daemons, warnings FROM tokenkeeper.status"
        #expect(try database.psql(look) == "||0|0|0|0|0|{\"no daemon has ever run on this database\"}")
        try database.psql(
            "SELECT tokenkeeper.register(t, 't') FROM unnest('{aa,bb}'::text[]) AS t; SELECT tokenkeeper.unregister('cc', 't')"
        )
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'zz', 410), ('t', 'bb', 410)",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        try heartbeat.beat(sweepInterval: .seconds(3600), pagesLeft: 0, trouble: nil, on: &daemon)
        #expect(try database.psql(look) == "2|f|0|0|0|0|1|{}")
        try drain(&daemon)
        try heartbeat.beat(sweepInterval: .seconds(3600), pagesLeft: 0, trouble: nil, on: &daemon)
        var count = TokenCount()
        try count.refresh(on: &daemon, stop: Wakeup())
        #expect(
            try database.psql(look)
                == "0|f|1|0|2|0|1|{\"1 results could not be understood, 1 of them within the last hour; see `tokenkeeperd rejected list`\"}"
        )
        #expect(
            try database.psql("SELECT state, tokens FROM tokenkeeper.token_count ORDER BY 1")
                == "active|2\nunregistered_by_app|1")
        try heartbeat.farewell(on: &daemon)
        #expect(
            try database.psql(
                "SELECT live_daemons, warnings::text LIKE '%no daemon is running; the last was seen at%' FROM tokenkeeper.status"
            ) == "0|t")
    }

    @Test func `a count takes states that are gone away`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't'); SELECT tokenkeeper.register('bb', 't')")
        var first = TokenCount()
        try first.refresh(on: &owner, stop: Wakeup())
        let look = "SELECT state, tokens FROM tokenkeeper.token_count ORDER BY 1"
        #expect(try owner.lines(look, columns: 2) == ["active|1", "unregistered_by_app|1"])
        try owner.execute("SELECT tokenkeeper.register('aa', 't')")
        var second = TokenCount()
        try second.refresh(on: &owner, stop: Wakeup())
        #expect(try owner.lines(look, columns: 2) == ["active|2"])
    }

    @Test func `a count that is under way ends when it is told to`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let stop = Wakeup()
        stop.ring()
        let error = #expect(throws: DatabaseError.self) {
            _ = try owner.query("SELECT pg_sleep(600)", cancelWhen: stop)
        }
        #expect(error?.sqlState == "57014")
        #expect(try owner.scalar("SELECT 1") == "1", "the connection is still good")
    }

    @Test func `the report has JSON for programs and names for people`() throws {
        let database = try TestCluster.shared.database()
        var reader = try database.connect(user: "a_reader")
        let report = try StatusReport(on: &reader)
        #expect(report.json.hasPrefix(#"{"queue_depth":null,"queue_depth_estimated":null,"oldest_result_age":null"#))
        #expect(report.fields.contains { $0 == ("live_daemons", "0") })
        #expect(report.warnings == ["no daemon has ever run on this database"])
    }

    private func warnings(_ database: TestDatabase) throws -> [String] {
        try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").split(separator: "\n").map(String.init)
            .filter { !$0.contains("no daemon") }
    }

    private func count(_ database: TestDatabase) throws {
        var daemon = try database.connect(user: "a_daemon")
        var count = TokenCount()
        try count.refresh(on: &daemon, stop: Wakeup())
    }

    @Test func `it warns of a topic that has results and no registrations`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', t, registered_at => now() - interval '25 hours') FROM unnest('{t,u,new,quiet}'::text[]) AS t;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT t, 'aa', 200 FROM unnest('{t,u,new,never}'::text[]) AS t;
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('never', 'bb', 410);
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drain(&daemon)
        try database.psql(
            """
            UPDATE tokenkeeper.topic SET first_seen = first_seen - interval '25 hours' WHERE topic <> 'new';
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
                SELECT now() - h * interval '1 hour', 'production', 'accepted.only', 200, 5 FROM unnest('{1,30}'::int[]) AS h;
            """)
        try database.psql("SELECT tokenkeeper.register('bb', 'u')")
        try count(database)
        #expect(
            try warnings(database)
                == ["accepted.only", "never", "t"].map {
                    "\($0) (production) had results within 24 hours, but no registration: does the app call tokenkeeper.register?"
                })
    }

    @Test func `it warns of tokens whose environment is mixed up`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', e, registered_at => now() - interval '1 hour')
            FROM unnest('{aa,bb,cc}'::text[]) AS t, unnest('{production,sandbox}'::text[]) AS e;
            SELECT tokenkeeper.register('dd', 't', registered_at => now() - interval '1 hour');
            SELECT tokenkeeper.unregister('cc', 't', 'sandbox');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                SELECT 't', t, 400, '{"reason":"BadDeviceToken"}' FROM unnest('{aa,cc,dd}'::text[]) AS t;
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drain(&daemon)
        try count(database)
        #expect(
            try warnings(database) == [
                "1 tokens of t are suspect in production, where they were registered, and active in the other environment: does the app say the right environment?"
            ])
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        try count(database)
        #expect(try warnings(database) == [])
    }

    @Test func `it warns of an open guard and of what it holds`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '1 hour') FROM generate_series(1, 100) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                SELECT 't', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(1, 60) AS i;
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drain(
            &daemon,
            intake: Intake(
                lockTimeout: .milliseconds(50), guardLimits: GuardLimits(minTokens: 50, maxShare: .percent(0)),
                interpret: Interpretation.verdict(on:)))
        let told = try warnings(database)
        #expect(
            told.count == 2
                && told.first == "60 results are held by the mass-failure guard; see `tokenkeeperd held list`")
        #expect(told.last?.hasPrefix("the mass-failure guard of t (production) is open since ") ?? false)
        #expect(
            told.last?.hasSuffix(
                "suspects would silence 60 tokens within a day, of 100 active ones; see `tokenkeeperd held list`")
                ?? false)
        #expect(try database.psql("SELECT held FROM tokenkeeper.status") == "60")
    }
}
