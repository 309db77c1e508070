import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

/// What a mistake may cost and how it is undone, with real daemons and the commands that an operator types.
@Suite(.ownThread) struct `Trust` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func command(_ arguments: String..., user: String = "a_operator") throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program] + arguments, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
    }

    private func waitUntilDrained() throws {
        var watcher = try database.connect()
        try eventually("the queue is empty", within: 180) {
            try watcher.scalar("SELECT count(*) FROM (SELECT FROM tokenkeeper.send_result LIMIT 1) AS r") == "0"
        }
    }

    /// Rows of the ledger that differ from `earlier`, compared as whole rows in both directions.
    private func differences() throws -> String {
        try database.psql(
            """
            SELECT (SELECT count(*) FROM (TABLE tokenkeeper.ledger EXCEPT TABLE earlier) AS e)
                 + (SELECT count(*) FROM (TABLE earlier EXCEPT TABLE tokenkeeper.ledger) AS e)
            """)
    }

    /// Three daemons, killed again and again until the queue is empty.
    private func drainWithKills() throws {
        var chance = SeededChance(seed: 7)
        var daemons = try (0..<3).map { _ in try DaemonProcess(database.url(user: "a_daemon")) }
        for _ in 0..<6 {
            usleep(UInt32.random(in: 0..<250_000, using: &chance))
            let victim = Int.random(in: 0..<daemons.count, using: &chance)
            daemons[victim].signal(SIGKILL)
            daemons[victim].wait()
            daemons[victim] = try DaemonProcess(database.url(user: "a_daemon"))
        }
        try waitUntilDrained()
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    private func count(_ what: String) throws -> Int {
        Int(try database.psql("SELECT count(*) FROM \(what)")) ?? -1
    }

    /// Tokens that were sendable and are not any more.
    private let suppressed = """
        tokenkeeper.ledger AS l JOIN earlier AS e USING (topic_id, token_key) WHERE l.suppressed AND NOT e.suppressed
        """

    @Test func `a misconfigured sender suppresses hundreds of tokens at most, and all of it can be undone`() throws {
        // In the full soak, a fleet of 100,000: some already stale, some unregistered, some with a device, and two already
        // suspect.
        let fleet = Soak.size(45_000, whole: 100_000)
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 'com.example.app', registered_at => now() - interval '40 days' + i * interval '1 ms',
                                              device_id => CASE WHEN i % 50 = 0 THEN 'd' || i / 100 END))
            FROM generate_series(1, \(fleet)) AS i;
            SELECT count(*) FROM (SELECT tokenkeeper.unregister(lpad(to_hex(i), 64, '0'), 'com.example.app', at => now() - interval '20 days')
                                  FROM generate_series(1, 1000) AS i) AS u;
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, body)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), CASE WHEN i > 1998 THEN 400 ELSE 410 END, now() - interval '10 days',
                   CASE WHEN i > 1998 THEN '{"reason":"BadDeviceToken"}'
                   ELSE '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now() - interval '10 days') * 1000)::bigint || '}' END
            FROM generate_series(1001, 2000) AS i;
            """)
        let daemon = try DaemonProcess(database.url(user: "a_daemon"))
        try waitUntilDrained()
        // Pretend that these few were recorded long before.
        try database.psql(
            """
            UPDATE tokenkeeper.receipt SET received_at = received_at - interval '10 days';
            UPDATE tokenkeeper.suppression_count SET hour = hour - interval '10 days';
            CREATE TABLE earlier AS TABLE tokenkeeper.ledger;
            """)
        #expect(try count("tokenkeeper.token WHERE state = 'suspect'") == 2)

        let mistake = """
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, queued_at, body)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), 400, now() - interval '1 hour' - i * interval '1 millisecond', now(),
                   '{"reason":"BadDeviceToken"}'
            FROM generate_series(1, \(fleet)) AS i ORDER BY hashint4(i)
            """
        // The same instants when they arrive a second time.
        try database.psql("CREATE TABLE mistake AS SELECT now() AS at")
        let same = mistake.replacingOccurrences(of: "now()", with: "(SELECT at FROM mistake)")
        try database.psql(same)
        try waitUntilDrained()
        #expect(try count(suppressed) < 1000)
        let recorded = try count("tokenkeeper.receipt WHERE cause = 'suspect'") - 2
        let held = try count("tokenkeeper.held_result")
        #expect(recorded + held == fleet)
        #expect(held > fleet - 2_000 - fleet * 3 / 100, "all except the allowance and tokens with older causes")
        let warnings = try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status")
        #expect(warnings.contains("the mass-failure guard of com.example.app (production) tripped at"))
        let opened = "the mass-failure guard has tripped: suspects are held"
        try eventually("it is logged") { daemon.logged.contains(opened) }
        #expect(daemon.logged.components(separatedBy: opened).count == 2, "once")
        #expect(
            daemon.logged.contains("undo=\"tokenkeeperd reinstate --topic com.example.app --environment production"))
        #expect(try database.psql("SELECT operation FROM tokenkeeper.operation") == "guard_tripped")
        let list = try command("held", "list", user: "a_reader")
        #expect(list.status == 0 && list.output.contains("\(held) results of \(held) tokens are held"))

        // Undone by the commands that the log names, after a dry run.
        let undo = try database.psql("SELECT undo FROM tokenkeeper.guard").split(separator: " ").dropFirst()
            .map(String.init)
        let lost = try count(suppressed)
        let dry = try ProgramRun(
            [DaemonProcess.program] + undo + ["--dry-run"],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
        #expect(
            dry.status == 0 && dry.output.contains("\(lost) tokens would be sendable again"), "\(dry)")
        #expect(try count(suppressed) == lost)
        let undone = try ProgramRun(
            [DaemonProcess.program] + undo,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
        #expect(undone.output.contains("\(lost) tokens are sendable again"), "\(undone)")
        #expect(undone.output.contains("\(held) results are still held"))
        let discarded = try command("held", "discard", "--topic", "com.example.app")
        #expect(discarded.output == "\(held) results are deleted and were not recorded\n", "\(discarded)")
        #expect(try differences() == "0")
        try eventually("the guard resets") {
            try database.psql("SELECT count(*) FROM tokenkeeper.guard WHERE tripped") == "0"
        }
        #expect(daemon.stop() == 0)

        // The same results again, with three daemons and kills: nothing changes.
        try database.psql(same)
        try drainWithKills()
        #expect(try differences() == "0")
        #expect(try count("tokenkeeper.held_result") == 0)

        // The same mistake again, after the undone window, with three daemons and kills.
        try database.psql(mistake)
        try drainWithKills()
        #expect(try count(suppressed) < 1000)
        let again = (try count("tokenkeeper.receipt WHERE cause = 'suspect'") - 2, try count("tokenkeeper.held_result"))
        #expect(again.0 + again.1 == fleet, "\(again)")
        try undoAll(days: 0.1)

        // 150 every ten minutes of another day, in random order.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, queued_at, body)
            SELECT 'com.example.app', lpad(to_hex(20000 + i), 64, '0'), 400, now() - interval '3 days' - i / 150 * interval '10 minutes' - interval '10 s',
                   now() - interval '3 days' - i / 150 * interval '10 minutes', '{"reason":"BadDeviceToken"}'
            FROM generate_series(0, 144 * 150 - 1) AS i ORDER BY hashint4(i)
            """)
        try drainWithKills()
        #expect(try count(suppressed) < 1000)
        let slowly = (
            try count("tokenkeeper.receipt WHERE cause = 'suspect'") - 2, try count("tokenkeeper.held_result")
        )
        #expect(slowly.0 + slowly.1 == 144 * 150, "\(slowly)")
        try undoAll(days: 5)
        #expect(
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 400")
                == "\(3 * fleet + 144 * 150 + 2)",
            "each counted once")
    }

    private func undoAll(days: Double) throws {
        let back = try command(
            "reinstate", "--topic", "com.example.app", "--since",
            "\(Date.now.addingTimeInterval(-days * 86400).ISO8601Format())")
        #expect(back.status == 0, "\(back)")
        #expect(try command("held", "discard", "--topic", "com.example.app").status == 0)
        #expect(try differences() == "0")
    }

    /// Bodies from proxies, load balancers and senders, not from APNs, and the reason that each counts under.
    private static let doubtful = [
        ("<html><body><h1>410 Gone</h1></body></html>", "410 with a body that is not from APNs"),
        (#"{"reason":"Unregistered","timest"#, "410 with a body that is not from APNs"),
        (#"["Unregistered",1794000000123]"#, "410 with a body that is not from APNs"), ("", "410 without a body"),
        (#"{"timestamp":1794000000123}"#, "410 without a reason"),
        (#"{"reason":"Unregistered"}"#, "410 without a timestamp"),
        (#"{"reason":"Unregistered","timestamp":"1794000000123"}"#, "410 without a timestamp"),
        ("Unregistered", "Unregistered"),
    ]

    @Test func `410s that are not from APNs are held, reported and undone; genuine ones are recorded`()
        throws
    {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 'com.example.app', registered_at => now() - interval '40 days' + i * interval '1 ms',
                                              device_id => 'd' || i))
            FROM generate_series(1, 20000) AS i;
            CREATE TABLE earlier AS TABLE tokenkeeper.ledger;
            CREATE TABLE body (number serial, text text)
            """)
        for (body, _) in Self.doubtful { try database.psql("INSERT INTO body (text) VALUES ('\(body)')") }
        let daemon = try DaemonProcess(database.url(user: "a_daemon"))
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, body)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), 410, now() - interval '1 hour', b.text
            FROM generate_series(1, 20000) AS i JOIN body AS b ON b.number = 1 + i % \(Self.doubtful.count) ORDER BY hashint4(i)
            """)
        try waitUntilDrained()
        #expect(try count(suppressed) <= 100, "0.5 % of 20,000")
        let (suspects, held) = (
            try count("tokenkeeper.receipt WHERE cause = 'suspect'"), try count("tokenkeeper.held_result")
        )
        #expect(suspects + held == 20_000 && held >= 19_900)
        #expect(try count("tokenkeeper.token WHERE state = 'stale'") == 0)
        let opened = "the mass-failure guard has tripped: suspects are held"
        try eventually("it is logged") { daemon.logged.contains(opened) }
        try eventually("status warns") {
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "the mass-failure guard of com.example.app (production) tripped at")
        }
        let wanted = Dictionary(grouping: Self.doubtful, by: \.1).mapValues { $0.count * 20_000 / Self.doubtful.count }
        #expect(
            try database.psql(
                "SELECT reason || ': ' || sum(results) FROM tokenkeeper.result_stat WHERE status = 410 GROUP BY reason ORDER BY reason COLLATE \"C\""
            )
                == wanted.map { "\($0.key): \($0.value)" }.sorted().joined(separator: "\n"), "each kind by itself")

        // Undone: every token is as it was before.
        let undo = try database.psql("SELECT undo FROM tokenkeeper.guard").split(separator: " ").dropFirst().map(
            String.init)
        let undone = try ProgramRun(
            [DaemonProcess.program] + undo,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
        #expect(undone.status == 0, "\(undone)")
        #expect(try command("held", "discard", "--topic", "com.example.app").status == 0)
        try eventually("everything is as before") { try differences() == "0" }

        // Genuine 410s are recorded, however many there are; a reason that Apple has added is logged once.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, body)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), 410, now(),
                   format('{"reason":"%s","timestamp":%s}', CASE WHEN i % 3 = 0 THEN 'Replaced' ELSE 'Unregistered' END,
                          (extract(epoch FROM now()) * 1000)::bigint)
            FROM generate_series(1, 6000) AS i
            """)
        try waitUntilDrained()
        #expect(try count("tokenkeeper.token WHERE state = 'stale'") == 6000)
        #expect(try count("tokenkeeper.token WHERE state = 'stale' AND reason = 'Replaced'") == 2000)
        #expect(try count("tokenkeeper.held_result") == 0)
        #expect(daemon.stop() == 0)
        #expect(
            daemon.logged.components(separatedBy: "a 410 has a reason that this version does not know").count == 2
                && daemon.logged.contains("reason=Replaced"), "once: \(String(daemon.logged.suffix(2000)))")
    }

    @Test func `a mass uninstall is not held; its pruning is refused with the reason until forced`() throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '100 days'))
            FROM generate_series(1, 10000) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, sent_at, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, now(),
                   '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now()) * 1000)::bigint || '}'
            FROM generate_series(1, 4000) AS i;
            """)
        let daemon = try DaemonProcess(database.url(user: "a_daemon"), settings: ["sweep.interval=off"])
        try waitUntilDrained()
        #expect(try count("tokenkeeper.suppressed_token WHERE state = 'stale'") == 4000)
        #expect(try count("tokenkeeper.held_result") == 0)
        try database.psql(
            "UPDATE tokenkeeper.suppression SET since = now() - interval '91 days'")
        daemon.signal(SIGUSR1)
        try eventually("the sweep has ended") {
            try database.psql("SELECT outcome, refused FROM tokenkeeper.sweep_run") == "finished|4000"
        }
        try eventually("it is logged") { daemon.logged.contains("the sweep refused to prune") }
        #expect(
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "the last sweep refused to prune 4000 of the 10000 tokens of t (production), more than 1000"))
        let refused = try command("sweep", user: "a_daemon")
        #expect(refused.status == 70 && refused.output.contains("4000 of 10000 tokens are due, more than 1000"))
        let dry = try command("sweep", "--dry-run", user: "a_daemon")
        #expect(
            dry.status == 0 && dry.output.contains("t (production), stale: 4000 tokens refused")
                && dry.output.contains("such as 00"),
            "\(dry)")
        #expect(try count("tokenkeeper.token") == 10_000)
        let forced = try command("sweep", "--force", user: "a_daemon")
        #expect(forced.status == 0 && forced.output.contains("deleted 4000 suppressed tokens"), "\(forced)")
        #expect(try count("tokenkeeper.token") == 6000)
        #expect(daemon.stop() == 0)
        #expect(daemon.logged.components(separatedBy: "the sweep refused to prune").count == 2, "once")
    }

    @Test func `rejected results are listed, requeued and discarded by command`() throws {
        let daemon = try DaemonProcess(database.url(user: "a_daemon"))
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'zz', 410), ('t', 'zy', 410), (NULL, 'aa', 410)"
        )
        try eventually("they are rejected") { try count("tokenkeeper.rejected_result") == 3 }
        let list = try command("rejected")
        #expect(list.output.contains("2  device token * (* bytes of text) is not hex"), "\(list)")
        #expect(try command("rejected", "requeue").status == 64, "a selection is required")
        #expect(try command("rejected", "requeue", "--all", "--error", "x").status == 64)
        #expect(
            try command("rejected", "requeue", "--error", "topic is missing").output
                == "1 result is back in the queue\n")
        try eventually("it is rejected again") {
            try database.psql("SELECT attempts FROM tokenkeeper.rejected_result WHERE topic IS NULL") == "1"
        }
        #expect(try command("rejected", "discard", "--all").output == "3 results are deleted\n")
        #expect(try command("rejected", "list", user: "a_reader").output == "nothing is rejected\n")
        #expect(try command("held").output == "nothing is held\n")
        #expect(try command("rejected", "discard", "--all", user: "a_reader").status == 69)
        #expect(daemon.stop() == 0)
    }

    @Test func `an unknown topic and an invalid window are clear errors`() throws {
        let unknown = try command("reinstate", "--topic", "typo", "--since", "2026-01-01")
        #expect(unknown.status == 64 && unknown.errors.contains("topic 'typo' is not known"))
        try database.psql("SELECT tokenkeeper.register('aa', 'it''s;rm-rf')")
        let none = try command("reinstate", "--topic", "it's;rm-rf", "--since", "yesterday-ish")
        #expect(none.status == 64 && none.errors.contains("invalid input syntax for type timestamp"), "\(none)")
        #expect(try command("held", "release", "--topic", "typo").status == 64)
        let zone = try ProgramRun(
            [
                DaemonProcess.program, "reinstate", "--topic", "it's;rm-rf", "--since", "2026-01-01 00:00", "--until",
                "2026-01-02", "--dry-run",
            ],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator"), "PGTZ": "America/New_York"])
        #expect(zone.output.contains("from 2026-01-01 00:00:00 UTC to 2026-01-02 00:00:00 UTC"), "\(zone)")
    }

    /// A fleet of 100,000 tokens in the full soak. Some have an older 410, some are unregistered, some are the old tokens of a device.
    @Test
    func `a wave of 410s is warned of within a minute, and undone row by row by the command that the warning prints`()
        throws
    {
        let fleet = Soak.size(20_000, whole: 100_000)
        func gone(_ tokens: Range<Int>, timestamp: String) -> String {
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), 410,
                   '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM \(timestamp)) * 1000)::bigint || '}'
            FROM generate_series(\(tokens.lowerBound), \(tokens.upperBound - 1)) AS i
            """
        }
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 'com.example.app', registered_at => now() - interval '40 days' + i * interval '1 ms',
                                              device_id => CASE WHEN i % 50 = 0 THEN 'd' || i / 100 END))
            FROM generate_series(1, \(fleet)) AS i;
            SELECT count(*) FROM (SELECT tokenkeeper.unregister(lpad(to_hex(i), 64, '0'), 'com.example.app', at => now() - interval '20 days')
                                  FROM generate_series(1, 500) AS i) AS u;
            \(gone(501..<1001, timestamp: "now() - interval '10 days'"));
            """)
        let first = try DaemonProcess(database.url(user: "a_daemon"))
        try waitUntilDrained()
        #expect(first.stop() == 0)
        // Pretend that these were received long before.
        try database.psql(
            """
            UPDATE tokenkeeper.receipt SET received_at = received_at - interval '10 days';
            UPDATE tokenkeeper.suppression_count SET hour = hour - interval '10 days';
            CREATE TABLE earlier AS TABLE tokenkeeper.ledger;
            """)

        let daemon = try DaemonProcess(database.url(user: "a_daemon"))
        let wave = fleet * 3 / 10
        try database.psql(gone(1..<(wave + 1), timestamp: "now() - interval '3 days'"))
        let warning = "far more tokens than usual have turned stale"
        try eventually("it is logged", within: 60) { daemon.logged.contains(warning) }
        try waitUntilDrained()
        let lost = try count(suppressed)
        #expect(lost == wave - 1000 - wave / 100 + 10, "not those that were suppressed already")
        try eventually("status has all of them") {
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status", user: "a_reader").contains(
                ", \(lost) of ")
        }
        #expect(daemon.logged.components(separatedBy: warning).count == 2, "once")
        #expect(
            try database.psql(
                "SELECT period, newly_stale FROM tokenkeeper.stale_share WHERE is_wave ORDER BY 1", user: "a_reader")
                == "day|\(lost)\nhour|\(lost)")

        // The command as it was printed. It runs as an operator, as the documentation says.
        let line = try #require(daemon.logged.split(separator: "\n").first { $0.contains(warning) })
        let printed = try #require(line.split(separator: "undo=\"").last?.split(separator: "\"").first)
        let undo = printed.split(separator: " ").dropFirst().map(String.init)
        #expect(
            printed.hasPrefix(
                "tokenkeeperd reinstate --cause stale --topic com.example.app --environment production --since 2"))
        let environment = ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")]
        let dry = try ProgramRun([DaemonProcess.program] + undo + ["--dry-run"], environment: environment)
        #expect(dry.status == 0 && dry.output.contains("\(lost) tokens would be sendable again"), "\(dry)")
        #expect(try count(suppressed) == lost)
        let undone = try ProgramRun([DaemonProcess.program] + undo, environment: environment)
        #expect(undone.status == 0 && undone.output.contains("\(lost) tokens are sendable again"), "\(undone)")
        #expect(try differences() == "0")
        try eventually("the warning is over") {
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains("turned stale") == false
        }
        #expect(daemon.stop() == 0)

        // The same 410s received later count.
        try database.psql(gone(1..<(wave + 1), timestamp: "now() - interval '3 days'"))
        try drainWithKills()
        #expect(try count(suppressed) == lost)
    }
}
