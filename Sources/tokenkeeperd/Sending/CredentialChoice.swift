internal import TokenModel

/// Which credential serves a topic. Remembers the answers: to compare hundreds of credentials takes long. Belongs to one
/// thread.
final class CredentialChoice {
    private let settings: [CredentialSettings]
    private var known: [TopicScope: String?] = [:]

    /// Others may queue requests for any topic.
    private static let mostKnown = 10_000

    init(_ settings: [CredentialSettings]) { self.settings = settings }

    /// The name of the credential; nil if none covers the topic.
    func name(for topic: TopicScope) -> String? {
        if let name = known[topic] { return name }
        if known.count >= Self.mostKnown { known = [:] }
        let name = CredentialSettings.best(of: settings, for: topic)?.name
        known[topic] = .some(name)
        return name
    }
}
