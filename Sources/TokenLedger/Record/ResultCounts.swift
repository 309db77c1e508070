internal import TokenModel

/// How many results of each kind a batch held, for `tokenkeeper.result_stat`. The 200s are counted on the server.
struct ResultCounts {
    private struct Kind: Hashable {
        var environment: String?
        var topic: String?
        var status: Int32?
        var reason: String?
    }

    private var kinds: [Kind] = []
    private var numbers: [Kind: Int] = [:]
    /// The kind of each result, in the order in which they were noted.
    private var kindOf: [Int32] = []

    /// Notes what one result would count as: whether it counts, its recording shows.
    mutating func note(_ result: SendResult, _ verdict: Verdict) {
        let kind =
            if case .unintelligible = verdict {
                // What could not be understood must not become a row for each of its spellings.
                Kind(status: Self.countable(result.status), reason: verdict.reason)
            } else {
                Kind(
                    environment: result.environment ?? Environment.production.rawValue, topic: result.topic,
                    status: result.status, reason: verdict.reason.map(Self.countable))
            }
        // Most are of the kind of the one before them.
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

    /// The reason of rejected results that are counted only.
    static let notKept = "(rejected, not kept)"

    /// Notes of a rejected result, by the order in which it was noted, that it is not kept.
    mutating func isNotKept(_ position: Int) {
        var kind = kinds[Int(kindOf[position])]
        kind.reason = Self.notKept
        kindOf[position] = number(of: kind)
    }

    /// A status that HTTP could have, or nil: a sender must not make a row for each of four billion.
    static func countable(_ status: Int32?) -> Int32? { status.flatMap { (100...999).contains($0) ? $0 : nil } }

    /// A reason as it is counted.
    static func countable(_ reason: String) -> String { Verdict.countable(reason) }

    /// Appends the counts in the transaction that is open.
    ///
    /// - Parameter counted: Which of the results count, by the order in which they were noted.
    func record(_ counted: [Int], on connection: inout Connection) throws(DatabaseError) {
        var results = [Int64](repeating: 0, count: kinds.count)
        for position in counted { results[Int(kindOf[position])] += 1 }
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

    /// An INSERT that counts 200s on the server, and answers how many of each kind.
    ///
    /// - Parameter rows: What has the columns environment and topic of each: a relation, with a condition or without.
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
