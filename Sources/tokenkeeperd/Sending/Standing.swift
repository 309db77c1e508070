internal import APNsFeedback
internal import TokenModel

/// How requests of a server or a topic fare. Pure.
///
///     goes ── as many tokens refused as `RetryPolicy.Evidence` says ──▶ pauses ── its trial refused ──▶ pauses, longer
///
/// A pause that is over is `pauses` still, and is tried. An accepted request leads back to the beginning from everywhere: `ResponseEvidence` then forgets the
/// standing.
enum Standing {
    /// Everything is sent.
    case goes(Suspicion)
    /// Nothing is sent until the pause ends, and then one request at a time.
    case pauses(Pause)

    /// The kinds of blame, without their words.
    enum Kind: Hashable {
        case message, topic, sender, foreign, server, unreachable
    }

    /// What has failed since the last accepted request.
    struct Suspicion {
        /// The credential whose requests failed.
        var scope: CredentialScope
        /// Whether a request of the subject was accepted lately, when the first one failed.
        var wasGood: Bool
        var signs: [Kind: Signs] = [:]
        /// The refusals, without those of an odd request.
        var refusal: Refusal?
    }

    struct Signs {
        /// When the first request failed.
        var since: ContinuousClock.Instant
        var tokens: Set<TokenAddress> = []
    }

    struct Refusal {
        /// When the first one came, and the last one.
        var since: ContinuousClock.Instant
        var last: ContinuousClock.Instant
        var cause: Cause

        /// A refused request waits for its next try: five minutes at most.
        static let lasts: Duration = .seconds(360)
    }

    struct Pause {
        var scope: CredentialScope
        var until: ContinuousClock.Instant
        /// Its number since a request was accepted.
        var number: Int
        var cause: Cause
        var trial: Trial
        /// Since when nothing has waited for it; nil if something does.
        var idleSince: ContinuousClock.Instant?
    }

    struct Cause {
        var kind: Kind
        /// The last outcome, in words.
        var words: String
    }

    var pause: Pause? {
        if case .pauses(let pause) = self { pause } else { nil }
    }

    /// The credential whose requests failed.
    var scope: CredentialScope {
        switch self {
        case .goes(let suspicion): suspicion.scope
        case .pauses(let pause): pause.scope
        }
    }

    /// The cause as it is shown; nil if it is not. Enough refused tokens pause a subject. Fewer are shown after `patience`, until a request is accepted.
    func shown(after patience: Duration, at now: ContinuousClock.Instant) -> Cause? {
        switch self {
        case .pauses(let pause): return pause.cause
        case .goes(let suspicion):
            guard let refusal = suspicion.refusal, refusal.since.duration(to: now) >= patience,
                refusal.last.duration(to: now) < Refusal.lasts
            else { return nil }
            return refusal.cause
        }
    }
}

extension Standing.Suspicion {
    /// - Returns: What there is of this kind.
    mutating func note(
        _ kind: Standing.Kind, _ token: TokenAddress, at now: ContinuousClock.Instant
    ) -> Standing.Signs {
        signs[kind, default: .init(since: now)].tokens.insert(token)
        return signs[kind]!
    }

    mutating func refused(_ cause: Standing.Cause, at now: ContinuousClock.Instant) {
        let before = refusal.flatMap { $0.last.duration(to: now) < Standing.Refusal.lasts ? $0.since : nil }
        refusal = Standing.Refusal(since: before ?? now, last: now, cause: cause)
    }
}

extension Standing.Kind {
    /// Nil for what pauses nothing.
    init?(_ blame: RetryPolicy.Blame) {
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
