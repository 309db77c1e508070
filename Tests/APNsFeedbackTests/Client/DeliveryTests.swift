import Testing
import TokenModel

@testable import APNsFeedback

@Suite struct DeliveryTests {
    private let lost = Delivery.Turn.failure(.connectionLost, message: "gone", wasSent: true)

    private func sent(_ times: Int = 1) -> Delivery {
        var delivery = Delivery(request())
        for time in 1...times { go(&delivery, Int64(time)) }
        delivery.authorization = "old"
        return delivery
    }

    private func go(_ delivery: inout Delivery, _ time: Int64) {
        #expect(delivery.mayGo)
        delivery.goes(at: Instant(microseconds: time))
    }

    private func answer(_ status: Int32, _ reason: String? = nil) -> Delivery.Turn {
        .answer(PushResponse(status: status, body: reason.map { #"{"reason":"\#($0)"}"# }))
    }

    @Test(arguments: [200, 400, 404, 405, 410, 413, 429, 500, 503] as [Int32])
    func `an answer is delivered, whatever its status`(_ status: Int32) {
        var delivery = sent()
        let step = delivery.step(after: answer(status, "Any")) { _ in true }
        #expect(step == .ends(.answered(PushResponse(status: status, body: #"{"reason":"Any"}"#))))
    }

    @Test func `a request whose connection was lost is sent a second time, but not a third`() {
        var delivery = sent()
        #expect(delivery.step(after: lost) { _ in true } == .again(connectionIsUnfit: false))
        go(&delivery, 2)
        let failure = PushFailure(kind: .connectionLost, message: "gone", mayHaveArrived: true)
        #expect(delivery.step(after: lost) { _ in true } == .ends(.unanswered(failure)))
        #expect(delivery.sentAt == Instant(microseconds: 1))
        #expect(delivery.sends == 2)
    }

    @Test func `without a connection a request counts as unsent and is not repeated`() {
        var delivery = Delivery(request())
        let turn = Delivery.Turn.failure(.nameResolution, message: "no such host", wasSent: false)
        let failure = PushFailure(kind: .nameResolution, message: "no such host", mayHaveArrived: false)
        #expect(delivery.step(after: turn) { _ in true } == .ends(.unanswered(failure)))
    }

    @Test func `a repetition during the server's pause reports the first failure`() {
        var delivery = sent()
        _ = delivery.step(after: lost) { _ in true }
        let failure = PushFailure(
            kind: .connectionLost, message: "gone", mayHaveArrived: true, retryAfter: .seconds(1))
        #expect(delivery.endInPause(.seconds(1), host: "h") == .unanswered(failure))
    }

    @Test func `an expired provider token is renewed once`() {
        var delivery = sent()
        var refused: [String] = []
        let expired = answer(403, "ExpiredProviderToken")
        let renew = { (token: String) in
            refused.append(token)
            return true
        }
        #expect(delivery.step(after: expired, renew: renew) == .again(connectionIsUnfit: false))
        #expect(refused == ["old"])
        go(&delivery, 2)
        #expect(!delivery.mayGo)
        guard case .ends(.answered(let answer)) = delivery.step(after: expired, renew: renew) else {
            Issue.record("it is renewed twice")
            return
        }
        #expect(answer.status == 403)
        #expect(refused == ["old"])
    }

    @Test func `without a new provider token, the refusal is the answer`() {
        var delivery = sent()
        let step = delivery.step(after: answer(403, "ExpiredProviderToken")) { _ in false }
        #expect(step == .ends(.answered(PushResponse(status: 403, body: #"{"reason":"ExpiredProviderToken"}"#))))
    }

    @Test func `a key that the connection does not know gets another connection, once`() {
        var delivery = sent()
        let unrelated = answer(403, "UnrelatedKeyIdInToken")
        #expect(delivery.step(after: unrelated) { _ in false } == .again(connectionIsUnfit: true))
        go(&delivery, 2)
        guard case .ends(.answered) = delivery.step(after: unrelated, renew: { _ in false }) else {
            Issue.record("it changes twice")
            return
        }
    }

    @Test func `a send that the server refused does not count, and neither does its time`() {
        var delivery = sent()
        delivery.wasRefused(byGoAway: true)
        #expect(delivery.sends == 0 && delivery.sentAt == nil && delivery.endUnsent == .withdrawn)
        go(&delivery, 2)
        go(&delivery, 3)
        #expect(!delivery.mayGo && delivery.sentAt == Instant(microseconds: 2))
        delivery.wasRefused(byGoAway: true)
        #expect(delivery.mayGo && delivery.sends == 1)
    }

    @Test func `a request that may not be repeated is sent only once, whatever happens`() {
        var delivery = sent()
        delivery.repeatNoMore()
        delivery.wasRefused(byGoAway: true)
        #expect(!delivery.mayGo)
        var other = sent()
        _ = other.step(after: lost) { _ in true }
        other.repeatNoMore()
        #expect(!other.mayGo)
        #expect(
            other.endUnsent
                == .unanswered(PushFailure(kind: .connectionLost, message: "gone", mayHaveArrived: true)))
        for reason in ["ExpiredProviderToken", "UnrelatedKeyIdInToken"] {
            var third = sent()
            third.repeatNoMore()
            guard case .ends = third.step(after: answer(403, reason), renew: { _ in true }) else {
                Issue.record("it goes again")
                continue
            }
        }
    }

    @Test func `at the stop, what was never sent is withdrawn`() {
        #expect(Delivery(request()).endAtStop == .withdrawn)
        guard case .unanswered(let failure) = sent().endAtStop else {
            Issue.record("what was sent may have arrived")
            return
        }
        #expect(failure.kind == .stopped)
        #expect(failure.mayHaveArrived)
    }
}
