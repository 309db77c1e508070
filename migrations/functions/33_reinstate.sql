-- How suspects, 410s and logouts from a source are undone: reinstate requests it, undo_next does it in short transactions.

CREATE OR REPLACE FUNCTION tokenkeeper.reinstate_command(topic text, environment text, since timestamptz, until timestamptz, cause text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
-- A sender may write anything as a topic, so it is quoted for the shell.
RETURN 'tokenkeeperd reinstate'
    || CASE cause WHEN 'suspect' THEN '' ELSE ' --cause ' || cause END
    || ' --topic' || CASE WHEN topic LIKE '-%' THEN '=' ELSE ' ' END
    || CASE WHEN topic COLLATE "C" ~ '[^A-Za-z0-9._-]' THEN '''' || replace(topic, '''', '''"''"''') || '''' ELSE topic END
    || ' --environment ' || environment
    || ' --since ' || to_char(since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
    || coalesce(' --until ' || to_char(until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '');
COMMENT ON FUNCTION tokenkeeper.reinstate_command(text, text, timestamptz, timestamptz, text) IS
    'The shell command that undoes this window of a topic, as in guard.undo. Without --until if until is null.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reinstate_command(text, text, timestamptz, timestamptz, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.reinstate(
    topic text, environment text, since timestamptz, until timestamptz, cause text DEFAULT 'suspect') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(reinstate.topic COLLATE "C", reinstate.environment COLLATE "C");
    of_cause text COLLATE "C" := reinstate.cause;
    results bigint;
    nothing boolean;
    undo tokenkeeper.exclusion;
BEGIN
    IF coalesce(of_cause NOT IN ('suspect', 'stale', 'unregistered_by_app'), true) THEN
        RAISE EXCEPTION 'cause is %, expected ''suspect'', ''stale'' or ''unregistered_by_app''', coalesce(quote_literal(left(of_cause, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF reinstate.since IS NULL OR reinstate.until IS NULL OR NOT isfinite(reinstate.since) OR NOT isfinite(reinstate.until)
        OR reinstate.since > reinstate.until THEN
        RAISE EXCEPTION 'the window is from % to %, expected two finite instants, the earlier one first',
            coalesce(reinstate.since::text, 'null'), coalesce(reinstate.until::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A reinstatement cannot be taken back, so it must not excuse what has not been sent or received yet.
    until := greatest(least(reinstate.until, clock_timestamp()), reinstate.since);
    -- Before the lock: this takes a tenth of a second per million.
    IF of_cause = 'suspect' THEN
        SELECT count(*) INTO results FROM tokenkeeper.suspect AS s
        WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until;
    ELSIF of_cause = 'unregistered_by_app' THEN
        SELECT count(*) INTO results FROM tokenkeeper.unregistration_receipt AS r
        WHERE r.topic_id + 0 = of_topic AND r.source_id IS NOT NULL AND r.queued_at BETWEEN reinstate.since AND reinstate.until;
    ELSE
        SELECT count(*) INTO results FROM tokenkeeper.stale_receipt AS r
        WHERE r.topic_id + 0 = of_topic AND r.queued_at BETWEEN reinstate.since AND reinstate.until;
    END IF;
    IF of_cause <> 'stale' THEN
        -- Wait for a batch that is recording suspects, or logouts; a later batch sees the exclusion.
        INSERT INTO tokenkeeper.topic_guard (topic_id, cause) VALUES (of_topic, of_cause) ON CONFLICT DO NOTHING;
        PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic AND g.cause = of_cause FOR UPDATE;
    ELSE
        -- A batch of 410s takes no guard. So wait for all batches; a later batch sees the exclusion.
        PERFORM tokenkeeper.lock_out_drains();
    END IF;
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.topic_id = of_topic AND e.cause = of_cause AND e.since <= reinstate.since AND e.until >= reinstate.until) THEN
        RETURN results;
    END IF;
    nothing := CASE of_cause
        WHEN 'suspect' THEN NOT EXISTS (SELECT FROM tokenkeeper.suspect AS s
            WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until)
        WHEN 'unregistered_by_app' THEN NOT EXISTS (SELECT FROM tokenkeeper.unregistration_receipt AS r
            WHERE r.topic_id + 0 = of_topic AND r.source_id IS NOT NULL AND r.queued_at BETWEEN reinstate.since AND reinstate.until)
        ELSE NOT EXISTS (SELECT FROM tokenkeeper.stale_receipt AS r
            WHERE r.topic_id + 0 = of_topic AND r.queued_at BETWEEN reinstate.since AND reinstate.until) END;
    INSERT INTO tokenkeeper.exclusion (topic_id, cause, since, until)
    VALUES (of_topic, of_cause, reinstate.since, reinstate.until) RETURNING * INTO undo;
    UPDATE tokenkeeper.topic_guard AS g
    SET touched_at = NULL, undo_since = CASE WHEN g.undo_since < reinstate.since THEN g.undo_since END
    WHERE g.topic_id = of_topic AND g.cause = of_cause;
    IF nothing THEN
        PERFORM tokenkeeper.end_undo(undo, false);
    END IF;
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz, text) IS
    'Undoes results of a topic, or logouts that a source reported: they never count, whenever they are recorded. With cause suspect, '
    'the suspects whose instant (sent_at) lies in the window, ends included. With cause stale, the 410s that were received (queued_at) within it, whatever '
    'their timestamp; if APNs repeats the same 410 later, it '
    'counts. With cause unregistered_by_app, the logouts that were received (queued_at) within it; those that the application '
    'itself has reported stay. This cannot be taken back. A window that ends in the future ends now. Returns how many recorded results it affects. A daemon, or '
    '`tokenkeeperd reinstate`, undoes them in short transactions; until then their tokens stay suppressed: see the view reinstatement. '
    'All else that is known about a token counts again. For 410s, the drains stand still until the transaction ends, so commit at once. '
    'Raises 22023 for an unknown topic or cause or an invalid window, 25001 if the isolation level is not read committed, 55P03 if it cannot lock out the '
    'drains within ten seconds.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.end_undo(undo tokenkeeper.exclusion, is_waiting boolean) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
BEGIN
    UPDATE tokenkeeper.exclusion AS e
    SET reached_at = NULL, reached_key = NULL,
        waits_since = CASE WHEN is_waiting THEN clock_timestamp() ELSE e.waits_since END,
        finished_at = CASE WHEN NOT is_waiting THEN clock_timestamp() END
    WHERE e.exclusion_id = undo.exclusion_id;
    IF NOT is_waiting THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message, done_by)
        SELECT 'reinstated', t.environment, t.topic, undo.tokens,
               format(CASE undo.cause WHEN 'suspect' THEN 'suspects from %s to %s do not count'
                                      WHEN 'stale' THEN '410s received from %s to %s do not count'
                                      ELSE 'logouts from attached tables and files received from %s to %s do not count' END,
                      undo.since, undo.until), undo.done_by
        FROM tokenkeeper.topic AS t WHERE t.topic_id = undo.topic_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_undo(tokenkeeper.exclusion, boolean) IS
    'Finishes a window whose end an undo has reached, or, if it is waiting for tokens that applications have locked, lets it begin again.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.end_undo(tokenkeeper.exclusion, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.lock_undone(of_topic integer, token_keys bytea[]) RETURNS bytea[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    locked bytea[];
BEGIN
    -- The ledger first, as in a sweep, and in key order. It yields to applications: what they hold is left for the next round.
    locked := ARRAY(
        SELECT k.token_key FROM (SELECT DISTINCT a.token_key FROM unnest(lock_undone.token_keys) AS a (token_key) ORDER BY 1) AS k
        CROSS JOIN LATERAL (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = lock_undone.of_topic AND l.token_key = k.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l);
    RETURN locked || ARRAY(
        SELECT a.token_key FROM unnest(lock_undone.token_keys) AS a (token_key)
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = lock_undone.of_topic AND l.token_key = a.token_key));
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_undone(integer, bytea[]) IS
    'Locks the tokens whose results a step of an undo deletes. Returns those that are locked now, and those that are no longer in the ledger.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_undone(integer, bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.uncount_guard(of_cause text, of_topic integer, token_keys bytea[], buckets timestamptz[], tallies bigint[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    INSERT INTO tokenkeeper.topic_guard_count AS c (topic_id, cause, bucket, tokens)
    SELECT uncount_guard.of_topic, uncount_guard.of_cause, d.bucket, d.tokens
    FROM (SELECT t.bucket, sum(t.tokens)::bigint AS tokens FROM (
              SELECT b.bucket, -b.tokens AS tokens FROM unnest(uncount_guard.buckets, uncount_guard.tallies) AS b (bucket, tokens)
              UNION ALL
              SELECT a.bucket, a.tokens
              FROM tokenkeeper.guard_tally(uncount_guard.of_cause, uncount_guard.of_topic, uncount_guard.token_keys) AS a) AS t
          GROUP BY 1 HAVING sum(t.tokens) <> 0) AS d
    -- A token whose last suspect of the day is undone counts at an earlier one, in a bucket that may not exist.
    WHERE d.tokens > 0 OR EXISTS (
        SELECT FROM tokenkeeper.topic_guard_count AS k
        WHERE k.topic_id = uncount_guard.of_topic AND k.cause = uncount_guard.of_cause COLLATE "C" AND k.bucket = d.bucket)
    ON CONFLICT (topic_id, cause, bucket) DO UPDATE SET tokens = greatest(c.tokens + excluded.tokens, 0)
$$;
COMMENT ON FUNCTION tokenkeeper.uncount_guard(text, integer, bytea[], timestamptz[], bigint[]) IS
    'Subtracts from topic_guard_count what these tokens do not contribute any more. buckets and tallies are their guard_tally before some of their '
    'suspects, or logouts, were deleted.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.uncount_guard(text, integer, bytea[], timestamptz[], bigint[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_suspects(undo tokenkeeper.exclusion, max_rows integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    all_keys bytea[];
    keys bytea[];
    starts timestamptz[];
    ends timestamptz[];
    buckets timestamptz[];
    tallies bigint[];
    suspects bigint;
    came_back bigint;
BEGIN
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (undo.topic_id) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = undo.topic_id AND g.cause = 'suspect' FOR UPDATE;

    SELECT array_agg(n.token_key), max(n.suspect_at) INTO all_keys, undo.reached_at FROM (
        SELECT s.token_key, s.suspect_at FROM tokenkeeper.suspect AS s
        WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until
          AND (s.suspect_at, s.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY s.suspect_at, s.token_key LIMIT least(greatest(undo_suspects.max_rows, 1), 1000)) AS n;
    IF all_keys IS NULL THEN
        -- At the end of the window. Suspects that are left were locked by an application when their turn came.
        PERFORM tokenkeeper.end_undo(undo, EXISTS (
            SELECT FROM tokenkeeper.suspect AS s
            WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until));
        -- A guard that tripped because of these may reset now.
        UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = undo.topic_id AND g.cause = 'suspect';
        RETURN 0;
    END IF;
    undo.reached_key := all_keys[cardinality(all_keys)];

    keys := tokenkeeper.lock_undone(undo.topic_id, all_keys);
    -- All windows of the topic, including those that come later: a suspect in one of them must not count again meanwhile.
    SELECT array_agg(e.since), array_agg(e.until) INTO starts, ends FROM tokenkeeper.exclusion AS e
    WHERE e.topic_id = undo.topic_id AND e.cause = 'suspect';
    SELECT array_agg(c.bucket), array_agg(c.tokens) INTO buckets, tallies FROM tokenkeeper.guard_tally('suspect', undo.topic_id, keys) AS c;

    WITH undone AS MATERIALIZED (
        DELETE FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = undo.topic_id AND s.token_key = ANY (keys)
          AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE s.suspect_at BETWEEN w.since AND w.until)
        RETURNING s.token_key, s.suppresses
    ), token AS MATERIALIZED (
        SELECT n.token_key, bool_or(n.suppresses) AS suppresses FROM undone AS n GROUP BY 1
    ), rest AS MATERIALIZED (
        SELECT u.token_key, u.suppresses, o.registered_at, o.suppressed, o.suspect_reason AS undone_reason, o.device_id, o.user_id, s.suspect_at, s.reason,
               greatest(o.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) AS was_invalidated_at,
               greatest(o.stale_at, s.suspect_at, o.logged_out_at, o.superseded_at) AS invalidated_at
        FROM token AS u
        CROSS JOIN LATERAL (
            SELECT * FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = u.token_key
              AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE l.suspect_at BETWEEN w.since AND w.until)) AS o
        LEFT JOIN LATERAL (
            SELECT r.suspect_at, r.reason FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.suspect_at BETWEEN w.since AND w.until)
            ORDER BY r.suspect_at DESC, r.reason DESC LIMIT 1) AS s ON true
    ), gone AS (
        -- A token that was known only by this suspect becomes unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key AND r.registered_at = '-infinity' AND r.invalidated_at IS NULL
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET suspect_at = r.suspect_at, suspect_reason = r.reason,
            -- The other cause was learned after the suspect that suppressed the token, so its retention starts now.
            suppressed_since = CASE
                WHEN r.invalidated_at >= r.registered_at THEN CASE WHEN r.suppresses THEN clock_timestamp() ELSE l.suppressed_since END END
        FROM rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key
          AND NOT (r.registered_at = '-infinity' AND r.invalidated_at IS NULL)
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, r.token_key, 'reinstated', 'operator', r.undone_reason, r.device_id, r.user_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    )
    SELECT (SELECT count(*) FROM undone),
           (SELECT count(*) FROM rest AS r WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false))
    INTO suspects, came_back;

    -- Subtract what they counted in the guard, without counting the others again.
    PERFORM tokenkeeper.uncount_guard('suspect', undo.topic_id, keys, buckets, tallies);
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + came_back, reached_at = undo.reached_at, reached_key = undo.reached_key
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN suspects;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_suspects(tokenkeeper.exclusion, integer) IS
    'A step of undo_next for a window of suspects. Locks the guard of the topic.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_suspects(tokenkeeper.exclusion, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_stale(undo tokenkeeper.exclusion, max_rows integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    all_keys bytea[];
    keys bytea[];
    starts timestamptz[];
    ends timestamptz[];
    receipts bigint;
    came_back bigint;
BEGIN
    SELECT array_agg(n.token_key), max(n.queued_at) INTO all_keys, undo.reached_at FROM (
        SELECT r.token_key, r.queued_at FROM tokenkeeper.stale_receipt AS r
        WHERE r.topic_id + 0 = undo.topic_id AND r.queued_at BETWEEN undo.since AND undo.until
          AND (r.queued_at, r.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY r.queued_at, r.token_key LIMIT least(greatest(undo_stale.max_rows, 1), 1000)) AS n;
    IF all_keys IS NULL THEN
        -- At the end of the window. What is left was locked by an application or a batch when its turn came.
        PERFORM tokenkeeper.end_undo(undo, EXISTS (
            SELECT FROM tokenkeeper.stale_receipt AS r
            WHERE r.topic_id + 0 = undo.topic_id AND r.queued_at BETWEEN undo.since AND undo.until));
        RETURN 0;
    END IF;
    undo.reached_key := all_keys[cardinality(all_keys)];

    -- A batch that is recording a 410 of one of these tokens holds it, so its receipts are seen once it is free.
    keys := tokenkeeper.lock_undone(undo.topic_id, all_keys);
    -- All windows of the topic, including those that come later: a 410 in one of them must not count again meanwhile.
    SELECT array_agg(e.since), array_agg(e.until) INTO starts, ends FROM tokenkeeper.exclusion AS e
    WHERE e.topic_id = undo.topic_id AND e.cause = 'stale';

    WITH undone AS MATERIALIZED (
        DELETE FROM tokenkeeper.stale_receipt AS r
        WHERE r.topic_id = undo.topic_id AND r.token_key = ANY (keys)
          AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until)
        RETURNING r.token_key, r.stale_at, r.reason, r.queued_at, r.newly
    ), rest AS MATERIALIZED (
        SELECT u.token_key, o.registered_at, o.suppressed, o.stale_reason AS undone_reason, o.device_id, o.user_id, s.stale_at, s.reason,
               u.newly, f.received_at,
               greatest(o.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) AS was_invalidated_at,
               greatest(s.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) AS invalidated_at
        FROM (SELECT DISTINCT n.token_key, n.stale_at, n.reason, bool_or(n.newly) OVER (PARTITION BY n.token_key) AS newly FROM undone AS n) AS u
        CROSS JOIN LATERAL (
            SELECT * FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = u.token_key
              -- The token's 410 is one of these; otherwise a greater one remains.
              AND l.stale_at = u.stale_at AND l.stale_reason = u.reason) AS o
        LEFT JOIN LATERAL (
            SELECT r.stale_at, r.reason FROM tokenkeeper.stale_receipt AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until)
            ORDER BY r.stale_at DESC, r.reason DESC LIMIT 1) AS s ON true
        LEFT JOIN LATERAL (
            SELECT min(r.queued_at) AS received_at FROM tokenkeeper.stale_receipt AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = u.token_key AND r.stale_at >= o.registered_at
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until)) AS f ON true
        -- It may have been received outside the windows, too.
        WHERE (s.stale_at, s.reason) IS DISTINCT FROM (o.stale_at, o.stale_reason)
    ), gone AS (
        -- A token that was known only by this 410 becomes unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key AND r.registered_at = '-infinity' AND r.invalidated_at IS NULL
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET stale_at = r.stale_at, stale_reason = r.reason,
            -- If this 410 suppressed the token first, the retention starts with the first of the 410s that remain, or now for another cause.
            suppressed_since = CASE
                WHEN r.invalidated_at >= r.registered_at THEN
                    CASE WHEN r.received_at IS NOT NULL THEN greatest(l.suppressed_since, r.received_at)
                         WHEN r.newly THEN clock_timestamp() ELSE l.suppressed_since END END
        FROM rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key
          AND NOT (r.registered_at = '-infinity' AND r.invalidated_at IS NULL)
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, r.token_key, 'reinstated', 'operator', r.undone_reason, r.device_id, r.user_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    ), uncounted AS (
        INSERT INTO tokenkeeper.stale_count (hour, topic_id, tokens)
        SELECT tokenkeeper.hour_of(n.queued_at), undo.topic_id, -count(*) FROM undone AS n WHERE n.newly GROUP BY 1
    )
    SELECT (SELECT count(*) FROM undone),
           (SELECT count(*) FROM rest AS r WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false))
    INTO receipts, came_back;
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + came_back, reached_at = undo.reached_at, reached_key = undo.reached_key
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN receipts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_stale(tokenkeeper.exclusion, integer) IS
    'A step of undo_next for a window of 410s: each token''s stale_at becomes the greatest of its 410s that remain.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_stale(tokenkeeper.exclusion, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_unregistrations(undo tokenkeeper.exclusion, max_rows integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    all_keys bytea[];
    keys bytea[];
    starts timestamptz[];
    ends timestamptz[];
    buckets timestamptz[];
    tallies bigint[];
    receipts bigint;
    came_back bigint;
BEGIN
    INSERT INTO tokenkeeper.topic_guard (topic_id, cause) VALUES (undo.topic_id, undo.cause) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = undo.topic_id AND g.cause = 'unregistered_by_app' FOR UPDATE;

    SELECT array_agg(n.token_key), max(n.queued_at) INTO all_keys, undo.reached_at FROM (
        SELECT r.token_key, r.queued_at FROM tokenkeeper.unregistration_receipt AS r
        WHERE r.topic_id + 0 = undo.topic_id AND r.source_id IS NOT NULL AND r.queued_at BETWEEN undo.since AND undo.until
          AND (r.queued_at, r.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY r.queued_at, r.token_key LIMIT least(greatest(undo_unregistrations.max_rows, 1), 1000)) AS n;
    IF all_keys IS NULL THEN
        -- At the end of the window. What is left was locked by an application or a batch when its turn came.
        PERFORM tokenkeeper.end_undo(undo, EXISTS (
            SELECT FROM tokenkeeper.unregistration_receipt AS r
            WHERE r.topic_id + 0 = undo.topic_id AND r.source_id IS NOT NULL AND r.queued_at BETWEEN undo.since AND undo.until));
        -- A guard that tripped because of these may reset now.
        UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = undo.topic_id AND g.cause = 'unregistered_by_app';
        RETURN 0;
    END IF;
    undo.reached_key := all_keys[cardinality(all_keys)];

    keys := tokenkeeper.lock_undone(undo.topic_id, all_keys);
    -- All windows of the topic, including those that come later: a logout in one of them must not count again meanwhile.
    SELECT array_agg(e.since), array_agg(e.until) INTO starts, ends FROM tokenkeeper.exclusion AS e
    WHERE e.topic_id = undo.topic_id AND e.cause = 'unregistered_by_app';
    SELECT array_agg(c.bucket), array_agg(c.tokens) INTO buckets, tallies
    FROM tokenkeeper.guard_tally('unregistered_by_app', undo.topic_id, keys) AS c;

    WITH undone AS MATERIALIZED (
        DELETE FROM tokenkeeper.unregistration_receipt AS r
        WHERE r.topic_id = undo.topic_id AND r.token_key = ANY (keys) AND r.source_id IS NOT NULL
          AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until)
        RETURNING r.token_key, r.unregistered_by_app_at, r.suppresses, r.source_id
    ), token AS MATERIALIZED (
        SELECT n.token_key, max(n.unregistered_by_app_at) AS at, bool_or(n.suppresses) AS suppresses,
               (array_agg(n.source_id ORDER BY n.unregistered_by_app_at DESC, n.source_id DESC))[1] AS source_id
        FROM undone AS n GROUP BY 1
    ), rest AS MATERIALIZED (
        SELECT u.token_key, u.suppresses, u.source_id, o.registered_at, o.suppressed, o.device_id, o.user_id, s.at,
               greatest(o.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) AS was_invalidated_at,
               greatest(o.stale_at, o.suspect_at, CASE WHEN o.returned_at >= s.at THEN NULL ELSE s.at END, o.superseded_at) AS invalidated_at
        FROM token AS u
        CROSS JOIN LATERAL (
            SELECT * FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = u.token_key
              -- The token's logout is one of these; otherwise a greater one remains.
              AND l.unregistered_by_app_at = u.at) AS o
        CROSS JOIN LATERAL (
            SELECT max(r.unregistered_by_app_at) AS at FROM tokenkeeper.unregistration_receipt AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = u.token_key
              AND (r.source_id IS NULL
                   OR NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until))) AS s
        -- It may have been received outside the windows, or from the application itself, too.
        WHERE s.at IS DISTINCT FROM o.unregistered_by_app_at
    ), gone AS (
        -- A token that was known only by this logout becomes unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key AND r.registered_at = '-infinity' AND r.invalidated_at IS NULL
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET unregistered_by_app_at = r.at,
            -- The other cause was learned after the logout that suppressed the token, so its retention starts now.
            suppressed_since = CASE
                WHEN r.invalidated_at >= r.registered_at THEN CASE WHEN r.suppresses THEN clock_timestamp() ELSE l.suppressed_since END END
        FROM rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key
          AND NOT (r.registered_at = '-infinity' AND r.invalidated_at IS NULL)
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, r.token_key, 'reinstated', 'operator',
               -- Explanation.swift knows a logout by this first word: a reason of APNs is one word.
               'logout from ' || coalesce((SELECT 'the ' || o.kind || ' of ' || o.name FROM tokenkeeper.registration_source AS o
                                           WHERE o.source_id = r.source_id), 'source ' || r.source_id),
               r.device_id, r.user_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    )
    SELECT (SELECT count(*) FROM undone),
           (SELECT count(*) FROM rest AS r WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false))
    INTO receipts, came_back;

    -- Subtract what they counted in the guard, without counting the others again.
    PERFORM tokenkeeper.uncount_guard('unregistered_by_app', undo.topic_id, keys, buckets, tallies);
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + came_back, reached_at = undo.reached_at, reached_key = undo.reached_key
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN receipts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_unregistrations(tokenkeeper.exclusion, integer) IS
    'A step of undo_next for a window of logouts: each token''s unregistered_by_app_at becomes the greatest of its logouts that remain. Locks the guard '
    'of the topic.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_unregistrations(tokenkeeper.exclusion, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_next(max_rows integer DEFAULT 250) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    undo tokenkeeper.exclusion;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- One transaction at a time works on a window.
    SELECT e.* INTO undo FROM tokenkeeper.exclusion AS e WHERE e.finished_at IS NULL
    ORDER BY e.waits_since NULLS FIRST, e.exclusion_id LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN CASE undo.cause WHEN 'suspect' THEN tokenkeeper.undo_suspects(undo, undo_next.max_rows)
                           WHEN 'unregistered_by_app' THEN tokenkeeper.undo_unregistrations(undo, undo_next.max_rows)
                           WHEN 'stale' THEN tokenkeeper.undo_stale(undo, undo_next.max_rows) END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_next(integer) IS
    'The next step of the undo that reinstate has requested: undoes the results of up to max_rows tokens (1 to 1000), in one short transaction. Returns how '
    'many results it undid, 0 at the end of a window, and null if there is nothing to do or another session is doing it. A token that an application has '
    'locked is left for a later step. Called by the daemons and by `tokenkeeperd reinstate`. Raises 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_next(integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.would_reinstate(
    topic text, environment text, since timestamptz, until timestamptz, cause text DEFAULT 'suspect') RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(would_reinstate.topic COLLATE "C", would_reinstate.environment COLLATE "C");
    of_cause text COLLATE "C" := would_reinstate.cause;
    starts timestamptz[];
    ends timestamptz[];
BEGIN
    IF coalesce(of_cause NOT IN ('suspect', 'stale', 'unregistered_by_app'), true) THEN
        RAISE EXCEPTION 'cause is %, expected ''suspect'', ''stale'' or ''unregistered_by_app''', coalesce(quote_literal(left(of_cause, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT array_agg(w.since), array_agg(w.until) INTO starts, ends FROM (
        SELECT e.since, e.until FROM tokenkeeper.exclusion AS e WHERE e.topic_id = of_topic AND e.cause = of_cause
        UNION ALL
        SELECT would_reinstate.since, greatest(least(would_reinstate.until, clock_timestamp()), would_reinstate.since)) AS w;
    IF of_cause = 'stale' THEN
        RETURN (
            SELECT count(*) FROM (
                SELECT DISTINCT r.token_key FROM tokenkeeper.stale_receipt AS r
                WHERE r.topic_id + 0 = of_topic AND r.queued_at BETWEEN would_reinstate.since AND would_reinstate.until) AS u
            CROSS JOIN LATERAL (
                SELECT l.suspect_at, l.logged_out_at, l.superseded_at, l.registered_at FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed AND EXISTS (
                    SELECT FROM tokenkeeper.stale_receipt AS d
                    WHERE d.topic_id = of_topic AND d.token_key = u.token_key AND d.stale_at = l.stale_at AND d.reason = l.stale_reason
                      AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE d.queued_at BETWEEN w.since AND w.until))) AS o
            LEFT JOIN LATERAL (
                SELECT max(r.stale_at) AS stale_at FROM tokenkeeper.stale_receipt AS r
                WHERE r.topic_id = of_topic AND r.token_key = u.token_key
                  AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until)) AS s ON true
            WHERE NOT coalesce(greatest(s.stale_at, o.suspect_at, o.logged_out_at, o.superseded_at) >= o.registered_at, false));
    ELSIF of_cause = 'unregistered_by_app' THEN
        RETURN (
            SELECT count(*) FROM (
                SELECT DISTINCT r.token_key FROM tokenkeeper.unregistration_receipt AS r
                WHERE r.topic_id + 0 = of_topic AND r.source_id IS NOT NULL
                  AND r.queued_at BETWEEN would_reinstate.since AND would_reinstate.until) AS u
            CROSS JOIN LATERAL (
                SELECT l.stale_at, l.suspect_at, l.superseded_at, l.returned_at, l.registered_at FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed) AS o
            CROSS JOIN LATERAL (
                SELECT max(r.unregistered_by_app_at) AS at FROM tokenkeeper.unregistration_receipt AS r
                WHERE r.topic_id = of_topic AND r.token_key = u.token_key
                  AND (r.source_id IS NULL
                       OR NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.queued_at BETWEEN w.since AND w.until))) AS s
            WHERE NOT coalesce(greatest(o.stale_at, o.suspect_at, CASE WHEN o.returned_at >= s.at THEN NULL ELSE s.at END, o.superseded_at) >= o.registered_at, false));
    END IF;
    RETURN (
        SELECT count(*) FROM (
            SELECT DISTINCT s.token_key FROM tokenkeeper.suspect AS s
            WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS u
        CROSS JOIN LATERAL (
            SELECT l.stale_at, l.logged_out_at, l.superseded_at, l.registered_at FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed
              AND l.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS o
        LEFT JOIN LATERAL (
            SELECT max(r.suspect_at) AS suspect_at FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = of_topic AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.suspect_at BETWEEN w.since AND w.until)) AS s ON true
        WHERE NOT coalesce(greatest(o.stale_at, s.suspect_at, o.logged_out_at, o.superseded_at) >= o.registered_at, false));
END
$$;
COMMENT ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz, text) IS
    'How many tokens would become sendable if reinstate were called with this window and cause and the results were undone. Changes and locks nothing. '
    'Raises 22023 for an unknown topic or cause, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.pruned_stale(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(pruned_stale.topic COLLATE "C", pruned_stale.environment COLLATE "C");
BEGIN
    RETURN (SELECT coalesce(sum(c.pruned), 0) FROM tokenkeeper.stale_count AS c
            WHERE c.topic_id = of_topic AND c.hour BETWEEN tokenkeeper.hour_of(pruned_stale.since) AND pruned_stale.until);
END
$$;
COMMENT ON FUNCTION tokenkeeper.pruned_stale(text, text, timestamptz, timestamptz) IS
    'How many tokens that were stale by 410s received within these hours have been pruned since, so that reinstate cannot restore them. '
    'Raises 22023 for an unknown topic, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.pruned_stale(text, text, timestamptz, timestamptz) FROM PUBLIC;
