/// Why a key, a provider token or a certificate cannot be used.
///
/// It contains no part of a key or a password, so it may be logged.
public struct CredentialError: Error, Hashable, Sendable {
    /// One line: what was found, and what to do about it. No period at the end.
    public let message: String

    init(_ message: String) {
        self.message = message
    }
}

extension CredentialError: CustomStringConvertible {
    public var description: String { message }
}
