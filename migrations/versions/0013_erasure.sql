-- oldest daemon: 0.1.0
--
-- A person's right to erasure. forget deletes at once what an index finds, and writes down what it was asked for. What was reported before and surfaces
-- later is dropped by that: in the drains, by the claim, and by finish_erasures, which a daemon calls until nothing from before is left.

CREATE TABLE tokenkeeper.erasure (
    erasure_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    forgotten_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    names        text[] COLLATE "C" NOT NULL,
    device_id    text COLLATE "C",
    user_id      text COLLATE "C",
    seen_before  xid8
);
COMMENT ON TABLE tokenkeeper.erasure IS
    'What forget was asked to erase, in the clear, for ten minutes and until no queue or open transaction is older. Usually empty. Only the owner and the '
    'functions of the schema read it.';
COMMENT ON COLUMN tokenkeeper.erasure.forgotten_at IS 'What was reported until then is dropped.';
COMMENT ON COLUMN tokenkeeper.erasure.names IS 'As names_in returns them: the tokens, and the device or the user.';
COMMENT ON COLUMN tokenkeeper.erasure.seen_before IS 'Null until a daemon sees the row. Transactions then open that may not have seen it have smaller ids.';

CREATE INDEX erasure_names ON tokenkeeper.erasure USING gin (names);
COMMENT ON INDEX tokenkeeper.erasure_names IS 'For the claim of requests.';

-- Versioned, because indexes call it. The indexes have the collation of erasure.names: with another, they would not be used. It never raises an error, because an index must not refuse a row.
CREATE FUNCTION tokenkeeper.names_in(
    texts text[], device_id text DEFAULT NULL, user_id text DEFAULT NULL, tags text[] DEFAULT NULL) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Of each form, because a row may consist of what looks like tokens.
    most CONSTANT integer := 100;
    whole text COLLATE "C" := left(concat_ws(' | ', array_to_string(texts, ' | '), array_to_string(tags, ' | ')), 1048576);
    -- Line breaks within base64, also as JSON writes them.
    joined text COLLATE "C" := replace(replace(translate(whole, chr(10) || chr(13), ''), chr(92) || 'n', ''), chr(92) || 'r', '');
    names text[] COLLATE "C" := ARRAY[
        CASE WHEN octet_length(device_id) BETWEEN 1 AND 512 THEN 'd:' || device_id END,
        -- As device_name, for a UUID.
        CASE WHEN octet_length(device_id) = 36 THEN 'd:' || lower(device_id) END,
        CASE WHEN octet_length(user_id) BETWEEN 1 AND 512 THEN 'u:' || user_id END];
BEGIN
    RETURN array_remove(names || ARRAY(
        -- In hex, also with a separator between the bytes.
        SELECT h.plain FROM (
            SELECT lower(regexp_replace(m[1], '[ :-]', '', 'g')) AS plain
            FROM (SELECT m FROM regexp_matches(whole, '[0-9A-Fa-f]{2}(?:[ :-]?[0-9A-Fa-f]{2}){7,}', 'g') AS m LIMIT most) AS m
            UNION
            SELECT tokenkeeper.parse_token(t) FROM unnest(texts) AS t
            UNION
            SELECT lower(m[1]) FROM (SELECT m FROM regexp_matches(whole, '[0-9A-Fa-f]{16,}', 'g') AS m LIMIT most) AS m) AS h
        WHERE octet_length(h.plain) <= 1024
        UNION
        -- The digits of a text alone, whatever is between them: so also a shorter one.
        SELECT d.digits FROM (SELECT lower(regexp_replace(t, '[^0-9A-Fa-f]', '', 'g')) AS digits FROM unnest(texts) AS t WHERE octet_length(t) <= 4096) AS d
        WHERE octet_length(d.digits) BETWEEN 2 AND 1024 AND octet_length(d.digits) % 2 = 0
        UNION
        SELECT encode(decode(b.code || repeat('=', -octet_length(b.code) & 3), 'base64'), 'hex')
        FROM (SELECT translate(m[1], '-_', '+/') AS code
              FROM ((SELECT m FROM regexp_matches(whole, '[A-Za-z0-9+/_-]{11,}', 'g') AS m LIMIT most)
                    UNION (SELECT m FROM regexp_matches(joined, '[A-Za-z0-9+/_-]{11,}', 'g') AS m LIMIT most)) AS f) AS b
        WHERE octet_length(b.code) % 4 <> 1 AND octet_length(b.code) <= 684), NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.names_in(text[], text, text, text[]) IS
    'Internal: whom these texts may name: each device token of 8 bytes or more in them, in hex or base64 (also broken by line breaks, blanks, dashes or '
    'colons between the bytes), a shorter one if the text has no other hex digits; the device (with d: in front) and the user (u:). Tokens are in lower hex. '
    'Finds the first 100 of each form, within the first 1,048,576 characters, and also what only looks like a token. Never raises an error.';

CREATE INDEX rejected_result_names ON tokenkeeper.rejected_result USING gin (tokenkeeper.names_in(ARRAY[token, topic, body, environment, status, apns_id, error]) COLLATE "C");
COMMENT ON INDEX tokenkeeper.rejected_result_names IS 'For forget.';
CREATE INDEX rejected_registration_names ON tokenkeeper.rejected_registration
    USING gin (tokenkeeper.names_in(ARRAY[token, topic, environment, device_id, user_id, row_key, error], device_id, user_id, tags) COLLATE "C");
COMMENT ON INDEX tokenkeeper.rejected_registration_names IS 'For forget.';
CREATE INDEX held_registration_names ON tokenkeeper.held_registration USING gin (tokenkeeper.names_in(ARRAY[token], device_id, user_id) COLLATE "C");
COMMENT ON INDEX tokenkeeper.held_registration_names IS 'For forget.';
CREATE INDEX failed_send_names ON tokenkeeper.failed_send USING gin (tokenkeeper.names_in(ARRAY[token, topic, environment, push_type, collapse_id, error]) COLLATE "C");
COMMENT ON INDEX tokenkeeper.failed_send_names IS 'For forget.';
