-- What becomes of requests in a campaign's batches (for finish_requests), which claimed requests a daemon must not send any more, and what another daemon takes over
-- from one that has ended.
--
-- Locks: the batches and requests that the daemon has claimed, if they are free. fail_expired locks free requests that wait.

CREATE OR REPLACE FUNCTION tokenkeeper.end_batched(daemon_id text, endings tokenkeeper.request_ending[]) RETURNS tokenkeeper.ended_request[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_mergejoin = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := end_batched.daemon_id;
    cancelled_while_sent constant text := 'it was interrupted while it was being sent, and its campaign was cancelled; it may have been delivered';
    campaign_ids bigint[];
    batches integer[];
    ended tokenkeeper.ended_request[];
BEGIN
    -- What an open transaction of somebody else has locked stays claimed, and keeps nothing else from ending. While these locks are held, the campaigns of
    -- these batches cannot be paused, resumed or cancelled: see lock_requests_of_campaign. A batch that another daemon has taken over is none of this
    -- daemon's business.
    SELECT array_agg(b.campaign_id), array_agg(b.batch) INTO campaign_ids, batches
    FROM (SELECT DISTINCT (-e.number) >> 32 AS campaign_id, (((-e.number) & 4294967295) >> 9)::integer AS batch FROM unnest(endings) AS e WHERE e.number < 0 ORDER BY 1, 2) AS t
    CROSS JOIN LATERAL (
        SELECT a.campaign_id, a.batch FROM tokenkeeper.campaign_batch AS a
        WHERE a.campaign_id = t.campaign_id AND a.batch = t.batch AND (a.claimed_by = the_daemon) IS TRUE FOR UPDATE SKIP LOCKED) AS b;
    WITH held AS MATERIALIZED (
        -- A copy of the keys, because each access to a stored array would read all of it.
        SELECT b.campaign_id, b.batch, b.requests, b.ended | b.returned AS done, b.token_keys || '{}'::bytea[] AS token_keys,
               c.environment, c.topic, c.state, c.push_type, c.created_at
        FROM unnest(campaign_ids, batches) AS d (campaign_id, batch)
        CROSS JOIN LATERAL (
            SELECT a.* FROM tokenkeeper.campaign_batch AS a
            WHERE a.campaign_id = d.campaign_id AND a.batch = d.batch AND (a.claimed_by = the_daemon) IS TRUE OFFSET 0) AS b
        CROSS JOIN LATERAL (SELECT a.* FROM tokenkeeper.campaign AS a WHERE a.campaign_id = d.campaign_id OFFSET 0) AS c
    ), fresh AS MATERIALIZED (
        -- A request that has ended before is not counted twice: its response was lost after the COMMIT, or it was forgotten.
        SELECT e.*, h.environment, h.topic, h.push_type, h.created_at, h.state, h.campaign_id, n.number AS campaign_number,
               encode(h.token_keys[n.number & 511], 'hex') AS token, tokenkeeper.campaign_apns_id(h.campaign_id, n.number) AS own_id,
               CASE WHEN e.fate = 'answered' THEN tokenkeeper.meaning_of(e.status, e.meaning)
                    WHEN e.fate = 'failed' THEN 'failed'
                    WHEN h.state = 'cancelled' THEN CASE e.fate WHEN 'interrupted' THEN 'failed' ELSE 'cancelled' END
                    WHEN e.fate = 'returned' AND e.pause IS NULL THEN 'returned'
                    ELSE 'requeued' END AS result
        FROM unnest(endings) AS e
        CROSS JOIN LATERAL (SELECT (-e.number) & 4294967295 AS number) AS n
        JOIN held AS h ON h.campaign_id = (-e.number) >> 32 AND h.batch = (n.number >> 9)::integer
        WHERE e.number < 0 AND n.number & 511 BETWEEN 1 AND h.requests AND get_bit(h.done, (n.number & 511)::integer) = 0
    ), moved AS (
        INSERT INTO tokenkeeper.send_request (environment, topic, token, scheduled_at, apns_id, first_sent_at, attempts, refusals, interruptions, last_error,
                                              deferred, campaign_id, campaign_number)
        SELECT f.environment, f.topic, f.token,
               CASE WHEN f.state = 'paused' THEN 'infinity' ELSE clock_timestamp() + f.pause * interval '1 microsecond' END,
               f.own_id, CASE WHEN f.fate <> 'returned' THEN coalesce(f.sent_at, now()) END,
               CASE f.fate WHEN 'returned' THEN 0 ELSE 1 END, CASE f.fate WHEN 'refused' THEN 1 ELSE 0 END,
               CASE f.fate WHEN 'interrupted' THEN 1 ELSE 0 END, f.error,
               f.pause IS NOT NULL OR f.state = 'paused', f.campaign_id, f.campaign_number
        FROM fresh AS f WHERE f.result = 'requeued'
    )
    SELECT array_agg(ROW(
        f.number, f.environment, f.topic, f.token, f.own_id, f.campaign_id, f.campaign_number, f.created_at, CASE f.fate WHEN 'failed' THEN 0 ELSE 1 END, NULL,
        CASE f.result WHEN 'failed' THEN 'failed' ELSE f.fate END, f.status, f.body, f.apns_id, f.sent_at,
        CASE WHEN f.result = 'failed' AND f.fate <> 'failed' THEN cancelled_while_sent ELSE f.error END, f.result,
        f.fate IN ('later', 'refused', 'returned') AND f.push_type = 'background')::tokenkeeper.ended_request)
    INTO ended FROM fresh AS f;
    RETURN coalesce(ended, '{}');
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_batched(text, tokenkeeper.request_ending[]) IS
    'Internal: locks the batches of requests that this daemon claimed with claim_campaign, and decides what becomes of the requests; those to be tried again '
    'move to send_request. Returns them with their results for end_in_batches, without those that the daemon no longer had, or whose batch another '
    'transaction has locked: these stay claimed.';

CREATE OR REPLACE FUNCTION tokenkeeper.fail_expired(of_campaign bigint) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    failed bigint;
BEGIN
    failed := tokenkeeper.end_batches(of_campaign, 'failed', 1000);
    -- Those that wait for resume_campaign fail in claim_requests, now.
    UPDATE tokenkeeper.send_request AS r SET scheduled_at = clock_timestamp()
    WHERE r.request_id IN (
        SELECT s.request_id FROM tokenkeeper.send_request AS s
        WHERE s.campaign_id = of_campaign AND s.claimed_by IS NULL AND s.scheduled_at = 'infinity'
        ORDER BY s.request_id LIMIT 1000 FOR UPDATE SKIP LOCKED);
    RETURN failed;
END
$$;
COMMENT ON FUNCTION tokenkeeper.fail_expired(bigint) IS
    'Internal: ends requests of an expired campaign as failed, up to 1000 of its unclaimed batches, without rows in failed_send. Requests that wait in '
    'send_request for resume_campaign become due, and fail when they are claimed. Returns how many failed now.';

CREATE OR REPLACE FUNCTION tokenkeeper.claimed_campaign_requests(daemon_id text) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := claimed_campaign_requests.daemon_id;
BEGIN
    RETURN QUERY
        SELECT -((b.campaign_id << 32) | (b.batch::bigint << 9) | o) FROM tokenkeeper.campaign_batch AS b
        CROSS JOIN LATERAL generate_series(1, b.requests) AS o
        WHERE b.claimed_by = the_daemon AND get_bit(b.ended | b.returned, o) = 0;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claimed_campaign_requests(text) IS
    'The requests in batches that a daemon has claimed and not finished, by their negative numbers.';

CREATE OR REPLACE FUNCTION tokenkeeper.recalled_requests(daemon_id text, numbers bigint[]) RETURNS TABLE (number bigint, is_gone boolean)
LANGUAGE plpgsql STABLE ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    the_daemon text COLLATE "C" := recalled_requests.daemon_id;
BEGIN
    -- OFFSET: one request after the other, by the primary key.
    RETURN QUERY
        WITH claimed AS MATERIALIZED (
            SELECT n.number, r.topic, r.environment, r.campaign_id
            FROM unnest(recalled_requests.numbers) AS n (number) LEFT JOIN LATERAL (
                SELECT s.topic, coalesce(s.environment, 'production') AS environment, s.campaign_id FROM tokenkeeper.send_request AS s
                WHERE s.request_id = n.number AND (s.claimed_by = the_daemon) IS TRUE OFFSET 0) AS r ON true
            WHERE n.number > 0
            UNION ALL
            SELECT n.number, c.topic, c.environment, b.campaign_id
            FROM unnest(recalled_requests.numbers) AS n (number) LEFT JOIN LATERAL (
                SELECT a.campaign_id FROM tokenkeeper.campaign_batch AS a
                WHERE a.campaign_id = (-n.number) >> 32 AND a.batch = (((-n.number) & 4294967295) >> 9)::integer AND (a.claimed_by = the_daemon) IS TRUE
                  AND get_bit(a.ended | a.returned, ((-n.number) & 511)::integer) = 0 OFFSET 0) AS b ON true
            LEFT JOIN LATERAL (
                SELECT a.topic, a.environment FROM tokenkeeper.campaign AS a WHERE a.campaign_id = b.campaign_id OFFSET 0) AS c ON true
            WHERE n.number < 0
        ), stopped AS MATERIALIZED (
            SELECT s.campaign_id FROM (SELECT DISTINCT c.campaign_id FROM claimed AS c WHERE c.campaign_id IS NOT NULL) AS d
            CROSS JOIN LATERAL (SELECT a.campaign_id FROM tokenkeeper.campaign AS a
                                WHERE a.campaign_id = d.campaign_id AND a.state IN ('paused', 'cancelled') OFFSET 0) AS s
        )
        SELECT c.number, c.topic IS NULL FROM claimed AS c
        WHERE c.topic IS NULL OR c.campaign_id IN (SELECT s.campaign_id FROM stopped AS s)
           OR EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = c.topic AND p.environment = c.environment);
END
$$;
COMMENT ON FUNCTION tokenkeeper.recalled_requests(text, bigint[]) IS
    'Which of these claimed requests (negative numbers as in claim_campaign) the daemon must no longer send. is_gone: another daemon has it, or it was '
    'deleted or forgotten. Otherwise its topic or campaign is paused, or its campaign cancelled: return it.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_over(holder text, all_sent boolean, sent bigint[], OUT requests bigint, OUT interrupted bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_sent tokenkeeper.request_ending[];
    of_others tokenkeeper.request_ending[];
BEGIN
    SELECT array_agg(n.ending) FILTER (WHERE n.was_sent), array_agg(n.ending) FILTER (WHERE NOT n.was_sent) INTO of_sent, of_others
    FROM (SELECT w.was_sent, ROW(c.number, CASE WHEN w.was_sent THEN 'interrupted' ELSE 'returned' END,
                                 NULL, NULL, NULL, NULL, NULL, NULL, NULL)::tokenkeeper.request_ending AS ending
          FROM (SELECT f.request_id AS number FROM (
                    SELECT r.request_id FROM tokenkeeper.send_request AS r WHERE r.claimed_by = holder FOR UPDATE SKIP LOCKED) AS f
                UNION ALL
                SELECT b FROM tokenkeeper.claimed_campaign_requests(holder) AS b) AS c
          CROSS JOIN LATERAL (SELECT (all_sent OR c.number = ANY (sent)) IS TRUE AS was_sent) AS w) AS n;
    interrupted := tokenkeeper.finish_requests(holder, of_sent);
    requests := interrupted + tokenkeeper.finish_requests(holder, of_others);
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_over(text, boolean, bigint[]) IS
    'Gives the requests of an ended daemon back: those that may have been sent (all, or these numbers) as interrupted, the others as returned. Returns how '
    'many it gave back, and how many of them may have been sent.';
