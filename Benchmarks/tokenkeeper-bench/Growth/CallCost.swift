import LedgerTestSupport

/// What statements cost: the pages of 8 kB that PostgreSQL looks at, which do not depend on the load of the machine, and the time.
struct CallCost {
    /// Medians of the calls.
    let pages: Double
    let milliseconds: Double
    let longest: Double
    /// Bytes of WAL, whole pages included, and how many of these there are: the first change of a page after a checkpoint writes all of it.
    let walBytes: Double
    let wholePages: Double
    /// Sums of all calls.
    let allPages: Double
    let allMilliseconds: Double

    /// - Parameters:
    ///   - statements: Each runs once, in a transaction of its own.
    ///   - warmups: How many of them come first and do not count: they read the catalogs and make the plans of the session.
    init(_ statements: [String], warmups: Int = 0, on session: Session) throws {
        var pages: [Double] = []
        var milliseconds: [Double] = []
        var (walBytes, wholePages): ([Double], [Double]) = ([], [])
        for (index, statement) in statements.enumerated() {
            let plan =
                try session.text("EXPLAIN (ANALYZE, BUFFERS, WAL, TIMING OFF, FORMAT JSON) " + statement) ?? ""
            if index < warmups { continue }
            // The first pair is that of the topmost node, which includes everything that its functions read.
            guard let hit = plan.firstMatch(of: /"Shared Hit Blocks": (\d+)/).flatMap({ Double($0.1) }),
                let read = plan.firstMatch(of: /"Shared Read Blocks": (\d+)/).flatMap({ Double($0.1) }),
                let time = plan.firstMatch(of: /"Execution Time": ([0-9.]+)/).flatMap({ Double($0.1) }),
                let wal = plan.firstMatch(of: /"WAL Bytes": (\d+)/).flatMap({ Double($0.1) }),
                let whole = plan.firstMatch(of: /"WAL FPI": (\d+)/).flatMap({ Double($0.1) })
            else { throw TestFailure("no buffers in \(plan)") }
            pages.append(hit + read)
            milliseconds.append(time)
            walBytes.append(wal)
            wholePages.append(whole)
        }
        let (page, time) = (Spread(pages), Spread(milliseconds))
        self.pages = page.median
        self.milliseconds = time.median
        longest = time.greatest
        self.walBytes = Spread(walBytes).median
        self.wholePages = Spread(wholePages).median
        allPages = pages.reduce(0, +)
        allMilliseconds = milliseconds.reduce(0, +)
    }
}
