internal import TokenModel

/// How many results of each kind a batch has, for `tokenkeeper.result_stat`. The 200s are counted on the server.
struct ResultCounts {
    private struct Kind: Hashable {
        var environment: String?
        var topic: String?
        var status: Int32?
        var reason: String?
    }

    private var kinds: [Kind] = []
    private var numbers: [Kind: Int] = [:]
    /// The kind of each result, by its row in the batch.
    private var kindOf: [Int32] = []

    /// Notes the kind of the next row's result. Whether it counts is known once the batch is recorded.
    mutating func note(_ result: SendResult, _ verdict: Verdict) {
        let kind =
            if case .unintelligible = verdict {
                // Garbage must not become a row for each of its spellings.
                Kind(status: Self.countable(result.status), reason: verdict.reason)
            } else {
                Kind(
                    environment: result.environment ?? Environment.production.rawValue, topic: result.topic,
                    status: result.status, reason: verdict.reason.map(Self.countable))
            }
        // Most results are of the same kind as the one before them.
        if let last = kindOf.last, kinds[Int(last)] == kind { return kindOf.append(last) }
        kindOf.append(number(of: kind))
    }

    private mutating func number(of kind: Kind) -> Int32 {
        let number = numbers[kind] ?? kinds.count
        if number == kinds.count {
            kinds.append(kind)
            numbers[kind] = number
        }
        return Int32(number)
    }

    /// The reason under which rejected results that are not kept are counted.
    static let notKept = "(rejected, not kept)"

    /// Notes that the rejected result in this row is not kept.
    mutating func isNotKept(_ row: Int) {
        var kind = kinds[Int(kindOf[row])]
        kind.reason = Self.notKept
        kindOf[row] = number(of: kind)
    }

    /// A status that HTTP could have, or nil: a sender must not create a row for each of four billion numbers.
    static func countable(_ status: Int32?) -> Int32? { status.flatMap { (100...999).contains($0) ? $0 : nil } }

    /// A reason as it is counted.
    static func countable(_ reason: String) -> String { Verdict.countable(reason) }

    /// Writes the counts in the open transaction.
    ///
    /// - Parameter counted: The rows whose results count.
    func record(_ counted: [Int], on connection: inout Connection) throws(DatabaseError) {
        var results = [Int64](repeating: 0, count: kinds.count)
        for row in counted { results[Int(kindOf[row])] += 1 }
        let met = kinds.indices.filter { results[$0] > 0 }
        if met.isEmpty { return }
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
    }

    /// An INSERT that counts 200s on the server and returns how many there are of each kind.
    ///
    /// - Parameter rows: A relation with the columns environment and topic, with or without a WHERE clause.
    static func insertAccepted(of rows: String) -> String {
        """
        INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
        SELECT \(hourInSQL), coalesce(left(environment, 20), 'production'), left(topic, 512), 200, sum(results)
        FROM (SELECT environment, topic, count(*) AS results FROM \(rows) GROUP BY environment, topic) AS seen GROUP BY 2, 3
        RETURNING results
        """
    }

    /// The hour in which a result is counted, the same in every time zone.
    static let hourInSQL = "date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00')"
}
