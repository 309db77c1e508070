-- How a daemon records what became of requests: finish_requests, for single ones and for those in campaigns' batches. requeue_failed is for operators.
--
-- Locks, in this order: the daemon's requests of no campaign, with waiting; its requests of campaigns, and its batches, each if it is free (see
-- lock_requests_of_campaign); background_send in key order, with waiting.

CREATE OR REPLACE FUNCTION tokenkeeper.meaning_of(status integer, meaning text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(meaning, CASE status WHEN 200 THEN 'accepted' WHEN 410 THEN 'stale' ELSE 'suspect' END);
COMMENT ON FUNCTION tokenkeeper.meaning_of(integer, text) IS
    'Internal: what the response to a campaign''s request means, by the daemon or else by its status: accepted, stale or suspect.';

CREATE OR REPLACE FUNCTION tokenkeeper.checked_endings(endings tokenkeeper.request_ending[]) RETURNS tokenkeeper.request_ending[]
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    fates constant text[] := '{answered,failed,later,refused,interrupted,returned}';
    meanings constant text[] := '{accepted,stale,suspect}';
    unknown text;
BEGIN
    SELECT CASE WHEN (e.fate = ANY (fates)) IS NOT TRUE THEN 'a fate is ' || coalesce(quote_literal(left(e.fate, 20)), 'null') || ', expected one of ' || fates::text
                ELSE 'a meaning is ' || quote_literal(left(e.meaning, 20)) || ', expected null or one of ' || meanings::text END
    INTO unknown FROM unnest(endings) AS e WHERE (e.fate = ANY (fates)) IS NOT TRUE OR e.meaning <> ALL (meanings) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%', unknown USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (SELECT count(DISTINCT e.number) = count(*) FROM unnest(endings) AS e) THEN
        RETURN endings;
    END IF;
    -- Another daemon took a request over from this one, which then claimed it again. A response counts more than its absence.
    RETURN ARRAY(
        SELECT DISTINCT ON (e.number) ROW(e.number, e.fate, e.status, e.body, e.apns_id, e.sent_at, e.pause, e.error, e.meaning)::tokenkeeper.request_ending
        FROM unnest(endings) WITH ORDINALITY AS e (number, fate, status, body, apns_id, sent_at, pause, error, meaning, n)
        WHERE e.number IS NOT NULL ORDER BY e.number, e.fate <> 'answered', e.n);
END
$$;
COMMENT ON FUNCTION tokenkeeper.checked_endings(tokenkeeper.request_ending[]) IS
    'Internal: the same endings, one for each number. Raises 22023 for an unknown fate or meaning.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_singles(daemon_id text, endings tokenkeeper.request_ending[], of_campaigns boolean)
RETURNS tokenkeeper.ended_request[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := end_singles.daemon_id;
    cancelled_while_sent constant text := 'it was interrupted while it was being sent, and its campaign was cancelled; it may have been delivered';
    -- Of each request's campaign.
    states text[];
    ended tokenkeeper.ended_request[];
BEGIN
    IF of_campaigns THEN
        -- What an open transaction has locked that changes a campaign stays claimed, and keeps nothing else from ending. While these locks are held, the
        -- campaigns of these requests cannot be paused, resumed or cancelled: see lock_requests_of_campaign.
        -- IS TRUE: do not use the index on claimed_by, which has all requests of this daemon under one key.
        SELECT array_agg(e), array_agg((SELECT c.state FROM tokenkeeper.campaign AS c WHERE c.campaign_id = r.campaign_id)) INTO endings, states
        FROM unnest(endings) AS e CROSS JOIN LATERAL (
            SELECT s.campaign_id FROM tokenkeeper.send_request AS s
            WHERE s.request_id = e.number AND (s.claimed_by = the_daemon) IS TRUE AND s.campaign_id IS NOT NULL FOR UPDATE SKIP LOCKED) AS r;
    END IF;
    WITH decided AS MATERIALIZED (
        -- Of a cancelled campaign nothing waits, and of a paused one nothing is due.
        SELECT e.*, (n.state = 'paused') IS TRUE AS is_paused,
               CASE WHEN n.state = 'cancelled' AND e.fate NOT IN ('answered', 'failed')
                    THEN CASE e.fate WHEN 'interrupted' THEN 'failed' ELSE 'cancelled' END ELSE e.fate END AS decided,
               CASE WHEN n.state = 'cancelled' AND e.fate = 'interrupted' THEN cancelled_while_sent ELSE e.error END AS said
        FROM unnest(endings) WITH ORDINALITY AS e
        CROSS JOIN LATERAL (SELECT states[e.ordinality] AS state) AS n
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING decided AS t
        WHERE r.request_id = t.number AND (r.claimed_by = the_daemon) IS TRUE AND (r.campaign_id IS NOT NULL) = of_campaigns
          AND t.decided IN ('answered', 'failed', 'cancelled')
        RETURNING ROW(r.request_id, r.environment, r.topic, r.token, r.apns_id, r.campaign_id, r.campaign_number, r.queued_at, r.attempts,
                      CASE WHEN t.decided = 'failed' THEN r END, t.decided, t.status, t.body, t.apns_id, t.sent_at, t.said,
                      CASE WHEN t.decided = 'answered' THEN tokenkeeper.meaning_of(t.status, t.meaning) ELSE t.decided END, false)::tokenkeeper.ended_request AS e
    ), kept AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = NULL, attempts = r.attempts + CASE t.fate WHEN 'returned' THEN 0 ELSE 1 END,
            refusals = least(r.refusals + CASE t.fate WHEN 'refused' THEN 1 ELSE 0 END, 32767),
            interruptions = r.interruptions + CASE t.fate WHEN 'interrupted' THEN 1 ELSE 0 END, last_error = coalesce(t.error, r.last_error),
            first_sent_at = CASE WHEN t.fate = 'returned' AND r.attempts = 0 AND r.interruptions = 0 THEN NULL ELSE r.first_sent_at END,
            scheduled_at = CASE WHEN t.is_paused THEN 'infinity' WHEN t.pause IS NULL THEN r.scheduled_at
                                ELSE clock_timestamp() + t.pause * interval '1 microsecond' END,
            deferred = r.deferred OR t.pause IS NOT NULL OR t.is_paused
        FROM decided AS t
        WHERE r.request_id = t.number AND (r.claimed_by = the_daemon) IS TRUE AND (r.campaign_id IS NOT NULL) = of_campaigns
          AND t.decided IN ('later', 'refused', 'interrupted', 'returned')
        RETURNING ROW(r.request_id, r.environment, r.topic, r.token, r.apns_id, NULL, NULL, NULL, NULL, NULL, t.fate, t.status, t.body, t.apns_id, t.sent_at,
                      NULL, NULL, t.fate <> 'interrupted' AND coalesce(
                          r.push_type, (SELECT c.push_type FROM tokenkeeper.campaign AS c WHERE c.campaign_id = r.campaign_id),
                          tokenkeeper.push_type_of(tokenkeeper.parsed_payload(r.payload), r.topic)) = 'background')::tokenkeeper.ended_request AS e
    )
    SELECT array_agg(o.e) INTO ended FROM (SELECT g.e FROM gone AS g UNION ALL SELECT k.e FROM kept AS k) AS o;
    RETURN coalesce(ended, '{}');
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_singles(text, tokenkeeper.request_ending[], boolean) IS
    'Internal: takes requests that a daemon has claimed out of send_request, or gives them back to it: those of no campaign, or of any. Returns them, '
    'without those that the daemon no longer had, or whose campaign another transaction changes: these stay claimed.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_endings(ended tokenkeeper.ended_request[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- In batches.
    campaign_ids bigint[];
    batches integer[];
    ordinals integer[];
    results text[];
    -- Background pushes that did not reach their devices.
    topics text[];
    environments text[];
    keys bytea[];
BEGIN
    WITH e AS MATERIALIZED (
        SELECT o.* FROM unnest(ended) AS o
    ), answered AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
        SELECT coalesce(e.environment, 'production'), e.topic, e.token, e.status, e.body, coalesce(e.answered_id, e.apns_id::text), e.sent_at
        FROM e WHERE e.status IS NOT NULL
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, status, environment, topic, token, payload, push_type, priority, expiration, collapse_id,
                                             apns_id, request_id, queued_at, attempts, campaign_id, campaign_number)
        SELECT coalesce(e.error, 'failed'), e.status, e.environment, e.topic, e.token, (e.request).payload, (e.request).push_type,
               (e.request).priority, (e.request).expiration, (e.request).collapse_id, e.apns_id, (e.request).request_id, e.queued_at,
               e.attempts, e.campaign_id, e.campaign_number
        FROM e WHERE e.fate = 'failed'
    ), endings AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT e.campaign_id, e.campaign_number >> 9, count(*), e.result, array_agg((e.campaign_number & 511)::smallint)
        FROM e WHERE e.number > 0 AND e.campaign_id IS NOT NULL GROUP BY 1, 2, 4
    )
    SELECT array_agg(e.campaign_id) FILTER (WHERE e.number < 0), array_agg((e.campaign_number >> 9)::integer) FILTER (WHERE e.number < 0),
           array_agg((e.campaign_number & 511)::integer) FILTER (WHERE e.number < 0), array_agg(e.result) FILTER (WHERE e.number < 0),
           array_agg(e.topic) FILTER (WHERE e.is_unsent), array_agg(coalesce(e.environment, 'production')) FILTER (WHERE e.is_unsent),
           array_agg(tokenkeeper.token_key(e.token)) FILTER (WHERE e.is_unsent)
    INTO campaign_ids, batches, ordinals, results, topics, environments, keys FROM e;
    IF keys IS NOT NULL THEN
        PERFORM tokenkeeper.uncount_background(topics, environments, keys);
    END IF;
    IF campaign_ids IS NOT NULL THEN
        PERFORM tokenkeeper.end_in_batches(campaign_ids, batches, ordinals, results);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_endings(tokenkeeper.ended_request[]) IS
    'Internal: writes responses to send_result, failures to failed_send, and outcomes to the campaigns. Uncounts background pushes that did not reach their '
    'device.';

CREATE OR REPLACE FUNCTION tokenkeeper.finish_requests(daemon_id text, endings tokenkeeper.request_ending[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    checked tokenkeeper.request_ending[] := tokenkeeper.checked_endings(finish_requests.endings);
    singles integer := (SELECT count(*) FROM unnest(checked) AS e WHERE e.number > 0);
    ended tokenkeeper.ended_request[] := '{}';
BEGIN
    IF singles > 0 THEN
        -- First those of no campaign, which are usually all. To lock the others first costs a third more.
        ended := tokenkeeper.end_singles(finish_requests.daemon_id, checked, false);
        IF cardinality(ended) < singles THEN
            ended := ended || tokenkeeper.end_singles(finish_requests.daemon_id, checked, true);
        END IF;
    END IF;
    IF singles < cardinality(checked) THEN
        ended := ended || tokenkeeper.end_batched(finish_requests.daemon_id, checked);
    END IF;
    PERFORM tokenkeeper.note_endings(ended);
    RETURN cardinality(ended);
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_requests(text, tokenkeeper.request_ending[]) IS
    'Records what became of requests that this daemon has claimed; responses of APNs go into send_result. A request in send_request leaves it or waits there '
    'again. One in a batch is recorded there, goes back to it (returned without a pause), or moves to send_request with the same apns-id. In a cancelled '
    'campaign, later, refused and returned end a request as cancelled, interrupted as failed. Of several endings of a request, answered counts, or else the '
    'first. Returns how many requests it finished, without those that the daemon no longer had, or whose campaign is locked: these stay claimed. Raises '
    '22023 for an unknown fate or meaning.';

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_failed(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    requests bigint;
BEGIN
    WITH gone AS (
        DELETE FROM tokenkeeper.failed_send AS f
        WHERE requeue_failed.ids IS NULL OR f.failed_id = ANY (requeue_failed.ids) RETURNING f.*
    )
    -- The campaign keeps its failed request, and this is a new one with the same content.
    INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id, queued_at)
    SELECT g.environment, g.topic, g.token, coalesce(g.payload, c.payload), coalesce(g.push_type, c.push_type), coalesce(g.priority, c.priority),
           coalesce(g.expiration, c.expiration), coalesce(g.collapse_id, c.collapse_id), now(), g.apns_id, g.queued_at
    FROM gone AS g LEFT JOIN tokenkeeper.campaign AS c ON c.campaign_id = g.campaign_id;
    GET DIAGNOSTICS requests = ROW_COUNT;
    IF requests > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('failed_requeued', requests);
    END IF;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_failed(bigint[]) IS
    'Puts failed requests back into the outbox with their apns_id, by failed_id (null: all); returns how many. A campaign''s request becomes a single one, '
    'and still counts as failed in the campaign.';
