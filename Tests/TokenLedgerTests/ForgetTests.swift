import APNsFeedback
import Dispatch
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Erasure` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// Every table of the schema in which the text or the bytes occur.
    private func traces(_ token: String, _ more: [String] = []) throws -> [String] {
        var owner = try database.connect()
        let tables = try owner.lines(
            """
            SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'r' ORDER BY 1
            """, columns: 1)
        return try tables.filter { table in
            try owner.scalar(
                """
                SELECT count(*) FROM tokenkeeper.\(table) AS r
                WHERE to_jsonb(r)::text ILIKE ANY (ARRAY[\(([token] + more).map { "'%\($0)%'" }.joined(separator: ", "))])
                """) != "0"
        }
    }

    private func fill(_ token: String, device: String) throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            SELECT tokenkeeper.register('\(token)', 't', registered_at => '2025-01-01Z', device_id => '\(device)');
            SELECT tokenkeeper.register('\(token)', 'u', 'sandbox', registered_at => '2025-01-01Z', device_id => '\(device)');
            SELECT tokenkeeper.register('cccccccc', 't', registered_at => '2025-01-01Z', device_id => 'other');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', '\(token)', 400, '{"reason":"BadDeviceToken"}'), ('t', ' \(token)', 410, NULL), ('t', 'cccccccc', 410, NULL);
            """)
        try drainAll(&daemon)
        try database.psql("UPDATE tokenkeeper.topic_policy SET guard_max_share = 0, guard_allowance = 0")
        let holding = Drain(
            lockTimeout: .milliseconds(50), guardLimits: GuardLimits(allowance: 0, maxShare: .percent(0)),
            interpret: Interpretation.verdict(on:))
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body)
            VALUES ('sandbox', 'u', '\(token.uppercased())', 400, '{"reason":"BadDeviceToken"}')
            """)
        #expect(try drainAll(&daemon, drain: holding).held == 1)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', '\(token)', 410), ('v', '\(token.uppercased())', 410),
                ('t', 'cccccccc', 410)
            """)
    }

    private let everywhere: [String] = [
        "held_result", "ledger", "receipt", "rejected_result",
    ]

    @Test func `a token in the column of the topic of a request is forgotten, too`() throws {
        let (token, other) = (String(repeating: "ab", count: 32), String(repeating: "cd", count: 32))
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT t, 'com.example.app', '{}' FROM unnest('{\(token),\(other)}'::text[]) AS t;
            INSERT INTO tokenkeeper.failed_send (error, topic, token, payload, queued_at, attempts)
            SELECT 'topic is a device token', t, 'com.example.app', '{}', now(), 0 FROM unnest('{\(token),\(other)}'::text[]) AS t;
            SELECT tokenkeeper.forget('\(token)')
            """)
        let left = "(SELECT string_agg(topic, ' ') FROM tokenkeeper."
        #expect(try database.psql("SELECT \(left)send_request), \(left)failed_send)") == "\(other)|\(other)")
    }

    @Test func `it removes every trace of a token except counts, and the drain does not restore it`() throws {
        try fill("aaaaaaaa", device: "phone")
        let before = try traces("aaaaaaaa")
        #expect(Set(everywhere).isSubset(of: before) && before.contains { $0.hasPrefix("token_event_log_") })
        #expect(before.contains { $0.hasPrefix("send_result_") })
        let rows = try database.psql("SELECT tokenkeeper.forget('AAAAAAAA')", user: "a_app")
        #expect((Int(rows) ?? 0) >= 9)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try traces("aaaaaaaa") == [])
        #expect(try traces("cccccccc").contains("ledger"), "others stay")
        #expect(
            try database.psql(
                "SELECT rows, environment, topic, message FROM tokenkeeper.operation WHERE operation = 'forgotten'")
                == "\(rows)|||")
        #expect(try database.psql("SELECT tokenkeeper.forget('aaaaaaaa')", user: "a_operator") == "0")
    }

    @Test func `a device is forgotten with all its tokens, including pruned ones`() throws {
        try fill("aaaaaaaa", device: "phone")
        try database.psql(
            "SELECT tokenkeeper.register('bbbbbbbb', 't', registered_at => '2024-01-01Z', device_id => 'phone')")
        try database.psql("DELETE FROM tokenkeeper.ledger WHERE token_key = '\\xbbbbbbbb'")
        try database.psql("SELECT tokenkeeper.forget_device('phone')", user: "a_app")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try traces("aaaaaaaa", ["bbbbbbbb", "phone"]) == [])
        #expect(try database.psql("SELECT string_agg(DISTINCT token, ',') FROM tokenkeeper.token") == "cccccccc")
    }

    @Test func `it waits for running batches, and no batch begins meanwhile`() throws {
        try database.psql("SELECT tokenkeeper.register('aaaaaaaa', 't', registered_at => '2025-01-01Z')")
        try database.psql("INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aaaaaaaa', 410)")
        // A manual batch: the result has left the queue, but the transaction is not committed.
        var batch = try database.connect()
        try batch.execute(
            """
            BEGIN; LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; DELETE FROM tokenkeeper.send_result;
            INSERT INTO tokenkeeper.send_result_retry (topic, token, status, partition_number) VALUES ('t', 'aaaaaaaa', 410, 8);
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, stale_at, suppressed_since) SELECT topic_id, '\\xaaaaaaaa01', now(), now() FROM tokenkeeper.topic;
            """)
        let database = database
        let failures = Failures()
        let done = DispatchSemaphore(value: 0)
        DispatchQueue.global().async {
            do {
                try database.psql("SELECT tokenkeeper.forget('aaaaaaaa')", user: "a_app")
            } catch {
                failures.add("\(error)")
            }
            done.signal()
        }
        // Only a superuser sees what another role waits for.
        var watcher = try database.connect(user: "postgres")
        try eventually("it waits") {
            try watcher.scalar(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tokenkeeper.lock_erasure'::regclass AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            ) == "1"
        }
        // A daemon finds results and does not touch them.
        try database.psql("INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'dd', 410)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).recorded == 0)
        try batch.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.token") == "aaaaaaaa01,dd")
    }

    @Test func `without a token or a device it raises a clear error`() throws {
        for call in ["forget('xyz')", "forget(NULL)", "forget_device(NULL)", "forget_user(NULL)", "forget_user('')"] {
            var app = try database.connect(user: "a_app")
            let error = #expect(throws: DatabaseError.self) { try app.execute("SELECT tokenkeeper.\(call)") }
            #expect(error?.sqlState == "22023")
        }
    }

    @Test func `a user is forgotten with all tokens and events, in the ledger and in the queues`() throws {
        try fill("aaaaaaaa", device: "phone")
        try database.psql(
            """
            SELECT tokenkeeper.register('aaaaaaaa', 't', user_id => 'ann');
            SELECT tokenkeeper.register('bbbbbbbb', 't', user_id => 'ann');
            SELECT tokenkeeper.register('cccccccc', 't', user_id => 'ann');
            SELECT tokenkeeper.register('cccccccc', 't', user_id => 'ben');
            SELECT tokenkeeper.register('dddddddd', 't', user_id => 'ann');
            SELECT tokenkeeper.unregister('dddddddd', 't');
            SELECT tokenkeeper.register('dddddddd', 't', user_id => '');
            DELETE FROM tokenkeeper.ledger WHERE token_key = '\\xbbbbbbbb';
            INSERT INTO tokenkeeper.registration (topic, token, user_id) VALUES ('t', 'eeeeeeee', 'ann'), ('t', 'ffffffff', 'ben');
            INSERT INTO tokenkeeper.rejected_registration (error, token, user_id, queued_at) VALUES ('e', 'x', 'ann', now()), ('e', 'y', 'ben', now());
            INSERT INTO tokenkeeper.held_registration (topic_id, token_key, invalidated_at, user_id, queued_at)
            SELECT topic_id, '\\x99', now(), u, now() FROM tokenkeeper.topic, unnest('{ann,ben}'::text[]) AS u WHERE topic = 't';
            """)
        #expect(try traces("aaaaaaaa", ["ann"]).count > 5)
        try database.psql("SELECT tokenkeeper.forget_user('ann')", user: "a_app")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try traces("aaaaaaaa", ["bbbbbbbb", "eeeeeeee", "phone", "\"ann\""]) == [])
        #expect(
            try database.psql("SELECT token, user_id FROM tokenkeeper.token ORDER BY 1")
                == "cccccccc|ben\ndddddddd|\nffffffff|ben",
            "others have these tokens now, and the drain has applied what ben had queued")
        #expect(
            try database.psql(
                "SELECT (SELECT count(*) FROM tokenkeeper.rejected_registration), (SELECT count(*) FROM tokenkeeper.held_registration)"
            ) == "1|1")
        #expect(try database.psql("SELECT tokenkeeper.forget_user('nobody')", user: "a_operator") == "0")
    }

    @Test func `queued and rejected registrations of a token go, in any form`() throws {
        let token = String(repeating: "ab12cd34", count: 8)
        let base64 = "encode(decode('\(token)', 'hex'), 'base64')"
        let forms = [
            "'\(token)'", "'\(token.uppercased())'", "'<\(token.prefix(8)) \(token.dropFirst(8))>'", "'0x\(token)'",
            "chr(92) || 'x\(token)'", "rtrim(regexp_replace('\(token)', '(..)', '\\1-', 'g'), '-')", base64,
            "rtrim(translate(\(base64), '+/', '-_'), '=')", "'token=\(token)'",
        ]
        // What is queued is tried later; what is rejected stays.
        for table in ["registration (", "rejected_registration (error, "] {
            let error = table.hasPrefix("rejected") ? "'e', " : ""
            for form in forms {
                try database.psql(
                    "INSERT INTO tokenkeeper.\(table)topic, token, queued_at) VALUES (\(error)'t', \(form), now())")
            }
            for column in ["topic", "device_id", "user_id", "environment"] {
                try database.psql(
                    "INSERT INTO tokenkeeper.\(table)\(column), queued_at) VALUES (\(error)'\(token)', now())")
            }
            try database.psql(
                "INSERT INTO tokenkeeper.\(table)token, tags, queued_at) VALUES (\(error)'ff', ARRAY['\(token)'], now())"
            )
            try database.psql(
                "INSERT INTO tokenkeeper.\(table)topic, token, queued_at) VALUES (\(error)'t', 'ab12cd34', now())")
        }
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app") == "\((forms.count + 5) * 2)")
        for table in ["registration", "rejected_registration"] {
            #expect(try database.psql("SELECT token FROM tokenkeeper.\(table)") == "ab12cd34")
        }
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', 'ff', 'phone'), ('t', 'ff', 'tablet')"
        )
        #expect(try database.psql("SELECT tokenkeeper.forget_device('phone')", user: "a_app") == "1")
    }

    @Test func `rejected results with the token in any spelling go, and others with some of its digits stay`() throws {
        let token = String(repeating: "ab12cd34", count: 8)
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, topic, token, body, queued_at)
            SELECT 'e', t, k, b, now() FROM (VALUES
                ('t', '0x\(token)', NULL), ('t', 'token=\(token.uppercased())', NULL), ('\(token)', 't', NULL),
                ('t', encode(decode('\(token)', 'hex'), 'base64'), NULL), ('t', NULL, '{"device":"\(token)"}'),
                ('t', '<\(token.prefix(8)) \(token.dropFirst(8))>', NULL), ('t', 'ab12cd34', NULL)) AS v (t, k, b)
            """)
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app") == "6")
        #expect(try database.psql("SELECT token FROM tokenkeeper.rejected_result") == "ab12cd34")
        #expect(try database.psql("SELECT tokenkeeper.forget('12cd')", user: "a_app") == "0")
    }

    @Test func `concurrent registration, undo, discarding and erasure never deadlock`() throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', device_id => 'd' || i % 5, registered_at => '2025-01-01Z')) FROM generate_series(1, 20) AS i;
            """)
        let database = database
        let failures = Failures()
        DispatchQueue.concurrentPerform(iterations: 9) { worker in
            do {
                if worker == 8 {
                    var daemon = try database.connect(user: "a_daemon")
                    var drain = Drain(
                        lockTimeout: .milliseconds(50), guardLimits: GuardLimits(allowance: 3, maxShare: .percent(0)),
                        interpret: Interpretation.verdict(on:))
                    for _ in 0..<150 { _ = try drain.onePass(on: &daemon) }
                    return
                }
                var session = try database.connect()
                for round in 0..<150 { try session.execute(Self.work(of: worker, round)) }
            } catch {
                failures.add("\(worker): \(error)")
            }
        }
        #expect(failures.all == [])
    }

    @Test func `what was noted of a crowded device is gone when its last token is forgotten`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(lpad(to_hex(i), 4, '0'), 't', device_id => 'constant') FROM generate_series(1, 55) AS i"
        )
        let left = "SELECT count(device_id) FROM tokenkeeper.operation WHERE operation = 'device_crowded'"
        #expect(try database.psql(left) == "2")
        try database.psql("SELECT tokenkeeper.forget(lpad(to_hex(i), 4, '0')) FROM generate_series(1, 54) AS i")
        #expect(try database.psql(left) == "2")
        try database.psql("SELECT tokenkeeper.forget('0037')")
        #expect(try database.psql(left) == "0")
    }

    /// Forgets the device `old`, and waits for a lock of another session until `release` releases it.
    ///
    /// - Returns: The errors of the forgetting session.
    private func failuresOfForgettingOldDevice(release: () throws -> Void) throws -> [String] {
        let database = database
        let failures = Failures()
        let done = DispatchSemaphore(value: 0)
        DispatchQueue.global().async {
            do {
                try database.psql("SELECT tokenkeeper.forget_device('old')", user: "a_app")
            } catch {
                failures.add("\(error)")
            }
            done.signal()
        }
        // Only a superuser sees what another role waits for.
        var watcher = try database.connect(user: "postgres")
        try eventually("it waits") {
            try watcher.scalar(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
                == "1"
        }
        try release()
        done.wait()
        return failures.all
    }

    @Test func `a token that has moved to another device is not forgotten with the first`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', device_id => 'old') FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS t")
        var moving = try database.connect()
        try moving.execute("BEGIN; SELECT tokenkeeper.register('aaaaaaaa', 't', device_id => 'new')")
        let failures = try failuresOfForgettingOldDevice { try moving.execute("COMMIT") }
        #expect(failures == [])
        #expect(try database.psql("SELECT token, device_id FROM tokenkeeper.token") == "aaaaaaaa|new")
    }

    @Test func `forgetting a device that waits for a token holds no other token`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', device_id => 'old') FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS t")
        var holding = try database.connect()
        try holding.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = '\\xaaaaaaaa' FOR UPDATE")
        let failures = try failuresOfForgettingOldDevice {
            try holding.execute("SELECT FROM tokenkeeper.ledger FOR UPDATE; COMMIT")
        }
        #expect(failures == [])
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token") == "0")
    }

    @Test func `a token is found anywhere in a large body`() throws {
        let token = String(repeating: "ab12cd34", count: 8)
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, topic, token, body, queued_at)
            SELECT 'e', 't', 'x', repeat('0123456789 ', 10000) || CASE WHEN i = 7 THEN upper('\(token)') ELSE '' END, now()
            FROM generate_series(1, 20) AS i
            """)
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app") == "1")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "19")
    }

    private static func work(of worker: Int, _ round: Int) -> String {
        func token(_ factor: Int) -> String { "lpad(to_hex(\(round * factor % 20 + 1)), 8, '0')" }
        return switch worker {
        case 0:
            "SELECT tokenkeeper.register(\(token(1)), 't', device_id => 'd\(round * 7 % 5)', user_id => 'u\(round % 7)')"
        case 1: "SELECT tokenkeeper.register(\(token(3)), 't', device_id => 'd\(round * 3 % 5)')"
        case 2: "SELECT tokenkeeper.forget(\(token(13)))"
        case 3: "SELECT tokenkeeper.\(round % 2 == 0 ? "forget_device('d" : "forget_user('u")\(round % 5)')"
        case 4: "SELECT tokenkeeper.reinstate('t', 'production', now() - \(round + 1) * interval '1 minute', now())"
        case 5: "SELECT tokenkeeper.discard_held('t', 'production')"
        case 6: "SELECT tokenkeeper.undo_next(10)"
        default:
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('t', \(token(1)), 400, '{"reason":"BadDeviceToken"}')
            """
        }
    }
}
