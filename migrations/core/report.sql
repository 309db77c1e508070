-- Reporting a response in one call, for libraries that return its reason and timestamp, but not its body.
--
-- Two functions, because the status is text or a number. Literals and untyped parameters resolve to text, which PostgreSQL prefers; every type of a
-- number becomes a double by itself. The timestamp may be of any type.
--
-- SECURITY INVOKER: who may insert results needs nothing else. Locks: none but those of the INSERT.

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status text,
    reason text DEFAULT NULL,
    apns_timestamp anycompatible DEFAULT NULL::text,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production',
    body text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- An instant without a time zone is in UTC, whatever the session says.
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$
DECLARE
    given text COLLATE "C" := nullif(btrim(report.apns_timestamp::text), '');
    milliseconds text; -- As JSON.
    moment timestamptz;
BEGIN
    IF given ~* '^-?[0-9]{1,30}([.][0-9]*)?(e[+]?[0-9]{1,2})?$' THEN
        milliseconds := trunc(given::numeric)::text;
    ELSIF given IS NOT NULL THEN
        BEGIN
            moment := given::timestamptz;
            -- What is out of range is rejected later.
            milliseconds := CASE WHEN isfinite(moment) THEN round(extract(epoch FROM moment) * 1000)::bigint::text ELSE '0' END;
        EXCEPTION WHEN data_exception THEN
            -- It stays in the body as text, and the result counts as one without a timestamp.
            milliseconds := to_json(given)::text;
        END;
    END IF;
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
    VALUES (report.environment, report.topic, report.token, report.status, coalesce(
        report.body,
        '{' || nullif(concat_ws(',', '"reason":' || to_json(nullif(report.reason, ''))::text, '"timestamp":' || milliseconds), '') || '}'),
        report.apns_id, report.sent_at);
    IF tokenkeeper.token_key(report.token) IS NULL THEN
        RAISE NOTICE 'the result will be rejected: %', tokenkeeper.token_fault(report.token);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, text, text, anycompatible, timestamptz, text, text, text) IS
    'Queues a response of APNs, in the caller''s transaction, with its body, or else with one made of reason and apns_timestamp. status: a text or a '
    'number. apns_timestamp: milliseconds since 1970, as APNs sends them, as text or any number; or an instant, in UTC if it has no time zone. sent_at: '
    'when the request was started. Null means the default. No argument raises an error: a result that cannot be understood is rejected, and a 410 without '
    'a readable timestamp makes its token suspect. A NOTICE says if the token cannot be read.';

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status double precision,
    reason text DEFAULT NULL,
    apns_timestamp anycompatible DEFAULT NULL::text,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production',
    body text DEFAULT NULL) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status::text, report.reason, report.apns_timestamp, report.sent_at, report.apns_id,
        report.environment, report.body)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, double precision, text, anycompatible, timestamptz, text, text, text) IS
    'As report, with a number as status.';

CREATE OR REPLACE FUNCTION tokenkeeper.report(results tokenkeeper.new_result[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unread text := tokenkeeper.unreadable(ARRAY(SELECT r.token FROM unnest(report.results) AS r));
    queued bigint;
BEGIN
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
    SELECT r.environment, r.topic, r.token, r.status, r.body, r.apns_id, r.sent_at FROM unnest(report.results) AS r;
    GET DIAGNOSTICS queued = ROW_COUNT;
    IF unread IS NOT NULL THEN
        RAISE NOTICE 'some results will be rejected: %', unread;
    END IF;
    RETURN queued;
END
$$;
COMMENT ON FUNCTION tokenkeeper.report(tokenkeeper.new_result[]) IS 'As report, for any number of responses with their bodies; returns how many.';
