-- How many tokens newly turn stale, and when that is a wave: far more than usual. A wave is warned of, and stops nothing. The warnings of lost tokens are here, too.
--
-- Locks: note_stale_waves changes rows of suppression_count, token_count and stale_wave, and waits for another daemon that does the same.

CREATE OR REPLACE FUNCTION tokenkeeper.roll_up_suppression_count() RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH several AS MATERIALIZED (
        -- Batches add to the latest hours. Once an hour, for a minute: also what a backlog or an undo has added to earlier ones.
        SELECT c.hour, c.topic_id FROM tokenkeeper.suppression_count AS c
        WHERE c.hour > now() - CASE WHEN extract(minute FROM now()) = 0 THEN interval '3 days' ELSE interval '3 hours' END
        GROUP BY c.hour, c.topic_id, c.cause HAVING count(*) > 1
    ), gone AS (
        DELETE FROM tokenkeeper.suppression_count AS c USING (SELECT DISTINCT * FROM several) AS s WHERE c.hour = s.hour AND c.topic_id = s.topic_id
        RETURNING c.*
    )
    INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens, pruned)
    SELECT g.hour, g.topic_id, g.cause, sum(g.tokens), sum(g.pruned) FROM gone AS g GROUP BY 1, 2, 3
$$;
COMMENT ON FUNCTION tokenkeeper.roll_up_suppression_count() IS
    'Internal: adds up the rows of suppression_count by hour, topic and cause. Two calls at once are harmless.';

CREATE OR REPLACE FUNCTION tokenkeeper.note_stale_waves()
RETURNS TABLE (environment text, topic text, tokens bigint, active bigint, usual_share numeric, since timestamptz, undo text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    day_ago timestamptz := clock_timestamp() - interval '1 day';
BEGIN
    PERFORM tokenkeeper.roll_up_suppression_count();
    PERFORM tokenkeeper.fold_token_count();
    -- Usually no topic has a wave, and this is cheaper than the view.
    IF NOT EXISTS (SELECT FROM tokenkeeper.stale_wave) AND NOT EXISTS (
        SELECT FROM tokenkeeper.suppression_count AS c WHERE c.cause = 'stale' AND c.hour > now() - interval '1 day' GROUP BY c.topic_id HAVING sum(c.tokens) > 50) THEN
        RETURN;
    END IF;
    RETURN QUERY
        WITH wave AS MATERIALIZED (
            -- The hour, if it is a wave: its beginning is known better.
            SELECT DISTINCT ON (t.topic_id) t.topic_id, t.environment, t.topic, s.since, s.newly_stale, s.active, s.usual_share
            FROM tokenkeeper.stale_share AS s JOIN tokenkeeper.topic AS t USING (topic, environment)
            WHERE s.is_wave ORDER BY t.topic_id, s.period DESC
        ), over AS (
            -- Or it lasts for longer than a day: then it is noticed again.
            DELETE FROM tokenkeeper.stale_wave AS w
            WHERE w.topic_id NOT IN (SELECT n.topic_id FROM wave AS n) OR w.since < day_ago
        ), grown AS (
            UPDATE tokenkeeper.stale_wave AS w SET tokens = n.newly_stale, active = n.active
            FROM wave AS n
            WHERE w.topic_id = n.topic_id AND w.since >= day_ago AND (w.tokens, w.active) IS DISTINCT FROM (n.newly_stale, n.active)
        ), noticed AS (
            INSERT INTO tokenkeeper.stale_wave AS w (topic_id, since, tokens, active, undo)
            SELECT n.topic_id, f.at, n.newly_stale, n.active,
                   tokenkeeper.reinstate_command(n.topic, n.environment, f.at, f.at + interval '24:00', 'stale')
            FROM wave AS n
            -- The first 410 of the wave that counts. A wave that begins just before the hour has some of them in the hour before.
            CROSS JOIN LATERAL (
                SELECT coalesce(min(r.received_at), n.since) AS at FROM tokenkeeper.receipt AS r
                WHERE r.topic_id + 0 = n.topic_id AND r.cause = 'stale' AND r.counted
                  AND r.received_at BETWEEN n.since - interval '10 minutes' AND n.since + interval '25:00') AS c
            -- Its first 410s may be of tokens that were suppressed already.
            CROSS JOIN LATERAL (
                SELECT coalesce(min(r.received_at), c.at) AS at FROM tokenkeeper.receipt AS r
                WHERE r.topic_id + 0 = n.topic_id AND r.cause = 'stale' AND r.received_at BETWEEN c.at - interval '1 minute' AND c.at) AS f
            WHERE n.topic_id NOT IN (SELECT k.topic_id FROM tokenkeeper.stale_wave AS k)
            ON CONFLICT DO NOTHING
            RETURNING w.topic_id, w.since, w.undo
        )
        SELECT n.environment, n.topic, n.newly_stale, n.active, n.usual_share, a.since, a.undo
        FROM noticed AS a JOIN wave AS n USING (topic_id) ORDER BY n.topic, n.environment;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_stale_waves() IS
    'Updates stale_wave by stale_share.is_wave, and returns the new waves; of two calls at once, one returns each.';

CREATE OR REPLACE FUNCTION tokenkeeper.registered_elsewhere(of_topic integer) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    other integer := (SELECT o.topic_id FROM tokenkeeper.topic AS t JOIN tokenkeeper.topic AS o ON o.topic = t.topic AND o.environment <> t.environment
                      WHERE t.topic_id = of_topic);
BEGIN
    RETURN (
        SELECT count(*) FROM (
            (SELECT h.token_key FROM tokenkeeper.held AS h
             WHERE h.topic_id + 0 = of_topic AND h.cause = 'suspect' AND h.queued_at > now() - interval '1 day' LIMIT 1000)
            UNION
            (SELECT r.token_key FROM tokenkeeper.receipt AS r
             WHERE r.topic_id + 0 = of_topic AND r.cause = 'suspect' AND r.received_at > now() - interval '1 day' AND r.counted LIMIT 1000)) AS s
        CROSS JOIN LATERAL (
            SELECT FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = other AND l.token_key = s.token_key AND NOT l.suppressed AND l.registered_at > '-infinity') AS l);
END
$$;
COMMENT ON FUNCTION tokenkeeper.registered_elsewhere(integer) IS
    'How many of the tokens of a topic that suspects suppressed within a day, or would have, are active in the other environment. Reads 2000 at most.';

CREATE OR REPLACE FUNCTION tokenkeeper.elsewhere_words(of_topic integer, environment text) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tokens bigint := tokenkeeper.registered_elsewhere(of_topic);
BEGIN
    RETURN CASE WHEN tokens > 0
                THEN format('; %s of them %s registered in %s as well: does the app report the right environment?', tokens,
                            CASE tokens WHEN 1 THEN 'is' ELSE 'are' END,
                            CASE environment COLLATE "C" WHEN 'sandbox' THEN 'production' ELSE 'sandbox' END)
                ELSE '' END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.elsewhere_words(integer, text) IS 'What a warning about suspects of a topic says if their tokens are registered in the other environment; empty if not.';

CREATE OR REPLACE FUNCTION tokenkeeper.loss_warnings() RETURNS text[]
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
BEGIN
    RETURN ARRAY(
        SELECT format('within a day, %s of %s active tokens of %s (%s) were suppressed by suspects, 410s or logouts from tables and files%s',
                      l.tokens, a.tokens, tokenkeeper.without_backticks(t.topic), t.environment, tokenkeeper.elsewhere_words(t.topic_id, t.environment))
        FROM (SELECT c.topic_id, sum(c.tokens)::bigint AS tokens FROM tokenkeeper.suppression_count AS c
              WHERE c.hour > now() - interval '24:00' GROUP BY 1 HAVING sum(c.tokens) >= 5) AS l
        -- A topic without registrations has nothing to lose.
        JOIN (SELECT k.topic_id, coalesce(sum(k.tokens) FILTER (WHERE k.state = 'active'), 0)::bigint AS active FROM tokenkeeper.token_count AS k
              WHERE k.registered GROUP BY 1 HAVING sum(k.tokens) > 0) AS n USING (topic_id)
        JOIN tokenkeeper.topic AS t USING (topic_id)
        CROSS JOIN LATERAL (SELECT n.active + l.tokens AS tokens) AS a
        WHERE l.tokens * 5 > a.tokens
        ORDER BY l.tokens DESC LIMIT 20);
END
$$;
COMMENT ON FUNCTION tokenkeeper.loss_warnings() IS
    'A warning for each topic in which five tokens and more than a fifth of the active ones were newly suppressed within 24 clock hours, at most 20.';
