-- The progress of campaigns: tokenkeeper.campaign_progress and campaign_wait have one row per campaign, tokenkeeper_shard.campaign_progress and campaign_wait
-- one per campaign and shard. They fail if a shard is down: numbers that are short without a word would be worse.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    relations CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'relations';
    relation text;
    found jsonb;
    col record;
    reader text;
    columns text;
    shown text;
    branches text;
    unknown text;
    outcomes CONSTANT text[] := ARRAY['addressed', 'waiting', 'accepted', 'stale', 'suspect', 'suppressed', 'failed', 'cancelled', 'forgotten'];
BEGIN
    FOREACH relation IN ARRAY ARRAY['campaign_progress', 'campaign_wait'] LOOP
        found := relations -> relation;
        IF found IS NULL THEN
            RAISE EXCEPTION 'shard 0 has no tokenkeeper.%: migrate the shards with this release first', relation USING ERRCODE = 'undefined_table';
        END IF;
        SELECT string_agg(concat_ws(' ', quote_ident(c.name), c.type, c."collation"), ', ' ORDER BY c.place),
               -- One expression per column. For columns that are the same on all shards, it is the column in GROUP BY, or min.
               string_agg(CASE
                    WHEN c.name IN ('campaign_id', 'environment', 'topic', 'created_by') THEN format('t.%I', c.name)
                    WHEN c.name = 'state' THEN 'CASE WHEN bool_or(t.state = ''running'') THEN ''running'' WHEN bool_or(t.state = ''waiting'') THEN ''waiting'' '
                        'WHEN bool_or(t.state = ''paused'') THEN ''paused'' WHEN bool_or(t.state = ''cancelled'') THEN ''cancelled'' ELSE ''ended'' END AS state'
                    WHEN c.name = ANY (outcomes) OR c.name = 'per_second' THEN format('sum(t.%1$I)::%2$s AS %1$I', c.name, c.type)
                    WHEN c.name IN ('expected', 'max_per_second') THEN format('CASE WHEN count(t.%1$I) = count(*) THEN sum(t.%1$I)::%2$s END AS %1$I', c.name, c.type)
                    WHEN c.name = 'expected_end' THEN 'max(t.expected_end) AS expected_end'
                    WHEN c.name = 'ended_at' THEN 'CASE WHEN count(t.ended_at) = count(*) THEN max(t.ended_at) END AS ended_at'
                    WHEN c.name = 'is_addressed' THEN 'bool_and(t.is_addressed) AS is_addressed'
                    WHEN c.name = 'needs_help' THEN 'bool_or(t.needs_help) AS needs_help'
                    WHEN c.name IN ('name', 'audience', 'created_at', 'started_at', 'scheduled_at', 'due_at') THEN format('min(t.%1$I) AS %1$I', c.name)
                    WHEN c.name = 'reason' THEN 'string_agg(t.reason, ''; '' ORDER BY t.first_shard) AS reason' END, ', ' ORDER BY c.place),
               string_agg(c.name, ', ') FILTER (WHERE c.name <> ALL (outcomes || ARRAY[
                    'campaign_id', 'environment', 'topic', 'created_by', 'state', 'per_second', 'expected', 'max_per_second', 'expected_end', 'ended_at',
                    'is_addressed', 'needs_help', 'name', 'audience', 'created_at', 'started_at', 'scheduled_at', 'due_at', 'reason']))
        INTO columns, shown, unknown
        FROM ROWS FROM (jsonb_to_recordset(found -> 'columns') AS (name text, type text, "collation" text)) WITH ORDINALITY AS c (name, type, "collation", place);
        IF unknown IS NOT NULL THEN
            RAISE EXCEPTION '%.% has no sum over the shards', relation, unknown;
        END IF;
        branches := NULL;
        EXECUTE format('DROP VIEW IF EXISTS tokenkeeper.%I', relation);
        EXECUTE format('DROP VIEW IF EXISTS tokenkeeper_shard.%I', relation);
        FOR shard IN 0..shards - 1 LOOP
            EXECUTE format('DROP FOREIGN TABLE IF EXISTS tokenkeeper_shard_%s.%I', shard, relation);
            EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.%I (%s) SERVER tokenkeeper_shard_%s '
                           'OPTIONS (schema_name ''tokenkeeper'', table_name %L, updatable ''false'')', shard, relation, columns, shard, relation);
            branches := concat_ws(' UNION ALL ', branches, format('SELECT t.*, %s AS shard FROM tokenkeeper_shard_%s.%I AS t', shard, shard, relation));
        END LOOP;
        EXECUTE format('CREATE VIEW tokenkeeper_shard.%I WITH (security_invoker) AS %s', relation, branches);
        EXECUTE format('COMMENT ON VIEW tokenkeeper_shard.%I IS %L', relation, 'As tokenkeeper.' || relation || ', one row per campaign and shard.');
        EXECUTE format('COMMENT ON COLUMN tokenkeeper_shard.%I.shard IS %L', relation, 'The number of the shard that has the row.');
        IF relation = 'campaign_progress' THEN
            EXECUTE format('CREATE VIEW tokenkeeper.campaign_progress WITH (security_invoker) AS SELECT %s, array_agg(t.shard ORDER BY t.shard) AS shards '
                           'FROM tokenkeeper_shard.campaign_progress AS t GROUP BY t.campaign_id, t.environment, t.topic, t.created_by', shown);
            COMMENT ON COLUMN tokenkeeper.campaign_progress.shards IS 'The shards that have it. If one is missing, enqueue has failed half-way, or a sweep has deleted its part.';
        ELSE
            -- Each reason once, with its shards.
            EXECUTE format($create$
                CREATE VIEW tokenkeeper.campaign_wait WITH (security_invoker) AS SELECT %s
                FROM (SELECT w.campaign_id, bool_or(w.needs_help) AS needs_help, min(w.due_at) AS due_at, min(w.shard) AS first_shard,
                             CASE WHEN count(*) = %s THEN '' ELSE CASE WHEN count(*) = 1 THEN 'shard ' ELSE 'shards ' END
                                  || string_agg(w.shard::text, ', ' ORDER BY w.shard) || ': ' END || w.reason AS reason
                      FROM tokenkeeper_shard.campaign_wait AS w GROUP BY w.campaign_id, w.reason) AS t
                GROUP BY t.campaign_id
                $create$, shown, shards);
        END IF;
        EXECUTE format('COMMENT ON VIEW tokenkeeper.%I IS %L', relation, (found ->> 'comment') || CASE relation
            WHEN 'campaign_progress' THEN ' Through the router: numbers are added up; state is that of the shard which has most to do (running before waiting, paused, cancelled '
                'and ended), started_at the earliest, and ended_at the latest once all have ended. tokenkeeper_shard.campaign_progress has a row per shard.'
            ELSE ' Through the router: each reason names its shards, unless it is that of all. tokenkeeper_shard.campaign_wait has a row per shard.' END);
        FOR col IN SELECT c.* FROM jsonb_to_recordset(found -> 'columns') AS c (name text, comment text) WHERE c.comment IS NOT NULL LOOP
            EXECUTE format('COMMENT ON COLUMN tokenkeeper.%I.%I IS %L', relation, col.name, col.comment);
        END LOOP;
        FOR reader IN SELECT r.role FROM jsonb_array_elements_text(found -> 'readers') AS r (role)
                      WHERE r.role IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator') LOOP
            EXECUTE format('GRANT SELECT ON tokenkeeper.%1$I, tokenkeeper_shard.%1$I TO %2$I', relation, reader);
            FOR shard IN 0..shards - 1 LOOP
                EXECUTE format('GRANT SELECT ON tokenkeeper_shard_%s.%I TO %I', shard, relation, reader);
            END LOOP;
        END LOOP;
    END LOOP;
END
$$;
