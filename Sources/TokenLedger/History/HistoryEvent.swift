/// Something in a token's story: a row of `token_event`, a result that never got so far, or what was done to the whole topic.
public struct HistoryEvent: Sendable {
    /// Where it was read. The raw value decides what comes first at the same instant.
    public enum Source: String, Sendable {
        /// `token_event`.
        case history
        /// `held_result`: it waits for an operator now.
        case held
        /// `rejected_result`.
        case rejected
        /// `reinstatement`, of the whole topic.
        case reinstatement
        /// `operation`, of the whole topic.
        case operation
    }

    public var at: HistoryMoment
    public var source: Source
    /// As in `token_event.event` or `operation.operation`; else `held`, `rejected`, `reinstatement`.
    public var event: String
    public var cause: String?
    /// APNs' reason, or the schema's words.
    public var reason: String?
    public var deviceID: String?
    /// An operation's message, or why a result was rejected.
    public var message: String?
    /// The login role of who did it; nil where that is not kept.
    public var doneBy: String?
    /// How many results an operation was about; nil where that says nothing.
    public var rows: Int64?
    /// Nil where the token was not registered.
    public var registeredBefore: HistoryMoment?
    public var registeredAfter: HistoryMoment?
    /// Nil where nothing was known against the token.
    public var invalidatedBefore: HistoryMoment?
    public var invalidatedAfter: HistoryMoment?
    /// When a held result would count; the first instant of a reinstated window.
    public var since: HistoryMoment?
    /// The last instant of a reinstated window.
    public var until: HistoryMoment?
    /// The row's columns as a JSON object that begins with `at` and `event`, instants in UTC.
    var json = "{}"

    /// Whether it is about the whole topic.
    public var isOfTopic: Bool { source == .operation || source == .reinstatement }

    init(at: HistoryMoment, source: Source, event: String) {
        self.at = at
        self.source = source
        self.event = event
    }
}
