import LedgerTestSupport
import Testing

@testable import TokenLedger

@Suite struct `Status` {
    @Test func `it tells what a daemon saw and what was counted, and warns in words`() throws {
        let database = try TestCluster.shared.database()
        let look =
            "SELECT queue_depth, queue_depth_estimated, rejected, tokens_active, tokens_stale, live_daemons, warnings FROM tokenkeeper.status"
        #expect(try database.psql(look) == "||0|0|0|0|{\"no daemon has ever run on this database\"}")
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
        #expect(try database.psql(look) == "2|f|0|0|0|1|{}")
        try drain(&daemon)
        try heartbeat.beat(sweepInterval: .seconds(3600), pagesLeft: 0, trouble: nil, on: &daemon)
        var count = TokenCount()
        try count.refresh(on: &daemon, stop: Wakeup())
        #expect(
            try database.psql(look)
                == "0|f|1|2|0|1|{\"1 results could not be understood; see tokenkeeper.rejected_result\"}")
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
}
