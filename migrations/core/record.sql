-- How a daemon records a batch of results: the guard decides which count (judge), and what counts is merged into the ledger as a registration is.
--
-- Locks: the tokens in key order. A batch may let others wait for it as long as patience says; what it does not get then goes to send_result_retry.

CREATE OR REPLACE FUNCTION tokenkeeper.ensure_topics(environments text[], topics text[], patience interval DEFAULT interval '10 ms') RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lock_timeout_before text := current_setting('lock_timeout');
    begun_at timestamptz := clock_timestamp();
    found integer[] := ARRAY(
        SELECT (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = n.topic COLLATE "C" AND t.environment = n.environment COLLATE "C")
        FROM unnest(ensure_topics.topics, ensure_topics.environments) WITH ORDINALITY AS n (topic, environment, i) ORDER BY n.i);
    one integer;
BEGIN
    IF array_position(found, NULL) IS NULL THEN
        RETURN found;
    END IF;
    -- An application may be adding the same new topic, and the INSERT would wait for it.
    IF patience IS NOT NULL THEN
        PERFORM set_config('lock_timeout', (extract(epoch FROM patience) * 1000)::integer || 'ms', true);
    END IF;
    FOR one IN
        SELECT n.i FROM unnest(ensure_topics.topics, ensure_topics.environments) WITH ORDINALITY AS n (topic, environment, i)
        WHERE found[n.i] IS NULL ORDER BY n.topic COLLATE "C", n.environment COLLATE "C"
    LOOP
        BEGIN
            found[one] := tokenkeeper.ensure_topic(environments[one], topics[one]);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
        EXIT WHEN clock_timestamp() > begun_at + interval '100 ms';
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_before, true);
    RETURN found;
END
$$;
COMMENT ON FUNCTION tokenkeeper.ensure_topics(text[], text[], interval) IS
    'The topic_ids of these (environment, topic), which are added if they are new. Null for a new one that another session is adding, after this patience, and '
    'for those left after 100 ms. With a null patience, it waits as long as lock_timeout says.';

CREATE OR REPLACE FUNCTION tokenkeeper.record(
    reports tokenkeeper.token_report[], guard_allowance bigint, guard_max_share numeric, hold_stale_share numeric,
    OUT busy integer[], OUT held integer[], OUT changes tokenkeeper.guard_change[])
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
BEGIN
    reports := tokenkeeper.without(reports, tokenkeeper.forgotten_results(reports));
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
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(tokenkeeper.token_report[], bigint, numeric, numeric) IS
    'Records what the results of a batch say about tokens. Returns, by n, those whose token or topic another session has locked (busy): nothing of them was '
    'recorded; and those that the guard holds: the caller writes them to held_result. Also the guards that have tripped or reset. guard_max_share limits '
    'suspects, hold_stale_share 410s; null or 1 is no limit.';
