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
COMMENT ON VIEW tokenkeeper.campaign_progress IS 'One row per campaign; a sender sees its own. addressed is the sum of the next eight columns.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.state IS 'waiting (for scheduled_at, or for a daemon), running, paused, cancelled or ended.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.addressed IS 'Tokens that got a request so far; suppressed tokens get none.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.waiting IS 'Unsent, in flight, or to be retried.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.accepted IS 'By APNs, which does not prove that a device showed them.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.stale IS 'APNs responded with 410.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.suspect IS 'APNs rejected the token for another reason, such as BadDeviceToken.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.suppressed IS 'Refused by the gate or a limit: see suppressed_send.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.failed IS 'Could not be sent (see failed_send), or expired.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.forgotten IS 'Erased by forget, forget_device or forget_user.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.per_second IS 'Requests that ended per second, in the last ten seconds; null once all have ended.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.expected_end IS 'At the rate of per_second; null unless it is running. A guess until is_addressed.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.created_by IS 'The login role (session_user) that called enqueue. It sees and controls the campaign.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.max_per_second IS 'Limit for all daemons together, without retries; null for none.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.expected IS
    'Size of the audience. Of a list, all its tokens; otherwise null before the start, then the number found or, for a large audience, an estimate.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.audience IS 'everyone; tokens; or tags, device or user, with the expression or identifier.';
COMMENT ON COLUMN tokenkeeper.campaign_progress.is_addressed IS 'Whether the whole audience is addressed. Stays false if expiration passes before.';

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
