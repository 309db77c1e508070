import NIOCore

/// A request that arrived whole, as the script and the records see it.
public struct FakeRequest: Sendable {
    /// The token in the path, as it was written; nil when the path has none.
    public internal(set) var token: String?
    public internal(set) var topic: String?
    /// As sent; nil when there was no header.
    public internal(set) var pushType: String?
    public internal(set) var priority: String?
    public internal(set) var expiration: String?
    public internal(set) var collapseID: String?
    /// The request's `apns-id`, or the one that was made up for the answer. Always a UUID in lower case.
    public internal(set) var apnsID: String
    /// Whether the request had a valid `apns-id` of its own.
    public internal(set) var hasOwnID: Bool
    /// The provider token without `bearer`; nil when there was none.
    public internal(set) var providerToken: String?

    /// Connections are counted from 1.
    public internal(set) var connection: Int
    /// Of HTTP/2: 1, 3, 5, …
    public internal(set) var stream: Int
    /// Requests of this server are counted from 1, refused ones included, in the order in which they were complete.
    public internal(set) var ordinal: Int
    /// The same for this connection.
    public internal(set) var ordinalOfConnection: Int
    /// When the request was complete: milliseconds since the Unix epoch, by the server's clock.
    public internal(set) var time: Int64
    /// The same, since the server was started.
    public internal(set) var sinceStart: Int64

    var body: ByteBuffer

    /// The body, byte for byte (a body over 32 KiB: its beginning).
    public var payload: [UInt8] { Array(body.readableBytesView) }
}

/// A request and what was answered.
public struct FakeExchange: Sendable {
    public let request: FakeRequest
    public let outcome: FakeOutcome
    /// The client was told that the request was not processed: RST_STREAM with REFUSED_STREAM, or a GOAWAY below its stream.
    public let isRefused: Bool
}

/// What a request came to, to be counted.
public struct FakeOutcome: Hashable, Sendable, CustomStringConvertible {
    /// 0 when there was no answer: never, reset, goAway without an answer, close.
    public let status: Int
    /// Apple's reason; for status 0 one of `never`, `reset`, `goAway`, `close`; empty for 200; `raw` for raw answers.
    public let reason: String

    public init(_ status: Int, _ reason: String = "") {
        self.status = status
        self.reason = reason
    }

    public var description: String { reason.isEmpty ? "\(status)" : "\(status) \(reason)" }
}
