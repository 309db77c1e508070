-- oldest daemon: 0.1.0
--
-- A registration holds no lock on its token when it begins to lock devices.

-- As in 0012, but for its first UPDATE.
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
    BEGIN
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
        -- An UPDATE that met another one keeps the token locked even where it does not fit any more, SKIP LOCKED or not. To lock its
        -- devices after that would be against the order that all keep to, and end in a deadlock: so what it holds is given back.
        RAISE EXCEPTION 'not an active token of this device' USING ERRCODE = 'TK001';
    EXCEPTION WHEN SQLSTATE 'TK001' THEN
        NULL;
    END;

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
