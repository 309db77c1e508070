-- What an operator does with rejected results and registrations: put them back into their queue. No locks but those of the rows.

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected_results(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    results bigint;
BEGIN
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
    'Puts rejected results back into the queue, by rejected_id (null: all); returns how many. Fix them before, by UPDATE. They keep their first queued_at.';

CREATE OR REPLACE FUNCTION tokenkeeper.requeue_rejected_registrations(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    registrations bigint;
BEGIN
    WITH gone AS (
        DELETE FROM tokenkeeper.rejected_registration AS r
        WHERE requeue_rejected_registrations.ids IS NULL OR r.rejected_id = ANY (requeue_rejected_registrations.ids) RETURNING r.*
    )
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, returned, row_key,
                                          queued_at, attempts)
    SELECT g.environment, g.topic, g.token, g.registered_at, g.device_id, g.user_id, g.tags, g.unregistered, g.source_id, g.returned, g.row_key, g.queued_at,
           least(coalesce(g.attempts, 0) + 1, 32767)
    FROM gone AS g;
    GET DIAGNOSTICS registrations = ROW_COUNT;
    IF registrations > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('rejected_registrations_requeued', registrations);
    END IF;
    RETURN registrations;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_rejected_registrations(bigint[]) IS 'As requeue_rejected_results, for rejected registrations.';
