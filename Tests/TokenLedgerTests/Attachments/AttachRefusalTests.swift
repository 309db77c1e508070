import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `What attach refuses, and detach` {
    private func failure(_ body: () throws -> Void) -> String {
        do {
            try body()
            return ""
        } catch { return "\(error)" }
    }

    @Test func `a dry run names everything that is wrong, and changes nothing`() throws {
        let devices = try AttachedDevices()
        let rest = "registered_at => 'last_seen'"
        let cases = [
            ("token => '\"Push_Token\"', topic => 'bundle_id', \(rest)", "the table has push_token"),
            ("token => 'badge', topic => 'bundle_id', \(rest)", "'badge': is of type integer, expected text or bytea"),
            (
                "token => 'bundle_id', topic => 'bundle_id', \(rest)",
                "CREATE INDEX CONCURRENTLY ON app.devices (bundle_id);"
            ),
            (
                "token => 'push_token', topic => 'com.example.app'",
                "a constant is written as in SQL: '''com.example.app'''"
            ),
            ("token => 'push_token', topic => $$''$$", "topic: topic is missing"),
            ("token => 'push_token', topic => 'badge'", "CASE badge WHEN 1 THEN 'com.example.app' END"),
            ("token => 'push_token', topic => 'bundle_id', environment => $$'dev'$$", "environment is 'dev', expected"),
            ("token => 'push_token', topic => 'bundle_id', registered_at => 'badge'", "to_timestamp((badge) / 1000.0)"),
            ("token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen::date'", "AT TIME ZONE 'UTC'"),
            ("token => 'push_token', topic => 'bundle_id', \(rest), on_delete => 'cascade'", "on_delete is 'cascade'"),
            ("token => 'push_token', topic => 'bundle_id', \(rest), name => 'a.b'", "name is 'a.b', expected"),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'badge'",
                "is of type integer, expected boolean"
            ),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'gone'",
                "column \"gone\" does not exist"
            ),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'logged_out_at < clock_timestamp()'",
                "it calls clock_timestamp, which is not immutable"
            ),
            ("token => 'push_token', topic => 'bundle_id', \(rest), filter => 'random() < 0.5'", "it calls random"),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'count(*) > 1'",
                "it has an aggregate"
            ),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'row_number() OVER () > 1'",
                "it has a window function"
            ),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'EXISTS (SELECT FROM app.devices AS d WHERE d.badge > 0)'",
                "it has a subquery; write what depends on another table into a column"
            ),
            ("token => 'push_token', topic => 'bundle_id', \(rest), tags => 'unnest(tags)'", "it returns a set"),
            ("token => 'push_token', topic => 'bundle_id', \(rest), user_id => '$1'", "there is no parameter $1"),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), user_id => 'r::text'",
                "column \"r\" does not exist"
            ),
            ("token => 'push_token', topic => 'bundle_id', \(rest), user_id => 'devices.xmin::text'", "devices"),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'true) FROM app.devices; DROP TABLE app.devices; --'",
                "logged_out:"
            ),
            (
                "token => 'push_token', topic => 'bundle_id', \(rest), logged_out => 'true) AS a FROM app.devices AS r CROSS JOIN (SELECT'",
                "logged_out:"
            ),
        ]
        for (arguments, expected) in cases {
            let said = try devices.app(
                "SELECT kind, detail FROM tokenkeeper.attach('app.devices', \(arguments), dry_run => true)")
            #expect(said.contains("error|") && said.contains(expected), "\(arguments): \(said)")
            #expect(failure { try devices.attach(arguments: arguments) }.contains(expected), "\(arguments)")
        }
        let plan =
            "SELECT kind, detail FROM tokenkeeper.attach('app.devices', \(AttachedDevices.arguments), dry_run => true"
        #expect(try devices.app("\(plan))") == "")
        let verbose = try devices.app("\(plan), verbose => true)")
        #expect(verbose.contains("sql|CREATE TRIGGER tokenkeeper_insert_N"), "\(verbose)")
        #expect(
            try devices.app(
                "SELECT count(*) FROM pg_proc WHERE proname LIKE 'tokenkeeper!_%' ESCAPE '!' AND pronamespace = 'app'::regnamespace"
            ) == "0")
        #expect(
            try devices.app(
                "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tokenkeeper%' AND tgrelid = 'app.devices'::regclass"
            ) == "0")
    }

    @Test func `views, tables of others and missing privileges are refused with the command that helps`() throws {
        let devices = try AttachedDevices()
        try devices.app("CREATE VIEW app.phones AS SELECT * FROM app.devices")
        #expect(
            failure { try devices.app("SELECT tokenkeeper.attach('app.phones', \(AttachedDevices.arguments))") }
                .contains("attach the table behind it"))
        let owner = "SELECT tokenkeeper.attach('app.devices', \(AttachedDevices.arguments))"
        try devices.database.psql(
            "CREATE ROLE visitor LOGIN IN ROLE tokenkeeper_app; GRANT USAGE ON SCHEMA app TO visitor", user: "postgres")
        #expect(
            failure { try devices.database.psql(owner, user: "visitor") }.contains(
                "visitor is no member of the owner of app.devices"))
        try devices.database.psql(
            "ALTER SCHEMA app OWNER TO postgres; GRANT USAGE ON SCHEMA app TO a_app", user: "postgres")
        #expect(failure { try devices.attach() }.contains("GRANT CREATE ON SCHEMA app TO a_app;"))
        try devices.database.psql("GRANT CREATE ON SCHEMA app TO a_app", user: "postgres")
        try devices.app("ALTER TABLE app.devices FORCE ROW LEVEL SECURITY")
        #expect(failure { try devices.attach() }.contains("row-level security is forced"))
        try devices.app("ALTER TABLE app.devices NO FORCE ROW LEVEL SECURITY")
        try devices.attach()
        #expect(failure { try devices.attach() }.contains("there is an attachment app.devices already"))
    }

    @Test func `the functions of another database, which a restored table brings, keep their numbers`() throws {
        let devices = try AttachedDevices()
        for number in 1...9 {
            try devices.database.psql(
                "CREATE FUNCTION public.tokenkeeper_insert_\(number)() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
                user: "postgres")
        }
        try devices.attach()
        #expect(try devices.app("SELECT source_id FROM tokenkeeper.attachment") == "10")
    }

    @Test func `detach leaves no trace`() throws {
        let devices = try AttachedDevices()
        let trace = "SELECT count(*) FROM pg_depend WHERE refobjid IN ('app.devices'::regclass, 'app'::regnamespace)"
        let before = try devices.app(trace)
        try devices.attach("on_delete => 'unregister'")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        #expect(try devices.app("SELECT count(*) FROM tokenkeeper.attachment") == "0")
        #expect(try devices.app("SELECT count(*) FROM pg_proc WHERE pronamespace = 'app'::regnamespace") == "0")
        #expect(try devices.app(trace) == before)
        #expect(failure { try devices.app("SELECT tokenkeeper.detach('app.devices')") }.contains("is not attached"))
        // What was queued before is applied.
        try devices.attach()
        try devices.app("INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now())")
        try devices.app("UPDATE app.devices SET logged_out_at = now()")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app")
    }

    @Test func `detach works for a table that was dropped or renamed`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app("ALTER TABLE app.devices RENAME TO phones")
        try devices.app("INSERT INTO app.phones (push_token, last_seen) VALUES ('aaaa', now())")
        #expect(try devices.queued() == ["aaaa   {}"])
        try devices.app("DROP TABLE app.phones")
        #expect(
            try devices.database.psql("SELECT fault FROM tokenkeeper.check_attachments()", user: "a_daemon")
                == "the table was dropped")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        #expect(try devices.app("SELECT count(*) FROM pg_proc WHERE pronamespace = 'app'::regnamespace") == "0")
        #expect(try devices.app("SELECT count(*) FROM tokenkeeper.attachment") == "0")
    }

    @Test func `a renamed column or value of an enum is a fault, and stops a backfill with what to do`() throws {
        let devices = try AttachedDevices(
            table: "app.devices (id bigserial PRIMARY KEY, push_token text, st app.st, last_seen timestamptz)",
            first: "CREATE TYPE app.st AS ENUM ('on', 'it''s off')")
        let source = try devices.attach(
            arguments: "token => 'push_token', topic => $$'com.example.app'$$, logged_out => $$st = 'it''s off'$$")
        let fault = "SELECT fault FROM tokenkeeper.check_attachments()"
        #expect(try devices.database.psql(fault, user: "a_daemon") == "")
        let backfill = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        try devices.app("SELECT FROM tokenkeeper.backfill_next(\(backfill), 1)")
        for (statement, expected) in [
            ("ALTER TYPE app.st RENAME VALUE 'it''s off' TO 'off'", "values of app.st were renamed: 'it''s off'"),
            (
                "ALTER TABLE app.devices RENAME push_token TO token",
                "columns were dropped, or have other names now: push_token"
            ),
        ] {
            let backfill = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
            try devices.app(statement)
            let said = "\(expected); detach the table and attach it again"
            #expect(try devices.database.psql(fault, user: "a_daemon") == said)
            #expect(
                failure { try devices.app("SELECT FROM tokenkeeper.backfill_next(\(backfill))") }.contains(said),
                "\(source)")
        }
    }

    @Test func `detach by the table's name leaves an attachment that was given a name`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "SELECT FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => $$'com.example.app.voip'$$, name => 'voip')"
        )
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        #expect(
            failure { try devices.app("SELECT tokenkeeper.detach('app.devices')") }.contains(
                "is not attached under this name, but as voip"))
        #expect(try devices.app("SELECT name FROM tokenkeeper.attachment") == "voip")
    }

    @Test func `a trigger function that is not SECURITY DEFINER is a fault`() throws {
        let devices = try AttachedDevices()
        let source = try devices.attach()
        let fault = "SELECT fault FROM tokenkeeper.check_attachments()"
        try devices.app("ALTER FUNCTION app.tokenkeeper_insert_\(source)() SECURITY INVOKER")
        #expect(
            try devices.database.psql(fault, user: "a_daemon")
                == "a function was replaced or dropped, is not SECURITY DEFINER, or belongs to another role than the table: tokenkeeper_insert_\(source); detach the table and attach it again"
        )
        try devices.app("ALTER FUNCTION app.tokenkeeper_insert_\(source)() SECURITY DEFINER")
        try devices.database.psql(fault, user: "a_daemon")
        #expect(try devices.app("SELECT fault FROM tokenkeeper.attachment") == "")
        try devices.app("ALTER FUNCTION app.tokenkeeper_change_\(source) RENAME TO gone")
        #expect(
            try devices.database.psql(fault, user: "a_daemon").contains(
                "dropped, is not SECURITY DEFINER, or belongs to another role than the table: tokenkeeper_update_\(source);"
            ))
    }
}
