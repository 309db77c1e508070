-- Campaigns: one call creates a campaign on all shards, under one id.
--
-- First, all shards check the call. Then the chooser, which the idempotency_key determines, creates its part and so chooses the id: if two calls with one
-- idempotency_key come at the same moment, the chooser decides. Then the other shards create theirs, all at once. Each shard commits at once.

-- PL/Proxy passes no null within an array: a rate of 0 and an empty list stand for null.
CREATE OR REPLACE FUNCTION tokenkeeper_shard.check_campaign(
    shards integer[], rates integer[], lists text[], payload json, topic text, environment text, tags text, push_type text, priority integer,
    expiration timestamptz, collapse_id text, scheduled_at timestamptz, device_id text, user_id text, everyone boolean, name text,
    idempotency_key text, confirm boolean, chooser integer)
RETURNS TABLE (
    shard integer, error text, error_code text, error_hint text, campaign_id bigint, state text, is_recent boolean, greatest_id bigint,
    topic_fault text, topic_hint text, confirm_share numeric, active float8, meant float8, sending_fault text, has_tokens boolean, unknown_tags text[])
LANGUAGE plproxy
SET datestyle = 'ISO'
AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards, rates, lists;
    RUN ON shards;
    SELECT * FROM tokenkeeper.check_campaign(
        payload, topic, environment, tags, push_type, priority, expiration, collapse_id, scheduled_at, device_id, user_id,
        CASE WHEN (lists)[1] <> '' THEN ARRAY(SELECT json_array_elements_text(((lists)[1])::json)) END,
        everyone, name, idempotency_key, nullif((rates)[1], 0), confirm, chooser);
$$;
COMMENT ON FUNCTION tokenkeeper_shard.check_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, integer) IS
    'check_campaign on these shards, with a rate and a list of tokens for each: a row per shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.check_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.check_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, integer) TO tokenkeeper_sender;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.create_campaign(
    shards integer[], rates integer[], lists text[], payload json, topic text, environment text, tags text, push_type text, priority integer,
    expiration timestamptz, collapse_id text, scheduled_at timestamptz, device_id text, user_id text, everyone boolean, name text,
    idempotency_key text, confirm boolean, as_campaign bigint, beyond bigint) RETURNS SETOF bigint
LANGUAGE plproxy
SET datestyle = 'ISO'
AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards, rates, lists;
    RUN ON shards;
    SELECT tokenkeeper.create_campaign(
        payload, topic, environment, tags, push_type, priority, expiration, collapse_id, scheduled_at, device_id, user_id,
        CASE WHEN (lists)[1] <> '' THEN ARRAY(SELECT json_array_elements_text(((lists)[1])::json)) END,
        everyone, name, idempotency_key, nullif((rates)[1], 0), confirm, as_campaign, beyond);
$$;
COMMENT ON FUNCTION tokenkeeper_shard.create_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, bigint, bigint) IS
    'create_campaign on these shards, with a rate and a list of tokens for each: the campaign_id that each returns.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.create_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, bigint, bigint) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.create_campaign(integer[], integer[], text[], json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, boolean, text, text, boolean, bigint, bigint) TO tokenkeeper_sender;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.audience_part(
    shards integer[], lists text[], topic text, environment text, tags text, device_id text, user_id text, everyone boolean) RETURNS SETOF bigint
LANGUAGE plproxy AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards, lists;
    RUN ON shards;
    SELECT tokenkeeper.audience_part(
        topic, environment, tags, device_id, user_id,
        CASE WHEN (lists)[1] <> '' THEN ARRAY(SELECT json_array_elements_text(((lists)[1])::json)) END, everyone);
$$;
COMMENT ON FUNCTION tokenkeeper_shard.audience_part(integer[], text[], text, text, text, text, text, boolean) IS
    'audience_part on these shards, with a list of tokens for each: what each returns.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.audience_part(integer[], text[], text, text, text, text, text, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.audience_part(integer[], text[], text, text, text, text, text, boolean)
    TO tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.token_lists(tokens text[]) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    wrong bigint;
BEGIN
    IF token_lists.tokens IS NULL THEN
        RETURN array_fill(''::text, ARRAY[shards]);
    END IF;
    SELECT min(t.n) INTO wrong FROM unnest(token_lists.tokens) WITH ORDINALITY AS t (token, n) WHERE tokenkeeper.token_key(t.token) IS NULL;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'token % is malformed, expected 1 to 512 bytes in hex', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN ARRAY(
        SELECT coalesce(o.list, '[]') FROM generate_series(0, shards - 1) AS s (shard)
        LEFT JOIN (
            SELECT tokenkeeper.shard_of(t.token, shards) AS shard, json_agg(t.token)::text AS list FROM unnest(token_lists.tokens) AS t (token) GROUP BY 1
        ) AS o ON o.shard = s.shard
        ORDER BY s.shard);
END
$$;
COMMENT ON FUNCTION tokenkeeper_shard.token_lists(text[]) IS
    'Splits a list of tokens: an array of JSON for each shard, in the order of their numbers; empty texts for null. Raises 22023 for a malformed token.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.token_lists(text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.token_lists(text[]) TO tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.rates(max_per_second integer) RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
BEGIN
    IF rates.max_per_second NOT BETWEEN shards AND 1000000 THEN
        RAISE EXCEPTION 'max_per_second is %, expected % to 1000000, or null: each shard gets its part', rates.max_per_second, shards
            USING ERRCODE = 'numeric_value_out_of_range';
    END IF;
    RETURN ARRAY(SELECT coalesce(rates.max_per_second / shards + (n < rates.max_per_second % shards)::integer, 0) FROM generate_series(0, shards - 1) AS n ORDER BY n);
END
$$;
COMMENT ON FUNCTION tokenkeeper_shard.rates(integer) IS
    'Divides a rate: the part of each shard, in the order of their numbers; zeros for null. Raises 22003 for less than one per shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.rates(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.rates(integer) TO tokenkeeper_sender, tokenkeeper_operator;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.named(shards integer[]) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN cardinality(shards) = 1 THEN 'shard ' ELSE 'shards ' END || array_to_string(shards, ', ');
COMMENT ON FUNCTION tokenkeeper_shard.named(integer[]) IS 'Shards by their numbers, for a message.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.named(integer[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.named(integer[]) TO tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator;

CREATE OR REPLACE FUNCTION tokenkeeper.enqueue(
    payload json,
    topic text,
    environment text DEFAULT 'production',
    tags text DEFAULT NULL,
    push_type text DEFAULT NULL,
    priority integer DEFAULT NULL,
    expiration timestamptz DEFAULT NULL,
    collapse_id text DEFAULT NULL,
    scheduled_at timestamptz DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    tokens text[] DEFAULT NULL,
    everyone boolean DEFAULT false,
    name text DEFAULT NULL,
    idempotency_key text DEFAULT NULL,
    max_per_second integer DEFAULT NULL,
    confirm boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    env text := coalesce(enqueue.environment, 'production');
    rates CONSTANT integer[] := tokenkeeper_shard.rates(enqueue.max_per_second);
    lists CONSTANT text[] := tokenkeeper_shard.token_lists(enqueue.tokens);
    -- A call that comes once more has the same chooser. Others share the ids of all shards.
    chooser CONSTANT integer := CASE WHEN enqueue.idempotency_key IS NULL THEN floor(random() * shards)::integer
        ELSE get_byte(sha256(convert_to(enqueue.idempotency_key, 'UTF8')), 0) << 8 | get_byte(sha256(convert_to(enqueue.idempotency_key, 'UTF8')), 1) END & (shards - 1);
    checked jsonb;
    problem record;
    the_id bigint;
    missing integer[];
    failed integer[] := '{}';
    failed_with text;
    failure text;
    number integer;
    note record;
BEGIN
    IF cardinality(enqueue.tokens) = 0 THEN
        RAISE EXCEPTION 'tokens is empty, expected the list: a router takes none by campaign_token, because each shard commits at once'
            USING ERRCODE = 'feature_not_supported', HINT = 'Pass the list to enqueue, or connect to the shards.';
    END IF;
    BEGIN
        checked := (
            SELECT jsonb_agg(c ORDER BY c.shard) FROM tokenkeeper_shard.check_campaign(
                ARRAY(SELECT generate_series(0, shards - 1)), rates, lists, enqueue.payload, enqueue.topic, env, enqueue.tags, enqueue.push_type,
                enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.scheduled_at, enqueue.device_id, enqueue.user_id, enqueue.everyone,
                enqueue.name, enqueue.idempotency_key, enqueue.confirm, chooser) AS c);
    EXCEPTION WHEN OTHERS THEN
        RAISE EXCEPTION 'nothing was created, because a shard failed: %', sqlerrm USING ERRCODE = sqlstate;
    END;
    -- An invalid call fails on all shards with the same error. A shard with a fault of its own is named.
    SELECT min(c.error_code) AS code, min(c.error_hint) AS hint,
           CASE WHEN count(*) = shards THEN c.error ELSE format('%s: %s', tokenkeeper_shard.named(array_agg(c.shard ORDER BY c.shard)), c.error) END AS message
    INTO problem
    FROM jsonb_to_recordset(checked) AS c (shard integer, error text, error_code text, error_hint text)
    WHERE c.error IS NOT NULL GROUP BY c.error ORDER BY min(c.shard) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%', problem.message USING ERRCODE = problem.code, HINT = coalesce(nullif(problem.hint, ''), 'Nothing was created.');
    END IF;
    SELECT min(c.campaign_id) AS id, max(c.campaign_id) AS other,
           array_agg(c.shard ORDER BY c.shard) FILTER (WHERE c.campaign_id IS NOT NULL) AS present,
           array_agg(c.shard ORDER BY c.shard) FILTER (WHERE c.campaign_id IS NULL) AS lacking,
           bool_or(c.campaign_id IS NOT NULL AND c.shard = chooser) AS is_chosen,
           bool_or(c.state = 'cancelled') AS is_cancelled, bool_or(c.state = 'paused') AS is_paused,
           bool_and(c.is_recent IS NOT FALSE) AS is_recent,
           min(c.topic_fault) FILTER (WHERE c.campaign_id IS NULL) AS topic_fault, min(c.topic_hint) AS topic_hint,
           bool_and(c.topic_fault IS NOT NULL) AS is_unknown,
           tokenkeeper.share_fault(enqueue.topic, env, min(c.confirm_share), sum(c.active), sum(c.meant)) AS share_fault
    INTO problem
    FROM jsonb_to_recordset(checked) AS c (
        shard integer, campaign_id bigint, state text, is_recent boolean, topic_fault text, topic_hint text, confirm_share numeric, active float8, meant float8);
    IF problem.id IS NULL THEN
        IF problem.is_unknown THEN
            RAISE EXCEPTION '%', problem.topic_fault USING ERRCODE = 'invalid_parameter_value', HINT = problem.topic_hint;
        END IF;
        IF problem.share_fault IS NOT NULL THEN
            RAISE EXCEPTION '%', problem.share_fault USING ERRCODE = 'invalid_parameter_value', HINT = 'tokenkeeper.audience_size counts an audience.';
        END IF;
    ELSIF problem.is_cancelled THEN
        RAISE NOTICE 'campaign % has this idempotency_key and is cancelled: nothing is sent', problem.id USING HINT = 'Use a new key for a new campaign.';
        RETURN problem.id;
    ELSIF problem.id <> problem.other OR NOT problem.is_chosen THEN
        RAISE EXCEPTION 'idempotency_key % belongs to campaign % of %, which no router has created, or which is partly deleted',
            quote_literal(enqueue.idempotency_key), problem.id, tokenkeeper_shard.named(problem.present)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use a new key for a new campaign.';
    ELSIF problem.lacking IS NULL THEN
        RETURN problem.id;
    ELSIF NOT problem.is_recent OR problem.is_paused THEN
        RAISE EXCEPTION 'campaign % is only on %, and cannot be completed: it %', problem.id, tokenkeeper_shard.named(problem.present),
            CASE WHEN problem.is_paused THEN 'is paused' ELSE 'was created more than 12 hours ago, and a shard may have deleted its part' END
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = CASE WHEN problem.is_paused THEN format('Resume it first: SELECT tokenkeeper.resume_campaign(%s)', problem.id)
                              ELSE 'Use a new key for a new campaign.' END;
    END IF;

    the_id := problem.id;
    IF the_id IS NULL THEN
        the_id := (
            SELECT c.id FROM tokenkeeper_shard.create_campaign(
                ARRAY[chooser], rates[chooser + 1:chooser + 1], lists[chooser + 1:chooser + 1], enqueue.payload, enqueue.topic, env, enqueue.tags,
                enqueue.push_type, enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.scheduled_at, enqueue.device_id, enqueue.user_id,
                enqueue.everyone, enqueue.name, enqueue.idempotency_key, enqueue.confirm, NULL,
                (SELECT max(c.greatest_id) FROM jsonb_to_recordset(checked) AS c (greatest_id bigint))) AS c (id));
    END IF;
    missing := ARRAY(SELECT n FROM unnest(problem.lacking) AS n WHERE n <> chooser ORDER BY n);
    BEGIN
        PERFORM tokenkeeper_shard.create_campaign(
            missing, ARRAY(SELECT rates[n + 1] FROM unnest(missing) AS n), ARRAY(SELECT lists[n + 1] FROM unnest(missing) AS n), enqueue.payload,
            enqueue.topic, env, enqueue.tags, enqueue.push_type, enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.scheduled_at,
            enqueue.device_id, enqueue.user_id, enqueue.everyone, enqueue.name, enqueue.idempotency_key, enqueue.confirm, the_id, NULL)
        WHERE missing <> '{}';
    EXCEPTION WHEN OTHERS THEN
        -- Any of them may have it. A repetition changes nothing, and tells.
        FOREACH number IN ARRAY missing LOOP
            BEGIN
                PERFORM tokenkeeper_shard.create_campaign(
                    ARRAY[number], rates[number + 1:number + 1], lists[number + 1:number + 1], enqueue.payload, enqueue.topic, env, enqueue.tags,
                    enqueue.push_type, enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.scheduled_at, enqueue.device_id, enqueue.user_id,
                    enqueue.everyone, enqueue.name, enqueue.idempotency_key, enqueue.confirm, the_id, NULL);
            EXCEPTION WHEN OTHERS THEN
                failed := failed || number;
                failure := coalesce(failure, sqlerrm);
                failed_with := coalesce(failed_with, sqlstate);
            END;
        END LOOP;
        IF failed <> '{}' THEN
            RAISE EXCEPTION 'campaign % was created on %, and not on %: %', the_id,
                tokenkeeper_shard.named(ARRAY(SELECT n FROM generate_series(0, shards - 1) AS n WHERE n <> ALL (failed))), tokenkeeper_shard.named(failed),
                failure
                USING ERRCODE = failed_with, HINT = CASE WHEN enqueue.idempotency_key IS NULL
                    THEN format('SELECT tokenkeeper.cancel_campaign(%s) cancels it. Without an idempotency_key, a repetition creates another campaign.', the_id)
                    ELSE format('A repetition with the same idempotency_key, within 12 hours, completes it. SELECT tokenkeeper.cancel_campaign(%s) cancels it.', the_id) END;
        END IF;
    END;
    IF problem.id IS NOT NULL THEN
        RETURN the_id;
    END IF;
    FOR note IN
        SELECT CASE WHEN count(*) = shards THEN '' ELSE tokenkeeper_shard.named(array_agg(c.shard ORDER BY c.shard)) || ': ' END || c.sending_fault AS message
        FROM jsonb_to_recordset(checked) AS c (shard integer, sending_fault text) WHERE c.sending_fault IS NOT NULL GROUP BY c.sending_fault ORDER BY min(c.shard)
    LOOP
        RAISE NOTICE '%: the campaign waits', note.message USING HINT = 'A daemon sends to the topics of each [credential.NAME] in its configuration.';
    END LOOP;
    IF enqueue.tokens IS NULL AND NOT (SELECT bool_or(c.has_tokens) FROM jsonb_to_recordset(checked) AS c (has_tokens boolean)) THEN
        RAISE NOTICE '% (%) has no token', enqueue.topic, env;
    ELSE
        FOR note IN
            SELECT t.tag FROM jsonb_to_recordset(checked) AS c (unknown_tags text[]) CROSS JOIN LATERAL unnest(c.unknown_tags) AS t (tag)
            GROUP BY t.tag HAVING count(*) = shards ORDER BY t.tag COLLATE "C"
        LOOP
            RAISE NOTICE 'no token of % (%) has the tag %', enqueue.topic, env, quote_literal(note.tag)
                USING HINT = 'Upper and lower case differ. tokenkeeper.audience_size counts an audience.';
        END LOOP;
    END IF;
    RETURN the_id;
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.enqueue(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.audience_size(
    topic text, environment text DEFAULT 'production', tags text DEFAULT NULL, device_id text DEFAULT NULL, user_id text DEFAULT NULL,
    tokens text[] DEFAULT NULL, everyone boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    size bigint;
BEGIN
    SELECT sum(p.tokens)::bigint INTO size FROM tokenkeeper_shard.audience_part(
        ARRAY(SELECT generate_series(0, tokenkeeper.shard_count() - 1)), tokenkeeper_shard.token_lists(audience_size.tokens), audience_size.topic,
        audience_size.environment, audience_size.tags, audience_size.device_id, audience_size.user_id, audience_size.everyone) AS p (tokens);
    IF size IS NULL THEN
        RAISE EXCEPTION 'topic % is not known in environment %', coalesce(quote_literal(left(audience_size.topic, 512)), 'null'),
            quote_literal(left(coalesce(audience_size.environment, 'production'), 100))
            USING ERRCODE = 'invalid_parameter_value', HINT = 'tokenkeeper.topic_policy lists the known topics, for a reader or an operator.';
    END IF;
    RETURN size;
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.audience_size(text, text, text, text, text, text[], boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.delivery(shard integer, apns_id uuid, OUT campaign_id bigint, OUT state text, OUT at timestamptz, OUT message text)
RETURNS SETOF record
LANGUAGE plproxy AS $$
    CLUSTER 'tokenkeeper_shards';
    RUN ON shard;
    -- PL/Proxy reads an instant from text, which here does not depend on the DateStyle of the shard.
    SELECT d.campaign_id, d.state, to_json(d.at) #>> '{}' AS at, d.message FROM tokenkeeper.delivery(apns_id) AS d;
$$;
COMMENT ON FUNCTION tokenkeeper_shard.delivery(integer, uuid) IS 'delivery on this shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.delivery(integer, uuid) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.delivery(apns_id uuid, OUT campaign_id bigint, OUT state text, OUT at timestamptz, OUT message text)
RETURNS SETOF record
LANGUAGE plpgsql ROWS 1
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    id CONSTANT bytea := uuid_send(delivery.apns_id);
BEGIN
    -- As campaign_apns_id writes it. The shard knows what is none of its own.
    RETURN QUERY SELECT d.* FROM tokenkeeper_shard.delivery(((get_byte(id, 6) & 15) << 8 | get_byte(id, 7)) & (tokenkeeper.shard_count() - 1), delivery.apns_id) AS d
                 WHERE id IS NOT NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.delivery(uuid) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.tagged_tokens(expression text, topic text, environment text, at_most integer)
RETURNS TABLE (token text, state text, sendable boolean, tags text[], device_id text, user_id text)
LANGUAGE plproxy AS $$
    CLUSTER 'tokenkeeper_shards';
    RUN ON ALL;
    SELECT * FROM tokenkeeper.tagged_tokens(expression, topic, environment, at_most);
$$;
COMMENT ON FUNCTION tokenkeeper_shard.tagged_tokens(text, text, text, integer) IS 'tagged_tokens on all shards: up to at_most of each, in any order.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.tagged_tokens(text, text, text, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.tagged_tokens(
    expression text, topic text, environment text DEFAULT 'production', at_most integer DEFAULT 100)
RETURNS TABLE (token text, state text, sendable boolean, tags text[], device_id text, user_id text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
        SELECT t.* FROM tokenkeeper_shard.tagged_tokens(
            tagged_tokens.expression, tagged_tokens.topic, tagged_tokens.environment, tagged_tokens.at_most) AS t
        ORDER BY t.token COLLATE "C" LIMIT greatest(coalesce(tagged_tokens.at_most, 100), 0);
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.tagged_tokens(text, text, text, integer) FROM PUBLIC;

-- Comments and grants are those of shard 0.
DO $do$
DECLARE
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    f record;
BEGIN
    FOR f IN
        SELECT x.*, p.part, p.more
        FROM (VALUES
            ('enqueue', NULL, 'on all shards, under one campaign_id; all of them check the call before one creates anything. Each commits at once: a campaign stays, '
             'even if the transaction is rolled back. If one fails then, the error says which shards have the campaign: a repetition with the same idempotency_key '
             'completes it. max_per_second is divided, and at least the number of shards. 0A000 if tokens is empty, because campaign_token takes none here; 55000 '
             'if a campaign that is paused, or older than 12 hours, lacks a shard; XX000 if a shard is down.'),
            ('audience_size', NULL, 'the sum of all shards. XX000 if one is down.'),
            ('delivery', 'tokenkeeper_shard.delivery(integer, uuid)', 'the shard that has sent it answers. XX000 if it is down.'),
            ('tagged_tokens', 'tokenkeeper_shard.tagged_tokens(text, text, text, integer)', 'of all shards. XX000 if one is down.')) AS p (name, part, more)
        CROSS JOIN LATERAL (
            SELECT c.* FROM jsonb_to_recordset(functions) AS c (name text, types text, comment text, callers text[]) WHERE c.name = p.name) AS x
    LOOP
        EXECUTE format('COMMENT ON FUNCTION tokenkeeper.%I(%s) IS %L', f.name, f.types, f.comment || ' Through the router: ' || f.more);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', concat_ws(', ', format('tokenkeeper.%I(%s)', f.name, f.types), f.part),
                       (SELECT string_agg(quote_ident(c), ', ') FROM unnest(f.callers) AS c WHERE starts_with(c, 'tokenkeeper_')));
    END LOOP;
END
$do$;
