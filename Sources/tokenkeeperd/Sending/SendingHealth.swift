internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// Counts failures in a row, and decides when a topic is paused and when a server or a credential rests. Pure.
struct SendingHealth {
    /// A topic is paused after this many refused messages in a row: the program that writes them is at fault.
    static let messagesInARow = 20
    /// A topic is paused after this many responses in a row that are not from APNs.
    static let foreignInARow = 5
    /// A server rests after this many errors in a row.
    static let errorsInARow = 20
    /// How long a server rests: longer each time, until it responds again.
    private let rest: Backoff

    init(_ timing: Timing) { rest = timing.rest }

    private struct Server {
        var errors = 0
        var backoff: Backoff
        /// When its last rest ends or has ended; nil if it had none since it last responded.
        var restsUntil: ContinuousClock.Instant?
    }

    private var refused: [TopicScope: Int] = [:]
    private var foreign: [TopicScope: Int] = [:]
    private var servers: [CredentialScope: Server] = [:]
    /// Pauses that APNs requested for a credential. They apply to both environments.
    private var pauses: [CredentialScope: ContinuousClock.Instant] = [:]
    private var lastErrors: [CredentialScope: String] = [:]

    /// What follows from one outcome.
    enum Measure: Equatable {
        case none
        /// Pause the topic, for this reason.
        case pauseTopic(String)
        /// Send nothing with the credential in this environment for this time.
        case rest(Duration)
    }

    /// - Parameter isTrial: Whether this is the one request that was sent after a rest, to try the server out.
    mutating func note(
        _ step: RetryPolicy.Step, of topic: TopicScope, by credential: String, isTrial: Bool = false,
        at now: ContinuousClock.Instant
    ) -> Measure {
        let scope = CredentialScope(credential: credential, environment: topic.environment)
        if let error = step.fate.error { lastErrors[scope] = error }
        if isTrial { noteTrial(step, of: scope, at: now) }
        switch step.blame {
        case .message(let words):
            return Self.reached(Self.messagesInARow, of: topic, in: &refused)
                ? .pauseTopic("\(Self.messagesInARow) messages in a row were refused, the last: \(words)") : .none
        case .topic(let words): return .pauseTopic(words)
        case .foreign(let words):
            return Self.reached(Self.foreignInARow, of: topic, in: &foreign)
                ? .pauseTopic(
                    "\(Self.foreignInARow) responses in a row are not from APNs, the last: \(words); "
                        + "check send.\(topic.environment)_server and any proxy between the daemon and APNs") : .none
        case .credential(let pause):
            if isResting(scope, at: now) { return .none }
            pauses[scope] = now + pause
            return .rest(pause)
        case .server: return noteServerError(of: scope, isTrial: isTrial, at: now)
        case .nobody, .token:
            guard step.fate == .answered else { return .none }
            // Nearly all responses end here, and nothing is known against anybody.
            if !refused.isEmpty { refused[topic] = nil }
            if !foreign.isEmpty { foreign[topic] = nil }
            // A response to a request from before the rest does not end the rest.
            if !servers.isEmpty, !isResting(scope, at: now) { servers[scope] = nil }
            return .none
        }
    }

    /// Counts one more for the topic, and starts again at zero once the limit is reached.
    private static func reached(_ limit: Int, of topic: TopicScope, in counts: inout [TopicScope: Int]) -> Bool {
        let count = counts[topic, default: 0] + 1
        counts[topic] = count < limit ? count : nil
        return count >= limit
    }

    /// Ends the trial if APNs has judged the message or the token, whatever its judgment.
    private mutating func noteTrial(
        _ step: RetryPolicy.Step, of scope: CredentialScope, at now: ContinuousClock.Instant
    ) {
        switch step.blame {
        case .message, .token: if !isResting(scope, at: now) { servers[scope] = nil }
        case .nobody, .topic, .foreign, .server, .credential: break
        }
    }

    private mutating func noteServerError(
        of scope: CredentialScope, isTrial: Bool, at now: ContinuousClock.Instant
    ) -> Measure {
        // Requests that were in flight when the rest began say nothing new.
        if isResting(scope, at: now) || (isOnTrial(scope) && !isTrial) { return .none }
        var server = servers[scope] ?? Server(backoff: rest)
        defer { servers[scope] = server }
        server.errors += 1
        if !isTrial, server.errors < Self.errorsInARow { return .none }
        let pause = server.backoff.next()
        server.errors = 0
        server.restsUntil = now + pause
        return .rest(pause)
    }

    func isResting(_ scope: CredentialScope, at now: ContinuousClock.Instant) -> Bool {
        if let until = servers[scope]?.restsUntil, now < until { return true }
        return pauses.contains { $0.key.credential == scope.credential && now < $0.value }
    }

    /// Whether a server has not responded since its last rest: one request at a time tries it out.
    func isOnTrial(_ scope: CredentialScope) -> Bool { servers[scope]?.restsUntil != nil }

    /// The scopes that rest or pause, in order.
    func resting(at now: ContinuousClock.Instant) -> [CredentialScope] {
        Set(servers.keys).union(pauses.keys).filter { isResting($0, at: now) }.sorted()
    }

    /// The error of the last failed request of a scope.
    func lastError(of scope: CredentialScope) -> String? { lastErrors[scope] }
}
