-- Backfills: they queue the rows of an attached table.
--
-- backfill_next runs with the rights of its caller, in a session of the table's owner: it executes the stored SQL of the facts. begin_backfill, lock_backfill and
-- advance_backfill have the rights of the schema's owner; they check the caller and note how far it has come, and execute nothing of the table.
--
-- Locks: begin_backfill waits for the row of attached_table, lock_backfill for the row of the source.

CREATE OR REPLACE FUNCTION tokenkeeper.own_attachment(name text) RETURNS tokenkeeper.attached_table
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
BEGIN
    -- Two that begin at once: the second continues what the first has begun.
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = tokenkeeper.attachment_named(own_attachment.name) FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM tokenkeeper.raise_not_attached(own_attachment.name);
    END IF;
    PERFORM tokenkeeper.check_owner_session(this.table_id);
    RETURN this;
END
$$;
COMMENT ON FUNCTION tokenkeeper.own_attachment(text) IS
    'Internal: locks the attachment of that name. Raises 22023 if there is none, 42501 as check_owner_session.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_readable(this tokenkeeper.attached_table) RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_table pg_class;
    misfit text := tokenkeeper.expressions_fault(this);
BEGIN
    SELECT c.* INTO found_table FROM pg_class AS c WHERE c.oid = this.table_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', this.table_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_owner_session(this.table_id);
    IF this.table_name <> tokenkeeper.full_name(this.table_id) THEN
        RAISE EXCEPTION 'table % has another name now', this.table_name USING ERRCODE = 'invalid_parameter_value', HINT = 'Detach the table and attach it again.';
    END IF;
    -- Expressions of a former owner are not for the next one.
    IF NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = found_table.relnamespace AND p.proname = 'tokenkeeper_insert_' || this.source_id
                                              AND p.proowner = found_table.relowner) THEN
        RAISE EXCEPTION 'table % had another owner when it was attached', this.table_name USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Detach the table and attach it again.';
    END IF;
    IF this.key_columns = '{}' OR this.key_columns <> tokenkeeper.key_columns(this.table_id) THEN
        RAISE EXCEPTION 'table % has no key%s by which its rows could be read', this.table_name, coalesce(' (' || nullif(array_to_string(this.key_columns, ', '), '') || ')', '')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Add a primary key, detach the table and attach it again.';
    END IF;
    IF misfit IS NOT NULL THEN
        RAISE EXCEPTION 'table % has changed: %', this.table_name, misfit USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF found_table.relforcerowsecurity THEN
        RAISE EXCEPTION 'row-level security is forced on %, so not all rows can be seen', this.table_name USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_readable(tokenkeeper.attached_table) IS
    'Internal: raises 42501 as check_owner_session, and 22023 if the rows of the table cannot be read: it is gone, has another name or owner, lacks its key, '
    'a column or a value of an enum, or row-level security is forced.';

CREATE OR REPLACE FUNCTION tokenkeeper.estimated_rows(of_table regclass) RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
-- Of a partitioned table, its partitions; of another one, itself.
RETURN (
    SELECT CASE WHEN min(c.reltuples) >= 0 THEN sum(c.reltuples)::bigint END FROM pg_class AS c
    WHERE c.oid = ANY (ARRAY(SELECT p.relid FROM pg_partition_tree(of_table) AS p WHERE p.isleaf) || of_table::oid) AND c.relkind = 'r');
COMMENT ON FUNCTION tokenkeeper.estimated_rows(regclass) IS 'How many rows a table has by PostgreSQL''s statistics; null if it was never analyzed.';

CREATE OR REPLACE FUNCTION tokenkeeper.begin_backfill(
    attachment text, OUT source_id bigint, OUT name text, OUT done bigint, OUT estimated bigint, OUT resumes boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.own_attachment(begin_backfill.attachment);
BEGIN
    name := this.name;
    SELECT s.source_id, s.queued INTO source_id, done FROM tokenkeeper.registration_source AS s
    WHERE s.attachment = this.source_id AND s.kind = 'backfill' AND s.finished_at IS NULL AND s.withdrawn_at IS NULL ORDER BY s.source_id DESC LIMIT 1;
    resumes := FOUND;
    IF NOT resumes THEN
        INSERT INTO tokenkeeper.registration_source AS s (kind, name, attachment) VALUES ('backfill', this.name, this.source_id)
        RETURNING s.source_id INTO source_id;
        done := 0;
    END IF;
    estimated := tokenkeeper.estimated_rows(this.table_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_backfill(text) IS
    'Internal, for the command: begins to queue the rows of an attachment, or resumes its last unfinished backfill; backfill_next follows. '
    'Returns the source_id, how many rows it has queued (done), and how many the table has by PostgreSQL''s statistics (null: unknown). Needs a session of '
    'the table''s owner.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_backfill(source_id bigint, OUT this tokenkeeper.attached_table, OUT "position" text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.registration_source;
BEGIN
    -- Locked: one session at a time takes the next rows of this source.
    SELECT s.* INTO known FROM tokenkeeper.registration_source AS s
    WHERE s.source_id = lock_backfill.source_id AND s.kind = 'backfill' AND s.finished_at IS NULL AND s.withdrawn_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no backfill that goes on', coalesce(lock_backfill.source_id::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = known.attachment;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', known.name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_readable(this);
    "position" := known.position;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_backfill(bigint) IS
    'Internal, for backfill_next: locks a backfill, and returns its attachment and the key after which it continues. Raises 42501 as check_owner_session; '
    '22023 unless it is an unfinished backfill; and what check_readable raises.';

CREATE OR REPLACE FUNCTION tokenkeeper.hold_name(this tokenkeeper.attached_table) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('LOCK TABLE %s IN ACCESS SHARE MODE', this.table_id);
    PERFORM tokenkeeper.check_attached_name(this.table_name, this.table_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.hold_name(tokenkeeper.attached_table) IS
    'Internal: locks an attached table, so that it keeps its name until the transaction ends. Raises 42P01 if another table has the name.';

CREATE OR REPLACE FUNCTION tokenkeeper.rows_after(attached regclass, keys text[], "position" text, OUT condition text, OUT key_order text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN rows_after.position IS NULL THEN 'true' ELSE format('(%s) > (%s)', string_agg(format('r.%I', k.name), ', ' ORDER BY k.n),
               string_agg(format('%L::%s', CASE WHEN cardinality(keys) = 1 THEN rows_after.position ELSE rows_after.position::jsonb ->> (k.n - 1)::integer END,
                                 format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY k.n)) END,
           string_agg(format('r.%I', k.name), ', ' ORDER BY k.n)
    FROM unnest(keys) WITH ORDINALITY AS k (name, n) JOIN pg_attribute AS a ON a.attrelid = attached AND a.attname = k.name COLLATE "C"
$$;
COMMENT ON FUNCTION tokenkeeper.rows_after(regclass, text[], text) IS
    'Internal: as SQL, the condition for the rows after a key (null: all), and the order of the key. Raises 22P02 for a position that key_text did not '
    'write.';

CREATE OR REPLACE FUNCTION tokenkeeper.page_query(this tokenkeeper.attached_table, "position" text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('SELECT %s, (%s) IS TRUE, (%s) IS TRUE, %s, %s FROM %s AS r WHERE %s ORDER BY %s', tokenkeeper.key_text(this.key_columns),
                  tokenkeeper.fact_test(this.facts), tokenkeeper.logged_out_test(this.facts), this.facts ->> 'token', tokenkeeper.fact_list(this.facts),
                  this.table_id, a.condition, a.key_order)
    FROM tokenkeeper.rows_after(this.table_id, this.key_columns, page_query.position) AS a
$$;
COMMENT ON FUNCTION tokenkeeper.page_query(tokenkeeper.attached_table, text) IS
    'Internal: a query for the rows of an attached table after a key, in order: the key, whether the row has facts, whether it is logged out, the token as '
    'it is spelled, and the columns of a fact.';

CREATE OR REPLACE FUNCTION tokenkeeper.may_be_of_a_row(state text) RETURNS boolean
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
RETURN left(state, 2) NOT IN ('40', '42', '53', '55', '57', '58', 'XX');
COMMENT ON FUNCTION tokenkeeper.may_be_of_a_row(text) IS
    'Internal: whether an SQLSTATE may come from an expression that fails for a row, and not from a missing column or function, a lock, a full disk or a '
    'shutdown.';

CREATE OR REPLACE FUNCTION tokenkeeper.fails_without_rows(page text) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('SELECT FROM (%s) AS p LIMIT 0', page);
    RETURN false;
EXCEPTION WHEN OTHERS OR assert_failure THEN
    RETURN true;
END
$$;
COMMENT ON FUNCTION tokenkeeper.fails_without_rows(text) IS
    'Internal: whether a query fails before it reads any row, for example because a value of an enum was renamed.';

CREATE OR REPLACE FUNCTION tokenkeeper.next_key(this tokenkeeper.attached_table, "position" text) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    after record := tokenkeeper.rows_after(this.table_id, this.key_columns, next_key.position);
    key text;
BEGIN
    EXECUTE format('SELECT %s FROM %s AS r WHERE %s ORDER BY %s LIMIT 1', tokenkeeper.key_text(this.key_columns), this.table_id, after.condition, after.key_order) INTO key;
    RETURN key;
END
$$;
COMMENT ON FUNCTION tokenkeeper.next_key(tokenkeeper.attached_table, text) IS
    'Internal: the key of the row after a key, without its facts; null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.advance_backfill(source_id bigint, "position" text, queued bigint, finished boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- It checks the caller, and has its lock already.
    PERFORM tokenkeeper.lock_backfill(advance_backfill.source_id);
    IF (advance_backfill.queued BETWEEN 0 AND 200000) IS NOT TRUE OR octet_length(advance_backfill.position) > 100000 THEN
        RAISE EXCEPTION 'queued is %, and position is % bytes long, expected at most 200000 and 100000', coalesce(advance_backfill.queued::text, 'null'),
            octet_length(advance_backfill.position) USING ERRCODE = 'invalid_parameter_value', HINT = 'Call backfill_next.';
    END IF;
    UPDATE tokenkeeper.registration_source AS s
    SET position = coalesce(advance_backfill.position, s.position), queued = s.queued + advance_backfill.queued,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = advance_backfill.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.advance_backfill(bigint, text, bigint, boolean) IS
    'Internal, for backfill_next: records how far a backfill has come. Raises what lock_backfill raises, and 22023 for progress that backfill_next cannot '
    'have made.';

CREATE OR REPLACE FUNCTION tokenkeeper.backfill_next(
    source_id bigint, max_rows integer DEFAULT 1000, OUT rows bigint, OUT queued bigint, OUT logouts bigint, OUT unreadable bigint, OUT failed bigint, OUT finished boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
-- As the triggers; and the next session may read the key with another DateStyle.
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres'
SET bytea_output = 'hex'
AS $$
DECLARE
    here record;
    this tokenkeeper.attached_table;
    page text;
    reached text;
BEGIN
    IF (backfill_next.max_rows BETWEEN 1 AND 100000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_rows is %, expected 1 to 100000', coalesce(backfill_next.max_rows::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    here := tokenkeeper.lock_backfill(backfill_next.source_id);
    this := here.this;
    PERFORM tokenkeeper.hold_name(this);
    page := tokenkeeper.page_query(this, here.position);
    BEGIN
        EXECUTE format($sql$
            WITH page (row_key, registers, is_out, spelled, %1$s) AS MATERIALIZED (%2$s LIMIT $1), registered AS (
                INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, source_id, row_key)
                -- An instant in the future would count as now, and each backfill would register the row again.
                SELECT p.environment, p.topic, p.token, CASE WHEN p.registered_at > clock_timestamp() THEN 'epoch' ELSE p.registered_at END, p.device_id,
                       p.user_id, p.tags, $2, p.row_key
                FROM page AS p WHERE p.registers RETURNING 1
            ), lost AS (
                INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id, row_key)
                SELECT p.environment, p.topic, p.token, CASE WHEN p.registered_at > clock_timestamp() THEN 'epoch' ELSE p.registered_at END, true, $2, p.row_key
                FROM page AS p LEFT JOIN LATERAL (
                    SELECT true AS has_it FROM (%3$s) AS o (%1$s)
                    WHERE p.is_out AND o.token = p.token AND o.topic = p.topic AND o.environment = p.environment LIMIT 1) AS o ON true
                WHERE p.is_out AND o.has_it IS NULL RETURNING 1
            )
            SELECT count(*), (SELECT count(*) FROM registered) + (SELECT count(*) FROM lost), (SELECT count(*) FROM lost),
                   count(*) FILTER (WHERE (p.registers OR p.is_out) AND tokenkeeper.parse_token(p.token) IS NULL), (array_agg(p.row_key))[count(*)]
            FROM page AS p $sql$,
            tokenkeeper.fact_columns(), page, tokenkeeper.other_row(this.table_id::text, this.facts, 'p.spelled', 'p.token'))
        INTO rows, queued, logouts, unreadable, reached USING backfill_next.max_rows, backfill_next.source_id;
        failed := 0;
    EXCEPTION WHEN OTHERS OR assert_failure THEN
        IF NOT tokenkeeper.may_be_of_a_row(SQLSTATE) THEN
            RAISE;
        END IF;
        -- An expression fails for one of these rows: then fewer at once, and in the end only that one is passed over.
        IF backfill_next.max_rows > 1 THEN
            SELECT n.* INTO rows, queued, logouts, unreadable, failed, finished FROM tokenkeeper.backfill_next(backfill_next.source_id, backfill_next.max_rows / 2) AS n;
            RETURN;
        ELSIF tokenkeeper.fails_without_rows(page) THEN
            RAISE;
        END IF;
        SELECT 1, 0, 0, 0, 1, tokenkeeper.next_key(this, here.position) INTO rows, queued, logouts, unreadable, failed, reached;
        PERFORM tokenkeeper.note_attachment_failure(this.source_id, SQLSTATE, NULL);
    END;
    finished := rows < backfill_next.max_rows;
    PERFORM tokenkeeper.advance_backfill(backfill_next.source_id, reached, queued, finished);
END
$$;
COMMENT ON FUNCTION tokenkeeper.backfill_next(bigint, integer) IS
    'Internal: queues the next rows of a backfill, in the order of the table''s key, and in the same transaction records how far it has come: each as a '
    'registration at its registered_at, or as a logout unless another row has the token. Returns how many rows it read (at most max_rows, 1 to 100000) and '
    'queued; how many of these are logouts; how many tokens are unreadable (the daemon rejects them); and for how many rows an expression failed (skipped, and counted in '
    'attachment.failures).';

CREATE OR REPLACE FUNCTION tokenkeeper.queued_registrations(at_most integer) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
RETURN (SELECT count(*) FROM (SELECT FROM tokenkeeper.registration LIMIT queued_registrations.at_most) AS r);
COMMENT ON FUNCTION tokenkeeper.queued_registrations(integer) IS
    'Internal: how many registrations wait in the queue, counted up to at_most. Backfills and imports wait while there are many.';
