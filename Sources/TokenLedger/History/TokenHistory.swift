/// What is known of one token of one topic and environment: what holds now, and how it came to that.
public struct TokenHistory: Sendable {
    /// The device's token that has taken this one's place.
    public struct NewerToken: Equatable, Sendable {
        /// Its first 8 digits.
        public var digits: String
        public var registeredAt: HistoryMoment
    }

    public var environment: String
    public var topic: String
    /// Whole, in hex.
    public var token: String
    /// The ledger's, or else the last in the history; nil where none was ever named.
    public var deviceID: String?
    /// As in the view `token`; nil where the ledger does not know the token (any more).
    public var state: String?
    /// Whether the topic's gate only observes, and so answers true whatever the state.
    public var isObserved = false
    /// Nil where it was never registered, or the ledger does not know it.
    public var registeredAt: HistoryMoment?
    /// The greatest instant of death; an active token may have one. Nil where nothing is known against it.
    public var invalidatedAt: HistoryMoment?
    /// The cause of `invalidatedAt`, as in the view `token`.
    public var cause: String?
    /// What came with `invalidatedAt`; APNs need not give any.
    public var reason: String?
    /// Nil where the device has none, or the token may be sent to.
    public var newer: NewerToken?
    /// In the order of time.
    public var events: [HistoryEvent] = []
    /// The row as a JSON object, instants in UTC.
    var json = "{}"

    init(environment: String, topic: String, token: String) {
        self.environment = environment
        self.topic = topic
        self.token = token
    }

    /// Whether the ledger says that it must not be sent to, whatever the gate answers.
    public var isSuppressed: Bool { state.map { $0 != "active" } ?? false }

    /// What the gate answers.
    public var isSendable: Bool { !isSuppressed || isObserved }

    /// Whether there are older events than those in `events`.
    public var isInterrupted: Bool { events.count { $0.source == .history } >= Self.mostEvents }

    /// The latest events that are told.
    static let mostEvents = 500
}
