-- For people: tokens, their history, and the counts of results.

CREATE OR REPLACE VIEW tokenkeeper.token AS
SELECT t.environment,
       t.topic,
       encode(l.token_key, 'hex') AS token,
       tokenkeeper.state_of(l) AS state,
       NOT l.suppressed AS sendable,
       nullif(l.registered_at, '-infinity') AS registered_at,
       greatest(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS invalidated_at,
       tokenkeeper.reason_of(l) COLLATE "C" AS reason,
       l.device_id,
       l.tags,
       l.token_key,
       tokenkeeper.cause_of(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS cause,
       l.user_id
FROM tokenkeeper.ledger AS l
JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.token IS
    'The ledger for people. To find one token: WHERE topic = ... AND environment = ... AND token_key = tokenkeeper.token_key(''...'').';
COMMENT ON COLUMN tokenkeeper.token.state IS
    'active, or the cause of the suppression: stale (a 410), suspect, superseded, unregistered_by_app.';
COMMENT ON COLUMN tokenkeeper.token.invalidated_at IS 'The latest instant of a cause. Of an active token, it is earlier than registered_at.';
COMMENT ON COLUMN tokenkeeper.token.cause IS 'The cause of invalidated_at, also of an active token.';

CREATE OR REPLACE VIEW tokenkeeper.sendable_token AS
SELECT t.environment, t.topic, encode(l.token_key, 'hex') AS token, l.tags, l.device_id, l.registered_at, l.token_key, l.user_id
FROM tokenkeeper.ledger AS l
JOIN tokenkeeper.topic AS t USING (topic_id)
WHERE (NOT l.suppressed OR t.gate = 'observe') AND l.registered_at > '-infinity';
COMMENT ON VIEW tokenkeeper.sendable_token IS 'The sendable registered tokens; if the topic''s gate only observes, all registered ones.';

CREATE OR REPLACE VIEW tokenkeeper.suppressed_token AS
-- Not on the view token: a reader would lock one view after the other, and could deadlock with a migration that replaces both.
SELECT t.environment, t.topic, encode(l.token_key, 'hex') AS token, tokenkeeper.state_of(l) AS state,
       tokenkeeper.reason_of(l) COLLATE "C" AS reason, nullif(l.registered_at, '-infinity') AS registered_at,
       greatest(l.stale_at, l.suspect_at, l.logged_out_at, l.superseded_at) AS invalidated_at, l.token_key,
       l.device_id, l.user_id
FROM tokenkeeper.suppression AS s
JOIN tokenkeeper.ledger AS l USING (topic_id, token_key)
JOIN tokenkeeper.topic AS t USING (topic_id)
WHERE t.gate IS DISTINCT FROM 'observe';
COMMENT ON VIEW tokenkeeper.suppressed_token IS
    'The suppressed tokens; none if the topic''s gate only observes. '
    'Join your own table on token_key = tokenkeeper.token_key(yours.token).';

CREATE OR REPLACE VIEW tokenkeeper.token_event AS
SELECT e.event_id, e.at, t.environment, t.topic, encode(e.token_key, 'hex') AS token, e.event, e.cause, e.reason,
       e.device_id, e.registered_before, e.registered_after, e.invalidated_before, e.invalidated_after,
       e.token_key, e.transaction_id, e.user_id, e.source_id
FROM tokenkeeper.token_event_log AS e
JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.token_event IS
    'The history of tokens, with both instants before and after. Events: registered (the first time only), invalidated, revived, superseded, '
    'unregistered_by_app, late_feedback_ignored, pruned, reinstated, tagged (by the function tag), user_changed (user_id is the new one). What changes '
    'nothing leaves no event.';
COMMENT ON COLUMN tokenkeeper.token_event.source_id IS 'The registration_source that caused it, if any.';
COMMENT ON COLUMN tokenkeeper.token_event.transaction_id IS
    'To follow the history, use it together with pg_snapshot_xmin(pg_current_snapshot()): event_id alone misses late commits. After a restore from a dump, '
    'the first sweep gives restored events its own id, so a reader gets them once more.';

CREATE OR REPLACE VIEW tokenkeeper.result_stat AS
SELECT c.hour, c.environment, c.topic, c.status, c.reason, sum(c.results)::bigint AS results
FROM tokenkeeper.result_count AS c
GROUP BY c.hour, c.environment, c.topic, c.status, c.reason;
COMMENT ON VIEW tokenkeeper.result_stat IS
    'How many results were recorded. Rejected ones have the reason (rejected), or (rejected, not kept) beyond drain.rejected_per_hour.';

CREATE OR REPLACE FUNCTION tokenkeeper.tagged_tokens(
    expression text, topic text, environment text DEFAULT 'production', at_most integer DEFAULT 100)
RETURNS TABLE (token text, state text, sendable boolean, tags text[], device_id text, user_id text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    query tsquery := tokenkeeper.tag_query(tagged_tokens.expression);
    name text COLLATE "C" := tagged_tokens.topic;
    env text COLLATE "C" := coalesce(tagged_tokens.environment, 'production');
    of_topic integer := (SELECT t.topic_id FROM tokenkeeper.topic AS t WHERE t.topic = name AND t.environment = env);
    observes boolean := (SELECT t.gate IS NOT DISTINCT FROM 'observe' FROM tokenkeeper.topic AS t WHERE t.topic_id = of_topic);
BEGIN
    -- EXECUTE: plan for this expression. One that matches tokens without tags cannot use the index.
    RETURN QUERY EXECUTE $statement$
        SELECT encode(l.token_key, 'hex'), tokenkeeper.state_of(l), NOT l.suppressed OR $4, l.tags, l.device_id, l.user_id
        FROM tokenkeeper.ledger AS l
        WHERE l.topic_id = $1 AND l.registered_at > '-infinity' AND tokenkeeper.tag_vector(l.tags) @@ $2 $statement$
        || CASE WHEN tokenkeeper.tag_vector(NULL) @@ query THEN '' ELSE $statement$ AND l.tags <> '{}' $statement$ END
        || 'ORDER BY l.token_key LIMIT $3'
        USING of_topic, query, greatest(coalesce(tagged_tokens.at_most, 100), 0), observes;
END
$$;
COMMENT ON FUNCTION tokenkeeper.tagged_tokens(text, text, text, integer) IS
    'The registered tokens of a topic, suppressed ones included, that a tag expression matches (see tag_query): the first at_most, in the order of the '
    'tokens. Raises 22023 for an invalid expression.';
