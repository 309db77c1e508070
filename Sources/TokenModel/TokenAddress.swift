/// Which of Apple's two services a token belongs to. The same device has different tokens in each.
public enum Environment: String, Hashable, Sendable, CaseIterable {
    case production
    case sandbox
}

/// What the ledger keeps a row for: a device token is dead or alive for one topic of one environment, not in general.
public struct TokenAddress: Hashable, Sendable {
    public let environment: Environment
    public let topic: Topic
    public let token: DeviceToken

    public init(environment: Environment, topic: Topic, token: DeviceToken) {
        self.environment = environment
        self.topic = topic
        self.token = token
    }
}
