-- How a daemon applies a batch of queued registrations: in sets what does not depend on other tokens, row by row what does.
--
-- The ledger is the one that register and unregister would leave, called row by row, because each of the sets below has the effect of one such
-- call per row, and because the order of calls does not matter. What two rows of a batch say about the same token is first reduced to the greatest
-- instants, where that is exact.
--
-- Locks: those of 20_registration. Only this function holds many of them, so it yields: it skips what others have locked, and where it cannot skip (an
-- INSERT waits for a session that inserts the same key) it gives up after 3 ms. An application that waits for this transaction looks for a deadlock
-- after deadlock_timeout, so within half of that time this transaction stops waiting for anything. Rows that cannot be applied now wait in
-- registration_retry.

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
                               SELECT d.tags_at, d.tags FROM tokenkeeper.device AS d
                               WHERE d.topic_id = s.topic_id AND d.device_id = s.device COLLATE "C"
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

CREATE OR REPLACE FUNCTION tokenkeeper.register_row(
    of_topic integer, key bytea, moment timestamptz, device text, new_tags text[], new_user text, details_at timestamptz, from_source bigint,
    receipt timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    token text := encode(key, 'hex');
    scope tokenkeeper.topic;
    has_changes boolean;
    is_superseded boolean;
BEGIN
    SELECT t.* INTO scope FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    IF details_at = moment THEN
        PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device, new_tags, new_user);
    ELSE
        PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device);
        has_changes := new_tags IS NOT NULL AND tokenkeeper.without_tag_changes(of_topic, ARRAY[key], '{}');
        UPDATE tokenkeeper.ledger AS l
        SET user_id = CASE WHEN s.user_moves THEN nullif(new_user, '') ELSE l.user_id END,
            user_at = CASE WHEN s.user_moves THEN details_at ELSE l.user_at END,
            tags = CASE WHEN s.tags_move THEN new_tags ELSE l.tags END,
            tags_at = CASE WHEN s.tags_move THEN details_at ELSE l.tags_at END
        FROM (SELECT k.ctid AS place,
                     new_user IS NOT NULL
                         AND (k.user_at IS NULL OR (details_at, new_user COLLATE "C") > (k.user_at, coalesce(k.user_id, ''))) AS user_moves,
                     new_tags IS NOT NULL AND (k.tags_at IS NULL OR (details_at, new_tags COLLATE "C") > (k.tags_at, k.tags)) AS tags_move
              FROM tokenkeeper.ledger AS k WHERE k.topic_id = of_topic AND k.token_key = key OFFSET 0) AS s
        WHERE l.ctid = s.place AND (s.user_moves OR s.tags_move)
        RETURNING l.superseded_at IS NOT NULL AND s.tags_move INTO is_superseded;
        IF has_changes THEN
            PERFORM tokenkeeper.apply_tag_changes(of_topic, ARRAY[key]);
        END IF;
        IF is_superseded THEN
            -- The device's current token may inherit these tags.
            PERFORM tokenkeeper.register(token, scope.topic, scope.environment, moment, device);
        END IF;
    END IF;
    IF from_source IS NOT NULL THEN
        UPDATE tokenkeeper.token_event_log AS e SET source_id = from_source
        WHERE e.token_key = key AND e.topic_id = of_topic AND e.transaction_id = pg_current_xact_id()
          AND e.event IN ('registered', 'revived') AND e.source_id IS NULL AND e.at >= receipt;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register_row(integer, bytea, timestamptz, text, text[], text, timestamptz, bigint, timestamptz) IS
    'Internal: applies one registration by register. The tags and the user count from details_at. Its events since receipt name the source.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register_row(integer, bytea, timestamptz, text, text[], text, timestamptz, bigint, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.apply_registrations(
    rows tokenkeeper.registration[],
    guard_allowance bigint,
    guard_max_share numeric,
    rejected_allowance bigint,
    OUT applied bigint,
    OUT rejected bigint,
    OUT not_kept bigint,
    OUT held bigint,
    OUT waiting bigint,
    OUT tripped integer[],
    OUT reset integer[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    total integer := coalesce(cardinality(apply_registrations.rows), 0);
    receipt timestamptz := clock_timestamp();
    lock_timeout_before text := current_setting('lock_timeout');
    -- A single row may wait for its locks as long as lock_timeout says: it holds nothing that others may wait for.
    patience timestamptz := CASE WHEN total <= 1 THEN 'infinity'::timestamptz ELSE receipt END;
    -- Positions in rows, and what these rows say, in the order of logouts, topics and token keys.
    of_row integer[];
    of_topic integer[];
    token_keys bytea[];
    moments timestamptz[];
    -- The instants with which the user and the tags count. An attached table changes these whenever somebody edits them, long after the device
    -- registered: that must neither revive the token nor lose against what was there before.
    details_at timestamptz[];
    logs_out boolean[];
    one_token boolean[];
    devices text[] COLLATE "C";
    users text[] COLLATE "C";
    with_tags boolean[];
    sources bigint[];
    -- Tokens that rows of an attached table may spell in an unusual way.
    spelled_keys bytea[];
    spellings text[];
    spelled_by bigint[];
    -- Positions in these, and what the guard says about each.
    logouts integer[];
    fates text[];
    suppresses boolean[];
    -- What a batch says about each token that it registers.
    k_topic integer[];
    k_key bytea[];
    k_moment timestamptz[];
    k_one boolean[];
    k_device text[] COLLATE "C";
    k_device_at timestamptz[];
    k_user text[] COLLATE "C";
    k_user_at timestamptz[];
    k_tags_of integer[];
    k_tags_at timestamptz[];
    k_source bigint[];
    -- Positions in these.
    unknown integer[];
    dependents integer[];
    busy integer[];
    -- The tokens that go row by row.
    slow_topic integer[];
    slow_key bytea[];
    -- Positions in rows.
    waits integer[] := '{}';
    faulty integer[];
    faults text[];
    lacks_topic boolean;
    is_tried boolean := false;
    remains boolean[];
    one record;
BEGIN
    applied := 0;
    rejected := 0;
    not_kept := 0;
    held := 0;
    waiting := 0;
    tripped := '{}';
    reset := '{}';
    IF total = 0 THEN
        RETURN;
    END IF;

    FOR attempt IN 1..2 LOOP
        WITH said AS MATERIALIZED (
            SELECT r.*,
                CASE
                WHEN r.hex IS NULL THEN tokenkeeper.token_fault(r.token)
                WHEN NOT isfinite(r.registered_at) THEN 'registered_at is ' || r.registered_at || ', expected a finite instant'
                WHEN r.logs_out THEN NULL
                WHEN octet_length(r.device_id) > 512 THEN 'device_id is ' || octet_length(r.device_id) || ' bytes long, expected at most 512'
                WHEN octet_length(r.user_id) > 512 THEN 'user_id is ' || octet_length(r.user_id) || ' bytes long, expected at most 512'
                WHEN r.tags IS NULL THEN NULL
                WHEN array_ndims(r.tags) > 1 THEN 'tags is an array of ' || array_ndims(r.tags) || ' dimensions, expected one'
                WHEN cardinality(r.tags) > 1000 THEN 'tags has ' || cardinality(r.tags) || ' elements, expected at most 1000'
                ELSE (SELECT 'a tag is ' || coalesce(octet_length(t.tag) || ' bytes long', 'null') || ', expected 1 to 512 bytes'
                      FROM unnest(r.tags) AS t (tag) WHERE t.tag IS NULL OR octet_length(t.tag) NOT BETWEEN 1 AND 512 LIMIT 1)
                END AS row_fault,
                CASE WHEN r.topic_id IS NULL THEN coalesce(tokenkeeper.environment_fault(r.environment), tokenkeeper.topic_fault(r.topic)) END AS topic_fault
            FROM (
                SELECT u.position::integer AS position, u.topic, coalesce(u.environment, 'production') AS environment, u.token, u.registered_at,
                       tokenkeeper.parse_token(u.token) AS hex, u.unregistered IS TRUE AS logs_out, u.device_id, u.user_id, u.tags, u.source_id,
                       least(u.registered_at, u.queued_at, receipt) AS moment,
                       least(CASE WHEN u.source_id IS NULL OR (
                           SELECT o.kind NOT IN ('attachment', 'reconciliation') FROM tokenkeeper.registration_source AS o
                           WHERE o.source_id = u.source_id) IS NOT FALSE THEN u.registered_at END,
                           u.queued_at, receipt) AS details_at, (
                           SELECT t.topic_id FROM tokenkeeper.topic AS t
                           WHERE t.topic = u.topic AND t.environment = coalesce(u.environment, 'production')) AS topic_id
                FROM unnest(apply_registrations.rows) WITH ORDINALITY AS u (environment, topic, token, registered_at, device_id, user_id, tags,
                    unregistered, source_id, queued_at, partition_number, attempts, released, position)
                -- So that what is used twice is computed once.
                OFFSET 0) AS r
        ), understood AS (
            SELECT array_agg(s.position) AS of_row, array_agg(s.topic_id) AS of_topic, array_agg(s.token_key) AS token_keys,
                   array_agg(s.moment) AS moments, array_agg(s.details_at) AS details_at, array_agg(s.logs_out) AS logs_out,
                   array_agg(s.one_token) AS one_token, array_agg(s.device_id) AS devices, array_agg(s.user_id) AS users, array_agg(s.with_tags) AS with_tags,
                   array_agg(s.source_id) AS sources, bool_or(s.topic_id IS NULL) AS lacks_topic,
                   array_agg(s.token_key) FILTER (WHERE s.spelling IS NOT NULL) AS spelled_keys,
                   array_agg(s.spelling) FILTER (WHERE s.spelling IS NOT NULL) AS spellings,
                   array_agg(s.source_id) FILTER (WHERE s.spelling IS NOT NULL) AS spelled_by
            FROM (SELECT CASE WHEN p.source_id IS NOT NULL AND NOT p.logs_out AND p.token NOT IN (p.hex, upper(p.hex)) THEN p.token END AS spelling,
                         p.position, p.topic_id, decode(p.hex, 'hex') AS token_key, p.moment, p.details_at, p.logs_out, p.device_id, p.user_id,
                         p.tags IS NOT NULL AS with_tags, p.source_id, tokenkeeper.has_one_token_per_device(p.topic) AS one_token
                  FROM said AS p WHERE p.row_fault IS NULL AND p.topic_fault IS NULL
                  ORDER BY p.logs_out, p.topic_id, 3, p.position) AS s
        ), refused AS (
            SELECT array_agg(s.position ORDER BY s.position) AS faulty, array_agg(coalesce(s.row_fault, s.topic_fault) ORDER BY s.position) AS faults
            FROM said AS s WHERE s.row_fault IS NOT NULL OR s.topic_fault IS NOT NULL
        )
        SELECT * INTO of_row, of_topic, token_keys, moments, details_at, logs_out, one_token, devices, users, with_tags, sources, lacks_topic,
                      spelled_keys, spellings, spelled_by, faulty, faults
        FROM understood AS u CROSS JOIN refused AS r;
        EXIT WHEN lacks_topic IS NOT TRUE OR attempt = 2;
        -- An application may be adding the same new topic, and the INSERT would wait for it.
        IF isfinite(patience) THEN
            PERFORM set_config('lock_timeout', '10ms', true);
        END IF;
        FOR one IN
            SELECT DISTINCT coalesce((apply_registrations.rows[u.n]).environment, 'production') AS environment, (apply_registrations.rows[u.n]).topic AS topic
            FROM unnest(of_row, of_topic) AS u (n, topic_id) WHERE u.topic_id IS NULL ORDER BY 2, 1
        LOOP
            BEGIN
                PERFORM tokenkeeper.ensure_topic(one.environment, one.topic);
            EXCEPTION WHEN lock_not_available THEN
                NULL; -- Its rows wait.
            END;
            EXIT WHEN clock_timestamp() > receipt + interval '100 ms';
        END LOOP;
        PERFORM set_config('lock_timeout', lock_timeout_before, true);
    END LOOP;
    IF lacks_topic THEN
        waits := ARRAY(SELECT u.n FROM unnest(of_row, of_topic) AS u (n, topic_id) WHERE u.topic_id IS NULL);
    END IF;

    logouts := ARRAY(SELECT u.i::integer FROM unnest(logs_out, of_topic) WITH ORDINALITY AS u (is_logout, topic_id, i)
                     WHERE u.is_logout AND u.topic_id IS NOT NULL);
    IF spelled_keys IS NOT NULL THEN
        PERFORM tokenkeeper.note_spellings(spelled_by, spelled_keys, spellings);
    END IF;
    -- A token that another row of the attached table still has is not logged out. Ask before anything is locked: this reads the application's table.
    FOR one IN
        SELECT l.source_id, array_agg(l.i) AS logouts, array_agg(l.environment) AS environments, array_agg(l.topic) AS topics,
               array_agg(l.token) AS tokens, array_agg(l.token_key) AS token_keys
        FROM (SELECT i, sources[i] AS source_id, token_keys[i] AS token_key, coalesce(r.environment, 'production') AS environment, r.topic, r.token
              FROM unnest(logouts) AS i CROSS JOIN LATERAL unnest(apply_registrations.rows[of_row[i]:of_row[i]]) AS r
              WHERE sources[i] IS NOT NULL) AS l
        WHERE EXISTS (SELECT FROM tokenkeeper.registration_source AS o
                      WHERE o.source_id = l.source_id AND o.kind IN ('attachment', 'backfill', 'reconciliation'))
        GROUP BY 1 ORDER BY 1
    LOOP
        BEGIN
            remains := tokenkeeper.attachment_has(one.source_id, one.environments, one.topics, one.tokens, one.token_keys);
            -- Empty: it has not answered in time. An error would undo what it has noted about that.
            IF remains = '{}' THEN
                waits := waits || ARRAY(SELECT of_row[i] FROM unnest(one.logouts) AS i);
            END IF;
            logouts := ARRAY(SELECT i FROM unnest(logouts) AS i
                             WHERE i NOT IN (SELECT h.i FROM unnest(one.logouts, remains) AS h (i, has) WHERE h.has OR remains = '{}'));
        EXCEPTION WHEN lock_not_available OR deadlock_detected OR insufficient_privilege OR SQLSTATE 'TK002' THEN
            -- The table is locked, or its function cannot be called safely.
            waits := waits || ARRAY(SELECT of_row[i] FROM unnest(one.logouts) AS i);
            logouts := ARRAY(SELECT i FROM unnest(logouts) AS i WHERE i NOT IN (SELECT unnest(one.logouts)));
        END;
    END LOOP;

    -- Logouts of a source pass the guard, which is locked before any token.
    suppresses := array_fill(false, ARRAY[cardinality(logouts)]);
    IF EXISTS (SELECT FROM unnest(logouts) AS i WHERE sources[i] IS NOT NULL) THEN
        WITH registered AS MATERIALIZED (
            SELECT u.topic_id, u.token_key, max(u.moment) AS moment
            FROM unnest(of_topic, token_keys, moments, logs_out) AS u (topic_id, token_key, moment, is_logout) WHERE NOT u.is_logout GROUP BY 1, 2
        ), asked AS (
            SELECT n, of_topic[i] AS topic_id, token_keys[i] AS token_key, moments[i] AS moment, sources[i] AS source_id,
                   (apply_registrations.rows[of_row[i]]).queued_at AS queued_at, (apply_registrations.rows[of_row[i]]).released AS released
            FROM unnest(logouts) WITH ORDINALITY AS l (i, n)
        )
        SELECT j.fates, j.suppresses, j.tripped, j.reset INTO fates, suppresses, tripped, reset
        FROM (SELECT array_agg(a.topic_id ORDER BY a.n) AS of_topic, array_agg(a.token_key ORDER BY a.n) AS token_keys,
                     array_agg(a.moment ORDER BY a.n) AS moments, array_agg(a.queued_at ORDER BY a.n) AS queued_at,
                     array_agg(coalesce(a.released, false) ORDER BY a.n) AS released, array_agg(a.source_id ORDER BY a.n) AS sources,
                     array_agg(r.moment ORDER BY a.n) AS registered_at
              FROM asked AS a LEFT JOIN registered AS r USING (topic_id, token_key)) AS g
        CROSS JOIN LATERAL tokenkeeper.judge_unregistrations(
            g.of_topic, g.token_keys, g.moments, g.queued_at, g.released, g.sources, g.registered_at, apply_registrations.guard_allowance,
            apply_registrations.guard_max_share) AS j;
        INSERT INTO tokenkeeper.held_registration (topic_id, token_key, unregistered_by_app_at, environment, topic, token, registered_at, device_id, user_id, tags,
            unregistered, source_id, queued_at, attempts)
        SELECT of_topic[h.i], token_keys[h.i], moments[h.i], r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags,
               r.unregistered, r.source_id, r.queued_at, r.attempts
        FROM unnest(logouts, fates) AS h (i, fate)
        CROSS JOIN LATERAL unnest(apply_registrations.rows[of_row[h.i]:of_row[h.i]]) AS r
        WHERE h.fate = 'held';
        GET DIAGNOSTICS held = ROW_COUNT;
        waits := waits || ARRAY(SELECT of_row[h.i] FROM unnest(logouts, fates) AS h (i, fate) WHERE h.fate = 'waiting');
        SELECT coalesce(array_agg(h.i), '{}'), coalesce(array_agg(h.suppresses), '{}') INTO logouts, suppresses
        FROM unnest(logouts, fates, suppresses) AS h (i, fate, suppresses) WHERE h.fate = 'recorded';
    END IF;

    -- What the batch says about each token: the greatest instants, if its rows agree about the device, the user and the tags.
    SELECT coalesce(array_agg(g.topic_id) FILTER (WHERE g.agrees), '{}'), coalesce(array_agg(g.token_key) FILTER (WHERE g.agrees), '{}'),
           array_agg(g.moment) FILTER (WHERE g.agrees), array_agg(g.one_token) FILTER (WHERE g.agrees),
           array_agg(g.device) FILTER (WHERE g.agrees), array_agg(g.device_at) FILTER (WHERE g.agrees),
           array_agg(g.of_user) FILTER (WHERE g.agrees), array_agg(g.user_at) FILTER (WHERE g.agrees),
           array_agg(g.tags_of) FILTER (WHERE g.agrees), array_agg(g.tags_at) FILTER (WHERE g.agrees), array_agg(g.source_id) FILTER (WHERE g.agrees),
           coalesce(array_agg(g.topic_id) FILTER (WHERE NOT g.agrees), '{}'), coalesce(array_agg(g.token_key) FILTER (WHERE NOT g.agrees), '{}')
    INTO k_topic, k_key, k_moment, k_one, k_device, k_device_at, k_user, k_user_at, k_tags_of, k_tags_at, k_source, slow_topic, slow_key
    FROM (SELECT u.topic_id, u.token_key, max(u.moment) AS moment, bool_and(u.one_token) AS one_token,
                 max(u.device COLLATE "C") AS device, max(u.moment) FILTER (WHERE u.device IS NOT NULL) AS device_at,
                 max(u.of_user COLLATE "C") AS of_user, max(u.details_at) FILTER (WHERE u.of_user IS NOT NULL) AS user_at,
                 max(u.n) FILTER (WHERE u.with_tags) AS tags_of, max(u.details_at) FILTER (WHERE u.with_tags) AS tags_at,
                 CASE WHEN count(*) = count(u.source_id) AND min(u.source_id) = max(u.source_id) THEN min(u.source_id) END AS source_id,
                 coalesce(min(u.device COLLATE "C") = max(u.device COLLATE "C"), true)
                     AND coalesce(min(u.of_user COLLATE "C") = max(u.of_user COLLATE "C"), true)
                     AND count(*) FILTER (WHERE u.with_tags) <= 1 AND total > 1 AS agrees
          FROM unnest(of_row, of_topic, token_keys, moments, details_at, one_token, logs_out, devices, users, with_tags, sources)
               AS u (n, topic_id, token_key, moment, details_at, one_token, is_logout, device, of_user, with_tags, source_id)
          WHERE NOT u.is_logout AND u.topic_id IS NOT NULL
          GROUP BY 1, 2 ORDER BY 1, 2) AS g;

    -- A device_id that is a constant: a full device takes no more tokens, so register would record these without it. Row by row, as all that
    -- concerns other tokens, a file of 200,000 such rows takes minutes.
    IF EXISTS (SELECT FROM tokenkeeper.crowded_device AS c WHERE c.tokens >= 1000 AND c.counted_at > receipt - interval '1 hour') THEN
        -- They count as named all the same, so that status goes on warning.
        PERFORM tokenkeeper.note_crowded(c.topic_id, c.device_id, false)
        FROM (SELECT DISTINCT u.topic_id, u.device COLLATE "C" AS device FROM unnest(k_topic, k_device, k_one) AS u (topic_id, device, one_token)
              WHERE u.one_token) AS d
        JOIN tokenkeeper.crowded_device AS c ON c.topic_id = d.topic_id AND c.device_id = d.device;
        SELECT array_agg(CASE WHEN NOT f.joins_full THEN u.device END ORDER BY u.n), array_agg(CASE WHEN NOT f.joins_full THEN u.device_at END ORDER BY u.n)
        INTO k_device, k_device_at
        FROM unnest(k_topic, k_key, k_one, k_device, k_device_at) WITH ORDINALITY AS u (topic_id, token_key, one_token, device, device_at, n)
        CROSS JOIN LATERAL (
            SELECT coalesce(u.one_token AND u.device <> '' AND (
                SELECT c.tokens >= 1000 AND c.counted_at > receipt - interval '1 hour' FROM tokenkeeper.crowded_device AS c
                WHERE c.topic_id = u.topic_id AND c.device_id = u.device COLLATE "C")
                AND coalesce((SELECT l.device_id IS DISTINCT FROM u.device COLLATE "C" FROM tokenkeeper.ledger AS l
                              WHERE l.topic_id = u.topic_id AND l.token_key = u.token_key), true), false) AS joins_full OFFSET 0) AS f;
    END IF;

    -- From here on, an application may wait for this transaction. Whatever deadlock_timeout is, there is time to apply something.
    IF isfinite(patience) THEN
        patience := clock_timestamp() + greatest(current_setting('deadlock_timeout')::interval / 2 - interval '10 ms', interval '20 ms');
    END IF;
    IF k_key <> '{}' THEN
        SELECT r.unknown, r.dependent, r.busy INTO unknown, dependents, busy
        FROM tokenkeeper.register_known_tokens(
            apply_registrations.rows, k_topic, k_key, k_moment, k_device, k_device_at, k_user, k_user_at, k_tags_of, k_tags_at, k_source, receipt) AS r;
        IF unknown <> '{}' THEN
            SELECT dependents || ARRAY(SELECT unknown[p] FROM unnest(a.dependent) AS p), busy || ARRAY(SELECT unknown[p] FROM unnest(a.waiting) AS p)
            INTO dependents, busy
            FROM (SELECT array_agg(k_topic[p]) AS of_topic, array_agg(k_key[p]) AS token_keys, array_agg(k_moment[p]) AS moments,
                         array_agg(k_one[p]) AS one_token, array_agg(k_device[p]) AS devices, array_agg(k_device_at[p]) AS device_at,
                         array_agg(k_user[p]) AS users, array_agg(k_user_at[p]) AS user_at, array_agg(k_tags_of[p]) AS tags_of,
                         array_agg(k_tags_at[p]) AS tags_at, array_agg(k_source[p]) AS sources
                  FROM unnest(unknown) AS p) AS w
            CROSS JOIN LATERAL tokenkeeper.add_tokens(
                apply_registrations.rows, w.of_topic, w.token_keys, w.moments, false, w.one_token, w.devices, w.device_at, w.users, w.user_at,
                w.tags_of, w.tags_at, w.sources, receipt, patience) AS a;
        END IF;
        slow_topic := slow_topic || ARRAY(SELECT k_topic[p] FROM unnest(dependents) AS p);
        slow_key := slow_key || ARRAY(SELECT k_key[p] FROM unnest(dependents) AS p);
        IF busy <> '{}' THEN
            waits := waits || ARRAY(
                SELECT u.n FROM unnest(of_row, of_topic, token_keys, logs_out) AS u (n, topic_id, token_key, is_logout)
                WHERE NOT u.is_logout AND (u.topic_id, u.token_key) IN (SELECT k_topic[b], k_key[b] FROM unnest(busy) AS b));
        END IF;
    END IF;

    -- What concerns other tokens of a device goes row by row.
    IF slow_key <> '{}' THEN
        IF isfinite(patience) THEN
            PERFORM set_config('lock_timeout', '3ms', true);
        END IF;
        FOR one IN
            SELECT u.n, u.topic_id, u.token_key, u.moment, u.details_at, u.device, u.of_user, u.source_id
            FROM unnest(of_row, of_topic, token_keys, moments, details_at, logs_out, devices, users, sources)
                 AS u (n, topic_id, token_key, moment, details_at, is_logout, device, of_user, source_id)
            WHERE NOT u.is_logout
              AND (u.topic_id, u.token_key) IN (SELECT s.topic_id, s.token_key FROM unnest(slow_topic, slow_key) AS s (topic_id, token_key))
            ORDER BY u.topic_id, u.token_key, u.moment, u.n
        LOOP
            IF is_tried AND clock_timestamp() > patience THEN
                waits := waits || one.n;
                CONTINUE;
            END IF;
            is_tried := true;
            -- A subtransaction for each, so that a row that fails releases its locks and leaves the others alone.
            BEGIN
                PERFORM tokenkeeper.register_row(one.topic_id, one.token_key, one.moment, one.device, (apply_registrations.rows[one.n]).tags, one.of_user,
                                                 one.details_at, one.source_id, receipt);
            EXCEPTION
                WHEN lock_not_available OR deadlock_detected THEN
                    waits := waits || one.n;
                WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
                    faulty := faulty || one.n;
                    faults := faults || sqlerrm;
            END;
        END LOOP;
        PERFORM set_config('lock_timeout', lock_timeout_before, true);
    END IF;

    IF logouts <> '{}' THEN
        waits := waits || tokenkeeper.unregister_tokens(
            ARRAY(SELECT of_row[i] FROM unnest(logouts) AS i), ARRAY(SELECT of_topic[i] FROM unnest(logouts) AS i),
            ARRAY(SELECT token_keys[i] FROM unnest(logouts) AS i), ARRAY(SELECT moments[i] FROM unnest(logouts) AS i),
            ARRAY(SELECT (apply_registrations.rows[of_row[i]]).queued_at FROM unnest(logouts) AS i), ARRAY(SELECT sources[i] FROM unnest(logouts) AS i),
            suppresses, receipt, patience);
    END IF;

    IF waits <> '{}' THEN
        INSERT INTO tokenkeeper.registration_retry (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at,
            partition_number, attempts, released)
        SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.queued_at, 8,
               r.attempts, r.released
        FROM unnest(waits) AS w CROSS JOIN LATERAL unnest(apply_registrations.rows[w:w]) AS r;
        GET DIAGNOSTICS waiting = ROW_COUNT;
    END IF;
    IF faulty <> '{}' THEN
        WITH refused AS MATERIALIZED (
            SELECT f.error, r.*, count(*) FILTER (WHERE r.attempts IS NULL) OVER (ORDER BY f.n) AS so_far
            FROM unnest(faulty, faults) AS f (n, error) CROSS JOIN LATERAL unnest(apply_registrations.rows[f.n:f.n]) AS r
        )
        INSERT INTO tokenkeeper.rejected_registration (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id,
            queued_at, attempts)
        SELECT r.error, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.queued_at,
               r.attempts
        FROM refused AS r WHERE r.attempts IS NOT NULL OR r.so_far <= apply_registrations.rejected_allowance;
        GET DIAGNOSTICS not_kept = ROW_COUNT;
        rejected := cardinality(faulty);
        not_kept := rejected - not_kept;
    END IF;
    applied := total - rejected - held - waiting;
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) IS
    'Applies a batch of rows that were taken out of registration, in the transaction that deletes them: with the same outcome as register and unregister, '
    'called for each. Returns how many were applied; rejected; not_kept: those of the rejected that were beyond rejected_allowance and are not in '
    'rejected_registration; held by the mass-failure guard in held_registration; waiting in registration_retry, because another session had locked what '
    'they need; and the topic_ids whose guard has tripped or reset. A batch of one row waits for locks as long as lock_timeout says; others wait for '
    'milliseconds only. '
    'Requires read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) FROM PUBLIC;
