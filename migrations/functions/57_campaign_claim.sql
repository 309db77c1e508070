-- How a daemon finds campaigns, and claims their requests.

CREATE OR REPLACE FUNCTION tokenkeeper.end_in_batches(campaign_ids bigint[], batches integer[], ordinals integer[], outcomes text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
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
    'Records outcomes of requests that are in batches, which the caller has locked and in which they have not ended. The outcome returned gives a request back to its batch.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.end_in_batches(bigint[], integer[], integer[], text[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.campaigns_due()
RETURNS TABLE (campaign_id bigint, environment text, topic text, has_batches boolean, needs_addressing boolean, due_at timestamptz)
LANGUAGE plpgsql ROWS 10
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT c.campaign_id, c.environment, c.topic,
               EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b
                       WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.claimed_by IS NULL),
               NOT c.is_addressed, greatest(c.next_send_at, coalesce(c.scheduled_at, c.created_at), (
                   SELECT r.next_send_at FROM tokenkeeper.topic AS t JOIN tokenkeeper.topic_rate AS r ON r.topic_id = t.topic_id
                   WHERE t.topic = c.topic AND t.environment = c.environment AND t.max_per_second IS NOT NULL))
        FROM tokenkeeper.campaign AS c
        WHERE c.state IN ('waiting', 'running') AND coalesce(c.scheduled_at, c.created_at) <= now() AND NOT tokenkeeper.has_expired(c.expiration)
          AND NOT EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = c.topic AND p.environment = c.environment)
        ORDER BY coalesce(c.scheduled_at, c.created_at), c.campaign_id;
    PERFORM tokenkeeper.end_campaigns();
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaigns_due() IS
    'The campaigns that may be sent now, the oldest first: whether batches wait to be claimed, whether the audience is not addressed yet, and when max_per_second allows '
    'the next claim. Also fails what waits of campaigns that have expired, and notes which campaigns have ended.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.campaigns_due() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.end_campaigns() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    finished bigint;
    expired bigint;
    missing bigint;
BEGIN
    FOR expired IN
        SELECT c.campaign_id FROM tokenkeeper.campaign AS c
        WHERE c.state IN ('waiting', 'running') AND coalesce(c.scheduled_at, c.created_at) <= now() AND tokenkeeper.has_expired(c.expiration)
        UNION ALL
        SELECT c.campaign_id FROM tokenkeeper.campaign AS c
        WHERE c.state = 'paused' AND c.ended_at IS NULL AND tokenkeeper.has_expired(c.expiration)
    LOOP
        PERFORM tokenkeeper.fail_expired(expired);
    END LOOP;
    FOR finished IN
        SELECT o.campaign_id
        FROM (SELECT c.campaign_id, c.first_open_batch FROM tokenkeeper.campaign AS c
              WHERE c.state IN ('waiting', 'running') AND coalesce(c.scheduled_at, c.created_at) <= now()
                AND (c.is_addressed OR tokenkeeper.has_expired(c.expiration))
              UNION ALL
              SELECT c.campaign_id, c.first_open_batch FROM tokenkeeper.campaign AS c
              WHERE c.state IN ('paused', 'cancelled') AND c.ended_at IS NULL AND (c.is_addressed OR tokenkeeper.has_expired(c.expiration))) AS o
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b WHERE b.campaign_id = o.campaign_id AND b.batch >= o.first_open_batch)
          AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.campaign_id = o.campaign_id)
    LOOP
        PERFORM FROM tokenkeeper.campaign AS c WHERE c.campaign_id = finished AND c.ended_at IS NULL FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        -- Another daemon may have added batches before this one locked the row.
        UPDATE tokenkeeper.campaign AS c
        SET state = CASE c.state WHEN 'cancelled' THEN c.state ELSE 'ended' END, ended_at = clock_timestamp()
        WHERE c.campaign_id = finished
          AND NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS b WHERE b.campaign_id = finished AND b.batch >= c.first_open_batch);
        IF FOUND THEN
            -- Somebody has deleted single requests of the campaign from send_request.
            SELECT c.addressed - coalesce((SELECT sum(e.requests) FROM tokenkeeper.campaign_ending AS e
                                           WHERE e.campaign_id = finished AND e.outcome <> 'requeued'), 0)
            INTO missing FROM tokenkeeper.campaign AS c WHERE c.campaign_id = finished;
            IF missing > 0 THEN
                INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals) VALUES (finished, 0, missing, 'cancelled', '{}');
            END IF;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_campaigns() IS
    'Fails what waits of campaigns that have expired, and notes which campaigns have no request any more. Requests that were deleted from send_request count as cancelled.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.end_campaigns() FROM PUBLIC;

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
    'What all requests of a campaign have in common. It never changes. The payload has PostgreSQL''s blanks; expiration is in seconds since 1970.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.campaign_content(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.claim_campaign(campaign_id bigint, daemon_id text, most integer, background_per_hour integer)
RETURNS TABLE (number bigint, token_key bytea)
LANGUAGE plpgsql ROWS 500
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    the_daemon text COLLATE "C" := claim_campaign.daemon_id;
    c tokenkeeper.campaign;
    of_topic tokenkeeper.topic;
    gate_topic integer;
    room integer := claim_campaign.most;
    since timestamptz;
    size integer;
    taken integer[];
    requests bigint;
    numbers bigint[];
    keys bytea[];
    refused boolean[];
    refusals integer;
    share integer;
BEGIN
    SELECT a.* INTO c FROM tokenkeeper.campaign AS a
    WHERE a.campaign_id = claim_campaign.campaign_id AND a.state = 'running' AND NOT tokenkeeper.has_expired(a.expiration)
      AND NOT EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = a.topic AND p.environment = a.environment);
    IF NOT FOUND OR room < 1 THEN
        RETURN;
    END IF;
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t WHERE t.topic = c.topic AND t.environment = c.environment;
    size := CASE WHEN least(c.max_per_second, of_topic.max_per_second) IS NULL THEN 500
                 ELSE least(500, greatest(least(c.max_per_second, of_topic.max_per_second) / 20, 1)) END;
    IF c.max_per_second IS NOT NULL THEN
        -- The daemons share the rate by this row. Who comes up to 200 ms late may catch up, and a claim reaches up to 50 ms ahead, since
        -- daemons look for campaigns every 50 to 100 ms.
        SELECT a.next_send_at INTO c.next_send_at FROM tokenkeeper.campaign AS a WHERE a.campaign_id = c.campaign_id
        FOR NO KEY UPDATE SKIP LOCKED;
        -- Another daemon claims from it, or addresses it: this one does something else meanwhile.
        IF NOT FOUND OR c.next_send_at > clock_timestamp() THEN
            RETURN;
        END IF;
        since := greatest(c.next_send_at, clock_timestamp() - interval '200 ms');
        room := least(room, greatest(1, floor(c.max_per_second * extract(epoch FROM clock_timestamp() + interval '50 ms' - since))::integer));
    END IF;
    room := tokenkeeper.topic_allowance(of_topic.topic_id, room);
    IF room < 1 THEN
        RETURN;
    END IF;
    -- Whole batches. A little room is enough for one, so that it does not stay empty.
    SELECT array_agg(s.batch), sum(s.requests) INTO taken, requests FROM (
        SELECT f.batch, f.requests, sum(f.requests) OVER (ORDER BY f.batch) AS total, row_number() OVER (ORDER BY f.batch) AS place
        FROM (SELECT b.batch, b.requests - bit_count(b.ended) AS requests FROM tokenkeeper.campaign_batch AS b
              WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.claimed_by IS NULL
              ORDER BY b.batch LIMIT room / size + 2 FOR UPDATE SKIP LOCKED) AS f) AS s
    WHERE s.total <= room OR (s.place = 1 AND (s.requests <= claim_campaign.most::bigint * 4 OR least(c.max_per_second, of_topic.max_per_second) IS NOT NULL));
    -- With batches locked, nobody pauses or cancels the campaign. Somebody may have done so before.
    PERFORM FROM tokenkeeper.campaign AS a WHERE a.campaign_id = c.campaign_id AND a.state = 'running';
    IF NOT FOUND OR taken IS NULL THEN
        RETURN;
    END IF;
    IF c.max_per_second IS NOT NULL THEN
        UPDATE tokenkeeper.campaign AS a SET next_send_at = since + requests * interval '1 second' / c.max_per_second WHERE a.campaign_id = c.campaign_id;
    END IF;
    PERFORM tokenkeeper.spend_topic_rate(of_topic.topic_id, requests::integer);
    IF of_topic.gate IS DISTINCT FROM 'observe' THEN
        gate_topic := of_topic.topic_id;
    END IF;

    WITH claimed AS (
        UPDATE tokenkeeper.campaign_batch AS b SET claimed_by = the_daemon
        -- The range, for plans that would use the array as a filter only.
        WHERE b.campaign_id = c.campaign_id AND b.batch >= c.first_open_batch AND b.batch = ANY (taken)
        RETURNING b.batch, b.ended, b.token_keys
    )
    SELECT array_agg(j.number), array_agg(j.token_key), array_agg(j.refused), count(*) FILTER (WHERE j.refused)
    INTO numbers, keys, refused, refusals
    FROM (SELECT d.batch::bigint << 9 | k.ordinal AS number, k.token_key,
                 -- The gate. Not a join, so that each token is looked up in the index, whatever this plan knows about the ledger.
                 (SELECT true FROM tokenkeeper.ledger AS l
                  WHERE l.topic_id = gate_topic AND l.token_key = k.token_key AND l.suppressed > false) IS TRUE AS refused
          FROM claimed AS d CROSS JOIN LATERAL unnest(d.token_keys) WITH ORDINALITY AS k (token_key, ordinal)
          WHERE get_bit(d.ended, k.ordinal::integer) = 0 OFFSET 0) AS j;

    IF refusals > 0 THEN
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, queued_at,
                                                 campaign_id, campaign_number)
        SELECT c.environment, c.topic, encode(n.key, 'hex'), n.key, tokenkeeper.state_of(l), tokenkeeper.reason_of(l),
               greatest(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at), c.push_type,
               tokenkeeper.campaign_apns_id(c.campaign_id, n.number), c.created_at, c.campaign_id, n.number
        FROM unnest(numbers, keys, refused) AS n (number, key, refused)
        CROSS JOIN LATERAL (SELECT a.* FROM tokenkeeper.ledger AS a WHERE a.topic_id = gate_topic AND a.token_key = n.key OFFSET 0) AS l
        WHERE n.refused;
        PERFORM tokenkeeper.end_in_batches(
            array_agg(c.campaign_id), array_agg((n.number >> 9)::integer), array_agg((n.number & 511)::integer), array_agg('suppressed'::text))
        FROM unnest(numbers, refused) AS n (number, refused) WHERE n.refused;
        SELECT array_agg(n.number), array_agg(n.key) INTO numbers, keys
        FROM unnest(numbers, keys, refused) AS n (number, key, refused) WHERE NOT n.refused;
    END IF;
    share := nullif(coalesce(of_topic.background_per_hour, claim_campaign.background_per_hour), 0);
    IF share IS NOT NULL AND c.push_type = 'background' AND numbers IS NOT NULL THEN
        SELECT array_agg(n.number), array_agg(n.key) INTO numbers, keys
        FROM tokenkeeper.count_background(c, numbers, keys, share) AS n (number, key);
    END IF;
    IF of_topic.alerts_per_day > 0 AND c.push_type = 'alert' AND numbers IS NOT NULL THEN
        SELECT array_agg(n.number), array_agg(n.key) INTO numbers, keys
        FROM tokenkeeper.count_alerts(c, of_topic.topic_id, numbers, keys) AS n (number, key);
    END IF;
    RETURN QUERY SELECT -(c.campaign_id << 32 | n.number), n.key FROM unnest(numbers, keys) AS n (number, key);
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_campaign(bigint, text, integer, integer) IS
    'Claims whole batches of a campaign, up to about as many requests as most and as max_per_second of it and of its topic allow, and asks the gate. '
    'Returns the requests to send: the number is negative, and contains the campaign_id. A token that is suppressed meanwhile ends as suppressed (see '
    'suppressed_send), and so does an alert beyond alerts_per_day of its device. After expiration nothing is claimed. What is beyond a '
    'device''s share of background pushes moves to send_request. The batches that were looked at may all have ended so: nothing is returned then.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.claim_campaign(bigint, text, integer, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.count_background(of_campaign tokenkeeper.campaign, numbers bigint[], keys bytea[], share integer)
RETURNS TABLE (number bigint, token_key bytea)
LANGUAGE plpgsql ROWS 500
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    over bigint[];
BEGIN
    -- As in claim_requests: counted before they are sent, in the order of keys.
    WITH noted AS (
        INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at, room)
        SELECT of_campaign.environment, of_campaign.topic, k.key, ARRAY[now()], now(), share FROM unnest(keys) AS k (key) ORDER BY k.key
        ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
        SET (sent_at, latest_at, room) = (
            SELECT r.sent_at || excluded.sent_at[1:r.room], excluded.latest_at, r.room
            FROM (SELECT a.sent_at, greatest(share - cardinality(a.sent_at), 0) AS room
                  FROM (SELECT ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') AS sent_at) AS a) AS r)
        RETURNING b.token_key, b.room
    )
    SELECT array_agg(n.number) INTO over FROM unnest(numbers, keys) AS n (number, key)
    JOIN noted AS b ON b.token_key = n.key WHERE b.room < 1;
    IF over IS NOT NULL THEN
        -- The claim of single requests decides: of the excess, only the newest is kept.
        INSERT INTO tokenkeeper.send_request (environment, topic, token, apns_id, campaign_id, campaign_number)
        SELECT of_campaign.environment, of_campaign.topic, encode(n.key, 'hex'), tokenkeeper.campaign_apns_id(of_campaign.campaign_id, n.number),
               of_campaign.campaign_id, n.number
        FROM unnest(numbers, keys) AS n (number, key) WHERE n.number = ANY (over);
        PERFORM tokenkeeper.end_in_batches(
            array_agg(of_campaign.campaign_id), array_agg((n >> 9)::integer), array_agg((n & 511)::integer), array_agg('requeued'::text))
        FROM unnest(over) AS n;
    END IF;
    RETURN QUERY SELECT n.number, n.key FROM unnest(numbers, keys) AS n (number, key) WHERE (n.number = ANY (over)) IS NOT TRUE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.count_background(tokenkeeper.campaign, bigint[], bytea[], integer) IS
    'Counts background pushes of a campaign, which are claimed, in background_send. Moves those beyond their device''s share to send_request, and returns the others.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.count_background(tokenkeeper.campaign, bigint[], bytea[], integer) FROM PUBLIC;
