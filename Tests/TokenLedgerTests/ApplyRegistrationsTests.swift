import APNsFeedback
import Dispatch
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Queued registrations` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// All facts that the ledger keeps of each token, except tags: a token that moves to another device takes along those that it has by then.
    private func kept(_ topic: String) -> String {
        """
        SELECT to_jsonb(l) - '{topic_id,tags,tags_at}'::text[],
               EXISTS (SELECT FROM tokenkeeper.suppression AS s WHERE s.topic_id = l.topic_id AND s.token_key = l.token_key)
        FROM tokenkeeper.ledger AS l JOIN tokenkeeper.topic AS t USING (topic_id) WHERE t.topic = '\(topic)' ORDER BY l.token_key
        """
    }

    /// Tokens whose history does not say what the ledger says.
    private static let contradictions = """
        SELECT encode(l.token_key, 'hex'), l.suppressed, e.registrations, last.event
        FROM tokenkeeper.ledger AS l
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE k.event = 'registered') AS registrations FROM tokenkeeper.token_event_log AS k
            WHERE k.topic_id = l.topic_id AND k.token_key = l.token_key) AS e
        CROSS JOIN LATERAL (
            SELECT k.event, k.event IN ('registered', 'revived') AND NOT coalesce(k.invalidated_after >= k.registered_after, false) AS is_active
            FROM tokenkeeper.token_event_log AS k
            WHERE k.topic_id = l.topic_id AND k.token_key = l.token_key AND k.event NOT IN ('late_feedback_ignored', 'tagged', 'user_changed')
            ORDER BY k.event_id DESC LIMIT 1) AS last
        WHERE e.registrations <> (l.registered_at > '-infinity')::integer OR last.is_active = l.suppressed
        """

    @Test(arguments: [(400, 80, 400), (40, 12, 400), (12, 4, 400), (5, 3, 400), (400, 80, 3), (40, 12, 2)])
    func `batches in any order leave what calls one by one leave, and what the model says`(
        tokens: Int, devices: Int, instants: Int
    ) throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        var model = LedgerModel()
        let rows = (0..<Soak.size(800, whole: 5_000)).map { _ in
            QueuedRegistration.random("one", tokens: tokens, devices: devices, instants: instants, &chance)
        }
        for call in rows.map(\.call).shuffled(using: &chance) { try owner.execute(call) }
        for row in rows { row.apply(to: &model) }
        var left = rows.shuffled(using: &chance).map { row in
            var row = row
            row.topic = "many"
            return row
        }
        // Some batches have hundreds of rows, some one; and the application also calls.
        while !left.isEmpty {
            let batch = Array(
                left.prefix(Int.random(in: 1...[1, 20, 300].randomElement(using: &chance)!, using: &chance)))
            left.removeFirst(batch.count)
            for row in batch { row.apply(to: &model) }
            if Int.random(in: 0..<5, using: &chance) == 0 {
                for row in batch.prefix(20) { try owner.execute(row.call) }
                try daemon.apply(Array(batch.dropFirst(20)))
            } else {
                let applied = try daemon.apply(batch)
                #expect(applied.applied + applied.waiting == batch.count, "seed \(seed)")
            }
            if Int.random(in: 0..<5, using: &chance) == 0 {
                for topic in ["one", "many"] {
                    let at = batch[0].at + instants / 4
                    model.invalidate(
                        .init("production", topic, batch[0].token), .stale, at, "Unregistered", receivedAt: at)
                    try owner.execute(
                        """
                        INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                        VALUES ('\(topic)', '\(batch[0].token)', 410, '{"reason":"Unregistered","timestamp":\(at)000}')
                        """)
                }
                try drainAll(&daemon)
            }
        }
        // On a busy machine, a batch may stop before its last row.
        while try daemon.applyWaiting().applied > 0 {}
        try owner.execute(LedgerModel.settle)
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
        #expect(try owner.lines(kept("one"), columns: 2) == owner.lines(kept("many"), columns: 2), "seed \(seed)")
        #expect(try owner.lines(Self.contradictions, columns: 4) == [], "seed \(seed)")
    }

    @Test func `batches and registrations at once leave what the model says, and no application fails`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var model = LedgerModel()
        let rows = (0..<Soak.size(4_000, whole: 20_000)).map { _ in
            QueuedRegistration.random("t", tokens: 60, devices: 20, &chance)
        }
        for row in rows { row.apply(to: &model) }
        let workers = 6
        let database = database
        let failures = Failures()
        atOnce(workers) { worker in
            let mine = stride(from: worker, to: rows.count, by: workers).map { rows[$0] }
            do {
                if worker % 2 == 0 {
                    var app = try database.connect(user: "a_app")
                    for row in mine { try app.execute(row.call) }
                } else {
                    var daemon = try database.connect(user: "a_daemon")
                    for first in stride(from: 0, to: mine.count, by: 50) {
                        try daemon.run("BEGIN; SET LOCAL lock_timeout = '100ms'")
                        try daemon.apply(Array(mine[first..<min(first + 50, mine.count)]))
                        try daemon.run("COMMIT")
                    }
                }
            } catch {
                failures.add("\(error)")
            }
        }
        #expect(failures.all == [], "seed \(seed)")
        var daemon = try database.connect(user: "a_daemon")
        while try daemon.applyWaiting().applied > 0 {}
        var owner = try database.connect()
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.registration") == "0", "seed \(seed)")
        try owner.execute(LedgerModel.settle)
        #expect(try model.differences(on: &owner) == [], "seed \(seed)")
    }

    @Test func `what cannot be understood is rejected with the words of register, whole, and the others are applied`()
        throws
    {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let bad: [(call: String, row: String)] = [
            ("'aa', 't', 'beta'", "'beta', 't', 'aa', NULL, 'd', 'u', '{g}'"),
            ("'aa', ''", "NULL, '', 'aa', NULL, 'd', 'u', '{g}'"),
            ("'aa', NULL", "NULL, NULL, 'aa', NULL, 'd', 'u', '{g}'"),
            ("'aa', 't', registered_at => 'infinity'", "NULL, 't', 'aa', 'infinity', 'd', 'u', '{g}'"),
            ("'aa', 't', device_id => repeat('d', 513)", "NULL, 't', 'aa', NULL, repeat('d', 513), 'u', '{g}'"),
            ("'aa', 't', user_id => repeat('u', 513)", "NULL, 't', 'aa', NULL, 'd', repeat('u', 513), '{g}'"),
            ("'aa', 't', tags => '{g,NULL}'", "NULL, 't', 'aa', NULL, 'd', 'u', '{g,NULL}'"),
            ("'aa', 't', tags => '{\"\"}'", "NULL, 't', 'aa', NULL, 'd', 'u', '{\"\"}'"),
            ("'aa', 't', tags => '{{g},{h}}'", "NULL, 't', 'aa', NULL, 'd', 'u', '{{g},{h}}'"),
            (
                "'aa', 't', tags => array_fill('g'::text, '{1001}')",
                "NULL, 't', 'aa', NULL, 'd', 'u', array_fill('g'::text, '{1001}')"
            ),
        ]
        let errors = bad.map { one in
            let error = #expect(throws: DatabaseError.self) {
                try owner.run("SELECT tokenkeeper.register(\(one.call))")
            }
            return error?.message ?? ""
        }
        let elements =
            (bad.map(\.row) + ["NULL, 't', 'bb', NULL, NULL, NULL, NULL", "NULL, 't', 'no hex', NULL, 'd', 'u', '{g}'"])
            .map { "ROW(\($0), false, NULL, NULL, NULL, '2024-01-01Z', 0, NULL, NULL)::tokenkeeper.registration" }
        #expect(
            try daemon.lines(
                "SELECT applied, rejected FROM tokenkeeper.apply_registrations(ARRAY[\(elements.joined(separator: ","))], 1, 0.1, 100)",
                columns: 2) == ["7|5"])
        #expect(
            try owner.lines(
                "SELECT error FROM tokenkeeper.rejected_registration WHERE token = 'aa' ORDER BY rejected_id",
                columns: 1)
                == errors.dropLast(6))
        // A device, a user or a tag that register refuses costs nobody the device. Empty tags are none.
        #expect(
            try owner.lines(
                "SELECT registrations, source_id, example FROM tokenkeeper.amended_registration", columns: 3)
                == ["4||\(errors[errors.count - 6])"])
        #expect(
            try owner.scalar("SELECT error FROM tokenkeeper.rejected_registration WHERE token = 'no hex'")
                == (try owner.scalar("SELECT tokenkeeper.token_fault('no hex')")))
        #expect(
            try owner.lines(
                "SELECT environment, topic, registered_at::text, device_id, user_id, tags::text, queued_at = '2024-01-01Z' FROM tokenkeeper.rejected_registration WHERE rejected_id = 1",
                columns: 7) == ["beta|t||d|u|{g}|t"])
        #expect(
            try owner.lines("SELECT token, registered_at = '2024-01-01Z' FROM tokenkeeper.token", columns: 2) == [
                "aa|t", "bb|t",
            ])
    }

    @Test func `beyond the allowance rejected rows are only counted, except what was requeued`() throws {
        var daemon = try database.connect(user: "a_daemon")
        let rows = ["1", "NULL", "NULL", "1", "NULL", "NULL"].map {
            "ROW(NULL, 't', 'x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, now(), 0, \($0), NULL)::tokenkeeper.registration"
        }
        #expect(
            try daemon.lines(
                "SELECT applied, rejected, not_kept FROM tokenkeeper.apply_registrations(ARRAY[\(rows.joined(separator: ","))], 1, 0.1, 2)",
                columns: 3) == ["0|6|2"])
        #expect(
            try database.psql("SELECT attempts FROM tokenkeeper.rejected_registration ORDER BY rejected_id")
                == "1\n\n\n1")
    }

    @Test func `an instant after queued_at, or none, counts as queued_at`() throws {
        var daemon = try database.connect(user: "a_daemon")
        let rows = [("aa", "NULL"), ("bb", "'2024-01-03Z'"), ("cc", "'2024-01-01Z'")].flatMap { token, at in
            ["false", "true"].map {
                "ROW(NULL, 't' || \($0), '\(token)', \(at), 'd' || '\(token)', NULL, NULL, \($0), NULL, NULL, NULL, '2024-01-02Z', 0, NULL, NULL)::tokenkeeper.registration"
            }
        }
        try daemon.run("SELECT tokenkeeper.apply_registrations(ARRAY[\(rows.joined(separator: ","))], 1, 0.1, 1)")
        #expect(
            try database.psql(
                "SELECT topic, token, coalesce(registered_at, invalidated_at)::date FROM tokenkeeper.token ORDER BY 1, 2"
            ).split(separator: "\n")
                == ["false", "true"].flatMap {
                    ["t\($0)|aa|2024-01-02", "t\($0)|bb|2024-01-02", "t\($0)|cc|2024-01-01"]
                })
    }

    /// What an application holds, and the rows that then have to wait.
    @Test(arguments: [
        ("SELECT tokenkeeper.register('aa', 't')", ["aa"]),
        ("SELECT tokenkeeper.unregister('aa', 't')", ["aa"]),
        ("SELECT tokenkeeper.register('ee', 't')", ["ee"]),
        ("SELECT FROM tokenkeeper.ledger WHERE token_key = '\\xaa' FOR UPDATE", ["aa"]),
    ])
    func `only rows whose token is locked wait, and are applied later`(
        held: String, waiting: [String]
    ) throws {
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', device_id => d, registered_at => now() - interval '1 day') FROM unnest('{aa,bb,cc}'::text[], '{a,b,c}'::text[]) AS u (t, d)"
        )
        var app = try database.connect()
        try app.execute("BEGIN; \(held)")
        var daemon = try database.connect(user: "a_daemon")
        let at = 1_800_000_000 - 90 * 86400 * 2
        let rows = [
            QueuedRegistration(topic: "t", token: "aa", at: at), QueuedRegistration(topic: "t", token: "bb", at: at),
            QueuedRegistration(topic: "t", token: "cc", at: at, isLogout: true),
            QueuedRegistration(topic: "t", token: "dd", at: at + 1, device: "b"),
            QueuedRegistration(topic: "t", token: "ee", at: at, device: "new"),
        ]
        try daemon.run("BEGIN; SET LOCAL lock_timeout = '100ms'")
        let applied = try daemon.apply(rows)
        try daemon.run("COMMIT")
        #expect(applied == .init(applied: rows.count - waiting.count, waiting: waiting.count))
        #expect(
            try database.psql("SELECT token FROM tokenkeeper.registration_retry ORDER BY 1")
                == waiting.joined(separator: "\n"))
        // Alone, too, they wait no longer than lock_timeout.
        #expect(try daemon.applyWaiting(limit: 1) == .init(waiting: 1))
        try app.execute("COMMIT")
        while try daemon.applyWaiting(limit: 1).applied > 0 {}
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
        let rest = Set(rows.map(\.token)).subtracting(
            try database.psql("SELECT token FROM tokenkeeper.token").split(separator: "\n").map(String.init))
        #expect(rest == [])
    }

    @Test func `rows that wait, and rows that are rejected, keep all they had`() throws {
        try database.psql(
            "INSERT INTO tokenkeeper.registration_source (source_id, kind, name) OVERRIDING SYSTEM VALUE VALUES (7, 'import', 'a.csv')"
        )
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('aa', 't')")
        var daemon = try database.connect(user: "a_daemon")
        let rows = ["aa", "no hex"].flatMap { token in
            ["false", "true"].map { isLogout in
                """
                ROW('production', 't', '\(token)', '2024-01-01Z', 'd', 'u', '{g}', \(isLogout), 7, true, NULL, '2024-01-02Z', 0, 3, true)::tokenkeeper.registration
                """
            }
        }
        try daemon.run(
            "SET lock_timeout = '50ms'; SELECT tokenkeeper.apply_registrations(ARRAY[\(rows.joined(separator: ","))], 1, 0.1, 1)"
        )
        func whole(_ columns: String, _ table: String) throws -> String {
            try database.psql(
                """
                SELECT environment, topic, registered_at = '2024-01-01Z', device_id, user_id, tags, unregistered, source_id, returned, queued_at = '2024-01-02Z',
                       attempts, \(columns) FROM tokenkeeper.\(table) ORDER BY unregistered
                """)
        }
        func kept(_ rest: String) -> String {
            ["f", "t"].map { "production|t|t|d|u|{g}|\($0)|7|t|t|3|\(rest)" }.joined(separator: "\n")
        }
        #expect(try whole("token, released", "registration_retry") == kept("aa|t"))
        #expect(try whole("token", "rejected_registration") == kept("no hex"))
    }

    @Test func `of two tokens of a device with the same instant, both are current until one registers again`() throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let at = 1_700_000_000
        let rows = ["aa", "bb"].map { QueuedRegistration(topic: "t", token: $0, at: at, device: "d") }
        for row in rows { try daemon.apply([row]) }
        let states = "SELECT token, state FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|active\nbb|active")
        // The usual launch, by a call and through the queue.
        try owner.execute("SELECT tokenkeeper.register('aa', 't', registered_at => to_timestamp(\(at + 1)))")
        #expect(try database.psql(states) == "aa|active\nbb|superseded")
        try daemon.apply([
            QueuedRegistration(topic: "t", token: "bb", at: at + 1),
            QueuedRegistration(topic: "t", token: "cc", at: at),
        ])
        #expect(try database.psql(states) == "aa|active\nbb|active\ncc|active")
        try daemon.apply([
            QueuedRegistration(topic: "t", token: "bb", at: at + 2),
            QueuedRegistration(topic: "t", token: "cc", at: at),
        ])
        #expect(try database.psql(states) == "aa|superseded\nbb|active\ncc|active")
    }

    @Test func `a device of which a session holds a token is settled when the token is free`() throws {
        let day = "registered_at => now() - interval '1 day'"
        try database.psql("SELECT tokenkeeper.register('aa', 't', device_id => 'd', \(day))")
        var holder = try database.connect()
        try holder.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = '\\xaa' FOR UPDATE")
        var app = try database.connect(user: "a_app")
        #expect(
            try app.scalar("SET lock_timeout = '20s'; SELECT tokenkeeper.register('bb', 't', device_id => 'd')") == "t",
            "it does not wait")
        let states = "SELECT token, state FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(states) == "aa|active\nbb|active")
        var daemon = try database.connect(user: "a_daemon")
        try daemon.run("SET lock_timeout = '50ms'")
        // In a batch, too.
        #expect(
            try daemon.apply([
                QueuedRegistration(topic: "t", token: "cc", at: 1_700_000_000, device: "d"),
                QueuedRegistration(topic: "t", token: "dd", at: 1_700_000_000),
            ]) == .init(applied: 2))
        #expect(try daemon.applyWaiting(limit: 1) == .init(waiting: 1))
        try holder.execute("COMMIT")
        while try daemon.applyWaiting().applied > 0 {}
        #expect(try database.psql(states) == "aa|superseded\nbb|active\ncc|superseded\ndd|active")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
    }

    @Test func `a logout that is taken back counts no more, and a 410 does`() throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let source = try owner.scalar(
            "INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices') RETURNING source_id"
        )
        let at = 1_700_000_000
        // The row says when the device registered, long before. It counts as returned from when it was queued.
        func row(_ token: String, returned: Bool, _ queuedAt: Int) -> String {
            """
            ROW(NULL, 't', '\(token)', to_timestamp(\(at)), NULL, NULL, NULL, false, \(source!), \(returned), NULL, to_timestamp(\(queuedAt)), 0,
                NULL, NULL)::tokenkeeper.registration
            """
        }
        for token in ["aa", "bb", "cc", "dd"] {
            try owner.execute("SELECT tokenkeeper.register('\(token)', 't', registered_at => to_timestamp(\(at)))")
            try owner.execute("SELECT tokenkeeper.unregister('\(token)', 't', at => to_timestamp(\(at + 10)))")
        }
        try owner.execute(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('t', 'bb', 410, '{"reason":"Unregistered","timestamp":\(at + 5)000}')
            """)
        try drainAll(&daemon)
        let rows = [
            row("aa", returned: true, at + 10), row("bb", returned: true, at + 20), row("cc", returned: true, at + 9),
            row("dd", returned: false, at + 20),
        ]
        try daemon.run("SELECT tokenkeeper.apply_registrations(ARRAY[\(rows.joined(separator: ","))], 1, 0.1, 1)")
        #expect(
            try database.psql(
                "SELECT token, state, extract(epoch FROM registered_at)::bigint FROM tokenkeeper.token ORDER BY 1")
                == [
                    // At the same instant, the return counts. cc was taken back before its logout.
                    "aa|active", "bb|stale", "cc|unregistered_by_app", "dd|unregistered_by_app",
                ].map { "\($0)|\(at)" }.joined(separator: "\n"))
        #expect(
            try database.psql(
                "SELECT event, cause FROM tokenkeeper.token_event WHERE token = 'aa' ORDER BY event_id DESC LIMIT 1")
                == "revived|returned")
        // The application itself: as of when it was queued, whatever it says about the registration.
        func own(_ token: String, _ registeredAt: String) -> String {
            """
            ROW(NULL, 't', '\(token)', \(registeredAt), NULL, NULL, NULL, NULL, NULL, true, NULL, to_timestamp(\(at + 30)), 0, NULL, NULL)::tokenkeeper.registration
            """
        }
        try daemon.run(
            "SELECT tokenkeeper.apply_registrations(ARRAY[\(own("cc", "to_timestamp(\(at))")), \(own("dd", "NULL"))], 1, 0.1, 1)"
        )
        #expect(
            try database.psql(
                "SELECT token, state, extract(epoch FROM registered_at)::bigint FROM tokenkeeper.token WHERE token >= 'cc' ORDER BY 1"
            )
                == "cc|active|\(at)\ndd|active|\(at)")
        // A late logout from before changes nothing, a later one does.
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't', at => to_timestamp(\(at + 10)))")
        #expect(try database.psql("SELECT tokenkeeper.is_sendable('aa', 't')") == "t")
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't', at => to_timestamp(\(at + 11)))")
        #expect(try database.psql("SELECT tokenkeeper.is_sendable('aa', 't')") == "f")
    }

    @Test(arguments: [false, true])
    func `a row that is applied alone waits for its token`(isLogout: Bool) throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't', registered_at => '2020-01-01Z')")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger FOR UPDATE")
        let database = database
        let failures = Failures()
        let waiting = DispatchGroup()
        DispatchQueue.global().async(group: waiting) {
            do {
                var daemon = try database.connect(user: "a_daemon")
                try daemon.run("SET lock_timeout = '60s'")
                let applied = try daemon.apply([
                    QueuedRegistration(topic: "t", token: "aa", at: 1_700_000_000, isLogout: isLogout)
                ])
                if applied != .init(applied: 1) { failures.add("\(applied)") }
            } catch {
                failures.add("\(error)")
            }
        }
        // Only a superuser sees what another role waits for.
        var watcher = try database.connect(user: "postgres")
        try eventually("the daemon waits, or has given up") {
            try watcher.scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
                == "1" || waiting.wait(timeout: .now()) == .success
        }
        try app.execute("COMMIT")
        waiting.wait()
        #expect(failures.all == [])
    }

    @Test func `of the tags of a token, the latest count, and of the same instant the greater`() throws {
        var daemon = try database.connect(user: "a_daemon")
        let at = 1_700_000_000
        func row(_ at: Int, _ tags: String) -> QueuedRegistration {
            QueuedRegistration(topic: "t", token: "aa", at: at, tags: tags)
        }
        let other = QueuedRegistration(topic: "t", token: "bb", at: at)
        for (rows, tags) in [
            ([row(at + 1, "m"), row(at, "z")], "m"), ([row(at + 1, "k"), other], "m"),
            ([row(at + 1, "n"), other], "n"),
        ] {
            try daemon.apply(rows)
            #expect(try database.psql("SELECT tags FROM tokenkeeper.token WHERE token = 'aa'") == "{\(tags)}")
        }
    }

    @Test func `events name the user and the source`() throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let source = try owner.scalar("SELECT tokenkeeper.begin_import('devices.csv')")
        let at = 1_700_000_000
        func row(_ token: String, _ at: Int, device: String? = nil, isLogout: Bool = false) -> QueuedRegistration {
            QueuedRegistration(
                topic: "t", token: token, at: at, device: device, user: "u", isLogout: isLogout, source: source)
        }
        try daemon.apply([
            row("aa", at), row("bb", at, device: "d"), row("cc", at + 1, device: "d"), row("dd", at, isLogout: true),
        ])
        try daemon.apply([row("aa", at + 1, isLogout: true), row("ee", at + 2, device: "d")])
        try daemon.apply([row("aa", at + 2)])
        #expect(
            try owner.lines(
                "SELECT encode(token_key, 'hex'), event, user_id, source_id FROM tokenkeeper.token_event_log ORDER BY 1, event_id",
                columns: 4)
                == [
                    "aa|registered|u|\(source!)", "aa|unregistered_by_app|u|\(source!)", "aa|revived|u|\(source!)",
                    "bb|registered|u|\(source!)", "bb|superseded|u|", "cc|registered|u|\(source!)", "cc|superseded|u|",
                    "dd|unregistered_by_app||\(source!)", "ee|registered|u|\(source!)",
                ])
    }

    @Test func `logouts of a source pass the guard, and are held whole`() throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        try owner.execute(
            "SELECT tokenkeeper.register(t, 't', registered_at => to_timestamp(1700000000)) FROM unnest('{aa,bb,cc,dd}'::text[]) AS t"
        )
        let source = try owner.scalar("SELECT tokenkeeper.begin_import('devices.csv')")
        let at = 1_700_000_100
        func logout(_ token: String, _ source: String?) -> QueuedRegistration {
            QueuedRegistration(topic: "t", token: token, at: at, isLogout: true, source: source)
        }
        #expect(
            try daemon.apply([logout("aa", source), logout("bb", source), logout("cc", nil), logout("dd", source)])
                == .init(applied: 1, held: 3))
        #expect(
            try owner.lines("SELECT token, state FROM tokenkeeper.token ORDER BY 1", columns: 2)
                == ["aa|active", "bb|active", "cc|unregistered_by_app", "dd|active"])
        #expect(
            try owner.lines(
                "SELECT token, topic, unregistered, source_id, extract(epoch FROM invalidated_at)::bigint FROM tokenkeeper.held_registration ORDER BY 1",
                columns: 5) == ["aa", "bb", "dd"].map { "\($0)|t|t|\(source!)|\(at)" })
        #expect(
            try owner.scalar("SELECT string_agg(encode(token_key, 'hex'), ' ') FROM tokenkeeper.receipt") == "cc",
            "nothing of what is held is recorded")
    }

    @Test func `a logout that does not count leaves no receipt`() throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let source = try owner.scalar("SELECT tokenkeeper.begin_import('devices.csv')")
        try owner.execute("SELECT tokenkeeper.register('aa', 't', user_id => 'bob', registered_at => '2023-01-01Z')")
        try daemon.apply([
            QueuedRegistration(topic: "t", token: "aa", at: 1_600_000_000, isLogout: true, source: source),
            QueuedRegistration(topic: "t", token: "bb", at: 1_600_000_000),
        ])
        let receipts = "SELECT count(*), count(source_id) FROM tokenkeeper.receipt"
        #expect(try database.psql(receipts) == "1|1")
        try owner.execute(
            "SELECT tokenkeeper.register(ARRAY[ROW('aa', 't', NULL, NULL, NULL, NULL, 'ann', true)]::tokenkeeper.new_registration[])"
        )
        #expect(try database.psql(receipts) == "1|1")
        try owner.execute("SELECT tokenkeeper.unregister('aa', 't', user_id => 'bob')")
        #expect(try database.psql(receipts) == "2|1")
    }

    @Test(arguments: [1, 2])
    func `the tags and the user of an attached table count from when they were queued`(batch: Int) throws {
        var owner = try database.connect()
        var daemon = try database.connect(user: "a_daemon")
        let source = try owner.scalar(
            "INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices') RETURNING source_id"
        )
        try owner.execute(
            """
            SELECT tokenkeeper.register('aa', 't', registered_at => to_timestamp(1700000100), device_id => 'd', tags => '{old}', user_id => 'old');
            SELECT tokenkeeper.unregister('aa', 't', at => to_timestamp(1700000200));
            SELECT tokenkeeper.register('cc', 't', registered_at => to_timestamp(1700000100), device_id => 'c', tags => '{old}');
            SELECT tokenkeeper.register('dd', 't', registered_at => to_timestamp(1700000200), device_id => 'c')
            """)
        let rows = ["aa", "cc"].map {
            QueuedRegistration(topic: "t", token: $0, at: 1_700_000_050, user: "new", tags: "new", source: source)
        }
        for first in stride(from: 0, to: rows.count, by: batch) {
            try daemon.apply(Array(rows[first..<first + batch]))
        }
        #expect(
            try owner.lines(
                "SELECT token, state, extract(epoch FROM registered_at)::bigint, user_id, tags FROM tokenkeeper.token ORDER BY 1",
                columns: 5)
                == [
                    "aa|unregistered_by_app|1700000100|new|{new}", "cc|superseded|1700000100|new|{new}",
                    "dd|active|1700000200||{new}",
                ])
    }
}
