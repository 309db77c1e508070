/// Undoes a backfill or an import: removes what it has made and nothing has touched since.
public struct Withdrawal: Sendable {
    public let sourceID: Int64
    /// Whether it only counts.
    public let isDryRun: Bool
    /// Where the next batch begins.
    private var after: Int64 = 0

    /// How many events of the source one transaction looks at. It takes some hundred milliseconds, and locks no more tokens than that.
    private static let events: Int32 = 1000

    /// What a batch has done.
    public struct Batch: Equatable, Sendable {
        public var withdrawn: Int64 = 0
        public var kept: Int64 = 0
        /// Registrations of the source that no daemon has drained yet; 10,000 for more. Nothing is removed before it is 0.
        public var queued: Int64 = 0
        public var isFinished = false

        public init() {}
    }

    /// Tokens that are kept for the same reason.
    public struct Kept: Equatable, Sendable {
        public let reason: String
        public let tokens: Int64
    }

    /// A backfill or an import.
    public struct Source: Equatable, Sendable {
        public let sourceID: Int64
        public let kind: String
        public let name: String
        /// In UTC.
        public let startedAt: String
        /// `finished`, `withdrawn` or `unfinished`.
        public let state: String
        public let queued: Int64
        public let refused: Int64
    }

    public init(of sourceID: Int64, isDryRun: Bool) {
        self.sourceID = sourceID
        self.isDryRun = isDryRun
    }

    /// Does the next batch, in a transaction of its own. The caller waits and repeats while something is queued.
    public mutating func next(on connection: inout Connection) throws(DatabaseError) -> Batch {
        let (batch, reached) = try connection.transaction(.command) { [self] connection throws(DatabaseError) in
            try connection.query(
                "SELECT withdrawn, kept, queued, reached FROM tokenkeeper.withdraw($1, $2, $3, $4)",
                [.int8(sourceID), .bool(isDryRun), .int8(after), .int4(Self.events)]
            ).one { row throws(DatabaseError) in
                var batch = Batch()
                batch.withdrawn = try row.read()
                batch.kept = try row.read()
                batch.queued = try row.read()
                let reached = try row.read(Int64?.self)
                batch.isFinished = reached == nil
                return (batch, reached)
            }
        }
        after = reached ?? after
        return batch
    }

    /// Why tokens of the source are kept, the most frequent reason first.
    public func kept(on connection: inout Connection) throws(DatabaseError) -> [Kept] {
        try connection.transaction(.command) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT m.kept_because, count(*) FROM tokenkeeper.made_by($1) AS m WHERE m.kept_because IS NOT NULL
                GROUP BY 1 ORDER BY 2 DESC, 1
                """, [.int8(sourceID)]
            ).decode { row throws(DatabaseError) in Kept(reason: try row.read(), tokens: try row.read()) }
        }
    }

    /// The latest sources that can be withdrawn, the latest first; at most 20.
    public static func sources(on connection: inout Connection) throws(DatabaseError) -> [Source] {
        try connection.query(
            """
            SELECT s.source_id, s.kind, s.name, \(inUTC("s.started_at")),
                   CASE WHEN s.withdrawn_at IS NOT NULL THEN 'withdrawn' WHEN s.finished_at IS NOT NULL THEN 'finished' ELSE 'unfinished' END,
                   s.queued, s.refused
            FROM tokenkeeper.registration_source AS s WHERE s.kind IN ('backfill', 'import') ORDER BY s.source_id DESC LIMIT 20
            """
        ).decode { row throws(DatabaseError) in
            Source(
                sourceID: try row.read(), kind: try row.read(), name: try row.read(), startedAt: try row.read(),
                state: try row.read(), queued: try row.read(), refused: try row.read())
        }
    }
}
