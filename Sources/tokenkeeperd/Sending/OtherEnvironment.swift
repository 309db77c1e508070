internal import APNsFeedback
internal import FoundationEssentials
internal import TokenLedger
internal import TokenModel

/// Tries a few tokens that APNs does not know in the other environment, so that an operator learns that they are registered in the wrong one. The
/// request is a background push that shows nothing. Pure.
struct OtherEnvironment {
    private struct Tried {
        var since: ContinuousClock.Instant
        var tokens: Set<TokenAddress> = []
        var accepted = 0
        var ended = 0
    }

    /// By the topic whose tokens APNs does not know.
    private var tried: [TopicScope: Tried] = [:]

    /// How many tokens of a topic are tried in a day.
    private static let most = 3
    private static let day: Duration = .seconds(86_400)
    /// No request of the outbox has this slot.
    private static let slot = Int.max

    static func isTrial(_ outcome: PushOutcome) -> Bool { outcome.request.slot == slot }

    /// - Returns: The request that tries the token of this outcome in the other environment; nil if it is not to be tried.
    mutating func trial(after outcome: PushOutcome, at now: ContinuousClock.Instant) -> PushRequest? {
        let request = outcome.request
        // Another push type may need another topic, and a call must be shown.
        guard case .answered(let answer) = outcome.end, answer.status == 400, answer.reason == "BadDeviceToken",
            Interpretation.isOfAPNs(answer), [.alert, .background].contains(request.pushType)
        else { return nil }
        let topic = request.address.scope
        if let since = tried[topic]?.since, since.duration(to: now) > Self.day { tried[topic] = nil }
        var tried = self.tried[topic] ?? Tried(since: now)
        guard tried.tokens.count < Self.most, tried.tokens.insert(request.address).inserted else { return nil }
        self.tried[topic] = tried
        let other: Environment = request.address.environment == .production ? .sandbox : .production
        return PushRequest(
            address: TokenAddress(environment: other, topic: request.address.topic, token: request.address.token),
            payload: Array(#"{"aps":{"content-available":1}}"#.utf8), pushType: .background, priority: 5, expiration: 0,
            id: UUID().uuidString.lowercased(), mayBeRepeated: false, slot: Self.slot)
    }

    /// Takes the outcome of a trial.
    mutating func ended(_ outcome: PushOutcome) {
        let own: Environment = outcome.request.address.environment == .production ? .sandbox : .production
        let topic = TopicScope(environment: own.rawValue, topic: outcome.request.address.topic.name)
        guard case .answered(let answer) = outcome.end, Interpretation.isOfAPNs(answer), tried[topic] != nil else {
            return
        }
        tried[topic]?.ended += 1
        if answer.status == 200 { tried[topic]?.accepted += 1 }
    }

    /// One sentence for each topic, for a day.
    func problems(at now: ContinuousClock.Instant) -> [String] {
        tried.filter { $0.value.accepted > 0 && $0.value.since.duration(to: now) <= Self.day }
            .sorted { $0.key < $1.key }.map { topic, tried in
                let other = topic.environment == "production" ? "sandbox" : "production"
                return
                    "APNs does not know some tokens of \(topic), and knows \(tried.accepted) of \(tried.ended) that were tried in \(other): "
                    + "these are \(other) tokens; register them with the environment \(other)"
            }
    }
}
