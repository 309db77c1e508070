import APNsFeedback
import Dispatch
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Erasure` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.ofErasures.database()
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

    /// Drains, and does what a daemon does ten minutes later.
    private func finish() throws {
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try database.finishErasures()
    }

    private func expectNoTraces(_ token: String, _ more: [String] = []) throws {
        let left = try traces(token, more)
        #expect(left == [])
    }

    private func fill(_ token: String, device: String) throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            SELECT tokenkeeper.register('\(token)', 't', registered_at => '2025-01-01Z', device_id => '\(device)');
            SELECT tokenkeeper.register('\(token)', 'u', 'sandbox', registered_at => '2025-01-01Z', device_id => '\(device)');
            SELECT tokenkeeper.register('cccccccc', 't', registered_at => '2025-01-01Z', device_id => 'other');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', '\(token)', 400, '{"reason":"BadDeviceToken"}'), ('t', '\(token)?', 410, NULL), ('t', 'cccccccc', 410, NULL);
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
        try finish()
        let left = "(SELECT string_agg(topic, ' ') FROM tokenkeeper."
        #expect(try database.psql("SELECT \(left)send_request), \(left)failed_send)") == "\(other)|\(other)")
    }

    @Test func `it removes every trace of a token except counts, and the drain does not restore it`() throws {
        try fill("aaaaaaaa", device: "phone")
        let before = try traces("aaaaaaaa")
        #expect(Set(everywhere).isSubset(of: before) && before.contains { $0.hasPrefix("token_event_log_") })
        #expect(before.contains { $0.hasPrefix("send_result_") })
        let rows = try database.psql("SELECT tokenkeeper.forget('AAAAAAAA')", user: "a_app")
        #expect((Int(rows) ?? 0) >= 7)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try traces("aaaaaaaa").allSatisfy { ["erasure", "rejected_result"].contains($0) })
        try finish()
        try expectNoTraces("aaaaaaaa")
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
        try finish()
        try expectNoTraces("aaaaaaaa", ["bbbbbbbb", "phone"])
        #expect(try database.psql("SELECT string_agg(DISTINCT token, ',') FROM tokenkeeper.token") == "cccccccc")
    }

    @Test func `it waits for no batch and stops none, and what a running batch writes goes later`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('aaaaaaaa', 't', registered_at => '2025-01-01Z', user_id => 'ann'), tokenkeeper.register('dddddddd', 't');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aaaaaaaa', 410, \(goneBody));
            """)
        // The registration of another token has left the queue, and is not committed.
        var batch = try database.connect()
        try batch.execute(
            """
            BEGIN;
            SELECT FROM tokenkeeper.apply_registrations(
                ARRAY[ROW('production', 't', 'bbbbbbbb', '2025-01-02Z', NULL, 'ann', NULL, false, NULL, NULL, NULL, '2025-01-02Z', 8, NULL, NULL)::tokenkeeper.registration],
                5, 1, 0)
            """)
        var forgetting = try database.connect()
        try forgetting.execute("BEGIN; SELECT tokenkeeper.forget_user('ann')")
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'dddddddd', 410, \(goneBody))"
        )
        #expect(try drainAll(&daemon).recorded == 1, "the other one waits for its token")
        try forgetting.execute("COMMIT")
        try drainAll(&daemon)
        try batch.execute("COMMIT")
        #expect(try database.psql("SELECT token FROM tokenkeeper.token ORDER BY 1") == "bbbbbbbb\ndddddddd")
        try finish()
        #expect(try database.psql("SELECT token FROM tokenkeeper.token") == "dddddddd")
        try expectNoTraces("aaaaaaaa", ["bbbbbbbb", "ann"])
    }

    @Test func `what a batch has written of a token that was registered since goes, and the rest stays`() throws {
        try database.psql("SELECT tokenkeeper.register('bbbbbbbb', 't')")
        var late = try database.connect()
        try late.execute(
            "BEGIN; SELECT tokenkeeper.register('aaaaaaaa', 't', device_id => 'phone', user_id => 'ann', tags => '{vip}')"
        )
        try database.psql(
            "SELECT tokenkeeper.forget_user('ann'), tokenkeeper.forget_device('phone'), tokenkeeper.forget('bbbbbbbb')")
        try late.execute("COMMIT")
        // A launch that names nobody; and requests before somebody else is forgotten.
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't') FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS x;
            INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 't', x, '{"aps":{}}' FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS x;
            SELECT tokenkeeper.forget('cccccccc')
            """)
        try finish()
        #expect(
            try database.psql("SELECT token, state, device_id, user_id, tags FROM tokenkeeper.token ORDER BY 1")
                == "aaaaaaaa|active|||\nbbbbbbbb|active|||")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_request") == "2")
        try expectNoTraces("phone", ["ann", "vip", "cccccccc"])
    }

    @Test func `a token that has another user in the queue stays, and a logout right after makes no row`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't', user_id => 'ann') FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS x;
            INSERT INTO tokenkeeper.registration (topic, token, user_id) VALUES ('t', 'aaaaaaaa', 'ben');
            SELECT tokenkeeper.forget_user('ann');
            INSERT INTO tokenkeeper.registration (topic, token, unregistered) VALUES ('t', 'bbbbbbbb', true)
            """)
        try finish()
        #expect(try database.psql("SELECT token, user_id FROM tokenkeeper.token") == "aaaaaaaa|ben")
        try expectNoTraces("bbbbbbbb", ["ann"])
    }

    @Test(arguments: ["aaaaaaaa", "<AAAA aaaa>", "0xaaaaaaaa"])
    func `a logout after the device has registered again counts, however its token is spelled`(token: String) throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('aaaaaaaa', 't', registered_at => '2025-01-01Z');
            SELECT tokenkeeper.forget('aaaaaaaa');
            SELECT tokenkeeper.register('aaaaaaaa', 't', registered_at => clock_timestamp());
            INSERT INTO tokenkeeper.registration (topic, token, unregistered) VALUES ('t', '\(token)', true)
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT token, state FROM tokenkeeper.token") == "aaaaaaaa|unregistered_by_app")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.erasure") == "1")
    }

    @Test func `what was reported before is dropped where it surfaces, and what is reported since counts`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't', registered_at => '2025-01-01Z', device_id => 'phone') FROM unnest('{aaaaaaaa,bbbbbbbb}'::text[]) AS x;
            INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', 'cccccccc', 'phone'), ('t', 'aaaaaaaa', NULL);
            INSERT INTO tokenkeeper.registration (topic, token, unregistered) VALUES ('t', 'bbbbbbbb', true);
            INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 't', x, '{"aps":{"alert":"A"}}' FROM unnest('{AAAAAAAA,dddddddd}'::text[]) AS x;
            SELECT tokenkeeper.forget_device('phone');
            -- A file from before, and the response to a push that was under way.
            INSERT INTO tokenkeeper.registration (topic, token, registered_at) VALUES ('t', 'bbbbbbbb', '2025-01-01Z');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aaaaaaaa', 410, \(goneBody));
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT token FROM tokenkeeper.token") == "")
        let claim =
            "SELECT outcome, encode(token_key, 'hex') FROM tokenkeeper.claim_requests('production', 't', 'd', 10, NULL, '-infinity')"
        #expect(try database.psql(claim) == "claimed|dddddddd")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_request") == "1")
        // The person has the app again.
        try database.psql(
            """
            SELECT tokenkeeper.register('aaaaaaaa', 't', device_id => 'phone', registered_at => clock_timestamp());
            INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', 'eeeeeeee', 'phone')
            """)
        try drainAll(&daemon)
        let left = "SELECT token, state FROM tokenkeeper.token ORDER BY 1"
        #expect(try database.psql(left) == "aaaaaaaa|superseded\neeeeeeee|active")
        try database.psql("SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', 't', device_id => 'phone')")
        try database.psql("UPDATE tokenkeeper.erasure SET seen_before = '9223372036854775807'")
        try finish()
        #expect(try database.psql("SELECT state <> 'cancelled' FROM tokenkeeper.campaign") == "t")
        #expect(try database.psql(left) == "aaaaaaaa|superseded\neeeeeeee|active")
    }

    @Test func `without a token or a device it raises a clear error`() throws {
        for call in [
            "forget('xyz')", "forget(NULL)", "forget_device(NULL)", "forget_user(NULL)", "forget_user('')",
            "forget_user(repeat('u', 513))",
        ] {
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
        try finish()
        try expectNoTraces("aaaaaaaa", ["bbbbbbbb", "eeeeeeee", "phone", "\"ann\""])
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
        #expect(try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app") == "\(forms.count + 5)")
        #expect(try database.psql("SELECT token FROM tokenkeeper.rejected_registration") == "ab12cd34")
        try database.psql(
            "INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', 'ff', 'phone'), ('t', 'ee', 'tablet')"
        )
        #expect(try database.psql("SELECT tokenkeeper.forget_device('phone')", user: "a_app") == "0")
        try finish()
        #expect(try database.psql("SELECT token FROM tokenkeeper.token ORDER BY 1") == "ab12cd34\nee")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_registration") == "1")
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
        // A token of 96 bytes in base64 has line breaks.
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, topic, token, body, queued_at)
            SELECT 'e', 't', k, b, now() FROM (SELECT encode(decode(repeat('\(token)', 3), 'hex'), 'base64') AS c) AS f
            CROSS JOIN LATERAL (VALUES (c, NULL), ('x', c), ('x', to_jsonb(c)::text)) AS v (k, b)
            """)
        #expect(try database.psql("SELECT tokenkeeper.forget(repeat('\(token)', 3))", user: "a_app") == "3")
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

    /// A trigger holds the batch after it has written the token, and before it looks for erasures.
    @Test(arguments: ["registration", "send_result"])
    func `what a batch wrote before somebody was forgotten is gone when it commits`(_ queue: String) throws {
        let token = String(repeating: "ab12cd34", count: 8)
        try database.psql(
            """
            CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN
                    WHILE NOT pg_try_advisory_xact_lock_shared(hashtext(current_database())) LOOP PERFORM pg_sleep(0.01); END LOOP;
                    RETURN NULL;
                END $$;
            CREATE TRIGGER wait AFTER INSERT ON tokenkeeper.ledger FOR EACH ROW EXECUTE FUNCTION public.wait()
            """, user: "postgres")
        var holder = try database.connect()
        try holder.execute("SELECT pg_advisory_lock(hashtext(current_database()))")
        let (columns, values) =
            queue == "registration"
            ? ("topic, token", "'t', '\(token)'")
            : ("topic, token, status, body", "'t', '\(token)', '410', \(goneBody)")
        try database.psql("INSERT INTO tokenkeeper.\(queue) (\(columns)) VALUES (\(values))")
        let daemon = try DaemonProcess(database.url(), settings: ["sweep.interval=off"])
        try eventually("the batch has written the token, and waits") {
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'",
                user: "postgres") == "1"
        }
        try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app")
        try holder.execute("SELECT pg_advisory_unlock_all()")
        try eventually("the batch has committed") {
            try database.psql("SELECT count(*) FROM tokenkeeper.\(queue)") == "0"
        }
        #expect(try traces(token).filter { $0 != "erasure" } == [])
        #expect(daemon.stop() == 0)
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
        case 6: "SELECT tokenkeeper.undo_next(10), tokenkeeper.finish_erasures('0')"
        default:
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            VALUES ('t', \(token(1)), 400, '{"reason":"BadDeviceToken"}')
            """
        }
    }
}
