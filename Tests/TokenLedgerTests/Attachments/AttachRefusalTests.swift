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
        let cases = [
            (
                "token => 'Push_Token', topic => 'bundle_id', registered_at => 'last_seen'",
                "has no column 'Push_Token' (there is 'push_token'"
            ),
            (
                "token => 'badge', topic => 'bundle_id', registered_at => 'last_seen'",
                "token: column 'badge' is of type integer, expected text or bytea"
            ),
            (
                "token => 'bundle_id', topic => 'bundle_id', registered_at => 'last_seen'",
                "CREATE INDEX CONCURRENTLY ON app.devices (bundle_id);"
            ),
            ("token => 'push_token', registered_at => 'last_seen'", "expected either topic"),
            ("token => 'push_token', topic => 'bundle_id'", "revive => 'by register only'"),
            (
                "token => 'push_token', topic => 'bundle_id', registered_at => 'badge'",
                "expected timestamp with time zone"
            ),
            (
                "token => 'push_token', topic_value => 't', revive => 'by register only', device_id => 'device'",
                "Pass device_id to register"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', environment => 'badge'",
                "or write a map of its values"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', environment => '{\"column\": \"badge\", \"1\": \"dev\"}'",
                "expected {\"column\": \"NAME\""
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', environment => '{badge'",
                "which is not JSON"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', on_delete => 'cascade'",
                "on_delete is 'cascade'"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'badge'",
                "it is of type integer, expected boolean"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'gone'",
                "column \"gone\" does not exist"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'logged_out_at < now()'",
                "expected an immutable expression"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'count(*) > 1'",
                "without a subquery or an aggregate"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'EXISTS (SELECT 1)'",
                "without a subquery or an aggregate"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'true) FROM app.devices; DROP TABLE app.devices; --'",
                "unregistered:"
            ),
            (
                "token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'true'",
                "it refers to no column"
            ),
        ]
        for (arguments, expected) in cases {
            let said = try devices.app(
                "SELECT kind, detail FROM tokenkeeper.attach('app.devices', \(arguments), dry_run => true)")
            #expect(said.contains("error|") && said.contains(expected), "\(arguments): \(said)")
            #expect(failure { try devices.attach(arguments: arguments) }.contains(expected), "\(arguments)")
        }
        let plan = try devices.app(
            "SELECT kind, detail FROM tokenkeeper.attach('app.devices', \(AttachedDevices.arguments), dry_run => true)")
        #expect(plan.contains("sql|CREATE TRIGGER tokenkeeper_insert_N") && !plan.contains("error|"), "\(plan)")
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
        #expect(failure { try devices.attach() }.contains("attached already"))
    }

    @Test func `a named column cannot be dropped or retyped until detach, which leaves no trace`() throws {
        let devices = try AttachedDevices()
        let trace = "SELECT count(*) FROM pg_depend WHERE refobjid IN ('app.devices'::regclass, 'app'::regnamespace)"
        let before = try devices.app(trace)
        try devices.attach("on_delete => 'unregister'")
        for column in ["push_token", "bundle_id", "last_seen", "device", "user_id", "tags", "logged_out_at"] {
            #expect(
                failure { try devices.app("ALTER TABLE app.devices DROP COLUMN \(column)") }.contains(
                    "cannot drop column"), "\(column)")
            #expect(
                failure {
                    try devices.app(
                        "ALTER TABLE app.devices ALTER \(column) DROP DEFAULT, ALTER \(column) TYPE bytea USING NULL")
                }.contains(
                    "cannot alter type"), "\(column)")
        }
        try devices.app("ALTER TABLE app.devices DROP COLUMN badge, ADD COLUMN other integer")
        try devices.app("ALTER TABLE app.devices DROP COLUMN other")
        try devices.app("ALTER TABLE app.devices RENAME COLUMN user_id TO account")
        try devices.app("ALTER TABLE app.devices RENAME COLUMN account TO user_id")
        try devices.app("SELECT tokenkeeper.detach('app.devices')")
        #expect(try devices.app("SELECT count(*) FROM tokenkeeper.attachment") == "0")
        #expect(try devices.app("SELECT count(*) FROM pg_proc WHERE pronamespace = 'app'::regnamespace") == "0")
        #expect(Int(try devices.app(trace)).map { $0 + 1 } == Int(before), "the default of badge is gone")
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

    @Test func `a trigger function that is not SECURITY DEFINER is a fault`() throws {
        let devices = try AttachedDevices()
        let source = try devices.attach()
        let fault = "SELECT fault FROM tokenkeeper.check_attachments()"
        try devices.app("ALTER FUNCTION app.tokenkeeper_insert_\(source)() SECURITY INVOKER")
        #expect(
            try devices.database.psql(fault, user: "a_daemon")
                == "a function is not SECURITY DEFINER, or belongs to another role than the table: tokenkeeper_insert_\(source); detach the table and attach it again"
        )
        try devices.app("ALTER FUNCTION app.tokenkeeper_insert_\(source)() SECURITY DEFINER")
        try devices.database.psql(fault, user: "a_daemon")
        #expect(try devices.app("SELECT fault FROM tokenkeeper.attachment") == "")
    }
}
