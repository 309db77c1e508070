-- oldest daemon: 0.1.0
--
-- The locks that daemons, forget and operators take among themselves, on empty tables of this schema.
--
-- Until now they were advisory locks, and any login of the database can take those: one without a single right stopped the drain. A table
-- can be locked only by a role that has rights to it, and nobody has any to these: the functions below take the locks, with the rights of
-- the schema's owner. The locks last until the transaction ends, so they work behind a pooler. They take no transaction id and write no
-- WAL. None is ACCESS EXCLUSIVE, which pg_dump would wait for.
--
-- VACUUM, also the one against wraparound, takes SHARE UPDATE EXCLUSIVE for the moment that an empty table needs.

CREATE TABLE tokenkeeper.lock_erasure () WITH (autovacuum_enabled = false);
COMMENT ON TABLE tokenkeeper.lock_erasure IS
    'Never has a row. Each batch of the drain holds ROW SHARE on it; forget and forget_device hold EXCLUSIVE, and what is queued then stays '
    'where it can be found.';
ALTER TABLE tokenkeeper.lock_erasure REPLICA IDENTITY NOTHING;

CREATE TABLE tokenkeeper.lock_sweep_claim () WITH (autovacuum_enabled = false);
COMMENT ON TABLE tokenkeeper.lock_sweep_claim IS
    'Never has a row. A daemon holds EXCLUSIVE on it while it decides whether to start a sweep.';
ALTER TABLE tokenkeeper.lock_sweep_claim REPLICA IDENTITY NOTHING;

DO $$
BEGIN
    FOR slot IN 0..31 LOOP
        EXECUTE format('CREATE TABLE tokenkeeper.lock_range_%s () WITH (autovacuum_enabled = false)', slot);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.lock_range_%s IS %L', slot,
            'Never has a row. A batch of the drain holds SHARE UPDATE EXCLUSIVE on the one of these 32 tables that stands for its '
            'pages of the queue; see lock_batch.');
        EXECUTE format('ALTER TABLE tokenkeeper.lock_range_%s REPLICA IDENTITY NOTHING', slot);
    END LOOP;
END
$$;

CREATE FUNCTION tokenkeeper.lock_batch(partition_number integer, range_slot integer) RETURNS text
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
    -- A lock that another session holds is an answer here and no error: no line in the server's log.
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE NOWAIT;
    -- The partition itself: another daemon that reads all of it is not waited for.
    refused := 'partition';
    EXECUTE 'LOCK TABLE tokenkeeper.send_result_'
        || CASE partition_number WHEN 8 THEN 'aside' WHEN 9 THEN 'backlog' ELSE partition_number::text END || ' IN ROW EXCLUSIVE MODE NOWAIT';
    -- SHARE UPDATE EXCLUSIVE excludes itself, as EXCLUSIVE does, and unlike that needs no look at the locks of every session.
    refused := 'range';
    EXECUTE 'LOCK TABLE tokenkeeper.lock_range_' || range_slot || ' IN SHARE UPDATE EXCLUSIVE MODE NOWAIT';
    RETURN NULL;
EXCEPTION WHEN lock_not_available THEN
    RETURN refused;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_batch(integer, integer) IS
    'Takes the locks of a batch of the drain: on lock_erasure, on the partition of the queue, and on lock_range_N. Returns null, or what another '
    'session holds: erasure (forget is running), partition (the partition is locked as a whole), range (another daemon is at these pages, or at others '
    'that share the slot). Raises 22023 for a partition or slot that does not exist.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_batch(integer, integer) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.lock_partition(partition_number integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text := 'tokenkeeper.send_result_'
        || CASE partition_number WHEN 8 THEN 'aside' WHEN 9 THEN 'backlog' ELSE partition_number::text END;
BEGIN
    IF partition_number IS NULL OR partition_number NOT BETWEEN 0 AND 9 THEN
        RAISE EXCEPTION 'the partition is %, expected 0 to 9', partition_number USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE NOWAIT;
    -- First the mode that takes no transaction id: mostly it is a sender or a batch that is in the way.
    EXECUTE 'LOCK TABLE ' || partition || ' IN EXCLUSIVE MODE NOWAIT';
    EXECUTE 'LOCK TABLE ' || partition || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_partition(integer) IS
    'Locks a partition of the queue against everybody, to read all of it and truncate it. Returns false at once when a sender, a dump, another '
    'daemon or forget is in the way. Raises 22023 for a partition that does not exist.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_partition(integer) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.partition_sizes() RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition text;
    sizes bigint[] := '{}';
BEGIN
    -- pg_relation_size waits for whoever has locked the table. So each is locked first, without waiting: all at once where that is possible.
    BEGIN
        LOCK TABLE tokenkeeper.send_result IN ACCESS SHARE MODE NOWAIT;
        RETURN ARRAY[
            pg_relation_size('tokenkeeper.send_result_0'), pg_relation_size('tokenkeeper.send_result_1'),
            pg_relation_size('tokenkeeper.send_result_2'), pg_relation_size('tokenkeeper.send_result_3'),
            pg_relation_size('tokenkeeper.send_result_4'), pg_relation_size('tokenkeeper.send_result_5'),
            pg_relation_size('tokenkeeper.send_result_6'), pg_relation_size('tokenkeeper.send_result_7'),
            pg_relation_size('tokenkeeper.send_result_aside'), pg_relation_size('tokenkeeper.send_result_backlog')];
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    FOREACH partition IN ARRAY ARRAY['0', '1', '2', '3', '4', '5', '6', '7', 'aside', 'backlog'] LOOP
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

CREATE FUNCTION tokenkeeper.lock_sweep_claim() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE tokenkeeper.lock_sweep_claim IN EXCLUSIVE MODE;
END
$$;
COMMENT ON FUNCTION tokenkeeper.lock_sweep_claim() IS
    'Waits until this transaction alone decides whether a sweep starts. Raises 55P03 after lock_timeout.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.lock_sweep_claim() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.halt_drains() RETURNS void
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
    -- Every batch of the drain holds this lock, shared. From here on until the transaction ends none is under way, so what is
    -- queued stays where it can be found. While one waits here no batch begins: hence not for long.
    PERFORM set_config('lock_timeout', '10s', true);
    LOCK TABLE tokenkeeper.lock_erasure IN EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', patience, true);
END
$$;

CREATE OR REPLACE FUNCTION tokenkeeper.release_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The caller's collation changes nothing.
    of_topic integer := tokenkeeper.known_topic(release_held.topic COLLATE "C", release_held.environment COLLATE "C");
    results bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is at work.
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    WITH gone AS (
        DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic RETURNING h.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, leaf, released)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, g.attempts, 8, true FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results = 0 THEN
        RETURN 0;
    END IF;
    -- They are true, says a person: so those before them are no sign of a mistake either.
    UPDATE tokenkeeper.suspect AS s SET silenced = false WHERE s.topic_id = of_topic AND s.silenced;
    DELETE FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic;
    UPDATE tokenkeeper.topic_guard AS g SET open_since = NULL, tokens = 0 WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows)
    VALUES ('held_released', release_held.environment, release_held.topic, results);
    RETURN results;
END
$$;

COMMENT ON FUNCTION tokenkeeper.release_held(text, text) IS
    'Lets the held results of a topic count: they go back to the queue, a daemon records them within seconds, and the guard starts anew. '
    'Returns how many. Raises 22023 for an unknown topic, 25001 under another isolation level than read committed.';

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    results bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is at work.
    WITH gone AS (
        DELETE FROM tokenkeeper.rejected_result AS r
        WHERE requeue_rejected.ids IS NULL OR r.rejected_id = ANY (requeue_rejected.ids) RETURNING r.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, least(coalesce(g.attempts, 0) + 1, 32767)
    FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('rejected_requeued', results);
    END IF;
    RETURN results;
END
$$;

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_failed(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    requests bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is at work: what moves would be found in neither table.
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

ALTER TABLE tokenkeeper.daemon ADD COLUMN waiting_for text;
COMMENT ON COLUMN tokenkeeper.daemon.waiting_for IS
    'The locks of other sessions that have been keeping results in the queue for some seconds, in words: the table and who holds it. Else null.';
