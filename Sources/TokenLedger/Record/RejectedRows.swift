/// The rows of a queue that could not be understood: an operator lists, requeues or discards them.
public struct RejectedRows: Sendable {
    private let table: String
    private let requeue: String

    public init(_ queue: QueueName) {
        switch queue {
        case .results: (table, requeue) = ("tokenkeeper.rejected_result", "tokenkeeper.requeue_rejected_results")
        case .registrations:
            (table, requeue) = ("tokenkeeper.rejected_registration", "tokenkeeper.requeue_rejected_registrations")
        }
    }

    /// Rows that were rejected for the same kind of error.
    public struct Group: Sendable {
        /// The error, with `*` for the parts that differ from row to row.
        public let error: String
        public let rows: Int64
        /// When the first and the last result were rejected, in UTC.
        public let first: String
        public let last: String
        /// How often the most frequently requeued row was requeued.
        public let attempts: Int64
        /// Up to five `rejected_id` values, the latest first.
        public let samples: String
        /// The latest row's `rejected_id`, and its error as it is.
        public let latest: String
    }

    /// Which rows to requeue or discard.
    public enum Choice: Sendable {
        case all
        case ids([Int64])
        /// Rows whose error, as `list` shows it, begins with this text.
        case error(String)
    }

    /// An error without the parts that differ from row to row: quoted text and numbers.
    private static let kind = "regexp_replace(r.error, '''[^'']*''|[0-9]+', '*', 'g')"

    /// All rejected rows by kind of error, the most frequent first.
    public func groups(on connection: inout Connection) throws(DatabaseError) -> [Group] {
        let rows = try connection.query(
            """
            SELECT g.kind, g.rows, \(inUTC("g.first")), \(inUTC("g.last")), g.attempts,
                   array_to_string(ARRAY(SELECT r.rejected_id FROM \(table) AS r WHERE \(Self.kind) = g.kind
                                         ORDER BY r.rejected_id DESC LIMIT 5), ' '),
                   (SELECT r.rejected_id || ': ' || r.error FROM \(table) AS r WHERE r.rejected_id = g.latest)
            FROM (SELECT \(Self.kind) AS kind, count(*) AS rows, min(r.rejected_at) AS first, max(r.rejected_at) AS last,
                         max(coalesce(r.attempts, 0)) AS attempts, max(r.rejected_id) AS latest
                  FROM \(table) AS r GROUP BY 1) AS g
            ORDER BY g.rows DESC, g.kind
            """)
        return try rows.decode { row throws(DatabaseError) in
            Group(
                error: try row.read(), rows: try row.read(), first: try row.read(), last: try row.read(),
                attempts: try row.read(), samples: try row.read(), latest: try row.read())
        }
    }

    /// Puts rows back into the queue, with their original `queued_at`.
    ///
    /// - Returns: How many.
    public func requeue(_ choice: Choice, on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try apply("SELECT \(requeue)(ARRAY(\(ids(choice))))", choice, on: &connection)
    }

    /// Deletes rows.
    ///
    /// - Returns: How many.
    public func discard(_ choice: Choice, on connection: inout Connection) throws(DatabaseError) -> Int64 {
        try apply(
            """
            WITH gone AS (DELETE FROM \(table) WHERE rejected_id IN (\(ids(choice))) RETURNING 1)
            SELECT count(*) FROM gone
            """, choice, on: &connection)
    }

    private func ids(_ choice: Choice) -> String {
        let all = "SELECT r.rejected_id FROM \(table) AS r"
        return switch choice {
        case .all: all
        case .ids: "\(all) WHERE r.rejected_id = ANY ($1)"
        case .error: "\(all) WHERE starts_with(\(Self.kind), $1) OR starts_with(r.error, $1)"
        }
    }

    private func apply(
        _ statement: String, _ choice: Choice, on connection: inout Connection
    ) throws(DatabaseError) -> Int64 {
        let parameters: [Parameter] =
            switch choice {
            case .all: []
            case .ids(let ids): [.int8s(ids)]
            case .error(let text): [.text(text)]
            }
        return try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(statement, parameters).value()
        }
    }
}
