internal import CCurl
internal import TokenModel

/// What all connections of libcurl have in common: the proxy, whom to trust, and the client's certificate.
enum CurlSettings {
    /// For an `https` server, libcurl asks the proxy for a tunnel.
    ///
    /// - Parameter url: That of the proxy, with its password; nil unless the options name one.
    static func setProxy(_ easy: UnsafeMutableRawPointer, _ url: SecretBytes?, _ options: PushClientOptions) {
        switch options.route {
        case .environment: break
        // An empty text, unlike null, overrides the environment.
        case .direct: unsafe ck_set_text(easy, CURLOPT_PROXY, "")
        case .proxy:
            unsafe url?.withCString { _ = unsafe ck_set_text(easy, CURLOPT_PROXY, $0) }
            unsafe ck_set_text(easy, CURLOPT_NOPROXY, "")
        }
        unsafe ck_set_long(easy, CURLOPT_PROXY_SSL_VERIFYPEER, 1)
        unsafe ck_set_long(easy, CURLOPT_PROXY_SSL_VERIFYHOST, 2)
        // The proxy never sees the client's certificate: libcurl has other options for a proxy's.
        if let file = options.authorityFile {
            unsafe ck_set_text(easy, CURLOPT_PROXY_CAINFO, file)
            unsafe ck_set_text(easy, CURLOPT_PROXY_CAPATH, nil)
        }
    }

    static func setTrust(_ easy: UnsafeMutableRawPointer, _ options: PushClientOptions) {
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYPEER, 1)
        unsafe ck_set_long(easy, CURLOPT_SSL_VERIFYHOST, 2)
        if let file = options.authorityFile {
            unsafe ck_set_text(easy, CURLOPT_CAINFO, file)
            // Otherwise libcurl would trust the system's directory as well.
            unsafe ck_set_text(easy, CURLOPT_CAPATH, nil)
        }
    }

    /// libcurl reads the key where it is: its own copy would not be wiped. So `identity` must outlive the handle.
    static func setIdentity(_ easy: UnsafeMutableRawPointer, _ identity: PushIdentity) {
        guard let chain = identity.certificateChainPEM, let key = identity.keyPEM else { return }
        unsafe ck_set_text(easy, CURLOPT_SSLCERTTYPE, "PEM")
        unsafe ck_set_text(easy, CURLOPT_SSLKEYTYPE, "PEM")
        unsafe chain.withUnsafeBytes {
            _ = unsafe ck_set_blob(easy, CURLOPT_SSLCERT_BLOB, $0.baseAddress, $0.count)
        }
        unsafe key.withBytes {
            _ = unsafe ck_set_lasting_blob(easy, CURLOPT_SSLKEY_BLOB, $0.baseAddress, $0.count)
        }
    }
}
