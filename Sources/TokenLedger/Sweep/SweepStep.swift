internal import TokenModel

/// The transactions of a sweep: each is short, and renews the lease.
extension Sweep {
    /// The planner must not scan a large table that still has the statistics of a small one.
    static let byIndex = "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off;"

    /// Runs work that may fail without stopping the rest. A lost connection, a lost lease or a request to stop ends the sweep.
    ///
    /// - Returns: What the work returns; nil if it failed, which is then among the findings.
    @discardableResult
    func attempt<Value>(
        _ what: String, into findings: inout SweepFindings, _ work: () throws -> Value
    ) throws -> Value? {
        do {
            return try work()
        } catch let error as DatabaseError where error.remedy != .reconnect {
            findings.failed(what, error)
            return nil
        }
    }

    /// One transaction of the sweep. It renews the lease; if the lease is lost, it is rolled back.
    ///
    /// - Parameter work: Adds what it did to the counts of the run.
    func step<Value>(
        settings: String = "", on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, inout RunCounts) throws -> Value
    ) throws -> Value {
        guard goesOn() else { throw Ended.stopped }
        return try connection.transaction(transaction, settings: settings) { connection in
            var counts = RunCounts()
            let value = try work(&connection, &counts)
            guard try counts.add(to: lease, on: &connection) else { throw Ended.leaseLost }
            return value
        }
    }

    /// Reads a slice in one transaction, and a smaller slice if the transaction hits its time limit.
    func slice<Value>(
        _ size: inout SliceSize, settings: String = "", on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, inout RunCounts, _ size: Int) throws -> Value
    ) throws -> Value {
        while true {
            let began = ContinuousClock.now
            do {
                let value = try step(settings: settings, on: &connection, while: goesOn) { connection, counts in
                    try work(&connection, &counts, size.value)
                }
                size.took(began.duration(to: .now))
                return value
            } catch let error as DatabaseError where error.sqlState == "57014" && size.timedOut() {
                // Try again with a smaller slice.
            }
        }
    }

    /// Goes through a table in the order of a key, a slice of rows per transaction. Each slice begins where the previous one
    /// ended: from the front, it would first skip everything that has been deleted.
    ///
    /// - Parameter work: Takes the key that the previous slice reached, and how many rows to read. Returns the key that it
    ///   reached; nil at the end.
    func eachSlice<Key>(
        after first: Key, _ size: inout SliceSize, on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, inout RunCounts, _ after: Key, _ size: Int) throws -> Key?
    ) throws {
        var next: Key? = first
        while let after = next {
            next = try slice(&size, settings: Self.byIndex, on: &connection, while: goesOn) {
                connection, counts, size in
                try work(&connection, &counts, after, size)
            }
        }
    }

    /// Goes through a table from its first page to its last, a slice of pages per transaction.
    ///
    /// - Parameters:
    ///   - table: The table's name in SQL.
    ///   - largest: The most pages in a slice.
    func eachSlice(
        of table: String, largest: Int, on connection: inout Connection, while goesOn: () -> Bool,
        _ work: (inout Connection, inout RunCounts, _ pages: Range<Int>) throws -> Void
    ) throws {
        let pages = try connection.query(
            "SELECT pg_relation_size(to_regclass($1)) / current_setting('block_size')::bigint", [.text(table)]
        ).value(Int?.self)
        // The table may have been dropped since.
        guard let pages else { return }
        var size = SliceSize(largest / 8, in: 1...largest)
        var page = 0
        while page < pages {
            page = try slice(&size, on: &connection, while: goesOn) { connection, counts, size in
                try work(&connection, &counts, page..<page + size)
                return page + size
            }
        }
    }

    /// The condition that selects some pages of a table.
    static func on(_ pages: Range<Int>, alias: String) -> String {
        "\(alias).ctid >= '(\(pages.lowerBound),0)' AND \(alias).ctid < '(\(min(pages.upperBound, Int(UInt32.max) - 1)),0)'"
    }
}
