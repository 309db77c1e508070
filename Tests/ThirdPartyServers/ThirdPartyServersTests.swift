import APNsFeedback
import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenModel

/// Tests the client with the servers of Debian's packages, each in front of a backend that counts. One at a time: each needs all
/// cores.
@Suite(.ownThread, .serialized) struct `The client through servers of others` {
    private static let authority: Result<TestAuthority, any Error> = Result {
        let files = try TestAuthority()
        // A static value is never released, and its folder would stay.
        atexit { if let kept = try? Self.authority.get() { try? FileManager.default.removeItem(atPath: kept.folder) } }
        return files
    }

    static let servers: [ServerKind] =
        [10, 50, 100, 1000].map { .nginx(keepaliveRequests: $0) } + [.apache, .haproxy, .nghttpx]

    private let count = Soak.size(2000, whole: 20_000)

    private func requests() -> [PushRequest] { (0..<count).map(alert) }

    private func campaign(_ kind: ServerKind, _ events: [Campaign.Event]) throws -> CampaignLedger {
        let backend = try Backend()
        defer { backend.stop() }
        let authority = try Self.authority.get()
        let server = try ServerProcess(kind, authority, before: backend.port)
        try server.start()
        let spaced = events.enumerated().map { (after: ($0 + 1) * count / (events.count + 1), event: $1) }
        let ledger = try Campaign(server: server, backend: backend, requests: requests(), events: spaced)
            .run(trusting: authority)
        // For people who compare clients.
        print("\(kind.testDescription), \(events.map(\.rawValue)): \(ledger.figures)")
        return ledger
    }

    /// - Parameter answersMayBeLost: Whether the server may lose answers. Then requests may be sent twice, but the client must know which.
    private func check(_ ledger: CampaignLedger, answersMayBeLost: Bool = false) {
        #expect(ledger.ended.count == count && ledger.open.isEmpty)
        #expect(ledger.endedTwice == [], "every request ends exactly once")
        #expect(ledger.failed.count == 0, "no request fails: \(ledger.failed.first.map { "\($0.end)" } ?? "")")
        #expect(ledger.answeredUnseen == [], "every answer is the backend's")
        #expect(ledger.seen.nameless == 0)
        #expect(Set(ledger.seen.counts.keys).isSubset(of: requests().map(\.id)))
        if answersMayBeLost {
            #expect(ledger.duplicatesUnknown == [], "the client knows what it has sent twice")
        } else {
            #expect(ledger.interruptedUnseen.count == 0, "only kills interrupt unseen requests")
            #expect(ledger.interruptedSeen.count == 0, "only kills lose answers")
            #expect(ledger.duplicates.count == 0, "only what was in flight at a kill is sent twice")
        }
    }

    @Test(arguments: servers)
    func `an undisturbed server gets every request once`(_ kind: ServerKind) throws {
        let ledger = try campaign(kind, [])
        check(ledger)
        #expect(ledger.givenBack == 0, "a connection that has answered can be replaced at once")
    }

    @Test(arguments: servers)
    func `reloads and graceful restarts fail and repeat no request`(_ kind: ServerKind) throws {
        check(try campaign(kind, [.reload, .restart, .reload, .restart]), answersMayBeLost: kind.losesAnswers)
    }

    @Test(arguments: servers)
    func `kills duplicate at most what was in flight`(_ kind: ServerKind) throws {
        let ledger = try campaign(kind, kind.losesAnswers ? [.kill, .kill] : [.kill, .reload, .kill])
        check(ledger)
        #expect(ledger.kills.count == 2)
    }
}
