/// What is particular to a queue: the columns of its rows, and what becomes of the rows that a batch takes.
///
/// `ResultQueue` and `RegistrationQueue`, in `Record/`, are the two. Everything else in this folder is the same for both, and knows a queue only by this
/// protocol. Each method works in the transaction of a batch, which has its locks already.
protocol Queue: Sendable {
    var name: QueueName { get }

    /// The columns that a row keeps, wherever it moves. The queue has two more, `released` and `partition_number`.
    var columns: String { get }

    /// The table that keeps rejected rows. It has the same columns, and `rejected_id`, `rejected_at` and `error`.
    var rejectedTable: String { get }

    /// An SQL expression: the bytes of text in a row, as a bigint, computed without fetching what is stored out of line.
    var length: String { get }

    /// An SQL expression: what is wrong with a row that is too long, and what was expected; null if it is not.
    var sizeFault: String { get }

    /// An SQL condition: the row is large. It waits in the retry partition for its turn alone, so that memory stays bounded.
    var isBulky: String { get }

    /// Columns and values of a row of ours that changes the ledger, to see whether PostgreSQL takes any.
    var sampleColumns: String { get }
    var sample: String { get }

    /// Takes rows off the queue and records what they say.
    func record(
        _ rows: RowRange, of partition: Partition, _ terms: BatchTerms, on connection: inout Connection
    ) throws(DatabaseError) -> BatchOutcome

    /// Moves rows to the retry partition without reading them.
    ///
    /// - Returns: What was done; nil if there were no rows.
    func setAside(
        _ rows: RowRange, of partition: Partition, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord?

    /// Moves one row that is too long to the table of rejected rows without reading it, or only counts it. Only the beginning of each text is kept.
    ///
    /// - Parameter isKept: False to only count it. A row that an operator has requeued is kept even then.
    /// - Returns: What was done; nil if the row was gone.
    func reject(
        _ row: RowRange, of partition: Partition, error: String, isKept: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord?
}

extension Queue {
    /// Columns for a SELECT: of these texts the beginning, which PostgreSQL reads without the rest.
    static func cut(_ texts: [String]) -> [String] { texts.map { "left(\($0), 1024) AS \($0)" } }

    /// An SQL expression: how many bytes these texts have together. A bigint from the beginning: three texts may have more than 2^31.
    static func bytes(of texts: [String]) -> String {
        (["0::bigint"] + texts.map { "coalesce(octet_length(\($0)), 0)" }).joined(separator: " + ")
    }
}

/// What a batch has to observe.
struct BatchTerms {
    var guardLimits: GuardLimits
    let rejectedAllowance: RejectedAllowance
}

/// How a batch has ended.
enum BatchOutcome {
    /// There were no rows: roll back.
    case empty
    /// All rows come from the retry partition and still have to wait there, because of the locks of applications: roll back.
    case allWait
    /// Commit.
    case done(BatchRecord)
}

/// What a batch has done, once it is committed.
struct BatchRecord {
    var pass = Drain.Pass()
    /// Guards that have tripped or reset.
    var transitions: [GuardTransition] = []
    /// The results that were counted in `result_count`.
    var counts: [ResultCount] = []
}
