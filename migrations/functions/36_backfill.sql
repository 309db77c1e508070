-- Backfills: they queue the rows of an attached table.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_backfill(
    attached text, OUT source_id bigint, OUT name text, OUT done bigint, OUT estimated bigint, OUT resumes boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_table tokenkeeper.attached_table;
BEGIN
    SELECT a.* INTO found_table FROM tokenkeeper.attached_table AS a
    WHERE a.source_id = tokenkeeper.attachment_named(begin_backfill.attached) AND EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = a.table_id);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', coalesce(quote_literal(left(begin_backfill.attached, 200)), 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_attachment_caller(found_table.source_id, '{tokenkeeper_operator}');
    name := found_table.name;
    -- Two that begin at once: the second continues what the first has begun.
    PERFORM FROM tokenkeeper.attached_table AS a WHERE a.source_id = found_table.source_id FOR NO KEY UPDATE;
    SELECT s.source_id, s.queued + s.refused INTO source_id, done FROM tokenkeeper.registration_source AS s
    WHERE s.kind = 'backfill' AND s.name = found_table.name AND s.started_at >= found_table.attached_at
      AND s.finished_at IS NULL AND s.withdrawn_at IS NULL
    ORDER BY s.source_id DESC LIMIT 1;
    resumes := FOUND;
    IF NOT resumes THEN
        source_id := tokenkeeper.begin_source('backfill', found_table.name);
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
COMMENT ON FUNCTION tokenkeeper.begin_backfill(text) IS
    'Begins to queue the rows of an attached table, or continues the last backfill of it that has not finished. Returns the source_id, how many rows are '
    'done, and how many the table has by PostgreSQL''s statistics (null: unknown). Then call backfill_next. For members of the table''s owner, and operators. '
    'Raises 22023 if the table is not attached, 42501 for others.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.begin_backfill(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.backfill_next(
    source_id bigint, max_rows integer DEFAULT 1000,
    OUT rows bigint, OUT queued bigint, OUT stale bigint, OUT refused bigint, OUT without_token bigint, OUT finished boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.registration_source;
    found_table tokenkeeper.attached_table;
    reached text;
BEGIN
    -- Locked: one session at a time takes the next rows of this source.
    SELECT s.* INTO known FROM tokenkeeper.registration_source AS s
    WHERE s.source_id = backfill_next.source_id AND s.kind = 'backfill' AND s.finished_at IS NULL AND s.withdrawn_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no backfill that goes on', backfill_next.source_id USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT a.* INTO found_table FROM tokenkeeper.attached_table AS a WHERE a.name = known.name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % is not attached', known.name USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_attachment_caller(found_table.source_id, '{tokenkeeper_operator}');
    WITH page AS MATERIALIZED (
        SELECT r.*, row_number() OVER () AS n FROM tokenkeeper.read_attachment(found_table.source_id, known.position, backfill_next.max_rows) AS r
    ), sound AS (
        SELECT p.* FROM page AS p WHERE p.fault IS NULL AND p.token_key IS NOT NULL
    ), registered AS (
        INSERT INTO tokenkeeper.registration
            (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id)
        -- The token as it is: apply_registrations notes unusual spellings.
        SELECT s.environment, s.topic, s.token, s.registered_at, s.device_id, s.user_id, s.tags, s.unregistered, known.source_id
        FROM sound AS s
    ), stale AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body)
        SELECT s.environment, s.topic, encode(s.token_key, 'hex'), '410',
               format('{"reason":"Unregistered","timestamp":%s}', floor(extract(epoch FROM s.stale_at) * 1000)::bigint)
        FROM sound AS s WHERE isfinite(s.stale_at)
        RETURNING 1
    ), kept AS (
        -- Zero attempts and not null: the refused rows of a table do not use up drain.rejected_per_hour.
        INSERT INTO tokenkeeper.rejected_registration
            (error, environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at, attempts)
        SELECT p.fault || '; row ' || quote_literal(p.key) || ' of ' || known.name, p.environment, p.topic, p.token, p.registered_at, p.device_id,
               p.user_id, p.tags, p.unregistered, known.source_id, clock_timestamp(), 0
        FROM page AS p WHERE p.fault IS NOT NULL
    )
    SELECT (SELECT count(*) FROM page), (SELECT count(*) FROM sound), (SELECT count(*) FROM stale),
           (SELECT count(*) FROM page AS p WHERE p.fault IS NOT NULL),
           (SELECT count(*) FROM page AS p WHERE p.fault IS NULL AND p.token_key IS NULL),
           (SELECT p.key FROM page AS p ORDER BY p.n DESC LIMIT 1)
    INTO rows, queued, stale, refused, without_token, reached;
    finished := rows < backfill_next.max_rows;
    IF finished THEN
        UPDATE tokenkeeper.attached_table AS a SET rows_read_at = greatest(a.rows_read_at, known.started_at) WHERE a.source_id = found_table.source_id;
    END IF;
    UPDATE tokenkeeper.registration_source AS s
    SET position = coalesce(reached, s.position), queued = s.queued + backfill_next.queued, refused = s.refused + backfill_next.refused,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = known.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.backfill_next(bigint, integer) IS
    'Queues the next rows of a backfill, by the table''s key, and notes in the same transaction how far it has come, so that each row is queued exactly once. A '
    'row with stale_at also queues a 410 with that instant. Refused rows go to rejected_registration, complete, with what is wrong and the row''s key in error. '
    'Returns how many rows it has read, and of these how many it has queued, queued as stale, too, refused, and skipped because they have no token. '
    'For members of the table''s owner, and operators. Raises 22023 unless the source is a backfill that has not finished.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.backfill_next(bigint, integer) FROM PUBLIC;

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
REVOKE EXECUTE ON FUNCTION tokenkeeper.refused_by(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.queued_registrations(at_most integer) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
RETURN (SELECT count(*) FROM (SELECT FROM tokenkeeper.registration LIMIT queued_registrations.at_most) AS r);
COMMENT ON FUNCTION tokenkeeper.queued_registrations(integer) IS
    'How many registrations wait in the queue, counted up to a limit: a backfill or an import waits while there are many, so that the registrations of '
    'applications do not wait behind it for long.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.queued_registrations(integer) FROM PUBLIC;
