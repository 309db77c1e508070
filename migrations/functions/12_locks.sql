-- The locks that the drain, forget and operators take on the tables lock_*, and on partitions of the queue.

CREATE OR REPLACE FUNCTION tokenkeeper.lock_batch(partition_number integer, range_slot integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    refused text := 'erasure';
BEGIN
    IF partition_number IS NULL OR partition_number NOT BETWEEN 0 AND 9 OR range_slot IS NULL OR range_slot NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'the partition is % and the slot %, expected 0 to 9 and 0 to 31', partition_number, range_slot
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- A lock that another session holds is a result here and not an error, so that it leaves no line in the server's log.
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE NOWAIT;
    -- The partition itself: do not wait for another daemon that reads all of it.
    refused := 'partition';
    EXECUTE 'LOCK TABLE tokenkeeper.send_result_'
        || CASE partition_number WHEN 8 THEN 'retry' WHEN 9 THEN 'backlog' ELSE partition_number::text END || ' IN ROW EXCLUSIVE MODE NOWAIT';
    -- SHARE UPDATE EXCLUSIVE excludes itself, as EXCLUSIVE does, but does not have to look at the locks of every session.
    refused := 'range';
    EXECUTE 'LOCK TABLE tokenkeeper.lock_range_' || range_slot || ' IN SHARE UPDATE EXCLUSIVE MODE NOWAIT';
    RETURN NULL;
EXCEPTION WHEN lock_not_available THEN
    RETURN refused;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_batch(integer, integer) IS
    'Takes the locks of a batch of the drain: on lock_erasure, on the partition of the queue, and on lock_range_N. Returns null, or what another '
    'session holds: erasure (forget is running), partition (the partition is locked as a whole) or range (another daemon works on these pages, or on '
    'others that share the slot). Raises 22023 for a partition or slot that does not exist.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_batch(integer, integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.lock_partition(partition_number integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text := 'tokenkeeper.send_result_'
        || CASE partition_number WHEN 8 THEN 'retry' WHEN 9 THEN 'backlog' ELSE partition_number::text END;
BEGIN
    IF partition_number IS NULL OR partition_number NOT BETWEEN 0 AND 9 THEN
        RAISE EXCEPTION 'the partition is %, expected 0 to 9', partition_number USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE NOWAIT;
    -- First the mode that takes no transaction id: usually a sender or a batch is in the way.
    EXECUTE 'LOCK TABLE ' || partition || ' IN EXCLUSIVE MODE NOWAIT';
    EXECUTE 'LOCK TABLE ' || partition || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_partition(integer) IS
    'Locks a partition of the queue against all other sessions, to read all of it and truncate it. Returns false at once if a sender, a dump, another '
    'daemon or forget is in the way. Raises 22023 for a partition that does not exist.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_partition(integer) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.partition_sizes() RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text;
    sizes bigint[] := '{}';
BEGIN
    -- pg_relation_size waits for a session that has locked the table. So lock each first, without waiting; all at once if possible.
    BEGIN
        LOCK TABLE tokenkeeper.send_result IN ACCESS SHARE MODE NOWAIT;
        RETURN ARRAY[
            pg_relation_size('tokenkeeper.send_result_0'), pg_relation_size('tokenkeeper.send_result_1'),
            pg_relation_size('tokenkeeper.send_result_2'), pg_relation_size('tokenkeeper.send_result_3'),
            pg_relation_size('tokenkeeper.send_result_4'), pg_relation_size('tokenkeeper.send_result_5'),
            pg_relation_size('tokenkeeper.send_result_6'), pg_relation_size('tokenkeeper.send_result_7'),
            pg_relation_size('tokenkeeper.send_result_retry'), pg_relation_size('tokenkeeper.send_result_backlog')];
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    FOREACH partition IN ARRAY ARRAY['0', '1', '2', '3', '4', '5', '6', '7', 'retry', 'backlog'] LOOP
        BEGIN
            EXECUTE 'LOCK TABLE tokenkeeper.send_result_' || partition || ' IN ACCESS SHARE MODE NOWAIT';
            sizes := sizes || pg_relation_size('tokenkeeper.send_result_' || partition);
        EXCEPTION WHEN lock_not_available THEN
            sizes := sizes || NULL::bigint;
        END;
    END LOOP;
    RETURN sizes;
END
$$;
COMMENT ON FUNCTION tokenkeeper.partition_sizes() IS
    'The size in bytes of each partition of the queue, in the order of their numbers; null for one that another session has locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.partition_sizes() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.lock_out_drains() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- Each batch of the drain holds this lock, shared. From here until the transaction ends no batch runs, so what is queued
    -- stays where it can be found. No batch begins while this waits, so it does not wait long.
    PERFORM set_config('lock_timeout', '10s', true);
    LOCK TABLE tokenkeeper.lock_erasure IN EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', patience, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_out_drains() IS
    'Waits for the running batches and lets none begin until the transaction ends. Raises 55P03 after ten seconds: an operator or another '
    'forget has an open transaction.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_out_drains() FROM PUBLIC;

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
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_sweep_claim() FROM PUBLIC;
