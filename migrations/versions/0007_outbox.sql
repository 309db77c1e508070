-- oldest daemon: 0.1.0
--
-- The outbox: requests that a daemon sends to APNs, behind the gate. It stays empty if you send pushes yourself.
--
-- A request is in exactly one place: in send_request until it has ended; then in suppressed_send (the gate refused it), in failed_send
-- (it failed), or, once APNs has responded, in the queue send_result with all other results, so that only one path leads from a
-- response to the ledger. It changes place in one transaction. A daemon claims what is due, and the claim asks the gate, so what the
-- ledger learns while requests wait counts.

CREATE TABLE tokenkeeper.send_request (
    environment   text COLLATE "C" DEFAULT 'production',
    topic         text COLLATE "C",
    token         text,
    -- json, not jsonb: jsonb refuses some JSON texts (an escaped U+0000, half a surrogate pair) and would fail a sender's whole INSERT. The
    -- claim parses the payload, and a bad one fails alone.
    payload       json,
    push_type     text,
    priority      integer,
    expiration    timestamptz,
    collapse_id   text,
    scheduled_at  timestamptz,
    apns_id       uuid DEFAULT gen_random_uuid(),
    -- Internal from here on: not granted to senders.
    request_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queued_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    claimed_by    text COLLATE "C",
    first_sent_at timestamptz,
    attempts      integer NOT NULL DEFAULT 0,
    refusals      smallint NOT NULL DEFAULT 0,
    interruptions smallint NOT NULL DEFAULT 0,
    postponed     boolean NOT NULL DEFAULT false,
    last_error    text,
    deferred      boolean NOT NULL DEFAULT false,
    campaign_id     bigint,
    campaign_number bigint,
    alert_counted   boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE tokenkeeper.send_request IS
    'The outbox, for INSERT or COPY: one row per notification and token; also requests of campaigns that wait or are retried. Required: topic, token, '
    'payload. Null means the default. A request that cannot be sent goes to failed_send, with the error.';
COMMENT ON COLUMN tokenkeeper.send_request.payload IS
    'A JSON object of at most 4096 bytes (VoIP: 5120), without the blanks between its parts, which are not sent.';
COMMENT ON COLUMN tokenkeeper.send_request.push_type IS
    'alert, background, voip, complication, fileprovider, mdm, liveactivity, location, pushtotalk, widgets or controls; null: by the topic''s suffix, '
    'otherwise by the payload (mdm, background or alert).';
COMMENT ON COLUMN tokenkeeper.send_request.priority IS '10, 5 or 1; null: 5 for a background push, which allows no other, otherwise 10.';
COMMENT ON COLUMN tokenkeeper.send_request.expiration IS
    'Until when APNs tries to deliver; a request not sent by then fails. The epoch (1970-01-01Z): one attempt only; null: as APNs decides.';
COMMENT ON COLUMN tokenkeeper.send_request.collapse_id IS 'Notifications with the same one are shown as one: 1 to 64 bytes, or null.';
COMMENT ON COLUMN tokenkeeper.send_request.scheduled_at IS 'Not sent earlier; null: at once. A daemon sets it when it defers the request.';
COMMENT ON COLUMN tokenkeeper.send_request.apns_id IS 'The apns-id header of each attempt and of the result.';
COMMENT ON COLUMN tokenkeeper.send_request.claimed_by IS 'Internal: the daemon that has claimed it; null while it waits.';
COMMENT ON COLUMN tokenkeeper.send_request.first_sent_at IS 'Internal: when a daemon first claimed it. send.retry_for counts from here.';
COMMENT ON COLUMN tokenkeeper.send_request.attempts IS 'Internal: how often APNs asked for a retry or did not respond.';
COMMENT ON COLUMN tokenkeeper.send_request.refusals IS 'Internal: how often APNs refused it while it accepted others of the topic. After five it fails.';
COMMENT ON COLUMN tokenkeeper.send_request.interruptions IS
    'Internal: how often its daemon was killed, or what was sent got no response. After the second time it fails, because it may have been delivered.';
COMMENT ON COLUMN tokenkeeper.send_request.postponed IS 'Internal: a background push that waits because its device had its share for this hour.';
COMMENT ON COLUMN tokenkeeper.send_request.last_error IS 'Internal: why it is retried.';
COMMENT ON COLUMN tokenkeeper.send_request.deferred IS 'Internal: a daemon has set scheduled_at, so that it is sent later than requested.';
COMMENT ON COLUMN tokenkeeper.send_request.campaign_id IS
    'Internal: the campaign of this request, which has what is null here: payload, push_type, priority, expiration and collapse_id.';
COMMENT ON COLUMN tokenkeeper.send_request.campaign_number IS 'Internal: the number of the request in its campaign.';
COMMENT ON COLUMN tokenkeeper.send_request.alert_counted IS 'Internal: it counts among the alerts of its device''s day (alerts_per_day), however often it is tried.';

-- By topic, so that topics take turns and a paused topic is not even read. left(): an index cannot hold a long text, and a bad row must
-- not fail a sender's batch. No topic that can be sent to is that long.
CREATE INDEX send_request_due ON tokenkeeper.send_request
    (left(coalesce(topic, ''), 513), left(coalesce(environment, 'production'), 20), (coalesce(scheduled_at, queued_at)))
    WHERE claimed_by IS NULL;
COMMENT ON INDEX tokenkeeper.send_request_due IS 'What may be claimed, by topic and time.';

CREATE INDEX send_request_claimed ON tokenkeeper.send_request (claimed_by) WHERE claimed_by IS NOT NULL;

CREATE INDEX send_request_postponed ON tokenkeeper.send_request (tokenkeeper.token_key(token)) WHERE postponed;

CREATE INDEX send_request_campaign ON tokenkeeper.send_request (campaign_id, campaign_number) WHERE campaign_id IS NOT NULL;

CREATE TABLE tokenkeeper.suppressed_send (
    suppressed_id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    suppressed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    environment    text NOT NULL,
    topic          text NOT NULL,
    token          text NOT NULL,
    token_key      bytea NOT NULL,
    state          text NOT NULL,
    reason         text,
    invalidated_at timestamptz,
    push_type      text NOT NULL,
    apns_id        uuid,
    -- Null for a campaign's request that was never in send_request.
    request_id     bigint,
    queued_at      timestamptz NOT NULL,
    campaign_id     bigint,
    campaign_number bigint
);
COMMENT ON TABLE tokenkeeper.suppressed_send IS 'Requests that the gate or a limit refused, and why. Kept for sweep.send_retention.';
COMMENT ON COLUMN tokenkeeper.suppressed_send.state IS
    'The token''s state then: stale, suspect, superseded, unregistered_by_app; or the limit: background (a newer background push waits for the device) or '
    'alerts (alerts_per_day).';
COMMENT ON COLUMN tokenkeeper.suppressed_send.reason IS 'Of that state, such as Unregistered.';
COMMENT ON COLUMN tokenkeeper.suppressed_send.campaign_id IS 'Null for a single request.';

CREATE INDEX suppressed_send_token_key ON tokenkeeper.suppressed_send (token_key);

CREATE TABLE tokenkeeper.failed_send (
    failed_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    failed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    error       text NOT NULL,
    status      integer,
    environment text,
    topic       text,
    token       text,
    payload     json,
    push_type   text,
    priority    integer,
    expiration  timestamptz,
    collapse_id text,
    apns_id     uuid,
    request_id  bigint,
    queued_at   timestamptz NOT NULL,
    attempts    integer NOT NULL,
    campaign_id     bigint,
    campaign_number bigint
);
COMMENT ON TABLE tokenkeeper.failed_send IS
    'Requests that failed; requeue_failed puts them back. Of one over 16 MiB, the first 1024 characters of each text. Kept for sweep.send_retention.';
COMMENT ON COLUMN tokenkeeper.failed_send.error IS 'What was found and what was expected, or the last response of APNs.';
COMMENT ON COLUMN tokenkeeper.failed_send.status IS 'The HTTP status of the last response of APNs, if any.';
COMMENT ON COLUMN tokenkeeper.failed_send.campaign_id IS 'Null for a single request. The campaign has the payload and headers that are null here.';

CREATE INDEX failed_send_campaign ON tokenkeeper.failed_send (campaign_id, campaign_number) WHERE campaign_id IS NOT NULL;

CREATE TABLE tokenkeeper.paused_topic (
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    paused_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason      text NOT NULL,
    paused_by   text NOT NULL DEFAULT session_user,
    PRIMARY KEY (topic, environment)
);
COMMENT ON TABLE tokenkeeper.paused_topic IS 'Topics paused with pause_sending: their requests wait until resume_sending.';

CREATE TABLE tokenkeeper.provider_token (
    team_id   text COLLATE "C" NOT NULL CHECK (team_id ~ '^[A-Z0-9]{10}$'),
    key_id    text COLLATE "C" NOT NULL CHECK (key_id ~ '^[A-Z0-9]{10}$'),
    issued_at timestamptz NOT NULL CHECK (isfinite(issued_at)),
    sealed    text NOT NULL CHECK (octet_length(sealed) <= 4096),
    PRIMARY KEY (team_id, key_id)
);
COMMENT ON TABLE tokenkeeper.provider_token IS
    'The newest provider token of each signing key that APNs accepted. All daemons share it, because APNs refuses a new token within 20 minutes of the last '
    'one.';
COMMENT ON COLUMN tokenkeeper.provider_token.issued_at IS 'By the clock of the daemon that made it. Of no use an hour later.';
COMMENT ON COLUMN tokenkeeper.provider_token.sealed IS 'The token, encrypted with a key derived from the signing key: AES-256-GCM, in base64.';

CREATE TABLE tokenkeeper.background_send (
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    token_key   bytea NOT NULL,
    sent_at     timestamptz[] NOT NULL,
    latest_at   timestamptz NOT NULL,
    room        integer NOT NULL,
    PRIMARY KEY (topic, environment, token_key)
);
COMMENT ON TABLE tokenkeeper.background_send IS 'The background pushes sent to each device within the last hour; swept after that.';
COMMENT ON COLUMN tokenkeeper.background_send.room IS 'How many more the device could get at the latest claim.';

CREATE TABLE tokenkeeper.crowded_token (
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    token_key   bytea NOT NULL,
    next_at     timestamptz NOT NULL,
    PRIMARY KEY (topic, environment, token_key)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.crowded_token IS
    'Tokens with more than five requests due at once. The others are due later, one after the other, so that they do not delay other tokens. Swept an hour '
    'after the last of them.';
COMMENT ON COLUMN tokenkeeper.crowded_token.next_at IS 'After the last request that waits. Until then, each new one waits behind it.';

CREATE TABLE tokenkeeper.sending_daemon (
    daemon_id     text COLLATE "C" PRIMARY KEY,
    process_scope text NOT NULL,
    heartbeat_at  timestamptz NOT NULL,
    stopped_at    timestamptz,
    credentials   jsonb NOT NULL,
    problems      text[] NOT NULL,
    requests_per_second numeric NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.sending_daemon IS 'The heartbeat of each daemon that sends. After a minute of silence, another claims its requests.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.process_scope IS
    'Internal: the boot of the machine and its PID namespace. Within one, daemons notice at once that another has ended.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.credentials IS 'Of each: name, kind, topics, environments, and when it expires; never a secret.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.problems IS 'What keeps requests waiting.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.requests_per_second IS 'Requests ended per second since the heartbeat before.';

CREATE TYPE tokenkeeper.request_ending AS (
    number  bigint,
    fate    text COLLATE "C",
    status  integer,
    body    text,
    apns_id text,
    sent_at timestamptz,
    pause   bigint,
    error   text,
    meaning text COLLATE "C"
);
COMMENT ON TYPE tokenkeeper.request_ending IS
    'What became of a request that a daemon has claimed. number: its request_id; negative for a request in a campaign''s batch. fate: answered (APNs responded for '
    'good), failed, later (retry after pause, in microseconds), refused (the same, while others of the topic are accepted), interrupted (no response: retry once) '
    'or returned (not sent). status, body and apns_id: the response, if there was one. meaning: what it says about the token: accepted, stale or suspect; null: by '
    'its status.';

CREATE TYPE tokenkeeper.ended_request AS (
    number          bigint,
    environment     text,
    topic           text,
    token           text,
    apns_id         uuid,
    campaign_id     bigint,
    campaign_number bigint,
    queued_at       timestamptz,
    attempts        integer,
    request         tokenkeeper.send_request,
    fate            text COLLATE "C",
    status          integer,
    body            text,
    answered_id     text,
    sent_at         timestamptz,
    error           text,
    result          text COLLATE "C",
    is_unsent       boolean
);
COMMENT ON TYPE tokenkeeper.ended_request IS
    'A request on its way through finish_requests. request: its row, if it was a single one and failed. result: how a campaign''s request ended, or requeued or '
    'returned. is_unsent: a background push that did not reach its device.';
REVOKE USAGE ON TYPE tokenkeeper.request_ending, tokenkeeper.ended_request FROM PUBLIC;

CREATE TYPE tokenkeeper.due_request AS (
    request_id     bigint,
    token_key      bytea,
    push_type      text COLLATE "C",
    payload        text,
    due_at         timestamptz,
    campaign_id    bigint,
    is_late        boolean,
    alert_counted  boolean,
    is_too_long    boolean,
    state          text COLLATE "C",
    reason         text,
    invalidated_at timestamptz,
    fault          text,
    fate           text COLLATE "C",
    earliest       timestamptz
);
COMMENT ON TYPE tokenkeeper.due_request IS
    'A request on its way through a claim. payload: as it is sent; null if it is large. is_late: others wait for its token. is_too_long: a bad row of over '
    '16 MiB. state, reason and invalidated_at: of its token, null if it is sendable; or the limit that refuses it. fault: why it cannot be sent. fate: '
    'forgotten, failed, suppressed, postponed, behind or claimed. earliest: when the first of its device''s background pushes that count was sent.';
REVOKE USAGE ON TYPE tokenkeeper.due_request FROM PUBLIC;
