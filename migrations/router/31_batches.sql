-- Calls with many tokens, which are split over the shards and run on all of them at once; and tag, whose arguments say where it runs.
--
-- The functions in the schema tokenkeeper_shard are the parts that PL/Proxy runs. Callers use those in the schema tokenkeeper.

CREATE OR REPLACE FUNCTION tokenkeeper_shard.database(shard integer) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.option_value FROM pg_catalog.pg_foreign_server AS s, pg_catalog.pg_options_to_table(s.srvoptions) AS o
    WHERE s.srvname = 'tokenkeeper_shard_' || shard AND o.option_name IN ('dbname', 'service') ORDER BY o.option_name LIMIT 1;
$$;
COMMENT ON FUNCTION tokenkeeper_shard.database(integer) IS 'The name of the database of the shard with this number, or of its service; null if there is no such shard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.database(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tokenkeeper_shard.database(integer)
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.sendable(shards integer[], tokens text[], topic text, environment text) RETURNS SETOF text
LANGUAGE plproxy AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards, tokens;
    RUN ON shards;
    SELECT s FROM tokenkeeper.sendable(tokens, topic, environment) AS s;
$$;
COMMENT ON FUNCTION tokenkeeper_shard.sendable(integer[], text[], text, text) IS
    'The gate, on the shards of these tokens, in any order. Raises XX000 and names the database if one is down.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.sendable(integer[], text[], text, text) FROM PUBLIC;

-- The gate of a shard has no fourth argument: there, every token has an answer.
DROP FUNCTION IF EXISTS tokenkeeper.sendable(text[], text, text);
CREATE OR REPLACE FUNCTION tokenkeeper.sendable(
    tokens text[],
    topic text,
    environment text DEFAULT 'production',
    unanswered text DEFAULT 'error') RETURNS SETOF text
LANGUAGE plpgsql ROWS 1000
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Of one dimension, in the order of unnest.
    asked text[] COLLATE "C" := ARRAY(SELECT u FROM unnest(sendable.tokens) AS u);
    shards integer[] := ARRAY(SELECT tokenkeeper.shard_of(u, tokenkeeper.shard_count()) FROM unnest(asked) AS u);
    passed text[] COLLATE "C";
    part record;
BEGIN
    IF sendable.unanswered IS NULL OR sendable.unanswered NOT IN ('error', 'withhold') THEN
        RAISE EXCEPTION 'unanswered is %, expected error or withhold', coalesce(quote_literal(sendable.unanswered), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
        passed := ARRAY(SELECT s FROM tokenkeeper_shard.sendable(shards, asked, sendable.topic, sendable.environment) AS s);
    EXCEPTION WHEN internal_error OR connection_exception OR admin_shutdown OR crash_shutdown OR cannot_connect_now OR too_many_connections THEN
        IF sendable.unanswered = 'error' THEN RAISE; END IF;
        -- One shard after the other, so that those which answer do.
        passed := '{}';
        FOR part IN
            SELECT a.shard, array_agg(a.token) AS tokens FROM unnest(shards, asked) AS a (shard, token) GROUP BY a.shard ORDER BY a.shard
        LOOP
            BEGIN
                passed := passed || ARRAY(
                    SELECT s FROM tokenkeeper_shard.sendable(
                        array_fill(part.shard, ARRAY[cardinality(part.tokens)]), part.tokens, sendable.topic, sendable.environment) AS s);
            EXCEPTION WHEN internal_error OR connection_exception OR admin_shutdown OR crash_shutdown OR cannot_connect_now OR too_many_connections THEN
                RAISE WARNING 'shard % (database %) does not answer: % of % tokens are withheld',
                    part.shard, tokenkeeper_shard.database(part.shard), cardinality(part.tokens), cardinality(asked) USING DETAIL = sqlerrm;
            END;
        END LOOP;
    END;
    -- A token that is asked for twice has one answer, so the texts alone restore the order.
    RETURN QUERY SELECT a.token FROM unnest(asked) WITH ORDINALITY AS a (token, position)
        WHERE a.token IN (SELECT p.token COLLATE "C" FROM unnest(passed) AS p (token)) ORDER BY a.position;
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.sendable(text[], text, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.register_many(
    shards integer[], parts jsonb[], topic text, environment text, base64 boolean) RETURNS TABLE (place integer, fault text)
LANGUAGE plproxy AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards, parts;
    RUN ON shards;
    -- In parentheses, because PL/Proxy writes a cast after each argument.
    SELECT ((parts)[1] -> 'places' ->> (r."position" - 1))::integer AS place, r.error AS fault
    FROM tokenkeeper.register_many((parts)[1] -> 'entries', topic, environment, base64) AS r;
$$;
COMMENT ON FUNCTION tokenkeeper_shard.register_many(integer[], jsonb[], text, text, boolean) IS
    'register_many on these shards, with a part for each: its entries, and their places in the caller''s array. Returns the places of the refused ones.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.register_many(integer[], jsonb[], text, text, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.register_many(
    registrations jsonb,
    topic text DEFAULT NULL,
    environment text DEFAULT 'production',
    base64 boolean DEFAULT false) RETURNS TABLE ("position" integer, error text)
LANGUAGE plpgsql ROWS 10
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entries CONSTANT integer := CASE WHEN jsonb_typeof(registrations) = 'array' THEN jsonb_array_length(registrations) END;
    shards integer[];
    parts jsonb[];
BEGIN
    IF entries IS NULL OR entries > 1000 THEN
        RAISE EXCEPTION 'registrations is %, expected an array of at most 1000 objects', CASE
            WHEN registrations IS NULL THEN 'null'
            WHEN entries IS NULL THEN 'of type ' || jsonb_typeof(registrations)
            ELSE 'an array of ' || entries END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table tokenkeeper.registration takes any number of rows.';
    END IF;
    SELECT array_agg(p.shard ORDER BY p.shard), array_agg(p.part ORDER BY p.shard) INTO shards, parts
    FROM (
        SELECT o.shard, jsonb_build_object('entries', jsonb_agg(o.entry ORDER BY o.place), 'places', jsonb_agg(o.place ORDER BY o.place)) AS part
        FROM (
            SELECT e.entry, e.place,
                   -- What is no token is refused by shard 0.
                   tokenkeeper.shard_of(tokenkeeper.parse_token(e.entry ->> 'token', coalesce(register_many.base64, false)),
                                        tokenkeeper.shard_count()) AS shard
            FROM jsonb_array_elements(registrations) WITH ORDINALITY AS e (entry, place)) AS o
        GROUP BY o.shard) AS p;
    RETURN QUERY
        SELECT r.place, r.fault
        FROM tokenkeeper_shard.register_many(shards, parts, register_many.topic, register_many.environment, register_many.base64) AS r
        ORDER BY r.place;
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.register_many(jsonb, text, text, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper_shard.tag(
    shards integer[], topic text, environment text, token text, device_id text, user_id text, add text[], remove text[],
    changed_at timestamptz) RETURNS SETOF bigint
LANGUAGE plproxy
SET datestyle = 'ISO'
AS $$
    CLUSTER 'tokenkeeper_shards';
    SPLIT shards;
    RUN ON shards;
    SELECT tokenkeeper.tag(topic, environment, token, device_id, user_id, add, remove, changed_at);
$$;
COMMENT ON FUNCTION tokenkeeper_shard.tag(integer[], text, text, text, text, text, text[], text[], timestamptz) IS
    'tag on these shards: what each returns.';
REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.tag(integer[], text, text, text, text, text, text[], text[], timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.tag(
    topic text,
    environment text DEFAULT 'production',
    token text DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    add text[] DEFAULT NULL,
    remove text[] DEFAULT NULL,
    changed_at timestamptz DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT sum(t.tokens)::bigint
        FROM tokenkeeper_shard.tag(
            -- A token is on one shard. A device and a user have tokens on any. If it is not clear which is meant, one shard says so.
            CASE WHEN num_nonnulls(tag.device_id, tag.user_id) = 1 AND tag.token IS NULL
                 THEN ARRAY(SELECT generate_series(0, tokenkeeper.shard_count() - 1))
                 ELSE ARRAY[tokenkeeper.shard_of(tag.token, tokenkeeper.shard_count())] END,
            tag.topic, tag.environment, tag.token, tag.device_id, tag.user_id, tag.add, tag.remove,
            -- One instant on all shards.
            CASE WHEN tag.token IS NULL THEN coalesce(tag.changed_at, clock_timestamp()) ELSE tag.changed_at END) AS t (tokens));
END
$$;
REVOKE EXECUTE ON FUNCTION tokenkeeper.tag(text, text, text, text, text, text[], text[], timestamptz) FROM PUBLIC;

-- Comments and grants are those of shard 0.
DO $$
DECLARE
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    f record;
BEGIN
    FOR f IN
        SELECT x.name, x.types || p.more AS types, x.comment, p.difference, x.callers, p.types AS types_of_part
        FROM (VALUES ('sendable', 'integer[], text[], text, text', ', text',
                      'XX000 is raised if a shard is down. With unanswered => withhold, its tokens are left out instead, and a warning names the shard, its '
                      'database and how many of the tokens it has.'),
                     ('register_many', 'integer[], jsonb[], text, text, boolean', '', 'each shard commits at once, and XX000 is raised if one is down.'),
                     ('tag', 'integer[], text, text, text, text, text, text[], text[], timestamp with time zone', '',
                      'each shard commits at once, and XX000 is raised if one is down.')) AS p (name, types, more, difference)
        CROSS JOIN LATERAL (
            SELECT c.* FROM jsonb_to_recordset(functions) AS c (name text, types text, comment text, callers text[]) WHERE c.name = p.name) AS x
    LOOP
        EXECUTE format('COMMENT ON FUNCTION tokenkeeper.%I(%s) IS %L', f.name, f.types,
                       replace(f.comment, ' Never raises an error. Works on a standby.', '') || ' Through the router: ' || f.difference);
        EXECUTE format('GRANT EXECUTE ON FUNCTION tokenkeeper.%1$I(%2$s), tokenkeeper_shard.%1$I(%3$s) TO %4$s', f.name, f.types, f.types_of_part,
                       (SELECT string_agg(quote_ident(c), ', ') FROM unnest(f.callers) AS c WHERE starts_with(c, 'tokenkeeper_')));
    END LOOP;
END
$$;
