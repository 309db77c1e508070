-- Comparing an attached table with the ledger, in both directions, and repairing what differs.
--
-- compare_next compares a batch in one statement, so with one snapshot: a change of the table that is committed there is either still in the queue or
-- applied to the ledger. What the queue still has is no difference. So a comparison needs no pause of the application and no lock.
--
-- The rows come first. So when it looks for the rows of the ledger's tokens, token_spelling has each unusual spelling of the table.
--
-- It finds, as counts by these words (samples name up to five of each by the key of the row and the first 8 characters of the token):
--
--   rows, tokens          how many rows of the table and tokens of the ledger it has looked at
--   without_token         rows without a token
--   refused               rows that cannot be registered
--   missing               registered in the table, never registered in the ledger                                      a difference
--   behind                registered in the table later than in the ledger                                             a difference
--   logged_in             registered in the table, suppressed in the ledger only by a logout of this table: another     a difference
--                         session was registering the token meanwhile, or the flag was cleared without a registration
--   logged_out            logged out in all rows that have the token, active in the ledger                             a difference
--   details               active in both, and no row that has the token has the user and the tags of the ledger         a difference
--   without_row           active in the ledger because of this table, which has no row with the token any more         a difference if on_delete
--                         is unregister
--   queued                differs, but the queue still holds a registration or logout of the token
--   held                  a logout that the guard holds
--   pruned                registered in the table, pruned from the ledger after that registration
--   stale, suspect, superseded, unregistered_by_app      registered in the table, suppressed in the ledger for this cause; as it should be

CREATE OR REPLACE FUNCTION tokenkeeper.sources_of_attachment(attachment bigint) RETURNS bigint[]
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(s.source_id), '{}') FROM tokenkeeper.registration_source AS s JOIN tokenkeeper.attached_table AS a ON a.name = s.name
    WHERE a.source_id = attachment AND s.kind IN ('attachment', 'backfill', 'reconciliation')
$$;
COMMENT ON FUNCTION tokenkeeper.sources_of_attachment(bigint) IS 'The sources of an attached table: its triggers, now and formerly, its backfills and reconciliations.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.sources_of_attachment(bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.compare_rows(
    reader text, asker text, agreer text, source_id bigint, after text, max_rows integer, repairs bigint,
    OUT last_key text, OUT counts jsonb, OUT samples jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    began timestamptz := clock_timestamp();
    spelled_keys bytea[];
    spellings text[];
BEGIN
    EXECUTE format($sql$
WITH read AS MATERIALIZED (
    SELECT r.*, decode(r.hex, 'hex') AS token_key,
           -- Nearly all rows are sound, which costs no call.
           CASE WHEN r.token <> '' AND (r.hex IS NOT NULL AND r.environment IN ('production', 'sandbox') AND tokenkeeper.topic_fault(r.topic) IS NULL
                                        AND r.registered_at <= $4 + interval '1 minute') IS NOT TRUE
                THEN tokenkeeper.attached_row_fault(r.environment, r.topic, r.token, r.registered_at) END AS fault
    FROM (SELECT f.*, CASE WHEN f.token <> '' THEN tokenkeeper.parse_token(f.token) END AS hex, row_number() OVER () AS n FROM %s($1, $2) AS f
          OFFSET 0) AS r
), known AS (
    SELECT r.*, t.topic_id, l.registered_at AS ledger_at, l.suppressed, l.user_id AS ledger_user, l.tags AS ledger_tags,
           CASE WHEN l.suppressed THEN tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.unregistered_by_app_at, l.superseded_at) END AS cause,
           CASE WHEN l.unregistered_by_app_at >= l.registered_at AND l.superseded_at IS NULL
                     AND coalesce(greatest(l.stale_at, l.suspect_at) < l.registered_at, true) THEN l.unregistered_by_app_at END AS only_logout_at
    FROM read AS r
    LEFT JOIN tokenkeeper.topic AS t ON t.topic = r.topic COLLATE "C" AND t.environment = r.environment COLLATE "C"
    -- Both columns in a subquery: otherwise, without statistics, the planner would look for the topic alone, and read all of it for each token.
    LEFT JOIN LATERAL (
        SELECT * FROM tokenkeeper.ledger AS k WHERE k.topic_id = t.topic_id AND k.token_key = r.token_key LIMIT 1) AS l ON true
    WHERE r.fault IS NULL AND r.token_key IS NOT NULL
), judged AS MATERIALIZED (
    SELECT k.*, CASE
        WHEN k.unregistered THEN CASE WHEN NOT k.suppressed AND k.ledger_at > '-infinity' THEN 'logged_out' END
        WHEN coalesce(k.ledger_at, '-infinity') = '-infinity' THEN CASE
            WHEN k.ledger_at IS NULL AND EXISTS (
                SELECT FROM tokenkeeper.token_event_log AS e
                WHERE e.token_key = k.token_key AND e.topic_id = k.topic_id AND e.event = 'pruned' AND e.registered_before >= k.registered_at)
            THEN 'pruned' ELSE 'missing' END
        WHEN k.ledger_at < least(k.registered_at, $4) THEN 'behind'
        WHEN k.only_logout_at IS NOT NULL AND EXISTS (
            SELECT FROM tokenkeeper.unregistration_receipt AS u
            WHERE u.topic_id = k.topic_id AND u.token_key = k.token_key AND u.unregistered_by_app_at = k.only_logout_at AND u.source_id = ANY ($5)) THEN 'logged_in'
        WHEN k.suppressed THEN k.cause
        -- Null if attach names no such column.
        WHEN k.user_id <> coalesce(k.ledger_user, '') COLLATE "C" OR k.tags <> coalesce(k.ledger_tags, '{}') COLLATE "C" THEN 'details' END AS finding
    FROM known AS k
), queue AS MATERIALIZED (
    SELECT DISTINCT coalesce(q.environment, 'production') COLLATE "C" AS environment, q.topic COLLATE "C" AS topic,
           decode(tokenkeeper.parse_token(q.token), 'hex') AS token_key
    FROM tokenkeeper.registration AS q
    WHERE EXISTS (SELECT FROM judged AS j WHERE j.finding IN ('missing', 'behind', 'logged_in', 'logged_out', 'details'))
), former AS MATERIALIZED (
    -- The current token of the row's device, if the row has no later instant. Is it what the row had before, or that of another row?
    SELECT j.n, j.environment, j.topic, l.*, j.registered_at + interval '1 minute' >= l.registered_at AS is_of_row
    FROM judged AS j
    CROSS JOIN LATERAL (
        SELECT k.topic_id, k.token_key, encode(k.token_key, 'hex') AS token, k.suppressed, k.registered_at FROM tokenkeeper.ledger AS k
        WHERE k.device_id = j.device_id COLLATE "C" AND k.topic_id + 0 = j.topic_id AND k.superseded_at IS NULL AND k.token_key <> j.token_key
          AND k.registered_at >= j.registered_at
        ORDER BY k.registered_at DESC LIMIT 1) AS l
    WHERE j.finding IN ('missing', 'behind', 'logged_in') AND j.device_id <> '' AND tokenkeeper.has_one_token_per_device(j.topic)
), asked AS MATERIALIZED (
    SELECT false AS of_former, j.n, j.environment, j.topic, j.token, j.token_key FROM judged AS j WHERE j.finding = 'logged_out'
    UNION ALL
    SELECT true, o.n, o.environment, o.topic, o.token, o.token_key FROM former AS o
), spelled AS MATERIALIZED (
    SELECT q.* FROM asked AS q
    UNION ALL
    SELECT q.of_former, q.n, q.environment, q.topic, s.spelling, q.token_key FROM asked AS q
    CROSS JOIN LATERAL (
        SELECT k.spelling::text FROM tokenkeeper.token_spelling AS k WHERE k.token_key = q.token_key AND k.source_id = $6 OFFSET 0) AS s
), has AS MATERIALIZED (
    SELECT u.of_former, u.n, bool_or(u.has) AS has FROM (
        SELECT array_agg(q.of_former) AS of_former, array_agg(q.n) AS n, array_agg(q.environment) AS environments, array_agg(q.topic) AS topics,
               array_agg(q.token) AS tokens, array_agg(q.token_key) AS token_keys
        FROM spelled AS q) AS a
    CROSS JOIN LATERAL unnest(a.of_former, a.n, %s(a.environments, a.topics, a.tokens, a.token_keys)) AS u (of_former, n, has)
    WHERE a.n IS NOT NULL GROUP BY 1, 2
), given_up AS MATERIALIZED (
    -- No row has it, and it came from this table: the row has changed its token without a registration, as the UPDATE trigger would see it.
    SELECT o.* FROM former AS o JOIN has AS h ON h.n = o.n AND h.of_former AND h.has IS NULL
    WHERE o.is_of_row OR EXISTS (
        SELECT FROM tokenkeeper.token_event_log AS e
        WHERE e.token_key = o.token_key AND e.topic_id = o.topic_id AND e.source_id = ANY ($5) AND e.event IN ('registered', 'revived'))
), agreeing AS MATERIALIZED (%s
), found AS MATERIALIZED (
    SELECT j.*, CASE
        WHEN j.finding = 'logged_out' AND j.n IN (SELECT h.n FROM has AS h WHERE NOT h.of_former AND h.has) THEN NULL
        WHEN j.finding = 'details' AND j.n IN (SELECT g.n FROM agreeing AS g) THEN NULL
        WHEN j.finding IN ('missing', 'behind', 'logged_in', 'logged_out', 'details') AND EXISTS (
            SELECT FROM queue AS q WHERE q.token_key = j.token_key AND q.topic = j.topic COLLATE "C" AND q.environment = j.environment COLLATE "C") THEN 'queued'
        WHEN j.finding = 'logged_out' AND EXISTS (
            SELECT FROM tokenkeeper.held_registration AS h WHERE h.topic_id = j.topic_id AND h.token_key = j.token_key AND h.unregistered) THEN 'held'
        ELSE j.finding END AS final
    FROM judged AS j WHERE j.finding IS NOT NULL
), repaired AS (
    -- User and tags count from queued_at: from before this snapshot, so that what a trigger has queued meanwhile wins. Of two rows with one token, both
    -- must come from the same row: so no two rows have the same instant.
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, queued_at)
    SELECT f.environment, f.topic, f.token, w.instant,
           CASE WHEN NOT f.unregistered AND f.final <> 'details' AND f.n NOT IN (SELECT g.n FROM given_up AS g) THEN f.device_id END,
           CASE WHEN NOT f.unregistered THEN f.user_id END, CASE WHEN NOT f.unregistered THEN f.tags END, f.unregistered, $3,
           CASE WHEN f.unregistered THEN $4 ELSE greatest($4 - f.n * interval '1 microsecond', CASE WHEN w.is_again THEN w.instant END) END
    FROM (SELECT f.*, f.final = 'logged_in' OR coalesce(f.only_logout_at >= f.registered_at AND EXISTS (
              SELECT FROM tokenkeeper.unregistration_receipt AS u
              WHERE u.topic_id = f.topic_id AND u.token_key = f.token_key AND u.unregistered_by_app_at = f.only_logout_at AND u.source_id = ANY ($5)),
              false) AS takes_back
          FROM found AS f WHERE $3 IS NOT NULL AND f.final IN ('missing', 'behind', 'logged_in', 'logged_out', 'details')) AS f
    CROSS JOIN LATERAL (
        SELECT NOT f.unregistered AND f.takes_back AS is_again, CASE
                   WHEN f.unregistered THEN $4
                   -- Later than the logout of this table that the row has taken back: otherwise only the next reconciliation would find it as logged_in.
                   WHEN f.takes_back THEN f.only_logout_at + interval '1 microsecond'
                   ELSE f.registered_at END AS instant) AS w
    UNION ALL
    -- As the trigger does: the row has given the token up. on_delete says nothing about that.
    SELECT g.environment, g.topic, g.token, $4, NULL, NULL, NULL, true, $3, $4
    FROM given_up AS g JOIN found AS f USING (n)
    WHERE $3 IS NOT NULL AND f.final IN ('missing', 'behind', 'logged_in') AND NOT g.suppressed AND g.registered_at > '-infinity'
), words AS (
    SELECT f.final AS word, f.n, f.key, f.token FROM found AS f WHERE f.final IS NOT NULL
    UNION ALL
    SELECT CASE WHEN r.fault IS NOT NULL THEN 'refused' ELSE 'without_token' END, r.n, r.key, r.token FROM read AS r WHERE r.fault IS NOT NULL OR r.token_key IS NULL
), counted AS (
    SELECT w.word, count(*) AS number, (array_agg('row ' || w.key || ': ' || left(w.token, 8) ORDER BY w.n))[1:5] AS five FROM words AS w GROUP BY 1
)
SELECT (SELECT r.key FROM read AS r ORDER BY r.n DESC LIMIT 1),
       coalesce((SELECT jsonb_object_agg(c.word, c.number) FROM counted AS c), '{}') || jsonb_build_object('rows', (SELECT count(*) FROM read)),
       coalesce((SELECT jsonb_object_agg(c.word, c.five) FROM counted AS c WHERE c.word <> 'without_token'), '{}'),
       s.keys, s.spellings
-- Only of tokens that the ledger knows: the others have no pushes to lose, and what was pruned or erased is not to be kept here.
FROM (SELECT array_agg(k.token_key) AS keys, array_agg(k.token) AS spellings FROM judged AS k
      WHERE k.ledger_at IS NOT NULL AND k.token <> k.hex AND k.token <> upper(k.hex)) AS s
$sql$, reader, asker, CASE WHEN agreer IS NULL THEN ' SELECT 0::bigint AS n WHERE false' ELSE format($sql$
    SELECT u.n FROM (
        SELECT array_agg(q.n) AS n, array_agg(q.environment) AS environments, array_agg(q.topic) AS topics, array_agg(q.token) AS tokens,
               array_agg(q.token_key) AS token_keys, array_agg(q.of_user) AS users, array_agg(q.tags) AS tags
        FROM (SELECT j.n, j.environment, j.topic, s.token, j.token_key, coalesce(j.ledger_user, '') AS of_user,
                     coalesce(j.ledger_tags, '{}')::text AS tags
              FROM judged AS j
              CROSS JOIN LATERAL (
                  SELECT j.token
                  UNION ALL
                  SELECT k.spelling FROM tokenkeeper.token_spelling AS k WHERE k.token_key = j.token_key AND k.source_id = $6) AS s (token)
              WHERE j.finding = 'details') AS q) AS a
    CROSS JOIN LATERAL unnest(a.n, %s(a.environments, a.topics, a.tokens, a.token_keys, a.users, a.tags)) AS u (n, agrees)
    WHERE a.n IS NOT NULL AND u.agrees$sql$, agreer) END) INTO last_key, counts, samples, spelled_keys, spellings
        USING after, max_rows, repairs, began, tokenkeeper.sources_of_attachment(source_id), source_id;
    IF spelled_keys IS NOT NULL THEN
        PERFORM tokenkeeper.note_spellings(array_fill(source_id, ARRAY[cardinality(spelled_keys)]), spelled_keys, spellings);
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.compare_rows(text, text, text, bigint, text, integer, bigint) IS
    'Internal, for compare_next: compares the next rows of an attached table with the ledger, and notes unusual spellings. If repairs is the source of a '
    'reconciliation, queues what is missing.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.compare_rows(text, text, text, bigint, text, integer, bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.finish_rows(source_id bigint, began timestamptz) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- It has seen each row, except those that came or changed meanwhile: these are noted when they are registered. The rest waits for the next time.
    DELETE FROM tokenkeeper.token_spelling AS s WHERE s.ctid = ANY (ARRAY(
        SELECT k.ctid FROM tokenkeeper.token_spelling AS k
        WHERE k.source_id = finish_rows.source_id AND k.seen_at < finish_rows.began - interval '1 hour' LIMIT 10000 FOR UPDATE SKIP LOCKED));
    UPDATE tokenkeeper.attached_table AS a SET rows_read_at = greatest(a.rows_read_at, finish_rows.began) WHERE a.source_id = finish_rows.source_id;
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_rows(bigint, timestamptz) IS
    'Internal, for compare_next: a comparison that began then has read all rows of an attached table. Removes the spellings that it has not met.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.finish_rows(bigint, timestamptz) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.compare_tokens(
    asker text, attachment bigint, after_topic integer, after_token bytea, max_tokens integer, repairs bigint,
    OUT last_topic integer, OUT last_token bytea, OUT counts jsonb, OUT samples jsonb)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    began timestamptz := clock_timestamp();
BEGIN
    EXECUTE format($sql$
WITH read AS MATERIALIZED (
    SELECT l.topic_id, l.token_key, l.device_id, l.registered_at, l.suppressed OR l.registered_at = '-infinity' AS ignored
    FROM tokenkeeper.ledger AS l WHERE (l.topic_id, l.token_key) > ($1, $2) ORDER BY l.topic_id, l.token_key LIMIT $3
), active AS MATERIALIZED (
    SELECT r.topic_id, r.token_key, r.device_id, r.registered_at, t.environment, t.topic, encode(r.token_key, 'hex') AS token
    FROM read AS r JOIN tokenkeeper.topic AS t USING (topic_id) WHERE NOT r.ignored
), not_usual AS MATERIALIZED (
    -- Nearly all tokens have a row, and its spelling is usual.
    SELECT u.topic_id, u.token_key, u.environment, u.topic, u.token, u.device_id, u.registered_at
    FROM (SELECT array_agg(o.topic_id) AS topic_ids, array_agg(o.environment::text) AS environments, array_agg(o.topic::text) AS topics,
                 array_agg(o.token) AS tokens, array_agg(o.token_key) AS token_keys, array_agg(o.device_id::text) AS devices,
                 array_agg(o.registered_at) AS instants
          FROM active AS o) AS a
    CROSS JOIN LATERAL unnest(a.topic_ids, a.token_keys, a.environments, a.topics, a.tokens, a.devices, a.instants,
                              %1$s(a.environments, a.topics, a.tokens, a.token_keys))
        AS u (topic_id, token_key, environment, topic, token, device_id, registered_at, has)
    WHERE a.topic_ids IS NOT NULL AND u.has IS NULL
), unusual AS MATERIALIZED (
    SELECT u.topic_id, u.token_key
    FROM (SELECT array_agg(n.topic_id) AS topic_ids, array_agg(n.environment::text) AS environments, array_agg(n.topic::text) AS topics,
                 array_agg(s.spelling) AS tokens, array_agg(n.token_key) AS token_keys
          FROM not_usual AS n
          CROSS JOIN LATERAL (
              SELECT k.spelling::text FROM tokenkeeper.token_spelling AS k WHERE k.token_key = n.token_key AND k.source_id = $6 OFFSET 0) AS s) AS a
    CROSS JOIN LATERAL unnest(a.topic_ids, a.token_keys, %1$s(a.environments, a.topics, a.tokens, a.token_keys)) AS u (topic_id, token_key, has)
    WHERE a.topic_ids IS NOT NULL AND u.has IS NOT NULL
), gone AS MATERIALIZED (
    SELECT n.* FROM not_usual AS n
    WHERE (n.topic_id, n.token_key) NOT IN (SELECT u.topic_id, u.token_key FROM unusual AS u) AND EXISTS (
        SELECT FROM tokenkeeper.token_event_log AS e
        WHERE e.token_key = n.token_key AND e.topic_id = n.topic_id AND e.source_id = ANY ($4) AND e.event IN ('registered', 'revived'))
), queue AS MATERIALIZED (
    SELECT DISTINCT coalesce(q.environment, 'production') COLLATE "C" AS environment, q.topic COLLATE "C" AS topic,
           decode(tokenkeeper.parse_token(q.token), 'hex') AS token_key
    FROM tokenkeeper.registration AS q WHERE EXISTS (SELECT FROM gone)
), rotated AS MATERIALIZED (
    -- The devices with a registration of another token in the queue, which will supersede the one that the ledger has.
    SELECT coalesce(q.environment, 'production') COLLATE "C" AS environment, q.topic COLLATE "C" AS topic, q.device_id COLLATE "C" AS device_id,
           max(q.registered_at) AS registered_at
    FROM tokenkeeper.registration AS q
    WHERE q.device_id <> '' AND q.unregistered IS NOT TRUE AND tokenkeeper.has_one_token_per_device(q.topic) AND EXISTS (SELECT FROM gone) GROUP BY 1, 2, 3
), found AS MATERIALIZED (
    SELECT g.*, CASE
        WHEN EXISTS (SELECT FROM queue AS q WHERE q.token_key = g.token_key AND q.topic = g.topic COLLATE "C"
                                              AND q.environment = g.environment COLLATE "C") OR o.registered_at > g.registered_at THEN 'queued'
        WHEN EXISTS (SELECT FROM tokenkeeper.held_registration AS h WHERE h.topic_id = g.topic_id AND h.token_key = g.token_key AND h.unregistered)
            THEN 'held'
        ELSE 'without_row' END AS final
    FROM gone AS g
    LEFT JOIN rotated AS o ON o.device_id = g.device_id AND o.topic = g.topic COLLATE "C" AND o.environment = g.environment COLLATE "C"
), repaired AS (
    INSERT INTO tokenkeeper.registration (environment, topic, token, registered_at, unregistered, source_id)
    SELECT f.environment, f.topic, f.token, $7, true, $5 FROM found AS f WHERE $5 IS NOT NULL AND $8 AND f.final = 'without_row'
), counted AS (
    SELECT f.final AS word, count(*) AS number, (array_agg(f.topic || ': ' || left(f.token, 8) ORDER BY f.token_key))[1:5] AS five FROM found AS f GROUP BY 1
)
SELECT (SELECT r.topic_id FROM read AS r ORDER BY r.topic_id DESC, r.token_key DESC LIMIT 1),
       (SELECT r.token_key FROM read AS r ORDER BY r.topic_id DESC, r.token_key DESC LIMIT 1),
       coalesce((SELECT jsonb_object_agg(c.word, c.number) FROM counted AS c), '{}') || jsonb_build_object('tokens', (SELECT count(*) FROM read)),
       coalesce((SELECT jsonb_object_agg(c.word, c.five) FROM counted AS c), '{}')
$sql$, asker) INTO last_topic, last_token, counts, samples
        USING after_topic, after_token, max_tokens, tokenkeeper.sources_of_attachment(attachment), repairs, attachment, began,
              (SELECT a.on_delete = 'unregister' FROM tokenkeeper.attached_table AS a WHERE a.source_id = attachment);
END
$$;
COMMENT ON FUNCTION tokenkeeper.compare_tokens(text, bigint, integer, bytea, integer, bigint) IS
    'Internal, for compare_next: looks for the rows of the next tokens of the ledger that are active because of an attached table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.compare_tokens(text, bigint, integer, bytea, integer, bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.compare_next(
    source_id bigint, "position" text, max_rows integer DEFAULT 1000, repairs bigint DEFAULT NULL,
    OUT next_position text, OUT counts jsonb, OUT samples jsonb)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET jit = off -- Without seqscans, estimates are so high that each statement would be compiled, for seconds.
AS $$
DECLARE
    this tokenkeeper.attached_table;
    reader record;
    asker record;
    agreer record;
    later record;
    read_to record;
    began timestamptz;
BEGIN
    SELECT a.* INTO this FROM tokenkeeper.attached_table AS a WHERE a.source_id = compare_next.source_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'source % is no attached table', coalesce(compare_next.source_id::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.check_attachment_caller(compare_next.source_id);
    IF (compare_next.position COLLATE "C" ~ '^(row [0-9]{1,17} |token [0-9]{1,9} ([0-9a-f]{2})*$)') IS FALSE
        -- The rows come first.
        OR (compare_next.position COLLATE "C" LIKE 'token %' AND this.rows_read_at IS NULL) THEN
        RAISE EXCEPTION 'position is %, expected null, or what compare_next has returned', quote_literal(left(compare_next.position, 100))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(this.key_columns) = 0 THEN
        RAISE EXCEPTION 'table % has no key by which it could be read in batches', this.name USING ERRCODE = 'invalid_parameter_value',
            HINT = 'Add a primary key, detach the table and attach it again.';
    END IF;
    IF compare_next.max_rows IS NULL OR compare_next.max_rows NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'max_rows is %, expected 1 to 10000', coalesce(compare_next.max_rows::text, 'null') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF compare_next.repairs IS NOT NULL THEN
        PERFORM FROM tokenkeeper.registration_source AS s
        WHERE s.source_id = compare_next.repairs AND s.kind = 'reconciliation' AND s.name = this.name AND s.finished_at IS NULL AND s.withdrawn_at IS NULL
        FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'source % is no reconciliation of table % that goes on', compare_next.repairs, this.name USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    reader := tokenkeeper.attachment_function(this.source_id, 'read');
    asker := tokenkeeper.attachment_function(this.source_id, 'has');
    SELECT a.* INTO agreer FROM tokenkeeper.attachment_function(this.source_id, 'agrees') AS a WHERE this.arguments ?| ARRAY['user_id', 'tags'];
    -- row MICROSECONDS KEY: the table, after the row with this key, in a comparison that began then. token TOPIC_ID HEX: the ledger, after this token.
    IF compare_next.position IS NULL OR compare_next.position COLLATE "C" LIKE 'row %' THEN
        began := least('epoch'::timestamptz + split_part(compare_next.position COLLATE "C", ' ', 2)::bigint * interval '1 microsecond', clock_timestamp());
        BEGIN
            SELECT * INTO read_to FROM tokenkeeper.compare_rows(
                reader.name, asker.name, agreer.name, this.source_id, substr(compare_next.position, 6 + length(split_part(compare_next.position COLLATE "C", ' ', 2))),
                compare_next.max_rows, compare_next.repairs);
        EXCEPTION WHEN data_exception THEN
            RAISE EXCEPTION 'table % cannot be read from position %: %', this.name, coalesce(quote_literal(left(compare_next.position, 100)), 'null'),
                left(SQLERRM, 200) USING ERRCODE = 'invalid_parameter_value';
        END;
        IF (read_to.counts ->> 'rows')::bigint < compare_next.max_rows THEN
            PERFORM tokenkeeper.finish_rows(this.source_id, began);
            next_position := 'token 0 ';
        ELSE
            next_position := format('row %s %s', (extract(epoch FROM began) * 1000000)::bigint, read_to.last_key);
        END IF;
    ELSE
        SELECT * INTO read_to FROM tokenkeeper.compare_tokens(asker.name, this.source_id, split_part(compare_next.position COLLATE "C", ' ', 2)::integer,
                                                              decode(split_part(compare_next.position COLLATE "C", ' ', 3), 'hex'), compare_next.max_rows,
                                                              compare_next.repairs);
        next_position := CASE WHEN (read_to.counts ->> 'tokens')::bigint >= compare_next.max_rows
                              THEN format('token %s %s', read_to.last_topic, encode(read_to.last_token, 'hex')) END;
    END IF;
    counts := read_to.counts;
    samples := read_to.samples;
    FOR later IN
        SELECT a.version <> w.version AS has_changed
        FROM (VALUES ('read', reader.version), ('has', asker.version), ('agrees', agreer.version)) AS w (kind, version)
        CROSS JOIN LATERAL tokenkeeper.attachment_function(this.source_id, w.kind) AS a WHERE w.version IS NOT NULL
    LOOP
        IF later.has_changed THEN
            RAISE EXCEPTION 'a function of attachment % has changed while it ran', this.source_id USING ERRCODE = 'TK002';
        END IF;
    END LOOP;
    IF compare_next.repairs IS NOT NULL THEN
        UPDATE tokenkeeper.registration_source AS s
        SET position = compare_next.next_position,
            queued = s.queued + tokenkeeper.differences(compare_next.counts, this.on_delete),
            refused = s.refused + coalesce((compare_next.counts ->> 'refused')::bigint, 0),
            finished_at = CASE WHEN compare_next.next_position IS NULL THEN clock_timestamp() END
        WHERE s.source_id = compare_next.repairs;
    END IF;
END
$$;
COMMENT ON FUNCTION tokenkeeper.compare_next(bigint, text, integer, bigint) IS
    'Compares the next rows of an attached table, or then the next tokens of the ledger, up to max_rows (1 to 10000). Begin with position null; next_position is '
    'null at the end. counts has how many were found, by kind; samples has up to five of each. With repairs, the source of a reconciliation that '
    'begin_source(''reconciliation'', name) has begun, it queues what repairs the differences, and notes the position in that source. For members of the '
    'table''s owner, of tokenkeeper_operator and of tokenkeeper_daemon. Raises 42501 for others, 22023 if the source is no attached table or has no key, '
    'for a position that it has not returned, and for another repairs, TK002 if a generated function was changed or cannot read the table (the index on the '
    'token is missing, for example).';
REVOKE EXECUTE ON FUNCTION tokenkeeper.compare_next(bigint, text, integer, bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.differences(counts jsonb, on_delete text) RETURNS bigint
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(sum(c.value::bigint), 0)::bigint FROM jsonb_each_text(counts) AS c
    WHERE c.key IN ('missing', 'behind', 'logged_in', 'logged_out', 'details') OR (c.key = 'without_row' AND on_delete = 'unregister')
$$;
COMMENT ON FUNCTION tokenkeeper.differences(jsonb, text) IS 'How many of the findings of a comparison are differences, which a reconciliation repairs.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.differences(jsonb, text) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.finish_comparison(source_id bigint, counts jsonb) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tokenkeeper.check_attachment_caller(finish_comparison.source_id);
    UPDATE tokenkeeper.attached_table AS a SET compared_at = clock_timestamp(), findings = finish_comparison.counts
    WHERE a.source_id = finish_comparison.source_id;
    DELETE FROM tokenkeeper.attachment_timeout AS t WHERE t.source_id = finish_comparison.source_id AND t.kind = 'compare';
END
$$;
COMMENT ON FUNCTION tokenkeeper.finish_comparison(bigint, jsonb) IS
    'Notes what a complete comparison has found, for the view attachment, and that it ran into no timeout. Raises 42501 unless the login may compare the table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.finish_comparison(bigint, jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.add_counts(one jsonb, other jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_object_agg(s.key, s.number), '{}')
    FROM (SELECT u.key, sum(u.value::bigint) AS number FROM (
              SELECT * FROM jsonb_each_text(one) UNION ALL SELECT * FROM jsonb_each_text(other)) AS u GROUP BY 1) AS s
$$;
COMMENT ON FUNCTION tokenkeeper.add_counts(jsonb, jsonb) IS 'The sum of the counts of two batches of a comparison.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.add_counts(jsonb, jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.comparison_findings(source_id bigint, counts jsonb, samples jsonb)
RETURNS TABLE (finding text, number bigint, is_difference boolean, examples text[])
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT c.key, c.value::bigint, tokenkeeper.differences(jsonb_build_object(c.key, 1), a.on_delete) > 0,
           ARRAY(SELECT jsonb_array_elements_text(comparison_findings.samples -> c.key))
    FROM tokenkeeper.attachment AS a CROSS JOIN jsonb_each_text(comparison_findings.counts) AS c
    WHERE a.source_id = comparison_findings.source_id ORDER BY 3 DESC, 1;
END
$$;
COMMENT ON FUNCTION tokenkeeper.comparison_findings(bigint, jsonb, jsonb) IS
    'Internal, for compare and its command: the counts and samples that batches of compare_next have added up to, one row for each kind, the differences '
    'first. Raises 22003, 22023 or 22P02 for what compare_next has not returned.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.comparison_findings(bigint, jsonb, jsonb) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.compare_all(attached regclass, repairs bigint)
RETURNS TABLE (finding text, number bigint, is_difference boolean, samples text[])
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source bigint := tokenkeeper.attachment_of(attached);
    part record;
    counts jsonb := '{}';
    examples jsonb := '{}';
    at text;
BEGIN
    LOOP
        part := tokenkeeper.compare_next(source, at, 5000, repairs);
        counts := tokenkeeper.add_counts(counts, part.counts);
        -- The first batch with samples is enough.
        examples := part.samples || examples;
        at := part.next_position;
        EXIT WHEN at IS NULL;
    END LOOP;
    PERFORM tokenkeeper.finish_comparison(source, counts);
    RETURN QUERY SELECT * FROM tokenkeeper.comparison_findings(source, counts, examples);
END
$$;
COMMENT ON FUNCTION tokenkeeper.compare_all(regclass, bigint) IS
    'Internal, for compare and reconcile: all batches of compare_next in one transaction. Raises 22023 if the table is not attached or has no key, or for '
    'another repairs, 42501 unless the login may compare the table.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.compare_all(regclass, bigint) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.compare(attached regclass)
RETURNS TABLE (finding text, number bigint, is_difference boolean, samples text[])
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM tokenkeeper.compare_all(attached, NULL)
$$;
COMMENT ON FUNCTION tokenkeeper.compare(regclass) IS
    'Compares an attached table with the ledger, in both directions, and says how many rows or tokens were found of each kind, with up to five samples. What '
    'the queue still holds is no difference. It changes nothing but findings in the view attachment. For a large table use '
    'tokenkeeperd compare, which has a transaction for each batch. Raises 22023 if the table is not attached or has no key, TK002 if it cannot be read: see '
    'fault in the view attachment.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.compare(regclass) FROM PUBLIC;

CREATE OR REPLACE FUNCTION tokenkeeper.reconcile(attached regclass, dry_run boolean DEFAULT true)
RETURNS TABLE (finding text, number bigint, is_difference boolean, samples text[], source_id bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source bigint := tokenkeeper.attachment_of(reconcile.attached);
    repairs bigint;
BEGIN
    IF NOT reconcile.dry_run THEN
        repairs := tokenkeeper.begin_source('reconciliation', (SELECT a.name FROM tokenkeeper.attachment AS a WHERE a.source_id = source));
    END IF;
    RETURN QUERY SELECT c.*, repairs FROM tokenkeeper.compare_all(reconcile.attached, repairs) AS c;
END
$$;
COMMENT ON FUNCTION tokenkeeper.reconcile(regclass, boolean) IS
    'Compares like compare, and with dry_run => false queues what repairs the differences: registrations, and logouts, which pass the mass-failure guard and '
    'can be undone with reinstate. It writes to the ledger only, never to the table. source_id is what withdraw takes to undo it all; null for a dry run. '
    'Raises 22023 if the table is not attached or has no key, TK002 if '
    'it cannot be read: see fault in the view attachment.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.reconcile(regclass, boolean) FROM PUBLIC;
