-- The state of the system in one row. It answers within milliseconds at any size.

CREATE OR REPLACE VIEW tokenkeeper.status AS
WITH latest AS (
    SELECT d.* FROM tokenkeeper.daemon AS d ORDER BY d.heartbeat_at DESC LIMIT 1
), live AS (
    SELECT count(*) AS daemons FROM tokenkeeper.daemon AS d WHERE d.heartbeat_at > clock_timestamp() - interval '30 seconds'
      AND d.stopped_at IS NULL
), tokens AS (
    SELECT coalesce(sum(c.tokens), 0)::bigint AS total,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)::bigint AS active,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'stale'), 0)::bigint AS stale,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'suspect'), 0)::bigint AS suspect,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'superseded'), 0)::bigint AS superseded,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'unregistered_by_app'), 0)::bigint AS unregistered_by_app,
           min(c.counted_at) AS as_of
    FROM tokenkeeper.token_count AS c
), rejected AS (
    -- A small table is counted here. For a large one (dead rows included), use a daemon's count or PostgreSQL's estimate.
    SELECT CASE WHEN pg_relation_size('tokenkeeper.rejected_result') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.rejected_result LIMIT 10000) AS r)
                ELSE coalesce((SELECT c.rows FROM tokenkeeper.status_cache AS c
                               WHERE c.source = 'rejected_result' AND c.as_of > clock_timestamp() - interval '10 minutes'),
                              least(pg_stat_get_live_tuples('tokenkeeper.rejected_result'::regclass), 10000)) END AS results
), rejected_lately AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.rejected_result') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.rejected_result AS r
                                            WHERE r.rejected_at > clock_timestamp() - interval '1 hour' LIMIT 10000) AS r)
                ELSE (SELECT c.rows FROM tokenkeeper.status_cache AS c WHERE c.source = 'rejected_result within an hour'
                        AND c.as_of > clock_timestamp() - interval '10 minutes') END AS results
), held AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.held_result') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.held_result LIMIT 10000) AS r)
                ELSE coalesce((SELECT c.rows FROM tokenkeeper.status_cache AS c
                               WHERE c.source = 'held_result' AND c.as_of > clock_timestamp() - interval '10 minutes'),
                              least(pg_stat_get_live_tuples('tokenkeeper.held_result'::regclass), 10000)) END AS results
), guards AS (
    SELECT array_agg(format('the mass-failure guard of %s (%s) tripped at %s UTC: suspects would suppress %s of %s active tokens within a day; '
                         'see `tokenkeeperd held list`', g.topic, g.environment,
                         to_char(g.tripped_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), g.tokens, coalesce(g.active, 0))
                     ORDER BY g.tripped_at) AS words
    FROM (SELECT * FROM tokenkeeper.guard WHERE tripped ORDER BY tripped_at LIMIT 20) AS g
), swept AS (
    SELECT s.* FROM tokenkeeper.sweep_run AS s
    WHERE s.outcome IN ('finished', 'failed', 'interrupted') AND NOT s.dry_run ORDER BY s.run_id DESC LIMIT 1
), refused AS (
    SELECT array_agg(format('the last sweep refused to prune %s of the %s tokens of %s (%s), more than %s; '
                         'see `tokenkeeperd sweep --dry-run`, and `--force`', r.tokens, r.of_tokens, r.topic, r.environment, r.max_tokens)
                     ORDER BY r.topic, r.environment) AS words
    FROM (SELECT s.topic, s.environment, sum(s.tokens) AS tokens, max(s.of_tokens) AS of_tokens, max(s.max_tokens) AS max_tokens
          FROM swept JOIN tokenkeeper.sweep_topic AS s USING (run_id) WHERE s.refused GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 20) AS r
), cached AS (
    -- Warnings that a daemon has found. It looks again within minutes, so older warnings are outdated.
    SELECT array_agg(w.words ORDER BY c.source, w.position) AS words
    FROM tokenkeeper.status_cache AS c CROSS JOIN unnest(c.words) WITH ORDINALITY AS w (words, position)
    WHERE c.as_of > clock_timestamp() - interval '1 hour'
), crowded AS (
    SELECT array_agg(format('device_id %L of %s (%s) has %s tokens: is it a constant?%s', left(c.device_id, 64), t.topic, t.environment,
                            CASE WHEN n.tokens = 1000 THEN '1000 or more' ELSE n.tokens::text END,
                            CASE WHEN n.tokens = 1000 THEN ' Further tokens are registered without a device.' ELSE '' END)
                     ORDER BY t.topic, t.environment, c.device_id) AS words
    FROM (SELECT * FROM tokenkeeper.crowded_device WHERE named_at > clock_timestamp() - interval '25 hours' ORDER BY named_at DESC LIMIT 20) AS c
    JOIN tokenkeeper.topic AS t USING (topic_id)
    CROSS JOIN LATERAL (
        SELECT count(*) AS tokens FROM (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = c.device_id AND l.topic_id + 0 = c.topic_id LIMIT 1000) AS l) AS n
    WHERE n.tokens >= 50
), locked AS (
    SELECT array_agg(format('daemon %s waits for a lock: %s', d.daemon_id, d.waiting_for) ORDER BY d.daemon_id) AS words
    FROM tokenkeeper.daemon AS d
    WHERE d.waiting_for IS NOT NULL AND d.stopped_at IS NULL AND d.heartbeat_at > clock_timestamp() - interval '1 minute'
), undoing AS (
    SELECT array_agg(format('an undo of %s (%s) is in progress: %s left; see tokenkeeper.reinstatement', r.topic, r.environment,
                            CASE r.remaining WHEN 1 THEN '1 suspect is' WHEN 10000 THEN '10000 or more suspects are'
                                             ELSE r.remaining || ' suspects are' END) ORDER BY r.at) AS words
    FROM (SELECT * FROM tokenkeeper.reinstatement
          WHERE finished_at IS NULL AND at < clock_timestamp() - interval '1 minute' ORDER BY at LIMIT 5) AS r
), mixed_up AS (
    SELECT array_agg(format(CASE k.elsewhere WHEN 1 THEN '%s token of %s is suspect in %s, where it was registered'
                                             ELSE '%s tokens of %s are suspect in %s, where they were registered' END
                            || ', and active in the other environment: does the app report the right environment?',
                            k.elsewhere, t.topic, t.environment)
                     ORDER BY t.topic, t.environment) AS words
    FROM (SELECT * FROM tokenkeeper.token_count WHERE elsewhere > 0 ORDER BY elsewhere DESC LIMIT 20) AS k
    JOIN tokenkeeper.topic AS t USING (topic_id)
), waiting AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.send_request') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.send_request LIMIT 10000) AS r)
                ELSE coalesce((SELECT c.rows FROM tokenkeeper.status_cache AS c
                               WHERE c.source = 'send_request' AND c.as_of > clock_timestamp() - interval '10 minutes'),
                              least(pg_stat_get_live_tuples('tokenkeeper.send_request'::regclass), 10000)) END AS requests
), failed AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.failed_send') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.failed_send LIMIT 10000) AS r)
                ELSE coalesce((SELECT c.rows FROM tokenkeeper.status_cache AS c
                               WHERE c.source = 'failed_send' AND c.as_of > clock_timestamp() - interval '10 minutes'),
                              least(pg_stat_get_live_tuples('tokenkeeper.failed_send'::regclass), 10000)) END AS requests
), sending AS (
    SELECT s.* FROM tokenkeeper.sending_daemon AS s WHERE s.heartbeat_at > clock_timestamp() - interval '60 seconds' AND s.stopped_at IS NULL
), paused AS (
    SELECT array_agg(format('sending to %s (%s) is paused since %s UTC: %s; fix the cause, then run: SELECT tokenkeeper.resume_sending(%L, %L)',
                            h.topic, h.environment, to_char(h.paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), h.reason, h.topic, h.environment)
                     ORDER BY h.paused_at) AS words
    FROM (SELECT * FROM tokenkeeper.paused_topic ORDER BY paused_at LIMIT 20) AS h
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
), problematic AS (
    SELECT array_agg(DISTINCT w.words) AS words FROM sending AS s CROSS JOIN unnest(s.problems) AS w (words)
)
SELECT latest.queue_depth,
       NOT latest.queue_depth_exact AS queue_depth_estimated,
       clock_timestamp() - latest.oldest_queued_at AS oldest_result_age,
       latest.heartbeat_at AS queue_as_of,
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
           CASE WHEN latest.heartbeat_at IS NULL THEN 'no daemon has ever run on this database'
                WHEN live.daemons = 0 THEN 'no daemon is running; the last was seen at '
                    || to_char(latest.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' END,
           'results stay in the queue because PostgreSQL reports: ' || latest.problem,
           CASE WHEN latest.oldest_queued_at < clock_timestamp() - interval '5 minutes'
                THEN 'results have been waiting for longer than five minutes' END,
           CASE WHEN held.results > 0
                THEN CASE held.results WHEN 1 THEN '1 result is' WHEN 10000 THEN '10000 or more results are'
                                       ELSE held.results || ' results are' END
                    || ' held by the mass-failure guard; see `tokenkeeperd held list`' END,
           CASE WHEN rejected.results > 0
                THEN CASE rejected.results WHEN 1 THEN '1 result' WHEN 10000 THEN '10000 or more results' ELSE rejected.results || ' results' END
                    || ' could not be understood'
                    || CASE WHEN rejected_lately.results > 0
                            THEN ', ' || CASE WHEN rejected_lately.results = 10000 THEN '10000 or more'
                                              ELSE rejected_lately.results::text END || ' within the last hour' ELSE '' END
                    || '; see `tokenkeeperd rejected list`' END,
           CASE WHEN swept.outcome = 'failed' THEN 'the last sweep failed: ' || coalesce(swept.message, 'no message') END,
           CASE WHEN coalesce(swept.finished_at, latest.started_at) < clock_timestamp() - 2 * latest.sweep_interval - interval '1 minute'
                THEN 'no sweep has finished within twice its interval' END
       ], NULL) || guards.words || refused.words || cached.words || mixed_up.words || crowded.words || locked.words || undoing.words
           || paused.words || expiring.words || problematic.words
           || CASE WHEN failed.requests > 0
                   THEN ARRAY[CASE failed.requests WHEN 1 THEN '1 request' WHEN 10000 THEN '10000 or more requests'
                                                   ELSE failed.requests || ' requests' END || ' failed; see tokenkeeper.failed_send'] END
           || CASE WHEN waiting.requests > 0 AND NOT EXISTS (SELECT FROM sending)
                   THEN ARRAY['requests wait in tokenkeeper.send_request, and no running daemon sends'] END AS warnings,
       waiting.requests AS requests,
       failed.requests AS failed_sends,
       expiring.expires_at AS credential_expires_at
FROM live
CROSS JOIN waiting
CROSS JOIN failed
CROSS JOIN paused
CROSS JOIN expiring
CROSS JOIN problematic
CROSS JOIN tokens
CROSS JOIN rejected
CROSS JOIN rejected_lately
CROSS JOIN held
CROSS JOIN guards
CROSS JOIN refused
CROSS JOIN cached
CROSS JOIN mixed_up
CROSS JOIN crowded
CROSS JOIN locked
CROSS JOIN undoing
LEFT JOIN latest ON true
LEFT JOIN swept ON true;
COMMENT ON VIEW tokenkeeper.status IS
    'One row: the state of the system. The queue as the latest daemon saw it, the tokens as they were last counted, and warnings in words.';
COMMENT ON COLUMN tokenkeeper.status.queue_depth_estimated IS 'True if queue_depth was estimated from the size of the queue.';
COMMENT ON COLUMN tokenkeeper.status.oldest_result_age IS 'How long the oldest result has been waiting; null if there was none.';
COMMENT ON COLUMN tokenkeeper.status.rejected IS
    'Rows of rejected_result; 10000 means 10000 or more. For a large table: a daemon''s count of the last ten minutes, or an estimate.';
COMMENT ON COLUMN tokenkeeper.status.live_daemons IS 'Daemons that have reported within the last 30 seconds.';
COMMENT ON COLUMN tokenkeeper.status.held IS
    'Rows of held_result; 10000 means 10000 or more. For a large table: a daemon''s count of the last ten minutes, or an estimate.';
COMMENT ON COLUMN tokenkeeper.status.requests IS
    'Rows of send_request, claimed ones included; 10000 means 10000 or more. For a large table: a daemon''s count of the last ten minutes, or an estimate.';
COMMENT ON COLUMN tokenkeeper.status.failed_sends IS
    'Rows of failed_send; 10000 means 10000 or more. For a large table: a daemon''s count of the last ten minutes, or an estimate.';
COMMENT ON COLUMN tokenkeeper.status.credential_expires_at IS
    'When the first certificate of the running daemons expires; null if they send with provider tokens, which do not expire.';
COMMENT ON COLUMN tokenkeeper.status.tokens_as_of IS 'When the oldest of these counts began: each topic has its own count.';
