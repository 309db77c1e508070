-- A step of apply_registrations (23): logouts that the guard lets through, in sets.

CREATE OR REPLACE FUNCTION tokenkeeper.unregister_tokens(
    of_row integer[],
    of_topic integer[],
    token_keys bytea[],
    moments timestamptz[],
    queued_at timestamptz[],
    sources bigint[],
    suppresses boolean[],
    receipt timestamptz,
    patience timestamptz) RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    k_topic integer[];
    k_key bytea[];
    k_moment timestamptz[];
    k_source bigint[];
    owned integer[];
    was timestamptz[];
    unknown integer[];
    busy integer[] := '{}';
    not_added integer[];
    waits integer[] := '{}';
BEGIN
    -- The latest of each token.
    SELECT array_agg(g.topic_id), array_agg(g.token_key), array_agg(g.moment), array_agg(g.source_id) INTO k_topic, k_key, k_moment, k_source
    FROM (SELECT u.topic_id, u.token_key, max(u.moment) AS moment,
                 CASE WHEN count(*) = count(u.source_id) AND min(u.source_id) = max(u.source_id) THEN min(u.source_id) END AS source_id
          FROM unnest(unregister_tokens.of_topic, unregister_tokens.token_keys, unregister_tokens.moments, unregister_tokens.sources)
               AS u (topic_id, token_key, moment, source_id)
          GROUP BY 1, 2 ORDER BY 1, 2) AS g;
    IF NOT isfinite(patience) THEN
        BEGIN
            PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = k_topic[1] AND l.token_key = k_key[1] FOR NO KEY UPDATE;
        EXCEPTION WHEN lock_not_available THEN
            RETURN of_row;
        END;
    END IF;
    SELECT coalesce(array_agg(s.position::integer), '{}'), coalesce(array_agg(l.unregistered_by_app_at), '{}') INTO owned, was
    FROM unnest(k_topic, k_key) WITH ORDINALITY AS s (topic_id, token_key, position)
    CROSS JOIN LATERAL (
        SELECT k.unregistered_by_app_at FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
        FOR NO KEY UPDATE SKIP LOCKED) AS l;
    IF cardinality(owned) < cardinality(k_key) THEN
        SELECT coalesce(array_agg(c.position) FILTER (WHERE NOT c.is_known), '{}'), coalesce(array_agg(c.position) FILTER (WHERE c.is_known), '{}')
        INTO unknown, busy
        FROM (SELECT s.position::integer AS position,
                     -- Not EXISTS, which may be hashed: that would read the whole table.
                     coalesce((SELECT true FROM tokenkeeper.ledger AS l WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key), false) AS is_known
              FROM unnest(k_topic, k_key) WITH ORDINALITY AS s (topic_id, token_key, position)
              WHERE s.position NOT IN (SELECT unnest(owned)) OFFSET 0) AS c;
        IF unknown <> '{}' THEN
            SELECT a.dependent || a.waiting INTO not_added
            FROM (SELECT array_agg(k_topic[p]) AS of_topic, array_agg(k_key[p]) AS token_keys, array_agg(k_moment[p]) AS moments,
                         array_agg(k_source[p]) AS sources
                  FROM unnest(unknown) AS p) AS w
            CROSS JOIN LATERAL tokenkeeper.add_tokens(NULL, w.of_topic, w.token_keys, w.moments, true, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                                                      w.sources, receipt, patience) AS a;
            busy := busy || ARRAY(SELECT unknown[p] FROM unnest(not_added) AS p);
        END IF;
        IF busy <> '{}' THEN
            waits := ARRAY(
                SELECT u.n FROM unnest(unregister_tokens.of_row, unregister_tokens.of_topic, unregister_tokens.token_keys) AS u (n, topic_id, token_key)
                WHERE (u.topic_id, u.token_key) IN (SELECT k_topic[b], k_key[b] FROM unnest(busy) AS b));
        END IF;
    END IF;

    PERFORM tokenkeeper.note_unregistrations(
        array_agg(u.topic_id), array_agg(u.token_key), array_agg(u.moment), array_agg(u.queued_at), array_agg(u.source_id), array_agg(u.suppresses),
        array_agg(b.was))
    FROM unnest(unregister_tokens.of_row, unregister_tokens.of_topic, unregister_tokens.token_keys, unregister_tokens.moments,
                unregister_tokens.queued_at, unregister_tokens.sources, unregister_tokens.suppresses)
         AS u (n, topic_id, token_key, moment, queued_at, source_id, suppresses)
    LEFT JOIN (SELECT k_topic[o.position] AS topic_id, k_key[o.position] AS token_key, o.was FROM unnest(owned, was) AS o (position, was)) AS b
        USING (topic_id, token_key)
    WHERE u.n NOT IN (SELECT unnest(waits))
    HAVING count(*) > 0;

    WITH old AS MATERIALIZED (
        SELECT l.*, k_moment[p] AS moment, k_source[p] AS source_id
        FROM unnest(owned) AS p
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.suppressed, k.unregistered_by_app_at
            FROM tokenkeeper.ledger AS k WHERE k.topic_id = k_topic[p] AND k.token_key = k_key[p] OFFSET 0) AS l
        WHERE l.unregistered_by_app_at >= k_moment[p] IS NOT TRUE
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET unregistered_by_app_at = o.moment,
            suppressed_since = CASE WHEN o.suppressed THEN l.suppressed_since WHEN o.moment >= l.registered_at THEN receipt END
        FROM old AS o WHERE l.ctid = o.place
        RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at, l.suppressed, l.stale_at, l.suspect_at, l.unregistered_by_app_at,
            l.superseded_at, o.suppressed AS was_suppressed, o.unregistered_by_app_at AS was_unregistered_at, o.source_id
    )
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT c.topic_id, c.token_key, CASE WHEN c.suppressed THEN 'unregistered_by_app' ELSE 'late_feedback_ignored' END, 'unregistered_by_app',
           c.device_id, c.user_id, c.source_id, nullif(c.registered_at, '-infinity'), nullif(c.registered_at, '-infinity'),
           greatest(c.stale_at, c.suspect_at, c.was_unregistered_at, c.superseded_at),
           greatest(c.stale_at, c.suspect_at, c.unregistered_by_app_at, c.superseded_at)
    FROM changed AS c
    -- No event if it was already suppressed for the same cause.
    WHERE NOT (c.was_suppressed
               AND tokenkeeper.cause_of(c.stale_at, c.suspect_at, c.unregistered_by_app_at, c.superseded_at)
                   = tokenkeeper.cause_of(c.stale_at, c.suspect_at, c.was_unregistered_at, c.superseded_at));
    RETURN waits;
END
$$;
COMMENT ON FUNCTION tokenkeeper.unregister_tokens(
    integer[], integer[], bytea[], timestamptz[], timestamptz[], bigint[], boolean[], timestamptz, timestamptz) IS
    'Internal: applies logouts that the guard lets through. Returns the elements of of_row whose tokens another session has locked or is adding.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.unregister_tokens(
    integer[], integer[], bytea[], timestamptz[], timestamptz[], bigint[], boolean[], timestamptz, timestamptz) FROM PUBLIC;
