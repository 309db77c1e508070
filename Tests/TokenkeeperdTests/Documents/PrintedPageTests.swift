import ArgumentParser
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import tokenkeeperd

/// Each block of SQL and of shell commands in the documents runs, page by page and as printed (see `PageHost`), or is tried elsewhere.
@Suite(.ownThread) struct `What the documents print` {
    /// A page with blocks that run here.
    struct Page: CustomTestStringConvertible, Sendable {
        let path: String
        /// The login that its commands are for, if it is not one with all roles but the owner's.
        var user = "pages"
        /// SQL that makes what it assumes, beside `common`.
        var situation = ""
        /// The files that it names, and what is in them.
        var files: [String: String] = [:]
        /// A part of each statement in the text that is for the schema's owner.
        var owners: [String] = []
        /// A part of each block that does not run here: where it runs, or why it cannot.
        var elsewhere: [String: String] = [:]
        var testDescription: String { path }
    }

    /// Every page is about `com.example.app`, whose devices are these, and about campaigns and a sender's results with numbers up to 20.
    private static let common = """
        SELECT tokenkeeper.register(t, 'com.example.app', device_id => 'device-1', user_id => 'anna', tags => '{World,username:anna}')
        FROM unnest('{a1b2,c3d4,a1b2c3d4}'::text[]) AS t;
        SELECT count(tokenkeeper.enqueue('{"aps":{"alert":"Hi"}}', 'com.example.app', tags => 'World', name => 'c' || i)) FROM generate_series(1, 20) AS i;
        INSERT INTO tokenkeeper.send_result (topic, token, status) SELECT NULL, 'a1b2', 'failed' FROM generate_series(1, 20);

        """

    private static let devices = """
        CREATE SCHEMA shop;
        CREATE TABLE shop.devices (id bigint PRIMARY KEY, push_token text, app text, platform text, is_dev boolean, last_seen timestamp,
            device_uuid uuid, owner_type text, owner_id bigint, topics text, logged_out_at timestamptz);
        CREATE INDEX ON shop.devices (push_token);
        INSERT INTO shop.devices VALUES (1, 'aa01', 'rider', 'ios', false, '2026-01-01', NULL, 'user', 5, 'news', NULL);
        """

    static let pages: [Page] = [
        Page(path: "README.md", elsewhere: ["sudo apt install -y": "Tests/deployment/run"]),
        Page(path: "CONTRIBUTING.md"), Page(path: "docs/troubleshooting.md"),
        Page(path: "docs/explanation/the-guard.md"), Page(path: "docs/reference/fake-apns.md"),
        Page(path: "docs/tutorial.md"),
        Page(
            path: "docs/how-to/adopt.md",
            situation: """
                RESET ROLE; CREATE ROLE app_owner; GRANT CREATE ON DATABASE push TO pages; SET ROLE pages; CREATE SCHEMA shop;
                CREATE TABLE shop.devices (id bigint PRIMARY KEY, push_token text, platform text, last_seen timestamp, device_uuid uuid,
                    user_id bigint, deleted_at timestamp);
                INSERT INTO shop.devices VALUES (1, '<aa01>', 'iOS', '2026-01-01', NULL, 5, NULL), (2, 'fcm:1', 'android', '2026-01-01', NULL, 5, NULL);
                """),
        Page(path: "docs/reference/log-messages.md"),
        Page(path: "docs/how-to/ask-before-sending.md"),
        Page(
            path: "docs/how-to/attach-a-table.md",
            situation: "RESET ROLE; CREATE ROLE app_owner; GRANT CREATE ON DATABASE push TO pages; SET ROLE pages;"
                + devices),
        Page(path: "docs/how-to/back-up-and-restore.md"),
        Page(
            path: "docs/how-to/connect-to-postgresql.md",
            elsewhere: [
                "CREATE DATABASE push": "Tests/deployment/run, in another form",
                #"\password anna"#: "it asks a person", #"\password tokenkeeperd"#: "it asks a person",
            ]),
        Page(path: "docs/how-to/erase-a-person.md", owners: ["tokenkeeper.erasure"]),
        Page(
            path: "docs/how-to/import.md",
            situation:
                "CREATE TABLE devices (push_token text, last_seen timestamptz, logged_out_at timestamptz); INSERT INTO devices VALUES ('aabb', now(), NULL);",
            files: [
                "devices.csv": "push_token,bundle_id,last_seen\na1b2,com.example.app,2026-01-01T00:00:00Z\n",
                "devices.tsv": "1\tx\ta1b2\n",
                "devices.json": #"{"push": {"apn": "a1b2"}, "lastSeen": "2026-01-01T00:00:00Z"}"# + "\n",
                "dead.csv": "token,died_at\na1b2,2026-01-01T00:00:00Z\n",
            ]),
        Page(path: "docs/how-to/incidents.md"),
        Page(
            path: "docs/how-to/kinds-of-pushes.md",
            situation: "CREATE TABLE message (message_id text, recipient text, body text);"),
        Page(path: "docs/how-to/monitor-with-prometheus.md"),
        Page(path: "docs/how-to/monitor-with-sql.md"),
        Page(
            path: "docs/how-to/prune-old-tokens.md",
            situation:
                "CREATE TABLE my_devices (id bigint, push_token text, bundle_id text, is_sandbox boolean, last_seen timestamptz, dead_since timestamptz);"
        ),
        Page(path: "docs/how-to/recover-from-a-bad-sender.md"),
        Page(
            path: "docs/how-to/register-devices.md",
            files: ["registrations.tsv": "com.example.app\ta1b2\t2026-01-01T00:00:00Z\tdevice-1\n"]),
        Page(
            path: "docs/how-to/remove.md", owners: ["tokenkeeper.send_result"],
            elsewhere: [
                "sudo apt purge": "Tests/deployment/run",
                "detach('shop.devices')": "on the page about attaching",
            ]),
        Page(
            path: "docs/how-to/report-results.md",
            files: ["results.tsv": "com.example.app\ta1b2\t200\t\\N\t2026-01-01T00:00:00Z\n"]),
        Page(
            path: "docs/how-to/send-with-the-daemon.md",
            situation:
                "INSERT INTO tokenkeeper.topic_policy (environment, topic) VALUES ('sandbox', 'com.example.app');",
            files: ["AuthKey_ABC1234567.p8": ""]),
        Page(
            path: "docs/how-to/special-installations.md", user: "postgres",
            elsewhere: ["tar xzf": "Tests/deployment/tarball.sh"]),
        Page(path: "docs/how-to/upgrade.md"),
    ]

    /// Pages that a test of their own follows.
    private static let followed = [
        "docs/how-to/breaking-news.md": "BreakingNewsTests",
        "docs/how-to/adopt-from-django.md": "AdoptFromDjangoTests",
        "docs/how-to/run-for-several-databases.md": "FleetTests, MoveTests and Tests/deployment/run",
    ]

    private static func blocks(_ path: String) throws -> [PrintedBlock] {
        try PrintedBlock.all(ofPage: path).filter { ["sql", "sh"].contains($0.language) }
    }

    /// The whole statements about our schema in the text.
    private static func statements(_ path: String) throws -> [String] {
        try PrintedBlock.inline(ofPage: path).filter {
            $0.contains(#/^(SELECT|INSERT|UPDATE|DELETE) .*tokenkeeper\./#) && !$0.contains("…")
        }
    }

    @Test(.serialized, arguments: pages)
    func `each block of a page runs as printed`(page: Page) throws {
        let host = try PageHost(situation: Self.common + page.situation, user: page.user)
        for (name, text) in page.files {
            try text.write(toFile: "\(host.folder.path)/home/\(name)", atomically: true, encoding: .utf8)
        }
        let printed = try PrintedBlock.all(ofPage: page.path)
        for (number, block) in printed.enumerated() where ["sql", "sh"].contains(block.language) {
            if page.elsewhere.keys.contains(where: block.text.contains) { continue }
            do {
                let shown = number + 1 < printed.count ? Self.value(shownIn: printed[number + 1]) : nil
                let output = try host.run(block)
                if block.language == "sql", let shown, output != shown {
                    // What a daemon has to do first.
                    try eventually("it prints \(shown)") { try host.run(block) == shown }
                }
                // Another block of the page may create it, too.
                for role in block.text.matches(of: #/CREATE ROLE (anna|sql_exporter)/#) {
                    try host.database.psql("DROP ROLE \(role.output.1)", user: "postgres")
                }
            } catch {
                Issue.record("\(page.path): \(block.text): \(error)")
            }
        }
        for statement in try Self.statements(page.path) where !page.elsewhere.keys.contains(where: statement.contains) {
            do {
                try host.database.psql(
                    "SET client_min_messages = warning; BEGIN; \(statement); ROLLBACK",
                    user: page.owners.contains(where: statement.contains) ? "tokenkeeper_owner" : "pages")
            } catch {
                Issue.record("\(page.path): \(statement): \(error)")
            }
        }
        #expect(host.end() == 0)
    }

    /// The value of a result of one column and one row, as psql prints it.
    private static func value(shownIn block: PrintedBlock) -> String? {
        let lines = block.text.split(separator: "\n")
        guard block.language == "text", lines.count == 4, lines[1].allSatisfy({ $0 == "-" }), lines[3] == "(1 row)"
        else { return nil }
        return lines[2].trimmingCharacters(in: .whitespaces)
    }

    private static func paths() throws -> [String] {
        let root = PackagedProgram.repository.appendingPathComponent("docs")
        let docs = try #require(FileManager.default.enumerator(atPath: root.path))
        return ["README.md", "CONTRIBUTING.md"]
            + docs.compactMap { $0 as? String }.filter { $0.hasSuffix(".md") }.map { "docs/\($0)" }
    }

    @Test func `no page is forgotten, and each exception is one`() throws {
        var found = 0
        for path in try Self.paths() {
            let blocks = try Self.blocks(path).map(\.text) + Self.statements(path)
            found += blocks.count
            let page = Self.pages.first { $0.path == path }
            #expect(blocks.isEmpty || page != nil || Self.followed[path] != nil, "nothing runs what \(path) prints")
            for (part, reason) in page?.elsewhere ?? [:] {
                #expect(blocks.contains { $0.contains(part) }, "\(path) has no \(part), which needs \(reason)")
            }
        }
        #expect(found > 150, "the pattern finds them: \(found)")
    }

    /// Whoever writes NAME or … leaves to the reader what stands there; the words around it are ours.
    @Test func `each command in the text is one of ours, with its options`() throws {
        var found = 0
        for path in try Self.paths() {
            for command in try PrintedBlock.inline(ofPage: path) where command.hasPrefix("tokenkeeperd ") {
                found += 1
                var type: any ParsableCommand.Type = Tokenkeeperd.self
                for word in command.split(separator: " ").dropFirst().map(String.init) {
                    if let next = type.configuration.subcommands.first(where: { $0._commandName == word }) {
                        type = next
                    } else if word.hasPrefix("--"), !["--all", "--on"].contains(word) {
                        let help = Tokenkeeperd.helpMessage(for: type, columns: 200)
                        #expect(help.contains("\(word)"), "\(path): \(command)")
                    } else {
                        let isOurs =
                            type.configuration.subcommands.isEmpty || word.contains(#/^(--(all|on)|[A-Z…].*)$/#)
                        #expect(isOurs, "\(path): \(command): no command \(word)")
                    }
                }
            }
        }
        #expect(found > 80, "the pattern finds them: \(found)")
    }

    @Test func `a block ends where it ends, without its indentation`() {
        let page = """
            1. Do this:

               ```sh
               echo <<'END'
                 two
               END
               ```
               ```sql
               SELECT 1;
               ```
            ```
            plain
            ```
            """
        #expect(
            PrintedBlock.all(in: page) == [
                PrintedBlock(language: "sh", text: "echo <<'END'\n  two\nEND"),
                PrintedBlock(language: "sql", text: "SELECT 1;"), PrintedBlock(language: "", text: "plain"),
            ])
    }
}
