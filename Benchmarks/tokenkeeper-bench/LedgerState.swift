/// The state that a contestant leaves behind. Contestants that made the same durable change have equal states.
///
/// It omits only the times and transaction ids of the change.
struct LedgerState: Equatable {
    private let text: String

    init(_ session: Session) throws {
        let parts = try [
            """
            SELECT count(*) || ' ' || sum(hash_record_extended(ROW(topic_id, token_key, registered_at, stale_at, stale_reason, suspect_at,
                suspect_reason, unregistered_by_app_at, superseded_at, suppressed, device_id, tags), 0)::numeric)
            FROM tokenkeeper.ledger
            """,
            "SELECT count(*) || ' ' || coalesce(sum(hash_record_extended(ROW(topic_id, token_key), 0)::numeric), 0) FROM tokenkeeper.suppression",
            """
            SELECT count(*) || ' ' || coalesce(sum(hash_record_extended(ROW(topic_id, token_key, event, cause, reason, device_id,
                registered_before, registered_after, invalidated_before, invalidated_after), 0)::numeric), 0)
            FROM tokenkeeper.token_event_log
            """,
            """
            SELECT string_agg(concat_ws(',', s.environment, s.topic, s.status, s.reason, s.results), ';'
                              ORDER BY s.environment, s.topic, s.status, s.reason)
            FROM (SELECT environment, topic, status, reason, sum(results) AS results
                  FROM tokenkeeper.result_count GROUP BY 1, 2, 3, 4) AS s
            """,
            "SELECT count(*) FROM tokenkeeper.rejected_result",
        ].map { try session.text($0) ?? "" }
        text = parts.joined(separator: " | ")
    }

    var description: String { text }
}
