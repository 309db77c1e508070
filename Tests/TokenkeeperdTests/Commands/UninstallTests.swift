import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `Uninstalling` {
    /// A cluster of its own: roles belong to all of its databases.
    private func stage() throws -> TestDatabase {
        let cluster = try TestCluster.prepared()
        let database = try cluster.database()
        var admin = try cluster.connect(database: "postgres")
        try admin.run("DROP DATABASE template")
        try database.psql(
            """
            CREATE SCHEMA shop AUTHORIZATION a_app;
            CREATE VIEW public.mine AS SELECT topic FROM tokenkeeper.topic;
            CREATE PUBLICATION queue FOR TABLE tokenkeeper.send_result;
            """, user: "postgres")
        try database.psql(
            """
            CREATE TABLE shop.devices (id bigint PRIMARY KEY, push_token text);
            CREATE INDEX ON shop.devices (push_token);
            SELECT tokenkeeper.attach('shop.devices', token => 'push_token', topic => '''t''');
            INSERT INTO shop.devices VALUES (1, 'aa');
            """, user: "a_app")
        return database
    }

    private func run(_ arguments: String..., on database: TestDatabase) throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program, "uninstall"] + arguments,
            environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_monitor")])
    }

    @Test func `a dry run lists what others have, too, and changes nothing`() throws {
        let database = try stage()
        let list = try run("--dry-run", on: database)
        #expect(list.status == 0 && list.output.hasPrefix("database \(database.name) on "), "\(list)")
        for part in [
            "trigger      tokenkeeper_insert_1  on shop.devices", "function     shop.tokenkeeper_insert_1()",
            "schema       tokenkeeper  of owner, with ", "table        tokenkeeper.registration  ",
            "smaller tables, ", "dependent    view public.mine", "publication  queue  loses tokenkeeper.send_result",
            "role         tokenkeeper_reader", "nothing has been changed",
        ] { #expect(list.output.contains(part), "\(part): \(list)") }
        let json = try #require(
            try JSONSerialization.jsonObject(with: Data(try run("--dry-run", "--json", on: database).output.utf8))
                as? [[String: Any]])
        #expect(json.filter { $0["kind"] as? String == "table" }.count > 40, "all tables")
        #expect(json.allSatisfy { $0["kind"] as? String != "table" || $0["bytes"] is Int })
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "1")
        #expect(try run(on: database).status == 64 && run("--print", "--json", on: database).status == 64)
    }

    @Test func `the printed SQL removes it all, in this database only`() throws {
        let database = try stage()
        let script = try run("--print", on: database).output
        func psql(_ database: TestDatabase) throws -> ProgramRun {
            try ProgramRun(["psql", "-XAtq", "-d", database.url(user: "postgres"), "-f", "-"], input: script)
        }
        let other = try database.cluster.database(migrated: false)
        #expect(try psql(other).errors.contains("division by zero"), "it is for the other database")
        // Another database whose tables grant rights to a role keeps it.
        try other.psql("CREATE TABLE t (); GRANT SELECT ON t TO tokenkeeper_reader", user: "postgres")
        let kept = try run("--dry-run", on: database).output
        #expect(
            kept.contains(
                "would keep:\n  role         tokenkeeper_reader  stays: the database \(other.name) has it, too"),
            "\(kept)")
        #expect(try !run("--print", on: database).output.contains("tokenkeeper_reader"))
        try other.psql("DROP TABLE t", user: "postgres")
        let removed = try psql(database)
        #expect(removed.status == 0 && !removed.errors.contains("ERROR"), "\(removed)")
        let left = """
            SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'tokenkeeper'),
                   (SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tokenkeeper%'),
                   (SELECT count(*) FROM pg_proc WHERE proname LIKE 'tokenkeeper%'),
                   (SELECT count(*) FROM pg_class WHERE relname = 'mine'),
                   (SELECT count(*) FROM pg_roles WHERE rolname LIKE 'tokenkeeper%'),
                   (SELECT push_token FROM shop.devices)
            """
        #expect(try database.psql(left, user: "postgres") == "0|0|0|0|0|aa")
        #expect(try run("--dry-run", on: database).output == "-- this database has nothing of tokenkeeperd\n")
    }

    @Test func `sizes are short`() {
        #expect(Uninstall.size(0) == "0 kB" && Uninstall.size(8192) == "8 kB" && Uninstall.size(34 << 20) == "34 MB")
    }
}
