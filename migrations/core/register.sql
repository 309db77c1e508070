-- What an application reports: register and unregister, for one token or many.
--
-- The usual launch is one HOT update of one row, and reads no other row of the ledger.
--
-- Locks: register waits for new topics, then for each of its tokens by (topic_id, token_key). Then it locks the free tokens of their devices.
--
-- Collation: a function inherits the collation of its arguments. An index of another collation would then not be used, and "~" refuses a
-- nondeterministic one. So each function works on variables that are COLLATE "C".

-- Inlined by the planner: a valid registration costs no function call. STABLE, as array_to_string is: an IMMUTABLE function that calls it is not inlined, and costs
-- each registration 24 microseconds.
CREATE OR REPLACE FUNCTION tokenkeeper.is_sound_registration(registered_at timestamptz, device_id text, user_id text, tags text[]) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(isfinite(registered_at), true) AND coalesce(octet_length(device_id), 0) <= 512 AND coalesce(octet_length(user_id), 0) <= 512
    AND (tags IS NULL OR (cardinality(tags) <= 1000 AND coalesce(array_ndims(tags), 1) = 1 AND array_position(tags, NULL) IS NULL
                          AND array_position(tags, '' COLLATE "C") IS NULL AND octet_length(array_to_string(tags, '')) <= 512));
COMMENT ON FUNCTION tokenkeeper.is_sound_registration(timestamptz, text, text, text[]) IS
    'True only if registration_fault would find nothing. False for more than 512 bytes of tags.';

CREATE OR REPLACE FUNCTION tokenkeeper.registration_fault(registered_at timestamptz, device_id text, user_id text, tags text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN CASE
        WHEN NOT isfinite(registered_at) THEN 'registered_at is ' || registered_at || ', expected a finite instant'
        WHEN octet_length(device_id) > 512 THEN 'device_id is ' || octet_length(device_id) || ' bytes long, expected at most 512'
        WHEN octet_length(user_id) > 512 THEN 'user_id is ' || octet_length(user_id) || ' bytes long, expected at most 512'
        WHEN array_ndims(tags) > 1 THEN 'tags is an array of ' || array_ndims(tags) || ' dimensions, expected one'
        WHEN cardinality(tags) > 1000 THEN 'tags has ' || cardinality(tags) || ' elements, expected at most 1000'
        ELSE (SELECT 'a tag is ' || coalesce(octet_length(t.tag) || ' bytes long', 'null') || ', expected 1 to 512 bytes'
              FROM unnest(tags) AS t (tag) WHERE t.tag IS NULL OR octet_length(t.tag) NOT BETWEEN 1 AND 512 LIMIT 1) END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.registration_fault(timestamptz, text, text, text[]) IS
    'What is wrong with these values of a registration, and what was expected; null if nothing.';

CREATE OR REPLACE FUNCTION tokenkeeper.sound_name(name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN octet_length(name) > 512 THEN '' ELSE name END;
COMMENT ON FUNCTION tokenkeeper.sound_name(text) IS 'A device_id or user_id; empty if register would refuse it.';

CREATE OR REPLACE FUNCTION tokenkeeper.sound_tags(tags text[]) RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN tags IS NOT NULL
    THEN ARRAY(SELECT t.tag FROM unnest(tags) WITH ORDINALITY AS t (tag, n) WHERE octet_length(t.tag) BETWEEN 1 AND 512 ORDER BY t.n LIMIT 1000) END;
COMMENT ON FUNCTION tokenkeeper.sound_tags(text[]) IS 'Tags without those that register would refuse.';

CREATE OR REPLACE FUNCTION tokenkeeper.merge_one(reported tokenkeeper.token_report, receipt timestamptz) RETURNS tokenkeeper.device_check[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    was tokenkeeper.ledger;
    is_now tokenkeeper.ledger;
    -- Whether this transaction has written the token before.
    is_own boolean := false;
    who CONSTANT text COLLATE "C" := CASE WHEN reported.cause IS NULL THEN reported.user_id END;
BEGIN
    LOOP
        SELECT l.* INTO was FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        -- An unknown token has the facts of the report. Cheaper than merged.
        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, unregistered_by_app_at, returned_at, unresolved, device_id, device_at,
            user_id, user_at, tags, tags_at)
        VALUES (reported.topic_id, reported.token_key, coalesce(reported.registered_at, '-infinity'), reported.invalidated_at, reported.returned_at,
            reported.one_token IS TRUE AND coalesce(reported.device_id <> '', false), nullif(reported.device_id, ''),
            CASE WHEN reported.device_id IS NOT NULL THEN reported.device_at END, nullif(who, ''), CASE WHEN who IS NOT NULL THEN reported.user_at END,
            reported.tags, CASE WHEN reported.tags IS NOT NULL THEN reported.tags_at END)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id, registered_after, invalidated_after)
            VALUES (reported.topic_id, reported.token_key, coalesce(reported.cause, 'registered'), coalesce(reported.cause, 'registration'),
                nullif(reported.device_id, ''), nullif(who, ''), reported.source_id, reported.registered_at, reported.invalidated_at);
            INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
            VALUES (1, reported.topic_id, reported.registered_at IS NOT NULL, coalesce(reported.cause, 'active'));
            IF reported.cause IS NOT NULL THEN
                INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) VALUES (receipt, reported.topic_id, reported.token_key)
                ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since;
                INSERT INTO tokenkeeper.receipt (received_at, invalidated_at, topic_id, counted, cause, token_key)
                VALUES (reported.received_at, reported.invalidated_at, reported.topic_id, false, reported.cause, reported.token_key);
            END IF;
            RETURN CASE WHEN reported.one_token AND reported.device_id <> ''
                        THEN ARRAY[ROW(reported.topic_id, reported.device_id, reported.token_key, true)::tokenkeeper.device_check] ELSE '{}' END;
        END IF;
        -- Another session has inserted it meanwhile.
    END LOOP;
    IF reported.cause IS NOT NULL AND (reported.user_id <> was.user_id) IS NOT TRUE THEN
        -- As keep_receipts, for one.
        INSERT INTO tokenkeeper.receipt (received_at, invalidated_at, topic_id, counted, cause, token_key)
        VALUES (reported.received_at, reported.invalidated_at, reported.topic_id, false, reported.cause, reported.token_key);
        IF was.suppressed THEN
            PERFORM tokenkeeper.thin_receipts(ARRAY[reported.topic_id], ARRAY[reported.token_key]);
        END IF;
    END IF;
    IF was.unresolved THEN
        -- True also for what a transaction has committed that began later. Then the devices are compared once more.
        is_own := (SELECT age(l.xmin) <= 0 FROM tokenkeeper.ledger AS l WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key);
        -- The second registration of most tokens: it is still the only one of its device, and nothing is left to compare. Not while others cannot see it.
        IF NOT is_own AND current_setting('transaction_isolation') = 'read committed' THEN
            was.unresolved := (SELECT count(*) FROM (
                SELECT FROM tokenkeeper.ledger AS o WHERE o.device_id = was.device_id AND o.topic_id + 0 = was.topic_id LIMIT 2) AS o) > 1;
        END IF;
    END IF;
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = m.registered_at, unregistered_by_app_at = m.unregistered_by_app_at, returned_at = m.returned_at,
        superseded_at = m.superseded_at, unresolved = m.unresolved, of_constant = m.of_constant, device_id = m.device_id, device_at = m.device_at,
        user_id = m.user_id, user_at = m.user_at, tags = m.tags, tags_at = m.tags_at
    FROM tokenkeeper.merged(was, reported) AS m
    WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key
    RETURNING l.* INTO is_now;
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, source_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT * FROM tokenkeeper.event_of(was, is_now, reported);
    IF was.suppressed OR is_now.suppressed OR was.registered_at = '-infinity' THEN
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state) SELECT * FROM tokenkeeper.count_change(was, is_now);
    END IF;
    IF is_now.suppressed AND NOT was.suppressed THEN
        INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) VALUES (receipt, is_now.topic_id, is_now.token_key)
        ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since;
    ELSIF was.suppressed AND NOT is_now.suppressed THEN
        DELETE FROM tokenkeeper.suppression AS s WHERE s.topic_id = is_now.topic_id AND s.token_key = is_now.token_key;
    END IF;
    RETURN ARRAY(
        SELECT ROW(c.topic_id, c.device_id, c.token_key, c.is_new OR (is_own AND c.token_key IS NOT NULL AND is_now.superseded_at IS NULL)
               )::tokenkeeper.device_check
        FROM tokenkeeper.checks_of(was, is_now, reported) AS c);
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_one(tokenkeeper.token_report, timestamptz) IS
    'Internal: merges a registration or a logout of one token into the ledger and the history. Waits for the token, and keeps it locked. Returns the devices '
    'for resolve_devices.';

CREATE OR REPLACE FUNCTION tokenkeeper.register(
    token text,
    topic text,
    environment text DEFAULT 'production',
    registered_at timestamptz DEFAULT clock_timestamp(),
    device_id text DEFAULT NULL,
    tags text[] DEFAULT NULL,
    user_id text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(register.token);
    name text COLLATE "C" := register.topic;
    env text COLLATE "C" := coalesce(register.environment, 'production');
    -- Null says nothing, an empty one clears.
    new_device text COLLATE "C" := tokenkeeper.device_name(register.device_id);
    new_user text COLLATE "C" := register.user_id;
    new_tags text[] COLLATE "C" := register.tags;
    receipt timestamptz := clock_timestamp();
    -- An instant in the future counts as the instant of receipt: one wrong clock must not make a token immortal.
    moment timestamptz := least(coalesce(register.registered_at, receipt), receipt);
    fault text;
    of_topic integer;
    observes boolean;
    checks tokenkeeper.device_check[];
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.token_fault(register.token) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT tokenkeeper.is_sound_registration(register.registered_at, new_device, new_user, new_tags) THEN
        fault := tokenkeeper.registration_fault(register.registered_at, new_device, new_user, new_tags);
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    -- The most frequent write, at each launch: one HOT update, no event. Only for a token known to be its device's only current one, of the same user.
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = moment,
        device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE moment END,
        tags = coalesce(new_tags, l.tags),
        tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE moment END,
        user_at = CASE WHEN new_user IS NULL THEN l.user_at ELSE moment END
    WHERE l.topic_id = (SELECT t.topic_id FROM tokenkeeper.topic AS t
                        WHERE t.topic = name AND t.environment = env AND tokenkeeper.is_here(t.topic, t.moved_to))
      AND l.token_key = key
      AND NOT l.suppressed AND NOT l.unresolved AND l.registered_at > '-infinity' AND l.registered_at < moment
      AND (new_device IS NULL OR (new_device = coalesce(l.device_id, '') AND coalesce(l.device_at < moment, true)))
      AND (new_tags IS NULL OR coalesce(l.tags_at < moment, true))
      AND (new_user IS NULL OR (new_user = coalesce(l.user_id, '') AND coalesce(l.user_at < moment, true)));
    IF FOUND THEN
        RETURN true;
    END IF;

    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe' INTO of_topic, observes FROM tokenkeeper.topic AS t
    WHERE t.topic = name AND t.environment = env AND tokenkeeper.is_here(t.topic, t.moved_to);
    IF of_topic IS NULL OR current_setting('transaction_isolation') <> 'read committed' THEN
        of_topic := tokenkeeper.ensure_topic(env, name);
    END IF;

    checks := tokenkeeper.merge_one(tokenkeeper.registration_of(
        0, of_topic, key, tokenkeeper.has_one_token_per_device(name), moment, new_device, new_user, new_tags, moment), receipt);
    IF checks <> '{}' THEN
        PERFORM tokenkeeper.resolve_devices(checks, receipt);
    END IF;
    RETURN coalesce(observes, false) OR NOT (SELECT l.suppressed FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key);
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[], text) IS
    'Records a registration, in the caller''s transaction; returns whether the token is sendable now. Call it at each launch of the app: a registration '
    'outranks earlier 410s, also those that arrive later. registered_at: a future instant counts as now. device_id: supersedes the device''s tokens of '
    'this topic that were registered earlier, except for Live Activities and controls; its new token takes over the tags. Null device_id, user_id or tags '
    'keep the current value, empty ones clear it. Raises 55000, and 22023 for a token that cannot be read, an unknown environment, a topic that is not 1 '
    'to 512 visible ASCII characters or is a device token, an infinite instant, a device_id, user_id or tag over 512 bytes, a null or empty tag, over '
    '1000 tags, or an array of several dimensions.';

CREATE OR REPLACE FUNCTION tokenkeeper.register(registrations tokenkeeper.new_registration[]) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    total CONSTANT integer := coalesce(cardinality(registrations), 0);
    one tokenkeeper.new_registration;
    reported tokenkeeper.token_report;
    all_said tokenkeeper.token_report[] := '{}';
    checks tokenkeeper.device_check[] := '{}';
    receipt timestamptz := clock_timestamp();
    moment timestamptz := receipt;
    fault text;
BEGIN
    IF total > 1000 THEN
        RAISE EXCEPTION 'registrations has % elements, expected at most 1000', total
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table tokenkeeper.registration takes any number of rows.';
    END IF;
    FOR n IN 1..total LOOP
        one := registrations[n];
        one.environment := coalesce(one.environment, 'production');
        one.device_id := tokenkeeper.device_name(one.device_id);
        fault := coalesce(tokenkeeper.token_fault(one.token), tokenkeeper.registration_fault(one.registered_at, one.device_id, one.user_id, one.tags),
                          tokenkeeper.environment_fault(one.environment), tokenkeeper.topic_fault(one.topic));
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION 'registration %: %', n, fault USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- A logout and a login without instants count in the order given.
        moment := greatest(clock_timestamp(), moment + interval '1 microsecond');
        one.registered_at := least(coalesce(one.registered_at, moment), moment);
        reported := CASE WHEN one.unregistered THEN tokenkeeper.invalidation_of(
                n, NULL, tokenkeeper.token_key(one.token), 'unregistered_by_app', one.registered_at, NULL, receipt, user_id => one.user_id)
            ELSE tokenkeeper.registration_of(n, NULL, tokenkeeper.token_key(one.token), tokenkeeper.has_one_token_per_device(one.topic), one.registered_at,
                one.device_id, one.user_id, one.tags, one.registered_at) END;
        all_said := all_said || reported;
    END LOOP;
    -- New topics, and then tokens, in one order everywhere.
    all_said := ARRAY(
        SELECT ROW(s.n, t.topic_id, s.token_key, s.one_token, s.registered_at, s.returned_at, s.device_id, s.device_at, s.user_id, s.user_at,
                   s.tags, s.tags_at, s.cause, s.invalidated_at, s.reason, s.received_at, s.released, s.source_id)::tokenkeeper.token_report
        FROM unnest(all_said) AS s
        JOIN (SELECT o.topic, o.environment, tokenkeeper.ensure_topic(o.environment, o.topic) AS topic_id
              FROM (SELECT DISTINCT r.topic COLLATE "C" AS topic, coalesce(r.environment, 'production') COLLATE "C" AS environment
                    FROM unnest(registrations) AS r ORDER BY 1, 2 OFFSET 0) AS o OFFSET 0) AS t
          ON t.topic = registrations[s.n].topic COLLATE "C" AND t.environment = coalesce(registrations[s.n].environment, 'production') COLLATE "C"
        ORDER BY t.topic_id, s.token_key, s.n);
    FOREACH reported IN ARRAY all_said LOOP
        checks := checks || tokenkeeper.merge_one(reported, receipt);
    END LOOP;
    -- Only when all tokens of the call are locked.
    PERFORM tokenkeeper.resolve_devices(checks, receipt);
    RETURN ARRAY(
        SELECT NOT l.suppressed OR t.gate IS NOT DISTINCT FROM 'observe'
        FROM unnest(all_said) AS s
        CROSS JOIN LATERAL (SELECT k.suppressed FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key OFFSET 0) AS l
        JOIN tokenkeeper.topic AS t ON t.topic_id = s.topic_id
        ORDER BY s.n);
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(tokenkeeper.new_registration[]) IS
    'Records up to 1000 registrations and logouts, as register and unregister do. Returns whether each token is sendable now, in the order given. Raises '
    '55000; 22023 for over 1000 elements, or for the first one that register refuses, with its position. Then it records nothing.';

CREATE OR REPLACE FUNCTION tokenkeeper.unregister(
    token text DEFAULT NULL,
    topic text DEFAULT NULL,
    environment text DEFAULT 'production',
    at timestamptz DEFAULT clock_timestamp(),
    user_id text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(unregister.token);
    name text COLLATE "C" := unregister.topic;
    env text COLLATE "C" := coalesce(unregister.environment, 'production');
    who text COLLATE "C" := unregister.user_id;
    receipt timestamptz := clock_timestamp();
    moment timestamptz := least(coalesce(unregister.at, receipt), receipt);
    of_topic integer;
    one record;
    tokens bigint := 0;
BEGIN
    IF key IS NULL AND (unregister.token IS NOT NULL OR who IS NULL) THEN
        RAISE EXCEPTION '%', tokenkeeper.token_fault(unregister.token) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(unregister.at) OR octet_length(who) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION '%', CASE WHEN isfinite(unregister.at) THEN 'user_id is ' || octet_length(who) || ' bytes long, expected 1 to 512'
                                  ELSE 'at is ' || unregister.at || ', expected a finite instant' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF key IS NOT NULL THEN
        of_topic := tokenkeeper.ensure_topic(env, name);
    ELSIF coalesce(tokenkeeper.environment_fault(env), CASE WHEN name IS NOT NULL THEN tokenkeeper.topic_fault(name) END) IS NOT NULL THEN
        RAISE EXCEPTION '%', coalesce(tokenkeeper.environment_fault(env), tokenkeeper.topic_fault(name)) USING ERRCODE = 'invalid_parameter_value';
    ELSIF name IS NOT NULL THEN
        of_topic := (SELECT t.topic_id FROM tokenkeeper.topic AS t
                     WHERE t.topic = name AND t.environment = env AND tokenkeeper.is_here(t.topic, t.moved_to));
        IF of_topic IS NULL THEN
            RETURN 0;
        END IF;
    END IF;
    IF key IS NOT NULL THEN
        IF who IS NOT NULL THEN
            -- It may belong to another person now.
            PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key AND l.user_id <> who FOR NO KEY UPDATE;
            IF FOUND THEN
                RETURN 0;
            END IF;
        END IF;
        PERFORM tokenkeeper.merge_one(
            tokenkeeper.invalidation_of(0, of_topic, key, 'unregistered_by_app', moment, NULL, receipt, user_id => who), receipt);
        RETURN 1;
    END IF;
    FOR one IN
        SELECT l.topic_id, l.token_key FROM tokenkeeper.ledger AS l JOIN tokenkeeper.topic AS t ON t.topic_id = l.topic_id
        -- Of a topic that has moved, another database logs out.
        WHERE l.user_id = who AND coalesce(l.topic_id + 0 = of_topic, of_topic IS NULL) AND t.moved_to IS NULL ORDER BY 1, 2
    LOOP
        PERFORM FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = one.topic_id AND l.token_key = one.token_key AND l.user_id = who FOR NO KEY UPDATE;
        CONTINUE WHEN NOT FOUND;
        PERFORM tokenkeeper.merge_one(
            tokenkeeper.invalidation_of(0, one.topic_id, one.token_key, 'unregistered_by_app', moment, NULL, receipt, user_id => who), receipt);
        tokens := tokens + 1;
    END LOOP;
    RETURN tokens;
END
$$;
COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz, text) IS
    'Records a logout, in the caller''s transaction: the token is suppressed until a later registration. With a user_id, only if the token is not another '
    'user''s by now. Without a token, logs out each token of the user: in the topic given, or in all topics and environments. Returns how many tokens. '
    'Raises 55000, and 22023 for what register refuses, or an empty user_id.';
