-- oldest daemon: 0.1.0
--
-- The limit on what a sweep may prune, what status warns of, and a person's right to erasure.

ALTER TABLE tokenkeeper.sweep_run
    ADD COLUMN refused bigint NOT NULL DEFAULT 0,
    ADD COLUMN deleted_held bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN tokenkeeper.sweep_run.forced IS 'Asked for with force: the limit on the share of a topic''s tokens did not hold.';
COMMENT ON COLUMN tokenkeeper.sweep_run.refused IS
    'Tokens that were due and not pruned, because they are too large a share of their topic; see sweep_topic.';
COMMENT ON COLUMN tokenkeeper.sweep_run.deleted_held IS 'Results that the mass-failure guard held for longer than sweep.held_retention; they never counted.';

CREATE TABLE tokenkeeper.sweep_topic (
    run_id      bigint NOT NULL,
    environment text NOT NULL,
    topic       text NOT NULL,
    cause       text NOT NULL,
    tokens      bigint NOT NULL,
    pruned      bigint NOT NULL DEFAULT 0,
    refused     boolean NOT NULL,
    of_tokens   bigint,
    max_tokens  bigint,
    samples     text[],
    PRIMARY KEY (run_id, topic, environment, cause)
);
COMMENT ON TABLE tokenkeeper.sweep_topic IS
    'What a sweep found due, by topic and cause: pruned, refused, or in a dry run only counted. Kept as long as its row of sweep_run.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.cause IS 'dead, suspect, unregistered, superseded, or dormant.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.tokens IS 'How many were due when the sweep began with the topic.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.pruned IS 'How many of them have been pruned: fewer where the sweep was interrupted, or a token came back.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.refused IS 'Whether the topic was over its limit, by all causes together.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.of_tokens IS 'All tokens of the topic, as last counted; null when they were too few to matter.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.max_tokens IS 'The most that could be pruned within this day.';
COMMENT ON COLUMN tokenkeeper.sweep_topic.samples IS 'The first 8 digits of some of them, for `tokenkeeperd explain`.';

-- What is counted now and then -------------------------------------------------------------------------------------

ALTER TABLE tokenkeeper.token_count
    ADD COLUMN last_registered_at timestamptz,
    ADD COLUMN elsewhere bigint NOT NULL DEFAULT 0;
COMMENT ON COLUMN tokenkeeper.token_count.last_registered_at IS 'The latest registration among them.';
COMMENT ON COLUMN tokenkeeper.token_count.elsewhere IS
    'Of registered suspects: those that are active in the other environment, the sign of a token''s environment mixed up.';

-- For the warnings of status, which asks for one day of thirteen months.
CREATE INDEX result_count_hour ON tokenkeeper.result_count (hour);

DROP VIEW tokenkeeper.status;
CREATE VIEW tokenkeeper.status AS
WITH latest AS (
    SELECT d.* FROM tokenkeeper.daemon AS d ORDER BY d.beat_at DESC LIMIT 1
), live AS (
    SELECT count(*) AS daemons FROM tokenkeeper.daemon AS d WHERE d.beat_at > clock_timestamp() - interval '30 seconds'
      AND d.stopped_at IS NULL
), tokens AS (
    SELECT coalesce(sum(c.tokens), 0)::bigint AS total,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'active'), 0)::bigint AS active,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'stale'), 0)::bigint AS stale,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'suspect'), 0)::bigint AS suspect,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'superseded'), 0)::bigint AS superseded,
           coalesce(sum(c.tokens) FILTER (WHERE c.state = 'unregistered_by_app'), 0)::bigint AS unregistered_by_app,
           max(c.counted_at) AS as_of
    FROM tokenkeeper.token_count AS c
), rejected AS (
    -- Counted up to a limit: this view answers at once at any size.
    SELECT count(*) AS results FROM (SELECT FROM tokenkeeper.rejected_result LIMIT 10000) AS r
), rejected_lately AS (
    SELECT count(*) AS results FROM (
        SELECT r.rejected_at FROM tokenkeeper.rejected_result AS r ORDER BY r.rejected_id DESC LIMIT 10000) AS r
    WHERE r.rejected_at > clock_timestamp() - interval '1 hour'
), held AS (
    SELECT count(*) AS results FROM (SELECT FROM tokenkeeper.held_result LIMIT 10000) AS h
), guards AS (
    SELECT array_agg(format('the mass-failure guard of %s (%s) is open since %s UTC: suspects would silence %s tokens within a day, '
                         'of %s active ones; see `tokenkeeperd held list`', g.topic, g.environment,
                         to_char(g.open_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), g.tokens, coalesce(g.active, 0))
                     ORDER BY g.open_since) AS words
    FROM (SELECT * FROM tokenkeeper.guard WHERE open ORDER BY open_since LIMIT 20) AS g
), swept AS (
    SELECT s.* FROM tokenkeeper.sweep_run AS s
    WHERE s.outcome IN ('finished', 'failed', 'interrupted') AND NOT s.dry_run ORDER BY s.run_id DESC LIMIT 1
), refused AS (
    SELECT array_agg(format('the last sweep refused to prune %s of the %s tokens of %s (%s), more than %s; '
                         'see `tokenkeeperd sweep --dry-run`, and `--force`', r.tokens, r.of_tokens, r.topic, r.environment, r.max_tokens)
                     ORDER BY r.topic, r.environment) AS words
    FROM (SELECT s.topic, s.environment, sum(s.tokens) AS tokens, max(s.of_tokens) AS of_tokens, max(s.max_tokens) AS max_tokens
          FROM swept JOIN tokenkeeper.sweep_topic AS s USING (run_id) WHERE s.refused GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 20) AS r
), unregistered AS (
    -- now(), which an index takes, and clock_timestamp() is not.
    SELECT array_agg(format('%s (%s) had results within 24 hours, but no registration: does the app call tokenkeeper.register?',
                            u.topic, u.environment) ORDER BY u.topic, u.environment) AS words
    FROM (SELECT c.topic, c.environment FROM tokenkeeper.result_count AS c
          LEFT JOIN tokenkeeper.topic AS t ON t.topic = c.topic AND t.environment = c.environment
          WHERE c.hour > now() - interval '48 hours' AND c.environment IN ('production', 'sandbox') AND c.topic <> ''
            AND NOT EXISTS (SELECT FROM tokenkeeper.token_count AS k WHERE k.topic_id = t.topic_id
                            AND k.last_registered_at > k.counted_at - interval '24 hours')
          GROUP BY 1, 2
          -- Since yesterday, and still.
          HAVING max(c.hour) > now() - interval '24 hours'
             AND least(min(t.first_seen), min(c.hour)) < now() - interval '24 hours'
          ORDER BY 1, 2 LIMIT 20) AS u
), crowded AS (
    SELECT array_agg(format('a device_id of %s (%s) has 50 tokens or more, and one of them can be sent to: is it a constant?',
                            o.topic, o.environment) ORDER BY o.topic, o.environment) AS words
    FROM (SELECT DISTINCT p.topic, p.environment FROM tokenkeeper.operation AS p
          WHERE p.operation = 'device_crowded' AND p.at > now() - interval '24 hours' LIMIT 20) AS o
), mixed_up AS (
    SELECT array_agg(format('%s tokens of %s are suspect in %s, where they were registered, and active in the other environment: '
                            'does the app say the right environment?', k.elsewhere, t.topic, t.environment)
                     ORDER BY t.topic, t.environment) AS words
    FROM (SELECT * FROM tokenkeeper.token_count WHERE elsewhere > 0 ORDER BY elsewhere DESC LIMIT 20) AS k
    JOIN tokenkeeper.topic AS t USING (topic_id)
)
SELECT latest.queue_depth,
       NOT latest.queue_depth_exact AS queue_depth_estimated,
       clock_timestamp() - latest.oldest_queued_at AS oldest_result_age,
       latest.beat_at AS queue_as_of,
       rejected.results AS rejected,
       held.results AS held,
       tokens.active AS tokens_active,
       tokens.stale AS tokens_stale,
       tokens.suspect AS tokens_suspect,
       tokens.superseded AS tokens_superseded,
       tokens.unregistered_by_app AS tokens_unregistered_by_app,
       tokens.as_of AS tokens_as_of,
       swept.finished_at AS last_sweep_at,
       swept.trigger AS last_sweep_trigger,
       swept.outcome AS last_sweep_outcome,
       live.daemons AS live_daemons,
       array_remove(ARRAY[
           CASE WHEN latest.beat_at IS NULL THEN 'no daemon has ever run on this database'
                WHEN live.daemons = 0 THEN 'no daemon is running; the last was seen at '
                    || to_char(latest.beat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' END,
           'results stay in the queue, because PostgreSQL refuses: ' || latest.trouble,
           CASE WHEN latest.oldest_queued_at < clock_timestamp() - interval '5 minutes'
                THEN 'results have been waiting for longer than five minutes' END,
           CASE WHEN held.results > 0
                THEN CASE WHEN held.results = 10000 THEN '10000 or more' ELSE held.results::text END
                    || ' results are held by the mass-failure guard; see `tokenkeeperd held list`' END,
           CASE WHEN rejected.results > 0
                THEN CASE WHEN rejected.results = 10000 THEN '10000 or more' ELSE rejected.results::text END
                    || ' results could not be understood'
                    || CASE WHEN rejected_lately.results > 0
                            THEN ', ' || CASE WHEN rejected_lately.results = 10000 THEN '10000 or more'
                                              ELSE rejected_lately.results::text END || ' of them within the last hour' ELSE '' END
                    || '; see `tokenkeeperd rejected list`' END,
           CASE WHEN swept.outcome = 'failed' THEN 'the last sweep failed: ' || coalesce(swept.message, 'no message') END,
           CASE WHEN coalesce(swept.finished_at, latest.started_at) < clock_timestamp() - 2 * latest.sweep_interval - interval '1 minute'
                THEN 'no sweep has finished within twice its interval' END
       ], NULL) || guards.words || refused.words || unregistered.words || mixed_up.words || crowded.words AS warnings
FROM live
CROSS JOIN tokens
CROSS JOIN rejected
CROSS JOIN rejected_lately
CROSS JOIN held
CROSS JOIN guards
CROSS JOIN refused
CROSS JOIN unregistered
CROSS JOIN mixed_up
CROSS JOIN crowded
LEFT JOIN latest ON true
LEFT JOIN swept ON true;
COMMENT ON VIEW tokenkeeper.status IS
    'One row: how it goes. The queue as the daemon that reported last saw it; the tokens as they were last counted; warnings in words.';
COMMENT ON COLUMN tokenkeeper.status.queue_depth_estimated IS 'True when queue_depth was estimated from the queue''s size.';
COMMENT ON COLUMN tokenkeeper.status.oldest_result_age IS 'How long the oldest result seen has been waiting; null when none was.';
COMMENT ON COLUMN tokenkeeper.status.rejected IS 'Rows of rejected_result; 10000 means that many or more.';
COMMENT ON COLUMN tokenkeeper.status.held IS 'Rows of held_result; 10000 means that many or more.';
COMMENT ON COLUMN tokenkeeper.status.live_daemons IS 'Daemons that have reported within the last 30 seconds.';

-- Erasure ----------------------------------------------------------------------------------------------------------

CREATE FUNCTION tokenkeeper.halt_drains() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'the isolation level is %, expected read committed', current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction', HINT = 'BEGIN ISOLATION LEVEL READ COMMITTED';
    END IF;
    -- Every batch of the drain holds this lock, shared. From here on until the transaction ends none is under way, so what is
    -- queued stays where it can be found. While one waits here no batch begins: hence not for long.
    PERFORM set_config('lock_timeout', '10s', true);
    PERFORM pg_advisory_xact_lock(29803, 3);
    PERFORM set_config('lock_timeout', patience, true);
END
$$;
COMMENT ON FUNCTION tokenkeeper.halt_drains() IS
    'Waits for the batches that are under way, and has none begin until the transaction ends. Raises 55P03 after ten seconds: an operator has an open transaction.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.halt_drains() FROM PUBLIC;

CREATE FUNCTION tokenkeeper.mentions(result text, hex text[], base64 text[]) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
-- Short tokens are looked for as they are: they would be found within others.
RETURN lower(regexp_replace(result, '[^0-9A-Fa-f]', '', 'g')) = ANY (hex)
    OR EXISTS (SELECT FROM unnest(hex, base64) AS t (digits, base64)
               WHERE length(t.digits) >= 16
                 AND (strpos(lower(result), t.digits) > 0 OR strpos(result, t.base64) > 0
                      OR strpos(lower(regexp_replace(result, '[^0-9A-Fa-f]', '', 'g')), t.digits) > 0));
COMMENT ON FUNCTION tokenkeeper.mentions(text, text[], text[]) IS 'Whether a text has one of these tokens in it, however it is written.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.mentions(text, text[], text[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.erase(token_keys bytea[], device_ids text[]) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    hex text[] := ARRAY(SELECT encode(k, 'hex') FROM unnest(erase.token_keys) AS k);
    base64 text[] := ARRAY(SELECT encode(k, 'base64') FROM unnest(erase.token_keys) AS k);
    guarded integer[];
    total bigint := 0;
    part bigint;
BEGIN
    -- Locks in the order of all others: guards, devices, tokens.
    PERFORM FROM tokenkeeper.topic_guard AS g ORDER BY g.topic_id FOR UPDATE;
    PERFORM FROM tokenkeeper.device AS d
    WHERE d.device_id = ANY (erase.device_ids) OR (d.token_key = ANY (erase.token_keys) AND d.token_key <> '')
    ORDER BY d.topic_id, d.device_id COLLATE "C"
    FOR UPDATE;
    PERFORM FROM tokenkeeper.topic AS t
    CROSS JOIN unnest(erase.token_keys) AS k (token_key)
    JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id AND l.token_key = k.token_key
    ORDER BY l.topic_id, l.token_key
    FOR UPDATE OF l;

    SELECT coalesce(array_agg(DISTINCT a.topic_id), '{}') INTO guarded FROM (
        SELECT h.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(erase.token_keys) AS k (token_key)
        JOIN tokenkeeper.held_result AS h ON h.topic_id = g.topic_id AND h.token_key = k.token_key
        UNION ALL
        SELECT s.topic_id FROM tokenkeeper.topic_guard AS g CROSS JOIN unnest(erase.token_keys) AS k (token_key)
        JOIN tokenkeeper.suspect AS s ON s.topic_id = g.topic_id AND s.token_key = k.token_key AND s.silenced) AS a;

    DELETE FROM tokenkeeper.send_result AS r
    WHERE tokenkeeper.mentions(r.token, hex, base64) OR tokenkeeper.mentions(concat_ws(' ', r.token, r.topic, r.body), hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.rejected_result AS r
    WHERE tokenkeeper.mentions(r.token, hex, base64) OR tokenkeeper.mentions(concat_ws(' ', r.token, r.topic, r.body), hex, base64);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.held_result AS h
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE h.topic_id = t.topic_id AND h.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.ledger AS l
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE l.topic_id = t.topic_id AND l.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    DELETE FROM tokenkeeper.suspect AS s
    USING tokenkeeper.topic AS t, unnest(erase.token_keys) AS k (token_key)
    WHERE s.topic_id = t.topic_id AND s.token_key = k.token_key;
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    PERFORM tokenkeeper.recount_guard(g) FROM unnest(guarded) AS g;
    -- A device without tokens has nothing left to say; of others, not which token named it.
    DELETE FROM tokenkeeper.device AS d
    WHERE (d.device_id = ANY (erase.device_ids) OR (d.token_key = ANY (erase.token_keys) AND d.token_key <> ''))
      AND NOT EXISTS (SELECT FROM tokenkeeper.ledger AS l WHERE l.device_id = d.device_id AND l.topic_id + 0 = d.topic_id);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    UPDATE tokenkeeper.device AS d SET named_at = '-infinity', token_key = ''
    WHERE d.token_key = ANY (erase.token_keys) AND d.token_key <> '';
    DELETE FROM tokenkeeper.token_event_log AS e WHERE e.token_key = ANY (erase.token_keys);
    GET DIAGNOSTICS part = ROW_COUNT;
    total := total + part;
    UPDATE tokenkeeper.sweep_topic AS s SET samples = NULL
    WHERE s.samples && ARRAY(SELECT left(h, 8) FROM unnest(hex) AS h);
    INSERT INTO tokenkeeper.operation (operation, rows) VALUES ('forgotten', total);
    RETURN total;
END
$$;
COMMENT ON FUNCTION tokenkeeper.erase(bytea[], text[]) IS
    'What forget and forget_device have in common: every row about these tokens, in every topic, and these devices as far as they have no other token. '
    'Drains have been halted before.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.erase(bytea[], text[]) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.forget(token text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(forget.token);
BEGIN
    IF key IS NULL THEN
        RAISE EXCEPTION 'device token is %, expected 1 to 512 bytes in hex', CASE
            WHEN forget.token IS NULL THEN 'null'
            ELSE quote_literal(left(forget.token, 8)) || '... (' || length(forget.token) || ' characters)' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.halt_drains();
    RETURN tokenkeeper.erase(ARRAY[key], ARRAY(
        SELECT l.device_id FROM tokenkeeper.topic AS t JOIN tokenkeeper.ledger AS l USING (topic_id)
        WHERE l.token_key = key AND l.device_id IS NOT NULL));
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget(text) IS
    'A person''s right to erasure: every row about a device token, in every topic and environment, goes from ledger, history, queue, held and '
    'rejected results; answers how many rows. Drains stand still until the transaction ends: commit at once. Raises 22023 for a malformed token, '
    '55P03 when the drains could not be halted within ten seconds, 25001 under another isolation level than read committed.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget(text) FROM PUBLIC;

CREATE FUNCTION tokenkeeper.forget_device(device_id text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    total bigint;
    part bigint;
BEGIN
    IF coalesce(forget_device.device_id, '') = '' THEN
        RAISE EXCEPTION 'device_id is %, expected the one given to register', CASE WHEN forget_device.device_id IS NULL THEN 'null' ELSE 'empty' END
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM tokenkeeper.halt_drains();
    total := tokenkeeper.erase(ARRAY(
        SELECT l.token_key FROM tokenkeeper.ledger AS l WHERE l.device_id = forget_device.device_id
        UNION
        -- Those that were pruned since, and are no other device's now.
        SELECT e.token_key FROM tokenkeeper.token_event_log AS e
        WHERE e.device_id = forget_device.device_id AND NOT EXISTS (
            SELECT FROM tokenkeeper.ledger AS l WHERE l.topic_id = e.topic_id AND l.token_key = e.token_key
              AND l.device_id IS DISTINCT FROM forget_device.device_id)), ARRAY[forget_device.device_id]);
    DELETE FROM tokenkeeper.token_event_log AS e WHERE e.device_id = forget_device.device_id;
    GET DIAGNOSTICS part = ROW_COUNT;
    RETURN total + part;
END
$$;
COMMENT ON FUNCTION tokenkeeper.forget_device(text) IS
    'A person''s right to erasure, by the device_id given to register: every token of the device, as by forget, and the device; answers how many rows. '
    'Drains stand still until the transaction ends: commit at once.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.forget_device(text) FROM PUBLIC;
