/// The same durable change as the registrations of a table make, by bare SQL: ledger and history.
enum RegistrationFloor {
    /// - Parameter source: A table with `RegistrationWorkload.columns`.
    static func statements(from source: String) -> String {
        """
        WITH said AS MATERIALIZED (
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(s.token, 'hex') AS token_key, s.registered_at, s.device_id, s.user_id, s.tags
            FROM \(source) AS s JOIN tokenkeeper.topic AS t ON t.topic = s.topic AND t.environment = s.environment
            WHERE NOT s.unregistered
            ORDER BY t.topic_id, token_key, s.registered_at DESC
        ), former AS MATERIALIZED (
            SELECT l.ctid AS place FROM said AS s
            JOIN tokenkeeper.ledger AS l ON l.device_id = s.device_id AND l.topic_id + 0 = s.topic_id
            WHERE l.superseded_at IS NULL AND l.token_key <> s.token_key
        ), superseded AS (
            UPDATE tokenkeeper.ledger AS l SET superseded_at = l.registered_at
            FROM former AS f WHERE l.ctid = f.place
            RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at
        ), suppressed AS (
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) SELECT statement_timestamp(), topic_id, token_key FROM superseded
        ), told_of_superseded AS (
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, registered_before, registered_after,
                invalidated_after)
            SELECT topic_id, token_key, 'superseded', 'superseded', 'a newer token of the same device', device_id, user_id, registered_at, registered_at,
                   registered_at
            FROM superseded
        ), kept AS (
            INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, device_id, device_at, user_id, user_at, tags, tags_at)
            SELECT topic_id, token_key, registered_at, device_id, CASE WHEN device_id IS NOT NULL THEN registered_at END,
                   user_id, CASE WHEN user_id IS NOT NULL THEN registered_at END, tags, CASE WHEN tags IS NOT NULL THEN registered_at END
            FROM said
            ON CONFLICT (topic_id, token_key) DO UPDATE
            SET registered_at = greatest(l.registered_at, excluded.registered_at), device_at = greatest(l.device_at, excluded.device_at),
                user_id = CASE WHEN excluded.user_at > l.user_at THEN excluded.user_id ELSE l.user_id END,
                user_at = greatest(l.user_at, excluded.user_at),
                tags = CASE WHEN excluded.tags_at > l.tags_at THEN excluded.tags ELSE l.tags END, tags_at = greatest(l.tags_at, excluded.tags_at)
            RETURNING topic_id, token_key, device_id, user_id, registered_at, xmax = 0 AS is_new
        )
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, registered_after)
        SELECT topic_id, token_key, 'registered', 'registration', device_id, user_id, registered_at FROM kept WHERE is_new;
        WITH said AS MATERIALIZED (
            SELECT DISTINCT ON (t.topic_id, token_key) t.topic_id, decode(s.token, 'hex') AS token_key, s.registered_at AS at
            FROM \(source) AS s JOIN tokenkeeper.topic AS t ON t.topic = s.topic AND t.environment = s.environment
            WHERE s.unregistered
            ORDER BY t.topic_id, token_key, s.registered_at DESC
        ), changed AS (
            UPDATE tokenkeeper.ledger AS l SET unregistered_by_app_at = s.at
            FROM said AS s WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key
            RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at, l.unregistered_by_app_at
        ), suppressed AS (
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) SELECT statement_timestamp(), topic_id, token_key FROM changed
        )
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, registered_before, registered_after,
            invalidated_after)
        SELECT topic_id, token_key, 'unregistered_by_app', 'unregistered_by_app', device_id, user_id, registered_at, registered_at,
               unregistered_by_app_at
        FROM changed
        """
    }
}
