-- Who calls: the login, or the one for which a router calls. It decides to whom a campaign and its idempotency key belong. No locks.
--
-- A router (migrations/router) has one login in this database for each of its group roles, a member of tokenkeeper_router. It passes on the name of its own
-- session's login, and only such a member is believed.

CREATE OR REPLACE FUNCTION tokenkeeper.caller() RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    named text := nullif(current_setting('tokenkeeper.caller', true), '');
BEGIN
    IF named IS NOT NULL AND pg_has_role(session_user, to_regrole('tokenkeeper_router'), 'MEMBER') THEN
        RETURN named;
    END IF;
    RETURN session_user;
END
$$;
COMMENT ON FUNCTION tokenkeeper.caller() IS 'Internal: the login role (session_user), or the one named by act_for.';

CREATE OR REPLACE FUNCTION tokenkeeper.act_for(caller text) RETURNS boolean
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$ SELECT set_config('tokenkeeper.caller', act_for.caller, true) IS NOT NULL $$;
COMMENT ON FUNCTION tokenkeeper.act_for(text) IS
    'Internal, for a router: names the login for which it calls, until the transaction ends. Returns true. Has no effect unless this login is a member of '
    'tokenkeeper_router.';
