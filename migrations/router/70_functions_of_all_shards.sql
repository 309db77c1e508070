-- Functions that run on all shards, and functions that need no shard.
--
-- The signature, defaults, comment and grants of each come from the catalog of shard 0, so that they cannot differ. For each function there are two:
--   tokenkeeper_shard.F(shard, ...)   runs F on one shard, by PL/Proxy;
--   tokenkeeper.F(...)                runs it on all shards, one after the other, and combines what they return.
-- Each shard commits at once. If some fail, the others have done it all the same: the error says what happened on each, and the call can be repeated.

DO $$
DECLARE
    functions CONSTANT jsonb := current_setting('tokenkeeper.shard_catalog')::jsonb -> 'functions';
    wanted record;
    f record;
    role text;
    passed text;
    declared text;
    owned text;
    body text;
BEGIN
    FOR wanted IN VALUES
        -- How the answers are combined: the sum; any, true if one is; the first, of shard 0; ids, the sum, for a call without the ids of rows.
        ('forget', 'sum'), ('forget_device', 'sum'), ('forget_user', 'sum'),
        ('pause_sending', 'any'), ('resume_sending', 'any'),
        ('request_sweep', 'first'),
        ('reinstate', 'sum'), ('would_reinstate', 'sum'), ('pruned_stale', 'sum'), ('undo_next', 'sum'),
        ('release_held', 'sum'), ('discard_held', 'sum'),
        ('pause_campaign', 'any'), ('resume_campaign', 'any'), ('cancel_campaign', 'any'), ('set_campaign_rate', 'any'),
        ('requeue_rejected_results', 'ids'), ('requeue_rejected_registrations', 'ids'), ('requeue_failed', 'ids')
    LOOP
        SELECT x.* INTO f
        FROM jsonb_to_recordset(functions) AS x (name text, types text, arguments text, names text[], result text, comment text, callers text[])
        WHERE x.name = wanted.column1;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'shard 0 has no function tokenkeeper.%: migrate the shards with this release first', wanted.column1
                USING ERRCODE = 'undefined_function';
        END IF;
        -- On one shard.
        passed := (SELECT string_agg(quote_ident(a.name), ', ' ORDER BY a.place) FROM unnest(f.names) WITH ORDINALITY AS a (name, place));
        owned := format('tokenkeeper_shard.%I(integer%s)', f.name, coalesce(', ' || nullif(f.types, ''), ''));
        EXECUTE format('DROP FUNCTION IF EXISTS %s', owned);
        EXECUTE format($create$CREATE FUNCTION tokenkeeper_shard.%I(shard integer%s) RETURNS %s LANGUAGE plproxy %s AS $body$
            CLUSTER 'tokenkeeper_shards';
            RUN ON shard;
            SELECT tokenkeeper.%I(%s);
            $body$ $create$, f.name, coalesce(', ' || nullif(f.arguments, ''), ''), f.result,
            CASE WHEN f.types LIKE '%timestamp%' THEN 'SET datestyle = ''ISO''' ELSE '' END, f.name, passed);
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', owned, 'On the shard with this number: ' || f.comment);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', owned);
        -- On all.
        declared := format('tokenkeeper.%I(%s)', f.name, f.types);
        passed := coalesce((SELECT string_agg(format(', $%s', a.place), '' ORDER BY a.place) FROM generate_series(1, cardinality(f.names)) AS a (place)), '');
        IF f.name = 'set_campaign_rate' THEN
            -- Each shard gets its part.
            passed := ', $1, nullif((tokenkeeper_shard.rates($2))[number + 1], 0)';
        END IF;
        EXECUTE format('DROP FUNCTION IF EXISTS %s', declared);
        EXECUTE format($create$CREATE FUNCTION tokenkeeper.%1$I(%2$s) RETURNS %3$s LANGUAGE plpgsql
            SET search_path = pg_catalog, pg_temp
            AS $body$
            DECLARE
                answer %3$s;
                combined %3$s;
                told text[] := '{}';
                failures text[] := '{}';
                failed_with text;
                failed_because text;
                refused text;
                refused_with text;
                refused_hint text;
                hint_of_shard text;
                done boolean := false;
            BEGIN
                %6$s
                FOR number IN 0..tokenkeeper.shard_count() - 1 LOOP
                    BEGIN
                        answer := tokenkeeper_shard.%1$I(number%4$s);
                        combined := %5$s;
                        done := true;
                        told := told || format('shard %%s: %%s', number, answer);
                    EXCEPTION WHEN OTHERS THEN
                        GET STACKED DIAGNOSTICS hint_of_shard = PG_EXCEPTION_HINT;
                        failed_because := coalesce(failed_because, regexp_replace(sqlerrm, '[[:space:]]+', ' ', 'g'));
                        told := told || format('shard %%s failed: %%s', number, regexp_replace(sqlerrm, '[[:space:]]+', ' ', 'g'));
                        IF sqlstate LIKE '22%%' THEN
                            IF refused IS NULL THEN
                                -- As one database says it.
                                refused := regexp_replace(sqlerrm, '^.*? REMOTE ERROR: ', '');
                                refused_with := sqlstate;
                                refused_hint := regexp_replace(hint_of_shard, '^Remote hint: ', '');
                            END IF;
                        ELSE
                            failed_with := coalesce(failed_with, sqlstate);
                            failures := failures || number::text;
                        END IF;
                    END;
                END LOOP;
                IF cardinality(failures) = tokenkeeper.shard_count() THEN
                    RAISE EXCEPTION '%1$s failed on all shards: %%', failed_because USING ERRCODE = failed_with, DETAIL = array_to_string(told, chr(10));
                ELSIF failures <> '{}' THEN
                    RAISE EXCEPTION '%1$s failed on shard%% %%, and the other shards have done it: %%',
                        CASE WHEN cardinality(failures) > 1 THEN 's' ELSE '' END, array_to_string(failures, ', '), failed_because
                        USING ERRCODE = failed_with, DETAIL = array_to_string(told, chr(10)), HINT = 'Repeat the call when all shards answer.';
                END IF;
                -- If one shard accepts the arguments, they are valid: a shard that refuses them does not know the topic, and has nothing to do.
                IF refused IS NOT NULL AND NOT done THEN
                    IF refused_hint <> '' THEN
                        RAISE EXCEPTION '%%', refused USING ERRCODE = refused_with, HINT = refused_hint;
                    END IF;
                    RAISE EXCEPTION '%%', refused USING ERRCODE = refused_with;
                END IF;
                RETURN combined;
            END
            $body$ $create$,
            f.name, f.arguments, f.result, passed,
            CASE wanted.column2 WHEN 'any' THEN 'coalesce(combined, false) OR coalesce(answer, false)'
                                WHEN 'first' THEN 'coalesce(combined, answer)'
                                ELSE 'coalesce(combined + answer, combined, answer)' END,
            CASE wanted.column2 WHEN 'ids' THEN format(
                'IF $1 IS NOT NULL THEN RAISE EXCEPTION ''each shard numbers its own rows: call tokenkeeper_shard.%1$s(shard, ids), or tokenkeeper.%1$s() for all rows of all shards'' '
                'USING ERRCODE = ''feature_not_supported''; END IF;', f.name) ELSE '' END);
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', declared, f.comment || ' Through the router: on all shards; ' || CASE wanted.column2
            WHEN 'any' THEN 'true if one of them returns true.' || CASE f.name
                WHEN 'set_campaign_rate' THEN ' The rate is divided among the shards, and at least their number.' ELSE '' END WHEN 'first' THEN 'what shard 0 returns.' ELSE 'the sum of what they return.' END);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', declared);
        FOREACH role IN ARRAY f.callers LOOP
            CONTINUE WHEN role NOT IN ('tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader', 'tokenkeeper_operator');
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s, %s TO %I', owned, declared, role);
        END LOOP;
    END LOOP;
END
$$;
