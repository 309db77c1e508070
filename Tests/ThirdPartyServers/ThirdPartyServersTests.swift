import APNsFeedback
import FakeAPNs
import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

/// The client and the servers that Debian has, each in front of a backend that counts. One at a time: each needs all cores.
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

    private func requests() -> [PushRequest] {
        (0..<count).map { number in
            let digits = String(format: "%012x", number)
            return PushRequest(
                address: TokenAddress(
                    environment: .production, topic: Topic("com.example.app")!,
                    token: DeviceToken(hex: String(repeating: "0", count: 52) + digits)!),
                payload: Array(#"{"aps":{"alert":"Hello"}}"#.utf8), pushType: .alert,
                id: "00000000-0000-4000-8000-" + digits)
        }
    }

    private func campaign(_ kind: ServerKind, _ events: [Campaign.Event]) throws -> CampaignLedger {
        let backend = try Backend()
        defer { backend.stop() }
        let authority = try Self.authority.get()
        let server = try ServerProcess(kind, authority, before: backend)
        try server.start()
        let spaced = events.enumerated().map { (after: ($0 + 1) * count / (events.count + 1), event: $1) }
        let ledger = try Campaign(server: server, backend: backend, requests: requests(), events: spaced)
            .run(trusting: authority)
        // For people who compare clients.
        print("\(kind.testDescription), \(events.map(\.rawValue)): \(ledger.figures)")
        return ledger
    }

    /// - Parameter answersMayBeLost: By the server: then the client must know what is in doubt.
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
            #expect(ledger.interruptedUnseen.count == 0, "what the backend has not seen costs nothing, but for kills")
            #expect(ledger.interruptedSeen.count == 0, "no answer is lost, but for kills")
            #expect(ledger.duplicates.count == 0, "only what was in flight at a kill is sent twice")
        }
    }

    @Test(arguments: servers)
    func `an undisturbed server gets every request once`(_ kind: ServerKind) throws {
        check(try campaign(kind, []))
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
