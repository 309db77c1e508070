-- oldest daemon: 0.1.0
--
-- What the daemon calls with a batch of interpreted results.

CREATE FUNCTION tokenkeeper.record(
    environments text[],
    topics text[],
    of_topic integer[],
    token_keys bytea[],
    dead_at timestamptz[],
    dead_reason text[],
    suspect_at timestamptz[],
    suspect_reason text[]) RETURNS SETOF bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off -- As in 0003: a plan made for a small ledger must not outlive it.
AS $$
DECLARE
    topic_ids integer[] := '{}';
    found_id integer;
    learned timestamptz := clock_timestamp();
    patience text := current_setting('lock_timeout');
    total integer := cardinality(record.token_keys);
    first integer := 1;
    many integer := cardinality(record.token_keys);
    locked_until integer := 0;
    refusals integer := 0;
BEGIN
    -- Whatever is not there yet may be about to be added by an application, and an INSERT would wait for that. So the
    -- additions come first, while no row is locked, with little patience.
    PERFORM set_config('lock_timeout', '10ms', true);
    FOR n IN 1..cardinality(record.topics) LOOP
        BEGIN
            found_id := tokenkeeper.ensure_topic(record.environments[n], record.topics[n]);
        EXCEPTION WHEN lock_not_available THEN
            found_id := NULL;
        END;
        topic_ids := topic_ids || found_id;
    END LOOP;

    -- All that are missing at once; where that meets a lock, the one that is locked is found by halving.
    WHILE first <= total LOOP
        BEGIN
            WITH added AS (
                INSERT INTO tokenkeeper.ledger AS l
                    (topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, suppressed_since)
                SELECT topic_ids[s.of_topic], s.token_key, s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason, learned
                FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason,
                            record.suspect_at, record.suspect_reason)
                     WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
                WHERE s.position BETWEEN first AND first + many - 1
                  AND topic_ids[s.of_topic] IS NOT NULL
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS e
                                  WHERE e.topic_id = topic_ids[s.of_topic] AND e.token_key = s.token_key)
                ORDER BY s.position
                ON CONFLICT DO NOTHING
                RETURNING l.topic_id, l.token_key, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason
            )
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, invalidated_after)
            SELECT a.topic_id, a.token_key, 'invalidated', c.cause,
                   CASE c.cause WHEN 'dead' THEN a.dead_reason ELSE a.suspect_reason END, greatest(a.dead_at, a.suspect_at)
            FROM added AS a
            CROSS JOIN LATERAL (SELECT tokenkeeper.cause_of(a.dead_at, a.suspect_at, NULL, NULL) AS cause) AS c;
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE total END;
        EXCEPTION WHEN lock_not_available THEN
            refusals := refusals + 1;
            -- Somebody adds a great many: then they can all wait.
            EXIT WHEN refusals > 30;
            IF many = 1 THEN
                first := first + 1;
                many := total;
            ELSE
                locked_until := least(first + many - 1, total);
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);

    RETURN QUERY
    WITH said AS MATERIALIZED (
        SELECT s.position, topic_ids[s.of_topic] AS topic_id, s.token_key,
               s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason
        FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason,
                    record.suspect_at, record.suspect_reason)
             WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
    ), old AS MATERIALIZED (
        -- The daemon yields to the application: a row that somebody holds is skipped here and told to the caller.
        SELECT s.position, l.topic_id, l.token_key, l.registered_at, l.suppressed, l.suppressed_since, l.device_id,
               greatest(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) AS invalidated_at,
               tokenkeeper.cause_of(l.dead_at, l.suspect_at, l.unregistered_at, l.superseded_at) AS cause,
               l.unregistered_at, l.superseded_at, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason,
               coalesce((s.dead_at, s.dead_reason COLLATE "C") > (l.dead_at, l.dead_reason), s.dead_at IS NOT NULL) AS dead_moves,
               coalesce((s.suspect_at, s.suspect_reason COLLATE "C") > (l.suspect_at, l.suspect_reason), s.suspect_at IS NOT NULL)
                   AS suspect_moves,
               s.dead_at AS said_dead_at, s.dead_reason AS said_dead_reason,
               s.suspect_at AS said_suspect_at, s.suspect_reason AS said_suspect_reason
        FROM said AS s
        JOIN tokenkeeper.ledger AS l ON l.topic_id = s.topic_id AND l.token_key = s.token_key
        ORDER BY s.position
        FOR NO KEY UPDATE OF l SKIP LOCKED
    ), merged AS (
        SELECT o.position, o.topic_id, o.token_key, o.registered_at, o.unregistered_at, o.superseded_at, o.device_id,
               o.suppressed AS was_suppressed, o.suppressed_since AS was_suppressed_since,
               o.invalidated_at AS was_invalidated_at, o.cause AS was_cause, o.dead_moves, o.suspect_moves,
               CASE WHEN o.dead_moves THEN o.said_dead_at ELSE o.dead_at END AS dead_at,
               CASE WHEN o.dead_moves THEN o.said_dead_reason ELSE o.dead_reason END AS dead_reason,
               CASE WHEN o.suspect_moves THEN o.said_suspect_at ELSE o.suspect_at END AS suspect_at,
               CASE WHEN o.suspect_moves THEN o.said_suspect_reason ELSE o.suspect_reason END AS suspect_reason
        FROM old AS o
        WHERE o.dead_moves OR o.suspect_moves
    ), new AS MATERIALIZED (
        SELECT m.*,
               greatest(m.dead_at, m.suspect_at, m.unregistered_at, m.superseded_at) AS invalidated_at,
               greatest(m.dead_at, m.suspect_at, m.unregistered_at, m.superseded_at) >= m.registered_at AS suppressed,
               tokenkeeper.cause_of(m.dead_at, m.suspect_at, m.unregistered_at, m.superseded_at) AS cause
        FROM merged AS m
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET dead_at = n.dead_at, dead_reason = n.dead_reason, suspect_at = n.suspect_at, suspect_reason = n.suspect_reason,
            suppressed_since = CASE WHEN n.was_suppressed THEN n.was_suppressed_since WHEN n.suppressed THEN learned END
        FROM new AS n
        WHERE l.topic_id = n.topic_id AND l.token_key = n.token_key
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT n.topic_id, n.token_key,
               CASE WHEN n.suppressed THEN 'invalidated' ELSE 'late_feedback_ignored' END,
               c.cause, CASE c.cause WHEN 'dead' THEN n.dead_reason WHEN 'suspect' THEN n.suspect_reason END, n.device_id,
               nullif(n.registered_at, '-infinity'), nullif(n.registered_at, '-infinity'), n.was_invalidated_at, n.invalidated_at
        FROM new AS n
        CROSS JOIN LATERAL (
            SELECT CASE WHEN n.suppressed THEN n.cause WHEN n.dead_moves THEN 'dead' ELSE 'suspect' END AS cause) AS c
        WHERE NOT n.was_suppressed OR n.cause <> n.was_cause
    )
    -- What was added just now is among the old ones here, and says nothing new. NOT IN is hashed; NOT EXISTS would be a
    -- nested loop, because the planner takes an unnested array for ten rows.
    SELECT s.position FROM said AS s WHERE s.position NOT IN (SELECT o.position FROM old AS o);
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[]) IS
    'Records what a batch of results says of tokens: each key once, in key order (else two batches may deadlock), with the '
    'greatest dead_at and suspect_at and their reasons. of_topic points into environments and topics, from 1. '
    'Answers the positions, from 1, of the tokens that an application holds locked: nothing of those was recorded.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[]) FROM PUBLIC;
