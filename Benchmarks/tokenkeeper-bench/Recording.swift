/// The durable change that a batch of results makes, as one statement on the server: what the daemon does, without the daemon.
/// The floor and the peers all end in this.
enum Recording {
    /// How every contestant's transaction begins: like the daemon's.
    static let begin = "BEGIN; SET LOCAL synchronous_commit = off;"

    /// - Parameters:
    ///   - source: A relation with the columns environment, topic, token, status, body, all text.
    ///   - prelude: Common table expressions that come first, each followed by a comma.
    /// - Returns: A statement that returns how many results it has counted.
    static func statement(from source: String, after prelude: String = "") -> String {
        """
        WITH \(prelude) failed AS MATERIALIZED (
            SELECT f.environment, f.topic, f.token, f.status::integer AS status, f.body ->> 'reason' AS reason,
                   to_timestamp((f.body ->> 'timestamp')::double precision / 1000) AS at
            FROM (SELECT environment, topic, token, status, body::jsonb AS body FROM \(source) WHERE status <> '200' OFFSET 0) AS f
        ), counted AS (
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
            SELECT date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00'), c.* FROM (
                SELECT environment, topic, 200, NULL, count(*) FROM \(source) WHERE status = '200' GROUP BY 1, 2
                UNION ALL
                SELECT environment, topic, status, reason, count(*) FROM failed GROUP BY 1, 2, 3, 4) AS c
            RETURNING results
        ), said AS (
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(f.token, 'hex') AS token_key, f.at, f.reason
            FROM failed AS f JOIN tokenkeeper.topic AS t ON t.topic = f.topic AND t.environment = f.environment
            WHERE f.status = 410
            ORDER BY t.topic_id, token_key, f.at DESC, f.reason COLLATE "C" DESC
        ), old AS MATERIALIZED (
            SELECT s.topic_id, s.token_key, s.at, s.reason, l.ctid AS place, l.registered_at, l.suppressed,
                   l.device_id, l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at
            FROM said AS s LEFT JOIN tokenkeeper.ledger AS l ON l.topic_id = s.topic_id AND l.token_key = s.token_key
            WHERE l.stale_at IS NULL OR (s.at, s.reason COLLATE "C") > (l.stale_at, l.stale_reason)
        ), added AS (
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, stale_at, stale_reason)
            SELECT o.topic_id, o.token_key, o.at, o.reason FROM old AS o WHERE o.place IS NULL
            ON CONFLICT DO NOTHING
        ), changed AS (
            UPDATE tokenkeeper.ledger AS l
            SET stale_at = o.at, stale_reason = o.reason
            FROM old AS o WHERE l.ctid = o.place
        ), suppressed AS (
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
            SELECT statement_timestamp(), o.topic_id, o.token_key FROM old AS o
            WHERE o.place IS NULL OR NOT o.suppressed AND greatest(o.at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at) >= o.registered_at
            ON CONFLICT DO NOTHING
        ), told AS (
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
                registered_before, registered_after, invalidated_before, invalidated_after)
            SELECT o.topic_id, o.token_key,
                   CASE WHEN o.place IS NULL OR greatest(o.at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at) >= o.registered_at
                        THEN 'invalidated' ELSE 'late_feedback_ignored' END,
                   'stale', o.reason, o.device_id, nullif(o.registered_at, '-infinity'), nullif(o.registered_at, '-infinity'),
                   greatest(o.stale_at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at),
                   greatest(o.at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at)
            FROM old AS o WHERE NOT coalesce(o.suppressed, false)
        )
        SELECT coalesce(sum(results), 0) FROM counted
        """
    }

    /// The ledger alone, with what the gate reads, and without history and counts: what a bare bulk upsert of the same results costs.
    static func upsert(from source: String) -> String {
        """
        WITH kept AS (
            INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, stale_at, stale_reason)
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(f.token, 'hex') AS token_key,
                   to_timestamp((f.body ->> 'timestamp')::double precision / 1000) AS at, f.body ->> 'reason' AS reason
            FROM (SELECT environment, topic, token, body::jsonb AS body FROM \(source) WHERE status = '410' OFFSET 0) AS f
            JOIN tokenkeeper.topic AS t ON t.topic = f.topic AND t.environment = f.environment
            ORDER BY t.topic_id, token_key, at DESC, reason DESC
            ON CONFLICT (topic_id, token_key) DO UPDATE
            SET stale_at = excluded.stale_at, stale_reason = excluded.stale_reason
            WHERE l.stale_at IS NULL OR (excluded.stale_at, excluded.stale_reason) > (l.stale_at, l.stale_reason)
            RETURNING topic_id, token_key, suppressed
        )
        INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
        SELECT statement_timestamp(), topic_id, token_key FROM kept WHERE suppressed
        ON CONFLICT DO NOTHING
        """
    }
}
