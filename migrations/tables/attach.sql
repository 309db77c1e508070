-- attach and detach: they run with the rights of the table's owner.
--
-- Locks: attach takes SHARE ROW EXCLUSIVE on the table, detach ACCESS EXCLUSIVE, until the transaction ends. Both wait five seconds at most, unless the session
-- has a lock_timeout.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_attachment(attached regclass, plan jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_catalog.pg_class;
    table_name text;
    new_source bigint;
BEGIN
    PERFORM tokenkeeper.check_owner_session(attached);
    SELECT c.* INTO STRICT this FROM pg_catalog.pg_class AS c WHERE c.oid = attached;
    IF this.relkind NOT IN ('r', 'p') OR this.relpersistence = 't' OR this.relispartition THEN
        RAISE EXCEPTION '% is a temporary table, a partition or no table', attached USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_attachment_plan(attached, plan);
    IF octet_length(plan::text) > 1000000 THEN
        RAISE EXCEPTION 'plan is % bytes long, expected at most 1000000', octet_length(plan::text) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (SELECT FROM tokenkeeper.attached_table AS a WHERE a.table_id = attached) THEN
        RAISE EXCEPTION '% is attached already', attached USING ERRCODE = 'invalid_parameter_value', HINT = 'Detach it first.';
    END IF;
    table_name := format('%I.%I', (SELECT n.nspname FROM pg_catalog.pg_namespace AS n WHERE n.oid = this.relnamespace), this.relname);
    INSERT INTO tokenkeeper.registration_source AS s (kind, name) VALUES ('attachment', table_name) RETURNING s.source_id INTO new_source;
    INSERT INTO tokenkeeper.attached_table (source_id, table_id, name, arguments, columns, key_columns, on_delete, revive, always)
    VALUES (new_source, attached, table_name, plan -> 'arguments', ARRAY(SELECT jsonb_array_elements_text(plan -> 'columns')),
            ARRAY(SELECT jsonb_array_elements_text(plan -> 'key_columns')), plan ->> 'on_delete', plan ->> 'revive', (plan ->> 'always')::boolean);
    RETURN new_source;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_attachment(regclass, jsonb) IS
    'Internal, for attach: notes an attachment and returns its source_id. It stores the arguments as they are, and executes nothing. Raises 42501 unless the '
    'session may execute code of the table (check_owner_session), 22023 for a temporary table or a partition, for a plan that attach has not made, and for a '
    'table that is attached already.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_attachment(source_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
    owner_id oid;
BEGIN
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = end_attachment.source_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no attached table', coalesce(end_attachment.source_id::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A table that was dropped has no owner: then the role that attached it counts, or the schema's owner.
    owner_id := coalesce((SELECT c.relowner FROM pg_catalog.pg_class AS c WHERE c.oid = this.table_id),
                         (SELECT r.oid FROM pg_catalog.pg_roles AS r WHERE r.rolname = this.attached_by),
                         (SELECT n.nspowner FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'tokenkeeper'));
    IF NOT pg_has_role(session_user, owner_id, 'MEMBER') THEN
        RAISE EXCEPTION '% is no member of %, the owner of the table', session_user, pg_get_userbyid(owner_id) USING ERRCODE = 'insufficient_privilege';
    END IF;
    DELETE FROM tokenkeeper.attached_table AS a WHERE a.source_id = this.source_id;
    UPDATE tokenkeeper.registration_source AS s SET finished_at = clock_timestamp() WHERE s.source_id = this.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_attachment(bigint) IS
    'Internal, for detach: removes the note of an attachment. Raises 42501 unless the login is a member of the table''s owner, or of the role that attached '
    'the table if it is gone; 22023 if the source is no attached table.';

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
    -- Before anything of the table is executed, such as a function in an expression.
    PERFORM tokenkeeper.check_owner_session(attach.attached);
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
    ELSIF attach.topic IS NULL AND tokenkeeper.topic_fault(attach.topic_value) IS NOT NULL THEN
        errors := errors || ('topic_value: ' || tokenkeeper.topic_fault(attach.topic_value));
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
        warnings := warnings || format('%s has no primary key and no other unique key without nulls: it cannot be backfilled',
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
    FOREACH row_name IN ARRAY ARRAY['r', 'old_row', 'other_row'] LOOP
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
    plan := jsonb_build_object('pieces', pieces -> 'r', 'old_pieces', pieces -> 'old_row', 'other_pieces', pieces -> 'other_row',
        'same_device', same_device,
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
    'backfill. Raises 22023 with all errors, 42501 unless the session may execute code of the table: for a superuser, a login with roles of tokenkeeperd that the '
    'table''s owner lacks, and a table of a superuser.';

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
                            'tokenkeeper_read_' || this.source_id)
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
