import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// A table that a real subscription fills: one database of a cluster publishes it, another one has it attached.
@Suite(.ownThread) struct `An attached table that logical replication fills` {
    /// A cluster of its own: the slot of a publication waits for the transactions of all databases.
    private struct Replica {
        let cluster: TestCluster
        let devices: AttachedDevices
        let publisher: TestDatabase

        init() throws {
            cluster = try TestCluster.prepared()
            devices = try AttachedDevices(in: cluster)
            publisher = try cluster.database(migrated: false)
            try publish(
                """
                CREATE SCHEMA app;
                CREATE TABLE app.devices (id bigserial PRIMARY KEY, push_token varchar(200), bundle_id text DEFAULT 't', last_seen timestamptz,
                    device text, user_id integer, tags text[], logged_out_at timestamptz, badge integer DEFAULT 0);
                CREATE PUBLICATION devices FOR TABLE app.devices
                """)
            // Within one cluster, CREATE SUBSCRIPTION would wait for itself if it made the slot.
            try publish("SELECT pg_create_logical_replication_slot('devices', 'pgoutput')")
        }

        func publish(_ sql: String) throws { try publisher.psql(sql, user: "postgres") }

        func subscribe() throws {
            let connection = "host=\(cluster.folder) port=\(cluster.port) user=postgres dbname=\(publisher.name)"
            try devices.database.psql(
                "CREATE SUBSCRIPTION devices CONNECTION '\(connection)' PUBLICATION devices WITH (create_slot = false)",
                user: "postgres")
            try eventually("the first copy is complete") {
                try devices.database.psql("SELECT srsubstate FROM pg_subscription_rel", user: "postgres") == "r"
            }
            try applied()
        }

        /// Waits until everything that is committed at the publisher is committed here.
        func applied() throws {
            let end = try publisher.psql("SELECT pg_current_wal_lsn()", user: "postgres")
            try eventually("the changes are applied") {
                try publisher.psql(
                    "SELECT coalesce(confirmed_flush_lsn >= '\(end)', false) FROM pg_replication_slots WHERE slot_name = 'devices'",
                    user: "postgres") == "t"
            }
            let rows = "SELECT * FROM app.devices ORDER BY id"
            #expect(try publisher.psql(rows, user: "postgres") == devices.app(rows))
        }

        /// The errors of the subscription.
        func errors() throws -> String {
            try devices.database.psql(
                "SELECT apply_error_count + sync_error_count FROM pg_stat_subscription_stats", user: "postgres")
        }
    }

    /// A device's life: two rows that are there at first, then installs, rotations, moves, logouts and logins.
    private static let before = """
        INSERT INTO app.devices (push_token, last_seen, device, user_id, tags)
        VALUES ('aaaa', now() - interval '1 day', 'd1', 1, '{x}'), ('bbbb', now() - interval '1 day', 'd2', 2, NULL)
        """

    private static let changes = [
        "INSERT INTO app.devices (push_token, last_seen, device, user_id) VALUES ('cccc', now(), 'd3', 3), ('dddd', now(), 'd4', 4)",
        "BEGIN; UPDATE app.devices SET push_token = 'ab01', last_seen = now() WHERE push_token = 'aaaa'; UPDATE app.devices SET user_id = 9 WHERE push_token = 'cccc'; COMMIT",
        "UPDATE app.devices SET badge = badge + 1",
        "UPDATE app.devices SET logged_out_at = now() WHERE push_token = 'bbbb'",
        "BEGIN; UPDATE app.devices SET logged_out_at = clock_timestamp() WHERE push_token = 'cccc'; UPDATE app.devices SET logged_out_at = NULL, last_seen = clock_timestamp() WHERE push_token = 'cccc'; COMMIT",
        "DELETE FROM app.devices WHERE push_token = 'dddd'",
        "BEGIN; DELETE FROM app.devices WHERE push_token = 'cccc'; INSERT INTO app.devices (push_token, last_seen, device, user_id) VALUES ('cccc', now(), 'd5', 5); COMMIT",
    ]

    @Test func `with always, what the apply worker writes is registered and logged out`() throws {
        let replica = try Replica()
        let devices = replica.devices
        try replica.publish(Self.before)
        try devices.attach("on_delete => 'unregister', always => true")
        try replica.subscribe()
        #expect(try devices.queued() == ["aaaa d1 1 {x}", "bbbb d2 2 {}"])
        for change in Self.changes {
            try replica.publish(change)
            // So that what is queued is in a known order.
            try replica.applied()
        }
        #expect(
            try devices.queued() == [
                "aaaa d1 1 {x}", "bbbb d2 2 {}", "cccc d3 3 {}", "dddd d4 4 {}", "ab01 d1 1 {x}", "cccc d3 9 {}",
                "bbbb out", "cccc out", "cccc d3 9 {}", "dddd out", "cccc out", "cccc d5 5 {}",
            ])
        try devices.drain()
        #expect(
            try devices.states()
                == "aaaa superseded, ab01 active, bbbb unregistered_by_app, cccc active, dddd unregistered_by_app")
        #expect(
            try devices.database.psql("SELECT device_id, user_id FROM tokenkeeper.token WHERE token = 'cccc'")
                == "d5|5")

        // While somebody has locked the queue, the worker waits, and then goes on.
        try devices.forgetQueue()
        var other = try devices.database.connect()
        try other.execute("BEGIN; LOCK TABLE tokenkeeper.registration")
        try replica.publish("INSERT INTO app.devices (push_token, last_seen) VALUES ('eeee', now())")
        try eventually("the worker waits") {
            try devices.database.psql(
                "SELECT wait_event_type FROM pg_stat_activity WHERE backend_type ~ '^logical replication (apply )?worker'",
                user: "postgres") == "Lock"
        }
        try other.execute("COMMIT")
        try replica.applied()
        #expect(try devices.queued() == ["eeee   {}"])
        #expect(try replica.errors() == "0")
        #expect(try devices.app("SELECT failures FROM tokenkeeper.attachment") == "0")
    }

    @Test func `the apply worker goes on whatever fails in a trigger, and a check finds what was missed`() throws {
        let replica = try Replica()
        let devices = replica.devices
        try devices.attach("on_delete => 'unregister', always => true")
        // The worker is a session of the subscription's owner in this database.
        try devices.database.psql(
            "ALTER ROLE postgres IN DATABASE \(devices.database.name) SET lock_timeout = '20ms'", user: "postgres")
        try replica.publish(Self.before)
        try replica.subscribe()
        try devices.drain()
        var other = try devices.database.connect()
        try other.execute("BEGIN; LOCK TABLE tokenkeeper.registration")
        for change in Self.changes { try replica.publish(change) }
        try replica.applied()
        try other.execute("COMMIT")
        #expect(try devices.queued() == [])
        #expect(
            try devices.database.psql(
                "SELECT left(failure, 5), failures > 5 FROM tokenkeeper.check_attachments()", user: "a_daemon")
                == "55P03|t")
        // The owner loses his rights: nothing can be queued, nor can the failure be noted.
        try devices.database.psql("REVOKE USAGE ON SCHEMA tokenkeeper FROM tokenkeeper_app")
        try replica.publish("INSERT INTO app.devices (push_token, last_seen) VALUES ('eeee', now())")
        try replica.applied()
        try devices.database.psql("GRANT USAGE ON SCHEMA tokenkeeper TO tokenkeeper_app")
        #expect(try replica.errors() == "0")
        var reader = try devices.database.connect(user: "a_app")
        var writer = try devices.database.connect(user: "a_app")
        let check = try TableCheck(of: "app.devices", on: &writer)
        _ = try check.perform(on: &reader) { page in
            _ = try check.repair(page, on: &writer)
            return true
        }
        try devices.drain()
        let states = try devices.states()
        #expect(states == "aaaa unregistered_by_app, ab01 active, bbbb unregistered_by_app, cccc active, eeee active")
    }

    @Test func `without always, nothing of it counts, and attach warns`() throws {
        let replica = try Replica()
        let devices = replica.devices
        try replica.publish(Self.before)
        try replica.subscribe()
        let warning =
            "warning|app.devices is in a subscription: what logical replication applies fires the triggers only with always => true"
        let plan =
            "SELECT kind, detail FROM tokenkeeper.attach('app.devices', \(AttachedDevices.arguments), on_delete => 'unregister'"
        #expect(try devices.app("\(plan), dry_run => true)").contains(warning))
        #expect(try devices.app("\(plan), always => true, dry_run => true)").contains("subscription") == false)
        #expect(try devices.app("\(plan))").contains(warning))
        for change in Self.changes { try replica.publish(change) }
        try replica.applied()
        #expect(try devices.queued() == [])
        #expect(try replica.errors() == "0")
        // What the subscriber itself writes counts.
        try devices.app("INSERT INTO app.devices (id, push_token, last_seen) VALUES (1000, 'ffff', now())")
        #expect(try devices.queued() == ["ffff   {}"])
    }
}
