internal import TokenModel

/// How many results of each kind a batch has, for `tokenkeeper.result_stat`. The 200s are counted on the server.
struct ResultCounts {
    private var kinds: [ResultKind] = []
    private var numbers: [ResultKind: Int] = [:]
    /// The kind of each result, by its row in the batch.
    private var kindOf: [Int32] = []

    /// Notes the kind of the next row's result. Whether it counts is known once the batch is recorded.
    mutating func note(_ result: SendResult, _ verdict: Verdict) {
        let kind =
            if case .unintelligible = verdict {
                // Garbage must not become a row for each of its spellings.
                ResultKind(status: Self.countable(result.statusCode), reason: verdict.reason)
            } else {
                ResultKind(
                    environment: Self.beginning(of: result.environment ?? Environment.production.rawValue, 20),
                    topic: result.topic.flatMap(Self.countableTopic),
                    status: result.statusCode, reason: verdict.reason.map(Self.countable))
            }
        // Most results are of the same kind as the one before them.
        if let last = kindOf.last, kinds[Int(last)] == kind { return kindOf.append(last) }
        kindOf.append(number(of: kind))
    }

    private mutating func number(of kind: ResultKind) -> Int32 {
        let number = numbers[kind] ?? kinds.count
        if number == kinds.count {
            kinds.append(kind)
            numbers[kind] = number
        }
        return Int32(number)
    }

    /// Notes that the rejected result in this row is not kept.
    mutating func isNotKept(_ row: Int) {
        var kind = kinds[Int(kindOf[row])]
        kind.reason = Verdict.rejectedNotKept
        kindOf[row] = number(of: kind)
    }

    /// A status that HTTP could have, or nil: a sender must not create a row for each of four billion numbers.
    static func countable(_ status: Int32?) -> Int32? { status.flatMap { (100...999).contains($0) ? $0 : nil } }

    /// A reason as it is counted.
    static func countable(_ reason: String) -> String { Verdict.countable(reason) }

    /// A topic as it is counted; nil for a token. That of a 200 may be anything.
    private static func countableTopic(_ topic: String) -> String? {
        Topic.isToken(topic.utf8.span) ? nil : beginning(of: topic, Topic.maximumLength)
    }

    private static func beginning(of text: String, _ length: Int) -> String {
        text.utf8.count <= length ? text : String(text.prefix(length))
    }

    /// Writes the counts in the open transaction.
    ///
    /// - Parameter counted: The rows whose results count.
    /// - Returns: The counts. They count once the transaction is committed.
    func record(_ counted: [Int], on connection: inout Connection) throws(DatabaseError) -> [ResultCount] {
        var results = [Int64](repeating: 0, count: kinds.count)
        for row in counted { results[Int(kindOf[row])] += 1 }
        let met = kinds.indices.filter { results[$0] > 0 }
        if met.isEmpty { return [] }
        _ = try connection.query(
            """
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
            SELECT \(Self.hourInSQL), c.* FROM unnest($1, $2, $3, $4, $5) AS c
            """,
            [
                .texts(met.map { kinds[$0].environment }), .texts(met.map { kinds[$0].topic }),
                .int4s(met.map { kinds[$0].status }), .texts(met.map { kinds[$0].reason }),
                .int8s(met.map { results[$0] }),
            ])
        return met.map { ResultCount(kind: kinds[$0], results: Int(results[$0])) }
    }

    /// An INSERT that counts 200s on the server and returns environment, topic and number of each kind. A topic that is a token is not
    /// written down.
    ///
    /// - Parameter rows: A relation with the columns environment and topic, with or without a WHERE clause.
    static func insertAccepted(of rows: String) -> String {
        """
        INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
        SELECT \(hourInSQL), coalesce(left(environment, 20), 'production'),
               CASE WHEN octet_length(topic) < 64 OR NOT tokenkeeper.is_token(topic) THEN left(topic, 512) END, 200, sum(results)
        FROM (SELECT environment, topic, count(*) AS results FROM \(rows) GROUP BY environment, topic) AS seen GROUP BY 2, 3
        RETURNING environment, topic, results
        """
    }

    /// What a statement says that counts the 200s and moves other rows.
    struct Unread {
        /// The 200s, and the rows that went to another partition.
        var (accepted, moved) = (0, 0)
        var counts: [ResultCount] = []
    }

    /// The most kinds of 200s that a statement returns. A sender may write anything as a topic, and memory stays bounded.
    private static let mostKinds = 1000

    /// A SELECT that returns what `unread` reads. It follows the CTEs `counted`, an `insertAccepted`, and `moved`. Every row has both sums;
    /// its columns for a kind are null if there are no 200s. It adds 50 µs to a batch; a subquery for the largest kinds would add 200.
    static let selectUnread = """
        SELECT coalesce(sum(c.results) OVER (), 0)::bigint, m.moved, c.environment, c.topic, c.results
        FROM (SELECT count(*) AS moved FROM moved) AS m LEFT JOIN counted AS c ON true
        ORDER BY c.results DESC LIMIT \(mostKinds)
        """

    /// Reads the rows of a `selectUnread`. What is not among the largest kinds counts as one without environment and topic.
    static func unread(_ rows: borrowing Rows) throws(DatabaseError) -> Unread {
        var unread = Unread()
        let kinds = try rows.decode { row throws(DatabaseError) -> ResultCount? in
            (unread.accepted, unread.moved) = (try row.read(), try row.read())
            let kind = ResultKind(environment: try row.read(), topic: try row.read(), status: 200)
            return try row.read(Int?.self).map { ResultCount(kind: kind, results: $0) }
        }
        unread.counts = kinds.compactMap { $0 }
        let rest = unread.counts.reduce(unread.accepted) { $0 - $1.results }
        if rest > 0 { unread.counts.append(ResultCount(kind: ResultKind(status: 200), results: rest)) }
        return unread
    }

    /// The hour in which a result is counted, the same in every time zone.
    static let hourInSQL = "date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00')"
}
