-- Registration, and which token of a device is current.
--
-- Locks, everywhere in this schema: guards, then devices, then tokens. A session that holds a device never waits for a token: register and
-- forget then release their devices, wait for the token without holding anything, and begin again. So a registration may hold a token
-- while it waits for a device, and its first UPDATE needs no subtransaction.
--
-- Collation: a function inherits the collation of its arguments. An index of another collation would then not be used, and "~" refuses a
-- nondeterministic one. So each function works on variables that are COLLATE "C".

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
    'Raises 22023 for a token that has no key. It shows the first 8 characters at most, because errors are logged.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.raise_malformed_token(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.has_one_token_per_device(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN topic COLLATE "C" NOT LIKE '%.push-type.liveactivity' AND topic COLLATE "C" NOT LIKE '%.push-type.controls';
COMMENT ON FUNCTION tokenkeeper.has_one_token_per_device(text) IS
    'False for the topics of Live Activities and controls: a device has many tokens of these at once.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.has_one_token_per_device(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.lock_devices(
    of_topic integer, devices text[], key bytea, OUT busy bytea, OUT tokens bytea[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    device text COLLATE "C";
    other bytea;
    current bytea[];
BEGIN
    tokens := ARRAY[key];
    FOREACH device IN ARRAY devices LOOP
        LOOP
            PERFORM FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = device FOR NO KEY UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO tokenkeeper.device AS d (topic_id, device_id) VALUES (of_topic, device)
            ON CONFLICT ON CONSTRAINT device_pkey DO NOTHING;
            EXIT WHEN FOUND;
        END LOOP;
    END LOOP;
    -- What may change: the tokens that are not superseded, and the latest of the others.
    FOREACH device IN ARRAY devices LOOP
        current := ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL AND l.token_key <> key);
        tokens := tokens || current || ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL AND l.token_key <> key
            ORDER BY l.superseded_at DESC, l.token_key DESC LIMIT 1);
        IF cardinality(current) = 0 OR current_setting('transaction_isolation') <> 'read committed' THEN
            -- Written, not only locked: a transaction with an older snapshot then fails instead of deciding by that snapshot, and a sweep
            -- that prunes the device's last token does not delete the device. If the device has a current token, no version of this row is
            -- added: a thousand versions that one transaction leaves behind would all be read by each of its registrations.
            UPDATE tokenkeeper.device AS d SET named_at = d.named_at WHERE d.topic_id = of_topic AND d.device_id = device;
        END IF;
    END LOOP;
    FOREACH other IN ARRAY tokens LOOP
        PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = other FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND AND EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = other) THEN
            busy := other;
            RETURN;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) IS
    'Locks devices, given in order, then the token that is being registered and those that it may supersede or restore. It waits for devices but never '
    'for a token. Returns in busy the first token that another session has locked, and the caller then releases everything; otherwise in tokens what '
    'update_device needs.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.update_device(
    of_topic integer, device text, registering bytea, tokens bytea[], receipt timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    this text COLLATE "C" := device;
    was tokenkeeper.device;
    place tokenkeeper.device;
    named bytea;
    wanted timestamptz;
    old tokenkeeper.ledger;
    new tokenkeeper.ledger;
BEGIN
    SELECT d.* INTO was FROM tokenkeeper.device AS d WHERE d.topic_id = of_topic AND d.device_id = this;
    place := was;
    -- Only the latest of the superseded tokens can become the device's token again. Each is looked up by its whole key: a plan made for a
    -- small ledger would otherwise read all tokens of the topic or of the device.
    SELECT w.token_key INTO named FROM (
        SELECT was.named_at AS at, was.token_key
        UNION ALL
        SELECT l.registered_at, l.token_key FROM unnest(tokens) AS k (token_key)
        CROSS JOIN LATERAL (
            SELECT o.* FROM tokenkeeper.ledger AS o WHERE o.topic_id = of_topic AND o.token_key = k.token_key OFFSET 0) AS l
        WHERE l.device_id = this) AS w
    ORDER BY w.at DESC, w.token_key DESC LIMIT 1;

    FOR old IN
        SELECT l.* FROM unnest(tokens) AS k (token_key)
        CROSS JOIN LATERAL (
            SELECT o.* FROM tokenkeeper.ledger AS o WHERE o.topic_id = of_topic AND o.token_key = k.token_key OFFSET 0) AS l
        WHERE l.device_id = this
          AND (l.superseded_at IS NULL) = (l.token_key <> named)
        ORDER BY l.token_key
    LOOP
        wanted := CASE WHEN old.token_key <> named THEN old.registered_at END;
        UPDATE tokenkeeper.ledger AS l
        SET superseded_at = wanted,
            suppressed_since = CASE
                WHEN coalesce(greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at, wanted) >= l.registered_at, false)
                THEN coalesce(l.suppressed_since, receipt) END,
            -- Only the device's current token inherits tags.
            tags = CASE WHEN wanted IS NULL OR l.tags_at IS NOT NULL THEN l.tags END
        WHERE l.topic_id = of_topic AND l.token_key = old.token_key
        RETURNING l.* INTO new;
        IF wanted IS NOT NULL AND new.tags_at IS NOT NULL
            AND (place.tags_at IS NULL OR (new.tags_at, new.tags) > (place.tags_at, place.tags)) THEN
            place.tags_at := new.tags_at;
            place.tags := new.tags;
            place.tags_of := new.token_key;
        END IF;
        CONTINUE WHEN new.suppressed = old.suppressed OR new.token_key = registering;
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        VALUES (of_topic, new.token_key, CASE WHEN new.suppressed THEN 'superseded' ELSE 'revived' END,
            CASE WHEN new.suppressed THEN 'superseded' ELSE 'moved' END,
            CASE WHEN new.suppressed THEN 'a newer token of the same device' END, this, new.user_id,
            nullif(old.registered_at, '-infinity'), nullif(new.registered_at, '-infinity'),
            greatest(old.stale_at, old.suspect_at, old.unregistered_by_app_at, old.superseded_at),
            greatest(new.stale_at, new.suspect_at, new.unregistered_by_app_at, new.superseded_at));
    END LOOP;

    -- The tags came from a token that has moved to another device: find the token they now come from.
    IF place.tags_of = registering AND registering <> '' AND NOT EXISTS (
        SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = registering AND l.device_id = this) THEN
        place.tags_at := NULL;
        place.tags := NULL;
        place.tags_of := '';
        SELECT l.tags_at, coalesce(l.registered_tags, l.tags), l.token_key INTO place.tags_at, place.tags, place.tags_of FROM tokenkeeper.ledger AS l
        WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL AND l.tags_at IS NOT NULL
        ORDER BY l.tags_at DESC, coalesce(l.registered_tags, l.tags) DESC LIMIT 1;
        place.tags_of := coalesce(place.tags_of, '');
    END IF;
    IF (place.tags_at, place.tags_of) IS DISTINCT FROM (was.tags_at, was.tags_of) OR place.tags IS DISTINCT FROM was.tags THEN
        UPDATE tokenkeeper.device AS d SET tags_at = place.tags_at, tags = place.tags, tags_of = place.tags_of
        WHERE d.topic_id = of_topic AND d.device_id = this;
    END IF;
    PERFORM tokenkeeper.inherit_tags(of_topic, this, ARRAY[named]);
END
$$;
COMMENT ON FUNCTION tokenkeeper.update_device(integer, text, bytea, bytea[], timestamptz) IS
    'Decides which token of a device is current, which are superseded, and what tags the current one inherits. Records this in the history, except for '
    'the token that is being registered. The caller holds the locks that lock_devices takes; tokens is what it returned. Their tags are without '
    'changes; see without_tag_changes.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.update_device(integer, text, bytea, bytea[], timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_crowded(of_topic integer, device text, joins boolean) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    crowded text COLLATE "C" := device;
    receipt timestamptz := clock_timestamp();
    known tokenkeeper.crowded_device;
    counted integer;
    limit_of CONSTANT integer := 1000;
BEGIN
    SELECT c.* INTO known FROM tokenkeeper.crowded_device AS c WHERE c.topic_id = of_topic AND c.device_id = crowded;
    -- Never wait for this row: the caller may hold others, and another session that notes the same now is enough.
    IF known.named_at < receipt - interval '10 minutes' THEN
        UPDATE tokenkeeper.crowded_device AS c SET named_at = receipt
        WHERE c.topic_id = of_topic AND c.device_id = crowded AND EXISTS (
            SELECT FROM tokenkeeper.crowded_device AS k WHERE k.topic_id = of_topic AND k.device_id = crowded FOR UPDATE SKIP LOCKED);
    END IF;
    IF NOT joins THEN
        RETURN false;
    END IF;
    IF known.tokens >= limit_of AND known.counted_at > receipt - interval '1 hour' THEN
        RETURN true;
    END IF;
    IF known.tokens < limit_of - 100 AND known.tokens % 16 <> 0 AND known.counted_at > receipt - interval '1 hour' THEN
        -- Counting reads all tokens of the device. Far from the limit, every sixteenth time is enough.
        counted := known.tokens + 1;
    ELSE
        SELECT count(*) INTO counted FROM (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = crowded AND l.topic_id + 0 = of_topic LIMIT limit_of) AS l;
    END IF;
    IF known.topic_id IS NULL THEN
        INSERT INTO tokenkeeper.crowded_device (topic_id, device_id, tokens, counted_at, named_at)
        VALUES (of_topic, crowded, counted, receipt, receipt)
        ON CONFLICT DO NOTHING;
    ELSE
        UPDATE tokenkeeper.crowded_device AS c SET tokens = counted, counted_at = receipt, named_at = receipt
        WHERE c.topic_id = of_topic AND c.device_id = crowded AND EXISTS (
            SELECT FROM tokenkeeper.crowded_device AS k WHERE k.topic_id = of_topic AND k.device_id = crowded FOR UPDATE SKIP LOCKED);
    END IF;
    IF FOUND AND (known.topic_id IS NULL OR (counted >= limit_of AND known.tokens < limit_of)) THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, device_id, message)
        SELECT 'device_crowded', t.environment, t.topic, CASE WHEN counted >= limit_of THEN counted ELSE counted + 1 END, crowded,
            CASE WHEN counted >= limit_of THEN 'this device_id has that many tokens: further tokens are registered without a device'
                 ELSE 'this device_id has that many tokens: is it a constant?' END
        FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    END IF;
    RETURN counted >= limit_of;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_crowded(integer, text, boolean) IS
    'Notes a registration that names a device with 49 or more tokens. For a token that would join the device, returns whether the device is full: it has '
    '1000 tokens. They are counted again after an hour.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_crowded(integer, text, boolean) FROM PUBLIC;

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
    -- Null keeps, an empty one clears.
    new_device text COLLATE "C" := register.device_id;
    new_user text COLLATE "C" := register.user_id;
    new_tags text[] COLLATE "C" := register.tags;
    receipt timestamptz := clock_timestamp();
    -- An instant in the future counts as the instant of receipt: one wrong clock must not make a token immortal.
    moment timestamptz := least(coalesce(register.registered_at, receipt), receipt);
    tag text COLLATE "C";
    of_topic integer;
    observes boolean;
    one_token boolean;
    is_fresh boolean := true;
    quiet boolean;
    alone boolean;
    is_asked boolean := false;
    is_new boolean := false;
    has_changes boolean;
    busy bytea;
    tokens bytea[];
    devices text[] COLLATE "C";
    device text COLLATE "C";
    seen tokenkeeper.ledger;
    old tokenkeeper.ledger;
    new tokenkeeper.ledger;
BEGIN
    IF key IS NULL OR NOT isfinite(register.registered_at) OR octet_length(new_device) > 512 OR octet_length(new_user) > 512 THEN
        IF key IS NULL THEN
            PERFORM tokenkeeper.raise_malformed_token(register.token);
        END IF;
        IF NOT isfinite(register.registered_at) THEN
            RAISE EXCEPTION 'registered_at is %, expected a finite instant', register.registered_at
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF octet_length(new_device) > 512 OR octet_length(new_user) > 512 THEN
            RAISE EXCEPTION '% is % bytes long, expected at most 512',
                CASE WHEN octet_length(new_device) > 512 THEN 'device_id' ELSE 'user_id' END,
                greatest(octet_length(new_device), octet_length(new_user))
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    IF new_tags IS NOT NULL THEN
        IF array_ndims(new_tags) > 1 THEN
            RAISE EXCEPTION 'tags is an array of % dimensions, expected one', array_ndims(new_tags)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF cardinality(new_tags) > 1000 THEN
            RAISE EXCEPTION 'tags has % elements, expected at most 1000', cardinality(new_tags)
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        FOREACH tag IN ARRAY new_tags LOOP
            IF tag IS NULL OR octet_length(tag) NOT BETWEEN 1 AND 512 THEN
                RAISE EXCEPTION 'a tag is %, expected 1 to 512 bytes', CASE WHEN tag IS NULL THEN 'null' ELSE octet_length(tag) || ' bytes long' END
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
        END LOOP;
    END IF;

    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe' INTO of_topic, observes FROM tokenkeeper.topic AS t
    WHERE t.topic = name AND t.environment = env;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        of_topic := tokenkeeper.ensure_topic(env, name);
    END IF;

    -- The hottest write, at each launch of each device: an active token of the same device, one HOT update, no event. Because the token is
    -- active, it is its device's current token, and it stays so.
    quiet := moment > receipt - interval '10 minutes';
    IF quiet THEN
        -- The token was registered more than a second ago, so probably no other session is registering it now.
        UPDATE tokenkeeper.ledger AS l
        -- registered_at is the greatest instant of all registrations, so no tags, device or user are later.
        SET registered_at = moment,
            device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE moment END,
            tags = coalesce(new_tags, l.tags),
            tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE moment END,
            user_id = CASE WHEN new_user IS NULL THEN l.user_id ELSE nullif(new_user, '') END,
            user_at = CASE WHEN new_user IS NULL THEN l.user_at ELSE moment END
        WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity'
          AND l.registered_at < moment - interval '1 second' AND (new_device IS NULL OR new_device = coalesce(l.device_id, ''))
          AND (new_tags IS NULL OR l.has_tag_changes IS NULL)
          -- And no transaction that may still be open has locked or changed it: waiting for one here would keep the token locked in any case.
          AND l.xmax = '0';
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
    quiet := quiet AND coalesce(seen.registered_at < moment - interval '1 second', true) AND NOT EXISTS (
        SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key AND l.xmax <> '0');
    IF NOT quiet AND seen.registered_at > '-infinity' AND NOT seen.suppressed AND (new_device IS NULL OR new_device = coalesce(seen.device_id, ''))
        AND (new_tags IS NULL OR seen.has_tag_changes IS NULL) THEN
        BEGIN
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = greatest(l.registered_at, moment),
                device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE greatest(l.device_at, moment) END,
                tags = CASE WHEN new_tags IS NULL OR (moment, new_tags) < (l.tags_at, l.tags) THEN l.tags ELSE new_tags END,
                tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE greatest(l.tags_at, moment) END,
                user_id = CASE WHEN new_user IS NULL OR (moment, new_user) < (l.user_at, coalesce(l.user_id, '')) THEN l.user_id
                               ELSE nullif(new_user, '') END,
                user_at = CASE WHEN new_user IS NULL THEN l.user_at ELSE greatest(l.user_at, moment) END
            WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity'
              AND (new_device IS NULL OR new_device = coalesce(l.device_id, '')) AND (new_tags IS NULL OR l.has_tag_changes IS NULL);
            IF FOUND THEN
                RETURN true;
            END IF;
            -- An UPDATE that met another one keeps the token locked even if the row no longer matches, SKIP LOCKED or not. Two
            -- registrations could then wait for each other's token. So if others are likely, release what it holds.
            RAISE EXCEPTION 'not an active token of this device' USING ERRCODE = 'TK001';
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            is_fresh := false;
        END;
    END IF;

    of_topic := coalesce(of_topic, tokenkeeper.ensure_topic(env, name));
    one_token := tokenkeeper.has_one_token_per_device(name);
    LOOP
        old := NULL;
        busy := NULL;
        tokens := NULL;
        IF is_fresh THEN
            is_fresh := false;
        ELSIF NOT is_new THEN
            SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        END IF;
        IF one_token AND new_device <> '' AND NOT is_asked THEN
            is_asked := true;
            PERFORM FROM tokenkeeper.ledger AS l WHERE l.device_id = new_device AND l.topic_id + 0 = of_topic OFFSET 48 LIMIT 1;
            IF FOUND AND tokenkeeper.note_crowded(of_topic, new_device, new_device IS DISTINCT FROM seen.device_id) THEN
                new_device := NULL;
            END IF;
        END IF;

        IF seen.token_key IS NULL THEN
            -- The token before its device: a session that holds a device never waits for a token, and this INSERT may wait for another registration
            -- of the same token.
            INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, device_id, device_at, tags, tags_at, user_id, user_at)
            VALUES (of_topic, key, moment, nullif(new_device, ''), CASE WHEN new_device IS NOT NULL THEN moment END,
                new_tags, CASE WHEN new_tags IS NOT NULL THEN moment END,
                nullif(new_user, ''), CASE WHEN new_user IS NOT NULL THEN moment END)
            ON CONFLICT DO NOTHING
            RETURNING l.* INTO seen;
            CONTINUE WHEN NOT FOUND;
            is_new := true;
            IF one_token AND new_device <> '' THEN
                -- A new device has nothing to supersede.
                INSERT INTO tokenkeeper.device (topic_id, device_id, named_at, token_key) VALUES (of_topic, new_device, moment, key)
                ON CONFLICT ON CONSTRAINT device_pkey DO NOTHING;
                CONTINUE WHEN NOT FOUND;
            END IF;
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, registered_after)
            VALUES (of_topic, key, 'registered', 'registration', seen.device_id, seen.user_id, moment);
            RETURN true;
        END IF;

        -- Alone: it does not affect the other tokens of a device.
        alone := NOT is_new AND (NOT one_token
            OR (seen.superseded_at IS NULL AND (new_device IS NULL OR new_device = coalesce(seen.device_id, ''))));
        devices := '{}';
        IF NOT alone THEN
            SELECT coalesce(array_agg(DISTINCT d COLLATE "C"), '{}') INTO devices FROM unnest(ARRAY[seen.device_id, new_device]) AS d WHERE d <> '';
        END IF;
        IF alone AND quiet THEN
            quiet := false;
            SELECT l.* INTO old FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key FOR NO KEY UPDATE;
            CONTINUE WHEN NOT FOUND OR (one_token
                AND (old.superseded_at IS NOT NULL OR new_device <> coalesce(old.device_id, '')));
        ELSE
            -- The token may move to another device meanwhile. Then release all locks and start over.
            BEGIN
                SELECT d.busy, d.tokens INTO busy, tokens FROM tokenkeeper.lock_devices(of_topic, devices, key) AS d;
                IF busy IS NOT NULL THEN
                    RAISE EXCEPTION 'a token of the device is locked' USING ERRCODE = 'TK001';
                END IF;
                IF NOT is_new THEN
                    SELECT l.* INTO old FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
                END IF;
                IF NOT is_new AND (old.token_key IS NULL
                    OR (one_token AND (old.device_id IS DISTINCT FROM seen.device_id OR (alone AND old.superseded_at IS NOT NULL)))) THEN
                    RAISE EXCEPTION 'the token has another device now, or is gone' USING ERRCODE = 'TK001';
                END IF;
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
                CONTINUE;
            END;
        END IF;

        has_changes := tokenkeeper.without_tag_changes(of_topic, coalesce(tokens, ARRAY[key]), devices);
        IF old.has_tag_changes THEN
            old.tags := old.registered_tags;
        END IF;
        IF NOT is_new THEN
            new := old;
            new.registered_at := greatest(old.registered_at, moment);
            IF new_device IS NOT NULL
                AND (old.device_at IS NULL OR (moment, new_device) > (old.device_at, coalesce(old.device_id, ''))) THEN
                new.device_id := nullif(new_device, '');
                new.device_at := moment;
            END IF;
            IF new_user IS NOT NULL AND (old.user_at IS NULL OR (moment, new_user) > (old.user_at, coalesce(old.user_id, ''))) THEN
                new.user_id := nullif(new_user, '');
                new.user_at := moment;
            END IF;
            IF new_tags IS NOT NULL AND (old.tags_at IS NULL OR (moment, new_tags) > (old.tags_at, old.tags)) THEN
                new.tags := new_tags;
                new.tags_at := moment;
            ELSIF new.tags_at IS NULL AND new.device_id IS DISTINCT FROM old.device_id THEN
                -- It inherited them from its former device.
                new.tags := NULL;
            END IF;
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = new.registered_at, device_id = new.device_id, device_at = new.device_at,
                tags = new.tags, tags_at = new.tags_at, user_id = new.user_id, user_at = new.user_at,
                -- update_device sets it again, equal to registered_at.
                superseded_at = NULL
            WHERE l.topic_id = of_topic AND l.token_key = key;
        END IF;

        FOREACH device IN ARRAY devices LOOP
            -- A token that belongs to the device counts for it by its own registered_at.
            IF device IS DISTINCT FROM new.device_id AND NOT is_new THEN
                UPDATE tokenkeeper.device AS d
                SET named_at = s.at, token_key = key
                FROM (SELECT CASE WHEN device = new_device THEN moment END AS at
                      UNION ALL
                      SELECT CASE WHEN device = old.device_id THEN old.device_at END
                      ORDER BY at DESC NULLS LAST LIMIT 1) AS s
                WHERE d.topic_id = of_topic AND d.device_id = device AND (s.at, key) > (d.named_at, d.token_key);
            END IF;
            PERFORM tokenkeeper.update_device(of_topic, device, key, tokens, receipt);
        END LOOP;
        IF has_changes THEN
            PERFORM tokenkeeper.apply_tag_changes(of_topic, coalesce(tokens, ARRAY[key]));
        END IF;

        UPDATE tokenkeeper.ledger AS l
        SET suppressed_since = CASE WHEN l.suppressed THEN coalesce(l.suppressed_since, receipt) END
        WHERE l.topic_id = of_topic AND l.token_key = key AND l.suppressed = (l.suppressed_since IS NULL);
        SELECT l.* INTO new FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        IF old.token_key IS NULL OR old.registered_at = '-infinity' THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id,
                registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'registered', 'registration', new.device_id, new.user_id, new.registered_at,
                greatest(old.stale_at, old.suspect_at, old.unregistered_by_app_at),
                greatest(new.stale_at, new.suspect_at, new.unregistered_by_app_at));
        ELSIF old.suppressed AND NOT new.suppressed THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id,
                registered_before, registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'revived', 'registration', new.device_id, new.user_id, old.registered_at, new.registered_at,
                greatest(old.stale_at, old.suspect_at, old.unregistered_by_app_at, old.superseded_at),
                greatest(new.stale_at, new.suspect_at, new.unregistered_by_app_at, new.superseded_at));
        END IF;
        IF new.superseded_at IS NOT NULL AND new.suppressed AND NOT coalesce(old.suppressed, false) THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
                registered_before, registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'superseded', 'superseded', 'a newer token of the same device', new.device_id, new.user_id,
                nullif(old.registered_at, '-infinity'), new.registered_at,
                greatest(old.stale_at, old.suspect_at, old.unregistered_by_app_at),
                greatest(new.stale_at, new.suspect_at, new.unregistered_by_app_at, new.superseded_at));
        END IF;
        RETURN NOT new.suppressed OR coalesce(observes, false);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[], text) IS
    'Records a registration, in the caller''s transaction; returns whether the token is sendable now. Call it at each launch of the app: '
    'each registration outranks an earlier 410 that arrives late. A device_id supersedes the device''s other tokens of the topic, except for Live Activities '
    'and controls; null keeps the current device, and with an empty one the token belongs to no device any more. In the same way, user_id is who uses the '
    'token, null keeps the current user, and an empty one means nobody. Tags replace the token''s own, and end earlier changes of them by tag; null tags keep '
    'both. A device''s current token that never had tags has the latest of the device''s other tokens. Once a device has 1000 tokens, further tokens are '
    'registered without a device. '
    'Raises 22023 for a malformed token, an unknown environment, a topic that is empty, over 512 bytes or not visible ASCII, an infinite instant, a device_id or '
    'user_id over 512 bytes, a tag that is null, empty or over 512 bytes, more than 1000 tags, or an array of several dimensions.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[], text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.unregister(
    token text,
    topic text,
    environment text DEFAULT 'production',
    at timestamptz DEFAULT clock_timestamp()) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(unregister.token);
    receipt timestamptz := clock_timestamp();
    moment timestamptz := least(coalesce(unregister.at, receipt), receipt);
    of_topic integer;
    old tokenkeeper.ledger;
    new tokenkeeper.ledger;
BEGIN
    IF key IS NULL THEN
        PERFORM tokenkeeper.raise_malformed_token(unregister.token);
    END IF;
    IF NOT isfinite(unregister.at) THEN
        RAISE EXCEPTION 'at is %, expected a finite instant', unregister.at
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    of_topic := tokenkeeper.ensure_topic(coalesce(unregister.environment, 'production'), unregister.topic);
    LOOP
        SELECT l.* INTO old FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = of_topic AND l.token_key = key
        FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, unregistered_by_app_at, suppressed_since)
        VALUES (of_topic, key, moment, receipt)
        ON CONFLICT DO NOTHING
        RETURNING l.* INTO new;
        EXIT WHEN FOUND;
    END LOOP;
    IF new IS NULL THEN
        PERFORM tokenkeeper.note_direct_unregistration(of_topic, key, moment);
        IF old.unregistered_by_app_at >= moment THEN
            RETURN;
        END IF;
        UPDATE tokenkeeper.ledger AS l
        SET unregistered_by_app_at = moment,
            suppressed_since = CASE
                WHEN l.suppressed THEN l.suppressed_since
                WHEN moment >= l.registered_at THEN receipt END
        WHERE l.topic_id = of_topic AND l.token_key = key
        RETURNING l.* INTO new;
        -- No event if it was already suppressed for the same cause.
        IF old.suppressed
            AND tokenkeeper.cause_of(new.stale_at, new.suspect_at, new.unregistered_by_app_at, new.superseded_at)
                = tokenkeeper.cause_of(old.stale_at, old.suspect_at, old.unregistered_by_app_at, old.superseded_at) THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    VALUES (of_topic, key, CASE WHEN new.suppressed THEN 'unregistered_by_app' ELSE 'late_feedback_ignored' END,
        'unregistered_by_app', new.device_id, new.user_id, nullif(old.registered_at, '-infinity'), nullif(new.registered_at, '-infinity'),
        greatest(old.stale_at, old.suspect_at, old.unregistered_by_app_at, old.superseded_at),
        greatest(new.stale_at, new.suspect_at, new.unregistered_by_app_at, new.superseded_at));
END
$$;
COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz) IS
    'Records a logout, in the caller''s transaction: the app wants no more pushes to this token. It is suppressed until a later registration. '
    'Raises 22023 for a malformed token, an unknown environment, a topic that is empty, over 512 bytes or not visible ASCII, or an infinite instant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz) FROM PUBLIC;
