internal import TokenModel

/// The rows of the queue: their columns, and the statements that take them off the queue without reading them here.
enum QueueRows {
    static let columns = "environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts"

    /// The bytes of text in a row, computed without fetching what is stored out of line.
    static let length = ["environment", "topic", "token", "status", "body", "apns_id"]
        .map { "coalesce(octet_length(\($0)), 0)" }.joined(separator: " + ")

    /// A row with more text than 2,000 bytes is bulky. It waits in the retry partition for its turn alone: memory stays bounded. APNs'
    /// own responses have about 150 bytes.
    static let isBulky = "\(length) > 2000"

    /// 200s are counted on the server. The status is text: `'200'` as drivers write it. A 200 with blanks around it is read here.
    static let isAccepted = "status = '200'"

    /// All other rows are read here.
    static let isRead = "status IS DISTINCT FROM '200'"

    /// The status as it is counted: a number that HTTP could have, or null. As `SendResult.statusCode`.
    private static let countableStatus =
        "substring(status COLLATE \"C\" FROM '^[[:space:]]*([1-9][0-9][0-9])[[:space:]]*$')::integer"

    /// An INSERT that copies rows of the queue to another partition, unchanged, and returns a row for each.
    static func insert(into partition: Partition, from rows: String) -> String {
        """
        INSERT INTO \(partition.table) (\(columns), released, partition_number)
        SELECT \(columns), released, \(partition.number) FROM \(rows)
        RETURNING 1
        """
    }

    /// Counts the 200s among these rows, and moves some of the others to the retry partition, in the open transaction.
    ///
    /// - Parameter condition: Selects the other rows to move.
    static func countAccepted(
        _ rows: RowRange, of partition: Partition, settingAside condition: String, on connection: inout Connection
    ) throws(DatabaseError) -> ResultCounts.Unread {
        // The 200s have a statement of their own: reading all the columns that other rows need would take twice as long.
        let rows = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(isAccepted) RETURNING environment, topic
            ), counted AS (
                \(ResultCounts.insertAccepted(of: "gone"))
            ), moving AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(isRead) AND \(condition)
                RETURNING \(columns), released
            ), moved AS (
                \(insert(into: .retry, from: "moving"))
            )
            \(ResultCounts.selectUnread)
            """)
        return try ResultCounts.unread(rows)
    }

    /// Counts the 200s among these rows, and moves all others to the retry partition, in the open transaction.
    ///
    /// - Returns: What was done; nil if there were no rows.
    static func setAside(
        _ rows: RowRange, of partition: Partition, on connection: inout Connection
    ) throws(DatabaseError) -> Batch.Recorded? {
        let unread = try countAccepted(rows, of: partition, settingAside: "true", on: &connection)
        var recorded = Batch.Recorded(counts: unread.counts)
        (recorded.pass.accepted, recorded.pass.putBack) = (unread.accepted, unread.moved)
        return recorded.pass.moved ? recorded : nil
    }

    /// Moves one row to `rejected_result` without reading it, in the open transaction; or only counts it.
    ///
    /// - Parameter isKept: False to only count it. A row that an operator has requeued is kept even then.
    /// - Returns: What was done; nil if the row was gone.
    static func reject(
        _ row: RowRange, of partition: Partition, error: String, isKept: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> Batch.Recorded? {
        var recorded = Batch.Recorded()
        let status: Int32?
        (recorded.pass.rejected, recorded.pass.notKept, status) = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(row.predicate) RETURNING \(columns)
            ), counted AS (
                INSERT INTO tokenkeeper.result_count (hour, status, reason, results)
                SELECT \(ResultCounts.hourInSQL), \(countableStatus),
                       CASE WHEN $2 OR attempts IS NOT NULL THEN '\(Verdict.rejected)' ELSE '\(Verdict.rejectedNotKept)' END, count(*)
                FROM gone GROUP BY 2, 3
            ), kept AS (
                INSERT INTO tokenkeeper.rejected_result (\(columns), error)
                SELECT \(columns), $1 FROM gone WHERE $2 OR attempts IS NOT NULL
            )
            SELECT count(*), count(*) FILTER (WHERE NOT $2 AND attempts IS NULL),
                   max(\(countableStatus))
            FROM gone
            """, [.text(error), .bool(isKept)]
        ).one { row throws(DatabaseError) in (try row.read(), try row.read(), try row.read()) }
        guard recorded.pass.moved else { return nil }
        let reason = recorded.pass.notKept > 0 ? Verdict.rejectedNotKept : Verdict.rejected
        recorded.counts = [
            ResultCount(kind: ResultKind(status: status, reason: reason), results: recorded.pass.rejected)
        ]
        return recorded
    }
}
