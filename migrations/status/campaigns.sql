-- For people: how far each campaign is.

CREATE OR REPLACE VIEW tokenkeeper.campaign_progress WITH (security_barrier) AS
SELECT c.campaign_id, c.name, c.environment, c.topic, c.state, c.addressed,
       c.addressed - e.accepted - e.stale - e.suspect - e.suppressed - e.failed - e.cancelled - e.forgotten AS waiting,
       e.accepted, e.stale, e.suspect, e.suppressed, e.failed, e.cancelled, e.forgotten,
       CASE WHEN c.ended_at IS NULL THEN r.per_second END AS per_second,
       CASE WHEN c.state = 'running' AND c.ended_at IS NULL AND r.per_second > 0
            THEN now() + greatest(CASE WHEN c.is_addressed THEN c.addressed ELSE greatest(c.expected, c.addressed) END - e.ended, 0)
                         / r.per_second * interval '1 second' END AS expected_end,
       c.created_at, c.started_at, c.ended_at, c.created_by, c.scheduled_at, c.max_per_second, c.is_addressed, c.expected,
       c.audience_kind || coalesce(': ' || c.audience, '') AS audience
FROM tokenkeeper.campaign AS c
CROSS JOIN LATERAL (
    SELECT coalesce(sum(n.requests), 0)::bigint AS ended,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'accepted'), 0)::bigint AS accepted,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'stale'), 0)::bigint AS stale,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'suspect'), 0)::bigint AS suspect,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'suppressed'), 0)::bigint AS suppressed,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'failed'), 0)::bigint AS failed,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'cancelled'), 0)::bigint AS cancelled,
           coalesce(sum(n.requests) FILTER (WHERE n.outcome = 'forgotten'), 0)::bigint AS forgotten,
           coalesce(sum(n.requests) FILTER (WHERE n.ended_at > clock_timestamp() - interval '10 seconds'), 0)::bigint AS recent
    FROM tokenkeeper.campaign_ending AS n WHERE n.campaign_id = c.campaign_id AND n.outcome <> 'requeued') AS e
CROSS JOIN LATERAL (
    SELECT round((e.recent / greatest(least(extract(epoch FROM clock_timestamp() - c.started_at), 10), 1))::numeric, 1) AS per_second) AS r
-- A sender sees its own. Whoever may read the table sees all.
WHERE c.created_by = tokenkeeper.caller() OR has_column_privilege('tokenkeeper.campaign', 'state', 'SELECT');
COMMENT ON VIEW tokenkeeper.campaign_progress IS
    'One row per campaign; to a sender, only its own. addressed is always the sum of waiting, accepted, stale, suspect, suppressed, failed, cancelled and '
    'forgotten.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.state IS 'waiting (for scheduled_at, or for a daemon), running, paused, cancelled or ended.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.addressed IS
    'How many tokens got a request so far; not those suppressed when the daemon addressed the audience.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.waiting IS 'Requests that have not ended: unsent, in flight, or to be retried.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.accepted IS 'Accepted by APNs, which does not prove that a device showed them.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.stale IS 'APNs responded with 410: the token is no longer valid.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.suspect IS 'APNs rejected the token for another reason, such as BadDeviceToken.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.suppressed IS 'Refused by the gate or a limit after they were addressed: see suppressed_send.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.failed IS 'Could not be sent (see failed_send), or expired before.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.cancelled IS 'Addressed, and not sent because of cancel_campaign.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.forgotten IS 'Erased by forget, forget_device or forget_user before they ended.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.per_second IS 'How many ended per second, in the last ten seconds; null once all have ended.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.expected_end IS
    'When it ends at the rate of per_second; null unless it is running. A guess until the whole audience is addressed.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.ended_at IS 'When its last request ended; null before.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.created_by IS
    'The login role (session_user) that called enqueue. It sees the campaign, and may pause, resume and cancel it, and set its rate.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.max_per_second IS 'How many requests per second all daemons together send; null for no limit.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.expected IS
    'How many tokens the audience has: of a list, all; of others, null before the start, then the number found (a device, a user, a small audience) or the '
    'planner''s estimate.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.audience IS 'everyone; tokens; or tags, device or user, with the expression or identifier.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.is_addressed IS 'True once the whole audience is addressed; stays false if expiration passes before.';

CREATE OR REPLACE FUNCTION tokenkeeper.campaigns_of(caller text) RETURNS SETOF tokenkeeper.campaign_progress
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM tokenkeeper.act_for(campaigns_of.caller);
    RETURN QUERY SELECT * FROM tokenkeeper.campaign_progress;
END
$$;
COMMENT ON FUNCTION tokenkeeper.campaigns_of(text) IS 'Internal, for a router: the view campaign_progress, as a login of the router sees it (act_for).';
