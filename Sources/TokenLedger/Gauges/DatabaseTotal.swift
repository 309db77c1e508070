/// A gauge of the database that has one value.
///
/// The raw value is the metric's name, without `tokenkeeper_database_`.
public enum DatabaseTotal: String, CaseIterable, Sendable {
    /// Rows of `send_request`, claimed ones included. Here and below, 10,000 means 10,000 or more.
    case outboxRequests = "outbox_requests"
    /// Campaigns that are being sent, or wait for their time or for a daemon.
    case openCampaigns = "open_campaigns"
    /// Rows of `held_result`.
    case heldResults = "held_results"
    /// Rows of `rejected_result`.
    case rejectedResults = "rejected_results"
    /// Rows of `rejected_registration`.
    case rejectedRegistrations = "rejected_registrations"
    /// Rows of `failed_send`.
    case failedSends = "failed_sends"
    /// Daemons that have reported within the last 30 seconds and have not signed off.
    case liveDaemons = "live_daemons"
    /// Rows of `attached_table`.
    case attachedTables = "attached_tables"
    /// Those of them whose changes do not arrive, or some of whose changes could not be queued within a day.
    case brokenAttachments = "broken_attachments"
    /// When the last sweep finished that was not a dry run, in seconds since 1970.
    case lastSweepSuccess = "sweep_last_success_timestamp_seconds"

    /// A query of one number, or of null if there is no value.
    var expression: String {
        switch self {
        case .outboxRequests: Self.rows(of: "send_request")
        case .openCampaigns: "SELECT count(*) FROM tokenkeeper.campaign AS c WHERE c.state IN ('waiting', 'running')"
        case .heldResults: Self.rows(of: "held_result")
        case .rejectedResults: Self.rows(of: "rejected_result")
        case .rejectedRegistrations: Self.rows(of: "rejected_registration")
        case .failedSends: Self.rows(of: "failed_send")
        case .liveDaemons:
            """
            SELECT count(*) FROM tokenkeeper.daemon AS d
            WHERE \(Heartbeat.isLiveInSQL)
            """
        case .attachedTables: "SELECT count(*) FROM tokenkeeper.attachment"
        case .brokenAttachments:
            """
            SELECT count(*) FROM tokenkeeper.attachment AS a
            WHERE a.fault IS NOT NULL OR a.failed_at > clock_timestamp() - interval '1 day'
            """
        case .lastSweepSuccess:
            """
            SELECT extract(epoch FROM r.finished_at) FROM tokenkeeper.sweep_run AS r
            WHERE r.outcome = 'finished' AND NOT r.dry_run ORDER BY r.run_id DESC LIMIT 1
            """
        }
    }

    /// A small table is counted here. For a large one (dead rows included), the status cache has a count; three missed refreshes make it too
    /// old.
    private static func rows(of table: String) -> String {
        """
        SELECT CASE WHEN pg_relation_size('tokenkeeper.\(table)') <= 4194304
                    THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.\(table) LIMIT 10000) AS r)
                    ELSE (SELECT c.rows FROM tokenkeeper.status_cache AS c
                          WHERE c.source = '\(table)' AND c.as_of > clock_timestamp() - 3 * c.pause) END
        """
    }
}
