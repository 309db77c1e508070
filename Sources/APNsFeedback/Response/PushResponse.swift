internal import CCurl
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
    /// The `date` header, as the server wrote it: at most 100 bytes of printable ASCII.
    public var date: String?

    public init(
        status: Int32, body: String? = nil, apnsID: String? = nil, uniqueID: String? = nil, date: String? = nil
    ) {
        self.status = status
        self.body = body
        self.apnsID = apnsID
        self.uniqueID = uniqueID
        self.date = date
    }

    /// When the server says that it answered, to the second; nil if it does not say.
    public var answeredAt: Instant? {
        guard let date else { return nil }
        let seconds = unsafe curl_getdate(date, nil)
        return seconds < 0 ? nil : Instant(microseconds: Int64(seconds) * 1_000_000)
    }

    /// The reason in the body, as the server wrote it: at most 100 characters. Nil if there is none.
    public var reason: String? { ResponseBody(body).reason }
}
