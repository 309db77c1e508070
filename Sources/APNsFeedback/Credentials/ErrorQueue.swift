internal import COpenSSL

/// OpenSSL's error queue. Each thread has one, and errors stay in it until they are read.
///
/// Clear it before a call to OpenSSL, so that no older error is mistaken for an error of the call. Clear it afterwards, because
/// libcurl uses OpenSSL on the same thread and must not find our errors.
enum ErrorQueue {
    /// Runs calls to OpenSSL, and clears the queue before and after.
    static func confined<Value: ~Copyable, Failure>(_ body: () throws(Failure) -> Value) throws(Failure) -> Value {
        ERR_clear_error()
        defer { ERR_clear_error() }
        return try body()
    }

    /// Whether this thread's queue is empty, as it must be left.
    static var isEmpty: Bool { ERR_peek_error() == 0 }

    /// Takes all errors.
    ///
    /// - Returns: Whether one of them says that no provider has the algorithm. Since OpenSSL 3, unsafe algorithms such as RC2, RC4
    ///   and single DES are in a "legacy" provider that is not loaded.
    static func takeUnsupportedAlgorithm() -> Bool {
        var found = false
        while case let error = ERR_get_error(), error != 0 {
            found = tk_is_unsupported_algorithm(error) != 0 || found
        }
        return found
    }
}
