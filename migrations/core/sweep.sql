-- What the sweep calls besides the pruning, and request_sweep, by which a person asks for one.
--
-- Locks: reap_topics waits 10 ms at most for ACCESS EXCLUSIVE on topic, and holds it until its transaction ends. roll_up_result_count waits for another roll-up.

CREATE OR REPLACE FUNCTION tokenkeeper.request_sweep(dry_run boolean DEFAULT false, force boolean DEFAULT false) RETURNS bigint
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.sweep_run (trigger, dry_run, forced)
    VALUES ('sql', coalesce(request_sweep.dry_run, false), coalesce(request_sweep.force, false))
    RETURNING run_id
$$;
COMMENT ON FUNCTION tokenkeeper.request_sweep(boolean, boolean) IS
    'Requests a sweep from the running daemons; returns its run_id in sweep_run. A daemon starts it within seconds after COMMIT. dry_run only counts; force '
    'lifts the limit on the share of a topic''s tokens.';

CREATE OR REPLACE FUNCTION tokenkeeper.roll_up_result_count(max_rows integer DEFAULT 50000, kinds integer DEFAULT 20000) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    -- An hour that ended more than an hour ago gets no more rows: no transaction of the drain takes that long.
    settled_before timestamptz := date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00') - interval '1 hour';
    at_most integer := greatest(roll_up_result_count.max_rows, 2);
    from_hour timestamptz;
    last_hour timestamptz;
    upto timestamptz;
    found bigint;
    removed bigint;
    added bigint;
BEGIN
    SELECT p.rolled_up_before INTO from_hour FROM tokenkeeper.sweep_progress AS p FOR UPDATE;
    SELECT min(s.hour), max(s.hour), count(*) INTO from_hour, last_hour, found FROM (
        SELECT c.hour FROM tokenkeeper.result_count AS c WHERE c.hour >= from_hour ORDER BY c.hour LIMIT at_most) AS s;
    IF found = 0 THEN
        RETURN false;
    END IF;
    -- Whole hours if possible; if an hour has more rows than that, some of them.
    upto := CASE WHEN found < at_most THEN 'infinity' WHEN last_hour > from_hour THEN last_hour ELSE from_hour + interval '1 hour' END;
    WITH met AS MATERIALIZED (
        SELECT c.ctid AS place, c.hour, c.environment COLLATE "C" AS environment, c.topic COLLATE "C" AS topic, c.status,
               c.reason COLLATE "C" AS reason, c.results
        FROM tokenkeeper.result_count AS c WHERE c.hour >= from_hour AND c.hour < upto ORDER BY c.hour LIMIT at_most
    ), alike AS (
        SELECT m.hour, m.environment, m.topic, m.status, m.reason, sum(m.results) AS results, array_agg(m.place) AS places,
               count(*) OVER (PARTITION BY m.hour) > roll_up_result_count.kinds AS crowded
        FROM met AS m GROUP BY 1, 2, 3, 4, 5
    ), ranked AS (
        -- If a sender invents topics, the known ones come first, then those with the most results.
        SELECT a.*, a.crowded AND row_number() OVER (PARTITION BY a.hour ORDER BY a.crowded AND EXISTS (
                   SELECT FROM tokenkeeper.topic AS t WHERE t.topic = a.topic AND t.environment = a.environment) DESC,
                   a.topic IS NOT DISTINCT FROM '(other)', a.results DESC) > roll_up_result_count.kinds AS other
        FROM alike AS a
    ), folded AS MATERIALIZED (
        SELECT unnest(r.places) AS place, r.hour,
               CASE WHEN r.other AND r.environment NOT IN ('production', 'sandbox') THEN '(other)' ELSE r.environment END AS environment,
               CASE WHEN r.other AND r.topic IS NOT NULL THEN '(other)' ELSE r.topic END AS topic, r.status,
               CASE WHEN r.other AND r.reason NOT LIKE '(%' THEN '(other)' ELSE r.reason END AS reason
        FROM ranked AS r WHERE r.other OR cardinality(r.places) > 1
    ), gone AS (
        DELETE FROM tokenkeeper.result_count AS c WHERE c.ctid = ANY (ARRAY(SELECT f.place FROM folded AS f))
        RETURNING c.ctid AS place, c.results
    ), rolled AS (
        INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
        SELECT f.hour, f.environment, f.topic, f.status, f.reason, sum(g.results) FROM gone AS g JOIN folded AS f USING (place)
        GROUP BY 1, 2, 3, 4, 5
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM rolled) INTO removed, added;
    -- Repeat a crowded hour while that makes it smaller.
    UPDATE tokenkeeper.sweep_progress AS p
    SET rolled_up_before = CASE WHEN found = at_most AND last_hour = from_hour AND (removed - added) * 100 >= at_most THEN from_hour
                                ELSE least(upto, settled_before) END;
    RETURN found = at_most AND (upto <= settled_before OR (removed - added) * 100 >= at_most);
END
$$;
COMMENT ON FUNCTION tokenkeeper.roll_up_result_count(integer, integer) IS
    'Adds up equal rows of result_count, up to max_rows at a time, oldest hours first. Beyond `kinds` combinations of (environment, topic, status, reason) '
    'in an hour, the topics of the rest become (other). Returns whether to call it again, in another transaction. Two calls at once are harmless.';

CREATE OR REPLACE FUNCTION tokenkeeper.unused_topics(topic_ids integer[], pruned_before timestamptz) RETURNS integer[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unused integer[];
    relation text;
BEGIN
    -- A day of grace, for an operator who has just inserted a policy and is about to change it.
    SELECT array_agg(t.topic_id) INTO unused FROM tokenkeeper.topic AS t
    WHERE t.topic_id = ANY (unused_topics.topic_ids) AND t.first_seen < clock_timestamp() - interval '1 day'
      AND jsonb_strip_nulls(to_jsonb(t)) - ARRAY['topic_id', 'environment', 'topic', 'first_seen'] = '{}'
      AND NOT EXISTS (SELECT FROM tokenkeeper.topic_prune AS p
                      WHERE p.topic_id = t.topic_id AND p.pruned_at >= unused_topics.pruned_before)
      AND NOT EXISTS (SELECT FROM tokenkeeper.campaign AS c WHERE c.topic = t.topic AND c.environment = t.environment AND c.ended_at IS NULL);
    -- Each other table with a topic_id, those of later versions included. The history need not be checked: a token without a row in the
    -- ledger was pruned (see topic_prune) or erased together with its history.
    FOR relation IN
        SELECT c.relname FROM pg_class AS c
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'topic_id' AND a.atttypid = 'integer'::regtype
        WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
          AND c.relname NOT IN ('topic', 'topic_prune', 'token_count', 'token_event_log',
                                'suppression_count', 'stale_wave', 'topic_rate')
        ORDER BY c.relname <> 'ledger', c.relname
    LOOP
        EXIT WHEN unused IS NULL;
        EXECUTE format('SELECT array_agg(u.id) FROM unnest($1) AS u (id) WHERE NOT EXISTS (SELECT FROM tokenkeeper.%I AS r WHERE r.topic_id = u.id)',
                       relation)
        INTO unused USING unused;
    END LOOP;
    RETURN coalesce(unused, '{}');
END
$$;
COMMENT ON FUNCTION tokenkeeper.unused_topics(integer[], timestamptz) IS
    'Which of these topics nothing refers to: no token, receipt, held result or exclusion, no tripped guard, no policy, no unended campaign, and no token '
    'pruned since an instant.';

CREATE OR REPLACE FUNCTION tokenkeeper.reap_topics(after integer, pruned_before timestamptz, max_rows integer DEFAULT 500)
RETURNS TABLE (last_id integer, reaped bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '10ms'
SET enable_seqscan = off
AS $$
DECLARE
    unused integer[];
BEGIN
    PERFORM tokenkeeper.require_read_committed();
    reaped := 0;
    SELECT array_agg(s.topic_id), max(s.topic_id) INTO unused, last_id FROM (
        SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic_id > reap_topics.after
        ORDER BY t.topic_id LIMIT greatest(reap_topics.max_rows, 1)) AS s;
    unused := tokenkeeper.unused_topics(unused, reap_topics.pruned_before);
    IF unused <> '{}' THEN
        -- Each session reads a topic_id from topic in the transaction that uses it, and so holds a lock on topic until that ends. Under this
        -- lock no session has an uncommitted use of a topic_id, and the second check sees all committed ones.
        LOCK TABLE tokenkeeper.topic IN ACCESS EXCLUSIVE MODE;
        unused := tokenkeeper.unused_topics(unused, reap_topics.pruned_before);
        DELETE FROM tokenkeeper.token_count AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.suppression_count AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.stale_wave AS w WHERE w.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.topic_prune AS p WHERE p.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.topic_rate AS r WHERE r.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.topic AS t WHERE t.topic_id = ANY (unused);
        GET DIAGNOSTICS reaped = ROW_COUNT;
    END IF;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reap_topics(integer, timestamptz, integer) IS
    'Deletes topics that nothing refers to, among the next max_rows after a topic_id. Returns the last topic_id it checked (null at the end) and how many it '
    'deleted. The gate and registrations wait until its transaction ends. Raises 55P03 if it does not get the lock on topic within 10 ms.';
