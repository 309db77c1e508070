-- oldest daemon: 0.1.0
--
-- What people decide for a topic, what was decided, and the gate that listens to it.

ALTER TABLE tokenkeeper.topic
    ADD COLUMN gate text COLLATE "C" CHECK (gate IN ('enforce', 'observe')),
    ADD COLUMN stale_retention interval CHECK (stale_retention BETWEEN interval '1 hour' AND interval '3650 days'),
    ADD COLUMN dormant_after interval
        CHECK (dormant_after = interval '0' OR dormant_after BETWEEN interval '1 day' AND interval '3650 days'),
    ADD COLUMN guard_min_tokens bigint CHECK (guard_min_tokens >= 0),
    ADD COLUMN guard_max_share numeric CHECK (guard_max_share BETWEEN 0 AND 1),
    ADD COLUMN prune_min_tokens bigint CHECK (prune_min_tokens >= 0),
    ADD COLUMN prune_max_share numeric CHECK (prune_max_share BETWEEN 0 AND 1);

CREATE VIEW tokenkeeper.topic_policy AS
SELECT t.environment, t.topic, t.gate, t.stale_retention, t.dormant_after, t.guard_min_tokens, t.guard_max_share,
       t.prune_min_tokens, t.prune_max_share, t.first_seen
FROM tokenkeeper.topic AS t;
ALTER VIEW tokenkeeper.topic_policy ALTER COLUMN environment SET DEFAULT 'production';
COMMENT ON VIEW tokenkeeper.topic_policy IS
    'One row a topic and environment, changed by UPDATE (or INSERT, for a topic not seen yet); in force at once for the gate, '
    'with the next batch or sweep for the daemons. Null means the default: of the gate enforce, of the rest what the daemon is configured with.';
COMMENT ON COLUMN tokenkeeper.topic_policy.gate IS
    'enforce; or observe: the gate answers true for every well-formed token of the topic, sendable_token has all that are registered, '
    'suppressed_token none, and token.sendable shows what the gate would withhold.';
COMMENT ON COLUMN tokenkeeper.topic_policy.stale_retention IS
    'How long a suppressed token is kept, from when the ledger learned of it: 1 hour to 3650 days; else sweep.stale_retention.';
COMMENT ON COLUMN tokenkeeper.topic_policy.dormant_after IS
    'Prune tokens that were not registered again for this long: 1 day to 3650 days, 0 for never; else sweep.dormant_after.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_min_tokens IS
    'So many tokens may be silenced by suspects within a day, whatever their share; else guard.min_tokens.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_max_share IS
    'Beyond this share of the active tokens, silenced within a day, suspects are held: 0.005 is 0.5 percent, 1 turns the guard off; '
    'else guard.max_share.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_min_tokens IS
    'So many tokens may be pruned within a day, whatever their share; else sweep.min_prune_tokens.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_max_share IS
    'A sweep refuses to prune more than this share of the topic''s tokens: 0.1 is 10 percent, 1 is no limit; else sweep.max_prune_share.';

CREATE TABLE tokenkeeper.operation (
    operation_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    operation    text NOT NULL CHECK (operation IN ('guard_opened', 'guard_closed', 'held_released', 'held_discarded',
        'reinstated', 'rejected_requeued', 'forgotten', 'policy_changed', 'device_crowded')),
    environment  text,
    topic        text,
    rows         bigint,
    message      text,
    done_by      text NOT NULL DEFAULT session_user
);
COMMENT ON TABLE tokenkeeper.operation IS
    'What the mass-failure guard and people did, and devices that have 50 tokens: one row each, so that what a token''s story does not tell can be told by its topic''s.';
COMMENT ON COLUMN tokenkeeper.operation.rows IS 'How many tokens or results it was about.';
COMMENT ON COLUMN tokenkeeper.operation.done_by IS 'The login role; of what the guard did, that of the daemon.';

CREATE FUNCTION tokenkeeper.note_policy() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO tokenkeeper.operation (operation, environment, topic, message)
    SELECT 'policy_changed', new.environment, new.topic,
           string_agg(n.key || ' is ' || coalesce(n.value, 'the default') || ', was ' || coalesce(o.value, 'the default'), '; '
                      ORDER BY n.key)
    FROM jsonb_each_text(to_jsonb(new)) AS n JOIN jsonb_each_text(to_jsonb(old)) AS o USING (key)
    WHERE n.value IS DISTINCT FROM o.value;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION tokenkeeper.note_policy() IS 'Writes a changed topic_policy into operation. A trigger.';
REVOKE EXECUTE ON FUNCTION tokenkeeper.note_policy() FROM PUBLIC;
CREATE TRIGGER note_policy AFTER UPDATE ON tokenkeeper.topic FOR EACH ROW
    WHEN (old.* IS DISTINCT FROM new.*) EXECUTE FUNCTION tokenkeeper.note_policy();

-- The gate, as in 0003, and now open where the policy says observe -------------------------------------------------

CREATE OR REPLACE FUNCTION tokenkeeper.is_sendable(token text, topic text, environment text DEFAULT 'production') RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    key bytea := tokenkeeper.token_key(is_sendable.token);
BEGIN
    RETURN key IS NOT NULL AND NOT EXISTS (
        SELECT FROM tokenkeeper.topic AS t
        JOIN tokenkeeper.ledger AS l ON l.topic_id = t.topic_id
        WHERE t.topic = is_sendable.topic AND t.environment = coalesce(is_sendable.environment, 'production')
          AND t.gate IS DISTINCT FROM 'observe' AND l.token_key = key AND l.suppressed);
END
$$;

CREATE OR REPLACE FUNCTION tokenkeeper.sendable(tokens text[], topic text, environment text DEFAULT 'production') RETURNS SETOF text
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER ROWS 1000
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    of_topic integer := (
        SELECT t.topic_id FROM tokenkeeper.topic AS t
        WHERE t.topic = sendable.topic AND t.environment = coalesce(sendable.environment, 'production')
          AND t.gate IS DISTINCT FROM 'observe');
BEGIN
    RETURN QUERY
        SELECT asked.token FROM unnest(sendable.tokens) WITH ORDINALITY AS asked (token, position)
        WHERE tokenkeeper.token_key(asked.token) IS NOT NULL AND NOT EXISTS (
            SELECT FROM tokenkeeper.ledger AS l
            WHERE l.topic_id = of_topic AND l.token_key = tokenkeeper.token_key(asked.token) AND l.suppressed)
        ORDER BY asked.position;
END
$$;

CREATE OR REPLACE VIEW tokenkeeper.sendable_token AS
SELECT t.environment, t.topic, encode(l.token_key, 'hex') AS token, l.tags, l.device_id, l.registered_at, l.token_key
FROM tokenkeeper.ledger AS l
JOIN tokenkeeper.topic AS t USING (topic_id)
WHERE (NOT l.suppressed OR t.gate = 'observe') AND l.registered_at > '-infinity';
COMMENT ON VIEW tokenkeeper.sendable_token IS
    'The registered tokens that may be sent to, with their tags; where the topic''s gate only observes, all that are registered.';

CREATE OR REPLACE VIEW tokenkeeper.suppressed_token AS
SELECT t.environment, t.topic, v.token, v.state, v.reason, v.registered_at, v.invalidated_at, v.token_key
FROM tokenkeeper.token AS v
JOIN tokenkeeper.topic AS t ON t.topic = v.topic AND t.environment = v.environment
WHERE NOT v.sendable AND t.gate IS DISTINCT FROM 'observe';
COMMENT ON VIEW tokenkeeper.suppressed_token IS
    'The tokens that must not be sent to; none where the topic''s gate only observes. '
    'Join one''s own table by token_key = tokenkeeper.token_key(own.token).';
