/// A credential in one environment. The requests of one scope go to one server and share its pauses.
struct CredentialScope: Hashable, Sendable {
    /// The name in `[credential.NAME]`.
    var credential: String
    /// `production` or `sandbox`.
    var environment: String
}

extension CredentialScope: Comparable {
    static func < (left: CredentialScope, right: CredentialScope) -> Bool {
        (left.credential, left.environment) < (right.credential, right.environment)
    }
}

extension CredentialScope: CustomStringConvertible {
    var description: String { "\(credential), \(environment)" }
}
