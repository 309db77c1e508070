/// How many tokens suspects may silence within a day before the mass-failure guard holds them back. A topic's own limits, in
/// `tokenkeeper.topic_policy`, come first.
public struct GuardLimits: Equatable, Sendable {
    /// So many in any case.
    public var allowance: Int64
    /// Beyond that, this share of the topic's active tokens. All of them turns the guard off.
    public var maxShare: Share

    public init(allowance: Int64, maxShare: Share) {
        self.allowance = allowance
        self.maxShare = maxShare
    }
}

/// A part of a whole, in millionths: exact, where a binary fraction would not be.
public struct Share: Equatable, Comparable, Sendable {
    /// 0 to 1,000,000.
    public let millionths: Int64

    public init(millionths: Int64) {
        self.millionths = millionths
    }

    public static func percent(_ whole: Int64) -> Share { Share(millionths: whole * 10_000) }

    public static func < (left: Share, right: Share) -> Bool { left.millionths < right.millionths }
}
