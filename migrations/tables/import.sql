-- How an import of a file begins and advances. Locks: its source's row.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_import(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    new_source bigint;
BEGIN
    IF (octet_length(begin_import.name) BETWEEN 1 AND 4096) IS NOT TRUE THEN
        RAISE EXCEPTION 'name is %, expected the file, 1 to 4096 bytes',
            coalesce(octet_length(begin_import.name) || ' bytes long', 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('import', begin_import.name) RETURNING source_id INTO new_source;
    RETURN new_source;
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_import(text) IS
    'Internal, for the command: begins an import; name is the file. Returns its source_id, for registration.source_id.';

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
    IF octet_length(advance_source.position) > 4096 THEN
        RAISE EXCEPTION 'position is % bytes long, expected at most 4096', octet_length(advance_source.position) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE tokenkeeper.registration_source AS s
    SET position = advance_source.position, queued = s.queued + advance_source.queued, refused = s.refused + advance_source.refused,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = advance_source.source_id AND s.done_by = session_user AND s.withdrawn_at IS NULL
      -- A backfill notes where it is itself.
      AND s.kind = 'import';
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no import % of %, or it was withdrawn', coalesce(advance_source.source_id::text, 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) IS
    'Internal: records how far an import has come, in the transaction that queues its rows.';
