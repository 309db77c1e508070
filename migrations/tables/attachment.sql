-- Attached tables: what their triggers queue, who may act for them, and the functions that the rest of the schema calls.
--
-- Only the table's owner executes what belongs to the owner. A default argument, a cast, a deferred trigger and set_config of a function run with the
-- rights of the session around it, whatever SECURITY DEFINER says. So no function of the schema that has rights of its own calls a function of the
-- owner, and neither does the daemon. docs/decisions/attachments.md has the reasons.
--
-- attach (attach.sql) generates functions in the schema of the attached table, named by the source_id of the attachment (17, for example). They belong to the
-- table's owner, and only the owner can call them:
--
--   tokenkeeper_insert_17(), tokenkeeper_update_17(), tokenkeeper_delete_17() RETURNS trigger    SECURITY DEFINER with a pinned search_path
--       Queue rows in registration with source_id 17. A logout is queued only if no registered row of the table has the token. See triggers.sql.
--   tokenkeeper_read_17(after text, max_rows integer) RETURNS TABLE (key text, environment text, topic text, token text,
--           registered_at timestamptz, device_id text, user_id text, tags text[], unregistered boolean, stale_at timestamptz)   STABLE
--       For a backfill (backfill.sql), in a session of the owner: the next rows by the table's key, after the row with the key `after` (null: from the
--       beginning), as a trigger would queue them on INSERT. key is the key as text (several columns: a JSON array of texts). token is null or empty
--       for a row without a token, and null for a logged-out row if a registered row has its token. Of a logged-out row, registered_at is the row's last
--       registration: the earliest instant that suppresses. Where the column is null, and with revive => 'by register only', it is 1970-01-01, which
--       registers an unknown token and revives none. Only if the table has a key.
--
-- Called from outside:
--
--   attach(...) RETURNS TABLE (kind text, detail text), detach(attached text) RETURNS void
--   check_attachments() RETURNS TABLE (source_id bigint, name text, fault text, was text, failures bigint, failure text)
--       For the daemon, once a minute: notes the faults in attached_table, and returns what has changed, to be logged. It reads the catalogs only.
--
-- Of a row of an attachment, user_id and tags count from queued_at, not from registered_at: an administrator may change tags long after the
-- device registered, and that must neither revive the token nor lose against the old tags.

CREATE OR REPLACE FUNCTION tokenkeeper.table_named(name text) RETURNS regclass
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN to_regclass(table_named.name);
EXCEPTION WHEN syntax_error OR invalid_name OR feature_not_supported THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.table_named(text) IS 'The table of that name, as SQL writes it. Null if there is none, and for what is no name at all.';

CREATE OR REPLACE FUNCTION tokenkeeper.attachment_named(name text) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT f.source_id FROM (
        SELECT a.source_id, a.table_id IS NOT DISTINCT FROM tokenkeeper.table_named(attachment_named.name) AS is_it, a.name = attachment_named.name AS was_it,
               -- Without its schema, if that leaves no doubt. A table that was dropped may have come again.
               count(*) FILTER (WHERE c.oid IS NOT NULL) OVER () AS existing, c.oid IS NOT NULL AS exists
        FROM tokenkeeper.attachment AS a LEFT JOIN pg_class AS c ON c.oid = a.table_id
        WHERE a.name = attachment_named.name OR a.table_id = tokenkeeper.table_named(attachment_named.name)
           OR right(a.name, length(attachment_named.name) + 1) = '.' || attachment_named.name) AS f
    WHERE f.is_it OR f.was_it OR f.existing <= 1
    ORDER BY f.is_it DESC, f.was_it DESC, f.exists DESC, f.source_id DESC LIMIT 1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.attachment_named(text) IS
    'The source_id of the attached table of that name: its present one, or the one that it had when it was attached, for it may have been dropped. The schema '
    'may be left out if only one attached table has the name. Null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_owner_session(attached regclass) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    owner_id oid := (SELECT c.relowner FROM pg_catalog.pg_class AS c WHERE c.oid = attached);
    owner_name name := pg_get_userbyid(owner_id);
    too_much text;
BEGIN
    IF owner_id IS NULL OR NOT pg_has_role(session_user, owner_id, 'MEMBER') THEN
        RAISE EXCEPTION '% is no member of the owner of %', session_user, coalesce(attached::text, 'null') USING ERRCODE = 'insufficient_privilege',
            HINT = 'Connect as the owner of the table.';
    END IF;
    -- The login counts: code of the table may RESET ROLE, or RESET SESSION AUTHORIZATION.
    IF (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.oid = owner_id) THEN
        RAISE EXCEPTION '% belongs to the superuser %', attached, owner_name USING ERRCODE = 'insufficient_privilege',
            HINT = 'Its triggers would run with all rights. Give the table to the role of the application: ALTER TABLE ... OWNER TO.';
    END IF;
    IF EXISTS (
        SELECT FROM pg_catalog.pg_roles AS r
        WHERE r.rolsuper AND (r.rolname = session_user OR r.oid = (SELECT a.usesysid FROM pg_catalog.pg_stat_get_activity(pg_backend_pid()) AS a))) THEN
        RAISE EXCEPTION 'the login of this session is a superuser, and % belongs to %', attached, owner_name USING ERRCODE = 'insufficient_privilege',
            HINT = 'Code of the table would run with all rights. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
    SELECT string_agg(quote_ident(o.rolname), ', ' ORDER BY o.rolname) INTO too_much FROM pg_catalog.pg_roles AS o
    WHERE o.rolname <> session_user AND pg_has_role(session_user, o.oid, 'MEMBER') AND NOT pg_has_role(owner_id, o.oid, 'MEMBER');
    -- With CREATEROLE, for example, the code could make the owner a member of our roles.
    IF too_much IS NULL AND EXISTS (
        SELECT FROM pg_catalog.pg_roles AS l CROSS JOIN pg_catalog.pg_roles AS w
        WHERE l.rolname = session_user AND w.oid = owner_id
          AND (l.rolcreaterole > w.rolcreaterole OR l.rolcreatedb > w.rolcreatedb OR l.rolreplication > w.rolreplication OR l.rolbypassrls > w.rolbypassrls)) THEN
        RAISE EXCEPTION '% may create roles or databases, replicate or bypass row-level security, and the owner of %, %, may not',
            session_user, attached, owner_name USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Code of the table would run with rights that its owner lacks. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
    IF too_much IS NOT NULL THEN
        RAISE EXCEPTION '% is a member of %, and the owner of %, %, is not', session_user, too_much, attached, owner_name
            USING ERRCODE = 'insufficient_privilege',
                  HINT = 'Code of the table would run with rights that its owner lacks. Connect as the owner of the table; SET ROLE is not enough.';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_owner_session(regclass) IS
    'Raises 42501 unless this session may execute code of the table: its login is a member of the table''s owner, neither is a superuser, and the login has no '
    'role and no right to create roles or databases, to replicate or to bypass row-level security that the owner lacks. The login counts, not the role that '
    'it has set.';

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
    'For the generated triggers: raises 42P01 unless the table of this name is the one that was changed, or its partitioned table. Otherwise somebody else may have '
    'made what has the name now, after the table was renamed, and reading it would execute code of theirs with the rights of the table''s owner.';

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
    'For the generated triggers of an attached table: notes that a change could not be queued. Keeps SQLSTATE and the name of the constraint, and at most '
    'about 100 failures of a source until the daemon has counted them. Raises 44000 unless the current role has the rights of the table''s owner, 23502 '
    'without a source or a state.';

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
    'Keeps attachment_failure small: SQLSTATE and a name have a length, and a source has no more rows than 100, apart from those of open transactions.';

CREATE OR REPLACE FUNCTION tokenkeeper.attached_row_fault(environment text, topic text, token text, registered_at timestamptz) RETURNS text
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN tokenkeeper.parse_token(token) IS NULL THEN tokenkeeper.token_fault(token)
        ELSE coalesce(tokenkeeper.environment_fault(environment), tokenkeeper.topic_fault(topic),
            -- Otherwise each backfill would register the row again.
            CASE WHEN registered_at > clock_timestamp() + interval '1 minute' THEN 'registered_at is ' || registered_at || ', which is in the future' END)
    END
$$;
COMMENT ON FUNCTION tokenkeeper.attached_row_fault(text, text, text, timestamptz) IS
    'Why a row of an attached table cannot be registered, in words; null if it can. For rows that have a token.';
