-- How a batch merges reports of many tokens: of registrations, and of results.
--
-- Locks: known tokens in key order, if they are free. Then unknown tokens; an INSERT gives up after 3 ms. The batch stops waiting at patience_ends: an
-- application that waits for it for as long as deadlock_timeout looks for a deadlock, and PostgreSQL could end its transaction. What the batch did not get, its
-- caller moves to a retry partition. A single token may wait as long as lock_timeout says: the batch holds nothing else.

CREATE OR REPLACE FUNCTION tokenkeeper.patience_ends() RETURNS timestamptz
LANGUAGE sql VOLATILE
RETURN clock_timestamp() + current_setting('deadlock_timeout')::interval / 2 - interval '3 ms';
COMMENT ON FUNCTION tokenkeeper.patience_ends() IS 'The instant at which a batch that begins now stops waiting: half of deadlock_timeout from now, less 3 ms.';

CREATE OR REPLACE FUNCTION tokenkeeper.one_per_token(reports tokenkeeper.token_report[]) RETURNS tokenkeeper.token_report[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH reported AS MATERIALIZED (
        SELECT r AS report, r.topic_id, r.token_key, count(*) OVER (PARTITION BY r.topic_id, r.token_key) AS times FROM unnest(reports) AS r
    )
    SELECT array_agg(o.report ORDER BY o.topic_id, o.token_key) FROM (
        SELECT s.report, s.topic_id, s.token_key FROM reported AS s WHERE s.times = 1
        UNION ALL
        -- The number of the one that decides.
        SELECT ROW((array_agg((s.report).n ORDER BY (s.report).invalidated_at DESC, (s.report).reason DESC, (s.report).received_at, (s.report).n))[1], s.topic_id, s.token_key, bool_and((s.report).one_token), max((s.report).registered_at), max((s.report).returned_at),
                   (array_agg((s.report).device_id ORDER BY (s.report).device_at DESC, (s.report).device_id DESC)
                       FILTER (WHERE (s.report).device_id IS NOT NULL))[1],
                   max((s.report).device_at) FILTER (WHERE (s.report).device_id IS NOT NULL),
                   (array_agg((s.report).user_id ORDER BY (s.report).user_at DESC, (s.report).user_id DESC)
                       FILTER (WHERE (s.report).user_id IS NOT NULL))[1],
                   max((s.report).user_at) FILTER (WHERE (s.report).user_id IS NOT NULL),
                   ((array_agg(s.report ORDER BY (s.report).tags_at DESC, (s.report).tags DESC) FILTER (WHERE (s.report).tags IS NOT NULL))[1]).tags,
                   max((s.report).tags_at) FILTER (WHERE (s.report).tags IS NOT NULL),
                   max((s.report).cause), max((s.report).invalidated_at),
                   (array_agg((s.report).reason ORDER BY (s.report).invalidated_at DESC, (s.report).reason DESC))[1], NULL, NULL,
                   CASE WHEN count(*) = count((s.report).source_id) AND min((s.report).source_id) = max((s.report).source_id)
                        THEN min((s.report).source_id) END)::tokenkeeper.token_report,
               s.topic_id, s.token_key
        FROM reported AS s WHERE s.times > 1 GROUP BY s.topic_id, s.token_key) AS o
$$;
COMMENT ON FUNCTION tokenkeeper.one_per_token(tokenkeeper.token_report[]) IS
    'Internal: what reports of one cause say about each token combined, in key order: of each fact the greatest.';

CREATE OR REPLACE FUNCTION tokenkeeper.merge_known(
    reports tokenkeeper.token_report[], receipt timestamptz, OUT left_over tokenkeeper.token_report[], OUT busy integer[],
    OUT checks tokenkeeper.device_check[], OUT turned integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    WITH merged AS MATERIALIZED (
        -- A token that an application has locked is left over.
        SELECT s AS reported, o.was, o.tid, m.*,
               (m.registered_at, m.stale_at, m.stale_reason, m.suspect_at, m.suspect_reason, m.unregistered_by_app_at, m.returned_at, m.device_at,
                m.user_at, m.tags_at, m.device_id, m.user_id, m.tags)
               IS NOT DISTINCT FROM ((o.was).registered_at, (o.was).stale_at, (o.was).stale_reason, (o.was).suspect_at, (o.was).suspect_reason,
                                     (o.was).unregistered_by_app_at, (o.was).returned_at, (o.was).device_at, (o.was).user_at, (o.was).tags_at,
                                     (o.was).device_id, (o.was).user_id, (o.was).tags) AS is_same
        FROM unnest(reports) AS s
        CROSS JOIN LATERAL (
            SELECT k AS was, k.ctid AS tid FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS o
        CROSS JOIN LATERAL tokenkeeper.merged(o.was, s) AS m
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET registered_at = m.registered_at, stale_at = m.stale_at, stale_reason = m.stale_reason, suspect_at = m.suspect_at,
            suspect_reason = m.suspect_reason, unregistered_by_app_at = m.unregistered_by_app_at, returned_at = m.returned_at,
            superseded_at = m.superseded_at, unresolved = m.unresolved, of_constant = m.of_constant, device_id = m.device_id, device_at = m.device_at,
            user_id = m.user_id, user_at = m.user_at, tags = m.tags, tags_at = m.tags_at
        FROM merged AS m
        -- If an application has changed a row since this statement began, its ctid no longer matches: the token is left over.
        WHERE l.ctid = m.tid AND NOT m.is_same
        RETURNING m.reported, m.was, l AS is_now
    ), logged AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, source_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT e.* FROM changed AS c CROSS JOIN LATERAL tokenkeeper.event_of(c.was, c.is_now, c.reported) AS e
    ), counted AS (
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
        SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM changed AS c CROSS JOIN LATERAL tokenkeeper.count_change(c.was, c.is_now) AS n
        GROUP BY 2, 3, 4
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
        SELECT receipt, (c.is_now).topic_id, (c.is_now).token_key FROM changed AS c WHERE (c.is_now).suppressed AND NOT (c.was).suppressed
        ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since
    ), revived AS (
        -- One look-up each: see Plans.
        DELETE FROM tokenkeeper.suppression AS s WHERE s.ctid = ANY (ARRAY(
            SELECT (SELECT k.ctid FROM tokenkeeper.suppression AS k WHERE k.topic_id = (c.was).topic_id AND k.token_key = (c.was).token_key)
            FROM changed AS c WHERE (c.was).suppressed AND NOT (c.is_now).suppressed))
    ), done AS (
        SELECT c.reported, c.was, c.is_now FROM changed AS c
        UNION ALL
        SELECT m.reported, m.was, m.was FROM merged AS m WHERE m.is_same
    ), rest AS MATERIALIZED (
        SELECT s AS reported, (SELECT true FROM tokenkeeper.ledger AS l WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key) IS TRUE AS is_known
        FROM unnest(reports) AS s WHERE s.n NOT IN (SELECT (d.reported).n FROM done AS d)
    )
    SELECT ARRAY(SELECT r.reported FROM rest AS r WHERE NOT r.is_known ORDER BY (r.reported).topic_id, (r.reported).token_key),
           ARRAY(SELECT (r.reported).n FROM rest AS r WHERE r.is_known),
           ARRAY(SELECT t FROM done AS d CROSS JOIN LATERAL tokenkeeper.checks_of(d.was, d.is_now, d.reported) AS t),
           ARRAY(SELECT (c.reported).n FROM changed AS c
                 WHERE (c.is_now).suppressed AND NOT (c.was).suppressed AND ((c.was).registered_at > '-infinity' OR (c.reported).cause = 'suspect'))
    INTO left_over, busy, checks, turned;
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_known(tokenkeeper.token_report[], timestamptz) IS
    'Internal: merges reports about known tokens, given once each and in key order. Returns those of unknown tokens; the positions of those that another '
    'session has locked; the devices for resolve_devices; and turned: those that have suppressed a token that could be sent to.';

CREATE OR REPLACE FUNCTION tokenkeeper.merge_new(
    reports tokenkeeper.token_report[], receipt timestamptz, holds boolean, give_up_at timestamptz, OUT left_over integer[],
    OUT checks tokenkeeper.device_check[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    total integer := coalesce(cardinality(reports), 0);
    first integer := 1;
    most integer := greatest(total, 1);
    many integer;
    locked_until integer := 0;
    more_checks tokenkeeper.device_check[];
BEGIN
    left_over := '{}';
    checks := '{}';
    -- Nobody had these tokens a moment ago, so a plain INSERT is enough: ON CONFLICT would look up each key twice. Another session may be inserting one of
    -- them, and the INSERT would wait for it, or may just have committed it. So try all at once with a very short timeout; if that fails, find the
    -- token by halving.
    IF isfinite(give_up_at) THEN
        PERFORM set_config('lock_timeout', '3ms', true);
        IF NOT holds THEN
            -- Nobody can wait for this transaction yet, however long it took to come here: on a cold cache, for example.
            give_up_at := greatest(give_up_at, tokenkeeper.patience_ends());
        END IF;
        -- Whatever deadlock_timeout is, the first token alone is tried if nothing is locked yet.
        IF give_up_at < clock_timestamp() + interval '50 ms' THEN
            most := 1;
        END IF;
    END IF;
    many := most;
    WHILE first <= total LOOP
        IF (holds OR first > 1) AND clock_timestamp() > give_up_at THEN
            left_over := left_over || ARRAY(SELECT r.n FROM unnest(reports[first:]) AS r);
            EXIT;
        END IF;
        BEGIN
            WITH added AS (
                INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, stale_at, stale_reason, suspect_at, suspect_reason,
                    unregistered_by_app_at, returned_at, unresolved, device_id, device_at, user_id, user_at, tags, tags_at)
                SELECT s.topic_id, s.token_key, m.registered_at, m.stale_at, m.stale_reason, m.suspect_at, m.suspect_reason,
                       m.unregistered_by_app_at, m.returned_at, m.unresolved, m.device_id, m.device_at, m.user_id, m.user_at, m.tags, m.tags_at
                FROM unnest(reports[first:first + many - 1]) AS s CROSS JOIN LATERAL tokenkeeper.merged(NULL, s) AS m
                RETURNING l AS is_now, l.topic_id, l.token_key
            ), counted AS (
                INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
                SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM added AS a CROSS JOIN LATERAL tokenkeeper.count_change(NULL, a.is_now) AS n
                GROUP BY 2, 3, 4
            ), suppressed AS (
                INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
                SELECT receipt, a.topic_id, a.token_key FROM added AS a WHERE (a.is_now).suppressed
                ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since
            ), pair AS MATERIALIZED (
                SELECT a.is_now, s AS reported FROM unnest(reports[first:first + many - 1]) AS s JOIN added AS a USING (topic_id, token_key)
            ), logged AS (
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, source_id,
                    registered_before, registered_after, invalidated_before, invalidated_after)
                SELECT e.* FROM pair AS b CROSS JOIN LATERAL tokenkeeper.event_of(NULL, b.is_now, b.reported) AS e
            )
            SELECT array_agg(t) INTO more_checks FROM pair AS b CROSS JOIN LATERAL tokenkeeper.checks_of(NULL, b.is_now, b.reported) AS t;
            checks := checks || coalesce(more_checks, '{}');
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE most END;
        EXCEPTION WHEN lock_not_available OR unique_violation THEN
            IF many = 1 THEN
                left_over := left_over || reports[first].n;
                first := first + 1;
                many := most;
            ELSE
                locked_until := least(first + many - 1, total);
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_new(tokenkeeper.token_report[], timestamptz, boolean, timestamptz) IS
    'Internal: merges reports about unknown tokens, given once each and in key order. Returns the positions of those that another session has, or is adding, '
    'and the devices for resolve_devices. holds: others may wait for this transaction already. It waits for no other session after give_up_at.';

CREATE OR REPLACE FUNCTION tokenkeeper.merge_reports(
    reports tokenkeeper.token_report[], receipt timestamptz, holds boolean, give_up_at timestamptz, OUT busy integer[],
    OUT checks tokenkeeper.device_check[], OUT turned integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    combined CONSTANT tokenkeeper.token_report[] := tokenkeeper.one_per_token(reports);
    left_over tokenkeeper.token_report[];
    added record;
BEGIN
    busy := '{}';
    checks := '{}';
    turned := '{}';
    IF combined IS NULL THEN
        RETURN;
    END IF;
    IF NOT isfinite(give_up_at) THEN
        -- A single token may wait for its lock as long as lock_timeout says: this transaction holds nothing that others may wait for.
        BEGIN
            PERFORM FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = combined[1].topic_id AND l.token_key = combined[1].token_key FOR NO KEY UPDATE;
        EXCEPTION WHEN lock_not_available THEN
            busy := ARRAY(SELECT r.n FROM unnest(reports) AS r);
            RETURN;
        END;
    END IF;
    SELECT k.left_over, k.busy, k.checks, k.turned INTO left_over, busy, checks, turned FROM tokenkeeper.merge_known(combined, receipt) AS k;
    IF left_over <> '{}' THEN
        SELECT * INTO added FROM tokenkeeper.merge_new(
            left_over, receipt, holds OR cardinality(left_over) + cardinality(busy) < cardinality(combined), give_up_at);
        checks := checks || added.checks;
        busy := busy || added.left_over;
        IF reports[1].cause = 'suspect' THEN
            -- An unknown token could be sent to.
            turned := turned || ARRAY(SELECT r.n FROM unnest(tokenkeeper.without(left_over, added.left_over)) AS r);
        END IF;
    END IF;
    IF busy <> '{}' THEN
        -- All reports about these tokens.
        busy := ARRAY(
            SELECT r.n FROM unnest(reports) AS r
            WHERE (r.topic_id, r.token_key) IN (SELECT t.topic_id, t.token_key FROM unnest(combined) AS t WHERE t.n IN (SELECT unnest(busy))));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_reports(tokenkeeper.token_report[], timestamptz, boolean, timestamptz) IS
    'Internal: merges reports of a batch into the ledger: registrations, or those of one cause. Returns the positions of those whose token another session '
    'has locked or is adding (busy), and what merge_known returns. Waits for no other session after give_up_at; if that is infinity, for one token as long '
    'as lock_timeout says.';
