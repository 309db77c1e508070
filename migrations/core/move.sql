-- Moving a topic to another database.
--
-- `tokenkeeperd move` copies all facts while both databases run. Then the map leads to the target, and the source marks the topic as moved: calls raise an
-- error, and what reaches its queues goes to moved_row, which is passed on. After that it sends all facts once more, with the history. Each fact is merged as
-- the greatest, so what comes twice, late or from both sides changes nothing.
--
-- Locks: at the target, those of merge_batch; at the source, the rows that end_move deletes, and nothing else.

CREATE OR REPLACE FUNCTION tokenkeeper.move_fault(topic text) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(
        tokenkeeper.topic_fault(move_fault.topic),
        (SELECT 'the table ' || a.table_name || ' is attached and may have tokens of this topic, expected none: detach it first'
         FROM tokenkeeper.attached_table AS a
         WHERE (a.arguments ->> 'topic') COLLATE "C" !~ '^''[^'']*''$' OR (a.arguments ->> 'topic') COLLATE "C" = quote_literal(move_fault.topic)
         ORDER BY a.table_name LIMIT 1),
        (SELECT format('the complete list %s has tokens of this topic, expected none: run SELECT tokenkeeper.drop_list(%L) first', l.name, l.name)
         FROM tokenkeeper.list AS l
         WHERE EXISTS (SELECT FROM tokenkeeper.list_member AS m WHERE m.list_id = l.list_id AND m.topic = move_fault.topic COLLATE "C")
         ORDER BY l.name LIMIT 1))
$$;
COMMENT ON FUNCTION tokenkeeper.move_fault(text) IS 'Internal, for tokenkeeperd move: why a topic cannot move to another database; null if it can.';

CREATE OR REPLACE FUNCTION tokenkeeper.begin_move(topic text, target text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    fault text := coalesce(tokenkeeper.move_fault(begin_move.topic), CASE WHEN coalesce(begin_move.target, '') = '' THEN 'target is missing' END);
BEGIN
    IF fault IS NOT NULL THEN
        RAISE EXCEPTION '%', fault USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The environment that is not there yet must not come here either.
    PERFORM tokenkeeper.ensure_topic(e, begin_move.topic) FROM unnest(ARRAY['production', 'sandbox']) AS e
    WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.topic = begin_move.topic COLLATE "C" AND t.environment = e COLLATE "C");
    UPDATE tokenkeeper.topic AS t SET moved_to = begin_move.target
    WHERE t.topic = begin_move.topic COLLATE "C" AND t.moved_to IS DISTINCT FROM begin_move.target COLLATE "C";
END
$$;
COMMENT ON FUNCTION tokenkeeper.begin_move(text, text) IS
    'Internal, for tokenkeeperd move: marks a topic as moved, so that calls about it raise an error that names the target, and its rows are passed on. '
    'Transactions that began before may not notice. Raises 22023 for an invalid topic, or if an attached table may have tokens of it, or a complete list has.';

CREATE OR REPLACE FUNCTION tokenkeeper.facts_of(topic text, environment text, after bytea, most integer, with_history boolean)
RETURNS TABLE (last_key bytea, tokens integer, facts text, history text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
SET timezone = 'UTC'
AS $$
#variable_conflict use_column
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = facts_of.topic COLLATE "C" AND t.environment = facts_of.environment COLLATE "C");
    keys bytea[];
BEGIN
    SELECT array_agg(l.token_key ORDER BY l.token_key),
           jsonb_agg(to_jsonb(l) || jsonb_build_object('since', (
               SELECT s.since FROM tokenkeeper.suppression AS s WHERE s.topic_id = l.topic_id AND s.token_key = l.token_key)))::text
    INTO keys, facts
    FROM (SELECT k.* FROM tokenkeeper.ledger AS k WHERE k.topic_id = of_topic AND k.token_key > facts_of.after
          ORDER BY k.token_key LIMIT greatest(facts_of.most, 0)) AS l;
    tokens := coalesce(cardinality(keys), 0);
    last_key := keys[tokens];
    history := CASE WHEN with_history THEN (
        SELECT jsonb_agg(to_jsonb(e) - '{topic_id,event_id,transaction_id,source_id}'::text[] ORDER BY e.event_id)::text
        FROM unnest(keys) AS k (token_key) JOIN tokenkeeper.token_event_log AS e ON e.token_key = k.token_key AND e.topic_id = of_topic) END;
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION tokenkeeper.facts_of(text, text, bytea, integer, boolean) IS
    'Internal, for tokenkeeperd move: the next tokens of a topic after a key, in order, as JSON for take_facts, on request with their history. One row; no '
    'tokens at the end.';

CREATE OR REPLACE FUNCTION tokenkeeper.add_arrived(facts jsonb, of_topic integer, one_token boolean, OUT checks tokenkeeper.device_check[], OUT known jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    WITH given AS MATERIALIZED (
        SELECT f.value, l.*
        FROM jsonb_array_elements(facts) AS f CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.ledger, f.value) AS l
    ), added AS (
        INSERT INTO tokenkeeper.ledger AS l (topic_id, token_key, registered_at, stale_at, stale_reason, suspect_at, suspect_reason,
            unregistered_by_app_at, returned_at, superseded_at, unresolved, of_constant, device_id, device_at, user_id, user_at, tags, tags_at)
        SELECT of_topic, g.token_key, g.registered_at, g.stale_at, g.stale_reason, g.suspect_at, g.suspect_reason, g.unregistered_by_app_at,
               g.returned_at, g.superseded_at, g.unresolved, g.of_constant, g.device_id, g.device_at, g.user_id, g.user_at, g.tags, g.tags_at
        FROM given AS g ORDER BY g.token_key
        ON CONFLICT DO NOTHING
        RETURNING l AS is_now, l.token_key, l.device_id, l.superseded_at
    ), counted AS (
        INSERT INTO tokenkeeper.token_count (tokens, topic_id, registered, state)
        SELECT sum(n.tokens), n.topic_id, n.registered, n.state FROM added AS a CROSS JOIN LATERAL tokenkeeper.count_change(NULL, a.is_now) AS n
        GROUP BY 2, 3, 4
    ), suppressed AS (
        INSERT INTO tokenkeeper.suppression (since, topic_id, token_key)
        SELECT clock_timestamp(), of_topic, a.token_key FROM added AS a WHERE (a.is_now).suppressed
        ON CONFLICT (topic_id, token_key) DO UPDATE SET since = excluded.since
    )
    SELECT array_agg(ROW(of_topic, a.device_id, a.token_key, true)::tokenkeeper.device_check)
               FILTER (WHERE one_token AND a.device_id IS NOT NULL AND a.superseded_at IS NULL AND EXISTS (
                   -- Those that were here before: the others come as the source has compared them.
                   SELECT FROM tokenkeeper.ledger AS o WHERE o.device_id = a.device_id AND o.topic_id + 0 = of_topic)),
           jsonb_agg(g.value) FILTER (WHERE a.token_key IS NULL)
    INTO checks, known
    FROM given AS g LEFT JOIN added AS a USING (token_key);
END
$$;
COMMENT ON FUNCTION tokenkeeper.add_arrived(jsonb, integer, boolean) IS
    'Internal: adds the tokens that are new here. Returns the devices to compare, and the facts of tokens that were known.';

CREATE OR REPLACE FUNCTION tokenkeeper.arrived_reports(facts jsonb, of_topic integer, one_token boolean, receipt timestamptz)
RETURNS SETOF tokenkeeper.token_report
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r.report FROM jsonb_array_elements(facts) WITH ORDINALITY AS f (value, n)
    CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.ledger, f.value) AS l
    JOIN tokenkeeper.ledger AS k ON k.topic_id = of_topic AND k.token_key = l.token_key
    CROSS JOIN LATERAL (VALUES
        ((l.registered_at, l.returned_at, l.device_id, l.device_at, l.user_id, l.user_at, l.tags, l.tags_at)
             IS DISTINCT FROM (k.registered_at, k.returned_at, k.device_id, k.device_at, k.user_id, k.user_at, k.tags, k.tags_at),
         -- A fact that was cleared is empty, with its instant.
         ROW(f.n, of_topic, l.token_key, one_token, nullif(l.registered_at, '-infinity'), l.returned_at,
             CASE WHEN l.device_at IS NOT NULL THEN coalesce(l.device_id, '') END, l.device_at, CASE WHEN l.user_at IS NOT NULL THEN coalesce(l.user_id, '') END,
             l.user_at, l.tags, l.tags_at, NULL, NULL, NULL, receipt, NULL, NULL)::tokenkeeper.token_report),
        (l.stale_at IS NOT NULL AND (l.stale_at, l.stale_reason) IS DISTINCT FROM (k.stale_at, k.stale_reason),
         tokenkeeper.invalidation_of(f.n::integer, of_topic, l.token_key, 'stale', l.stale_at, l.stale_reason, receipt)),
        (l.suspect_at IS NOT NULL AND (l.suspect_at, l.suspect_reason) IS DISTINCT FROM (k.suspect_at, k.suspect_reason),
         tokenkeeper.invalidation_of(f.n::integer, of_topic, l.token_key, 'suspect', l.suspect_at, l.suspect_reason, receipt)),
        (l.unregistered_by_app_at IS DISTINCT FROM k.unregistered_by_app_at AND l.unregistered_by_app_at IS NOT NULL,
         tokenkeeper.invalidation_of(f.n::integer, of_topic, l.token_key, 'unregistered_by_app', l.unregistered_by_app_at, NULL, receipt))
        ) AS r (is_given, report)
    WHERE r.is_given
$$;
COMMENT ON FUNCTION tokenkeeper.arrived_reports(jsonb, integer, boolean, timestamptz) IS
    'Internal: what rows of another ledger say that this one does not, as reports.';

CREATE OR REPLACE FUNCTION tokenkeeper.without_forgotten(facts jsonb) RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN NOT EXISTS (SELECT FROM tokenkeeper.erasure) THEN facts ELSE coalesce((
        SELECT jsonb_agg(f) FROM jsonb_array_elements(facts) AS f
        WHERE NOT EXISTS (
            SELECT FROM tokenkeeper.erasure AS e
            WHERE e.names && ARRAY[substr(f ->> 'token_key', 3), 'd:' || (f ->> 'device_id'), 'u:' || (f ->> 'user_id')] COLLATE "C"
              AND (f ->> 'registered_at')::timestamptz <= e.forgotten_at)), '[]') END
$$;
COMMENT ON FUNCTION tokenkeeper.without_forgotten(jsonb) IS
    'Internal: facts of another ledger without those of tokens, devices and users that were forgotten here since they were read.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_facts(
    source text, topic text, environment text, is_final boolean, after bytea, last_key bytea, facts text, history text) RETURNS bytea
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    of_topic integer := tokenkeeper.ensure_topic(take_facts.environment, take_facts.topic);
    one_token boolean := tokenkeeper.has_one_token_per_device(take_facts.topic);
    receipt timestamptz := clock_timestamp();
    of_stream text := CASE WHEN is_final THEN 'final ' ELSE 'copy ' END || take_facts.environment;
    given jsonb := take_facts.facts::jsonb;
    keys bytea[];
    added record;
    merged record;
    checks tokenkeeper.device_check[];
    reports tokenkeeper.token_report[];
BEGIN
    INSERT INTO tokenkeeper.arrival (source, topic, stream) VALUES (take_facts.source, take_facts.topic, of_stream) ON CONFLICT DO NOTHING;
    UPDATE tokenkeeper.arrival AS a
    SET position = coalesce(take_facts.last_key, a.position), is_complete = take_facts.last_key IS NULL, changed_at = receipt,
        taken = a.taken + coalesce(jsonb_array_length(given), 0)
    WHERE a.source = take_facts.source COLLATE "C" AND a.topic = take_facts.topic COLLATE "C" AND a.stream = of_stream COLLATE "C" AND a.position = take_facts.after;
    IF NOT FOUND OR take_facts.last_key IS NULL THEN
        -- It was taken before, or there is nothing more.
        RETURN (SELECT a.position FROM tokenkeeper.arrival AS a WHERE a.source = take_facts.source COLLATE "C" AND a.topic = take_facts.topic COLLATE "C" AND a.stream = of_stream COLLATE "C");
    END IF;
    given := tokenkeeper.without_forgotten(given);
    keys := ARRAY(SELECT decode(substr(f ->> 'token_key', 3), 'hex') FROM jsonb_array_elements(given) AS f);
    SELECT * INTO added FROM tokenkeeper.add_arrived(given, of_topic, one_token);
    -- What the source has found out about a device since the token came first.
    checks := added.checks || ARRAY(
        SELECT ROW(of_topic, k.device_id, k.token_key, false)::tokenkeeper.device_check
        FROM jsonb_array_elements(added.known) AS f CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.ledger, f) AS l
        JOIN tokenkeeper.ledger AS k ON k.topic_id = of_topic AND k.token_key = l.token_key
        WHERE one_token AND k.device_id = l.device_id AND k.registered_at = l.registered_at AND l.superseded_at IS NOT NULL AND k.superseded_at IS NULL);
    IF added.known IS NOT NULL THEN
        reports := ARRAY(SELECT r FROM tokenkeeper.arrived_reports(added.known, of_topic, one_token, receipt) AS r);
        FOR merged IN
            SELECT m.busy, m.checks FROM unnest(ARRAY[NULL, 'stale', 'suspect', 'unregistered_by_app']) AS c (cause)
            CROSS JOIN LATERAL tokenkeeper.merge_reports(
                ARRAY(SELECT r FROM unnest(reports) AS r WHERE r.cause IS NOT DISTINCT FROM c.cause), receipt, true, tokenkeeper.patience_ends()) AS m
        LOOP
            IF merged.busy <> '{}' THEN
                RAISE EXCEPTION 'another session holds % of these tokens', cardinality(merged.busy) USING ERRCODE = 'lock_not_available';
            END IF;
            checks := checks || merged.checks;
        END LOOP;
    END IF;
    PERFORM tokenkeeper.resolve_devices(checks, receipt);
    -- The retention of what is suppressed began at the source.
    UPDATE tokenkeeper.suppression AS s SET since = f.since
    FROM jsonb_to_recordset(given) AS f (token_key bytea, since timestamptz)
    WHERE s.topic_id = of_topic AND s.token_key = f.token_key AND s.since > f.since;
    IF is_final THEN
        -- The history that comes has the same events, with their own instants.
        DELETE FROM tokenkeeper.token_event_log AS e
        WHERE e.token_key = ANY (keys) AND e.topic_id = of_topic AND e.transaction_id = pg_current_xact_id();
    END IF;
    INSERT INTO tokenkeeper.token_event_log (at, topic_id, token_key, event, cause, reason, device_id, user_id,
        registered_before, registered_after, invalidated_before, invalidated_after)
    SELECT e.at, of_topic, e.token_key, e.event, e.cause, e.reason, e.device_id, e.user_id,
           e.registered_before, e.registered_after, e.invalidated_before, e.invalidated_after
    FROM jsonb_populate_recordset(NULL::tokenkeeper.token_event_log, take_facts.history::jsonb) AS e
    -- Not of a token that was forgotten on the way.
    WHERE e.token_key = ANY (keys);
    RETURN take_facts.last_key;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_facts(text, text, text, boolean, bytea, bytea, text, text) IS
    'Internal, for tokenkeeperd move: merges what facts_of of another database read after a key, and returns the key up to which all has arrived. A repeated '
    'batch changes nothing; a null last_key ends it. Raises 55P03 if another session holds a token: repeat the call.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_policy(topic text, environment text, policy jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.ensure_topic(take_policy.environment, take_policy.topic);
BEGIN
    UPDATE tokenkeeper.topic AS t
    SET first_seen = least(t.first_seen, p.first_seen), gate = coalesce(t.gate, p.gate),
        suppressed_retention = coalesce(t.suppressed_retention, p.suppressed_retention), dormant_after = coalesce(t.dormant_after, p.dormant_after),
        guard_allowance = coalesce(t.guard_allowance, p.guard_allowance), guard_max_share = coalesce(t.guard_max_share, p.guard_max_share),
        prune_allowance = coalesce(t.prune_allowance, p.prune_allowance), prune_max_share = coalesce(t.prune_max_share, p.prune_max_share),
        background_per_hour = coalesce(t.background_per_hour, p.background_per_hour), max_per_second = coalesce(t.max_per_second, p.max_per_second),
        alerts_per_day = coalesce(t.alerts_per_day, p.alerts_per_day), confirm_share = coalesce(t.confirm_share, p.confirm_share)
    FROM jsonb_populate_record(NULL::tokenkeeper.topic, take_policy.policy) AS p WHERE t.topic_id = of_topic;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_policy(text, text, jsonb) IS
    'Internal, for tokenkeeperd move: takes the policy of a topic from another database, where it has none here. Raises 22023 for an unknown environment or '
    'invalid topic.';

CREATE OR REPLACE FUNCTION tokenkeeper.set_moved_aside(rows tokenkeeper.registration[]) RETURNS tokenkeeper.registration[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.moved_to IS NOT NULL) THEN
        RETURN rows;
    END IF;
    INSERT INTO tokenkeeper.moved_row (topic, queue, content)
    -- Its source is a number of this database.
    SELECT r.topic, 'registration', to_jsonb(r) - '{source_id,partition_number}'::text[]
    FROM unnest(rows) AS r JOIN tokenkeeper.topic AS t ON t.topic = r.topic AND t.environment = 'production'
    WHERE t.moved_to IS NOT NULL AND r.attempts IS DISTINCT FROM -1;
    RETURN ARRAY(
        SELECT r FROM unnest(rows) AS r
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic AS t WHERE t.topic = r.topic AND t.environment = 'production' AND t.moved_to IS NOT NULL));
END
$$;
COMMENT ON FUNCTION tokenkeeper.set_moved_aside(tokenkeeper.registration[]) IS
    'Internal: puts those of these rows into moved_row whose topic has moved, and returns the others.';

CREATE OR REPLACE FUNCTION tokenkeeper.moved_rows(topic text, most integer) RETURNS TABLE (row_ids bigint[], rows text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- One session at a time.
    PERFORM FROM tokenkeeper.topic AS t WHERE t.topic = moved_rows.topic COLLATE "C" AND t.environment = 'production' FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        RETURN QUERY
            SELECT array_agg(r.row_id ORDER BY r.row_id), jsonb_agg(to_jsonb(r) ORDER BY r.row_id)::text
            FROM (SELECT m.* FROM tokenkeeper.moved_row AS m WHERE m.topic = moved_rows.topic COLLATE "C" ORDER BY m.row_id LIMIT greatest(moved_rows.most, 0)) AS r
            HAVING count(*) > 0;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.moved_rows(text, integer) IS
    'Internal, for moves: the oldest rows of moved_row of a topic, as JSON for take_rows. None if there are none, or another session passes them on; other '
    'sessions get none until the transaction ends.';

CREATE OR REPLACE FUNCTION tokenkeeper.drop_moved_rows(row_ids bigint[]) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ DELETE FROM tokenkeeper.moved_row AS m WHERE m.row_id = ANY (drop_moved_rows.row_ids) $$;
COMMENT ON FUNCTION tokenkeeper.drop_moved_rows(bigint[]) IS 'Internal, for moves: deletes rows that the other database has committed.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_rows(source text, topic text, rows text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    given jsonb := take_rows.rows::jsonb;
    known bigint[];
    fresh jsonb;
BEGIN
    INSERT INTO tokenkeeper.arrival (source, topic, stream) VALUES (take_rows.source, take_rows.topic, 'rows') ON CONFLICT DO NOTHING;
    SELECT a.last_rows INTO known FROM tokenkeeper.arrival AS a
    WHERE a.source = take_rows.source COLLATE "C" AND a.topic = take_rows.topic COLLATE "C" AND a.stream = 'rows' FOR UPDATE;
    fresh := coalesce((SELECT jsonb_agg(g) FROM jsonb_array_elements(given) AS g WHERE (g ->> 'row_id')::bigint <> ALL (known)), '[]');
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, released)
    SELECT r.environment, r.topic, r.token, r.status, r.body, r.apns_id, r.sent_at, r.queued_at, r.attempts, r.released
    FROM jsonb_array_elements(fresh) AS g CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.send_result, g -> 'content') AS r
    WHERE g ->> 'queue' = 'send_result';
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, returned, row_key,
        queued_at, attempts, released)
    SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.returned, r.row_key,
           r.queued_at, r.attempts, r.released
    FROM jsonb_array_elements(fresh) AS g CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.registration, g -> 'content') AS r
    WHERE g ->> 'queue' = 'registration';
    UPDATE tokenkeeper.arrival AS a
    SET last_rows = ARRAY(SELECT (g ->> 'row_id')::bigint FROM jsonb_array_elements(given) AS g), taken = a.taken + jsonb_array_length(fresh),
        changed_at = clock_timestamp()
    WHERE a.source = take_rows.source COLLATE "C" AND a.topic = take_rows.topic COLLATE "C" AND a.stream = 'rows';
    RETURN jsonb_array_length(fresh);
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_rows(text, text, text) IS
    'Internal, for moves: queues rows that moved_rows of another database read, and returns how many were new: a repeated batch is recognized.';

CREATE OR REPLACE FUNCTION tokenkeeper.left_behind(topic text) RETURNS TABLE (what text, number bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $$
    SELECT w.what, w.number FROM (VALUES
        ('campaigns that have not ended', (SELECT count(*) FROM tokenkeeper.campaign AS c WHERE c.topic = left_behind.topic COLLATE "C" AND c.ended_at IS NULL)),
        ('requests that wait to be sent', (SELECT count(*) FROM tokenkeeper.send_request AS r WHERE r.topic = left_behind.topic COLLATE "C")),
        ('rows that wait to be passed on', (SELECT count(*) FROM tokenkeeper.moved_row AS m WHERE m.topic = left_behind.topic COLLATE "C")),
        ('results and registrations in the queues', (SELECT count(*) FROM (
            SELECT FROM tokenkeeper.send_result AS r WHERE r.topic = left_behind.topic COLLATE "C"
            UNION ALL SELECT FROM tokenkeeper.registration AS r WHERE r.topic = left_behind.topic COLLATE "C" LIMIT 10000) AS q)),
        ('held results and logouts', (SELECT count(*) FROM tokenkeeper.topic AS t JOIN tokenkeeper.held_result AS h USING (topic_id) WHERE t.topic = left_behind.topic COLLATE "C")
            + (SELECT count(*) FROM tokenkeeper.topic AS t JOIN tokenkeeper.held_registration AS h USING (topic_id) WHERE t.topic = left_behind.topic COLLATE "C"))
        ) AS w (what, number)
    WHERE w.number > 0
$$;
COMMENT ON FUNCTION tokenkeeper.left_behind(text) IS
    'Internal, for tokenkeeperd move: what a moved topic still has in this database, besides its tokens; no rows for nothing.';

CREATE OR REPLACE FUNCTION tokenkeeper.end_move(topic text, most integer DEFAULT 5000) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    topics integer[] := ARRAY(SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = end_move.topic COLLATE "C" AND t.moved_to IS NOT NULL);
    rest text := (SELECT string_agg(b.what || ': ' || b.number, ', ') FROM tokenkeeper.left_behind(end_move.topic) AS b);
    keys bytea[];
BEGIN
    IF topics = '{}' THEN
        RETURN 0;
    END IF;
    IF rest IS NOT NULL THEN
        RAISE EXCEPTION 'the topic still has %, expected none', rest USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    WITH gone AS (
        DELETE FROM tokenkeeper.ledger AS l WHERE l.ctid = ANY (ARRAY(
            SELECT k.ctid FROM tokenkeeper.ledger AS k WHERE k.topic_id = ANY (topics) LIMIT greatest(end_move.most, 1)))
        RETURNING l.token_key
    )
    SELECT array_agg(g.token_key) INTO keys FROM gone AS g;
    IF keys IS NULL THEN
        -- Without a policy, the sweep deletes the topic in time.
        UPDATE tokenkeeper.topic AS t
        SET moved_to = NULL, gate = NULL, suppressed_retention = NULL, dormant_after = NULL, guard_allowance = NULL, guard_max_share = NULL,
            prune_allowance = NULL, prune_max_share = NULL, background_per_hour = NULL, max_per_second = NULL, alerts_per_day = NULL, confirm_share = NULL
        WHERE t.topic_id = ANY (topics);
        RETURN 0;
    END IF;
    DELETE FROM tokenkeeper.receipt AS r WHERE r.topic_id = ANY (topics) AND r.token_key = ANY (keys);
    DELETE FROM tokenkeeper.token_event_log AS e WHERE e.token_key = ANY (keys) AND e.topic_id = ANY (topics);
    RETURN cardinality(keys);
END
$$;
COMMENT ON FUNCTION tokenkeeper.end_move(text, integer) IS
    'Internal, for tokenkeeperd move: deletes some tokens of a moved topic, with their history, and returns how many. At 0 none is left, and the mark is '
    'removed. Raises 55000 if something else of it is left.';

CREATE OR REPLACE FUNCTION tokenkeeper.take_back(topic text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    late bigint;
BEGIN
    UPDATE tokenkeeper.topic AS t SET moved_to = NULL WHERE t.topic = take_back.topic COLLATE "C" AND t.moved_to IS NOT NULL;
    WITH late AS (
        DELETE FROM tokenkeeper.moved_row AS m WHERE m.topic = take_back.topic COLLATE "C" RETURNING m.queue, m.content
    ), results AS (
        INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, released)
        SELECT r.environment, r.topic, r.token, r.status, r.body, r.apns_id, r.sent_at, r.queued_at, r.attempts, r.released
        FROM late AS m CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.send_result, m.content) AS r WHERE m.queue = 'send_result'
    ), registrations AS (
        INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, returned, row_key,
            queued_at, attempts, released)
        SELECT r.environment, r.topic, r.token, r.registered_at, r.device_id, r.user_id, r.tags, r.unregistered, r.returned, r.row_key,
               r.queued_at, r.attempts, r.released
        FROM late AS m CROSS JOIN LATERAL jsonb_populate_record(NULL::tokenkeeper.registration, m.content) AS r WHERE m.queue = 'registration'
    )
    SELECT count(*) INTO late FROM late;
    RETURN late;
END
$$;
COMMENT ON FUNCTION tokenkeeper.take_back(text) IS
    'Internal, for tokenkeeperd move: takes a moved topic back before the move has ended: removes the mark and queues rows that waited to be passed on. '
    'Returns how many.';

CREATE OR REPLACE FUNCTION tokenkeeper.forget_arrival(source text, topic text) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$ DELETE FROM tokenkeeper.arrival AS a WHERE a.source = forget_arrival.source COLLATE "C" AND a.topic = forget_arrival.topic COLLATE "C" $$;
COMMENT ON FUNCTION tokenkeeper.forget_arrival(text, text) IS
    'Internal, for tokenkeeperd move: forgets how far a topic has arrived, once the move has ended.';
