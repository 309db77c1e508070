-- oldest daemon: 0.1.0
--
-- The schema, what was applied to it, topics, and the log of operations.

DO $$
BEGIN
    -- CREATE SCHEMA IF NOT EXISTS requires CREATE on the database even if a DBA has created the schema beforehand.
    IF to_regnamespace('tokenkeeper') IS NULL THEN
        EXECUTE 'CREATE SCHEMA tokenkeeper';
    END IF;
END
$$;
COMMENT ON SCHEMA tokenkeeper IS
    'tokenkeeperd: keeps the device tokens of an APNs provider clean. Start with the views token and status.';

-- What was applied -------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.migration (
    version       integer PRIMARY KEY CHECK (version > 0),
    name          text NOT NULL,
    checksum      text NOT NULL,
    oldest_daemon text NOT NULL,
    applied_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by    text NOT NULL DEFAULT session_user
);
COMMENT ON TABLE tokenkeeper.migration IS 'The versions that `tokenkeeperd migrate` has applied.';
COMMENT ON COLUMN tokenkeeper.migration.checksum IS 'SHA-256 of the file, in hex.';
COMMENT ON COLUMN tokenkeeper.migration.oldest_daemon IS 'The oldest tokenkeeperd that works with it; older ones refuse to run.';

CREATE TABLE tokenkeeper.repeatable (
    name       text COLLATE "C" PRIMARY KEY,
    checksum   text NOT NULL,
    release    text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by text NOT NULL DEFAULT session_user
);
COMMENT ON TABLE tokenkeeper.repeatable IS 'Internal: the files of functions, views and grants as last applied, always all together.';
COMMENT ON COLUMN tokenkeeper.repeatable.name IS 'The file without its extension, such as core/register.';
COMMENT ON COLUMN tokenkeeper.repeatable.checksum IS 'SHA-256 of the file, in hex. If one differs, all files are applied again.';
COMMENT ON COLUMN tokenkeeper.repeatable.release IS 'The tokenkeeperd that applied it. An older one never applies its own files.';

-- Topics -----------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.topic (
    -- After the last number come the first ones again that are free: an application that rolls back a billion new topics must not use them up.
    topic_id             integer GENERATED ALWAYS AS IDENTITY (CYCLE) PRIMARY KEY,
    environment          text COLLATE "C" NOT NULL CHECK (environment IN ('production', 'sandbox')),
    topic                text COLLATE "C" NOT NULL CHECK (octet_length(topic) <= 512 AND topic ~ '^[!-~]+$'),
    first_seen           timestamptz NOT NULL DEFAULT clock_timestamp(),
    gate                 text COLLATE "C" CHECK (gate IN ('enforce', 'observe')),
    suppressed_retention interval CHECK (suppressed_retention BETWEEN interval '1 hour' AND interval '3650 days'),
    dormant_after        interval
        CHECK (dormant_after = interval '0' OR dormant_after BETWEEN interval '1 day' AND interval '3650 days'),
    guard_allowance      bigint CHECK (guard_allowance >= 0),
    guard_max_share      numeric CHECK (guard_max_share BETWEEN 0 AND 1),
    prune_allowance      bigint CHECK (prune_allowance >= 0),
    prune_max_share      numeric CHECK (prune_max_share BETWEEN 0 AND 1),
    background_per_hour  integer CHECK (background_per_hour >= 0),
    max_per_second       integer CHECK (max_per_second > 0),
    alerts_per_day       integer CHECK (alerts_per_day >= 0),
    confirm_share        numeric CHECK (confirm_share BETWEEN 0 AND 1),
    moved_to             text COLLATE "C",
    UNIQUE (topic, environment)
);
COMMENT ON TABLE tokenkeeper.topic IS
    'Each (environment, topic) that was seen. The sweep deletes a topic once nothing refers to it, so use a topic_id only in the transaction that reads '
    'it.';
COMMENT ON COLUMN tokenkeeper.topic.moved_to IS 'The database that has the topic now, by its name in the map; null: this one.';

-- The log of operations --------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.operation (
    operation_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    operation    text NOT NULL CHECK (operation IN ('guard_tripped', 'guard_reset', 'held_released', 'held_discarded',
        'reinstated', 'rejected_results_requeued', 'rejected_registrations_requeued', 'forgotten', 'policy_changed', 'device_crowded',
        'sending_paused', 'sending_resumed', 'failed_requeued', 'withdrawn', 'campaign_paused', 'campaign_resumed', 'campaign_cancelled',
        'campaign_rate_set')),
    environment  text,
    topic        text,
    rows         bigint,
    message      text,
    done_by      text NOT NULL DEFAULT session_user,
    device_id    text COLLATE "C"
);
COMMENT ON TABLE tokenkeeper.operation IS
    'What operators and the mass-failure guard did, one row each. Also one row per topic and day for devices with 8 tokens or more.';
COMMENT ON COLUMN tokenkeeper.operation.rows IS 'Tokens, results or requests that it affected.';
COMMENT ON COLUMN tokenkeeper.operation.done_by IS 'The login role; for the guard, the daemon''s role.';
COMMENT ON COLUMN tokenkeeper.operation.device_id IS 'The device of device_crowded.';

CREATE INDEX operation_device_id ON tokenkeeper.operation (device_id) WHERE device_id IS NOT NULL;
COMMENT ON INDEX tokenkeeper.operation_device_id IS 'For forget_device.';

CREATE INDEX operation_device_crowded ON tokenkeeper.operation (at) WHERE operation = 'device_crowded';
COMMENT ON INDEX tokenkeeper.operation_device_crowded IS 'For the warning of status, and for the limit of one device per topic and day.';
