internal import TokenModel

/// What is due in one topic, found before anything is deleted: too large a share of a topic is refused.
struct DueTokens {
    /// A topic with the retentions and limits in force: its policy's, or else the plan's.
    struct Topic {
        var number: Int32
        var environment: String
        var name: String
        /// What has been suppressed since before this is due.
        var staleBefore: Instant
        /// What has not been registered since before this is due; nil for nothing.
        var dormantBefore: Instant?
        var minTokens: Int64
        var maxShare: Share
    }

    var topic: Topic
    private var causes: [(cause: String, tokens: Int64, samples: [String])] = []
    /// All tokens of the topic; nil when those due are too few to matter.
    private var ofTokens: Int64?
    private var maxTokens: Int64?

    /// How many tokens are due, by all causes.
    var total: Int64 { causes.reduce(0) { $0 + $1.tokens } }

    /// How many of them are due because nobody has registered them again.
    var dormant: Int64 { causes.reduce(0) { $0 + ($1.cause == "dormant" ? $1.tokens : 0) } }

    /// Whether they are more than may be pruned.
    var isRefused: Bool { maxTokens.map { total > $0 } ?? false }

    /// All topics, those with nothing due included. The instants are of now, and hold for the whole sweep: what becomes due
    /// meanwhile has not been counted.
    static func topics(_ plan: SweepPlan, on connection: inout Connection) throws(DatabaseError) -> [Topic] {
        let now = try connection.query("SELECT clock_timestamp()").instant(0, 0) ?? .distantPast
        let rows = try connection.query(
            """
            SELECT t.topic_id, t.environment, t.topic,
                   coalesce((extract(epoch FROM t.stale_retention) * 1000000)::bigint, $1),
                   nullif(coalesce((extract(epoch FROM t.dormant_after) * 1000000)::bigint, $2), 0),
                   coalesce(t.prune_min_tokens, $3), coalesce((t.prune_max_share * 1000000)::bigint, $4)
            FROM tokenkeeper.topic AS t ORDER BY t.topic_id
            """,
            [
                .int8(plan.staleRetention.microseconds), .int8(plan.dormantAfter?.microseconds),
                .int8(plan.minTokens), .int8(plan.maxShare.millionths),
            ])
        return (0..<rows.count).map { row in
            Topic(
                number: Int32(truncatingIfNeeded: rows.integer(row, 0) ?? 0), environment: rows.text(row, 1) ?? "",
                name: rows.text(row, 2) ?? "",
                staleBefore: now.advanced(byMicroseconds: -(rows.integer(row, 3) ?? 0)),
                dormantBefore: rows.integer(row, 4).map { now.advanced(byMicroseconds: -$0) },
                minTokens: rows.integer(row, 5) ?? 0,
                maxShare: Share(millionths: rows.integer(row, 6) ?? 0))
        }
    }

    /// A token that has been suppressed for longer than the retention; $1 is the topic, $2 the instant.
    static let isStale = "l.topic_id = $1 AND l.suppressed AND l.suppressed_since < $2"

    /// A token that no app has registered again since an instant, given as an expression.
    static func isDormant(before: String) -> String {
        "NOT l.suppressed AND l.registered_at > '-infinity' AND l.registered_at < \(before)"
    }

    static let causeInSQL = "tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at)"

    /// Counts what is due, in the transaction that is open.
    init(
        in topic: Topic, forced: Bool, on connection: inout Connection
    ) throws(DatabaseError) {
        self.topic = topic
        let samples = "ARRAY(SELECT left(encode(l.token_key, 'hex'), 8) FROM tokenkeeper.ledger AS l WHERE"
        let stale = try connection.query(
            """
            SELECT d.cause, d.tokens, array_to_string(\(samples) \(Self.isStale) AND \(Self.causeInSQL) = d.cause LIMIT 5), ' ')
            FROM (SELECT \(Self.causeInSQL) AS cause, count(*) AS tokens FROM tokenkeeper.ledger AS l
                  WHERE \(Self.isStale) GROUP BY 1) AS d
            ORDER BY d.cause
            """, [.int4(topic.number), .instant(topic.staleBefore)])
        for row in 0..<stale.count {
            causes.append((stale.text(row, 0) ?? "", stale.integer(row, 1) ?? 0, Self.words(stale.text(row, 2))))
        }
        if let dormantBefore = topic.dormantBefore {
            let isDue = "l.topic_id = $1 AND \(Self.isDormant(before: "$2"))"
            let dormant = try connection.query(
                """
                SELECT count(*), array_to_string(\(samples) \(isDue) LIMIT 5), ' ')
                FROM tokenkeeper.ledger AS l WHERE \(isDue)
                """, [.int4(topic.number), .instant(dormantBefore)])
            if let tokens = dormant.integer(0, 0), tokens > 0 {
                causes.append(("dormant", tokens, Self.words(dormant.text(0, 1))))
            }
        }
        if !forced { try limit(on: &connection) }
    }

    fileprivate static func words(_ text: String?) -> [String] {
        (text ?? "").split(separator: " ").map(String.init)
    }

    /// The limit holds for a day: an hourly sweep shall not take in slices what one is refused.
    private mutating func limit(on connection: inout Connection) throws(DatabaseError) {
        if topic.maxShare >= .percent(100) || total <= 0 { return }
        let today =
            try connection.query(
                """
                SELECT coalesce(sum(s.pruned), 0)::bigint
                FROM tokenkeeper.sweep_topic AS s JOIN tokenkeeper.sweep_run AS r USING (run_id)
                WHERE s.environment = $1 AND s.topic = $2 AND NOT r.forced
                  AND r.started_at > now() - interval '1 day'
                """, [.text(topic.environment), .text(topic.name)]
            ).integer(0, 0) ?? 0
        guard total + today > topic.minTokens else { return }
        let ofTokens =
            try connection.query(
                """
                SELECT coalesce((SELECT sum(c.tokens)::bigint FROM tokenkeeper.token_count AS c WHERE c.topic_id = $1),
                                (SELECT count(*) FROM tokenkeeper.ledger AS l WHERE l.topic_id = $1))
                """, [.int4(topic.number)]
            ).integer(0, 0) ?? 0
        let share = (ofTokens + today).multipliedFullWidth(by: topic.maxShare.millionths)
        let most = Int64(1_000_000).dividingFullWidth(share).quotient
        self.ofTokens = ofTokens
        maxTokens = max(max(topic.minTokens, most) - today, 0)
    }

    /// Writes down what was found, and what is to become of it.
    func note(run: Int64, on connection: inout Connection) throws(DatabaseError) {
        for (cause, tokens, samples) in causes {
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused, of_tokens, max_tokens, samples)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
                """,
                [
                    .int8(run), .text(topic.environment), .text(topic.name), .text(cause), .int8(tokens),
                    .bool(isRefused), .int8(ofTokens), .int8(maxTokens), .texts(samples),
                ])
        }
    }

    /// Why it was refused, with the numbers.
    var refusal: String {
        "\(topic.name) (\(topic.environment)): \(total) of \(ofTokens ?? 0) tokens are due, more than \(maxTokens ?? 0)"
    }
}

extension SweepReport.Topic {
    /// What a sweep has written down.
    static func all(of run: Int64, on connection: inout Connection) throws(DatabaseError) -> [SweepReport.Topic] {
        let rows = try connection.query(
            """
            SELECT environment, topic, cause, tokens, refused, of_tokens, max_tokens, array_to_string(samples, ' ')
            FROM tokenkeeper.sweep_topic WHERE run_id = $1 ORDER BY topic, environment, cause
            """, [.int8(run)])
        return (0..<rows.count).map { row in
            SweepReport.Topic(
                environment: rows.text(row, 0) ?? "", topic: rows.text(row, 1) ?? "", cause: rows.text(row, 2) ?? "",
                tokens: rows.integer(row, 3) ?? 0, refused: rows.bool(row, 4) ?? false, ofTokens: rows.integer(row, 5),
                maxTokens: rows.integer(row, 6), samples: DueTokens.words(rows.text(row, 7)))
        }
    }
}
