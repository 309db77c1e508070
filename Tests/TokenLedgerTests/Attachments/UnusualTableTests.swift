import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Unusual attached tables` {
    private static let arguments =
        "token => 'token', topic => $$'t'$$, registered_at => 'at', on_delete => 'unregister'"

    /// A table `app.phones`, attached. Its columns must include `token` and `at`.
    private func phones(
        _ columns: String, index: String = "(token)", arguments: String = Self.arguments, more: String = "SELECT"
    ) throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try devices.app(more)
        try devices.app("CREATE TABLE app.phones (\(columns))")
        try devices.app("CREATE INDEX phones_token ON app.phones \(index)")
        try devices.app("SELECT FROM tokenkeeper.attach('app.phones', \(arguments))")
        return devices
    }

    private func failure(_ body: () throws -> some Any) -> String {
        do {
            _ = try body()
            return "no error"
        } catch {
            return "\(error)"
        }
    }

    private func fault(_ devices: AttachedDevices, as user: String = "a_app") throws -> String {
        try devices.database.psql("SELECT FROM tokenkeeper.check_attachments()", user: "a_daemon")
        return try devices.database.psql("SELECT fault FROM tokenkeeper.attachment", user: user)
    }

    /// Queues all rows by a backfill, and returns how many it has read, queued and refused.
    private func backfilled(_ devices: AttachedDevices, table: String = "app.phones") throws -> String {
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('\(table)')")
        return try devices.app("SELECT rows, queued, unreadable FROM tokenkeeper.backfill_next(\(source), 100)")
    }

    @Test(arguments: [
        ("char(80)", "(token)"), ("text COLLATE \"C\"", "(token)"), ("varchar(100)", "(token varchar_pattern_ops)"),
        ("text", "(token) WHERE token IS NOT NULL"), ("varchar(100)", "USING hash (token)"), ("name", "(token)"),
        ("app.apns", "(token)"), ("text COLLATE app.lax", "(token)"), ("app.\"odd %s type\"", "(token) INCLUDE (at)"),
    ])
    func `a row is found by its token, whatever the type of the column and the index`(type: String, index: String)
        throws
    {
        let devices = try phones(
            "id integer PRIMARY KEY, token \(type), at timestamptz", index: index,
            more: """
                CREATE DOMAIN app.apns AS varchar(200) CHECK (length(VALUE) < 100); CREATE DOMAIN app."odd %s type" AS app.apns;
                CREATE COLLATION app.lax (provider = icu, locale = 'und-u-ks-level2', deterministic = false)
                """)
        let token = String(repeating: "ab", count: 20)
        try devices.app(
            "INSERT INTO app.phones VALUES (0, '\(token)', now()), (1, '\(token)', now()), (9, NULL, now())")
        try devices.app("DELETE FROM app.phones WHERE id = 0")
        try devices.drain()
        #expect(try devices.states() == "abab active")
        #expect(try backfilled(devices) == "2|1|0")
        try devices.app("DELETE FROM app.phones")
        try devices.drain()
        #expect(try devices.states() == "abab unregistered_by_app")
        // By the index, and not by reading the whole table.
        var owner = try devices.database.connect(user: "a_app")
        try owner.run(
            "INSERT INTO app.phones SELECT i, lpad(to_hex(i), 40, '0'), now() FROM generate_series(1, 2000) AS i")
        let read = "SELECT pg_stat_get_xact_tuples_returned('app.phones'::regclass)"
        try owner.run("BEGIN; ANALYZE app.phones")
        let before = Int(try owner.scalar(read) ?? "") ?? .max
        try owner.run("UPDATE app.phones SET token = NULL WHERE id = 77")
        #expect(Int(try owner.scalar(read) ?? "") ?? .max < before + 10)
        try owner.run("ROLLBACK")
    }

    @Test func `names of our variables, quotes and percent signs are no obstacle`() throws {
        let devices = try AttachedDevices()
        let table = "\"We\"\"ird (%s)\".\"De'vices %1$s\""
        try devices.database.psql("GRANT CREATE ON DATABASE \(devices.database.name) TO a_app", user: "postgres")
        try devices.app(
            """
            CREATE SCHEMA "We""ird (%s)";
            CREATE TABLE \(table) (token text, sql text, r text, moves boolean DEFAULT false, old_token text, source_id text COLLATE "C", "n%s" uuid,
                environment text DEFAULT 'production', topic text DEFAULT 'it''s%s$1', key integer, registered_at timestamptz, a text, h text, hex text, has boolean, u text,
                new_token text, device_id text, user_id text, tags text[], out boolean DEFAULT false, changed_rows text,
                PRIMARY KEY (source_id, "n%s", key));
            CREATE INDEX ON \(table) (token)
            """)
        let literal = "'\(table.replacing("'", with: "''"))'"
        try devices.app(
            """
            SELECT FROM tokenkeeper.attach(\(literal), token => 'token', topic => 'topic', environment => 'environment', registered_at => 'registered_at',
                device_id => 'device_id', user_id => 'user_id', tags => 'tags', logged_out => 'moves OR out OR r = ''50%s''', on_delete => 'unregister')
            """)
        try devices.app(
            """
            INSERT INTO \(table) (token, source_id, "n%s", key, registered_at, device_id, tags)
            SELECT lpad(to_hex(i), 4, '0'), E'a "\\\\ \\n' || i % 3, md5(i::text)::uuid, i, now() - interval '1 day', 'd' || i, '{x}' FROM generate_series(1, 25) AS i
            """)
        try devices.drain()
        try devices.app(
            """
            UPDATE \(table) SET r = '50%s' WHERE key = 1;
            UPDATE \(table) SET token = '00 02' WHERE key = 2;
            UPDATE \(table) SET token = '0x00ff', registered_at = now() WHERE key = 3;
            DELETE FROM \(table) WHERE key IN (4, 5);
            INSERT INTO \(table) (token, source_id, "n%s", key, registered_at) VALUES ('0004', '', md5('')::uuid, 0, now())
            """)
        try devices.drain()
        #expect(
            try devices.database.psql(
                "SELECT string_agg(token || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token WHERE state <> 'active'"
            )
                == "0001 unregistered_by_app, 0003 superseded, 0005 unregistered_by_app")
        try devices.forgetQueue()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill(\(literal))")
        var steps = 0
        while try !devices.app("SELECT finished FROM tokenkeeper.backfill_next(\(source), 7)").hasPrefix("t") {
            steps += 1
        }
        #expect(steps == 3)
        #expect(
            try devices.app("SELECT queued, refused FROM tokenkeeper.registration_source WHERE source_id = \(source)")
                == "24|0")
        #expect(try fault(devices) == "")
        try devices.app("SELECT tokenkeeper.detach(\(literal))")
    }

    @Test func `a write succeeds although the old row or the old column cannot be read`() throws {
        let devices = try phones(
            "id integer PRIMARY KEY, token text, at timestamptz, meta jsonb",
            arguments: Self.arguments + ", logged_out => '(meta ->> ''out'')::boolean'")
        try devices.app(
            "ALTER TABLE app.phones DISABLE TRIGGER USER; INSERT INTO app.phones VALUES (1, 'aaaa', now(), '{\"out\": \"perhaps\"}')"
        )
        try devices.app("ALTER TABLE app.phones ENABLE TRIGGER USER")
        try devices.app("UPDATE app.phones SET meta = '{}'")
        try devices.app("ALTER TABLE app.phones RENAME token TO apns")
        try devices.app("UPDATE app.phones SET apns = 'bbbb'")
        try devices.app("INSERT INTO app.phones VALUES (2, 'cccc', now())")
        try devices.app("DELETE FROM app.phones")
        #expect(try fault(devices).hasPrefix("columns were dropped, or have other names now: token;"))
        #expect(try devices.app("SELECT failures FROM tokenkeeper.attachment") == "5")
    }

    @Test func `what cannot be read in full is not backfilled, and the fault shows`() throws {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz, note text")
        try devices.app("INSERT INTO app.phones VALUES (1, 'aaaa', now()), (2, 'AAAA', now()), (3, 'bbbb', now())")
        for (broken, repaired, words) in [
            ("FORCE ROW LEVEL SECURITY", "NO FORCE ROW LEVEL SECURITY", "row-level security is forced"),
            ("RENAME id TO number", "RENAME number TO id", "or have other names now: id;"),
            ("RENAME token TO apns", "RENAME apns TO token", "or have other names now: token;"),
            ("DROP CONSTRAINT phones_pkey", "ADD PRIMARY KEY (id)", ""),
        ] {
            try devices.app("ALTER TABLE app.phones \(broken)")
            #expect(failure { try backfilled(devices) } != "no error", "\(broken)")
            #expect(try fault(devices).contains(words) || words.isEmpty, "\(broken)")
            try devices.app("ALTER TABLE app.phones \(repaired)")
            #expect(try fault(devices) == "")
        }
        #expect(try backfilled(devices) == "3|3|0")
    }

    @Test func `the key of a row means the same with another DateStyle`() throws {
        let devices = try phones("id integer, token text, at timestamptz, PRIMARY KEY (at, id)")
        try devices.app(
            "INSERT INTO app.phones SELECT i, lpad(to_hex(i), 4, '0'), timestamptz '2026-03-01 00:30Z' + i * interval '5 hours' FROM generate_series(1, 50) AS i"
        )
        try devices.forgetQueue()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.phones')")
        for (style, rows) in [("SQL, DMY", "30"), ("Postgres, MDY", "20")] {
            #expect(
                try devices.app(
                    "SET DateStyle = '\(style)'; SELECT rows FROM tokenkeeper.backfill_next(\(source), 30)") == rows)
        }
        #expect(try devices.database.psql("SELECT count(DISTINCT token) FROM tokenkeeper.registration") == "50")
    }

    @Test func `MERGE, wide rows and an empty table`() throws {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz, note text")
        #expect(try backfilled(devices) == "0|0|0")
        try devices.app(
            """
            INSERT INTO app.phones SELECT 1, 'aaaa', now() - interval '1 day', string_agg(md5(i::text), '') FROM generate_series(1, 50000) AS i;
            MERGE INTO app.phones AS p USING (VALUES (1, 'bbbb'), (2, 'cccc')) AS n (id, token) ON p.id = n.id
            WHEN MATCHED THEN UPDATE SET token = n.token, at = now() WHEN NOT MATCHED THEN INSERT VALUES (n.id, n.token, now())
            """)
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb active, cccc active")
        try devices.app(
            "MERGE INTO app.phones AS p USING (VALUES (1)) AS n (id) ON p.id = n.id WHEN MATCHED THEN DELETE")
        try devices.app("UPDATE app.phones SET note = 'x'")
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb unregistered_by_app, cccc active")
        try devices.app("TRUNCATE app.phones")
        #expect(try devices.queued() == [])
    }

    @Test func `a table that was dropped and created again is attached again after detach, also by its bare name`()
        throws
    {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz")
        try devices.app("DROP TABLE app.phones")
        try devices.app("CREATE TABLE app.phones (id integer PRIMARY KEY, token text, at timestamptz)")
        try devices.app("CREATE INDEX ON app.phones (token)")
        let attach = "SELECT FROM tokenkeeper.attach('app.phones', \(Self.arguments))"
        #expect(failure { try devices.app(attach) }.contains("SELECT tokenkeeper.detach('app.phones')"))
        try devices.app("SELECT tokenkeeper.detach('phones')")
        try devices.app(attach)
        #expect(try devices.app("SELECT name FROM tokenkeeper.begin_backfill('app.phones')") == "app.phones")
        try devices.database.psql("CREATE TABLE public.phones (LIKE app.phones INCLUDING ALL)", user: "postgres")
        #expect(failure { try devices.app("SELECT tokenkeeper.detach('phone')") }.contains("is not attached"))
        try devices.app("SELECT tokenkeeper.detach('app.phones')")
        #expect(try devices.app("SELECT count(*) FROM pg_proc WHERE pronamespace = 'app'::regnamespace") == "0")
    }

    @Test func `a table with another owner shows a fault, and detach drops what the former owner had`() throws {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz")
        let heir = "heir_\(UInt32.random(in: 0...UInt32.max))"
        try devices.database.psql(
            """
            CREATE ROLE \(heir) LOGIN IN ROLE tokenkeeper_app; ALTER TABLE app.phones OWNER TO \(heir);
            GRANT USAGE ON SCHEMA app TO \(heir)
            """, user: "postgres")
        defer {
            _ = try? devices.database.psql("DROP OWNED BY \(heir) CASCADE; DROP ROLE \(heir)", user: "postgres")
        }
        try devices.database.psql("INSERT INTO app.phones VALUES (1, 'aaaa', now())", user: heir)
        #expect(try fault(devices, as: heir).contains("belongs to another role than the table: tokenkeeper_delete_"))
        #expect(try devices.app("SELECT count(*) FROM tokenkeeper.attachment") == "0")
        try devices.database.psql("ALTER SCHEMA app OWNER TO \(heir)", user: "postgres")
        try devices.database.psql("SELECT tokenkeeper.detach('app.phones')", user: heir)
        #expect(
            try devices.app(
                "SELECT count(*) FROM pg_proc WHERE proname LIKE 'tokenkeeper!_%' ESCAPE '!' AND pronamespace = 'app'::regnamespace"
            ) == "0")
    }

    @Test func `status names triggers that belong to no attachment, and the command that removes them`() throws {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz")
        func strays() throws -> String {
            try devices.database.psql(
                "SELECT w FROM tokenkeeper.status AS s, unnest(s.warnings) AS w WHERE w LIKE '%triggers%'",
                user: "a_reader")
        }
        #expect(try strays() == "")
        try devices.database.psql("DELETE FROM tokenkeeper.attached_table", user: "owner")
        let command = "SELECT tokenkeeper.detach('app.phones')"
        #expect(
            try strays()
                == "the table app.phones has triggers of an attachment that this database does not know, and what they queue is rejected; "
                + "let its owner run `\(command)`")
        try devices.app(command)
        #expect(try strays() == "")
    }

    @Test func `a dump can be restored, also under other names of roles`() throws {
        let devices = try phones("id integer PRIMARY KEY, token text, at timestamptz")
        try devices.app("INSERT INTO app.phones VALUES (1, 'aaaa', now()), (2, 'AA-AA', now())")
        try devices.drain()
        let dump = NSTemporaryDirectory() + "attached-\(UUID().uuidString).dump"
        defer { try? FileManager.default.removeItem(atPath: dump) }
        try TestCluster.run(["pg_dump", "-Fc", "-f", dump, "-d", devices.database.url(user: "postgres")])
        for user in ["postgres", "a_app"] {
            let restored = try TestCluster.shared.database(migrated: false)
            try restored.psql(
                "GRANT ALL ON DATABASE \(restored.name) TO a_app; GRANT ALL ON SCHEMA public TO a_app", user: "postgres"
            )
            try TestCluster.run(
                ["pg_restore", "-d", restored.url(user: user), dump]
                    + (user == "postgres" ? [] : ["--no-owner", "--no-comments"]))
            let owner = user == "postgres" ? "a_daemon" : user
            #expect(try restored.psql("SELECT * FROM tokenkeeper.check_attachments()", user: owner) == "")
            try restored.psql("DELETE FROM app.phones WHERE id = 1", user: "a_app")
            #expect(
                try restored.psql("SELECT token, unregistered FROM tokenkeeper.registration", user: user) == "aaaa|t")
            let source = try restored.psql(
                "SELECT source_id FROM tokenkeeper.begin_backfill('app.phones')", user: "a_app")
            #expect(try restored.psql("SELECT queued FROM tokenkeeper.backfill_next(\(source))", user: "a_app") == "1")
            try restored.psql("SELECT tokenkeeper.detach('app.phones')", user: "a_app")
        }
    }
}
