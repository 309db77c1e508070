import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import Testing

@testable import tokenkeeperd

/// A database, a fake APNs, and daemons that send from one to the other.
struct SendingStage {
    static let authority: Result<TestAuthority, any Error> = Result {
        let authority = try TestAuthority()
        // A static value is never released, and its folder would stay.
        atexit {
            if let files = try? SendingStage.authority.get() {
                try? FileManager.default.removeItem(atPath: files.folder)
            }
        }
        return authority
    }

    /// Tests send thousands of requests, and a debug build on a busy machine sends some hundred a second.
    static let longest = Soak.isWhole ? 1800 : 180

    let database: TestDatabase
    let apns: FakeAPNs
    let files: TestAuthority
    let topic = "com.example.app"
    /// The runtime directory of the daemons.
    let runtime: TemporaryDirectory

    init(
        on cluster: TestCluster = .shared, _ change: (inout FakeOptions) throws -> Void = { _ in },
        answer: @escaping FakeAPNs.Answer = { _ in nil }
    ) throws {
        files = try Self.authority.get()
        database = try cluster.database()
        runtime = try TemporaryDirectory()
        var options = FakeOptions(files)
        options.records = .latest(200_000)
        try change(&options)
        apns = try FakeAPNs.start(options, answer: answer)
        try database.addQueueFunction()
    }

    /// The settings of a credential with the authority's signing key.
    var key: [String] {
        [
            "credential.main.key_file=\(files.signingKeyFile)", "credential.main.key_id=\(files.signingKey.id)",
            "credential.main.team_id=\(files.signingKey.team)", "credential.main.topics=com.example.*",
        ]
    }

    var servers: [String] {
        [
            "send.production_server=localhost:\(apns.port)", "send.sandbox_server=localhost:\(apns.port)",
            "send.ca_file=\(files.certificate)", "drain.poll_idle=100ms",
        ]
    }

    /// - Parameters:
    ///   - credential: The settings of the credential, if not the authority's key.
    ///   - settings: Other settings, which override the defaults here.
    ///   - timing: The fraction of the product's pauses that it takes.
    func daemon(credential: [String]? = nil, _ settings: [String] = [], timing: Double = 1) throws -> DaemonProcess {
        try DaemonProcess(
            database.url(), settings: servers + (credential ?? key) + settings,
            environment: ["RUNTIME_DIRECTORY": runtime.path], timing: timing)
    }

    static func token(_ number: Int) -> String { String(format: "%064x", number) }

    func register(_ numbers: ClosedRange<Int>) throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(topic)', device_id => 'd' || i, tags => '{World}')) "
                + "FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS i", user: "a_app")
    }

    /// Queues single requests for the sendable tokens with a tag, or of a device.
    ///
    /// - Returns: The number of requests.
    @discardableResult
    func enqueue(_ arguments: String = "tags => '{World}'", payload: String = #"{"aps":{"alert":"Hello"}}"#) throws
        -> Int
    {
        Int(try database.psql("SELECT public.queue('\(payload)', '\(topic)', \(arguments))", user: "postgres")) ?? -1
    }

    /// Begins a campaign.
    ///
    /// - Returns: Its `campaign_id`.
    @discardableResult
    func campaign(_ arguments: String = "tags => 'World'", payload: String = #"{"aps":{"alert":"Hello"}}"#) throws
        -> Int
    {
        Int(try database.psql("SELECT tokenkeeper.enqueue('\(payload)', '\(topic)', \(arguments))", user: "a_sender"))
            ?? -1
    }

    /// The counts of a campaign that are not 0, in the order of the columns.
    func progress(_ campaign: Int) throws -> [String: Int] {
        let names = [
            "addressed", "waiting", "accepted", "stale", "suspect", "suppressed", "failed", "cancelled", "forgotten",
        ]
        let counts = try database.psql(
            "SELECT \(names.joined(separator: ", ")) FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)"
        )
        return Dictionary(
            uniqueKeysWithValues: zip(names, counts.split(separator: "|").map { Int($0) ?? -1 }).filter { $0.1 != 0 })
    }

    func state(_ campaign: Int) throws -> String {
        try database.psql("SELECT state FROM tokenkeeper.campaign WHERE campaign_id = \(campaign)")
    }

    /// Waits until a campaign has ended and every response is recorded.
    func ended(_ campaign: Int) throws {
        try eventually("campaign \(campaign) has ended", within: Self.longest) { try state(campaign) == "ended" }
        try eventually("the queue is empty", within: Self.longest) { try count("send_result") == 0 }
    }

    func count(_ table: String, _ condition: String = "true") throws -> Int {
        Int(try database.psql("SELECT count(*) FROM tokenkeeper.\(table) WHERE \(condition)")) ?? -1
    }

    func results(_ status: Int) throws -> Int {
        Int(try database.psql("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_stat WHERE status = \(status)"))
            ?? -1
    }

    /// Waits until no request waits and every response is recorded.
    func settled() throws {
        try eventually("the outbox is empty", within: Self.longest) { try count("send_request") == 0 }
        try eventually("the queue is empty", within: Self.longest) { try count("send_result") == 0 }
    }

    /// Waits until the daemon has looked up the requests that it holds, as it does within a second: until a heartbeat that comes later.
    func daemonHasLooked() throws {
        let then = try database.psql("SELECT clock_timestamp() + interval '1 second'")
        try eventually("a heartbeat after a look-up") { try count("sending_daemon", "heartbeat_at > '\(then)'") > 0 }
    }

    /// The daemons that have a file of marks.
    var marked: [String] { SentMarkFiles(directory: runtime.path).daemons }

    /// How often each `apns-id` got a response or might have got one.
    var sends: [String: Int] { apns.records.identifiers }
}
