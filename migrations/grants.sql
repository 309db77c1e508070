-- The roles and what each may do. Applied by `tokenkeeperd grants`, as often as one likes; `tokenkeeperd grants --print`
-- shows it for a DBA to run. Needs CREATEROLE where a role is missing, and ownership of the schema's objects.
-- The roles cannot log in: GRANT tokenkeeper_sender TO one's own login role.

DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader',
                                  'tokenkeeper_operator', 'tokenkeeper_daemon']
    LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL; -- Made by somebody else at this moment.
            END;
        END IF;
    END LOOP;
END
$$;

GRANT USAGE ON SCHEMA tokenkeeper
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;

-- Senders: write results, ask the gate.
GRANT INSERT (environment, topic, token, status, body, apns_id, sent_at) ON tokenkeeper.send_result TO tokenkeeper_sender;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.is_sendable(text, text, text),
    tokenkeeper.sendable(text[], text, text),
    tokenkeeper.token_key(text),
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger)
    TO tokenkeeper_sender;
GRANT SELECT ON tokenkeeper.sendable_token, tokenkeeper.suppressed_token TO tokenkeeper_sender;

-- Applications: register and unregister.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.register(text, text, text, timestamptz, text, text[]),
    tokenkeeper.unregister(text, text, text, timestamptz)
    TO tokenkeeper_app;

-- Readers: look at everything that is made for people, change nothing.
GRANT SELECT ON
    tokenkeeper.token, tokenkeeper.sendable_token, tokenkeeper.suppressed_token, tokenkeeper.token_event,
    tokenkeeper.result_stat, tokenkeeper.rejected_result, tokenkeeper.sweep_run, tokenkeeper.status, tokenkeeper.migration
    TO tokenkeeper_reader, tokenkeeper_operator;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.token_key(text),
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger)
    TO tokenkeeper_reader, tokenkeeper_operator;

-- Operators: read, ask for a sweep, and clear away rejected results.
GRANT EXECUTE ON FUNCTION tokenkeeper.request_sweep(boolean, boolean) TO tokenkeeper_operator;
GRANT DELETE ON tokenkeeper.rejected_result TO tokenkeeper_operator;

-- The daemon: drain, record, sweep, report. It owns nothing and cannot register a token.
GRANT SELECT ON tokenkeeper.migration TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.send_result TO tokenkeeper_daemon;
GRANT SELECT, DELETE, TRUNCATE ON
    tokenkeeper.send_result_0, tokenkeeper.send_result_1, tokenkeeper.send_result_2, tokenkeeper.send_result_3,
    tokenkeeper.send_result_4, tokenkeeper.send_result_5, tokenkeeper.send_result_6, tokenkeeper.send_result_7
    TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE, TRUNCATE ON tokenkeeper.send_result_aside TO tokenkeeper_daemon;
GRANT SELECT, INSERT ON tokenkeeper.topic TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.ledger TO tokenkeeper_daemon;
GRANT INSERT ON tokenkeeper.token_event_log TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.rejected_result, tokenkeeper.result_count TO tokenkeeper_daemon;
GRANT UPDATE (rejected_at) ON tokenkeeper.rejected_result TO tokenkeeper_daemon; -- For FOR UPDATE SKIP LOCKED alone.
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.sweep_run, tokenkeeper.daemon, tokenkeeper.token_count TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.status, tokenkeeper.token TO tokenkeeper_daemon;
GRANT USAGE ON SEQUENCE tokenkeeper.event_id TO tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.record(text[], text[], integer[], bytea[], timestamptz[], text[], timestamptz[], text[]),
    tokenkeeper.ensure_topic(text, text),
    tokenkeeper.token_key(text),
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger),
    tokenkeeper.roll_up_result_count(),
    tokenkeeper.prepare_event_months(),
    tokenkeeper.forget_event_month(timestamptz)
    TO tokenkeeper_daemon;
