internal import Synchronization
internal import TokenModel

/// The topics that have a label of their own in metrics. All others share the label `other`: a sender may write anything as a topic, and
/// each label costs memory here and in the monitoring system for as long as it keeps data.
///
/// A topic gets a label if it has a registered token or a policy, in either environment, and keeps it until the process ends: a counter
/// must not move from one label to another more often than that.
public final class TopicLabels: Sendable {
    /// Stands for the topics without a label of their own, and for values that APNs does not have.
    public static let other = "other"

    /// The most topics with a label, and the most bytes that their names take in the page. Topics with more tokens come first.
    ///
    /// A name is in up to 15 samples for each of two environments, besides those of the results: the page stays under 1 MB.
    static let (most, mostBytes) = (150, 7_500)

    private struct State {
        var names: Set<String> = []
        var bytes = 0
        /// Whether the next topic would exceed a limit. Then there is nothing left to look for.
        var isFull = false
        var again = ContinuousClock.now
    }

    private let state = Mutex(State())

    /// The shortest pause between two looks, and the longest. A look takes at most 1 % of the time.
    private static let pause: (shortest: Duration, longest: Duration) = (.seconds(5), .seconds(300))

    public init() {}

    /// The label of a topic: its name, or `other`. Runs no query.
    public func label(of topic: String?) -> String {
        guard let topic else { return Self.other }
        return state.withLock { $0.names.contains(topic) } ? topic : Self.other
    }

    /// The topics with a label of their own, in no order.
    var names: [String] { state.withLock { Array($0.names) } }

    /// Looks for topics to label, if it is time.
    ///
    /// - Throws: Only if the connection is lost. If a lock is in the way, or the query takes a second, or is refused, the next look is
    ///   later.
    public func refresh(
        on connection: inout Connection, at now: ContinuousClock.Instant = .now
    ) throws(DatabaseError) {
        let (known, isDue) = state.withLock { ($0.names, !$0.isFull && now >= $0.again) }
        guard isDue else { return }
        let clock = ContinuousClock()
        let began = clock.now
        defer {
            let pause = max(Self.pause.shortest, began.duration(to: clock.now) * 100)
            state.withLock { $0.again = clock.now + min(pause, Self.pause.longest) }
        }
        do {
            take(try Self.topics(but: known, on: &connection))
        } catch {
            if error.remedy == .reconnect { throw error }
        }
    }

    /// Gives a label to each of these topics, as far as the limits allow. A topic that may be a device token gets none: a program may have
    /// confused the two.
    func take(_ topics: [String]) {
        state.withLock { state in
            for topic in topics where !state.names.contains(topic) && DeviceToken.cut(in: topic) == topic {
                // A long name is left out; shorter ones may still fit.
                let bytes = Self.bytes(topic)
                if state.bytes + bytes > Self.mostBytes { continue }
                state.names.insert(topic)
                state.bytes += bytes
                if state.names.count == Self.most { break }
            }
            state.isFull = state.names.count == Self.most
        }
    }

    /// The length of a name in the page, where a quote, a backslash and a line break take two bytes each.
    private static func bytes(_ topic: String) -> Int {
        topic.utf8.reduce(0) { $0 + (#""\"#.utf8.contains($1) || $1 == UInt8(ascii: "\n") ? 2 : 1) }
    }

    /// The topics with a registered token or a policy, those with most tokens first.
    ///
    /// - Parameter known: Topics to leave out.
    private static func topics(
        but known: Set<String>, on connection: inout Connection
    ) throws(DatabaseError) -> [String] {
        let transaction = BatchTransaction(lockTimeout: .milliseconds(100), statementTimeout: .seconds(1))
        return try connection.transaction(transaction) { connection throws(DatabaseError) in
            try connection.query(
                """
                SELECT t.topic
                FROM tokenkeeper.topic AS t LEFT JOIN (
                    SELECT c.topic_id, sum(c.tokens) AS tokens FROM tokenkeeper.token_count AS c GROUP BY c.topic_id
                    HAVING sum(c.tokens) FILTER (WHERE c.registered) > 0
                ) AS r USING (topic_id)
                WHERE t.topic <> ALL ($1) AND (r.topic_id IS NOT NULL OR num_nonnulls(
                    t.gate, t.suppressed_retention, t.dormant_after, t.guard_allowance, t.guard_max_share, t.prune_allowance,
                    t.prune_max_share, t.background_per_hour, t.max_per_second, t.alerts_per_day, t.confirm_share) > 0)
                GROUP BY t.topic ORDER BY sum(r.tokens) DESC NULLS LAST, t.topic LIMIT $2
                """, [.texts(Array(known)), .int4(Int32(most))]
            ).values()
        }
    }
}
