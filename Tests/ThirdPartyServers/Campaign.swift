import APNsFeedback
import Dispatch
import FakeAPNs
import Foundation
import LedgerTestSupport
import TokenModel

/// Sends requests through a server that is reloaded, restarted or killed meanwhile, and records how each request ended.
struct Campaign {
    enum Event: String {
        /// The server reloads its configuration.
        case reload
        /// The server stops when its streams have ended, and is started again.
        case restart
        /// The server is killed with all its processes, and started again.
        case kill
    }

    /// How many requests the client holds at a time: more than are in flight, so that some wait in its queue.
    private static let window = 2000
    /// Seconds without any outcome after which something hangs: longer than all time limits of the client together.
    private static let patience = 120

    let server: ServerProcess
    let backend: Backend
    let requests: [PushRequest]
    /// What happens when a number of requests have ended.
    let events: [(after: Int, event: Event)]

    func run(trusting authority: TestAuthority) throws -> CampaignLedger {
        let options = PushClientOptions(
            servers: [.production: PushServer(host: "127.0.0.1", port: server.port)],
            authorityFile: authority.certificate)
        return try withClient(PushIdentity(), options, run)
    }

    private func run(_ client: PushClient, _ news: DispatchSemaphore) throws -> CampaignLedger {
        var ledger = CampaignLedger()
        var (waiting, coming) = (requests[...], events[...])
        /// Requests to submit again, each not before its instant.
        var givenBack: [(request: PushRequest, at: ContinuousClock.Instant)] = []
        while ledger.ended.count < requests.count {
            let now = ContinuousClock.now
            let due = givenBack.filter { $0.at <= now }.map(\.request)
            givenBack.removeAll { $0.at <= now }
            let more = waiting.prefix(max(0, Self.window - ledger.open.count - due.count))
            waiting = waiting.dropFirst(more.count)
            if !due.isEmpty || !more.isEmpty {
                ledger.open.formUnion((due + more).map(\.id))
                client.submit(due + more)
            }
            let pause = givenBack.map { $0.at - now }.min() ?? .seconds(Self.patience)
            let limit = DispatchTime.now() + .milliseconds(Int(pause / .milliseconds(1)) + 1)
            if news.wait(timeout: limit) == .timedOut, givenBack.isEmpty {
                throw TestFailure("nothing ended for \(Self.patience) s; \(ledger.open.count) are open: \(server.log)")
            }
            for outcome in client.collect() {
                if let again = ledger.note(outcome, hasSeen: backend.hasSeen) {
                    givenBack.append((again.request, .now + again.after))
                }
            }
            while let (after, event) = coming.first, ledger.ended.count >= after {
                coming = coming.dropFirst()
                try perform(event, &ledger)
            }
        }
        ledger.connections = client.state.connectionsOpened
        ledger.seen = backend.seen
        return ledger
    }

    private func perform(_ event: Event, _ ledger: inout CampaignLedger) throws {
        switch event {
        case .reload: server.signal(server.kind.reload)
        case .restart:
            server.signal(server.kind.gracefulStop)
            var askedAt = ContinuousClock.now
            try eventually("\(server.kind.testDescription) accepts no more") {
                if !server.accepts { return true }
                // A server that is still reloading may lose the signal.
                if askedAt.duration(to: .now) > .seconds(2) {
                    askedAt = .now
                    server.signal(server.kind.gracefulStop)
                }
                return false
            }
            try server.start()
        case .kill:
            let open = ledger.open
            server.killAll()
            try eventually("the backend has read all that was sent to it", within: 20) { backend.isIdle }
            let seen = backend.seen.counts
            ledger.kills.append(open)
            ledger.seenAtKill.append(open.filter { seen[$0] != nil })
            try eventually("\(server.kind.testDescription) accepts no more") { !server.accepts }
            try server.start()
        }
    }
}
