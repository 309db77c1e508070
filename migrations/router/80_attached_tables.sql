-- The functions of attached tables, which a router does not have: each says so, and where it works.
--
-- Names, arguments, result and grants come from shard 0.

DO $$
DECLARE
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    wanted text;
    f record;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['attach', 'detach', 'compare', 'reconcile', 'set_cleaning', 'restore_cleaned'] LOOP
        SELECT x.* INTO f
        FROM jsonb_to_recordset(functions) AS x (name text, types text, arguments text, result text, comment text, callers text[]) WHERE x.name = wanted;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'shard 0 has no function tokenkeeper.%: migrate the shards with this release first', wanted
                USING ERRCODE = 'undefined_function';
        END IF;
        EXECUTE format('DROP FUNCTION IF EXISTS tokenkeeper.%I(%s)', f.name, f.types);
        EXECUTE format($create$
            CREATE FUNCTION tokenkeeper.%1$I(%2$s) RETURNS %3$s LANGUAGE plpgsql
            SET search_path = pg_catalog, pg_temp
            AS $body$
            BEGIN
                RAISE EXCEPTION 'this database is a router, which has no attached tables: %1$s works in the database of a shard'
                    USING ERRCODE = 'feature_not_supported',
                          HINT = 'Register through the router instead: tokenkeeper.register, tokenkeeper.unregister, INSERT into tokenkeeper.registration, or tokenkeeperd import.';
            END
            $body$ $create$, f.name, f.arguments, f.result);
        EXECUTE format('COMMENT ON FUNCTION tokenkeeper.%I(%s) IS %L', f.name, f.types, f.comment || ' Through the router: raises 0A000, because a table is attached in the database where it is.');
        EXECUTE format('REVOKE EXECUTE ON FUNCTION tokenkeeper.%I(%s) FROM PUBLIC', f.name, f.types);
        EXECUTE format('GRANT EXECUTE ON FUNCTION tokenkeeper.%I(%s) TO %s', f.name, f.types,
                       (SELECT string_agg(quote_ident(c), ', ') FROM unnest(f.callers) AS c WHERE starts_with(c, 'tokenkeeper_')));
    END LOOP;
END
$$;
