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
        var allowance: Int64
        var maxShare: Share

        var words: String { "\(name) (\(environment))" }
    }

    let topic: Topic
    private var causes: [(cause: String, tokens: Int64, samples: [String])] = []
    /// All tokens of the topic; nil when those due are too few to matter.
    private var ofTokens: Int64?
    private var maxTokens: Int64?

    /// So many tokens of each cause are named.
    private static let mostSamples = 5

    init(in topic: Topic) {
        self.topic = topic
    }

    /// How many tokens are due, by all causes.
    var total: Int64 { causes.reduce(0) { $0 + $1.tokens } }

    /// How many of them are due because nobody has registered them again.
    var dormant: Int64 { causes.reduce(0) { $0 + ($1.cause == "dormant" ? $1.tokens : 0) } }

    /// Whether they are more than may be pruned.
    var isRefused: Bool { maxTokens.map { total > $0 } ?? false }

    /// Adds what one slice has found.
    mutating func add(_ cause: String, _ tokens: Int64, _ samples: [String]) {
        if tokens == 0 { return }
        guard let known = causes.firstIndex(where: { $0.cause == cause }) else {
            causes.append((cause, tokens, Array(samples.prefix(Self.mostSamples))))
            return
        }
        causes[known].tokens += tokens
        causes[known].samples = Array((causes[known].samples + samples).prefix(Self.mostSamples))
    }

    /// Whether it matters how many tokens the topic has.
    ///
    /// - Parameter today: How many of its tokens sweeps have pruned within the last day.
    func isLimited(today: Int64) -> Bool {
        topic.maxShare < .percent(100) && total > 0 && total + today > topic.allowance
    }

    /// The limit holds for a day: an hourly sweep shall not take in slices what one is refused.
    mutating func limit(ofTokens: Int64, today: Int64) {
        let share = (ofTokens + today).multipliedFullWidth(by: topic.maxShare.millionths)
        let most = Int64(1_000_000).dividingFullWidth(share).quotient
        self.ofTokens = ofTokens
        maxTokens = max(max(topic.allowance, most) - today, 0)
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
        "\(topic.words): \(total) of \(ofTokens ?? 0) tokens are due, more than \(maxTokens ?? 0)"
    }
}

extension DueTokens.Topic {
    /// All topics, those with nothing due included. The instants are of now, and hold for the whole sweep: what becomes due
    /// meanwhile has not been counted.
    static func all(_ plan: SweepPlan, on connection: inout Connection) throws(DatabaseError) -> [DueTokens.Topic] {
        let now = try connection.query("SELECT clock_timestamp()").instant(0, 0) ?? .distantPast
        let rows = try connection.query(
            """
            SELECT t.topic_id, t.environment, t.topic,
                   coalesce((extract(epoch FROM t.suppressed_retention) * 1000000)::bigint, $1),
                   nullif(coalesce((extract(epoch FROM t.dormant_after) * 1000000)::bigint, $2), 0),
                   coalesce(t.prune_allowance, $3), coalesce((t.prune_max_share * 1000000)::bigint, $4)
            FROM tokenkeeper.topic AS t ORDER BY t.topic_id
            """,
            [
                .int8(plan.suppressedRetention.microseconds), .int8(plan.dormantAfter?.microseconds),
                .int8(plan.allowance), .int8(plan.maxShare.millionths),
            ])
        return (0..<rows.count).map { row in
            DueTokens.Topic(
                number: Int32(truncatingIfNeeded: rows.integer(row, 0) ?? 0), environment: rows.text(row, 1) ?? "",
                name: rows.text(row, 2) ?? "",
                staleBefore: now.advanced(byMicroseconds: -(rows.integer(row, 3) ?? 0)),
                dormantBefore: rows.integer(row, 4).map { now.advanced(byMicroseconds: -$0) },
                allowance: rows.integer(row, 5) ?? 0,
                maxShare: Share(millionths: rows.integer(row, 6) ?? 0))
        }
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
                maxTokens: rows.integer(row, 6), samples: DueSurvey.words(rows.text(row, 7)))
        }
    }
}
