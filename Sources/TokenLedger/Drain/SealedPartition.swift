/// A sealed partition with a backlog, read whole and truncated in one transaction: nobody writes to it any more, so that its rows need
/// not be deleted one after the other, and nothing of it is left to vacuum.
///
/// The 200s are counted on the way. The rest moves to the backlog leaf, to be recorded from there in batches: the partition is locked
/// for no longer than it takes to read it, and tokens for no longer than one batch.
struct SealedPartition {
    let partition: Partition
    let transaction: BatchTransaction

    /// A small one is left to its ranges, and a large one, of half a GiB and more, would be locked for seconds.
    func isWorthReading(_ pages: Int) -> Bool {
        partition != .backlog && (PartitionSizes.worthTruncating...65_536).contains(pages)
    }

    /// Moving a row costs more than deleting it: worth it only where fewer rows than this share are to be recorded.
    private static let worthMoving = 0.4

    /// Whether its first rows are mostly 200s. False where somebody has it locked.
    func isMostlyAccepted(from page: Int, on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            return try connection.run(
                """
                \(transaction.settings)
                SET LOCAL synchronize_seqscans = off;
                LOCK TABLE \(partition.table) IN ACCESS SHARE MODE NOWAIT;
                SELECT count(*) FILTER (WHERE status IS DISTINCT FROM 200) <= \(Self.worthMoving) * count(*)
                FROM (SELECT status FROM \(partition.table) WHERE ctid >= '(\(page),0)' LIMIT 1000) AS head
                """
            ).text(0, 0) == "t"
        } catch let error where error.remedy == .retry {
            return false
        }
    }

    /// Locks it against everybody, for the transaction that begins here: the lock comes before the statements that read, because a
    /// row committed in between would be lost. NOWAIT: whoever is at it is not disturbed, and nobody queues up behind us.
    ///
    /// - Returns: False when a writer or a dump is at it, or another daemon, or `forget`; then no transaction is open.
    private func lock(on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            let isOurs = try connection.run(
                """
                \(transaction.beginUnsorted)
                SELECT \(DrainLock.partition(partition))
                """
            ).text(0, 0)
            if isOurs == "t" { return true }
            connection.rollback()
            return false
        } catch {
            connection.rollback()
            if error.remedy == .retry { return false }
            throw error
        }
    }

    /// Takes all of it, in a transaction of its own.
    ///
    /// - Returns: How many 200s were counted and how many others moved. Nil when somebody is in the way: a writer, a dump, another
    ///   daemon, or `forget`.
    func take(on connection: inout Connection) throws(DatabaseError) -> (accepted: Int, moved: Int)? {
        guard try lock(on: &connection) else { return nil }
        // In the order of the tokens: a batch then finds its rows close together. By one column alone, which sorts three
        // times as fast as the whole key.
        let rest = "\(partition.table) WHERE \(Batch.looked) ORDER BY lower(token COLLATE \"C\")"
        do {
            let rows = try connection.query(
                """
                WITH counted AS (
                    \(ResultCounts.insertAccepted(of: "\(partition.table) WHERE status = 200"))
                ), moved AS (
                    \(Batch.insert(into: .backlog, from: rest))
                )
                SELECT (SELECT sum(results)::bigint FROM counted), (SELECT count(*) FROM moved)
                """)
            let taken = (accepted: Int(rows.integer(0, 0) ?? 0), moved: Int(rows.integer(0, 1) ?? 0))
            try connection.run("TRUNCATE \(partition.table)")
            try connection.commit()
            return taken
        } catch {
            connection.rollback()
            throw error
        }
    }

    /// Gives back the space of one that is drained, so that nothing waits for vacuum.
    ///
    /// - Returns: Whether it was empty; nil where somebody is in the way.
    func truncateIfEmpty(on connection: inout Connection) throws(DatabaseError) -> Bool? {
        do {
            guard try lock(on: &connection) else { return nil }
            let isEmpty = try connection.run("SELECT 1 FROM \(partition.table) LIMIT 1").count == 0
            if isEmpty { try connection.run("TRUNCATE \(partition.table)") }
            try connection.commit()
            return isEmpty
        } catch {
            connection.rollback()
            if error.remedy == .reconnect { throw error }
            return nil
        }
    }
}
