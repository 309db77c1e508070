public import TokenModel

/// How many tokens of a topic suspects may suppress within a day before the mass-failure guard holds further suspects. A topic's
/// own limits, in `tokenkeeper.topic_policy`, override these.
public struct GuardLimits: Equatable, Sendable {
    /// This many tokens, whatever their share.
    public var allowance: Int64
    /// Beyond the allowance, this share of the topic's active tokens. 100 % turns the guard off.
    public var maxShare: Share
    /// Beyond the allowance, this share of the topic's active tokens may newly turn stale within a day before further 410s are held.
    /// 100 % holds none.
    public var holdStaleShare: Share

    public init(allowance: Int64, maxShare: Share, holdStaleShare: Share = .percent(100)) {
        self.allowance = allowance
        self.maxShare = maxShare
        self.holdStaleShare = holdStaleShare
    }
}
