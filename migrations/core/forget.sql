-- A person's right to erasure: forget, forget_device and forget_user. The table erasure and names_in are in versions/0013_erasure.
--
-- Each deletes at once what an index finds, and leaves a row in erasure. No drain stands still, and forget searches no queue. A queued row that was reported
-- before is dropped where it surfaces: by the drains, and by the claim of requests. A batch that was running at that moment may still write;
-- finish_erasures deletes that, when every transaction from before has ended. It also reads the outbox.
--
-- Locks: forget takes SHARE UPDATE EXCLUSIVE on erasure, so one runs at a time. It locks the tokens, and those that share their tags, by (topic_id, token_key). It
-- waits at most ten seconds for each, and holds no other token meanwhile. With all tokens locked, it waits for campaigns, batches and requests. finish_erasures
-- does not take the first lock, and waits for no token.

CREATE OR REPLACE FUNCTION tokenkeeper.forgotten_results(reports tokenkeeper.token_report[]) RETURNS integer[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tokenkeeper.erasure) THEN
        RETURN '{}';
    END IF;
    -- They are about a push from before, unless the token has been registered since.
    RETURN ARRAY(
        SELECT r.n FROM unnest(reports) AS r
        WHERE encode(r.token_key, 'hex') IN (SELECT unnest(e.names) FROM tokenkeeper.erasure AS e)
          AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = r.topic_id AND l.token_key = r.token_key));
END
$$;
COMMENT ON FUNCTION tokenkeeper.forgotten_results(tokenkeeper.token_report[]) IS
    'Which of these reports of results, by n, are about recently forgotten tokens: they are dropped.';

CREATE OR REPLACE FUNCTION tokenkeeper.not_forgotten(rows tokenkeeper.registration[]) RETURNS tokenkeeper.registration[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tokenkeeper.erasure) THEN
        RETURN rows;
    END IF;
    RETURN ARRAY(
        WITH forgotten AS MATERIALIZED (
            SELECT n AS name, e.user_id, max(e.forgotten_at) AS until FROM tokenkeeper.erasure AS e CROSS JOIN unnest(e.names) AS n GROUP BY 1, 2
        ), said AS MATERIALIZED (
            SELECT row_number() OVER () AS n, r AS queued, nullif(r.user_id, '') AS user_id,
                   -- As in read_registrations: what is written to an attached table counts from the write.
                   CASE (SELECT o.kind FROM tokenkeeper.registration_source AS o WHERE o.source_id = r.source_id) WHEN 'attachment' THEN r.queued_at
                        WHEN 'repair' THEN (SELECT o.started_at FROM tokenkeeper.registration_source AS o WHERE o.source_id = r.source_id)
                        ELSE least(r.registered_at, r.queued_at) END AS at,
                   -- Most registrations: plain hex, and nothing else that is long enough for a token.
                   CASE WHEN t.key IS NOT NULL
                             AND greatest(octet_length(r.topic), octet_length(r.environment), octet_length(r.device_id), octet_length(r.user_id),
                                      octet_length(r.row_key)) < 40
                             AND NOT EXISTS (SELECT FROM unnest(r.tags) AS t WHERE octet_length(t) >= 40)
                        THEN ARRAY[encode(t.key, 'hex'), 'd:' || tokenkeeper.device_name(r.device_id), 'u:' || r.user_id]
                        ELSE tokenkeeper.names_in(ARRAY[r.token, r.topic, r.environment, r.device_id, r.user_id, r.row_key], r.device_id, r.user_id, r.tags) END
                       COLLATE "C" AS names
            FROM unnest(rows) AS r CROSS JOIN LATERAL (SELECT tokenkeeper.token_key(r.token) AS key OFFSET 0) AS t
        ), dropped AS (
            SELECT s.n FROM said AS s CROSS JOIN unnest(s.names) AS w JOIN forgotten AS f ON f.name = w
            WHERE CASE
                -- The token is another person's now.
                WHEN s.user_id <> f.user_id THEN false
                -- A logout says nothing about a token that was not registered again: somebody may delete the row in a table of theirs right after.
                WHEN (s.queued).unregistered THEN s.at <= f.until OR NOT EXISTS (
                    SELECT FROM tokenkeeper.topic AS t JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
                    WHERE t.topic = (s.queued).topic AND t.environment = coalesce((s.queued).environment, 'production')
                      AND l.token_key = tokenkeeper.token_key((s.queued).token))
                ELSE s.at <= f.until END
        )
        SELECT s.queued FROM said AS s WHERE s.n NOT IN (SELECT d.n FROM dropped AS d) ORDER BY s.n);
END
$$;
COMMENT ON FUNCTION tokenkeeper.not_forgotten(tokenkeeper.registration[]) IS
    'Queued registrations without those that were made before, and name a forgotten token in any column, or a forgotten device or user in its own.';

CREATE OR REPLACE FUNCTION tokenkeeper.is_forgotten(token text, queued_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    -- OFFSET 0: the token is read once, and not for each erasure.
    SELECT EXISTS (SELECT FROM tokenkeeper.erasure AS e WHERE e.names @> ARRAY[n.name] AND is_forgotten.queued_at <= e.forgotten_at)
    FROM (SELECT encode(tokenkeeper.token_key(is_forgotten.token), 'hex') COLLATE "C" AS name OFFSET 0) AS n
$$;
COMMENT ON FUNCTION tokenkeeper.is_forgotten(text, timestamptz) IS 'Internal: whether a request for this token was queued before the token was forgotten.';

CREATE OR REPLACE FUNCTION tokenkeeper.keys_to_forget(of_key bytea, of_device text, of_user text) RETURNS bytea[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
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

CREATE OR REPLACE FUNCTION tokenkeeper.forget_in_campaigns(keys bytea[], of_device text, of_user text, until timestamptz) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_bitmapscan = off
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
        WHERE a.audience_kind IN ('device', 'user') AND a.audience = person AND a.audience_kind = kind AND a.created_at <= until);
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
                            WHERE a.campaign_id + 0 = c.campaign_id AND a.first_key <= k.token_key ORDER BY a.first_key DESC LIMIT 1) AS f
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
COMMENT ON FUNCTION tokenkeeper.forget_in_campaigns(bytea[], text, text, timestamptz) IS
    'The part of erase_found for campaigns: removes the tokens from batches and lists, and ends their requests as forgotten. Cancels campaigns to the device '
    'or the user alone that were created until then, and erases their content. Returns how many rows and requests.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_forgotten(keys bytea[], OUT busy_topic integer, OUT busy_key bytea)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    FOR busy_topic, busy_key IN
        SELECT l.topic_id, l.token_key FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key
        UNION
        SELECT s.topic_id, s.token_key FROM tokenkeeper.sharing_tokens(keys) AS s
        ORDER BY 1, 2
    LOOP
        PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy_topic AND l.token_key = busy_key FOR UPDATE SKIP LOCKED;
        IF NOT FOUND AND EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy_topic AND l.token_key = busy_key) THEN
            RETURN;
        END IF;
    END LOOP;
    busy_topic := NULL;
    busy_key := NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_forgotten(bytea[]) IS
    'Locks these tokens in every topic, and those of their devices that share their tags, without waiting. If another session holds one, returns that one '
    'and locks no more; otherwise null.';

CREATE OR REPLACE FUNCTION tokenkeeper.sharing_tokens(keys bytea[]) RETURNS TABLE (topic_id integer, token_key bytea)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.topic_id, o.token_key
    FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
    JOIN tokenkeeper.ledger AS g ON g.topic_id = t.topic_id AND g.token_key = k.token_key
    JOIN tokenkeeper.ledger AS o ON o.device_id = g.device_id AND o.topic_id + 0 = g.topic_id
    WHERE tokenkeeper.has_one_token_per_device(t.topic) AND NOT g.of_constant AND o.tags_at = g.tags_at AND o.tags = g.tags AND o.token_key <> ALL (keys)
$$;
COMMENT ON FUNCTION tokenkeeper.sharing_tokens(bytea[]) IS
    'The other tokens of the devices of these tokens with the same tags of the same instant. Those of a constant share none.';

CREATE OR REPLACE FUNCTION tokenkeeper.outlives(entry tokenkeeper.ledger, asked tokenkeeper.erasure) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (entry).registered_at > (asked).forgotten_at OR coalesce((entry).user_id <> (asked).user_id, false);
COMMENT ON FUNCTION tokenkeeper.outlives(tokenkeeper.ledger, tokenkeeper.erasure) IS
    'Whether an erasure leaves this token: it was registered since, or it is another user''s than the forgotten one''s.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_mentions(asked tokenkeeper.erasure, keys bytea[], devices text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
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
    UPDATE tokenkeeper.operation AS o SET device_id = NULL WHERE o.device_id = asked.device_id;
    DELETE FROM tokenkeeper.moved_row AS m
    WHERE m.queued_at <= asked.forgotten_at
      AND tokenkeeper.names_in(ARRAY(SELECT v.value FROM jsonb_each_text(m.content) AS v), m.content ->> 'device_id', m.content ->> 'user_id') && asked.names;
    UPDATE tokenkeeper.sweep_topic AS s SET samples = NULL
    WHERE s.samples && ARRAY(SELECT left(encode(k, 'hex'), 8) FROM unnest(keys) AS k);
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_mentions(tokenkeeper.erasure, bytea[], text[]) IS
    'The part of erase_found for mentions of a token or a device: how far a campaign has read, operations, rows of moved topics, and the samples of a sweep.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_from_kept(asked tokenkeeper.erasure, keys bytea[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- A token that was registered since keeps nothing of the person that was reported before.
    UPDATE tokenkeeper.ledger AS l
    SET device_id = CASE WHEN l.device_at <= asked.forgotten_at THEN NULL ELSE l.device_id END,
        user_id = CASE WHEN l.user_at <= asked.forgotten_at THEN NULL ELSE l.user_id END,
        tags = CASE WHEN l.tags_at <= asked.forgotten_at THEN NULL ELSE l.tags END,
        tags_at = CASE WHEN l.tags_at <= asked.forgotten_at THEN NULL ELSE l.tags_at END
    FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
    WHERE l.topic_id = t.topic_id AND l.token_key = k.token_key AND l.registered_at > asked.forgotten_at
      AND (l.device_at <= asked.forgotten_at OR l.user_at <= asked.forgotten_at OR l.tags_at <= asked.forgotten_at);
    -- Tokens of the same devices that stay do not keep what those that go had reported: the same tags of the same instant.
    UPDATE tokenkeeper.ledger AS l SET tags = NULL, tags_at = NULL
    FROM tokenkeeper.sharing_tokens(keys) AS k WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_from_kept(tokenkeeper.erasure, bytea[]) IS
    'Internal: clears what remaining tokens have of the person: these, if they were registered since, and others of the same devices.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_found(asked tokenkeeper.erasure, keys bytea[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    devices text[] COLLATE "C" := ARRAY(
        SELECT DISTINCT l.device_id FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key);
    -- Those that go in every topic.
    gone_keys bytea[] := ARRAY(
        SELECT k FROM unnest(keys) AS k
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic AS t JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
                          WHERE l.token_key = k AND tokenkeeper.outlives(l, asked)));
    total bigint;
BEGIN
    PERFORM tokenkeeper.erase_from_kept(asked, keys);
    -- Batches first: what leaves them unfinished goes to the outbox.
    total := tokenkeeper.forget_in_campaigns(gone_keys, asked.device_id, asked.user_id, asked.forgotten_at);
    WITH known AS MATERIALIZED (
        -- One statement sees all of it, or nothing.
        SELECT t.topic_id, t.topic, t.environment, k.token_key FROM tokenkeeper.topic AS t CROSS JOIN unnest(keys) AS k (token_key)
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l
                          WHERE l.topic_id = t.topic_id AND l.token_key = k.token_key AND tokenkeeper.outlives(l, asked))
    ), suppressed AS (
        DELETE FROM tokenkeeper.suppressed_send AS s WHERE s.token_key = ANY (keys) AND s.queued_at <= asked.forgotten_at RETURNING 1
    ), failed AS (
        DELETE FROM tokenkeeper.failed_send AS f
        WHERE tokenkeeper.names_in(ARRAY[f.token, f.topic, f.environment, f.push_type, f.collapse_id, f.error]) && asked.names AND f.queued_at <= asked.forgotten_at RETURNING 1
    ), background AS (
        DELETE FROM tokenkeeper.background_send AS b USING known AS k
        WHERE b.topic = k.topic AND b.environment = k.environment AND b.token_key = k.token_key RETURNING 1
    ), alerts AS (
        DELETE FROM tokenkeeper.alert_send AS a USING known AS k WHERE a.topic_id = k.topic_id AND a.token_key = k.token_key RETURNING 1
    ), listed AS (
        -- Also of a topic that is not known yet, or no longer.
        DELETE FROM tokenkeeper.list_member AS m WHERE m.token_key = ANY (keys) AND NOT EXISTS (
            SELECT FROM tokenkeeper.topic AS t JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = m.token_key
            WHERE t.topic = m.topic AND t.environment = m.environment AND tokenkeeper.outlives(l, asked)) RETURNING 1
    ), crowded AS (
        DELETE FROM tokenkeeper.crowded_token AS c USING known AS k
        WHERE c.topic = k.topic AND c.environment = k.environment AND c.token_key = k.token_key RETURNING 1
    ), rejected AS (
        DELETE FROM tokenkeeper.rejected_result AS r
        WHERE tokenkeeper.names_in(ARRAY[r.token, r.topic, r.body, r.environment, r.status, r.apns_id, r.error]) && asked.names AND r.queued_at <= asked.forgotten_at RETURNING 1
    ), rejected_too AS (
        DELETE FROM tokenkeeper.rejected_registration AS r
        WHERE tokenkeeper.names_in(ARRAY[r.token, r.topic, r.environment, r.device_id, r.user_id, r.row_key, r.error], r.device_id, r.user_id, r.tags) && asked.names
          AND r.queued_at <= asked.forgotten_at RETURNING 1
    ), held AS (
        DELETE FROM tokenkeeper.held_result AS h USING known AS k WHERE h.topic_id = k.topic_id AND h.token_key = k.token_key RETURNING 1
    ), held_too AS (
        DELETE FROM tokenkeeper.held_registration AS h
        WHERE tokenkeeper.names_in(ARRAY[h.token], h.device_id, h.user_id) && asked.names AND h.queued_at <= asked.forgotten_at RETURNING 1
    ), sending AS (
        -- Its response finds no request. Requests that wait are found by the claim, and in the end by erase_requests.
        DELETE FROM tokenkeeper.send_request AS r
        WHERE r.claimed_by IS NOT NULL AND tokenkeeper.token_key(r.token) = ANY (keys) AND r.queued_at <= asked.forgotten_at
        RETURNING r.campaign_id, r.campaign_number
    ), ended AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT s.campaign_id, s.campaign_number >> 9, 1, 'forgotten', ARRAY[s.campaign_number & 511]::smallint[]
        FROM sending AS s WHERE s.campaign_id IS NOT NULL
    ), token AS (
        DELETE FROM tokenkeeper.ledger AS l USING known AS k
        WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key AND NOT tokenkeeper.outlives(l, asked) RETURNING 1
    ), receipts AS (
        DELETE FROM tokenkeeper.receipt AS r USING known AS k WHERE r.topic_id = k.topic_id AND r.token_key = k.token_key RETURNING 1
    ), events AS (
        -- Of the device or the user itself, too; nothing if only a token was given.
        DELETE FROM tokenkeeper.token_event_log AS e
        WHERE (e.token_key = ANY (keys) AND (e.topic_id, e.token_key) IN (SELECT k.topic_id, k.token_key FROM known AS k))
           OR (e.device_id = asked.device_id AND e.at <= asked.forgotten_at) OR (e.user_id = asked.user_id AND e.at <= asked.forgotten_at)
        RETURNING 1
    )
    -- They run, and lock, in the order in which they are counted.
    SELECT total + (SELECT count(*) FROM suppressed) + (SELECT count(*) FROM failed) + (SELECT count(*) FROM background) + (SELECT count(*) FROM alerts)
           + (SELECT count(*) FROM listed) + (SELECT count(*) FROM crowded) + (SELECT count(*) FROM rejected) + (SELECT count(*) FROM rejected_too) + (SELECT count(*) FROM held)
           + (SELECT count(*) FROM held_too) + (SELECT count(*) FROM sending) + (SELECT count(*) FROM token) + (SELECT count(*) FROM receipts)
           + (SELECT count(*) FROM events) INTO total;
    PERFORM tokenkeeper.erase_mentions(asked, gone_keys, devices);
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_found(tokenkeeper.erasure, bytea[]) IS
    'Deletes what indexes find about these tokens, which are locked, and about the names of this row of erasure. Returns how many rows.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase(of_key bytea, of_device text, of_user text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A batch or an application may hold a token.
SET lock_timeout = '10s'
AS $$
DECLARE
    asked tokenkeeper.erasure;
    keys bytea[];
    busy record;
    total bigint;
BEGIN
    IF tokenkeeper.isolation_fault() IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.isolation_fault() USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- Two calls may delete the same events, in different orders: one after the other.
    LOCK TABLE tokenkeeper.erasure IN SHARE UPDATE EXCLUSIVE MODE;
    LOOP
        BEGIN
            keys := tokenkeeper.keys_to_forget(of_key, of_device, of_user);
            SELECT * INTO busy FROM tokenkeeper.lock_forgotten(keys);
            EXIT WHEN busy.busy_key IS NULL AND keys IS NOT DISTINCT FROM tokenkeeper.keys_to_forget(of_key, of_device, of_user);
            -- A token is locked, or has come to the device or the user, or left it: begin again, without the locks.
            RAISE EXCEPTION 'begin again' USING ERRCODE = 'TK001';
        EXCEPTION WHEN SQLSTATE 'TK001' THEN
            -- Wait for it while no other token is locked, and release it.
            BEGIN
                PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = busy.busy_topic AND l.token_key = busy.busy_key FOR UPDATE;
                RAISE EXCEPTION 'it is free' USING ERRCODE = 'TK001';
            EXCEPTION WHEN SQLSTATE 'TK001' THEN
                NULL;
            END;
        END;
    END LOOP;
    asked.names := ARRAY(SELECT encode(k, 'hex') FROM unnest(keys) AS k) || array_remove(ARRAY['d:' || of_device, 'u:' || of_user], NULL);
    asked.device_id := of_device;
    asked.user_id := of_user;
    -- All that is there now is from before.
    asked.forgotten_at := 'infinity';
    total := tokenkeeper.erase_found(asked, keys);
    INSERT INTO tokenkeeper.erasure (names, device_id, user_id) VALUES (asked.names, of_device, of_user);
    INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('forgotten', total);
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase(bytea, text, text) IS
    'The common part of forget, forget_device and forget_user: deletes what indexes find about a token in every topic, or about each token and the history '
    'of a device or a user. Leaves a row in erasure.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_again(asked tokenkeeper.erasure) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    keys bytea[];
BEGIN
    keys := ARRAY(
        SELECT decode(n, 'hex') FROM unnest(asked.names) AS n WHERE n NOT LIKE '%:%'
        UNION
        SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.device_id = asked.device_id AND l.device_at <= asked.forgotten_at
        UNION
        SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.user_id = asked.user_id AND l.user_at <= asked.forgotten_at
        ORDER BY 1);
    IF (SELECT l.busy_key IS NOT NULL FROM tokenkeeper.lock_forgotten(keys) AS l) THEN
        RETURN false;
    END IF;
    PERFORM tokenkeeper.erase_found(asked, keys);
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_again(tokenkeeper.erasure) IS
    'Repeats an erasure, for what running transactions wrote, and what moved from a queue to another table. Returns false if a token was locked: call it '
    'again later.';

CREATE OR REPLACE FUNCTION tokenkeeper.known_erasures() RETURNS bigint[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN ARRAY(SELECT e.erasure_id FROM tokenkeeper.erasure AS e);
COMMENT ON FUNCTION tokenkeeper.known_erasures() IS 'Internal: the erasures that a batch knows when it begins.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_since(known bigint[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tokenkeeper.erasure AS e WHERE e.erasure_id <> ALL (known)) THEN
        RETURN;
    END IF;
    -- From here on, a subtransaction: most batches need none.
    BEGIN
        -- Two that delete the same events, in different orders, would wait for each other. A batch does not wait.
        LOCK TABLE tokenkeeper.erasure IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
        PERFORM tokenkeeper.erase_again(e)
        FROM (SELECT e FROM tokenkeeper.erasure AS e WHERE e.erasure_id <> ALL (known) ORDER BY e.erasure_id LIMIT 20) AS s (e);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        NULL; -- finish_erasures does it.
    END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_since(bigint[]) IS
    'Internal: repeats the erasures that have committed since a batch began, while it has its locks, so that what it wrote in the ledger about them is gone at its COMMIT. '
    'Leaves it to finish_erasures if another one runs.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase_requests(ids bigint[], OUT is_complete boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    WITH name AS MATERIALIZED (
        SELECT n AS name, max(e.forgotten_at) AS until FROM tokenkeeper.erasure AS e CROSS JOIN unnest(e.names) AS n WHERE e.erasure_id = ANY (ids) GROUP BY 1
    ), place AS MATERIALIZED (
        SELECT r.request_id FROM tokenkeeper.send_request AS r JOIN name AS n ON n.name = encode(tokenkeeper.token_key(r.token), 'hex') COLLATE "C"
        WHERE r.queued_at <= n.until
        UNION
        -- Those that cannot be sent: the token cannot be read, or the topic is malformed.
        SELECT o.request_id FROM (
            SELECT r.request_id, r.queued_at, unnest(tokenkeeper.names_in(ARRAY[r.token, r.topic])) COLLATE "C" AS name FROM tokenkeeper.send_request AS r
            WHERE tokenkeeper.token_key(r.token) IS NULL OR octet_length(r.topic) >= 64) AS o
        JOIN name AS n ON n.name = o.name WHERE o.queued_at <= n.until
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL AND r.request_id IN (SELECT p.request_id FROM place AS p)
        RETURNING r.request_id, r.campaign_id, r.campaign_number
    ), ended AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT g.campaign_id, g.campaign_number >> 9, 1, 'forgotten', ARRAY[g.campaign_number & 511]::smallint[]
        FROM gone AS g WHERE g.campaign_id IS NOT NULL
    )
    SELECT NOT EXISTS (SELECT FROM place AS p WHERE p.request_id NOT IN (SELECT g.request_id FROM gone AS g)) INTO is_complete;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase_requests(bigint[]) IS
    'Deletes the requests of the outbox that were queued before one of these erasures and name what it names. is_complete is false if a daemon is sending '
    'one of them. Reads the whole outbox.';

CREATE OR REPLACE FUNCTION tokenkeeper.finish_erasures(at_least interval DEFAULT '10 minutes') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    ripe tokenkeeper.erasure[];
    one tokenkeeper.erasure;
    finished bigint[] := '{}';
    until timestamptz;
BEGIN
    -- An id in the future is that of another cluster: the database was restored.
    UPDATE tokenkeeper.erasure AS e SET seen_before = pg_snapshot_xmax(pg_current_snapshot())
    WHERE coalesce(e.seen_before > pg_snapshot_xmax(pg_current_snapshot()), true);
    -- One that runs at the same time might delete the same events in another order.
    BEGIN
        LOCK TABLE tokenkeeper.erasure IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 0;
    END;
    -- Each transaction that may not have seen it has ended.
    ripe := ARRAY(
        SELECT e FROM tokenkeeper.erasure AS e
        WHERE e.seen_before <= pg_snapshot_xmin(pg_current_snapshot()) AND e.forgotten_at < clock_timestamp() - at_least
        ORDER BY e.erasure_id LIMIT 100 FOR UPDATE SKIP LOCKED);
    until := (SELECT max(r.forgotten_at) FROM unnest(ripe) AS r);
    IF ripe = '{}' OR EXISTS (SELECT FROM tokenkeeper.send_result AS r WHERE r.queued_at <= until)
        OR EXISTS (SELECT FROM tokenkeeper.registration AS r WHERE r.queued_at <= until) THEN
        RETURN 0;
    END IF;
    FOREACH one IN ARRAY ripe LOOP
        IF tokenkeeper.erase_again(one) THEN
            finished := finished || one.erasure_id;
        END IF;
    END LOOP;
    IF NOT tokenkeeper.erase_requests(finished) THEN
        RETURN 0;
    END IF;
    DELETE FROM tokenkeeper.erasure AS e WHERE e.erasure_id = ANY (finished);
    RETURN cardinality(finished);
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_erasures(interval) IS
    'Finishes up to 100 erasures older than at_least, once no older transaction or queued row is left: deletes what was written meanwhile, and the rows of '
    'erasure. Returns how many; 0 also while a daemon sends to one of the tokens. The daemons call it every 30 seconds.';

CREATE OR REPLACE FUNCTION tokenkeeper.forget(token text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(forget.token);
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.token_fault(forget.token) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(key, NULL, NULL);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget(text) IS
    'Deletes, for a person''s right to erasure, what is stored about a device token in every topic and environment; returns how many rows. Daemons drop '
    'what is queued when they read it, and after ten minutes delete what open transactions wrote. Other tokens of the device lose tags that they share '
    'with it (same tags, same instant). Raises 25001; 22023 for a token that cannot be read; 55P03 if it cannot lock a token within ten seconds.';

CREATE OR REPLACE FUNCTION tokenkeeper.forget_device(device_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
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
    'As forget, for each token of a device. Cancels campaigns to this device alone, and erases their content, name and idempotency_key. Raises 22023 for '
    'a device_id that names no device; 55P03 and 25001 as forget.';

CREATE OR REPLACE FUNCTION tokenkeeper.forget_user(user_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    who text COLLATE "C" := forget_user.user_id;
BEGIN
    IF coalesce(octet_length(who) NOT BETWEEN 1 AND 512, true) THEN
        RAISE EXCEPTION 'user_id is %, expected the one given to register', coalesce(octet_length(who) || ' bytes long', 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN tokenkeeper.erase(NULL, NULL, who);
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_user(text) IS
    'As forget, for each token and each event of a user. Cancels campaigns to this user alone, as forget_device does. Tokens that now belong to another '
    'user, or to none, stay, without the tags that they share with a deleted token of their device. Raises 22023 for a user_id that is not 1 to 512 '
    'bytes; 55P03 and 25001 as forget.';
