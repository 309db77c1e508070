import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Roles` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
    }

    static let everything = [
        "SELECT FROM tokenkeeper.ledger", "SELECT FROM tokenkeeper.topic", "SELECT FROM tokenkeeper.send_result",
        "SELECT FROM tokenkeeper.token",
        "SELECT FROM tokenkeeper.token_event", "SELECT FROM tokenkeeper.token_event_log",
        "SELECT FROM tokenkeeper.sendable_token",
        "SELECT FROM tokenkeeper.suppressed_token", "SELECT FROM tokenkeeper.rejected_result",
        "SELECT FROM tokenkeeper.result_stat",
        "SELECT FROM tokenkeeper.result_count", "SELECT FROM tokenkeeper.sweep_run", "SELECT FROM tokenkeeper.status",
        "SELECT FROM tokenkeeper.daemon", "SELECT FROM tokenkeeper.token_count", "SELECT FROM tokenkeeper.migration",
        "SELECT FROM tokenkeeper.send_result_0", "SELECT FROM tokenkeeper.send_result_retry",
        "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)",
        "INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at) VALUES ('production', 't', 'aa', 200, NULL, NULL, NULL)",
        "INSERT INTO tokenkeeper.send_result (topic, queued_at) VALUES ('t', now())",
        "INSERT INTO tokenkeeper.send_result (topic, partition_number) VALUES ('t', 1)",
        "INSERT INTO tokenkeeper.send_result (topic) VALUES ('t') RETURNING topic",
        "INSERT INTO tokenkeeper.send_result_retry (topic, partition_number) VALUES ('t', 8)",
        "INSERT INTO tokenkeeper.rejected_result (error, queued_at) VALUES ('e', now())",
        "INSERT INTO tokenkeeper.ledger (topic_id, token_key) VALUES (1, '\\xab')",
        "INSERT INTO tokenkeeper.sweep_run (trigger) VALUES ('sql')",
        "INSERT INTO tokenkeeper.migration VALUES (99, 'x', 'x', '9.9.9')",
        "INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'new')",
        "UPDATE tokenkeeper.send_result SET status = 200", "UPDATE tokenkeeper.ledger SET stale_at = NULL",
        "UPDATE tokenkeeper.token_event_log SET event = 'pruned'",
        "UPDATE tokenkeeper.sweep_run SET outcome = 'failed'",
        "UPDATE tokenkeeper.rejected_result SET error = 'e'", "DELETE FROM tokenkeeper.send_result",
        "DELETE FROM tokenkeeper.ledger",
        "DELETE FROM tokenkeeper.send_result_0", "DELETE FROM tokenkeeper.token_event_log",
        "DELETE FROM tokenkeeper.rejected_result",
        "DELETE FROM tokenkeeper.sweep_run", "DELETE FROM tokenkeeper.topic", "TRUNCATE tokenkeeper.send_result",
        "TRUNCATE tokenkeeper.ledger",
        "TRUNCATE tokenkeeper.send_result_0", "DROP TABLE tokenkeeper.ledger", "CREATE TABLE tokenkeeper.mine ()",
        "SELECT tokenkeeper.is_sendable('aa', 't')", "SELECT tokenkeeper.sendable('{aa}', 't')",
        "SELECT tokenkeeper.report('t', 'aa', 410)",
        "SELECT tokenkeeper.register('ab', 't')",
        "SELECT tokenkeeper.unregister('ab', 't')", "SELECT tokenkeeper.request_sweep()",
        "SELECT tokenkeeper.token_key('aa')",
        "SELECT tokenkeeper.ensure_topic('production', 't')", "SELECT tokenkeeper.roll_up_result_count()",
        "SELECT tokenkeeper.prepare_event_months()", "SELECT tokenkeeper.forget_event_month('2000-01-01Z')",
        "SELECT tokenkeeper.record('{}', 0, 0, 0)",
        "SELECT tokenkeeper.begin_move('t', 'west')", "SELECT tokenkeeper.take_rows('east', 't', '[]')",
        "SELECT FROM tokenkeeper.held_result",
        "SELECT FROM tokenkeeper.guard",
        "SELECT FROM tokenkeeper.reinstatement",
        "SELECT FROM tokenkeeper.topic_policy",
        "SELECT FROM tokenkeeper.operation",
        "SELECT FROM tokenkeeper.sweep_topic",
        "SELECT FROM tokenkeeper.receipt", "SELECT FROM tokenkeeper.held_registration",
        "SELECT FROM tokenkeeper.attached_table", "SELECT FROM tokenkeeper.attachment_failure",
        "SELECT FROM tokenkeeper.list", "SELECT FROM tokenkeeper.list_member",
        "INSERT INTO tokenkeeper.attachment_failure (source_id, state) VALUES (1, '22012')",
        "INSERT INTO tokenkeeper.receipt (received_at, invalidated_at, topic_id, counted, cause, token_key) VALUES (now(), now(), 1, true, 'stale', '\\xab')",
        "INSERT INTO tokenkeeper.held_registration (topic_id, token_key, invalidated_at, queued_at) VALUES (1, '\\xab', now(), now())",
        "SELECT FROM tokenkeeper.suppression_count",
        "SELECT FROM tokenkeeper.stale_wave", "SELECT FROM tokenkeeper.stale_share",
        "SELECT FROM tokenkeeper.exclusion",
        "SELECT FROM tokenkeeper.tripped_guard",
        "SELECT tokenkeeper.reinstate('t', 'production', now(), now())",
        "SELECT tokenkeeper.pruned_since('t', 'production', now(), now(), 'stale')",
        "SELECT tokenkeeper.release_held('t', 'production')",
        "SELECT tokenkeeper.discard_held('t', 'production')",
        "SELECT tokenkeeper.requeue_rejected_results()",
        "SELECT tokenkeeper.forget('aa')",
        "SELECT tokenkeeper.forget_device('d')",
        "UPDATE tokenkeeper.topic_policy SET gate = 'observe'",
        "INSERT INTO tokenkeeper.topic_policy (environment, topic, gate) VALUES ('production', 'new', 'observe')",
        "UPDATE tokenkeeper.rejected_result SET topic = 't'",
        "DELETE FROM tokenkeeper.operation",
        "DELETE FROM tokenkeeper.held_result",
        "UPDATE tokenkeeper.topic SET gate = 'observe'",
        "UPDATE tokenkeeper.held_result SET topic = 't'",
        "INSERT INTO tokenkeeper.exclusion (topic_id, cause, since, until) VALUES (1, 'stale', now(), now())",
        "SELECT tokenkeeper.erase('', NULL, NULL)",
        "SELECT tokenkeeper.judge('{}', 0, 0)",
        "SELECT tokenkeeper.resolve_devices('{}', now())",
        "SELECT tokenkeeper.reset_guards(0, 0, 0)", "SELECT tokenkeeper.note_stale_waves()",
        "SELECT tokenkeeper.roll_up_suppression_count()", "SELECT tokenkeeper.hour_of(now())",
        "SELECT tokenkeeper.reinstate_command('t', 'production', now(), NULL, 'suspect')",
        "SELECT tokenkeeper.would_reinstate('t', 'production', now(), now())",
        "SELECT tokenkeeper.undo_next()", "SELECT tokenkeeper.fold_token_count()",
        "SELECT tokenkeeper.recompute_tokens()", "SELECT FROM tokenkeeper.provider_token",
        "SELECT FROM tokenkeeper.send_request", "SELECT FROM tokenkeeper.suppressed_send",
        "SELECT FROM tokenkeeper.failed_send",
        "SELECT FROM tokenkeeper.paused_topic", "SELECT FROM tokenkeeper.background_send",
        "SELECT FROM tokenkeeper.sending_daemon",
        "INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id) VALUES ('t', 'aa', '{}', gen_random_uuid())",
        "INSERT INTO tokenkeeper.send_request (topic, claimed_by) VALUES ('t', 'me')",
        "INSERT INTO tokenkeeper.paused_topic (topic, environment, reason) VALUES ('t', 'production', '')",
        "UPDATE tokenkeeper.send_request SET claimed_by = NULL", "DELETE FROM tokenkeeper.send_request",
        "DELETE FROM tokenkeeper.suppressed_send", "DELETE FROM tokenkeeper.failed_send",
        "DELETE FROM tokenkeeper.paused_topic",
        "SELECT tokenkeeper.enqueue('{}', 't', everyone => true)",
        "SELECT tokenkeeper.audience_size('t', everyone => true)",
        "SELECT tokenkeeper.delivery(gen_random_uuid())", "SELECT FROM tokenkeeper.campaign_progress",
        "SELECT FROM tokenkeeper.campaign_wait", "SELECT tokenkeeper.sending_fault('t', 'production')",
        "SELECT FROM tokenkeeper.campaign", "SELECT FROM tokenkeeper.campaign_batch",
        "SELECT FROM tokenkeeper.campaign_ending", "SELECT FROM tokenkeeper.campaign_token",
        "UPDATE tokenkeeper.campaign SET state = 'ended'",
        "SELECT tokenkeeper.campaigns_due()", "SELECT tokenkeeper.claim_campaign(1, 'me', 1, 0)",
        "SELECT names FROM tokenkeeper.erasure", "SELECT erasure_id FROM tokenkeeper.erasure",
        "SELECT tokenkeeper.is_forgotten('aa', now())", "SELECT tokenkeeper.finish_erasures()",
        "SELECT tokenkeeper.pause_sending('t')",
        "SELECT tokenkeeper.resume_sending('t')", "SELECT tokenkeeper.requeue_failed()",
        "SELECT tokenkeeper.claim_requests('production', 't', 'me', 1, 0, '-infinity')",
        "SELECT tokenkeeper.finish_requests('me', '{}')",
        "UPDATE tokenkeeper.topic_policy SET background_per_hour = 1",
        "LOCK TABLE tokenkeeper.lock_drain IN ACCESS SHARE MODE",
        "LOCK TABLE tokenkeeper.lock_range_0 IN SHARE UPDATE EXCLUSIVE MODE",
        "SELECT tokenkeeper.lock_batch('registration', 0, 0)", "SELECT tokenkeeper.lock_partition('send_result', 0)",
        "SELECT tokenkeeper.partition_sizes('send_result')",
        "SELECT tokenkeeper.lock_sweep_claim()",
        "SELECT tokenkeeper.lock_out_drains()",
    ]

    static let people: Set<String> = [
        "SELECT FROM tokenkeeper.topic", "SELECT FROM tokenkeeper.receipt",
        "SELECT FROM tokenkeeper.token", "SELECT FROM tokenkeeper.token_event",
        "SELECT FROM tokenkeeper.sendable_token",
        "SELECT FROM tokenkeeper.suppressed_token", "SELECT FROM tokenkeeper.rejected_result",
        "SELECT FROM tokenkeeper.result_stat",
        "SELECT FROM tokenkeeper.sweep_run", "SELECT FROM tokenkeeper.status", "SELECT FROM tokenkeeper.migration",
        "SELECT tokenkeeper.token_key('aa')",
        "SELECT FROM tokenkeeper.held_result", "SELECT FROM tokenkeeper.held_registration",
        "SELECT FROM tokenkeeper.guard",
        "SELECT tokenkeeper.reinstate_command('t', 'production', now(), NULL, 'suspect')",
        "SELECT FROM tokenkeeper.reinstatement",
        "SELECT FROM tokenkeeper.stale_share",
        "SELECT FROM tokenkeeper.topic_policy",
        "SELECT FROM tokenkeeper.operation",
        "SELECT FROM tokenkeeper.sweep_topic",
        "SELECT FROM tokenkeeper.send_request", "SELECT FROM tokenkeeper.suppressed_send",
        "SELECT FROM tokenkeeper.failed_send",
        "SELECT FROM tokenkeeper.sending_daemon", "SELECT FROM tokenkeeper.paused_topic",
        "SELECT FROM tokenkeeper.daemon", "SELECT FROM tokenkeeper.token_count",
        "SELECT tokenkeeper.audience_size('t', everyone => true)", "SELECT tokenkeeper.delivery(gen_random_uuid())",
        "SELECT FROM tokenkeeper.campaign_progress", "SELECT FROM tokenkeeper.campaign",
        "SELECT FROM tokenkeeper.campaign_wait", "SELECT tokenkeeper.sending_fault('t', 'production')",
    ]

    static let allowed: [String: Set<String>] = [
        "sender": [
            // For `tokenkeeperd campaign pause`.
            "SELECT FROM tokenkeeper.migration",
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)",
            "INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at) VALUES ('production', 't', 'aa', 200, NULL, NULL, NULL)",
            "SELECT tokenkeeper.is_sendable('aa', 't')", "SELECT tokenkeeper.sendable('{aa}', 't')",
            "SELECT tokenkeeper.report('t', 'aa', 410)",
            "SELECT FROM tokenkeeper.sendable_token",
            "SELECT FROM tokenkeeper.suppressed_token", "SELECT tokenkeeper.token_key('aa')",
            "INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id) VALUES ('t', 'aa', '{}', gen_random_uuid())",
            "SELECT tokenkeeper.enqueue('{}', 't', everyone => true)",
            "SELECT tokenkeeper.audience_size('t', everyone => true)",
            "SELECT tokenkeeper.delivery(gen_random_uuid())", "SELECT FROM tokenkeeper.campaign_progress",
            "SELECT FROM tokenkeeper.campaign_wait", "SELECT tokenkeeper.sending_fault('t', 'production')",
        ],
        "app": [
            "SELECT tokenkeeper.register('ab', 't')", "SELECT tokenkeeper.unregister('ab', 't')",
            "SELECT tokenkeeper.forget('aa')",
            "SELECT tokenkeeper.forget_device('d')",
            "SELECT tokenkeeper.token_key('aa')",
            // Its commands (backfill, import) check first whether the schema fits.
            "SELECT FROM tokenkeeper.migration",
        ],
        "reader": people,
        "monitor": [
            "SELECT FROM tokenkeeper.campaign", "SELECT FROM tokenkeeper.campaign_progress",
            "SELECT FROM tokenkeeper.campaign_wait", "SELECT tokenkeeper.sending_fault('t', 'production')",
            "SELECT FROM tokenkeeper.result_stat", "SELECT FROM tokenkeeper.stale_share",
            "SELECT FROM tokenkeeper.topic", "SELECT FROM tokenkeeper.token_count", "SELECT FROM tokenkeeper.guard",
            "SELECT FROM tokenkeeper.paused_topic", "SELECT FROM tokenkeeper.sweep_run",
            "SELECT FROM tokenkeeper.sweep_topic", "SELECT FROM tokenkeeper.daemon",
            "SELECT FROM tokenkeeper.sending_daemon", "SELECT FROM tokenkeeper.send_request",
            "SELECT FROM tokenkeeper.failed_send", "SELECT FROM tokenkeeper.held_result",
            "SELECT FROM tokenkeeper.held_registration", "SELECT FROM tokenkeeper.rejected_result",
        ],
        "operator": people.union([
            "SELECT tokenkeeper.begin_move('t', 'west')", "SELECT tokenkeeper.take_rows('east', 't', '[]')",
            "SELECT tokenkeeper.request_sweep()", "DELETE FROM tokenkeeper.rejected_result",
            "SELECT tokenkeeper.reinstate('t', 'production', now(), now())",
            "SELECT tokenkeeper.would_reinstate('t', 'production', now(), now())", "SELECT tokenkeeper.undo_next()",
            "SELECT tokenkeeper.pruned_since('t', 'production', now(), now(), 'stale')",
            "SELECT tokenkeeper.release_held('t', 'production')",
            "SELECT tokenkeeper.discard_held('t', 'production')",
            "SELECT tokenkeeper.requeue_rejected_results()",
            "SELECT tokenkeeper.forget('aa')",
            "SELECT tokenkeeper.forget_device('d')",
            "UPDATE tokenkeeper.topic_policy SET gate = 'observe'",
            "INSERT INTO tokenkeeper.topic_policy (environment, topic, gate) VALUES ('production', 'new', 'observe')",
            "UPDATE tokenkeeper.rejected_result SET topic = 't'",
            "DELETE FROM tokenkeeper.send_request", "DELETE FROM tokenkeeper.failed_send",
            "SELECT tokenkeeper.pause_sending('t')",
            "SELECT tokenkeeper.resume_sending('t')", "SELECT tokenkeeper.requeue_failed()",
            "UPDATE tokenkeeper.topic_policy SET background_per_hour = 1",
        ]),
        "daemon": [
            "SELECT tokenkeeper.take_rows('east', 't', '[]')",
            "SELECT FROM tokenkeeper.provider_token",
            "SELECT FROM tokenkeeper.ledger", "SELECT FROM tokenkeeper.topic", "SELECT FROM tokenkeeper.send_result",
            "SELECT FROM tokenkeeper.token", "SELECT FROM tokenkeeper.token_event",
            "SELECT FROM tokenkeeper.topic_policy",
            "SELECT FROM tokenkeeper.rejected_result", "SELECT FROM tokenkeeper.result_count",
            "SELECT FROM tokenkeeper.sweep_run",
            "SELECT FROM tokenkeeper.status", "SELECT FROM tokenkeeper.daemon", "SELECT FROM tokenkeeper.token_count",
            "SELECT FROM tokenkeeper.migration", "SELECT FROM tokenkeeper.send_result_0",
            "SELECT FROM tokenkeeper.send_result_retry",
            "INSERT INTO tokenkeeper.send_result_retry (topic, partition_number) VALUES ('t', 8)",
            "INSERT INTO tokenkeeper.rejected_result (error, queued_at) VALUES ('e', now())",
            "INSERT INTO tokenkeeper.ledger (topic_id, token_key) VALUES (1, '\\xab')",
            "INSERT INTO tokenkeeper.sweep_run (trigger) VALUES ('sql')",
            "INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'new')",
            "UPDATE tokenkeeper.ledger SET stale_at = NULL",
            "UPDATE tokenkeeper.sweep_run SET outcome = 'failed'", "DELETE FROM tokenkeeper.ledger",
            "DELETE FROM tokenkeeper.send_result_0",
            "DELETE FROM tokenkeeper.rejected_result", "DELETE FROM tokenkeeper.sweep_run",
            "TRUNCATE tokenkeeper.send_result_0",
            "SELECT tokenkeeper.token_key('aa')", "SELECT tokenkeeper.ensure_topic('production', 't')",
            "SELECT tokenkeeper.roll_up_result_count()", "SELECT tokenkeeper.prepare_event_months()",
            "SELECT tokenkeeper.forget_event_month('2000-01-01Z')",
            "SELECT tokenkeeper.record('{}', 0, 0, 0)",
            "SELECT FROM tokenkeeper.held_result",
            "SELECT FROM tokenkeeper.guard",
            "SELECT FROM tokenkeeper.operation",
            "SELECT FROM tokenkeeper.sweep_topic",
            "SELECT FROM tokenkeeper.receipt", "SELECT FROM tokenkeeper.held_registration",
            "SELECT FROM tokenkeeper.suppression_count",
            "SELECT FROM tokenkeeper.stale_wave", "SELECT FROM tokenkeeper.stale_share",
            "SELECT FROM tokenkeeper.exclusion",
            "SELECT FROM tokenkeeper.tripped_guard",
            "DELETE FROM tokenkeeper.operation",
            "DELETE FROM tokenkeeper.held_result",
            "SELECT tokenkeeper.reset_guards(0, 0, 0)", "SELECT tokenkeeper.note_stale_waves()",
            "SELECT tokenkeeper.roll_up_suppression_count()", "SELECT tokenkeeper.hour_of(now())",
            "SELECT tokenkeeper.reinstate_command('t', 'production', now(), NULL, 'suspect')",
            "SELECT tokenkeeper.undo_next()", "SELECT tokenkeeper.fold_token_count()",
            "SELECT FROM tokenkeeper.reinstatement",
            "INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)",
            "INSERT INTO tokenkeeper.send_result (topic) VALUES ('t') RETURNING topic",
            "INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at) VALUES ('production', 't', 'aa', 200, NULL, NULL, NULL)",
            "SELECT FROM tokenkeeper.send_request", "SELECT FROM tokenkeeper.suppressed_send",
            "SELECT FROM tokenkeeper.failed_send",
            "SELECT FROM tokenkeeper.paused_topic", "SELECT FROM tokenkeeper.background_send",
            "SELECT FROM tokenkeeper.sending_daemon",
            "UPDATE tokenkeeper.send_request SET claimed_by = NULL", "DELETE FROM tokenkeeper.send_request",
            "DELETE FROM tokenkeeper.suppressed_send", "DELETE FROM tokenkeeper.failed_send",
            "SELECT tokenkeeper.claim_requests('production', 't', 'me', 1, 0, '-infinity')",
            "SELECT tokenkeeper.finish_requests('me', '{}')",
            "SELECT tokenkeeper.lock_batch('registration', 0, 0)",
            "SELECT tokenkeeper.lock_partition('send_result', 0)",
            "SELECT tokenkeeper.partition_sizes('send_result')",
            "SELECT tokenkeeper.lock_sweep_claim()",
            "INSERT INTO tokenkeeper.send_request (topic, token, payload, apns_id) VALUES ('t', 'aa', '{}', gen_random_uuid())",
            "INSERT INTO tokenkeeper.send_request (topic, claimed_by) VALUES ('t', 'me')",
            "SELECT FROM tokenkeeper.campaign_progress", "SELECT FROM tokenkeeper.campaign",
            "SELECT FROM tokenkeeper.campaign_wait", "SELECT tokenkeeper.sending_fault('t', 'production')",
            "SELECT FROM tokenkeeper.campaign_batch", "SELECT FROM tokenkeeper.campaign_ending",
            "SELECT FROM tokenkeeper.campaign_token", "UPDATE tokenkeeper.campaign SET state = 'ended'",
            "SELECT tokenkeeper.campaigns_due()", "SELECT tokenkeeper.claim_campaign(1, 'me', 1, 0)",
            "SELECT erasure_id FROM tokenkeeper.erasure", "SELECT tokenkeeper.is_forgotten('aa', now())",
            "SELECT tokenkeeper.finish_erasures()",
        ],
    ]

    @Test(arguments: ["sender", "app", "reader", "monitor", "operator", "daemon", "nobody"])
    func `each may do its own work and nothing else`(role: String) throws {
        var owner = try database.connect(user: "postgres")
        if role == "nobody", try owner.scalar("SELECT count(*) FROM pg_roles WHERE rolname = 'a_nobody'") == "0" {
            try owner.execute("CREATE ROLE a_nobody LOGIN")
        }
        var connection = try database.connect(user: "a_\(role)")
        for statement in Self.everything {
            var state: String?
            do throws(DatabaseError) {
                try connection.run("BEGIN")
                try connection.run(statement)
            } catch {
                state = error.sqlState
            }
            connection.rollback()
            let wanted = Self.allowed[role]?.contains(statement) == true ? nil : "42501"
            #expect(state == wanted, "\(role): \(statement)")
        }
    }

    @Test func `a sender writes by COPY, even malformed rows`() throws {
        try database.psql(
            "COPY tokenkeeper.send_result (environment, topic, token, status, body, apns_id, sent_at) FROM STDIN",
            user: "a_sender",
            input: """
                production\tt\tAA\t410\t{"reason":"Unregistered","timestamp":1794000000123}\tid\t2026-01-01 00:00:00Z
                \\N\tt\tbb\t200\t\\N\t\\N\t\\N
                garbage\t\\N\t\\N\t\\N\tnonsense\t\\N\tinfinity
                """ + "\n")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "3")
    }

    @Test func `granting twice changes nothing, and roles are not needed to print`() throws {
        var owner = try database.connect()
        try Grants.apply(&owner, daemon: Version(major: 0, minor: 1, patch: 0))
        try Grants.apply(&owner, daemon: Version(major: 0, minor: 1, patch: 0))
        #expect(Grants.sql.contains("CREATE ROLE"))
    }
}
