-- oldest daemon: 0.1.0
--
-- The drain at the speed of the database: a past leaf is read whole and truncated, what is left of it to record goes to a leaf of
-- its own, and a token's row is looked up once a batch.

CREATE TABLE tokenkeeper.send_result_backlog PARTITION OF tokenkeeper.send_result FOR VALUES IN (9);
COMMENT ON TABLE tokenkeeper.send_result_backlog IS
    'What a daemon has taken out of past leaves of the queue and has not recorded yet: all but the 200s, which were counted on the way.';
ALTER TABLE tokenkeeper.send_result_backlog REPLICA IDENTITY FULL;
ALTER TABLE tokenkeeper.send_result_backlog SET (vacuum_truncate = off);
COMMENT ON COLUMN tokenkeeper.send_result.leaf IS
    'Internal: the partition, chosen by the clock; 8 for results set aside, 9 for those taken out of past leaves.';

-- As in 0008, but that the rows which are there are taken first, and changed where they were found.
CREATE OR REPLACE FUNCTION tokenkeeper.record(
    environments text[],
    topics text[],
    of_topic integer[],
    token_keys bytea[],
    dead_at timestamptz[],
    dead_reason text[],
    suspect_of integer[],
    suspect_at timestamptz[],
    suspect_reason text[],
    suspect_queued_at timestamptz[],
    suspect_released boolean[],
    guard_min_tokens bigint,
    guard_max_share numeric) RETURNS TABLE (fate text, at_position bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off -- As in 0003: a plan made for a small ledger must not outlive it.
AS $$
DECLARE
    topic_ids integer[] := '{}';
    found_id integer;
    learned timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
    total integer := cardinality(record.token_keys);
    first integer := 1;
    many integer;
    locked_until integer := 0;
    fates text[] := array_fill('excluded'::text, ARRAY[cardinality(record.suspect_of)]);
    ordinals integer[];
    heard_at timestamptz[] := array_fill(NULL::timestamptz, ARRAY[total]);
    heard_reason text[] := array_fill(NULL::text, ARRAY[total]);
    judged text[];
    left_over bigint[];
    new_topics integer[];
    new_keys bytea[];
    new_dead_at timestamptz[];
    new_dead_reason text[];
    new_suspect_at timestamptz[];
    new_suspect_reason text[];
    locked bigint[] := '{}';
BEGIN
    -- A topic that is new may be about to be added by an application, and an INSERT would wait for that: with little patience, then.
    PERFORM set_config('lock_timeout', '10ms', true);
    FOR n IN 1..cardinality(record.topics) LOOP
        BEGIN
            found_id := tokenkeeper.ensure_topic(record.environments[n], record.topics[n]);
        EXCEPTION WHEN lock_not_available THEN
            found_id := NULL;
        END;
        topic_ids := topic_ids || found_id;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);

    IF total > 0 AND cardinality(record.suspect_of) > 0 THEN
        FOR n IN 1..cardinality(record.topics) LOOP
            SELECT array_agg(s.ordinal ORDER BY s.ordinal) INTO ordinals
            FROM unnest(record.suspect_of) WITH ORDINALITY AS s (of_token, ordinal) WHERE record.of_topic[s.of_token] = n;
            CONTINUE WHEN ordinals IS NULL;
            BEGIN
                IF topic_ids[n] IS NULL THEN
                    RAISE lock_not_available;
                END IF;
                SELECT tokenkeeper.judge(topic_ids[n], array_agg(record.token_keys[record.suspect_of[o]] ORDER BY o),
                           array_agg(record.suspect_at[o] ORDER BY o), array_agg(record.suspect_queued_at[o] ORDER BY o),
                           array_agg(coalesce(record.suspect_released[o], false) ORDER BY o),
                           array_agg(record.dead_at[record.suspect_of[o]] ORDER BY o),
                           record.guard_min_tokens, record.guard_max_share)
                INTO judged FROM unnest(ordinals) AS o;
            EXCEPTION WHEN lock_not_available THEN
                -- Another daemon, or an operator, is at this topic's guard.
                judged := array_fill('waits'::text, ARRAY[cardinality(ordinals)]) || 'stays'::text;
            END;
            IF judged[cardinality(judged)] <> 'stays' THEN
                RETURN QUERY SELECT judged[cardinality(judged)], n::bigint;
            END IF;
            FOR i IN 1..cardinality(ordinals) LOOP
                fates[ordinals[i]] := judged[i];
            END LOOP;
        END LOOP;
        -- The latest of each token.
        SELECT array_agg(h.at ORDER BY t.n), array_agg(h.reason ORDER BY t.n) INTO heard_at, heard_reason
        FROM generate_series(1, total) AS t (n)
        LEFT JOIN (
            SELECT DISTINCT ON (s.of_token) s.of_token, s.at, s.reason
            FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, fates) AS s (of_token, at, reason, fate)
            WHERE s.fate IN ('counts', 'silences', 'released')
            ORDER BY s.of_token, s.at DESC, s.reason COLLATE "C" DESC) AS h ON h.of_token = t.n;
    END IF;

    -- What is known comes first. Its row is found and locked once, and then changed where it was found.
    WITH said AS MATERIALIZED (
        SELECT s.position, topic_ids[s.of_topic] AS topic_id, s.token_key,
               s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason
        FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason, heard_at, heard_reason)
             WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
        WHERE s.dead_at IS NOT NULL OR s.suspect_at IS NOT NULL
    ), old AS MATERIALIZED (
        -- The daemon yields to the application: a row that somebody holds is skipped here and told to the caller.
        SELECT s.position, l.place, l.registered_at, l.suppressed, l.suppressed_since, l.device_id,
               l.unregistered_at, l.superseded_at, l.dead_at AS was_dead_at, l.suspect_at AS was_suspect_at,
               l.moves & 1 > 0 AS dead_moves, l.moves & 2 > 0 AS suspect_moves,
               CASE WHEN l.moves & 1 > 0 THEN s.dead_at ELSE l.dead_at END AS dead_at,
               CASE WHEN l.moves & 1 > 0 THEN s.dead_reason ELSE l.dead_reason END AS dead_reason,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_at ELSE l.suspect_at END AS suspect_at,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_reason ELSE l.suspect_reason END AS suspect_reason
        FROM said AS s
        -- A subquery for each, and not a join: no plan, however old, can then do else than look them up one by one, in order.
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.registered_at, k.suppressed, k.suppressed_since, k.device_id, k.unregistered_at, k.superseded_at,
                   k.dead_at, k.dead_reason, k.suspect_at, k.suspect_reason,
                   CASE WHEN coalesce((s.dead_at, s.dead_reason COLLATE "C") > (k.dead_at, k.dead_reason), s.dead_at IS NOT NULL) THEN 1 ELSE 0 END
                   + CASE WHEN coalesce((s.suspect_at, s.suspect_reason COLLATE "C") > (k.suspect_at, k.suspect_reason), s.suspect_at IS NOT NULL)
                          THEN 2 ELSE 0 END AS moves
            FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET dead_at = o.dead_at, dead_reason = o.dead_reason, suspect_at = o.suspect_at, suspect_reason = o.suspect_reason,
            suppressed_since = CASE
                WHEN o.suppressed THEN o.suppressed_since
                WHEN greatest(o.dead_at, o.suspect_at, o.unregistered_at, o.superseded_at) >= o.registered_at THEN learned END
        FROM old AS o
        -- One that an application has changed since this statement began is not seen at its new place: it is told like a locked one.
        WHERE l.ctid = o.place AND (o.dead_moves OR o.suspect_moves)
        RETURNING o.position, l.topic_id, l.token_key, o.registered_at, l.suppressed, o.suppressed AS was_suppressed, l.device_id,
            o.dead_moves, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason, l.unregistered_at, l.superseded_at,
            o.was_dead_at, o.was_suspect_at
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT n.topic_id, n.token_key,
               CASE WHEN n.suppressed THEN 'invalidated' ELSE 'late_feedback_ignored' END,
               c.cause, CASE c.cause WHEN 'dead' THEN n.dead_reason WHEN 'suspect' THEN n.suspect_reason END, n.device_id,
               nullif(n.registered_at, '-infinity'), nullif(n.registered_at, '-infinity'),
               greatest(n.was_dead_at, n.was_suspect_at, n.unregistered_at, n.superseded_at),
               greatest(n.dead_at, n.suspect_at, n.unregistered_at, n.superseded_at)
        FROM changed AS n
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN n.suppressed THEN tokenkeeper.cause_of(n.dead_at, n.suspect_at, n.unregistered_at, n.superseded_at)
                WHEN n.dead_moves THEN 'dead' ELSE 'suspect' END AS cause) AS c
        WHERE NOT n.was_suppressed
           OR c.cause <> tokenkeeper.cause_of(n.was_dead_at, n.was_suspect_at, n.unregistered_at, n.superseded_at)
    )
    -- NOT IN is hashed; NOT EXISTS would be a nested loop, because the planner takes an unnested array for ten rows.
    SELECT coalesce(array_agg(s.position ORDER BY s.position), '{}'), array_agg(s.topic_id ORDER BY s.position),
           array_agg(s.token_key ORDER BY s.position), array_agg(s.dead_at ORDER BY s.position),
           array_agg(s.dead_reason ORDER BY s.position), array_agg(s.suspect_at ORDER BY s.position),
           array_agg(s.suspect_reason ORDER BY s.position)
    INTO left_over, new_topics, new_keys, new_dead_at, new_dead_reason, new_suspect_at, new_suspect_reason
    FROM said AS s
    WHERE s.position NOT IN (
        SELECT c.position FROM changed AS c UNION ALL SELECT o.position FROM old AS o WHERE NOT o.dead_moves AND NOT o.suspect_moves);

    -- What is left over is new, or in somebody's hands. One that an application is about to add would make the INSERT wait, while rows
    -- are locked here that the same application may come to want: so with very little patience, all at once; where that meets a lock, the
    -- one that is locked is found by halving. And only as long as nobody who waits for this transaction can have begun to look for
    -- a deadlock: it would be the application that is ended, and not this.
    PERFORM set_config('lock_timeout', '3ms', true);
    many := greatest(cardinality(left_over), 1);
    WHILE first <= cardinality(left_over) LOOP
        IF clock_timestamp() > learned + current_setting('deadlock_timeout')::interval / 2 THEN
            -- Then they can all wait.
            locked := locked || left_over[first:];
            EXIT;
        END IF;
        BEGIN
            WITH wanted AS MATERIALIZED (
                SELECT s.*
                FROM unnest(left_over, new_topics, new_keys, new_dead_at, new_dead_reason, new_suspect_at, new_suspect_reason)
                     WITH ORDINALITY AS s (position, topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, n)
                WHERE s.n BETWEEN first AND first + many - 1
            ), added AS (
                INSERT INTO tokenkeeper.ledger AS l
                    (topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, suppressed_since)
                SELECT w.topic_id, w.token_key, w.dead_at, w.dead_reason, w.suspect_at, w.suspect_reason, learned
                FROM wanted AS w
                WHERE w.topic_id IS NOT NULL
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS e WHERE e.topic_id = w.topic_id AND e.token_key = w.token_key)
                ORDER BY w.n
                ON CONFLICT DO NOTHING
                RETURNING l.topic_id, l.token_key, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason
            ), told AS (
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, invalidated_after)
                SELECT a.topic_id, a.token_key, 'invalidated', c.cause,
                       CASE c.cause WHEN 'dead' THEN a.dead_reason ELSE a.suspect_reason END, greatest(a.dead_at, a.suspect_at)
                FROM added AS a
                CROSS JOIN LATERAL (SELECT tokenkeeper.cause_of(a.dead_at, a.suspect_at, NULL, NULL) AS cause) AS c
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
        -- Each suspect that counts now is kept for as long as it may be undone; the guard counts those that silence.
        PERFORM tokenkeeper.note_guard(c.topic_id, c.token_keys, c.queued_at) FROM (
            SELECT topic_ids[record.of_topic[s.of_token]] AS topic_id, array_agg(record.token_keys[s.of_token]) AS token_keys,
                   array_agg(s.queued_at) AS queued_at
            FROM unnest(record.suspect_of, record.suspect_queued_at, fates) AS s (of_token, queued_at, fate)
            WHERE s.fate = 'silences' AND s.of_token NOT IN (SELECT unnest(locked))
            GROUP BY 1) AS c;
        INSERT INTO tokenkeeper.suspect (topic_id, token_key, suspect_at, reason, queued_at, silenced)
        SELECT topic_ids[record.of_topic[s.of_token]], record.token_keys[s.of_token], s.at, s.reason, max(s.queued_at),
               bool_or(s.fate = 'silences')
        FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, record.suspect_queued_at, fates)
             AS s (of_token, at, reason, queued_at, fate)
        WHERE s.fate IN ('counts', 'silences', 'released') AND s.of_token NOT IN (SELECT unnest(locked))
        GROUP BY 1, 2, 3, 4
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN QUERY
        SELECT 'locked', l FROM unnest(locked) AS l
        UNION ALL
        SELECT s.fate, s.ordinal FROM unnest(fates) WITH ORDINALITY AS s (fate, ordinal) WHERE s.fate IN ('held', 'waits');
END
$$;
