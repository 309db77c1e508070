/// How large each leaf is, empty or not, and which ones may be written to at the moment.
struct LeafSizes {
    /// By the number of the leaf.
    let pages: [Int]
    /// The one of this moment.
    let current: Leaf
    /// The one of ten seconds ago.
    let before: Leaf

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
        func select(_ leaves: [Leaf]) -> String {
            // One that another daemon reads whole is not looked at: even its size is behind its lock.
            let sizes = leaves.map { leaf in
                """
                CASE WHEN pg_try_advisory_xact_lock_shared(\(Advisory.lockClass), \(Advisory.leaf(leaf)))
                THEN pg_relation_size('\(leaf.table)') ELSE 0 END
                """
            }
            return """
                \(transaction.settings)
                SELECT \(Leaf.currentInSQL), \(Leaf.inSQL(secondsAgo: Self.grace)), current_setting('block_size'),
                       \(sizes.joined(separator: ", "))
                """
        }
        func read(_ rows: borrowing Rows, _ column: Int) -> Int {
            rows.text(0, column).flatMap { Int($0) } ?? 0
        }
        do {
            let rows = try connection.run(select(Leaf.all))
            let blockSize = max(read(rows, 2), 1)
            self.init(
                pages: Leaf.all.indices.map { read(rows, $0 + 3) / blockSize },
                current: Leaf(number: read(rows, 0)), before: Leaf(number: read(rows, 1)))
        } catch let error where error.remedy == .retry {
            // Somebody has locked a leaf, even against looking at its size: do without that one.
            var pages: [Int] = []
            var (current, before) = (0, 0)
            for leaf in Leaf.all {
                do {
                    let rows = try connection.run(select([leaf]))
                    (current, before) = (read(rows, 0), read(rows, 1))
                    pages.append(read(rows, 3) / max(read(rows, 2), 1))
                } catch let error where error.remedy == .retry {
                    pages.append(0)
                }
            }
            self.init(pages: pages, current: Leaf(number: current), before: Leaf(number: before))
        }
    }
}
