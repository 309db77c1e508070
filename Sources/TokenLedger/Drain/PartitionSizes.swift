/// The size of each partition, and which ones senders may be writing to.
struct PartitionSizes {
    /// By the number of the partition; 0 for a locked one.
    let pages: [Int]
    /// The one that results are queued in now.
    let current: Partition
    /// The one that results were queued in ten seconds ago.
    let before: Partition
    /// How many partitions another session has locked even against reading their size.
    var locked = 0

    /// A smaller partition, in pages, is left until its next turn in the ring: a TRUNCATE costs a flush, reading a few pages costs
    /// nothing.
    static let worthTruncating = 16

    /// Senders may still write to a partition for this many seconds after its time: a transaction may have begun before.
    private static let grace = 10

    func pages(of partition: Partition) -> Int { pages[partition.number] }

    /// Whether senders may write to it, now or within the next two minutes.
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
            SELECT \(Partition.currentInSQL), \(Partition.inSQL(secondsAgo: Self.grace)), current_setting('block_size'),
                   s.bytes
            FROM unnest(tokenkeeper.partition_sizes()) WITH ORDINALITY AS s (bytes, number) ORDER BY s.number
            """)
        func read(_ row: Int, _ column: Int) -> Int? {
            rows.text(row, column).flatMap { Int($0) }
        }
        let blockSize = max(read(0, 2) ?? 0, 1)
        let bytes = Partition.all.indices.map { read($0, 3) }
        self.init(
            pages: bytes.map { ($0 ?? 0) / blockSize }, current: Partition(number: read(0, 0) ?? 0),
            before: Partition(number: read(0, 1) ?? 0), locked: bytes.count { $0 == nil })
    }
}
