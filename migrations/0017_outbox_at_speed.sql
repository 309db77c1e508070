-- oldest daemon: 0.1.0
--
-- The outbox at speed, whatever is in it. As in 0015, but for this:
-- send_fault: each number is cast to text, and it is said to be stable: else PostgreSQL does not write it into the statement that asks, and it is a
--   statement of its own for each request. And a payload that no text can hold fails by itself, instead of every claim that comes upon it.
-- claim_requests: no plan goes through all that is postponed; nothing of a halted topic is claimed, whoever still thinks that it goes on.
-- finish_requests: each request is found by its number: by the index of what is claimed it went through all that is in hand for each.

CREATE FUNCTION tokenkeeper.payload_length(payload jsonb) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN octet_length(replace(replace(payload::text, ': ', ':'), ', ', ','));
EXCEPTION WHEN program_limit_exceeded OR out_of_memory THEN
    RETURN 2147483647;
END
$$;
COMMENT ON FUNCTION tokenkeeper.payload_length(jsonb) IS
    'The bytes of a payload without blanks, at least so many; 2147483647 where its text is longer than PostgreSQL can make: 1e131071 is 5 bytes as one writes it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.payload_length(jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.send_fault(
    environment text, topic text, payload jsonb, push_type text, priority integer, expiration timestamptz, collapse_id text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
    WHEN environment NOT IN ('production', 'sandbox')
        THEN 'environment is ' || quote_literal(left(environment, 20)) || ', expected ''production'' or ''sandbox'''
    WHEN coalesce(topic, '') = '' THEN 'topic is missing, expected the apns-topic header'
    WHEN octet_length(topic) > 512 OR topic ~ '[^!-~]' THEN 'topic has blanks, or characters that no header can carry, or is over 512 bytes long'
    WHEN payload IS NULL THEN 'payload is missing, expected a JSON object'
    WHEN jsonb_typeof(payload) <> 'object' THEN 'payload is a JSON ' || jsonb_typeof(payload) || ', expected an object'
    WHEN push_type NOT IN ('alert', 'background', 'voip', 'complication', 'fileprovider', 'mdm', 'liveactivity', 'location', 'pushtotalk',
                           'widgets', 'controls')
        THEN 'push_type is ' || quote_literal(left(push_type, 20)) || ', expected alert, background, voip, complication, fileprovider, '
             || 'mdm, liveactivity, location, pushtotalk, widgets or controls'
    WHEN push_type = 'background' AND NOT tokenkeeper.is_silent(payload)
        THEN 'push_type is background, expected a payload with content-available 1 and no alert, sound or badge'
    WHEN push_type = 'alert' AND tokenkeeper.is_silent(payload)
        THEN 'push_type is alert, expected background: the payload has content-available 1 and no alert, sound or badge'
    WHEN push_type = 'background' AND priority <> 5 THEN 'priority is ' || priority::text || ', expected 5 for a background push'
    WHEN priority NOT IN (10, 5, 1) THEN 'priority is ' || priority::text || ', expected 10, 5 or 1'
    WHEN NOT isfinite(expiration) OR expiration < 'epoch'
        THEN 'expiration is ' || CASE WHEN isfinite(expiration) THEN 'before 1970' ELSE 'infinite' END || ', expected a finite instant, or null'
    WHEN octet_length(collapse_id) NOT BETWEEN 1 AND 64
        THEN 'collapse_id is ' || octet_length(collapse_id)::text || ' bytes long, expected 1 to 64'
    WHEN collapse_id ~ '[^ -~]|^ | $' THEN 'collapse_id has characters that no header can carry'
    -- At least so long, whatever stands in its texts; exactly it is known where it is sent.
    -- What is small and not compressed has a text that can be made; the other function costs more.
    WHEN CASE WHEN pg_column_size(payload) < 2000 AND pg_column_compression(payload) IS NULL
              THEN octet_length(replace(replace(payload::text, ': ', ':'), ', ', ','))
              ELSE tokenkeeper.payload_length(payload) END > CASE push_type WHEN 'voip' THEN 5120 ELSE 4096 END
        THEN 'payload is over ' || CASE push_type WHEN 'voip' THEN '5120' ELSE '4096' END || ' bytes long'
END;

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
    of_topic tokenkeeper.topic;
    a_background integer;
BEGIN
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = claim_requests.topic AND t.environment = claim_requests.environment;
    IF EXISTS (SELECT FROM tokenkeeper.send_halt AS h WHERE h.topic = claim_requests.topic AND h.environment = claim_requests.environment) THEN
        RETURN;
    END IF;
    a_background := nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT r.* FROM tokenkeeper.send_request AS r
        WHERE left(coalesce(r.topic, ''), 513) = claim_requests.topic AND left(coalesce(r.environment, 'production'), 20) = claim_requests.environment
          AND coalesce(r.not_before, r.queued_at) BETWEEN claim_requests.due_since AND now() AND r.claimed_by IS NULL
        ORDER BY coalesce(r.not_before, r.queued_at)
        LIMIT claim_requests.most
        FOR UPDATE SKIP LOCKED
    ), understood AS MATERIALIZED (
        SELECT d.*, tokenkeeper.token_key(d.token) AS key, coalesce(d.push_type, tokenkeeper.push_type_of(d.payload, d.topic)) AS kind
        FROM due AS d
    ), judged AS MATERIALIZED (
        SELECT u.*, l.state, l.reason, l.invalidated_at, b.sends, b.earliest, CASE
                   WHEN u.cuts >= 2 THEN 'it was cut off twice while it was being sent, and may have been delivered'
                   WHEN u.cuts >= 1 AND u.expiration = 'epoch' THEN 'it was cut off while it was being sent, and its expiration allows one try only'
                   WHEN u.key IS NULL THEN 'device token is ' || coalesce(length(u.token) || ' characters', 'missing')
                                           || ', expected 1 to 512 bytes in hex'
                   WHEN u.expiration > 'epoch' AND u.expiration <= now() THEN 'its expiration passed before it could be sent'
                   ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.payload, u.kind, u.priority, u.expiration, u.collapse_id)
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
            WHERE u.kind = 'background' AND b.topic = u.topic AND b.environment = claim_requests.environment AND b.token_key = u.key
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
                  AND coalesce(p.environment, 'production') = claim_requests.environment AND p.claimed_by IS NULL AND p.request_id < f.request_id
                OFFSET 0) AS o
            WHERE f.fate = 'postponed' AND o.request_id NOT IN (SELECT d.request_id FROM due AS d)))
        RETURNING r.*, tokenkeeper.token_key(r.token) AS key
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, request_id, queued_at)
        SELECT claim_requests.environment, f.topic, encode(f.key, 'hex'), f.key, coalesce(f.state, 'background'),
               CASE WHEN f.state IS NULL THEN 'a newer background push waits' ELSE f.reason END, f.invalidated_at, f.kind, f.apns_id, f.request_id, f.queued_at
        FROM fated AS f WHERE f.fate = 'suppressed'
        UNION ALL
        SELECT claim_requests.environment, o.topic, encode(o.key, 'hex'), o.key, 'background', 'a newer background push waits', NULL,
               'background', o.apns_id, o.request_id, o.queued_at
        FROM overtaken AS o
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts)
        SELECT f.fault, f.environment, f.topic, f.token, f.payload, f.push_type, f.priority, f.expiration, f.collapse_id, f.apns_id,
               f.request_id, f.queued_at, f.attempts
        FROM fated AS f WHERE f.fate = 'failed'
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING fated AS f WHERE f.fate IN ('suppressed', 'failed') AND r.request_id = f.request_id
    ), postponed AS (
        UPDATE tokenkeeper.send_request AS r
        SET postponed = true, not_before = coalesce(f.earliest, now()) + interval '1 hour'
        FROM fated AS f WHERE f.fate = 'postponed' AND r.request_id = f.request_id
    ), behind AS (
        UPDATE tokenkeeper.send_request AS r SET not_before = now() + interval '1 second'
        FROM fated AS f WHERE f.fate = 'behind' AND r.request_id = f.request_id
    ), noted AS (
        INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at)
        SELECT claim_requests.environment, f.topic, f.key, array_agg(now()), now()
        FROM fated AS f WHERE f.fate = 'sent' AND f.kind = 'background' AND a_background IS NOT NULL
        GROUP BY f.topic, f.key ORDER BY f.key
        ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
        SET sent_at = ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') || excluded.sent_at, latest_at = now()
    ), sent AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = claim_requests.daemon_id, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid())
        FROM fated AS f WHERE f.fate = 'sent' AND r.request_id = f.request_id
        RETURNING r.request_id, f.key, r.payload::text AS payload, f.kind, CASE f.kind WHEN 'background' THEN 5 ELSE r.priority END AS priority,
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
    ended bigint;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT t.* FROM unnest(finish_requests.request_ids, finish_requests.fates, finish_requests.statuses, finish_requests.bodies,
                               finish_requests.apns_ids, finish_requests.sent_ats, finish_requests.pauses, finish_requests.errors)
            AS t (request_id, fate, status, body, apns_id, sent_at, pause, error)
    ), gone AS (
        -- IS TRUE: never by the index of what is claimed, which has all that this daemon has in hand under one key.
        DELETE FROM tokenkeeper.send_request AS r USING told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = finish_requests.daemon_id) IS TRUE AND t.fate IN ('answered', 'failed')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at, t.error
    ), kept AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = NULL, attempts = r.attempts + CASE t.fate WHEN 'returned' THEN 0 ELSE 1 END,
            cuts = r.cuts + CASE t.fate WHEN 'cut' THEN 1 ELSE 0 END, last_error = coalesce(t.error, r.last_error),
            first_sent_at = CASE WHEN t.fate = 'returned' AND r.attempts = 0 AND r.cuts = 0 THEN NULL ELSE r.first_sent_at END,
            not_before = CASE WHEN t.pause IS NULL THEN r.not_before ELSE clock_timestamp() + t.pause * interval '1 microsecond' END
        FROM told AS t
        WHERE r.request_id = t.request_id AND (r.claimed_by = finish_requests.daemon_id) IS TRUE AND t.fate IN ('later', 'cut', 'returned')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at
    ), uncounted AS (
        -- What did not reach its device is none of its share for this hour.
        UPDATE tokenkeeper.background_send AS b
        SET sent_at = b.sent_at[1:cardinality(b.sent_at) - u.requests]
        FROM (SELECT k.topic, coalesce(k.environment, 'production') AS environment, tokenkeeper.token_key(k.token) AS key, count(*)::integer AS requests
              FROM kept AS k
              WHERE k.fate IN ('later', 'returned') AND coalesce(k.push_type, tokenkeeper.push_type_of(k.payload, k.topic)) = 'background'
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
