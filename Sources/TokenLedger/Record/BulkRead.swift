/// Reading a sealed partition of results in bulk and truncating it, in one transaction: no row is deleted individually.
///
/// A bulk read counts the 200s and moves all other rows to the backlog, from which batches record them. So the partition is
/// locked only during the read, and a token only during its batch.
extension SealedPartition {
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
                SELECT count(*) FILTER (WHERE \(ResultQueue.isRead)) <= \(Self.worthMoving) * count(*)
                FROM (SELECT status, topic, environment FROM \(partition.table) WHERE ctid >= '(\(page),0)' LIMIT 1000) AS head
                """
            ).value()
        } catch let error where error.remedy == .retry {
            return false
        }
    }

    /// Reads the whole partition and truncates it, in a transaction of its own.
    ///
    /// - Returns: The 200s that were counted, and how many other rows moved to the backlog; nil when another session is using the
    ///   partition.
    func take(on connection: inout Connection) throws(DatabaseError) -> ResultCounts.Unread? {
        guard let backlog = partition.queue.backlog, try lock(on: &connection) else { return nil }
        // Sorted by token, so that a batch finds its ledger rows close together. Sorting by one column is three times as fast as
        // sorting by the whole key. A longer text is no token, and sorting by it would read it.
        let rest = """
            \(partition.table) WHERE \(ResultQueue.isRead)
            ORDER BY CASE WHEN octet_length(token) <= 1024 THEN lower(token COLLATE "C") END
            """
        do {
            let rows = try connection.query(
                """
                WITH counted AS (
                    \(ResultCounts.insertAccepted(of: "\(partition.table) WHERE \(ResultQueue.isAccepted)"))
                ), moved AS (
                    \(backlog.insert(ResultQueue.columns, from: rest))
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
}
