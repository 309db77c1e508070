public import TokenModel

/// What became of one request that a client was given. Each request has exactly one.
public struct PushOutcome: Sendable, Equatable {
    public var request: PushRequest
    /// When it first went to a connection, by this machine's clock; nil when it never did.
    public var sentAt: Instant?
    /// How often it went to a connection, repetitions by libcurl itself included.
    public var sends: Int
    public var end: End

    public init(request: PushRequest, sentAt: Instant?, sends: Int, end: End) {
        self.request = request
        self.sentAt = sentAt
        self.sends = sends
        self.end = end
    }

    public enum End: Sendable, Equatable {
        /// APNs' answer, whatever its status: the last one, if the request was repeated.
        case answered(PushResponse)
        /// No answer that could be relied upon, at the second try neither where there was one.
        case unanswered(PushFailure)
        /// APNs would refuse it, or no header could carry it: `PushRequest.fault`, in words. Never sent.
        case unsendable(String)
        /// Given back at the stop of the client. Never sent.
        case withdrawn
    }
}

/// An answer as it came.
public struct PushResponse: Sendable, Equatable {
    public var status: Int32
    /// At most 4 KiB, what is no UTF-8 replaced; nil when there was none.
    public var body: String?
    /// `apns-id`; at most 100 bytes of printable ASCII, as is the next.
    public var apnsID: String?
    /// `apns-unique-id`, which the sandbox gives.
    public var uniqueID: String?

    public init(status: Int32, body: String? = nil, apnsID: String? = nil, uniqueID: String? = nil) {
        self.status = status
        self.body = body
        self.apnsID = apnsID
        self.uniqueID = uniqueID
    }
}

/// Why there is no answer.
public struct PushFailure: Sendable, Equatable {
    public var kind: Kind
    /// One line for people, without secrets.
    public var message: String
    /// Whether APNs may have taken it for delivery nevertheless. It may be sent again, with the same `apns-id`.
    public var mayHaveArrived: Bool
    /// When the server is tried again, where that is known: always with `backingOff`.
    public var retryAfter: Duration?

    public init(kind: Kind, message: String, mayHaveArrived: Bool, retryAfter: Duration? = nil) {
        self.kind = kind
        self.message = message
        self.mayHaveArrived = mayHaveArrived
        self.retryAfter = retryAfter
    }

    public enum Kind: String, Sendable {
        /// The server's name, or the proxy's, has no address.
        case nameResolution
        /// The server, or the proxy, could not be reached in time.
        case connect
        /// No TLS: a certificate that is not to be trusted, one of ours that cannot be used, a version below 1.2.
        case tls
        /// The server is connected and does not answer.
        case timeout
        /// The connection, or the request's stream on it, ended before the answer.
        case connectionLost
        /// The server does not speak HTTP/2, or not well.
        case protocolError
        /// No provider token was to be had.
        case identity
        /// The server could not be reached a moment ago, and is left in peace until `retryAfter` has passed.
        case backingOff
        /// The client was stopped, and the answer did not come in time.
        case stopped
        /// Anything else: libcurl's message says what.
        case other
    }
}
