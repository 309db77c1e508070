import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// The client through links that are slower than it: writes meet a full socket all the time.
///
/// How near the client comes to the rate of the link is measured by `make bench ONLY=sending`.
@Suite(.ownThread) struct `The client through a slow link` {
    private let files: TestAuthority

    init() throws {
        files = try TestAuthority.ofClients.get()
    }

    struct Link: Sendable {
        /// Bytes per second.
        var rate: Int
        var requests: Int
    }

    static let links = [
        Link(rate: 50_000, requests: Soak.size(60, whole: 600)),
        Link(rate: 500_000, requests: Soak.size(400, whole: 1500)),
    ]

    @Test(arguments: links)
    func `nothing is sent twice, and the client works only when bytes have moved`(_ link: Link) throws {
        let apns = try FakeAPNs.start(FakeOptions(files), answer: { _ in nil })
        defer { apns.stop() }
        let slow = try SlowLink(to: apns.port, rate: link.rate)
        defer { slow.close() }
        let token = try files.providerToken()
        var options = PushClientOptions(servers: [.production: PushServer(host: "localhost", port: slow.port)])
        options.authorityFile = files.certificate
        // A client that reads no answers learns so in less time.
        options.answerTimeout = .seconds(15)
        let payload = Array((#"{"aps":{"alert":""# + String(repeating: "x", count: 3780) + #""}}"#).utf8)
        let requests = requests(1...link.requests).map { request in
            var request = request
            request.payload = payload
            return request
        }
        var turns = 0
        let outcomes = sendAll(requests, PushIdentity(authorization: { token }), options) { client, _ in
            turns = client.state.turns
        }
        let wrong = outcomes.filter { status($0) != 200 || $0.sends != 1 }
        #expect(wrong.isEmpty, "\(wrong.count), the first after \(wrong[0].sends) sends: \(wrong[0].end)")
        #expect(Set(outcomes.map(\.request.id)).count == link.requests, "each ends once")
        let seen = apns.records.identifiers
        #expect(requests.allSatisfy { seen[$0.id] == 1 }, "the server sees each once")
        #expect(apns.records.requests == link.requests && apns.records.faults == [])
        #expect(apns.records.connections == 1, "a slow link gets no faster with a second one")
        // A turn moves some ten segments. A client that spins turns thousands of times more often.
        #expect(turns < slow.segments + 300, "\(turns) turns for \(slow.segments) segments")
    }
}
