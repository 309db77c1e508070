-- How a daemon records what became of a campaign's requests, and which of them it must not send any more.
--
-- Locks: the batches that the daemon has claimed, if they are free; then background_send in key order, with waiting. fail_expired locks free requests that wait.

CREATE OR REPLACE FUNCTION tokenkeeper.finish_campaign_requests(
    daemon_id text, numbers bigint[], fates text[], statuses integer[], bodies text[], apns_ids text[], sent_ats timestamptz[],
    pauses bigint[], errors text[], outcomes text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_mergejoin = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := finish_campaign_requests.daemon_id;
    campaign_ids bigint[];
    batches integer[];
    ordinals integer[];
    results text[];
    -- Background pushes that did not reach their devices.
    topics text[];
    environments text[];
    keys bytea[];
BEGIN
    PERFORM tokenkeeper.check_fates(finish_campaign_requests.fates);
    PERFORM tokenkeeper.check_outcomes(finish_campaign_requests.outcomes);
    IF (SELECT count(DISTINCT n) < count(*) FROM unnest(finish_campaign_requests.numbers) AS n) THEN
        -- Another daemon took a batch over from this one, which then claimed it again. A response counts more than its absence.
        RETURN (
            SELECT tokenkeeper.finish_campaign_requests(
                finish_campaign_requests.daemon_id, array_agg(o.number), array_agg(o.fate), array_agg(o.status), array_agg(o.body),
                array_agg(o.apns_id), array_agg(o.sent_at), array_agg(o.pause), array_agg(o.error), array_agg(o.outcome))
            FROM (SELECT DISTINCT ON (t.number) t.*
                  FROM unnest(finish_campaign_requests.numbers, finish_campaign_requests.fates, finish_campaign_requests.statuses,
                              finish_campaign_requests.bodies, finish_campaign_requests.apns_ids, finish_campaign_requests.sent_ats,
                              finish_campaign_requests.pauses, finish_campaign_requests.errors, finish_campaign_requests.outcomes)
                           WITH ORDINALITY AS t (number, fate, status, body, apns_id, sent_at, pause, error, outcome, n)
                  WHERE t.number IS NOT NULL
                  ORDER BY t.number, t.fate COLLATE "C" <> 'answered', t.n) AS o);
    END IF;
    -- What an open transaction of somebody else has locked stays claimed, and keeps nothing else from ending. Under these locks, no campaign of
    -- the others is paused, resumed or cancelled: see lock_requests_of_campaign. A batch that another daemon has taken over is none of this
    -- daemon's business.
    SELECT array_agg(b.campaign_id), array_agg(b.batch) INTO campaign_ids, batches
    FROM (SELECT DISTINCT (-n) >> 32 AS campaign_id, (((-n) & 4294967295) >> 9)::integer AS batch
          FROM unnest(finish_campaign_requests.numbers) AS n WHERE n < 0 ORDER BY 1, 2) AS t
    CROSS JOIN LATERAL (
        SELECT a.campaign_id, a.batch FROM tokenkeeper.campaign_batch AS a
        WHERE a.campaign_id = t.campaign_id AND a.batch = t.batch AND (a.claimed_by = the_daemon) IS TRUE FOR UPDATE SKIP LOCKED) AS b;

    WITH told AS (
        SELECT (-t.number) >> 32 AS campaign_id, (-t.number) & 4294967295 AS number, (((-t.number) & 4294967295) >> 9)::integer AS batch,
               ((-t.number) & 511)::integer AS ordinal, t.fate COLLATE "C" AS fate, t.status, t.body, t.apns_id, t.sent_at, t.pause, t.error, t.outcome
        FROM unnest(finish_campaign_requests.numbers, finish_campaign_requests.fates, finish_campaign_requests.statuses,
                    finish_campaign_requests.bodies, finish_campaign_requests.apns_ids, finish_campaign_requests.sent_ats,
                    finish_campaign_requests.pauses, finish_campaign_requests.errors, finish_campaign_requests.outcomes)
            AS t (number, fate, status, body, apns_id, sent_at, pause, error, outcome)
        WHERE t.number < 0
    ), held AS MATERIALIZED (
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
        SELECT t.*, h.environment, h.topic, h.push_type, h.created_at, h.state, h.token_keys[t.ordinal] AS token_key,
               CASE WHEN t.fate = 'answered' THEN tokenkeeper.outcome_of(t.status, t.outcome)
                    WHEN t.fate = 'failed' THEN 'failed'
                    WHEN h.state = 'cancelled' THEN CASE t.fate WHEN 'interrupted' THEN 'failed' ELSE 'cancelled' END
                    WHEN t.fate = 'returned' AND t.pause IS NULL THEN 'returned'
                    ELSE 'requeued' END AS result
        FROM told AS t JOIN held AS h ON h.campaign_id = t.campaign_id AND h.batch = t.batch
        WHERE t.ordinal BETWEEN 1 AND h.requests AND get_bit(h.done, t.ordinal) = 0
    ), answered AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
        SELECT f.environment, f.topic, encode(f.token_key, 'hex'), f.status, f.body,
               coalesce(f.apns_id, tokenkeeper.campaign_apns_id(f.campaign_id, f.number)::text), f.sent_at
        FROM fresh AS f WHERE f.status IS NOT NULL
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, status, environment, topic, token, apns_id, queued_at, attempts, campaign_id, campaign_number)
        SELECT CASE f.fate WHEN 'failed' THEN coalesce(f.error, 'failed')
                           ELSE 'it was interrupted while it was being sent, and its campaign was cancelled; it may have been delivered' END,
               f.status, f.environment, f.topic, encode(f.token_key, 'hex'), tokenkeeper.campaign_apns_id(f.campaign_id, f.number), f.created_at,
               CASE f.fate WHEN 'failed' THEN 0 ELSE 1 END, f.campaign_id, f.number
        FROM fresh AS f WHERE f.result = 'failed'
    ), moved AS (
        INSERT INTO tokenkeeper.send_request (environment, topic, token, scheduled_at, apns_id, first_sent_at, attempts, refusals, interruptions, last_error,
                                              deferred, campaign_id, campaign_number)
        SELECT f.environment, f.topic, encode(f.token_key, 'hex'),
               CASE WHEN f.state = 'paused' THEN 'infinity' ELSE clock_timestamp() + f.pause * interval '1 microsecond' END,
               tokenkeeper.campaign_apns_id(f.campaign_id, f.number),
               CASE WHEN f.fate <> 'returned' THEN coalesce(f.sent_at, now()) END,
               CASE f.fate WHEN 'returned' THEN 0 ELSE 1 END, CASE f.fate WHEN 'refused' THEN 1 ELSE 0 END,
               CASE f.fate WHEN 'interrupted' THEN 1 ELSE 0 END, f.error,
               f.pause IS NOT NULL OR f.state = 'paused', f.campaign_id, f.number
        FROM fresh AS f WHERE f.result = 'requeued'
    )
    SELECT array_agg(f.campaign_id), array_agg(f.batch), array_agg(f.ordinal), array_agg(f.result),
           array_agg(f.topic) FILTER (WHERE f.is_unsent), array_agg(f.environment) FILTER (WHERE f.is_unsent),
           array_agg(f.token_key) FILTER (WHERE f.is_unsent)
    INTO campaign_ids, batches, ordinals, results, topics, environments, keys
    FROM (SELECT e.*, e.fate IN ('later', 'refused', 'returned') AND e.push_type = 'background' AS is_unsent FROM fresh AS e) AS f;
    IF campaign_ids IS NULL THEN
        RETURN 0;
    END IF;
    IF keys IS NOT NULL THEN
        PERFORM tokenkeeper.uncount_background(topics, environments, keys);
    END IF;
    PERFORM tokenkeeper.end_in_batches(campaign_ids, batches, ordinals, results);
    RETURN cardinality(campaign_ids);
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_campaign_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[], text[]) IS
    'Records the outcome of requests that this daemon has claimed with claim_campaign, by their negative numbers. The fates are those of finish_requests. '
    'outcomes says what a '
    'response means: accepted, stale or suspect; null: by its status. later, refused, interrupted, and returned with a pause move the request to send_request, with the same '
    'apns-id; returned without a pause gives it back to its batch. If the campaign is cancelled, later, refused and returned end it as cancelled, and interrupted as '
    'failed. Returns how many of the requests it finished: not those that the daemon no longer had, nor those whose batch another transaction has locked, '
    'which stay '
    'claimed. Raises 22023 for any other word.';

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
    'Ends requests of a campaign that has expired as failed: up to 1000 of its batches that no daemon has claimed. There is no row in failed_send for each of them. '
    'Requests that wait in send_request for resume_campaign become due, and fail when they are claimed. Returns how many failed now.';

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
    'Which of these claimed requests the daemon must not send any more. is_gone: another daemon has it, or it was deleted or forgotten, and nothing more is to be '
    'done. Otherwise its topic or campaign is paused, or its campaign is cancelled: it is to be returned. Negative numbers are those of claim_campaign.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_over_campaigns(holder text, all_sent boolean, sent bigint[], OUT requests bigint, OUT interrupted bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_sent bigint[];
    of_others bigint[];
BEGIN
    SELECT coalesce(array_agg(n.number) FILTER (WHERE n.was_sent), '{}'), coalesce(array_agg(n.number) FILTER (WHERE NOT n.was_sent), '{}')
    INTO of_sent, of_others
    FROM (SELECT c.number, take_over_campaigns.all_sent OR c.number IN (SELECT unnest(take_over_campaigns.sent)) AS was_sent
          FROM tokenkeeper.claimed_campaign_requests(take_over_campaigns.holder) AS c (number)) AS n;
    -- unnest() there fills the short arrays up with nulls.
    interrupted := tokenkeeper.finish_campaign_requests(
        take_over_campaigns.holder, of_sent, array_fill('interrupted'::text, ARRAY[cardinality(of_sent)]), '{}', '{}', '{}', '{}', '{}', '{}', '{}');
    requests := interrupted + tokenkeeper.finish_campaign_requests(
        take_over_campaigns.holder, of_others, array_fill('returned'::text, ARRAY[cardinality(of_others)]), '{}', '{}', '{}', '{}', '{}', '{}', '{}');
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_over_campaigns(text, boolean, bigint[]) IS
    'Gives the requests in batches of an ended daemon back, to be claimed by any daemon: those that may have been sent (all, or these numbers) as '
    'interrupted, the others as '
    'returned. Returns how many it gave back, and how many of them may have been sent.';
