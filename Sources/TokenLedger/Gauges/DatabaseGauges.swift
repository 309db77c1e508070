/// What the metrics say about the database, as of one look. Start here; `TopicGauge` and `DatabaseTotal` have the queries.
///
/// Each gauge is looked up in a transaction of its own, with time limits: one that takes too long, meets a lock or is refused is absent,
/// and no other. The looks read small tables, and what some daemon has counted before, so each daemon can make them for itself.
public struct DatabaseGauges: Sendable {
    /// The value of a gauge for one topic, or for all that share a label.
    public struct Sample: Sendable, Equatable {
        /// `production`, `sandbox`, or `other` for what a sender invented.
        public var environment: String
        /// The topic's name, or `other` for all topics without a label of their own.
        public var topic: String
        /// What the gauge is about besides the topic: see `TopicGauge`. Nil if it is about the topic only.
        public var detail: String?
        /// In the unit of the gauge's name: a number of tokens, a share, or seconds since 1970.
        public var value: Double

        public init(environment: String, topic: String, detail: String? = nil, value: Double) {
            self.environment = environment
            self.topic = topic
            self.detail = detail
            self.value = value
        }
    }

    /// A row of the view `critical_warning`.
    public struct Page: Sendable, Equatable {
        /// One of the words that the view explains, such as `results_wait`.
        public var cause: String
        /// Empty, like `topic`, if it is about the whole database.
        public var environment: String
        /// The whole name, whether it has a label of its own or not.
        public var topic: String
        /// What `status` says.
        public var warning: String

        public init(cause: String, environment: String, topic: String, warning: String) {
            self.cause = cause
            self.environment = environment
            self.topic = topic
            self.warning = warning
        }
    }

    /// How many warnings each search of `StatusCache` has found, by its name. Empty as well if that look failed.
    public private(set) var warnings: [(source: String, count: Int64)] = []

    /// The values by topic, in order. A gauge whose look failed is missing; one without values is empty.
    public private(set) var byTopic: [TopicGauge: [Sample]] = [:]
    /// The values for the whole database. A gauge whose look failed, or that has no value, is missing.
    public private(set) var totals: [DatabaseTotal: Double] = [:]
    /// What somebody has to get up for, as in the view `critical_warning`. Empty as well if that look failed.
    public private(set) var critical: [Page] = []
    /// What a person must fix: the first look that was refused; nil if none was.
    public private(set) var trouble: DatabaseError?

    private let transaction: BatchTransaction

    /// Looks. It takes some milliseconds, and never more than `timeLimit` for each gauge.
    ///
    /// - Parameter timeLimit: How long one look may take.
    /// - Throws: Only if the connection is lost.
    public init(
        _ labels: TopicLabels, timeLimit: Duration = .milliseconds(500), on connection: inout Connection
    ) throws(DatabaseError) {
        transaction = BatchTransaction(
            mode: .snapshot, lockTimeout: .milliseconds(100), statementTimeout: timeLimit)
        try readWarnings(on: &connection)
        let names = labels.names
        for gauge in TopicGauge.allCases {
            byTopic[gauge] = try look(on: &connection) { connection throws(DatabaseError) in
                try connection.query(gauge.query, [.texts(names), .text(TopicLabels.other)]).decode {
                    row throws(DatabaseError) in
                    Sample(
                        environment: try row.read(), topic: try row.read(), detail: try row.read(),
                        value: try row.read())
                }
            }
        }
        for total in DatabaseTotal.allCases {
            totals[total] = try look(on: &connection) { connection throws(DatabaseError) in
                try connection.query("SELECT (\(total.expression))::float8").value(Double?.self)
            }.flatMap { $0 }
        }
    }

    private mutating func readWarnings(on connection: inout Connection) throws(DatabaseError) {
        critical =
            try look(on: &connection) { connection throws(DatabaseError) in
                try connection.query(
                    "SELECT c.cause, c.environment, c.topic, c.warning FROM tokenkeeper.critical_warning AS c"
                ).decode { row throws(DatabaseError) in
                    Page(
                        cause: try row.read(), environment: try row.read(), topic: try row.read(),
                        warning: try row.read())
                }
            } ?? []
        warnings =
            try look(on: &connection) { connection throws(DatabaseError) in
                try connection.query(
                    """
                    SELECT c.source, coalesce(cardinality(c.words), 0)::bigint FROM tokenkeeper.status_cache AS c
                    WHERE c.rows IS NULL AND c.as_of > clock_timestamp() - interval '10 minutes' ORDER BY c.source
                    """
                ).decode { row throws(DatabaseError) in (source: try row.read(), count: try row.read()) }
            } ?? []
    }

    private mutating func look<Value>(
        on connection: inout Connection,
        _ work: (inout Connection) throws(DatabaseError) -> Value
    ) throws(DatabaseError) -> Value? {
        try connection.attempt(noting: &trouble) { connection throws(DatabaseError) in
            try connection.transaction(transaction, work)
        }
    }
}
