-- Changes of tags: the new set is reported with the instant of the call, as a registration reports tags.
--
-- Locks: as register.

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
        'added ' || (SELECT string_agg(DISTINCT t COLLATE "C", ', ' ORDER BY t COLLATE "C") FROM unnest(after) AS t WHERE t <> ALL (coalesce(before, '{}'))),
        'removed ' || (SELECT string_agg(DISTINCT t COLLATE "C", ', ' ORDER BY t COLLATE "C") FROM unnest(before) AS t WHERE t <> ALL (coalesce(after, '{}'))));
    RETURN CASE WHEN length(words) > 500 THEN left(words, 497) || '...' ELSE nullif(words, '') END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag_difference(text[], text[]) IS
    'For the history: which tags were added and removed, in up to 500 characters; null if they are the same.';

CREATE OR REPLACE FUNCTION tokenkeeper.change_tags(of_topic integer, key bytea, add text[], remove text[], receipt timestamptz)
RETURNS tokenkeeper.device_check
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    was tokenkeeper.ledger;
    result text[] COLLATE "C";
    -- Whether this transaction has written the token before, so that others do not see its device.
    is_own boolean := (SELECT age(l.xmin) <= 0 FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key);
BEGIN
    SELECT l.* INTO STRICT was FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
    result := ARRAY(SELECT t.tag FROM unnest(was.tags) WITH ORDINALITY AS t (tag, n) WHERE t.tag <> ALL (coalesce(remove, '{}')) ORDER BY t.n)
        || ARRAY(SELECT DISTINCT t.tag COLLATE "C" FROM unnest(add) AS t (tag)
                 WHERE t.tag <> ALL (coalesce(was.tags, '{}')) AND t.tag <> ALL (coalesce(remove, '{}')) ORDER BY 1);
    IF cardinality(result) > 1000 THEN
        RAISE EXCEPTION 'the token would have % tags, expected at most 1000', cardinality(result) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The call counts, even if a clock was set back.
    UPDATE tokenkeeper.ledger AS l SET tags = result, tags_at = greatest(receipt, l.tags_at + interval '1 microsecond')
    WHERE l.topic_id = of_topic AND l.token_key = key;
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT of_topic, key, 'tagged', 'tag', d.words, was.device_id, was.user_id, was.registered_at, was.registered_at,
           tokenkeeper.invalidated_at(was), tokenkeeper.invalidated_at(was)
    FROM (SELECT tokenkeeper.tag_difference(was.tags, result) AS words) AS d WHERE d.words IS NOT NULL;
    -- Other tokens of its device take these tags, too; if it is known to be the only current one, there are none.
    RETURN CASE WHEN was.device_id IS NOT NULL AND (was.unresolved OR was.superseded_at IS NOT NULL)
                THEN ROW(of_topic, was.device_id, key, is_own AND was.superseded_at IS NULL)::tokenkeeper.device_check END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.change_tags(integer, bytea, text[], text[], timestamptz) IS
    'Internal: changes the tags of a token, which the caller has locked, and records it in the history. Returns its device, if resolve_devices must compare '
    'it.';

CREATE OR REPLACE FUNCTION tokenkeeper.tag(
    topic text,
    environment text DEFAULT 'production',
    token text DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    add text[] DEFAULT NULL,
    remove text[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(tag.token);
    device text COLLATE "C" := tokenkeeper.device_name(tag.device_id);
    who text COLLATE "C" := tag.user_id;
    env text COLLATE "C" := coalesce(tag.environment, 'production');
    name text COLLATE "C" := tag.topic;
    receipt timestamptz := clock_timestamp();
    fault text;
    of_topic integer;
    keys bytea[];
    device_check tokenkeeper.device_check;
    checks tokenkeeper.device_check[] := '{}';
    tokens bigint := 0;
BEGIN
    IF num_nonnulls(tag.token, tag.device_id, who) <> 1 THEN
        RAISE EXCEPTION '% of token, device_id and user_id are given, expected one', num_nonnulls(tag.token, tag.device_id, who)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF tag.token IS NOT NULL AND key IS NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.token_fault(tag.token) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    fault := CASE
        WHEN octet_length(device) NOT BETWEEN 1 AND 512 THEN 'device_id is ' || octet_length(device) || ' bytes long, expected 1 to 512'
        WHEN octet_length(who) NOT BETWEEN 1 AND 512 THEN 'user_id is ' || octet_length(who) || ' bytes long, expected 1 to 512'
        WHEN greatest(array_ndims(tag.add), array_ndims(tag.remove)) > 1
            THEN 'add or remove is an array of ' || greatest(array_ndims(tag.add), array_ndims(tag.remove)) || ' dimensions, expected one'
        WHEN greatest(cardinality(tag.add), cardinality(tag.remove)) > 1000
            THEN 'add or remove has ' || greatest(cardinality(tag.add), cardinality(tag.remove)) || ' elements, expected at most 1000'
        ELSE coalesce(tokenkeeper.environment_fault(env), tokenkeeper.topic_fault(name),
                      tokenkeeper.registration_fault(NULL, NULL, NULL, tag.add), tokenkeeper.registration_fault(NULL, NULL, NULL, tag.remove)) END;
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- An unknown topic has no token.
    of_topic := (SELECT t.topic_id FROM tokenkeeper.topic AS t
                 WHERE t.topic = name AND t.environment = env AND tokenkeeper.is_here(t.topic, t.moved_to));
    IF device IS NOT NULL AND tokenkeeper.has_one_token_per_device(name) AND (
        SELECT count(*) > 20 OR bool_or(l.of_constant) FROM (
            SELECT o.of_constant FROM tokenkeeper.ledger AS o WHERE o.device_id = device AND o.topic_id + 0 = of_topic LIMIT 21) AS l) THEN
        RAISE EXCEPTION 'device_id has or had more than 20 tokens: it is a constant, and names no device' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Of a device and of a user, the current tokens: others take their tags from these.
    keys := CASE
        WHEN key IS NOT NULL THEN ARRAY[key]
        WHEN who IS NULL THEN ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL ORDER BY l.token_key)
        ELSE ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.user_id = who AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL ORDER BY l.token_key) END;
    FOREACH key IN ARRAY keys LOOP
        -- It may be another device's or user's by now.
        PERFORM FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = of_topic AND l.token_key = key AND l.registered_at > '-infinity'
          AND (device IS NULL OR (l.device_id = device AND l.superseded_at IS NULL)) AND (who IS NULL OR l.user_id = who)
        FOR NO KEY UPDATE;
        CONTINUE WHEN NOT FOUND;
        device_check := tokenkeeper.change_tags(of_topic, key, tag.add, tag.remove, receipt);
        IF device_check.device_id IS NOT NULL THEN
            checks := checks || device_check;
        END IF;
        tokens := tokens + 1;
    END LOOP;
    PERFORM tokenkeeper.resolve_devices(checks, receipt);
    RETURN tokens;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tag(text, text, text, text, text, text[], text[]) IS
    'Adds and removes tags, in the caller''s transaction, of a token, of a device''s current token, or of each current token of a user: give exactly one. '
    'Returns how many registered tokens that concerns; with 0, nothing is remembered. A tag both added and removed is removed. The tags count from now, '
    'and pass to the device''s next token. Raises 55000, and 22023 for what register refuses, an empty device_id or user_id, a device_id that is a '
    'constant, an array of over 1000 elements, or over 1000 tags of a token.';
