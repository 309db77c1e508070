-- oldest daemon: 0.1.0
--
-- Shards: several databases, each complete and with its own daemon, share the tokens of a provider. See docs/how-to/shard.md.

-- Versioned, because partition keys of a router call it. It can never change: tokens would be looked for in the wrong database.
CREATE FUNCTION tokenkeeper.shard_of(token text, shards integer) RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
    -- Of the bytes, so that the case of the hex makes no difference.
    digest bytea := pg_catalog.sha256(tokenkeeper.token_key(shard_of.token));
BEGIN
    IF shard_of.shards IS NULL OR shard_of.shards NOT BETWEEN 1 AND 1024 OR shard_of.shards & (shard_of.shards - 1) <> 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('shards is %s, expected a power of two from 1 to 1024', coalesce(shard_of.shards::text, 'null'));
    END IF;
    -- The first four bytes, the most significant first. The mask has ten bits at most: only the last two of these bytes count.
    RETURN coalesce((get_byte(digest, 2) << 8 | get_byte(digest, 3)) & (shard_of.shards - 1), 0);
END
$$;
COMMENT ON FUNCTION tokenkeeper.shard_of(text, integer) IS
    'The shard that has a token, from 0: the first four bytes of the SHA-256 of the token''s bytes, most significant first, modulo shards, which is a power of '
    'two from 1 to 1024. Upper and lower case give the same shard. A null or malformed token gives 0. Raises 22023 for another number of shards.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.shard_of(text, integer) FROM PUBLIC;

CREATE TABLE tokenkeeper.shard (
    number integer PRIMARY KEY CHECK (number >= 0 AND number < shards),
    shards integer NOT NULL CHECK (shards BETWEEN 1 AND 1024 AND shards & (shards - 1) = 0)
);
-- At most one row.
CREATE UNIQUE INDEX shard_is_one ON tokenkeeper.shard ((true));
COMMENT ON TABLE tokenkeeper.shard IS
    'Which shard this database is, in at most one row: none in a database that is not sharded. `tokenkeeperd router migrate` writes it once. It is fixed '
    'forever: tokens would be looked for in the wrong database.';
COMMENT ON COLUMN tokenkeeper.shard.number IS 'From 0. The tokens here are those with shard_of(token, shards) = number.';
COMMENT ON COLUMN tokenkeeper.shard.shards IS 'How many shards there are: a power of two.';
COMMENT ON INDEX tokenkeeper.shard_is_one IS 'Keeps a second row out.';
