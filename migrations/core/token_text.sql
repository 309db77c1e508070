-- What is wrong with device tokens that parse_token cannot read (see versions/0002_ledger): for errors, notices and rejected rows.

CREATE OR REPLACE FUNCTION tokenkeeper.token_fault(token text, base64 boolean DEFAULT false) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    said text COLLATE "C" := left(token, 8192);
    digits text COLLATE "C";
    shown text;
    problem text;
BEGIN
    IF tokenkeeper.parse_token(token, base64) IS NOT NULL THEN
        RETURN NULL;
    END IF;
    IF token IS NULL THEN
        RETURN 'token is null, expected 1 to 512 bytes in hex' || CASE WHEN base64 THEN ' or base64' ELSE '' END;
    END IF;
    digits := regexp_replace(said, '[^0-9A-Fa-f]', '', 'g');
    shown := CASE WHEN said = '' THEN 'empty'
        -- Characters that move a cursor or end a line do not belong into a log.
        ELSE quote_literal(regexp_replace(left(said, 8), '[[:cntrl:]]', '?', 'g')) || CASE WHEN length(token) > 8 THEN '...' ELSE '' END
            || ' (' || length(token) || CASE length(token) WHEN 1 THEN ' character)' ELSE ' characters)' END END;
    problem := CASE
        WHEN said ~ '[^[:space:]]' IS FALSE THEN ''
        WHEN said ~ '^[[:space:]]*[{]?[[:space:]]*length *=' AND strpos(said, '...') > 0
            THEN ': a shortened description of NSData (iOS 13 or later), whose bytes are lost'
        WHEN said ~ '^[[:space:]]*[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}[[:space:]]*$' THEN ': a UUID'
        WHEN said ~ '^Expo(nent)?PushToken' THEN ': a token of Expo'
        WHEN said ~ ':APA91' THEN ': a token of Firebase Cloud Messaging'
        WHEN said ~ '^[[:space:]<]*(?:0[xX])?[0-9A-Fa-f[:space:]]+>?[[:space:]]*$' THEN CASE
            WHEN octet_length(digits) > 1024 THEN ': more than 512 bytes'
            ELSE ': an odd number of hex digits' END
        ELSE '' END;
    RETURN 'token is ' || shown || problem || ', expected 1 to 512 bytes in hex' || CASE WHEN base64 THEN ' or base64' ELSE '' END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.token_fault(text, boolean) IS
    'Why parse_token cannot read a token; null if it can. Shows at most its first 8 characters.';

CREATE OR REPLACE FUNCTION tokenkeeper.unreadable(tokens text[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) || ' of ' || cardinality(tokens) || CASE cardinality(tokens) WHEN 1 THEN ' token' ELSE ' tokens' END
           || ' cannot be read, such as number ' || min(t.n) || ': ' || tokenkeeper.token_fault((array_agg(t.token ORDER BY t.n))[1])
    FROM unnest(tokens) WITH ORDINALITY AS t (token, n) WHERE t.token IS NOT NULL AND tokenkeeper.token_key(t.token) IS NULL HAVING count(*) > 0
$$;
COMMENT ON FUNCTION tokenkeeper.unreadable(text[]) IS
    'Internal: how many of these tokens parse_token cannot read, and why the first of them; null if none. Nulls do not count.';
