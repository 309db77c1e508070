-- What attach generates: the triggers and their functions, and the function by which a backfill reads rows. They belong to the owner of the table.
--
-- Which instants the generated triggers queue, and why, is in docs/decisions/attachments.md. In short:
--
--   A registration counts from the column registered_at. If the write has set it, and it is less than a minute old, it counts from the moment of the
--   write: a logout earlier in the same transaction was recorded with clock_timestamp(), and now() is older than that. A null counts from 1970.
--   A logout counts from the moment of the write. Of a row that is inserted logged out, from registered_at: the earliest instant that suppresses.
--   No logout is queued if another registered row has the token, in the same topic and environment. The trigger looks for one after the statement, by
--   the index on the token, and does not see what other transactions have not committed.
--
-- The pieces of SQL refer to a row that is called r: NEW or OLD of a trigger, a transition table or the table. The UPDATE trigger also has the pieces for
-- OLD, which is called old_row there, and each trigger those for other rows of the table, which are called other_row.

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

CREATE OR REPLACE FUNCTION tokenkeeper.other_row_test(attached regclass, plan jsonb, environment text, topic text, token text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- OFFSET 0 makes it a look-up for each row, and no join with the whole table. Upper and lower case of hex are the same token.
    SELECT format('EXISTS (SELECT FROM %s AS other_row WHERE %s AND lower(%s COLLATE "C") = lower(%s) AND (%s COLLATE "C") = %s AND (%s COLLATE "C") = %s '
                  'AND NOT %s OFFSET 0)',
                  attached,
                  CASE o.pieces ->> 'token_kind' WHEN 'bytea' THEN format('other_row.%I = decode(%s, %L)', c.name, token, 'hex')
                       ELSE format('other_row.%I ', c.name) || format(tokenkeeper.token_index_operator(attached, c.name), format('ARRAY[%1$s, lower(%1$s), upper(%1$s)]', token)) END,
                  o.pieces ->> 'token', token, o.pieces ->> 'environment', environment, o.pieces ->> 'topic', topic, o.pieces ->> 'out')
    FROM (SELECT plan -> 'other_pieces') AS o (pieces) CROSS JOIN (SELECT plan -> 'columns' ->> 0) AS c (name)
$$;
COMMENT ON FUNCTION tokenkeeper.other_row_test(regclass, jsonb, text, text, text) IS
    'The condition that a registered row of an attached table has a token. environment, topic and token are SQL.';

CREATE OR REPLACE FUNCTION tokenkeeper.update_statements(source_id text, attached regclass, plan jsonb) RETURNS text
LANGUAGE sql STABLE
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
                -- The row no longer has the old token.
                PERFORM tokenkeeper.check_attached_name(%19$L, TG_RELID);
                IF NOT %17$s THEN
                    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
                    VALUES (%11$s, %13$s, %14$s, clock_timestamp(), true, %1$s);
                END IF;
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
                    PERFORM tokenkeeper.check_attached_name(%19$L, TG_RELID);
                    IF NOT %18$s THEN
                        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
                        VALUES (%5$s, %4$s, %3$s,
                            CASE WHEN %16$s OR (%14$s <> '') IS NOT TRUE THEN greatest(%6$s, 'epoch') ELSE clock_timestamp() END, true, %1$s);
                    END IF;
                END IF;
            END IF;
        END IF;
$body$, source_id, NULL, in_bytes.new ->> 'token', in_bytes.new ->> 'topic', in_bytes.new ->> 'environment', p.new ->> 'moment',
        in_bytes.new ->> 'device', p.new ->> 'user', p.new ->> 'tags', p.new ->> 'out', in_bytes.old ->> 'environment', p.old ->> 'moment',
        in_bytes.old ->> 'topic', in_bytes.old ->> 'token', plan ->> 'same_device', p.old ->> 'out',
        tokenkeeper.other_row_test(attached, plan, in_bytes.old ->> 'environment', in_bytes.old ->> 'topic', in_bytes.old ->> 'token'),
        tokenkeeper.other_row_test(attached, plan, in_bytes.new ->> 'environment', in_bytes.new ->> 'topic', in_bytes.new ->> 'token'), attached)
    FROM (SELECT plan -> 'pieces', plan -> 'old_pieces') AS p (new, old)
    CROSS JOIN LATERAL (
        SELECT (SELECT jsonb_object_agg(e.key, format('(%s COLLATE "C")', e.value)) FROM jsonb_each_text(p.new) AS e),
               (SELECT jsonb_object_agg(e.key, format('(%s COLLATE "C")', e.value)) FROM jsonb_each_text(p.old) AS e)) AS in_bytes (new, old)
$$;
COMMENT ON FUNCTION tokenkeeper.update_statements(text, regclass, jsonb) IS
    'What the generated trigger function of an UPDATE does. In the plan, pieces refer to NEW, old_pieces to OLD, and other_pieces to other rows; same_device is '
    'the condition for NEW and OLD having the same device, if both have an instant.';

CREATE OR REPLACE FUNCTION tokenkeeper.trigger_body(kind text, source_id text, attached regclass, plan jsonb, row_level boolean, changed text[]) RETURNS text
LANGUAGE plpgsql STABLE
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
    BEGIN
$head$ || CASE WHEN changed IS NULL THEN '' ELSE $head$        IF (%1$s) IS NOT TRUE THEN
            IF (%2$s) IS NOT TRUE THEN
                RETURN NULL;
            END IF;
        END IF;
$head$ END;
    -- The provider's write never fails because of this function. If even the failure cannot be noted, the server's log has it. No message: it may quote a row.
    tail text := $tail$    EXCEPTION WHEN OTHERS THEN
        DECLARE
            failed_state text := SQLSTATE;
            failed_constraint text;
        BEGIN
            GET STACKED DIAGNOSTICS failed_constraint = CONSTRAINT_NAME;
            PERFORM tokenkeeper.note_attachment_failure(%1$s, failed_state, failed_constraint);
        EXCEPTION WHEN OTHERS THEN
            RAISE LOG 'tokenkeeper: a change of %% was not queued, and this could not be noted: %% %%', %2$L, failed_state, failed_constraint;
        END;
    END;
    RETURN NULL;
END
$tail$;
BEGIN
    RETURN format(declared || head, changed[1], changed[2])
        || CASE kind WHEN 'update' THEN tokenkeeper.update_statements(source_id, attached, plan)
        ELSE format(CASE kind WHEN 'insert' THEN $body$        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered,
            source_id)
        SELECT n.environment, n.topic, n.token,
               CASE WHEN n.moment > clock_timestamp() - interval '1 minute' THEN clock_timestamp() ELSE greatest(n.moment, 'epoch') END,
               n.device_id, n.user_id, n.tags, false, %1$s
        FROM (SELECT %5$s AS environment, %4$s AS topic, %3$s AS token, %6$s AS moment, %7$s AS device_id, %8$s AS user_id, %9$s AS tags, %10$s AS out
              $body$ || source || $body$) AS n
        WHERE n.token <> '' AND NOT n.out;
$body$ || CASE pieces ->> 'out' WHEN 'false' THEN '' ELSE $body$        IF EXISTS (SELECT FROM (SELECT %3$s AS token, %10$s AS out $body$ || source || $body$) AS n WHERE n.token <> '' AND n.out) THEN
            -- Logged-out rows.
            PERFORM tokenkeeper.check_attached_name(%12$L, TG_RELID);
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
            SELECT n.environment, n.topic, n.token, greatest(n.moment, 'epoch'), true, %1$s
            FROM (SELECT %5$s AS environment, %4$s AS topic, %3$s AS token, %6$s AS moment, %10$s AS out $body$ || source || $body$) AS n
            WHERE n.token <> '' AND n.out AND NOT %11$s;
        END IF;
$body$ END ELSE $body$        PERFORM tokenkeeper.check_attached_name(%12$L, TG_RELID);
        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
        SELECT n.environment, n.topic, n.token, clock_timestamp(), true, %1$s
        FROM (SELECT %5$s AS environment, %4$s AS topic, %3$s AS token, %10$s AS out $body$ || source || $body$) AS n
        WHERE n.token <> '' AND NOT n.out AND NOT %11$s;
$body$ END, source_id, NULL, pieces ->> 'token', pieces ->> 'topic', pieces ->> 'environment', pieces ->> 'moment',
            pieces ->> 'device', pieces ->> 'user', pieces ->> 'tags', pieces ->> 'out',
            tokenkeeper.other_row_test(attached, plan, '(n.environment COLLATE "C")', '(n.topic COLLATE "C")', '(n.token COLLATE "C")'), attached) END
        || format(tail, source_id, attached);
END
$$;
COMMENT ON FUNCTION tokenkeeper.trigger_body(text, text, regclass, jsonb, boolean, text[]) IS
    'The body of a generated trigger function of an attachment: insert, update or delete. row_level is false if it reads a transition table. changed has '
    'two conditions, of which one is true if there is something to do, the usual one first; null if the trigger has them.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_attachment_plan(attached regclass, plan jsonb) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = attached AND c.relkind IN ('r', 'p')) THEN
        RAISE EXCEPTION '% is no table', coalesce(attached::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (jsonb_typeof(plan -> 'pieces') = 'object' AND jsonb_typeof(plan -> 'old_pieces') = 'object'
        AND jsonb_typeof(plan -> 'other_pieces') = 'object'
        AND plan -> 'pieces' ?& ARRAY['token', 'token_kind', 'topic', 'environment', 'moment', 'device', 'user', 'tags', 'out', 'stale_at']
        AND plan -> 'old_pieces' ?& ARRAY['token', 'topic', 'environment', 'moment', 'out']
        AND plan -> 'other_pieces' ?& ARRAY['token', 'topic', 'environment', 'out'] AND jsonb_typeof(plan -> 'same_device') = 'string'
        AND jsonb_typeof(plan -> 'columns') = 'array' AND jsonb_typeof(plan -> 'key_columns') = 'array' AND jsonb_typeof(plan -> 'arguments') = 'object'
        AND jsonb_typeof(plan -> 'always') = 'boolean' AND plan ->> 'on_delete' IN ('ignore', 'unregister')
        AND plan ->> 'revive' IN ('by registered_at', 'by register only')) IS NOT TRUE THEN
        RAISE EXCEPTION 'plan is none that attach has made' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
    -- A table has at most 1600 columns. More would make each check of the daemon take long.
    IF jsonb_array_length(plan -> 'columns') > 1600 OR jsonb_array_length(plan -> 'key_columns') > 1600 THEN
        RAISE EXCEPTION 'plan names more columns than a table can have' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
    IF EXISTS (
        SELECT FROM jsonb_array_elements_text((plan -> 'columns') || (plan -> 'key_columns')) AS c (name)
        WHERE tokenkeeper.column_kind(attached, c.name) IS NULL) OR jsonb_array_length(plan -> 'columns') = 0 THEN
        RAISE EXCEPTION 'plan names no column, or one that % has not', attached USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_attachment_plan(regclass, jsonb) IS 'Raises 22023 unless the plan may be one that attach has made for the table.';

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_statements(attached regclass, source_id text, plan jsonb) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_catalog.pg_class;
    place text;
    pieces jsonb := plan -> 'pieces';
    always boolean;
    row_level boolean;
    keys text[];
    columns text[];
    kinds text[] := ARRAY['insert', 'update'];
    kind text;
    called text;
    body text;
    selected text;
    key_text text;
    key_list text;
    key_after text;
    usual text[];
    changed text[];
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
                           tokenkeeper.trigger_body(kind, source_id, attached, plan, row_level OR kind = 'update',
                                                    CASE WHEN kind = 'update' AND NOT compares THEN changed END));
    END LOOP;

    IF cardinality(keys) > 0 THEN
        SELECT CASE WHEN count(*) = 1 THEN min(format('r.%I::text', k.name))
                    ELSE 'jsonb_build_array(' || string_agg(format('r.%I::text', k.name), ', ' ORDER BY k.n) || ')::text' END,
               string_agg(format('r.%I', k.name), ', ' ORDER BY k.n),
               CASE WHEN count(*) = 1 THEN min(format('$1::%s', format_type(a.atttypid, a.atttypmod)))
                    ELSE string_agg(format('($1::jsonb ->> %s)::%s', k.n - 1, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY k.n) END
        INTO key_text, key_list, key_after
        FROM unnest(keys) WITH ORDINALITY AS k (name, n)
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = attached AND a.attname = k.name COLLATE "C";
        selected := format('SELECT %s, %s, %s, CASE WHEN NOT (%s AND %s) THEN %s END, greatest(%s, ''epoch''), %s, %s, %s, %s, %s FROM %s AS r', key_text,
                           pieces ->> 'environment', pieces ->> 'topic', pieces ->> 'out',
                           tokenkeeper.other_row_test(attached, plan, format('(%s COLLATE "C")', pieces ->> 'environment'),
                                                      format('(%s COLLATE "C")', pieces ->> 'topic'), format('(%s COLLATE "C")', pieces ->> 'token')),
                           pieces ->> 'token', pieces ->> 'moment', pieces ->> 'device', pieces ->> 'user', pieces ->> 'tags',
                           pieces ->> 'out', pieces ->> 'stale_at', attached);
        body := format('BEGIN' || chr(10) || '    IF $1 IS NULL THEN' || chr(10) || '        RETURN QUERY %1$s ORDER BY %2$s LIMIT $2;' || chr(10)
            || '    ELSE' || chr(10) || '        RETURN QUERY %1$s WHERE (%2$s) > (%3$s) ORDER BY %2$s LIMIT $2;' || chr(10) || '    END IF;' || chr(10) || 'END',
            selected, key_list, key_after);
        called := format('%s.tokenkeeper_read_%s', place, source_id);
        RETURN NEXT format('CREATE ' || 'FUNCTION %s(text, integer) RETURNS TABLE (key text, environment text, topic text, token text, registered_at timestamptz, '
            'device_id text, user_id text, tags text[], unregistered boolean, stale_at timestamptz) LANGUAGE plpgsql STABLE '
            -- The next session may read the key with another DateStyle.
            'SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET datestyle = ''ISO, MDY'' AS %L', called, body);
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
