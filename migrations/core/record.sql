-- How a daemon records a batch of results: the guard decides which count (judge), and what counts is merged into the ledger as a registration is. What does not
-- count is held.
--
-- Locks: the tokens of 410s, then those of suspects, each as merge_batch does.

CREATE OR REPLACE FUNCTION tokenkeeper.record(
    reports tokenkeeper.token_report[], guard_allowance bigint, guard_max_share numeric, hold_stale_share numeric,
    OUT busy integer[], OUT held integer[], OUT changes tokenkeeper.guard_change[], OUT moved integer[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    receipt timestamptz := clock_timestamp();
    give_up_at timestamptz := tokenkeeper.patience_ends();
    holds boolean := false;
    of_cause text;
    batch tokenkeeper.token_report[];
    judged record;
    merged record;
    erasures bigint[] := tokenkeeper.known_erasures();
BEGIN
    reports := tokenkeeper.without(reports, tokenkeeper.forgotten_results(reports));
    moved := '{}';
    IF EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.moved_to IS NOT NULL) THEN
        moved := ARRAY(SELECT r.n FROM unnest(reports) AS r JOIN tokenkeeper.topic AS t ON t.topic_id = r.topic_id WHERE t.moved_to IS NOT NULL);
        reports := tokenkeeper.without(reports, moved);
    END IF;
    busy := ARRAY(SELECT r.n FROM unnest(reports) AS r WHERE r.topic_id IS NULL);
    held := '{}';
    changes := '{}';
    -- 410s first: a suspect of the same token then suppresses nothing.
    FOREACH of_cause IN ARRAY ARRAY['stale', 'suspect'] LOOP
        batch := ARRAY(SELECT r FROM unnest(reports) AS r WHERE r.cause = of_cause AND r.topic_id IS NOT NULL);
        CONTINUE WHEN batch = '{}';
        SELECT * INTO judged FROM tokenkeeper.judge(batch, guard_allowance, CASE of_cause WHEN 'stale' THEN hold_stale_share ELSE guard_max_share END);
        SELECT * INTO merged FROM tokenkeeper.merge_reports(judged.counting, receipt, holds, give_up_at);
        PERFORM tokenkeeper.keep_receipts(tokenkeeper.without(judged.counting, merged.busy), merged.turned);
        busy := busy || merged.busy;
        held := held || ARRAY(SELECT h.n FROM unnest(judged.held) AS h);
        changes := changes || judged.changes;
        holds := true;
    END LOOP;
    PERFORM tokenkeeper.erase_since(erasures);
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(tokenkeeper.token_report[], bigint, numeric, numeric) IS
    'Records what the results of a batch say about tokens. Returns, by n, those that it did not record: busy (another session has locked the token or '
    'topic), held by the guard (for held_result), and of a moved topic (for moved_row); and the guards that tripped or reset. guard_max_share limits '
    'suspects, hold_stale_share 410s; null or 1 is no limit.';
