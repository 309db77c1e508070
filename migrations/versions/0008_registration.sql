-- oldest daemon: 0.1.0
--
-- The queue of registrations: the twin of send_result, and drained by the same mechanism.

CREATE TABLE tokenkeeper.registration_source (
    source_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text NOT NULL CHECK (kind IN ('attachment', 'backfill', 'import', 'repair')),
    name         text NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at  timestamptz,
    withdrawn_at timestamptz,
    done_by      text NOT NULL DEFAULT session_user,
    position     text,
    queued       bigint NOT NULL DEFAULT 0,
    refused      bigint NOT NULL DEFAULT 0,
    attachment   bigint CHECK ((attachment IS NOT NULL) = (kind IN ('backfill', 'repair')))
);
COMMENT ON TABLE tokenkeeper.registration_source IS
    'Where queued registrations come from, if not from the application: an attached table, a backfill, a check or an import. An application sees those '
    'that its login began.';
COMMENT ON COLUMN tokenkeeper.registration_source.name IS 'The attachment, or the file.';
COMMENT ON COLUMN tokenkeeper.registration_source.withdrawn_at IS 'When withdraw ended it.';
COMMENT ON COLUMN tokenkeeper.registration_source.position IS 'Where a backfill or an import continues.';
COMMENT ON COLUMN tokenkeeper.registration_source.queued IS 'Registrations and results that it has queued.';
COMMENT ON COLUMN tokenkeeper.registration_source.refused IS 'Rows or lines that it has refused.';
COMMENT ON COLUMN tokenkeeper.registration_source.attachment IS 'Of a backfill or a check: the source_id of the attachment.';
ALTER TABLE tokenkeeper.registration_source ENABLE ROW LEVEL SECURITY;
CREATE POLICY own_source ON tokenkeeper.registration_source FOR SELECT USING (
    done_by = session_user OR EXISTS (
        SELECT FROM pg_catalog.pg_roles AS o
        WHERE o.rolname IN ('tokenkeeper_operator', 'tokenkeeper_reader', 'tokenkeeper_daemon') AND pg_catalog.pg_has_role(o.oid, 'MEMBER')));

CREATE TABLE tokenkeeper.registration (
    environment      text DEFAULT 'production',
    topic            text,
    token            text,
    registered_at    timestamptz,
    device_id        text,
    user_id          text,
    tags             text[],
    unregistered     boolean,
    source_id        bigint,
    returned         boolean,
    row_key          text,
    -- Internal from here on: not granted to applications.
    queued_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- As in send_result.
    partition_number smallint NOT NULL DEFAULT ((date_part('epoch', clock_timestamp())::bigint >> 7) & 7)::smallint,
    attempts         smallint,
    released         boolean
) PARTITION BY LIST (partition_number);
COMMENT ON TABLE tokenkeeper.registration IS
    'The queue of registrations, for INSERT or COPY: one row per registration or logout. Required: topic, token. Null means the default. device_id, '
    'user_id and tags: as for register; a logout ignores them. A row that cannot be understood goes to rejected_registration, with the error.';
COMMENT ON COLUMN tokenkeeper.registration.registered_at IS 'When the device registered, or logged out. Null or a later instant counts as queued_at.';
COMMENT ON COLUMN tokenkeeper.registration.unregistered IS 'True: a logout.';
COMMENT ON COLUMN tokenkeeper.registration.returned IS
    'True: an earlier logout is taken back, as of queued_at; a 410 still counts. A null registered_at then says nothing.';
COMMENT ON COLUMN tokenkeeper.registration.source_id IS
    'The registration_source, whose logouts pass the mass-failure guard and can be undone; null for the application.';
COMMENT ON COLUMN tokenkeeper.registration.row_key IS 'The key of the attached table''s row; of several columns, a JSON array.';
COMMENT ON COLUMN tokenkeeper.registration.queued_at IS
    'Internal: when the row was first inserted (server clock). Requeued and released rows keep it.';
COMMENT ON COLUMN tokenkeeper.registration.partition_number IS 'Internal: the partition. The clock chooses 0 to 7; 8 is registration_retry.';
COMMENT ON COLUMN tokenkeeper.registration.attempts IS
    'Internal: how often it was rejected and requeued; null for never. -1: no registration, but a request to compare the tokens of a device.';
COMMENT ON COLUMN tokenkeeper.registration.released IS 'Internal: true if an operator released it, so that the guard does not hold it again.';

CREATE TABLE tokenkeeper.registration_retry PARTITION OF tokenkeeper.registration FOR VALUES IN (8);
COMMENT ON TABLE tokenkeeper.registration_retry IS
    'Registrations that are tried again or taken separately: their token was locked, a token of their device must be compared again, their batch failed, '
    'they are large, their topic''s guard was busy, or an operator released them.';

DO $$
DECLARE
    partition text;
BEGIN
    FOR number IN 0..7 LOOP
        EXECUTE format('CREATE TABLE tokenkeeper.registration_%s PARTITION OF tokenkeeper.registration FOR VALUES IN (%s)', number, number);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.registration_%s IS %L', number, 'Partition ' || number || ' of registration.');
    END LOOP;
    FOREACH partition IN ARRAY ARRAY['0', '1', '2', '3', '4', '5', '6', '7', 'retry'] LOOP
        -- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
        EXECUTE format('ALTER TABLE tokenkeeper.registration_%s REPLICA IDENTITY FULL', partition);
        -- Vacuum would truncate under a lock that stalls applications and is replayed on standbys. They rarely write to the retry partition, and nothing else
        -- gives its space back.
        CONTINUE WHEN partition = 'retry';
        EXECUTE format('ALTER TABLE tokenkeeper.registration_%s SET (vacuum_truncate = off)', partition);
    END LOOP;
END
$$;

CREATE TABLE tokenkeeper.rejected_registration (
    rejected_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rejected_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    error         text NOT NULL,
    environment   text,
    topic         text,
    token         text,
    registered_at timestamptz,
    device_id     text,
    user_id       text,
    tags          text[],
    unregistered  boolean,
    source_id     bigint,
    returned      boolean,
    row_key       text,
    attachment    bigint,
    queued_at     timestamptz NOT NULL,
    attempts      smallint
);
COMMENT ON TABLE tokenkeeper.rejected_registration IS
    'Registrations that could not be understood, or that the database refused; of one over 16 MiB, the first 1024 characters of each text. Kept for '
    'sweep.rejected_retention. Beyond drain.rejected_per_hour they are only counted; of an attached table, beyond 10,000.';
COMMENT ON COLUMN tokenkeeper.rejected_registration.attachment IS
    'The attachment of the row, also through a backfill. The attachment''s row is not rejected again with the same token while this one is kept.';
COMMENT ON COLUMN tokenkeeper.rejected_registration.attempts IS 'How often it was requeued; null for never.';

CREATE TABLE tokenkeeper.dropped_registration (
    hour          timestamptz NOT NULL,
    registrations bigint NOT NULL CHECK (registrations > 0)
);
ALTER TABLE tokenkeeper.dropped_registration REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.dropped_registration IS
    'How many rejected registrations were only counted, beyond drain.rejected_per_hour: one row per batch. Kept for sweep.event_retention.';

CREATE TABLE tokenkeeper.amended_registration (
    hour          timestamptz NOT NULL,
    source_id     bigint,
    registrations bigint NOT NULL CHECK (registrations > 0),
    example       text NOT NULL
);
ALTER TABLE tokenkeeper.amended_registration REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.amended_registration IS
    'Registrations that count without a device, a user or a tag that could not be kept: one row per batch and source. Kept for sweep.event_retention.';
COMMENT ON COLUMN tokenkeeper.amended_registration.source_id IS 'The registration_source; null for the application.';
COMMENT ON COLUMN tokenkeeper.amended_registration.example IS 'What was wrong with one of them, and the first 8 characters of its row_key, if any.';

CREATE INDEX rejected_registration_rejected_at ON tokenkeeper.rejected_registration (rejected_at) WHERE attempts IS NULL;
COMMENT ON INDEX tokenkeeper.rejected_registration_rejected_at IS
    'What the last hour added, for drain.rejected_per_hour. Requeued registrations do not count.';

CREATE INDEX rejected_registration_value ON tokenkeeper.rejected_registration (attachment, (md5(token) COLLATE "C")) WHERE attachment IS NOT NULL;
COMMENT ON INDEX tokenkeeper.rejected_registration_value IS 'Whether a value of an attached table has been rejected before.';
