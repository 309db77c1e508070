internal import TokenModel

/// Some results taken from the queue, and what becomes of each. A batch is one transaction: a result leaves the queue
/// only in the transaction that records it.
struct Batch: ~Copyable {
    /// The results taken that are no 200s, as PostgreSQL sent them: to keep each as a value too would double the memory.
    private let rows: Rows
    private var news = Observations()
    private var counts = ResultCounts()
    /// Those that could not be understood, by row.
    private var unintelligible: [(row: Int, error: String)] = []
    private var sendersFaults: [String: Int] = [:]
    /// 200s: counted on the server, they never came here.
    private let accepted: Int
    /// Bulky results that went aside without coming here, to be looked at one by one.
    private let movedToRetry: Int

    /// How many rows left the portion.
    var taken: Int { rows.count + accepted + movedToRetry }

    var hasSuspects: Bool { news.hasSuspects }

    /// More text than this, in bytes, makes a row bulky. APNs' own answers have some 150; memory stays bounded.
    static let bulky = 2000

    private static let columns = "environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts"

    /// The bytes of text in a row, told without fetching what is stored out of line.
    static let length = ["environment", "topic", "token", "body", "apns_id"]
        .map { "coalesce(octet_length(\($0)), 0)" }.joined(separator: " + ")

    /// Those that come here to be looked at, or go to the retry partition: all but the 200s.
    static let looked = "status IS DISTINCT FROM 200"
    private static let isBulky = "\(length) > \(bulky)"

    /// Takes a portion of a partition off the queue, in the transaction that is open.
    static func take(
        _ portion: RowRange, of partition: Partition, interpret: (SendResult) -> Verdict,
        on connection: inout Connection
    ) throws(DatabaseError) -> Batch {
        let unseen =
            partition == .retry
            ? (accepted: 0, movedToRetry: 0)
            : try countAccepted(portion, of: partition, movingToRetry: "AND \(isBulky)", on: &connection)
        let condition =
            switch (partition, portion) {
            // Bulky ones wait there for their turn one by one.
            case (.retry, .row): "true"
            case (.retry, .pages): "NOT (\(looked) AND \(isBulky))"
            default: "\(looked) AND NOT \(isBulky)"
            }
        let rows = try connection.query(
            """
            DELETE FROM \(partition.table) WHERE \(portion.predicate) AND \(condition)
            RETURNING \(columns), released
            """)
        return Batch(rows, interpret, accepted: unseen.accepted, movedToRetry: unseen.movedToRetry)
    }

    private init(_ taken: consuming Rows, _ interpret: (SendResult) -> Verdict, accepted: Int, movedToRetry: Int) {
        rows = taken
        self.accepted = accepted
        self.movedToRetry = movedToRetry
        for row in 0..<rows.count {
            let result = result(row)
            let verdict = interpret(result)
            news.add(verdict, of: result, at: row)
            counts.note(result, verdict)
            switch verdict {
            case .unintelligible(let error): unintelligible.append((row, error))
            case .sendersFault(let reason):
                let fault = reason.map(ResultCounts.countable) ?? "status \(result.status ?? 0)"
                sendersFaults[fault, default: 0] += 1
            case .accepted, .stale, .suspect, .transient: break
            }
        }
    }

    private func result(_ row: Int) -> SendResult {
        SendResult(
            environment: rows.text(row, 0), topic: rows.text(row, 1), token: rows.text(row, 2),
            status: rows.integer(row, 3).map(Int32.init(truncatingIfNeeded:)), body: rows.text(row, 4),
            apnsID: rows.text(row, 5), sentAt: rows.instant(row, 6), queuedAt: rows.instant(row, 7) ?? .distantPast,
            attempts: rows.integer(row, 8).map(Int32.init(truncatingIfNeeded:)),
            isReleased: isReleased(row))
    }

    private func isReleased(_ row: Int) -> Bool { rows.bool(row, 9) ?? false }

    /// Moves a portion of a partition aside on the server, to be looked at one by one, and counts its 200s; in the transaction that is open.
    static func moveToRetry(
        _ portion: RowRange, of partition: Partition, on connection: inout Connection
    ) throws(DatabaseError) -> Drain.Pass {
        var settled = Drain.Pass()
        (settled.accepted, settled.putBack) = try countAccepted(
            portion, of: partition, movingToRetry: "", on: &connection)
        return settled
    }

    /// An INSERT that moves rows of the queue into another partition, as they are, and answers a row for each.
    static func insert(into partition: Partition, from rows: String) -> String {
        """
        INSERT INTO \(partition.table) (\(columns), released, partition_number)
        SELECT \(columns), released, \(partition.number) FROM \(rows)
        RETURNING 1
        """
    }

    /// Counts the 200s off the queue, and moves others aside.
    ///
    /// - Parameter which: A further condition, beginning with AND, of those that are moved.
    private static func countAccepted(
        _ portion: RowRange, of partition: Partition, movingToRetry which: String, on connection: inout Connection
    ) throws(DatabaseError) -> (accepted: Int, movedToRetry: Int) {
        // A statement of their own: with all the columns of the others they would take twice as long.
        let rows = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(portion.predicate) AND status = 200 RETURNING environment, topic
            ), counted AS (
                \(ResultCounts.insertAccepted(of: "gone"))
            ), moving AS (
                DELETE FROM \(partition.table) WHERE \(portion.predicate) AND \(looked) \(which)
                RETURNING \(columns), released
            ), moved AS (
                \(insert(into: .retry, from: "moving"))
            )
            SELECT (SELECT sum(results)::bigint FROM counted), (SELECT count(*) FROM moved)
            """)
        return (Int(rows.integer(0, 0) ?? 0), Int(rows.integer(0, 1) ?? 0))
    }

    /// Records what the batch says, in the transaction that is open.
    ///
    /// - Returns: What the batch has done, once it is committed, and which guards have opened or closed by it. Nil when all of it was in the retry partition already and has to wait on, because applications hold its tokens: roll back.
    func settle(
        from partition: Partition, _ limits: GuardLimits, _ allowance: RejectedAllowance,
        on connection: inout Connection
    ) throws(DatabaseError) -> (pass: Drain.Pass, turns: [GuardTransition])? {
        let outcome = try news.record(limits, on: &connection)
        var held: [HeldResult] = []
        var waiting: [Int] = []
        var counted: [Int] = []
        counted.reserveCapacity(rows.count)
        for row in 0..<rows.count {
            if let of = outcome.held[row] {
                held.append(HeldResult(row: row, address: of.address, at: of.at, reason: of.reason))
                counted.append(row)
            } else if outcome.waiting.contains(row) || outcome.locked.contains(row) {
                waiting.append(row)
            } else if !isReleased(row) {
                // What was held before was counted then.
                counted.append(row)
            }
        }
        if partition == .retry, waiting.count == taken { return nil }
        var counts = counts
        if !unintelligible.isEmpty { try allowance.refresh(on: &connection) }
        var notKept = 0
        for part in Self.parts(of: unintelligible.count) {
            var kept: [(result: SendResult, error: String)] = []
            for (row, error) in unintelligible[part] {
                let result = result(row)
                if allowance.takes(result) {
                    kept.append((result, error))
                } else {
                    counts.isNotKept(row)
                    notKept += 1
                }
            }
            if kept.isEmpty { continue }
            try Self.insert(
                kept.map(\.result), into: "tokenkeeper.rejected_result", ["error"], [.texts(kept.map(\.error))],
                on: &connection)
        }
        for part in Self.parts(of: held.count) {
            try Self.insert(
                held[part].map { result($0.row) }, into: "tokenkeeper.held_result",
                ["topic_id", "token_key", "suspect_at", "reason"],
                try HeldResult.parameters(held[part], on: &connection), on: &connection)
        }
        for part in Self.parts(of: waiting.count) {
            try Self.insert(
                waiting[part].map { result($0) }, into: "tokenkeeper.send_result_retry",
                ["partition_number", "released"],
                [
                    .int4s(part.map { _ in Int32(Partition.retry.number) }),
                    .bools(waiting[part].map { isReleased($0) }),
                ], on: &connection)
        }
        try counts.record(counted, on: &connection)
        var settled = Drain.Pass()
        settled.accepted = accepted
        settled.rejected = unintelligible.count
        settled.notKept = notKept
        settled.held = held.count
        settled.putBack = waiting.count + movedToRetry
        settled.lockWaits = waiting.isEmpty ? 0 : 1
        settled.recorded = rows.count - unintelligible.count - held.count - waiting.count
        for (fault, results) in sendersFaults.sorted(by: { $0.key < $1.key }) { settled.blame(fault, results) }
        return (settled, outcome.turns)
    }

    /// Some hundreds at a time are copied elsewhere: memory stays bounded, whatever a batch holds.
    private static func parts(of count: Int) -> [Range<Int>] {
        stride(from: 0, to: count, by: 500).map { $0..<min($0 + 500, count) }
    }

    /// - Parameter more: The values of the columns that the queue has not, or that are not copied.
    private static func insert(
        _ results: [SendResult], into table: String, _ names: [String], _ more: [Parameter],
        on connection: inout Connection
    ) throws(DatabaseError) {
        let values: [Parameter] =
            [
                .texts(results.map(\.environment)), .texts(results.map(\.topic)), .texts(results.map(\.token)),
                .int4s(results.map(\.status)), .texts(results.map(\.body)), .texts(results.map(\.apnsID)),
                .instants(results.map(\.sentAt)), .instants(results.map(\.queuedAt)), .int4s(results.map(\.attempts)),
            ] + more
        _ = try connection.query(
            """
            INSERT INTO \(table) (\(columns), \(names.joined(separator: ", ")))
            SELECT * FROM unnest(\((1...values.count).map { "$\($0)" }.joined(separator: ", ")))
            """, values)
    }

    /// Moves one row to `rejected_result` on the server, whatever is in it, in the transaction that is open; or counts it only.
    ///
    /// - Parameter isKept: False to count it only; a row that an operator has requeued is kept even so.
    /// - Returns: How many rows have left the queue, and how many of them were counted only.
    static func reject(
        _ portion: RowRange, of partition: Partition, error: String, isKept: Bool, on connection: inout Connection
    ) throws(DatabaseError) -> (gone: Int, notKept: Int) {
        let rows = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(partition.table) WHERE \(portion.predicate) RETURNING \(columns)
            ), counted AS (
                INSERT INTO tokenkeeper.result_count (hour, status, reason, results)
                SELECT \(ResultCounts.hourInSQL), CASE WHEN status BETWEEN 100 AND 999 THEN status END,
                       CASE WHEN $2 OR attempts IS NOT NULL THEN '(rejected)' ELSE '\(ResultCounts.notKept)' END, count(*)
                FROM gone GROUP BY 2, 3
            ), kept AS (
                INSERT INTO tokenkeeper.rejected_result (\(columns), error)
                SELECT \(columns), $1 FROM gone WHERE $2 OR attempts IS NOT NULL
            )
            SELECT count(*), count(*) FILTER (WHERE NOT $2 AND attempts IS NULL) FROM gone
            """, [.text(error), .bool(isKept)])
        return (Int(rows.integer(0, 0) ?? 0), Int(rows.integer(0, 1) ?? 0))
    }
}
