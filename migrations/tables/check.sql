-- The check of an attached table: where it and the ledger differ, and what repairs that.
--
-- check_rows and check_lost run with the rights of their caller, in a session of the table's owner: they execute the stored SQL of the facts. begin_check,
-- compare_facts, reported_tokens and end_check have the rights of the schema's owner; they check the caller, execute nothing of the table, and tell nothing of the
-- ledger but in what it differs from what they are given.
--
-- The caller reads in one snapshot (repeatable read), and repairs in other transactions. What is repaired counts as of the beginning of the check, before the
-- snapshot: what was written since is later, and wins.
--
-- An application's clock may be ahead, and the ledger has then cut the instant to that of the receipt: less than a day is no difference.

CREATE OR REPLACE FUNCTION tokenkeeper.begin_check(attachment text, OUT source_id bigint, OUT name text, OUT estimated bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
BEGIN
    this := tokenkeeper.own_attachment(begin_check.attachment);
    name := this.name;
    -- Of checks that were killed.
    DELETE FROM tokenkeeper.registration_source AS s
    WHERE s.attachment = this.source_id AND s.kind = 'repair' AND s.finished_at IS NULL AND s.started_at < clock_timestamp() - interval '1 day'
      AND NOT EXISTS (SELECT FROM tokenkeeper.token_event_log AS e WHERE e.source_id = s.source_id);
    INSERT INTO tokenkeeper.registration_source AS s (kind, name, attachment) VALUES ('repair', this.name, this.source_id) RETURNING s.source_id INTO source_id;
    estimated := tokenkeeper.estimated_rows(this.table_id);
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_check(text) IS
    'Internal, for the command that checks: begins to check an attachment. Returns the source_id of its repairs, and how many rows the table has by '
    'PostgreSQL''s statistics (null: unknown). check_rows, check_lost, queue_repairs and end_check follow. Needs a session of the table''s owner.';

CREATE OR REPLACE FUNCTION tokenkeeper.running_check(source_id bigint) RETURNS tokenkeeper.attached_table
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table;
BEGIN
    SELECT a.* INTO this FROM tokenkeeper.registration_source AS s JOIN tokenkeeper.attached_table AS a ON a.source_id = s.attachment
    WHERE s.source_id = running_check.source_id AND s.kind = 'repair' AND s.finished_at IS NULL;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no check that goes on', coalesce(running_check.source_id::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_readable(this);
    RETURN this;
END
$$;
COMMENT ON FUNCTION tokenkeeper.running_check(bigint) IS
    'Internal: the attachment of a check. Raises 22023 unless the check goes on and its table can be read (check_readable), 42501 as check_owner_session.';

CREATE OR REPLACE FUNCTION tokenkeeper.sources_of(this tokenkeeper.attached_table) RETURNS bigint[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN this.source_id || ARRAY(SELECT s.source_id FROM tokenkeeper.registration_source AS s WHERE s.attachment = this.source_id);
COMMENT ON FUNCTION tokenkeeper.sources_of(tokenkeeper.attached_table) IS 'Internal: the source_id of an attachment, its backfills and its repairs.';

CREATE OR REPLACE FUNCTION tokenkeeper.is_detached(source_id bigint) RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN (SELECT s.kind <> 'import' AND NOT EXISTS (SELECT FROM tokenkeeper.attached_table AS a WHERE a.source_id = coalesce(s.attachment, s.source_id))
        FROM tokenkeeper.registration_source AS s WHERE s.source_id = is_detached.source_id);
COMMENT ON FUNCTION tokenkeeper.is_detached(bigint) IS
    'Internal: whether a registration came from a table that is no longer attached, so that no check of it says anything. Null for no source.';

CREATE OR REPLACE FUNCTION tokenkeeper.difference(f tokenkeeper.fact, is_out boolean, l tokenkeeper.ledger, sources bigint[]) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    device CONSTANT text COLLATE "C" := tokenkeeper.device_name(tokenkeeper.sound_name(f.device_id));
    person CONSTANT text COLLATE "C" := tokenkeeper.sound_name(f.user_id);
    own_tags CONSTANT text[] COLLATE "C" := tokenkeeper.sound_tags(f.tags);
    event record;
BEGIN
    IF is_out THEN
        IF l.token_key IS NULL OR l.suppressed THEN
            RETURN NULL;
        END IF;
        -- A later registration wins over the row's flag if the application or another attached table made it. It does not if a row of this table made it that
        -- is gone.
        SELECT CASE WHEN tokenkeeper.is_detached(e.source_id) IS NOT TRUE THEN e.source_id = ANY (sources) END AS is_ours,
               e.registered_after = l.registered_at AS is_last
        INTO event FROM tokenkeeper.token_event_log AS e
        WHERE e.token_key = l.token_key AND e.topic_id = l.topic_id AND e.event IN ('registered', 'revived') ORDER BY e.event_id DESC LIMIT 1;
        RETURN CASE WHEN event.is_ours IS NOT FALSE
                     AND (f.registered_at IS NULL OR f.registered_at BETWEEN l.registered_at AND clock_timestamp()
                          OR (f.registered_at < l.registered_at AND event.is_ours AND event.is_last)) THEN 'not logged out' END;
    END IF;
    IF l.token_key IS NULL THEN
        RETURN 'unknown';
    END IF;
    IF l.logged_out_at >= l.registered_at AND (
        -- A table has said so, and not the application since, by calling unregister.
        SELECT e.source_id IS NOT NULL AND e.invalidated_after >= l.unregistered_by_app_at FROM tokenkeeper.token_event_log AS e
        WHERE e.token_key = l.token_key AND e.topic_id = l.topic_id AND e.event = 'unregistered_by_app' ORDER BY e.event_id DESC LIMIT 1) THEN
        RETURN 'logged out';
    END IF;
    RETURN CASE
        WHEN f.registered_at > clock_timestamp() THEN NULL
        WHEN f.registered_at > l.registered_at + interval '1 day'
            OR l.suppressed AND f.registered_at > greatest(l.registered_at, l.stale_at, l.suspect_at) THEN 'registered later'
        -- A later registration knows better than the row.
        WHEN l.registered_at > f.registered_at THEN NULL
        WHEN person <> coalesce(l.user_id, '') THEN 'another user'
        WHEN device <> coalesce(l.device_id, '') THEN 'another device'
        -- The tokens of a device share the latest tags, and the function tag changes them.
        WHEN NOT (own_tags <@ coalesce(l.tags, '{}') AND own_tags @> coalesce(l.tags, '{}'))
            AND NOT EXISTS (SELECT FROM tokenkeeper.token_event_log AS e WHERE e.token_key = l.token_key AND e.topic_id = l.topic_id AND e.event = 'tagged')
            AND (l.device_id IS NULL OR NOT EXISTS (
                SELECT FROM tokenkeeper.ledger AS o WHERE o.device_id = l.device_id AND o.topic_id + 0 = l.topic_id AND o.token_key <> l.token_key)) THEN 'other tags'
    END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.difference(tokenkeeper.fact, boolean, tokenkeeper.ledger, bigint[]) IS
    'How the ledger differs from the facts of a row (is_out: it is logged out); null if it does not. sources: those of the attachment.';

-- What is queued is no difference: a daemon will apply it. The queue is read only if there are differences: a snapshot that has read it keeps its partitions
-- from being truncated.
CREATE OR REPLACE FUNCTION tokenkeeper.is_queued(topics text[], environments text[], keys bytea[]) RETURNS boolean[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH queued AS MATERIALIZED (
        SELECT DISTINCT r.topic COLLATE "C" AS topic, coalesce(r.environment, 'production') COLLATE "C" AS environment,
               tokenkeeper.token_key(r.token) AS key
        FROM tokenkeeper.registration AS r WHERE r.topic = ANY (topics)
    )
    SELECT ARRAY(SELECT q.key IS NOT NULL FROM unnest(topics, environments, keys) WITH ORDINALITY AS k (topic, environment, key, n)
                 LEFT JOIN queued AS q ON q.topic = k.topic AND q.environment = k.environment AND q.key = k.key ORDER BY k.n)
$$;
COMMENT ON FUNCTION tokenkeeper.is_queued(text[], text[], bytea[]) IS 'Internal, for a check: whether the queue of registrations has a row about each of these tokens.';

CREATE OR REPLACE FUNCTION tokenkeeper.compare_facts(source_id bigint, facts tokenkeeper.fact[], outs boolean[])
RETURNS TABLE (n bigint, difference text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.running_check(compare_facts.source_id);
    sources bigint[] := tokenkeeper.sources_of(this);
    numbers bigint[];
    words text[];
    topics text[];
    environments text[];
    keys bytea[];
BEGIN
    SELECT array_agg(c.n ORDER BY c.n), array_agg(c.difference ORDER BY c.n), array_agg(c.topic ORDER BY c.n), array_agg(c.environment ORDER BY c.n),
           array_agg(c.token_key ORDER BY c.n)
    INTO numbers, words, topics, environments, keys
    FROM (SELECT f.n, t.topic_id, f.topic, f.environment, k.token_key, f.registered_at, tokenkeeper.difference(
              ROW(f.environment, f.topic, f.token, f.registered_at, f.device_id, f.user_id, f.tags)::tokenkeeper.fact, f.is_out, l.entry, sources) AS difference
          FROM ROWS FROM (unnest(compare_facts.facts), unnest(outs)) WITH ORDINALITY AS f (environment, topic, token, registered_at, device_id, user_id, tags, is_out, n)
          CROSS JOIN LATERAL (SELECT tokenkeeper.token_key(f.token) AS token_key OFFSET 0) AS k
          LEFT JOIN tokenkeeper.topic AS t ON t.topic = f.topic AND t.environment = f.environment
          LEFT JOIN LATERAL (SELECT e AS entry FROM tokenkeeper.ledger AS e WHERE e.topic_id = t.topic_id AND e.token_key = k.token_key OFFSET 0) AS l ON true
          -- What no registration can say is rejected, and no difference.
          WHERE k.token_key IS NOT NULL AND isfinite(f.registered_at) IS NOT FALSE AND tokenkeeper.topic_fault(f.topic) IS NULL
            AND tokenkeeper.environment_fault(f.environment) IS NULL) AS c
    WHERE c.difference IS NOT NULL
      -- Pruned since: the row is one that the owner has not deleted yet.
      AND NOT (c.difference = 'unknown' AND EXISTS (
          SELECT FROM tokenkeeper.token_event_log AS e
          WHERE e.token_key = c.token_key AND e.topic_id = c.topic_id AND e.event = 'pruned' AND e.cause <> 'withdrawn' AND e.at >= c.registered_at))
      AND NOT EXISTS (SELECT FROM tokenkeeper.held_registration AS h WHERE h.topic_id = c.topic_id AND h.token_key = c.token_key);
    IF numbers IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY SELECT d.number, d.word FROM unnest(numbers, words, tokenkeeper.is_queued(topics, environments, keys)) AS d (number, word, is_queued)
        WHERE NOT d.is_queued ORDER BY d.number;
END
$$;
COMMENT ON FUNCTION tokenkeeper.compare_facts(bigint, tokenkeeper.fact[], boolean[]) IS
    'Internal, for a check: which of these facts the ledger lacks, and why; what is queued, held or pruned is no difference. outs: whether the row is logged '
    'out. Raises 22023 and 42501, as running_check does.';

CREATE OR REPLACE FUNCTION tokenkeeper.reported_tokens(source_id bigint) RETURNS TABLE (environment text, topic text, token text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.running_check(reported_tokens.source_id);
    sources bigint[] := tokenkeeper.sources_of(this);
BEGIN
    RETURN QUERY
    SELECT t.environment::text, t.topic::text, encode(l.token_key, 'hex')
    FROM (SELECT DISTINCT e.topic_id, e.token_key FROM tokenkeeper.token_event_log AS e WHERE e.source_id = ANY (sources)) AS m
    JOIN tokenkeeper.ledger AS l USING (topic_id, token_key)
    JOIN tokenkeeper.topic AS t USING (topic_id)
    WHERE NOT l.suppressed
      -- Not what somebody else has registered since, as far as there is an event of it.
      AND (SELECT e.source_id = ANY (sources) FROM tokenkeeper.token_event_log AS e
           WHERE e.token_key = l.token_key AND e.topic_id = l.topic_id AND e.event IN ('registered', 'revived') ORDER BY e.event_id DESC LIMIT 1);
END
$$;
COMMENT ON FUNCTION tokenkeeper.reported_tokens(bigint) IS
    'Internal, for a check: the active tokens that the attachment was the last to register, by the history. Raises 22023 and 42501, as running_check does.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_rows(
    source_id bigint, after text, max_rows integer DEFAULT 10000, OUT rows bigint, OUT reached text, OUT finished boolean, OUT failed bigint,
    OUT differences jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres'
SET bytea_output = 'hex'
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.running_check(check_rows.source_id);
    page text := tokenkeeper.page_query(this, check_rows.after);
BEGIN
    PERFORM tokenkeeper.hold_name(this);
    BEGIN
        EXECUTE format($sql$
            WITH page (row_key, registers, is_out, spelled, %1$s) AS MATERIALIZED (%2$s LIMIT $1), said AS MATERIALIZED (
                SELECT row_number() OVER () AS n, ROW(%1$s)::tokenkeeper.fact AS fact, p.* FROM page AS p WHERE p.registers OR p.is_out
            ), differing AS MATERIALIZED (
                SELECT c.difference, s.*
                FROM tokenkeeper.compare_facts($2, (SELECT array_agg(s.fact ORDER BY s.n) FROM said AS s), (SELECT array_agg(s.is_out ORDER BY s.n) FROM said AS s)) AS c
                JOIN said AS s USING (n)
            ), other AS MATERIALIZED (
                -- Of several rows that have a token, one has to agree.
                SELECT row_number() OVER () AS n, d.n AS of_row, ROW(o.*)::tokenkeeper.fact AS fact
                FROM differing AS d CROSS JOIN LATERAL (
                    SELECT o.* FROM (%3$s) AS o (%1$s)
                    -- OFFSET: what follows is not asked of rows that the filter leaves out.
                    WHERE o.token = d.token AND o.topic = d.topic AND o.environment = d.environment OFFSET 0) AS o
                -- An older one has nothing to say about who has the token.
                WHERE d.is_out OR (o.registered_at < d.registered_at) IS NOT TRUE
            ), agreeing AS (
                SELECT o.of_row FROM other AS o WHERE o.n NOT IN (
                    SELECT c.n FROM tokenkeeper.compare_facts($2, (SELECT array_agg(o.fact ORDER BY o.n) FROM other AS o),
                                                              (SELECT array_agg(false ORDER BY o.n) FROM other AS o)) AS c)
            )
            SELECT (SELECT count(*) FROM page), (SELECT (array_agg(p.row_key))[count(*)] FROM page AS p), coalesce(jsonb_agg(jsonb_build_object(
                       'row', d.row_key, 'difference', d.difference, 'out', d.is_out, 'environment', d.environment, 'topic', d.topic, 'token', d.token,
                       'registered_at', d.registered_at, 'device_id', d.device_id, 'user_id', d.user_id, 'tags', d.tags) ORDER BY d.n), '[]')
            FROM differing AS d
            WHERE NOT EXISTS (SELECT FROM agreeing AS a WHERE a.of_row = d.n)
              -- If all differ, one is repaired.
              AND NOT EXISTS (SELECT FROM other AS o WHERE o.of_row = d.n AND (d.is_out OR ((o.fact).registered_at, o.fact) > (d.registered_at, d.fact))) $sql$,
            tokenkeeper.fact_columns(), page, tokenkeeper.other_row(this.table_id::text, this.facts, 'd.spelled', 'd.token'))
        INTO rows, reached, differences USING check_rows.max_rows, check_rows.source_id;
        failed := 0;
    EXCEPTION WHEN OTHERS OR assert_failure THEN
        IF NOT tokenkeeper.may_be_of_a_row(SQLSTATE) THEN
            RAISE;
        END IF;
        -- As in backfill_next.
        IF check_rows.max_rows > 1 THEN
            SELECT n.* INTO rows, reached, finished, failed, differences FROM tokenkeeper.check_rows(check_rows.source_id, check_rows.after, check_rows.max_rows / 2) AS n;
            RETURN;
        ELSIF tokenkeeper.fails_without_rows(page) THEN
            RAISE;
        END IF;
        SELECT 1, tokenkeeper.next_key(this, check_rows.after), 1, '[]' INTO rows, reached, failed, differences;
    END;
    finished := rows < check_rows.max_rows;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_rows(bigint, text, integer) IS
    'Internal: compares the rows of an attached table after a key (null: from the first) with the ledger, in one snapshot. Returns how many rows it read, '
    'the last key (reached), whether that was all, for how many an expression failed, and the differences as JSON: row, difference, and the facts of the '
    'row.';

CREATE OR REPLACE FUNCTION tokenkeeper.lost_query(this tokenkeeper.attached_table, seen text) RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
RETURN format($sql$
    WITH lost AS MATERIALIZED (SELECT * FROM tokenkeeper.reported_tokens($1)), seen AS MATERIALIZED (
        SELECT f.environment, f.topic, f.token, bool_or(f.counts) AS counts FROM (%2$s) AS f (counts, %1$s) GROUP BY 1, 2, 3
    ), differing AS MATERIALIZED (
        SELECT row_number() OVER (ORDER BY p.topic, p.token) AS n, p.*
        FROM lost AS p LEFT JOIN seen AS s ON s.token = p.token AND s.topic = p.topic AND s.environment = p.environment
        WHERE CASE WHEN $2 THEN s.counts IS NOT TRUE ELSE s.counts IS FALSE END LIMIT 100000
    )
    SELECT coalesce(jsonb_agg(jsonb_build_object('difference', 'no row', 'out', true, 'environment', d.environment, 'topic', d.topic, 'token', d.token) ORDER BY d.n), '[]')
    FROM tokenkeeper.compare_facts($1, (SELECT array_agg(ROW(d.environment, d.topic, d.token, NULL, NULL, NULL, NULL)::tokenkeeper.fact ORDER BY d.n) FROM differing AS d),
                                   (SELECT array_agg(true) FROM differing)) AS c
    JOIN differing AS d USING (n) $sql$, tokenkeeper.fact_columns(), seen);
COMMENT ON FUNCTION tokenkeeper.lost_query(tokenkeeper.attached_table, text) IS
    'Internal: the query of check_lost. seen is SQL: for each row with a token, whether it counts, and its facts; it may use lost, the tokens in question.';

CREATE OR REPLACE FUNCTION tokenkeeper.check_lost(source_id bigint) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET jit = off
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres'
SET bytea_output = 'hex'
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.running_check(check_lost.source_id);
    differences jsonb;
BEGIN
    PERFORM tokenkeeper.hold_name(this);
    EXECUTE tokenkeeper.lost_query(this, format('SELECT (%s) IS TRUE OR (%s) IS TRUE, %s FROM %s AS r WHERE %s <> ''''', tokenkeeper.fact_test(this.facts),
        tokenkeeper.logged_out_test(this.facts), tokenkeeper.fact_list(this.facts), this.table_id, this.facts ->> 'token'))
    INTO differences USING check_lost.source_id, this.on_delete = 'unregister';
    RETURN differences;
EXCEPTION WHEN OTHERS OR assert_failure THEN
    IF NOT tokenkeeper.may_be_of_a_row(SQLSTATE) THEN
        RAISE;
    END IF;
    -- A row that cannot be read may say anything about its token. check_rows has counted it.
    BEGIN
        EXECUTE tokenkeeper.lost_query(this, format(
            'SELECT true, p.environment, p.topic, tokenkeeper.parse_token(%s), NULL, NULL, NULL, NULL FROM %s AS r '
            'CROSS JOIN (SELECT DISTINCT l.environment, l.topic FROM lost AS l) AS p WHERE %1$s <> ''''', this.facts ->> 'token', this.table_id))
        INTO differences USING check_lost.source_id, this.on_delete = 'unregister';
        RETURN differences;
    EXCEPTION WHEN OTHERS OR assert_failure THEN
        RETURN '[]';
    END;
END
$$;
COMMENT ON FUNCTION tokenkeeper.check_lost(bigint) IS
    'Internal: the active tokens that an attachment reported and that no row of its table has now, as JSON; with on_delete => ''ignore'', only those whose '
    'row the filter now excludes. If an expression fails for a row, any row with the token counts; if that of the token fails, nothing is returned. Reads '
    'the whole table.';

-- With the rights of their caller, who may insert into the queue.
CREATE OR REPLACE FUNCTION tokenkeeper.queue_repairs(source_id bigint, differences jsonb) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    began CONSTANT timestamptz := (SELECT s.started_at FROM tokenkeeper.registration_source AS s WHERE s.source_id = queue_repairs.source_id);
    repairs bigint;
BEGIN
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, returned, source_id, row_key)
    SELECT d.environment, d.topic, d.token, CASE WHEN d.out THEN began WHEN d.registered_at > began THEN 'epoch' ELSE d.registered_at END, d.device_id, d.user_id,
           d.tags, d.out, d.difference = 'logged out', queue_repairs.source_id, d.row
    FROM jsonb_to_recordset(differences) AS d (environment text, topic text, token text, registered_at timestamptz, device_id text, user_id text, tags text[],
                                               out boolean, "row" text, difference text);
    GET DIAGNOSTICS repairs = ROW_COUNT;
    RETURN repairs;
END
$$;
COMMENT ON FUNCTION tokenkeeper.queue_repairs(bigint, jsonb) IS
    'Internal: queues the repairs of differences from check_rows or check_lost, as of the beginning of the check: registrations, and logouts, which pass '
    'the mass-failure guard. Returns how many.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_check(source_id bigint, differences bigint, repaired bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    this tokenkeeper.attached_table := tokenkeeper.running_check(end_check.source_id);
BEGIN
    UPDATE tokenkeeper.attached_table AS a SET checked_at = clock_timestamp(), differences = end_check.differences - end_check.repaired
    WHERE a.source_id = this.source_id;
    IF end_check.repaired > 0 THEN
        UPDATE tokenkeeper.registration_source AS s SET finished_at = clock_timestamp(), queued = end_check.repaired WHERE s.source_id = end_check.source_id;
    ELSE
        DELETE FROM tokenkeeper.registration_source AS s WHERE s.source_id = end_check.source_id;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_check(bigint, bigint, bigint) IS
    'Internal: records that a check has ended, the differences that are left, and the repairs that it queued.';
