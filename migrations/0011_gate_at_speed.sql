-- oldest daemon: 0.1.0
--
-- The gate reads one index entry a token, whatever the ledger was when the session made its plans.
--
-- In 0006, enable_seqscan kept a plan from reading the ledger, but not from reading an index from end to end: joined with
-- topic, or asked for what is suppressed, a small ledger was read through all of ledger_suppressed (or of the primary key,
-- by token_key alone), and a session went on doing so after the ledger had grown.

-- Most tokens that the gate is asked about are not suppressed: of those it touches no row. The predicate is written so that
-- ledger_suppressed, which lacks the key, cannot answer the same question. "suppressed" is in a predicate already: no HOT update is lost.
CREATE INDEX ledger_suppressed_key ON tokenkeeper.ledger (topic_id, token_key) WHERE suppressed > false;
COMMENT ON INDEX tokenkeeper.ledger_suppressed_key IS 'What the gate looks at: ask for suppressed > false.';

-- As in 0001, with half the calls: a session sets each of them up anew in every transaction.
CREATE OR REPLACE FUNCTION tokenkeeper.token_key(token text) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    -- decode() alone would accept white space.
    WHEN octet_length(token) <= 1024 AND token ~ '^(?:[0-9A-Fa-f]{2})+$'
    THEN decode(token, 'hex')
END;

CREATE OR REPLACE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(is_sendable.token);
BEGIN
    IF key IS NULL THEN
        RETURN false;
    END IF;
    -- Not a join: a subquery leaves the planner nothing but the whole key, of one index or the other. A statement of its own
    -- costs less than the same as an expression.
    PERFORM FROM tokenkeeper.ledger AS l
    WHERE l.topic_id = (
            SELECT t.topic_id FROM tokenkeeper.topic AS t
            WHERE t.topic = is_sendable.topic AND t.environment = coalesce(is_sendable.environment, 'production')
              AND t.gate IS DISTINCT FROM 'observe')
      AND l.token_key = key AND l.suppressed > false;
    RETURN NOT FOUND;
END
$$;

CREATE OR REPLACE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t
        WHERE t.topic = sendable.topic AND t.environment = coalesce(sendable.environment, 'production')
          AND t.gate IS DISTINCT FROM 'observe');
BEGIN
    -- IS NOT TRUE and not NOT EXISTS, which would become a join. OFFSET 0: each key is made once.
    RETURN QUERY
        SELECT asked.token
        FROM (SELECT a.token, a.position, tokenkeeper.token_key(a.token) AS key
              FROM unnest(sendable.tokens) WITH ORDINALITY AS a (token, position) OFFSET 0) AS asked
        WHERE asked.key IS NOT NULL AND (
            SELECT true FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = asked.key AND l.suppressed > false) IS NOT TRUE
        ORDER BY asked.position;
END
$$;
