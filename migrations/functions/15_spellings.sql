-- How rows of attached tables spell their tokens. docs/decisions/attachments.md says why this is noted.

CREATE OR REPLACE FUNCTION tokenkeeper.nsdata_description(hex text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '<' || rtrim(regexp_replace(hex COLLATE "C", '(.{8})', chr(92) || '1 ', 'g'), ' ') || '>';
COMMENT ON FUNCTION tokenkeeper.nsdata_description(text) IS 'The token as NSData described itself until iOS 12: <abcdef01 23456789>.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.nsdata_description(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_spellings(source_ids bigint[], token_keys bytea[], spellings text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    attachments bigint[];
    keys bytea[];
    texts text[] COLLATE "C";
    renewed text[] COLLATE "C";
    moment timestamptz := clock_timestamp();
BEGIN
    -- The attachment itself, locked against detach, which removes its spellings; or that of the table that a backfill or a reconciliation has read.
    WITH said AS MATERIALIZED (
        SELECT DISTINCT u.source_id, u.token_key, u.spelling COLLATE "C" AS spelling
        FROM unnest(note_spellings.source_ids, note_spellings.token_keys, note_spellings.spellings) AS u (source_id, token_key, spelling)
        CROSS JOIN LATERAL (SELECT encode(u.token_key, 'hex') AS hex OFFSET 0) AS h
        WHERE u.spelling COLLATE "C" NOT IN (h.hex, upper(h.hex), tokenkeeper.nsdata_description(h.hex))
    ), attached AS MATERIALIZED (
        SELECT a.source_id, o.source_id AS of_source
        FROM (SELECT DISTINCT s.source_id FROM said AS s) AS d
        JOIN tokenkeeper.registration_source AS o USING (source_id)
        JOIN tokenkeeper.attached_table AS a ON a.source_id = o.source_id OR (o.kind IN ('backfill', 'reconciliation') AND a.name = o.name)
        FOR KEY SHARE OF a SKIP LOCKED
    )
    SELECT array_agg(a.source_id), array_agg(s.token_key), array_agg(s.spelling) INTO attachments, keys, texts
    FROM said AS s JOIN attached AS a ON a.of_source = s.source_id;
    IF keys IS NULL THEN
        RETURN;
    END IF;
    -- At most once an hour; and never wait for another drain, or for a comparison that removes the row.
    WITH old AS MATERIALIZED (
        SELECT k.place
        FROM unnest(attachments, keys, texts) AS u (source_id, token_key, spelling)
        CROSS JOIN LATERAL (
            SELECT s.ctid AS place FROM tokenkeeper.token_spelling AS s
            WHERE s.token_key = u.token_key AND s.source_id = u.source_id AND s.spelling = u.spelling COLLATE "C" AND s.seen_at < moment - interval '1 hour'
            FOR UPDATE SKIP LOCKED) AS k
    )
    UPDATE tokenkeeper.token_spelling AS s SET seen_at = moment WHERE s.ctid = ANY (ARRAY(SELECT o.place FROM old AS o));
    INSERT INTO tokenkeeper.token_spelling (token_key, source_id, spelling, seen_at)
    SELECT u.token_key, u.source_id, u.spelling, moment
    FROM unnest(attachments, keys, texts) AS u (source_id, token_key, spelling)
    CROSS JOIN LATERAL (
        SELECT count(*) AS number FROM tokenkeeper.token_spelling AS s
        WHERE s.token_key = u.token_key AND s.source_id = u.source_id AND s.spelling = u.spelling COLLATE "C" AND s.seen_at >= moment - interval '1 hour') AS k
    WHERE k.number = 0;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_spellings(bigint[], bytea[], text[]) IS
    'Notes in token_spelling how rows of attached tables spell their tokens, and that they still do. Leaves out the usual spellings, and sources without '
    'an attached table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_spellings(bigint[], bytea[], text[]) FROM PUBLIC;
