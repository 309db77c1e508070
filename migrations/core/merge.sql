-- What one report about a token does to its row: the rule of register, unregister, merge_batch and record.
--
-- A token_report says what a registration, a logout, a 410 or a suspect says. A suspect is a response that casts doubt on its token. registered_at is -infinity
-- if the token was never registered.
--
-- Each fact is the greatest that was ever reported (merged). So reports may arrive late, twice and in any order. event_of makes the event for the history.
-- checks_of names the devices that resolve_devices compares. All are pure and take no locks. The planner inlines all but without.

CREATE OR REPLACE FUNCTION tokenkeeper.registration_of(
    n integer, topic_id integer, token_key bytea, one_token boolean, registered_at timestamptz, device_id text, user_id text, tags text[],
    details_at timestamptz, returned_at timestamptz DEFAULT NULL, received_at timestamptz DEFAULT NULL, source_id bigint DEFAULT NULL)
RETURNS tokenkeeper.token_report
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(n, topic_id, token_key, one_token, registered_at, returned_at, device_id, details_at, user_id, details_at, tags, details_at,
           NULL, NULL, NULL, received_at, NULL, source_id)::tokenkeeper.token_report;
COMMENT ON FUNCTION tokenkeeper.registration_of(
    integer, integer, bytea, boolean, timestamptz, text, text, text[], timestamptz, timestamptz, timestamptz, bigint) IS
    'A registration as a report. details_at is the instant of the device, the user and the tags.';

CREATE OR REPLACE FUNCTION tokenkeeper.invalidation_of(
    n integer, topic_id integer, token_key bytea, cause text, invalidated_at timestamptz, reason text, received_at timestamptz,
    released boolean DEFAULT NULL, source_id bigint DEFAULT NULL, user_id text DEFAULT NULL)
RETURNS tokenkeeper.token_report
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(n, topic_id, token_key, NULL, NULL, NULL, NULL, NULL, user_id, NULL, NULL, NULL,
           cause, invalidated_at, reason, received_at, released, source_id)::tokenkeeper.token_report;
COMMENT ON FUNCTION tokenkeeper.invalidation_of(integer, integer, bytea, text, timestamptz, text, timestamptz, boolean, bigint, text) IS
    'A 410, a suspect or a logout as a report. A logout with a user_id counts only if the token is not another user''s.';

CREATE OR REPLACE FUNCTION tokenkeeper.without(reports tokenkeeper.token_report[], numbers integer[]) RETURNS tokenkeeper.token_report[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN numbers = '{}' THEN reports ELSE ARRAY(SELECT r FROM unnest(reports) AS r WHERE r.n NOT IN (SELECT unnest(numbers))) END;
COMMENT ON FUNCTION tokenkeeper.without(tokenkeeper.token_report[], integer[]) IS 'These reports without those of these numbers.';

CREATE OR REPLACE FUNCTION tokenkeeper.merged(was tokenkeeper.ledger, reported tokenkeeper.token_report) RETURNS TABLE (
    registered_at timestamptz, stale_at timestamptz, stale_reason text, suspect_at timestamptz, suspect_reason text, unregistered_by_app_at timestamptz,
    returned_at timestamptz, superseded_at timestamptz, unresolved boolean, of_constant boolean, device_id text, device_at timestamptz, user_id text,
    user_at timestamptz, tags text[], tags_at timestamptz)
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT s.registered_at, s.stale_at, s.stale_reason, s.suspect_at, s.suspect_reason, s.unregistered_by_app_at, s.returned_at, s.superseded_at,
           CASE WHEN s.is_open THEN (reported).one_token AND s.device_id IS NOT NULL ELSE coalesce((was).unresolved, false) END,
           NOT s.changes_device AND coalesce((was).of_constant, false),
           s.device_id, s.device_at, s.user_id, s.user_at, s.tags, s.tags_at
    FROM (
        -- What comes to a device or is registered again is current until the device's tokens are compared: a push too many does less harm than one too few.
        SELECT m.*, CASE WHEN NOT m.changes_device AND m.registered_at = (was).registered_at THEN (was).superseded_at END AS superseded_at,
               m.changes_device OR ((was).superseded_at IS NOT NULL AND m.registered_at > (was).registered_at) AS is_open
        FROM (
            SELECT coalesce(greatest((was).registered_at, (reported).registered_at), '-infinity') AS registered_at,
                   CASE WHEN g.stale THEN (reported).invalidated_at ELSE (was).stale_at END AS stale_at,
                   CASE WHEN g.stale THEN (reported).reason ELSE (was).stale_reason END AS stale_reason,
                   CASE WHEN g.suspect THEN (reported).invalidated_at ELSE (was).suspect_at END AS suspect_at,
                   CASE WHEN g.suspect THEN (reported).reason ELSE (was).suspect_reason END AS suspect_reason,
                   CASE WHEN (reported).cause = 'unregistered_by_app' AND ((reported).user_id <> (was).user_id) IS NOT TRUE
                        THEN greatest((was).unregistered_by_app_at, (reported).invalidated_at) ELSE (was).unregistered_by_app_at END AS unregistered_by_app_at,
                   greatest((was).returned_at, (reported).returned_at) AS returned_at,
                   CASE WHEN d.names THEN nullif((reported).device_id, '') ELSE (was).device_id END AS device_id,
                   CASE WHEN d.names THEN (reported).device_at ELSE (was).device_at END AS device_at,
                   d.names AND nullif((reported).device_id, '') IS DISTINCT FROM (was).device_id AS changes_device,
                   CASE WHEN u.names THEN nullif((reported).user_id, '') ELSE (was).user_id END AS user_id,
                   CASE WHEN u.names THEN (reported).user_at ELSE (was).user_at END AS user_at,
                   CASE WHEN t.names THEN (reported).tags ELSE (was).tags END AS tags,
                   CASE WHEN t.names THEN (reported).tags_at ELSE (was).tags_at END AS tags_at
            -- At the same instant, the greater value counts; a cleared one is the least.
            FROM (SELECT (reported).device_id IS NOT NULL AND ((was).device_at IS NULL
                         OR ((reported).device_at, (reported).device_id) > ((was).device_at, coalesce((was).device_id, ''))) AS names) AS d
            CROSS JOIN (SELECT (reported).user_id IS NOT NULL AND (reported).cause IS NULL AND ((was).user_at IS NULL
                               OR ((reported).user_at, (reported).user_id) > ((was).user_at, coalesce((was).user_id, ''))) AS names) AS u
            CROSS JOIN (SELECT (reported).tags IS NOT NULL AND ((was).tags_at IS NULL
                               OR ((reported).tags_at, (reported).tags) > ((was).tags_at, (was).tags)) AS names) AS t
            CROSS JOIN (SELECT (reported).cause = 'stale' AND ((was).stale_at IS NULL
                               OR ((reported).invalidated_at, (reported).reason) > ((was).stale_at, (was).stale_reason)) AS stale,
                               (reported).cause = 'suspect' AND ((was).suspect_at IS NULL
                               OR ((reported).invalidated_at, (reported).reason) > ((was).suspect_at, (was).suspect_reason)) AS suspect) AS g
        ) AS m
    ) AS s;
END;
COMMENT ON FUNCTION tokenkeeper.merged(tokenkeeper.ledger, tokenkeeper.token_report) IS
    'Merges a report into a token''s row: each fact is the greater of the two. was is null if the token was unknown. A token that changes its device, or is '
    'registered again, is current until the device''s tokens are compared.';

CREATE OR REPLACE FUNCTION tokenkeeper.event_of(was tokenkeeper.ledger, is_now tokenkeeper.ledger, reported tokenkeeper.token_report)
RETURNS TABLE (topic_id integer, token_key bytea, event text, cause text, reason text, device_id text, user_id text, source_id bigint,
    registered_before timestamptz, registered_after timestamptz, invalidated_before timestamptz, invalidated_after timestamptz)
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT (is_now).topic_id, (is_now).token_key, c.event, c.cause,
           CASE c.cause WHEN 'stale' THEN (is_now).stale_reason WHEN 'suspect' THEN (is_now).suspect_reason END,
           (is_now).device_id, (is_now).user_id, (reported).source_id,
           nullif((was).registered_at, '-infinity'), nullif((is_now).registered_at, '-infinity'),
           tokenkeeper.invalidated_at(was), tokenkeeper.invalidated_at(is_now)
    FROM (SELECT e.event, CASE WHEN (reported).cause IS NULL
                               THEN CASE WHEN e.event = 'revived' AND (is_now).registered_at = (was).registered_at THEN 'returned' ELSE 'registration' END
                               WHEN e.event = 'late_feedback_ignored' THEN (reported).cause
                               ELSE tokenkeeper.state_of(is_now) END AS cause
          FROM (SELECT CASE
              WHEN (reported).cause IS NULL THEN CASE
                  WHEN (is_now).registered_at > coalesce((was).registered_at, '-infinity') AND coalesce((was).registered_at, '-infinity') = '-infinity'
                      THEN 'registered'
                  WHEN (was).suppressed AND NOT (is_now).suppressed THEN 'revived'
                  -- Without the name of the user before: forget_user would not find it.
                  WHEN (was).user_id IS DISTINCT FROM (is_now).user_id THEN 'user_changed' END
              WHEN ((is_now).stale_at, (is_now).stale_reason, (is_now).suspect_at, (is_now).suspect_reason, (is_now).unregistered_by_app_at)
                  IS NOT DISTINCT FROM ((was).stale_at, (was).stale_reason, (was).suspect_at, (was).suspect_reason, (was).unregistered_by_app_at) THEN NULL
              WHEN NOT (is_now).suppressed THEN 'late_feedback_ignored'
              -- Nothing new if it was suppressed for the same cause.
              WHEN coalesce((was).suppressed AND tokenkeeper.state_of(was) = tokenkeeper.state_of(is_now), false) THEN NULL
              WHEN (reported).cause = 'unregistered_by_app' THEN 'unregistered_by_app'
              ELSE 'invalidated' END AS event
                -- The event is used three times, and computed once.
                OFFSET 0) AS e
          WHERE e.event IS NOT NULL) AS c;
END;
COMMENT ON FUNCTION tokenkeeper.event_of(tokenkeeper.ledger, tokenkeeper.ledger, tokenkeeper.token_report) IS
    'What the history says about a report, as a row of token_event_log, from the row before (null if there was none) and after it. No row if it changed nothing '
    'that counts.';

CREATE OR REPLACE FUNCTION tokenkeeper.checks_of(was tokenkeeper.ledger, is_now tokenkeeper.ledger, reported tokenkeeper.token_report)
RETURNS SETOF tokenkeeper.device_check
LANGUAGE sql IMMUTABLE ROWS 1
BEGIN ATOMIC
    SELECT (is_now).topic_id, (is_now).device_id, (is_now).token_key, (was).device_id IS DISTINCT FROM (is_now).device_id
    WHERE (reported).cause IS NULL AND (is_now).device_id IS NOT NULL AND ((is_now).unresolved OR (is_now).superseded_at IS NOT NULL)
    UNION ALL
    SELECT (is_now).topic_id, (was).device_id, NULL, false
    WHERE (reported).one_token AND (was).device_id IS DISTINCT FROM (is_now).device_id AND (was).device_id IS NOT NULL;
END;
COMMENT ON FUNCTION tokenkeeper.checks_of(tokenkeeper.ledger, tokenkeeper.ledger, tokenkeeper.token_report) IS
    'The devices whose tokens must be compared after a report: the one that the token belongs to, unless it is known to be its only current token, and '
    'the one that it has left.';
