-- A person's right to erasure: forget, forget_device and forget_user.

CREATE OR REPLACE FUNCTION tokenkeeper.mentions(token text, topic text, body text, hex text[], base64 text[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    said text COLLATE "C" := token;
    whole text COLLATE "C";
    folded text COLLATE "C";
    digits text COLLATE "C";
BEGIN
    IF coalesce(octet_length(token), 0)::bigint + coalesce(octet_length(topic), 0) + coalesce(octet_length(body), 0) > tokenkeeper.largest_row() THEN
        -- It will be rejected, and no more of it will be kept.
        said := left(token, 1024);
        whole := concat_ws(' ', said, left(topic, 1024), left(body, 1024));
    ELSE
        whole := concat_ws(' ', token, topic, body);
    END IF;
    folded := lower(whole);
    -- A token with separators is only looked for near the start: a regular expression over megabytes takes a second.
    digits := regexp_replace(left(folded, 8192), '[^0-9a-f]', '', 'g');
    IF lower(regexp_replace(left(said, 2048), '[^0-9A-Fa-f]', '', 'g')) = ANY (hex COLLATE "C") OR digits = ANY (hex COLLATE "C") THEN
        RETURN true;
    END IF;
    FOR n IN 1..cardinality(hex) LOOP
        -- Short tokens are not searched for inside texts: they would be found within others.
        IF length(hex[n]) >= 16 AND (strpos(folded, hex[n] COLLATE "C") > 0 OR strpos(digits, hex[n] COLLATE "C") > 0
            OR strpos(whole, base64[n] COLLATE "C") > 0) THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.mentions(text, text, text, text[], text[]) IS
    'Whether a result contains one of these tokens: in hex or base64 anywhere, or in hex with other characters in between within the first 8192 '
    'characters. A token under 8 bytes is found only if the text consists of nothing else. Of texts longer than largest_row, only what is kept of them: the '
    'first 1024 characters of each.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.mentions(text, text, text, text[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.registers(
    queued tokenkeeper.registration, hex text[], base64 text[], of_device text, of_user text) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    plain text COLLATE "C" := tokenkeeper.parse_token(queued.token);
    more text;
BEGIN
    IF plain = ANY (hex) OR tokenkeeper.device_name(queued.device_id) = of_device OR queued.user_id COLLATE "C" = of_user THEN
        RETURN true;
    END IF;
    -- Somebody may have mixed up the columns.
    more := concat_ws(' ', queued.environment, queued.device_id, queued.user_id,
                      -- More are too many to be kept or read: see length_of_tags.
                      CASE WHEN cardinality(queued.tags) <= 100000 THEN array_to_string(queued.tags, ' ') END);
    IF plain IS NOT NULL AND octet_length(queued.topic) < 64 AND octet_length(more) < 64 THEN
        RETURN false;
    END IF;
    RETURN coalesce(tokenkeeper.parse_token(queued.token, true) COLLATE "C" = ANY (hex), false)
        OR tokenkeeper.mentions(queued.token, queued.topic, more, hex, base64);
END
$$;
COMMENT ON FUNCTION tokenkeeper.registers(tokenkeeper.registration, text[], text[], text, text) IS
    'Whether a queued registration has one of these tokens, in any form that parse_token understands or anywhere in its texts as for mentions, or names '
    'this device or this user.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.registers(tokenkeeper.registration, text[], text[], text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.keys_to_forget(of_key bytea, of_device text, of_user text) RETURNS bytea[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    device text COLLATE "C" := of_device;
    who text COLLATE "C" := of_user;
BEGIN
    -- Tokens that were pruned since count, too, if they do not belong to another device or user now.
    IF device IS NOT NULL THEN
        RETURN ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.device_id = device
            UNION
            SELECT e.token_key FROM tokenkeeper.token_event_log AS e
            WHERE e.device_id = device AND NOT EXISTS (
                SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = e.topic_id AND l.token_key = e.token_key
                  AND l.device_id IS DISTINCT FROM device)
            ORDER BY 1);
    END IF;
    IF who IS NOT NULL THEN
        RETURN ARRAY(
            SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.user_id = who
            UNION
            SELECT e.token_key FROM tokenkeeper.token_event_log AS e
            WHERE e.user_id = who AND NOT EXISTS (
                SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = e.topic_id AND l.token_key = e.token_key
                  AND l.user_id IS DISTINCT FROM who)
            ORDER BY 1);
    END IF;
    RETURN ARRAY[of_key];
END
$$;
COMMENT ON FUNCTION tokenkeeper.keys_to_forget(bytea, text, text) IS
    'The tokens that forget, forget_device or forget_user deletes, as of now, in order.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.keys_to_forget(bytea, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget_in_campaigns(keys bytea[], of_device text, of_user text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    kind text COLLATE "C" := CASE WHEN of_device IS NOT NULL THEN 'device' WHEN of_user IS NOT NULL THEN 'user' END;
    person text COLLATE "C" := coalesce(of_device, of_user);
    about bigint[];
    met record;
    b tokenkeeper.campaign_batch;
    ordinals integer[];
    total bigint := 0;
    part bigint;
BEGIN
    -- Of all campaigns, only those that have not ended, and those to the device or the user.
    DELETE FROM tokenkeeper.campaign_token AS t WHERE t.ctid = ANY (ARRAY(
        SELECT o.place FROM tokenkeeper.campaign AS c CROSS JOIN unnest(keys) AS k (token_key)
        CROSS JOIN LATERAL (SELECT a.ctid AS place FROM tokenkeeper.campaign_token AS a
                            WHERE a.campaign_id = c.campaign_id AND tokenkeeper.token_key(a.token) = k.token_key OFFSET 0) AS o
        WHERE c.has_list));
    GET DIAGNOSTICS total = ROW_COUNT;
    -- A campaign to that device or user alone: its content is about the person.
    about := ARRAY(
        SELECT a.campaign_id FROM tokenkeeper.campaign AS a
        WHERE a.audience_kind IN ('device', 'user') AND a.audience = person AND a.audience_kind = kind);
    -- Campaigns before batches, as everywhere: those that this transaction changes, here or at its end.
    FOR met IN
        SELECT u.campaign_id FROM unnest(about) AS u (campaign_id)
        UNION
        SELECT a.campaign_id FROM tokenkeeper.campaign AS a WHERE a.ended_at IS NULL AND a.addressed_to = ANY (keys)
        ORDER BY 1
    LOOP
        PERFORM FROM tokenkeeper.campaign AS c WHERE c.campaign_id = met.campaign_id FOR NO KEY UPDATE;
    END LOOP;
    -- The payload is one that nothing can send. Without its key, the same call of enqueue creates another campaign.
    UPDATE tokenkeeper.campaign AS c
    SET audience = NULL, name = NULL, payload = 'null', collapse_id = NULL, idempotency_key = NULL, content_hash = '',
        state = CASE WHEN c.ended_at IS NULL THEN 'cancelled' ELSE c.state END, is_addressed = true, addressed_to = ''
    WHERE c.campaign_id = ANY (about);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    IF part > 0 THEN
        -- Without their content, they cannot be queued again.
        DELETE FROM tokenkeeper.failed_send AS f WHERE f.campaign_id = ANY (about);
        GET DIAGNOSTICS part = ROW_COUNT;
        total := total + part;
        -- Its name.
        UPDATE tokenkeeper.operation AS o SET message = split_part(o.message, ':', 1)
        WHERE o.operation IN ('campaign_paused', 'campaign_resumed', 'campaign_cancelled', 'campaign_rate_set')
          AND o.message LIKE 'campaign %:%'
          AND split_part(split_part(o.message, ':', 1), ',', 1) = ANY (ARRAY(SELECT 'campaign ' || a FROM unnest(about) AS a));
    END IF;
    -- The batches are in the order of keys, so only one batch of a campaign can have a token. In the order in which they are locked everywhere.
    FOR met IN
        SELECT DISTINCT f.campaign_id, f.batch
        FROM tokenkeeper.campaign AS c CROSS JOIN unnest(keys) AS k (token_key)
        CROSS JOIN LATERAL (SELECT a.campaign_id, a.batch FROM tokenkeeper.campaign_batch AS a
                            WHERE a.campaign_id = c.campaign_id AND a.first_key <= k.token_key ORDER BY a.first_key DESC LIMIT 1) AS f
        WHERE c.ended_at IS NULL
        ORDER BY f.campaign_id, f.batch
    LOOP
        SELECT a.* INTO b FROM tokenkeeper.campaign_batch AS a WHERE a.campaign_id = met.campaign_id AND a.batch = met.batch FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        ordinals := ARRAY(SELECT k.ordinal::integer FROM unnest(b.token_keys) WITH ORDINALITY AS k (token_key, ordinal) WHERE k.token_key = ANY (keys));
        CONTINUE WHEN ordinals = '{}';
        UPDATE tokenkeeper.campaign_batch AS a
        SET token_keys = n.token_keys, first_key = CASE WHEN a.first_key = ANY (keys) THEN coalesce(n.first_key, '') ELSE a.first_key END
        FROM (SELECT array_agg(k.kept ORDER BY k.ordinal) AS token_keys,
                     (array_agg(k.kept ORDER BY k.ordinal) FILTER (WHERE k.kept IS NOT NULL))[1] AS first_key
              FROM (SELECT CASE WHEN u.token_key = ANY (keys) THEN NULL ELSE u.token_key END AS kept, u.ordinal
                    FROM unnest(b.token_keys) WITH ORDINALITY AS u (token_key, ordinal)) AS k) AS n
        WHERE a.campaign_id = b.campaign_id AND a.batch = b.batch;
        PERFORM tokenkeeper.end_in_batches(
            array_agg(b.campaign_id), array_agg(b.batch), array_agg(o), array_agg('forgotten'::text))
        FROM unnest(ordinals) AS o WHERE get_bit(b.ended, o) = 0 HAVING count(*) > 0;
        total := total + cardinality(ordinals);
    END LOOP;
    -- Tokens of the campaign that are not erased: they belong to another device or user now.
    SELECT total + coalesce(sum(tokenkeeper.end_waiting(a, 'forgotten', NULL)), 0) INTO total FROM unnest(about) AS a;
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_in_campaigns(bytea[], text, text) IS
    'The part of erase that concerns campaigns: takes the tokens out of the batches and lists, and ends their requests as forgotten. Cancels campaigns to the '
    'device or the user alone, ends their requests as forgotten, and erases their content. Returns how many rows and requests.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_in_campaigns(bytea[], text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.erase(of_key bytea, of_device text, of_user text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- An application may hold a token, and the drains stand still until it is released.
SET lock_timeout = '10s'
SET enable_seqscan = off
AS $$
DECLARE
    asked text COLLATE "C" := of_device;
    who text COLLATE "C" := of_user;
    keys bytea[] := tokenkeeper.keys_to_forget(of_key, of_device, of_user);
    hex text[];
    base64 text[];
    looked_for bytea[] := keys;
    rejected bigint[];
    rejected_registrations bigint[];
    looked_since xid := pg_snapshot_xmin(pg_current_snapshot())::xid;
    devices text[] COLLATE "C";
    token_topics integer[];
    token_keys bytea[];
    sharing_topics integer[];
    sharing_keys bytea[];
    busy_topic integer;
    busy bytea;
    total bigint := 0;
    part bigint;
BEGIN
    hex := ARRAY(SELECT encode(k, 'hex') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
    base64 := ARRAY(SELECT encode(k, 'base64') FROM unnest(keys) WITH ORDINALITY AS u (k, n) ORDER BY u.n);
    -- The long search comes before the drains stand still. What is rejected or changed after it is searched under the locks.
    SELECT array_agg(r.rejected_id) INTO rejected
    FROM tokenkeeper.rejected_result AS r WHERE tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64);

    SELECT array_agg(r.rejected_id) INTO rejected_registrations
    FROM tokenkeeper.rejected_registration AS r
    WHERE tokenkeeper.registers(ROW(r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned,
                                    r.queued_at, 8, r.attempts, NULL)::tokenkeeper.registration, hex, base64, asked, who);

    PERFORM tokenkeeper.lock_out_drains();
    LOOP
        busy := NULL;
        keys := tokenkeeper.keys_to_forget(of_key, asked, who);
        BEGIN
            SELECT array_agg(l.topic_id ORDER BY l.topic_id, l.token_key), array_agg(l.token_key ORDER BY l.topic_id, l.token_key),
                   array_agg(DISTINCT l.device_id)
            INTO token_topics, token_keys, devices
            FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
            JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key;
            -- These, and the tokens of the same devices that will lose their tags. A constant shares none.
            SELECT array_agg(o.topic_id), array_agg(o.token_key) INTO sharing_topics, sharing_keys
            FROM unnest(token_topics, token_keys) AS k (topic_id, token_key)
            CROSS JOIN LATERAL (SELECT g.* FROM tokenkeeper.ledger AS g WHERE g.topic_id = k.topic_id AND g.token_key = k.token_key OFFSET 0) AS g
            JOIN tokenkeeper.topic AS t ON t.topic_id = g.topic_id AND tokenkeeper.has_one_token_per_device(t.topic)
            JOIN tokenkeeper.ledger AS o ON o.device_id = g.device_id AND o.topic_id + 0 = g.topic_id
            WHERE NOT g.of_constant AND o.tags_at = g.tags_at AND o.tags = g.tags AND o.token_key <> ALL (keys);
            FOR busy_topic, busy IN
                SELECT k.topic_id, k.token_key FROM unnest(token_topics || sharing_topics, token_keys || sharing_keys) AS k (topic_id, token_key)
            LOOP
                PERFORM FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = busy_topic AND l.token_key = busy FOR UPDATE SKIP LOCKED;
                IF NOT FOUND AND EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy_topic AND l.token_key = busy) THEN
                    RAISE EXCEPTION 'a token is locked' USING ERRCODE = 'TK001';
                END IF;
            END LOOP;
            busy := NULL;
            -- If a token has come to the device or the user, or left it meanwhile, begin again.
            IF keys IS DISTINCT FROM tokenkeeper.keys_to_forget(of_key, asked, who) THEN
                RAISE EXCEPTION 'there are other tokens now' USING ERRCODE = 'TK001';
            END IF;
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            IF busy IS NOT NULL THEN
                -- Wait for it without holding another token, and do not keep it either.
                BEGIN
                    PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy_topic AND l.token_key = busy FOR UPDATE;
                    RAISE EXCEPTION 'the token is free' USING ERRCODE = 'TK001';
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
        rejected_registrations := NULL;
        looked_since := NULL;
    END IF;

    -- Tokens of the same devices that stay do not keep what those that go had reported: the same tags of the same instant.
    UPDATE tokenkeeper.ledger AS l SET tags = NULL, tags_at = NULL
    FROM unnest(sharing_topics, sharing_keys) AS k (topic_id, token_key)
    WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key;

    -- Batches first: what leaves them unfinished goes to the outbox. Nobody addresses meanwhile.
    total := tokenkeeper.forget_in_campaigns(keys, asked, who);

    FOR step IN 1..16 LOOP
        CASE step
            -- The outbox before the queue: a response moves from the outbox to the queue while it is recorded. A claimed request is being
            -- sent; its response finds no request and is not kept.
            WHEN 1 THEN
                WITH gone AS (
                    DELETE FROM tokenkeeper.send_request AS r
                    WHERE tokenkeeper.token_key(r.token) = ANY (keys)
                       OR (tokenkeeper.token_key(r.token) IS NULL AND tokenkeeper.mentions(r.token, NULL, NULL, hex, base64))
                       -- Somebody may have mixed up the columns.
                       OR (octet_length(r.topic) >= 40 AND tokenkeeper.mentions(NULL, r.topic, NULL, hex, base64))
                    RETURNING r.campaign_id, r.campaign_number
                ), ended AS (
                    INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
                    SELECT g.campaign_id, g.campaign_number >> 9, 1, 'forgotten', ARRAY[g.campaign_number & 511]::smallint[]
                    FROM gone AS g WHERE g.campaign_id IS NOT NULL
                )
                SELECT count(*) INTO part FROM gone;
                total := total + part;
                CONTINUE;
            WHEN 2 THEN
                DELETE FROM tokenkeeper.suppressed_send AS s WHERE s.token_key = ANY (keys);
            WHEN 3 THEN
                DELETE FROM tokenkeeper.failed_send AS f WHERE tokenkeeper.mentions(f.token, f.topic, NULL, hex, base64);
            WHEN 4 THEN
                DELETE FROM tokenkeeper.background_send AS b WHERE b.token_key = ANY (keys);
                DELETE FROM tokenkeeper.alert_send AS a
                USING tokenkeeper.topic AS t, unnest(keys) AS k (token_key)
                WHERE a.topic_id = t.topic_id AND a.token_key = k.token_key;
            WHEN 5 THEN
                DELETE FROM tokenkeeper.send_result AS r
                WHERE CASE WHEN tokenkeeper.token_key(r.token) = ANY (keys) THEN true
                           -- Most results: a token, a topic, and a body too short for a token.
                           WHEN tokenkeeper.token_key(r.token) IS NOT NULL AND octet_length(r.topic) < 64
                               AND coalesce(octet_length(r.body), 0) < 16 THEN false
                           ELSE tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64) END;
            WHEN 6 THEN
                DELETE FROM tokenkeeper.rejected_result AS r
                WHERE r.rejected_id IN (SELECT unnest(rejected))
                   OR (coalesce(age(r.xmin) <= age(looked_since), true)
                       AND tokenkeeper.mentions(r.token, r.topic, r.body, hex, base64));
            WHEN 7 THEN
                DELETE FROM tokenkeeper.held_result AS h
                USING tokenkeeper.topic AS t, unnest(keys) AS k (token_key)
                WHERE h.topic_id = t.topic_id AND h.token_key = k.token_key;
            -- Only those that are locked.
            WHEN 8 THEN
                DELETE FROM tokenkeeper.ledger AS l
                USING unnest(token_topics, token_keys) AS k (topic_id, token_key)
                WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key;
            WHEN 9 THEN
                DELETE FROM tokenkeeper.receipt AS r
                USING tokenkeeper.topic AS t, unnest(keys) AS k (token_key)
                WHERE r.topic_id = t.topic_id AND r.token_key = k.token_key;
            WHEN 10 THEN
                DELETE FROM tokenkeeper.token_event_log AS e WHERE e.token_key = ANY (keys);
            -- The device itself; nothing if only a token was given.
            WHEN 11 THEN
                DELETE FROM tokenkeeper.token_event_log AS e WHERE e.device_id = asked;
            WHEN 12 THEN
                DELETE FROM tokenkeeper.held_registration AS h
                WHERE h.token_key = ANY (keys) OR tokenkeeper.device_name(h.device_id) = asked OR h.user_id COLLATE "C" = who;
            WHEN 13 THEN
                DELETE FROM tokenkeeper.registration AS r
                WHERE CASE -- Most registrations: plain hex, and nothing else that is long enough for a token.
                           WHEN r.tags IS NULL AND octet_length(r.topic) < 64
                               AND coalesce(octet_length(r.environment), 0)::bigint + coalesce(octet_length(r.device_id), 0)
                                   + coalesce(octet_length(r.user_id), 0) < 64
                               AND tokenkeeper.token_key(r.token) IS NOT NULL
                           THEN tokenkeeper.token_key(r.token) = ANY (keys) OR tokenkeeper.device_name(r.device_id) = asked OR r.user_id COLLATE "C" = who
                           -- It will be rejected, and no more of it will be kept.
                           WHEN tokenkeeper.registration_size_fault(r.environment, r.topic, r.token, r.device_id, r.user_id, r.tags) IS NOT NULL
                           THEN tokenkeeper.registers(
                               ROW(left(r.environment, 1024), left(r.topic, 1024), left(r.token, 1024), r.registered_at, left(r.device_id, 1024),
                                   left(r.user_id, 1024), tokenkeeper.cut_tags(r.tags), r.unregistered, r.source_id, r.returned, r.queued_at, 8, r.attempts,
                                   NULL)::tokenkeeper.registration, hex, base64, asked, who)
                           ELSE tokenkeeper.registers(r, hex, base64, asked, who) END;
            WHEN 14 THEN
                DELETE FROM tokenkeeper.rejected_registration AS r
                WHERE r.rejected_id IN (SELECT unnest(rejected_registrations))
                   OR (coalesce(age(r.xmin) <= age(looked_since), true)
                       AND tokenkeeper.registers(
                           ROW(r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.source_id, r.returned,
                               r.queued_at, 8, r.attempts, NULL)::tokenkeeper.registration, hex, base64, asked, who));
            -- The user itself; nothing if a token or a device was given.
            WHEN 15 THEN
                DELETE FROM tokenkeeper.token_event_log AS e WHERE e.user_id = who;
            WHEN 16 THEN
                DELETE FROM tokenkeeper.crowded_token AS c WHERE c.token_key = ANY (keys);
        END CASE;
        GET DIAGNOSTICS part = ROW_COUNT;
        total := total + part;
    END LOOP;
    -- How far a campaign has read the ledger. The token before it says the same, now that this one is gone. A list has nothing before it.
    UPDATE tokenkeeper.campaign AS c
    SET addressed_to = CASE WHEN c.audience_kind = 'tokens' THEN '' ELSE coalesce((
        SELECT l.token_key FROM tokenkeeper.topic AS t CROSS JOIN LATERAL (
            SELECT a.token_key FROM tokenkeeper.ledger AS a
            WHERE a.topic_id = t.topic_id AND a.token_key < c.addressed_to ORDER BY a.token_key DESC LIMIT 1) AS l
        WHERE t.topic = c.topic AND t.environment = c.environment), '') END
    WHERE c.ended_at IS NULL AND c.addressed_to = ANY (keys);
    UPDATE tokenkeeper.operation AS o SET device_id = NULL
    WHERE o.device_id = ANY (devices) AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = o.device_id);
    UPDATE tokenkeeper.operation AS o SET device_id = NULL WHERE o.device_id = asked;
    UPDATE tokenkeeper.sweep_topic AS s SET samples = NULL
    WHERE s.samples && ARRAY(SELECT left(h, 8) FROM unnest(hex) AS h);
    INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('forgotten', total);
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase(bytea, text, text) IS
    'The common part of forget, forget_device and forget_user: deletes each row about a token, in every topic; or about each token of a device or a user, '
    'and the history of the device or the user. Locks out the drains once it has searched the rejected results and registrations.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.erase(bytea, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget(token text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
-- With sequential scans off, each cost looks immense, and just-in-time compilation would take 15 times as long as the rest.
SET jit = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(forget.token);
BEGIN
    IF key IS NULL THEN
        PERFORM tokenkeeper.raise_malformed_token(forget.token);
    END IF;
    RETURN tokenkeeper.erase(key, NULL, NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget(text) IS
    'A person''s right to erasure: deletes each row about a device token, in every topic and environment, from the ledger, history, queues, outbox, and held '
    'and rejected results and registrations; returns how many rows. Other tokens of its device with the same tags of the same instant lose them. The '
    'drains stand still until the transaction ends, so commit at once. Raises 22023 for a malformed token, '
    '55P03 if it cannot lock out the drains or lock a token within ten seconds, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget_device(device_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
-- With sequential scans off, each cost looks immense, and just-in-time compilation would take 15 times as long as the rest.
SET jit = off
AS $$
DECLARE
    device text COLLATE "C" := tokenkeeper.device_name(forget_device.device_id);
BEGIN
    IF coalesce(device, '') = '' THEN
        RAISE EXCEPTION 'device_id is %, expected the one given to register', CASE WHEN forget_device.device_id = '' THEN 'empty' ELSE 'null, or names no device' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(NULL, device, NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_device(text) IS
    'A person''s right to erasure, by the device_id given to register: deletes each token of the device, as forget does, and its history; returns how many rows. '
    'Cancels campaigns to this device alone, and erases their content, name and idempotency_key; what a daemon has in flight ends. '
    'The drains stand still until the transaction ends, so commit at once. Raises 22023 for a null or empty device_id, 55P03 if it cannot lock out the drains '
    'or lock a token within ten seconds, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_device(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.forget_user(user_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
-- With sequential scans off, each cost looks immense, and just-in-time compilation would take 15 times as long as the rest.
SET jit = off
AS $$
DECLARE
    who text COLLATE "C" := forget_user.user_id;
BEGIN
    IF coalesce(who, '') = '' THEN
        RAISE EXCEPTION 'user_id is %, expected the one given to register', CASE WHEN who IS NULL THEN 'null' ELSE 'empty' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(NULL, NULL, who);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_user(text) IS
    'A person''s right to erasure, by the user_id given to register: deletes each token of the user, as forget does, and each event of the user; returns how '
    'many rows. Cancels campaigns to this user alone, and erases their content, name and idempotency_key; what a daemon has in flight ends. Tokens that '
    'belong to another user now, or to none, stay; they lose '
    'the tags that a deleted token of the same device has, too, of the same instant. The drains stand still until the transaction ends, so commit at once. Raises 22023 '
    'for a null or empty user_id, 55P03 if it cannot lock out the drains or lock a token within ten seconds, 25001 if the isolation level is not read '
    'committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_user(text) FROM PUBLIC;
