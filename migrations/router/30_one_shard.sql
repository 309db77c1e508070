-- Functions that run on the shard of their token.
--
-- Names, arguments, result, comment and grants come from shard 0. Only defaults differ that call clock_timestamp(): here they are null, for which the
-- shard takes its own clock. So the instants of a token are those of one clock, whichever router it is called through.
--
-- PL/Proxy passes an instant as text. DateStyle is set, because with another one the shard may read 3 April instead of 4 March, or another time zone.
--
-- PL/Proxy commits on the shard at once: what a caller registers stays, even if its own transaction is rolled back.

DO $$
DECLARE
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    wanted text;
    f record;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['register', 'unregister', 'report', 'is_sendable'] LOOP
        IF NOT EXISTS (SELECT FROM jsonb_to_recordset(functions) AS x (name text) WHERE x.name = wanted) THEN
            RAISE EXCEPTION 'shard 0 has no function tokenkeeper.%: migrate the shards with this release first', wanted
                USING ERRCODE = 'undefined_function';
        END IF;
        FOR f IN
            SELECT x.* FROM jsonb_to_recordset(functions) AS x (name text, types text, arguments text, result text, comment text, callers text[])
            WHERE x.name = wanted
        LOOP
            EXECUTE format($create$
                CREATE OR REPLACE FUNCTION tokenkeeper.%I(%s) RETURNS %s LANGUAGE plproxy %s AS $body$
                    CLUSTER 'tokenkeeper_shards';
                    RUN ON tokenkeeper.shard_of(token, 1024);
                $body$ $create$,
                f.name, replace(f.arguments, 'DEFAULT clock_timestamp()', 'DEFAULT NULL::timestamp with time zone'), f.result,
                CASE WHEN f.types LIKE '%timestamp%' THEN 'SET datestyle = ''ISO''' ELSE '' END);
            EXECUTE format('COMMENT ON FUNCTION tokenkeeper.%I(%s) IS %L', f.name, f.types,
                           CASE f.name
                               WHEN 'is_sendable' THEN replace(f.comment, 'Never raises an error.', 'Through the router: raises XX000 if the shard of the token is down.')
                               ELSE f.comment || ' Through the router: the shard commits at once, and XX000 is raised if it is down.' END);
            EXECUTE format('REVOKE EXECUTE ON FUNCTION tokenkeeper.%I(%s) FROM PUBLIC', f.name, f.types);
            EXECUTE format('GRANT EXECUTE ON FUNCTION tokenkeeper.%I(%s) TO %s', f.name, f.types,
                           (SELECT string_agg(quote_ident(c), ', ') FROM unnest(f.callers) AS c WHERE starts_with(c, 'tokenkeeper_')));
        END LOOP;
    END LOOP;
END
$$;
