/// Queues the rows of an attached table as registrations, in batches by the table's key.
///
/// Start here: `Withdrawal` undoes it. Each batch is one transaction with the note of how far it has come, so every row is queued exactly
/// once, however often the process is killed.
public struct Backfill: Sendable {
    /// The number of its registration_source.
    public let sourceID: Int64
    /// The name of the attachment.
    public let name: String
    /// How many rows earlier attempts have queued.
    public let done: Int64
    /// How many rows the table has by PostgreSQL's statistics; nil if it was never analyzed.
    public let estimated: Int64?
    /// Whether it continues an attempt that did not come to its end.
    public let resumes: Bool

    /// What became of the rows of a batch.
    public struct Batch: Equatable, Sendable {
        public var rows: Int64 = 0
        public var queued: Int64 = 0
        /// How many of the queued rows are logouts.
        public var logouts: Int64 = 0
        /// How many of the queued rows have a token that cannot be read. The daemon rejects them.
        public var unreadable: Int64 = 0
        /// For how many rows an expression fails. They are passed over.
        public var failed: Int64 = 0
        public var isFinished = false

        public init() {}

        public static func += (total: inout Batch, part: Batch) {
            total.rows += part.rows
            total.queued += part.queued
            total.logouts += part.logouts
            total.unreadable += part.unreadable
            total.failed += part.failed
            total.isFinished = part.isFinished
        }
    }

    /// The transactions survive a crash of the server: PostgreSQL may have told the caller already how far the backfill has come.
    private static let batch = BatchTransaction(
        lockTimeout: .seconds(5), statementTimeout: .seconds(60), isDurable: true)

    /// Begins, or continues the last attempt.
    ///
    /// The session must be one of the table's owner, because it executes what belongs to the table.
    ///
    /// - Parameter name: That of the attachment, or of its table.
    public init(of name: String, on connection: inout Connection) throws(DatabaseError) {
        self = try connection.transaction(Self.batch) { connection throws(DatabaseError) in
            try connection.query(
                "SELECT source_id, name, done, estimated, resumes FROM tokenkeeper.begin_backfill($1)",
                [.text(name)]
            ).one { row throws(DatabaseError) in
                Backfill(
                    sourceID: try row.read(), name: try row.read(), done: try row.read(), estimated: try row.read(),
                    resumes: try row.read())
            }
        }
    }

    private init(sourceID: Int64, name: String, done: Int64, estimated: Int64?, resumes: Bool) {
        self.sourceID = sourceID
        self.name = name
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
                "SELECT rows, queued, logouts, unreadable, failed, finished FROM tokenkeeper.backfill_next($1, $2)",
                [.int8(sourceID), .int4(Int32(rows))]
            ).one { row throws(DatabaseError) in
                var batch = Batch()
                batch.rows = try row.read()
                batch.queued = try row.read()
                batch.logouts = try row.read()
                batch.unreadable = try row.read()
                batch.failed = try row.read()
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
}
