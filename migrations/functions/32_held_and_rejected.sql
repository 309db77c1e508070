-- What operators do with held results and logouts, and with rejected results and registrations.

CREATE OR REPLACE FUNCTION tokenkeeper.check_held_cause(cause text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF cause COLLATE "C" NOT IN ('suspect', 'stale', 'unregistered_by_app') THEN
        RAISE EXCEPTION 'cause is %, expected ''suspect'', ''stale'', ''unregistered_by_app'' or null', quote_literal(left(cause, 100))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_held_cause(text) IS 'Raises 22023 for a cause that nothing is held for.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.check_held_cause(text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.release_held(topic text, environment text DEFAULT 'production', cause text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- The caller's collation must not matter.
    of_topic integer := tokenkeeper.known_topic(release_held.topic COLLATE "C", release_held.environment COLLATE "C");
    of_cause text COLLATE "C" := release_held.cause;
    results bigint;
    logouts bigint;
BEGIN
    PERFORM tokenkeeper.check_held_cause(of_cause);
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running.
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic ORDER BY g.cause FOR UPDATE;
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
    -- An operator says that they are true, so earlier ones are no sign of a mistake either.
    IF results > 0 AND of_cause IS DISTINCT FROM 'stale' THEN
        UPDATE tokenkeeper.suspect AS s SET suppresses = false WHERE s.topic_id = of_topic AND s.suppresses;
    END IF;
    IF logouts > 0 THEN
        UPDATE tokenkeeper.unregistration_receipt AS r SET suppresses = false WHERE r.topic_id = of_topic AND r.suppresses;
    END IF;
    DELETE FROM tokenkeeper.topic_guard_count AS c
    WHERE c.topic_id = of_topic AND CASE c.cause WHEN 'suspect' THEN results > 0 AND of_cause IS DISTINCT FROM 'stale' ELSE logouts > 0 END;
    UPDATE tokenkeeper.topic_guard AS g SET tripped_at = NULL, tokens = 0
    WHERE g.topic_id = of_topic AND CASE g.cause WHEN 'suspect' THEN results > 0 AND of_cause IS DISTINCT FROM 'stale' ELSE logouts > 0 END;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'held_released', release_held.environment, release_held.topic, n.rows, n.message
    FROM (VALUES (results, NULL), (logouts, 'logouts from attached tables and files')) AS n (rows, message) WHERE n.rows > 0;
    RETURN results + logouts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.release_held(text, text, text) IS
    'Lets the held results and logouts of a topic count: they return to their queue, a daemon records them within seconds, and the guard resets. '
    'With a cause (suspect, stale or unregistered_by_app), only what is held for it. Returns how many. Raises 22023 for an unknown topic or cause, 25001 '
    'if the isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.release_held(text, text, text) FROM PUBLIC;

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
    PERFORM tokenkeeper.check_held_cause(of_cause);
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic ORDER BY g.cause FOR UPDATE;
    DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND coalesce(h.cause = of_cause, true);
    GET DIAGNOSTICS results = ROW_COUNT;
    DELETE FROM tokenkeeper.held_registration AS h WHERE h.topic_id = of_topic AND coalesce(of_cause = 'unregistered_by_app', true);
    GET DIAGNOSTICS logouts = ROW_COUNT;
    IF results + logouts = 0 THEN
        RETURN 0;
    END IF;
    IF results > 0 THEN
        PERFORM tokenkeeper.recount_guard('suspect', of_topic);
    END IF;
    IF logouts > 0 THEN
        PERFORM tokenkeeper.recount_guard('unregistered_by_app', of_topic);
    END IF;
    UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL
    WHERE g.topic_id = of_topic AND CASE g.cause WHEN 'suspect' THEN results > 0 ELSE logouts > 0 END;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    SELECT 'held_discarded', discard_held.environment, discard_held.topic, n.rows, n.message
    FROM (VALUES (results, NULL), (logouts, 'logouts from attached tables and files')) AS n (rows, message) WHERE n.rows > 0;
    RETURN results + logouts;
END
$$;
COMMENT ON FUNCTION tokenkeeper.discard_held(text, text, text) IS
    'Deletes the held results and logouts of a topic, which then never count; returns how many. With a cause (suspect, stale or unregistered_by_app), '
    'only what is held for it. What was recorded before the guard tripped stays: see reinstate. Raises 22023 for an unknown topic or cause, 25001 if the '
    'isolation level is not read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.discard_held(text, text, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected_results(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    results bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running.
    WITH gone AS (
        DELETE FROM tokenkeeper.rejected_result AS r
        WHERE requeue_rejected_results.ids IS NULL OR r.rejected_id = ANY (requeue_rejected_results.ids) RETURNING r.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, least(coalesce(g.attempts, 0) + 1, 32767)
    FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('rejected_results_requeued', results);
    END IF;
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_rejected_results(bigint[]) IS
    'Puts rejected results back into the queue as they are, by rejected_id or all of them; returns how many. They keep their first queued_at. Fix them '
    'before, by UPDATE. If one is rejected again, attempts counts it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_rejected_results(bigint[]) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected_registrations(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    registrations bigint;
BEGIN
    LOCK TABLE tokenkeeper.lock_erasure IN ROW SHARE MODE; -- Not while forget is running.
    WITH gone AS (
        DELETE FROM tokenkeeper.rejected_registration AS r
        WHERE requeue_rejected_registrations.ids IS NULL OR r.rejected_id = ANY (requeue_rejected_registrations.ids) RETURNING r.*
    )
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, returned, queued_at,
                                          attempts)
    SELECT g.environment, g.topic, g.token, g.registered_at, g.device_id, g.user_id, g.tags, g.unregistered, g.source_id, g.returned, g.queued_at,
           least(coalesce(g.attempts, 0) + 1, 32767)
    FROM gone AS g;
    GET DIAGNOSTICS registrations = ROW_COUNT;
    IF registrations > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('rejected_registrations_requeued', registrations);
    END IF;
    RETURN registrations;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_rejected_registrations(bigint[]) IS
    'Puts rejected registrations back into their queue as they are, by rejected_id or all of them; returns how many. They keep their first queued_at. Fix '
    'them before, by UPDATE. If one is rejected again, attempts counts it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_rejected_registrations(bigint[]) FROM PUBLIC;
