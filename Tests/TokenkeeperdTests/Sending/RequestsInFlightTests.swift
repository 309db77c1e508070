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

@Suite struct `Requests in hand` {
    @Test func `of those for one token one is under way at a time, in their order`() {
        var hand = RequestsInFlight()
        #expect(hand.take([claimed(1), claimed(2, token: "bb"), claimed(3), claimed(4)]).map(\.id) == ["1", "2"])
        #expect(hand.take([claimed(5), claimed(6, token: "cc")]).map(\.id) == ["6"])
        let address = claimed(1).request.address
        #expect(hand.count == 6 && hand.underWay(address)?.number == 1)
        #expect(hand.goOn(address)?.id == "3")
        #expect(hand.underWay(address)?.number == 3 && hand.count == 5)
        #expect(hand.goOn(address)?.id == "4" && hand.goOn(address)?.id == "5")
        #expect(hand.goOn(address) == nil && hand.underWay(address) == nil && hand.count == 2)
    }

    @Test func `when the one under way speaks for the token, those behind it are given back`() {
        var hand = RequestsInFlight()
        _ = hand.take([claimed(1), claimed(2), claimed(3), claimed(4, token: "bb")])
        #expect(hand.giveBack(claimed(1).request.address).map(\.number) == [2, 3])
        #expect(hand.count == 1 && !hand.isEmpty)
        #expect(hand.giveBack(claimed(1).request.address) == [])
        _ = hand.take([claimed(5, token: "cc"), claimed(6, token: "cc"), claimed(7, token: "cc")])
        hand.keep(only: [4, 7])
        #expect(hand.numbers == [4, 5, 7] && hand.count == 3, "the one under way is known until its end")
        #expect(hand.goOn(claimed(5, token: "cc").request.address)?.id == "7")
        #expect(hand.goOn(claimed(5, token: "cc").request.address) == nil)
        #expect(hand.giveBack(claimed(4, token: "bb").request.address) == [] && hand.isEmpty && hand.count == 0)
    }
}

@Suite struct `The health of the sending` {
    let scope = Outbox.TopicScope(environment: "production", topic: "t")
    let other = Outbox.TopicScope(environment: "production", topic: "u")

    @Test func `twenty faulty messages in a row pause their topic, and one that is answered begins anew`() {
        var health = SendingHealth()
        let now = ContinuousClock.now
        let fault = RetryPolicy.Step(.failed("w"), .message("w"))
        for _ in 1...19 { #expect(health.note(fault, of: scope, by: "main", at: now) == .nothing) }
        #expect(health.note(fault, of: other, by: "main", at: now) == .nothing)
        #expect(health.note(RetryPolicy.Step(.answered), of: scope, by: "main", at: now) == .nothing)
        for _ in 1...19 { #expect(health.note(fault, of: scope, by: "main", at: now) == .nothing) }
        #expect(
            health.note(fault, of: scope, by: "main", at: now)
                == .pauseTopic("20 messages in a row were refused, the last: w")
        )
        #expect(health.note(fault, of: scope, by: "main", at: now) == .nothing, "it begins anew after resume_sending")
    }

    @Test func `a server in trouble is left in peace, longer each time, until it answers again`() {
        var health = SendingHealth()
        var now = ContinuousClock.now
        let trouble = RetryPolicy.Step(.later(.seconds(900), "503"), .server)
        for pause in [15, 30, 60, 120, 240, 480, 900, 900] {
            for _ in 1...19 { #expect(health.note(trouble, of: scope, by: "main", at: now) == .nothing) }
            #expect(!health.isLeftInPeace(.init(credential: "main", environment: "production"), at: now))
            #expect(health.note(trouble, of: other, by: "main", at: now) == .leaveInPeace(.seconds(pause)))
            for _ in 1...50 {
                #expect(health.note(trouble, of: scope, by: "main", at: now) == .nothing, "those were under way")
            }
            #expect(
                health.isLeftInPeace(.init(credential: "main", environment: "production"), at: now)
                    && !health.isLeftInPeace(.init(credential: "main", environment: "sandbox"), at: now))
            now += .seconds(pause)
            #expect(!health.isLeftInPeace(.init(credential: "main", environment: "production"), at: now))
        }
        #expect(health.note(RetryPolicy.Step(.answered), of: scope, by: "main", at: now) == .nothing)
        for _ in 1...19 { _ = health.note(trouble, of: scope, by: "main", at: now) }
        #expect(health.note(trouble, of: scope, by: "main", at: now) == .leaveInPeace(.seconds(15)))
    }

    @Test func `a credential that asks for a pause has it, and a topic that is at fault is paused at once`() {
        var health = SendingHealth()
        let now = ContinuousClock.now
        #expect(
            health.note(
                RetryPolicy.Step(.later(.seconds(1200), "w"), .credential(.seconds(1200))), of: scope, by: "main",
                at: now
            )
                == .leaveInPeace(.seconds(1200)))
        #expect(health.isLeftInPeace(.init(credential: "main", environment: "production"), at: now + .seconds(1199)))
        #expect(
            health.isLeftInPeace(.init(credential: "main", environment: "sandbox"), at: now), "in both environments")
        #expect(
            !health.isLeftInPeace(.init(credential: "other", environment: "production"), at: now),
            "another credential goes on")
        #expect(health.leftInPeace(at: now) == [.init(credential: "main", environment: "production")], "it is told")
        #expect(health.leftInPeace(at: now + .seconds(1200)) == [])
        #expect(
            health.note(RetryPolicy.Step(.returned(nil), .topic("403")), of: other, by: "main", at: now)
                == .pauseTopic("403"))
        #expect(health.note(RetryPolicy.Step(.answered, .token), of: other, by: "main", at: now) == .nothing)
    }
}
