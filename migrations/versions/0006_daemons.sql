-- oldest daemon: 0.1.0
--
-- What the daemons report, what they count for status, and the sweep.

CREATE TABLE tokenkeeper.daemon (
    daemon_id         text COLLATE "C" PRIMARY KEY,
    version           text NOT NULL,
    started_at        timestamptz NOT NULL,
    heartbeat_at      timestamptz NOT NULL,
    queue_depth       bigint NOT NULL,
    queue_depth_exact boolean NOT NULL,
    oldest_queued_at  timestamptz,
    sweep_interval    interval,
    stopped_at        timestamptz,
    problem           text,
    waiting_for       text,
    waiting_since     timestamptz,
    wait_reason       text,
    registration_depth       bigint NOT NULL DEFAULT 0,
    registration_depth_exact boolean NOT NULL DEFAULT true,
    oldest_registration_at   timestamptz,
    registration_problem     text,
    registration_wait_reason text,
    failing_chores           text[] NOT NULL DEFAULT '{}',
    settings                 text[] NOT NULL DEFAULT '{}',
    results_per_second       numeric NOT NULL DEFAULT 0,
    registrations_per_second numeric NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.daemon IS
    'The heartbeat of each daemon, and the queues as it last saw them. Columns of registrations mean what those of results mean. A row is deleted after a '
    'day of silence.';
COMMENT ON COLUMN tokenkeeper.daemon.queue_depth_exact IS 'False if queue_depth is an estimate.';
COMMENT ON COLUMN tokenkeeper.daemon.sweep_interval IS 'Null if the timer is off.';
COMMENT ON COLUMN tokenkeeper.daemon.stopped_at IS 'When it shut down in order.';
COMMENT ON COLUMN tokenkeeper.daemon.problem IS 'What keeps results in the queue until a person acts, such as missing rights or a full disk.';
COMMENT ON COLUMN tokenkeeper.daemon.waiting_for IS
    'Locks of other sessions that have kept results or registrations in their queue for some seconds: the table and who holds it.';
COMMENT ON COLUMN tokenkeeper.daemon.wait_reason IS 'Why results wait.';
COMMENT ON COLUMN tokenkeeper.daemon.results_per_second IS 'Results recorded per second since the heartbeat before.';
COMMENT ON COLUMN tokenkeeper.daemon.failing_chores IS 'The chores that fail, such as a sweep or an undo, each with its error.';
COMMENT ON COLUMN tokenkeeper.daemon.settings IS 'The settings that are not the default, as key=value, without secrets and what systemd hands over.';

CREATE TABLE tokenkeeper.token_count_hour (
    hour   timestamptz NOT NULL,
    state  text COLLATE "C" NOT NULL,
    tokens bigint NOT NULL,
    PRIMARY KEY (hour, state)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.token_count_hour IS
    'How many tokens of all topics were in each state at the end of each hour. No row for an hour without a daemon. Kept for sweep.event_retention.';

CREATE TYPE tokenkeeper.page AS (
    cause       text COLLATE "C",
    environment text COLLATE "C",
    topic       text COLLATE "C",
    warning     text
);
COMMENT ON TYPE tokenkeeper.page IS
    'Internal: a critical warning of status. Its cause is one of the words that the view critical_warning explains. The topic and its environment are empty if it '
    'is about the whole database.';

CREATE TABLE tokenkeeper.status_cache (
    source        text COLLATE "C" PRIMARY KEY,
    rows          bigint,
    words         text[],
    as_of         timestamptz NOT NULL,
    pause         interval NOT NULL DEFAULT interval '5 seconds',
    oldest_due_at timestamptz,
    pages         tokenkeeper.page[]
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.status_cache IS
    'What the view status cannot find within milliseconds. A daemon refreshes it every five seconds at most, in at most one hundredth of its time.';
COMMENT ON COLUMN tokenkeeper.status_cache.source IS 'A table of this schema, or the name of a warning.';
COMMENT ON COLUMN tokenkeeper.status_cache.rows IS
    'Rows of the table, counted up to 10000; estimated from PostgreSQL''s statistics if counting takes over a second.';
COMMENT ON COLUMN tokenkeeper.status_cache.words IS 'The warnings, at most 20; null for none.';
COMMENT ON COLUMN tokenkeeper.status_cache.pause IS
    'How long the daemon waits before the next refresh: 5 seconds to 5 minutes. There is none during its sweep.';
COMMENT ON COLUMN tokenkeeper.status_cache.oldest_due_at IS 'For send_request: when the oldest unclaimed request became due, or will.';
COMMENT ON COLUMN tokenkeeper.status_cache.pages IS 'For send_request: what overdue_requests() found.';

-- The sweep --------------------------------------------------------------------------------------------------------

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
    message           text,
    refused           bigint NOT NULL DEFAULT 0,
    deleted_held      bigint NOT NULL DEFAULT 0,
    deleted_sends     bigint NOT NULL DEFAULT 0,
    reset_events      bigint NOT NULL DEFAULT 0,
    reaped_topics     bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE tokenkeeper.sweep_run IS
    'One row per sweep. The next sweep continues an interrupted one; the next forced sweep, an interrupted forced one.';
COMMENT ON COLUMN tokenkeeper.sweep_run.trigger IS
    'timer; signal (SIGUSR1); sql (request_sweep); cli (tokenkeeperd sweep).';
COMMENT ON COLUMN tokenkeeper.sweep_run.dry_run IS 'Only counted, deleted nothing.';
COMMENT ON COLUMN tokenkeeper.sweep_run.forced IS 'Without the limit on the share of a topic''s tokens.';
COMMENT ON COLUMN tokenkeeper.sweep_run.heartbeat_at IS 'Set by each batch. After a minute of silence another sweep may start.';
COMMENT ON COLUMN tokenkeeper.sweep_run.pruned_suppressed IS 'Tokens suppressed for longer than sweep.suppressed_retention.';
COMMENT ON COLUMN tokenkeeper.sweep_run.pruned_dormant IS 'Tokens not registered again within sweep.dormant_after.';
COMMENT ON COLUMN tokenkeeper.sweep_run.refused IS
    'Due tokens that were not pruned, because they are too large a share of their topic: see sweep_topic.';
COMMENT ON COLUMN tokenkeeper.sweep_run.deleted_held IS 'What the guard held for longer than sweep.held_retention. It never counted.';
COMMENT ON COLUMN tokenkeeper.sweep_run.deleted_sends IS 'Rows of suppressed_send and failed_send older than sweep.send_retention.';
COMMENT ON COLUMN tokenkeeper.sweep_run.reset_events IS 'Events whose transaction_id was in the future, because the database was restored from a dump.';
COMMENT ON COLUMN tokenkeeper.sweep_run.reaped_topics IS 'Topics to which nothing referred.';

CREATE UNIQUE INDEX sweep_run_one_at_a_time ON tokenkeeper.sweep_run ((true)) WHERE outcome = 'running';
COMMENT ON INDEX tokenkeeper.sweep_run_one_at_a_time IS 'At most one sweep runs, however many daemons there are.';

CREATE INDEX sweep_run_requested ON tokenkeeper.sweep_run (run_id) WHERE outcome = 'requested';

CREATE TABLE tokenkeeper.sweep_topic (
    run_id      bigint NOT NULL,
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    cause       text COLLATE "C" NOT NULL,
    tokens      bigint NOT NULL,
    pruned      bigint NOT NULL DEFAULT 0,
    refused     boolean NOT NULL,
    of_tokens   bigint,
    max_tokens  bigint,
    samples     text[],
    PRIMARY KEY (run_id, topic, environment, cause)
);
COMMENT ON TABLE tokenkeeper.sweep_topic IS 'What a sweep found due, by topic and cause. Kept as long as its row of sweep_run.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.cause IS 'stale, suspect, unregistered_by_app, superseded, or dormant.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.tokens IS 'How many were due when the sweep began the topic.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.pruned IS 'Fewer than tokens if the sweep was interrupted, or a token was registered again.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.refused IS 'True if the topic was over its limit, all causes together.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.of_tokens IS 'All tokens of the topic; null if too few were due for the limit to matter.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.max_tokens IS 'How many could be pruned within this day.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.samples IS 'The first 8 digits of some of them, for `tokenkeeperd explain`.';

CREATE TABLE tokenkeeper.sweep_progress (
    only_row         boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    rolled_up_before timestamptz NOT NULL DEFAULT '-infinity',
    transaction_id   xid8
);
COMMENT ON TABLE tokenkeeper.sweep_progress IS 'One row: what the sweeps of this database have finished, and need not repeat.';
COMMENT ON COLUMN tokenkeeper.sweep_progress.rolled_up_before IS 'The counts of result_count before this hour are added up.';
COMMENT ON COLUMN tokenkeeper.sweep_progress.transaction_id IS
    'A transaction id of the last sweep. One in the future means that the database was restored from a dump into a younger cluster: the next sweep resets '
    'token_event.transaction_id. Null: the next sweep checks the whole history once.';
INSERT INTO tokenkeeper.sweep_progress DEFAULT VALUES;

CREATE TABLE tokenkeeper.topic_prune (
    topic_id  integer PRIMARY KEY,
    pruned_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tokenkeeper.topic_prune IS 'When a sweep last pruned a token of each topic. A topic is kept while token_event may have its history.';

CREATE TABLE tokenkeeper.lock_sweep_claim () WITH (autovacuum_enabled = false);
ALTER TABLE tokenkeeper.lock_sweep_claim REPLICA IDENTITY NOTHING;
COMMENT ON TABLE tokenkeeper.lock_sweep_claim IS
    'Never has a row. A daemon holds EXCLUSIVE on it while it decides whether to start a sweep. For why it is a table, see 0004_queue.';
