import LedgerTestSupport
import TestThreads
import Testing

/// What attach says of a mistake that it cannot refuse, because it may be meant.
@Suite(.ownThread) struct `Warnings of attach` {
    private static let table = """
        app.devices (id bigserial PRIMARY KEY, push_token text, active boolean DEFAULT true, platform text DEFAULT 'ios', owner_id integer,
            "ownerType" text, object_id integer, content_type_id integer, user_id integer, admin_id integer, device text, tags jsonb,
            "updatedAt" timestamptz)
        """

    private func warnings(_ devices: AttachedDevices, _ arguments: String) throws -> String {
        try devices.app(
            """
            SELECT string_agg(detail, ' | ') FROM tokenkeeper.attach('app.devices', token => 'push_token',
                topic => $$'com.example.app'$$, registered_at => '"updatedAt"', \(arguments), dry_run => true) WHERE kind = 'warning'
            """)
    }

    @Test func `a flag the wrong way round, a filter that nothing passes, tags that are no list`() throws {
        let devices = try AttachedDevices(table: Self.table)
        try devices.app(
            """
            INSERT INTO app.devices (push_token, active, device, tags) SELECT md5(i::text) || md5(i::text), i > 2, 'd' || i % 3, '{"news": true}'
            FROM generate_series(1, 24) AS i
            """)
        #expect(
            try warnings(devices, "logged_out => 'active'").contains(
                "logged_out: 22 of 24 rows are logged out. Is this the flag of those that are active?"))
        #expect(!(try warnings(devices, "logged_out => 'NOT active'").contains("logged_out:")))
        #expect(
            try warnings(devices, "filter => $$platform = 'iOS'$$").contains(
                "filter: it leaves out all of 24 rows with a token"))
        #expect(!(try warnings(devices, "filter => $$platform = 'ios'$$").contains("filter:")))
        #expect(
            try warnings(devices, "tags => 'tags'").contains(
                "tags: 24 rows have JSON that is no array (object), and so no tags"))
        #expect(try warnings(devices, "device_id => 'device'").contains("device_id: 'd0' has 8 tokens"))
        let shared =
            "device_id: 22 of 23 tokens share theirs with another. Is it the id of a device, and not of a user?"
        #expect(try warnings(devices, "device_id => 'id / 2'").contains(shared))
        #expect(!(try warnings(devices, "device_id => 'id'").contains("device_id:")))
        // They name no device, and do no harm.
        try devices.app("UPDATE app.devices SET device = '0000', tags = '[1]'")
        #expect(!(try warnings(devices, "device_id => 'device', tags => 'tags'").contains("device_id:")))
        #expect(!(try warnings(devices, "tags => 'tags'").contains("tags:")))
    }

    @Test func `other ids than tokens of apps`() throws {
        let devices = try AttachedDevices(table: Self.table)
        try devices.app("INSERT INTO app.devices (push_token) SELECT md5(i::text) FROM generate_series(1, 20) AS i")
        #expect(
            try warnings(devices, "filter => 'true'").contains("token: they have 1 lengths, most of them 32 digits"))
        try devices.app("UPDATE app.devices SET push_token = push_token || push_token")
        #expect(!(try warnings(devices, "filter => 'true'").contains("token:")))
    }

    @Test(arguments: [
        ("owner_id", #"write $$"ownerType" || ':' || owner_id$$"#),
        ("owner_id::text", #"the table also has "ownerType""#),
        ("object_id", "the table also has content_type_id"),
        ("coalesce(user_id, admin_id)", "it takes one of several columns"),
    ]) func `two owners with one number`(_ userID: String, _ expected: String) throws {
        let devices = try AttachedDevices(table: Self.table)
        #expect(try warnings(devices, "user_id => '\(userID)'").contains(expected))
        #expect(!(try warnings(devices, #"user_id => $$"ownerType" || ':' || owner_id$$"#).contains("user_id:")))
        #expect(!(try warnings(devices, "user_id => 'user_id'").contains("user_id:")))
    }

    @Test func `an error names the column that is meant, a stable function, and a condition that fits the type`() throws
    {
        let devices = try AttachedDevices(
            table: Self.table,
            first: "CREATE FUNCTION app.is_off(integer) RETURNS boolean LANGUAGE sql STABLE AS 'SELECT true'")
        func errors(_ arguments: String) throws -> String {
            try devices.app(
                """
                SELECT string_agg(detail, ' | ') FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => $$'com.example.app'$$,
                    \(arguments), dry_run => true) WHERE kind = 'error'
                """)
        }
        #expect(
            try errors("registered_at => 'updatedAt + interval ''1 s'''").hasSuffix(#"; the table has "updatedAt""#))
        #expect(try errors("logged_out => 'is_off(user_id)'").contains("it calls is_off, which is not immutable"))
        #expect(try errors("logged_out => 'user_id'").contains("expected boolean, such as $$user_id <> 0$$"))
        #expect(try errors("logged_out => 'platform'").contains("such as $$platform = 'revoked'$$"))
        #expect(try errors("logged_out => 'updatedAt'").contains(#"such as $$"updatedAt" IS NOT NULL$$"#))
    }
}
