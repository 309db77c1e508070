import APNsFeedback
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

private typealias Decisions = `The sender's decisions`

/// What it takes until a topic or a server pauses, and how a pause ends.
@Suite struct `Evidence of responses` {
    private let topic = Decisions.topic
    private let other = Decisions.other
    private let main = Decisions.main
    private let start = ContinuousClock.now
    private let accepted = RetryPolicy.Step(.answered)

    private static func refusal(_ blame: RetryPolicy.Blame) -> RetryPolicy.Step {
        RetryPolicy.Step(.later(.seconds(5), blame.words ?? "w"), blame)
    }

    /// The kinds of outcomes, how many tokens each takes, and whether the topic pauses, and not the server.
    static let kinds: [(RetryPolicy.Step, tokens: Int, isOfTopic: Bool)] = [
        (refusal(.topic("APNs answered 400 TopicDisallowed")), 5, true),
        (refusal(.sender("APNs answered 403 InvalidProviderToken")), 5, false),
        (refusal(.foreign("the server answered 502")), 5, false),
        (RetryPolicy.Step(.later(.seconds(900), "503"), .server), 20, false),
        (RetryPolicy.Step(.later(.seconds(5), "no connection"), .unreachable), 20, false),
        (RetryPolicy.Step(.failed("w"), .message("w")), 20, true),
    ]

    private func note(
        _ step: RetryPolicy.Step, token: Int, topic: String = "a", refusals: Int = 0, othersAccepted: Bool = false,
        trial: ResponseEvidence.Subject? = nil, age: Duration = .seconds(3600), _ evidence: inout ResponseEvidence,
        at time: Duration = .zero
    ) -> ResponseEvidence.Finding {
        var claimed = Decisions.claimed(Int64(token), String(token + 0x1000, radix: 16), topic: topic)
        claimed.refusals = refusals
        claimed.othersAccepted = othersAccepted
        return evidence.note(
            step, of: claimed, in: main, trial: trial, age: age, retryFor: .seconds(86400), at: start + time)
    }

    @Test(arguments: kinds.indices)
    func `so many tokens in a row pause a subject, and an accepted request starts the count again`(kind: Int) {
        let (step, tokens, isOfTopic) = Self.kinds[kind]
        var evidence = ResponseEvidence(.production)
        for token in 1..<tokens { #expect(note(step, token: token, &evidence).pause == nil) }
        for _ in 1...50 { #expect(note(step, token: 1, &evidence).pause == nil, "the same token") }
        #expect(note(accepted, token: 99, &evidence).pause == nil)
        for token in 1..<tokens { #expect(note(step, token: token, &evidence).pause == nil) }
        for token in tokens...100 { #expect(note(step, token: token, &evidence).pause == nil, "all at once") }
        #expect(note(step, token: 101, &evidence, at: .seconds(1.9)).pause == nil && evidence.isQuiet)
        let pause = note(step, token: tokens, &evidence, at: .seconds(2)).pause
        let subject = isOfTopic ? ResponseEvidence.Subject.topic(topic) : .server(main)
        #expect(pause?.subject == subject && pause.map { .seconds(3.75)...(.seconds(5)) ~= $0.duration } == true)
        #expect(
            evidence.isPausing(subject, at: start + .seconds(5.7))
                && !evidence.isPausing(subject, at: start + .seconds(7)))
        #expect(evidence.isOnTrial(subject) && evidence.problems(except: [], at: start).count == 1)
    }

    @Test(arguments: kinds.indices)
    func `a pause becomes longer with each trial in vain, up to minutes, and any accepted request ends it`(kind: Int) {
        let (step, tokens, isOfTopic) = Self.kinds[kind]
        let subject = isOfTopic ? ResponseEvidence.Subject.topic(topic) : .server(main)
        var evidence = ResponseEvidence(.production)
        for token in 1...tokens { _ = note(step, token: token, &evidence) }
        var time = Duration.seconds(5)
        let most: Duration = step.blame == .unreachable || isOfTopic ? .seconds(15) : .seconds(300)
        for expected in [10, 20, 40, 80, 160, 300, 300].map({ min(Duration.seconds($0), most) }) {
            for token in 1...50 {
                #expect(note(step, token: token, &evidence, at: time).pause == nil, "it was in flight")
            }
            let pause = note(step, token: 1, trial: subject, &evidence, at: time).pause
            #expect(pause.map { (expected * 0.75)...expected ~= $0.duration } == true)
            time += expected
        }
        _ = note(accepted, token: 7, &evidence, at: time)
        #expect(evidence.isQuiet && evidence.problems(except: [], at: start).isEmpty)
        for token in 1..<tokens { #expect(note(step, token: token, &evidence, at: time).pause == nil) }
    }

    @Test func `a credential that is refused for one topic and accepted for others pauses that topic`() {
        var evidence = ResponseEvidence(.production)
        let refused = Self.refusal(.sender("APNs answered 403 BadCertificate"))
        for token in 1...4 {
            #expect(note(refused, token: token, &evidence).pause == nil)
            #expect(note(accepted, token: token, topic: "b", &evidence).pause == nil)
        }
        #expect(note(refused, token: 5, &evidence, at: .seconds(2)).pause?.subject == .topic(topic))
        #expect(!evidence.isOnTrial(.server(main)))
    }

    /// Five hundred requests are in flight at once, so what one topic draws comes in bursts.
    @Test(arguments: kinds.indices)
    func `a healthy topic beside broken ones keeps its credential from pausing`(kind: Int) {
        let (step, _, _) = Self.kinds[kind]
        // Then all requests of the credential fail, whatever their topic.
        if step.blame == .unreachable { return }
        var evidence = ResponseEvidence(.production)
        var paused: Set<ResponseEvidence.Subject> = []
        for second in 0..<60 {
            let time = Duration.seconds(second)
            _ = note(accepted, token: 1, topic: "b", &evidence, at: time)
            for broken in ["c", "d"]
            where !evidence.isOnTrial(.topic(TopicScope(environment: "production", topic: broken))) {
                for token in 1...100 {
                    if let pause = note(step, token: token, topic: broken, &evidence, at: time).pause {
                        paused.insert(pause.subject)
                    }
                }
            }
        }
        #expect(paused == Set(["c", "d"].map { .topic(TopicScope(environment: "production", topic: $0)) }))
    }

    @Test func `a topic that was good and begins to fail pauses alone, though its siblings are quiet`() {
        var evidence = ResponseEvidence(.production)
        for topic in ["a", "b"] { _ = note(accepted, token: 1, topic: topic, &evidence) }
        for token in 1...100 { #expect(note(Self.invalid, token: token, &evidence, at: .seconds(60)).pause == nil) }
        #expect(note(Self.invalid, token: 1, &evidence, at: .seconds(62)).pause?.subject == .topic(topic))
        #expect(!evidence.isOnTrial(.server(main)))
    }

    @Test func `half of the tokens may be odd, and their topic goes on`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 7000, &evidence)
        for second in 0..<30 {
            for token in 1...50 {
                #expect(note(Self.disallowed, token: 50 * second + token, &evidence, at: .seconds(second)).pause == nil)
            }
            _ = note(accepted, token: 7000 + second, &evidence, at: .seconds(second))
        }
    }

    @Test func `a server that answers nothing pauses before a request has ended`() {
        var state = SendState(limit: 100, timing: .production) { _ in "main" }
        let claims = (1...30).map { Decisions.claimed(Int64($0), String($0 + 0x1000, radix: 16), topic: "a") }
        _ = state.submit(claims, in: main, at: start)
        #expect(state.pauseSilent(at: start + .seconds(9)) == [])
        let actions = state.pauseSilent(at: start + .seconds(10))
        let withdrawn = actions.compactMap { action -> Int? in
            if case .withdrawUnsent(let numbers, _) = action { numbers.count } else { nil }
        }
        #expect(actions.contains(.reconnect(main)) && withdrawn == [30])
        #expect(state.evidence.isPausing(.server(main), at: start + .seconds(12)))
        #expect(state.pauseSilent(at: start + .seconds(20)) == [], "it is on trial already")
        #expect(state.problems(at: start + .seconds(11)).count == 1)
    }

    /// A revoked key that stopped forty topics, or a network that was down, is over for all at once.
    @Test func `what ends a credential's pause ends it for others with the same key or the same server`() {
        let keys = ["main": "k1", "twin": "k1", "stranger": "k2"]
        func paused(_ step: RetryPolicy.Step, _ tokens: Int) -> ResponseEvidence {
            var evidence = ResponseEvidence(.production) { keys[$0]! }
            for name in keys.keys {
                for token in 1...tokens {
                    _ = evidence.note(
                        step, of: Decisions.claimed(Int64(token), String(token + 0x1000, radix: 16), topic: name),
                        in: CredentialScope(credential: name, environment: "production"), trial: nil, age: .zero,
                        retryFor: .zero, at: start)
                }
            }
            return evidence
        }
        func stillPause(_ step: RetryPolicy.Step, _ tokens: Int) -> [String] {
            var evidence = paused(step, tokens)
            #expect(
                evidence.problems(except: [], at: start).count == 3
                    && WaitingProblem.joined(evidence.problems(except: [], at: start)).count == 1)
            _ = note(accepted, token: 1, topic: "main", trial: .server(main), &evidence, at: .seconds(6))
            return evidence.problems(except: [], at: start).flatMap(\.who)
        }
        #expect(stillPause(Self.invalid, 5) == ["stranger, production"])
        #expect(stillPause(RetryPolicy.Step(.later(.seconds(5), "no connection"), .unreachable), 20) == [])
    }

    @Test func `one cause is one sentence, whatever the numbers in it, and it says how many more`() {
        let problems = (1...40).map { WaitingProblem("no connection (", "c\($0)", "), after \($0) ms") }
        let joined = WaitingProblem.joined(problems + [WaitingProblem("no connection (", "other", "), refused")])
        #expect(
            joined.map(\.words) == [
                "no connection (c1; c2; c3; 37 more), after 1 ms", "no connection (other), refused",
            ])
        #expect(joined[0].cause == problems[7].cause && joined[1].cause != joined[0].cause)
        #expect(WaitingProblem("a 1").cause != WaitingProblem("a 2").cause)
    }

    @Test func `a trial for which the client had to wait keeps the reason of the pause`() {
        var evidence = ResponseEvidence(.production)
        let lost = RetryPolicy.Step(.later(.seconds(5), "connection refused"), .unreachable)
        for token in 1...20 { _ = note(lost, token: token, &evidence) }
        let waited = RetryPolicy.Step(.returned(.seconds(1)), .unreachable)
        #expect(note(waited, token: 1, trial: .server(main), &evidence, at: .seconds(20)).pause != nil)
        #expect(evidence.words(of: .server(main)).hasSuffix(", and requests wait: connection refused"))
    }

    @Test func `different faults do not add up`() {
        var evidence = ResponseEvidence(.production)
        let sender = Self.refusal(.sender("APNs answered 403 InvalidProviderToken"))
        let server = RetryPolicy.Step(.later(.seconds(900), "503"), .server)
        for token in 1...19 { #expect(note(server, token: token, &evidence).pause == nil) }
        for token in 1...4 { #expect(note(sender, token: token, &evidence).pause == nil) }
        #expect(note(sender, token: 5, &evidence).pause != nil)
    }

    private static let disallowed = refusal(.topic("APNs answered 400 TopicDisallowed"))
    private static let invalid = refusal(.sender("APNs answered 403 InvalidProviderToken"))

    @Test(arguments: [disallowed, invalid])
    func `a request that is refused while others are accepted fails alone after five tries`(refused: RetryPolicy.Step) {
        var evidence = ResponseEvidence(.production)
        for _ in 1...50 { #expect(note(refused, token: 1, &evidence).fate == refused.fate, "nothing is accepted") }
        _ = note(accepted, token: 2, &evidence)
        for refusals in 0...3 {
            #expect(
                note(refused, token: 1, refusals: refusals, &evidence).fate
                    == .refused(.seconds(5 * (1 << refusals)), refused.blame.words!))
        }
        #expect(
            note(refused, token: 1, refusals: 4, &evidence).fate
                == .failed("\(refused.blame.words!), 5 times, while other requests of the topic were accepted"))
        for _ in 1...9 {
            #expect(
                note(refused, token: 3, refusals: 4, &evidence, at: .seconds(601)).fate == refused.fate,
                "that was long ago")
        }
        #expect(
            note(refused, token: 3, age: .seconds(100), &evidence, at: .seconds(111)).fate == refused.fate,
            "nothing was accepted since it was first sent")
        #expect(
            note(refused, token: 3, refusals: 3, othersAccepted: true, &evidence, at: .seconds(601)).fate
                != refused.fate, "another daemon has seen one")
        #expect(evidence.isQuiet)
    }

    @Test func `a 200 that may have been passed on stays interrupted, whatever is accepted`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 9, &evidence)
        let step = RetryPolicy.Step(
            .interrupted(.seconds(5), "the server answered 200"), .foreign("the server answered 200"))
        #expect(note(step, token: 1, refusals: 4, othersAccepted: true, &evidence).fate == step.fate)
    }

    @Test func `a server that responds to nothing is shown, before a request has ended`() {
        var server = ServerState()
        _ = server.submit([Decisions.claimed(1, "ab", topic: "a")], at: start)
        #expect(server.problem(of: main, after: .seconds(10), isPausing: true, at: start + .seconds(9)) == nil)
        let problem = server.problem(of: main, after: .seconds(10), isPausing: false, at: start + .seconds(11))
        #expect(problem?.words.contains("none has come for more than 10.0 seconds") == true, "\(problem as Any)")
        server.note(.unanswered(PushFailure(kind: .connect, message: "refused", mayHaveArrived: false)))
        #expect(server.problem(of: main, after: .seconds(10), isPausing: false, at: start) == nil)
        let early = server.problem(of: main, after: .seconds(10), isPausing: true, at: start)
        let late = server.problem(of: main, after: .seconds(10), isPausing: true, at: start + .seconds(20))
        #expect(early == late && early?.words.contains("refused") == true, "one outage is one sentence")
    }

    @Test func `many odd requests of a topic do not pause it, and each of them fails`() {
        var evidence = ResponseEvidence(.production)
        for token in 1...10 {
            _ = note(Self.disallowed, token: token, &evidence)
            _ = note(accepted, token: 100 + token, &evidence)
        }
        for refusals in 1...4 {
            for token in 1...10 {
                let finding = note(Self.disallowed, token: token, refusals: refusals, &evidence, at: .seconds(60))
                #expect(finding.pause == nil && finding.fate.isFinal == (refusals == 4))
            }
        }
    }

    @Test func `odd requests that pause their topic do not keep it so`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 100, &evidence)
        for token in 1...4 { _ = note(Self.disallowed, token: token, &evidence) }
        _ = note(Self.disallowed, token: 5, &evidence, at: .seconds(2))
        #expect(evidence.isPausing(.topic(topic), at: start + .seconds(3)))
        for refusals in 1...4 {
            let finding = note(
                Self.disallowed, token: 1, refusals: refusals, trial: .topic(topic), &evidence,
                at: .seconds(10 * refusals))
            #expect(finding.pause == nil && finding.fate.isFinal == (refusals == 4))
        }
        #expect(note(Self.disallowed, token: 9, trial: .topic(topic), &evidence, at: .seconds(60)).pause != nil)
    }

    @Test func `while a credential pauses, no refusal counts against a request`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 9, &evidence)
        for token in 1...5 { _ = note(Self.invalid, token: token, &evidence, at: .seconds(token)) }
        for _ in 1...20 {
            #expect(
                note(Self.invalid, token: 1, refusals: 4, othersAccepted: true, &evidence).fate == Self.invalid.fate)
        }
    }

    @Test func `a topic that alone is refused does not stop its quiet siblings`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 9, topic: "b", &evidence)
        for token in 1...4 { #expect(note(Self.invalid, token: token, &evidence, at: .seconds(60)).pause == nil) }
        #expect(note(Self.invalid, token: 5, &evidence, at: .seconds(60)).pause?.subject == .topic(topic))
        #expect(!evidence.isOnTrial(.server(main)))
    }

    @Test func `a topic that alone draws errors of the server pauses, and its siblings go on`() {
        var evidence = ResponseEvidence(.production)
        let failed = RetryPolicy.Step(.later(.seconds(900), "no response"), .server)
        _ = note(accepted, token: 9, topic: "b", &evidence)
        for token in 1...19 { #expect(note(failed, token: token, &evidence).pause == nil) }
        #expect(note(failed, token: 20, &evidence).pause?.subject == .topic(topic))
        #expect(
            evidence.problems(except: [], at: start).map(\.words) == [
                "requests for \(topic) fail, and requests wait: no response"
            ])
        #expect(note(failed, token: 20, trial: .topic(topic), &evidence, at: .seconds(6)).pause != nil)
        _ = note(accepted, token: 1, trial: .topic(topic), &evidence, at: .seconds(20))
        #expect(evidence.isQuiet)
    }

    @Test func `errors of the server for many topics pause the credential, though none has many requests`() {
        var evidence = ResponseEvidence(.production)
        let failed = RetryPolicy.Step(.later(.seconds(900), "503"), .server)
        _ = note(accepted, token: 9, topic: "b", &evidence)
        // The first one may have been its topic's only.
        for token in 1...20 { #expect(note(failed, token: token, topic: "t\(token)", &evidence).pause == nil) }
        #expect(note(failed, token: 21, topic: "t21", &evidence, at: .seconds(2)).pause?.subject == .server(main))
    }

    @Test func `a response that is not from APNs fails no request before the time of its retries is over`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 9, &evidence)
        let step = Self.refusal(.foreign("the server answered 502"))
        for refusals in 0...20 {
            #expect(note(step, token: 1, refusals: refusals, age: .seconds(80000), &evidence).fate == step.fate)
        }
        let words = "the server answered 502; failed after 1 tries"
        #expect(note(step, token: 1, age: .seconds(86400), &evidence).fate == .failed(words))
        for token in 1...5 { _ = note(step, token: token, &evidence, at: .seconds(token)) }
        #expect(note(step, token: 1, age: .seconds(86400), &evidence).fate == step.fate, "nothing is accepted")
    }

    /// Other hosts send all that comes, so nothing waits now and then.
    @Test func `a host whose credential is refused stays on trial for an hour while nothing waits`() {
        var evidence = ResponseEvidence(.production)
        for token in 1...5 { _ = note(Self.invalid, token: token, &evidence) }
        func keep(_ seconds: Int, _ hasRequests: Bool) {
            evidence.keep(at: start + .seconds(seconds)) { _ in hasRequests }
        }
        keep(10, false)
        keep(3000, false)
        #expect(evidence.isOnTrial(.server(main)) && evidence.problems(except: [], at: start).count == 1)
        keep(3100, true)
        keep(3200, false)
        keep(6700, false)
        #expect(note(Self.invalid, token: 6, trial: .server(main), &evidence, at: .seconds(6750)).pause != nil)
        keep(6801, false)
        keep(10_402, false)
        #expect(evidence.isQuiet)
        for token in 1...20 { _ = note(.init(.later(.seconds(1), "w"), .server), token: token, &evidence) }
        keep(10_500, false)
        #expect(evidence.isQuiet, "a server that fails is no fault of this host")
    }

    @Test func `a key that is refused for one topic and then for all is one pause and one sentence`() {
        var evidence = ResponseEvidence(.production)
        _ = note(accepted, token: 9, topic: "b", &evidence)
        for token in 1...5 { _ = note(Self.invalid, token: token, &evidence) }
        #expect(evidence.isOnTrial(.topic(topic)) && !evidence.isOnTrial(.server(main)))
        for token in 1...5 {
            for other in ["c", "d"] {
                _ = note(Self.invalid, token: token, topic: other, &evidence, at: .seconds(token))
            }
        }
        #expect(!evidence.isOnTrial(.topic(topic)) && evidence.isOnTrial(.server(main)))
        #expect(evidence.problems(except: [], at: start).count == 1)
    }

    @Test func `few refused tokens pause nothing, and are shown after a while until one is accepted`() {
        var evidence = ResponseEvidence(.production)
        let refused = Self.refusal(.sender("APNs answered 429 TooManyProviderTokenUpdates"))
        func shown(_ evidence: ResponseEvidence, _ time: Duration) -> [String] {
            evidence.problems(except: [], at: start + time).map(\.words)
        }
        _ = note(refused, token: 1, &evidence)
        #expect(shown(evidence, .seconds(9)).isEmpty)
        let words =
            "APNs refuses the credential (main, production), and requests wait: APNs answered 429 TooManyProviderTokenUpdates; another host "
            + "or program makes provider tokens of this key, too"
        #expect(shown(evidence, .seconds(10)) == [words] && evidence.isQuiet, "once, and not for its topic, too")
        #expect(shown(evidence, .seconds(361)).isEmpty, "nothing is tried any more")
        _ = note(refused, token: 1, &evidence, at: .seconds(361))
        #expect(shown(evidence, .seconds(362)).isEmpty && shown(evidence, .seconds(371)) == [words], "another time")
        _ = note(accepted, token: 2, &evidence, at: .seconds(363))
        #expect(shown(evidence, .seconds(364)).isEmpty)
        _ = note(refused, token: 3, &evidence, at: .seconds(365))
        evidence.keep(at: start) { _ in false }
        #expect(shown(evidence, .seconds(380)).isEmpty, "its requests were deleted")
        _ = note(refused, token: 3, refusals: 0, othersAccepted: true, &evidence, at: .seconds(800))
        #expect(shown(evidence, .seconds(820)).isEmpty, "the odd one")
        // Nobody can mend a server's error now and then: it is not shown.
        _ = note(.init(.later(.seconds(1), "w"), .server), token: 1, &evidence, at: .seconds(363))
        #expect(shown(evidence, .seconds(400)).isEmpty)
    }

    @Test func `a person ends the pause of a credential`() {
        var evidence = ResponseEvidence(.production)
        let refused = Self.refusal(.sender("APNs answered 403 InvalidProviderToken"))
        for token in 1...5 { _ = note(refused, token: token, &evidence) }
        #expect(
            evidence.problems(except: [], at: start).map(\.words) == [
                "APNs refuses the credential (main, production), and requests wait: APNs answered 403 InvalidProviderToken; usually key_id and "
                    + "team_id are exchanged, or the key was revoked or is another one than key_id says"
            ])
        evidence.resume { $0 == .server(main) }
        #expect(evidence.isQuiet)
    }
}

extension RequestFate {
    /// Whether the request leaves the outbox.
    fileprivate var isFinal: Bool {
        switch self {
        case .answered, .failed: true
        case .later, .refused, .interrupted, .returned: false
        }
    }
}
