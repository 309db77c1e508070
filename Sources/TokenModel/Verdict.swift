/// What one response of APNs means for its device token.
public enum Verdict: Hashable, Sendable {
    /// 200: APNs has accepted the notification. It says nothing about the token's future.
    case accepted
    /// 410 as APNs sends it, with a reason and a timestamp: the token is stale since `at`. A later registration makes it active again.
    case stale(TokenAddress, at: Instant, reason: String)
    /// 400 BadDeviceToken or DeviceTokenNotForTopic: the token is wrong for this topic and environment, or the sender is
    /// misconfigured. Also a 410 that lacks what APNs sends with it: a proxy responded, or the sender omits the body.
    case suspect(TokenAddress, at: Instant, reason: String)
    /// The sender's configuration or this message is at fault. The token is not affected.
    case sendersFault(reason: String?)
    /// The request is worth a retry. The token is not affected.
    case transient(reason: String?)
    /// The row cannot be understood. The error says what was found and what was expected.
    case unintelligible(error: String)
}

extension Verdict {
    /// Stands for a missing reason.
    public static let noReason = "(none given)"

    /// Stand for the reason of a result that was rejected, and of one that was rejected and only counted. Stored, so they must not change.
    public static let rejected = "(rejected)"
    public static let rejectedNotKept = "(rejected, not kept)"

    /// Why a 410 makes its token suspect instead of stale: what it lacks.
    ///
    /// These texts are stored and counted as reasons, so they must not change.
    public enum DoubtfulGone: String, Sendable, CaseIterable {
        case noBody = "410 without a body"
        case foreignBody = "410 with a body that is not from APNs"
        case noReason = "410 without a reason"
        case noTimestamp = "410 without a timestamp"
    }

    /// A reason as counts and logs show it. Apple's reasons consist of letters. All others, such as a proxy's error page with an
    /// identifier in it, count as one kind: neither counts nor logs grow with them, and no token gets into either.
    public static func countable(_ reason: String) -> String {
        let isWord =
            reason.utf8.count <= 64
            && reason.utf8.allSatisfy {
                UInt8(ascii: "A")...UInt8(ascii: "Z") ~= $0 || UInt8(ascii: "a")...UInt8(ascii: "z") ~= $0
            }
        return isWord || reason == noReason || DoubtfulGone(rawValue: reason) != nil ? reason : "(other)"
    }

    /// The reason as it is counted; nil if APNs gave none.
    public var reason: String? {
        switch self {
        case .accepted: nil
        case .stale(_, _, let reason), .suspect(_, _, let reason): reason
        case .sendersFault(let reason), .transient(let reason): reason
        case .unintelligible: Self.rejected
        }
    }
}
