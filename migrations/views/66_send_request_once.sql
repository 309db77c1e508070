-- Requests that are taken once, however often their INSERT is repeated.
--
-- A router's INSERT reaches several shards, which commit one after the other. If it fails between two commits, part of the requests is queued,
-- and the application repeats all. The routers' send_request writes here. Requests that are inserted into send_request itself pay nothing for this.

CREATE OR REPLACE VIEW tokenkeeper.send_request_once AS
SELECT r.environment, r.topic, r.token, r.payload, r.push_type, r.priority, r.expiration, r.collapse_id, r.scheduled_at, r.apns_id
FROM tokenkeeper.send_request AS r;
ALTER VIEW tokenkeeper.send_request_once ALTER COLUMN environment SET DEFAULT 'production';
COMMENT ON VIEW tokenkeeper.send_request_once IS
    'As send_request, for INSERT and COPY that may be repeated: a request with an apns_id that was inserted here within the last day is ignored. Without '
    'an apns_id, each is a new request. A repetition waits for the transaction that it repeats.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_request_once() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF new.apns_id IS NOT NULL THEN
        INSERT INTO tokenkeeper.taken_request (apns_id) VALUES (new.apns_id) ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RETURN NULL; -- It was taken before.
        END IF;
    END IF;
    INSERT INTO tokenkeeper.send_request
        (environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id)
    VALUES (new.environment, new.topic, new.token, new.payload, new.push_type, new.priority, new.expiration, new.collapse_id, new.scheduled_at,
            coalesce(new.apns_id, gen_random_uuid()));
    RETURN new;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_request_once() IS 'Trigger: inserts a request into send_request, unless it was taken before.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.take_request_once() FROM PUBLIC;

CREATE OR REPLACE TRIGGER take_request_once INSTEAD OF INSERT ON tokenkeeper.send_request_once
FOR EACH ROW EXECUTE FUNCTION tokenkeeper.take_request_once();
