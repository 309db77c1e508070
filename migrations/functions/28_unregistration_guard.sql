-- Logouts that a source reports: they pass the mass-failure guard (30_guard), because a trigger on a table cannot tell a logout from a
-- library's own deactivation, and leave a receipt, so that reinstate can undo them (33_reinstate).

CREATE OR REPLACE FUNCTION tokenkeeper.judge_unregistrations(
    of_topic integer[],
    token_keys bytea[],
    at timestamptz[],
    queued_at timestamptz[],
    released boolean[],
    source_ids bigint[],
    registered_at timestamptz[],
    allowance bigint,
    max_share numeric,
    OUT fates text[],
    OUT suppresses boolean[],
    OUT tripped integer[],
    OUT reset integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    guarded integer[] := tokenkeeper.lock_guards(
        'unregistered_by_app',
        ARRAY(SELECT DISTINCT s.topic_id FROM unnest(judge_unregistrations.of_topic, judge_unregistrations.source_ids) AS s (topic_id, source_id)
              WHERE s.topic_id IS NOT NULL AND s.source_id IS NOT NULL ORDER BY 1));
    held integer[];
BEGIN
    SELECT coalesce(array_agg(j.fate ORDER BY j.n), '{}') INTO fates FROM (
        SELECT s.n, CASE
                   WHEN s.source_id IS NULL THEN 'recorded'
                   WHEN s.topic_id IS NULL OR s.topic_id NOT IN (SELECT unnest(guarded)) THEN 'waiting'
                   WHEN EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                                WHERE e.topic_id = s.topic_id AND e.cause = 'unregistered_by_app' AND s.queued_at BETWEEN e.since AND e.until)
                       THEN 'excluded'
                   -- It suppresses a token that was active. An unknown token loses nothing: a backfill reports each old logout. Nor does one
                   -- that the same batch registers again afterwards.
                   WHEN NOT coalesce(NOT l.suppressed AND l.registered_at > '-infinity'
                                     AND s.at >= greatest(l.registered_at, s.registered_at), false) THEN 'counts'
                   WHEN s.released THEN 'recorded'
                   ELSE 'suppresses' END AS fate
        FROM unnest(judge_unregistrations.of_topic, judge_unregistrations.token_keys, judge_unregistrations.at, judge_unregistrations.queued_at,
                    judge_unregistrations.released, judge_unregistrations.source_ids, judge_unregistrations.registered_at)
             WITH ORDINALITY AS s (topic_id, token_key, at, queued_at, released, source_id, registered_at, n)
        LEFT JOIN tokenkeeper.ledger AS l ON l.topic_id = s.topic_id AND l.token_key = s.token_key) AS j;
    SELECT g.held, g.tripped, g.reset INTO held, tripped, reset
    FROM tokenkeeper.turn_guards('unregistered_by_app', judge_unregistrations.of_topic, judge_unregistrations.token_keys,
                                 -- An undo goes by when they were received.
                                 judge_unregistrations.queued_at, judge_unregistrations.queued_at,
                                 judge_unregistrations.fates, judge_unregistrations.allowance, judge_unregistrations.max_share) AS g;
    SELECT coalesce(array_agg(CASE WHEN s.fate = 'suppresses' AND s.holds THEN 'held' WHEN s.fate IN ('suppresses', 'counts') THEN 'recorded'
                                   ELSE s.fate END ORDER BY s.n), '{}'),
           coalesce(array_agg(s.fate = 'suppresses' AND NOT s.holds ORDER BY s.n), '{}')
    INTO fates, suppresses
    FROM (SELECT u.fate, u.n, coalesce(u.topic_id IN (SELECT unnest(held)), false) AS holds
          FROM unnest(judge_unregistrations.of_topic, judge_unregistrations.fates) WITH ORDINALITY AS u (topic_id, fate, n)) AS s;
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge_unregistrations(
    integer[], bytea[], timestamptz[], timestamptz[], boolean[], bigint[], timestamptz[], bigint, numeric) IS
    'The mass-failure guard for logouts: decides the fate of each logout of a batch. waiting (another session holds the topic''s guard, or the topic is '
    'null), excluded (undone by reinstate), held, or recorded, as are all logouts of the application itself (without a source). suppresses says which of '
    'those recorded the guard counts; hand it on to note_unregistrations. registered_at is the latest registration of the same token in the same batch, '
    'or null. Also returns the topics whose guard has tripped or reset. Locks the guards of these topics until the transaction ends, so call it before '
    'any token is locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge_unregistrations(
    integer[], bytea[], timestamptz[], timestamptz[], boolean[], bigint[], timestamptz[], bigint, numeric) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_unregistrations(
    of_topic integer[],
    token_keys bytea[],
    at timestamptz[],
    queued_at timestamptz[],
    source_ids bigint[],
    suppresses boolean[],
    was timestamptz[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    IF true = ANY (note_unregistrations.suppresses) THEN
        PERFORM tokenkeeper.note_guard('unregistered_by_app', array_agg(s.topic_id), array_agg(s.token_key), array_agg(s.queued_at))
        FROM unnest(note_unregistrations.of_topic, note_unregistrations.token_keys, note_unregistrations.queued_at, note_unregistrations.suppresses)
             AS s (topic_id, token_key, queued_at, suppresses)
        WHERE s.suppresses;
    END IF;
    WITH said AS MATERIALIZED (
        SELECT s.topic_id, s.token_key, bool_or(s.source_id IS NOT NULL) AS has_source, max(s.at) FILTER (WHERE s.source_id IS NULL) AS direct_at,
               max(s.was) AS was
        FROM unnest(note_unregistrations.of_topic, note_unregistrations.token_keys, note_unregistrations.at, note_unregistrations.source_ids,
                    note_unregistrations.was) AS s (topic_id, token_key, at, source_id, was)
        GROUP BY 1, 2
    ), known AS (
        SELECT s.*, r.has_receipt, r.direct_before
        FROM said AS s
        CROSS JOIN LATERAL (
            SELECT count(*) > 0 AS has_receipt, max(k.unregistered_by_app_at) FILTER (WHERE k.source_id IS NULL) AS direct_before
            FROM tokenkeeper.unregistration_receipt AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key) AS r
        WHERE s.has_source OR r.has_receipt
    ), direct AS (
        -- What the ledger knows of a token without receipts came from the application itself.
        SELECT k.*, greatest(k.direct_at, CASE WHEN NOT k.has_receipt THEN k.was END) AS at FROM known AS k
    )
    INSERT INTO tokenkeeper.unregistration_receipt (queued_at, unregistered_by_app_at, source_id, topic_id, suppresses, token_key)
    SELECT clock_timestamp(), d.at, NULL, d.topic_id, false, d.token_key
    FROM direct AS d WHERE coalesce(d.at > d.direct_before, d.at IS NOT NULL)
    UNION ALL
    SELECT s.queued_at, s.at, s.source_id, s.topic_id, s.suppresses, s.token_key
    FROM unnest(note_unregistrations.queued_at, note_unregistrations.at, note_unregistrations.source_ids, note_unregistrations.of_topic,
                note_unregistrations.suppresses, note_unregistrations.token_keys)
         AS s (queued_at, at, source_id, topic_id, suppresses, token_key)
    WHERE s.source_id IS NOT NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_unregistrations(integer[], bytea[], timestamptz[], timestamptz[], bigint[], boolean[], timestamptz[]) IS
    'Keeps a receipt of each logout of a source that a batch records, and counts those that suppress for the guard. Pass the logouts of the application '
    'too (source_ids null): for a token that has receipts, the latest of them is kept, so that an undo does not touch it. was is what the ledger had as '
    'unregistered_by_app_at before the batch. Call it with the tokens locked, in the transaction that records them.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_unregistrations(integer[], bytea[], timestamptz[], timestamptz[], bigint[], boolean[], timestamptz[])
    FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_direct_unregistration(of_topic integer, key bytea, moment timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
BEGIN
    -- Nearly always there is no receipt, and this is all.
    IF NOT EXISTS (SELECT FROM tokenkeeper.unregistration_receipt AS r WHERE r.topic_id = of_topic AND r.token_key = key) THEN
        RETURN;
    END IF;
    UPDATE tokenkeeper.unregistration_receipt AS r SET unregistered_by_app_at = greatest(r.unregistered_by_app_at, moment)
    WHERE r.topic_id = of_topic AND r.token_key = key AND r.source_id IS NULL;
    IF NOT FOUND THEN
        INSERT INTO tokenkeeper.unregistration_receipt (queued_at, unregistered_by_app_at, source_id, topic_id, suppresses, token_key)
        VALUES (clock_timestamp(), moment, NULL, of_topic, false, key);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_direct_unregistration(integer, bytea, timestamptz) IS
    'Called by unregister with the token locked: if the token has receipts of logouts from a source, keeps this logout as well, so that an undo of '
    'those does not touch it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_direct_unregistration(integer, bytea, timestamptz) FROM PUBLIC;
