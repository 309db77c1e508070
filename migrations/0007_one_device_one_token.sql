-- oldest daemon: 0.1.0
--
-- One device, one token. The latest registration of a device names its token, and the device's other tokens are superseded.
--
-- The latest is the greatest (registered_at, token) among the registrations that named the device, and those of the tokens
-- whose device it is: a registration without a device_id counts for the device that the token has. A token's own device
-- is that of the latest registration that named one. Neither depends on the order of arrival.

ALTER TABLE tokenkeeper.ledger
    ADD COLUMN device_at timestamptz,
    ADD COLUMN tags_at timestamptz;
COMMENT ON COLUMN tokenkeeper.ledger.device_at IS 'The latest registration that named a device: the one of device_id.';
COMMENT ON COLUMN tokenkeeper.ledger.tags_at IS
    'The latest registration that had tags; null when there was none, and tags, if any, are those of the device''s other tokens.';
COMMENT ON COLUMN tokenkeeper.ledger.superseded_at IS
    'Set while the device''s latest registration names another token, and then equal to registered_at: the earliest instant '
    'that suppresses, so that it does not depend on when the other registrations arrived, and every other cause comes before it.';
-- An empty device_id is none, and one over 512 bytes, which no index takes, was never of use.
UPDATE tokenkeeper.ledger SET device_id = NULL WHERE octet_length(device_id) NOT BETWEEN 1 AND 512;
UPDATE tokenkeeper.ledger
SET device_at = CASE WHEN device_id IS NOT NULL THEN registered_at END, tags_at = CASE WHEN tags IS NOT NULL THEN registered_at END
WHERE device_id IS NOT NULL OR tags IS NOT NULL;

-- Without the topic: a plan made for a small ledger would else find the device's tokens by the topic's part of the primary key, and
-- read all of them after the ledger has grown. For the same reason the functions below ask for topic_id + 0.
CREATE INDEX ledger_device ON tokenkeeper.ledger (device_id) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_device IS 'The tokens of a device.';
CREATE INDEX token_event_log_device_id ON tokenkeeper.token_event_log (device_id) WHERE device_id IS NOT NULL;

CREATE TABLE tokenkeeper.device (
    topic_id  integer NOT NULL,
    device_id text NOT NULL,
    named_at  timestamptz NOT NULL DEFAULT '-infinity',
    token_key bytea NOT NULL DEFAULT '',
    PRIMARY KEY (topic_id, device_id)
) WITH (fillfactor = 90);
CREATE INDEX device_token_key ON tokenkeeper.device (token_key) WHERE token_key <> '';
COMMENT ON TABLE tokenkeeper.device IS
    'One row a (topic, device): what is locked before the device''s tokens, and which registration named it last, for tokens that '
    'have moved to another device since. Pruned with the device''s last token.';
COMMENT ON COLUMN tokenkeeper.device.named_at IS
    'The latest registration that named this device, as far as it is not that of a token whose device it still is.';

CREATE FUNCTION tokenkeeper.has_one_token_a_device(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN topic NOT LIKE '%.push-type.liveactivity' AND topic NOT LIKE '%.push-type.controls';
COMMENT ON FUNCTION tokenkeeper.has_one_token_a_device(text) IS
    'False for the topics of Live Activities and controls, of which a device has many tokens at once.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.has_one_token_a_device(text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.settle_device(of_topic integer, device text, registering bytea, receipt timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    named bytea;
    inherited text[];
    wanted timestamptz;
    tokens integer := 0;
    old tokenkeeper.ledger;
    new tokenkeeper.ledger;
BEGIN
    SELECT w.token_key INTO named FROM (
        SELECT d.named_at AS at, d.token_key FROM tokenkeeper.device AS d
        WHERE d.topic_id = of_topic AND d.device_id = device
        UNION ALL
        SELECT l.registered_at, l.token_key FROM tokenkeeper.ledger AS l
        WHERE l.topic_id + 0 = of_topic AND l.device_id = device) AS w
    ORDER BY w.at DESC, w.token_key DESC LIMIT 1;

    -- One by one, each by its key: see the index.
    FOR old IN
        SELECT l.* FROM tokenkeeper.ledger AS l WHERE l.topic_id + 0 = of_topic AND l.device_id = device ORDER BY l.token_key
    LOOP
        tokens := tokens + 1;
        wanted := CASE WHEN old.token_key <> named THEN old.registered_at END;
        CONTINUE WHEN old.superseded_at IS NOT DISTINCT FROM wanted;
        UPDATE tokenkeeper.ledger AS l
        SET superseded_at = wanted,
            suppressed_since = CASE
                WHEN coalesce(greatest(l.dead_at, l.suspect_at, l.unregistered_at, wanted) >= l.registered_at, false)
                THEN coalesce(l.suppressed_since, receipt) END
        WHERE l.topic_id = of_topic AND l.token_key = old.token_key
        RETURNING l.* INTO new;
        CONTINUE WHEN new.suppressed = old.suppressed OR new.token_key = registering;
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        VALUES (of_topic, new.token_key, CASE WHEN new.suppressed THEN 'superseded' ELSE 'revived' END,
            CASE WHEN new.suppressed THEN 'superseded' ELSE 'moved' END,
            CASE WHEN new.suppressed THEN 'a newer token of the same device' END, device,
            nullif(old.registered_at, '-infinity'), nullif(new.registered_at, '-infinity'),
            greatest(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at),
            greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
    END LOOP;
    IF tokens = 50 AND registering <> '' THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        SELECT 'device_crowded', t.environment, t.topic, tokens, 'one device_id has that many tokens: is it a constant?'
        FROM tokenkeeper.topic AS t
        WHERE t.topic_id = of_topic AND NOT EXISTS (
            SELECT FROM tokenkeeper.operation AS p
            WHERE p.operation = 'device_crowded' AND p.topic = t.topic AND p.environment = t.environment
              AND p.at > clock_timestamp() - interval '1 day');
    END IF;

    -- The device's token without tags of its own has those that its others had last.
    SELECT l.tags INTO inherited FROM tokenkeeper.ledger AS l
    WHERE l.topic_id + 0 = of_topic AND l.device_id = device AND l.tags_at IS NOT NULL
    ORDER BY l.tags_at DESC, l.tags DESC LIMIT 1;
    IF FOUND THEN
        UPDATE tokenkeeper.ledger AS l SET tags = inherited
        WHERE l.topic_id = of_topic AND l.token_key = named AND l.device_id = device AND l.tags_at IS NULL
          AND l.tags IS DISTINCT FROM inherited;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.settle_device(integer, text, bytea, timestamptz) IS
    'Says of each token of a device whether it is superseded, and tells it in the history, but for the token that is being registered. '
    'The caller holds the device and its tokens locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.settle_device(integer, text, bytea, timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.lock_devices(of_topic integer, devices text[], key bytea) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    device text;
    other bytea;
BEGIN
    FOREACH device IN ARRAY devices LOOP
        -- Written and not only locked: a transaction with an older snapshot then fails instead of deciding by it.
        INSERT INTO tokenkeeper.device AS d (topic_id, device_id) VALUES (of_topic, device)
        ON CONFLICT ON CONSTRAINT device_pkey DO UPDATE SET named_at = d.named_at;
    END LOOP;
    FOR other IN
        SELECT l.token_key FROM tokenkeeper.ledger AS l
        WHERE l.topic_id + 0 = of_topic AND l.device_id = ANY (devices)
        UNION SELECT lock_devices.key
        ORDER BY 1
    LOOP
        PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = other FOR NO KEY UPDATE;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) IS
    'Locks devices, given in order, then their tokens and the one that is being registered, in the order of their keys: two registrations then '
    'never wait for each other crosswise.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_devices(integer, text[], bytea) FROM PUBLIC;

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
    env text := coalesce(register.environment, 'production');
    receipt timestamptz := clock_timestamp();
    -- An instant in the future counts as the instant of receipt: one wrong clock must not make a token immortal.
    moment timestamptz := least(coalesce(register.registered_at, receipt), receipt);
    of_topic integer;
    observes boolean;
    one_token boolean;
    new_device text := nullif(register.device_id, '');
    devices text[];
    device text;
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

    -- The hottest write of all, every launch of every device: an active token of the same device, one HOT update, no event.
    -- It is its device's token, being active, and stays so.
    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe' INTO of_topic, observes FROM tokenkeeper.topic AS t
    WHERE t.topic = register.topic AND t.environment = env;
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = greatest(l.registered_at, moment),
        device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE greatest(l.device_at, moment) END,
        tags = CASE WHEN register.tags IS NULL OR (moment, register.tags) < (l.tags_at, l.tags) THEN l.tags ELSE register.tags END,
        tags_at = CASE WHEN register.tags IS NULL THEN l.tags_at ELSE greatest(l.tags_at, moment) END
    WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity'
      AND (new_device IS NULL OR new_device = l.device_id);
    IF FOUND THEN
        RETURN true;
    END IF;

    of_topic := coalesce(of_topic, tokenkeeper.ensure_topic(env, register.topic));
    one_token := tokenkeeper.has_one_token_a_device(register.topic);
    LOOP
        old := NULL;
        devices := '{}';
        SELECT l.* INTO seen FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
        IF one_token THEN
            SELECT coalesce(array_agg(DISTINCT d COLLATE "C"), '{}') INTO devices
            FROM unnest(ARRAY[seen.device_id, new_device]) AS d WHERE d IS NOT NULL;
        END IF;
        IF seen.token_key IS NULL AND devices = '{}' THEN
            -- Nothing is locked here, so there is nothing to give back.
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, device_at, tags, tags_at)
            VALUES (of_topic, key, moment, new_device, CASE WHEN new_device IS NOT NULL THEN moment END,
                register.tags, CASE WHEN register.tags IS NOT NULL THEN moment END)
            ON CONFLICT DO NOTHING;
            CONTINUE WHEN NOT FOUND;
        ELSE
            -- It may come to another device meanwhile: then all locks are given back, and all is tried anew.
            BEGIN
                PERFORM tokenkeeper.lock_devices(of_topic, devices, key);
                SELECT l.* INTO old FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
                IF one_token AND old.device_id IS DISTINCT FROM seen.device_id THEN
                    RAISE EXCEPTION 'the token has another device now' USING ERRCODE = 'TK001';
                END IF;
                IF old.token_key IS NULL THEN
                    INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, device_at, tags, tags_at)
                    VALUES (of_topic, key, moment, new_device, CASE WHEN new_device IS NOT NULL THEN moment END,
                        register.tags, CASE WHEN register.tags IS NOT NULL THEN moment END)
                    ON CONFLICT DO NOTHING;
                    IF NOT FOUND THEN
                        RAISE EXCEPTION 'the token is there now' USING ERRCODE = 'TK001';
                    END IF;
                END IF;
            EXCEPTION WHEN SQLSTATE 'TK001' THEN
                CONTINUE;
            END;
        END IF;

        IF old.token_key IS NOT NULL THEN
            new := old;
            new.registered_at := greatest(old.registered_at, moment);
            IF new_device IS NOT NULL
                AND (old.device_at IS NULL OR (moment, new_device COLLATE "C") > (old.device_at, old.device_id COLLATE "C")) THEN
                new.device_id := new_device;
                new.device_at := moment;
            END IF;
            IF register.tags IS NOT NULL AND (old.tags_at IS NULL OR (moment, register.tags) > (old.tags_at, old.tags)) THEN
                new.tags := register.tags;
                new.tags_at := moment;
            END IF;
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = new.registered_at, device_id = new.device_id, device_at = new.device_at,
                tags = new.tags, tags_at = new.tags_at,
                superseded_at = CASE WHEN new.device_id = old.device_id THEN l.superseded_at END
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
    'Records a registration, in the caller''s transaction; answers whether the token may be sent to now. Call it at every '
    'launch of the app: each one counts against a late 410. A device_id supersedes the device''s other tokens of the topic, but for '
    'Live Activities and controls; a null one keeps what there is, and so do null tags, or inherit those of the device''s former token. '
    'Raises 22023 for a malformed token, an unknown environment, an empty topic, a device_id over 512 bytes or an infinite instant. An empty device_id is none.';

-- The devices that are there already: as if their tokens had just been registered.
INSERT INTO tokenkeeper.device (topic_id, device_id)
SELECT DISTINCT l.topic_id, l.device_id FROM tokenkeeper.ledger AS l JOIN tokenkeeper.topic AS t USING (topic_id)
WHERE l.device_id IS NOT NULL AND tokenkeeper.has_one_token_a_device(t.topic);
SELECT count(tokenkeeper.settle_device(d.topic_id, d.device_id, '', clock_timestamp())) FROM (
    SELECT l.topic_id, l.device_id FROM tokenkeeper.ledger AS l JOIN tokenkeeper.topic AS t USING (topic_id)
    WHERE l.device_id IS NOT NULL AND tokenkeeper.has_one_token_a_device(t.topic)
    GROUP BY 1, 2 HAVING count(*) > 1) AS d;
