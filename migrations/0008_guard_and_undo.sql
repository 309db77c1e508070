-- oldest daemon: 0.1.0
--
-- One misconfigured sender gets BadDeviceToken for every token. Hence the mass-failure guard in front of the ledger, the results
-- that it holds, and the undo for what came before.

CREATE TABLE tokenkeeper.suspect (
    suspect_at timestamptz NOT NULL,
    queued_at  timestamptz NOT NULL,
    topic_id   integer NOT NULL,
    silenced   boolean NOT NULL,
    token_key  bytea NOT NULL,
    reason     text COLLATE "C" NOT NULL,
    PRIMARY KEY (topic_id, token_key, suspect_at, reason)
);
COMMENT ON TABLE tokenkeeper.suspect IS
    'Every suspect that counts, so that reinstate can tell which is the latest of those that are left. Kept as long as the token is suppressed, '
    'and for the retention of suppressed tokens.';
COMMENT ON COLUMN tokenkeeper.suspect.silenced IS 'Whether it counts in the guard''s window: it silenced a token that could be sent to.';
CREATE INDEX suspect_suspect_at ON tokenkeeper.suspect (topic_id, suspect_at);
INSERT INTO tokenkeeper.suspect (topic_id, token_key, suspect_at, reason, queued_at, silenced)
SELECT l.topic_id, l.token_key, l.suspect_at, coalesce(l.suspect_reason, ''), l.suspect_at, false
FROM tokenkeeper.ledger AS l WHERE l.suspect_at IS NOT NULL;

CREATE TABLE tokenkeeper.exclusion (
    exclusion_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     integer NOT NULL,
    since        timestamptz NOT NULL,
    until        timestamptz NOT NULL CHECK (until >= since),
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_by      text NOT NULL DEFAULT session_user
);
COMMENT ON TABLE tokenkeeper.exclusion IS
    'What reinstate has undone: suspects of the topic whose instant lies in one of these windows, ends included, never count, whenever they arrive.';
CREATE INDEX exclusion_topic ON tokenkeeper.exclusion (topic_id);

CREATE VIEW tokenkeeper.reinstatement AS
SELECT t.environment, t.topic, e.since, e.until, e.at, e.done_by, e.exclusion_id
FROM tokenkeeper.exclusion AS e JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.reinstatement IS
    'The windows given to reinstate: suspects whose instant lies in one, ends included, do not count, whenever they arrive.';

-- The internal columns of the queue for what comes to it a second time: null, as ever, costs senders nothing.
ALTER TABLE tokenkeeper.send_result
    ADD COLUMN attempts smallint,
    ADD COLUMN released boolean;
COMMENT ON COLUMN tokenkeeper.send_result.attempts IS 'Internal: how often it was rejected and requeued before; null for never.';
COMMENT ON COLUMN tokenkeeper.send_result.released IS 'Internal: true when an operator has released it, and the guard must not hold it again.';
ALTER TABLE tokenkeeper.rejected_result ADD COLUMN attempts smallint;
COMMENT ON COLUMN tokenkeeper.rejected_result.attempts IS 'How often it was requeued before; null for never.';

CREATE TABLE tokenkeeper.held_result (
    held_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    held_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic_id    integer NOT NULL,
    token_key   bytea NOT NULL,
    suspect_at  timestamptz NOT NULL,
    reason      text NOT NULL,
    environment text,
    topic       text,
    token       text,
    status      integer,
    body        text,
    apns_id     text,
    sent_at     timestamptz,
    queued_at   timestamptz NOT NULL,
    attempts    smallint
);
COMMENT ON TABLE tokenkeeper.held_result IS
    'Suspects held by the mass-failure guard, whole, as they were queued: until release_held or discard_held, and not longer than sweep.held_retention.';
COMMENT ON COLUMN tokenkeeper.held_result.suspect_at IS 'The instant that it would count with: when the request was sent.';
CREATE INDEX held_result_token ON tokenkeeper.held_result (topic_id, token_key, queued_at);

CREATE TABLE tokenkeeper.topic_guard (
    topic_id    integer PRIMARY KEY,
    open_since  timestamptz,
    touched_at  timestamptz,
    undo_since  timestamptz,
    tokens      bigint,
    active      bigint,
    max_tokens  bigint
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard IS
    'The mass-failure guard of each topic that has had suspects; its row is locked while suspects of the topic are judged, released, discarded or undone.';
COMMENT ON COLUMN tokenkeeper.topic_guard.open_since IS 'Since when suspects are held; null while they are recorded.';
COMMENT ON COLUMN tokenkeeper.topic_guard.touched_at IS 'When a result was last judged that would have silenced a token.';
COMMENT ON COLUMN tokenkeeper.topic_guard.undo_since IS 'The earliest suspect of those that made the guard open or have come since: where to reinstate from.';
COMMENT ON COLUMN tokenkeeper.topic_guard.tokens IS 'Tokens that suspects have silenced or would have, within the worst day that was looked at last.';

CREATE TABLE tokenkeeper.topic_guard_count (
    topic_id integer NOT NULL,
    bucket   timestamptz NOT NULL,
    tokens   bigint NOT NULL,
    PRIMARY KEY (topic_id, bucket)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.topic_guard_count IS
    'How many tokens suspects have silenced, or would have but for the guard, by ten minutes of queued_at: each token once a day, where its last suspect of that day is.';

CREATE VIEW tokenkeeper.guard AS
SELECT t.environment, t.topic, g.open_since IS NOT NULL AS open, g.open_since, g.tokens, g.active, g.max_tokens, g.undo_since,
       CASE WHEN g.open_since IS NOT NULL AND g.undo_since IS NOT NULL THEN
           -- A topic is what some sender has written: quoted, lest a shell run it.
           format('tokenkeeperd reinstate --topic%s --environment %s --since %s',
                  CASE WHEN t.topic LIKE '-%' THEN '=' ELSE ' ' END || CASE WHEN t.topic ~ '[^A-Za-z0-9._-]' THEN '''' || replace(t.topic, '''', '''"''"''') || '''' ELSE t.topic END, t.environment,
                  to_char(g.undo_since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) END AS undo
FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.guard IS
    'The mass-failure guard by topic: whether it holds suspects now, by what numbers, and the command that undoes what was recorded before it opened.';
COMMENT ON COLUMN tokenkeeper.guard.tokens IS 'Tokens that suspects have silenced, or would have, within a day, as of the last time one came.';
COMMENT ON COLUMN tokenkeeper.guard.active IS 'The active tokens of the topic then.';
COMMENT ON COLUMN tokenkeeper.guard.max_tokens IS 'The most that may be silenced within a day.';

CREATE FUNCTION tokenkeeper.guard_bucket(at timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN date_bin('10 minutes', at, '2000-01-01 00:00:00+00');
COMMENT ON FUNCTION tokenkeeper.guard_bucket(timestamptz) IS 'The ten minutes of topic_guard_count that an instant lies in.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_bucket(timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.guard_changes(of_topic integer, token_keys bytea[], queued_at timestamptz[])
RETURNS TABLE (bucket timestamptz, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT a.token_key, tokenkeeper.guard_bucket(a.queued_at) AS bucket
        FROM unnest(guard_changes.token_keys, guard_changes.queued_at) AS a (token_key, queued_at)
    ), known AS MATERIALIZED (
        SELECT DISTINCT k.token_key, tokenkeeper.guard_bucket(e.queued_at) AS bucket
        FROM (SELECT DISTINCT a.token_key FROM asked AS a) AS k
        CROSS JOIN LATERAL (
            SELECT h.queued_at FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic AND h.token_key = k.token_key
            UNION ALL
            SELECT s.queued_at FROM tokenkeeper.suspect AS s
            WHERE s.topic_id = of_topic AND s.token_key = k.token_key AND s.silenced) AS e
    ), before AS (
        SELECT k.bucket, lead(k.bucket) OVER (PARTITION BY k.token_key ORDER BY k.bucket) AS next FROM known AS k
    ), after AS (
        SELECT b.bucket, lead(b.bucket) OVER (PARTITION BY b.token_key ORDER BY b.bucket) AS next
        FROM (SELECT * FROM known UNION SELECT * FROM asked) AS b
    )
    SELECT c.bucket, sum(c.tokens)::bigint FROM (
        SELECT a.bucket, 1 AS tokens FROM after AS a WHERE a.next IS NULL OR a.next - a.bucket > interval '1 day'
        UNION ALL
        SELECT b.bucket, -1 FROM before AS b WHERE b.next IS NULL OR b.next - b.bucket > interval '1 day') AS c
    GROUP BY 1 HAVING sum(c.tokens) <> 0
$$;
COMMENT ON FUNCTION tokenkeeper.guard_changes(integer, bytea[], timestamptz[]) IS
    'What suspects of these tokens, queued then, change in topic_guard_count: a token counts once a day, where its last suspect of that day is.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_changes(integer, bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.note_guard(of_topic integer, token_keys bytea[], queued_at timestamptz[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.topic_guard_count AS c (topic_id, bucket, tokens)
    SELECT of_topic, g.bucket, g.tokens FROM tokenkeeper.guard_changes(of_topic, note_guard.token_keys, note_guard.queued_at) AS g
    WHERE g.tokens > 0 OR EXISTS (SELECT FROM tokenkeeper.topic_guard_count AS k WHERE k.topic_id = of_topic AND k.bucket = g.bucket)
    -- What the sweep has cleared away is not made less than nothing.
    ON CONFLICT (topic_id, bucket) DO UPDATE SET tokens = greatest(c.tokens + excluded.tokens, 0)
$$;
COMMENT ON FUNCTION tokenkeeper.note_guard(integer, bytea[], timestamptz[]) IS
    'Counts suspects in topic_guard_count; called before they are written to held_result or suspect, with the topic''s guard locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_guard(integer, bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.recount_guard(of_topic integer) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic;
    INSERT INTO tokenkeeper.topic_guard_count (topic_id, bucket, tokens)
    SELECT of_topic, l.bucket, count(*) FROM (
        SELECT k.bucket, lead(k.bucket) OVER (PARTITION BY k.token_key ORDER BY k.bucket) AS next FROM (
            SELECT h.token_key, tokenkeeper.guard_bucket(h.queued_at) AS bucket
            FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic
            UNION
            SELECT s.token_key, tokenkeeper.guard_bucket(s.queued_at)
            FROM tokenkeeper.suspect AS s WHERE s.topic_id = of_topic AND s.silenced) AS k) AS l
    WHERE l.next IS NULL OR l.next - l.bucket > interval '1 day'
    GROUP BY l.bucket;
END
$$;
COMMENT ON FUNCTION tokenkeeper.recount_guard(integer) IS
    'Counts topic_guard_count anew from held_result and suspect, after an operator has taken some away.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.recount_guard(integer) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.worst_day(of_topic integer, since timestamptz, until timestamptz, token_keys bytea[], queued_at timestamptz[])
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH count AS (
        SELECT c.bucket, c.tokens FROM tokenkeeper.topic_guard_count AS c
        WHERE c.topic_id = of_topic AND c.bucket BETWEEN worst_day.since - interval '25:00' AND worst_day.until + interval '25:00'
        UNION ALL
        SELECT g.bucket, g.tokens FROM tokenkeeper.guard_changes(of_topic, worst_day.token_keys, worst_day.queued_at) AS g
        UNION ALL
        SELECT tokenkeeper.guard_bucket(worst_day.until), 0 -- So that there is a day that ends there.
    ), day AS (
        SELECT c.bucket, sum(sum(c.tokens)) OVER (ORDER BY c.bucket RANGE BETWEEN '24:00' PRECEDING AND CURRENT ROW) AS tokens
        FROM count AS c GROUP BY c.bucket
    )
    SELECT coalesce(max(d.tokens), 0)::bigint FROM day AS d
    WHERE d.bucket BETWEEN tokenkeeper.guard_bucket(worst_day.since) AND worst_day.until + interval '24:00'
$$;
COMMENT ON FUNCTION tokenkeeper.worst_day(integer, timestamptz, timestamptz, bytea[], timestamptz[]) IS
    'The most tokens that suspects have silenced, or would have, in any day of queued_at that touches since to until; the given ones included.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.worst_day(integer, timestamptz, timestamptz, bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.guard_limit(
    of_topic integer, worst bigint, INOUT min_tokens bigint, INOUT max_share numeric, OUT active_tokens bigint, OUT most numeric)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    SELECT coalesce(t.guard_min_tokens, guard_limit.min_tokens), coalesce(t.guard_max_share, guard_limit.max_share)
    INTO min_tokens, max_share FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    most := min_tokens;
    IF max_share >= 1 THEN
        most := 'infinity';
    ELSIF worst > min_tokens / 2 THEN
        SELECT c.tokens INTO active_tokens FROM tokenkeeper.token_count AS c
        WHERE c.topic_id = of_topic AND c.state = 'active' AND c.counted_at > clock_timestamp() - interval '1 hour';
        IF NOT FOUND THEN
            -- Not counted lately: as many as it takes to know.
            SELECT count(*) INTO active_tokens FROM (
                SELECT FROM tokenkeeper.ledger AS l
                WHERE l.topic_id = of_topic AND NOT l.suppressed AND l.registered_at > '-infinity'
                LIMIT least(ceil(2 * worst / greatest(max_share, 0.000001)), 100000000)) AS a;
        END IF;
        most := greatest(min_tokens, floor(active_tokens * max_share));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) IS
    'How many tokens suspects may silence within a day, by the topic''s policy or else the given limits; infinity where the guard is off. '
    'The active tokens are counted only where worst comes near it.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.judge(
    of_topic integer,
    token_keys bytea[],
    suspect_at timestamptz[],
    queued_at timestamptz[],
    released boolean[],
    dead_at timestamptz[],
    min_tokens bigint,
    max_share numeric) RETURNS text[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    guard tokenkeeper.topic_guard;
    fates text[];
    keys bytea[];
    queued timestamptz[];
    earliest timestamptz;
    first_queued timestamptz;
    last_queued timestamptz;
    worst bigint;
    active_tokens bigint;
    most numeric;
    turn text := 'stays';
BEGIN
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (of_topic) ON CONFLICT DO NOTHING;
    -- Until the end of the transaction: judged one after the other, each with all before it included.
    SELECT g.* INTO guard FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;

    WITH judged AS MATERIALIZED (
        SELECT s.n, s.token_key, s.suspect_at, s.queued_at, CASE
                   WHEN EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                                WHERE e.topic_id = of_topic AND s.suspect_at BETWEEN e.since AND e.until) THEN 'excluded'
                   -- A token that may be sent to, an unknown one included, and that this would silence.
                   WHEN NOT coalesce(NOT l.suppressed AND s.suspect_at >= l.registered_at
                                     AND NOT coalesce(s.dead_at >= l.registered_at, false), s.dead_at IS NULL) THEN 'counts'
                   WHEN s.released THEN 'released'
                   ELSE 'silences' END AS fate
        FROM unnest(judge.token_keys, judge.suspect_at, judge.queued_at, judge.released, judge.dead_at)
             WITH ORDINALITY AS s (token_key, suspect_at, queued_at, released, dead_at, n)
        LEFT JOIN tokenkeeper.ledger AS l ON l.topic_id = of_topic AND l.token_key = s.token_key
    )
    SELECT array_agg(j.fate ORDER BY j.n),
           array_agg(j.token_key ORDER BY j.n) FILTER (WHERE j.fate = 'silences'),
           array_agg(j.queued_at ORDER BY j.n) FILTER (WHERE j.fate = 'silences'),
           -- Where an undo has to begin: with what silences, or came along for tokens that were dead already. One that was sent
           -- long before it was queued must not stretch it over years; unless all were.
           coalesce(min(j.suspect_at) FILTER (WHERE j.fate IN ('silences', 'counts') AND j.suspect_at > j.queued_at - interval '1 day'),
                    min(j.suspect_at) FILTER (WHERE j.fate = 'silences')),
           min(j.queued_at) FILTER (WHERE j.fate = 'silences'), max(j.queued_at) FILTER (WHERE j.fate = 'silences')
    INTO fates, keys, queued, earliest, first_queued, last_queued
    FROM judged AS j;
    IF guard.open_since IS NOT NULL AND earliest < guard.undo_since THEN
        guard.undo_since := earliest;
        UPDATE tokenkeeper.topic_guard AS g SET undo_since = earliest WHERE g.topic_id = of_topic;
    END IF;
    IF keys IS NULL THEN
        RETURN fates || turn;
    END IF;

    worst := tokenkeeper.worst_day(of_topic, first_queued, last_queued, keys, queued);
    SELECT g.active_tokens, g.most INTO active_tokens, most
    FROM tokenkeeper.guard_limit(of_topic, worst, judge.min_tokens, judge.max_share) AS g;

    IF guard.open_since IS NULL AND worst > most THEN
        turn := 'opened';
        SELECT min(s.suspect_at) FILTER (
            WHERE s.suspect_at > s.queued_at - interval '1 day' OR (s.silenced AND earliest <= first_queued - interval '1 day'))
        INTO guard.undo_since
        FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = of_topic AND s.queued_at > first_queued - interval '1 day' AND s.queued_at < last_queued + interval '1 day';
        guard.undo_since := least(guard.undo_since, earliest);
        guard.open_since := clock_timestamp();
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        SELECT 'guard_opened', t.environment, t.topic, worst,
               format('suspects would silence %s tokens within a day, of %s active ones; more than %s are held', worst, active_tokens, most)
        FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    ELSIF guard.open_since IS NOT NULL AND (worst <= most / 2 OR most = 'infinity') AND NOT EXISTS (
        -- These may be old ones, and the trouble of a later day.
        SELECT FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic AND c.bucket > last_queued AND c.tokens > 0) THEN
        turn := 'closed';
        guard.open_since := NULL;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        SELECT 'guard_closed', t.environment, t.topic, worst, format('suspects silence %s tokens within a day', worst)
        FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    END IF;
    UPDATE tokenkeeper.topic_guard AS g
    SET open_since = guard.open_since, undo_since = guard.undo_since, touched_at = clock_timestamp(),
        tokens = worst, active = coalesce(active_tokens, g.active), max_tokens = nullif(most, 'infinity')
    WHERE g.topic_id = of_topic;
    IF guard.open_since IS NOT NULL THEN
        PERFORM tokenkeeper.note_guard(of_topic, keys, queued);
        fates := array_replace(fates, 'silences', 'held');
    END IF;
    RETURN fates || turn;
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge(integer, bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric) IS
    'The mass-failure guard: the fate of each suspect of a batch. excluded (undone by reinstate), counts (silences nobody), silences, released '
    '(silences, and an operator wants it to), or held; and at the end whether the guard stays as it was, has opened or has closed. '
    'Locks the topic''s guard until the transaction ends.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge(integer, bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric)
    FROM PUBLIC;

CREATE FUNCTION tokenkeeper.close_guards(min_tokens bigint, max_share numeric) RETURNS TABLE (environment text, topic text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    open_one record;
    worst bigint;
    most numeric;
BEGIN
    FOR open_one IN
        SELECT g.topic_id, t.environment, t.topic
        FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id)
        WHERE g.open_since IS NOT NULL AND coalesce(g.touched_at < clock_timestamp() - interval '10 minutes', true)
        FOR NO KEY UPDATE OF g SKIP LOCKED
    LOOP
        worst := tokenkeeper.worst_day(open_one.topic_id, clock_timestamp(), clock_timestamp(), '{}', '{}');
        most := (SELECT g.most FROM tokenkeeper.guard_limit(open_one.topic_id, worst, close_guards.min_tokens, close_guards.max_share) AS g);
        UPDATE tokenkeeper.topic_guard AS g
        SET tokens = worst, max_tokens = nullif(most, 'infinity'), open_since = CASE WHEN worst > most / 2 THEN g.open_since END
        WHERE g.topic_id = open_one.topic_id;
        CONTINUE WHEN worst > most / 2;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        VALUES ('guard_closed', open_one.environment, open_one.topic, worst, format('suspects silence %s tokens within a day', worst));
        environment := open_one.environment;
        topic := open_one.topic;
        RETURN NEXT;
    END LOOP;
END
$$;
COMMENT ON FUNCTION tokenkeeper.close_guards(bigint, numeric) IS
    'Closes the guards of topics that have been quiet for ten minutes and have half as many tokens silenced within the last day as may be; '
    'answers which. Called by the daemons.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.close_guards(bigint, numeric) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.reconsider_guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = new.topic_id AND g.open_since IS NOT NULL;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reconsider_guard() IS 'Has the daemons look at an open guard anew when its limits have changed. A trigger.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reconsider_guard() FROM PUBLIC;
CREATE TRIGGER reconsider_guard AFTER UPDATE OF guard_min_tokens, guard_max_share ON tokenkeeper.topic
    FOR EACH ROW EXECUTE FUNCTION tokenkeeper.reconsider_guard();

-- Recording, as in 0004, with the guard in front -------------------------------------------------------------------

DROP FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[]);
CREATE FUNCTION tokenkeeper.record(
    environments text[],
    topics text[],
    of_topic integer[],
    token_keys bytea[],
    dead_at timestamptz[],
    dead_reason text[],
    suspect_of integer[],
    suspect_at timestamptz[],
    suspect_reason text[],
    suspect_queued_at timestamptz[],
    suspect_released boolean[],
    guard_min_tokens bigint,
    guard_max_share numeric) RETURNS TABLE (fate text, at_position bigint)
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
    fates text[] := array_fill('excluded'::text, ARRAY[cardinality(record.suspect_of)]);
    ordinals integer[];
    heard_at timestamptz[] := array_fill(NULL::timestamptz, ARRAY[total]);
    heard_reason text[] := array_fill(NULL::text, ARRAY[total]);
    judged text[];
    locked bigint[];
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

    IF total > 0 AND cardinality(record.suspect_of) > 0 THEN
        PERFORM set_config('lock_timeout', patience, true);
        FOR n IN 1..cardinality(record.topics) LOOP
            SELECT array_agg(s.ordinal ORDER BY s.ordinal) INTO ordinals
            FROM unnest(record.suspect_of) WITH ORDINALITY AS s (of_token, ordinal) WHERE record.of_topic[s.of_token] = n;
            CONTINUE WHEN ordinals IS NULL;
            BEGIN
                IF topic_ids[n] IS NULL THEN
                    RAISE lock_not_available;
                END IF;
                SELECT tokenkeeper.judge(topic_ids[n], array_agg(record.token_keys[record.suspect_of[o]] ORDER BY o),
                           array_agg(record.suspect_at[o] ORDER BY o), array_agg(record.suspect_queued_at[o] ORDER BY o),
                           array_agg(coalesce(record.suspect_released[o], false) ORDER BY o),
                           array_agg(record.dead_at[record.suspect_of[o]] ORDER BY o),
                           record.guard_min_tokens, record.guard_max_share)
                INTO judged FROM unnest(ordinals) AS o;
            EXCEPTION WHEN lock_not_available THEN
                -- Another daemon, or an operator, is at this topic's guard.
                judged := array_fill('waits'::text, ARRAY[cardinality(ordinals)]) || 'stays'::text;
            END;
            IF judged[cardinality(judged)] <> 'stays' THEN
                RETURN QUERY SELECT judged[cardinality(judged)], n::bigint;
            END IF;
            FOR i IN 1..cardinality(ordinals) LOOP
                fates[ordinals[i]] := judged[i];
            END LOOP;
        END LOOP;
        PERFORM set_config('lock_timeout', '10ms', true);
        -- The latest of each token.
        SELECT array_agg(h.at ORDER BY t.n), array_agg(h.reason ORDER BY t.n) INTO heard_at, heard_reason
        FROM generate_series(1, total) AS t (n)
        LEFT JOIN (
            SELECT DISTINCT ON (s.of_token) s.of_token, s.at, s.reason
            FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, fates) AS s (of_token, at, reason, fate)
            WHERE s.fate IN ('counts', 'silences', 'released')
            ORDER BY s.of_token, s.at DESC, s.reason COLLATE "C" DESC) AS h ON h.of_token = t.n;
    END IF;

    -- All that are missing at once; where that meets a lock, the one that is locked is found by halving.
    WHILE first <= total LOOP
        BEGIN
            WITH added AS (
                INSERT INTO tokenkeeper.ledger AS l
                    (topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, suppressed_since)
                SELECT topic_ids[s.of_topic], s.token_key, s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason, learned
                FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason, heard_at, heard_reason)
                     WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
                WHERE s.position BETWEEN first AND first + many - 1
                  AND topic_ids[s.of_topic] IS NOT NULL AND (s.dead_at IS NOT NULL OR s.suspect_at IS NOT NULL)
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

    WITH said AS MATERIALIZED (
        SELECT s.position, topic_ids[s.of_topic] AS topic_id, s.token_key,
               s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason
        FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason, heard_at, heard_reason)
             WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
        WHERE s.dead_at IS NOT NULL OR s.suspect_at IS NOT NULL
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
    SELECT coalesce(array_agg(s.position), '{}') INTO locked FROM said AS s
    WHERE s.position NOT IN (SELECT o.position FROM old AS o);

    IF cardinality(record.suspect_of) > 0 THEN
        -- Each suspect that counts now is kept for as long as it may be undone; the guard counts those that silence.
        PERFORM tokenkeeper.note_guard(c.topic_id, c.token_keys, c.queued_at) FROM (
            SELECT topic_ids[record.of_topic[s.of_token]] AS topic_id, array_agg(record.token_keys[s.of_token]) AS token_keys,
                   array_agg(s.queued_at) AS queued_at
            FROM unnest(record.suspect_of, record.suspect_queued_at, fates) AS s (of_token, queued_at, fate)
            WHERE s.fate = 'silences' AND s.of_token NOT IN (SELECT unnest(locked))
            GROUP BY 1) AS c;
        INSERT INTO tokenkeeper.suspect (topic_id, token_key, suspect_at, reason, queued_at, silenced)
        SELECT topic_ids[record.of_topic[s.of_token]], record.token_keys[s.of_token], s.at, s.reason, max(s.queued_at),
               bool_or(s.fate = 'silences')
        FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, record.suspect_queued_at, fates)
             AS s (of_token, at, reason, queued_at, fate)
        WHERE s.fate IN ('counts', 'silences', 'released') AND s.of_token NOT IN (SELECT unnest(locked))
        GROUP BY 1, 2, 3, 4
        ON CONFLICT DO NOTHING;
    END IF;
    RETURN QUERY
        SELECT 'locked', l FROM unnest(locked) AS l
        UNION ALL
        SELECT s.fate, s.ordinal FROM unnest(fates) WITH ORDINALITY AS s (fate, ordinal) WHERE s.fate IN ('held', 'waits');
END
$$;
COMMENT ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], integer[], timestamptz[], text[],
                                       timestamptz[], boolean[], bigint, numeric) IS
    'Records what a batch of results says of tokens: each key once, in key order (else two batches may deadlock), with the '
    'greatest dead_at and its reason; and each of their suspects. of_topic points into environments and topics, suspect_of into token_keys, from 1. '
    'Answers what was not recorded: (locked, position in token_keys), which an application holds; (held, position in suspect_of), by the '
    'mass-failure guard, which the caller writes to held_result; (waits, position in suspect_of), because somebody is at the topic''s guard; '
    'and (opened or closed, position in topics) where that guard did.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], integer[], timestamptz[], text[],
                                              timestamptz[], boolean[], bigint, numeric) FROM PUBLIC;

-- What operators do with what is held, and with what came before ----------------------------------------------------

CREATE FUNCTION tokenkeeper.known_topic(topic text, environment text) RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_id integer;
BEGIN
    -- Under an older snapshot one could not see what others have committed while one waited for their lock.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    SELECT t.topic_id INTO found_id FROM tokenkeeper.topic AS t
    WHERE t.topic = known_topic.topic AND t.environment = known_topic.environment;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'topic % is not known in environment %', coalesce(quote_literal(left(known_topic.topic, 512)), 'null'),
            coalesce(quote_literal(left(known_topic.environment, 100)), 'null')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'See tokenkeeper.topic_policy for those that are.';
    END IF;
    RETURN found_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.known_topic(text, text) IS
    'The topic_id of an (environment, topic) that operators name. Raises 22023 when it is not known, 25001 under another isolation level than read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.known_topic(text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.reinstate(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(reinstate.topic, reinstate.environment);
    came_back bigint;
BEGIN
    IF reinstate.since IS NULL OR reinstate.until IS NULL OR NOT isfinite(reinstate.since) OR NOT isfinite(reinstate.until)
        OR reinstate.since > reinstate.until THEN
        RAISE EXCEPTION 'the window is from % to %, expected two finite instants, the earlier one first',
            coalesce(reinstate.since::text, 'null'), coalesce(reinstate.until::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- There is no way back: what has not been sent yet is not excused.
    until := greatest(least(reinstate.until, clock_timestamp()), reinstate.since);
    -- Who records suspects at this moment is waited for, and who comes later sees the exclusion.
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (of_topic) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.topic_id = of_topic AND e.since <= reinstate.since AND e.until >= reinstate.until) THEN
        RETURN 0;
    END IF;
    INSERT INTO tokenkeeper.exclusion (topic_id, since, until) VALUES (of_topic, reinstate.since, reinstate.until);

    -- The ledger first, as a sweep does.
    PERFORM FROM tokenkeeper.ledger AS l
    WHERE l.topic_id = of_topic AND l.token_key IN (
        SELECT s.token_key FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until)
    ORDER BY l.token_key
    FOR NO KEY UPDATE;
    WITH undone AS (
        DELETE FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until
        RETURNING s.token_key, s.silenced
    ), old AS MATERIALIZED (
        SELECT l.*, u.silenced FROM tokenkeeper.ledger AS l
        JOIN (SELECT n.token_key, bool_or(n.silenced) AS silenced FROM undone AS n GROUP BY 1) AS u ON u.token_key = l.token_key
        WHERE l.topic_id = of_topic AND l.suspect_at BETWEEN reinstate.since AND reinstate.until
    ), rest AS MATERIALIZED (
        SELECT o.token_key, o.registered_at, o.suppressed, o.suspect_reason AS undone_reason, o.device_id, o.silenced, s.suspect_at, s.reason,
               greatest(o.dead_at, o.suspect_at, o.unregistered_at, o.superseded_at) AS was_invalidated_at,
               greatest(o.dead_at, s.suspect_at, o.unregistered_at, o.superseded_at) AS invalidated_at
        FROM old AS o
        LEFT JOIN LATERAL (
            SELECT r.suspect_at, r.reason FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = of_topic AND r.token_key = o.token_key
              AND r.suspect_at NOT BETWEEN reinstate.since AND reinstate.until
            ORDER BY r.suspect_at DESC, r.reason DESC LIMIT 1) AS s ON true
    ), gone AS (
        -- What was known by this suspect alone is unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING rest AS r
        WHERE l.topic_id = of_topic AND l.token_key = r.token_key AND r.registered_at = '-infinity' AND r.invalidated_at IS NULL
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET suspect_at = r.suspect_at, suspect_reason = r.reason,
            -- What else suppresses it was learned after the suspect that silenced it, and has its whole retention before it.
            suppressed_since = CASE
                WHEN r.invalidated_at >= r.registered_at THEN CASE WHEN r.silenced THEN clock_timestamp() ELSE l.suppressed_since END END
        FROM rest AS r
        WHERE l.topic_id = of_topic AND l.token_key = r.token_key
          AND NOT (r.registered_at = '-infinity' AND r.invalidated_at IS NULL)
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT of_topic, r.token_key, 'reinstated', 'operator', r.undone_reason, r.device_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    )
    SELECT count(*) INTO came_back FROM rest AS r
    WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false);

    PERFORM tokenkeeper.recount_guard(of_topic);
    UPDATE tokenkeeper.topic_guard AS g
    SET touched_at = NULL, undo_since = CASE WHEN g.undo_since < reinstate.since THEN g.undo_since END
    WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
    VALUES ('reinstated', reinstate.environment, reinstate.topic, came_back,
        format('suspects from %s to %s do not count', reinstate.since, reinstate.until));
    RETURN came_back;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz) IS
    'Undoes suspects: those of the topic whose instant (sent_at) lies in the window, ends included, do not count, now and whenever they arrive; '
    'for good. A window that ends in the future ends now. '
    'Whatever else is known of the token counts again. Answers how many tokens may be sent to again. Raises 22023 for an unknown topic or a window '
    'that is none.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.release_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(release_held.topic, release_held.environment);
    results bigint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(29803, 3); -- Not while forget is at work.
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    WITH gone AS (
        DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic RETURNING h.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts, leaf, released)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, g.attempts, 8, true FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results = 0 THEN
        RETURN 0;
    END IF;
    -- They are true, says a person: so those before them are no sign of a mistake either.
    UPDATE tokenkeeper.suspect AS s SET silenced = false WHERE s.topic_id = of_topic AND s.silenced;
    DELETE FROM tokenkeeper.topic_guard_count AS c WHERE c.topic_id = of_topic;
    UPDATE tokenkeeper.topic_guard AS g SET open_since = NULL, tokens = 0 WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows)
    VALUES ('held_released', release_held.environment, release_held.topic, results);
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.release_held(text, text) IS
    'Lets the held results of a topic count: they go back to the queue, a daemon records them within seconds, and the guard starts anew. '
    'Answers how many. Raises 22023 for an unknown topic.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.release_held(text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.discard_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(discard_held.topic, discard_held.environment);
    results bigint;
BEGIN
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    DELETE FROM tokenkeeper.held_result AS h WHERE h.topic_id = of_topic;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results = 0 THEN
        RETURN 0;
    END IF;
    PERFORM tokenkeeper.recount_guard(of_topic);
    UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = of_topic;
    INSERT INTO tokenkeeper.operation (operation, environment, topic, rows)
    VALUES ('held_discarded', discard_held.environment, discard_held.topic, results);
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.discard_held(text, text) IS
    'Deletes the held results of a topic, which then never count; answers how many. What was recorded before the guard opened still stands: see reinstate. '
    'Raises 22023 for an unknown topic.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.discard_held(text, text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.requeue_rejected(ids bigint[] DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    results bigint;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(29803, 3); -- Not while forget is at work.
    WITH gone AS (
        DELETE FROM tokenkeeper.rejected_result AS r
        WHERE requeue_rejected.ids IS NULL OR r.rejected_id = ANY (requeue_rejected.ids) RETURNING r.*
    )
    INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at, queued_at, attempts)
    SELECT g.environment, g.topic, g.token, g.status, g.body, g.apns_id, g.sent_at, g.queued_at, least(coalesce(g.attempts, 0) + 1, 32767)
    FROM gone AS g;
    GET DIAGNOSTICS results = ROW_COUNT;
    IF results > 0 THEN
        INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('rejected_requeued', results);
    END IF;
    RETURN results;
END
$$;
COMMENT ON FUNCTION tokenkeeper.requeue_rejected(bigint[]) IS
    'Puts rejected results, by their rejected_id, or all, back into the queue, as they are, with their first queued_at; answers how many. Mend them before, '
    'by UPDATE. One that is rejected again counts its attempts.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.requeue_rejected(bigint[]) FROM PUBLIC;

-- What the comments of earlier migrations say, as it is now ----------------------------------------------------------

COMMENT ON VIEW tokenkeeper.token_event IS
    'The history of transitions: registered (the first time only), invalidated, revived, superseded, unregistered_by_app, '
    'late_feedback_ignored, pruned, reinstated; with both instants before and after. Repeated news that changes nothing leaves no event.';
COMMENT ON COLUMN tokenkeeper.ledger.suspect_at IS
    'The latest BadDeviceToken or DeviceTokenNotForTopic that counts: when that request was sent.';
COMMENT ON VIEW tokenkeeper.result_stat IS
    'How many results were taken from the queue, by the hour in which they were, environment, topic, status and reason; each counted in the '
    'transaction that recorded, held or rejected it, the latter with the reason (rejected). Released ones are not counted again.';
