-- The policies of topics, for all shards.
--
-- A statement on this view changes all shards, within the caller's transaction: they commit one after the other, at its end. Numbers that limit a
-- whole topic are divided among the shards.

DO $$
DECLARE
    shards CONSTANT integer := tokenkeeper.shard_count();
    policy CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'relations' -> 'topic_policy';
    divided CONSTANT text[] := ARRAY['guard_allowance', 'prune_allowance', 'max_per_second'];
    -- Columns that INSERT and UPDATE set.
    settings text[] := ARRAY(SELECT c.name FROM jsonb_to_recordset(policy -> 'columns') AS c (name text)
                             WHERE c.name NOT IN ('environment', 'topic', 'first_seen'));
    columns text;
    settable text;
    branches text;
    shown text;
    col record;
BEGIN
    SELECT string_agg(concat_ws(' ', quote_ident(c.name), c.type, c."collation"), ', ' ORDER BY c.place),
           string_agg(concat_ws(' ', quote_ident(c.name), c.type, c."collation"), ', ' ORDER BY c.place) FILTER (WHERE c.name <> 'first_seen'),
           string_agg(CASE WHEN c.name = ANY (divided) THEN format('sum(t.%1$I)::%2$s AS %1$I', c.name, c.type)
                           WHEN c.name = 'first_seen' THEN 'min(t.first_seen) AS first_seen'
                           ELSE format('t.%I', c.name) END, ', ' ORDER BY c.place)
    INTO columns, settable, shown
    FROM ROWS FROM (jsonb_to_recordset(policy -> 'columns') AS (name text, type text, "collation" text)) WITH ORDINALITY
        AS c (name, type, "collation", place);
    DROP VIEW IF EXISTS tokenkeeper.topic_policy;
    FOR shard IN 0..shards - 1 LOOP
        EXECUTE format('DROP FOREIGN TABLE IF EXISTS tokenkeeper_shard_%s.topic_policy', shard);
        EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.topic_policy (%s) SERVER tokenkeeper_shard_%s '
                       'OPTIONS (schema_name ''tokenkeeper'', table_name ''topic_policy'', updatable ''false'')', shard, columns, shard);
        -- An INSERT sends every column of the foreign table, so what operators may not set must not be one.
        EXECUTE format('DROP FOREIGN TABLE IF EXISTS tokenkeeper_shard_%s.settable_policy', shard);
        EXECUTE format('CREATE FOREIGN TABLE tokenkeeper_shard_%s.settable_policy (%s) SERVER tokenkeeper_shard_%s '
                       'OPTIONS (schema_name ''tokenkeeper'', table_name ''topic_policy'')', shard, settable, shard);
        EXECUTE format('GRANT SELECT ON tokenkeeper_shard_%s.topic_policy TO tokenkeeper_reader, tokenkeeper_operator', shard);
        EXECUTE format('GRANT SELECT, INSERT (environment, topic, %1$s), UPDATE (%1$s) ON tokenkeeper_shard_%2$s.settable_policy TO tokenkeeper_operator',
                       array_to_string(settings, ', '), shard);
        branches := concat_ws(' UNION ALL ', branches, format('SELECT s.*, %s AS shard FROM tokenkeeper_shard_%s.topic_policy AS s', shard, shard));
    END LOOP;
    EXECUTE format('CREATE VIEW tokenkeeper.topic_policy WITH (security_invoker) AS SELECT %s, array_agg(t.shard ORDER BY t.shard) AS shards FROM (%s) AS t '
                   'GROUP BY t.environment, t.topic, %s', shown, branches,
                   (SELECT string_agg(format('t.%I', s), ', ') FROM unnest(settings) AS s WHERE s <> ALL (divided)));
    ALTER VIEW tokenkeeper.topic_policy ALTER COLUMN environment SET DEFAULT 'production';
    EXECUTE format('COMMENT ON VIEW tokenkeeper.topic_policy IS %L', (policy ->> 'comment')
        || ' Through the router: a change reaches all shards. One row per topic and environment, or several if shards differ.');
    FOR col IN SELECT c.* FROM jsonb_to_recordset(policy -> 'columns') AS c (name text, comment text) WHERE c.comment IS NOT NULL LOOP
        EXECUTE format('COMMENT ON COLUMN tokenkeeper.topic_policy.%I IS %L', col.name, col.comment
            || CASE WHEN col.name = ANY (divided) THEN ' Through the router: the sum of all shards, each of which has its part.' ELSE '' END);
    END LOOP;
    COMMENT ON COLUMN tokenkeeper.topic_policy.shards IS 'The shards that have this policy.';
    GRANT SELECT ON tokenkeeper.topic_policy TO tokenkeeper_reader, tokenkeeper_operator;
    EXECUTE format('GRANT INSERT (environment, topic, %1$s), UPDATE (%1$s) ON tokenkeeper.topic_policy TO tokenkeeper_operator', array_to_string(settings, ', '));
    EXECUTE format($create$
        CREATE OR REPLACE FUNCTION tokenkeeper.set_policy() RETURNS trigger
        LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp
        AS $body$
        DECLARE
            shards CONSTANT integer := tokenkeeper.shard_count();
            part record;
            changed bigint;
        BEGIN
            IF tg_op = 'INSERT' AND EXISTS (
                SELECT FROM tokenkeeper.topic_policy AS p WHERE p.topic = new.topic AND p.environment = new.environment) THEN
                RAISE EXCEPTION 'topic_policy has topic %% (%%) already: change it by UPDATE', new.topic, new.environment USING ERRCODE = 'unique_violation';
            END IF;
            IF tg_op = 'UPDATE' AND (new.topic, new.environment) IS DISTINCT FROM (old.topic, old.environment) THEN
                RAISE EXCEPTION 'the topic and environment of a policy cannot change' USING ERRCODE = 'feature_not_supported';
            END IF;
            IF new.max_per_second < shards THEN
                RAISE EXCEPTION 'max_per_second is %%, expected at least %%: each shard gets its part', new.max_per_second, shards
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
            FOR number IN 0..shards - 1 LOOP
                part := new;
                %1$s
                EXECUTE format('UPDATE tokenkeeper_shard_%%s.settable_policy SET %2$s WHERE topic = $1 AND environment = $2', number)
                    USING new.topic, new.environment, %3$s;
                GET DIAGNOSTICS changed = ROW_COUNT;
                IF changed = 0 THEN
                    EXECUTE format('INSERT INTO tokenkeeper_shard_%%s.settable_policy (topic, environment, %4$s) VALUES ($1, $2, %5$s)', number)
                        USING new.topic, new.environment, %3$s;
                END IF;
            END LOOP;
            RETURN new;
        END
        $body$
        $create$,
        (SELECT string_agg(format('part.%1$I := new.%1$I / shards + CASE WHEN number < new.%1$I %% shards THEN 1 ELSE 0 END;', d), ' ') FROM unnest(divided) AS d),
        (SELECT string_agg(format('%I = $%s', s, place + 2), ', ' ORDER BY place) FROM unnest(settings) WITH ORDINALITY AS x (s, place)),
        (SELECT string_agg(format('part.%I', s), ', ' ORDER BY place) FROM unnest(settings) WITH ORDINALITY AS x (s, place)),
        (SELECT string_agg(quote_ident(s), ', ' ORDER BY place) FROM unnest(settings) WITH ORDINALITY AS x (s, place)),
        (SELECT string_agg(format('$%s', place + 2), ', ' ORDER BY place) FROM unnest(settings) WITH ORDINALITY AS x (s, place)));
    COMMENT ON FUNCTION tokenkeeper.set_policy() IS 'Trigger: sets the policy of a topic on all shards.';
    REVOKE EXECUTE ON FUNCTION tokenkeeper.set_policy() FROM PUBLIC;
    CREATE TRIGGER set_policy INSTEAD OF INSERT OR UPDATE ON tokenkeeper.topic_policy FOR EACH ROW EXECUTE FUNCTION tokenkeeper.set_policy();
END
$$;
