import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `The doctor` {
    /// The lines of a report: each finding with the commands below it.
    private func findings(_ run: ProgramRun) -> [(grade: String, subject: String, words: String, commands: [String])] {
        var found: [(grade: String, subject: String, words: String, commands: [String])] = []
        for line in run.output.split(separator: "\n") {
            if line.hasPrefix("  ") {
                found[found.count - 1].commands.append(line.trimmingCharacters(in: .whitespaces))
                continue
            }
            let parts = line.components(separatedBy: "  ").map { $0.trimmingCharacters(in: .whitespaces) }.filter {
                !$0.isEmpty
            }
            guard parts.count >= 3 else { continue }
            found.append((parts[0], parts[1], parts[2...].joined(separator: " "), []))
        }
        return found
    }

    /// The problems of one subject, with their commands.
    private func problems(_ run: ProgramRun, _ subject: String) -> [String] {
        findings(run).filter { $0.grade == "problem" && $0.subject == subject }.map {
            "\($0.words) → \($0.commands.joined(separator: " "))"
        }
    }

    @Test(arguments: ["a_reader", "a_operator", "a_daemon"])
    func `on a healthy database every role finds nothing to fix`(role: String) throws {
        let database = try TestCluster.shared.database()
        let daemon = try database.daemon()
        let run = try database.command("doctor", as: role)
        let found = findings(run)
        // Slots and load are those of other tests too, and the tests' servers run without fsync.
        #expect(
            found.filter {
                $0.grade == "problem" && !["slots", "connections", "disk", "durability"].contains($0.subject)
            }.isEmpty,
            "\(run)")
        #expect(found.contains { $0.grade == "not checked" && $0.words.contains("pg_read_all_stats") }, "\(run)")
        #expect(found.contains { $0.subject == "disk" && $0.words.contains("needs pg_read_all_settings") })
        for subject in [
            "schema", "roles", "rights", "search path", "daemons", "publications", "locks", "clock", "autovacuum",
            "settings",
        ] {
            #expect(found.contains { $0.grade == "ok" && $0.subject == subject }, "\(subject): \(run)")
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `it judges the server by the running daemon's settings, and names those that it has not read itself`()
        throws
    {
        let database = try TestCluster.shared.database()
        let daemon = try database.daemon([
            "drain.lock_timeout=900ms", "sweep.interval=2h", "send.proxy=http://somebody:secret@127.0.0.1:1",
        ])
        #expect(
            try database.psql("SELECT settings FROM tokenkeeper.daemon")
                == "{drain.lock_timeout=900ms,sweep.interval=2h}")
        let run = try database.command("doctor", "--set", "sweep.interval=3h", as: "a_reader")
        let note = findings(run).filter { $0.subject == "configuration" }
        #expect(note.count == 1 && note.first?.grade == "note", "\(run)")
        let words = note.first?.words ?? ""
        #expect(
            words.contains("drain.lock_timeout is 900ms, here the default; sweep.interval is 2h, here 3h;"), "\(run)")
        #expect(run.output.contains("is longer than drain.lock_timeout (900 ms)"), "\(run)")
        let same = try database.command(
            "doctor", "--set", "sweep.interval=2h", "--set", "drain.lock_timeout=900ms", as: "a_reader")
        #expect(findings(same).contains { $0.subject == "configuration" && $0.grade == "ok" }, "\(same)")
        #expect(daemon.stop() == 0)
    }

    @Test func `each fault is found, and its command fixes it`() throws {
        let cluster = try TestCluster.prepared(options: ["max_prepared_transactions=5"])
        let database = try cluster.database()
        let daemon = try database.daemon()
        try database.psql(
            """
            CREATE PUBLICATION queue FOR TABLE tokenkeeper.send_result, tokenkeeper.registration, tokenkeeper.ledger;
            ALTER TABLE tokenkeeper.ledger SET (autovacuum_enabled = off);
            REVOKE INSERT ON tokenkeeper.send_result FROM tokenkeeper_sender;
            REVOKE SELECT ON tokenkeeper.stale_share FROM tokenkeeper_monitor;
            ALTER ROLE a_daemon SET default_transaction_read_only = on;
            GRANT CREATE ON SCHEMA public TO PUBLIC;
            CREATE SCHEMA "of$others"; GRANT CREATE ON SCHEMA "of$others" TO PUBLIC, a_sender;
            CREATE SCHEMA unused; GRANT CREATE ON SCHEMA unused TO PUBLIC;
            CREATE SCHEMA theirs; GRANT CREATE ON SCHEMA theirs TO a_app;
            ALTER ROLE owner CREATEROLE CREATEDB;
            SELECT pg_create_physical_replication_slot('forgotten', true)
            """, user: "postgres")
        try database.psql(
            "ALTER ROLE a_daemon IN DATABASE \(database.name) SET search_path = \"$user\", \"of$others\"; ALTER ROLE a_app SET search_path = theirs",
            user: "postgres")
        try database.psql("ALTER SYSTEM SET deadlock_timeout = '100ms'", user: "postgres")
        try database.psql("SELECT pg_reload_conf()", user: "postgres")
        try eventually("the server has read it") {
            try database.psql("SHOW deadlock_timeout", user: "postgres") == "100ms"
        }
        var holder = try database.connect()
        try holder.run("BEGIN; LOCK TABLE tokenkeeper.held_result IN SHARE MODE")
        var run = try database.command("doctor", as: "postgres")
        #expect(run.status == 1, "\(run)")
        #expect(
            problems(run, "publications") == [
                "publication queue includes a queue, and no subscriber keeps up with that → ALTER PUBLICATION queue DROP TABLE tokenkeeper.registration, tokenkeeper.send_result;"
            ])
        #expect(
            problems(run, "autovacuum") == [
                "it is off for tokenkeeper.ledger → ALTER TABLE tokenkeeper.ledger RESET (autovacuum_enabled);"
            ])
        #expect(
            problems(run, "rights") == [
                "tokenkeeper_monitor lacks SELECT on stale_share → tokenkeeperd grants",
                "tokenkeeper_sender lacks INSERT on send_result → tokenkeeperd grants",
            ])
        let path = problems(run, "search path")
        #expect(path.count == 2, "\(run)")
        #expect(path.first?.hasPrefix("every login may create in the schema of$others, ") == true)
        #expect(path.first?.hasSuffix(" → ") == true, "the name could run something in a shell")
        #expect(path.last?.hasSuffix(" → REVOKE CREATE ON SCHEMA public FROM PUBLIC;") == true)
        #expect(
            findings(run).filter { $0.grade == "note" && $0.subject == "search path" }.map { $0.words.prefix(39) } == [
                "a_app may create in the schema theirs, ", "a_sender may create in the schema of$ot",
            ])
        try database.psql(#"REVOKE CREATE ON SCHEMA "of$others" FROM PUBLIC"#, user: "postgres")
        #expect(
            problems(run, "owner") == [
                "owner owns the schema, whose functions run with its rights, and has CREATEROLE, CREATEDB → ALTER ROLE owner NOCREATEROLE NOCREATEDB;"
            ])
        #expect(problems(run, "durability").first?.hasPrefix("fsync is off") == true)
        #expect(problems(run, "slots").first?.hasSuffix("SELECT pg_drop_replication_slot('forgotten');") == true)
        #expect(problems(run, "locks").first?.hasPrefix("tokenkeeper.held_result is locked (SHARE)") == true, "\(run)")
        let settings = problems(run, "settings")
        #expect(settings.count == 2 && settings[0].hasPrefix("deadlock_timeout is 100 ms"), "\(settings)")
        #expect(settings.last?.hasSuffix("ALTER ROLE a_daemon RESET default_transaction_read_only;") == true)

        // As the text says: SQL as a superuser, and commands as the owner of the schema.
        for finding in findings(run) where finding.grade == "problem" {
            for command in finding.commands where !["warnings", "disk", "durability"].contains(finding.subject) {
                if command.hasSuffix(";") {
                    try database.psql(command, user: "postgres")
                } else {
                    let words = command.split(separator: " ").map(String.init)
                    #expect(words.first == "tokenkeeperd", "\(command)")
                    let fixed = try ProgramRun(
                        [DaemonProcess.program] + words.dropFirst(),
                        environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "owner")])
                    #expect(fixed.status == 0, "\(command): \(fixed)")
                }
            }
        }
        try eventually("all is fixed") {
            run = try database.command("doctor", as: "postgres")
            return findings(run).allSatisfy {
                $0.grade != "problem" || ["warnings", "disk", "durability"].contains($0.subject)
            }
        }
        #expect(daemon.stop() == 0)
        #expect(problems(try database.command("doctor", as: "postgres"), "daemons").count == 1)
    }

    @Test func `without a schema, rights or a server it says what to do`() throws {
        let bare = try TestCluster.shared.database(migrated: false)
        let empty = try bare.command("doctor", as: "owner")
        #expect(
            empty.status == 1 && problems(empty, "schema").first?.hasSuffix("→ tokenkeeperd migrate") == true,
            "\(empty)")
        let database = try TestCluster.shared.database()
        let stranger = try database.command("doctor", as: "a_monitor")
        #expect(stranger.status == 1)
        #expect(
            problems(stranger, "schema").first?.hasSuffix("GRANT tokenkeeper_reader TO a_monitor;") == true,
            "\(stranger)")
        let ungranted = try TestCluster.prepared()
        try ungranted.database().psql("ALTER ROLE tokenkeeper_reader RENAME TO renamed", user: "postgres")
        let early = try ungranted.database().command("doctor", as: "a_monitor")
        #expect(problems(early, "schema").first?.hasSuffix("→ tokenkeeperd grants") == true, "\(early)")
        let away = try ProgramRun(
            [DaemonProcess.program, "doctor"],
            environment: ["TOKENKEEPER_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/db"])
        #expect(away.status == 69 && !away.output.contains("hunter2"))
        #expect(problems(away, "PostgreSQL").count == 1, "\(away)")
        #expect(try database.command("doctor", as: "a_reader", settings: ["sweep.interval=soon"]).status == 78)
    }

    @Test func `the files of this machine are checked without a database`() throws {
        let stage = try SendingStage()
        let old = try stage.files.clientCertificate("doctor-\(UUID().uuidString.prefix(8))", topic: "t", days: -1)
        let run = try stage.database.command(
            "doctor", as: "a_reader",
            settings: stage.key + [
                "credential.old.certificate_file=\(old.certificate)", "credential.old.certificate_key_file=\(old.key)",
                "credential.old.topics=t", "credential.gone.key_file=/nonexistent.p8",
                "credential.gone.key_id=ABCDE12345",
                "credential.gone.team_id=ABCDE12345", "credential.gone.topics=u", "send.ca_file=/nonexistent.pem",
                "runtime_directory=/nonexistent",
            ])
        #expect(run.status == 1)
        let credentials = problems(run, "credentials")
        #expect(credentials.count == 2, "\(run)")
        #expect(credentials.first?.contains("/nonexistent.p8 cannot be read: No such file or directory") == true)
        #expect(credentials.last?.contains("the certificate of credential old has expired at") == true)
        #expect(credentials.last?.contains("install -m 600 NEW-FILE") == true)
        #expect(problems(run, "trusted certificates").count == 1 && problems(run, "runtime directory").count == 1)
    }

    @Test func `clocks may differ by two seconds`() {
        func check(_ server: Int64, _ before: Int64, _ after: Int64) -> Finding {
            ClockCheck.finding(
                server: Instant(microseconds: server), before: Instant(microseconds: before),
                after: Instant(microseconds: after))
        }
        #expect(check(100_000_000, 99_000_000, 101_000_000).grade == .passed)
        #expect(check(100_000_000, 102_000_000, 103_000_000).grade == .passed, "the answer may have taken a second")
        #expect(check(100_000_000, 103_000_000, 103_000_001).words.hasPrefix("this machine is 3 s ahead of the server"))
        #expect(check(100_000_000, 90_000_000, 95_000_000).words.hasPrefix("this machine is 5 s behind the server"))
    }

    @Test func `a nearly full disk is a problem`() {
        #expect(DiskCheck.finding("/d", free: 9, of: 100).grade == .problem)
        #expect(DiskCheck.finding("/d", free: 10, of: 100).grade == .passed)
    }

    @Test func `the report aligns, counts, and shows no control characters`() {
        let text = DoctorText.text([
            Finding(.passed, "a", "fine"), Finding(.problem, "bb", "bad\n", fixedBy: ["x;"]),
            Finding(.notChecked, "c", "needs y"),
        ])
        #expect(
            text == """
                ok           a   fine
                problem      bb  bad\u{FFFD}
                                   x;
                not checked  c   needs y

                1 problem to fix; 1 not checked
                """)
        #expect(DoctorText.text([Finding(.passed, "a", "fine")]).hasSuffix("\nnothing to fix"))
    }
}
