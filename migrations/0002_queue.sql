-- oldest daemon: 0.1.0
--
-- The queue: what senders write, and where a result goes that could not be understood.
--
-- A ring of leaf partitions chosen by the clock, without index and without trigger: a sender pays for a heap insert and
-- nothing else. The daemon deletes from a leaf by range of TIDs, in the same transaction that records; a leaf that is
-- past and empty is truncated, so that nothing waits for vacuum.

CREATE TABLE tokenkeeper.send_result (
    environment text DEFAULT 'production',
    topic       text,
    token       text,
    status      integer,
    body        text,
    apns_id     text,
    sent_at     timestamptz,
    -- Internal from here on: not granted to senders.
    queued_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Eight leaves of 128 seconds: one lap takes 17 minutes. The epoch as a double is cheap, and the same in every time zone.
    leaf        smallint NOT NULL DEFAULT ((date_part('epoch', clock_timestamp())::bigint >> 7) & 7)::smallint
) PARTITION BY LIST (leaf);
COMMENT ON TABLE tokenkeeper.send_result IS
    'The queue: one row per answer of APNs, by INSERT or COPY. Needed: topic, token, status. Null means the default. '
    'Tolerant on purpose: a row that cannot be understood ends in rejected_result and never fails a sender''s batch.';
COMMENT ON COLUMN tokenkeeper.send_result.environment IS 'production (the default) or sandbox.';
COMMENT ON COLUMN tokenkeeper.send_result.topic IS 'The apns-topic header of the request.';
COMMENT ON COLUMN tokenkeeper.send_result.token IS 'The device token in hex, in either case.';
COMMENT ON COLUMN tokenkeeper.send_result.status IS 'The HTTP status that APNs answered. 200s may be queued too: they are counted.';
COMMENT ON COLUMN tokenkeeper.send_result.body IS 'The body that APNs answered, JSON, verbatim; or null.';
COMMENT ON COLUMN tokenkeeper.send_result.apns_id IS 'The apns-id header of the answer, or null.';
COMMENT ON COLUMN tokenkeeper.send_result.sent_at IS
    'When the request was started. Where null, five minutes before queued_at is assumed.';
COMMENT ON COLUMN tokenkeeper.send_result.queued_at IS 'Internal: when the row was inserted, by the server''s clock.';
COMMENT ON COLUMN tokenkeeper.send_result.leaf IS 'Internal: the partition, chosen by the clock; 8 for results set aside.';

DO $$
BEGIN
    FOR n IN 0..7 LOOP
        EXECUTE format('CREATE TABLE tokenkeeper.%I PARTITION OF tokenkeeper.send_result FOR VALUES IN (%s)', 'send_result_' || n, n);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.%I IS %L', 'send_result_' || n, 'Leaf ' || n || ' of the ring of send_result.');
    END LOOP;
    CREATE TABLE tokenkeeper.send_result_aside PARTITION OF tokenkeeper.send_result FOR VALUES IN (8);
    COMMENT ON TABLE tokenkeeper.send_result_aside IS
        'Results set aside for another try: their token was locked by an application, their batch had failed, or they are bulky.';
    FOR n IN 0..8 LOOP
        -- REPLICA IDENTITY FULL: a publication FOR ALL TABLES would otherwise forbid the DELETE.
        -- vacuum_truncate off: vacuum would take a lock that stalls senders and is replayed on standbys.
        EXECUTE format('ALTER TABLE tokenkeeper.%I REPLICA IDENTITY FULL', CASE n WHEN 8 THEN 'send_result_aside' ELSE 'send_result_' || n END);
        EXECUTE format('ALTER TABLE tokenkeeper.%I SET (vacuum_truncate = off)', CASE n WHEN 8 THEN 'send_result_aside' ELSE 'send_result_' || n END);
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
    status      integer,
    body        text,
    apns_id     text,
    sent_at     timestamptz,
    queued_at   timestamptz NOT NULL
);
COMMENT ON TABLE tokenkeeper.rejected_result IS
    'Results that could not be understood, whole, as they were queued. The sweep deletes them after sweep.rejected_retention.';
COMMENT ON COLUMN tokenkeeper.rejected_result.error IS 'What was found and what was expected.';

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
    'What is behind the view result_stat: each batch appends its counts (a row updated in place would serialise the daemons); '
    'the sweep adds them up.';

CREATE VIEW tokenkeeper.result_stat AS
SELECT c.hour, c.environment, c.topic, c.status, c.reason, sum(c.results)::bigint AS results
FROM tokenkeeper.result_count AS c
GROUP BY c.hour, c.environment, c.topic, c.status, c.reason;
COMMENT ON VIEW tokenkeeper.result_stat IS
    'How many results were taken from the queue, by the hour in which they were, environment, topic, status and reason; '
    'each counted in the transaction that recorded it. Rejected ones count with the reason (rejected).';

CREATE FUNCTION tokenkeeper.roll_up_result_count() RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH parts AS (
        DELETE FROM tokenkeeper.result_count WHERE hour IN (
            SELECT hour FROM tokenkeeper.result_count GROUP BY hour
            HAVING count(*) > count(DISTINCT (environment, topic, status, reason)))
        RETURNING hour, environment, topic, status, reason, results)
    INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
    SELECT hour, environment, topic, status, reason, sum(results) FROM parts GROUP BY 1, 2, 3, 4, 5
$$;
COMMENT ON FUNCTION tokenkeeper.roll_up_result_count() IS
    'Adds up the rows of result_count that are alike. Called by the sweep; two at once are harmless.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.roll_up_result_count() FROM PUBLIC;
