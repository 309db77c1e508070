internal import TokenModel

/// The queue of results. The 200s are counted on the server; `Batch` interprets and records the rest.
struct ResultQueue: Queue {
    /// The verdict on a result: a pure function.
    let interpret: @Sendable (SendResult) -> Verdict

    let name = QueueName.results
    let rejectedTable = "tokenkeeper.rejected_result"
    var columns: String { Self.columns }
    var length: String { Self.length }
    var isBulky: String { Self.isBulky }

    private static let texts = ["environment", "topic", "token", "status", "body", "apns_id"]
    private static let others = ["sent_at", "queued_at", "attempts"]

    static let columns: String = (texts + others).joined(separator: ", ")

    static let length: String = bytes(of: texts)

    var sizeFault: String { "tokenkeeper.result_size_fault(\(Self.texts.joined(separator: ", ")))" }

    /// More text than 2,000 bytes. APNs' own responses have about 150 bytes.
    static let isBulky: String = "\(length) > 2000"

    let sampleColumns = "topic, token, status, body"
    let sample = """
        'tokenkeeper.probe', repeat('ff', 32), '410',
        '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now()) * 1000)::bigint || '}'
        """

    /// 200s are counted on the server. The status is text: `'200'` as drivers write it. A 200 with blanks around it is read here.
    static let isAccepted = "(status = '200' AND \(isLong) IS NOT TRUE)"

    /// All other rows are read here.
    static let isRead = "(status IS DISTINCT FROM '200' OR \(isLong))"

    /// Such texts are no topic and no environment, and to count by them, the server would have to read them. They are read here, each
    /// alone: `isBulky`.
    private static let isLong = "(octet_length(topic) > 2000 OR octet_length(environment) > 2000)"

    /// The status as it is counted: a number that HTTP could have, or null. As `SendResult.statusCode`.
    private static let countableStatus =
        "substring(status COLLATE \"C\" FROM '^[[:space:]]*([1-9][0-9][0-9])[[:space:]]*$')::integer"

    /// Counts the 200s among these rows, and moves some of the others to the retry partition.
    ///
    /// - Parameter condition: Selects the other rows to move.
    func countAccepted(
        _ rows: RowRange, of partition: Partition, settingAside condition: String, on connection: inout Connection
    ) throws(DatabaseError) -> ResultCounts.Unread {
        // The 200s have a statement of their own: reading all the columns that other rows need would take twice as long.
        let rows = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(Self.isAccepted) RETURNING environment, topic
            ), counted AS (
                \(ResultCounts.insertAccepted(of: "gone"))
            ), moving AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(Self.isRead) AND \(condition)
                RETURNING \(columns), released
            ), moved AS (
                \(name.retry.insert(columns, from: "moving"))
            )
            \(ResultCounts.selectUnread)
            """)
        return try ResultCounts.unread(rows)
    }

    func record(
        _ rows: RowRange, of partition: Partition, _ terms: BatchTerms, on connection: inout Connection
    ) throws(DatabaseError) -> BatchOutcome {
        let batch = try Batch.take(rows, of: partition, self, on: &connection)
        if batch.taken == 0 { return .empty }
        return try batch.record(from: partition, terms.guardLimits, terms.rejectedAllowance, on: &connection)
    }

    /// Counts the 200s, too.
    func setAside(
        _ rows: RowRange, of partition: Partition, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord? {
        let unread = try countAccepted(rows, of: partition, settingAside: "true", on: &connection)
        var recorded = BatchRecord(counts: unread.counts)
        (recorded.pass.accepted, recorded.pass.putBack) = (unread.accepted, unread.moved)
        return recorded.pass.moved ? recorded : nil
    }

    func reject(
        _ row: RowRange, of partition: Partition, error: String, isKept: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord? {
        var recorded = BatchRecord()
        let status: Int32?
        let taken = (Self.cut(Self.texts) + Self.others).joined(separator: ", ")
        (recorded.pass.rejected, recorded.pass.notKept, status) = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(row.predicate) RETURNING \(taken)
            ), counted AS (
                INSERT INTO tokenkeeper.result_count (hour, status, reason, results)
                SELECT \(ResultCounts.hourInSQL), \(Self.countableStatus),
                       CASE WHEN $2 OR attempts IS NOT NULL THEN '\(Verdict.rejected)' ELSE '\(Verdict.rejectedNotKept)' END, count(*)
                FROM gone GROUP BY 2, 3
            ), kept AS (
                INSERT INTO \(rejectedTable) (\(columns), error)
                SELECT \(columns), $1 FROM gone WHERE $2 OR attempts IS NOT NULL
            )
            SELECT count(*), count(*) FILTER (WHERE NOT $2 AND attempts IS NULL), max(\(Self.countableStatus)) FROM gone
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
