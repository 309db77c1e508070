import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// A row of the attached table, as the test's statements print it. Instants are microseconds since 1970.
private struct DeviceRow: Decodable, Equatable {
    var token: String?
    var bundle: String?
    var kind: String?
    var seen: Int64?
    var device: String?
    var user: Int?
    var tags: [String]?
    var gone: Bool?

    var isOut: Bool { gone == true }
    var hasToken: Bool { token != nil && token != "" }
    var environment: String { ["dev": "sandbox", "live": "production"][kind ?? "null"] ?? kind ?? "null" }

    /// Null: nothing says which token of a device is the latest.
    var deviceToQueue: String? { seen == nil ? nil : device ?? "" }

    /// The same row of the ledger: spellings of one token are the same, and so are texts that are no token.
    func hasSameAddress(as other: DeviceRow) -> Bool {
        let readable = ["aa11": "aa11", "AA11": "aa11", "<aa11>": "aa11", "bb22": "bb22", "cc33": "cc33"]
        return environment == other.environment && bundle == other.bundle
            && (token == other.token || readable[token ?? ""] == readable[other.token ?? ""])
    }
}

private struct QueuedRow: Decodable, Equatable {
    var environment: String?
    var topic: String?
    var token: String?
    var at: Int64
    var device: String?
    var user: String?
    var tags: [String]?
    var out: Bool
}

private struct Change: Decodable {
    var old: DeviceRow?
    var new: DeviceRow?
    var began: Int64
    var ended: Int64
    var queued: [QueuedRow]

    private static let minute: Int64 = 60_000_000
    /// Stands for any instant between `began` and `ended`.
    static let write = Int64.max

    /// The table "What counts as what" of docs/how-to/attach-a-table.md, one row after the other.
    var expected: [QueuedRow] {
        guard old != new else { return [] }
        guard let new else {
            // The row is deleted.
            guard let old, old.hasToken, !old.isOut else { return [] }
            return [logout(old, at: Self.write)]
        }
        guard let old else {
            // A row with a token appears.
            guard new.hasToken else { return [] }
            return new.isOut ? [logout(new, at: Self.since1970(new.seen))] : [registration(new, after: nil)]
        }
        var rows: [QueuedRow] = []
        // An earlier instant that is younger than a minute counts as the moment of the write.
        let movesForward =
            new.seen.map { seen in old.seen.map { seen > $0 || seen < $0 && seen > began - Self.minute } ?? true }
            ?? false
        let tokenChanges = !new.hasSameAddress(as: old)
        let cannotSupersede = ["t.push-type.controls", "t.push-type.liveactivity"]
        if tokenChanges, old.hasToken, !old.isOut {
            // With a later registered_at and the same device_id the old token is superseded, and logged out otherwise.
            let isSuperseded =
                new.hasToken && !new.isOut && movesForward && new.deviceToQueue == old.deviceToQueue
                && new.device ?? "" != "" && new.environment == old.environment && new.bundle == old.bundle
                && new.bundle != nil && !cannotSupersede.contains(new.bundle ?? "")
            if !isSuperseded { rows.append(logout(old, at: Self.write)) }
        }
        if new.hasToken, new.isOut, tokenChanges || !old.isOut {
            // The row is now logged out. A token that it did not have before counts as inserted logged out.
            rows.append(logout(new, at: old.hasToken && !old.isOut ? Self.write : Self.since1970(new.seen)))
        }
        if new.hasToken, !new.isOut {
            var row = registration(new, after: old)
            // Without a later registered_at, the new token gets its device with the next registration.
            if tokenChanges, old.hasToken, !movesForward { row.device = nil }
            rows.append(row)
        }
        return rows
    }

    private static func since1970(_ instant: Int64?) -> Int64 { max(instant ?? 0, 0) }

    private func logout(_ row: DeviceRow, at instant: Int64) -> QueuedRow {
        QueuedRow(environment: row.environment, topic: row.bundle, token: row.token, at: instant, out: true)
    }

    private func registration(_ row: DeviceRow, after old: DeviceRow?) -> QueuedRow {
        let instant: Int64
        if let seen = row.seen, seen > began - Self.minute {
            // Young: the moment of the write if this write has set it. In the future and set before: it has counted as that moment.
            instant = old == nil || old?.seen != seen ? Self.write : seen <= began ? seen : 0
        } else {
            instant = Self.since1970(row.seen)
        }
        return QueuedRow(
            environment: row.environment, topic: row.bundle, token: row.token, at: instant, device: row.deviceToQueue,
            user: row.user.map(String.init) ?? "", tags: row.tags ?? [], out: false)
    }

    /// The rows with `write` in place of instants between `began` and `ended`, which a row may also have from `clock_timestamp()` in the statement.
    func comparable(_ rows: [QueuedRow]) -> [QueuedRow] {
        rows.map { row in
            var row = row
            if row.at >= began, row.at <= ended { row.at = Self.write }
            return row
        }
    }
}

@Suite(.ownThread) struct `Random changes of an attached table` {
    private static let table = """
        app.devices (id bigserial PRIMARY KEY, push_token varchar(200), bundle_id text, kind text, last_seen timestamptz,
            device text COLLATE app.loose, user_id integer, tags text[], gone boolean, badge integer DEFAULT 0)
        """

    /// Both ways to compare the columns: in the trigger's function, and in its condition, for the sake of the BEFORE trigger.
    @Test(arguments: [(false, false), (true, false), (false, true)])
    func `queue what the table of changes in the documentation says`(withBeforeTrigger: Bool, always: Bool) throws {
        let seed = Seed.next("\(withBeforeTrigger) \(always)") >> 1
        let devices = try AttachedDevices(
            table: Self.table,
            first: "CREATE COLLATION app.loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        if withBeforeTrigger {
            try devices.app(
                "CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.badge := NEW.badge + 1; RETURN NEW; END'"
            )
            try devices.app(
                "CREATE TRIGGER touch BEFORE UPDATE ON app.devices FOR EACH ROW EXECUTE FUNCTION app.touch()")
        }
        try devices.attach(
            "on_delete => 'unregister', always => \(always)",
            arguments: """
                token => 'push_token', topic => 'bundle_id', environment => '{"column": "kind", "dev": "sandbox", "live": "production"}', \
                registered_at => 'last_seen', device_id => 'device', user_id => 'user_id', tags => 'tags', unregistered => 'gone'
                """)
        let lines = try devices.database.psql(Self.changes(seed: seed), user: "postgres").split(separator: "\n")
        #expect(lines.count == 1500)
        var kinds: [Int: Int] = [:]
        for line in lines {
            let change = try JSONDecoder().decode(Change.self, from: Data(line.utf8))
            kinds[change.queued.count, default: 0] += 1
            #expect(change.comparable(change.queued) == change.comparable(change.expected), "seed \(seed): \(line)")
        }
        // Changes that queue nothing, one row and two rows: all were tried.
        #expect(kinds.keys.sorted() == [0, 1, 2])
    }

    /// Changes one row after the other, and prints each change with what it has queued, as JSON.
    private static func changes(seed: UInt64) -> String {
        func one(of values: String) -> String {
            "(ARRAY[\(values)])[1 + floor(random() * cardinality(ARRAY[\(values)]))]"
        }
        let columns = [
            ("push_token", one(of: "'aa11', 'AA11', '<aa11>', 'bb22', 'cc33', 'zz', 'no token', '', NULL")),
            ("bundle_id", one(of: "'t', 't', 't', 'u', 't.push-type.controls', NULL")),
            ("kind", one(of: "'dev', 'dev', 'live', 'odd', NULL")),
            (
                "last_seen",
                one(
                    of: """
                        clock_timestamp(), clock_timestamp() - interval '10 s', clock_timestamp() - interval '1 day', '2026-01-01', '2026-01-02', \
                        '1960-01-01', clock_timestamp() + interval '1 year', NULL
                        """)
            ),
            ("device", one(of: "'d', 'd', 'D', 'e', '', NULL")), ("user_id", one(of: "1, 2, NULL")),
            ("tags", "(CASE floor(random() * 3) WHEN 0 THEN NULL WHEN 1 THEN '{x}' ELSE '{x,y}' END)::text[]"),
            ("gone", one(of: "true, false, false, NULL")), ("badge", "floor(random() * 9)::integer"),
        ]
        // Each column keeps its value in two of three changes. All are named, as an ORM names them, or some.
        let changed = columns.map { "CASE WHEN random() < 0.33 THEN \($0.1) ELSE d.\($0.0) END" }
        let names = columns.map(\.0).joined(separator: ", ")
        func row(_ name: String) -> String {
            """
            SELECT jsonb_build_object('token', d.push_token, 'bundle', d.bundle_id, 'kind', d.kind, 'seen', (extract(epoch FROM d.last_seen) * 1000000)::bigint,
                'device', d.device, 'user', d.user_id, 'tags', d.tags, 'gone', d.gone) INTO \(name) FROM app.devices AS d WHERE d.id = 1
            """
        }
        return """
            SET client_min_messages = warning;
            CREATE TEMPORARY TABLE change (n integer, line jsonb);
            DO $$
            DECLARE
                old_row jsonb;
                new_row jsonb;
                began timestamptz;
            BEGIN
                PERFORM setseed(\(Double(seed) / Double(1 << 31)));
                FOR number IN 1..1500 LOOP
                    old_row := NULL;
                    new_row := NULL;
                    \(row("old_row"));
                    began := clock_timestamp();
                    IF old_row IS NULL THEN
                        INSERT INTO app.devices (id, \(names)) SELECT 1, \(columns.map(\.1).joined(separator: ", "));
                    ELSIF random() < 0.1 THEN
                        DELETE FROM app.devices;
                    ELSIF random() < 0.1 THEN
                        UPDATE app.devices SET badge = badge + 1;
                    ELSIF random() < 0.3 THEN
                        UPDATE app.devices AS d
                        SET push_token = \(columns[0].1), last_seen = clock_timestamp(), device = \(one(of: "'d', 'D'"));
                    ELSE
                        UPDATE app.devices AS d SET (\(names)) = ROW(\(changed.joined(separator: ", ")));
                    END IF;
                    \(row("new_row"));
                    INSERT INTO change SELECT number, jsonb_build_object('old', old_row, 'new', new_row,
                        'began', (extract(epoch FROM began) * 1000000)::bigint, 'ended', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                        'queued', (SELECT coalesce(jsonb_agg(jsonb_build_object('environment', q.environment, 'topic', q.topic, 'token', q.token,
                            'at', (extract(epoch FROM q.registered_at) * 1000000)::bigint, 'device', q.device_id, 'user', q.user_id, 'tags', q.tags,
                            'out', q.unregistered) ORDER BY q.queued_at), '[]') FROM tokenkeeper.registration AS q));
                    DELETE FROM tokenkeeper.registration;
                END LOOP;
            END
            $$;
            SELECT line FROM change ORDER BY n
            """
    }
}
