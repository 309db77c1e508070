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
                "tokenkeeper.begin_backfill('app.devices')",
                "tokenkeeper.attach('app.devices', 'push_token', 'bundle_id')",
            ] {
                let error = failure { try devices.database.psql("SELECT FROM \(call)", user: name) }
                #expect(error.contains("and the owner of app.devices, a_app, may not"), "\(call): \(error)")
            }
        }
        try login("IN ROLE a_app", in: devices.database) { name in
            try devices.database.psql("GRANT SELECT ON tokenkeeper.ledger TO \(name)", user: "owner")
            let error = failure {
                try devices.database.psql("SELECT FROM tokenkeeper.begin_backfill('app.devices')", user: name)
            }
            #expect(error.contains("is a member of a role with rights on tokenkeeper.ledger"), "\(error)")
        }
        try login("IN ROLE a_app, pg_read_all_data", in: devices.database) { name in
            let error = failure {
                try devices.database.psql("SELECT FROM tokenkeeper.begin_backfill('app.devices')", user: name)
            }
            #expect(error.contains("is a member of pg_read_all_data"), "\(error)")
        }
    }

    @Test func `a backfill does not execute the expressions of a former owner`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try login("IN ROLE tokenkeeper_app", in: devices.database) { heir in
            try devices.database.psql(
                "ALTER TABLE app.devices OWNER TO \(heir); GRANT USAGE ON SCHEMA app TO \(heir)", user: "postgres")
            let source = try devices.database.psql(
                "SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')", user: heir)
            let error = failure {
                try devices.database.psql("SELECT FROM tokenkeeper.backfill_next(\(source))", user: heir)
            }
            #expect(error.contains("had another owner when it was attached"), "\(error)")
        }
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
                "SELECT FROM tokenkeeper.attach('app.a\(number)', 'push_token', $$'t'$$); ALTER TABLE app.a\(number) DISABLE TRIGGER ALL"
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

    @Test func `a plan that attach cannot have made is refused`() throws {
        let devices = try AttachedDevices()
        let plan = """
            jsonb_build_object('name', 'a', 'facts', '{"token": "1", "topic": "1", "environment": "1"}'::jsonb, 'columns', '[]'::jsonb, 'key_columns', '[]'::jsonb,
                'arguments', '{}'::jsonb, 'always', false, 'on_delete', 'ignore')
            """
        for (change, isRefused) in [
            ("'{}'", false), ("'{\"name\": \"app.others\"}'", true), ("'{\"facts\": {}}'", true),
            ("jsonb_build_object('columns', (SELECT jsonb_agg('id'::text) FROM generate_series(1, 1601)))", true),
            ("jsonb_build_object('arguments', jsonb_build_object('a', repeat('x', 1000000)))", true),
        ] {
            let error = failure {
                try devices.app("SELECT tokenkeeper.begin_attachment('app.devices', \(plan) || \(change)::jsonb)")
            }
            #expect(error.contains("plan is none that attach has made") == isRefused, "\(change): \(error)")
        }
    }

    @Test func `nobody hides an attachment of others by a name`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try login("IN ROLE tokenkeeper_app", in: devices.database) { other in
            try devices.database.psql("CREATE SCHEMA others AUTHORIZATION \(other)", user: "postgres")
            try devices.database.psql(
                """
                CREATE TABLE others.t (id bigint PRIMARY KEY, token text); CREATE INDEX ON others.t (token);
                CREATE TABLE others.devices (LIKE others.t INCLUDING ALL);
                SELECT FROM tokenkeeper.attach('others.t', 'token', $$'t'$$, name => 'devices');
                SELECT FROM tokenkeeper.attach('others.devices', 'token', $$'t'$$)
                """, user: other)
            #expect(try devices.app("SELECT name FROM tokenkeeper.begin_backfill('devices')") == "app.devices")
        }
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
                "begin_backfill('app.devices')", "lock_backfill(\(backfill))", "backfill_next(\(backfill))",
                "advance_backfill(\(backfill), '7', 1, true)",
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
