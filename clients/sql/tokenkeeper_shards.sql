-- Which shard of tokenkeeperd has a device token, for a database of your own that has the tokens.
--
-- Run this file there once: psql -d DATABASE -f tokenkeeper_shards.sql
-- On a shard and on a router, tokenkeeper.shard_of does the same.

CREATE OR REPLACE FUNCTION shard_of(token text, shards integer) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
    digest bytea;
BEGIN
    IF shards IS NULL OR shards NOT BETWEEN 1 AND 1024 OR shards & (shards - 1) <> 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('shards is %s, expected a power of two from 1 to 1024', coalesce(shards::text, 'null'));
    END IF;
    -- 1 to 512 bytes in hex.
    IF token IS NULL OR length(token) NOT BETWEEN 2 AND 1024 OR length(token) % 2 <> 0 OR token ~ '[^0-9A-Fa-f]' THEN
        RETURN 0;
    END IF;
    -- The first four bytes, the most significant first. The mask has ten bits at most: only the last two of these bytes count.
    digest := pg_catalog.sha256(pg_catalog.decode(token, 'hex'));
    RETURN (get_byte(digest, 2) << 8 | get_byte(digest, 3)) & (shards - 1);
END
$$;
COMMENT ON FUNCTION shard_of(text, integer) IS
    'The number of the shard that has a device token (hex), from 0; shards is a power of two from 1 to 1024, otherwise this raises 22023. A malformed token '
    'and null are on shard 0, where they are rejected.';
