/// A partition of a queue: one of the ring, chosen by the clock when a row is queued; the retry partition; or the backlog.
struct Partition: Hashable, Sendable {
    let queue: QueueName
    let number: Int

    init(_ queue: QueueName, _ number: Int) {
        self.queue = queue
        self.number = number
    }

    /// The number of partitions that applications write to, in turn.
    static let ringCount = 8

    /// How many pages a batch takes at most: about 2,400 410s, 3,300 200s or 3,500 registrations, and never more than half a megabyte.
    static let pagesPerRange = 64

    var isRetry: Bool { self == queue.retry }
    var isBacklog: Bool { self == queue.backlog }

    var table: String {
        switch self {
        case queue.retry: "\(queue.table)_retry"
        case queue.backlog: "\(queue.table)_backlog"
        default: "\(queue.table)_\(number)"
        }
    }

    /// The number of the partition in which rows are queued now; the default of `partition_number` in both queues.
    static let currentInSQL = inSQL(secondsAgo: 0)

    /// The number of the partition in which rows were queued this many seconds ago.
    static func inSQL(secondsAgo: Int) -> String {
        "((date_part('epoch', clock_timestamp())::bigint - \(secondsAgo) >> 7) & 7)"
    }

    /// An INSERT that copies rows of the queue to this partition, unchanged, and returns a row for each.
    ///
    /// - Parameters:
    ///   - columns: Those of `Queue.columns`.
    ///   - rows: A relation, with or without a WHERE clause.
    func insert(_ columns: String, from rows: String) -> String {
        """
        INSERT INTO \(table) (\(columns), released, partition_number)
        SELECT \(columns), released, \(number) FROM \(rows)
        RETURNING 1
        """
    }
}
