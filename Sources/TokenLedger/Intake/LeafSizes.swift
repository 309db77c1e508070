/// How large each leaf is, empty or not, and which ones may be written to at the moment.
struct LeafSizes {
    /// By the number of the leaf.
    let pages: [Int]
    /// The one of this moment.
    let current: Leaf
    /// The one of ten seconds ago.
    let before: Leaf
    /// How many are locked by somebody, even against looking at their size. They count as empty.
    var locked = 0

    /// A leaf of fewer pages is left to its next lap: a TRUNCATE costs a flush, reading these costs nothing.
    static let worthTruncating = 16

    /// So long after its time a leaf may still be written to, by a sender that was on its way there.
    private static let grace = 10

    func pages(of leaf: Leaf) -> Int { pages[leaf.number] }

    /// Whether senders may be at it, now or in the next two minutes.
    func isInUse(_ leaf: Leaf) -> Bool {
        leaf == current || leaf == before || leaf.number == (current.number + 1) % Leaf.ring.count
    }

    /// All leaves that have pages, but for the current one and that of those set aside: what was taken out of past ones first, then
    /// the oldest.
    var othersToVisit: [Leaf] {
        let count = Leaf.ring.count
        let past = (1..<count).map { Leaf(number: (current.number + $0) % count) }
        return ([.backlog] + past).filter { pages(of: $0) > 0 }
    }
}

extension LeafSizes {
    init(on connection: inout Connection, _ transaction: BatchTransaction) throws(DatabaseError) {
        let rows = try connection.run(
            """
            \(transaction.settings)
            SELECT \(Leaf.currentInSQL), \(Leaf.inSQL(secondsAgo: Self.grace)), current_setting('block_size'),
                   s.bytes
            FROM unnest(tokenkeeper.partition_sizes()) WITH ORDINALITY AS s (bytes, number) ORDER BY s.number
            """)
        func read(_ row: Int, _ column: Int) -> Int? {
            rows.text(row, column).flatMap { Int($0) }
        }
        let blockSize = max(read(0, 2) ?? 0, 1)
        let bytes = Leaf.all.indices.map { read($0, 3) }
        self.init(
            pages: bytes.map { ($0 ?? 0) / blockSize }, current: Leaf(number: read(0, 0) ?? 0),
            before: Leaf(number: read(0, 1) ?? 0), locked: bytes.count { $0 == nil })
    }
}
