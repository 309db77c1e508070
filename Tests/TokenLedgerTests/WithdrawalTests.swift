import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Withdrawing a source` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// Begins a source, and lets these calls of register and unregister be its registrations.
    private func source(_ calls: [String], kind: String = "import", as user: String = "a_app") throws -> Int64 {
        let source = try database.psql(
            """
            INSERT INTO tokenkeeper.registration_source (kind, name, done_by, attachment)
            VALUES ('\(kind)', 'public.devices', '\(user)', CASE '\(kind)' WHEN 'backfill' THEN 1 END) RETURNING source_id
            """)
        let before = try database.psql("SELECT coalesce(max(event_id), 0) FROM tokenkeeper.token_event_log")
        for call in calls { try database.psql("SELECT \(call)") }
        try database.psql(
            "UPDATE tokenkeeper.token_event_log SET source_id = \(source) WHERE event_id > \(before)")
        return try #require(Int64(source))
    }

    /// In batches of this many events, as the login that began the source.
    @discardableResult
    private func withdraw(_ source: Int64, events: Int = 1000, dryRun: Bool = false) throws -> (gone: Int, kept: Int) {
        var (gone, kept, after) = (0, 0, "0")
        while !after.isEmpty {
            let row = try database.psql(
                "SELECT withdrawn, kept, queued, reached FROM tokenkeeper.withdraw(\(source), \(dryRun), \(after), \(events))",
                user: "a_app"
            ).split(separator: "|", omittingEmptySubsequences: false).map(String.init)
            gone += try #require(Int(row[0]))
            kept += try #require(Int(row[1]))
            after = row[3]
        }
        return (gone, kept)
    }

    private func tokens() throws -> Set<String> {
        Set(
            try database.psql("SELECT topic || ' ' || token FROM tokenkeeper.token").split(separator: "\n").map(
                String.init))
    }

    /// The ledger without when it learned something, and without tags: those that a token takes over from another one of its device stay.
    private func ledger() throws -> String {
        try database.psql(
            """
            SELECT t.topic, t.token, t.state, t.registered_at, t.invalidated_at, t.device_id FROM tokenkeeper.token AS t
            ORDER BY t.topic, t.token_key
            """)
    }

    private static let ago = "now() - interval '1 day' - interval '1 minute' * "

    @Test func `a token that an imported one has superseded is current again`() throws {
        try database.psql("SELECT tokenkeeper.register('a1', 't', 'production', \(Self.ago)100, 'phone')")
        let before = try ledger()
        let source = try source([
            "tokenkeeper.register('b1', 't', 'production', \(Self.ago)20, 'phone')",
            "tokenkeeper.register('b2', 't', 'production', \(Self.ago)10, 'phone')",
        ])
        #expect(try database.psql("SELECT token FROM tokenkeeper.sendable_token") == "b2")
        #expect(try withdraw(source).gone == 2)
        #expect(try ledger() == before)
    }

    @Test func `what only new tokens have changed is as it was before`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        func call(_ token: String) -> String {
            let topic = ["t", "t.push-type.liveactivity"][chance.dice(4) / 3]
            let at = "\(Self.ago)\(chance.dice(1000))"
            if chance.dice(6) == 0 { return "tokenkeeper.unregister('\(token)', '\(topic)', 'production', \(at))" }
            let device = chance.dice(4) == 0 ? "NULL" : "'phone\(chance.dice(5))'"
            let tags = chance.dice(2) == 0 ? "NULL" : "ARRAY['x\(chance.dice(3))']"
            return "tokenkeeper.register('\(token)', '\(topic)', 'production', \(at), \(device), \(tags))"
        }
        for _ in 0..<60 { try database.psql("SELECT \(call("a\(chance.dice(9))"))") }
        let before = try ledger()
        let calls = (0..<80).map { _ in call("b\(chance.dice(9))") }
        let source = try source(calls)
        #expect(try tokens().contains { $0.contains(" b") })
        let counted = try withdraw(source, dryRun: true)
        #expect(try withdraw(source, events: 1 + chance.dice(20)).gone == counted.gone, "seed \(seed)")
        #expect(try ledger() == before, "seed \(seed)")
    }

    @Test func `exactly the tokens that nothing has touched are removed`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let known = Set((0..<20).map { _ in String(format: "%04x", chance.dice(60)) })
        for token in known {
            try database.psql(
                "SELECT tokenkeeper.register('\(token)', 't', 'production', \(Self.ago)\(chance.dice(1000)))")
        }
        let said = (0..<100).map { _ in String(format: "%04x", chance.dice(60)) }
        let source = try source(
            said.map { token in
                let call = chance.dice(5) == 0 ? "unregister" : "register"
                return "tokenkeeper.\(call)('\(token)', 't', 'production', \(Self.ago)\(chance.dice(1000)))"
            })
        var touched: Set<String> = []
        for _ in 0..<15 {
            let token = String(format: "%04x", chance.dice(60))
            touched.insert(token)
            let touch = [
                "SELECT tokenkeeper.register('\(token)', 't')", "SELECT tokenkeeper.unregister('\(token)', 't')",
                "SELECT tokenkeeper.register('\(token)', 't', tags => ARRAY['vip'])",
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at) "
                    + "VALUES ('t', '\(token)', '400', '{\"reason\":\"BadDeviceToken\"}', now())",
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) "
                    + "VALUES ('t', '\(token)', '410', '{\"reason\":\"Unregistered\",\"timestamp\":1700000000000}')",
            ][chance.dice(5)]
            // The source has ended, so that 410s from here on are not its own.
            try database.psql(
                "UPDATE tokenkeeper.registration_source SET finished_at = clock_timestamp() WHERE finished_at IS NULL; \(touch)"
            )
        }
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        let all = try tokens()
        let expected = Set(said).subtracting(known).subtracting(touched)
        let list = try database.psql(
            "SELECT token FROM tokenkeeper.made_by(\(source)) WHERE kept_because IS NULL", user: "a_operator")
        #expect(Set(list.split(separator: "\n").map(String.init)) == expected, "seed \(seed)")
        #expect(try withdraw(source, dryRun: true).gone == expected.count, "seed \(seed)")
        #expect(try tokens() == all)
        #expect(try withdraw(source, events: 1 + chance.dice(30)).gone == expected.count, "seed \(seed)")
        #expect(try tokens() == all.subtracting(expected.map { "t \($0)" }), "seed \(seed)")
        #expect(
            try database.psql("SELECT rows FROM tokenkeeper.operation WHERE operation = 'withdrawn'")
                == "\(expected.count)")
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'pruned' AND cause = 'withdrawn'")
                == "\(expected.count)")
        // A second time, nothing is left.
        #expect(try withdraw(source).gone == 0)
    }

    @Test func `what a second source made again is removed, too`() throws {
        for round in 1...3 {
            let source = try source((1...3).map { "tokenkeeper.register('0\($0)', 't', 'production', \(Self.ago)1)" })
            #expect(try withdraw(source) == (3, 0), "round \(round)")
            #expect(try tokens().isEmpty)
        }
    }

    @Test func `nothing is removed while registrations of the source are queued, and it queues no more`() throws {
        let source = try source(["tokenkeeper.register('01', 't', 'production', \(Self.ago)1)"])
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, source_id) VALUES ('t', '02', \(source))",
            user: "a_app")
        #expect(
            try database.psql("SELECT * FROM tokenkeeper.withdraw(\(source))", user: "a_app") == "0|0|1|0")
        #expect(try tokens() == ["t 01"])
        let error = #expect(throws: (any Error).self) {
            try database.psql("SELECT tokenkeeper.advance_source(\(source), 'x', 1, 0)", user: "a_app")
        }
        #expect("\(String(describing: error))".contains("it was withdrawn"))
        try database.psql("DELETE FROM tokenkeeper.registration")
        #expect(try withdraw(source) == (1, 0))
    }

    @Test func `a token that an application has locked is kept`() throws {
        let source = try source(
            (1...2).map { "tokenkeeper.register('0\($0)', 't', 'production', \(Self.ago)1, 'phone\($0)')" })
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = '\\x01' FOR UPDATE")
        #expect(try withdraw(source) == (1, 1))
        try app.execute("ROLLBACK")
        #expect(try tokens() == ["t 01"])
        #expect(try withdraw(source) == (1, 0))
    }

    @Test func `only the login that began it and operators may withdraw a source, and no attached table`() throws {
        let source = try source(["tokenkeeper.register('01', 't', 'production', \(Self.ago)1)"], as: "owner")
        for (user, message) in [("a_app", "there is no source"), ("a_reader", "permission denied")] {
            let error = #expect(throws: (any Error).self) {
                try database.psql("SELECT tokenkeeper.withdraw(\(source))", user: user)
            }
            #expect("\(String(describing: error))".contains(message), "\(user): \(String(describing: error))")
        }
        // Nor may another login say how far an import has come.
        let foreign = #expect(throws: (any Error).self) {
            try database.psql("SELECT tokenkeeper.advance_source(\(source), 'x', 1, 0)", user: "a_app")
        }
        #expect("\(String(describing: foreign))".contains("there is no import \(source) of a_app"))
        #expect(throws: (any Error).self, "a position of any length") {
            try database.psql("SELECT tokenkeeper.advance_source(\(source), repeat('x', 4097), 1, 0)", user: "owner")
        }
        #expect(
            try database.psql("SELECT withdrawn FROM tokenkeeper.withdraw(\(source))", user: "a_operator") == "1")
        let attachment = try database.psql(
            "INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices') RETURNING source_id"
        )
        let error = #expect(throws: (any Error).self) {
            try database.psql("SELECT tokenkeeper.withdraw(\(attachment))", user: "a_operator")
        }
        #expect("\(String(describing: error))".contains("is the attachment of public.devices"))
    }

    @Test func `neither receipts nor held logouts nor rejected registrations of the source are left`() throws {
        let source = try database.psql("SELECT tokenkeeper.begin_import('devices.csv')", user: "a_app")
        let other = try database.psql("SELECT tokenkeeper.begin_import('other.csv')", user: "a_app")
        try database.psql(
            """
            SELECT count(tokenkeeper.register('0' || n, 't', 'production', \(Self.ago)1)) FROM generate_series(1, 9) AS n;
            UPDATE tokenkeeper.topic_policy SET guard_allowance = 1, guard_max_share = 0;
            INSERT INTO tokenkeeper.registration (topic, token, unregistered, source_id)
            VALUES ('t', 'b1', true, \(source)), ('t', '01', true, \(source)), ('t', '02', true, \(source)), ('t', 'zz', false, \(source)),
                   ('t', 'b2', true, \(other)), ('t', '03', true, \(other)), ('t', '04', true, \(other)), ('t', 'yy', false, \(other));
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        let left = """
            SELECT (SELECT string_agg(encode(token_key, 'hex'), ' ' ORDER BY token_key) FROM tokenkeeper.receipt),
                   (SELECT string_agg(token, ' ' ORDER BY token) FROM tokenkeeper.held_registration),
                   (SELECT string_agg(token, ' ' ORDER BY token) FROM tokenkeeper.rejected_registration)
            """
        #expect(try database.psql(left) == "b1 b2|01 02 03 04|yy zz")
        #expect(try withdraw(Int64(source) ?? 0, dryRun: true) == (1, 0))
        #expect(try database.psql(left) == "b1 b2|01 02 03 04|yy zz")
        #expect(try withdraw(Int64(source) ?? 0) == (1, 0))
        #expect(try database.psql(left) == "b2|03 04|yy")
    }

    @Test func `a backfill that was withdrawn does not continue`() throws {
        let devices = try AttachedDevices()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) SELECT md5(n::text), now() FROM generate_series(1, 30) AS n"
        )
        try devices.attach()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        let next = "SELECT finished FROM tokenkeeper.backfill_next(\(source), 10)"
        #expect(try devices.app(next) == "f")
        try devices.forgetQueue()
        try devices.app("SELECT tokenkeeper.withdraw(\(source))")
        let error = #expect(throws: (any Error).self) { try devices.app(next) }
        #expect("\(String(describing: error))".contains("is no backfill that goes on"))
    }
}
