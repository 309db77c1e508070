import Dispatch
import FakeAPNs
import Foundation
import Synchronization
import Testing
import TokenModel

@testable import APNsFeedback

/// Sends requests with a client of its own, and stops it.
///
/// - Parameters:
///   - meanwhile: Called with each batch of outcomes.
///   - onThread: Called on the client's own thread when some have ended.
func sendAll(
    _ requests: [PushRequest], _ identity: PushIdentity, _ options: PushClientOptions,
    meanwhile: (PushClient, [PushOutcome]) -> Void = { _, _ in }, onThread: @escaping @Sendable () -> Void = {}
) -> [PushOutcome] {
    let (news, over) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
    let client = PushClient(identity, options) {
        onThread()
        news.signal()
    }
    DispatchQueue.global().async {
        client.run()
        over.signal()
    }
    client.submit(requests)
    var outcomes: [PushOutcome] = []
    while outcomes.count < requests.count {
        news.wait()
        let some = client.collect()
        outcomes += some
        meanwhile(client, some)
    }
    client.stop(patience: .zero)
    over.wait()
    #expect(outcomes.count == requests.count, "each has exactly one")
    return outcomes
}

/// Requests with tokens and identifiers of their own.
func requests(_ numbers: ClosedRange<Int>) -> [PushRequest] {
    numbers.map { request($0, token: String(format: "%064x", $0), slot: $0) }
}

func status(_ outcome: PushOutcome) -> Int32? {
    if case .answered(let answer) = outcome.end { answer.status } else { nil }
}

func failure(_ outcome: PushOutcome) -> PushFailure? {
    if case .unanswered(let failure) = outcome.end { failure } else { nil }
}

extension TestAuthority {
    /// One for all suites of the client.
    static let ofClients: Result<TestAuthority, any Error> = Result {
        let files = try TestAuthority()
        // A static value is never released, and its folder would stay.
        atexit { if let kept = try? ofClients.get() { try? FileManager.default.removeItem(atPath: kept.folder) } }
        return files
    }
}
