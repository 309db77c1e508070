-- How a daemon applies a batch of queued registrations: in sets what does not depend on other tokens, row by row what does.
--
-- The ledger is the one that register and unregister would leave, called row by row, because each of the sets below has the effect of one such
-- call per row, and because the order of calls does not matter. What two rows of a batch say about the same token is first reduced to the greatest
-- instants, where that is exact.
--
-- Locks: those of 20_registration. Only this function holds many of them, so it yields: it skips what others have locked, and where it cannot skip (an
-- INSERT waits for a session that inserts the same key) it gives up after 3 ms. An application that waits for this transaction looks for a deadlock
-- after deadlock_timeout, so within half of that time this transaction stops waiting for anything. Rows that cannot be applied now wait in
-- registration_retry.
--
-- The steps are functions with a file each: register_known_tokens, add_tokens, register_row and unregister_tokens.

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
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    total integer := coalesce(cardinality(apply_registrations.rows), 0);
    receipt timestamptz := clock_timestamp();
    lock_timeout_before text := current_setting('lock_timeout');
    -- A single row may wait for its locks as long as lock_timeout says: it holds nothing that others may wait for.
    patience timestamptz := CASE WHEN total <= 1 THEN 'infinity'::timestamptz ELSE receipt END;
    -- Positions in rows, and what these rows say, in the order of logouts, topics and token keys.
    of_row integer[];
    of_topic integer[];
    token_keys bytea[];
    moments timestamptz[];
    -- The instants with which the user and the tags count. An attached table changes these whenever somebody edits them, long after the device
    -- registered: that must neither revive the token nor lose against what was there before.
    details_at timestamptz[];
    logs_out boolean[];
    one_token boolean[];
    devices text[] COLLATE "C";
    users text[] COLLATE "C";
    with_tags boolean[];
    sources bigint[];
    -- Positions in these, and what the guard says about each.
    logouts integer[];
    fates text[];
    suppresses boolean[];
    -- What a batch says about each token that it registers.
    k_topic integer[];
    k_key bytea[];
    k_moment timestamptz[];
    k_one boolean[];
    k_device text[] COLLATE "C";
    k_device_at timestamptz[];
    k_user text[] COLLATE "C";
    k_user_at timestamptz[];
    k_tags_of integer[];
    k_tags_at timestamptz[];
    k_source bigint[];
    -- Positions in these.
    unknown integer[];
    dependents integer[];
    busy integer[];
    -- The tokens that go row by row.
    slow_topic integer[];
    slow_key bytea[];
    -- Positions in rows.
    waits integer[] := '{}';
    faulty integer[];
    faults text[];
    lacks_topic boolean;
    is_tried boolean := false;
    one record;
BEGIN
    applied := 0;
    rejected := 0;
    not_kept := 0;
    held := 0;
    waiting := 0;
    tripped := '{}';
    reset := '{}';
    IF total = 0 THEN
        RETURN;
    END IF;

    FOR attempt IN 1..2 LOOP
        WITH said AS MATERIALIZED (
            SELECT r.*,
                CASE
                WHEN r.hex IS NULL THEN tokenkeeper.token_fault(r.token)
                WHEN NOT isfinite(r.registered_at) THEN 'registered_at is ' || r.registered_at || ', expected a finite instant'
                WHEN r.logs_out THEN NULL
                WHEN octet_length(r.device_id) > 512 THEN 'device_id is ' || octet_length(r.device_id) || ' bytes long, expected at most 512'
                WHEN octet_length(r.user_id) > 512 THEN 'user_id is ' || octet_length(r.user_id) || ' bytes long, expected at most 512'
                WHEN r.tags IS NULL THEN NULL
                WHEN array_ndims(r.tags) > 1 THEN 'tags is an array of ' || array_ndims(r.tags) || ' dimensions, expected one'
                WHEN cardinality(r.tags) > 1000 THEN 'tags has ' || cardinality(r.tags) || ' elements, expected at most 1000'
                ELSE (SELECT 'a tag is ' || coalesce(octet_length(t.tag) || ' bytes long', 'null') || ', expected 1 to 512 bytes'
                      FROM unnest(r.tags) AS t (tag) WHERE t.tag IS NULL OR octet_length(t.tag) NOT BETWEEN 1 AND 512 LIMIT 1)
                END AS row_fault,
                CASE WHEN r.topic_id IS NULL THEN coalesce(tokenkeeper.environment_fault(r.environment), tokenkeeper.topic_fault(r.topic)) END AS topic_fault
            FROM (
                SELECT u.position::integer AS position, u.topic, coalesce(u.environment, 'production') AS environment, u.token, u.registered_at,
                       tokenkeeper.parse_token(u.token) AS hex, u.unregistered IS TRUE AS logs_out, u.device_id, u.user_id, u.tags, u.source_id,
                       least(u.registered_at, u.queued_at, receipt) AS moment,
                       least(CASE WHEN u.source_id IS NULL OR (
                           SELECT o.kind <> 'attachment' FROM tokenkeeper.registration_source AS o
                           WHERE o.source_id = u.source_id) IS NOT FALSE THEN u.registered_at END,
                           u.queued_at, receipt) AS details_at, (
                           SELECT t.topic_id FROM tokenkeeper.topic AS t
                           WHERE t.topic = u.topic AND t.environment = coalesce(u.environment, 'production')) AS topic_id
                FROM unnest(apply_registrations.rows) WITH ORDINALITY AS u (environment, topic, token, registered_at, device_id, user_id, tags,
                    unregistered, source_id, queued_at, partition_number, attempts, released, position)
                -- So that what is used twice is computed once.
                OFFSET 0) AS r
        ), understood AS (
            SELECT array_agg(s.position) AS of_row, array_agg(s.topic_id) AS of_topic, array_agg(s.token_key) AS token_keys,
                   array_agg(s.moment) AS moments, array_agg(s.details_at) AS details_at, array_agg(s.logs_out) AS logs_out,
                   array_agg(s.one_token) AS one_token, array_agg(s.device_id) AS devices, array_agg(s.user_id) AS users, array_agg(s.with_tags) AS with_tags,
                   array_agg(s.source_id) AS sources, bool_or(s.topic_id IS NULL) AS lacks_topic
            FROM (SELECT p.position, p.topic_id, decode(p.hex, 'hex') AS token_key, p.moment, p.details_at, p.logs_out, p.device_id, p.user_id,
                         p.tags IS NOT NULL AS with_tags, p.source_id, tokenkeeper.has_one_token_per_device(p.topic) AS one_token
                  FROM said AS p WHERE p.row_fault IS NULL AND p.topic_fault IS NULL
                  ORDER BY p.logs_out, p.topic_id, 3, p.position) AS s
        ), refused AS (
            SELECT array_agg(s.position ORDER BY s.position) AS faulty, array_agg(coalesce(s.row_fault, s.topic_fault) ORDER BY s.position) AS faults
            FROM said AS s WHERE s.row_fault IS NOT NULL OR s.topic_fault IS NOT NULL
        )
        SELECT * INTO of_row, of_topic, token_keys, moments, details_at, logs_out, one_token, devices, users, with_tags, sources, lacks_topic,
                      faulty, faults
        FROM understood AS u CROSS JOIN refused AS r;
        EXIT WHEN lacks_topic IS NOT TRUE OR attempt = 2;
        -- An application may be adding the same new topic, and the INSERT would wait for it.
        IF isfinite(patience) THEN
            PERFORM set_config('lock_timeout', '10ms', true);
        END IF;
        FOR one IN
            SELECT DISTINCT coalesce((apply_registrations.rows[u.n]).environment, 'production') AS environment, (apply_registrations.rows[u.n]).topic AS topic
            FROM unnest(of_row, of_topic) AS u (n, topic_id) WHERE u.topic_id IS NULL ORDER BY 2, 1
        LOOP
            BEGIN
                PERFORM tokenkeeper.ensure_topic(one.environment, one.topic);
            EXCEPTION WHEN lock_not_available THEN
                NULL; -- Its rows wait.
            END;
            EXIT WHEN clock_timestamp() > receipt + interval '100 ms';
        END LOOP;
        PERFORM set_config('lock_timeout', lock_timeout_before, true);
    END LOOP;
    IF lacks_topic THEN
        waits := ARRAY(SELECT u.n FROM unnest(of_row, of_topic) AS u (n, topic_id) WHERE u.topic_id IS NULL);
    END IF;

    logouts := ARRAY(SELECT u.i::integer FROM unnest(logs_out, of_topic) WITH ORDINALITY AS u (is_logout, topic_id, i)
                     WHERE u.is_logout AND u.topic_id IS NOT NULL);
    -- Logouts of a source pass the guard, which is locked before any token.
    suppresses := array_fill(false, ARRAY[cardinality(logouts)]);
    IF EXISTS (SELECT FROM unnest(logouts) AS i WHERE sources[i] IS NOT NULL) THEN
        WITH registered AS MATERIALIZED (
            SELECT u.topic_id, u.token_key, max(u.moment) AS moment
            FROM unnest(of_topic, token_keys, moments, logs_out) AS u (topic_id, token_key, moment, is_logout) WHERE NOT u.is_logout GROUP BY 1, 2
        ), asked AS (
            SELECT n, of_topic[i] AS topic_id, token_keys[i] AS token_key, moments[i] AS moment, sources[i] AS source_id,
                   (apply_registrations.rows[of_row[i]]).queued_at AS queued_at, (apply_registrations.rows[of_row[i]]).released AS released
            FROM unnest(logouts) WITH ORDINALITY AS l (i, n)
        )
        SELECT j.fates, j.suppresses, j.tripped, j.reset INTO fates, suppresses, tripped, reset
        FROM (SELECT array_agg(a.topic_id ORDER BY a.n) AS of_topic, array_agg(a.token_key ORDER BY a.n) AS token_keys,
                     array_agg(a.moment ORDER BY a.n) AS moments, array_agg(a.queued_at ORDER BY a.n) AS queued_at,
                     array_agg(coalesce(a.released, false) ORDER BY a.n) AS released, array_agg(a.source_id ORDER BY a.n) AS sources,
                     array_agg(r.moment ORDER BY a.n) AS registered_at
              FROM asked AS a LEFT JOIN registered AS r USING (topic_id, token_key)) AS g
        CROSS JOIN LATERAL tokenkeeper.judge_unregistrations(
            g.of_topic, g.token_keys, g.moments, g.queued_at, g.released, g.sources, g.registered_at, apply_registrations.guard_allowance,
            apply_registrations.guard_max_share) AS j;
        INSERT INTO tokenkeeper.held_registration (topic_id, token_key, unregistered_by_app_at, environment, topic, token, registered_at, device_id, user_id, tags,
            unregistered, source_id, queued_at, attempts)
        SELECT of_topic[h.i], token_keys[h.i], moments[h.i], r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags,
               r.unregistered, r.source_id, r.queued_at, r.attempts
        FROM unnest(logouts, fates) AS h (i, fate)
        CROSS JOIN LATERAL unnest(apply_registrations.rows[of_row[h.i]:of_row[h.i]]) AS r
        WHERE h.fate = 'held';
        GET DIAGNOSTICS held = ROW_COUNT;
        waits := waits || ARRAY(SELECT of_row[h.i] FROM unnest(logouts, fates) AS h (i, fate) WHERE h.fate = 'waiting');
        SELECT coalesce(array_agg(h.i), '{}'), coalesce(array_agg(h.suppresses), '{}') INTO logouts, suppresses
        FROM unnest(logouts, fates, suppresses) AS h (i, fate, suppresses) WHERE h.fate = 'recorded';
    END IF;

    -- What the batch says about each token: the greatest instants, if its rows agree about the device, the user and the tags.
    SELECT coalesce(array_agg(g.topic_id) FILTER (WHERE g.agrees), '{}'), coalesce(array_agg(g.token_key) FILTER (WHERE g.agrees), '{}'),
           array_agg(g.moment) FILTER (WHERE g.agrees), array_agg(g.one_token) FILTER (WHERE g.agrees),
           array_agg(g.device) FILTER (WHERE g.agrees), array_agg(g.device_at) FILTER (WHERE g.agrees),
           array_agg(g.of_user) FILTER (WHERE g.agrees), array_agg(g.user_at) FILTER (WHERE g.agrees),
           array_agg(g.tags_of) FILTER (WHERE g.agrees), array_agg(g.tags_at) FILTER (WHERE g.agrees), array_agg(g.source_id) FILTER (WHERE g.agrees),
           coalesce(array_agg(g.topic_id) FILTER (WHERE NOT g.agrees), '{}'), coalesce(array_agg(g.token_key) FILTER (WHERE NOT g.agrees), '{}')
    INTO k_topic, k_key, k_moment, k_one, k_device, k_device_at, k_user, k_user_at, k_tags_of, k_tags_at, k_source, slow_topic, slow_key
    FROM (SELECT u.topic_id, u.token_key, max(u.moment) AS moment, bool_and(u.one_token) AS one_token,
                 max(u.device COLLATE "C") AS device, max(u.moment) FILTER (WHERE u.device IS NOT NULL) AS device_at,
                 max(u.of_user COLLATE "C") AS of_user, max(u.details_at) FILTER (WHERE u.of_user IS NOT NULL) AS user_at,
                 max(u.n) FILTER (WHERE u.with_tags) AS tags_of, max(u.details_at) FILTER (WHERE u.with_tags) AS tags_at,
                 CASE WHEN count(*) = count(u.source_id) AND min(u.source_id) = max(u.source_id) THEN min(u.source_id) END AS source_id,
                 coalesce(min(u.device COLLATE "C") = max(u.device COLLATE "C"), true)
                     AND coalesce(min(u.of_user COLLATE "C") = max(u.of_user COLLATE "C"), true)
                     AND count(*) FILTER (WHERE u.with_tags) <= 1 AND total > 1 AS agrees
          FROM unnest(of_row, of_topic, token_keys, moments, details_at, one_token, logs_out, devices, users, with_tags, sources)
               AS u (n, topic_id, token_key, moment, details_at, one_token, is_logout, device, of_user, with_tags, source_id)
          WHERE NOT u.is_logout AND u.topic_id IS NOT NULL
          GROUP BY 1, 2 ORDER BY 1, 2) AS g;

    -- A device_id that is a constant: a full device takes no more tokens, so register would record these without it. Row by row, as all that
    -- concerns other tokens, a file of 200,000 such rows takes minutes.
    IF EXISTS (SELECT FROM tokenkeeper.crowded_device AS c WHERE c.tokens >= 1000 AND c.counted_at > receipt - interval '1 hour') THEN
        -- They count as named all the same, so that status goes on warning.
        PERFORM tokenkeeper.note_crowded(c.topic_id, c.device_id, false)
        FROM (SELECT DISTINCT u.topic_id, u.device COLLATE "C" AS device FROM unnest(k_topic, k_device, k_one) AS u (topic_id, device, one_token)
              WHERE u.one_token) AS d
        JOIN tokenkeeper.crowded_device AS c ON c.topic_id = d.topic_id AND c.device_id = d.device;
        SELECT array_agg(CASE WHEN NOT f.joins_full THEN u.device END ORDER BY u.n), array_agg(CASE WHEN NOT f.joins_full THEN u.device_at END ORDER BY u.n)
        INTO k_device, k_device_at
        FROM unnest(k_topic, k_key, k_one, k_device, k_device_at) WITH ORDINALITY AS u (topic_id, token_key, one_token, device, device_at, n)
        CROSS JOIN LATERAL (
            SELECT coalesce(u.one_token AND u.device <> '' AND (
                SELECT c.tokens >= 1000 AND c.counted_at > receipt - interval '1 hour' FROM tokenkeeper.crowded_device AS c
                WHERE c.topic_id = u.topic_id AND c.device_id = u.device COLLATE "C")
                AND coalesce((SELECT l.device_id IS DISTINCT FROM u.device COLLATE "C" FROM tokenkeeper.ledger AS l
                              WHERE l.topic_id = u.topic_id AND l.token_key = u.token_key), true), false) AS joins_full OFFSET 0) AS f;
    END IF;

    -- From here on, an application may wait for this transaction. Whatever deadlock_timeout is, there is time to apply something.
    IF isfinite(patience) THEN
        patience := clock_timestamp() + greatest(current_setting('deadlock_timeout')::interval / 2 - interval '10 ms', interval '20 ms');
    END IF;
    IF k_key <> '{}' THEN
        SELECT r.unknown, r.dependent, r.busy INTO unknown, dependents, busy
        FROM tokenkeeper.register_known_tokens(
            apply_registrations.rows, k_topic, k_key, k_moment, k_device, k_device_at, k_user, k_user_at, k_tags_of, k_tags_at, k_source, receipt) AS r;
        IF unknown <> '{}' THEN
            SELECT dependents || ARRAY(SELECT unknown[p] FROM unnest(a.dependent) AS p), busy || ARRAY(SELECT unknown[p] FROM unnest(a.waiting) AS p)
            INTO dependents, busy
            FROM (SELECT array_agg(k_topic[p]) AS of_topic, array_agg(k_key[p]) AS token_keys, array_agg(k_moment[p]) AS moments,
                         array_agg(k_one[p]) AS one_token, array_agg(k_device[p]) AS devices, array_agg(k_device_at[p]) AS device_at,
                         array_agg(k_user[p]) AS users, array_agg(k_user_at[p]) AS user_at, array_agg(k_tags_of[p]) AS tags_of,
                         array_agg(k_tags_at[p]) AS tags_at, array_agg(k_source[p]) AS sources
                  FROM unnest(unknown) AS p) AS w
            CROSS JOIN LATERAL tokenkeeper.add_tokens(
                apply_registrations.rows, w.of_topic, w.token_keys, w.moments, false, w.one_token, w.devices, w.device_at, w.users, w.user_at,
                w.tags_of, w.tags_at, w.sources, receipt, patience) AS a;
        END IF;
        slow_topic := slow_topic || ARRAY(SELECT k_topic[p] FROM unnest(dependents) AS p);
        slow_key := slow_key || ARRAY(SELECT k_key[p] FROM unnest(dependents) AS p);
        IF busy <> '{}' THEN
            waits := waits || ARRAY(
                SELECT u.n FROM unnest(of_row, of_topic, token_keys, logs_out) AS u (n, topic_id, token_key, is_logout)
                WHERE NOT u.is_logout AND (u.topic_id, u.token_key) IN (SELECT k_topic[b], k_key[b] FROM unnest(busy) AS b));
        END IF;
    END IF;

    -- What concerns other tokens of a device goes row by row.
    IF slow_key <> '{}' THEN
        IF isfinite(patience) THEN
            PERFORM set_config('lock_timeout', '3ms', true);
        END IF;
        FOR one IN
            SELECT u.n, u.topic_id, u.token_key, u.moment, u.details_at, u.device, u.of_user, u.source_id
            FROM unnest(of_row, of_topic, token_keys, moments, details_at, logs_out, devices, users, sources)
                 AS u (n, topic_id, token_key, moment, details_at, is_logout, device, of_user, source_id)
            WHERE NOT u.is_logout
              AND (u.topic_id, u.token_key) IN (SELECT s.topic_id, s.token_key FROM unnest(slow_topic, slow_key) AS s (topic_id, token_key))
            ORDER BY u.topic_id, u.token_key, u.moment, u.n
        LOOP
            IF is_tried AND clock_timestamp() > patience THEN
                waits := waits || one.n;
                CONTINUE;
            END IF;
            is_tried := true;
            -- A subtransaction for each, so that a row that fails releases its locks and leaves the others alone.
            BEGIN
                PERFORM tokenkeeper.register_row(one.topic_id, one.token_key, one.moment, one.device, (apply_registrations.rows[one.n]).tags, one.of_user,
                                                 one.details_at, one.source_id, receipt);
            EXCEPTION
                WHEN lock_not_available OR deadlock_detected THEN
                    waits := waits || one.n;
                WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
                    faulty := faulty || one.n;
                    faults := faults || sqlerrm;
            END;
        END LOOP;
        PERFORM set_config('lock_timeout', lock_timeout_before, true);
    END IF;

    IF logouts <> '{}' THEN
        waits := waits || tokenkeeper.unregister_tokens(
            ARRAY(SELECT of_row[i] FROM unnest(logouts) AS i), ARRAY(SELECT of_topic[i] FROM unnest(logouts) AS i),
            ARRAY(SELECT token_keys[i] FROM unnest(logouts) AS i), ARRAY(SELECT moments[i] FROM unnest(logouts) AS i),
            ARRAY(SELECT (apply_registrations.rows[of_row[i]]).queued_at FROM unnest(logouts) AS i), ARRAY(SELECT sources[i] FROM unnest(logouts) AS i),
            suppresses, receipt, patience);
    END IF;

    IF waits <> '{}' THEN
        INSERT INTO tokenkeeper.registration_retry (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at,
            partition_number, attempts, released)
        SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.queued_at, 8,
               r.attempts, r.released
        FROM unnest(waits) AS w CROSS JOIN LATERAL unnest(apply_registrations.rows[w:w]) AS r;
        GET DIAGNOSTICS waiting = ROW_COUNT;
    END IF;
    IF faulty <> '{}' THEN
        WITH refused AS MATERIALIZED (
            SELECT f.error, r.*, count(*) FILTER (WHERE r.attempts IS NULL) OVER (ORDER BY f.n) AS so_far
            FROM unnest(faulty, faults) AS f (n, error) CROSS JOIN LATERAL unnest(apply_registrations.rows[f.n:f.n]) AS r
        )
        INSERT INTO tokenkeeper.rejected_registration (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id,
            queued_at, attempts)
        SELECT r.error, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.queued_at,
               r.attempts
        FROM refused AS r WHERE r.attempts IS NOT NULL OR r.so_far <= apply_registrations.rejected_allowance;
        GET DIAGNOSTICS not_kept = ROW_COUNT;
        rejected := cardinality(faulty);
        not_kept := rejected - not_kept;
    END IF;
    applied := total - rejected - held - waiting;
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) IS
    'Applies a batch of rows that were taken out of registration, in the transaction that deletes them: with the same outcome as register and unregister, '
    'called for each. Returns how many were applied; rejected; not_kept: those of the rejected that were beyond rejected_allowance and are not in '
    'rejected_registration; held by the mass-failure guard in held_registration; waiting in registration_retry, because another session had locked what '
    'they need; and the topic_ids whose guard has tripped or reset. A batch of one row waits for locks as long as lock_timeout says; others wait for '
    'milliseconds only. '
    'Requires read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) FROM PUBLIC;
