import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

/// Follows docs/how-to/breaking-news.md, statement by statement and each as the role that the page names, with a daemon and a fake APNs
/// where 3 % of the devices are gone.
@Suite(.ownThread) struct `Breaking news` {
    /// A block of SQL of the page, the role that runs it, and the first value that the page shows as its result.
    private struct Step {
        var section: String
        var role: String
        var sql: String
        var shown: String?
    }

    private let stage: SendingStage
    private let text: String

    init() throws {
        stage = try SendingStage()
        stage.apns.deaths.die(share: 0.03, .init(at: FakeOptions.systemClock() - 3_600_000))
        text = try String(
            contentsOf: PackagedProgram.repository.appendingPathComponent("docs/how-to/breaking-news.md"),
            encoding: .utf8)
    }

    private var steps: [Step] {
        var steps: [Step] = []
        var (section, role) = ("", "")
        var block: (language: String, lines: [String])?
        for line in text.split(separator: "\n", omittingEmptySubsequences: false) {
            let line = line.trimmingCharacters(in: .whitespaces)
            if let open = block {
                guard line == "```" else {
                    block?.lines.append(line)
                    continue
                }
                block = nil
                if open.language == "sql" {
                    steps.append(Step(section: section, role: role, sql: open.lines.joined(separator: "\n")))
                    role = ""
                } else if open.language == "text", open.lines.count > 2, open.lines[1].hasPrefix("---") {
                    steps[steps.count - 1].shown = open.lines[2]
                }
            } else if line.hasPrefix("```") {
                block = (String(line.dropFirst(3)), [])
            } else if let match = line.wholeMatch(of: #/<!-- role: (\w+) -->/#) {
                role = String(match.output.1)
            } else if line.hasPrefix("## ") {
                section = String(line.dropFirst(3).prefix { $0 != "." })
            }
        }
        return steps
    }

    /// Runs the blocks of a section, and checks the results that the page shows.
    private func follow(_ section: String) throws {
        let steps = steps.filter { $0.section == section }
        #expect(!steps.isEmpty, "section \(section)")
        for step in steps {
            #expect(!step.role.isEmpty, "\(step.sql)")
            let result = try stage.database.psql(
                "SET client_min_messages = warning; \(step.sql)", user: "a_\(step.role)")
            if let shown = step.shown { #expect(result == shown, "\(step.sql)") }
        }
    }

    private func progress(_ columns: String, _ campaign: Int) throws -> String {
        try stage.database.psql(
            "SELECT \(columns) FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)")
    }

    private func ended(_ campaign: Int) throws {
        try eventually("campaign \(campaign) has ended") {
            try progress("ended_at IS NOT NULL", campaign) == "t"
        }
        try eventually("its responses are recorded") { try stage.count("send_result") == 0 }
    }

    private func campaign(_ command: String...) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "campaign"] + command,
            environment: ["TOKENKEEPER_DATABASE_URL": stage.database.url(user: "a_operator")])
    }

    @Test func `every statement of the page works, for its role and with its result`() throws {
        let daemon = try stage.daemon()
        try follow("1")
        // The table of expressions.
        try follow("2")
        let expressions = text.matches(of: #/(?m)^\| `([^`]+)` \| (everyone|the same|Czech|all dev|a tag)/#)
        #expect(expressions.count == 5)
        for expression in expressions {
            let words = expression.output.1.replacing(#"\|"#, with: "|")
            try stage.database.psql("SELECT tokenkeeper.tag_query('\(words)')", user: "owner")
        }

        try follow("3")
        try ended(1)
        #expect(try progress("addressed, accepted + stale", 1) == "1|1")
        // Twice in one transaction, where now() is the same.
        let news = try #require(steps.first { $0.section == "4" })
        #expect(
            try stage.database.psql(
                "SET client_min_messages = warning; \(news.sql) \(news.sql)", user: "a_\(news.role)") == "2\n2")
        let watched = try campaign("show", "2", "--watch")
        #expect(watched.status == 0 && watched.errors.isEmpty && watched.output.contains("is ended\n"))
        try ended(2)
        try follow("5")
        #expect(
            try stage.database.psql(
                "SELECT state FROM tokenkeeper.delivery('00000000-0001-8000-8000-000000000201')", user: "a_reader")
                == "accepted")

        // What is left.
        try follow("6")
        let counts = try progress("addressed, accepted, stale, addressed - accepted - stale", 2).split(separator: "|")
        #expect(counts[0] == "491" && counts[3] == "0")
        #expect(counts[1] == (steps.last { $0.section == "6" }?.shown ?? ""), "the next campaign addresses the rest")
        try follow("7")
        try ended(3)
        try ended(4)
        #expect(
            try stage.database.psql(
                "SELECT sum(addressed) = \(counts[1]), min(addressed) > 50, sum(stale) FROM tokenkeeper.campaign_progress WHERE campaign_id IN (3, 4)"
            ) == "t|t|0", "each gets it once, in one language")

        // Limits. The page's campaign number 5 is still being sent: it is slow.
        let limits = steps.filter { $0.section == "8" }
        #expect(limits.count == 3)
        try follow("8")
        #expect(
            try stage.database.psql(
                "SELECT max_per_second, alerts_per_day, confirm_share FROM tokenkeeper.topic_policy WHERE topic = 'com.example.news'"
            ) == "20000|10|0.5")
        let unconfirmed = limits[2].sql.replacing("confirm => true", with: "confirm => false")
        var sender = try stage.database.connect(user: "a_sender")
        #expect(throws: (any Error).self) { try sender.execute(unconfirmed) }
        // Cancelled in the middle: at 200 a second, it takes 2.5 seconds.
        try eventually("campaign 5 is being sent") { try progress("addressed > 0", 5) == "t" }
        try follow("9")
        try ended(5)
        try ended(6)
        #expect(
            try progress("state, addressed = accepted + stale + cancelled, cancelled > 0", 5) == "cancelled|t|t")
        for command in ["pause", "resume", "cancel"] { #expect(try campaign(command, "5").status == 0) }
        #expect(try campaign("rate", "5", "200").status == 0)

        // A list of tokens.
        let list = try #require(steps.last).sql
        let folder = try TemporaryDirectory()
        let file = "\(folder.path)/tokens.txt"
        try "a1b2c3d4e5f60718\nA1B2C3D4E5F60718\nffff\n".write(toFile: file, atomically: true, encoding: .utf8)
        #expect(list.contains("'tokens.txt'"))
        try stage.database.psql("UPDATE tokenkeeper.topic_policy SET alerts_per_day = NULL", user: "a_operator")
        let copied = try ProgramRun(
            ["psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-d", stage.database.url(user: "a_sender")],
            input: list.replacing("'tokens.txt'", with: "'\(file)'") + "\n")
        #expect(copied.status == 0, "\(copied.errors)")
        try eventually("it is sent") {
            try stage.database.psql(
                "SELECT addressed FROM tokenkeeper.campaign_progress WHERE audience = 'tokens' AND ended_at IS NOT NULL"
            )
                == "2"
        }
        #expect(daemon.stop() == 0)
    }
}
