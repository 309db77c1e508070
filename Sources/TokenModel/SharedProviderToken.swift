/// A provider token that APNs has accepted from one daemon, for other daemons with the same signing key.
public struct SharedProviderToken: Sendable, Equatable {
    /// Of whom it is.
    public struct Key: Sendable, Hashable {
        public var teamID: String
        public var keyID: String

        public init(teamID: String, keyID: String) { (self.teamID, self.keyID) = (teamID, keyID) }
    }

    public var key: Key
    public var issuedAt: Instant
    /// The token, encrypted so that only the signing key can open it, in base64.
    public var sealed: String

    public init(key: Key, issuedAt: Instant, sealed: String) {
        (self.key, self.issuedAt, self.sealed) = (key, issuedAt, sealed)
    }
}
