-- How a daemon records a batch of results.

CREATE OR REPLACE FUNCTION tokenkeeper.thin_stale_receipts(of_topic integer[], token_keys bytea[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    most CONSTANT integer := 50;
    kept_at_each_end CONSTANT integer := 20;
    topics integer[];
    keys bytea[];
BEGIN
    SELECT array_agg(k.topic_id), array_agg(k.token_key) INTO topics, keys
    FROM (SELECT DISTINCT u.topic_id, u.token_key FROM unnest(thin_stale_receipts.of_topic, thin_stale_receipts.token_keys) AS u (topic_id, token_key)) AS k
    -- A subquery for each token, which reads no more than it needs; EXISTS may be hashed.
    WHERE (SELECT true FROM tokenkeeper.stale_receipt AS r WHERE r.topic_id = k.topic_id AND r.token_key = k.token_key OFFSET most LIMIT 1);
    IF keys IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM tokenkeeper.stale_receipt AS d
    WHERE d.ctid = ANY (ARRAY(
        SELECT r.place FROM unnest(topics, keys) AS k (topic_id, token_key)
        CROSS JOIN LATERAL (
            SELECT s.ctid AS place, s.newly, row_number() OVER (ORDER BY s.queued_at, s.ctid) AS from_first,
                   row_number() OVER (ORDER BY s.queued_at DESC, s.ctid DESC) AS from_last
            FROM tokenkeeper.stale_receipt AS s WHERE s.topic_id = k.topic_id AND s.token_key = k.token_key) AS r
        -- stale_count counts those that are newly stale.
        WHERE r.from_first > kept_at_each_end AND r.from_last > kept_at_each_end AND NOT r.newly));
END
$$;
COMMENT ON FUNCTION tokenkeeper.thin_stale_receipts(integer[], bytea[]) IS
    'Bounds the receipts of tokens that were sent to again and again although they are stale: of a token with more than 50, keeps the first 20, the last 20 '
    'and those that are newly. If APNs gives the same timestamp each time, any one window of reinstate leaves what it would leave with all of them. '
    'Called by record, which has locked the tokens.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.thin_stale_receipts(integer[], bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.record(
    environments text[],
    topics text[],
    of_topic integer[],
    token_keys bytea[],
    stale_at timestamptz[],
    stale_reason text[],
    stale_queued_at timestamptz[],
    stale_released boolean[],
    further_of integer[],
    further_at timestamptz[],
    further_reason text[],
    further_queued_at timestamptz[],
    suspect_of integer[],
    suspect_at timestamptz[],
    suspect_reason text[],
    suspect_queued_at timestamptz[],
    suspect_released boolean[],
    guard_allowance bigint,
    guard_max_share numeric,
    hold_stale_share numeric)
RETURNS TABLE (locked_token integer, held_token integer, held_suspect integer, waiting_suspect integer, tripped_topic integer, reset_topic integer)
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
    -- A session that waits for this transaction looks for a deadlock after deadlock_timeout, and PostgreSQL would then end that session. So
    -- this transaction waits for others only within half of that time.
    patience_of_others interval := current_setting('deadlock_timeout')::interval / 2;
    holds boolean;
    most integer;
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
    held bigint[] := '{}';
    newly bigint[];
    again bigint[];
    repeated bigint[];
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
            EXIT WHEN clock_timestamp() > waited_since + least(interval '100 ms', patience_of_others - interval '10 ms');
        END LOOP;
        PERFORM set_config('lock_timeout', patience, true);
    END IF;

    -- 410s that were received within an undone window never count. Nearly always there is no such window.
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e WHERE e.topic_id = ANY (topic_ids) AND e.cause = 'stale') THEN
        WITH receipt AS (
            SELECT s.n AS of_token, s.at, s.reason, s.queued_at
            FROM unnest(record.stale_at, record.stale_reason, record.stale_queued_at) WITH ORDINALITY AS s (at, reason, queued_at, n)
            WHERE s.at IS NOT NULL
            UNION ALL
            SELECT f.* FROM unnest(record.further_of, record.further_at, record.further_reason, record.further_queued_at) AS f
        ), ranked AS (
            SELECT r.*, row_number() OVER (PARTITION BY r.of_token ORDER BY r.at DESC, r.reason COLLATE "C" DESC) AS rank
            FROM receipt AS r
            WHERE NOT EXISTS (
                SELECT FROM tokenkeeper.exclusion AS e
                WHERE e.topic_id = topic_ids[record.of_topic[r.of_token]] AND e.cause = 'stale' AND r.queued_at BETWEEN e.since AND e.until)
        ), greatest_one AS (
            SELECT array_agg(r.at ORDER BY t.n) AS at, array_agg(r.reason ORDER BY t.n) AS reason, array_agg(r.queued_at ORDER BY t.n) AS queued_at
            FROM generate_series(1, total) AS t (n) LEFT JOIN (SELECT * FROM ranked WHERE ranked.rank = 1) AS r ON r.of_token = t.n
        ), further AS (
            SELECT coalesce(array_agg(r.of_token), '{}') AS of_token, coalesce(array_agg(r.at), '{}') AS at,
                   coalesce(array_agg(r.reason), '{}') AS reason, coalesce(array_agg(r.queued_at), '{}') AS queued_at
            FROM ranked AS r WHERE r.rank > 1
        )
        SELECT g.at, g.reason, g.queued_at, f.of_token, f.at, f.reason, f.queued_at
        INTO stale_at, stale_reason, stale_queued_at, further_of, further_at, further_reason, further_queued_at
        FROM greatest_one AS g CROSS JOIN further AS f;
    END IF;
    IF record.hold_stale_share IS NOT NULL THEN
        held := tokenkeeper.judge_stale(
            ARRAY(SELECT topic_ids[t.n] FROM unnest(record.of_topic) WITH ORDINALITY AS t (n, position) ORDER BY t.position),
            record.token_keys, record.stale_at, record.stale_queued_at, record.stale_released, record.guard_allowance, record.hold_stale_share);
        IF held <> '{}' THEN
            stale_at := ARRAY(SELECT CASE WHEN s.n NOT IN (SELECT unnest(held)) THEN s.at END
                              FROM unnest(record.stale_at) WITH ORDINALITY AS s (at, n) ORDER BY s.n);
        END IF;
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
                SELECT NULL::integer, NULL::integer, NULL::integer, NULL::integer, CASE WHEN t.topic_id = ANY (tripped) THEN t.position::integer END,
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
    holds := waited_since IS NOT NULL;
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
               l.logged_out_at, l.superseded_at, l.stale_at AS was_stale_at, l.suspect_at AS was_suspect_at,
               l.moves & 1 > 0 AS stale_moves, l.moves & 2 > 0 AS suspect_moves,
               CASE WHEN l.moves & 1 > 0 THEN s.stale_at ELSE l.stale_at END AS stale_at,
               CASE WHEN l.moves & 1 > 0 THEN s.stale_reason ELSE l.stale_reason END AS stale_reason,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_at ELSE l.suspect_at END AS suspect_at,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_reason ELSE l.suspect_reason END AS suspect_reason
        FROM said AS s
        -- A subquery for each token, not a join: then any plan, however old, looks them up one by one, in order.
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.registered_at, k.suppressed, k.suppressed_since, k.device_id, k.logged_out_at, k.superseded_at,
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
                WHEN greatest(o.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) >= o.registered_at THEN learned END
        FROM old AS o
        -- If an application has changed a row since this statement began, its ctid no longer matches: it is reported as locked.
        WHERE l.ctid = o.place AND (o.stale_moves OR o.suspect_moves)
        RETURNING o.position, l.topic_id, l.token_key, o.registered_at, l.suppressed, o.suppressed AS was_suppressed, l.device_id, l.user_id,
            o.stale_moves, l.stale_at, l.stale_reason, l.suspect_at, l.suspect_reason, l.logged_out_at, l.superseded_at,
            o.was_stale_at, o.was_suspect_at
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT n.topic_id, n.token_key,
               CASE WHEN n.suppressed THEN 'invalidated' ELSE 'late_feedback_ignored' END,
               c.cause, CASE c.cause WHEN 'stale' THEN n.stale_reason WHEN 'suspect' THEN n.suspect_reason END, n.device_id, n.user_id,
               nullif(n.registered_at, '-infinity'), nullif(n.registered_at, '-infinity'),
               greatest(n.was_stale_at, n.was_suspect_at, n.logged_out_at, n.superseded_at),
               greatest(n.stale_at, n.suspect_at, n.logged_out_at, n.superseded_at)
        FROM changed AS n
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN n.suppressed THEN tokenkeeper.cause_of(n.stale_at, n.suspect_at, n.logged_out_at, n.superseded_at)
                WHEN n.stale_moves THEN 'stale' ELSE 'suspect' END AS cause) AS c
        WHERE NOT n.was_suppressed
           OR c.cause <> tokenkeeper.cause_of(n.was_stale_at, n.was_suspect_at, n.logged_out_at, n.superseded_at)
    )
    -- NOT IN is hashed. NOT EXISTS would be a nested loop, because the planner assumes ten rows for an unnested array.
    SELECT coalesce(array_agg(s.position ORDER BY s.position), '{}'), array_agg(s.topic_id ORDER BY s.position),
           array_agg(s.token_key ORDER BY s.position), array_agg(s.stale_at ORDER BY s.position),
           array_agg(s.stale_reason ORDER BY s.position), array_agg(s.suspect_at ORDER BY s.position),
           array_agg(s.suspect_reason ORDER BY s.position), holds OR EXISTS (SELECT FROM old),
           -- The active tokens that turn stale; again, if they had a 410 before.
           ARRAY(SELECT c.position FROM changed AS c
                 WHERE c.stale_moves AND NOT c.was_suppressed AND c.stale_at >= c.registered_at AND c.registered_at > '-infinity'),
           ARRAY(SELECT c.position FROM changed AS c WHERE c.stale_moves AND NOT c.was_suppressed AND c.was_stale_at IS NOT NULL),
           ARRAY(SELECT o.position FROM old AS o WHERE o.was_stale_at IS NOT NULL)
    INTO left_over, new_topics, new_keys, new_stale_at, new_stale_reason, new_suspect_at, new_suspect_reason, holds, newly, again, repeated
    FROM said AS s
    WHERE s.position NOT IN (
        SELECT c.position FROM changed AS c UNION ALL SELECT o.position FROM old AS o WHERE NOT o.stale_moves AND NOT o.suspect_moves);

    -- What is left over is new, or locked. If an application is adding such a token, the INSERT would wait for it, while this transaction
    -- holds rows that the same application may want next. So try all at once with a very short timeout; if that meets a lock, find the locked
    -- token by halving. Whatever deadlock_timeout is, the first token alone is tried if nothing is locked yet: nobody can wait for that.
    PERFORM set_config('lock_timeout', '3ms', true);
    IF NOT holds THEN
        waited_since := clock_timestamp();
    END IF;
    most := CASE WHEN patience_of_others > interval '100 ms' THEN greatest(cardinality(left_over), 1) ELSE 1 END;
    many := most;
    WHILE first <= cardinality(left_over) LOOP
        IF (holds OR first > 1) AND clock_timestamp() > waited_since + patience_of_others - interval '3 ms' THEN
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
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE most END;
        EXCEPTION WHEN lock_not_available THEN
            IF many = 1 THEN
                locked := locked || left_over[first];
                first := first + 1;
                many := most;
            ELSE
                locked_until := least(first + many - 1, cardinality(left_over));
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);

    -- Each 410 that counts is kept while it can be undone.
    WITH receipt AS (
        INSERT INTO tokenkeeper.stale_receipt AS r (queued_at, stale_at, topic_id, newly, token_key, reason)
        SELECT s.queued_at, s.at, topic_ids[s.of_topic],
               s.n IN (SELECT unnest(newly)) AND NOT (s.n IN (SELECT unnest(again)) AND EXISTS (
                   SELECT FROM tokenkeeper.stale_receipt AS e
                   WHERE e.topic_id = topic_ids[s.of_topic] AND e.token_key = s.token_key AND e.newly
                     AND e.queued_at > s.queued_at - interval '1 day')),
               s.token_key, s.reason
        FROM unnest(record.of_topic, record.token_keys, record.stale_at, record.stale_reason, record.stale_queued_at)
             WITH ORDINALITY AS s (of_topic, token_key, at, reason, queued_at, n)
        WHERE s.at IS NOT NULL AND s.n NOT IN (SELECT unnest(locked))
        RETURNING r.topic_id, r.queued_at, r.newly
    )
    INSERT INTO tokenkeeper.stale_count (hour, topic_id, tokens)
    SELECT tokenkeeper.hour_of(r.queued_at), r.topic_id, count(*) FROM receipt AS r WHERE r.newly GROUP BY 1, 2;
    IF cardinality(record.further_of) > 0 THEN
        INSERT INTO tokenkeeper.stale_receipt (queued_at, stale_at, topic_id, newly, token_key, reason)
        SELECT f.queued_at, f.at, topic_ids[record.of_topic[f.of_token]], false, record.token_keys[f.of_token], f.reason
        FROM unnest(record.further_of, record.further_at, record.further_reason, record.further_queued_at) AS f (of_token, at, reason, queued_at)
        WHERE f.of_token NOT IN (SELECT unnest(locked)) AND f.of_token NOT IN (SELECT unnest(held));
    END IF;
    IF repeated <> '{}' OR cardinality(record.further_of) > 0 THEN
        PERFORM tokenkeeper.thin_stale_receipts(array_agg(topic_ids[record.of_topic[t.n]]), array_agg(record.token_keys[t.n]))
        FROM (SELECT unnest(repeated || record.further_of::bigint[]) AS n) AS t
        WHERE t.n NOT IN (SELECT unnest(locked)) AND t.n NOT IN (SELECT unnest(held));
    END IF;

    IF cardinality(record.suspect_of) > 0 THEN
        -- Each suspect that counts is kept while it can be undone. The guard counts those that suppress.
        PERFORM tokenkeeper.note_guard('suspect', array_agg(topic_ids[record.of_topic[s.of_token]]), array_agg(record.token_keys[s.of_token]),
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
        SELECT l::integer, NULL::integer, NULL::integer, NULL::integer, NULL::integer, NULL::integer FROM unnest(locked) AS l
        UNION ALL
        SELECT NULL, h::integer, NULL, NULL, NULL, NULL FROM unnest(held) AS h
        UNION ALL
        SELECT NULL, NULL, CASE s.fate WHEN 'held' THEN s.ordinal::integer END, CASE s.fate WHEN 'waits' THEN s.ordinal::integer END, NULL, NULL
        FROM unnest(fates) WITH ORDINALITY AS s (fate, ordinal) WHERE s.fate IN ('held', 'waits');
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(
    text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], boolean[], integer[], timestamptz[], text[], timestamptz[],
    integer[], timestamptz[], text[], timestamptz[], boolean[], bigint, numeric, numeric) IS
    'Records what a batch of results says about tokens: each key once, in key order (otherwise two batches may deadlock), with the greatest stale_at '
    'and its reason; each further 410 of these tokens; and each of their suspects. of_topic is an index into environments and topics, further_of and '
    'suspect_of are indices into token_keys; all start at 1. '
    'Each returned row has exactly one value: locked_token, an index into token_keys: an application holds the token and nothing about it was recorded; '
    'held_token, an index into token_keys: the 410s of this token are held by hold_stale_share and the caller writes them to held_result; '
    'held_suspect, an index into suspect_of: the mass-failure guard holds the suspect and the caller writes it to held_result; waiting_suspect, an '
    'index into suspect_of: the topic''s guard was busy; tripped_topic or reset_topic, an index into topics: its guard has tripped or reset.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.record(
    text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], boolean[], integer[], timestamptz[], text[], timestamptz[],
    integer[], timestamptz[], text[], timestamptz[], boolean[], bigint, numeric, numeric) FROM PUBLIC;
