import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Many registrations in one call` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func call(_ entries: [String]) -> String {
        "SELECT tokenkeeper.register(ARRAY[\(entries.joined(separator: ","))]::tokenkeeper.new_registration[])"
    }

    /// An element: token, topic, environment, registered_at, device_id, tags, user_id, unregistered.
    private func entry(_ token: String, _ more: String = "'t', NULL, NULL, NULL, NULL, NULL, NULL") -> String {
        "ROW('\(token)', \(more))"
    }

    @Test func `all are recorded as by single calls, and returned in order`() throws {
        var app = try database.connect(user: "a_app")
        let sendable = try app.scalar(
            call([
                entry("<AABB ccdd>", "'t', NULL, '2025-01-02T03:04:05+01:00', 'd', '{World,Sport}', 'ann', NULL"),
                entry("11", "'u', 'sandbox', '2025-01-01Z', NULL, NULL, NULL, false"),
                entry("22", "'t', NULL, '2025-01-01Z', NULL, NULL, NULL, true"),
                entry("33", "'t', NULL, '2025-01-01Z', 'd', NULL, NULL, NULL"),
            ]))
        #expect(sendable == "{t,t,f,f}", "the last is superseded by the first")
        #expect(
            try database.psql(
                """
                SELECT environment, topic, token, state, registered_at AT TIME ZONE 'UTC', device_id, user_id, tags
                FROM tokenkeeper.token ORDER BY topic, token
                """) == """
                    production|t|22|unregistered_by_app||||
                    production|t|33|superseded|2025-01-01 00:00:00|d||{World,Sport}
                    production|t|aabbccdd|active|2025-01-02 02:04:05|d|ann|{World,Sport}
                    sandbox|u|11|active|2025-01-01 00:00:00|||
                    """)
        #expect(
            try database.psql(
                "SELECT token, event, device_id, user_id FROM tokenkeeper.token_event ORDER BY 1, event_id")
                == "11|registered||\n22|unregistered_by_app||\n33|registered|d|\n33|superseded|d|\naabbccdd|registered|d|ann"
        )
    }

    @Test func `JSON becomes an array by a function of PostgreSQL`() throws {
        #expect(
            try database.psql(
                """
                SELECT tokenkeeper.register(ARRAY(SELECT r FROM jsonb_populate_recordset(NULL::tokenkeeper.new_registration,
                    '[{"token": "aa", "topic": "t", "tags": ["World"]}, {"token": "bb", "topic": "t", "unregistered": true}]') AS r))
                """, user: "a_app") == "{t,f}")
        #expect(try database.psql("SELECT tags FROM tokenkeeper.token WHERE token = 'aa'") == "{World}")
    }

    @Test(arguments: [
        (
            "'zz', 't', NULL, NULL, NULL, NULL, NULL, NULL",
            "registration 2: token is 'zz' (2 characters), expected 1 to 512 bytes in hex"
        ),
        (
            "NULL, 't', NULL, NULL, NULL, NULL, NULL, NULL",
            "registration 2: token is null, expected 1 to 512 bytes in hex"
        ),
        (
            "'ab', '', NULL, NULL, NULL, NULL, NULL, NULL",
            "registration 2: topic is missing, expected the apns-topic header"
        ),
        (
            "'ab', 't', 'x', NULL, NULL, NULL, NULL, NULL",
            "registration 2: environment is 'x', expected 'production' or 'sandbox'"
        ),
        (
            "'ab', 't', NULL, 'infinity', NULL, NULL, NULL, NULL",
            "registration 2: registered_at is infinity, expected a finite instant"
        ),
        (
            "'ab', 't', NULL, NULL, repeat('x', 513), NULL, NULL, NULL",
            "registration 2: device_id is 513 bytes long, expected at most 512"
        ),
        (
            "'ab', 't', NULL, NULL, NULL, '{x,NULL}', NULL, NULL",
            "registration 2: a tag is null, expected 1 to 512 bytes"
        ),
    ])
    func `one that register refuses is named, and nothing is recorded`(fields: String, error: String) throws {
        var app = try database.connect(user: "a_app")
        let found = #expect(throws: DatabaseError.self) { try app.run(call([entry("aa"), "ROW(\(fields))"])) }
        #expect(found?.sqlState == "22023" && found?.message.contains(error) == true, "\(found?.message ?? "")")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0")
    }

    @Test func `no element, null and more than 1000 elements`() throws {
        var app = try database.connect(user: "a_app")
        #expect(try app.scalar("SELECT tokenkeeper.register('{}'::tokenkeeper.new_registration[])") == "{}")
        #expect(try app.scalar("SELECT tokenkeeper.register(NULL::tokenkeeper.new_registration[])") == "{}")
        let error = #expect(throws: DatabaseError.self) {
            try app.run(call(Array(repeating: entry("aa"), count: 1_001)))
        }
        #expect(error?.sqlState == "22023")
    }

    @Test func `elements without instants count in the order given`() throws {
        var app = try database.connect(user: "a_app")
        let (login, logout) = (entry("aa"), entry("aa", "'t', NULL, NULL, NULL, NULL, NULL, true"))
        for _ in 0..<20 {
            #expect(try app.scalar(call([login, logout])) == "{f,f}")
            #expect(try app.scalar(call([logout, login])) == "{t,t}")
        }
    }

    @Test func `a logout of a user leaves a token alone that is another's by now`() throws {
        var app = try database.connect(user: "a_app")
        for (token, user) in [("aa", "'ann'"), ("bb", "'bob'"), ("cc", "NULL")] {
            try app.execute(
                "SELECT tokenkeeper.register('\(token)', 't', user_id => \(user), registered_at => '2025-01-01Z')")
        }
        let states = "SELECT token, state, user_id FROM tokenkeeper.token ORDER BY 1"
        #expect(
            try app.scalar(call(["aa", "bb", "cc"].map { entry($0, "'t', NULL, NULL, NULL, NULL, 'ann', true") }))
                == "{f,t,f}")
        #expect(
            try database.psql(states) == "aa|unregistered_by_app|ann\nbb|active|bob\ncc|unregistered_by_app|")
        #expect(try app.scalar("SELECT tokenkeeper.unregister('bb', 't', user_id => 'ann')") == "0")
        try app.execute("SELECT tokenkeeper.register('dd', 'u', 'sandbox', user_id => 'bob')")
        #expect(try app.scalar("SELECT tokenkeeper.unregister(user_id => 'ann')") == "1")
        #expect(try app.scalar("SELECT tokenkeeper.unregister(user_id => 'bob', topic => 't')") == "1")
        #expect(try database.psql("SELECT tokenkeeper.is_sendable('dd', 'u', 'sandbox')") == "t")
        // Before the registration, too.
        #expect(
            try app.scalar("SELECT tokenkeeper.unregister('ee', 't', at => '2025-01-02Z', user_id => 'ann')") == "1")
        #expect(
            try app.scalar("SELECT tokenkeeper.register('ee', 't', registered_at => '2025-01-01Z', user_id => 'ann')")
                == "f")
        #expect(try app.scalar("SELECT tokenkeeper.unregister(user_id => 'ann', topic => 'unknown')") == "0")
        #expect(try app.scalar("SELECT tokenkeeper.unregister(user_id => 'bob')") == "2")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token WHERE sendable") == "0")
        for call in [
            "NULL", "user_id => ''", "'aa', 't', user_id => repeat('u', 513)", "user_id => 'ann', topic => ''",
            "user_id => 'ann', environment => 'x'",
        ] {
            #expect(throws: DatabaseError.self) { try app.execute("SELECT tokenkeeper.unregister(\(call))") }
        }
    }

    @Test func `nothing is recorded if the caller's transaction is rolled back`() throws {
        var app = try database.connect(user: "a_app")
        try app.execute("BEGIN; \(call([entry("aa")])); ROLLBACK")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0")
    }

    @Test func `a call uses one transaction id`() throws {
        var app = try database.connect()
        let entries = (0..<100).map { entry("\(1_000 + $0)", "'t', NULL, NULL, 'd\($0 / 2)', NULL, NULL, NULL") }
        try app.execute("BEGIN; SELECT pg_current_xact_id(); \(call(entries))")
        #expect(
            try app.scalar("SELECT count(DISTINCT xmin::text) FROM tokenkeeper.ledger") == "1", "and no subtransaction")
        try app.execute("COMMIT")
    }

    private struct Said: Sendable {
        var token: String
        var at: Int
        var device: String?
        var user: String?
        var isLogout: Bool

        var element: String {
            let texts = [device, user].map { $0.map { "'\($0)'" } ?? "NULL" }
            return
                "ROW('\(token)', 't', NULL, to_timestamp(\(at)), \(texts[0]), NULL, \(isLogout ? "NULL" : texts[1]), \(isLogout))"
        }

        /// As one call of `register`; a logout is always part of many.
        var single: String {
            let texts = [device, user].map { $0.map { "'\($0)'" } ?? "NULL" }
            return
                "SELECT tokenkeeper.register('\(token)', 't', 'production', to_timestamp(\(at)), \(texts[0]), NULL, \(texts[1]))"
        }
    }

    /// Many calls at once about the same few tokens, devices and users, and single registrations, tags and batches in between.
    @Test(arguments: [(40, 8), (6, 3)])
    func `concurrent calls never deadlock and leave what the model says`(tokens: Int, devices: Int) throws {
        let seed = Seed.next("\(tokens)")
        var chance = SeededChance(seed: seed)
        var model = LedgerModel()
        let batches = (0..<Soak.size(240, whole: 2_000)).map { number in
            (0..<(number.isMultiple(of: 3) ? 1 : Int.random(in: 1...25, using: &chance))).map { _ in
                let isNamed = Int.random(in: 0..<4, using: &chance) != 0
                return Said(
                    token: String(0x10 + Int.random(in: 0..<tokens, using: &chance), radix: 16),
                    at: 1_700_000_000 + Int.random(in: 0..<400, using: &chance),
                    device: isNamed
                        ? ["", "d\(Int.random(in: 0..<devices, using: &chance))"].shuffled(using: &chance)[0] : nil,
                    user: isNamed ? ["", "u1", "u2"].randomElement(using: &chance) : nil,
                    isLogout: !number.isMultiple(of: 3) && Int.random(in: 0..<6, using: &chance) == 0)
            }
        }
        for one in batches.joined() {
            let key = LedgerModel.Key("production", "t", one.token)
            if one.isLogout {
                model.invalidate(key, .unregisteredByApp, one.at, "unregistered by the app")
            } else {
                model.register(key, one.at, device: one.device, user: one.user)
            }
        }
        let workers = 8
        let database = database
        let failures = Failures()
        let statements = batches.map { batch in
            batch.count == 1 && !batch[0].isLogout
                ? batch[0].single : call(batch.map(\.element))
        }
        atOnce(workers) { worker in
            do {
                var app = try database.connect(user: "a_app")
                var daemon = try database.connect(user: "a_daemon")
                for number in stride(from: worker, to: statements.count, by: workers) {
                    try app.execute(statements[number])
                    // What else holds many tokens: a batch, and tags of a user. It adds and removes nothing.
                    switch number % 5 {
                    case 0 where worker == 0: try daemon.applyWaiting()
                    case 1:
                        try app.execute(
                            "SELECT tokenkeeper.tag('t', user_id => 'u\(number % 2 + 1)', remove => '{none}')")
                    default: break
                    }
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [], "seed \(seed)")
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        while try daemon.applyWaiting().applied > 0 {}
        try owner.execute(LedgerModel.settle)
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
    }
}
