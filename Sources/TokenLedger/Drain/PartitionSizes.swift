/// The size of each partition, and which ones senders may be writing to.
struct PartitionSizes {
    /// By partition number; 0 for a locked partition.
    let pages: [Int]
    /// The partition in which results are queued now.
    let current: Partition
    /// The partition in which results were queued ten seconds ago.
    let before: Partition
    /// How many partitions other sessions have locked so that not even their size can be read.
    var locked = 0

    /// A smaller partition, in pages, is left until its next turn in the ring: a TRUNCATE costs a flush, reading a few pages costs
    /// nothing.
    static let worthTruncating = 16

    /// Senders may still write to a partition for this many seconds after its time: a transaction may have begun before.
    private static let grace = 10

    func pages(of partition: Partition) -> Int { pages[partition.number] }

    /// Whether senders may write to the partition, now or within the next two minutes.
    func isInUse(_ partition: Partition) -> Bool {
        partition == current || partition == before || partition.number == (current.number + 1) % Partition.ring.count
    }

    /// All partitions that have pages, except the current one and the retry partition: the backlog first, then the oldest.
    var othersToVisit: [Partition] {
        let count = Partition.ring.count
        let sealed = (1..<count).map { Partition(number: (current.number + $0) % count) }
        return ([.backlog] + sealed).filter { pages(of: $0) > 0 }
    }
}

extension PartitionSizes {
    init(on connection: inout Connection, _ transaction: BatchTransaction) throws(DatabaseError) {
        let rows = try connection.run(
            """
            \(transaction.settings)
            SELECT \(Partition.currentInSQL), \(Partition.inSQL(secondsAgo: Self.grace)), current_setting('block_size')::integer,
                   s.bytes
            FROM unnest(tokenkeeper.partition_sizes()) WITH ORDINALITY AS s (bytes, number) ORDER BY s.number
            """)
        let partitions = try rows.decode { row throws(DatabaseError) in
            (
                current: try row.read(Int.self), before: try row.read(Int.self), blockSize: try row.read(Int.self),
                bytes: try row.read(Int?.self)
            )
        }
        guard partitions.count == Partition.all.count else {
            throw DatabaseError(
                .unexpectedRow, "partition_sizes() returned \(partitions.count) sizes, expected \(Partition.all.count)")
        }
        self.init(
            pages: partitions.map { ($0.bytes ?? 0) / $0.blockSize },
            current: Partition(number: partitions[0].current), before: Partition(number: partitions[0].before),
            locked: partitions.count { $0.bytes == nil })
    }
}
