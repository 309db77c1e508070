-- The state of the system in one row. It answers within milliseconds at any size.
--
-- Locks: it waits for a lock 200 ms at most, and for a partition 20 ms.

CREATE OR REPLACE FUNCTION tokenkeeper.look_at_queue(queue text, OUT queued bigint, OUT is_estimated boolean, OUT oldest_queued_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '20ms'
AS $$
DECLARE
    partition text;
    bytes bigint;
    found bigint;
    oldest timestamptz;
BEGIN
    queued := 0;
    is_estimated := false;
    FOREACH partition IN ARRAY tokenkeeper.partitions_of(queue) LOOP
        partition := 'tokenkeeper.' || partition;
        oldest := NULL;
        BEGIN
            bytes := pg_relation_size(partition);
            IF bytes <= 4194304 THEN
                EXECUTE 'SELECT count(*), min(queued_at) FROM ' || partition INTO found, oldest;
            ELSE
                is_estimated := true;
                found := pg_stat_get_live_tuples(partition::regclass);
                -- After a crash, the server has no statistics. A page holds some 50 rows.
                IF pg_stat_get_tuples_inserted(partition::regclass) = 0 THEN
                    found := bytes * 50 / current_setting('block_size')::integer;
                END IF;
                EXECUTE 'SELECT min(queued_at) FROM ' || partition || ' WHERE ctid < ''(64,0)''' INTO oldest;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            is_estimated := true;
            found := pg_stat_get_live_tuples(partition::regclass);
        END;
        queued := queued + found;
        oldest_queued_at := least(oldest_queued_at, oldest);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.look_at_queue(text) IS
    'How many rows a queue (send_result or registration) has, and when the oldest was queued, within milliseconds. Estimates a partition that is locked or '
    'larger than 4 MiB from PostgreSQL''s statistics, and searches only its first 64 pages for the oldest row. Raises 22023 for another queue.';

CREATE OR REPLACE FUNCTION tokenkeeper.look_at_rows(of_table text, OUT counted bigint, OUT as_of timestamptz)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pg_relation_size(format('tokenkeeper.%I', of_table)) <= 4194304 THEN
        EXECUTE format('SELECT count(*) FROM (SELECT FROM tokenkeeper.%I%s LIMIT 10000) AS r', of_table,
                       CASE of_table WHEN 'send_request' THEN ' WHERE campaign_id IS NULL' ELSE '' END) INTO counted;
    ELSE
        SELECT c.rows, c.as_of INTO counted, as_of FROM tokenkeeper.status_cache AS c
        WHERE c.source = of_table AND c.as_of > clock_timestamp() - interval '10 minutes';
    END IF;
    counted := coalesce(counted, least(pg_stat_get_live_tuples(format('tokenkeeper.%I', of_table)::regclass), 10000));
    as_of := coalesce(as_of, clock_timestamp());
END
$$;
COMMENT ON FUNCTION tokenkeeper.look_at_rows(text) IS
    'How many rows a table of this schema has, counted up to 10000, within milliseconds, and when they were counted. Of a table over 4 MiB, dead rows included, '
    'a daemon''s count of the last ten minutes, or PostgreSQL''s estimate. Of send_request, without those of campaigns.';

CREATE OR REPLACE VIEW tokenkeeper.lock_holder AS
SELECT c.relname::text AS relname,
       CASE l.mode WHEN 'ShareLock' THEN 'SHARE' WHEN 'ShareRowExclusiveLock' THEN 'SHARE ROW EXCLUSIVE'
                   WHEN 'ExclusiveLock' THEN 'EXCLUSIVE' ELSE 'ACCESS EXCLUSIVE' END AS mode,
       coalesce('prepared transaction ' || quote_literal(left(p.gid, 60)),
                concat_ws(', ', 'pid ' || l.pid, 'role ' || a.usename, 'application ' || nullif(a.application_name, '')))
           || CASE WHEN l.granted THEN '' ELSE ', which waits for it' END AS who
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_class AS c ON c.oid = l.relation AND c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p')
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
LEFT JOIN pg_catalog.pg_locks AS x ON x.locktype = 'transactionid' AND x.granted AND l.pid IS NULL AND x.pid IS NULL
                                  AND x.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_catalog.pg_prepared_xacts AS p ON p.transaction = x.transactionid
WHERE l.locktype = 'relation' AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database());
COMMENT ON VIEW tokenkeeper.lock_holder IS
    'Internal: the sessions and prepared transactions that have locked a whole table of this schema against changes or against reading, or wait for that.';

CREATE OR REPLACE FUNCTION tokenkeeper.waiting_topics() RETURNS TABLE (environment text, topic text, due_at timestamptz)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
-- It steps along the index from topic to topic, and must not read every request.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $$
WITH RECURSIVE scope AS (
    (SELECT left(coalesce(r.topic, ''), 513) AS topic, left(coalesce(r.environment, 'production'), 20) AS environment,
            coalesce(r.scheduled_at, r.queued_at) AS due_at, 1 AS number
     FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL ORDER BY 1, 2, 3 LIMIT 1)
    UNION ALL
    SELECT n.topic, n.environment, n.due_at, p.number + 1
    FROM scope AS p CROSS JOIN LATERAL (
        SELECT left(coalesce(r.topic, ''), 513) AS topic, left(coalesce(r.environment, 'production'), 20) AS environment,
               coalesce(r.scheduled_at, r.queued_at) AS due_at
        FROM tokenkeeper.send_request AS r
        WHERE r.claimed_by IS NULL
          AND (left(coalesce(r.topic, ''), 513), left(coalesce(r.environment, 'production'), 20)) > (p.topic, p.environment)
        ORDER BY 1, 2, 3 LIMIT 1) AS n
    WHERE p.number < 1000
)
SELECT s.environment, s.topic, s.due_at FROM scope AS s
$$;
COMMENT ON FUNCTION tokenkeeper.waiting_topics() IS
    'The topics with unclaimed requests, and when the first request of each is due. At most 1000, because senders may write any text as a topic.';

CREATE OR REPLACE FUNCTION tokenkeeper.overdue_requests() RETURNS SETOF tokenkeeper.page
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
SELECT 'requests_wait', w.environment, w.topic,
       format('requests of %s (%s) have been due since %s UTC, and are not sent%s', tokenkeeper.without_backticks(w.topic), w.environment,
              to_char(w.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'),
              CASE WHEN EXISTS (SELECT FROM tokenkeeper.sending_daemon AS s
                                WHERE s.heartbeat_at > clock_timestamp() - interval '60 seconds' AND s.stopped_at IS NULL)
                   THEN '' ELSE ', because no running daemon sends' END)
FROM tokenkeeper.waiting_topics() AS w
LEFT JOIN tokenkeeper.topic AS t ON t.topic = w.topic AND t.environment = w.environment
LEFT JOIN tokenkeeper.topic_rate AS r ON r.topic_id = t.topic_id AND t.max_per_second IS NOT NULL
-- A topic with a rate that has been sent to lately is slow because its rate says so.
WHERE greatest(w.due_at, r.next_send_at) < clock_timestamp() - interval '5 minutes'
  -- A paused topic has a warning of its own.
  AND NOT EXISTS (SELECT FROM tokenkeeper.paused_topic AS p WHERE p.topic = w.topic AND p.environment = w.environment)
ORDER BY w.due_at LIMIT 20
$$;
COMMENT ON FUNCTION tokenkeeper.overdue_requests() IS
    'The critical warnings about topics whose requests have been due for five minutes, at most 20. It takes long only if the table has very many dead rows.';

CREATE OR REPLACE VIEW tokenkeeper.status_detail AS
WITH latest AS (
    SELECT d.* FROM tokenkeeper.daemon AS d ORDER BY d.heartbeat_at DESC LIMIT 1
), live AS (
    SELECT count(*) AS daemons, sum(d.results_per_second) AS results_per_second, sum(d.registrations_per_second) AS registrations_per_second
    FROM tokenkeeper.daemon AS d WHERE d.heartbeat_at > clock_timestamp() - interval '30 seconds'
      AND d.stopped_at IS NULL
), looked AS MATERIALIZED (
    -- While a daemon reports, its heartbeat says enough, and LIMIT 0 keeps the function from being called.
    SELECT q.* FROM live CROSS JOIN LATERAL (
        SELECT l.* FROM tokenkeeper.look_at_queue('send_result') AS l LIMIT CASE live.daemons WHEN 0 THEN 1 ELSE 0 END) AS q
), queue AS (
    SELECT CASE WHEN live.daemons = 0 THEN looked.queued ELSE latest.queue_depth END AS results,
           CASE WHEN live.daemons = 0 THEN looked.is_estimated ELSE NOT latest.queue_depth_exact END AS is_estimated,
           CASE WHEN live.daemons > 0 THEN latest.oldest_queued_at
                -- Of a large queue, only the beginning was searched. What the last daemon saw still waits.
                WHEN looked.is_estimated AND looked.queued > 0 THEN least(looked.oldest_queued_at, latest.oldest_queued_at)
                ELSE looked.oldest_queued_at END AS oldest_queued_at,
           CASE WHEN live.daemons = 0 THEN clock_timestamp() ELSE latest.heartbeat_at END AS as_of,
           CASE WHEN live.daemons > 0 THEN latest.wait_reason WHEN looked.queued > 0 THEN 'no daemon reports' END AS wait_reason
    FROM live LEFT JOIN looked ON true LEFT JOIN latest ON true
), looked_at_registrations AS MATERIALIZED (
    SELECT q.* FROM live CROSS JOIN LATERAL (
        SELECT l.* FROM tokenkeeper.look_at_queue('registration') AS l LIMIT CASE live.daemons WHEN 0 THEN 1 ELSE 0 END) AS q
), registrations AS (
    -- As queue.
    SELECT CASE WHEN live.daemons = 0 THEN looked.queued ELSE latest.registration_depth END AS queued,
           CASE WHEN live.daemons = 0 THEN looked.is_estimated ELSE NOT latest.registration_depth_exact END AS is_estimated,
           CASE WHEN live.daemons > 0 THEN latest.oldest_registration_at
                WHEN looked.is_estimated AND looked.queued > 0 THEN least(looked.oldest_queued_at, latest.oldest_registration_at)
                ELSE looked.oldest_queued_at END AS oldest_queued_at,
           CASE WHEN live.daemons > 0 THEN latest.registration_wait_reason WHEN looked.queued > 0 THEN 'no daemon reports' END AS wait_reason
    FROM live LEFT JOIN looked_at_registrations AS looked ON true LEFT JOIN latest ON true
), rejected_registrations AS MATERIALIZED (
    SELECT l.counted AS registrations, l.as_of FROM tokenkeeper.look_at_rows('rejected_registration') AS l
), registrations_rejected_lately AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.rejected_registration') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.rejected_registration AS r
                                            WHERE r.rejected_at > clock_timestamp() - interval '1 hour' LIMIT 10000) AS r)
                ELSE (SELECT c.rows FROM tokenkeeper.status_cache AS c WHERE c.source = 'rejected_registration within an hour'
                        AND c.as_of > clock_timestamp() - interval '10 minutes') END AS registrations
), tokens AS (
    SELECT coalesce(sum(c.tokens), 0)::bigint AS total,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)::bigint AS active,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'stale'), 0)::bigint AS stale,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'suspect'), 0)::bigint AS suspect,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'superseded'), 0)::bigint AS superseded,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'unregistered_by_app'), 0)::bigint AS unregistered_by_app
    FROM tokenkeeper.token_count AS c
), rejected AS MATERIALIZED (
    SELECT l.counted AS results, l.as_of FROM tokenkeeper.look_at_rows('rejected_result') AS l
), rejected_lately AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.rejected_result') <= 4194304
                THEN (SELECT count(*) FROM (SELECT FROM tokenkeeper.rejected_result AS r
                                            WHERE r.rejected_at > clock_timestamp() - interval '1 hour' LIMIT 10000) AS r)
                ELSE (SELECT c.rows FROM tokenkeeper.status_cache AS c WHERE c.source = 'rejected_result within an hour'
                        AND c.as_of > clock_timestamp() - interval '10 minutes') END AS results
), held AS MATERIALIZED (
    SELECT l.counted AS results, l.as_of FROM tokenkeeper.look_at_rows('held_result') AS l
), held_logouts AS MATERIALIZED (
    SELECT l.counted AS logouts, l.as_of FROM tokenkeeper.look_at_rows('held_registration') AS l
), guards AS (
    SELECT array_agg(ROW('guard_tripped', t.environment, t.topic, format('the mass-failure guard of %s (%s) tripped at %s UTC: %s would suppress %s of %s active tokens within a day%s; '
                         'see `tokenkeeperd held list`', tokenkeeper.without_backticks(t.topic), t.environment,
                         to_char(g.tripped_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'),
                         tokenkeeper.guarded_words(g.cause), g.tokens, coalesce(g.active, 0),
                         CASE g.cause WHEN 'suspect' THEN tokenkeeper.elsewhere_words(t.topic_id, t.environment) ELSE '' END))::tokenkeeper.page
                     ORDER BY g.tripped_at) AS pages
    FROM (SELECT * FROM tokenkeeper.tripped_guard ORDER BY tripped_at LIMIT 20) AS g JOIN tokenkeeper.topic AS t USING (topic_id)
), waves AS (
    SELECT array_agg(format('since %s UTC, %s of %s active tokens of %s (%s) have turned stale (%s%%), far more than usual; '
                         'if that is a mistake: %s', to_char(w.since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), w.tokens, w.active,
                         tokenkeeper.without_backticks(t.topic), t.environment, floor(w.tokens * 100 / greatest(w.active, 1)),
                         CASE WHEN w.undo LIKE '%`%' THEN 'see tokenkeeper.stale_wave' ELSE '`' || w.undo || '`' END) ORDER BY w.since) AS words
    FROM (SELECT * FROM tokenkeeper.stale_wave ORDER BY since LIMIT 20) AS w JOIN tokenkeeper.topic AS t USING (topic_id)
), swept AS (
    SELECT s.* FROM tokenkeeper.sweep_run AS s
    WHERE s.outcome IN ('finished', 'failed', 'interrupted') AND NOT s.dry_run ORDER BY s.run_id DESC LIMIT 1
), refused AS (
    SELECT array_agg(format('the last sweep refused to prune %s of the %s tokens of %s (%s), more than %s; '
                         'see `tokenkeeperd sweep --dry-run`, and `--force`', r.tokens, r.of_tokens, tokenkeeper.without_backticks(r.topic),
                         r.environment, r.max_tokens)
                     ORDER BY r.topic, r.environment) AS words
    FROM (SELECT s.topic, s.environment, sum(s.tokens) AS tokens, max(s.of_tokens) AS of_tokens, max(s.max_tokens) AS max_tokens
          FROM swept JOIN tokenkeeper.sweep_topic AS s USING (run_id) WHERE s.refused GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 20) AS r
), cached AS (
    -- Warnings that a daemon has found. It looks again within minutes, so older warnings are outdated.
    SELECT array_agg(tokenkeeper.without_backticks(w.words) ORDER BY c.source, w.position) AS words
    FROM tokenkeeper.status_cache AS c CROSS JOIN unnest(c.words) WITH ORDINALITY AS w (words, position)
    WHERE c.as_of > clock_timestamp() - interval '1 hour'
), crowded AS (
    SELECT array_agg(tokenkeeper.without_backticks(format('device_id %L of %s (%s) has %s tokens: %s',
                            left(c.device_id, 40) || CASE WHEN length(c.device_id) > 40 THEN '...' ELSE '' END, c.topic, c.environment,
                            CASE WHEN n.tokens > 20 THEN 'more than 20' ELSE n.tokens::text END,
                            CASE WHEN n.tokens > 20 THEN 'it is a constant, and supersedes none of them' ELSE 'is it a constant?' END))
                     ORDER BY c.topic, c.environment) AS words
    FROM (SELECT DISTINCT ON (o.topic, o.environment) o.topic, o.environment, o.device_id FROM tokenkeeper.operation AS o
          WHERE o.operation = 'device_crowded' AND o.at > clock_timestamp() - interval '25:00' AND o.device_id IS NOT NULL
          ORDER BY o.topic, o.environment, o.at DESC LIMIT 20) AS c
    JOIN tokenkeeper.topic AS t ON t.topic = c.topic AND t.environment = c.environment
    CROSS JOIN LATERAL (
        SELECT count(*) AS tokens FROM (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = c.device_id AND l.topic_id + 0 = t.topic_id LIMIT 21) AS l) AS n
    WHERE n.tokens >= 8
), passing AS (
    SELECT ARRAY[format('rows of topics that have moved to another database have been waiting since %s UTC to be passed on, such as %s: a daemon with map.file and '
                        'map.database does that', to_char(min(m.queued_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), min(m.topic))] AS words
    FROM (SELECT r.queued_at, r.topic FROM tokenkeeper.moved_row AS r ORDER BY r.row_id LIMIT 1) AS m
    HAVING min(m.queued_at) < clock_timestamp() - interval '5 minutes'
), locked AS (
    SELECT array_agg(format('daemon %s has been waiting for a lock since %s UTC: %s', d.daemon_id,
                            to_char(d.waiting_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), tokenkeeper.without_backticks(d.waiting_for)) ORDER BY d.daemon_id) AS words
    FROM tokenkeeper.daemon AS d
    WHERE d.waiting_for IS NOT NULL AND d.stopped_at IS NULL AND d.heartbeat_at > clock_timestamp() - interval '1 minute'
), unreported AS (
    -- The tables in which daemons report. What they say there is old while somebody has locked one of them.
    SELECT array_agg(format('daemons cannot report, because tokenkeeper.%s is locked (%s) by %s', h.relname, h.mode,
                            tokenkeeper.without_backticks(h.who)) ORDER BY h.relname) AS words
    FROM tokenkeeper.lock_holder AS h
    WHERE h.relname IN ('daemon', 'sending_daemon', 'status_cache')
), undoing AS (
    SELECT array_agg(format('an undo of %s (%s) is in progress: %s left; see tokenkeeper.reinstatement',
                            tokenkeeper.without_backticks(r.topic), r.environment,
                            CASE r.remaining WHEN 1 THEN '1 result is' WHEN 10000 THEN '10000 or more results are'
                                             ELSE r.remaining || ' results are' END) ORDER BY r.at) AS words
    FROM (SELECT * FROM tokenkeeper.reinstatement
          WHERE finished_at IS NULL AND at < clock_timestamp() - interval '1 minute' ORDER BY at LIMIT 5) AS r
), waiting AS MATERIALIZED (
    SELECT l.counted AS requests, l.as_of FROM tokenkeeper.look_at_rows('send_request') AS l
), in_campaigns AS (
    -- A batch that has ended is deleted. What is tried again has moved to send_request.
    SELECT coalesce(sum(b.requests - bit_count(b.ended)), 0)::bigint
           + (SELECT count(*) FROM (SELECT FROM tokenkeeper.send_request AS r WHERE r.campaign_id IS NOT NULL LIMIT 10000) AS r) AS requests
    FROM tokenkeeper.campaign_batch AS b
), due AS (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.send_request') <= 4194304
                THEN (SELECT min(coalesce(r.scheduled_at, r.queued_at)) FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL)
                ELSE (SELECT c.oldest_due_at FROM tokenkeeper.status_cache AS c
                      WHERE c.source = 'send_request' AND c.as_of > clock_timestamp() - interval '10 minutes') END AS at
), failed AS MATERIALIZED (
    SELECT l.counted AS requests, l.as_of FROM tokenkeeper.look_at_rows('failed_send') AS l
), sending AS (
    SELECT s.* FROM tokenkeeper.sending_daemon AS s WHERE s.heartbeat_at > clock_timestamp() - interval '60 seconds' AND s.stopped_at IS NULL
), paused AS (
    SELECT array_agg(ROW('topic_paused', h.environment, h.topic, format('sending to %s (%s) is paused since %s UTC: %s; to go on, run: %s',
                            tokenkeeper.without_backticks(h.topic), h.environment, to_char(h.paused_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'),
                            tokenkeeper.without_backticks(h.reason),
                            CASE WHEN h.topic LIKE '%`%' THEN 'tokenkeeper.resume_sending'
                                 ELSE format('`SELECT tokenkeeper.resume_sending(%L, %L)`', h.topic, h.environment) END))::tokenkeeper.page
                     ORDER BY h.paused_at) AS pages
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
    -- What not all of them have is a fault of these hosts: a clock, an old key, a firewall.
    SELECT array_agg(CASE WHEN w.daemons < (SELECT count(*) FROM sending) THEN 'on ' || w.hosts || ': ' ELSE '' END || w.words ORDER BY w.words) AS words
    FROM (SELECT p.words, count(*) AS daemons, string_agg(DISTINCT regexp_replace(s.daemon_id COLLATE "C", '/[^/]*/[^/]*$', ''), ', ') AS hosts
          FROM sending AS s CROSS JOIN unnest(s.problems) AS p (words) GROUP BY p.words) AS w
), chores AS (
    SELECT array_agg(DISTINCT w.words) AS words
    FROM (SELECT unnest(d.failing_chores) AS words FROM tokenkeeper.daemon AS d
          WHERE d.heartbeat_at > clock_timestamp() - interval '30 seconds' AND d.stopped_at IS NULL LIMIT 20) AS w
), attached AS (
    SELECT array_agg(regexp_replace(tokenkeeper.without_backticks(CASE WHEN a.fault IS NOT NULL
                          THEN format('the changes of the attached table %s have not arrived since %s UTC: %s; see tokenkeeper.attachment', a.name,
                                      to_char(a.fault_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), a.fault)
                          WHEN a.failed_at > clock_timestamp() - interval '1 day'
                          THEN format('%s of the attached table %s could not be queued, the last at %s UTC: %s; see tokenkeeper.attachment',
                                      CASE a.failures WHEN 1 THEN '1 change' ELSE a.failures || ' changes' END, a.name,
                                      to_char(a.failed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), coalesce(a.failure, 'no message'))
                          WHEN greatest(a.attached_at, a.checked_at) < clock_timestamp() - interval '2 days'
                          THEN format('the attached table %s %s: let its owner run tokenkeeperd backfill %1$s --repair once a day', a.name,
                                      coalesce('was last checked at ' || to_char(a.checked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI') || ' UTC', 'was never checked'))
                          ELSE format('the attached table %s and the ledger differed in %s at %s UTC', a.name,
                                      CASE a.differences WHEN 1 THEN '1 token' ELSE a.differences || ' tokens' END,
                                      to_char(a.checked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')) END),
                                    '[[:cntrl:]]', '?', 'g')
                     ORDER BY a.name)
           || CASE WHEN max(a.faulty) > count(*) THEN ARRAY['more attached tables have faults: ' || max(a.faulty) - count(*) || '; see tokenkeeper.attachment'] END AS words
    FROM (SELECT f.* FROM (
              -- Two of each owner, so that nobody hides the faults of others.
              SELECT t.*, row_number() OVER (PARTITION BY c.relowner ORDER BY t.name) AS nth, count(*) OVER () AS faulty
              FROM tokenkeeper.attached_table AS t LEFT JOIN pg_class AS c ON c.oid = t.table_id
              WHERE t.fault IS NOT NULL OR t.failed_at > clock_timestamp() - interval '1 day' OR t.differences > 0
                 OR greatest(t.attached_at, t.checked_at) < clock_timestamp() - interval '2 days') AS f
          WHERE f.nth <= 2 ORDER BY f.name LIMIT 20) AS a
), stray AS (
    -- A dump from elsewhere has brought them, and nobody knows the source of what they queue.
    SELECT array_agg(format('the table %s has triggers of an attachment that this database does not know, and what they queue is rejected; let its owner run '
                            || CASE WHEN t.name LIKE '%`%' THEN 'tokenkeeper.detach' ELSE '`SELECT tokenkeeper.detach(%L)`' END,
                            tokenkeeper.without_backticks(t.name), t.name) ORDER BY t.name) AS words
    FROM (SELECT DISTINCT regexp_replace(format('%I.%I', n.nspname, c.relname), '[[:cntrl:]]', '?', 'g') AS name
          FROM pg_trigger AS g JOIN pg_class AS c ON c.oid = g.tgrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
          WHERE g.tgparentid = 0 AND g.tgname ~ '^tokenkeeper_(insert|update|delete)_[0-9]+$'
            AND NOT EXISTS (SELECT FROM tokenkeeper.attached_table AS a
                            WHERE a.table_id = c.oid AND a.source_id::text = substring(g.tgname FROM '[0-9]+$'))
          ORDER BY 1 LIMIT 20) AS t
), stuck AS (
    -- A paused topic has a warning of its own.
    SELECT array_agg(ROW('campaign_waits', c.environment, c.topic, c.words)::tokenkeeper.page ORDER BY c.due_at)
               FILTER (WHERE c.due_at < clock_timestamp() - interval '5 minutes') AS old,
           array_agg(c.words ORDER BY c.due_at)
               FILTER (WHERE c.due_at >= clock_timestamp() - interval '5 minutes') AS new
    FROM (SELECT w.due_at, a.environment, a.topic, tokenkeeper.without_backticks(format('campaign %s of %s (%s) has been due since %s UTC: %s', w.campaign_id, a.topic, a.environment,
                                                                to_char(w.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'), w.reason)) AS words
          FROM tokenkeeper.campaign_wait AS w JOIN tokenkeeper.campaign AS a USING (campaign_id)
          WHERE w.needs_help AND w.due_at < clock_timestamp() - interval '1 minute' ORDER BY w.due_at LIMIT 20) AS c
), overdue AS MATERIALIZED (
    SELECT CASE WHEN pg_relation_size('tokenkeeper.send_request') <= 4194304
                THEN ARRAY(SELECT o FROM tokenkeeper.overdue_requests() AS o)
                ELSE coalesce((SELECT c.pages FROM tokenkeeper.status_cache AS c
                               WHERE c.source = 'send_request' AND c.as_of > clock_timestamp() - interval '10 minutes'),
                              ARRAY(SELECT o FROM tokenkeeper.overdue_requests() AS o)) END AS pages
), crashing AS (
    -- A daemon that stops in order signs off. One that is only silent has no successor.
    SELECT array_agg(ROW('crash_loop', '', '', format('daemons on %s have ended %s times within 15 minutes without stopping in order; on that host, run: '
                                                      'journalctl -u tokenkeeperd', c.host, c.ends))::tokenkeeper.page ORDER BY c.host) AS pages
    FROM (SELECT d.host, count(*) AS ends
          FROM (SELECT *, regexp_replace(daemon_id COLLATE "C", '/[^/]*/[^/]*$', '') AS host FROM tokenkeeper.daemon) AS d
          WHERE d.started_at > clock_timestamp() - interval '15 minutes' AND d.stopped_at IS NULL
            AND EXISTS (SELECT FROM tokenkeeper.daemon AS n
                        WHERE n.started_at > d.heartbeat_at AND regexp_replace(n.daemon_id COLLATE "C", '/[^/]*/[^/]*$', '') = d.host)
          GROUP BY 1 HAVING count(*) >= 4 ORDER BY 1 LIMIT 20) AS c
), critical AS (
    -- The one place that decides what is critical: what somebody has to get up for. All other warnings can wait for the morning.
    SELECT c.pages, ARRAY(SELECT p.warning FROM unnest(c.pages) WITH ORDINALITY AS p ORDER BY p.ordinality) AS words
    FROM (SELECT ARRAY(SELECT ROW(p.cause, '', '', p.warning)::tokenkeeper.page FROM (VALUES
               (1, 'no_daemon', CASE WHEN unreported.words IS NOT NULL THEN NULL
                                     WHEN latest.heartbeat_at IS NULL THEN 'no daemon has ever run on this database'
                                     WHEN live.daemons = 0 THEN 'no daemon is running; the last was seen at '
                                         || to_char(latest.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' END),
               (2, 'results_refused', 'results stay in the queue because PostgreSQL reports: ' || latest.problem),
               (3, 'results_wait', CASE WHEN queue.oldest_queued_at < clock_timestamp() - interval '5 minutes'
                   THEN 'results have been waiting for longer than five minutes' || coalesce(', because ' || queue.wait_reason, '') END),
               (4, 'registrations_refused', 'registrations stay in the queue because PostgreSQL reports: ' || latest.registration_problem),
               (5, 'registrations_wait', CASE WHEN registrations.oldest_queued_at < clock_timestamp() - interval '5 minutes'
                   THEN 'registrations have been waiting for longer than five minutes' || coalesce(', because ' || registrations.wait_reason, '') END))
               AS p (position, cause, warning) WHERE p.warning IS NOT NULL ORDER BY p.position)
           || overdue.pages || crashing.pages || guards.pages || paused.pages || stuck.old AS pages
        FROM stuck CROSS JOIN live CROSS JOIN queue CROSS JOIN registrations CROSS JOIN guards CROSS JOIN paused CROSS JOIN unreported
        CROSS JOIN overdue CROSS JOIN crashing LEFT JOIN latest ON true) AS c
)
SELECT queue.results AS queue_depth,
       queue.is_estimated AS queue_depth_estimated,
       clock_timestamp() - queue.oldest_queued_at AS oldest_result_age,
       queue.wait_reason AS results_wait_because,
       queue.as_of AS queue_as_of,
       rejected.results AS rejected,
       held.results AS held,
       tokens.active AS tokens_active,
       tokens.stale AS tokens_stale,
       tokens.suspect AS tokens_suspect,
       tokens.superseded AS tokens_superseded,
       tokens.unregistered_by_app AS tokens_unregistered_by_app,
       swept.finished_at AS last_sweep_at,
       swept.trigger AS last_sweep_trigger,
       swept.outcome AS last_sweep_outcome,
       live.daemons AS live_daemons,
       critical.words || array_remove(ARRAY[
           CASE WHEN held.results > 0
                THEN CASE held.results WHEN 1 THEN '1 result is' WHEN 10000 THEN '10000 or more results are'
                                       ELSE held.results || ' results are' END
                    || ' held by the mass-failure guard; see `tokenkeeperd held list`' END,
           CASE WHEN held_logouts.logouts > 0
                THEN CASE held_logouts.logouts WHEN 1 THEN '1 logout is' WHEN 10000 THEN '10000 or more logouts are'
                                               ELSE held_logouts.logouts || ' logouts are' END
                    || ' held by the mass-failure guard; see `tokenkeeperd held list`' END,
           CASE WHEN rejected.results > 0
                THEN CASE rejected.results WHEN 1 THEN '1 result' WHEN 10000 THEN '10000 or more results' ELSE rejected.results || ' results' END
                    || ' could not be understood'
                    || CASE WHEN rejected_lately.results > 0
                            THEN ', ' || CASE WHEN rejected_lately.results = 10000 THEN '10000 or more'
                                              ELSE rejected_lately.results::text END || ' within the last hour' ELSE '' END
                    || '; see `tokenkeeperd rejected list`' END,
           CASE WHEN rejected_registrations.registrations > 0
                THEN CASE rejected_registrations.registrations WHEN 1 THEN '1 registration' WHEN 10000 THEN '10000 or more registrations'
                                                               ELSE rejected_registrations.registrations || ' registrations' END
                    || ' could not be understood'
                    || CASE WHEN registrations_rejected_lately.registrations > 0
                            THEN ', ' || CASE WHEN registrations_rejected_lately.registrations = 10000 THEN '10000 or more'
                                              ELSE registrations_rejected_lately.registrations::text END || ' within the last hour' ELSE '' END
                    || '; see `tokenkeeperd rejected list`' END,
           CASE WHEN swept.outcome = 'failed' THEN 'the last sweep failed: ' || coalesce(swept.message, 'no message') END,
           CASE WHEN coalesce(swept.finished_at, latest.started_at) < clock_timestamp() - 2 * latest.sweep_interval - interval '1 minute'
                THEN 'no sweep has finished within twice its interval' END
       ], NULL) || waves.words || tokenkeeper.loss_warnings() || refused.words || cached.words || crowded.words || unreported.words || locked.words || undoing.words
           || (SELECT passing.words FROM passing)
           || expiring.words || problematic.words || chores.words || attached.words || stray.words || stuck.new
           || CASE WHEN failed.requests > 0
                   THEN ARRAY[CASE failed.requests WHEN 1 THEN '1 request' WHEN 10000 THEN '10000 or more requests'
                                                   ELSE failed.requests || ' requests' END || ' failed; see tokenkeeper.failed_send'] END
           || CASE WHEN waiting.requests > 0 AND coalesce(cardinality(overdue.pages), 0) = 0 AND NOT EXISTS (SELECT FROM sending)
                   THEN ARRAY[CASE waiting.requests WHEN 1 THEN '1 request waits' WHEN 10000 THEN '10000 or more requests wait'
                                                    ELSE waiting.requests || ' requests wait' END
                              || ' in tokenkeeper.send_request, and no running daemon sends'] END AS warnings,
       waiting.requests + in_campaigns.requests AS requests,
       CASE WHEN due.at < clock_timestamp() THEN clock_timestamp() - due.at END AS oldest_due_request_age,
       failed.requests AS failed_sends,
       expiring.expires_at AS credential_expires_at,
       critical.words AS critical_warnings,
       registrations.queued AS registration_queue_depth,
       registrations.is_estimated AS registration_queue_estimated,
       clock_timestamp() - registrations.oldest_queued_at AS oldest_registration_age,
       registrations.wait_reason AS registrations_wait_because,
       rejected_registrations.registrations AS rejected_registrations,
       (SELECT count(*) FROM tokenkeeper.campaign AS c WHERE c.state IN ('waiting', 'running')) AS open_campaigns,
       critical.pages,
       in_campaigns.requests AS campaign_requests,
       live.results_per_second,
       live.registrations_per_second,
       (SELECT sum(s.requests_per_second) FROM sending AS s) AS requests_per_second,
       clock_timestamp() AS as_of,
       rejected.as_of AS rejected_as_of,
       held.as_of AS held_as_of,
       waiting.as_of AS requests_as_of,
       failed.as_of AS failed_sends_as_of,
       rejected_registrations.as_of AS rejected_registrations_as_of
FROM live
CROSS JOIN in_campaigns
CROSS JOIN critical
CROSS JOIN overdue
CROSS JOIN queue
CROSS JOIN due
CROSS JOIN waiting
CROSS JOIN failed
CROSS JOIN expiring
CROSS JOIN problematic
CROSS JOIN chores
CROSS JOIN attached
CROSS JOIN stray
CROSS JOIN stuck
CROSS JOIN tokens
CROSS JOIN rejected
CROSS JOIN rejected_lately
CROSS JOIN registrations
CROSS JOIN rejected_registrations
CROSS JOIN registrations_rejected_lately
CROSS JOIN held
CROSS JOIN held_logouts
CROSS JOIN waves
CROSS JOIN refused
CROSS JOIN cached
CROSS JOIN crowded
CROSS JOIN unreported
CROSS JOIN locked
CROSS JOIN undoing
LEFT JOIN latest ON true
LEFT JOIN swept ON true;
COMMENT ON VIEW tokenkeeper.status_detail IS 'Internal: the row of the view status. Read that view, which does not wait for locks.';

CREATE OR REPLACE FUNCTION tokenkeeper.read_status() RETURNS SETOF tokenkeeper.status_detail
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '200ms'
-- It would compile a hundred small queries, which takes seconds.
SET jit = off
AS $$
DECLARE
    known tokenkeeper.status_detail;
BEGIN
    BEGIN
        RETURN QUERY SELECT * FROM tokenkeeper.status_detail;
        RETURN;
    EXCEPTION WHEN lock_not_available THEN
        NULL; -- Another session has locked a table of the schema against reading.
    END;
    BEGIN
        SELECT d.queue_depth, NOT d.queue_depth_exact, clock_timestamp() - d.oldest_queued_at, d.heartbeat_at, d.wait_reason,
               d.registration_depth, NOT d.registration_depth_exact, clock_timestamp() - d.oldest_registration_at, d.registration_wait_reason
        INTO known.queue_depth, known.queue_depth_estimated, known.oldest_result_age, known.queue_as_of, known.results_wait_because,
             known.registration_queue_depth, known.registration_queue_estimated, known.oldest_registration_age, known.registrations_wait_because
        FROM tokenkeeper.daemon AS d ORDER BY d.heartbeat_at DESC LIMIT 1;
        SELECT count(*) INTO known.live_daemons FROM tokenkeeper.daemon AS d
        WHERE d.heartbeat_at > clock_timestamp() - interval '30 seconds' AND d.stopped_at IS NULL;
        IF known.live_daemons = 0 THEN
            SELECT l.queued, l.is_estimated, clock_timestamp() - l.oldest_queued_at, clock_timestamp()
            INTO known.queue_depth, known.queue_depth_estimated, known.oldest_result_age, known.queue_as_of
            FROM tokenkeeper.look_at_queue('send_result') AS l;
            SELECT l.queued, l.is_estimated, clock_timestamp() - l.oldest_queued_at
            INTO known.registration_queue_depth, known.registration_queue_estimated, known.oldest_registration_age
            FROM tokenkeeper.look_at_queue('registration') AS l;
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    SELECT array_agg(format('most of this status is unknown, because tokenkeeper.%s is locked (%s) by %s', h.relname, h.mode,
                            tokenkeeper.without_backticks(h.who)) ORDER BY h.relname)
    INTO known.warnings
    FROM (SELECT * FROM tokenkeeper.lock_holder WHERE mode = 'ACCESS EXCLUSIVE' ORDER BY relname LIMIT 20) AS h;
    -- The lock may have ended in the meantime.
    known.warnings := coalesce(known.warnings, ARRAY['most of this status is unknown, because of a lock that has just ended: look again']);
    known.pages := ARRAY(SELECT ROW(p.cause, '', '', p.warning)::tokenkeeper.page FROM (VALUES
        ('no_daemon', known.live_daemons = 0, 'no daemon is running'),
        ('results_wait', known.oldest_result_age > interval '5 minutes', 'results have been waiting for longer than five minutes'),
        ('registrations_wait', known.oldest_registration_age > interval '5 minutes', 'registrations have been waiting for longer than five minutes'))
        AS p (cause, is_so, warning) WHERE p.is_so);
    known.critical_warnings := ARRAY(SELECT p.warning FROM unnest(known.pages) AS p);
    known.warnings := known.critical_warnings || known.warnings;
    known.as_of := clock_timestamp();
    RETURN NEXT known;
END
$$;
COMMENT ON FUNCTION tokenkeeper.read_status() IS
    'Internal: the row of the view status. If another session has locked a table of the schema against reading, it does not wait, but names that session and '
    'what the daemons last saw of the queue; the other columns are null.';

CREATE OR REPLACE VIEW tokenkeeper.status AS
SELECT s.queue_depth, s.queue_depth_estimated, s.oldest_result_age, s.results_wait_because, s.queue_as_of, s.rejected, s.held, s.tokens_active,
       s.tokens_stale, s.tokens_suspect, s.tokens_superseded, s.tokens_unregistered_by_app, s.last_sweep_at, s.last_sweep_trigger,
       s.last_sweep_outcome, s.live_daemons, s.warnings, s.requests, s.oldest_due_request_age, s.failed_sends, s.credential_expires_at,
       s.critical_warnings, s.registration_queue_depth, s.registration_queue_estimated, s.oldest_registration_age, s.registrations_wait_because,
       s.rejected_registrations, s.open_campaigns, s.campaign_requests, s.results_per_second, s.registrations_per_second, s.requests_per_second,
       s.as_of, s.rejected_as_of, s.held_as_of, s.requests_as_of, s.failed_sends_as_of, s.rejected_registrations_as_of
FROM tokenkeeper.read_status() AS s;
COMMENT ON VIEW tokenkeeper.status IS
    'One row: the state of the system. Columns of registrations mean what those of results mean. Most columns are null while another session has locked a '
    'table against reading; warnings then names it.';
COMMENT ON COLUMN tokenkeeper.status.warnings IS 'What a person must attend to, the critical ones first; empty if all is well.';
COMMENT ON COLUMN tokenkeeper.status.critical_warnings IS
    'The warnings of critical_warning. With them `tokenkeeperd status --check` exits with 2, with others only with 1.';
COMMENT ON COLUMN tokenkeeper.status.queue_depth IS 'Results in the queue, as a daemon last saw it, or now if none runs.';
COMMENT ON COLUMN tokenkeeper.status.queue_as_of IS 'When the queues and the rates were read.';
COMMENT ON COLUMN tokenkeeper.status.results_wait_because IS
    'A lock and who holds it, what PostgreSQL refuses, or that a daemon is draining them; null if none waits.';
COMMENT ON COLUMN tokenkeeper.status.oldest_due_request_age IS
    'How long the oldest due request has waited in send_request, also for a paused topic. For a large table: as of the last ten minutes.';
COMMENT ON COLUMN tokenkeeper.status.queue_depth_estimated IS 'True if the queue is large or locked.';
COMMENT ON COLUMN tokenkeeper.status.rejected IS
    'Rows of rejected_result, counted up to 10000. For a large table: a daemon''s count of the last ten minutes, or an estimate.';
COMMENT ON COLUMN tokenkeeper.status.open_campaigns IS 'Campaigns that wait or run; not paused or cancelled ones.';
COMMENT ON COLUMN tokenkeeper.status.live_daemons IS 'Daemons that reported within the last 30 seconds.';
COMMENT ON COLUMN tokenkeeper.status.held IS 'As rejected, for held_result.';
COMMENT ON COLUMN tokenkeeper.status.requests IS 'Requests that wait or are in flight: campaign_requests and single ones, counted as rejected is.';
COMMENT ON COLUMN tokenkeeper.status.campaign_requests IS 'Requests of campaigns that have not ended. Of those that are retried, 10000 are counted.';
COMMENT ON COLUMN tokenkeeper.status.results_per_second IS
    'Results that the running daemons recorded per second, over some five seconds. Null if none runs.';
COMMENT ON COLUMN tokenkeeper.status.registrations_per_second IS 'Only those that went through the queue.';
COMMENT ON COLUMN tokenkeeper.status.requests_per_second IS 'Requests to APNs that ended. Null if no running daemon sends.';
COMMENT ON COLUMN tokenkeeper.status.as_of IS 'When everything was read that has no as_of of its own.';
COMMENT ON COLUMN tokenkeeper.status.failed_sends IS 'As rejected, for failed_send.';
COMMENT ON COLUMN tokenkeeper.status.credential_expires_at IS 'When the first certificate of the running daemons expires; provider tokens do not.';

CREATE OR REPLACE VIEW tokenkeeper.critical_warning AS
SELECT p.cause, p.environment, p.topic, p.warning
FROM tokenkeeper.read_status() AS s CROSS JOIN LATERAL unnest(s.pages) WITH ORDINALITY AS p
ORDER BY p.ordinality;
COMMENT ON VIEW tokenkeeper.critical_warning IS
    'What somebody has to get up for: a row for each critical warning of status. Prometheus pages for the same rows.';
COMMENT ON COLUMN tokenkeeper.critical_warning.cause IS
    'no_daemon: none reports. results_refused, registrations_refused: PostgreSQL refuses what records them. results_wait, registrations_wait, requests_wait, '
    'campaign_waits: for five minutes, although they are due. crash_loop: daemons of one host have ended four times within 15 minutes without stopping in order. '
    'guard_tripped: the mass-failure guard holds results or logouts. topic_paused: a person has paused sending.';
COMMENT ON COLUMN tokenkeeper.critical_warning.topic IS 'Empty, like environment, if the warning is about the whole database.';
