/// Finds the tokens of a topic that an expression of tags matches.
public struct TaggedTokens: Sendable {
    public struct Token: Sendable {
        /// Whole, in hex.
        public var token: String
        /// As in the view `token`.
        public var state: String
        /// Separated by commas.
        public var tags: String
        /// The row as a JSON object.
        var json: String
    }

    /// The first tokens of a topic.
    public struct Answer: Sendable {
        public var tokens: [Token]
        public var hasMore: Bool

        /// One JSON array.
        public var json: String { "[" + tokens.map(\.json).joined(separator: ",") + "]" }
    }

    /// As `tag_query` understands it.
    public var expression: String
    public var topic: String
    /// `production` or `sandbox`.
    public var environment: String

    public init(_ expression: String, topic: String, environment: String) {
        self.expression = expression
        self.topic = topic
        self.environment = environment
    }

    /// How many tokens are listed.
    public static let most = 100

    /// The first tokens, in their order, and whether there are more. Writes nothing and works on a standby.
    ///
    /// - Throws: If the expression is invalid (22023), the statement takes longer than 30 seconds (57014), or the role lacks the rights of
    ///   `tokenkeeper_reader` (42501).
    public func answer(on connection: inout Connection) throws(DatabaseError) -> Answer {
        let transaction = BatchTransaction(
            mode: .snapshot, lockTimeout: .seconds(5), statementTimeout: .seconds(30), isInUTC: true)
        let found = try connection.transaction(transaction, settings: "SET LOCAL jit = off") {
            connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT t.token, t.state, coalesce(array_to_string(t.tags, ', '), ''), row_to_json(t)::text
                FROM tokenkeeper.tagged_tokens($1, $2, $3, $4) AS t
                """,
                [.text(expression), .text(topic), .text(environment), .int4(Int32(Self.most + 1))]
            ).decode { row throws(DatabaseError) in
                Token(token: try row.read(), state: try row.read(), tags: try row.read(), json: try row.read())
            }
        }
        return Answer(tokens: Array(found.prefix(Self.most)), hasMore: found.count > Self.most)
    }
}
