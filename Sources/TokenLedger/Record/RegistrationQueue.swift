internal import TokenModel

/// The queue of registrations and logouts. `tokenkeeper.apply_registrations` does all of a batch in the database: no row comes here.
struct RegistrationQueue: Queue {
    let name = QueueName.registrations
    let columns: String = (Self.texts + ["tags"] + Self.others).joined(separator: ", ")
    let rejectedTable = "tokenkeeper.rejected_registration"

    private static let texts = ["environment", "topic", "token", "device_id", "user_id", "row_key"]
    private static let others = ["registered_at", "unregistered", "source_id", "returned", "queued_at", "attempts"]

    /// Of the tags, the size as stored, which may be compressed: an array has no length that could be computed without fetching it.
    let length: String = "\(Self.bytes(of: Self.texts)) + coalesce(pg_column_size(tags), 0)"

    var sizeFault: String { "tokenkeeper.registration_size_fault(\(Self.texts.joined(separator: ", ")), tags)" }

    let sampleColumns = "topic, token"
    let sample = "'tokenkeeper.probe', repeat('ff', 32)"

    /// More text than 8,000 bytes. A registration has about 150 bytes, but some have a hundred tags.
    var isBulky: String { "\(length) > 8000" }

    func record(
        _ rows: RowRange, of partition: Partition, _ terms: BatchTerms, on connection: inout Connection
    ) throws(DatabaseError) -> BatchOutcome {
        try terms.rejectedAllowance.refresh(on: &connection)
        // Bulky rows wait in the retry partition for their turn one by one.
        let (taken, moves) =
            switch (partition.isRetry, rows) {
            case (true, .row): ("true", "false")
            case (true, .pages): ("NOT (\(isBulky))", "false")
            case (false, _): ("true", isBulky)
            }
        let applied = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(taken) RETURNING *
            ), moved AS (
                \(name.retry.insert(columns, from: "gone WHERE \(moves)"))
            ), batch AS (
                SELECT array_agg(g::tokenkeeper.registration) AS rows, count(*) AS number FROM gone AS g WHERE NOT (\(moves)) HAVING count(*) > 0
            )
            SELECT (SELECT count(*) FROM moved), b.number, a.applied, a.rejected, a.not_kept, a.held, a.waiting, \(GuardTransition.columns)
            FROM (SELECT) AS one LEFT JOIN (
                batch AS b CROSS JOIN LATERAL tokenkeeper.apply_registrations(b.rows, $1, $2 / 1000000::numeric, $3) AS a) ON true
            """,
            [
                .int8(terms.guardLimits.allowance), .int8(terms.guardLimits.maxShare.millionths),
                .int8(terms.rejectedAllowance.left),
            ]
        ).one { row throws(DatabaseError) in try Applied(&row) }
        if applied.number == 0, applied.moved == 0 { return .empty }
        if partition.isRetry, applied.waiting == applied.number { return .allWait }
        terms.rejectedAllowance.took(Int64(applied.rejected - applied.notKept))
        try countDropped(applied.notKept, on: &connection)
        return .done(try applied.record(on: &connection))
    }

    func setAside(
        _ rows: RowRange, of partition: Partition, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord? {
        var record = BatchRecord()
        record.pass.registrations.putBack = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(rows.predicate) RETURNING \(columns), released
            ), moved AS (
                \(name.retry.insert(columns, from: "gone"))
            )
            SELECT count(*) FROM moved
            """
        ).value()
        return record.pass.moved ? record : nil
    }

    func reject(
        _ row: RowRange, of partition: Partition, error: String, isKept: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> BatchRecord? {
        var record = BatchRecord()
        let taken = (Self.cut(Self.texts) + ["tokenkeeper.cut_tags(tags) AS tags"] + Self.others).joined(
            separator: ", ")
        (record.pass.registrations.rejected, record.pass.registrations.notKept) = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(row.predicate) RETURNING \(taken)
            ), kept AS (
                INSERT INTO \(rejectedTable) (\(columns), error) SELECT \(columns), $1 FROM gone WHERE $2 OR attempts IS NOT NULL
            )
            SELECT count(*), count(*) FILTER (WHERE NOT $2 AND attempts IS NULL) FROM gone
            """, [.text(error), .bool(isKept)]
        ).one { row throws(DatabaseError) in (try row.read(), try row.read()) }
        guard record.pass.moved else { return nil }
        try countDropped(record.pass.registrations.notKept, on: &connection)
        return record
    }

    /// Counts rejected rows that are not kept.
    private func countDropped(_ rows: Int, on connection: inout Connection) throws(DatabaseError) {
        if rows == 0 { return }
        _ = try connection.query(
            "INSERT INTO tokenkeeper.dropped_registration (hour, registrations) VALUES (\(ResultCounts.hourInSQL), $1)",
            [.int8(Int64(rows))])
    }
}

extension RegistrationQueue {
    /// What `tokenkeeper.apply_registrations` has done with a batch.
    private struct Applied {
        /// Bulky rows, which went to the retry partition.
        var moved = 0
        /// The rows that the function got.
        var number = 0
        var applied = 0
        var rejected = 0
        var notKept = 0
        var held = 0
        var waiting = 0
        /// See `GuardTransition.columns`.
        var changes: (topics: [Int32], causes: [String], tripped: [Bool]) = ([], [], [])

        init(_ row: inout Row) throws(DatabaseError) {
            moved = try row.read()
            number = try row.read(Int?.self) ?? 0
            applied = try row.read(Int?.self) ?? 0
            rejected = try row.read(Int?.self) ?? 0
            notKept = try row.read(Int?.self) ?? 0
            held = try row.read(Int?.self) ?? 0
            waiting = try row.read(Int?.self) ?? 0
            changes = (try row.read(), try row.read(), try row.read())
        }

        func record(on connection: inout Connection) throws(DatabaseError) -> BatchRecord {
            var record = BatchRecord()
            record.pass.registrations = Drain.Pass.Registrations(
                applied: applied, rejected: rejected, notKept: notKept, held: held, putBack: waiting + moved)
            record.pass.lockWaits = waiting > 0 ? 1 : 0
            record.transitions = try GuardTransition.read(
                changes.topics, changes.causes, changes.tripped, on: &connection)
            return record
        }
    }
}
