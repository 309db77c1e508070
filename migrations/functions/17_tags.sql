-- Expressions of tags, as in Azure Notification Hubs: follows_RedSox && !muted, (a || b) && c.
-- https://learn.microsoft.com/azure/notification-hubs/notification-hubs-tags-segment-push-message has their operators, the parentheses and the characters
-- of a tag. It says nothing about precedence; here it is the usual one: first !, then &&, then ||. Its limits (120 characters in a tag; 20 tags in an
-- expression of || only, 10 with &&, 6 otherwise) are wider here. A tag with other characters is written in double quotes.

CREATE OR REPLACE FUNCTION tokenkeeper.tag_query(expression text) RETURNS tsquery
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Letters beyond ASCII need no quotes.
    bare CONSTANT text COLLATE "C" := '(?:[A-Za-z0-9_@#.:-]|[^[:cntrl:] -~])+';
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
            IF left(symbol, 1) <> '"' AND encode(convert_to(symbol, 'UTF8'), 'hex') ~ ('^(?:..)*' || misleading) THEN
                place := place - 1 + (
                    SELECT min(c.n) FROM regexp_split_to_table(symbol, '') WITH ORDINALITY AS c (letter, n)
                    WHERE encode(convert_to(c.letter, 'UTF8'), 'hex') ~ ('^' || misleading));
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
    'An expression of tags as in Azure Notification Hubs, to compare with tag_vector: follows_RedSox && !muted, (a || b) && c. ! comes before &&, and && before '
    '||. A tag has letters, digits, and the characters _ @ # . : -; another one is written in double quotes, where "" is a double quote. Beyond ASCII, only '
    'what looks like a blank, a quotation mark or an operator needs them. Upper and lower case '
    'differ. Null for null. Raises 22023, with the position in characters from 1 and what was expected, for an invalid expression, a tag over 512 bytes, over '
    '1000 tags, over 100 nested parentheses, and an expression over 65536 bytes.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.tag_query(text) FROM PUBLIC;

-- Changes of tags. ledger.tags has them already, so that the index and the audiences look at one column. What decides about registrations, devices and
-- inherited tags is the tags without the changes: so whoever may change these takes the changes off first, and applies them again at the end.

CREATE OR REPLACE FUNCTION tokenkeeper.latest_tag_changes(changes tokenkeeper.tag_change[], since timestamptz) RETURNS tokenkeeper.tag_change[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(ROW(l.tag, l.changed_at, l.added)::tokenkeeper.tag_change ORDER BY l.tag)
    FROM (SELECT DISTINCT ON (c.tag) c.tag, c.changed_at, c.added FROM unnest(changes) AS c
          WHERE since IS NULL OR c.changed_at >= since
          -- At the same instant, the removal counts.
          ORDER BY c.tag, c.changed_at DESC, c.added) AS l
$$;
COMMENT ON FUNCTION tokenkeeper.latest_tag_changes(tokenkeeper.tag_change[], timestamptz) IS
    'The latest change of each tag, without those before since; null if there is none. Of two at the same instant, the removal.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.latest_tag_changes(tokenkeeper.tag_change[], timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.without_tag_changes(of_topic integer, keys bytea[], devices text[]) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea;
    device text COLLATE "C";
    found_some boolean := false;
BEGIN
    FOREACH key IN ARRAY keys LOOP
        UPDATE tokenkeeper.ledger AS l SET tags = l.registered_tags, registered_tags = NULL, has_tag_changes = NULL
        WHERE l.topic_id = of_topic AND l.token_key = key AND l.has_tag_changes;
        found_some := found_some OR FOUND;
    END LOOP;
    FOREACH device IN ARRAY coalesce(devices, '{}') LOOP
        EXIT WHEN found_some;
        found_some := EXISTS (SELECT FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = device AND d.tag_changes IS NOT NULL)
            OR EXISTS (SELECT FROM tokenkeeper.ledger AS l
                       WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.tag_changes IS NOT NULL);
    END LOOP;
    RETURN found_some;
END
$$;
COMMENT ON FUNCTION tokenkeeper.without_tag_changes(integer, bytea[], text[]) IS
    'Sets the tags of these tokens, which the caller has locked, to what they are without changes. Returns whether apply_tag_changes must be called '
    'afterwards: one of the tokens had changes, or a change of one of the devices may concern it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.without_tag_changes(integer, bytea[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.inherit_tags(of_topic integer, device text, keys bytea[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    this text COLLATE "C" := device;
    inherited text[] COLLATE "C" := (SELECT d.tags FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = this);
    key bytea;
BEGIN
    FOREACH key IN ARRAY coalesce(keys, '{}') LOOP
        UPDATE tokenkeeper.ledger AS l SET tags = inherited
        WHERE l.topic_id = of_topic AND l.token_key = key AND l.device_id = this AND l.superseded_at IS NULL AND l.tags_at IS NULL
          AND l.tags IS DISTINCT FROM inherited;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.inherit_tags(integer, text, bytea[]) IS
    'Sets the tags of those of these tokens that inherit them from the device''s other tokens. The caller has locked them, and has called without_tag_changes.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.inherit_tags(integer, text, bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.apply_tag_changes(of_topic integer, keys bytea[]) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    one_token boolean := (SELECT tokenkeeper.has_one_token_per_device(t.topic) FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
    key bytea;
    token tokenkeeper.ledger;
    inherited tokenkeeper.device;
    since timestamptz;
    changes tokenkeeper.tag_change[];
    removed text[] COLLATE "C";
    added text[] COLLATE "C";
    result text[] COLLATE "C";
    most integer := 0;
BEGIN
    -- A registration with tags ends the token's own earlier changes.
    FOREACH key IN ARRAY keys LOOP
        UPDATE tokenkeeper.ledger AS l SET tag_changes = tokenkeeper.latest_tag_changes(l.tag_changes, l.tags_at)
        WHERE l.topic_id = of_topic AND l.token_key = key
          AND EXISTS (SELECT FROM unnest(l.tag_changes) AS c WHERE c.changed_at < l.tags_at);
    END LOOP;
    FOREACH key IN ARRAY keys LOOP
        SELECT l.* INTO token FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        CONTINUE WHEN NOT FOUND;
        changes := token.tag_changes;
        since := token.tags_at;
        IF one_token AND token.device_id IS NOT NULL AND token.superseded_at IS NULL THEN
            SELECT d.* INTO inherited FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = token.device_id;
            since := coalesce(since, inherited.tags_at);
            changes := inherited.tag_changes || ARRAY(
                SELECT c FROM tokenkeeper.ledger AS l CROSS JOIN LATERAL unnest(l.tag_changes) AS c
                WHERE l.device_id = token.device_id AND l.topic_id + 0 = of_topic AND l.tag_changes IS NOT NULL);
        END IF;
        CONTINUE WHEN coalesce(cardinality(changes), 0) = 0;
        changes := tokenkeeper.latest_tag_changes(changes, since);
        SELECT coalesce(array_agg(c.tag) FILTER (WHERE NOT c.added), '{}'),
               coalesce(array_agg(c.tag ORDER BY c.tag) FILTER (WHERE c.added AND c.tag <> ALL (coalesce(token.tags, '{}'))), '{}')
        INTO removed, added FROM unnest(changes) AS c;
        result := ARRAY(SELECT t.tag FROM unnest(token.tags) WITH ORDINALITY AS t (tag, n) WHERE t.tag <> ALL (removed) ORDER BY t.n) || added;
        most := greatest(most, cardinality(result));
        UPDATE tokenkeeper.ledger AS l
        SET tags = CASE WHEN token.tags IS NOT NULL OR result <> '{}' THEN result[1:1000] END, registered_tags = token.tags, has_tag_changes = true
        WHERE l.topic_id = of_topic AND l.token_key = key;
    END LOOP;
    RETURN most;
END
$$;
COMMENT ON FUNCTION tokenkeeper.apply_tag_changes(integer, bytea[]) IS
    'Applies the changes of tags to these tokens, which the caller has locked together with their devices and has given to without_tag_changes. Returns the '
    'greatest number of tags that one of them would have; beyond 1000 they are cut off.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.apply_tag_changes(integer, bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.keep_tag_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    UPDATE tokenkeeper.device AS d SET tag_changes = tokenkeeper.latest_tag_changes(d.tag_changes || old.tag_changes, NULL)
    WHERE d.topic_id = old.topic_id AND d.device_id = old.device_id;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.keep_tag_changes() IS
    'A trigger: the device keeps the changes of tags of a token that is deleted, as it keeps the tags.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.keep_tag_changes() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.tag_difference(before text[], after text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    words text;
BEGIN
    -- In plpgsql, because a function in SQL would be planned again in each call of tag.
    IF before IS NOT DISTINCT FROM after THEN
        RETURN NULL;
    END IF;
    words := concat_ws('; ',
        'added ' || (SELECT string_agg(t, ', ' ORDER BY t COLLATE "C") FROM unnest(after) AS t WHERE t <> ALL (coalesce(before, '{}'))),
        'removed ' || (SELECT string_agg(t, ', ' ORDER BY t COLLATE "C") FROM unnest(before) AS t WHERE t <> ALL (coalesce(after, '{}'))));
    RETURN CASE WHEN length(words) > 500 THEN left(words, 497) || '...' ELSE nullif(words, '') END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag_difference(text[], text[]) IS
    'For the history: which tags were added and removed, in up to 500 characters; null if they are the same.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.tag_difference(text[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.change_tags(of_topic integer, key bytea, device text, changes tokenkeeper.tag_change[]) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    one_token boolean := (SELECT tokenkeeper.has_one_token_per_device(t.topic) FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
    devices text[] COLLATE "C" := ARRAY[device];
    seen tokenkeeper.ledger;
    merged tokenkeeper.tag_change[];
    busy bytea;
    tokens bytea[];
    before tokenkeeper.ledger[];
    most integer;
BEGIN
    LOOP
        busy := NULL;
        IF key <> '' THEN
            SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
            IF NOT FOUND THEN
                -- The change may arrive before the registration.
                INSERT INTO tokenkeeper.ledger (topic_id, token_key) VALUES (of_topic, key) ON CONFLICT DO NOTHING;
                CONTINUE;
            END IF;
            devices := CASE WHEN one_token AND seen.device_id IS NOT NULL THEN ARRAY[seen.device_id] ELSE '{}' END;
        END IF;
        -- As in register: whoever holds a device never waits for a token. The lines are repeated and not a function, because the
        -- subtransaction must release all locks that its caller takes here, and ends with what the caller finds under them.
        BEGIN
            SELECT d.busy, d.tokens INTO busy, tokens FROM tokenkeeper.lock_devices(of_topic, devices, key) AS d;
            IF busy IS NOT NULL THEN
                RAISE EXCEPTION 'a token of the device is locked' USING ERRCODE = 'TK001';
            END IF;
            IF key <> '' AND NOT EXISTS (
                SELECT FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = of_topic AND l.token_key = key AND l.device_id IS NOT DISTINCT FROM seen.device_id) THEN
                RAISE EXCEPTION 'the token has another device now, or is gone' USING ERRCODE = 'TK001';
            END IF;
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            IF busy IS NOT NULL THEN
                -- Wait for it without holding anything, and do not keep it either.
                BEGIN
                    PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = busy FOR NO KEY UPDATE;
                    RAISE EXCEPTION 'the token is free' USING ERRCODE = 'TK001';
                EXCEPTION WHEN SQLSTATE 'TK001' THEN
                    NULL;
                END;
            END IF;
        END;
    END LOOP;
    before := ARRAY(SELECT l FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = ANY (tokens));
    PERFORM tokenkeeper.without_tag_changes(of_topic, tokens, '{}');
    IF key <> '' THEN
        UPDATE tokenkeeper.ledger AS l SET tag_changes = tokenkeeper.latest_tag_changes(l.tag_changes || changes, l.tags_at)
        WHERE l.topic_id = of_topic AND l.token_key = key
        RETURNING l.tag_changes INTO merged;
    ELSE
        UPDATE tokenkeeper.device AS d SET tag_changes = tokenkeeper.latest_tag_changes(d.tag_changes || changes, NULL)
        WHERE d.topic_id = of_topic AND d.device_id = devices[1]
        RETURNING d.tag_changes INTO merged;
    END IF;
    most := tokenkeeper.apply_tag_changes(of_topic, tokens);
    IF greatest(cardinality(merged), most) > 1000 THEN
        RAISE EXCEPTION '%', CASE
            WHEN most > 1000 THEN 'the token would have ' || most || ' tags, expected at most 1000'
            ELSE 'there would be changes of ' || cardinality(merged) || ' tags, expected at most 1000' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A registration with tags ends earlier changes.';
    END IF;
    -- A change of one token also concerns the current token of its device, whose history does not tell it, so that forget of the one erases it.
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT of_topic, l.token_key, 'tagged', 'tag',
           CASE WHEN key IN ('', l.token_key) THEN d.words ELSE 'through another token of its device' END, l.device_id, l.user_id,
           nullif(l.registered_at, '-infinity'), nullif(l.registered_at, '-infinity'),
           greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at),
           greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at)
    FROM unnest(before) AS b
    CROSS JOIN LATERAL (SELECT o.* FROM tokenkeeper.ledger AS o WHERE o.topic_id = of_topic AND o.token_key = b.token_key OFFSET 0) AS l
    CROSS JOIN LATERAL (SELECT tokenkeeper.tag_difference(b.tags, l.tags) AS words OFFSET 0) AS d
    WHERE d.words IS NOT NULL
    ORDER BY l.token_key;
    IF EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = ANY (tokens)
               AND l.registered_at > '-infinity' AND l.has_tag_changes AND (key <> '' OR l.superseded_at IS NULL)) THEN
        RETURN true;
    END IF;
    -- The registration may never come. The sweep deletes a token once it is not registered for long, or a device without tokens.
    IF merged IS NOT NULL AND NOT (CASE
        WHEN key <> '' THEN EXISTS (SELECT FROM tokenkeeper.ledger AS l
                                    WHERE l.topic_id = of_topic AND l.token_key = key AND l.registered_at > '-infinity')
        ELSE EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = devices[1] AND l.topic_id + 0 = of_topic) END) THEN
        INSERT INTO tokenkeeper.early_tag_change AS e (topic_id, device_id, token_key, noted_at)
        VALUES (of_topic, CASE WHEN key = '' THEN devices[1] ELSE '' END, key, clock_timestamp())
        ON CONFLICT ON CONSTRAINT early_tag_change_pkey DO UPDATE SET noted_at = excluded.noted_at;
    END IF;
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.change_tags(integer, bytea, text, tokenkeeper.tag_change[]) IS
    'Internal: applies changes of tags to a token, or, if its key is empty, to a device, and records them in the history of each token whose tags differ now. '
    'Returns whether that has a registered token.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.change_tags(integer, bytea, text, tokenkeeper.tag_change[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.tag(
    topic text,
    environment text DEFAULT 'production',
    token text DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    add text[] DEFAULT NULL,
    remove text[] DEFAULT NULL,
    changed_at timestamptz DEFAULT clock_timestamp()) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(tag.token);
    device text COLLATE "C" := tag.device_id;
    who text COLLATE "C" := tag.user_id;
    receipt timestamptz := clock_timestamp();
    -- As in register: an instant in the future counts as now.
    moment timestamptz := least(coalesce(tag.changed_at, receipt), receipt);
    changes tokenkeeper.tag_change[];
    fault text;
    of_topic integer;
    keys bytea[];
    tokens bigint := 0;
BEGIN
    IF num_nonnulls(tag.token, device, who) <> 1 THEN
        RAISE EXCEPTION '% of token, device_id and user_id are given, expected one', num_nonnulls(tag.token, device, who)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF tag.token IS NOT NULL AND key IS NULL THEN
        PERFORM tokenkeeper.raise_malformed_token(tag.token);
    END IF;
    fault := CASE
        WHEN octet_length(device) NOT BETWEEN 1 AND 512 THEN 'device_id is ' || octet_length(device) || ' bytes long, expected 1 to 512'
        WHEN octet_length(who) NOT BETWEEN 1 AND 512 THEN 'user_id is ' || octet_length(who) || ' bytes long, expected 1 to 512'
        WHEN NOT isfinite(tag.changed_at) THEN 'changed_at is ' || tag.changed_at || ', expected a finite instant'
        WHEN greatest(array_ndims(tag.add), array_ndims(tag.remove)) > 1
            THEN 'add or remove is an array of ' || greatest(array_ndims(tag.add), array_ndims(tag.remove)) || ' dimensions, expected one'
        WHEN greatest(cardinality(tag.add), cardinality(tag.remove)) > 1000
            THEN 'add or remove has ' || greatest(cardinality(tag.add), cardinality(tag.remove)) || ' elements, expected at most 1000'
        ELSE (SELECT 'a tag is ' || coalesce(octet_length(t) || ' bytes long', 'null') || ', expected 1 to 512 bytes'
              FROM unnest(tag.add || tag.remove) AS t WHERE t IS NULL OR octet_length(t) NOT BETWEEN 1 AND 512 LIMIT 1) END;
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    of_topic := tokenkeeper.ensure_topic(coalesce(tag.environment, 'production'), tag.topic);
    changes := tokenkeeper.latest_tag_changes(
        ARRAY(SELECT ROW(t, moment, true)::tokenkeeper.tag_change FROM unnest(tag.add) AS t)
        || ARRAY(SELECT ROW(t, moment, false)::tokenkeeper.tag_change FROM unnest(tag.remove) AS t), NULL);
    IF device IS NOT NULL AND tokenkeeper.has_one_token_per_device(tag.topic) THEN
        RETURN tokenkeeper.change_tags(of_topic, '', device, coalesce(changes, '{}'))::integer;
    END IF;
    keys := CASE
        WHEN key IS NOT NULL THEN ARRAY[key]
        WHEN device IS NOT NULL THEN ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.device_id = device AND l.topic_id + 0 = of_topic ORDER BY l.token_key)
        -- In the order of their devices, as everywhere.
        ELSE ARRAY(SELECT l.token_key FROM tokenkeeper.ledger AS l
                   WHERE l.user_id = who AND l.topic_id + 0 = of_topic ORDER BY l.device_id, l.token_key) END;
    FOREACH key IN ARRAY keys LOOP
        tokens := tokens + tokenkeeper.change_tags(of_topic, key, NULL, coalesce(changes, '{}'))::integer;
    END LOOP;
    RETURN tokens;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag(text, text, text, text, text, text[], text[], timestamptz) IS
    'Adds and removes tags of a token, of a device, or of each token that a user has now; in the caller''s transaction. Returns how many registered tokens '
    'it concerns. For each tag, the latest of the latest registration with tags and the latest change decides, in whatever order they arrive; at the same '
    'instant the change counts, and the removal before the addition. A change may be earlier than the first registration of the token or the device, which '
    'must follow within '
    'sweep.suppressed_retention; a user '
    'without tokens has none to change. A device''s next token has the changes of its former tokens. Each token whose tags differ afterwards has the event '
    'tagged. Raises 22023 for a malformed token, an unknown environment, a topic that is empty, over 512 bytes or not visible ASCII, an infinite instant, '
    'not exactly one of token, device_id and user_id, one of them that is empty or over 512 bytes, a tag that is null, empty or over 512 bytes, an array of '
    'several dimensions or with over 1000 elements, and over 1000 tags of a token.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.tag(text, text, text, text, text, text[], text[], timestamptz) FROM PUBLIC;
