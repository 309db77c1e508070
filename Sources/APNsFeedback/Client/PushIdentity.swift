public import TokenModel

/// How requests prove who sends them: a provider token in each, or a client certificate on the connection.
///
/// A connection belongs to one team (Apple, "Establishing a token-based connection to APNs"), so a client has one identity.
public struct PushIdentity: Sendable {
    /// The provider token, a JWT, asked for before each sending on the client's thread; what it throws ends the request unsent.
    /// Nil: requests carry none.
    public var authorization: (@Sendable () throws -> String)?
    /// Told which provider token APNs refused as expired; answers whether `authorization` now has another one.
    public var renew: (@Sendable (_ refused: String) -> Bool)?
    /// A client certificate and those that vouch for it, and its key; both in PEM, both or neither.
    public var certificateChainPEM: [UInt8]?
    public var keyPEM: SecretBytes?

    public init(
        authorization: (@Sendable () throws -> String)? = nil,
        renew: (@Sendable (_ refused: String) -> Bool)? = nil,
        certificateChainPEM: [UInt8]? = nil, keyPEM: SecretBytes? = nil
    ) {
        self.authorization = authorization
        self.renew = renew
        self.certificateChainPEM = certificateChainPEM
        self.keyPEM = keyPEM
    }
}
