/// Keeps the provider token of one key from one process to the next, and for other processes that send with the same key.
public protocol ProviderTokenStore: Sendable {
    /// Passes the kept token to `choose`, and keeps the one that it returns. Nobody else replaces the kept token meanwhile.
    ///
    /// A failure to read or to keep a token is not an error: it costs at most a token that APNs refuses for a while.
    ///
    /// - Parameter choose: Takes the kept token, nil if there is none. It may be any text, because the file may be damaged.
    /// - Throws: What `choose` throws. Then the kept token stays.
    func replace(_ choose: (_ kept: String?) throws(CredentialError) -> String) throws(CredentialError)
}
