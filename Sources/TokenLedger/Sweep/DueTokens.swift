internal import TokenModel

/// The due tokens of one topic, counted before any are deleted: a sweep refuses to prune too large a share.
struct DueTokens {
    /// A topic with the retentions and limits in force: from its policy, or otherwise from the plan.
    struct Topic {
        var number: Int32
        var environment: String
        var name: String
        /// Tokens suppressed since before this are due.
        var suppressedBefore: Instant
        /// Tokens last registered before this are due; nil if dormant tokens are never due.
        var dormantBefore: Instant?
        var allowance: Int64
        var maxShare: Share

        var words: String { "\(name) (\(environment))" }
    }

    /// The due tokens of one cause.
    struct Cause {
        /// As in `sweep_topic.cause`.
        var name: String
        var tokens: Int64 = 0
        /// The first digits of some of them.
        var samples: [String] = []
    }

    let topic: Topic
    private var causes: [Cause] = []
    /// The number of all tokens of the topic; nil if too few are due for it to matter.
    private var ofTokens: Int64?
    private var maxTokens: Int64?

    /// The most tokens of each cause to name.
    static let maxSamples = 5

    init(in topic: Topic) {
        self.topic = topic
    }

    /// How many tokens are due, for all causes.
    var total: Int64 { causes.reduce(0) { $0 + $1.tokens } }

    /// How many tokens are due because no app has registered them again.
    var dormant: Int64 { causes.reduce(0) { $0 + ($1.name == "dormant" ? $1.tokens : 0) } }

    /// Whether more tokens are due than may be pruned.
    var isRefused: Bool { maxTokens.map { total > $0 } ?? false }

    /// Adds what one slice has found.
    mutating func add(_ found: Cause) {
        if found.tokens == 0 { return }
        guard let known = causes.firstIndex(where: { $0.name == found.name }) else { return causes.append(found) }
        causes[known].add(found)
    }

    /// Whether it matters how many tokens the topic has.
    ///
    /// - Parameter today: How many of its tokens sweeps have pruned within the last day.
    func isLimited(today: Int64) -> Bool {
        topic.maxShare < .percent(100) && total > 0 && total + today > topic.allowance
    }

    /// Sets the limit. It holds for a day: otherwise hourly sweeps would prune bit by bit what a single sweep may not.
    mutating func limit(ofTokens: Int64, today: Int64) {
        let share = (ofTokens + today).multipliedFullWidth(by: topic.maxShare.millionths)
        let most = Int64(1_000_000).dividingFullWidth(share).quotient
        self.ofTokens = ofTokens
        maxTokens = max(max(topic.allowance, most) - today, 0)
    }

    /// Records what was found, and whether the sweep refuses to prune it.
    func record(run: Int64, on connection: inout Connection) throws(DatabaseError) {
        for cause in causes {
            _ = try connection.query(
                """
                INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused, of_tokens, max_tokens, samples)
                VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
                """,
                [
                    .int8(run), .text(topic.environment), .text(topic.name), .text(cause.name), .int8(cause.tokens),
                    .bool(isRefused), .int8(ofTokens), .int8(maxTokens), .texts(cause.samples),
                ])
        }
    }

    /// Why the topic was refused, with the numbers.
    var refusal: String {
        "\(topic.words): \(total) of \(ofTokens ?? 0) tokens \(total == 1 ? "is" : "are") due, more than \(maxTokens ?? 0)"
    }
}

extension DueTokens.Cause {
    mutating func add(_ more: Self) {
        tokens += more.tokens
        samples = Array((samples + more.samples).prefix(DueTokens.maxSamples))
    }
}

extension DueTokens.Topic {
    /// All topics, including those with nothing due. The instants are as of now and hold for the whole sweep: tokens that become
    /// due later have not been counted.
    static func all(_ plan: SweepPlan, on connection: inout Connection) throws(DatabaseError) -> [DueTokens.Topic] {
        let now = try connection.query("SELECT clock_timestamp()").value(Instant.self)
        return try connection.query(
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
            ]
        ).decode { row throws(DatabaseError) in
            DueTokens.Topic(
                number: try row.read(), environment: try row.read(), name: try row.read(),
                suppressedBefore: now.advanced(byMicroseconds: -(try row.read(Int64.self))),
                dormantBefore: try row.read(Int64?.self).map { now.advanced(byMicroseconds: -$0) },
                allowance: try row.read(), maxShare: Share(millionths: try row.read()))
        }
    }
}
