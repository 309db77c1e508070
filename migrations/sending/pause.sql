-- A person pauses sending to a topic, and resumes it. Locks: the topic's row in paused_topic.
--
-- Daemons pause by themselves what APNs refuses, each for itself and not here, and go on by themselves: sending_daemon.problems says so.

CREATE OR REPLACE FUNCTION tokenkeeper.pause_sending(topic text, environment text DEFAULT 'production', reason text DEFAULT 'paused by an operator')
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    the_topic text COLLATE "C" := pause_sending.topic;
    the_environment text COLLATE "C" := coalesce(pause_sending.environment, 'production');
    known record;
BEGIN
    -- A typing error must not look like a pause.
    IF the_environment NOT IN ('production', 'sandbox') OR coalesce(the_topic, '') = '' THEN
        RAISE EXCEPTION 'expected a topic, and the environment production or sandbox' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF tokenkeeper.topic_fault(the_topic) IS NOT NULL THEN
        RAISE EXCEPTION '%', tokenkeeper.topic_fault(the_topic) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(pause_sending.reason) > 1000 THEN
        RAISE EXCEPTION 'reason is % bytes long, expected at most 1000', octet_length(pause_sending.reason) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    known := tokenkeeper.find_topic(the_topic, the_environment);
    -- Nobody needs to have registered for a topic that has requests. A partial index each.
    IF known.fault IS NOT NULL
        AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NULL
                        AND left(coalesce(r.topic, ''), 513) = the_topic AND left(coalesce(r.environment, 'production'), 20) = the_environment)
        AND NOT EXISTS (SELECT FROM tokenkeeper.send_request AS r WHERE r.claimed_by IS NOT NULL
                        AND left(coalesce(r.topic, ''), 513) = the_topic AND left(coalesce(r.environment, 'production'), 20) = the_environment) THEN
        RAISE EXCEPTION '%', known.fault USING ERRCODE = 'invalid_parameter_value', HINT = known.hint;
    END IF;
    INSERT INTO tokenkeeper.paused_topic AS h (environment, topic, reason)
    VALUES (the_environment, the_topic, coalesce(pause_sending.reason, ''))
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, message)
        VALUES ('sending_paused', the_environment, the_topic, pause_sending.reason);
    END IF;
    RETURN FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.pause_sending(text, text, text) IS
    'Pauses a topic: no daemon claims its requests until resume_sending. Returns false if it was already paused; the earlier reason stays. '
    'Raises 22023 for a topic that is unknown and has no request, an unknown environment, or a reason over 1000 bytes.';

CREATE OR REPLACE FUNCTION tokenkeeper.resume_sending(topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    the_topic text COLLATE "C" := resume_sending.topic;
    the_environment text COLLATE "C" := coalesce(resume_sending.environment, 'production');
    was_paused boolean;
BEGIN
    DELETE FROM tokenkeeper.paused_topic AS h WHERE h.topic = the_topic AND h.environment = the_environment;
    was_paused := FOUND;
    -- Daemons look for it while they pause something.
    IF the_environment IN ('production', 'sandbox') AND tokenkeeper.topic_fault(the_topic) IS NULL THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic) VALUES ('sending_resumed', the_environment, the_topic);
        -- A refused request waits up to five minutes, and one that met an error of the server up to an hour. That of a paused campaign waits for ever.
        UPDATE tokenkeeper.send_request AS r SET scheduled_at = clock_timestamp() WHERE r.ctid = ANY (ARRAY(
            SELECT q.ctid FROM tokenkeeper.send_request AS q
            WHERE left(coalesce(q.topic, ''), 513) = the_topic AND left(coalesce(q.environment, 'production'), 20) = the_environment
              AND coalesce(q.scheduled_at, q.queued_at) > clock_timestamp()
              AND coalesce(q.scheduled_at, q.queued_at) < clock_timestamp() + interval '2 hours' AND q.claimed_by IS NULL
              AND q.deferred AND NOT q.postponed AND q.last_error IS NOT NULL
            LIMIT 10000 FOR UPDATE SKIP LOCKED));
    END IF;
    RETURN was_paused;
END
$$;
COMMENT ON FUNCTION tokenkeeper.resume_sending(text, text) IS
    'Ends the pause of a topic. Daemons that paused it by themselves, because APNs refuses its requests or their credential, try again within two seconds '
    'instead of after minutes; so do requests that wait for a retry (10,000 at most). Returns false if nobody had called pause_sending.';
