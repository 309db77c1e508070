-- How a daemon applies a batch of queued registrations. The outcome is that of calling register and unregister for each row. Of a
-- logout, only environment, topic, token and instant count.
--
-- Locks: a new topic waits 10 ms. Then the tokens of registrations, then those of logouts, each as merge_batch does; then free tokens of their devices. A batch of
-- one row waits as long as lock_timeout says. Rows that it could not apply go to registration_retry.

CREATE OR REPLACE FUNCTION tokenkeeper.read_registrations(
    rows tokenkeeper.registration[], receipt timestamptz, OUT reports tokenkeeper.token_report[], OUT without_topic integer[], OUT faulty integer[],
    OUT faults text[], OUT amended integer[], OUT amendments text[], OUT checks tokenkeeper.device_check[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    WITH reported AS MATERIALIZED (
        SELECT r.*, CASE WHEN r.hex IS NULL THEN tokenkeeper.token_fault(r.token)
                         -- A dump of an attached table from elsewhere has brought its triggers.
                         WHEN r.logs_out AND r.source_id IS NOT NULL AND r.kind IS NULL THEN 'source_id is ' || r.source_id || ', which this database does not know'
                         WHEN isfinite(r.registered_at) IS FALSE THEN tokenkeeper.registration_fault(r.registered_at, NULL, NULL, NULL) END AS row_fault,
               -- Empty tags are none, and no word is lost about them.
               CASE WHEN NOT r.logs_out AND NOT r.is_sound THEN tokenkeeper.registration_fault(
                   NULL, r.device_id, r.user_id, CASE WHEN array_ndims(r.tags) > 1 THEN r.tags ELSE array_remove(array_remove(r.tags, NULL), '') END) END AS amendment,
               CASE WHEN r.topic_id IS NULL THEN coalesce(tokenkeeper.environment_fault(r.environment), tokenkeeper.topic_fault(r.topic)) END AS topic_fault
        FROM (
            SELECT u.n::integer AS n, u.topic, coalesce(u.environment, 'production') AS environment, u.token, u.registered_at,
                   tokenkeeper.parse_token(u.token) AS hex, u.unregistered IS TRUE AS logs_out, tokenkeeper.device_name(u.device_id) AS device_id, u.user_id, u.tags,
                   u.source_id, u.returned, u.released, u.row_key,
                   tokenkeeper.is_sound_registration(NULL, u.device_id, u.user_id, u.tags) AS is_sound, o.kind, o.started_at, o.as_of,
                   -- A logout that is taken back need not say when the device registered.
                   CASE WHEN u.returned IS NOT TRUE OR u.registered_at IS NOT NULL THEN least(u.registered_at, u.queued_at, receipt) END AS moment,
                   -- What is written to an attached table counts from the write: somebody may edit it long after the device registered.
                   -- What a check has found, from its beginning; and a complete list, from when it was true.
                   least(CASE WHEN o.kind = 'repair' THEN o.started_at WHEN o.as_of IS NOT NULL THEN o.as_of WHEN o.kind IS DISTINCT FROM 'attachment' THEN u.registered_at END,
                         u.queued_at, receipt) AS details_at, least(u.queued_at, receipt) AS received_at, (
                       SELECT t.topic_id FROM tokenkeeper.topic AS t
                       WHERE t.topic = u.topic AND t.environment = coalesce(u.environment, 'production')) AS topic_id
            FROM unnest(read_registrations.rows) WITH ORDINALITY AS u (environment, topic, token, registered_at, device_id, user_id, tags,
                unregistered, source_id, returned, row_key, queued_at, partition_number, attempts, released, n)
            LEFT JOIN LATERAL (
                SELECT s.kind, s.started_at, s.as_of FROM tokenkeeper.registration_source AS s WHERE s.source_id = u.source_id OFFSET 0) AS o ON u.source_id IS NOT NULL
            WHERE u.attempts IS DISTINCT FROM -1
            -- So that what is used twice is computed once.
            OFFSET 0) AS r
    )
    SELECT array_agg(CASE WHEN s.logs_out
                          THEN tokenkeeper.invalidation_of(s.n, s.topic_id, decode(s.hex, 'hex'), 'unregistered_by_app', s.moment, NULL, s.received_at,
                                                           s.released, s.source_id)
                          ELSE tokenkeeper.registration_of(s.n, s.topic_id, decode(s.hex, 'hex'), tokenkeeper.has_one_token_per_device(s.topic), s.moment,
                                                           CASE WHEN s.is_sound THEN s.device_id ELSE tokenkeeper.sound_name(s.device_id) END,
                                                           CASE WHEN s.is_sound THEN s.user_id ELSE tokenkeeper.sound_name(s.user_id) END,
                                                           CASE WHEN s.is_sound THEN s.tags ELSE tokenkeeper.sound_tags(s.tags) END, s.details_at, CASE WHEN s.returned THEN CASE s.kind WHEN 'repair' THEN s.started_at ELSE least(s.as_of, s.received_at) END END,
                                                           s.received_at, s.source_id) END
                     -- In key order, so that few pages are visited, and of a token in one order.
                     ORDER BY s.topic_id, s.hex, s.n) FILTER (WHERE f.fault IS NULL AND s.topic_id IS NOT NULL),
           array_agg(s.n) FILTER (WHERE f.fault IS NULL AND s.topic_id IS NULL),
           array_agg(s.n ORDER BY s.n) FILTER (WHERE f.fault IS NOT NULL), array_agg(f.fault ORDER BY s.n) FILTER (WHERE f.fault IS NOT NULL),
           array_agg(s.n ORDER BY s.n) FILTER (WHERE f.fault IS NULL AND s.amendment IS NOT NULL),
           array_agg(s.amendment ORDER BY s.n) FILTER (WHERE f.fault IS NULL AND s.amendment IS NOT NULL)
    INTO reports, without_topic, faulty, faults, amended, amendments
    FROM reported AS s CROSS JOIN LATERAL (SELECT coalesce(s.row_fault, s.topic_fault) AS fault) AS f;
    -- See requeue_devices.
    checks := ARRAY(
        SELECT ROW(t.topic_id, r.device_id, NULL, false)::tokenkeeper.device_check
        FROM unnest(read_registrations.rows) AS r JOIN tokenkeeper.topic AS t ON t.topic = r.topic AND t.environment = r.environment
        WHERE r.attempts = -1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_registrations(tokenkeeper.registration[], timestamptz) IS
    'Internal: reads rows of the queue. Returns what each says, in key order; the positions of those with a new topic; the positions and reasons of those '
    'that are not understood, and of those that count without a device, user or tag; and the devices that rows of requeue_devices name.';

CREATE OR REPLACE FUNCTION tokenkeeper.apply_logouts(
    rows tokenkeeper.registration[], logouts tokenkeeper.token_report[], receipt timestamptz, give_up_at timestamptz, guard_allowance bigint,
    guard_max_share numeric, OUT busy integer[], OUT held bigint, OUT changes tokenkeeper.guard_change[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    judged record;
    merged record;
BEGIN
    SELECT * INTO judged FROM tokenkeeper.judge(logouts, guard_allowance, guard_max_share);
    INSERT INTO tokenkeeper.held_registration (topic_id, token_key, invalidated_at, environment, topic, token, registered_at, device_id, user_id, tags,
        unregistered, source_id, queued_at, attempts)
    SELECT h.topic_id, h.token_key, h.invalidated_at, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered,
           r.source_id, r.queued_at, r.attempts
    FROM unnest(judged.held) AS h CROSS JOIN LATERAL unnest(rows[h.n:h.n]) AS r;
    GET DIAGNOSTICS held = ROW_COUNT;
    SELECT * INTO merged FROM tokenkeeper.merge_reports(judged.counting, receipt, true, give_up_at);
    PERFORM tokenkeeper.keep_receipts(tokenkeeper.without(judged.counting, merged.busy), merged.turned);
    busy := merged.busy;
    changes := judged.changes;
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_logouts(
    tokenkeeper.registration[], tokenkeeper.token_report[], timestamptz, timestamptz, bigint, numeric) IS
    'Internal: records the logouts among the rows that the guard lets through. Returns the positions of those whose token another session has locked or is '
    'adding; how many are held now, in held_registration; and the guards that tripped or reset.';

CREATE OR REPLACE FUNCTION tokenkeeper.reject_registrations(
    rows tokenkeeper.registration[], faulty integer[], faults text[], allowance bigint, OUT rejected bigint, OUT kept bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    WITH refused AS MATERIALIZED (
        -- A key may be the token.
        SELECT f.n, f.error || coalesce('; row ' || quote_literal(regexp_replace(left(r.row_key, 200), '([0-9A-Fa-f]{8})[0-9A-Fa-f]{8,}', chr(92) || '1...', 'g'))
                                        || ' of ' || s.name, '') AS error, r.*, s.attachment,
               row_number() OVER (PARTITION BY s.attachment, r.environment, r.topic, r.token ORDER BY f.n) AS occurrence
        FROM unnest(faulty, faults) AS f (n, error)
        CROSS JOIN LATERAL unnest(rows[f.n:f.n]) AS r
        LEFT JOIN LATERAL (
            SELECT coalesce(o.attachment, o.source_id) AS attachment, o.name FROM tokenkeeper.registration_source AS o
            WHERE o.source_id = r.source_id AND o.kind <> 'import') AS s ON true
    ), new AS MATERIALIZED (
        -- A table has a row that cannot be understood until somebody corrects it, and each write and backfill reports it again.
        SELECT r.*, count(*) FILTER (WHERE r.attempts IS NULL) OVER (PARTITION BY r.attachment ORDER BY r.n) AS so_far
        FROM refused AS r
        WHERE r.attachment IS NULL OR (r.occurrence = 1 AND NOT EXISTS (
            SELECT FROM tokenkeeper.rejected_registration AS k
            WHERE k.attachment = r.attachment AND md5(k.token) COLLATE "C" = md5(r.token) AND k.token = r.token
              AND (k.topic, k.environment) IS NOT DISTINCT FROM (r.topic, r.environment)))
    ), room AS (
        SELECT a.attachment, 10000 - (SELECT count(*) FROM (SELECT FROM tokenkeeper.rejected_registration AS k
                                                            WHERE k.attachment = a.attachment LIMIT 10000) AS k) AS rows
        FROM (SELECT DISTINCT n.attachment FROM new AS n WHERE n.attachment IS NOT NULL) AS a
    ), stored AS (
        INSERT INTO tokenkeeper.rejected_registration (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id,
            returned, row_key, attachment, queued_at, attempts)
        SELECT r.error, r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned,
               r.row_key, r.attachment, r.queued_at,
               -- Zero and not null: the rows of a table leave the hour's limit to others.
               CASE WHEN r.attachment IS NOT NULL THEN coalesce(r.attempts, 0) ELSE r.attempts END
        FROM new AS r LEFT JOIN room AS m USING (attachment)
        WHERE r.attempts IS NOT NULL OR r.so_far <= coalesce(m.rows, reject_registrations.allowance) RETURNING 1
    )
    SELECT (SELECT count(*) FROM new), (SELECT count(*) FROM stored) INTO rejected, kept;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reject_registrations(tokenkeeper.registration[], integer[], text[], bigint) IS
    'Internal: keeps these rows in rejected_registration: up to the allowance, 10,000 of each attached table, and all that were requeued. Passes over what '
    'an attached table reported before with the same token, if it is kept there. Returns how many others there are, and how many of them it kept.';

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
    OUT changes tokenkeeper.guard_change[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    total integer := coalesce(cardinality(apply_registrations.rows), 0);
    receipt timestamptz := clock_timestamp();
    -- A single row may wait for its lock as long as lock_timeout says: it holds nothing that others may wait for.
    give_up_at timestamptz := 'infinity';
    reported record;
    logouts tokenkeeper.token_report[];
    logged_out record;
    busy integer[];
    checks tokenkeeper.device_check[];
    waits integer[];
    again integer;
    erasures bigint[] := tokenkeeper.known_erasures();
BEGIN
    rows := tokenkeeper.set_moved_aside(tokenkeeper.not_forgotten(rows));
    SELECT * INTO reported FROM tokenkeeper.read_registrations(apply_registrations.rows, receipt);
    IF reported.without_topic IS NOT NULL THEN
        PERFORM tokenkeeper.ensure_topics(array_agg(t.environment), array_agg(t.topic), CASE WHEN total > 1 THEN interval '10 ms' END)
        FROM (SELECT DISTINCT coalesce(rows[n].environment, 'production') AS environment, rows[n].topic AS topic
              FROM unnest(reported.without_topic) AS n) AS t;
        SELECT * INTO reported FROM tokenkeeper.read_registrations(apply_registrations.rows, receipt);
    END IF;
    waits := reported.without_topic;
    held := 0;

    -- From here on, an application may wait for this transaction.
    IF total > 1 THEN
        give_up_at := tokenkeeper.patience_ends();
    END IF;
    SELECT m.busy, m.checks INTO busy, checks FROM tokenkeeper.merge_reports(
        ARRAY(SELECT r FROM unnest(reported.reports) AS r WHERE r.cause IS NULL), receipt, false, give_up_at) AS m;
    waits := waits || busy;
    logouts := ARRAY(SELECT r FROM unnest(reported.reports) AS r WHERE r.cause IS NOT NULL);
    IF logouts <> '{}' THEN
        SELECT * INTO logged_out FROM tokenkeeper.apply_logouts(
            apply_registrations.rows, logouts, receipt, give_up_at, apply_registrations.guard_allowance, apply_registrations.guard_max_share);
        waits := waits || logged_out.busy;
        held := logged_out.held;
        changes := logged_out.changes;
    END IF;
    again := tokenkeeper.resolve_devices(reported.checks || checks, receipt);

    INSERT INTO tokenkeeper.registration_retry (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, returned,
        row_key, queued_at, partition_number, attempts, released)
    SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned, r.row_key,
           r.queued_at, 8, r.attempts, r.released
    FROM unnest(waits) AS w CROSS JOIN LATERAL unnest(apply_registrations.rows[w:w]) AS r;
    IF reported.amended IS NOT NULL THEN
        INSERT INTO tokenkeeper.amended_registration (hour, source_id, registrations, example)
        SELECT tokenkeeper.hour_of(receipt), r.source_id, count(*), min(a.fault || coalesce('; row ' || quote_literal(left(r.row_key, 8)), ''))
        FROM unnest(reported.amended, reported.amendments) AS a (n, fault) CROSS JOIN LATERAL unnest(rows[a.n:a.n]) AS r
        WHERE (a.n = ANY (waits)) IS NOT TRUE GROUP BY r.source_id;
    END IF;
    waiting := coalesce(cardinality(waits), 0) + least(again, cardinality(reported.checks));
    rejected := 0;
    not_kept := 0;
    IF reported.faulty IS NOT NULL THEN
        SELECT r.rejected, r.rejected - r.kept INTO rejected, not_kept FROM tokenkeeper.reject_registrations(
            apply_registrations.rows, reported.faulty, reported.faults, apply_registrations.rejected_allowance) AS r;
    END IF;
    applied := total - rejected - held - waiting;
    PERFORM tokenkeeper.erase_since(erasures);
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) IS
    'Applies rows taken out of registration, in the transaction that deletes them, with the outcome of register and unregister. Returns how many were '
    'applied (or passed over, because their attachment was rejected with the same token before), rejected, not_kept (rejected beyond rejected_allowance), '
    'held by the guard, and waiting in registration_retry for locks of other sessions; and the guards that tripped or reset. A batch of one row waits for '
    'its lock as long as lock_timeout says, others for milliseconds. Requires READ COMMITTED.';
