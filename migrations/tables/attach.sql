-- attach: it reads the expressions, shows what they give, and creates triggers, all with the rights of its caller, the table's owner. begin_attachment
-- has rights of its own, and stores texts.
--
-- Locks: SHARE ROW EXCLUSIVE on the table until the transaction ends. It waits five seconds at most, unless the session has a lock_timeout.

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_findings(attached regclass, name text) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_class;
    place text;
    table_owner name;
    stray text[] := tokenkeeper.stray_triggers(attached);
    full_name text := tokenkeeper.full_name(attached);
BEGIN
    SELECT c.* INTO this FROM pg_class AS c WHERE c.oid = attached;
    place := this.relnamespace::regnamespace::text;
    table_owner := pg_get_userbyid(this.relowner);
    IF this.relkind NOT IN ('r', 'p') THEN
        RETURN NEXT format('%s is a %s, expected a table', attached, CASE this.relkind WHEN 'v' THEN 'view: attach the table behind it'
            WHEN 'm' THEN 'materialized view: attach the table behind it' WHEN 'f' THEN 'foreign table: attach it where it is stored' ELSE 'relation' END);
        RETURN;
    END IF;
    IF this.relpersistence = 't' THEN
        RETURN NEXT format('%s is a temporary table, which no other session sees', attached);
    END IF;
    IF this.relispartition THEN
        RETURN NEXT format('%s is a partition: attach the partitioned table %s', attached,
                           (SELECT i.inhparent::regclass FROM pg_inherits AS i WHERE i.inhrelid = attached));
    ELSIF this.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhparent = attached) THEN
        RETURN NEXT format('tables inherit from %s, and their rows fire none of its triggers: attach each of them instead', attached);
    END IF;
    IF this.relforcerowsecurity THEN
        RETURN NEXT format('row-level security is forced on %s, so its owner would not see all rows', attached);
    END IF;
    IF NOT pg_has_role(current_user, this.relowner, 'USAGE') THEN
        RETURN NEXT format('%s belongs to %s, and you are %s: attach it as its owner', attached, table_owner, current_user);
    END IF;
    IF NOT has_schema_privilege(this.relowner, this.relnamespace, 'CREATE') THEN
        RETURN NEXT format('%s cannot create functions in schema %s. Run: GRANT CREATE ON SCHEMA %s TO %I;', table_owner, place, place, table_owner);
    END IF;
    IF NOT has_schema_privilege(this.relowner, 'tokenkeeper', 'USAGE')
        OR NOT has_column_privilege(this.relowner, 'tokenkeeper.registration', 'source_id', 'INSERT') THEN
        RETURN NEXT format('%s cannot write to tokenkeeper.registration. Run: GRANT tokenkeeper_app TO %I;', table_owner, table_owner);
    END IF;
    IF NOT has_database_privilege(current_user, current_database(), 'TEMPORARY') THEN
        RETURN NEXT format('%s cannot create temporary views, with which attach reads expressions. Run: GRANT TEMPORARY ON DATABASE %I TO %I;', table_owner,
                           current_database(), table_owner);
    END IF;
    IF attachment_findings.name COLLATE "C" !~ '^[A-Za-z0-9_-]{1,60}$' THEN
        RETURN NEXT format('name is %L, expected up to 60 letters, digits, - and _', left(attachment_findings.name, 100));
    ELSIF EXISTS (SELECT FROM tokenkeeper.attachment AS a WHERE a.name = coalesce(attachment_findings.name, full_name) COLLATE "C") THEN
        RETURN NEXT format('there is an attachment %1$s already: run SELECT tokenkeeper.detach(%1$L) first, or, for another token of the same rows, give this '
                           'one a name', coalesce(attachment_findings.name, full_name));
    END IF;
    IF stray <> '{}' THEN
        RETURN NEXT format('%s has triggers of an attachment in another database (%s): run SELECT tokenkeeper.detach(%L) first', attached,
                           array_to_string(stray, ', '), full_name);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_findings(regclass, text) IS 'Internal, for attach: what prevents attaching a table, apart from its expressions.';

CREATE OR REPLACE FUNCTION tokenkeeper.owner_warning(attached regclass, expression text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
    WITH columns AS (
        SELECT quote_ident(a.attname) AS name, replace(lower(a.attname COLLATE "C"), '_', '') AS plain,
               a.attname COLLATE "C" = ANY (regexp_split_to_array(expression COLLATE "C", '[^A-Za-z0-9_]+')) AS is_used
        FROM pg_attribute AS a WHERE a.attrelid = attached AND a.attnum > 0 AND NOT a.attisdropped
    )
    -- User 5 and admin 5; object 5 of each content type; user 5 of each tenant.
    SELECT CASE WHEN o.name IS NOT NULL
                THEN format('user_id: the table also has %1$s. If two owners can have one number, they would be one user; then write $$%1$s || '':'' || %2$s$$', o.name, expression)
                WHEN expression COLLATE "C" ~* 'coalesce' AND (SELECT count(*) > 1 FROM columns AS c WHERE c.is_used)
                THEN 'user_id: it takes one of several columns. Two owners with one number would be one user; write the kind before it, such as ''admin:'' || admin_id' END
    FROM (SELECT) AS nothing LEFT JOIN LATERAL (
        SELECT k.name FROM columns AS k JOIN columns AS u ON u.is_used
        WHERE NOT k.is_used AND (k.plain = regexp_replace(u.plain, 'id$', '') || 'type' OR u.plain = 'objectid' AND k.plain IN ('contenttypeid', 'contenttype')
                                 OR k.plain IN ('tenantid', 'tenant', 'orgid', 'organizationid', 'organisationid', 'workspaceid', 'realmid'))
        ORDER BY k.name LIMIT 1) AS o ON true
$body$;
COMMENT ON FUNCTION tokenkeeper.owner_warning(regclass, text) IS
    'Internal, for attach: a warning if the expression of user_id may make one user of several owners; otherwise null.';

CREATE OR REPLACE FUNCTION tokenkeeper.expression_warnings(attached regclass, arguments jsonb, plan jsonb) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    moment text := arguments ->> 'registered_at';
    owner_warning text := tokenkeeper.owner_warning(attached, arguments ->> 'user_id');
BEGIN
    IF moment IS NULL THEN
        RETURN NEXT 'registered_at is missing: all registrations of the table count as 1970. A token that APNs has declared invalid becomes active again '
            'only when the application calls register';
    ELSIF moment COLLATE "C" ~* '(updat|modif|chang|auto_now|mtime|synced)' THEN
        RETURN NEXT format('registered_at: does something else than a registration change %s? Then any save makes dead tokens active again', moment);
    ELSIF moment COLLATE "C" ~* '(creat|insert|joined|added|first)' THEN
        RETURN NEXT format('registered_at: does %s change when a device registers its token again? If not, a dead token stays dead after that', moment);
    END IF;
    IF owner_warning IS NOT NULL THEN
        RETURN NEXT owner_warning;
    END IF;
    IF plan -> 'facts' ->> 'tags' LIKE 'CASE WHEN (%' THEN
        RETURN NEXT format('tags: the text of %s is one tag. For a list, write $$string_to_array(%1$s, '','')$$, or $$(%1$s)::jsonb$$ if it is JSON', arguments ->> 'tags');
    END IF;
    IF plan ->> 'on_delete' = 'ignore' AND EXISTS (
        SELECT FROM pg_constraint AS c WHERE c.conrelid = attached AND c.contype = 'f' AND c.confdeltype = 'c') THEN
        RETURN NEXT 'on_delete: rows of the table are deleted with what they refer to (ON DELETE CASCADE), and their tokens stay active with their users. '
            'With on_delete => ''unregister'', a deleted row is a logout';
    END IF;
    IF NOT (plan ->> 'always')::boolean AND EXISTS (SELECT FROM pg_subscription_rel AS s WHERE s.srrelid = attached) THEN
        RETURN NEXT format('%s is in a subscription: what logical replication applies fires the triggers only with always => true', attached);
    END IF;
    IF (SELECT c.relpersistence = 'u' FROM pg_class AS c WHERE c.oid = attached) THEN
        RETURN NEXT format('%s is unlogged: after a crash it is empty', attached);
    END IF;
    IF jsonb_array_length(plan -> 'key_columns') = 0 THEN
        RETURN NEXT format('the table has no primary key, and no unique key of columns that are NOT NULL and have types of PostgreSQL itself (citext is none); one that is '
            'DEFERRABLE does not count. So it cannot be backfilled or checked. Before you attach it, run, for example: ALTER TABLE %s ADD COLUMN row_number bigint '
            'GENERATED ALWAYS AS IDENTITY PRIMARY KEY;', attached);
    END IF;
END
$body$;
COMMENT ON FUNCTION tokenkeeper.expression_warnings(regclass, jsonb, jsonb) IS 'Internal, for attach: warnings about the expressions.';

CREATE OR REPLACE FUNCTION tokenkeeper.sample_rows(attached regclass, plan jsonb) RETURNS TABLE (kind text, detail text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres'
SET bytea_output = 'hex'
AS $$
#variable_conflict use_column
DECLARE
    fact record;
    fails boolean := false;
BEGIN
    -- Each alone, so that the one that fails is named.
    FOR fact IN SELECT f.key AS name, f.value AS sql FROM jsonb_each_text(plan -> 'facts') AS f
        WHERE f.key NOT IN ('look_up', 'token_column') ORDER BY f.key LOOP
        BEGIN
            EXECUTE format('SELECT count(%s) FROM (SELECT * FROM %s LIMIT 10000) AS r', fact.sql, attached);
        EXCEPTION WHEN OTHERS THEN
            fails := true;
            RETURN QUERY SELECT 'error', format('%s: a row of the table makes it fail: %s', fact.name, SQLERRM);
        END;
    END LOOP;
    IF fails THEN
        RETURN;
    END IF;
    IF plan -> 'facts' ->> 'tags' LIKE 'tokenkeeper.tags_of(%' THEN
        RETURN QUERY EXECUTE format($sql$
            SELECT 'warning', format('tags: %%s rows have JSON that is no array (%%s), and so no tags', count(*), string_agg(DISTINCT t.found, ', '))
            FROM (SELECT %s AS found FROM (SELECT * FROM %s LIMIT 10000) AS r) AS t WHERE t.found NOT IN ('array', 'null') HAVING count(*) > 0 $sql$,
            regexp_replace(plan -> 'facts' ->> 'tags', '^tokenkeeper[.]tags_of', 'jsonb_typeof'), attached);
    END IF;
    RETURN QUERY EXECUTE format($sql$
        WITH read (row_key, counts, is_out, spelled, %5$s) AS MATERIALIZED (
            SELECT %1$s, (%2$s) IS TRUE, (%6$s) IS TRUE, %7$s, %3$s FROM (SELECT * FROM %4$s LIMIT 10000) AS r
        ), counted AS (SELECT * FROM read WHERE counts)
        SELECT * FROM (SELECT 'row', coalesce('row ' || row_key || ': ', '') || CASE WHEN counts THEN concat_ws(', ', environment, topic,
                           left(token, 8) || '...', registered_at, 'device ' || device_id, 'user ' || user_id, 'tags ' || tags::text)
                       ELSE CASE WHEN is_out THEN 'logged out, ' || left(token, 8) || '...' WHEN spelled <> '' THEN 'left out by the filter' ELSE 'no token' END END
                       FROM read LIMIT 5) AS shown
        UNION ALL SELECT 'warning', format('topic: %%L is no bundle id', topic) FROM (
            SELECT DISTINCT topic FROM counted WHERE topic NOT LIKE '%%.%%' LIMIT 5) AS t
        UNION ALL SELECT 'warning', fault FROM (
            SELECT DISTINCT coalesce('topic: ' || tokenkeeper.topic_fault(topic), 'environment: ' || tokenkeeper.environment_fault(environment)) AS fault
            FROM (SELECT DISTINCT topic, environment FROM counted) AS t LIMIT 5) AS t WHERE fault IS NOT NULL
        UNION ALL SELECT 'warning', format('token: %%s of %%s rows have no device token, such as %%s', count(*) - count(parsed), count(*),
                   (array_agg(concat_ws(': ', 'row ' || row_key, tokenkeeper.token_fault(token)) ORDER BY n) FILTER (WHERE parsed IS NULL))[1])
            FROM (SELECT c.*, row_number() OVER () AS n, tokenkeeper.parse_token(token) AS parsed FROM counted AS c) AS t HAVING count(*) > count(parsed)
        UNION ALL SELECT 'warning', format('registered_at: %%s of %%s rows are in the future or before 2008. Are these the right zone and unit?', count(*), total)
            FROM (SELECT registered_at, count(*) OVER () AS total FROM counted) AS t
            WHERE registered_at > clock_timestamp() + interval '10 minutes' OR registered_at > 'epoch' AND registered_at < '2008-01-01' GROUP BY total
        UNION ALL SELECT 'warning', format('token: they have %%s lengths, most of them %%s digits. Tokens of apps have 64. Is this the token that the device has sent, and '
                                           'not an encrypted one or another id?', count(DISTINCT length(token)), mode() WITHIN GROUP (ORDER BY length(token)))
            FROM counted WHERE tokenkeeper.parse_token(token) IS NOT NULL
            HAVING count(DISTINCT length(token)) > 3 OR count(*) >= 20 AND mode() WITHIN GROUP (ORDER BY length(token)) <> 64
        UNION ALL SELECT 'warning', format('filter: it leaves out all of %%s rows with a token', count(*)) FROM read WHERE spelled <> ''
            HAVING bool_and(NOT counts AND NOT is_out) AND count(*) > 5
        UNION ALL SELECT 'warning', format('logged_out: %%s of %%s rows are logged out. Is this the flag of those that are active?', count(*) FILTER (WHERE is_out), count(*))
            FROM read WHERE counts OR is_out HAVING count(*) FILTER (WHERE is_out) > 5 AND count(*) FILTER (WHERE is_out) * 2 > count(*)
        UNION ALL SELECT 'warning', format('registered_at: %%s of %%s rows have the same, %%s, so that none of them supersedes another', n, total, registered_at)
            FROM (SELECT registered_at, count(*) AS n, sum(count(*)) OVER () AS total FROM counted GROUP BY 1 ORDER BY 2 DESC LIMIT 1) AS t
            WHERE n > 20 AND n * 10 > total AND registered_at > 'epoch'
        UNION ALL SELECT 'warning', format('device_id: %%s of %%s tokens share theirs with another. Is it the id of a device, and not of a user?', sum(n) FILTER (WHERE n > 1), sum(n))
            FROM (SELECT count(DISTINCT token) AS n FROM counted WHERE tokenkeeper.device_name(device_id) <> '' GROUP BY device_id) AS t
            HAVING sum(n) >= 20 AND sum(n) FILTER (WHERE n > 1) * 2 > sum(n)
        UNION ALL SELECT * FROM (SELECT 'warning', format('device_id: %%L has %%s tokens. Is this the id of one device?', device_id, count(*))
            FROM counted WHERE tokenkeeper.device_name(device_id) <> '' GROUP BY device_id HAVING count(*) >= 8 ORDER BY count(*) DESC LIMIT 1) AS t
        $sql$, tokenkeeper.key_text(ARRAY(SELECT jsonb_array_elements_text(plan -> 'key_columns'))), tokenkeeper.fact_test(plan -> 'facts'),
        tokenkeeper.fact_list(plan -> 'facts'), attached, tokenkeeper.fact_columns(), tokenkeeper.logged_out_test(plan -> 'facts'),
        plan -> 'facts' ->> 'token');
END
$$;
COMMENT ON FUNCTION tokenkeeper.sample_rows(regclass, jsonb) IS
    'Internal, for attach: what the expressions give for five rows (row), what is odd about the first 10,000 (warning), and which expression fails (error).';

CREATE OR REPLACE FUNCTION tokenkeeper.finds_by_index(attached regclass, facts jsonb) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    token_number smallint := (SELECT a.attnum FROM pg_attribute AS a WHERE a.attrelid = attached AND a.attname = facts ->> 'token_column' COLLATE "C");
    shown json;
BEGIN
    -- What the planner does with a small table says little.
    IF EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = attached AND i.indisvalid AND i.indkey[0] = token_number AND i.indpred IS NULL) THEN
        RETURN true;
    END IF;
    EXECUTE 'EXPLAIN (FORMAT JSON, COSTS OFF) ' || tokenkeeper.other_row(attached::text, facts, quote_literal('aa'), quote_literal('aa')) INTO shown;
    -- By an index that begins with the token: its column, or an expression.
    RETURN shown::text LIKE '%"Index Cond"%' AND shown::text NOT LIKE '%"Seq Scan"%' AND NOT EXISTS (
        SELECT FROM jsonb_path_query(shown::jsonb, 'strict $.**."Index Name"') AS n
        JOIN pg_class AS c ON c.relname = n #>> '{}' JOIN pg_index AS i ON i.indexrelid = c.oid
        WHERE i.indkey[0] <> coalesce(token_number, 0) AND i.indrelid = attached);
END
$$;
COMMENT ON FUNCTION tokenkeeper.finds_by_index(regclass, jsonb) IS 'Internal, for attach: whether an index of the table finds the rows that have a token.';

CREATE OR REPLACE FUNCTION tokenkeeper.begin_attachment(attached regclass, plan jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_class;
    new_source bigint;
BEGIN
    PERFORM tokenkeeper.check_owner_session(attached);
    SELECT c.* INTO STRICT this FROM pg_class AS c WHERE c.oid = attached;
    IF this.relkind NOT IN ('r', 'p') OR this.relpersistence = 't' OR this.relispartition THEN
        RAISE EXCEPTION '% is a temporary table, a partition or no table', attached USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (octet_length(plan::text) <= 1000000 AND (plan ->> 'name' = tokenkeeper.full_name(attached) OR plan ->> 'name' COLLATE "C" ~ '^[A-Za-z0-9_-]{1,60}$') AND jsonb_typeof(plan -> 'arguments') = 'object'
        AND jsonb_typeof(plan -> 'facts') = 'object' AND plan -> 'facts' ?& ARRAY['token', 'topic', 'environment'] AND jsonb_typeof(plan -> 'always') = 'boolean'
        AND (SELECT count(*) <= 1600 FROM jsonb_array_elements_text(plan -> 'columns'))
        AND (SELECT count(*) <= 1600 FROM jsonb_array_elements_text(plan -> 'key_columns'))) IS NOT TRUE THEN
        RAISE EXCEPTION 'plan is none that attach has made' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call attach.';
    END IF;
    LOOP
        INSERT INTO tokenkeeper.registration_source AS s (kind, name) VALUES ('attachment', plan ->> 'name') RETURNING s.source_id INTO new_source;
        -- Functions of another database may have come with a restored table. Their rows must not count as those of this one.
        EXIT WHEN NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.proname ~ ('^tokenkeeper_[a-z]+_' || new_source || '$'));
        DELETE FROM tokenkeeper.registration_source AS s WHERE s.source_id = new_source;
    END LOOP;
    INSERT INTO tokenkeeper.attached_table (source_id, name, table_id, table_name, arguments, facts, columns, key_columns, on_delete, always)
    VALUES (new_source, plan ->> 'name', attached, tokenkeeper.full_name(attached), plan -> 'arguments', plan -> 'facts',
            ARRAY(SELECT jsonb_array_elements_text(plan -> 'columns')), ARRAY(SELECT jsonb_array_elements_text(plan -> 'key_columns')),
            plan ->> 'on_delete', (plan ->> 'always')::boolean);
    RETURN new_source;
EXCEPTION WHEN unique_violation THEN
    RAISE EXCEPTION 'there is an attachment % already', plan ->> 'name' USING ERRCODE = 'invalid_parameter_value', HINT = 'Detach it first, or give this one a name.';
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_attachment(regclass, jsonb) IS
    'Internal, for attach: stores an attachment, as texts that it does not execute, and returns its source_id. Raises 42501 as check_owner_session; 22023 '
    'for a temporary table, a partition, a plan not made by attach, or a name that is taken.';

CREATE OR REPLACE FUNCTION tokenkeeper.attach(
    attached text,
    token text,
    topic text,
    filter text DEFAULT NULL,
    environment text DEFAULT '''production''',
    registered_at text DEFAULT NULL,
    device_id text DEFAULT NULL,
    user_id text DEFAULT NULL,
    tags text DEFAULT NULL,
    logged_out text DEFAULT NULL,
    on_delete text DEFAULT 'ignore',
    always boolean DEFAULT false,
    name text DEFAULT NULL,
    dry_run boolean DEFAULT false,
    verbose boolean DEFAULT false) RETURNS TABLE (kind text, detail text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    this regclass := tokenkeeper.required_table(attach.attached);
    arguments jsonb := jsonb_strip_nulls(jsonb_build_object('token', attach.token, 'topic', attach.topic, 'filter', attach.filter,
        'environment', attach.environment, 'registered_at', attach.registered_at, 'device_id', attach.device_id, 'user_id', attach.user_id,
        'tags', attach.tags, 'logged_out', attach.logged_out));
    found record;
    plan jsonb;
    keys text[] := tokenkeeper.key_columns(this);
    errors text[];
    source text;
    statement text;
BEGIN
    PERFORM tokenkeeper.check_owner_session(this);
    IF current_setting('lock_timeout') = '0' THEN
        PERFORM set_config('lock_timeout', '5s', true);
    END IF;
    errors := ARRAY(SELECT f FROM tokenkeeper.attachment_findings(this, attach.name) AS f);
    IF attach.on_delete IN ('ignore', 'unregister') IS NOT TRUE THEN
        errors := errors || format('on_delete is %s, expected ignore or unregister', coalesce(quote_literal(attach.on_delete), 'null'));
    END IF;
    found := tokenkeeper.read_facts(this, arguments);
    errors := errors || found.faults;
    plan := jsonb_build_object('arguments', arguments, 'facts', found.facts, 'old_facts', found.old_facts, 'columns', found.columns, 'key_columns', keys,
        'key_text', tokenkeeper.key_text(keys), 'on_delete', attach.on_delete, 'always', attach.always, 'name', coalesce(attach.name, tokenkeeper.full_name(this)));
    -- Read again, so that two spellings of one expression are one.
    IF EXISTS (SELECT FROM tokenkeeper.attachment AS a CROSS JOIN LATERAL tokenkeeper.read_facts(this, a.arguments) AS o WHERE a.table_id = this
                  AND o.facts ->> 'topic' = found.facts ->> 'topic' AND o.facts ->> 'environment' = found.facts ->> 'environment') THEN
        errors := errors || 'another attachment of the table has this topic, and each would log out tokens of the other: use one attachment, with one filter'::text;
    END IF;
    IF errors = '{}' AND NOT tokenkeeper.finds_by_index(this, found.facts) THEN
        errors := errors || format('no index finds a row by its token. Run: CREATE INDEX %sON %s (%s);',
            CASE WHEN (SELECT c.relkind = 'r' FROM pg_class AS c WHERE c.oid = this) THEN 'CONCURRENTLY ' ELSE '' END, this,
            CASE WHEN found.facts ->> 'token_column' IS NULL THEN '(' || attach.token || ')' ELSE quote_ident(found.facts ->> 'token_column') END);
    END IF;
    IF errors <> '{}' THEN
        IF NOT attach.dry_run THEN
            RAISE EXCEPTION 'cannot attach %: %', this, array_to_string(errors, '; ') USING ERRCODE = 'invalid_parameter_value',
                HINT = 'With dry_run => true, attach shows all that is wrong and changes nothing.';
        END IF;
        RETURN QUERY SELECT 'error', e FROM unnest(errors) AS e;
        RETURN;
    END IF;
    RETURN QUERY SELECT 'warning', w FROM tokenkeeper.expression_warnings(this, arguments, plan) AS w;
    RETURN QUERY SELECT s.* FROM tokenkeeper.sample_rows(this, plan) AS s WHERE attach.dry_run OR s.kind <> 'row';
    source := CASE WHEN attach.dry_run THEN 'N' ELSE tokenkeeper.begin_attachment(this, plan)::text END;
    FOR statement IN SELECT s FROM tokenkeeper.attachment_statements(this, source, plan) AS s LOOP
        IF NOT attach.dry_run THEN
            EXECUTE statement;
        END IF;
        IF attach.verbose THEN
            RETURN QUERY SELECT 'sql', statement;
        END IF;
    END LOOP;
    IF NOT attach.dry_run THEN
        RETURN QUERY SELECT 'attached', format('%s is attached as source %s', plan ->> 'name', source);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attach(text, text, text, text, text, text, text, text, text, text, text, boolean, text, boolean, boolean) IS
    'Connects a table of device tokens to the ledger: triggers queue its changes as registrations and logouts. token to logged_out: each an SQL '
    'expression over the columns of a row. filter: which rows count. registered_at: when the device last registered; null: 1970. logged_out: whether the '
    'row is a logout. on_delete: a deleted row is a logout (unregister) or says nothing (ignore). always: also for logical replication. name: of the '
    'attachment; null: the table''s. dry_run: only shows what the expressions give for five rows. verbose: shows the generated SQL. Returns rows of kind '
    'error, warning, row, sql and attached. Raises 42P01 for an unknown table; 42501 unless the login is a member of the table''s owner, and has no right '
    'on the server that the owner lacks; 22023 with all that is wrong; 55P03 if running writes to the table do not end within lock_timeout (unset: five '
    'seconds).';
