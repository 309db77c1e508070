-- Views over all shards: the names and columns of a shard, with its number in the last column, `shard`.
--
-- What each view has comes from the catalog of shard 0 (the setting tokenkeeper.shard_catalog), so that no column is forgotten. A condition on
-- `shard` that the planner can compute leaves only that shard: WHERE shard = tokenkeeper.shard_of('...', tokenkeeper.shard_count()). A reader reads
-- as itself on each shard: the views take its rights, not those of their owner.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    relations CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'relations';
    relation text;
    found jsonb;
    col record;
    reader text;
    columns text;
    branches text;
BEGIN
    FOREACH relation IN ARRAY ARRAY[
        'token', 'sendable_token', 'suppressed_token', 'token_event', 'result_stat', 'token_count_hour',
        'rejected_result', 'rejected_registration', 'held_result', 'held_registration', 'guard', 'reinstatement', 'stale_share', 'operation',
        'sweep_run', 'sweep_topic', 'paused_topic', 'suppressed_send', 'failed_send',
        'daemon', 'sending_daemon']
    LOOP
        found := relations -> relation;
        IF found IS NULL THEN
            RAISE EXCEPTION 'shard 0 has no tokenkeeper.%: migrate the shards with this release first', relation USING ERRCODE = 'undefined_table';
        END IF;
        SELECT string_agg(concat_ws(' ', quote_ident(c.name), c.type, c."collation"), ', ' ORDER BY c.place)
        INTO columns
        FROM ROWS FROM (jsonb_to_recordset(found -> 'columns') AS (name text, type text, "collation" text)) WITH ORDINALITY AS c (name, type, "collation", place);
        branches := '';
        EXECUTE format('DROP VIEW IF EXISTS tokenkeeper.%I', relation);
        FOR shard IN 0..shards - 1 LOOP
            EXECUTE format('DROP FOREIGN TABLE IF EXISTS tokenkeeper_shard_%s.%I', shard, relation);
            EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.%I (%s) SERVER tokenkeeper_shard_%s '
                           'OPTIONS (schema_name ''tokenkeeper'', table_name %L, updatable ''false'')', shard, relation, columns, shard, relation);
            branches := branches || CASE WHEN shard > 0 THEN ' UNION ALL ' ELSE '' END
                || format('SELECT t.*, %s AS shard FROM tokenkeeper_shard_%s.%I AS t', shard, shard, relation);
        END LOOP;
        EXECUTE format('CREATE VIEW tokenkeeper.%I WITH (security_invoker) AS %s', relation, branches);
        EXECUTE format('COMMENT ON VIEW tokenkeeper.%I IS %L', relation, found ->> 'comment');
        FOR col IN SELECT c.* FROM jsonb_to_recordset(found -> 'columns') AS c (name text, comment text) WHERE c.comment IS NOT NULL LOOP
            EXECUTE format('COMMENT ON COLUMN tokenkeeper.%I.%I IS %L', relation, col.name, col.comment);
        END LOOP;
        EXECUTE format('COMMENT ON COLUMN tokenkeeper.%I.shard IS %L', relation, 'The number of the shard that has the row.');
        FOR reader IN SELECT r.role FROM jsonb_array_elements_text(found -> 'readers') AS r (role)
                      WHERE r.role IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator') LOOP
            EXECUTE format('GRANT SELECT ON tokenkeeper.%I TO %I', relation, reader);
            FOR shard IN 0..shards - 1 LOOP
                EXECUTE format('GRANT SELECT ON tokenkeeper_shard_%s.%I TO %I', shard, relation, reader);
            END LOOP;
        END LOOP;
    END LOOP;
END
$$;
