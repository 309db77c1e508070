-- How attach reads the expressions of a table's owner, with the owner's rights: as a view of the owner shows them.
CREATE OR REPLACE FUNCTION tokenkeeper.expression_fault(tree text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN tree COLLATE "C" ~ ':hasSubLinks true' THEN 'it has a subquery; write what depends on another table into a column, or call register or unregister from the application'
        WHEN tree COLLATE "C" ~ ':hasAggs true' THEN 'it has an aggregate, and each row is read alone'
        WHEN tree COLLATE "C" ~ ':hasWindowFuncs true' THEN 'it has a window function, and each row is read alone'
        WHEN tree COLLATE "C" ~ ':hasTargetSRFs true' THEN 'it returns a set, expected one value'
        WHEN tree COLLATE "C" ~ ':varattno 0 ' THEN 'it refers to the whole row, expected columns'
        WHEN tree COLLATE "C" ~ ':varattno -' THEN 'it refers to a system column, which a trigger does not see'
        WHEN tree COLLATE "C" ~ '{NEXTVALUEEXPR' THEN 'it takes a number from a sequence'
        -- Many of PostgreSQL's own are stable because of a session's settings, which are fixed here.
        ELSE (SELECT format('it calls %s, which %s not immutable: it may return something else for the same row, or read another table, whose changes fire no trigger here',
                            string_agg(DISTINCT p.proname, ', '), CASE WHEN count(DISTINCT p.proname) = 1 THEN 'is' ELSE 'are' END)
              FROM regexp_matches(tree COLLATE "C", ':(?:funcid|opfuncid|hashfuncid|negfuncid) ([0-9]+)', 'g') AS m
              JOIN pg_proc AS p ON p.oid = m[1]::oid
               AND (p.provolatile = 'v' OR p.provolatile = 's' AND p.pronamespace NOT IN ('pg_catalog'::regnamespace, 'tokenkeeper'::regnamespace))
              HAVING count(*) > 0) END
$$;
COMMENT ON FUNCTION tokenkeeper.expression_fault(text) IS
    'Internal: why a trigger cannot evaluate an expression; null if it can. tree is the rule of a view with the expression.';

-- PostgreSQL prints IS DISTINCT FROM, NULLIF and CASE x WHEN without their operators. Read again, they must be the same.
CREATE OR REPLACE FUNCTION tokenkeeper.operators_in(tree text) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN (SELECT string_agg(m[1], ' ' ORDER BY n) FROM regexp_matches(tree COLLATE "C", ':(?:opno|funcid|opnos) [(]?o? ?([0-9 ]+)', 'g') WITH ORDINALITY AS u (m, n));
COMMENT ON FUNCTION tokenkeeper.operators_in(text) IS 'Internal: the operators and functions of the rule of a view, in order.';

CREATE OR REPLACE FUNCTION tokenkeeper.read_expression(
    attached regclass, expression text, OUT meant text, OUT sql text, OUT old_sql text, OUT type regtype, OUT collation_name text, OUT columns text[], OUT tree text,
    OUT fault text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Whatever collation the text comes with.
    said CONSTANT text COLLATE "C" := expression;
    row_name text COLLATE "C";
    source text COLLATE "C";
    looking refcursor;
    printed text COLLATE "C";
    rest text COLLATE "C";
BEGIN
    -- A text that equals the name of a column is that column.
    meant := coalesce((SELECT quote_ident(a.attname) FROM pg_attribute AS a
                       WHERE a.attrelid = attached AND a.attname = said AND a.attnum > 0 AND NOT a.attisdropped), said);
    -- Names in it are looked up in the schema of the table. Not in public, where others may be able to create functions.
    PERFORM set_config('search_path', format('pg_catalog, %I, pg_temp', n.nspname), true)
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row'] LOOP
        -- With two tables, a view shows each column with the name of its table. A cursor takes one statement only.
        source := format(' AS tokenkeeper_expression FROM %s AS %I CROSS JOIN (SELECT) AS nothing', attached, row_name);
        OPEN looking FOR EXECUTE 'SELECT (' || meant || chr(10) || ')' || source || ' LIMIT 0';
        CLOSE looking;
        EXECUTE format('CREATE TEMPORARY VIEW tokenkeeper_%s AS SELECT (', row_name) || meant || chr(10) || ')' || source;
        EXECUTE format('CREATE TEMPORARY VIEW tokenkeeper_true_%s AS SELECT true', row_name) || source;
    END LOOP;
    PERFORM set_config('search_path', 'pg_catalog', true);
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row'] LOOP
        rest := substring(pg_get_viewdef(format('pg_temp.tokenkeeper_true_%s', row_name)::regclass, 0) FROM ' AS tokenkeeper_expression.*$');
        printed := pg_get_viewdef(format('pg_temp.tokenkeeper_%s', row_name)::regclass, 0);
        IF printed ~ '^ *SELECT[[:space:]]' AND right(printed, length(rest)) = rest THEN
            printed := '(' || regexp_replace(left(printed, -length(rest)), '^ *SELECT[[:space:]]+', '') || ')';
            sql := CASE row_name WHEN 'r' THEN printed ELSE sql END;
            old_sql := printed;
        END IF;
    END LOOP;
    SELECT r.ev_action::text INTO tree FROM pg_rewrite AS r WHERE r.ev_class = 'pg_temp.tokenkeeper_r'::regclass;
    fault := tokenkeeper.expression_fault(tree);
    SELECT a.atttypid, quote_ident(n.nspname) || '.' || quote_ident(c.collname) INTO type, collation_name
    FROM pg_attribute AS a LEFT JOIN pg_collation AS c ON c.oid = a.attcollation LEFT JOIN pg_namespace AS n ON n.oid = c.collnamespace
    WHERE a.attrelid = 'pg_temp.tokenkeeper_r'::regclass AND a.attnum = 1;
    SELECT array_agg(a.attname::text ORDER BY a.attnum) INTO columns
    FROM pg_depend AS d
    JOIN pg_rewrite AS r ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND r.ev_class = 'pg_temp.tokenkeeper_r'::regclass
    JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
    WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = attached AND d.refobjsubid > 0;
    IF sql IS NULL AND fault IS NULL THEN
        fault := 'expected one SQL expression over the columns of the row';
    ELSIF fault IS NULL THEN
        EXECUTE format('CREATE TEMPORARY VIEW tokenkeeper_again AS SELECT %s AS tokenkeeper_expression FROM %s AS r CROSS JOIN (SELECT) AS nothing', sql, attached);
        IF (SELECT tokenkeeper.operators_in(r.ev_action::text) FROM pg_rewrite AS r WHERE r.ev_class = 'pg_temp.tokenkeeper_again'::regclass)
            IS DISTINCT FROM tokenkeeper.operators_in(tree) THEN
            fault := 'it compares values of an extension''s type by IS DISTINCT FROM, NULLIF or CASE; cast them, such as lower(column::text)';
        END IF;
        DROP VIEW pg_temp.tokenkeeper_again;
    END IF;
    DROP VIEW pg_temp.tokenkeeper_r, pg_temp.tokenkeeper_old_row, pg_temp.tokenkeeper_true_r, pg_temp.tokenkeeper_true_old_row;
EXCEPTION
    WHEN undefined_column OR undefined_table THEN
        fault := SQLERRM || coalesce(
            (SELECT '; the table has ' || string_agg(quote_ident(a.attname), ', ') FROM pg_attribute AS a
             WHERE a.attrelid = attached AND lower(a.attname COLLATE "C") = lower(coalesce(substring(SQLERRM COLLATE "C" FROM '"(?:[^".]*[.])?([^".]+)"'), btrim(said, '"'))) AND a.attnum > 0 AND NOT a.attisdropped),
            CASE WHEN said ~ '^[A-Za-z0-9_]+[.][A-Za-z0-9_]+$' THEN '; a column is written without its table' ELSE '' END
            || CASE WHEN said ~ '^[A-Za-z0-9._-]+$' THEN '; a constant is written as in SQL: ' || quote_literal(quote_literal(said)) ELSE '' END);
    WHEN insufficient_privilege OR feature_not_supported OR syntax_error_or_access_rule_violation OR data_exception OR invalid_cursor_definition THEN
        fault := SQLERRM;
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_expression(regclass, text) IS
    'Internal: reads an expression over the columns of a table, with the rights of its caller: as PostgreSQL prints it for rows called r and old_row, with '
    'qualified names; its type, collation and columns; and its parse tree. meant is the text, or the quoted name of the column; fault is what is wrong with '
    'it.';

CREATE OR REPLACE FUNCTION tokenkeeper.base_type(type regtype) RETURNS regtype
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE base AS (
        SELECT t.oid, t.typtype, t.typbasetype FROM pg_type AS t WHERE t.oid = type
        UNION ALL
        SELECT t.oid, t.typtype, t.typbasetype FROM base AS b JOIN pg_type AS t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
    )
    SELECT b.oid::regtype FROM base AS b WHERE b.typtype <> 'd'
$$;
COMMENT ON FUNCTION tokenkeeper.base_type(regtype) IS 'Internal: the type itself, or the type below all domains.';

CREATE OR REPLACE FUNCTION tokenkeeper.as_fact(fact text, expression text, type regtype) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format(CASE
            WHEN fact = 'token' AND b.typcategory = 'S' OR fact IN ('topic', 'environment') AND b.typcategory IN ('S', 'E')
                OR fact IN ('device_id', 'user_id') AND b.typtype IN ('b', 'e') AND b.typcategory NOT IN ('A') AND b.typname NOT IN ('json', 'jsonb')
                THEN '%s::text'
            WHEN fact = 'token' AND b.oid = 'bytea'::regtype THEN 'encode(%s::bytea, ''hex'')'
            WHEN fact = 'registered_at' AND b.oid = 'timestamptz'::regtype THEN '%s::timestamptz'
            WHEN fact IN ('filter', 'logged_out') AND b.oid = 'boolean'::regtype THEN '%s::boolean'
            WHEN fact = 'tags' AND b.typcategory = 'A' AND (SELECT e.typcategory FROM pg_type AS e WHERE e.oid = b.typelem) IN ('S', 'E') THEN '%s::text[]'
            WHEN fact = 'tags' AND b.oid IN ('json'::regtype, 'jsonb'::regtype) THEN 'tokenkeeper.tags_of(%s::jsonb)'
            WHEN fact = 'tags' AND b.typcategory = 'S' THEN 'CASE WHEN %1$s <> '''' THEN ARRAY[%1$s::text] END'
        END, expression)
    FROM pg_type AS b WHERE b.oid = tokenkeeper.base_type(type)
$$;
COMMENT ON FUNCTION tokenkeeper.as_fact(text, text, regtype) IS
    'Internal: an expression of a type as the SQL of a fact (token, topic, environment, registered_at, device_id, user_id, tags, filter, logged_out); null '
    'if it cannot be one.';

CREATE OR REPLACE FUNCTION tokenkeeper.type_fault(fact text, given text, type regtype) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format('is of type %s, expected ', type) || CASE
    WHEN fact = 'registered_at' AND type::text LIKE 'timestamp%without time zone' THEN
        CASE WHEN given COLLATE "C" ~* 'at time zone' THEN 'timestamptz. If the column is timestamptz already, write it without AT TIME ZONE'
             ELSE format('timestamptz. If these are times of UTC, write $$%s AT TIME ZONE ''UTC''$$', given) END
    WHEN fact = 'registered_at' AND type IN ('bigint'::regtype, 'integer'::regtype, 'numeric'::regtype, 'double precision'::regtype) THEN
        format('timestamptz. If these are milliseconds since 1970, write $$to_timestamp((%1$s) / 1000.0)$$, and for seconds $$to_timestamp(%1$s)$$', given)
    WHEN fact = 'registered_at' AND type = 'date'::regtype THEN format('timestamptz. Write $$(%s)::timestamp AT TIME ZONE ''UTC''$$', given)
    WHEN fact = 'registered_at' THEN format('timestamptz. If these are times as ISO 8601 writes them, write $$(%s)::timestamptz$$', given)
    WHEN fact = 'environment' AND type = 'boolean'::regtype THEN format('text. Write $$CASE WHEN %s THEN ''sandbox'' ELSE ''production'' END$$', given)
    WHEN fact IN ('topic', 'environment') THEN format('text. If it is the number of an app, write $$CASE %s WHEN 1 THEN %L END$$', given,
        CASE fact WHEN 'topic' THEN 'com.example.app' ELSE 'production' END)
    WHEN fact = 'token' THEN 'text or bytea'
    WHEN fact IN ('filter', 'logged_out') THEN 'boolean, such as ' || (
        SELECT format(CASE b.typcategory WHEN 'N' THEN '$$%s <> 0$$' WHEN 'D' THEN '$$%s IS NOT NULL$$' ELSE '$$%s = ''revoked''$$' END, given)
        FROM pg_type AS b WHERE b.oid = tokenkeeper.base_type(type))
    WHEN fact = 'tags' THEN 'text[], or a JSON array'
    ELSE 'one value' END;
COMMENT ON FUNCTION tokenkeeper.type_fault(text, text, regtype) IS
    'Internal: the message about an expression whose type as_fact refuses. given is the text of the owner.';

CREATE OR REPLACE FUNCTION tokenkeeper.tags_of(tags jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN CASE jsonb_typeof(tags) WHEN 'array' THEN ARRAY(SELECT jsonb_array_elements_text(tags)) END;
COMMENT ON FUNCTION tokenkeeper.tags_of(jsonb) IS 'Internal: the elements of a JSON array as tags; null for anything else.';
