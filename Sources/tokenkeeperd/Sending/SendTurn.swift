internal import TokenModel

extension SendState {
    /// A topic's turn to be claimed from.
    struct Turn: Equatable {
        var topic: TopicScope
        /// The credential's name is empty if the topic is invalid: then all its requests fail in the claim.
        var scope: CredentialScope
        /// How many turns of this round share the credential's room.
        var sharers = 1
        /// Whether it claims candidates for a trial of the server.
        var isTrial = false
    }
}
