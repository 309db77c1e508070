import ArgumentParser
import Dispatch
import FakeAPNs
import Foundation

@main
struct FakeAPNsCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "fake-apns",
        abstract: "An APNs of your own, on this machine.",
        discussion: "docs/reference/fake-apns.md has the script's format and examples. SIGTERM or SIGINT ends it.")

    @Option(help: ArgumentHelp("The folder of certificates and keys. Missing ones are made.", valueName: "folder"))
    var authority: String

    @Option(help: "The port on 127.0.0.1; 0 for a free one, which is printed.")
    var port = 2197

    @Option(help: ArgumentHelp("What to answer: a JSON file.", valueName: "file"))
    var script: String?

    @Option(
        help: ArgumentHelp(
            "The allowed topics, separated by commas. [default: all]", valueName: "topics"))
    var topics: String?

    @Flag(help: "Answer as api.sandbox.push.apple.com, with apns-unique-id.")
    var sandbox = false

    @Flag(help: "Allow one stream per connection until a valid JWT has arrived on it, as APNs does.")
    var provesFirst = false

    @Option(help: "The most concurrent streams of a connection.")
    var maximumStreams = 1000

    @Option(
        help: "The most RST_STREAM frames of a connection within 30 seconds. One more gets GOAWAY.")
    var maximumResets = 200

    @Flag(help: "Require no JWT.")
    var open = false

    @Flag(help: "Accept client certificates of the authority instead of a JWT.")
    var clientCertificates = false

    @Flag(help: "Refuse a new JWT of the same key within 20 minutes.")
    var limitTokenUpdates = false

    @Option(help: "Threads. One is enough for tens of thousands of requests a second.")
    var threads = 1

    @Option(help: ArgumentHelp("Write counts to this file, as JSON, at the end.", valueName: "file"))
    var report: String?

    @Option(
        help: ArgumentHelp(
            "Append a line per request: apns-id, token, topic, status, reason, connection, time in ms.",
            valueName: "file"))
    var log: String?

    @Flag(help: "Print only the port, once the server listens.")
    var quiet = false

    func validate() throws {
        guard 0...65_535 ~= port else { throw ValidationError("--port is \(port), expected 0 to 65535") }
        guard 1...64 ~= threads else { throw ValidationError("--threads is \(threads), expected 1 to 64") }
        guard maximumStreams >= 1 else {
            throw ValidationError("--maximum-streams is \(maximumStreams), expected 1 or more")
        }
        guard 1...1_000_000 ~= maximumResets else {
            throw ValidationError("--maximum-resets is \(maximumResets), expected 1 to 1000000")
        }
    }

    func run() throws {
        // Before any thread starts: threads inherit the blocked signals. In a thread that does not block them, they end the process.
        let end = EndSignal()
        let files = try TestAuthority(keptIn: URL(fileURLWithPath: authority).path)
        let requestLog = try log.map { try RequestLog(appendingTo: $0) }
        var options = FakeOptions(files)
        options.port = port
        options.threads = threads
        options.topics = Set((topics ?? "").split(separator: ",").map(String.init))
        options.sandbox = sandbox
        options.provesFirst = provesFirst
        options.maximumStreams = maximumStreams
        options.maximumResets = maximumResets
        options.requiresProviderToken = !open
        options.clientAuthority = clientCertificates ? files.certificate : nil
        options.tokenUpdates = limitTokenUpdates ? .every20MinutesPerServer : .unlimited
        options.records = .counts
        if let requestLog { options.log = { requestLog.append($0) } }

        let rules = try script.map { try FakeScript(file: $0) } ?? FakeScript(json: "{}")
        let apns: FakeAPNs = try FakeAPNs.start(options, script: rules)
        print(quiet ? "\(apns.port)" : try Welcome(apns, files, script: script).text)
        fflush(nil)
        end.wait()
        apns.stop()
        requestLog?.flush()
        if let report { try Report(apns.records).write(to: report) }
    }
}

/// SIGTERM or SIGINT.
private struct EndSignal {
    private var signals = sigset_t()

    init() {
        sigemptyset(&signals)
        sigaddset(&signals, SIGTERM)
        sigaddset(&signals, SIGINT)
        pthread_sigmask(SIG_BLOCK, &signals, nil)
        signal(SIGPIPE, SIG_IGN)
    }

    func wait() {
        var signals = signals
        var number: Int32 = 0
        sigwait(&signals, &number)
    }
}
