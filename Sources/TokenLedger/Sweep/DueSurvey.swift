internal import TokenModel

/// Counts the tokens that are due, in slices, before anything is deleted. No statement reads all of a large topic.
///
/// Suppressed tokens are found by an index, topic by topic. Dormant tokens are in no index: `findDormant` reads the ledger once.
struct DueSurvey {
    let sweep: Sweep
    /// How many tokens of a topic sweeps have pruned within the last day without force, by the topic's number.
    private let prunedToday: [Int32: Int64]
    /// The dormant tokens that `findDormant` has counted, by the topic's number.
    private(set) var dormant: [Int32: DueTokens.Cause] = [:]
    /// The pages of the ledger on which they lie.
    private(set) var dormantPages: [Range<Int>] = []

    init(_ sweep: Sweep, on connection: inout Connection) throws(DatabaseError) {
        self.sweep = sweep
        let pruned = try connection.query(
            """
            SELECT t.topic_id, sum(s.pruned)::bigint
            FROM tokenkeeper.sweep_run AS r
            JOIN tokenkeeper.sweep_topic AS s USING (run_id)
            JOIN tokenkeeper.topic AS t ON t.topic = s.topic AND t.environment = s.environment
            WHERE NOT r.forced AND r.started_at > now() - interval '1 day' AND s.pruned > 0
            GROUP BY 1
            """
        ).decode { row throws(DatabaseError) in (try row.read(Int32.self), try row.read(Int64.self)) }
        prunedToday = Dictionary(uniqueKeysWithValues: pruned)
    }

    /// Which of some topics have any suppressed token due: one index lookup per topic. All of them, if the lookups take too long.
    func withAnyDue(
        _ topics: ArraySlice<DueTokens.Topic>, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Set<Int32> {
        do {
            return try sweep.step(settings: Sweep.byIndex, on: &connection, while: goesOn) { connection, _ in
                Set(
                    try connection.query(
                        """
                        SELECT a.topic_id FROM unnest($1, $2) AS a (topic_id, before)
                        WHERE EXISTS (SELECT FROM tokenkeeper.suppression AS s WHERE s.topic_id + 0 = a.topic_id AND s.since < a.before)
                        """, [.int4s(topics.map(\.number)), .instants(topics.map(\.suppressedBefore))]
                    ).values(Int32.self))
            }
        } catch let error as DatabaseError where error.remedy == .retry {
            return Set(topics.map(\.number))
        }
    }

    /// The due tokens of a topic, and whether they are too many to prune.
    ///
    /// - Parameter suppressed: Whether any suppressed token may be due.
    func due(
        in topic: DueTokens.Topic, suppressed: Bool, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> DueTokens {
        var due = DueTokens(in: topic)
        // The rows of a slice. From the disk, a row takes up to 2 ms, and what was in memory of one topic need not be of the next.
        var rows = SliceSize(500, in: 50...100_000)
        if suppressed, try !addSuppressedAtOnce(to: &due, &rows, on: &connection, while: goesOn) {
            try addSuppressedInSlices(to: &due, &rows, on: &connection, while: goesOn)
        }
        if let dormant = dormant[topic.number] { due.add(dormant) }
        let today = prunedToday[topic.number] ?? 0
        if !sweep.lease.forced, due.isLimited(today: today) {
            due.limit(
                ofTokens: try connection.query(
                    "SELECT coalesce(sum(c.tokens), 0)::bigint FROM tokenkeeper.token_count AS c WHERE c.topic_id = $1",
                    [.int4(topic.number)]
                ).value(), today: today)
        }
        return due
    }

    /// Adds the suppressed tokens that are due in a topic, in one statement: of up to twice as many each time, while that is quick.
    ///
    /// - Returns: False if there are more than fit into one slice. Then nothing was added.
    private func addSuppressedAtOnce(
        to due: inout DueTokens, _ rows: inout SliceSize, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> Bool {
        var tried = 0
        while rows.value > tried {
            let (found, size) = try suppressed(in: due.topic, &rows, on: &connection, while: goesOn)
            if found.reduce(0, { $0 + $1.tokens }) < size {
                for cause in found { due.add(cause) }
                return true
            }
            // After a time-out, the size was smaller.
            tried = max(tried, size)
        }
        return false
    }

    /// - Returns: The suppressed tokens that are due in a topic, at most as many as the size of the slice.
    private func suppressed(
        in topic: DueTokens.Topic, _ rows: inout SliceSize, on connection: inout Connection, while goesOn: () -> Bool
    ) throws -> (found: [DueTokens.Cause], size: Int) {
        try sweep.slice(&rows, settings: Sweep.byIndex, on: &connection, while: goesOn) { connection, _, size in
            let found = try connection.query(
                """
                SELECT s.cause, count(*), (array_agg(s.digits))[1:5]
                FROM (SELECT tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS cause,
                             encode(substring(l.token_key FROM 1 FOR 4), 'hex') AS digits
                      FROM (SELECT d.topic_id, d.token_key FROM tokenkeeper.suppression AS d WHERE d.topic_id + 0 = $1 AND d.since < $2 LIMIT $3) AS d
                      CROSS JOIN LATERAL (
                          SELECT k.* FROM tokenkeeper.ledger AS k WHERE k.topic_id = d.topic_id AND k.token_key = d.token_key OFFSET 0) AS l) AS s
                GROUP BY 1 ORDER BY 1
                """, [.int4(topic.number), .instant(topic.suppressedBefore), .int8(Int64(size))]
            ).decode { row throws(DatabaseError) in
                DueTokens.Cause(name: try row.read(), tokens: try row.read(), samples: try row.read())
            }
            return (found, size)
        }
    }

    /// Adds the suppressed tokens that are due in a topic, in the order of the key. The order of the instant would not do: a
    /// million tokens may be suppressed since the same instant. The index holds only suppressed tokens, and most of them are due
    /// here.
    private func addSuppressedInSlices(
        to due: inout DueTokens, _ rows: inout SliceSize, on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let topic = due.topic
        // Kept per slice: a slice that fails at its end is counted again.
        var slices: [String: [DueTokens.Cause]] = [:]
        try sweep.eachSlice(after: "", &rows, on: &connection, while: goesOn) { connection, _, after, size in
            var last: String?
            let causes: [DueTokens.Cause] = try connection.query(
                """
                WITH met AS MATERIALIZED (
                    SELECT d.token_key, d.since < $2 AS due,
                           tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS cause
                    FROM (SELECT s.* FROM tokenkeeper.suppression AS s
                          WHERE s.topic_id = $1 AND s.token_key > decode($3, 'hex') ORDER BY s.token_key LIMIT $4) AS d
                    CROSS JOIN LATERAL (
                        SELECT k.* FROM tokenkeeper.ledger AS k WHERE k.topic_id = d.topic_id AND k.token_key = d.token_key OFFSET 0) AS l
                )
                SELECT m.cause, count(*) FILTER (WHERE m.due),
                       coalesce((array_agg(encode(substring(m.token_key FROM 1 FOR 4), 'hex')) FILTER (WHERE m.due))[1:5], '{}'),
                       (SELECT encode(e.token_key, 'hex') FROM met AS e ORDER BY e.token_key DESC LIMIT 1)
                FROM met AS m GROUP BY 1 ORDER BY 1
                """, [.int4(topic.number), .instant(topic.suppressedBefore), .text(after), .int8(Int64(size))]
            ).decode { row throws(DatabaseError) in
                let cause = DueTokens.Cause(name: try row.read(), tokens: try row.read(), samples: try row.read())
                last = try row.read()
                return cause
            }
            slices[after] = causes
            return last
        }
        for (_, causes) in slices.sorted(by: { $0.key < $1.key }) {
            for cause in causes { due.add(cause) }
        }
    }

    /// Counts the dormant tokens of all topics at once. No index contains them, so this reads the ledger from its first page to
    /// its last.
    mutating func findDormant(
        in topics: [DueTokens.Topic], on connection: inout Connection, while goesOn: () -> Bool
    ) throws {
        let topics = topics.filter { $0.dormantBefore != nil }
        if topics.isEmpty { return }
        let retentions: [Parameter] = [.int4s(topics.map(\.number)), .instants(topics.map(\.dormantBefore))]
        var (found, places): ([Int32: DueTokens.Cause], [Range<Int>]) = ([:], [])
        try sweep.eachSlice(of: "tokenkeeper.ledger", largest: 8192, on: &connection, while: goesOn) {
            connection, _, pages in
            let due = try connection.query(
                """
                SELECT l.topic_id, count(*),
                       (array_agg(encode(substring(l.token_key FROM 1 FOR 4), 'hex')))[1:5]
                FROM tokenkeeper.ledger AS l JOIN unnest($1, $2) AS p (topic_id, before) ON p.topic_id = l.topic_id
                WHERE \(Sweep.on(pages, alias: "l"))
                  AND NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < p.before
                GROUP BY 1
                """, retentions
            ).decode { row throws(DatabaseError) in
                (
                    topic: try row.read(Int32.self),
                    cause: DueTokens.Cause(name: "dormant", tokens: try row.read(), samples: try row.read())
                )
            }
            for (topic, cause) in due { found[topic, default: DueTokens.Cause(name: "dormant")].add(cause) }
            if !due.isEmpty { places.append(pages) }
        }
        (dormant, dormantPages) = (found, places)
    }
}
