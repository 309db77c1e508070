import APNsFeedback
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

private typealias Decisions = `The sender's decisions`

/// After a rest, one request at a time tries the server out.
@Suite struct `Trials of a server after its rest` {
    @Test func `a hundred tokens that never answer do not keep the others waiting`() {
        var outbox = MuteOutbox(tokens: 1000, mute: 100)
        outbox.run()
        #expect(outbox.answered == 900, "all the others")
        #expect(outbox.headOfLine <= 5, "\(outbox.headOfLine) requests without a response kept the others waiting")
    }

    @Test func `one that was never sent is not kept waiting by many that were refused`() {
        var trial = Trial()
        let candidates =
            (1000..<1060).map { number in
                var refused = Decisions.claimed(Int64(number), String(number))
                refused.attempts = 3
                return refused
            } + [Decisions.claimed(1, "aaaa")]
        let chosen = (0..<2).map { _ in
            let chosen = trial.choose(from: candidates)
            trial.ended(isInVain: true)
            return chosen?.number
        }
        #expect(chosen.contains(1))
    }

    @Test func `the next trial is of another token`() throws {
        var state = TriedState()
        #expect(state.claim([1, 2], of: "aa") == ["1"], "one at a time")
        #expect(state.waits == [2: 1], "the other waits behind what is due")
        #expect(state.turns == 0, "a trial is under way")
        state.end(1, of: "aa", TriedState.lost)
        #expect(state.claim([2], of: "aa", and: 3, of: "bb") == ["3"])
        #expect(state.waits[2] == 1)
        state.end(3, of: "bb", TriedState.lost)
        #expect(state.claim([2], of: "aa", and: 4, of: "bb") == ["2"], "the token that was tried longest ago")
        state.end(2, of: "aa", Decisions.response(200))
        #expect(state.claim([5], of: "aa", and: 6, of: "bb") == ["5", "6"], "it responds")
    }

    /// This host may have a wrong key, and another host the right one.
    @Test func `what a refused host has tried is due for the others at once`() {
        var state = TriedState()
        #expect(state.claim([1], of: "aa") == ["1"])
        state.end(1, of: "aa", Decisions.response(403, #"{"reason":"InvalidProviderToken"}"#))
        #expect(state.waits == [1: 1])
    }

    @Test func `the time of day is that of the database, whatever this machine's clock says`() {
        var clock = SendState.DatabaseClock()
        let (time, at) = (Instant(microseconds: 1_700_000_000_000_000), ContinuousClock.now)
        clock.note(time, at: at)
        let now = clock.now
        #expect(now.timeOfDay == time.advanced(byMicroseconds: at.duration(to: now.clock).microseconds))
    }

    @Test func `each trial is of another topic`() {
        let topics = ["a", "b", "c"].map { TopicScope(environment: "production", topic: $0) }
        let main = CredentialScope(credential: "main", environment: "production")
        let turns = topics.map { SendState.Turn(source: .init(topic: $0), scope: main, trial: .server(main)) }
        let other = SendState.Turn(
            source: .init(topic: topics[0]), scope: CredentialScope(credential: "x", environment: "production"))
        var evidence = ResponseEvidence(.production)
        for token in 1000...1019 {
            _ = evidence.note(
                RetryPolicy.Step(.later(.seconds(900), "503"), .server), of: Decisions.claimed(1, String(token)),
                in: main, trial: nil,
                age: .zero, retryFor: .zero, at: .now)
        }
        var tried: [String] = []
        for _ in 1...4 {
            let kept = evidence.narrow([other] + turns)
            #expect(kept.count == 2 && kept[0] == other)
            tried.append(kept[1].topic.topic)
            #expect(evidence.chooseTrial(from: [], of: .server(main)) == nil)
        }
        #expect(tried == ["a", "b", "c", "a"])
        #expect(evidence.chooseTrial(from: [Decisions.claimed(1)], of: .server(main))?.number == 1)
        #expect(evidence.narrow([other] + turns) == [other])
        evidence.ended(.server(main), isInVain: false)
        #expect(evidence.narrow([other] + turns).count == 2)
    }

    @Test(arguments: [
        Decisions.gone, Decisions.response(400, #"{"reason":"PayloadEmpty"}"#),
        Decisions.response(429, #"{"reason":"TooManyRequests"}"#),
    ])
    func `any judgment of APNs ends the trial`(end: PushOutcome.End) {
        var state = TriedState()
        #expect(state.claim([1], of: "aa", and: 2, of: "bb").count == 1)
        state.end(1, of: "aa", end)
        state.end(2, of: "bb", end)
        #expect(state.claim([3], of: "cc", and: 4, of: "dd") == ["3", "4"])
    }

    @Test func `until a trial succeeds, the reason is told`() {
        var state = TriedState()
        #expect(state.problems.count == 1)
        _ = state.claim([1], of: "aa")
        #expect(
            state.problems.count == 1 && state.problems[0].contains("requests wait for a response"), "\(state.problems)"
        )
        state.end(1, of: "aa", Decisions.response(200))
        #expect(state.problems.isEmpty)
    }
}

/// A state whose server has just rested for the first time.
private struct TriedState {
    private var state = SendState(limit: 100, timing: .production) { _ in "main" }
    private var now = SendState.Moment(clock: .now, timeOfDay: Instant(microseconds: 1_800_000_000_000_000))
    static let lost = PushOutcome.End.unanswered(
        PushFailure(kind: .timeout, message: "no response", mayHaveArrived: true))

    init() {
        look()
        let requests = (1000...1019).map { Decisions.claimed($0, String($0)) }
        _ = claim(requests)
        for request in requests { end(request, Self.lost) }
        _ = written()
    }

    private mutating func look() {
        guard state.looksForTopics(at: now.clock) else { return }
        var page = Outbox.Scopes()
        page.due = [Decisions.topic]
        page.waiting = page.due
        _ = state.add(page, at: .now)
    }

    private(set) var waits: [Int64: Int64] = [:]

    var turns: Int {
        mutating get { state.turns(at: now.clock).count }
    }

    var problems: [String] { state.problems(at: now.clock) }

    mutating func claim(_ numbers: [Int64], of token: String) -> [String] {
        claim(numbers.map { Decisions.claimed($0, token) })
    }

    mutating func claim(_ numbers: [Int64], of token: String, and number: Int64, of other: String) -> [String] {
        claim(numbers.map { Decisions.claimed($0, token) } + [Decisions.claimed(number, other)])
    }

    private mutating func claim(_ requests: [ClaimedRequest]) -> [String] {
        guard let turn = state.turns(at: now.clock).first else { return [] }
        var claim = Outbox.Claim()
        claim.requests = requests
        claim.dueAt = Instant(microseconds: 1)
        let actions = state.take(claim, of: turn, at: now.clock)
        waits = written()
        return actions.flatMap { action -> [String] in
            guard case .submit(let requests, _) = action else { return [] }
            return requests.map(\.request.id)
        }
    }

    mutating func end(_ number: Int64, of token: String, _ end: PushOutcome.End) {
        self.end(Decisions.claimed(number, token), end)
    }

    /// Ends a request, and lets the rest pass that may follow.
    private mutating func end(_ request: ClaimedRequest, _ end: PushOutcome.End) {
        let outcome = PushOutcome(request: request.request, sentAt: now.timeOfDay, sends: 1, end: end)
        let actions = state.take(
            [outcome], of: "main", by: RetryPolicy(retryFor: .seconds(86_400)), at: now)
        for case .logPause(_, let pause, _) in actions { now.clock += pause }
        waits = written()
        look()
    }

    /// Writes everything. Returns which requests went back, and for how many seconds.
    private mutating func written() -> [Int64: Int64] {
        var waits: [Int64: Int64] = [:]
        while let write = state.nextWrite {
            for ending in write {
                switch ending.fate {
                case .returned(.some(let pause)), .later(let pause, _): waits[ending.number] = pause.components.seconds
                default: break
                }
            }
            state.wrote()
        }
        return waits
    }
}

/// An outbox with a request for each token, and a client. Tokens for which APNs never responds come first. The client sends one
/// request until its connection has responded, as APNs demands. It gives up a connection on which nothing responds for a minute.
private struct MuteOutbox {
    private var state = SendState(limit: 2000, timing: .production) { _ in "main" }
    private let policy = RetryPolicy(retryFor: .seconds(86_400))
    private var time = Duration.zero
    private let start = ContinuousClock.now
    private var due: [Int64: Duration] = [:]
    private var interruptions: [Int64: Int] = [:]
    private let mute: Int
    private let scope = TopicScope(environment: "production", topic: "a")
    /// The client's queue.
    private var queue: [PushRequest] = []
    private var hanging: [(request: PushRequest, since: Duration)] = []
    /// When the connection last responded; nil if it has not.
    private var answeredAt: Duration?
    private(set) var answered = 0
    /// How many requests without a response kept all others waiting.
    private(set) var headOfLine = 0

    init(tokens: Int, mute: Int) {
        self.mute = mute
        for number in 1...Int64(tokens) { due[number] = .zero }
    }

    private var now: SendState.Moment {
        SendState.Moment(
            clock: start + time, timeOfDay: Instant(microseconds: 1_800_000_000_000_000 + time.microseconds))
    }

    /// Until all that can be answered is answered.
    mutating func run() {
        let others = due.count - mute
        for _ in 1...5000 where answered < others {
            if state.looksForTopics(at: now.clock) {
                var page = Outbox.Scopes()
                page.due = due.values.contains { $0 <= time } ? [scope] : []
                page.waiting = due.isEmpty ? [] : [scope]
                _ = state.add(page, at: .now)
            }
            for turn in state.turns(at: now.clock) { claim(turn) }
            write()
            send()
            write()
            time += .seconds(1)
        }
    }

    private mutating func claim(_ turn: SendState.Turn) {
        let found = due.filter { $0.value <= time }.sorted { ($0.value, $0.key) < ($1.value, $1.key) }
            .prefix(state.room(for: turn)).map(\.key)
        for number in found { due[number] = nil }
        var claim = Outbox.Claim()
        claim.requests = found.sorted().filter { interruptions[$0] != 2 }
            .map { Decisions.claimed($0, String(10_000_000 + $0)) }
        claim.dueAt = found.isEmpty ? nil : Instant(microseconds: 1)
        for case .submit(let requests, _) in state.take(claim, of: turn, at: now.clock) {
            queue += requests.map(\.request)
        }
    }

    private mutating func send() {
        let overdue = hanging.filter { time - $0.since >= .seconds(60) }
        hanging.removeAll { time - $0.since >= .seconds(60) }
        if let last = overdue.last {
            take(overdue.map { outcome($0.request, .timeout, mayHaveArrived: true) })
            if answeredAt == nil {
                take(queue.map { outcome($0, .backingOff, mayHaveArrived: false) })
                queue = []
            } else if let at = answeredAt, at <= last.since {
                answeredAt = nil
            }
        }
        while !queue.isEmpty, answeredAt != nil || hanging.isEmpty {
            let request = queue.removeFirst()
            if Int(request.id)! > mute {
                answeredAt = time
                answered += 1
                take([
                    PushOutcome(request: request, sentAt: now.timeOfDay, sends: 1, end: Decisions.response(200))
                ])
            } else {
                if answeredAt == nil { headOfLine += 1 }
                hanging.append((request, time))
            }
        }
    }

    private func outcome(_ request: PushRequest, _ kind: PushFailure.Kind, mayHaveArrived: Bool) -> PushOutcome {
        PushOutcome(
            request: request, sentAt: mayHaveArrived ? now.timeOfDay : nil, sends: mayHaveArrived ? 2 : 0,
            end: .unanswered(
                PushFailure(kind: kind, message: "", mayHaveArrived: mayHaveArrived, retryAfter: .milliseconds(250))))
    }

    private mutating func take(_ outcomes: [PushOutcome]) {
        _ = state.take(outcomes, of: "main", by: policy, at: now)
    }

    private mutating func write() {
        while let write = state.nextWrite {
            for ending in write {
                switch ending.fate {
                case .answered, .failed: break
                case .later(let pause, _), .refused(let pause, _): due[ending.number] = time + pause
                case .interrupted(let pause, _):
                    due[ending.number] = time + pause
                    interruptions[ending.number, default: 0] += 1
                case .returned(let pause): due[ending.number] = time + (pause ?? .zero)
                }
            }
            state.wrote()
        }
    }
}
