-- The undo of a backfill or an import: it removes the tokens that nothing else has reported since.
--
-- Locks: the source's row, then the tokens that are free. A token that another session holds is kept: call withdraw again from 0.

CREATE OR REPLACE FUNCTION tokenkeeper.withdrawable_source(source_id bigint) RETURNS tokenkeeper.registration_source
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known tokenkeeper.registration_source;
BEGIN
    PERFORM tokenkeeper.require_read_committed();
    SELECT s.* INTO known FROM tokenkeeper.registration_source AS s
    WHERE s.source_id = withdrawable_source.source_id
      AND (s.done_by = session_user
           OR EXISTS (SELECT FROM pg_catalog.pg_roles AS o WHERE o.rolname = 'tokenkeeper_operator' AND pg_has_role(session_user, o.oid, 'MEMBER')));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no source % of %', coalesce(withdrawable_source.source_id::text, 'null'), session_user
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'See tokenkeeper.registration_source. A member of tokenkeeper_operator may withdraw the sources of others, too.';
    END IF;
    IF known.kind IN ('attachment', 'repair') THEN
        RAISE EXCEPTION 'source % is the % of %, expected a backfill or an import', known.source_id, known.kind, known.name
            USING ERRCODE = 'invalid_parameter_value', HINT = 'To undo logouts of an attached table, use tokenkeeper.reinstate.';
    END IF;
    RETURN known;
END
$$;
COMMENT ON FUNCTION tokenkeeper.withdrawable_source(bigint) IS
    'The source that withdraw undoes. Raises 22023 if it does not exist, belongs to another login (unless an operator asks), or is an attached table or a '
    'repair.';

CREATE OR REPLACE FUNCTION tokenkeeper.reason_to_keep(source tokenkeeper.registration_source, of_topic integer, key bytea) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    known tokenkeeper.ledger;
    made tokenkeeper.token_event_log;
    other text;
    -- What is as old as the source comes from data, and not from something that happened since.
    limit_of timestamptz;
BEGIN
    SELECT l.* INTO known FROM tokenkeeper.ledger AS l WHERE l.topic_id = of_topic AND l.token_key = key;
    IF NOT FOUND THEN
        RETURN 'it is gone';
    END IF;
    SELECT e.* INTO made FROM tokenkeeper.token_event_log AS e
    WHERE e.token_key = key AND e.topic_id = of_topic AND e.source_id = source.source_id ORDER BY e.event_id LIMIT 1;
    IF NOT FOUND OR made.registered_before IS NOT NULL
        OR NOT (made.event = 'registered' OR (made.event = 'unregistered_by_app' AND made.registered_after IS NULL)) THEN
        RETURN 'it was known before';
    END IF;
    -- Tags say nothing about the token; and which token of a device is current is judged by what is so now.
    SELECT CASE o.event WHEN 'registered' THEN 'it has been registered otherwise' WHEN 'revived' THEN 'it has been registered since'
                        WHEN 'unregistered_by_app' THEN 'it has been unregistered otherwise' WHEN 'reinstated' THEN 'it has been reinstated'
                        WHEN 'pruned' THEN 'it was pruned before, and is known again' ELSE 'APNs has responded to a push to it' END
    INTO other FROM tokenkeeper.token_event_log AS o
    WHERE o.token_key = key AND o.topic_id = of_topic AND o.source_id IS DISTINCT FROM source.source_id
      AND o.event NOT IN ('superseded', 'tagged') AND (o.event, o.cause) <> ('revived', 'moved')
      -- Before a withdrawal, nothing but the withdrawn source had touched the token.
      AND NOT EXISTS (SELECT FROM tokenkeeper.token_event_log AS w
                      WHERE w.token_key = key AND w.topic_id = of_topic AND w.event = 'pruned' AND w.cause = 'withdrawn' AND w.event_id >= o.event_id)
    ORDER BY o.event_id LIMIT 1;
    IF FOUND THEN
        RETURN other;
    END IF;
    limit_of := greatest(source.started_at, made.registered_after, made.invalidated_after);
    IF greatest(known.registered_at, known.device_at, known.user_at, known.tags_at) > limit_of THEN
        RETURN 'it has been registered since';
    END IF;
    IF known.unregistered_by_app_at > limit_of THEN
        RETURN 'it has been unregistered since';
    END IF;
    IF known.stale_at IS NOT NULL OR known.suspect_at IS NOT NULL
        OR EXISTS (SELECT FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND h.token_key = key)
        OR EXISTS (SELECT FROM tokenkeeper.receipt AS r WHERE r.topic_id = of_topic AND r.token_key = key AND r.cause IN ('suspect', 'stale')) THEN
        RETURN 'APNs has responded to a push to it';
    END IF;
    -- Another token of its device has superseded it since: one that the source did not make.
    IF known.superseded_at IS NOT NULL AND EXISTS (
        SELECT FROM tokenkeeper.ledger AS c
        WHERE c.device_id = known.device_id AND c.topic_id + 0 = of_topic AND c.superseded_at IS NULL
          AND greatest(c.registered_at, c.device_at) > limit_of
          AND NOT EXISTS (SELECT FROM tokenkeeper.token_event_log AS e
                          WHERE e.token_key = c.token_key AND e.topic_id = c.topic_id AND e.source_id = source.source_id)) THEN
        RETURN 'a newer token of its device has superseded it';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reason_to_keep(tokenkeeper.registration_source, integer, bytea) IS
    'Why withdraw keeps a token of this source; null if nothing has touched it since the source made it.';

CREATE OR REPLACE FUNCTION tokenkeeper.made_by(source_id bigint)
RETURNS TABLE (environment text, topic text, token text, device_id text, kept_because text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    known tokenkeeper.registration_source := tokenkeeper.withdrawable_source(made_by.source_id);
BEGIN
    RETURN QUERY
        SELECT t.environment, t.topic, encode(m.token_key, 'hex'), l.device_id::text, tokenkeeper.reason_to_keep(known, m.topic_id, m.token_key)
        FROM (SELECT DISTINCT e.topic_id, e.token_key FROM tokenkeeper.token_event_log AS e WHERE e.source_id = made_by.source_id) AS m
        JOIN tokenkeeper.topic AS t USING (topic_id)
        JOIN tokenkeeper.ledger AS l USING (topic_id, token_key)
        ORDER BY m.topic_id, m.token_key;
END
$$;
COMMENT ON FUNCTION tokenkeeper.made_by(bigint) IS
    'The tokens that a backfill or an import made or changed and that are still in the ledger. kept_because: why withdraw keeps the token; null if it '
    'would remove it. For the login that began the source, and operators. Raises 25001, and 22023 for any other source.';

CREATE OR REPLACE FUNCTION tokenkeeper.withdraw_tokens(source tokenkeeper.registration_source, of_topic integer[], token_keys bytea[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    receipt timestamptz := clock_timestamp();
    gone_topics integer[] := '{}';
    gone_keys bytea[] := '{}';
    checks tokenkeeper.device_check[];
BEGIN
    FOR n IN 1..cardinality(token_keys) LOOP
        PERFORM FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = withdraw_tokens.of_topic[n] AND l.token_key = token_keys[n] FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        -- Again: something may have touched it before it was locked.
        CONTINUE WHEN tokenkeeper.reason_to_keep(source, withdraw_tokens.of_topic[n], token_keys[n]) IS NOT NULL;
        gone_topics := gone_topics || withdraw_tokens.of_topic[n];
        gone_keys := gone_keys || token_keys[n];
    END LOOP;

    checks := ARRAY(
        SELECT ROW(l.topic_id, l.device_id, NULL, false)::tokenkeeper.device_check
        FROM unnest(gone_topics, gone_keys) AS k (topic_id, token_key)
        CROSS JOIN LATERAL (SELECT e.topic_id, e.device_id FROM tokenkeeper.ledger AS e
                            WHERE e.topic_id = k.topic_id AND e.token_key = k.token_key OFFSET 0) AS l
        JOIN tokenkeeper.topic AS t ON t.topic_id = l.topic_id
        WHERE l.device_id IS NOT NULL AND tokenkeeper.has_one_token_per_device(t.topic));
    WITH gone AS (
        DELETE FROM tokenkeeper.ledger AS l USING unnest(gone_topics, gone_keys) AS k (topic_id, token_key)
        WHERE l.topic_id = k.topic_id AND l.token_key = k.token_key
        RETURNING l.*
    ), receipts AS (
        DELETE FROM tokenkeeper.receipt AS r USING unnest(gone_topics, gone_keys) AS k (topic_id, token_key)
        WHERE r.topic_id = k.topic_id AND r.token_key = k.token_key
        RETURNING r.topic_id, r.cause, r.received_at, r.counted
    ), uncounted AS (
        INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
        SELECT tokenkeeper.hour_of(r.received_at), r.topic_id, r.cause, -count(*) FROM receipts AS r WHERE r.counted GROUP BY 1, 2, 3
    ), pruned AS (
        -- The history keeps the topic.
        INSERT INTO tokenkeeper.topic_prune AS p (topic_id) SELECT DISTINCT g.topic_id FROM gone AS g
        ON CONFLICT (topic_id) DO UPDATE SET pruned_at = excluded.pruned_at
    )
    INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id, user_id, source_id,
        registered_before, invalidated_before)
    SELECT g.topic_id, g.token_key, 'pruned', 'withdrawn', source.kind || ' of ' || source.name, g.device_id, g.user_id, source.source_id,
           nullif(g.registered_at, '-infinity'), greatest(g.stale_at, g.suspect_at, g.logged_out_at, g.superseded_at)
    FROM gone AS g;
    -- What they superseded is current again.
    PERFORM tokenkeeper.resolve_devices(checks, receipt);
    RETURN cardinality(gone_keys);
END
$$;
COMMENT ON FUNCTION tokenkeeper.withdraw_tokens(tokenkeeper.registration_source, integer[], bytea[]) IS
    'A step of withdraw: removes those of these tokens, given in order, that nothing has touched, and compares their devices. Skips those that an '
    'application has locked. Returns how many it removed.';

CREATE OR REPLACE FUNCTION tokenkeeper.withdraw(
    source_id bigint, dry_run boolean DEFAULT false, after bigint DEFAULT 0, max_events integer DEFAULT NULL,
    OUT withdrawn bigint, OUT kept bigint, OUT queued bigint, OUT reached bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    known tokenkeeper.registration_source := tokenkeeper.withdrawable_source(withdraw.source_id);
    words text := 'source ' || known.source_id || ', the ' || known.kind || ' of ' || known.name;
    topics integer[];
    keys bytea[];
    events bigint;
    examined bigint;
BEGIN
    IF withdraw.max_events < 1 OR withdraw.after IS NULL THEN
        RAISE EXCEPTION 'after is %, and max_events is %, expected what the last call has reached, or 0, and at least 1, or null',
            coalesce(withdraw.after::text, 'null'), coalesce(withdraw.max_events::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    withdrawn := 0;
    kept := 0;
    queued := 0;
    IF NOT withdraw.dry_run THEN
        IF known.withdrawn_at IS NULL THEN
            INSERT INTO tokenkeeper.operation (operation, rows, message) VALUES ('withdrawn', 0, words);
        END IF;
        -- From here on the source queues nothing more: advance_source refuses, and fails the transaction that queues.
        UPDATE tokenkeeper.registration_source AS s SET withdrawn_at = coalesce(s.withdrawn_at, clock_timestamp())
        WHERE s.source_id = known.source_id RETURNING s.* INTO known;
        -- Which tokens its list had before is not known any more.
        UPDATE tokenkeeper.list AS l SET is_known = false WHERE l.name = known.list AND l.done_by = known.done_by AND l.is_known;
        IF withdraw.after <= 0 THEN
            -- Nor does what it queued count later, when an operator releases or requeues it.
            DELETE FROM tokenkeeper.held_registration AS h WHERE h.source_id = known.source_id;
            DELETE FROM tokenkeeper.rejected_registration AS r WHERE r.source_id = known.source_id;
        END IF;
    END IF;
    IF withdraw.after <= 0 THEN
        queued := (SELECT count(*) FROM (SELECT FROM tokenkeeper.registration AS r WHERE r.source_id = known.source_id LIMIT 10000) AS q);
        IF queued > 0 AND NOT withdraw.dry_run THEN
            reached := 0;
            RETURN;
        END IF;
    END IF;
    WITH made AS MATERIALIZED (
        SELECT e.event_id, e.topic_id, e.token_key FROM tokenkeeper.token_event_log AS e
        WHERE e.source_id = known.source_id AND e.event_id > withdraw.after ORDER BY e.event_id LIMIT withdraw.max_events
    ), token AS MATERIALIZED (
        SELECT m.topic_id, m.token_key, tokenkeeper.reason_to_keep(known, m.topic_id, m.token_key) AS reason FROM made AS m
        -- Each token once, at its first event.
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.token_event_log AS f WHERE f.token_key = m.token_key AND f.topic_id = m.topic_id
                          AND f.source_id = known.source_id AND f.event_id < m.event_id)
          AND EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = m.topic_id AND l.token_key = m.token_key)
    )
    SELECT (SELECT count(*) FROM made), (SELECT max(m.event_id) FROM made AS m), (SELECT count(*) FROM token),
           (SELECT array_agg(t.topic_id ORDER BY t.topic_id, t.token_key) FROM token AS t WHERE t.reason IS NULL),
           (SELECT array_agg(t.token_key ORDER BY t.topic_id, t.token_key) FROM token AS t WHERE t.reason IS NULL)
    INTO events, reached, examined, topics, keys;
    reached := CASE WHEN events >= withdraw.max_events THEN reached END;
    withdrawn := coalesce(cardinality(keys), 0);
    IF withdrawn > 0 AND NOT withdraw.dry_run THEN
        withdrawn := tokenkeeper.withdraw_tokens(known, topics, keys);
        UPDATE tokenkeeper.operation AS o SET rows = o.rows + withdrawn WHERE o.operation = 'withdrawn' AND o.message = words;
    END IF;
    kept := examined - withdrawn;
END
$$;
COMMENT ON FUNCTION tokenkeeper.withdraw(bigint, boolean, bigint, integer) IS
    'Undoes a backfill or an import: ends it, and removes its held logouts, its rejected registrations, and the tokens that it made and that nothing has '
    'touched since; made_by lists the others. Returns how many tokens it removed (withdrawn; with dry_run, would remove) and kept. While registrations of '
    'the source are queued, it only returns their number (queued; 10000 for more): repeat it later. With max_events, pass reached as after to the next '
    'call, until it is null. For the login that began the source, and operators. Raises 25001, and 22023 for an unknown source, max_events below 1, or a '
    'null after.';
