import Dispatch
import TestThreads
import Testing
import TokenModel

@testable import APNsFeedback

/// Without a server: what one needs for the rest is the fake one.
@Suite(.ownThread) struct PushClientTests {
    /// Port 1 is privileged, and nothing listens there.
    private let options = PushClientOptions(servers: [
        .production: PushServer(host: "127.0.0.1", port: 1), .sandbox: PushServer(host: "127.0.0.1", port: 1),
    ])

    /// Runs a client until so many outcomes are there, then stops it.
    private func outcomes(
        _ requests: [PushRequest], identity: PushIdentity = PushIdentity(), stopsFirst: Bool = false
    ) -> [PushOutcome] {
        let news = DispatchSemaphore(value: 0)
        let over = DispatchSemaphore(value: 0)
        let client = PushClient(identity, options) { news.signal() }
        client.submit(requests)
        #expect(client.state.queued == requests.count)
        if stopsFirst { client.stop(patience: .zero) }
        DispatchQueue.global().async {
            client.run()
            over.signal()
        }
        var outcomes: [PushOutcome] = []
        while outcomes.count < requests.count {
            news.wait()
            outcomes += client.collect()
        }
        client.stop(patience: .zero)
        over.wait()
        client.submit([request(99)])
        #expect(client.collect() == [PushOutcome(request: request(99), sentAt: nil, sends: 0, end: .withdrawn)])
        return outcomes
    }

    @Test func `what APNs would refuse is not sent`() {
        let found = outcomes([request(collapseID: "a\r\nb")])
        #expect(found.first?.end == .unsendable("the collapse id has characters that no header can carry"))
    }

    @Test func `if a server cannot be reached, one attempt is made and the other requests get a retry time`() throws {
        let found = outcomes((1...100).map { request($0) })
        let failures = found.compactMap { outcome -> PushFailure? in
            if case .unanswered(let failure) = outcome.end { failure } else { nil }
        }
        #expect(failures.count == 100)
        #expect(failures.count { $0.kind == .connect } == 1)
        #expect(failures.count { $0.kind == .backingOff && $0.retryAfter != nil } == 99)
        #expect(failures.allSatisfy { !$0.mayHaveArrived })
        #expect(found.allSatisfy { $0.sends == 0 && $0.sentAt == nil })
    }

    @Test func `the environments do not wait for each other`() {
        let found = outcomes([request(1), request(2, environment: .sandbox)])
        #expect(found.count == 2)
    }

    @Test func `a client that is stopped before it starts returns all requests`() {
        let found = outcomes((1...10).map { request($0) }, stopsFirst: true)
        #expect(found.allSatisfy { $0.end == .withdrawn })
    }

    @Test func `without a provider token nothing is sent`() {
        struct NoKey: Error {}
        let found = outcomes([request()], identity: PushIdentity(authorization: { throw NoKey() }))
        guard case .unanswered(let failure) = found.first?.end else {
            Issue.record("it ended as \(found)")
            return
        }
        #expect(failure.kind == .identity)
        #expect(!failure.mayHaveArrived)
    }
}
