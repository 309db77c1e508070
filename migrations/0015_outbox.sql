-- oldest daemon: 0.1.0
--
-- The outbox: requests that a daemon sends to APNs, behind the gate. Who has a sender of their own leaves it empty.
--
-- A request is in exactly one place: send_request until it has ended, then suppressed_send (the gate said no), failed_send (given up, whole),
-- or, answered, in the queue send_result like everyone's, so that there is one path from an answer to the ledger. It changes place in one
-- transaction. A daemon claims what is due, and the claim asks the gate: what the ledger learns while requests wait, counts.

CREATE TABLE tokenkeeper.send_request (
    environment    text COLLATE "C" DEFAULT 'production',
    topic          text COLLATE "C",
    token          text,
    payload        jsonb,
    push_type      text,
    priority       integer,
    expiration     timestamptz,
    collapse_id    text,
    not_before     timestamptz,
    apns_id        uuid DEFAULT gen_random_uuid(),
    -- Internal from here on: not granted to senders.
    request_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queued_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    claimed_by     text COLLATE "C",
    first_sent_at  timestamptz,
    attempts       integer NOT NULL DEFAULT 0,
    cuts           smallint NOT NULL DEFAULT 0,
    postponed      boolean NOT NULL DEFAULT false,
    last_error     text
);
COMMENT ON TABLE tokenkeeper.send_request IS
    'The outbox: one row a notification for one device, by INSERT, COPY or enqueue. Needed: topic, token, payload. Null means the default. '
    'What cannot be sent ends in failed_send with the error and never fails a sender''s batch.';
COMMENT ON COLUMN tokenkeeper.send_request.environment IS 'production (the default) or sandbox.';
COMMENT ON COLUMN tokenkeeper.send_request.topic IS 'The apns-topic header, such as com.example.app.';
COMMENT ON COLUMN tokenkeeper.send_request.token IS 'The device token in hex, in either case.';
COMMENT ON COLUMN tokenkeeper.send_request.payload IS 'A JSON object: at most 4096 bytes (5120 for VoIP) as it is sent, without blanks between its parts.';
COMMENT ON COLUMN tokenkeeper.send_request.push_type IS
    'alert, background, voip, complication, fileprovider, mdm, liveactivity, location, pushtotalk, widgets, controls; null: see push_type_of.';
COMMENT ON COLUMN tokenkeeper.send_request.priority IS '10, 5 or 1; null: 5 for a background push, which allows nothing else, and for others APNs'' default, 10.';
COMMENT ON COLUMN tokenkeeper.send_request.expiration IS
    'Until when APNs shall try to deliver; the epoch (1970-01-01Z) is once only; null leaves it to APNs. A request that is not sent by then is given up.';
COMMENT ON COLUMN tokenkeeper.send_request.collapse_id IS 'Notifications of the same one are shown as one: 1 to 64 bytes; or null.';
COMMENT ON COLUMN tokenkeeper.send_request.not_before IS 'Not to be sent earlier; null is at once. A daemon sets it when it is to be tried again.';
COMMENT ON COLUMN tokenkeeper.send_request.apns_id IS 'The apns-id header: the same however often it is sent; results bear it.';
COMMENT ON COLUMN tokenkeeper.send_request.claimed_by IS 'Internal: the daemon that has it in hand; null while it waits.';
COMMENT ON COLUMN tokenkeeper.send_request.first_sent_at IS 'Internal: when a daemon had it in hand first: the end of trying again counts from here.';
COMMENT ON COLUMN tokenkeeper.send_request.attempts IS 'Internal: how often APNs asked for another try, or did not answer.';
COMMENT ON COLUMN tokenkeeper.send_request.cuts IS
    'Internal: how often it was cut off: its daemon was killed, or no answer came to what was sent. After the second time it is given up: it may have been delivered.';
COMMENT ON COLUMN tokenkeeper.send_request.postponed IS 'Internal: a background push that waits because its device had its share for this hour.';
COMMENT ON COLUMN tokenkeeper.send_request.last_error IS 'Internal: why it is to be tried again.';

-- By topic, so that topics take turns, and one that is halted is not even looked at.
-- left: an index takes no long text, and a bad row must not fail a sender's batch. No topic that can be sent to is so long.
CREATE INDEX send_request_due ON tokenkeeper.send_request
    (left(coalesce(topic, ''), 513), left(coalesce(environment, 'production'), 20), (coalesce(not_before, queued_at)))
    WHERE claimed_by IS NULL;
COMMENT ON INDEX tokenkeeper.send_request_due IS 'What may be claimed, by topic and time.';
CREATE INDEX send_request_claimed ON tokenkeeper.send_request (claimed_by) WHERE claimed_by IS NOT NULL;
CREATE INDEX send_request_postponed ON tokenkeeper.send_request (tokenkeeper.token_key(token)) WHERE postponed;

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
    request_id     bigint NOT NULL,
    queued_at      timestamptz NOT NULL
);
CREATE INDEX suppressed_send_token_key ON tokenkeeper.suppressed_send (token_key);
COMMENT ON TABLE tokenkeeper.suppressed_send IS
    'Requests that the gate kept from being sent, and why. The sweep deletes them after sweep.send_retention.';
COMMENT ON COLUMN tokenkeeper.suppressed_send.state IS
    'That of the token then: stale, suspect, superseded, unregistered_by_app; or background: a newer background push waits for the same device.';
COMMENT ON COLUMN tokenkeeper.suppressed_send.reason IS 'The reason of that state, such as Unregistered.';
COMMENT ON COLUMN tokenkeeper.suppressed_send.invalidated_at IS 'As of when the token was dead.';

CREATE TABLE tokenkeeper.failed_send (
    failed_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    failed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    error       text NOT NULL,
    status      integer,
    environment text,
    topic       text,
    token       text,
    payload     jsonb,
    push_type   text,
    priority    integer,
    expiration  timestamptz,
    collapse_id text,
    apns_id     uuid,
    request_id  bigint NOT NULL,
    queued_at   timestamptz NOT NULL,
    attempts    integer NOT NULL
);
COMMENT ON TABLE tokenkeeper.failed_send IS
    'Requests that were given up, whole, with the error; requeue_failed puts them back. The sweep deletes them after sweep.send_retention.';
COMMENT ON COLUMN tokenkeeper.failed_send.error IS 'What was found and what was expected, or what APNs answered last.';
COMMENT ON COLUMN tokenkeeper.failed_send.status IS 'The HTTP status of APNs'' last answer; null where there was none.';

CREATE TABLE tokenkeeper.send_halt (
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    halted_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason      text NOT NULL,
    halted_by   text NOT NULL DEFAULT session_user,
    PRIMARY KEY (topic, environment)
);
COMMENT ON TABLE tokenkeeper.send_halt IS
    'Topics whose requests wait, because APNs blames the sender, or because of halt_sending; until resume_sending.';
COMMENT ON COLUMN tokenkeeper.send_halt.reason IS 'What APNs answered, or what was said to halt_sending.';

CREATE TABLE tokenkeeper.background_send (
    environment text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    token_key   bytea NOT NULL,
    sent_at     timestamptz[] NOT NULL,
    latest_at   timestamptz NOT NULL,
    PRIMARY KEY (topic, environment, token_key)
);
COMMENT ON TABLE tokenkeeper.background_send IS
    'The background pushes that each device had within the last hour: not more than a few, or Apple holds them back. Swept after that hour.';

CREATE TABLE tokenkeeper.sending_daemon (
    daemon_id   text PRIMARY KEY,
    place       text NOT NULL,
    beat_at     timestamptz NOT NULL,
    stopped_at  timestamptz,
    credentials jsonb NOT NULL,
    trouble     text[] NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.sending_daemon IS
    'The heartbeat of each daemon that sends. What one that is silent for a minute had claimed, another one claims.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.place IS
    'The machine''s boot and space of process numbers: within the same one a daemon can tell at once that another has gone.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.credentials IS 'What it has: name, kind, topics, environments, and when it expires; never a secret.';
COMMENT ON COLUMN tokenkeeper.sending_daemon.trouble IS 'What keeps requests waiting, in words.';

ALTER TABLE tokenkeeper.topic ADD COLUMN background_per_hour integer CHECK (background_per_hour >= 0);
CREATE OR REPLACE VIEW tokenkeeper.topic_policy AS
SELECT t.environment, t.topic, t.gate, t.stale_retention, t.dormant_after, t.guard_min_tokens, t.guard_max_share,
       t.prune_min_tokens, t.prune_max_share, t.first_seen, t.background_per_hour
FROM tokenkeeper.topic AS t;
COMMENT ON COLUMN tokenkeeper.topic_policy.background_per_hour IS
    'So many background pushes a device may have within an hour, 0 for no limit; else send.background_per_hour.';

-- enqueue finds tokens by tag. A registration whose tags stay the same touches it no more than any other index.
-- For a large ledger it is made beforehand, CONCURRENTLY: docs/operations.md. No registration shall have to clear a list of pending entries.
CREATE INDEX IF NOT EXISTS ledger_tags ON tokenkeeper.ledger USING gin (tags) WITH (fastupdate = off) WHERE tags IS NOT NULL;
COMMENT ON INDEX tokenkeeper.ledger_tags IS 'The tokens that bear a tag.';

-- What a request must be -------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.is_silent(payload jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(payload -> 'aps' -> 'content-available' = '1'::jsonb
                AND NOT (payload -> 'aps') ?| ARRAY['alert', 'sound', 'badge'], false);
COMMENT ON FUNCTION tokenkeeper.is_silent(jsonb) IS 'Whether a payload is a background push: content-available 1, and no alert, sound or badge.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.is_silent(jsonb) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.push_type_of(payload jsonb, topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN topic LIKE '%.voip' THEN 'voip'
    WHEN topic LIKE '%.complication' THEN 'complication'
    WHEN topic LIKE '%.pushkit.fileprovider' THEN 'fileprovider'
    WHEN topic LIKE '%.push-type.liveactivity' THEN 'liveactivity'
    WHEN topic LIKE '%.push-type.widgets' THEN 'widgets'
    WHEN topic LIKE '%.push-type.controls' THEN 'controls'
    WHEN topic LIKE '%.location-query' THEN 'location'
    WHEN topic LIKE '%.voip-ptt' THEN 'pushtotalk'
    WHEN payload ? 'mdm' THEN 'mdm'
    WHEN tokenkeeper.is_silent(payload) THEN 'background'
    ELSE 'alert'
END;
COMMENT ON FUNCTION tokenkeeper.push_type_of(jsonb, text) IS
    'The push type of a request that names none: by the suffix that Apple asks of the topic, else mdm, background, alert by the payload.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.push_type_of(jsonb, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.send_fault(
    environment text, topic text, payload jsonb, push_type text, priority integer, expiration timestamptz, collapse_id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN environment NOT IN ('production', 'sandbox')
        THEN 'environment is ' || quote_literal(left(environment, 20)) || ', expected ''production'' or ''sandbox'''
    WHEN coalesce(topic, '') = '' THEN 'topic is missing, expected the apns-topic header'
    WHEN octet_length(topic) > 512 OR topic ~ '[^!-~]' THEN 'topic has blanks, or characters that no header can carry, or is over 512 bytes long'
    WHEN payload IS NULL THEN 'payload is missing, expected a JSON object'
    WHEN jsonb_typeof(payload) <> 'object' THEN 'payload is a JSON ' || jsonb_typeof(payload) || ', expected an object'
    WHEN push_type NOT IN ('alert', 'background', 'voip', 'complication', 'fileprovider', 'mdm', 'liveactivity', 'location', 'pushtotalk',
                           'widgets', 'controls')
        THEN 'push_type is ' || quote_literal(left(push_type, 20)) || ', expected alert, background, voip, complication, fileprovider, '
             || 'mdm, liveactivity, location, pushtotalk, widgets or controls'
    WHEN push_type = 'background' AND NOT tokenkeeper.is_silent(payload)
        THEN 'push_type is background, expected a payload with content-available 1 and no alert, sound or badge'
    WHEN push_type = 'alert' AND tokenkeeper.is_silent(payload)
        THEN 'push_type is alert, expected background: the payload has content-available 1 and no alert, sound or badge'
    WHEN push_type = 'background' AND priority <> 5 THEN 'priority is ' || priority || ', expected 5 for a background push'
    WHEN priority NOT IN (10, 5, 1) THEN 'priority is ' || priority || ', expected 10, 5 or 1'
    WHEN NOT isfinite(expiration) OR expiration < 'epoch'
        THEN 'expiration is ' || CASE WHEN isfinite(expiration) THEN 'before 1970' ELSE 'infinite' END || ', expected a finite instant, or null'
    WHEN octet_length(collapse_id) NOT BETWEEN 1 AND 64
        THEN 'collapse_id is ' || octet_length(collapse_id) || ' bytes long, expected 1 to 64'
    WHEN collapse_id ~ '[^ -~]|^ | $' THEN 'collapse_id has characters that no header can carry'
    -- At least so long, whatever stands in its texts; exactly it is known where it is sent.
    WHEN octet_length(replace(replace(payload::text, ': ', ':'), ', ', ',')) > CASE push_type WHEN 'voip' THEN 5120 ELSE 4096 END
        THEN 'payload is over ' || CASE push_type WHEN 'voip' THEN '5120' ELSE '4096' END || ' bytes long'
END;
COMMENT ON FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text) IS
    'What APNs would refuse a request for, whatever its token: found and expected, in words; null when nothing. The push type is given.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text) FROM PUBLIC;

-- What senders call ------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.enqueue(
    payload jsonb,
    topic text,
    environment text DEFAULT 'production',
    tags text[] DEFAULT NULL,
    push_type text DEFAULT NULL,
    priority integer DEFAULT NULL,
    expiration timestamptz DEFAULT NULL,
    collapse_id text DEFAULT NULL,
    not_before timestamptz DEFAULT NULL,
    device_id text DEFAULT NULL,
    everyone boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    env text := coalesce(enqueue.environment, 'production');
    kind text := coalesce(enqueue.push_type, tokenkeeper.push_type_of(enqueue.payload, enqueue.topic));
    fault text := tokenkeeper.send_fault(env, enqueue.topic, enqueue.payload, kind, enqueue.priority, enqueue.expiration, enqueue.collapse_id);
    requests bigint;
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (enqueue.tags IS NOT NULL)::integer + (enqueue.device_id IS NOT NULL)::integer + coalesce(enqueue.everyone, false)::integer <> 1 THEN
        RAISE EXCEPTION 'addressed is %, expected one of tags, device_id and everyone',
            CASE WHEN enqueue.tags IS NULL AND enqueue.device_id IS NULL AND NOT coalesce(enqueue.everyone, false) THEN 'nobody' ELSE 'more than one' END
            USING ERRCODE = 'invalid_parameter_value', HINT = 'everyone => true is all tokens of the topic; a variable that is null by mistake shall not be.';
    END IF;
    -- EXECUTE: planned anew for these very tags, since one is borne by all and another by one. Null parameters fall away in the plan.
    EXECUTE $statement$
        INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, not_before)
        SELECT $1, $2, encode(l.token_key, 'hex'), $3, $4, $5, $6, $7, $8
        FROM tokenkeeper.topic AS t
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
        WHERE t.topic = $2 AND t.environment = $1
          AND (NOT l.suppressed OR t.gate = 'observe') AND l.registered_at > '-infinity' AND $statement$
        || CASE WHEN enqueue.tags IS NOT NULL THEN 'l.tags && $9' WHEN enqueue.device_id IS NOT NULL THEN 'l.device_id = $10' ELSE 'true' END
        USING env, enqueue.topic, enqueue.payload, kind, enqueue.priority, enqueue.expiration, enqueue.collapse_id, enqueue.not_before,
              enqueue.tags, enqueue.device_id;
    GET DIAGNOSTICS requests = ROW_COUNT;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.enqueue(jsonb, text, text, text[], text, integer, timestamptz, text, timestamptz, text, boolean) IS
    'Queues a notification for every token of the topic that may be sent to and bears one of the tags; or for all tokens of a device; or, with '
    'everyone => true, for all of the topic; in the caller''s transaction. Answers how many. Raises 22023 for what APNs would refuse.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.enqueue(jsonb, text, text, text[], text, integer, timestamptz, text, timestamptz, text, boolean) FROM PUBLIC;

-- What operators call ----------------------------------------------------------------------------------------------

ALTER TABLE tokenkeeper.operation DROP CONSTRAINT operation_operation_check;
ALTER TABLE tokenkeeper.operation ADD CONSTRAINT operation_operation_check
    CHECK (operation IN ('guard_opened', 'guard_closed', 'held_released', 'held_discarded', 'reinstated', 'rejected_requeued', 'forgotten',
        'policy_changed', 'device_crowded', 'sending_halted', 'sending_resumed', 'failed_requeued'));

CREATE FUNCTION tokenkeeper.halt_sending(topic text, environment text DEFAULT 'production', reason text DEFAULT 'an operator has halted it')
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- A slip of the pen shall not look like a halt.
    IF coalesce(halt_sending.environment, 'production') NOT IN ('production', 'sandbox') OR coalesce(halt_sending.topic, '') = '' THEN
        RAISE EXCEPTION 'expected a topic, and production or sandbox' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tokenkeeper.send_halt AS h (environment, topic, reason)
    VALUES (coalesce(halt_sending.environment, 'production'), halt_sending.topic, coalesce(halt_sending.reason, ''))
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, message)
        VALUES ('sending_halted', coalesce(halt_sending.environment, 'production'), halt_sending.topic, halt_sending.reason);
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.halt_sending(text, text, text) IS
    'Has the requests of a topic wait until resume_sending: no daemon claims another. False when it was halted already, with the earlier reason. Raises 22023 for no topic, or an unknown environment.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.halt_sending(text, text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.resume_sending(topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM tokenkeeper.send_halt AS h
    WHERE h.topic = resume_sending.topic AND h.environment = coalesce(resume_sending.environment, 'production');
    IF FOUND THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic)
        VALUES ('sending_resumed', coalesce(resume_sending.environment, 'production'), resume_sending.topic);
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.resume_sending(text, text) IS
    'Lets the requests of a topic go out again, once what APNs complained of is mended. False when the topic was not halted.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.resume_sending(text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.requeue_failed(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    requests bigint;
BEGIN
    WITH gone AS (
        DELETE FROM tokenkeeper.failed_send AS f
        WHERE requeue_failed.ids IS NULL OR f.failed_id = ANY (requeue_failed.ids) RETURNING f.*
    )
    INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id, queued_at)
    SELECT g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration, g.collapse_id, g.apns_id, g.queued_at FROM gone AS g;
    GET DIAGNOSTICS requests = ROW_COUNT;
    IF requests > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('failed_requeued', requests);
    END IF;
    RETURN requests;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_failed(bigint[]) IS
    'Puts requests that were given up, by their failed_id, or all, back into the outbox, with their apns_id; answers how many.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_failed(bigint[]) FROM PUBLIC;

-- What daemons call ------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.claim_requests(
    environment text, topic text, daemon_id text, most integer, background_per_hour integer, due_since timestamptz)
RETURNS TABLE (request_id bigint, token_key bytea, payload text, push_type text, priority integer, expiration bigint, collapse_id text,
               apns_id text, attempts integer, first_sent_at timestamptz, due_at timestamptz, suppressed bigint, failed bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- Each request is looked up by itself, whatever the tables were when this session made its plan.
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    of_topic tokenkeeper.topic;
    a_background integer;
BEGIN
    SELECT t.* INTO of_topic FROM tokenkeeper.topic AS t
    WHERE t.topic = claim_requests.topic AND t.environment = claim_requests.environment;
    a_background := nullif(coalesce(of_topic.background_per_hour, claim_requests.background_per_hour), 0);
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT r.* FROM tokenkeeper.send_request AS r
        WHERE left(coalesce(r.topic, ''), 513) = claim_requests.topic AND left(coalesce(r.environment, 'production'), 20) = claim_requests.environment
          AND coalesce(r.not_before, r.queued_at) BETWEEN claim_requests.due_since AND now() AND r.claimed_by IS NULL
        ORDER BY coalesce(r.not_before, r.queued_at)
        LIMIT claim_requests.most
        FOR UPDATE SKIP LOCKED
    ), understood AS MATERIALIZED (
        SELECT d.*, tokenkeeper.token_key(d.token) AS key, coalesce(d.push_type, tokenkeeper.push_type_of(d.payload, d.topic)) AS kind
        FROM due AS d
    ), judged AS MATERIALIZED (
        SELECT u.*, l.state, l.reason, l.invalidated_at, b.sends, b.earliest, CASE
                   WHEN u.cuts >= 2 THEN 'it was cut off twice while it was being sent, and may have been delivered'
                   WHEN u.cuts >= 1 AND u.expiration = 'epoch' THEN 'it was cut off while it was being sent, and its expiration allows one try only'
                   WHEN u.key IS NULL THEN 'device token is ' || coalesce(length(u.token) || ' characters', 'missing')
                                           || ', expected 1 to 512 bytes in hex'
                   WHEN u.expiration > 'epoch' AND u.expiration <= now() THEN 'its expiration passed before it could be sent'
                   ELSE tokenkeeper.send_fault(coalesce(u.environment, 'production'), u.topic, u.payload, u.kind, u.priority, u.expiration, u.collapse_id)
               END AS fault
        FROM understood AS u
        -- LIMIT: never a join that reads the ledger from end to end.
        LEFT JOIN LATERAL (
            SELECT tokenkeeper.state_of(l) AS state, greatest(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) AS invalidated_at,
                   CASE tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at)
                       WHEN 'dead' THEN l.dead_reason
                       WHEN 'suspect' THEN l.suspect_reason
                       WHEN 'unregistered' THEN 'unregistered by the app'
                       WHEN 'superseded' THEN 'a newer token of the same device'
                   END AS reason
            FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic.topic_id AND l.token_key = u.key AND l.suppressed > false AND of_topic.gate IS DISTINCT FROM 'observe'
            LIMIT 1) AS l ON true
        LEFT JOIN LATERAL (
            SELECT count(*) AS sends, min(a.sent_at) AS earliest
            FROM tokenkeeper.background_send AS b CROSS JOIN unnest(b.sent_at) AS a (sent_at)
            WHERE u.kind = 'background' AND b.topic = u.topic AND b.environment = claim_requests.environment AND b.token_key = u.key
              AND a.sent_at > now() - interval '1 hour') AS b ON true
    ), ordered AS MATERIALIZED (
        -- Of a device's background pushes those that were asked for first go out; of those beyond its share the newest waits.
        SELECT j.*, row_number() OVER (PARTITION BY j.key ORDER BY j.request_id) > 5 AS crowded,
               j.fault IS NULL AND j.state IS NULL AND j.kind = 'background'
                    AND j.sends + row_number() OVER (PARTITION BY j.key, j.kind, j.fault IS NULL AND j.state IS NULL ORDER BY j.request_id) > a_background AS too_many,
               row_number() OVER (PARTITION BY j.key, j.kind, j.fault IS NULL AND j.state IS NULL ORDER BY j.request_id DESC) = 1 AS newest
        FROM judged AS j
    ), fated AS MATERIALIZED (
        SELECT o.*, CASE WHEN o.fault IS NOT NULL THEN 'failed'
                         WHEN o.state IS NOT NULL OR (o.too_many AND NOT o.newest) THEN 'suppressed'
                         WHEN o.too_many THEN 'postponed'
                         -- One a token is under way at a time: many shall not keep the others out.
                         WHEN o.crowded THEN 'behind'
                         ELSE 'sent' END AS fate
        FROM ordered AS o
    ), overtaken AS (
        DELETE FROM tokenkeeper.send_request AS r USING fated AS f
        WHERE f.fate = 'postponed' AND r.postponed AND tokenkeeper.token_key(r.token) = f.key AND r.topic = f.topic
          AND coalesce(r.environment, 'production') = claim_requests.environment AND r.claimed_by IS NULL
          AND r.request_id < f.request_id AND r.request_id NOT IN (SELECT d.request_id FROM due AS d)
        RETURNING r.*, f.key
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppressed_send (environment, topic, token, token_key, state, reason, invalidated_at, push_type, apns_id, request_id, queued_at)
        SELECT claim_requests.environment, f.topic, encode(f.key, 'hex'), f.key, coalesce(f.state, 'background'),
               CASE WHEN f.state IS NULL THEN 'a newer background push waits' ELSE f.reason END, f.invalidated_at, f.kind, f.apns_id, f.request_id, f.queued_at
        FROM fated AS f WHERE f.fate = 'suppressed'
        UNION ALL
        SELECT claim_requests.environment, o.topic, encode(o.key, 'hex'), o.key, 'background', 'a newer background push waits', NULL,
               'background', o.apns_id, o.request_id, o.queued_at
        FROM overtaken AS o
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts)
        SELECT f.fault, f.environment, f.topic, f.token, f.payload, f.push_type, f.priority, f.expiration, f.collapse_id, f.apns_id,
               f.request_id, f.queued_at, f.attempts
        FROM fated AS f WHERE f.fate = 'failed'
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING fated AS f WHERE f.fate IN ('suppressed', 'failed') AND r.request_id = f.request_id
    ), postponed AS (
        UPDATE tokenkeeper.send_request AS r
        SET postponed = true, not_before = coalesce(f.earliest, now()) + interval '1 hour'
        FROM fated AS f WHERE f.fate = 'postponed' AND r.request_id = f.request_id
    ), behind AS (
        UPDATE tokenkeeper.send_request AS r SET not_before = now() + interval '1 second'
        FROM fated AS f WHERE f.fate = 'behind' AND r.request_id = f.request_id
    ), noted AS (
        INSERT INTO tokenkeeper.background_send AS b (environment, topic, token_key, sent_at, latest_at)
        SELECT claim_requests.environment, f.topic, f.key, array_agg(now()), now()
        FROM fated AS f WHERE f.fate = 'sent' AND f.kind = 'background' AND a_background IS NOT NULL
        GROUP BY f.topic, f.key ORDER BY f.key
        ON CONFLICT ON CONSTRAINT background_send_pkey DO UPDATE
        SET sent_at = ARRAY(SELECT a FROM unnest(b.sent_at) AS a WHERE a > now() - interval '1 hour') || excluded.sent_at, latest_at = now()
    ), sent AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = claim_requests.daemon_id, first_sent_at = coalesce(r.first_sent_at, now()), postponed = false,
            apns_id = coalesce(r.apns_id, gen_random_uuid())
        FROM fated AS f WHERE f.fate = 'sent' AND r.request_id = f.request_id
        RETURNING r.request_id, f.key, r.payload::text AS payload, f.kind, CASE f.kind WHEN 'background' THEN 5 ELSE r.priority END AS priority,
                  floor(extract(epoch FROM r.expiration))::bigint AS expiration, r.collapse_id, r.apns_id::text AS apns_id, r.attempts,
                  r.first_sent_at, coalesce(f.not_before, f.queued_at) AS due_at
    )
    SELECT s.*, NULL::bigint, NULL::bigint FROM sent AS s
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, max(coalesce(f.not_before, f.queued_at)),
           count(*) FILTER (WHERE f.fate = 'suppressed') + (SELECT count(*) FROM overtaken), count(*) FILTER (WHERE f.fate = 'failed')
    FROM fated AS f;
END
$$;
COMMENT ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) IS
    'Takes requests of a topic in hand that are due, asking the gate in the same statement: a token that may not be sent to makes a row in '
    'suppressed_send, a request that cannot be sent one in failed_send, and a background push beyond its device''s share waits. Answers the others; and '
    'one row without a request_id, with the latest due_at and how many were suppressed and failed. due_since: what was due earlier is not looked at.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.finish_requests(
    daemon_id text, request_ids bigint[], fates text[], statuses integer[], bodies text[], apns_ids text[], sent_ats timestamptz[],
    pauses bigint[], errors text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    ended bigint;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT t.* FROM unnest(finish_requests.request_ids, finish_requests.fates, finish_requests.statuses, finish_requests.bodies,
                               finish_requests.apns_ids, finish_requests.sent_ats, finish_requests.pauses, finish_requests.errors)
            AS t (request_id, fate, status, body, apns_id, sent_at, pause, error)
    ), gone AS (
        DELETE FROM tokenkeeper.send_request AS r USING told AS t
        WHERE r.request_id = t.request_id AND r.claimed_by = finish_requests.daemon_id AND t.fate IN ('answered', 'failed')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at, t.error
    ), kept AS (
        UPDATE tokenkeeper.send_request AS r
        SET claimed_by = NULL, attempts = r.attempts + CASE t.fate WHEN 'returned' THEN 0 ELSE 1 END,
            cuts = r.cuts + CASE t.fate WHEN 'cut' THEN 1 ELSE 0 END, last_error = coalesce(t.error, r.last_error),
            first_sent_at = CASE WHEN t.fate = 'returned' AND r.attempts = 0 AND r.cuts = 0 THEN NULL ELSE r.first_sent_at END,
            not_before = CASE WHEN t.pause IS NULL THEN r.not_before ELSE clock_timestamp() + t.pause * interval '1 microsecond' END
        FROM told AS t
        WHERE r.request_id = t.request_id AND r.claimed_by = finish_requests.daemon_id AND t.fate IN ('later', 'cut', 'returned')
        RETURNING r.*, t.fate, t.status, t.body, t.apns_id AS answered_id, t.sent_at
    ), uncounted AS (
        -- What did not reach its device is none of its share for this hour.
        UPDATE tokenkeeper.background_send AS b
        SET sent_at = b.sent_at[1:cardinality(b.sent_at) - u.requests]
        FROM (SELECT k.topic, coalesce(k.environment, 'production') AS environment, tokenkeeper.token_key(k.token) AS key, count(*)::integer AS requests
              FROM kept AS k
              WHERE k.fate IN ('later', 'returned') AND coalesce(k.push_type, tokenkeeper.push_type_of(k.payload, k.topic)) = 'background'
              GROUP BY 1, 2, 3) AS u
        WHERE b.topic = u.topic AND b.environment = u.environment AND b.token_key = u.key
    ), answered AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at)
        SELECT coalesce(e.environment, 'production'), e.topic, e.token, e.status, e.body, coalesce(e.answered_id, e.apns_id::text), e.sent_at
        FROM (SELECT g.environment, g.topic, g.token, g.status, g.body, g.answered_id, g.apns_id, g.sent_at FROM gone AS g
              UNION ALL
              SELECT k.environment, k.topic, k.token, k.status, k.body, k.answered_id, k.apns_id, k.sent_at FROM kept AS k) AS e
        WHERE e.status IS NOT NULL
    ), failed AS (
        INSERT INTO tokenkeeper.failed_send (error, status, environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id,
                                             request_id, queued_at, attempts)
        SELECT coalesce(g.error, 'given up'), g.status, g.environment, g.topic, g.token, g.payload, g.push_type, g.priority, g.expiration,
               g.collapse_id, g.apns_id, g.request_id, g.queued_at, g.attempts
        FROM gone AS g WHERE g.fate = 'failed'
    )
    SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM kept) INTO ended;
    RETURN ended;
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[]) IS
    'Says how requests that this daemon has in hand ended: answered, failed (given up), later (to be tried again after the pause, in microseconds), '
    'cut (no answer came: later, for the last time) or returned (it was not sent). Answers of APNs go into send_result. Counts those that were still in its hand.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.finish_requests(text, bigint[], text[], integer[], text[], text[], timestamptz[], bigint[], text[]) FROM PUBLIC;
