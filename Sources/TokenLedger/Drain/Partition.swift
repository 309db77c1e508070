/// A partition of the queue: one of the ring, chosen by the clock when a result is queued; the retry partition; or the backlog.
struct Partition: Hashable, Sendable {
    let number: Int

    /// The partitions that senders write to, in turn.
    static let ring = (0..<8).map(Partition.init(number:))
    /// Results that wait for a retry.
    static let retry = Partition(number: 8)
    /// Results that bulk reads moved out of sealed partitions, for batches to record.
    static let backlog = Partition(number: 9)

    static let all = ring + [retry, backlog]

    /// How many pages a batch takes: about 2,400 410s or 3,300 200s, and never more than half a megabyte.
    static let pagesPerRange = 64

    var table: String {
        switch self {
        case .retry: "tokenkeeper.send_result_retry"
        case .backlog: "tokenkeeper.send_result_backlog"
        default: "tokenkeeper.send_result_\(number)"
        }
    }

    /// The partition in which results are queued now; the default of `send_result.partition_number`.
    static let currentInSQL = inSQL(secondsAgo: 0)

    /// The partition in which results were queued this many seconds ago.
    static func inSQL(secondsAgo: Int) -> String {
        "((date_part('epoch', clock_timestamp())::bigint - \(secondsAgo) >> 7) & 7)"
    }
}
