-- Where queued registrations come from: attached tables, backfills, reconciliations and files.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_source(kind text, name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    new_source bigint;
    attached bigint;
BEGIN
    -- An attachment is begun by attach, which checks who owns the table.
    IF (begin_source.kind COLLATE "C" IN ('backfill', 'reconciliation', 'import')) IS NOT TRUE THEN
        RAISE EXCEPTION 'kind is %, expected backfill, reconciliation or import', coalesce(quote_literal(left(begin_source.kind, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (octet_length(begin_source.name) BETWEEN 1 AND 4096) IS NOT TRUE THEN
        RAISE EXCEPTION 'name is %, expected the table or the file, 1 to 4096 bytes',
            coalesce(octet_length(begin_source.name) || ' bytes long', 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF begin_source.kind COLLATE "C" <> 'import' THEN
        -- begin_backfill continues a backfill that is not finished, whoever has begun it: others could make it skip rows.
        SELECT a.source_id INTO attached FROM tokenkeeper.attached_table AS a WHERE a.name = begin_source.name COLLATE "C";
        IF FOUND THEN
            PERFORM tokenkeeper.check_attachment_caller(attached);
        END IF;
    END IF;
    IF begin_source.kind COLLATE "C" = 'reconciliation' THEN
        -- A table that cannot be read is tried again and again, and most reconciliations find nothing: these have nothing to withdraw.
        DELETE FROM tokenkeeper.registration_source AS s WHERE s.ctid = ANY (ARRAY(
            SELECT o.ctid FROM tokenkeeper.registration_source AS o
            WHERE o.kind = 'reconciliation' AND o.name = begin_source.name COLLATE "C" AND o.queued = 0
              AND o.started_at < clock_timestamp() - interval '1 day' FOR UPDATE SKIP LOCKED));
    END IF;
    INSERT INTO tokenkeeper.registration_source (kind, name) VALUES (begin_source.kind, begin_source.name) RETURNING source_id INTO new_source;
    RETURN new_source;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_source(text, text) IS
    'Notes the beginning of a backfill, a reconciliation or an import, and returns its source_id, for registration.source_id. name is the table, or the '
    'file. The beginning of a reconciliation forgets those of the table that have queued nothing for a day. Raises 22023 for another kind, and for a name '
    'that is null, empty or longer than 4096 bytes; 42501 for an attached table, except for members of '
    'its owner, of tokenkeeper_operator and of tokenkeeper_daemon.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.begin_source(text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.advance_source(
    source_id bigint, "position" text, queued bigint, refused bigint, finished boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (advance_source.queued BETWEEN 0 AND 1000000000 AND advance_source.refused BETWEEN 0 AND 1000000000) IS NOT TRUE THEN
        RAISE EXCEPTION 'queued is %, and refused is %, expected 0 to 1000000000 each', coalesce(advance_source.queued::text, 'null'),
            coalesce(advance_source.refused::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE tokenkeeper.registration_source AS s
    SET position = advance_source.position, queued = s.queued + advance_source.queued, refused = s.refused + advance_source.refused,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = advance_source.source_id AND s.done_by = session_user AND s.withdrawn_at IS NULL
      -- The others note where they are themselves: backfill_next and compare_next.
      AND s.kind = 'import';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no import % of %, or it was withdrawn', coalesce(advance_source.source_id::text, 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) IS
    'Notes how far an import has come, in the transaction that queues some of its rows. Raises 22023 for a source that is no import, that another login '
    'has begun, or that was withdrawn, and for counts that are null or negative.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) FROM PUBLIC;
