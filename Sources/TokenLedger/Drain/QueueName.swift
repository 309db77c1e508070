/// The queues that the daemon drains: two tables, which applications insert into and which are partitioned in the same way.
///
/// The raw value is the table's name. It is also how functions of the schema, such as `lock_batch`, call the queue.
public enum QueueName: String, Hashable, Sendable, CaseIterable {
    /// Responses of APNs.
    case results = "send_result"
    /// Registrations and logouts.
    case registrations = "registration"

    /// Its table.
    var table: String { "tokenkeeper.\(rawValue)" }

    /// The partitions that applications write to, in turn.
    var ring: [Partition] { (0..<Partition.ringCount).map { Partition(self, $0) } }

    /// Rows that wait for a retry.
    var retry: Partition { Partition(self, 8) }

    /// Rows that bulk reads moved out of sealed partitions, for batches to record. Nil if the queue is never read in bulk: that pays off
    /// only for rows that are merely counted.
    var backlog: Partition? { self == .results ? Partition(self, 9) : nil }

    /// All partitions, in the order of their numbers.
    var partitions: [Partition] { ring + [retry] + (backlog.map { [$0] } ?? []) }
}
