/// A gauge of the database that has a value for each topic.
///
/// The raw value is the metric's name, without `tokenkeeper_database_`.
public enum TopicGauge: String, CaseIterable, Sendable {
    /// Tokens; the detail is their state. A count older than a day, which the guard does not trust either, is left out.
    case tokens
    /// 1 while the mass-failure guard holds the suspects of the topic, otherwise 0.
    case guardTripped = "guard_tripped"
    /// 1 while sending to the topic is paused, otherwise 0.
    case topicPaused = "topic_paused"
    /// Tokens that the last sweep was due to prune and refused to. Topics that it did not refuse are left out.
    case sweepRefusedTokens = "sweep_refused_tokens"
    /// Requests of campaigns that were addressed and have not ended. Topics without an open campaign are left out.
    case campaignRequests = "campaign_requests"
    /// Since when the longest waiting request, or a campaign that no daemon can send, is due, in seconds since 1970. Topics without a due request, and paused ones, are left out.
    case outboxOldestDue = "outbox_oldest_due_timestamp_seconds"
    /// Active tokens that newly turned stale; the detail is `hour` or `day`, as in the view `stale_share`. Topics without any are left out.
    case newlyStaleTokens = "newly_stale_tokens"
    /// The same as a share of the active tokens, from 0 to 1.
    case newlyStaleShare = "newly_stale_share"
    /// 1 while the daemons warn that far more tokens than usual turn stale, otherwise 0.
    case staleWave = "stale_wave"

    /// The label of the detail.
    public var detailLabel: String? {
        switch self {
        case .tokens: "state"
        case .newlyStaleTokens, .newlyStaleShare: "window"
        case .guardTripped, .topicPaused, .sweepRefusedTokens, .campaignRequests, .outboxOldestDue, .staleWave: nil
        }
    }

    /// Returns environment, topic, detail and value of each sample, in order.
    ///
    /// $1 has the topics with a label, $2 is the label that all others share.
    var query: String {
        """
        SELECT CASE WHEN g.environment IN ('production', 'sandbox') THEN g.environment ELSE $2 END, coalesce(l.topic, $2),
               g.detail::text, \(aggregate)(g.value)::float8
        FROM (\(statement)) AS g (environment, topic, detail, value) LEFT JOIN unnest($1::text[]) AS l (topic) ON l.topic = g.topic
        GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
        """
    }

    /// What stands for all topics that share a label: for a state, the worst.
    private var aggregate: String {
        switch self {
        case .tokens, .sweepRefusedTokens, .campaignRequests, .newlyStaleTokens: "sum"
        case .guardTripped, .topicPaused, .newlyStaleShare, .staleWave: "max"
        case .outboxOldestDue: "min"
        }
    }

    /// Has the columns environment, topic, detail and value.
    private var statement: String {
        switch self {
        case .tokens:
            """
            SELECT t.environment, t.topic, c.state, sum(c.tokens)::bigint
            FROM tokenkeeper.token_count AS c JOIN tokenkeeper.topic AS t USING (topic_id)
            GROUP BY t.environment, t.topic, c.state
            """
        case .guardTripped:
            """
            SELECT t.environment, t.topic, NULL,
                   CASE WHEN EXISTS (SELECT FROM tokenkeeper.tripped_guard AS g WHERE g.topic_id = t.topic_id) THEN 1 ELSE 0 END
            FROM tokenkeeper.topic AS t
            """
        case .topicPaused:
            """
            SELECT t.environment, t.topic, NULL, 0 FROM tokenkeeper.topic AS t
            UNION ALL
            SELECT p.environment, p.topic, NULL, 1 FROM tokenkeeper.paused_topic AS p
            """
        case .sweepRefusedTokens:
            """
            SELECT s.environment, s.topic, NULL, s.tokens FROM tokenkeeper.sweep_topic AS s
            WHERE s.refused AND s.run_id = (
                SELECT r.run_id FROM tokenkeeper.sweep_run AS r
                WHERE r.outcome IN ('finished', 'failed', 'interrupted') AND NOT r.dry_run ORDER BY r.run_id DESC LIMIT 1)
            """
        case .campaignRequests:
            """
            SELECT p.environment, p.topic, NULL, p.waiting FROM tokenkeeper.campaign_progress AS p
            WHERE p.ended_at IS NULL AND p.state <> 'ended'
            """
        case .outboxOldestDue:
            """
            SELECT s.environment, s.topic, NULL, extract(epoch FROM s.due_at)
            FROM tokenkeeper.waiting_topics() AS s
            WHERE s.due_at <= clock_timestamp() AND NOT EXISTS (
                SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = s.topic AND p.environment = s.environment)
            UNION ALL
            SELECT c.environment, c.topic, NULL, extract(epoch FROM w.due_at)
            FROM tokenkeeper.campaign_wait AS w JOIN tokenkeeper.campaign AS c USING (campaign_id) WHERE w.needs_help
            """
        case .newlyStaleTokens: Self.newlyStale("newly_stale")
        case .newlyStaleShare: Self.newlyStale("share")
        case .staleWave:
            """
            SELECT t.environment, t.topic, NULL, CASE WHEN w.topic_id IS NULL THEN 0 ELSE 1 END
            FROM tokenkeeper.topic AS t LEFT JOIN tokenkeeper.stale_wave AS w USING (topic_id)
            """
        }
    }

    private static func newlyStale(_ column: String) -> String {
        """
        SELECT s.environment, s.topic, s.period, s.\(column) FROM tokenkeeper.stale_share AS s
        WHERE s.newly_stale > 0 AND s.\(column) IS NOT NULL
        """
    }
}
