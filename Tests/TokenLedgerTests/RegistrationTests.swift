import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Registration and gate` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func record(_ connection: inout Connection, _ token: String, staleAt: String) throws {
        let busy = try connection.scalar(
            """
            SELECT busy FROM tokenkeeper.record(ARRAY[tokenkeeper.invalidation_of(
                1, tokenkeeper.ensure_topic('production', 't'), tokenkeeper.token_key('\(token)'), 'stale', \(staleAt)::timestamptz, 'Unregistered',
                clock_timestamp())], 50, 0.005, NULL)
            """)
        #expect(busy == "{}", "the result is recorded")
    }

    @Test func `upper and lower case are one token`() throws {
        var owner = try database.connect()
        #expect(try owner.scalar("SELECT tokenkeeper.register('AaBb', 't')") == "t")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aAbB', 't')") == "t")
        #expect(try owner.lines("SELECT token, state FROM tokenkeeper.token", columns: 2) == ["aabb|active"])
        try record(&owner, "AABB", staleAt: "clock_timestamp()")
        #expect(
            try owner.scalar(
                "SELECT bool_or(tokenkeeper.is_sendable(t, 't')) FROM unnest('{aabb,AABB,aAbB}'::text[]) AS t") == "f")
    }

    @Test func `an active token's registration is a HOT update and no event`() throws {
        var owner = try database.connect()
        let tokens = "unnest('{aa,bb,cc,dd,ee}'::text[]) AS t"
        // Few enough that the page has room for all versions: whether old ones can be pruned depends on other sessions'
        // snapshots.
        for _ in 0...4 {
            try owner.execute(
                "SELECT tokenkeeper.register(t, 't', device_id => 'd' || t, tags => '{World}') FROM \(tokens)")
        }
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token_event") == "5")
        // The statistics of a session arrive when it ends.
        do { _ = consume owner }
        var watcher = try database.connect()
        try eventually("the statistics arrive") {
            try watcher.execute("SELECT pg_stat_clear_snapshot()")
            return try watcher.scalar("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'ledger'") == "20"
        }
        #expect(try watcher.scalar("SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'ledger'") == "20")
    }

    /// How many transaction ids were assigned meanwhile. Other databases of the cluster use some, too, so this takes the minimum
    /// of many tries.
    private func transactionIDs(in database: TestDatabase, _ sql: (Int) -> String) throws -> Int? {
        var owner = try database.connect()
        let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        return try (0..<50).map { number in
            let before = Int(try owner.scalar(next) ?? "") ?? 0
            try owner.execute(sql(number))
            return (Int(try owner.scalar(next) ?? "") ?? 0) - before
        }.min()
    }

    @Test func `a registration that meets no other uses one transaction id`() throws {
        // Sessions of other tests would use some, too.
        let cluster = try TestCluster.prepared()
        defer { cluster.stop() }
        let database = try cluster.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('bb', 't', registered_at => now() - interval '1 day', device_id => 'd');
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '1 day', device_id => 'e' || i))
            FROM generate_series(0, 49) AS i
            """)
        func token(_ number: Int, _ prefix: String) -> String { prefix + String(1000 + number) }
        #expect(
            try transactionIDs(in: database) { "SELECT tokenkeeper.register('\(token($0, "aa"))', 't')" } == 1,
            "a new token")
        #expect(
            try transactionIDs(in: database) {
                "SELECT tokenkeeper.register('\(token($0, "cc"))', 't', device_id => 'new\($0)', tags => '{World}')"
            } == 1, "a new device")
        #expect(
            try transactionIDs(in: database) {
                "SELECT tokenkeeper.register(lpad(to_hex(\($0)), 8, '0'), 't', device_id => 'e\($0)', tags => '{World}')"
            } == 1, "an active token")
    }

    @Test func `tags that cannot be stored are refused with a clear error`() throws {
        var app = try database.connect(user: "a_app")
        let many = "(SELECT array_agg(i::text) FROM generate_series(1, 1001) AS i)"
        for (tags, words) in [
            ("'{World,NULL}'", "a tag is null"), ("'{\"\"}'", "a tag is 0 bytes long"),
            ("ARRAY[repeat('x', 513)]", "a tag is 513 bytes long"),
            ("ARRAY[repeat('x', 9600)]", "a tag is 9600 bytes long"),
            (many, "tags has 1001 elements"), ("'{{a},{b}}'", "an array of 2 dimensions"),
        ] {
            let error = #expect(throws: DatabaseError.self, "\(tags)") {
                try app.execute("SELECT tokenkeeper.register('aa', 't', tags => \(tags))")
            }
            #expect(
                error?.sqlState == "22023" && "\(String(describing: error))".contains(words),
                "\(String(describing: error))")
        }
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', tags => ARRAY[repeat('x', 512)])") == "t")
        #expect(try app.scalar("SELECT tokenkeeper.register('aa', 't', tags => '{}')") == "t")
    }

    @Test func `a session that began with an empty ledger never scans it`() throws {
        var owner = try database.connect()
        let tokens = "(SELECT lpad(to_hex(i), 64, '0') AS token FROM generate_series(1, 3000) AS i) AS d"
        let some = "(SELECT lpad(to_hex(i), 64, '0') AS token FROM generate_series(1, 500) AS i) AS d"
        // Each in a transaction of its own: a long one would keep other tests' erasures waiting. Without jit, as in the daemon's transactions.
        let statements = """
            SET jit = off;
            SELECT tokenkeeper.register('aa', 't');
            ANALYZE tokenkeeper.ledger, tokenkeeper.topic;
            SELECT tokenkeeper.register(token, 't') FROM \(tokens);
            SELECT tokenkeeper.register(token, 't') FROM \(tokens);
            SELECT tokenkeeper.unregister(token, 't') FROM \(tokens);
            SELECT tokenkeeper.is_sendable(token, 't') FROM \(tokens);
            SELECT tokenkeeper.sendable(ARRAY[token], 't') FROM \(tokens);
            SELECT tokenkeeper.record(ARRAY[tokenkeeper.invalidation_of(
                1, tokenkeeper.ensure_topic('production', 't'), tokenkeeper.token_key(token), 'stale', clock_timestamp(), 'Unregistered',
                clock_timestamp())], 50, 0.005, NULL) FROM \(tokens);
            SELECT tokenkeeper.register(token, 't', device_id => 'd' || token, user_id => 'u' || token) FROM \(some);
            SELECT tokenkeeper.register('ff' || token, 't', device_id => 'd' || token) FROM \(some);
            SELECT tokenkeeper.register(ARRAY[(token, 't', NULL, NULL, 'd' || token, NULL, NULL, NULL)::tokenkeeper.new_registration]) FROM \(some);
            SELECT tokenkeeper.tag('t', device_id => 'd' || token, add => '{x}'), tokenkeeper.tag('t', user_id => 'u' || token, add => '{y}') FROM \(some);
            SELECT tokenkeeper.unregister(user_id => 'u' || token) FROM \(some);
            SELECT tokenkeeper.forget(token) FROM \(some) LIMIT 20;
            """
        for statement in statements.split(separator: ";\n") { try owner.execute(String(statement)) }
        // The statistics of a session arrive when it ends.
        do { _ = consume owner }
        var watcher = try database.connect()
        try eventually("the statistics arrive") {
            try watcher.execute("SELECT pg_stat_clear_snapshot()")
            return
                (try watcher.scalar("SELECT idx_scan FROM pg_stat_user_tables WHERE relname = 'ledger'").flatMap(
                    Int.init) ?? 0) > 15_000
        }
        let scans =
            try watcher.scalar("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'ledger'").flatMap(Int.init)
            ?? .max
        #expect(scans < 20)
    }

    @Test func `registered_at only ever moves forward`() throws {
        var owner = try database.connect()
        for day in [3, 5, 4, 1] {
            try owner.execute("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-0\(day) 00:00Z')")
        }
        #expect(try owner.scalar("SELECT registered_at = '2025-01-05 00:00Z' FROM tokenkeeper.token") == "t")
    }

    @Test func `equal instants mean suppressed, a later registration revives`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01 00:00Z')")
        try record(&owner, "aa", staleAt: "'2025-01-01 00:00Z'")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable('aa', 't')") == "f")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01 00:00Z')") == "f")
        #expect(
            try owner.scalar("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01 00:00:00.000001Z')")
                == "t")
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable('aa', 't')") == "t")
        #expect(
            try owner.lines("SELECT event, cause FROM tokenkeeper.token_event ORDER BY event_id", columns: 2)
                == ["registered|registration", "invalidated|stale", "revived|registration"])
    }

    @Test func `a late 410 does not suppress a device that came back`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-02 00:00Z')")
        try record(&owner, "aa", staleAt: "'2025-01-01 00:00Z'")
        try record(&owner, "aa", staleAt: "'2025-01-01 00:00Z'")
        #expect(
            try owner.lines("SELECT state, reason, invalidated_at IS NOT NULL FROM tokenkeeper.token", columns: 3)
                == ["active|Unregistered|t"])
        #expect(
            try owner.lines("SELECT event FROM tokenkeeper.token_event ORDER BY event_id", columns: 1)
                == ["registered", "late_feedback_ignored"])
    }

    @Test func `a logout and a login in one transaction do not tie`() throws {
        var owner = try database.connect()
        try owner.execute(
            "SELECT tokenkeeper.register('aa', 't'); SELECT tokenkeeper.unregister('aa', 't'); SELECT pg_sleep(0.001); SELECT tokenkeeper.register('aa', 't')"
        )
        #expect(try owner.scalar("SELECT state FROM tokenkeeper.token") == "active")
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't')")
        #expect(
            try owner.lines("SELECT state, reason FROM tokenkeeper.token", columns: 2)
                == ["unregistered_by_app|unregistered by the app"])
        #expect(
            try owner.lines("SELECT event FROM tokenkeeper.token_event ORDER BY event_id", columns: 1)
                == ["registered", "unregistered_by_app", "revived", "unregistered_by_app"])
    }

    @Test func `an unregistration older than the registration has no visible effect`() throws {
        var owner = try database.connect()
        try owner.execute(
            "SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-02Z'); SELECT tokenkeeper.unregister('aa', 't', at => '2025-01-01Z')"
        )
        #expect(try owner.scalar("SELECT tokenkeeper.is_sendable('aa', 't')") == "t")
    }

    @Test func `an instant in the future counts as the instant of receipt`() throws {
        var owner = try database.connect()
        try owner.execute(
            "SELECT tokenkeeper.register('aa', 't', registered_at => clock_timestamp() + interval '3 years')")
        #expect(try owner.scalar("SELECT registered_at <= clock_timestamp() FROM tokenkeeper.token") == "t")
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't', at => clock_timestamp() + interval '3 years')")
        #expect(
            try owner.scalar("SELECT tokenkeeper.register('aa', 't')") == "t", "the log-out did not become immortal")
    }

    @Test func `the first registration of a token that was already stale is recorded as the first`() throws {
        var owner = try database.connect()
        try record(&owner, "aa", staleAt: "'2025-01-02 00:00Z'")
        #expect(
            try owner.lines("SELECT state, registered_at FROM tokenkeeper.token", columns: 2) == ["stale|"],
            "null is shown where there was no registration")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01 00:00Z')") == "f")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-03 00:00Z')") == "t")
        #expect(
            try owner.lines(
                "SELECT event FROM tokenkeeper.token_event ORDER BY event_id", columns: 1)
                == ["invalidated", "registered", "revived"])
    }

    @Test func `a null device and null tags keep the existing ones`() throws {
        var owner = try database.connect()
        let look = "SELECT device_id, tags FROM tokenkeeper.token"
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd1', tags => '{World}')")
        try owner.execute("SELECT tokenkeeper.register('aa', 't')")
        #expect(try owner.lines(look, columns: 2) == ["d1|{World}"])
        try owner.execute("SELECT tokenkeeper.register('aa', 't', device_id => 'd2', tags => '{}')")
        #expect(try owner.lines(look, columns: 2) == ["d2|{}"])
        try owner.execute("SELECT tokenkeeper.register('aa', 't', registered_at => '2020-01-01Z', device_id => 'd0')")
        #expect(try owner.lines(look, columns: 2) == ["d2|{}"], "a late registration does not overwrite newer values")
    }

    @Test(arguments: [
        "register('xyz', 't')", "register('', 't')", "register(NULL, 't')", "register('aa', '')",
        "register('aa', NULL)",
        "register('aa', 't', 'staging')", "register('aa', 't', registered_at => 'infinity')",
        "register('aa', 't', registered_at => '-infinity')", "register('a a a', 't')",
        "register(repeat('aa', 513), 't')",
        "register('aa', repeat('t', 513))", "unregister('xyz', 't')", "unregister(NULL, 't')", "unregister('aa', '')",
        "unregister('aa', 't', 'staging')", "unregister('aa', 't', at => 'infinity')",
    ])
    func `bad input to register and unregister is a clear error`(call: String) throws {
        var owner = try database.connect()
        let error = #expect(throws: DatabaseError.self) { try owner.run("SELECT tokenkeeper.\(call)") }
        #expect(error?.sqlState == "22023" && error?.message.contains("expected") == true, "\(error?.message ?? "")")
    }

    @Test func `an error of register shows no whole token`() throws {
        var owner = try database.connect()
        let token = String(repeating: "ab", count: 32) + "?"
        let error = #expect(throws: DatabaseError.self) {
            try owner.run("SELECT tokenkeeper.register('\(token)', 't')")
        }
        #expect(error?.message.contains("ababababab") == false)
    }

    @Test func `the gate lets unknown tokens pass, withholds malformed ones, and never fails`() throws {
        var owner = try database.connect()
        for (call, answer) in [
            ("'aa', 't'", "t"), ("'xyz', 't'", "f"), ("NULL, 't'", "f"), ("'', 't'", "f"), ("'aa', NULL", "t"),
            ("'aa', 't', NULL", "t"),
            ("'aa', 't', 'staging'", "t"), ("repeat('a', 1000001), 't'", "f"), ("E'aa\\n', 't'", "t"),
            ("'a a a', 't'", "f"),
        ] {
            #expect(try owner.scalar("SELECT tokenkeeper.is_sendable(\(call))") == answer, "\(call)")
        }
        #expect(try owner.lines("SELECT * FROM tokenkeeper.sendable(NULL, 't')", columns: 1) == [])
        #expect(try owner.lines("SELECT * FROM tokenkeeper.sendable('{}', NULL)", columns: 1) == [])
        #expect(try owner.lines("SELECT * FROM tokenkeeper.sendable('{aa,NULL}', NULL, NULL)", columns: 1) == ["aa"])
    }

    @Test func `sendable keeps order, spelling and duplicates`() throws {
        var owner = try database.connect()
        try owner.execute("SELECT tokenkeeper.register('aa', 't'); SELECT tokenkeeper.register('bb', 't')")
        try record(&owner, "bb", staleAt: "clock_timestamp()")
        try record(&owner, "dd", staleAt: "clock_timestamp()")
        #expect(
            try owner.lines("SELECT * FROM tokenkeeper.sendable('{CC,aA,bb,zz,BB,AA,aA,dd,cc}', 't')", columns: 1)
                == ["CC", "aA", "AA", "aA", "cc"])
        #expect(
            try owner.lines("SELECT * FROM tokenkeeper.sendable('{bb}', 't', 'sandbox')", columns: 1) == ["bb"],
            "the other environment")
        #expect(
            try owner.lines("SELECT * FROM tokenkeeper.sendable('{bb}', 'u')", columns: 1) == ["bb"], "another topic")
    }

    @Test func `the views separate sendable and suppressed tokens`() throws {
        var owner = try database.connect()
        try owner.execute(
            "SELECT tokenkeeper.register('aa', 't', tags => '{World}'); SELECT tokenkeeper.register('bb', 't'); SELECT tokenkeeper.register('cc', 't', 'sandbox')"
        )
        try record(&owner, "bb", staleAt: "clock_timestamp()")
        try record(&owner, "dd", staleAt: "clock_timestamp()")
        #expect(
            try owner.lines(
                "SELECT environment, token, tags FROM tokenkeeper.sendable_token ORDER BY token", columns: 3)
                == ["production|aa|{World}", "sandbox|cc|"])
        #expect(
            try owner.lines("SELECT token, state FROM tokenkeeper.suppressed_token ORDER BY token", columns: 2)
                == ["bb|stale", "dd|stale"])
    }

    @Test func `the gate works in a read-only transaction`() throws {
        var owner = try database.connect()
        #expect(
            try owner.scalar(
                "SET LOCAL transaction_read_only = on; SELECT count(*) FROM tokenkeeper.sendable('{aa,bb}', 't') AS s WHERE tokenkeeper.is_sendable(s, 't')"
            )
                == "2")
    }

    @Test func `a tie between causes is resolved in a fixed order`() throws {
        var owner = try database.connect()
        try owner.execute(
            """
            SELECT tokenkeeper.unregister('aa', 't', at => '2025-01-01Z');
            SELECT tokenkeeper.record(ARRAY[
                tokenkeeper.invalidation_of(1, tokenkeeper.ensure_topic('production', 't'), '\\xaa', 'stale', '2025-01-01Z', 'Unregistered', '2025-01-01Z'),
                tokenkeeper.invalidation_of(2, tokenkeeper.ensure_topic('production', 't'), '\\xaa', 'suspect', '2025-01-01Z', 'BadDeviceToken', '2025-01-01Z')],
                50, 0.005, NULL)
            """)
        #expect(try owner.lines("SELECT state, reason FROM tokenkeeper.token", columns: 2) == ["stale|Unregistered"])
    }
}
