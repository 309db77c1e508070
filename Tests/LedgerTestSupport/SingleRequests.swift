extension TestDatabase {
    /// Creates `public.queue`, which queues a single request for each sendable token that has one of the tags; or for the tokens of a
    /// device; or for all tokens of the topic. It returns how many.
    public func addQueueFunction() throws {
        try psql(
            """
            CREATE FUNCTION public.queue(
                payload json, topic text, environment text DEFAULT 'production', tags text[] DEFAULT NULL, push_type text DEFAULT NULL,
                priority integer DEFAULT NULL, expiration timestamptz DEFAULT NULL, collapse_id text DEFAULT NULL,
                scheduled_at timestamptz DEFAULT NULL, device_id text DEFAULT NULL, everyone boolean DEFAULT false) RETURNS bigint
            LANGUAGE sql SECURITY DEFINER AS $$
                WITH queued AS (
                    INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id,
                                                          scheduled_at)
                    SELECT t.environment, t.topic, encode(l.token_key, 'hex'), queue.payload::jsonb::json, queue.push_type, queue.priority,
                           queue.expiration, queue.collapse_id, queue.scheduled_at
                    FROM tokenkeeper.topic AS t JOIN tokenkeeper.ledger AS l USING (topic_id)
                    WHERE t.topic = queue.topic AND t.environment = queue.environment AND (NOT l.suppressed OR t.gate = 'observe')
                      AND (l.tags && queue.tags OR l.device_id = queue.device_id OR queue.everyone)
                    ORDER BY l.token_key
                    RETURNING 1
                )
                SELECT count(*) FROM queued
            $$;
            GRANT EXECUTE ON FUNCTION public.queue TO PUBLIC;
            """, user: "postgres")
    }
}
