-- oldest daemon: 0.1.0
--
-- The outbox at speed. send_fault as in 0015, with each number cast to text: without that it is no immutable expression, which PostgreSQL would
-- write into the statement that asks, but a statement of its own for each request. finish_requests as in 0015, each request found by its
-- number: by the index of what is claimed it went through all that is in hand for each.

CREATE OR REPLACE FUNCTION tokenkeeper.send_fault(
    environment text, topic text, payload jsonb, push_type text, priority integer, expiration timestamptz, collapse_id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
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
    WHEN octet_length(replace(replace(payload::text, ': ', ':'), ', ', ',')) > CASE push_type WHEN 'voip' THEN 5120 ELSE 4096 END
        THEN 'payload is over ' || CASE push_type WHEN 'voip' THEN '5120' ELSE '4096' END || ' bytes long'
END;

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
