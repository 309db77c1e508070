-- A campaign through a router: what each shard does for it. The routers' enqueue and audience_size call these functions, as their caller.

CREATE OR REPLACE FUNCTION tokenkeeper.check_campaign(
    payload json, topic text, environment text, tags text, push_type text, priority integer, expiration timestamptz, collapse_id text,
    scheduled_at timestamptz, device_id text, user_id text, tokens text[], everyone boolean, name text, idempotency_key text, max_per_second integer,
    confirm boolean, chooser integer)
RETURNS TABLE (
    shard integer, error text, error_code text, error_hint text, campaign_id bigint, state text, is_recent boolean, greatest_id bigint,
    topic_fault text, topic_hint text, confirm_share numeric, active float8, meant float8, sending_fault text, has_tokens boolean, unknown_tags text[])
LANGUAGE plpgsql SECURITY DEFINER ROWS 1
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    env text COLLATE "C" := coalesce(check_campaign.environment, 'production');
    shards integer;
    added record;
BEGIN
    SELECT s.number, s.shards INTO shard, shards FROM tokenkeeper.shard AS s;
    SELECT c.campaign_id INTO greatest_id FROM tokenkeeper.campaign AS c
    WHERE c.campaign_id % shards = check_campaign.chooser ORDER BY c.campaign_id DESC LIMIT 1;
    BEGIN
        IF current_setting('transaction_read_only') = 'on' THEN
            RAISE EXCEPTION 'the shard is read-only' USING ERRCODE = 'read_only_sql_transaction';
        END IF;
        SELECT a.* INTO added FROM tokenkeeper.add_campaign(
            check_campaign.payload, check_campaign.topic, check_campaign.environment, check_campaign.tags, check_campaign.push_type,
            check_campaign.priority, check_campaign.expiration, check_campaign.collapse_id, check_campaign.scheduled_at, check_campaign.device_id,
            check_campaign.user_id, check_campaign.tokens, check_campaign.everyone, check_campaign.name, check_campaign.idempotency_key,
            check_campaign.max_per_second, check_campaign.confirm, is_part => true, only_check => true) AS a;
        IF NOT added.is_new THEN
            SELECT c.campaign_id, c.state, c.created_at > clock_timestamp() - interval '12 hours' INTO campaign_id, state, is_recent
            FROM tokenkeeper.campaign AS c WHERE c.campaign_id = added.campaign_id;
        ELSE
            IF added.of_topic IS NULL THEN
                BEGIN
                    PERFORM tokenkeeper.known_topic(check_campaign.topic, env);
                EXCEPTION WHEN invalid_parameter_value THEN
                    GET STACKED DIAGNOSTICS topic_fault = MESSAGE_TEXT, topic_hint = PG_EXCEPTION_HINT;
                END;
            END IF;
            IF check_campaign.confirm IS NOT TRUE THEN
                SELECT s.confirm_share, s.active, s.meant INTO confirm_share, active, meant
                FROM tokenkeeper.audience_share(added.of_topic, check_campaign.tags, check_campaign.everyone,
                    CASE WHEN check_campaign.tokens IS NOT NULL
                         THEN (SELECT count(DISTINCT tokenkeeper.token_key(t)) FROM unnest(check_campaign.tokens) AS t) END) AS s;
            END IF;
            sending_fault := tokenkeeper.sending_fault(check_campaign.topic, env);
            has_tokens := EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = added.of_topic);
            IF check_campaign.tags IS NOT NULL THEN
                unknown_tags := ARRAY(SELECT t FROM tokenkeeper.unknown_tags(added.of_topic, check_campaign.tags) AS t);
            END IF;
        END IF;
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS error = MESSAGE_TEXT, error_code = RETURNED_SQLSTATE, error_hint = PG_EXCEPTION_HINT;
    END;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_campaign(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean, integer) IS
    'For a router: checks what create_campaign is to do with the same arguments, and changes nothing. One row: why enqueue would raise an error here; or the '
    'campaign that has this idempotency_key already, its state, and whether it was created within the last twelve hours; or whether the topic is unknown here, what the confirmation depends on, '
    'and what enqueue says in a NOTICE. greatest_id is the greatest campaign_id here that the shard chooser has chosen.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.check_campaign(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.create_campaign(
    payload json, topic text, environment text, tags text, push_type text, priority integer, expiration timestamptz, collapse_id text,
    scheduled_at timestamptz, device_id text, user_id text, tokens text[], everyone boolean, name text, idempotency_key text, max_per_second integer,
    confirm boolean, as_campaign bigint, beyond bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted bigint := greatest(create_campaign.as_campaign, create_campaign.beyond);
    most bigint := greatest((SELECT q.last_value FROM tokenkeeper.campaign_campaign_id_seq AS q),
                            (SELECT c.campaign_id FROM tokenkeeper.campaign AS c ORDER BY c.campaign_id DESC LIMIT 1)) + 1000000;
BEGIN
    -- Ids are limited (see CampaignRequest), and nobody is to use them up.
    IF wanted > most OR create_campaign.as_campaign < 1 THEN
        RAISE EXCEPTION 'campaign_id % is out of range, expected 1 to %', wanted, most USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF create_campaign.as_campaign % (SELECT s.shards FROM tokenkeeper.shard AS s) = (SELECT s.number FROM tokenkeeper.shard AS s) THEN
        RAISE EXCEPTION 'campaign_id % is to be chosen by this shard', create_campaign.as_campaign USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (
        SELECT a.campaign_id FROM tokenkeeper.add_campaign(
            create_campaign.payload, create_campaign.topic, create_campaign.environment, create_campaign.tags, create_campaign.push_type,
            create_campaign.priority, create_campaign.expiration, create_campaign.collapse_id, create_campaign.scheduled_at, create_campaign.device_id,
            create_campaign.user_id, create_campaign.tokens, create_campaign.everyone, create_campaign.name, create_campaign.idempotency_key,
            create_campaign.max_per_second, create_campaign.confirm, is_part => true, as_campaign => create_campaign.as_campaign,
            beyond => create_campaign.beyond) AS a);
END
$$;
COMMENT ON FUNCTION tokenkeeper.create_campaign(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean, bigint, bigint) IS
    'For a router, which has called check_campaign on all shards: creates the part of a campaign that this shard sends, and returns its id. as_campaign: the id that '
    'another shard has chosen; null if this shard chooses one, greater than beyond. A repetition changes nothing. Unlike enqueue, it accepts an unknown topic, and '
    'asks for no confirmation. Raises 22023 as enqueue, if the idempotency_key has another campaign here, and for an id more than a million above the greatest one here; 23505 if the id has another one.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.create_campaign(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean, bigint, bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.audience_part(
    topic text, environment text, tags text, device_id text, user_id text, tokens text[], everyone boolean) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    env text COLLATE "C" := coalesce(audience_part.environment, 'production');
    the_topic text COLLATE "C" := audience_part.topic;
BEGIN
    IF NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.topic = the_topic AND t.environment = env) THEN
        RETURN NULL;
    END IF;
    RETURN tokenkeeper.audience_size(audience_part.topic, env, audience_part.tags, audience_part.device_id, audience_part.user_id, audience_part.tokens,
                                     audience_part.everyone);
END
$$;
COMMENT ON FUNCTION tokenkeeper.audience_part(text, text, text, text, text, text[], boolean) IS
    'For a router: audience_size on this shard; null if the topic is unknown here. Raises 22023 as audience_size.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.audience_part(text, text, text, text, text, text[], boolean) FROM PUBLIC;
