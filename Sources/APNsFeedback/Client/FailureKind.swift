internal import CCurl

/// Maps libcurl's result codes.
extension PushFailure.Kind {
    /// Why no connection could be made.
    ///
    /// - Parameter message: libcurl's, which says more than the code.
    init(_ code: CURLcode, _ message: String) {
        switch code {
        // A server that refuses what ALPN offers: RFC 7301, 3.2.
        case CURLE_SSL_CONNECT_ERROR where message.contains("no application protocol"): self = .protocolError
        case CURLE_COULDNT_RESOLVE_HOST, CURLE_COULDNT_RESOLVE_PROXY: self = .nameResolution
        case CURLE_COULDNT_CONNECT, CURLE_PROXY, CURLE_OPERATION_TIMEDOUT, CURLE_RECV_ERROR, CURLE_SEND_ERROR,
            CURLE_GOT_NOTHING:
            self = .connect
        case CURLE_SSL_CONNECT_ERROR, CURLE_PEER_FAILED_VERIFICATION, CURLE_SSL_CERTPROBLEM, CURLE_SSL_CIPHER,
            CURLE_SSL_CACERT_BADFILE, CURLE_SSL_ISSUER_ERROR, CURLE_SSL_ENGINE_NOTFOUND,
            CURLE_SSL_ENGINE_SETFAILED, CURLE_SSL_ENGINE_INITFAILED, CURLE_SSL_CRL_BADFILE, CURLE_SSL_INVALIDCERTSTATUS,
            CURLE_SSL_PINNEDPUBKEYNOTMATCH, CURLE_SSL_CLIENTCERT, CURLE_SSL_SHUTDOWN_FAILED, CURLE_USE_SSL_FAILED:
            self = .tls
        case CURLE_UNSUPPORTED_PROTOCOL, CURLE_WEIRD_SERVER_REPLY: self = .protocolError
        default: self = .other
        }
    }
}
