-- oldest daemon: 0.1.0
--
-- The queue of results, what could not be understood, and the counts.
--
-- The clock chooses one of eight partitions, which have no index and no trigger: a sender pays for a heap insert and nothing else. The
-- daemon deletes ranges of TIDs from a partition, in the transaction that records them. It truncates a sealed partition that is empty,
-- so nothing depends on vacuum.

CREATE TABLE tokenkeeper.send_result (
    environment      text DEFAULT 'production',
    topic            text,
    token            text,
    status           text,
    body             text,
    apns_id          text,
    sent_at          timestamptz,
    -- Internal from here on: not granted to senders.
    queued_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Each partition covers 128 seconds, and the eight take 17 minutes. The epoch as a double is cheap, and the same in every time zone.
    partition_number smallint NOT NULL DEFAULT ((date_part('epoch', clock_timestamp())::bigint >> 7) & 7)::smallint,
    attempts         smallint,
    released         boolean
) PARTITION BY LIST (partition_number);
COMMENT ON TABLE tokenkeeper.send_result IS
    'The queue of results, for INSERT or COPY: one row per response of APNs. Required: topic, token, status. Null means the default. A result that cannot '
    'be understood goes to rejected_result, with the error.';
COMMENT ON COLUMN tokenkeeper.send_result.status IS 'The HTTP status. 200s are counted.';
COMMENT ON COLUMN tokenkeeper.send_result.body IS 'The body of the response (JSON), verbatim.';
COMMENT ON COLUMN tokenkeeper.send_result.sent_at IS 'When the request was started; null: five minutes before queued_at.';
COMMENT ON COLUMN tokenkeeper.send_result.queued_at IS
    'Internal: when the row was first inserted (server clock). Requeued and released results keep it.';
COMMENT ON COLUMN tokenkeeper.send_result.partition_number IS
    'Internal: the partition. The clock chooses 0 to 7; 8 is send_result_retry, 9 is send_result_backlog.';
COMMENT ON COLUMN tokenkeeper.send_result.attempts IS 'Internal: how often it was rejected and requeued; null for never.';
COMMENT ON COLUMN tokenkeeper.send_result.released IS 'Internal: true if an operator released it, so that the guard does not hold it again.';

CREATE TABLE tokenkeeper.send_result_retry PARTITION OF tokenkeeper.send_result FOR VALUES IN (8);
COMMENT ON TABLE tokenkeeper.send_result_retry IS
    'Results that are tried again or taken separately: their token was locked, their batch failed, they are large, their topic''s guard was busy, or an '
    'operator released them.';

CREATE TABLE tokenkeeper.send_result_backlog PARTITION OF tokenkeeper.send_result FOR VALUES IN (9);
COMMENT ON TABLE tokenkeeper.send_result_backlog IS
    'Results that a daemon took out of sealed partitions and did not record yet, without the 200s, which are counted already.';

DO $$
DECLARE
    partition text;
BEGIN
    FOR number IN 0..7 LOOP
        EXECUTE format('CREATE TABLE tokenkeeper.send_result_%s PARTITION OF tokenkeeper.send_result FOR VALUES IN (%s)', number, number);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.send_result_%s IS %L', number, 'Partition ' || number || ' of send_result.');
    END LOOP;
    FOREACH partition IN ARRAY ARRAY['0', '1', '2', '3', '4', '5', '6', '7', 'retry', 'backlog'] LOOP
        -- Without an identity, a publication FOR ALL TABLES would forbid the DELETE.
        EXECUTE format('ALTER TABLE tokenkeeper.send_result_%s REPLICA IDENTITY FULL', partition);
        -- Vacuum would truncate under a lock that stalls senders and is replayed on standbys. They rarely write to the retry partition, and nothing else
        -- gives its space back.
        CONTINUE WHEN partition = 'retry';
        EXECUTE format('ALTER TABLE tokenkeeper.send_result_%s SET (vacuum_truncate = off)', partition);
    END LOOP;
END
$$;

CREATE TABLE tokenkeeper.rejected_result (
    rejected_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    error       text NOT NULL,
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
COMMENT ON TABLE tokenkeeper.rejected_result IS
    'Results that could not be understood, or that the database refused; of one over 16 MiB, the first 1024 characters of each text. Kept for '
    'sweep.rejected_retention. Beyond drain.rejected_per_hour they are only counted, in result_stat.';
COMMENT ON COLUMN tokenkeeper.rejected_result.attempts IS 'How often it was requeued; null for never.';

CREATE INDEX rejected_result_rejected_at ON tokenkeeper.rejected_result (rejected_at) WHERE attempts IS NULL;
COMMENT ON INDEX tokenkeeper.rejected_result_rejected_at IS 'What the last hour added, for drain.rejected_per_hour. Requeued results do not count.';

CREATE TABLE tokenkeeper.result_count (
    hour        timestamptz NOT NULL,
    environment text,
    topic       text,
    status      integer,
    reason      text,
    results     bigint NOT NULL CHECK (results > 0)
);
ALTER TABLE tokenkeeper.result_count REPLICA IDENTITY FULL;
COMMENT ON TABLE tokenkeeper.result_count IS
    'The table behind the view result_stat. Batches append their counts, because updates of one row would serialize the daemons. The sweep adds them up.';

CREATE INDEX result_count_hour ON tokenkeeper.result_count (hour);
COMMENT ON INDEX tokenkeeper.result_count_hour IS 'For the warnings of status, which read one day of thirteen months.';

CREATE INDEX result_count_doubtful_410 ON tokenkeeper.result_count (hour) WHERE status = 410 AND reason LIKE '410 with%';
COMMENT ON INDEX tokenkeeper.result_count_doubtful_410 IS 'For the warning of status about 410s that are not from APNs.';

CREATE INDEX result_count_not_kept ON tokenkeeper.result_count (hour) WHERE reason = '(rejected, not kept)';
COMMENT ON INDEX tokenkeeper.result_count_not_kept IS 'For the warning of status about rejected results beyond drain.rejected_per_hour.';

-- Locks between daemons and operators ----------------------------------------------------------------------

-- Any login of the database can take an advisory lock, and a login without any other right could stop the drain. A table can be locked
-- only by a role with rights to it, and nobody has rights to these tables: functions of the schema lock them, with the rights of its
-- owner. The locks last until the transaction ends, so they work behind a pooler. They take no transaction id and write no WAL. None
-- of them is ACCESS EXCLUSIVE, which would wait for pg_dump. Vacuum takes SHARE UPDATE EXCLUSIVE for the moment that an empty
-- table needs.

CREATE TABLE tokenkeeper.lock_drain () WITH (autovacuum_enabled = false);
ALTER TABLE tokenkeeper.lock_drain REPLICA IDENTITY NOTHING;
COMMENT ON TABLE tokenkeeper.lock_drain IS
    'Never has a row. Each batch of the drain holds ROW SHARE on it; reinstate and release_held hold EXCLUSIVE, so that no batch decides by what was true '
    'before.';

DO $$
BEGIN
    FOR slot IN 0..31 LOOP
        EXECUTE format('CREATE TABLE tokenkeeper.lock_range_%s () WITH (autovacuum_enabled = false)', slot);
        EXECUTE format('ALTER TABLE tokenkeeper.lock_range_%s REPLICA IDENTITY NOTHING', slot);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.lock_range_%s IS %L', slot,
            'Never has a row. A batch of the drain holds SHARE UPDATE EXCLUSIVE on the one of these 32 tables that stands for its '
            'pages of the queue; see lock_batch.');
    END LOOP;
END
$$;

CREATE TYPE tokenkeeper.new_result AS (
    topic       text,
    token       text,
    status      text,
    body        text,
    sent_at     timestamptz,
    apns_id     text,
    environment text,
    device_id   text
);
COMMENT ON TYPE tokenkeeper.new_result IS
    'An element of the array for report: the columns of send_result. device_id is for a router, which finds the database of a topic that is split by device.';
REVOKE USAGE ON TYPE tokenkeeper.new_result FROM PUBLIC;
