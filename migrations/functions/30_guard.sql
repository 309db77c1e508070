-- The mass-failure guard: counts what suspects suppress, and judges them before they are recorded. Logouts from a source have a guard of their
-- own, by cause: 28_unregistration_guard judges these.

CREATE OR REPLACE FUNCTION tokenkeeper.guard_bucket(at timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN date_bin('10 minutes', at, '2000-01-01 00:00:00+00');
COMMENT ON FUNCTION tokenkeeper.guard_bucket(timestamptz) IS 'The bucket (ten minutes) of topic_guard_count that an instant belongs to.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_bucket(timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.guarded_words(cause text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE cause WHEN 'suspect' THEN 'suspects' ELSE 'logouts from attached tables and files' END;
COMMENT ON FUNCTION tokenkeeper.guarded_words(text) IS 'What a guard holds, in words, by topic_guard.cause.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guarded_words(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.guard_changes(of_cause text, of_topic integer[], token_keys bytea[], queued_at timestamptz[])
RETURNS TABLE (topic_id integer, bucket timestamptz, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT a.topic_id, a.token_key, tokenkeeper.guard_bucket(a.queued_at) AS bucket
        FROM unnest(guard_changes.of_topic, guard_changes.token_keys, guard_changes.queued_at) AS a (topic_id, token_key, queued_at)
        WHERE a.token_key IS NOT NULL
    ), known AS MATERIALIZED (
        SELECT DISTINCT k.topic_id, k.token_key, tokenkeeper.guard_bucket(e.queued_at) AS bucket
        FROM (SELECT DISTINCT a.topic_id, a.token_key FROM asked AS a) AS k
        CROSS JOIN LATERAL (
            SELECT h.queued_at FROM tokenkeeper.held_result AS h
            WHERE guard_changes.of_cause = 'suspect' AND h.topic_id = k.topic_id AND h.token_key = k.token_key AND h.cause = 'suspect'
            UNION ALL
            SELECT s.queued_at FROM tokenkeeper.suspect AS s
            WHERE guard_changes.of_cause = 'suspect' AND s.topic_id = k.topic_id AND s.token_key = k.token_key AND s.suppresses
            UNION ALL
            SELECT h.queued_at FROM tokenkeeper.held_registration AS h
            WHERE guard_changes.of_cause = 'unregistered_by_app' AND h.topic_id = k.topic_id AND h.token_key = k.token_key
            UNION ALL
            SELECT r.queued_at FROM tokenkeeper.unregistration_receipt AS r
            WHERE guard_changes.of_cause = 'unregistered_by_app' AND r.topic_id = k.topic_id AND r.token_key = k.token_key AND r.suppresses) AS e
    ), before AS (
        SELECT k.topic_id, k.bucket, lead(k.bucket) OVER (PARTITION BY k.topic_id, k.token_key ORDER BY k.bucket) AS next FROM known AS k
    ), after AS (
        SELECT b.topic_id, b.bucket, lead(b.bucket) OVER (PARTITION BY b.topic_id, b.token_key ORDER BY b.bucket) AS next
        FROM (SELECT * FROM known UNION SELECT * FROM asked) AS b
    )
    SELECT c.topic_id, c.bucket, sum(c.tokens)::bigint FROM (
        SELECT a.topic_id, a.bucket, 1 AS tokens FROM after AS a WHERE a.next IS NULL OR a.next - a.bucket > interval '1 day'
        UNION ALL
        SELECT b.topic_id, b.bucket, -1 FROM before AS b WHERE b.next IS NULL OR b.next - b.bucket > interval '1 day') AS c
    GROUP BY 1, 2 HAVING sum(c.tokens) <> 0
$$;
COMMENT ON FUNCTION tokenkeeper.guard_changes(text, integer[], bytea[], timestamptz[]) IS
    'How suspects, or logouts, of these tokens, queued at these instants, change topic_guard_count. A token counts once per day, at the last of them '
    'on that day.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_changes(text, integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_guard(of_cause text, of_topic integer[], token_keys bytea[], queued_at timestamptz[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.topic_guard_count AS c (topic_id, cause, bucket, tokens)
    SELECT g.topic_id, note_guard.of_cause, g.bucket, g.tokens
    FROM tokenkeeper.guard_changes(note_guard.of_cause, note_guard.of_topic, note_guard.token_keys, note_guard.queued_at) AS g
    WHERE g.tokens > 0 OR EXISTS (
        SELECT FROM tokenkeeper.topic_guard_count AS k
        WHERE k.topic_id = g.topic_id AND k.cause = note_guard.of_cause COLLATE "C" AND k.bucket = g.bucket)
    -- If the sweep has deleted a bucket, it must not come back negative.
    ON CONFLICT (topic_id, cause, bucket) DO UPDATE SET tokens = greatest(c.tokens + excluded.tokens, 0)
$$;
COMMENT ON FUNCTION tokenkeeper.note_guard(text, integer[], bytea[], timestamptz[]) IS
    'Counts suspects, or logouts, in topic_guard_count. Call it before they are written to held_result or suspect, or to held_registration or '
    'unregistration_receipt, with the guards of their topics locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_guard(text, integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.recount_guard(of_cause text, of_topic integer) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic AND c.cause = of_cause COLLATE "C";
    INSERT INTO tokenkeeper.topic_guard_count (topic_id, cause, bucket, tokens)
    SELECT of_topic, of_cause, l.bucket, count(*) FROM (
        SELECT k.bucket, lead(k.bucket) OVER (PARTITION BY k.token_key ORDER BY k.bucket) AS next FROM (
            SELECT h.token_key, tokenkeeper.guard_bucket(h.queued_at) AS bucket
            FROM tokenkeeper.held_result AS h WHERE of_cause = 'suspect' AND h.topic_id = of_topic AND h.cause = 'suspect'
            UNION
            SELECT s.token_key, tokenkeeper.guard_bucket(s.queued_at)
            FROM tokenkeeper.suspect AS s WHERE of_cause = 'suspect' AND s.topic_id = of_topic AND s.suppresses
            UNION
            SELECT h.token_key, tokenkeeper.guard_bucket(h.queued_at)
            FROM tokenkeeper.held_registration AS h WHERE of_cause = 'unregistered_by_app' AND h.topic_id = of_topic
            UNION
            SELECT r.token_key, tokenkeeper.guard_bucket(r.queued_at)
            FROM tokenkeeper.unregistration_receipt AS r
            WHERE of_cause = 'unregistered_by_app' AND r.topic_id = of_topic AND r.suppresses) AS k) AS l
    WHERE l.next IS NULL OR l.next - l.bucket > interval '1 day'
    GROUP BY l.bucket;
END
$$;
COMMENT ON FUNCTION tokenkeeper.recount_guard(text, integer) IS
    'Rebuilds topic_guard_count of a topic and cause from held_result and suspect, or from held_registration and unregistration_receipt, after an '
    'operator has removed some of them.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.recount_guard(text, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.guard_tally(of_cause text, of_topic integer, token_keys bytea[])
RETURNS TABLE (bucket timestamptz, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT l.bucket, count(*) FROM (
        SELECT k.bucket, lead(k.bucket) OVER (PARTITION BY k.token_key ORDER BY k.bucket) AS next FROM (
            SELECT DISTINCT a.token_key, tokenkeeper.guard_bucket(e.queued_at) AS bucket
            FROM unnest(guard_tally.token_keys) AS a (token_key)
            CROSS JOIN LATERAL (
                SELECT h.queued_at FROM tokenkeeper.held_result AS h
                WHERE guard_tally.of_cause = 'suspect' AND h.topic_id = guard_tally.of_topic AND h.token_key = a.token_key AND h.cause = 'suspect'
                UNION ALL
                SELECT s.queued_at FROM tokenkeeper.suspect AS s
                WHERE guard_tally.of_cause = 'suspect' AND s.topic_id = guard_tally.of_topic AND s.token_key = a.token_key AND s.suppresses
                UNION ALL
                SELECT h.queued_at FROM tokenkeeper.held_registration AS h
                WHERE guard_tally.of_cause = 'unregistered_by_app' AND h.topic_id = guard_tally.of_topic AND h.token_key = a.token_key
                UNION ALL
                SELECT r.queued_at FROM tokenkeeper.unregistration_receipt AS r
                WHERE guard_tally.of_cause = 'unregistered_by_app' AND r.topic_id = guard_tally.of_topic AND r.token_key = a.token_key
                  AND r.suppresses) AS e) AS k) AS l
    WHERE l.next IS NULL OR l.next - l.bucket > interval '1 day'
    GROUP BY l.bucket
$$;
COMMENT ON FUNCTION tokenkeeper.guard_tally(text, integer, bytea[]) IS
    'What these tokens contribute to topic_guard_count. Call it before and after some of their suspects, or logouts, are deleted: the difference is '
    'what to subtract.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_tally(text, integer, bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.worst_day(of_cause text, of_topic integer[], token_keys bytea[], queued_at timestamptz[])
RETURNS TABLE (topic_id integer, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH span AS MATERIALIZED (
        SELECT a.topic_id, min(a.queued_at) AS since, max(a.queued_at) AS until
        FROM unnest(worst_day.of_topic, worst_day.queued_at) AS a (topic_id, queued_at) GROUP BY 1
    ), count AS (
        SELECT s.topic_id, c.bucket, c.tokens, NULL::timestamptz AS since, NULL::timestamptz AS until
        FROM span AS s
        CROSS JOIN LATERAL (
            SELECT k.bucket, k.tokens FROM tokenkeeper.topic_guard_count AS k
            WHERE k.topic_id = s.topic_id AND k.cause = worst_day.of_cause COLLATE "C" AND k.bucket BETWEEN s.since - interval '25:00' AND s.until + interval '25:00') AS c
        UNION ALL
        SELECT g.topic_id, g.bucket, g.tokens, NULL, NULL
        FROM tokenkeeper.guard_changes(worst_day.of_cause, worst_day.of_topic, worst_day.token_keys, worst_day.queued_at) AS g
        UNION ALL
        SELECT s.topic_id, tokenkeeper.guard_bucket(s.until), 0, s.since, s.until FROM span AS s -- So that a day ends there.
    ), bucket AS (
        SELECT c.topic_id, c.bucket, sum(c.tokens) AS tokens, max(c.since) AS since, max(c.until) AS until FROM count AS c GROUP BY 1, 2
    ), day AS (
        SELECT b.topic_id, b.bucket,
               sum(b.tokens) OVER (PARTITION BY b.topic_id ORDER BY b.bucket RANGE BETWEEN '24:00' PRECEDING AND CURRENT ROW) AS tokens,
               -- Not a join with span: a plan for ten topics would compare each with all.
               max(b.since) OVER (PARTITION BY b.topic_id) AS since, max(b.until) OVER (PARTITION BY b.topic_id) AS until
        FROM bucket AS b
    )
    SELECT d.topic_id, greatest(max(d.tokens), 0)::bigint FROM day AS d
    WHERE d.bucket BETWEEN tokenkeeper.guard_bucket(d.since) AND d.until + interval '24:00'
    GROUP BY 1
$$;
COMMENT ON FUNCTION tokenkeeper.worst_day(text, integer[], bytea[], timestamptz[]) IS
    'By topic, the largest number of tokens that suspects, or logouts, suppress, or would suppress, within one day of queued_at. Counts the given ones '
    'too, and considers only days that contain a given instant. A null token_key only selects the day.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.worst_day(text, integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.guard_limit(
    of_topic integer, worst bigint, INOUT allowance bigint, INOUT max_share numeric, OUT active_tokens bigint, OUT max_tokens numeric,
    OUT counted_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    -- Read in key order, scattered over the table: 20 ms from memory, 200 ms from a disk, once in ten minutes.
    max_looked CONSTANT integer := 30000;
    looked bigint;
    latest timestamptz;
BEGIN
    SELECT coalesce(t.guard_allowance, guard_limit.allowance), coalesce(t.guard_max_share, guard_limit.max_share)
    INTO allowance, max_share FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    max_tokens := allowance;
    IF max_share >= 1 THEN
        max_tokens := 'infinity';
    ELSIF worst > allowance / 2 THEN
        -- A topic that has been counted and has no active row has no active token.
        SELECT max(c.counted_at), coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)
        INTO latest, active_tokens FROM tokenkeeper.token_count AS c WHERE c.topic_id = of_topic;
        IF latest IS NULL OR latest < clock_timestamp() - interval '1 day' THEN
            SELECT g.active INTO looked FROM tokenkeeper.topic_guard AS g
            WHERE g.topic_id = of_topic AND g.active_as_of > clock_timestamp() - interval '10 minutes' ORDER BY g.active_as_of DESC LIMIT 1;
            IF looked IS NOT NULL THEN
                active_tokens := looked;
            ELSE
                -- Not counted recently. For a large topic this is a lower bound, and an old count may be the better estimate.
                SELECT count(*), CASE WHEN count(*) = max_looked THEN greatest(active_tokens, count(*) FILTER (WHERE a.active))
                                      ELSE count(*) FILTER (WHERE a.active) END
                INTO looked, active_tokens
                FROM (SELECT NOT l.suppressed AND l.registered_at > '-infinity' AS active FROM tokenkeeper.ledger AS l
                      WHERE l.topic_id = of_topic LIMIT max_looked) AS a;
                IF looked >= max_looked / 10 THEN
                    counted_at := clock_timestamp();
                END IF;
            END IF;
        END IF;
        max_tokens := greatest(allowance, floor(active_tokens * max_share));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) IS
    'How many tokens suspects, or logouts, may suppress within a day (max_tokens), by the topic''s policy or else the given limits; infinity if the guard is off. '
    'The active tokens are looked up only if worst comes near the limit: in a count of the last day, or else by reading up to 30,000 tokens. '
    'If counted_at is set, the caller stores that count in topic_guard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.lock_guards(of_cause text, topics integer[]) RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    guarding text COLLATE "C" := of_cause;
    lacking integer[];
    guarded integer[];
BEGIN
    lacking := ARRAY(SELECT t FROM unnest(topics) AS t
                     WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = t AND g.cause = guarding) ORDER BY t);
    IF lacking <> '{}' THEN
        BEGIN
            INSERT INTO tokenkeeper.topic_guard (topic_id, cause) SELECT t, guarding FROM unnest(lacking) AS t ORDER BY t ON CONFLICT DO NOTHING;
        EXCEPTION WHEN lock_not_available THEN
            NULL; -- Another daemon is adding one of them. What belongs to topics that have no guard yet waits.
        END;
    END IF;
    -- Locked until the transaction ends, so that batches are judged one after the other and each includes all before it. If another daemon
    -- or an operator holds a guard, only what belongs to that topic waits.
    guarded := ARRAY(SELECT g.topic_id FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = ANY (topics) AND g.cause = guarding
                     ORDER BY g.topic_id FOR UPDATE SKIP LOCKED);
    lacking := ARRAY(SELECT unnest(topics) EXCEPT SELECT unnest(guarded) ORDER BY 1);
    IF lacking <> '{}' THEN
        -- One lock timeout for all of them, not one each.
        BEGIN
            PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = lacking[1] AND g.cause = guarding FOR UPDATE;
            guarded := guarded || ARRAY(SELECT g.topic_id FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = ANY (lacking) AND g.cause = guarding
                                        ORDER BY g.topic_id FOR UPDATE SKIP LOCKED);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END IF;
    RETURN guarded;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_guards(text, integer[]) IS
    'Locks the guards of these topics, given in order and without duplicates, until the transaction ends, and makes those that are lacking. Returns '
    'the topics whose guard is locked now; another session holds the others.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_guards(text, integer[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.turn_guards(
    of_cause text,
    of_topic integer[],
    token_keys bytea[],
    instants timestamptz[],
    queued_at timestamptz[],
    fates text[],
    allowance bigint,
    max_share numeric,
    OUT held integer[],
    OUT tripped integer[],
    OUT reset integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    guarding text COLLATE "C" := of_cause;
    one record;
    max_tokens numeric;
    active_tokens bigint;
    as_of timestamptz;
    change text;
    seen integer[] := '{}';
    seen_tripped timestamptz[] := '{}';
    seen_undo timestamptz[] := '{}';
    seen_worst bigint[] := '{}';
    seen_active bigint[] := '{}';
    seen_as_of timestamptz[] := '{}';
    seen_max_tokens numeric[] := '{}';
BEGIN
    held := '{}';
    tripped := '{}';
    reset := '{}';
    FOR one IN
        WITH judged AS MATERIALIZED (
            SELECT * FROM unnest(turn_guards.of_topic, turn_guards.token_keys, turn_guards.instants, turn_guards.queued_at, turn_guards.fates)
                     AS s (topic_id, token_key, at, queued_at, fate)
            WHERE s.fate IN ('suppresses', 'counts')
        ), worst AS MATERIALIZED (
            SELECT w.topic_id, w.tokens FROM tokenkeeper.worst_day(
                turn_guards.of_cause,
                ARRAY(SELECT j.topic_id FROM judged AS j WHERE j.fate = 'suppresses'),
                ARRAY(SELECT j.token_key FROM judged AS j WHERE j.fate = 'suppresses'),
                ARRAY(SELECT j.queued_at FROM judged AS j WHERE j.fate = 'suppresses')) AS w
        ), topic AS MATERIALIZED (
            SELECT j.topic_id,
                   -- Where an undo has to begin: at the earliest suspect, also of tokens that were suppressed already. A suspect that was sent
                   -- long before it was queued must not stretch the undo over years, unless all were. Of logouts, only at one that suppresses:
                   -- a backfill reports old ones, too.
                   coalesce(min(j.at) FILTER (WHERE j.at > j.queued_at - interval '1 day'
                                                AND (turn_guards.of_cause = 'suspect' OR j.fate = 'suppresses')),
                            min(j.at) FILTER (WHERE j.fate = 'suppresses')) AS earliest,
                   min(j.queued_at) FILTER (WHERE j.fate = 'suppresses') AS first_queued,
                   max(j.queued_at) FILTER (WHERE j.fate = 'suppresses') AS last_queued,
                   0 AS tokens
            FROM judged AS j GROUP BY 1
        ), by_topic AS (
            -- Not a join: a plan for ten topics would compare each with all.
            SELECT b.topic_id, max(b.earliest) AS earliest, max(b.first_queued) AS first_queued, max(b.last_queued) AS last_queued,
                   max(b.tokens)::bigint AS worst
            FROM (SELECT * FROM topic UNION ALL SELECT w.topic_id, NULL, NULL, NULL, w.tokens FROM worst AS w) AS b GROUP BY 1
        )
        SELECT b.*, g.tripped_at, g.undo_since, t.guard_allowance, t.guard_max_share
        FROM by_topic AS b
        CROSS JOIN LATERAL (SELECT k.tripped_at, k.undo_since FROM tokenkeeper.topic_guard AS k
                            WHERE k.topic_id = b.topic_id AND k.cause = guarding) AS g
        CROSS JOIN LATERAL (SELECT k.guard_allowance, k.guard_max_share FROM tokenkeeper.topic AS k WHERE k.topic_id = b.topic_id) AS t
        ORDER BY b.topic_id
    LOOP
        change := 'none';
        IF one.tripped_at IS NOT NULL AND one.earliest < one.undo_since THEN
            one.undo_since := one.earliest;
            change := 'reaches back';
        END IF;
        IF one.first_queued IS NULL THEN
            IF change <> 'none' THEN
                UPDATE tokenkeeper.topic_guard AS g SET undo_since = one.undo_since WHERE g.topic_id = one.topic_id AND g.cause = guarding;
            END IF;
            CONTINUE;
        END IF;
        max_tokens := coalesce(one.guard_allowance, turn_guards.allowance);
        active_tokens := NULL;
        as_of := NULL;
        IF coalesce(one.guard_max_share, turn_guards.max_share) >= 1 THEN
            max_tokens := 'infinity';
        ELSIF one.worst > max_tokens / 2 THEN
            SELECT g.active_tokens, g.max_tokens, g.counted_at INTO active_tokens, max_tokens, as_of
            FROM tokenkeeper.guard_limit(one.topic_id, one.worst, turn_guards.allowance, turn_guards.max_share) AS g;
        END IF;

        IF one.tripped_at IS NULL AND one.worst > max_tokens THEN
            tripped := tripped || one.topic_id;
            one.undo_since := tokenkeeper.undo_start(guarding, one.topic_id, one.first_queued, one.last_queued, one.earliest);
            one.tripped_at := clock_timestamp();
            INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
            SELECT 'guard_tripped', t.environment, t.topic, one.worst,
                   format('%s would suppress %s of %s active tokens within a day, more than %s: they are held',
                          tokenkeeper.guarded_words(guarding), one.worst, active_tokens, max_tokens)
            FROM tokenkeeper.topic AS t WHERE t.topic_id = one.topic_id;
        ELSIF one.tripped_at IS NOT NULL AND (one.worst <= max_tokens / 2 OR max_tokens = 'infinity') AND NOT EXISTS (
            -- These may be old, and the problem may be of a later day.
            SELECT FROM tokenkeeper.topic_guard_count AS c
            WHERE c.topic_id = one.topic_id AND c.cause = guarding AND c.bucket > one.last_queued AND c.tokens > 0) THEN
            reset := reset || one.topic_id;
            one.tripped_at := NULL;
            INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
            SELECT 'guard_reset', t.environment, t.topic, one.worst,
                   format('%s suppress %s within a day', tokenkeeper.guarded_words(guarding),
                          CASE one.worst WHEN 1 THEN '1 token' ELSE one.worst || ' tokens' END)
            FROM tokenkeeper.topic AS t WHERE t.topic_id = one.topic_id;
        END IF;
        IF one.tripped_at IS NOT NULL THEN
            held := held || one.topic_id;
        END IF;
        seen := seen || one.topic_id;
        seen_tripped := seen_tripped || one.tripped_at;
        seen_undo := seen_undo || one.undo_since;
        seen_worst := seen_worst || one.worst;
        seen_active := seen_active || active_tokens;
        seen_as_of := seen_as_of || as_of;
        seen_max_tokens := seen_max_tokens || nullif(max_tokens, 'infinity');
    END LOOP;
    UPDATE tokenkeeper.topic_guard AS g
    SET tripped_at = s.tripped_at, undo_since = s.undo_since, touched_at = clock_timestamp(), tokens = s.worst,
        active = coalesce(s.active, g.active), active_as_of = coalesce(s.as_of, g.active_as_of), max_tokens = s.max_tokens
    FROM unnest(seen, seen_tripped, seen_undo, seen_worst, seen_active, seen_as_of, seen_max_tokens)
         AS s (topic_id, tripped_at, undo_since, worst, active, as_of, max_tokens)
    WHERE g.topic_id = s.topic_id AND g.cause = guarding;
    IF held <> '{}' THEN
        PERFORM tokenkeeper.note_guard(turn_guards.of_cause, array_agg(s.topic_id), array_agg(s.token_key), array_agg(s.queued_at))
        FROM unnest(turn_guards.of_topic, turn_guards.token_keys, turn_guards.queued_at, turn_guards.fates) AS s (topic_id, token_key, queued_at, fate)
        WHERE s.fate = 'suppresses' AND s.topic_id IN (SELECT unnest(held));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.turn_guards(text, integer[], bytea[], timestamptz[], timestamptz[], text[], bigint, numeric) IS
    'Trips or resets the guards of a cause by what a batch adds, and returns the topics that hold now, that have tripped, and that have reset. The fates '
    'are those of judge_suspects; what suppresses in a topic that holds is counted here. instants are those that an undo goes by. Call it with the '
    'guards locked (lock_guards).';
REVOKE EXECUTE ON FUNCTION tokenkeeper.turn_guards(text, integer[], bytea[], timestamptz[], timestamptz[], text[], bigint, numeric) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_start(
    of_cause text, of_topic integer, first_queued timestamptz, last_queued timestamptz, earliest timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    IF of_cause = 'suspect' THEN
        RETURN (
            SELECT least(undo_start.earliest, min(s.suspect_at) FILTER (
                WHERE s.suspect_at > s.queued_at - interval '1 day'
                   OR (s.suppresses AND undo_start.earliest <= first_queued - interval '1 day')))
            FROM tokenkeeper.suspect AS s
            WHERE s.topic_id = of_topic AND s.queued_at > first_queued - interval '1 day' AND s.queued_at < last_queued + interval '1 day'
              -- What is being undone already needs no other undo.
              AND NOT EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                              WHERE e.topic_id = s.topic_id AND e.cause = 'suspect' AND s.suspect_at BETWEEN e.since AND e.until));
    END IF;
    RETURN (
        SELECT least(undo_start.earliest, min(r.queued_at))
        FROM tokenkeeper.unregistration_receipt AS r
        -- What made a token suppressed, and not the old logouts that a backfill reports.
        WHERE r.topic_id + 0 = of_topic AND r.source_id IS NOT NULL AND r.suppresses
          AND r.queued_at > first_queued - interval '1 day' AND r.queued_at < last_queued + interval '1 day'
          AND NOT EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                          WHERE e.topic_id = of_topic AND e.cause = 'unregistered_by_app' AND r.queued_at BETWEEN e.since AND e.until));
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_start(text, integer, timestamptz, timestamptz, timestamptz) IS
    'Where the undo of a guard that trips now should begin: at the earliest recorded suspect of that day, or at its earliest logout that suppressed '
    'a token, and at least as early as the earliest of the batch.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_start(text, integer, timestamptz, timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.judge_suspects(
    of_topic integer[],
    token_keys bytea[],
    suspect_at timestamptz[],
    queued_at timestamptz[],
    released boolean[],
    stale_at timestamptz[],
    allowance bigint,
    max_share numeric,
    OUT fates text[],
    OUT tripped integer[],
    OUT reset integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    guarded integer[] := tokenkeeper.lock_guards(
        'suspect', ARRAY(SELECT DISTINCT t FROM unnest(judge_suspects.of_topic) AS t WHERE t IS NOT NULL ORDER BY t));
    held integer[];
BEGIN
    SELECT array_agg(j.fate ORDER BY j.n) INTO fates FROM (
        SELECT s.n, CASE
                   WHEN s.topic_id IS NULL OR s.topic_id NOT IN (SELECT unnest(guarded)) THEN 'waits'
                   WHEN EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                                WHERE e.topic_id = s.topic_id AND e.cause = 'suspect' AND s.suspect_at BETWEEN e.since AND e.until) THEN 'excluded'
                   -- It suppresses a token that is sendable, or unknown.
                   WHEN NOT coalesce(NOT l.suppressed AND s.suspect_at >= l.registered_at
                                     AND NOT coalesce(s.stale_at >= l.registered_at, false), s.stale_at IS NULL) THEN 'counts'
                   WHEN s.released THEN 'released'
                   ELSE 'suppresses' END AS fate
        FROM unnest(judge_suspects.of_topic, judge_suspects.token_keys, judge_suspects.suspect_at, judge_suspects.released, judge_suspects.stale_at)
             WITH ORDINALITY AS s (topic_id, token_key, suspect_at, released, stale_at, n)
        LEFT JOIN tokenkeeper.ledger AS l ON l.topic_id = s.topic_id AND l.token_key = s.token_key) AS j;
    SELECT g.held, g.tripped, g.reset INTO held, tripped, reset
    FROM tokenkeeper.turn_guards('suspect', judge_suspects.of_topic, judge_suspects.token_keys, judge_suspects.suspect_at, judge_suspects.queued_at,
                                 judge_suspects.fates, judge_suspects.allowance, judge_suspects.max_share) AS g;
    IF held <> '{}' THEN
        SELECT array_agg(CASE WHEN s.fate = 'suppresses' AND s.topic_id IN (SELECT unnest(held)) THEN 'held' ELSE s.fate END ORDER BY s.n)
        INTO fates FROM unnest(judge_suspects.of_topic, judge_suspects.fates) WITH ORDINALITY AS s (topic_id, fate, n);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge_suspects(integer[], bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric) IS
    'The mass-failure guard: decides the fate of each suspect of a batch. waits (another session holds the topic''s guard, or the topic is null), excluded '
    '(undone by reinstate), counts (suppresses nothing that was sendable), suppresses, released (suppresses, as an operator decided) or held. Also returns '
    'the topics whose guard has tripped or reset. Locks the guards of these topics until the transaction ends.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge_suspects(integer[], bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric)
    FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.reset_guards(allowance bigint, max_share numeric) RETURNS TABLE (environment text, topic text, cause text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tripped_one record;
    worst bigint;
    limits record;
BEGIN
    FOR tripped_one IN
        SELECT g.topic_id, t.environment, t.topic, g.cause
        FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id)
        WHERE g.tripped_at IS NOT NULL AND coalesce(g.touched_at < clock_timestamp() - interval '10 minutes', true)
        FOR NO KEY UPDATE OF g SKIP LOCKED
    LOOP
        SELECT w.tokens INTO worst
        FROM tokenkeeper.worst_day(tripped_one.cause, ARRAY[tripped_one.topic_id], ARRAY[NULL::bytea], ARRAY[clock_timestamp()]) AS w;
        SELECT g.* INTO limits FROM tokenkeeper.guard_limit(tripped_one.topic_id, worst, reset_guards.allowance, reset_guards.max_share) AS g;
        UPDATE tokenkeeper.topic_guard AS g
        SET tokens = worst, max_tokens = nullif(limits.max_tokens, 'infinity'),
            active = CASE WHEN limits.counted_at IS NULL THEN g.active ELSE limits.active_tokens END,
            active_as_of = coalesce(limits.counted_at, g.active_as_of),
            tripped_at = CASE WHEN worst > limits.max_tokens / 2 THEN g.tripped_at END
        WHERE g.topic_id = tripped_one.topic_id AND g.cause = tripped_one.cause;
        CONTINUE WHEN worst > limits.max_tokens / 2;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        VALUES ('guard_reset', tripped_one.environment, tripped_one.topic, worst,
                format('%s suppress %s within a day', tokenkeeper.guarded_words(tripped_one.cause),
                       CASE worst WHEN 1 THEN '1 token' ELSE worst || ' tokens' END));
        environment := tripped_one.environment;
        topic := tripped_one.topic;
        cause := tripped_one.cause;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reset_guards(bigint, numeric) IS
    'Resets the guards that have been quiet for ten minutes and whose suspects, or logouts, of the last day suppress at most half of what is allowed. '
    'Returns these. Called by the daemons.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reset_guards(bigint, numeric) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.reconsider_guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = new.topic_id AND g.tripped_at IS NOT NULL;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reconsider_guard() IS 'Trigger: makes the daemons check a tripped guard again when its limits have changed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reconsider_guard() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.judge_stale(
    of_topic integer[], token_keys bytea[], stale_at timestamptz[], queued_at timestamptz[], released boolean[], allowance bigint, max_share numeric)
RETURNS bigint[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH turning AS MATERIALIZED (
        SELECT s.n, s.topic_id, s.queued_at
        FROM unnest(judge_stale.of_topic, judge_stale.token_keys, judge_stale.stale_at, judge_stale.queued_at, judge_stale.released)
             WITH ORDINALITY AS s (topic_id, token_key, at, queued_at, released, n)
        CROSS JOIN LATERAL (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key
              AND NOT l.suppressed AND l.registered_at > '-infinity' AND s.at >= l.registered_at) AS l
        WHERE s.at IS NOT NULL AND NOT s.released
    ), over AS (
        SELECT t.topic_id
        FROM (SELECT n.topic_id, count(*) AS tokens, max(n.queued_at) AS until FROM turning AS n GROUP BY 1) AS t
        CROSS JOIN LATERAL (
            SELECT coalesce(sum(c.tokens), 0) AS tokens FROM tokenkeeper.stale_count AS c
            WHERE c.topic_id = t.topic_id AND c.hour > t.until - interval '24:00' AND c.hour <= t.until) AS day
        CROSS JOIN LATERAL (
            SELECT sum(c.tokens) AS tokens FROM tokenkeeper.token_count AS c WHERE c.topic_id = t.topic_id AND c.state = 'active') AS active
        -- Held 410s are not in stale_count.
        CROSS JOIN LATERAL (
            SELECT count(DISTINCT h.token_key) AS tokens FROM tokenkeeper.held_result AS h
            WHERE h.topic_id = t.topic_id AND h.cause = 'stale' AND h.queued_at > t.until - interval '24:00') AS held
        WHERE t.tokens + day.tokens + held.tokens > greatest(
                coalesce((SELECT p.guard_allowance FROM tokenkeeper.topic AS p WHERE p.topic_id = t.topic_id),
                         judge_stale.allowance),
                (active.tokens + day.tokens) * judge_stale.max_share)
    )
    SELECT coalesce(array_agg(n.n ORDER BY n.n), '{}') FROM turning AS n WHERE n.topic_id IN (SELECT o.topic_id FROM over AS o)
$$;
COMMENT ON FUNCTION tokenkeeper.judge_stale(integer[], bytea[], timestamptz[], timestamptz[], boolean[], bigint, numeric) IS
    'Which of these 410s guard.hold_stale_share holds, as indices: all that turn an active token stale, if more than max_share of the topic''s active '
    'tokens, and more than the guard''s allowance, turn stale within a day. It takes no lock: two batches at once may each record up to the limit.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge_stale(integer[], bytea[], timestamptz[], timestamptz[], boolean[], bigint, numeric) FROM PUBLIC;
