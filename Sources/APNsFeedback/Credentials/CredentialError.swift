/// Why a key, a provider token or a certificate cannot be used.
///
/// Nothing of a key or of a password is ever in it, so that it may be logged.
public struct CredentialError: Error, Hashable, Sendable {
    /// One line: what was found, and what to do about it. No full stop at its end.
    public let message: String

    init(_ message: String) {
        self.message = message
    }
}

extension CredentialError: CustomStringConvertible {
    public var description: String { message }
}
