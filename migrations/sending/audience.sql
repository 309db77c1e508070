-- Audiences: who is meant, how many they are, and their requests in batches.
--
-- Locks: address_campaign locks the campaign's row if it is free, so one daemon addresses it. It deletes the rows of campaign_token that it takes, and locks no
-- token of the ledger.

CREATE OR REPLACE FUNCTION tokenkeeper.audience_of(
    of_tags text, of_device text, of_user text, of_tokens text[], of_everyone boolean,
    OUT kind text, OUT value text, OUT tokens text[], OUT fault text, OUT hint text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    given integer := (of_tags IS NOT NULL)::integer + (of_device IS NOT NULL)::integer + (of_user IS NOT NULL)::integer
                     + (of_tokens IS NOT NULL)::integer + coalesce(of_everyone, false)::integer;
    said text;
BEGIN
    hint := 'tokenkeeper.audience_size counts an audience.';
    IF given <> 1 THEN
        fault := format('addressed is %s, expected one of tags, device_id, user_id, tokens and everyone',
                        CASE given WHEN 0 THEN 'nobody' ELSE 'more than one' END);
        hint := 'everyone => true addresses all tokens of the topic; a variable that is null by mistake must not do so.';
        RETURN;
    END IF;
    kind := CASE WHEN of_tags IS NOT NULL THEN 'tags' WHEN of_device IS NOT NULL THEN 'device' WHEN of_user IS NOT NULL THEN 'user'
                 WHEN of_tokens IS NOT NULL THEN 'tokens' ELSE 'everyone' END;
    value := coalesce(of_tags, tokenkeeper.device_name(of_device), of_device, of_user);
    IF kind IN ('device', 'user') AND octet_length(value) NOT BETWEEN 1 AND 512 THEN
        fault := format('%s_id is %s bytes long, expected 1 to 512', kind, octet_length(value));
    ELSIF kind = 'device' AND tokenkeeper.device_name(of_device) IS NULL THEN
        fault := 'device_id names no device';
    END IF;
    IF kind = 'tags' THEN
        BEGIN
            PERFORM tokenkeeper.tag_query(value);
        EXCEPTION WHEN invalid_parameter_value THEN
            GET STACKED DIAGNOSTICS fault = MESSAGE_TEXT, said = PG_EXCEPTION_HINT;
            hint := coalesce(nullif(said, ''), hint);
        END;
    END IF;
    IF kind = 'tokens' THEN
        hint := 'tokenkeeper.token_fault says why a token cannot be read.';
        fault := coalesce(tokenkeeper.unreadable(of_tokens), CASE WHEN EXISTS (SELECT FROM unnest(of_tokens) AS t WHERE t IS NULL) THEN 'a token is null' END);
        tokens := CASE WHEN fault IS NULL THEN ARRAY(SELECT DISTINCT encode(tokenkeeper.token_key(t.token), 'hex') COLLATE "C" FROM unnest(of_tokens) AS t (token) ORDER BY 1) END;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.audience_of(text, text, text, text[], boolean) IS
    'Internal: the audience of a campaign: its kind; its tag expression, device_id or user_id; and its tokens, in order and without duplicates. Or the fault: '
    'not exactly one audience is given, a token cannot be read, or the tag expression is invalid.';

CREATE OR REPLACE FUNCTION tokenkeeper.audience_condition(kind text, value text, observes boolean, by_index boolean) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    condition text := 'l.registered_at > ''-infinity''' || CASE WHEN audience_condition.observes THEN '' ELSE ' AND NOT l.suppressed' END;
    query tsquery;
BEGIN
    CASE audience_condition.kind COLLATE "C"
        WHEN 'everyone' THEN RETURN condition;
        WHEN 'device' THEN RETURN condition || format(' AND l.device_id = %L', audience_condition.value);
        WHEN 'user' THEN RETURN condition || format(' AND l.user_id = %L', audience_condition.value);
        WHEN 'tags' THEN
            query := tokenkeeper.tag_query(audience_condition.value);
            -- The index has no token without tags. An expression that such a token matches, like !muted, is wide anyway.
            RETURN condition || format(' AND tokenkeeper.tag_vector(l.tags) @@ %L::tsquery', query)
                || CASE WHEN NOT audience_condition.by_index OR tokenkeeper.tag_vector(NULL) @@ query THEN '' ELSE ' AND l.tags <> ''{}''' END;
    END CASE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.audience_condition(text, text, boolean, boolean) IS
    'Internal: an SQL condition on the row l of the ledger: its token belongs to an audience, and the gate does not refuse it. With literals, for a plan of '
    'this audience. by_index lets a query use the index on tags; an estimate leaves it out, because the planner takes it for another share of the tokens. '
    'Raises 22023 for an invalid tag expression.';

CREATE OR REPLACE FUNCTION tokenkeeper.estimated_audience(topic_id integer, condition text) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    plan json;
BEGIN
    EXECUTE 'EXPLAIN (FORMAT JSON) SELECT FROM tokenkeeper.ledger AS l WHERE '
        || concat_ws(' AND ', 'l.topic_id = ' || estimated_audience.topic_id, estimated_audience.condition) INTO plan;
    RETURN (plan -> 0 -> 'Plan' ->> 'Plan Rows')::numeric::bigint;
END
$$;
COMMENT ON FUNCTION tokenkeeper.estimated_audience(integer, text) IS
    'Internal: the planner''s estimate of how many tokens of a topic (null: of all) meet a condition of audience_condition without by_index.';

CREATE OR REPLACE FUNCTION tokenkeeper.audience_size(
    topic text, environment text DEFAULT 'production', tags text DEFAULT NULL, device_id text DEFAULT NULL, user_id text DEFAULT NULL,
    tokens text[] DEFAULT NULL, everyone boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
DECLARE
    fault text := tokenkeeper.arguments_fault(
        '{topic,environment,tags,device_id,user_id,tokens}',
        ARRAY[octet_length(audience_size.topic), octet_length(audience_size.environment), octet_length(audience_size.tags),
              octet_length(audience_size.device_id), octet_length(audience_size.user_id),
              (SELECT sum(octet_length(t)) FROM unnest(audience_size.tokens) AS t)]);
    asked record;
    of_topic integer := tokenkeeper.known_topic(audience_size.topic, coalesce(audience_size.environment, 'production'));
    observes boolean := (SELECT t.gate IS NOT DISTINCT FROM 'observe' FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
    size bigint;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    asked := tokenkeeper.audience_of(audience_size.tags, audience_size.device_id, audience_size.user_id, audience_size.tokens, audience_size.everyone);
    IF asked.fault IS NOT NULL THEN
        RAISE EXCEPTION '%', asked.fault USING ERRCODE = 'invalid_parameter_value', HINT = asked.hint;
    END IF;
    IF asked.kind = 'tokens' THEN
        SELECT count(*) INTO size FROM unnest(asked.tokens) AS t (token)
        WHERE observes OR (SELECT true FROM tokenkeeper.suppression AS s
                           WHERE s.topic_id = of_topic AND s.token_key = tokenkeeper.token_key(t.token)) IS NOT TRUE;
        RETURN size;
    END IF;
    EXECUTE 'SELECT count(*) FROM tokenkeeper.ledger AS l WHERE l.topic_id = $1 AND '
        || tokenkeeper.audience_condition(asked.kind, asked.value, observes, by_index => true) INTO size USING of_topic;
    RETURN size;
END
$$;
COMMENT ON FUNCTION tokenkeeper.audience_size(text, text, text, text, text, text[], boolean) IS
    'How many tokens enqueue would address now with the same audience. Takes seconds for millions. Raises 25001, and 22023 for an unknown topic or an '
    'invalid audience.';

CREATE OR REPLACE FUNCTION tokenkeeper.add_batches(of_campaign tokenkeeper.campaign, keys bytea[], size integer) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The first batch is small, so that the first push leaves at once.
    short integer := CASE WHEN of_campaign.batches = 0 THEN greatest(size - 50, 0) ELSE 0 END;
    last integer;
BEGIN
    INSERT INTO tokenkeeper.campaign_batch AS b (campaign_id, batch, requests, first_key, token_keys)
    SELECT of_campaign.campaign_id, g.batch, cardinality(g.token_keys), g.token_keys[1], g.token_keys
    FROM (SELECT of_campaign.batches + 1 + (k.n - 1 + short) / size AS batch, array_agg(k.token_key ORDER BY k.n) AS token_keys
          FROM unnest(keys) WITH ORDINALITY AS k (token_key, n) GROUP BY 1) AS g;
    last := of_campaign.batches + (cardinality(keys) + short + size - 1) / size;
    RETURN CASE WHEN cardinality(keys) > 0 THEN last ELSE of_campaign.batches END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.add_batches(tokenkeeper.campaign, bytea[], integer) IS
    'Internal: appends tokens, which are in order and greater than the earlier ones, to a campaign, in batches of a size. Returns the last number of a '
    'batch.';

CREATE OR REPLACE FUNCTION tokenkeeper.search_audience(of_campaign tokenkeeper.campaign, in_ranges boolean, OUT expected bigint, OUT keys bytea[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    most constant integer := 200000;
    of_topic integer;
    observes boolean;
    condition text;
    is_indexed boolean;
BEGIN
    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe' INTO of_topic, observes
    FROM tokenkeeper.topic AS t WHERE t.topic = of_campaign.topic AND t.environment = of_campaign.environment;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    condition := tokenkeeper.audience_condition(of_campaign.audience_kind, of_campaign.audience, observes, by_index => false);
    IF of_campaign.audience_kind IN ('everyone', 'tags') THEN
        expected := tokenkeeper.estimated_audience(of_topic, condition);
    END IF;
    IF search_audience.in_ranges OR of_campaign.audience_kind = 'everyone' OR expected > 50000 THEN
        RETURN;
    END IF;
    -- Without statistics, as after an import, a plan would also read all entries of the topic in the primary key. So it may not use them if the index
    -- on tags alone finds few enough.
    is_indexed := CASE of_campaign.audience_kind WHEN 'tags' THEN
        NOT tokenkeeper.tag_vector(NULL) @@ tokenkeeper.tag_query(of_campaign.audience) AND tokenkeeper.estimated_audience(NULL, condition) <= most
        ELSE true END;
    EXECUTE format('SELECT coalesce(array_agg(k.token_key ORDER BY k.token_key), ''{}'') FROM (SELECT l.token_key FROM tokenkeeper.ledger AS l '
                   'WHERE l.topic_id %s = $1 AND %s LIMIT %s) AS k', CASE WHEN is_indexed THEN '+ 0' END,
                   tokenkeeper.audience_condition(of_campaign.audience_kind, of_campaign.audience, observes, by_index => true), most)
        INTO keys USING of_topic;
    IF cardinality(keys) = most THEN
        keys := NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.search_audience(tokenkeeper.campaign, boolean) IS
    'Internal: the audience of a campaign, in the order of the keys, by the index on tags, devices or users, if the planner expects at most 50000 tokens. '
    'Otherwise, and with in_ranges, keys is null: then read the ledger in ranges. Not for a list. expected is the planner''s estimate. Raises 22023 for an '
    'invalid tag expression.';

CREATE OR REPLACE FUNCTION tokenkeeper.next_of_list(
    c tokenkeeper.campaign, of_topic integer, observes boolean, most_rows integer, OUT keys bytea[], OUT last_key bytea, OUT is_complete boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- From addressed_to on, because the index still has entries of deleted rows before it.
    WITH met AS MATERIALIZED (
        SELECT t.ctid AS place, tokenkeeper.token_key(t.token) AS key FROM tokenkeeper.campaign_token AS t
        WHERE t.campaign_id = c.campaign_id AND tokenkeeper.token_key(t.token) >= c.addressed_to
        ORDER BY tokenkeeper.token_key(t.token) LIMIT most_rows
    ), gone AS (
        DELETE FROM tokenkeeper.campaign_token AS t WHERE t.ctid = ANY (ARRAY(SELECT m.place FROM met AS m))
    )
    SELECT ARRAY(SELECT DISTINCT m.key FROM met AS m
                 WHERE m.key > c.addressed_to AND (observes IS TRUE OR (
                     SELECT true FROM tokenkeeper.suppression AS s WHERE s.topic_id = of_topic AND s.token_key = m.key) IS NOT TRUE)
                 ORDER BY 1), (array_agg(m.key))[count(*)], count(*) < most_rows
    INTO keys, last_key, is_complete FROM met AS m;
END
$$;
COMMENT ON FUNCTION tokenkeeper.next_of_list(tokenkeeper.campaign, integer, boolean, integer) IS
    'Internal: takes up to most_rows tokens off the list of a campaign, and returns those that the gate passes.';

CREATE OR REPLACE FUNCTION tokenkeeper.next_of_ledger(
    c tokenkeeper.campaign, of_topic integer, observes boolean, most_rows integer, OUT keys bytea[], OUT last_key bytea, OUT is_complete boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_bitmapscan = off
AS $$
DECLARE
    condition text := tokenkeeper.audience_condition(c.audience_kind, c.audience, observes, by_index => false);
    range_size integer;
    rows_read integer;
BEGIN
    -- In the order of the primary key, as far as this range reaches. The first range is short, so that the first push leaves at once.
    last_key := c.addressed_to;
    FOREACH range_size IN ARRAY CASE WHEN c.started_at IS NULL AND most_rows > 1000 THEN ARRAY[1000, most_rows] ELSE ARRAY[most_rows] END LOOP
        EXECUTE format('WITH met AS MATERIALIZED (SELECT l.token_key, %s AS passes FROM tokenkeeper.ledger AS l '
                       'WHERE l.topic_id = $1 AND l.token_key > $2 ORDER BY l.token_key LIMIT $3) '
                       'SELECT array_agg(m.token_key) FILTER (WHERE m.passes), coalesce((array_agg(m.token_key))[count(*)], $2), count(*) '
                       'FROM met AS m', condition)
        INTO keys, last_key, rows_read USING of_topic, last_key, range_size;
        is_complete := rows_read < range_size;
        EXIT WHEN keys IS NOT NULL OR is_complete;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.next_of_ledger(tokenkeeper.campaign, integer, boolean, integer) IS
    'Internal: reads up to most_rows tokens of the topic after the addressed ones, in order, and returns those of the audience.';

CREATE OR REPLACE FUNCTION tokenkeeper.address_campaign(
    campaign_id bigint, ahead integer, patiently boolean DEFAULT false, in_ranges boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    c tokenkeeper.campaign;
    of_topic integer;
    observes boolean;
    -- Patiently, of a ledger that may not be in memory: forget and a pause of the campaign wait for few.
    most_rows integer := CASE WHEN address_campaign.patiently THEN 1000 ELSE 10000 END;
    waiting bigint;
    last_key bytea;
    is_complete boolean;
    has_searched boolean := false;
    estimate bigint;
    keys bytea[];
    -- With a limit, small batches, so that daemons take turns.
    per_second integer;
    size integer;
    last_batch integer;
BEGIN
    IF address_campaign.patiently THEN
        -- This may take long. So before any lock: neither forget nor a pause of the campaign waits for it.
        SELECT a.* INTO c FROM tokenkeeper.campaign AS a
        WHERE a.campaign_id = address_campaign.campaign_id AND a.state IN ('waiting', 'running') AND NOT a.is_addressed
          AND a.started_at IS NULL AND a.audience_kind <> 'tokens' AND coalesce(a.scheduled_at, a.created_at) <= clock_timestamp()
          AND NOT tokenkeeper.has_expired(a.expiration);
        has_searched := FOUND;
        IF has_searched THEN
            SELECT s.expected, s.keys INTO estimate, keys FROM tokenkeeper.search_audience(c, address_campaign.in_ranges) AS s;
        END IF;
    END IF;
    SELECT a.* INTO c FROM tokenkeeper.campaign AS a
    WHERE a.campaign_id = address_campaign.campaign_id AND a.state IN ('waiting', 'running') AND NOT a.is_addressed
      AND coalesce(a.scheduled_at, a.created_at) <= clock_timestamp() AND NOT tokenkeeper.has_expired(a.expiration)
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT coalesce(sum(b.requests) FILTER (WHERE b.claimed_by IS NULL), 0), coalesce(min(b.batch), c.batches + 1) INTO waiting, c.first_open_batch
    FROM tokenkeeper.campaign_batch AS b WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch;
    IF c.batches > 0 AND waiting >= address_campaign.ahead THEN
        RETURN NULL;
    END IF;
    SELECT t.topic_id, t.gate IS NOT DISTINCT FROM 'observe', least(c.max_per_second, t.max_per_second) INTO of_topic, observes, per_second
    FROM (SELECT) AS one LEFT JOIN tokenkeeper.topic AS t ON t.topic = c.topic AND t.environment = c.environment;
    size := CASE WHEN per_second IS NULL THEN 500 ELSE least(500, greatest(per_second / 20, 1)) END;

    IF c.audience_kind = 'tokens' THEN
        SELECT n.keys, n.last_key, n.is_complete INTO keys, last_key, is_complete
        FROM tokenkeeper.next_of_list(c, of_topic, observes, most_rows) AS n;
    ELSIF of_topic IS NULL THEN
        -- The sweep has deleted a topic without tokens.
        is_complete := true;
    ELSE
        IF c.started_at IS NULL THEN
            IF NOT has_searched THEN
                SELECT s.expected, s.keys INTO estimate, keys FROM tokenkeeper.search_audience(c, address_campaign.in_ranges) AS s;
            ELSIF keys <> '{}' THEN
                -- Without what has been forgotten meanwhile. The claim asks the gate again.
                keys := ARRAY(SELECT k.token_key FROM unnest(keys) WITH ORDINALITY AS k (token_key, n)
                              WHERE (SELECT true FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = k.token_key)
                              ORDER BY k.n);
            END IF;
            is_complete := keys IS NOT NULL;
            c.expected := CASE WHEN is_complete THEN cardinality(keys) ELSE estimate END;
        END IF;
        IF is_complete IS NOT TRUE THEN
            SELECT n.keys, n.last_key, n.is_complete INTO keys, last_key, is_complete
            FROM tokenkeeper.next_of_ledger(c, of_topic, observes, most_rows) AS n;
        END IF;
    END IF;

    last_batch := tokenkeeper.add_batches(c, coalesce(keys, '{}'), size);
    UPDATE tokenkeeper.campaign AS a
    SET state = 'running', started_at = coalesce(a.started_at, clock_timestamp()), expected = c.expected,
        addressed = a.addressed + coalesce(cardinality(keys), 0), is_addressed = is_complete,
        addressed_to = CASE WHEN is_complete THEN '' ELSE coalesce(last_key, a.addressed_to) END, has_list = a.has_list AND NOT is_complete,
        batches = last_batch, first_open_batch = c.first_open_batch
    WHERE a.campaign_id = c.campaign_id;
    RETURN coalesce(cardinality(keys), 0);
END
$$;
COMMENT ON FUNCTION tokenkeeper.address_campaign(bigint, integer, boolean, boolean) IS
    'Addresses the next part of the audience of a campaign, with the gate: up to 10000 tokens, or all if the planner expects at most 50000 and in_ranges is '
    'false. Returns how many, perhaps 0 although more follow; null if there is nothing to do now: paused, ended, expired, all addressed, enough (ahead) '
    'waiting unclaimed, or another daemon does it. With patiently, it first searches a whole audience without a lock, or reads up to 1000 tokens, so nobody '
    'waits for it. Raises 22023 for an invalid tag expression.';
