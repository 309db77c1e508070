/// Start here: the ledger has one row per address, and every other type of this module is about addresses.
///
/// A device token is good or bad for one topic of one environment. A `SendResult` is what a sender reports about an address, and a
/// `Verdict` is what the report means. A `PushRequest` is a notification for an address, and a `RequestFate` is what became of it.
public struct TokenAddress: Hashable, Sendable {
    public let environment: Environment
    public let topic: Topic
    public let token: DeviceToken

    public init(environment: Environment, topic: Topic, token: DeviceToken) {
        self.environment = environment
        self.topic = topic
        self.token = token
    }

    /// The token is enough: hardly two addresses have the same.
    public func hash(into hasher: inout Hasher) { hasher.combine(token) }
}

/// Apple's two services. A device has a different token in each.
public enum Environment: String, Hashable, Sendable, CaseIterable {
    case production
    case sandbox
}
