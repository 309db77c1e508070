-- The limits of topic_policy: the rate of a topic, alerts per device and day, and the share of a topic that needs a confirmation.
--
-- A claim calls each function once for its whole set. A topic without the policy costs one look at its row.
--
-- Locks: topic_rate if it is free; the counts of devices in key order, with waiting.

CREATE OR REPLACE FUNCTION tokenkeeper.slots_ahead() RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN interval '500 milliseconds';
COMMENT ON FUNCTION tokenkeeper.slots_ahead() IS
    'Internal: how far ahead the next free slot of a rate may be when a daemon claims. The daemon has the same value, and asks no earlier.';

CREATE OR REPLACE FUNCTION tokenkeeper.free_slots(next_send_at timestamptz, per_second integer, OUT first_at timestamptz, OUT requests integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at timestamptz := clock_timestamp();
BEGIN
    first_at := greatest(free_slots.next_send_at, at - interval '250 milliseconds');
    requests := CASE WHEN first_at > at + tokenkeeper.slots_ahead() THEN 0
                     ELSE least(greatest(floor(free_slots.per_second * extract(epoch FROM at + interval '1 second' - first_at)), 1), 1000000) END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.free_slots(timestamptz, integer) IS
    'Internal: a rate has one slot per request, every 1 / per_second from next_send_at on. Returns the first free slot, and how many may be taken now: those '
    'within the next second, none if the first is further ahead than slots_ahead. Slots of more than 250 ms ago are lost, so no burst follows a pause.';

CREATE OR REPLACE FUNCTION tokenkeeper.topic_slots(of_topic integer, OUT first_at timestamptz, OUT requests integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    per_second integer := (SELECT t.max_per_second FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
    next_at timestamptz;
BEGIN
    IF per_second IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO tokenkeeper.topic_rate (topic_id, next_send_at) VALUES (of_topic, '-infinity') ON CONFLICT DO NOTHING;
    -- Another claim takes slots now. To wait for it would keep this daemon from its other topics.
    SELECT r.next_send_at INTO next_at FROM tokenkeeper.topic_rate AS r WHERE r.topic_id = of_topic FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        requests := 0;
        RETURN;
    END IF;
    SELECT s.first_at, s.requests INTO first_at, requests FROM tokenkeeper.free_slots(next_at, per_second) AS s;
END
$$;
COMMENT ON FUNCTION tokenkeeper.topic_slots(integer) IS
    'Internal: the first free slot of the rate of a topic, and how many requests may be claimed now; null without max_per_second. Other claims of the topic '
    'get none until the transaction ends. Call take_topic_slots afterwards.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_topic_slots(of_topic integer, first_at timestamptz, requests integer) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.topic_rate AS r SET next_send_at = take_topic_slots.first_at + take_topic_slots.requests * interval '1 second' / t.max_per_second
    FROM tokenkeeper.topic AS t
    WHERE r.topic_id = of_topic AND t.topic_id = of_topic AND t.max_per_second IS NOT NULL AND take_topic_slots.requests > 0;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_topic_slots(integer, timestamptz, integer) IS
    'Internal: counts requests that will be sent against the rate of their topic, from the slot first_at on.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_alerts(of_topic integer, keys bytea[]) RETURNS SETOF bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- A claim turns it off for itself.
SET enable_hashjoin = on
AS $$
DECLARE
    most integer := (SELECT t.alerts_per_day FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
    today date := (now() AT TIME ZONE 'UTC')::date;
BEGIN
    IF coalesce(most, 0) = 0 THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT k.key, k.position, row_number() OVER (PARTITION BY k.key ORDER BY k.position) AS place
        FROM unnest(note_alerts.keys) WITH ORDINALITY AS k (key, position) WHERE k.key IS NOT NULL
    ), noted AS (
        -- In the order of keys, so that two claims never deadlock.
        INSERT INTO tokenkeeper.alert_send AS a (topic_id, token_key, day, alerts, room)
        SELECT of_topic, s.key, today, least(count(*), most), most FROM asked AS s GROUP BY s.key ORDER BY s.key
        ON CONFLICT ON CONSTRAINT alert_send_pkey DO UPDATE
        SET (day, alerts, room) = (
            SELECT greatest(a.day, excluded.day), n.alerts + least(excluded.alerts, greatest(most - n.alerts, 0)), greatest(most - n.alerts, 0)
            FROM (SELECT CASE WHEN a.day >= excluded.day THEN a.alerts ELSE 0 END AS alerts) AS n)
        RETURNING a.token_key, a.room
    )
    SELECT s.position FROM asked AS s JOIN noted AS n ON n.token_key = s.key WHERE s.place > n.room ORDER BY 1;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_alerts(integer, bytea[]) IS
    'Internal: counts an alert for each of these devices (repetitions allowed) of a topic with alerts_per_day, once per request. Returns the positions, from '
    '1, of those that have had their share of this day (UTC).';

CREATE OR REPLACE FUNCTION tokenkeeper.count_alerts(of_campaign bigint, of_topic integer, numbers bigint[], keys bytea[]) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    uncounted integer[];
    asked bigint[];
    asked_keys bytea[];
BEGIN
    -- A batch that a daemon has returned, or left behind, is counted already.
    WITH counted AS (
        UPDATE tokenkeeper.campaign_batch AS b SET alerts_counted = true
        WHERE b.campaign_id = of_campaign AND NOT b.alerts_counted
          AND b.batch = ANY (ARRAY(SELECT DISTINCT (n >> 9)::integer FROM unnest(count_alerts.numbers) AS n))
        RETURNING b.batch
    )
    SELECT array_agg(c.batch) INTO uncounted FROM counted AS c;
    SELECT array_agg(n.number), array_agg(n.key) INTO asked, asked_keys
    FROM unnest(count_alerts.numbers, count_alerts.keys) AS n (number, key) WHERE (n.number >> 9)::integer = ANY (uncounted);
    RETURN ARRAY(SELECT asked[n.position] FROM tokenkeeper.note_alerts(of_topic, asked_keys) AS n (position));
END
$$;
COMMENT ON FUNCTION tokenkeeper.count_alerts(bigint, integer, bigint[], bytea[]) IS
    'Internal: counts claimed alerts of a campaign against alerts_per_day of its topic, each once. Returns the numbers of those beyond it.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_background(environment text, topic text, keys bytea[], requests integer[], share integer)
RETURNS TABLE (token_key bytea, room integer, earliest timestamptz)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    -- A claim of another daemon for the same device waits here, and b is then what that claim has written, whatever this statement's snapshot
    -- shows. In the order of keys, so that two claims never deadlock.
    RETURN QUERY
    INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at, room)
    SELECT note_background.environment, note_background.topic, k.key, array_fill(now(), ARRAY[least(k.requests, share)]), now(), share
    FROM unnest(note_background.keys, note_background.requests) AS k (key, requests) ORDER BY k.key
    ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
    SET (sent_at, latest_at, room) = (
        SELECT r.sent_at || excluded.sent_at[1:r.room], excluded.latest_at, r.room
        FROM (SELECT a.sent_at, greatest(share - cardinality(a.sent_at), 0) AS room
              FROM (SELECT ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') AS sent_at) AS a) AS r)
    RETURNING b.token_key, b.room, coalesce((SELECT min(a) FROM unnest(b.sent_at) AS a), now());
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_background(text, text, bytea[], integer[], integer) IS
    'Internal: counts claimed background pushes for each of these devices of a topic, each key once. Returns for each how many are within its share of this '
    'hour, and when the earliest that counts was sent.';

CREATE OR REPLACE FUNCTION tokenkeeper.uncount_background(topics text[], environments text[], keys bytea[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
AS $$
BEGIN
    -- The latest instants go, even if another daemon has claimed a push in between: they differ by no more than the time for which this daemon
    -- had the request.
    UPDATE tokenkeeper.background_send AS b
    SET sent_at = b.sent_at[1:cardinality(b.sent_at) - u.requests]
    FROM (
        -- Locked in the order of keys, as in a claim.
        SELECT l.topic, l.environment, l.token_key, n.requests
        FROM (SELECT k.topic, k.environment, k.key, count(*)::integer AS requests
              FROM unnest(uncount_background.topics COLLATE "C", uncount_background.environments COLLATE "C", uncount_background.keys)
                  AS k (topic, environment, key)
              GROUP BY 1, 2, 3 ORDER BY 1, 2, 3) AS n
        CROSS JOIN LATERAL (
            SELECT d.topic, d.environment, d.token_key FROM tokenkeeper.background_send AS d
            WHERE d.topic = n.topic AND d.environment = n.environment AND d.token_key = n.key FOR UPDATE) AS l
        OFFSET 0) AS u
    WHERE b.topic = u.topic AND b.environment = u.environment AND b.token_key = u.token_key;
END
$$;
COMMENT ON FUNCTION tokenkeeper.uncount_background(text[], text[], bytea[]) IS
    'Internal: takes background pushes that did not reach their devices out of the count of this hour. Call it once in a transaction: it locks the devices '
    'in the order of a claim.';

CREATE OR REPLACE FUNCTION tokenkeeper.audience_share(
    of_topic integer, tags text, everyone boolean, tokens bigint, OUT confirm_share numeric, OUT active float8, OUT meant float8)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_ledger float8;
    sampled constant float8 := 50000;
BEGIN
    meant := audience_share.tokens;
    SELECT t.confirm_share INTO confirm_share FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    IF confirm_share IS NULL THEN
        RETURN;
    END IF;
    SELECT coalesce(sum(c.tokens), 0) INTO active FROM tokenkeeper.token_count AS c
    WHERE c.topic_id = of_topic AND c.state = 'active' AND c.registered;
    IF everyone THEN
        meant := active;
    ELSIF tags IS NOT NULL THEN
        SELECT greatest(c.reltuples, 0) INTO of_ledger FROM pg_catalog.pg_class AS c WHERE c.oid = 'tokenkeeper.ledger'::regclass;
        IF active * active > 2 * sampled * of_ledger THEN
            -- Cheaper than to read half of the topic, and close enough.
            EXECUTE $statement$
                SELECT count(*) FILTER (WHERE tokenkeeper.tag_vector(l.tags) @@ tokenkeeper.tag_query($2)) * $4 / nullif(count(*), 0)
                FROM tokenkeeper.ledger AS l TABLESAMPLE SYSTEM ($3)
                WHERE l.topic_id = $1 AND NOT l.suppressed AND l.registered_at > '-infinity'
                $statement$ INTO meant USING of_topic, tags, least(100 * sampled / active, 100), active;
        ELSE
            EXECUTE $statement$
                SELECT count(*) FROM (
                    SELECT FROM tokenkeeper.ledger AS l
                    WHERE l.topic_id = $1 AND NOT l.suppressed AND l.registered_at > '-infinity'
                      AND tokenkeeper.tag_vector(l.tags) @@ tokenkeeper.tag_query($2)) AS l
                $statement$ INTO meant USING of_topic, tags;
        END IF;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.audience_share(integer, text, boolean, bigint) IS
    'What confirmation_fault compares: confirm_share of the topic, its active tokens, and how many are meant (of everyone, at least whether that is more '
    'than 50). tokens is the length of a list. Only meant, and for a list, without a confirm_share. The share of a tag expression among 300,000 tokens or '
    'more may be estimated from a sample; null if the sample is empty. Raises 22023 for an invalid tag expression.';

CREATE OR REPLACE FUNCTION tokenkeeper.confirmation_fault(of_topic integer, tags text, everyone boolean, tokens bigint) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT format('the audience is %s %% of the tokens of %s (%s), and more than %s %% need confirm => true',
                      CASE WHEN round(p.percent) > p.at_most THEN 'about ' || round(p.percent) ELSE 'just over ' || trim_scale(100 * s.confirm_share) END,
                      t.topic, t.environment, trim_scale(100 * s.confirm_share))
        FROM tokenkeeper.audience_share(of_topic, confirmation_fault.tags, confirmation_fault.everyone, confirmation_fault.tokens) AS s
        CROSS JOIN LATERAL (SELECT least(100 * s.meant / greatest(s.active, 1), 100) AS percent, 100 * s.confirm_share::float8 AS at_most) AS p
        JOIN tokenkeeper.topic AS t ON t.topic_id = of_topic
        WHERE s.meant > greatest(floor(s.active * s.confirm_share::float8), 50) AND p.percent > p.at_most);
END
$$;
COMMENT ON FUNCTION tokenkeeper.confirmation_fault(integer, text, boolean, bigint) IS
    'Why enqueue refuses an audience without confirm => true: it has more than 50 tokens and more than confirm_share of the active ones. Null if it does '
    'not. See audience_share.';
