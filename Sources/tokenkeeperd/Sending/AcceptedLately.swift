internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// When a request of each topic was last accepted, and of which credential. Pure.
struct AcceptedLately {
    private var last: [TopicScope: (at: ContinuousClock.Instant, scope: CredentialScope)] = [:]

    mutating func note(_ topic: TopicScope, of scope: CredentialScope, at now: ContinuousClock.Instant) {
        last[topic] = (now, scope)
    }

    /// - Parameter within: How long ago at most.
    func has(
        _ topic: TopicScope, within limit: Duration = RetryPolicy.acceptedWithin, at now: ContinuousClock.Instant
    ) -> Bool {
        last[topic].map { $0.at.duration(to: now) < limit } ?? false
    }

    /// - Parameter topic: One that is not meant.
    func has(_ scope: CredentialScope, except topic: TopicScope? = nil, at now: ContinuousClock.Instant) -> Bool {
        last.contains {
            $0.key != topic && $0.value.scope == scope && $0.value.at.duration(to: now) < RetryPolicy.acceptedWithin
        }
    }

    func has(_ subject: ResponseEvidence.Subject, at now: ContinuousClock.Instant) -> Bool {
        switch subject {
        case .server(let scope): has(scope, at: now)
        case .topic(let topic): has(topic, at: now)
        }
    }
}
