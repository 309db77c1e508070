import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `Campaigns from the command line` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', tags => CASE WHEN i > 20 THEN '{news}'::text[] END))
            FROM generate_series(1, 30) AS i
            """, user: "a_app")
    }

    /// - Returns: The number of the campaign.
    @discardableResult
    private func enqueue(_ arguments: String) throws -> String {
        try database.psql(
            "SET client_min_messages = warning; SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', 't', \(arguments))",
            user: "a_sender")
    }

    private func run(_ arguments: String..., as user: String = "a_reader") throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "campaign"] + arguments,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
    }

    /// Addresses a campaign and claims requests, as a daemon does.
    private func claim(_ number: String, most: Int) throws {
        try database.psql("SELECT tokenkeeper.address_campaign(\(number), 100000)", user: "a_daemon")
        try database.psql(
            "SELECT count(*) FROM tokenkeeper.claim_campaign(\(number), 'd', \(most), 3)", user: "a_daemon")
    }

    @Test func `the list has one line per campaign, the newest first`() throws {
        #expect(try run("list").output == "there is no campaign\n")
        #expect(try run("list", "--json").output == "[]\n")
        try enqueue("tags => 'news', name => 'one ' || chr(27)")
        try enqueue("everyone => true")
        let list = try run("list")
        let lines = list.output.split(separator: "\n").map(String.init)
        try #require(list.status == 0 && list.errors.isEmpty && lines.count == 2)
        #expect(lines[0].hasPrefix("2  20") && lines[0].hasSuffix("  t (production)  waiting: 0 addressed"))
        #expect(lines[1].hasPrefix("1 \"one \u{FFFD}\"  "), "no control characters: \(lines[1])")
        #expect(try run("--limit", "1").output == lines[0] + "\n", "list is the default")
        let json = try #require(
            try JSONSerialization.jsonObject(with: Data(try run("list", "--json").output.utf8)) as? [[String: Any]])
        #expect(json.map { $0["campaign_id"] as? Int } == [2, 1])
        #expect(json[1]["audience"] as? String == "tags: news" && json[1]["waiting"] as? Int == 0)
        #expect(json[0]["waits_because"] as? String == "no running daemon sends")
        for limit in ["0", "10001"] { #expect(try run("list", "--limit", limit).status == 64) }
    }

    @Test func `show says what has become of a campaign, and why it does not move`() throws {
        let number = try enqueue("tags => 'news && !old', name => 'Mars'")
        try claim(number, most: 100)
        let shown = try run("show", number)
        #expect(shown.status == 0)
        let lines = shown.output.split(separator: "\n").map(String.init)
        #expect(lines.first == "campaign \(number) \"Mars\" to t (production) is running")
        for line in [
            "  audience     tags: news && !old", "  addressed    10", "  waiting      10", "  accepted     0",
            "  It does not move: no running daemon sends.",
        ] { #expect(lines.contains(line), "\(line): \(lines)") }
        #expect(!shown.output.contains("stale"), "what did not happen is left out")
        let json = try #require(
            try JSONSerialization.jsonObject(with: Data(try run("show", number, "--json").output.utf8))
                as? [String: Any])
        #expect(json["addressed"] as? Int == 10 && json["name"] as? String == "Mars")
        // Why, as far as the database knows.
        func reason() throws -> String? {
            try run("show", number).output.split(separator: "\n").last { $0.hasPrefix("  It does") }.map(String.init)
        }
        let sends =
            "INSERT INTO tokenkeeper.sending_daemon VALUES ('d', 'here', now(), NULL, '[{\"name\":\"main\",\"topics\":[\"%\"]}]', '{}')"
        try database.psql(sends.replacing("%", with: "other.*"))
        #expect(
            try reason() == "  It does not move: no running daemon has a credential for t (production).")
        try database.psql(
            "UPDATE tokenkeeper.sending_daemon SET credentials = '[{\"name\":\"main\",\"topics\":[\"*\"]}]'")
        #expect(try reason() == nil)
        #expect(try run("show", number).output.hasSuffix("ten seconds: `tokenkeeperd status` may say why.\n"))
        try database.psql("SELECT tokenkeeper.pause_sending('t', reason => 'a test')", user: "a_operator")
        #expect(try reason() == "  It does not move: sending to t (production) is paused: a test.")
        try database.psql("SELECT tokenkeeper.resume_sending('t')", user: "a_operator")
        #expect(try reason() == nil)
        let later = try enqueue("everyone => true, scheduled_at => '2100-01-01Z'")
        #expect(
            try run("show", later).output.hasSuffix(
                "  It does not move: it is scheduled for 2100-01-01 00:00:00 UTC.\n"))
        let nobody = try enqueue("tags => 'nwes'")
        #expect(try !run("show", nobody).output.contains("nobody"))
        try database.psql(
            "UPDATE tokenkeeper.campaign SET state = 'ended', ended_at = now(), is_addressed = true WHERE campaign_id = \(nobody)"
        )
        #expect(try run("show", nobody).output.contains("\n  It addressed nobody: no sendable token"))
    }

    @Test func `a campaign is paused, resumed and cancelled, and each says what it did`() throws {
        let number = try enqueue("everyone => true")
        try claim(number, most: 100)
        let resume = "tokenkeeperd campaign resume \(number)"
        for (command, output) in [
            ("resume", "was not paused"), ("pause", "is paused; to go on: \(resume)"),
            ("pause", "was not sending: it is paused already, or over"), ("resume", "goes on"),
            ("cancel", "is cancelled"), ("cancel", "was over already"),
            ("pause", "was not sending: it is paused already, or over"), ("resume", "was not paused"),
        ] {
            let ran = try run(command, number, as: "a_sender")
            #expect(ran.status == 0 && ran.output == "campaign \(number) \(output)\n", "\(command): \(ran)")
        }
        #expect(
            try database.psql(
                "SELECT string_agg(operation || ' ' || done_by, ', ' ORDER BY operation_id) FROM tokenkeeper.operation WHERE operation LIKE 'campaign%'"
            ) == "campaign_paused a_sender, campaign_resumed a_sender, campaign_cancelled a_sender")
        // What is in flight has not ended.
        let shown = try run("show", number).output
        #expect(shown.contains(" is cancelled\n") && shown.contains("what is in flight has not ended yet"))
    }

    @Test func `the rate of a campaign is set, and removed`() throws {
        let number = try enqueue("everyone => true, max_per_second => 5")
        for (rate, output) in [
            ("100", "sends 100 requests per second"), ("100", "has this rate already, or is over"),
            ("none", "sends any number of requests per second"),
        ] {
            let ran = try run("rate", number, rate, as: "a_sender")
            #expect(ran.status == 0 && ran.output == "campaign \(number) \(output)\n", "\(ran)")
        }
        #expect(try database.psql("SELECT max_per_second IS NULL FROM tokenkeeper.campaign") == "t")
        for rate in ["0", "1000001", "many"] {
            let ran = try run("rate", number, rate, as: "a_sender")
            #expect(ran.status == 64 && ran.errors.contains("The rate is \(rate), expected 1 to 1000000, or none."))
        }
        #expect(try run("rate", "99", "1", as: "a_operator").errors.contains("there is no campaign 99"))
    }

    @Test func `a mistyped command names the known ones`() throws {
        let commands = "expected list, show, pause, resume, cancel or rate"
        for arguments in [["pausse", "2"], ["pausse"], ["2"]] {
            let ran = try ProgramRun([DaemonProcess.program, "campaign"] + arguments, environment: [:])
            #expect(
                ran.status == 64
                    && ran.errors
                        == "tokenkeeperd: there is no command '\(arguments[0])' of tokenkeeperd campaign; \(commands)\n",
                "\(ran)")
        }
        let other = try ProgramRun([DaemonProcess.program, "statsu"], environment: [:])
        #expect(
            other.status == 64
                && other.errors.contains("no command 'statsu' of tokenkeeperd; expected run, check-config, "))
        #expect(try ProgramRun([DaemonProcess.program, "help", "campaign"], environment: [:]).status == 0)
        #expect(try run("pause").errors.contains("Missing expected argument '<id>'"))
    }

    @Test func `an unknown campaign, or one of somebody else, is refused with a sentence`() throws {
        for command in ["show", "pause", "resume", "cancel"] {
            let ran = try run(command, "99", as: "a_operator")
            let hidden = command == "show" ? " that this login may see" : ""
            #expect(
                ran.status == 64 && ran.output.isEmpty
                    && ran.errors
                        == "tokenkeeperd: there is no campaign 99\(hidden); see `tokenkeeperd campaign list`\n"
            )
        }
        #expect(try run("show", "99", "--watch").status == 64)
        #expect(try run("show", "Mars").status == 64)
        let number = try enqueue("everyone => true")
        let refused = try run("cancel", number, as: "a_reader")
        #expect(refused.status == 69 && refused.errors.contains("the command needs the rights of tokenkeeper_operator"))
        #expect(try run("cancel", number, as: "a_operator").status == 0)
        let list = try run("list", as: "a_app")
        #expect(
            list.status == 69
                && list.errors.contains(
                    "needs the rights of tokenkeeper_reader, or for its own campaigns of tokenkeeper_sender\n"),
            "\(list)")
    }

    @Test(arguments: [
        ("> /dev/full", Int32(74), "tokenkeeperd: the output could not be written: No space left on device\n"),
        ("| true", 0, ""),
    ])
    func `output that does not fit on the disk is an error, and a reader that has gone is none`(
        redirection: String, status: Int32, errors: String
    ) throws {
        let ran = try ProgramRun(
            ["bash", "-o", "pipefail", "-c", "\(DaemonProcess.program) campaign list \(redirection)"],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader")])
        #expect(ran.status == status && ran.errors == errors, "\(ran)")
    }

    @Test func `on a terminal, an error of watch begins on a line of its own`() throws {
        let number = try enqueue("everyone => true")
        let folder = try TemporaryDirectory()
        let (program, shown) = (Process(), folder.path + "/shown")
        program.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        program.arguments = ["script", "-qefc", "exec \(DaemonProcess.program) campaign show \(number) --watch", shown]
        program.environment = ProcessInfo.processInfo.environment.merging(
            ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader"), "TERM": "xterm"]) { $1 }
        program.standardInput = FileHandle.nullDevice
        program.standardOutput = FileHandle.nullDevice
        try program.run()
        try eventually("it watches, and its session is ended") {
            let bar = (try? String(contentsOfFile: shown, encoding: .utf8))?.contains("no running daemon sends") == true
            return try bar
                && database.psql(
                    "SELECT count(pg_terminate_backend(pid)) > 0 FROM pg_stat_activity WHERE usename = 'a_reader' AND datname = current_database()",
                    user: "postgres") == "t"
        }
        program.waitUntilExit()
        #expect(program.terminationStatus == 69)
        let text = try String(contentsOfFile: shown, encoding: .utf8)
        #expect(text.contains("\u{1B}[K\r\ntokenkeeperd: "), "\(text)")
        #expect(try database.psql("SELECT state FROM tokenkeeper.campaign") == "waiting")
    }

    @Test func `in a pipe, watch draws nothing, waits for the end, and prints the state`() throws {
        let number = try enqueue("everyone => true")
        try claim(number, most: 1)
        let program = Process()
        program.executableURL = URL(fileURLWithPath: DaemonProcess.program)
        program.arguments = ["campaign", "show", number, "--watch"]
        program.environment = ProcessInfo.processInfo.environment.merging(
            ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader")]) { $1 }
        let (output, errors) = (Pipe(), Pipe())
        program.standardOutput = output
        program.standardError = errors
        try program.run()
        try eventually("it watches") {
            try database.psql(
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = 'a_reader' AND datname = current_database()"
            ) == "t"
        }
        // The daemon gives back what it has claimed, and the campaign is cancelled: it ends.
        try database.psql("SELECT tokenkeeper.cancel_campaign(\(number))", user: "a_sender")
        try database.psql(
            """
            SELECT tokenkeeper.finish_requests('d', array_agg(ROW(c, 'returned', NULL, NULL, NULL, NULL, NULL, NULL, NULL)::tokenkeeper.request_ending))
            FROM tokenkeeper.claimed_campaign_requests('d') AS c;
            SELECT tokenkeeper.end_campaigns()
            """, user: "a_daemon")
        program.waitUntilExit()
        let text = String(decoding: output.fileHandleForReading.readDataToEndOfFile(), as: UTF8.self)
        #expect(program.terminationStatus == 0)
        #expect(text.contains("campaign \(number) to t (production) is cancelled\n") && text.contains("  ended  "))
        #expect(text.contains("  cancelled    30\n"), "\(text)")
        #expect(errors.fileHandleForReading.readDataToEndOfFile().isEmpty)
        // Over already: it does not wait.
        #expect(try run("show", number, "--watch", "--json").output.hasPrefix("{\"campaign_id\":\(number),"))
    }

    @Test func `what a program's user interrupts ends with 70, and leaves the campaign alone`() throws {
        let number = try enqueue("everyone => true")
        let ran = try ProgramRun(
            [
                "timeout", "--signal=INT", "--preserve-status", "2", DaemonProcess.program, "campaign", "show", number,
                "--watch",
            ],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_reader")])
        #expect(ran.status == 70 && ran.output.contains(" is waiting\n"))
        #expect(try database.psql("SELECT state FROM tokenkeeper.campaign") == "waiting")
    }
}
