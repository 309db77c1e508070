import APNsFeedback
import Dispatch
import Foundation
import LedgerTestSupport
import TokenModel

/// Sends requests with a client of its own, and stops it.
///
/// - Returns: The outcomes, in the order in which the requests ended.
/// - Throws: If nothing ends for a minute.
func sendAll(_ requests: [PushRequest], _ identity: PushIdentity, _ options: PushClientOptions) throws -> [PushOutcome]
{
    try withClient(identity, options) { client, news in
        client.submit(requests)
        var outcomes: [PushOutcome] = []
        while outcomes.count < requests.count {
            guard news.wait(timeout: .now() + 60) == .success else { throw TestFailure("nothing ended for a minute") }
            outcomes += client.collect()
        }
        return outcomes
    }
}

/// Runs a client on a thread of its own, and stops it afterwards.
///
/// - Parameter use: Its second argument is signaled when there are outcomes to collect.
func withClient<Value>(
    _ identity: PushIdentity, _ options: PushClientOptions,
    _ use: (PushClient, _ news: DispatchSemaphore) throws -> Value
) rethrows -> Value {
    let (news, over) = (DispatchSemaphore(value: 0), DispatchSemaphore(value: 0))
    let client = PushClient(identity, options) { news.signal() }
    Thread.detachNewThread {
        client.run()
        over.signal()
    }
    defer {
        client.stop(patience: .zero)
        over.wait()
    }
    return try use(client, news)
}

/// An alert with a token and an identifier of its own.
func alert(_ number: Int) -> PushRequest {
    let digits = String(format: "%012x", number)
    return PushRequest(
        address: TokenAddress(
            environment: .production, topic: Topic("com.example.app")!,
            token: DeviceToken(hex: String(repeating: "0", count: 52) + digits)!),
        payload: Array(#"{"aps":{"alert":"Hello"}}"#.utf8), pushType: .alert,
        id: "00000000-0000-4000-8000-" + digits)
}
