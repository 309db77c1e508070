-- oldest daemon: 0.1.0
--
-- The sweep in bounded slices; a limit on what one hour may add to rejected_result; topics that nothing refers to are deleted; the
-- history's transaction ids after a restore.

CREATE TABLE tokenkeeper.sweep_progress (
    only_row         boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    rolled_up_before timestamptz NOT NULL DEFAULT '-infinity',
    transaction_id   xid8
);
COMMENT ON TABLE tokenkeeper.sweep_progress IS 'One row: what the sweeps of this database have finished, so that the next one need not look at it again.';
COMMENT ON COLUMN tokenkeeper.sweep_progress.rolled_up_before IS 'The rows of result_count of earlier hours are added up.';
COMMENT ON COLUMN tokenkeeper.sweep_progress.transaction_id IS
    'A transaction id that the last sweep had. If it lies in the future, the database was restored from a dump into a younger cluster, '
    'and the next sweep resets token_event.transaction_id. Null: the next sweep checks the whole history once.';
INSERT INTO tokenkeeper.sweep_progress DEFAULT VALUES;

-- The counts of results --------------------------------------------------------------------------------------------

DROP FUNCTION tokenkeeper.roll_up_result_count();
CREATE FUNCTION tokenkeeper.roll_up_result_count(most integer DEFAULT 50000, kinds integer DEFAULT 20000) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    -- An hour that is over by more than an hour gets no more rows: no transaction of the drain takes that long.
    open_since timestamptz := date_bin('1 hour', clock_timestamp(), '2000-01-01 00:00:00+00') - interval '1 hour';
    at_most integer := greatest(roll_up_result_count.most, 2);
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
    -- Whole hours where that is possible; of an hour with more rows than that, some at a time.
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
        -- Where a sender invents topics, those that are known come first, then those with the most results.
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
    -- Of a crowded hour, again and again, as long as that makes it smaller.
    UPDATE tokenkeeper.sweep_progress AS p
    SET rolled_up_before = CASE WHEN found = at_most AND last_hour = from_hour AND (removed - added) * 100 >= at_most THEN from_hour
                                ELSE least(upto, open_since) END;
    RETURN found = at_most AND (upto <= open_since OR (removed - added) * 100 >= at_most);
END
$$;
COMMENT ON FUNCTION tokenkeeper.roll_up_result_count(integer, integer) IS
    'Adds up rows of result_count that are alike, at most so many at a time, the oldest hour that is not added up first. Of an hour with more kinds '
    '(environment, topic, status, reason) than the limit, the topics of the rest become (other). Returns whether to call it again, in a transaction '
    'of its own. Called by the sweep; two at once are harmless.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.roll_up_result_count(integer, integer) FROM PUBLIC;

-- Rejected results -------------------------------------------------------------------------------------------------

CREATE INDEX rejected_result_rejected_at ON tokenkeeper.rejected_result (rejected_at) WHERE attempts IS NULL;
COMMENT ON INDEX tokenkeeper.rejected_result_rejected_at IS
    'What the last hour added, for drain.rejected_per_hour. Rows that an operator has requeued before do not count.';
CREATE INDEX result_count_not_kept ON tokenkeeper.result_count (hour) WHERE reason = '(rejected, not kept)';
COMMENT ON INDEX tokenkeeper.result_count_not_kept IS 'Rejected results beyond drain.rejected_per_hour, for the warning of status.';
COMMENT ON TABLE tokenkeeper.rejected_result IS
    'Results that could not be understood, whole, as they were queued. The sweep deletes them after sweep.rejected_retention. '
    'Beyond drain.rejected_per_hour rejected results are only counted: result_stat has them under the reason (rejected, not kept).';
COMMENT ON VIEW tokenkeeper.result_stat IS
    'How many results were taken from the queue, by the hour in which they were, environment, topic, status and reason; '
    'each counted in the transaction that recorded it. Rejected results count with the reason (rejected), or (rejected, not kept) '
    'beyond drain.rejected_per_hour.';

-- Topics -----------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.topic_prune (
    topic_id  integer PRIMARY KEY,
    pruned_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE tokenkeeper.topic_prune IS
    'When a sweep last pruned a token of each topic. A topic is kept as long as its history can still be in token_event.';
INSERT INTO tokenkeeper.topic_prune (topic_id) SELECT t.topic_id FROM tokenkeeper.topic AS t;

CREATE FUNCTION tokenkeeper.unused_topics(topic_ids integer[], pruned_before timestamptz) RETURNS integer[]
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    unused integer[];
    relation text;
BEGIN
    -- A day of grace, for a person who has just inserted a policy and is about to change it.
    SELECT array_agg(t.topic_id) INTO unused FROM tokenkeeper.topic AS t
    WHERE t.topic_id = ANY (unused_topics.topic_ids) AND t.first_seen < clock_timestamp() - interval '1 day'
      AND jsonb_strip_nulls(to_jsonb(t)) - ARRAY['topic_id', 'environment', 'topic', 'first_seen'] = '{}'
      AND NOT EXISTS (SELECT FROM tokenkeeper.topic_prune AS p
                      WHERE p.topic_id = t.topic_id AND p.pruned_at >= unused_topics.pruned_before)
      AND NOT EXISTS (SELECT FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = t.topic_id AND g.open_since IS NOT NULL);
    -- Every other table with a topic_id, those of later migrations included. The history needs no look: a token without a row in the ledger
    -- was pruned (see topic_prune) or erased together with its history.
    FOR relation IN
        SELECT c.relname FROM pg_class AS c
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'topic_id' AND a.atttypid = 'integer'::regtype
        WHERE c.relnamespace = 'tokenkeeper'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
          AND c.relname NOT IN ('topic', 'topic_prune', 'topic_guard', 'token_count', 'token_count_part', 'token_count_progress', 'token_event_log',
                                'crowded_device')
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
    'Of some topics, those that nothing refers to: no token, suspect, device, held result or exclusion, no open guard, no policy, and no token '
    'pruned since an instant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.unused_topics(integer[], timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.reap_topics(after integer, pruned_before timestamptz, most integer DEFAULT 500)
RETURNS TABLE (last_id integer, reaped bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '10ms'
SET enable_seqscan = off
AS $$
DECLARE
    unused integer[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'reap_topics runs under read committed alone' USING ERRCODE = 'active_sql_transaction';
    END IF;
    reaped := 0;
    SELECT array_agg(s.topic_id), max(s.topic_id) INTO unused, last_id FROM (
        SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic_id > reap_topics.after
        ORDER BY t.topic_id LIMIT greatest(reap_topics.most, 1)) AS s;
    unused := tokenkeeper.unused_topics(unused, reap_topics.pruned_before);
    IF unused <> '{}' THEN
        -- Everybody finds a topic_id by reading topic, in the transaction that uses it, and so holds a lock on topic until that ends. With
        -- this lock, nobody has a topic_id in hand that is not committed; the look after it sees all that is.
        LOCK TABLE tokenkeeper.topic IN ACCESS EXCLUSIVE MODE;
        unused := tokenkeeper.unused_topics(unused, reap_topics.pruned_before);
        DELETE FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.token_count AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.token_count_part AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.token_count_progress AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.crowded_device AS c WHERE c.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.topic_prune AS p WHERE p.topic_id = ANY (unused);
        DELETE FROM tokenkeeper.topic AS t WHERE t.topic_id = ANY (unused);
        GET DIAGNOSTICS reaped = ROW_COUNT;
    END IF;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reap_topics(integer, timestamptz, integer) IS
    'Deletes topics that nothing refers to, of the next so many behind a topic_id. Returns the last topic_id it has looked at (null at the end) '
    'and how many it has deleted. Raises 55P03 when it does not get the lock on topic within 10 ms: somebody reads it at length. Called by the '
    'sweep, a transaction each: the gate and registrations wait until it ends.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reap_topics(integer, timestamptz, integer) FROM PUBLIC;

COMMENT ON TABLE tokenkeeper.topic IS
    'Every (environment, topic) seen, and the small number that stands for it in the ledger: it saves 40 bytes per token. '
    'The sweep deletes topics that nothing refers to any more (reap_topics). Whoever reads a topic_id must use it in the same transaction.';
COMMENT ON TABLE tokenkeeper.ledger IS
    'One row per (topic, token). Written by register, unregister, record and reinstate alone; people read the view token. '
    'No foreign key to topic: it would lock one hot row per registration. reap_topics keeps every topic that has a row here.';

-- The history after a restore --------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.reset_transaction_ids(of_partition oid, first_page bigint, end_page bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    relation text;
    events bigint;
BEGIN
    SELECT c.relname INTO relation FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass AND c.oid = reset_transaction_ids.of_partition;
    IF NOT FOUND OR first_page NOT BETWEEN 0 AND 4294967295 OR end_page NOT BETWEEN 0 AND 4294967295 THEN
        -- A partition that was dropped meanwhile has nothing to reset.
        RETURN 0;
    END IF;
    -- A row that this statement sees was committed before it: an id from pg_snapshot_xmax on is another cluster's.
    EXECUTE format('UPDATE tokenkeeper.%I SET transaction_id = pg_current_xact_id() WHERE ctid >= %L AND ctid < %L '
                   'AND transaction_id >= pg_snapshot_xmax(pg_current_snapshot())',
                   relation, format('(%s,0)', first_page)::tid, format('(%s,0)', end_page)::tid);
    GET DIAGNOSTICS events = ROW_COUNT;
    RETURN events;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reset_transaction_ids(oid, bigint, bigint) IS
    'Gives its own transaction id to the events on some pages of a partition of token_event_log whose id lies in the future, as after a restore '
    'into a younger cluster. Returns how many. Called by the sweep.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reset_transaction_ids(oid, bigint, bigint) FROM PUBLIC;

ALTER TABLE tokenkeeper.sweep_run
    ADD COLUMN reset_events bigint NOT NULL DEFAULT 0,
    ADD COLUMN reaped_topics bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN tokenkeeper.sweep_run.reset_events IS
    'Events whose transaction_id lay in the future, because the database was restored from a dump, and was reset.';
COMMENT ON COLUMN tokenkeeper.sweep_run.reaped_topics IS 'Topics that nothing referred to any more.';
COMMENT ON COLUMN tokenkeeper.token_event.transaction_id IS
    'Follow the history by this together with pg_snapshot_xmin(pg_current_snapshot()): event_id alone misses late commits. After a restore '
    'from a dump, the first sweep gives restored events its own transaction id: a reader gets them once more.';
