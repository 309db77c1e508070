-- How a daemon records a batch of results.

CREATE OR REPLACE FUNCTION tokenkeeper.record(
    environments text[],
    topics text[],
    of_topic integer[],
    token_keys bytea[],
    stale_at timestamptz[],
    stale_reason text[],
    suspect_of integer[],
    suspect_at timestamptz[],
    suspect_reason text[],
    suspect_queued_at timestamptz[],
    suspect_released boolean[],
    guard_allowance bigint,
    guard_max_share numeric)
RETURNS TABLE (locked_token integer, held_suspect integer, waiting_suspect integer, tripped_topic integer, reset_topic integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off -- A plan made for a small ledger must not be used for a large one.
AS $$
DECLARE
    topic_ids integer[] := '{}';
    found_id integer;
    learned timestamptz := clock_timestamp();
    waited_since timestamptz;
    patience text := current_setting('lock_timeout');
    total integer := cardinality(record.token_keys);
    first integer := 1;
    many integer;
    locked_until integer := 0;
    fates text[] := array_fill('excluded'::text, ARRAY[cardinality(record.suspect_of)]);
    heard_at timestamptz[] := array_fill(NULL::timestamptz, ARRAY[total]);
    heard_reason text[] := array_fill(NULL::text, ARRAY[total]);
    tripped integer[];
    reset integer[];
    left_over bigint[];
    new_topics integer[];
    new_keys bytea[];
    new_stale_at timestamptz[];
    new_stale_reason text[];
    new_suspect_at timestamptz[];
    new_suspect_reason text[];
    locked bigint[] := '{}';
BEGIN
    topic_ids := ARRAY(
        SELECT (SELECT t.topic_id FROM tokenkeeper.topic AS t
                WHERE t.topic = n.topic COLLATE "C" AND t.environment = n.environment COLLATE "C")
        FROM unnest(record.topics, record.environments) WITH ORDINALITY AS n (topic, environment, position) ORDER BY n.position);
    IF array_position(topic_ids, NULL) IS NOT NULL THEN
        -- An application may be adding the same new topic, and the INSERT would wait for it: 10 ms at most. From here on an application
        -- may wait for this transaction.
        waited_since := clock_timestamp();
        PERFORM set_config('lock_timeout', '10ms', true);
        FOR n IN 1..cardinality(record.topics) LOOP
            CONTINUE WHEN topic_ids[n] IS NOT NULL;
            BEGIN
                found_id := tokenkeeper.ensure_topic(record.environments[n], record.topics[n]);
            EXCEPTION WHEN lock_not_available THEN
                found_id := NULL;
            END;
            topic_ids[n] := found_id;
            -- Each of them may wait. Those that do not get their lock are taken by another batch.
            EXIT WHEN clock_timestamp() > waited_since + interval '100 ms';
        END LOOP;
        PERFORM set_config('lock_timeout', patience, true);
    END IF;

    IF total > 0 AND cardinality(record.suspect_of) > 0 THEN
        SELECT j.fates, j.tripped, j.reset INTO fates, tripped, reset
        FROM (SELECT array_agg(topic_ids[record.of_topic[s.of_token]] ORDER BY s.n) AS of_topic,
                     array_agg(record.token_keys[s.of_token] ORDER BY s.n) AS token_keys,
                     array_agg(coalesce(s.released, false) ORDER BY s.n) AS released,
                     array_agg(record.stale_at[s.of_token] ORDER BY s.n) AS stale_at
              FROM unnest(record.suspect_of, record.suspect_released) WITH ORDINALITY AS s (of_token, released, n)) AS a
        CROSS JOIN LATERAL tokenkeeper.judge_suspects(a.of_topic, a.token_keys, record.suspect_at, record.suspect_queued_at, a.released, a.stale_at,
                                             record.guard_allowance, record.guard_max_share) AS j;
        IF tripped <> '{}' OR reset <> '{}' THEN
            RETURN QUERY
                SELECT NULL::integer, NULL::integer, NULL::integer, CASE WHEN t.topic_id = ANY (tripped) THEN t.position::integer END,
                       CASE WHEN t.topic_id = ANY (reset) THEN t.position::integer END
                FROM unnest(topic_ids) WITH ORDINALITY AS t (topic_id, position)
                WHERE t.topic_id = ANY (tripped) OR t.topic_id = ANY (reset);
        END IF;
        -- The latest suspect of each token.
        SELECT array_agg(h.at ORDER BY t.n), array_agg(h.reason ORDER BY t.n) INTO heard_at, heard_reason
        FROM generate_series(1, total) AS t (n)
        LEFT JOIN (
            SELECT DISTINCT ON (s.of_token) s.of_token, s.at, s.reason
            FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, fates) AS s (of_token, at, reason, fate)
            WHERE s.fate IN ('counts', 'suppresses', 'released')
            ORDER BY s.of_token, s.at DESC, s.reason COLLATE "C" DESC) AS h ON h.of_token = t.n;
    END IF;

    -- From the first lock on the ledger, an application may wait for this transaction. It cannot wait for the guards that were locked
    -- before: only other daemons, operators and forget lock these, and forget waits for this batch first.
    waited_since := coalesce(waited_since, clock_timestamp());
    -- Known tokens come first. Each row is found and locked once, and then changed in place.
    WITH said AS MATERIALIZED (
        SELECT s.position, topic_ids[s.of_topic] AS topic_id, s.token_key,
               s.stale_at, s.stale_reason, s.suspect_at, s.suspect_reason
        FROM unnest(record.of_topic, record.token_keys, record.stale_at, record.stale_reason, heard_at, heard_reason)
             WITH ORDINALITY AS s (of_topic, token_key, stale_at, stale_reason, suspect_at, suspect_reason, position)
        WHERE s.stale_at IS NOT NULL OR s.suspect_at IS NOT NULL
    ), old AS MATERIALIZED (
        -- The daemon yields to the application: it skips a locked row and reports it to the caller.
        SELECT s.position, l.place, l.registered_at, l.suppressed, l.suppressed_since, l.device_id,
               l.unregistered_by_app_at, l.superseded_at, l.stale_at AS was_stale_at, l.suspect_at AS was_suspect_at,
               l.moves & 1 > 0 AS stale_moves, l.moves & 2 > 0 AS suspect_moves,
               CASE WHEN l.moves & 1 > 0 THEN s.stale_at ELSE l.stale_at END AS stale_at,
               CASE WHEN l.moves & 1 > 0 THEN s.stale_reason ELSE l.stale_reason END AS stale_reason,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_at ELSE l.suspect_at END AS suspect_at,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_reason ELSE l.suspect_reason END AS suspect_reason
        FROM said AS s
        -- A subquery for each token, not a join: then any plan, however old, looks them up one by one, in order.
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.registered_at, k.suppressed, k.suppressed_since, k.device_id, k.unregistered_by_app_at, k.superseded_at,
                   k.stale_at, k.stale_reason, k.suspect_at, k.suspect_reason,
                   CASE WHEN coalesce((s.stale_at, s.stale_reason COLLATE "C") > (k.stale_at, k.stale_reason), s.stale_at IS NOT NULL) THEN 1 ELSE 0 END
                   + CASE WHEN coalesce((s.suspect_at, s.suspect_reason COLLATE "C") > (k.suspect_at, k.suspect_reason), s.suspect_at IS NOT NULL)
                          THEN 2 ELSE 0 END AS moves
            FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET stale_at = o.stale_at, stale_reason = o.stale_reason, suspect_at = o.suspect_at, suspect_reason = o.suspect_reason,
            suppressed_since = CASE
                WHEN o.suppressed THEN o.suppressed_since
                WHEN greatest(o.stale_at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at) >= o.registered_at THEN learned END
        FROM old AS o
        -- If an application has changed a row since this statement began, its ctid no longer matches: it is reported as locked.
        WHERE l.ctid = o.place AND (o.stale_moves OR o.suspect_moves)
        RETURNING o.position, l.topic_id, l.token_key, o.registered_at, l.suppressed, o.suppressed AS was_suppressed, l.device_id,
            o.stale_moves, l.stale_at, l.stale_reason, l.suspect_at, l.suspect_reason, l.unregistered_by_app_at, l.superseded_at,
            o.was_stale_at, o.was_suspect_at
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT n.topic_id, n.token_key,
               CASE WHEN n.suppressed THEN 'invalidated' ELSE 'late_feedback_ignored' END,
               c.cause, CASE c.cause WHEN 'stale' THEN n.stale_reason WHEN 'suspect' THEN n.suspect_reason END, n.device_id,
               nullif(n.registered_at, '-infinity'), nullif(n.registered_at, '-infinity'),
               greatest(n.was_stale_at, n.was_suspect_at, n.unregistered_by_app_at, n.superseded_at),
               greatest(n.stale_at, n.suspect_at, n.unregistered_by_app_at, n.superseded_at)
        FROM changed AS n
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN n.suppressed THEN tokenkeeper.cause_of(n.stale_at, n.suspect_at, n.unregistered_by_app_at, n.superseded_at)
                WHEN n.stale_moves THEN 'stale' ELSE 'suspect' END AS cause) AS c
        WHERE NOT n.was_suppressed
           OR c.cause <> tokenkeeper.cause_of(n.was_stale_at, n.was_suspect_at, n.unregistered_by_app_at, n.superseded_at)
    )
    -- NOT IN is hashed. NOT EXISTS would be a nested loop, because the planner assumes ten rows for an unnested array.
    SELECT coalesce(array_agg(s.position ORDER BY s.position), '{}'), array_agg(s.topic_id ORDER BY s.position),
           array_agg(s.token_key ORDER BY s.position), array_agg(s.stale_at ORDER BY s.position),
           array_agg(s.stale_reason ORDER BY s.position), array_agg(s.suspect_at ORDER BY s.position),
           array_agg(s.suspect_reason ORDER BY s.position)
    INTO left_over, new_topics, new_keys, new_stale_at, new_stale_reason, new_suspect_at, new_suspect_reason
    FROM said AS s
    WHERE s.position NOT IN (
        SELECT c.position FROM changed AS c UNION ALL SELECT o.position FROM old AS o WHERE NOT o.stale_moves AND NOT o.suspect_moves);

    -- What is left over is new, or locked. If an application is adding such a token, the INSERT would wait for it, while this transaction
    -- holds rows that the same application may want next. So try all at once with a very short timeout; if that meets a lock, find the locked
    -- token by halving. Stop before a session that waits for this transaction can look for a deadlock: PostgreSQL would end the application,
    -- not this.
    PERFORM set_config('lock_timeout', '3ms', true);
    many := greatest(cardinality(left_over), 1);
    WHILE first <= cardinality(left_over) LOOP
        IF clock_timestamp() > waited_since + current_setting('deadlock_timeout')::interval / 2 THEN
            -- The rest can wait.
            locked := locked || left_over[first:];
            EXIT;
        END IF;
        BEGIN
            WITH wanted AS MATERIALIZED (
                SELECT s.*
                FROM unnest(left_over, new_topics, new_keys, new_stale_at, new_stale_reason, new_suspect_at, new_suspect_reason)
                     WITH ORDINALITY AS s (position, topic_id, token_key, stale_at, stale_reason, suspect_at, suspect_reason, n)
                WHERE s.n BETWEEN first AND first + many - 1
            ), added AS (
                INSERT INTO tokenkeeper.ledger AS l
                    (topic_id, token_key, stale_at, stale_reason, suspect_at, suspect_reason, suppressed_since)
                SELECT w.topic_id, w.token_key, w.stale_at, w.stale_reason, w.suspect_at, w.suspect_reason, learned
                FROM wanted AS w
                WHERE w.topic_id IS NOT NULL
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS e WHERE e.topic_id = w.topic_id AND e.token_key = w.token_key)
                ORDER BY w.n
                ON CONFLICT DO NOTHING
                RETURNING l.topic_id, l.token_key, l.stale_at, l.stale_reason, l.suspect_at, l.suspect_reason
            ), told AS (
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, invalidated_after)
                SELECT a.topic_id, a.token_key, 'invalidated', c.cause,
                       CASE c.cause WHEN 'stale' THEN a.stale_reason ELSE a.suspect_reason END, greatest(a.stale_at, a.suspect_at)
                FROM added AS a
                CROSS JOIN LATERAL (SELECT tokenkeeper.cause_of(a.stale_at, a.suspect_at, NULL, NULL) AS cause) AS c
            )
            SELECT locked || coalesce(array_agg(w.position), '{}') INTO locked FROM wanted AS w
            WHERE (coalesce(w.topic_id, 0), w.token_key) NOT IN (SELECT a.topic_id, a.token_key FROM added AS a);
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE cardinality(left_over) END;
        EXCEPTION WHEN lock_not_available THEN
            IF many = 1 THEN
                locked := locked || left_over[first];
                first := first + 1;
                many := cardinality(left_over);
            ELSE
                locked_until := least(first + many - 1, cardinality(left_over));
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);

    IF cardinality(record.suspect_of) > 0 THEN
        -- Each suspect that counts is kept while it can be undone. The guard counts those that suppress.
        PERFORM tokenkeeper.note_guard(array_agg(topic_ids[record.of_topic[s.of_token]]), array_agg(record.token_keys[s.of_token]),
                                       array_agg(s.queued_at))
        FROM unnest(record.suspect_of, record.suspect_queued_at, fates) AS s (of_token, queued_at, fate)
        WHERE s.fate = 'suppresses' AND s.of_token NOT IN (SELECT unnest(locked));
        INSERT INTO tokenkeeper.suspect (topic_id, token_key, suspect_at, reason, queued_at, suppresses)
        SELECT topic_ids[record.of_topic[s.of_token]], record.token_keys[s.of_token], s.at, s.reason, max(s.queued_at),
               bool_or(s.fate = 'suppresses')
        FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, record.suspect_queued_at, fates)
             AS s (of_token, at, reason, queued_at, fate)
        WHERE s.fate IN ('counts', 'suppresses', 'released') AND s.of_token NOT IN (SELECT unnest(locked))
        GROUP BY 1, 2, 3, 4
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN QUERY
        SELECT l::integer, NULL::integer, NULL::integer, NULL::integer, NULL::integer FROM unnest(locked) AS l
        UNION ALL
        SELECT NULL, CASE s.fate WHEN 'held' THEN s.ordinal::integer END, CASE s.fate WHEN 'waits' THEN s.ordinal::integer END, NULL, NULL
        FROM unnest(fates) WITH ORDINALITY AS s (fate, ordinal) WHERE s.fate IN ('held', 'waits');
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], integer[], timestamptz[], text[],
                                       timestamptz[], boolean[], bigint, numeric) IS
    'Records what a batch of results says about tokens: each key once, in key order (otherwise two batches may deadlock), with the greatest stale_at '
    'and its reason; and each of their suspects. of_topic is an index into environments and topics, suspect_of one into token_keys; both start at 1. '
    'Each returned row has exactly one value: locked_token, an index into token_keys: an application holds the token and nothing about it was recorded; '
    'held_suspect, an index into suspect_of: the mass-failure guard holds the suspect and the caller writes it to held_result; waiting_suspect, an '
    'index into suspect_of: the topic''s guard was busy; tripped_topic or reset_topic, an index into topics: its guard has tripped or reset.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], integer[], timestamptz[], text[],
                                              timestamptz[], boolean[], bigint, numeric) FROM PUBLIC;
