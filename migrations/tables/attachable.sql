-- Looking at a table of the provider: its columns and their types, its indexes and keys, what is in the way of attaching it, and what has broken since.
--
-- Locks: parse_row_expression takes ACCESS SHARE on the table. check_attachments locks the free rows of attached_table, and reads only catalogs.

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

CREATE OR REPLACE FUNCTION tokenkeeper.parse_row_expression(attached regclass, expression text, OUT sql jsonb, OUT columns text[], OUT fault text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    looking refcursor;
    kind regtype;
    row_name text;
BEGIN
    -- Names in it are looked up in the schema of the table. Not in public, where others may be able to create functions.
    PERFORM set_config('search_path', format('pg_catalog, %I, pg_temp', n.nspname), true)
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    -- A cursor takes one statement only.
    OPEN looking FOR EXECUTE format('SELECT (%s' || chr(10) || ') FROM %s AS r LIMIT 0', expression, attached);
    CLOSE looking;
    EXECUTE format('CREATE TEMPORARY TABLE tokenkeeper_row (LIKE %s)', attached);
    -- An index takes what a trigger can evaluate: no subquery, no aggregate, nothing but the row. And it knows the columns.
    EXECUTE format('CREATE INDEX tokenkeeper_row_expression ON pg_temp.tokenkeeper_row ((%s' || chr(10) || '))', expression);
    -- With two tables, a view shows each column with the name of its table.
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row', 'other_row'] LOOP
        EXECUTE format('CREATE TEMPORARY VIEW %I AS SELECT (%s' || chr(10) || ') AS tokenkeeper_expression '
                       'FROM pg_temp.tokenkeeper_row AS %I CROSS JOIN (SELECT) AS nothing', 'tokenkeeper_view_' || row_name, expression, row_name);
    END LOOP;
    PERFORM set_config('search_path', 'pg_catalog', true);
    SELECT a.atttypid INTO kind FROM pg_catalog.pg_attribute AS a WHERE a.attrelid = 'pg_temp.tokenkeeper_view_r'::regclass AND a.attnum = 1;
    sql := '{}';
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row', 'other_row'] LOOP
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
    'Reads a boolean expression over the columns of a table: as SQL over rows called r, old_row and other_row, with all names qualified, and the '
    'columns that it uses. fault says what is wrong with it.';

CREATE OR REPLACE FUNCTION tokenkeeper.token_index_operator(attached regclass, token text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- The operator, the type and the collation of the index: with others it would not be used, and the arguments of a function bring their own.
    -- The type without a length: character alone would be character(1).
    SELECT format('OPERATOR(%I.%s) ANY (%%s::%s[]%s)', n.nspname, o.oprname, format_type(k.opcintype, -1),
                  (SELECT format(' COLLATE %I.%I', s.nspname, c.collname) FROM pg_collation AS c
                   JOIN pg_namespace AS s ON s.oid = c.collnamespace WHERE c.oid = i.indcollation[0]))
    FROM pg_index AS i
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    JOIN pg_opclass AS k ON k.oid = i.indclass[0]
    JOIN pg_am AS m ON m.oid = k.opcmethod AND m.amname IN ('btree', 'hash')
    JOIN pg_amop AS p ON p.amopfamily = k.opcfamily AND p.amoplefttype = k.opcintype AND p.amoprighttype = k.opcintype
                     AND p.amopstrategy = CASE m.amname WHEN 'btree' THEN 3 ELSE 1 END
    JOIN pg_operator AS o ON o.oid = p.amopopr
    JOIN pg_namespace AS n ON n.oid = o.oprnamespace
    WHERE i.indrelid = attached AND a.attname = token COLLATE "C" AND i.indisvalid
      AND (i.indpred IS NULL OR pg_get_expr(i.indpred, i.indrelid) = format('(%I IS NOT NULL)', token) COLLATE "C")
    ORDER BY k.opcdefault DESC, i.indexrelid LIMIT 1
$$;
COMMENT ON FUNCTION tokenkeeper.token_index_operator(regclass, text) IS
    'The comparison that an index on the token column of a table can answer, with %s in place of the array of tokens; null if there is no such index.';

CREATE OR REPLACE FUNCTION tokenkeeper.has_before_update(attached regclass) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- Not by pg_partition_tree, which waits for a lock that somebody has on a partition.
    WITH RECURSIVE part AS (
        SELECT attached::oid AS relid
        UNION
        SELECT i.inhrelid FROM part AS p JOIN pg_inherits AS i ON i.inhparent = p.relid
    )
    -- Bits of tgtype: 1 is row-level, 2 BEFORE, 16 UPDATE.
    SELECT EXISTS (SELECT FROM part AS p JOIN pg_trigger AS t ON t.tgrelid = p.relid WHERE t.tgtype & 19 = 19)
$$;
COMMENT ON FUNCTION tokenkeeper.has_before_update(regclass) IS
    'Whether a table, or a partition of it, has a row-level BEFORE UPDATE trigger, which may change columns that a statement does not name.';

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_findings(attached regclass, token text, always boolean) RETURNS TABLE (kind text, detail text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_catalog.pg_class;
    place text;
    table_owner name;
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
    IF NOT has_schema_privilege(this.relowner, 'tokenkeeper', 'USAGE')
        OR NOT has_column_privilege(this.relowner, 'tokenkeeper.registration', 'source_id', 'INSERT') THEN
        detail := format('%s cannot write to tokenkeeper.registration. Run: GRANT tokenkeeper_app TO %I;', table_owner, table_owner);
        RETURN NEXT;
    END IF;
    IF EXISTS (SELECT FROM tokenkeeper.attachment AS a WHERE a.table_id = attached) THEN
        detail := format('%s is attached already: run SELECT tokenkeeper.detach(%L) first', attached, attached);
        RETURN NEXT;
    ELSIF EXISTS (SELECT FROM tokenkeeper.attachment AS a WHERE a.name = (place || '.' || quote_ident(this.relname)) COLLATE "C") THEN
        -- A backfill finds the attachment by this name.
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

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_fault(source_id bigint) RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
    found_table pg_catalog.pg_class;
    wanted text[] := ARRAY['insert', 'update'];
    problem text;
BEGIN
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = attachment_fault.source_id;
    SELECT c.* INTO found_table FROM pg_catalog.pg_class AS c WHERE c.oid = this.table_id;
    IF NOT FOUND THEN
        RETURN 'the table was dropped';
    END IF;
    IF this.on_delete = 'unregister' THEN
        wanted := wanted || 'delete'::text;
    END IF;
    SELECT string_agg(w.kind, ', ' ORDER BY w.n) INTO problem FROM unnest(wanted) WITH ORDINALITY AS w (kind, n)
    WHERE NOT EXISTS (
        SELECT FROM pg_catalog.pg_trigger AS t
        WHERE t.tgrelid = this.table_id AND t.tgname = 'tokenkeeper_' || w.kind || '_' || this.source_id
          AND t.tgenabled = CASE WHEN this.always THEN 'A' ELSE 'O' END::"char");
    IF problem IS NOT NULL THEN
        RETURN 'a trigger is disabled or missing: ' || problem;
    END IF;
    SELECT string_agg(p.proname, ', ' ORDER BY p.proname) INTO problem
    FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = this.table_id AND t.tgname = ANY (ARRAY(SELECT 'tokenkeeper_' || w.kind || '_' || this.source_id FROM unnest(wanted) AS w (kind)))
      AND (NOT p.prosecdef OR p.proowner <> found_table.relowner);
    IF problem IS NOT NULL THEN
        RETURN 'a function is not SECURITY DEFINER, or belongs to another role than the table: ' || problem || '; detach the table and attach it again';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(this.columns || this.key_columns) AS c (name) WHERE tokenkeeper.column_kind(this.table_id, c.name) IS NULL) THEN
        RETURN 'a column has another name now, of these: ' || array_to_string(this.columns || this.key_columns, ', ')
            || '; detach the table and attach it again';
    END IF;
    RETURN CASE
        WHEN NOT has_schema_privilege(found_table.relowner, 'tokenkeeper', 'USAGE')
            OR NOT has_column_privilege(found_table.relowner, 'tokenkeeper.registration', 'source_id', 'INSERT')
            OR NOT has_function_privilege(found_table.relowner, 'tokenkeeper.parse_token(text, boolean)', 'EXECUTE') THEN
            'the table''s owner ' || pg_get_userbyid(found_table.relowner) || ' lacks the rights of tokenkeeper_app'
        -- The generated functions know both by name.
        WHEN this.name <> format('%I.%I', (SELECT n.nspname FROM pg_catalog.pg_namespace AS n WHERE n.oid = found_table.relnamespace), found_table.relname) THEN
            'the table has another name now: ' || this.table_id || '; detach it and attach it again'
        WHEN tokenkeeper.has_before_update(this.table_id) AND EXISTS (
            SELECT FROM pg_catalog.pg_trigger AS t
            WHERE t.tgrelid = this.table_id AND t.tgname = 'tokenkeeper_update_' || this.source_id AND t.tgattr::text <> '') THEN
            'the table has a BEFORE UPDATE trigger now, whose changes may be missed: detach the table and attach it again'
        WHEN found_table.relispartition THEN 'the table has become a partition: attach the partitioned table'
        WHEN found_table.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhparent = this.table_id) THEN
            'tables inherit from it, and their rows fire none of its triggers: attach each of them'
        -- The triggers look for other rows with a token.
        WHEN found_table.relforcerowsecurity THEN 'row-level security is forced, so its triggers cannot see all rows'
        WHEN NOT EXISTS (
            SELECT FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_attribute AS n ON n.attrelid = i.indrelid AND n.attnum = i.indkey[0]
            WHERE i.indrelid = this.table_id AND i.indisvalid AND n.attname = this.columns[1] COLLATE "C") THEN
            'the index on ' || quote_ident(this.columns[1]) || ' is missing, so each logout reads the whole table'
    END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_fault(bigint) IS
    'Why changes of an attached table do not arrive, or cost too much, in words; null if all is well. Reads the catalogs only.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_attachments()
RETURNS TABLE (source_id bigint, name text, fault text, was text, failures bigint, failure text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
BEGIN
    FOR this IN SELECT a.* FROM tokenkeeper.attached_table AS a ORDER BY a.source_id FOR NO KEY UPDATE SKIP LOCKED LOOP
        source_id := this.source_id;
        name := this.name;
        was := this.fault;
        fault := tokenkeeper.attachment_fault(this.source_id);
        WITH gone AS (
            DELETE FROM tokenkeeper.attachment_failure AS f WHERE f.source_id = this.source_id RETURNING f.*
        )
        SELECT count(*), (array_agg(concat_ws(' ', g.state, g.constraint_name) ORDER BY g.failed_at DESC))[1] INTO failures, failure FROM gone AS g;
        CONTINUE WHEN fault IS NOT DISTINCT FROM was AND failures = 0;
        UPDATE tokenkeeper.attached_table AS a
        SET fault = check_attachments.fault,
            fault_since = CASE WHEN check_attachments.fault IS NOT NULL THEN coalesce(a.fault_since, clock_timestamp()) END,
            failures = a.failures + check_attachments.failures,
            failed_at = CASE WHEN check_attachments.failures > 0 THEN clock_timestamp() ELSE a.failed_at END,
            failure = coalesce(check_attachments.failure, a.failure)
        WHERE a.source_id = this.source_id;
        RETURN NEXT;
    END LOOP;
    DELETE FROM tokenkeeper.attachment_failure AS f
    WHERE NOT EXISTS (SELECT FROM tokenkeeper.attached_table AS a WHERE a.source_id = f.source_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_attachments() IS
    'Looks whether the changes of the attached tables arrive, and notes faults and failures in attached_table. Returns the attachments whose fault has '
    'changed (was is the former one), or whose triggers could not queue changes since the last call (failures, and the last error).';
