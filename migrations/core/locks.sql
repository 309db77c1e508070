-- Which parts of the queues a batch may take, and who may stop all batches.
--
-- Locks: a batch of the drain takes lock_drain (shared), the partition, then lock_range_N, each with NOWAIT: it yields, and never waits. lock_partition takes
-- lock_drain (shared), then the partition in ACCESS EXCLUSIVE, with NOWAIT. lock_out_drains is for reinstate and release_held: it takes lock_drain alone,
-- exclusively, and waits ten seconds at most for the batches that run. lock_sweep_claim waits as long as lock_timeout says. They are locks on empty tables:
-- advisory locks belong to the application.

CREATE OR REPLACE FUNCTION tokenkeeper.partitions_of(queue text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    CASE queue COLLATE "C"
        WHEN 'send_result' THEN
            RETURN ARRAY['send_result_0', 'send_result_1', 'send_result_2', 'send_result_3', 'send_result_4', 'send_result_5', 'send_result_6',
                         'send_result_7', 'send_result_retry', 'send_result_backlog'];
        WHEN 'registration' THEN
            RETURN ARRAY['registration_0', 'registration_1', 'registration_2', 'registration_3', 'registration_4', 'registration_5',
                         'registration_6', 'registration_7', 'registration_retry'];
        ELSE
            RAISE EXCEPTION 'the queue is %, expected send_result or registration', quote_nullable(queue)
                USING ERRCODE = 'invalid_parameter_value';
    END CASE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.partitions_of(text) IS
    'The tables of a queue (send_result or registration), in the order of their partition_number, which begins at 0. Raises 22023 for another queue.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_batch(queue text, partition_number integer, range_slot integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text := (tokenkeeper.partitions_of(queue))[partition_number + 1];
    refused text := 'drain';
BEGIN
    IF partition IS NULL OR range_slot IS NULL OR range_slot NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'the partition of % is % and the slot %, expected 0 to % and 0 to 31', queue, partition_number, range_slot,
            cardinality(tokenkeeper.partitions_of(queue)) - 1 USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A lock that another session holds is a result here and not an error, so that it leaves no line in the server's log.
    LOCK TABLE tokenkeeper.lock_drain IN ROW SHARE MODE NOWAIT;
    -- The partition itself: do not wait for another daemon that reads all of it.
    refused := 'partition';
    EXECUTE 'LOCK TABLE tokenkeeper.' || partition || ' IN ROW EXCLUSIVE MODE NOWAIT';
    -- SHARE UPDATE EXCLUSIVE excludes itself, as EXCLUSIVE does, but does not have to look at the locks of every session.
    refused := 'range';
    EXECUTE 'LOCK TABLE tokenkeeper.lock_range_' || range_slot || ' IN SHARE UPDATE EXCLUSIVE MODE NOWAIT';
    RETURN NULL;
EXCEPTION WHEN lock_not_available THEN
    RETURN refused;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_batch(text, integer, integer) IS
    'Takes the locks of a batch of the drain: on lock_drain, on the partition of the queue (send_result or registration), and on lock_range_N, which both '
    'queues share. Returns null, or what another session holds: drain (an operator has locked out the drains), partition, or range (another daemon works on '
    'these pages, or on others of the slot). Raises 22023 for a queue, partition or slot that does not exist.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_partition(queue text, partition_number integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text := 'tokenkeeper.' || (tokenkeeper.partitions_of(queue))[partition_number + 1];
BEGIN
    IF partition IS NULL THEN
        RAISE EXCEPTION 'the partition of % is %, expected 0 to %', queue, partition_number, cardinality(tokenkeeper.partitions_of(queue)) - 1
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOCK TABLE tokenkeeper.lock_drain IN ROW SHARE MODE NOWAIT;
    -- First the mode that takes no transaction id: usually a sender or a batch is in the way.
    EXECUTE 'LOCK TABLE ' || partition || ' IN EXCLUSIVE MODE NOWAIT';
    EXECUTE 'LOCK TABLE ' || partition || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_partition(text, integer) IS
    'Locks a partition of a queue (send_result or registration) against all other sessions, to read all of it and truncate it. Returns false at once if '
    'another session is in the way. Raises 22023 for a queue or partition that does not exist.';

CREATE OR REPLACE FUNCTION tokenkeeper.partition_sizes(queue text) RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partitions text[] := tokenkeeper.partitions_of(queue);
    partition text;
    sizes bigint[] := '{}';
BEGIN
    -- pg_relation_size waits for a session that has locked the table. So lock each first, without waiting; all at once if possible.
    BEGIN
        EXECUTE 'LOCK TABLE tokenkeeper.' || queue || ' IN ACCESS SHARE MODE NOWAIT';
        RETURN ARRAY(SELECT pg_relation_size('tokenkeeper.' || p.name) FROM unnest(partitions) WITH ORDINALITY AS p (name, n) ORDER BY p.n);
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    FOREACH partition IN ARRAY partitions LOOP
        BEGIN
            EXECUTE 'LOCK TABLE tokenkeeper.' || partition || ' IN ACCESS SHARE MODE NOWAIT';
            sizes := sizes || pg_relation_size('tokenkeeper.' || partition);
        EXCEPTION WHEN lock_not_available THEN
            sizes := sizes || NULL::bigint;
        END;
    END LOOP;
    RETURN sizes;
END
$$;
COMMENT ON FUNCTION tokenkeeper.partition_sizes(text) IS
    'The bytes of each partition of a queue (send_result or registration), by number; null for one that another session has locked. Raises 22023 for another '
    'queue.';

CREATE OR REPLACE FUNCTION tokenkeeper.isolation_fault() RETURNS text
LANGUAGE sql STABLE
RETURN CASE WHEN current_setting('transaction_isolation') <> 'read committed'
    THEN 'the isolation level is ' || current_setting('transaction_isolation') || ', expected read committed' END;
COMMENT ON FUNCTION tokenkeeper.isolation_fault() IS 'Internal: what require_read_committed raises; null if nothing.';

CREATE OR REPLACE FUNCTION tokenkeeper.require_read_committed() RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF tokenkeeper.isolation_fault() IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.isolation_fault() USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.require_read_committed() IS
    'Raises 25001 unless READ COMMITTED: an older snapshot does not show what others committed while the caller waited for their locks.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_out_drains() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    PERFORM tokenkeeper.require_read_committed();
    -- Each batch of the drain holds this lock, shared. From here until the transaction ends no batch runs. No batch begins while this waits, so it does not
    -- wait long.
    PERFORM set_config('lock_timeout', '10s', true);
    LOCK TABLE tokenkeeper.lock_drain IN EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', patience, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_out_drains() IS
    'Waits for the running batches and lets none begin until the transaction ends. Raises 55P03 after ten seconds: another '
    'operator has an open transaction.';

CREATE OR REPLACE FUNCTION tokenkeeper.lock_sweep_claim() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE tokenkeeper.lock_sweep_claim IN EXCLUSIVE MODE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_sweep_claim() IS
    'Waits until no other transaction decides whether a sweep starts. Raises 55P03 after lock_timeout.';
