-- attach and detach: they run with the rights of the table's owner, and what they generate belongs to this owner.
--
-- Which instants the generated triggers queue, and why, is in docs/decisions/attachments.md. In short:
--
--   A registration counts from the column registered_at. If the write has set it, and it is less than a minute old, it counts from the moment of the
--   write: a logout earlier in the same transaction was recorded with clock_timestamp(), and now() is older than that. A null counts from 1970.
--   A logout counts from the moment of the write. Of a row that is inserted logged out, from registered_at: the earliest instant that suppresses.
--
-- The pieces of SQL (attached_table.token_sql and so on) refer to a row that is called r: NEW or OLD of a trigger, a transition table or the table. The UPDATE
-- trigger also has the pieces for OLD, which is called old_row there.

CREATE OR REPLACE FUNCTION tokenkeeper.parse_row_expression(attached regclass, expression text, OUT sql jsonb, OUT columns text[], OUT fault text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    looking refcursor;
    kind regtype;
    row_name text;
BEGIN
    -- Names in it are looked up in the schema of the table, then in public.
    PERFORM set_config('search_path', format('pg_catalog, %I, public, pg_temp', n.nspname), true)
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    -- A cursor takes one statement only.
    OPEN looking FOR EXECUTE format('SELECT (%s' || chr(10) || ') FROM %s AS r LIMIT 0', expression, attached);
    CLOSE looking;
    EXECUTE format('CREATE TEMPORARY TABLE tokenkeeper_row (LIKE %s)', attached);
    -- An index takes what a trigger can evaluate: no subquery, no aggregate, nothing but the row. And it knows the columns.
    EXECUTE format('CREATE INDEX tokenkeeper_row_expression ON pg_temp.tokenkeeper_row ((%s' || chr(10) || '))', expression);
    -- With two tables, a view shows each column with the name of its table.
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row'] LOOP
        EXECUTE format('CREATE TEMPORARY VIEW %I AS SELECT (%s' || chr(10) || ') AS tokenkeeper_expression '
                       'FROM pg_temp.tokenkeeper_row AS %I CROSS JOIN (SELECT) AS nothing', 'tokenkeeper_view_' || row_name, expression, row_name);
    END LOOP;
    PERFORM set_config('search_path', 'pg_catalog', true);
    SELECT a.atttypid INTO kind FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = 'pg_temp.tokenkeeper_view_r'::regclass AND a.attnum = 1;
    sql := '{}';
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row'] LOOP
        sql := sql || jsonb_build_object(row_name, '(' || substring(pg_get_viewdef(format('pg_temp.%I', 'tokenkeeper_view_' || row_name)::regclass, 0)
                                                                    FROM '^ *SELECT (.*) AS tokenkeeper_expression[[:space:]]+FROM ') || ')');
        EXECUTE format('DROP VIEW pg_temp.%I', 'tokenkeeper_view_' || row_name);
    END LOOP;
    SELECT array_agg(a.attname::text ORDER BY a.attnum) INTO columns
    FROM pg_catalog.pg_depend AS d
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
    WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = 'pg_temp.tokenkeeper_row_expression'::regclass
      AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = 'pg_temp.tokenkeeper_row'::regclass AND d.refobjsubid > 0;
    DROP TABLE pg_temp.tokenkeeper_row;
    fault := CASE
        WHEN kind <> 'boolean'::regtype THEN 'it is of type ' || kind || ', expected boolean'
        WHEN columns IS NULL THEN 'it refers to no column'
        WHEN sql ->> 'r' IS NULL THEN 'it cannot be read back' END;
EXCEPTION
    WHEN insufficient_privilege THEN
        fault := SQLERRM;
    WHEN feature_not_supported OR grouping_error OR windowing_error THEN
        fault := 'expected one boolean expression over the columns of the row, without a subquery or an aggregate';
    WHEN invalid_object_definition THEN
        fault := 'expected an immutable expression: one that depends on the columns of the row only, not on the time or on a setting';
    WHEN syntax_error_or_access_rule_violation OR data_exception OR invalid_cursor_definition THEN
        fault := SQLERRM;
END
$$;
COMMENT ON FUNCTION tokenkeeper.parse_row_expression(regclass, text) IS
    'Reads a boolean expression over the columns of a table: as SQL over a row called r, and over one called old_row, with all names qualified, and the '
    'columns that it uses. fault says what is wrong with it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.parse_row_expression(regclass, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.column_kind(attached regclass, name text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE base AS (
        SELECT t.* FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
        WHERE a.attrelid = attached AND a.attname = name COLLATE "C" AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT t.* FROM base AS b JOIN pg_type AS t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
    )
    SELECT CASE
        WHEN b.typcategory = 'S' THEN 'text'
        WHEN b.typcategory = 'A' AND (SELECT e.typcategory FROM pg_type AS e WHERE e.oid = b.typelem) = 'S' THEN 'text[]'
        WHEN b.typcategory = 'E' THEN 'enum'
        WHEN b.oid IN ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype) THEN 'integer'
        ELSE b.oid::regtype::text END
    FROM base AS b WHERE b.typtype <> 'd'
$$;
COMMENT ON FUNCTION tokenkeeper.column_kind(regclass, text) IS
    'What a column can be used for: text, text[], enum, integer, or the name of its type (of a domain, its base type). Null if there is no such column.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.column_kind(regclass, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_findings(attached regclass, token text, always boolean) RETURNS TABLE (kind text, detail text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_catalog.pg_class;
    place text;
    table_owner name;
    ours name := (SELECT pg_get_userbyid(n.nspowner) FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper');
BEGIN
    SELECT c.* INTO this FROM pg_catalog.pg_class AS c WHERE c.oid = attached;
    place := this.relnamespace::regnamespace::text;
    table_owner := pg_get_userbyid(this.relowner);
    kind := 'error';
    IF this.relkind NOT IN ('r', 'p') THEN
        detail := format('%s is a %s, expected a table', attached, CASE this.relkind WHEN 'v' THEN 'view: attach the table behind it'
            WHEN 'm' THEN 'materialized view: attach the table behind it' WHEN 'f' THEN 'foreign table: attach it where it is stored' ELSE 'relation' END);
        RETURN NEXT;
        RETURN;
    END IF;
    IF this.relpersistence = 't' THEN
        detail := format('%s is a temporary table, which no other session sees', attached);
        RETURN NEXT;
    END IF;
    IF this.relispartition THEN
        detail := format('%s is a partition: attach the partitioned table %s', attached,
                         (SELECT i.inhparent::regclass FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = attached));
        RETURN NEXT;
    ELSIF this.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhparent = attached) THEN
        detail := format('tables inherit from %s, and their rows fire none of its triggers: attach each of them instead', attached);
        RETURN NEXT;
    END IF;
    IF this.relforcerowsecurity THEN
        detail := format('row-level security is forced on %s, so its owner would not see all rows', attached);
        RETURN NEXT;
    END IF;
    IF NOT pg_has_role(current_user, this.relowner, 'USAGE') THEN
        detail := format('%s belongs to %s, and you are %s: attach it as its owner', attached, table_owner, current_user);
        RETURN NEXT;
    END IF;
    IF NOT has_schema_privilege(this.relowner, this.relnamespace, 'CREATE') THEN
        detail := format('%s cannot create functions in schema %s. Run: GRANT CREATE ON SCHEMA %s TO %I;', table_owner, place, place, table_owner);
        RETURN NEXT;
    END IF;
    IF NOT has_schema_privilege(ours, this.relnamespace, 'USAGE') THEN
        detail := format('%s, the owner of the schema tokenkeeper, cannot use schema %s. Run: GRANT USAGE ON SCHEMA %s TO %I;', ours, place, place, ours);
        RETURN NEXT;
    END IF;
    IF NOT has_schema_privilege(this.relowner, 'tokenkeeper', 'USAGE')
        OR NOT has_column_privilege(this.relowner, 'tokenkeeper.registration', 'source_id', 'INSERT') THEN
        detail := format('%s cannot write to tokenkeeper.registration. Run: GRANT tokenkeeper_app TO %I;', table_owner, table_owner);
        RETURN NEXT;
    END IF;
    IF EXISTS (SELECT FROM tokenkeeper.attachment AS a WHERE a.table_id = attached) THEN
        detail := format('%s is attached already: run SELECT tokenkeeper.detach(%L) first', attached, attached);
        RETURN NEXT;
    ELSIF EXISTS (SELECT FROM tokenkeeper.attachment AS a WHERE a.name = (place || '.' || quote_ident(this.relname)) COLLATE "C") THEN
        -- Backfills and reconciliations find the attachment by this name.
        detail := format('another table was attached under the name %1$s.%2$I, and was dropped or renamed: run SELECT tokenkeeper.detach(%3$L) first',
                         place, this.relname, format('%s.%I', place, this.relname));
        RETURN NEXT;
    END IF;
    IF tokenkeeper.column_kind(attached, token) IS NOT NULL AND tokenkeeper.token_index_operator(attached, token) IS NULL THEN
        detail := format('%s has no index that finds a row by its token. Run: CREATE INDEX %s ON %s (%I);', attached,
                         CASE this.relkind WHEN 'r' THEN 'CONCURRENTLY' ELSE '' END, attached, token);
        RETURN NEXT;
    END IF;
    kind := 'warning';
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.oid = this.relowner) THEN
        detail := format('%s belongs to the superuser %s, so the generated functions run with all rights', attached, table_owner);
        RETURN NEXT;
    END IF;
    IF this.relpersistence = 'u' THEN
        detail := format('%s is unlogged: after a crash it is empty', attached);
        RETURN NEXT;
    END IF;
    IF NOT always AND EXISTS (SELECT FROM pg_catalog.pg_subscription_rel AS s WHERE s.srrelid = attached) THEN
        detail := format('%s is in a subscription: what logical replication applies fires the triggers only with always => true', attached);
        RETURN NEXT;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_findings(regclass, text, boolean) IS
    'What is in the way of attaching a table (error), or worth knowing (warning), apart from its columns.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.attachment_findings(regclass, text, boolean) FROM PUBLIC;

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

CREATE OR REPLACE FUNCTION tokenkeeper.has_before_update(attached regclass) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- Bits of tgtype: 1 is row-level, 2 BEFORE, 16 UPDATE.
    SELECT EXISTS (SELECT FROM pg_trigger AS t
                   WHERE t.tgtype & 19 = 19 AND (t.tgrelid = attached OR t.tgrelid IN (SELECT p.relid FROM pg_partition_tree(attached) AS p)))
$$;
COMMENT ON FUNCTION tokenkeeper.has_before_update(regclass) IS
    'Whether a table, or a partition of it, has a row-level BEFORE UPDATE trigger, which may change columns that a statement does not name.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.has_before_update(regclass) FROM PUBLIC;

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

CREATE OR REPLACE FUNCTION tokenkeeper.begin_attachment(attached regclass, plan jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    table_name text;
    owner_id oid;
    new_source bigint;
BEGIN
    SELECT format('%I.%I', n.nspname, c.relname), c.relowner INTO table_name, owner_id
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    IF owner_id IS NULL OR NOT pg_has_role(session_user, owner_id, 'MEMBER') THEN
        RAISE EXCEPTION '% is no member of the owner of %', session_user, attached USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM tokenkeeper.check_attachment_plan(attached, plan);
    IF EXISTS (SELECT FROM tokenkeeper.attached_table AS a WHERE a.table_id = attached) THEN
        RAISE EXCEPTION '% is attached already', attached USING ERRCODE = 'invalid_parameter_value', HINT = 'Detach it first.';
    END IF;
    INSERT INTO tokenkeeper.registration_source AS s (kind, name) VALUES ('attachment', table_name) RETURNING s.source_id INTO new_source;
    INSERT INTO tokenkeeper.attached_table (source_id, table_id, name, arguments, columns, key_columns, topic_sql, environment_sql, token_sql,
        registered_sql, unregistered_sql, on_delete, revive, always)
    SELECT new_source, attached, table_name, plan -> 'arguments', ARRAY(SELECT jsonb_array_elements_text(plan -> 'columns')),
           ARRAY(SELECT jsonb_array_elements_text(plan -> 'key_columns')), p ->> 'topic', p ->> 'environment', p ->> 'token',
           nullif(p ->> 'moment', 'NULL::timestamptz'), nullif(p ->> 'out', 'false'), plan ->> 'on_delete', plan ->> 'revive', (plan ->> 'always')::boolean
    FROM (SELECT plan -> 'pieces') AS s (p);
    RETURN new_source;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_attachment(regclass, jsonb) IS
    'Internal, for attach: notes an attachment and returns its source_id. Raises 42501 unless the login is a member of the table''s owner, '
    '22023 for a plan that attach has not made, or a table that is attached already.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.begin_attachment(regclass, jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.end_attachment(source_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (
        SELECT FROM tokenkeeper.attached_table AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.table_id
        WHERE a.source_id = end_attachment.source_id AND NOT pg_has_role(session_user, c.relowner, 'MEMBER')) THEN
        RAISE EXCEPTION '% is no member of the table''s owner', session_user USING ERRCODE = 'insufficient_privilege';
    END IF;
    DELETE FROM tokenkeeper.attached_table AS a WHERE a.source_id = end_attachment.source_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no attached table', coalesce(end_attachment.source_id::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM tokenkeeper.token_spelling AS s WHERE s.source_id = end_attachment.source_id;
    UPDATE tokenkeeper.registration_source AS s SET finished_at = clock_timestamp() WHERE s.source_id = end_attachment.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_attachment(bigint) IS
    'Internal, for detach: removes the note of an attachment. Raises 42501 unless the login is a member of the table''s owner, or the table is gone, '
    '22023 if the source is no attached table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.end_attachment(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.attach(
    attached regclass,
    token text,
    topic text DEFAULT NULL,
    topic_value text DEFAULT NULL,
    environment text DEFAULT 'production',
    registered_at text DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    tags text DEFAULT NULL,
    unregistered text DEFAULT NULL,
    stale_at text DEFAULT NULL,
    on_delete text DEFAULT 'ignore',
    revive text DEFAULT NULL,
    always boolean DEFAULT false,
    dry_run boolean DEFAULT false) RETURNS TABLE (kind text, detail text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    errors text[] := '{}';
    warnings text[] := '{}';
    map jsonb;
    environment_column text;
    flag_sql jsonb;
    flag_columns text[];
    flag_fault text;
    row_name text;
    same_device text;
    one record;
    found_kind text;
    pieces jsonb;
    named text[];
    keys text[];
    statements text[];
    statement text COLLATE "C";
    plan jsonb;
    source text;
    table_owner name;
BEGIN
    -- A writer that does not end must not make all others queue up behind this.
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '5s', true);
    END IF;
    FOR one IN SELECT f.* FROM tokenkeeper.attachment_findings(attach.attached, attach.token, attach.always) AS f LOOP
        IF one.kind = 'error' THEN
            errors := errors || one.detail;
        ELSE
            warnings := warnings || one.detail;
        END IF;
    END LOOP;

    -- The environment: a constant, a map, or a column.
    IF attach.environment IN ('production', 'sandbox') THEN
        IF tokenkeeper.column_kind(attach.attached, attach.environment) IS NOT NULL THEN
            warnings := warnings || format('environment is taken as the word %L; for the column of that name, write a map', attach.environment);
        END IF;
    ELSIF ltrim(attach.environment) COLLATE "C" LIKE '{%' THEN
        BEGIN
            map := attach.environment::jsonb;
            environment_column := map ->> 'column';
            map := map - 'column';
            IF environment_column IS NULL OR map = '{}' OR EXISTS (
                SELECT FROM jsonb_each(map) AS m WHERE m.value NOT IN ('"production"', '"sandbox"')) THEN
                errors := errors || format('environment is %s, expected {"column": "NAME", "VALUE": "sandbox", "OTHER VALUE": "production"}', attach.environment);
            END IF;
        EXCEPTION WHEN data_exception THEN
            errors := errors || format('environment is %s, which is not JSON', attach.environment);
        END;
    ELSE
        environment_column := attach.environment;
    END IF;

    FOR one IN
        SELECT v.* FROM (VALUES
            ('token', attach.token, ARRAY['text', 'bytea']),
            ('topic', attach.topic, ARRAY['text', 'enum']),
            ('environment', environment_column, CASE WHEN map IS NULL THEN ARRAY['text', 'enum'] ELSE ARRAY['text', 'enum', 'boolean', 'integer'] END),
            ('registered_at', attach.registered_at, ARRAY['timestamp with time zone', 'timestamp without time zone']),
            ('device_id', attach.device_id, ARRAY['text', 'uuid', 'integer']),
            ('user_id', attach.user_id, ARRAY['text', 'uuid', 'integer']),
            ('tags', attach.tags, ARRAY['text[]', 'text']),
            ('stale_at', attach.stale_at, ARRAY['timestamp with time zone', 'timestamp without time zone']))
            AS v (argument, name, expected)
        WHERE v.name IS NOT NULL
    LOOP
        found_kind := tokenkeeper.column_kind(attach.attached, one.name);
        IF found_kind IS NULL THEN
            errors := errors || format('%s: table %s has no column %s%s', one.argument, attach.attached, quote_literal(one.name), coalesce((
                SELECT format(' (there is %s; names are case-sensitive here)', quote_literal(a.attname)) FROM pg_catalog.pg_attribute AS a
                WHERE a.attrelid = attach.attached AND a.attnum > 0 AND lower(a.attname::text COLLATE "C") = lower(one.name COLLATE "C") LIMIT 1), ''));
        ELSIF NOT found_kind = ANY (one.expected) THEN
            errors := errors || format('%s: column %s is of type %s, expected %s%s', one.argument, quote_literal(one.name), found_kind,
                                       array_to_string(one.expected, ' or '),
                                       CASE WHEN one.argument = 'environment' AND map IS NULL THEN '; or write a map of its values' ELSE '' END);
        ELSIF EXISTS (SELECT FROM pg_catalog.pg_attribute AS a
                      WHERE a.attrelid = attach.attached AND a.attname = one.name COLLATE "C" AND a.attgenerated NOT IN ('', 's')) THEN
            errors := errors || format('%s: column %s is generated when it is read, so triggers do not see it', one.argument, quote_literal(one.name));
        ELSIF found_kind = 'timestamp without time zone' THEN
            warnings := warnings || format('%s: column %s has no time zone and is taken as UTC', one.argument, quote_literal(one.name));
        END IF;
    END LOOP;

    IF attach.token IS NULL THEN
        errors := errors || 'token: expected the column with the device token'::text;
    END IF;
    IF num_nonnulls(attach.topic, attach.topic_value) <> 1 THEN
        errors := errors || 'expected either topic, the column, or topic_value, the apns-topic header of all rows'::text;
    ELSIF octet_length(attach.topic_value) NOT BETWEEN 1 AND 512 THEN
        errors := errors || format('topic_value is %s bytes long, expected 1 to 512', octet_length(attach.topic_value));
    END IF;
    IF attach.on_delete IS NULL OR attach.on_delete NOT IN ('ignore', 'unregister') THEN
        errors := errors || format('on_delete is %s, expected ignore or unregister', coalesce(quote_literal(attach.on_delete), 'null'));
    END IF;
    IF attach.revive IS NOT NULL AND attach.revive <> 'by register only' THEN
        errors := errors || format('revive is %s, expected ''by register only'', or nothing', quote_literal(attach.revive));
    ELSIF attach.revive IS NOT NULL AND attach.registered_at IS NOT NULL THEN
        errors := errors || 'expected either registered_at or revive => ''by register only'', not both'::text;
    ELSIF attach.revive IS NOT NULL AND attach.device_id IS NOT NULL THEN
        errors := errors || 'device_id needs registered_at: without it nothing says which token of a device is the latest. Pass device_id to register'::text;
    ELSIF attach.revive IS NULL AND attach.registered_at IS NULL THEN
        errors := errors || ('registered_at: expected the column that changes when a device registers, and only then. A device that registers the same token '
            'again changes nothing else, so without it no token would become active again. If there is none, let the application call register at each '
            'launch, and attach with revive => ''by register only''')::text;
    ELSIF attach.registered_at COLLATE "C" ~* '(updat|modif|chang|auto_now|mtime|synced)' THEN
        warnings := warnings || format('registered_at: does something else than a registration change column %s? Then any save makes suppressed tokens '
                                       'active again', quote_literal(attach.registered_at));
    END IF;
    IF attach.unregistered IS NOT NULL THEN
        SELECT e.sql, e.columns, e.fault INTO flag_sql, flag_columns, flag_fault
        FROM tokenkeeper.parse_row_expression(attach.attached, attach.unregistered) AS e;
        IF flag_fault IS NOT NULL THEN
            errors := errors || format('unregistered: %s: %s', quote_literal(attach.unregistered), flag_fault);
        END IF;
    END IF;

    keys := ARRAY(
        SELECT a.attname::text FROM (
            SELECT i.* FROM pg_catalog.pg_index AS i
            WHERE i.indrelid = attach.attached AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
              AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute AS n
                              WHERE n.attrelid = i.indrelid AND n.attnum = ANY (i.indkey) AND NOT n.attnotnull)
            ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid LIMIT 1) AS i
        CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, n)
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number
        WHERE k.n <= i.indnkeyatts ORDER BY k.n);
    IF cardinality(keys) = 0 THEN
        warnings := warnings || format('%s has no primary key and no other unique key without nulls: it cannot be backfilled, compared or reconciled',
                                       attach.attached);
    END IF;

    IF cardinality(errors) > 0 THEN
        IF NOT attach.dry_run THEN
            RAISE EXCEPTION 'cannot attach %: %', attach.attached, array_to_string(errors, '; ') USING ERRCODE = 'invalid_parameter_value',
                HINT = 'With dry_run => true, attach shows all that is wrong and changes nothing.';
        END IF;
        RETURN QUERY SELECT 'error', u.e FROM unnest(errors) AS u (e);
        RETURN QUERY SELECT 'warning', u.w FROM unnest(warnings) AS u (w);
        RETURN;
    END IF;

    SELECT coalesce(array_agg(DISTINCT c.name), '{}') INTO named
    FROM unnest(ARRAY[attach.topic, environment_column, attach.registered_at, attach.device_id, attach.user_id, attach.tags]
                || flag_columns) AS c (name)
    WHERE c.name <> attach.token;
    named := attach.token || named;
    pieces := '{}';
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row'] LOOP
        pieces := pieces || jsonb_build_object(row_name, jsonb_build_object(
            'token', CASE tokenkeeper.column_kind(attach.attached, attach.token)
                WHEN 'bytea' THEN format('encode(%s.%I, ''hex'')', row_name, attach.token) ELSE format('%s.%I::text', row_name, attach.token) END,
            'token_kind', tokenkeeper.column_kind(attach.attached, attach.token),
            'topic', CASE WHEN attach.topic IS NULL THEN quote_literal(attach.topic_value) || '::text' ELSE format('%s.%I::text', row_name, attach.topic) END,
            'environment', CASE
                WHEN environment_column IS NULL THEN quote_literal(attach.environment) || '::text'
                -- Not null, which would mean production.
                WHEN map IS NULL THEN format('coalesce(%s.%I::text, ''null'')', row_name, environment_column)
                ELSE (SELECT format('CASE coalesce(%1$s.%2$I::text, ''null'')%3$s ELSE coalesce(%1$s.%2$I::text, ''null'') END', row_name, environment_column,
                                    string_agg(format(' WHEN %L THEN %L', m.key, m.value), '' ORDER BY m.key)) FROM jsonb_each_text(map) AS m) END,
            'moment', CASE coalesce(tokenkeeper.column_kind(attach.attached, attach.registered_at), '')
                WHEN '' THEN 'NULL::timestamptz'
                WHEN 'timestamp without time zone' THEN format('(%s.%I AT TIME ZONE ''UTC'')', row_name, attach.registered_at)
                ELSE format('%s.%I::timestamptz', row_name, attach.registered_at) END,
            -- A null in the table says that there is none. Without an instant, it cannot be said which token of the device is the latest.
            'device', CASE WHEN attach.device_id IS NULL THEN 'NULL::text'
                ELSE format('CASE WHEN %1$s.%2$I IS NOT NULL THEN coalesce(%1$s.%3$I::text, '''') END', row_name, attach.registered_at, attach.device_id) END,
            'user', CASE WHEN attach.user_id IS NULL THEN 'NULL::text' ELSE format('coalesce(%s.%I::text, '''')', row_name, attach.user_id) END,
            'tags', CASE coalesce(tokenkeeper.column_kind(attach.attached, attach.tags), '')
                WHEN '' THEN 'NULL::text[]'
                WHEN 'text' THEN format('CASE WHEN %1$s.%2$I::text <> '''' THEN ARRAY[%1$s.%2$I::text] ELSE ''{}''::text[] END', row_name, attach.tags)
                ELSE format('coalesce(%s.%I::text[], ''{}'')', row_name, attach.tags) END,
            'out', CASE WHEN attach.unregistered IS NULL THEN 'false' ELSE format('(%s IS TRUE)', flag_sql ->> row_name) END,
            'stale_at', CASE coalesce(tokenkeeper.column_kind(attach.attached, attach.stale_at), '')
                WHEN '' THEN 'NULL::timestamptz'
                WHEN 'timestamp without time zone' THEN format('(%s.%I AT TIME ZONE ''UTC'')', row_name, attach.stale_at)
                ELSE format('%s.%I::timestamptz', row_name, attach.stale_at) END));
    END LOOP;
    same_device := CASE
        WHEN attach.device_id IS NULL THEN 'false'
        WHEN tokenkeeper.column_kind(attach.attached, attach.device_id) = 'text'
        THEN format('((r.%1$I::text COLLATE "C") <> '''' AND r.%1$I::text COLLATE "C" = old_row.%1$I::text COLLATE "C")', attach.device_id)
        ELSE format('r.%1$I = old_row.%1$I', attach.device_id) END;
    plan := jsonb_build_object('pieces', pieces -> 'r', 'old_pieces', pieces -> 'old_row', 'same_device', same_device,
        'columns', to_jsonb(named), 'key_columns', to_jsonb(keys), 'on_delete', attach.on_delete,
        'revive', coalesce(attach.revive, 'by registered_at'), 'always', attach.always,
        'arguments', jsonb_strip_nulls(jsonb_build_object('token', attach.token, 'topic', attach.topic, 'topic_value', attach.topic_value,
            'environment', attach.environment, 'registered_at', attach.registered_at, 'device_id', attach.device_id, 'user_id', attach.user_id,
            'tags', attach.tags, 'unregistered', attach.unregistered, 'stale_at', attach.stale_at, 'on_delete', attach.on_delete, 'revive', attach.revive,
            'always', attach.always)));

    RETURN QUERY SELECT 'warning', u.w FROM unnest(warnings) AS u (w);
    source := CASE WHEN attach.dry_run THEN 'N' ELSE tokenkeeper.begin_attachment(attach.attached, plan)::text END;
    SELECT pg_get_userbyid(c.relowner) INTO table_owner FROM pg_catalog.pg_class AS c WHERE c.oid = attach.attached;
    statements := ARRAY(SELECT s FROM tokenkeeper.attachment_statements(attach.attached, source, plan) AS s);
    FOREACH statement IN ARRAY statements LOOP
        IF NOT attach.dry_run THEN
            EXECUTE statement;
            IF statement LIKE 'CREATE ' || 'FUNCTION %' THEN
                statement := substring(statement FROM '^CREATE ' || 'FUNCTION (.*?[)]) RETURNS ');
                EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', statement);
                EXECUTE format('COMMENT ON FUNCTION %s IS %L', statement,
                    format('Generated by tokenkeeper.attach for %s; tokenkeeper.detach removes it.', attach.attached));
                IF current_user <> table_owner COLLATE "C" THEN
                    EXECUTE format('ALTER FUNCTION %s OWNER TO %I', statement, table_owner);
                END IF;
            END IF;
        ELSE
            RETURN QUERY SELECT 'sql', statement;
        END IF;
    END LOOP;
    IF NOT attach.dry_run THEN
        RETURN QUERY SELECT 'attached', format('%s is attached as source %s', attach.attached, source);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attach(regclass, text, text, text, text, text, text, text, text, text, text, text, text, boolean, boolean) IS
    'Connects a table of device tokens to the ledger: from now on its triggers queue what changes in it, as registrations and logouts. token, topic, '
    'registered_at, device_id, user_id, tags and stale_at name columns; topic_value is a topic for all rows; environment is production, sandbox, a column, or a '
    'map such as {"column": "kind", "dev": "sandbox", "live": "production"}; unregistered is a boolean expression over the columns. registered_at must be a '
    'column that changes when a device registers, and only then. on_delete says whether a deleted row is a logout. Run it as the owner of the table. With '
    'dry_run => true it shows what is wrong (error), what to know (warning) and what it would do (sql). It does not read the rows that are there: run a '
    'backfill. Raises 22023 with all errors.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.attach(regclass, text, text, text, text, text, text, text, text, text, text, text, text, boolean, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.detach(attached text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this record;
    one record;
BEGIN
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '5s', true);
    END IF;
    -- By its present name, or by the one that it had: it may have been dropped.
    SELECT a.source_id, a.table_id, a.name INTO this FROM tokenkeeper.attachment AS a WHERE a.source_id = tokenkeeper.attachment_named(detach.attached);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', coalesce(quote_literal(left(detach.attached, 200)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The view tokenkeeper.attachment lists the attached tables.';
    END IF;
    FOR one IN
        SELECT t.tgname FROM pg_catalog.pg_trigger AS t
        WHERE t.tgrelid = this.table_id AND t.tgname IN ('tokenkeeper_insert_' || this.source_id, 'tokenkeeper_update_' || this.source_id,
                                                         'tokenkeeper_delete_' || this.source_id)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', one.tgname, this.table_id);
    END LOOP;
    FOR one IN
        SELECT p.oid::regprocedure AS called, pg_has_role(current_user, p.proowner, 'USAGE') AS is_own, p.proowner::regrole AS function_owner,
               pg_has_role(current_user, n.nspowner, 'USAGE') AS is_in_own_schema
        FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
        WHERE p.proname IN ('tokenkeeper_insert_' || this.source_id, 'tokenkeeper_update_' || this.source_id, 'tokenkeeper_delete_' || this.source_id,
                            'tokenkeeper_has_' || this.source_id, 'tokenkeeper_read_' || this.source_id, 'tokenkeeper_clean_' || this.source_id)
          -- Not those that others happen to have made. But the table may have had another owner.
          AND (pg_has_role(current_user, p.proowner, 'USAGE') OR obj_description(p.oid, 'pg_proc') COLLATE "C" LIKE 'Generated by tokenkeeper.%')
    LOOP
        IF one.is_own OR one.is_in_own_schema THEN
            EXECUTE format('DROP FUNCTION %s', one.called);
        ELSE
            RAISE WARNING 'function % belongs to %, and stays', one.called, one.function_owner USING HINT = 'Drop it as that role.';
        END IF;
    END LOOP;
    PERFORM tokenkeeper.end_attachment(this.source_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.detach(text) IS
    'Undoes attach: drops its triggers and functions and forgets the attachment. What the ledger knows stays, and what is queued is applied. Run it as the '
    'owner of the table; it also works if the table was dropped. Raises 22023 if the table is not attached.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.detach(text) FROM PUBLIC;
