/// A topic of one environment: the unit for which tokens are counted, guarded, paused and sent.
///
/// The names are kept as they were written, because anybody may queue a request for a topic that does not exist: `isValid` says
/// whether APNs could know the scope. Names compare byte by byte, as the columns in PostgreSQL do.
public struct TopicScope: Sendable {
    /// `production` or `sandbox`, if the scope is valid.
    public var environment: String
    /// The `apns-topic`, as `Topic` has it if the scope is valid; empty if the request names none.
    public var topic: String

    public init(environment: String, topic: String) {
        self.environment = environment
        self.topic = topic
    }

    public init(_ environment: Environment, _ topic: Topic) {
        self.init(environment: environment.rawValue, topic: topic.name)
    }

    /// Whether the environment is one of Apple's two and the topic can be a header.
    public var isValid: Bool { Environment(rawValue: environment) != nil && Topic(topic) != nil }
}

extension TopicScope: Hashable {
    public static func == (left: TopicScope, right: TopicScope) -> Bool {
        isSame(left.topic.utf8.span, right.topic.utf8.span)
            && isSame(left.environment.utf8.span, right.environment.utf8.span)
    }

    public func hash(into hasher: inout Hasher) {
        // Equal bytes make equal text, and text hashes faster than byte by byte.
        hasher.combine(environment)
        hasher.combine(topic)
    }
}

extension TopicScope: Comparable {
    /// One order for all daemons, so that two batches never wait for each other's locks.
    public static func < (left: TopicScope, right: TopicScope) -> Bool {
        if !isSame(left.environment.utf8.span, right.environment.utf8.span) {
            return precedes(left.environment.utf8.span, right.environment.utf8.span)
        }
        return precedes(left.topic.utf8.span, right.topic.utf8.span)
    }
}

extension TopicScope: CustomStringConvertible {
    /// `com.example.app (production)`.
    public var description: String { "\(topic) (\(environment))" }
}

extension TokenAddress {
    /// The token's environment and topic.
    public var scope: TopicScope { TopicScope(environment, topic) }
}
