import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

private let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent()
    .appendingPathComponent("../../migrations").standardized

@Suite(.ownThread) struct `The schema` {
    @Test func `the binary holds the files of migrations byte for byte`() throws {
        let files = try FileManager.default.subpathsOfDirectory(atPath: folder.path).filter { $0.hasSuffix(".sql") }
        #expect(Set(files) == Set(SchemaFiles.embeddedTexts.keys))
        for file in files {
            let text = try Data(contentsOf: folder.appendingPathComponent(file))
            #expect(SchemaFiles.embeddedTexts[file].map { Data($0.utf8) } == text, "\(file)")
        }
        let embedded = SchemaFiles.embedded
        #expect(embedded.versions.map(\.version) == Array(1...embedded.versions.count))
        #expect(
            files.count == embedded.versions.count + embedded.repeatables.count + 2,
            "with grants and the router, all are well named")
        #expect(embedded.grants.sql.contains("GRANT "))
    }

    @Test func `migrations are ASCII without backslashes, for databases of any encoding and any string syntax`() {
        for (file, text) in SchemaFiles.embeddedTexts {
            #expect(text.utf8.allSatisfy { $0 < 128 && $0 != UInt8(ascii: "\\") }, "\(file)")
        }
    }

    @Test func `every function, view and table is created in exactly one place, and all of them exist`() throws {
        var places: [String: [String]] = [:]
        let creation = /^ *CREATE (?:OR REPLACE )?(?:FUNCTION|VIEW|TABLE) tokenkeeper\.(\w+)/.anchorsMatchLineEndings()
        for (file, text) in SchemaFiles.embeddedTexts where !file.hasPrefix("router/") {
            for found in text.matches(of: creation) { places[String(found.1), default: []].append(file) }
        }
        // A table and the function that locks it share a name. The functions called report and register differ in their parameters, each of which is
        // created once.
        for (object, files) in places where !["lock_sweep_claim", "report", "register"].contains(object) {
            #expect(files.count == 1, "\(object): \(files)")
        }
        #expect(places["lock_sweep_claim"]?.sorted() == ["core/locks.sql", "versions/0006_daemons.sql"])
        var owner = try TestCluster.shared.database().connect()
        let reports = try owner.scalar(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = 'tokenkeeper'::regnamespace AND proname = 'report'")
        #expect(reports == "3" && places["report"] == Array(repeating: "core/report.sql", count: 3))
        let existing = try owner.lines(
            """
            SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = 'tokenkeeper'::regnamespace
            UNION
            SELECT c.relname FROM pg_class AS c WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p', 'v')
              AND c.relname !~ '_[0-9]+$'
            """, columns: 1)
        #expect(Set(existing) == Set(places.keys))
    }

    @Test func `in functions and views, each object is followed by its comment`() throws {
        let object = /CREATE OR REPLACE (FUNCTION|VIEW) tokenkeeper\.(\w+)/
        for file in SchemaFiles.embedded.repeatables {
            #expect(!file.sql.contains("CREATE FUNCTION") && !file.sql.contains("CREATE VIEW"), "\(file.name)")
            let starts = file.sql.matches(of: object)
            for (index, start) in starts.enumerated() {
                let end = index + 1 < starts.count ? starts[index + 1].range.lowerBound : file.sql.endIndex
                let part = file.sql[start.range.lowerBound..<end]
                #expect(part.contains("\nCOMMENT ON \(start.1) tokenkeeper.\(start.2)"), "\(start.2)")
            }
        }
    }

    @Test func `every table, view, sequence and function has a comment`() throws {
        var owner = try TestCluster.shared.database().connect()
        let bare = try owner.lines(
            """
            SELECT c.relname FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')
              AND obj_description(c.oid, 'pg_class') IS NULL
            UNION ALL
            SELECT c.relname FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'S' AND obj_description(c.oid, 'pg_class') IS NULL
              AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.objid = c.oid AND d.deptype = 'i')
            UNION ALL
            SELECT p.proname FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
            """, columns: 1)
        #expect(bare == [])
    }

    @Test func `nothing is granted to PUBLIC`() throws {
        var owner = try TestCluster.shared.database().connect()
        let open = try owner.lines(
            """
            SELECT p.proname FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace
              AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee = 0))
            UNION ALL
            SELECT c.relname FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace
              AND EXISTS (SELECT FROM aclexplode(c.relacl) AS a WHERE a.grantee = 0)
            UNION ALL
            SELECT 'the schema' FROM pg_namespace AS n
            WHERE n.nspname = 'tokenkeeper' AND EXISTS (SELECT FROM aclexplode(n.nspacl) AS a WHERE a.grantee = 0)
            """, columns: 1)
        #expect(open == [])
    }

    @Test func `functions that run with their owner's rights pin the search path, pg_temp last`() throws {
        var owner = try TestCluster.shared.database().connect()
        let loose = try owner.lines(
            """
            SELECT p.proname FROM pg_proc AS p
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND p.prosecdef
              AND NOT coalesce(p.proconfig && ARRAY['search_path=pg_catalog, pg_temp'], false)
            """, columns: 1)
        #expect(loose == [])
        #expect(
            try owner.scalar(
                "SELECT count(*) FROM pg_proc WHERE pronamespace = 'tokenkeeper'::regnamespace AND prosecdef") != "0")
    }

    /// A body that is a text is looked up again at each call, in the caller's path, unless the function sets its own.
    @Test func `every function has a parsed body, its own search path, or names with their schemas`() throws {
        var owner = try TestCluster.shared.database().connect()
        let loose = try owner.lines(
            """
            SELECT p.proname FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
            WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND l.lanname IN ('sql', 'plpgsql') AND p.prosqlbody IS NULL
              AND NOT coalesce(p.proconfig && ARRAY['search_path=pg_catalog, pg_temp'], false)
            ORDER BY 1
            """, columns: 1)
        // These two would cost twice as much.
        #expect(loose == ["parsed_payload", "tag_vector"])
        // They find nothing of the caller's.
        try owner.run(
            """
            CREATE SCHEMA hostile;
            CREATE FUNCTION hostile.octet_length(text) RETURNS integer LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''trapped''; END';
            CREATE FUNCTION hostile.larger(integer, integer) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''trapped''; END';
            CREATE OPERATOR hostile.> (LEFTARG = integer, RIGHTARG = integer, FUNCTION = hostile.larger);
            CREATE FUNCTION hostile.array_to_tsvector(text[]) RETURNS tsvector LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''trapped''; END';
            CREATE DOMAIN hostile.text AS pg_catalog.text CHECK (value IS NULL);
            CREATE DOMAIN hostile.jsonb AS pg_catalog.jsonb CHECK (value IS NULL)
            """)
        try owner.run("SET search_path = hostile, pg_catalog")
        #expect(throws: DatabaseError.self) { try owner.run("SELECT octet_length('a'::pg_catalog.text)") }
        #expect(try owner.scalar("SELECT tokenkeeper.parsed_payload('{\"a\": 1}')") == "{\"a\": 1}")
        #expect(try owner.scalar("SELECT tokenkeeper.tag_vector('{a}')") == "'a'")
    }

    @Test func `nothing belongs to a superuser`() throws {
        var owner = try TestCluster.shared.database().connect()
        let owners = try owner.lines(
            """
            SELECT DISTINCT r.rolname, r.rolsuper::text FROM pg_class AS c JOIN pg_roles AS r ON r.oid = c.relowner
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace
            """, columns: 2)
        #expect(owners == ["owner|false"])
    }

    @Test func `a publication for all tables blocks nothing`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("CREATE PUBLICATION everything FOR ALL TABLES", user: "postgres")
        try database.psql("SELECT tokenkeeper.register('aa', 't')", user: "a_app")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 410), ('t', 'aa', 200), ('t', 'zz', 410)",
            user: "a_sender")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        var owner = try database.connect()
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        // Rows of a table without a key or replica identity could not be deleted.
        let bare = try owner.lines(
            """
            SELECT c.relname FROM pg_class AS c
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind = 'r' AND c.relreplident = 'd'
              AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary)
            """, columns: 1)
        #expect(bare == [])
    }

    @Test func `months of history are prepared ahead, and dropped when they are old`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 't'), tokenkeeper.register('bb', 't')")
        var owner = try database.connect()
        let months = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'tokenkeeper.token_event_log'::regclass"
        #expect(try owner.scalar(months) == "5", "four months and the rest")
        try owner.execute("SELECT tokenkeeper.prepare_event_months()")
        #expect(try owner.scalar(months) == "5")
        // A month from long ago.
        try owner.execute(
            """
            CREATE TABLE tokenkeeper.token_event_log_2024_01 (LIKE tokenkeeper.token_event_log INCLUDING ALL);
            ALTER TABLE tokenkeeper.token_event_log ATTACH PARTITION tokenkeeper.token_event_log_2024_01
                FOR VALUES FROM ('2024-01-01Z') TO ('2024-02-01Z');
            INSERT INTO tokenkeeper.token_event_log (at, topic_id, token_key, event)
            SELECT '2024-01-05Z', topic_id, '\\xaa', 'registered' FROM tokenkeeper.topic
            """)
        let forget = "SELECT tokenkeeper.forget_event_month(clock_timestamp() - interval '%@')"
        #expect(try owner.scalar(String(format: forget, "3650 days")) == nil)
        #expect(try owner.scalar(String(format: forget, "32 days")) == "1")
        #expect(try owner.scalar(String(format: forget, "32 days")) == nil)
        #expect(try owner.scalar(months) == "5")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token_event") == "2")
    }

    @Test func `no month of history younger than the shortest retention is dropped`() throws {
        let database = try TestCluster.shared.database()
        for before in ["now() - interval '30 days'", "now() + interval '90 days'", "'infinity'", "NULL"] {
            var daemon = try database.connect(user: "a_daemon")
            let error = #expect(throws: DatabaseError.self) {
                try daemon.execute("SELECT tokenkeeper.forget_event_month(\(before))")
            }
            #expect(error?.sqlState == "22023", "\(before)")
        }
    }

    @Test func `every index on our text columns uses byte order, which no library upgrade changes`()
        throws
    {
        var owner = try TestCluster.shared.database().connect()
        let others = try owner.lines(
            """
            SELECT x.indexrelid::regclass FROM pg_index AS x JOIN pg_class AS c ON c.oid = x.indrelid
            CROSS JOIN unnest(x.indcollation::oid[]) AS u (used)
            WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND u.used <> 0
              AND u.used <> (SELECT k.oid FROM pg_collation AS k WHERE k.collname = 'C' AND k.collnamespace = 'pg_catalog'::regnamespace)
            """, columns: 1)
        #expect(others == [])
    }
}
