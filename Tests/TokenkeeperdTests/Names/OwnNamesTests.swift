import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

/// The daemon and its commands resolve only their own names and PostgreSQL's, whatever others create in the schemas of a login's path.
@Suite(.ownThread) struct `Only our own names` {
    /// A database in a server of its own, whose log has every statement. Its login `everyone` may do all that the roles may do.
    private struct Stage {
        let database: TestDatabase

        init() throws {
            let cluster = try TestCluster.prepared()
            database = try cluster.database()
            try database.psql(
                """
                CREATE ROLE everyone LOGIN IN ROLE tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;
                CREATE SCHEMA shop AUTHORIZATION everyone; GRANT USAGE ON SCHEMA shop TO owner;
                GRANT CREATE ON SCHEMA public TO PUBLIC
                """, user: "postgres")
            try database.psql("ALTER SYSTEM SET log_line_prefix = '%p,%a,%d,'", user: "postgres")
            try database.psql("ALTER SYSTEM SET log_statement = 'all'", user: "postgres")
            try database.psql("SELECT pg_reload_conf()", user: "postgres")
            try eventually("statements are logged") {
                try database.psql("SELECT 'seen'", user: "postgres")
                return try Self.log(of: cluster).contains("SELECT 'seen'")
            }
        }

        static func log(of cluster: TestCluster) throws -> String {
            try String(contentsOfFile: cluster.folder + "/log", encoding: .utf8)
        }

        var log: String { get throws { try Self.log(of: database.cluster) } }

        /// Runs the daemon and the commands, with work for each.
        ///
        /// - Parameter isOver: Whether the test has failed, so that nothing is waited for.
        func work(unless isOver: () throws -> Bool = { false }) throws {
            try database.psql(
                """
                CREATE TABLE shop.device (id int8 PRIMARY KEY, push_token text, seen_at timestamptz);
                CREATE INDEX ON shop.device (push_token);
                INSERT INTO shop.device VALUES (1, 'ab01', '2026-01-01Z'), (2, 'not hex', '2026-01-01Z')
                """, user: "everyone")
            let stage = try SendingStage(on: database.cluster)
            let files = try TemporaryDirectory()
            let rows = files.path + "/tokens.csv"
            try "token\nab02\nbad\n".write(toFile: rows, atomically: true, encoding: .utf8)
            let port = try TestCluster.freePort()
            let daemon = try DaemonProcess(
                database.url(user: "everyone"),
                settings: stage.servers + stage.key + ["metrics.listen=127.0.0.1:\(port)", "sweep.interval=1h"],
                environment: ["RUNTIME_DIRECTORY": stage.runtime.path])
            /// - Parameter status: Nil if it depends on what the daemon has done by now.
            func run(_ arguments: String..., status: Int32? = 0, as user: String = "everyone") throws {
                let done = try ProgramRun(
                    [DaemonProcess.program] + arguments,
                    environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)])
                #expect(status.map { $0 == done.status } ?? (0...2 ~= done.status), "\(arguments): \(done)")
            }
            try run("migrate", as: "owner")
            try run("grants", as: "owner")
            try run(
                "attach", "shop.device", "--token", "push_token", "--topic", "'com.example.app'", "--registered-at",
                "seen_at",
                "--backfill")
            try run("import", rows, "--format", "csv", "--topic", "com.example.app", status: 1)
            try database.psql(
                """
                SELECT tokenkeeper.register('ab03', 'com.example.app');
                INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('com.example.app', 'ab03', 410, NULL), ('com.example.app', 'x', 410, NULL);
                INSERT INTO tokenkeeper.registration (topic, token) VALUES ('com.example.app', 'ab04'), ('com.example.app', 'y');
                INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.app', 'ab03', '{"aps":{"alert":"a"}}');
                SELECT tokenkeeper.enqueue('{"aps":{"alert":"b"}}', 'com.example.app', tokens => '{ab03}')
                """, user: "everyone")
            try eventually("the queues are empty") {
                if try isOver() { return true }
                let left = try database.psql(
                    "TABLE tokenkeeper.send_result; TABLE tokenkeeper.registration; TABLE tokenkeeper.send_request",
                    user: "postgres")
                return left.isEmpty
            }
            for page in ["/", "/metrics", "/ready"] {
                try eventually("it serves \(page)") {
                    try PlainClient.get(page, port).hasPrefix("HTTP/1.1 200 ") || isOver()
                }
            }
            try run("status")
            try run("status", "--json")
            try run("attachments")
            try run("held", "list")
            try run("rejected", "list")
            try run("rejected", "requeue", "--all")
            try run("explain", "ab03abcd00")
            try run("explain", "ab03abcd00", "--json")
            try run("explain", "--device", "d")
            try run("campaign", "list")
            try run("campaign", "show", "1")
            try run("campaign", "rate", "1", "10", status: nil)
            for command in ["pause", "resume", "cancel"] { try run("campaign", command, "1", status: nil) }
            try run("held", "release", "--topic", "com.example.app")
            try run("held", "discard", "--topic", "com.example.app")
            try run("rejected", "discard", "--all")
            try run("rejected", "discard", "--all", "--registrations")
            try run("backfill", "shop.device", status: nil)
            try run("reinstate", "--topic", "com.example.app", "--since", "2026-01-01")
            try run("sweep", "--dry-run")
            try run("sweep")
            try eventually("a sweep has run") {
                try database.psql("SELECT outcome FROM tokenkeeper.sweep_run", user: "postgres").contains("finished")
                    || isOver()
            }
            try run("withdraw")
            try run("withdraw", "2", status: nil)
            try run("check-config", "--online")
            try run("doctor", status: 1)
            try run("detach", "shop.device")
            try run("migrate", "--dry-run", as: "owner")
            #expect(daemon.stop() == 0, "\(daemon.logged)")
            #expect(!daemon.logged.contains("error="), "\(daemon.logged)")
        }
    }

    @Test func `hostile functions, operators and casts in the schemas of the path are executed by nobody`() throws {
        let stage = try Stage()
        try stage.database.psql(
            "CREATE SCHEMA everyone; CREATE SCHEMA owner; GRANT USAGE ON SCHEMA everyone, owner TO PUBLIC",
            user: "postgres")
        for schema in ["public", "everyone", "owner"] { try HostileNames.create(in: schema, of: stage.database) }
        func traps() throws -> [Substring] {
            try stage.log.split(separator: "\n").filter { $0.contains("LOG:  " + HostileNames.mark) }
        }
        #expect(try traps() == [])
        // They work.
        try stage.database.psql("SELECT cardinality('{a}'::text[])", user: "a_sender")
        try stage.database.psql("SELECT 1 WHERE 'pg_class'::regclass = 1::oid", user: "everyone")
        #expect(try traps().count == 2)
        try stage.work { try traps().count > 2 }
        let hit = try traps().dropFirst(2)
        #expect(hit.isEmpty, "\(hit.prefix(5))")
    }

    @Test func `no statement runs outside a transaction that begins with the path`() throws {
        let stage = try Stage()
        try stage.work()
        var open: Set<Substring> = []
        var transactions = 0
        for entry in Self.entries(try stage.log)
        where entry.application == "tokenkeeperd" && entry.database == stage.database.name {
            guard let statement = entry.statement else { continue }
            let lines = statement.split(separator: "\n").map { $0.drop { $0 == "\t" } }
            if open.contains(entry.process) {
                if lines[0] == "COMMIT" || lines[0] == "ROLLBACK" { open.remove(entry.process) }
                continue
            }
            transactions += 1
            let begins = lines[0].hasPrefix("BEGIN")
            #expect(
                lines.dropFirst(begins ? 1 : 0).first == "SET LOCAL search_path = pg_catalog, pg_temp;", "\(statement)")
            if begins || lines.contains(where: { $0.hasPrefix("BEGIN") }) { open.insert(entry.process) }
        }
        #expect(transactions > 100, "\(transactions)")
    }

    private struct Entry {
        var process: Substring
        var application: Substring
        var database: Substring
        /// Nil for a message of another kind.
        var statement: Substring?
    }

    /// The lines of a server's log. A line that begins with a tab continues the one before.
    private static func entries(_ log: String) -> [Entry] {
        log.replacing("\n\t", with: "\r\t").split(separator: "\n").compactMap { line in
            let parts = line.split(separator: ",", maxSplits: 3, omittingEmptySubsequences: false)
            guard parts.count == 4 else { return nil }
            let text = parts[3].replacing("\r\t", with: "\n\t")
            let statement = text.firstMatch(of: #/^LOG:  (?:statement|execute <unnamed>): (?<text>(?s:.*))$/#)
            return Entry(
                process: parts[0], application: parts[1], database: parts[2], statement: statement?.output.text)
        }
    }

    @Test func `what is sent outside a transaction gets one, and its first statement sets the path`() throws {
        let database = try TestCluster.shared.database()
        var connection = try Connection(to: DatabaseAddress(database.url(user: "owner")))
        for _ in 1...2 {
            #expect(
                try connection.query("SELECT current_setting('search_path')").value(String.self)
                    == "pg_catalog, pg_temp")
            #expect(
                try connection.run("SELECT current_setting('search_path')").value(String.self) == "pg_catalog, pg_temp")
            let within = try connection.transaction(.command) { connection throws(DatabaseError) in
                try connection.query("SELECT current_setting('search_path')").value(String.self)
            }
            #expect(within == "pg_catalog, pg_temp")
            #expect(throws: DatabaseError.self) { _ = try connection.query("SELECT 1 / 0").count }
        }
        #expect(try connection.run("SELECT pg_current_xact_id_if_assigned()::text").value(String?.self) == nil)
        _ = try connection.query("CREATE TABLE tokenkeeper.mine (n integer)").count
        _ = try connection.query("INSERT INTO tokenkeeper.mine VALUES ($1)", [.int4(7)]).count
        #expect(try database.psql("SELECT n FROM tokenkeeper.mine") == "7", "it is committed")
    }
}
