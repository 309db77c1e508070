import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// The sweep marks or deletes rows of an attached table whose token has been stale for long.
@Suite(.ownThread) struct `Cleaning an attached table` {
    let database: TestDatabase

    /// 40 devices, of which the first ten turned stale in February.
    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("GRANT CREATE ON SCHEMA public TO a_app")
        try database.psql(
            """
            CREATE TABLE devices (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, bundle text DEFAULT 't', push_token text, last_seen timestamptz,
                                  active boolean NOT NULL DEFAULT true, gone_at timestamptz, shout text GENERATED ALWAYS AS (upper(bundle)) STORED);
            CREATE INDEX ON devices (push_token);
            GRANT ALL ON devices TO PUBLIC;
            INSERT INTO devices (push_token, last_seen) SELECT lpad(to_hex(n), 4, '0'), '2025-01-01Z' FROM generate_series(1, 40) AS n;
            SELECT tokenkeeper.attach('public.devices', token => 'push_token', topic => 'bundle',
                                      registered_at => 'last_seen', unregistered => 'NOT active', on_delete => 'unregister');
            SELECT count(tokenkeeper.register(push_token, 't', registered_at => '2025-01-01Z')) FROM devices;
            """, user: "a_app")
        try turnStale(1...10, received: "2025-02-01Z")
    }

    /// As after a comparison and a visit of autovacuum: from now on, sweeps look up the tokens in the table instead of reading it.
    private func readByToken() throws {
        try database.psql("UPDATE tokenkeeper.attached_table SET rows_read_at = now(); ANALYZE devices")
        #expect(try plan == "t|40")
    }

    private var plan: String {
        get throws { try database.psql("SELECT * FROM tokenkeeper.cleaning_plan(1)", user: "a_daemon") }
    }

    private func turnStale(_ numbers: ClosedRange<Int>, received: String) throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, queued_at, body)
            SELECT 't', lpad(to_hex(n), 4, '0'), 410, '\(received)', '{"reason":"Unregistered","timestamp":1738400000000}'
            FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS n
            """)
        try drainAll(&daemon)
        // As if the ledger had learned of it then.
        try database.psql(
            "UPDATE tokenkeeper.ledger SET suppressed_since = '\(received)' WHERE suppressed_since > '\(received)'; TRUNCATE tokenkeeper.stale_wave"
        )
    }

    private func clean(_ arguments: String = "") throws {
        try database.psql("SELECT tokenkeeper.set_cleaning('public.devices'\(arguments))", user: "a_app")
    }

    @discardableResult
    private func sweep(allowance: Int64 = 1000, dryRun: Bool = false, forced: Bool = false) throws -> SweepReport {
        var daemon = try database.connect(user: "a_daemon")
        let lease = try #require(
            try SweepLease.claim(.new(.cli, dryRun: dryRun, forced: forced), holder: "test", on: &daemon))
        let plan = SweepPlan(
            suppressedRetention: .seconds(3650 * 86400), dormantAfter: nil, eventRetention: .seconds(3650 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: allowance, maxShare: .percent(10), batch: 7)
        return try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }
    }

    private var marked: String {
        get throws { try ids("NOT active") }
    }

    private func ids(_ condition: String = "true") throws -> String {
        try database.psql("SELECT coalesce(string_agg(id::text, ' ' ORDER BY id), '') FROM devices WHERE \(condition)")
    }

    @Test func `nothing happens unless the owner asks for it`() throws {
        #expect(try sweep().tables.isEmpty)
        #expect(try marked == "")
    }

    @Test(arguments: [false, true])
    func `it marks what is stale, once, and no logout follows`(byToken: Bool) throws {
        if byToken { try readByToken() }
        // A 410 of today; another token since; a later registration that is not applied yet; a token that is not stale but suspect.
        try turnStale(11...11, received: "now")
        try database.psql(
            """
            TRUNCATE tokenkeeper.stale_wave;
            UPDATE devices SET push_token = 'ffff' WHERE id = 2;
            UPDATE devices SET last_seen = now() WHERE id = 3;
            UPDATE devices SET bundle = 'other' WHERE id = 4;
            UPDATE tokenkeeper.ledger SET stale_at = NULL, stale_reason = NULL, suspect_at = '2025-02-01Z', suspect_reason = 'BadDeviceToken'
            WHERE token_key = decode('0005', 'hex');
            DELETE FROM tokenkeeper.registration;
            """)
        try clean()
        let dry = try sweep(dryRun: true)
        #expect(dry.tables.map(\.due) == [6] && dry.tables.map(\.rows) == [40] && dry.tables.map(\.cleaned) == [0])
        #expect(try marked == "")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.cleaned_row") == "0")
        let report = try sweep()
        #expect(report.outcome == .finished, "\(report)")
        #expect(report.tables.map(\.cleaned) == [6])
        #expect(try marked == "1 6 7 8 9 10")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0")
        #expect(try sweep().tables.map(\.due) == [0], "what is marked is not due any more")
        #expect(
            try database.psql(
                "SELECT mode, mark_column, mark_value, cleaned, failed, rows, due FROM tokenkeeper.cleaning",
                user: "a_app")
                == "mark|active|false|6|0|40|0")
        try clean(", 'off'")
        #expect(try sweep().tables.isEmpty)
    }

    @Test func `a token is due once the ledger has known a valid 410 for long, and no later one`() throws {
        // 1 is suppressed since today. 2: its 410 came today, although it has been suppressed for long. 3 has an old 410 and one of today, and 4
        // only an old one from before its registration.
        try database.psql(
            """
            UPDATE tokenkeeper.ledger SET suppressed_since = now() WHERE token_key = decode('0001', 'hex');
            UPDATE tokenkeeper.stale_receipt SET queued_at = now() WHERE token_key = decode('0002', 'hex');
            UPDATE tokenkeeper.ledger SET stale_at = now() WHERE token_key = decode('0003', 'hex');
            UPDATE tokenkeeper.stale_receipt SET stale_at = '2024-12-01Z' WHERE token_key = decode('0004', 'hex');
            """)
        try clean()
        #expect(try sweep().tables.map(\.cleaned) == [6])
        #expect(try marked == "5 6 7 8 9 10")
    }

    @Test func `a token that comes back, or gets another state, before it is locked is left alone`() throws {
        try clean()
        // This runs between the reading and the lock, like another session.
        try database.psql(
            """
            CREATE OR REPLACE FUNCTION tokenkeeper.cleaning_obstacle(of_topic integer) RETURNS text LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM tokenkeeper.register('0001', 't'), tokenkeeper.unregister('0002', 't');
                RETURN NULL;
            END $$
            """)
        #expect(
            try database.psql(
                "SELECT rows, due, cleaned FROM tokenkeeper.clean_next(1, false, NULL, 1000, false)", user: "a_daemon")
                == "40|8|8")
        #expect(try marked == "3 4 5 6 7 8 9 10")
    }

    @Test(arguments: [false, true], [1, 2, 5, 10, 40, 41])
    func `a sweep comes through the whole table whatever it reads at a time`(byToken: Bool, page: Int) throws {
        try database.psql("SELECT tokenkeeper.ensure_topic('sandbox', 't')")
        try clean()
        if byToken { try readByToken() }
        var daemon = try database.connect(user: "a_daemon")
        var (after, due, pages) = ("NULL", 0, 0)
        repeat {
            let batch = try daemon.lines(
                "SELECT due, quote_nullable(next) FROM tokenkeeper.clean_next(1, \(byToken), \(after), \(page), true)",
                columns: 2)[0].split(separator: "|").map(String.init)
            due += Int(batch[0]) ?? 0
            after = batch[1]
            pages += 1
        } while after != "NULL" && pages < 100
        #expect(due == 10)
        #expect(pages <= (byToken ? 10 : 40) / page + 2)
    }

    @Test func `a sweep stops where something goes wrong meanwhile`() throws {
        try clean()
        try database.psql("INSERT INTO tokenkeeper.topic_guard (topic_id, tripped_at) VALUES (1, now())")
        let cleaned = "SELECT cleaned, obstacle IS NOT NULL FROM tokenkeeper.clean_next(1, false, NULL, 1000, false)"
        #expect(try database.psql(cleaned, user: "a_daemon") == "0|t")
        // An undo that is done is in nobody's way.
        try database.psql(
            """
            DELETE FROM tokenkeeper.topic_guard;
            INSERT INTO tokenkeeper.exclusion (topic_id, cause, since, until, finished_at) VALUES (1, 'stale', now(), now(), now())
            """)
        #expect(try database.psql(cleaned, user: "a_daemon") == "10|f")
    }

    @Test func `what was cleaned is restored for one table, since an instant`() throws {
        try clean()
        try sweep()
        try database.psql(
            """
            UPDATE tokenkeeper.cleaned_row SET cleaned_at = now() - interval '2 days' WHERE key = '1';
            UPDATE tokenkeeper.cleaned_row SET table_id = 'tokenkeeper.topic' WHERE key = '2';
            """)
        #expect(
            try database.psql(
                "SELECT tokenkeeper.restore_cleaned('public.devices', now() - interval '1 day')", user: "a_app") == "8")
        #expect(try marked == "1 2")
    }

    @Test func `an instant or any column can be the mark`() throws {
        try clean(", mark_column => 'gone_at'")
        try sweep()
        #expect(try ids("gone_at IS NOT NULL") == "1 2 3 4 5 6 7 8 9 10")
        #expect(try sweep().tables.map(\.due) == [0])
    }

    @Test(arguments: [
        ("mode => 'gone'", "mode is 'gone'"), ("mark_column => 'nope'", "has no column nope"),
        ("mark_column => 'shout', mark_value => '1'", "is generated"),
        ("mark_column => 'id', mark_value => '1'", "belongs to the key"),
        ("mark_column => 'bundle'", "mark_value is null"), ("mark_value => 'nonsense('", "syntax error"),
        ("mark_column => 'gone_at', mark_value => '38f4'", "mark_value is '38f4'"),
        ("stale_for => '1 minute'", "expected 1 hour to 3650 days"),
    ])
    func `a mistake is a clear error`(arguments: String, message: String) throws {
        do {
            try clean(", \(arguments)")
            Issue.record("no error for \(arguments)")
        } catch {
            #expect("\(error)".contains(message), "\(error)")
        }
    }

    @Test func `only the owner of the table may have it cleaned, and see what was`() throws {
        try database.psql(
            """
            CREATE TABLE others (id bigint PRIMARY KEY, push_token text, last_seen timestamptz, active boolean NOT NULL DEFAULT true);
            CREATE INDEX ON others (push_token);
            INSERT INTO others SELECT id, push_token, last_seen FROM devices;
            SELECT tokenkeeper.attach('public.others', token => 'push_token', topic_value => 't', registered_at => 'last_seen', unregistered => 'NOT active');
            SELECT tokenkeeper.set_cleaning('public.others');
            """)
        try clean()
        #expect(try sweep().tables.map(\.cleaned) == [10, 10])
        let see =
            "SELECT (SELECT count(*) FROM tokenkeeper.cleaned), (SELECT string_agg(name, ' ') FROM tokenkeeper.cleaning)"
        #expect(try database.psql(see, user: "a_app") == "10|public.devices")
        for refused in [
            "SELECT tokenkeeper.set_cleaning('public.others', 'off')",
            """
            INSERT INTO tokenkeeper.own_cleaning (source_id, mode, stale_for)
            SELECT (SELECT source_id FROM tokenkeeper.own_attachment) + 1, 'delete', '1 day'
            """,
            "SELECT FROM tokenkeeper.cleaned_row", "SELECT FROM tokenkeeper.attachment_cleaning",
        ] {
            #expect(throws: (any Error).self, "\(refused)") { try database.psql(refused, user: "a_app") }
        }
        try database.psql("DELETE FROM tokenkeeper.own_cleaning; DELETE FROM tokenkeeper.cleaned", user: "a_app")
        #expect(
            try database.psql(
                "SELECT count(*), (SELECT count(*) FROM tokenkeeper.cleaned_row) FROM tokenkeeper.attachment_cleaning")
                == "1|10",
            "those of the other table stay")
    }

    @Test(arguments: [false, true])
    func `deleted rows are kept, restored exactly, and are no logouts`(byToken: Bool) throws {
        if byToken { try readByToken() }
        let rows = "SELECT string_agg(to_jsonb(d)::text, ' ' ORDER BY id) FROM devices AS d"
        let before = try database.psql(rows)
        try clean(", 'delete'")
        #expect(try sweep().tables.map(\.cleaned) == [10])
        #expect(try ids() == (11...40).map(String.init).joined(separator: " "))
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.registration WHERE unregistered") == "0", "no logouts")
        #expect(
            try database.psql("SELECT tokenkeeper.restore_cleaned('public.devices', '2025-01-01Z')", user: "a_app")
                == "10")
        #expect(try database.psql(rows) == before)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.cleaned_row") == "0")
        // Somebody else's delete is a logout.
        try database.psql("DELETE FROM tokenkeeper.registration; DELETE FROM devices WHERE id = 20", user: "owner")
        #expect(try database.psql("SELECT token FROM tokenkeeper.registration WHERE unregistered") == "0014")
    }

    @Test func `marks are restored where nobody has changed the row since`() throws {
        try clean()
        try sweep()
        try database.psql(
            "UPDATE devices SET active = true WHERE id = 1; UPDATE devices SET bundle = 'other' WHERE id = 2")
        #expect(
            try database.psql("SELECT tokenkeeper.restore_cleaned('public.devices', '2025-01-01Z')", user: "a_app")
                == "9")
        #expect(try marked == "")
        #expect(try ids("bundle = 'other'") == "2", "only the mark is restored")
    }

    @Test func `a sweep looks up stale tokens in the table, however the rows spell them`() throws {
        try clean(", mark_column => 'gone_at'")
        try database.psql("UPDATE tokenkeeper.attached_table SET rows_read_at = now()")
        #expect(try plan == "f|", "nobody has counted the rows")
        try database.psql("UPDATE tokenkeeper.attached_table SET rows_read_at = NULL; ANALYZE devices")
        #expect(try plan == "f|", "nobody has read how the rows spell their tokens")
        // The third spelling is unusual, and the last device has two rows. The fifth row has another environment, in a topic of its own.
        try database.psql(
            """
            ALTER TABLE devices DISABLE TRIGGER USER;
            UPDATE devices SET push_token = CASE id WHEN 10 THEN '000A' WHEN 2 THEN '<0002>' WHEN 3 THEN '0x0003' ELSE '000a' END
            WHERE id IN (2, 3, 10, 40);
            UPDATE devices SET bundle = 'u' WHERE id = 5;
            ALTER TABLE devices ENABLE TRIGGER USER;
            """, user: "a_app")
        try database.psql(
            """
            SELECT tokenkeeper.ensure_topic('sandbox', 'u'), tokenkeeper.ensure_topic('production', 'u');
            SELECT tokenkeeper.note_spellings('{1}', ARRAY[decode('0003', 'hex')], '{0x0003}');
            """)
        try readByToken()
        // A sweep that read the table would see its rows.
        let rows = "SELECT rows, due FROM tokenkeeper.clean_next(1, true, NULL, 1000, true)"
        #expect(try database.psql(rows, user: "a_daemon") == "10|10")
        #expect(try sweep().tables.map(\.cleaned) == [10])
        #expect(try ids("gone_at IS NOT NULL") == "1 2 3 4 6 7 8 9 10 40")
        #expect(try database.psql(rows, user: "a_daemon") == "0|0", "what is marked is not even read")
        try database.psql("DROP INDEX devices_push_token_idx", user: "a_app")
        #expect(try plan == "f|")
    }

    @Test func `a sweep looks up the tokens of each topic and environment that the table can have`() throws {
        try database.psql(
            """
            UPDATE devices SET bundle = 'u' WHERE id = 20;
            UPDATE devices SET bundle = 'v', push_token = '0001' WHERE id = 21;
            DELETE FROM tokenkeeper.registration;
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, stale_at, stale_reason, suppressed_since)
            SELECT t, k, '2025-01-01Z', '2025-02-01Z', 'Unregistered', '2025-02-01Z'
            FROM tokenkeeper.ensure_topic('production', 'u') AS t, (VALUES (decode('0014', 'hex')), (decode('0015', 'hex'))) AS v (k);
            INSERT INTO tokenkeeper.stale_receipt (queued_at, stale_at, topic_id, newly, token_key, reason)
            SELECT '2025-02-01Z', '2025-02-01Z', topic_id, true, token_key, 'Unregistered' FROM tokenkeeper.ledger WHERE token_key = decode('0014', 'hex');
            SELECT tokenkeeper.ensure_topic('sandbox', 'u'), tokenkeeper.ensure_topic('production', 'v');
            """)
        try clean()
        try readByToken()
        #expect(try sweep().tables.map(\.cleaned) == [11])
        #expect(try marked == "1 2 3 4 5 6 7 8 9 10 20")
    }

    @Test func `delete needs a confirmation where a foreign key cascades, also one that is added later`() throws {
        try clean(", 'delete'")
        try database.psql(
            """
            CREATE TABLE visit (device bigint REFERENCES devices ON DELETE CASCADE); INSERT INTO visit SELECT id FROM devices;
            CREATE TABLE bill (device bigint REFERENCES devices); INSERT INTO bill VALUES (7);
            """, user: "a_app")
        let report = try sweep()
        #expect(report.tables.first?.refused?.contains("visit_device_fkey of public.visit") == true, "\(report)")
        #expect(throws: (any Error).self) { try clean(", 'delete'") }
        try database.psql(
            "ALTER TABLE visit DROP CONSTRAINT visit_device_fkey, ADD FOREIGN KEY (device) REFERENCES devices ON DELETE SET NULL",
            user: "a_app")
        #expect(throws: (any Error).self) { try clean(", 'delete'") }
        try clean(", 'delete', cascades => true")
        let confirmed = try sweep()
        #expect(confirmed.tables.map(\.cleaned) == [9] && confirmed.tables.map(\.failed) == [1])
        #expect(try ids("id <= 10") == "7", "another table refers to it")
        #expect(
            try database.psql(
                "SELECT cleaned, failed, failure LIKE '%bill_device_fkey%' FROM tokenkeeper.cleaning", user: "a_app")
                == "9|1|t")
    }

    @Test(arguments: [false, true])
    func `it refuses more than the share, within a day`(byToken: Bool) throws {
        if byToken { try readByToken() }
        try clean()
        let refused = try sweep(allowance: 5)
        #expect(refused.tables.map(\.maxRows) == [5] && refused.tables.map(\.cleaned) == [0])
        #expect(refused.message?.contains("10 rows are due of 40, more than 5") == true, "\(refused)")
        #expect(try marked == "")
        #expect(try sweep(allowance: 10).tables.map(\.cleaned) == [10])
        try turnStale(12...12, received: "2025-02-01Z")
        #expect(try sweep(allowance: 10).tables.map(\.maxRows) == [0], "ten were cleaned within this day")
        #expect(try sweep(allowance: 10, forced: true).tables.map(\.cleaned) == [1])
    }

    @Test(arguments: ["guard", "logouts", "wave", "held", "undo"])
    func `it waits while something is wrong with the topic`(_ problem: String) throws {
        try clean()
        try database.psql(
            [
                "guard": "INSERT INTO tokenkeeper.topic_guard (topic_id, tripped_at) VALUES (1, now())",
                "logouts":
                    "INSERT INTO tokenkeeper.topic_guard (topic_id, cause, tripped_at) VALUES (1, 'unregistered_by_app', now())",
                "wave":
                    "INSERT INTO tokenkeeper.stale_wave (topic_id, since, tokens, active, undo) VALUES (1, now(), 1, 1, '')",
                "held": """
                INSERT INTO tokenkeeper.held_result (topic_id, cause, token_key, suspect_at, reason, queued_at)
                VALUES (1, 'stale', '', now(), 'Unregistered', now())
                """,
                "undo":
                    "INSERT INTO tokenkeeper.exclusion (topic_id, cause, since, until) VALUES (1, 'stale', now(), now())",
            ][problem] ?? "")
        #expect(try database.psql("SELECT topic FROM tokenkeeper.topic WHERE topic_id = 1") == "t")
        let report = try sweep()
        #expect(report.tables.map(\.cleaned) == [0] && report.tables.first?.refused != nil, "\(report)")
        #expect(try marked == "")
        #expect(try sweep(forced: true).tables.map(\.cleaned) == [0])
    }

    @Test(arguments: [false, true])
    func `rows and tokens that an application has locked are left for the next sweep`(byToken: Bool) throws {
        if byToken { try readByToken() }
        try clean()
        var app = try database.connect(user: "a_app")
        try app.execute("BEGIN; SELECT FROM devices WHERE id = 3 FOR UPDATE")
        var owner = try database.connect()
        try owner.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = decode('0004', 'hex') FOR UPDATE")
        #expect(try sweep().tables.map(\.cleaned) == [8])
        #expect(try marked == "1 2 5 6 7 8 9 10")
        try app.execute("ROLLBACK")
        try owner.execute("ROLLBACK")
        #expect(try sweep().tables.map(\.cleaned) == [2])
    }

    @Test func `forget erases what was kept of the device`() throws {
        try clean(", 'delete'")
        try sweep()
        try database.psql("SELECT tokenkeeper.forget('0003')", user: "a_app")
        #expect(
            try database.psql("SELECT count(*), count(*) FILTER (WHERE key = '3') FROM tokenkeeper.cleaned_row")
                == "9|0")
    }

    @Test func `a row that a trigger, a deferred foreign key or a locked table keeps is refused alone`() throws {
        try clean(", 'delete'")
        try database.psql(
            """
            CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF OLD.id = 2 THEN RAISE EXCEPTION 'not this one'; END IF;
                RETURN CASE WHEN OLD.id <> 3 THEN OLD END;
            END $$;
            CREATE TRIGGER keep BEFORE DELETE ON devices FOR EACH ROW EXECUTE FUNCTION keep();
            CREATE TABLE bill (device bigint REFERENCES devices DEFERRABLE INITIALLY DEFERRED); INSERT INTO bill VALUES (7);
            """, user: "a_app")
        let report = try sweep()
        #expect(report.tables.map(\.cleaned) == [7] && report.tables.map(\.failed) == [3], "\(report)")
        #expect(try ids("id <= 10") == "2 3 7")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.cleaned_row") == "7")
        // Only the first row of a batch waits for the table that is locked.
        try database.psql("DROP TRIGGER keep ON devices", user: "a_app")
        var app = try database.connect(user: "a_app")
        try app.execute("BEGIN; LOCK TABLE bill IN ACCESS EXCLUSIVE MODE")
        #expect(try sweep().tables.map(\.failed) == [1])
        #expect(try ids("id <= 10") == "2 3 7")
        try app.execute("ROLLBACK")
        #expect(try sweep().tables.map(\.cleaned) == [2])
    }

    @Test func `any key and any column is cleaned and restored, also after a column was added`() throws {
        try database.psql(
            """
            CREATE TABLE phones (code char(8) PRIMARY KEY, push_token text, last_seen timestamptz DEFAULT '2025-01-01Z', more jsonb NOT NULL, maybe json,
                                 bytes bytea, list int[]);
            CREATE INDEX ON phones (push_token);
            INSERT INTO phones (code, push_token, more, maybe, bytes, list)
            VALUES ('one', '0001', 'null', NULL, '\\x00ff', '{1,NULL}'), ('two', '0002', '{"a": null}', '[1]', NULL, '{}');
            SELECT tokenkeeper.attach('public.phones', token => 'push_token', topic_value => 't', registered_at => 'last_seen');
            SELECT tokenkeeper.set_cleaning('public.phones', 'delete')
            """, user: "a_app")
        let rows =
            "SELECT string_agg((code, push_token, last_seen, more, maybe, bytes, list)::text, ' ' ORDER BY code) FROM phones"
        let before = try database.psql(rows, user: "a_app")
        #expect(try sweep().tables.map(\.cleaned) == [2])
        try database.psql("ALTER TABLE phones ADD COLUMN sold boolean NOT NULL DEFAULT true", user: "a_app")
        #expect(
            try database.psql("SELECT tokenkeeper.restore_cleaned('public.phones', '2025-01-01Z')", user: "a_app")
                == "2")
        #expect(try database.psql(rows, user: "a_app") == before)
        #expect(try database.psql("SELECT bool_and(sold) FROM phones", user: "a_app") == "t")
    }
}
