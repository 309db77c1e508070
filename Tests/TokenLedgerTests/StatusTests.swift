import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Status` {
    @Test func `it shows what a daemon saw and counted, and its warnings`() throws {
        let database = try TestCluster.shared.database()
        let look =
            "SELECT queue_depth, queue_depth_estimated, rejected, held, tokens_active, tokens_stale, live_daemons, warnings FROM tokenkeeper.status"
        #expect(try database.psql(look) == "0|f|0|0|0|0|0|{\"no daemon has ever run on this database\"}")
        try database.psql(
            "SELECT tokenkeeper.register(t, 't') FROM unnest('{aa,bb}'::text[]) AS t; SELECT tokenkeeper.unregister('cc', 't')"
        )
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'zz', 410), ('t', 'bb', 410)",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        try heartbeat.lookAndBeat(sweepInterval: .seconds(3600), on: &daemon)
        #expect(try database.psql(look) == "2|f|0|0|2|0|1|{}")
        try drainAll(&daemon)
        try heartbeat.lookAndBeat(sweepInterval: .seconds(3600), on: &daemon)
        #expect(
            try database.psql(look)
                == "0|f|1|0|2|0|1|{\"1 result could not be understood, 1 within the last hour; see `tokenkeeperd rejected list`\"}"
        )
        #expect(
            try database.psql("SELECT state, sum(tokens) FROM tokenkeeper.token_count GROUP BY 1 ORDER BY 1")
                == "active|2\nunregistered_by_app|1")
        try heartbeat.signOff(on: &daemon)
        #expect(
            try database.psql(
                "SELECT live_daemons, warnings::text LIKE '%no daemon is running; the last was seen at%' FROM tokenkeeper.status"
            ) == "0|t")
    }

    @Test func `without a daemon it counts the queue itself, and says so`() throws {
        let database = try TestCluster.shared.database()
        let look = """
            SELECT queue_depth, queue_depth_estimated, queue_as_of > now() - interval '1 minute', results_wait_because,
                   oldest_result_age > interval '200 days' FROM tokenkeeper.status
            """
        func queue(_ results: Int) throws {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_result (topic, token, status, queued_at)
                SELECT 't', 'aa', 200, '2026-01-02 03:04:05Z' FROM generate_series(1, \(results))
                """)
        }
        try queue(17_000)
        #expect(try database.psql(look, user: "a_reader") == "17000|f|t|no daemon reports|t")

        var holder = try database.connect()
        let partition = try #require(
            try holder.scalar("SELECT tableoid::regclass FROM tokenkeeper.send_result LIMIT 1"))
        try holder.execute("BEGIN; LOCK TABLE \(partition)")
        try eventually("a locked partition is estimated") {
            try database.psql(
                "SELECT queued, is_estimated, oldest_queued_at IS NULL FROM tokenkeeper.look_at_queue('send_result')")
                == "17000|t|t"
        }
        try holder.execute("ROLLBACK")

        try queue(80_000)
        try eventually("a long queue is estimated") { try database.psql(look) == "97000|t|t|no daemon reports|t" }
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        try heartbeat.beat(
            results: .init(.init(depth: 7, exact: true), reason: "of a test"), registrations: .none, sweepInterval: nil,
            on: &daemon)
        #expect(try database.psql(look) == "7|f|t|of a test|", "a daemon knows better")
        let rates = "SELECT results_per_second, registrations_per_second, requests_per_second FROM tokenkeeper.status"
        #expect(try database.psql(rates) == "0.0|0.0|")
        for name in ["d", "e"] {
            let other = try Heartbeat(
                daemonID: name, version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50),
                on: &daemon)
            try other.beat(
                results: .init(.init(depth: 7, exact: true), perSecond: 12.34),
                registrations: .init(.init(depth: 0, exact: true), perSecond: 1), sweepInterval: nil, on: &daemon)
        }
        #expect(try database.psql(rates) == "24.6|2.0|")
    }

    @Test func `it does not wait for a lock, but says who holds it and what the daemon saw`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        try heartbeat.beat(
            results: .init(.init(depth: 7, exact: true)), registrations: .none, sweepInterval: nil, on: &daemon)
        var holder = try database.connect()
        let pid = try #require(try holder.scalar("SELECT pg_backend_pid()"))
        try holder.execute("SET application_name = 'a test'")
        try holder.execute("BEGIN; LOCK TABLE tokenkeeper.failed_send")
        #expect(
            try database.psql(
                "SELECT queue_depth, live_daemons, failed_sends, warnings[1] FROM tokenkeeper.status", user: "a_reader")
                == "7|1||most of this status is unknown, because tokenkeeper.failed_send is locked (ACCESS EXCLUSIVE) by "
                + "pid \(pid), role owner, application a test")
        let page = try Overview(within: .seconds(2), on: &daemon)
        #expect(page["queue_depth"] == 7 && page["failed_sends"] == nil && page.tokens.allSatisfy { $0 == nil })
        #expect(page.status.warnings.first?.hasPrefix("most of this status is unknown") == true)
        try holder.execute("ROLLBACK; BEGIN; LOCK TABLE tokenkeeper.daemon IN SHARE MODE")
        #expect(
            try warnings(database)
                == [
                    "daemons cannot report, because tokenkeeper.daemon is locked (SHARE) by pid \(pid), role owner, application a test"
                ])
        try holder.execute("ROLLBACK")
        #expect(try database.psql("SELECT failed_sends, warnings FROM tokenkeeper.status") == "0|{}")
    }

    @Test func `requests are overdue after five minutes, unless their topic is paused or its rate was used lately`()
        throws
    {
        let database = try TestCluster.shared.database()
        let pages = "SELECT cause, topic FROM tokenkeeper.critical_warning WHERE cause <> 'no_daemon' ORDER BY 1, 2"
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at)
            SELECT t, 'aa', '{}', clock_timestamp() - a::interval
            FROM (VALUES ('late', '301 seconds'), ('young', '290 seconds'), ('paused', '1 hour'), ('slow', '1 hour'),
                         ('stopped', '1 hour')) AS v (t, a);
            INSERT INTO tokenkeeper.topic (environment, topic, max_per_second) VALUES
                ('production', 'slow', 5), ('production', 'stopped', 5);
            INSERT INTO tokenkeeper.topic_rate (topic_id, next_send_at)
            SELECT topic_id, clock_timestamp() - CASE topic WHEN 'slow' THEN interval '4 minutes' ELSE interval '6 minutes' END
            FROM tokenkeeper.topic;
            SELECT tokenkeeper.pause_sending('paused')
            """)
        #expect(
            try database.psql(pages) == "requests_wait|late\nrequests_wait|stopped\ntopic_paused|paused")
        #expect(
            try database.psql(
                "SELECT critical_warnings = ARRAY(SELECT warning FROM tokenkeeper.critical_warning) FROM tokenkeeper.status"
            )
                == "t")
    }

    @Test func `four daemons of a host that ended within 15 minutes without stopping in order are a crash loop`() throws
    {
        let database = try TestCluster.shared.database()
        func add(_ host: String, _ ends: Int, stopped: String = "NULL") throws {
            try database.psql(
                """
                INSERT INTO tokenkeeper.daemon (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact, stopped_at)
                SELECT '\(host)/' || i || '/\(stopped)', '0.1.0', clock_timestamp() - i * interval '1 minute',
                       clock_timestamp() - i * interval '1 minute' + interval '5 seconds', 0, true, \(stopped)
                FROM generate_series(1, \(ends)) AS i
                """)
        }
        try add("a", 3)
        try add("a", 9, stopped: "clock_timestamp()")
        try add("b/c", 5)
        // Only silent.
        try database.psql(
            """
            INSERT INTO tokenkeeper.daemon (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact)
            SELECT 'd/' || i || '/1', '0.1.0', clock_timestamp() - interval '2 minutes', clock_timestamp() - interval '1 minute', 0, true
            FROM generate_series(1, 9) AS i
            """)
        #expect(
            try database.psql("SELECT warning FROM tokenkeeper.critical_warning WHERE cause = 'crash_loop'").hasPrefix(
                "daemons on b/c have ended 4 times within 15 minutes"))
    }

    @Test func `it has the age of the oldest request that is due, in a small outbox and in a large one`() throws {
        let database = try TestCluster.shared.database()
        let look = """
            SELECT date_trunc('minute', oldest_due_request_age), array_to_string(warnings, ';') LIKE '%have been due since 20%' FROM tokenkeeper.status
            """
        func queue(_ topic: String, _ requests: Int, dueAgo: String) throws {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at)
                SELECT '\(topic)', lpad(to_hex(i), 8, '0'), '{"aps":{"alert":"1"}}', clock_timestamp() - interval '\(dueAgo)'
                FROM generate_series(1, \(requests)) AS i
                """)
        }
        #expect(try database.psql(look) == "|f")
        try queue("later", 1, dueAgo: "-1 hour")
        #expect(try database.psql(look) == "|f")
        try queue("b", 1, dueAgo: "70 seconds")
        try queue("a", 2, dueAgo: "40 minutes 10 seconds")
        #expect(try database.psql(look) == "00:40:00|t")
        try queue("c", 60_000, dueAgo: "10 seconds")
        #expect(try database.psql(look) == "|t", "a daemon has to look for the age; the warning does not wait for one")
        try lookForWarnings(database)
        #expect(try database.psql(look) == "00:40:00|t")
    }

    @Test func `a running statement stops on request`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let stop = Wakeup()
        stop.ring()
        let error = #expect(throws: DatabaseError.self) {
            _ = try owner.query("SELECT pg_sleep(600)", cancelWhen: stop)
        }
        #expect(error?.sqlState == "57014")
        #expect(try owner.scalar("SELECT 1") == "1", "the connection is still good")
    }

    @Test func `the report has JSON for programs and names for people`() throws {
        let database = try TestCluster.shared.database()
        var reader = try database.connect(user: "a_reader")
        let report = try StatusReport(on: &reader)
        #expect(report.json.hasPrefix(#"{"queue_depth":0,"queue_depth_estimated":false,"oldest_result_age":null"#))
        #expect(report.fields.contains(.init(name: "live_daemons", kind: .number, value: "0")))
        #expect(report.criticalWarnings == report.warnings)
        #expect(report.warnings == ["no daemon has ever run on this database"])
    }

    private func warnings(_ database: TestDatabase) throws -> [String] {
        try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").split(separator: "\n").map(String.init)
            .filter { !$0.contains("no daemon") }
    }

    private func lookForWarnings(_ database: TestDatabase) throws {
        var daemon = try database.connect(user: "a_daemon")
        var cache = StatusCache(.production)
        try cache.refresh(on: &daemon)
    }

    @Test func `it warns of a topic that has results and no registrations`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', t, registered_at => now() - interval '25 hours') FROM unnest('{t,u,new,quiet}'::text[]) AS t;
            INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT t, 'aa', 200 FROM unnest('{t,u,new,never}'::text[]) AS t;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('never', 'bb', 410, \(goneBody));
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try database.psql(
            """
            UPDATE tokenkeeper.topic SET first_seen = first_seen - interval '25 hours' WHERE topic <> 'new';
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
                SELECT now() - h * interval '1 hour', 'production', 'accepted.only', 200, 5 FROM unnest('{1,30}'::int[]) AS h;
            """)
        try database.psql("SELECT tokenkeeper.register('bb', 'u')")
        try lookForWarnings(database)
        let ask = "does the app call tokenkeeper.register?"
        #expect(
            try warnings(database) == [
                "t (production) had results within 24 hours, but no registration: \(ask)",
                "accepted.only (production) has results, but no token of it was ever registered: \(ask)",
                "never (production) has results, but no token of it was ever registered: \(ask)",
            ])
    }

    @Test func `it warns at once of a mistyped topic, with the one that it resembles`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', t) FROM unnest('{com.example.app,com.example.app.voip}'::text[]) AS t;
            SELECT tokenkeeper.report('com.exmaple.app', 'aa', 200);
            -- However many tokens are known otherwise.
            SELECT count(tokenkeeper.unregister(lpad(to_hex(n), 64, '0'), 'known')) FROM generate_series(1, 10001) AS n;
            SELECT tokenkeeper.register('aa', 'known'), tokenkeeper.report('known', 'aa', 200);
            INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('com.example.ap', 'observe'), ('org.example.next', 'observe')
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try lookForWarnings(database)
        let never = "but no token of it was ever registered: is it com.example.app?"
        #expect(
            try warnings(database) == [
                "com.exmaple.app (production) has results, \(never)",
                "com.example.ap (production) has a policy, \(never)",
            ])
    }

    @Test func `it warns of erasures that cannot be finished`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.forget('aa'), tokenkeeper.forget('bb')")
        try lookForWarnings(database)
        #expect(try warnings(database) == [])
        try database.psql(
            "UPDATE tokenkeeper.erasure SET forgotten_at = now() - interval '61 minutes'; DELETE FROM tokenkeeper.status_cache"
        )
        try lookForWarnings(database)
        #expect(
            try warnings(database).first?.hasPrefix("2 erasures of forget cannot be finished, the oldest of 20") == true
        )
    }

    @Test func `it warns of tokens whose environment is mixed up`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', e, registered_at => now() - interval '1 hour')
            FROM unnest('{aa,bb,cc}'::text[]) AS t, unnest('{production,sandbox}'::text[]) AS e;
            SELECT tokenkeeper.register('dd', 't', registered_at => now() - interval '1 hour');
            SELECT tokenkeeper.unregister('cc', 't', 'sandbox');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                SELECT 't', t, 400, '{"reason":"BadDeviceToken"}' FROM unnest('{aa,cc,dd}'::text[]) AS t;
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        try lookForWarnings(database)
        #expect(
            try warnings(database) == [
                "1 token of t is suspect in production, where it was registered, and active in the other environment: does the app report the right environment?"
            ])
        try database.psql("SELECT tokenkeeper.register('aa', 't'); DELETE FROM tokenkeeper.status_cache")
        try lookForWarnings(database)
        #expect(try warnings(database) == [])
    }

    @Test func `it warns of a tripped guard and of what it holds`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '1 hour') FROM generate_series(1, 100) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                SELECT 't', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(1, 60) AS i;
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(
            &daemon,
            drain: Drain(
                lockTimeout: .milliseconds(50), guardLimits: GuardLimits(allowance: 50, maxShare: .percent(0)),
                interpret: Interpretation.verdict(on:)))
        let told = try warnings(database)
        #expect(
            told.count == 2
                && told.last == "60 results are held by the mass-failure guard; see `tokenkeeperd held list`")
        #expect(told.first?.hasPrefix("the mass-failure guard of t (production) tripped at ") ?? false)
        #expect(
            told.first?.hasSuffix(
                "suspects would suppress 60 of 100 active tokens within a day; see `tokenkeeperd held list`")
                ?? false)
        #expect(try database.psql("SELECT held FROM tokenkeeper.status") == "60")
    }

    @Test func `it does not count a large table itself`() throws {
        let database = try TestCluster.shared.database()
        let look = "SELECT rejected FROM tokenkeeper.status"
        try database.psql(
            """
            ALTER TABLE tokenkeeper.rejected_result SET (autovacuum_enabled = off);
            INSERT INTO tokenkeeper.rejected_result (error, token, queued_at, rejected_at)
            SELECT 'no token', repeat('x', 400), now(), now() - interval '2 hours' * (i % 2) FROM generate_series(1, 15000) AS i
            """)
        try eventually("without a daemon, PostgreSQL's own estimate") { try database.psql(look) == "10000" }
        var daemon = try database.connect(user: "a_daemon")
        try refreshCache(&daemon)
        #expect(
            try warnings(database) == [
                "10000 or more results could not be understood, 5000 within the last hour; see `tokenkeeperd rejected list`"
            ])
        try database.psql("UPDATE tokenkeeper.status_cache SET rows = 7 WHERE source = 'rejected_result'")
        #expect(try database.psql(look) == "7", "what the daemon has counted")
        try database.psql("UPDATE tokenkeeper.status_cache SET as_of = as_of - interval '11 minutes'")
        #expect(try database.psql(look) == "10000", "an ended daemon no longer counts")
        // Dead rows count towards the size until they are vacuumed.
        try database.psql("DELETE FROM tokenkeeper.rejected_result")
        try refreshCache(&daemon)
        #expect(try database.psql(look) == "0")
    }

    @Test func `tables that take too long to count are estimated`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "INSERT INTO tokenkeeper.failed_send (error, request_id, queued_at, attempts) SELECT 'e', i, now(), 1 FROM generate_series(1, 7) AS i"
        )
        var daemon = try database.connect(user: "a_daemon")
        var owner = try database.connect()
        // A lock blocks the count. It stands for any cause that takes long.
        try owner.execute("BEGIN; LOCK TABLE tokenkeeper.failed_send IN ACCESS EXCLUSIVE MODE")
        try refreshCache(&daemon)
        try owner.execute("COMMIT")
        let told = "SELECT rows BETWEEN 0 AND 7 FROM tokenkeeper.status_cache WHERE source = 'failed_send'"
        #expect(try database.psql(told) == "t")
    }

    @Test
    func
        `it warns of 410s that are not from APNs, of rejected results that were not kept, and of a publication of the queue`()
        throws
    {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 't');
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results) VALUES
                (date_trunc('hour', now()), 'production', 't', 410, '410 without a body', 7),
                (date_trunc('hour', now()), 'production', 't', 410, '410 with a body that is not from APNs', 5),
                (date_trunc('hour', now()), 'production', 't', 410, 'Unregistered', 5),
                (date_trunc('hour', now()) - interval '2 days', 'production', 'u', 410, '410 without a body', 7),
                (date_trunc('hour', now()), 'production', '', 410, '(rejected, not kept)', 8),
                (date_trunc('hour', now()) - interval '3 hours', 'production', '', 410, '(rejected, not kept)', 9);
            """)
        try database.psql("CREATE PUBLICATION everything FOR ALL TABLES", user: "postgres")
        var daemon = try database.connect(user: "a_daemon")
        try refreshCache(&daemon)
        #expect(
            try warnings(database) == [
                "12 410s of t (production) within 24 hours are not from APNs, 7 of them without a body, so their tokens are suspect and not stale: does a proxy answer, or does the sender omit the body?",
                "publication everything includes the queue, and its subscribers cannot keep up with that: see docs/how-to/back-up-and-restore.md",
                "8 rejected results of the last two hours were counted but not kept: more than drain.rejected_per_hour",
            ])
        try database.psql("DROP PUBLICATION everything", user: "postgres")
        try database.psql("TRUNCATE tokenkeeper.result_count")
        try refreshCache(&daemon)
        #expect(try warnings(database) == [])
    }

    @Test func `it warns of dead rows, and of a sequence near its end`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT setval('tokenkeeper.operation_operation_id_seq', 9000000000000000000), setval('tokenkeeper.topic_topic_id_seq', 2147483647);
            ALTER TABLE tokenkeeper.operation SET (autovacuum_enabled = off);
            INSERT INTO tokenkeeper.operation (operation, rows) SELECT 'held_discarded', 1 FROM generate_series(1, 110000)
            """)
        try database.psql("DELETE FROM tokenkeeper.operation")
        var daemon = try database.connect(user: "a_daemon")
        try eventually("the statistics arrive") {
            try database.psql("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'operation'") == "110000"
        }
        var cache = StatusCache(.production)
        func words(after seconds: Int) throws -> [String] {
            try daemon.execute("UPDATE tokenkeeper.status_cache SET as_of = as_of - interval '10 seconds'")
            try cache.refresh(on: &daemon, at: .now + .seconds(seconds))
            return try warnings(database)
        }
        #expect(try words(after: 0).count == 1, "autovacuum has some time")
        #expect(
            try words(after: 901) == [
                "tokenkeeper.operation has 110000 dead rows and 0 live ones: autovacuum does not keep up",
                "the sequence tokenkeeper.operation_operation_id_seq has given out 9000000000000110000 of its 9223372036854775807 numbers",
            ])
        try database.psql("VACUUM tokenkeeper.operation")
        try database.psql("SELECT setval('tokenkeeper.operation_operation_id_seq', 5)")
        try eventually("the statistics arrive") { try words(after: 2000) == [] }
    }

    @Test func `it warns of old transaction ids`() throws {
        let cluster = try TestCluster.prepared(options: ["autovacuum_freeze_max_age=100000"])
        let database = try cluster.database()
        // It keeps PostgreSQL from freezing.
        var old = try database.connect()
        try old.execute("BEGIN; CREATE TABLE public.old ()")
        try database.psql(
            """
            DO $$
            BEGIN
                CREATE TEMPORARY TABLE one (i integer);
                FOR i IN 1..126000 LOOP
                    BEGIN
                        INSERT INTO one VALUES (i);
                    EXCEPTION WHEN OTHERS THEN
                    END;
                END LOOP;
            END
            $$
            """)
        var daemon = try database.connect(user: "a_daemon")
        try refreshCache(&daemon)
        let told = try warnings(database)
        #expect(
            told.count == 1
                && told.first?.hasPrefix("the oldest transaction id of the database \(database.name) is 12") == true
                && told.first?.hasSuffix(
                    "transactions old, and PostgreSQL stops at 2,000,000,000: autovacuum does not keep up, or something holds it back"
                )
                    == true,
            "\(told)")
        try old.execute("ROLLBACK")
    }

    @Test func `it warns of a restored database until the next sweep`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("UPDATE tokenkeeper.sweep_progress SET transaction_id = '99999999999'")
        var daemon = try database.connect(user: "a_daemon")
        try refreshCache(&daemon)
        #expect(
            try warnings(database) == [
                "the database was restored: transaction ids of the history lie in the future until the next sweep"
            ])
    }

    @Test func `it names a crowded device while it is crowded`() throws {
        let database = try TestCluster.shared.database()
        func register(_ numbers: String) throws {
            try database.psql(
                "SELECT tokenkeeper.register(lpad(to_hex(i), 4, '0'), 't', device_id => 'it''s me' || repeat('x', 40)) FROM generate_series(\(numbers)) AS i"
            )
        }
        let told = "device_id 'it''s me\(String(repeating: "x", count: 33))...' of t (production) has "
        try register("1, 9")
        #expect(try warnings(database) == [told + "9 tokens: is it a constant?"])
        try register("10, 60")
        #expect(try warnings(database) == [told + "more than 20 tokens: it is a constant, and supersedes none of them"])
        try database.psql("DELETE FROM tokenkeeper.ledger WHERE get_byte(token_key, 1) > 8")
        #expect(try warnings(database) == [told + "8 tokens: is it a constant?"])
        // The application is fixed: the tokens come back without the constant.
        try database.psql(
            "SELECT tokenkeeper.register(lpad(to_hex(i), 4, '0'), 't', device_id => '') FROM generate_series(1, 2) AS i"
        )
        #expect(try warnings(database) == [], "the device has fewer tokens")
    }

    @Test func `it shows which lock a daemon waits for`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        for words in ["tokenkeeper.ledger, held by 7", nil] {
            try heartbeat.beat(
                results: .none, registrations: .none, sweepInterval: nil,
                locks: words.map { Heartbeat.Locks(words: $0, metFor: .seconds(60)) }, on: &daemon)
            let since = try database.psql(
                "SELECT to_char((heartbeat_at - interval '60 s') AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') FROM tokenkeeper.daemon"
            )
            #expect(
                try warnings(database)
                    == (words.map { ["daemon d has been waiting for a lock since \(since) UTC: \($0)"] } ?? []))
        }
    }

    @Test func `it names whoever holds back the cleanup of dead rows for a quarter of an hour`() throws {
        let start = ContinuousClock.now
        let one = CleanupHolder.Sighting(what: "session 7 of app", transactionID: "700")
        let moved = CleanupHolder.Sighting(what: "session 7 of app", transactionID: "800")
        var holder = CleanupHolder()
        #expect(holder.note(one, at: start) == nil)
        #expect(holder.note(one, at: start + .seconds(899)) == nil)
        let told = holder.note(one, at: start + .seconds(901))
        #expect(told?.hasPrefix("session 7 of app has held back the cleanup of dead rows") ?? false)
        #expect(holder.note(moved, at: start + .seconds(902)) == nil, "its next transaction is another one")
        #expect(holder.note(nil, at: start + .seconds(903)) == nil)
        #expect(holder.note(moved, at: start + .seconds(2000)) == nil, "it began again")

        let database = try TestCluster.shared.database()
        var old = try database.connect(user: "a_app")
        try old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        let pid = try old.scalar("SELECT pg_backend_pid()") ?? ""
        var daemon = try database.connect(user: "a_daemon")
        for _ in 0..<3 { try database.psql("SELECT pg_current_xact_id()") }
        #expect(try CleanupHolder.Sighting(on: &daemon)?.what == "session \(pid) of a_app")
        try old.execute("ROLLBACK")
        #expect(try CleanupHolder.Sighting(on: &daemon)?.what != "session \(pid) of a_app")
    }

    @Test func `a refresh stores all its findings at once`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        try refreshCache(&daemon)
        #expect(
            try database.psql("SELECT count(*), count(DISTINCT xmin::text) FROM tokenkeeper.status_cache") == "22|1",
            "six tables, what was rejected within an hour of two, twelve warnings, and the cleanup")
    }

    @Test func `a look that is refused loses its own row, and no other`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            REVOKE SELECT ON tokenkeeper.sweep_progress FROM tokenkeeper_daemon;
            INSERT INTO tokenkeeper.status_cache (source, words, as_of) VALUES ('a restored database', '{old}', now() - interval '30 minutes')
            """)
        var daemon = try database.connect(user: "a_daemon")
        var cache = StatusCache(.production)
        try cache.refresh(on: &daemon)
        #expect(cache.trouble?.sqlState == "42501" && cache.trouble?.message.contains("sweep_progress") == true)
        let fresh = "SELECT count(*) FROM tokenkeeper.status_cache WHERE as_of > now() - interval '5 minutes'"
        #expect(try database.psql(fresh) == "21")
        #expect(try warnings(database) == ["old"], "it counts for an hour, as after a look that took too long")
        try cache.refresh(on: &daemon, at: .now + .seconds(600))
        #expect(cache.trouble != nil, "the cache was fresh, so nothing was looked up")
        try database.psql("GRANT SELECT ON tokenkeeper.sweep_progress TO tokenkeeper_daemon")
        try daemon.execute("UPDATE tokenkeeper.status_cache SET as_of = as_of - interval '10 seconds'")
        var next = StatusCache(.production)
        try next.refresh(on: &daemon)
        #expect(next.trouble == nil)
        #expect(try database.psql(fresh) == "22")
        #expect(try warnings(database) == [])
    }

    /// Pretends that the pause between two looks is over.
    private func refreshCache(_ daemon: inout Connection) throws {
        try daemon.execute("UPDATE tokenkeeper.status_cache SET as_of = as_of - interval '10 seconds'")
        var cache = StatusCache(.production)
        try cache.refresh(on: &daemon)
    }
}

extension Heartbeat.QueueReport {
    /// An empty queue.
    static let none = Heartbeat.QueueReport(Heartbeat.Queue(depth: 0, exact: true))
}

extension Heartbeat {
    func lookAndBeat(sweepInterval: Duration?, on connection: inout Connection) throws {
        try beat(
            results: QueueReport(try look(at: .results, pagesLeft: 0, on: &connection)),
            registrations: QueueReport(try look(at: .registrations, pagesLeft: 0, on: &connection)),
            sweepInterval: sweepInterval, on: &connection)
    }
}
