internal import COpenSSL

/// OpenSSL's errors, which pile up for each thread until someone takes them.
///
/// Whoever calls OpenSSL clears it before, lest an older error be taken for its own, and after, lest libcurl, which uses the
/// same library on the same thread, find ours.
enum ErrorQueue {
    /// Runs calls of OpenSSL between two clearings.
    static func confined<Value: ~Copyable>(_ body: () throws(CredentialError) -> Value) throws(CredentialError) -> Value
    {
        ERR_clear_error()
        defer { ERR_clear_error() }
        return try body()
    }

    /// Whether this thread has no error: so it must be left.
    static var isEmpty: Bool { ERR_peek_error() == 0 }

    /// Takes all errors. Whether one says that no provider has the algorithm: since OpenSSL 3 those that are no longer safe,
    /// RC2, RC4 and single DES among them, are in a "legacy" provider that is not loaded.
    static func takeUnsupportedAlgorithm() -> Bool {
        var found = false
        while case let error = ERR_get_error(), error != 0 {
            found = tk_is_unsupported_algorithm(error) != 0 || found
        }
        return found
    }
}
