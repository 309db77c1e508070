import APNsFeedback
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// How the sender's state takes campaigns, without a daemon and without a database.
@Suite struct `Turns of campaigns` {
    private typealias Other = `The sender's decisions`
    private let start = SendState.Moment(clock: .now, timeOfDay: Instant(microseconds: 1_800_000_000_000_000))

    private func state(_ due: [Outbox.DueCampaign], limit: Int = 1000, covered: Set<String> = ["a", "b"]) -> SendState {
        var state = SendState(limit: limit, timing: .production) { covered.contains($0.topic) ? "main" : nil }
        #expect(state.looksForCampaigns(at: start.clock) == true)
        state.take(due, at: start.clock)
        return state
    }

    private func campaign(_ id: Int64, topic: TopicScope = Other.topic, dueIn: Duration = .zero) -> Outbox.DueCampaign {
        Outbox.DueCampaign(id: id, topic: topic, dueIn: dueIn)
    }

    private func claimed(_ campaign: Int64, _ ordinals: ClosedRange<Int64>) -> Outbox.Claim {
        var claim = Outbox.Claim()
        claim.requests = ordinals.map {
            Other.claimed(
                CampaignRequest(campaign: campaign, ordinal: $0).number, token(campaign << 16 | $0))
        }
        claim.dueAt = start.timeOfDay
        return claim
    }

    private func token(_ number: Int64) -> String {
        let digits = String(number, radix: 16)
        return String(repeating: "0", count: 16 - digits.count) + digits
    }

    private func turns(_ state: inout SendState, at time: Duration = .zero) -> [Int64?] {
        state.turns(at: start.clock + time).map(\.source.campaign)
    }

    @Test func `campaigns take turns with each other and with the topics, and share the room`() throws {
        var state = state([campaign(1), campaign(2)])
        #expect(state.looksForTopics(at: start.clock) == true)
        var page = Outbox.Scopes()
        (page.due, page.waiting) = ([Other.topic], [Other.topic])
        #expect(state.add(page, at: .now) == false)
        let round = state.turns(at: start.clock)
        #expect(round.map(\.source.campaign) == [nil, 1, 2])
        #expect(round.map { state.room(for: $0) } == [333, 333, 333])
        _ = state.take(claimed(1, 1...500), of: round[1], at: start.clock)
        #expect(state.room(for: round[2]) == 166, "a third of what is left")
        #expect(turns(&state) == [nil, 2, 1], "who was served comes last")
        _ = state.take(claimed(2, 1...500), of: round[2], at: start.clock)
        #expect(state.room(for: round[1]) == 0, "no room")
        #expect(turns(&state) == [])
    }

    @Test func `a campaign with little room gets a whole batch, however small the limit is`() throws {
        var state = state([campaign(1)], limit: 2)
        let turn = try #require(state.turns(at: start.clock).first)
        #expect(state.room(for: turn) == Outbox.partOfBatch)
        let actions = state.take(claimed(1, 1...500), of: turn, at: start.clock)
        guard case .submit(let requests, "main")? = actions.first else { throw TestFailure() }
        #expect(requests.count == 500)
        #expect(turns(&state) == [])
    }

    @Test
    func
        `a campaign is claimed from when its rate allows it, and looked for every 50 ms, or 200 ms while there is none`()
    {
        var state = state([campaign(1, dueIn: .milliseconds(30))])
        #expect(turns(&state) == [])
        #expect(state.pause(at: start.clock) == .milliseconds(30))
        #expect(turns(&state, at: .milliseconds(30)) == [1])
        #expect(state.looksForCampaigns(at: start.clock + .milliseconds(49)) == false)
        #expect(state.looksForCampaigns(at: start.clock + .milliseconds(50)) == true)
        state.take([], at: start.clock + .milliseconds(50))
        #expect(turns(&state, at: .milliseconds(50)) == [])
        #expect(state.pause(at: start.clock + .milliseconds(60)) == .milliseconds(190))
        #expect(state.looksForCampaigns(at: start.clock + .milliseconds(249)) == false)
        #expect(state.looksForCampaigns(at: start.clock + .milliseconds(250)) == true)
    }

    @Test func `after a claim that finds nothing, another look comes first, and soon`() throws {
        var state = state([campaign(1)])
        let turn = try #require(state.turns(at: start.clock).first)
        _ = state.take(Outbox.Claim(), of: turn, at: start.clock)
        #expect(turns(&state) == [])
        #expect(state.isEmpty)
        #expect(state.looksForCampaigns(at: start.clock + .milliseconds(10)) == true)
    }

    @Test func `a campaign that no credential covers is neither addressed nor claimed, and is a problem`() {
        var due = campaign(1)
        due.needsAddressing = true
        var state = state([due], covered: [])
        #expect(turns(&state) == [])
        #expect(state.toAddress(at: start.clock).isEmpty)
        #expect(state.blockedSources == ["no credential is configured for a (production): campaign 1 waits"])
        state.take([], at: start.clock)
        #expect(state.blockedSources.isEmpty)
    }

    @Test func `a claim that fails blocks its campaign, and no other of the topic`() {
        var state = state([campaign(1), campaign(2)])
        state.failed(state.turns(at: start.clock)[0].source, "no", at: start.clock)
        #expect(turns(&state) == [2])
        #expect(state.blockedSources == ["requests for campaign 1, a (production) cannot be claimed and wait: no"])
    }

    @Test func `a campaign that cannot be addressed is left alone for a while, and the others are not`() {
        var due = [campaign(1), campaign(2)]
        for place in due.indices { due[place].needsAddressing = true }
        var state = state(due)
        #expect(state.toAddress(at: start.clock).map(\.campaign) == [1, 2])
        state.failed(state.toAddress(at: start.clock)[0], "no", at: start.clock)
        #expect(state.toAddress(at: start.clock).map(\.campaign) == [2])
        #expect(state.toAddress(at: start.clock + .seconds(31)).map(\.campaign) == [1, 2])
    }

    @Test func `a campaign whose audience takes long to find is left to another connection until it is addressed`() {
        var due = [campaign(1), campaign(2)]
        for place in due.indices { due[place].needsAddressing = true }
        var state = state(due)
        state.isSlow(1)
        #expect(state.toAddress(at: start.clock).map(\.campaign) == [2])
        #expect(state.toAddress(areSlow: true, at: start.clock).map(\.campaign) == [1])
        state.take(due, at: start.clock)
        #expect(state.toAddress(areSlow: true, at: start.clock).map(\.campaign) == [1], "it stays slow")
        state.failed(state.toAddress(areSlow: true, at: start.clock)[0], "no", isPassing: true, at: start.clock)
        #expect(state.toAddress(areSlow: true, at: start.clock).isEmpty)
        #expect(state.toAddress(areSlow: true, at: start.clock + .seconds(3)).map(\.campaign) == [1])
    }

    @Test func `a search for an audience that took too long gets more time, and then reads the ledger in ranges`() {
        let audiences = SlowAudiences()
        let source = SendState.Source(topic: Other.topic, campaign: 1)
        audiences.want([source], of: [source])
        var times: [Duration] = []
        while case .patient(let time) = audiences.search(for: source) {
            times.append(time)
            audiences.tookTooLong(source, within: time)
        }
        #expect(times == [5, 10, 20, 40, 60].map { .seconds($0) })
        #expect(audiences.search(for: source) == .inRanges)
        audiences.failed(source, DatabaseError(sqlState: "55P03", message: "no"))
        #expect(audiences.wanted.isEmpty)
        #expect(audiences.takeFailures().map(\.source) == [source] && audiences.takeFailures().isEmpty)
        audiences.want([], of: [source])
        #expect(audiences.search(for: source) == .inRanges, "it waits after the failure")
        audiences.want([], of: [])
        #expect(audiences.search(for: source) == .patient(.seconds(5)), "it was addressed, or paused")
    }

    @Test func `what is not sent goes back to its batch when the campaign is paused`() throws {
        var state = state([campaign(1)])
        let turn = try #require(state.turns(at: start.clock).first)
        _ = state.take(claimed(1, 1...2), of: turn, at: start.clock)
        var recalled = Outbox.Recalled()
        let numbers = (1...2).map { CampaignRequest(campaign: 1, ordinal: $0).number }
        recalled.paused = Set(numbers)
        guard case .withdraw(let withdrawn, "main")? = state.take(recalled, among: numbers, at: start.clock).first
        else { throw TestFailure() }
        #expect(Set(withdrawn) == Set(numbers))
    }

    /// A pause promises a second. Of it, the turns, the look-up and the client need the other half.
    @Test func `whenever a request is claimed, it is looked up within half a second if it has not ended by then`()
        throws
    {
        for claimedAt in stride(from: 0, through: 990, by: 10) {
            var state = state([campaign(1)])
            let turn = try #require(state.turns(at: start.clock).first)
            let batch = claimed(1, 1...2)
            var time = 0
            var lookedUpAt: Int?
            while lookedUpAt == nil, time <= 3000 {
                let now = start.clock + .milliseconds(time)
                let asked = state.toLookUp(at: now)
                _ = state.take(Outbox.Recalled(), among: asked, at: now)
                if Set(asked) == Set(batch.requests.map(\.number)) { lookedUpAt = time }
                if time == claimedAt { _ = state.take(batch, of: turn, at: now) }
                time += 10
            }
            let after = try #require(lookedUpAt) - claimedAt
            #expect(after <= 500, "claimed after \(claimedAt) ms, looked up \(after) ms later")
        }
    }

    @Test func `of the batch that a trial has claimed, the others go back to it at once`() throws {
        var state = state([campaign(1)])
        let turn = try #require(state.turns(at: start.clock).first)
        let policy = RetryPolicy(retryFor: .seconds(86_400))
        let batch = claimed(1, 1...20)
        _ = state.take(batch, of: turn, at: start.clock)
        let outcomes = batch.requests.map {
            PushOutcome(request: $0.request, sentAt: start.timeOfDay, sends: 1, end: Other.response(503))
        }
        _ = state.take(outcomes, of: "main", by: policy, at: start)
        while state.nextWrite != nil { state.wrote() }
        #expect(turns(&state) == [], "the server rests")
        let trial = try #require(state.turns(at: start.clock + .seconds(5)).first)
        #expect(trial.isTrial && state.room(for: trial) == Outbox.partOfBatch)
        let actions = state.take(claimed(1, 501...600), of: trial, at: start.clock + .seconds(5))
        guard case .submit(let requests, "main")? = actions.first else { throw TestFailure() }
        #expect(requests.count == 1)
        guard let endings = state.nextWrite else { throw TestFailure() }
        #expect(endings.count == 99 && endings.allSatisfy { $0.fate == .returned(nil) })
    }

    private struct TestFailure: Error {}
}
