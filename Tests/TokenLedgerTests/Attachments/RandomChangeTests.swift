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
}

/// What a row says (type `fact`), computed a second time.
private struct Fact: Equatable {
    let environment: String
    let topic: String?
    let token: String
    let at: Int64
    let device: String
    let user: String
    let tags: [String]

    init?(_ row: DeviceRow?) {
        guard let row, let token = row.token, token != "", row.gone != true else { return nil }
        let readable = ["AA11": "aa11", "<aa11>": "aa11"]
        environment = ["dev": "sandbox", "live": "production"][row.kind ?? "null"] ?? row.kind ?? "null"
        topic = row.bundle
        self.token = readable[token] ?? token
        at = max(row.seen ?? 0, 0)
        device = row.device ?? ""
        user = row.user.map(String.init) ?? ""
        tags = row.tags ?? []
    }

    func hasSameTopic(as other: Fact) -> Bool {
        topic != nil && topic == other.topic && environment == other.environment
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
    var returned: Bool
}

private struct Change: Decodable {
    var old: DeviceRow?
    var new: DeviceRow?
    var began: Int64
    var ended: Int64
    var queued: [QueuedRow]

    /// Stands for any instant between `began` and `ended`.
    static let write = Int64.max

    /// The rules of the table, on a table with one row: no other row has a token.
    var expected: [QueuedRow] {
        let (was, isNow) = (Fact(old), Fact(new))
        if old == nil, var row = new, row.gone == true {
            // A row that appears logged out, as of its registration.
            row.gone = nil
            return Fact(row).map { [logout($0, at: $0.at)] } ?? []
        }
        if was == isNow { return [] }
        guard let was else { return isNow.map { [registration($0, at: $0.at, returned: true)] } ?? [] }
        guard let isNow else { return [logout(was, at: Self.write)] }
        let hadIt = isNow.hasSameTopic(as: was) && isNow.token == was.token
        let isSameDevice = isNow.hasSameTopic(as: was) && isNow.device == was.device && was.device != ""
        // An instant in the future has counted when it was set.
        let isOld = hadIt && isNow.at == was.at && isNow.at > ended
        var rows = [registration(isNow, at: isOld ? 0 : isNow.at, returned: !hadIt)]
        if hadIt { return rows }
        if isSameDevice, was.at > isNow.at {
            // Otherwise it would supersede the new token.
            rows.append(
                QueuedRow(
                    environment: was.environment, topic: was.topic, token: was.token, at: was.at, device: "",
                    out: false, returned: false))
        }
        let supersedes = !["t.push-type.controls", "t.push-type.liveactivity"].contains(isNow.topic)
        if !(isSameDevice && was.at < isNow.at && supersedes) { rows.append(logout(was, at: Self.write)) }
        return rows
    }

    private func logout(_ fact: Fact, at instant: Int64) -> QueuedRow {
        QueuedRow(
            environment: fact.environment, topic: fact.topic, token: fact.token, at: instant, out: true, returned: false
        )
    }

    private func registration(_ fact: Fact, at instant: Int64, returned: Bool) -> QueuedRow {
        QueuedRow(
            environment: fact.environment, topic: fact.topic, token: fact.token, at: instant, device: fact.device,
            user: fact.user, tags: fact.tags, out: false, returned: returned)
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

    enum Variant: String, CaseIterable {
        case plain, beforeTrigger, always, partitioned
    }

    @Test(arguments: Variant.allCases)
    func `queue what the table of changes in the documentation says`(variant: Variant) throws {
        let seed = Seed.next(variant.rawValue) >> 1
        let devices = try AttachedDevices(
            table: Self.table + (variant == .partitioned ? " PARTITION BY HASH (id)" : ""),
            first: "CREATE COLLATION app.loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        if variant == .partitioned {
            for number in 0...1 {
                try devices.app(
                    "CREATE TABLE app.part_\(number) PARTITION OF app.devices FOR VALUES WITH (MODULUS 2, REMAINDER \(number))"
                )
            }
        }
        if variant == .beforeTrigger {
            try devices.app(
                "CREATE FUNCTION app.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.badge := NEW.badge + 1; RETURN NEW; END'"
            )
            try devices.app(
                "CREATE TRIGGER touch BEFORE UPDATE ON app.devices FOR EACH ROW EXECUTE FUNCTION app.touch()")
        }
        try devices.attach(
            "on_delete => 'unregister', always => \(variant == .always)",
            arguments: """
                token => 'push_token', topic => 'bundle_id', environment => $$CASE kind WHEN 'dev' THEN 'sandbox' WHEN 'live' THEN 'production' ELSE kind END$$, \
                registered_at => 'last_seen', device_id => 'device', user_id => 'user_id', tags => 'tags', logged_out => 'gone'
                """)
        let lines = try devices.database.psql(Self.changes(seed: seed), user: "postgres").split(separator: "\n")
        #expect(lines.count == 1500)
        var kinds: [Int: Int] = [:]
        for line in lines {
            let change = try JSONDecoder().decode(Change.self, from: Data(line.utf8))
            kinds[change.queued.count, default: 0] += 1
            #expect(change.comparable(change.queued) == change.comparable(change.expected), "seed \(seed): \(line)")
        }
        // Changes that queue nothing, and one to three rows: all were tried.
        #expect(kinds.keys.sorted() == [0, 1, 2, 3])
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
                            'out', q.unregistered IS TRUE, 'returned', q.returned IS TRUE) ORDER BY q.queued_at), '[]') FROM tokenkeeper.registration AS q));
                    DELETE FROM tokenkeeper.registration;
                END LOOP;
            END
            $$;
            SELECT line FROM change ORDER BY n
            """
    }
}
