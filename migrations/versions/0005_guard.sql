-- oldest daemon: 0.1.0
--
-- The guard against mass failures, for three causes alike: suspects, logouts that a source reports, and 410s.
--
-- A misconfigured sender gets BadDeviceToken for every token. A library may deactivate rows of an attached table, which looks like a logout. APNs itself once
-- sent 410s for live tokens. So each report that a token is invalid leaves a receipt, with the instant at which it was received. The tokens that it newly
-- suppresses are counted by topic, cause and hour. If that is too large a share of a topic, the guard holds what follows (410s only if an operator wants
-- that), and reinstate undoes what was received within a window.

-- Without a key: a duplicate does no harm, and an INSERT that need not look for one costs less.
CREATE TABLE tokenkeeper.receipt (
    received_at    timestamptz NOT NULL,
    invalidated_at timestamptz NOT NULL,
    source_id      bigint,
    topic_id       integer NOT NULL,
    counted        boolean NOT NULL,
    cause          text COLLATE "C" NOT NULL,
    token_key      bytea NOT NULL,
    reason         text COLLATE "C"
);
-- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
ALTER TABLE tokenkeeper.receipt REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.receipt IS
    'Internal: each report that counts and says that a token is invalid, for reinstate. Kept while the token is suppressed, and for the retention of suppressed '
    'tokens. Of a token with more than 50, the greatest, the first 20 and the last 20 of each cause, and the counted ones are kept.';
COMMENT ON COLUMN tokenkeeper.receipt.received_at IS 'When it was queued, or unregister was called. An undo goes by this instant, never by invalidated_at.';
COMMENT ON COLUMN tokenkeeper.receipt.invalidated_at IS
    'The instant in the ledger: of a 410, APNs'' timestamp; of a suspect, when the request was sent; of a logout, when it happened.';
COMMENT ON COLUMN tokenkeeper.receipt.source_id IS 'The registration_source of a logout. No undo touches a logout without one: the application reported it.';
COMMENT ON COLUMN tokenkeeper.receipt.counted IS 'True if suppression_count counts it: it suppressed a sendable token, for the first time within a day.';
COMMENT ON COLUMN tokenkeeper.receipt.cause IS 'suspect, stale (a 410) or unregistered_by_app (a logout).';
COMMENT ON COLUMN tokenkeeper.receipt.reason IS 'The reason that APNs gave; null for a logout.';

CREATE INDEX receipt_token ON tokenkeeper.receipt (topic_id, token_key);

-- topic_id is an expression here, so that this index does not look suitable for finding a token's receipts. Without fresh statistics the planner would choose
-- it for that, and read all receipts of a topic for each token. The token is part of the index so that an undo can continue exactly where it stopped even
-- if thousands of receipts have the same instant.
CREATE INDEX receipt_received_at ON tokenkeeper.receipt ((topic_id + 0), cause, received_at, token_key);

CREATE TABLE tokenkeeper.suppression_count (
    hour     timestamptz NOT NULL,
    topic_id integer NOT NULL,
    cause    text COLLATE "C" NOT NULL,
    tokens   bigint NOT NULL,
    pruned   bigint NOT NULL DEFAULT 0
);
ALTER TABLE tokenkeeper.suppression_count REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.suppression_count IS
    'How many tokens each cause newly suppressed, by the hour of receipt; each token once per day. Batches append their counts, an undo appends negative '
    'ones, and the daemons add them up.';
COMMENT ON COLUMN tokenkeeper.suppression_count.cause IS 'As in receipt.';
COMMENT ON COLUMN tokenkeeper.suppression_count.pruned IS
    'How many tokens that the cause suppressed, with a last receipt of this hour, were pruned since: reinstate cannot restore them.';

CREATE INDEX suppression_count_hour ON tokenkeeper.suppression_count (hour, topic_id);

-- For one topic: the other index would read the hours of all topics.
CREATE INDEX suppression_count_topic ON tokenkeeper.suppression_count (topic_id, hour);

CREATE TABLE tokenkeeper.tripped_guard (
    topic_id   integer NOT NULL,
    cause      text COLLATE "C" NOT NULL,
    tripped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    held_at    timestamptz DEFAULT clock_timestamp(),
    undo_since timestamptz,
    tokens     bigint NOT NULL,
    active     bigint,
    max_tokens bigint NOT NULL,
    PRIMARY KEY (topic_id, cause)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.tripped_guard IS
    'The guards that have tripped and hold what follows. A daemon deletes a row when its cause suppresses, or would suppress, at most half of max_tokens '
    'within a day.';
COMMENT ON COLUMN tokenkeeper.tripped_guard.held_at IS
    'When it last held something. The daemons check a guard that has held nothing for ten minutes; null asks them to check at once.';
COMMENT ON COLUMN tokenkeeper.tripped_guard.undo_since IS
    'When the first of what tripped it was received: where an undo should begin. Null once that is undone.';
COMMENT ON COLUMN tokenkeeper.tripped_guard.tokens IS 'How many tokens would have been suppressed within a day when it tripped.';
COMMENT ON COLUMN tokenkeeper.tripped_guard.active IS 'The active tokens of the topic when it tripped.';
COMMENT ON COLUMN tokenkeeper.tripped_guard.max_tokens IS 'How many may be suppressed within a day.';

CREATE TYPE tokenkeeper.guard_change AS (
    topic_id integer,
    cause    text COLLATE "C",
    tripped  boolean
);
COMMENT ON TYPE tokenkeeper.guard_change IS 'A guard that has tripped, or has reset.';
REVOKE USAGE ON TYPE tokenkeeper.guard_change FROM PUBLIC;

CREATE TABLE tokenkeeper.held_result (
    held_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    held_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic_id    integer NOT NULL,
    cause       text COLLATE "C" NOT NULL DEFAULT 'suspect' CHECK (cause IN ('suspect', 'stale')),
    token_key   bytea NOT NULL,
    invalidated_at timestamptz NOT NULL,
    reason      text NOT NULL,
    environment text,
    topic       text,
    token       text,
    status      text,
    body        text,
    apns_id     text,
    sent_at     timestamptz,
    queued_at   timestamptz NOT NULL,
    attempts    smallint
);
COMMENT ON TABLE tokenkeeper.held_result IS
    'Suspects that the mass-failure guard holds, and 410s that guard.hold_stale_share holds, until release_held or discard_held, for sweep.held_retention '
    'at most.';
COMMENT ON COLUMN tokenkeeper.held_result.cause IS 'What it would make its token: suspect or stale.';
COMMENT ON COLUMN tokenkeeper.held_result.invalidated_at IS
    'The instant that would count: of a suspect, when the request was sent; of a 410, APNs'' timestamp.';

CREATE INDEX held_result_token ON tokenkeeper.held_result (topic_id, token_key);

-- As receipt_received_at.
CREATE INDEX held_result_queued_at ON tokenkeeper.held_result ((topic_id + 0), cause, queued_at);

CREATE TABLE tokenkeeper.held_registration (
    held_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    held_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic_id        integer NOT NULL,
    token_key       bytea NOT NULL,
    invalidated_at  timestamptz NOT NULL,
    environment     text,
    topic           text,
    token           text,
    registered_at   timestamptz,
    device_id       text,
    user_id         text,
    tags            text[],
    unregistered    boolean,
    source_id       bigint,
    queued_at       timestamptz NOT NULL,
    attempts        smallint
);
COMMENT ON TABLE tokenkeeper.held_registration IS
    'Logouts from a source that the mass-failure guard holds until release_held or discard_held, for sweep.held_retention at most.';
COMMENT ON COLUMN tokenkeeper.held_registration.invalidated_at IS 'The instant that would count.';

CREATE INDEX held_registration_token ON tokenkeeper.held_registration (topic_id, token_key);

CREATE INDEX held_registration_queued_at ON tokenkeeper.held_registration ((topic_id + 0), queued_at);

CREATE TABLE tokenkeeper.exclusion (
    exclusion_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     integer NOT NULL,
    cause        text COLLATE "C" NOT NULL CHECK (cause IN ('suspect', 'stale', 'unregistered_by_app')),
    since        timestamptz NOT NULL,
    until        timestamptz NOT NULL CHECK (until >= since),
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_by      text NOT NULL DEFAULT session_user,
    finished_at  timestamptz,
    waits_since  timestamptz,
    tokens       bigint NOT NULL DEFAULT 0,
    reached_at   timestamptz,
    reached_key  bytea
);
COMMENT ON TABLE tokenkeeper.exclusion IS
    'The windows given to reinstate. What was received within one (ends included) for its cause never counts, whenever a daemon records it.';
COMMENT ON COLUMN tokenkeeper.exclusion.cause IS 'suspect, stale, or unregistered_by_app for logouts from a source.';
COMMENT ON COLUMN tokenkeeper.exclusion.finished_at IS 'When the last of its results was undone; null while some may be left.';
COMMENT ON COLUMN tokenkeeper.exclusion.waits_since IS
    'When an undo last reached the end of the window and had to skip results whose tokens were locked. Other windows then come first.';
COMMENT ON COLUMN tokenkeeper.exclusion.tokens IS 'How many tokens it has made sendable so far.';
COMMENT ON COLUMN tokenkeeper.exclusion.reached_at IS
    'Internal: with reached_key, a hint where the next results are. What remains in receipt is left to undo.';

CREATE INDEX exclusion_topic ON tokenkeeper.exclusion (topic_id);

CREATE INDEX exclusion_unfinished ON tokenkeeper.exclusion (exclusion_id) WHERE finished_at IS NULL;

CREATE TABLE tokenkeeper.stale_wave (
    topic_id integer PRIMARY KEY,
    since    timestamptz NOT NULL,
    tokens   bigint NOT NULL,
    active   bigint NOT NULL,
    undo     text NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.stale_wave IS
    'The topics with a wave of 410s, by stale_share.is_wave. A daemon adds and logs a wave, and deletes it when it is over.';
COMMENT ON COLUMN tokenkeeper.stale_wave.since IS 'When the first 410 of the wave was received: where an undo should begin. The wave is at most a day long.';
COMMENT ON COLUMN tokenkeeper.stale_wave.tokens IS 'How many tokens newly turned stale within this day so far.';
COMMENT ON COLUMN tokenkeeper.stale_wave.active IS 'The active tokens of the topic, these included.';
COMMENT ON COLUMN tokenkeeper.stale_wave.undo IS 'The command that undoes the wave.';
