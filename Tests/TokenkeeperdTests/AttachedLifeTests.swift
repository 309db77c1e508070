import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TestThreads
import Testing

/// Tables of the shapes that people attach. Their rows come and go, share tokens, log out and return, while daemons and checks are killed. In the
/// end a repair makes the ledger what the rows say, and a check finds nothing. What the rows say is asked here of the rows alone.
@Suite(.ownThread) struct `Attached tables of all shapes` {
    enum Shape: String, CaseIterable {
        /// Rows may have the same token.
        case plain
        /// A row has two tokens, an alert and a VoIP token: it is attached twice.
        case pairs
        case partitioned
        /// Logical replication copies the application's table, and the copy is attached.
        case replicated
    }

    @Test(arguments: Shape.allCases)
    func `a repair makes the ledger what the rows say, and then a check finds nothing`(shape: Shape) throws {
        let seed = Seed.next(shape.rawValue)
        var chance = SeededChance(seed: seed)
        let life = try TableLife(shape)
        var daemons = try (0..<2).map { _ in try life.daemon() }
        let stop = Atomic(false)
        let applications = DispatchGroup()
        for number in 0..<3 {
            applications.enter()
            Thread.detachNewThread {
                defer { applications.leave() }
                var chance = SeededChance(seed: seed &+ UInt64(number) &+ 1)
                do {
                    while !stop.load(ordering: .acquiring) { try life.write(&chance) }
                } catch {
                    Issue.record(error)
                }
            }
        }
        for number in 0..<Soak.size(6, whole: 60) {
            if number % 2 == 0 {
                let victim = Int.random(in: 0..<daemons.count, using: &chance)
                daemons[victim].signal(SIGKILL)
                #expect(daemons[victim].wait() == -SIGKILL)
                daemons[victim] = try life.daemon()
            } else {
                let check = try life.check(life.names.randomElement(using: &chance)!, "--repair")
                // A random moment, on purpose.
                usleep(UInt32.random(in: 0..<400_000, using: &chance))
                if check.isRunning { kill(check.processIdentifier, SIGKILL) }
                check.waitUntilExit()
            }
        }
        stop.store(true, ordering: .releasing)
        applications.wait()
        try life.settled()
        // A repair of one attachment may be news for the other.
        for action in ["--repair", "--repair", "--check"] {
            for name in life.names {
                let check = try life.check(name, action)
                check.waitUntilExit()
                if action == "--check" { #expect(check.terminationStatus == 0, "seed \(seed): \(name) does not agree") }
                try life.settled()
            }
        }
        for (topic, column) in zip(life.topics, life.columns) {
            let wrong = try life.database.psql(Self.differences(column, topic), user: "postgres")
            #expect(wrong == "", "seed \(seed), \(shape), \(topic)")
        }
        #expect(try life.database.psql("SELECT count(*) FROM tokenkeeper.attachment_failure") == "0")
        print(
            "\(shape): \(try life.database.psql("SELECT string_agg(state || ' ' || n, ', ') FROM (SELECT state, count(*) AS n FROM tokenkeeper.token GROUP BY 1) AS s"))"
        )
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    /// A token is active if and only if a row has it that is not logged out, and then it has the user of such a row. Exempt is a token that was registered
    /// later than its rows say: a row may have gone while no trigger saw it.
    private static func differences(_ column: String, _ topic: String) -> String {
        """
        SELECT string_agg(coalesce(r.token, t.token) || ' ' || coalesce(t.state, 'unknown') || ' ' || coalesce(t.user_id, '-')
                          || ' of ' || coalesce(r.users::text, 'no row'), E'\\n')
        FROM (SELECT d.\(column) AS token, array_agg(d.user_id::text) AS users, max(d.last_seen) AS seen FROM app.devices AS d
              WHERE d.\(column) IS NOT NULL AND d.logged_out_at IS NULL GROUP BY 1) AS r
        FULL JOIN (SELECT k.* FROM tokenkeeper.token AS k WHERE k.topic = '\(topic)') AS t ON t.token = r.token
        WHERE (r.token IS NOT NULL) IS DISTINCT FROM (t.state = 'active')
            AND NOT EXISTS (SELECT FROM app.devices AS o WHERE r.token IS NULL AND o.\(column) = t.token AND o.last_seen < t.registered_at)
          OR r.token IS NOT NULL AND t.user_id <> ALL (r.users) AND t.registered_at <= r.seen
        """
    }
}

/// A table and its attachments, and the application that writes to it.
private struct TableLife: Sendable {
    let database: TestDatabase
    /// Where the application writes: another database if it is replicated.
    private let written: TestDatabase
    let names: [String]
    let topics: [String]
    let columns: [String]

    private static let rows = Soak.size(60, whole: 600)

    init(_ shape: `Attached tables of all shapes`.Shape) throws {
        // The slot of a publication waits for the transactions of all databases.
        let cluster = shape == .replicated ? try TestCluster.prepared() : .shared
        database = try cluster.database()
        written = shape == .replicated ? try cluster.database(migrated: false) : database
        columns = shape == .pairs ? ["push_token", "voip_token"] : ["push_token"]
        topics = columns.map { $0 == "push_token" ? "com.example.app" : "com.example.app.voip" }
        names = columns
        let table = """
            CREATE TABLE app.devices (id integer PRIMARY KEY, push_token text, voip_token text, user_id integer, last_seen timestamptz,
                logged_out_at timestamptz)
            """
        try database.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try database.psql(
            shape != .partitioned
                ? table
                : """
                \(table) PARTITION BY RANGE (id);
                CREATE TABLE app.devices_1 PARTITION OF app.devices FOR VALUES FROM (0) TO (\(Self.rows / 2));
                CREATE TABLE app.devices_2 PARTITION OF app.devices FOR VALUES FROM (\(Self.rows / 2)) TO (1000000)
                """, user: "a_app")
        let always = shape == .replicated ? ", always => true" : ""
        for (column, (name, topic)) in zip(columns, zip(names, topics)) {
            try database.psql(
                """
                CREATE INDEX ON app.devices (\(column));
                SELECT FROM tokenkeeper.attach('app.devices', name => '\(name)', token => '\(column)', topic => $$'\(topic)'$$, user_id => 'user_id',
                    registered_at => 'last_seen', logged_out => 'logged_out_at IS NOT NULL', on_delete => 'unregister'\(always))
                """, user: "a_app")
        }
        if shape == .replicated {
            try written.psql(
                "CREATE SCHEMA app; \(table); CREATE PUBLICATION devices FOR TABLE app.devices; GRANT ALL ON SCHEMA app TO a_app; GRANT ALL ON app.devices TO a_app",
                user: "postgres")
            // Within one cluster, CREATE SUBSCRIPTION would wait for itself if it made the slot.
            try written.psql("SELECT pg_create_logical_replication_slot('devices', 'pgoutput')", user: "postgres")
            try database.psql(
                """
                CREATE SUBSCRIPTION devices CONNECTION 'host=\(cluster.folder) port=\(cluster.port) user=postgres dbname=\(written.name)'
                PUBLICATION devices WITH (create_slot = false)
                """, user: "postgres")
        }
    }

    func daemon() throws -> DaemonProcess {
        try DaemonProcess(
            database.url(), settings: ["guard.allowance=1000000000", "guard.max_share=100%", "sweep.interval=off"],
            timing: 0.1)
    }

    func check(_ name: String, _ action: String) throws -> Process {
        let process = Process()
        process.executableURL = URL(fileURLWithPath: DaemonProcess.program)
        process.arguments = ["backfill", name, action]
        process.environment = ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")]
        process.standardOutput = FileHandle.nullDevice
        process.standardError = FileHandle.nullDevice
        try process.run()
        return process
    }

    /// Waits until all that was written has arrived and is drained.
    func settled() throws {
        if written.name != database.name {
            let end = try written.psql("SELECT pg_current_wal_lsn()", user: "postgres")
            try eventually("the changes are applied") {
                try written.psql(
                    "SELECT coalesce(confirmed_flush_lsn >= '\(end)', false) FROM pg_replication_slots WHERE slot_name = 'devices'",
                    user: "postgres") == "t"
            }
        }
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.registration", user: "postgres") == "0"
        }
    }

    /// One transaction of one to three changes. Applications may meet. One transaction in ten bypasses the triggers, except those of the replica.
    func write(_ chance: inout SeededChance) throws {
        let changes = (0..<Int.random(in: 1...3, using: &chance)).map { _ in change(&chance) }.joined(separator: "; ")
        let isSeen = written.name != database.name || chance.dice(10) > 0
        do {
            try written.psql(
                "\(isSeen ? "" : "SET session_replication_role = replica;") BEGIN; \(changes); COMMIT",
                user: isSeen ? "a_app" : "postgres")
        } catch
        // What PostgreSQL asks an application to repeat: the second one if a row of a partitioned table moves meanwhile.
            where ["deadlock detected", "already moved to another partition"].contains(where: "\(error)".contains)
        {}
    }

    private func change(_ chance: inout SeededChance) -> String {
        let id = Int.random(in: 1...Self.rows, using: &chance)
        // A few tokens more than rows: tokens meet in several rows, go, and come back.
        func token() -> String {
            String(format: "'%064x'", Int.random(in: 1...Self.rows * 5 / 4, using: &chance))
        }
        let user = Int.random(in: 1...9, using: &chance)
        let instant = "clock_timestamp()"
        switch Int.random(in: 0..<20, using: &chance) {
        case 0..<5:
            return """
                INSERT INTO app.devices VALUES (\(id), \(token()), \(token()), \(user), \(instant)) ON CONFLICT (id) DO UPDATE
                SET push_token = excluded.push_token, voip_token = excluded.voip_token, user_id = excluded.user_id, last_seen = excluded.last_seen,
                    logged_out_at = NULL
                """
        case 5..<8: return "UPDATE app.devices SET push_token = \(token()), last_seen = \(instant) WHERE id = \(id)"
        case 8: return "UPDATE app.devices SET voip_token = \(token()), last_seen = \(instant) WHERE id = \(id)"
        case 9..<11: return "UPDATE app.devices SET logged_out_at = \(instant) WHERE id = \(id)"
        case 11..<13: return "UPDATE app.devices SET logged_out_at = NULL WHERE id = \(id)"
        case 13: return "UPDATE app.devices SET user_id = \(user), last_seen = \(instant) WHERE id = \(id)"
        case 14: return "UPDATE app.devices SET last_seen = \(instant) WHERE id BETWEEN \(id) AND \(id + 5)"
        case 15: return "UPDATE app.devices SET push_token = NULL WHERE id = \(id)"
        case 16:
            return
                "UPDATE app.devices SET id = id + 10000 WHERE id = \(id) AND NOT EXISTS (SELECT FROM app.devices AS d WHERE d.id = \(id + 10000))"
        case 17: return "DELETE FROM app.devices WHERE id BETWEEN \(id) AND \(id + 3)"
        default: return "DELETE FROM app.devices WHERE id IN (\(id), \(id + 10000))"
        }
    }
}
