/// A topic, and what an operator has decided about it.
public struct TopicPolicy: Sendable {
    public let environment: String
    public let topic: String
    /// `enforce` or `observe`.
    public let gate: String
    /// How many requests a second may be sent; nil: any number.
    public let maxPerSecond: Int64?
    /// Why sending is paused; nil if it is not.
    public let paused: String?

    /// All topics, in order.
    public static func all(on connection: inout Connection) throws(DatabaseError) -> [TopicPolicy] {
        try connection.query(
            """
            SELECT t.environment, t.topic, coalesce(t.gate, 'enforce'), t.max_per_second::bigint, p.reason
            FROM tokenkeeper.topic_policy AS t LEFT JOIN tokenkeeper.paused_topic AS p USING (environment, topic)
            ORDER BY t.topic, t.environment
            """
        ).decode { row throws(DatabaseError) in
            TopicPolicy(
                environment: try row.read(), topic: try row.read(), gate: try row.read(), maxPerSecond: try row.read(),
                paused: try row.read())
        }
    }

    /// What an operator decides.
    public enum Change: Sendable {
        /// The gate withholds nothing.
        case observe
        case enforce
        /// - Parameter perSecond: 1 or more; nil: any number of requests.
        case rate(perSecond: Int32?)

        /// - Parameter isNew: Whether the topic may be one that the database does not know yet.
        /// - Throws: 22023 for an unknown topic, with the one that it resembles.
        public func apply(
            to topic: String, environment: String, isNew: Bool = false, on connection: inout Connection
        ) throws(DatabaseError) {
            let (column, value): (String, Parameter) =
                switch self {
                case .observe: ("gate", .text("observe"))
                case .enforce: ("gate", .text("enforce"))
                case .rate(let perSecond): ("max_per_second", .int8(perSecond.map(Int64.init)))
                }
            let name: [Parameter] = [.text(topic), .text(environment)]
            if isNew {
                _ = try connection.query(
                    """
                    INSERT INTO tokenkeeper.topic_policy (topic, environment, \(column)) VALUES ($1, $2, $3)
                    ON CONFLICT (environment, topic) DO UPDATE SET \(column) = excluded.\(column)
                    """, name + [value])
                return
            }
            let known = try connection.query(
                "UPDATE tokenkeeper.topic_policy SET \(column) = $3 WHERE topic = $1 AND environment = $2 RETURNING true",
                name + [value]
            ).decode { row throws(DatabaseError) in try row.read(Bool.self) }
            if known.isEmpty {
                let nearest = try connection.query("SELECT tokenkeeper.resembled_topic($1, $2)", name)
                    .value(String?.self)
                throw DatabaseError(
                    reported: "22023", "the topic is not known in \(environment)", detail: nil,
                    hint: nearest.map { "Did you mean \($0)?" } ?? "`tokenkeeperd topic list` has the known topics.")
            }
        }
    }
}
