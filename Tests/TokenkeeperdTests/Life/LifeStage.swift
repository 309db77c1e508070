import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestRun
import TokenLedger

/// Three daemons that drain, sweep and send, a PostgreSQL that may change, a proxy in between, and the fake APNs. The last daemon connects through
/// PgBouncer.
final class LifeStage {
    var cluster: TestCluster
    let database: String
    let proxy: CuttingProxy
    private(set) var pooler: PackagedProgram?
    private let poolerPort: Int
    /// What the server and the first daemon believe.
    let ofServer: Illusion
    let ofFirstDaemon: Illusion
    /// The address of a login, through the proxy.
    let url: @Sendable (String) -> String
    let apns: FakeAPNs
    let journal: LifeJournal
    /// What APNs responds at the moment to tokens that live; nil accepts.
    let apnsFault: ApnsFault
    private(set) var daemons: [DaemonProcess] = []
    private let files: TestAuthority
    private let folders: [TemporaryDirectory]
    private let runtime: TemporaryDirectory
    private let key: String
    private let timing: Double

    final class ApnsFault: Sendable {
        let answer = Mutex<(@Sendable (inout SeededChance) -> FakeAnswer?)?>(nil)
    }

    init(seed: UInt64, timing: Double) throws {
        self.timing = timing
        (ofServer, ofFirstDaemon) = (try Illusion(), try Illusion())
        cluster = try .prepared(environment: ofServer.environment)
        let made = try cluster.database()
        database = made.name
        proxy = try CuttingProxy(to: cluster.port, seed: seed)
        let (name, port) = (made.name, proxy.port)
        url = { "postgresql://\($0)@/\(name)?host=127.0.0.1&port=\(port)&connect_timeout=3" }
        poolerPort = try TestCluster.freePort()
        pooler = try Self.startPooler(to: port, on: poolerPort)
        files = try SendingStage.authority.get()
        key = try String(contentsOfFile: files.signingKeyFile, encoding: .utf8)
        folders = try (0..<3).map { _ in try TemporaryDirectory() }
        runtime = try TemporaryDirectory()
        let (journal, fault) = (LifeJournal(), ApnsFault())
        (self.journal, apnsFault) = (journal, fault)
        var options = FakeOptions(files)
        options.records = .counts
        options.log = { journal.note($0) }
        apns = try FakeAPNs.start(options) { request in
            var chance = SeededChance(seed: seed &+ UInt64(request.ordinal))
            if let answer = fault.answer.withLock({ $0 })?(&chance) { return answer }
            return request.token.map(LifeJournal.isDead) ?? false ? .stale(at: Int64(LifeJournal.died) * 1000) : nil
        }
        try made.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try made.psql(
            """
            CREATE TABLE app.devices (id bigint PRIMARY KEY, push_token text, last_seen timestamptz);
            CREATE INDEX ON app.devices (push_token);
            SELECT FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => $$'\(LifeJournal.attached)'$$, registered_at => 'last_seen')
            """, user: "a_app")
        try made.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(LifeJournal.sent)', registered_at => to_timestamp(\(LifeJournal.registered))))
            FROM generate_series(1, \(LifeJournal.tokens)) AS i
            """, user: "a_app")
        for host in folders.indices { try giveKey(to: host) }
        daemons = try folders.indices.map(daemon)
    }

    /// PgBouncer in transaction mode, in front of the proxy.
    private static func startPooler(to server: Int, on port: Int) throws -> PackagedProgram {
        let configuration = """
            [databases]
            * = host=127.0.0.1 port=\(server) user=a_daemon
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = \(port)
            unix_socket_dir =
            auth_type = any
            pool_mode = transaction
            """
        return try PackagedProgram("pgbouncer", port: port, files: ["pgbouncer.ini": configuration]) { folder, _ in
            (getuid() == 0 ? ["-u", "postgres"] : []) + ["-q", "\(folder)/pgbouncer.ini"]
        }
    }

    /// Kills it, or starts it again on the same port.
    func pool(_ runs: Bool) throws { pooler = runs ? try Self.startPooler(to: proxy.port, on: poolerPort) : nil }

    private func daemon(_ host: Int) throws -> DaemonProcess {
        let direct = url("a_daemon")
        return try DaemonProcess(
            host == 2 ? direct.replacing("port=\(proxy.port)", with: "port=\(poolerPort)") : direct,
            settings: [
                "send.production_server=localhost:\(apns.port)", "send.sandbox_server=localhost:\(apns.port)",
                "send.ca_file=\(files.certificate)", "credential.main.key_file=\(folders[host].path)/key.p8",
                "credential.main.key_id=\(files.signingKey.id)", "credential.main.team_id=\(files.signingKey.team)",
                "credential.main.topics=com.example.*", "guard.allowance=1000000",
            ],
            environment: ["RUNTIME_DIRECTORY": runtime.path].merging(host == 0 ? ofFirstDaemon.environment : [:]) {
                $1
            },
            timing: timing)
    }

    func giveKey(_ text: String? = nil, to host: Int) throws { _ = try folders[host].write(text ?? key, to: "key.p8") }

    /// Starts a daemon again if it does not run.
    func revive(_ host: Int) throws {
        daemons[host].signal(SIGCONT)
        if daemons[host].isRunning { return }
        _ = daemons[host].wait()
        daemons[host] = try daemon(host)
    }

    /// Directly, as a superuser.
    func connect() throws -> Connection { try cluster.connect(database: database) }

    func run(_ sql: String) throws {
        var admin = try connect()
        try admin.run(sql)
    }

    /// The sessions of the daemons end, so that what was changed about their role takes effect.
    func terminateDaemons() throws {
        try run("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'a_daemon'")
    }

    /// How long it takes from now until a result that is queued now is recorded.
    func heal(within seconds: Int) throws -> Duration {
        let began = ContinuousClock.now
        try eventually("the server is available") { (try? connect()) != nil }
        try run("INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('com.example.probe', 'aa', '200')")
        try eventually("a result is recorded", within: seconds) {
            var admin = try connect()
            return try admin.scalar("SELECT count(*) FROM tokenkeeper.send_result WHERE topic = 'com.example.probe'")
                == "0"
        }
        return began.duration(to: .now)
    }

    /// Everything that waits has been done.
    func settle() throws {
        try eventually("the queues and the outbox are empty", within: 300) {
            var admin = try connect()
            // A request after an error of the server waits for an hour at most.
            try admin.run(
                "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND isfinite(scheduled_at)"
            )
            return try admin.scalar(
                """
                SELECT (SELECT count(*) FROM tokenkeeper.send_result) + (SELECT count(*) FROM tokenkeeper.registration)
                       + (SELECT count(*) FROM tokenkeeper.send_request)
                """) == "0"
        }
        try run(LedgerModel.settle)
        // What a batch wrote while somebody was forgotten is deleted ten minutes later, for a hundred at a time. After an hour, there are thousands.
        var admin = try connect()
        while try admin.scalar("SELECT count(*) FROM tokenkeeper.erasure") != "0" {
            try eventually("the next erasures are finished") {
                try admin.scalar("SELECT tokenkeeper.finish_erasures('0')") != "0"
            }
        }
    }

    func stop() {
        for daemon in daemons {
            daemon.signal(SIGCONT)
            daemon.signal(SIGKILL)
        }
        apns.stop()
        proxy.close()
    }
}
