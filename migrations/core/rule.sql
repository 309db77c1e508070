-- What suppresses a token, in words: its cause, its state, its reason. The rule itself is the generated column ledger.suppressed.
--
-- The trigger of the ledger calls note_deletion, which is here, too. It writes suppression and token_count, and locks nothing else.

CREATE OR REPLACE FUNCTION tokenkeeper.cause_of(
    stale_at timestamptz, suspect_at timestamptz, logged_out_at timestamptz, superseded_at timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE greatest(stale_at, suspect_at, logged_out_at, superseded_at)
    WHEN stale_at THEN 'stale'
    WHEN suspect_at THEN 'suspect'
    WHEN logged_out_at THEN 'unregistered_by_app'
    WHEN superseded_at THEN 'superseded'
END;
COMMENT ON FUNCTION tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz) IS
    'Internal: the cause with the greatest instant; on a tie, the first of stale, suspect, unregistered_by_app, superseded. Null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.invalidated_at(entry tokenkeeper.ledger) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest((entry).stale_at, (entry).suspect_at, (entry).logged_out_at, (entry).superseded_at);
COMMENT ON FUNCTION tokenkeeper.invalidated_at(tokenkeeper.ledger) IS 'The greatest instant of a cause of suppression; null if there is none.';

CREATE OR REPLACE FUNCTION tokenkeeper.state_of(entry tokenkeeper.ledger) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN (entry).suppressed
    THEN tokenkeeper.cause_of((entry).stale_at, (entry).suspect_at, (entry).logged_out_at, (entry).superseded_at)
    ELSE 'active'
END;
COMMENT ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) IS 'Internal: the state of a token: active, or the cause of its suppression.';

CREATE OR REPLACE FUNCTION tokenkeeper.reason_of(entry tokenkeeper.ledger) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE tokenkeeper.cause_of((entry).stale_at, (entry).suspect_at, (entry).logged_out_at, (entry).superseded_at)
    WHEN 'stale' THEN (entry).stale_reason
    WHEN 'suspect' THEN (entry).suspect_reason
    WHEN 'unregistered_by_app' THEN 'unregistered by the app'
    WHEN 'superseded' THEN 'a newer token of the same device'
END;
COMMENT ON FUNCTION tokenkeeper.reason_of(tokenkeeper.ledger) IS
    'Internal: the reason of the latest cause: of APNs for stale and suspect, a description for the others.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_deletion() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    -- One look-up each: see Plans. Of active tokens, too: a change by hand may have left a row.
    DELETE FROM tokenkeeper.suppression AS s WHERE s.ctid = ANY (ARRAY(
        SELECT (SELECT k.ctid FROM tokenkeeper.suppression AS k WHERE k.topic_id = g.topic_id AND k.token_key = g.token_key)
        FROM gone AS g));
    INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
    SELECT -count(*), g.topic_id, g.registered_at > '-infinity', tokenkeeper.state_of(g::tokenkeeper.ledger) FROM gone AS g GROUP BY 2, 3, 4;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_deletion() IS 'Trigger: keeps suppression and token_count in step with rows deleted from the ledger.';
