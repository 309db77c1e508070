-- How many tokens newly turn stale, and when that is a wave.

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
    'Adds up the rows of suppression_count by hour, topic and cause. Two calls at once are harmless: each adds up what it has deleted.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.roll_up_suppression_count() FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.note_stale_waves()
RETURNS TABLE (environment text, topic text, tokens bigint, active bigint, usual_share numeric, since timestamptz, undo text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
-- With thousands of topics, just-in-time compilation would take longer than the rest.
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    day_ago timestamptz := clock_timestamp() - interval '1 day';
BEGIN
    PERFORM tokenkeeper.roll_up_suppression_count();
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
    'Brings stale_wave up to date by stale_share.is_wave, and returns the waves that were not known before. Called by the daemons; two calls at once '
    'return each wave once.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_stale_waves() FROM PUBLIC;
