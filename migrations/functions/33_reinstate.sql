-- How suspects are undone: reinstate requests it, undo_suspects does it in short transactions.

CREATE OR REPLACE FUNCTION tokenkeeper.reinstate(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(reinstate.topic COLLATE "C", reinstate.environment COLLATE "C");
    suspects bigint;
    nothing boolean;
BEGIN
    IF reinstate.since IS NULL OR reinstate.until IS NULL OR NOT isfinite(reinstate.since) OR NOT isfinite(reinstate.until)
        OR reinstate.since > reinstate.until THEN
        RAISE EXCEPTION 'the window is from % to %, expected two finite instants, the earlier one first',
            coalesce(reinstate.since::text, 'null'), coalesce(reinstate.until::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A reinstatement cannot be taken back, so it must not excuse what has not been sent yet.
    until := greatest(least(reinstate.until, clock_timestamp()), reinstate.since);
    -- Before the lock: this takes a tenth of a second per million.
    SELECT count(*) INTO suspects FROM tokenkeeper.suspect AS s
    WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until;
    -- Wait for a batch that is recording suspects; a later batch sees the exclusion.
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (of_topic) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.topic_id = of_topic AND e.since <= reinstate.since AND e.until >= reinstate.until) THEN
        RETURN suspects;
    END IF;
    nothing := NOT EXISTS (SELECT FROM tokenkeeper.suspect AS s
                           WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until);
    INSERT INTO tokenkeeper.exclusion (topic_id, since, until, finished_at)
    VALUES (of_topic, reinstate.since, reinstate.until, CASE WHEN nothing THEN clock_timestamp() END);
    UPDATE tokenkeeper.topic_guard AS g
    SET touched_at = NULL, undo_since = CASE WHEN g.undo_since < reinstate.since THEN g.undo_since END
    WHERE g.topic_id = of_topic;
    IF nothing THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        VALUES ('reinstated', reinstate.environment, reinstate.topic, 0,
            format('suspects from %s to %s do not count', reinstate.since, reinstate.until));
    END IF;
    RETURN suspects;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz) IS
    'Undoes suspects: those of the topic whose instant (sent_at) lies in the window, ends included, never count, whenever they arrive. This cannot be taken '
    'back. A window that ends in the future ends now. Returns how many recorded suspects it affects. A daemon, or `tokenkeeperd reinstate`, '
    'undoes them in short transactions; until then their tokens stay suppressed: see the view reinstatement. '
    'All else that is known about a token counts again. Raises 22023 for an unknown topic or an invalid window, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.undo_suspects(max_rows integer DEFAULT 250) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    undo tokenkeeper.exclusion;
    all_keys bytea[];
    keys bytea[];
    starts timestamptz[];
    ends timestamptz[];
    buckets timestamptz[];
    tallies bigint[];
    suspects bigint;
    came_back bigint;
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
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (undo.topic_id) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = undo.topic_id FOR UPDATE;

    SELECT array_agg(n.token_key), max(n.suspect_at) INTO all_keys, undo.reached_at FROM (
        SELECT s.token_key, s.suspect_at FROM tokenkeeper.suspect AS s
        WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until
          AND (s.suspect_at, s.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY s.suspect_at, s.token_key LIMIT least(greatest(undo_suspects.max_rows, 1), 1000)) AS n;
    IF all_keys IS NULL THEN
        -- At the end of the window. Suspects that are left were locked by an application when their turn came.
        IF EXISTS (SELECT FROM tokenkeeper.suspect AS s
                   WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until) THEN
            UPDATE tokenkeeper.exclusion AS e SET reached_at = NULL, reached_key = NULL, waits_since = clock_timestamp()
            WHERE e.exclusion_id = undo.exclusion_id;
            RETURN 0;
        END IF;
        UPDATE tokenkeeper.exclusion AS e SET finished_at = clock_timestamp(), reached_at = NULL, reached_key = NULL
        WHERE e.exclusion_id = undo.exclusion_id;
        -- A guard that tripped because of these may reset now.
        UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = undo.topic_id;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message, done_by)
        SELECT 'reinstated', t.environment, t.topic, undo.tokens, format('suspects from %s to %s do not count', undo.since, undo.until), undo.done_by
        FROM tokenkeeper.topic AS t WHERE t.topic_id = undo.topic_id;
        RETURN 0;
    END IF;
    undo.reached_key := all_keys[cardinality(all_keys)];

    -- The ledger first, as in a sweep, and in key order. It yields to applications: what they hold is left for the next round.
    keys := ARRAY(
        SELECT k.token_key FROM (SELECT DISTINCT a.token_key FROM unnest(all_keys) AS a (token_key) ORDER BY 1) AS k
        CROSS JOIN LATERAL (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = k.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l);
    -- Also the tokens that are no longer in the ledger.
    keys := keys || ARRAY(
        SELECT a.token_key FROM unnest(all_keys) AS a (token_key)
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = a.token_key));
    -- All windows of the topic, including those that come later: a suspect in one of them must not count again meanwhile.
    SELECT array_agg(e.since), array_agg(e.until) INTO starts, ends FROM tokenkeeper.exclusion AS e WHERE e.topic_id = undo.topic_id;
    SELECT array_agg(c.bucket), array_agg(c.tokens) INTO buckets, tallies FROM tokenkeeper.guard_tally(undo.topic_id, keys) AS c;

    WITH undone AS MATERIALIZED (
        DELETE FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = undo.topic_id AND s.token_key = ANY (keys)
          AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE s.suspect_at BETWEEN w.since AND w.until)
        RETURNING s.token_key, s.suppresses
    ), token AS MATERIALIZED (
        SELECT n.token_key, bool_or(n.suppresses) AS suppresses FROM undone AS n GROUP BY 1
    ), rest AS MATERIALIZED (
        SELECT u.token_key, u.suppresses, o.registered_at, o.suppressed, o.suspect_reason AS undone_reason, o.device_id, s.suspect_at, s.reason,
               greatest(o.stale_at, o.suspect_at, o.unregistered_by_app_at, o.superseded_at) AS was_invalidated_at,
               greatest(o.stale_at, s.suspect_at, o.unregistered_by_app_at, o.superseded_at) AS invalidated_at
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
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, r.token_key, 'reinstated', 'operator', r.undone_reason, r.device_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    )
    SELECT (SELECT count(*) FROM undone),
           (SELECT count(*) FROM rest AS r WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false))
    INTO suspects, came_back;

    -- Subtract what they counted in the guard, without counting the others again.
    UPDATE tokenkeeper.topic_guard_count AS c SET tokens = greatest(c.tokens + d.tokens, 0)
    FROM (SELECT t.bucket, sum(t.tokens) AS tokens FROM (
              SELECT b.bucket, -b.tokens AS tokens FROM unnest(buckets, tallies) AS b (bucket, tokens)
              UNION ALL SELECT a.bucket, a.tokens FROM tokenkeeper.guard_tally(undo.topic_id, keys) AS a) AS t
          GROUP BY 1 HAVING sum(t.tokens) <> 0) AS d
    WHERE c.topic_id = undo.topic_id AND c.bucket = d.bucket;
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + came_back, reached_at = undo.reached_at, reached_key = undo.reached_key
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN suspects;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_suspects(integer) IS
    'The next step of the undo that reinstate has requested: undoes the suspects of up to max_rows tokens (1 to 1000), in one short transaction. Returns how '
    'many suspects it undid, 0 at the end of a window, and null if there is nothing to do or another session is doing it. A token that an application has '
    'locked is left for a later step. Called by the daemons and by `tokenkeeperd reinstate`. Raises 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_suspects(integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.would_reinstate(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(would_reinstate.topic COLLATE "C", would_reinstate.environment COLLATE "C");
    starts timestamptz[];
    ends timestamptz[];
BEGIN
    SELECT array_agg(w.since), array_agg(w.until) INTO starts, ends FROM (
        SELECT e.since, e.until FROM tokenkeeper.exclusion AS e WHERE e.topic_id = of_topic
        UNION ALL
        SELECT would_reinstate.since, greatest(least(would_reinstate.until, clock_timestamp()), would_reinstate.since)) AS w;
    RETURN (
        SELECT count(*) FROM (
            SELECT DISTINCT s.token_key FROM tokenkeeper.suspect AS s
            WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS u
        CROSS JOIN LATERAL (
            SELECT l.stale_at, l.unregistered_by_app_at, l.superseded_at, l.registered_at FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed
              AND l.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS o
        LEFT JOIN LATERAL (
            SELECT max(r.suspect_at) AS suspect_at FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = of_topic AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.suspect_at BETWEEN w.since AND w.until)) AS s ON true
        WHERE NOT coalesce(greatest(o.stale_at, s.suspect_at, o.unregistered_by_app_at, o.superseded_at) >= o.registered_at, false));
END
$$;
COMMENT ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz) IS
    'How many tokens would become sendable if reinstate were called with this window and the suspects were undone. Changes and locks nothing. '
    'Raises 22023 for an unknown topic, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz) FROM PUBLIC;
