-- oldest daemon: 0.1.0
--
-- Registration, the gate and erasure do not depend on the caller's collation, and hold no more than they need.
--
-- Collation: a function inherits the collation of its arguments. An index of another collation is then not used, an argument with an ICU
-- collation conflicts with a column of ours, and "~" refuses a nondeterministic one. So every text column that has an index is COLLATE "C"
-- from here on (bytes, which no upgrade of glibc or ICU reorders), and each function works on variables that are COLLATE "C".
--
-- Locks: guards, devices, tokens. Whoever holds a device never waits for a token: register and forget then give their devices back, wait for the
-- token with nothing in hand, and begin again. So a registration may hold a token while it waits for a device, and needs no subtransaction
-- for its first UPDATE.

-- Text columns with an index ----------------------------------------------------------------------------------------

DO $$
DECLARE
    of_schema CONSTANT oid := 'tokenkeeper'::regnamespace;
    dependent record;
    restore text[] := '{}';
    rights text[];
    clause text;
BEGIN
    -- A view fixes the collation of the columns that it reads. So the views go, and come back as they were, with comments and rights.
    FOR dependent IN
        WITH RECURSIVE reading AS (
            SELECT r.ev_class AS view, 1 AS depth
            FROM pg_depend AS d JOIN pg_rewrite AS r ON r.oid = d.objid AND d.classid = 'pg_rewrite'::regclass
            WHERE d.refobjid IN ('tokenkeeper.ledger'::regclass, 'tokenkeeper.token_event_log'::regclass, 'tokenkeeper.daemon'::regclass,
                'tokenkeeper.sending_daemon'::regclass, 'tokenkeeper.sweep_topic'::regclass, 'tokenkeeper.token_count'::regclass)
            UNION
            SELECT r.ev_class, g.depth + 1
            FROM reading AS g
            JOIN pg_depend AS d ON d.refobjid = g.view AND d.classid = 'pg_rewrite'::regclass
            JOIN pg_rewrite AS r ON r.oid = d.objid AND r.ev_class <> g.view
        )
        SELECT c.oid, c.relname, c.relacl, max(g.depth) AS depth
        FROM reading AS g JOIN pg_class AS c ON c.oid = g.view
        WHERE c.relnamespace = of_schema AND c.relkind = 'v'
        GROUP BY 1, 2, 3 ORDER BY 4 DESC, 2
    LOOP
        SELECT string_agg(s.sql, '; ' ORDER BY s.part) INTO clause FROM (
            SELECT 1 AS part, format('CREATE VIEW tokenkeeper.%I AS %s', dependent.relname, rtrim(pg_get_viewdef(dependent.oid), ';')) AS sql
            UNION ALL
            SELECT 2, CASE WHEN d.objsubid = 0 THEN format('COMMENT ON VIEW tokenkeeper.%I IS %L', dependent.relname, d.description)
                ELSE format('COMMENT ON COLUMN tokenkeeper.%I.%I IS %L', dependent.relname, a.attname, d.description) END
            FROM pg_description AS d
            LEFT JOIN pg_attribute AS a ON a.attrelid = d.objoid AND a.attnum = d.objsubid
            WHERE d.objoid = dependent.oid AND d.classoid = 'pg_class'::regclass
            UNION ALL
            SELECT 3, format('GRANT %s ON tokenkeeper.%I TO %s', x.privilege_type, dependent.relname, x.grantee::regrole)
            FROM aclexplode(dependent.relacl) AS x
            WHERE x.grantee <> 0 AND x.grantee <> (SELECT c.relowner FROM pg_class AS c WHERE c.oid = dependent.oid)) AS s;
        restore := clause || restore;
        EXECUTE format('DROP VIEW tokenkeeper.%I', dependent.relname);
    END LOOP;

    -- Recent minor releases of PostgreSQL refuse to alter the ledger while the signature of a function has its row type.
    SELECT array_agg(format('GRANT EXECUTE ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) TO %s', x.grantee::regrole)) INTO rights
    FROM pg_proc AS p CROSS JOIN aclexplode(p.proacl) AS x
    WHERE p.oid = 'tokenkeeper.state_of(tokenkeeper.ledger)'::regprocedure AND x.grantee NOT IN (0, p.proowner);
    DROP FUNCTION tokenkeeper.state_of(tokenkeeper.ledger);

    -- It is made anew below; this saves building it twice. Not before the views are gone: whoever reads them locks them before the ledger.
    DROP INDEX tokenkeeper.ledger_device;
    -- No table is written anew, only their indexes.
    ALTER TABLE tokenkeeper.ledger
        ALTER COLUMN device_id TYPE text COLLATE "C",
        ALTER COLUMN tags TYPE text[] COLLATE "C";
    ALTER TABLE tokenkeeper.device ALTER COLUMN device_id TYPE text COLLATE "C";
    ALTER TABLE tokenkeeper.token_event_log ALTER COLUMN device_id TYPE text COLLATE "C";
    ALTER TABLE tokenkeeper.daemon ALTER COLUMN daemon_id TYPE text COLLATE "C";
    ALTER TABLE tokenkeeper.sending_daemon ALTER COLUMN daemon_id TYPE text COLLATE "C";
    ALTER TABLE tokenkeeper.token_count ALTER COLUMN state TYPE text COLLATE "C";
    ALTER TABLE tokenkeeper.sweep_topic
        ALTER COLUMN environment TYPE text COLLATE "C",
        ALTER COLUMN topic TYPE text COLLATE "C",
        ALTER COLUMN cause TYPE text COLLATE "C";

    CREATE FUNCTION tokenkeeper.state_of(entry tokenkeeper.ledger) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN NOT (entry).suppressed THEN 'active'
        ELSE CASE tokenkeeper.cause_of((entry).dead_at, (entry).suspect_at, (entry).unregistered_at, (entry).superseded_at)
            WHEN 'dead' THEN 'stale'
            WHEN 'suspect' THEN 'suspect'
            WHEN 'unregistered' THEN 'unregistered_by_app'
            WHEN 'superseded' THEN 'superseded'
        END
    END;
    COMMENT ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) IS
        'The state that people read: active, or by the cause of the suppression stale, suspect, unregistered_by_app, superseded.';
    REVOKE EXECUTE ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) FROM PUBLIC;

    FOREACH clause IN ARRAY coalesce(rights, '{}') || restore LOOP
        EXECUTE clause;
    END LOOP;
END
$$;

-- An expression instead of topic_id: a plan made for a small ledger would else take the topic's part of the primary key, and read the whole
-- topic after the ledger has grown. So the functions ask for topic_id + 0. superseded_at, which no registration of an active token changes,
-- finds the device's current token, and the latest of the others, without a look at all of them.
CREATE INDEX ledger_device ON tokenkeeper.ledger (device_id, (topic_id + 0), superseded_at) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_device IS
    'The tokens of a device in a topic: ask for topic_id + 0. Those that are not superseded come last.';

-- Devices -----------------------------------------------------------------------------------------------------------

ALTER TABLE tokenkeeper.device
    ADD COLUMN tags_at timestamptz,
    ADD COLUMN tags text[] COLLATE "C",
    ADD COLUMN tags_of bytea NOT NULL DEFAULT '';
COMMENT ON COLUMN tokenkeeper.device.tags_at IS
    'The latest registration with tags among those of the device''s superseded tokens; null when there was none.';
COMMENT ON COLUMN tokenkeeper.device.tags IS
    'The tags of that registration: what the device''s current token has when it never had any of its own. They outlive the token that they are of.';
COMMENT ON COLUMN tokenkeeper.device.tags_of IS 'The token of that registration; empty when it has been forgotten.';
CREATE INDEX device_tags_of ON tokenkeeper.device (tags_of) WHERE tags_of <> '';
COMMENT ON INDEX tokenkeeper.device_tags_of IS 'For forget.';

ALTER TABLE tokenkeeper.operation ADD COLUMN device_id text COLLATE "C";
COMMENT ON COLUMN tokenkeeper.operation.device_id IS 'The device that device_crowded is about.';
CREATE INDEX operation_device_id ON tokenkeeper.operation (device_id) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.operation_device_id IS 'For forget_device.';

CREATE TABLE tokenkeeper.crowded_device (
    topic_id   integer NOT NULL,
    device_id  text COLLATE "C" NOT NULL,
    tokens     integer NOT NULL,
    counted_at timestamptz NOT NULL,
    named_at   timestamptz NOT NULL,
    PRIMARY KEY (topic_id, device_id)
);
COMMENT ON TABLE tokenkeeper.crowded_device IS
    'One row per device_id that has 50 tokens or more of a topic: such a device_id is probably a constant. status warns of those that a '
    'registration named within 24 hours. At 1000 tokens, further tokens are registered without a device.';
COMMENT ON COLUMN tokenkeeper.crowded_device.tokens IS 'How many tokens it had when they were last counted, up to 1000.';
COMMENT ON COLUMN tokenkeeper.crowded_device.named_at IS 'The latest registration that named it, to the hour.';

CREATE FUNCTION tokenkeeper.note_crowded(of_topic integer, device text, joins boolean) RETURNS boolean
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
    -- Never wait for this row: the caller may hold others, and one who notes the same at this moment does it well enough.
    IF known.named_at < receipt - interval '1 hour' THEN
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
    SELECT count(*) INTO counted FROM (
        SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = crowded AND l.topic_id + 0 = of_topic LIMIT limit_of) AS l;
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
    'Notes a registration that names a device with 49 tokens or more. For a token that would join the device: whether the device is full, '
    'with 1000 tokens, which are counted again after an hour.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_crowded(integer, text, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.has_one_token_a_device(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN topic COLLATE "C" NOT LIKE '%.push-type.liveactivity' AND topic COLLATE "C" NOT LIKE '%.push-type.controls';

CREATE OR REPLACE FUNCTION tokenkeeper.settle_device(of_topic integer, device text, registering bytea, receipt timestamptz) RETURNS void
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
    -- Of the superseded tokens only the latest can be the device's token again; superseded_at is when it was registered.
    SELECT w.token_key INTO named FROM (
        SELECT was.named_at AS at, was.token_key
        UNION ALL
        SELECT l.registered_at, l.token_key FROM tokenkeeper.ledger AS l
        WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL
        UNION ALL
        (SELECT l.superseded_at, l.token_key FROM tokenkeeper.ledger AS l
         WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL
         ORDER BY l.superseded_at DESC, l.token_key DESC LIMIT 1)) AS w
    ORDER BY w.at DESC, w.token_key DESC LIMIT 1;

    FOR old IN
        SELECT l.* FROM tokenkeeper.ledger AS l
        WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL AND l.token_key <> named
        UNION ALL
        SELECT l.* FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = of_topic AND l.token_key = named AND l.device_id = this AND l.superseded_at IS NOT NULL
        ORDER BY token_key
    LOOP
        wanted := CASE WHEN old.token_key <> named THEN old.registered_at END;
        UPDATE tokenkeeper.ledger AS l
        SET superseded_at = wanted,
            suppressed_since = CASE
                WHEN coalesce(greatest(l.dead_at, l.suspect_at, l.unregistered_at, wanted) >= l.registered_at, false)
                THEN coalesce(l.suppressed_since, receipt) END,
            -- Inherited tags are those of the device's token alone.
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
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        VALUES (of_topic, new.token_key, CASE WHEN new.suppressed THEN 'superseded' ELSE 'revived' END,
            CASE WHEN new.suppressed THEN 'superseded' ELSE 'moved' END,
            CASE WHEN new.suppressed THEN 'a newer token of the same device' END, this,
            nullif(old.registered_at, '-infinity'), nullif(new.registered_at, '-infinity'),
            greatest(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at),
            greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
    END LOOP;

    -- The tags are those of a token that has moved to another device: whose are they now?
    IF place.tags_of = registering AND registering <> '' AND NOT EXISTS (
        SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = registering AND l.device_id = this) THEN
        place.tags_at := NULL;
        place.tags := NULL;
        place.tags_of := '';
        SELECT l.tags_at, l.tags, l.token_key INTO place.tags_at, place.tags, place.tags_of FROM tokenkeeper.ledger AS l
        WHERE l.device_id = this AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL AND l.tags_at IS NOT NULL
        ORDER BY l.tags_at DESC, l.tags DESC LIMIT 1;
        place.tags_of := coalesce(place.tags_of, '');
    END IF;
    IF (place.tags_at, place.tags_of) IS DISTINCT FROM (was.tags_at, was.tags_of) OR place.tags IS DISTINCT FROM was.tags THEN
        UPDATE tokenkeeper.device AS d SET tags_at = place.tags_at, tags = place.tags, tags_of = place.tags_of
        WHERE d.topic_id = of_topic AND d.device_id = this;
    END IF;
    UPDATE tokenkeeper.ledger AS l SET tags = place.tags
    WHERE l.topic_id = of_topic AND l.token_key = named AND l.device_id = this AND l.tags_at IS NULL
      AND l.tags IS DISTINCT FROM place.tags;
END
$$;
COMMENT ON FUNCTION tokenkeeper.settle_device(integer, text, bytea, timestamptz) IS
    'Says which token of a device is its own and which are superseded, and what tags its own inherits; records this in the history, except for '
    'the token that is being registered. The caller holds what lock_devices locks.';

DROP FUNCTION tokenkeeper.lock_devices(integer, text[], bytea);
CREATE FUNCTION tokenkeeper.lock_devices(of_topic integer, devices text[], key bytea) RETURNS bytea
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    device text COLLATE "C";
    other bytea;
    others bytea[] := ARRAY[key];
BEGIN
    FOREACH device IN ARRAY devices LOOP
        -- Written and not only locked: a transaction with an older snapshot then fails instead of deciding by it.
        INSERT INTO tokenkeeper.device AS d (topic_id, device_id) VALUES (of_topic, device)
        ON CONFLICT ON CONSTRAINT device_pkey DO UPDATE SET named_at = d.named_at;
    END LOOP;
    -- What may change: those that are not superseded, and of the others the latest.
    FOREACH device IN ARRAY devices LOOP
        others := others || ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.superseded_at IS NULL AND l.token_key <> key
        ) || ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l
            WHERE l.device_id = device AND l.topic_id + 0 = of_topic AND l.superseded_at IS NOT NULL
            ORDER BY l.superseded_at DESC, l.token_key DESC LIMIT 1);
    END LOOP;
    FOREACH other IN ARRAY others LOOP
        PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = other FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND AND EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = other) THEN
            RETURN other;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) IS
    'Locks devices, given in order, then the token that is being registered and those that it may supersede or bring back. Waits for devices, but '
    'never for a token: answers the first that somebody else has locked; the caller then gives everything back.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) FROM PUBLIC;

-- Registration ------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.register(
    token text,
    topic text,
    environment text DEFAULT 'production',
    registered_at timestamptz DEFAULT clock_timestamp(),
    device_id text DEFAULT NULL,
    tags text[] DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(register.token);
    name text COLLATE "C" := register.topic;
    env text COLLATE "C" := coalesce(register.environment, 'production');
    new_device text COLLATE "C" := nullif(register.device_id COLLATE "C", '');
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
    busy bytea;
    devices text[] COLLATE "C";
    device text COLLATE "C";
    seen tokenkeeper.ledger;
    old tokenkeeper.ledger;
    new tokenkeeper.ledger;
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION 'device token is %, expected 1 to 512 bytes in hex', CASE
            WHEN register.token IS NULL THEN 'null'
            ELSE quote_literal(left(register.token, 8)) || '... (' || length(register.token) || ' characters)' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT isfinite(register.registered_at) THEN
        RAISE EXCEPTION 'registered_at is %, expected a finite instant', register.registered_at
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(new_device) > 512 THEN
        RAISE EXCEPTION 'device_id is % bytes long, expected 1 to 512, or null', octet_length(new_device)
            USING ERRCODE = 'invalid_parameter_value';
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

    -- The hottest write of all, every launch of every device: an active token of the same device, one HOT update, no event.
    -- It is its device's token, being active, and stays so.
    quiet := moment > receipt - interval '10 minutes';
    IF quiet THEN
        -- Nobody else is at this token, as far as one can tell without a lock: it was registered more than a second ago.
        UPDATE tokenkeeper.ledger AS l
        SET registered_at = greatest(l.registered_at, moment),
            device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE greatest(l.device_at, moment) END,
            tags = CASE WHEN new_tags IS NULL OR (moment, new_tags) < (l.tags_at, l.tags) THEN l.tags ELSE new_tags END,
            tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE greatest(l.tags_at, moment) END
        WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity'
          AND l.registered_at < moment - interval '1 second' AND (new_device IS NULL OR new_device = l.device_id)
          -- Nor has a transaction locked or changed it that may still be open: to wait for one here would keep the token, whatever comes of it.
          AND l.xmax = '0';
        IF FOUND THEN
            RETURN true;
        END IF;
    END IF;
    SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
    quiet := quiet AND coalesce(seen.registered_at < moment - interval '1 second', true) AND NOT EXISTS (
        SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key AND l.xmax <> '0');
    IF NOT quiet AND seen.registered_at > '-infinity' AND NOT seen.suppressed AND (new_device IS NULL OR new_device = seen.device_id) THEN
        BEGIN
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = greatest(l.registered_at, moment),
                device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE greatest(l.device_at, moment) END,
                tags = CASE WHEN new_tags IS NULL OR (moment, new_tags) < (l.tags_at, l.tags) THEN l.tags ELSE new_tags END,
                tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE greatest(l.tags_at, moment) END
            WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity'
              AND (new_device IS NULL OR new_device = l.device_id);
            IF FOUND THEN
                RETURN true;
            END IF;
            -- An UPDATE that met another one keeps the token locked even where it does not fit any more, SKIP LOCKED or not. Two
            -- registrations that both do so could wait for each other's token: so where others are likely, what it holds is given back.
            RAISE EXCEPTION 'not an active token of this device' USING ERRCODE = 'TK001';
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            is_fresh := false;
        END;
    END IF;

    of_topic := coalesce(of_topic, tokenkeeper.ensure_topic(env, name));
    one_token := tokenkeeper.has_one_token_a_device(name);
    LOOP
        old := NULL;
        busy := NULL;
        IF is_fresh THEN
            is_fresh := false;
        ELSIF NOT is_new THEN
            SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        END IF;
        IF one_token AND new_device IS NOT NULL AND NOT is_asked THEN
            is_asked := true;
            PERFORM FROM tokenkeeper.ledger AS l WHERE l.device_id = new_device AND l.topic_id + 0 = of_topic OFFSET 48 LIMIT 1;
            IF FOUND AND tokenkeeper.note_crowded(of_topic, new_device, new_device IS DISTINCT FROM seen.device_id) THEN
                new_device := NULL;
            END IF;
        END IF;

        IF seen.token_key IS NULL THEN
            -- Before its device: who has a device never waits for a token, and this may have to wait for another registration of the same one.
            INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, device_id, device_at, tags, tags_at)
            VALUES (of_topic, key, moment, new_device, CASE WHEN new_device IS NOT NULL THEN moment END,
                new_tags, CASE WHEN new_tags IS NOT NULL THEN moment END)
            ON CONFLICT DO NOTHING
            RETURNING l.* INTO seen;
            CONTINUE WHEN NOT FOUND;
            is_new := true;
            IF one_token AND new_device IS NOT NULL THEN
                -- A new device has nothing to supersede.
                INSERT INTO tokenkeeper.device (topic_id, device_id, named_at, token_key) VALUES (of_topic, new_device, moment, key)
                ON CONFLICT ON CONSTRAINT device_pkey DO NOTHING;
                CONTINUE WHEN NOT FOUND;
            END IF;
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, registered_after)
            VALUES (of_topic, key, 'registered', 'registration', new_device, moment);
            RETURN true;
        END IF;

        -- Alone: nothing of it concerns the other tokens of a device.
        alone := NOT is_new AND (NOT one_token
            OR (seen.superseded_at IS NULL AND (new_device IS NULL OR new_device IS NOT DISTINCT FROM seen.device_id)));
        devices := '{}';
        IF NOT alone THEN
            SELECT array_agg(DISTINCT d COLLATE "C") INTO devices FROM unnest(ARRAY[seen.device_id, new_device]) AS d WHERE d IS NOT NULL;
        END IF;
        IF alone AND quiet THEN
            quiet := false;
            SELECT l.* INTO old FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key FOR NO KEY UPDATE;
            CONTINUE WHEN NOT FOUND OR (one_token
                AND (old.superseded_at IS NOT NULL OR (new_device IS NOT NULL AND new_device IS DISTINCT FROM old.device_id)));
        ELSE
            -- It may come to another device meanwhile: then all locks are given back, and all is tried anew.
            BEGIN
                busy := tokenkeeper.lock_devices(of_topic, devices, key);
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
                    -- Wait for it with nothing in hand, and do not keep it either.
                    BEGIN
                        PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = busy FOR NO KEY UPDATE;
                        RAISE EXCEPTION 'it is free' USING ERRCODE = 'TK001';
                    EXCEPTION WHEN SQLSTATE 'TK001' THEN
                        NULL;
                    END;
                END IF;
                CONTINUE;
            END;
        END IF;

        IF NOT is_new THEN
            new := old;
            new.registered_at := greatest(old.registered_at, moment);
            IF new_device IS NOT NULL
                AND (old.device_at IS NULL OR (moment, new_device) > (old.device_at, old.device_id)) THEN
                new.device_id := new_device;
                new.device_at := moment;
            END IF;
            IF new_tags IS NOT NULL AND (old.tags_at IS NULL OR (moment, new_tags) > (old.tags_at, old.tags)) THEN
                new.tags := new_tags;
                new.tags_at := moment;
            ELSIF new.tags_at IS NULL AND new.device_id IS DISTINCT FROM old.device_id THEN
                -- What it inherited is its former device's.
                new.tags := NULL;
            END IF;
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = new.registered_at, device_id = new.device_id, device_at = new.device_at,
                tags = new.tags, tags_at = new.tags_at,
                -- settle_device sets it again, and brings it in line with registered_at.
                superseded_at = NULL
            WHERE l.topic_id = of_topic AND l.token_key = key;
        END IF;

        FOREACH device IN ARRAY devices LOOP
            UPDATE tokenkeeper.device AS d
            SET named_at = s.at, token_key = key
            FROM (SELECT CASE WHEN device = new_device THEN moment END AS at
                  UNION ALL
                  SELECT CASE WHEN device = old.device_id THEN old.device_at END
                  ORDER BY at DESC NULLS LAST LIMIT 1) AS s
            WHERE d.topic_id = of_topic AND d.device_id = device AND (s.at, key) > (d.named_at, d.token_key);
            PERFORM tokenkeeper.settle_device(of_topic, device, key, receipt);
        END LOOP;

        UPDATE tokenkeeper.ledger AS l
        SET suppressed_since = CASE WHEN l.suppressed THEN coalesce(l.suppressed_since, receipt) END
        WHERE l.topic_id = of_topic AND l.token_key = key AND l.suppressed = (l.suppressed_since IS NULL);
        SELECT l.* INTO new FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        IF old.token_key IS NULL OR old.registered_at = '-infinity' THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id,
                registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'registered', 'registration', new.device_id, new.registered_at,
                greatest(old.dead_at, old.suspect_at, old.unregistered_at),
                greatest(new.dead_at, new.suspect_at, new.unregistered_at));
        ELSIF old.suppressed AND NOT new.suppressed THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id,
                registered_before, registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'revived', 'registration', new.device_id, old.registered_at, new.registered_at,
                greatest(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at),
                greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
        END IF;
        IF new.superseded_at IS NOT NULL AND new.suppressed AND NOT coalesce(old.suppressed, false) THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
                registered_before, registered_after, invalidated_before, invalidated_after)
            VALUES (of_topic, key, 'superseded', 'superseded', 'a newer token of the same device', new.device_id,
                nullif(old.registered_at, '-infinity'), new.registered_at,
                greatest(old.dead_at, old.suspect_at, old.unregistered_at),
                greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
        END IF;
        RETURN NOT new.suppressed OR coalesce(observes, false);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[]) IS
    'Records a registration, in the caller''s transaction; returns whether the token may be sent to now. Call it at every launch of the app: '
    'each one counts against a late 410. A device_id supersedes the device''s other tokens of the topic, except for Live Activities and controls; '
    'a null or empty one keeps what there is. Tags replace the token''s own; null tags keep them, and a device''s current token that never had any '
    'has the latest of the device''s other tokens. A device that has 1000 tokens takes no more: they are registered without a device. '
    'Raises 22023 for a malformed token, an unknown environment, an empty topic, an infinite instant, a device_id over 512 bytes, a tag that is null, '
    'empty or over 512 bytes, more than 1000 tags, or an array of several dimensions.';

CREATE OR REPLACE FUNCTION tokenkeeper.ensure_topic(environment text, topic text) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text COLLATE "C" := ensure_topic.topic;
    env text COLLATE "C" := ensure_topic.environment;
    found_id integer;
BEGIN
    IF env IS NULL OR env NOT IN ('production', 'sandbox') THEN
        RAISE EXCEPTION 'environment is %, expected ''production'' or ''sandbox''', coalesce(quote_literal(left(env, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION 'topic is %, expected the apns-topic header, 1 to 512 bytes',
            CASE WHEN name IS NULL THEN 'null' ELSE octet_length(name) || ' bytes long' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT t.topic_id INTO found_id FROM tokenkeeper.topic AS t WHERE t.topic = name AND t.environment = env;
        IF FOUND THEN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                -- An older snapshot may show a topic that a sweep has deleted. This raises 40001 then.
                PERFORM FROM tokenkeeper.topic AS t WHERE t.topic_id = found_id FOR KEY SHARE;
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

CREATE OR REPLACE FUNCTION tokenkeeper.known_topic(topic text, environment text) RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    name text COLLATE "C" := known_topic.topic;
    env text COLLATE "C" := known_topic.environment;
    found_id integer;
BEGIN
    -- Under an older snapshot one could not see what others have committed while one waited for their lock.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    SELECT t.topic_id INTO found_id FROM tokenkeeper.topic AS t WHERE t.topic = name AND t.environment = env;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'topic % is not known in environment %', coalesce(quote_literal(left(name, 512)), 'null'),
            coalesce(quote_literal(left(env, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'See tokenkeeper.topic_policy for those that are.';
    END IF;
    RETURN found_id;
END
$$;

-- The gate ----------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.token_key(token text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    -- decode() alone would accept white space.
    WHEN octet_length(token) <= 1024 AND token COLLATE "C" ~ '^(?:[0-9A-Fa-f]{2})+$'
    THEN decode(token, 'hex')
END;

CREATE OR REPLACE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(is_sendable.token);
BEGIN
    IF key IS NULL THEN
        RETURN false;
    END IF;
    -- Not a join: a subquery leaves the planner nothing but the whole key, of one index or the other. A statement of its own
    -- costs less than the same as an expression.
    PERFORM FROM tokenkeeper.ledger AS l
    WHERE l.topic_id = (
            SELECT t.topic_id FROM tokenkeeper.topic AS t
            WHERE t.topic = is_sendable.topic COLLATE "C" AND t.environment = coalesce(is_sendable.environment, 'production') COLLATE "C"
              AND t.gate IS DISTINCT FROM 'observe')
      AND l.token_key = key AND l.suppressed > false;
    RETURN NOT FOUND;
END
$$;

CREATE OR REPLACE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t
        WHERE t.topic = sendable.topic COLLATE "C" AND t.environment = coalesce(sendable.environment, 'production') COLLATE "C"
          AND t.gate IS DISTINCT FROM 'observe');
BEGIN
    -- IS NOT TRUE and not NOT EXISTS, which would become a join. OFFSET 0: each key is made once.
    RETURN QUERY
        SELECT asked.token
        FROM (SELECT a.token, a.position, tokenkeeper.token_key(a.token) AS key
              FROM unnest(sendable.tokens COLLATE "C") WITH ORDINALITY AS a (token, position) OFFSET 0) AS asked
        WHERE asked.key IS NOT NULL AND (
            SELECT true FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = asked.key AND l.suppressed > false) IS NOT TRUE
        ORDER BY asked.position;
END
$$;

-- Erasure -----------------------------------------------------------------------------------------------------------

DROP FUNCTION tokenkeeper.mentions(text, text[], text[]);
CREATE FUNCTION tokenkeeper.mentions(token text, topic text, body text, hex text[], base64 text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    said text COLLATE "C" := token;
    whole text COLLATE "C" := concat_ws(' ', token, topic, body);
    folded text COLLATE "C" := lower(whole);
    -- Written with separators it is looked for where a token is expected: a regular expression over megabytes takes a second.
    digits text COLLATE "C" := regexp_replace(left(folded, 8192), '[^0-9a-f]', '', 'g');
BEGIN
    IF lower(regexp_replace(left(said, 2048), '[^0-9A-Fa-f]', '', 'g')) = ANY (hex COLLATE "C") OR digits = ANY (hex COLLATE "C") THEN
        RETURN true;
    END IF;
    FOR n IN 1..cardinality(hex) LOOP
        -- Short tokens are looked for as they are: they would be found within others.
        IF length(hex[n]) >= 16 AND (strpos(folded, hex[n] COLLATE "C") > 0 OR strpos(digits, hex[n] COLLATE "C") > 0
            OR strpos(whole, base64[n] COLLATE "C") > 0) THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.mentions(text, text, text, text[], text[]) IS
    'Whether a result has one of these tokens in it: in hex or base64 anywhere, and in hex with other characters in between within the first 8192 '
    'characters. Tokens under 8 bytes are found only where nothing else is written.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.mentions(text, text, text, text[], text[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.keys_to_forget(of_key bytea, of_device text) RETURNS bytea[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    device text COLLATE "C" := of_device;
BEGIN
    IF device IS NULL THEN
        RETURN ARRAY[of_key];
    END IF;
    RETURN ARRAY(
        SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.device_id = device
        UNION
        -- Those that were pruned since, and are no other device's now.
        SELECT e.token_key FROM tokenkeeper.token_event_log AS e
        WHERE e.device_id = device AND NOT EXISTS (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = e.topic_id AND l.token_key = e.token_key
              AND l.device_id IS DISTINCT FROM device)
        ORDER BY 1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.keys_to_forget(bytea, text) IS 'The tokens that forget or forget_device is about, at this moment, in order.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.keys_to_forget(bytea, text) FROM PUBLIC;

DROP FUNCTION tokenkeeper.erase(bytea[], text[]);
CREATE FUNCTION tokenkeeper.erase(of_key bytea, of_device text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- An application may hold a token, and all drains stand still meanwhile.
SET lock_timeout = '10s'
SET enable_seqscan = off
AS $$
DECLARE
    asked text COLLATE "C" := of_device;
    keys bytea[] := tokenkeeper.keys_to_forget(of_key, of_device);
    hex text[];
    base64 text[];
    looked_for bytea[] := keys;
    rejected bigint[];
    looked_since xid := pg_snapshot_xmin(pg_current_snapshot())::xid;
    device_topics integer[];
    devices text[] COLLATE "C";
    token_topics integer[];
    token_keys bytea[];
    n integer;
    topics_now integer[];
    devices_now text[] COLLATE "C";
    busy_topic integer;
    busy bytea;
    guarded integer[];
    total bigint := 0;
    part bigint;
BEGIN
    hex := ARRAY(SELECT encode(k, 'hex') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
    base64 := ARRAY(SELECT encode(k, 'base64') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
    -- The long look comes before the drains stand still. What is rejected or changed after it is looked at under the locks.
    SELECT array_agg(r.rejected_id) INTO rejected
    FROM tokenkeeper.rejected_result AS r WHERE tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64);

    PERFORM tokenkeeper.halt_drains();
    -- Locks in the order of all others: guards, devices, tokens.
    PERFORM FROM tokenkeeper.topic_guard AS g ORDER BY g.topic_id FOR UPDATE;
    LOOP
        busy := NULL;
        keys := tokenkeeper.keys_to_forget(of_key, asked);
        -- Every device that one of the tokens belongs to, was named by, or gave its tags to.
        SELECT array_agg(d.topic_id ORDER BY d.topic_id, d.device_id), array_agg(d.device_id ORDER BY d.topic_id, d.device_id)
        INTO device_topics, devices FROM tokenkeeper.devices_of(keys, asked) AS d;
        BEGIN
            FOR n IN 1..coalesce(cardinality(devices), 0) LOOP
                PERFORM FROM tokenkeeper.device AS d WHERE d.topic_id = device_topics[n] AND d.device_id = devices[n] FOR UPDATE;
            END LOOP;
            SELECT array_agg(l.topic_id ORDER BY l.topic_id, l.token_key), array_agg(l.token_key ORDER BY l.topic_id, l.token_key)
            INTO token_topics, token_keys
            FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
            JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key;
            FOR n IN 1..coalesce(cardinality(token_keys), 0) LOOP
                PERFORM FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = token_topics[n] AND l.token_key = token_keys[n] FOR UPDATE SKIP LOCKED;
                IF NOT FOUND AND EXISTS (
                    SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = token_topics[n] AND l.token_key = token_keys[n]) THEN
                    busy_topic := token_topics[n];
                    busy := token_keys[n];
                    RAISE EXCEPTION 'a token is locked' USING ERRCODE = 'TK001';
                END IF;
            END LOOP;
            -- A token that has come to the device or left it meanwhile: begin again. From here on none can.
            SELECT array_agg(d.topic_id ORDER BY d.topic_id, d.device_id), array_agg(d.device_id ORDER BY d.topic_id, d.device_id)
            INTO topics_now, devices_now FROM tokenkeeper.devices_of(keys, asked) AS d;
            IF keys IS DISTINCT FROM tokenkeeper.keys_to_forget(of_key, asked)
                OR topics_now IS DISTINCT FROM device_topics OR devices_now IS DISTINCT FROM devices THEN
                RAISE EXCEPTION 'the devices have other tokens now' USING ERRCODE = 'TK001';
            END IF;
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            IF busy IS NOT NULL THEN
                -- Wait for it without a device in hand, and do not keep it either.
                BEGIN
                    PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy_topic AND l.token_key = busy FOR UPDATE;
                    RAISE EXCEPTION 'it is free' USING ERRCODE = 'TK001';
                EXCEPTION WHEN SQLSTATE 'TK001' THEN
                    NULL;
                END;
            END IF;
        END;
    END LOOP;
    IF keys IS DISTINCT FROM looked_for THEN
        hex := ARRAY(SELECT encode(k, 'hex') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
        base64 := ARRAY(SELECT encode(k, 'base64') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
        rejected := NULL;
        looked_since := NULL;
    END IF;

    SELECT coalesce(array_agg(DISTINCT a.topic_id), '{}') INTO guarded FROM (
        SELECT h.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(keys) AS k (token_key)
        JOIN tokenkeeper.held_result AS h ON h.topic_id = g.topic_id AND h.token_key = k.token_key
        UNION ALL
        SELECT s.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(keys) AS k (token_key)
        JOIN tokenkeeper.suspect AS s ON s.topic_id = g.topic_id AND s.token_key = k.token_key AND s.silenced) AS a;

    -- The outbox before the queue: an answer that is being written down at this moment leaves the one for the other. What a daemon has in hand
    -- is being sent; its answer finds nothing to end, and is not kept.
    DELETE FROM tokenkeeper.send_request AS r
    WHERE tokenkeeper.token_key(r.token) = ANY (keys)
       OR (tokenkeeper.token_key(r.token) IS NULL AND tokenkeeper.mentions(r.token, NULL, NULL, hex, base64));
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.suppressed_send AS s WHERE s.token_key = ANY (keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.failed_send AS f WHERE tokenkeeper.mentions(f.token, NULL, NULL, hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.background_send AS b WHERE b.token_key = ANY (keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.send_result AS r
    WHERE CASE WHEN tokenkeeper.token_key(r.token) = ANY (keys) THEN true
               -- What most results are: a token, a topic, and a body in which no token has room.
               WHEN tokenkeeper.token_key(r.token) IS NOT NULL AND octet_length(r.topic) < 64 AND coalesce(octet_length(r.body), 0) < 16 THEN false
               ELSE tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64) END;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.rejected_result AS r
    WHERE r.rejected_id IN (SELECT unnest(rejected))
       OR (coalesce(age(r.xmin) <= age(looked_since), true)
           AND tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64));
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.held_result AS h
    USING tokenkeeper.topic AS t, unnest(keys) AS k (token_key)
    WHERE h.topic_id = t.topic_id AND h.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    -- Those that are locked, and no others.
    DELETE FROM tokenkeeper.ledger AS l
    USING unnest(token_topics, token_keys) AS k (topic_id, token_key)
    WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.suspect AS s
    USING tokenkeeper.topic AS t, unnest(keys) AS k (token_key)
    WHERE s.topic_id = t.topic_id AND s.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    PERFORM tokenkeeper.recount_guard(g) FROM unnest(guarded) AS g;
    -- A device without tokens has nothing left to say; of others, not which token named it, or whose its tags were.
    DELETE FROM tokenkeeper.device AS d
    USING unnest(device_topics, devices COLLATE "C") AS k (topic_id, device_id)
    WHERE d.topic_id = k.topic_id AND d.device_id = k.device_id
      AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = d.device_id AND l.topic_id + 0 = d.topic_id);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.crowded_device AS c
    USING unnest(device_topics, devices COLLATE "C") AS k (topic_id, device_id)
    WHERE c.topic_id = k.topic_id AND c.device_id = k.device_id
      AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = c.device_id AND l.topic_id + 0 = c.topic_id);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    UPDATE tokenkeeper.operation AS o SET device_id = NULL
    WHERE o.device_id = ANY (devices) AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = o.device_id);
    UPDATE tokenkeeper.device AS d
    SET named_at = CASE WHEN d.token_key = ANY (keys) THEN '-infinity' ELSE d.named_at END,
        token_key = CASE WHEN d.token_key = ANY (keys) THEN '' ELSE d.token_key END,
        tags_of = CASE WHEN d.tags_of = ANY (keys) THEN '' ELSE d.tags_of END
    FROM unnest(device_topics, devices COLLATE "C") AS k (topic_id, device_id)
    WHERE d.topic_id = k.topic_id AND d.device_id = k.device_id AND (d.token_key = ANY (keys) OR d.tags_of = ANY (keys));
    DELETE FROM tokenkeeper.token_event_log AS e WHERE e.token_key = ANY (keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    IF asked IS NOT NULL THEN
        DELETE FROM tokenkeeper.token_event_log AS e WHERE e.device_id = asked;
        GET DIAGNOSTICS part = ROW_COUNT;
        total := total + part;
        DELETE FROM tokenkeeper.crowded_device AS c USING tokenkeeper.topic AS t WHERE c.topic_id = t.topic_id AND c.device_id = asked;
        GET DIAGNOSTICS part = ROW_COUNT;
        total := total + part;
        UPDATE tokenkeeper.operation AS o SET device_id = NULL WHERE o.device_id = asked;
    END IF;
    UPDATE tokenkeeper.sweep_topic AS s SET samples = NULL
    WHERE s.samples && ARRAY(SELECT left(h, 8) FROM unnest(hex) AS h);
    INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('forgotten', total);
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase(bytea, text) IS
    'What forget and forget_device have in common: every row about a token, in every topic; or about every token of a device, and the device. '
    'Halts the drains once it has looked through the rejected results.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.erase(bytea, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.devices_of(keys bytea[], asked text) RETURNS TABLE (topic_id integer, device_id text)
LANGUAGE plpgsql STABLE ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    device text COLLATE "C" := asked;
BEGIN
    RETURN QUERY
        SELECT d.topic_id, d.device_id FROM tokenkeeper.topic AS t
        JOIN tokenkeeper.device AS d ON d.topic_id = t.topic_id AND d.device_id = device
        UNION
        SELECT l.topic_id, l.device_id FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key
        WHERE l.device_id IS NOT NULL
        UNION
        SELECT d.topic_id, d.device_id FROM tokenkeeper.device AS d WHERE d.token_key = ANY (keys) AND d.token_key <> ''
        UNION
        SELECT d.topic_id, d.device_id FROM tokenkeeper.device AS d WHERE d.tags_of = ANY (keys) AND d.tags_of <> ''
        ORDER BY 1, 2;
END
$$;
COMMENT ON FUNCTION tokenkeeper.devices_of(bytea[], text) IS
    'The devices that these tokens belong to, have named last, or gave their tags to, and those with this device_id, in the order of their locks.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.devices_of(bytea[], text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget(token text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
-- Without sequential scans every cost looks immense, and compiling would take 15 times as long as all the rest.
SET jit = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(forget.token);
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION 'device token is %, expected 1 to 512 bytes in hex', CASE
            WHEN forget.token IS NULL THEN 'null'
            ELSE quote_literal(left(forget.token, 8)) || '... (' || length(forget.token) || ' characters)' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(key, NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget(text) IS
    'A person''s right to erasure: deletes every row about a device token, in every topic and environment, from ledger, history, queue, outbox, held '
    'and rejected results; returns how many rows. Drains stand still until the transaction ends: commit at once. Raises 22023 for a malformed token, '
    '55P03 when the drains could not be halted, or a token not be locked, within ten seconds, 25001 under another isolation level than read committed.';

CREATE OR REPLACE FUNCTION tokenkeeper.forget_device(device_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
-- Without sequential scans every cost looks immense, and compiling would take 15 times as long as all the rest.
SET jit = off
AS $$
DECLARE
    device text COLLATE "C" := forget_device.device_id;
BEGIN
    IF coalesce(device, '') = '' THEN
        RAISE EXCEPTION 'device_id is %, expected the one given to register', CASE WHEN device IS NULL THEN 'null' ELSE 'empty' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(NULL, device);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_device(text) IS
    'A person''s right to erasure, by the device_id given to register: every token of the device, as by forget, and the device; returns how many rows. '
    'Drains stand still until the transaction ends: commit at once. Raises 22023 for a null or empty device_id, 55P03 when the drains could not be '
    'halted within ten seconds, 25001 under another isolation level than read committed.';

-- History -----------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.forget_event_month(before timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    leaf text;
    events bigint;
BEGIN
    -- The least that sweep.event_retention may be: a mistake, or a stolen login of the daemon, must not take the history of this month.
    IF forget_event_month.before IS NULL OR forget_event_month.before > clock_timestamp() - interval '31 days' THEN
        RAISE EXCEPTION 'before is %, expected an instant at least 31 days ago', coalesce(forget_event_month.before::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM tokenkeeper.token_event_log_other AS e WHERE e.ctid IN (
        SELECT o.ctid FROM tokenkeeper.token_event_log_other AS o WHERE o.at < forget_event_month.before LIMIT 10000);
    GET DIAGNOSTICS events = ROW_COUNT;
    IF events > 0 THEN
        RETURN events;
    END IF;
    SELECT c.relname, c.reltuples INTO leaf, events
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass AND c.relname ~ '^token_event_log_[0-9]{4}_[0-9]{2}$'
      AND to_timestamp(right(c.relname, 7), 'YYYY_MM') + interval '1 month' <= forget_event_month.before
    ORDER BY c.relname LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- The lock that DROP takes keeps registrations waiting: nothing may take long from there on. So a large month is
    -- not counted but estimated.
    IF events < 100000 THEN
        EXECUTE format('SELECT count(*) FROM tokenkeeper.%I', leaf) INTO events;
    END IF;
    EXECUTE format('DROP TABLE tokenkeeper.%I', leaf);
    RETURN events;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_event_month(timestamptz) IS
    'Drops the oldest month of history if it ends before an instant, after up to 10,000 events a call of no month; returns how many events '
    '(about), or null when there is nothing to drop. Called by the sweep until then, with a short lock_timeout, in a transaction each. '
    'Raises 22023 for an instant less than 31 days ago.';

COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz) IS
    'The app says that a token must not be sent to (a log-out): suppressed until a later registration. '
    'Raises 22023 for a malformed token, an unknown environment, an empty topic or an infinite instant.';

-- What is there already ---------------------------------------------------------------------------------------------

UPDATE tokenkeeper.device AS d SET tags_at = s.tags_at, tags = s.tags, tags_of = s.token_key
FROM (SELECT DISTINCT ON (l.topic_id, l.device_id) l.topic_id, l.device_id, l.tags_at, l.tags, l.token_key
      FROM tokenkeeper.ledger AS l
      WHERE l.device_id IS NOT NULL AND l.superseded_at IS NOT NULL AND l.tags_at IS NOT NULL
      ORDER BY l.topic_id, l.device_id, l.tags_at DESC, l.tags DESC) AS s
WHERE d.topic_id = s.topic_id AND d.device_id = s.device_id;
-- The token that they were of has been pruned: they stay, and everything else comes before them.
UPDATE tokenkeeper.device AS d SET tags_at = '-infinity', tags = l.tags
FROM tokenkeeper.ledger AS l
WHERE l.device_id IS NOT NULL AND l.superseded_at IS NULL AND l.tags_at IS NULL AND l.tags IS NOT NULL
  AND d.topic_id = l.topic_id AND d.device_id = l.device_id AND d.tags_at IS NULL;
UPDATE tokenkeeper.ledger AS l SET tags = CASE WHEN l.superseded_at IS NULL THEN d.tags END
FROM tokenkeeper.device AS d
WHERE d.topic_id = l.topic_id AND d.device_id = l.device_id AND l.tags_at IS NULL
  AND l.tags IS DISTINCT FROM CASE WHEN l.superseded_at IS NULL THEN d.tags END;
