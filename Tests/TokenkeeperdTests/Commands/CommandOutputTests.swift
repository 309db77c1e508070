import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// What all commands have in common: JSON, color, the database's name, and the exit status without a configuration.
@Suite(.ownThread) struct `The output of commands` {
    // MARK: - JSON

    private func array(_ database: TestDatabase, _ command: [String], as user: String = "a_reader") throws
        -> [[String: Any]]
    {
        let run = try ProgramRun(
            [DaemonProcess.program] + command + ["--json"],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
        let found = try JSONSerialization.jsonObject(with: Data(run.output.utf8)) as? [[String: Any]]
        return try #require(found, "\(command): \(run)")
    }

    @Test(arguments: [
        ["attachments"], ["campaign", "list"], ["held", "list"], ["rejected", "list"], ["withdraw"],
        ["explain", "abcdef01"],
    ])
    func `whatever lists nothing prints an empty array`(command: [String]) throws {
        let database = try TestCluster.shared.database()
        #expect(try array(database, command).isEmpty)
    }

    @Test func `lists have the same in JSON as in text, with instants in ISO 8601`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(md5(i::text), 't', registered_at => now() - interval '2 days') FROM generate_series(1, 500) AS i;
            SELECT tokenkeeper.begin_import('file.csv');
            """, user: "a_app")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            SELECT 't', md5(i::text), 400, '{"reason":"BadDeviceToken"}', now() FROM generate_series(1, 400) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'no token', 410, '{}');
            """, user: "postgres")
        let daemon = try database.daemon()
        try eventually("all is drained") {
            try database.psql(
                "SELECT (SELECT bool_or(tripped) FROM tokenkeeper.guard), (SELECT count(*) FROM tokenkeeper.rejected_result)"
            )
                == "t|1"
        }
        let instant = #/20[0-9-]{8}T[0-9:]{8}Z/#
        let held = try #require(try array(database, ["held", "list"]).first)
        #expect(held["topic"] as? String == "t" && held["cause"] as? String == "suspect")
        #expect((held["first_queued_at"] as? String)?.wholeMatch(of: instant) != nil, "\(held)")
        #expect((held["tripped_at"] as? String)?.wholeMatch(of: instant) != nil)
        #expect((held["results"] as? Int).map { $0 > 300 } == true)
        #expect((held["undo"] as? String)?.hasPrefix("tokenkeeperd reinstate") == true)
        let rejected = try #require(try array(database, ["rejected", "list"]).first)
        #expect(rejected["queue"] as? String == "results" && rejected["samples"] as? [Int] == [1], "\(rejected)")
        #expect((rejected["last_rejected_at"] as? String)?.wholeMatch(of: instant) != nil)
        let source = try #require(try array(database, ["withdraw"]).first)
        #expect(source["name"] as? String == "file.csv" && source["source_id"] as? Int == 1, "\(source)")
        let findings = try array(database, ["doctor"])
        #expect(findings.contains { $0["grade"] as? String == "ok" && $0["subject"] as? String == "schema" })
        let sweep = try database.command("sweep", "--dry-run", "--json", as: "a_daemon")
        let report = try JSONSerialization.jsonObject(with: Data(sweep.output.utf8)) as? [String: Any]
        #expect(report?["outcome"] as? String == "finished" && report?["dry_run"] as? Bool == true, "\(sweep)")
        #expect(daemon.stop() == 0)
    }

    @Test func `check-config and map list in JSON, without secrets`() throws {
        let run = try ProgramRun([
            DaemonProcess.program, "check-config", "--json", "--database-url", "postgresql://u:hunter2@h/db",
        ])
        #expect(run.status == 0 && !run.output.contains("hunter2"), "\(run)")
        let rows = try JSONSerialization.jsonObject(with: Data(run.output.utf8)) as? [[String: Any]] ?? []
        #expect(rows.count == Setting.table.count)
        #expect(rows.contains { $0["key"] as? String == "sweep.interval" && $0["value"] as? String == "1h" })
        #expect(rows.contains { $0["key"] as? String == "database_url" && $0["origin"] as? String != "default" })
        for options in [["--json", "--quiet"], ["--json", "--online"]] {
            #expect(try ProgramRun([DaemonProcess.program, "check-config"] + options).status == 64)
        }
    }

    // MARK: - Color

    @Test func `only a terminal that can show color gets it, and NO_COLOR turns it off`() {
        func isColored(_ isTerminal: Bool, _ noColor: String?, _ term: String?) -> Bool {
            Color(isTerminal: isTerminal, noColor: noColor, term: term).text("x", .warning) != "x"
        }
        #expect(isColored(true, nil, "xterm") && isColored(true, "", "xterm"))
        #expect(!isColored(false, nil, "xterm") && !isColored(true, "1", "xterm"))
        #expect(!isColored(true, nil, "dumb") && !isColored(true, nil, nil))
    }

    @Test func `the words of a state are colored, and nothing else`() {
        let color = Color(isTerminal: true, noColor: nil, term: "xterm")
        let report = StatusReport(
            json: "{}", fields: [], warnings: ["bad\u{1B}", "odd"], criticalWarnings: ["bad\u{1B}"])
        #expect(
            StatusText.lines(report, color) == [
                "\u{1B}[1;31mcritical\u{1B}[0m: bad\u{FFFD}", "\u{1B}[33mwarning\u{1B}[0m: odd",
            ])
        #expect(
            DoctorText.text([Finding(.passed, "a", "fine")], color)
                == "\u{1B}[32mok\u{1B}[0m  a  fine\n\nnothing to fix")
    }

    /// A real terminal, made by script(1).
    @Test(arguments: [("xterm", "", true), ("xterm", "1", false), ("dumb", "", false)])
    func `doctor prints color on a terminal`(term: String, noColor: String, isColored: Bool) throws {
        let database = try TestCluster.shared.database()
        let run = try ProgramRun(
            ["script", "-qec", "\(DaemonProcess.program) doctor; true", "/dev/null"],
            environment: [
                "TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader"), "TERM": term, "NO_COLOR": noColor,
            ])
        #expect(run.output.contains("schema"), "\(run)")
        #expect(run.output.contains("\u{1B}[") == isColored, "\(run)")
        #expect(try !database.command("doctor", as: "a_reader", environment: ["TERM": term]).output.contains("\u{1B}"))
    }

    // MARK: - Which database

    @Test func `status and migrate name the database and its server, without a password`() throws {
        let database = try TestCluster.shared.database()
        let name = "database \(database.name) on "
        let url = database.url(user: "a_reader:hunter2")
        let status = try ProgramRun([DaemonProcess.program, "status", "--database-url", url])
        #expect(status.output.hasPrefix(name) && !(status.output + status.errors).contains("hunter2@"), "\(status)")
        #expect(status.output.split(separator: "\n").first?.hasSuffix(":\(database.cluster.port)") == true)
        for option in [[], ["--dry-run"]] {
            let migrated = try ProgramRun(
                [DaemonProcess.program, "migrate"] + option,
                environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "owner")])
            #expect(migrated.output.hasPrefix(name), "\(migrated)")
        }
    }

    @Test func `without a configuration, each command says what to set, and exits with 78`() throws {
        for command in [
            ["status"], ["run"], ["migrate"], ["explain", "abcdef01"], ["held"], ["doctor"], ["sweep"],
            ["uninstall", "--dry-run"], ["attachments"], ["detach", "t"],
            ["send", "--topic=t", "--to=aa", "--alert=A"],
        ] {
            let run = try ProgramRun(
                ["env", "-u", "PGHOST", "-u", "PGPORT", "-u", "PGUSER", "-u", "PGDATABASE", "-u", "PGSERVICE"]
                    + [DaemonProcess.program] + command)
            #expect(run.status == 78, "\(command): \(run)")
            #expect(
                (run.output + run.errors).contains(
                    "no database is named: set database_url in /etc/tokenkeeperd/tokenkeeperd.toml, or use --database-url"
                ), "\(command): \(run)")
            #expect(!run.errors.contains("socket"))
        }
        let check = try ProgramRun(["env", "-u", "PGHOST", DaemonProcess.program, "status", "--check"])
        #expect(check.status == 3 && check.output.contains("UNKNOWN - no database is named"), "\(check)")
    }

    // MARK: - Help

    @Test func `the help lists each command once, in groups`() throws {
        let help = try ProgramRun([DaemonProcess.program, "--help"]).output
        for group in Tokenkeeperd.configuration.groupedSubcommands {
            #expect(help.contains("\(group.name.uppercased()) SUBCOMMANDS:"), "\(group.name): \(help)")
        }
        #expect(Tokenkeeperd.configuration.ungroupedSubcommands.isEmpty)
        let names = Tokenkeeperd.configuration.subcommands.map { $0._commandName }
        #expect(Set(names).count == names.count)
    }
}
