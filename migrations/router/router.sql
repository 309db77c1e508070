-- The router: a database whose functions run in the database of the topic, by PL/Proxy. It has no tables, and no rights but those of its logins in the databases.
--
-- tokenkeeperd router applies this file, in one transaction, as a superuser, with the map in place of {...}. Each function belongs to a role of its group, for
-- which the databases know one login; who may call it is in a group of the router, so that a new login changes nothing here. Each call commits at once in the
-- database that it runs in. A database that hangs blocks the sessions that call it.

CREATE FUNCTION tokenkeeper.raise_split(topic text) RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION '% is split by device: name the device', topic USING ERRCODE = 'invalid_parameter_value';
END
$$;
COMMENT ON FUNCTION tokenkeeper.raise_split(text) IS 'Internal: raises 22023 for a topic that is split, without a device.';

-- The planner inlines these two: an array needs them for each element.
CREATE FUNCTION tokenkeeper.bucket(key text) RETURNS integer
LANGUAGE sql STABLE
RETURN (get_byte(sha256(convert_to(key, 'UTF8')), 0) * 256 + get_byte(sha256(convert_to(key, 'UTF8')), 1)) % 1024;
COMMENT ON FUNCTION tokenkeeper.bucket(text) IS 'The bucket of a topic; or of a device, after its topic and a line feed.';

CREATE FUNCTION tokenkeeper.place(topic text, device_id text DEFAULT NULL) RETURNS integer
LANGUAGE sql STABLE
RETURN CASE
    WHEN topic = ANY ({topics}) THEN ({places})[array_position({topics}, topic)]
    WHEN topic = ANY ({split}) THEN CASE
        -- Upper case of A to Z counts as lower case.
        WHEN device_id <> '' THEN ({owners})[1 + tokenkeeper.bucket(
            topic || chr(10) || translate(device_id, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', 'abcdefghijklmnopqrstuvwxyz'))]
        ELSE tokenkeeper.raise_split(topic) END
    -- Without a topic, any database raises the right error.
    ELSE coalesce(({owners})[1 + tokenkeeper.bucket(topic)], 0) END;
COMMENT ON FUNCTION tokenkeeper.place(text, text) IS
    'The number of the database of a topic, or of a device of a topic that is split by device. Raises 22023 for such a topic without a device.';

CREATE FUNCTION tokenkeeper.is_split(topic text) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN topic = ANY ({split});
COMMENT ON FUNCTION tokenkeeper.is_split(text) IS 'Whether the devices of a topic are spread over the databases.';

-- Applications ---------------------------------------------------------------------------------------------------------

CREATE TYPE tokenkeeper.new_registration AS (
    token text, topic text, environment text, registered_at timestamptz, device_id text, tags text[], user_id text, unregistered boolean
);
COMMENT ON TYPE tokenkeeper.new_registration IS 'As in the databases.';

CREATE FUNCTION tokenkeeper.register(
    token text, topic text, environment text DEFAULT 'production', registered_at timestamptz DEFAULT clock_timestamp(), device_id text DEFAULT NULL,
    tags text[] DEFAULT NULL, user_id text DEFAULT NULL) RETURNS boolean
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, device_id); $$;
COMMENT ON FUNCTION tokenkeeper.register(text, text, text, timestamptz, text, text[], text) IS 'As in the databases.';

CREATE FUNCTION tokenkeeper.register_in(registrations tokenkeeper.new_registration[], place integer) RETURNS SETOF boolean[]
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON place; SELECT tokenkeeper.register(registrations); $$;
COMMENT ON FUNCTION tokenkeeper.register_in(tokenkeeper.new_registration[], integer) IS 'Internal: register in one database.';

CREATE FUNCTION tokenkeeper.register(registrations tokenkeeper.new_registration[]) RETURNS boolean[]
LANGUAGE sql
AS $$
    SELECT array_agg(s.sendable ORDER BY s.number)
    FROM (SELECT array_agg(r.one) AS registrations, array_agg(r.number) AS numbers, r.place
          FROM (SELECT ROW(e.token, e.topic, e.environment, e.registered_at, e.device_id, e.tags, e.user_id, e.unregistered)::tokenkeeper.new_registration AS one,
                       e.number, tokenkeeper.place(e.topic, e.device_id) AS place
                FROM unnest(registrations) WITH ORDINALITY AS e (token, topic, environment, registered_at, device_id, tags, user_id, unregistered, number)
                ORDER BY e.number) AS r
          GROUP BY r.place) AS g
    CROSS JOIN LATERAL tokenkeeper.register_in(g.registrations, g.place) AS d (results)
    CROSS JOIN LATERAL unnest(g.numbers, d.results) AS s (number, sendable)
$$;
COMMENT ON FUNCTION tokenkeeper.register(tokenkeeper.new_registration[]) IS
    'As in the databases, with one call for each of them, of up to 1000 elements. An error of one database undoes nothing in the others, and its position is '
    'that among the elements of this database.';

CREATE FUNCTION tokenkeeper.unregister_one(token text, topic text, environment text, at timestamptz, user_id text, device_id text) RETURNS bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, device_id);
    SELECT tokenkeeper.unregister(token, topic, environment, at, user_id);
$$;
COMMENT ON FUNCTION tokenkeeper.unregister_one(text, text, text, timestamptz, text, text) IS 'Internal: unregister in one database.';

CREATE FUNCTION tokenkeeper.unregister_all(topic text, environment text, at timestamptz, user_id text) RETURNS SETOF bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON ALL;
    SELECT tokenkeeper.unregister(NULL::text, topic, environment, at, user_id);
$$;
COMMENT ON FUNCTION tokenkeeper.unregister_all(text, text, timestamptz, text) IS 'Internal: unregister a user in all databases.';

CREATE FUNCTION tokenkeeper.unregister(
    token text DEFAULT NULL, topic text DEFAULT NULL, environment text DEFAULT 'production', at timestamptz DEFAULT clock_timestamp(),
    user_id text DEFAULT NULL, device_id text DEFAULT NULL) RETURNS bigint
LANGUAGE sql
RETURN CASE WHEN token IS NULL AND (topic IS NULL OR tokenkeeper.is_split(topic))
            THEN (SELECT sum(a)::bigint FROM tokenkeeper.unregister_all(topic, environment, at, user_id) AS a)
            ELSE tokenkeeper.unregister_one(token, topic, environment, at, user_id, device_id) END;
COMMENT ON FUNCTION tokenkeeper.unregister(text, text, text, timestamptz, text, text) IS
    'As in the databases; for a token of a split topic, with its device. A user without a topic, or of a split one, is logged out in all databases.';

CREATE FUNCTION tokenkeeper.tag_one(topic text, environment text, token text, device_id text, user_id text, add text[], remove text[], key text) RETURNS bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, key);
    SELECT tokenkeeper.tag(topic, environment, token, device_id, user_id, add, remove);
$$;
COMMENT ON FUNCTION tokenkeeper.tag_one(text, text, text, text, text, text[], text[], text) IS 'Internal: tag in the database of a topic, or of the device key.';

CREATE FUNCTION tokenkeeper.tag_all(topic text, environment text, user_id text, add text[], remove text[]) RETURNS SETOF bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON ALL;
    SELECT tokenkeeper.tag(topic, environment, NULL, NULL, user_id, add, remove);
$$;
COMMENT ON FUNCTION tokenkeeper.tag_all(text, text, text, text[], text[]) IS 'Internal: tag a user in all databases.';

CREATE FUNCTION tokenkeeper.tag(
    topic text, environment text DEFAULT 'production', token text DEFAULT NULL, device_id text DEFAULT NULL, user_id text DEFAULT NULL,
    add text[] DEFAULT NULL, remove text[] DEFAULT NULL) RETURNS bigint
LANGUAGE sql
RETURN CASE WHEN user_id IS NOT NULL AND tokenkeeper.is_split(topic)
            THEN (SELECT sum(a)::bigint FROM tokenkeeper.tag_all(topic, environment, user_id, add, remove) AS a)
            -- A token of a split topic comes with its device, which is not what is tagged.
            ELSE tokenkeeper.tag_one(topic, environment, token, CASE WHEN token IS NULL THEN device_id END, user_id, add, remove, device_id) END;
COMMENT ON FUNCTION tokenkeeper.tag(text, text, text, text, text, text[], text[]) IS
    'As in the databases; for a token of a split topic, also with its device. A user of a split topic is tagged in all databases.';

-- Senders ------------------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production', device_id text DEFAULT NULL) RETURNS boolean
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, device_id);
    SELECT tokenkeeper.is_sendable(token, topic, environment);
$$;
COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text, text) IS
    'As in the databases; with the device if the topic is split. Raises 22023 without it, and an error if the database does not respond.';

CREATE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic); $$;
COMMENT ON FUNCTION tokenkeeper.sendable(text[], text, text) IS 'As in the databases. Raises 22023 for a topic that is split.';

CREATE FUNCTION tokenkeeper.sendable(tokens text[], devices text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; SPLIT tokens, devices; RUN ON tokenkeeper.place(topic, devices);
    SELECT tokenkeeper.sendable(tokens, topic, environment);
$$;
COMMENT ON FUNCTION tokenkeeper.sendable(text[], text[], text, text) IS
    'As sendable, for a split topic: with the device of each token. The order is that of the tokens within each database.';

CREATE TYPE tokenkeeper.new_result AS (
    topic text, token text, status text, body text, sent_at timestamptz, apns_id text, environment text, device_id text
);
COMMENT ON TYPE tokenkeeper.new_result IS 'As in the databases.';

CREATE FUNCTION tokenkeeper.report_in(
    topics text[], tokens text[], statuses text[], bodies text[], sent text[], apns_ids text[], environments text[], place integer) RETURNS SETOF bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON place;
    -- Arrays of text cost half of what an array of rows does on its way.
    SELECT tokenkeeper.report(ARRAY(
        SELECT ROW(r.a, r.b, r.c, r.d, r.e::timestamptz, r.f, r.g, NULL)::tokenkeeper.new_result
        FROM unnest(topics, tokens, statuses, bodies, sent, apns_ids, environments) AS r (a, b, c, d, e, f, g)));
$$;
COMMENT ON FUNCTION tokenkeeper.report_in(text[], text[], text[], text[], text[], text[], text[], integer) IS 'Internal: report in one database.';

CREATE FUNCTION tokenkeeper.report(results tokenkeeper.new_result[]) RETURNS bigint
LANGUAGE sql
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$
    SELECT coalesce(sum(d), 0)::bigint
    FROM (SELECT array_agg(r.topic) AS topics, array_agg(r.token) AS tokens, array_agg(r.status) AS statuses, array_agg(r.body) AS bodies,
                 array_agg(r.sent_at::text) AS sent, array_agg(r.apns_id) AS apns_ids, array_agg(r.environment) AS environments, r.place
          FROM (SELECT e.*, tokenkeeper.place(e.topic, e.device_id) AS place FROM unnest(results) AS e) AS r GROUP BY r.place) AS g
    CROSS JOIN LATERAL tokenkeeper.report_in(g.topics, g.tokens, g.statuses, g.bodies, g.sent, g.apns_ids, g.environments, g.place) AS d
$$;
COMMENT ON FUNCTION tokenkeeper.report(tokenkeeper.new_result[]) IS 'As in the databases, with one call for each of them; with device_id for a split topic.';

CREATE FUNCTION tokenkeeper.report_one(
    topic text, token text, status text, reason text, apns_timestamp text, sent_at timestamptz, apns_id text, environment text, body text, device_id text)
RETURNS void
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, device_id);
    SELECT tokenkeeper.report(topic, token, status, reason, apns_timestamp, sent_at, apns_id, environment, body);
$$;
COMMENT ON FUNCTION tokenkeeper.report_one(text, text, text, text, text, timestamptz, text, text, text, text) IS 'Internal: report in one database.';

CREATE FUNCTION tokenkeeper.report(
    topic text, token text, status text, reason text DEFAULT NULL, apns_timestamp anycompatible DEFAULT NULL::text, sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL, environment text DEFAULT 'production', body text DEFAULT NULL, device_id text DEFAULT NULL) RETURNS void
LANGUAGE sql
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$ SELECT tokenkeeper.report_one(topic, token, status, reason, apns_timestamp::text, sent_at, apns_id, environment, body, device_id) $$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, text, text, anycompatible, timestamptz, text, text, text, text) IS
    'As in the databases; with the device if the topic is split.';

CREATE FUNCTION tokenkeeper.report(
    topic text, token text, status double precision, reason text DEFAULT NULL, apns_timestamp anycompatible DEFAULT NULL::text, sent_at timestamptz DEFAULT NULL,
    apns_id text DEFAULT NULL, environment text DEFAULT 'production', body text DEFAULT NULL, device_id text DEFAULT NULL) RETURNS void
LANGUAGE sql
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $$ SELECT tokenkeeper.report_one(topic, token, status::text, reason, apns_timestamp::text, sent_at, apns_id, environment, body, device_id) $$;
COMMENT ON FUNCTION tokenkeeper.report(text, text, double precision, text, anycompatible, timestamptz, text, text, text, text) IS
    'As report with texts, with a number as status.';

CREATE FUNCTION tokenkeeper.enqueue_one(
    payload json, topic text, environment text, tags text, push_type text, priority integer, expiration timestamptz, collapse_id text, scheduled_at timestamptz,
    device_id text, user_id text, tokens text[], everyone boolean, name text, idempotency_key text, max_per_second integer, confirm boolean, caller text, key text)
RETURNS bigint
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON tokenkeeper.place(topic, key);
    SELECT tokenkeeper.enqueue(payload, CASE WHEN tokenkeeper.act_for(caller) THEN topic END, environment, tags, push_type, priority, expiration, collapse_id,
                               scheduled_at, device_id, user_id, tokens, everyone, name, idempotency_key, max_per_second, confirm);
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue_one(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer,
    boolean, text, text) IS 'Internal: enqueue in one database, for a login of the router.';

CREATE FUNCTION tokenkeeper.enqueue_in_all(
    payload json, topic text, environment text, tags text, push_type text, priority integer, expiration timestamptz, collapse_id text, scheduled_at timestamptz,
    user_id text, everyone boolean, name text, idempotency_key text, max_per_second integer, confirm boolean, caller text)
RETURNS TABLE (database text, campaign_id bigint)
LANGUAGE plproxy
AS $$
    CLUSTER 'tokenkeeper'; RUN ON ALL;
    SELECT current_setting('tokenkeeper.database') AS database, tokenkeeper.enqueue(
        payload, CASE WHEN tokenkeeper.act_for(caller) THEN topic END, environment, tags, push_type, priority, expiration, collapse_id, scheduled_at, NULL,
        user_id, NULL, everyone, name, idempotency_key, max_per_second, confirm) AS campaign_id;
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue_in_all(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, boolean, text, text, integer, boolean,
    text) IS 'Internal: enqueue in all databases, for a login of the router.';

CREATE FUNCTION tokenkeeper.enqueue(
    payload json, topic text, environment text DEFAULT 'production', tags text DEFAULT NULL, push_type text DEFAULT NULL, priority integer DEFAULT NULL,
    expiration timestamptz DEFAULT NULL, collapse_id text DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL, device_id text DEFAULT NULL,
    user_id text DEFAULT NULL, tokens text[] DEFAULT NULL, everyone boolean DEFAULT false, name text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    max_per_second integer DEFAULT NULL, confirm boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF tokenkeeper.is_split(topic) AND device_id IS NULL THEN
        RAISE EXCEPTION '% is split by device, and this audience is in all databases', topic USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Call enqueue_everywhere, with an idempotency_key.';
    END IF;
    RETURN tokenkeeper.enqueue_one(payload, topic, environment, tags, push_type, priority, expiration, collapse_id, scheduled_at, device_id, user_id, tokens,
                                   everyone, name, idempotency_key, max_per_second, confirm, session_user, device_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer,
    boolean) IS
    'As in the databases. The campaign and its key belong to the login of the router. Raises 22023 for an audience of a split topic other than a device: see '
    'enqueue_everywhere.';

CREATE FUNCTION tokenkeeper.enqueue_everywhere(
    payload json, topic text, idempotency_key text, environment text DEFAULT 'production', tags text DEFAULT NULL, push_type text DEFAULT NULL,
    priority integer DEFAULT NULL, expiration timestamptz DEFAULT NULL, collapse_id text DEFAULT NULL, scheduled_at timestamptz DEFAULT NULL,
    user_id text DEFAULT NULL, everyone boolean DEFAULT false, name text DEFAULT NULL, max_per_second integer DEFAULT NULL, confirm boolean DEFAULT false)
RETURNS TABLE (database text, campaign_id bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF idempotency_key IS NULL THEN
        RAISE EXCEPTION 'idempotency_key is missing: if a database fails, the same call completes the campaign'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN QUERY SELECT * FROM tokenkeeper.enqueue_in_all(payload, topic, environment, tags, push_type, priority, expiration, collapse_id, scheduled_at, user_id,
                                                          everyone, name, idempotency_key, max_per_second, confirm, session_user);
END
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue_everywhere(json, text, text, text, text, text, integer, timestamptz, text, timestamptz, text, boolean, text, integer,
    boolean) IS
    'A campaign of a split topic: one in each database, with one idempotency_key. If one fails, repeat the call: the others have theirs already. '
    'max_per_second counts in each.';

-- A person -------------------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.forget(token text) RETURNS TABLE (database text, tokens bigint)
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON ALL; SELECT current_setting('tokenkeeper.database') AS database, tokenkeeper.forget(token) AS tokens; $$;
COMMENT ON FUNCTION tokenkeeper.forget(text) IS 'As in the databases, in all of them.';

CREATE FUNCTION tokenkeeper.forget_device(device_id text) RETURNS TABLE (database text, tokens bigint)
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON ALL; SELECT current_setting('tokenkeeper.database') AS database, tokenkeeper.forget_device(device_id) AS tokens; $$;
COMMENT ON FUNCTION tokenkeeper.forget_device(text) IS 'As in the databases, in all of them.';

CREATE FUNCTION tokenkeeper.forget_user(user_id text) RETURNS TABLE (database text, tokens bigint)
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON ALL; SELECT current_setting('tokenkeeper.database') AS database, tokenkeeper.forget_user(user_id) AS tokens; $$;
COMMENT ON FUNCTION tokenkeeper.forget_user(text) IS 'As in the databases, in all of them.';

-- For people ------------------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.all_status() RETURNS TABLE (database text, status jsonb)
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON ALL; SELECT current_setting('tokenkeeper.database') AS database, to_jsonb(s) AS status FROM tokenkeeper.status AS s; $$;
COMMENT ON FUNCTION tokenkeeper.all_status() IS
    'The view status of each database. Raises an error if one does not respond; tokenkeeperd --all status then says which.';

CREATE FUNCTION tokenkeeper.all_campaigns(caller text) RETURNS TABLE (database text, campaign jsonb)
LANGUAGE plproxy
AS $$ CLUSTER 'tokenkeeper'; RUN ON ALL; SELECT current_setting('tokenkeeper.database') AS database, to_jsonb(c) AS campaign FROM tokenkeeper.campaigns_of(caller) AS c; $$;
COMMENT ON FUNCTION tokenkeeper.all_campaigns(text) IS 'Internal: the view campaign_progress of each database, as this login of the router sees it.';

CREATE FUNCTION tokenkeeper.campaigns() RETURNS TABLE (database text, campaign jsonb)
LANGUAGE sql
AS $$ SELECT c.database, c.campaign FROM tokenkeeper.all_campaigns(session_user) AS c $$;
COMMENT ON FUNCTION tokenkeeper.campaigns() IS 'The view campaign_progress of each database: to a sender, its own campaigns.';

-- Each function runs with the rights of a role of its group, for which the server has a login in the databases. Those that only look at the map touch nothing.
DO $$
DECLARE
    one record;
    owner text;
BEGIN
    FOR one IN
        SELECT p.oid::regprocedure AS function, p.proname FROM pg_proc AS p
        WHERE p.pronamespace = 'tokenkeeper'::regnamespace AND p.proname NOT IN ('place', 'bucket', 'raise_split', 'is_split')
    LOOP
        owner := CASE WHEN one.proname ~ '^(register|unregister|tag|forget)' THEN 'app' WHEN one.proname = 'all_status' THEN 'reader' ELSE 'sender' END;
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp', one.function);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', one.function);
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', one.function, 'tokenkeeper_router_' || owner);
        -- What the owner calls in its own functions, it may call. Nobody else calls what is internal.
        IF one.proname !~ '(_in|_one|_all|^all_campaigns)$' THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', one.function, 'tokenkeeper_' || owner);
        END IF;
    END LOOP;
END
$$;
GRANT USAGE ON SCHEMA tokenkeeper TO PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper.place(text, text), tokenkeeper.bucket(text), tokenkeeper.raise_split(text), tokenkeeper.is_split(text) TO PUBLIC;
