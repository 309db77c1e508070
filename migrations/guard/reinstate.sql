-- The undo of what the guard lets through: reinstate names a window of a cause, and undo_next undoes what was received within it, in short
-- transactions. It is the same for suspects, 410s and logouts from a source.
--
-- Locks: reinstate waits ten seconds at most for the running batches, and lets none begin until its transaction ends. undo_next locks a free row of exclusion,
-- then the free tokens of its step in key order. A later round takes the others.

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
    'Internal: the shell command that undoes this window of a topic, as in guard.undo; without --until if until is null.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_cause(cause text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(cause COLLATE "C" NOT IN ('suspect', 'stale', 'unregistered_by_app'), true) THEN
        RAISE EXCEPTION 'cause is %, expected ''suspect'', ''stale'' or ''unregistered_by_app''', coalesce(quote_literal(left(cause, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_cause(text) IS 'Raises 22023 for a cause that has no guard.';

CREATE OR REPLACE FUNCTION tokenkeeper.receipts_within(of_topic integer, of_cause text, since timestamptz, until timestamptz, enough bigint DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    asked text COLLATE "C" := of_cause;
BEGIN
    RETURN (
        SELECT count(*) FROM (
            SELECT FROM tokenkeeper.receipt AS r
            WHERE r.topic_id + 0 = of_topic AND r.cause = asked AND r.received_at BETWEEN receipts_within.since AND receipts_within.until
              AND (r.source_id IS NOT NULL OR asked <> 'unregistered_by_app')
            LIMIT enough) AS r);
END
$$;
COMMENT ON FUNCTION tokenkeeper.receipts_within(integer, text, timestamptz, timestamptz, bigint) IS
    'How many receipts an undo of this window has to undo, enough at most.';

CREATE OR REPLACE FUNCTION tokenkeeper.reinstate(
    topic text, environment text, since timestamptz, until timestamptz, cause text DEFAULT 'suspect') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(reinstate.topic COLLATE "C", reinstate.environment COLLATE "C");
    of_cause text COLLATE "C" := reinstate.cause;
    results bigint;
    undo tokenkeeper.exclusion;
BEGIN
    PERFORM tokenkeeper.check_cause(of_cause);
    IF reinstate.since IS NULL OR reinstate.until IS NULL OR NOT isfinite(reinstate.since) OR NOT isfinite(reinstate.until)
        OR reinstate.since > least(reinstate.until, clock_timestamp()) THEN
        RAISE EXCEPTION 'the window is from % to %, expected two finite instants, the earlier one first and not in the future',
            coalesce(reinstate.since::text, 'null'), coalesce(reinstate.until::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A reinstatement cannot be taken back, so it must not excuse what has not been received yet.
    until := least(reinstate.until, clock_timestamp());
    -- Before the lock: this takes a tenth of a second per million.
    results := tokenkeeper.receipts_within(of_topic, of_cause, reinstate.since, reinstate.until);
    -- Wait for all batches; a later batch sees the exclusion.
    PERFORM tokenkeeper.lock_out_drains();
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.topic_id = of_topic AND e.cause = of_cause AND e.since <= reinstate.since AND e.until >= reinstate.until) THEN
        RETURN results;
    END IF;
    INSERT INTO tokenkeeper.exclusion (topic_id, cause, since, until)
    VALUES (of_topic, of_cause, reinstate.since, reinstate.until) RETURNING * INTO undo;
    UPDATE tokenkeeper.tripped_guard AS g
    SET held_at = NULL, undo_since = CASE WHEN reinstate.since > g.undo_since OR reinstate.until < g.tripped_at THEN g.undo_since END
    WHERE g.topic_id = of_topic AND g.cause = of_cause;
    IF tokenkeeper.receipts_within(of_topic, of_cause, reinstate.since, reinstate.until, 1) = 0 THEN
        PERFORM tokenkeeper.end_undo(undo, false);
    END IF;
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz, text) IS
    'Undoes what was received about a topic from since to until (ends included; a future until is now), for a cause: suspect, stale, or '
    'unregistered_by_app for logouts from a source. It never counts, whenever a daemon records it; what arrives later counts, also if APNs repeats a 410. '
    'This cannot be taken back. Returns how many recorded results it affects: daemons undo these, and until then their tokens stay suppressed (see the '
    'view reinstatement). The drains wait until the transaction ends, so commit at once. Raises 25001; 22023 for an unknown topic or cause or an invalid '
    'window; 55P03 if it cannot lock out the drains within ten seconds.';

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
        -- A guard that tripped because of these may reset now.
        UPDATE tokenkeeper.tripped_guard AS g SET held_at = NULL WHERE g.topic_id = undo.topic_id AND g.cause = undo.cause;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message, done_by)
        SELECT 'reinstated', t.environment, t.topic, undo.tokens,
               format('%s received from %s to %s do not count', tokenkeeper.guarded_words(undo.cause), undo.since, undo.until), undo.done_by
        FROM tokenkeeper.topic AS t WHERE t.topic_id = undo.topic_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_undo(tokenkeeper.exclusion, boolean) IS
    'Finishes a window whose end an undo has reached, or lets it begin again if it waits for locked tokens.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_undone(of_topic integer, token_keys bytea[]) RETURNS bytea[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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

CREATE OR REPLACE FUNCTION tokenkeeper.take_receipts(undo tokenkeeper.exclusion, keys bytea[]) RETURNS tokenkeeper.receipt[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    asked text COLLATE "C" := undo.cause;
    undone tokenkeeper.receipt[];
BEGIN
    WITH gone AS (
        DELETE FROM tokenkeeper.receipt AS r
        WHERE r.topic_id = undo.topic_id AND r.token_key = ANY (keys) AND r.cause = asked AND (r.source_id IS NOT NULL OR asked <> 'unregistered_by_app')
          -- All windows of the topic, including those that come later: what is in one of them must not count again meanwhile.
          AND EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                      WHERE e.topic_id = r.topic_id AND e.cause = asked AND r.received_at BETWEEN e.since AND e.until)
        RETURNING r.*
    )
    SELECT coalesce(array_agg(g::tokenkeeper.receipt), '{}') INTO undone FROM gone AS g;
    INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
    SELECT tokenkeeper.hour_of(n.received_at), undo.topic_id, asked, -count(*) FROM unnest(undone) AS n WHERE n.counted GROUP BY 1;
    RETURN undone;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_receipts(tokenkeeper.exclusion, bytea[]) IS
    'Internal: deletes and returns the receipts of these tokens within the windows of a topic and cause, and no longer counts them.';

CREATE OR REPLACE FUNCTION tokenkeeper.undo_tokens(undo tokenkeeper.exclusion, keys bytea[], OUT receipts bigint, OUT came_back bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    asked text COLLATE "C" := undo.cause;
    undone tokenkeeper.receipt[] := tokenkeeper.take_receipts(undo, keys);
BEGIN
    receipts := cardinality(undone);
    WITH token AS MATERIALIZED (
        SELECT n.token_key, bool_or(n.counted) AS counted, max(n.source_id) AS source_id FROM unnest(undone) AS n GROUP BY 1
    ), rest AS MATERIALIZED (
        SELECT t.token_key, t.counted, t.source_id, l.was, f.received_at,
               CASE asked WHEN 'stale' THEN k.invalidated_at ELSE (l.was).stale_at END AS stale_at,
               CASE asked WHEN 'stale' THEN k.reason ELSE (l.was).stale_reason END AS stale_reason,
               CASE asked WHEN 'suspect' THEN k.invalidated_at ELSE (l.was).suspect_at END AS suspect_at,
               CASE asked WHEN 'suspect' THEN k.reason ELSE (l.was).suspect_reason END AS suspect_reason,
               CASE asked WHEN 'unregistered_by_app' THEN k.invalidated_at ELSE (l.was).unregistered_by_app_at END AS unregistered_by_app_at
        FROM token AS t
        CROSS JOIN LATERAL (
            SELECT k AS was FROM tokenkeeper.ledger AS k WHERE k.topic_id = undo.topic_id AND k.token_key = t.token_key OFFSET 0) AS l
        -- The greatest that remains, and when the first was received that suppresses the token still.
        LEFT JOIN LATERAL (
            SELECT r.invalidated_at, r.reason FROM tokenkeeper.receipt AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = t.token_key AND r.cause = asked
            ORDER BY r.invalidated_at DESC, r.reason DESC LIMIT 1) AS k ON true
        LEFT JOIN LATERAL (
            SELECT min(r.received_at) AS received_at FROM tokenkeeper.receipt AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = t.token_key AND r.invalidated_at >= (l.was).registered_at
              AND (r.cause <> 'unregistered_by_app' OR ((l.was).returned_at >= r.invalidated_at) IS NOT TRUE)) AS f ON true
        -- What the ledger has is one of these, and not a greater one.
        WHERE EXISTS (
            SELECT FROM unnest(undone) AS n
            WHERE n.token_key = t.token_key
              AND n.invalidated_at = CASE asked WHEN 'stale' THEN (l.was).stale_at WHEN 'suspect' THEN (l.was).suspect_at ELSE (l.was).unregistered_by_app_at END
              AND n.reason IS NOT DISTINCT FROM CASE asked WHEN 'stale' THEN (l.was).stale_reason WHEN 'suspect' THEN (l.was).suspect_reason END)
    ), decided AS MATERIALIZED (
        SELECT r.*, greatest(r.stale_at, r.suspect_at,
                             CASE WHEN (r.was).returned_at >= r.unregistered_by_app_at THEN NULL ELSE r.unregistered_by_app_at END,
                             (r.was).superseded_at) AS invalidated_at,
               (r.was).registered_at = '-infinity'
               AND num_nonnulls(r.stale_at, r.suspect_at, r.unregistered_by_app_at, (r.was).superseded_at, (r.was).returned_at, (r.was).device_at,
                                (r.was).user_at, (r.was).tags_at) = 0 AS is_unknown
        FROM rest AS r
    ), gone AS (
        -- A token that was known only by what is undone becomes unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING decided AS d
        WHERE l.topic_id = undo.topic_id AND l.token_key = d.token_key AND d.is_unknown
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET stale_at = d.stale_at, stale_reason = d.stale_reason, suspect_at = d.suspect_at, suspect_reason = d.suspect_reason,
            unregistered_by_app_at = d.unregistered_by_app_at
        FROM decided AS d
        WHERE l.topic_id = undo.topic_id AND l.token_key = d.token_key AND NOT d.is_unknown
        RETURNING d.was, l AS is_now, coalesce(d.received_at, CASE WHEN d.counted THEN clock_timestamp() END) AS since
    ), revived AS (
        -- One look-up each: see Plans.
        DELETE FROM tokenkeeper.suppression AS s WHERE s.ctid = ANY (ARRAY(
            SELECT (SELECT k.ctid FROM tokenkeeper.suppression AS k WHERE k.topic_id = (c.was).topic_id AND k.token_key = (c.was).token_key)
            FROM changed AS c WHERE (c.was).suppressed AND NOT (c.is_now).suppressed))
    ), delayed AS (
        -- The retention of a token that stays suppressed starts with the first report that suppresses it, or now if only a newer token of its device does.
        UPDATE tokenkeeper.suppression AS s SET since = c.since
        FROM (SELECT (SELECT k.ctid FROM tokenkeeper.suppression AS k WHERE k.topic_id = (n.was).topic_id AND k.token_key = (n.was).token_key) AS tid,
                     n.since
              FROM changed AS n WHERE (n.is_now).suppressed OFFSET 0) AS c
        WHERE s.ctid = c.tid AND s.since < c.since
    ), counted AS (
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
        SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM changed AS c CROSS JOIN LATERAL tokenkeeper.count_change(c.was, c.is_now) AS n
        GROUP BY 2, 3, 4
    ), logged AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, d.token_key, 'reinstated', 'operator',
               CASE asked WHEN 'stale' THEN (d.was).stale_reason WHEN 'suspect' THEN (d.was).suspect_reason
                    -- Explanation.swift knows a logout by this first word: a reason of APNs is one word.
                    ELSE 'logout from ' || coalesce((SELECT 'the ' || o.kind || ' of ' || o.name FROM tokenkeeper.registration_source AS o
                                                     WHERE o.source_id = d.source_id), 'source ' || d.source_id) END,
               (d.was).device_id, (d.was).user_id, nullif((d.was).registered_at, '-infinity'), nullif((d.was).registered_at, '-infinity'),
               tokenkeeper.invalidated_at(d.was), d.invalidated_at
        FROM decided AS d WHERE (d.was).suppressed
    )
    SELECT count(*) INTO came_back FROM decided AS d WHERE (d.was).suppressed AND NOT coalesce(d.invalidated_at >= (d.was).registered_at, false);
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_tokens(tokenkeeper.exclusion, bytea[]) IS
    'Undoes what was received within the windows of a topic and cause about these tokens, which are locked: the fact in the ledger becomes the greatest of '
    'the remaining receipts. Returns how many receipts it deleted, and how many tokens are sendable again.';

CREATE OR REPLACE FUNCTION tokenkeeper.undo_next(max_rows integer DEFAULT 250) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    undo tokenkeeper.exclusion;
    asked text COLLATE "C";
    keys bytea[];
    done record;
BEGIN
    PERFORM tokenkeeper.require_read_committed();
    -- One transaction at a time works on a window.
    SELECT e.* INTO undo FROM tokenkeeper.exclusion AS e WHERE e.finished_at IS NULL
    ORDER BY e.waits_since NULLS FIRST, e.exclusion_id LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    asked := undo.cause;
    SELECT array_agg(n.token_key), max(n.received_at) INTO keys, undo.reached_at FROM (
        SELECT r.token_key, r.received_at FROM tokenkeeper.receipt AS r
        WHERE r.topic_id + 0 = undo.topic_id AND r.cause = asked AND r.received_at BETWEEN undo.since AND undo.until
          AND (r.source_id IS NOT NULL OR asked <> 'unregistered_by_app')
          AND (r.received_at, r.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY r.received_at, r.token_key LIMIT least(greatest(undo_next.max_rows, 1), 1000)) AS n;
    IF keys IS NULL THEN
        -- At the end of the window. What is left was locked by an application or a batch when its turn came.
        PERFORM tokenkeeper.end_undo(undo, tokenkeeper.receipts_within(undo.topic_id, undo.cause, undo.since, undo.until, 1) > 0);
        RETURN 0;
    END IF;
    -- A batch that is recording a result of one of these tokens holds it, so its receipts are seen once it is free.
    SELECT * INTO done FROM tokenkeeper.undo_tokens(undo, tokenkeeper.lock_undone(undo.topic_id, keys));
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + done.came_back, reached_at = undo.reached_at, reached_key = keys[cardinality(keys)]
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN done.receipts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_next(integer) IS
    'Internal, for the daemons and `tokenkeeperd reinstate`: the next step of an undo. Undoes the results of up to max_rows tokens (1 to 1000), in one '
    'short transaction; locked ones are left for a later step. Returns how many; 0 at the end of a window; null if there is nothing to do, or another '
    'session does it.';

CREATE OR REPLACE FUNCTION tokenkeeper.would_reinstate(
    topic text, environment text, since timestamptz, until timestamptz, cause text DEFAULT 'suspect') RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(would_reinstate.topic COLLATE "C", would_reinstate.environment COLLATE "C");
    asked text COLLATE "C" := would_reinstate.cause;
    starts timestamptz[];
    ends timestamptz[];
BEGIN
    PERFORM tokenkeeper.check_cause(asked);
    SELECT array_agg(w.since), array_agg(w.until) INTO starts, ends FROM (
        SELECT e.since, e.until FROM tokenkeeper.exclusion AS e WHERE e.topic_id = of_topic AND e.cause = asked
        UNION ALL
        SELECT would_reinstate.since, greatest(least(would_reinstate.until, clock_timestamp()), would_reinstate.since)) AS w;
    RETURN (
        SELECT count(*) FROM (
            SELECT DISTINCT r.token_key FROM tokenkeeper.receipt AS r
            WHERE r.topic_id + 0 = of_topic AND r.cause = asked AND r.received_at BETWEEN would_reinstate.since AND would_reinstate.until
              AND (r.source_id IS NOT NULL OR asked <> 'unregistered_by_app')) AS u
        CROSS JOIN LATERAL (
            SELECT * FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed) AS l
        CROSS JOIN LATERAL (
            SELECT max(r.invalidated_at) AS at FROM tokenkeeper.receipt AS r
            WHERE r.topic_id = of_topic AND r.token_key = u.token_key AND r.cause = asked
              AND ((r.source_id IS NULL AND asked = 'unregistered_by_app')
                   OR NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.received_at BETWEEN w.since AND w.until))) AS k
        WHERE NOT coalesce(greatest(
            CASE asked WHEN 'stale' THEN k.at ELSE l.stale_at END, CASE asked WHEN 'suspect' THEN k.at ELSE l.suspect_at END,
            CASE WHEN asked <> 'unregistered_by_app' THEN l.logged_out_at WHEN l.returned_at >= k.at THEN NULL ELSE k.at END,
            l.superseded_at) >= l.registered_at, false));
END
$$;
COMMENT ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz, text) IS
    'How many tokens reinstate would make sendable with these arguments. Changes and locks nothing. Raises 25001, and 22023 for an unknown topic or cause.';

CREATE OR REPLACE FUNCTION tokenkeeper.pruned_since(topic text, environment text, since timestamptz, until timestamptz, cause text) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(pruned_since.topic COLLATE "C", pruned_since.environment COLLATE "C");
    asked text COLLATE "C" := pruned_since.cause;
BEGIN
    RETURN (SELECT coalesce(sum(c.pruned), 0) FROM tokenkeeper.suppression_count AS c
            WHERE c.topic_id = of_topic AND c.cause = asked AND c.hour BETWEEN tokenkeeper.hour_of(pruned_since.since) AND pruned_since.until);
END
$$;
COMMENT ON FUNCTION tokenkeeper.pruned_since(text, text, timestamptz, timestamptz, text) IS
    'Internal: how many tokens that a cause suppressed, by what was received within these hours, were pruned since: reinstate cannot restore them.';
