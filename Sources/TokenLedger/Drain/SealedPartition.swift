/// A sealed partition: no sender writes to it any more. So it can be read in bulk and truncated in one transaction: no row is
/// deleted individually, and nothing is left to vacuum.
///
/// A bulk read counts the 200s and moves all other rows to the backlog, from which batches record them. So the partition is
/// locked only during the read, and a token only during its batch.
struct SealedPartition {
    let partition: Partition
    let transaction: BatchTransaction

    /// How many pages a bulk read may take. A smaller partition is drained in batches; a larger one, of half a GiB and more, would be
    /// locked for seconds.
    static let bulkReadSizes = PartitionSizes.worthTruncating...65_536

    /// Moving a row costs more than deleting it: a bulk read pays off only when less than this share of the rows is to be recorded.
    private static let worthMoving = 0.4

    /// Whether the first rows, from this page on, are mostly 200s. False when another session has locked the partition.
    func isMostlyAccepted(from page: Int, on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            return try connection.run(
                """
                \(transaction.settings)
                SET LOCAL synchronize_seqscans = off;
                LOCK TABLE \(partition.table) IN ACCESS SHARE MODE NOWAIT;
                SELECT count(*) FILTER (WHERE \(QueueRows.isRead)) <= \(Self.worthMoving) * count(*)
                FROM (SELECT status FROM \(partition.table) WHERE ctid >= '(\(page),0)' LIMIT 1000) AS head
                """
            ).value()
        } catch let error where error.remedy == .retry {
            return false
        }
    }

    /// Begins a transaction and locks the partition against everybody.
    ///
    /// The lock comes before the statements that read: a row committed in between would be lost. With NOWAIT it disturbs no other
    /// session, and no session queues up behind it.
    ///
    /// - Returns: False when a writer, a dump, another daemon or `forget` is using the partition; then no transaction is open.
    private func lock(on connection: inout Connection) throws(DatabaseError) -> Bool {
        do {
            let isOurs: Bool = try connection.run(
                """
                \(transaction.beginUnsorted)
                SELECT \(DrainLock.partition(partition))
                """
            ).value()
            if isOurs { return true }
            connection.rollback()
            return false
        } catch {
            connection.rollback()
            if error.remedy == .retry { return false }
            throw error
        }
    }

    /// Reads the whole partition and truncates it, in a transaction of its own.
    ///
    /// - Returns: The 200s that were counted, and how many other rows moved to the backlog; nil when another session is using the
    ///   partition.
    func take(on connection: inout Connection) throws(DatabaseError) -> ResultCounts.Unread? {
        guard try lock(on: &connection) else { return nil }
        // Sorted by token, so that a batch finds its ledger rows close together. Sorting by one column is three times as fast as
        // sorting by the whole key.
        let rest = "\(partition.table) WHERE \(QueueRows.isRead) ORDER BY lower(token COLLATE \"C\")"
        do {
            let rows = try connection.query(
                """
                WITH counted AS (
                    \(ResultCounts.insertAccepted(of: "\(partition.table) WHERE \(QueueRows.isAccepted)"))
                ), moved AS (
                    \(QueueRows.insert(into: .backlog, from: rest))
                )
                \(ResultCounts.selectUnread)
                """)
            let taken = try ResultCounts.unread(rows)
            try connection.run("TRUNCATE \(partition.table)")
            try connection.commit()
            return taken
        } catch {
            connection.rollback()
            throw error
        }
    }

    /// Gives back the space of a drained partition, so that nothing is left to vacuum.
    ///
    /// - Returns: Whether it was empty; nil when another session is using the partition.
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
