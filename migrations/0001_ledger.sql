-- oldest daemon: 0.1.0
--
-- The ledger: what is remembered of every device token, and its history.
--
-- The one rule. For each (environment, topic, token) the ledger keeps the latest registration and, for each cause of
-- death, the latest instant at which it was declared. A token is suppressed if and only if the greatest of those
-- instants is not earlier than the registration. Each is a maximum, so results may arrive late, twice and in any order.

DO $$
BEGIN
    -- CREATE SCHEMA IF NOT EXISTS asks for CREATE on the database even where a DBA has made the schema beforehand.
    IF to_regnamespace('tokenkeeper') IS NULL THEN
        EXECUTE 'CREATE SCHEMA tokenkeeper';
    END IF;
END
$$;
COMMENT ON SCHEMA tokenkeeper IS
    'tokenkeeperd: keeps the device tokens of an APNs provider clean. Start reading at the views token and status.';

CREATE TABLE tokenkeeper.migration (
    version       integer PRIMARY KEY CHECK (version > 0),
    name          text NOT NULL,
    checksum      text NOT NULL,
    oldest_daemon text NOT NULL,
    applied_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by    text NOT NULL DEFAULT session_user
);
COMMENT ON TABLE tokenkeeper.migration IS
    'The migrations applied to this schema, by `tokenkeeperd migrate`, forward only.';
COMMENT ON COLUMN tokenkeeper.migration.checksum IS 'SHA-256 of the file, in hex: an edited file is refused.';
COMMENT ON COLUMN tokenkeeper.migration.oldest_daemon IS
    'The oldest version of tokenkeeperd that works with the schema after this migration; older ones refuse to run.';

-- Topics -----------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.topic (
    topic_id    integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    environment text COLLATE "C" NOT NULL CHECK (environment IN ('production', 'sandbox')),
    topic       text COLLATE "C" NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 512),
    first_seen  timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (topic, environment)
);
COMMENT ON TABLE tokenkeeper.topic IS
    'Every (environment, topic) seen, and the small number that stands for it in the ledger: it saves 40 bytes a token. '
    'Rows are never deleted.';
COMMENT ON COLUMN tokenkeeper.topic.topic IS 'The apns-topic header as it was sent, such as com.example.app.voip.';

CREATE FUNCTION tokenkeeper.ensure_topic(environment text, topic text) RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_id integer;
BEGIN
    IF ensure_topic.environment IS NULL OR ensure_topic.environment NOT IN ('production', 'sandbox') THEN
        RAISE EXCEPTION 'environment is %, expected ''production'' or ''sandbox''',
            coalesce(quote_literal(left(ensure_topic.environment, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF ensure_topic.topic IS NULL OR octet_length(ensure_topic.topic) NOT BETWEEN 1 AND 512 THEN
        RAISE EXCEPTION 'topic is %, expected the apns-topic header, 1 to 512 bytes',
            CASE WHEN ensure_topic.topic IS NULL THEN 'null'
                 ELSE octet_length(ensure_topic.topic) || ' bytes long' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT t.topic_id INTO found_id FROM tokenkeeper.topic AS t
        WHERE t.topic = ensure_topic.topic AND t.environment = ensure_topic.environment;
        IF FOUND THEN
            RETURN found_id;
        END IF;
        INSERT INTO tokenkeeper.topic AS t (environment, topic)
        VALUES (ensure_topic.environment, ensure_topic.topic)
        ON CONFLICT DO NOTHING
        RETURNING t.topic_id INTO found_id;
        IF FOUND THEN
            RETURN found_id;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.ensure_topic(text, text) IS
    'The topic_id of an (environment, topic), made when it is new. Raises 22023 for an unknown environment or an empty topic.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.ensure_topic(text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.token_key(token text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    -- decode() alone would accept white space.
    WHEN octet_length(token) BETWEEN 2 AND 1024 AND octet_length(token) % 2 = 0 AND token !~ '[^0-9A-Fa-f]'
    THEN decode(token, 'hex')
END;
COMMENT ON FUNCTION tokenkeeper.token_key(text) IS
    'The key of a device token: the bytes of its hex text, in either case. Null when it is not 1 to 512 bytes of hex.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.token_key(text) FROM PUBLIC;

-- The ledger -------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.ledger (
    registered_at    timestamptz NOT NULL DEFAULT '-infinity',
    dead_at          timestamptz,
    suspect_at       timestamptz,
    unregistered_at  timestamptz,
    superseded_at    timestamptz,
    suppressed_since timestamptz,
    topic_id         integer NOT NULL,
    suppressed       boolean NOT NULL GENERATED ALWAYS AS (
        coalesce(greatest(dead_at, suspect_at, unregistered_at, superseded_at) >= registered_at, false)) STORED,
    token_key        bytea NOT NULL CHECK (octet_length(token_key) BETWEEN 1 AND 512),
    dead_reason      text COLLATE "C",
    suspect_reason   text COLLATE "C",
    device_id        text,
    tags             text[],
    PRIMARY KEY (topic_id, token_key)
)
-- Room on each page for the next version of a row: a registration then touches no index (a HOT update).
WITH (fillfactor = 90);
COMMENT ON TABLE tokenkeeper.ledger IS
    'One row a (topic, token). Written by register, unregister and record alone; people read the view token. '
    'No foreign key to topic: it would lock one hot row a registration, and topics are never deleted.';
COMMENT ON COLUMN tokenkeeper.ledger.registered_at IS
    'The latest registration; -infinity when the token was never registered (null would slip through comparisons).';
COMMENT ON COLUMN tokenkeeper.ledger.dead_at IS 'The latest 410: APNs'' own timestamp, or else the send''s.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_at IS
    'The latest BadDeviceToken or DeviceTokenNotForTopic: when that request was sent.';
COMMENT ON COLUMN tokenkeeper.ledger.unregistered_at IS 'The latest unregister: the app''s own word.';
COMMENT ON COLUMN tokenkeeper.ledger.superseded_at IS
    'Kept for the instant at which a newer token of the same device replaced this one. Nothing sets it yet.';
COMMENT ON COLUMN tokenkeeper.ledger.suppressed_since IS
    'When the ledger learned that the token is suppressed (server clock). The sweep''s retention counts from here, '
    'because a 410''s own timestamp may be older than the retention when it comes.';
COMMENT ON COLUMN tokenkeeper.ledger.suppressed IS
    'The one rule, computed by the database: an instant of death that is not earlier than the registration.';
COMMENT ON COLUMN tokenkeeper.ledger.token_key IS 'The device token''s bytes; see token_key(text).';
COMMENT ON COLUMN tokenkeeper.ledger.dead_reason IS 'The reason that came with dead_at; the greatest text on a tie.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_reason IS
    'The reason that came with suspect_at; the greatest text on a tie.';

-- The predicate is the generated column and not the comparison: registered_at in a predicate would end HOT updates.
CREATE INDEX ledger_suppressed ON tokenkeeper.ledger (topic_id, suppressed_since) WHERE suppressed;
COMMENT ON INDEX tokenkeeper.ledger_suppressed IS 'The suppressed tokens in the order in which the sweep prunes them.';

CREATE FUNCTION tokenkeeper.cause_of(
    dead_at timestamptz, suspect_at timestamptz, unregistered_at timestamptz, superseded_at timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE greatest(dead_at, suspect_at, unregistered_at, superseded_at)
    WHEN dead_at THEN 'dead'
    WHEN suspect_at THEN 'suspect'
    WHEN unregistered_at THEN 'unregistered'
    WHEN superseded_at THEN 'superseded'
END;
COMMENT ON FUNCTION tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz) IS
    'The cause whose instant is the greatest; on a tie the first of dead, suspect, unregistered, superseded; or null.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.state_of(entry tokenkeeper.ledger) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN NOT (entry).suppressed THEN 'active'
    ELSE CASE tokenkeeper.cause_of((entry).dead_at, (entry).suspect_at, (entry).unregistered_at, (entry).superseded_at)
        WHEN 'dead' THEN 'stale'
        WHEN 'suspect' THEN 'suspect'
        WHEN 'unregistered' THEN 'unregistered_by_app'
        WHEN 'superseded' THEN 'superseded'
    END
END;
COMMENT ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) IS
    'The state that people are told: active, or by the cause of the suppression stale, suspect, unregistered_by_app, superseded.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.state_of(tokenkeeper.ledger) FROM PUBLIC;

-- The history ------------------------------------------------------------------------------------------------------

CREATE SEQUENCE tokenkeeper.event_id;
COMMENT ON SEQUENCE tokenkeeper.event_id IS
    'Numbers of token_event. A later number can commit before an earlier one: follow transaction_id, not the number alone.';

CREATE TABLE tokenkeeper.token_event_log (
    at                 timestamptz NOT NULL DEFAULT clock_timestamp(),
    event_id           bigint NOT NULL DEFAULT nextval('tokenkeeper.event_id'),
    transaction_id     xid8 NOT NULL DEFAULT pg_current_xact_id(),
    registered_before  timestamptz,
    registered_after   timestamptz,
    invalidated_before timestamptz,
    invalidated_after  timestamptz,
    topic_id           integer NOT NULL,
    token_key          bytea NOT NULL,
    event              text NOT NULL CHECK (event IN ('registered', 'invalidated', 'revived', 'superseded',
        'unregistered_by_app', 'late_feedback_ignored', 'pruned', 'reinstated')),
    cause              text,
    reason             text,
    device_id          text
) PARTITION BY RANGE (at);
COMMENT ON TABLE tokenkeeper.token_event_log IS
    'The history behind the view token_event, one partition a month: a month is forgotten by dropping its partition.';
CREATE INDEX token_event_log_token_key ON tokenkeeper.token_event_log (token_key);

CREATE TABLE tokenkeeper.token_event_log_other PARTITION OF tokenkeeper.token_event_log DEFAULT;
ALTER TABLE tokenkeeper.token_event_log_other REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.token_event_log_other IS
    'Events of months for which no partition had been prepared, so that no registration ever fails for want of one.';

CREATE FUNCTION tokenkeeper.prepare_event_months() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    first_day timestamptz;
    next_month timestamptz;
    leaf text;
BEGIN
    FOR ahead IN 0..3 LOOP
        first_day := date_trunc('month', clock_timestamp()) + make_interval(months => ahead);
        next_month := first_day + interval '1 month';
        leaf := 'token_event_log_' || to_char(first_day, 'YYYY_MM');
        -- A month whose first events already lie in token_event_log_other stays there.
        CONTINUE WHEN to_regclass('tokenkeeper.' || leaf) IS NOT NULL OR EXISTS (
            SELECT FROM tokenkeeper.token_event_log_other AS e WHERE e.at >= first_day AND e.at < next_month);
        EXECUTE format('CREATE TABLE tokenkeeper.%I (LIKE tokenkeeper.token_event_log INCLUDING ALL)', leaf);
        EXECUTE format('ALTER TABLE tokenkeeper.%I REPLICA IDENTITY FULL', leaf);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.%I IS %L', leaf, 'Events of ' || to_char(first_day, 'YYYY-MM') || ' (UTC).');
        -- ATTACH, unlike CREATE ... PARTITION OF, does not lock out those who write events at the moment.
        EXECUTE format('ALTER TABLE tokenkeeper.token_event_log ATTACH PARTITION tokenkeeper.%I FOR VALUES FROM (%L) TO (%L)',
            leaf, first_day, next_month);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.prepare_event_months() IS
    'Makes the partitions of token_event_log for this month and the next three. Each sweep calls it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.prepare_event_months() FROM PUBLIC;
SELECT tokenkeeper.prepare_event_months();

CREATE FUNCTION tokenkeeper.forget_event_month(before timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $$
DECLARE
    leaf text;
    events bigint;
BEGIN
    DELETE FROM tokenkeeper.token_event_log_other AS e WHERE e.ctid IN (
        SELECT o.ctid FROM tokenkeeper.token_event_log_other AS o WHERE o.at < forget_event_month.before LIMIT 10000);
    GET DIAGNOSTICS events = ROW_COUNT;
    IF events > 0 THEN
        RETURN events;
    END IF;
    SELECT c.relname, c.reltuples INTO leaf, events
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass AND c.relname ~ '^token_event_log_[0-9]{4}_[0-9]{2}$'
      AND to_timestamp(right(c.relname, 7), 'YYYY_MM') + interval '1 month' <= forget_event_month.before
    ORDER BY c.relname LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- The lock that DROP takes keeps registrations waiting: nothing may take long from there on. So a large month is
    -- not counted but estimated.
    IF events < 100000 THEN
        EXECUTE format('SELECT count(*) FROM tokenkeeper.%I', leaf) INTO events;
    END IF;
    EXECUTE format('DROP TABLE tokenkeeper.%I', leaf);
    RETURN events;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_event_month(timestamptz) IS
    'Drops the oldest month of history if it ends before an instant; answers how many events (about), or null when there '
    'is nothing to drop. Called by the sweep until then, with a short lock_timeout, a transaction each.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_event_month(timestamptz) FROM PUBLIC;

-- What people read -------------------------------------------------------------------------------------------------

CREATE VIEW tokenkeeper.token AS
SELECT t.environment,
       t.topic,
       encode(l.token_key, 'hex') AS token,
       tokenkeeper.state_of(l) AS state,
       NOT l.suppressed AS sendable,
       nullif(l.registered_at, '-infinity') AS registered_at,
       greatest(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) AS invalidated_at,
       CASE tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at)
           WHEN 'dead' THEN l.dead_reason
           WHEN 'suspect' THEN l.suspect_reason
           WHEN 'unregistered' THEN 'unregistered by the app'
           WHEN 'superseded' THEN 'a newer token of the same device'
       END AS reason,
       l.device_id,
       l.tags,
       l.token_key
FROM tokenkeeper.ledger AS l
JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.token IS
    'The ledger for people. To look one up: WHERE topic = ... AND environment = ... AND token_key = tokenkeeper.token_key(''...'').';
COMMENT ON COLUMN tokenkeeper.token.state IS
    'active; or the cause of the suppression: stale (a 410), suspect, superseded, unregistered_by_app.';
COMMENT ON COLUMN tokenkeeper.token.invalidated_at IS
    'The greatest of the instants of death. An active token may have one, earlier than its registration.';
COMMENT ON COLUMN tokenkeeper.token.token_key IS 'The key: the column to compare with when one token is wanted.';

CREATE VIEW tokenkeeper.sendable_token AS
SELECT t.environment, t.topic, encode(l.token_key, 'hex') AS token, l.tags, l.device_id, l.registered_at, l.token_key
FROM tokenkeeper.ledger AS l
JOIN tokenkeeper.topic AS t USING (topic_id)
WHERE NOT l.suppressed AND l.registered_at > '-infinity';
COMMENT ON VIEW tokenkeeper.sendable_token IS 'The registered tokens that may be sent to, with their tags.';

CREATE VIEW tokenkeeper.suppressed_token AS
SELECT v.environment, v.topic, v.token, v.state, v.reason, v.registered_at, v.invalidated_at, v.token_key
FROM tokenkeeper.token AS v
WHERE NOT v.sendable;
COMMENT ON VIEW tokenkeeper.suppressed_token IS
    'The tokens that must not be sent to. Join one''s own table by token_key = tokenkeeper.token_key(own.token).';

CREATE VIEW tokenkeeper.token_event AS
SELECT e.event_id, e.at, t.environment, t.topic, encode(e.token_key, 'hex') AS token, e.event, e.cause, e.reason,
       e.device_id, e.registered_before, e.registered_after, e.invalidated_before, e.invalidated_after,
       e.token_key, e.transaction_id
FROM tokenkeeper.token_event_log AS e
JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.token_event IS
    'The history of transitions: registered (the first time only), invalidated, revived, unregistered_by_app, '
    'late_feedback_ignored, pruned; with both instants before and after. Repeated news that changes nothing leaves no event.';
COMMENT ON COLUMN tokenkeeper.token_event.transaction_id IS
    'Follow the history by this together with pg_snapshot_xmin(pg_current_snapshot()): event_id alone misses late commits.';
