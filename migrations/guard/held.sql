-- What operators do with held results and logouts: let them count, or delete them.
--
-- Locks: release_held waits ten seconds at most for the running batches, and lets none begin until its transaction ends. discard_held locks only its rows.

CREATE OR REPLACE FUNCTION tokenkeeper.release_held(topic text, environment text DEFAULT 'production', cause text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The caller's collation must not matter.
    of_topic integer := tokenkeeper.known_topic(release_held.topic COLLATE "C", release_held.environment COLLATE "C");
    of_cause text COLLATE "C" := release_held.cause;
    released text[] COLLATE "C";
    since timestamptz;
    results bigint;
    logouts bigint;
BEGIN
    PERFORM tokenkeeper.check_cause(of_cause) WHERE of_cause IS NOT NULL;
    -- What a batch is recording, the counts below must have.
    PERFORM tokenkeeper.lock_out_drains();
    SELECT array_agg(DISTINCT h.cause), least(min(h.queued_at) - interval '1 day', now() - interval '2 days') INTO released, since
    FROM tokenkeeper.held AS h WHERE h.topic_id = of_topic AND coalesce(h.cause = of_cause, true);
    WITH gone AS (
        DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND coalesce(h.cause = of_cause, true) RETURNING h.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, partition_number, released)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, g.attempts, 8, true FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    WITH gone AS (
        DELETE FROM tokenkeeper.held_registration AS h WHERE h.topic_id = of_topic AND coalesce(of_cause = 'unregistered_by_app', true) RETURNING h.*
    )
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at,
                                          attempts, partition_number, released)
    SELECT g.environment, g.topic, g.token, g.registered_at, g.device_id, g.user_id, g.tags, g.unregistered, g.source_id, g.queued_at,
           g.attempts, 8, true FROM gone AS g;
    GET DIAGNOSTICS logouts = ROW_COUNT;
    IF results + logouts = 0 THEN
        RETURN 0;
    END IF;
    -- An operator says that they are true, so those that were recorded before are no sign of a mistake either.
    UPDATE tokenkeeper.receipt AS r SET counted = false
    WHERE r.topic_id + 0 = of_topic AND r.cause = ANY (released) AND r.received_at > since AND r.counted;
    UPDATE tokenkeeper.suppression_count AS c SET tokens = 0
    WHERE c.topic_id = of_topic AND c.cause = ANY (released) AND c.hour > since;
    DELETE FROM tokenkeeper.tripped_guard AS g WHERE g.topic_id = of_topic AND g.cause = ANY (released);
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'held_released', release_held.environment, release_held.topic, n.rows, n.message
    FROM (VALUES (results, NULL), (logouts, 'logouts from attached tables and files')) AS n (rows, message) WHERE n.rows > 0;
    RETURN results + logouts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.release_held(text, text, text) IS
    'Lets the held results and logouts of a topic count; returns how many. A daemon records them within seconds, and the guard resets. cause: suspect, '
    'stale or unregistered_by_app; null: all. The drains wait until the transaction ends, so commit at once. Raises 25001; 22023 for an unknown topic or '
    'cause; 55P03 if it cannot lock out the drains within ten seconds.';

CREATE OR REPLACE FUNCTION tokenkeeper.discard_held(topic text, environment text DEFAULT 'production', cause text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(discard_held.topic COLLATE "C", discard_held.environment COLLATE "C");
    of_cause text COLLATE "C" := discard_held.cause;
    results bigint;
    logouts bigint;
BEGIN
    PERFORM tokenkeeper.check_cause(of_cause) WHERE of_cause IS NOT NULL;
    DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND coalesce(h.cause = of_cause, true);
    GET DIAGNOSTICS results = ROW_COUNT;
    DELETE FROM tokenkeeper.held_registration AS h WHERE h.topic_id = of_topic AND coalesce(of_cause = 'unregistered_by_app', true);
    GET DIAGNOSTICS logouts = ROW_COUNT;
    IF results + logouts = 0 THEN
        RETURN 0;
    END IF;
    UPDATE tokenkeeper.tripped_guard AS g SET held_at = NULL WHERE g.topic_id = of_topic AND coalesce(g.cause = of_cause, true);
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'held_discarded', discard_held.environment, discard_held.topic, n.rows, n.message
    FROM (VALUES (results, NULL), (logouts, 'logouts from attached tables and files')) AS n (rows, message) WHERE n.rows > 0;
    RETURN results + logouts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.discard_held(text, text, text) IS
    'Deletes the held results and logouts of a topic, which then never count; returns how many. cause: as for release_held. What was recorded before the '
    'guard tripped stays: see reinstate. Raises 25001, and 22023 for an unknown topic or cause.';
