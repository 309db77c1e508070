public import TokenModel

/// A response of the server, as received.
public struct PushResponse: Sendable, Equatable {
    public var status: Int32
    /// At most 4 KiB, with invalid UTF-8 replaced; nil if there was none.
    public var body: String?
    /// The `apns-id` header: at most 100 bytes of printable ASCII.
    public var apnsID: String?
    /// The `apns-unique-id` header, which the sandbox sends: at most 100 bytes of printable ASCII.
    public var uniqueID: String?
    /// The `date` header: when the server answered, to the second. Nil if there is none.
    public var answeredAt: Instant?

    public init(
        status: Int32, body: String? = nil, apnsID: String? = nil, uniqueID: String? = nil,
        answeredAt: Instant? = nil
    ) {
        self.status = status
        self.body = body
        self.apnsID = apnsID
        self.uniqueID = uniqueID
        self.answeredAt = answeredAt
    }

    /// The reason in the body, as the server wrote it: at most 100 characters. Nil if there is none.
    public var reason: String? { ResponseBody(body).reason }
}
