import LedgerTestSupport
import Testing

/// A daemon whose three outputs are watched: its log, its `Status:` line, and the view `status`.
///
/// The sweep's timer is off, and so is the sender unless a test configures one.
final class FaultStage {
    let database: TestDatabase
    private let systemd: NotifyListener
    private var daemon: DaemonProcess?

    init(_ database: TestDatabase) throws {
        self.database = database
        systemd = try NotifyListener()
        try database.psql(
            "SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{aa,bb}'::text[]) AS t")
    }

    func start(_ settings: [String] = [], environment: [String: String] = [:]) throws {
        daemon = try DaemonProcess(
            database.url(), settings: ["sweep.interval=off", "drain.poll_idle=200ms"] + settings,
            environment: environment.merging(["NOTIFY_SOCKET": systemd.address]) { $1 }, timing: 0.2)
    }

    func queueResults() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', t, 410, '{"reason":"Unregistered","timestamp":1794000000123}' FROM unnest('{aa,bb}'::text[]) AS t
            """, user: "a_sender")
    }

    var log: String { daemon?.logged ?? "" }
    var status: String { systemd.status }
    /// All that the view says in words.
    var view: String {
        get throws {
            try database.psql(
                "SELECT concat_ws('; ', s.results_wait_because, array_to_string(s.warnings, '; ')) FROM tokenkeeper.status AS s",
                user: "a_reader")
        }
    }

    /// Waits until all three outputs name the cause.
    func reports(_ cause: String, log inLog: String? = nil) throws {
        try eventually("the log names \(inLog ?? cause)") { log.contains(inLog ?? cause) }
        try eventually("Status: names \(cause)") { status.contains(cause) }
        try eventually("the view names \(cause)") { try view.contains(cause) }
        #expect(!status.contains("the queue is empty"))
    }

    /// Waits until neither `Status:` nor the view names the cause any more.
    func isOver(_ cause: String) throws {
        try eventually("Status: says that all is well, not \(status)") { status.hasPrefix("the queue is empty") }
        try eventually("the view no longer names \(cause)") { try !view.contains(cause) }
    }

    func stop() {
        #expect(daemon?.stop() == 0)
        daemon = nil
    }
}
