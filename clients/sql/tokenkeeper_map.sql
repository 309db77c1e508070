-- tokenkeeperd with several databases: which of them has a topic. For a database of your own; it needs PostgreSQL 11 or newer.
--
--     SELECT tokenkeeper_database(:'map', 'com.example.app');            -- psql: \set map `cat /etc/tokenkeeperd/map.json`
--     SELECT tokenkeeper_database(:'map', 'com.example.app', 'DEVICE');  -- of a topic that is split by device
--
-- Raises 22023 if the topic is split and no device is named. Null if the map has no database for it: run `tokenkeeperd map`.

CREATE FUNCTION tokenkeeper_bucket(topic text, device_id text DEFAULT NULL) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    -- Upper case of A to Z counts as lower case in a device.
    SELECT (get_byte(h.digest, 0) * 256 + get_byte(h.digest, 1)) % 1024
    FROM (SELECT sha256(convert_to(topic || coalesce(chr(10) || translate(device_id, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', 'abcdefghijklmnopqrstuvwxyz'), ''),
                                   'UTF8')) AS digest) AS h
$$;

CREATE FUNCTION tokenkeeper_database(map jsonb, topic text, device_id text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
    is_split boolean := map -> 'split_by_device' ? topic;
    bucket integer := tokenkeeper_bucket(topic, CASE WHEN is_split THEN device_id END);
BEGIN
    IF map -> 'topics' ? topic THEN
        RETURN map -> 'topics' ->> topic;
    END IF;
    IF is_split AND coalesce(device_id, '') = '' THEN
        RAISE EXCEPTION '% is split by device: name the device', topic USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (
        SELECT b.key FROM jsonb_each_text(map -> 'buckets') AS b CROSS JOIN regexp_split_to_table(nullif(b.value, ''), ',') AS r
        WHERE bucket BETWEEN split_part(r, '-', 1)::integer AND coalesce(nullif(split_part(r, '-', 2), ''), split_part(r, '-', 1))::integer LIMIT 1);
END
$$;
