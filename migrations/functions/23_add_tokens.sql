-- A step of apply_registrations (23): registrations and logouts of tokens that nobody had a moment ago, in sets.

CREATE OR REPLACE FUNCTION tokenkeeper.add_tokens(
    rows tokenkeeper.registration[],
    of_topic integer[],
    token_keys bytea[],
    moments timestamptz[],
    are_logouts boolean,
    one_token boolean[],
    devices text[],
    device_at timestamptz[],
    users text[],
    user_at timestamptz[],
    tags_of integer[],
    tags_at timestamptz[],
    sources bigint[],
    receipt timestamptz,
    patience timestamptz,
    OUT dependent integer[],
    OUT waiting integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    total integer := cardinality(add_tokens.token_keys);
    -- Of each token: none, new or known, what its registration does to a device; null if it depends on other tokens.
    device_kinds text[];
    candidates integer[] := '{}';
    rotated_keys bytea[] := array_fill(NULL::bytea, ARRAY[total]);
    joins integer[];
    joined_keys bytea[];
    first integer := 1;
    many integer := total;
    locked_until integer := 0;
    is_tried boolean := false;
BEGIN
    dependent := '{}';
    waiting := '{}';
    IF total = 0 THEN
        RETURN;
    END IF;
    IF are_logouts THEN
        device_kinds := array_fill('none'::text, ARRAY[total]);
    ELSE
        SELECT array_agg(k.kind ORDER BY k.position) INTO device_kinds FROM (
            SELECT w.position, CASE
                WHEN NOT w.names THEN 'none'
                -- Two tokens of this batch have the device.
                WHEN count(*) OVER (PARTITION BY w.topic_id, w.device, w.names) > 1 THEN NULL
                -- Not EXISTS, which may be hashed: that would read the whole table.
                ELSE coalesce((SELECT 'known' FROM tokenkeeper.device AS d WHERE d.topic_id = w.topic_id AND d.device_id = w.device COLLATE "C"), 'new')
                END AS kind
            FROM (SELECT s.*, coalesce(s.one_token AND s.device <> '', false) AS names
                  FROM unnest(add_tokens.of_topic, add_tokens.devices, add_tokens.one_token) WITH ORDINALITY
                       AS s (topic_id, device, one_token, position)) AS w) AS k;
    END IF;

    -- A device's newest registration names a new token: its former token is superseded. First lock the device, then look with another snapshot.
    IF array_position(device_kinds, 'known') IS NOT NULL THEN
        candidates := ARRAY(
            SELECT s.position::integer
            FROM unnest(add_tokens.of_topic, add_tokens.devices, device_kinds) WITH ORDINALITY AS s (topic_id, device, kind, position)
            CROSS JOIN LATERAL (
                SELECT FROM tokenkeeper.device AS d WHERE d.topic_id = s.topic_id AND d.device_id = s.device COLLATE "C"
                FOR NO KEY UPDATE SKIP LOCKED) AS d
            WHERE s.kind = 'known');
        WITH looked AS MATERIALIZED (
            SELECT c.position, (
                SELECT k.token_key
                FROM tokenkeeper.device AS d
                CROSS JOIN LATERAL (
                    SELECT l.token_key, l.registered_at, l.has_tag_changes FROM tokenkeeper.ledger AS l
                    WHERE l.device_id = d.device_id AND l.topic_id + 0 = d.topic_id AND l.superseded_at IS NULL
                    FOR NO KEY UPDATE SKIP LOCKED) AS k
                WHERE d.topic_id = c.topic_id AND d.device_id = c.device COLLATE "C"
                  AND (c.moment, c.token_key) > (d.named_at, d.token_key) AND (c.moment, c.token_key) > (k.registered_at, k.token_key)
                  AND k.has_tag_changes IS NULL
                  -- register counts the tokens of such a device.
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l
                                  WHERE l.device_id = d.device_id AND l.topic_id + 0 = d.topic_id OFFSET 48 LIMIT 1)) AS former_key
            FROM (SELECT p AS position, add_tokens.of_topic[p] AS topic_id, add_tokens.devices[p] AS device, add_tokens.moments[p] AS moment,
                         add_tokens.token_keys[p] AS token_key
                  FROM unnest(candidates) AS p) AS c
        )
        SELECT coalesce(array_agg(l.position), '{}'), array_agg(l.former_key) INTO joins, joined_keys FROM looked AS l WHERE l.former_key IS NOT NULL;
        FOR n IN 1..cardinality(joins) LOOP
            rotated_keys[joins[n]] := joined_keys[n];
        END LOOP;
        FOR n IN 1..total LOOP
            IF device_kinds[n] = 'known' AND rotated_keys[n] IS NULL THEN
                device_kinds[n] := NULL;
            END IF;
        END LOOP;
    END IF;
    IF array_position(device_kinds, NULL) IS NOT NULL THEN
        dependent := ARRAY(SELECT k.position::integer FROM unnest(device_kinds) WITH ORDINALITY AS k (kind, position) WHERE k.kind IS NULL);
    END IF;

    -- Nobody had these tokens a moment ago, so a plain INSERT is enough: ON CONFLICT would look up each key twice. Another session may be inserting one of
    -- them, and the INSERT would wait for it, or may just have committed it. So try all at once with a very short timeout; if that fails, find the
    -- token by halving.
    IF isfinite(patience) THEN
        PERFORM set_config('lock_timeout', '3ms', true);
    END IF;
    WHILE first <= total LOOP
        -- The first attempt waits 3 ms at most, however long it took to come here: on a cold cache, for example.
        IF is_tried AND clock_timestamp() > patience THEN
            waiting := waiting || ARRAY(SELECT k.position::integer FROM unnest(device_kinds) WITH ORDINALITY AS k (kind, position)
                                        WHERE k.kind IS NOT NULL AND k.position >= first);
            EXIT;
        END IF;
        is_tried := true;
        BEGIN
            -- A new device has nothing to supersede.
            INSERT INTO tokenkeeper.device (topic_id, device_id, named_at, token_key)
            SELECT s.topic_id, s.device, s.device_at, s.token_key
            FROM unnest(add_tokens.of_topic, add_tokens.token_keys, add_tokens.devices, add_tokens.device_at, device_kinds)
                 WITH ORDINALITY AS s (topic_id, token_key, device, device_at, kind, n)
            WHERE s.n BETWEEN first AND first + many - 1 AND s.kind = 'new';
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, device_at, user_id, user_at, tags, tags_at,
                unregistered_by_app_at, suppressed_since)
            SELECT s.topic_id, s.token_key, CASE WHEN are_logouts THEN '-infinity' ELSE s.moment END, nullif(s.device, ''), s.device_at,
                   nullif(s.of_user, ''), s.user_at,
                   CASE
                       WHEN s.tags_of IS NOT NULL THEN (rows[s.tags_of]).tags
                       -- Only the device's current token inherits tags: from its former tokens, whichever had the latest.
                       WHEN s.kind = 'known' THEN (
                           SELECT i.tags FROM (
                               SELECT d.tags_at, d.tags FROM tokenkeeper.device AS d WHERE d.topic_id = s.topic_id AND d.device_id = s.device
                               UNION ALL
                               SELECT f.tags_at, f.tags FROM tokenkeeper.ledger AS f WHERE f.topic_id = s.topic_id AND f.token_key = s.former_key) AS i
                           WHERE i.tags_at IS NOT NULL ORDER BY i.tags_at DESC, i.tags DESC LIMIT 1) END,
                   s.tags_at, CASE WHEN are_logouts THEN s.moment END, CASE WHEN are_logouts THEN receipt END
            FROM unnest(add_tokens.of_topic, add_tokens.token_keys, add_tokens.moments, add_tokens.devices, add_tokens.device_at, add_tokens.users,
                        add_tokens.user_at, add_tokens.tags_of, add_tokens.tags_at, device_kinds, rotated_keys)
                 WITH ORDINALITY AS s (topic_id, token_key, moment, device, device_at, of_user, user_at, tags_of, tags_at, kind, former_key, n)
            WHERE s.n BETWEEN first AND first + many - 1 AND s.kind IS NOT NULL;
            joins := '{}';
            IF candidates <> '{}' THEN
                joins := ARRAY(SELECT p FROM generate_series(first, least(first + many - 1, total)) AS p WHERE device_kinds[p] = 'known');
            END IF;
            IF joins <> '{}' THEN
                UPDATE tokenkeeper.device AS d
                -- Written even if nothing changes: a transaction with an older snapshot then fails instead of deciding by that snapshot.
                SET tags_at = CASE WHEN s.tags_move THEN s.tags_at ELSE d.tags_at END,
                    tags = CASE WHEN s.tags_move THEN s.tags ELSE d.tags END,
                    tags_of = CASE WHEN s.tags_move THEN s.former_key ELSE d.tags_of END
                FROM (SELECT k.place, rotated_keys[p] AS former_key, f.tags_at, f.tags,
                             f.tags_at IS NOT NULL AND (k.tags_at IS NULL OR (f.tags_at, f.tags) > (k.tags_at, k.tags)) AS tags_move
                      FROM unnest(joins) AS p
                      CROSS JOIN LATERAL (
                          SELECT e.ctid AS place, e.tags_at, e.tags FROM tokenkeeper.device AS e
                          WHERE e.topic_id = add_tokens.of_topic[p] AND e.device_id = add_tokens.devices[p] COLLATE "C" OFFSET 0) AS k
                      CROSS JOIN LATERAL (
                          SELECT l.tags_at, l.tags FROM tokenkeeper.ledger AS l
                          WHERE l.topic_id = add_tokens.of_topic[p] AND l.token_key = rotated_keys[p] OFFSET 0) AS f) AS s
                WHERE d.ctid = s.place;
                WITH former AS MATERIALIZED (
                    SELECT k.* FROM unnest(joins) AS p
                    CROSS JOIN LATERAL (
                        SELECT l.ctid AS place, l.suppressed, greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at) AS invalidated_at
                        FROM tokenkeeper.ledger AS l
                        WHERE l.topic_id = add_tokens.of_topic[p] AND l.token_key = rotated_keys[p] OFFSET 0) AS k
                ), superseded AS (
                    UPDATE tokenkeeper.ledger AS l
                    SET superseded_at = l.registered_at, suppressed_since = coalesce(l.suppressed_since, receipt),
                        -- Only the device's current token inherits tags.
                        tags = CASE WHEN l.tags_at IS NOT NULL THEN l.tags END
                    FROM former AS f WHERE l.ctid = f.place
                    RETURNING l.topic_id, l.token_key, l.device_id, l.user_id, l.registered_at, f.suppressed AS was_suppressed, f.invalidated_at
                )
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
                    registered_before, registered_after, invalidated_before, invalidated_after)
                SELECT s.topic_id, s.token_key, 'superseded', 'superseded', 'a newer token of the same device', s.device_id, s.user_id,
                       nullif(s.registered_at, '-infinity'), nullif(s.registered_at, '-infinity'), s.invalidated_at,
                       greatest(s.invalidated_at, s.registered_at)
                FROM superseded AS s WHERE NOT s.was_suppressed;
            END IF;
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id, registered_after, invalidated_after)
            SELECT s.topic_id, s.token_key, CASE WHEN are_logouts THEN 'unregistered_by_app' ELSE 'registered' END,
                   CASE WHEN are_logouts THEN 'unregistered_by_app' ELSE 'registration' END, nullif(s.device, ''), nullif(s.of_user, ''), s.source_id,
                   CASE WHEN NOT are_logouts THEN s.moment END, CASE WHEN are_logouts THEN s.moment END
            FROM unnest(add_tokens.of_topic, add_tokens.token_keys, add_tokens.moments, add_tokens.devices, add_tokens.users, add_tokens.sources,
                        device_kinds)
                 WITH ORDINALITY AS s (topic_id, token_key, moment, device, of_user, source_id, kind, n)
            WHERE s.n BETWEEN first AND first + many - 1 AND s.kind IS NOT NULL;
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE greatest(total - first + 1, 1) END;
        EXCEPTION WHEN lock_not_available OR unique_violation THEN
            IF many = 1 THEN
                IF sqlstate = '23505' THEN
                    dependent := dependent || first;
                ELSE
                    waiting := waiting || first;
                END IF;
                first := first + 1;
                many := greatest(total - first + 1, 1);
            ELSE
                locked_until := least(first + many - 1, total);
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.add_tokens(
    tokenkeeper.registration[], integer[], bytea[], timestamptz[], boolean, boolean[], text[], timestamptz[], text[], timestamptz[], integer[],
    timestamptz[], bigint[], timestamptz, timestamptz) IS
    'Internal: applies registrations, or logouts, of unknown tokens, given in key order: those without a device, of a new device, and of a device whose '
    'current token they supersede. Returns the positions of those that depend on other tokens, and of those that another session is adding (waiting). '
    'It waits for no other session after patience; if that is infinity, it waits as long as lock_timeout says.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.add_tokens(
    tokenkeeper.registration[], integer[], bytea[], timestamptz[], boolean, boolean[], text[], timestamptz[], text[], timestamptz[], integer[],
    timestamptz[], bigint[], timestamptz, timestamptz) FROM PUBLIC;
