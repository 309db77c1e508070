public import TokenModel

/// How a client proves who it is: with a provider token in each request, or with a client certificate on the connection.
///
/// A connection belongs to one team (Apple, "Establishing a token-based connection to APNs"), so a client has one identity.
public struct PushIdentity: Sendable {
    /// Returns the provider token, a JWT. Called on the client's thread before each send; an error ends the request unsent.
    /// Nil if requests carry no token.
    public var authorization: (@Sendable () throws -> String)?
    /// Takes the provider token that APNs refused as expired. Returns whether `authorization` now has another one.
    public var renew: (@Sendable (_ refused: String) -> Bool)?
    /// A client certificate with its chain, and its key. Both in PEM; set both or neither.
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
