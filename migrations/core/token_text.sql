-- Device tokens as people store them. All bulk input reads tokens with parse_token: the queue of registrations, attached tables, files.
--
-- A token is read in one way only, or not at all: what could be two tokens, or no token, is refused.

CREATE OR REPLACE FUNCTION tokenkeeper.parse_decorated_token(token text, base64 boolean) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Space, tab, line feed, carriage return.
    blank text COLLATE "C" := ' ' || chr(9) || chr(10) || chr(13);
    plain text COLLATE "C";
    in_base64 text COLLATE "C";
BEGIN
    -- 512 bytes as 'ab cd ...', with some room. Regular expressions on megabytes would take a second.
    IF token IS NULL OR octet_length(token) > 4096 THEN
        RETURN NULL;
    END IF;
    IF getdatabaseencoding() = 'UTF8' THEN
        -- Byte order mark (as in the first line of a file), no-break space. Not in an expression with CASE: chr is computed in advance, and fails in another
        -- encoding.
        blank := blank || chr(65279) || chr(160);
    END IF;
    plain := btrim(token COLLATE "C", blank);
    -- <abcdef01 23456789>: the description of NSData.
    IF plain ~ '^<.*>$' THEN
        plain := btrim(substr(plain, 2, length(plain) - 2), blank);
    END IF;
    -- 0x, and backslash x as PostgreSQL writes bytea.
    IF plain ~* '^0x' OR starts_with(plain, chr(92) || 'x') THEN
        plain := substr(plain, 3);
    END IF;
    -- AB-CD-EF and AB:CD:EF, byte by byte. Other groups are something else: a UUID, for example.
    IF plain ~ '^[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2})+$' OR plain ~ '^[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2})+$' THEN
        plain := translate(plain, '-:', '');
    ELSE
        plain := translate(plain, blank, '');
    END IF;
    IF octet_length(plain) > 1024 OR plain !~ '^(?:[0-9A-Fa-f]{2})+$' THEN
        plain := NULL;
    END IF;
    -- The base64 of 16 random bytes or more does not consist of hex digits only.
    IF base64 AND coalesce(octet_length(plain) < 32, true)
        AND token COLLATE "C" !~ '[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}' THEN
        in_base64 := translate(token COLLATE "C", '-_' || blank, '+/');
        IF in_base64 ~ '^[0-9A-Za-z+/]+={0,2}$' AND (strpos(in_base64, '=') = 0 OR octet_length(in_base64) % 4 = 0) THEN
            in_base64 := rtrim(in_base64, '=');
            IF octet_length(in_base64) % 4 <> 1 AND octet_length(in_base64) * 3 / 4 BETWEEN 1 AND 512 THEN
                RETURN encode(decode(in_base64 || repeat('=', -octet_length(in_base64) & 3), 'base64'), 'hex');
            END IF;
        END IF;
    END IF;
    RETURN lower(plain);
END
$$;
COMMENT ON FUNCTION tokenkeeper.parse_decorated_token(text, boolean) IS
    'Internal: the part of parse_token for what is not plain hex.';

-- One expression, which the planner puts in place of the call: plain hex costs a regular expression and no call.
CREATE OR REPLACE FUNCTION tokenkeeper.parse_token(token text, base64 boolean DEFAULT false) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN octet_length(token) <= 1024 AND token COLLATE "C" ~ '^(?:[0-9A-Fa-f]{2})+$' AND (base64 IS NOT TRUE OR octet_length(token) >= 32)
    THEN lower(token COLLATE "C")
    ELSE tokenkeeper.parse_decorated_token(token, base64)
END;
COMMENT ON FUNCTION tokenkeeper.parse_token(text, boolean) IS
    'A device token as the ledger writes it, in lower-case hex. Reads hex in either case; <abcdef01 23456789>, as NSData describes itself; with spaces; '
    'after 0x or a backslash and x; and with dashes or colons between the bytes (AB-CD-EF). With base64 => true also base64 and base64url, with or without '
    'padding; a text that is both hex and base64 is then base64, except for 32 or more hex digits. Null for anything else, or if it is not 1 to 512 bytes: '
    'token_fault says why. Never raises an error.';

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
    'Why parse_token cannot read a token, and what was expected; null if it can. Shows at most its first 8 characters. Never raises an error.';

CREATE OR REPLACE FUNCTION tokenkeeper.raise_malformed_token(token text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'device token is %, expected 1 to 512 bytes in hex', CASE
        WHEN token IS NULL THEN 'null'
        ELSE quote_literal(left(token, 8)) || '... (' || length(token) || CASE length(token) WHEN 1 THEN ' character)' ELSE ' characters)' END END
        USING ERRCODE = 'invalid_parameter_value';
END
$$;
COMMENT ON FUNCTION tokenkeeper.raise_malformed_token(text) IS
    'Raises 22023 for a token that has no key. Shows at most its first 8 characters, because errors are logged.';
