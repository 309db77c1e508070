-- Policies, guards and reinstatements, for operators.

CREATE OR REPLACE VIEW tokenkeeper.topic_policy AS
SELECT t.environment, t.topic, t.gate, t.suppressed_retention, t.dormant_after, t.guard_allowance, t.guard_max_share,
       t.prune_allowance, t.prune_max_share, t.first_seen, t.background_per_hour
FROM tokenkeeper.topic AS t;
ALTER VIEW tokenkeeper.topic_policy ALTER COLUMN environment SET DEFAULT 'production';
COMMENT ON VIEW tokenkeeper.topic_policy IS
    'One row per topic and environment. Change it by UPDATE, or by INSERT for a topic that has not been seen. It takes effect at once in the gate, and '
    'in the daemons with the next batch or sweep. Null means the default: enforce for the gate, the daemon''s configuration for the rest.';
COMMENT ON COLUMN tokenkeeper.topic_policy.gate IS
    'enforce; or observe: the gate returns true for each well-formed token of the topic, sendable_token has all registered tokens, '
    'suppressed_token has none, and token.sendable shows what the gate would refuse.';
COMMENT ON COLUMN tokenkeeper.topic_policy.suppressed_retention IS
    'How long a suppressed token is kept after the ledger learned of its suppression: 1 hour to 3650 days; default sweep.suppressed_retention.';
COMMENT ON COLUMN tokenkeeper.topic_policy.dormant_after IS
    'Prune tokens that were not registered again for this long: 1 day to 3650 days, 0 for never; default sweep.dormant_after.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_allowance IS
    'Suspects may suppress this many tokens within a day, whatever their share; default guard.allowance.';
COMMENT ON COLUMN tokenkeeper.topic_policy.guard_max_share IS
    'Suspects that would suppress more than this share of the active tokens within a day are held: 0.005 is 0.5 percent, 1 turns the guard off; '
    'default guard.max_share.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_allowance IS
    'A sweep may prune this many tokens within a day, whatever their share; default sweep.prune_allowance.';
COMMENT ON COLUMN tokenkeeper.topic_policy.prune_max_share IS
    'A sweep refuses to prune more than this share of the topic''s tokens: 0.1 is 10 percent, 1 is no limit; default sweep.max_prune_share.';
COMMENT ON COLUMN tokenkeeper.topic_policy.background_per_hour IS
    'How many background pushes a device may get within an hour, 0 for no limit; default send.background_per_hour.';

CREATE OR REPLACE VIEW tokenkeeper.guard AS
SELECT t.environment, t.topic, g.tripped_at IS NOT NULL AS tripped, g.tripped_at, g.tokens, g.active, g.max_tokens, g.undo_since,
       CASE WHEN g.tripped_at IS NOT NULL AND g.undo_since IS NOT NULL THEN
           -- A sender may write anything as a topic, so it is quoted for the shell.
           format('tokenkeeperd reinstate --topic%s --environment %s --since %s',
                  CASE WHEN t.topic LIKE '-%' THEN '=' ELSE ' ' END || CASE WHEN t.topic ~ '[^A-Za-z0-9._-]' THEN '''' || replace(t.topic, '''', '''"''"''') || '''' ELSE t.topic END, t.environment,
                  to_char(g.undo_since AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) END AS undo
FROM tokenkeeper.topic_guard AS g JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.guard IS
    'The mass-failure guard by topic: whether it has tripped and holds suspects, by what numbers, and the command that undoes what was recorded before.';
COMMENT ON COLUMN tokenkeeper.guard.tokens IS 'Tokens that suspects have suppressed or would have within a day, as of the latest suspect.';
COMMENT ON COLUMN tokenkeeper.guard.active IS 'The active tokens of the topic at that time.';
COMMENT ON COLUMN tokenkeeper.guard.max_tokens IS 'How many may be suppressed within a day.';

CREATE OR REPLACE VIEW tokenkeeper.reinstatement AS
SELECT t.environment, t.topic, e.since, e.until, e.at, e.done_by, e.exclusion_id, e.finished_at, e.tokens,
       CASE WHEN e.finished_at IS NULL THEN (
           SELECT count(*) FROM (SELECT FROM tokenkeeper.suspect AS s
                                 WHERE s.topic_id + 0 = e.topic_id AND s.suspect_at BETWEEN e.since AND e.until LIMIT 10000) AS l)
       ELSE 0 END AS remaining
FROM tokenkeeper.exclusion AS e JOIN tokenkeeper.topic AS t USING (topic_id);
COMMENT ON VIEW tokenkeeper.reinstatement IS
    'The windows given to reinstate: suspects whose instant lies in a window, ends included, never count, whenever they arrive. The daemons, or '
    '`tokenkeeperd reinstate`, undo those recorded before; until then their tokens stay suppressed.';
COMMENT ON COLUMN tokenkeeper.reinstatement.finished_at IS 'When all of it was undone; null while the undo is in progress.';
COMMENT ON COLUMN tokenkeeper.reinstatement.tokens IS 'How many tokens have become sendable because of it so far.';
COMMENT ON COLUMN tokenkeeper.reinstatement.remaining IS 'Suspects that are still to be undone; 10000 means 10000 or more.';
