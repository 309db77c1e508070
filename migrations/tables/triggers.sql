-- What attach generates: the trigger functions and triggers of an attachment. They belong to the owner of the table, and are named by its source_id (17, for example):
--
--   tokenkeeper_insert_17(), tokenkeeper_delete_17() RETURNS trigger    SECURITY DEFINER with pinned settings
--   tokenkeeper_update_17() RETURNS trigger                             SECURITY DEFINER, compares the columns and calls
--   tokenkeeper_change_17(old_row record, r record, only_new boolean, tg_relid oid) RETURNS void    pinned settings; queues what has changed
--
-- What a write does to the facts of its rows (facts.sql) is queued:
--
--   A row that has facts and had others, or none: a registration at its registered_at. If it did not have this token before, it also takes a logout back (returned).
--   A token that a row had and has no longer: if another row of the table has it, the facts of that row; otherwise a logout, as of now. A token that a
--   later registration of the same device replaces is superseded by it, and needs no logout.
--   A row that is inserted logged out: a logout as of its registered_at, the earliest instant that suppresses, unless another row has the token.
--
-- The trigger looks for another row after the statement, by the index on the token, and does not see what other transactions have not committed.

CREATE OR REPLACE FUNCTION tokenkeeper.compared_columns(row_name text, plan jsonb) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN (SELECT format('ROW(%s)::pg_catalog.record', string_agg(format('%I.%I', row_name, c), ', ')) FROM jsonb_array_elements_text(plan -> 'columns') AS c);
COMMENT ON FUNCTION tokenkeeper.compared_columns(text, jsonb) IS 'Internal: the columns of a row that the expressions of an attachment use, as SQL.';

CREATE OR REPLACE FUNCTION tokenkeeper.update_body(changed text, plan jsonb, failure_note text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
-- Binary images are compared first: that works for every type and collation, and costs little.
RETURN format($body$        IF %1$s OPERATOR(pg_catalog.*<>) %2$s THEN
            PERFORM %3$s(OLD, NEW, false, TG_RELID);
        END IF;
    EXCEPTION WHEN OTHERS OR assert_failure THEN
        GET STACKED DIAGNOSTICS failed_state = RETURNED_SQLSTATE, failed_constraint = CONSTRAINT_NAME;
%4$s        BEGIN
            -- It may be the old row that cannot be read, or a column that has another type now.
            PERFORM %3$s(NEW, NEW, true, TG_RELID);
        EXCEPTION WHEN OTHERS OR assert_failure THEN
            NULL;
        END;
$body$, tokenkeeper.compared_columns('r', plan), tokenkeeper.compared_columns('old_row', plan), changed, failure_note);
COMMENT ON FUNCTION tokenkeeper.update_body(text, jsonb, text) IS
    'Internal: what the generated trigger function of an UPDATE does for each row: calls the function changed if a column has changed that the expressions '
    'use.';

CREATE OR REPLACE FUNCTION tokenkeeper.lost_rows(attached text, facts jsonb, key_text text, rows text, condition text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
-- LIMIT makes the other row a look-up for each token, and no join with the whole table.
RETURN format($body$SELECT l.environment, l.topic, l.token, l.registered_at AS lost_at, o.registered_at, o.device_id, o.user_id, o.tags, o.token IS NULL AS is_lost, l.row_key
        FROM (SELECT DISTINCT ON (f.environment, f.topic, f.token) f.* FROM (SELECT %2$s, %3$s, %4$s FROM %5$s WHERE %6$s)
                  AS f (%1$s, spelled, row_key) ORDER BY f.environment, f.topic, f.token, f.registered_at DESC) AS l
        LEFT JOIN LATERAL (
            SELECT o.* FROM (%7$s) AS o (%1$s)
            WHERE o.token = l.token AND o.topic = l.topic AND o.environment = l.environment ORDER BY o.registered_at DESC LIMIT 1) AS o ON true$body$,
        tokenkeeper.fact_columns(), tokenkeeper.fact_list(facts), facts ->> 'token', key_text, rows, condition,
        tokenkeeper.other_row(attached, facts, 'l.spelled', 'l.token'));
COMMENT ON FUNCTION tokenkeeper.lost_rows(text, jsonb, text, text, text) IS
    'Internal: a query for the tokens of rows (as for insert_body, and a condition), each with the facts of another row of the table that has it; is_lost if '
    'there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.insert_body(source text, attached regclass, plan jsonb, rows text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format($body$        INSERT INTO tokenkeeper.registration (%1$s, returned, source_id, row_key)
        SELECT %2$s, true, %3$s, %4$s FROM %5$s WHERE %6$s;
$body$, tokenkeeper.fact_columns(), tokenkeeper.fact_list(plan -> 'facts'), source, plan ->> 'key_text', rows, tokenkeeper.fact_test(plan -> 'facts'))
    || CASE WHEN plan -> 'facts' ? 'logged_out' THEN format($body$        IF EXISTS (SELECT FROM %1$s WHERE %2$s) THEN
            PERFORM tokenkeeper.check_attached_name(%3$L, TG_RELID);
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id, row_key)
            SELECT w.environment, w.topic, w.token, w.lost_at, true, %4$s, w.row_key FROM (%5$s) AS w WHERE w.is_lost;
        END IF;
$body$, rows, tokenkeeper.logged_out_test(plan -> 'facts'), attached, source,
        tokenkeeper.lost_rows(attached::text, plan -> 'facts', plan ->> 'key_text', rows, tokenkeeper.logged_out_test(plan -> 'facts'))) ELSE '' END;
COMMENT ON FUNCTION tokenkeeper.insert_body(text, regclass, jsonb, text) IS
    'Internal: what the generated trigger function of an INSERT does. rows is a relation r, as SQL, or anything if r is the variable.';

CREATE OR REPLACE FUNCTION tokenkeeper.change_function(source text, attached regclass, plan jsonb) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format($body$#variable_conflict use_column
DECLARE
    was tokenkeeper.fact;
    is_now tokenkeeper.fact;
    same_topic boolean;
    had_it boolean;
    same_device boolean;
BEGIN
    IF only_new THEN
        -- Not what follows, which PostgreSQL has planned for the types that the columns had when the session began.
%10$s        RETURN;
    END IF;
    was := CASE WHEN %1$s THEN ROW(%2$s)::tokenkeeper.fact END;
    is_now := CASE WHEN %3$s THEN ROW(%4$s)::tokenkeeper.fact END;
    IF is_now IS NOT DISTINCT FROM was THEN
        RETURN;
    END IF;
    same_topic := (was.topic = is_now.topic AND was.environment = is_now.environment) IS TRUE;
    had_it := same_topic AND was.token = is_now.token;
    same_device := (same_topic AND NOT had_it AND was.device_id <> '' AND tokenkeeper.device_name(was.device_id) = tokenkeeper.device_name(is_now.device_id)) IS TRUE;
    IF is_now.token IS NOT NULL THEN
        INSERT INTO tokenkeeper.registration (%5$s, returned, source_id, row_key)
        VALUES (is_now.environment, is_now.topic, is_now.token,
                -- An instant in the future has counted as the moment of the write that set it.
                CASE WHEN had_it AND was.registered_at = is_now.registered_at AND is_now.registered_at > clock_timestamp() THEN 'epoch'
                     ELSE is_now.registered_at END, is_now.device_id, is_now.user_id, is_now.tags, NOT had_it, %6$s, %7$s);
        IF same_device AND was.registered_at > is_now.registered_at THEN
            -- Of two transactions that overlap, the later one may write the earlier instant. The old token would supersede the new one: it leaves the device.
            INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, source_id, row_key)
            VALUES (was.environment, was.topic, was.token, was.registered_at, '', %6$s, %7$s);
        END IF;
    END IF;
    IF was.token IS NULL OR had_it OR (same_device AND was.registered_at < is_now.registered_at AND tokenkeeper.has_one_token_per_device(is_now.topic)) THEN
        RETURN;
    END IF;
    -- The row has lost its token: another row may have it.
    PERFORM tokenkeeper.check_attached_name(%8$L, tg_relid);
    INSERT INTO tokenkeeper.registration (%5$s, unregistered, source_id, row_key)
    SELECT was.environment, was.topic, was.token, coalesce(o.registered_at, clock_timestamp()), o.device_id, o.user_id, o.tags, o.token IS NULL, %6$s, %7$s
    FROM (SELECT) AS nothing LEFT JOIN (
        SELECT o.* FROM (%9$s) AS o (%5$s)
        WHERE o.token = was.token AND o.topic = was.topic AND o.environment = was.environment ORDER BY o.registered_at DESC LIMIT 1) AS o ON true;
END
$body$, tokenkeeper.fact_test(plan -> 'old_facts'), tokenkeeper.fact_list(plan -> 'old_facts'), tokenkeeper.fact_test(plan -> 'facts'), tokenkeeper.fact_list(plan -> 'facts'),
    tokenkeeper.fact_columns(), source, plan ->> 'key_text', attached,
    tokenkeeper.other_row(attached::text, plan -> 'facts', format('(%s)', plan -> 'old_facts' ->> 'token'), 'was.token'),
    tokenkeeper.insert_body(source, attached, plan, '(SELECT) AS nothing'));
COMMENT ON FUNCTION tokenkeeper.change_function(text, regclass, jsonb) IS
    'Internal: the body of the generated function that queues an UPDATE of a row. Its parameters are old_row, r, only_new (only r can be read) and tg_relid.';

CREATE OR REPLACE FUNCTION tokenkeeper.delete_body(source text, attached regclass, plan jsonb, rows text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format($body$        PERFORM tokenkeeper.check_attached_name(%1$L, TG_RELID);
        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, row_key)
        SELECT w.environment, w.topic, w.token, coalesce(w.registered_at, clock_timestamp()), w.device_id, w.user_id, w.tags, w.is_lost, %2$s, w.row_key
        FROM (%3$s) AS w;
$body$, attached, source,
        tokenkeeper.lost_rows(attached::text, plan -> 'facts', plan ->> 'key_text', rows, tokenkeeper.fact_test(plan -> 'facts')));
COMMENT ON FUNCTION tokenkeeper.delete_body(text, regclass, jsonb, text) IS 'Internal: as insert_body, for a DELETE.';

-- If even the failure cannot be noted, the server's log has it. No message: it may quote a row.
CREATE OR REPLACE FUNCTION tokenkeeper.failure_note(source text, attached regclass) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format($body$        BEGIN
            PERFORM tokenkeeper.note_attachment_failure(%1$s, failed_state, failed_constraint);
        EXCEPTION WHEN OTHERS THEN
            RAISE LOG 'tokenkeeper: a change of %% was not queued, and this could not be noted: %% %%', %2$L, failed_state, failed_constraint;
        END;
$body$, source, attached);
COMMENT ON FUNCTION tokenkeeper.failure_note(text, regclass) IS 'Internal: the part of a generated trigger function that records a failure.';

CREATE OR REPLACE FUNCTION tokenkeeper.trigger_function(kind text, source text, attached regclass, plan jsonb, each_row boolean, changed text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
-- The provider's write never fails because of this function.
RETURN format($body$#variable_conflict use_column
DECLARE
    r ALIAS FOR NEW;
    old_row ALIAS FOR OLD;
    -- No variable has a type of ours: where a dump was restored without this schema, the function must still begin.
    failed_state pg_catalog.text;
    failed_constraint pg_catalog.text;
BEGIN
    BEGIN
%s    END;
    RETURN NULL;
END
$body$, CASE WHEN kind = 'update' THEN tokenkeeper.update_body(changed, plan, tokenkeeper.failure_note(source, attached))
    ELSE CASE kind
        WHEN 'insert' THEN tokenkeeper.insert_body(source, attached, plan, CASE WHEN each_row THEN '(SELECT) AS nothing' ELSE 'changed_rows AS r' END)
        ELSE tokenkeeper.delete_body(source, attached, plan, CASE WHEN each_row THEN '(SELECT OLD.*) AS r' ELSE 'changed_rows AS r' END) END
    || format($body$    EXCEPTION WHEN OTHERS OR assert_failure THEN
        GET STACKED DIAGNOSTICS failed_state = RETURNED_SQLSTATE, failed_constraint = CONSTRAINT_NAME;
%s$body$, CASE WHEN each_row THEN tokenkeeper.failure_note(source, attached)
    ELSE format($body$        -- Row by row, only those that cannot be read are lost.
        FOR NEW IN SELECT * FROM changed_rows LOOP
            BEGIN
%s            EXCEPTION WHEN OTHERS OR assert_failure THEN
                GET STACKED DIAGNOSTICS failed_state = RETURNED_SQLSTATE, failed_constraint = CONSTRAINT_NAME;
%s            END;
        END LOOP;
$body$, CASE kind WHEN 'delete' THEN tokenkeeper.delete_body(source, attached, plan, '(SELECT) AS nothing')
                  ELSE tokenkeeper.insert_body(source, attached, plan, '(SELECT) AS nothing') END, tokenkeeper.failure_note(source, attached)) END) END);
COMMENT ON FUNCTION tokenkeeper.trigger_function(text, text, regclass, jsonb, boolean, text) IS
    'Internal: the body of a generated trigger function: insert, update or delete. each_row is false if it reads a transition table. changed is the function '
    'of change_function.';

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_statements(attached regclass, source text, plan jsonb) RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this pg_class;
    place text;
    called text;
    parameters text;
    kind text;
    each_row boolean;
BEGIN
    SELECT c.* INTO this FROM pg_class AS c WHERE c.oid = attached;
    place := quote_ident((SELECT n.nspname FROM pg_namespace AS n WHERE n.oid = this.relnamespace));
    FOREACH kind IN ARRAY ARRAY['change', 'insert', 'update'] || CASE plan ->> 'on_delete' WHEN 'unregister' THEN ARRAY['delete'] END LOOP
        -- An UPDATE is seen row by row: a transition table takes all rows of all updates. What logical replication applies, and statements on the parent of an
        -- inherited or partitioned table, fire triggers for rows only.
        each_row := kind = 'update' OR (plan ->> 'always')::boolean OR this.relkind = 'p'
            OR EXISTS (SELECT FROM pg_inherits AS i WHERE attached IN (i.inhrelid, i.inhparent));
        called := format('tokenkeeper_%s_%s', kind, source);
        parameters := CASE kind WHEN 'change' THEN 'record, record, boolean, oid' ELSE '' END;
        RETURN NEXT format('CREATE ' || 'FUNCTION %s.%s(%s LANGUAGE plpgsql %s AS %L', place, called, CASE kind
            WHEN 'change' THEN 'old_row record, r record, only_new boolean, tg_relid oid) RETURNS void' ELSE ') RETURNS trigger SECURITY DEFINER' END, CASE WHEN kind <> 'update' THEN
            -- To set the path costs as much as all that the function of an UPDATE does: so that one names everything with its schema.
            'SET search_path = pg_catalog, pg_temp SET timezone = ''UTC'' SET datestyle = ''ISO, YMD'' SET intervalstyle = ''postgres'' SET bytea_output = ''hex''' END,
            CASE kind WHEN 'change' THEN tokenkeeper.change_function(source, attached, plan)
                      ELSE tokenkeeper.trigger_function(kind, source, attached, plan, each_row, format('%s.tokenkeeper_change_%s', place, source)) END);
        RETURN NEXT format('REVOKE ALL ON FUNCTION %s.%s(%s) FROM PUBLIC', place, called, parameters);
        RETURN NEXT format('COMMENT ON FUNCTION %s.%s(%s) IS %L', place, called, parameters,
            format('Generated by tokenkeeper.attach for %s; tokenkeeper.detach removes it.', attached));
        RETURN NEXT format('ALTER FUNCTION %s.%s(%s) OWNER TO %I', place, called, parameters, pg_get_userbyid(this.relowner));
        CONTINUE WHEN kind = 'change';
        RETURN NEXT format('CREATE TRIGGER %s AFTER %s ON %s %s EXECUTE FUNCTION %s.%1$s()', called, upper(kind), attached, CASE
            WHEN each_row THEN 'FOR EACH ROW'
            ELSE format('REFERENCING %s TABLE AS changed_rows FOR EACH STATEMENT', CASE kind WHEN 'insert' THEN 'NEW' ELSE 'OLD' END) END, place);
        IF (plan ->> 'always')::boolean THEN
            RETURN NEXT format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %s', attached, called);
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_statements(regclass, text, jsonb) IS
    'Internal: what attach executes: the generated functions and triggers. Raises 22004 without a table.';
