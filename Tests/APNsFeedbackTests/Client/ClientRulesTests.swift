import Testing
import TokenModel

@testable import APNsFeedback

/// The parts of the client, each by itself.
@Suite struct `The client, rule by rule` {
    private func answer(_ lines: [String], body: String = "") -> ResponseParser {
        var answer = ResponseParser()
        for line in lines { answer.take(line: Array((line + "\r\n").utf8).span) }
        _ = answer.take(piece: Array(body.utf8).span)
        return answer
    }

    @Test func `a long body of which only the beginning is kept is not taken for a torn one`() {
        #expect(!answer(["HTTP/2 400 "], body: "{" + String(repeating: "x", count: 5000) + "}").isTorn)
    }

    @Test func `nothing of an answer is left for the next one`() {
        var answer = answer(["HTTP/2 400 ", "apns-unique-id: early"], body: "{" + String(repeating: "x", count: 5000))
        answer.clear()
        answer.take(line: Array("HTTP/2 410 ".utf8).span)
        #expect(answer.length == 0 && answer.answer == PushResponse(status: 410))
    }

    @Test func `a status of many digits is no end of the process`() {
        #expect(answer(["HTTP/2 99999999999999999999 "]).status == 999)
    }

    @Test func `what came back last does not widen what came back before`() {
        var admission = Admission(most: 500)
        admission.cameBack(underWay: 3)
        admission.cameBack(underWay: 120)
        #expect(admission.limit(answering: 1) == 3)
    }

    @Test func `one slow answer changes little of the pace`() {
        var pace = PollPace()
        pace.answered(after: .milliseconds(100))
        pace.answered(after: .milliseconds(1700))
        #expect(pace.interval(underWay: PollPace.fewest) == .milliseconds(10))
        #expect(pace.interval(underWay: PollPace.fewest - 1) == .zero)
    }

    @Test func `a repetition that is refused for its provider token, or its connection, may go out once more`() {
        for reason in ["ExpiredProviderToken", "UnrelatedKeyIdInToken"] {
            var delivery = Delivery(request())
            for time in 1...2 { #expect(delivery.goes(at: Instant(microseconds: Int64(time))) == true) }
            delivery.authorization = "old"
            let refused = Delivery.Turn.answer(
                PushResponse(status: 403, body: #"{"reason":"\#(reason)"}"#), isTorn: false)
            #expect(delivery.step(after: refused) { _ in true } != .ends(.answered(PushResponse(status: 403))))
            #expect(delivery.goes(at: Instant(microseconds: 3)) == true, "\(reason)")
            #expect(delivery.goes(at: Instant(microseconds: 4)) == false)
        }
    }

    @Test func `an answer in between is the last word on an earlier loss`() {
        var delivery = Delivery(request())
        #expect(delivery.goes(at: Instant(microseconds: 1)) == true)
        _ = delivery.step(after: .failure(.connectionLost, message: "gone", wasSent: true)) { _ in true }
        #expect(delivery.goes(at: Instant(microseconds: 2)) == true)
        delivery.authorization = "old"
        let expired = PushResponse(status: 403, body: #"{"reason":"ExpiredProviderToken"}"#)
        _ = delivery.step(after: .answer(expired, isTorn: false)) { _ in true }
        guard case .unanswered(let failure) = delivery.endInPause(.seconds(1), host: "h") else {
            Issue.record("it was not answered")
            return
        }
        #expect(failure.kind == .backingOff)
    }

    @Test func `the earlier of two stops holds, and what came too late for the thread is withdrawn`() {
        let mailbox = PushMailbox()
        let now = ContinuousClock.now
        mailbox.stop(by: now)
        mailbox.stop(by: now + .seconds(30))
        #expect(mailbox.takeRequests().stopBy == now)
        #expect(mailbox.put([request(1)]))
        var none: [PushOutcome] = []
        var state = PushClientState(opened: 2)
        state.queued = 5
        mailbox.put(&none, state)
        mailbox.close()
        #expect(mailbox.takeOutcomes().map(\.end) == [.withdrawn])
        #expect(mailbox.state == PushClientState(opened: 2))
    }

    @Test func `servers have connections of their own, and each tells when it was heard of`() {
        let (one, two) = (PushServer(host: "one.example"), PushServer(host: "two.example"))
        let name = ConnectionTable.Name(localPort: 4000, peerPort: 443, peer: 1)
        let now = ContinuousClock.now
        var table = ConnectionTable()
        table.open(name, ConnectionTable.Connection(server: one, socket: 9, heard: now))
        table.join(name)
        table.isUnfit(name)
        #expect(table.isDraining(one) && !table.isDraining(two))
        _ = table.heard(name, at: now + .seconds(1))
        #expect(table.connections[name]?.heard == now + .seconds(1))
    }

    @Test func `every 5xx is the server's, and a pause without a length is a second`() {
        let policy = RetryPolicy(retryFor: .seconds(86_400))
        func step(_ end: PushOutcome.End) -> RetryPolicy.Step {
            policy.step(after: end, of: request(), attempts: 0, firstSentAt: .now, now: .now)
        }
        for status in [500, 502, 504, 599] as [Int32] {
            #expect(step(.answered(PushResponse(status: status))).blame == .server)
        }
        let failure = PushFailure(kind: .backingOff, message: "m", mayHaveArrived: false)
        #expect(step(.unanswered(failure)) == .init(.returned(.seconds(1)), .server))
    }
}
