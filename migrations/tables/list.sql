-- The import of a complete list: which of its tokens are back, and which are gone. What it queues passes the guard for logouts, as what attached tables report.
--
-- Locks: the row of the list; each batch of its import waits for it. Then the list's members.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_list(source_id bigint, list text, as_of timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted CONSTANT text COLLATE "C" := begin_list.list;
    known tokenkeeper.list;
BEGIN
    IF (wanted ~ '^[A-Za-z0-9_.-]{1,60}$') IS NOT TRUE THEN
        RAISE EXCEPTION 'list is %, expected up to 60 letters, digits, -, _ and dots', coalesce(quote_literal(left(wanted, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (begin_list.as_of BETWEEN '2008-01-01 00:00:00+00' AND clock_timestamp()) IS NOT TRUE THEN
        RAISE EXCEPTION 'as_of is %, expected an instant between 2008 and now', coalesce(begin_list.as_of::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE tokenkeeper.registration_source AS s SET list = wanted, as_of = begin_list.as_of
    WHERE s.source_id = begin_list.source_id AND s.kind = 'import' AND s.done_by = session_user AND s.list IS NULL AND s.queued = 0
      AND s.finished_at IS NULL AND s.withdrawn_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no import % of % that begins', coalesce(begin_list.source_id::text, 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tokenkeeper.list AS l (name, source_id, as_of) VALUES (wanted, begin_list.source_id, begin_list.as_of) ON CONFLICT DO NOTHING;
    SELECT l.* INTO known FROM tokenkeeper.list AS l WHERE l.name = wanted FOR UPDATE;
    IF known.source_id = begin_list.source_id THEN
        RETURN;
    END IF;
    IF known.done_by <> session_user THEN
        RAISE EXCEPTION 'the list % is imported by %', known.name, known.done_by USING ERRCODE = 'insufficient_privilege';
    END IF;
    IF known.as_of > begin_list.as_of THEN
        RAISE EXCEPTION 'the list % was imported as of %, and this file is as of %', known.name, known.as_of, begin_list.as_of
            USING ERRCODE = 'invalid_parameter_value', HINT = 'If the later instant is wrong, drop_list removes the list. The next import then logs nobody out.';
    END IF;
    IF known.advanced_at > clock_timestamp() - interval '5 minutes' AND EXISTS (
        SELECT FROM tokenkeeper.registration_source AS s
        JOIN tokenkeeper.registration_source AS o ON o.source_id = begin_list.source_id
        -- Two processes do not import one file at once.
        WHERE s.source_id = known.source_id AND s.finished_at IS NULL AND s.withdrawn_at IS NULL AND s.name <> o.name) THEN
        RAISE EXCEPTION 'source % is importing the list %', known.source_id, known.name USING ERRCODE = 'object_in_use',
            HINT = 'Continue it, or begin again when it has not advanced for five minutes.';
    END IF;
    -- as_of moves with its first tokens: a file that has none says nothing.
    UPDATE tokenkeeper.list AS l SET source_id = begin_list.source_id, advanced_at = clock_timestamp() WHERE l.list_id = known.list_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_list(bigint, text, timestamptz) IS
    'Internal, for the command: makes an import that begins one of a complete list, true at as_of; earlier imports of the list cannot go on. Raises 22023 '
    'for another name or instant, for an import of another login or one that has begun, and if the list was imported as of later; 42501 if another login '
    'imports the list; 55006 while an unfinished import of it, from another file, has advanced within five minutes.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_list(source_id bigint) RETURNS tokenkeeper.list
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.list;
BEGIN
    UPDATE tokenkeeper.list AS l SET advanced_at = clock_timestamp()
    WHERE l.source_id = lock_list.source_id AND l.done_by = session_user RETURNING l.* INTO known;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is not the latest import of a list of %', coalesce(lock_list.source_id::text, 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Import the file again with --restart.';
    END IF;
    RETURN known;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_list(bigint) IS
    'Internal: locks the list of an import. Raises 22023 unless it is the latest of the list, and of this login.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_listed(source_id bigint, environments text[], topics text[], tokens text[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    known CONSTANT tokenkeeper.list := tokenkeeper.lock_list(note_listed.source_id);
    -- With the collation of the columns, whatever that of the arguments is.
    in_environments CONSTANT text[] COLLATE "C" := environments;
    of_topics CONSTANT text[] COLLATE "C" := topics;
    returned bigint;
BEGIN
    IF EXISTS (
        SELECT FROM unnest(in_environments, of_topics, tokens) AS g (environment, topic, token)
        GROUP BY g.environment, g.topic
        HAVING tokenkeeper.environment_fault(coalesce(g.environment, 'null')) IS NOT NULL OR tokenkeeper.topic_fault(g.topic) IS NOT NULL
            OR g.topic IS NULL OR bool_or(tokenkeeper.token_key(g.token) IS NULL)) THEN
        RAISE EXCEPTION 'environments, topics or tokens has what no row of the queue may have' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE tokenkeeper.list AS l SET as_of = s.as_of FROM tokenkeeper.registration_source AS s
    WHERE l.list_id = known.list_id AND s.source_id = note_listed.source_id AND l.as_of < s.as_of AND cardinality(tokens) > 0;
    WITH given AS MATERIALIZED (
        SELECT DISTINCT g.environment, g.topic, tokenkeeper.token_key(g.token) AS token_key FROM unnest(in_environments, of_topics, tokens) AS g (environment, topic, token)
    ), seen AS (
        UPDATE tokenkeeper.list_member AS m SET seen_by = note_listed.source_id FROM given AS g
        WHERE m.list_id = known.list_id AND m.topic = g.topic AND m.environment = g.environment AND m.token_key = g.token_key
        RETURNING m.topic, m.environment, m.token_key
    ), new AS (
        INSERT INTO tokenkeeper.list_member AS m (list_id, environment, topic, token_key, seen_by)
        SELECT known.list_id, g.environment, g.topic, g.token_key, note_listed.source_id FROM (
            SELECT g.environment, g.topic, g.token_key FROM given AS g EXCEPT SELECT s.environment, s.topic, s.token_key FROM seen AS s) AS g
        ORDER BY 3, 2, 4
        RETURNING m.environment, m.topic, m.token_key
    ), back AS (
        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, returned, source_id)
        SELECT n.environment, n.topic, encode(n.token_key, 'hex'), 'epoch', true, note_listed.source_id FROM new AS n WHERE known.is_known RETURNING 1
    )
    SELECT count(*) FROM back INTO returned;
    RETURN returned;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_listed(bigint, text[], text[], text[]) IS
    'Internal, for the command: notes that these tokens, in hex, are in the list of an import. Queues the return of those that were not in it before, and '
    'returns their number. Call it in the transaction that queues their rows. Raises 22023 unless the import is the latest of the list, and for an '
    'environment, a topic or a token that cannot be.';

CREATE OR REPLACE FUNCTION tokenkeeper.log_out_unlisted(source_id bigint, max_rows integer, OUT gone bigint, OUT queued bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
DECLARE
    known tokenkeeper.list := tokenkeeper.lock_list(log_out_unlisted.source_id);
    source tokenkeeper.registration_source;
BEGIN
    SELECT s.* INTO source FROM tokenkeeper.registration_source AS s WHERE s.source_id = known.source_id;
    IF source.withdrawn_at IS NOT NULL OR source.refused > 0 OR source.queued = 0 OR (log_out_unlisted.max_rows BETWEEN 1 AND 100000) IS NOT TRUE THEN
        RAISE EXCEPTION 'source % has queued % and refused % rows%, and max_rows is %', source.source_id, source.queued, source.refused,
            CASE WHEN source.withdrawn_at IS NOT NULL THEN ' and was withdrawn' ELSE '' END, coalesce(log_out_unlisted.max_rows::text, 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A refused row may have any token, so none is gone.';
    END IF;
    WITH left_out AS (
        DELETE FROM tokenkeeper.list_member AS m WHERE m.ctid = ANY (ARRAY(
            SELECT o.ctid FROM tokenkeeper.list_member AS o
            WHERE o.list_id = known.list_id AND o.seen_by <> known.source_id LIMIT log_out_unlisted.max_rows))
        RETURNING m.environment, m.topic, m.token_key
    ), out AS (
        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
        SELECT l.environment, l.topic, encode(l.token_key, 'hex'), source.as_of, true, known.source_id FROM left_out AS l WHERE known.is_known RETURNING 1
    )
    SELECT (SELECT count(*) FROM left_out), (SELECT count(*) FROM out) INTO gone, queued;
    IF gone = 0 THEN
        UPDATE tokenkeeper.list AS l SET is_known = true, as_of = greatest(l.as_of, source.as_of) WHERE l.list_id = known.list_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.log_out_unlisted(bigint, integer) IS
    'Internal, for the command: when all rows of an import of a complete list are queued, removes tokens that it did not have from the list, and queues '
    'their logouts as of the list, max_rows at a time. Call it again until gone is 0. Logs nobody out if the list was not known before. Raises 22023 '
    'unless the import is the latest of the list, has queued a row and refused none, and was not withdrawn.';

CREATE OR REPLACE FUNCTION tokenkeeper.list_state(list text, OUT members bigint, OUT is_known boolean, OUT as_of timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted CONSTANT text COLLATE "C" := list_state.list;
BEGIN
    SELECT (SELECT count(*) FROM tokenkeeper.list_member AS m WHERE m.list_id = l.list_id), l.is_known, l.as_of
    INTO members, is_known, as_of FROM tokenkeeper.list AS l WHERE l.name = wanted AND l.done_by = session_user;
END
$$;
COMMENT ON FUNCTION tokenkeeper.list_state(text) IS
    'Internal, for the command: of a list of this login, how many tokens it has, whether they are all, and when it was true. Null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.count_listed(list text, environments text[], topics text[], tokens text[]) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    wanted CONSTANT text COLLATE "C" := count_listed.list;
    in_environments CONSTANT text[] COLLATE "C" := environments;
    of_topics CONSTANT text[] COLLATE "C" := topics;
BEGIN
    RETURN (
        SELECT count(*) FROM tokenkeeper.list AS l CROSS JOIN unnest(in_environments, of_topics, tokens) AS g (environment, topic, token)
        JOIN tokenkeeper.list_member AS m
            ON m.list_id = l.list_id AND m.topic = g.topic AND m.environment = g.environment AND m.token_key = tokenkeeper.token_key(g.token)
        WHERE l.name = wanted AND l.done_by = session_user);
END
$$;
COMMENT ON FUNCTION tokenkeeper.count_listed(text, text[], text[], text[]) IS
    'Internal, for the command: how many of these tokens, in hex, are in a list of this login.';

CREATE OR REPLACE FUNCTION tokenkeeper.drop_list(list text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted CONSTANT text COLLATE "C" := drop_list.list;
    dropped bigint;
    members bigint;
BEGIN
    DELETE FROM tokenkeeper.list AS l
    WHERE l.name = wanted
      AND (l.done_by = session_user
           OR EXISTS (SELECT FROM pg_catalog.pg_roles AS o WHERE o.rolname = 'tokenkeeper_operator' AND pg_has_role(session_user, o.oid, 'MEMBER')))
    RETURNING l.list_id INTO dropped;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no list % of %', coalesce(quote_literal(left(wanted, 100)), 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM tokenkeeper.list_member AS m WHERE m.list_id = dropped;
    GET DIAGNOSTICS members = ROW_COUNT;
    RETURN members;
END
$$;
COMMENT ON FUNCTION tokenkeeper.drop_list(text) IS
    'Removes a complete list; returns how many tokens it had. Logs nobody out. For the login that imports it, and operators. Raises 22023 for an unknown '
    'list.';
