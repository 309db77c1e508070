internal import CCurl

/// Maps libcurl's result codes.
extension PushFailure.Kind {
    /// - Parameter wasSent: Whether the request was sent in this turn.
    init(_ code: CURLcode, wasSent: Bool) {
        switch code {
        case CURLE_COULDNT_RESOLVE_HOST, CURLE_COULDNT_RESOLVE_PROXY: self = .nameResolution
        case CURLE_COULDNT_CONNECT, CURLE_PROXY: self = .connect
        case CURLE_OPERATION_TIMEDOUT: self = wasSent ? .timeout : .connect
        case CURLE_SSL_CONNECT_ERROR, CURLE_PEER_FAILED_VERIFICATION, CURLE_SSL_CERTPROBLEM, CURLE_SSL_CIPHER,
            CURLE_SSL_CACERT_BADFILE, CURLE_SSL_ISSUER_ERROR, CURLE_SSL_ENGINE_NOTFOUND,
            CURLE_SSL_ENGINE_SETFAILED, CURLE_SSL_ENGINE_INITFAILED, CURLE_SSL_CRL_BADFILE, CURLE_SSL_INVALIDCERTSTATUS,
            CURLE_SSL_PINNEDPUBKEYNOTMATCH, CURLE_SSL_CLIENTCERT, CURLE_SSL_SHUTDOWN_FAILED, CURLE_USE_SSL_FAILED:
            self = .tls
        case CURLE_HTTP2, CURLE_HTTP2_STREAM, CURLE_RECV_ERROR, CURLE_SEND_ERROR, CURLE_GOT_NOTHING, CURLE_PARTIAL_FILE:
            self = wasSent ? .connectionLost : .connect
        case CURLE_UNSUPPORTED_PROTOCOL, CURLE_WEIRD_SERVER_REPLY, CURLE_BAD_CONTENT_ENCODING:
            self = .protocolError
        default: self = .other
        }
    }

    /// Whether no connection could be made.
    var isOfConnecting: Bool { [.nameResolution, .connect, .tls].contains(self) }
}
