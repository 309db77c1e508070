public import TokenModel

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
