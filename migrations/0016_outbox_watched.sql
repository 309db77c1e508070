-- oldest daemon: 0.1.0
--
-- The outbox, where people look and where a person is forgotten: status as in 0009, and what waits, was given up, is halted, expires;
-- erase as in 0009, and the outbox too.

ALTER TABLE tokenkeeper.sweep_run ADD COLUMN deleted_sends bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN tokenkeeper.sweep_run.deleted_sends IS
    'Rows of suppressed_send and failed_send that were older than sweep.send_retention.';

CREATE OR REPLACE VIEW tokenkeeper.status AS
WITH latest AS (
    SELECT d.* FROM tokenkeeper.daemon AS d ORDER BY d.beat_at DESC LIMIT 1
), live AS (
    SELECT count(*) AS daemons FROM tokenkeeper.daemon AS d WHERE d.beat_at > clock_timestamp() - interval '30 seconds'
      AND d.stopped_at IS NULL
), tokens AS (
    SELECT coalesce(sum(c.tokens), 0)::bigint AS total,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)::bigint AS active,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'stale'), 0)::bigint AS stale,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'suspect'), 0)::bigint AS suspect,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'superseded'), 0)::bigint AS superseded,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'unregistered_by_app'), 0)::bigint AS unregistered_by_app,
           max(c.counted_at) AS as_of
    FROM tokenkeeper.token_count AS c
), rejected AS (
    -- Counted up to a limit: this view answers at once at any size.
    SELECT count(*) AS results FROM (SELECT FROM tokenkeeper.rejected_result LIMIT 10000) AS r
), rejected_lately AS (
    SELECT count(*) AS results FROM (
        SELECT r.rejected_at FROM tokenkeeper.rejected_result AS r ORDER BY r.rejected_id DESC LIMIT 10000) AS r
    WHERE r.rejected_at > clock_timestamp() - interval '1 hour'
), held AS (
    SELECT count(*) AS results FROM (SELECT FROM tokenkeeper.held_result LIMIT 10000) AS h
), guards AS (
    SELECT array_agg(format('the mass-failure guard of %s (%s) is open since %s UTC: suspects would silence %s tokens within a day, '
                         'of %s active ones; see `tokenkeeperd held list`', g.topic, g.environment,
                         to_char(g.open_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), g.tokens, coalesce(g.active, 0))
                     ORDER BY g.open_since) AS words
    FROM (SELECT * FROM tokenkeeper.guard WHERE open ORDER BY open_since LIMIT 20) AS g
), swept AS (
    SELECT s.* FROM tokenkeeper.sweep_run AS s
    WHERE s.outcome IN ('finished', 'failed', 'interrupted') AND NOT s.dry_run ORDER BY s.run_id DESC LIMIT 1
), refused AS (
    SELECT array_agg(format('the last sweep refused to prune %s of the %s tokens of %s (%s), more than %s; '
                         'see `tokenkeeperd sweep --dry-run`, and `--force`', r.tokens, r.of_tokens, r.topic, r.environment, r.max_tokens)
                     ORDER BY r.topic, r.environment) AS words
    FROM (SELECT s.topic, s.environment, sum(s.tokens) AS tokens, max(s.of_tokens) AS of_tokens, max(s.max_tokens) AS max_tokens
          FROM swept JOIN tokenkeeper.sweep_topic AS s USING (run_id) WHERE s.refused GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 20) AS r
), unregistered AS (
    -- now(), which an index takes, and clock_timestamp() is not.
    SELECT array_agg(format('%s (%s) had results within 24 hours, but no registration: does the app call tokenkeeper.register?',
                            u.topic, u.environment) ORDER BY u.topic, u.environment) AS words
    FROM (SELECT c.topic, c.environment FROM tokenkeeper.result_count AS c
          LEFT JOIN tokenkeeper.topic AS t ON t.topic = c.topic AND t.environment = c.environment
          WHERE c.hour > now() - interval '48 hours' AND c.environment IN ('production', 'sandbox') AND c.topic <> ''
            AND NOT EXISTS (SELECT FROM tokenkeeper.token_count AS k WHERE k.topic_id = t.topic_id
                            AND k.last_registered_at > k.counted_at - interval '24 hours')
          GROUP BY 1, 2
          -- Since yesterday, and still.
          HAVING max(c.hour) > now() - interval '24 hours'
             AND least(min(t.first_seen), min(c.hour)) < now() - interval '24 hours'
          ORDER BY 1, 2 LIMIT 20) AS u
), crowded AS (
    SELECT array_agg(format('a device_id of %s (%s) has 50 tokens or more, and one of them can be sent to: is it a constant?',
                            o.topic, o.environment) ORDER BY o.topic, o.environment) AS words
    FROM (SELECT DISTINCT p.topic, p.environment FROM tokenkeeper.operation AS p
          WHERE p.operation = 'device_crowded' AND p.at > now() - interval '24 hours' LIMIT 20) AS o
), mixed_up AS (
    SELECT array_agg(format('%s tokens of %s are suspect in %s, where they were registered, and active in the other environment: '
                            'does the app say the right environment?', k.elsewhere, t.topic, t.environment)
                     ORDER BY t.topic, t.environment) AS words
    FROM (SELECT * FROM tokenkeeper.token_count WHERE elsewhere > 0 ORDER BY elsewhere DESC LIMIT 20) AS k
    JOIN tokenkeeper.topic AS t USING (topic_id)
), waiting AS (
    SELECT count(*) AS requests FROM (SELECT FROM tokenkeeper.send_request LIMIT 10000) AS r
), failed AS (
    SELECT count(*) AS requests FROM (SELECT FROM tokenkeeper.failed_send LIMIT 10000) AS f
), sending AS (
    SELECT s.* FROM tokenkeeper.sending_daemon AS s WHERE s.beat_at > clock_timestamp() - interval '60 seconds' AND s.stopped_at IS NULL
), halted AS (
    SELECT array_agg(format('the sending of %s (%s) is halted since %s UTC: %s; when that is mended: SELECT tokenkeeper.resume_sending(%L, %L)',
                            h.topic, h.environment, to_char(h.halted_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), h.reason, h.topic, h.environment)
                     ORDER BY h.halted_at) AS words
    FROM (SELECT * FROM tokenkeeper.send_halt ORDER BY halted_at LIMIT 20) AS h
), credential AS (
    SELECT DISTINCT c.credential ->> 'name' AS name, (c.credential ->> 'expires_at')::timestamptz AS expires_at
    FROM sending AS s CROSS JOIN LATERAL jsonb_array_elements(s.credentials) AS c (credential)
), expiring AS (
    SELECT min(c.expires_at) AS expires_at,
           array_agg(format('the certificate of credential %s %s %s UTC', c.name,
                            CASE WHEN c.expires_at < clock_timestamp() THEN 'has expired at' ELSE 'expires at' END,
                            to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')) ORDER BY c.expires_at)
               FILTER (WHERE c.expires_at < clock_timestamp() + interval '30 days') AS words
    FROM credential AS c
), in_trouble AS (
    SELECT array_agg(DISTINCT w.words) AS words FROM sending AS s CROSS JOIN unnest(s.trouble) AS w (words)
)
SELECT latest.queue_depth,
       NOT latest.queue_depth_exact AS queue_depth_estimated,
       clock_timestamp() - latest.oldest_queued_at AS oldest_result_age,
       latest.beat_at AS queue_as_of,
       rejected.results AS rejected,
       held.results AS held,
       tokens.active AS tokens_active,
       tokens.stale AS tokens_stale,
       tokens.suspect AS tokens_suspect,
       tokens.superseded AS tokens_superseded,
       tokens.unregistered_by_app AS tokens_unregistered_by_app,
       tokens.as_of AS tokens_as_of,
       swept.finished_at AS last_sweep_at,
       swept.trigger AS last_sweep_trigger,
       swept.outcome AS last_sweep_outcome,
       live.daemons AS live_daemons,
       array_remove(ARRAY[
           CASE WHEN latest.beat_at IS NULL THEN 'no daemon has ever run on this database'
                WHEN live.daemons = 0 THEN 'no daemon is running; the last was seen at '
                    || to_char(latest.beat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' END,
           'results stay in the queue, because PostgreSQL refuses: ' || latest.trouble,
           CASE WHEN latest.oldest_queued_at < clock_timestamp() - interval '5 minutes'
                THEN 'results have been waiting for longer than five minutes' END,
           CASE WHEN held.results > 0
                THEN CASE WHEN held.results = 10000 THEN '10000 or more' ELSE held.results::text END
                    || ' results are held by the mass-failure guard; see `tokenkeeperd held list`' END,
           CASE WHEN rejected.results > 0
                THEN CASE WHEN rejected.results = 10000 THEN '10000 or more' ELSE rejected.results::text END
                    || ' results could not be understood'
                    || CASE WHEN rejected_lately.results > 0
                            THEN ', ' || CASE WHEN rejected_lately.results = 10000 THEN '10000 or more'
                                              ELSE rejected_lately.results::text END || ' of them within the last hour' ELSE '' END
                    || '; see `tokenkeeperd rejected list`' END,
           CASE WHEN swept.outcome = 'failed' THEN 'the last sweep failed: ' || coalesce(swept.message, 'no message') END,
           CASE WHEN coalesce(swept.finished_at, latest.started_at) < clock_timestamp() - 2 * latest.sweep_interval - interval '1 minute'
                THEN 'no sweep has finished within twice its interval' END
       ], NULL) || guards.words || refused.words || unregistered.words || mixed_up.words || crowded.words
           || halted.words || expiring.words || in_trouble.words
           || CASE WHEN failed.requests > 0
                   THEN ARRAY[CASE WHEN failed.requests = 10000 THEN '10000 or more' ELSE failed.requests::text END
                              || ' requests were given up; see tokenkeeper.failed_send'] END
           || CASE WHEN waiting.requests > 0 AND NOT EXISTS (SELECT FROM sending)
                   THEN ARRAY['requests wait in tokenkeeper.send_request, and no running daemon sends'] END AS warnings,
       waiting.requests AS requests,
       failed.requests AS failed_sends,
       expiring.expires_at AS credential_expires_at
FROM live
CROSS JOIN waiting
CROSS JOIN failed
CROSS JOIN halted
CROSS JOIN expiring
CROSS JOIN in_trouble
CROSS JOIN tokens
CROSS JOIN rejected
CROSS JOIN rejected_lately
CROSS JOIN held
CROSS JOIN guards
CROSS JOIN refused
CROSS JOIN unregistered
CROSS JOIN mixed_up
CROSS JOIN crowded
LEFT JOIN latest ON true
LEFT JOIN swept ON true;
COMMENT ON COLUMN tokenkeeper.status.requests IS 'Rows of send_request, those in a daemon''s hand included; 10000 means that many or more.';
COMMENT ON COLUMN tokenkeeper.status.failed_sends IS 'Rows of failed_send; 10000 means that many or more.';
COMMENT ON COLUMN tokenkeeper.status.credential_expires_at IS
    'When the first of the certificates expires that running daemons send with; null where they send with provider tokens, which do not.';

CREATE OR REPLACE FUNCTION tokenkeeper.erase(token_keys bytea[], device_ids text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    hex text[] := ARRAY(SELECT encode(k, 'hex') FROM unnest(erase.token_keys) AS k);
    base64 text[] := ARRAY(SELECT encode(k, 'base64') FROM unnest(erase.token_keys) AS k);
    guarded integer[];
    total bigint := 0;
    part bigint;
BEGIN
    -- Locks in the order of all others: guards, devices, tokens.
    PERFORM FROM tokenkeeper.topic_guard AS g ORDER BY g.topic_id FOR UPDATE;
    PERFORM FROM tokenkeeper.device AS d
    WHERE d.device_id = ANY (erase.device_ids) OR (d.token_key = ANY (erase.token_keys) AND d.token_key <> '')
    ORDER BY d.topic_id, d.device_id COLLATE "C"
    FOR UPDATE;
    PERFORM FROM tokenkeeper.topic AS t
    CROSS JOIN unnest(erase.token_keys) AS k (token_key)
    JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key
    ORDER BY l.topic_id, l.token_key
    FOR UPDATE OF l;

    SELECT coalesce(array_agg(DISTINCT a.topic_id), '{}') INTO guarded FROM (
        SELECT h.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(erase.token_keys) AS k (token_key)
        JOIN tokenkeeper.held_result AS h ON h.topic_id = g.topic_id AND h.token_key = k.token_key
        UNION ALL
        SELECT s.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(erase.token_keys) AS k (token_key)
        JOIN tokenkeeper.suspect AS s ON s.topic_id = g.topic_id AND s.token_key = k.token_key AND s.silenced) AS a;

    -- The outbox before the queue: an answer that is being written down at this moment leaves the one for the other. What a daemon has in hand
    -- is being sent; its answer finds nothing to end, and is not kept.
    DELETE FROM tokenkeeper.send_request AS r
    WHERE tokenkeeper.token_key(r.token) = ANY (erase.token_keys)
       OR (tokenkeeper.token_key(r.token) IS NULL AND tokenkeeper.mentions(r.token, hex, base64));
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.suppressed_send AS s WHERE s.token_key = ANY (erase.token_keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.failed_send AS f WHERE tokenkeeper.mentions(f.token, hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.background_send AS b WHERE b.token_key = ANY (erase.token_keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.send_result AS r
    WHERE tokenkeeper.mentions(r.token, hex, base64) OR tokenkeeper.mentions(concat_ws(' ', r.token, r.topic, r.body), hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.rejected_result AS r
    WHERE tokenkeeper.mentions(r.token, hex, base64) OR tokenkeeper.mentions(concat_ws(' ', r.token, r.topic, r.body), hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.held_result AS h
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE h.topic_id = t.topic_id AND h.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.ledger AS l
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE l.topic_id = t.topic_id AND l.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.suspect AS s
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE s.topic_id = t.topic_id AND s.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    PERFORM tokenkeeper.recount_guard(g) FROM unnest(guarded) AS g;
    -- A device without tokens has nothing left to say; of others, not which token named it.
    DELETE FROM tokenkeeper.device AS d
    WHERE (d.device_id = ANY (erase.device_ids) OR (d.token_key = ANY (erase.token_keys) AND d.token_key <> ''))
      AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = d.device_id AND l.topic_id + 0 = d.topic_id);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    UPDATE tokenkeeper.device AS d SET named_at = '-infinity', token_key = ''
    WHERE d.token_key = ANY (erase.token_keys) AND d.token_key <> '';
    DELETE FROM tokenkeeper.token_event_log AS e WHERE e.token_key = ANY (erase.token_keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    UPDATE tokenkeeper.sweep_topic AS s SET samples = NULL
    WHERE s.samples && ARRAY(SELECT left(h, 8) FROM unnest(hex) AS h);
    INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('forgotten', total);
    RETURN total;
END
$$;
