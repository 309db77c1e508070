-- What operators do with held and rejected results.

CREATE OR REPLACE FUNCTION tokenkeeper.release_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The caller's collation must not matter.
    of_topic integer := tokenkeeper.known_topic(release_held.topic COLLATE "C", release_held.environment COLLATE "C");
    results bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running.
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    WITH gone AS (
        DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic RETURNING h.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, partition_number, released)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, g.attempts, 8, true FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results = 0 THEN
        RETURN 0;
    END IF;
    -- An operator says that they are true, so earlier suspects are no sign of a mistake either.
    UPDATE tokenkeeper.suspect AS s SET suppresses = false WHERE s.topic_id = of_topic AND s.suppresses;
    DELETE FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic;
    UPDATE tokenkeeper.topic_guard AS g SET tripped_at = NULL, tokens = 0 WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows)
    VALUES ('held_released', release_held.environment, release_held.topic, results);
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.release_held(text, text) IS
    'Lets the held results of a topic count: they return to the queue, a daemon records them within seconds, and the guard resets. '
    'Returns how many. Raises 22023 for an unknown topic, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.release_held(text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.discard_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(discard_held.topic COLLATE "C", discard_held.environment COLLATE "C");
    results bigint;
BEGIN
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results = 0 THEN
        RETURN 0;
    END IF;
    PERFORM tokenkeeper.recount_guard(of_topic);
    UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows)
    VALUES ('held_discarded', discard_held.environment, discard_held.topic, results);
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.discard_held(text, text) IS
    'Deletes the held results of a topic, which then never count; returns how many. What was recorded before the guard tripped stays: see '
    'reinstate. Raises 22023 for an unknown topic, 25001 if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.discard_held(text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    results bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running.
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
COMMENT ON FUNCTION tokenkeeper.requeue_rejected(bigint[]) IS
    'Puts rejected results back into the queue as they are, by rejected_id or all of them; returns how many. They keep their first queued_at. Fix them '
    'before, by UPDATE. If one is rejected again, attempts counts it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_rejected(bigint[]) FROM PUBLIC;
