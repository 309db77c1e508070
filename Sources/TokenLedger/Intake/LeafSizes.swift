/// How large each leaf is, empty or not, and which one is written to at the moment.
struct LeafSizes {
    private let pages: [Int]
    let current: Int

    /// A leaf of fewer pages is left to its next lap: a TRUNCATE costs a flush, reading these costs nothing.
    static let worthTruncating = 16

    init(on connection: inout Connection, _ transaction: BatchTransaction) throws(DatabaseError) {
        let leaves = Leaf.ring + [.aside]
        func select(_ leaves: [Leaf]) -> String {
            """
            \(transaction.settings)
            SELECT \(Leaf.currentInSQL), current_setting('block_size'),
                   \(leaves.map { "pg_relation_size('\($0.table)')" }.joined(separator: ", "))
            """
        }
        func read(_ rows: borrowing Rows, _ column: Int) -> Int {
            rows.text(0, column).flatMap { Int($0) } ?? 0
        }
        do {
            let rows = try connection.run(select(leaves))
            let blockSize = max(read(rows, 1), 1)
            current = read(rows, 0)
            pages = leaves.indices.map { read(rows, $0 + 2) / blockSize }
        } catch let error where error.remedy == .retry {
            // Somebody has locked a leaf, even against looking at its size: do without that one.
            var pages: [Int] = []
            var current = 0
            for leaf in leaves {
                do {
                    let rows = try connection.run(select([leaf]))
                    current = read(rows, 0)
                    pages.append(read(rows, 2) / max(read(rows, 1), 1))
                } catch let error where error.remedy == .retry {
                    pages.append(0)
                }
            }
            self.current = current
            self.pages = pages
        }
    }

    func pages(of leaf: Leaf) -> Int { pages[leaf.number] }

    /// All leaves that have pages: the current one first, for freshness, then the oldest.
    var leavesToVisit: [Leaf] {
        let count = Leaf.ring.count
        let order = [current] + (1..<count).map { (current + $0) % count }
        return (order.map(Leaf.init(number:)) + [.aside]).filter { pages(of: $0) > 0 }
    }
}
