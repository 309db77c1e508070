-- What attach generates: the triggers and their functions, and the functions that look tokens up and read rows. They belong to the owner of the table.
--
-- Which instants the generated triggers queue, and why, is in docs/decisions/attachments.md. In short:
--
--   A registration counts from the column registered_at. If the write has set it, and it is less than a minute old, it counts from the moment of the
--   write: a logout earlier in the same transaction was recorded with clock_timestamp(), and now() is older than that. A null counts from 1970.
--   A logout counts from the moment of the write. Of a row that is inserted logged out, from registered_at: the earliest instant that suppresses.
--
-- The pieces of SQL (attached_table.token_sql and so on) refer to a row that is called r: NEW or OLD of a trigger, a transition table or the table. The UPDATE
-- trigger also has the pieces for OLD, which is called old_row there.

CREATE OR REPLACE FUNCTION tokenkeeper.changed_column_test(attached regclass, columns text[]) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- The types whose equality means that nothing has changed. Of others, the text is compared: json has no equality, and that of citext is too coarse.
    SELECT string_agg(CASE
               WHEN t.typnamespace = 'pg_catalog'::regnamespace AND t.typname IN ('bool', 'int2', 'int4', 'int8', 'uuid', 'timestamptz', 'timestamp', 'date',
                   'bytea', 'numeric', 'float4', 'float8') OR t.typcategory = 'E'
               THEN format('OLD.%1$I IS DISTINCT FROM NEW.%1$I', a.attname)
               WHEN t.typnamespace = 'pg_catalog'::regnamespace AND t.typname IN ('text', 'varchar', 'bpchar', '_text', '_varchar')
               THEN format(CASE WHEN l.collisdeterministic THEN 'OLD.%1$I IS DISTINCT FROM NEW.%1$I'
                                ELSE 'OLD.%1$I COLLATE "C" IS DISTINCT FROM NEW.%1$I COLLATE "C"' END, a.attname)
               ELSE format('OLD.%1$I::text COLLATE "C" IS DISTINCT FROM NEW.%1$I::text COLLATE "C"', a.attname) END,
               ' OR ' ORDER BY array_position(columns COLLATE "C", a.attname::text COLLATE "C"))
    FROM pg_attribute AS a
    JOIN pg_type AS t ON t.oid = a.atttypid
    LEFT JOIN pg_collation AS l ON l.oid = a.attcollation
    WHERE a.attrelid = attached AND a.attname = ANY (columns COLLATE "C") AND NOT a.attisdropped
$$;
COMMENT ON FUNCTION tokenkeeper.changed_column_test(regclass, text[]) IS
    'The condition for a change of a row: true if one of the columns differs between OLD and NEW.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.changed_column_test(regclass, text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.update_statements(source_id text, pieces jsonb, old_pieces jsonb, same_device text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- Expressions of plpgsql are costly in a transaction's first call, so few are reached, and what is usual comes first. A statement with more than one row
    -- would cost more than two with one. Texts are compared byte by byte, whatever the collation of the column.
    SELECT format($body$        IF (%6$s > %12$s
                -- Of two transactions that overlap, the later one may write the earlier now(). It counts from this moment.
                OR %6$s < %12$s AND %6$s > clock_timestamp() - interval '1 minute')
            AND NOT %10$s AND %3$s <> '' AND %5$s = %11$s AND %4$s = %13$s
            AND (%3$s = %14$s OR %15$s AND %4$s NOT LIKE ALL ('{%%.push-type.liveactivity,%%.push-type.controls}')) THEN
            -- The usual change: the device has registered. If the token is new, it supersedes the old one, because the device is the same.
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id)
            VALUES (%5$s, %4$s, %3$s,
                CASE WHEN %6$s <= clock_timestamp() - interval '1 minute' THEN greatest(%6$s, 'epoch') ELSE clock_timestamp() END,
                %7$s, %8$s, %9$s, false, %1$s);
        ELSE
            -- Another spelling of the same token is no other token.
            moves := %5$s IS DISTINCT FROM %11$s OR %4$s IS DISTINCT FROM %13$s
                OR %3$s IS DISTINCT FROM %14$s AND tokenkeeper.parse_token(%3$s) IS DISTINCT FROM tokenkeeper.parse_token(%14$s);
            IF moves AND %14$s <> '' AND NOT %16$s THEN
                -- The row has given the old token up.
                INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
                VALUES (%11$s, %13$s, %14$s, clock_timestamp(), true, %1$s);
            END IF;
            IF %3$s <> '' THEN
                IF NOT %10$s THEN
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id)
                    VALUES (%5$s, %4$s, %3$s,
                        CASE WHEN %6$s IS NULL THEN 'epoch'
                             WHEN %6$s <= clock_timestamp() - interval '1 minute' THEN greatest(%6$s, 'epoch')
                             WHEN %6$s IS DISTINCT FROM %12$s THEN clock_timestamp()
                             WHEN %6$s <= clock_timestamp() THEN %6$s
                             -- It is in the future, and has counted as the moment of the write that set it.
                             ELSE 'epoch' END,
                        -- Without a later registration than that of the old token, the device's tokens cannot be told apart by it.
                        CASE WHEN moves AND %14$s <> '' AND (%6$s IS NULL OR %6$s = %12$s
                                  OR %6$s < %12$s AND %6$s <= clock_timestamp() - interval '1 minute')
                             THEN NULL ELSE %7$s END, %8$s, %9$s, false, %1$s);
                ELSIF moves OR NOT %16$s THEN
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
                    VALUES (%5$s, %4$s, %3$s,
                        CASE WHEN %16$s OR (%14$s <> '') IS NOT TRUE THEN greatest(%6$s, 'epoch') ELSE clock_timestamp() END, true, %1$s);
                END IF;
            END IF;
        END IF;
$body$, source_id, NULL, in_bytes.new ->> 'token', in_bytes.new ->> 'topic', in_bytes.new ->> 'environment', pieces ->> 'moment',
        in_bytes.new ->> 'device', pieces ->> 'user', pieces ->> 'tags', pieces ->> 'out', in_bytes.old ->> 'environment', old_pieces ->> 'moment',
        in_bytes.old ->> 'topic', in_bytes.old ->> 'token', same_device, old_pieces ->> 'out')
    FROM (SELECT (SELECT jsonb_object_agg(e.key, format('(%s COLLATE "C")', e.value)) FROM jsonb_each_text(pieces) AS e),
                 (SELECT jsonb_object_agg(e.key, format('(%s COLLATE "C")', e.value)) FROM jsonb_each_text(old_pieces) AS e)) AS in_bytes (new, old)
$$;
COMMENT ON FUNCTION tokenkeeper.update_statements(text, jsonb, jsonb, text) IS
    'What the generated trigger function of an UPDATE does. pieces refer to NEW, old_pieces to OLD. same_device is the condition for '
    'both having the same device, if both have an instant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.update_statements(text, jsonb, jsonb, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.trigger_body(kind text, source_id text, attached text, plan jsonb, row_level boolean, changed text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    pieces jsonb := plan -> 'pieces';
    declared text := CASE
        WHEN kind = 'update' THEN $declared$DECLARE
    r ALIAS FOR NEW;
    old_row ALIAS FOR OLD;
    moves boolean;
$declared$
        WHEN row_level THEN 'DECLARE' || chr(10) || '    r ALIAS FOR ' || CASE kind WHEN 'insert' THEN 'NEW' ELSE 'OLD' END || ';' || chr(10)
        ELSE '' END;
    source text := CASE WHEN row_level THEN '' ELSE 'FROM changed_rows AS r' END;
    head text := $head$BEGIN
    IF current_setting('tokenkeeper.cleaning', true) = %1$L THEN
        RETURN NULL;
    END IF;
    BEGIN
$head$ || CASE WHEN changed IS NULL THEN '' ELSE $head$        IF (%11$s) IS NOT TRUE THEN
            IF (%12$s) IS NOT TRUE THEN
                RETURN NULL;
            END IF;
        END IF;
$head$ END;
    -- The provider's write never fails because of this function. If even the failure cannot be noted, the server's log has it.
    tail text := $tail$    EXCEPTION WHEN OTHERS THEN
        BEGIN
            INSERT INTO tokenkeeper.attachment_failure (source_id, error) VALUES (%1$s, SQLSTATE || ' ' || left(SQLERRM, 200));
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
        RAISE LOG 'tokenkeeper: a change of %% was not queued: %% %%', %2$L, SQLSTATE, left(SQLERRM, 200);
    END;
    RETURN NULL;
END
$tail$;
BEGIN
    RETURN format(declared || head, source_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, changed[1], changed[2])
        || CASE kind WHEN 'update' THEN tokenkeeper.update_statements(source_id, pieces, plan -> 'old_pieces', plan ->> 'same_device')
        ELSE format(CASE kind WHEN 'insert' THEN $body$        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered,
            source_id)
        SELECT n.environment, n.topic, n.token,
               CASE WHEN n.moment > clock_timestamp() - interval '1 minute' AND NOT n.out THEN clock_timestamp()
                    ELSE greatest(n.moment, 'epoch') END,
               CASE WHEN NOT n.out THEN n.device_id END, CASE WHEN NOT n.out THEN n.user_id END, CASE WHEN NOT n.out THEN n.tags END, n.out, %1$s
        FROM (SELECT %5$s AS environment, %4$s AS topic, %3$s AS token, %6$s AS moment, %7$s AS device_id, %8$s AS user_id, %9$s AS tags, %10$s AS out
              $body$ || source || $body$) AS n
        WHERE n.token <> '';
$body$ ELSE $body$        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
        SELECT n.environment, n.topic, n.token, clock_timestamp(), true, %1$s
        FROM (SELECT %5$s AS environment, %4$s AS topic, %3$s AS token, %10$s AS out $body$ || source || $body$) AS n
        WHERE n.token <> '' AND NOT n.out;
$body$ END, source_id, attached, pieces ->> 'token', pieces ->> 'topic', pieces ->> 'environment', pieces ->> 'moment',
            pieces ->> 'device', pieces ->> 'user', pieces ->> 'tags', pieces ->> 'out') END
        || format(tail, source_id, attached);
END
$$;
COMMENT ON FUNCTION tokenkeeper.trigger_body(text, text, text, jsonb, boolean, text[]) IS
    'The body of a generated trigger function of an attachment: insert, update or delete. row_level is false if it reads a transition table. changed has '
    'two conditions, of which one is true if there is something to do, the usual one first; null if the trigger has them.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.trigger_body(text, text, text, jsonb, boolean, text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.check_attachment_plan(attached regclass, plan jsonb) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = attached AND c.relkind IN ('r', 'p')) THEN
        RAISE EXCEPTION '% is no table', coalesce(attached::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (jsonb_typeof(plan -> 'pieces') = 'object' AND jsonb_typeof(plan -> 'old_pieces') = 'object'
        AND plan -> 'pieces' ?& ARRAY['token', 'token_kind', 'topic', 'environment', 'moment', 'device', 'user', 'tags', 'out', 'stale_at']
        AND plan -> 'old_pieces' ?& ARRAY['token', 'topic', 'environment', 'moment', 'out'] AND jsonb_typeof(plan -> 'same_device') = 'string'
        AND jsonb_typeof(plan -> 'columns') = 'array' AND jsonb_typeof(plan -> 'key_columns') = 'array' AND jsonb_typeof(plan -> 'arguments') = 'object'
        AND jsonb_typeof(plan -> 'always') = 'boolean' AND plan ->> 'on_delete' IN ('ignore', 'unregister')
        AND plan ->> 'revive' IN ('by registered_at', 'by register only')) IS NOT TRUE THEN
        RAISE EXCEPTION 'plan is none that attach has made' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
    IF EXISTS (
        SELECT FROM jsonb_array_elements_text((plan -> 'columns') || (plan -> 'key_columns')) AS c (name)
        WHERE tokenkeeper.column_kind(attached, c.name) IS NULL) OR jsonb_array_length(plan -> 'columns') = 0 THEN
        RAISE EXCEPTION 'plan names no column, or one that % has not', attached USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_attachment_plan(regclass, jsonb) IS 'Raises 22023 unless the plan may be one that attach has made for the table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.check_attachment_plan(regclass, jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_statements(attached regclass, source_id text, plan jsonb) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_catalog.pg_class;
    place text;
    ours text := (SELECT quote_ident(pg_get_userbyid(n.nspowner)) FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper');
    pieces jsonb := plan -> 'pieces';
    always boolean;
    row_level boolean;
    keys text[];
    columns text[];
    kinds text[] := ARRAY['insert', 'update'];
    kind text;
    called text;
    body text;
    spelled text[];
    selected text;
    key_text text;
    key_list text;
    key_after text;
    usual text[];
    changed text[];
    details text;
    -- Whether the trigger compares the named columns, and not its function.
    compares boolean := tokenkeeper.has_before_update(attached);
BEGIN
    PERFORM tokenkeeper.check_attachment_plan(attached, plan);
    always := (plan ->> 'always')::boolean;
    keys := ARRAY(SELECT jsonb_array_elements_text(plan -> 'key_columns'));
    columns := ARRAY(SELECT jsonb_array_elements_text(plan -> 'columns'));
    -- A statement of its own for each: plpgsql prepares the whole expression, even if its first operand is true.
    usual := array_remove(ARRAY[columns[1], plan -> 'arguments' ->> 'registered_at'], NULL);
    changed := ARRAY[tokenkeeper.changed_column_test(attached, usual), coalesce(tokenkeeper.changed_column_test(
        attached, ARRAY(SELECT c.name FROM unnest(columns) AS c (name) WHERE c.name <> ALL (usual))), 'false')];
    SELECT c.* INTO this FROM pg_catalog.pg_class AS c WHERE c.oid = attached;
    place := this.relnamespace::regnamespace::text;
    -- Logical replication's apply, and a statement on a parent table, fire row-level triggers only.
    row_level := always OR this.relkind = 'p' OR EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = attached);
    IF plan ->> 'on_delete' = 'unregister' THEN
        kinds := kinds || 'delete'::text;
    END IF;
    FOREACH kind IN ARRAY kinds LOOP
        called := format('%s.tokenkeeper_%s_%s()', place, kind, source_id);
        RETURN NEXT format('CREATE ' || 'FUNCTION %s RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %L', called,
                           tokenkeeper.trigger_body(kind, source_id, attached::text, plan, row_level OR kind = 'update',
                                                    CASE WHEN kind = 'update' AND NOT compares THEN changed END));
    END LOOP;

    spelled := CASE pieces ->> 'token_kind' WHEN 'bytea' THEN ARRAY[format('r.%I = a.token_key', columns[1]), 'false'] ELSE ARRAY(
        SELECT format('r.%I ', columns[1]) || format(tokenkeeper.token_index_operator(attached, columns[1]), s.texts)
        FROM unnest(ARRAY['ARRAY[a.token, a.hex]',
            'ARRAY[upper(a.hex), ''<'' || rtrim(regexp_replace(a.hex, ''(.{8})'', chr(92) || ''1 '', ''g''), '' '') || ''>'']']) WITH ORDINALITY AS s (texts, n)
        ORDER BY s.n) END;
    body := format($body$BEGIN
    -- As it is spelled in the argument, and in lower case. Only if that finds no registered row, in upper case, and as NSData describes itself.
    RETURN (SELECT coalesce(array_agg(CASE WHEN h.has THEN true ELSE coalesce((
                SELECT bool_or(NOT %1$s) FROM %2$s AS r
                WHERE %7$s AND %4$s = coalesce(a.environment, 'production') AND %5$s = a.topic
                  AND (%6$s = a.hex OR tokenkeeper.parse_token(%6$s) = a.hex)), h.has) END ORDER BY a.n), '{}')
            FROM (SELECT u.*, encode(u.token_key, 'hex') AS hex FROM unnest($1, $2, $3, $4) WITH ORDINALITY AS u (environment, topic, token, token_key, n)
                  OFFSET 0) AS a
            CROSS JOIN LATERAL (
                SELECT bool_or(NOT %1$s) AS has FROM %2$s AS r
                WHERE %3$s AND %4$s = coalesce(a.environment, 'production') AND %5$s = a.topic
                  AND (%6$s = a.hex OR tokenkeeper.parse_token(%6$s) = a.hex)) AS h);
END
$body$, pieces ->> 'out', attached, spelled[1], pieces ->> 'environment', pieces ->> 'topic', pieces ->> 'token', spelled[2]);
    called := format('%s.tokenkeeper_has_%s(text[], text[], text[], bytea[])', place, source_id);
    RETURN NEXT format('CREATE ' || 'FUNCTION %s RETURNS boolean[] LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp '
                       'SET enable_seqscan = off SET jit = off AS %L', called, body);
    RETURN NEXT format('GRANT EXECUTE ON FUNCTION %s TO %s', called, ours);

    details := concat_ws(' AND ', CASE WHEN pieces ->> 'user' <> 'NULL::text' THEN format('%s = a.user_id COLLATE "C"', pieces ->> 'user') END,
                         CASE WHEN pieces ->> 'tags' <> 'NULL::text[]' THEN format('%s = a.tags::text[] COLLATE "C"', pieces ->> 'tags') END);
    IF details <> '' THEN
        body := format($body$BEGIN
    RETURN (SELECT coalesce(array_agg(%3$s OR %4$s ORDER BY a.n), '{}')
            FROM (SELECT u.*, encode(u.token_key, 'hex') AS hex
                  FROM unnest($1, $2, $3, $4, $5, $6) WITH ORDINALITY AS u (environment, topic, token, token_key, user_id, tags, n) OFFSET 0) AS a);
END
$body$, NULL, NULL, found_row[1], found_row[2])
        FROM (SELECT array_agg(format($row$EXISTS (
                SELECT FROM %1$s AS r
                WHERE %2$s AND NOT %3$s AND %4$s = coalesce(a.environment, 'production') AND %5$s = a.topic
                  AND (%6$s = a.hex OR tokenkeeper.parse_token(%6$s) = a.hex) AND %7$s)$row$,
                attached, s.condition, pieces ->> 'out', pieces ->> 'environment', pieces ->> 'topic', pieces ->> 'token', details) ORDER BY s.n) AS found_row
              FROM unnest(spelled) WITH ORDINALITY AS s (condition, n)) AS s;
        called := format('%s.tokenkeeper_agrees_%s(text[], text[], text[], bytea[], text[], text[])', place, source_id);
        RETURN NEXT format('CREATE ' || 'FUNCTION %s RETURNS boolean[] LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp '
                           'SET enable_seqscan = off SET jit = off AS %L', called, body);
        RETURN NEXT format('GRANT EXECUTE ON FUNCTION %s TO %s', called, ours);
    END IF;

    IF cardinality(keys) > 0 THEN
        SELECT CASE WHEN count(*) = 1 THEN min(format('r.%I::text', k.name))
                    ELSE 'jsonb_build_array(' || string_agg(format('r.%I::text', k.name), ', ' ORDER BY k.n) || ')::text' END,
               string_agg(format('r.%I', k.name), ', ' ORDER BY k.n),
               CASE WHEN count(*) = 1 THEN min(format('$1::%s', format_type(a.atttypid, a.atttypmod)))
                    ELSE string_agg(format('($1::jsonb ->> %s)::%s', k.n - 1, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY k.n) END
        INTO key_text, key_list, key_after
        FROM unnest(keys) WITH ORDINALITY AS k (name, n)
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = attached AND a.attname = k.name COLLATE "C";
        selected := format('SELECT %s, %s, %s, %s, greatest(%s, ''epoch''), %s, %s, %s, %s, %s FROM %s AS r', key_text, pieces ->> 'environment',
                           pieces ->> 'topic', pieces ->> 'token', pieces ->> 'moment', pieces ->> 'device', pieces ->> 'user', pieces ->> 'tags',
                           pieces ->> 'out', pieces ->> 'stale_at', attached);
        body := format('BEGIN' || chr(10) || '    IF $1 IS NULL THEN' || chr(10) || '        RETURN QUERY %1$s ORDER BY %2$s LIMIT $2;' || chr(10)
            || '    ELSE' || chr(10) || '        RETURN QUERY %1$s WHERE (%2$s) > (%3$s) ORDER BY %2$s LIMIT $2;' || chr(10) || '    END IF;' || chr(10) || 'END',
            selected, key_list, key_after);
        called := format('%s.tokenkeeper_read_%s', place, source_id);
        RETURN NEXT format('CREATE ' || 'FUNCTION %s(text, integer) RETURNS TABLE (key text, environment text, topic text, token text, registered_at timestamptz, '
            'device_id text, user_id text, tags text[], unregistered boolean, stale_at timestamptz) LANGUAGE plpgsql STABLE SECURITY DEFINER '
            -- The next session may read the key with another DateStyle.
            'SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET datestyle = ''ISO, MDY'' AS %L', called, body);
        RETURN NEXT format('GRANT EXECUTE ON FUNCTION %s(text, integer) TO %s', called, ours);
    END IF;

    IF row_level THEN
        RETURN NEXT format('CREATE TRIGGER tokenkeeper_insert_%s AFTER INSERT ON %s FOR EACH ROW EXECUTE FUNCTION %s.tokenkeeper_insert_%1$s()',
                           source_id, attached, place);
    ELSE
        RETURN NEXT format('CREATE TRIGGER tokenkeeper_insert_%s AFTER INSERT ON %s REFERENCING NEW TABLE AS changed_rows FOR EACH STATEMENT '
                           'EXECUTE FUNCTION %s.tokenkeeper_insert_%1$s()', source_id, attached, place);
    END IF;
    -- A statement that names none of the columns fires nothing. But a BEFORE trigger may change what the statement does not name; then the condition has to
    -- keep changes of other columns away from the function. It is parsed anew for each statement: with seven columns, that costs as much as the function.
    RETURN NEXT format('CREATE TRIGGER tokenkeeper_update_%s AFTER UPDATE%s ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s.tokenkeeper_update_%1$s()',
                       source_id, CASE WHEN compares THEN '' ELSE
                           (SELECT ' OF ' || string_agg(quote_ident(c.name), ', ') FROM unnest(columns) AS c (name)) END,
                       attached, CASE WHEN compares THEN tokenkeeper.changed_column_test(attached, columns) ELSE 'OLD OPERATOR(pg_catalog.*<>) NEW' END, place);
    IF plan ->> 'on_delete' = 'unregister' THEN
        RETURN NEXT format('CREATE TRIGGER tokenkeeper_delete_%s AFTER DELETE ON %s %s EXECUTE FUNCTION %s.tokenkeeper_delete_%1$s()', source_id, attached,
                           CASE WHEN row_level THEN 'FOR EACH ROW' ELSE 'REFERENCING OLD TABLE AS changed_rows FOR EACH STATEMENT' END, place);
    END IF;
    IF always THEN
        FOREACH kind IN ARRAY kinds LOOP
            RETURN NEXT format('ALTER TABLE %s ENABLE ALWAYS TRIGGER tokenkeeper_%s_%s', attached, kind, source_id);
        END LOOP;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_statements(regclass, text, jsonb) IS
    'What attach executes: the generated functions and triggers. Raises 22023 for a plan that attach has not made.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.attachment_statements(regclass, text, jsonb) FROM PUBLIC;
