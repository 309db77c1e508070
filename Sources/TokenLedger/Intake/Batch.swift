internal import TokenModel

/// Some results taken from the queue, and what becomes of each. A batch is one transaction: a result leaves the queue
/// only in the transaction that records it.
struct Batch {
    /// The results taken that are no 200s.
    private(set) var results: [SendResult] = []
    private(set) var verdicts: [Verdict] = []
    /// 200s: counted on the server, they never came here.
    private(set) var accepted = 0
    /// Bulky results that went aside without coming here, to be looked at one by one.
    private(set) var movedAside = 0

    /// How many rows left the portion.
    var taken: Int { results.count + accepted + movedAside }

    /// More text than this, in bytes, makes a row bulky. APNs' own answers have some 150; memory stays bounded.
    static let bulky = 2000

    private static let columns = "environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts"

    /// The bytes of text in a row, told without fetching what is stored out of line.
    static let length = ["environment", "topic", "token", "body", "apns_id"]
        .map { "coalesce(octet_length(\($0)), 0)" }.joined(separator: " + ")

    /// Those that come here to be looked at, or with `asideUnseen` go aside: all but the 200s.
    static let looked = "status IS DISTINCT FROM 200"
    private static let isBulky = "\(length) > \(bulky)"

    /// Takes a portion of a leaf off the queue, in the transaction that is open.
    ///
    /// - Parameter asideUnseen: Move everything but the 200s aside instead of handing it over.
    init(
        taking portion: Portion, of leaf: Leaf, asideUnseen: Bool, interpret: (SendResult) -> Verdict,
        on connection: inout Connection
    ) throws(DatabaseError) {
        if leaf != .aside { try countAccepted(portion, of: leaf, asideUnseen: asideUnseen, on: &connection) }
        if asideUnseen { return }
        let condition =
            switch (leaf, portion) {
            // Bulky ones wait there for their turn one by one.
            case (.aside, .row): "true"
            case (.aside, .pages): "NOT (\(Self.looked) AND \(Self.isBulky))"
            default: "\(Self.looked) AND NOT \(Self.isBulky)"
            }
        let rows = try connection.query(
            """
            DELETE FROM \(leaf.table) WHERE \(portion.predicate) AND \(condition)
            RETURNING \(Self.columns), released
            """)
        results.reserveCapacity(rows.count)
        verdicts.reserveCapacity(rows.count)
        for row in 0..<rows.count {
            guard let queuedAt = rows.instant(row, 7) else { continue }
            let result = SendResult(
                environment: rows.text(row, 0), topic: rows.text(row, 1), token: rows.text(row, 2),
                status: rows.integer(row, 3).map(Int32.init(truncatingIfNeeded:)), body: rows.text(row, 4),
                apnsID: rows.text(row, 5), sentAt: rows.instant(row, 6), queuedAt: queuedAt,
                attempts: rows.integer(row, 8).map(Int32.init(truncatingIfNeeded:)),
                isReleased: rows.bool(row, 9) ?? false)
            results.append(result)
            verdicts.append(interpret(result))
        }
    }

    /// An INSERT that moves rows of the queue into another leaf, as they are, and answers a row for each.
    static func insert(into leaf: Leaf, from rows: String) -> String {
        """
        INSERT INTO \(leaf.table) (\(columns), released, leaf)
        SELECT \(columns), released, \(leaf.number) FROM \(rows)
        RETURNING 1
        """
    }

    /// Counts the 200s off the queue, and moves aside what is not to come here.
    private mutating func countAccepted(
        _ portion: Portion, of leaf: Leaf, asideUnseen: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        // A statement of their own: with all the columns of the others they would take twice as long.
        let rows = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(leaf.table) WHERE \(portion.predicate) AND status = 200 RETURNING environment, topic
            ), counted AS (
                \(ResultCounts.insertAccepted(of: "gone"))
            ), moving AS (
                DELETE FROM \(leaf.table)
                WHERE \(portion.predicate) AND \(Self.looked) \(asideUnseen ? "" : "AND \(Self.isBulky)")
                RETURNING \(Self.columns), released
            ), moved AS (
                \(Self.insert(into: .aside, from: "moving"))
            )
            SELECT (SELECT sum(results)::bigint FROM counted), (SELECT count(*) FROM moved)
            """)
        accepted = Int(rows.integer(0, 0) ?? 0)
        movedAside = Int(rows.integer(0, 1) ?? 0)
    }

    /// Records what the batch says, in the transaction that is open.
    ///
    /// - Returns: What the batch has done, once it is committed. Nil when all of it was aside already and has to wait on, because applications hold its tokens: roll back.
    func settle(
        from leaf: Leaf, _ limits: GuardLimits, on connection: inout Connection
    ) throws(DatabaseError) -> Intake.Pass? {
        var news = TokenNews()
        for (position, verdict) in verdicts.enumerated() { news.add(verdict, of: results[position], at: position) }
        let outcome = try news.record(limits, on: &connection)

        var settled = Intake.Pass()
        var counts = ResultCounts()
        var rejected: [(result: SendResult, error: String)] = []
        var held: [HeldResult] = []
        var waiting: [SendResult] = []
        for (position, (result, verdict)) in zip(results, verdicts).enumerated() {
            if let of = outcome.held[position] {
                held.append(HeldResult(result: result, address: of.address, at: of.at, reason: of.reason))
                counts.add(result, verdict)
                continue
            }
            if outcome.waiting.contains(position) || outcome.locked.contains(position) {
                waiting.append(result)
                continue
            }
            // What was held before was counted then.
            if !result.isReleased { counts.add(result, verdict) }
            switch verdict {
            case .unintelligible(let error): rejected.append((result, error))
            case .sendersFault(let reason):
                settled.blame(reason.map(ResultCounts.countable) ?? "status \(result.status ?? 0)", 1)
            case .accepted, .dead, .suspect, .transient: break
            }
        }
        if leaf == .aside, waiting.count == taken { return nil }
        try Self.insert(
            rejected.map(\.result), into: "tokenkeeper.rejected_result", ["error"],
            [.texts(rejected.map(\.error))], on: &connection)
        try Self.insert(
            held.map(\.result), into: "tokenkeeper.held_result", ["topic_id", "token_key", "suspect_at", "reason"],
            try HeldResult.parameters(held, on: &connection), on: &connection)
        try Self.insert(
            waiting, into: "tokenkeeper.send_result_aside", ["leaf", "released"],
            [.int4s(waiting.map { _ in Int32(Leaf.aside.number) }), .bools(waiting.map(\.isReleased))], on: &connection)
        try counts.record(on: &connection)
        settled.accepted = accepted
        settled.rejected = rejected.count
        settled.held = held.count
        settled.turns = outcome.turns
        settled.putAside = waiting.count + movedAside
        settled.recorded = results.count - rejected.count - held.count - waiting.count
        return settled
    }

    /// - Parameter more: The values of the columns that the queue has not, or that are not copied.
    private static func insert(
        _ results: [SendResult], into table: String, _ names: [String], _ more: [Parameter],
        on connection: inout Connection
    ) throws(DatabaseError) {
        if results.isEmpty { return }
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

    /// Moves one row to `rejected_result` on the server, whatever is in it, in the transaction that is open.
    static func reject(
        _ portion: Portion, of leaf: Leaf, error: String, on connection: inout Connection
    ) throws(DatabaseError) {
        _ = try connection.query(
            """
            WITH gone AS (
                DELETE FROM \(leaf.table) WHERE \(portion.predicate) RETURNING \(columns)
            ), counted AS (
                INSERT INTO tokenkeeper.result_count (hour, status, reason, results)
                SELECT \(ResultCounts.hourInSQL), status, '(rejected)', count(*) FROM gone GROUP BY status
            )
            INSERT INTO tokenkeeper.rejected_result (\(columns), error) SELECT \(columns), $1 FROM gone
            """, [.text(error)])
    }
}
