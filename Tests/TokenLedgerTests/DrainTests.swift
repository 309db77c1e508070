import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `The drain` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let death = #"'{"reason":"Unregistered","timestamp":1794000000123}'"#

    @Test func `an unintelligible row is kept unchanged, and the rest of its batch is recorded`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at) VALUES
                ('production', 't', 'aa', 410, \(Self.death), 'id-1', now()),
                ('moon', 't', 'no hex', 410, 'any body', 'id-2', 'infinity'),
                (NULL, 't', 'bb', 410, \(Self.death), 'id-3', now())
            """, user: "a_sender")
        let queued = try database.psql(
            "SELECT environment, topic, token, status, body, apns_id, sent_at, queued_at FROM tokenkeeper.send_result WHERE apns_id = 'id-2'"
        )
        let pass = try drainAll(&daemon)
        #expect(pass.recorded == 2 && pass.rejected == 1)
        #expect(
            try database.psql(
                "SELECT environment, topic, token, status, body, apns_id, sent_at, queued_at FROM tokenkeeper.rejected_result"
            )
                == queued)
        #expect(
            try database.psql("SELECT error FROM tokenkeeper.rejected_result")
                == "environment is 'moon', expected 'production' or 'sandbox'")
        #expect(try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.token") == "aa,bb")
    }

    @Test func `results are counted by hour, topic, status and reason`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body)
            SELECT e, 't', 'aa', s, CASE s WHEN 200 THEN NULL WHEN 403 THEN '{"reason":"InvalidProviderToken"}' WHEN 502 THEN '{"reason":"proxy 4711"}' ELSE 'x' END
            FROM unnest('{sandbox,NULL}'::text[]) AS e, unnest('{200,200,200,403,403,410,502,700}'::int[]) AS s
            """, user: "a_sender")
        try drainAll(&daemon)
        let stat = "SELECT environment, topic, status, reason, results FROM tokenkeeper.result_stat ORDER BY 1, 3, 4"
        let wanted = """
            production|t|200||3
            production|t|403|InvalidProviderToken|2
            production|t|410|410 with a body that is not from APNs|1
            production|t|502|(other)|1
            sandbox|t|200||3
            sandbox|t|403|InvalidProviderToken|2
            sandbox|t|410|410 with a body that is not from APNs|1
            sandbox|t|502|(other)|1
            ||700|(rejected)|2
            """
        #expect(try database.psql(stat) == wanted)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)", user: "a_sender")
        try drainAll(&daemon)
        try daemon.execute("SELECT tokenkeeper.roll_up_result_count()")
        #expect(try database.psql(stat) == wanted.replacing("production|t|200||3", with: "production|t|200||4"))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.result_count") == "9")
    }

    @Test func `bulky rows are read one by one and keep every byte`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', 'aa', 410, '{"reason":"Unregistered","timestamp":1794000000123,"pad":"' || repeat('x', 1000000) || '"}'),
                ('t', 'not hex', 410, repeat('y', 3000000)),
                (repeat('t', 5000), 'bb', 410, NULL),
                ('t', repeat('z', 100000), 200, NULL),
                ('t', 'cc', 410, \(Self.death))
            """, user: "a_sender")
        let pass = try drainAll(&daemon)
        #expect(pass.accepted == 1 && pass.recorded == 2 && pass.rejected == 2 && pass.putBack == 3)
        #expect(
            try database.psql("SELECT token, extract(epoch FROM invalidated_at) FROM tokenkeeper.token ORDER BY token")
                == "aa|1794000000.123000\ncc|1794000000.123000")
        #expect(
            try database.psql("SELECT length(body), length(topic) FROM tokenkeeper.rejected_result ORDER BY 2")
                == "3000000|1\n|5000")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
    }

    @Test func `a row of more than 16 MiB is rejected unread, and cut`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, repeat('x', 16777217))",
            user: "a_sender")
        #expect(try drainAll(&daemon).rejected == 1)
        #expect(
            try database.psql("SELECT error, length(body) FROM tokenkeeper.rejected_result")
                == "the row is too long: 16777233 bytes, expected at most 16777216: environment 10, topic 1, token 2, status 3, body 16777217|1024"
        )
    }

    @Test func `the result of a locked token waits in the retry partition, and the rest is recorded`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{aa,bb,cc}'::text[]) AS t"
        )
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('bb', 't', registered_at => '2025-02-01Z')")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', t, 410, \(Self.death) FROM unnest('{aa,bb,cc}'::text[]) AS t",
            user: "a_sender")
        let queued = try database.psql("SELECT queued_at FROM tokenkeeper.send_result WHERE token = 'bb'")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.recorded == 2 && pass.putBack == 1)
        #expect(
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token")
                == "aa,cc")
        #expect(try database.psql("SELECT token, queued_at FROM tokenkeeper.send_result_retry") == "bb|\(queued)")
        #expect(
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "2",
            "what waits is not counted yet")
        try app.execute("COMMIT")
        #expect(try drainAll(&daemon).recorded == 1)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "3")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "3")
    }

    @Test func `a token that an application is adding does not delay the rest`() throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01Z')")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('bb', 't', registered_at => '2025-02-01Z')")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', t, 410, \(Self.death) FROM unnest('{aa,bb,cc}'::text[]) AS t",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token")
                == "aa,cc")
        #expect(try database.psql("SELECT token FROM tokenkeeper.send_result") == "bb")
        try app.execute("ROLLBACK")
        try drainAll(&daemon)
        #expect(
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token")
                == "aa,bb,cc")
    }

    @Test func `a row that the database refuses waits, and the rest of its batch is recorded`() throws {
        // An added constraint stands for any unforeseen cause.
        try database.psql("ALTER TABLE tokenkeeper.ledger ADD CONSTRAINT own CHECK (token_key <> '\\xbb')")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', t, 410, \(Self.death) FROM unnest('{aa,bb,cc}'::text[]) AS t",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.recorded == 2 && pass.rejected == 0 && pass.trouble == nil)
        #expect(pass.refusals[.results]?.rows == 1 && pass.refusals[.results]?.error.sqlState == "23514")
        #expect(try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.token") == "aa,cc")
        #expect(try database.psql("SELECT token FROM tokenkeeper.send_result") == "bb")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "2")
        // After a restart, each is tried once more.
        try database.psql("ALTER TABLE tokenkeeper.ledger DROP CONSTRAINT own")
        #expect(try drainAll(&daemon).recorded == 1)
    }

    @Test func `if the database refuses a row of ours, too, nothing is rejected, and a person must act`() throws {
        try database.psql(
            """
            CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not now'; END $$;
            CREATE TRIGGER fail BEFORE INSERT ON tokenkeeper.ledger FOR EACH ROW EXECUTE FUNCTION public.fail();
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(n::text, 4, '0'), 410, \(Self.death) FROM generate_series(1, 500) AS n
            """)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.trouble?.sqlState == "P0001" && pass.trouble?.remedy == .fixSetup && pass.refusals.isEmpty)
        let counts =
            "SELECT (SELECT count(*) FROM tokenkeeper.send_result) || ' ' || (SELECT count(*) FROM tokenkeeper.rejected_result)"
        #expect(try database.psql(counts) == "500 0")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic WHERE topic = 'tokenkeeper.probe'") == "0")
        try database.psql("DROP TRIGGER fail ON tokenkeeper.ledger")
        #expect(try drainAll(&daemon).recorded == 500)
    }

    @Test func `an internal error of PostgreSQL rejects no row`() throws {
        // As when a migration drops a function in the middle of a batch.
        try database.psql(
            """
            CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'cache lookup failed for function 1' USING ERRCODE = 'XX000'; END $$;
            CREATE TRIGGER fail BEFORE INSERT ON tokenkeeper.ledger FOR EACH ROW WHEN (new.token_key = '\\xbb') EXECUTE FUNCTION public.fail()
            """)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', t, 410, \(Self.death) FROM unnest('{aa,bb,cc}'::text[]) AS t",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        var drain = Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        // The second pass tries the row alone.
        var pass = try drain.onePass(on: &daemon)
        pass.add(try drain.onePass(on: &daemon))
        #expect(pass.rejected == 0 && pass.trouble?.sqlState == "XX000")
        try database.psql("DROP TRIGGER fail ON tokenkeeper.ledger")
        try eventually("all are recorded") {
            _ = try drain.onePass(on: &daemon)
            return try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "3"
        }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "0")
    }

    @Test func `ranges that can be neither recorded nor moved stay, and rows behind them are recorded`()
        throws
    {
        try database.psql(
            """
            ALTER TABLE tokenkeeper.ledger ADD CHECK (token_key <> '\\xbb');
            ALTER TABLE tokenkeeper.send_result_retry ADD CHECK (token <> 'bb')
            """)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', CASE i % 10000 WHEN 1 THEN 'bb' ELSE 'aa' END, CASE i % 10000 WHEN 1 THEN 410 ELSE 200 END, \(Self.death)
            FROM generate_series(1, 50000) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'cc', 410, \(Self.death))
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        // Without bulk reads: if the partition is sealed during the test, one would bring all these rows together in one range.
        var drain = Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, truncates: false, interpret: Interpretation.verdict(on:))
        var told = 0
        // On a slow machine, one pass ends before it reaches the last range.
        var pass = Drain.Pass()
        try eventually("what lies behind them is recorded") {
            pass.add(
                try drain.pass(
                    on: &daemon, report: { if case .committed = $0 {} else { told += 1 } },
                    betweenBatches: { _, _, _ in true }))
            return pass.recorded == 1
        }
        #expect(pass.trouble?.sqlState == "23514")
        #expect(told == 0, "nothing is in the retry partition or in rejected_result")
        #expect(try database.psql("SELECT string_agg(token, ',') FROM tokenkeeper.suppressed_token") == "cc")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result WHERE token = 'bb'") == "5")
    }

    @Test func `a row committed late, behind the cursor, is found`() throws {
        var early = try database.connect(user: "a_sender")
        try early.execute(
            "BEGIN; INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, \(Self.death))"
        )
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT 't', 'bb', 200 FROM generate_series(1, 50000)",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        var drain = Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        func pass() throws -> Drain.Pass { try drain.onePass(on: &daemon) }
        var accepted = 0
        while accepted < 50000 { accepted += try pass().accepted }
        try early.execute("COMMIT")
        try eventually("the late row is recorded") { try pass().recorded == 1 }
    }

    @Test func `several daemons share the work and count nothing twice`() async throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', lpad(to_hex(i % 5000), 8, '0'), CASE WHEN i % 3 = 0 THEN 410 ELSE 200 END, \(Self.death) FROM generate_series(1, 60000) AS i",
            user: "a_sender")
        let database = database
        let counts = try await withThrowingTaskGroup(of: Drain.Pass.self) { group in
            for _ in 1...3 {
                group.addTask {
                    var daemon = try database.connect(user: "a_daemon")
                    var sum = Drain.Pass()
                    var drain = Drain(
                        lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
                    while try daemon.scalar("SELECT count(*) FROM (SELECT FROM tokenkeeper.send_result LIMIT 1) AS r")
                        != "0"
                    {
                        sum.add(try drain.onePass(on: &daemon))
                    }
                    return sum
                }
            }
            return try await group.reduce(into: []) { $0.append($1) }
        }
        #expect(counts.map(\.accepted).reduce(0, +) == 40000)
        #expect(counts.map(\.recorded).reduce(0, +) == 20000)
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "60000")
    }

    @Test func `an empty sealed partition is truncated unless a dump is reading it`() throws {
        let past = Int(try database.psql("SELECT (\(Partition.currentInSQL) + 4) % 8"))!
        let fill =
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'aa', 200, \(past) FROM generate_series(1, 20000)"
        let size = "SELECT pg_relation_size('tokenkeeper.send_result_\(past)')"
        try database.psql(fill)
        var dump = try database.connect()
        try dump.execute("BEGIN; LOCK TABLE tokenkeeper.send_result_\(past) IN ACCESS SHARE MODE")
        var daemon = try database.connect(user: "a_daemon")
        var drain = Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
        func pass() throws { _ = try drain.onePass(on: &daemon) }
        for _ in 1...5 { try pass() }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(try database.psql(size) != "0")
        try dump.execute("COMMIT")
        try eventually("the partition is truncated") {
            try pass()
            return try database.psql(size) == "0"
        }
    }

    @Test func `a locked partition does not delay the others`() throws {
        let current = Int(try database.psql("SELECT \(Partition.currentInSQL)"))!
        var admin = try database.connect()
        try admin.execute("BEGIN; LOCK TABLE tokenkeeper.send_result_\((current + 4) % 8) IN ACCESS EXCLUSIVE MODE")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) VALUES ('t', 'aa', 410, \((current + 5) % 8))"
        )
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).recorded == 1)
    }

    @Test func `it works if the database defaults to REPEATABLE READ and read only`() throws {
        try database.psql(
            "ALTER DATABASE \(database.name) SET default_transaction_isolation = 'repeatable read'; ALTER DATABASE \(database.name) SET default_transaction_read_only = on"
        )
        try database.psql(
            "BEGIN READ WRITE; INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 410); COMMIT",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).recorded == 1)
    }

    @Test func `the remedy for an error follows from its SQLSTATE`() {
        #expect(DatabaseError(sqlState: "25006", message: "").remedy == .reconnect)
        #expect(DatabaseError(sqlState: nil, message: "").remedy == .reconnect)
        #expect(DatabaseError(sqlState: "57P01", message: "").remedy == .reconnect)
        #expect(DatabaseError(sqlState: "55P03", message: "").remedy == .retry)
        #expect(DatabaseError(sqlState: "23514", message: "").remedy == .fixData)
        #expect(DatabaseError(sqlState: "53100", message: "").remedy == .fixSetup)
        #expect(DatabaseError(sqlState: "XX000", message: "cache lookup failed for function 1").remedy == .fixSetup)
        #expect(DatabaseError(sqlState: "XX000", message: "invalid memory alloc request size 1").remedy == .fixData)
    }

    @Test func `locked tokens, new topics and new tokens do not delay the rest`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z') FROM generate_series(1, 5000) AS i"
        )
        var app = try database.connect()
        try app.execute(
            """
            BEGIN;
            SELECT tokenkeeper.register('aa', 'new.topic');
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't') FROM generate_series(4001, 4500) AS i;
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't') FROM generate_series(5001, 5003) AS i;
            """)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(Self.death) FROM generate_series(1, 8000) AS i
            UNION ALL SELECT 'new.topic', 'bb', 410, \(Self.death) UNION ALL SELECT 'other', 'bb', 410, \(Self.death)
            """, user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon).recorded == 8000 + 2 - 500 - 3 - 1)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "504")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "7498")
        try app.execute("ROLLBACK")
        #expect(try drainAll(&daemon).recorded == 504)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "8002")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'invalidated'") == "8002")
    }

    @Test(arguments: [("send_result", "status", "200"), ("registration", "unregistered", "false")])
    func `vacuum gives the space of an empty retry partition back`(queue: String, column: String, value: String)
        throws
    {
        try database.psql(
            """
            INSERT INTO tokenkeeper.\(queue) (topic, token, \(column), partition_number)
            SELECT 't', lpad(to_hex(i), 64, '0'), \(value), 8 FROM generate_series(1, 4000) AS i
            """)
        let pages = "SELECT pg_relation_size('tokenkeeper.\(queue)_retry') / 8192"
        #expect(try Int(database.psql(pages)).map { $0 > 50 } == true)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.\(queue)") == "0")
        try database.psql("VACUUM tokenkeeper.\(queue)_retry")
        #expect(try database.psql(pages) == "0")
    }

    @Test(arguments: ["LATIN1", "SQL_ASCII"])
    func `it works in databases of other encodings, and keeps bytes that are not text there`(encoding: String) throws {
        let name = "e_\(encoding.lowercased())_\(UInt32.random(in: 0...UInt32.max))"
        let other = TestDatabase(cluster: database.cluster, name: name)
        try database.psql(
            "CREATE DATABASE \(name) OWNER owner ENCODING '\(encoding)' LOCALE 'C' TEMPLATE template0", user: "postgres"
        )
        var owner = try other.connect()
        try Migrator(daemon: Version(major: 0, minor: 1, patch: 0)).migrate(&owner, createsRoles: true) { _ in }
        try other.psql(
            """
            SET client_encoding = 'UTF8';
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES
                ('t', 'aa', 410, '{"reason":"a b"}'), ('t', 'bb caf\u{e9}', 410, NULL), ('t', 'cc', 410, '{"reason":"\u{e9}"}')
            """, user: "a_sender")
        var daemon = try other.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(
            try other.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token") == "aa,cc")
        #expect(try other.psql("SELECT count(*) FROM tokenkeeper.rejected_result WHERE token LIKE 'bb caf%'") == "1")
        try other.psql(
            """
            SET client_encoding = 'UTF8';
            INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES
                ('t', '<DD ee>', 'caf\u{e9}'), ('t', 'ff', NULL), ('t', 'caf\u{e9}', NULL)
            """, user: "a_app")
        try drainAll(&daemon)
        #expect(
            try other.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.sendable_token") == "ddee,ff")
        #expect(try other.psql("SELECT error LIKE 'token is ''caf%' FROM tokenkeeper.rejected_registration") == "t")

        // Bytes that are no UTF-8, as a client in the database's own encoding writes them.
        func native(_ sql: String, user: String) throws -> String {
            try other.psql("SET client_encoding = '\(encoding)'; \(sql)", user: user)
        }
        let device = "E'd\\xe9', user_id => E'\\xe9ric'"
        _ = try native(
            "SELECT tokenkeeper.register('0a', 't', device_id => \(device), tags => ARRAY[E't\\xe9'])", user: "a_app")
        _ = try native(
            "INSERT INTO tokenkeeper.registration (topic, token, device_id) VALUES ('t', '0b', E'd\\xe9'), ('t', '0c', E'd\\xe9')",
            user: "a_app")
        try drainAll(&daemon)
        #expect(
            try other.psql("SELECT string_agg(state, ',' ORDER BY token) FROM tokenkeeper.token WHERE token LIKE '0_'")
                == "superseded,superseded,active")
        _ = try native("SELECT tokenkeeper.register('0d', 't', device_id => \(device))", user: "a_app")
        #expect(
            try native("SELECT tokenkeeper.tag('t', user_id => E'\\xe9ric', add => ARRAY[E'n\\xe9'])", user: "a_app")
                == "1")
        #expect(
            try native(
                "SELECT token FROM tokenkeeper.tagged_tokens(E't\\xe9 && \"n\\xe9\"', 't')", user: "a_reader") == "0d")
        for audience in ["tags => E't\\xe9'", "device_id => E'd\\xe9'", "user_id => E'\\xe9ric', name => E'\\xe9'"] {
            #expect(
                try native(
                    "SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"a\"}}', 't', \(audience)) > 0", user: "a_sender")
                    == "t")
        }
        if encoding == "SQL_ASCII" {
            #expect(
                try native("SELECT tokenkeeper.tag_query('gr\u{f6}\u{df}e && !\u{440}')::text", user: "a_sender")
                    == "'gr\u{f6}\u{df}e' & !'\u{440}'")
            let error = #expect(throws: (any Error).self) {
                try native("SELECT tokenkeeper.tag_query('ab\u{a0}c')", user: "a_sender")
            }
            #expect("\(String(describing: error))".contains("at position 1"))
        }
        _ = try native(
            #"INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', E'\xff', '410', E'{"reason":"\xff"}'), ('t', '0e', '410', NULL)"#,
            user: "a_sender")
        try drainAll(&daemon)
        #expect(try other.psql("SELECT count(*) FROM tokenkeeper.rejected_result") == "2")
        #expect(try other.psql("SELECT state FROM tokenkeeper.token WHERE token = '0e'") == "suspect")
        #expect(try other.psql(#"SELECT tokenkeeper.payload_fault('{"a":"\u20ac"}') IS NULL"#) == "f")
        #expect(try native("SELECT tokenkeeper.forget_device(E'd\\xe9') > 3", user: "a_app") == "t")
        #expect(try other.psql("SELECT count(*) FROM tokenkeeper.token WHERE token LIKE '0_'") == "1")
    }

    @Test func `settings of the role change nothing`() throws {
        for setting in [
            "DateStyle = 'SQL, DMY'", "TimeZone = 'Asia/Kolkata'", "IntervalStyle = 'sql_standard'",
            "bytea_output = 'escape'",
            "standard_conforming_strings = off", "default_transaction_isolation = 'serializable'",
            "search_path = ''", "statement_timeout = '5s'", "default_transaction_read_only = on",
        ] {
            try database.psql("ALTER DATABASE \(database.name) SET \(setting)")
        }
        try database.psql(
            "BEGIN READ WRITE; INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, \(Self.death)), ('t', 'x', 410, NULL); COMMIT",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        let heartbeat = try Heartbeat(
            daemonID: "d", version: Version(major: 0, minor: 1, patch: 0), lockTimeout: .milliseconds(50), on: &daemon)
        #expect(try drainAll(&daemon).recorded == 1)
        try heartbeat.lookAndBeat(sweepInterval: nil, on: &daemon)
        try SweepLease.release(holder: "d", on: &daemon)
        try SweepLease.request(.signal, on: &daemon)
        let lease = try #require(try SweepLease.claim(.requested, holder: "d", on: &daemon))
        let plan = SweepPlan(
            suppressedRetention: .seconds(1), dormantAfter: nil, eventRetention: .seconds(40 * 86400),
            rejectedRetention: .seconds(86400), heldRetention: .seconds(86400), sendRetention: .seconds(30 * 86400),
            allowance: 0, maxShare: .percent(10),
            batch: 10)
        #expect(
            try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }.outcome == .finished)
        try heartbeat.signOff(on: &daemon)
        #expect(
            try database.psql("SELECT extract(epoch FROM invalidated_at) FROM tokenkeeper.suppressed_token")
                == "1794000000.123000")
        #expect(
            try database.psql(
                "SELECT abs(extract(epoch FROM clock_timestamp() - started_at)) < 600, sweep_interval IS NULL FROM tokenkeeper.daemon"
            ) == "t|t")
    }
}
