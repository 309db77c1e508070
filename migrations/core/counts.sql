-- How many tokens are in each state: token_count. Each change of a state adds to it in its own transaction, so the counts are exact at COMMIT and nothing
-- is scanned. Functions that write the ledger insert what count_change says; a trigger adds what is deleted (note_deletion).
--
-- Locks: counting locks no row. fold_token_count waits for another fold. recompute_tokens locks the ledger against all who write it.

CREATE OR REPLACE FUNCTION tokenkeeper.count_change(was tokenkeeper.ledger, is_now tokenkeeper.ledger)
RETURNS TABLE (tokens integer, topic_id integer, registered boolean, state text)
LANGUAGE sql IMMUTABLE ROWS 2
BEGIN ATOMIC
    SELECT n.tokens, (is_now).topic_id, n.registered, n.state
    FROM (SELECT CASE WHEN (was).topic_id IS NOT NULL THEN tokenkeeper.state_of(was) END AS state_before, (was).registered_at > '-infinity' AS before,
                 tokenkeeper.state_of(is_now) AS state_after, (is_now).registered_at > '-infinity' AS after OFFSET 0) AS s
    CROSS JOIN LATERAL (VALUES (-1, s.before, s.state_before), (1, s.after, s.state_after)) AS n (tokens, registered, state)
    WHERE (s.before, s.state_before) IS DISTINCT FROM (s.after, s.state_after) AND n.state IS NOT NULL;
END;
COMMENT ON FUNCTION tokenkeeper.count_change(tokenkeeper.ledger, tokenkeeper.ledger) IS
    'What a change of a token''s row adds to token_count. was is null if the token is new. No row if its state stays the same.';

CREATE OR REPLACE FUNCTION tokenkeeper.fold_token_count(max_rows integer DEFAULT 50000) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH several AS MATERIALIZED (
        SELECT c.topic_id, c.registered, c.state FROM tokenkeeper.token_count AS c GROUP BY 1, 2, 3 HAVING count(*) > 1
    ), gone AS (
        DELETE FROM tokenkeeper.token_count AS c
        WHERE c.ctid = ANY (ARRAY(SELECT k.ctid FROM tokenkeeper.token_count AS k JOIN several USING (topic_id, registered, state) LIMIT max_rows))
        RETURNING c.*
    )
    INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
    SELECT sum(g.tokens), g.topic_id, g.registered, g.state FROM gone AS g GROUP BY 2, 3, 4 HAVING sum(g.tokens) <> 0
$$;
COMMENT ON FUNCTION tokenkeeper.fold_token_count(integer) IS
    'Internal: adds up equal rows of token_count, up to max_rows. Two calls at once are harmless: each adds up what it has deleted.';

CREATE OR REPLACE FUNCTION tokenkeeper.recompute_tokens() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    missing bigint;
    needless bigint;
    wrong bigint;
BEGIN
    PERFORM tokenkeeper.require_read_committed();
    -- Nobody changes a token meanwhile.
    LOCK TABLE tokenkeeper.ledger IN SHARE ROW EXCLUSIVE MODE;
    INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
    SELECT clock_timestamp(), l.topic_id, l.token_key FROM tokenkeeper.ledger AS l
    WHERE l.suppressed AND NOT EXISTS (SELECT FROM tokenkeeper.suppression AS s WHERE s.topic_id = l.topic_id AND s.token_key = l.token_key);
    GET DIAGNOSTICS missing = ROW_COUNT;
    DELETE FROM tokenkeeper.suppression AS s
    WHERE NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = s.topic_id AND l.token_key = s.token_key AND l.suppressed);
    GET DIAGNOSTICS needless = ROW_COUNT;
    INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
    SELECT coalesce(l.tokens, 0) - coalesce(c.tokens, 0), topic_id, registered, state
    FROM (SELECT k.topic_id, k.registered_at > '-infinity' AS registered, tokenkeeper.state_of(k) AS state, count(*) AS tokens
          FROM tokenkeeper.ledger AS k GROUP BY 1, 2, 3) AS l
    FULL JOIN (SELECT n.topic_id, n.registered, n.state, sum(n.tokens) AS tokens FROM tokenkeeper.token_count AS n GROUP BY 1, 2, 3) AS c
        USING (topic_id, registered, state)
    WHERE coalesce(l.tokens, 0) <> coalesce(c.tokens, 0);
    GET DIAGNOSTICS wrong = ROW_COUNT;
    RETURN missing + needless + wrong;
END
$$;
COMMENT ON FUNCTION tokenkeeper.recompute_tokens() IS
    'Corrects the tables suppression and token_count, for an owner who changed the ledger by hand. Reads the whole ledger; registrations and daemons wait '
    'until its transaction ends. Returns how many suppressions and counts were wrong. Raises 25001 unless READ COMMITTED.';
