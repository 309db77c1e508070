internal import TokenModel

/// Some results taken off their queue, and what becomes of each. A batch is one transaction: a result leaves the queue only in the
/// transaction that records it.
///
/// Start here. `take` reads the results and interprets each one: its verdict adds to the `Observations` about tokens and to the
/// `ResultCounts`. `record` writes both, and sorts out the results that cannot be recorded: rejected, held by the guard, or waiting for a
/// locked token.
struct Batch: ~Copyable {
    /// The results that are not 200s, as PostgreSQL sent them. Keeping each as a value, too, would double the memory.
    private let rows: Rows
    private var observations = Observations()
    private var counts = ResultCounts()
    private var unintelligible: [(row: Int, error: String)] = []
    private var sendersFaults: [String: Int] = [:]
    /// The rows that an operator has released.
    private var released: Set<Int> = []
    /// 200s, which were counted on the server, and bulky results, which went to the retry partition.
    private let unread: ResultCounts.Unread

    /// The number of rows taken off the queue.
    var taken: Int { rows.count + unread.accepted + unread.moved }

    /// Takes rows off the queue and interprets them, in the open transaction.
    static func take(
        _ rows: RowRange, of partition: Partition, _ queue: ResultQueue, on connection: inout Connection
    ) throws(DatabaseError) -> Batch {
        let unread =
            partition.isRetry
            ? ResultCounts.Unread()
            : try queue.countAccepted(rows, of: partition, settingAside: queue.isBulky, on: &connection)
        let condition =
            switch (partition.isRetry, rows) {
            case (true, .row): "true"
            // Bulky rows wait for their turn one by one.
            case (true, .pages): "NOT (\(ResultQueue.isRead) AND \(queue.isBulky))"
            case (false, _): "\(ResultQueue.isRead) AND NOT \(queue.isBulky)"
            }
        let taken = try connection.query(
            """
            DELETE FROM \(partition.table) WHERE \(rows.predicate) AND \(condition)
            RETURNING \(queue.columns), released
            """)
        return try Batch(taken, queue.interpret, unread)
    }

    private init(
        _ taken: consuming Rows, _ interpret: (SendResult) -> Verdict, _ unread: ResultCounts.Unread
    ) throws(DatabaseError) {
        rows = taken
        self.unread = unread
        for row in 0..<rows.count {
            let result = try result(row)
            if result.isReleased { released.insert(row) }
            let verdict = interpret(result)
            observations.add(verdict, of: result, row: row)
            counts.note(result, verdict)
            switch verdict {
            case .unintelligible(let error): unintelligible.append((row, error))
            case .sendersFault(let reason):
                let fault = reason.map(ResultCounts.countable) ?? "status \(result.statusCode ?? 0)"
                sendersFaults[fault, default: 0] += 1
            case .accepted, .stale, .suspect, .transient: break
            }
        }
    }

    private func result(_ row: Int) throws(DatabaseError) -> SendResult {
        try rows.at(row) { row throws(DatabaseError) in
            SendResult(
                environment: try row.read(), topic: try row.read(), token: try row.read(), status: try row.read(),
                body: try row.read(), apnsID: try row.read(), sentAt: try row.read(), queuedAt: try row.read(),
                attempts: try row.read(), isReleased: try row.read(Bool?.self) ?? false)
        }
    }

    /// Records what the results say, in the open transaction.
    func record(
        from partition: Partition, _ limits: GuardLimits, _ allowance: RejectedAllowance,
        on connection: inout Connection
    ) throws(DatabaseError) -> BatchOutcome {
        let outcome = try observations.record(limits, on: &connection)
        let sorted = sort(by: outcome)
        if partition.isRetry, sorted.waiting.count == taken { return .allWait }
        var counts = counts
        let notKept = try keepRejected(allowance, &counts, on: &connection)
        try keepHeld(sorted.held, on: &connection)
        try setAside(sorted.waiting, on: &connection)
        try passOn(outcome.moved.sorted(), on: &connection)
        let counted = try counts.record(sorted.counted, on: &connection)
        var recorded = BatchRecord(transitions: outcome.transitions, counts: unread.counts + counted)
        recorded.pass.accepted = unread.accepted
        recorded.pass.rejected = unintelligible.count
        recorded.pass.notKept = notKept
        recorded.pass.held = sorted.held.count
        recorded.pass.putBack = sorted.waiting.count + unread.moved
        recorded.pass.lockWaits = sorted.waiting.isEmpty ? 0 : 1
        recorded.pass.recorded = rows.count - unintelligible.count - sorted.held.count - sorted.waiting.count
        for (fault, results) in sendersFaults.sorted(by: { $0.key < $1.key }) { recorded.pass.blame(fault, results) }
        return .done(recorded)
    }
}

/// What becomes of the results that are not recorded.
extension Batch {
    /// Which results the guard holds, which have to wait, and which count now.
    private func sort(by outcome: Observations.Outcome) -> (held: [HeldResult], waiting: [Int], counted: [Int]) {
        var held: [HeldResult] = []
        var waiting: [Int] = []
        var counted: [Int] = []
        counted.reserveCapacity(rows.count)
        for row in 0..<rows.count {
            if let suspect = outcome.held[row] {
                held.append(suspect)
                counted.append(row)
            } else if outcome.waiting.contains(row) {
                waiting.append(row)
            } else if outcome.moved.contains(row) {
                // Counted where it is recorded.
                continue
            } else if !released.contains(row) {
                // A released result was counted when it was held.
                counted.append(row)
            }
        }
        return (held, waiting, counted)
    }

    /// Keeps the unintelligible results in `rejected_result`, as far as the allowance goes; the others are only counted.
    ///
    /// - Returns: How many were only counted.
    private func keepRejected(
        _ allowance: RejectedAllowance, _ counts: inout ResultCounts, on connection: inout Connection
    ) throws(DatabaseError) -> Int {
        if unintelligible.isEmpty { return 0 }
        try allowance.refresh(on: &connection)
        var notKept = 0
        for part in Self.parts(of: unintelligible.count) {
            var kept: [(result: SendResult, error: String)] = []
            for (row, error) in unintelligible[part] {
                let result = try result(row)
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
        return notKept
    }

    private func keepHeld(_ held: [HeldResult], on connection: inout Connection) throws(DatabaseError) {
        for part in Self.parts(of: held.count) {
            try Self.insert(
                try held[part].map { held throws(DatabaseError) in try result(held.row) },
                into: "tokenkeeper.held_result",
                ["topic_id", "cause", "token_key", "invalidated_at", "reason"],
                try HeldResult.parameters(held[part], on: &connection), on: &connection)
        }
    }

    private func setAside(_ waiting: [Int], on connection: inout Connection) throws(DatabaseError) {
        for part in Self.parts(of: waiting.count) {
            try Self.insert(
                try waiting[part].map { row throws(DatabaseError) in try result(row) },
                into: QueueName.results.retry.table,
                ["partition_number", "released"],
                [
                    .int4s(part.map { _ in Int32(QueueName.results.retry.number) }),
                    .bools(waiting[part].map(released.contains)),
                ], on: &connection)
        }
    }

    /// Keeps results for the database that has their topic now.
    private func passOn(_ moved: [Int], on connection: inout Connection) throws(DatabaseError) {
        for part in Self.parts(of: moved.count) {
            let results = try moved[part].map { row throws(DatabaseError) in try result(row) }
            let values = Self.values(of: results) + [.bools(moved[part].map(released.contains))]
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.moved_row (topic, queue, content)
                SELECT r.topic, 'send_result', to_jsonb(r)
                FROM unnest(\(Self.placeholders(values.count))) AS r (\(ResultQueue.columns), released)
                """, values)
        }
    }

    /// Results are copied a few hundred at a time: memory stays bounded, whatever a batch holds.
    private static func parts(of count: Int) -> [Range<Int>] {
        stride(from: 0, to: count, by: 500).map { $0..<min($0 + 500, count) }
    }

    /// - Parameters:
    ///   - columns: The table's columns that the queue does not have, or that are not copied from there.
    ///   - values: The values of these columns.
    private static func insert(
        _ results: [SendResult], into table: String, _ columns: [String], _ values: [Parameter],
        on connection: inout Connection
    ) throws(DatabaseError) {
        let values = Self.values(of: results) + values
        _ = try connection.query(
            """
            INSERT INTO \(table) (\(ResultQueue.columns), \(columns.joined(separator: ", ")))
            SELECT * FROM unnest(\(placeholders(values.count)))
            """, values)
    }

    private static func placeholders(_ count: Int) -> String {
        (1...count).map { "$\($0)" }.joined(separator: ", ")
    }

    /// The values of `ResultQueue.columns`.
    private static func values(of results: [SendResult]) -> [Parameter] {
        [
            .texts(results.map(\.environment)), .texts(results.map(\.topic)), .texts(results.map(\.token)),
            .texts(results.map(\.status)), .texts(results.map(\.body)), .texts(results.map(\.apnsID)),
            .instants(results.map(\.sentAt)), .instants(results.map(\.queuedAt)), .int4s(results.map(\.attempts)),
        ]
    }
}
