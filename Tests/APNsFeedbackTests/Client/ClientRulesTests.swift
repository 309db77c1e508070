import Testing
import TokenModel

@testable import APNsFeedback

/// The parts of the client, each by itself.
@Suite struct `The client, rule by rule` {
    @Test func `a repetition that is refused because of its provider token or its connection may be repeated once`() {
        for reason in ["ExpiredProviderToken", "UnrelatedKeyIdInToken"] {
            var delivery = Delivery(request())
            for time in 1...2 { delivery.goes(at: Instant(microseconds: Int64(time))) }
            delivery.authorization = "old"
            #expect(!delivery.mayGo)
            let refused = Delivery.Turn.answer(PushResponse(status: 403, body: #"{"reason":"\#(reason)"}"#))
            #expect(delivery.step(after: refused) { _ in true } != .ends(.answered(PushResponse(status: 403))))
            #expect(delivery.mayGo, "\(reason)")
            delivery.goes(at: Instant(microseconds: 3))
            #expect(!delivery.mayGo)
        }
    }

    @Test func `an answer after a loss decides the outcome`() {
        var delivery = Delivery(request())
        delivery.goes(at: Instant(microseconds: 1))
        _ = delivery.step(after: .failure(.connectionLost, message: "gone", wasSent: true)) { _ in true }
        delivery.goes(at: Instant(microseconds: 2))
        delivery.authorization = "old"
        let expired = PushResponse(status: 403, body: #"{"reason":"ExpiredProviderToken"}"#)
        _ = delivery.step(after: .answer(expired)) { _ in true }
        guard case .unanswered(let failure) = delivery.endInPause(.seconds(1), host: "h") else {
            Issue.record("it was not answered")
            return
        }
        #expect(failure.kind == .backingOff)
    }

    @Test func `of two stops the earlier one counts, and requests submitted after it are withdrawn`() {
        let mailbox = PushMailbox()
        let now = ContinuousClock.now
        mailbox.stop(by: now)
        mailbox.stop(by: now + .seconds(30))
        #expect(mailbox.takeOrders().stopBy == now)
        #expect(mailbox.put([request(1)]))
        var none: [PushOutcome] = []
        var state = PushClientState(opened: 2)
        state.queued = 5
        mailbox.put(&none, state)
        mailbox.close()
        #expect(mailbox.takeOutcomes().map(\.end) == [.withdrawn])
        #expect(mailbox.state == PushClientState(opened: 2))
    }

    @Test func `a withdrawal concerns the requests that were submitted before it`() {
        let mailbox = PushMailbox()
        #expect(mailbox.put([request(1, slot: 1), request(2, slot: 2)]))
        #expect(mailbox.withdraw([2, 3]))
        #expect(mailbox.takeOutcomes().map(\.request.slot) == [2])
        #expect(mailbox.put([request(3, slot: 3)]), "its slot was another request's")
        let orders = mailbox.takeOrders()
        #expect(orders.requests.map(\.slot) == [1, 3] && orders.withdrawn == [2, 3])
        #expect(!mailbox.withdraw([1]), "the thread has it")
        #expect(mailbox.takeOrders().withdrawn == [1] && mailbox.takeOrders().withdrawn == [])
        #expect(mailbox.takeOutcomes() == [])
    }

    @Test func `requests can be taken out of a queue, and the others keep their order`() {
        var queue = RequestQueue()
        for number in 1...5 { queue.append(Delivery(request(number, slot: number))) }
        for number in [1, 2] { #expect(queue.next()?.request.slot == number) }
        for number in [2, 1] { queue.giveBack(Delivery(request(number, slot: number))) }
        #expect(queue.take { [1, 4].contains($0.request.slot) }.map(\.request.slot) == [1, 4])
        #expect(queue.take { _ in false }.isEmpty && queue.count == 3)
        queue.append(Delivery(request(6, slot: 6)))
        #expect((1...4).map { _ in queue.next()?.request.slot } == [2, 3, 5, 6] && queue.isEmpty)
    }

    @Test func `APNs' errors are the server's fault, and a pause without a length lasts a second`() {
        let policy = RetryPolicy(retryFor: .seconds(86_400))
        func step(_ end: PushOutcome.End) -> RetryPolicy.Step {
            policy.step(after: end, of: request(), attempts: 0, firstSentAt: .now, now: .now)
        }
        for status in [500, 503] as [Int32] {
            let response = PushResponse(status: status, body: #"{"reason":"ANewReason"}"#, apnsID: "id")
            #expect(step(.answered(response)).blame == .server)
        }
        let failure = PushFailure(kind: .backingOff, message: "m", mayHaveArrived: false)
        #expect(step(.unanswered(failure)) == .init(.returned(.seconds(1)), .unreachable))
    }
}
