import APNsFeedback
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

/// The sender's decisions, without a daemon and without a database.
@Suite struct `The sender's decisions` {
    static let topic = TopicScope(environment: "production", topic: "a")
    static let other = TopicScope(environment: "production", topic: "b")
    static let main = CredentialScope(credential: "main", environment: "production")
    let policy = RetryPolicy(retryFor: .seconds(86_400))
    let start = SendState.Moment(clock: .now, timeOfDay: Instant(microseconds: 1_800_000_000_000_000))

    static func claimed(_ number: Int64, _ token: String = "aa", topic: String = "a", attempts: Int = 0)
        -> ClaimedRequest
    {
        ClaimedRequest(
            number: number,
            request: PushRequest(
                address: TokenAddress(
                    environment: .production, topic: Topic(topic)!, token: DeviceToken(hex: token)!),
                payload: [], pushType: .alert, id: "\(number)"),
            attempts: attempts, firstSentAt: Instant(microseconds: 1_800_000_000_000_000))
    }

    static func response(_ status: Int32, _ body: String? = nil) -> PushOutcome.End {
        .answered(PushResponse(status: status, body: body, apnsID: status == 200 ? "id" : nil))
    }

    static let gone = response(410, #"{"reason":"Unregistered","timestamp":1700000000000}"#)

    private func state(limit: Int = 100, covered: Set<String> = ["a", "b"], due: [TopicScope] = [topic]) -> SendState {
        var state = SendState(limit: limit, timing: .production) { covered.contains($0.topic) ? "main" : nil }
        look(&state, due)
        return state
    }

    private func look(
        _ state: inout SendState, _ due: [TopicScope], waiting: [TopicScope]? = nil, at time: Duration = .zero
    ) {
        #expect(state.looksForTopics(at: start.clock + time) == true)
        var page = Outbox.Scopes()
        page.due = due
        page.waiting = waiting ?? due
        #expect(state.add(page, at: .now) == false, "there is only one page")
    }

    /// Claims for the first topic, and returns what is submitted.
    private func claim(
        _ requests: [ClaimedRequest], _ state: inout SendState, at time: Duration = .zero
    ) throws -> [String] {
        let turn = try #require(state.turns(at: start.clock + time).first)
        var claim = Outbox.Claim()
        claim.requests = requests
        claim.dueAt = Instant(microseconds: 1)
        return submitted(state.take(claim, of: turn, at: start.clock + time))
    }

    private func submitted(_ actions: [SendState.Action]) -> [String] {
        actions.flatMap { action -> [String] in
            guard case .submit(let requests, "main") = action else { return [] }
            return requests.map(\.request.id)
        }
    }

    private func withdrawn(_ actions: [SendState.Action]) -> [Int64] {
        actions.flatMap { action -> [Int64] in
            guard case .withdraw(let numbers, "main") = action else { return [] }
            return numbers
        }.sorted()
    }

    private func end(
        _ end: PushOutcome.End, _ request: ClaimedRequest, _ state: inout SendState, after time: Duration = .zero
    ) -> [SendState.Action] {
        let outcome = PushOutcome(request: request.request, sentAt: start.timeOfDay, sends: 1, end: end)
        let now = SendState.Moment(
            clock: start.clock + time, timeOfDay: start.timeOfDay.advanced(byMicroseconds: time.microseconds))
        return state.take([outcome], of: "main", by: policy, at: now) + state.handOver()
    }

    private func written(_ state: inout SendState) -> [RequestEnding] {
        guard let endings = state.nextWrite else { return [] }
        state.wrote()
        return endings
    }

    // Outcomes ---------------------------------------------------------------------------------------------------------

    @Test func `after a response the token's next request goes out, and the first is written with its result`() throws {
        var state = state()
        #expect(try claim([Self.claimed(1), Self.claimed(2), Self.claimed(3, "bb")], &state) == ["1", "3"])
        #expect(submitted(end(Self.response(200), Self.claimed(1), &state)) == ["2"])
        let endings = written(&state)
        #expect(
            endings == [
                RequestEnding(
                    number: 1, fate: .answered, answer: .init(status: 200, apnsID: "id"), sentAt: start.timeOfDay)
            ])
        #expect(!state.isEmpty && state.nextWrite == nil)
    }

    @Test func `after a 410 the requests behind it go back unsent, and the token rests for two seconds`() throws {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2), Self.claimed(3)], &state)
        #expect(end(Self.gone, Self.claimed(1), &state).isEmpty)
        let pause = RequestFate.returned(.seconds(2))
        #expect(written(&state).map(\.fate) == [.answered, pause, pause])
        #expect(state.isEmpty)
        #expect(try claim([Self.claimed(4), Self.claimed(5, "bb")], &state, at: .seconds(1.5)) == ["5"])
        #expect(written(&state) == [RequestEnding(number: 4, fate: .returned(.seconds(0.5)))])
        #expect(try claim([Self.claimed(4)], &state, at: .seconds(2)) == ["4"])
    }

    @Test func `requests behind one that waits for a retry wait as long`() throws {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2)], &state)
        #expect(end(Self.response(429, #"{"reason":"TooManyRequests"}"#), Self.claimed(1), &state).isEmpty)
        #expect(written(&state).map(\.fate.pauseInSeconds) == [60, 60])
        #expect(state.isEmpty)
    }

    @Test func `a response that is not from APNs is not written as a result`() throws {
        var state = state()
        _ = try claim([Self.claimed(1)], &state)
        _ = end(Self.response(410, "<html>Gone</html>"), Self.claimed(1), &state)
        let endings = written(&state)
        #expect(endings.count == 1 && endings.first?.answer == nil)
    }

    @Test func `an outcome of a request that is not in flight changes nothing`() throws {
        var state = state()
        #expect(end(Self.response(200), Self.claimed(1), &state).isEmpty)
        _ = try claim([Self.claimed(1)], &state)
        _ = end(Self.response(200), Self.claimed(1), &state)
        #expect(end(Self.response(200), Self.claimed(1), &state).isEmpty, "the same outcome again")
        #expect(written(&state).count == 1 && state.isEmpty)
    }

    // Writing ----------------------------------------------------------------------------------------------------------

    @Test func `when a topic pauses, what was not sent goes back at once, as if it was not tried`() throws {
        var state = state(due: [Self.topic, Self.other])
        let requests = (1...6).flatMap { [Self.claimed($0, "a\($0)"), Self.claimed($0 + 10, "a\($0)")] }
        #expect(try claim(requests + [Self.claimed(50, topic: "b"), Self.claimed(60, topic: "b")], &state).count == 7)
        let refused = Self.response(400, #"{"reason":"TopicDisallowed"}"#)
        for number in 1...4 {
            #expect(withdrawn(end(refused, Self.claimed(Int64(number), "a\(number)"), &state)).isEmpty)
        }
        _ = written(&state)
        let actions = end(refused, Self.claimed(5, "a5"), &state)
        #expect(withdrawn(actions) == [6], "the client may not have sent it yet")
        #expect(actions.contains(.reconnect(Self.main)), "the trial goes over another connection")
        #expect(Set(written(&state).map(\.number)).isSuperset(of: [5, 15, 16]))
        #expect(end(.withdrawn, Self.claimed(6, "a6"), &state).isEmpty)
        #expect(written(&state).map { $0.number == 6 && $0.fate == .returned(nil) } == [true])
        #expect(submitted(end(Self.response(200), Self.claimed(50, topic: "b"), &state)) == ["60"], "another topic")
        #expect(state.turns(at: start.clock).map(\.topic) == [Self.other])
    }

    @Test func `when somebody pauses a topic, what waits behind another request goes back, at its turn at the latest`()
        throws
    {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2), Self.claimed(3), Self.claimed(4, "bb")], &state)
        #expect(state.toLookUp(at: start.clock).isEmpty, "they were just claimed")
        #expect(state.toLookUp(at: start.clock + .milliseconds(249)).isEmpty, "it costs the database something")
        #expect(state.toLookUp(at: start.clock + .milliseconds(250)).sorted() == [1, 2, 3, 4])
        var recalled = Outbox.Recalled()
        recalled.paused = [1, 3, 4]
        #expect(withdrawn(state.take(recalled, among: [1, 2, 3, 4], at: start.clock)) == [1, 4])
        #expect(written(&state) == [RequestEnding(number: 3, fate: .returned(nil))], "the client has 1 and 4")
        #expect(end(.withdrawn, Self.claimed(4, "bb"), &state).isEmpty, "it had not sent 4")
        #expect(written(&state).map { $0.number == 4 && $0.fate == .returned(nil) } == [true])
        let outcome = PushOutcome(
            request: Self.claimed(1).request, sentAt: start.timeOfDay, sends: 1, end: Self.response(200))
        #expect(state.take([outcome], of: "main", by: policy, at: start).isEmpty, "not before it was looked up")
        #expect(state.toLookUp(at: start.clock + .milliseconds(251)) == [2])
        recalled.paused = [2]
        #expect(state.take(recalled, among: [2], at: start.clock).isEmpty)
        #expect(state.handOver().isEmpty && state.toLookUp(at: start.clock + .milliseconds(252)).isEmpty)
        #expect(Set(written(&state).map(\.number)) == [1, 2])
        #expect(try claim([Self.claimed(2)], &state) == ["2"], "somebody has resumed it")
    }

    @Test func `what was deleted meanwhile is neither sent nor written`() throws {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2), Self.claimed(3), Self.claimed(4, "bb")], &state)
        var recalled = Outbox.Recalled()
        recalled.gone = [1, 2, 4]
        #expect(withdrawn(state.take(recalled, among: [1, 2, 4], at: start.clock)) == [1, 4])
        #expect(submitted(end(Self.response(200), Self.claimed(1), &state)) == ["3"])
        _ = end(Self.response(200), Self.claimed(3), &state)
        _ = end(Self.response(200), Self.claimed(4, "bb"), &state)
        #expect(written(&state).map(\.number) == [1, 3, 4], "those in flight end as usual")
        #expect(state.isEmpty)
    }

    @Test func `endings are written a thousand at a time, and nothing is claimed while many are unwritten`() throws {
        var state = state()
        #expect(state.reconcile(claimed: Set(1...4001)).isEmpty)
        #expect(state.isBehind && state.turns(at: start.clock).isEmpty)
        var sizes: [Int] = []
        while let endings = state.nextWrite {
            sizes.append(endings.count)
            state.wrote()
            #expect(!state.isBehind)
        }
        #expect(sizes == [1000, 1000, 1000, 1000, 1])
        #expect(state.isEmpty && state.turns(at: start.clock).count == 1)
    }

    @Test func `endings of locked requests are put aside for a moment, and the others are written`() throws {
        var state = state()
        #expect(state.reconcile(claimed: Set(1...1500)).isEmpty)
        state.wrote()
        let locked = try #require(numbers(state).first)
        state.wrote(except: [locked], at: start.clock)
        #expect(state.nextWrite == nil && !state.isEmpty && !state.isBehind)
        #expect(state.reconcile(claimed: [locked]).isEmpty, "it is known")
        state.retryLocked(at: start.clock + .milliseconds(199))
        #expect(state.nextWrite == nil)
        state.retryLocked(at: start.clock + .milliseconds(200))
        #expect(written(&state) == [RequestEnding(number: locked, fate: .returned(nil))])
        #expect(state.isEmpty)
    }

    @Test func `nothing is claimed while ten thousand endings are locked`() throws {
        var state = state()
        #expect(state.reconcile(claimed: Set(1...10_001)).isEmpty)
        while state.nextWrite != nil { state.wrote(except: numbers(state), at: start.clock) }
        #expect(state.isBehind && state.turns(at: start.clock).isEmpty)
        state.retryLocked(at: start.clock + .seconds(1))
        for _ in 0...10 { state.wrote() }
        #expect(state.isEmpty && !state.isBehind)
    }

    private func numbers(_ state: SendState) -> Set<Int64> {
        return Set((state.nextWrite ?? []).map(\.number))
    }

    @Test func `claims that only the database knows go back, and requests taken over are dropped`() throws {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2), Self.claimed(3)], &state)
        #expect(state.reconcile(claimed: [1, 3, 9]).isEmpty)
        #expect(written(&state) == [RequestEnding(number: 9, fate: .returned(nil))])
        #expect(submitted(end(Self.response(200), Self.claimed(1), &state)) == ["3"])
        // Its ending is not written yet, so the state knows it.
        #expect(withdrawn(state.reconcile(claimed: [1])) == [3], "the client may not have sent it yet")
        #expect(written(&state).map(\.number) == [1])
    }

    @Test func `a request that is claimed again keeps no ending of its earlier claim`() throws {
        var state = state()
        _ = try claim([Self.claimed(1), Self.claimed(2, "bb")], &state)
        #expect(end(.withdrawn, Self.claimed(1), &state).isEmpty)
        _ = end(Self.response(200), Self.claimed(2, "bb"), &state)
        // The endings were written by a COMMIT whose response was lost, and writing them again met a lock.
        #expect(try claim([Self.claimed(1)], &state) == ["1"])
        #expect(written(&state).map(\.number) == [2], "the ending of 1 would take its new claim away")
        _ = end(Self.response(200), Self.claimed(1), &state)
        #expect(written(&state).map(\.fate) == [.answered])
        #expect(state.isEmpty)
    }

    // Claims -----------------------------------------------------------------------------------------------------------

    @Test func `topics of one credential share its room, and little room is not worth a claim`() throws {
        var state = state(limit: 100, due: [Self.topic, Self.other])
        let turns = state.turns(at: start.clock)
        #expect(turns.map(\.topic) == [Self.topic, Self.other] && turns.allSatisfy { $0.scope == Self.main })
        #expect(state.room(for: turns[0]) == 50)
        _ = try claim((1...76).map { Self.claimed($0, String($0 + 100, radix: 16).padded) }, &state)
        #expect(state.room(for: turns[1]) == 12, "half of what the first has left")
        #expect(state.turns(at: start.clock).isEmpty, "less than a quarter is free")
        _ = end(Self.response(200), Self.claimed(1, "65".padded), &state)
        #expect(state.turns(at: start.clock).count == 2)
    }

    @Test func `a claim that fails blocks its topic for half a minute, and no other`() throws {
        var state = state(due: [Self.topic, Self.other])
        state.failed(state.turns(at: start.clock)[0].source, "no (SQLSTATE 22000)", at: start.clock)
        #expect(state.turns(at: start.clock + .seconds(29)).map(\.topic) == [Self.other])
        #expect(state.blockedSources == ["requests for a (production) cannot be claimed and wait: no (SQLSTATE 22000)"])
        #expect(state.turns(at: start.clock + .seconds(30)).count == 2)
        _ = try claim([], &state, at: .seconds(30))
        #expect(state.blockedSources.isEmpty)
    }

    @Test func `a blocked topic is a problem as long as requests of it wait`() {
        var state = state(due: [Self.topic, Self.other])
        for turn in state.turns(at: start.clock) { state.failed(turn.source, "no", at: start.clock) }
        let problems = ["a", "b"].map { "requests for \($0) (production) cannot be claimed and wait: no" }
        look(&state, [Self.topic], waiting: [Self.topic, Self.other], at: .seconds(1))
        #expect(state.problems(at: start.clock + .seconds(1)) == problems, "one is due, the other is due later")
        #expect(state.looksForTopics(at: start.clock + .seconds(2)) == true)
        var page = Outbox.Scopes()
        page.waiting = [Self.topic]
        page.last = Self.topic
        #expect(state.add(page, at: .now) == false)
        #expect(state.problems(at: start.clock + .seconds(2)) == problems, "not before all pages are read")
        look(&state, [], waiting: [], at: .seconds(3))
        #expect(state.problems(at: start.clock + .seconds(3)) == [problems[0]], "the other one's requests were deleted")
        #expect(state.turns(at: start.clock + .seconds(3)).map(\.topic) == [Self.other])
        look(&state, [], waiting: [], at: .seconds(4))
        #expect(state.problems(at: start.clock + .seconds(4)).isEmpty)
    }

    @Test func `many credentials share the memory, and each goes on`() throws {
        var state = SendState(limit: 320, timing: .production) { $0.topic }
        let topics = (1...20).map { TopicScope(environment: "production", topic: "t\($0)") }
        look(&state, topics)
        var number: Int64 = 0
        var held: [Int] = []
        let turns = state.turns(at: start.clock)
        let asked = state.asked(turns, at: start.clock).map(\.most)
        for turn in turns {
            let room = state.room(for: turn)
            held.append(room)
            var claim = Outbox.Claim()
            claim.requests = (0..<room).map { _ in
                number += 1
                return Self.claimed(number, String(number + 0x10000, radix: 16) + "0", topic: turn.topic.topic)
            }
            _ = state.take(claim, of: turn, at: start.clock)
        }
        #expect(held == Array(repeating: 320, count: 4) + Array(repeating: 5, count: 16))
        #expect(asked == held, "also if one transaction claims them all")
        #expect(state.turns(at: start.clock).isEmpty, "nobody has room")
        let campaigns = [topics[0], TopicScope(environment: "production", topic: "u")].enumerated().map {
            Outbox.DueCampaign(id: Int64($0 + 1), topic: $1)
        }
        state.take(campaigns, at: start.clock)
        #expect(state.turns(at: start.clock).map(\.source.campaign) == [2], "a credential with nothing gets its batch")
    }

    @Test func `nothing is claimed for a resting server, and the reason is shown`() throws {
        var state = state()
        let requests = (1...20).map { Self.claimed(Int64($0), String($0 + 16, radix: 16)) }
        _ = try claim(requests, &state)
        let actions = requests.flatMap { end(Self.response(503, #"{"reason":"Shutdown"}"#), $0, &state) }
        guard case .logPause(.server(Self.main), let pause, let why)? = actions.first else {
            Issue.record("\(actions)")
            return
        }
        #expect(.seconds(3.75)...(.seconds(5)) ~= pause && why.hasSuffix("APNs answered 503 Shutdown"))
        #expect(actions.contains(.reconnect(Self.main)))
        #expect(state.turns(at: start.clock + .seconds(3.7)).isEmpty)
        #expect(
            state.problems(at: start.clock) == [
                "APNs returns errors or cannot be reached (main, production), and requests wait: APNs answered 503 Shutdown"
            ])
        let trials = state.turns(at: start.clock + .seconds(5))
        #expect(trials.count == 1 && trials.allSatisfy(\.isTrial))
        #expect(state.problems(at: start.clock + .seconds(5)).count == 1, "until a request is accepted")
    }

    @Test func `an uncovered topic is listed, and an invalid one is claimed so that its requests fail`()
        throws
    {
        let moon = TopicScope(environment: "moon", topic: "a")
        var state = state(covered: [], due: [Self.topic, moon])
        let turns = state.turns(at: start.clock)
        #expect(turns.map(\.topic) == [moon])
        var claim = Outbox.Claim()
        claim.failed = 3
        claim.dueAt = Instant(microseconds: 1)
        #expect(state.take(claim, of: turns[0], at: start.clock).isEmpty)
        #expect(state.blockedSources == ["no credential is configured for a (production): its requests wait"])
    }

    @Test func `a page of uncovered topics does not end the look`() {
        var state = SendState(limit: 100, timing: .production) { $0.topic == "b" ? "main" : nil }
        #expect(state.looksForTopics(at: start.clock) == true)
        var page = Outbox.Scopes()
        page.due = [Self.topic]
        page.last = Self.topic
        #expect(state.add(page, at: .now) == true)
        #expect(state.topicCursor == Self.topic)
        #expect(state.blockedSources.isEmpty, "not before all pages are read")
        page.due = [Self.other]
        page.last = nil
        #expect(state.add(page, at: .now) == false)
        #expect(state.topicCursor == nil)
        #expect(state.turns(at: start.clock).map(\.topic) == [Self.other])
        #expect(state.blockedSources.count == 1)
        #expect(state.looksForTopics(at: start.clock + .milliseconds(499)) == false, "some are known")
        #expect(state.looksForTopics(at: start.clock + .milliseconds(500)) == true)
    }
}

extension RequestFate {
    fileprivate var pauseInSeconds: Int64? {
        switch self {
        case .later(let pause, _), .refused(let pause, _), .interrupted(let pause, _), .returned(.some(let pause)):
            pause.components.seconds
        case .answered, .failed, .returned(nil): nil
        }
    }
}

extension String {
    /// With one more digit if a token would end in half a byte.
    fileprivate var padded: String { count.isMultiple(of: 2) ? self : "0" + self }
}
