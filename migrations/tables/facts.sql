-- The facts of a row of an attached table, as SQL (type fact): what the ledger is to know of it.
--
-- A row without a token, one that the filter leaves out and one that is logged out have none. The pieces of SQL refer to a row that is called r: NEW, a transition table or the table;
-- those of an UPDATE's old row to old_row.

CREATE OR REPLACE FUNCTION tokenkeeper.read_facts(
    attached regclass, arguments jsonb, OUT facts jsonb, OUT old_facts jsonb, OUT columns text[], OUT faults text[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    fact text;
    given text;
    one record;
BEGIN
    facts := '{}';
    old_facts := '{}';
    faults := '{}';
    columns := '{}';
    FOREACH fact IN ARRAY ARRAY['token', 'topic', 'environment', 'registered_at', 'device_id', 'user_id', 'tags', 'filter', 'logged_out'] LOOP
        given := arguments ->> fact;
        CONTINUE WHEN given IS NULL;
        one := tokenkeeper.read_expression(attached, given);
        IF one.fault IS NULL AND tokenkeeper.as_fact(fact, one.sql, one.type) IS NULL THEN
            one.fault := tokenkeeper.type_fault(fact, one.meant, one.type);
        END IF;
        IF one.fault IS NULL AND fact = 'registered_at' AND (one.tree COLLATE "C" ~ '{SQLVALUEFUNCTION' OR EXISTS (
            SELECT FROM regexp_matches(one.tree COLLATE "C", ':funcid ([0-9]+)', 'g') AS m JOIN pg_proc AS p ON p.oid = m[1]::oid
            WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname IN ('now', 'transaction_timestamp', 'statement_timestamp'))) THEN
            one.fault := 'it depends on the time of the write, so each save would make a dead token active; if there is no such column, leave registered_at out';
        END IF;
        IF one.fault IS NOT NULL THEN
            faults := faults || format('%s: %s: %s', fact, quote_literal(given), one.fault);
            CONTINUE;
        END IF;
        IF fact IN ('topic', 'environment') AND one.columns IS NULL THEN
            -- A constant, usually.
            BEGIN
                EXECUTE 'SELECT ' || tokenkeeper.as_fact(fact, one.sql, one.type) INTO given;
                given := CASE fact WHEN 'topic' THEN tokenkeeper.topic_fault(given) ELSE tokenkeeper.environment_fault(coalesce(given, 'null')) END;
            EXCEPTION WHEN data_exception THEN
                given := SQLERRM;
            END;
            IF given IS NOT NULL THEN
                faults := faults || format('%s: %s', fact, given);
                CONTINUE;
            END IF;
        END IF;
        facts := facts || jsonb_build_object(fact, tokenkeeper.as_fact(fact, one.sql, one.type));
        old_facts := old_facts || jsonb_build_object(fact, tokenkeeper.as_fact(fact, one.old_sql, one.type));
        columns := columns || one.columns;
        IF fact = 'token' THEN
            facts := facts || jsonb_build_object('look_up', tokenkeeper.token_look_up(one.sql, one.type, one.collation_name),
                'token_column', CASE WHEN one.sql = format('(r.%I)', one.columns[1]) THEN one.columns[1] END);
        END IF;
    END LOOP;
    columns := ARRAY(SELECT DISTINCT c FROM unnest(columns) AS c WHERE c IS NOT NULL ORDER BY c);
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_facts(regclass, jsonb) IS
    'Internal: reads the expressions given to attach, with the rights of its caller: the SQL of each fact for rows called r and old_row (look_up: how a row '
    'is found by its token), their columns, and what is wrong with them.';

CREATE OR REPLACE FUNCTION tokenkeeper.token_look_up(sql text, type regtype, collation_name text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    -- Upper and lower case of hex are the same token. The comparison is that of an index on the expression. The type without a length: character alone would
    -- be character(1). A percent sign of the expression is none of format.
    SELECT replace(sql COLLATE "C", '%', '%%') || CASE WHEN b.oid = 'bytea'::regtype THEN ' = decode(%2$s, ''hex'')'
        ELSE format(' OPERATOR(%I.%s) ANY (ARRAY[%%1$s, lower(%%1$s), upper(%%1$s), %%2$s, upper(%%2$s)]::%s[]%s)', n.nspname, o.oprname, format_type(k.opcintype, -1),
                    ' COLLATE ' || collation_name) END
    FROM pg_type AS b
    JOIN pg_opclass AS k ON k.opcdefault AND k.opcintype = CASE WHEN b.oid = 'varchar'::regtype THEN 'text'::regtype ELSE b.oid END
    JOIN pg_am AS m ON m.oid = k.opcmethod AND m.amname = 'btree'
    JOIN pg_amop AS p ON p.amopfamily = k.opcfamily AND p.amoplefttype = k.opcintype AND p.amoprighttype = k.opcintype AND p.amopstrategy = 3
    JOIN pg_operator AS o ON o.oid = p.amopopr
    JOIN pg_namespace AS n ON n.oid = o.oprnamespace
    WHERE b.oid = tokenkeeper.base_type(type)
$$;
COMMENT ON FUNCTION tokenkeeper.token_look_up(text, regtype, text) IS
    'Internal: the condition that a row spells its token like a text (%1$s) or in hex (%2$s), for an index on the expression of the token.';

CREATE OR REPLACE FUNCTION tokenkeeper.fact_list(facts jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN concat_ws(', ',
    -- Not null, which would mean production.
    'coalesce(' || (facts ->> 'environment') || ', ''null'') COLLATE "C"', (facts ->> 'topic') || ' COLLATE "C"',
    format('coalesce(tokenkeeper.parse_token(%1$s), %1$s) COLLATE "C"', facts ->> 'token'),
    coalesce('coalesce(greatest(' || (facts ->> 'registered_at') || ', ''epoch''), ''epoch'')', '''epoch''::timestamptz'),
    -- A null in the table says that there is none.
    coalesce('coalesce(' || (facts ->> 'device_id') || ', '''') COLLATE "C"', 'NULL::text COLLATE "C"'),
    coalesce('coalesce(' || (facts ->> 'user_id') || ', '''') COLLATE "C"', 'NULL::text COLLATE "C"'),
    coalesce('coalesce(' || (facts ->> 'tags') || ', ''{}'') COLLATE "C"', 'NULL::text[] COLLATE "C"'));
COMMENT ON FUNCTION tokenkeeper.fact_list(jsonb) IS
    'Internal: the columns of a fact as SQL, from the SQL of each: environment, topic, token, registered_at, device, user, tags.';

CREATE OR REPLACE FUNCTION tokenkeeper.fact_test(facts jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN concat_ws(' AND ', (facts ->> 'token') || ' <> ''''', (facts ->> 'filter') || ' IS TRUE', (facts ->> 'logged_out') || ' IS NOT TRUE');
COMMENT ON FUNCTION tokenkeeper.fact_test(jsonb) IS 'Internal: the condition that a row has facts, as SQL.';

CREATE OR REPLACE FUNCTION tokenkeeper.logged_out_test(facts jsonb) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN concat_ws(' AND ', (facts ->> 'token') || ' <> ''''', (facts ->> 'filter') || ' IS TRUE', coalesce((facts ->> 'logged_out') || ' IS TRUE', 'false'));
COMMENT ON FUNCTION tokenkeeper.logged_out_test(jsonb) IS 'Internal: the condition that a row has a token and is logged out, as SQL.';

CREATE OR REPLACE FUNCTION tokenkeeper.fact_columns() RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN 'environment, topic, token, registered_at, device_id, user_id, tags';
COMMENT ON FUNCTION tokenkeeper.fact_columns() IS 'Internal: the names of the columns of a fact, in the order of fact_list.';

CREATE OR REPLACE FUNCTION tokenkeeper.other_row(attached text, facts jsonb, spelled text, token text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format('SELECT %s FROM %s AS r WHERE %s AND %s', tokenkeeper.fact_list(facts), attached, format(facts ->> 'look_up', spelled, token), tokenkeeper.fact_test(facts));
COMMENT ON FUNCTION tokenkeeper.other_row(text, jsonb, text, text) IS
    'Internal: a query for the facts of the rows of an attached table that spell their token like a text or in hex (both SQL), by the index on the token.';

CREATE OR REPLACE FUNCTION tokenkeeper.key_columns(attached regclass) RETURNS text[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN ARRAY(
    SELECT a.attname::text FROM (
        SELECT i.* FROM pg_index AS i
        WHERE i.indrelid = attached AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
          AND NOT EXISTS (SELECT FROM pg_attribute AS n WHERE n.attrelid = i.indrelid AND n.attnum = ANY (i.indkey) AND NOT n.attnotnull)
          -- The type of an extension is compared otherwise where its schema is not in the path.
          AND NOT EXISTS (SELECT FROM pg_attribute AS n JOIN pg_type AS t ON t.oid = n.atttypid
                          WHERE n.attrelid = i.indrelid AND n.attnum = ANY (i.indkey) AND t.typtype = 'b' AND t.typnamespace <> 'pg_catalog'::regnamespace)
        ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid LIMIT 1) AS i
    CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, n)
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number
    WHERE k.n <= i.indnkeyatts ORDER BY k.n);
COMMENT ON FUNCTION tokenkeeper.key_columns(regclass) IS
    'Internal: the columns of the primary key of a table, or of another unique key without nulls. Empty if it has none, or only with types of extensions.';

CREATE OR REPLACE FUNCTION tokenkeeper.key_text(keys text[]) RETURNS text
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN CASE cardinality(keys) WHEN 0 THEN 'NULL::text' WHEN 1 THEN format('r.%I::text', keys[1])
    ELSE (SELECT 'jsonb_build_array(' || string_agg(format('r.%I::text', k), ', ' ORDER BY n) || ')::text' FROM unnest(keys) WITH ORDINALITY AS u (k, n)) END;
COMMENT ON FUNCTION tokenkeeper.key_text(text[]) IS 'Internal: the key of a row called r as one text, as SQL; of several columns, a JSON array.';
