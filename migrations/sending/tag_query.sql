-- Expressions of tags, as in Azure Notification Hubs: follows_RedSox && !muted, (a || b) && c.
-- https://learn.microsoft.com/azure/notification-hubs/notification-hubs-tags-segment-push-message has their operators, the parentheses and the characters
-- of a tag. It says nothing about precedence; here it is the usual one: first !, then &&, then ||. Its limits (120 characters in a tag; 20 tags in an
-- expression of || only, 10 with &&, 6 otherwise) are wider here. A tag with other characters is written in double quotes.

CREATE OR REPLACE FUNCTION tokenkeeper.tag_query(expression text) RETURNS tsquery
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- An SQL_ASCII database converts nothing: its bytes are taken as they are.
    encoding CONSTANT name COLLATE "C" := CASE getdatabaseencoding() WHEN 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END;
    -- Letters beyond ASCII need no quotes. In an SQL_ASCII database, these are all bytes beyond it.
    bare CONSTANT text COLLATE "C" := '(?:[A-Za-z0-9_@#.:-]|[^' || CASE encoding WHEN 'SQL_ASCII' THEN chr(1) || '-' || chr(127) ELSE '[:cntrl:] -~' END || '])+';
    quoted CONSTANT text COLLATE "C" := '"(?:[^"]|"")*"';
    -- As UTF-8 in hex: blanks, invisible characters, quotation marks and operators beyond ASCII, as word processors and input methods write them. Part of
    -- a tag, they would turn !muted into a tag that nobody has. Not U+200C and U+200D, which join letters and emoji.
    misleading CONSTANT text COLLATE "C" :=
        '(?:c2(?:[89].|a0|ab|ad|bb)|e19a80|e280(?:8[0-9abef]|[9ab].)|e281[89a].|e38080|efbbbf|efbc8[12689]|efbd9c)';
    symbol text COLLATE "C";
    -- In characters, from 1.
    place integer := 1;
    after integer := 1;
    -- Whether a tag, ! or ( comes next; otherwise an operator or ).
    wants_tag boolean := true;
    opened integer[] := '{}';
    tags integer := 0;
    tag text COLLATE "C";
    found text;
    expected text;
    query text[] := '{}';
BEGIN
    IF expression IS NULL THEN
        RETURN NULL;
    END IF;
    IF octet_length(expression) > 65536 THEN
        RAISE EXCEPTION 'the tag expression is % bytes long, expected at most 65536', octet_length(expression)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR symbol IN
        SELECT m.matched[1] FROM regexp_matches(expression COLLATE "C", '(' || bare || '|' || quoted || '|&&|[|][|]|[[:space:]]+|.)', 'g')
            WITH ORDINALITY AS m (matched, n) ORDER BY m.n
    LOOP
        place := after;
        after := place + length(symbol);
        CONTINUE WHEN symbol ~ '^[[:space:]]';
        IF symbol IN ('&&', '||') AND NOT wants_tag THEN
            query := query || left(symbol, 1);
            wants_tag := true;
        ELSIF symbol = ')' AND NOT wants_tag AND opened <> '{}' THEN
            opened := opened[1:cardinality(opened) - 1];
            query := query || symbol;
        ELSIF symbol = '!' AND wants_tag THEN
            -- Twice is not at all: to PostgreSQL, each would be another level.
            IF query[cardinality(query)] = '!' THEN
                query := query[1:cardinality(query) - 1];
            ELSE
                query := query || symbol;
            END IF;
        ELSIF symbol = '(' AND wants_tag THEN
            IF cardinality(opened) = 100 THEN
                found := '101 nested parentheses';
                expected := 'at most 100';
                EXIT;
            END IF;
            opened := opened || place;
            query := query || symbol;
        ELSIF wants_tag AND symbol ~ ('^(?:' || bare || '|' || quoted || ')$') THEN
            tag := CASE WHEN left(symbol, 1) = '"' THEN replace(substr(symbol, 2, length(symbol) - 2), '""', '"') ELSE symbol END;
            tags := tags + 1;
            IF left(symbol, 1) <> '"' AND encode(convert_to(symbol, encoding), 'hex') ~ ('^(?:..)*' || misleading) THEN
                place := place - 1 + coalesce((
                    SELECT min(c.n) FROM regexp_split_to_table(symbol, '') WITH ORDINALITY AS c (letter, n)
                    WHERE encode(convert_to(c.letter, encoding), 'hex') ~ ('^' || misleading)), 1);
                found := 'a character that looks like a blank, a quotation mark or an operator';
                expected := 'double quotes around such a tag';
                EXIT;
            END IF;
            IF octet_length(tag) NOT BETWEEN 1 AND 512 THEN
                found := 'a tag of ' || octet_length(tag) || ' bytes';
                expected := '1 to 512';
                EXIT;
            END IF;
            IF tags > 1000 THEN
                found := 'its 1001st tag';
                expected := 'at most 1000';
                EXIT;
            END IF;
            -- As a quoted lexeme. Migrations have no backslashes.
            query := query || ('''' || replace(replace(tag, chr(92), chr(92) || chr(92)), '''', '''''') || '''');
            wants_tag := false;
        ELSE
            found := CASE WHEN symbol = '"' THEN 'a double quote without its end' ELSE quote_literal(left(symbol, 20)) END;
            EXIT;
        END IF;
    END LOOP;
    IF found IS NULL AND (wants_tag OR opened <> '{}') THEN
        found := 'its end';
        place := length(expression) + 1;
    END IF;
    IF found IS NOT NULL THEN
        RAISE EXCEPTION 'the tag expression has % at position %, expected %', found, place, coalesce(expected, CASE
            WHEN wants_tag THEN 'a tag, ! or ('
            WHEN opened <> '{}' THEN '&&, || or the ) of the parenthesis at position ' || opened[cardinality(opened)]
            ELSE '&&, || or the end' END)
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'The operators are &&, || and !. A tag with other characters than letters, digits and _ @ # . : - is written in double quotes.';
    END IF;
    RETURN array_to_string(query, ' ')::tsquery;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag_query(text) IS
    'A tag expression as in Azure Notification Hubs, to compare with tag_vector: follows_RedSox && !muted, (a || b) && c. ! precedes &&, which precedes '
    '||. Case matters. A tag has letters, digits, and the characters _ @ # . : -; write any other in double quotes, with "" for a double quote. Beyond '
    'ASCII, only what looks like a blank, a quotation mark or an operator needs them. Raises 22023 for an invalid expression, with the position, a tag '
    'over 512 bytes, over 1000 tags, over 100 nested parentheses, or over 65536 bytes.';
