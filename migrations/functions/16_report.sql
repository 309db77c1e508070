-- Reporting a response in one call, for libraries that return its reason and timestamp, but not its body.
--
-- One function for each pair of types that a caller may have. Literals and untyped parameters resolve to text, which PostgreSQL prefers. Only
-- the functions with a text timestamp have a default for it, so that a call without a timestamp is not ambiguous.
--
-- SECURITY INVOKER: who may insert results needs nothing else.

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status text,
    reason text DEFAULT NULL,
    apns_timestamp text DEFAULT NULL,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- An instant without a time zone is in UTC, whatever the session says.
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$
DECLARE
    given text COLLATE "C" := nullif(btrim(report.apns_timestamp), '');
    milliseconds text; -- As JSON.
    moment timestamptz;
BEGIN
    IF given ~ '^-?[0-9]{1,30}([.]0*)?$' THEN
        milliseconds := split_part(given, '.', 1)::numeric::text;
    ELSIF given IS NOT NULL THEN
        BEGIN
            moment := given::timestamptz;
        EXCEPTION WHEN data_exception THEN
            -- It stays in the body as text, and the result counts as one without a timestamp.
            milliseconds := to_json(given)::text;
        END;
    END IF;
    IF moment IS NOT NULL THEN
        PERFORM tokenkeeper.report(report.topic, report.token, report.status, report.reason, moment, report.sent_at, report.apns_id,
            report.environment);
        RETURN;
    END IF;
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
    VALUES (report.environment, report.topic, report.token, report.status,
        '{' || nullif(concat_ws(',', '"reason":' || to_json(nullif(report.reason, ''))::text, '"timestamp":' || milliseconds), '') || '}',
        report.apns_id, report.sent_at);
END
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, text, text, text, timestamptz, text, text) IS
    'Reports a response of APNs, in the caller''s transaction: queues a result whose body is made of the reason and the timestamp. The timestamp of a 410 is '
    'milliseconds since 1970, as APNs sends it, or an instant, in UTC if it has no time zone. Pass sent_at, when the '
    'request was started. Null means the default. Never raises an error because of what is passed: a result that cannot be understood is rejected, and a 410 '
    'without a timestamp that can be read makes its token suspect.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, text, text, text, timestamptz, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status bigint,
    reason text DEFAULT NULL,
    apns_timestamp text DEFAULT NULL,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status::text, report.reason, report.apns_timestamp,
        report.sent_at, report.apns_id, report.environment)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, bigint, text, text, timestamptz, text, text) IS
    'As report with texts, with a number as status.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, bigint, text, text, timestamptz, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status text,
    reason text,
    apns_timestamp timestamptz,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status, report.reason,
        -- What is out of range is rejected later.
        CASE WHEN isfinite(report.apns_timestamp) THEN round(extract(epoch FROM report.apns_timestamp) * 1000)::bigint::text
             WHEN report.apns_timestamp IS NOT NULL THEN '0' END,
        report.sent_at, report.apns_id, report.environment)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, text, text, timestamptz, timestamptz, text, text) IS
    'As report with texts, with an instant as timestamp.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, text, text, timestamptz, timestamptz, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status bigint,
    reason text,
    apns_timestamp timestamptz,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status::text, report.reason, report.apns_timestamp,
        report.sent_at, report.apns_id, report.environment)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, bigint, text, timestamptz, timestamptz, text, text) IS
    'As report with texts, with a number as status and an instant as timestamp.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, bigint, text, timestamptz, timestamptz, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status text,
    reason text,
    apns_timestamp bigint,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status, report.reason, report.apns_timestamp::text,
        report.sent_at, report.apns_id, report.environment)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, text, text, bigint, timestamptz, text, text) IS
    'As report with texts, with milliseconds since 1970 as timestamp.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, text, text, bigint, timestamptz, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.report(
    topic text,
    token text,
    status bigint,
    reason text,
    apns_timestamp bigint,
    sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL,
    environment text DEFAULT 'production') RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT tokenkeeper.report(report.topic, report.token, report.status::text, report.reason, report.apns_timestamp::text,
        report.sent_at, report.apns_id, report.environment)
$$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, bigint, text, bigint, timestamptz, text, text) IS
    'As report with texts, with a number as status and milliseconds since 1970 as timestamp.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.report(text, text, bigint, text, bigint, timestamptz, text, text) FROM PUBLIC;
