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

    private func call(_ entries: String, _ more: String = ", 't'") -> String {
        "SELECT position, error FROM tokenkeeper.register_many('\(entries.replacingOccurrences(of: "'", with: "''"))'\(more)) ORDER BY 1"
    }

    @Test func `what is refused is returned with its cause, and the rest is recorded`() throws {
        var app = try database.connect(user: "a_app")
        let refused = try app.lines(
            call(
                """
                [{"token": "<AABB ccdd>", "device_id": "d", "user_id": "ann", "tags": ["World", "Sport"], "registered_at": "2025-01-02T03:04:05+01:00"},
                 {"token": "zz"}, {"token": "11", "topic": "u", "environment": "sandbox", "registered_at": "2025-01-01", "unregistered": null},
                 {"token": "ab", "devise_id": "x"}, {"token": 5}, {"token": "ab", "registered_at": "soon"},
                 {"token": "ab", "registered_at": "infinity"}, {"token": "ab", "tags": "x"}, {"token": "ab", "tags": [null]},
                 {"token": "ab", "tags": [""]}, {"token": "ab", "tags": [["x"]]}, {"token": "ab", "unregistered": "yes"}, [], null, "ab",
                 {"token": "ab", "environment": "x"}, {"token": "ab", "topic": ""}, {"topic": "t"}, {},
                 {"token": "22", "unregistered": true, "registered_at": "2025-01-01"}]
                """), columns: 2)
        #expect(
            refused == [
                "2|token is 'zz' (2 characters), expected 1 to 512 bytes in hex",
                "4|the key is 'devise_id', expected environment, topic, token, registered_at, device_id, user_id, tags or unregistered",
                "5|token is of type number, expected string",
                "6|registered_at is 'soon', expected an instant such as 2026-01-31T23:59:59Z",
                "7|registered_at is infinity, expected a finite instant", "8|tags is of type string, expected array",
                "9|a tag is of type null, expected a string of 1 to 512 bytes",
                "10|a tag is 0 bytes long, expected a string of 1 to 512 bytes",
                "11|a tag is of type array, expected a string of 1 to 512 bytes",
                "12|unregistered is of type string, expected boolean", "13|the entry is array, expected an object",
                "14|the entry is null, expected an object", "15|the entry is string, expected an object",
                "16|environment is 'x', expected 'production' or 'sandbox'",
                "17|topic is missing, expected the apns-topic header",
                "18|token is null, expected 1 to 512 bytes in hex", "19|token is null, expected 1 to 512 bytes in hex",
            ])
        #expect(
            try database.psql(
                """
                SELECT environment, topic, token, state, registered_at AT TIME ZONE 'UTC', device_id, user_id, tags
                FROM tokenkeeper.token ORDER BY topic, token
                """) == """
                    production|t|22|unregistered_by_app||||
                    production|t|aabbccdd|active|2025-01-02 02:04:05|d|ann|{World,Sport}
                    sandbox|u|11|active|2025-01-01 00:00:00|||
                    """)
        #expect(
            try database.psql("SELECT token, event, device_id, user_id FROM tokenkeeper.token_event ORDER BY 1")
                == "11|registered||\n22|unregistered_by_app||\naabbccdd|registered|d|ann")
    }

    @Test func `the limits of a text are those of register`() throws {
        let long = String(repeating: "x", count: 513)
        for field in ["device_id", "user_id", "topic"] {
            let refused = try database.psql(call(#"[{"token": "aa", "\#(field)": "\#(long)"}]"#), user: "a_app")
            #expect(refused.hasPrefix("1|\(field) is 513 bytes long, expected"))
            #expect(
                try database.psql(call(#"[{"token": "aa", "\#(field)": "\#(long.dropLast())"}]"#), user: "a_app") == "")
        }
        let tags = Array(repeating: #""x""#, count: 1001).joined(separator: ",")
        #expect(
            try database.psql(call(#"[{"token": "aa", "tags": [\#(tags)]}]"#), user: "a_app")
                == "1|tags has 1001 elements, expected at most 1000")
    }

    @Test func `base64 is read on request`() throws {
        #expect(try database.psql(call(#"[{"token": "q83v"}]"#, ", 't', 'sandbox', true")) == "")
        #expect(try database.psql("SELECT environment, token FROM tokenkeeper.token") == "sandbox|abcdef")
    }

    @Test(arguments: ["NULL", "'{}'", "'5'", "(SELECT jsonb_agg(i) FROM generate_series(1, 1001) AS i)"])
    func `what is not an array of at most 1000 entries raises an error`(entries: String) throws {
        var app = try database.connect(user: "a_app")
        let error = #expect(throws: DatabaseError.self) {
            try app.execute("SELECT * FROM tokenkeeper.register_many(\(entries))")
        }
        #expect(error?.sqlState == "22023")
    }

    @Test func `entries without instants count in the order given`() throws {
        var app = try database.connect(user: "a_app")
        let logout = #"{"token": "aa", "unregistered": true}"#
        let login = #"{"token": "aa"}"#
        let sendable = "SELECT tokenkeeper.is_sendable('aa', 't')"
        for _ in 0..<20 {
            try app.execute(call("[\(login),\(logout)]"))
            #expect(try database.psql(sendable) == "f")
            try app.execute(call("[\(logout),\(login)]"))
            #expect(try database.psql(sendable) == "t")
        }
    }

    @Test func `nothing is recorded if the caller's transaction is rolled back`() throws {
        var app = try database.connect(user: "a_app")
        try app.execute("BEGIN; \(call(#"[{"token": "aa", "device_id": "d"}, {"token": "zz"}]"#)); ROLLBACK")
        #expect(
            try database.psql(
                "SELECT (SELECT count(*) FROM tokenkeeper.ledger), (SELECT count(*) FROM tokenkeeper.device)") == "0|0")
    }

    @Test func `an empty array records nothing`() throws {
        #expect(try database.psql(call("[]"), user: "a_app") == "")
    }

    /// A registration that waits for one of the devices may hold one of the tokens.
    @Test func `a registration that waits for a device of the call is not ended by a deadlock`() throws {
        var single = try database.connect(user: "a_app")
        try single.execute(
            "SELECT tokenkeeper.register(t, 't', device_id => 'd' || t) FROM unnest('{aa,bb}'::text[]) AS t")
        try single.execute("BEGIN; SELECT tokenkeeper.register('aa', 't', user_id => 'ann')")
        let (database, failures) = (database, Failures())
        // The call, which connects after this, has looked for a deadlock before there is one, and does not look again.
        try database.psql("ALTER DATABASE \(database.name) SET deadlock_timeout = '1ms'", user: "postgres")
        let done = DispatchGroup()
        done.enter()
        Thread.detachNewThread {
            do {
                try database.psql(call(#"[{"token": "aa", "device_id": "dbb"}]"#), user: "a_app")
            } catch {
                failures.add("\(error)")
            }
            done.leave()
        }
        try eventually("the call waits for the token") {
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                user: "postgres") == "1"
        }
        try single.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'dbb')")
        try single.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
        #expect(
            try database.psql(
                "SELECT string_agg(token || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token WHERE device_id = 'dbb'"
            )
                == "aa superseded, bb superseded, cc active")
    }

    private struct Said: Sendable {
        var token: String
        var at: Int
        var device: String?
        var user: String?
        var isLogout: Bool

        var json: String {
            let fields = [("device_id", device), ("user_id", user)].compactMap { name, value in
                value.map { #", "\#(name)": "\#($0)""# }
            }
            let instant = Date(timeIntervalSince1970: Double(at)).formatted(.iso8601)
            return
                #"{"token": "\#(token)", "registered_at": "\#(instant)", "unregistered": \#(isLogout)\#(fields.joined())}"#
        }

        /// As one call of `register`; a logout is always part of many.
        var single: String {
            let texts = [device, user].map { $0.map { "'\($0)'" } ?? "NULL" }
            return
                "SELECT tokenkeeper.register('\(token)', 't', 'production', to_timestamp(\(at)), \(texts[0]), NULL, \(texts[1]))"
        }
    }

    /// Many calls at once about the same few tokens, devices and users, and single registrations in between.
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
                model.unregister(key, one.at)
            } else {
                model.register(key, one.at, device: one.device, user: one.user)
            }
        }
        let workers = 8
        let database = database
        let failures = Failures()
        let statements = batches.map { batch in
            batch.count == 1 && !batch[0].isLogout
                ? batch[0].single : call("[" + batch.map(\.json).joined(separator: ",") + "]")
        }
        atOnce(workers) { worker in
            do {
                var app = try database.connect(user: "a_app")
                for statement in stride(from: worker, to: statements.count, by: workers).map({ statements[$0] }) {
                    try app.execute(statement)
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [], "seed \(seed)")
        var owner = try database.connect()
        let told = Set(try owner.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        let wanted = model.told()
        #expect(
            told == wanted,
            "seed \(seed): told \(told.subtracting(wanted).sorted().prefix(3)), the model says \(wanted.subtracting(told).sorted().prefix(3))"
        )
    }
}
