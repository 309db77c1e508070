-- The guard: decides which reports that tokens are invalid count, and keeps their receipts. One guard serves suspects, 410s, and logouts from a table or a file.
--
-- Batches of several daemons that run at once do not see each other, so each of them may record up to the limit before the guard trips.
--
-- Locks: a row of tripped_guard, which another batch skips, or waits 10 ms for.

CREATE OR REPLACE FUNCTION tokenkeeper.hour_of(at timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN date_bin('1 hour', at, '2000-01-01 00:00:00+00');
COMMENT ON FUNCTION tokenkeeper.hour_of(timestamptz) IS 'The hour of suppression_count of an instant, the same in every time zone.';

CREATE OR REPLACE FUNCTION tokenkeeper.guarded_words(cause text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE cause WHEN 'suspect' THEN 'suspects' WHEN 'stale' THEN '410s' ELSE 'logouts from attached tables and files' END;
COMMENT ON FUNCTION tokenkeeper.guarded_words(text) IS 'What a guard of this cause holds, for messages.';

CREATE OR REPLACE FUNCTION tokenkeeper.guard_limit(
    of_topic integer, of_cause text, allowance bigint, max_share numeric, OUT active bigint, OUT max_tokens bigint)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    share numeric := max_share;
BEGIN
    SELECT coalesce(t.guard_allowance, guard_limit.allowance), CASE WHEN of_cause = 'stale' THEN share ELSE coalesce(t.guard_max_share, share) END
    INTO allowance, share FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    IF coalesce(share >= 1, true) THEN
        RETURN; -- The guard is off.
    END IF;
    SELECT coalesce(sum(c.tokens), 0) INTO active FROM tokenkeeper.token_count AS c
    WHERE c.topic_id = of_topic AND c.state = 'active' AND c.registered;
    max_tokens := greatest(allowance, floor(active * share));
END
$$;
COMMENT ON FUNCTION tokenkeeper.guard_limit(integer, text, bigint, numeric) IS
    'How many tokens of a topic a cause may suppress within a day (max_tokens), by the topic''s policy or else the given limits; null if the guard is off. And '
    'the active tokens.';

CREATE OR REPLACE FUNCTION tokenkeeper.suppressed_in_a_day(of_topic integer, of_cause text, hours timestamptz[], tokens bigint[], enough bigint)
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    guarding text COLLATE "C" := of_cause;
    first CONSTANT timestamptz := (SELECT min(h) FROM unnest(hours) AS h);
    last CONSTANT timestamptz := (SELECT max(h) FROM unnest(hours) AS h);
BEGIN
    RETURN (
        SELECT greatest(max(d.tokens), 0) FROM (
            SELECT h.hour, sum(h.tokens) OVER (ORDER BY h.hour RANGE BETWEEN '23:00' PRECEDING AND CURRENT ROW) AS tokens FROM (
                SELECT c.hour, c.tokens FROM tokenkeeper.suppression_count AS c
                WHERE c.topic_id = of_topic AND c.cause = guarding AND c.hour BETWEEN first - interval '23:00' AND last + interval '23:00'
                UNION ALL
                SELECT * FROM unnest(hours, suppressed_in_a_day.tokens)) AS h) AS d
        WHERE d.hour >= first
    ) + (
        SELECT count(*) FROM (
            SELECT DISTINCT f.token_key FROM (
                SELECT h.token_key FROM tokenkeeper.held AS h
                WHERE h.topic_id + 0 = of_topic AND h.cause = guarding AND h.queued_at >= last - interval '23:00' LIMIT 10000 + enough) AS f) AS t);
END
$$;
COMMENT ON FUNCTION tokenkeeper.suppressed_in_a_day(integer, text, timestamptz[], bigint[], bigint) IS
    'How many tokens of a topic a cause suppresses within 24 clock hours if it suppresses these tokens in these hours: the most of all days with one of '
    'them. And those that the guard holds of the day that ends with the last of them or later, as far as 10,000 held rows and enough show.';

CREATE OR REPLACE FUNCTION tokenkeeper.trip_guard(of_topic integer, of_cause text, since timestamptz, tokens bigint, active bigint, max_tokens bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    guarding text COLLATE "C" := of_cause;
    patience text := current_setting('lock_timeout');
    has_tripped boolean := false;
    begins timestamptz := (
        SELECT least(since, min(r.received_at)) FROM tokenkeeper.receipt AS r
        WHERE r.topic_id + 0 = of_topic AND r.cause = guarding AND r.received_at > since - interval '1 day' AND r.counted
          -- What is being undone already needs no other undo.
          AND NOT EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                          WHERE e.topic_id = of_topic AND e.cause = guarding AND r.received_at BETWEEN e.since AND e.until));
BEGIN
    PERFORM set_config('lock_timeout', '10ms', true);
    BEGIN
        INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, undo_since, tokens, active, max_tokens)
        VALUES (of_topic, guarding, begins, trip_guard.tokens, trip_guard.active, trip_guard.max_tokens) ON CONFLICT DO NOTHING;
        has_tripped := FOUND;
    EXCEPTION WHEN lock_not_available THEN
        NULL; -- Another daemon is tripping it.
    END;
    PERFORM set_config('lock_timeout', patience, true);
    IF NOT has_tripped THEN
        RETURN false;
    END IF;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'guard_tripped', t.environment, t.topic, trip_guard.tokens,
           format('%s would suppress %s of %s active tokens within a day, more than %s: they are held',
                  tokenkeeper.guarded_words(guarding), trip_guard.tokens, trip_guard.active, trip_guard.max_tokens)
    FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.trip_guard(integer, text, timestamptz, bigint, bigint, bigint) IS
    'Trips a guard and logs it. Returns false if another session has done so. since is when the first of what trips it was received.';

CREATE OR REPLACE FUNCTION tokenkeeper.turn_guard(
    of_topic integer, of_cause text, hours timestamptz[], tokens bigint[], since timestamptz, allowance bigint, max_share numeric,
    OUT holds boolean, OUT has_changed boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    guarding text COLLATE "C" := of_cause;
    in_a_day bigint;
    active bigint;
    max_tokens bigint;
BEGIN
    has_changed := false;
    holds := EXISTS (SELECT FROM tokenkeeper.tripped_guard AS g WHERE g.topic_id = of_topic AND g.cause = guarding);
    SELECT l.active, l.max_tokens INTO active, max_tokens FROM tokenkeeper.guard_limit(of_topic, guarding, turn_guard.allowance, turn_guard.max_share) AS l;
    IF holds THEN
        -- What came late says nothing about today.
        hours := hours || tokenkeeper.hour_of(clock_timestamp());
        tokens := tokens || 0::bigint;
    END IF;
    IF max_tokens IS NOT NULL THEN
        in_a_day := tokenkeeper.suppressed_in_a_day(of_topic, guarding, hours, tokens, max_tokens + 1);
    END IF;
    IF NOT holds THEN
        IF in_a_day > max_tokens THEN
            holds := true;
            has_changed := tokenkeeper.trip_guard(of_topic, guarding, since, in_a_day, active, max_tokens);
        END IF;
        RETURN;
    END IF;
    -- If another daemon is at it, it decides.
    PERFORM FROM tokenkeeper.tripped_guard AS g WHERE g.topic_id = of_topic AND g.cause = guarding FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF in_a_day > max_tokens / 2 THEN
        UPDATE tokenkeeper.tripped_guard AS g SET held_at = clock_timestamp() WHERE g.topic_id = of_topic AND g.cause = guarding AND since IS NOT NULL;
        RETURN;
    END IF;
    DELETE FROM tokenkeeper.tripped_guard AS g WHERE g.topic_id = of_topic AND g.cause = guarding;
    holds := false;
    has_changed := true;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'guard_reset', t.environment, t.topic, in_a_day,
           format('%s suppress %s within a day', tokenkeeper.guarded_words(guarding),
                  CASE coalesce(in_a_day, 0) WHEN 1 THEN '1 token' ELSE coalesce(in_a_day, 0) || ' tokens' END)
    FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
END
$$;
COMMENT ON FUNCTION tokenkeeper.turn_guard(integer, text, timestamptz[], bigint[], timestamptz, bigint, numeric) IS
    'Trips the guard of a topic and cause if these tokens of these hours make a day exceed the limit; resets it if the day has at most half of the limit. '
    'since is when the first of them was received, null for none. Returns whether the guard holds now, and whether it tripped or reset. Waits for another '
    'session 10 ms at most.';

CREATE OR REPLACE FUNCTION tokenkeeper.reports_that_suppress(reports tokenkeeper.token_report[]) RETURNS tokenkeeper.token_report[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN ARRAY(
        SELECT r FROM unnest(reports) AS r
        LEFT JOIN LATERAL (
            SELECT l.suppressed, l.registered_at, l.returned_at FROM tokenkeeper.ledger AS l WHERE l.topic_id = r.topic_id AND l.token_key = r.token_key) AS l
            ON true
        WHERE r.released IS NOT TRUE AND (r.cause <> 'unregistered_by_app' OR r.source_id IS NOT NULL)
          -- An unknown token loses only a suspect's push: a backfill reports each old logout, and a 410 says that somebody has sent to it before.
          AND CASE WHEN r.cause = 'suspect' THEN coalesce(NOT l.suppressed AND r.invalidated_at >= l.registered_at, true)
                   ELSE NOT l.suppressed AND r.invalidated_at >= l.registered_at AND l.registered_at > '-infinity'
                        -- A flag that is off and on within one batch.
                        AND (r.cause <> 'unregistered_by_app' OR (l.returned_at >= r.invalidated_at) IS NOT TRUE) END);
END
$$;
COMMENT ON FUNCTION tokenkeeper.reports_that_suppress(tokenkeeper.token_report[]) IS
    'Which of these reports would suppress a sendable token: an active one, or for a suspect also an unknown one. Without released ones, and logouts of the '
    'application itself.';

CREATE OR REPLACE FUNCTION tokenkeeper.judge(
    reports tokenkeeper.token_report[], allowance bigint, max_share numeric,
    OUT counting tokenkeeper.token_report[], OUT held tokenkeeper.token_report[], OUT changes tokenkeeper.guard_change[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    guarding CONSTANT text COLLATE "C" := reports[1].cause;
    suppressing tokenkeeper.token_report[];
    one record;
    turned record;
BEGIN
    counting := coalesce(reports, '{}');
    held := '{}';
    changes := '{}';
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.cause = guarding AND e.topic_id = ANY (ARRAY(SELECT DISTINCT r.topic_id FROM unnest(reports) AS r))) THEN
        counting := ARRAY(
            SELECT r FROM unnest(reports) AS r
            WHERE (r.cause = 'unregistered_by_app' AND r.source_id IS NULL)
               OR NOT EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                              WHERE e.topic_id = r.topic_id AND e.cause = guarding AND r.received_at BETWEEN e.since AND e.until));
    END IF;
    IF guarding = 'stale' AND coalesce(max_share >= 1, true) THEN
        RETURN;
    END IF;
    suppressing := tokenkeeper.reports_that_suppress(counting);
    FOR one IN
        SELECT h.topic_id, min(h.since) AS since, array_agg(h.hour) AS hours, array_agg(h.tokens) AS tokens FROM (
            SELECT f.topic_id, tokenkeeper.hour_of(f.received_at) AS hour, min(f.received_at) AS since, count(*) FILTER (
                       -- Each token once a day.
                       WHERE NOT EXISTS (SELECT FROM tokenkeeper.receipt AS c
                                         WHERE c.topic_id = f.topic_id AND c.token_key = f.token_key AND c.cause = guarding AND c.counted
                                           AND c.received_at BETWEEN f.received_at - interval '1 day' AND f.received_at + interval '1 day')
                         AND NOT EXISTS (SELECT FROM tokenkeeper.held AS k
                                         WHERE k.topic_id = f.topic_id AND k.token_key = f.token_key AND k.cause = guarding
                                           AND k.queued_at > f.received_at - interval '1 day')) AS tokens
            FROM (SELECT r.topic_id, r.token_key, min(r.received_at) AS received_at FROM unnest(suppressing) AS r GROUP BY 1, 2) AS f
            GROUP BY 1, 2) AS h
        GROUP BY 1 ORDER BY 1
    LOOP
        SELECT * INTO turned FROM tokenkeeper.turn_guard(one.topic_id, guarding, one.hours, one.tokens, one.since, judge.allowance, judge.max_share);
        IF turned.has_changed THEN
            changes := changes || ROW(one.topic_id, guarding, turned.holds)::tokenkeeper.guard_change;
        END IF;
        IF turned.holds THEN
            held := held || ARRAY(SELECT r FROM unnest(suppressing) AS r WHERE r.topic_id = one.topic_id);
        END IF;
    END LOOP;
    IF held <> '{}' THEN
        counting := ARRAY(SELECT r FROM unnest(counting) AS r WHERE r.n NOT IN (SELECT h.n FROM unnest(held) AS h));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge(tokenkeeper.token_report[], bigint, numeric) IS
    'Which of these reports, all of one cause, count now, and which the guard holds; the others are in a window of reinstate, and never count. Also returns '
    'the guards that tripped or reset. max_share of 1 or null turns the guard for 410s off.';

CREATE OR REPLACE FUNCTION tokenkeeper.thin_receipts(of_topic integer[], token_keys bytea[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
DECLARE
    most CONSTANT integer := 50;
    kept_at_each_end CONSTANT integer := 20;
    topics integer[];
    keys bytea[];
BEGIN
    SELECT array_agg(k.topic_id), array_agg(k.token_key) INTO topics, keys
    FROM (SELECT DISTINCT u.topic_id, u.token_key FROM unnest(thin_receipts.of_topic, thin_receipts.token_keys) AS u (topic_id, token_key)) AS k
    -- A subquery for each token, which reads no more than it needs; EXISTS may be hashed.
    WHERE (SELECT true FROM tokenkeeper.receipt AS r WHERE r.topic_id = k.topic_id AND r.token_key = k.token_key OFFSET most LIMIT 1);
    IF keys IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM tokenkeeper.receipt AS d
    WHERE d.ctid = ANY (ARRAY(
        SELECT r.tid FROM unnest(topics, keys) AS k (topic_id, token_key)
        CROSS JOIN LATERAL (
            SELECT s.ctid AS tid, s.counted, row_number() OVER (kind ORDER BY s.received_at, s.ctid) AS from_first,
                   row_number() OVER (kind ORDER BY s.received_at DESC, s.ctid DESC) AS from_last,
                   row_number() OVER (kind ORDER BY s.invalidated_at DESC, s.reason DESC, s.ctid) AS from_greatest
            FROM tokenkeeper.receipt AS s WHERE s.topic_id = k.topic_id AND s.token_key = k.token_key
            -- Logouts of the application itself, which no undo touches, are a kind of their own.
            WINDOW kind AS (PARTITION BY s.cause, s.source_id IS NULL)) AS r
        WHERE r.from_first > kept_at_each_end AND r.from_last > kept_at_each_end AND r.from_greatest > 1 AND NOT r.counted));
END
$$;
COMMENT ON FUNCTION tokenkeeper.thin_receipts(integer[], bytea[]) IS
    'Bounds the receipts of suppressed tokens that are reported again and again: of a token with more than 50, keeps the greatest, the first 20 and the last '
    '20 of each cause, and the counted ones; the same of logouts by the application itself. An undo may then revive a token too much, which its next 410 '
    'ends, but leaves none suppressed by what was undone. Call it with the tokens locked.';

CREATE OR REPLACE FUNCTION tokenkeeper.keep_receipts(reports tokenkeeper.token_report[], turned integer[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    WITH kept AS (
        INSERT INTO tokenkeeper.receipt AS k (received_at, invalidated_at, source_id, topic_id, counted, cause, token_key, reason)
        SELECT r.received_at, r.invalidated_at, r.source_id, r.topic_id,
               r.n IN (SELECT unnest(turned)) AND r.released IS NOT TRUE AND (r.cause <> 'unregistered_by_app' OR r.source_id IS NOT NULL)
               AND NOT EXISTS (SELECT FROM tokenkeeper.receipt AS c
                               WHERE c.topic_id = r.topic_id AND c.token_key = r.token_key AND c.cause = r.cause AND c.counted
                                 AND c.received_at BETWEEN r.received_at - interval '1 day' AND r.received_at + interval '1 day'),
               r.cause, r.token_key, r.reason
        FROM unnest(reports) AS r
        RETURNING k.topic_id, k.cause, k.received_at, k.counted
    )
    INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
    SELECT tokenkeeper.hour_of(k.received_at), k.topic_id, k.cause, count(*) FROM kept AS k WHERE k.counted GROUP BY 1, 2, 3;
    IF EXISTS (SELECT FROM unnest(reports) AS r WHERE r.n NOT IN (SELECT unnest(turned))) THEN
        PERFORM tokenkeeper.thin_receipts(array_agg(r.topic_id), array_agg(r.token_key))
        FROM unnest(reports) AS r WHERE r.n NOT IN (SELECT unnest(turned));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.keep_receipts(tokenkeeper.token_report[], integer[]) IS
    'Keeps a receipt of each of these reports, which were merged into the ledger, and counts those that suppressed a token: turned, by n. Call it with the '
    'tokens locked.';

CREATE OR REPLACE FUNCTION tokenkeeper.reset_guards(allowance bigint, max_share numeric, hold_stale_share numeric)
RETURNS TABLE (environment text, topic text, cause text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    RETURN QUERY
        SELECT t.environment, t.topic, g.cause
        FROM (SELECT q.* FROM tokenkeeper.tripped_guard AS q
              WHERE coalesce(q.held_at < clock_timestamp() - interval '10 minutes', true) ORDER BY q.topic_id, q.cause OFFSET 0) AS g
        JOIN tokenkeeper.topic AS t USING (topic_id)
        CROSS JOIN LATERAL tokenkeeper.turn_guard(
            g.topic_id, g.cause, ARRAY[tokenkeeper.hour_of(clock_timestamp())], '{0}', NULL, reset_guards.allowance,
            CASE g.cause WHEN 'stale' THEN reset_guards.hold_stale_share ELSE reset_guards.max_share END) AS r
        WHERE r.has_changed;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reset_guards(bigint, numeric, numeric) IS
    'Resets, and returns, the guards that have held nothing for ten minutes and whose cause suppresses at most half of the limit within the last day.';

CREATE OR REPLACE FUNCTION tokenkeeper.reconsider_guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.tripped_guard AS g SET held_at = NULL WHERE g.topic_id = new.topic_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reconsider_guard() IS 'Trigger: makes the daemons check a tripped guard again when its limits have changed.';
