import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Attached tables` {
    private func failure(_ body: () throws -> Void) -> String {
        do {
            try body()
            return ""
        } catch { return "\(error)" }
    }

    @Test func `an inserted, changed and deleted row reaches the ledger, and a change of no named column does not`()
        throws
    {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device, user_id, tags) VALUES ('aaaa', now(), 'd', 7, '{x}'), ('bbbb', now(), NULL, NULL, NULL), ('', now(), 'e', 8, NULL), (NULL, now(), 'f', 9, NULL)"
        )
        #expect(try devices.queued() == ["aaaa d 7 {x}", "bbbb   {}"])
        try devices.forgetQueue()
        // Django saves every column.
        try devices.app(
            "UPDATE app.devices SET badge = badge + 1, push_token = push_token, last_seen = last_seen, tags = tags")
        #expect(try devices.queued() == [])
        try devices.app("UPDATE app.devices SET user_id = 8 WHERE push_token = 'aaaa'")
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE push_token = 'aaaa'")
        try devices.app("DELETE FROM app.devices WHERE push_token <> 'aaaa'")
        #expect(try devices.queued() == ["aaaa d 8 {x}", "aaaa out", "bbbb out"])
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb unregistered_by_app")
        try devices.forgetQueue()
        // Logged out already.
        try devices.app("DELETE FROM app.devices")
        #expect(try devices.queued() == [])
    }

    @Test func `a logout and a login in one transaction leave the token active`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now() - interval '1 day'), ('bbbb', now() - interval '1 day')"
        )
        try devices.drain()
        try devices.app(
            """
            BEGIN;
            UPDATE app.devices SET logged_out_at = clock_timestamp() WHERE push_token = 'aaaa';
            UPDATE app.devices SET logged_out_at = NULL, last_seen = now() WHERE push_token = 'aaaa';
            DELETE FROM app.devices WHERE push_token = 'bbbb';
            INSERT INTO app.devices (push_token, last_seen) VALUES ('bbbb', now());
            COMMIT
            """)
        try devices.drainBackwards()
        #expect(try devices.states() == "aaaa active, bbbb active")
    }

    @Test func `a token that another registered row has is not logged out, and one that none has is`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        let first = "(SELECT min(id) FROM app.devices)"
        for other in ["aaaa", "AAAA"] {
            for change in [
                "DELETE FROM app.devices WHERE id = \(first)",
                "UPDATE app.devices SET logged_out_at = now() WHERE id = \(first)",
                "UPDATE app.devices SET push_token = NULL WHERE id = \(first)",
                "INSERT INTO app.devices (push_token, last_seen, logged_out_at) VALUES ('aaaa', now(), now())",
                // One statement, after which another row has the token.
                "WITH gone AS (DELETE FROM app.devices RETURNING *) INSERT INTO app.devices SELECT id + 1000, push_token FROM gone",
            ] {
                try devices.app(
                    "INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now()), ('\(other)', now())")
                try devices.forgetQueue()
                try devices.app(change)
                #expect(try devices.queued().filter { $0.hasSuffix("out") } == [], "\(change)")
                try devices.forgetQueue()
                try devices.app("DELETE FROM app.devices")
                #expect(try devices.queued().contains { ["aaaa out", "AAAA out"].contains($0) }, "\(other) \(change)")
            }
        }
        // Not for another topic, and not for a row that is logged out.
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, bundle_id, logged_out_at) VALUES ('bbbb', now(), 't', NULL), ('bbbb', now(), 'u', NULL), ('bbbb', now(), 't', now())"
        )
        try devices.forgetQueue()
        try devices.app("DELETE FROM app.devices WHERE bundle_id = 't' AND logged_out_at IS NULL")
        #expect(try devices.queued() == ["bbbb out"])
    }

    @Test func `a logout looks a token up by the index, also after a statement that changed every row`() throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister'")
        var app = try devices.database.connect(user: "a_app")
        let fill =
            "INSERT INTO app.devices (id, push_token, last_seen) SELECT i, lpad(to_hex(i), 8, '0'), now() FROM generate_series(1, 5000) AS i"
        try app.run(fill)
        try app.run("ANALYZE app.devices")
        // Prepares the statement of the trigger for many rows.
        try app.run("DELETE FROM app.devices WHERE id > 1000")
        let read = "SELECT pg_stat_get_xact_tuples_returned('app.devices'::regclass)"
        try app.run("BEGIN")
        let before = try #require(Int(try app.scalar(read) ?? ""))
        try app.run("DELETE FROM app.devices WHERE id = 7")
        #expect(Int(try app.scalar(read) ?? "") ?? .max < before + 10)
        try app.run("ROLLBACK")
    }

    @Test func `a new token of a row supersedes the old one if the device has registered, and logs it out otherwise`()
        throws
    {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device) VALUES ('aa11', now() - interval '1 day', 'd'), ('bb11', now() - interval '1 day', NULL), ('cc11', now() - interval '1 day', 'e')"
        )
        try devices.drain()
        try devices.app(
            "UPDATE app.devices SET push_token = left(push_token, 2) || '22', last_seen = now() WHERE push_token <> 'cc11'"
        )
        // Without a new instant, neither token would supersede the other.
        try devices.app("UPDATE app.devices SET push_token = '0022' WHERE push_token = 'cc11'")
        try devices.drain()
        #expect(
            try devices.states()
                == "0022 active, aa11 superseded, aa22 active, bb11 unregistered_by_app, bb22 active, cc11 unregistered_by_app"
        )
    }

    @Test func `of two overlapping transactions, the later one may set the earlier instant`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device) VALUES ('aaaa', now() - interval '1 day', 'd')")
        try devices.drain()
        var early = try devices.database.connect(user: "a_app")
        try early.execute("BEGIN; SELECT now()")
        try devices.app("UPDATE app.devices SET last_seen = now()")
        try early.execute("UPDATE app.devices SET push_token = 'bbbb', last_seen = now(); COMMIT")
        try devices.drain()
        // Otherwise the former token, with the later instant, would supersede the new one.
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb active")
        // The device has this token, so the next one supersedes it.
        try devices.app("UPDATE app.devices SET push_token = 'cccc', last_seen = now()")
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb superseded, cccc active")
    }

    @Test func `COPY and ON CONFLICT count, and TRUNCATE unregisters nothing`() throws {
        let devices = try AttachedDevices()
        try devices.app("CREATE UNIQUE INDEX ON app.devices (push_token)")
        try devices.attach("on_delete => 'unregister'")
        try devices.database.psql(
            "COPY app.devices (push_token, last_seen) FROM STDIN", user: "a_app",
            input: "aaaa\t2026-01-01\nbbbb\t2026-01-01\n")
        #expect(try devices.queued() == ["aaaa   {}", "bbbb   {}"])
        try devices.forgetQueue()
        try devices.app(
            "INSERT INTO app.devices (push_token, user_id) VALUES ('aaaa', 5), ('cccc', 6) ON CONFLICT (push_token) DO UPDATE SET user_id = excluded.user_id"
        )
        #expect(Set(try devices.queued()) == ["aaaa  5 {}", "cccc  6 {}"])
        try devices.forgetQueue()
        try devices.app("TRUNCATE app.devices")
        #expect(try devices.queued() == [])
    }

    @Test(arguments: [false, true])
    func `what logical replication applies counts only if asked for`(always: Bool) throws {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => 'unregister', always => \(always)")
        try devices.database.psql(
            """
            SET session_replication_role = replica;
            INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now());
            UPDATE app.devices SET push_token = 'bbbb', last_seen = now();
            DELETE FROM app.devices
            """, user: "postgres")
        #expect(try devices.queued() == (always ? ["aaaa   {}", "bbbb   {}", "aaaa out", "bbbb out"] : []))
        #expect(try devices.app("SELECT triggers FROM tokenkeeper.attachment") == (always ? "always" : "enabled"))
    }

    @Test func `rows of a partitioned table count, also when they move between partitions`() throws {
        let devices = try AttachedDevices(
            table: """
                app.devices (id bigint, push_token text, bundle_id text DEFAULT 't', last_seen timestamptz, device text, user_id uuid, tags text,
                    logged_out_at timestamp, PRIMARY KEY (bundle_id, id)) PARTITION BY LIST (bundle_id)
                """)
        for topic in ["t", "u"] {
            try devices.app("CREATE TABLE app.devices_\(topic) PARTITION OF app.devices FOR VALUES IN ('\(topic)')")
        }
        try devices.attach("on_delete => 'unregister'")
        try devices.app("INSERT INTO app.devices (id, push_token, last_seen, tags) VALUES (1, 'aaaa', now(), 'x')")
        try devices.app(
            "INSERT INTO app.devices_u (id, push_token, last_seen, bundle_id) VALUES (2, 'bbbb', now(), 'u')")
        #expect(try devices.queued() == ["aaaa   {x}", "bbbb   {}"])
        try devices.drain()
        try devices.app("UPDATE app.devices SET bundle_id = 'u' WHERE id = 1")
        try devices.drain()
        #expect(
            try devices.database.psql(
                "SELECT string_agg(left(token, 4) || topic || ' ' || state, ', ' ORDER BY token, topic) FROM tokenkeeper.token"
            )
                == "aaaat unregistered_by_app, aaaau active, bbbbu active")
        // Two columns are the key.
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        #expect(try devices.app("SELECT queued, finished FROM tokenkeeper.backfill_next(\(source), 1)") == "1|f")
        #expect(
            try devices.app("SELECT position FROM tokenkeeper.registration_source WHERE source_id = \(source)")
                == "[\"u\", \"1\"]")
        #expect(try devices.app("SELECT queued, finished FROM tokenkeeper.backfill_next(\(source), 9)") == "1|t")
        #expect(
            failure {
                try devices.app(
                    "SELECT tokenkeeper.attach('app.devices_t', token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen')"
                )
            }
            .contains("attach the partitioned table app.devices"))
    }

    @Test func `a table that inherits is attached, and its parent is refused`() throws {
        let devices = try AttachedDevices()
        try devices.app("CREATE TABLE app.phones () INHERITS (app.devices)")
        try devices.app("CREATE INDEX ON app.phones (push_token)")
        #expect(failure { try devices.attach() }.contains("attach each of them instead"))
        try devices.app("SELECT FROM tokenkeeper.attach('app.phones', \(AttachedDevices.arguments))")
        try devices.app("INSERT INTO app.phones (push_token, last_seen) VALUES ('aaaa', now())")
        // A statement on the parent.
        try devices.app("UPDATE app.devices SET user_id = 3")
        #expect(try devices.queued() == ["aaaa   {}", "aaaa  3 {}"])
    }

    @Test func `a generated column can be the token, and bytea, too`() throws {
        let devices = try AttachedDevices(
            table: """
                app.devices (id bigserial PRIMARY KEY, raw bytea, push_token bytea GENERATED ALWAYS AS (substr(raw, 1, 2)) STORED, last_seen timestamp)
                """)
        try devices.attach(
            "on_delete => 'unregister'",
            arguments: "token => 'push_token', topic => $$'t'$$, registered_at => $$last_seen AT TIME ZONE 'UTC'$$")
        try devices.app(
            "INSERT INTO app.devices (raw, last_seen) VALUES ('\\xaabbcc', now() - interval '1 day'), ('\\xaabbdd', now() - interval '1 day')"
        )
        try devices.app("DELETE FROM app.devices WHERE raw = '\\xaabbcc'")
        try devices.drain()
        #expect(try devices.states() == "aabb active")
        try devices.app("UPDATE app.devices SET raw = '\\x112233'")
        try devices.drain()
        #expect(try devices.states() == "1122 active, aabb unregistered_by_app")
    }

    @Test func `the application's write succeeds whatever fails, and the fault shows`() throws {
        let devices = try AttachedDevices()
        try devices.attach(
            "on_delete => 'unregister'",
            arguments:
                "token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen', logged_out => '1 / badge < 0'"
        )
        try devices.app("INSERT INTO app.devices (push_token, last_seen, badge) VALUES ('aaaa', now(), 1)")
        try devices.app("UPDATE app.devices SET badge = 0")
        try devices.app("DELETE FROM app.devices")
        let check = "SELECT name, fault, was, failures, failure FROM tokenkeeper.check_attachments()"
        #expect(try devices.database.psql(check, user: "a_daemon") == "app.devices|||2|22012")
        #expect(try devices.database.psql(check, user: "a_daemon") == "")
        #expect(try devices.app("SELECT failures FROM tokenkeeper.attachment") == "2")
        // Not the membership, which the databases of all tests share.
        try devices.database.psql("REVOKE USAGE ON SCHEMA tokenkeeper FROM tokenkeeper_app")
        try devices.app("INSERT INTO app.devices (push_token, last_seen, badge) VALUES ('bbbb', now(), 1)")
        #expect(
            try devices.database.psql(check, user: "a_daemon")
                == "app.devices|the table's owner a_app lacks the rights of tokenkeeper_app||0|")
        try devices.database.psql("GRANT USAGE ON SCHEMA tokenkeeper TO tokenkeeper_app")
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER ALL")
        #expect(
            try devices.database.psql(check, user: "a_daemon")
                == "app.devices|a trigger is disabled or missing: tokenkeeper_delete_1, tokenkeeper_insert_1, tokenkeeper_update_1|the table's owner a_app lacks the rights of tokenkeeper_app|0|"
        )
        #expect(try devices.app("SELECT triggers FROM tokenkeeper.attachment") == "disabled")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER ALL")
        #expect(
            try devices.database.psql(check, user: "a_daemon")
                == "app.devices||a trigger is disabled or missing: tokenkeeper_delete_1, tokenkeeper_insert_1, tokenkeeper_update_1|0|"
        )
    }

    @Test func `no change but a registration revives a token`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now() - interval '2 days'), ('bbbb', NULL), ('cccc', now() + interval '1 year')"
        )
        try devices.drain()
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET stale_at = clock_timestamp(); SELECT tokenkeeper.recompute_tokens()")
        try devices.app("UPDATE app.devices SET tags = '{x}', user_id = 3")
        try devices.drain()
        #expect(try devices.states() == "aaaa stale, bbbb stale, cccc stale")
        // Tags count from the change, although the registration is older than those that the ledger has.
        #expect(
            try devices.database.psql("SELECT DISTINCT tags::text || ' ' || user_id FROM tokenkeeper.ledger") == "{x} 3"
        )
        try devices.app("UPDATE app.devices SET last_seen = now()")
        try devices.drain()
        #expect(try devices.states() == "aaaa active, bbbb active, cccc active")
    }

    @Test func `without registered_at, the table takes its logouts back, and revives no dead token`() throws {
        let devices = try AttachedDevices()
        try devices.attach(
            arguments: "token => 'push_token', topic => 'bundle_id', logged_out => 'logged_out_at IS NOT NULL'")
        try devices.app("INSERT INTO app.devices (push_token) VALUES ('aaaa'), ('bbbb')")
        try devices.drain()
        try devices.app("UPDATE app.devices SET logged_out_at = now()")
        try devices.drain()
        #expect(try devices.states() == "aaaa unregistered_by_app, bbbb unregistered_by_app")
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET stale_at = '2026-01-01' WHERE token_key = '\\xbbbb'; SELECT tokenkeeper.recompute_tokens()"
        )
        try devices.app("UPDATE app.devices SET logged_out_at = NULL")
        try devices.drain()
        #expect(try devices.states() == "aaaa active, bbbb stale")
    }

    @Test func `what a BEFORE trigger changes counts, also of one that comes later`() throws {
        let devices = try AttachedDevices()
        try devices.attach()
        try devices.app(
            """
            CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.tags := ''{x}''; RETURN NEW; END';
            INSERT INTO app.devices (push_token, last_seen) VALUES ('aaaa', now());
            CREATE TRIGGER touch BEFORE UPDATE ON app.devices FOR EACH ROW EXECUTE FUNCTION app.touch()
            """)
        try devices.forgetQueue()
        try devices.app("UPDATE app.devices SET badge = 3")
        #expect(try devices.queued() == ["aaaa   {x}"])
    }
}
