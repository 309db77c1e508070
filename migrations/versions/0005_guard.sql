-- oldest daemon: 0.1.0
--
-- A misconfigured sender gets BadDeviceToken for every token. So the mass-failure guard stands before the ledger: it holds suspects
-- when there are too many, and reinstate undoes those that were recorded before.

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
    token_key   bytea NOT NULL,
    suspect_at  timestamptz NOT NULL,
    reason      text NOT NULL,
    environment text,
    topic       text,
    token       text,
    status      integer,
    body        text,
    apns_id     text,
    sent_at     timestamptz,
    queued_at   timestamptz NOT NULL,
    attempts    smallint
);
COMMENT ON TABLE tokenkeeper.held_result IS
    'Suspects held by the mass-failure guard, complete as they were queued, until release_held or discard_held, and no longer than '
    'sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.held_result.suspect_at IS 'The instant it would count with: when the request was sent.';

CREATE INDEX held_result_token ON tokenkeeper.held_result (topic_id, token_key, queued_at);

CREATE TABLE tokenkeeper.topic_guard (
    topic_id     integer PRIMARY KEY,
    tripped_at   timestamptz,
    touched_at   timestamptz,
    undo_since   timestamptz,
    tokens       bigint,
    active       bigint,
    max_tokens   bigint,
    active_as_of timestamptz
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard IS
    'The mass-failure guard of each topic that has had suspects. Its row is locked while suspects of the topic are judged, released, discarded or undone.';
COMMENT ON COLUMN tokenkeeper.topic_guard.tripped_at IS 'When the guard tripped: suspects are held since then. Null while suspects are recorded.';
COMMENT ON COLUMN tokenkeeper.topic_guard.touched_at IS 'When a suspect that would suppress a token was last judged.';
COMMENT ON COLUMN tokenkeeper.topic_guard.undo_since IS
    'The earliest of the suspects that tripped the guard or have arrived since: where a reinstatement should begin.';
COMMENT ON COLUMN tokenkeeper.topic_guard.tokens IS
    'Tokens that suspects have suppressed or would have, within the worst day, as of the last check.';
COMMENT ON COLUMN tokenkeeper.topic_guard.active IS 'The active tokens of the topic when suspects were last judged.';
COMMENT ON COLUMN tokenkeeper.topic_guard.active_as_of IS
    'When the guard itself counted the active tokens, because no recent token_count existed. It trusts that count for ten minutes.';

CREATE TABLE tokenkeeper.topic_guard_count (
    topic_id integer NOT NULL,
    bucket   timestamptz NOT NULL,
    tokens   bigint NOT NULL,
    PRIMARY KEY (topic_id, bucket)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard_count IS
    'How many tokens suspects have suppressed, or would have without the guard, per ten minutes of queued_at. A token counts once per day, at '
    'its last suspect of that day.';

CREATE TABLE tokenkeeper.exclusion (
    exclusion_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     integer NOT NULL,
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
    'The windows given to reinstate. A suspect of the topic whose instant lies in a window, ends included, never counts, whenever it arrives.';
COMMENT ON COLUMN tokenkeeper.exclusion.finished_at IS 'When the last of its suspects was undone; null while some may be left.';
COMMENT ON COLUMN tokenkeeper.exclusion.waits_since IS
    'When an undo last reached the end of the window and had to leave suspects whose tokens are locked by applications. Other windows come first then.';
COMMENT ON COLUMN tokenkeeper.exclusion.tokens IS 'How many tokens have become sendable because of it so far.';
COMMENT ON COLUMN tokenkeeper.exclusion.reached_at IS
    'Internal: where to look for the next suspects, with reached_key. Only a hint: what is left to undo is what remains in suspect.';

CREATE INDEX exclusion_topic ON tokenkeeper.exclusion (topic_id);

CREATE INDEX exclusion_unfinished ON tokenkeeper.exclusion (exclusion_id) WHERE finished_at IS NULL;
