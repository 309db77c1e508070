internal import TokenModel

/// Compares an attached table with the ledger, in both directions and in batches; a reconciliation also queues what is missing.
///
/// The rules are in `migrations/functions/35_compare.sql`.
public struct Comparison: Sendable {
    /// The schema and name of the table.
    public let table: String
    private let attachment: Int64
    /// The source of the reconciliation; nil if nothing is to be repaired.
    public let repairs: Int64?
    /// Where the next batch begins; nil before the first, and at the end.
    private var position: String?
    private var counts = "{}"
    private var samples = "{}"
    /// How many rows of the table and tokens of the ledger were compared.
    public private(set) var compared: Int64 = 0

    /// Rows or tokens of one kind.
    public struct Finding: Equatable, Sendable {
        /// `missing`, for example; see the how-to.
        public let kind: String
        public let number: Int64
        /// Whether a reconciliation repairs it.
        public let isDifference: Bool
        /// Up to five.
        public let samples: [String]
    }

    /// A person waits for it, or the daemon has a second for it.
    private static let batch = BatchTransaction(lockTimeout: .seconds(2), statementTimeout: .seconds(60))

    /// - Parameters:
    ///   - table: The schema and name, as `AttachedTable.name` returns it.
    ///   - isRepaired: Whether to queue what is missing.
    public init(of table: String, isRepaired: Bool, on connection: inout Connection) throws(DatabaseError) {
        (attachment, self.table, repairs) = try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT a.source_id, a.name, CASE WHEN $2 THEN tokenkeeper.begin_source('reconciliation', a.name) END
                FROM tokenkeeper.attachment AS a
                -- The daemon may have no right to use the schema, which a look-up of the table needs.
                WHERE a.source_id = coalesce(
                    (SELECT n.source_id FROM tokenkeeper.attachment AS n WHERE n.name = $1),
                    -- Not as $1::regclass, which the planner would evaluate.
                    (SELECT tokenkeeper.attachment_of(t.name::regclass) FROM (SELECT $1::text AS name OFFSET 0) AS t))
                """, [.text(table), .bool(isRepaired)]
            ).one { row throws(DatabaseError) in (try row.read(), try row.read(), try row.read()) }
        }
    }

    /// Compares the next batch, in a transaction of its own.
    ///
    /// - Returns: Whether it was the last.
    public mutating func next(_ rows: Int, on connection: inout Connection) throws(DatabaseError) -> Bool {
        let state = self
        (position, counts, samples, compared) = try connection.transaction(Self.batch) {
            connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT n.next_position, s.counts::text, (n.samples || $6::jsonb)::text,
                       (coalesce((s.counts ->> 'rows')::bigint, 0) + coalesce((s.counts ->> 'tokens')::bigint, 0))
                FROM tokenkeeper.compare_next($1, $2, $3, $4) AS n
                CROSS JOIN LATERAL tokenkeeper.add_counts($5::jsonb, n.counts) AS s (counts)
                """,
                [
                    .int8(state.attachment), .text(state.position), .int4(Int32(rows)), .int8(state.repairs),
                    .text(state.counts), .text(state.samples),
                ]
            ).one { row throws(DatabaseError) in
                (try row.read(), try row.read(), try row.read(), try row.read())
            }
        }
        if position != nil { return false }
        let found = counts
        try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            _ = try connection.query(
                "SELECT tokenkeeper.finish_comparison($1, $2::jsonb)", [.int8(state.attachment), .text(found)])
        }
        return true
    }

    private static let findings = """
        SELECT f.finding, f.number, f.is_difference, f.examples AS samples
        FROM tokenkeeper.comparison_findings($1, $2::jsonb, $3::jsonb) AS f
        """

    /// What was found so far, the differences first.
    public func findings(on connection: inout Connection) throws(DatabaseError) -> [Finding] {
        try connection.query(Self.findings, [.int8(attachment), .text(counts), .text(samples)]).decode {
            row throws(DatabaseError) in
            Finding(
                kind: try row.read(), number: try row.read(), isDifference: try row.read(), samples: try row.read())
        }
    }

    /// The same as a JSON array.
    public func json(on connection: inout Connection) throws(DatabaseError) -> String {
        try connection.query(
            "SELECT coalesce(jsonb_agg(to_jsonb(f)), '[]')::text FROM (\(Self.findings)) AS f",
            [.int8(attachment), .text(counts), .text(samples)]
        ).value()
    }

    /// Notes that a batch ran into `statement_timeout`: from the third time on the table shows as broken, and is due more rarely.
    public func noteTimeout(on connection: inout Connection) throws(DatabaseError) {
        try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            _ = try connection.query(
                "SELECT tokenkeeper.note_attachment_timeout($1, 'compare')", [.int8(attachment)])
        }
    }

    /// The attached tables that no daemon has compared for this long, and that none is comparing now. After timeouts, a table is due after
    /// twice as many hours each time, up to a day.
    public static func due(
        every interval: Duration, on connection: inout Connection
    ) throws(DatabaseError) -> [String] {
        try connection.query(
            """
            SELECT a.name FROM tokenkeeper.attachment AS a
            WHERE coalesce(a.compared_at, a.attached_at) < clock_timestamp() - $1 * interval '1 microsecond'
              AND NOT EXISTS (
                SELECT FROM tokenkeeper.registration_source AS s
                WHERE s.kind = 'reconciliation' AND s.name = a.name AND s.finished_at IS NULL AND s.started_at > clock_timestamp() - interval '1 hour')
              AND NOT EXISTS (
                SELECT FROM tokenkeeper.attachment_timeout AS t
                WHERE t.source_id = a.source_id AND t.kind = 'compare'
                  AND t.last_at > clock_timestamp() - least(power(2, t.timeouts - 1), 24) * interval '1 hour')
            ORDER BY a.compared_at NULLS FIRST, a.name
            """, [.int8(interval.microseconds)]
        ).values()
    }
}
