-- The state of all shards: tokenkeeper.status is their sum in one row, tokenkeeper_shard.status has a row per shard. A shard that does not answer
-- is named, and fails nothing.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    status CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'relations' -> 'status';
    columns text;
    sums text;
    col record;
BEGIN
    SELECT string_agg(format('%I %s', c.name, c.type), ', ' ORDER BY c.place),
           -- One expression per column: counts are added up, and of instants and ages the one that is worse is shown.
           string_agg(format(CASE
                WHEN c.name = 'warnings' THEN 'ARRAY(SELECT w.warning FROM found AS w ORDER BY w.critical DESC, w.missing DESC, w.first_shard, w.warning)'
                WHEN c.name = 'critical_warnings' THEN
                    'ARRAY(SELECT w.warning FROM found AS w WHERE w.critical ORDER BY w.missing DESC, w.first_shard, w.warning)'
                WHEN c.name IN ('last_sweep_trigger', 'last_sweep_outcome') THEN '(array_agg(o.%1$I ORDER BY o.last_sweep_at NULLS FIRST) FILTER (WHERE o.error IS NULL))[1]'
                -- A campaign is on all shards.
                WHEN c.name = 'open_campaigns' THEN 'max(o.%1$I)'
                WHEN c.type = 'bigint' THEN 'sum(o.%1$I)::bigint'
                WHEN c.type = 'boolean' THEN 'bool_or(o.%1$I)'
                WHEN c.type = 'interval' THEN 'max(o.%1$I)'
                WHEN c.type LIKE 'timestamp%%' THEN 'min(o.%1$I)'
                WHEN c.type LIKE 'text%%' THEN 'string_agg(format(''shard %%s: %%s'', o.shard, o.%1$I), ''; '' ORDER BY o.shard) FILTER (WHERE o.%1$I IS NOT NULL)'
           END || ' AS %1$I', c.name), ', ' ORDER BY c.place)
    INTO columns, sums
    FROM ROWS FROM (jsonb_to_recordset(status -> 'columns') AS (name text, type text)) WITH ORDINALITY AS c (name, type, place);
    DROP VIEW IF EXISTS tokenkeeper.status;
    DROP VIEW IF EXISTS tokenkeeper_shard.status;
    DROP FUNCTION IF EXISTS tokenkeeper_shard.read_status();
    FOR shard IN 0..shards - 1 LOOP
        EXECUTE format('DROP FOREIGN TABLE IF EXISTS tokenkeeper_shard_%s.status', shard);
        EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.status (%s) SERVER tokenkeeper_shard_%s '
                       'OPTIONS (schema_name ''tokenkeeper'', table_name ''status'', updatable ''false'')', shard, columns, shard);
        EXECUTE format('GRANT SELECT ON tokenkeeper_shard_%s.status TO tokenkeeper_reader, tokenkeeper_operator', shard);
    END LOOP;
    EXECUTE format($create$
        CREATE FUNCTION tokenkeeper_shard.read_status() RETURNS TABLE (shard integer, error text, %s)
        LANGUAGE plpgsql STABLE
        SET search_path = pg_catalog, pg_temp
        AS $body$
        DECLARE
            detail text;
        BEGIN
            FOR number IN 0..tokenkeeper.shard_count() - 1 LOOP
                BEGIN
                    RETURN QUERY EXECUTE format('SELECT %%1$s, NULL::text, s.* FROM tokenkeeper_shard_%%1$s.status AS s', number);
                EXCEPTION WHEN OTHERS THEN
                    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
                    shard := number;
                    error := regexp_replace(sqlerrm || coalesce(': ' || nullif(detail, ''), ''), '[[:space:]]+', ' ', 'g');
                    RETURN NEXT;
                END;
            END LOOP;
        END
        $body$
        $create$, columns);
    COMMENT ON FUNCTION tokenkeeper_shard.read_status() IS 'The rows of the view tokenkeeper_shard.status.';
    REVOKE EXECUTE ON FUNCTION tokenkeeper_shard.read_status() FROM PUBLIC;
    GRANT EXECUTE ON FUNCTION tokenkeeper_shard.read_status() TO tokenkeeper_reader, tokenkeeper_operator;
    CREATE VIEW tokenkeeper_shard.status WITH (security_invoker) AS SELECT s.* FROM tokenkeeper_shard.read_status() AS s;
    COMMENT ON VIEW tokenkeeper_shard.status IS 'The status of each shard: one row per shard. Of a shard that does not answer, only shard and error are known.';
    COMMENT ON COLUMN tokenkeeper_shard.status.shard IS 'The number of the shard.';
    COMMENT ON COLUMN tokenkeeper_shard.status.error IS 'Why the shard did not answer; null if it did.';
    EXECUTE format($create$
        CREATE VIEW tokenkeeper.status WITH (security_invoker) AS
        WITH one AS MATERIALIZED (SELECT s.* FROM tokenkeeper_shard.read_status() AS s),
        said AS (
            SELECT o.shard, w.warning, w.warning = ANY (o.critical_warnings) AS critical FROM one AS o CROSS JOIN unnest(o.warnings) AS w (warning)
        ), found AS (
            SELECT format('shard %%s does not answer: %%s', o.shard, o.error) AS warning, true AS critical, true AS missing, o.shard AS first_shard
            FROM one AS o WHERE o.error IS NOT NULL
            UNION ALL
            SELECT format(CASE WHEN count(*) = 1 THEN 'shard %%s: %%s' ELSE 'shards %%s: %%s' END,
                          string_agg(s.shard::text, ', ' ORDER BY s.shard), s.warning),
                   bool_or(s.critical), false, min(s.shard)
            FROM said AS s GROUP BY s.warning
        )
        SELECT %s FROM one AS o
        $create$, sums);
    EXECUTE format('COMMENT ON VIEW tokenkeeper.status IS %L',
        'One row: the state of all shards. Counts are added up; of ages and instants, the worst is shown. Each warning names its shards, and a critical '
        'one each shard that does not answer, whose counts are missing in the sums. tokenkeeper_shard.status has a row per shard.');
    FOR col IN SELECT c.* FROM jsonb_to_recordset(status -> 'columns') AS c (name text, comment text) WHERE c.comment IS NOT NULL LOOP
        EXECUTE format('COMMENT ON COLUMN tokenkeeper.status.%I IS %L', col.name, col.comment);
    END LOOP;
    GRANT SELECT ON tokenkeeper.status, tokenkeeper_shard.status TO tokenkeeper_reader, tokenkeeper_operator;
END
$$;
