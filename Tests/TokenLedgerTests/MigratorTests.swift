import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

private let v1 = Version(major: 0, minor: 1, patch: 0)
private let v2 = Version(major: 0, minor: 2, patch: 0)
private let v3 = Version(major: 0, minor: 3, patch: 0)

/// The files of a later release: with more versions, and with each of these texts replaced in functions and views.
private func later(_ versions: [Migration] = [], replacing changes: [(old: String, new: String)] = []) -> SchemaFiles {
    var files = SchemaFiles.embedded
    files.versions += versions
    for (old, new) in changes {
        #expect(files.repeatables.contains { $0.sql.contains(old) }, "there is nothing to replace: \(old)")
        files.repeatables = files.repeatables.map {
            Repeatable(file: $0.name, sql: $0.sql.replacingOccurrences(of: old, with: new))
        }
    }
    return files
}

private func version(_ file: String, _ sql: String, oldestDaemon: String = "0.1.0") -> Migration {
    Migration(file: file, sql: "-- oldest daemon: \(oldestDaemon)\n\(sql)\n")!
}

/// Everything that a migration can change, one line each, sorted.
private func catalog(_ connection: inout Connection) throws -> [String] {
    try connection.lines(
        """
        SELECT line FROM (
            SELECT concat_ws(' ', 'function', p.oid::regprocedure, md5(p.prosrc), p.proacl, obj_description(p.oid, 'pg_proc')) AS line
            FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace
            UNION ALL
            SELECT concat_ws(' ', 'relation', c.relname, c.relkind, c.reloptions, c.relacl, obj_description(c.oid, 'pg_class'))
            FROM pg_class AS c WHERE c.relnamespace = 'tokenkeeper'::regnamespace
            UNION ALL
            SELECT concat_ws(' ', 'column', a.attrelid::regclass, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attacl)
            FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND a.attnum > 0
            UNION ALL
            SELECT concat_ws(' ', 'view', v.viewname, md5(v.definition)) FROM pg_views AS v WHERE v.schemaname = 'tokenkeeper'
            UNION ALL
            SELECT concat_ws(' ', 'index', i.indexdef) FROM pg_indexes AS i WHERE i.schemaname = 'tokenkeeper'
            UNION ALL
            SELECT concat_ws(' ', 'version', m.version, m.name, m.checksum, m.oldest_daemon) FROM tokenkeeper.migration AS m
            UNION ALL
            SELECT concat_ws(' ', 'repeatable', r.name, r.checksum, r.release) FROM tokenkeeper.repeatable AS r) AS c
        ORDER BY line COLLATE "C"
        """, columns: 1)
}

@Suite(.ownThread) struct `Migrations` {
    @Test func `of two migrators at once, one waits and finds nothing left to do`() async throws {
        let database = try TestCluster.shared.database(migrated: false)
        let applied = await withTaskGroup(of: [Int].self) { group in
            for _ in 1...4 {
                group.addTask {
                    var mine: [Int] = []
                    do {
                        var owner = try database.connect()
                        try Migrator(daemon: v1).migrate(&owner) { mine += $0.versions.map(\.version) }
                    } catch {
                        Issue.record(error)
                    }
                    return mine
                }
            }
            return await group.reduce(into: []) { $0 += $1 }
        }
        #expect(applied.sorted() == SchemaFiles.embedded.versions.map(\.version))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.migration") == "\(applied.count)")
    }

    @Test func `an edited version is refused, by migrate and by run`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        var edited = SchemaFiles.embedded
        edited.versions[1] = Migration(file: "0002_ledger.sql", sql: edited.versions[1].sql + "-- One more word.\n")!
        let migrator = Migrator(edited, daemon: v1)
        #expect(throws: SchemaError.edited(version: 2, name: "ledger")) { try migrator.migrate(&owner) { _ in } }
        #expect(throws: SchemaError.edited(version: 2, name: "ledger")) { try migrator.check(&owner) }
    }

    @Test func `a schema made by a version that was never released is refused in one sentence`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        var owner = try database.connect()
        try owner.execute(
            """
            CREATE SCHEMA tokenkeeper;
            CREATE TABLE tokenkeeper.migration (version integer PRIMARY KEY, name text, checksum text, oldest_daemon text);
            INSERT INTO tokenkeeper.migration VALUES (1, 'ledger', 'aa', '0.1.0'), (2, 'queue', 'bb', '0.1.0')
            """)
        #expect(throws: SchemaError.unreleased(version: 1, name: "ledger")) { try Migrator(daemon: v1).check(&owner) }
        let error = #expect(throws: SchemaError.self) { try Migrator(daemon: v1).migrate(&owner) { _ in } }
        #expect(error == .unreleased(version: 1, name: "ledger"))
        #expect(error?.description.hasPrefix("version 1 (ledger) of this database's schema is in no release") == true)
        #expect(error?.description.contains(". ") == false, "one sentence")
        // The right names without a record of functions do not belong to a release either.
        try owner.execute(
            "DELETE FROM tokenkeeper.migration; INSERT INTO tokenkeeper.migration VALUES (1, 'schema', 'aa', '0.1.0')")
        #expect(throws: SchemaError.unreleased(version: 1, name: "schema")) { try Migrator(daemon: v1).check(&owner) }
    }

    @Test func `a schema whose files were applied by psql, without a record, is refused in one sentence`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        var owner = try database.connect()
        try owner.execute(
            """
            CREATE SCHEMA tokenkeeper;
            CREATE TABLE tokenkeeper.migration (version integer PRIMARY KEY, name text, checksum text, oldest_daemon text);
            CREATE TABLE tokenkeeper.ledger (token text);
            """)
        for (drop, table) in [("", "ledger"), ("migration", "ledger"), ("ledger", nil)] {
            if drop != "" { try owner.execute("DROP TABLE tokenkeeper.\(drop)") }
            guard let table else { break }
            #expect(throws: SchemaError.unrecorded(table: table)) { try Migrator(daemon: v1).check(&owner) }
            #expect(throws: SchemaError.unrecorded(table: table)) { _ = try Migrator(daemon: v1).script(&owner) }
            let error = #expect(throws: SchemaError.self) { try Migrator(daemon: v1).migrate(&owner) { _ in } }
            #expect(error == .unrecorded(table: table))
            #expect(
                error?.description.hasPrefix("this database has the table tokenkeeper.\(table) but no record") == true)
            #expect(error?.description.contains(". ") == false, "one sentence")
        }
        // A schema with nothing of ours is as good as none.
        try owner.execute("CREATE TABLE tokenkeeper.notes_of_a_dba ()")
        try Migrator(daemon: v1).migrate(&owner) { _ in }
    }

    @Test func `a short statement_timeout of the database does not end the planning`() async throws {
        let database = try TestCluster.shared.database()
        try database.psql("ALTER DATABASE \(database.name) SET statement_timeout = '500ms'")
        var other = try database.connect()
        try other.execute("BEGIN; LOCK TABLE tokenkeeper.migration IN ACCESS EXCLUSIVE MODE")
        let planning = Task.detached {
            var owner = try database.connect()
            return try Migrator(daemon: v1).plan(&owner)
        }
        try eventually("it waits for longer than that", within: 20) {
            try database.psql(
                """
                SELECT count(*) FROM pg_locks
                WHERE NOT granted AND waitstart < clock_timestamp() - interval '1 second'
                  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                """) == "1"
        }
        try other.execute("COMMIT")
        #expect(try await planning.value.isEmpty)
    }

    @Test(arguments: ["send_result_3", "registration_3", "registration_retry"])
    func `functions and rights are applied beside a daemon that truncates a partition`(partition: String) async throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        try daemon.execute("BEGIN; TRUNCATE tokenkeeper.\(partition)")
        let migrating = Task.detached {
            var owner = try database.connect()
            try owner.execute("DELETE FROM tokenkeeper.repeatable")
            return try Migrator(daemon: v1).migrate(&owner) { _ in }
        }
        try eventually("the migrator waits") {
            try database.psql(
                """
                SELECT count(*) FROM pg_locks AS l WHERE NOT l.granted AND l.database IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
                """) != "0"
        }
        try daemon.execute("COMMIT")
        #expect(try await !migrating.value.isEmpty)
    }

    @Test func `a newer schema refuses only daemons that are too old for it`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let tolerant = version("0100_tolerant.sql", "CREATE TABLE tokenkeeper.more ();")
        let strict = version("0101_strict.sql", "DROP TABLE tokenkeeper.more;", oldestDaemon: "0.3.0")
        try Migrator(later([tolerant]), daemon: v3).migrate(&owner) { _ in }
        try Migrator(daemon: v1).check(&owner)
        try Migrator(later([tolerant, strict]), daemon: v3).migrate(&owner) { _ in }
        #expect(throws: SchemaError.daemonTooOld(needed: v3, this: v1)) { try Migrator(daemon: v1).check(&owner) }
        #expect(throws: SchemaError.daemonTooOld(needed: v3, this: v1)) {
            try Migrator(daemon: v1).migrate(&owner) { _ in }
        }
        try Migrator(daemon: Version(major: 0, minor: 10, patch: 0)).check(&owner)
    }

    @Test func `a version that fails leaves nothing behind, neither its own changes nor the functions`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let before = try catalog(&owner)
        let broken = version(
            "0100_broken.sql", "DROP FUNCTION tokenkeeper.forget(text); CREATE TABLE tokenkeeper.half (); SELECT 1 / 0;"
        )
        #expect(throws: DatabaseError.self) { try Migrator(later([broken]), daemon: v2).migrate(&owner) { _ in } }
        #expect(try catalog(&owner) == before)
        try Migrator(daemon: v1).check(&owner)
    }

    @Test func `a migration does not wait for long behind a lock of an application, and names it`() throws {
        let database = try TestCluster.shared.database()
        var idle = try database.connect()
        try idle.execute("BEGIN; SELECT 1")
        var app = try database.connect(user: "a_app")
        try app.execute(
            "SET application_name = 'shop'; BEGIN; SELECT tokenkeeper.register('aa', 't')")
        var owner = try database.connect()
        let altering = version("0100_alter.sql", "ALTER TABLE tokenkeeper.ledger ADD COLUMN more int;")
        let error = #expect(throws: DatabaseError.self) {
            try Migrator(later([altering]), daemon: v2).migrate(&owner) { _ in }
        }
        #expect(error?.sqlState == "55P03" && error?.remedy == .retry)
        let pid = try app.scalar("SELECT pg_backend_pid()") ?? ""
        #expect(
            error?.message.hasSuffix(
                "; nothing was changed, and `tokenkeeperd migrate` can be run again; these transactions may be in the way: "
                    + "pid \(pid), role a_app, application shop") == true, "\(error?.message ?? "")")
        // Those of its own role, and an administrator those of all, with the time.
        try app.execute("COMMIT")
        try app.execute("BEGIN; SELECT tokenkeeper.register('aa', 't')")
        var admin = try database.connect(user: "postgres")
        try SchemaOwner.assume("owner", on: &admin)
        let seen = #expect(throws: DatabaseError.self) {
            try Migrator(later([altering]), daemon: v2).migrate(&admin) { _ in }
        }
        #expect(seen?.message.contains("pid \(pid), role a_app, application shop, since 20") == true)
        #expect(try admin.scalar("SELECT current_user") == "owner")
        try app.execute("COMMIT")
        try Migrator(later([altering]), daemon: v2).migrate(&owner) { _ in }
    }

    @Test func `a migration does not wait for an application that only writes`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        var app = try database.connect()
        try app.execute(
            """
            BEGIN;
            INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('new', 'aa', 200);
            SELECT tokenkeeper.register('aa', 'new');
            DELETE FROM tokenkeeper.failed_send;
            """)
        let triggers =
            "SELECT string_agg(oid || ' ' || xmin, ',' ORDER BY oid) FROM pg_trigger WHERE tgrelid = 'tokenkeeper.topic'::regclass"
        let before = try owner.scalar(triggers)
        try Migrator(later(replacing: [("BEGIN\n", "BEGIN\n    -- Later.\n")]), daemon: v2).migrate(&owner) { _ in }
        #expect(try owner.scalar(triggers) == before, "they are the same")
        try app.execute("COMMIT")
        // A trigger that differs is replaced, and one that is missing is created.
        try owner.execute(
            """
            DROP TRIGGER note_policy ON tokenkeeper.topic;
            CREATE OR REPLACE TRIGGER reconsider_guard AFTER DELETE ON tokenkeeper.topic FOR EACH ROW EXECUTE FUNCTION tokenkeeper.reconsider_guard();
            """)
        try Migrator(daemon: v3).migrate(&owner) { _ in }
        #expect(
            try owner.lines(
                "SELECT tgname, tgtype & 16 FROM pg_trigger WHERE tgrelid = 'tokenkeeper.topic'::regclass ORDER BY 1",
                columns: 2)
                == ["check_topic|16", "note_policy|16", "reconsider_guard|16", "warn_of_no_topic|16"])
    }

    @Test func `if nothing is missing, a role that may not migrate is not refused`() throws {
        let database = try TestCluster.shared.database()
        var reader = try database.connect(user: "a_reader")
        try Migrator(daemon: v1).migrate(&reader) { _ in Issue.record("there was nothing to apply") }
    }

    @Test func `a second migrator waits for the first by a lock on the table of versions`() throws {
        let database = try TestCluster.shared.database()
        var first = try database.connect()
        try first.execute("BEGIN; \(DrainLock.migration)")
        // A session that only reads the table does not wait.
        var reader = try database.connect(user: "a_reader")
        try Migrator(daemon: v1).check(&reader)
        var second = try database.connect()
        let error = #expect(throws: DatabaseError.self) {
            try second.run("BEGIN; SET LOCAL lock_timeout = '50ms'; \(DrainLock.migration)")
        }
        #expect(error?.sqlState == "55P03")
    }

    @Test func `a database without the schema asks for migrate`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        var owner = try database.connect()
        let error = #expect(throws: SchemaError.self) { try Migrator(daemon: v1).check(&owner) }
        #expect(error?.description.contains("run `tokenkeeperd migrate`") == true)
    }

    @Test func `the schema may have been created beforehand, by a DBA who keeps the database`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        try database.psql("ALTER DATABASE \(database.name) OWNER TO postgres", user: "postgres")
        try database.psql("CREATE ROLE \(database.name)_m LOGIN", user: "postgres")
        try database.psql("CREATE SCHEMA tokenkeeper AUTHORIZATION \(database.name)_m", user: "postgres")
        var migrator = try database.connect(user: "\(database.name)_m")
        try Migrator(daemon: v1).migrate(&migrator) { _ in }
        try Migrator(daemon: v1).check(&migrator)
    }

    @Test(arguments: [
        ("1_x.sql", "-- oldest daemon: 0.1\n"), ("x.sql", "-- oldest daemon: 0.1.0\n"),
        ("0001_x.txt", "-- oldest daemon: 0.1.0\n"),
        ("0001_x.sql", "SELECT 1;\n"), ("0_x.sql", "-- oldest daemon: 0.1.0\n"), ("0001_x.sql", ""),
    ])
    func `a file without the required header is not a version`(file: String, sql: String) {
        #expect(Migration(file: file, sql: sql) == nil)
    }
}

@Suite(.ownThread) struct `Functions and views` {
    private static let gate = (old: "RETURN NOT FOUND;", new: "RETURN NOT FOUND; -- Changed.")

    private func body(_ function: String, _ connection: inout Connection) throws -> String {
        try connection.scalar("SELECT prosrc FROM pg_proc WHERE oid = '\(function)'::regprocedure") ?? ""
    }

    @Test func `a changed body reaches an existing database, with all other functions and views`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let migrator = Migrator(later(replacing: [Self.gate]), daemon: v2)
        #expect(throws: SchemaError.self) { try migrator.check(&owner) }
        let plan = try migrator.migrate(&owner) { _ in }
        #expect(plan.versions == [] && plan.differing == ["core/gate"] && plan.rights == .apply)
        #expect(plan.repeatables.count == SchemaFiles.embedded.repeatables.count)
        #expect(try body("tokenkeeper.is_sendable(text, text, text)", &owner).contains("-- Changed."))
        #expect(
            try owner.lines("SELECT DISTINCT release FROM tokenkeeper.repeatable", columns: 1) == ["0.2.0"],
            "all together")
        try migrator.check(&owner)
        #expect(try migrator.migrate(&owner) { _ in Issue.record("there was nothing left") }.isEmpty)
    }

    @Test func `a file that is new or gone counts as a difference`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        var files = SchemaFiles.embedded
        files.repeatables.append(Repeatable(file: "sending/more.sql", sql: "SELECT 1;"))
        try Migrator(files, daemon: v2).migrate(&owner) { #expect($0.differing == ["sending/more"]) }
        try Migrator(daemon: v3).migrate(&owner) { #expect($0.differing == ["sending/more"]) }
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.repeatable WHERE name = 'sending/more'") == "0")
        try Migrator(daemon: v3).check(&owner)
    }

    @Test func `an object that a version dropped comes back, with its rights`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let before = try catalog(&owner).filter { !$0.hasPrefix("version") && !$0.hasPrefix("repeatable") }
        let dropping = version(
            "0100_drop.sql",
            """
            DROP FUNCTION tokenkeeper.is_sendable(text, text, text);
            DROP VIEW tokenkeeper.sendable_token;
            """)
        let plan = try Migrator(later([dropping]), daemon: v2).migrate(&owner) { _ in }
        #expect(plan.differing == [] && !plan.repeatables.isEmpty)
        #expect(try catalog(&owner).filter { !$0.hasPrefix("version") && !$0.hasPrefix("repeatable") } == before)
        #expect(try database.psql("SELECT tokenkeeper.is_sendable('aa', 't')", user: "a_sender") == "t")
    }

    @Test func `an older binary does not restore old bodies`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        try Migrator(later(replacing: [Self.gate]), daemon: v2).migrate(&owner) { _ in }
        let after = try catalog(&owner)
        let older = Migrator(daemon: v1)
        #expect(try older.migrate(&owner) { _ in Issue.record("it must not apply anything") }.isEmpty)
        #expect(try older.script(&owner) == nil)
        try older.check(&owner)
        #expect(try catalog(&owner) == after)
        // It cannot apply a version or rights without its own functions either.
        #expect(throws: SchemaError.functionsNewer(release: v2, this: v1)) { try Grants.apply(&owner, daemon: v1) }
        let pending = Migrator(later([version("0100_more.sql", "CREATE TABLE tokenkeeper.more ();")]), daemon: v1)
        #expect(throws: SchemaError.functionsNewer(release: v2, this: v1)) { try pending.migrate(&owner) { _ in } }
        #expect(try catalog(&owner) == after)
    }

    @Test func `a view that someone has built on ours makes the migration refuse, and is named`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        try owner.execute("CREATE VIEW public.their_tokens AS SELECT token FROM tokenkeeper.sendable_token")
        let before = try catalog(&owner)
        let migrator = Migrator(later([version("0100_drop.sql", "DROP VIEW tokenkeeper.sendable_token;")]), daemon: v2)
        let error = #expect(throws: SchemaError.self) { try migrator.migrate(&owner) { _ in } }
        #expect(
            error?.description.contains("view public.their_tokens depends on view tokenkeeper.sendable_token") == true)
        #expect(try catalog(&owner) == before)
        try owner.execute("DROP VIEW public.their_tokens")
        try migrator.migrate(&owner) { _ in }
    }

    @Test func `a dry run names what would be applied, and changes nothing`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let before = try catalog(&owner)
        let more = version("0100_more.sql", "CREATE TABLE tokenkeeper.more ();")
        let plan = try Migrator(later([more], replacing: [Self.gate]), daemon: v2).plan(&owner)
        #expect(
            plan.lines("would apply") == [
                "would apply version 100 more",
                "would apply all \(plan.repeatables.count) files of functions and views (new or changed: core/gate)",
                "would apply grants: the roles exist and have their rights",
            ])
        #expect(try catalog(&owner) == before)

        let empty = try TestCluster.shared.database(migrated: false)
        let run = try ProgramRun(
            [DaemonProcess.program, "migrate", "--dry-run"],
            environment: ["TOKENKEEPER_DATABASE_URL": empty.url(user: "owner")])
        #expect(run.status == 0 && run.output.contains("\nwould apply version 1 schema\n"), "\(run)")
        #expect(try empty.psql("SELECT to_regnamespace('tokenkeeper') IS NULL") == "t")
    }

    /// Runs a script from a file: psql may stop early, and this process must not be writing to it then.
    private func psql(_ script: String, _ url: String) throws -> ProgramRun {
        let file = NSTemporaryDirectory() + "migrate-\(UUID().uuidString).sql"
        defer { unlink(file) }
        try script.write(toFile: file, atomically: true, encoding: .utf8)
        return try ProgramRun(["psql", "-Xq", "-d", url, "-f", file])
    }

    @Test func `another role than the owner is refused before anything is changed, and told whom to work as`() throws {
        let database = try TestCluster.shared.database()
        var admin = try database.connect(user: "postgres")
        let before = try catalog(&admin)
        // An administrator may create the roles and grant their rights: nothing of that belongs to him.
        try Migrator(daemon: v1).migrate(&admin, createsRoles: true) { #expect($0.rights == .apply) }
        let grants = try #require(try Migrator(daemon: v1).script(&admin, createsRoles: true))
        let granted = try psql(grants, database.url(user: "postgres"))
        #expect(granted.status == 0, "\(granted.errors)")
        #expect(try catalog(&admin) == before)
        let migrator = Migrator(later(replacing: [Self.gate]), daemon: v2)
        let error = SchemaError.notOwner(owner: "owner", role: "postgres")
        #expect(error.description.hasSuffix("connect as owner, or run `tokenkeeperd migrate --owner owner`"))
        #expect(throws: error) { try migrator.migrate(&admin) { _ in } }
        #expect(throws: error) { try migrator.migrate(&admin, createsRoles: true) { _ in } }
        let refused = try psql(try #require(try migrator.script(&admin)), database.url(user: "postgres"))
        #expect(refused.status != 0 && refused.errors.contains("the schema tokenkeeper belongs to the role owner"))
        #expect(refused.errors.contains("print it again with --owner owner"), "\(refused.errors)")
        #expect(try catalog(&admin) == before)
        let right = try psql(
            try #require(try migrator.script(&admin, owner: "owner")), database.url(user: "postgres"))
        #expect(right.status == 0, "\(right.errors)")
        var owner = try database.connect()
        try migrator.check(&owner)
        #expect(
            try owner.scalar(
                "SELECT count(*) FROM pg_proc WHERE pronamespace = 'tokenkeeper'::regnamespace AND proowner <> 'owner'::regrole"
            ) == "0")

        // A schema that a DBA has made for another role is that role's, too.
        let empty = try TestCluster.shared.database(migrated: false)
        try empty.psql("CREATE SCHEMA tokenkeeper AUTHORIZATION owner", user: "postgres")
        var other = try empty.connect(user: "postgres")
        #expect(throws: error) { try Migrator(daemon: v1).migrate(&other) { _ in } }
    }

    @Test func `running the output of --print in psql equals migrate`() throws {
        let (printed, migrated) = (
            try TestCluster.shared.database(migrated: false), try TestCluster.shared.database(migrated: false)
        )
        let run = try ProgramRun(
            [DaemonProcess.program, "migrate", "--print"],
            environment: ["TOKENKEEPER_DATABASE_URL": printed.url(user: "owner")])
        #expect(run.status == 0)
        #expect(try printed.psql("SELECT to_regnamespace('tokenkeeper') IS NULL") == "t", "it only prints")
        try TestCluster.run(["psql", "-Xq", "-d", printed.url(user: "owner"), "-f", "-"], input: run.output)
        var left = try printed.connect()
        var right = try migrated.connect()
        try Migrator(daemon: v1).migrate(&right) { _ in }
        #expect(try catalog(&left) == catalog(&right))
        #expect(try Migrator(daemon: v1).plan(&left).isEmpty)

        // And an upgrade, which finds the schema as it was when the script was printed, or stops.
        let upgrade = Migrator(
            later([version("0100_drop.sql", "DROP VIEW tokenkeeper.status;")], replacing: [Self.gate]), daemon: v2)
        let script = try #require(try upgrade.script(&left))
        try TestCluster.run(["psql", "-Xq", "-d", printed.url(user: "owner"), "-f", "-"], input: script)
        try upgrade.migrate(&right) { _ in }
        #expect(try catalog(&left) == catalog(&right))
        let again = try psql(script, printed.url(user: "owner"))
        #expect(again.status != 0 && again.errors.contains("the schema has changed since this script was printed"))
    }

    @Test func `if roles are missing, migrate applies the rest, says so, and grants follows`() throws {
        let cluster = try TestCluster()
        var admin = try cluster.connect(database: "postgres")
        let plan = try Migrator(daemon: v1).migrate(&admin) { _ in }
        #expect(plan.rights == .rolesMissing && !plan.versions.isEmpty && !plan.repeatables.isEmpty)
        #expect(plan.lines("applied").last == "next: `tokenkeeperd grants` creates the roles")
        try Migrator(daemon: v1).check(&admin)
        try Grants.apply(&admin, daemon: v1)
        #expect(
            try admin.scalar("SELECT has_table_privilege('tokenkeeper_daemon', 'tokenkeeper.ledger', 'UPDATE')") == "t")
        #expect(try Migrator(daemon: v1).plan(&admin).isEmpty)
    }

    @Test func `after a missing function the daemon connects again and checks the schema`() {
        #expect(
            DatabaseError(sqlState: "42883", message: "function tokenkeeper.record() does not exist").remedy
                == .reconnect)
    }

    @Test func `upgrades under load, with a daemon of the previous release, lose nothing`() async throws {
        let database = try TestCluster.shared.database()
        let batches = 60
        let perBatch = 50
        var owner = try database.connect()
        try owner.execute(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(n), 8, '0'), 't', registered_at => '2025-01-01Z'))
            FROM generate_series(1, \(batches * perBatch)) AS n
            """)
        let daemon = try DaemonProcess(database.url(), settings: ["guard.max_share=100%"])
        let sending = Task.detached {
            var sender = try database.connect(user: "a_sender")
            for batch in 0..<batches {
                // Each batch has 410s for tokens, and one more result that only counts.
                try sender.execute(
                    """
                    INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
                    SELECT 't', lpad(to_hex(\(batch * perBatch) + n), 8, '0'), s.status, s.body, now()
                    FROM generate_series(1, \(perBatch)) AS n
                    CROSS JOIN (VALUES (410, '{"reason":"Unregistered","timestamp":1740000000000}'), (200, NULL)) AS s (status, body)
                    """)
            }
        }
        // Each release changes every function, drops what the drain calls, and creates it again.
        var dropping: [Migration] = []
        for release in 2...6 {
            dropping.append(
                version(
                    "010\(release)_drop.sql",
                    """
                    DO $$ BEGIN
                        EXECUTE (SELECT string_agg('DROP FUNCTION ' || p.oid::regprocedure, '; ') FROM pg_proc AS p
                                 WHERE p.pronamespace = 'tokenkeeper'::regnamespace
                                   AND p.proname IN ('record', 'lock_batch', 'lock_partition', 'partition_sizes', 'judge_suspects'));
                    END $$;
                    DROP VIEW tokenkeeper.status;
                    """))
            let files = later(dropping, replacing: [("BEGIN\n", "BEGIN\n    -- Release \(release).\n")])
            let migrator = Migrator(files, daemon: Version(major: 0, minor: release, patch: 0))
            try eventually("release \(release) is applied") {
                do {
                    try migrator.migrate(&owner) { _ in }
                    return true
                } catch let error as DatabaseError where error.remedy == .retry {
                    return false
                }
            }
        }
        try await sending.value
        try eventually("the queue is empty") { try owner.scalar("SELECT count(*) FROM tokenkeeper.send_result") == "0" }
        #expect(daemon.isRunning)
        #expect(daemon.stop() == 0)
        #expect(
            try owner.lines(
                "SELECT status, sum(results) FROM tokenkeeper.result_stat GROUP BY 1 ORDER BY 1", columns: 2)
                == ["200|\(batches * perBatch)", "410|\(batches * perBatch)"])
        #expect(try owner.lines("SELECT DISTINCT error FROM tokenkeeper.rejected_result", columns: 1) == [])
        #expect(
            try owner.lines("SELECT state, count(*) FROM tokenkeeper.token GROUP BY 1", columns: 2)
                == ["stale|\(batches * perBatch)"])
    }
}
