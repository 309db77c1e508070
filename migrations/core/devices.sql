-- Which of a device's tokens is current. A token with an earlier registration is superseded, and superseded_at is that registration. The current token and those
-- that were reported take the latest tags of the device. A device_id with more than 20 tokens is a constant, and supersedes none.
--
-- Most calls decide nothing: the device has one token. Two transactions that report a device's first two tokens at once cannot see each other: both tokens stay
-- current until one registers again (column unresolved).
--
-- Locks: the caller holds the tokens that were reported. resolve_devices locks the other tokens of their devices with SKIP LOCKED. If one is locked, it queues a
-- row in registration_retry, and a daemon compares the device later. So two calls never deadlock.

CREATE OR REPLACE FUNCTION tokenkeeper.has_one_token_per_device(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN topic COLLATE "C" NOT LIKE '%.push-type.liveactivity' AND topic COLLATE "C" NOT LIKE '%.push-type.controls';
COMMENT ON FUNCTION tokenkeeper.has_one_token_per_device(text) IS
    'Internal: false for the topics of Live Activities and controls, where a device has many tokens at once.';

CREATE OR REPLACE FUNCTION tokenkeeper.device_name(device_id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN octet_length(device_id) = 36 AND device_id COLLATE "C" ~ '^[0-9A-Fa-f]{8}-([0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}$'
    THEN CASE WHEN device_id COLLATE "C" !~* '^([0-]+|[f-]+)$' THEN lower(device_id COLLATE "C") END
    WHEN octet_length(device_id) BETWEEN 1 AND 64
        -- 02:00:00:00:00:00 is the address of each iPhone since iOS 7.
        AND device_id COLLATE "C" ~* '^[[:space:]({<"]*([0:.-]*|02(:00){5}|[f:-]{17,}|null|nil|none|unknown|undefined|nan|#?n/a|optional[(]nil|[[](object object)?[]])[[:space:])}>"]*$' THEN NULL
    -- As COPY writes null.
    ELSE nullif(device_id, chr(92) || 'N')
END;
COMMENT ON FUNCTION tokenkeeper.device_name(text) IS
    'A device_id as the ledger stores it: a UUID in lower case. Null if it names no device: blanks, all zeros, all f, null, nil, none, unknown, undefined, '
    'NaN, N/A, backslash N, [object Object], Optional(nil), the MAC address 02:00:00:00:00:00.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_crowded(of_topic integer, device text, tokens bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, device_id, message)
    SELECT 'device_crowded', t.environment, t.topic, note_crowded.tokens, device, CASE
               WHEN note_crowded.tokens > 20 THEN 'this device_id has more than 20 tokens: it is a constant, and supersedes none of them'
               ELSE 'this device_id has that many tokens: is it a constant?' END
    FROM tokenkeeper.topic AS t
    WHERE t.topic_id = of_topic AND NOT EXISTS (
        SELECT FROM tokenkeeper.operation AS o
        WHERE o.operation = 'device_crowded' AND o.topic = t.topic AND o.environment = t.environment
          AND o.at > clock_timestamp() - interval '1 day' AND (o.rows > 20 OR note_crowded.tokens <= 20));
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_crowded(integer, text, bigint) IS
    'Logs that a device has 8 tokens or more: once per topic and day, and once more when one has more than 20.';

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_devices(topics integer[], devices text[]) RETURNS integer
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.registration_retry (environment, topic, device_id, partition_number, attempts)
    SELECT t.environment, t.topic, d.device_id, 8, -1
    FROM unnest(requeue_devices.topics, requeue_devices.devices) AS d (topic_id, device_id) JOIN tokenkeeper.topic AS t USING (topic_id);
    SELECT cardinality(requeue_devices.topics)
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_devices(integer[], text[]) IS
    'Queues rows that make a daemon compare the tokens of these devices within seconds. Returns how many.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_members(topics integer[], devices text[], tokens bigint[]) RETURNS tokenkeeper.device_check[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    locked tokenkeeper.device_check[];
BEGIN
    IF 8 <= ANY (tokens) THEN
        PERFORM tokenkeeper.note_crowded(d.topic_id, d.device_id, d.tokens)
        FROM unnest(topics, devices, tokens) AS d (topic_id, device_id, tokens) WHERE d.tokens >= 8;
    END IF;
    locked := ARRAY(
        SELECT ROW(d.topic_id, d.device_id, l.token_key, false)::tokenkeeper.device_check
        FROM unnest(topics, devices, tokens) AS d (topic_id, device_id, tokens)
        CROSS JOIN LATERAL (
            SELECT k.token_key FROM tokenkeeper.ledger AS k
            WHERE d.tokens < 22 AND k.device_id = d.device_id COLLATE "C" AND k.topic_id + 0 = d.topic_id
            FOR NO KEY UPDATE SKIP LOCKED) AS l);
    IF 22 = ANY (tokens) THEN
        -- Of a constant, those that are not known to be of one: it has just become one, or these are new.
        locked := locked || ARRAY(
            SELECT ROW(d.topic_id, d.device_id, l.token_key, false)::tokenkeeper.device_check
            FROM unnest(topics, devices, tokens) AS d (topic_id, device_id, tokens)
            CROSS JOIN LATERAL (
                SELECT k.token_key FROM tokenkeeper.ledger AS k
                WHERE d.tokens = 22 AND k.device_id = d.device_id COLLATE "C" AND k.topic_id + 0 = d.topic_id AND NOT k.of_constant
                FOR NO KEY UPDATE SKIP LOCKED) AS l);
    END IF;
    RETURN locked;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_members(integer[], text[], bigint[]) IS
    'Internal: locks the tokens of these devices that are free, and returns them. tokens is how many each device has, 22 for more; of such a device, only '
    'those not known to be of a constant. Logs devices with 8 or more.';

CREATE OR REPLACE FUNCTION tokenkeeper.resolve_devices(checks tokenkeeper.device_check[], receipt timestamptz) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    topics integer[];
    devices text[] COLLATE "C";
    tokens bigint[];
    locked tokenkeeper.device_check[];
    busy integer[];
BEGIN
    -- Up to 22 tokens of each. A new device has one, and there is nothing to decide.
    SELECT array_agg(d.topic_id), array_agg(d.device_id), array_agg(d.tokens) INTO topics, devices, tokens FROM (
        SELECT c.topic_id, c.device_id, coalesce(bool_and(c.is_new) FILTER (WHERE c.token_key IS NOT NULL), false) AS is_new, (
                   SELECT count(*) FROM (SELECT FROM tokenkeeper.ledger AS l
                                         WHERE l.device_id = c.device_id AND l.topic_id + 0 = c.topic_id LIMIT 22) AS l) AS tokens
        FROM unnest(checks) AS c GROUP BY 1, 2 OFFSET 0) AS d
    WHERE d.tokens > CASE WHEN d.is_new THEN 1 ELSE 0 END;
    IF topics IS NULL THEN
        RETURN 0;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot does not show what others have committed since. A daemon's does.
        RETURN tokenkeeper.requeue_devices(topics, devices);
    END IF;
    locked := tokenkeeper.lock_members(topics, devices, tokens) || checks;

    -- A new statement, so a new snapshot: it sees what others committed before they released these locks.
    WITH device AS MATERIALIZED (SELECT * FROM unnest(topics, devices, tokens) WITH ORDINALITY AS d (topic_id, device_id, tokens, n)), member AS MATERIALIZED (
        SELECT d.n, d.tokens, k.* FROM device AS d CROSS JOIN LATERAL (
            SELECT l AS was, l.ctid AS row_tid, l.* FROM tokenkeeper.ledger AS l
            WHERE d.tokens < 22 AND l.device_id = d.device_id COLLATE "C" AND l.topic_id + 0 = d.topic_id) AS k
        UNION ALL
        SELECT d.n, d.tokens, k.* FROM device AS d CROSS JOIN LATERAL (
            SELECT l AS was, l.ctid AS row_tid, l.* FROM tokenkeeper.ledger AS l
            WHERE d.tokens = 22 AND l.device_id = d.device_id COLLATE "C" AND l.topic_id + 0 = d.topic_id AND NOT l.of_constant) AS k
    ), compared AS (
        SELECT m.*, max(m.registered_at) OVER w AS latest, m.tokens > 20 OR bool_or(m.of_constant) OVER w AS is_constant,
               bool_and((m.topic_id, m.token_key) IN (SELECT u.topic_id, u.token_key FROM unnest(locked) AS u WHERE u.token_key IS NOT NULL)) OVER w AS is_free,
               (m.topic_id, m.token_key) IN (SELECT u.topic_id, u.token_key FROM unnest(checks) AS u WHERE u.token_key IS NOT NULL) AS is_reported,
               first_value(m.tags) OVER t AS latest_tags, first_value(m.tags_at) OVER t AS latest_tags_at
        FROM member AS m
        WINDOW w AS (PARTITION BY m.n), t AS (PARTITION BY m.n ORDER BY m.tags_at DESC NULLS LAST, m.tags DESC NULLS LAST)
    ), decided AS MATERIALIZED (
        SELECT c.n, c.was, c.row_tid, c.is_free, c.is_reported, c.is_constant, CASE WHEN NOT s.is_current THEN c.registered_at END AS superseded_at,
               s.is_current AND NOT c.is_constant AND count(*) FILTER (WHERE s.is_current) OVER (PARTITION BY c.n) > 1 AS unresolved,
               -- The current token and those that were reported take the latest tags of the device.
               CASE WHEN s.shares THEN c.latest_tags ELSE c.tags END AS tags, CASE WHEN s.shares THEN c.latest_tags_at ELSE c.tags_at END AS tags_at
        FROM compared AS c
        CROSS JOIN LATERAL (SELECT c.is_constant OR c.registered_at = c.latest AS is_current,
                                   NOT c.is_constant AND (c.is_reported OR c.registered_at = c.latest) AS shares) AS s
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET superseded_at = d.superseded_at, unresolved = d.unresolved, of_constant = d.is_constant, tags = d.tags, tags_at = d.tags_at
        FROM decided AS d
        WHERE l.ctid = d.row_tid AND d.is_free
          AND (l.superseded_at IS DISTINCT FROM d.superseded_at OR l.unresolved <> d.unresolved OR l.of_constant <> d.is_constant
               OR l.tags_at IS DISTINCT FROM d.tags_at OR l.tags IS DISTINCT FROM d.tags)
        RETURNING d.was, l AS is_now, d.is_reported
    ), counted AS (
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
        SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM changed AS c CROSS JOIN LATERAL tokenkeeper.count_change(c.was, c.is_now) AS n
        GROUP BY 2, 3, 4
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
        SELECT receipt, (c.is_now).topic_id, (c.is_now).token_key FROM changed AS c WHERE (c.is_now).suppressed AND NOT (c.was).suppressed
        ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since
    ), revived AS (
        -- One look-up each: see Plans.
        DELETE FROM tokenkeeper.suppression AS s WHERE s.ctid = ANY (ARRAY(
            SELECT (SELECT k.ctid FROM tokenkeeper.suppression AS k WHERE k.topic_id = (c.was).topic_id AND k.token_key = (c.was).token_key)
            FROM changed AS c WHERE (c.was).suppressed AND NOT (c.is_now).suppressed))
    ), logged AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT (c.is_now).topic_id, (c.is_now).token_key, e.event, CASE e.event WHEN 'superseded' THEN 'superseded' WHEN 'tagged' THEN 'tag' ELSE 'moved' END,
               CASE e.event WHEN 'superseded' THEN 'a newer token of the same device' WHEN 'tagged' THEN 'through another token of its device' END,
               (c.is_now).device_id, (c.is_now).user_id, (c.was).registered_at, (c.is_now).registered_at,
               tokenkeeper.invalidated_at(c.was), tokenkeeper.invalidated_at(c.is_now)
        FROM changed AS c
        CROSS JOIN LATERAL (
            SELECT CASE WHEN (c.is_now).suppressed AND NOT (c.was).suppressed THEN 'superseded'
                        WHEN (c.was).suppressed AND NOT (c.is_now).suppressed THEN 'revived'
                        WHEN NOT c.is_reported AND (c.was).tags IS DISTINCT FROM (c.is_now).tags THEN 'tagged' END AS event) AS e
        WHERE e.event IS NOT NULL
        ORDER BY (c.is_now).token_key
    )
    SELECT array_agg(DISTINCT d.n) INTO busy FROM decided AS d WHERE NOT d.is_free;
    IF busy IS NULL THEN
        RETURN 0;
    END IF;
    RETURN tokenkeeper.requeue_devices(ARRAY(SELECT topics[b] FROM unnest(busy) AS b), ARRAY(SELECT devices[b] FROM unnest(busy) AS b));
END
$$;
COMMENT ON FUNCTION tokenkeeper.resolve_devices(tokenkeeper.device_check[], timestamptz) IS
    'Decides which tokens of these devices are superseded: those with an earlier registered_at than another, and none of a constant, which has or had more '
    'than 20. The others, and the reported tokens, take the latest tags of the device. Call it with the reported tokens locked; it waits for nothing. For a '
    'device with a token that another session holds, it queues a row that compares later. Returns how many such rows, and records changes in the history.';
