import APNsFeedback
import LedgerTestSupport
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// How the sender's state keeps a rate, without a daemon and without a database.
@Suite struct `Rates of campaigns and topics` {
    private typealias Other = `The sender's decisions`
    private let start = SendState.Moment(clock: .now, timeOfDay: Instant(microseconds: 1_800_000_000_000_000))
    private let policy = RetryPolicy(retryFor: .seconds(86_400))
    private let campaign: Int64 = 7

    private func state(limit: Int = 100, topics: [String] = []) -> SendState {
        var state = SendState(limit: limit, timing: .production) { _ in "main" }
        #expect(state.looksForCampaigns(at: start.clock) == true)
        if topics.isEmpty { state.take([Outbox.DueCampaign(id: campaign, topic: Other.topic)], at: start.clock) }
        look(&state, topics)
        return state
    }

    private func look(_ state: inout SendState, _ topics: [String], at time: Duration = .zero) {
        #expect(state.looksForTopics(at: start.clock + time) == true)
        var page = Outbox.Scopes()
        page.due = topics.map { TopicScope(environment: "production", topic: $0) }
        page.waiting = page.due
        #expect(state.add(page, at: .now) == false)
    }

    /// Requests for tokens of their own, `every` apart. The first is sent at once.
    private func claim(_ ordinals: ClosedRange<Int64>, every: Duration?, from first: Duration = .zero) -> Outbox.Claim {
        var claim = Outbox.Claim()
        claim.requests = ordinals.map { ordinal in
            var request = Other.claimed(
                CampaignRequest(campaign: campaign, ordinal: ordinal).number, String(100_000 + ordinal))
            request.sendAt = every.map { start.clock + first + $0 * Int(ordinal - ordinals.lowerBound) }
            return request
        }
        claim.dueAt = start.timeOfDay
        return claim
    }

    private func turns(_ state: inout SendState, at time: Duration = .zero) -> [SendState.Turn] {
        state.turns(at: start.clock + time)
    }

    /// How many requests are submitted.
    private func submitted(_ actions: [SendState.Action]) -> Int {
        actions.reduce(0) { count, action in
            guard case .submit(let requests, "main") = action else { return count }
            return count + requests.count
        }
    }

    private func moment(_ time: Duration) -> SendState.Moment {
        SendState.Moment(
            clock: start.clock + time, timeOfDay: start.timeOfDay.advanced(byMicroseconds: time.microseconds))
    }

    /// Looks up what is to be looked up, and lets go what is due.
    private func released(_ state: inout SendState, at time: Duration) -> Int {
        _ = state.take(Outbox.Recalled(), among: state.toLookUp(at: start.clock + time), at: start.clock + time)
        return submitted(state.release(at: moment(time)))
    }

    private func answer(_ ordinals: ClosedRange<Int64>, _ state: inout SendState, at time: Duration) {
        answer(claim(ordinals, every: nil).requests, &state, at: time)
    }

    private func answer(_ requests: [ClaimedRequest], _ state: inout SendState, at time: Duration) {
        let outcomes = requests.map {
            PushOutcome(request: $0.request, sentAt: start.timeOfDay, sends: 1, end: Other.response(200))
        }
        _ = state.take(outcomes, of: "main", by: policy, at: moment(time))
    }

    private func written(_ state: inout SendState) -> [RequestEnding] {
        guard let endings = state.nextWrite else { return [] }
        state.wrote()
        return endings
    }

    @Test func `each request is sent at its instant, and the next claim comes half a second before the last one`()
        throws
    {
        var state = state()
        let turn = try #require(turns(&state).first)
        // 100 per second.
        #expect(state.take(claim(1...100, every: .milliseconds(10)), of: turn, at: start.clock).isEmpty)
        #expect(released(&state, at: .zero) == 1)
        #expect(released(&state, at: .milliseconds(9)) == 0)
        #expect(state.pause(at: start.clock + .milliseconds(9)) == .milliseconds(5), "some go at once, however close")
        #expect(released(&state, at: .milliseconds(55)) == 5)
        #expect(turns(&state, at: .milliseconds(480)) == [])
        #expect(released(&state, at: .milliseconds(490)) == 44)
        #expect(turns(&state, at: .milliseconds(490)).count == 1)
        #expect(!state.isEmpty)
    }

    @Test func `while the server is slow, at most the limit is in flight, and no more is claimed`() throws {
        var state = state(limit: 8)
        let turn = try #require(turns(&state).first)
        _ = state.take(claim(1...20, every: .milliseconds(10)), of: turn, at: start.clock)
        #expect(released(&state, at: .seconds(1)) == 8)
        answer(1...4, &state, at: .seconds(1))
        #expect(turns(&state, at: .seconds(1)) == [], "there is room, but what is late goes first")
        #expect(released(&state, at: .seconds(1)) == 4)
        answer(5...12, &state, at: .seconds(1))
        #expect(released(&state, at: .seconds(1)) == 8)
        answer(13...20, &state, at: .seconds(1))
        #expect(turns(&state, at: .seconds(1)).count == 1)
    }

    @Test func `what waits for its instant goes back when its topic is paused, its server rests, or the daemon ends`()
        throws
    {
        for end in ["paused", "rest", "shutdown"] {
            var state = state()
            let turn = try #require(turns(&state).first)
            let claimed = claim(1...60, every: .milliseconds(10))
            _ = state.take(claimed, of: turn, at: start.clock)
            #expect(released(&state, at: .milliseconds(200)) == 21)
            switch end {
            case "paused":
                // One of them shows that the campaign is paused, and then all are looked up.
                var counts: [Int] = []
                for time in [700, 705, 710] {
                    let time = start.clock + .milliseconds(time)
                    let asked = state.toLookUp(at: time)
                    counts.append(asked.count)
                    var recalled = Outbox.Recalled()
                    recalled.paused = Set(asked).subtracting(claimed.requests[..<21].map(\.number))
                    _ = state.take(recalled, among: asked, at: time)
                }
                #expect(counts == [22, 38, 0])
            case "rest":
                let outcomes = claimed.requests[0..<21].map {
                    PushOutcome(request: $0.request, sentAt: start.timeOfDay, sends: 1, end: Other.response(503))
                }
                _ = state.take(outcomes, of: "main", by: policy, at: moment(.milliseconds(200)))
                #expect(released(&state, at: .milliseconds(300)) == 0)
            default: state.giveBackPaced()
            }
            #expect(written(&state).count { $0.fate == .returned(nil) } == 39, "\(end)")
            #expect(released(&state, at: .seconds(2)) == 0, "\(end)")
        }
    }

    /// Claims, look-ups and what somebody forgets, at random instants, as a daemon meets them that may be slow or stopped.
    @Test(arguments: [true, false], [10, 100, 2000])
    func `nothing is sent that was last known more than a second before, and few are looked up twice`(
        ofCampaign: Bool, perSecond: Int
    ) throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        var state = state(limit: 10_000, topics: ofCampaign ? [] : ["a"])
        let turn = try #require(turns(&state).first)
        let every = Duration.seconds(1) / perSecond
        var (time, claimedTo, sendAt) = (Duration.zero, Int64(0), Duration.zero)
        var known: [Int64: Duration] = [:]
        var forgotten: [Int64: Duration] = [:]
        var (sent, lookedUp) = (0, 0)
        while time < .seconds(12) {
            // Usually a batch is claimed at once. Now and then, a campaign gets a rate while it has a larger one.
            if sendAt < time + .milliseconds(500) {
                let count = Int64(max(perSecond / 2, 1)) * (time == .zero ? 4 : 1)
                let claim = claim(claimedTo + 1...claimedTo + count, every: every, from: max(sendAt, time))
                _ = state.take(claim, of: turn, at: start.clock + time)
                for request in claim.requests { known[request.number] = time }
                claimedTo += count
                sendAt = max(sendAt, time) + every * Int(count)
            }
            if Int.random(in: 0..<20, using: &chance) == 0, let one = known.keys.randomElement(using: &chance) {
                forgotten[one] = forgotten[one] ?? time
            }
            let asked = state.toLookUp(at: start.clock + time)
            lookedUp += asked.count
            var recalled = Outbox.Recalled()
            recalled.gone = Set(asked).intersection(forgotten.keys)
            for number in asked { known[number] = time }
            _ = state.take(recalled, among: asked, at: start.clock + time)
            // The process stops between a look-up and the send.
            if Int.random(in: 0..<300, using: &chance) == 0 { time += .seconds(2) }
            for case .submit(let requests, _) in state.release(at: moment(time)) {
                for request in requests {
                    let since = time - (known.removeValue(forKey: request.number) ?? .seconds(-60))
                    #expect(since < .seconds(1), "seed \(seed)")
                    sent += 1
                }
                answer(requests, &state, at: time)
                // As it was: forgotten and not noticed, if at all, for less than a second.
                for request in requests where forgotten[request.number].map({ $0 + .seconds(1) < time }) == true {
                    Issue.record("seed \(seed): sent \(request.number), which was forgotten")
                }
            }
            while state.nextWrite != nil { state.wrote() }
            time += .milliseconds(Int.random(in: 1...30, using: &chance))
        }
        #expect(sent > perSecond * 3, "seed \(seed)")
        #expect(Double(lookedUp) < 1.2 * Double(claimedTo) + 100, "seed \(seed): \(lookedUp) of \(claimedTo)")
    }

    @Test func `a request that another daemon had meanwhile is held and sent once`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        _ = state.take(claim(1...10, every: .milliseconds(100)), of: turn, at: start.clock)
        #expect(released(&state, at: .milliseconds(400)) == 5)
        // The process stops for some minutes. The other daemon returns all of them, and this one claims them again.
        _ = state.take(
            claim(1...10, every: .milliseconds(100), from: .seconds(300)), of: turn, at: moment(.seconds(300)).clock)
        var sent = 0
        for time in stride(from: 300_000, through: 301_000, by: 50) {
            sent += released(&state, at: .milliseconds(time))
        }
        #expect(sent == 5, "the others have been sent, and their responses are to come")
        answer(1...10, &state, at: .seconds(301))
        #expect(written(&state).count == 10)
        #expect(state.isEmpty)
    }

    @Test func `without a rate, too, a request that is in flight is not sent again`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        #expect(submitted(state.take(claim(1...10, every: nil), of: turn, at: start.clock)) == 10)
        #expect(submitted(state.take(claim(6...15, every: nil), of: turn, at: start.clock)) == 5)
        answer(1...15, &state, at: .seconds(1))
        #expect(written(&state).count == 15)
        #expect(state.isEmpty && state.handOver().isEmpty)
    }

    @Test func `what is much too late goes back, and the rest is sent`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        _ = state.take(claim(1...100, every: .milliseconds(100)), of: turn, at: start.clock)
        #expect(released(&state, at: .milliseconds(14_950)) == 50)
        #expect(written(&state).map(\.fate) == Array(repeating: .returned(nil), count: 50))
        answer(51...100, &state, at: .seconds(15))
        _ = written(&state)
        #expect(state.isEmpty)
    }

    @Test func `what expires while it waits for its instant goes back`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        var claim = claim(1...20, every: .milliseconds(100))
        for place in claim.requests.indices {
            // 0 means one attempt, at any time.
            claim.requests[place].request.expiration = place % 2 == 0 ? 1_800_000_001 : 0
        }
        _ = state.take(claim, of: turn, at: start.clock)
        #expect(released(&state, at: .milliseconds(950)) == 10)
        #expect(released(&state, at: .milliseconds(1900)) == 5)
        #expect(
            written(&state)
                == claim.requests[10...].filter { $0.request.expiration != 0 }.map {
                    RequestEnding(number: $0.number, fate: .returned(nil))
                })
    }

    @Test func `what the database no longer knows is not sent`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        let claimed = claim(1...4, every: .seconds(1), from: .seconds(1))
        _ = state.take(claimed, of: turn, at: start.clock)
        _ = state.reconcile(claimed: [claimed.requests[0].number])
        #expect(released(&state, at: .seconds(9)) == 1)
    }

    @Test func `a topic with a rate is claimed again in time, and not forgotten because others took its slots`() throws
    {
        var state = state(topics: ["a"])
        let turn = try #require(turns(&state).first)
        _ = state.take(claim(1...100, every: .milliseconds(10)), of: turn, at: start.clock)
        #expect(turns(&state, at: .milliseconds(489)) == [])
        #expect(released(&state, at: .milliseconds(490)) == 50)
        #expect(turns(&state, at: .milliseconds(490)).count == 1)
        // Another daemon was faster.
        _ = state.take(Outbox.Claim(), of: turn, at: start.clock + .milliseconds(490))
        #expect(turns(&state, at: .milliseconds(500)) == [])
        #expect(turns(&state, at: .milliseconds(540)).count == 1)
        #expect(released(&state, at: .seconds(1)) == 50)
        answer(1...100, &state, at: .seconds(1))
        // Nothing more is due.
        _ = state.take(Outbox.Claim(), of: turn, at: start.clock + .milliseconds(1300))
        #expect(turns(&state, at: .seconds(2)) == [])
        look(&state, ["a"], at: .seconds(2))
        #expect(turns(&state, at: .seconds(2)).count == 1)
    }

    @Test func `with many topics, each has its turn, and one with all claimed is left at once`() throws {
        let names = (1...450).map { "t\($0)" }
        var state = state(limit: 1000, topics: names)
        var had: [String] = []
        for _ in 0..<3 {
            let round = turns(&state)
            #expect(round.count <= 200)
            had += round.map(\.topic.topic)
        }
        #expect(Set(had) == Set(names))
        let round = turns(&state)
        var claim = Outbox.Claim()
        claim.dueAt = start.timeOfDay
        claim.isComplete = true
        for turn in round { _ = state.take(claim, of: turn, at: start.clock) }
        had = []
        for _ in 0..<3 { had += turns(&state).map(\.topic.topic) }
        #expect(Set(had) == Set(names).subtracting(round.map(\.topic.topic)))
    }
}
