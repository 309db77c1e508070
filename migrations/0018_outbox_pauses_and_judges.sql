-- oldest daemon: 0.1.0
--
-- The outbox judges more, and refuses in words.
-- payload is json. jsonb refuses some JSON texts (the escape of U+0000, half of a surrogate pair) before any of our code runs, so that one such payload failed
--   the whole INSERT of a sender. Now the claim judges, and that request alone ends in failed_send.
-- expiration must be later than not_before.
-- Every function of the outbox pins its collation: a caller's column decides nothing about how texts compare.

ALTER TABLE tokenkeeper.send_request ALTER COLUMN payload TYPE json USING payload::json;
COMMENT ON COLUMN tokenkeeper.send_request.payload IS
    'A JSON object: at most 4096 bytes (5120 for VoIP) as it is sent, without blanks between its parts. The claim judges it.';
ALTER TABLE tokenkeeper.send_request ADD COLUMN deferred boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN tokenkeeper.send_request.deferred IS 'Internal: a daemon has set not_before, to send the request later than it was asked to.';
ALTER TABLE tokenkeeper.failed_send ALTER COLUMN payload TYPE json USING payload::json;

-- For the warning of status: 410s that are not from APNs are found without reading the other counts.
CREATE INDEX result_count_doubtful_410 ON tokenkeeper.result_count (hour) WHERE status = 410 AND reason LIKE '410 with%';
COMMENT ON INDEX tokenkeeper.result_count_doubtful_410 IS 'The counts of 410s that are not from APNs, by hour.';

-- What a request must be -------------------------------------------------------------------------------------------

-- Without a search path of its own, which would double the cost: those who call it have one.
CREATE FUNCTION tokenkeeper.parsed_payload(payload json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
    -- The longest payload that can be sent has 5120 bytes, each written as an escape of six at most.
    IF octet_length(parsed_payload.payload::text) > 65536 THEN
        RETURN NULL;
    END IF;
    RETURN parsed_payload.payload::jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded OR out_of_memory THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.parsed_payload(json) IS 'A payload as jsonb; null where PostgreSQL cannot make one: see payload_fault.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.parsed_payload(json) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.payload_fault(payload json) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF octet_length(payload_fault.payload::text) > 65536 THEN
        RETURN 'payload is ' || octet_length(payload_fault.payload::text)::text || ' bytes long as written, expected at most 65536';
    END IF;
    PERFORM payload_fault.payload::jsonb;
    RETURN NULL;
EXCEPTION
    WHEN numeric_value_out_of_range THEN
        RETURN 'payload has a number that is too large or too precise';
    WHEN data_exception THEN
        RETURN 'payload has an escape that is no character: of U+0000, of half a surrogate pair, or of one that the database''s encoding lacks';
    WHEN program_limit_exceeded OR out_of_memory THEN
        RETURN 'payload is too long or nested too deeply';
END
$$;
COMMENT ON FUNCTION tokenkeeper.payload_fault(json) IS 'Why parsed_payload makes nothing of a payload: found and expected, in words; null where it does.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.payload_fault(json) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.push_type_of(payload jsonb, topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN topic COLLATE "C" LIKE '%.voip' THEN 'voip'
    WHEN topic COLLATE "C" LIKE '%.complication' THEN 'complication'
    WHEN topic COLLATE "C" LIKE '%.pushkit.fileprovider' THEN 'fileprovider'
    WHEN topic COLLATE "C" LIKE '%.push-type.liveactivity' THEN 'liveactivity'
    WHEN topic COLLATE "C" LIKE '%.push-type.widgets' THEN 'widgets'
    WHEN topic COLLATE "C" LIKE '%.push-type.controls' THEN 'controls'
    WHEN topic COLLATE "C" LIKE '%.location-query' THEN 'location'
    WHEN topic COLLATE "C" LIKE '%.voip-ptt' THEN 'pushtotalk'
    WHEN payload ? 'mdm' THEN 'mdm'
    WHEN tokenkeeper.is_silent(payload) THEN 'background'
    ELSE 'alert'
END;

DROP FUNCTION tokenkeeper.enqueue(jsonb, text, text, text[], text, integer, timestamptz, text, timestamptz, text, boolean);
DROP FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text);

CREATE FUNCTION tokenkeeper.send_fault(
    environment text, topic text, payload jsonb, push_type text, priority integer, expiration timestamptz, collapse_id text,
    not_before timestamptz, payload_text text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
    WHEN environment COLLATE "C" NOT IN ('production', 'sandbox')
        THEN 'environment is ' || quote_literal(left(environment, 20)) || ', expected ''production'' or ''sandbox'''
    WHEN coalesce(topic, '') COLLATE "C" = '' THEN 'topic is missing, expected the apns-topic header'
    WHEN octet_length(topic) > 512 OR topic COLLATE "C" ~ '[^!-~]' THEN 'topic has blanks, or characters that no header can carry, or is over 512 bytes long'
    WHEN payload IS NULL THEN 'payload is missing, expected a JSON object'
    WHEN jsonb_typeof(payload) <> 'object' THEN 'payload is a JSON ' || jsonb_typeof(payload) || ', expected an object'
    WHEN push_type COLLATE "C" NOT IN ('alert', 'background', 'voip', 'complication', 'fileprovider', 'mdm', 'liveactivity', 'location', 'pushtotalk',
                           'widgets', 'controls')
        THEN 'push_type is ' || quote_literal(left(push_type, 20)) || ', expected alert, background, voip, complication, fileprovider, '
             || 'mdm, liveactivity, location, pushtotalk, widgets or controls'
    WHEN push_type COLLATE "C" = 'background' AND NOT tokenkeeper.is_silent(payload)
        THEN 'push_type is background, expected a payload with content-available 1 and no alert, sound or badge'
    WHEN push_type COLLATE "C" = 'alert' AND tokenkeeper.is_silent(payload)
        THEN 'push_type is alert, expected background: the payload has content-available 1 and no alert, sound or badge'
    WHEN push_type COLLATE "C" = 'background' AND priority <> 5 THEN 'priority is ' || priority::text || ', expected 5 for a background push'
    WHEN priority NOT IN (10, 5, 1) THEN 'priority is ' || priority::text || ', expected 10, 5 or 1'
    WHEN NOT isfinite(expiration) OR expiration < 'epoch'
        THEN 'expiration is ' || CASE WHEN isfinite(expiration) THEN 'before 1970' ELSE 'infinite' END || ', expected a finite instant, or null'
    WHEN expiration > 'epoch' AND expiration <= not_before
        THEN 'expiration is not later than not_before: the request would expire before it may be sent'
    WHEN octet_length(collapse_id) NOT BETWEEN 1 AND 64
        THEN 'collapse_id is ' || octet_length(collapse_id)::text || ' bytes long, expected 1 to 64'
    WHEN collapse_id COLLATE "C" ~ '[^ -~]|^ | $' THEN 'collapse_id has characters that no header can carry'
    -- A lower bound: separators inside strings are removed too. The exact length is known when it is sent.
    WHEN CASE WHEN payload_text IS NOT NULL THEN octet_length(replace(replace(payload_text COLLATE "C", ': ', ':'), ', ', ','))
              ELSE tokenkeeper.payload_length(payload) END > CASE push_type COLLATE "C" WHEN 'voip' THEN 5120 ELSE 4096 END
        THEN 'payload is over ' || CASE push_type COLLATE "C" WHEN 'voip' THEN '5120' ELSE '4096' END || ' bytes long'
END;
COMMENT ON FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text, timestamptz, text) IS
    'What APNs would refuse a request for, whatever its token: found and expected, in words; null when nothing. The push type is given. '
    'not_before is that of the sender; null where a daemon has set another one. payload_text is the payload''s text where it is known, else null.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text, timestamptz, text) FROM PUBLIC;

-- What senders call ------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.enqueue(
    payload json,
    topic text,
    environment text DEFAULT 'production',
    tags text[] DEFAULT NULL,
    push_type text DEFAULT NULL,
    priority integer DEFAULT NULL,
    expiration timestamptz DEFAULT NULL,
    collapse_id text DEFAULT NULL,
    not_before timestamptz DEFAULT NULL,
    device_id text DEFAULT NULL,
    everyone boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    env text COLLATE "C" := coalesce(enqueue.environment, 'production');
    the_topic text COLLATE "C" := enqueue.topic;
    body jsonb := tokenkeeper.parsed_payload(enqueue.payload);
    kind text COLLATE "C" := coalesce(enqueue.push_type, tokenkeeper.push_type_of(body, the_topic));
    fault text := CASE WHEN body IS NULL AND enqueue.payload IS NOT NULL THEN tokenkeeper.payload_fault(enqueue.payload)
                       ELSE tokenkeeper.send_fault(env, the_topic, body, kind, enqueue.priority, enqueue.expiration, enqueue.collapse_id,
                                                   enqueue.not_before, NULL) END;
    longest integer := (SELECT max(octet_length(t)) FROM unnest(enqueue.tags) AS t);
    requests bigint;
BEGIN
    IF fault IS NULL AND longest > 512 THEN
        fault := 'a tag is ' || longest || ' bytes long, expected at most 512';
    END IF;
    IF fault IS NULL AND octet_length(enqueue.device_id) > 512 THEN
        fault := 'device_id is ' || octet_length(enqueue.device_id) || ' bytes long, expected at most 512';
    END IF;
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (enqueue.tags IS NOT NULL)::integer + (enqueue.device_id IS NOT NULL)::integer + coalesce(enqueue.everyone, false)::integer <> 1 THEN
        RAISE EXCEPTION 'addressed is %, expected one of tags, device_id and everyone',
            CASE WHEN enqueue.tags IS NULL AND enqueue.device_id IS NULL AND NOT coalesce(enqueue.everyone, false) THEN 'nobody' ELSE 'more than one' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'everyone => true is all tokens of the topic; a variable that is null by mistake shall not be.';
    END IF;
    -- EXECUTE: planned anew for these very tags, since one is borne by all and another by one. Null parameters fall away in the plan.
    EXECUTE $statement$
        INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, not_before)
        SELECT $1, $2, encode(l.token_key, 'hex'), $3, $4, $5, $6, $7, $8
        FROM tokenkeeper.topic AS t
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
        WHERE t.topic = $2 COLLATE "C" AND t.environment = $1 COLLATE "C"
          AND (NOT l.suppressed OR t.gate = 'observe') AND l.registered_at > '-infinity' AND $statement$
        || CASE WHEN enqueue.tags IS NOT NULL THEN 'l.tags && $9' WHEN enqueue.device_id IS NOT NULL THEN 'l.device_id = $10' ELSE 'true' END
        -- Without the blanks of the caller's spelling, once for all.
        USING env, the_topic, body::text::json, kind, enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.not_before,
              enqueue.tags, enqueue.device_id;
    GET DIAGNOSTICS requests = ROW_COUNT;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue(json, text, text, text[], text, integer, timestamptz, text, timestamptz, text, boolean) IS
    'Queues a notification for every token of the topic that may be sent to and bears one of the tags; or for all tokens of a device; or, with '
    'everyone => true, for all of the topic; in the caller''s transaction. Answers how many. Raises 22023 for what APNs would refuse, for an expiration '
    'that is not later than not_before, and for a tag or device_id over 512 bytes.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.enqueue(json, text, text, text[], text, integer, timestamptz, text, timestamptz, text, boolean) FROM PUBLIC;

-- What operators call ----------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.halt_sending(topic text, environment text DEFAULT 'production', reason text DEFAULT 'an operator has halted it')
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    the_topic text COLLATE "C" := halt_sending.topic;
    the_environment text COLLATE "C" := coalesce(halt_sending.environment, 'production');
BEGIN
    -- A slip of the pen shall not look like a halt.
    IF the_environment NOT IN ('production', 'sandbox') OR coalesce(the_topic, '') = '' THEN
        RAISE EXCEPTION 'expected a topic, and production or sandbox' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(the_topic) > 512 THEN
        RAISE EXCEPTION 'topic is % bytes long, expected at most 512', octet_length(the_topic) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(halt_sending.reason) > 1000 THEN
        RAISE EXCEPTION 'reason is % bytes long, expected at most 1000', octet_length(halt_sending.reason) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tokenkeeper.send_halt AS h (environment, topic, reason)
    VALUES (the_environment, the_topic, coalesce(halt_sending.reason, ''))
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, message)
        VALUES ('sending_halted', the_environment, the_topic, halt_sending.reason);
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.halt_sending(text, text, text) IS
    'Pauses a topic: no daemon claims its requests until resume_sending. False when it was paused already, with the earlier reason. '
    'Raises 22023 for no topic, a topic over 512 bytes, an unknown environment, or a reason over 1000 bytes.';

CREATE OR REPLACE FUNCTION tokenkeeper.resume_sending(topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    the_topic text COLLATE "C" := resume_sending.topic;
    the_environment text COLLATE "C" := coalesce(resume_sending.environment, 'production');
BEGIN
    DELETE FROM tokenkeeper.send_halt AS h WHERE h.topic = the_topic AND h.environment = the_environment;
    IF FOUND THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic) VALUES ('sending_resumed', the_environment, the_topic);
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.resume_sending(text, text) IS
    'Ends the pause of a topic, once the cause is fixed: its requests go out again. False when the topic was not paused.';

-- What daemons call ------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.claim_requests(
    environment text, topic text, daemon_id text, most integer, background_per_hour integer, due_since timestamptz)
RETURNS TABLE (request_id bigint, token_key bytea, payload text, push_type text, priority integer, expiration bigint, collapse_id text,
               apns_id text, attempts integer, first_sent_at timestamptz, due_at timestamptz, suppressed bigint, failed bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Each request is looked up by itself, whatever the tables were when this session made its plan.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    -- Collated here, so that the caller's collation decides nothing.
    the_topic text COLLATE "C" := claim_requests.topic;
    the_environment text COLLATE "C" := claim_requests.environment;
    the_daemon text COLLATE "C" := claim_requests.daemon_id;
    of_topic tokenkeeper.topic;
    a_background integer;
BEGIN
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = the_topic AND t.environment = the_environment;
    IF EXISTS (SELECT FROM tokenkeeper.send_halt AS h WHERE h.topic = the_topic AND h.environment = the_environment) THEN
        RETURN;
    END IF;
    a_background := nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT r.* FROM tokenkeeper.send_request AS r
        WHERE left(coalesce(r.topic, ''), 513) = the_topic AND left(coalesce(r.environment, 'production'), 20) = the_environment
          AND coalesce(r.not_before, r.queued_at) BETWEEN claim_requests.due_since AND now() AND r.claimed_by IS NULL
        ORDER BY coalesce(r.not_before, r.queued_at)
        LIMIT claim_requests.most
        FOR UPDATE SKIP LOCKED
    ), understood AS MATERIALIZED (
        -- OFFSET: each payload is parsed once. From here on only the text of a small one is carried along: a small one can always be spelt out.
        SELECT d.request_id, d.environment, d.topic, d.token, d.priority, d.expiration, d.collapse_id, d.not_before, d.apns_id, d.queued_at, d.cuts,
               tokenkeeper.token_key(d.token) AS key, coalesce(d.push_type, tokenkeeper.push_type_of(p.body, d.topic)) AS kind, p.body,
               CASE WHEN pg_column_size(p.body) < 2000 THEN p.body::text END AS body_text,
               CASE WHEN p.body IS NULL AND d.payload IS NOT NULL THEN tokenkeeper.payload_fault(d.payload) END AS payload_fault,
               -- What a daemon has put off says nothing of the sender's wish.
               CASE WHEN NOT d.deferred THEN d.not_before END AS asked_for
        FROM due AS d CROSS JOIN LATERAL (SELECT tokenkeeper.parsed_payload(d.payload) AS body OFFSET 0) AS p
    ), judged AS MATERIALIZED (
        SELECT u.request_id, u.environment, u.topic, u.not_before, u.apns_id, u.queued_at, u.key, u.kind, u.body_text,
               l.state, l.reason, l.invalidated_at, b.sends, b.earliest, CASE
                   WHEN u.cuts >= 2 THEN 'it was cut off twice while it was being sent, and may have been delivered'
                   WHEN u.cuts >= 1 AND u.expiration = 'epoch' THEN 'it was cut off while it was being sent, and its expiration allows one try only'
                   WHEN u.key IS NULL THEN 'device token is ' || coalesce(length(u.token) || ' characters', 'missing')
                                           || ', expected 1 to 512 bytes in hex'
                   WHEN u.expiration > 'epoch' AND u.expiration <= now() AND (u.asked_for < u.expiration) IS NOT FALSE
                       THEN 'its expiration passed before it could be sent'
                   WHEN u.payload_fault IS NOT NULL THEN u.payload_fault
                   ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.body, u.kind, u.priority, u.expiration,
                                               u.collapse_id, u.asked_for, u.body_text)
               END AS fault
        FROM understood AS u
        -- LIMIT: never a join that reads the ledger from end to end.
        LEFT JOIN LATERAL (
            SELECT tokenkeeper.state_of(l) AS state, greatest(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) AS invalidated_at,
                   CASE tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at)
                       WHEN 'dead' THEN l.dead_reason
                       WHEN 'suspect' THEN l.suspect_reason
                       WHEN 'unregistered' THEN 'unregistered by the app'
                       WHEN 'superseded' THEN 'a newer token of the same device'
                   END AS reason
            FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic.topic_id AND l.token_key = u.key AND l.suppressed > false AND of_topic.gate IS DISTINCT FROM 'observe'
            LIMIT 1) AS l ON true
        LEFT JOIN LATERAL (
            SELECT count(*) AS sends, min(a.sent_at) AS earliest
            FROM tokenkeeper.background_send AS b CROSS JOIN unnest(b.sent_at) AS a (sent_at)
            WHERE u.kind = 'background' AND b.topic = u.topic AND b.environment = the_environment AND b.token_key = u.key
              AND a.sent_at > now() - interval '1 hour') AS b ON true
    ), ordered AS MATERIALIZED (
        -- Of a device's background pushes those that were asked for first go out; of those beyond its share the newest waits.
        SELECT j.*, row_number() OVER (PARTITION BY j.key ORDER BY j.request_id) > 5 AS crowded,
               j.fault IS NULL AND j.state IS NULL AND j.kind = 'background'
                    AND j.sends + row_number() OVER (PARTITION BY j.key, j.kind, j.fault IS NULL AND j.state IS NULL ORDER BY j.request_id) > a_background AS too_many,
               row_number() OVER (PARTITION BY j.key, j.kind, j.fault IS NULL AND j.state IS NULL ORDER BY j.request_id DESC) = 1 AS newest
        FROM judged AS j
    ), fated AS MATERIALIZED (
        SELECT o.*, CASE WHEN o.fault IS NOT NULL THEN 'failed'
                         WHEN o.state IS NOT NULL OR (o.too_many AND NOT o.newest) THEN 'suppressed'
                         WHEN o.too_many THEN 'postponed'
                         -- One a token is under way at a time: many shall not keep the others out.
                         WHEN o.crowded THEN 'behind'
                         ELSE 'sent' END AS fate
        FROM ordered AS o
    ), overtaken AS (
        -- OFFSET: device by device, by its index, however many are postponed.
        DELETE FROM tokenkeeper.send_request AS r
        WHERE r.request_id = ANY (ARRAY(
            SELECT o.request_id FROM fated AS f CROSS JOIN LATERAL (
                SELECT p.request_id FROM tokenkeeper.send_request AS p
                WHERE p.postponed AND tokenkeeper.token_key(p.token) = f.key AND p.topic = f.topic
                  AND coalesce(p.environment, 'production') = the_environment AND p.claimed_by IS NULL AND p.request_id < f.request_id
                OFFSET 0) AS o
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
        SET postponed = true, deferred = true, not_before = coalesce(f.earliest, now()) + interval '1 hour'
        FROM fated AS f WHERE f.fate = 'postponed' AND r.request_id = f.request_id
    ), behind AS (
        UPDATE tokenkeeper.send_request AS r SET deferred = true, not_before = now() + interval '1 second'
        FROM fated AS f WHERE f.fate = 'behind' AND r.request_id = f.request_id
    ), noted AS (
        INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at)
        SELECT the_environment, f.topic, f.key, array_agg(now()), now()
        FROM fated AS f WHERE f.fate = 'sent' AND f.kind = 'background' AND a_background IS NOT NULL
        GROUP BY f.topic, f.key ORDER BY f.key
        ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
        SET sent_at = ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') || excluded.sent_at, latest_at = now()
    ), sent AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = the_daemon, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid())
        FROM fated AS f WHERE f.fate = 'sent' AND r.request_id = f.request_id
        RETURNING r.request_id, f.key, coalesce(f.body_text, r.payload::jsonb::text) AS payload, f.kind, CASE f.kind WHEN 'background' THEN 5 ELSE r.priority END AS priority,
                  floor(extract(epoch FROM r.expiration))::bigint AS expiration, r.collapse_id, r.apns_id::text AS apns_id, r.attempts,
                  r.first_sent_at, coalesce(f.not_before, f.queued_at) AS due_at
    )
    SELECT s.*, NULL::bigint, NULL::bigint FROM sent AS s
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, max(coalesce(f.not_before, f.queued_at)),
           count(*) FILTER (WHERE f.fate = 'suppressed') + (SELECT count(*) FROM overtaken), count(*) FILTER (WHERE f.fate = 'failed')
    FROM fated AS f;
END
$$;

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
    ended bigint;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT t.request_id, t.fate COLLATE "C" AS fate, t.status, t.body, t.apns_id, t.sent_at, t.pause, t.error
        FROM unnest(finish_requests.request_ids, finish_requests.fates, finish_requests.statuses, finish_requests.bodies,
                               finish_requests.apns_ids, finish_requests.sent_ats, finish_requests.pauses, finish_requests.errors)
            AS t (request_id, fate, status, body, apns_id, sent_at, pause, error)
    ), gone AS (
        -- IS TRUE: never by the index of what is claimed, which has all that this daemon has in hand under one key.
        DELETE FROM tokenkeeper.send_request AS r USING told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND t.fate IN ('answered', 'failed')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at, t.error
    ), kept AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = NULL, attempts = r.attempts + CASE t.fate WHEN 'returned' THEN 0 ELSE 1 END,
            cuts = r.cuts + CASE t.fate WHEN 'cut' THEN 1 ELSE 0 END, last_error = coalesce(t.error, r.last_error),
            first_sent_at = CASE WHEN t.fate = 'returned' AND r.attempts = 0 AND r.cuts = 0 THEN NULL ELSE r.first_sent_at END,
            not_before = CASE WHEN t.pause IS NULL THEN r.not_before ELSE clock_timestamp() + t.pause * interval '1 microsecond' END,
            deferred = r.deferred OR t.pause IS NOT NULL
        FROM told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND t.fate IN ('later', 'cut', 'returned')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at
    ), uncounted AS (
        -- What did not reach its device is none of its share for this hour.
        UPDATE tokenkeeper.background_send AS b
        SET sent_at = b.sent_at[1:cardinality(b.sent_at) - u.requests]
        FROM (SELECT k.topic, coalesce(k.environment, 'production') AS environment, tokenkeeper.token_key(k.token) AS key, count(*)::integer AS requests
              FROM kept AS k
              WHERE k.fate IN ('later', 'returned') AND coalesce(k.push_type, tokenkeeper.push_type_of(tokenkeeper.parsed_payload(k.payload), k.topic)) = 'background'
              GROUP BY 1, 2, 3) AS u
        WHERE b.topic = u.topic AND b.environment = u.environment AND b.token_key = u.key
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
        SELECT coalesce(g.error, 'given up'), g.status, g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration,
               g.collapse_id, g.apns_id, g.request_id, g.queued_at, g.attempts
        FROM gone AS g WHERE g.fate = 'failed'
    )
    SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept) INTO ended;
    RETURN ended;
END
$$;
