internal import TokenModel

extension SendState {
    /// What a turn claims from: the single requests of a topic, or a campaign.
    struct Source: Hashable {
        var topic: TopicScope
        /// Its `campaign_id`; nil for single requests.
        var campaign: Int64?
    }

    /// A turn to be claimed from.
    struct Turn: Equatable {
        var source: Source
        /// The credential's name is empty if the topic is invalid: then all its requests fail in the claim.
        var scope: CredentialScope
        /// How many turns of this round share the credential's room.
        var sharers = 1
        /// What it claims candidates for a trial of.
        var trial: ResponseEvidence.Subject?

        var isTrial: Bool { trial != nil }
        var topic: TopicScope { source.topic }
    }
}

extension SendState.Source: CustomStringConvertible {
    var description: String { campaign.map { "campaign \($0), \(topic)" } ?? "\(topic)" }
}
