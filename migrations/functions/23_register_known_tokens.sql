-- A step of apply_registrations (23): registrations of known tokens that affect no other token, in one statement.

CREATE OR REPLACE FUNCTION tokenkeeper.register_known_tokens(
    rows tokenkeeper.registration[],
    of_topic integer[],
    token_keys bytea[],
    moments timestamptz[],
    devices text[],
    device_at timestamptz[],
    users text[],
    user_at timestamptz[],
    tags_of integer[],
    tags_at timestamptz[],
    sources bigint[],
    receipt timestamptz,
    OUT unknown integer[],
    OUT dependent integer[],
    OUT busy integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off -- A plan made for a small ledger must not be used for a large one.
SET plan_cache_mode = force_generic_plan -- Another plan would be a copy of all arrays, and no better.
AS $$
BEGIN
    WITH said AS MATERIALIZED (
        -- As in record, a subquery for each token, not a join. A token that is current, or has no device, and stays so, is independent: its
        -- registration affects no other token. Changes of tags go row by row.
        SELECT s.*, l.place, l.is_independent
        FROM unnest(register_known_tokens.of_topic, register_known_tokens.token_keys, register_known_tokens.moments, register_known_tokens.devices,
                    register_known_tokens.device_at, register_known_tokens.users, register_known_tokens.user_at, register_known_tokens.tags_of,
                    register_known_tokens.tags_at, register_known_tokens.sources)
             WITH ORDINALITY AS s (topic_id, token_key, moment, device, device_at, of_user, user_at, tags_of, tags_at, source_id, position)
        LEFT JOIN LATERAL (
            SELECT k.ctid AS place, k.superseded_at IS NULL AND (s.device IS NULL OR s.device = coalesce(k.device_id, ''))
                       AND (s.tags_of IS NULL OR k.has_tag_changes IS NULL) AS is_independent
            FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key OFFSET 0) AS l ON true
    ), old AS MATERIALIZED (
        -- A token that an application has locked is left over.
        SELECT s.position, s.source_id, l.*,
               greatest(l.registered_at, s.moment) AS new_registered_at,
               CASE WHEN s.device IS NULL THEN l.device_at ELSE greatest(l.device_at, s.device_at) END AS new_device_at,
               s.of_user IS NOT NULL
                   AND (l.user_at IS NULL OR (s.user_at, s.of_user COLLATE "C") > (l.user_at, coalesce(l.user_id, ''))) AS user_moves,
               s.of_user COLLATE "C" AS new_user, s.user_at AS new_user_at,
               s.tags_of IS NOT NULL
                   AND (l.tags_at IS NULL OR (s.tags_at, (rows[s.tags_of]).tags COLLATE "C") > (l.tags_at, l.tags)) AS tags_move,
               s.tags_of, s.tags_at AS new_tags_at
        FROM said AS s
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.registered_at, k.suppressed, k.suppressed_since, k.device_id, k.device_at, k.user_id, k.user_at, k.tags, k.tags_at,
                   greatest(k.stale_at, k.suspect_at, k.unregistered_by_app_at) AS invalidated_at
            FROM tokenkeeper.ledger AS k WHERE k.ctid = s.place
            FOR NO KEY UPDATE SKIP LOCKED) AS l
        WHERE s.is_independent
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET registered_at = o.new_registered_at, device_at = o.new_device_at,
            user_id = CASE WHEN o.user_moves THEN nullif(o.new_user, '') ELSE l.user_id END,
            user_at = CASE WHEN o.user_moves THEN o.new_user_at ELSE l.user_at END,
            tags = CASE WHEN o.tags_move THEN (rows[o.tags_of]).tags ELSE l.tags END,
            tags_at = CASE WHEN o.tags_move THEN o.new_tags_at ELSE l.tags_at END,
            suppressed_since = CASE WHEN o.invalidated_at >= o.new_registered_at THEN coalesce(l.suppressed_since, receipt) END
        FROM old AS o
        -- If an application has changed a row since this statement began, its ctid no longer matches: the token is left over.
        WHERE l.ctid = o.place
          AND (o.new_registered_at > o.registered_at OR o.new_device_at IS DISTINCT FROM o.device_at OR o.user_moves OR o.tags_move)
        RETURNING o.position, l.topic_id, l.token_key, l.device_id, l.user_id, o.source_id, l.suppressed, o.suppressed AS was_suppressed,
            o.registered_at AS was_registered_at, l.registered_at, o.invalidated_at
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT c.topic_id, c.token_key, CASE WHEN c.was_registered_at = '-infinity' THEN 'registered' ELSE 'revived' END, 'registration',
               c.device_id, c.user_id, c.source_id, nullif(c.was_registered_at, '-infinity'), c.registered_at, c.invalidated_at, c.invalidated_at
        FROM changed AS c
        WHERE c.was_registered_at = '-infinity' OR (c.was_suppressed AND NOT c.suppressed)
    )
    -- NOT IN is hashed. NOT EXISTS would be a nested loop, because the planner assumes ten rows for an unnested array.
    SELECT coalesce(array_agg(s.position::integer) FILTER (WHERE s.place IS NULL), '{}'),
           coalesce(array_agg(s.position::integer) FILTER (WHERE NOT s.is_independent), '{}'),
           coalesce(array_agg(s.position::integer) FILTER (WHERE s.is_independent AND s.position NOT IN (
               SELECT c.position FROM changed AS c
               UNION ALL
               SELECT o.position FROM old AS o
               WHERE o.new_registered_at = o.registered_at AND o.new_device_at IS NOT DISTINCT FROM o.device_at AND NOT o.user_moves
                 AND NOT o.tags_move)), '{}')
    INTO unknown, dependent, busy FROM said AS s;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register_known_tokens(
    tokenkeeper.registration[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[], timestamptz[], integer[], timestamptz[], bigint[],
    timestamptz) IS
    'Internal: applies registrations of known tokens that affect no other token. Returns the positions of all others: unknown tokens, dependent ones, '
    'which join, leave or regain a device, and those that another session has locked (busy).';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register_known_tokens(
    tokenkeeper.registration[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[], timestamptz[], integer[], timestamptz[], bigint[],
    timestamptz) FROM PUBLIC;
