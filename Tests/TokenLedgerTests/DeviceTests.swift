import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `One device, one token` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private struct Said: Sendable {
        var token: String
        /// Empty: it belongs to no device from then on.
        var device: String?
        var at: Int
        var tags: String?
        var user: String?

        func sql(_ topic: String) -> String {
            let device = device.map { "'\($0)'" } ?? "NULL"
            let tags = tags.map { "'{\($0)}'" } ?? "NULL"
            let user = user.map { "'\($0)'" } ?? "NULL"
            return
                "SELECT tokenkeeper.register('\(token)', '\(topic)', 'production', to_timestamp(\(at)), \(device), \(tags), \(user))"
        }

        func apply(to model: inout LedgerModel, _ topic: String) {
            model.register(.init("production", topic, token), at, device: device, tags: tags, user: user)
        }
    }

    /// One of a few devices or users; sometimes nil, which keeps the known one, or empty, which clears it.
    private static func name(_ prefix: String, of count: Int, _ chance: inout SeededChance) -> String? {
        switch Int.random(in: 0..<10, using: &chance) {
        case 0..<2: nil
        case 2: ""
        default: "\(prefix)\(Int.random(in: 0..<count, using: &chance))"
        }
    }

    private func permutations<Value>(_ values: [Value]) -> [[Value]] {
        if values.count < 2 { return [values] }
        return values.indices.flatMap { index in
            var rest = values
            let first = rest.remove(at: index)
            return permutations(rest).map { [first] + $0 }
        }
    }

    @Test func `six registrations of one device leave the same token in every order`() throws {
        let six = (1...6).map { Said(token: "a\($0)", device: "phone", at: 1_700_000_000 + $0) }
        var owner = try database.connect()
        for (number, order) in permutations(six).enumerated() {
            try owner.execute(order.map { $0.sql("t\(number)") }.joined(separator: ";"))
        }
        #expect(try owner.scalar("SELECT count(DISTINCT topic) FROM tokenkeeper.token") == "720")
        #expect(
            try owner.lines(
                "SELECT token, count(*) FROM tokenkeeper.token WHERE sendable GROUP BY 1", columns: 2) == ["a6|720"])
        #expect(
            try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE state = 'superseded'") == "\(720 * 5)")
    }

    @Test func `ties, moves and registrations without a device end alike in every order`() throws {
        let base = 1_700_000_000
        let six = [
            Said(token: "a1", device: "phone", at: base + 10, tags: "x"),
            Said(token: "b1", device: "phone", at: base + 30),
            Said(token: "a1", at: base + 30),
            // The same instant: both are current.
            Said(token: "c1", device: "phone", at: base + 30),
            Said(token: "a1", device: "tablet", at: base + 25),
            Said(token: "b1", device: "tablet", at: base + 15, tags: "y"),
        ]
        var owner = try database.connect()
        var model = LedgerModel()
        for (number, order) in permutations(six).enumerated() {
            try owner.execute(order.map { $0.sql("t\(number)") }.joined(separator: ";"))
            for said in order {
                said.apply(to: &model, "t\(number)")
            }
        }
        #expect(try model.differences(on: &owner) == [])
        let states = "SELECT token, state, device_id FROM tokenkeeper.token WHERE topic = 't0' ORDER BY 1"
        #expect(try database.psql(states) == "a1|active|tablet\nb1|active|phone\nc1|active|phone")
    }

    /// With many devices, and with few, between which tokens move all the time.
    @Test(arguments: [(64, 12), (12, 4), (4, 3)])
    func `thousands of concurrent registrations leave what the model says`(tokens: Int, devices: Int) throws {
        let seed = Seed.next("\(tokens)")
        var chance = SeededChance(seed: seed)
        let base = 1_700_000_000
        var model = LedgerModel()
        let said = (0..<Soak.size(2_500, whole: 10_000)).map { _ in
            Said(
                token: String(0x10 + Int.random(in: 0..<tokens, using: &chance), radix: 16),
                device: Self.name("d", of: devices, &chance),
                at: base + Int.random(in: 0..<400, using: &chance),
                tags: Int.random(in: 0..<4, using: &chance) == 0 ? "g\(Int.random(in: 0..<5, using: &chance))" : nil,
                user: Self.name("u", of: 3, &chance))
        }
        for one in said {
            one.apply(to: &model, "t")
        }
        let workers = 8
        let database = database
        let failures = Failures()
        atOnce(workers) { worker in
            do {
                var app = try database.connect(user: "a_app")
                for one in stride(from: worker, to: said.count, by: workers).map({ said[$0] }) {
                    try app.execute(one.sql("t"))
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [], "seed \(seed)")
        // What met a token that another session held.
        var daemon = try database.connect(user: "a_daemon")
        while try daemon.applyWaiting().applied > 0 {}
        var owner = try database.connect()
        try owner.execute(LedgerModel.settle)
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
    }

    @Test func `the first two tokens of a device that come at once are settled by the next registration`() throws {
        var first = try database.connect()
        var second = try database.connect()
        try first.execute("SELECT tokenkeeper.ensure_topic('production', 't')")
        try first.execute("BEGIN; SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try second.execute("BEGIN; SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try first.execute("COMMIT")
        try second.execute("COMMIT")
        let states = "SELECT token, state FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|active\nbb|active")
        // The usual launch of one of them.
        try first.execute("SELECT tokenkeeper.register('bb', 't')")
        #expect(try database.psql(states) == "aa|superseded\nbb|active")
    }

    @Test func `the first two tokens of a device are settled later, though their transactions touch them twice`() throws
    {
        var first = try database.connect()
        var second = try database.connect()
        try first.execute("SELECT tokenkeeper.ensure_topic('production', 't')")
        try first.execute("BEGIN; SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try second.execute("BEGIN; SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try first.execute(
            "SELECT tokenkeeper.register('aa', 't'); SELECT tokenkeeper.tag('t', token => 'aa', add => '{x}')")
        try second.execute(
            "SELECT tokenkeeper.tag('t', token => 'bb', add => '{y}'); SELECT tokenkeeper.register('bb', 't')")
        try first.execute("COMMIT")
        try second.execute("COMMIT")
        try first.execute("SELECT tokenkeeper.register('aa', 't')")
        #expect(
            try database.psql("SELECT token, state, tags FROM tokenkeeper.token ORDER BY 1")
                == "aa|active|{y}\nbb|superseded|{y}")
    }

    @Test func `registrations that wait for a move of their tokens to one device do not wait for each other`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', device_id => d, registered_at => now() - interval '1 hour') FROM unnest('{aa,bb}'::text[], '{x,y}'::text[]) AS u (t, d)"
        )
        var move = try database.connect()
        try move.execute(
            "BEGIN; SELECT tokenkeeper.register(t, 't', device_id => 'z') FROM unnest('{aa,bb}'::text[]) AS t")
        let failures = Failures()
        let waiting = call(["register('aa', 't')", "register('bb', 't', device_id => 'y')"], failures)
        // Only a superuser sees what another role waits for.
        var watcher = try database.connect(user: "postgres")
        try eventually("both wait") {
            try watcher.scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
                == "2"
        }
        try move.execute("COMMIT")
        waiting.wait()
        #expect(failures.all == [])
        #expect(
            try database.psql("SELECT token, state, device_id FROM tokenkeeper.token ORDER BY 1")
                == "aa|active|z\nbb|active|y")
    }

    /// Calls functions at once, each on its own connection. The group is left when all calls have returned.
    private func call(_ calls: [String], _ failures: Failures) -> DispatchGroup {
        let database = database
        let group = DispatchGroup()
        for call in calls {
            DispatchQueue.global().async(group: group) {
                do {
                    try database.psql("SELECT tokenkeeper.\(call)")
                } catch {
                    failures.add("\(call): \(error)")
                }
            }
        }
        return group
    }

    @Test func `a registration whose token moves in the meantime releases its locks`() throws {
        var first = try database.connect()
        try first.execute("SELECT tokenkeeper.register(t, 't', device_id => 'm') FROM unnest('{bb,aa}'::text[]) AS t")
        try first.execute("SELECT tokenkeeper.unregister('aa', 't')")
        try first.execute("BEGIN; SELECT tokenkeeper.register('aa', 't', device_id => 'a')")
        let failures = Failures()
        // One registration has device m and then wants a; the other has a and wants m.
        let group = call(
            ["register('aa', 't', device_id => 'm')", "register('bb', 't', device_id => 'a')"], failures)
        var watcher = try database.connect()
        try eventually("both wait") {
            try watcher.scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
                == "2"
        }
        try first.execute("COMMIT")
        group.wait()
        #expect(failures.all == [])
    }

    @Test func `a later registration revives a superseded token, which then supersedes the other`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable('aa', 't')") == "f")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aa', 't')") == "t", "its device is known")
        #expect(
            try owner.lines("SELECT token, state FROM tokenkeeper.token ORDER BY token", columns: 2)
                == ["aa|active", "bb|superseded"])
        #expect(
            try owner.lines("SELECT token, event, device_id FROM tokenkeeper.token_event ORDER BY event_id", columns: 3)
                == [
                    "aa|registered|d", "bb|registered|d", "aa|superseded|d", "aa|revived|d", "bb|superseded|d",
                ])
        #expect(
            try owner.scalar("SELECT tokenkeeper.register('bb', 't', registered_at => now() - interval '1 hour')")
                == "f",
            "an earlier registration, late, says so")
    }

    @Test func `a 410 of the device's token does not revive superseded tokens`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.unregister('bb', 't')")
        #expect(
            try owner.lines("SELECT token, state FROM tokenkeeper.token ORDER BY token", columns: 2)
                == ["aa|superseded", "bb|unregistered_by_app"])
    }

    @Test func `a token that moves to another device leaves the others of its former device to each other`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'old')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'old')")
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'new')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'new')")
        #expect(
            try owner.lines("SELECT token, state, device_id FROM tokenkeeper.token ORDER BY token", columns: 3)
                == ["aa|active|old", "bb|active|new", "cc|superseded|new"])
    }

    @Test func `a transaction with an older snapshot leaves the device to a daemon`() throws {
        var first = try database.connect()
        var second = try database.connect()
        try first.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try second.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tokenkeeper.token")
        try first.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        // Twice: the second one does not believe that it is alone.
        for _ in 0..<2 { try second.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'd')") }
        try second.execute("COMMIT")
        let states = "SELECT token, state FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|superseded\nbb|active\ncc|active")
        var daemon = try database.connect(user: "a_daemon")
        while try daemon.applyWaiting().applied > 0 {}
        #expect(try database.psql(states) == "aa|superseded\nbb|superseded\ncc|active")
    }

    @Test func `what waits to be compared does not bring back a token that was forgotten`() throws {
        let day = "registered_at => now() - interval '1 day'"
        try database.psql("SELECT tokenkeeper.register('aa', 't', device_id => 'd', user_id => 'ann', \(day))")
        var holder = try database.connect()
        try holder.execute("BEGIN; SELECT FROM tokenkeeper.ledger FOR UPDATE")
        var app = try database.connect(user: "a_app")
        try app.execute("BEGIN; SELECT tokenkeeper.register('bb', 't', device_id => 'd', user_id => 'bob')")
        try holder.execute("COMMIT")
        try database.psql("SELECT tokenkeeper.forget_user('ann')")
        try app.execute("COMMIT")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try daemon.applyWaiting() == .init(applied: 1))
        #expect(try database.psql("SELECT token, state FROM tokenkeeper.token") == "bb|active")
    }

    @Test func `Live Activities and controls have many tokens per device`() throws {
        var owner = try database.connect()
        for topic in ["com.example.push-type.liveactivity", "com.example.push-type.controls"] {
            for token in ["aa", "bb"] {
                #expect(
                    try owner.scalar("SELECT tokenkeeper.register('\(token)', '\(topic)', device_id => 'd')") == "t")
            }
        }
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE sendable") == "4")
    }

    @Test func `each topic and environment has its own devices`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't.voip', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('cc', 't', 'sandbox', device_id => 'd')")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE sendable") == "3")
    }

    @Test func `a new token without tags takes over its device's tags, and its own tags win`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd', tags => '{World,Sport}')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        let tags = "SELECT array_to_string(tags, ',') FROM tokenkeeper.sendable_token"
        #expect(try owner.lines(tags, columns: 1) == ["World,Sport"])
        try owner.execute("SELECT tokenkeeper.register('bb', 't', tags => '{Local}')")
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["Local"])
        try owner.execute("SELECT tokenkeeper.register('cc', 't', tags => '{}')")
        #expect(try owner.lines(tags, columns: 1) == [""], "explicitly no tags")
        #expect(
            try owner.scalar("SELECT tokenkeeper.register('dd', 't', device_id => 'd', registered_at => '2024-01-01Z')")
                == "f")
        #expect(try owner.lines("SELECT token FROM tokenkeeper.sendable_token", columns: 1) == ["cc"])
    }

    @Test func `clearing and naming a device and a user end alike in every order`() throws {
        let base = 1_700_000_000
        let six = [
            Said(token: "a1", device: "phone", at: base + 10, tags: "x", user: "ann"),
            Said(token: "b1", device: "phone", at: base + 5, user: ""),
            Said(token: "a1", device: "", at: base + 20, user: "ben"),
            // The same instant: a name wins over a clearing.
            Said(token: "b1", device: "", at: base + 15, user: "ann"),
            Said(token: "b1", device: "phone", at: base + 15, tags: "y"),
            Said(token: "a1", at: base + 30, user: ""),
        ]
        var owner = try database.connect()
        var model = LedgerModel()
        for (number, order) in permutations(six).enumerated() {
            try owner.execute(order.map { $0.sql("t\(number)") }.joined(separator: ";"))
            for said in order { said.apply(to: &model, "t\(number)") }
        }
        #expect(try model.differences(on: &owner) == [])
        let tokens = "SELECT token, device_id, user_id FROM tokenkeeper.token WHERE topic = 't0' ORDER BY 1"
        #expect(try database.psql(tokens) == "a1||\nb1|phone|ann", "a1 has neither a device nor a user any more")
    }

    @Test func `a token whose device is cleared is revived, and the device's other tokens go on without it`() throws {
        var app = try database.connect(user: "a_app")
        for token in ["aa", "bb", "cc"] {
            try app.execute("SELECT tokenkeeper.register('\(token)', 't', device_id => 'constant', tags => '{World}')")
        }
        let states = "SELECT token, state, device_id FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|superseded|constant\nbb|superseded|constant\ncc|active|constant")
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', device_id => '')") == "t")
        #expect(try app.scalar("SELECT tokenkeeper.register('cc', 't', device_id => '')") == "t")
        #expect(try database.psql(states) == "aa|active|\nbb|active|constant\ncc|active|")
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't')") == "t", "null keeps it without a device")
        #expect(
            try app.scalar(
                "SELECT tokenkeeper.register('aa', 't', registered_at => now() - interval '1 hour', device_id => 'd')")
                == "t")
        #expect(
            try database.psql("SELECT device_id IS NULL FROM tokenkeeper.token WHERE token = 'aa'") == "t",
            "a device that was named before the clearing")
    }

    @Test func `a user is named, kept and cleared, and history says whose token it was`() throws {
        var app = try database.connect(user: "a_app")
        let user = "SELECT user_id FROM tokenkeeper.sendable_token"
        try app.execute("SELECT tokenkeeper.register('aa', 't', user_id => 'ann')")
        try app.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        #expect(try database.psql(user) == "ann")
        try app.execute("SELECT tokenkeeper.unregister('aa', 't')")
        #expect(try database.psql("SELECT user_id, device_id FROM tokenkeeper.suppressed_token") == "ann|d")
        try app.execute("SELECT tokenkeeper.register('aa', 't', user_id => 'ben')")
        #expect(try database.psql(user) == "ben")
        try app.execute(
            "SELECT tokenkeeper.register('aa', 't', registered_at => now() - interval '1 hour', user_id => 'cat')")
        #expect(try database.psql(user) == "ben", "an earlier registration that comes late")
        try app.execute("SELECT tokenkeeper.register('aa', 't', user_id => '')")
        #expect(try database.psql(user) == "")
        #expect(
            try database.psql("SELECT event, user_id FROM tokenkeeper.token_event ORDER BY event_id")
                == "registered|ann\nunregistered_by_app|ann\nrevived|ben\nuser_changed|")
        for call in ["user_id => repeat('u', 513)", "device_id => repeat('d', 513)"] {
            let error = #expect(throws: DatabaseError.self) {
                try app.execute("SELECT tokenkeeper.register('aa', 't', \(call))")
            }
            #expect(error?.sqlState == "22023")
        }
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', user_id => repeat('u', 512))") == "t")
    }

    @Test func `a device_id with more than 20 tokens is a constant, and supersedes none`() throws {
        var app = try database.connect(user: "a_app")
        func register(_ numbers: ClosedRange<Int>) throws {
            for number in numbers {
                try app.execute(
                    "SELECT tokenkeeper.register('\(1000 + number)', 't', device_id => 'constant', tags => '{g\(number)}')"
                )
            }
        }
        let sendable = "SELECT count(*) FROM tokenkeeper.token WHERE sendable"
        let noted = "SELECT rows, device_id FROM tokenkeeper.operation ORDER BY operation_id"
        let warning = "SELECT w FROM tokenkeeper.status, unnest(warnings) AS w WHERE w LIKE '%constant%'"
        try register(1...7)
        #expect(try database.psql(noted) == "")
        try register(8...20)
        #expect(try database.psql(sendable) == "1")
        #expect(try database.psql(noted) == "8|constant")
        #expect(try database.psql(warning).hasSuffix("has 20 tokens: is it a constant?"))
        try register(21...21)
        #expect(try database.psql(sendable) == "21")
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'revived' AND cause = 'moved'") == "19")
        try register(22...40)
        try register(3...3)
        #expect(try database.psql(sendable) == "40")
        #expect(try database.psql(noted) == "8|constant\n21|constant")
        #expect(
            try database.psql(warning).hasSuffix(
                "has more than 20 tokens: it is a constant, and supersedes none of them"))
        #expect(
            try database.psql("SELECT tags FROM tokenkeeper.token WHERE token = '1030'") == "{g30}",
            "and shares no tags")
        // In a batch.
        var daemon = try database.connect(user: "a_daemon")
        try daemon.apply(
            (41...60).map { QueuedRegistration(topic: "t", token: "\(1000 + $0)", at: 1_700_000_000, device: "0000") })
        #expect(try database.psql(sendable) == "60")
        // The application is fixed, and most devices have launched it. The others are not silenced by each other.
        for number in 5...60 {
            try app.execute("SELECT tokenkeeper.register('\(1000 + number)', 't', device_id => 'own\(number)')")
        }
        try register(2...2)
        #expect(try database.psql(sendable) == "60")
        try app.execute("SELECT tokenkeeper.forget_device('constant')")
        #expect(try database.psql("SELECT count(device_id) FROM tokenkeeper.operation") == "0")
    }

    @Test(arguments: [false, true])
    func `a device that gets many tokens at once is a constant, too`(isQueued: Bool) throws {
        var app = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        for number in 1...20 {
            try app.execute("SELECT tokenkeeper.register('\(1000 + number)', 't', device_id => 'constant')")
        }
        if isQueued {
            try daemon.apply(
                (21...23).map {
                    QueuedRegistration(topic: "t", token: "\(1000 + $0)", at: 1_700_000_000, device: "constant")
                })
        } else {
            let rows = (21...23).map { "ROW('\(1000 + $0)', 't', NULL, NULL, 'constant', NULL, NULL, NULL)" }
            try app.execute(
                "SELECT tokenkeeper.register(ARRAY[\(rows.joined(separator: ","))]::tokenkeeper.new_registration[])")
        }
        let sendable = "SELECT count(*) FROM tokenkeeper.token WHERE sendable"
        #expect(try database.psql(sendable) == "23")
        #expect(throws: DatabaseError.self) {
            try app.execute("SELECT tokenkeeper.tag('t', device_id => 'constant', add => '{x}')")
        }
        // It stays one for those that are left.
        for number in 19...23 { try app.execute("SELECT tokenkeeper.forget('\(1000 + number)')") }
        try app.execute("SELECT tokenkeeper.register('1001', 't', device_id => 'constant')")
        #expect(try database.psql(sendable) == "18")
    }

    @Test func `a UUID is compared without regard to case, and what names no device is none`() throws {
        var app = try database.connect(user: "a_app")
        let uuid = "E621E1F8-C36C-495A-93FC-0C247A3E6E5F"
        try app.execute("SELECT tokenkeeper.register('aa', 't', device_id => '\(uuid)')")
        try app.execute("SELECT tokenkeeper.register('bb', 't', device_id => '\(uuid.lowercased())')")
        #expect(try app.scalar("SELECT tokenkeeper.tag('t', device_id => '\(uuid)', add => '{x}')") == "1")
        let nobody = [
            "00000000-0000-0000-0000-000000000000", "0000", "null", "(null)", "Unknown", "undefined", "nil",
            "ffffffff-FFFF-ffff-ffff-ffffffffffff", "{00000000-0000-0000-0000-000000000000}", "\\N", "  ", "N/A",
            "#n/a", "NaN",
            "[object Object]", "02:00:00:00:00:00", "00:00:00:00:00:00", "\"null\"", "Optional(nil)", "[]",
            String(repeating: "0", count: 48),
        ]
        for (number, name) in nobody.enumerated() {
            try app.execute(
                "SELECT tokenkeeper.register('c\(String(number + 256, radix: 16))', 't', device_id => '\(name)')")
        }
        // It keeps the device that is known.
        try app.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'unknown')")
        #expect(
            try database.psql(
                "SELECT token, state, device_id, tags FROM tokenkeeper.token WHERE token < 'c' ORDER BY 1")
                == "aa|superseded|\(uuid.lowercased())|\nbb|active|\(uuid.lowercased())|{x}")
        #expect(
            try database.psql("SELECT count(*), count(device_id) FROM tokenkeeper.token WHERE sendable AND token > 'c'")
                == "\(nobody.count)|0")
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', 'dd', '\(uuid)')",
            user: "a_app")
        #expect(try app.scalar("SELECT tokenkeeper.forget_device('\(uuid)') > 2") == "t")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token WHERE token IN ('aa', 'bb', 'dd')") == "0")
        #expect(throws: DatabaseError.self) { try app.execute("SELECT tokenkeeper.forget_device('unknown')") }
    }

    @Test func `random orders of the same registrations leave the same tags`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var owner = try database.connect()
        var model = LedgerModel()
        for number in 0..<400 {
            let said = (0..<6).map { _ in
                Said(
                    token: "a\(Int.random(in: 1...4, using: &chance))",
                    device: Self.name("d", of: 2, &chance),
                    at: 1_700_000_000 + Int.random(in: 0..<20, using: &chance),
                    tags: Bool.random(using: &chance) ? "g\(Int.random(in: 0..<5, using: &chance))" : nil,
                    user: Self.name("u", of: 2, &chance))
            }
            for order in 0..<2 {
                let topic = "t\(number)-\(order)"
                try owner.execute(said.shuffled(using: &chance).map { $0.sql(topic) }.joined(separator: ";"))
                for one in said {
                    one.apply(to: &model, topic)
                }
            }
        }
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
    }

    @Test func `tags that were taken over stay when the earlier token is pruned, and go when it is forgotten`() throws {
        var owner = try database.connect()
        let tags = "SELECT array_to_string(coalesce(tags, '{}'), ',') FROM tokenkeeper.sendable_token WHERE topic = 't'"
        try owner.execute(
            "SELECT tokenkeeper.register(token => 'aa', topic => 't', device_id => 'd', tags => '{World}')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try owner.execute("DELETE FROM tokenkeeper.ledger WHERE token_key = '\\xaa'")
        // The token that has taken them over is superseded in turn.
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["World"])
        try owner.execute("SELECT tokenkeeper.register('cc', 't', tags => '{Sport}')")
        try owner.execute("SELECT tokenkeeper.register('dd', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["Sport"])
        try owner.execute("SELECT tokenkeeper.forget('cc')")
        #expect(try owner.lines(tags, columns: 1) == [""])
        try owner.execute("SELECT tokenkeeper.register('ee', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["World"], "bb had them, too")
    }

    @Test func `a session that began with an empty ledger finds a device's tokens by index`() throws {
        var app = try database.connect()
        try app.execute("ALTER TABLE tokenkeeper.ledger SET (autovacuum_enabled = off)")
        try app.execute("BEGIN")
        try app.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i)) FROM generate_series(1, 3000) AS i"
        )
        let before = try app.rowsRead(of: "ledger")
        try app.execute(
            "SELECT count(tokenkeeper.register('ff' || lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i)) FROM generate_series(1, 100) AS i"
        )
        let after = try app.rowsRead(of: "ledger")
        try app.execute("COMMIT")
        #expect(after - before < 100 * 60, "\(after - before) rows for 100 registrations")
    }
}
