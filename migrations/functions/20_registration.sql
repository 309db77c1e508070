-- Reports about tokens, and what they leave in the ledger: register, unregister, and the rule that the drains share (merged).
--
-- Each fact is the greatest that was ever reported (merged). Then resolve_devices decides which of a device's tokens is current. Nearly always there is
-- nothing to decide: the usual launch is one HOT update of one row, and reads no other.
--
-- Lock order: the call's tokens by (topic_id, token_key), then other tokens of their devices. A session waits only for its own tokens. It skips
-- a locked token of the device and queues a row, so a daemon compares the device later. So two calls never deadlock.
--
-- Two transactions that report a device's first two tokens at once cannot see each other. Both tokens stay current until one registers again (column
-- unresolved).
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

CREATE OR REPLACE FUNCTION tokenkeeper.has_one_token_per_device(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN topic COLLATE "C" NOT LIKE '%.push-type.liveactivity' AND topic COLLATE "C" NOT LIKE '%.push-type.controls';
COMMENT ON FUNCTION tokenkeeper.has_one_token_per_device(text) IS
    'False for the topics of Live Activities and controls: a device has many tokens of these at once.';

CREATE OR REPLACE FUNCTION tokenkeeper.device_name(device_id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN octet_length(device_id) = 36 AND device_id COLLATE "C" ~ '^[0-9A-Fa-f]{8}-([0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}$'
    THEN nullif(lower(device_id COLLATE "C"), '00000000-0000-0000-0000-000000000000')
    WHEN octet_length(device_id) BETWEEN 1 AND 36 AND lower(device_id COLLATE "C") ~ '^([0-]+|null|nil|none|unknown|undefined|[(]null[)])$' THEN NULL
    ELSE device_id
END;
COMMENT ON FUNCTION tokenkeeper.device_name(text) IS
    'A device_id as the ledger keeps it: a UUID in lower case. Null if it names no device: all zeros, null, nil, none, unknown, undefined.';

-- Inlined by the planner: a valid registration costs no function call.
CREATE OR REPLACE FUNCTION tokenkeeper.is_sound_registration(registered_at timestamptz, device_id text, user_id text, tags text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(isfinite(registered_at), true) AND coalesce(octet_length(device_id), 0) <= 512 AND coalesce(octet_length(user_id), 0) <= 512
    AND (tags IS NULL OR (cardinality(tags) <= 1000 AND coalesce(array_ndims(tags), 1) = 1 AND array_position(tags, NULL) IS NULL
                          AND array_position(tags, '' COLLATE "C") IS NULL AND octet_length(array_to_string(tags, '')) <= 512));
COMMENT ON FUNCTION tokenkeeper.is_sound_registration(timestamptz, text, text, text[]) IS
    'True only if registration_fault would find nothing. Of more than 512 bytes of tags, it says false.';

CREATE OR REPLACE FUNCTION tokenkeeper.registration_fault(registered_at timestamptz, device_id text, user_id text, tags text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN CASE
        WHEN NOT isfinite(registered_at) THEN 'registered_at is ' || registered_at || ', expected a finite instant'
        WHEN octet_length(device_id) > 512 THEN 'device_id is ' || octet_length(device_id) || ' bytes long, expected at most 512'
        WHEN octet_length(user_id) > 512 THEN 'user_id is ' || octet_length(user_id) || ' bytes long, expected at most 512'
        WHEN array_ndims(tags) > 1 THEN 'tags is an array of ' || array_ndims(tags) || ' dimensions, expected one'
        WHEN cardinality(tags) > 1000 THEN 'tags has ' || cardinality(tags) || ' elements, expected at most 1000'
        ELSE (SELECT 'a tag is ' || coalesce(octet_length(t.tag) || ' bytes long', 'null') || ', expected 1 to 512 bytes'
              FROM unnest(tags) AS t (tag) WHERE t.tag IS NULL OR octet_length(t.tag) NOT BETWEEN 1 AND 512 LIMIT 1) END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.registration_fault(timestamptz, text, text, text[]) IS
    'What is wrong with these values of a registration, and what was expected; null if nothing.';

-- The rule -----------------------------------------------------------------------------------------------------------

-- Inlined by the planner, as are all functions of this part.
CREATE OR REPLACE FUNCTION tokenkeeper.registration_of(
    n integer, topic_id integer, token_key bytea, one_token boolean, registered_at timestamptz, device_id text, user_id text, tags text[],
    details_at timestamptz, returned_at timestamptz DEFAULT NULL, received_at timestamptz DEFAULT NULL, source_id bigint DEFAULT NULL)
RETURNS tokenkeeper.token_report
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(n, topic_id, token_key, one_token, registered_at, returned_at, device_id, details_at, user_id, details_at, tags, details_at,
           NULL, NULL, NULL, received_at, NULL, source_id)::tokenkeeper.token_report;
COMMENT ON FUNCTION tokenkeeper.registration_of(
    integer, integer, bytea, boolean, timestamptz, text, text, text[], timestamptz, timestamptz, timestamptz, bigint) IS
    'A registration as a report. details_at is the instant of the device, the user and the tags.';

CREATE OR REPLACE FUNCTION tokenkeeper.invalidation_of(
    n integer, topic_id integer, token_key bytea, cause text, invalidated_at timestamptz, reason text, received_at timestamptz,
    released boolean DEFAULT NULL, source_id bigint DEFAULT NULL, user_id text DEFAULT NULL)
RETURNS tokenkeeper.token_report
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(n, topic_id, token_key, NULL, NULL, NULL, NULL, NULL, user_id, NULL, NULL, NULL,
           cause, invalidated_at, reason, received_at, released, source_id)::tokenkeeper.token_report;
COMMENT ON FUNCTION tokenkeeper.invalidation_of(integer, integer, bytea, text, timestamptz, text, timestamptz, boolean, bigint, text) IS
    'A 410, a suspect or a logout as a report. A logout with a user_id counts only if the token is not another user''s.';

CREATE OR REPLACE FUNCTION tokenkeeper.without(reports tokenkeeper.token_report[], numbers integer[]) RETURNS tokenkeeper.token_report[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN numbers = '{}' THEN reports ELSE ARRAY(SELECT r FROM unnest(reports) AS r WHERE r.n NOT IN (SELECT unnest(numbers))) END;
COMMENT ON FUNCTION tokenkeeper.without(tokenkeeper.token_report[], integer[]) IS 'These reports without those of these numbers.';

CREATE OR REPLACE FUNCTION tokenkeeper.merged(was tokenkeeper.ledger, reported tokenkeeper.token_report) RETURNS TABLE (
    registered_at timestamptz, stale_at timestamptz, stale_reason text, suspect_at timestamptz, suspect_reason text, unregistered_by_app_at timestamptz,
    returned_at timestamptz, superseded_at timestamptz, unresolved boolean, of_constant boolean, device_id text, device_at timestamptz, user_id text,
    user_at timestamptz, tags text[], tags_at timestamptz, is_suppressed boolean)
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT s.registered_at, s.stale_at, s.stale_reason, s.suspect_at, s.suspect_reason, s.unregistered_by_app_at, s.returned_at, s.superseded_at,
           CASE WHEN s.is_open THEN (reported).one_token AND s.device_id IS NOT NULL ELSE coalesce((was).unresolved, false) END,
           NOT s.changes_device AND coalesce((was).of_constant, false),
           s.device_id, s.device_at, s.user_id, s.user_at, s.tags, s.tags_at,
           coalesce(greatest(s.stale_at, s.suspect_at, CASE WHEN s.returned_at >= s.unregistered_by_app_at THEN NULL ELSE s.unregistered_by_app_at END,
                             s.superseded_at) >= s.registered_at, false)
    FROM (
        -- What comes to a device or is registered again is current until the device's tokens are compared: a push too many does less harm than one too few.
        SELECT m.*, CASE WHEN NOT m.changes_device AND m.registered_at = (was).registered_at THEN (was).superseded_at END AS superseded_at,
               m.changes_device OR ((was).superseded_at IS NOT NULL AND m.registered_at > (was).registered_at) AS is_open
        FROM (
            SELECT coalesce(greatest((was).registered_at, (reported).registered_at), '-infinity') AS registered_at,
                   CASE WHEN g.stale THEN (reported).invalidated_at ELSE (was).stale_at END AS stale_at,
                   CASE WHEN g.stale THEN (reported).reason ELSE (was).stale_reason END AS stale_reason,
                   CASE WHEN g.suspect THEN (reported).invalidated_at ELSE (was).suspect_at END AS suspect_at,
                   CASE WHEN g.suspect THEN (reported).reason ELSE (was).suspect_reason END AS suspect_reason,
                   CASE WHEN (reported).cause = 'unregistered_by_app' AND ((reported).user_id <> (was).user_id) IS NOT TRUE
                        THEN greatest((was).unregistered_by_app_at, (reported).invalidated_at) ELSE (was).unregistered_by_app_at END AS unregistered_by_app_at,
                   greatest((was).returned_at, (reported).returned_at) AS returned_at,
                   CASE WHEN d.names THEN nullif((reported).device_id, '') ELSE (was).device_id END AS device_id,
                   CASE WHEN d.names THEN (reported).device_at ELSE (was).device_at END AS device_at,
                   d.names AND nullif((reported).device_id, '') IS DISTINCT FROM (was).device_id AS changes_device,
                   CASE WHEN u.names THEN nullif((reported).user_id, '') ELSE (was).user_id END AS user_id,
                   CASE WHEN u.names THEN (reported).user_at ELSE (was).user_at END AS user_at,
                   CASE WHEN t.names THEN (reported).tags ELSE (was).tags END AS tags,
                   CASE WHEN t.names THEN (reported).tags_at ELSE (was).tags_at END AS tags_at
            -- At the same instant, the greater value counts; a cleared one is the least.
            FROM (SELECT (reported).device_id IS NOT NULL AND ((was).device_at IS NULL
                         OR ((reported).device_at, (reported).device_id) > ((was).device_at, coalesce((was).device_id, ''))) AS names) AS d
            CROSS JOIN (SELECT (reported).user_id IS NOT NULL AND (reported).cause IS NULL AND ((was).user_at IS NULL
                               OR ((reported).user_at, (reported).user_id) > ((was).user_at, coalesce((was).user_id, ''))) AS names) AS u
            CROSS JOIN (SELECT (reported).tags IS NOT NULL AND ((was).tags_at IS NULL
                               OR ((reported).tags_at, (reported).tags) > ((was).tags_at, (was).tags)) AS names) AS t
            CROSS JOIN (SELECT (reported).cause = 'stale' AND ((was).stale_at IS NULL
                               OR ((reported).invalidated_at, (reported).reason) > ((was).stale_at, (was).stale_reason)) AS stale,
                               (reported).cause = 'suspect' AND ((was).suspect_at IS NULL
                               OR ((reported).invalidated_at, (reported).reason) > ((was).suspect_at, (was).suspect_reason)) AS suspect) AS g
        ) AS m
    ) AS s;
END;
COMMENT ON FUNCTION tokenkeeper.merged(tokenkeeper.ledger, tokenkeeper.token_report) IS
    'Merges a report into a token''s row: each fact is the greater of the two. was is null if the token was unknown. A token that changes its device, or is '
    'registered again, is current until the device''s tokens are compared.';

CREATE OR REPLACE FUNCTION tokenkeeper.event_of(was tokenkeeper.ledger, is_now tokenkeeper.ledger, reported tokenkeeper.token_report)
RETURNS TABLE (topic_id integer, token_key bytea, event text, cause text, reason text, device_id text, user_id text, source_id bigint,
    registered_before timestamptz, registered_after timestamptz, invalidated_before timestamptz, invalidated_after timestamptz)
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT (is_now).topic_id, (is_now).token_key, c.event, c.cause,
           CASE c.cause WHEN 'stale' THEN (is_now).stale_reason WHEN 'suspect' THEN (is_now).suspect_reason END,
           (is_now).device_id, (is_now).user_id, (reported).source_id,
           nullif((was).registered_at, '-infinity'), nullif((is_now).registered_at, '-infinity'),
           tokenkeeper.invalidated_at(was), tokenkeeper.invalidated_at(is_now)
    FROM (SELECT e.event, CASE WHEN (reported).cause IS NULL
                               THEN CASE WHEN e.event = 'revived' AND (is_now).registered_at = (was).registered_at THEN 'returned' ELSE 'registration' END
                               WHEN e.event = 'late_feedback_ignored' THEN (reported).cause
                               ELSE tokenkeeper.state_of(is_now) END AS cause
          FROM (SELECT CASE
              WHEN (reported).cause IS NULL THEN CASE
                  WHEN (is_now).registered_at > coalesce((was).registered_at, '-infinity') AND coalesce((was).registered_at, '-infinity') = '-infinity'
                      THEN 'registered'
                  WHEN (was).suppressed AND NOT (is_now).suppressed THEN 'revived' END
              WHEN ((is_now).stale_at, (is_now).stale_reason, (is_now).suspect_at, (is_now).suspect_reason, (is_now).unregistered_by_app_at)
                  IS NOT DISTINCT FROM ((was).stale_at, (was).stale_reason, (was).suspect_at, (was).suspect_reason, (was).unregistered_by_app_at) THEN NULL
              WHEN NOT (is_now).suppressed THEN 'late_feedback_ignored'
              -- Nothing new if it was suppressed for the same cause.
              WHEN coalesce((was).suppressed AND tokenkeeper.state_of(was) = tokenkeeper.state_of(is_now), false) THEN NULL
              WHEN (reported).cause = 'unregistered_by_app' THEN 'unregistered_by_app'
              ELSE 'invalidated' END AS event) AS e
          WHERE e.event IS NOT NULL) AS c;
END;
COMMENT ON FUNCTION tokenkeeper.event_of(tokenkeeper.ledger, tokenkeeper.ledger, tokenkeeper.token_report) IS
    'What the history says about a report, as a row of token_event_log, from the row before (null if there was none) and after it. No row if it changed nothing '
    'that counts.';

CREATE OR REPLACE FUNCTION tokenkeeper.checks_of(was tokenkeeper.ledger, is_now tokenkeeper.ledger, reported tokenkeeper.token_report)
RETURNS SETOF tokenkeeper.device_check
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT (is_now).topic_id, (is_now).device_id, (is_now).token_key, (was).device_id IS DISTINCT FROM (is_now).device_id
    WHERE (reported).cause IS NULL AND (is_now).device_id IS NOT NULL AND ((is_now).unresolved OR (is_now).superseded_at IS NOT NULL)
    UNION ALL
    SELECT (is_now).topic_id, (was).device_id, NULL, false
    WHERE (reported).one_token AND (was).device_id IS DISTINCT FROM (is_now).device_id AND (was).device_id IS NOT NULL;
END;
COMMENT ON FUNCTION tokenkeeper.checks_of(tokenkeeper.ledger, tokenkeeper.ledger, tokenkeeper.token_report) IS
    'The devices whose tokens must be compared after a report: the one that the token belongs to, unless it is known to be its only current token, and '
    'the one that it has left.';

-- Devices ------------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.note_crowded(of_topic integer, device text, tokens bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
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
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    locked tokenkeeper.device_check[];
BEGIN
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
    'Internal: locks the tokens of these devices that are free, and returns them. tokens is how many each device has, 22 for more; of such a device, only those '
    'that are not known to be of a constant.';

CREATE OR REPLACE FUNCTION tokenkeeper.resolve_devices(checks tokenkeeper.device_check[], receipt timestamptz) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
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
    IF 8 <= ANY (tokens) THEN
        PERFORM tokenkeeper.note_crowded(d.topic_id, d.device_id, d.tokens)
        FROM unnest(topics, devices, tokens) AS d (topic_id, device_id, tokens) WHERE d.tokens >= 8;
    END IF;
    locked := tokenkeeper.lock_members(topics, devices, tokens) || checks;

    -- A new statement, so a new snapshot: it sees what others committed before they released these locks.
    WITH device AS MATERIALIZED (
        SELECT * FROM unnest(topics, devices, tokens) WITH ORDINALITY AS d (topic_id, device_id, tokens, n)
    ), member AS MATERIALIZED (
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
        SET superseded_at = d.superseded_at, unresolved = d.unresolved, of_constant = d.is_constant, tags = d.tags, tags_at = d.tags_at,
            suppressed_since = CASE WHEN coalesce(greatest(l.stale_at, l.suspect_at, l.logged_out_at, d.superseded_at) >= l.registered_at, false)
                                    THEN coalesce(l.suppressed_since, receipt) END
        FROM decided AS d
        WHERE l.ctid = d.row_tid AND d.is_free
          AND (l.superseded_at IS DISTINCT FROM d.superseded_at OR l.unresolved <> d.unresolved OR l.of_constant <> d.is_constant
               OR l.tags_at IS DISTINCT FROM d.tags_at OR l.tags IS DISTINCT FROM d.tags)
        RETURNING d.was, l AS is_now, d.is_reported
    ), counted AS (
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
        SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM changed AS c CROSS JOIN LATERAL tokenkeeper.count_change(c.was, c.is_now) AS n
        GROUP BY 2, 3, 4
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
    'Decides which tokens of these devices are superseded: those with an earlier registered_at than another; none, if the device_id is a constant, which has or '
    'had more than 20. The '
    'others, and the tokens that were reported, take the latest tags of the device. Call it with the reported tokens locked. It waits for nothing: of a device '
    'of which another session holds a token, it decides nothing, and queues a row that compares later. Returns how many such rows. Records in the history what it '
    'changes.';

-- The functions of an application --------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.merge_report(reported tokenkeeper.token_report, receipt timestamptz) RETURNS tokenkeeper.device_check[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    was tokenkeeper.ledger;
    is_now tokenkeeper.ledger;
    -- Whether this transaction has written the token before.
    is_own boolean := false;
    who CONSTANT text COLLATE "C" := CASE WHEN reported.cause IS NULL THEN reported.user_id END;
BEGIN
    LOOP
        SELECT l.* INTO was FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        -- An unknown token has the facts of the report. Cheaper than merged.
        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, unregistered_by_app_at, returned_at, unresolved, device_id, device_at,
            user_id, user_at, tags, tags_at, suppressed_since)
        VALUES (reported.topic_id, reported.token_key, coalesce(reported.registered_at, '-infinity'), reported.invalidated_at, reported.returned_at,
            reported.one_token IS TRUE AND coalesce(reported.device_id <> '', false), nullif(reported.device_id, ''),
            CASE WHEN reported.device_id IS NOT NULL THEN reported.device_at END, nullif(who, ''), CASE WHEN who IS NOT NULL THEN reported.user_at END,
            reported.tags, CASE WHEN reported.tags IS NOT NULL THEN reported.tags_at END, CASE WHEN reported.cause IS NOT NULL THEN receipt END)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, device_id, user_id, source_id, registered_after, invalidated_after)
            VALUES (reported.topic_id, reported.token_key, coalesce(reported.cause, 'registered'), coalesce(reported.cause, 'registration'),
                nullif(reported.device_id, ''), nullif(who, ''), reported.source_id, reported.registered_at, reported.invalidated_at);
            INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
            VALUES (1, reported.topic_id, reported.registered_at IS NOT NULL, coalesce(reported.cause, 'active'));
            IF reported.cause IS NOT NULL THEN
                INSERT INTO tokenkeeper.receipt (received_at, invalidated_at, topic_id, counted, cause, token_key)
                VALUES (reported.received_at, reported.invalidated_at, reported.topic_id, false, reported.cause, reported.token_key);
            END IF;
            RETURN CASE WHEN reported.one_token AND reported.device_id <> ''
                        THEN ARRAY[ROW(reported.topic_id, reported.device_id, reported.token_key, true)::tokenkeeper.device_check] ELSE '{}' END;
        END IF;
        -- Another session has inserted it meanwhile.
    END LOOP;
    IF reported.cause IS NOT NULL AND (reported.user_id <> was.user_id) IS NOT TRUE THEN
        -- As keep_receipts, for one.
        INSERT INTO tokenkeeper.receipt (received_at, invalidated_at, topic_id, counted, cause, token_key)
        VALUES (reported.received_at, reported.invalidated_at, reported.topic_id, false, reported.cause, reported.token_key);
        IF was.suppressed THEN
            PERFORM tokenkeeper.thin_receipts(ARRAY[reported.topic_id], ARRAY[reported.token_key]);
        END IF;
    END IF;
    IF was.unresolved THEN
        is_own := (SELECT age(l.xmin) <= 0 FROM tokenkeeper.ledger AS l WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key);
        -- The second registration of most tokens: it is still the only one of its device, and nothing is left to compare. Not while others cannot see it.
        IF NOT is_own AND current_setting('transaction_isolation') = 'read committed' THEN
            was.unresolved := (SELECT count(*) FROM (
                SELECT FROM tokenkeeper.ledger AS o WHERE o.device_id = was.device_id AND o.topic_id + 0 = was.topic_id LIMIT 2) AS o) > 1;
        END IF;
    END IF;
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = m.registered_at, unregistered_by_app_at = m.unregistered_by_app_at, returned_at = m.returned_at,
        superseded_at = m.superseded_at, unresolved = m.unresolved, of_constant = m.of_constant, device_id = m.device_id, device_at = m.device_at,
        user_id = m.user_id, user_at = m.user_at, tags = m.tags, tags_at = m.tags_at,
        suppressed_since = CASE WHEN m.is_suppressed THEN coalesce(l.suppressed_since, receipt) END
    FROM tokenkeeper.merged(was, reported) AS m
    WHERE l.topic_id = reported.topic_id AND l.token_key = reported.token_key
    RETURNING l.* INTO is_now;
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, source_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT * FROM tokenkeeper.event_of(was, is_now, reported);
    IF was.suppressed OR is_now.suppressed OR was.registered_at = '-infinity' THEN
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state) SELECT * FROM tokenkeeper.count_change(was, is_now);
    END IF;
    RETURN ARRAY(
        SELECT ROW(c.topic_id, c.device_id, c.token_key, c.is_new OR (is_own AND c.token_key IS NOT NULL AND is_now.superseded_at IS NULL)
               )::tokenkeeper.device_check
        FROM tokenkeeper.checks_of(was, is_now, reported) AS c);
END
$$;
COMMENT ON FUNCTION tokenkeeper.merge_report(tokenkeeper.token_report, timestamptz) IS
    'Internal: merges a registration or a logout of one token into the ledger, and records it in the history. Waits for the token, and keeps it locked. '
    'Returns the devices for resolve_devices.';

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
    -- Null says nothing, an empty one clears.
    new_device text COLLATE "C" := tokenkeeper.device_name(register.device_id);
    new_user text COLLATE "C" := register.user_id;
    new_tags text[] COLLATE "C" := register.tags;
    receipt timestamptz := clock_timestamp();
    -- An instant in the future counts as the instant of receipt: one wrong clock must not make a token immortal.
    moment timestamptz := least(coalesce(register.registered_at, receipt), receipt);
    fault text;
    of_topic integer;
    observes boolean;
    checks tokenkeeper.device_check[];
BEGIN
    IF key IS NULL THEN
        PERFORM tokenkeeper.raise_malformed_token(register.token);
    END IF;
    IF NOT tokenkeeper.is_sound_registration(register.registered_at, new_device, new_user, new_tags) THEN
        fault := tokenkeeper.registration_fault(register.registered_at, new_device, new_user, new_tags);
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe' INTO of_topic, observes FROM tokenkeeper.topic AS t
    WHERE t.topic = name AND t.environment = env;
    IF of_topic IS NULL OR current_setting('transaction_isolation') <> 'read committed' THEN
        of_topic := tokenkeeper.ensure_topic(env, name);
    END IF;

    -- The most frequent write, at each launch: one HOT update, no event. Only for a token known to be its device's only current one.
    UPDATE tokenkeeper.ledger AS l
    SET registered_at = moment,
        device_at = CASE WHEN new_device IS NULL THEN l.device_at ELSE moment END,
        tags = coalesce(new_tags, l.tags),
        tags_at = CASE WHEN new_tags IS NULL THEN l.tags_at ELSE moment END,
        user_id = CASE WHEN new_user IS NULL THEN l.user_id ELSE nullif(new_user, '') END,
        user_at = CASE WHEN new_user IS NULL THEN l.user_at ELSE moment END
    WHERE l.topic_id = of_topic AND l.token_key = key AND NOT l.suppressed AND NOT l.unresolved AND l.registered_at > '-infinity'
      AND l.registered_at < moment AND (new_device IS NULL OR (new_device = coalesce(l.device_id, '') AND coalesce(l.device_at < moment, true)))
      AND (new_tags IS NULL OR coalesce(l.tags_at < moment, true)) AND (new_user IS NULL OR coalesce(l.user_at < moment, true));
    IF FOUND THEN
        RETURN true;
    END IF;

    checks := tokenkeeper.merge_report(tokenkeeper.registration_of(
        0, of_topic, key, tokenkeeper.has_one_token_per_device(name), moment, new_device, new_user, new_tags, moment), receipt);
    IF checks <> '{}' THEN
        PERFORM tokenkeeper.resolve_devices(checks, receipt);
    END IF;
    RETURN coalesce(observes, false) OR NOT (SELECT l.suppressed FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key);
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[], text) IS
    'Records a registration, in the caller''s transaction; returns whether the token is sendable now. Call it at each launch of the app: '
    'each registration outranks an earlier 410 that arrives late. A device_id supersedes the device''s tokens that were registered earlier, in this topic, '
    'except for Live Activities and controls; null keeps the current device, and with an empty one the token belongs to no device any more. In the same way, '
    'user_id is who uses the token, and null tags keep those that are there. A device''s new token takes over its tags. If another session holds a token of '
    'the device, a daemon supersedes it within seconds. '
    'Raises 22023 for a malformed token, an unknown environment, a topic that is empty, over 512 bytes or not visible ASCII, an infinite instant, a device_id or '
    'user_id over 512 bytes, a tag that is null, empty or over 512 bytes, more than 1000 tags, or an array of several dimensions.';

CREATE OR REPLACE FUNCTION tokenkeeper.register(registrations tokenkeeper.new_registration[]) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    total CONSTANT integer := coalesce(cardinality(registrations), 0);
    one tokenkeeper.new_registration;
    reported tokenkeeper.token_report;
    all_said tokenkeeper.token_report[] := '{}';
    checks tokenkeeper.device_check[] := '{}';
    receipt timestamptz := clock_timestamp();
    moment timestamptz := receipt;
    fault text;
BEGIN
    IF total > 1000 THEN
        RAISE EXCEPTION 'registrations has % elements, expected at most 1000', total
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table tokenkeeper.registration takes any number of rows.';
    END IF;
    FOR n IN 1..total LOOP
        one := registrations[n];
        one.environment := coalesce(one.environment, 'production');
        one.device_id := tokenkeeper.device_name(one.device_id);
        fault := coalesce(tokenkeeper.token_fault(one.token), tokenkeeper.registration_fault(one.registered_at, one.device_id, one.user_id, one.tags),
                          tokenkeeper.environment_fault(one.environment), tokenkeeper.topic_fault(one.topic));
        IF fault IS NOT NULL THEN
            RAISE EXCEPTION 'registration %: %', n, fault USING ERRCODE = 'invalid_parameter_value';
        END IF;
        -- A logout and a login without instants count in the order given.
        moment := greatest(clock_timestamp(), moment + interval '1 microsecond');
        one.registered_at := least(coalesce(one.registered_at, moment), moment);
        one.token := tokenkeeper.parse_token(one.token);
        reported := CASE WHEN one.unregistered THEN tokenkeeper.invalidation_of(
                n, NULL, decode(one.token, 'hex'), 'unregistered_by_app', one.registered_at, NULL, receipt, user_id => one.user_id)
            ELSE tokenkeeper.registration_of(n, NULL, decode(one.token, 'hex'), tokenkeeper.has_one_token_per_device(one.topic), one.registered_at,
                one.device_id, one.user_id, one.tags, one.registered_at) END;
        all_said := all_said || reported;
    END LOOP;
    -- New topics, and then tokens, in one order everywhere.
    all_said := ARRAY(
        SELECT ROW(s.n, t.topic_id, s.token_key, s.one_token, s.registered_at, s.returned_at, s.device_id, s.device_at, s.user_id, s.user_at,
                   s.tags, s.tags_at, s.cause, s.invalidated_at, s.reason, s.received_at, s.released, s.source_id)::tokenkeeper.token_report
        FROM unnest(all_said) AS s
        JOIN (SELECT o.topic, o.environment, tokenkeeper.ensure_topic(o.environment, o.topic) AS topic_id
              FROM (SELECT DISTINCT r.topic COLLATE "C" AS topic, coalesce(r.environment, 'production') COLLATE "C" AS environment
                    FROM unnest(registrations) AS r ORDER BY 1, 2 OFFSET 0) AS o OFFSET 0) AS t
          ON t.topic = registrations[s.n].topic COLLATE "C" AND t.environment = coalesce(registrations[s.n].environment, 'production') COLLATE "C"
        ORDER BY t.topic_id, s.token_key, s.n);
    FOREACH reported IN ARRAY all_said LOOP
        checks := checks || tokenkeeper.merge_report(reported, receipt);
    END LOOP;
    -- Only when all tokens of the call are locked.
    PERFORM tokenkeeper.resolve_devices(checks, receipt);
    RETURN ARRAY(
        SELECT NOT l.suppressed OR t.gate IS NOT DISTINCT FROM 'observe'
        FROM unnest(all_said) AS s
        CROSS JOIN LATERAL (SELECT k.suppressed FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key OFFSET 0) AS l
        JOIN tokenkeeper.topic AS t ON t.topic_id = s.topic_id
        ORDER BY s.n);
END
$$;
COMMENT ON FUNCTION tokenkeeper.register(tokenkeeper.new_registration[]) IS
    'Records up to 1000 registrations and logouts, in the caller''s transaction, as register and unregister do one by one; returns whether each token is '
    'sendable now, in the order given. Tokens are read as by parse_token. Two calls never deadlock with each other. Raises 22023 for the first element that '
    'register would refuse, with its position from 1, and records nothing then; also for more than 1000 elements.';

CREATE OR REPLACE FUNCTION tokenkeeper.unregister(
    token text DEFAULT NULL,
    topic text DEFAULT NULL,
    environment text DEFAULT 'production',
    at timestamptz DEFAULT clock_timestamp(),
    user_id text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(unregister.token);
    name text COLLATE "C" := unregister.topic;
    env text COLLATE "C" := coalesce(unregister.environment, 'production');
    who text COLLATE "C" := unregister.user_id;
    receipt timestamptz := clock_timestamp();
    moment timestamptz := least(coalesce(unregister.at, receipt), receipt);
    of_topic integer;
    one record;
    tokens bigint := 0;
BEGIN
    IF key IS NULL AND (unregister.token IS NOT NULL OR who IS NULL) THEN
        PERFORM tokenkeeper.raise_malformed_token(unregister.token);
    END IF;
    IF NOT isfinite(unregister.at) OR octet_length(who) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION '%', CASE WHEN isfinite(unregister.at) THEN 'user_id is ' || octet_length(who) || ' bytes long, expected 1 to 512'
                                  ELSE 'at is ' || unregister.at || ', expected a finite instant' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF key IS NOT NULL THEN
        of_topic := tokenkeeper.ensure_topic(env, name);
    ELSIF coalesce(tokenkeeper.environment_fault(env), CASE WHEN name IS NOT NULL THEN tokenkeeper.topic_fault(name) END) IS NOT NULL THEN
        RAISE EXCEPTION '%', coalesce(tokenkeeper.environment_fault(env), tokenkeeper.topic_fault(name)) USING ERRCODE = 'invalid_parameter_value';
    ELSIF name IS NOT NULL THEN
        of_topic := (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = name AND t.environment = env);
        IF of_topic IS NULL THEN
            RETURN 0;
        END IF;
    END IF;
    IF key IS NOT NULL THEN
        IF who IS NOT NULL THEN
            -- It may belong to another person now.
            PERFORM FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key AND l.user_id <> who FOR NO KEY UPDATE;
            IF FOUND THEN
                RETURN 0;
            END IF;
        END IF;
        PERFORM tokenkeeper.merge_report(
            tokenkeeper.invalidation_of(0, of_topic, key, 'unregistered_by_app', moment, NULL, receipt, user_id => who), receipt);
        RETURN 1;
    END IF;
    FOR one IN
        SELECT l.topic_id, l.token_key FROM tokenkeeper.ledger AS l
        WHERE l.user_id = who AND coalesce(l.topic_id + 0 = of_topic, of_topic IS NULL) ORDER BY 1, 2
    LOOP
        PERFORM FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = one.topic_id AND l.token_key = one.token_key AND l.user_id = who FOR NO KEY UPDATE;
        CONTINUE WHEN NOT FOUND;
        PERFORM tokenkeeper.merge_report(
            tokenkeeper.invalidation_of(0, one.topic_id, one.token_key, 'unregistered_by_app', moment, NULL, receipt, user_id => who), receipt);
        tokens := tokens + 1;
    END LOOP;
    RETURN tokens;
END
$$;
COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz, text) IS
    'Records a logout, in the caller''s transaction: the app wants no more pushes to this token. It is suppressed until a later registration. With a user_id, '
    'only if the token is not another user''s by now. Without a token, each token of that user: in all topics and environments, or in the topic given. Returns '
    'how many tokens. Raises 22023 for a malformed token, an unknown environment, a topic that is empty, over 512 bytes or not visible ASCII, a user_id that is '
    'empty or over 512 bytes, or an infinite instant.';
