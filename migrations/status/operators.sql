-- For operators: policies, guards, reinstatements, and why a campaign waits.

CREATE OR REPLACE VIEW tokenkeeper.topic_policy AS
SELECT t.environment, t.topic, t.gate, t.suppressed_retention, t.dormant_after, t.guard_allowance, t.guard_max_share,
       t.prune_allowance, t.prune_max_share, t.first_seen, t.background_per_hour, t.max_per_second, t.alerts_per_day, t.confirm_share
FROM tokenkeeper.topic AS t;
ALTER VIEW tokenkeeper.topic_policy ALTER COLUMN environment SET DEFAULT 'production';
COMMENT ON VIEW tokenkeeper.topic_policy IS
    'One row per topic and environment. Change it by UPDATE, which warns if it matches no topic, or by INSERT for a new one. Takes effect at once in the gate, and in the daemons with '
    'the next batch or sweep. Null means the default: enforce for the gate, otherwise the setting named here.';
COMMENT ON COLUMN tokenkeeper.topic_policy.gate IS
    'enforce; or observe: the gate passes each token that can be read, and token.sendable shows what it would refuse.';
COMMENT ON COLUMN tokenkeeper.topic_policy.suppressed_retention IS
    'How long a suppressed token is kept after the ledger learned of it: 1 hour to 3650 days; default sweep.suppressed_retention.';
COMMENT ON COLUMN tokenkeeper.topic_policy.dormant_after IS
    'Prune tokens that were not registered again for this long: 1 day to 3650 days, 0 for never; default sweep.dormant_after.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_allowance IS
    'How many tokens a cause may suppress within a day whatever their share; default guard.allowance.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_max_share IS
    'The share of the active tokens beyond which suspects, or logouts from a source, of a day are held: 0.005 is 0.5 percent, 1 turns the guard off; default '
    'guard.max_share.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_allowance IS
    'How many tokens sweeps may prune within a day whatever their share; default sweep.prune_allowance.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_max_share IS
    'The share of the topic''s tokens beyond which a sweep refuses to prune: 0.1 is 10 percent, 1 is no limit; default sweep.max_prune_share.';
COMMENT ON COLUMN tokenkeeper.topic_policy.background_per_hour IS
    'Background pushes to a device within an hour, 0 for no limit; default send.background_per_hour.';
COMMENT ON COLUMN tokenkeeper.topic_policy.max_per_second IS
    'Requests per second by all daemons together, campaigns and single requests; default no limit.';
COMMENT ON COLUMN tokenkeeper.topic_policy.alerts_per_day IS
    'Alerts to a device within a day (UTC), from campaigns and single requests; more go to suppressed_send. 0 or null: no limit.';
COMMENT ON COLUMN tokenkeeper.topic_policy.confirm_share IS
    'The share of the active tokens beyond which, and beyond 50 tokens, enqueue needs confirm => true: 0.5 is 50 percent, 1 is never; default never.';

CREATE OR REPLACE VIEW tokenkeeper.guard AS
SELECT t.environment, t.topic, g.topic_id IS NOT NULL AS tripped, g.tripped_at, coalesce(g.tokens, c.tokens) AS tokens, g.active, g.max_tokens, g.undo_since,
       CASE WHEN g.undo_since IS NOT NULL THEN tokenkeeper.reinstate_command(t.topic, t.environment, g.undo_since, NULL, cause) END AS undo,
       cause
FROM tokenkeeper.tripped_guard AS g
FULL JOIN (
    SELECT s.topic_id, s.cause, sum(s.tokens)::bigint AS tokens FROM tokenkeeper.suppression_count AS s
    WHERE s.hour > now() - interval '24:00' GROUP BY 1, 2 HAVING sum(s.tokens) > 0) AS c USING (topic_id, cause)
JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.guard IS
    'The mass-failure guard by topic and cause: whether it has tripped and holds what follows, and the command that undoes what was recorded before.';
COMMENT ON COLUMN tokenkeeper.guard.tokens IS
    'Tokens that the cause newly suppressed within the last 24 hours; of a tripped guard, those that it had suppressed or would have when it tripped.';
COMMENT ON COLUMN tokenkeeper.guard.active IS 'The active tokens of the topic when it tripped.';
COMMENT ON COLUMN tokenkeeper.guard.max_tokens IS 'How many could then be suppressed within a day.';
COMMENT ON COLUMN tokenkeeper.guard.undo_since IS
    'Where an undo should begin: when the first of what tripped it was received. Null once that is undone.';
COMMENT ON COLUMN tokenkeeper.guard.cause IS 'suspect; unregistered_by_app: logouts from a source; or stale: 410s, only with guard.hold_stale_share.';

CREATE OR REPLACE VIEW tokenkeeper.held AS
SELECT h.topic_id, h.cause, h.token_key, h.queued_at FROM tokenkeeper.held_result AS h
UNION ALL
SELECT h.topic_id, 'unregistered_by_app', h.token_key, h.queued_at FROM tokenkeeper.held_registration AS h;
COMMENT ON VIEW tokenkeeper.held IS 'Internal: what the guard holds, by topic and cause: held_result and held_registration.';

CREATE OR REPLACE VIEW tokenkeeper.reinstatement AS
SELECT t.environment, t.topic, e.since, e.until, e.at, e.done_by, e.exclusion_id, e.finished_at, e.tokens,
       CASE WHEN e.finished_at IS NOT NULL THEN 0 ELSE (
           SELECT count(*) FROM (
               SELECT FROM tokenkeeper.receipt AS r
               WHERE r.topic_id + 0 = e.topic_id AND r.cause = e.cause AND r.received_at BETWEEN e.since AND e.until
                 AND (r.source_id IS NOT NULL OR e.cause <> 'unregistered_by_app') LIMIT 10000) AS l) END AS remaining,
       e.cause
FROM tokenkeeper.exclusion AS e JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.reinstatement IS
    'The windows given to reinstate. The daemons, or `tokenkeeperd reinstate`, undo what was recorded before; until then the tokens stay suppressed.';
COMMENT ON COLUMN tokenkeeper.reinstatement.finished_at IS 'When all of it was undone.';
COMMENT ON COLUMN tokenkeeper.reinstatement.tokens IS 'Tokens made sendable so far.';
COMMENT ON COLUMN tokenkeeper.reinstatement.remaining IS 'Results still to be undone, counted up to 10000.';
COMMENT ON COLUMN tokenkeeper.reinstatement.cause IS
    'suspect, stale (410s), or unregistered_by_app: logouts from a source.';

CREATE OR REPLACE VIEW tokenkeeper.stale_share AS
WITH this AS MATERIALIZED (
    -- Not hour_of: a view calls functions with the rights of its reader.
    SELECT date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00') AS hour
), summed AS (
    -- now(), not clock_timestamp(), which an index cannot use.
    SELECT c.topic_id,
           greatest(sum(c.tokens) FILTER (WHERE c.hour = n.hour), 0) AS this_hour,
           greatest(sum(c.tokens) FILTER (WHERE c.hour = n.hour - interval '1:00'), 0) AS last_hour,
           greatest(sum(c.tokens) FILTER (WHERE c.hour > n.hour - interval '24:00'), 0) AS day
    FROM tokenkeeper.suppression_count AS c CROSS JOIN this AS n WHERE c.cause = 'stale' AND c.hour > now() - interval '25 hours' GROUP BY 1
), active AS (
    SELECT c.topic_id, coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0) AS tokens,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'stale'), 0) AS stale
    FROM tokenkeeper.token_count AS c GROUP BY 1
), measured AS (
    SELECT t.topic_id, t.environment, t.topic, p.period, p.since, n.hour, coalesce(p.newly, 0) AS newly,
           -- Of those that turned stale, some may be active again.
           greatest(coalesce(a.tokens, 0) + least(coalesce(p.newly, 0), coalesce(a.stale, 0)), coalesce(p.newly, 0)) AS active,
           least(extract(epoch FROM p.since - t.first_seen) / 86400, 14) AS days
    FROM tokenkeeper.topic AS t
    CROSS JOIN this AS n
    LEFT JOIN active AS a ON a.topic_id = t.topic_id
    LEFT JOIN summed AS s ON s.topic_id = t.topic_id
    CROSS JOIN LATERAL (VALUES
        -- The larger of the current hour and the one before it, so that a wave does not end with the hour in which it began.
        ('hour', CASE WHEN coalesce(s.this_hour, 0) >= coalesce(s.last_hour, 0) THEN n.hour ELSE n.hour - interval '1:00' END,
         greatest(s.this_hour, s.last_hour)),
        ('day', n.hour - interval '23:00', s.day)) AS p (period, since, newly)
), compared AS (
    SELECT m.*,
           -- Two weeks of a topic: 384 rows. A query reads them only for the topics, and only if it selects the columns, that need them.
           (SELECT coalesce(max(CASE m.period
                       WHEN 'hour' THEN CASE WHEN d.hour < m.hour - interval '1:00' AND d.hour >= m.hour - interval '337:00' THEN d.tokens END
                       ELSE CASE WHEN d.hour <= m.hour - interval '24:00' AND d.hour > m.hour - interval '360:00' THEN d.day END END), 0)
            FROM (SELECT h.hour, h.tokens, sum(h.tokens) OVER (ORDER BY h.hour RANGE BETWEEN '23:00' PRECEDING AND CURRENT ROW) AS day
                  FROM (SELECT c.hour, greatest(sum(c.tokens), 0) AS tokens FROM tokenkeeper.suppression_count AS c
                        WHERE c.topic_id = m.topic_id AND c.cause = 'stale' AND c.hour > now() - interval '16 days' GROUP BY 1) AS h) AS d) AS highest
    FROM measured AS m
)
SELECT m.environment, m.topic, m.period, m.since, m.newly::bigint AS newly_stale, m.active::bigint AS active,
       round(m.newly / nullif(m.active, 0), 6) AS share, round(m.highest / nullif(m.active, 0), 6) AS usual_share,
       greatest(floor(m.days), 0)::integer AS history_days,
       coalesce(m.newly > 50 AND CASE WHEN m.days < 7 THEN m.newly > m.active * 0.05
                                      ELSE m.newly > m.active * 0.01 AND m.newly > 3 * m.highest END, false) AS is_wave,
       w.since AS wave_since, w.undo
FROM compared AS m
LEFT JOIN tokenkeeper.stale_wave AS w ON w.topic_id = m.topic_id;
COMMENT ON VIEW tokenkeeper.stale_share IS
    'Two rows per topic: the share of active tokens that newly turned stale (a 410) within an hour and within a day, and whether that is a wave. Each token '
    'counts once per day, in the hour in which its 410 was queued. Never registered tokens do not count.';
COMMENT ON COLUMN tokenkeeper.stale_share.period IS
    'hour: the current clock hour or the one before, whichever has more; day: the last 24 clock hours, with the current one.';
COMMENT ON COLUMN tokenkeeper.stale_share.newly_stale IS 'Active tokens that turned stale in it, without what was undone.';
COMMENT ON COLUMN tokenkeeper.stale_share.active IS 'Active tokens when the period began.';
COMMENT ON COLUMN tokenkeeper.stale_share.share IS 'newly_stale / active: 0.01 is 1 percent. Null without active tokens.';
COMMENT ON COLUMN tokenkeeper.stale_share.usual_share IS 'The highest share of such a period in the 14 days before.';
COMMENT ON COLUMN tokenkeeper.stale_share.history_days IS 'Days that the topic was known before the period, at most 14.';
COMMENT ON COLUMN tokenkeeper.stale_share.is_wave IS
    'True for more than 50 tokens, 1 percent of the active ones, and three times usual_share; with less than seven days of history, 50 tokens and 5 '
    'percent.';
COMMENT ON COLUMN tokenkeeper.stale_share.wave_since IS 'When the first 410 of the wave was received; null if no daemon has noticed one.';

CREATE OR REPLACE VIEW tokenkeeper.campaign_wait WITH (security_barrier) AS
-- Once for a topic, and not for each of 100,000 campaigns.
WITH fault AS MATERIALIZED (
    SELECT o.topic, o.environment, tokenkeeper.sending_fault(o.topic, o.environment) AS fault
    FROM (SELECT DISTINCT c.topic, c.environment FROM tokenkeeper.campaign AS c WHERE c.ended_at IS NULL AND c.state IN ('waiting', 'running')) AS o
)
SELECT c.campaign_id, w.reason, c.state IN ('waiting', 'running') AND d.due_at < clock_timestamp() AND b.pause IS NULL AND b.fault IS NOT NULL AS needs_help,
       d.due_at
FROM tokenkeeper.campaign AS c
LEFT JOIN fault AS f ON f.topic = c.topic AND f.environment = c.environment AND c.state IN ('waiting', 'running')
CROSS JOIN LATERAL (SELECT coalesce(c.scheduled_at, c.created_at) AS due_at) AS d
CROSS JOIN LATERAL (
    SELECT (SELECT 'sending to ' || c.topic || ' (' || c.environment || ') is paused: ' || p.reason FROM tokenkeeper.paused_topic AS p
            WHERE p.topic = c.topic AND p.environment = c.environment) AS pause,
           CASE WHEN d.due_at <= clock_timestamp() THEN f.fault END AS fault,
           CASE WHEN c.is_addressed AND NOT EXISTS (SELECT FROM tokenkeeper.campaign_batch AS a WHERE a.campaign_id = c.campaign_id)
                THEN (SELECT 'the requests that are left are tried again, the next at '
                             || to_char(r.scheduled_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' || coalesce(': ' || r.last_error, '')
                      FROM tokenkeeper.send_request AS r
                      WHERE r.campaign_id = c.campaign_id AND r.scheduled_at > clock_timestamp() AND isfinite(r.scheduled_at)
                        AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS o
                                        WHERE o.campaign_id = c.campaign_id AND (o.claimed_by IS NOT NULL OR o.scheduled_at < clock_timestamp()))
                      ORDER BY r.scheduled_at LIMIT 1) END AS retry) AS b
CROSS JOIN LATERAL (
    SELECT CASE WHEN c.state = 'paused' THEN 'it is paused; to go on: `tokenkeeperd campaign resume ' || c.campaign_id || '`'
                WHEN c.state = 'cancelled' THEN
                    CASE WHEN EXISTS (SELECT FROM tokenkeeper.campaign_batch AS a WHERE a.campaign_id = c.campaign_id)
                              OR EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.campaign_id = c.campaign_id)
                         THEN 'it is cancelled, and what is in flight has not ended yet'
                         ELSE 'it is cancelled, and no daemon has noted its end yet' END
                WHEN d.due_at > clock_timestamp() THEN 'it is scheduled for ' || to_char(d.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC'
                ELSE coalesce(b.pause, b.fault, b.retry) END AS reason) AS w
WHERE c.ended_at IS NULL AND c.state IN ('waiting', 'running', 'paused', 'cancelled') AND w.reason IS NOT NULL
  -- As campaign_progress.
  AND (c.created_by = tokenkeeper.caller() OR has_column_privilege('tokenkeeper.campaign', 'state', 'SELECT'));
COMMENT ON VIEW tokenkeeper.campaign_wait IS 'Campaigns that have not ended and do not move; a sender sees its own.';
COMMENT ON COLUMN tokenkeeper.campaign_wait.needs_help IS 'True if it is due and no running daemon can send it.';
