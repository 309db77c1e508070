-- The roles and the rights of each. `tokenkeeperd grants` applies this file, and can be repeated; `tokenkeeperd migrate` applies it with the
-- functions if all roles exist; `tokenkeeperd grants --print` prints it for a DBA. The first statement needs CREATEROLE if a role is missing:
-- with --owner, the login runs it. The rest needs ownership of the schema's objects. The roles cannot log in: GRANT tokenkeeper_sender TO your login role.

DO $$
DECLARE
    wanted text;
BEGIN
    -- For a DBA who runs this file in psql: others may be able to create in a schema of their path.
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOREACH wanted IN ARRAY ARRAY['tokenkeeper_sender', 'tokenkeeper_app', 'tokenkeeper_reader',
                                  'tokenkeeper_monitor', 'tokenkeeper_operator', 'tokenkeeper_daemon']
    LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL; -- Another session has just created it.
            END;
        END IF;
    END LOOP;
END
$$;

GRANT USAGE ON SCHEMA tokenkeeper
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_monitor, tokenkeeper_operator, tokenkeeper_daemon;

-- Everybody who writes or reads tokens reads them in one way.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.parse_token(text, boolean), tokenkeeper.parse_decorated_token(text, boolean), tokenkeeper.token_fault(text, boolean)
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;
-- The indexes of rejected and failed rows call it.
GRANT EXECUTE ON FUNCTION tokenkeeper.names_in(text[], text, text, text[]) TO tokenkeeper_daemon, tokenkeeper_operator;
GRANT EXECUTE ON FUNCTION tokenkeeper.token_key(text)
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;
-- The daemons and the commands look for a mistyped topic.
GRANT EXECUTE ON FUNCTION tokenkeeper.resembled_topic(text, text, boolean) TO tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;
-- The same for expressions of tags.
GRANT EXECUTE ON FUNCTION tokenkeeper.tag_query(text), tokenkeeper.tag_vector(text[])
    TO tokenkeeper_sender, tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;

-- Senders write results and ask the gate.
GRANT INSERT (environment, topic, token, status, body, apns_id, sent_at) ON tokenkeeper.send_result TO tokenkeeper_sender;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.is_sendable(text, text, text),
    tokenkeeper.sendable(text[], text, text),
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger),
    tokenkeeper.reason_of(tokenkeeper.ledger)
    TO tokenkeeper_sender;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.report(text, text, text, text, anycompatible, timestamptz, text, text, text),
    tokenkeeper.report(text, text, double precision, text, anycompatible, timestamptz, text, text, text),
    tokenkeeper.report(tokenkeeper.new_result[]),
    tokenkeeper.unreadable(text[]),
    tokenkeeper.act_for(text),
    tokenkeeper.campaigns_of(text)
    TO tokenkeeper_sender;
-- The views of campaigns call it with the rights of their reader.
GRANT EXECUTE ON FUNCTION tokenkeeper.caller() TO tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_monitor, tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.sendable_token, tokenkeeper.suppressed_token TO tokenkeeper_sender;
-- If the daemon sends the pushes, they write requests.
GRANT INSERT (environment, topic, token, payload, push_type, priority, expiration, collapse_id, scheduled_at, apns_id)
    ON tokenkeeper.send_request TO tokenkeeper_sender;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.enqueue(json, text, text, text, text, integer, timestamptz, text, timestamptz, text, text, text[], boolean, text, text, integer, boolean),
    tokenkeeper.audience_size(text, text, text, text, text, text[], boolean),
    tokenkeeper.pause_campaign(bigint),
    tokenkeeper.resume_campaign(bigint),
    tokenkeeper.cancel_campaign(bigint),
    tokenkeeper.set_campaign_rate(bigint, integer),
    tokenkeeper.delivery(uuid)
    TO tokenkeeper_sender;
GRANT INSERT (campaign_id, token) ON tokenkeeper.campaign_token TO tokenkeeper_sender;
GRANT SELECT ON tokenkeeper.campaign_progress, tokenkeeper.campaign_wait TO tokenkeeper_sender;

-- The view calls it with the rights of its reader.
GRANT EXECUTE ON FUNCTION tokenkeeper.sending_fault(text, text)
    TO tokenkeeper_sender, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_monitor, tokenkeeper_daemon;

-- Applications register and unregister tokens, and forget a person.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.register(text, text, text, timestamptz, text, text[], text),
    tokenkeeper.register(tokenkeeper.new_registration[]),
    tokenkeeper.unregister(text, text, text, timestamptz, text),
    tokenkeeper.tag(text, text, text, text, text, text[], text[]),
    tokenkeeper.forget(text),
    tokenkeeper.forget_device(text),
    tokenkeeper.forget_user(text)
    TO tokenkeeper_app;

GRANT INSERT (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, source_id, returned, row_key) ON tokenkeeper.registration
    TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION tokenkeeper.advance_source(bigint, text, bigint, bigint, boolean) TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.begin_list(bigint, text, timestamptz),
    tokenkeeper.note_listed(bigint, text[], text[], text[]),
    tokenkeeper.log_out_unlisted(bigint, integer),
    tokenkeeper.list_state(text),
    tokenkeeper.count_listed(text, text[], text[], text[])
    TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION tokenkeeper.drop_list(text) TO tokenkeeper_app, tokenkeeper_operator;
-- Their own tables, attached. Each of these functions runs with the rights of its caller, or checks that the login may act for the owner of the table.
GRANT INSERT (source_id, state, constraint_name) ON tokenkeeper.own_attachment_failure TO tokenkeeper_app;
GRANT SELECT ON tokenkeeper.attachment TO tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;
GRANT USAGE ON TYPE tokenkeeper.fact TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.attach(text, text, text, text, text, text, text, text, text, text, text, boolean, text, boolean, boolean),
    tokenkeeper.detach(text),
    tokenkeeper.begin_attachment(regclass, jsonb),
    tokenkeeper.end_attachment(bigint),
    tokenkeeper.table_named(text),
    tokenkeeper.full_name(regclass),
    tokenkeeper.required_table(text),
    tokenkeeper.attachment_named(text),
    tokenkeeper.raise_not_attached(text),
    tokenkeeper.check_owner_session(regclass),
    tokenkeeper.check_attached_name(text, oid),
    tokenkeeper.note_attachment_failure(bigint, text, text),
    tokenkeeper.stray_triggers(regclass),
    tokenkeeper.expression_fault(text),
    tokenkeeper.operators_in(text),
    tokenkeeper.read_expression(regclass, text),
    tokenkeeper.base_type(regtype),
    tokenkeeper.as_fact(text, text, regtype),
    tokenkeeper.type_fault(text, text, regtype),
    tokenkeeper.tags_of(jsonb),
    tokenkeeper.read_facts(regclass, jsonb),
    tokenkeeper.token_look_up(text, regtype, text),
    tokenkeeper.fact_list(jsonb),
    tokenkeeper.fact_test(jsonb),
    tokenkeeper.logged_out_test(jsonb),
    tokenkeeper.fact_columns(),
    tokenkeeper.other_row(text, jsonb, text, text),
    tokenkeeper.key_columns(regclass),
    tokenkeeper.key_text(text[]),
    tokenkeeper.compared_columns(text, jsonb),
    tokenkeeper.update_body(text, jsonb, text),
    tokenkeeper.change_function(text, regclass, jsonb),
    tokenkeeper.lost_rows(text, jsonb, text, text, text),
    tokenkeeper.insert_body(text, regclass, jsonb, text),
    tokenkeeper.delete_body(text, regclass, jsonb, text),
    tokenkeeper.failure_note(text, regclass),
    tokenkeeper.trigger_function(text, text, regclass, jsonb, boolean, text),
    tokenkeeper.attachment_statements(regclass, text, jsonb),
    tokenkeeper.attachment_findings(regclass, text),
    tokenkeeper.expression_warnings(regclass, jsonb, jsonb),
    tokenkeeper.owner_warning(regclass, text),
    tokenkeeper.sample_rows(regclass, jsonb),
    tokenkeeper.finds_by_index(regclass, jsonb),
    tokenkeeper.has_one_token_per_device(text),
    tokenkeeper.device_name(text),
    tokenkeeper.topic_fault(text),
    tokenkeeper.is_token(text),
    tokenkeeper.environment_fault(text)
    TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.begin_backfill(text),
    tokenkeeper.lock_backfill(bigint),
    tokenkeeper.advance_backfill(bigint, text, bigint, boolean),
    tokenkeeper.hold_name(tokenkeeper.attached_table),
    tokenkeeper.page_query(tokenkeeper.attached_table, text),
    tokenkeeper.may_be_of_a_row(text),
    tokenkeeper.next_key(tokenkeeper.attached_table, text),
    tokenkeeper.fails_without_rows(text),
    tokenkeeper.rows_after(regclass, text[], text),
    tokenkeeper.backfill_next(bigint, integer),
    tokenkeeper.begin_check(text),
    tokenkeeper.running_check(bigint),
    tokenkeeper.compare_facts(bigint, tokenkeeper.fact[], boolean[]),
    tokenkeeper.reported_tokens(bigint),
    tokenkeeper.check_rows(bigint, text, integer),
    tokenkeeper.check_lost(bigint),
    tokenkeeper.lost_query(tokenkeeper.attached_table, text),
    tokenkeeper.queue_repairs(bigint, jsonb),
    tokenkeeper.end_check(bigint, bigint, bigint)
    TO tokenkeeper_app;
GRANT EXECUTE ON FUNCTION tokenkeeper.begin_import(text) TO tokenkeeper_app, tokenkeeper_operator, tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION tokenkeeper.check_attachments() TO tokenkeeper_daemon;
-- Their commands check first whether the schema fits.
GRANT SELECT ON tokenkeeper.migration, tokenkeeper.repeatable TO tokenkeeper_app, tokenkeeper_sender;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.queued_registrations(integer),
    tokenkeeper.withdraw(bigint, boolean, bigint, integer),
    tokenkeeper.made_by(bigint)
    TO tokenkeeper_app, tokenkeeper_operator;
GRANT SELECT ON tokenkeeper.registration_source TO tokenkeeper_app, tokenkeeper_reader, tokenkeeper_operator, tokenkeeper_daemon;

-- Readers read all that is made for people, and change nothing.
GRANT SELECT ON
    tokenkeeper.token, tokenkeeper.sendable_token, tokenkeeper.suppressed_token, tokenkeeper.token_event,
    tokenkeeper.result_stat, tokenkeeper.rejected_result, tokenkeeper.held_result, tokenkeeper.held_registration, tokenkeeper.receipt,
    tokenkeeper.guard, tokenkeeper.reinstatement,
    tokenkeeper.stale_share, tokenkeeper.topic_policy, tokenkeeper.operation, tokenkeeper.sweep_run, tokenkeeper.sweep_topic, tokenkeeper.status,
    tokenkeeper.critical_warning,
    tokenkeeper.migration, tokenkeeper.repeatable, tokenkeeper.send_request, tokenkeeper.suppressed_send, tokenkeeper.failed_send, tokenkeeper.paused_topic,
    tokenkeeper.sending_daemon, tokenkeeper.token_count_hour, tokenkeeper.campaign, tokenkeeper.campaign_progress, tokenkeeper.campaign_wait
    TO tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT ON tokenkeeper.daemon TO tokenkeeper_reader, tokenkeeper_operator;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger),
    tokenkeeper.reason_of(tokenkeeper.ledger),
    tokenkeeper.tagged_tokens(text, text, text, integer),
    tokenkeeper.device_name(text),
    tokenkeeper.has_one_token_per_device(text),
    tokenkeeper.delivery(uuid),
    tokenkeeper.audience_size(text, text, text, text, text, text[], boolean),
    tokenkeeper.reinstate_command(text, text, timestamptz, timestamptz, text),
    tokenkeeper.read_status()
    TO tokenkeeper_reader, tokenkeeper_operator;

-- Monitoring sees counts, times and names of topics. It sees no token and no device, and no words of APNs, PostgreSQL or people, which may contain
-- one: a warning of status names a device, and an error may quote a row. Of the tables with tokens it sees the numbers of the rows, to count them.
GRANT SELECT ON tokenkeeper.result_stat TO tokenkeeper_monitor;
GRANT SELECT (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact, oldest_queued_at, sweep_interval, stopped_at,
              registration_depth, registration_depth_exact, oldest_registration_at)
    ON tokenkeeper.daemon TO tokenkeeper_monitor;
GRANT SELECT (daemon_id, heartbeat_at, stopped_at, credentials) ON tokenkeeper.sending_daemon TO tokenkeeper_monitor;
GRANT SELECT (topic_id, environment, topic) ON tokenkeeper.topic TO tokenkeeper_monitor, tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT ON tokenkeeper.token_count TO tokenkeeper_monitor, tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT (environment, topic, tripped, tripped_at, tokens, active, max_tokens, cause) ON tokenkeeper.guard TO tokenkeeper_monitor;
GRANT SELECT (environment, topic, period, since, newly_stale, active, share, usual_share, history_days, is_wave, wave_since)
    ON tokenkeeper.stale_share TO tokenkeeper_monitor;
GRANT SELECT (environment, topic, paused_at) ON tokenkeeper.paused_topic TO tokenkeeper_monitor;
GRANT SELECT (run_id, trigger, dry_run, forced, requested_at, started_at, heartbeat_at, finished_at, outcome, pruned_suppressed, pruned_dormant, refused)
    ON tokenkeeper.sweep_run TO tokenkeeper_monitor;
GRANT SELECT (run_id, environment, topic, cause, tokens, pruned, refused, of_tokens, max_tokens) ON tokenkeeper.sweep_topic TO tokenkeeper_monitor;
GRANT SELECT (request_id, queued_at) ON tokenkeeper.send_request TO tokenkeeper_monitor;
GRANT SELECT (failed_id, failed_at) ON tokenkeeper.failed_send TO tokenkeeper_monitor;
GRANT SELECT (campaign_id, environment, topic, state, addressed, waiting, accepted, stale, suspect, suppressed, failed, cancelled, forgotten, created_at,
              started_at, ended_at, scheduled_at, max_per_second)
    ON tokenkeeper.campaign_progress TO tokenkeeper_monitor;
GRANT SELECT (campaign_id, environment, topic, state) ON tokenkeeper.campaign TO tokenkeeper_monitor;
GRANT SELECT (campaign_id, needs_help, due_at) ON tokenkeeper.campaign_wait TO tokenkeeper_monitor;
GRANT SELECT (held_id, held_at) ON tokenkeeper.held_result, tokenkeeper.held_registration TO tokenkeeper_monitor;
GRANT SELECT (rejected_id, rejected_at) ON tokenkeeper.rejected_result, tokenkeeper.rejected_registration TO tokenkeeper_monitor;

-- Operators read, set policies, undo, request sweeps, fix, requeue and delete rejected results and registrations, and forget a person.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.request_sweep(boolean, boolean),
    tokenkeeper.release_held(text, text, text),
    tokenkeeper.discard_held(text, text, text),
    tokenkeeper.reinstate(text, text, timestamptz, timestamptz, text),
    tokenkeeper.would_reinstate(text, text, timestamptz, timestamptz, text),
    tokenkeeper.undo_next(integer),
    tokenkeeper.pruned_since(text, text, timestamptz, timestamptz, text),
    tokenkeeper.requeue_rejected_results(bigint[]),
    tokenkeeper.requeue_rejected_registrations(bigint[]),
    tokenkeeper.pause_sending(text, text, text),
    tokenkeeper.resume_sending(text, text),
    tokenkeeper.requeue_failed(bigint[]),
    tokenkeeper.pause_campaign(bigint),
    tokenkeeper.resume_campaign(bigint),
    tokenkeeper.cancel_campaign(bigint),
    tokenkeeper.set_campaign_rate(bigint, integer),
    tokenkeeper.forget(text),
    tokenkeeper.forget_device(text),
    tokenkeeper.forget_user(text)
    TO tokenkeeper_operator;
-- And move a topic to another database, or from one.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.move_fault(text),
    tokenkeeper.begin_move(text, text),
    tokenkeeper.facts_of(text, text, bytea, integer, boolean),
    tokenkeeper.take_facts(text, text, text, boolean, bytea, bytea, text, text),
    tokenkeeper.take_policy(text, text, jsonb),
    tokenkeeper.left_behind(text),
    tokenkeeper.end_move(text, integer),
    tokenkeeper.take_back(text),
    tokenkeeper.forget_arrival(text, text)
    TO tokenkeeper_operator;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.moved_rows(text, integer),
    tokenkeeper.drop_moved_rows(bigint[]),
    tokenkeeper.take_rows(text, text, text)
    TO tokenkeeper_operator, tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.moved_row, tokenkeeper.arrival TO tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT (moved_to) ON tokenkeeper.topic TO tokenkeeper_monitor, tokenkeeper_reader, tokenkeeper_operator;
GRANT DELETE ON tokenkeeper.send_request, tokenkeeper.failed_send TO tokenkeeper_operator;
GRANT INSERT (environment, topic, gate, suppressed_retention, dormant_after, guard_allowance, guard_max_share, prune_allowance, prune_max_share,
              background_per_hour, max_per_second, alerts_per_day, confirm_share),
    UPDATE (gate, suppressed_retention, dormant_after, guard_allowance, guard_max_share, prune_allowance, prune_max_share, background_per_hour,
            max_per_second, alerts_per_day, confirm_share)
    ON tokenkeeper.topic_policy TO tokenkeeper_operator;
GRANT DELETE, UPDATE (environment, topic, token, status, body, sent_at) ON tokenkeeper.rejected_result TO tokenkeeper_operator;
GRANT SELECT ON tokenkeeper.rejected_registration TO tokenkeeper_reader, tokenkeeper_operator;
GRANT DELETE, UPDATE (environment, topic, token, registered_at, device_id, user_id, tags, unregistered, returned) ON tokenkeeper.rejected_registration
    TO tokenkeeper_operator;

-- The daemon drains, records, sweeps and reports. It owns nothing and cannot register a token.
GRANT SELECT ON tokenkeeper.migration, tokenkeeper.repeatable TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.send_result TO tokenkeeper_daemon;
GRANT SELECT, DELETE, TRUNCATE ON
    tokenkeeper.send_result_0, tokenkeeper.send_result_1, tokenkeeper.send_result_2, tokenkeeper.send_result_3,
    tokenkeeper.send_result_4, tokenkeeper.send_result_5, tokenkeeper.send_result_6, tokenkeeper.send_result_7
    TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE, TRUNCATE ON tokenkeeper.send_result_retry, tokenkeeper.send_result_backlog TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.registration TO tokenkeeper_daemon;
GRANT SELECT, DELETE, TRUNCATE ON
    tokenkeeper.registration_0, tokenkeeper.registration_1, tokenkeeper.registration_2, tokenkeeper.registration_3,
    tokenkeeper.registration_4, tokenkeeper.registration_5, tokenkeeper.registration_6, tokenkeeper.registration_7
    TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE, TRUNCATE ON tokenkeeper.registration_retry TO tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION tokenkeeper.apply_registrations(tokenkeeper.registration[], bigint, numeric, bigint) TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE, UPDATE (rejected_at) ON tokenkeeper.rejected_registration TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.dropped_registration TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.dropped_registration TO tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT, DELETE ON tokenkeeper.amended_registration TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.amended_registration TO tokenkeeper_reader, tokenkeeper_operator;
GRANT SELECT, INSERT ON tokenkeeper.topic TO tokenkeeper_daemon;
GRANT SELECT, INSERT ON tokenkeeper.moved_row TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.ledger TO tokenkeeper_daemon;
GRANT INSERT ON tokenkeeper.token_event_log TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.rejected_result, tokenkeeper.held_result, tokenkeeper.result_count TO tokenkeeper_daemon;
GRANT UPDATE (rejected_at) ON tokenkeeper.rejected_result TO tokenkeeper_daemon; -- Only for FOR UPDATE SKIP LOCKED.
GRANT UPDATE (held_at) ON tokenkeeper.held_result TO tokenkeeper_daemon;
GRANT SELECT, DELETE, UPDATE (held_at) ON tokenkeeper.held_registration TO tokenkeeper_daemon;
GRANT SELECT, DELETE, UPDATE (received_at) ON tokenkeeper.receipt TO tokenkeeper_daemon;
GRANT SELECT, DELETE ON tokenkeeper.suppression TO tokenkeeper_daemon;
-- How many there are.
GRANT SELECT (erasure_id, forgotten_at) ON tokenkeeper.erasure TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON
    tokenkeeper.sweep_run, tokenkeeper.sweep_topic, tokenkeeper.daemon, tokenkeeper.token_count,
    tokenkeeper.token_count_hour,
    tokenkeeper.suppression_count, tokenkeeper.stale_wave, tokenkeeper.status_cache
    TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.exclusion, tokenkeeper.tripped_guard, tokenkeeper.guard, tokenkeeper.reinstatement, tokenkeeper.stale_share TO tokenkeeper_daemon;
GRANT SELECT, UPDATE ON tokenkeeper.sweep_progress TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE ON tokenkeeper.topic_prune TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.operation TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.status, tokenkeeper.critical_warning, tokenkeeper.token TO tokenkeeper_daemon;
-- For the status page: the history of a token, and the policy of a topic.
GRANT SELECT ON tokenkeeper.token_event, tokenkeeper.topic_policy TO tokenkeeper_daemon;
-- To send pushes: what it claims, the outcome, and the responses.
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.send_request TO tokenkeeper_daemon;
GRANT SELECT, UPDATE, DELETE ON tokenkeeper.campaign TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.campaign_batch TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.campaign_ending TO tokenkeeper_daemon;
GRANT SELECT, DELETE ON tokenkeeper.campaign_token TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.campaign_progress, tokenkeeper.campaign_wait TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.background_send, tokenkeeper.crowded_token, tokenkeeper.sending_daemon TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE ON tokenkeeper.topic_rate TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE, DELETE ON tokenkeeper.alert_send TO tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.slots_ahead(),
    tokenkeeper.free_slots(timestamptz, integer),
    tokenkeeper.topic_slots(integer),
    tokenkeeper.take_topic_slots(integer, timestamptz, integer),
    tokenkeeper.note_alerts(integer, bytea[]),
    tokenkeeper.count_alerts(bigint, integer, bigint[], bytea[]),
    tokenkeeper.note_background(text, text, bytea[], integer[], integer),
    tokenkeeper.uncount_background(text[], text[], bytea[])
    TO tokenkeeper_daemon;
GRANT SELECT, INSERT, DELETE ON tokenkeeper.suppressed_send, tokenkeeper.failed_send TO tokenkeeper_daemon;
GRANT UPDATE (suppressed_at) ON tokenkeeper.suppressed_send TO tokenkeeper_daemon; -- Only for FOR UPDATE SKIP LOCKED.
GRANT UPDATE (failed_at) ON tokenkeeper.failed_send TO tokenkeeper_daemon;
GRANT SELECT ON tokenkeeper.paused_topic TO tokenkeeper_daemon;
GRANT SELECT, INSERT, UPDATE ON tokenkeeper.provider_token TO tokenkeeper_daemon;
GRANT INSERT (environment, topic, token, status, body, apns_id, sent_at) ON tokenkeeper.send_result TO tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.claim_requests(text, text, text, integer, integer, timestamptz),
    tokenkeeper.lock_due_requests(tokenkeeper.topic, timestamptz, integer),
    tokenkeeper.limit_requests(tokenkeeper.due_request[], tokenkeeper.topic, integer),
    tokenkeeper.end_requests(tokenkeeper.due_request[], tokenkeeper.topic),
    tokenkeeper.delay_requests(tokenkeeper.due_request[], tokenkeeper.topic),
    tokenkeeper.claim_topics(text[], text[], text, integer[], integer, timestamptz[]),
    tokenkeeper.finish_requests(text, tokenkeeper.request_ending[]),
    tokenkeeper.checked_endings(tokenkeeper.request_ending[]),
    tokenkeeper.end_singles(text, tokenkeeper.request_ending[], boolean),
    tokenkeeper.end_batched(text, tokenkeeper.request_ending[]),
    tokenkeeper.note_endings(tokenkeeper.ended_request[]),
    tokenkeeper.campaign_by_chance(),
    tokenkeeper.campaigns_due(),
    tokenkeeper.end_campaigns(),
    tokenkeeper.end_batches(bigint, text, integer),
    tokenkeeper.fail_expired(bigint),
    tokenkeeper.has_expired(timestamptz),
    tokenkeeper.campaign_content(bigint),
    tokenkeeper.search_audience(tokenkeeper.campaign, boolean),
    tokenkeeper.address_campaign(bigint, integer, boolean, boolean),
    tokenkeeper.add_batches(tokenkeeper.campaign, bytea[], integer),
    tokenkeeper.audience_condition(text, text, boolean, boolean),
    tokenkeeper.estimated_audience(integer, text),
    tokenkeeper.finish_erasures(interval),
    tokenkeeper.is_forgotten(text, timestamptz),
    tokenkeeper.claim_campaign(bigint, text, integer, integer),
    tokenkeeper.count_background(tokenkeeper.campaign, bigint[], bytea[], integer),
    tokenkeeper.next_of_list(tokenkeeper.campaign, integer, boolean, integer),
    tokenkeeper.next_of_ledger(tokenkeeper.campaign, integer, boolean, integer),
    tokenkeeper.lock_batches(tokenkeeper.campaign, integer, integer, integer),
    tokenkeeper.campaign_slots(tokenkeeper.campaign, tokenkeeper.topic),
    tokenkeeper.limit_devices(tokenkeeper.campaign, tokenkeeper.topic, integer, bigint[], bytea[], text[]),
    tokenkeeper.end_campaign(bigint),
    tokenkeeper.withhold_requests(tokenkeeper.campaign, integer, bigint[], bytea[], text[]),
    tokenkeeper.end_in_batches(bigint[], integer[], integer[], text[]),
    tokenkeeper.claimed_campaign_requests(text),
    tokenkeeper.recalled_requests(text, bigint[]),
    tokenkeeper.take_over(text, boolean, bigint[]),
    tokenkeeper.campaign_apns_id(bigint, bigint),
    tokenkeeper.meaning_of(integer, text),
    tokenkeeper.is_background_push(jsonb),
    tokenkeeper.push_type_of_topic(text),
    tokenkeeper.push_type_fault(text, text),
    tokenkeeper.aps_fault(jsonb, text),
    tokenkeeper.live_activity_fault(jsonb),
    tokenkeeper.default_expiration(text, timestamptz),
    tokenkeeper.parsed_payload(json),
    tokenkeeper.payload_fault(json),
    tokenkeeper.payload_length(jsonb),
    tokenkeeper.push_type_of(jsonb, text),
    tokenkeeper.send_fault(text, text, jsonb, text, integer, timestamptz, text, timestamptz, text)
    TO tokenkeeper_daemon;
GRANT USAGE ON SEQUENCE tokenkeeper.event_id TO tokenkeeper_daemon;
-- For a warning of status.
GRANT SELECT ON ALL SEQUENCES IN SCHEMA tokenkeeper TO tokenkeeper_daemon;
-- The tables lock_* are granted to nobody, because a role that can lock them can stop the drain. These functions lock them for the daemon.
GRANT EXECUTE ON FUNCTION
    tokenkeeper.lock_batch(text, integer, integer),
    tokenkeeper.lock_partition(text, integer),
    tokenkeeper.partition_sizes(text),
    tokenkeeper.lock_sweep_claim()
    TO tokenkeeper_daemon;
GRANT EXECUTE ON FUNCTION
    tokenkeeper.record(tokenkeeper.token_report[], bigint, numeric, numeric),
    tokenkeeper.ensure_topics(text[], text[], interval),
    tokenkeeper.invalidation_of(integer, integer, bytea, text, timestamptz, text, timestamptz, boolean, bigint, text),
    tokenkeeper.undo_next(integer),
    tokenkeeper.fold_token_count(integer),
    tokenkeeper.reset_guards(bigint, numeric, numeric),
    tokenkeeper.hour_of(timestamptz),
    tokenkeeper.reinstate_command(text, text, timestamptz, timestamptz, text),
    tokenkeeper.roll_up_suppression_count(),
    tokenkeeper.note_stale_waves(),
    tokenkeeper.ensure_topic(text, text),
    tokenkeeper.is_here(text, text),
    tokenkeeper.raise_moved(text, text),
    tokenkeeper.environment_fault(text),
    tokenkeeper.topic_fault(text),
    tokenkeeper.is_token(text),
    tokenkeeper.largest_row(),
    tokenkeeper.most_stored(),
    tokenkeeper.length_of_read_tags(text[]),
    tokenkeeper.length_of_tags(text[]),
    tokenkeeper.length_of_payload(json),
    tokenkeeper.first_tag(text[]),
    tokenkeeper.cut_tags(text[]),
    tokenkeeper.cut_payload(json),
    tokenkeeper.size_words(text[], bigint[], text),
    tokenkeeper.result_size_fault(text, text, text, text, text, text),
    tokenkeeper.registration_size_fault(text, text, text, text, text, text, text[]),
    tokenkeeper.request_size_fault(text, text, text, text, text, json),
    tokenkeeper.cause_of(timestamptz, timestamptz, timestamptz, timestamptz),
    tokenkeeper.state_of(tokenkeeper.ledger),
    tokenkeeper.reason_of(tokenkeeper.ledger),
    tokenkeeper.device_name(text),
    tokenkeeper.has_one_token_per_device(text),
    tokenkeeper.roll_up_result_count(integer, integer),
    tokenkeeper.reap_topics(integer, timestamptz, integer),
    tokenkeeper.delete_campaigns(timestamptz, integer),
    tokenkeeper.reset_transaction_ids(oid, bigint, bigint),
    tokenkeeper.prepare_event_months(),
    tokenkeeper.forget_event_month(timestamptz),
    tokenkeeper.look_at_queue(text),
    tokenkeeper.waiting_topics(),
    tokenkeeper.overdue_requests(),
    tokenkeeper.without_backticks(text),
    tokenkeeper.read_status()
    TO tokenkeeper_daemon;
