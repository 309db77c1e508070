/// How a provider proves to APNs who it is.
///
/// Source: Apple, "Establishing a token-based connection to APNs" and "Establishing a certificate-based connection to APNs".
public enum Credential: Sendable {
    /// A header of each request, `authorization: bearer <text>`: for all topics of a team.
    case providerToken(ProviderToken)
    /// Given once, at the TLS handshake: for the topics that are named in it.
    case certificate(ClientCertificate)
}
