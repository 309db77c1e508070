-- How a daemon claims single requests: it locks those that are due, asks the gate, and applies the limits.
--
-- Locks, in this order: topic_rate and the due requests, each if it is free; then background_send, alert_send and crowded_token, each in key order. The claim
-- waits for the last three.

CREATE OR REPLACE FUNCTION tokenkeeper.lock_due_requests(of_topic tokenkeeper.topic, due_since timestamptz, at_most integer)
RETURNS tokenkeeper.due_request[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN ARRAY(SELECT ROW(
        u.request_id, u.key, u.kind, u.body_text, u.due_at, u.campaign_id,
        -- Others wait for this token, and this request came later.
        NOT u.deferred AND (SELECT EXISTS (
            SELECT FROM tokenkeeper.crowded_token AS c WHERE c.topic = of_topic.topic AND c.environment = of_topic.environment))
            AND (SELECT c.next_at > now() FROM tokenkeeper.crowded_token AS c
                 WHERE c.topic = of_topic.topic AND c.environment = of_topic.environment AND c.token_key = u.key) IS TRUE,
        u.alert_counted, u.size_fault IS NOT NULL, l.state, l.reason, l.invalidated_at,
        CASE WHEN u.is_forgotten THEN NULL
             WHEN u.size_fault IS NOT NULL THEN u.size_fault
             WHEN u.interruptions >= 2
                 THEN 'it was interrupted twice while it was being sent; it may have been delivered' || coalesce(': ' || left(u.last_error, 500), '')
             WHEN u.interruptions >= 1 AND u.expiration = 'epoch'
                 THEN 'it was interrupted while it was being sent, and its expiration allows only one attempt'
             WHEN u.expiration = 'epoch' AND u.first_sent_at < now() - interval '30 seconds'
                 THEN 'its expiration allows only one attempt, and 30 seconds have passed since the first' || coalesce(': ' || left(u.last_error, 500), '')
             WHEN u.key IS NULL THEN tokenkeeper.token_fault(u.token)
             WHEN u.expiration > 'epoch' AND u.expiration <= now() AND (u.asked_for < u.expiration) IS NOT FALSE
                 THEN 'its expiration passed before it could be sent'
             WHEN u.payload_fault IS NOT NULL THEN u.payload_fault
             ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.body, u.kind, u.priority, u.expiration, u.collapse_id,
                                         u.asked_for, u.body_text) END,
        CASE WHEN u.is_forgotten THEN 'forgotten' END, NULL)::tokenkeeper.due_request
    FROM (
        -- OFFSET: each payload is parsed once.
        SELECT d.request_id, d.environment, d.topic, d.token, coalesce(d.priority, c.priority) AS priority,
               coalesce(d.expiration, c.expiration, tokenkeeper.default_expiration(k.kind, coalesce(
                   d.first_sent_at, CASE WHEN NOT d.deferred THEN d.scheduled_at END, d.queued_at))) AS expiration,
               coalesce(d.collapse_id, c.collapse_id) AS collapse_id,
               coalesce(d.scheduled_at, d.queued_at) AS due_at, d.interruptions, d.first_sent_at, d.last_error, d.campaign_id, d.alert_counted,
               tokenkeeper.token_key(d.token) AS key,
               k.kind, p.body,
               -- A stored size of 65,536 bytes is at most 16 MiB.
               CASE WHEN coalesce(octet_length(d.environment), 0)::bigint + coalesce(octet_length(d.topic), 0)
                         + coalesce(octet_length(d.token), 0) + coalesce(octet_length(d.push_type), 0)
                         + coalesce(octet_length(d.collapse_id), 0) + coalesce(pg_column_size(d.payload), 0) > 65536
                    THEN tokenkeeper.request_size_fault(d.environment, d.topic, d.token, d.push_type, d.collapse_id, d.payload) END AS size_fault,
               -- Only a small payload is carried along. One that is small as jsonb may be megabytes long as text.
               CASE WHEN octet_length(w.words) <= 8192 THEN w.words END AS body_text,
               CASE WHEN p.body IS NULL AND d.payload IS NOT NULL THEN tokenkeeper.payload_fault(d.payload) END AS payload_fault,
               -- If a daemon has deferred the request, scheduled_at is not the sender's.
               d.deferred, CASE WHEN NOT d.deferred THEN d.scheduled_at END AS asked_for,
               (SELECT EXISTS (SELECT FROM tokenkeeper.erasure)) AND tokenkeeper.is_forgotten(d.token, d.queued_at) AS is_forgotten
        FROM (
            SELECT r.* FROM tokenkeeper.send_request AS r
            WHERE left(coalesce(r.topic, ''), 513) = of_topic.topic AND left(coalesce(r.environment, 'production'), 20) = of_topic.environment
              AND coalesce(r.scheduled_at, r.queued_at) BETWEEN due_since AND now() AND r.claimed_by IS NULL
            ORDER BY coalesce(r.scheduled_at, r.queued_at)
            LIMIT at_most
            FOR UPDATE SKIP LOCKED) AS d
        -- What all requests of a campaign have in common. OFFSET: by the primary key, and only for those of a campaign.
        LEFT JOIN LATERAL (SELECT a.* FROM tokenkeeper.campaign AS a WHERE a.campaign_id = d.campaign_id OFFSET 0) AS c ON d.campaign_id IS NOT NULL
        CROSS JOIN LATERAL (SELECT tokenkeeper.parsed_payload(coalesce(d.payload, c.payload)) AS body OFFSET 0) AS p
        CROSS JOIN LATERAL (SELECT CASE WHEN pg_column_size(p.body) < 2000 THEN p.body::text END AS words OFFSET 0) AS w
        CROSS JOIN LATERAL (SELECT coalesce(d.push_type, c.push_type, tokenkeeper.push_type_of(p.body, of_topic.topic)) AS kind) AS k
        OFFSET 0) AS u
    -- LIMIT: prevents a join that would read the whole ledger.
    LEFT JOIN LATERAL (
        SELECT tokenkeeper.cause_of(k.stale_at, k.suspect_at, k.logged_out_at, k.superseded_at) AS state,
               tokenkeeper.reason_of(k) AS reason, greatest(k.stale_at, k.suspect_at, k.logged_out_at, k.superseded_at) AS invalidated_at
        FROM tokenkeeper.suppression AS s
        CROSS JOIN LATERAL (SELECT o.* FROM tokenkeeper.ledger AS o WHERE o.topic_id = s.topic_id AND o.token_key = s.token_key OFFSET 0) AS k
        WHERE s.topic_id = of_topic.topic_id AND s.token_key = u.key AND of_topic.gate IS DISTINCT FROM 'observe'
        LIMIT 1) AS l ON true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_due_requests(tokenkeeper.topic, timestamptz, integer) IS
    'Internal: locks free requests of a topic that are due since due_since, the oldest first, with the gate and the checks: a request that cannot be sent '
    'has a fault, one of a forgotten token its fate. of_topic needs no topic_id.';


CREATE OR REPLACE FUNCTION tokenkeeper.limit_requests(due tokenkeeper.due_request[], of_topic tokenkeeper.topic, per_hour integer)
RETURNS tokenkeeper.due_request[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN ARRAY(
        WITH ordered AS MATERIALIZED (
            -- Of the requests for each device, in their order. place: among those that have a limit.
            SELECT j.*, j.is_late OR row_number() OVER of_device > 5 AS crowded, count(*) FILTER (WHERE j.is_limited) OVER of_device AS place
            FROM (SELECT d.*, per_hour IS NOT NULL AND d.push_type = 'background' AND f.is_free AS is_limited,
                         of_topic.alerts_per_day > 0 AND d.push_type = 'alert' AND f.is_free
                             -- A campaign's request was counted with its batch.
                             AND NOT d.alert_counted AND d.campaign_id IS NULL AS is_alert
                  FROM unnest(due) AS d
                  CROSS JOIN LATERAL (SELECT d.fate IS NULL AND d.fault IS NULL AND d.state IS NULL AS is_free) AS f) AS j
            WINDOW of_device AS (PARTITION BY j.token_key ORDER BY j.request_id)
        ), rooms AS MATERIALIZED (
            -- Counts the background pushes before they are claimed. Arrays by device, because a join would be a nested loop.
            SELECT d.keys, d.requests, n.room, n.earliest
            FROM (SELECT array_agg(k.token_key ORDER BY k.token_key) AS keys, array_agg(k.requests ORDER BY k.token_key) AS requests,
                         array_agg(k.not_crowded ORDER BY k.token_key) AS not_crowded
                  FROM (SELECT o.token_key, count(*) AS requests, (count(*) FILTER (WHERE NOT o.crowded))::integer AS not_crowded
                        FROM ordered AS o WHERE o.is_limited GROUP BY 1) AS k) AS d
            CROSS JOIN LATERAL (
                SELECT array_agg(b.room ORDER BY b.token_key) AS room, array_agg(b.earliest ORDER BY b.token_key) AS earliest
                FROM tokenkeeper.note_background(of_topic.environment, of_topic.topic, d.keys, d.not_crowded, per_hour) AS b
                WHERE d.keys IS NOT NULL) AS n
        ), alerts AS MATERIALIZED (
            -- EXISTS: after the background pushes, in each claim, so that two claims never deadlock.
            SELECT array_agg(o.request_id ORDER BY o.request_id) AS request_ids, array_agg(o.token_key ORDER BY o.request_id) AS keys
            FROM ordered AS o WHERE o.is_alert AND NOT o.crowded AND EXISTS (SELECT FROM rooms)
        ), over_limit AS MATERIALIZED (
            SELECT array_agg(a.request_ids[n.position]) AS request_ids
            FROM alerts AS a CROSS JOIN LATERAL tokenkeeper.note_alerts(of_topic.topic_id, a.keys) AS n (position) WHERE a.keys IS NOT NULL
        )
        SELECT ROW(o.request_id, o.token_key, o.push_type, o.payload, o.due_at, o.campaign_id, o.is_late, o.alert_counted OR o.is_alert IS TRUE, o.is_too_long,
                   CASE WHEN o.state IS NULL AND o.is_over THEN 'alerts' WHEN o.state IS NULL AND o.is_overtaken THEN 'background' ELSE o.state END,
                   CASE WHEN o.state IS NULL AND o.is_over THEN 'its device has had alerts_per_day'
                        WHEN o.state IS NULL AND o.is_overtaken THEN 'a newer background push waits' ELSE o.reason END,
                   o.invalidated_at, o.fault,
                   CASE WHEN o.fate IS NOT NULL THEN o.fate
                        WHEN o.fault IS NOT NULL THEN 'failed'
                        WHEN o.state IS NOT NULL OR o.is_over OR o.is_overtaken THEN 'suppressed'
                        WHEN o.too_many THEN 'postponed'
                        -- A few requests per token are claimed at a time, so that one token with many does not keep the others out.
                        WHEN o.crowded THEN 'behind'
                        ELSE 'claimed' END, o.earliest_sent)::tokenkeeper.due_request
        FROM (
            -- A device's oldest background pushes are sent, up to its share. Of the excess, only the newest is kept, and it is delayed.
            SELECT s.*, s.is_alert AND s.request_id = ANY (a.request_ids) AS is_over,
                   s.place > r.room[d.number] AS too_many, s.place > r.room[d.number] AND s.place < r.requests[d.number] AS is_overtaken, r.earliest[d.number] AS earliest_sent
            FROM ordered AS s CROSS JOIN rooms AS r CROSS JOIN over_limit AS a
            CROSS JOIN LATERAL (SELECT CASE WHEN s.is_limited THEN width_bucket(s.token_key, r.keys) END AS number OFFSET 0) AS d) AS o);
END
$$;
COMMENT ON FUNCTION tokenkeeper.limit_requests(tokenkeeper.due_request[], tokenkeeper.topic, integer) IS
    'Internal: gives each of these requests of a topic its fate: failed, suppressed, postponed, behind or claimed. Counts background pushes against per_hour (null '
    'for no limit) and alerts against alerts_per_day. Of more than five requests for one token, the others go behind.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_requests(due tokenkeeper.due_request[], of_topic tokenkeeper.topic) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    overtaken_ids bigint[];
BEGIN
    WITH overtaken AS (
        -- OFFSET: device by device, through the index, however many are postponed.
        DELETE FROM tokenkeeper.send_request AS r
        WHERE r.request_id = ANY (ARRAY(
            SELECT o.request_id FROM unnest(due) AS d CROSS JOIN LATERAL (
                SELECT p.request_id FROM tokenkeeper.send_request AS p
                WHERE p.postponed AND tokenkeeper.token_key(p.token) = d.token_key AND p.topic = of_topic.topic
                  AND coalesce(p.environment, 'production') = of_topic.environment AND p.claimed_by IS NULL AND p.request_id < d.request_id
                -- Another claim may hold it, and wait for this one's devices.
                OFFSET 0 FOR UPDATE SKIP LOCKED) AS o
            WHERE d.fate = 'postponed' AND o.request_id NOT IN (SELECT n.request_id FROM unnest(due) AS n)))
        RETURNING r.*, ROW(NULL, tokenkeeper.token_key(r.token), 'background', NULL, NULL, NULL, NULL, NULL, NULL, 'background',
                           'a newer background push waits', NULL, NULL, 'suppressed', NULL)::tokenkeeper.due_request AS d
    ), gone AS (
        -- Columns, not a row: a row would be read whole, however long it is.
        DELETE FROM tokenkeeper.send_request AS r USING unnest(due) AS d
        WHERE d.fate IN ('suppressed', 'failed', 'forgotten') AND r.request_id = d.request_id
        RETURNING r.*, d
    ), ended AS (
        SELECT * FROM gone UNION ALL SELECT * FROM overtaken
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, request_id,
                                                 queued_at, campaign_id, campaign_number)
        SELECT of_topic.environment, of_topic.topic, encode((e.d).token_key, 'hex'), (e.d).token_key, (e.d).state, (e.d).reason, (e.d).invalidated_at,
               (e.d).push_type, e.apns_id, e.request_id, e.queued_at, e.campaign_id, e.campaign_number
        FROM ended AS e WHERE (e.d).fate = 'suppressed'
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts, campaign_id, campaign_number)
        SELECT (e.d).fault, e.environment, e.topic, e.token, e.payload, e.push_type, e.priority, e.expiration, e.collapse_id, e.apns_id,
               e.request_id, e.queued_at, e.attempts, e.campaign_id, e.campaign_number
        FROM ended AS e WHERE (e.d).fate = 'failed' AND NOT (e.d).is_too_long
        UNION ALL
        SELECT (e.d).fault, left(e.environment, 1024), left(e.topic, 1024), left(e.token, 1024), tokenkeeper.cut_payload(e.payload),
               left(e.push_type, 1024), e.priority, e.expiration, left(e.collapse_id, 1024), e.apns_id,
               e.request_id, e.queued_at, e.attempts, e.campaign_id, e.campaign_number
        FROM ended AS e WHERE (e.d).fate = 'failed' AND (e.d).is_too_long
    ), of_campaigns AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT e.campaign_id, e.campaign_number >> 9, count(*), (e.d).fate, array_agg((e.campaign_number & 511)::smallint)
        FROM ended AS e WHERE e.campaign_id IS NOT NULL GROUP BY 1, 2, 4
    )
    SELECT array_agg(o.request_id) INTO overtaken_ids FROM overtaken AS o;
    RETURN overtaken_ids;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_requests(tokenkeeper.due_request[], tokenkeeper.topic) IS
    'Internal: moves suppressed and failed requests to suppressed_send and failed_send, and deletes forgotten ones. Suppresses an older background push that '
    'waits for the same device as a postponed one; returns the request_ids of these, or null.';

CREATE OR REPLACE FUNCTION tokenkeeper.delay_requests(due tokenkeeper.due_request[], of_topic tokenkeeper.topic) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.send_request AS r
    SET postponed = true, deferred = true, scheduled_at = d.earliest + interval '1 hour'
    FROM unnest(due) AS d WHERE d.fate = 'postponed' AND r.request_id = d.request_id;
    WITH slots AS (
        -- Of many requests for one token, 50 per second are due, from a second on. So each is moved once, however many there are.
        INSERT INTO tokenkeeper.crowded_token AS c (environment, topic, token_key, next_at)
        SELECT of_topic.environment, of_topic.topic, d.token_key, now() + interval '1 second' + count(*) * interval '20 ms'
        FROM unnest(due) AS d WHERE d.fate = 'behind' GROUP BY d.token_key ORDER BY d.token_key
        ON CONFLICT ON CONSTRAINT crowded_token_pkey DO UPDATE
        SET next_at = excluded.next_at + greatest(c.next_at - (now() + interval '1 second'), interval '0')
        RETURNING c.token_key, c.next_at
    )
    UPDATE tokenkeeper.send_request AS r SET deferred = true, scheduled_at = n.scheduled_at
    FROM (SELECT d.request_id, s.next_at - row_number() OVER (PARTITION BY d.token_key ORDER BY d.request_id DESC) * interval '20 ms' AS scheduled_at
          FROM unnest(due) AS d JOIN slots AS s ON s.token_key = d.token_key WHERE d.fate = 'behind') AS n
    WHERE r.request_id = n.request_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.delay_requests(tokenkeeper.due_request[], tokenkeeper.topic) IS
    'Internal: defers requests whose fate is postponed (until their device may have another background push) or behind (others for the same token come '
    'first).';

CREATE OR REPLACE FUNCTION tokenkeeper.claim_requests(
    environment text, topic text, daemon_id text, max_rows integer, background_per_hour integer, due_since timestamptz)
RETURNS TABLE (outcome text, request_id bigint, due_at timestamptz, token_key bytea, payload text, push_type text, priority integer,
               expiration bigint, collapse_id text, apns_id text, attempts integer, first_sent_at timestamptz, refusals integer,
               others_accepted boolean, send_in bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Each request is looked up separately, whatever the size of the tables was when this session planned the query.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    -- Collated here, so that the caller's collation does not matter.
    the_topic text COLLATE "C" := claim_requests.topic;
    the_environment text COLLATE "C" := claim_requests.environment;
    the_daemon text COLLATE "C" := claim_requests.daemon_id;
    of_topic tokenkeeper.topic;
    room integer := claim_requests.max_rows;
    -- If the topic has a rate: the first free slot.
    first_at timestamptz;
    due tokenkeeper.due_request[];
    overtaken bigint[];
BEGIN
    IF EXISTS (SELECT FROM tokenkeeper.paused_topic AS h WHERE h.topic = the_topic AND h.environment = the_environment) THEN
        RETURN;
    END IF;
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t WHERE t.topic = the_topic AND t.environment = the_environment;
    -- The ledger may not know the topic.
    of_topic.topic := the_topic;
    of_topic.environment := the_environment;
    IF of_topic.max_per_second IS NOT NULL THEN
        SELECT s.first_at, least(room, s.requests) INTO first_at, room FROM tokenkeeper.topic_slots(of_topic.topic_id) AS s;
        IF room < 1 THEN
            RETURN;
        END IF;
    END IF;
    due := tokenkeeper.lock_due_requests(of_topic, claim_requests.due_since, room);
    due := tokenkeeper.limit_requests(due, of_topic, nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0));
    IF EXISTS (SELECT FROM unnest(due) AS d WHERE d.fate <> 'claimed') THEN
        overtaken := tokenkeeper.end_requests(due, of_topic);
        PERFORM tokenkeeper.delay_requests(due, of_topic);
    END IF;
    RETURN QUERY
    WITH claimed AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = the_daemon, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid()), alert_counted = d.alert_counted,
            expiration = coalesce(r.expiration, CASE WHEN c.expiration IS NULL THEN tokenkeeper.default_expiration(d.push_type, coalesce(r.first_sent_at, now())) END)
        FROM unnest(due) AS d
        LEFT JOIN LATERAL (SELECT a.* FROM tokenkeeper.campaign AS a WHERE a.campaign_id = d.campaign_id OFFSET 0) AS c ON d.campaign_id IS NOT NULL
        WHERE d.fate = 'claimed' AND r.request_id = d.request_id
        RETURNING r.request_id, d.due_at, d.token_key, coalesce(d.payload, coalesce(r.payload, c.payload)::jsonb::text) AS payload,
                  d.push_type, CASE d.push_type WHEN 'background' THEN 5 ELSE coalesce(r.priority, c.priority) END AS priority,
                  floor(extract(epoch FROM coalesce(r.expiration, c.expiration)))::bigint AS expiration,
                  coalesce(r.collapse_id, c.collapse_id) AS collapse_id, r.apns_id::text AS apns_id, r.attempts, r.first_sent_at,
                  r.refusals::integer AS refusals,
                  -- Any daemon: this one may have started since.
                  r.refusals > 0 AND EXISTS (
                      SELECT FROM tokenkeeper.result_count AS n
                      WHERE n.topic = the_topic AND n.environment = the_environment AND n.status = 200
                        AND n.hour >= greatest(date_trunc('hour', now() - interval '10 minutes'), r.first_sent_at)) AS others_accepted
    ), paced AS (
        -- As take_topic_slots. Only what is sent takes slots.
        UPDATE tokenkeeper.topic_rate AS r
        SET next_send_at = first_at + (SELECT count(*) FROM claimed) * interval '1 second' / of_topic.max_per_second
        WHERE r.topic_id = of_topic.topic_id AND first_at IS NOT NULL AND EXISTS (SELECT FROM claimed)
    )
    SELECT 'claimed', c.*,
           -- The oldest first. Not a window, which would sort all rows also without a rate.
           CASE WHEN first_at IS NOT NULL THEN
               (extract(epoch FROM first_at - clock_timestamp()) * 1000000
                + (width_bucket(c.request_id, (SELECT array_agg(o.request_id ORDER BY o.request_id) FROM claimed AS o)) - 1)
                  * 1000000::bigint / of_topic.max_per_second)::bigint END
    FROM claimed AS c
    UNION ALL
    SELECT CASE WHEN d.fate IN ('postponed', 'behind') THEN 'delayed' ELSE d.fate END, d.request_id, d.due_at,
           NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM unnest(due) AS d WHERE d.fate NOT IN ('claimed', 'forgotten')
    UNION ALL
    SELECT 'overtaken', o, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM unnest(overtaken) AS o;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) IS
    'Claims requests of a topic that are due since due_since, the oldest first, with the gate. Returns one row per request: claimed, with what is to be sent '
    '(with a rate: those of the next second, in send_in microseconds); suppressed (moved to suppressed_send, by the gate or alerts_per_day); failed (moved '
    'to failed_send); delayed (too many for one token, or beyond its device''s share of background pushes); or overtaken (a postponed background push moved '
    'to suppressed_send, because a newer one waits). Only claimed rows have values beyond due_at; overtaken rows have no due_at.';

CREATE OR REPLACE FUNCTION tokenkeeper.claim_topics(
    environments text[], topics text[], daemon_id text, max_rows integer[], background_per_hour integer, due_since timestamptz[])
RETURNS TABLE (environment text, topic text, outcome text, request_id bigint, due_at timestamptz, token_key bytea, payload text, push_type text,
               priority integer, expiration bigint, collapse_id text, apns_id text, attempts integer, first_sent_at timestamptz, refusals integer,
               others_accepted boolean, send_in bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    scope record;
BEGIN
    -- In one order, so that two daemons that wait for each other's counts never deadlock.
    FOR scope IN
        SELECT s.environment, s.topic, s.max_rows, s.due_since
        FROM unnest(claim_topics.environments, claim_topics.topics, claim_topics.max_rows, claim_topics.due_since)
            AS s (environment, topic, max_rows, due_since)
        ORDER BY s.topic COLLATE "C", s.environment COLLATE "C"
    LOOP
        RETURN QUERY
            SELECT scope.environment, scope.topic, c.*
            FROM tokenkeeper.claim_requests(scope.environment, scope.topic, claim_topics.daemon_id, scope.max_rows,
                                            claim_topics.background_per_hour, scope.due_since) AS c;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_topics(text[], text[], text, integer[], integer, timestamptz[]) IS
    'claim_requests for many topics, each with its own max_rows and due_since, in one transaction.';
