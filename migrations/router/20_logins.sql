-- The mappings of logins to the shards, for the queues and the views. (PL/Proxy takes the name of the current role by itself.)
--
-- postgres_fdw connects as the operating system's user if a mapping names nobody, which is a superuser on many shards. So each login that is a
-- member of one of our roles has a mapping with its own name, and there is none for PUBLIC. Whether a shard lets the login in is up to the shard;
-- without password_required, a password comes from the password file of the router's server, or none is needed.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    login text;
    of_login record;
BEGIN
    FOR shard IN 0..shards - 1 LOOP
        EXECUTE format('CREATE SCHEMA IF NOT EXISTS tokenkeeper_shard_%s', shard);
        EXECUTE format('COMMENT ON SCHEMA tokenkeeper_shard_%s IS %L', shard, format('Foreign tables: the queues and views of shard %s.', shard));
        EXECUTE format('GRANT USAGE ON SCHEMA tokenkeeper_shard_%s TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator', shard);
    END LOOP;
    FOR login IN
        SELECT r.rolname FROM pg_catalog.pg_roles AS r
        WHERE r.rolcanlogin AND NOT r.rolsuper AND EXISTS (
            SELECT FROM pg_catalog.pg_roles AS g
            WHERE g.rolname IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator')
              AND pg_catalog.pg_has_role(r.oid, g.oid, 'MEMBER'))
    LOOP
        FOR shard IN 0..shards - 1 LOOP
            EXECUTE format('CREATE USER MAPPING IF NOT EXISTS FOR %I SERVER tokenkeeper_shard_%s OPTIONS (user %L, password_required ''false'')',
                           login, shard, login);
        END LOOP;
    END LOOP;
    -- A login that lost its rights here needs no way to the shards.
    FOR of_login IN
        SELECT u.srvname, r.rolname FROM pg_catalog.pg_user_mappings AS u JOIN pg_catalog.pg_roles AS r ON r.oid = u.umuser
        WHERE u.srvname ~ '^tokenkeeper_shard_[0-9]+$' AND NOT r.rolsuper AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_roles AS g
            WHERE g.rolname IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator')
              AND pg_catalog.pg_has_role(r.oid, g.oid, 'MEMBER'))
    LOOP
        EXECUTE format('DROP USER MAPPING FOR %I SERVER %I', of_login.rolname, of_login.srvname);
    END LOOP;
END
$$;
