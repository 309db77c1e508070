-- oldest daemon: 0.1.0
--
-- What applications call: register and unregister. What senders call: the gate.
--
-- enable_seqscan is off in each, because a session keeps its plans: one made while the ledger was small would read all of
-- it for every token after it has grown, a backfill in one transaction included.

CREATE FUNCTION tokenkeeper.register(
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

    -- The hottest write of all, every launch of every device: an active token, one HOT update, no event.
    SELECT t.topic_id INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = register.topic AND t.environment = env;
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = greatest(l.registered_at, moment),
        device_id = CASE WHEN moment >= l.registered_at THEN coalesce(register.device_id, l.device_id) ELSE l.device_id END,
        tags = CASE WHEN moment >= l.registered_at THEN coalesce(register.tags, l.tags) ELSE l.tags END
    WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND l.registered_at > '-infinity';
    IF FOUND THEN
        RETURN true;
    END IF;

    of_topic := coalesce(of_topic, tokenkeeper.ensure_topic(env, register.topic));
    LOOP
        SELECT l.* INTO old FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = of_topic AND l.token_key = key
        FOR NO KEY UPDATE;
        IF FOUND THEN
            UPDATE tokenkeeper.ledger AS l
            SET registered_at = greatest(l.registered_at, moment),
                device_id = CASE WHEN moment >= l.registered_at THEN coalesce(register.device_id, l.device_id) ELSE l.device_id END,
                tags = CASE WHEN moment >= l.registered_at THEN coalesce(register.tags, l.tags) ELSE l.tags END,
                suppressed_since = CASE
                    WHEN greatest(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) >= moment THEN l.suppressed_since END
            WHERE l.topic_id = of_topic AND l.token_key = key
            RETURNING l.* INTO new;
            IF old.registered_at = '-infinity' OR (old.suppressed AND NOT new.suppressed) THEN
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id,
                    registered_before, registered_after, invalidated_before, invalidated_after)
                VALUES (of_topic, key, CASE WHEN old.registered_at = '-infinity' THEN 'registered' ELSE 'revived' END,
                    'registration', new.device_id, nullif(old.registered_at, '-infinity'), new.registered_at,
                    greatest(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at),
                    greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
            END IF;
            RETURN NOT new.suppressed;
        END IF;

        INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, device_id, tags)
        VALUES (of_topic, key, moment, register.device_id, register.tags)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, registered_after)
            VALUES (of_topic, key, 'registered', 'registration', register.device_id, moment);
            RETURN true;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[]) IS
    'Records a registration, in the caller''s transaction; answers whether the token may be sent to now. Call it at every '
    'launch of the app: each one counts against a late 410. A null device_id or tags keeps what there is. '
    'Raises 22023 for a malformed token, an unknown environment, an empty topic or an infinite instant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.unregister(
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
        RAISE EXCEPTION 'device token is %, expected 1 to 512 bytes in hex', CASE
            WHEN unregister.token IS NULL THEN 'null'
            ELSE quote_literal(left(unregister.token, 8)) || '... (' || length(unregister.token) || ' characters)' END
            USING ERRCODE = 'invalid_parameter_value';
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
        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, unregistered_at, suppressed_since)
        VALUES (of_topic, key, moment, receipt)
        ON CONFLICT DO NOTHING
        RETURNING l.* INTO new;
        EXIT WHEN FOUND;
    END LOOP;
    IF new IS NULL THEN
        IF old.unregistered_at >= moment THEN
            RETURN;
        END IF;
        UPDATE tokenkeeper.ledger AS l
        SET unregistered_at = moment,
            suppressed_since = CASE
                WHEN l.suppressed THEN l.suppressed_since
                WHEN moment >= l.registered_at THEN receipt END
        WHERE l.topic_id = of_topic AND l.token_key = key
        RETURNING l.* INTO new;
        -- Nothing to tell where it was suppressed already, and for the same cause as now.
        IF old.suppressed
            AND tokenkeeper.cause_of(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at)
                = tokenkeeper.cause_of(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at) THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    VALUES (of_topic, key, CASE WHEN new.suppressed THEN 'unregistered_by_app' ELSE 'late_feedback_ignored' END,
        'unregistered', new.device_id, nullif(old.registered_at, '-infinity'), nullif(new.registered_at, '-infinity'),
        greatest(old.dead_at, old.suspect_at, old.unregistered_at, old.superseded_at),
        greatest(new.dead_at, new.suspect_at, new.unregistered_at, new.superseded_at));
END
$$;
COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz) IS
    'The app''s own word that a token must not be sent to (a log-out): suppressed until a later registration. '
    'Raises 22023 for a malformed token, an unknown environment, an empty topic or an infinite instant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz) FROM PUBLIC;

-- The gate ---------------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production') RETURNS boolean
-- plpgsql, because it keeps its plan: an SQL function with a subquery is planned anew at each call.
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(is_sendable.token);
BEGIN
    RETURN key IS NOT NULL AND NOT EXISTS (
        SELECT FROM tokenkeeper.topic AS t
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
        WHERE t.topic = is_sendable.topic AND t.environment = coalesce(is_sendable.environment, 'production')
          AND l.token_key = key AND l.suppressed);
END
$$;
COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS
    'The gate, for one token: false if it is suppressed or malformed. An unknown token may be sent to. Never an error.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.is_sendable(text, text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t
        WHERE t.topic = sendable.topic AND t.environment = coalesce(sendable.environment, 'production'));
BEGIN
    RETURN QUERY
        SELECT asked.token FROM unnest(sendable.tokens) WITH ORDINALITY AS asked (token, position)
        WHERE tokenkeeper.token_key(asked.token) IS NOT NULL AND NOT EXISTS (
            SELECT FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = tokenkeeper.token_key(asked.token) AND l.suppressed)
        ORDER BY asked.position;
END
$$;
COMMENT ON FUNCTION tokenkeeper.sendable(text[], text, text) IS
    'The gate, for a batch: those of the tokens that may be sent to, in the order and spelling given, duplicates kept; '
    'malformed ones left out. Never an error. Works on a standby.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.sendable(text[], text, text) FROM PUBLIC;
