import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Real tables, as public code and bug reports show them: `attach` in one statement, and what then arrives.
@Suite(.ownThread) struct `Tables of real applications` {
    private func attached(_ table: String, index: String, _ arguments: String, first: String = "SELECT") throws
        -> AttachedDevices
    {
        let devices = try AttachedDevices()
        try devices.app(first)
        try devices.app(
            "DROP TABLE app.devices; CREATE TABLE app.devices (\(table)); CREATE INDEX ON app.devices \(index)")
        try devices.app("SELECT FROM tokenkeeper.attach('app.devices', \(arguments))")
        return devices
    }

    /// Topic, environment, token, registered_at, device, user and tags of what is queued.
    private func facts(_ devices: AttachedDevices) throws -> [String] {
        try devices.database.psql(
            """
            SELECT concat_ws(' ', topic, environment, left(token, 8), CASE WHEN unregistered THEN 'out' ELSE to_char(registered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI') END,
                device_id, user_id, tags::text) FROM tokenkeeper.registration ORDER BY queued_at
            """
        ).split(separator: "\n").map(String.init)
    }

    @Test func `iOS and Android in one table`() throws {
        let devices = try attached(
            "id bigserial PRIMARY KEY, user_id bigint NOT NULL, platform varchar(16) NOT NULL, token text NOT NULL, created_at timestamptz NOT NULL DEFAULT now()",
            index: "(token)",
            "token => 'token', topic => $$'com.example.app'$$, filter => $$platform = 'ios'$$, registered_at => 'created_at', user_id => 'user_id'"
        )
        try devices.app(
            """
            INSERT INTO app.devices (user_id, platform, token, created_at) VALUES (1, 'ios', 'aaaaaaaa', '2026-01-01Z'), (2, 'android', 'dQw4:APA91b', now()),
                (3, 'android', 'bbbbbbbb', now()), (4, 'web', 'https://x', now())
            """)
        #expect(try facts(devices) == ["com.example.app production aaaaaaaa 2026-01-01T00:00 1"])
        try devices.forgetQueue()
        try devices.app("UPDATE app.devices SET token = token || 'cc' WHERE platform <> 'ios'")
        try devices.app("DELETE FROM app.devices WHERE platform <> 'ios'")
        #expect(try facts(devices) == [])
    }

    @Test func `the number of an app, a sandbox flag, an owner in two columns, a list in a text`() throws {
        let devices = try attached(
            "id integer PRIMARY KEY, push_token text, app_id integer, is_dev boolean, last_seen timestamp, device_uuid uuid, owner_type text, owner_id integer, topics text, logged_out_at timestamptz",
            index: "(app_id, push_token); CREATE INDEX ON app.devices (push_token)",
            """
            token => 'push_token', topic => $$CASE app_id WHEN 1 THEN 'com.example.bank' WHEN 2 THEN 'com.example.pay' END$$,
            environment => $$CASE WHEN is_dev THEN 'sandbox' ELSE 'production' END$$, registered_at => $$last_seen AT TIME ZONE 'Europe/Berlin'$$,
            device_id => 'device_uuid', user_id => $$owner_type || ':' || owner_id$$, tags => $$string_to_array(topics, ',')$$,
            logged_out => 'logged_out_at IS NOT NULL'
            """)
        try devices.app(
            """
            INSERT INTO app.devices VALUES (1, 'aaaaaaaa', 1, false, '2026-07-01 12:00', md5('1')::uuid, 'User', 5, 'a,b', NULL),
                (2, 'bbbbbbbb', 2, true, '2026-01-01 12:00', NULL, 'Admin', 5, NULL, NULL), (3, 'cccccccc', 2, true, now(), NULL, NULL, NULL, NULL, now())
            """)
        #expect(
            try facts(devices) == [
                "com.example.bank production aaaaaaaa 2026-07-01T10:00 c4ca4238-a0b9-2382-0dcc-509a6f75849b User:5 {a,b}",
                "com.example.pay sandbox bbbbbbbb 2026-01-01T11:00  Admin:5 {}",
                "com.example.pay sandbox cccccccc out",
            ])
    }

    @Test func `an alert and a VoIP token in one row are two attachments`() throws {
        let devices = try attached(
            "id uuid PRIMARY KEY, apn_token text, voip_token text, last_seen timestamptz, logged_out boolean DEFAULT false",
            index: "(apn_token); CREATE INDEX ON app.devices (voip_token) WHERE voip_token IS NOT NULL",
            "token => 'apn_token', topic => $$'com.example.app'$$, registered_at => 'last_seen', logged_out => 'logged_out'"
        )
        try devices.app(
            "SELECT FROM tokenkeeper.attach('app.devices', token => 'voip_token', topic => $$'com.example.app.voip'$$, registered_at => 'last_seen', logged_out => 'logged_out', name => 'voip')"
        )
        try devices.app("INSERT INTO app.devices VALUES (md5('1')::uuid, 'aaaaaaaa', 'bbbbbbbb', '2026-01-01Z')")
        try devices.drain()
        try devices.app("UPDATE app.devices SET logged_out = true")
        try devices.drain()
        #expect(
            try devices.database.psql("SELECT topic, token, state FROM tokenkeeper.token ORDER BY 1")
                == "com.example.app|aaaaaaaa|unregistered_by_app\ncom.example.app.voip|bbbbbbbb|unregistered_by_app")
        try devices.app("SELECT tokenkeeper.detach('voip')")
        #expect(try devices.app("SELECT name FROM tokenkeeper.attachment") == "app.devices")
    }

    @Test func `Synapse's pushers: base64, milliseconds, several apps and kinds`() throws {
        let devices = try attached(
            "id bigint PRIMARY KEY, user_name text NOT NULL, kind text NOT NULL, app_id text NOT NULL, pushkey text NOT NULL, ts bigint NOT NULL, enabled boolean, device_id text",
            index: "(tokenkeeper.parse_token(pushkey, true))",
            """
            token => $$tokenkeeper.parse_token(pushkey, true)$$, topic => $$regexp_replace(app_id, '[.](dev|prod)$', '')$$,
            environment => $$CASE WHEN app_id LIKE '%.dev' THEN 'sandbox' ELSE 'production' END$$, filter => $$kind = 'http' AND app_id LIKE 'im.vector.%'$$,
            registered_at => 'to_timestamp(ts / 1000.0)', logged_out => 'NOT enabled', user_id => 'user_name', device_id => 'device_id'
            """)
        try devices.app(
            """
            INSERT INTO app.devices VALUES (1, '@a:x', 'http', 'im.vector.app.ios.prod', 'qqqqqqqq', 1759312800000, true, 'D'),
                (2, '@b:x', 'http', 'im.vector.app.ios.dev', 'u7u7u7u7', 1759312800000, NULL, NULL), (3, '@c:x', 'email', 'm.email', 'a@b.c', 1759312800000, true, NULL),
                (4, '@d:x', 'http', 'org.other', 'zMzMzMzM', 1759312800000, true, NULL)
            """)
        #expect(
            try facts(devices) == [
                "im.vector.app.ios production aaaaaaaa 2025-10-01T10:00 D @a:x",
                "im.vector.app.ios sandbox bbbbbbbb 2025-10-01T10:00  @b:x",
            ])
        try devices.forgetQueue()
        try devices.app("UPDATE app.devices SET enabled = false WHERE id < 3")
        #expect(
            try facts(devices) == [
                "im.vector.app.ios production aaaaaaaa out", "im.vector.app.ios sandbox bbbbbbbb out",
            ])
    }

    @Test func `Parse's installations: quoted names, tags in jsonb, an empty channel`() throws {
        let devices = try AttachedDevices()
        try devices.app(
            """
            CREATE TABLE app."_Installation" ("objectId" text PRIMARY KEY, "updatedAt" timestamptz, "installationId" text, "deviceToken" text, "channels" jsonb, "deviceType" text,
                "appIdentifier" text);
            CREATE INDEX ON app."_Installation" ("deviceToken")
            """)
        try devices.app(
            """
            SELECT FROM tokenkeeper.attach('app."_Installation"', token => 'deviceToken', topic => 'appIdentifier', filter => $$"deviceType" = 'ios'$$,
                registered_at => 'updatedAt', device_id => 'installationId', tags => 'channels')
            """)
        try devices.app(
            """
            INSERT INTO app."_Installation" VALUES ('a', '2026-01-01Z', 'D', 'aaaaaaaa', '["","news"]', 'ios', 'com.example.app'), ('b', '2026-01-01Z', 'E', 'bbbbbbbb', NULL, 'ios', 'com.example.app')
            """)
        try devices.drain()
        #expect(
            try devices.database.psql("SELECT token, state, tags FROM tokenkeeper.token ORDER BY 1")
                == "aaaaaaaa|active|{news}\nbbbbbbbb|active|{}")
    }

    @Test func `a flag that goes off and on again, a deleted row that comes back, a token that comes back`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (id, push_token, last_seen) VALUES (1, 'aaaa', now() - interval '1 day'), (2, 'bbbb', now() - interval '1 day')"
        )
        try devices.drain()
        for (off, on) in [
            ("UPDATE app.devices SET logged_out_at = now()", "UPDATE app.devices SET logged_out_at = NULL"),
            (
                "UPDATE app.devices SET push_token = NULL",
                "UPDATE app.devices SET push_token = CASE id WHEN 1 THEN 'aaaa' ELSE 'bbbb' END"
            ),
            (
                "CREATE TABLE app.backup AS TABLE app.devices; DELETE FROM app.devices",
                "INSERT INTO app.devices TABLE app.backup"
            ),
        ] {
            try devices.app(off)
            try devices.drain()
            #expect(try devices.states() == "aaaa unregistered_by_app, bbbb unregistered_by_app", "\(off)")
            // APNs says meanwhile that one of them is dead.
            try devices.app(on)
            try devices.drain()
            #expect(try devices.states() == "aaaa active, bbbb active", "\(on)")
        }
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET stale_at = clock_timestamp() WHERE token_key = '\\xbbbb'; SELECT tokenkeeper.recompute_tokens()"
        )
        try devices.app("UPDATE app.devices SET logged_out_at = now(); UPDATE app.devices SET logged_out_at = NULL")
        try devices.drain()
        #expect(try devices.states() == "aaaa active, bbbb stale")
    }

    @Test func `of two people on one phone, the one who stays has it`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, user_id, tags) VALUES ('aaaa', now(), 1, '{anna}'), ('AAAA', now(), 2, '{bob}')"
        )
        try devices.drain()
        #expect(try devices.database.psql("SELECT user_id, tags FROM tokenkeeper.token") == "2|{bob}")
        try devices.app("DELETE FROM app.devices WHERE user_id = 2")
        try devices.drain()
        #expect(try devices.database.psql("SELECT state, user_id, tags FROM tokenkeeper.token") == "active|1|{anna}")
    }

    @Test func `a row whose device is written in upper case is of the same device`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device) VALUES ('aaaa', now() - interval '1 day', 'e621e1f8-c36c-495a-93fc-0c247a3e6e5f')"
        )
        try devices.drain()
        try devices.database.psql(
            "SELECT tokenkeeper.register('bbbb', 't', device_id => 'E621E1F8-C36C-495A-93FC-0C247A3E6E5F')")
        #expect(try devices.states() == "aaaa superseded, bbbb active")
    }

    @Test func `rows of one instant supersede nobody`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device) SELECT lpad(to_hex(i), 4, '0'), '2026-01-01', 'd' || i / 2 FROM generate_series(2, 21) AS i"
        )
        try devices.drain()
        #expect(try devices.database.psql("SELECT state, count(*) FROM tokenkeeper.token GROUP BY 1") == "active|20")
    }

    @Test func `columns may be widened, renamed and dropped`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app("ALTER TABLE app.devices ALTER push_token TYPE varchar(400)")
        try devices.app("INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now())")
        try devices.app("UPDATE app.devices SET push_token = 'bbbb'")
        #expect(try devices.queued() == ["aaaa   {}", "bbbb   {}", "aaaa out"])
        try devices.app("ALTER TABLE app.devices DROP COLUMN tags")
        try devices.app("UPDATE app.devices SET push_token = 'cccc'")
        #expect(
            try devices.database.psql("SELECT fault FROM tokenkeeper.check_attachments()", user: "a_daemon").hasPrefix(
                "columns were dropped, or have other names now: tags"))
    }

    @Test func `a dump of the table alone can be restored and written to where the schema is missing`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        // pg_dump -t app.devices with its functions: dropping the schema is the same.
        try devices.database.psql("DROP SCHEMA tokenkeeper CASCADE", user: "postgres")
        try devices.app("INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now())")
        try devices.app("UPDATE app.devices SET push_token = 'bbbb'")
        try devices.app("DELETE FROM app.devices")
    }

    @Test func `one bad row of a statement costs itself only, and its correction arrives`() throws {
        let devices = try attached(
            "id serial PRIMARY KEY, token text, at text", index: "(token)",
            "token => 'token', topic => $$'t'$$, registered_at => 'at::timestamptz', on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (token, at) VALUES ('aa', '2026-01-01Z'), ('bb', 'never'), ('cc', '2026-01-01Z')")
        #expect(try devices.queued() == ["aa", "cc"])
        try devices.app("UPDATE app.devices SET at = '2026-01-02Z' WHERE token = 'bb'")
        try devices.app("UPDATE app.devices SET at = 'never', token = 'dd' WHERE token = 'aa'")
        try devices.app("DELETE FROM app.devices WHERE token <> 'bb'")
        #expect(try devices.queued() == ["aa", "cc", "bb", "cc out"])
        #expect(
            try devices.database.psql(
                "SELECT state, count(*) FROM tokenkeeper.attachment_failure GROUP BY 1") == "22007|4")
        try devices.forgetQueue()
        try devices.app("INSERT INTO app.devices (token, at) VALUES ('ee', 'never'), ('ff', '2026-01-01Z')")
        try devices.forgetQueue()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        var (queued, failed, finished) = (0, 0, false)
        while !finished {
            let row = try devices.app("SELECT queued, failed, finished FROM tokenkeeper.backfill_next(\(source), 8)")
                .split(separator: "|")
            queued += Int(row[0]) ?? 0
            failed += Int(row[1]) ?? 0
            finished = row[2] == "t"
        }
        #expect((queued, failed) == (2, 1))
        #expect(try devices.queued() == ["bb", "ff"])
    }

    @Test func `an ASSERT in a function of the owner fails no write`() throws {
        let devices = try attached(
            "id serial PRIMARY KEY, token text", index: "(token)",
            "token => 'token', topic => $$'t'$$, user_id => 'app.who(token)'",
            first: """
                CREATE FUNCTION app.who(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN ASSERT $1 <> 'bb'; RETURN 'u' || $1; END $$
                """)
        try devices.app("INSERT INTO app.devices (token) VALUES ('aa'), ('bb')")
        try devices.app("UPDATE app.devices SET token = 'bb' WHERE token = 'aa'")
        #expect(try devices.queued() == ["aa uaa"])
    }

    @Test func `a comparison that would mean something else in a trigger is refused`() throws {
        let devices = try AttachedDevices()
        try devices.database.psql("CREATE EXTENSION citext SCHEMA app", user: "postgres")
        try devices.app("ALTER TABLE app.devices ADD platform app.citext, ADD app app.citext")
        let attach = "SELECT kind, detail FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => "
        for (topic, filter) in [
            ("$$CASE app WHEN 'rider' THEN 'com.example.rider' ELSE 'com.example.driver' END$$", "'true'"),
            ("'bundle_id'", "$$platform IS NOT DISTINCT FROM 'ios'$$"),
            ("'bundle_id'", "$$NULLIF(platform, 'ios') IS NULL$$"),
        ] {
            #expect(
                try devices.app("\(attach)\(topic), filter => \(filter), dry_run => true)").contains(
                    "cast them, such as lower(column::text)"), "\(topic) \(filter)")
        }
        try devices.app(
            "\(attach)$$CASE lower(app::text) WHEN 'rider' THEN 'com.example.rider' ELSE 'com.example.driver' END$$, filter => $$platform = 'ios'$$)"
        )
        try devices.app("INSERT INTO app.devices (push_token, platform, app) VALUES ('aa', 'iOS', 'Rider')")
        #expect(
            try devices.database.psql("SELECT token, topic FROM tokenkeeper.registration") == "aa|com.example.rider")
    }

    @Test func `two attachments of a table with one topic are refused`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        let error = #expect(throws: (any Error).self) {
            try devices.attach("name => 'other', filter => 'badge = 1'")
        }
        #expect("\(String(describing: error))".contains("another attachment of the table has this topic"))
    }

    @Test func `a table whose name has a blank, found without its schema`() throws {
        let devices = try AttachedDevices()
        try devices.app("ALTER TABLE app.devices RENAME TO \"my Devices\"")
        try devices.app(
            "SELECT FROM tokenkeeper.attach('\"my Devices\"', token => 'push_token', topic => 'bundle_id', logged_out => 'logged_out_at IS NOT NULL')"
        )
        try devices.app("INSERT INTO app.\"my Devices\" (push_token) VALUES ('aa')")
        #expect(try devices.queued() == ["aa"])
        let error = #expect(throws: (any Error).self) {
            try devices.app("SELECT FROM tokenkeeper.attach('Mydevices', token => 'push_token', topic => 'bundle_id')")
        }
        #expect("\(String(describing: error))".contains("Write the schema and the name as SQL does"))
    }
}
