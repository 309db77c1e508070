import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TokenLedger

/// Two daemons, of which one sends to a fake APNs, and what can go wrong with them and their database.
final class StagedFaults {
    /// Whether the fake APNs refuses what is sent to the topic `com.failing.app`.
    private final class Switch: Sendable {
        let isOn = Atomic(false)
    }

    /// Where the daemons serve their metrics: first the one that sends.
    let ports: [Int]

    private let scene: SendingStage
    private let apnsRefuses: Switch
    private let folder: TemporaryDirectory
    private var sender: DaemonProcess
    private var other: DaemonProcess
    /// Its transaction holds the locks that keep results in the queue and sweeps from starting.
    private var holder: Connection

    /// The only fault from the start: the certificate of a credential expires in ten days.
    init() throws {
        let refuses = Switch()
        apnsRefuses = refuses
        let answer: FakeAPNs.Answer = { request in
            guard refuses.isOn.load(ordering: .relaxed) else { return nil }
            return request.topic == "com.failing.app" ? .refused(503, "ServiceUnavailable") : nil
        }
        let scene = try SendingStage(on: .prepared(), answer: answer)
        self.scene = scene
        folder = try TemporaryDirectory()
        ports = [try TestCluster.freePort(), try TestCluster.freePort()]
        for topic in ["example.guarded", "example.stale", "example.due", "example.paused", "failing.app", "nobody.app"]
        {
            try scene.database.psql(
                """
                SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 'com.\(topic)', registered_at => '2026-01-01Z'))
                FROM generate_series(1, 100) AS i
                """)
        }
        try scene.database.psql("SELECT tokenkeeper.register('bb', 'com.example.app')", user: "a_app")
        try scene.database.psql("CREATE SCHEMA app AUTHORIZATION a_app", user: "postgres")
        try scene.database.psql(
            """
            CREATE TABLE app.devices (id bigint PRIMARY KEY, push_token text, last_seen timestamptz);
            CREATE INDEX ON app.devices (push_token);
            SELECT FROM tokenkeeper.attach('app.devices', token => 'push_token', topic => $$'com.example.app'$$, registered_at => 'last_seen')
            """, user: "a_app")
        holder = try scene.database.connect()
        try Self.write("", folder)
        sender = try Self.sender(scene, ports[0], folder, certificateDays: 10)
        other = try Self.other(scene, ports[1])
    }

    /// The metrics of the daemon that sends.
    var page: String {
        PlainClient.get("/metrics", ports[0]).split(separator: "\r\n\r\n", maxSplits: 1).dropFirst().joined()
    }

    /// Sends a push and waits until its result is recorded.
    func send(_ topic: String) throws {
        let token = SendingStage.token(1)
        try run(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(topic)', '\(token)', '{\"aps\":{}}')"
        )
        try eventually("it is sent") { try scene.results(200) > 0 }
    }

    // All faults but those that stop something ------------------------------------------------------------------------

    func stage() throws {
        apnsRefuses.isOn.store(true, ordering: .relaxed)
        // The daemons look at the attached tables once a minute.
        try run("SELECT tokenkeeper.pause_sending('com.example.paused', reason => 'a test')", "a_operator")
        try run("ALTER TABLE app.devices DISABLE TRIGGER USER", "a_app")
        try run("INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('com.example.app', 'not hex', 410)")
        try stageResults()
        try stageSweep()
        try run(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at)
            VALUES ('com.nobody.app', 'aa', '{"aps":{}}', now() - interval '1 hour');
            INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.app', 'aa', '[]');
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.failing.app', lpad(to_hex(i), 64, '0'), '{"aps":{}}' FROM generate_series(1, 30) AS i;
            INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('com.example.paused', 'aa', '{"aps":{}}');
            """)
        try scene.database.psql("CREATE PUBLICATION everything FOR TABLE tokenkeeper.send_request", user: "postgres")
        try crash(times: 4)
        try Self.write("nonsense", folder)
        sender.signal(SIGHUP)
        try eventually("what was queued before the lock is recorded") { try scene.count("send_result") == 0 }
        try holder.execute("LOCK TABLE tokenkeeper.ledger IN SHARE MODE")
        try run(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, queued_at)
            VALUES ('com.example.app', 'aa', 410, \(goneBody), now() - interval '1 hour');
            INSERT INTO tokenkeeper.registration (topic, token, queued_at) VALUES ('com.example.app', 'aa', now() - interval '1 hour');
            """)
    }

    /// Daemons that are killed. They would be noticed after half a minute.
    private func crash(times: Int) throws {
        for _ in 1...times {
            let before = try scene.count("daemon")
            let daemon = try DaemonProcess(scene.database.url(), settings: [])
            try eventually("it reports") { try scene.count("daemon") > before }
            daemon.signal(SIGKILL)
            _ = daemon.wait()
        }
        try run(
            """
            UPDATE tokenkeeper.daemon SET heartbeat_at = heartbeat_at - interval '31 seconds'
            WHERE started_at IN (SELECT started_at FROM tokenkeeper.daemon ORDER BY started_at DESC LIMIT \(times))
            """)
    }

    /// A sender with the wrong environment, and tokens that turn stale.
    private func stageResults() throws {
        try run(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 'com.example.guarded', lpad(to_hex(i), 64, '0'), 400, '{"reason":"BadDeviceToken"}' FROM generate_series(1, 20) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 'com.example.stale', lpad(to_hex(i), 64, '0'), 410, \(goneBody) FROM generate_series(1, 60) AS i;
            """)
    }

    /// Too many tokens are due; and then all sweeps seem to be five hours old.
    private func stageSweep() throws {
        try run(
            """
            UPDATE tokenkeeper.ledger SET unregistered_by_app_at = '2026-01-02Z'
            WHERE topic_id = (SELECT topic_id FROM tokenkeeper.topic WHERE topic = 'com.example.due') AND get_byte(token_key, 31) <= 50;
            SELECT tokenkeeper.recompute_tokens();
            UPDATE tokenkeeper.suppression SET since = clock_timestamp() - interval '91 days'
            WHERE topic_id = (SELECT topic_id FROM tokenkeeper.topic WHERE topic = 'com.example.due')
            """)
        try run("SELECT tokenkeeper.request_sweep()", "a_operator")
        try eventually("a sweep has refused to prune them") { try scene.count("sweep_run", "refused = 50") > 0 }
        // Otherwise a daemon would sweep at once.
        try holder.execute("BEGIN")
        try holder.execute("LOCK TABLE tokenkeeper.lock_sweep_claim IN EXCLUSIVE MODE")
        try eventually("no sweep runs") { try scene.count("sweep_run", "outcome = 'running'") == 0 }
        try run("UPDATE tokenkeeper.sweep_run SET finished_at = finished_at - interval '5 hours'")
    }

    func fix() throws {
        try holder.execute("ROLLBACK")
        apnsRefuses.isOn.store(false, ordering: .relaxed)
        try run("ALTER TABLE app.devices ENABLE TRIGGER USER", "a_app")
        try run("DELETE FROM tokenkeeper.rejected_result", "a_operator")
        try run("DELETE FROM tokenkeeper.failed_send", "a_operator")
        try scene.database.psql("DROP PUBLICATION everything", user: "postgres")
        try run("DELETE FROM tokenkeeper.daemon WHERE heartbeat_at < clock_timestamp() - interval '30 seconds'")
        try run(
            """
            SELECT tokenkeeper.discard_held('com.example.guarded', 'production');
            UPDATE tokenkeeper.topic_policy SET guard_allowance = 100 WHERE topic = 'com.example.guarded';
            """, "a_operator")
        try run(
            "SELECT tokenkeeper.reinstate('com.example.stale', 'production', now() - interval '1 hour', now(), 'stale')",
            "a_operator")
        try run("SELECT tokenkeeper.resume_sending('com.example.paused')", "a_operator")
        try run("DELETE FROM tokenkeeper.send_request WHERE topic = 'com.nobody.app'", "a_operator")
        try Self.write("", folder)
        sender.stop()
        sender = try Self.sender(scene, ports[0], folder, certificateDays: 400)
        // Last: a daemon that stops interrupts its sweep, and the next one is due in an hour.
        try run("SELECT tokenkeeper.request_sweep(force => true)", "a_operator")
    }

    private func run(_ sql: String, _ user: String = "owner") throws {
        try scene.database.psql(sql, user: user)
    }

    // What stops and starts -------------------------------------------------------------------------------------------

    func stopDatabase() { scene.database.cluster.stop() }

    func startDatabase() throws { try scene.database.cluster.start() }

    /// Nobody else uses the cluster.
    func refuseLogin() throws {
        try scene.database.psql("ALTER ROLE a_daemon NOLOGIN", user: "postgres")
        try scene.database.psql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'a_daemon'", user: "postgres"
        )
    }

    func permitLogin() throws { try scene.database.psql("ALTER ROLE a_daemon LOGIN", user: "postgres") }

    func revokeRights() throws {
        try scene.database.psql("REVOKE tokenkeeper_daemon FROM a_daemon", user: "postgres")
    }

    func grantRights() throws { try scene.database.psql("GRANT tokenkeeper_daemon TO a_daemon", user: "postgres") }

    func stopOne() { other.stop() }

    func stopOther() { sender.stop() }

    func startBoth() throws {
        sender = try Self.sender(scene, ports[0], folder, certificateDays: 400)
        other = try Self.other(scene, ports[1])
    }

    private static func write(_ configuration: String, _ folder: TemporaryDirectory) throws {
        try configuration.write(toFile: folder.path + "/tokenkeeperd.toml", atomically: true, encoding: .utf8)
    }

    private static func sender(
        _ scene: SendingStage, _ port: Int, _ folder: TemporaryDirectory, certificateDays: Int
    ) throws -> DaemonProcess {
        let certificate = try scene.files.clientCertificate("days\(certificateDays)", days: certificateDays)
        let failing = scene.key.map { $0.replacing("credential.main", with: "credential.failing") }
            .map { $0.replacing("com.example.*", with: "com.failing.*") }
        let expiring = [
            "credential.expiring.certificate_file=\(certificate.certificate)",
            "credential.expiring.certificate_key_file=\(certificate.key)",
            "credential.expiring.topics=com.expiring.app",
        ]
        let limits = [
            "guard.allowance=5", "guard.max_share=1%", "sweep.prune_allowance=5", "sweep.max_prune_share=1%",
        ]
        return try DaemonProcess(
            scene.database.url(),
            settings: scene.servers + scene.key + failing + expiring + limits + ["metrics.listen=127.0.0.1:\(port)"],
            arguments: ["--config", folder.path + "/tokenkeeperd.toml"],
            environment: ["RUNTIME_DIRECTORY": scene.runtime.path], timing: 0.2)
    }

    private static func other(_ scene: SendingStage, _ port: Int) throws -> DaemonProcess {
        try DaemonProcess(
            scene.database.url(),
            settings: [
                "metrics.listen=127.0.0.1:\(port)", "guard.allowance=5", "guard.max_share=1%",
                "sweep.prune_allowance=5", "sweep.max_prune_share=1%",
            ], timing: 0.2)
    }
}
