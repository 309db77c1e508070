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
            Said(token: "b1", device: "phone", at: base + 20),
            Said(token: "a1", at: base + 30),
            // The same instant: the greater token wins.
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
        let told = Set(try owner.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        #expect(told == model.told())
        #expect(
            told.contains("production|t0|a1|active|\(base + 30)|||tablet||x"),
            "it has moved to the tablet, and is its token")
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
        var owner = try database.connect()
        let told = Set(try owner.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        let wanted = model.told()
        #expect(
            told == wanted,
            "seed \(seed): told \(told.subtracting(wanted).sorted().prefix(3)), the model says \(wanted.subtracting(told).sorted().prefix(3))"
        )
        #expect(
            try owner.scalar(
                """
                SELECT count(*) FROM (SELECT device_id FROM tokenkeeper.ledger WHERE device_id IS NOT NULL AND superseded_at IS NULL
                                      GROUP BY 1 HAVING count(*) > 1) AS two
                """) == "0", "seed \(seed): at most one token a device")
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

    @Test func `a registration that waited for its token keeps the lock order`() throws {
        try database.psql(
            "SELECT tokenkeeper.register('aa', 't', device_id => 'd1'), tokenkeeper.register('bb', 't', device_id => 'd3')"
        )
        var moving = try database.connect()
        try moving.execute("BEGIN; SELECT tokenkeeper.register('aa', 't', device_id => 'd2')")
        let failures = Failures()
        let done = call(
            ["register('aa', 't', device_id => 'd1')", "register('bb', 't', device_id => 'd2')"], failures)
        try eventually("both wait") {
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                user: "postgres") == "2"
        }
        try moving.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
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
                    "aa|registered|d", "aa|superseded|d", "bb|registered|d", "bb|superseded|d", "aa|revived|d",
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

    @Test func `a token that moves to another device leaves the other tokens of the first superseded`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'old')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'old')")
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'new')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'new')")
        #expect(
            try owner.lines("SELECT token, state, device_id FROM tokenkeeper.token ORDER BY token", columns: 3)
                == ["aa|superseded|old", "bb|active|new", "cc|superseded|new"])
    }

    @Test func `a transaction with an older snapshot fails and does not leave two tokens`() throws {
        var first = try database.connect()
        var second = try database.connect()
        // The device has no token any more.
        try first.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try first.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'e')")
        try second.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tokenkeeper.token")
        try first.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        let error = #expect(throws: DatabaseError.self) {
            try second.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'd')")
        }
        #expect(error?.sqlState == "40001")
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

    @Test func `a new token without tags inherits its device's tags, and its own tags win`() throws {
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

    @Test func `pruning the last token of a device deletes the device`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'e')")
        try owner.execute("SELECT tokenkeeper.unregister(t, 't') FROM unnest('{bb,cc}'::text[]) AS t")
        try owner.execute(
            "UPDATE tokenkeeper.ledger SET suppressed_since = now() - interval '91 days' WHERE token_key <> '\\xaa'")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(86400), heldRetention: .seconds(86400), sendRetention: .seconds(30 * 86400),
            allowance: 100,
            maxShare: .percent(10), batch: 10)
        var daemon = try database.connect(user: "a_daemon")
        let lease = try #require(try SweepLease.claim(.new(.cli, dryRun: false), holder: "d", on: &daemon))
        #expect(
            try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }.prunedSuppressed == 2)
        #expect(try owner.lines("SELECT device_id FROM tokenkeeper.device", columns: 1) == ["d"])
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
        let told = Set(try owner.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        #expect(told == model.told())
        #expect(
            told.contains("production|t0|a1|active|\(base + 30)|||||x"), "it has neither a device nor a user any more")
        #expect(told.contains("production|t0|b1|active|\(base + 15)|||phone|ann|y"))
    }

    @Test func `a token whose device is cleared is revived, and the device's earlier tokens stay superseded`() throws {
        var app = try database.connect(user: "a_app")
        for token in ["aa", "bb", "cc"] {
            try app.execute("SELECT tokenkeeper.register('\(token)', 't', device_id => '0000', tags => '{World}')")
        }
        let states = "SELECT token, state, device_id FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|superseded|0000\nbb|superseded|0000\ncc|active|0000")
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', device_id => '')") == "t")
        #expect(try app.scalar("SELECT tokenkeeper.register('cc', 't', device_id => '')") == "t")
        #expect(
            try database.psql(states) == "aa|active|\nbb|superseded|0000\ncc|active|",
            "cc was the device's latest token, so nobody knows that bb works")
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't')") == "t", "null keeps it without a device")
        #expect(try app.scalar("SELECT tokenkeeper.register('bb', 't')") == "t")
        #expect(try database.psql(states) == "aa|active|\nbb|active|0000\ncc|active|")
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
                == "registered|ann\nunregistered_by_app|ann\nrevived|ben")
        for call in ["user_id => repeat('u', 513)", "device_id => repeat('d', 513)"] {
            let error = #expect(throws: DatabaseError.self) {
                try app.execute("SELECT tokenkeeper.register('aa', 't', \(call))")
            }
            #expect(error?.sqlState == "22023")
        }
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', user_id => repeat('u', 512))") == "t")
    }

    @Test func `a constant device_id causes a warning`() throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => '00000000')) FROM generate_series(1, 60) AS i"
        )
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.status, unnest(warnings) AS w WHERE w LIKE '%is it a constant?'")
                == "1")
        #expect(try database.psql("SELECT rows, device_id FROM tokenkeeper.operation") == "50|00000000")
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
        let told = Set(try owner.lines(LedgerModel.ledger, columns: LedgerModel.columns))
        let wanted = model.told()
        #expect(
            told == wanted,
            "seed \(seed): told \(told.subtracting(wanted).sorted().prefix(3)), the model says \(wanted.subtracting(told).sorted().prefix(3))"
        )
    }

    @Test func `inherited tags stay when the earlier token is pruned, and go when it is forgotten`() throws {
        var owner = try database.connect()
        let tags = "SELECT array_to_string(coalesce(tags, '{}'), ',') FROM tokenkeeper.sendable_token WHERE topic = 't'"
        try owner.execute(
            "SELECT tokenkeeper.register(token => 'aa', topic => 't', device_id => 'd', tags => '{World}')")
        try owner.execute("SELECT tokenkeeper.register('bb', 't', device_id => 'd')")
        try owner.execute("DELETE FROM tokenkeeper.ledger WHERE token_key = '\\xaa'")
        // The token that inherited is superseded in turn.
        try owner.execute("SELECT tokenkeeper.register('cc', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["World"])
        try owner.execute("SELECT tokenkeeper.register('cc', 't', tags => '{Sport}')")
        try owner.execute("SELECT tokenkeeper.register('dd', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == ["Sport"])
        try owner.execute("SELECT tokenkeeper.forget('cc')")
        try owner.execute("SELECT tokenkeeper.register('ee', 't', device_id => 'd')")
        #expect(try owner.lines(tags, columns: 1) == [""])
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.device WHERE tags_of = '\\xcc'") == "0")
    }

    @Test func `a device has at most a thousand tokens, and further tokens have no device`() throws {
        var app = try database.connect()
        try app.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => '0000')) FROM generate_series(1, 1005) AS i"
        )
        #expect(
            try app.lines(
                "SELECT device_id, count(*), count(*) FILTER (WHERE sendable) FROM tokenkeeper.token GROUP BY 1 ORDER BY 1",
                columns: 3) == ["0000|1000|1", "|5|5"])
        #expect(
            try app.lines("SELECT rows, device_id FROM tokenkeeper.operation ORDER BY operation_id", columns: 2)
                == ["50|0000", "1000|0000"])
        #expect(
            try app.lines("SELECT device_id, tokens FROM tokenkeeper.crowded_device", columns: 2) == ["0000|1000"])
        // Once the others are gone, it accepts tokens again.
        try app.execute(
            """
            DELETE FROM tokenkeeper.ledger WHERE device_id = '0000' AND suppressed;
            SELECT tokenkeeper.register('aaaaaaaa', 't', device_id => '0000')
            """)
        #expect(
            try app.scalar("SELECT device_id FROM tokenkeeper.token WHERE token = 'aaaaaaaa'") == "0000")
        try app.execute("SELECT tokenkeeper.forget_device('0000')")
        #expect(try app.scalar("SELECT count(device_id) FROM tokenkeeper.operation") == "0")
    }

    @Test func `a registration does not lock all tokens of its device`() throws {
        var app = try database.connect()
        try app.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => 'd')) FROM generate_series(1, 200) AS i"
        )
        // Another session locks a superseded token, which is neither the registered token nor the current one.
        var other = try database.connect()
        try other.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = '\\x00000010' FOR UPDATE")
        #expect(
            try app.scalar("SET lock_timeout = '2s'; SELECT tokenkeeper.register('00000005', 't', device_id => 'd')")
                == "t")
    }

    @Test func `a session that began with an empty ledger finds a device's tokens by index`() throws {
        var app = try database.connect()
        try app.execute("ALTER TABLE tokenkeeper.ledger SET (autovacuum_enabled = off)")
        let fetched = """
            SELECT sum(idx_tup_fetch + idx_tup_read) FROM (
                SELECT pg_stat_get_xact_tuples_fetched(i.indexrelid) AS idx_tup_fetch, pg_stat_get_xact_tuples_returned(i.indexrelid) AS idx_tup_read
                FROM pg_index AS i WHERE i.indrelid = 'tokenkeeper.ledger'::regclass) AS s
            """
        try app.execute("BEGIN")
        try app.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i)) FROM generate_series(1, 3000) AS i"
        )
        let before = Int(try app.scalar(fetched) ?? "") ?? 0
        try app.execute(
            "SELECT count(tokenkeeper.register('ff' || lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i)) FROM generate_series(1, 100) AS i"
        )
        let after = Int(try app.scalar(fetched) ?? "") ?? .max
        try app.execute("COMMIT")
        #expect(after - before < 100 * 60, "\(after - before) rows for 100 registrations")
    }
}
