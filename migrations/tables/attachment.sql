-- Attached tables: who may act for them, what belongs to an attachment, and how its triggers report failures.
--
-- Only the table's owner executes what belongs to the owner. A default argument, a cast, a deferred trigger and set_config of a function run with the
-- rights of the session around it, whatever SECURITY DEFINER says. So no function of the schema that has rights of its own calls a function of the
-- owner, and neither does the daemon. docs/decisions/attachments.md has the reasons.
--
-- attach (attach.sql) reads the owner's expressions (expression.sql), makes the SQL of facts of them (facts.sql), and generates functions in the schema of the
-- table, named by the source_id of the attachment (triggers.sql). detach (detach.sql) undoes that. backfill.sql queues the rows that are there.
--
-- Of a row of an attachment, user_id and tags count from queued_at, not from registered_at: an administrator may change tags long after the
-- device registered, and that must neither revive the token nor lose against the old tags.

CREATE OR REPLACE FUNCTION tokenkeeper.table_named(name text) RETURNS regclass
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN to_regclass(table_named.name);
EXCEPTION WHEN syntax_error OR invalid_name OR feature_not_supported OR insufficient_privilege THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.table_named(text) IS
    'Internal: the table of that name, as SQL writes it. Null if there is none, or none that the role may see, or for an invalid name.';

CREATE OR REPLACE FUNCTION tokenkeeper.full_name(of_table regclass) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN (SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = of_table);
COMMENT ON FUNCTION tokenkeeper.full_name(regclass) IS 'Internal: the schema and name of a table, quoted where SQL needs it.';

CREATE OR REPLACE FUNCTION tokenkeeper.required_table(name text) RETURNS regclass
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_table regclass := tokenkeeper.table_named(required_table.name);
    meant text[] COLLATE "C";
BEGIN
    IF found_table IS NULL THEN
        meant := ARRAY(
            SELECT tokenkeeper.full_name(c.oid) FROM pg_class AS c
            WHERE c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND has_schema_privilege(c.relnamespace, 'USAGE')
              AND lower(c.relname COLLATE "C") = lower(regexp_replace(required_table.name COLLATE "C", '^.*[.]|"', '', 'g')) LIMIT 10);
        -- Without its schema.
        IF cardinality(meant) = 1 AND split_part(meant[1], '.', 2) IN (lower(required_table.name COLLATE "C"), required_table.name) THEN
            RETURN tokenkeeper.table_named(meant[1]);
        END IF;
        RAISE EXCEPTION 'there is no table %', coalesce(quote_literal(left(required_table.name, 200)), 'null') USING ERRCODE = 'undefined_table',
            HINT = 'Write the schema and the name as SQL does, with quotes around names that are not lower case'
                   || CASE meant WHEN '{}' THEN ', such as app."DeviceToken"' ELSE ': ' || array_to_string(meant, ', ') END || '.';
    END IF;
    RETURN found_table;
END
$$;
COMMENT ON FUNCTION tokenkeeper.required_table(text) IS
    'Internal: the table of that name, as SQL writes it; without a schema if only one table has the name. Raises 42P01 otherwise, with the names that it may '
    'mean.';

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_named(name text) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted CONSTANT text COLLATE "C" := attachment_named.name;
    of_table regclass := tokenkeeper.table_named(wanted);
BEGIN
    RETURN (
        SELECT CASE WHEN count(*) = 1 OR bool_or(f.rank = 1) THEN (array_agg(f.source_id ORDER BY f.rank))[1] END FROM (
            SELECT a.source_id, CASE WHEN a.name = wanted THEN 1 ELSE 2 END AS rank
            FROM tokenkeeper.attachment AS a LEFT JOIN pg_class AS c ON c.oid = a.table_id LEFT JOIN pg_roles AS o ON o.rolname = a.attached_by
            -- By the table, only one that was given no name: a name that was given has no dot.
            WHERE (a.name = wanted OR a.table_id = of_table AND strpos(a.name, '.') > 0 OR right(a.name, length(wanted) + 1) = '.' || wanted)
              -- Nobody hides an attachment of others by its name. A table that was dropped has no owner.
              AND pg_has_role(session_user, coalesce(c.relowner, o.oid), 'MEMBER')) AS f);
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_named(text) IS
    'Internal: the source_id of the attachment of that name, or of the one of the table of that name that was given no name; without a schema if that is '
    'unambiguous. Null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.raise_not_attached(name text) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    several text := (SELECT string_agg(a.name, ', ' ORDER BY a.name) FROM tokenkeeper.attachment AS a
                     WHERE a.table_id = tokenkeeper.table_named(raise_not_attached.name));
BEGIN
    RAISE EXCEPTION '% is not attached%', coalesce(quote_literal(left(raise_not_attached.name, 200)), 'null'), coalesce(' under this name, but as ' || several, '')
        USING ERRCODE = 'invalid_parameter_value', HINT = 'The view tokenkeeper.attachment lists the attached tables.';
END
$$;
COMMENT ON FUNCTION tokenkeeper.raise_not_attached(text) IS 'Internal: raises 22023 for a name of no attachment, or of a table with several.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_owner_session(attached regclass) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    owner_id oid := (SELECT c.relowner FROM pg_class AS c WHERE c.oid = attached);
    owner_name name := pg_get_userbyid(owner_id);
    too_much text;
BEGIN
    IF owner_id IS NULL OR NOT pg_has_role(session_user, owner_id, 'MEMBER') THEN
        RAISE EXCEPTION '% is no member of the owner of %', session_user, coalesce(attached::text, 'null') USING ERRCODE = 'insufficient_privilege',
            HINT = 'Connect as the owner of the table.';
    END IF;
    -- The login counts: code of the table may RESET ROLE, or RESET SESSION AUTHORIZATION.
    IF (SELECT r.rolsuper FROM pg_roles AS r WHERE r.oid = owner_id) THEN
        RAISE EXCEPTION '% belongs to the superuser %', attached, owner_name USING ERRCODE = 'insufficient_privilege',
            HINT = 'Its triggers would run with all rights. Give the table to the role of the application: ALTER TABLE ... OWNER TO.';
    END IF;
    IF EXISTS (
        SELECT FROM pg_roles AS r
        WHERE r.rolsuper AND (r.rolname = session_user OR r.oid = (SELECT a.usesysid FROM pg_stat_get_activity(pg_backend_pid()) AS a))) THEN
        RAISE EXCEPTION 'the login of this session is a superuser, and % belongs to %', attached, owner_name USING ERRCODE = 'insufficient_privilege',
            HINT = 'Code of the table would run with all rights. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
    SELECT string_agg(quote_ident(o.rolname), ', ' ORDER BY o.rolname) INTO too_much FROM pg_roles AS o
    WHERE o.rolname <> session_user AND pg_has_role(session_user, o.oid, 'MEMBER') AND NOT pg_has_role(owner_id, o.oid, 'MEMBER');
    -- With CREATEROLE, for example, the code could make the owner a member of our roles.
    IF too_much IS NULL AND EXISTS (
        SELECT FROM pg_roles AS l CROSS JOIN pg_roles AS w
        WHERE l.rolname = session_user AND w.oid = owner_id
          AND (l.rolcreaterole > w.rolcreaterole OR l.rolcreatedb > w.rolcreatedb OR l.rolreplication > w.rolreplication OR l.rolbypassrls > w.rolbypassrls)) THEN
        RAISE EXCEPTION '% may create roles or databases, replicate or bypass row-level security, and the owner of %, %, may not',
            session_user, attached, owner_name USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Code of the table would run with rights that its owner lacks. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
    IF too_much IS NULL AND has_table_privilege(session_user, 'tokenkeeper.ledger', 'SELECT, INSERT, UPDATE, DELETE')
        AND NOT has_table_privilege(owner_id, 'tokenkeeper.ledger', 'SELECT, INSERT, UPDATE, DELETE') THEN
        too_much := 'a role with rights on tokenkeeper.ledger';
    END IF;
    IF too_much IS NOT NULL THEN
        RAISE EXCEPTION '% is a member of %, and the owner of %, %, is not', session_user, too_much, attached, owner_name
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Code of the table would run with rights that its owner lacks. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_owner_session(regclass) IS
    'Internal: raises 42501 unless this session may execute code of the table: its login (not SET ROLE) is a member of the table''s owner; neither is a '
    'superuser; and the login has no role, no right on the ledger, and no right to create roles or databases, to replicate or to bypass row-level security '
    'that the owner lacks.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_attached_name(name text, changed oid) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF to_regclass(check_attached_name.name) IS DISTINCT FROM coalesce(pg_partition_root(changed), changed) THEN
        RAISE EXCEPTION '% is another table now', check_attached_name.name USING ERRCODE = 'undefined_table',
            HINT = 'Detach the table and attach it again.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_attached_name(text, oid) IS
    'Internal, for the generated triggers: raises 42P01 unless the table of this name is the one that changed, or its partitioned table. Reading another '
    'table could execute code of others with the rights of the table''s owner.';

-- With the rights of its caller, the table's owner, which the view checks: the trigger that calls it is SECURITY DEFINER.
CREATE OR REPLACE FUNCTION tokenkeeper.note_attachment_failure(source_id bigint, state text, constraint_name text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tokenkeeper.own_attachment_failure (source_id, state, constraint_name)
    VALUES (note_attachment_failure.source_id, note_attachment_failure.state, note_attachment_failure.constraint_name);
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_attachment_failure(bigint, text, text) IS
    'Internal, for the generated triggers: records that a change could not be queued, with SQLSTATE and the name of the constraint, for at most about 100 '
    'failures of a source until the daemon counts them. Raises 44000 unless the current role has the rights of the table''s owner, 23502 without a source or '
    'a state.';

CREATE OR REPLACE FUNCTION tokenkeeper.bound_attachment_failure() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM tokenkeeper.attachment_failure AS f WHERE f.source_id = NEW.source_id LIMIT 100) AS k) >= 100 THEN
        RETURN NULL;
    END IF;
    NEW.state := regexp_replace(left(NEW.state, 5), '[^0-9A-Z]', '?', 'g');
    NEW.constraint_name := nullif(regexp_replace(left(NEW.constraint_name, 63), '[[:cntrl:]]', '?', 'g'), '');
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION tokenkeeper.bound_attachment_failure() IS
    'Keeps attachment_failure small: limits the length of SQLSTATE and name, and a source to 100 rows, apart from those of open transactions.';

CREATE OR REPLACE FUNCTION tokenkeeper.stray_triggers(of_table regclass) RETURNS text[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.tgname::text FROM pg_trigger AS t
        WHERE t.tgrelid = of_table AND t.tgparentid = 0 AND t.tgname COLLATE "C" ~ '^tokenkeeper_(insert|update|delete)_[0-9]+$'
          AND NOT EXISTS (SELECT FROM tokenkeeper.attachment AS a
                          WHERE a.table_id = of_table AND a.source_id::text = substring(t.tgname COLLATE "C" FROM '[0-9]+$'))
        ORDER BY t.tgname);
END
$$;
COMMENT ON FUNCTION tokenkeeper.stray_triggers(regclass) IS
    'Internal: the triggers of a table that attach generated and that belong to no attachment of this database: they came with a dump.';
