-- oldest daemon: 0.1.0
--
-- A misconfigured sender gets BadDeviceToken for every token. So the mass-failure guard stands before the ledger: it holds suspects
-- when there are too many, and reinstate undoes those that were recorded before. 410s are not held by default, but the tokens that newly
-- turn stale are counted, a wave of them is reported, and reinstate undoes 410s by when they were received.
--
-- A library may deactivate rows of an attached table, which looks like a logout. So logouts that a registration_source reports pass the same
-- guard, counted apart from suspects, and reinstate undoes them by when they were received.

CREATE TABLE tokenkeeper.suspect (
    suspect_at timestamptz NOT NULL,
    queued_at  timestamptz NOT NULL,
    topic_id   integer NOT NULL,
    suppresses boolean NOT NULL,
    token_key  bytea NOT NULL,
    reason     text COLLATE "C" NOT NULL,
    PRIMARY KEY (topic_id, token_key, suspect_at, reason)
);
COMMENT ON TABLE tokenkeeper.suspect IS
    'Each suspect that counts, so that reinstate can find the latest of those that remain. Kept while the token is suppressed, and for the '
    'retention of suppressed tokens.';
COMMENT ON COLUMN tokenkeeper.suspect.suppresses IS 'Whether the guard counts it: it suppressed a token that was sendable.';

-- topic_id is an expression here, so that this index does not look suitable for finding a token's suspects. Without fresh statistics the
-- planner would choose it for that, and read all suspects of a topic for each token. The token is part of the index so that an undo
-- can continue exactly where it stopped even if thousands of suspects have the same instant.
CREATE INDEX suspect_suspect_at ON tokenkeeper.suspect ((topic_id + 0), suspect_at, token_key);

CREATE TABLE tokenkeeper.held_result (
    held_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    held_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic_id    integer NOT NULL,
    cause       text NOT NULL DEFAULT 'suspect' CHECK (cause IN ('suspect', 'stale')),
    token_key   bytea NOT NULL,
    suspect_at  timestamptz NOT NULL,
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
    'Suspects held by the mass-failure guard, and 410s held by guard.hold_stale_share, complete as they were queued, until release_held or '
    'discard_held, and no longer than sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.held_result.cause IS 'What it would make its token: suspect or stale.';
COMMENT ON COLUMN tokenkeeper.held_result.suspect_at IS
    'The instant it would count with: of a suspect, when the request was sent; of a 410, the timestamp that APNs gave.';

CREATE INDEX held_result_token ON tokenkeeper.held_result (topic_id, token_key, queued_at);

CREATE TABLE tokenkeeper.topic_guard (
    topic_id     integer NOT NULL,
    tripped_at   timestamptz,
    touched_at   timestamptz,
    undo_since   timestamptz,
    tokens       bigint,
    active       bigint,
    max_tokens   bigint,
    active_as_of timestamptz,
    cause        text COLLATE "C" NOT NULL DEFAULT 'suspect' CHECK (cause IN ('suspect', 'unregistered_by_app')),
    PRIMARY KEY (topic_id, cause)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard IS
    'The mass-failure guard of each topic that has had suspects, or logouts from a source: one row for each of the two. The row is locked while what '
    'it guards is judged, released, discarded or undone.';
COMMENT ON COLUMN tokenkeeper.topic_guard.tripped_at IS
    'When the guard tripped: suspects, or logouts, are held since then. Null while they are recorded.';
COMMENT ON COLUMN tokenkeeper.topic_guard.touched_at IS 'When a suspect or a logout that would suppress a token was last judged.';
COMMENT ON COLUMN tokenkeeper.topic_guard.undo_since IS
    'The earliest of the suspects, or logouts, that tripped the guard or have arrived since: where a reinstatement should begin.';
COMMENT ON COLUMN tokenkeeper.topic_guard.tokens IS
    'Tokens that suspects, or logouts, have suppressed or would have, within the worst day, as of the last check.';
COMMENT ON COLUMN tokenkeeper.topic_guard.active IS 'The active tokens of the topic when they were last judged.';
COMMENT ON COLUMN tokenkeeper.topic_guard.cause IS
    'suspect; or unregistered_by_app: logouts from an attached table, a backfill or an import.';
COMMENT ON COLUMN tokenkeeper.topic_guard.active_as_of IS
    'When the guard itself counted the active tokens, because no recent token_count existed. It trusts that count for ten minutes.';

CREATE TABLE tokenkeeper.topic_guard_count (
    topic_id integer NOT NULL,
    bucket   timestamptz NOT NULL,
    tokens   bigint NOT NULL,
    cause    text COLLATE "C" NOT NULL DEFAULT 'suspect',
    PRIMARY KEY (topic_id, cause, bucket)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard_count IS
    'How many tokens suspects, or logouts from a source, have suppressed, or would have without the guard, per ten minutes of queued_at. A token '
    'counts once per day, at the last of them on that day.';
COMMENT ON COLUMN tokenkeeper.topic_guard_count.cause IS 'As in topic_guard.';

CREATE TABLE tokenkeeper.exclusion (
    exclusion_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     integer NOT NULL,
    cause        text NOT NULL CHECK (cause IN ('suspect', 'stale', 'unregistered_by_app')),
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
    'The windows given to reinstate. A suspect of the topic whose instant lies in a window, ends included, never counts, whenever it arrives; nor does '
    'a 410, or a logout from a source, that was received within a window.';
COMMENT ON COLUMN tokenkeeper.exclusion.cause IS
    'suspect: the window is of suspect.suspect_at, when the requests were sent. stale: it is of stale_receipt.queued_at, when the 410s were received. '
    'unregistered_by_app: it is of unregistration_receipt.queued_at, when the logouts were received.';
COMMENT ON COLUMN tokenkeeper.exclusion.finished_at IS 'When the last of its results was undone; null while some may be left.';
COMMENT ON COLUMN tokenkeeper.exclusion.waits_since IS
    'When an undo last reached the end of the window and had to leave results whose tokens are locked by applications. Other windows come first then.';
COMMENT ON COLUMN tokenkeeper.exclusion.tokens IS 'How many tokens have become sendable because of it so far.';
COMMENT ON COLUMN tokenkeeper.exclusion.reached_at IS
    'Internal: where to look for the next results, with reached_key. Only a hint: what is left to undo is what remains in suspect, stale_receipt or '
    'unregistration_receipt.';

CREATE INDEX exclusion_topic ON tokenkeeper.exclusion (topic_id);

CREATE INDEX exclusion_unfinished ON tokenkeeper.exclusion (exclusion_id) WHERE finished_at IS NULL;

-- 410s ---------------------------------------------------------------------------------------------------------------

-- Without a key: a duplicate does no harm, and an INSERT that need not look for one costs less.
CREATE TABLE tokenkeeper.stale_receipt (
    queued_at timestamptz NOT NULL,
    stale_at  timestamptz NOT NULL,
    topic_id  integer NOT NULL,
    newly     boolean NOT NULL,
    token_key bytea NOT NULL,
    reason    text COLLATE "C" NOT NULL
);
-- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
ALTER TABLE tokenkeeper.stale_receipt REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.stale_receipt IS
    'Each 410 that counts, with when it was received, so that reinstate can find the latest of those that remain. Kept while the token is '
    'suppressed, and for the retention of suppressed tokens. Of a token with more than 50, the first 20 and the last 20 are kept, and those that are '
    'newly stale.';
COMMENT ON COLUMN tokenkeeper.stale_receipt.queued_at IS
    'When the result was queued. The undo goes by this instant and never by stale_at: if APNs repeats the same 410 later, it counts.';
COMMENT ON COLUMN tokenkeeper.stale_receipt.stale_at IS 'The timestamp that APNs gave.';
COMMENT ON COLUMN tokenkeeper.stale_receipt.newly IS
    'Whether stale_count counts it: it turned an active token stale, for the first time within a day.';

CREATE INDEX stale_receipt_token ON tokenkeeper.stale_receipt (topic_id, token_key);

-- As suspect_suspect_at.
CREATE INDEX stale_receipt_queued_at ON tokenkeeper.stale_receipt ((topic_id + 0), queued_at, token_key);

CREATE TABLE tokenkeeper.stale_count (
    hour     timestamptz NOT NULL,
    topic_id integer NOT NULL,
    tokens   bigint NOT NULL,
    pruned   bigint NOT NULL DEFAULT 0
);
ALTER TABLE tokenkeeper.stale_count REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.stale_count IS
    'How many active tokens have newly turned stale, by the hour in which their 410 was queued; each token once per day. Each batch appends its '
    'counts, because a row updated in place would serialize the daemons; an undo appends negative ones. The daemons add them up.';
COMMENT ON COLUMN tokenkeeper.stale_count.pruned IS
    'How many stale tokens whose last 410 was queued in this hour have been pruned since: reinstate cannot restore them.';

CREATE INDEX stale_count_hour ON tokenkeeper.stale_count (hour, topic_id);

-- For what is usual in one topic: the other index would read the hours of all topics.
CREATE INDEX stale_count_topic ON tokenkeeper.stale_count (topic_id, hour);

CREATE TABLE tokenkeeper.stale_wave (
    topic_id integer PRIMARY KEY,
    since    timestamptz NOT NULL,
    tokens   bigint NOT NULL,
    active   bigint NOT NULL,
    undo     text NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.stale_wave IS
    'The topics in which far more tokens than usual have turned stale, by the rule of stale_share.is_wave. A daemon adds and logs a wave when it '
    'notices it, and deletes it when it is over.';
COMMENT ON COLUMN tokenkeeper.stale_wave.since IS 'When the first 410 of the wave was received: where an undo should begin. The wave is at most a day long.';
COMMENT ON COLUMN tokenkeeper.stale_wave.tokens IS 'How many tokens have newly turned stale within this day so far.';
COMMENT ON COLUMN tokenkeeper.stale_wave.active IS 'The active tokens of the topic, these included.';
COMMENT ON COLUMN tokenkeeper.stale_wave.undo IS 'The command that undoes the wave.';

-- Logouts ------------------------------------------------------------------------------------------------------------

-- Without a key, as stale_receipt.
CREATE TABLE tokenkeeper.unregistration_receipt (
    queued_at       timestamptz NOT NULL,
    unregistered_by_app_at timestamptz NOT NULL,
    source_id       bigint,
    topic_id        integer NOT NULL,
    suppresses      boolean NOT NULL,
    token_key       bytea NOT NULL
);
ALTER TABLE tokenkeeper.unregistration_receipt REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.unregistration_receipt IS
    'Each logout that a source reported and that counts, with when it was received, so that reinstate can find the latest of those that remain. '
    'Kept while the token is suppressed, and for the retention of suppressed tokens.';
COMMENT ON COLUMN tokenkeeper.unregistration_receipt.queued_at IS
    'When the logout was queued. The undo goes by this instant.';
COMMENT ON COLUMN tokenkeeper.unregistration_receipt.unregistered_by_app_at IS 'The instant of the logout, as in ledger.unregistered_by_app_at.';
COMMENT ON COLUMN tokenkeeper.unregistration_receipt.source_id IS
    'The registration_source. Null for the latest logout by the application itself, which no undo touches; kept only for tokens that also have '
    'logouts from a source.';
COMMENT ON COLUMN tokenkeeper.unregistration_receipt.suppresses IS 'Whether the guard counts it: it suppressed a token that was active.';

CREATE INDEX unregistration_receipt_token ON tokenkeeper.unregistration_receipt (topic_id, token_key);

-- As suspect_suspect_at.
CREATE INDEX unregistration_receipt_queued_at ON tokenkeeper.unregistration_receipt ((topic_id + 0), queued_at, token_key)
    WHERE source_id IS NOT NULL;

CREATE TABLE tokenkeeper.held_registration (
    held_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    held_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic_id        integer NOT NULL,
    token_key       bytea NOT NULL,
    unregistered_by_app_at timestamptz NOT NULL,
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
    'Logouts from a source that the mass-failure guard holds, complete as they were queued, until release_held or discard_held, and no longer than '
    'sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.held_registration.unregistered_by_app_at IS 'The instant that the logout would count with.';

CREATE INDEX held_registration_token ON tokenkeeper.held_registration (topic_id, token_key, queued_at);
