internal import APNsFeedback
internal import FoundationEssentials
internal import TokenLedger
internal import TokenModel

/// APNs does not know some production tokens. This tries a few of them in the sandbox, so that an operator learns that they belong to development
/// builds. The request is a background push that shows nothing. It never goes from the sandbox to production, where customers are. Pure.
struct OtherEnvironment {
    private struct Tried {
        var since: ContinuousClock.Instant
        var tokens: Set<TokenAddress> = []
        var known = 0
        var ended = 0
    }

    /// By the topic of the sandbox.
    private var tried: [TopicScope: Tried] = [:]

    /// How many tokens of a topic are tried in a day.
    private static let most = 3
    private static let day: Duration = .seconds(86_400)
    /// No request of the outbox has this slot.
    private static let slot = Int.max

    static func isTrial(_ outcome: PushOutcome) -> Bool { outcome.request.slot == slot }

    /// - Returns: The topic in which the token of this outcome is to be tried; nil if it is not.
    static func topic(toTryAfter outcome: PushOutcome) -> TopicScope? {
        let request = outcome.request
        // Another push type may need another topic, and a call must be shown.
        guard case .answered(let answer) = outcome.end, answer.status == 400, answer.reason == "BadDeviceToken",
            Interpretation.isOfAPNs(answer), request.address.environment == .production,
            [.alert, .background].contains(request.pushType)
        else { return nil }
        return TopicScope(environment: Environment.sandbox.rawValue, topic: request.address.topic.name)
    }

    /// - Parameter outcome: One for which `topic` is not nil.
    /// - Returns: The request that tries its token; nil if enough were tried.
    mutating func trial(after outcome: PushOutcome, at now: ContinuousClock.Instant) -> PushRequest? {
        let own = outcome.request.address
        let address = TokenAddress(environment: .sandbox, topic: own.topic, token: own.token)
        var tried = self.tried[address.scope] ?? Tried(since: now)
        if tried.since.duration(to: now) > Self.day { tried = Tried(since: now) }
        guard tried.tokens.count < Self.most, tried.tokens.insert(address).inserted else { return nil }
        self.tried[address.scope] = tried
        return PushRequest(
            address: address, payload: Array(#"{"aps":{"content-available":1}}"#.utf8), pushType: .background,
            priority: 5,
            expiration: 0, id: UUID().uuidString.lowercased(), mayBeRepeated: false, slot: Self.slot)
    }

    /// Takes the outcome of a trial.
    mutating func ended(_ outcome: PushOutcome) {
        let topic = outcome.request.address.scope
        guard case .answered(let answer) = outcome.end, Interpretation.isOfAPNs(answer) else { return }
        tried[topic]?.ended += 1
        // A token that has died was known.
        if [200, 410].contains(answer.status) { tried[topic]?.known += 1 }
    }

    /// One sentence for each topic, for a day.
    func problems(at now: ContinuousClock.Instant) -> [WaitingProblem] {
        tried.filter { $0.value.known > 0 && $0.value.since.duration(to: now) <= Self.day }
            .sorted { $0.key < $1.key }.prefix(20).map { topic, tried in
                WaitingProblem(
                    "APNs does not know some tokens of \(topic.topic) (production), and knows ",
                    "\(tried.known) of \(tried.ended)",
                    " that were tried in the sandbox: these are sandbox tokens; register them with the environment sandbox",
                    cause: "sandbox tokens of \(topic)"
                )
            }
    }
}
