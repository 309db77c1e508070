import APNsFeedback
import Testing
import TokenLedger
import TokenModel

@testable import tokenkeeperd

private func claimed(_ number: Int64, token: String = "aa") -> ClaimedRequest {
    ClaimedRequest(
        number: number,
        request: PushRequest(
            address: TokenAddress(environment: .production, topic: Topic("t")!, token: DeviceToken(hex: token)!),
            payload: [], pushType: .alert, id: "\(number)"),
        firstSentAt: .now)
}

@Suite struct `Requests in flight` {
    @Test func `one request per token is in flight at a time, in order`() {
        var requests = RequestsInFlight()
        #expect(requests.take([claimed(1), claimed(2, token: "bb"), claimed(3), claimed(4)]).map(\.number) == [1, 2])
        #expect(requests.take([claimed(5), claimed(6, token: "cc")]).map(\.number) == [6])
        let address = claimed(1).request.address
        #expect(requests.count == 6 && requests.inFlight(address)?.number == 1)
        #expect(requests.next(after: address) == "3")
        #expect(requests.inFlight(address)?.number == 3 && requests.count == 5)
        #expect(requests.next(after: address) == "4" && requests.next(after: address) == "5")
        #expect(requests.next(after: address) == nil && requests.inFlight(address) == nil && requests.count == 2)
        #expect(!requests.holds(address) && requests.holds(claimed(2, token: "bb").request.address))
    }

    @Test func `after a response about the token, the requests behind it go back`() {
        var requests = RequestsInFlight()
        _ = requests.take([claimed(1), claimed(2), claimed(3), claimed(4, token: "bb")])
        #expect(requests.giveBack(claimed(1).request.address).map(\.number) == [2, 3])
        #expect(requests.count == 1 && !requests.isEmpty)
        #expect(requests.giveBack(claimed(1).request.address) == [])
        _ = requests.take([claimed(5, token: "cc"), claimed(6, token: "cc"), claimed(7, token: "cc")])
        #expect(requests.withdraw { $0.number == 5 || $0.number == 6 }.map(\.number) == [6])
        #expect(requests.numbers == [4, 5, 7] && requests.count == 3, "the request in flight stays until its end")
        #expect(requests.inFlight { $0.number != 5 }.sorted() == [4] && requests.inFlight { _ in true }.count == 2)
        let address = claimed(5, token: "cc").request.address
        #expect(requests.next(after: address) == "7")
        #expect(requests.next(after: address) == nil)
        #expect(
            requests.giveBack(claimed(4, token: "bb").request.address) == [] && requests.isEmpty && requests.count == 0)
    }

    @Test func `between the end of a request and the next one, nothing is in flight, and all can be withdrawn`() {
        var requests = RequestsInFlight()
        let address = claimed(1).request.address
        _ = requests.take([claimed(1), claimed(2), claimed(3)])
        requests.ended(address)
        #expect(requests.inFlight(address) == nil && requests.next == [2, 3])
        #expect(requests.inFlight { _ in true } == [])
        #expect(requests.take([claimed(4)]).isEmpty, "it queues behind them")
        #expect(requests.withdraw { $0.number == 2 }.count == 1 && requests.next == [3, 4])
        #expect(requests.handOver().map(\.number) == [3] && requests.handOver().isEmpty && requests.next.isEmpty)
        requests.ended(address)
        #expect(requests.withdraw { _ in true }.map(\.number) == [4] && requests.isEmpty && requests.count == 0)
        #expect(requests.take([claimed(5)]).map(\.number) == [5] && requests.handOver().isEmpty)
    }
}

extension RequestsInFlight {
    /// Ends the request in flight. Returns the identifier of the next one.
    fileprivate mutating func next(after address: TokenAddress) -> String? {
        ended(address)
        return handOver().first?.request.id
    }
}

@Suite struct `The health of sending` {
    let topic = TopicScope(environment: "production", topic: "t")
    let other = TopicScope(environment: "production", topic: "u")

    @Test func `twenty refused messages in a row pause their topic, and an accepted one resets the count`() {
        var health = SendingHealth(.production)
        let now = ContinuousClock.now
        let fault = RetryPolicy.Step(.failed("w"), .message("w"))
        for _ in 1...19 { #expect(health.note(fault, of: topic, by: "main", at: now) == .none) }
        #expect(health.note(fault, of: other, by: "main", at: now) == .none)
        #expect(health.note(RetryPolicy.Step(.answered), of: topic, by: "main", at: now) == .none)
        for _ in 1...19 { #expect(health.note(fault, of: topic, by: "main", at: now) == .none) }
        #expect(
            health.note(fault, of: topic, by: "main", at: now)
                == .pauseTopic("20 messages in a row were refused, the last: w")
        )
        #expect(
            health.note(fault, of: topic, by: "main", at: now) == .none, "the count starts again after resume_sending")
    }

    @Test func `a server that returns errors rests, longer each time, until it responds again`() {
        var health = SendingHealth(.production)
        var now = ContinuousClock.now
        let error = RetryPolicy.Step(.later(.seconds(900), "503"), .server)
        let main = CredentialScope(credential: "main", environment: "production")
        for _ in 1...19 { #expect(health.note(error, of: topic, by: "main", at: now) == .none) }
        #expect(!health.isResting(main, at: now) && !health.isOnTrial(main))
        for pause in [15, 30, 60, 120, 240, 480, 900, 900] {
            // Once it has rested, the failure of one trial is enough.
            #expect(
                health.note(error, of: other, by: "main", isTrial: pause > 15, at: now) == .rest(.seconds(pause)))
            for _ in 1...50 {
                #expect(health.note(error, of: topic, by: "main", at: now) == .none, "they were in flight")
            }
            #expect(
                health.isResting(main, at: now)
                    && !health.isResting(CredentialScope(credential: "main", environment: "sandbox"), at: now))
            now += .seconds(pause)
            #expect(!health.isResting(main, at: now) && health.isOnTrial(main))
            for _ in 1...50 {
                #expect(health.note(error, of: topic, by: "main", at: now) == .none, "they are not the trial")
            }
        }
        #expect(health.note(RetryPolicy.Step(.answered), of: topic, by: "main", at: now) == .none)
        for _ in 1...19 { _ = health.note(error, of: topic, by: "main", at: now) }
        #expect(health.note(error, of: topic, by: "main", at: now) == .rest(.seconds(15)))
    }

    @Test func `a credential rests when APNs asks for a pause, and a topic at fault is paused at once`() {
        var health = SendingHealth(.production)
        let now = ContinuousClock.now
        #expect(
            health.note(
                RetryPolicy.Step(.later(.seconds(1200), "w"), .credential(.seconds(1200))), of: topic, by: "main",
                at: now
            )
                == .rest(.seconds(1200)))
        #expect(
            health.isResting(CredentialScope(credential: "main", environment: "production"), at: now + .seconds(1199)))
        #expect(
            health.isResting(CredentialScope(credential: "main", environment: "sandbox"), at: now),
            "in both environments")
        #expect(
            !health.isResting(CredentialScope(credential: "other", environment: "production"), at: now),
            "another credential goes on")
        #expect(
            health.resting(at: now) == [CredentialScope(credential: "main", environment: "production")],
            "operators see it")
        #expect(health.resting(at: now + .seconds(1200)) == [])
        #expect(
            health.note(RetryPolicy.Step(.returned(nil), .topic("403")), of: other, by: "main", at: now)
                == .pauseTopic("403"))
        #expect(health.note(RetryPolicy.Step(.answered, .token), of: other, by: "main", at: now) == .none)
    }
}
