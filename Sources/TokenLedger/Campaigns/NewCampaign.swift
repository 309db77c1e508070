internal import TokenModel

/// A push that a person sends from the command line: the arguments of `tokenkeeper.enqueue`.
public struct NewCampaign: Sendable {
    /// To whom.
    public enum Audience: Sendable {
        /// A whole token, as it is written in hex.
        case token(String)
        case device(String)
        case user(String)
        /// An expression of tags.
        case tags(String)
    }

    /// What.
    public enum Payload: Sendable {
        /// A JSON object, as text.
        case json(String)
        /// An alert with this text, and nothing else.
        case alert(String)
    }

    /// What became of it.
    public struct Outcome: Sendable {
        /// The campaign; nil in a dry run, or if nobody would get it.
        public var number: Int64?
        /// How many tokens the gate lets pass.
        public var tokens: Int64
        /// Why no running daemon can send it; nil if one can.
        public var obstacle: String?
    }

    public var topic: String
    public var environment: String
    public var audience: Audience
    public var payload: Payload
    public var priority: Int?
    /// How long APNs tries to deliver it; nil for its default.
    public var keptFor: Duration?
    public var collapseID: String?
    /// Whether so large an audience is meant.
    public var isConfirmed: Bool

    public init(
        topic: String, environment: String, to audience: Audience, _ payload: Payload, priority: Int? = nil,
        keptFor: Duration? = nil, collapseID: String? = nil, isConfirmed: Bool = false
    ) {
        (self.topic, self.environment, self.audience, self.payload) = (topic, environment, audience, payload)
        (self.priority, self.keptFor, self.collapseID) = (priority, keptFor, collapseID)
        self.isConfirmed = isConfirmed
    }

    /// Counts the audience, and queues the push unless it is empty. A dry run queues it, too, and takes that back: so PostgreSQL
    /// refuses what it would refuse.
    ///
    /// - Parameter counted: Called with the number of tokens before anything is queued.
    public func enqueue(
        dryRun: Bool, on connection: inout Connection, counted: (Int64) -> Void = { _ in }
    ) throws(DatabaseError) -> Outcome {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            let tokens = try size(on: &connection)
            counted(tokens)
            if dryRun { try connection.run("SAVEPOINT trial") }
            let number = try dryRun || tokens > 0 ? campaign(on: &connection) : nil
            if dryRun { try connection.run("ROLLBACK TO SAVEPOINT trial") }
            let obstacle: String? = try connection.query(
                "SELECT tokenkeeper.sending_fault($1, $2)", [.text(topic), .text(environment)]
            ).value()
            return Outcome(number: dryRun ? nil : number, tokens: tokens, obstacle: obstacle)
        }
    }

    private func size(on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try connection.query(
            """
            SELECT tokenkeeper.audience_size($1, $2, tags => $3, device_id => $4, user_id => $5,
                                             tokens => CASE WHEN $6::text IS NOT NULL THEN ARRAY[$6::text] END)
            """, [.text(topic), .text(environment)] + audience.parameters
        ).value()
    }

    private func campaign(on connection: inout Connection) throws(DatabaseError) -> Int64 {
        let (payload, text): (String, String) =
            switch payload {
            case .json(let text): ("$7::text::json", text)
            case .alert(let text): ("json_build_object('aps', json_build_object('alert', $7::text))", text)
            }
        return try connection.query(
            """
            SELECT tokenkeeper.enqueue(\(payload), $1, $2, tags => $3, device_id => $4, user_id => $5,
                                       tokens => CASE WHEN $6::text IS NOT NULL THEN ARRAY[$6::text] END,
                                       priority => $8::integer, expiration => clock_timestamp() + $9 * interval '1 microsecond',
                                       collapse_id => $10, confirm => $11)
            """,
            [.text(topic), .text(environment)] + audience.parameters + [
                .text(text), .int8(priority.map(Int64.init)), .int8(keptFor.map(\.microseconds)), .text(collapseID),
                .bool(isConfirmed),
            ]
        ).value()
    }
}

extension NewCampaign.Audience {
    /// The tags, the device, the user and the token, of which one is given.
    fileprivate var parameters: [Parameter] {
        var given: [String?] = [nil, nil, nil, nil]
        switch self {
        case .tags(let expression): given[0] = expression
        case .device(let device): given[1] = device
        case .user(let user): given[2] = user
        case .token(let token): given[3] = token
        }
        return given.map { .text($0) }
    }
}
