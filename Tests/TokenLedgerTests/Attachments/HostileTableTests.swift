import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Tables whose owner sets a trap for whoever executes something of theirs with other rights. Each trap notes the login and the role that run
/// it. Then everything of ours that has to do with attached tables runs.
@Suite(.ownThread) struct `Hostile attached tables` {
    enum Trap: String, CaseIterable, CustomTestStringConvertible {
        case expression = "a function in an expression"
        case domain = "the check of a column's domain"
        case searchPath = "set_config of search_path that outlives the call"
        case deferredTrigger = "a deferred trigger"
        case caughtCancel = "an expression that does not end and catches query_canceled"
        case plan = "an attachment with SQL that attach has not made"

        var testDescription: String { rawValue }

        /// What the owner of `app.devices` executes after attach.
        var statements: String {
            let isOut =
                "CREATE OR REPLACE FUNCTION app.is_out(timestamptz) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
            let grants = "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA app TO PUBLIC"
            switch self {
            case .expression:
                return "\(isOut) $$ BEGIN PERFORM app.spring(); RETURN $1 IS NOT NULL; END $$; \(grants)"
            case .domain:
                return
                    "CREATE DOMAIN app.odd AS text CHECK (app.spring()); ALTER TABLE app.devices ALTER device TYPE app.odd; \(grants)"
            case .searchPath:
                return """
                    \(isOut) $$ BEGIN
                        PERFORM app.spring(), set_config('search_path', 'app, pg_catalog', false);
                        RETURN $1 IS NOT NULL;
                    END $$; \(grants)
                    """
            case .deferredTrigger:
                return """
                    CREATE FUNCTION app.deferred() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM app.spring(); RETURN NULL; END $$;
                    CREATE CONSTRAINT TRIGGER trap AFTER INSERT OR UPDATE OR DELETE ON app.devices DEFERRABLE INITIALLY DEFERRED
                    FOR EACH ROW EXECUTE FUNCTION app.deferred(); \(grants)
                    """
            case .caughtCancel:
                return """
                    \(isOut) $$
                    BEGIN
                        PERFORM app.spring();
                        IF session_user <> 'a_app' THEN
                            PERFORM pg_sleep(20);
                        END IF;
                        RETURN $1 IS NOT NULL;
                    EXCEPTION WHEN query_canceled THEN
                        PERFORM pg_sleep(20);
                        RETURN true;
                    END $$; \(grants)
                    """
            case .plan:
                let facts =
                    #"{"token": "app.spring()::text", "topic": "app.spring()::text", "environment": "app.spring()::text", "look_up": "app.spring()"}"#
                return """
                    SELECT tokenkeeper.begin_attachment('app.devices', jsonb_build_object('name', 'trap', 'arguments', '{}'::jsonb, 'facts', '\(facts)'::jsonb,
                        'columns', '[]'::jsonb, 'key_columns', '["id"]'::jsonb, 'on_delete', 'ignore', 'always', false));
                    SELECT FROM tokenkeeper.begin_backfill('trap'); \(grants)
                    """
            }
        }
    }

    /// An attached table with rows, a backfill that has begun, and a place where traps note who has run them.
    private func devices() throws -> (devices: AttachedDevices, source: String, backfill: String) {
        let devices = try AttachedDevices(
            first: """
                CREATE TABLE app.sprung (session_name name, role_name name); GRANT INSERT ON app.sprung TO PUBLIC; GRANT USAGE ON SCHEMA app TO PUBLIC;
                CREATE FUNCTION app.spring() RETURNS boolean LANGUAGE plpgsql AS $$
                BEGIN INSERT INTO app.sprung VALUES (session_user, current_user); RETURN true; END $$;
                CREATE FUNCTION app.is_out(timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT $1 IS NOT NULL'
                """)
        let source = try devices.attach(
            "on_delete => 'unregister'",
            arguments:
                "token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen', device_id => 'device', logged_out => 'app.is_out(logged_out_at)'"
        )
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) SELECT lpad(to_hex(i), 4, '0'), now() - interval '1 day' FROM generate_series(1, 10) AS i"
        )
        try devices.drain()
        let backfill = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(backfill), 3)")
        return (devices, source, backfill)
    }

    @Test(arguments: Trap.allCases)
    func `a trap of the owner never runs with rights of others`(trap: Trap) throws {
        let (devices, source, backfill) = try devices()
        try devices.app(trap.statements)
        // The owner's own writes and backfill may step into it.
        for change in [
            "UPDATE app.devices SET logged_out_at = now() WHERE id = 1", "DELETE FROM app.devices WHERE id = 2",
            "SELECT FROM tokenkeeper.backfill_next(\(backfill), 3)",
        ] { _ = try? devices.app(change) }
        try devices.app(
            "INSERT INTO tokenkeeper.registration (topic, token, registered_at, unregistered, source_id) VALUES ('t', '0003', now(), true, \(source)), ('t', '0004', now(), true, \(backfill))"
        )
        for login in ["a_operator", "a_daemon", "owner", "postgres"] {
            for call in [
                "SELECT FROM tokenkeeper.backfill_next(\(backfill), 3)",
                "SELECT FROM tokenkeeper.begin_backfill('app.devices')",
                "SELECT FROM tokenkeeper.attach('app.devices', \(AttachedDevices.arguments), dry_run => true)",
            ] {
                let error = #expect(throws: (any Error).self, "\(login): \(call)") {
                    try devices.database.psql(call, user: login)
                }
                let words = "\(String(describing: error))"
                #expect(
                    words.contains(#/is a superuser|is no member of|is a member of|permission denied|is not attached/#),
                    "\(login): \(call): \(words)")
            }
        }
        try everything(of: devices, backfill: backfill)
        #expect(
            try devices.app(
                "SELECT DISTINCT session_name, role_name FROM app.sprung WHERE (session_name, role_name) <> ('a_app', 'a_app')"
            )
                == "")
    }

    /// Whatever daemons, operators and an administrator do that has to do with attached tables.
    private func everything(of devices: AttachedDevices, backfill: String) throws {
        var daemon = try devices.database.connect(user: "a_daemon")
        try drainAll(&daemon)
        _ = try AttachmentChange.noticeNew(on: &daemon)
        let lease = try #require(
            try SweepLease.claim(.new(.cli, dryRun: false, forced: true), holder: "test", on: &daemon))
        let plan = SweepPlan(
            suppressedRetention: .seconds(0), dormantAfter: .seconds(0), eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(0), heldRetention: .seconds(0), sendRetention: .seconds(0), allowance: 1000,
            maxShare: .percent(100), batch: 100)
        #expect(
            try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }.outcome == .finished)
        _ = try devices.database.reinstate("2020-01-01Z", "2100-01-01Z", cause: "unregistered_by_app")
        #expect(try daemon.scalar("SELECT current_setting('search_path')") == "\"$user\", public")
        for call in [
            "SELECT tokenkeeper.forget('0005')", "SELECT tokenkeeper.withdraw(\(backfill))",
            "SELECT FROM tokenkeeper.made_by(\(backfill))", "SELECT FROM tokenkeeper.attachment",
            "SELECT FROM tokenkeeper.status",
        ] { try devices.database.psql(call, user: "a_operator") }
        for login in ["a_daemon", "a_reader", "postgres"] {
            var session = try devices.database.connect(user: login)
            _ = try Overview(within: .seconds(5), on: &session)
            for check in DatabaseCheck.all(lockTimeout: .milliseconds(50)) { _ = try check.findings(on: &session) }
        }
    }

    @Test func `whoever writes to the table does not choose what its triggers mean by a name`() throws {
        let (devices, _, _) = try devices()
        try devices.database.psql("CREATE SCHEMA evil AUTHORIZATION a_reader", user: "postgres")
        try devices.app(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON app.devices TO a_reader; GRANT USAGE ON SEQUENCE app.devices_id_seq TO a_reader"
        )
        let session = """
            SET search_path = evil, pg_catalog;
            SET TimeZone = 'Asia/Tokyo';
            """
        try devices.database.psql(
            """
            CREATE FUNCTION evil.same(record, record) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN NOT app.spring(); END $$;
            CREATE OPERATOR evil.*<> (LEFTARG = record, RIGHTARG = record, FUNCTION = evil.same);
            CREATE OPERATOR evil.= (LEFTARG = record, RIGHTARG = record, FUNCTION = evil.same);
            CREATE FUNCTION evil.same_text(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN app.spring(); END $$;
            CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.same_text);
            CREATE OPERATOR evil.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.same_text);
            CREATE DOMAIN evil.text AS pg_catalog.text CHECK (app.spring());
            CREATE DOMAIN evil.record AS pg_catalog.text CHECK (app.spring());
            CREATE DOMAIN evil.bigint AS pg_catalog.int8 CHECK (app.spring());
            CREATE FUNCTION evil.lower(pg_catalog.text) RETURNS pg_catalog.text LANGUAGE plpgsql AS $$ BEGIN PERFORM app.spring(); RETURN $1; END $$;
            CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN PERFORM app.spring(); RETURN now(); END $$;
            """, user: "a_reader")
        let before = try devices.database.psql("SELECT count(*) FROM tokenkeeper.registration")
        try devices.database.psql(
            """
            \(session)
            UPDATE app.devices SET badge = 1;
            UPDATE app.devices SET push_token = 'ffff', device = 'd' WHERE id = 1;
            UPDATE app.devices SET push_token = 'no token' WHERE id = 2;
            INSERT INTO app.devices (push_token, last_seen) VALUES ('eeee', now());
            DELETE FROM app.devices WHERE id = 3;
            """, user: "a_reader")
        #expect(try devices.app("SELECT DISTINCT session_name, role_name FROM app.sprung") == "")
        #expect(try devices.database.psql("SELECT count(*) - \(before) FROM tokenkeeper.registration") == "6")
        #expect(try devices.app("SELECT failures FROM tokenkeeper.attachment") == "0")
    }

    @Test func `failures of triggers keep no value of a row, and few of them are kept`() throws {
        let (devices, source, _) = try devices()
        try devices.app(
            """
            CREATE OR REPLACE FUNCTION app.is_out(timestamptz) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
            BEGIN RAISE check_violation USING MESSAGE = repeat('secret', 100000), CONSTRAINT = 'note'; END $$
            """)
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) VALUES ('secret', now()); INSERT INTO app.devices (push_token, last_seen) VALUES ('secret', now())"
        )
        #expect(
            try devices.database.psql("SELECT source_id, state, constraint_name FROM tokenkeeper.attachment_failure")
                == "\(source)|23514|note\n\(source)|23514|note")
        // As many and as long as the owner likes.
        try devices.app(
            "SELECT count(tokenkeeper.note_attachment_failure(\(source), repeat('9', 1000000), repeat(E'x\\n', 500000))) FROM generate_series(1, 1100)"
        )
        try devices.app(
            "INSERT INTO tokenkeeper.own_attachment_failure (source_id, state, constraint_name) SELECT \(source), repeat('9', 1000000), repeat('x', 1000000) FROM generate_series(1, 100)"
        )
        #expect(
            try devices.database.psql(
                "SELECT count(*), max(length(state)), max(length(constraint_name)) FROM tokenkeeper.attachment_failure")
                == "100|5|63")
        var daemon = try devices.database.connect(user: "a_daemon")
        let change = try #require(try AttachmentChange.noticeNew(on: &daemon).first)
        #expect(change.failures == 100 && change.failure?.count == 69)
        #expect(try AttachmentChange.noticeNew(on: &daemon) == [])
        for shown in ["tokenkeeper.attachment", "tokenkeeper.status_detail", "tokenkeeper.attached_table"] {
            #expect(
                try devices.database.psql(
                    "SELECT count(*) FILTER (WHERE s::text LIKE '%secret%'), bool_or(s::text LIKE '%99999%') FROM \(shown) AS s"
                )
                    == "0|t", "\(shown)")
        }
    }
}
