import NIOCore

/// A request that arrived whole, as the script and the records see it.
public struct FakeRequest: Sendable {
    /// The token in the path, as the client wrote it; nil if the path has none.
    public internal(set) var token: String?
    public internal(set) var topic: String?
    /// As sent; nil without the header.
    public internal(set) var pushType: String?
    public internal(set) var priority: String?
    public internal(set) var expiration: String?
    public internal(set) var collapseID: String?
    /// The request's `apns-id`, or the one that the server has made for the answer. Always a UUID in lower case.
    public internal(set) var apnsID: String
    /// Whether the request had a valid `apns-id` of its own.
    public internal(set) var hasOwnID: Bool
    /// The provider token without `bearer`; nil if there was none.
    public internal(set) var providerToken: String?

    /// The number of the connection, counted from 1.
    public internal(set) var connection: Int
    /// The HTTP/2 stream: 1, 3, 5, …
    public internal(set) var stream: Int
    /// The number of the request on this server, counted from 1 in the order of completion, refused ones included.
    public internal(set) var ordinal: Int
    /// The same on this connection.
    public internal(set) var ordinalOfConnection: Int
    /// When the request was complete: milliseconds since the Unix epoch, by the server's clock.
    public internal(set) var time: Int64
    /// The same instant in milliseconds since the start of the server.
    public internal(set) var sinceStart: Int64

    var body: ByteBuffer

    /// The body, byte for byte. Only the beginning of a body of more than 32 KiB.
    public var payload: [UInt8] { Array(body.readableBytesView) }
}

/// A request and its outcome.
public struct FakeExchange: Sendable {
    public let request: FakeRequest
    public let outcome: FakeOutcome
    /// Whether the client was told that the request was not processed: by REFUSED_STREAM, or by GOAWAY with a lower last stream.
    public let isRefused: Bool
}

/// The outcome of a request, for counts.
public struct FakeOutcome: Hashable, Sendable, CustomStringConvertible {
    /// 0 if there was no answer: `never`, `reset`, `goAway` or `close`.
    public let status: Int
    /// Apple's reason; empty for 200. For status 0, one of the words above. `raw` for raw answers.
    public let reason: String

    public init(_ status: Int, _ reason: String = "") {
        self.status = status
        self.reason = reason
    }

    public var description: String { reason.isEmpty ? "\(status)" : "\(status) \(reason)" }
}
