import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What else an application may do in a session: its settings, its errors, and shards that were restarted.
@Suite(.ownThread) struct `A session on a router` {
    private static let topic = "com.example.app"
    private static let tokens = (0..<12).map { String(format: "%064x", $0 + 1) }
    /// 4 March in Kolkata, which is 3 April in another order, and whose time zone abbreviates to that of Israel.
    private static let settings = "SET datestyle = 'SQL, DMY'; SET timezone = 'Asia/Kolkata'; "
    private static let instant = "'2026-03-04 05:06:07.123456+00'"

    /// What psql prints on standard error: the SQLSTATE, the message and the hint.
    private func complaint(_ sql: String, on database: TestDatabase, as user: String) throws -> String {
        let run = try ProgramRun(
            [
                "psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-v", "SHOW_CONTEXT=never", "-d", database.url(user: user),
                "-c",
                "CREATE TEMPORARY TABLE device (token text)", "-c", sql, "-c", "SELECT 1",
            ])
        return "\(run.status): \(run.errors)"
    }

    @Test func `an instant arrives as it is, whatever DateStyle and TimeZone the session has`() throws {
        let stage = try TestShards()
        let router = stage.routers[0]
        let (one, other) = (Self.tokens[0], Self.tokens[1])
        try router.psql(
            """
            \(Self.settings)
            SELECT tokenkeeper.register('\(one)', '\(Self.topic)', registered_at => \(Self.instant)),
                tokenkeeper.register('\(other)', '\(Self.topic)', registered_at => '2026-01-01Z');
            SELECT tokenkeeper.unregister('\(other)', '\(Self.topic)', at => \(Self.instant));
            SELECT tokenkeeper.tag('\(Self.topic)', token => '\(one)', add => '{x}', changed_at => \(Self.instant))
            """, user: "a_app")
        try router.psql(
            """
            \(Self.settings)
            SELECT tokenkeeper.report('\(Self.topic)', '\(other)', 410, 'Unregistered', \(Self.instant)::timestamptz, \(Self.instant));
            SELECT tokenkeeper.enqueue(
                '{"aps":{"alert":"A"}}', '\(Self.topic)', everyone => true, scheduled_at => \(Self.instant)::timestamptz + interval '100 years')
            """, user: "a_sender")
        try router.psql(
            "\(Self.settings) SELECT tokenkeeper.reinstate('\(Self.topic)', 'production', \(Self.instant), \(Self.instant)::timestamptz + interval '1 hour')",
            user: "a_operator")
        let found = try stage.shards.map {
            try $0.psql(
                """
                SET timezone = 'UTC';
                SELECT 'registered ' || registered_at FROM tokenkeeper.token WHERE token = '\(one)'
                UNION ALL SELECT 'tagged ' || c.changed_at FROM tokenkeeper.ledger AS l CROSS JOIN unnest(l.tag_changes) AS c
                UNION ALL SELECT 'unregistered ' || invalidated_at FROM tokenkeeper.token WHERE token = '\(other)'
                UNION ALL SELECT 'sent ' || sent_at FROM tokenkeeper.send_result
                UNION ALL SELECT 'reinstated ' || since FROM tokenkeeper.reinstatement
                UNION ALL SELECT 'scheduled ' || scheduled_at - interval '100 years' FROM tokenkeeper.campaign
                """)
        }.flatMap { $0.split(separator: "\n") }
        let instant = "2026-03-04 05:06:07.123456+00"
        let what = ["registered", "tagged", "unregistered", "sent", "reinstated", "scheduled"]
        #expect(Set(found.map(String.init)) == Set(what.map { "\($0) \(instant)" }), "\(found)")
    }

    @Test func `attach and the other functions of attached tables say that a router has none`() throws {
        let router = try TestShards().routers[0]
        for (call, user) in [
            ("tokenkeeper.attach('device', token => 'token', topic_value => 't')", "a_app"),
            ("tokenkeeper.detach('device')", "a_app"),
            ("tokenkeeper.compare('device')", "a_app"),
            ("tokenkeeper.reconcile('device')", "a_app"),
            ("tokenkeeper.set_cleaning('device')", "a_app"),
            ("tokenkeeper.restore_cleaned('device', since => now())", "a_app"),
        ] {
            let error = try complaint("SELECT * FROM \(call)", on: router, as: user)
            #expect(error.hasPrefix("1: ERROR:  this database is a router, which has no attached tables: "), "\(error)")
            #expect(error.contains("HINT:  Register through the router instead: "), "\(error)")
            let failure = try #require(throws: DatabaseError.self) {
                var connection = try router.connect(user: user)
                try connection.run("CREATE TEMPORARY TABLE device (token text); SELECT * FROM \(call)")
            }
            #expect(failure.sqlState == "0A000")
        }
    }

    @Test func `what every shard refuses is refused as one database does it, with its hint`() throws {
        let stage = try TestShards()
        let one = try TestCluster.shared.database()
        for (call, user) in [
            ("tokenkeeper.forget('no token')", "a_app"), ("tokenkeeper.release_held('unknown')", "a_operator"),
            ("tokenkeeper.reinstate('unknown', 'production', '2026-01-01', '2026-01-02')", "a_operator"),
            ("tokenkeeper.pause_sending('t', 'nowhere')", "a_operator"),
            ("tokenkeeper.cancel_campaign(99)", "a_sender"),
        ] {
            let expected = try complaint("SELECT \(call)", on: one, as: user)
            #expect(try complaint("SELECT \(call)", on: stage.routers[0], as: user) == expected)
            #expect(expected.hasPrefix("1: ERROR:  "), "\(expected)")
            if call.contains("unknown") { #expect(expected.contains("HINT:  "), "\(expected)") }
        }
        let undo = "SELECT tokenkeeper.undo_next() IS NULL"
        #expect(try one.psql(undo, user: "a_operator") == "t")
        #expect(try stage.routers[0].psql(undo, user: "a_operator") == "t", "a caller repeats it until it is null")
    }

    @Test
    func `a shard that was restarted is reached again: by queues and views at once, by functions after one error`()
        throws
    {
        let last = try TestCluster.prepared()
        let stage = try TestShards(last: last)
        let router = stage.routers[0]
        let token = try #require(
            try Self.tokens.first { try stage.shard(of: $0).name == stage.shards[3].name })
        var app = try router.connect(user: "a_app")
        var sender = try router.connect(user: "a_sender")
        var reader = try router.connect(user: "a_reader")
        let queue = "INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', '\(token)')"
        let gate = "SELECT tokenkeeper.is_sendable('\(token)', 't')"
        let view = "SELECT count(*) FROM tokenkeeper.token"
        for mode in ["fast", "immediate"] {
            // Each session has a connection to the shard.
            try app.run(queue)
            try sender.run(gate)
            try reader.run(view)
            last.stop(mode: mode)
            try last.start()
            try app.run(queue)
            try reader.run(view)
            // Such an error says that the connection has ended. Then there is a new one.
            do {
                try sender.run(gate)
            } catch {
                #expect(["57P01", "57P02", "XX000", "08006"].contains(error.sqlState), "\(error)")
            }
            try sender.run("\(gate); \(gate)")
        }
        #expect(try stage.shards[3].psql("SELECT count(*) FROM tokenkeeper.registration") == "4")
    }
}
