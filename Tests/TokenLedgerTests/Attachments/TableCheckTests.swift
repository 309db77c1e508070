import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Checks of attached tables` {
    /// Checks the table, and repairs what differs if asked to.
    ///
    /// - Returns: Row (or `-`), token and difference of each.
    @discardableResult
    private func check(
        _ devices: AttachedDevices, _ table: String = "app.devices", repairs: Bool = false,
        while change: () throws -> Void = {}
    ) throws -> [String] {
        var reader = try devices.database.connect(user: "a_app")
        var writer = try devices.database.connect(user: "a_app")
        let check = try TableCheck(of: table, on: &writer)
        var (found, repaired): ([String], Int64) = ([], 0)
        let isFinished = try check.perform(on: &reader) { page in
            if page.rows > 0 { try change() }
            found += page.differences.map { "\($0.row ?? "-") \($0.token) \($0.difference)" }
            if repairs { repaired += try check.repair(page, on: &writer) }
            return true
        }
        #expect(isFinished && repaired == (repairs ? Int64(found.count) : 0))
        try check.end(differences: Int64(found.count), repaired: repaired, on: &writer)
        return found
    }

    private func same(
        _ found: [String], _ wanted: [String], _ comment: Comment? = nil, at place: SourceLocation = #_sourceLocation
    ) {
        #expect(found == wanted, comment, sourceLocation: place)
    }

    /// What happens to the table while its triggers are disabled.
    private func missed(_ devices: AttachedDevices, _ changes: String) throws {
        try devices.app(
            "ALTER TABLE app.devices DISABLE TRIGGER USER; \(changes); ALTER TABLE app.devices ENABLE TRIGGER USER")
    }

    private func devices(_ more: String = "on_delete => 'unregister'") throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try devices.attach(more)
        try devices.app(
            """
            INSERT INTO app.devices (push_token, last_seen, device, user_id, tags)
            SELECT lpad(to_hex(i), 4, '0'), now() - interval '3 days', 'd' || i, i, '{a}' FROM generate_series(1, 9) AS i
            """)
        return devices
    }

    @Test func `each difference is named, and repaired`() throws {
        let devices = try devices()
        try same(check(devices), [], "what is queued is no difference")
        try devices.forgetQueue()
        try same(check(devices, repairs: true), (1...9).map { "\($0) 000\($0) unknown" })
        try same(check(devices), [], "nor are its own repairs")
        try devices.drain()
        try same(check(devices), [])
        try missed(
            devices,
            """
            UPDATE app.devices SET logged_out_at = now() WHERE id = 1;
            DELETE FROM app.devices WHERE id = 2;
            UPDATE app.devices SET user_id = 77 WHERE id = 3;
            UPDATE app.devices SET device = 'other' WHERE id = 4;
            UPDATE app.devices SET tags = '{b}' WHERE id = 5;
            UPDATE app.devices SET last_seen = now() WHERE id = 6;
            -- A clock that is ahead.
            UPDATE app.devices SET last_seen = now() + interval '1 hour' WHERE id = 7;
            UPDATE app.devices SET push_token = 'bbbb' WHERE id = 8;
            INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now()), ('no token', now()), ('AA-AA', now())
            """)
        try same(
            check(devices, repairs: true),
            [
                "1 0001 not logged out", "3 0003 another user", "4 0004 another device", "5 0005 other tags",
                "6 0006 registered later", "8 bbbb unknown", "10 aaaa unknown", "12 aaaa unknown", "- 0002 no row",
                "- 0008 no row",
            ])
        try devices.drain()
        try same(check(devices), [])
        #expect(
            try devices.states()
                == "0001 unregistered_by_app, 0002 unregistered_by_app, 0003 active, 0004 active, 0005 active, 0006 active, 0007 active, 0008 unregistered_by_app, 0009 active, aaaa active, bbbb active"
        )
        #expect(
            try devices.database.psql(
                "SELECT token, user_id, device_id, tags FROM tokenkeeper.token WHERE token IN ('0003', '0004', '0005') ORDER BY 1"
            ) == "0003|77|d3|{a}\n0004|4|other|{a}\n0005|5|d5|{b}")
        #expect(try devices.app("SELECT differences, checked_at IS NOT NULL FROM tokenkeeper.attachment") == "0|t")
    }

    @Test func `what the application writes during the check wins over the repair`() throws {
        let devices = try devices()
        try devices.drain()
        try missed(
            devices,
            "UPDATE app.devices SET user_id = 77 WHERE id < 3; UPDATE app.devices SET logged_out_at = now() WHERE id BETWEEN 4 AND 5"
        )
        let found = try check(devices, repairs: true) {
            try devices.app(
                """
                UPDATE app.devices SET user_id = 78 WHERE id = 1; UPDATE app.devices SET logged_out_at = NULL WHERE id = 4;
                UPDATE app.devices SET user_id = 79 WHERE id = 9; INSERT INTO app.devices (push_token, last_seen) VALUES ('cccc', now())
                """)
            try devices.drain()
        }
        #expect(
            found == [
                "1 0001 another user", "2 0002 another user", "4 0004 not logged out", "5 0005 not logged out",
            ])
        try devices.drain()
        #expect(
            try devices.database.psql(
                "SELECT token, state, user_id FROM tokenkeeper.token WHERE token IN ('0001', '0002', '0004', '0005', '0009') ORDER BY 1"
            ) == """
                0001|active|78
                0002|active|77
                0004|active|4
                0005|unregistered_by_app|5
                0009|active|79
                """)
        try same(check(devices), [])
    }

    @Test func `what the application or APNs has said otherwise is no difference`() throws {
        let devices = try devices()
        try devices.drain()
        try devices.database.psql(
            """
            SELECT tokenkeeper.unregister('0001', 't'), tokenkeeper.unregister(topic => 't', user_id => '2'), tokenkeeper.register('0003', 't', device_id => 'd3');
            SELECT tokenkeeper.report('t', '0004', 410, 'Unregistered', (extract(epoch FROM now()) * 1000)::bigint)
            """)
        // The flag is older than the registration.
        try missed(devices, "UPDATE app.devices SET logged_out_at = now() WHERE id = 3")
        try devices.drain()
        try same(check(devices), [])
        // A token that was pruned, and whose row is still there.
        try devices.database.psql("DELETE FROM tokenkeeper.ledger WHERE token_key = '\\x0009'")
        try devices.database.psql(
            """
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause)
            SELECT topic_id, '\\x0009', 'pruned', 'stale' FROM tokenkeeper.topic WHERE topic = 't'
            """)
        try same(check(devices), [])
    }

    @Test func `of several rows with a token, one has to agree, whatever their spelling`() throws {
        let devices = try devices()
        try devices.drain()
        try missed(
            devices,
            """
            INSERT INTO app.devices (push_token, last_seen, user_id, logged_out_at) VALUES ('0001', (SELECT last_seen FROM app.devices WHERE id = 1), 50, NULL),
                ('0002', now() - interval '3 days', 2, now()), ('00 03', now() - interval '3 days', 3, NULL);
            DELETE FROM app.devices WHERE id = 3
            """)
        // The other row of 0003 names no device.
        try same(check(devices), ["12 0003 another device"])
    }

    @Test func `an older row does not agree for a newer one`() throws {
        let devices = try devices()
        try devices.drain()
        try missed(
            devices,
            """
            INSERT INTO app.devices (push_token, last_seen, device, user_id, tags) VALUES ('0001', now() - interval '4 days', 'd1', 1, '{a}');
            UPDATE app.devices SET user_id = 77 WHERE id = 1
            """)
        try same(check(devices, repairs: true), ["1 0001 another user"])
        try devices.drain()
        try same(check(devices), [])
    }

    @Test func `a row with the same token that the filter leaves out is not evaluated`() throws {
        let devices = try AttachedDevices(
            table: "app.devices (id bigserial PRIMARY KEY, push_token text, seen text, user_id text)",
            first:
                "CREATE FUNCTION app.is_number(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE COST 1000 AS $$BEGIN RETURN $1 ~ '^[0-9]+$'; END$$"
        )
        try devices.attach(
            "filter => 'app.is_number(seen)'",
            arguments:
                "token => 'push_token', topic => $$'t'$$, registered_at => 'to_timestamp(seen::float8)', user_id => 'user_id'"
        )
        try missed(
            devices,
            "INSERT INTO app.devices (push_token, seen, user_id) VALUES ('0001', '1700000000', 'u1'), ('0001', 'bad', 'u2')"
        )
        try same(check(devices), ["1 0001 unknown"])
    }

    @Test func `an expression that fails whatever the rows are ends the check and the backfill`() throws {
        let devices = try AttachedDevices(
            table: "app.devices (id bigserial PRIMARY KEY, push_token text, platform app.platform)",
            first: "CREATE TYPE app.platform AS ENUM ('ios', 'web')")
        try devices.attach("filter => $$platform = 'ios'$$", arguments: "token => 'push_token', topic => $$'t'$$")
        try devices.app(
            "INSERT INTO app.devices (push_token, platform) VALUES ('0001', 'ios'), ('0002', 'ios'); ALTER TYPE app.platform RENAME VALUE 'ios' TO 'apple'"
        )
        #expect(throws: DatabaseError.self) { try check(devices) }
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        #expect(throws: (any Error).self) { try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))") }
    }

    @Test func `a row that cannot be read hides no other token without a row`() throws {
        let devices = try AttachedDevices(
            table: "app.devices (id bigserial PRIMARY KEY, push_token text, logged_out text DEFAULT 'f')")
        try devices.attach(
            "on_delete => 'unregister'",
            arguments: "token => 'push_token', topic => $$'t'$$, logged_out => 'logged_out::boolean'")
        try devices.app(
            "INSERT INTO app.devices (push_token) SELECT lpad(to_hex(i), 4, '0') FROM generate_series(1, 40) AS i")
        try devices.drain()
        try missed(
            devices,
            "UPDATE app.devices SET logged_out = '' WHERE id % 3 = 0; DELETE FROM app.devices WHERE id IN (2, 3)")
        try same(check(devices, repairs: true), ["- 0002 no row", "- 0003 no row"])
        try devices.drain()
        try same(check(devices), [])
    }

    @Test func `a logout in a table that has taken the place of another is found`() throws {
        let devices = try devices()
        try devices.drain()
        try devices.app(
            "SELECT tokenkeeper.detach('app.devices'); UPDATE app.devices SET logged_out_at = now() WHERE id = 1")
        try devices.attach("on_delete => 'unregister'")
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))")
        try devices.drain()
        try same(check(devices, repairs: true), ["1 0001 not logged out"])
        try devices.drain()
        try same(check(devices), [])
        #expect(try devices.states().hasPrefix("0001 unregistered_by_app, 0002 active"))
    }

    @Test func `if only a row is left that is logged out, its token is logged out, though another row had it later`()
        throws
    {
        let devices = try devices()
        try devices.app(
            """
            UPDATE app.devices SET logged_out_at = now() WHERE id = 1;
            INSERT INTO app.devices (push_token, last_seen) VALUES ('0001', now())
            """)
        try devices.drain()
        try same(check(devices), [])
        try missed(devices, "DELETE FROM app.devices WHERE push_token = '0001' AND logged_out_at IS NULL")
        try same(check(devices, repairs: true), ["1 0001 not logged out"])
        try devices.drain()
        try same(check(devices), [])
        #expect(try devices.states().hasPrefix("0001 unregistered_by_app, 0002 active"))
    }

    @Test func `with on_delete => ignore, a deleted row says nothing, and one that the filter leaves out is a logout`()
        throws
    {
        let devices = try devices("filter => 'badge = 0'")
        try devices.drain()
        try missed(devices, "DELETE FROM app.devices WHERE id = 1; UPDATE app.devices SET badge = 1 WHERE id = 2")
        try same(check(devices, repairs: true), ["- 0002 no row"])
        try devices.drain()
        #expect(try devices.states().hasPrefix("0001 active, 0002 unregistered_by_app, 0003 active"))
        try same(check(devices), [])
    }

    @Test func `a token that another table or the application has registered since is left alone`() throws {
        let devices = try devices()
        try devices.app(
            "CREATE TABLE app.others (LIKE app.devices INCLUDING ALL); SELECT FROM tokenkeeper.attach('app.others', \(AttachedDevices.arguments), on_delete => 'unregister')"
        )
        try devices.drain()
        try devices.app("DELETE FROM app.devices WHERE id < 3")
        try devices.drain()
        try devices.database.psql("SELECT tokenkeeper.register('0001', 't')")
        try devices.app("INSERT INTO app.others (push_token, last_seen) VALUES ('0002', now())")
        try devices.drain()
        try same(check(devices), [])
        // The other table has the token, too: its check takes back the logout of this one.
        try devices.app("INSERT INTO app.others (push_token, last_seen) VALUES ('0004', now() - interval '3 days')")
        try devices.drain()
        try devices.app("DELETE FROM app.devices WHERE id = 4")
        try devices.drain()
        #expect(try devices.states().contains("0004 unregistered_by_app"))
        try same(check(devices, "app.others", repairs: true), ["11 0004 logged out"])
        try devices.drain()
        #expect(try devices.states().contains("0004 active"))
        for table in ["app.devices", "app.others"] { try same(check(devices, table), []) }
    }

    @Test
    func
        `a missed registration revives a dead token, though it is less than a day later, and a clock that is ahead does nothing`()
        throws
    {
        let devices = try devices()
        try devices.drain()
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET stale_at = registered_at + interval '1 hour' WHERE token_key IN ('\\x0001', '\\x0002', '\\x0003'); SELECT tokenkeeper.recompute_tokens()"
        )
        try missed(
            devices,
            """
            UPDATE app.devices SET last_seen = last_seen + interval '2 hours' WHERE id = 1; UPDATE app.devices SET last_seen = last_seen + interval '30 minutes' WHERE id = 2;
            UPDATE app.devices SET last_seen = now() + interval '1 hour', user_id = 70 WHERE id IN (3, 4);
            UPDATE app.devices SET last_seen = now() + interval '1 hour', logged_out_at = now() WHERE id = 5
            """)
        try same(check(devices, repairs: true), ["1 0001 registered later"])
        try devices.drain()
        #expect(try devices.states().hasPrefix("0001 active, 0002 stale, 0003 stale, 0004 active, 0005 active"))
        // Nor does a backfill log such a device out.
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(source))")
        try devices.drain()
        #expect(try devices.states().contains("0005 active"))
    }

    @Test func `two tables that have a token with one instant do not take turns`() throws {
        let devices = try AttachedDevices()
        let arguments = "token => 'push_token', topic => 'bundle_id', logged_out => 'logged_out_at IS NOT NULL'"
        try devices.attach(arguments: arguments)
        try devices.app(
            "CREATE TABLE app.others (LIKE app.devices INCLUDING ALL); SELECT FROM tokenkeeper.attach('app.others', \(arguments))"
        )
        try devices.app(
            "INSERT INTO app.devices (push_token, logged_out_at) VALUES ('aa', now()); INSERT INTO app.others (push_token) VALUES ('aa')"
        )
        try devices.drain()
        for _ in 1...2 {
            for table in ["app.devices", "app.others"] {
                try same(check(devices, table, repairs: true), [])
                try devices.drain()
            }
        }
        #expect(try devices.states() == "aa active")
    }

    @Test func `a row that cannot be read ends no check`() throws {
        let devices = try AttachedDevices()
        try devices.attach(
            arguments:
                "token => 'push_token', topic => 'bundle_id', filter => 'device::integer = 1', on_delete => 'unregister'"
        )
        try devices.app(
            "INSERT INTO app.devices (push_token, device) VALUES ('aa', '1'), ('bb', '1'), ('cc', 'x'), ('dd', '1')")
        try devices.drain()
        try missed(devices, "UPDATE app.devices SET push_token = 'ee' WHERE push_token = 'dd'")
        try same(check(devices), ["4 ee unknown", "- dd no row"])
        #expect(try devices.app("SELECT differences FROM tokenkeeper.attachment") == "2")
    }

    @Test func `what was registered later than the row knows better`() throws {
        let devices = try devices()
        try devices.drain()
        try devices.database.psql(
            """
            SELECT tokenkeeper.register('0001', 't', user_id => 'bob'), tokenkeeper.register('0002', 't');
            SELECT tokenkeeper.tag(topic => 't', token => '0003', add => '{news}')
            """)
        try missed(
            devices,
            "UPDATE app.devices SET logged_out_at = now() WHERE id = 2; UPDATE app.devices SET user_id = 50 WHERE id = 1"
        )
        try same(check(devices), [])
    }

    @Test func `what the daemon leaves out is no difference`() throws {
        let devices = try devices()
        try devices.app(
            "UPDATE app.devices SET tags = ARRAY['', 'x', NULL, repeat('y', 600)] WHERE id = 1; UPDATE app.devices SET device = repeat('z', 600) WHERE id = 2; UPDATE app.devices SET device = 'unknown' WHERE id = 3"
        )
        try devices.drain()
        try same(check(devices), [])
        #expect(
            try devices.database.psql("SELECT registrations, source_id, example FROM tokenkeeper.amended_registration")
                == "2|1|a tag is 600 bytes long, expected 1 to 512 bytes; row '1'")
    }

    @Test func `if all rows of a token differ, one is repaired, and the next check agrees`() throws {
        let devices = try devices()
        try devices.drain()
        try missed(
            devices,
            """
            INSERT INTO app.devices (push_token, last_seen, device, user_id) VALUES ('eeee', '2026-01-01', 'z', 1), ('eeee', '2026-01-01', 'a', 2);
            UPDATE app.devices SET user_id = 50 WHERE id = 1
            """)
        try same(check(devices, repairs: true), ["1 0001 another user", "10 eeee unknown"])
        try devices.drain()
        try same(check(devices), [])
    }

    @Test func `nobody else can check the table, and a check tells nothing of tokens of others`() throws {
        let devices = try devices()
        let check = try devices.app("SELECT source_id FROM tokenkeeper.begin_check('app.devices')")
        let calls = [
            "begin_check('app.devices')", "check_rows(\(check), NULL)", "check_lost(\(check))",
            "reported_tokens(\(check))", "compare_facts(\(check), '{}', '{}')", "end_check(\(check), 1, 1)",
        ]
        for user in ["a_operator", "a_reader", "a_daemon", "postgres", "a_sender"] {
            for call in calls {
                #expect(throws: (any Error).self, "\(user): \(call)") {
                    try devices.database.psql("SELECT FROM tokenkeeper.\(call)", user: user)
                }
            }
        }
        try devices.database.psql("SELECT tokenkeeper.register('ffff', 't', user_id => 'secret')")
        try devices.drain()
        #expect(
            try devices.app("SELECT count(*) FROM tokenkeeper.reported_tokens(\(check)) WHERE token = 'ffff'") == "0")
    }

    @Test func `status asks for a check after two days, and names one that has found something`() throws {
        let devices = try devices()
        try devices.forgetQueue()
        let warnings =
            "SELECT w FROM unnest((SELECT warnings FROM tokenkeeper.status)) AS w WHERE w LIKE '%attached table%'"
        #expect(try devices.database.psql(warnings) == "")
        try check(devices)
        #expect(
            try devices.database.psql(warnings).hasPrefix(
                "the attached table app.devices and the ledger differed in 9 tokens at "))
        try devices.database.psql(
            "UPDATE tokenkeeper.attached_table SET attached_at = now() - interval '3 days', checked_at = NULL, differences = NULL"
        )
        #expect(
            try devices.database.psql(warnings)
                == "the attached table app.devices was never checked: let its owner run tokenkeeperd backfill app.devices --repair once a day"
        )
    }
}
