import APNsFeedback
import ArgumentParser
import Foundation
import LedgerTestSupport
import Synchronization
import TokenModel

/// `tokenkeeper-bench push`: the daemon's client in a separate process, so that its processor time and memory can be measured.
///
/// Requests are made on the fly, and submitted and collected at the daemon's pace: the next batch waits behind the requests in
/// flight.
struct PushCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "push", abstract: "Sends requests with the daemon's client, and prints the outcome as JSON.",
        shouldDisplay: false)

    @Option var port: Int
    @Option var authorityFile: String
    @Option var keyFile: String
    @Option var requests: Int
    @Option var inFlight = 500
    @Option var connections = 2
    @Option(help: "The payload has so many bytes, instead of the usual payload.")
    var payloadBytes: Int?

    @Flag(help: "Print what libcurl does to standard error.")
    var trace = false

    /// The daemon's pause between two turns.
    private static let pace: useconds_t = 5000

    func run() throws {
        let token = try SendingWork.providerToken(keyFile: keyFile)
        let sink: @Sendable (String) -> Void = { line in Progress.say(line) }
        let bell = DispatchSemaphore(value: 0)
        let client = PushClient(
            PushIdentity(authorization: { try token.text(at: .now) }),
            PushClientOptions(
                servers: [.production: PushServer(host: "localhost", port: port)], authorityFile: authorityFile,
                inFlight: inFlight, connections: connections, trace: trace ? sink : nil),
            ended: { bell.signal() })
        let thread = Thread { client.run() }
        thread.start()
        let tokens = try (0..<SendingWork.tokens).map { number in
            guard let token = DeviceToken(hex: SendingWork.token(number)), let topic = Topic(SendingWork.topic) else {
                throw TestFailure("no token")
            }
            return TokenAddress(environment: .production, topic: topic, token: token)
        }
        let payload = Array(SendingWork.payload(ofBytes: payloadBytes).utf8)
        // Foundation opens a file for each UUID. One UUID plus a number is as unique as the daemon's, which come from the
        // database.
        let prefix = UUID().uuidString.lowercased().prefix(24)
        func request(_ number: Int) -> PushRequest {
            let digits = String(number, radix: 16)
            let id = prefix + String(repeating: "0", count: 12 - digits.count) + digits
            return PushRequest(
                address: tokens[number % tokens.count], payload: payload, pushType: .alert, id: String(id))
        }

        var (submitted, ended, sends) = (0, 0, 0)
        var account = SendingClient.Account(seconds: 0, answers: [:], memory: [])
        let start = ContinuousClock.now
        while ended < requests {
            let room = min(requests - submitted, 2 * inFlight - (submitted - ended))
            if room > 0 {
                client.submit((submitted..<submitted + room).map(request))
                submitted += room
            }
            bell.wait()
            usleep(Self.pace)
            for outcome in client.collect() {
                guard case .answered(let answer) = outcome.end else { throw TestFailure("\(outcome.end)") }
                sends += outcome.sends
                account.answers[Int(answer.status), default: 0] += 1
                ended += 1
                if ended == requests / 4 || ended == requests {
                    account.memory?.append(ProcessorTime.kilobytes("VmRSS", of: getpid()) * 1024)
                }
            }
        }
        account.seconds = start.duration(to: .now) / .seconds(1)
        account.sends = sends
        account.connections = client.state.connectionsOpened
        client.stop(patience: Duration.seconds(5))
        print(String(decoding: try JSONEncoder().encode(account), as: UTF8.self))
    }
}
