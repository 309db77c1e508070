/// How large each partition is, empty or not, and which ones may be written to at the moment.
struct PartitionSizes {
    /// By the number of the partition.
    let pages: [Int]
    /// The one of this moment.
    let current: Partition
    /// The one of ten seconds ago.
    let before: Partition
    /// How many are locked by somebody, even against looking at their size. They count as empty.
    var locked = 0

    /// A leaf of fewer pages is left to its next lap: a TRUNCATE costs a flush, reading these costs nothing.
    static let worthTruncating = 16

    /// So long after its time a partition may still be written to, by a sender that was on its way there.
    private static let grace = 10

    func pages(of partition: Partition) -> Int { pages[partition.number] }

    /// Whether senders may be at it, now or in the next two minutes.
    func isInUse(_ partition: Partition) -> Bool {
        partition == current || partition == before || partition.number == (current.number + 1) % Partition.ring.count
    }

    /// All leaves that have pages, but for the current one and that of those left for a retry: what was taken out of past ones first, then
    /// the oldest.
    var othersToVisit: [Partition] {
        let count = Partition.ring.count
        let past = (1..<count).map { Partition(number: (current.number + $0) % count) }
        return ([.backlog] + past).filter { pages(of: $0) > 0 }
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
