/// What one answer of APNs means for its device token.
public enum Verdict: Hashable, Sendable {
    /// 200: taken for delivery. Says nothing about the token's future.
    case accepted
    /// 410: Apple's own word that the token has been dead since `at`. A later registration revives it.
    case dead(TokenAddress, at: Instant, reason: String)
    /// 400 BadDeviceToken and the like: the token is bad for this topic and environment, or the sender is misconfigured.
    case suspect(TokenAddress, at: Instant, reason: String)
    /// The sender's configuration or this one message is at fault; the token is left alone.
    case sendersFault(reason: String?)
    /// Worth another try later; the token is left alone.
    case transient(reason: String?)
    /// The row cannot be understood. The error says what was found and what was expected.
    case unintelligible(error: String)
}

extension Verdict {
    /// What stands for the reason of a 410 that came without one.
    public static let noReason = "(none given)"

    /// APNs' reason as it is counted, or nil where none was given.
    public var reason: String? {
        switch self {
        case .accepted: nil
        case .dead(_, _, let reason), .suspect(_, _, let reason): reason
        case .sendersFault(let reason), .transient(let reason): reason
        case .unintelligible: "(rejected)"
        }
    }
}
