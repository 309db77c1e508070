import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@Suite(.ownThread) struct `Attaching a table from the command line` {
    let database: TestDatabase

    /// A table of the login a_app, with rows that are logged out, without a token, or not to be understood.
    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("GRANT CREATE ON SCHEMA public TO a_app")
        try database.psql(
            """
            CREATE TABLE public.device (id bigint PRIMARY KEY, push_token text, topic text, seen_at timestamptz, left_at timestamptz);
            CREATE INDEX ON public.device (push_token)
            """, user: "a_app")
    }

    private func fill(_ rows: ClosedRange<Int>) throws {
        try database.psql(
            """
            INSERT INTO public.device
            SELECT n, CASE WHEN n % 10 = 0 THEN 'junk ' || n WHEN n % 17 = 0 THEN NULL ELSE lpad(to_hex(n), 64, '0') END, 't',
                   now() - interval '3 days', CASE WHEN n % 7 = 0 THEN now() END
            FROM generate_series(\(rows.lowerBound), \(rows.upperBound)) AS n
            """, user: "a_app")
    }

    private static let attach = [
        "attach", "device", "--token", "push_token", "--topic", "topic", "--registered-at", "seen_at", "--logged-out",
        "left_at IS NOT NULL",
    ]

    private func run(_ arguments: [String], as user: String = "a_app") throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program] + arguments, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
    }

    /// Records what is queued, as a daemon does.
    private func record() throws {
        try database.psql(
            """
            WITH gone AS (DELETE FROM tokenkeeper.registration RETURNING *)
            SELECT tokenkeeper.apply_registrations((SELECT array_agg(g::tokenkeeper.registration) FROM gone AS g), 1000000, 1, 1000)
            """)
    }

    private func count(_ table: String, _ condition: String = "true") throws -> String {
        try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")
    }

    @Test func `a dry run changes nothing, and says what is wrong`() throws {
        try fill(7...11)
        let plan = try run(Self.attach + ["--dry-run"])
        let token = String(repeating: "0", count: 8)
        #expect(
            plan.status == 0
                && plan.output.hasPrefix("row 7: logged out, \(token)...\nrow 8: production, t, \(token)..., ")
                && plan.errors.contains("warning: topic: 't' is no bundle id")
                && plan.errors.contains(
                    "warning: token: 1 of 4 rows have no device token, such as row 10: token is 'junk 10'"),
            "\(plan)")
        let verbose = try run(Self.attach + ["--dry-run", "--verbose"])
        #expect(!plan.output.contains("CREATE TRIGGER") && verbose.output.contains("CREATE TRIGGER"), "\(verbose)")
        #expect(try count("attachment") == "0")
        #expect(
            try database.psql(
                "SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgrelid = 'public.device'::regclass") == "0"
        )
        let wrong = try run(["attach", "device", "--token", "tokn", "--topic", "topic", "--registered-at", "seen_at"])
        #expect(wrong.status == 64 && wrong.errors.contains("tokn"), "\(wrong)")
        let missing = try run(["attach", "devices", "--token", "push_token", "--topic", "topic"])
        #expect(missing.status == 69 && missing.errors.contains("there is no table 'devices'"), "\(missing)")
        #expect(try count("attachment") == "0")
    }

    @Test func `attach, backfill, withdraw and detach follow each other`() throws {
        try fill(1...3000)
        let attached = try run(Self.attach + ["--backfill"])
        #expect(attached.status == 0, "\(attached)")
        #expect(
            !attached.errors.contains("\r") && !attached.errors.contains("%"), "no progress bar in a pipe: \(attached)")
        #expect(
            attached.output.contains(
                "queued 2841 registrations of public.device (source 2); 405 of them are logouts; 159 rows say nothing: no token, or left out by the filter; 300 tokens cannot be read"
            ), "\(attached)")
        try record()
        // Each rejected row is where the output says, with its key and the cause.
        #expect(
            try count("rejected_registration", "source_id = 2 AND error LIKE '%; row ''%'' of public.device'") == "300")
        #expect(try count("token") == "2541")
        #expect(
            try count("token", "state = 'unregistered_by_app'")
                == database.psql(
                    "SELECT count(*) FROM public.device WHERE length(push_token) = 64 AND left_at IS NOT NULL",
                    user: "a_app"))
        let listed = try run(["attachments"], as: "a_reader")
        #expect(
            listed.output.contains("public.device  attached at") && listed.output.contains("triggers enabled"),
            "\(listed)")

        try database.psql("SELECT tokenkeeper.register(lpad(to_hex(1), 64, '0'), 't')")
        let before = try count("token")
        let dry = try run(["withdraw", "2", "--dry-run"])
        #expect(dry.status == 0 && dry.output.contains("would remove 2540 tokens; would keep 1"), "\(dry)")
        #expect(try count("token") == before)
        let withdrawn = try run(["withdraw", "2"])
        #expect(withdrawn.status == 0 && withdrawn.output.contains("removed 2540 tokens; kept 1"), "\(withdrawn)")
        #expect(withdrawn.output.contains("1  it has been registered since"), "\(withdrawn)")
        #expect(try run(["withdraw"]).output.contains("2  backfill of public.device"))
        // A withdrawn backfill does not go on: the next one begins anew.
        #expect(try run(["backfill", "device"]).output.contains("queued 2841 registrations"))

        let detached = try run(["detach", "device"])
        #expect(detached.status == 0 && detached.output == "device is detached\n", "\(detached)")
        #expect(try run(["attachments"], as: "a_reader").output == "no table is attached\n")
    }

    @Test func `a backfill that is killed again and again queues each row once`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        try fill(1...30_000)
        #expect(try run(Self.attach).status == 0)
        var kills = 0
        while try count("registration_source", "kind = 'backfill' AND finished_at IS NOT NULL") == "0" {
            let process = Process()
            process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
            process.arguments = ["backfill", "device"]
            process.environment = ProcessInfo.processInfo.environment.merging([
                "TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")
            ]) { $1 }
            (process.standardOutput, process.standardError) = (FileHandle.nullDevice, FileHandle.nullDevice)
            let done =
                Int(try database.psql("SELECT coalesce(max(position::bigint), 0) FROM tokenkeeper.registration_source"))
                ?? 0
            // It always gets somewhere before it is killed, and is left alone for the last rows: the test ends.
            let until = done + 1 + chance.dice(8000)
            try process.run()
            if until < 29_000 {
                // Killed in the middle of whatever it does then.
                try eventually("it has come to row \(until), seed \(seed)") {
                    try count("registration_source", "position::bigint >= \(until)") == "1"
                }
                if process.isRunning { kill(process.processIdentifier, SIGKILL) }
                kills += 1
            }
            process.waitUntilExit()
            // Its last COMMIT may still be on its way. A backfill that begins before that one is finished would be a second one.
            try eventually("its session has ended") {
                try database.psql(
                    """
                    SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'tokenkeeperd'
                    """) == "0"
            }
        }
        #expect(kills > 0)
        #expect(
            try database.psql(
                """
                SELECT count(*), count(DISTINCT token), count(*) FILTER (WHERE unregistered) FROM tokenkeeper.registration
                """)
                == database.psql(
                    """
                    SELECT count(*), count(*), count(*) FILTER (WHERE left_at IS NOT NULL) FROM public.device WHERE push_token <> ''
                    """, user: "a_app"), "seed \(seed)")
        #expect(
            try database.psql("SELECT queued FROM tokenkeeper.registration_source WHERE kind = 'backfill'")
                == count("registration"), "seed \(seed)")
    }

    @Test func `a check says what differs, and a repair queues it`() throws {
        try fill(1...100)
        #expect(try run(Self.attach + ["--backfill"]).status == 0)
        try record()
        let agreed = try run(["backfill", "device", "--check"])
        #expect(
            agreed.status == 0 && agreed.output == "public.device (100 rows) and the ledger agree\n", "\(agreed)")
        try database.psql(
            """
            ALTER TABLE public.device DISABLE TRIGGER ALL; UPDATE public.device SET left_at = now() WHERE id = 1; DELETE FROM public.device WHERE id = 2;
            UPDATE public.device SET seen_at = now() WHERE id = 3
            """, user: "a_app")
        let differs = try run(["backfill", "public.device", "--check"])
        let found = """
            public.device (99 rows) and the ledger differ in 2 tokens
              1  not logged out: row 1, 00000000... of t
              1  registered later: row 3, 00000000... of t

            """
        #expect(differs.status == 1 && differs.output == found, "\(differs)")
        #expect(try run(["attachments"], as: "a_reader").output.contains("; checked at "))
        let repaired = try run(["backfill", "device", "--repair"])
        #expect(
            repaired.status == 0
                && repaired.output == found
                    + "queued 2 registrations and logouts that repair this; to undo logouts: tokenkeeperd reinstate\n",
            "\(repaired)")
        #expect(try run(["attachments"], as: "a_reader").output.contains(": agrees"))
        try record()
        #expect(try run(["backfill", "device", "--check"]).status == 0)
        for stranger in ["a_operator", "postgres", "a_reader"] {
            #expect(try run(["backfill", "device", "--check"], as: stranger).status == 69)
        }
    }

    @Test func `on a terminal, a backfill shows its progress`() throws {
        try fill(1...5000)
        try database.psql("ANALYZE public.device", user: "a_app")
        #expect(try run(Self.attach).status == 0)
        let folder = try TemporaryDirectory()
        let shown = try ProgramRun(
            [
                "script", "-qefc", "stty rows 12 cols 70; exec \(DaemonProcess.program) backfill device",
                folder.path + "/shown",
            ],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app"), "TERM": "xterm"])
        #expect(shown.status == 0, "\(shown)")
        let text = try String(contentsOfFile: folder.path + "/shown", encoding: .utf8)
        #expect(text.contains("\r\"public.device\"") || text.contains("\rpublic.device  ["), "\(text)")
        #expect(text.contains("]  100 %  5000 rows"), "\(text)")
        let lines = text.split(whereSeparator: { $0 == "\r" || $0 == "\n" || $0 == "\r\n" }).filter {
            $0.contains(" rows  ") || $0.contains("%")
        }
        #expect(lines.allSatisfy { $0.replacing("\u{1B}[K", with: "").count < 70 }, "\(lines)")
    }

    @Test func `only the table's owner may attach and backfill it`() throws {
        try fill(1...10)
        #expect(try run(Self.attach).status == 0)
        for stranger in ["a_reader", "a_sender"] {
            let refused = try run(["backfill", "public.device"], as: stranger)
            #expect(refused.status == 69 && refused.errors.contains("this role lacks rights"), "\(refused)")
        }
        #expect(try count("registration_source", "kind = 'backfill'") == "0")
        for powerful in ["a_operator", "postgres"] {
            for command in [["backfill", "public.device"], Self.attach] {
                let refused = try run(command, as: powerful)
                #expect(refused.status == 69, "\(powerful): \(refused)")
            }
        }
        // The advice is the server's, and nothing says that a superuser lacks rights.
        let superuser = try run(["backfill", "public.device"], as: "postgres").errors
        #expect(
            superuser.contains("Connect as the owner of the table") && !superuser.contains("lacks rights"),
            "\(superuser)")
        #expect(try count("registration_source", "kind = 'backfill'") == "0")
    }

    @Test func `a daemon warns of a broken attachment`() throws {
        try fill(1...100)
        #expect(try run(Self.attach).status == 0)
        try database.psql("ALTER TABLE public.device DISABLE TRIGGER ALL", user: "a_app")
        let daemon = try database.daemon()
        try eventually("it warns") { daemon.logged.contains("the changes of an attached table do not arrive") }
        let status = try run(["status"], as: "a_reader").output
        #expect(
            status.contains("warning: the changes of the attached table public.device have not arrived since"),
            "\(status)")
        #expect(daemon.stop() == 0)
    }
}
