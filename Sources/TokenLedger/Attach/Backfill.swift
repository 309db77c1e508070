/// Queues the rows of an attached table as registrations, in batches by the table's key.
///
/// Start here: `Withdrawal` undoes it. Each batch is one transaction with the note of how far it has come, so every row is queued exactly
/// once, however often the process is killed.
public struct Backfill: Sendable {
    /// The number of its registration_source.
    public let sourceID: Int64
    /// The schema and name of the table.
    public let table: String
    /// How many rows earlier attempts have queued or refused.
    public let done: Int64
    /// How many rows the table has by PostgreSQL's statistics; nil if it was never analyzed.
    public let estimated: Int64?
    /// Whether it continues an attempt that did not come to its end.
    public let resumes: Bool

    /// What became of the rows of a batch.
    public struct Batch: Equatable, Sendable {
        public var rows: Int64 = 0
        public var queued: Int64 = 0
        /// How many of the queued rows were also queued as stale.
        public var stale: Int64 = 0
        public var refused: Int64 = 0
        public var withoutToken: Int64 = 0
        public var isFinished = false

        public init() {}

        public static func += (total: inout Batch, part: Batch) {
            total.rows += part.rows
            total.queued += part.queued
            total.stale += part.stale
            total.refused += part.refused
            total.withoutToken += part.withoutToken
            total.isFinished = part.isFinished
        }
    }

    /// Rows that were refused for the same kind of error.
    public struct Refusal: Equatable, Sendable {
        /// The error of the first.
        public let error: String
        public let rows: Int64
        /// The keys of up to three rows, quoted.
        public let samples: [String]
    }

    /// The transactions survive a crash of the server: PostgreSQL may have told the caller already how far the backfill has come.
    private static let batch = BatchTransaction(
        lockTimeout: .seconds(5), statementTimeout: .seconds(60), isDurable: true)

    /// Begins, or continues the last attempt.
    ///
    /// The session must be one of the table's owner, because it executes what belongs to the table.
    ///
    /// - Parameter table: The schema and name, as `AttachedTable.name` returns it.
    public init(of table: String, on connection: inout Connection) throws(DatabaseError) {
        self = try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT source_id, name, done, estimated, resumes FROM tokenkeeper.begin_backfill($1::regclass)",
                [.text(table)]
            ).one { row throws(DatabaseError) in
                Backfill(
                    sourceID: try row.read(), table: try row.read(), done: try row.read(), estimated: try row.read(),
                    resumes: try row.read())
            }
        }
    }

    private init(sourceID: Int64, table: String, done: Int64, estimated: Int64?, resumes: Bool) {
        self.sourceID = sourceID
        self.table = table
        self.done = done
        self.estimated = estimated
        self.resumes = resumes
    }

    /// Queues the next rows.
    ///
    /// - Parameter rows: At most this many, 1 to 100,000.
    public func next(_ rows: Int, on connection: inout Connection) throws(DatabaseError) -> Batch {
        try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT rows, queued, stale, refused, without_token, finished FROM tokenkeeper.backfill_next($1, $2)",
                [.int8(sourceID), .int4(Int32(rows))]
            ).one { row throws(DatabaseError) in
                var batch = Batch()
                batch.rows = try row.read()
                batch.queued = try row.read()
                batch.stale = try row.read()
                batch.refused = try row.read()
                batch.withoutToken = try row.read()
                batch.isFinished = try row.read()
                return batch
            }
        }
    }

    /// How many registrations wait in the queue.
    ///
    /// - Parameter most: It counts no further.
    public static func queued(atMost most: Int, on connection: inout Connection) throws(DatabaseError) -> Int {
        try connection.query("SELECT tokenkeeper.queued_registrations($1)", [.int4(Int32(most))]).value()
    }

    /// What it has refused, the most frequent error first.
    public func refusals(on connection: inout Connection) throws(DatabaseError) -> [Refusal] {
        try connection.query(
            "SELECT error, rows, samples FROM tokenkeeper.refused_by($1)", [.int8(sourceID)]
        ).decode { row throws(DatabaseError) in
            Refusal(error: try row.read(), rows: try row.read(), samples: try row.read())
        }
    }
}
