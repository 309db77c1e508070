import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Who may attach and backfill a table, and who sees that it is attached.
@Suite(.ownThread) struct `Rights to attached tables` {
    private func failure(_ body: () throws -> Void) -> String {
        do {
            try body()
            return ""
        } catch { return "\(error)" }
    }

    private static let attach = "SELECT FROM tokenkeeper.attach('app.devices', \(AttachedDevices.arguments))"

    /// Runs `work` with a login of its own, which all databases of the cluster share.
    private func login(_ rights: String, in database: TestDatabase, _ work: (String) throws -> Void) throws {
        let name = "login_\(UInt32.random(in: 0...UInt32.max))"
        try database.psql("CREATE ROLE \(name) LOGIN \(rights)", user: "postgres")
        defer { _ = try? database.psql("DROP OWNED BY \(name) CASCADE; DROP ROLE \(name)", user: "postgres") }
        try work(name)
    }

    @Test func `a superuser is refused, whatever role it has set`() throws {
        let devices = try AttachedDevices()
        for before in ["", "SET ROLE a_app;", "SET SESSION AUTHORIZATION a_app;"] {
            for call in [Self.attach, Self.attach.dropLast() + ", dry_run => true)"] {
                let error = failure { try devices.database.psql(before + call, user: "postgres") }
                #expect(error.contains("is a superuser"), "\(before) \(call): \(error)")
            }
        }
        try devices.attach()
        for before in ["", "SET ROLE a_app;", "SET SESSION AUTHORIZATION a_app;"] {
            let error = failure {
                try devices.database.psql(
                    before + "SELECT FROM tokenkeeper.begin_backfill('app.devices')", user: "postgres")
            }
            #expect(error.contains("is a superuser"), "\(before): \(error)")
        }
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        for call in ["backfill_next(\(source))", "lock_backfill(\(source))"] {
            let error = failure { try devices.database.psql("SELECT FROM tokenkeeper.\(call)", user: "postgres") }
            #expect(error.contains("is a superuser"), "\(call): \(error)")
        }
    }

    @Test(arguments: [
        "tokenkeeper_operator", "tokenkeeper_daemon", "tokenkeeper_reader", "tokenkeeper_sender", "owner",
    ])
    func `a member of the table's owner with another role of ours is refused`(role: String) throws {
        let devices = try AttachedDevices()
        try login("IN ROLE a_app, \(role)", in: devices.database) { name in
            let error = failure { try devices.database.psql(Self.attach, user: name) }
            #expect(
                error.contains("is a member of") && error.contains(role), "\(role): \(error)")
            #expect(
                failure { try devices.database.psql("SET ROLE a_app; " + Self.attach, user: name) }.contains(
                    "is a member of"))
            try devices.attach()
            let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
            for call in ["begin_backfill('app.devices')", "backfill_next(\(source))"] {
                #expect(
                    failure { try devices.database.psql("SELECT FROM tokenkeeper.\(call)", user: name) }.contains(
                        "is a member of"))
            }
        }
        // Without it, the member attaches and backfills for the owner.
        try login("IN ROLE a_app", in: devices.database) { name in
            let source = try devices.database.psql(
                "SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')", user: name)
            #expect(
                try devices.database.psql("SELECT finished FROM tokenkeeper.backfill_next(\(source))", user: name)
                    == "t")
        }
    }

    @Test(arguments: ["CREATEROLE", "CREATEDB", "REPLICATION", "BYPASSRLS"])
    func `a member of the table's owner with a right that the owner lacks is refused`(right: String) throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try login("\(right) IN ROLE a_app", in: devices.database) { name in
            for call in [
                "tokenkeeper.begin_backfill('app.devices')", "tokenkeeper.attach('app.devices', 'push_token')",
            ] {
                let error = failure { try devices.database.psql("SELECT FROM \(call)", user: name) }
                #expect(error.contains("and the owner of app.devices, a_app, may not"), "\(call): \(error)")
            }
        }
        try login("IN ROLE a_app, pg_read_all_data", in: devices.database) { name in
            let error = failure {
                try devices.database.psql("SELECT FROM tokenkeeper.begin_backfill('app.devices')", user: name)
            }
            #expect(error.contains("is a member of pg_read_all_data"), "\(error)")
        }
    }

    @Test func `a backfill does not call a function that the owner of the schema has put in place of the table's`()
        throws
    {
        let devices = try AttachedDevices()
        let attachment = try devices.attach()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.database.psql(
            """
            DROP FUNCTION app.tokenkeeper_read_\(attachment)(text, integer);
            CREATE FUNCTION app.tokenkeeper_read_\(attachment)(text, integer) RETURNS TABLE (key text, environment text, topic text, token text,
                registered_at timestamptz, device_id text, user_id text, tags text[], unregistered boolean, stale_at timestamptz)
            LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''trapped''; END'
            """, user: "postgres")
        let error = failure { try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))") }
        #expect(error.contains("does not belong to its owner"), "\(error)")
    }

    @Test func `rows of a backfill that are too long are refused by their sizes, and cut`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        let counts = try devices.app(
            """
            SELECT queued, refused FROM tokenkeeper.store_backfill(\(source), false, '{1,2,3}', '{production,production,production}', '{t,t,t}',
                ARRAY[repeat('ab', 9000000), repeat('ab', 32), repeat('cd', 32)], ARRAY[now(), now(), now()], '{NULL,NULL,NULL}', '{NULL,NULL,NULL}',
                ARRAY[NULL, (SELECT jsonb_agg(md5(i::text)) FROM generate_series(1, 40000) AS i), NULL], '{f,f,f}', '{NULL,NULL,NULL}')
            """)
        #expect(counts == "1|2")
        let kept = try devices.database.psql(
            "SELECT octet_length(token), tags IS NULL, left(error, 60) FROM tokenkeeper.rejected_registration ORDER BY 1"
        )
        #expect(
            kept.wholeMatch(
                of:
                    #/64\|t\|tags takes \d+ bytes, expected at most 1048576; row '2' \n1024\|t\|the row is too long: 180000\d\d bytes, expected at most .*/#
            )
                != nil, "\(kept)")
    }

    @Test func `the daemon's look at attached tables waits for no lock of their owners`() throws {
        let devices = try AttachedDevices(
            table: """
                app.devices (id bigint, push_token text, bundle_id text DEFAULT 't', last_seen timestamptz, device text, user_id integer,
                    tags text[], logged_out_at timestamptz, PRIMARY KEY (id)) PARTITION BY RANGE (id);
                CREATE TABLE app.part PARTITION OF app.devices FOR VALUES FROM (0) TO (1000)
                """)
        try devices.attach()
        var owner = try devices.database.connect(user: "a_app")
        try owner.run("BEGIN")
        try owner.run("LOCK TABLE app.part IN ACCESS EXCLUSIVE MODE")
        var daemon = try devices.database.connect(user: "a_daemon")
        #expect(try AttachmentChange.noticeNew(on: &daemon).isEmpty)
        try owner.run("ROLLBACK")
    }

    @Test func `a table that was renamed is not looked up under its old name, which somebody else may have taken`()
        throws
    {
        let devices = try AttachedDevices()
        let attachment = try devices.attach("on_delete => 'unregister'")
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now()), ('bbbb', now()), ('cccc', now())")
        try devices.app("ALTER TABLE app.devices RENAME TO devices_old")
        try devices.database.psql(
            """
            CREATE TABLE public.loot (who text);
            GRANT INSERT ON public.loot TO PUBLIC;
            CREATE FUNCTION app.pwn() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.loot VALUES (current_user); RETURN NULL; END';
            CREATE VIEW app.devices AS SELECT 1::bigint AS id, t.t::varchar AS push_token, 't'::text AS bundle_id, now() AS last_seen, NULL::text AS device,
                NULL::integer AS user_id, NULL::text[] AS tags, app.pwn() AS logged_out_at, 0 AS badge FROM unnest('{aaaa,bbbb,cccc}'::text[]) AS t;
            GRANT SELECT ON app.devices TO PUBLIC
            """, user: "postgres")
        try devices.forgetQueue()
        for change in [
            "DELETE FROM app.devices_old WHERE push_token = 'aaaa'",
            "UPDATE app.devices_old SET logged_out_at = now() WHERE push_token = 'bbbb'",
            "UPDATE app.devices_old SET push_token = 'dddd' WHERE push_token = 'cccc'",
            "INSERT INTO app.devices_old (push_token, last_seen, logged_out_at) VALUES ('eeee', now(), now())",
        ] {
            try devices.app(change)
        }
        let error = failure { try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))") }
        #expect(error.contains("table app.devices has another name now"), "\(error)")
        #expect(try devices.database.psql("SELECT count(*) FROM public.loot", user: "postgres") == "0")
        #expect(
            try devices.database.psql(
                "SELECT count(*), min(state) FROM tokenkeeper.attachment_failure WHERE source_id = \(attachment)")
                == "4|42P01")
    }

    @Test func `no owner's faults hide those of others in status`() throws {
        let devices = try AttachedDevices()
        try devices.app(
            (1...4).map {
                "CREATE TABLE app.a\($0) (id bigint PRIMARY KEY, push_token text); CREATE INDEX ON app.a\($0) (push_token); "
            }
            .joined())
        for number in 1...4 {
            try devices.app(
                "SELECT FROM tokenkeeper.attach('app.a\(number)', 'push_token', topic_value => 't', revive => 'by register only'); ALTER TABLE app.a\(number) DISABLE TRIGGER ALL"
            )
        }
        var daemon = try devices.database.connect(user: "a_daemon")
        #expect(try AttachmentChange.noticeNew(on: &daemon).count == 4)
        let warnings = try devices.database.psql(
            "SELECT left(w, 40) FROM unnest((SELECT warnings FROM tokenkeeper.status)) AS w WHERE w LIKE '%attached table%'"
        )
        #expect(
            warnings == """
                the changes of the attached table app.a1
                the changes of the attached table app.a2
                more attached tables have faults: 2; see
                """, "\(warnings)")
    }

    @Test func `a plan with more columns than a table can have is refused`() throws {
        let devices = try AttachedDevices()
        let error = failure {
            try devices.app(
                """
                SELECT tokenkeeper.check_attachment_plan('app.devices', jsonb_build_object('pieces', '{"token":1,"token_kind":1,"topic":1,"environment":1,"moment":1,"device":1,"user":1,"tags":1,"out":1,"stale_at":1}'::jsonb,
                    'old_pieces', '{"token":1,"topic":1,"environment":1,"moment":1,"out":1}'::jsonb, 'other_pieces', '{"token":1,"topic":1,"environment":1,"out":1}'::jsonb,
                    'same_device', 'false', 'columns', (SELECT jsonb_agg('id'::text) FROM generate_series(1, 1601)), 'key_columns', '["id"]'::jsonb,
                    'arguments', '{}'::jsonb, 'always', false, 'on_delete', 'ignore', 'revive', 'by registered_at'))
                """)
        }
        #expect(error.contains("more columns than a table can have"), "\(error)")
    }

    @Test func `backticks and line breaks in a table's name do not reach status`() throws {
        let devices = try AttachedDevices()
        try devices.app(#"ALTER TABLE app.devices RENAME TO "a`touch x`"# + "\n" + #"b""#)
        try devices.app(
            "SELECT FROM tokenkeeper.attach('app.\"a`touch x`\nb\"', \(AttachedDevices.arguments)); ALTER TABLE app.\"a`touch x`\nb\" DISABLE TRIGGER ALL"
        )
        var daemon = try devices.database.connect(user: "a_daemon")
        _ = try AttachmentChange.noticeNew(on: &daemon)
        let warning = try devices.database.psql(
            "SELECT w FROM unnest((SELECT warnings FROM tokenkeeper.status)) AS w WHERE w LIKE '%attached table%'")
        #expect(warning.contains("a'touch x'?b") && !warning.contains("`"), "\(warning)")
    }

    @Test func `a table of a superuser, a temporary table and a partition are refused`() throws {
        let devices = try AttachedDevices()
        try devices.app(
            "CREATE TABLE app.parts (LIKE app.devices) PARTITION BY LIST (bundle_id); CREATE TABLE app.part PARTITION OF app.parts DEFAULT; CREATE INDEX ON app.part (push_token)"
        )
        let temporary = "CREATE TEMPORARY TABLE phones (LIKE app.devices INCLUDING ALL); "
        let attached = AttachedDevices.arguments
        #expect(
            failure { try devices.app(temporary + "SELECT FROM tokenkeeper.attach('pg_temp.phones', \(attached))") }
                .contains("is a temporary table"))
        for (before, table) in [
            ("DROP TABLE IF EXISTS pg_temp.phones; " + temporary, "pg_temp.phones"), ("", "app.part"),
        ] {
            let error = failure {
                try devices.app(before + "SELECT tokenkeeper.begin_attachment('\(table)', '{}')")
            }
            #expect(error.contains("is a temporary table, a partition or no table"), "\(table): \(error)")
        }
        try devices.database.psql("ALTER TABLE app.devices OWNER TO postgres", user: "postgres")
        for user in ["postgres", "a_app"] {
            #expect(
                failure { try devices.database.psql(Self.attach, user: user) }.contains(
                    user == "postgres" ? "belongs to the superuser postgres" : "is no member of the owner"))
        }
    }

    @Test func `another login sees nothing of an attachment, and can do nothing with it`() throws {
        let devices = try AttachedDevices()
        let source = try devices.attach()
        let backfill = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try login("IN ROLE tokenkeeper_app", in: devices.database) { stranger in
            for view in ["attachment", "registration_source"] {
                let rows = "SELECT count(*) FROM tokenkeeper.\(view)"
                #expect(try devices.database.psql(rows, user: stranger) == "0", "\(view)")
                for user in ["a_app", "a_reader", "a_operator", "a_daemon"] {
                    #expect(try devices.database.psql(rows, user: user) != "0", "\(view), \(user)")
                }
            }
            for call in [
                "note_attachment_failure(\(source), '22012', NULL)", "detach('app.devices')",
                "end_attachment(\(source))",
                "begin_backfill(\(try devices.app("SELECT 'app.devices'::regclass::oid"))::regclass)",
                "lock_backfill(\(backfill))", "backfill_next(\(backfill))",
                "store_backfill(\(backfill), true, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
            ] {
                #expect(
                    failure { try devices.database.psql("SELECT FROM tokenkeeper.\(call)", user: stranger) } != "",
                    "\(call)")
            }
            // Nor once the table is gone.
            try devices.app("DROP TABLE app.devices")
            for call in ["detach('app.devices')", "end_attachment(\(source))"] {
                #expect(
                    failure { try devices.database.psql("SELECT FROM tokenkeeper.\(call)", user: stranger) } != "",
                    "\(call)")
            }
        }
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
    }
}
