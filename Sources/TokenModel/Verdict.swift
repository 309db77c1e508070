/// What one answer of APNs means for its device token.
public enum Verdict: Hashable, Sendable {
    /// 200: taken for delivery. Says nothing about the token's future.
    case accepted
    /// 410 as APNs sends it, with a reason and a timestamp: the token has been dead since `at`. A later registration revives it.
    case stale(TokenAddress, at: Instant, reason: String)
    /// 400 BadDeviceToken and the like: the token is bad for this topic and environment, or the sender is misconfigured.
    /// Also a 410 that APNs does not send: a proxy answered, or the sender omits the body.
    case suspect(TokenAddress, at: Instant, reason: String)
    /// The sender's configuration or this one message is at fault; the token is left alone.
    case sendersFault(reason: String?)
    /// Worth another try later; the token is left alone.
    case transient(reason: String?)
    /// The row cannot be understood. The error says what was found and what was expected.
    case unintelligible(error: String)
}

extension Verdict {
    /// What stands for a reason that was not given.
    public static let noReason = "(none given)"

    /// Why a 410 makes its token suspect instead of stale: what APNs sends with every 410, and this one lacks.
    ///
    /// These texts are counted and stored as reasons: they must stay as they are.
    public enum DoubtfulGone: String, Sendable, CaseIterable {
        case noBody = "410 without a body"
        case foreignBody = "410 with a body that is not from APNs"
        case noReason = "410 without a reason"
        case noTimestamp = "410 without a timestamp"
    }

    /// A reason as it is counted and logged: Apple's are words of letters. Anything else (a proxy's error page with an
    /// identifier in it) counts as one kind, so that neither counts nor logs grow with it, and no token gets into them.
    public static func countable(_ reason: String) -> String {
        let isWord =
            reason.utf8.count <= 64
            && reason.utf8.allSatisfy {
                UInt8(ascii: "A")...UInt8(ascii: "Z") ~= $0 || UInt8(ascii: "a")...UInt8(ascii: "z") ~= $0
            }
        return isWord || reason == noReason || DoubtfulGone(rawValue: reason) != nil ? reason : "(other)"
    }

    /// APNs' reason as it is counted, or nil where none was given.
    public var reason: String? {
        switch self {
        case .accepted: nil
        case .stale(_, _, let reason), .suspect(_, _, let reason): reason
        case .sendersFault(let reason), .transient(let reason): reason
        case .unintelligible: "(rejected)"
        }
    }
}
