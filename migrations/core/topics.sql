-- Topics: find them, create them, log their policies.
--
-- Locks: a new topic is one INSERT. Whoever creates the same topic at that moment waits for it. A call creates several topics in the order of topic and environment.

-- The planner inlines environment_fault and topic_fault: a batch calls them for each row.
CREATE OR REPLACE FUNCTION tokenkeeper.environment_fault(environment text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN (environment COLLATE "C" IN ('production', 'sandbox')) IS NOT TRUE
    THEN 'environment is ' || coalesce(quote_literal(left(environment, 20)), 'null') || ', expected ''production'' or ''sandbox''' END;
COMMENT ON FUNCTION tokenkeeper.environment_fault(text) IS 'Internal: what is wrong with the name of an environment; null if nothing.';

CREATE OR REPLACE FUNCTION tokenkeeper.is_token(topic text) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN coalesce(octet_length(tokenkeeper.parse_token(is_token.topic)) >= 64, false);
END
$$;
COMMENT ON FUNCTION tokenkeeper.is_token(text) IS
    'Internal: whether a topic is a device token: what parse_token reads as 32 bytes or more. A caller that mixes up its columns passes one, and topics stay '
    'in the statistics.';

CREATE OR REPLACE FUNCTION tokenkeeper.topic_fault(topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN coalesce(topic, '') COLLATE "C" = '' THEN 'topic is missing, expected the apns-topic header'
    WHEN octet_length(topic) > 512 THEN 'topic is ' || octet_length(topic)::text || ' bytes long, expected at most 512'
    -- Only the place: a caller that mixes up its columns passes a token.
    WHEN topic COLLATE "C" ~ '[^!-~]'
        THEN 'topic has a blank or a character that no header can carry at position '
             || (length(substring(topic COLLATE "C" FROM '^[!-~]*')) + 1)::text || ', expected visible ASCII'
    -- Most topics are shorter, and cost no call.
    WHEN octet_length(topic) >= 64 AND tokenkeeper.is_token(topic) THEN 'topic is a device token, expected the apns-topic header' END;
COMMENT ON FUNCTION tokenkeeper.topic_fault(text) IS
    'Internal: why a text is no topic (an apns-topic header of 1 to 512 visible ASCII characters, and no device token); null if it is one.';

-- Senders choose topics, other sessions their application_name, and APNs or what answers in its place the reasons.
CREATE OR REPLACE FUNCTION tokenkeeper.without_backticks(words text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN translate(words, '`', '''');
COMMENT ON FUNCTION tokenkeeper.without_backticks(text) IS
    'A text that others have chosen, for a message, with quotes in place of backticks: what stands in backticks there is a command of ours, which people '
    'copy.';

CREATE OR REPLACE FUNCTION tokenkeeper.raise_moved(topic text, moved_to text) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'topic % has moved to the database %', quote_literal(topic), quote_literal(moved_to)
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'The map of databases leads there: read it again.';
END
$$;
COMMENT ON FUNCTION tokenkeeper.raise_moved(text, text) IS 'Internal: raises 55000, and names the database that has the topic now.';

-- The planner inlines it: each registration calls it.
CREATE OR REPLACE FUNCTION tokenkeeper.is_here(topic text, moved_to text) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN moved_to IS NULL THEN true ELSE tokenkeeper.raise_moved(topic, moved_to) END;
COMMENT ON FUNCTION tokenkeeper.is_here(text, text) IS 'Internal: true. Raises 55000 for a topic that has moved.';

CREATE OR REPLACE FUNCTION tokenkeeper.ensure_topic(environment text, topic text) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text COLLATE "C" := ensure_topic.topic;
    env text COLLATE "C" := ensure_topic.environment;
    fault text := coalesce(tokenkeeper.environment_fault(env), tokenkeeper.topic_fault(name));
    found_id integer;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT t.topic_id INTO found_id FROM tokenkeeper.topic AS t
        WHERE t.topic = name AND t.environment = env AND tokenkeeper.is_here(t.topic, t.moved_to);
        IF FOUND THEN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                -- An older snapshot may show a topic that a sweep has deleted, or that has moved. Then this raises 40001.
                PERFORM FROM tokenkeeper.topic AS t WHERE t.topic_id = found_id FOR SHARE;
            END IF;
            RETURN found_id;
        END IF;
        INSERT INTO tokenkeeper.topic AS t (environment, topic) VALUES (env, name)
        ON CONFLICT DO NOTHING
        RETURNING t.topic_id INTO found_id;
        IF FOUND THEN
            RETURN found_id;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.ensure_topic(text, text) IS
    'Internal: the topic_id of an (environment, topic), created if it is new. Raises 22023 for an unknown environment or invalid topic, 55000 for a topic '
    'that has moved.';

CREATE OR REPLACE FUNCTION tokenkeeper.typing_distance(one text, other text, most integer) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    letters CONSTANT text[] := string_to_array(typing_distance.other COLLATE "C", NULL);
    letter text;
    above integer[] := ARRAY(SELECT generate_series(0, cardinality(letters)));
    row_of integer[];
BEGIN
    FOREACH letter IN ARRAY string_to_array(typing_distance.one COLLATE "C", NULL) LOOP
        row_of := above;
        row_of[1] := above[1] + 1;
        FOR n IN 1..cardinality(letters) LOOP
            row_of[n + 1] := least(above[n + 1] + 1, row_of[n] + 1, above[n] + (letter <> letters[n])::integer);
        END LOOP;
        above := row_of;
        IF most < ALL (above) THEN
            RETURN NULL;
        END IF;
    END LOOP;
    RETURN nullif(least(above[cardinality(letters) + 1], most + 1), most + 1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.typing_distance(text, text, integer) IS
    'Internal: how many letters must be typed, deleted or replaced to make one text the other (Levenshtein); null if more than most.';

CREATE OR REPLACE FUNCTION tokenkeeper.resembled_topic(topic text, environment text, is_registered boolean DEFAULT false) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    -- Longer names are not typed.
    SELECT k.topic FROM (
        SELECT t.topic, t.topic_id, least(length(resembled_topic.topic) / 5, 3) AS most FROM tokenkeeper.topic AS t
        WHERE t.environment = resembled_topic.environment COLLATE "C" AND t.topic <> resembled_topic.topic COLLATE "C"
          AND octet_length(resembled_topic.topic) <= 100
          AND abs(octet_length(t.topic) - octet_length(resembled_topic.topic)) <= least(octet_length(resembled_topic.topic) / 5, 3)
        ORDER BY abs(octet_length(t.topic) - octet_length(resembled_topic.topic)), t.topic LIMIT 300) AS k
    CROSS JOIN LATERAL (SELECT tokenkeeper.typing_distance(lower(k.topic COLLATE "C"), lower(resembled_topic.topic COLLATE "C"), k.most) AS edits OFFSET 0) AS d
    WHERE d.edits IS NOT NULL AND (NOT is_registered OR EXISTS (
        SELECT FROM tokenkeeper.token_count AS n WHERE n.topic_id = k.topic_id AND n.registered HAVING sum(n.tokens) > 0))
    ORDER BY d.edits, k.topic LIMIT 1
$$;
COMMENT ON FUNCTION tokenkeeper.resembled_topic(text, text, boolean) IS
    'Internal: the known topic of an environment that another one resembles most: at most three letters, and one of five, differ, without regard to case. '
    'Null if none does. is_registered: only one with registrations. Compares 300 topics of about its length.';

-- Whoever calls these raises the fault: each function in between would be three more lines of CONTEXT for the caller.
CREATE OR REPLACE FUNCTION tokenkeeper.find_topic(topic text, environment text, OUT topic_id integer, OUT fault text, OUT hint text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text COLLATE "C" := find_topic.topic;
    env text COLLATE "C" := find_topic.environment;
BEGIN
    SELECT t.topic_id INTO topic_id FROM tokenkeeper.topic AS t WHERE t.topic = name AND t.environment = env;
    IF FOUND THEN
        RETURN;
    END IF;
    -- The message below shows it.
    IF tokenkeeper.is_token(name) THEN
        fault := tokenkeeper.topic_fault(name);
        hint := 'The topic and the token may be mixed up.';
        RETURN;
    END IF;
    fault := format('topic %s is not known in environment %s', coalesce(quote_literal(left(name, 512)), 'null'), coalesce(quote_literal(left(env, 20)), 'null'));
    hint := coalesce(
        (SELECT 'It is known in environment ' || quote_literal(t.environment) || '.' FROM tokenkeeper.topic AS t WHERE t.topic = name LIMIT 1),
        'Did you mean ' || quote_literal(tokenkeeper.resembled_topic(name, env)) || '?',
        'tokenkeeper.topic_policy lists the known topics, for a reader or an operator.');
END
$$;
COMMENT ON FUNCTION tokenkeeper.find_topic(text, text) IS
    'Internal: the topic_id of an (environment, topic) that a person named; or what is wrong with it, and the known topic that it resembles.';

CREATE OR REPLACE FUNCTION tokenkeeper.known_topic(topic text, environment text) RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found record := tokenkeeper.find_topic(known_topic.topic, known_topic.environment);
BEGIN
    IF tokenkeeper.isolation_fault() IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.isolation_fault() USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    IF found.fault IS NOT NULL THEN
        RAISE EXCEPTION '%', found.fault USING ERRCODE = 'invalid_parameter_value', HINT = found.hint;
    END IF;
    RETURN found.topic_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.known_topic(text, text) IS
    'The topic_id of an (environment, topic) that an operator named. Raises 22023 if it is unknown, 25001 unless READ COMMITTED.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_topic() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    fault text := coalesce(tokenkeeper.environment_fault(new.environment), tokenkeeper.topic_fault(new.topic));
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF new.gate NOT IN ('enforce', 'observe') THEN
        RAISE EXCEPTION 'gate is %, expected ''enforce'' or ''observe'', or null for the default', quote_literal(left(new.gate, 20))
            USING ERRCODE = 'check_violation';
    END IF;
    -- After the last number come the first ones again.
    WHILE tg_op = 'INSERT' AND EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.topic_id = new.topic_id) LOOP
        new.topic_id := nextval('tokenkeeper.topic_topic_id_seq');
    END LOOP;
    RETURN new;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_topic() IS
    'Trigger: refuses a policy for an invalid topic, and an unknown gate. The message of a CHECK would show the topic, which may be a token, and the server '
    'would log it, and no message of a CHECK says what is expected. Skips numbers that are in use.';

CREATE OR REPLACE FUNCTION tokenkeeper.warn_of_no_topic() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Rows of this transaction: an INSERT ... ON CONFLICT fires the trigger, too.
    IF NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE age(t.xmin) <= 0) THEN
        RAISE WARNING 'the UPDATE matches no topic' USING HINT = 'tokenkeeper.topic_policy lists the known topics. INSERT adds one.';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.warn_of_no_topic() IS
    'Trigger: an UPDATE of topic_policy that changes nothing must not look like success: its topic or environment may be mistyped.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_policy() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tokenkeeper.operation (operation, environment, topic, message)
    SELECT 'policy_changed', new.environment, new.topic,
           string_agg(n.key || ' is ' || coalesce(n.value, 'the default') || ', was ' || coalesce(o.value, 'the default'), '; '
                      ORDER BY n.key)
    FROM jsonb_each_text(to_jsonb(new)) AS n JOIN jsonb_each_text(to_jsonb(old)) AS o USING (key)
    WHERE n.value IS DISTINCT FROM o.value;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_policy() IS 'Trigger: logs a changed topic_policy in operation.';

CREATE OR REPLACE FUNCTION tokenkeeper.ensure_topics(environments text[], topics text[], patience interval DEFAULT interval '10 ms') RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    begun_at timestamptz := clock_timestamp();
    found integer[] := ARRAY(
        SELECT (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = n.topic COLLATE "C" AND t.environment = n.environment COLLATE "C")
        FROM unnest(ensure_topics.topics, ensure_topics.environments) WITH ORDINALITY AS n (topic, environment, i) ORDER BY n.i);
    one integer;
BEGIN
    IF array_position(found, NULL) IS NULL THEN
        RETURN found;
    END IF;
    -- An application may be adding the same new topic, and the INSERT would wait for it.
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', (extract(epoch FROM patience) * 1000)::integer || 'ms', true);
    END IF;
    FOR one IN
        SELECT n.i FROM unnest(ensure_topics.topics, ensure_topics.environments) WITH ORDINALITY AS n (topic, environment, i)
        WHERE found[n.i] IS NULL ORDER BY n.topic COLLATE "C", n.environment COLLATE "C"
    LOOP
        BEGIN
            found[one] := tokenkeeper.ensure_topic(environments[one], topics[one]);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
        EXIT WHEN clock_timestamp() > begun_at + interval '100 ms';
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
    RETURN found;
END
$$;
COMMENT ON FUNCTION tokenkeeper.ensure_topics(text[], text[], interval) IS
    'The topic_ids of these (environment, topic), created if they are new. Null for a new one that another session is adding, after this patience, and for '
    'those left after 100 ms. With a null patience, waits as long as lock_timeout says.';
