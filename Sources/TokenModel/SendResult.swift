/// One response of APNs as a sender queued it: a row of `tokenkeeper.send_result`, not validated yet.
public struct SendResult: Hashable, Sendable {
    /// `production` or `sandbox`; nil means production.
    public var environment: String?
    /// The `apns-topic` header of the request.
    public var topic: String?
    /// The device token in hex.
    public var token: String?
    /// The HTTP status of the response, as the sender wrote it; see `statusCode`.
    public var status: String?
    /// The body of the response, verbatim.
    public var body: String?
    /// The `apns-id` header of the response.
    public var apnsID: String?
    /// When the sender started the request; nil if it does not know.
    public var sentAt: Instant?
    /// When the row was first queued, by the database server's clock.
    public var queuedAt: Instant
    /// How often the row was rejected and requeued before; nil means never.
    public var attempts: Int32?
    /// Whether an operator has released the row: the mass-failure guard must not hold it again.
    public var isReleased: Bool

    public init(
        environment: String? = nil, topic: String? = nil, token: String? = nil, status: String? = nil,
        body: String? = nil, apnsID: String? = nil, sentAt: Instant? = nil, queuedAt: Instant,
        attempts: Int32? = nil, isReleased: Bool = false
    ) {
        self.environment = environment
        self.topic = topic
        self.token = token
        self.status = status
        self.body = body
        self.apnsID = apnsID
        self.sentAt = sentAt
        self.queuedAt = queuedAt
        self.attempts = attempts
        self.isReleased = isReleased
    }

    /// The status as a number: up to three digits, with blanks around them or not. Nil if the sender wrote anything else.
    public var statusCode: Int32? {
        guard let status else { return nil }
        let blanks: [UInt8] = [UInt8(ascii: " "), UInt8(ascii: "\t"), UInt8(ascii: "\r"), UInt8(ascii: "\n")]
        let bytes = status.utf8
        guard let first = bytes.firstIndex(where: { !blanks.contains($0) }),
            let last = bytes.lastIndex(where: { !blanks.contains($0) })
        else { return nil }
        let digits = bytes[first...last]
        guard digits.count <= 3, digits.allSatisfy({ UInt8(ascii: "0")...UInt8(ascii: "9") ~= $0 }) else { return nil }
        return digits.reduce(0) { $0 * 10 + Int32($1 - UInt8(ascii: "0")) }
    }
}
