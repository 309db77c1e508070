-- Single requests: what can be sent, and what is wrong with what cannot. Pure functions, which the claims and enqueue call. No locks.

-- Without its own search_path, which would double the cost: each name in it has its schema.
CREATE OR REPLACE FUNCTION tokenkeeper.parsed_payload(payload json) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
    -- The longest payload that can be sent has 5120 bytes, and each can be written as an escape of up to six bytes.
    -- One that takes more as it is stored is not read.
    IF pg_catalog.pg_column_size(parsed_payload.payload) OPERATOR(pg_catalog.>) 65536
        OR pg_catalog.octet_length(parsed_payload.payload::pg_catalog.text) OPERATOR(pg_catalog.>) 65536 THEN
        RETURN NULL;
    END IF;
    RETURN parsed_payload.payload::pg_catalog.jsonb;
EXCEPTION WHEN data_exception OR feature_not_supported OR program_limit_exceeded OR out_of_memory THEN
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.parsed_payload(json) IS 'Internal: a payload as jsonb; null if PostgreSQL cannot convert it: see payload_fault.';

CREATE OR REPLACE FUNCTION tokenkeeper.payload_length(payload jsonb) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN octet_length(replace(replace(payload::text, ': ', ':'), ', ', ','));
EXCEPTION WHEN program_limit_exceeded OR out_of_memory THEN
    RETURN 2147483647;
END
$$;
COMMENT ON FUNCTION tokenkeeper.payload_length(jsonb) IS
    'Internal: a lower bound for the bytes of a payload without blanks; 2147483647 if its text is longer than PostgreSQL allows (as jsonb, 1e131071 is '
    'written out).';

CREATE OR REPLACE FUNCTION tokenkeeper.is_background_push(payload jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(payload -> 'aps' -> 'content-available' = '1'::jsonb
                AND NOT jsonb_strip_nulls(payload -> 'aps') ?| ARRAY['alert', 'sound', 'badge'], false);
COMMENT ON FUNCTION tokenkeeper.is_background_push(jsonb) IS
    'Internal: whether a payload is a background push: content-available is 1, without alert, sound and badge, or with null ones.';

CREATE OR REPLACE FUNCTION tokenkeeper.push_type_of_topic(topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN topic COLLATE "C" LIKE '%.voip' THEN 'voip'
    WHEN topic COLLATE "C" LIKE '%.complication' THEN 'complication'
    WHEN topic COLLATE "C" LIKE '%.pushkit.fileprovider' THEN 'fileprovider'
    WHEN topic COLLATE "C" LIKE '%.push-type.liveactivity' THEN 'liveactivity'
    WHEN topic COLLATE "C" LIKE '%.push-type.widgets' THEN 'widgets'
    WHEN topic COLLATE "C" LIKE '%.push-type.controls' THEN 'controls'
    WHEN topic COLLATE "C" LIKE '%.location-query' THEN 'location'
    WHEN topic COLLATE "C" LIKE '%.voip-ptt' THEN 'pushtotalk'
END;
COMMENT ON FUNCTION tokenkeeper.push_type_of_topic(text) IS
    'Internal: the push type whose suffix a topic has; null for a plain topic. Source: Apple, "Sending notification requests to APNs".';

CREATE OR REPLACE FUNCTION tokenkeeper.push_type_of(payload jsonb, topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(tokenkeeper.push_type_of_topic(topic),
    CASE WHEN payload ? 'mdm' THEN 'mdm' WHEN tokenkeeper.is_background_push(payload) THEN 'background' ELSE 'alert' END);
COMMENT ON FUNCTION tokenkeeper.push_type_of(jsonb, text) IS
    'Internal: the push type of a request that names none: by the suffix that Apple requires of the topic, or else mdm, background or alert, by the payload.';

CREATE OR REPLACE FUNCTION tokenkeeper.payload_fault(payload json) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF tokenkeeper.length_of_payload(payload_fault.payload) > 65536 THEN
        RETURN 'payload is ' || tokenkeeper.length_of_payload(payload_fault.payload)::text || ' bytes long as written, expected at most 65536';
    END IF;
    PERFORM payload_fault.payload::jsonb;
    RETURN NULL;
EXCEPTION
    WHEN numeric_value_out_of_range THEN
        RETURN 'payload has a number that is too large or too precise';
    -- The latter in a database of SQL_ASCII.
    WHEN data_exception OR feature_not_supported THEN
        RETURN 'payload has an escape that is not a character: U+0000, half a surrogate pair, or a character that the database''s encoding lacks';
    WHEN program_limit_exceeded OR out_of_memory THEN
        RETURN 'payload is too long or nested too deeply';
END
$$;
COMMENT ON FUNCTION tokenkeeper.payload_fault(json) IS 'Internal: why parsed_payload cannot convert a payload; null if it can.';

CREATE OR REPLACE FUNCTION tokenkeeper.default_expiration(push_type text, since timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN push_type COLLATE "C" IN ('voip', 'pushtotalk', 'location') THEN since + interval '30 seconds' END;
COMMENT ON FUNCTION tokenkeeper.default_expiration(text, timestamptz) IS
    'Internal: when a request without an expiration expires: voip, pushtotalk and location half a minute after it could first be sent; null for others, '
    'which APNs keeps.';

CREATE OR REPLACE FUNCTION tokenkeeper.aps_fault(aps jsonb, push_type text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN jsonb_typeof(aps) <> 'object' THEN 'aps is a JSON ' || jsonb_typeof(aps) || ', expected an object: devices would show nothing'
    WHEN aps -> 'content-available' NOT IN ('1', '0', 'null', 'false')
        OR (aps -> 'content-available' IN ('0', 'false') AND NOT jsonb_strip_nulls(aps) ?| ARRAY['alert', 'sound', 'badge'])
        THEN 'content-available is ' || left((aps -> 'content-available')::text, 20) || ', expected 1: devices ignore anything else'
    WHEN aps ?| ARRAY['content_available', 'contentAvailable'] THEN 'aps has no content-available, but a similar key: expected content-available'
    WHEN aps ?| ARRAY['Alert', 'Badge', 'Sound', 'mutable_content', 'mutableContent', 'thread_id', 'threadId', 'interruption_level', 'interruptionLevel',
                      'relevance_score', 'relevanceScore', 'target_content_id', 'targetContentId', 'filter_criteria', 'filterCriteria']
        THEN 'aps has a key that devices ignore: expected lower case and hyphens, such as alert, mutable-content or thread-id'
    WHEN jsonb_typeof(aps -> 'badge') NOT IN ('number', 'null') AND NOT aps ?| ARRAY['alert', 'sound'] THEN 'badge is ' || left((aps -> 'badge')::text, 20) || ', expected a number: devices ignore anything else'
    WHEN aps -> 'interruption-level' NOT IN ('"passive"', '"active"', '"time-sensitive"', '"critical"', 'null')
        THEN 'interruption-level is ' || left((aps -> 'interruption-level')::text, 20) || ', expected passive, active, time-sensitive or critical'
    WHEN jsonb_typeof(aps -> 'alert') IN ('number', 'boolean', 'array') AND aps -> 'alert' NOT IN ('[]', 'false')
        OR jsonb_typeof(aps -> 'alert') = 'object' AND aps -> 'alert' <> '{}'
            AND NOT aps -> 'alert' ?| ARRAY['title', 'subtitle', 'body', 'title-loc-key', 'subtitle-loc-key', 'loc-key']
            AND NOT jsonb_strip_nulls(aps) ?| ARRAY['sound', 'badge']
        THEN 'alert is ' || left((aps -> 'alert')::text, 40) || ', expected a text, or a dictionary with title or body: devices would show nothing'
    WHEN push_type COLLATE "C" = 'alert' AND aps <> '{}' AND NOT aps ?| ARRAY['alert', 'sound', 'badge', 'content-available']
        THEN 'aps has no alert, sound or badge: devices would show nothing'
    WHEN push_type COLLATE "C" = 'alert' AND aps -> 'alert' IN ('null', '""', '{}', '[]', 'false') AND NOT jsonb_strip_nulls(aps) ?| ARRAY['sound', 'badge']
            AND NOT (aps -> 'alert' = '""' AND aps ? 'content-available')
        THEN 'alert is ' || (aps -> 'alert')::text || ', expected a text or a dictionary: devices would show nothing'
    WHEN push_type COLLATE "C" = 'alert' AND jsonb_typeof(aps -> 'alert') = 'object'
            AND coalesce(aps #>> '{alert,title}', '') = '' AND coalesce(aps #>> '{alert,body}', '') = '' AND coalesce(aps #>> '{alert,subtitle}', '') = ''
            AND coalesce(aps #>> '{alert,title-loc-key}', '') = '' AND coalesce(aps #>> '{alert,loc-key}', '') = ''
            AND coalesce(aps #>> '{alert,subtitle-loc-key}', '') = '' AND NOT jsonb_strip_nulls(aps) ?| ARRAY['sound', 'badge']
        THEN 'alert has an empty title and body: devices would show nothing'
END;
COMMENT ON FUNCTION tokenkeeper.aps_fault(jsonb, text) IS
    'Internal: why devices would ignore what a payload has under aps, although APNs accepts it; null if nothing is wrong.';

CREATE OR REPLACE FUNCTION tokenkeeper.live_activity_fault(aps jsonb) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN (jsonb_typeof(aps) = 'object') IS NOT TRUE THEN 'payload has no aps, expected timestamp, event and content-state within it'
    WHEN (aps -> 'event' IN ('"start"', '"update"', '"end"')) IS NOT TRUE
        THEN 'event is ' || coalesce(left((aps -> 'event')::text, 20), 'missing') || ', expected start, update or end: devices would ignore the push'
    WHEN (jsonb_typeof(aps -> 'timestamp') = 'number' AND aps -> 'timestamp' < '100000000000') IS NOT TRUE
        THEN 'timestamp is ' || coalesce(left((aps -> 'timestamp')::text, 20), 'missing') || ', expected seconds since 1970: devices would ignore the push'
    WHEN aps -> 'event' <> '"end"' AND NOT aps ? 'content-state' THEN 'content-state is missing: devices would ignore the push'
    WHEN aps -> 'event' = '"start"' AND NOT aps ?& ARRAY['attributes-type', 'attributes'] THEN 'event is start, expected attributes-type and attributes, too'
END;
COMMENT ON FUNCTION tokenkeeper.live_activity_fault(jsonb) IS
    'Internal: why devices would ignore what a Live Activity gets under aps; null if nothing is wrong. Source: Apple, "Starting and updating Live Activities '
    'with ActivityKit push notifications".';

CREATE OR REPLACE FUNCTION tokenkeeper.push_type_fault(push_type text, topic text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN tokenkeeper.push_type_of_topic(topic) COLLATE "C" = push_type COLLATE "C" THEN NULL
    WHEN tokenkeeper.push_type_of_topic(topic) IS NOT NULL
        THEN 'push_type is ' || push_type || ', expected ' || tokenkeeper.push_type_of_topic(topic) || ' for the topic ' || topic
    WHEN push_type COLLATE "C" IN ('voip', 'complication', 'fileprovider', 'location', 'pushtotalk', 'liveactivity', 'widgets', 'controls')
        THEN 'push_type is ' || push_type || ', expected the topic to end in ' || CASE push_type COLLATE "C"
            WHEN 'fileprovider' THEN '.pushkit.fileprovider' WHEN 'location' THEN '.location-query' WHEN 'pushtotalk' THEN '.voip-ptt'
            WHEN 'voip' THEN '.voip' WHEN 'complication' THEN '.complication' ELSE '.push-type.' || push_type END
    WHEN (push_type COLLATE "C" = 'mdm') <> (topic COLLATE "C" LIKE 'com.apple.mgmt.%')
        THEN 'push_type is ' || push_type || ' for the topic ' || topic || ', expected mdm for com.apple.mgmt.* and only there'
END;
COMMENT ON FUNCTION tokenkeeper.push_type_fault(text, text) IS
    'Internal: why APNs would refuse a push type for a topic; null if it would not. Source: Apple, "Sending notification requests to APNs".';

CREATE OR REPLACE FUNCTION tokenkeeper.send_fault(
    environment text, topic text, payload jsonb, push_type text, priority integer, expiration timestamptz, collapse_id text,
    scheduled_at timestamptz, payload_text text) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE
    WHEN environment COLLATE "C" NOT IN ('production', 'sandbox') THEN tokenkeeper.environment_fault(environment)
    WHEN tokenkeeper.topic_fault(topic) IS NOT NULL THEN tokenkeeper.topic_fault(topic)
    WHEN payload IS NULL THEN 'payload is missing, expected a JSON object'
    WHEN jsonb_typeof(payload) <> 'object' THEN 'payload is a JSON ' || jsonb_typeof(payload) || ', expected an object'
    WHEN push_type COLLATE "C" NOT IN ('alert', 'background', 'voip', 'complication', 'fileprovider', 'mdm', 'liveactivity', 'location', 'pushtotalk',
                           'widgets', 'controls')
        THEN 'push_type is ' || quote_literal(left(push_type, 20)) || ', expected alert, background, voip, complication, fileprovider, '
             || 'mdm, liveactivity, location, pushtotalk, widgets or controls'
    WHEN tokenkeeper.push_type_fault(push_type, topic) IS NOT NULL THEN tokenkeeper.push_type_fault(push_type, topic)
    -- What a Wallet pass gets is not shown.
    WHEN push_type COLLATE "C" IN ('alert', 'background') AND payload ? 'aps' AND topic COLLATE "C" NOT LIKE 'pass.%'
        AND tokenkeeper.aps_fault(payload -> 'aps', push_type) IS NOT NULL
        THEN tokenkeeper.aps_fault(payload -> 'aps', push_type)
    WHEN push_type COLLATE "C" IN ('alert', 'background') AND topic COLLATE "C" NOT LIKE 'pass.%' AND (
            payload ? 'content-available' AND (payload -> 'aps' ?| ARRAY['content-available', 'alert']) IS NOT TRUE
            OR push_type COLLATE "C" = 'alert' AND payload ? 'alert' AND (payload -> 'aps' ? 'alert') IS NOT TRUE)
        THEN 'payload has alert or content-available outside aps, expected them within it: devices would show nothing'
    WHEN push_type COLLATE "C" = 'alert' AND topic COLLATE "C" NOT LIKE 'pass.%' AND NOT payload ? 'aps'
            AND payload ?| ARRAY['APS', 'Aps', 'apns', 'APNS', 'notification', 'GCM', 'data', 'message', 'payload', 'to']
        THEN 'payload has no aps, expected what APNs gets, such as {"aps":{"alert":"Hi"}}: devices would show nothing'
    WHEN push_type COLLATE "C" = 'liveactivity' AND tokenkeeper.live_activity_fault(payload -> 'aps') IS NOT NULL
        THEN tokenkeeper.live_activity_fault(payload -> 'aps')
    -- A Wallet pass is updated by an empty push.
    WHEN push_type COLLATE "C" = 'background' AND topic COLLATE "C" NOT LIKE 'pass.%' AND NOT tokenkeeper.is_background_push(payload)
        THEN 'push_type is background, expected a payload with content-available 1 and no alert, sound or badge'
    WHEN push_type COLLATE "C" = 'alert' AND tokenkeeper.is_background_push(payload)
        THEN 'push_type is alert, expected background: the payload has content-available 1 and no alert, sound or badge'
    WHEN push_type COLLATE "C" = 'background' AND priority <> 5 THEN 'priority is ' || priority::text || ', expected 5 for a background push'
    WHEN priority NOT IN (10, 5, 1) THEN 'priority is ' || priority::text || ', expected 10, 5 or 1'
    WHEN NOT isfinite(expiration) OR expiration < 'epoch'
        THEN 'expiration is ' || CASE WHEN isfinite(expiration) THEN 'before 1970' ELSE 'infinite' END || ', expected a finite instant, or null'
    WHEN expiration > 'epoch' AND expiration <= scheduled_at
        THEN 'expiration is not later than scheduled_at: the request would expire before it may be sent'
    WHEN octet_length(collapse_id) NOT BETWEEN 1 AND 64
        THEN 'collapse_id is ' || octet_length(collapse_id)::text || ' bytes long, expected 1 to 64'
    WHEN collapse_id COLLATE "C" ~ '[^ -~]|^ | $' THEN 'collapse_id has characters that no header can carry'
    -- A lower bound: separators inside strings are removed too. The exact length is checked when it is sent.
    WHEN (octet_length(payload_text) <= 4096) IS NOT TRUE
        AND CASE WHEN payload_text IS NOT NULL THEN octet_length(replace(replace(payload_text COLLATE "C", ': ', ':'), ', ', ','))
                 ELSE tokenkeeper.payload_length(payload) END > CASE push_type COLLATE "C" WHEN 'voip' THEN 5120 ELSE 4096 END
        THEN 'payload is over ' || CASE push_type COLLATE "C" WHEN 'voip' THEN '5120' ELSE '4096' END || ' bytes long'
END;
COMMENT ON FUNCTION tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text, timestamptz, text) IS
    'Internal: why APNs would refuse a request, whatever its token; null if it would not. push_type is never null. scheduled_at is the sender''s; null if a '
    'daemon set another one. payload_text is the text of the payload if it is known, or null.';
