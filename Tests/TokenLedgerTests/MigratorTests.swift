import Foundation
import LedgerTestSupport
import Testing

@testable import TokenLedger

private let v1 = Version(major: 0, minor: 1, patch: 0)

@Suite struct `Migrations` {
    @Test func `two migrators at once are harmless`() async throws {
        let database = try TestCluster.shared.database(migrated: false)
        let applied = await withTaskGroup(of: [Int].self) { group in
            for _ in 1...4 {
                group.addTask {
                    var mine: [Int] = []
                    do {
                        var owner = try database.connect()
                        try Migrator(daemon: v1).migrate(&owner) { mine.append($0.version) }
                    } catch {
                        Issue.record(error)
                    }
                    return mine
                }
            }
            return await group.reduce(into: []) { $0 += $1 }
        }
        #expect(applied.sorted() == Migration.embedded.map(\.version))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.migration") == "\(Migration.embedded.count)")
    }

    @Test func `an edited file is refused, by migrate and by run`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        var edited = Migration.embedded
        edited[1] = Migration(file: "0002_queue.sql", sql: edited[1].sql + "-- a word more\n")!
        let migrator = Migrator(edited, daemon: v1)
        #expect(throws: SchemaError.edited(version: 2, name: "queue")) { try migrator.migrate(&owner) { _ in } }
        #expect(throws: SchemaError.edited(version: 2, name: "queue")) { try migrator.check(&owner) }
    }

    @Test func `a schema that has gone on refuses only daemons that are too old for it`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let tolerant = Migration(
            file: "0100_tolerant.sql", sql: "-- oldest daemon: 0.1.0\nCREATE TABLE tokenkeeper.more ();\n")!
        let strict = Migration(file: "0101_strict.sql", sql: "-- oldest daemon: 0.3.0\nDROP TABLE tokenkeeper.more;\n")!
        let v3 = Version(major: 0, minor: 3, patch: 0)
        try Migrator(Migration.embedded + [tolerant], daemon: v3).migrate(&owner) { _ in }
        try Migrator(daemon: v1).check(&owner)
        try Migrator(Migration.embedded + [tolerant, strict], daemon: v3).migrate(&owner) { _ in }
        #expect(throws: SchemaError.daemonTooOld(needed: v3, this: v1)) { try Migrator(daemon: v1).check(&owner) }
        #expect(throws: SchemaError.daemonTooOld(needed: v3, this: v1)) {
            try Migrator(daemon: v1).migrate(&owner) { _ in }
        }
        try Migrator(daemon: Version(major: 0, minor: 10, patch: 0)).check(&owner)
    }

    @Test func `a migration that fails leaves nothing behind, and what came before stays`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        let broken = Migration(
            file: "0100_broken.sql", sql: "-- oldest daemon: 0.1.0\nCREATE TABLE tokenkeeper.half ();\nSELECT 1 / 0;\n")!
        #expect(throws: DatabaseError.self) {
            try Migrator(Migration.embedded + [broken], daemon: v1).migrate(&owner) { _ in }
        }
        #expect(try owner.scalar("SELECT to_regclass('tokenkeeper.half') IS NULL") == "t")
        try Migrator(daemon: v1).check(&owner)
    }

    @Test func `a migration does not wait for long behind somebody's lock`() throws {
        let database = try TestCluster.shared.database()
        var app = try database.connect()
        try app.execute("BEGIN; LOCK TABLE tokenkeeper.ledger IN SHARE MODE")
        var owner = try database.connect()
        let altering = Migration(
            file: "0100_alter.sql",
            sql: "-- oldest daemon: 0.1.0\nALTER TABLE tokenkeeper.ledger ADD COLUMN more int;\n")!
        let error = #expect(throws: DatabaseError.self) {
            try Migrator(Migration.embedded + [altering], daemon: v1).migrate(&owner) { _ in }
        }
        #expect(error?.sqlState == "55P03")
    }

    @Test func `where nothing is missing, a role that may not migrate is not refused`() throws {
        let database = try TestCluster.shared.database()
        var reader = try database.connect(user: "a_reader")
        try Migrator(daemon: v1).migrate(&reader) { _ in Issue.record("there was nothing to apply") }
    }

    @Test func `a second migrator waits for the first by a lock on the table of migrations`() throws {
        let database = try TestCluster.shared.database()
        var first = try database.connect()
        try first.execute("BEGIN; \(DrainLock.migration)")
        // Who only looks at them is not kept waiting.
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

    @Test func `the schema may have been made beforehand, by a DBA who keeps the database`() throws {
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
    func `a file that does not declare what it must is no migration`(file: String, sql: String) {
        #expect(Migration(file: file, sql: sql) == nil)
    }
}

@Suite struct `A schema with tokens in it` {
    @Test func `goes on with devices, tags and suspects as if they had come to it as it is now`() throws {
        let daemon = Version(major: 0, minor: 1, patch: 0)
        let database = try TestCluster.shared.database(migrated: false)
        var owner = try database.connect(user: "owner")
        try Migrator(Array(Migration.embedded.prefix(5)), daemon: daemon).migrate(&owner) { _ in }
        try owner.execute(
            """
            SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01Z', device_id => 'd', tags => '{x}');
            SELECT tokenkeeper.register('bb', 't', registered_at => '2025-01-02Z', device_id => 'd');
            SELECT tokenkeeper.register('cc', 't.push-type.liveactivity', registered_at => '2025-01-01Z', device_id => 'd');
            SELECT tokenkeeper.register('dd', 't.push-type.liveactivity', registered_at => '2025-01-02Z', device_id => 'd');
            SELECT tokenkeeper.register('ee', 't', registered_at => '2025-01-01Z');
            SELECT tokenkeeper.record('{production}', '{t}', '{1}', '{"\\\\xee"}', ARRAY[NULL::timestamptz], ARRAY[NULL],
                '{2025-02-01Z}', '{BadDeviceToken}');
            """)
        try Migrator(daemon: daemon).migrate(&owner) { _ in }
        #expect(
            try owner.lines(
                "SELECT token, state, array_to_string(tags, ',') FROM tokenkeeper.token ORDER BY token", columns: 3)
                == ["aa|superseded|x", "bb|active|x", "cc|active|", "dd|active|", "ee|suspect|"])
        #expect(
            try owner.scalar(
                "SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01T12:00Z')") == "f", "late")
        #expect(
            try owner.scalar("SELECT tokenkeeper.reinstate('t', 'production', '2025-01-31Z', '2025-02-02Z')") == "1")
        #expect(try owner.scalar("SELECT tokenkeeper.register('aa', 't')") == "t")
        #expect(try owner.scalar("SELECT state FROM tokenkeeper.token WHERE token = 'bb'") == "superseded")
    }
}
