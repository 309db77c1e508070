-- oldest daemon: 0.1.0
--
-- The sweep's log and requests, what the daemons tell of themselves, and the one-row view status.

CREATE TABLE tokenkeeper.sweep_run (
    run_id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    trigger           text NOT NULL CHECK (trigger IN ('timer', 'signal', 'sql', 'cli')),
    dry_run           boolean NOT NULL DEFAULT false,
    forced            boolean NOT NULL DEFAULT false,
    requested_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    requested_by      text NOT NULL DEFAULT session_user,
    started_at        timestamptz,
    heartbeat_at      timestamptz,
    finished_at       timestamptz,
    daemon_id         text,
    outcome           text NOT NULL DEFAULT 'requested'
                      CHECK (outcome IN ('requested', 'running', 'finished', 'failed', 'interrupted')),
    pruned_suppressed bigint NOT NULL DEFAULT 0,
    pruned_dormant    bigint NOT NULL DEFAULT 0,
    deleted_events    bigint NOT NULL DEFAULT 0,
    deleted_rejected  bigint NOT NULL DEFAULT 0,
    deleted_runs      bigint NOT NULL DEFAULT 0,
    message           text
);
COMMENT ON TABLE tokenkeeper.sweep_run IS
    'One row a sweep: requested, running, and how it ended; interrupted ones stay, and the next sweep goes on where they stopped.';
COMMENT ON COLUMN tokenkeeper.sweep_run.trigger IS
    'timer; signal (SIGUSR1); sql (request_sweep); cli (tokenkeeperd sweep).';
COMMENT ON COLUMN tokenkeeper.sweep_run.dry_run IS 'Counted only: nothing was deleted.';
COMMENT ON COLUMN tokenkeeper.sweep_run.forced IS 'Asked for with force. There is no limit yet that it would lift.';
COMMENT ON COLUMN tokenkeeper.sweep_run.heartbeat_at IS
    'Set by each batch. A sweep that is silent for a minute has lost its right to go on, and another may start.';
COMMENT ON COLUMN tokenkeeper.sweep_run.pruned_suppressed IS 'Tokens suppressed for longer than sweep.stale_retention.';
COMMENT ON COLUMN tokenkeeper.sweep_run.pruned_dormant IS 'Tokens not registered again within sweep.dormant_after.';

CREATE UNIQUE INDEX sweep_run_one_at_a_time ON tokenkeeper.sweep_run ((true)) WHERE outcome = 'running';
COMMENT ON INDEX tokenkeeper.sweep_run_one_at_a_time IS 'At most one sweep runs, whatever the number of daemons.';
CREATE INDEX sweep_run_requested ON tokenkeeper.sweep_run (run_id) WHERE outcome = 'requested';

CREATE FUNCTION tokenkeeper.request_sweep(dry_run boolean DEFAULT false, force boolean DEFAULT false) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.sweep_run (trigger, dry_run, forced)
    VALUES ('sql', coalesce(request_sweep.dry_run, false), coalesce(request_sweep.force, false))
    RETURNING run_id
$$;
COMMENT ON FUNCTION tokenkeeper.request_sweep(boolean, boolean) IS
    'Asks the running daemons for a sweep; answers its run_id in sweep_run. A daemon takes it up within seconds of the commit.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.request_sweep(boolean, boolean) FROM PUBLIC;

CREATE TABLE tokenkeeper.daemon (
    daemon_id         text PRIMARY KEY,
    version           text NOT NULL,
    started_at        timestamptz NOT NULL,
    beat_at           timestamptz NOT NULL,
    queue_depth       bigint NOT NULL,
    queue_depth_exact boolean NOT NULL,
    oldest_queued_at  timestamptz,
    sweep_interval    interval,
    stopped_at        timestamptz,
    trouble           text
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.daemon IS
    'The heartbeat of each daemon, with what it saw of the queue: status reads it here and never touches the queue. '
    'Rows of daemons that have been silent for a day are deleted.';
COMMENT ON COLUMN tokenkeeper.daemon.trouble IS
    'What keeps results in the queue until a person acts, such as lacking rights or a full disk; else null.';
COMMENT ON COLUMN tokenkeeper.daemon.sweep_interval IS 'Null when the timer is off.';
COMMENT ON COLUMN tokenkeeper.daemon.stopped_at IS 'When it left in order; null while it runs, or when it did not.';
COMMENT ON COLUMN tokenkeeper.daemon.queue_depth_exact IS 'False: estimated from the queue''s size, because it was large.';

CREATE TABLE tokenkeeper.token_count (
    topic_id   integer NOT NULL,
    state      text NOT NULL,
    tokens     bigint NOT NULL,
    counted_at timestamptz NOT NULL,
    PRIMARY KEY (topic_id, state)
);
COMMENT ON TABLE tokenkeeper.token_count IS
    'Tokens by topic and state, counted now and then by a daemon (at most one hundredth of its time), for status.';

CREATE VIEW tokenkeeper.status AS
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
    SELECT count(*) AS results FROM (SELECT FROM tokenkeeper.rejected_result LIMIT 100000) AS r
), swept AS (
    SELECT s.* FROM tokenkeeper.sweep_run AS s
    WHERE s.outcome IN ('finished', 'failed', 'interrupted') AND NOT s.dry_run ORDER BY s.run_id DESC LIMIT 1
)
SELECT latest.queue_depth,
       NOT latest.queue_depth_exact AS queue_depth_estimated,
       clock_timestamp() - latest.oldest_queued_at AS oldest_result_age,
       latest.beat_at AS queue_as_of,
       rejected.results AS rejected,
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
           CASE WHEN rejected.results > 0
                THEN CASE WHEN rejected.results = 100000 THEN '100000 or more' ELSE rejected.results::text END
                    || ' results could not be understood; see tokenkeeper.rejected_result' END,
           CASE WHEN swept.outcome = 'failed' THEN 'the last sweep failed: ' || coalesce(swept.message, 'no message') END,
           CASE WHEN coalesce(swept.finished_at, latest.started_at) < clock_timestamp() - 2 * latest.sweep_interval - interval '1 minute'
                THEN 'no sweep has finished within twice its interval' END
       ], NULL) AS warnings
FROM live
CROSS JOIN tokens
CROSS JOIN rejected
LEFT JOIN latest ON true
LEFT JOIN swept ON true;
COMMENT ON VIEW tokenkeeper.status IS
    'One row: how it goes. The queue as the daemon that reported last saw it; the tokens as they were last counted; warnings in words.';
COMMENT ON COLUMN tokenkeeper.status.queue_depth_estimated IS 'True when queue_depth was estimated from the queue''s size.';
COMMENT ON COLUMN tokenkeeper.status.oldest_result_age IS 'How long the oldest result seen has been waiting; null when none was.';
COMMENT ON COLUMN tokenkeeper.status.rejected IS 'Rows of rejected_result; 100000 means that many or more.';
COMMENT ON COLUMN tokenkeeper.status.live_daemons IS 'Daemons that have reported within the last 30 seconds.';
