-- How a daemon finds campaigns, claims their batches, ends them, and deletes them in the end. The claim of single requests has what is tried again.
--
-- Locks, in this order: the campaign's row if it has a rate, topic_rate, and batches, each if it is free; then the counts of devices in key order. The claim waits
-- for the counts.

CREATE OR REPLACE FUNCTION tokenkeeper.end_in_batches(campaign_ids bigint[], batches integer[], ordinals integer[], outcomes text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
BEGIN
    WITH told AS MATERIALIZED (
        SELECT t.campaign_id, t.batch, t.ordinal, t.outcome COLLATE "C" AS outcome
        FROM unnest(end_in_batches.campaign_ids, end_in_batches.batches, end_in_batches.ordinals, end_in_batches.outcomes)
            AS t (campaign_id, batch, ordinal, outcome)
    ), endings AS (
        INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
        SELECT t.campaign_id, t.batch, count(*), t.outcome, array_agg(t.ordinal::smallint) FROM told AS t
        WHERE t.outcome <> 'returned' GROUP BY 1, 2, 4
    ), bits AS MATERIALIZED (
        SELECT b.campaign_id, b.batch, b.requests, b.ended | s.ended AS ended, b.returned | s.returned AS returned
        FROM (SELECT t.campaign_id, t.batch,
                     coalesce(bit_or(set_bit(B'0'::bit(512), t.ordinal, 1)) FILTER (WHERE t.outcome <> 'returned'), B'0'::bit(512)) AS ended,
                     coalesce(bit_or(set_bit(B'0'::bit(512), t.ordinal, 1)) FILTER (WHERE t.outcome = 'returned'), B'0'::bit(512)) AS returned
              FROM told AS t GROUP BY 1, 2) AS s
        CROSS JOIN LATERAL (
            SELECT a.* FROM tokenkeeper.campaign_batch AS a WHERE a.campaign_id = s.campaign_id AND a.batch = s.batch OFFSET 0) AS b
    ), gone AS (
        DELETE FROM tokenkeeper.campaign_batch AS b USING bits AS s
        WHERE b.campaign_id = s.campaign_id AND b.batch = s.batch AND bit_count(s.ended) = s.requests
    )
    UPDATE tokenkeeper.campaign_batch AS b
    SET ended = s.ended,
        -- The rest can be claimed again once the daemon has none of it any more.
        returned = CASE WHEN bit_count(s.ended | s.returned) = s.requests THEN B'0'::bit(512) ELSE s.returned END,
        claimed_by = CASE WHEN bit_count(s.ended | s.returned) = s.requests THEN NULL ELSE b.claimed_by END
    FROM bits AS s
    WHERE b.campaign_id = s.campaign_id AND b.batch = s.batch AND bit_count(s.ended) < s.requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_in_batches(bigint[], integer[], integer[], text[]) IS
    'Internal: records outcomes of requests in batches, which the caller has locked and in which they have not ended. The outcome returned gives a request '
    'back to its batch.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_by_chance() RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN floor(random() * ((SELECT max(c.campaign_id) FROM tokenkeeper.campaign AS c) + 1));
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaign_by_chance() IS
    'Internal: a random campaign_id up to the greatest, perhaps of a campaign that no longer exists; null if there is none. Who reads some of many begins a '
    'second time after it, so that each has its turn.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaigns_due()
RETURNS TABLE (campaign_id bigint, environment text, topic text, has_batches boolean, needs_addressing boolean, due_at timestamptz)
LANGUAGE plpgsql ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    -- Of the campaigns that are to be addressed, and of those with batches to claim: so many from each start on, among so many more that cannot go on.
    most constant integer := 100;
    most_read constant integer := 500;
    by_chance bigint := tokenkeeper.campaign_by_chance();
BEGIN
    RETURN QUERY
        WITH RECURSIVE waiting (campaign_id, read, claimable, paced, due_at) AS (
            -- One look into the index for each campaign, however many batches it has. Those that wait for their rate do not count among the others.
            SELECT s.start, 0, 0, 0, NULL::timestamptz FROM (VALUES (0::bigint), (by_chance)) AS s (start)
            UNION ALL
            SELECT n.campaign_id, w.read + 1, w.claimable + coalesce(n.due_at <= now(), false)::integer,
                   w.paced + coalesce(n.due_at > now(), false)::integer, n.due_at
            FROM waiting AS w CROSS JOIN LATERAL (
                SELECT b.campaign_id FROM tokenkeeper.campaign_batch AS b
                WHERE b.claimed_by IS NULL AND b.campaign_id > w.campaign_id ORDER BY b.campaign_id, b.batch LIMIT 1) AS b
            CROSS JOIN LATERAL (
                SELECT b.campaign_id, (
                    -- As free_slots: half a second before the next slot of the rates.
                    SELECT greatest(c.next_send_at, (
                               SELECT r.next_send_at FROM tokenkeeper.topic AS t JOIN tokenkeeper.topic_rate AS r ON r.topic_id = t.topic_id
                               WHERE t.topic = c.topic AND t.environment = c.environment AND t.max_per_second IS NOT NULL))
                           - tokenkeeper.slots_ahead()
                    FROM tokenkeeper.campaign AS c
                    WHERE c.campaign_id = b.campaign_id AND c.state = 'running' AND NOT tokenkeeper.has_expired(c.expiration)
                      AND (c.topic, c.environment) NOT IN (SELECT p.topic, p.environment FROM tokenkeeper.paused_topic AS p)) AS due_at OFFSET 0) AS n
            WHERE w.read < most_read AND w.claimable < most
        ), found AS MATERIALIZED (
            SELECT w.campaign_id FROM waiting AS w WHERE w.due_at <= now() OR (w.due_at > now() AND w.paced <= most)
            UNION
            (SELECT c.campaign_id FROM (
                 SELECT a.* FROM tokenkeeper.campaign AS a
                 WHERE a.state IN ('waiting', 'running') AND NOT a.is_addressed AND coalesce(a.scheduled_at, a.created_at) <= now()
                 ORDER BY coalesce(a.scheduled_at, a.created_at) LIMIT most_read) AS c
             WHERE NOT tokenkeeper.has_expired(c.expiration)
               AND (c.topic, c.environment) NOT IN (SELECT p.topic, p.environment FROM tokenkeeper.paused_topic AS p) LIMIT most)
            UNION
            -- The newest, so that it begins at once however many others there are.
            (SELECT c.campaign_id FROM (
                 SELECT a.* FROM tokenkeeper.campaign AS a
                 WHERE a.state IN ('waiting', 'running') AND NOT a.is_addressed AND coalesce(a.scheduled_at, a.created_at) <= now()
                 ORDER BY coalesce(a.scheduled_at, a.created_at) DESC LIMIT most_read) AS c
             WHERE NOT tokenkeeper.has_expired(c.expiration)
               AND (c.topic, c.environment) NOT IN (SELECT p.topic, p.environment FROM tokenkeeper.paused_topic AS p) LIMIT 10)
            UNION
            (SELECT c.campaign_id FROM (
                 SELECT a.* FROM tokenkeeper.campaign AS a
                 WHERE a.state IN ('waiting', 'running') AND NOT a.is_addressed AND a.campaign_id > by_chance
                 ORDER BY a.campaign_id LIMIT most_read) AS c
             WHERE coalesce(c.scheduled_at, c.created_at) <= now() AND NOT tokenkeeper.has_expired(c.expiration)
               AND (c.topic, c.environment) NOT IN (SELECT p.topic, p.environment FROM tokenkeeper.paused_topic AS p) LIMIT most)
        )
        SELECT c.campaign_id, c.environment, c.topic, h.has_batches, NOT c.is_addressed,
               -- As free_slots.
               greatest(coalesce(c.scheduled_at, c.created_at), greatest(c.next_send_at, (
                   SELECT r.next_send_at FROM tokenkeeper.topic AS t JOIN tokenkeeper.topic_rate AS r ON r.topic_id = t.topic_id
                   WHERE t.topic = c.topic AND t.environment = c.environment AND t.max_per_second IS NOT NULL)) - tokenkeeper.slots_ahead())
        FROM found AS f
        -- OFFSET: each by the primary key.
        CROSS JOIN LATERAL (SELECT a.* FROM tokenkeeper.campaign AS a WHERE a.campaign_id = f.campaign_id OFFSET 0) AS c
        CROSS JOIN LATERAL (
            SELECT EXISTS (
                SELECT FROM tokenkeeper.campaign_batch AS b
                WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.claimed_by IS NULL) AS has_batches) AS h
        WHERE h.has_batches OR NOT c.is_addressed
        ORDER BY coalesce(c.scheduled_at, c.created_at), c.campaign_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaigns_due() IS
    'Campaigns in which something can be done now, oldest first: whether batches wait to be claimed, whether the audience is not addressed yet, and when '
    'max_per_second allows the next claim. Up to 100 of each kind; of more, the first, the newest, and random ones. Up to 500 that cannot go on (topic '
    'paused, or waiting for a rate) do not count.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_campaign(of_campaign bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    missing bigint;
BEGIN
    PERFORM FROM tokenkeeper.campaign AS c WHERE c.campaign_id = of_campaign AND c.ended_at IS NULL FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- Another daemon may have added batches before this one locked the row.
    UPDATE tokenkeeper.campaign AS c
    SET state = CASE c.state WHEN 'cancelled' THEN c.state ELSE 'ended' END, ended_at = clock_timestamp()
    WHERE c.campaign_id = of_campaign
      AND NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b WHERE b.campaign_id = of_campaign AND b.batch >= c.first_open_batch)
    RETURNING c.addressed - coalesce((SELECT sum(e.requests) FROM tokenkeeper.campaign_ending AS e
                                      WHERE e.campaign_id = of_campaign AND e.outcome <> 'requeued'), 0) INTO missing;
    -- Somebody has deleted single requests of the campaign from send_request.
    INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
    SELECT of_campaign, 0, missing, 'cancelled', '{}' WHERE missing > 0;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_campaign(bigint) IS
    'Internal: records the end of a campaign of which no batch and no request waits. Does nothing while another session has its row.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_campaigns() RETURNS TABLE (environment text, topic text, expired bigint)
LANGUAGE plpgsql ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    stopped record;
    finished bigint;
    most constant integer := 1000;
    -- Each may have many batches to end.
    most_stopped constant integer := 100;
    by_chance bigint := tokenkeeper.campaign_by_chance();
    -- The same for those that have expired.
    expired_by_chance timestamptz := (
        SELECT now() - random() * (now() - c.expiration) FROM tokenkeeper.campaign AS c
        WHERE c.ended_at IS NULL AND c.expiration > 'epoch' AND c.expiration <= now() ORDER BY c.expiration LIMIT 1);
BEGIN
    FOR stopped IN
        SELECT DISTINCT o.campaign_id, o.state
        FROM (VALUES (0::bigint, 'epoch'::timestamptz), (by_chance, expired_by_chance)) AS s (start, start_at)
        CROSS JOIN LATERAL (
            (SELECT c.campaign_id, c.state, c.first_open_batch FROM tokenkeeper.campaign AS c
             WHERE c.ended_at IS NULL AND c.expiration > 'epoch' AND c.expiration > s.start_at AND c.expiration <= now()
               AND c.state IN ('waiting', 'running', 'paused')
             ORDER BY c.expiration LIMIT most_stopped)
            UNION ALL
            (SELECT c.campaign_id, c.state, c.first_open_batch FROM tokenkeeper.campaign AS c
             WHERE c.state IN ('paused', 'cancelled') AND c.ended_at IS NULL AND c.is_addressed AND c.state = 'cancelled' AND c.campaign_id > s.start
             ORDER BY c.campaign_id LIMIT most_stopped)) AS o
        WHERE EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b
                      WHERE b.campaign_id = o.campaign_id AND b.batch >= o.first_open_batch AND b.claimed_by IS NULL)
           OR (o.state <> 'cancelled' AND EXISTS (
                   SELECT FROM tokenkeeper.send_request AS r
                   WHERE r.campaign_id = o.campaign_id AND r.claimed_by IS NULL AND r.scheduled_at = 'infinity'))
        ORDER BY o.campaign_id
    LOOP
        IF stopped.state = 'cancelled' THEN
            PERFORM tokenkeeper.end_batches(stopped.campaign_id, 'cancelled', 1000);
            CONTINUE;
        END IF;
        expired := tokenkeeper.fail_expired(stopped.campaign_id);
        IF expired > 0 THEN
            SELECT c.environment, c.topic INTO end_campaigns.environment, end_campaigns.topic
            FROM tokenkeeper.campaign AS c WHERE c.campaign_id = stopped.campaign_id;
            RETURN NEXT;
        END IF;
    END LOOP;
    FOR finished IN
        SELECT DISTINCT o.campaign_id
        -- Of many that wait for retries, others each time.
        FROM (VALUES (0::bigint, 'epoch'::timestamptz), (by_chance, expired_by_chance)) AS s (start, start_at)
        CROSS JOIN LATERAL (
            (SELECT c.campaign_id FROM tokenkeeper.campaign AS c
             WHERE c.state IN ('waiting', 'running') AND c.is_addressed AND c.campaign_id > s.start ORDER BY c.campaign_id LIMIT most)
            UNION ALL
            (SELECT c.campaign_id FROM tokenkeeper.campaign AS c
             WHERE c.state IN ('paused', 'cancelled') AND c.ended_at IS NULL AND c.is_addressed AND c.campaign_id > s.start
             ORDER BY c.campaign_id LIMIT most)
            UNION ALL
            (SELECT c.campaign_id FROM tokenkeeper.campaign AS c
             WHERE c.ended_at IS NULL AND c.expiration > 'epoch' AND c.expiration > s.start_at AND c.expiration <= now()
               AND c.state IN ('waiting', 'running', 'paused')
             ORDER BY c.expiration LIMIT most)) AS o
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b
                          WHERE b.campaign_id = o.campaign_id
                            AND b.batch >= (SELECT c.first_open_batch FROM tokenkeeper.campaign AS c WHERE c.campaign_id = o.campaign_id))
          AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.campaign_id = o.campaign_id)
    LOOP
        PERFORM tokenkeeper.end_campaign(finished);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_campaigns() IS
    'Fails what waits of expired campaigns, ends what waits of cancelled ones, and records which campaigns have no request left; of more than 1000, random '
    'ones. Requests deleted from send_request count as cancelled. Returns how many requests expired, one row per campaign.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_content(campaign_id bigint)
RETURNS TABLE (payload text, push_type text, priority integer, expiration bigint, collapse_id text)
LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT c.payload::jsonb::text, c.push_type, CASE c.push_type WHEN 'background' THEN 5 ELSE c.priority END,
               floor(extract(epoch FROM c.expiration))::bigint, c.collapse_id
        FROM tokenkeeper.campaign AS c WHERE c.campaign_id = campaign_content.campaign_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaign_content(bigint) IS
    'What all requests of a campaign have in common; it never changes. The payload has PostgreSQL''s blanks; expiration is in seconds since 1970.';

CREATE OR REPLACE FUNCTION tokenkeeper.count_background(of_campaign tokenkeeper.campaign, numbers bigint[], keys bytea[], share integer)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    over_share bigint[];
BEGIN
    SELECT array_agg(n.number) INTO over_share FROM unnest(count_background.numbers, count_background.keys) AS n (number, key)
    JOIN tokenkeeper.note_background(of_campaign.environment, of_campaign.topic, count_background.keys,
                                     array_fill(1, ARRAY[cardinality(count_background.keys)]), share) AS b ON b.token_key = n.key
    WHERE b.room < 1;
    RETURN over_share;
END
$$;
COMMENT ON FUNCTION tokenkeeper.count_background(tokenkeeper.campaign, bigint[], bytea[], integer) IS
    'Internal: counts claimed background pushes of a campaign in background_send. Returns the numbers of those beyond their device''s share.';

CREATE OR REPLACE FUNCTION tokenkeeper.withhold_requests(
    of_campaign tokenkeeper.campaign, of_topic integer, numbers bigint[], keys bytea[], reasons text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, queued_at,
                                             campaign_id, campaign_number)
    SELECT of_campaign.environment, of_campaign.topic, encode(n.key, 'hex'), n.key,
           CASE n.reason WHEN 'gate' THEN tokenkeeper.state_of(l) ELSE 'alerts' END,
           CASE n.reason WHEN 'gate' THEN tokenkeeper.reason_of(l) ELSE 'its device has had alerts_per_day' END,
           greatest(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at), of_campaign.push_type,
           tokenkeeper.campaign_apns_id(of_campaign.campaign_id, n.number), of_campaign.created_at, of_campaign.campaign_id, n.number
    FROM unnest(withhold_requests.numbers, withhold_requests.keys, withhold_requests.reasons) AS n (number, key, reason)
    LEFT JOIN LATERAL (
        SELECT a.* FROM tokenkeeper.ledger AS a
        WHERE a.topic_id = of_topic AND a.token_key = n.key AND n.reason = 'gate' OFFSET 0) AS l ON true
    WHERE n.reason IN ('gate', 'alerts');

    -- The claim of single requests decides: of the excess, only the newest is kept.
    INSERT INTO tokenkeeper.send_request (environment, topic, token, apns_id, campaign_id, campaign_number)
    SELECT of_campaign.environment, of_campaign.topic, encode(n.key, 'hex'), tokenkeeper.campaign_apns_id(of_campaign.campaign_id, n.number),
           of_campaign.campaign_id, n.number
    FROM unnest(withhold_requests.numbers, withhold_requests.keys, withhold_requests.reasons) AS n (number, key, reason)
    WHERE n.reason = 'background';

    PERFORM tokenkeeper.end_in_batches(
        array_agg(of_campaign.campaign_id), array_agg((n.number >> 9)::integer), array_agg((n.number & 511)::integer),
        array_agg(CASE n.reason WHEN 'rate' THEN 'returned' WHEN 'background' THEN 'requeued' ELSE 'suppressed' END))
    FROM unnest(withhold_requests.numbers, withhold_requests.reasons) AS n (number, reason) WHERE n.reason IS NOT NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.withhold_requests(tokenkeeper.campaign, integer, bigint[], bytea[], text[]) IS
    'Internal: takes claimed requests of a campaign out of the claim, by reason: gate and alerts move them to suppressed_send, background to send_request; '
    'rate gives them back to their batch. Those without a reason stay.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaign_slots(
    of_campaign tokenkeeper.campaign, of_topic tokenkeeper.topic, OUT first_at timestamptz, OUT requests integer)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    next_at timestamptz;
    slots record;
BEGIN
    IF of_campaign.max_per_second IS NOT NULL THEN
        -- The daemons share the rate by this row. If another one has it, that one takes slots now, or addresses a part of the audience.
        SELECT a.next_send_at INTO next_at FROM tokenkeeper.campaign AS a WHERE a.campaign_id = of_campaign.campaign_id FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            requests := 0;
            RETURN;
        END IF;
        SELECT s.first_at, s.requests INTO first_at, requests FROM tokenkeeper.free_slots(next_at, of_campaign.max_per_second) AS s;
    END IF;
    IF of_topic.max_per_second IS NOT NULL AND coalesce(requests > 0, true) THEN
        SELECT s.first_at, s.requests INTO slots FROM tokenkeeper.topic_slots(of_topic.topic_id) AS s;
        first_at := greatest(first_at, slots.first_at);
        requests := least(requests, slots.requests);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaign_slots(tokenkeeper.campaign, tokenkeeper.topic) IS
    'Internal: the first free slot of the rates of a campaign and its topic, and how many requests may be claimed now; null without a rate. See free_slots.';

CREATE OR REPLACE FUNCTION tokenkeeper.limit_devices(
    of_campaign tokenkeeper.campaign, of_topic tokenkeeper.topic, background_per_hour integer, numbers bigint[], keys bytea[], reasons text[])
RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    share integer := nullif(coalesce(of_topic.background_per_hour, limit_devices.background_per_hour), 0);
    over_limit bigint[];
BEGIN
    -- A push is of one type, so at most one of the limits applies.
    IF share IS NOT NULL AND of_campaign.push_type = 'background' AND array_position(reasons, NULL) IS NOT NULL THEN
        SELECT tokenkeeper.count_background(of_campaign, array_agg(n.number), array_agg(n.key), share) INTO over_limit
        FROM unnest(numbers, keys, reasons) AS n (number, key, reason) WHERE n.reason IS NULL;
    ELSIF of_topic.alerts_per_day > 0 AND of_campaign.push_type = 'alert' THEN
        -- Those beyond the rate as well, because a batch is counted once.
        SELECT tokenkeeper.count_alerts(of_campaign.campaign_id, of_topic.topic_id, array_agg(n.number), array_agg(n.key)) INTO over_limit
        FROM unnest(numbers, keys, reasons) AS n (number, key, reason) WHERE n.reason IS NULL OR n.reason = 'rate';
    END IF;
    IF coalesce(cardinality(over_limit), 0) = 0 THEN
        RETURN reasons;
    END IF;
    RETURN ARRAY(
        SELECT CASE WHEN a.number = ANY (over_limit) THEN CASE of_campaign.push_type WHEN 'alert' THEN 'alerts' ELSE 'background' END ELSE a.reason END
        FROM unnest(numbers, reasons) WITH ORDINALITY AS a (number, reason, n) ORDER BY a.n);
END
$$;
COMMENT ON FUNCTION tokenkeeper.limit_devices(tokenkeeper.campaign, tokenkeeper.topic, integer, bigint[], bytea[], text[]) IS
    'Internal: counts claimed requests of a campaign that pass the gate against the limits of their devices. Returns the reasons, with background or alerts '
    'for those beyond a limit.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_batches(c tokenkeeper.campaign, room integer, per_second integer, most integer) RETURNS integer[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- As address_campaign makes them.
    size integer := CASE WHEN per_second IS NULL THEN 500 ELSE least(500, greatest(per_second / 20, 1)) END;
BEGIN
    -- A little room is enough for one batch, so that it does not stay empty.
    RETURN (
        SELECT array_agg(s.batch) FROM (
            SELECT f.batch, f.requests, sum(f.requests) OVER (ORDER BY f.batch) AS total, row_number() OVER (ORDER BY f.batch) AS place
            FROM (SELECT b.batch, b.requests - bit_count(b.ended) AS requests FROM tokenkeeper.campaign_batch AS b
                  WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.claimed_by IS NULL
                  ORDER BY b.batch LIMIT room / size + 2 FOR UPDATE SKIP LOCKED) AS f) AS s
        WHERE s.total <= room OR (s.place = 1 AND (s.requests <= most::bigint * 4 OR per_second IS NOT NULL)));
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_batches(tokenkeeper.campaign, integer, integer, integer) IS
    'Internal: locks the next free batches of a campaign, as many as there is room for, and returns their numbers; null for none.';

CREATE OR REPLACE FUNCTION tokenkeeper.claim_campaign(campaign_id bigint, daemon_id text, most integer, background_per_hour integer)
RETURNS TABLE (outcome text, number bigint, token_key bytea, send_in bigint)
LANGUAGE plpgsql ROWS 500
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    the_daemon text COLLATE "C" := claim_campaign.daemon_id;
    c tokenkeeper.campaign;
    of_topic tokenkeeper.topic;
    gate_topic integer;
    room integer := claim_campaign.most;
    -- The lower rate of the campaign and its topic, and the first free slot of both; null without a rate.
    per_second integer;
    first_at timestamptz;
    taken integer[];
    numbers bigint[];
    keys bytea[];
    -- Why a request is not sent; null if it is.
    reasons text[];
    withheld integer;
BEGIN
    SELECT a.* INTO c FROM tokenkeeper.campaign AS a
    WHERE a.campaign_id = claim_campaign.campaign_id AND a.state = 'running' AND NOT tokenkeeper.has_expired(a.expiration)
      AND NOT EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = a.topic AND p.environment = a.environment);
    IF NOT FOUND OR room < 1 THEN
        RETURN;
    END IF;
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t WHERE t.topic = c.topic AND t.environment = c.environment;
    per_second := least(c.max_per_second, of_topic.max_per_second);
    SELECT s.first_at, least(room, s.requests) INTO first_at, room FROM tokenkeeper.campaign_slots(c, of_topic) AS s;
    IF room < 1 THEN
        RETURN;
    END IF;
    taken := tokenkeeper.lock_batches(c, room, per_second, claim_campaign.most);
    -- With batches locked, nobody pauses the campaign. Somebody may have paused or cancelled it before. If it is cancelled now, recalled_requests tells.
    PERFORM FROM tokenkeeper.campaign AS a WHERE a.campaign_id = c.campaign_id AND a.state = 'running';
    IF NOT FOUND OR taken IS NULL THEN
        RETURN;
    END IF;
    gate_topic := CASE WHEN of_topic.gate IS DISTINCT FROM 'observe' THEN of_topic.topic_id END;
    WITH claimed AS (
        UPDATE tokenkeeper.campaign_batch AS b SET claimed_by = the_daemon
        -- The range, for plans that would use the array as a filter only.
        WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.batch = ANY (taken)
        RETURNING b.batch, b.ended, b.token_keys
    )
    SELECT array_agg(j.number), array_agg(j.token_key), array_agg(j.reason) INTO numbers, keys, reasons
    FROM (SELECT d.batch::bigint << 9 | k.ordinal AS number, k.token_key,
                 -- The gate. Not a join, so that each token is looked up in the index, whatever this plan knows about the ledger.
                 CASE WHEN (SELECT true FROM tokenkeeper.suppression AS s
                            WHERE s.topic_id = gate_topic AND s.token_key = k.token_key) THEN 'gate' END AS reason
          FROM claimed AS d CROSS JOIN LATERAL unnest(d.token_keys) WITH ORDINALITY AS k (token_key, ordinal)
          WHERE get_bit(d.ended, k.ordinal::integer) = 0 OFFSET 0) AS j;

    -- A batch made before a rate was set is larger than what is free. The rest goes back to it.
    IF per_second IS NOT NULL THEN
        reasons := ARRAY(
            SELECT CASE WHEN a.reason IS NULL AND row_number() OVER (PARTITION BY a.reason IS NULL ORDER BY a.number) > room THEN 'rate' ELSE a.reason END
            FROM unnest(numbers, reasons) WITH ORDINALITY AS a (number, reason, n) ORDER BY a.n);
    END IF;
    reasons := tokenkeeper.limit_devices(c, of_topic, claim_campaign.background_per_hour, numbers, keys, reasons);
    withheld := cardinality(array_remove(reasons, NULL));
    -- Only what is sent takes slots.
    IF per_second IS NOT NULL AND withheld < cardinality(numbers) THEN
        IF c.max_per_second IS NOT NULL THEN
            UPDATE tokenkeeper.campaign AS a SET next_send_at = first_at + (cardinality(numbers) - withheld) * interval '1 second' / c.max_per_second
            WHERE a.campaign_id = c.campaign_id;
        END IF;
        PERFORM tokenkeeper.take_topic_slots(of_topic.topic_id, first_at, cardinality(numbers) - withheld);
    END IF;
    IF withheld > 0 THEN
        PERFORM tokenkeeper.withhold_requests(c, gate_topic, numbers, keys, reasons);
        RETURN QUERY
            SELECT CASE n.reason WHEN 'background' THEN 'delayed' ELSE 'suppressed' END,
                   -(c.campaign_id << 32 | n.number), NULL::bytea, NULL::bigint
            FROM unnest(numbers, reasons) AS n (number, reason) WHERE n.reason <> 'rate';
    END IF;
    RETURN QUERY
        SELECT 'claimed', -(c.campaign_id << 32 | n.number), n.key,
               (extract(epoch FROM first_at - clock_timestamp()) * 1000000 + (n.place - 1) * 1000000 / per_second)::bigint
        FROM (SELECT a.number, a.key, row_number() OVER () AS place
              FROM unnest(numbers, keys, reasons) AS a (number, key, reason) WHERE a.reason IS NULL) AS n;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_campaign(bigint, text, integer, integer) IS
    'Claims whole batches of a campaign, about most requests, with the gate; with a rate, as many as it allows, and perhaps part of a batch. Returns one row '
    'per request, with a negative number that contains the campaign_id: claimed (to be sent; with a rate, in send_in microseconds), suppressed (by the gate '
    'or alerts_per_day), or delayed (moved to send_request, beyond its device''s share of background pushes). Only claimed ones count for the rates. Claims '
    'nothing after expiration.';

CREATE OR REPLACE FUNCTION tokenkeeper.delete_campaigns(ended_before timestamptz, max_rows integer DEFAULT 4000, OUT deleted bigint, OUT has_more boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    list bigint;
    ended bigint[];
    at_most integer := greatest(max_rows, 1);
    part bigint;
BEGIN
    deleted := 0;
    -- A list that no longer matters, at once: the rest of the audience of a campaign that was cancelled or has expired. In the order of the index.
    SELECT c.campaign_id INTO list FROM tokenkeeper.campaign AS c
    WHERE c.has_list AND c.state IN ('cancelled', 'ended') ORDER BY c.state, c.campaign_id LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM tokenkeeper.campaign_token AS t WHERE t.ctid = ANY (ARRAY(
            SELECT a.ctid FROM tokenkeeper.campaign_token AS a WHERE a.campaign_id = list LIMIT at_most));
        GET DIAGNOSTICS part = ROW_COUNT;
        IF part < at_most THEN
            UPDATE tokenkeeper.campaign AS c SET has_list = false WHERE c.campaign_id = list;
        END IF;
        has_more := true;
        RETURN;
    END IF;
    SELECT array_agg(o.campaign_id) INTO ended FROM (
        SELECT c.campaign_id FROM tokenkeeper.campaign AS c
        WHERE c.ended_at < delete_campaigns.ended_before AND NOT c.has_list
          -- requeue_failed takes their content from it. The sweep has deleted most of these before.
          AND NOT EXISTS (SELECT FROM tokenkeeper.failed_send AS f WHERE f.campaign_id = c.campaign_id)
        ORDER BY c.ended_at LIMIT at_most FOR UPDATE OF c SKIP LOCKED) AS o;
    has_more := coalesce(cardinality(ended), 0) = at_most;
    IF ended IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM tokenkeeper.campaign_ending AS e WHERE e.ctid = ANY (ARRAY(
        SELECT o.place FROM unnest(ended) AS i (campaign_id)
        CROSS JOIN LATERAL (
            SELECT a.ctid AS place FROM tokenkeeper.campaign_ending AS a WHERE a.campaign_id = i.campaign_id LIMIT at_most) AS o
        LIMIT at_most));
    GET DIAGNOSTICS part = ROW_COUNT;
    has_more := has_more OR part = at_most;
    -- One by one: those without endings.
    DELETE FROM tokenkeeper.campaign AS c WHERE c.ctid = ANY (ARRAY(
        SELECT o.place FROM unnest(ended) AS i (campaign_id)
        CROSS JOIN LATERAL (
            SELECT a.ctid AS place FROM tokenkeeper.campaign AS a
            WHERE a.campaign_id = i.campaign_id
              AND (part < at_most OR NOT EXISTS (SELECT FROM tokenkeeper.campaign_ending AS e WHERE e.campaign_id = a.campaign_id)) OFFSET 0) AS o));
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$$;
COMMENT ON FUNCTION tokenkeeper.delete_campaigns(timestamptz, integer) IS
    'Deletes campaigns that ended before an instant, the earliest first: up to max_rows campaigns and up to max_rows of their endings; one with requests in '
    'failed_send is kept. First deletes what is left of the list of one cancelled or expired campaign, up to max_rows tokens. Returns how many campaigns it '
    'deleted, and whether to call it again, in another transaction.';
