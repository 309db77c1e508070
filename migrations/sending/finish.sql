-- How a daemon records what became of single requests, of a topic or a campaign. requeue_failed is for operators.
--
-- Locks: the requests that the daemon has claimed. Those of a campaign only if they are free: see lock_requests_of_campaign. Then background_send in key order,
-- with waiting.

CREATE OR REPLACE FUNCTION tokenkeeper.outcome_of(status integer, outcome text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(outcome, CASE status WHEN 200 THEN 'accepted' WHEN 410 THEN 'stale' ELSE 'suspect' END);
COMMENT ON FUNCTION tokenkeeper.outcome_of(integer, text) IS
    'What the response to a campaign''s request means: what the daemon says, or else by its status: accepted, stale or suspect.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_outcomes(outcomes text[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unknown text := (SELECT o FROM unnest(check_outcomes.outcomes COLLATE "C") AS o WHERE o NOT IN ('accepted', 'stale', 'suspect') LIMIT 1);
BEGIN
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'an outcome is %, expected accepted, stale, suspect or null', quote_literal(left(unknown, 20))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_outcomes(text[]) IS 'Raises 22023 unless each outcome is accepted, stale, suspect or null.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_fates(fates text[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unknown text;
BEGIN
    SELECT coalesce(quote_literal(left(f.fate, 20)), 'null') INTO unknown FROM unnest(check_fates.fates COLLATE "C") AS f (fate)
    WHERE f.fate IN ('answered', 'failed', 'later', 'refused', 'interrupted', 'returned') IS NOT TRUE LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'a fate is %, expected answered, failed, later, refused, interrupted or returned', unknown USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_fates(text[]) IS 'Raises 22023 unless each fate is answered, failed, later, refused, interrupted or returned.';

CREATE OR REPLACE FUNCTION tokenkeeper.finish_requests(
    daemon_id text, request_ids bigint[], fates text[], statuses integer[], bodies text[], apns_ids text[], sent_ats timestamptz[],
    pauses bigint[], errors text[], outcomes text[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    the_daemon text COLLATE "C" := finish_requests.daemon_id;
    of_campaigns boolean;
    held bigint[] := finish_requests.request_ids;
    campaign_ids bigint[];
    ended bigint := 0;
    ended_now bigint;
    -- Background pushes that did not reach their devices.
    topics text[] := '{}';
    environments text[] := '{}';
    keys bytea[] := '{}';
BEGIN
    PERFORM tokenkeeper.check_fates(finish_requests.fates);
    PERFORM tokenkeeper.check_outcomes(finish_requests.outcomes);
    -- First those of no campaign, which are usually all. To lock the others first costs a third more.
    FOREACH of_campaigns IN ARRAY ARRAY[false, true] LOOP
        IF of_campaigns THEN
            EXIT WHEN ended = cardinality(finish_requests.request_ids);
            -- What an open transaction has locked that changes a campaign stays claimed, and keeps nothing else from ending. Under these locks, no
            -- campaign of the others is paused, resumed or cancelled: see lock_requests_of_campaign.
            -- IS TRUE: do not use the index on claimed_by, which has all requests of this daemon under one key.
            SELECT array_agg(r.request_id ORDER BY n.place), array_agg(r.campaign_id ORDER BY n.place) INTO held, campaign_ids
            FROM unnest(finish_requests.request_ids) WITH ORDINALITY AS n (request_id, place)
            LEFT JOIN LATERAL (
                SELECT s.request_id, s.campaign_id FROM tokenkeeper.send_request AS s
                WHERE s.request_id = n.request_id AND (s.claimed_by = the_daemon) IS TRUE AND s.campaign_id IS NOT NULL FOR UPDATE SKIP LOCKED) AS r ON true;
            EXIT WHEN array_remove(held, NULL) = '{}';
        END IF;

        WITH decided AS MATERIALIZED (
            -- Of a cancelled campaign nothing waits, and of a paused one nothing is due.
            SELECT t.request_id,
                   CASE WHEN t.state = 'cancelled' THEN CASE t.fate WHEN 'interrupted' THEN 'failed' ELSE 'cancelled' END ELSE t.fate END AS fate,
                   CASE WHEN t.state = 'cancelled' AND t.fate = 'interrupted'
                        THEN 'it was interrupted while it was being sent, and its campaign was cancelled; it may have been delivered'
                        ELSE t.error END AS error,
                   (t.state = 'paused') IS TRUE AS is_paused, t.status, t.body, t.apns_id, t.sent_at, t.pause, t.outcome
            FROM (SELECT n.*, CASE WHEN n.campaign_id IS NOT NULL AND n.fate NOT IN ('answered', 'failed')
                                   THEN (SELECT c.state FROM tokenkeeper.campaign AS c WHERE c.campaign_id = n.campaign_id) END AS state
                  FROM unnest(held, campaign_ids, finish_requests.fates COLLATE "C", finish_requests.statuses, finish_requests.bodies,
                              finish_requests.apns_ids, finish_requests.sent_ats, finish_requests.pauses, finish_requests.errors,
                              finish_requests.outcomes)
                      AS n (request_id, campaign_id, fate, status, body, apns_id, sent_at, pause, error, outcome)
                  WHERE n.request_id IS NOT NULL OFFSET 0) AS t
        ), gone AS (
            DELETE FROM tokenkeeper.send_request AS r USING decided AS t
            WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND (r.campaign_id IS NOT NULL) = of_campaigns
              AND t.fate IN ('answered', 'failed', 'cancelled')
            RETURNING r.environment, r.topic, r.token, r.apns_id, r.campaign_id, r.campaign_number, CASE WHEN t.fate = 'failed' THEN r END AS request,
                      t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at, t.error, t.outcome
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
            WHERE r.request_id = t.request_id AND (r.claimed_by = the_daemon) IS TRUE AND (r.campaign_id IS NOT NULL) = of_campaigns
              AND t.fate IN ('later', 'refused', 'interrupted', 'returned')
            RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at
        ), answered AS (
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
            SELECT coalesce(e.environment, 'production'), e.topic, e.token, e.status, e.body, coalesce(e.answered_id, e.apns_id::text), e.sent_at
            FROM (SELECT g.environment, g.topic, g.token, g.status, g.body, g.answered_id, g.apns_id, g.sent_at FROM gone AS g
                  UNION ALL
                  SELECT k.environment, k.topic, k.token, k.status, k.body, k.answered_id, k.apns_id, k.sent_at FROM kept AS k) AS e
            WHERE e.status IS NOT NULL
        ), failed AS (
            INSERT INTO tokenkeeper.failed_send (error, status, environment, topic, token, payload, push_type, priority, expiration, collapse_id,
                                                 apns_id, request_id, queued_at, attempts, campaign_id, campaign_number)
            SELECT coalesce(g.error, 'failed'), g.status, g.environment, g.topic, g.token, (g.request).payload, (g.request).push_type,
                   (g.request).priority, (g.request).expiration, (g.request).collapse_id, g.apns_id, (g.request).request_id, (g.request).queued_at,
                   (g.request).attempts, g.campaign_id, g.campaign_number
            FROM gone AS g WHERE g.fate = 'failed'
        ), endings AS (
            INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
            SELECT e.campaign_id, e.batch, count(*), e.outcome, array_agg(e.ordinal)
            FROM (SELECT g.campaign_id, g.campaign_number >> 9 AS batch, (g.campaign_number & 511)::smallint AS ordinal,
                         CASE g.fate WHEN 'answered' THEN tokenkeeper.outcome_of(g.status, g.outcome) ELSE g.fate END AS outcome
                  FROM gone AS g WHERE g.campaign_id IS NOT NULL) AS e
            GROUP BY e.campaign_id, e.batch, e.outcome
        ), unsent AS (
            SELECT array_agg(k.topic) AS of_topics, array_agg(coalesce(k.environment, 'production')) AS of_environments,
                   array_agg(tokenkeeper.token_key(k.token)) AS of_keys
            FROM kept AS k
            WHERE k.fate IN ('later', 'refused', 'returned')
              AND coalesce(k.push_type, (SELECT c.push_type FROM tokenkeeper.campaign AS c WHERE c.campaign_id = k.campaign_id),
                           tokenkeeper.push_type_of(tokenkeeper.parsed_payload(k.payload), k.topic)) = 'background'
        )
        SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept), topics || u.of_topics, environments || u.of_environments, keys || u.of_keys
        INTO ended_now, topics, environments, keys FROM unsent AS u;
        ended := ended + ended_now;
    END LOOP;
    IF keys <> '{}' THEN
        PERFORM tokenkeeper.uncount_background(topics, environments, keys);
    END IF;
    RETURN ended;
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[], text[]) IS
    'Records the outcome of requests that this daemon has claimed: answered (APNs responded for good), failed, later (retry after the pause, in '
    'microseconds), refused (the same, while others of the topic are accepted), interrupted (no response: retry once) or returned (not sent). Responses of APNs go into send_result. Returns how many of the requests '
    'it finished: not those that the daemon no longer had, nor those whose campaign another transaction changes, which stay claimed. outcomes says what a '
    'response means for a request of a campaign: accepted, stale or suspect; null: by its status. Raises 22023 for any other word.';

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
    'Puts failed requests back into the outbox with their apns_id, by failed_id or all of them; returns how many. A campaign''s request becomes a single '
    'one, and the campaign still counts it as failed.';
