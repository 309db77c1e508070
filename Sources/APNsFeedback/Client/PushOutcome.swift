public import TokenModel

/// What became of one request that a client was given. Each request has exactly one outcome.
public struct PushOutcome: Sendable, Equatable {
    public var request: PushRequest
    /// When it was first sent, by this machine's clock; nil if it never was.
    public var sentAt: Instant?
    /// How often it was sent completely. A send that the server refused unprocessed does not count.
    public var sends: Int
    public var end: End
    /// From the last send to its response; nil if there was no response.
    public var responseTime: Duration?
    /// The provider token of the last send; nil if there was none.
    public var authorization: String?

    public init(
        request: PushRequest, sentAt: Instant?, sends: Int, end: End, responseTime: Duration? = nil,
        authorization: String? = nil
    ) {
        self.request = request
        self.sentAt = sentAt
        self.sends = sends
        self.end = end
        self.responseTime = responseTime
        self.authorization = authorization
    }

    public enum End: Sendable, Equatable {
        /// A response with any status: the last one, if the request was repeated.
        case answered(PushResponse)
        /// No complete response, after a second attempt where one was allowed.
        case unanswered(PushFailure)
        /// APNs would refuse the request, or headers cannot carry it: `PushRequest.fault`. Never sent.
        case unsendable(String)
        /// Given back when the client stopped, or because of `PushClient.withdraw`. Never sent.
        case withdrawn
    }
}

/// Why there is no response.
public struct PushFailure: Sendable, Equatable {
    public var kind: Kind
    /// One line for people, without secrets.
    public var message: String
    /// Whether APNs may have accepted the notification nevertheless.
    public var mayHaveArrived: Bool
    /// When the server is tried again, if that is known: always with `backingOff`.
    public var retryAfter: Duration?

    public init(kind: Kind, message: String, mayHaveArrived: Bool, retryAfter: Duration? = nil) {
        self.kind = kind
        self.message = message
        self.mayHaveArrived = mayHaveArrived
        self.retryAfter = retryAfter
    }

    public enum Kind: String, Sendable {
        /// The name of the server or the proxy has no address.
        case nameResolution
        /// The server or the proxy could not be reached in time.
        case connect
        /// The TLS handshake failed: an untrusted server certificate, an unusable client certificate, or a version below 1.2.
        case tls
        /// The server accepted the connection and did not respond.
        case timeout
        /// The connection or the request's stream ended before the response.
        case connectionLost
        /// The server does not support HTTP/2, or violates it.
        case protocolError
        /// No provider token could be made.
        case identity
        /// The server could not be reached a moment ago. The client tries it again after `retryAfter`.
        case backingOff
        /// The client was stopped, and the response did not arrive in time.
        case stopped
        /// Anything else: libcurl's message says what.
        case other
    }
}
