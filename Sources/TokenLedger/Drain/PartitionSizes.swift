/// The size of each partition of a queue, and which ones applications may be writing to.
struct PartitionSizes {
    let queue: QueueName
    /// By partition number; 0 for a locked partition.
    let pages: [Int]
    /// The partition in which rows are queued now.
    let current: Partition
    /// The partition in which rows were queued ten seconds ago.
    let before: Partition
    /// How many partitions other sessions have locked so that not even their size can be read.
    var locked = 0

    /// A smaller partition, in pages, is left until its next turn in the ring: a TRUNCATE costs a flush, reading a few pages costs
    /// nothing.
    static let worthTruncating = 16

    /// Applications may still write to a partition for this many seconds after its time: a transaction may have begun before.
    private static let grace = 10

    func pages(of partition: Partition) -> Int { pages[partition.number] }

    /// Whether applications may write to the partition, now or within the next two minutes.
    func isInUse(_ partition: Partition) -> Bool {
        partition == current || partition == before || partition.number == (current.number + 1) % Partition.ringCount
    }

    /// All partitions that have pages, except the current one and the retry partition: the backlog first, then the oldest.
    var othersToVisit: [Partition] {
        let count = Partition.ringCount
        let sealed = (1..<count).map { Partition(queue, (current.number + $0) % count) }
        return ((queue.backlog.map { [$0] } ?? []) + sealed).filter { pages(of: $0) > 0 }
    }
}

extension PartitionSizes {
    /// The sizes of several queues, in their order, in one round trip.
    static func all(
        of queues: [QueueName], on connection: inout Connection, _ transaction: BatchTransaction
    ) throws(DatabaseError) -> [PartitionSizes] {
        let bytes = queues.enumerated().map { index, queue in
            "SELECT \(index) AS queue, s.* FROM unnest(tokenkeeper.partition_sizes('\(queue.rawValue)')) WITH ORDINALITY AS s (bytes, number)"
        }
        let rows = try connection.run(
            """
            \(transaction.settings)
            SELECT \(Partition.currentInSQL), \(Partition.inSQL(secondsAgo: Self.grace)), current_setting('block_size')::integer,
                   s.queue, s.bytes
            FROM (\(bytes.joined(separator: " UNION ALL "))) AS s ORDER BY s.queue, s.number
            """)
        let partitions = try rows.decode { row throws(DatabaseError) in
            (
                current: try row.read(Int.self), before: try row.read(Int.self), blockSize: try row.read(Int.self),
                queue: try row.read(Int.self), bytes: try row.read(Int?.self)
            )
        }
        return try queues.enumerated().map { index, queue throws(DatabaseError) in
            let own = partitions.filter { $0.queue == index }
            guard own.count == queue.partitions.count else {
                throw DatabaseError(
                    .unexpectedRow,
                    "partition_sizes('\(queue.rawValue)') returned \(own.count) sizes, expected \(queue.partitions.count)"
                )
            }
            return PartitionSizes(
                queue: queue, pages: own.map { ($0.bytes ?? 0) / $0.blockSize },
                current: Partition(queue, own[0].current), before: Partition(queue, own[0].before),
                locked: own.count { $0.bytes == nil })
        }
    }
}
