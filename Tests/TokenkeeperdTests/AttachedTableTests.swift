import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

/// Applications that write to an attached table while daemons are killed. What the table and the ledger must say about each other is computed
/// here a second time, without the functions that attach generates.
@Suite(.ownThread) struct `An attached table in use` {
    @Test func `it agrees with the ledger, however often daemons are killed`() throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let table = try AttachedTable()
        var daemons = try (0..<2).map { _ in try table.daemon() }
        let stop = Atomic(false)
        let applications = try Applications(3, seed: seed) { number, chance in
            var app = try table.database.connect(user: "a_app")
            var writes = 0
            while !stop.load(ordering: .acquiring) {
                usleep(UInt32.random(in: 0..<4_000, using: &chance))
                if try table.write(on: &app, &chance) { writes += 1 }
            }
            return writes
        }
        for _ in 0..<Soak.size(8, whole: 40) {
            // A random moment, on purpose.
            usleep(UInt32.random(in: 0..<250_000, using: &chance))
            let victim = Int.random(in: 0..<daemons.count, using: &chance)
            daemons[victim].signal(SIGKILL)
            #expect(daemons[victim].wait() == -SIGKILL)
            daemons[victim] = try table.daemon()
        }
        stop.store(true, ordering: .releasing)
        let writes = try applications.wait()
        try table.drained()
        print("\(writes) transactions; \(try table.summary())")
        #expect(try table.database.psql("SELECT count(*) FROM tokenkeeper.attachment_failure") == "0")
        #expect(writes > 100)
        let disagreements = try table.disagreements()
        #expect(disagreements == [], "seed \(seed): \(disagreements.prefix(3))")
        let details = try table.detailsThatDiffer()
        #expect(details == [], "seed \(seed): \(details.prefix(3))")
        // A former token that is current again, because the newer one has left the device, has no row.
        for action in ["--repair", "--check"] {
            let checked = try ProgramRun(
                [DaemonProcess.program, "backfill", "app.devices", action],
                environment: ["TOKENKEEPER_DATABASE_URL": table.database.url(user: "a_app")])
            #expect(checked.status == 0, "seed \(seed), \(action): \(checked)")
            print(checked.output)
            try table.drained()
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }
}

/// Threads that each do the same work, with random numbers of their own.
private final class Applications: Sendable {
    private let threads = DispatchGroup()
    private let done = Mutex(0)

    init(
        _ count: Int, seed: UInt64, _ work: @escaping @Sendable (Int, inout SeededChance) throws -> Int
    ) throws {
        for number in 0..<count {
            threads.enter()
            Thread.detachNewThread { [self] in
                defer { threads.leave() }
                var chance = SeededChance(seed: seed &+ UInt64(number) &+ 1)
                do {
                    let result = try work(number, &chance)
                    done.withLock { $0 += result }
                } catch {
                    Issue.record(error)
                }
            }
        }
    }

    /// The sum of what they return.
    func wait() throws -> Int {
        threads.wait()
        return done.withLock { $0 }
    }
}

/// A table with a row for each of a few devices, and the statements that applications execute.
private struct AttachedTable: Sendable {
    let database: TestDatabase
    private static let slots = Soak.size(200, whole: 1000)

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try app(
            """
            CREATE TABLE app.devices (id integer PRIMARY KEY, push_token text, bundle_id text NOT NULL, last_seen timestamptz, device text,
                user_id integer, tags text[], logged_out_at timestamptz, badge integer DEFAULT 0);
            CREATE UNIQUE INDEX ON app.devices (push_token);
            CREATE SEQUENCE app.tokens;
            -- A token that nobody has had, in one of the usual spellings.
            CREATE FUNCTION app.fresh() RETURNS text LANGUAGE sql AS $$
                SELECT CASE n % 3 WHEN 0 THEN h WHEN 1 THEN upper(h)
                       ELSE '<' || (SELECT string_agg(substr(h, i, 8), ' ' ORDER BY i) FROM generate_series(1, 64, 8) AS i) || '>' END
                FROM (SELECT n, lpad(to_hex(n), 60, '0') || 'abcd' AS h FROM nextval('app.tokens') AS n) AS t
            $$
            """)
        // What the tests know: which rows have had a device or a token, and which tokens a row has replaced.
        try app(
            """
            CREATE TABLE app.uses (id integer, device text, token text);
            CREATE TABLE app.rotated (token text);
            CREATE FUNCTION app.plain(text) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT lower(translate($1, '<> ', '')) $$;
            CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN
                    INSERT INTO app.uses VALUES (NEW.id, NEW.device, app.plain(NEW.push_token));
                    IF TG_OP = 'UPDATE' AND OLD.push_token <> NEW.push_token THEN
                        INSERT INTO app.rotated VALUES (app.plain(OLD.push_token));
                    END IF;
                    RETURN NULL;
                END
            $$;
            CREATE TRIGGER note AFTER INSERT OR UPDATE ON app.devices FOR EACH ROW EXECUTE FUNCTION app.note();
            CREATE INDEX ON app.uses (device);
            CREATE INDEX ON app.uses (token)
            """)
        try app(
            """
            SELECT FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => 'bundle_id', registered_at => 'last_seen', device_id => 'device',
                user_id => 'user_id', tags => 'tags', logged_out => 'logged_out_at IS NOT NULL', on_delete => 'unregister')
            """)
    }

    @discardableResult
    func app(_ sql: String) throws -> String { try database.psql(sql, user: "a_app") }

    /// A daemon whose guard holds nothing.
    func daemon() throws -> DaemonProcess {
        try DaemonProcess(
            database.url(),
            settings: [
                "guard.allowance=1000000000", "guard.max_share=100%", "sweep.interval=off",
            ])
    }

    func drained() throws {
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.registration") == "0"
        }
    }

    func summary() throws -> String {
        try database.psql(
            "SELECT string_agg(state || ' ' || n, ', ') FROM (SELECT state, count(*) AS n FROM tokenkeeper.token GROUP BY 1) AS s"
        )
    }

    /// One transaction of one or several changes of one or several rows.
    ///
    /// - Returns: Whether it was committed.
    func write(on connection: inout Connection, _ chance: inout SeededChance) throws -> Bool {
        var statements: [String] = []
        let changes = [1, 1, 1, 2, 3].randomElement(using: &chance)!
        for _ in 0..<changes {
            // With now(), two registrations of one transaction would have one instant.
            let now = changes == 1 ? "now()" : "clock_timestamp()"
            statements += change(&chance).map { $0.replacing("now()", with: now) }
        }
        let isUndone = chance.dice(15) == 0
        do {
            try connection.execute((["BEGIN"] + statements + [isUndone ? "ROLLBACK" : "COMMIT"]).joined(separator: ";"))
            return !isUndone
        } catch let error as DatabaseError where error.sqlState == "40P01" || error.sqlState == "23505" {
            // Applications may block each other, or give two rows the same token.
            try connection.execute("ROLLBACK")
            return false
        }
    }

    private func change(_ chance: inout SeededChance) -> [String] {
        // Half of all changes are of a few rows, so that sessions meet.
        func slot() -> Int { 1 + chance.dice(chance.dice(2) == 0 ? 20 : Self.slots) }
        let few = (0..<[1, 1, 2, 5].randomElement(using: &chance)!).map { _ in slot() }.sorted()
        let these = "id = ANY ('{\(few.map(String.init).joined(separator: ","))}')"
        let (one, other) = (few[0], slot())
        let user = chance.dice(9)
        let tags = ["NULL", "'{}'", "'{a}'", "'{a,b}'"].randomElement(using: &chance)!
        let topic = chance.dice(4) == 0 ? "u" : "t"
        func update(_ changes: String) -> String { "UPDATE app.devices SET \(changes) WHERE \(these)" }
        switch chance.dice(100) {
        case 0..<12:
            // Sometimes it is a device that another row has.
            let device = chance.dice(5) == 0 ? "\(other)" : "s"
            let seen = ["NULL", "now()", "now() - interval '1 day'", "now() - interval '1 day'"].randomElement(
                using: &chance)!
            let out = chance.dice(10) == 0 ? "now()" : "NULL"
            return [
                """
                INSERT INTO app.devices (id, push_token, bundle_id, last_seen, device, user_id, tags, logged_out_at)
                SELECT s, app.fresh(), '\(topic)', \(seen), 'd' || \(device), \(user), \(tags), \(out)
                FROM unnest('{\(Set(few).map(String.init).joined(separator: ","))}'::integer[]) AS s ON CONFLICT (id) DO NOTHING
                """
            ]
        case 12..<20:
            return [
                """
                INSERT INTO app.devices AS d (id, push_token, bundle_id, last_seen, device, user_id) VALUES (\(one), app.fresh(), 't', now(), 'd\(one)', \(user))
                ON CONFLICT (id) DO UPDATE
                SET push_token = excluded.push_token, last_seen = excluded.last_seen, user_id = excluded.user_id, logged_out_at = NULL
                """
            ]
        case 20..<28: return [update("last_seen = now()")]
        case 28..<40: return [update("push_token = app.fresh(), last_seen = now()")]
        case 40..<43:
            // A token that comes without a registration gets its device with the next one: docs/decisions/attachments.md, Instants.
            return [update("push_token = app.fresh()"), update("last_seen = clock_timestamp()")]
        case 43..<51: return [update("user_id = \(user), tags = \(tags)")]
        case 51..<54: return [update("user_id = \(user), last_seen = now(), logged_out_at = NULL")]
        case 54..<62: return [update("logged_out_at = now()")]
        case 62..<68: return [update("logged_out_at = NULL, last_seen = now()")]
        case 68..<73: return [update("logged_out_at = now()"), update("logged_out_at = NULL, last_seen = now()")]
        case 73..<77: return ["DELETE FROM app.devices WHERE \(these)"]
        case 77..<82:
            return [
                """
                WITH gone AS (DELETE FROM app.devices WHERE \(these) RETURNING *)
                INSERT INTO app.devices SELECT g.id, g.push_token, g.bundle_id, now(), g.device, \(user), g.tags FROM gone AS g
                """
            ]
        case 82..<87 where one != other:
            // A token moves to another row.
            return [
                """
                WITH gone AS (DELETE FROM app.devices WHERE id = \(one) RETURNING *)
                UPDATE app.devices AS d SET push_token = g.push_token, last_seen = now(), logged_out_at = NULL FROM gone AS g WHERE d.id = \(other)
                """
            ]
        case 87..<90: return [update("bundle_id = '\(topic)', last_seen = now()")]
        case 90..<92: return [update("push_token = NULL")]
        case 92..<94: return [update("badge = badge + 1")]
        // An ORM saves every column.
        default:
            return [
                update(
                    "push_token = push_token, bundle_id = bundle_id, last_seen = last_seen, device = device, user_id = user_id, tags = tags, badge = 1"
                )
            ]
        }
    }

    /// The rows that have a token, by topic and token in plain hex.
    private static func rows(of table: String) -> String {
        """
        SELECT d.id, d.bundle_id AS topic, lower(translate(d.push_token, '<> ', '')) AS token, d.last_seen, d.device, d.user_id, d.tags,
               d.logged_out_at IS NULL AS registered
        FROM \(table) AS d WHERE d.push_token IS NOT NULL
        """
    }

    /// Where a token is registered in some row and not active in the ledger, or the other way round. A registered token may be superseded, by a
    /// later registration of its device.
    private var disagreeing: String {
        """
        WITH told AS MATERIALIZED (SELECT t.*, l.superseded_at, l.topic_id, l.of_constant FROM tokenkeeper.token AS t
                                   JOIN tokenkeeper.topic AS o USING (environment, topic) JOIN tokenkeeper.ledger AS l USING (topic_id, token_key)),
        rows AS MATERIALIZED (\(Self.rows(of: "app.devices"))),
        tokens AS (SELECT r.topic, r.token, bool_or(r.registered) AS registered, array_agg(r.device) AS devices, count(*) AS rows FROM rows AS r GROUP BY 1, 2)
        SELECT topic, token, coalesce(k.registered, false) AS registered, coalesce(k.rows, 0) AS rows, coalesce(t.state, 'unknown') AS state,
               t.device_id AS device
        FROM tokens AS k FULL JOIN told AS t USING (topic, token)
        WHERE CASE WHEN k.registered THEN
                       (t.state = 'active' OR t.superseded_at IS NOT NULL AND t.device_id = ANY (k.devices) AND EXISTS (
                           SELECT FROM told AS o WHERE o.topic = t.topic AND o.device_id = t.device_id
                                                   AND o.registered_at > t.registered_at)) IS NOT TRUE
                   -- A former token of a device is current again if the newer one has left the device, or if it has had so many tokens that it is a constant.
                   ELSE t.state = 'active' AND NOT t.of_constant AND NOT EXISTS (SELECT FROM app.rotated AS o WHERE o.token = t.token) END
        """
    }

    func disagreements() throws -> [String] {
        try database.psql(
            "SELECT d.topic, right(d.token, 12), CASE WHEN d.registered THEN 'registered' ELSE 'out' END, d.rows, d.state, d.device FROM (\(disagreeing)) AS d ORDER BY 1, 2",
            user: "postgres"
        ).split(separator: "\n").map(String.init)
    }

    /// The rows whose user or tags the ledger does not have. The tokens of a device share their tags, so those of devices and
    /// tokens that several rows have had are left out.
    func detailsThatDiffer() throws -> [String] {
        try database.psql(
            """
            SELECT r.id, r.user_id, t.user_id, r.tags, t.tags FROM (\(Self.rows(of: "app.devices"))) AS r JOIN tokenkeeper.token AS t USING (topic, token)
            WHERE r.registered AND (r.user_id::text IS DISTINCT FROM t.user_id OR (coalesce(r.tags, '{}') <> coalesce(t.tags, '{}') AND NOT EXISTS (
                SELECT FROM app.uses AS o WHERE (o.device = r.device OR o.token = r.token) AND (o.id, o.device) IS DISTINCT FROM (r.id, r.device))))
            """, user: "postgres"
        ).split(separator: "\n").map(String.init)
    }
}
