internal import TokenModel

/// How many tokens are due, counted in slices before anything is deleted: nothing here reads a large topic in one statement.
struct DueSurvey {
    let sweep: Sweep
    /// Of suppressed tokens, by an index.
    private var rows = SliceSize(20_000, in: 50...100_000)

    init(_ sweep: Sweep) {
        self.sweep = sweep
    }

    /// A token that has been suppressed for longer than the retention; $1 is the topic, $2 the instant.
    static let isStale = "l.topic_id = $1 AND l.suppressed AND l.suppressed_since < $2"

    /// A token that no app has registered again since an instant, given as an expression.
    static func isDormant(before: String) -> String {
        "NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < \(before)"
    }

    static let causeInSQL = "tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at)"

    static func words(_ text: String?) -> [String] {
        (text ?? "").split(separator: " ").map(String.init)
    }

    /// Of some topics, those in which any suppressed token is due: one look into the index per topic.
    static func withAnyDue(
        _ topics: ArraySlice<DueTokens.Topic>, on connection: inout Connection
    ) throws(DatabaseError) -> Set<Int32> {
        let rows = try connection.query(
            """
            SELECT a.topic_id FROM unnest($1, $2) AS a (topic_id, before)
            WHERE EXISTS (SELECT FROM tokenkeeper.ledger AS l
                          WHERE l.topic_id = a.topic_id AND l.suppressed AND l.suppressed_since < a.before)
            """, [.int4s(topics.map(\.number)), .instants(topics.map(\.staleBefore))])
        return Set((0..<rows.count).map { Int32(truncatingIfNeeded: rows.integer($0, 0) ?? 0) })
    }

    /// What is due in a topic, and whether that is too much.
    ///
    /// - Parameters:
    ///   - suppressed: Whether any suppressed token may be due.
    ///   - dormant: What nobody has registered again, as counted before.
    ///   - prunedToday: How many of its tokens sweeps have pruned within the last day.
    mutating func due(
        in topic: DueTokens.Topic, suppressed: Bool, dormant: (tokens: Int64, samples: [String])?, prunedToday: Int64,
        on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> DueTokens {
        var due = DueTokens(in: topic)
        if suppressed { try addSuppressed(to: &due, on: &connection, while: goesOn) }
        if let dormant { due.add("dormant", dormant.tokens, dormant.samples) }
        if !sweep.lease.forced, due.isLimited(today: prunedToday) {
            due.limit(ofTokens: try tokens(of: topic, on: &connection, while: goesOn), today: prunedToday)
        }
        return due
    }

    /// Adds the suppressed tokens that are due in a topic: in one statement, or in slices where they are many.
    private mutating func addSuppressed(
        to due: inout DueTokens, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let topic = due.topic
        let (found, isAll) = try sweep.slice(&rows, settings: Sweep.byIndex, on: &connection, while: goesOn) {
            connection, size in
            let found = try connection.query(
                """
                SELECT s.cause, count(*), array_to_string((array_agg(s.digits))[1:5], ' ')
                FROM (SELECT \(Self.causeInSQL) AS cause, encode(substring(l.token_key FROM 1 FOR 4), 'hex') AS digits
                      FROM tokenkeeper.ledger AS l WHERE \(Self.isStale) LIMIT $3) AS s
                GROUP BY 1 ORDER BY 1
                """, [.int4(topic.number), .instant(topic.staleBefore), .int8(Int64(size))])
            let causes = Self.causes(found)
            let isAll = causes.reduce(0) { $0 + $1.tokens } < size
            return ((causes, isAll), [("refused", 0)])
        }
        if isAll {
            for (cause, tokens, samples) in found { due.add(cause, tokens, samples) }
            return
        }
        // By the key, and not by the instant: a million tokens may be suppressed since the same instant. The index knows only
        // suppressed tokens, of which most are due here.
        var last: String? = ""
        while let after = last {
            var next: String?
            let found = try sweep.slice(&rows, settings: Sweep.byIndex, on: &connection, while: goesOn) {
                connection, size in
                let found = try connection.query(
                    """
                    WITH met AS MATERIALIZED (
                        SELECT l.token_key, \(Self.causeInSQL) AS cause, l.suppressed_since < $2 AS due FROM tokenkeeper.ledger AS l
                        WHERE l.topic_id = $1 AND l.suppressed > false AND l.token_key > decode($3, 'hex')
                        ORDER BY l.token_key LIMIT $4
                    )
                    SELECT m.cause, count(*) FILTER (WHERE m.due),
                           array_to_string((array_agg(encode(substring(m.token_key FROM 1 FOR 4), 'hex')) FILTER (WHERE m.due))[1:5], ' '),
                           (SELECT encode(e.token_key, 'hex') FROM met AS e ORDER BY e.token_key DESC LIMIT 1)
                    FROM met AS m GROUP BY 1 ORDER BY 1
                    """, [.int4(topic.number), .instant(topic.staleBefore), .text(after), .int8(Int64(size))])
                next = found.count > 0 ? found.text(0, 3) : nil
                return (Self.causes(found), [("refused", 0)])
            }
            for (cause, tokens, samples) in found { due.add(cause, tokens, samples) }
            last = next
        }
    }

    private static func causes(_ rows: borrowing Rows) -> [(cause: String, tokens: Int64, samples: [String])] {
        (0..<rows.count).map { (rows.text($0, 0) ?? "", rows.integer($0, 1) ?? 0, words(rows.text($0, 2))) }
    }

    /// What nobody has registered again, of all topics at once: no index knows those tokens, so the ledger is read from its first page to
    /// its last.
    ///
    /// - Returns: What is due by topic, and the pages on which it lies.
    func dormant(
        in topics: [DueTokens.Topic], on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> (due: [Int32: (tokens: Int64, samples: [String])], pages: [Range<Int>]) {
        let topics = topics.filter { $0.dormantBefore != nil }
        var due: [Int32: (tokens: Int64, samples: [String])] = [:]
        var places: [Range<Int>] = []
        if topics.isEmpty { return (due, places) }
        let asked: [Parameter] = [.int4s(topics.map(\.number)), .instants(topics.map(\.dormantBefore))]
        try sweep.eachSlice(of: "tokenkeeper.ledger", largest: 8192, on: &connection, while: goesOn) {
            connection, pages in
            let found = try connection.query(
                """
                SELECT l.topic_id, count(*), array_to_string((array_agg(encode(substring(l.token_key FROM 1 FOR 4), 'hex')))[1:5], ' ')
                FROM tokenkeeper.ledger AS l JOIN unnest($1, $2) AS p (topic_id, before) ON p.topic_id = l.topic_id
                WHERE \(Sweep.on(pages, alias: "l.")) AND \(Self.isDormant(before: "p.before"))
                GROUP BY 1
                """, asked)
            for row in 0..<found.count {
                let topic = Int32(truncatingIfNeeded: found.integer(row, 0) ?? 0)
                var sum = due[topic] ?? (0, [])
                sum.tokens += found.integer(row, 1) ?? 0
                if sum.samples.count < 5 { sum.samples += Self.words(found.text(row, 2)) }
                due[topic] = sum
            }
            if found.count > 0 { places.append(pages) }
            return [("refused", 0)]
        }
        return (due, places)
    }

    /// All tokens of a topic: as they were last counted, or else counted in slices of its key.
    private mutating func tokens(
        of topic: DueTokens.Topic, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Int64 {
        let counted = try connection.query(
            "SELECT sum(c.tokens)::bigint FROM tokenkeeper.token_count AS c WHERE c.topic_id = $1",
            [.int4(topic.number)]
        ).integer(0, 0)
        if let counted { return counted }
        var total: Int64 = 0
        var last: String? = ""
        while let after = last {
            last = try sweep.slice(&rows, settings: Sweep.byIndex, on: &connection, while: goesOn) { connection, size in
                let found = try connection.query(
                    """
                    WITH met AS MATERIALIZED (
                        SELECT l.token_key FROM tokenkeeper.ledger AS l
                        WHERE l.topic_id = $1 AND l.token_key > decode($2, 'hex') ORDER BY l.token_key LIMIT $3
                    )
                    SELECT count(*), (SELECT encode(e.token_key, 'hex') FROM met AS e ORDER BY e.token_key DESC LIMIT 1) FROM met
                    """, [.int4(topic.number), .text(after), .int8(Int64(size))])
                total += found.integer(0, 0) ?? 0
                return (found.text(0, 1), [("refused", 0)])
            }
        }
        return total
    }
}
