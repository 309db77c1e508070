/// What is known about one token of a topic and environment: its present state and its history.
public struct TokenHistory: Sendable {
    /// The token of the device that has superseded this one.
    public struct NewerToken: Equatable, Sendable {
        /// Its first 8 digits.
        public var digits: String
        public var registeredAt: HistoryMoment
    }

    public var environment: String
    public var topic: String
    /// Whole, in hex.
    public var token: String
    /// From the ledger, or the last in the history; nil if no device was ever named.
    public var deviceID: String?
    /// From the ledger, or the last in the history; nil if no user was ever named, or it was cleared.
    public var userID: String?
    /// The tags, separated by commas; nil if the token never had any.
    public var tags: String?
    /// As in the view `token`; nil if the ledger does not know the token.
    public var state: String?
    /// Whether the topic's gate only observes, and so answers true in any state.
    public var isObserved = false
    /// The database to which the topic has moved, by its name in the map; nil if it is here.
    public var movedTo: String?
    /// Nil if the token was never registered, or the ledger does not know it.
    public var registeredAt: HistoryMoment?
    /// The latest instant as of which the token is bad. An active token may have one. Nil if nothing is known against the token.
    public var invalidatedAt: HistoryMoment?
    /// The cause of `invalidatedAt`, as in the view `token`.
    public var cause: String?
    /// The reason that came with `invalidatedAt`; APNs may give none.
    public var reason: String?
    /// When the first and the last of the reports were received that suppress it by this cause; nil if it is not suppressed, or superseded.
    public var receivedSince: HistoryMoment?
    public var receivedUntil: HistoryMoment?
    /// Nil if the device has none, or the token may be sent to.
    public var newer: NewerToken?
    /// Ordered by time.
    public var events: [HistoryEvent] = []
    /// The row as a JSON object. Instants are in UTC.
    var json = "{}"

    init(environment: String, topic: String, token: String) {
        self.environment = environment
        self.topic = topic
        self.token = token
    }

    /// Whether the ledger suppresses the token, whatever the gate answers.
    public var isSuppressed: Bool { state.map { $0 != "active" } ?? false }

    /// What the gate answers.
    public var isSendable: Bool { !isSuppressed || isObserved }

    /// Whether there are older events, which `events` does not contain.
    public var isInterrupted: Bool { events.count { $0.source == .history } >= Self.mostEvents }

    /// Only this many of the latest events are read.
    static let mostEvents = 500
}
