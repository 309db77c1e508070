-- Many registrations in one call, for callers that need to know at once what was refused. Others write to the queue (0008_registration).
--
-- Locks: those of 20_registration, for all entries together. New tokens come first, in the order of their keys, as rows that say nothing yet; then all
-- devices, in order. From then on a session that waits for one of these devices holds no token that is waited for here, so two calls never deadlock.
-- A register may hold a token while it waits for one of these devices. So with the devices locked, this waits for a token only within half of
-- deadlock_timeout; then it releases everything, the other goes on, and it begins again.

CREATE OR REPLACE FUNCTION tokenkeeper.read_registration(
    entry jsonb, default_topic text, default_environment text, base64 boolean, OUT registration tokenkeeper.registration, OUT error text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- An instant without a time zone is in UTC, whatever the session says.
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$
DECLARE
    texts CONSTANT text[] := '{environment,topic,token,registered_at,device_id,user_id}';
    field record;
BEGIN
    IF jsonb_typeof(entry) IS DISTINCT FROM 'object' THEN
        error := 'the entry is ' || coalesce(jsonb_typeof(entry), 'null') || ', expected an object';
        RETURN;
    END IF;
    FOR field IN SELECT j.key, j.value, jsonb_typeof(j.value) AS type FROM jsonb_each(entry) AS j WHERE jsonb_typeof(j.value) <> 'null' LOOP
        error := CASE
            WHEN field.key = ANY (texts) THEN CASE WHEN field.type <> 'string' THEN field.key || ' is of type ' || field.type || ', expected string' END
            WHEN field.key = 'unregistered' THEN CASE WHEN field.type <> 'boolean' THEN 'unregistered is of type ' || field.type || ', expected boolean' END
            WHEN field.key = 'tags' THEN CASE
                WHEN field.type <> 'array' THEN 'tags is of type ' || field.type || ', expected array'
                WHEN jsonb_array_length(field.value) > 1000 THEN 'tags has ' || jsonb_array_length(field.value) || ' elements, expected at most 1000'
                ELSE (SELECT 'a tag is ' || CASE WHEN t.type = 'string' THEN octet_length(t.tag) || ' bytes long' ELSE 'of type ' || t.type END
                          || ', expected a string of 1 to 512 bytes'
                      FROM (SELECT jsonb_typeof(e.value) AS type, e.value #>> '{}' AS tag FROM jsonb_array_elements(field.value) AS e (value)) AS t
                      WHERE t.type <> 'string' OR octet_length(t.tag) NOT BETWEEN 1 AND 512 LIMIT 1) END
            -- A misspelled key must not be ignored.
            ELSE 'the key is ' || quote_literal(left(field.key, 40)) || ', expected environment, topic, token, registered_at, device_id, user_id, tags '
                'or unregistered' END;
        IF error IS NOT NULL THEN
            RETURN;
        END IF;
    END LOOP;
    registration.environment := coalesce(entry ->> 'environment', default_environment, 'production');
    registration.topic := coalesce(entry ->> 'topic', default_topic);
    registration.token := tokenkeeper.parse_token(entry ->> 'token', base64);
    registration.device_id := entry ->> 'device_id';
    registration.user_id := entry ->> 'user_id';
    registration.unregistered := coalesce((entry ->> 'unregistered')::boolean, false);
    IF jsonb_typeof(entry -> 'tags') = 'array' THEN
        registration.tags := ARRAY(SELECT t.tag FROM jsonb_array_elements_text(entry -> 'tags') WITH ORDINALITY AS t (tag, n) ORDER BY t.n);
    END IF;
    error := coalesce(
        CASE WHEN registration.token IS NULL THEN tokenkeeper.token_fault(entry ->> 'token', base64) END,
        tokenkeeper.environment_fault(registration.environment), tokenkeeper.topic_fault(registration.topic), CASE
        WHEN octet_length(registration.device_id) > 512
            THEN 'device_id is ' || octet_length(registration.device_id) || ' bytes long, expected at most 512'
        WHEN octet_length(registration.user_id) > 512
            THEN 'user_id is ' || octet_length(registration.user_id) || ' bytes long, expected at most 512' END);
    IF error IS NOT NULL THEN
        RETURN;
    END IF;
    BEGIN
        registration.registered_at := (entry ->> 'registered_at')::timestamptz;
    EXCEPTION WHEN data_exception THEN
        error := 'registered_at is ' || quote_literal(left(entry ->> 'registered_at', 40)) || ', expected an instant such as 2026-01-31T23:59:59Z';
        RETURN;
    END;
    IF NOT isfinite(registration.registered_at) THEN
        error := 'registered_at is ' || registration.registered_at || ', expected a finite instant';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_registration(jsonb, text, text, boolean) IS
    'Reads an entry of register_many: the registration, with its token in hex; or what is wrong with the entry, and what was expected.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.read_registration(jsonb, text, text, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.devices_to_register(
    understood tokenkeeper.registration[], of_row integer[], of_topic integer[], keys bytea[]) RETURNS TABLE (topic_id integer, device_id text)
LANGUAGE plpgsql STABLE ROWS 100
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT DISTINCT d.topic_id, d.device_id FROM (
            SELECT k.topic_id, unnest(ARRAY[CASE WHEN NOT r.unregistered THEN r.device_id COLLATE "C" END, l.device_id]) AS device_id
            FROM unnest(of_row, of_topic, keys) AS k (n, topic_id, key)
            CROSS JOIN LATERAL unnest(understood[k.n:k.n]) AS r
            CROSS JOIN LATERAL (
                SELECT o.device_id FROM tokenkeeper.ledger AS o WHERE o.topic_id = k.topic_id AND o.token_key = k.key OFFSET 0) AS l
            WHERE tokenkeeper.has_one_token_per_device(r.topic)) AS d
        WHERE d.device_id <> ''
        ORDER BY 1, 2;
END
$$;
COMMENT ON FUNCTION tokenkeeper.devices_to_register(tokenkeeper.registration[], integer[], integer[], bytea[]) IS
    'The devices that entries of register_many name, and those that their tokens belong to, in the order in which they are locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.devices_to_register(tokenkeeper.registration[], integer[], integer[], bytea[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.register_many(
    registrations jsonb,
    topic text DEFAULT NULL,
    environment text DEFAULT 'production',
    base64 boolean DEFAULT false) RETURNS TABLE ("position" integer, error text)
LANGUAGE plpgsql SECURITY DEFINER ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    entries CONSTANT integer := CASE WHEN jsonb_typeof(registrations) = 'array' THEN jsonb_array_length(registrations) END;
    entry record;
    scope record;
    moment timestamptz := '-infinity';
    receipt timestamptz;
    faulty integer[] := '{}';
    faults text[] := '{}';
    understood tokenkeeper.registration[] := '{}';
    -- The entries that are understood, in the order of their keys.
    of_topic integer[];
    keys bytea[];
    of_row integer[];
    device record;
    locked text[] COLLATE "C";
    wanted text[] COLLATE "C";
    one tokenkeeper.registration;
    deadlocks integer := 0;
    -- How long to wait for a token while the devices are locked, and how long it has waited in all.
    patience interval := least(interval '30 ms', current_setting('deadlock_timeout')::interval / 2);
    waited interval := '0';
    is_waiting_briefly boolean;
    lock_timeout_before CONSTANT text := current_setting('lock_timeout');
    most CONSTANT interval := nullif(lock_timeout_before::interval, '0');
BEGIN
    IF entries IS NULL OR entries > 1000 THEN
        RAISE EXCEPTION 'registrations is %, expected an array of at most 1000 objects', CASE
            WHEN registrations IS NULL THEN 'null'
            WHEN entries IS NULL THEN 'of type ' || jsonb_typeof(registrations)
            ELSE 'an array of ' || entries END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table tokenkeeper.registration takes any number of rows.';
    END IF;
    FOR entry IN
        SELECT e.n::integer AS n, r.registration, r.error
        FROM jsonb_array_elements(registrations) WITH ORDINALITY AS e (value, n)
        CROSS JOIN LATERAL tokenkeeper.read_registration(e.value, register_many.topic, register_many.environment, register_many.base64) AS r
        ORDER BY e.n
    LOOP
        IF entry.error IS NOT NULL THEN
            faulty := faulty || entry.n;
            faults := faults || entry.error;
        ELSE
            one := entry.registration;
            -- A logout and a login without instants count in the order given.
            receipt := greatest(clock_timestamp(), moment + interval '1 microsecond');
            IF one.registered_at IS NULL THEN
                moment := receipt;
                one.registered_at := receipt;
            END IF;
            understood := understood || one;
        END IF;
    END LOOP;
    FOR scope IN SELECT DISTINCT u.environment COLLATE "C" AS environment, u.topic COLLATE "C" AS topic FROM unnest(understood) AS u ORDER BY 1, 2 LOOP
        PERFORM tokenkeeper.ensure_topic(scope.environment, scope.topic);
    END LOOP;
    SELECT array_agg(s.topic_id), array_agg(s.key), array_agg(s.n) INTO of_topic, keys, of_row FROM (
        SELECT t.topic_id, tokenkeeper.token_key(u.token) AS key, u.n::integer AS n
        FROM unnest(understood) WITH ORDINALITY AS u (
            environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at, partition_number, attempts, released, n)
        CROSS JOIN LATERAL (
            SELECT o.topic_id FROM tokenkeeper.topic AS o
            WHERE o.topic = u.topic COLLATE "C" AND o.environment = u.environment COLLATE "C" OFFSET 0) AS t
        ORDER BY 1, 2, 3) AS s;

    LOOP
        is_waiting_briefly := false;
        BEGIN
            FOR n IN 1..coalesce(cardinality(keys), 0) LOOP
                IF NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic[n] AND l.token_key = keys[n]) THEN
                    INSERT INTO tokenkeeper.ledger (topic_id, token_key) VALUES (of_topic[n], keys[n]) ON CONFLICT DO NOTHING;
                END IF;
            END LOOP;
            locked := '{}';
            FOR device IN SELECT * FROM tokenkeeper.devices_to_register(understood, of_row, of_topic, keys) LOOP
                locked := locked || (device.topic_id || ' ' || device.device_id);
                -- Before any device is locked: a registration that notes this device waits for the device.
                PERFORM FROM tokenkeeper.ledger AS l WHERE l.device_id = device.device_id AND l.topic_id + 0 = device.topic_id OFFSET 48 LIMIT 1;
                IF FOUND AND NOT EXISTS (
                    SELECT FROM tokenkeeper.crowded_device AS c WHERE c.topic_id = device.topic_id AND c.device_id = device.device_id) THEN
                    PERFORM tokenkeeper.note_crowded(device.topic_id, device.device_id, true);
                END IF;
            END LOOP;
            FOR device IN SELECT * FROM tokenkeeper.devices_to_register(understood, of_row, of_topic, keys) LOOP
                LOOP
                    PERFORM FROM tokenkeeper.device AS d WHERE d.topic_id = device.topic_id AND d.device_id = device.device_id FOR NO KEY UPDATE;
                    EXIT WHEN FOUND;
                    INSERT INTO tokenkeeper.device (topic_id, device_id) VALUES (device.topic_id, device.device_id)
                    ON CONFLICT ON CONSTRAINT device_pkey DO NOTHING;
                    EXIT WHEN FOUND;
                END LOOP;
            END LOOP;
            -- A token may have moved to another device meanwhile. Now none can.
            wanted := ARRAY(SELECT d.topic_id || ' ' || d.device_id FROM tokenkeeper.devices_to_register(understood, of_row, of_topic, keys) AS d);
            IF wanted IS DISTINCT FROM locked THEN
                RAISE EXCEPTION 'a token has another device now' USING ERRCODE = 'TK001';
            END IF;
            patience := least(patience, most - waited);
            PERFORM set_config('lock_timeout', greatest(ceil(extract(epoch FROM patience) * 1000), 1)::text, true);
            is_waiting_briefly := true;
            FOR n IN 1..coalesce(cardinality(keys), 0) LOOP
                one := understood[of_row[n]];
                IF one.unregistered THEN
                    PERFORM tokenkeeper.unregister(one.token, one.topic, one.environment, one.registered_at);
                ELSE
                    PERFORM tokenkeeper.register(one.token, one.topic, one.environment, one.registered_at, one.device_id, one.tags, one.user_id);
                END IF;
            END LOOP;
            PERFORM set_config('lock_timeout', lock_timeout_before, true);
            EXIT;
        EXCEPTION
            WHEN SQLSTATE 'TK001' THEN
                NULL;
            WHEN lock_not_available THEN
                waited := waited + patience;
                IF NOT is_waiting_briefly OR waited >= most THEN
                    RAISE;
                END IF;
                -- Whoever waits for one of the devices goes first.
                patience := least(2 * patience, current_setting('deadlock_timeout')::interval / 2);
            WHEN deadlock_detected THEN
                -- Tokens were deleted meanwhile, or deadlock_timeout is very short. Everything is released, and the other call goes on.
                deadlocks := deadlocks + 1;
                IF deadlocks > 5 THEN
                    RAISE;
                END IF;
        END;
    END LOOP;
    RETURN QUERY SELECT f.n, f.error FROM unnest(faulty, faults) AS f (n, error);
END
$$;
COMMENT ON FUNCTION tokenkeeper.register_many(jsonb, text, text, boolean) IS
    'Records up to 1000 registrations and logouts, in the caller''s transaction. registrations is an array of objects with the keys token, topic, environment, '
    'registered_at, device_id, user_id, tags and unregistered, as the columns of the table registration; topic and environment are for entries that have none. '
    'Tokens are read as by parse_token. Returns the entries that were refused: position in the array, from 1, and the error. All others are recorded. '
    'Two calls never deadlock with each other. Raises 22023 if registrations is not an array, or has more than 1000 entries.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register_many(jsonb, text, text, boolean) FROM PUBLIC;
