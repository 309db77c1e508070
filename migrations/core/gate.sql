-- The gate: may this token be sent to? It waits only for reap_topics and for a migration.
--
-- It reads one index entry per token, whatever the size of the ledger was when the session planned the query. enable_seqscan = off keeps a
-- plan from reading the whole ledger, but not from reading a whole index; so the queries are written such that only a look-up by the
-- full key fits.

CREATE OR REPLACE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(is_sendable.token);
BEGIN
    IF key IS NULL THEN
        IF is_sendable.token IS NOT NULL THEN
            RAISE NOTICE 'not sendable: %', tokenkeeper.token_fault(is_sendable.token);
        END IF;
        RETURN false;
    END IF;
    -- Not a join: with a subquery, the planner can only use the whole key. A separate statement costs less than the same query as an expression.
    PERFORM FROM tokenkeeper.suppression AS s
    WHERE s.topic_id = (
            SELECT t.topic_id FROM tokenkeeper.topic AS t
            WHERE t.topic = is_sendable.topic COLLATE "C" AND t.environment = coalesce(is_sendable.environment, 'production') COLLATE "C"
              AND CASE WHEN t.moved_to IS NULL THEN t.gate IS DISTINCT FROM 'observe' ELSE tokenkeeper.raise_moved(t.topic, t.moved_to) END)
      AND s.token_key = key;
    IF is_sendable.environment COLLATE "C" NOT IN ('production', 'sandbox') THEN
        RAISE NOTICE '%', tokenkeeper.environment_fault(is_sendable.environment);
    END IF;
    RETURN NOT FOUND;
END
$$;
COMMENT ON FUNCTION tokenkeeper.is_sendable(text, text, text) IS
    'The gate, for one token: false if it is suppressed, or, with a NOTICE, if it cannot be read. An unknown token is sendable. An environment that is none '
    'gets a NOTICE. If the topic''s gate only observes, true for each token that can be read. Raises only 55000. Works on a standby.';

CREATE OR REPLACE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t
        WHERE t.topic = sendable.topic COLLATE "C" AND t.environment = coalesce(sendable.environment, 'production') COLLATE "C"
          AND CASE WHEN t.moved_to IS NULL THEN t.gate IS DISTINCT FROM 'observe' ELSE tokenkeeper.raise_moved(t.topic, t.moved_to) END);
    keys bytea[] := ARRAY(SELECT tokenkeeper.token_key(a.token) FROM unnest(sendable.tokens) WITH ORDINALITY AS a (token, position) ORDER BY a.position);
    unread text := CASE WHEN array_position(keys, NULL) IS NOT NULL THEN tokenkeeper.unreadable(sendable.tokens) END;
BEGIN
    IF unread IS NOT NULL THEN
        RAISE NOTICE 'not sendable: %', unread;
    END IF;
    IF sendable.environment COLLATE "C" NOT IN ('production', 'sandbox') THEN
        RAISE NOTICE '%', tokenkeeper.environment_fault(sendable.environment);
    END IF;
    -- IS NOT TRUE instead of NOT EXISTS, which would become a join.
    RETURN QUERY
        SELECT asked.token FROM unnest(sendable.tokens COLLATE "C", keys) WITH ORDINALITY AS asked (token, key, position)
        WHERE asked.key IS NOT NULL AND (
            SELECT true FROM tokenkeeper.suppression AS s WHERE s.topic_id = of_topic AND s.token_key = asked.key) IS NOT TRUE
        ORDER BY asked.position;
END
$$;
COMMENT ON FUNCTION tokenkeeper.sendable(text[], text, text) IS
    'The gate, for many tokens: returns the sendable ones, as is_sendable decides, in the order and spelling given, with duplicates. A NOTICE counts '
    'those that cannot be read. Raises only 55000. Works on a standby.';
