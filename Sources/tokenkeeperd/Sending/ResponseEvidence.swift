internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What outcomes say about more than their requests: about a topic, or about a credential in an environment with all that lies between this daemon and APNs.
/// Decides what pauses, for how long, and when a request fails alone. Pure.
///
/// - One outcome says something about its request only. A subject pauses when as many different tokens as `RetryPolicy.Evidence` says drew outcomes of one
///   kind, and no request was accepted meanwhile; if one was accepted lately, not for two seconds. A topic pauses before its credential.
/// - After a pause, one request at a time tries the subject: see `Trial`. If it is refused, the next pause is longer. Any accepted request ends it all, also
///   for other credentials with the same cause: the same environment's server, or the same key.
/// - A refused request waits and is tried again. The refusal counts against it if another request of its topic was accepted since it was first sent, and
///   within ten minutes. After five it fails. Once one counts, the request's later refusals are no evidence against anything else: it is the odd one. What is
///   not from APNs says nothing about a request: it fails only when the time of its retries is over.
/// - While a credential pauses, no refusal counts: if nothing is accepted, nothing fails.
struct ResponseEvidence {
    /// What pauses.
    enum Subject: Hashable, Comparable {
        case server(CredentialScope)
        case topic(TopicScope)
    }

    let timing: Timing
    /// What tells the keys of credentials apart, by the credential's name.
    private let key: (String) -> String
    /// Of the subjects with a request that was not accepted since the last one that was.
    private(set) var standings: [Subject: Standing] = [:]
    private var accepted = AcceptedLately()

    /// - Parameter key: What tells the keys of credentials apart, by the credential's name.
    init(_ timing: Timing, key: @escaping (String) -> String = { $0 }) {
        self.timing = timing
        self.key = key
    }

    /// One outcome, and what it is an outcome of.
    private struct Outcome {
        let step: RetryPolicy.Step
        let claimed: ClaimedRequest
        let scope: CredentialScope
        /// The subject whose trial the request was.
        let trial: Subject?
        /// How long ago the request was first sent.
        let age: Duration
        let now: ContinuousClock.Instant
        /// Whether the refusal counts against the request.
        var isOdd = false

        var topic: TopicScope { claimed.request.address.scope }
        var cause: Standing.Cause? {
            Standing.Kind(step.blame).map { Standing.Cause(kind: $0, words: step.blame.words ?? step.fate.error ?? "") }
        }
    }

    /// What follows from one outcome.
    struct Finding: Equatable {
        /// What becomes of the request.
        var fate: RequestFate
        /// The subject that pauses from now, and for how long.
        var pause: Pause?

        struct Pause: Equatable {
            var subject: Subject
            var duration: Duration
        }
    }

    /// - Parameters:
    ///   - trial: The subject whose trial the request was.
    ///   - age: How long ago the request was first sent.
    ///   - retryFor: How long a request is retried.
    mutating func note(
        _ step: RetryPolicy.Step, of claimed: ClaimedRequest, in scope: CredentialScope, trial: Subject?,
        age: Duration, retryFor: Duration, at now: ContinuousClock.Instant
    ) -> Finding {
        var outcome = Outcome(step: step, claimed: claimed, scope: scope, trial: trial, age: age, now: now)
        // Before this outcome is noted: it may be the last that it takes.
        outcome.isOdd = step.blame.isRefusal && countsAgainstRequest(outcome)
        return Finding(fate: fate(after: outcome, retryFor: retryFor), pause: suspect(after: outcome))
    }

    private func fate(after outcome: Outcome, retryFor: Duration) -> RequestFate {
        // A request that may have been delivered has no sends to lose: it stays interrupted.
        guard outcome.isOdd, case .later(_, let error) = outcome.step.fate else { return outcome.step.fate }
        if case .foreign = outcome.step.blame {
            // APNs has not judged it.
            return outcome.age < retryFor
                ? outcome.step.fate : .failed("\(error); failed after \(outcome.claimed.attempts + 1) tries")
        }
        let count = outcome.claimed.refusals + 1
        return count < RetryPolicy.refusals
            ? .refused(RetryPolicy.pause(afterRefusals: outcome.claimed.refusals), error)
            : .failed("\(error), \(count) times, while other requests of the topic were accepted")
    }

    /// Notes whom the outcome speaks for or against.
    private mutating func suspect(after outcome: Outcome) -> Finding.Pause? {
        let (server, topic) = (Subject.server(outcome.scope), Subject.topic(outcome.topic))
        let isKnownToBeOdd = outcome.isOdd && outcome.claimed.refusals > 0
        switch (outcome.step.blame, outcome.step.fate) {
        case (.token, .answered), (.nobody, .answered):
            accept(server)
            accept(topic)
            accepted.note(outcome.topic, of: outcome.scope, at: outcome.now)
        // APNs has judged the request, so it accepts the credential.
        case (.token, _): accept(server)
        case (.message, _), (.topic, _):
            accept(server)
            return isKnownToBeOdd ? nil : suspect(topic, outcome)
        case (.unreachable, _): return suspect(server, outcome)
        case (.server, _), (.sender, _), (.foreign, _):
            if isKnownToBeOdd { return nil }
            let pause =
                !isOfOneTopic(outcome) || isOnTrial(server) ? suspect(server, outcome) : nil
            // It may be this topic's only.
            return isOnTrial(server) ? pause : suspect(topic, outcome)
        case (.nobody, _): break
        }
        return nil
    }

    /// Whether a refusal counts against its request, as far as this daemon sees.
    private func countsAgainstRequest(_ outcome: Outcome) -> Bool {
        if isOnTrial(.server(outcome.scope)) { return false }
        if outcome.claimed.othersAccepted { return true }
        // Only what was accepted since this request was first sent counts. APNs may have begun to refuse everything before that.
        let since = min(outcome.age + Self.atOnce, RetryPolicy.acceptedWithin)
        return accepted.has(outcome.topic, within: since, at: outcome.now)
    }

    /// Responses that are so close count as of one moment.
    private static let atOnce: Duration = .seconds(2)

    /// Whether only this topic draws such outcomes: the credential was accepted for another one lately, and no other one draws them.
    private func isOfOneTopic(_ outcome: Outcome) -> Bool {
        guard let cause = outcome.cause else { return false }
        let othersDrawIt = standings.contains {
            guard case .topic(let other) = $0.key, case .goes(let suspicion) = $0.value else { return false }
            return other != outcome.topic && suspicion.scope == outcome.scope && suspicion.signs[cause.kind] != nil
        }
        return !othersDrawIt && accepted.has(outcome.scope, except: outcome.topic, at: outcome.now)
    }

    private mutating func accept(_ subject: Subject) {
        if standings.isEmpty { return }
        guard let ended = standings.removeValue(forKey: subject)?.pause, case .server(let scope) = subject else {
            return
        }
        standings = standings.filter { other, standing in
            guard case .server(let another) = other, let pause = standing.pause else { return true }
            return !haveOneCause(scope, another, ended.cause.kind, pause.cause.kind)
        }
    }

    /// Whether what ended one credential's pause ends the other's: they have one server and one kind of trouble, and one key if that was refused.
    private func haveOneCause(
        _ one: CredentialScope, _ other: CredentialScope, _ kind: Standing.Kind, _ otherKind: Standing.Kind
    ) -> Bool {
        one.environment == other.environment && kind == otherKind
            && (kind != .sender || key(one.credential) == key(other.credential))
    }

    /// Notes an outcome against a subject.
    private mutating func suspect(_ subject: Subject, _ outcome: Outcome) -> Finding.Pause? {
        guard let evidence = RetryPolicy.Evidence(outcome.step.blame), var cause = outcome.cause else { return nil }
        var number = 1
        var trial = Trial()
        switch standings[subject]
            ?? .goes(.init(scope: outcome.scope, wasGood: accepted.has(subject, at: outcome.now)))
        {
        case .goes(var suspicion):
            if !outcome.isOdd, outcome.step.blame.isRefusal { suspicion.refused(cause, at: outcome.now) }
            let signs = suspicion.note(cause.kind, outcome.claimed.request.address, at: outcome.now)
            standings[subject] = .goes(suspicion)
            let lasts = suspicion.wasGood ? timing.scaled(RetryPolicy.Evidence.lasts) : .zero
            if signs.tokens.count < evidence.tokens || signs.since.duration(to: outcome.now) < lasts { return nil }
            // What others had drawn until now may have been the server's fault, too, and so are pauses of its topics with the same cause.
            if case .server = subject {
                standings = standings.filter { other, standing in
                    guard let pause = standing.pause else { return false }
                    if case .server = other { return true }
                    return standing.scope != outcome.scope || pause.cause.kind != cause.kind
                }
            }
        case .pauses(let pause):
            // A request from before the pause says nothing new.
            if outcome.now < pause.until || outcome.trial != subject { return nil }
            (number, trial) = (pause.number + 1, pause.trial)
            // The client itself may have waited, and says nothing new.
            if cause.words.isEmpty { cause.words = pause.cause.words }
        }
        var backoff = evidence.pause
        if case .topic = subject { backoff = RetryPolicy.Evidence.pauseOfTopic }
        let duration = timing.scaled(backoff).pause(after: number - 1).jittered()
        standings[subject] = .pauses(
            .init(
                scope: outcome.scope, until: outcome.now + duration, number: number, cause: cause, trial: trial))
        return Finding.Pause(subject: subject, duration: duration)
    }

    /// A server has responded to nothing for a while: it pauses, although no request has ended.
    mutating func isSilent(_ scope: CredentialScope, at now: ContinuousClock.Instant) -> Finding.Pause? {
        guard !isOnTrial(.server(scope)), let evidence = RetryPolicy.Evidence(.server) else { return nil }
        let duration = timing.scaled(evidence.pause).pause(after: 0).jittered()
        let cause = Standing.Cause(kind: .server, words: "no response comes")
        standings[.server(scope)] = .pauses(
            .init(scope: scope, until: now + duration, number: 1, cause: cause, trial: Trial()))
        return Finding.Pause(subject: .server(scope), duration: duration)
    }

    /// Subjects are to be tried at once, as if nothing had happened.
    mutating func resume(where isMeant: (Subject) -> Bool) {
        standings = standings.filter { !isMeant($0.key) }
    }

    /// Forgets the pauses and the refusals of subjects without requests. A credential that is refused stays on trial for an hour: other hosts may send all that
    /// comes, and the next requests that this host claims would be refused, too.
    mutating func keep(at now: ContinuousClock.Instant, where hasRequests: (Subject) -> Bool) {
        for (subject, standing) in standings {
            let isIdle = !hasRequests(subject)
            switch standing {
            case .goes(var suspicion) where isIdle:
                suspicion.refusal = nil
                standings[subject] = .goes(suspicion)
            case .goes: break
            case .pauses(var pause):
                pause.idleSince = isIdle ? pause.idleSince ?? now : nil
                standings[subject] = .pauses(pause)
                guard let since = pause.idleSince else { continue }
                var patience = Duration.zero
                if case .server = subject, [.sender, .foreign].contains(pause.cause.kind) { patience = .seconds(3600) }
                if since.duration(to: now) >= patience { standings[subject] = nil }
            }
        }
    }

    func isPausing(_ subject: Subject, at now: ContinuousClock.Instant) -> Bool {
        standings[subject]?.pause.map { now < $0.until } ?? false
    }

    /// Whether no request was accepted since the subject last paused.
    func isOnTrial(_ subject: Subject) -> Bool { standings[subject]?.pause != nil }

    /// Whether a credential's server pauses because it returns errors or cannot be reached.
    func fails(_ scope: CredentialScope) -> Bool {
        standings[.server(scope)]?.pause.map { [.server, .unreachable].contains($0.cause.kind) } ?? false
    }

    /// Whether no subject pauses or is on trial.
    var isQuiet: Bool { !standings.values.contains { $0.pause != nil } }
}

// MARK: - Trials

extension ResponseEvidence {
    func isTried(_ subject: Subject) -> Bool { standings[subject]?.pause?.trial.token != nil }

    /// The subject whose trial the request in flight for a token is.
    func trial(of token: TokenAddress, in scope: CredentialScope) -> Subject? {
        if standings.isEmpty { return nil }
        return [.server(scope), .topic(token.scope)].first { standings[$0]?.pause?.trial.token == token }
    }

    /// Of the trial turns of each subject, keeps one, of another topic or campaign each time; none while a request tries it.
    func narrow(_ turns: [SendState.Turn]) -> [SendState.Turn] {
        var kept = turns
        for (subject, own) in Dictionary(grouping: turns.filter(\.isTrial), by: { $0.trial! }) {
            let trial = standings[subject]?.pause?.trial ?? Trial()
            let next = trial.token == nil ? own[trial.number % own.count].source : nil
            kept.removeAll { $0.trial == subject && $0.source != next }
        }
        return kept
    }

    /// Chooses a request that tries a subject.
    ///
    /// - Returns: Nil if there is no candidate.
    mutating func chooseTrial(from candidates: [ClaimedRequest], of subject: Subject) -> ClaimedRequest? {
        withTrial(of: subject) { $0.choose(from: candidates) }
    }

    /// The request that tried a subject has ended.
    ///
    /// - Parameter isInVain: Whether the request was sent and not accepted.
    mutating func ended(_ subject: Subject, isInVain: Bool) {
        withTrial(of: subject) { $0.ended(isInVain: isInVain) }
    }

    private mutating func withTrial<Result>(of subject: Subject, _ body: (inout Trial) -> Result) -> Result {
        guard var pause = standings[subject]?.pause else {
            var trial = Trial()
            return body(&trial)
        }
        defer { standings[subject] = .pauses(pause) }
        return body(&pause.trial)
    }
}
