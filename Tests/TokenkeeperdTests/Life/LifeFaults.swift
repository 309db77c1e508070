import FakeAPNs
import Foundation
import LedgerTestSupport
import TokenLedger

/// A kind of fault.
struct LifeFault: Sendable {
    let name: String
    /// Faults begin in this order, and end in the opposite one. A session that holds locks must not be in the way of a change of the schema, and a server
    /// that stands still in the way of everything. A process that stands still holds the locks of its transaction, too. Of the last kind, one happens at a
    /// time.
    enum Order: Int { case first, holdsLocks, ofServer }
    var order = Order.first
    /// Begins it. Returns what ends it.
    let begin: @Sendable (LifeStage, inout SeededChance) throws -> () throws -> Void

    static let all: [LifeFault] = ofDaemons + ofServer + ofSessions + ofRole + ofProxy + ofPooler + ofApns

    private static let ofDaemons: [LifeFault] =
        [("kill -9 of a daemon", SIGKILL), ("SIGSTOP of a daemon", SIGSTOP), ("a daemon is stopped", SIGTERM)].map {
            name, signal in
            LifeFault(name: name, order: signal == SIGSTOP ? .holdsLocks : .first) { stage, chance in
                let host = Int.random(in: 0..<3, using: &chance)
                stage.daemons[host].signal(signal)
                if signal == SIGKILL { _ = stage.daemons[host].wait() }
                return { try stage.revive(host) }
            }
        } + [
            LifeFault(name: "SIGHUP with a wrong key") { stage, chance in
                let host = Int.random(in: 0..<3, using: &chance)
                try stage.giveKey("no key", to: host)
                stage.daemons[host].signal(SIGHUP)
                return {
                    try stage.giveKey(to: host)
                    stage.daemons[host].signal(SIGHUP)
                }
            },
            // Not the server's: its instants say what happened first.
            LifeFault(name: "a daemon's clock jumps") { stage, chance in
                try stage.ofFirstDaemon.setClock(off: .random(in: -14_400...14_400, using: &chance))
                return { try stage.ofFirstDaemon.setClock(off: 0) }
            },
            LifeFault(name: "SIGUSR1") { stage, _ in
                for daemon in stage.daemons { daemon.signal(SIGUSR1) }
                return {}
            },
        ]

    private static let ofServer: [LifeFault] = [
        LifeFault(name: "kill -9 of a backend", order: .ofServer) { stage, _ in
            var admin = try stage.connect()
            let pid = try admin.scalar(
                "SELECT pid FROM pg_stat_activity WHERE usename = 'a_daemon' ORDER BY random() LIMIT 1")
            if let pid = pid.flatMap({ Int32($0) }) { kill(pid, SIGKILL) }
            return { try eventually("the server has recovered") { (try? stage.connect()) != nil } }
        },
        LifeFault(name: "SIGSTOP of the server", order: .ofServer) { stage, _ in
            try stage.cluster.signal(SIGSTOP)
            return { try stage.cluster.signal(SIGCONT) }
        },
        LifeFault(name: "immediate stop", order: .ofServer) { stage, _ in
            stage.cluster.stop()
            return { try stage.cluster.start() }
        },
        LifeFault(name: "restart", order: .ofServer) { stage, _ in
            stage.cluster.stop(mode: "fast")
            return { try stage.cluster.start() }
        },
        LifeFault(name: "a full disk", order: .ofServer) { stage, _ in
            try stage.ofServer.fillDisk(true)
            return {
                try stage.ofServer.fillDisk(false)
                // Without room for its log, the server ends.
                if (try? eventually("the server is available", within: 5) { (try? stage.connect()) != nil }) == nil {
                    stage.cluster.stop()
                    try stage.cluster.start()
                }
            }
        },
        LifeFault(name: "failover to a synchronous standby", order: .ofServer) { stage, _ in
            let standby = try TestCluster(standbyOf: stage.cluster)
            for setting in ["SET synchronous_standby_names = '*'", "SET synchronous_commit = remote_apply"] {
                try stage.run("ALTER SYSTEM \(setting)")
            }
            try stage.run("SELECT pg_reload_conf()")
            try eventually("the standby is synchronous") {
                var admin = try stage.connect()
                return try admin.scalar("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == "1"
            }
            // Time for the standby to replay what was committed before it became synchronous.
            usleep(300_000)
            stage.cluster.stop()
            return {
                try standby.promote()
                stage.cluster = standby
                stage.proxy.lead(to: standby.port)
                stage.proxy.cut()
            }
        },
    ]

    private static func session(_ name: String, _ sql: @escaping @Sendable (inout SeededChance) -> String) -> LifeFault
    {
        LifeFault(name: name, order: .holdsLocks) { stage, chance in
            let held = HeldSession()
            try held.begin(stage, sql(&chance))
            return { held.end() }
        }
    }

    private static let modes = [
        "ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE",
        "EXCLUSIVE",
        "ACCESS EXCLUSIVE",
    ]
    private static let tables = [
        "ledger", "topic", "send_result", "registration", "send_request", "daemon", "sending_daemon", "status_cache",
        "result_count",
        "token_count", "suppression", "receipt", "token_event", "failed_send", "sweep_run", "paused_topic", "erasure",
    ]

    private static let ofSessions: [LifeFault] = [
        session("a lock") { chance in
            let (table, mode) = (tables.randomElement(using: &chance)!, modes.randomElement(using: &chance)!)
            return "SET lock_timeout = '500ms'; BEGIN; LOCK TABLE tokenkeeper.\(table) IN \(mode) MODE"
        },
        session("locked tokens") { _ in
            "SET lock_timeout = '500ms'; BEGIN; SELECT count(*) FROM (SELECT FROM tokenkeeper.ledger LIMIT 100 FOR UPDATE SKIP LOCKED) AS l"
        },
        session("xmin held") { _ in "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tokenkeeper.ledger" },
        LifeFault(name: "a dump", order: .holdsLocks) { stage, _ in
            let dump = Process()
            dump.executableURL = URL(fileURLWithPath: "/usr/bin/env")
            dump.arguments = ["pg_dump", "-f", "/dev/null", "-d", stage.cluster.url(database: stage.database)]
            dump.standardError = FileHandle.nullDevice
            try dump.run()
            return {
                dump.terminate()
                dump.waitUntilExit()
            }
        },
        LifeFault(name: "terminated backends") { stage, _ in
            try stage.terminateDaemons()
            return {}
        },
        LifeFault(name: "VACUUM FULL") { stage, chance in
            let table = ["ledger", "send_request", "topic"].randomElement(using: &chance)!
            _ = try? stage.run(
                "SET lock_timeout = '500ms'; SET statement_timeout = '3s'; VACUUM FULL tokenkeeper.\(table)")
            return {}
        },
    ]

    private static func role(_ name: String, _ begin: String, _ end: String, terminates: Bool = true) -> LifeFault {
        LifeFault(name: name) { stage, _ in
            try stage.run(begin)
            if terminates { try stage.terminateDaemons() }
            return {
                try stage.run(end)
                if terminates { try stage.terminateDaemons() }
            }
        }
    }

    /// A trigger of somebody else that raises for some rows, or for all.
    private static func raising(_ name: String, _ table: String, _ state: String, when condition: String) -> LifeFault {
        role(
            name,
            """
            CREATE OR REPLACE FUNCTION public.raise() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '\(state)'; END $$;
            CREATE OR REPLACE TRIGGER raise_\(state) BEFORE INSERT OR UPDATE ON tokenkeeper.\(table) FOR EACH ROW
                WHEN (\(condition)) EXECUTE FUNCTION public.raise()
            """, "DROP TRIGGER IF EXISTS raise_\(state) ON tokenkeeper.\(table)", terminates: false)
    }

    private static let ofRole: [LifeFault] = [
        role(
            "no connections left", "ALTER ROLE a_daemon CONNECTION LIMIT 0", "ALTER ROLE a_daemon CONNECTION LIMIT -1"),
        role("login refused", "ALTER ROLE a_daemon NOLOGIN", "ALTER ROLE a_daemon LOGIN"),
        role(
            "rights revoked", "REVOKE tokenkeeper_daemon FROM a_daemon", "GRANT tokenkeeper_daemon TO a_daemon",
            terminates: false),
        role(
            "hostile timeouts",
            "ALTER ROLE a_daemon SET statement_timeout = '5ms'; ALTER ROLE a_daemon SET idle_in_transaction_session_timeout = '5ms'",
            "ALTER ROLE a_daemon RESET ALL"),
        role(
            "hostile settings",
            "ALTER ROLE a_daemon SET default_transaction_read_only = on; ALTER ROLE a_daemon SET search_path = public",
            "ALTER ROLE a_daemon RESET ALL"),
        raising("a trigger that raises for some", "ledger", "P0001", when: "get_byte(new.token_key, 31) % 4 = 0"),
        raising("a table that reports a full disk", "ledger", "53100", when: "true"),
        raising("a trigger that raises on counts", "result_count", "22012", when: "true"),
    ]

    private static let ofProxy: [LifeFault] = [
        LifeFault(name: "cut connections") { stage, _ in
            stage.proxy.cut()
            return {}
        },
        LifeFault(name: "connections that break at COMMIT") { stage, _ in
            stage.proxy.misbehave()
            return { stage.proxy.behave() }
        },
        LifeFault(name: "held replies to COMMIT") { stage, _ in
            stage.proxy.holdReplies(true)
            return { stage.proxy.holdReplies(false) }
        },
    ]

    private static let ofPooler: [LifeFault] = [
        LifeFault(name: "kill -9 of PgBouncer") { stage, _ in
            try stage.pool(false)
            return { try stage.pool(true) }
        },
        LifeFault(name: "SIGSTOP of PgBouncer", order: .holdsLocks) { stage, _ in
            try stage.pooler?.signal(SIGSTOP)
            return { try stage.pooler?.signal(SIGCONT) }
        },
    ]

    private static func apns(_ name: String, _ answer: @escaping @Sendable (inout SeededChance) -> FakeAnswer?)
        -> LifeFault
    {
        LifeFault(name: name) { stage, _ in
            stage.apnsFault.answer.withLock { $0 = answer }
            return { stage.apnsFault.answer.withLock { $0 = nil } }
        }
    }

    private static let ofApns: [LifeFault] = [
        apns("APNs: 500") { _ in .refused(500, "InternalServerError") },
        apns("APNs: some 503") { $0.next() % 3 == 0 ? .refused(503, "Shutdown") : nil },
        apns("APNs refuses the key") { _ in .refused(403, "InvalidProviderToken") },
        apns("APNs answers HTML") { _ in .raw(.init(status: "200", body: Array("<html>Welcome</html>".utf8))) },
        apns("APNs: an old 410 for everything") { _ in .stale(at: 1_500_000_000_000) },
        apns("APNs resets streams") { $0.next() % 4 == 0 ? .reset(code: 2) : nil },
        apns("APNs says GOAWAY") { $0.next() % 10 == 0 ? .goAway(.init(last: .thisNotProcessed)) : nil },
        apns("APNs refuses streams") { $0.next() % 3 == 0 ? .reset(code: 7) : nil },
        LifeFault(name: "APNs drops connections") { stage, _ in
            stage.apns.dropConnections()
            return {}
        },
    ]
}

/// A session that keeps what it has until it ends, whatever becomes of the server.
private final class HeldSession {
    private var connection: Connection?

    func begin(_ stage: LifeStage, _ sql: String) throws {
        var connection = try stage.connect()
        // Somebody else may have a lock that conflicts.
        _ = try? connection.run(sql)
        self.connection = consume connection
    }

    func end() { connection = nil }
}
