import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@Suite(.ownThread) struct `Sending from the command line` {
    let database: TestDatabase

    private static let token = "abcdef0123456789abcdef0123456789"

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('\(Self.token)', 't', user_id => 'anna', device_id => 'phone', tags => '{news}'),
                   tokenkeeper.register('bb', 't', user_id => 'anna', device_id => 'tablet'),
                   tokenkeeper.register('cc', 't', user_id => 'berta', device_id => 'other'), tokenkeeper.unregister('cc', 't')
            """, user: "a_app")
    }

    private func send(_ arguments: String..., as user: String = "a_sender") throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "send", "--topic", "t"] + arguments,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
    }

    private func campaigns() throws -> String {
        try database.psql(
            "SELECT coalesce(string_agg(campaign_id || ' ' || audience, ', ' ORDER BY campaign_id), '') FROM tokenkeeper.campaign_progress"
        )
    }

    @Test(arguments: [
        (["--to", token], 1, "tokens"), (["--device", "phone"], 1, "device: phone"),
        (["--user", "anna"], 2, "user: anna"), (["--tag", "news && !muted"], 1, "tags: news && !muted"),
    ])
    func `it queues a campaign, and says to how many tokens`(to: [String], tokens: Int, audience: String) throws {
        let run = try ProgramRun(
            [DaemonProcess.program, "send", "--topic", "t", "--alert", "It's \"on\""] + to,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_sender")])
        let lines = run.output.split(separator: "\n")
        #expect(run.status == 0, "\(run)")
        #expect(
            lines.first == "queued as campaign 1, to \(tokens == 1 ? "1 token" : "\(tokens) tokens") of t (production)")
        #expect(run.output.contains("tokenkeeperd campaign show 1 --watch\n"))
        #expect(run.errors.contains("warning: no running daemon sends: it waits"), "\(run)")
        #expect(!run.output.contains(Self.token) && !run.errors.contains(Self.token), "no whole token")
        #expect(
            run.output.hasSuffix("tokenkeeperd explain abcdef0123456789\n") == (to[0] == "--to"), "\(run.output)")
        #expect(try campaigns() == "1 \(audience)")
        #expect(
            try database.psql(
                "SELECT payload->'aps'->>'alert', priority, expiration, collapse_id FROM tokenkeeper.campaign")
                == "It's \"on\"|||")
    }

    @Test func `a payload comes from a file or standard input, with what APNs is told`() throws {
        let file = NSTemporaryDirectory() + "\(UUID().uuidString).json"
        try #"{"aps":{"alert":"A"},"of":"file"}"#.write(toFile: file, atomically: true, encoding: .utf8)
        defer { try? FileManager.default.removeItem(atPath: file) }
        let run = try send(
            "--user", "anna", "--payload", file, "--priority", "5", "--keep-for", "1h", "--collapse-id", "news")
        #expect(run.status == 0, "\(run)")
        #expect(
            try database.psql(
                """
                SELECT payload->>'of', priority, collapse_id, expiration - created_at BETWEEN '59min' AND '61min' FROM tokenkeeper.campaign
                """) == "file|5|news|t")
        let piped = try ProgramRun(
            [DaemonProcess.program, "send", "--topic", "t", "--user", "anna", "--payload", "-"],
            input: #"{"aps":{"alert":"A"},"of":"pipe"}"#,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_sender")])
        #expect(piped.status == 0, "\(piped)")
        #expect(try database.psql("SELECT payload->>'of' FROM tokenkeeper.campaign WHERE campaign_id = 2") == "pipe")
    }

    @Test func `a dry run counts, asks the gate, and queues nothing`() throws {
        let run = try send("--to", Self.token, "--alert", "A", "--dry-run")
        #expect(run.status == 0, "\(run)")
        #expect(run.output.hasPrefix("the gate lets this token pass: would send to 1 token of t (production)\n"))
        #expect(run.errors.contains("no running daemon sends: it would wait"))
        #expect(
            try send("--user", "anna", "--alert", "A", "--dry-run").output
                == "would send to 2 tokens of t (production)\n")
        // What would be refused is refused, after the count.
        let refused = try send("--user", "anna", "--alert", "A", "--priority", "7", "--dry-run")
        #expect(refused.status == 64 && refused.output == "would send to 2 tokens of t (production)\n", "\(refused)")
        #expect(refused.errors.contains("priority is 7, expected 10, 5 or 1"))
        #expect(try campaigns() == "")
    }

    @Test func `to nobody it queues nothing, and exits with 1`() throws {
        for option in [[], ["--dry-run"]] {
            let run = try ProgramRun(
                [DaemonProcess.program, "send", "--topic", "t", "--to", "cc", "--alert", "A"] + option,
                environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_sender")])
            #expect(run.status == 1 && run.errors.contains("the gate refuses this token"), "\(run)")
        }
        #expect(try send("--user", "nobody", "--alert", "A").errors.contains("no sendable token is meant"))
        #expect(try campaigns() == "")
    }

    @Test func `what is wrong with the arguments is said, with 64`() throws {
        for (arguments, words) in [
            (["--alert", "A"], "Expected one of --to"),
            (["--user", "a", "--tag", "b", "--alert", "A"], "Expected one of"),
            (["--user", "a"], "Expected one of --alert and --payload"),
            (["--user", "a", "--payload", "/nonexistent"], "/nonexistent cannot be read"),
            (["--user", "a", "--payload", "-"], "not a JSON object"),
            (["--user", "a", "--alert", "A", "--keep-for", "soon"], "expected a second or more"),
            (["--to", "no token", "--alert", "A"], "1 of 1 token cannot be read"),
            (["--tag", "news &&", "--alert", "A"], "the tag expression has"),
            (["--user", "a", "--alert", "A", "--environment", "test"], "expected production or sandbox"),
        ] {
            let run = try ProgramRun(
                [DaemonProcess.program, "send", "--topic", "t"] + arguments,
                environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_sender")])
            #expect(run.status == 64 && run.errors.contains(words), "\(arguments): \(run)")
        }
        let unknown = try ProgramRun(
            [DaemonProcess.program, "send", "--topic", "u", "--user", "anna", "--alert", "A"],
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_sender")])
        #expect(unknown.status == 64 && unknown.errors.contains("topic 'u' is not known"), "\(unknown)")
        let refused = try send("--user", "anna", "--alert", "A", as: "a_app")
        #expect(refused.status == 69 && refused.errors.contains("the rights of tokenkeeper_sender"), "\(refused)")
    }
}
