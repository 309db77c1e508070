-- Cleaning of attached tables: the table's owner switches it on (set_cleaning), and a sweep marks or deletes the rows whose token has been stale
-- for long. What touches the table runs in a generated function that belongs to the table's owner (see 24_attachments).

CREATE OR REPLACE FUNCTION tokenkeeper.cascading_keys(attached regclass) RETURNS text[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(format('%I of %s', c.conname, c.conrelid::regclass) ORDER BY c.conrelid::regclass::text, c.conname), '{}')
    FROM pg_catalog.pg_constraint AS c
    WHERE c.confrelid = attached AND c.contype = 'f' AND c.confdeltype IN ('c', 'n', 'd') AND c.conparentid = 0
$$;
COMMENT ON FUNCTION tokenkeeper.cascading_keys(regclass) IS
    'The foreign keys that delete or change rows of other tables when a row of this table is deleted.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.cascading_keys(regclass) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.mark_of(attached regclass, mark_column text, mark_value text, OUT "column" text, OUT value text, OUT marked text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    col pg_attribute;
    is_instant boolean;
BEGIN
    "column" := coalesce(mark_of.mark_column, 'active');
    SELECT a.* INTO col FROM pg_attribute AS a
    WHERE a.attrelid = attached AND a.attname = mark_of."column" COLLATE "C" AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        RAISE EXCEPTION '% has no column %', attached, quote_ident("column")
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the column that marks a row: set_cleaning(..., mark_column => ''...'').';
    END IF;
    IF col.attgenerated <> '' THEN
        RAISE EXCEPTION 'column % of % is generated', quote_ident("column"), attached USING ERRCODE = 'invalid_parameter_value';
    END IF;
    is_instant := col.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype);
    value := coalesce(mark_of.mark_value, CASE
        WHEN is_instant THEN 'now()'
        WHEN col.atttypid = 'boolean'::regtype AND "column" IN ('active', 'is_active', 'enabled', 'is_enabled', 'valid', 'is_valid') THEN 'false' END);
    IF value IS NULL THEN
        RAISE EXCEPTION 'mark_value is null, expected the value that column % of % gets', quote_ident("column"), attached
            USING ERRCODE = 'invalid_parameter_value', HINT = 'An SQL expression: set_cleaning(..., mark_value => ''true'').';
    END IF;
    -- A row that is marked already is left alone. Of an instant, any value is a mark.
    marked := CASE WHEN is_instant THEN format('r.%I IS NOT NULL', "column")
                   ELSE format('r.%I IS NOT DISTINCT FROM (%s)', "column", value) END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.mark_of(regclass, text, text) IS
    'How rows of a table are marked: the column, the SQL expression that it gets, and the condition of a row that is marked already. Raises 22023 for a '
    'column that does not exist, or without a value.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.mark_of(regclass, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.set_cleaning(
    attached regclass,
    mode text DEFAULT 'mark',
    stale_for interval DEFAULT interval '7 days',
    mark_column text DEFAULT NULL,
    mark_value text DEFAULT NULL,
    cascades boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_mode text COLLATE "C" := set_cleaning.mode;
    source bigint := tokenkeeper.attachment_of(attached);
    known record;
    relation text COLLATE "C";
    place text COLLATE "C";
    key text COLLATE "C";
    wanted text COLLATE "C";
    marking text COLLATE "C";
    setting text COLLATE "C";
    marked text COLLATE "C";
    change text COLLATE "C";
    keys text[];
    key_text text COLLATE "C";
    spelled text COLLATE "C";
    one record;
BEGIN
    IF coalesce(of_mode NOT IN ('mark', 'delete', 'off'), true) THEN
        RAISE EXCEPTION 'mode is %, expected ''mark'', ''delete'' or ''off''', coalesce(quote_literal(left(of_mode, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT pg_has_role((SELECT c.relowner FROM pg_class AS c WHERE c.oid = attached), 'USAGE') THEN
        RAISE EXCEPTION 'only the owner of % may have it cleaned', attached USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF of_mode = 'off' THEN
        DELETE FROM tokenkeeper.own_cleaning AS c WHERE c.source_id = source;
        RETURN;
    END IF;
    IF coalesce(set_cleaning.stale_for NOT BETWEEN interval '1 hour' AND interval '3650 days', true) THEN
        RAISE EXCEPTION 'stale_for is %, expected 1 hour to 3650 days', coalesce(set_cleaning.stale_for::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT a.* INTO STRICT known FROM tokenkeeper.own_attachment AS a WHERE a.source_id = source;
    IF known.key_columns = '{}' THEN
        RAISE EXCEPTION '% has no primary key, so its rows cannot be cleaned one by one', attached USING ERRCODE = 'invalid_parameter_value';
    END IF;
    keys := tokenkeeper.cascading_keys(attached);
    IF of_mode = 'delete' AND keys <> '{}' AND NOT coalesce(set_cleaning.cascades, false) THEN
        RAISE EXCEPTION 'deleting rows of % deletes or changes rows of other tables: %', attached, array_to_string(keys, ', ')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use mode => ''mark'', or confirm with cascades => true.';
    END IF;

    SELECT format('%I.%I', n.nspname, c.relname), quote_ident(n.nspname) INTO relation, place
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    SELECT string_agg(format('r.%I = %s::%s', a.attname,
                             CASE WHEN cardinality(known.key_columns) = 1 THEN 'keys[i]' ELSE format('(keys[i]::jsonb ->> %s)', k.n - 1) END,
                             -- -1 and not null: "character" would be one character.
                             format_type(a.atttypid, -1)), ' AND ' ORDER BY k.n),
           CASE WHEN count(*) = 1 THEN min(format('r.%I::text', k.name))
                ELSE 'jsonb_build_array(' || string_agg(format('r.%I::text', k.name), ', ' ORDER BY k.n) || ')::text' END
    INTO key, key_text
    FROM unnest(known.key_columns) WITH ORDINALITY AS k (name, n)
    JOIN pg_attribute AS a ON a.attrelid = attached AND a.attname = k.name COLLATE "C";
    wanted := format('%s AND (%s)::text = tokens[i] AND (%s)::text = topics[i] AND (%s)::text = environments[i]',
                     key, known.token_sql, known.topic_sql, known.environment_sql)
        || coalesce(format(' AND coalesce((%s)::timestamptz <= registered_at[i], true)', known.registered_sql), '');
    IF of_mode = 'mark' THEN
        SELECT m."column", m.value, m.marked INTO marking, setting, marked
        FROM tokenkeeper.mark_of(attached, set_cleaning.mark_column, set_cleaning.mark_value) AS m;
        IF marking = ANY (known.key_columns) THEN
            RAISE EXCEPTION 'column % belongs to the key of %', quote_ident(marking), attached USING ERRCODE = 'invalid_parameter_value';
        END IF;
        wanted := wanted || format(' AND NOT coalesce(%s, false)', marked);
        change := format('UPDATE %s AS r SET %I = (%s) WHERE %s', relation, marking, setting, key);
    ELSE
        change := format('DELETE FROM %s AS r WHERE %s', relation, key);
    END IF;
    -- Check the expressions before they become part of a function.
    BEGIN
        EXECUTE format('SELECT FROM %s AS r WHERE %s LIMIT 0', relation,
                       replace(replace(replace(replace(replace(wanted, 'keys[i]', 'NULL::text'), 'tokens[i]', 'NULL::text'), 'topics[i]', 'NULL::text'),
                                       'environments[i]', 'NULL::text'), 'registered_at[i]', 'NULL::timestamptz'));
        EXECUTE 'EXPLAIN ' || replace(change, 'keys[i]', 'NULL::text');
    EXCEPTION WHEN syntax_error_or_access_rule_violation OR data_exception OR feature_not_supported THEN
        RAISE EXCEPTION 'mark_value is %: %', coalesce(quote_literal(left(set_cleaning.mark_value, 200)), 'null'), SQLERRM
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is an SQL expression of the type of the column.';
    END;
    -- As in the function that says whether the table has a token (25), by the index that attach requires.
    spelled := CASE tokenkeeper.column_kind(attached, known.columns[1]) WHEN 'bytea' THEN format('r.%I = a.token_key', known.columns[1])
                    ELSE format('r.%I ', known.columns[1]) || format(coalesce(tokenkeeper.token_index_operator(attached, known.columns[1]), '= ANY (%s::text[])'),
                                                                     'ARRAY[a.token, a.hex, upper(a.hex), ''<'' || rtrim(regexp_replace(a.hex, ''(.{8})'', chr(92) || ''1 '', ''g''), '' '') || ''>'']') END;
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s.tokenkeeper_find_%s(environments text[], topics text[], tokens text[], token_keys bytea[]) '
        'RETURNS TABLE (n integer, key text, token text) LANGUAGE plpgsql STABLE SECURITY DEFINER '
        'SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off SET datestyle = ''ISO, MDY'' AS %L',
        place, source, format($body$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT a.n::integer, %1$s, %2$s
    FROM (SELECT u.*, encode(u.token_key, 'hex') AS hex FROM unnest($1, $2, $3, $4) WITH ORDINALITY AS u (environment, topic, token, token_key, n) OFFSET 0) AS a
    JOIN %3$s AS r ON %4$s AND %5$s = a.environment AND %6$s = a.topic AND (%2$s = a.hex OR tokenkeeper.parse_token(%2$s) = a.hex)
                   AND NOT coalesce(%7$s, false);
END
$body$, key_text, known.token_sql, relation, spelled, known.environment_sql, known.topic_sql, coalesce(marked, 'false')));
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION %s.tokenkeeper_clean_%s(keys text[], environments text[], topics text[], tokens text[], registered_at timestamptz[], '
        'dry_run boolean) RETURNS TABLE (n integer, old jsonb, error text) LANGUAGE plpgsql SECURITY DEFINER '
        'SET search_path = pg_catalog, pg_temp AS %L',
        place, source, format($body$
#variable_conflict use_variable
BEGIN
    -- Deletes and marks by our own cleanup are not logouts: the triggers of this attachment look at this setting.
    PERFORM set_config('tokenkeeper.cleaning', %4$L, true);
    FOR i IN 1..coalesce(cardinality(keys), 0) LOOP
        n := i;
        error := NULL;
        IF dry_run THEN
            SELECT to_jsonb(r.*) INTO old FROM %1$s AS r WHERE %2$s;
            IF FOUND THEN
                RETURN NEXT;
            END IF;
            CONTINUE;
        END IF;
        BEGIN
            -- It yields to the application: a row that is locked is left for the next sweep.
            SELECT to_jsonb(r.*) INTO old FROM %1$s AS r WHERE %2$s FOR UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            %3$s;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'a trigger of the table has left the row as it was';
            END IF;
            -- Here and not at the commit: there, one row would fail the whole batch, and deferred triggers would run with the daemon's rights.
            SET CONSTRAINTS ALL IMMEDIATE;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                -- Another table is locked. Each further row could wait as long, and the tokens are locked meanwhile.
                old := NULL;
                error := SQLERRM;
                RETURN NEXT;
                EXIT;
            WHEN OTHERS THEN
                -- A foreign key or a trigger: the other rows go on.
                old := NULL;
                error := SQLERRM;
        END;
        RETURN NEXT;
    END LOOP;
    PERFORM set_config('tokenkeeper.cleaning', '', true);
END
$body$, relation, wanted, change, source::text));
    FOR one IN
        SELECT format(f.called, place, source) AS called, f.words
        FROM (VALUES ('%s.tokenkeeper_find_%s(text[], text[], text[], bytea[])', 'finds the rows that have a token and are not marked.'),
                     ('%s.tokenkeeper_clean_%s(text[], text[], text[], text[], timestamptz[], boolean)',
                      'marks or deletes rows whose token is stale, if they still have that token.')) AS f (called, words)
    LOOP
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', one.called, 'Generated by tokenkeeper.set_cleaning: ' || one.words);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', one.called);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', one.called,
                       (SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace AS n WHERE n.nspname = 'tokenkeeper'));
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', one.called, (SELECT pg_get_userbyid(c.relowner) FROM pg_class AS c WHERE c.oid = attached));
    END LOOP;
    DELETE FROM tokenkeeper.own_cleaning AS c WHERE c.source_id = source;
    INSERT INTO tokenkeeper.own_cleaning (source_id, mode, mark_column, mark_value, stale_for, cascades)
    VALUES (source, of_mode, marking, setting, set_cleaning.stale_for, coalesce(set_cleaning.cascades, false));
END
$$;
COMMENT ON FUNCTION tokenkeeper.set_cleaning(regclass, text, interval, text, text, boolean) IS
    'Sets how each sweep cleans an attached table: rows whose token has been stale (a 410) for stale_for are marked, or deleted with mode => ''delete'', '
    'within sweep.prune_allowance and sweep.max_prune_share of the table''s rows. To mark a row, mark_column (active if it exists) is set to the SQL '
    'expression mark_value: false for active, now() for an instant. No row is cleaned while a guard has tripped or far more tokens than usual turn '
    'stale, nor one that has another token or a later registration by then. mode => ''off'' ends it. For the table''s owner. Raises 22023 for a table that is '
    'not attached or has no primary key, for an unknown column, for a mark_value that is no expression of the column''s type, and for delete if a foreign key '
    'cascades, unless confirmed by cascades => true; 42501 for others than the owner.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.set_cleaning(regclass, text, interval, text, text, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.cleaning_obstacle(of_topic integer) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.words FROM (
        SELECT 1 AS place, 'the mass-failure guard of ' || t.topic || ' (' || t.environment || ') has tripped' AS words
        FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id) WHERE g.topic_id = of_topic AND g.tripped_at IS NOT NULL
        UNION ALL
        SELECT 2, 'far more tokens than usual of ' || t.topic || ' (' || t.environment || ') turn stale'
        FROM tokenkeeper.stale_wave AS w JOIN tokenkeeper.topic AS t USING (topic_id) WHERE w.topic_id = of_topic
        UNION ALL
        SELECT 3, '410s of ' || t.topic || ' (' || t.environment || ') are held'
        FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic AND EXISTS (
            SELECT FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND h.cause = 'stale')
        UNION ALL
        SELECT 4, '410s of ' || t.topic || ' (' || t.environment || ') are being undone'
        FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic AND EXISTS (
            SELECT FROM tokenkeeper.exclusion AS e WHERE e.topic_id = of_topic AND e.cause = 'stale' AND e.finished_at IS NULL)) AS o
    ORDER BY o.place LIMIT 1
$$;
COMMENT ON FUNCTION tokenkeeper.cleaning_obstacle(integer) IS
    'Why no row with a token of this topic may be cleaned now; null if nothing is in the way.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.cleaning_obstacle(integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.cleaning_plan(source_id bigint, OUT by_token boolean, OUT rows bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
BEGIN
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = cleaning_plan.source_id;
    -- As the planner estimates them: the rows on a page when it was analyzed, times the pages of now.
    WITH RECURSIVE part AS (
        SELECT this.table_id::oid AS id
        UNION
        SELECT i.inhrelid FROM part AS p JOIN pg_inherits AS i ON i.inhparent = p.id
    )
    SELECT CASE WHEN bool_and(s.pages = 0 OR (c.reltuples >= 0 AND c.relpages > 0))
                THEN sum(CASE WHEN s.pages > 0 THEN c.reltuples::float8 / nullif(c.relpages, 0) * s.pages ELSE 0 END)::bigint END
    INTO rows
    FROM part AS p
    JOIN pg_class AS c ON c.oid = p.id AND c.relkind = 'r'
    CROSS JOIN LATERAL (SELECT pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages) AS s;
    by_token := coalesce((this.rows_read_at IS NOT NULL OR tokenkeeper.column_kind(this.table_id, this.columns[1]) = 'bytea')
                         AND tokenkeeper.reading_fault(this.source_id, 'has') IS NULL AND rows IS NOT NULL, false);
    IF NOT by_token THEN
        rows := NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.cleaning_plan(bigint) IS
    'How a sweep finds the rows of an attached table that are due. by_token: it takes the suppressed tokens of the ledger and looks them up with the index '
    'on the token column; rows is then an estimate of how many rows the table has. Otherwise it has to read all rows: after attach until a backfill or a '
    'comparison has noted how the rows spell their tokens, without statistics of the table, and if the index is missing.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.cleaning_plan(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.is_cleanable(l tokenkeeper.ledger, cutoff timestamptz) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT l.suppressed AND tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at) = 'stale'
       AND l.stale_at < cutoff AND l.suppressed_since < cutoff
       -- The 410 itself must have been received that long ago.
       AND EXISTS (SELECT FROM tokenkeeper.stale_receipt AS s
                   WHERE s.topic_id = l.topic_id AND s.token_key = l.token_key AND s.stale_at >= l.registered_at AND s.queued_at < cutoff)
$$;
COMMENT ON FUNCTION tokenkeeper.is_cleanable(tokenkeeper.ledger, timestamptz) IS
    'Internal: whether a token is stale, and has been since before cutoff.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.is_cleanable(tokenkeeper.ledger, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.stale_rows_by_key(
    source_id bigint, after text, max_rows integer, cutoff timestamptz,
    OUT next text, OUT rows bigint, OUT keys text[], OUT environments text[], OUT topics text[], OUT tokens text[], OUT topic_ids integer[],
    OUT token_keys bytea[], OUT registered timestamptz[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    WITH page AS MATERIALIZED (
        SELECT r.*, row_number() OVER () AS n
        FROM tokenkeeper.read_attachment(stale_rows_by_key.source_id, stale_rows_by_key.after, stale_rows_by_key.max_rows) AS r
    ), known AS MATERIALIZED (
        SELECT p.n, p.key, p.environment, p.topic, p.token, p.token_key, t.topic_id
        FROM page AS p
        CROSS JOIN LATERAL (
            SELECT k.topic_id FROM tokenkeeper.topic AS k
            WHERE k.topic = p.topic COLLATE "C" AND k.environment = p.environment COLLATE "C") AS t
        WHERE p.token_key IS NOT NULL AND p.fault IS NULL
    ), stale AS MATERIALIZED (
        SELECT k.*, l.registered_at FROM known AS k
        CROSS JOIN LATERAL (
            SELECT l.registered_at FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key AND l.suppressed AND tokenkeeper.is_cleanable(l, cutoff)) AS l
    )
    SELECT (SELECT count(*) FROM page), (SELECT p.key FROM page AS p ORDER BY p.n DESC LIMIT 1),
           array_agg(s.key ORDER BY s.n), array_agg(s.environment ORDER BY s.n), array_agg(s.topic ORDER BY s.n), array_agg(s.token ORDER BY s.n),
           array_agg(s.topic_id ORDER BY s.n), array_agg(s.token_key ORDER BY s.n), array_agg(s.registered_at ORDER BY s.n)
    INTO rows, next, keys, environments, topics, tokens, topic_ids, token_keys, registered
    FROM stale AS s;
    IF rows < max_rows THEN
        next := NULL;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.stale_rows_by_key(bigint, text, integer, timestamptz) IS
    'Internal, for clean_next: reads the next rows of an attached table by its key, and returns those whose token has been stale since before cutoff.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.stale_rows_by_key(bigint, text, integer, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.stale_rows_by_token(
    source_id bigint, after text, max_rows integer, cutoff timestamptz,
    OUT next text, OUT rows bigint, OUT keys text[], OUT environments text[], OUT topics text[], OUT tokens text[], OUT topic_ids integer[],
    OUT token_keys bytea[], OUT registered timestamptz[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    -- The topics that rows of the table can have; null for any.
    only_topic text := (SELECT a.arguments ->> 'topic_value' FROM tokenkeeper.attached_table AS a WHERE a.source_id = stale_rows_by_token.source_id);
    scope tokenkeeper.topic;
    after_key bytea := '';
    stale_keys bytea[];
    stale_registered timestamptz[];
    spellings text[];
    read integer;
    last_key bytea;
    called record;
    again record;
BEGIN
    rows := 0;
    -- A position is the topic_id and the key of the last token, in hex. One topic at a time: its tokens are in the order of an index.
    SELECT t.* INTO scope FROM tokenkeeper.topic AS t
    WHERE t.topic_id >= coalesce(split_part(after, ' ', 1)::integer, 0) AND (only_topic IS NULL OR t.topic = only_topic COLLATE "C")
    ORDER BY t.topic_id LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF scope.topic_id::text = split_part(after, ' ', 1) THEN
        after_key := decode(split_part(after, ' ', 2), 'hex');
    END IF;
    WITH page AS MATERIALIZED (
        SELECT l AS token, l.token_key, l.registered_at FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = scope.topic_id AND l.suppressed > false AND l.token_key > after_key ORDER BY l.token_key LIMIT max_rows
    ), stale AS MATERIALIZED (
        SELECT p.token_key, p.registered_at FROM page AS p WHERE tokenkeeper.is_cleanable(p.token, cutoff)
    ), spelled AS (
        SELECT s.token_key, s.registered_at, NULL::text AS spelling FROM stale AS s
        UNION ALL
        SELECT s.token_key, s.registered_at, k.spelling FROM stale AS s
        CROSS JOIN LATERAL (
            SELECT u.spelling FROM tokenkeeper.token_spelling AS u
            WHERE u.token_key = s.token_key AND u.source_id = stale_rows_by_token.source_id OFFSET 0) AS k
    )
    SELECT (SELECT count(*) FROM page), (SELECT p.token_key FROM page AS p ORDER BY p.token_key DESC LIMIT 1),
           array_agg(s.token_key), array_agg(s.registered_at), array_agg(s.spelling)
    INTO read, last_key, stale_keys, stale_registered, spellings
    FROM spelled AS s;
    next := CASE WHEN read >= max_rows THEN scope.topic_id || ' ' || encode(last_key, 'hex') ELSE (
        SELECT min(t.topic_id) || ' ' FROM tokenkeeper.topic AS t
        WHERE t.topic_id > scope.topic_id AND (only_topic IS NULL OR t.topic = only_topic COLLATE "C")) END;
    IF stale_keys IS NULL THEN
        RETURN;
    END IF;
    SELECT f.name, f.version INTO called FROM tokenkeeper.attachment_function(stale_rows_by_token.source_id, 'find') AS f;
    EXECUTE format($call$
        SELECT count(*), array_agg(f.key), array_agg(f.token), array_agg(($4)[f.n]), array_agg(($5)[f.n])
        -- A type of text may take two spellings for the same.
        FROM (SELECT DISTINCT ON (f.key) f.key, f.token, f.n FROM %s($1, $2, $3, $4) AS f ORDER BY f.key, f.n) AS f $call$, called.name)
    INTO rows, keys, tokens, token_keys, registered
    USING array_fill(scope.environment, ARRAY[cardinality(stale_keys)]), array_fill(scope.topic, ARRAY[cardinality(stale_keys)]), spellings,
          stale_keys, stale_registered;
    SELECT f.version INTO again FROM tokenkeeper.attachment_function(stale_rows_by_token.source_id, 'find') AS f;
    IF again.version IS DISTINCT FROM called.version THEN
        RAISE EXCEPTION 'the generated function % has changed meanwhile', called.name USING ERRCODE = 'TK002';
    END IF;
    IF rows > 0 THEN
        environments := array_fill(scope.environment, ARRAY[rows::integer]);
        topics := array_fill(scope.topic, ARRAY[rows::integer]);
        topic_ids := array_fill(scope.topic_id, ARRAY[rows::integer]);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.stale_rows_by_token(bigint, text, integer, timestamptz) IS
    'Internal, for clean_next: takes the next suppressed tokens of the ledger, and returns the rows of an attached table that have those that have been stale '
    'since before cutoff.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.stale_rows_by_token(bigint, text, integer, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.clean_next(
    source_id bigint, by_token boolean, after text, max_rows integer, dry_run boolean,
    OUT next text, OUT rows bigint, OUT due bigint, OUT cleaned bigint, OUT failed bigint, OUT obstacle text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    clean tokenkeeper.attachment_cleaning;
    relation regclass;
    cutoff timestamptz;
    batch integer := least(greatest(coalesce(clean_next.max_rows, 1000), 1), 10000);
    keys text[];
    environments text[];
    topics text[];
    tokens text[];
    topic_ids integer[];
    token_keys bytea[];
    registered timestamptz[];
    called record;
    again record;
    error_text text;
    key_columns text[];
BEGIN
    rows := 0;
    due := 0;
    cleaned := 0;
    failed := 0;
    -- If the owner switches it off, that waits for this batch.
    SELECT c.* INTO clean FROM tokenkeeper.attachment_cleaning AS c WHERE c.source_id = clean_next.source_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT a.table_id, a.key_columns INTO relation, key_columns FROM tokenkeeper.attached_table AS a WHERE a.source_id = clean_next.source_id;
    IF clean.mode = 'delete' AND NOT clean.cascades AND tokenkeeper.cascading_keys(relation) <> '{}' THEN
        obstacle := 'deleting rows deletes or changes rows of other tables: ' || array_to_string(tokenkeeper.cascading_keys(relation), ', ');
        RETURN;
    END IF;
    cutoff := clock_timestamp() - clean.stale_for;
    IF clean_next.by_token THEN
        SELECT f.* INTO next, rows, keys, environments, topics, tokens, topic_ids, token_keys, registered
        FROM tokenkeeper.stale_rows_by_token(clean_next.source_id, clean_next.after, batch, cutoff) AS f;
    ELSE
        SELECT f.* INTO next, rows, keys, environments, topics, tokens, topic_ids, token_keys, registered
        FROM tokenkeeper.stale_rows_by_key(clean_next.source_id, clean_next.after, batch, cutoff) AS f;
    END IF;
    IF keys IS NULL THEN
        RETURN;
    END IF;
    SELECT min(o.words) INTO obstacle
    FROM (SELECT tokenkeeper.cleaning_obstacle(t) AS words FROM (SELECT DISTINCT u AS t FROM unnest(topic_ids) AS u) AS d) AS o;
    IF obstacle IS NOT NULL AND NOT clean_next.dry_run THEN
        RETURN;
    END IF;

    IF NOT clean_next.dry_run THEN
        -- Lock the tokens, in key order and without waiting, and look again: a registration that comes now waits for this batch, and revives the token.
        SELECT array_agg(s.key ORDER BY s.n), array_agg(s.environment ORDER BY s.n), array_agg(s.topic ORDER BY s.n), array_agg(s.token ORDER BY s.n),
               array_agg(s.topic_id ORDER BY s.n), array_agg(s.token_key ORDER BY s.n), array_agg(s.registered_at ORDER BY s.n)
        INTO keys, environments, topics, tokens, topic_ids, token_keys, registered
        FROM (
            SELECT k.*, l.registered_at
            FROM (SELECT * FROM unnest(keys, environments, topics, tokens, topic_ids, token_keys)
                           WITH ORDINALITY AS u (key, environment, topic, token, topic_id, token_key, n)
                  ORDER BY u.topic_id, u.token_key) AS k
            CROSS JOIN LATERAL (
                SELECT l.registered_at FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key AND l.suppressed
                  AND tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at) = 'stale'
                FOR NO KEY UPDATE SKIP LOCKED) AS l) AS s;
        IF keys IS NULL THEN
            RETURN;
        END IF;
    END IF;
    SELECT f.name, f.version INTO called FROM tokenkeeper.attachment_function(clean_next.source_id, 'clean') AS f;
    EXECUTE format($call$
        WITH called AS MATERIALIZED (
            SELECT c.n, c.old, c.error FROM %s($1, $2, $3, $4, $5, $6) AS c (n, old, error)
        ), kept AS (
            INSERT INTO tokenkeeper.cleaned_row (source_id, table_id, mode, mark_column, topic_id, token_key, key_columns, key, row)
            SELECT $7, $8, $9, $10, ($11)[c.n], ($12)[c.n], $13, ($1)[c.n], c.old FROM called AS c WHERE c.old IS NOT NULL AND NOT $6
        )
        SELECT count(*), count(*) FILTER (WHERE c.old IS NOT NULL AND NOT $6), count(*) FILTER (WHERE c.error IS NOT NULL), max(left(c.error, 500))
        FROM called AS c $call$, called.name)
    INTO due, cleaned, failed, error_text
    USING keys, environments, topics, tokens, registered, clean_next.dry_run, clean_next.source_id, relation, clean.mode, clean.mark_column, topic_ids,
          token_keys, key_columns;
    SELECT f.version INTO again FROM tokenkeeper.attachment_function(clean_next.source_id, 'clean') AS f;
    IF again.version IS DISTINCT FROM called.version THEN
        RAISE EXCEPTION 'the generated function % has changed meanwhile', called.name USING ERRCODE = 'TK002';
    END IF;
    IF cleaned > 0 OR failed > 0 THEN
        UPDATE tokenkeeper.attachment_cleaning AS c
        SET cleaned = c.cleaned + clean_next.cleaned, cleaned_at = CASE WHEN clean_next.cleaned > 0 THEN clock_timestamp() ELSE c.cleaned_at END,
            failed = c.failed + clean_next.failed, failure = coalesce(error_text, c.failure)
        WHERE c.source_id = clean_next.source_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.clean_next(bigint, boolean, text, integer, boolean) IS
    'Cleans the next rows of an attached table in one short transaction; a dry run only counts them. by_token is from cleaning_plan: whether it goes through '
    'the next max_rows suppressed tokens of the ledger, or through the next max_rows rows of the table. after is the next of the call before, null at the '
    'beginning. Returns where to go on (next; null at the end), how many rows it read, how many were due, cleaned, and refused by the table, and what is in '
    'the way of cleaning (obstacle). Called by the sweep.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.clean_next(bigint, boolean, text, integer, boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.restore_cleaned(attached regclass, since timestamptz, until timestamptz DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    relation text;
    columns text;
    vals text;
    one record;
    key text;
    restored bigint := 0;
    part bigint;
BEGIN
    SELECT format('%I.%I', n.nspname, c.relname) INTO relation
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = attached;
    FOR one IN
        SELECT c.* FROM tokenkeeper.cleaned AS c
        WHERE c.table_id = attached AND c.cleaned_at >= restore_cleaned.since AND c.cleaned_at <= coalesce(restore_cleaned.until, 'infinity')
        ORDER BY c.cleaned_id DESC
    LOOP
        IF one.mode = 'delete' THEN
            -- Columns that were added since get their default.
            SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum),
                   -- The null of JSON was kept as that of SQL.
                   string_agg(format(CASE WHEN a.attnotnull AND a.atttypid IN ('json'::regtype, 'jsonb'::regtype) THEN 'coalesce(%I, ''null'')' ELSE '%I' END,
                                     a.attname), ', ' ORDER BY a.attnum)
            INTO columns, vals
            FROM pg_attribute AS a
            WHERE a.attrelid = attached AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' AND one.row ? a.attname;
            -- A row that the application has inserted again stays as it is.
            EXECUTE format('INSERT INTO %1$s (%2$s) OVERRIDING SYSTEM VALUE SELECT %3$s FROM jsonb_populate_record(NULL::%1$s, $1) ON CONFLICT DO NOTHING',
                           relation, columns, vals) USING one.row;
        ELSE
            key := (SELECT string_agg(format('r.%1$I = o.%1$I', k), ' AND ') FROM unnest(one.key_columns) AS k);
            EXECUTE format('UPDATE %1$s AS r SET %2$I = o.%2$I FROM jsonb_populate_record(NULL::%1$s, $1) AS o WHERE %3$s AND r.%2$I IS DISTINCT FROM o.%2$I',
                           relation, one.mark_column, key) USING one.row;
        END IF;
        GET DIAGNOSTICS part = ROW_COUNT;
        restored := restored + part;
        DELETE FROM tokenkeeper.cleaned AS c WHERE c.cleaned_id = one.cleaned_id;
    END LOOP;
    RETURN restored;
END
$$;
COMMENT ON FUNCTION tokenkeeper.restore_cleaned(regclass, timestamptz, timestamptz) IS
    'Restores the rows of a table that sweeps have marked or deleted since an instant, as they were; returns how many. A marked row gets back only the '
    'column that marks it. Rows that exist again stay as they are. First undo the 410s (reinstate), or the next sweep cleans the rows again. For '
    'the table''s owner, with its rights, also after detach.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.restore_cleaned(regclass, timestamptz, timestamptz) FROM PUBLIC;
