/// One response of APNs as a sender queued it: a row of `tokenkeeper.send_result`, not validated yet.
public struct SendResult: Hashable, Sendable {
    /// `production` or `sandbox`; nil means production.
    public var environment: String?
    /// The `apns-topic` header of the request.
    public var topic: String?
    /// The device token in hex.
    public var token: String?
    /// The HTTP status of the response.
    public var status: Int32?
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
        environment: String? = nil, topic: String? = nil, token: String? = nil, status: Int32? = nil,
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
}
