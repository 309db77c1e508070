-- The frame of a router: a database without state of its own, whose schema tokenkeeper has the names of a shard's, and leads to all shards.
--
-- `tokenkeeperd router migrate` applies these files in one transaction, as often as it is run. Two settings tell them what to make:
--   tokenkeeper.shard_map       an array with an object per shard: conninfo, and the same as options
--   tokenkeeper.shard_catalog   the functions and relations of shard 0, with their comments and grants
-- Functions on the router run with their callers' rights. A caller's name on the router is its name on the shards, and the shards decide what
-- it may do.

DO $$
BEGIN
    IF to_regclass('tokenkeeper.migration') IS NOT NULL THEN
        RAISE EXCEPTION 'the database % has a ledger of its own: a router needs another database', current_database()
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
END
$$;

CREATE SCHEMA IF NOT EXISTS tokenkeeper;
COMMENT ON SCHEMA tokenkeeper IS 'A router of tokenkeeperd: the same names as on each shard, and no data. See the view router.';
CREATE SCHEMA IF NOT EXISTS tokenkeeper_shard;
COMMENT ON SCHEMA tokenkeeper_shard IS 'Functions that run on the shards that their arguments name, and the status of each shard.';
-- Not in public, which may be missing.
CREATE EXTENSION IF NOT EXISTS plproxy SCHEMA tokenkeeper_shard;
CREATE EXTENSION IF NOT EXISTS postgres_fdw SCHEMA tokenkeeper_shard;

DO $$
DECLARE
    map CONSTANT jsonb := current_setting('tokenkeeper.shard_map')::jsonb;
    shards CONSTANT integer := jsonb_array_length(map);
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    before integer;
    wanted text;
    f record;
    server text;
    options jsonb;
    old text[];
BEGIN
    FOREACH wanted IN ARRAY ARRAY['tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader',
                                  'tokenkeeper_monitor', 'tokenkeeper_operator', 'tokenkeeper_daemon']
    LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
        END IF;
    END LOOP;
    GRANT USAGE ON SCHEMA tokenkeeper, tokenkeeper_shard
        TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;

    IF to_regprocedure('tokenkeeper.shard_count()') IS NOT NULL THEN
        EXECUTE 'SELECT tokenkeeper.shard_count()' INTO before;
        IF before <> shards THEN
            RAISE EXCEPTION 'this router has % shards and the map has %: their number is fixed forever', before, shards
                USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
    END IF;
    -- postgres_fdw has a server per shard.
    FOR n IN 0..shards - 1 LOOP
        server := format('tokenkeeper_shard_%s', n);
        options := map -> n -> 'options';
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_foreign_server WHERE srvname = server) THEN
            EXECUTE format('CREATE SERVER %I FOREIGN DATA WRAPPER postgres_fdw OPTIONS (%s)', server,
                           (SELECT string_agg(format('%I %L', o.key, o.value), ', ') FROM jsonb_each_text(options) AS o));
        ELSE
            old := ARRAY(SELECT o.option_name FROM pg_catalog.pg_foreign_server AS s, pg_catalog.pg_options_to_table(s.srvoptions) AS o
                         WHERE s.srvname = server);
            EXECUTE format('ALTER SERVER %I OPTIONS (%s)', server, concat_ws(', ',
                (SELECT string_agg(format('%s %I %L', CASE WHEN o.key = ANY (old) THEN 'SET' ELSE 'ADD' END, o.key, o.value), ', ')
                 FROM jsonb_each_text(options) AS o),
                (SELECT string_agg(format('DROP %I', o), ', ') FROM unnest(old) AS o WHERE NOT options ? o)));
        END IF;
    END LOOP;
    -- PL/Proxy asks functions of these names for the shards. A server would need USAGE for every caller, and with USAGE a caller can make a user
    -- mapping of its own, and come to the shards under any name.
    CREATE SCHEMA IF NOT EXISTS plproxy;
    COMMENT ON SCHEMA plproxy IS 'The shards of tokenkeeperd, as PL/Proxy asks for them.';
    GRANT USAGE ON SCHEMA plproxy
        TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;
    -- Sessions read the map again when the version differs.
    EXECUTE format('CREATE OR REPLACE FUNCTION plproxy.get_cluster_version(cluster_name text) RETURNS integer LANGUAGE sql IMMUTABLE RETURN %s',
                   ('x' || encode(substr(sha256(convert_to(map::text, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint & 2147483647);
    EXECUTE format('CREATE OR REPLACE FUNCTION plproxy.get_cluster_partitions(cluster_name text) RETURNS SETOF text LANGUAGE sql IMMUTABLE AS %L',
                   format('SELECT s.conninfo FROM unnest(%L::text[]) WITH ORDINALITY AS s (conninfo, number) ORDER BY s.number',
                          ARRAY(SELECT o.entry ->> 'conninfo' FROM jsonb_array_elements(map) WITH ORDINALITY AS o (entry, place) ORDER BY o.place)));
    -- Each role connects under its own name.
    CREATE OR REPLACE FUNCTION plproxy.get_cluster_config(cluster_name text, OUT key text, OUT val text) RETURNS SETOF record
    LANGUAGE sql IMMUTABLE AS 'VALUES (''default_user'', ''current_user'')';
    COMMENT ON FUNCTION plproxy.get_cluster_version(text) IS 'A digest of the shard map.';
    COMMENT ON FUNCTION plproxy.get_cluster_partitions(text) IS 'A connection string per shard, in the order of their numbers.';
    COMMENT ON FUNCTION plproxy.get_cluster_config(text) IS 'Each caller connects to the shards under its own name.';
    REVOKE EXECUTE ON FUNCTION plproxy.get_cluster_version(text), plproxy.get_cluster_partitions(text), plproxy.get_cluster_config(text) FROM PUBLIC;
    GRANT EXECUTE ON FUNCTION plproxy.get_cluster_version(text), plproxy.get_cluster_partitions(text), plproxy.get_cluster_config(text)
        TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;

    EXECUTE format('CREATE OR REPLACE FUNCTION tokenkeeper.shard_count() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', shards);
    COMMENT ON FUNCTION tokenkeeper.shard_count() IS 'How many shards there are. Fixed forever.';
    REVOKE EXECUTE ON FUNCTION tokenkeeper.shard_count() FROM PUBLIC;
    GRANT EXECUTE ON FUNCTION tokenkeeper.shard_count()
        TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;

    -- Functions that read no table are the same here. In this order: each needs those before it.
    FOREACH wanted IN ARRAY ARRAY['token_key', 'shard_of', 'parse_decorated_token', 'parse_token', 'token_fault', 'tag_query', 'tag_vector', 'cause_of',
                                  'has_one_token_per_device', 'reinstate_command', 'share_fault'] LOOP
        SELECT x.* INTO f
        FROM jsonb_to_recordset(functions) AS x (name text, types text, definition text, comment text, callers text[]) WHERE x.name = wanted;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'shard 0 has no function tokenkeeper.%: migrate the shards with this release first', wanted
                USING ERRCODE = 'undefined_function';
        END IF;
        EXECUTE f.definition;
        EXECUTE format('COMMENT ON FUNCTION tokenkeeper.%I(%s) IS %L', f.name, f.types, f.comment);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION tokenkeeper.%I(%s) FROM PUBLIC', f.name, f.types);
        EXECUTE format('GRANT EXECUTE ON FUNCTION tokenkeeper.%I(%s) TO %s', f.name, f.types,
                       (SELECT string_agg(quote_ident(c), ', ') FROM unnest(f.callers) AS c WHERE starts_with(c, 'tokenkeeper_')));
    END LOOP;
END
$$;
