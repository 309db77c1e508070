-- oldest daemon: 0.1.0
--
-- The guard, the counts and the undo at scale: the suspects of all topics of a batch are judged together, tokens are counted by
-- topic and in slices, and reinstate leaves the rows to bounded transactions.

-- Counts -------------------------------------------------------------------------------------------------------------

CREATE TABLE tokenkeeper.token_count_progress (
    topic_id   integer PRIMARY KEY,
    begun_at   timestamptz,
    after_key  bytea,
    tokens     bigint NOT NULL DEFAULT 0,
    counted_at timestamptz,
    counted    bigint
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.token_count_progress IS
    'How far the count of each topic''s tokens has come: a daemon counts in slices, by token_key, and another one can go on from there.';
COMMENT ON COLUMN tokenkeeper.token_count_progress.begun_at IS 'When the count under way began; null when none is.';
COMMENT ON COLUMN tokenkeeper.token_count_progress.after_key IS 'The last token_key that has been counted; null before the first slice.';
COMMENT ON COLUMN tokenkeeper.token_count_progress.tokens IS 'Tokens counted so far.';
COMMENT ON COLUMN tokenkeeper.token_count_progress.counted_at IS 'When the latest complete count began; null when there was none.';
COMMENT ON COLUMN tokenkeeper.token_count_progress.counted IS 'How many tokens the latest complete count found.';

CREATE TABLE tokenkeeper.token_count_part (
    topic_id           integer NOT NULL,
    state              text COLLATE "C" NOT NULL,
    tokens             bigint NOT NULL,
    last_registered_at timestamptz,
    elsewhere          bigint NOT NULL,
    PRIMARY KEY (topic_id, state)
) WITH (fillfactor = 50);
COMMENT ON TABLE tokenkeeper.token_count_part IS
    'The sums of a count under way, which go to token_count when the topic is counted to its end.';

COMMENT ON TABLE tokenkeeper.token_count IS
    'Tokens by topic and state, counted topic by topic by a daemon (at most one hundredth of its time), for status, the share of the '
    'mass-failure guard and that of the sweep. The guard trusts a count for a day.';
COMMENT ON COLUMN tokenkeeper.token_count.counted_at IS
    'When the count of this topic began, or a daemon last saw that nothing has been written since.';

CREATE FUNCTION tokenkeeper.count_tokens(of_topic integer, most integer) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    progress tokenkeeper.token_count_progress;
    last_key bytea;
    -- Greater than every token_key: both ends of a slice are always given, so that any plan finds them in the index.
    to_key bytea := decode(repeat('ff', 513), 'hex');
    elsewhere_id integer;
    slice bigint;
BEGIN
    INSERT INTO tokenkeeper.token_count_progress (topic_id)
    SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic
    ON CONFLICT DO NOTHING;
    SELECT p.* INTO progress FROM tokenkeeper.token_count_progress AS p WHERE p.topic_id = of_topic FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF progress.begun_at IS NULL THEN
        DELETE FROM tokenkeeper.token_count_part AS c WHERE c.topic_id = of_topic;
        progress.begun_at := clock_timestamp();
        progress.after_key := '';
        progress.tokens := 0;
    END IF;
    -- Where this slice ends: null when it reaches the end of the topic.
    PERFORM set_config('enable_bitmapscan', 'off', true);
    SELECT l.token_key INTO last_key FROM tokenkeeper.ledger AS l
    WHERE l.topic_id = of_topic AND l.token_key > progress.after_key
    ORDER BY l.token_key OFFSET greatest(most, 1) - 1 LIMIT 1;
    SELECT o.topic_id INTO elsewhere_id FROM tokenkeeper.topic AS t
    JOIN tokenkeeper.topic AS o ON o.topic = t.topic AND o.environment <> t.environment
    WHERE t.topic_id = of_topic;

    -- The end of the slice was found in the index. Its rows are read in the order of the table, which visits each page once.
    PERFORM set_config('enable_bitmapscan', 'on', true);
    PERFORM set_config('enable_indexscan', 'off', true);
    WITH counted AS (
        SELECT tokenkeeper.state_of(l) AS state, count(*) AS tokens, nullif(max(l.registered_at), '-infinity') AS last_registered_at,
               count(*) FILTER (
                   WHERE elsewhere_id IS NOT NULL AND l.suppressed AND l.registered_at > '-infinity' AND tokenkeeper.state_of(l) = 'suspect'
                     AND EXISTS (SELECT FROM tokenkeeper.ledger AS e WHERE e.topic_id = elsewhere_id AND e.token_key = l.token_key
                                 AND NOT e.suppressed AND e.registered_at > '-infinity')) AS elsewhere
        FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = of_topic AND l.token_key > progress.after_key AND l.token_key <= coalesce(last_key, to_key)
        GROUP BY 1
    ), added AS (
        INSERT INTO tokenkeeper.token_count_part AS c (topic_id, state, tokens, last_registered_at, elsewhere)
        SELECT of_topic, n.state, n.tokens, n.last_registered_at, n.elsewhere FROM counted AS n
        ON CONFLICT (topic_id, state) DO UPDATE SET tokens = c.tokens + excluded.tokens,
            last_registered_at = greatest(c.last_registered_at, excluded.last_registered_at),
            elsewhere = c.elsewhere + excluded.elsewhere
    )
    SELECT coalesce(sum(n.tokens), 0) INTO slice FROM counted AS n;
    PERFORM set_config('enable_indexscan', 'on', true);
    progress.tokens := progress.tokens + slice;
    IF last_key IS NOT NULL THEN
        UPDATE tokenkeeper.token_count_progress AS p
        SET begun_at = progress.begun_at, after_key = last_key, tokens = progress.tokens WHERE p.topic_id = of_topic;
        RETURN slice;
    END IF;

    DELETE FROM tokenkeeper.token_count AS c WHERE c.topic_id = of_topic AND NOT EXISTS (
        SELECT FROM tokenkeeper.token_count_part AS n WHERE n.topic_id = of_topic AND n.state = c.state);
    INSERT INTO tokenkeeper.token_count AS c (topic_id, state, tokens, last_registered_at, elsewhere, counted_at)
    SELECT n.topic_id, n.state, n.tokens, n.last_registered_at, n.elsewhere, progress.begun_at
    FROM tokenkeeper.token_count_part AS n WHERE n.topic_id = of_topic
    ON CONFLICT (topic_id, state) DO UPDATE SET tokens = excluded.tokens, counted_at = excluded.counted_at,
        last_registered_at = excluded.last_registered_at, elsewhere = excluded.elsewhere;
    DELETE FROM tokenkeeper.token_count_part AS c WHERE c.topic_id = of_topic;
    UPDATE tokenkeeper.token_count_progress AS p
    SET begun_at = NULL, after_key = NULL, tokens = 0, counted_at = progress.begun_at, counted = progress.tokens WHERE p.topic_id = of_topic;
    RETURN slice;
END
$$;
COMMENT ON FUNCTION tokenkeeper.count_tokens(integer, integer) IS
    'Counts the next slice of a topic, at most so many tokens, and publishes the count in token_count when it reaches the end. Returns how '
    'many tokens it has counted; null when the topic is gone or another daemon counts it at this moment.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.count_tokens(integer, integer) FROM PUBLIC;

-- The guard ----------------------------------------------------------------------------------------------------------

ALTER TABLE tokenkeeper.topic_guard ADD COLUMN active_as_of timestamptz;
COMMENT ON COLUMN tokenkeeper.topic_guard.active IS 'The active tokens of the topic when suspects were last judged.';
COMMENT ON COLUMN tokenkeeper.topic_guard.active_as_of IS
    'When the guard itself counted the active tokens, for lack of a fresh token_count; it trusts that for ten minutes.';

DROP FUNCTION tokenkeeper.judge(integer, bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric);
DROP FUNCTION tokenkeeper.worst_day(integer, timestamptz, timestamptz, bytea[], timestamptz[]);
DROP FUNCTION tokenkeeper.note_guard(integer, bytea[], timestamptz[]);
DROP FUNCTION tokenkeeper.guard_changes(integer, bytea[], timestamptz[]);
DROP FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric);

CREATE FUNCTION tokenkeeper.guard_changes(of_topic integer[], token_keys bytea[], queued_at timestamptz[])
RETURNS TABLE (topic_id integer, bucket timestamptz, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT a.topic_id, a.token_key, tokenkeeper.guard_bucket(a.queued_at) AS bucket
        FROM unnest(guard_changes.of_topic, guard_changes.token_keys, guard_changes.queued_at) AS a (topic_id, token_key, queued_at)
        WHERE a.token_key IS NOT NULL
    ), known AS MATERIALIZED (
        SELECT DISTINCT k.topic_id, k.token_key, tokenkeeper.guard_bucket(e.queued_at) AS bucket
        FROM (SELECT DISTINCT a.topic_id, a.token_key FROM asked AS a) AS k
        CROSS JOIN LATERAL (
            SELECT h.queued_at FROM tokenkeeper.held_result AS h WHERE h.topic_id = k.topic_id AND h.token_key = k.token_key
            UNION ALL
            SELECT s.queued_at FROM tokenkeeper.suspect AS s
            WHERE s.topic_id = k.topic_id AND s.token_key = k.token_key AND s.silenced) AS e
    ), before AS (
        SELECT k.topic_id, k.bucket, lead(k.bucket) OVER (PARTITION BY k.topic_id, k.token_key ORDER BY k.bucket) AS next FROM known AS k
    ), after AS (
        SELECT b.topic_id, b.bucket, lead(b.bucket) OVER (PARTITION BY b.topic_id, b.token_key ORDER BY b.bucket) AS next
        FROM (SELECT * FROM known UNION SELECT * FROM asked) AS b
    )
    SELECT c.topic_id, c.bucket, sum(c.tokens)::bigint FROM (
        SELECT a.topic_id, a.bucket, 1 AS tokens FROM after AS a WHERE a.next IS NULL OR a.next - a.bucket > interval '1 day'
        UNION ALL
        SELECT b.topic_id, b.bucket, -1 FROM before AS b WHERE b.next IS NULL OR b.next - b.bucket > interval '1 day') AS c
    GROUP BY 1, 2 HAVING sum(c.tokens) <> 0
$$;
COMMENT ON FUNCTION tokenkeeper.guard_changes(integer[], bytea[], timestamptz[]) IS
    'What suspects of these tokens, queued then, change in topic_guard_count: a token counts once a day, where its last suspect of that day is.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_changes(integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.note_guard(of_topic integer[], token_keys bytea[], queued_at timestamptz[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO tokenkeeper.topic_guard_count AS c (topic_id, bucket, tokens)
    SELECT g.topic_id, g.bucket, g.tokens FROM tokenkeeper.guard_changes(note_guard.of_topic, note_guard.token_keys, note_guard.queued_at) AS g
    WHERE g.tokens > 0 OR EXISTS (SELECT FROM tokenkeeper.topic_guard_count AS k WHERE k.topic_id = g.topic_id AND k.bucket = g.bucket)
    -- A bucket that the sweep has deleted must not become negative.
    ON CONFLICT (topic_id, bucket) DO UPDATE SET tokens = greatest(c.tokens + excluded.tokens, 0)
$$;
COMMENT ON FUNCTION tokenkeeper.note_guard(integer[], bytea[], timestamptz[]) IS
    'Counts suspects in topic_guard_count; called before they are written to held_result or suspect, with the guards of their topics locked.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_guard(integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.guard_tally(of_topic integer, token_keys bytea[]) RETURNS TABLE (bucket timestamptz, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
    SELECT l.bucket, count(*) FROM (
        SELECT k.bucket, lead(k.bucket) OVER (PARTITION BY k.token_key ORDER BY k.bucket) AS next FROM (
            SELECT DISTINCT a.token_key, tokenkeeper.guard_bucket(e.queued_at) AS bucket
            FROM unnest(guard_tally.token_keys) AS a (token_key)
            CROSS JOIN LATERAL (
                SELECT h.queued_at FROM tokenkeeper.held_result AS h WHERE h.topic_id = guard_tally.of_topic AND h.token_key = a.token_key
                UNION ALL
                SELECT s.queued_at FROM tokenkeeper.suspect AS s
                WHERE s.topic_id = guard_tally.of_topic AND s.token_key = a.token_key AND s.silenced) AS e) AS k) AS l
    WHERE l.next IS NULL OR l.next - l.bucket > interval '1 day'
    GROUP BY l.bucket
$$;
COMMENT ON FUNCTION tokenkeeper.guard_tally(integer, bytea[]) IS
    'What these tokens contribute to topic_guard_count: taken before and after some of their suspects go, the difference is what to subtract.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_tally(integer, bytea[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.worst_day(of_topic integer[], token_keys bytea[], queued_at timestamptz[])
RETURNS TABLE (topic_id integer, tokens bigint)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    WITH span AS MATERIALIZED (
        SELECT a.topic_id, min(a.queued_at) AS since, max(a.queued_at) AS until
        FROM unnest(worst_day.of_topic, worst_day.queued_at) AS a (topic_id, queued_at) GROUP BY 1
    ), count AS (
        SELECT s.topic_id, c.bucket, c.tokens, NULL::timestamptz AS since, NULL::timestamptz AS until
        FROM span AS s
        CROSS JOIN LATERAL (
            SELECT k.bucket, k.tokens FROM tokenkeeper.topic_guard_count AS k
            WHERE k.topic_id = s.topic_id AND k.bucket BETWEEN s.since - interval '25:00' AND s.until + interval '25:00') AS c
        UNION ALL
        SELECT g.topic_id, g.bucket, g.tokens, NULL, NULL
        FROM tokenkeeper.guard_changes(worst_day.of_topic, worst_day.token_keys, worst_day.queued_at) AS g
        UNION ALL
        SELECT s.topic_id, tokenkeeper.guard_bucket(s.until), 0, s.since, s.until FROM span AS s -- So that there is a day that ends there.
    ), bucket AS (
        SELECT c.topic_id, c.bucket, sum(c.tokens) AS tokens, max(c.since) AS since, max(c.until) AS until FROM count AS c GROUP BY 1, 2
    ), day AS (
        SELECT b.topic_id, b.bucket,
               sum(b.tokens) OVER (PARTITION BY b.topic_id ORDER BY b.bucket RANGE BETWEEN '24:00' PRECEDING AND CURRENT ROW) AS tokens,
               -- Not a join with span: a plan for ten topics would compare each with all.
               max(b.since) OVER (PARTITION BY b.topic_id) AS since, max(b.until) OVER (PARTITION BY b.topic_id) AS until
        FROM bucket AS b
    )
    SELECT d.topic_id, greatest(max(d.tokens), 0)::bigint FROM day AS d
    WHERE d.bucket BETWEEN tokenkeeper.guard_bucket(d.since) AND d.until + interval '24:00'
    GROUP BY 1
$$;
COMMENT ON FUNCTION tokenkeeper.worst_day(integer[], bytea[], timestamptz[]) IS
    'By topic, the most tokens that suspects have silenced, or would have, in any day of queued_at that touches those given; the given tokens included. '
    'A null token_key only says which day is meant.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.worst_day(integer[], bytea[], timestamptz[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.guard_limit(
    of_topic integer, worst bigint, INOUT min_tokens bigint, INOUT max_share numeric, OUT active_tokens bigint, OUT most numeric,
    OUT counted_at timestamptz)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
DECLARE
    -- Read in key order, from all over the table: 20 ms from memory, 200 ms from a disk, once in ten minutes.
    most_looked CONSTANT integer := 30000;
    looked bigint;
    latest timestamptz;
BEGIN
    SELECT coalesce(t.guard_min_tokens, guard_limit.min_tokens), coalesce(t.guard_max_share, guard_limit.max_share)
    INTO min_tokens, max_share FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic;
    most := min_tokens;
    IF max_share >= 1 THEN
        most := 'infinity';
    ELSIF worst > min_tokens / 2 THEN
        -- A topic that has been counted and has no active row has no active token.
        SELECT max(c.counted_at), coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)
        INTO latest, active_tokens FROM tokenkeeper.token_count AS c WHERE c.topic_id = of_topic;
        IF latest IS NULL OR latest < clock_timestamp() - interval '1 day' THEN
            SELECT g.active INTO looked FROM tokenkeeper.topic_guard AS g
            WHERE g.topic_id = of_topic AND g.active_as_of > clock_timestamp() - interval '10 minutes';
            IF looked IS NOT NULL THEN
                active_tokens := looked;
            ELSE
                -- Not counted lately. Of a large topic this is a lower bound: an old count is the better estimate then.
                SELECT count(*), CASE WHEN count(*) = most_looked THEN greatest(active_tokens, count(*) FILTER (WHERE a.active))
                                      ELSE count(*) FILTER (WHERE a.active) END
                INTO looked, active_tokens
                FROM (SELECT NOT l.suppressed AND l.registered_at > '-infinity' AS active FROM tokenkeeper.ledger AS l
                      WHERE l.topic_id = of_topic LIMIT most_looked) AS a;
                IF looked >= most_looked / 10 THEN
                    counted_at := clock_timestamp();
                END IF;
            END IF;
        END IF;
        most := greatest(min_tokens, floor(active_tokens * max_share));
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) IS
    'How many tokens suspects may silence within a day, by the topic''s policy or else the given limits; infinity where the guard is off. '
    'The active tokens are looked up only where worst comes near it: from a count of the last day, or else by looking at 30,000 tokens at '
    'most; counted_at is then set when the caller is to keep that in topic_guard.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.guard_limit(integer, bigint, bigint, numeric) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.judge(
    of_topic integer[],
    token_keys bytea[],
    suspect_at timestamptz[],
    queued_at timestamptz[],
    released boolean[],
    dead_at timestamptz[],
    min_tokens bigint,
    max_share numeric,
    OUT fates text[],
    OUT opened integer[],
    OUT closed integer[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    topics integer[] := ARRAY(SELECT DISTINCT t FROM unnest(judge.of_topic) AS t WHERE t IS NOT NULL ORDER BY t);
    lacking integer[];
    guarded integer[];
    one record;
    most numeric;
    active_tokens bigint;
    as_of timestamptz;
    turn text;
    held integer[] := '{}';
    seen integer[] := '{}';
    seen_open timestamptz[] := '{}';
    seen_undo timestamptz[] := '{}';
    seen_worst bigint[] := '{}';
    seen_active bigint[] := '{}';
    seen_as_of timestamptz[] := '{}';
    seen_most numeric[] := '{}';
BEGIN
    opened := '{}';
    closed := '{}';
    lacking := ARRAY(SELECT t FROM unnest(topics) AS t
                     WHERE NOT EXISTS (SELECT FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = t) ORDER BY t);
    IF lacking <> '{}' THEN
        BEGIN
            INSERT INTO tokenkeeper.topic_guard (topic_id) SELECT t FROM unnest(lacking) AS t ORDER BY t ON CONFLICT DO NOTHING;
        EXCEPTION WHEN lock_not_available THEN
            NULL; -- Another daemon adds one of them at this moment: those not there yet wait.
        END;
    END IF;
    -- Until the end of the transaction: judged one after the other, each with all before it included. A guard that another daemon or an
    -- operator holds keeps only its own topic's suspects waiting.
    guarded := ARRAY(SELECT g.topic_id FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = ANY (topics)
                     ORDER BY g.topic_id FOR UPDATE SKIP LOCKED);
    lacking := ARRAY(SELECT unnest(topics) EXCEPT SELECT unnest(guarded) ORDER BY 1);
    IF lacking <> '{}' THEN
        -- One lock timeout for all of them, not one for each.
        BEGIN
            PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = lacking[1] FOR UPDATE;
            guarded := guarded || ARRAY(SELECT g.topic_id FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = ANY (lacking)
                                        ORDER BY g.topic_id FOR UPDATE SKIP LOCKED);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END IF;

    SELECT array_agg(j.fate ORDER BY j.n) INTO fates FROM (
        SELECT s.n, CASE
                   WHEN s.topic_id IS NULL OR s.topic_id NOT IN (SELECT unnest(guarded)) THEN 'waits'
                   WHEN EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                                WHERE e.topic_id = s.topic_id AND s.suspect_at BETWEEN e.since AND e.until) THEN 'excluded'
                   -- A token that may be sent to, an unknown one included, and that this would silence.
                   WHEN NOT coalesce(NOT l.suppressed AND s.suspect_at >= l.registered_at
                                     AND NOT coalesce(s.dead_at >= l.registered_at, false), s.dead_at IS NULL) THEN 'counts'
                   WHEN s.released THEN 'released'
                   ELSE 'silences' END AS fate
        FROM unnest(judge.of_topic, judge.token_keys, judge.suspect_at, judge.released, judge.dead_at)
             WITH ORDINALITY AS s (topic_id, token_key, suspect_at, released, dead_at, n)
        LEFT JOIN tokenkeeper.ledger AS l ON l.topic_id = s.topic_id AND l.token_key = s.token_key) AS j;

    FOR one IN
        WITH judged AS MATERIALIZED (
            SELECT * FROM unnest(judge.of_topic, judge.token_keys, judge.suspect_at, judge.queued_at, judge.fates)
                     AS s (topic_id, token_key, suspect_at, queued_at, fate)
            WHERE s.fate IN ('silences', 'counts')
        ), worst AS MATERIALIZED (
            SELECT w.topic_id, w.tokens FROM tokenkeeper.worst_day(
                ARRAY(SELECT j.topic_id FROM judged AS j WHERE j.fate = 'silences'),
                ARRAY(SELECT j.token_key FROM judged AS j WHERE j.fate = 'silences'),
                ARRAY(SELECT j.queued_at FROM judged AS j WHERE j.fate = 'silences')) AS w
        ), topic AS MATERIALIZED (
            SELECT j.topic_id,
                   -- Where an undo has to begin: with what silences, or came along for tokens that were dead already. One that was sent
                   -- long before it was queued must not stretch it over years; unless all were.
                   coalesce(min(j.suspect_at) FILTER (WHERE j.suspect_at > j.queued_at - interval '1 day'),
                            min(j.suspect_at) FILTER (WHERE j.fate = 'silences')) AS earliest,
                   min(j.queued_at) FILTER (WHERE j.fate = 'silences') AS first_queued,
                   max(j.queued_at) FILTER (WHERE j.fate = 'silences') AS last_queued,
                   0 AS tokens
            FROM judged AS j GROUP BY 1
        ), by_topic AS (
            -- Not a join: a plan for ten topics would compare each with all.
            SELECT b.topic_id, max(b.earliest) AS earliest, max(b.first_queued) AS first_queued, max(b.last_queued) AS last_queued,
                   max(b.tokens)::bigint AS worst
            FROM (SELECT * FROM topic UNION ALL SELECT w.topic_id, NULL, NULL, NULL, w.tokens FROM worst AS w) AS b GROUP BY 1
        )
        SELECT b.*, g.open_since, g.undo_since, t.guard_min_tokens, t.guard_max_share
        FROM by_topic AS b
        CROSS JOIN LATERAL (SELECT k.open_since, k.undo_since FROM tokenkeeper.topic_guard AS k WHERE k.topic_id = b.topic_id) AS g
        CROSS JOIN LATERAL (SELECT k.guard_min_tokens, k.guard_max_share FROM tokenkeeper.topic AS k WHERE k.topic_id = b.topic_id) AS t
        ORDER BY b.topic_id
    LOOP
        turn := 'stays';
        IF one.open_since IS NOT NULL AND one.earliest < one.undo_since THEN
            one.undo_since := one.earliest;
            turn := 'reaches back';
        END IF;
        IF one.first_queued IS NULL THEN
            IF turn <> 'stays' THEN
                UPDATE tokenkeeper.topic_guard AS g SET undo_since = one.undo_since WHERE g.topic_id = one.topic_id;
            END IF;
            CONTINUE;
        END IF;
        most := coalesce(one.guard_min_tokens, judge.min_tokens);
        active_tokens := NULL;
        as_of := NULL;
        IF coalesce(one.guard_max_share, judge.max_share) >= 1 THEN
            most := 'infinity';
        ELSIF one.worst > most / 2 THEN
            SELECT g.active_tokens, g.most, g.counted_at INTO active_tokens, most, as_of
            FROM tokenkeeper.guard_limit(one.topic_id, one.worst, judge.min_tokens, judge.max_share) AS g;
        END IF;

        IF one.open_since IS NULL AND one.worst > most THEN
            opened := opened || one.topic_id;
            SELECT least(one.earliest, min(s.suspect_at) FILTER (
                WHERE s.suspect_at > s.queued_at - interval '1 day' OR (s.silenced AND one.earliest <= one.first_queued - interval '1 day')))
            INTO one.undo_since
            FROM tokenkeeper.suspect AS s
            WHERE s.topic_id = one.topic_id AND s.queued_at > one.first_queued - interval '1 day'
              AND s.queued_at < one.last_queued + interval '1 day'
              -- What is being undone needs no other undo.
              AND NOT EXISTS (SELECT FROM tokenkeeper.exclusion AS e
                              WHERE e.topic_id = s.topic_id AND s.suspect_at BETWEEN e.since AND e.until);
            one.open_since := clock_timestamp();
            INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
            SELECT 'guard_opened', t.environment, t.topic, one.worst,
                   format('suspects would silence %s tokens within a day, of %s active ones; more than %s are held', one.worst, active_tokens, most)
            FROM tokenkeeper.topic AS t WHERE t.topic_id = one.topic_id;
        ELSIF one.open_since IS NOT NULL AND (one.worst <= most / 2 OR most = 'infinity') AND NOT EXISTS (
            -- These may be old ones, and the trouble of a later day.
            SELECT FROM tokenkeeper.topic_guard_count AS c
            WHERE c.topic_id = one.topic_id AND c.bucket > one.last_queued AND c.tokens > 0) THEN
            closed := closed || one.topic_id;
            one.open_since := NULL;
            INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
            SELECT 'guard_closed', t.environment, t.topic, one.worst, format('suspects silence %s tokens within a day', one.worst)
            FROM tokenkeeper.topic AS t WHERE t.topic_id = one.topic_id;
        END IF;
        IF one.open_since IS NOT NULL THEN
            held := held || one.topic_id;
        END IF;
        seen := seen || one.topic_id;
        seen_open := seen_open || one.open_since;
        seen_undo := seen_undo || one.undo_since;
        seen_worst := seen_worst || one.worst;
        seen_active := seen_active || active_tokens;
        seen_as_of := seen_as_of || as_of;
        seen_most := seen_most || nullif(most, 'infinity');
    END LOOP;
    UPDATE tokenkeeper.topic_guard AS g
    SET open_since = s.open_since, undo_since = s.undo_since, touched_at = clock_timestamp(), tokens = s.worst,
        active = coalesce(s.active, g.active), active_as_of = coalesce(s.as_of, g.active_as_of), max_tokens = s.most
    FROM unnest(seen, seen_open, seen_undo, seen_worst, seen_active, seen_as_of, seen_most)
         AS s (topic_id, open_since, undo_since, worst, active, as_of, most)
    WHERE g.topic_id = s.topic_id;
    IF held <> '{}' THEN
        SELECT array_agg(CASE WHEN s.fate = 'silences' AND s.topic_id IN (SELECT unnest(held)) THEN 'held' ELSE s.fate END ORDER BY s.n)
        INTO fates FROM unnest(judge.of_topic, judge.fates) WITH ORDINALITY AS s (topic_id, fate, n);
        PERFORM tokenkeeper.note_guard(array_agg(s.topic_id), array_agg(s.token_key), array_agg(s.queued_at))
        FROM unnest(judge.of_topic, judge.token_keys, judge.queued_at, judge.fates) AS s (topic_id, token_key, queued_at, fate)
        WHERE s.fate = 'held';
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.judge(integer[], bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric) IS
    'The mass-failure guard: the fate of each suspect of a batch. waits (somebody is at the topic''s guard, or the topic is null), excluded (undone by '
    'reinstate), counts (silences nobody), silences, released (silences, and an operator wants it to), or held; and the topics whose guard has opened '
    'or closed. Locks the guards of these topics until the transaction ends.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.judge(integer[], bytea[], timestamptz[], timestamptz[], boolean[], timestamptz[], bigint, numeric)
    FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.close_guards(min_tokens bigint, max_share numeric) RETURNS TABLE (environment text, topic text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    open_one record;
    worst bigint;
    limits record;
BEGIN
    FOR open_one IN
        SELECT g.topic_id, t.environment, t.topic
        FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id)
        WHERE g.open_since IS NOT NULL AND coalesce(g.touched_at < clock_timestamp() - interval '10 minutes', true)
        FOR NO KEY UPDATE OF g SKIP LOCKED
    LOOP
        SELECT w.tokens INTO worst
        FROM tokenkeeper.worst_day(ARRAY[open_one.topic_id], ARRAY[NULL::bytea], ARRAY[clock_timestamp()]) AS w;
        SELECT g.* INTO limits FROM tokenkeeper.guard_limit(open_one.topic_id, worst, close_guards.min_tokens, close_guards.max_share) AS g;
        UPDATE tokenkeeper.topic_guard AS g
        SET tokens = worst, max_tokens = nullif(limits.most, 'infinity'),
            active = CASE WHEN limits.counted_at IS NULL THEN g.active ELSE limits.active_tokens END,
            active_as_of = coalesce(limits.counted_at, g.active_as_of),
            open_since = CASE WHEN worst > limits.most / 2 THEN g.open_since END
        WHERE g.topic_id = open_one.topic_id;
        CONTINUE WHEN worst > limits.most / 2;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        VALUES ('guard_closed', open_one.environment, open_one.topic, worst, format('suspects silence %s tokens within a day', worst));
        environment := open_one.environment;
        topic := open_one.topic;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Recording, as in 0010 but for the topics, the judging and the clock -------------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.record(
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
    waited_since timestamptz;
    patience text := current_setting('lock_timeout');
    total integer := cardinality(record.token_keys);
    first integer := 1;
    many integer;
    locked_until integer := 0;
    fates text[] := array_fill('excluded'::text, ARRAY[cardinality(record.suspect_of)]);
    heard_at timestamptz[] := array_fill(NULL::timestamptz, ARRAY[total]);
    heard_reason text[] := array_fill(NULL::text, ARRAY[total]);
    opened integer[];
    closed integer[];
    left_over bigint[];
    new_topics integer[];
    new_keys bytea[];
    new_dead_at timestamptz[];
    new_dead_reason text[];
    new_suspect_at timestamptz[];
    new_suspect_reason text[];
    locked bigint[] := '{}';
BEGIN
    topic_ids := ARRAY(
        SELECT (SELECT t.topic_id FROM tokenkeeper.topic AS t
                WHERE t.topic = n.topic COLLATE "C" AND t.environment = n.environment COLLATE "C")
        FROM unnest(record.topics, record.environments) WITH ORDINALITY AS n (topic, environment, position) ORDER BY n.position);
    IF array_position(topic_ids, NULL) IS NOT NULL THEN
        -- A topic that is new may be about to be added by an application, and an INSERT would wait for that: 10 ms at most. From here on
        -- an application may wait for this transaction.
        waited_since := clock_timestamp();
        PERFORM set_config('lock_timeout', '10ms', true);
        FOR n IN 1..cardinality(record.topics) LOOP
            CONTINUE WHEN topic_ids[n] IS NOT NULL;
            BEGIN
                found_id := tokenkeeper.ensure_topic(record.environments[n], record.topics[n]);
            EXCEPTION WHEN lock_not_available THEN
                found_id := NULL;
            END;
            topic_ids[n] := found_id;
            -- Each of them may wait; and each that fails to wait goes on in another batch.
            EXIT WHEN clock_timestamp() > waited_since + interval '100 ms';
        END LOOP;
        PERFORM set_config('lock_timeout', patience, true);
    END IF;

    IF total > 0 AND cardinality(record.suspect_of) > 0 THEN
        SELECT j.fates, j.opened, j.closed INTO fates, opened, closed
        FROM (SELECT array_agg(topic_ids[record.of_topic[s.of_token]] ORDER BY s.n) AS of_topic,
                     array_agg(record.token_keys[s.of_token] ORDER BY s.n) AS token_keys,
                     array_agg(coalesce(s.released, false) ORDER BY s.n) AS released,
                     array_agg(record.dead_at[s.of_token] ORDER BY s.n) AS dead_at
              FROM unnest(record.suspect_of, record.suspect_released) WITH ORDINALITY AS s (of_token, released, n)) AS a
        CROSS JOIN LATERAL tokenkeeper.judge(a.of_topic, a.token_keys, record.suspect_at, record.suspect_queued_at, a.released, a.dead_at,
                                             record.guard_min_tokens, record.guard_max_share) AS j;
        IF opened <> '{}' OR closed <> '{}' THEN
            RETURN QUERY
                SELECT CASE WHEN t.topic_id = ANY (opened) THEN 'opened' ELSE 'closed' END, t.position
                FROM unnest(topic_ids) WITH ORDINALITY AS t (topic_id, position)
                WHERE t.topic_id = ANY (opened) OR t.topic_id = ANY (closed);
        END IF;
        -- The latest of each token.
        SELECT array_agg(h.at ORDER BY t.n), array_agg(h.reason ORDER BY t.n) INTO heard_at, heard_reason
        FROM generate_series(1, total) AS t (n)
        LEFT JOIN (
            SELECT DISTINCT ON (s.of_token) s.of_token, s.at, s.reason
            FROM unnest(record.suspect_of, record.suspect_at, record.suspect_reason, fates) AS s (of_token, at, reason, fate)
            WHERE s.fate IN ('counts', 'silences', 'released')
            ORDER BY s.of_token, s.at DESC, s.reason COLLATE "C" DESC) AS h ON h.of_token = t.n;
    END IF;

    -- From the first lock on the ledger an application may wait for this transaction. It cannot wait for the guards that were locked before:
    -- only other daemons and operators come to those, and forget, which waits for this batch before it asks for them.
    waited_since := coalesce(waited_since, clock_timestamp());
    -- What is known comes first. Its row is found and locked once, and then changed where it was found.
    WITH said AS MATERIALIZED (
        SELECT s.position, topic_ids[s.of_topic] AS topic_id, s.token_key,
               s.dead_at, s.dead_reason, s.suspect_at, s.suspect_reason
        FROM unnest(record.of_topic, record.token_keys, record.dead_at, record.dead_reason, heard_at, heard_reason)
             WITH ORDINALITY AS s (of_topic, token_key, dead_at, dead_reason, suspect_at, suspect_reason, position)
        WHERE s.dead_at IS NOT NULL OR s.suspect_at IS NOT NULL
    ), old AS MATERIALIZED (
        -- The daemon yields to the application: a row that somebody holds is skipped here and told to the caller.
        SELECT s.position, l.place, l.registered_at, l.suppressed, l.suppressed_since, l.device_id,
               l.unregistered_at, l.superseded_at, l.dead_at AS was_dead_at, l.suspect_at AS was_suspect_at,
               l.moves & 1 > 0 AS dead_moves, l.moves & 2 > 0 AS suspect_moves,
               CASE WHEN l.moves & 1 > 0 THEN s.dead_at ELSE l.dead_at END AS dead_at,
               CASE WHEN l.moves & 1 > 0 THEN s.dead_reason ELSE l.dead_reason END AS dead_reason,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_at ELSE l.suspect_at END AS suspect_at,
               CASE WHEN l.moves & 2 > 0 THEN s.suspect_reason ELSE l.suspect_reason END AS suspect_reason
        FROM said AS s
        -- A subquery for each, and not a join: no plan, however old, can then do else than look them up one by one, in order.
        CROSS JOIN LATERAL (
            SELECT k.ctid AS place, k.registered_at, k.suppressed, k.suppressed_since, k.device_id, k.unregistered_at, k.superseded_at,
                   k.dead_at, k.dead_reason, k.suspect_at, k.suspect_reason,
                   CASE WHEN coalesce((s.dead_at, s.dead_reason COLLATE "C") > (k.dead_at, k.dead_reason), s.dead_at IS NOT NULL) THEN 1 ELSE 0 END
                   + CASE WHEN coalesce((s.suspect_at, s.suspect_reason COLLATE "C") > (k.suspect_at, k.suspect_reason), s.suspect_at IS NOT NULL)
                          THEN 2 ELSE 0 END AS moves
            FROM tokenkeeper.ledger AS k WHERE k.topic_id = s.topic_id AND k.token_key = s.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET dead_at = o.dead_at, dead_reason = o.dead_reason, suspect_at = o.suspect_at, suspect_reason = o.suspect_reason,
            suppressed_since = CASE
                WHEN o.suppressed THEN o.suppressed_since
                WHEN greatest(o.dead_at, o.suspect_at, o.unregistered_at, o.superseded_at) >= o.registered_at THEN learned END
        FROM old AS o
        -- One that an application has changed since this statement began is not seen at its new place: it is told like a locked one.
        WHERE l.ctid = o.place AND (o.dead_moves OR o.suspect_moves)
        RETURNING o.position, l.topic_id, l.token_key, o.registered_at, l.suppressed, o.suppressed AS was_suppressed, l.device_id,
            o.dead_moves, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason, l.unregistered_at, l.superseded_at,
            o.was_dead_at, o.was_suspect_at
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT n.topic_id, n.token_key,
               CASE WHEN n.suppressed THEN 'invalidated' ELSE 'late_feedback_ignored' END,
               c.cause, CASE c.cause WHEN 'dead' THEN n.dead_reason WHEN 'suspect' THEN n.suspect_reason END, n.device_id,
               nullif(n.registered_at, '-infinity'), nullif(n.registered_at, '-infinity'),
               greatest(n.was_dead_at, n.was_suspect_at, n.unregistered_at, n.superseded_at),
               greatest(n.dead_at, n.suspect_at, n.unregistered_at, n.superseded_at)
        FROM changed AS n
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN n.suppressed THEN tokenkeeper.cause_of(n.dead_at, n.suspect_at, n.unregistered_at, n.superseded_at)
                WHEN n.dead_moves THEN 'dead' ELSE 'suspect' END AS cause) AS c
        WHERE NOT n.was_suppressed
           OR c.cause <> tokenkeeper.cause_of(n.was_dead_at, n.was_suspect_at, n.unregistered_at, n.superseded_at)
    )
    -- NOT IN is hashed; NOT EXISTS would be a nested loop, because the planner takes an unnested array for ten rows.
    SELECT coalesce(array_agg(s.position ORDER BY s.position), '{}'), array_agg(s.topic_id ORDER BY s.position),
           array_agg(s.token_key ORDER BY s.position), array_agg(s.dead_at ORDER BY s.position),
           array_agg(s.dead_reason ORDER BY s.position), array_agg(s.suspect_at ORDER BY s.position),
           array_agg(s.suspect_reason ORDER BY s.position)
    INTO left_over, new_topics, new_keys, new_dead_at, new_dead_reason, new_suspect_at, new_suspect_reason
    FROM said AS s
    WHERE s.position NOT IN (
        SELECT c.position FROM changed AS c UNION ALL SELECT o.position FROM old AS o WHERE NOT o.dead_moves AND NOT o.suspect_moves);

    -- What is left over is new, or in somebody's hands. One that an application is about to add would make the INSERT wait, while rows
    -- are locked here that the same application may come to want: so with very little patience, all at once; where that meets a lock, the
    -- one that is locked is found by halving. And only as long as nobody who waits for this transaction can have begun to look for
    -- a deadlock: it would be the application that is ended, and not this.
    PERFORM set_config('lock_timeout', '3ms', true);
    many := greatest(cardinality(left_over), 1);
    WHILE first <= cardinality(left_over) LOOP
        IF clock_timestamp() > waited_since + current_setting('deadlock_timeout')::interval / 2 THEN
            -- Then they can all wait.
            locked := locked || left_over[first:];
            EXIT;
        END IF;
        BEGIN
            WITH wanted AS MATERIALIZED (
                SELECT s.*
                FROM unnest(left_over, new_topics, new_keys, new_dead_at, new_dead_reason, new_suspect_at, new_suspect_reason)
                     WITH ORDINALITY AS s (position, topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, n)
                WHERE s.n BETWEEN first AND first + many - 1
            ), added AS (
                INSERT INTO tokenkeeper.ledger AS l
                    (topic_id, token_key, dead_at, dead_reason, suspect_at, suspect_reason, suppressed_since)
                SELECT w.topic_id, w.token_key, w.dead_at, w.dead_reason, w.suspect_at, w.suspect_reason, learned
                FROM wanted AS w
                WHERE w.topic_id IS NOT NULL
                  AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS e WHERE e.topic_id = w.topic_id AND e.token_key = w.token_key)
                ORDER BY w.n
                ON CONFLICT DO NOTHING
                RETURNING l.topic_id, l.token_key, l.dead_at, l.dead_reason, l.suspect_at, l.suspect_reason
            ), told AS (
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, invalidated_after)
                SELECT a.topic_id, a.token_key, 'invalidated', c.cause,
                       CASE c.cause WHEN 'dead' THEN a.dead_reason ELSE a.suspect_reason END, greatest(a.dead_at, a.suspect_at)
                FROM added AS a
                CROSS JOIN LATERAL (SELECT tokenkeeper.cause_of(a.dead_at, a.suspect_at, NULL, NULL) AS cause) AS c
            )
            SELECT locked || coalesce(array_agg(w.position), '{}') INTO locked FROM wanted AS w
            WHERE (coalesce(w.topic_id, 0), w.token_key) NOT IN (SELECT a.topic_id, a.token_key FROM added AS a);
            first := first + many;
            many := CASE WHEN first <= locked_until THEN greatest((locked_until - first + 1) / 2, 1) ELSE cardinality(left_over) END;
        EXCEPTION WHEN lock_not_available THEN
            IF many = 1 THEN
                locked := locked || left_over[first];
                first := first + 1;
                many := cardinality(left_over);
            ELSE
                locked_until := least(first + many - 1, cardinality(left_over));
                many := greatest((locked_until - first + 1) / 2, 1);
            END IF;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);

    IF cardinality(record.suspect_of) > 0 THEN
        -- Each suspect that counts now is kept for as long as it may be undone; the guard counts those that silence.
        PERFORM tokenkeeper.note_guard(array_agg(topic_ids[record.of_topic[s.of_token]]), array_agg(record.token_keys[s.of_token]),
                                       array_agg(s.queued_at))
        FROM unnest(record.suspect_of, record.suspect_queued_at, fates) AS s (of_token, queued_at, fate)
        WHERE s.fate = 'silences' AND s.of_token NOT IN (SELECT unnest(locked));
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

-- The undo ------------------------------------------------------------------------------------------------------------

ALTER TABLE tokenkeeper.exclusion
    ADD COLUMN finished_at   timestamptz,
    ADD COLUMN waits_since   timestamptz,
    ADD COLUMN tokens        bigint NOT NULL DEFAULT 0,
    ADD COLUMN reached_at    timestamptz,
    ADD COLUMN reached_key   bytea;
COMMENT ON COLUMN tokenkeeper.exclusion.waits_since IS
    'When the end of the window was last reached with suspects left, whose tokens applications hold: other windows come first then.';
COMMENT ON COLUMN tokenkeeper.exclusion.finished_at IS 'When the last of its suspects was undone; null while some may be left.';
COMMENT ON COLUMN tokenkeeper.exclusion.tokens IS 'How many tokens may be sent to again because of it, so far.';
COMMENT ON COLUMN tokenkeeper.exclusion.reached_at IS
    'Internal: where to look for the next suspects, with reached_key. Only a hint: what is left to undo is what stands in suspect.';
UPDATE tokenkeeper.exclusion SET finished_at = at;
CREATE INDEX exclusion_unfinished ON tokenkeeper.exclusion (exclusion_id) WHERE finished_at IS NULL;
-- With the token, so that the undo can go on exactly where it stopped where thousands were sent at the same instant.
DROP INDEX tokenkeeper.suspect_suspect_at;
-- topic_id + 0: this index must not look fit for finding a token's suspects. Without fresh statistics, the planner would take it for that,
-- and read all suspects of a topic for each token.
CREATE INDEX suspect_suspect_at ON tokenkeeper.suspect ((topic_id + 0), suspect_at, token_key);

CREATE OR REPLACE VIEW tokenkeeper.reinstatement AS
SELECT t.environment, t.topic, e.since, e.until, e.at, e.done_by, e.exclusion_id, e.finished_at, e.tokens,
       CASE WHEN e.finished_at IS NULL THEN (
           SELECT count(*) FROM (SELECT FROM tokenkeeper.suspect AS s
                                 WHERE s.topic_id + 0 = e.topic_id AND s.suspect_at BETWEEN e.since AND e.until LIMIT 10000) AS l)
       ELSE 0 END AS remaining
FROM tokenkeeper.exclusion AS e JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.reinstatement IS
    'The windows given to reinstate: suspects whose instant lies in one, ends included, do not count, whenever they arrive. Those recorded before '
    'are undone by the daemons, or by `tokenkeeperd reinstate`; until then their tokens are still suppressed.';
COMMENT ON COLUMN tokenkeeper.reinstatement.finished_at IS 'When all of it was undone; null while it is under way.';
COMMENT ON COLUMN tokenkeeper.reinstatement.tokens IS 'How many tokens may be sent to again because of it, so far.';
COMMENT ON COLUMN tokenkeeper.reinstatement.remaining IS 'Suspects that are still to be undone; 10000 means that many or more.';

CREATE OR REPLACE FUNCTION tokenkeeper.reinstate(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(reinstate.topic COLLATE "C", reinstate.environment COLLATE "C");
    suspects bigint;
    nothing boolean;
BEGIN
    IF reinstate.since IS NULL OR reinstate.until IS NULL OR NOT isfinite(reinstate.since) OR NOT isfinite(reinstate.until)
        OR reinstate.since > reinstate.until THEN
        RAISE EXCEPTION 'the window is from % to %, expected two finite instants, the earlier one first',
            coalesce(reinstate.since::text, 'null'), coalesce(reinstate.until::text, 'null')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- There is no way back: what has not been sent yet is not excused.
    until := greatest(least(reinstate.until, clock_timestamp()), reinstate.since);
    -- Before the lock: this takes a tenth of a second for a million.
    SELECT count(*) INTO suspects FROM tokenkeeper.suspect AS s
    WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until;
    -- A batch that records suspects at this moment is waited for, and a later one sees the exclusion.
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (of_topic) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = of_topic FOR UPDATE;
    IF EXISTS (SELECT FROM tokenkeeper.exclusion AS e
               WHERE e.topic_id = of_topic AND e.since <= reinstate.since AND e.until >= reinstate.until) THEN
        RETURN suspects;
    END IF;
    nothing := NOT EXISTS (SELECT FROM tokenkeeper.suspect AS s
                           WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN reinstate.since AND reinstate.until);
    INSERT INTO tokenkeeper.exclusion (topic_id, since, until, finished_at)
    VALUES (of_topic, reinstate.since, reinstate.until, CASE WHEN nothing THEN clock_timestamp() END);
    UPDATE tokenkeeper.topic_guard AS g
    SET touched_at = NULL, undo_since = CASE WHEN g.undo_since < reinstate.since THEN g.undo_since END
    WHERE g.topic_id = of_topic;
    IF nothing THEN
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message)
        VALUES ('reinstated', reinstate.environment, reinstate.topic, 0,
            format('suspects from %s to %s do not count', reinstate.since, reinstate.until));
    END IF;
    RETURN suspects;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reinstate(text, text, timestamptz, timestamptz) IS
    'Undoes suspects: those of the topic whose instant (sent_at) lies in the window, ends included, do not count, now and whenever they arrive; '
    'for good. A window that ends in the future ends now. Returns how many recorded suspects that concerns. A daemon, or `tokenkeeperd reinstate`, '
    'undoes them in short transactions; until then their tokens are still suppressed: see the view reinstatement. '
    'Whatever else is known of the token counts again. Raises 22023 for an unknown topic or a window that is none, 25001 under another isolation level than read committed.';

CREATE FUNCTION tokenkeeper.undo_suspects(most integer DEFAULT 250) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET timezone = 'UTC'
SET datestyle = 'ISO'
AS $$
DECLARE
    undo tokenkeeper.exclusion;
    all_keys bytea[];
    keys bytea[];
    starts timestamptz[];
    ends timestamptz[];
    buckets timestamptz[];
    tallies bigint[];
    suspects bigint;
    came_back bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- One transaction at a time works on a window.
    SELECT e.* INTO undo FROM tokenkeeper.exclusion AS e WHERE e.finished_at IS NULL
    ORDER BY e.waits_since NULLS FIRST, e.exclusion_id LIMIT 1
    FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO tokenkeeper.topic_guard (topic_id) VALUES (undo.topic_id) ON CONFLICT DO NOTHING;
    PERFORM FROM tokenkeeper.topic_guard AS g WHERE g.topic_id = undo.topic_id FOR UPDATE;

    SELECT array_agg(n.token_key), max(n.suspect_at) INTO all_keys, undo.reached_at FROM (
        SELECT s.token_key, s.suspect_at FROM tokenkeeper.suspect AS s
        WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until
          AND (s.suspect_at, s.token_key) > (coalesce(undo.reached_at, '-infinity'), coalesce(undo.reached_key, ''))
        ORDER BY s.suspect_at, s.token_key LIMIT least(greatest(undo_suspects.most, 1), 1000)) AS n;
    IF all_keys IS NULL THEN
        -- At the end. What is left behind was locked by an application when its turn came.
        IF EXISTS (SELECT FROM tokenkeeper.suspect AS s
                   WHERE s.topic_id + 0 = undo.topic_id AND s.suspect_at BETWEEN undo.since AND undo.until) THEN
            UPDATE tokenkeeper.exclusion AS e SET reached_at = NULL, reached_key = NULL, waits_since = clock_timestamp()
            WHERE e.exclusion_id = undo.exclusion_id;
            RETURN 0;
        END IF;
        UPDATE tokenkeeper.exclusion AS e SET finished_at = clock_timestamp(), reached_at = NULL, reached_key = NULL
        WHERE e.exclusion_id = undo.exclusion_id;
        -- A guard that was open for these may close now.
        UPDATE tokenkeeper.topic_guard AS g SET touched_at = NULL WHERE g.topic_id = undo.topic_id;
        INSERT INTO tokenkeeper.operation (operation, environment, topic, rows, message, done_by)
        SELECT 'reinstated', t.environment, t.topic, undo.tokens, format('suspects from %s to %s do not count', undo.since, undo.until), undo.done_by
        FROM tokenkeeper.topic AS t WHERE t.topic_id = undo.topic_id;
        RETURN 0;
    END IF;
    undo.reached_key := all_keys[cardinality(all_keys)];

    -- The ledger first, as a sweep does, and in key order. The application comes first: what it holds is left for the next round.
    keys := ARRAY(
        SELECT k.token_key FROM (SELECT DISTINCT a.token_key FROM unnest(all_keys) AS a (token_key) ORDER BY 1) AS k
        CROSS JOIN LATERAL (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = k.token_key
            FOR NO KEY UPDATE SKIP LOCKED) AS l);
    -- And the tokens that the ledger no longer knows.
    keys := keys || ARRAY(
        SELECT a.token_key FROM unnest(all_keys) AS a (token_key)
        WHERE NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = a.token_key));
    -- All windows of the topic, also those whose turn comes later: a suspect that lies in one must not count again meanwhile.
    SELECT array_agg(e.since), array_agg(e.until) INTO starts, ends FROM tokenkeeper.exclusion AS e WHERE e.topic_id = undo.topic_id;
    SELECT array_agg(c.bucket), array_agg(c.tokens) INTO buckets, tallies FROM tokenkeeper.guard_tally(undo.topic_id, keys) AS c;

    WITH undone AS MATERIALIZED (
        DELETE FROM tokenkeeper.suspect AS s
        WHERE s.topic_id = undo.topic_id AND s.token_key = ANY (keys)
          AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE s.suspect_at BETWEEN w.since AND w.until)
        RETURNING s.token_key, s.silenced
    ), token AS MATERIALIZED (
        SELECT n.token_key, bool_or(n.silenced) AS silenced FROM undone AS n GROUP BY 1
    ), rest AS MATERIALIZED (
        SELECT u.token_key, u.silenced, o.registered_at, o.suppressed, o.suspect_reason AS undone_reason, o.device_id, s.suspect_at, s.reason,
               greatest(o.dead_at, o.suspect_at, o.unregistered_at, o.superseded_at) AS was_invalidated_at,
               greatest(o.dead_at, s.suspect_at, o.unregistered_at, o.superseded_at) AS invalidated_at
        FROM token AS u
        CROSS JOIN LATERAL (
            SELECT * FROM tokenkeeper.ledger AS l WHERE l.topic_id = undo.topic_id AND l.token_key = u.token_key
              AND EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE l.suspect_at BETWEEN w.since AND w.until)) AS o
        LEFT JOIN LATERAL (
            SELECT r.suspect_at, r.reason FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = undo.topic_id AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.suspect_at BETWEEN w.since AND w.until)
            ORDER BY r.suspect_at DESC, r.reason DESC LIMIT 1) AS s ON true
    ), gone AS (
        -- What was known by this suspect alone is unknown again.
        DELETE FROM tokenkeeper.ledger AS l USING rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key AND r.registered_at = '-infinity' AND r.invalidated_at IS NULL
    ), changed AS (
        UPDATE tokenkeeper.ledger AS l
        SET suspect_at = r.suspect_at, suspect_reason = r.reason,
            -- What else suppresses it was learned after the suspect that silenced it, and has its whole retention before it.
            suppressed_since = CASE
                WHEN r.invalidated_at >= r.registered_at THEN CASE WHEN r.silenced THEN clock_timestamp() ELSE l.suppressed_since END END
        FROM rest AS r
        WHERE l.topic_id = undo.topic_id AND l.token_key = r.token_key
          AND NOT (r.registered_at = '-infinity' AND r.invalidated_at IS NULL)
    ), told AS (
        INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
            registered_before, registered_after, invalidated_before, invalidated_after)
        SELECT undo.topic_id, r.token_key, 'reinstated', 'operator', r.undone_reason, r.device_id,
               nullif(r.registered_at, '-infinity'), nullif(r.registered_at, '-infinity'), r.was_invalidated_at, r.invalidated_at
        FROM rest AS r WHERE r.suppressed
    )
    SELECT (SELECT count(*) FROM undone),
           (SELECT count(*) FROM rest AS r WHERE r.suppressed AND NOT coalesce(r.invalidated_at >= r.registered_at, false))
    INTO suspects, came_back;

    -- What they counted in the guard, without counting all others anew.
    UPDATE tokenkeeper.topic_guard_count AS c SET tokens = greatest(c.tokens + d.tokens, 0)
    FROM (SELECT t.bucket, sum(t.tokens) AS tokens FROM (
              SELECT b.bucket, -b.tokens AS tokens FROM unnest(buckets, tallies) AS b (bucket, tokens)
              UNION ALL SELECT a.bucket, a.tokens FROM tokenkeeper.guard_tally(undo.topic_id, keys) AS a) AS t
          GROUP BY 1 HAVING sum(t.tokens) <> 0) AS d
    WHERE c.topic_id = undo.topic_id AND c.bucket = d.bucket;
    UPDATE tokenkeeper.exclusion AS e
    SET tokens = e.tokens + came_back, reached_at = undo.reached_at, reached_key = undo.reached_key
    WHERE e.exclusion_id = undo.exclusion_id;
    RETURN suspects;
END
$$;
COMMENT ON FUNCTION tokenkeeper.undo_suspects(integer) IS
    'The next step of what reinstate has left to do: undoes the suspects of at most so many tokens (1 to 1000), in one short transaction. Returns how many '
    'suspects it undid, 0 at the end of a window, and null when there is nothing to do or another session does it. A token that an application holds '
    'locked is left for a later step. Called by the daemons and by `tokenkeeperd reinstate`. Raises 25001 under another isolation level than read '
    'committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.undo_suspects(integer) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.would_reinstate(topic text, environment text, since timestamptz, until timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(would_reinstate.topic COLLATE "C", would_reinstate.environment COLLATE "C");
    starts timestamptz[];
    ends timestamptz[];
BEGIN
    SELECT array_agg(w.since), array_agg(w.until) INTO starts, ends FROM (
        SELECT e.since, e.until FROM tokenkeeper.exclusion AS e WHERE e.topic_id = of_topic
        UNION ALL
        SELECT would_reinstate.since, greatest(least(would_reinstate.until, clock_timestamp()), would_reinstate.since)) AS w;
    RETURN (
        SELECT count(*) FROM (
            SELECT DISTINCT s.token_key FROM tokenkeeper.suspect AS s
            WHERE s.topic_id + 0 = of_topic AND s.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS u
        CROSS JOIN LATERAL (
            SELECT l.dead_at, l.unregistered_at, l.superseded_at, l.registered_at FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = u.token_key AND l.suppressed
              AND l.suspect_at BETWEEN would_reinstate.since AND would_reinstate.until) AS o
        LEFT JOIN LATERAL (
            SELECT max(r.suspect_at) AS suspect_at FROM tokenkeeper.suspect AS r
            WHERE r.topic_id = of_topic AND r.token_key = u.token_key
              AND NOT EXISTS (SELECT FROM unnest(starts, ends) AS w (since, until) WHERE r.suspect_at BETWEEN w.since AND w.until)) AS s ON true
        WHERE NOT coalesce(greatest(o.dead_at, s.suspect_at, o.unregistered_at, o.superseded_at) >= o.registered_at, false));
END
$$;
COMMENT ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz) IS
    'How many tokens may be sent to again after reinstate has been called with this window and the suspects are undone. Changes and locks nothing. '
    'Raises 22023 for an unknown topic, 25001 under another isolation level than read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.discard_held(topic text, environment text DEFAULT 'production') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    of_topic integer := tokenkeeper.known_topic(discard_held.topic COLLATE "C", discard_held.environment COLLATE "C");
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
    'Deletes the held results of a topic, which then never count; returns how many. What was recorded before the guard opened still stands: see '
    'reinstate. Raises 22023 for an unknown topic, 25001 under another isolation level than read committed.';
