import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

/// What the documents, warnings and log messages print for copying works for the role that they name.
@Suite(.ownThread) struct `Commands to copy` {
    private static let root = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
        .appendingPathComponent("../../..").standardized

    private static func text(_ path: String) throws -> String {
        try String(contentsOf: root.appendingPathComponent(path), encoding: .utf8)
    }

    // MARK: - Pages

    /// The blocks of a page in one language.
    private static func blocks(of language: String, in page: String) throws -> [String] {
        try PrintedBlock.all(ofPage: page).filter { $0.language == language }.map(\.text)
    }

    /// A statement without psql's own syntax, and with a whole token for an abbreviated one.
    private static func runnable(_ sql: String) -> String {
        sql.replacingOccurrences(of: #" \gx"#, with: ";").replacing(#/'([0-9A-Fa-f]{4})…'/#) { "'\($0.output.1)'" }
    }

    /// A page, the role that it names, and the statements that are about the reader's own tables or programs.
    private static let pages: [(page: String, role: String, skips: [String])] = [
        ("docs/how-to/monitor-with-sql.md", "a_reader", []),
        ("docs/how-to/monitor-with-sql.md", "a_operator", []),
        ("docs/how-to/ask-before-sending.md", "a_operator", ["sendable(", "sendable_token"]),
        ("docs/how-to/ask-before-sending.md", "a_sender", ["topic_policy", "result_stat"]),
        ("docs/how-to/report-results.md", "a_operator", ["INSERT", "\\copy", "report("]),
        ("docs/how-to/recover-from-a-bad-sender.md", "a_operator", []),
        ("docs/how-to/erase-a-person.md", "a_operator", []), ("docs/how-to/erase-a-person.md", "a_app", []),
        ("docs/how-to/prune-old-tokens.md", "a_operator", ["my_devices"]),
        ("docs/how-to/report-results.md", "a_sender", ["\\copy", "result_stat", "rejected_result"]),
        ("docs/how-to/report-results.md", "a_reader", ["INSERT", "\\copy", "report(", "UPDATE"]),
        (
            "docs/how-to/register-devices.md", "a_reader",
            ["register(", "tag(", "tokenkeeper.registration"]
        ),
        ("docs/how-to/register-devices.md", "a_app", ["\\copy", "tokenkeeper.token ", "tagged_tokens("]),
        ("docs/how-to/send-with-the-daemon.md", "a_operator", ["enqueue"]),
        ("docs/how-to/incidents.md", "a_operator", ["enqueue"]), ("docs/troubleshooting.md", "a_operator", []),
        ("docs/troubleshooting.md", "a_sender", []),
        ("docs/how-to/back-up-and-restore.md", "a_operator", ["CREATE PUBLICATION"]),
    ]

    @Test(arguments: pages)
    func `the SQL of a page works for the role that the page names`(page: String, role: String, skips: [String]) throws
    {
        let database = try TestCluster.shared.database()
        let blocks = try Self.blocks(of: "sql", in: page).filter { block in !skips.contains(where: block.contains) }
        #expect(!blocks.isEmpty, "\(page)")
        try database.psql(
            "SELECT tokenkeeper.ensure_topic(e, 'com.example.app') FROM unnest('{production,sandbox}'::text[]) AS e")
        for block in blocks where block.contains("tokenkeeper.") {
            do {
                try database.psql(Self.runnable(block), user: role)
            } catch {
                Issue.record("\(page), as \(role): \(block): \(error)")
            }
        }
    }

    /// The table `my_devices` of the documentation, and what the ledger knows of its tokens.
    private static let ownTable = """
        CREATE TABLE my_devices (id bigserial PRIMARY KEY, push_token text, bundle_id text, is_sandbox boolean, last_seen timestamptz, dead_since timestamptz);
        GRANT SELECT, UPDATE, DELETE ON my_devices TO a_sender;
        INSERT INTO my_devices (push_token, bundle_id, is_sandbox, last_seen) VALUES
            ('AA', 'com.example.app', false, '2026-01-01Z'), ('<aa>', 'com.example.app', false, '2026-01-01Z'),
            ('aa', 'com.example.other', false, '2026-01-01Z'), ('aa', 'com.example.app', true, '2026-01-01Z'),
            ('aa', 'com.example.app', false, '2026-03-01Z'), ('bb', 'com.example.app', false, '2026-01-01Z'),
            ('cc', 'com.example.app', false, '2026-01-01Z'), ('dd', 'com.example.app', false, '2026-01-01Z'),
            ('ee', 'com.example.app', false, '2026-01-01Z'), ('no token', 'com.example.app', false, '2026-01-01Z'), (NULL, NULL, NULL, NULL);
        SELECT tokenkeeper.register(t, 'com.example.app', registered_at => '2026-01-01Z', device_id => d)
        FROM (VALUES ('aa', 'a'), ('bb', 'b'), ('cc', 'c'), ('dd', 'd'), ('ee', 'e')) AS v (t, d);
        SELECT tokenkeeper.unregister('bb', 'com.example.app', at => '2026-02-01Z'),
               tokenkeeper.register('ff', 'com.example.app', registered_at => '2026-02-01Z', device_id => 'd');
        UPDATE tokenkeeper.ledger SET stale_at = '2026-02-01Z' WHERE token_key = '\\xaa';
        UPDATE tokenkeeper.ledger SET suspect_at = '2026-02-01Z' WHERE token_key = '\\xcc';
        UPDATE tokenkeeper.ledger SET stale_at = now() - interval '29 days' WHERE token_key = '\\xee';
        SELECT tokenkeeper.recompute_tokens();
        """

    @Test(arguments: ["DELETE FROM my_devices", "UPDATE my_devices"])
    func `the statement that cleans a provider's table leaves every other device alone`(statement: String) throws {
        let database = try TestCluster.shared.database()
        try database.psql(Self.ownTable)
        let block = try #require(
            Self.blocks(of: "sql", in: "docs/how-to/prune-old-tokens.md").first { $0.contains(statement) })
        // A device that registers while the statement waits for its row.
        var device = try database.connect()
        try device.execute("BEGIN; UPDATE my_devices SET last_seen = now() WHERE push_token = 'AA'")
        var sender = try database.connect(user: "a_sender")
        try sender.execute("SET lock_timeout = '20ms'")
        #expect(throws: DatabaseError.self, "it waits") { try sender.execute(block) }
        let done = DispatchGroup()
        done.enter()
        Thread.detachNewThread {
            _ = try? database.psql(block, user: "a_sender")
            done.leave()
        }
        try eventually("it waits for the row") {
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
                user: "postgres") == "1"
        }
        try device.execute("COMMIT")
        done.wait()
        try database.psql(block, user: "a_sender")
        let gone =
            "SELECT string_agg(push_token, ' ' ORDER BY id) FROM my_devices WHERE dead_since IS NULL AND push_token <> ''"
        #expect(try database.psql(gone) == "AA aa aa aa bb cc dd ee no token")
    }

    @Test func `a provider can attach a table as the page says`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("CREATE SCHEMA shop AUTHORIZATION a_app", user: "postgres")
        try database.psql(
            """
            CREATE TABLE shop.devices (id bigint PRIMARY KEY, push_token text, app text, platform text, is_dev boolean, last_seen timestamp,
                device_uuid uuid, owner_type text, owner_id bigint, topics text, logged_out_at timestamptz);
            CREATE INDEX ON shop.devices (push_token);
            INSERT INTO shop.devices VALUES (1, 'aa', 'rider', 'android', false, now(), NULL, 'user', 5, 'news', NULL)
            """, user: "a_app")
        // The first block grants the rights, to a role of the reader's.
        let blocks = try Self.blocks(of: "sql", in: "docs/how-to/attach-a-table.md").dropFirst()
        let attach = try #require(blocks.first { $0.contains("dry_run       => true") })
        for (block, answer) in [
            (attach, "row|row 1: left out by the filter"),
            (attach.replacing(#/,\s+dry_run +=> true/#, with: ""), "attached|shop.devices is attached as source 1"),
        ] { #expect(try database.psql(block, user: "a_app") == answer) }
        try database.psql(
            "INSERT INTO shop.devices VALUES (2, '<AABB>', 'rider', 'ios', true, '2026-07-01 12:00', NULL, 'admin', 7, 'a,b', NULL)",
            user: "a_app")
        #expect(
            try database.psql(
                "SELECT environment, topic, token, registered_at AT TIME ZONE 'UTC', user_id, tags FROM tokenkeeper.registration"
            ) == "sandbox|com.example.rider|aabb|2026-07-01 10:00:00|admin:7|{a,b}")
        for block in blocks where block != attach { try database.psql(block, user: "a_app") }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.attachment") == "0", "the last block detaches it")
    }

    @Test func `senders can enqueue as the page says`() throws {
        let database = try TestCluster.shared.database()
        let block = try #require(
            Self.blocks(of: "sql", in: "docs/how-to/send-with-the-daemon.md").first { $0.contains("enqueue") })
        try database.psql("INSERT INTO tokenkeeper.topic_policy (topic) VALUES ('com.example.app')", user: "a_operator")
        try database.psql("SET client_min_messages = warning; " + Self.runnable(block), user: "a_sender")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_request") == "1")
        #expect(try database.psql("SELECT audience FROM tokenkeeper.campaign_progress") == "tags: World && !muted")
    }

    @Test func `what a limit kept from a campaign's devices can be sent as the page says`() throws {
        let database = try TestCluster.shared.database()
        let block = try #require(
            Self.blocks(of: "sql", in: "docs/how-to/incidents.md").first { $0.contains("enqueue") })
        let login = "a_resender_\(database.name)"
        try database.psql(
            "CREATE ROLE \(login) LOGIN IN ROLE tokenkeeper_sender, tokenkeeper_reader", user: "postgres")
        try database.psql(
            "SELECT tokenkeeper.register(t, 'com.example.app', tags => '{World}') FROM unnest('{aa,bb}'::text[]) AS t",
            user: "a_app")
        let campaign = try database.psql(
            """
            SET client_min_messages = warning;
            SELECT tokenkeeper.enqueue('{"aps":{"alert":"Late"}}', 'com.example.app', tags => 'World', collapse_id => 'late',
                                       name => 'Late')
            """, user: "a_sender")
        try database.psql(
            """
            INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, push_type, queued_at, campaign_id, campaign_number)
            SELECT 'production', 'com.example.app', t, tokenkeeper.token_key(t), s, s, 'alert', now(), \(campaign), n
            FROM unnest('{aa,bb,cc}'::text[], '{alerts,alerts,stale}'::text[]) WITH ORDINALITY AS f (t, s, n)
            """, user: "postgres")
        #expect(block.contains("campaign_id = 17"))
        let again = try database.psql(
            "SET client_min_messages = warning; " + block.replacing("= 17", with: "= \(campaign)"), user: login)
        #expect(
            try database.psql(
                """
                SELECT c.name, c.collapse_id, c.push_type, c.payload, c.expiration > now(), string_agg(t.token, ' ' ORDER BY t.token)
                FROM tokenkeeper.campaign AS c JOIN tokenkeeper.campaign_token AS t USING (campaign_id)
                WHERE c.campaign_id = \(again) GROUP BY c.campaign_id
                """) == #"Late, again|late|alert|{"aps": {"alert": "Late"}}|t|aa bb"#)
        try database.psql("DROP OWNED BY \(login); DROP ROLE \(login)", user: "postgres")
    }

    // MARK: - Warnings and log messages

    /// The commands in messages, with the roles that may run them: the least of reader, operator and owner.
    private static let printed: [(command: String, role: String, isRefusedTo: String?)] = [
        ("tokenkeeperd status", "a_reader", "a_sender"), ("tokenkeeperd doctor", "a_reader", nil),
        ("tokenkeeperd held list", "a_reader", "a_sender"), ("tokenkeeperd topic list", "a_reader", "a_sender"),
        ("tokenkeeperd rejected list", "a_reader", "a_sender"),
        ("tokenkeeperd attachments", "a_reader", "a_sender"), ("tokenkeeperd withdraw", "a_reader", "a_sender"),
        ("tokenkeeperd campaign list", "a_reader", "a_app"),
        ("tokenkeeperd send --topic t --to abcdef0123456789 --alert A --dry-run", "a_sender", "a_reader"),
        ("tokenkeeperd uninstall --dry-run", "a_reader", nil),
        ("tokenkeeperd sweep --dry-run", "a_operator", "a_reader"),
        ("tokenkeeperd sweep --force", "a_operator", "a_reader"),
        ("tokenkeeperd migrate", "owner", nil), ("tokenkeeperd grants", "owner", "a_operator"),
        ("tokenkeeperd migrate --dry-run", "owner", nil), ("tokenkeeperd check-config", "a_reader", nil),
        ("tokenkeeperd explain abcdef0123456789", "a_reader", "a_sender"),
        ("tokenkeeperd held discard --topic t --environment production --cause suspect", "a_operator", "a_reader"),
        ("tokenkeeperd held release --topic t --environment production --cause suspect", "a_operator", "a_reader"),
        (
            "tokenkeeperd held discard --topic t --environment production --cause unregistered_by_app", "a_operator",
            "a_reader"
        ),
        (
            "tokenkeeperd held release --topic t --environment production --cause unregistered_by_app", "a_operator",
            "a_reader"
        ),
        (
            "tokenkeeperd reinstate --cause unregistered_by_app --topic t --environment production --since 2026-01-01",
            "a_operator", "a_reader"
        ),
        ("tokenkeeperd rejected requeue --all", "a_operator", "a_reader"),
        ("tokenkeeperd rejected discard --all", "a_operator", "a_reader"),
        ("tokenkeeperd reinstate --topic t --environment production --since 2026-01-01", "a_operator", "a_reader"),
        (
            "tokenkeeperd reinstate --topic t --environment production --since 2026-01-01 --dry-run", "a_operator",
            "a_reader"
        ),
    ]

    @Test func `each command works for its role, and is refused to others with a sentence`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('abcdef0123456789', 't')", user: "a_app")
        let daemon = try database.daemon()
        for (command, role, stranger) in Self.printed {
            let words = command.split(separator: " ").dropFirst().map(String.init)
            func run(_ user: String) throws -> ProgramRun {
                try ProgramRun(
                    [DaemonProcess.program] + words, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)]
                )
            }
            let done = try run(role)
            // The doctor may find something in a cluster that other tests use.
            #expect(done.status == 0 || (words[0] == "doctor" && done.status == 1), "\(command), as \(role): \(done)")
            // Whoever may act may also look.
            if role == "a_reader", words[0] != "doctor" { #expect(try run("a_operator").status == 0, "\(command)") }
            if let stranger {
                let refused = try run(stranger)
                #expect(
                    refused.status == 69 && refused.errors.contains("this role lacks rights"),
                    "\(command), as \(stranger): \(refused)")
            }
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `the SQL that a warning prints works for an operator`() throws {
        let database = try TestCluster.shared.database()
        let topic = "it's\"odd\"\\topic"
        try database.psql("SELECT tokenkeeper.ensure_topic('sandbox', 'it''s\"odd\"\\topic')")
        try database.psql(
            "SELECT tokenkeeper.pause_sending('it''s\"odd\"\\topic', 'sandbox', 'a reason')", user: "a_operator")
        let status = try database.command("status", as: "a_reader").output
        let line = try #require(status.split(separator: "\n").first { $0.contains(topic) }, "\(status)")
        let sql = try #require(line.firstMatch(of: #/run: `(SELECT .*)`$/#)?.output.1)
        #expect(try database.psql(String(sql), user: "a_operator") == "t")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.paused_topic", user: "a_reader") == "0")
    }

    @Test func `a topic with backticks becomes no command in a warning`() throws {
        let database = try TestCluster.shared.database()
        let topic = "a`touch$IFS/tmp/x`$(b)'c"
        let quoted = "'" + topic.replacingOccurrences(of: "'", with: "''") + "'"
        try database.psql(
            """
            SELECT tokenkeeper.ensure_topic('sandbox', \(quoted));
            SELECT tokenkeeper.pause_sending(\(quoted), 'sandbox', 'APNs says `tokenkeeperd sweep --force`');
            SELECT tokenkeeper.register(md5(i::text), \(quoted), registered_at => now() - interval '2 days') FROM generate_series(1, 500) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            SELECT \(quoted), md5(i::text), 400, '{"reason":"BadDeviceToken"}', now() FROM generate_series(1, 400) AS i;
            """, user: "postgres")
        let daemon = try database.daemon()
        try eventually("the guard has tripped") {
            try database.psql("SELECT tripped FROM tokenkeeper.guard", user: "postgres") == "t"
        }
        let status = try database.command("status", as: "a_reader").output
        #expect(status.contains("the mass-failure guard of a'touch$IFS/tmp/x'$(b)'c (production) tripped"), "\(status)")
        #expect(status.contains("run: tokenkeeper.resume_sending\n"))
        let marked = Set(
            status.split(separator: "`", omittingEmptySubsequences: false).enumerated().filter { $0.offset % 2 == 1 }
                .map(\.element))
        #expect(marked == ["tokenkeeperd held list"], "\(status)")
        for text in [
            try database.command("held", "list", as: "a_reader").output,
            try database.psql("SELECT undo FROM tokenkeeper.guard", user: "a_reader"),
        ] {
            #expect(text.contains(#"'a`touch$IFS/tmp/x`$(b)'"'"'c'"#), "\(text)")
        }
        #expect(daemon.stop() == 0)
    }

    /// A message that prints a command which is not in the table has not been tried.
    @Test func `every command in a message is in the table`() throws {
        var found: Set<String> = []
        for folder in ["Sources", "migrations"] {
            let files = try #require(
                FileManager.default.enumerator(atPath: Self.root.appendingPathComponent(folder).path))
            for case let file as String in files
            where file.hasSuffix(".swift") || (file.hasSuffix(".sql") && !file.hasPrefix("versions/")) {
                for line in try Self.text("\(folder)/\(file)").split(separator: "\n") {
                    let code = line.drop { $0 == " " }
                    if code.hasPrefix("//") || code.hasPrefix("--") { continue }
                    for match in code.matches(of: #/`(tokenkeeperd [a-z][^`\\]*)`/#) {
                        found.insert(String(match.output.1))
                    }
                    for match in code.matches(of: #/"(tokenkeeperd [a-z-]+[^"\\,]*)"/#) {
                        found.insert(String(match.output.1))
                    }
                }
            }
        }
        #expect(found.count > 6 && found.contains("tokenkeeperd held list"), "the pattern finds them: \(found)")
        // Help needs no role. The first words of a command are named where the whole is in the text around.
        let tried = Set(Self.printed.map(\.command)).union([
            "tokenkeeperd backfill", "tokenkeeperd withdraw",
            "tokenkeeperd reinstate", "tokenkeeperd status --check", "tokenkeeperd check-config --online",
            "tokenkeeperd map", "tokenkeeperd campaign resume ' || c.campaign_id || '",
        ])
        let untried = found.filter { !$0.hasSuffix(" --help") && !$0.hasPrefix("tokenkeeperd status, ") }.subtracting(
            tried)
        #expect(untried.isEmpty, "\(untried.sorted())")
    }
}
