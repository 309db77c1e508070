-- Backfills: they queue the rows of an attached table.
--
-- backfill_next runs with the rights of its caller, in a session of the table's owner: it executes the owner's tokenkeeper_read_N (attachment.sql), and hands the rows
-- over to store_backfill as plain texts, instants and booleans. begin_backfill, lock_backfill and store_backfill have the rights of the schema's owner;
-- they check the caller and store, and execute nothing of the table.
--
-- Locks: begin_backfill waits for the row of attached_table, lock_backfill for the row of the source.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_backfill(
    attached regclass, OUT source_id bigint, OUT name text, OUT done bigint, OUT estimated bigint, OUT resumes boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_table tokenkeeper.attached_table;
BEGIN
    PERFORM tokenkeeper.check_owner_session(begin_backfill.attached);
    -- Two that begin at once: the second continues what the first has begun.
    SELECT a.* INTO found_table FROM tokenkeeper.attached_table AS a WHERE a.table_id = begin_backfill.attached FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', begin_backfill.attached
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The view tokenkeeper.attachment lists the attached tables.';
    END IF;
    name := found_table.name;
    SELECT s.source_id, s.queued + s.refused INTO source_id, done FROM tokenkeeper.registration_source AS s
    WHERE s.attachment = found_table.source_id AND s.finished_at IS NULL AND s.withdrawn_at IS NULL
    ORDER BY s.source_id DESC LIMIT 1;
    resumes := FOUND;
    IF NOT resumes THEN
        INSERT INTO tokenkeeper.registration_source AS s (kind, name, attachment) VALUES ('backfill', found_table.name, found_table.source_id)
        RETURNING s.source_id INTO source_id;
        done := 0;
    END IF;
    SELECT CASE WHEN min(c.reltuples) >= 0 THEN sum(c.reltuples)::bigint END INTO estimated
    FROM pg_catalog.pg_partition_tree(found_table.table_id) AS p JOIN pg_catalog.pg_class AS c ON c.oid = p.relid WHERE p.isleaf;
    IF estimated IS NULL THEN
        SELECT CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END INTO estimated
        FROM pg_catalog.pg_class AS c WHERE c.oid = found_table.table_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_backfill(regclass) IS
    'Begins to queue the rows of an attached table, or continues the last backfill of it that has not finished. Returns the source_id, how '
    'many rows are done, and how many the table has by PostgreSQL''s statistics (null: unknown). Then call backfill_next. In a session of the table''s owner. '
    'Raises 22023 if the table is not attached, 42501 unless the session may execute code of the table: for a superuser, and for a login with roles of '
    'tokenkeeperd that the table''s owner lacks.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_backfill(source_id bigint, OUT read_function text, OUT "position" text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.registration_source;
    found_table tokenkeeper.attached_table;
    this pg_catalog.pg_class;
BEGIN
    -- Locked: one session at a time takes the next rows of this source.
    SELECT s.* INTO known FROM tokenkeeper.registration_source AS s
    WHERE s.source_id = lock_backfill.source_id AND s.kind = 'backfill' AND s.finished_at IS NULL AND s.withdrawn_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no backfill that goes on', coalesce(lock_backfill.source_id::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT a.* INTO found_table FROM tokenkeeper.attached_table AS a WHERE a.source_id = known.attachment;
    SELECT c.* INTO this FROM pg_catalog.pg_class AS c WHERE c.oid = found_table.table_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', known.name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_owner_session(found_table.table_id);
    -- The function reads the table by its name.
    IF found_table.name <> format('%I.%I', (SELECT n.nspname FROM pg_catalog.pg_namespace AS n WHERE n.oid = this.relnamespace), this.relname) THEN
        RAISE EXCEPTION 'table % has another name now', found_table.name USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Detach the table and attach it again.';
    END IF;
    IF this.relforcerowsecurity THEN
        RAISE EXCEPTION 'row-level security is forced on %, so not all rows can be seen', known.name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_index AS i
        WHERE i.indrelid = found_table.table_id AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
          AND found_table.key_columns = ARRAY(
              SELECT n.attname::text FROM unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, n)
              LEFT JOIN pg_catalog.pg_attribute AS n ON n.attrelid = i.indrelid AND n.attnum = k.number AND n.attnotnull
              WHERE k.n <= i.indnkeyatts ORDER BY k.n)) THEN
        RAISE EXCEPTION 'table % has no key (%) by which its rows could be read', known.name, array_to_string(found_table.key_columns, ', ')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Add a primary key, detach the table and attach it again.';
    END IF;
    -- Whoever may create in the schema could put another function in its place.
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_proc AS p
                   WHERE p.pronamespace = this.relnamespace AND p.proname = 'tokenkeeper_read_' || found_table.source_id AND p.proowner = this.relowner
                     AND p.proargtypes = ARRAY['text'::regtype, 'integer'::regtype]::oidvector) THEN
        RAISE EXCEPTION 'the function that reads % does not belong to its owner', known.name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Detach the table and attach it again.';
    END IF;
    read_function := format('%I.%I', (SELECT n.nspname FROM pg_catalog.pg_namespace AS n WHERE n.oid = this.relnamespace),
                            'tokenkeeper_read_' || found_table.source_id);
    "position" := known.position;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_backfill(bigint) IS
    'Internal, for backfill_next: locks a backfill, and returns the name of the function that reads the table, and after which key it continues. Raises 42501 '
    'unless the session may execute code of the table (check_owner_session), 22023 unless the source is a backfill that has not finished, and '
    'for a table without the key.';

CREATE OR REPLACE FUNCTION tokenkeeper.store_backfill(
    source_id bigint, is_last boolean, keys text[], environments text[], topics text[], tokens text[], registered_at timestamptz[], device_ids text[],
    user_ids text[], tags jsonb[], unregistered boolean[], stale_at timestamptz[],
    OUT rows bigint, OUT queued bigint, OUT stale bigint, OUT refused bigint, OUT without_token bigint, OUT finished boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.registration_source;
BEGIN
    -- It checks the caller, and has its lock already.
    PERFORM tokenkeeper.lock_backfill(store_backfill.source_id);
    SELECT s.* INTO STRICT known FROM tokenkeeper.registration_source AS s WHERE s.source_id = store_backfill.source_id;
    rows := coalesce(cardinality(keys), 0);
    IF rows > 100000 OR store_backfill.is_last IS NULL OR (rows > 0 AND (
        cardinality(environments) = rows AND cardinality(topics) = rows AND cardinality(tokens) = rows AND cardinality(store_backfill.registered_at) = rows
        AND cardinality(device_ids) = rows AND cardinality(user_ids) = rows AND cardinality(store_backfill.tags) = rows
        AND cardinality(store_backfill.unregistered) = rows AND cardinality(store_backfill.stale_at) = rows
        AND octet_length(keys[rows]) <= 100000) IS NOT TRUE) THEN
        RAISE EXCEPTION 'the arrays have % rows, expected at most 100000, and as many of each', rows USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Call backfill_next.';
    END IF;
    WITH sized AS MATERIALIZED (
        SELECT u.*, coalesce(tokenkeeper.registration_size_fault(u.environment, u.topic, u.token, u.device_id, u.user_id, NULL),
                             CASE WHEN pg_column_size(u.tags) > tokenkeeper.most_stored()
                                  THEN 'tags takes ' || pg_column_size(u.tags) || ' bytes, expected at most ' || tokenkeeper.most_stored() END) AS size_fault
        FROM unnest(keys, environments, topics, tokens, store_backfill.registered_at, device_ids, user_ids, store_backfill.tags,
                    store_backfill.unregistered, store_backfill.stale_at)
             AS u (key, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, stale_at)
    ), cut AS MATERIALIZED (
        -- A row that is too long is never kept whole.
        SELECT s.key, left(s.environment, c.most) AS environment, left(s.topic, c.most) AS topic, left(s.token, c.most) AS token, s.registered_at,
               left(s.device_id, c.most) AS device_id, left(s.user_id, c.most) AS user_id, CASE WHEN s.size_fault IS NULL THEN s.tags END AS tags,
               s.unregistered, s.stale_at, s.size_fault
        FROM sized AS s CROSS JOIN LATERAL (SELECT CASE WHEN s.size_fault IS NULL THEN 2147483647 ELSE 1024 END AS most) AS c
    ), page AS MATERIALIZED (
        SELECT u.*, t.hex, CASE
                   WHEN u.size_fault IS NOT NULL THEN u.size_fault
                   WHEN coalesce(u.token, '') = '' THEN NULL
                   WHEN jsonb_typeof(u.tags) = 'array' AND EXISTS (
                       SELECT FROM jsonb_array_elements(u.tags) AS e (tag) WHERE jsonb_typeof(e.tag) NOT IN ('string', 'null')) THEN
                       'tags has an element that is no text'
                   ELSE tokenkeeper.attached_row_fault(u.environment, u.topic, u.token, u.registered_at) END AS fault
        FROM cut AS u
        CROSS JOIN LATERAL (SELECT CASE WHEN u.token <> '' AND u.size_fault IS NULL THEN tokenkeeper.parse_token(u.token) END AS hex OFFSET 0) AS t
    ), read AS MATERIALIZED (
        SELECT p.key, p.environment, p.topic, p.token, p.registered_at, p.device_id, p.user_id, p.unregistered, p.stale_at, p.hex, p.fault,
               CASE WHEN jsonb_typeof(p.tags) = 'array' THEN ARRAY(SELECT jsonb_array_elements_text(p.tags)) END AS tags
        FROM page AS p
    ), sound AS (
        SELECT r.* FROM read AS r WHERE r.fault IS NULL AND r.hex IS NOT NULL
    ), registered AS (
        INSERT INTO tokenkeeper.registration
            (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id)
        SELECT s.environment, s.topic, s.token, s.registered_at, s.device_id, s.user_id, s.tags, s.unregistered, known.source_id
        FROM sound AS s
    ), stale AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body)
        SELECT s.environment, s.topic, s.hex, '410',
               format('{"reason":"Unregistered","timestamp":%s}', floor(extract(epoch FROM s.stale_at) * 1000)::bigint)
        FROM sound AS s WHERE isfinite(s.stale_at)
        RETURNING 1
    ), kept AS (
        -- Zero attempts and not null: the refused rows of a table do not use up drain.rejected_per_hour.
        INSERT INTO tokenkeeper.rejected_registration
            (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at, attempts)
        SELECT r.fault || '; row ' || quote_literal(left(r.key, 200)) || ' of ' || known.name, r.environment, r.topic, r.token, r.registered_at, r.device_id,
               r.user_id, r.tags, r.unregistered, known.source_id, clock_timestamp(), 0
        FROM read AS r WHERE r.fault IS NOT NULL
    )
    SELECT (SELECT count(*) FROM sound), (SELECT count(*) FROM stale), (SELECT count(*) FROM read AS r WHERE r.fault IS NOT NULL),
           (SELECT count(*) FROM read AS r WHERE r.fault IS NULL AND r.hex IS NULL)
    INTO queued, stale, refused, without_token;
    finished := store_backfill.is_last;
    UPDATE tokenkeeper.registration_source AS s
    SET position = coalesce(keys[store_backfill.rows], s.position), queued = s.queued + store_backfill.queued, refused = s.refused + store_backfill.refused,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = known.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.store_backfill(
    bigint, boolean, text[], text[], text[], text[], timestamptz[], text[], text[], jsonb[], boolean[], timestamptz[]) IS
    'Internal, for backfill_next: queues rows that it has read, and notes in the same transaction how far the backfill has come. Raises 42501 unless the '
    'session may execute code of the table (check_owner_session), 22023 for a source as for lock_backfill, and for arrays of different lengths.';

CREATE OR REPLACE FUNCTION tokenkeeper.backfill_next(
    source_id bigint, max_rows integer DEFAULT 1000,
    OUT rows bigint, OUT queued bigint, OUT stale bigint, OUT refused bigint, OUT without_token bigint, OUT finished boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here record;
BEGIN
    IF (backfill_next.max_rows BETWEEN 1 AND 100000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_rows is %, expected 1 to 100000', coalesce(backfill_next.max_rows::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    here := tokenkeeper.lock_backfill(backfill_next.source_id);
    EXECUTE format($sql$
        SELECT s.* FROM (
            SELECT count(*) AS rows, array_agg(r.key::text) AS keys, array_agg(r.environment::text) AS environments, array_agg(r.topic::text) AS topics,
                   array_agg(r.token::text) AS tokens, array_agg(r.registered_at::timestamptz) AS registered_at, array_agg(r.device_id::text) AS device_ids,
                   array_agg(r.user_id::text) AS user_ids, array_agg(to_jsonb(r.tags)) AS tags, array_agg(r.unregistered::boolean) AS unregistered,
                   array_agg(r.stale_at::timestamptz) AS stale_at
            FROM %s($2, $3) AS r) AS p
        CROSS JOIN LATERAL tokenkeeper.store_backfill($1, p.rows < $3, p.keys, p.environments, p.topics, p.tokens, p.registered_at, p.device_ids,
                                                      p.user_ids, p.tags, p.unregistered, p.stale_at) AS s $sql$, here.read_function)
    INTO rows, queued, stale, refused, without_token, finished
    USING backfill_next.source_id, here.position, backfill_next.max_rows;
END
$$;
COMMENT ON FUNCTION tokenkeeper.backfill_next(bigint, integer) IS
    'Queues the next rows of a backfill, by the table''s key, and notes in the same transaction how far it has come, so that each row is queued exactly once. A '
    'row with stale_at also queues a 410 with that instant. Refused rows go to rejected_registration, complete, with what is wrong and the row''s key in error. '
    'Returns how many rows it has read (at most max_rows, 1 to 100000), and of these how many it has queued, queued as stale, too, refused, and skipped '
    'because they have no token, or are logged out while another row is registered with the token. It reads the table with the rights of its caller, in a '
    'session of the table''s owner. Raises 42501 for other sessions, as begin_backfill does, 22023 unless the source is a backfill that has not '
    'finished.';

CREATE OR REPLACE FUNCTION tokenkeeper.refused_by(source_id bigint) RETURNS TABLE (error text, rows bigint, samples text[])
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM tokenkeeper.withdrawable_source(refused_by.source_id);
    RETURN QUERY
        SELECT (array_agg(g.error ORDER BY g.rejected_id))[1], count(*), (array_agg(g.of_row ORDER BY g.rejected_id))[1:3]
        FROM (SELECT r.rejected_id, coalesce(substring(r.error COLLATE "C" FROM '; row (.*) of '), '') AS of_row,
                     regexp_replace(r.error COLLATE "C", '; row .*$', '') AS error
              FROM tokenkeeper.rejected_registration AS r WHERE r.source_id = refused_by.source_id) AS g
        -- Without the parts that differ from row to row: quoted text and numbers.
        GROUP BY regexp_replace(g.error, '''[^'']*''|[0-9]+', '*', 'g') ORDER BY 2 DESC, 1;
END
$$;
COMMENT ON FUNCTION tokenkeeper.refused_by(bigint) IS
    'The rows that a backfill has refused and that are still in rejected_registration, by kind of error, with the error and the keys of the first. For the '
    'login that began the source, and operators. Raises 22023 for a source that does not exist or of another login, 25001 if the isolation level is not read committed.';

CREATE OR REPLACE FUNCTION tokenkeeper.queued_registrations(at_most integer) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
RETURN (SELECT count(*) FROM (SELECT FROM tokenkeeper.registration LIMIT queued_registrations.at_most) AS r);
COMMENT ON FUNCTION tokenkeeper.queued_registrations(integer) IS
    'How many registrations wait in the queue, counted up to a limit: a backfill or an import waits while there are many, so that the registrations of '
    'applications do not wait behind it for long.';
