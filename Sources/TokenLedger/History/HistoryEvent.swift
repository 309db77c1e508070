/// An event in a token's history: a row of `token_event`, a result that was not recorded, or an operation on the whole topic.
public struct HistoryEvent: Sendable {
    /// Where it was read. The raw value orders events of the same instant.
    public enum Source: String, Sendable, ColumnDecodable {
        /// `token_event`.
        case history
        /// `held_result` or `held_registration`: a result or a logout that waits for an operator.
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
    /// As in `token_event.event` or `operation.operation`; otherwise `held`, `rejected` or `reinstatement`.
    public var event: String
    public var cause: String?
    /// APNs' reason, or the schema's words.
    public var reason: String?
    public var deviceID: String?
    /// Who used the token then; nil if nobody was named.
    public var userID: String?
    /// An operation's message, or why a result was rejected.
    public var message: String?
    /// The login role that did it; nil if that is not recorded.
    public var doneBy: String?
    /// How many results an operation was about; nil if that does not apply.
    public var rows: Int64?
    /// Nil if the token was not registered.
    public var registeredBefore: HistoryMoment?
    public var registeredAfter: HistoryMoment?
    /// Nil if nothing was known against the token.
    public var invalidatedBefore: HistoryMoment?
    public var invalidatedAfter: HistoryMoment?
    /// When a held result would count; the first instant of a reinstated window.
    public var since: HistoryMoment?
    /// The last instant of a reinstated window.
    public var until: HistoryMoment?
    /// The row as a JSON object that begins with `at` and `event`. Instants are in UTC.
    var json = "{}"

    /// Whether the event concerns the whole topic.
    public var isOfTopic: Bool { source == .operation || source == .reinstatement }

    init(at: HistoryMoment, source: Source, event: String) {
        self.at = at
        self.source = source
        self.event = event
    }
}
