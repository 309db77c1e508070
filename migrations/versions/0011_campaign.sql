-- oldest daemon: 0.1.0
--
-- Campaigns: one notification to many devices, as one row.
--
-- The daemons address the audience in batches of up to 500 tokens, slightly ahead of what is sent, and claim whole batches. What became of
-- requests is appended in sets. So PostgreSQL works per batch, and not per request. A request that does not end with its first attempt moves
-- to send_request, and goes on there as a single one.
--
-- The number of a request in its campaign is batch * 512 + ordinal; ordinal is its place in the batch, from 1. An ordinal leaves its
-- batch exactly once: the bit in "ended" is set in the transaction that appends to campaign_ending. The batch is deleted with its last one.

CREATE TABLE tokenkeeper.campaign (
    -- This number and that of a request go into one bigint in the daemon. After the last number, the first free one is next: nobody can use them up.
    campaign_id     bigint GENERATED ALWAYS AS IDENTITY (MAXVALUE 1073741823 CYCLE) PRIMARY KEY CHECK (campaign_id BETWEEN 1 AND 1073741823),
    name            text,
    environment     text COLLATE "C" NOT NULL,
    topic           text COLLATE "C" NOT NULL,
    state           text COLLATE "C" NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running', 'paused', 'cancelled', 'ended')),
    payload         json NOT NULL,
    push_type       text COLLATE "C" NOT NULL,
    priority        integer,
    expiration      timestamptz,
    collapse_id     text,
    scheduled_at    timestamptz,
    max_per_second  integer CHECK (max_per_second BETWEEN 1 AND 1000000),
    audience_kind   text COLLATE "C" NOT NULL CHECK (audience_kind IN ('everyone', 'tags', 'device', 'user', 'tokens')),
    audience        text COLLATE "C",
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by      text COLLATE "C" NOT NULL DEFAULT session_user,
    created_in      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    idempotency_key text COLLATE "C",
    content_hash    bytea NOT NULL,
    copied_hash     numeric,
    is_confirmed    boolean NOT NULL DEFAULT false,
    started_at      timestamptz,
    ended_at        timestamptz,
    expected        bigint,
    addressed       bigint NOT NULL DEFAULT 0,
    addressed_to    bytea NOT NULL DEFAULT '',
    is_addressed    boolean NOT NULL DEFAULT false,
    has_list        boolean NOT NULL DEFAULT false,
    batches         integer NOT NULL DEFAULT 0 CHECK (batches < 8388608),
    first_open_batch integer NOT NULL DEFAULT 1,
    next_send_at    timestamptz NOT NULL DEFAULT '-infinity',
    logged_state    text COLLATE "C",
    UNIQUE (created_by, idempotency_key)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.campaign IS
    'One row per campaign. Use the view campaign_progress, which explains the columns of the same name. Kept for sweep.send_retention after its end.';
COMMENT ON COLUMN tokenkeeper.campaign.audience_kind IS 'everyone, tags, device, user or tokens.';
COMMENT ON COLUMN tokenkeeper.campaign.audience IS 'The tag expression, the device_id or the user_id.';
COMMENT ON COLUMN tokenkeeper.campaign.created_in IS 'Internal: the transaction that created it. Only that one adds to campaign_token.';
COMMENT ON COLUMN tokenkeeper.campaign.content_hash IS
    'Internal: SHA-256 of what enqueue was given, to recognize a repetition with the same idempotency_key.';
COMMENT ON COLUMN tokenkeeper.campaign.copied_hash IS
    'Internal: the sum of hashes of the tokens copied into campaign_token, to recognize a repetition; null if there were none.';
COMMENT ON COLUMN tokenkeeper.campaign.is_confirmed IS 'Internal: enqueue was called with confirm => true.';
COMMENT ON COLUMN tokenkeeper.campaign.started_at IS 'When the first tokens were addressed.';
COMMENT ON COLUMN tokenkeeper.campaign.addressed_to IS
    'Internal: the last token that was read, in the order of token_key; empty once the whole audience is addressed.';
COMMENT ON COLUMN tokenkeeper.campaign.has_list IS 'Internal: campaign_token may have tokens of it.';
COMMENT ON COLUMN tokenkeeper.campaign.batches IS 'Internal: the last number of a batch.';
COMMENT ON COLUMN tokenkeeper.campaign.first_open_batch IS
    'Internal: all batches before this one have ended. The index may still have entries of them while an old transaction is open.';
COMMENT ON COLUMN tokenkeeper.campaign.next_send_at IS 'Internal: when max_per_second allows the next request.';
COMMENT ON COLUMN tokenkeeper.campaign.logged_state IS 'Internal: the state that a daemon has logged.';

-- Very many may be scheduled, or wait for resume_campaign. They are in none of the indexes for end_campaigns before it has something to do for them.
CREATE INDEX campaign_open ON tokenkeeper.campaign (campaign_id) WHERE state IN ('waiting', 'running') AND is_addressed;
COMMENT ON INDEX tokenkeeper.campaign_open IS 'For end_campaigns, as are campaign_stopped and campaign_to_expire.';

CREATE INDEX campaign_to_address ON tokenkeeper.campaign ((coalesce(scheduled_at, created_at))) WHERE state IN ('waiting', 'running') AND NOT is_addressed;
COMMENT ON INDEX tokenkeeper.campaign_to_address IS 'For campaigns_due, as is campaign_to_address_by_id.';

CREATE INDEX campaign_to_address_by_id ON tokenkeeper.campaign (campaign_id) WHERE state IN ('waiting', 'running') AND NOT is_addressed;

CREATE INDEX campaign_stopped ON tokenkeeper.campaign (campaign_id) WHERE state IN ('paused', 'cancelled') AND ended_at IS NULL AND is_addressed;

CREATE INDEX campaign_to_expire ON tokenkeeper.campaign (expiration) WHERE ended_at IS NULL AND expiration > 'epoch';

-- A sender may create a campaign for each message to a person. They are kept for sweep.send_retention, so nothing may read them all.
CREATE INDEX campaign_unended ON tokenkeeper.campaign (topic, environment) WHERE ended_at IS NULL;
COMMENT ON INDEX tokenkeeper.campaign_unended IS 'For forget, and to keep their topics.';

CREATE INDEX campaign_ended ON tokenkeeper.campaign (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON INDEX tokenkeeper.campaign_ended IS 'For the sweep.';

CREATE INDEX campaign_person ON tokenkeeper.campaign (audience, audience_kind) WHERE audience_kind IN ('device', 'user');
COMMENT ON INDEX tokenkeeper.campaign_person IS 'For forget_device and forget_user.';

CREATE INDEX campaign_has_list ON tokenkeeper.campaign (state, campaign_id) WHERE has_list;
COMMENT ON INDEX tokenkeeper.campaign_has_list IS
    'Campaigns with tokens in campaign_token: for forget, and for the sweep, which deletes what cancelled or expired ones left.';

-- Small campaigns, such as one for each message to a person, would fill the log.
CREATE INDEX campaign_to_log ON tokenkeeper.campaign (campaign_id)
    WHERE state <> 'waiting' AND state IS DISTINCT FROM logged_state AND (addressed > 100 OR state IN ('paused', 'cancelled'));
COMMENT ON INDEX tokenkeeper.campaign_to_log IS 'For the daemons'' log.';

CREATE TABLE tokenkeeper.campaign_batch (
    campaign_id bigint NOT NULL,
    batch       integer NOT NULL,
    requests    integer NOT NULL CHECK (requests BETWEEN 1 AND 511),
    claimed_by  text COLLATE "C",
    first_key   bytea NOT NULL,
    ended       bit(512) NOT NULL DEFAULT B'0'::bit(512),
    returned    bit(512) NOT NULL DEFAULT B'0'::bit(512),
    alerts_counted boolean NOT NULL DEFAULT false,
    token_keys  bytea[] NOT NULL,
    PRIMARY KEY (campaign_id, batch)
) WITH (fillfactor = 50);
-- Out of line and not compressed, so that an update of the small columns does not copy the keys.
ALTER TABLE tokenkeeper.campaign_batch ALTER COLUMN token_keys SET STORAGE EXTERNAL;
COMMENT ON TABLE tokenkeeper.campaign_batch IS
    'Up to 500 requests of a campaign, at least one of which has not ended, in the order of the batches and their token_keys.';
COMMENT ON COLUMN tokenkeeper.campaign_batch.claimed_by IS 'The daemon that has claimed what has neither ended nor returned; null while the batch waits.';
COMMENT ON COLUMN tokenkeeper.campaign_batch.ended IS 'By ordinal, from 1: the request is no longer in this batch. See campaign_ending.';
COMMENT ON COLUMN tokenkeeper.campaign_batch.returned IS
    'By ordinal: the daemon returned the request unsent. The batch can be claimed again once all its requests have ended or returned.';
COMMENT ON COLUMN tokenkeeper.campaign_batch.alerts_counted IS
    'Its requests count among the alerts of their devices'' day (alerts_per_day), however often the batch is claimed.';
COMMENT ON COLUMN tokenkeeper.campaign_batch.token_keys IS 'By ordinal: the token; null if it was forgotten.';

CREATE INDEX campaign_batch_waiting ON tokenkeeper.campaign_batch (campaign_id, batch) WHERE claimed_by IS NULL;
COMMENT ON INDEX tokenkeeper.campaign_batch_waiting IS 'For campaigns_due and claims.';

CREATE INDEX campaign_batch_claimed ON tokenkeeper.campaign_batch (claimed_by) WHERE claimed_by IS NOT NULL;

-- campaign_id + 0: to other queries, all batches of a campaign would be one key of it.
CREATE INDEX campaign_batch_first_key ON tokenkeeper.campaign_batch ((campaign_id + 0), first_key);
COMMENT ON INDEX tokenkeeper.campaign_batch_first_key IS 'For forget: which batch has a token.';

CREATE TABLE tokenkeeper.campaign_ending (
    campaign_id bigint NOT NULL,
    batch       integer NOT NULL,
    ending_id   bigint GENERATED ALWAYS AS IDENTITY,
    ended_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    requests    integer NOT NULL,
    outcome     text COLLATE "C" NOT NULL CHECK (outcome IN ('accepted', 'stale', 'suspect', 'suppressed', 'failed', 'cancelled', 'forgotten', 'requeued')),
    ordinals    smallint[] NOT NULL,
    PRIMARY KEY (campaign_id, batch, ending_id)
);
COMMENT ON TABLE tokenkeeper.campaign_ending IS
    'What became of requests of a campaign, append-only. Each request has exactly one final outcome; one that moved to send_request also has the outcome '
    'requeued.';

CREATE TABLE tokenkeeper.campaign_token (
    -- No constraints: PostgreSQL's message would show the token, and the server logs it. The trigger check_campaign_token refuses what is wrong.
    campaign_id bigint,
    given_in    xid8 DEFAULT pg_current_xact_id(),
    token       text
);
ALTER TABLE tokenkeeper.campaign_token REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.campaign_token IS
    'The list of a campaign created with tokens => ''{}'', by COPY in the transaction of enqueue; another campaign takes none (55000). A repeated token '
    'counts once. Raises 22023 at COMMIT for a list that needs confirm => true. A transaction that repeats an idempotency_key copies the same list, or '
    'none; another list raises 22023 at COMMIT.';
COMMENT ON COLUMN tokenkeeper.campaign_token.given_in IS 'Internal: the transaction that copied the token; null if enqueue was given it.';
COMMENT ON COLUMN tokenkeeper.campaign_token.token IS 'Raises 23514 if parse_token cannot read it.';

CREATE INDEX campaign_token_key ON tokenkeeper.campaign_token (campaign_id, tokenkeeper.token_key(token));

CREATE TABLE tokenkeeper.campaign_list (
    campaign_id bigint,
    given_in    xid8,
    PRIMARY KEY (campaign_id, given_in)
);
COMMENT ON TABLE tokenkeeper.campaign_list IS
    'Internal: the transaction copies tokens into campaign_token. A trigger on this row checks the list at COMMIT, and deletes the row.';
