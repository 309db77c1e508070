-- How a daemon claims requests, and records their outcome.

CREATE OR REPLACE FUNCTION tokenkeeper.claim_requests(
    environment text, topic text, daemon_id text, max_rows integer, background_per_hour integer, due_since timestamptz)
RETURNS TABLE (outcome text, request_id bigint, due_at timestamptz, token_key bytea, payload text, push_type text, priority integer,
               expiration bigint, collapse_id text, apns_id text, attempts integer, first_sent_at timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Each request is looked up separately, whatever the size of the tables was when this session planned the query.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    -- Collated here, so that the caller's collation does not matter.
    the_topic text COLLATE "C" := claim_requests.topic;
    the_environment text COLLATE "C" := claim_requests.environment;
    the_daemon text COLLATE "C" := claim_requests.daemon_id;
    of_topic tokenkeeper.topic;
    a_background integer;
BEGIN
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = the_topic AND t.environment = the_environment;
    IF EXISTS (SELECT FROM tokenkeeper.paused_topic AS h WHERE h.topic = the_topic AND h.environment = the_environment) THEN
        RETURN;
    END IF;
    a_background := nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT r.* FROM tokenkeeper.send_request AS r
        WHERE left(coalesce(r.topic, ''), 513) = the_topic AND left(coalesce(r.environment, 'production'), 20) = the_environment
          AND coalesce(r.scheduled_at, r.queued_at) BETWEEN claim_requests.due_since AND now() AND r.claimed_by IS NULL
        ORDER BY coalesce(r.scheduled_at, r.queued_at)
        LIMIT claim_requests.max_rows
        FOR UPDATE SKIP LOCKED
    ), understood AS MATERIALIZED (
        -- OFFSET: each payload is parsed once. From here on only the text of a small payload is carried along.
        SELECT d.request_id, d.environment, d.topic, d.token, d.priority, d.expiration, d.collapse_id, d.scheduled_at, d.apns_id, d.queued_at, d.interruptions,
               tokenkeeper.token_key(d.token) AS key, coalesce(d.push_type, tokenkeeper.push_type_of(p.body, d.topic)) AS kind, p.body,
               CASE WHEN pg_column_size(p.body) < 2000 THEN p.body::text END AS body_text,
               CASE WHEN p.body IS NULL AND d.payload IS NOT NULL THEN tokenkeeper.payload_fault(d.payload) END AS payload_fault,
               -- If a daemon has deferred the request, scheduled_at is not the sender's.
               CASE WHEN NOT d.deferred THEN d.scheduled_at END AS asked_for
        FROM due AS d CROSS JOIN LATERAL (SELECT tokenkeeper.parsed_payload(d.payload) AS body OFFSET 0) AS p
    ), judged AS MATERIALIZED (
        SELECT u.request_id, u.environment, u.topic, u.scheduled_at, u.apns_id, u.queued_at, u.key, u.kind, u.body_text,
               l.state, l.reason, l.invalidated_at, CASE
                   WHEN u.interruptions >= 2 THEN 'it was interrupted twice while it was being sent; it may have been delivered'
                   WHEN u.interruptions >= 1 AND u.expiration = 'epoch' THEN 'it was interrupted while it was being sent, and its expiration allows only one attempt'
                   WHEN u.key IS NULL THEN 'device token is ' || coalesce(length(u.token) || ' characters', 'missing')
                                           || ', expected 1 to 512 bytes in hex'
                   WHEN u.expiration > 'epoch' AND u.expiration <= now() AND (u.asked_for < u.expiration) IS NOT FALSE
                       THEN 'its expiration passed before it could be sent'
                   WHEN u.payload_fault IS NOT NULL THEN u.payload_fault
                   ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.body, u.kind, u.priority, u.expiration,
                                               u.collapse_id, u.asked_for, u.body_text)
               END AS fault
        FROM understood AS u
        -- LIMIT: prevents a join that would read the whole ledger.
        LEFT JOIN LATERAL (
            SELECT tokenkeeper.state_of(l) AS state, greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at) AS invalidated_at,
                   tokenkeeper.reason_of(l) AS reason
            FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic.topic_id AND l.token_key = u.key AND l.suppressed > false AND of_topic.gate IS DISTINCT FROM 'observe'
            LIMIT 1) AS l ON true
    ), limited AS MATERIALIZED (
        SELECT j.*, a_background IS NOT NULL AND j.kind = 'background' AND j.fault IS NULL AND j.state IS NULL AS is_limited FROM judged AS j
    ), ordered AS MATERIALIZED (
        -- device numbers the devices that have a limit, from 1, in the order of their keys.
        SELECT j.*, row_number() OVER (PARTITION BY j.key ORDER BY j.request_id) > 5 AS crowded,
               dense_rank() OVER (PARTITION BY j.is_limited ORDER BY j.key) AS device,
               row_number() OVER (PARTITION BY j.key, j.is_limited ORDER BY j.request_id) AS place,
               row_number() OVER (PARTITION BY j.key, j.is_limited ORDER BY j.request_id DESC) = 1 AS newest
        FROM limited AS j
    ), noted AS (
        -- Counts the background pushes before they are claimed. A claim of another daemon for the same device waits here, and b is then what
        -- that claim has written, whatever this statement's snapshot shows. In the order of keys, so that two claims never deadlock.
        INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at, room)
        SELECT the_environment, the_topic, o.key,
               array_fill(now(), ARRAY[least(count(*) FILTER (WHERE NOT o.crowded), a_background)::integer]), now(), a_background
        FROM ordered AS o WHERE o.is_limited GROUP BY o.key ORDER BY o.key
        ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
        SET (sent_at, latest_at, room) = (
            SELECT r.sent_at || excluded.sent_at[1:r.room], excluded.latest_at, r.room
            FROM (SELECT a.sent_at, greatest(a_background - cardinality(a.sent_at), 0) AS room
                  FROM (SELECT ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') AS sent_at) AS a) AS r)
        RETURNING b.token_key, b.room, coalesce((SELECT min(a) FROM unnest(b.sent_at) AS a), now()) AS earliest
    ), rooms AS MATERIALIZED (
        -- Arrays by device, because a join would be a nested loop.
        SELECT array_agg(n.room ORDER BY n.token_key) AS room, array_agg(n.earliest ORDER BY n.token_key) AS earliest FROM noted AS n
    ), shared AS MATERIALIZED (
        -- A device's oldest background pushes are sent, up to its share. Of the excess, only the newest is kept, and it is delayed.
        SELECT o.*, o.is_limited AND o.place > r.room[o.device] AS too_many, CASE WHEN o.is_limited THEN r.earliest[o.device] END AS earliest
        FROM ordered AS o CROSS JOIN rooms AS r
    ), fated AS MATERIALIZED (
        SELECT o.*, CASE WHEN o.fault IS NOT NULL THEN 'failed'
                         WHEN o.state IS NOT NULL OR (o.too_many AND NOT o.newest) THEN 'suppressed'
                         WHEN o.too_many THEN 'postponed'
                         -- A few requests per token are claimed at a time, so that one token with many does not keep the others out.
                         WHEN o.crowded THEN 'behind'
                         ELSE 'claimed' END AS fate
        FROM shared AS o
    ), overtaken AS (
        -- OFFSET: device by device, through the index, however many are postponed.
        DELETE FROM tokenkeeper.send_request AS r
        WHERE r.request_id = ANY (ARRAY(
            SELECT o.request_id FROM fated AS f CROSS JOIN LATERAL (
                SELECT p.request_id FROM tokenkeeper.send_request AS p
                WHERE p.postponed AND tokenkeeper.token_key(p.token) = f.key AND p.topic = f.topic
                  AND coalesce(p.environment, 'production') = the_environment AND p.claimed_by IS NULL AND p.request_id < f.request_id
                -- Another claim may hold it, and wait for this one's devices.
                OFFSET 0 FOR UPDATE SKIP LOCKED) AS o
            WHERE f.fate = 'postponed' AND o.request_id NOT IN (SELECT d.request_id FROM due AS d)))
        RETURNING r.*, tokenkeeper.token_key(r.token) AS key
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, request_id, queued_at)
        SELECT the_environment, f.topic, encode(f.key, 'hex'), f.key, coalesce(f.state, 'background'),
               CASE WHEN f.state IS NULL THEN 'a newer background push waits' ELSE f.reason END, f.invalidated_at, f.kind, f.apns_id, f.request_id, f.queued_at
        FROM fated AS f WHERE f.fate = 'suppressed'
        UNION ALL
        SELECT the_environment, o.topic, encode(o.key, 'hex'), o.key, 'background', 'a newer background push waits', NULL,
               'background', o.apns_id, o.request_id, o.queued_at
        FROM overtaken AS o
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING fated AS f WHERE f.fate IN ('suppressed', 'failed') AND r.request_id = f.request_id
        RETURNING r.*, f.fault, f.fate
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts)
        SELECT g.fault, g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration, g.collapse_id, g.apns_id,
               g.request_id, g.queued_at, g.attempts
        FROM gone AS g WHERE g.fate = 'failed'
    ), postponed AS (
        UPDATE tokenkeeper.send_request AS r
        SET postponed = true, deferred = true, scheduled_at = f.earliest + interval '1 hour'
        FROM fated AS f WHERE f.fate = 'postponed' AND r.request_id = f.request_id
    ), behind AS (
        UPDATE tokenkeeper.send_request AS r SET deferred = true, scheduled_at = now() + interval '1 second'
        FROM fated AS f WHERE f.fate = 'behind' AND r.request_id = f.request_id
    ), claimed AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = the_daemon, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid())
        FROM fated AS f WHERE f.fate = 'claimed' AND r.request_id = f.request_id
        RETURNING r.request_id, coalesce(f.scheduled_at, f.queued_at) AS due_at, f.key, coalesce(f.body_text, r.payload::jsonb::text) AS payload, f.kind,
                  CASE f.kind WHEN 'background' THEN 5 ELSE r.priority END AS priority, floor(extract(epoch FROM r.expiration))::bigint AS expiration,
                  r.collapse_id, r.apns_id::text AS apns_id, r.attempts, r.first_sent_at
    )
    SELECT 'claimed', c.* FROM claimed AS c
    UNION ALL
    SELECT CASE WHEN f.fate IN ('postponed', 'behind') THEN 'delayed' ELSE f.fate END, f.request_id, coalesce(f.scheduled_at, f.queued_at),
           NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM fated AS f WHERE f.fate <> 'claimed'
    UNION ALL
    SELECT 'overtaken', o.request_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM overtaken AS o;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) IS
    'Claims requests of a topic that are due since due_since, the oldest first, and asks the gate in the same statement. Returns one row per request: '
    'claimed, with what is to be sent; suppressed (moved to suppressed_send, because the gate refuses the token); failed (moved to failed_send, because '
    'it cannot be sent); delayed (too many for one token, or beyond its device''s share of background pushes); or overtaken: a postponed background push '
    'that was not due, moved to suppressed_send because a newer one waits. Only claimed rows have values beyond due_at, and overtaken rows have no due_at.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.finish_requests(
    daemon_id text, request_ids bigint[], fates text[], statuses integer[], bodies text[], apns_ids text[], sent_ats timestamptz[],
    pauses bigint[], errors text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := finish_requests.daemon_id;
    unknown text := (SELECT f.fate FROM unnest(finish_requests.fates COLLATE "C") AS f (fate)
                     WHERE f.fate IN ('answered', 'failed', 'later', 'interrupted', 'returned') IS NOT TRUE LIMIT 1);
    ended bigint;
BEGIN
    IF unknown IS NOT NULL OR array_position(finish_requests.fates, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'a fate is %, expected answered, failed, later, interrupted or returned', coalesce(quote_literal(left(unknown, 20)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH told AS MATERIALIZED (
        SELECT t.request_id, t.fate COLLATE "C" AS fate, t.status, t.body, t.apns_id, t.sent_at, t.pause, t.error
        FROM unnest(finish_requests.request_ids, finish_requests.fates, finish_requests.statuses, finish_requests.bodies,
                               finish_requests.apns_ids, finish_requests.sent_ats, finish_requests.pauses, finish_requests.errors)
            AS t (request_id, fate, status, body, apns_id, sent_at, pause, error)
    ), gone AS (
        -- IS TRUE: do not use the index on claimed_by, which has all requests of this daemon under one key.
        DELETE FROM tokenkeeper.send_request AS r USING told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND t.fate IN ('answered', 'failed')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at, t.error
    ), kept AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = NULL, attempts = r.attempts + CASE t.fate WHEN 'returned' THEN 0 ELSE 1 END,
            interruptions = r.interruptions + CASE t.fate WHEN 'interrupted' THEN 1 ELSE 0 END, last_error = coalesce(t.error, r.last_error),
            first_sent_at = CASE WHEN t.fate = 'returned' AND r.attempts = 0 AND r.interruptions = 0 THEN NULL ELSE r.first_sent_at END,
            scheduled_at = CASE WHEN t.pause IS NULL THEN r.scheduled_at ELSE clock_timestamp() + t.pause * interval '1 microsecond' END,
            deferred = r.deferred OR t.pause IS NOT NULL
        FROM told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND t.fate IN ('later', 'interrupted', 'returned')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at
    ), uncounted AS (
        -- What did not reach its device does not count in its share for this hour. The latest instants go, even if another daemon has claimed
        -- a push in between: they differ by no more than the time for which this daemon had the request.
        UPDATE tokenkeeper.background_send AS b
        SET sent_at = b.sent_at[1:cardinality(b.sent_at) - u.requests]
        FROM (
            -- Locked in the order of keys, as in a claim.
            SELECT l.topic, l.environment, l.token_key, n.requests
            FROM (SELECT k.topic, coalesce(k.environment, 'production') AS environment, tokenkeeper.token_key(k.token) AS key, count(*)::integer AS requests
                  FROM kept AS k
                  WHERE k.fate IN ('later', 'returned')
                    AND coalesce(k.push_type, tokenkeeper.push_type_of(tokenkeeper.parsed_payload(k.payload), k.topic)) = 'background'
                  GROUP BY 1, 2, 3 ORDER BY 1, 2, 3) AS n
            CROSS JOIN LATERAL (
                SELECT d.topic, d.environment, d.token_key FROM tokenkeeper.background_send AS d
                WHERE d.topic = n.topic AND d.environment = n.environment AND d.token_key = n.key FOR UPDATE) AS l
            OFFSET 0) AS u
        WHERE b.topic = u.topic AND b.environment = u.environment AND b.token_key = u.token_key
    ), answered AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
        SELECT coalesce(e.environment, 'production'), e.topic, e.token, e.status, e.body, coalesce(e.answered_id, e.apns_id::text), e.sent_at
        FROM (SELECT g.environment, g.topic, g.token, g.status, g.body, g.answered_id, g.apns_id, g.sent_at FROM gone AS g
              UNION ALL
              SELECT k.environment, k.topic, k.token, k.status, k.body, k.answered_id, k.apns_id, k.sent_at FROM kept AS k) AS e
        WHERE e.status IS NOT NULL
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, status, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts)
        SELECT coalesce(g.error, 'failed'), g.status, g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration,
               g.collapse_id, g.apns_id, g.request_id, g.queued_at, g.attempts
        FROM gone AS g WHERE g.fate = 'failed'
    )
    SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept) INTO ended;
    RETURN ended;
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[]) IS
    'Records the outcome of requests that this daemon has claimed: answered (APNs responded for good), failed, later (retry after the pause, in '
    'microseconds), interrupted (no response: retry once) or returned (not sent). Responses of APNs go into send_result. Returns how many of the requests '
    'the daemon still had. Raises 22023 for any other word.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.finish_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_failed(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    requests bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running: it would find a request that moves in neither table.
    WITH gone AS (
        DELETE FROM tokenkeeper.failed_send AS f
        WHERE requeue_failed.ids IS NULL OR f.failed_id = ANY (requeue_failed.ids) RETURNING f.*
    )
    INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id, queued_at)
    SELECT g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration, g.collapse_id, g.apns_id, g.queued_at FROM gone AS g;
    GET DIAGNOSTICS requests = ROW_COUNT;
    IF requests > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('failed_requeued', requests);
    END IF;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_failed(bigint[]) IS
    'Puts failed requests back into the outbox with their apns_id, by failed_id or all of them; returns how many.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_failed(bigint[]) FROM PUBLIC;
