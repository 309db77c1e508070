-- How a daemon applies a batch of queued registrations. The result equals calling register and unregister for each row: they merge with the same
-- functions (20_registration). Those work on one token, wait for it and need no subtransaction; these work in sets.
--
-- A batch holds many locks, so it never waits long. It skips locked tokens. An INSERT gives up after 3 ms. After half of deadlock_timeout the batch stops
-- waiting, because an application that waits for it then looks for a deadlock. Rows that it could not apply go to registration_retry.

CREATE OR REPLACE FUNCTION tokenkeeper.read_registrations(
    rows tokenkeeper.registration[], receipt timestamptz, OUT reports tokenkeeper.token_report[], OUT without_topic integer[], OUT faulty integer[],
    OUT faults text[], OUT checks tokenkeeper.device_check[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    WITH reported AS MATERIALIZED (
        SELECT r.*, CASE WHEN r.hex IS NULL THEN tokenkeeper.token_fault(r.token)
                         WHEN r.logs_out AND isfinite(r.registered_at) IS NOT FALSE THEN NULL
                         WHEN tokenkeeper.is_sound_registration(r.registered_at, r.device_id, r.user_id, r.tags) THEN NULL
                         ELSE tokenkeeper.registration_fault(r.registered_at, r.device_id, r.user_id, r.tags) END AS row_fault,
               CASE WHEN r.topic_id IS NULL THEN coalesce(tokenkeeper.environment_fault(r.environment), tokenkeeper.topic_fault(r.topic)) END AS topic_fault
        FROM (
            SELECT u.n::integer AS n, u.topic, coalesce(u.environment, 'production') AS environment, u.token, u.registered_at,
                   tokenkeeper.parse_token(u.token) AS hex, u.unregistered IS TRUE AS logs_out, tokenkeeper.device_name(u.device_id) AS device_id, u.user_id, u.tags, u.source_id, u.returned,
                   -- A logout that is taken back need not say when the device registered.
                   CASE WHEN u.returned IS NOT TRUE OR u.registered_at IS NOT NULL THEN least(u.registered_at, u.queued_at, receipt) END AS moment,
                   -- What is written to an attached table counts from the write: somebody may edit it long after the device registered.
                   least(CASE WHEN u.source_id IS NULL OR (
                       SELECT o.kind <> 'attachment' FROM tokenkeeper.registration_source AS o
                       WHERE o.source_id = u.source_id) IS NOT FALSE THEN u.registered_at END,
                       u.queued_at, receipt) AS details_at, least(u.queued_at, receipt) AS received_at, (
                       SELECT t.topic_id FROM tokenkeeper.topic AS t
                       WHERE t.topic = u.topic AND t.environment = coalesce(u.environment, 'production')) AS topic_id
            FROM unnest(read_registrations.rows) WITH ORDINALITY AS u (environment, topic, token, registered_at, device_id, user_id, tags,
                unregistered, source_id, returned, queued_at, partition_number, attempts, released, n)
            WHERE u.attempts IS DISTINCT FROM -1
            -- So that what is used twice is computed once.
            OFFSET 0) AS r
    )
    SELECT array_agg(ROW(s.n, s.topic_id, decode(s.hex, 'hex'), tokenkeeper.has_one_token_per_device(s.topic),
                         CASE WHEN NOT s.logs_out THEN s.moment END, CASE WHEN s.logs_out THEN s.moment END,
                         CASE WHEN s.returned AND NOT s.logs_out THEN s.received_at END,
                         CASE WHEN NOT s.logs_out THEN s.device_id END, s.details_at,
                         CASE WHEN NOT s.logs_out THEN s.user_id END, s.details_at,
                         CASE WHEN NOT s.logs_out THEN s.tags END, s.details_at, s.source_id)::tokenkeeper.token_report
                     -- In key order, so that few pages are visited, and of a token in one order.
                     ORDER BY s.topic_id, s.hex, s.n) FILTER (WHERE f.fault IS NULL AND s.topic_id IS NOT NULL),
           array_agg(s.n) FILTER (WHERE f.fault IS NULL AND s.topic_id IS NULL),
           array_agg(s.n ORDER BY s.n) FILTER (WHERE f.fault IS NOT NULL), array_agg(f.fault ORDER BY s.n) FILTER (WHERE f.fault IS NOT NULL)
    INTO reports, without_topic, faulty, faults
    FROM reported AS s CROSS JOIN LATERAL (SELECT coalesce(s.row_fault, s.topic_fault) AS fault) AS f;
    -- See requeue_devices.
    checks := ARRAY(
        SELECT ROW(t.topic_id, r.device_id, NULL, false)::tokenkeeper.device_check
        FROM unnest(read_registrations.rows) AS r JOIN tokenkeeper.topic AS t ON t.topic = r.topic AND t.environment = r.environment
        WHERE r.attempts = -1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_registrations(tokenkeeper.registration[], timestamptz) IS
    'Internal: reads rows of the queue. Returns what each says, in key order; the positions of those whose topic is new; the positions of those that are '
    'not understood, with the reasons; and the devices that rows of requeue_devices name.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.read_registrations(tokenkeeper.registration[], timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.add_topics(rows tokenkeeper.registration[], without_topic integer[], is_alone boolean) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    begun_at timestamptz := clock_timestamp();
    one record;
BEGIN
    -- An application may be adding the same new topic, and the INSERT would wait for it.
    IF NOT is_alone THEN
        PERFORM set_config('lock_timeout', '10ms', true);
    END IF;
    FOR one IN
        SELECT DISTINCT coalesce(rows[n].environment, 'production') AS environment, rows[n].topic AS topic FROM unnest(without_topic) AS n ORDER BY 2, 1
    LOOP
        BEGIN
            PERFORM tokenkeeper.ensure_topic(one.environment, one.topic);
        EXCEPTION WHEN lock_not_available THEN
            NULL; -- Its rows wait.
        END;
        EXIT WHEN clock_timestamp() > begun_at + interval '100 ms';
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.add_topics(tokenkeeper.registration[], integer[], boolean) IS
    'Internal: adds the new topics of these rows, and does not wait long for another session that adds the same one, unless it is the only row.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.add_topics(tokenkeeper.registration[], integer[], boolean) FROM PUBLIC;

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
        SELECT ROW(min((s.report).n), s.topic_id, s.token_key, bool_and((s.report).one_token), max((s.report).registered_at), max((s.report).logout_at),
                   max((s.report).returned_at),
                   (array_agg((s.report).device_id ORDER BY (s.report).device_at DESC, (s.report).device_id DESC)
                       FILTER (WHERE (s.report).device_id IS NOT NULL))[1],
                   max((s.report).device_at) FILTER (WHERE (s.report).device_id IS NOT NULL),
                   (array_agg((s.report).user_id ORDER BY (s.report).user_at DESC, (s.report).user_id DESC)
                       FILTER (WHERE (s.report).user_id IS NOT NULL))[1],
                   max((s.report).user_at) FILTER (WHERE (s.report).user_id IS NOT NULL),
                   ((array_agg(s.report ORDER BY (s.report).tags_at DESC, (s.report).tags DESC) FILTER (WHERE (s.report).tags IS NOT NULL))[1]).tags,
                   max((s.report).tags_at) FILTER (WHERE (s.report).tags IS NOT NULL),
                   CASE WHEN count(*) = count((s.report).source_id) AND min((s.report).source_id) = max((s.report).source_id)
                        THEN min((s.report).source_id) END)::tokenkeeper.token_report,
               s.topic_id, s.token_key
        FROM reported AS s WHERE s.times > 1 GROUP BY s.topic_id, s.token_key) AS o
$$;
COMMENT ON FUNCTION tokenkeeper.one_per_token(tokenkeeper.token_report[]) IS
    'Internal: what reports say about each token combined, in key order: of each fact the greatest.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.one_per_token(tokenkeeper.token_report[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.merge_known(
    reports tokenkeeper.token_report[], receipt timestamptz, OUT left_over tokenkeeper.token_report[], OUT checks tokenkeeper.device_check[],
    OUT before tokenkeeper.token_report[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    WITH old AS MATERIALIZED (
        -- A token that an application has locked is left over.
        SELECT s AS reported, l.was, l.tid
        FROM unnest(reports) AS s
        CROSS JOIN LATERAL (
            SELECT k AS was, k.ctid AS tid FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l
    ), merged AS MATERIALIZED (
        SELECT o.reported, o.was, o.tid, m.*,
               (m.registered_at, m.unregistered_by_app_at, m.returned_at, m.device_at, m.user_at, m.tags_at, m.device_id, m.user_id, m.tags)
               IS NOT DISTINCT FROM ((o.was).registered_at, (o.was).unregistered_by_app_at, (o.was).returned_at, (o.was).device_at, (o.was).user_at,
                                     (o.was).tags_at, (o.was).device_id, (o.was).user_id, (o.was).tags) AS is_same
        FROM old AS o CROSS JOIN LATERAL tokenkeeper.merged(o.was, o.reported) AS m
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET registered_at = m.registered_at, unregistered_by_app_at = m.unregistered_by_app_at, returned_at = m.returned_at,
            superseded_at = m.superseded_at, unresolved = m.unresolved, of_constant = m.of_constant, device_id = m.device_id, device_at = m.device_at, user_id = m.user_id,
            user_at = m.user_at, tags = m.tags, tags_at = m.tags_at,
            suppressed_since = CASE WHEN m.is_suppressed THEN coalesce(l.suppressed_since, receipt) END
        FROM merged AS m
        -- If an application has changed a row since this statement began, its ctid no longer matches: the token is left over.
        WHERE l.ctid = m.tid AND NOT m.is_same
        RETURNING m.reported, m.was, l AS is_now
    ), logged AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT (c.reported).topic_id, (c.reported).token_key, e.event, e.cause, (c.is_now).device_id, (c.is_now).user_id, (c.reported).source_id,
               nullif((c.was).registered_at, '-infinity'), nullif((c.is_now).registered_at, '-infinity'),
               tokenkeeper.invalidated_at(c.was), tokenkeeper.invalidated_at(c.is_now)
        FROM changed AS c CROSS JOIN LATERAL tokenkeeper.event_of(c.was, c.is_now, c.reported) AS e
    ), done AS (
        SELECT c.reported, c.was, c.is_now FROM changed AS c
        UNION ALL
        SELECT m.reported, m.was, m.was FROM merged AS m WHERE m.is_same
    )
    SELECT ARRAY(SELECT s FROM unnest(reports) AS s WHERE s.n NOT IN (SELECT (d.reported).n FROM done AS d) ORDER BY s.topic_id, s.token_key),
           ARRAY(SELECT t FROM done AS d CROSS JOIN LATERAL tokenkeeper.checks_of(d.was, d.is_now, d.reported) AS t),
           ARRAY(SELECT ROW((o.reported).n, (o.reported).topic_id, (o.reported).token_key, NULL, NULL, (o.was).unregistered_by_app_at, NULL, NULL, NULL, NULL, NULL,
                            NULL, NULL, NULL)::tokenkeeper.token_report
                 FROM old AS o WHERE (o.reported).logout_at IS NOT NULL)
    INTO left_over, checks, before;
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_known(tokenkeeper.token_report[], timestamptz) IS
    'Internal: merges reports about known tokens, given once each and in key order. Returns those of unknown tokens and of tokens that another session has '
    'locked; the devices for resolve_devices; and before: for each logout of a known token, the logout that the ledger had until then.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.merge_known(tokenkeeper.token_report[], timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.merge_new(
    reports tokenkeeper.token_report[], receipt timestamptz, give_up_at timestamptz, OUT left_over integer[], OUT checks tokenkeeper.device_check[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    total integer := coalesce(cardinality(reports), 0);
    first integer := 1;
    many integer := total;
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
    END IF;
    WHILE first <= total LOOP
        -- The first attempt waits 3 ms at most, however long it took to come here: on a cold cache, for example.
        IF first > 1 AND clock_timestamp() > give_up_at THEN
            left_over := left_over || ARRAY(SELECT r.n FROM unnest(reports[first:]) AS r);
            EXIT;
        END IF;
        BEGIN
            WITH added AS (
                INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, unregistered_by_app_at, returned_at, unresolved, device_id,
                    device_at, user_id, user_at, tags, tags_at, suppressed_since)
                SELECT s.topic_id, s.token_key, m.registered_at, m.unregistered_by_app_at, m.returned_at, m.unresolved, m.device_id, m.device_at,
                       m.user_id, m.user_at, m.tags, m.tags_at, CASE WHEN m.is_suppressed THEN receipt END
                FROM unnest(reports[first:first + many - 1]) AS s CROSS JOIN LATERAL tokenkeeper.merged(NULL, s) AS m
                RETURNING l AS is_now, l.topic_id, l.token_key
            ), pair AS MATERIALIZED (
                SELECT a.is_now, s AS reported FROM unnest(reports[first:first + many - 1]) AS s JOIN added AS a USING (topic_id, token_key)
            ), logged AS (
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id, registered_after, invalidated_after)
                SELECT (b.reported).topic_id, (b.reported).token_key, e.event, e.cause, (b.is_now).device_id, (b.is_now).user_id, (b.reported).source_id,
                       nullif((b.is_now).registered_at, '-infinity'), tokenkeeper.invalidated_at(b.is_now)
                FROM pair AS b CROSS JOIN LATERAL tokenkeeper.event_of(NULL, b.is_now, b.reported) AS e
            )
            SELECT array_agg(t) INTO more_checks FROM pair AS b CROSS JOIN LATERAL tokenkeeper.checks_of(NULL, b.is_now, b.reported) AS t;
            checks := checks || coalesce(more_checks, '{}');
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE greatest(total - first + 1, 1) END;
        EXCEPTION WHEN lock_not_available OR unique_violation THEN
            IF many = 1 THEN
                left_over := left_over || reports[first].n;
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
COMMENT ON FUNCTION tokenkeeper.merge_new(tokenkeeper.token_report[], timestamptz, timestamptz) IS
    'Internal: merges reports about unknown tokens, given once each and in key order. Returns the positions of those that another session has, or is adding, '
    'and the devices for resolve_devices. It waits for no other session after give_up_at.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.merge_new(tokenkeeper.token_report[], timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.merge_reports(
    reports tokenkeeper.token_report[], receipt timestamptz, give_up_at timestamptz, OUT busy integer[], OUT checks tokenkeeper.device_check[],
    OUT before tokenkeeper.token_report[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    combined CONSTANT tokenkeeper.token_report[] := tokenkeeper.one_per_token(reports);
    left_over tokenkeeper.token_report[];
    more_checks tokenkeeper.device_check[];
BEGIN
    busy := '{}';
    checks := '{}';
    before := '{}';
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
    SELECT k.left_over, k.checks, k.before INTO left_over, checks, before FROM tokenkeeper.merge_known(combined, receipt) AS k;
    IF left_over = '{}' THEN
        RETURN;
    END IF;
    SELECT a.left_over, a.checks INTO busy, more_checks FROM tokenkeeper.merge_new(left_over, receipt, give_up_at) AS a;
    checks := checks || more_checks;
    IF busy <> '{}' THEN
        -- All reports about these tokens.
        busy := ARRAY(
            SELECT r.n FROM unnest(reports) AS r
            WHERE (r.topic_id, r.token_key) IN (SELECT t.topic_id, t.token_key FROM unnest(combined) AS t WHERE t.n IN (SELECT unnest(busy))));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_reports(tokenkeeper.token_report[], timestamptz, timestamptz) IS
    'Internal: merges registrations, or logouts, of a batch into the ledger. Returns the positions of those whose token another session has locked or is '
    'adding (busy), and what merge_known returns. It waits for no other session after give_up_at; if that is infinity, for one token as long as lock_timeout says.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.merge_reports(tokenkeeper.token_report[], timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.judge_logouts(
    rows tokenkeeper.registration[], reports tokenkeeper.token_report[], guard_allowance bigint, guard_max_share numeric,
    OUT recorded tokenkeeper.token_report[], OUT suppresses boolean[], OUT waits integer[], OUT held bigint, OUT tripped integer[], OUT reset integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    logouts CONSTANT tokenkeeper.token_report[] := ARRAY(SELECT r FROM unnest(reports) AS r WHERE r.logout_at IS NOT NULL);
    fates text[];
BEGIN
    recorded := logouts;
    suppresses := array_fill(false, ARRAY[cardinality(logouts)]);
    waits := '{}';
    held := 0;
    tripped := '{}';
    reset := '{}';
    IF NOT EXISTS (SELECT FROM unnest(logouts) AS l WHERE l.source_id IS NOT NULL) THEN
        RETURN;
    END IF;
    WITH registered AS MATERIALIZED (
        SELECT r.topic_id, r.token_key, max(r.registered_at) AS registered_at FROM unnest(reports) AS r WHERE r.logout_at IS NULL GROUP BY 1, 2
    ), asked AS (
        SELECT l.topic_id, l.token_key, l.logout_at, l.source_id, l.n, rows[l.n].queued_at AS queued_at, coalesce(rows[l.n].released, false) AS released,
               r.registered_at
        FROM unnest(logouts) AS l LEFT JOIN registered AS r USING (topic_id, token_key)
    )
    SELECT j.fates, j.suppresses, j.tripped, j.reset INTO fates, suppresses, tripped, reset
    FROM (SELECT array_agg(a.topic_id ORDER BY o.i) AS of_topic, array_agg(a.token_key ORDER BY o.i) AS token_keys,
                 array_agg(a.logout_at ORDER BY o.i) AS moments, array_agg(a.queued_at ORDER BY o.i) AS queued_at,
                 array_agg(a.released ORDER BY o.i) AS released, array_agg(a.source_id ORDER BY o.i) AS sources,
                 array_agg(a.registered_at ORDER BY o.i) AS registered_at
          FROM asked AS a JOIN (SELECT u.n, u.i FROM unnest(ARRAY(SELECT l.n FROM unnest(logouts) AS l)) WITH ORDINALITY AS u (n, i)) AS o USING (n)) AS g
    CROSS JOIN LATERAL tokenkeeper.judge_unregistrations(
        g.of_topic, g.token_keys, g.moments, g.queued_at, g.released, g.sources, g.registered_at, judge_logouts.guard_allowance,
        judge_logouts.guard_max_share) AS j;
    INSERT INTO tokenkeeper.held_registration (topic_id, token_key, unregistered_by_app_at, environment, topic, token, registered_at, device_id, user_id, tags,
        unregistered, source_id, queued_at, attempts)
    SELECT l.topic_id, l.token_key, l.logout_at, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered,
           r.source_id, r.queued_at, r.attempts
    FROM unnest(fates) WITH ORDINALITY AS f (fate, i) CROSS JOIN LATERAL unnest(logouts[f.i:f.i]) AS l CROSS JOIN LATERAL unnest(rows[l.n:l.n]) AS r
    WHERE f.fate = 'held';
    GET DIAGNOSTICS held = ROW_COUNT;
    waits := ARRAY(SELECT logouts[f.i].n FROM unnest(fates) WITH ORDINALITY AS f (fate, i) WHERE f.fate = 'waiting');
    SELECT coalesce(array_agg(logouts[f.i] ORDER BY f.i), '{}'), coalesce(array_agg(f.suppresses ORDER BY f.i), '{}') INTO recorded, suppresses
    FROM unnest(fates, suppresses) WITH ORDINALITY AS f (fate, suppresses, i) WHERE f.fate = 'recorded';
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge_logouts(tokenkeeper.registration[], tokenkeeper.token_report[], bigint, numeric) IS
    'Internal: lets the logouts among these reports pass the guard, if a source has reported some. Returns those to record, and whether each suppresses a token '
    'by the guard; the positions of those whose guard is busy; how many are held now, in held_registration; and the guards that have tripped or reset. Locks '
    'guards, so call it before any token is locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge_logouts(tokenkeeper.registration[], tokenkeeper.token_report[], bigint, numeric) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.record_logouts(
    rows tokenkeeper.registration[], logouts tokenkeeper.token_report[], suppresses boolean[], receipt timestamptz, give_up_at timestamptz) RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    busy integer[];
    before tokenkeeper.token_report[];
BEGIN
    SELECT m.busy, m.before INTO busy, before FROM tokenkeeper.merge_reports(logouts, receipt, give_up_at) AS m;
    PERFORM tokenkeeper.note_unregistrations(
        array_agg(l.topic_id), array_agg(l.token_key), array_agg(l.logout_at), array_agg(rows[l.n].queued_at), array_agg(l.source_id),
        array_agg(s.suppresses), array_agg(b.logout_at))
    FROM unnest(logouts) AS l
    JOIN (SELECT logouts[u.i].n AS n, u.suppresses FROM unnest(record_logouts.suppresses) WITH ORDINALITY AS u (suppresses, i)) AS s ON s.n = l.n
    LEFT JOIN unnest(before) AS b ON b.topic_id = l.topic_id AND b.token_key = l.token_key
    WHERE l.n NOT IN (SELECT unnest(busy))
    HAVING count(*) > 0;
    RETURN busy;
END
$$;
COMMENT ON FUNCTION tokenkeeper.record_logouts(tokenkeeper.registration[], tokenkeeper.token_report[], boolean[], timestamptz, timestamptz) IS
    'Internal: records the logouts that the guard lets through, with their receipts. Returns the positions of those whose token another session has locked or '
    'is adding.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.record_logouts(tokenkeeper.registration[], tokenkeeper.token_report[], boolean[], timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.reject_registrations(
    rows tokenkeeper.registration[], faulty integer[], faults text[], allowance bigint) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kept bigint;
BEGIN
    WITH refused AS MATERIALIZED (
        SELECT f.error, r.*, count(*) FILTER (WHERE r.attempts IS NULL) OVER (ORDER BY f.n) AS so_far
        FROM unnest(faulty, faults) AS f (n, error) CROSS JOIN LATERAL unnest(rows[f.n:f.n]) AS r
    )
    INSERT INTO tokenkeeper.rejected_registration (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id,
        returned, queued_at, attempts)
    SELECT r.error, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned,
           r.queued_at, r.attempts
    FROM refused AS r WHERE r.attempts IS NOT NULL OR r.so_far <= reject_registrations.allowance;
    GET DIAGNOSTICS kept = ROW_COUNT;
    RETURN kept;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reject_registrations(tokenkeeper.registration[], integer[], text[], bigint) IS
    'Internal: keeps these rows in rejected_registration, up to the allowance and all that were requeued before. Returns how many it kept.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reject_registrations(tokenkeeper.registration[], integer[], text[], bigint) FROM PUBLIC;

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
AS $$
DECLARE
    total integer := coalesce(cardinality(apply_registrations.rows), 0);
    receipt timestamptz := clock_timestamp();
    -- A single row may wait for its lock as long as lock_timeout says: it holds nothing that others may wait for.
    give_up_at timestamptz := 'infinity';
    reported record;
    judged record;
    busy integer[];
    checks tokenkeeper.device_check[];
    waits integer[];
    again integer;
BEGIN
    SELECT * INTO reported FROM tokenkeeper.read_registrations(apply_registrations.rows, receipt);
    IF reported.without_topic IS NOT NULL THEN
        PERFORM tokenkeeper.add_topics(apply_registrations.rows, reported.without_topic, total = 1);
        SELECT * INTO reported FROM tokenkeeper.read_registrations(apply_registrations.rows, receipt);
    END IF;
    SELECT * INTO judged FROM tokenkeeper.judge_logouts(
        apply_registrations.rows, reported.reports, apply_registrations.guard_allowance, apply_registrations.guard_max_share);
    waits := reported.without_topic || judged.waits;

    -- From here on, an application may wait for this transaction. Whatever deadlock_timeout is, there is time to apply something.
    IF total > 1 THEN
        give_up_at := clock_timestamp() + greatest(current_setting('deadlock_timeout')::interval / 2 - interval '10 ms', interval '20 ms');
    END IF;
    SELECT m.busy, m.checks INTO busy, checks FROM tokenkeeper.merge_reports(
        ARRAY(SELECT r FROM unnest(reported.reports) AS r WHERE r.logout_at IS NULL), receipt, give_up_at) AS m;
    waits := waits || busy;
    IF judged.recorded <> '{}' THEN
        waits := waits || tokenkeeper.record_logouts(apply_registrations.rows, judged.recorded, judged.suppresses, receipt, give_up_at);
    END IF;
    again := tokenkeeper.resolve_devices(reported.checks || checks, receipt);

    INSERT INTO tokenkeeper.registration_retry (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, returned,
        queued_at, partition_number, attempts, released)
    SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned, r.queued_at, 8,
           r.attempts, r.released
    FROM unnest(waits) AS w CROSS JOIN LATERAL unnest(apply_registrations.rows[w:w]) AS r;
    waiting := coalesce(cardinality(waits), 0) + least(again, cardinality(reported.checks));
    rejected := coalesce(cardinality(reported.faulty), 0);
    not_kept := 0;
    IF rejected > 0 THEN
        not_kept := rejected - tokenkeeper.reject_registrations(
            apply_registrations.rows, reported.faulty, reported.faults, apply_registrations.rejected_allowance);
    END IF;
    held := judged.held;
    tripped := judged.tripped;
    reset := judged.reset;
    applied := total - rejected - held - waiting;
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) IS
    'Applies a batch of rows that were taken out of registration, in the transaction that deletes them: with the same outcome as register and unregister, '
    'called for each. Returns how many were applied; rejected; not_kept: those of the rejected that were beyond rejected_allowance and are not in '
    'rejected_registration; held by the mass-failure guard in held_registration; waiting in registration_retry, because another session had locked what '
    'they need; and the topic_ids whose guard has tripped or reset. A batch of one row waits for its lock as long as lock_timeout says; others wait for '
    'milliseconds only. Requires read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) FROM PUBLIC;
