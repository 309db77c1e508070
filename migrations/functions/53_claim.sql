-- How a daemon claims single requests.

CREATE OR REPLACE FUNCTION tokenkeeper.claim_requests(
    environment text, topic text, daemon_id text, max_rows integer, background_per_hour integer, due_since timestamptz)
RETURNS TABLE (outcome text, request_id bigint, due_at timestamptz, token_key bytea, payload text, push_type text, priority integer,
               expiration bigint, collapse_id text, apns_id text, attempts integer, first_sent_at timestamptz, send_in bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Each request is looked up separately, whatever the size of the tables was when this session planned the query.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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
    a_background integer;
    room integer := claim_requests.max_rows;
    -- If the topic has a rate: itself, and the first free slot.
    rated_topic integer;
    first_at timestamptz;
BEGIN
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = the_topic AND t.environment = the_environment;
    IF EXISTS (SELECT FROM tokenkeeper.paused_topic AS h WHERE h.topic = the_topic AND h.environment = the_environment) THEN
        RETURN;
    END IF;
    IF of_topic.max_per_second IS NOT NULL THEN
        rated_topic := of_topic.topic_id;
        SELECT s.first_at, least(room, s.requests) INTO first_at, room FROM tokenkeeper.topic_slots(rated_topic) AS s;
        IF room < 1 THEN
            RETURN;
        END IF;
        IF first_at IS NULL THEN
            -- The rate has just been removed.
            rated_topic := NULL;
        END IF;
    END IF;
    a_background := nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0);
    RETURN QUERY
    WITH judged AS MATERIALIZED (
        -- What follows copies each row several times: so it carries no column that the request or its campaign gives later.
        SELECT u.request_id, u.key, u.kind, u.body_text, u.due_at, u.campaign, u.size_fault IS NOT NULL AS is_too_long, u.is_forgotten,
               -- Others wait for this token, and this request came later.
               NOT u.deferred AND (SELECT EXISTS (
                   SELECT FROM tokenkeeper.crowded_token AS c WHERE c.topic = the_topic AND c.environment = the_environment))
                   AND (SELECT c.next_at > now() FROM tokenkeeper.crowded_token AS c
                        WHERE c.topic = the_topic AND c.environment = the_environment AND c.token_key = u.key) IS TRUE AS is_late,
               -- A campaign's request was counted with its batch.
               u.alert_counted OR u.campaign_id IS NOT NULL AS is_counted,
               l.state, l.reason, l.invalidated_at, CASE
                   WHEN u.is_forgotten THEN 'forgotten'
                   WHEN u.size_fault IS NOT NULL THEN u.size_fault
                   WHEN u.interruptions >= 2 THEN 'it was interrupted twice while it was being sent; it may have been delivered'
                   WHEN u.interruptions >= 1 AND u.expiration = 'epoch'
                       THEN 'it was interrupted while it was being sent, and its expiration allows only one attempt'
                   WHEN u.key IS NULL THEN 'device token is ' || coalesce(length(u.token) || ' characters', 'missing')
                                           || ', expected 1 to 512 bytes in hex'
                   WHEN u.expiration > 'epoch' AND u.expiration <= now() AND (u.asked_for < u.expiration) IS NOT FALSE
                       THEN 'its expiration passed before it could be sent'
                   WHEN u.payload_fault IS NOT NULL THEN u.payload_fault
                   ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.body, u.kind, u.priority, u.expiration,
                                               u.collapse_id, u.asked_for, u.body_text)
               END AS fault
        FROM (
            -- OFFSET: each payload is parsed once. From here on only the text of a small payload is carried along.
            SELECT d.request_id, d.environment, d.topic, d.token, coalesce(d.priority, c.priority) AS priority,
                   coalesce(d.expiration, c.expiration) AS expiration, coalesce(d.collapse_id, c.collapse_id) AS collapse_id,
                   coalesce(d.scheduled_at, d.queued_at) AS due_at, d.interruptions, c.campaign, d.campaign_id, d.alert_counted,
                   tokenkeeper.token_key(d.token) AS key, coalesce(d.push_type, c.push_type, tokenkeeper.push_type_of(p.body, the_topic)) AS kind, p.body,
                   -- A stored size of 65,536 bytes is at most 16 MiB.
                   CASE WHEN coalesce(octet_length(d.environment), 0)::bigint + coalesce(octet_length(d.topic), 0)
                             + coalesce(octet_length(d.token), 0) + coalesce(octet_length(d.push_type), 0)
                             + coalesce(octet_length(d.collapse_id), 0) + coalesce(pg_column_size(d.payload), 0) > 65536
                        THEN tokenkeeper.request_size_fault(d.environment, d.topic, d.token, d.push_type, d.collapse_id, d.payload) END AS size_fault,
                   CASE WHEN pg_column_size(p.body) < 2000 THEN p.body::text END AS body_text,
                   CASE WHEN p.body IS NULL AND d.payload IS NOT NULL THEN tokenkeeper.payload_fault(d.payload) END AS payload_fault,
                   -- If a daemon has deferred the request, scheduled_at is not the sender's.
                   d.deferred, CASE WHEN NOT d.deferred THEN d.scheduled_at END AS asked_for,
                   (SELECT EXISTS (SELECT FROM tokenkeeper.erasure)) AND tokenkeeper.is_forgotten(d.token, d.queued_at) AS is_forgotten
            FROM (
                SELECT r.* FROM tokenkeeper.send_request AS r
                WHERE left(coalesce(r.topic, ''), 513) = the_topic AND left(coalesce(r.environment, 'production'), 20) = the_environment
                  AND coalesce(r.scheduled_at, r.queued_at) BETWEEN claim_requests.due_since AND now() AND r.claimed_by IS NULL
                ORDER BY coalesce(r.scheduled_at, r.queued_at)
                LIMIT room
                FOR UPDATE SKIP LOCKED) AS d
            -- What all requests of a campaign have in common. OFFSET: by the primary key, and only for those of a campaign.
            LEFT JOIN LATERAL (
                SELECT a AS campaign, a.* FROM tokenkeeper.campaign AS a WHERE a.campaign_id = d.campaign_id OFFSET 0) AS c ON d.campaign_id IS NOT NULL
            CROSS JOIN LATERAL (SELECT tokenkeeper.parsed_payload(coalesce(d.payload, c.payload)) AS body OFFSET 0) AS p
            OFFSET 0) AS u
        -- LIMIT: prevents a join that would read the whole ledger.
        LEFT JOIN LATERAL (
            SELECT tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS state, greatest(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS invalidated_at,
                   tokenkeeper.reason_of(l) AS reason
            FROM tokenkeeper.suppression AS s
            CROSS JOIN LATERAL (SELECT k.* FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key OFFSET 0) AS l
            WHERE s.topic_id = of_topic.topic_id AND s.token_key = u.key AND of_topic.gate IS DISTINCT FROM 'observe'
            LIMIT 1) AS l ON true
    ), ordered AS MATERIALIZED (
        -- Of the requests for each device, in their order. place: among those that have a limit.
        SELECT j.*, j.is_late OR row_number() OVER of_device > 5 AS crowded, count(*) FILTER (WHERE j.is_limited) OVER of_device AS place
        FROM (SELECT a.*, a_background IS NOT NULL AND a.kind = 'background' AND a.fault IS NULL AND a.state IS NULL AS is_limited,
                     of_topic.alerts_per_day > 0 AND a.kind = 'alert' AND a.fault IS NULL AND a.state IS NULL AND NOT a.is_counted AS is_alert
              FROM judged AS a) AS j
        WINDOW of_device AS (PARTITION BY j.key ORDER BY j.request_id)
    ), rooms AS MATERIALIZED (
        -- Counts the background pushes before they are claimed. Arrays by device, because a join would be a nested loop.
        SELECT d.keys, d.requests, n.room, n.earliest
        FROM (SELECT array_agg(k.key ORDER BY k.key) AS keys, array_agg(k.requests ORDER BY k.key) AS requests,
                     array_agg(k.not_crowded ORDER BY k.key) AS not_crowded
              FROM (SELECT o.key, count(*) AS requests, (count(*) FILTER (WHERE NOT o.crowded))::integer AS not_crowded
                    FROM ordered AS o WHERE o.is_limited GROUP BY o.key) AS k) AS d
        CROSS JOIN LATERAL (
            SELECT array_agg(b.room ORDER BY b.token_key) AS room, array_agg(b.earliest ORDER BY b.token_key) AS earliest
            FROM tokenkeeper.note_background(the_environment, the_topic, d.keys, d.not_crowded, a_background) AS b WHERE d.keys IS NOT NULL) AS n
    ), alerts AS MATERIALIZED (
        -- EXISTS: after the background pushes, in each claim, so that two claims never deadlock.
        SELECT array_agg(o.request_id ORDER BY o.request_id) AS request_ids, array_agg(o.key ORDER BY o.request_id) AS keys
        FROM ordered AS o WHERE o.is_alert AND NOT o.crowded AND EXISTS (SELECT FROM rooms)
    ), over_limit AS MATERIALIZED (
        SELECT array_agg(a.request_ids[n.position]) AS request_ids
        FROM alerts AS a CROSS JOIN LATERAL tokenkeeper.note_alerts(of_topic.topic_id, a.keys) AS n (position) WHERE a.keys IS NOT NULL
    ), fated AS MATERIALIZED (
        SELECT o.*, CASE WHEN o.is_forgotten THEN 'forgotten'
                         WHEN o.fault IS NOT NULL THEN 'failed'
                         WHEN o.state IS NOT NULL OR o.is_over OR (o.too_many AND NOT o.newest) THEN 'suppressed'
                         WHEN o.too_many THEN 'postponed'
                         -- A few requests per token are claimed at a time, so that one token with many does not keep the others out.
                         WHEN o.crowded THEN 'behind'
                         ELSE 'claimed' END AS fate
        FROM (
            -- A device's oldest background pushes are sent, up to its share. Of the excess, only the newest is kept, and it is delayed.
            SELECT s.request_id, s.key, s.kind, s.body_text, s.due_at, s.campaign, s.state, s.reason, s.invalidated_at, s.fault, s.is_too_long, s.is_forgotten, s.crowded, s.is_alert,
                   s.is_alert AND s.request_id = ANY (a.request_ids) AS is_over,
                   s.place > r.room[d.number] AS too_many, s.place = r.requests[d.number] AS newest, r.earliest[d.number] AS earliest
            FROM ordered AS s CROSS JOIN rooms AS r CROSS JOIN over_limit AS a
            CROSS JOIN LATERAL (SELECT CASE WHEN s.is_limited THEN width_bucket(s.key, r.keys) END AS number OFFSET 0) AS d) AS o
    ), overtaken AS (
        -- OFFSET: device by device, through the index, however many are postponed.
        DELETE FROM tokenkeeper.send_request AS r
        WHERE r.request_id = ANY (ARRAY(
            SELECT o.request_id FROM fated AS f CROSS JOIN LATERAL (
                SELECT p.request_id FROM tokenkeeper.send_request AS p
                WHERE p.postponed AND tokenkeeper.token_key(p.token) = f.key AND p.topic = the_topic
                  AND coalesce(p.environment, 'production') = the_environment AND p.claimed_by IS NULL AND p.request_id < f.request_id
                -- Another claim may hold it, and wait for this one's devices.
                OFFSET 0 FOR UPDATE SKIP LOCKED) AS o
            WHERE f.fate = 'postponed' AND o.request_id NOT IN (SELECT d.request_id FROM fated AS d)))
        RETURNING r.*, tokenkeeper.token_key(r.token) AS key
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING fated AS f WHERE f.fate IN ('suppressed', 'failed', 'forgotten') AND r.request_id = f.request_id
        RETURNING r.*, f.key, f.kind, f.state, f.reason, f.invalidated_at, f.is_over, f.fault, f.fate, f.is_too_long
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, request_id,
                                                 queued_at, campaign_id, campaign_number)
        SELECT the_environment, the_topic, encode(g.key, 'hex'), g.key, coalesce(g.state, CASE WHEN g.is_over THEN 'alerts' ELSE 'background' END),
               CASE WHEN g.state IS NOT NULL THEN g.reason WHEN g.is_over THEN 'its device has had alerts_per_day'
                    ELSE 'a newer background push waits' END, g.invalidated_at, g.kind, g.apns_id, g.request_id,
               g.queued_at, g.campaign_id, g.campaign_number
        FROM gone AS g WHERE g.fate = 'suppressed'
        UNION ALL
        SELECT the_environment, the_topic, encode(o.key, 'hex'), o.key, 'background', 'a newer background push waits', NULL,
               'background', o.apns_id, o.request_id, o.queued_at, o.campaign_id, o.campaign_number
        FROM overtaken AS o
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts, campaign_id, campaign_number)
        SELECT g.fault, g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration, g.collapse_id, g.apns_id,
               g.request_id, g.queued_at, g.attempts, g.campaign_id, g.campaign_number
        FROM gone AS g WHERE g.fate = 'failed' AND NOT g.is_too_long
        UNION ALL
        SELECT g.fault, left(g.environment, 1024), left(g.topic, 1024), left(g.token, 1024), tokenkeeper.cut_payload(g.payload), left(g.push_type, 1024),
               g.priority, g.expiration, left(g.collapse_id, 1024), g.apns_id, g.request_id, g.queued_at, g.attempts, g.campaign_id, g.campaign_number
        FROM gone AS g WHERE g.fate = 'failed' AND g.is_too_long
    ), ended AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT e.campaign_id, e.campaign_number >> 9, count(*), e.outcome, array_agg((e.campaign_number & 511)::smallint)
        FROM (SELECT g.campaign_id, g.campaign_number, g.fate AS outcome FROM gone AS g
              UNION ALL
              SELECT o.campaign_id, o.campaign_number, 'suppressed' FROM overtaken AS o) AS e
        WHERE e.campaign_id IS NOT NULL GROUP BY 1, 2, 4
    ), postponed AS (
        UPDATE tokenkeeper.send_request AS r
        SET postponed = true, deferred = true, scheduled_at = f.earliest + interval '1 hour'
        FROM fated AS f WHERE f.fate = 'postponed' AND r.request_id = f.request_id
    ), slots AS (
        -- Of many requests for one token, 50 per second are due, from a second on. So each is moved once, however many there are.
        INSERT INTO tokenkeeper.crowded_token AS c (environment, topic, token_key, next_at)
        SELECT the_environment, the_topic, f.key, now() + interval '1 second' + count(*) * interval '20 ms'
        FROM fated AS f WHERE f.fate = 'behind' GROUP BY f.key ORDER BY f.key
        ON CONFLICT ON CONSTRAINT crowded_token_pkey DO UPDATE
        SET next_at = excluded.next_at + greatest(c.next_at - (now() + interval '1 second'), interval '0')
        RETURNING c.token_key, c.next_at
    ), behind AS (
        UPDATE tokenkeeper.send_request AS r SET deferred = true, scheduled_at = n.scheduled_at
        FROM (SELECT f.request_id, s.next_at - row_number() OVER (PARTITION BY f.key ORDER BY f.request_id DESC) * interval '20 ms' AS scheduled_at
              FROM fated AS f JOIN slots AS s ON s.token_key = f.key WHERE f.fate = 'behind') AS n
        WHERE r.request_id = n.request_id
    ), claimed AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = the_daemon, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid()), alert_counted = r.alert_counted OR f.is_alert IS TRUE
        FROM fated AS f WHERE f.fate = 'claimed' AND r.request_id = f.request_id
        RETURNING r.request_id, f.due_at, f.key,
                  coalesce(f.body_text, coalesce(r.payload, (f.campaign).payload)::jsonb::text) AS payload,
                  f.kind, CASE f.kind WHEN 'background' THEN 5 ELSE coalesce(r.priority, (f.campaign).priority) END AS priority,
                  floor(extract(epoch FROM coalesce(r.expiration, (f.campaign).expiration)))::bigint AS expiration,
                  coalesce(r.collapse_id, (f.campaign).collapse_id) AS collapse_id, r.apns_id::text AS apns_id, r.attempts, r.first_sent_at
    ), paced AS (
        -- As take_topic_slots. Only what is sent takes slots.
        UPDATE tokenkeeper.topic_rate AS r
        SET next_send_at = first_at + (SELECT count(*) FROM claimed) * interval '1 second' / of_topic.max_per_second
        WHERE r.topic_id = rated_topic AND EXISTS (SELECT FROM claimed)
    )
    SELECT 'claimed', c.*,
           -- The oldest first. Not a window, which would sort all rows also without a rate.
           CASE WHEN rated_topic IS NOT NULL THEN
               (extract(epoch FROM first_at - clock_timestamp()) * 1000000
                + (width_bucket(c.request_id, (SELECT array_agg(o.request_id ORDER BY o.request_id) FROM claimed AS o)) - 1)
                  * 1000000::bigint / of_topic.max_per_second)::bigint END
    FROM claimed AS c
    UNION ALL
    SELECT CASE WHEN f.fate IN ('postponed', 'behind') THEN 'delayed' ELSE f.fate END, f.request_id, f.due_at,
           NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    FROM fated AS f WHERE f.fate NOT IN ('claimed', 'forgotten')
    UNION ALL
    SELECT 'overtaken', o.request_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM overtaken AS o;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) IS
    'Claims requests of a topic that are due since due_since, the oldest first, and asks the gate in the same statement. Returns one row per request: '
    'claimed, with what is to be sent; suppressed (moved to suppressed_send, because the gate refuses the token, or its device has had alerts_per_day); '
    'failed (moved to failed_send, because it cannot be sent); delayed (too many for one token, or beyond its device''s share of background pushes); or '
    'overtaken: a postponed background push that was not due, moved to suppressed_send because a newer one waits. With max_per_second of the topic, '
    'claims what may be sent within the next second, each request in send_in microseconds. Only claimed rows have values beyond due_at, and overtaken '
    'rows have no due_at.';

CREATE OR REPLACE FUNCTION tokenkeeper.claim_topics(
    environments text[], topics text[], daemon_id text, max_rows integer[], background_per_hour integer, due_since timestamptz[])
RETURNS TABLE (environment text, topic text, outcome text, request_id bigint, due_at timestamptz, token_key bytea, payload text, push_type text,
               priority integer, expiration bigint, collapse_id text, apns_id text, attempts integer, first_sent_at timestamptz, send_in bigint)
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
    'claim_requests for many topics, each with its own max_rows and due_since, in one transaction: with thousands of topics, a transaction for each would '
    'cost more than the requests.';
