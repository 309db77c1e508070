internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// What outcomes say about more than their requests: about a topic, or about a credential in an environment with all that lies between this daemon and APNs.
/// Decides what pauses, for how long, and when a request fails alone. Pure.
///
/// - One outcome says something about its request only. A subject pauses when so many different tokens drew outcomes of one kind that `RetryPolicy.Evidence`
///   names, and no request was accepted meanwhile.
/// - After a pause, one request at a time tries the subject: see `Trials`. If it is refused, the next pause is longer. Any accepted request ends it all, also
///   for other credentials with the same cause: the same environment's server, or the same key.
/// - A refused request waits and is tried again. The refusal counts against it if another request of its topic was accepted since it was first sent, and
///   within ten minutes. After five it fails. Once one counts, the request's later refusals are no evidence against anything else: it is the odd one.
/// - While a credential pauses, no refusal counts: if nothing is accepted, nothing fails.
struct ResponseEvidence {
    /// What pauses.
    enum Subject: Hashable, Comparable {
        case server(CredentialScope)
        case topic(TopicScope)
    }

    /// The kinds of blame, without their words.
    fileprivate enum Kind: Hashable {
        case message, topic, sender, foreign, server, unreachable
    }

    private struct Suspicion {
        var tokens: [Kind: Set<TokenAddress>] = [:]
        /// How many pauses it had since a request was accepted.
        var pauses = 0
        /// When the last pause ends or has ended; nil if there was none.
        var until: ContinuousClock.Instant?
        /// The refusals since a request was last accepted, without those of an odd request.
        var refusal: Refusal?
        var kind = Kind.server
        /// The last outcome, in words.
        var words = ""
    }

    private struct Refusal {
        /// When the first one came, and the last one.
        var since: ContinuousClock.Instant
        var last: ContinuousClock.Instant
        var kind: Kind
        var words: String
        var scope: CredentialScope

        /// A refused request waits for its next try: five minutes at most.
        static let lasts: Duration = .seconds(360)
    }

    private let timing: Timing
    private var suspicions: [Subject: Suspicion] = [:]
    /// When a request of each topic was last accepted, and of which credential.
    private var accepted: [TopicScope: (at: ContinuousClock.Instant, scope: CredentialScope)] = [:]

    /// What tells the keys of credentials apart, by the credential's name.
    private let key: (String) -> String

    /// - Parameter key: What tells the keys of credentials apart, by the credential's name.
    init(_ timing: Timing, key: @escaping (String) -> String = { $0 }) {
        self.timing = timing
        self.key = key
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
    mutating func note(
        _ step: RetryPolicy.Step, of claimed: ClaimedRequest, in scope: CredentialScope, trial: Subject?,
        age: Duration, at now: ContinuousClock.Instant
    ) -> Finding {
        let topic = claimed.request.address.scope
        var finding = Finding(fate: step.fate)
        // Before this outcome is noted: it may be the last that it takes.
        let isOdd = step.blame.isRefusal && countsAgainst(claimed, step.blame, in: scope, age: age, at: now)
        if isOdd, let error = step.fate.error {
            let count = claimed.refusals + 1
            finding.fate =
                count < RetryPolicy.refusals
                ? .refused(RetryPolicy.pause(afterRefusals: claimed.refusals), error)
                : .failed("\(error), \(count) times, while other requests of the topic were accepted")
        }
        switch (step.blame, step.fate) {
        case (.token, .answered), (.nobody, .answered):
            accept(.server(scope))
            accept(.topic(topic))
            accepted[topic] = (now, scope)
        // APNs has judged the request, so it accepts the credential.
        case (.token, _): accept(.server(scope))
        case (.message, _), (.topic, _):
            accept(.server(scope))
            if isOdd, claimed.refusals > 0 { break }
            finding.pause = suspect(.topic(topic), step, claimed, in: scope, isOdd: isOdd, trial: trial, at: now)
        case (.server, _), (.unreachable, _):
            finding.pause = suspect(.server(scope), step, claimed, in: scope, isOdd: isOdd, trial: trial, at: now)
        case (.sender, _), (.foreign, _):
            if isOdd, claimed.refusals > 0 { break }
            if !isOfOneTopic(topic, in: scope, at: now) || isOnTrial(.server(scope)) {
                finding.pause = suspect(.server(scope), step, claimed, in: scope, isOdd: isOdd, trial: trial, at: now)
            }
            // The credential may be refused for this topic, and accepted for others.
            if !isOnTrial(.server(scope)) {
                finding.pause = suspect(.topic(topic), step, claimed, in: scope, isOdd: isOdd, trial: trial, at: now)
            }
        case (.nobody, _): break
        }
        return finding
    }

    /// Whether a refusal counts against its request, as far as this daemon sees.
    private func countsAgainst(
        _ claimed: ClaimedRequest, _ blame: RetryPolicy.Blame, in scope: CredentialScope, age: Duration,
        at now: ContinuousClock.Instant
    ) -> Bool {
        let topic = claimed.request.address.scope
        // Only what was accepted since this request was first sent counts. APNs may have begun to refuse everything before that.
        let othersAccepted = accepted[topic].map { $0.at.duration(to: now) < age + Self.atOnce } ?? false
        guard claimed.othersAccepted || (othersAccepted && wasAccepted(topic, at: now)), !isOnTrial(.server(scope))
        else { return false }
        // Whatever a topic's few odd ones do, its pause must end.
        if case .topic = blame, claimed.refusals > 0 { return true }
        return !isOnTrial(.topic(topic))
    }

    /// Responses that are so close count as of one moment.
    private static let atOnce: Duration = .seconds(10)

    private func wasAccepted(_ topic: TopicScope, at now: ContinuousClock.Instant) -> Bool {
        accepted[topic].map { $0.at.duration(to: now) < RetryPolicy.acceptedWithin } ?? false
    }

    /// Whether the credential was accepted for another topic lately, and not for this one: then it is this topic.
    private func isOfOneTopic(_ topic: TopicScope, in scope: CredentialScope, at now: ContinuousClock.Instant) -> Bool {
        !wasAccepted(topic, at: now)
            && accepted.contains { $0.key != topic && $0.value.scope == scope && wasAccepted($0.key, at: now) }
    }

    private mutating func accept(_ subject: Subject) {
        if suspicions.isEmpty { return }
        guard let ended = suspicions.removeValue(forKey: subject), ended.until != nil, case .server(let scope) = subject
        else { return }
        suspicions = suspicions.filter { other, suspicion in
            guard case .server(let another) = other, suspicion.until != nil else { return true }
            return !haveOneCause(scope, another, ended.kind, suspicion.kind)
        }
    }

    /// Whether what ended one credential's pause ends the other's: they have one server and one kind of trouble, and one key if that was refused.
    private func haveOneCause(
        _ one: CredentialScope, _ other: CredentialScope, _ kind: Kind, _ otherKind: Kind
    ) -> Bool {
        one.environment == other.environment && kind == otherKind
            && (kind != .sender || key(one.credential) == key(other.credential))
    }

    private mutating func suspect(
        _ subject: Subject, _ step: RetryPolicy.Step, _ claimed: ClaimedRequest, in scope: CredentialScope, isOdd: Bool,
        trial: Subject?, at now: ContinuousClock.Instant
    ) -> Finding.Pause? {
        guard let evidence = RetryPolicy.Evidence(step.blame), let kind = Kind(step.blame) else { return nil }
        var suspicion = suspicions[subject] ?? Suspicion()
        defer { suspicions[subject] = suspicion }
        if !isOdd, step.blame.isRefusal, let words = step.blame.words {
            let before = suspicion.refusal.flatMap { $0.last.duration(to: now) < Refusal.lasts ? $0.since : nil }
            suspicion.refusal = Refusal(since: before ?? now, last: now, kind: kind, words: words, scope: scope)
        }
        // A request from before the pause says nothing new.
        if let until = suspicion.until, now < until || trial != subject { return nil }
        if suspicion.until == nil {
            suspicion.tokens[kind, default: []].insert(claimed.request.address)
            if suspicion.tokens[kind]!.count < evidence.tokens { return nil }
            suspicion.tokens = [:]
            // What its topics had drawn until now was the server's fault.
            if case .server = subject { suspicions = suspicions.filter { $0.value.until != nil } }
        }
        let pause = timing.scaled(evidence.pause).pause(after: suspicion.pauses).jittered()
        suspicion.pauses += 1
        suspicion.until = now + pause
        suspicion.kind = kind
        suspicion.words = step.blame.words ?? step.fate.error ?? suspicion.words
        return Finding.Pause(subject: subject, duration: pause)
    }

    /// Subjects are to be tried at once, as if nothing had happened.
    mutating func resume(where isMeant: (Subject) -> Bool) {
        suspicions = suspicions.filter { !isMeant($0.key) }
    }

    /// Forgets the pauses and the refusals of subjects without requests.
    mutating func keep(where hasRequests: (Subject) -> Bool) {
        for subject in suspicions.keys where !hasRequests(subject) {
            suspicions[subject]?.refusal = nil
            if isOnTrial(subject) { suspicions[subject] = nil }
        }
    }

    func isPausing(_ subject: Subject, at now: ContinuousClock.Instant) -> Bool {
        suspicions[subject]?.until.map { now < $0 } ?? false
    }

    /// Whether no request was accepted since the subject last paused.
    func isOnTrial(_ subject: Subject) -> Bool { suspicions[subject]?.until != nil }

    /// Whether anything has paused since a request of it was accepted.
    var isQuiet: Bool { !suspicions.values.contains { $0.until != nil } }

    /// One for each subject that pauses, is tried, or was refused only, in order.
    func problems(
        except others: some Sequence<CredentialScope>, at now: ContinuousClock.Instant
    ) -> [WaitingProblem] {
        let others = Set(others.map(Subject.server))
        let shown = suspicions.compactMapValues { self.shown($0, at: now) }.filter { !others.contains($0.key) }
        return shown.sorted { $0.key < $1.key }.compactMap { subject, suspicion in
            // A topic does not repeat what its credential says.
            if case .topic = subject, suspicion.until == nil, let scope = suspicion.refusal?.scope,
                shown[.server(scope)]?.words == suspicion.words
            {
                return nil
            }
            return problem(of: subject, suspicion)
        }
    }

    /// The suspicion as it is shown; nil if it is not. Five refused tokens pause a subject. Fewer are shown, too, some seconds after a refusal, as long as nothing
    /// is accepted.
    private func shown(_ suspicion: Suspicion, at now: ContinuousClock.Instant) -> Suspicion? {
        if suspicion.until != nil { return suspicion }
        guard let refusal = suspicion.refusal, refusal.since.duration(to: now) >= timing.unanswered,
            refusal.last.duration(to: now) < Refusal.lasts
        else { return nil }
        var shown = suspicion
        (shown.kind, shown.words) = (refusal.kind, refusal.words)
        return shown
    }

    /// Why a subject pauses, in words.
    func words(of subject: Subject) -> String { suspicions[subject].map { problem(of: subject, $0).words } ?? "" }

    private func problem(of subject: Subject, _ suspicion: Suspicion) -> WaitingProblem {
        let (before, who, after) =
            switch (subject, suspicion.kind) {
            case (.topic(let topic), .message): ("APNs refuses the messages of ", "\(topic)", "")
            case (.topic(let topic), _): ("APNs refuses requests of ", "\(topic)", "")
            case (.server(let scope), .sender) where suspicion.words.hasPrefix("APNs"):
                ("APNs refuses the credential (", "\(scope)", ")")
            case (.server(let scope), .sender): ("the credential cannot be used (", "\(scope)", ")")
            case (.server(let scope), .foreign):
                (
                    "something between this daemon and APNs responds (", "\(scope)",
                    "); check send.\(scope.environment)_server and any proxy"
                )
            case (.server(let scope), _): ("APNs returns errors or cannot be reached (", "\(scope)", ")")
            }
        return WaitingProblem(
            before, who, "\(after), and requests wait: \(suspicion.words)\(Self.help(suspicion.words))")
    }

    /// What usually helps after a reason of APNs.
    static func help(_ words: String) -> String {
        switch words.split(separator: " ").last {
        case "InvalidProviderToken":
            "; usually key_id and team_id are exchanged, or the key was revoked or is another one than key_id says"
        case "ExpiredProviderToken": "; check the clock of this machine"
        case "TooManyProviderTokenUpdates":
            "; another host or program makes provider tokens of this key, too"
        case "BadEnvironmentKeyIdInToken", "BadEnvironmentKeyInToken", "BadCertificateEnvironment":
            "; the key or certificate is for the other environment only"
        case "TopicDisallowed": "; the key or certificate is for other topics only"
        default: ""
        }
    }
}

extension ResponseEvidence.Kind {
    fileprivate init?(_ blame: RetryPolicy.Blame) {
        switch blame {
        case .nobody, .token: return nil
        case .message: self = .message
        case .topic: self = .topic
        case .sender: self = .sender
        case .foreign: self = .foreign
        case .server: self = .server
        case .unreachable: self = .unreachable
        }
    }
}
