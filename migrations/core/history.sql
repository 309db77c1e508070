-- The months of the history, token_event_log: made ahead by the sweep, and dropped whole when they are older than the retention.
--
-- Locks: prepare_event_months takes SHARE UPDATE EXCLUSIVE on token_event_log and ACCESS EXCLUSIVE on token_event_log_other. forget_event_month takes ACCESS
-- EXCLUSIVE on token_event_log and the dropped month. Both wait for the sweep's lock_timeout at most, and the next sweep tries again.

CREATE OR REPLACE FUNCTION tokenkeeper.prepare_event_months() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    first_day timestamptz;
    next_month timestamptz;
    partition text;
BEGIN
    FOR ahead IN 0..3 LOOP
        first_day := date_trunc('month', clock_timestamp()) + make_interval(months => ahead);
        next_month := first_day + interval '1 month';
        partition := 'token_event_log_' || to_char(first_day, 'YYYY_MM');
        -- If token_event_log_other already has events of a month, that month stays there.
        CONTINUE WHEN to_regclass('tokenkeeper.' || partition) IS NOT NULL OR EXISTS (
            SELECT FROM tokenkeeper.token_event_log_other AS e WHERE e.at >= first_day AND e.at < next_month);
        EXECUTE format('CREATE TABLE tokenkeeper.%I (LIKE tokenkeeper.token_event_log INCLUDING ALL)', partition);
        EXECUTE format('ALTER TABLE tokenkeeper.%I REPLICA IDENTITY FULL', partition);
        EXECUTE format('COMMENT ON TABLE tokenkeeper.%I IS %L', partition, 'Events of ' || to_char(first_day, 'YYYY-MM') || ' (UTC).');
        -- ATTACH, unlike CREATE ... PARTITION OF, does not lock out sessions that write events.
        EXECUTE format('ALTER TABLE tokenkeeper.token_event_log ATTACH PARTITION tokenkeeper.%I FOR VALUES FROM (%L) TO (%L)',
            partition, first_day, next_month);
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.prepare_event_months() IS
    'Creates the partitions of token_event_log for this month and the next three. Each sweep calls it, except a dry run.';

-- A new schema needs its months at once: events that went to token_event_log_other would keep their month there.
DO $$ BEGIN PERFORM tokenkeeper.prepare_event_months(); END $$;

CREATE OR REPLACE FUNCTION tokenkeeper.forget_event_month(before timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    partition text;
    events bigint;
    refusal text;
BEGIN
    -- The minimum of sweep.event_retention: a mistake, or a stolen login of the daemon, must not delete the history of this month.
    IF forget_event_month.before IS NULL OR forget_event_month.before > clock_timestamp() - interval '31 days' THEN
        RAISE EXCEPTION 'before is %, expected an instant at least 31 days ago', coalesce(forget_event_month.before::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM tokenkeeper.token_event_log_other AS e WHERE e.ctid IN (
        SELECT o.ctid FROM tokenkeeper.token_event_log_other AS o WHERE o.at < forget_event_month.before LIMIT 10000);
    GET DIAGNOSTICS events = ROW_COUNT;
    IF events > 0 THEN
        RETURN events;
    END IF;
    FOR partition, events IN
        SELECT c.relname, c.reltuples
        FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'tokenkeeper.token_event_log'::regclass AND c.relname ~ '^token_event_log_[0-9]{4}_[0-9]{2}$'
          AND to_timestamp(right(c.relname, 7), 'YYYY_MM') + interval '1 month' <= forget_event_month.before
        ORDER BY c.relname
    LOOP
        -- The lock that DROP takes makes registrations wait, so nothing may take long from there on. That is why a large month
        -- is estimated, not counted.
        IF events < 100000 THEN
            EXECUTE format('SELECT count(*) FROM tokenkeeper.%I', partition) INTO events;
        END IF;
        IF refusal IS NULL THEN
            BEGIN
                EXECUTE format('DROP TABLE tokenkeeper.%I', partition);
                RETURN events;
            EXCEPTION
                WHEN lock_not_available OR deadlock_detected THEN
                    RAISE;
                WHEN OTHERS THEN
                    refusal := sqlerrm;
            END;
        END IF;
        IF events > 0 THEN
            -- An event trigger of the database refuses the DROP. There is none for TRUNCATE.
            EXECUTE format('TRUNCATE tokenkeeper.%I', partition);
            RETURN events;
        END IF;
    END LOOP;
    IF refusal IS NOT NULL THEN
        RAISE EXCEPTION 'old months are empty, but this database refuses to drop their tables: %', refusal;
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_event_month(timestamptz) IS
    'Deletes up to 10,000 events of token_event_log_other from before an instant; if there are none, drops the oldest month that ends before it, or '
    'truncates it if an event trigger refuses the drop. Returns how many events (about); null if nothing is left. Raises 22023 for an instant less than 31 '
    'days ago, and P0001 if only empty tables are left that cannot be dropped.';

CREATE OR REPLACE FUNCTION tokenkeeper.reset_transaction_ids(of_partition oid, first_page bigint, end_page bigint) RETURNS bigint
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
        -- A partition that has been dropped meanwhile has nothing to reset.
        RETURN 0;
    END IF;
    -- A row that this statement sees was committed before it, so an id from pg_snapshot_xmax on is of another cluster.
    EXECUTE format('UPDATE tokenkeeper.%I SET transaction_id = pg_current_xact_id() WHERE ctid >= %L AND ctid < %L '
                   'AND transaction_id >= pg_snapshot_xmax(pg_current_snapshot())',
                   relation, format('(%s,0)', first_page)::tid, format('(%s,0)', end_page)::tid);
    GET DIAGNOSTICS events = ROW_COUNT;
    RETURN events;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reset_transaction_ids(oid, bigint, bigint) IS
    'Gives this transaction''s id to events on these pages of a partition of token_event_log whose id is in the future, as after a restore into a younger '
    'cluster. Returns how many.';
