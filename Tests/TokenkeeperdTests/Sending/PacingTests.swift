import APNsFeedback
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
        var state = SendState(limit: limit) { _ in "main" }
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
        #expect(state.add(page) == false)
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

    private func released(_ state: inout SendState, at time: Duration) -> Int {
        submitted(state.release(at: start.clock + time))
    }

    private func answer(_ ordinals: ClosedRange<Int64>, _ state: inout SendState, at time: Duration) {
        let outcomes = claim(ordinals, every: nil).requests.map {
            PushOutcome(request: $0.request, sentAt: start.timeOfDay, sends: 1, end: Other.response(200))
        }
        let now = SendState.Moment(clock: start.clock + time, timeOfDay: start.timeOfDay)
        _ = state.take(outcomes, of: "main", by: policy, at: now)
    }

    private func written(_ state: inout SendState) -> [RequestEnding] {
        guard case .endings(let endings)? = state.nextWrite else { return [] }
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
        for end in ["recalled", "rest", "shutdown", "forgotten"] {
            var state = state()
            let turn = try #require(turns(&state).first)
            let claimed = claim(1...60, every: .milliseconds(10))
            _ = state.take(claimed, of: turn, at: start.clock)
            // Another campaign is running: this one is paused, or has nothing more to claim.
            _ = state.looksForCampaigns(at: start.clock + .milliseconds(50))
            state.take([Outbox.DueCampaign(id: 8, topic: Other.other)], at: start.clock + .milliseconds(50))
            #expect(released(&state, at: .milliseconds(200)) == 21)
            let later = start.clock + .milliseconds(200)
            switch end {
            case "recalled":
                let asked = state.toLookUp(at: later)
                #expect(Set(asked) == Set(claimed.requests[21...].map(\.number)), "they are looked up at once")
                var recalled = Outbox.Recalled()
                recalled.paused = Set(asked)
                #expect(state.take(recalled).isEmpty)
            case "forgotten":
                var recalled = Outbox.Recalled()
                recalled.gone = Set(claimed.requests[21...].map(\.number))
                #expect(state.take(recalled).isEmpty)
            case "rest":
                let outcomes = claimed.requests[0..<21].map {
                    PushOutcome(request: $0.request, sentAt: start.timeOfDay, sends: 1, end: Other.response(503))
                }
                _ = state.take(
                    outcomes, of: "main", by: policy,
                    at: SendState.Moment(clock: later, timeOfDay: start.timeOfDay))
                #expect(released(&state, at: .milliseconds(300)) == 0)
            default: state.giveBackPaced()
            }
            let returned = written(&state).filter { $0.fate == .returned(nil) }
            #expect(returned.count == (end == "forgotten" ? 0 : 39), "\(end)")
            #expect(released(&state, at: .seconds(2)) == 0, "\(end)")
        }
    }

    @Test func `after the process was stopped, nothing is sent that another daemon may have`() throws {
        var state = state()
        let turn = try #require(turns(&state).first)
        _ = state.take(claim(1...100, every: .milliseconds(10)), of: turn, at: start.clock)
        #expect(released(&state, at: .seconds(60)) == 0)
        #expect(written(&state).map(\.fate) == Array(repeating: .returned(nil), count: 100))
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
