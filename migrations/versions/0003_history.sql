-- oldest daemon: 0.1.0
--
-- The history of tokens, one partition per month. core/history creates the months.

CREATE SEQUENCE tokenkeeper.event_id;
COMMENT ON SEQUENCE tokenkeeper.event_id IS
    'Numbers token_event. A later number can commit before an earlier one: to follow the history, use transaction_id.';

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
        'unregistered_by_app', 'late_feedback_ignored', 'pruned', 'reinstated', 'tagged', 'user_changed')),
    cause              text,
    reason             text,
    device_id          text COLLATE "C",
    user_id            text COLLATE "C",
    source_id          bigint
) PARTITION BY RANGE (at);
COMMENT ON TABLE tokenkeeper.token_event_log IS 'The table behind the view token_event, one partition per month. Old months are dropped.';

CREATE INDEX token_event_log_token_key ON tokenkeeper.token_event_log (token_key);

CREATE INDEX token_event_log_device_id ON tokenkeeper.token_event_log (device_id) WHERE device_id IS NOT NULL;

CREATE INDEX token_event_log_user_id ON tokenkeeper.token_event_log (user_id) WHERE user_id IS NOT NULL;

CREATE INDEX token_event_log_source_id ON tokenkeeper.token_event_log (source_id, event_id) WHERE source_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.token_event_log_source_id IS 'For withdraw: what a backfill or an import created.';

CREATE TABLE tokenkeeper.token_event_log_other PARTITION OF tokenkeeper.token_event_log DEFAULT;
-- Without an identity, a publication FOR ALL TABLES would forbid the sweep's DELETE and UPDATE.
ALTER TABLE tokenkeeper.token_event_log_other REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.token_event_log_other IS 'Events of months without a partition, so that no registration fails for lack of one.';
