-- Where queued registrations come from: attached tables, backfills, reconciliations and files.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_source(kind text, name text) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.registration_source (kind, name) VALUES (begin_source.kind, begin_source.name) RETURNING source_id
$$;
COMMENT ON FUNCTION tokenkeeper.begin_source(text, text) IS
    'Notes the beginning of a backfill, a reconciliation or an import, and returns its source_id, for registration.source_id.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.begin_source(text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.advance_source(
    source_id bigint, "position" text, queued bigint, refused bigint, finished boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.registration_source AS s
    SET position = advance_source.position, queued = s.queued + advance_source.queued, refused = s.refused + advance_source.refused,
        finished_at = CASE WHEN finished THEN clock_timestamp() END
    WHERE s.source_id = advance_source.source_id AND s.done_by = session_user AND s.withdrawn_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no source % of %, or it was withdrawn', advance_source.source_id, session_user USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) IS
    'Notes in the transaction that queues some rows of a source how far it has come. Raises 22023 for a source that another login has begun, '
    'or that was withdrawn.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) FROM PUBLIC;
