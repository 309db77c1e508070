import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `The sweep` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func plan(
        dormant: Duration? = nil, batch: Int = 100, allowance: Int64 = 0, maxShare: Share = .percent(100)
    ) -> SweepPlan {
        SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: dormant, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: allowance,
            maxShare: maxShare, batch: batch)
    }

    private func sweep(
        _ daemon: inout Connection, _ claim: SweepLease.Claim = .new(.cli, dryRun: false), plan: SweepPlan? = nil,
        while goesOn: () -> Bool = { true }
    ) throws -> SweepReport? {
        guard let lease = try SweepLease.claim(claim, holder: "test", on: &daemon) else { return nil }
        return try Sweep(lease, plan ?? self.plan(), lockTimeout: .milliseconds(50)).perform(on: &daemon, while: goesOn)
    }

    /// 300 tokens in two topics: 100 active, 100 suppressed for 89 days, 100 suppressed for 91 days, each group at the same
    /// instant.
    private func fill() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't' || i % 2, registered_at => '2020-01-01Z') FROM generate_series(1, 300) AS i;
            UPDATE tokenkeeper.ledger SET stale_at = '2021-01-01Z', stale_reason = 'Unregistered' WHERE token_key > '\\x00000064';
            SELECT tokenkeeper.recompute_tokens();
            UPDATE tokenkeeper.suppression
            SET since = now() - CASE WHEN token_key <= '\\x000000c8' THEN interval '89 days' ELSE interval '91 days' END;
            """)
    }

    @Test func `it prunes tokens suppressed for longer than the retention, counted from when the ledger knew`() throws {
        try fill()
        try database.psql(
            """
            UPDATE tokenkeeper.ledger SET suspect_at = '2020-06-01Z', suspect_reason = 'BadDeviceToken' WHERE stale_at IS NOT NULL;
            INSERT INTO tokenkeeper.receipt (topic_id, token_key, cause, invalidated_at, reason, received_at, counted)
            SELECT topic_id, token_key, 'suspect', suspect_at, suspect_reason, now(), false FROM tokenkeeper.ledger WHERE suspect_at IS NOT NULL
            """)
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon, plan: plan(batch: 7))
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.receipt WHERE cause = 'suspect'") == "100",
            "those of the remaining tokens")
        #expect(report?.outcome == .finished && report?.prunedSuppressed == 100)
        #expect(
            try database.psql("SELECT state, count(*) FROM tokenkeeper.token GROUP BY 1 ORDER BY 1")
                == "active|100\nstale|100")
        #expect(
            try database.psql(
                "SELECT cause, reason, count(*) FROM tokenkeeper.token_event WHERE event = 'pruned' GROUP BY 1, 2")
                == "stale|Unregistered|100")
        #expect(
            try database.psql("SELECT tokenkeeper.is_sendable('0000012c', 't0')") == "t", "a pruned token is unknown")
        #expect(
            try database.psql(
                "SELECT trigger, dry_run, outcome, pruned_suppressed, message, finished_at >= started_at FROM tokenkeeper.sweep_run"
            ) == "cli|f|finished|100||t")
    }

    @Test func `a dry run counts the same and deletes nothing`() throws {
        try fill()
        var daemon = try database.connect(user: "a_daemon")
        let dry = try sweep(&daemon, .new(.cli, dryRun: true), plan: plan(dormant: .seconds(86400)))
        #expect(dry?.prunedSuppressed == 100 && dry?.prunedDormant == 100)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token") == "300")
        #expect(
            try database.psql("SELECT dry_run, outcome, pruned_suppressed, pruned_dormant FROM tokenkeeper.sweep_run")
                == "t|finished|100|100")
    }

    @Test func `dormant tokens are pruned only if configured`() throws {
        try fill()
        try database.psql("SELECT tokenkeeper.register('00000001', 't1')")
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon, plan: plan(dormant: .seconds(400 * 86400)))
        #expect(report?.prunedDormant == 99)
        #expect(try database.psql("SELECT token FROM tokenkeeper.token WHERE state = 'active'") == "00000001")
    }

    @Test func `a revived token survives, and a locked one waits for the next sweep`() throws {
        try fill()
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('000000c9', 't1')")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon)?.prunedSuppressed == 99)
        try app.execute("COMMIT")
        #expect(try sweep(&daemon)?.prunedSuppressed == 0)
        #expect(try database.psql("SELECT state FROM tokenkeeper.token WHERE token = '000000c9'") == "active")
    }

    @Test func `a stopped sweep says so, and the next one continues there`() throws {
        try fill()
        var daemon = try database.connect(user: "a_daemon")
        var batches = 0
        let stopped = try sweep(&daemon, plan: plan(batch: 10)) {
            batches += 1
            return batches <= 5
        }
        #expect(stopped?.outcome == .interrupted && (1...30).contains(stopped?.prunedSuppressed ?? 0))
        #expect(
            try database.psql("SELECT sum(pruned) FROM tokenkeeper.sweep_topic")
                == "\(stopped?.prunedSuppressed ?? -1)",
            "the day's share is of what was pruned")
        let next = try sweep(&daemon)
        #expect((stopped?.prunedSuppressed ?? 0) + (next?.prunedSuppressed ?? 0) == 100)
        #expect(
            try database.psql("SELECT outcome FROM tokenkeeper.sweep_run ORDER BY run_id") == "interrupted\nfinished")
    }

    @Test func `a failed sweep says why`() throws {
        try fill()
        try database.psql(
            "CREATE FUNCTION tokenkeeper.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$; CREATE TRIGGER no BEFORE DELETE ON tokenkeeper.ledger EXECUTE FUNCTION tokenkeeper.no()"
        )
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon)
        #expect(report?.outcome == .failed)
        #expect(
            try database.psql("SELECT outcome, message FROM tokenkeeper.sweep_run")
                == "failed|t1 (production): not today (SQLSTATE P0001); t0 (production): not today (SQLSTATE P0001)"
        )
        #expect(
            try database.psql(
                "SELECT warnings::text LIKE '%the last sweep failed: t1 (production): not today%' FROM tokenkeeper.status"
            )
                == "t")
    }

    @Test func `only one daemon sweeps at a time, and a minute of silence loses the lease`() throws {
        try fill()
        var first = try database.connect(user: "a_daemon")
        var second = try database.connect(user: "a_daemon")
        let lease = try #require(try SweepLease.claim(.new(.timer, dryRun: false), holder: "first", on: &first))
        #expect(try SweepLease.claim(.new(.cli, dryRun: false), holder: "second", on: &second) == nil)
        let again = try SweepLease.untilDue(interval: .seconds(3600), on: &second)
        #expect(again > .seconds(30) && again <= .seconds(61), "a running sweep may have died")
        try database.psql("UPDATE tokenkeeper.sweep_run SET heartbeat_at = heartbeat_at - interval '61 seconds'")
        let taken = try SweepLease.claim(.new(.cli, dryRun: false), holder: "second", on: &second)
        #expect(taken != nil)
        let report = try Sweep(lease, plan(), lockTimeout: .milliseconds(50)).perform(on: &first) { true }
        #expect(report.outcome == .interrupted)
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.token") == "300",
            "what it did without the right is undone")
        #expect(
            try database.psql("SELECT outcome, message FROM tokenkeeper.sweep_run ORDER BY run_id")
                == "interrupted|first fell silent; the next sweep continues where this one stopped\nrunning|")
    }

    @Test func `the interval spans daemons, and a request does not wait for it`() throws {
        var daemon = try database.connect(user: "a_daemon")
        let hourly = SweepLease.Claim.due(interval: .seconds(3600))
        #expect(try sweep(&daemon, hourly)?.trigger == .timer)
        #expect(try sweep(&daemon, hourly) == nil)
        let remaining = try SweepLease.untilDue(interval: .seconds(3600), on: &daemon)
        #expect(remaining > .seconds(3500) && remaining <= .seconds(3600))
        #expect(try sweep(&daemon, .requested) == nil)
        let id = try database.psql("SELECT tokenkeeper.request_sweep(dry_run => true)", user: "a_operator")
        let asked = try sweep(&daemon, .requested)
        #expect(asked.map { "\($0.runID)" } == id && asked?.trigger == .sql && asked?.dryRun == true)
        try database.psql("UPDATE tokenkeeper.sweep_run SET started_at = started_at - interval '1 hour'")
        #expect(try sweep(&daemon, hourly)?.outcome == .finished)
    }

    @Test func `old rejected results and runs are deleted, recent ones stay`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, queued_at, rejected_at)
                SELECT 'e', now(), now() - make_interval(days => d) FROM unnest('{1,89,91,400}'::int[]) AS d;
            INSERT INTO tokenkeeper.sweep_run (trigger, outcome, started_at, finished_at)
                SELECT 'timer', 'finished', now() - make_interval(days => d), now() - make_interval(days => d) FROM unnest('{10,394,396}'::int[]) AS d;
            """)
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon)
        #expect(report?.deletedRejected == 2 && report?.deletedRuns == 1)
    }

    private var limited: SweepPlan { plan(allowance: 10, maxShare: .percent(10)) }

    @Test func `too large a share of a topic is refused with numbers, unless forced; other topics are pruned`() throws {
        // 50 of the 150 tokens of each topic are due, and 5 of 100 in a third topic.
        try fill()
        try database.psql(
            """
            SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 'u', registered_at => '2020-01-01Z') FROM generate_series(1, 100) AS i;
            UPDATE tokenkeeper.ledger SET unregistered_by_app_at = '2021-01-01Z'
            WHERE topic_id = (SELECT topic_id FROM tokenkeeper.topic WHERE topic = 'u') AND token_key <= '\\x00000005';
            SELECT tokenkeeper.recompute_tokens();
            UPDATE tokenkeeper.suppression SET since = clock_timestamp() - interval '91 days'
            WHERE topic_id = (SELECT topic_id FROM tokenkeeper.topic WHERE topic = 'u');
            """)
        var daemon = try database.connect(user: "a_daemon")
        let report = try #require(try sweep(&daemon, plan: limited))
        #expect(report.outcome == .finished && report.prunedSuppressed == 5 && report.refused == 100)
        #expect(
            report.message
                == "refused: t1 (production): 50 of 150 tokens are due, more than 15; t0 (production): 50 of 150 tokens are due, more than 15"
        )
        #expect(
            report.topics.map { "\($0.topic) \($0.cause) \($0.tokens) \($0.refused) \($0.samples.count)" }
                == ["t0 stale 50 true 5", "t1 stale 50 true 5", "u unregistered_by_app 5 false 5"])
        #expect(
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "the last sweep refused to prune 50 of the 150 tokens of t0 (production), more than 15"))
        let forced = try sweep(&daemon, .new(.cli, dryRun: false, forced: true), plan: limited)
        #expect(forced?.prunedSuppressed == 100 && forced?.refused == 0 && forced?.forced == true)
        #expect(try database.psql("SELECT forced FROM tokenkeeper.sweep_run ORDER BY run_id") == "f\nt")
        #expect(
            try database.psql(
                "SELECT count(*) FROM unnest((SELECT warnings FROM tokenkeeper.status)) AS w WHERE w LIKE '%refused%'")
                == "0")
    }

    @Test func `a dry run reports by topic and cause what a sweep would prune and refuse, with samples`() throws {
        try fill()
        try database.psql("UPDATE tokenkeeper.topic_policy SET prune_max_share = 1 WHERE topic = 't1'")
        var daemon = try database.connect(user: "a_daemon")
        let dry = try #require(try sweep(&daemon, .new(.cli, dryRun: true), plan: limited))
        #expect(dry.prunedSuppressed == 50 && dry.refused == 50)
        #expect(dry.topics.map { "\($0.topic) \($0.tokens) \($0.refused)" } == ["t0 50 true", "t1 50 false"])
        #expect(
            try database.psql("SELECT samples[1] FROM tokenkeeper.sweep_topic WHERE topic = 't0'")
                .hasPrefix("00000"))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token") == "300")
        #expect(
            try sweep(&daemon, plan: limited)?.prunedSuppressed == 50, "the dry run took nothing of the day's share")
    }

    @Test func `the daily limit holds across sweeps`() throws {
        try fill()
        // In each topic 20 are due, and later 30. Neither is more than 45, but both together are.
        try database.psql("UPDATE tokenkeeper.topic_policy SET prune_allowance = 45")
        let later = "WHERE token_key > '\\x000000f0'"
        try database.psql(
            "UPDATE tokenkeeper.suppression SET since = clock_timestamp() - interval '89 days' \(later)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon, plan: limited)?.prunedSuppressed == 40)
        try database.psql(
            "UPDATE tokenkeeper.suppression SET since = clock_timestamp() - interval '91 days' \(later)")
        #expect(try sweep(&daemon, plan: limited)?.refused == 60)
        try database.psql("UPDATE tokenkeeper.sweep_run SET started_at = started_at - interval '25 hours'")
        #expect(try sweep(&daemon, plan: limited)?.prunedSuppressed == 60)
    }

    @Test func `a topic's policy can have its own retentions`() throws {
        try fill()
        try database.psql(
            """
            UPDATE tokenkeeper.topic_policy SET suppressed_retention = '88 days' WHERE topic = 't0';
            UPDATE tokenkeeper.topic_policy SET suppressed_retention = '100 days', dormant_after = '1000 days' WHERE topic = 't1';
            """)
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon)
        #expect(report?.prunedSuppressed == 100 && report?.prunedDormant == 50)
        #expect(
            try database.psql("SELECT topic, state, count(*) FROM tokenkeeper.token GROUP BY 1, 2 ORDER BY 1, 2")
                == "t0|active|50\nt1|stale|100")
        // Zero means never, even if the default is a duration.
        try database.psql("UPDATE tokenkeeper.topic_policy SET dormant_after = '0', suppressed_retention = NULL")
        #expect(try sweep(&daemon, plan: plan(dormant: .seconds(86400)))?.prunedDormant == 0)
    }

    @Test func `tokens that an application has locked are reported as left`() throws {
        try fill()
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = '\\x000000c9' FOR UPDATE")
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon, .new(.cli, dryRun: false, forced: true))
        try app.execute("COMMIT")
        #expect(
            report?.prunedSuppressed == 99
                && report?.message
                    == "1 due token is left for the next sweep: an application has locked it, or registered it again"
        )
    }

    @Test func `tokens that become due during a sweep wait for the next one`() throws {
        let database = database
        @Sendable func register(_ tokens: ClosedRange<Int>) throws {
            try database.psql(
                "SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2020-01-01Z') FROM generate_series(\(tokens.lowerBound), \(tokens.upperBound)) AS i"
            )
        }
        try register(1...100)
        var daemon = try database.connect(user: "a_daemon")
        var batches = 0
        // The last batch has to be smaller.
        let report = try sweep(&daemon, plan: plan(dormant: .seconds(400 * 86400), batch: 15)) {
            batches += 1
            // An import of old registrations, after everything has been counted.
            if batches == 3 { try? register(101...600) }
            return true
        }
        #expect(report?.prunedDormant == 100, "as many as were counted")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token WHERE state = 'active'") == "500")
    }

    @Test func `an event trigger that forbids DDL keeps no history longer than its retention`() throws {
        try database.psql(
            """
            CREATE TABLE tokenkeeper.token_event_log_2020_01 (LIKE tokenkeeper.token_event_log INCLUDING ALL);
            ALTER TABLE tokenkeeper.token_event_log ATTACH PARTITION tokenkeeper.token_event_log_2020_01
                FOR VALUES FROM ('2020-01-01Z') TO ('2020-02-01Z');
            CREATE TABLE tokenkeeper.token_event_log_2020_02 (LIKE tokenkeeper.token_event_log INCLUDING ALL);
            ALTER TABLE tokenkeeper.token_event_log ATTACH PARTITION tokenkeeper.token_event_log_2020_02
                FOR VALUES FROM ('2020-02-01Z') TO ('2020-03-01Z');
            INSERT INTO tokenkeeper.token_event_log (at, topic_id, token_key, event)
            SELECT d::timestamptz, 1, '\\xaa', 'registered' FROM unnest('{2020-01-05Z,2020-01-06Z,2020-02-05Z}'::text[]) AS d
            """)
        try database.psql(
            """
            CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no DDL at night''; END';
            CREATE EVENT TRIGGER refuse ON ddl_command_start EXECUTE FUNCTION public.refuse()
            """, user: "postgres")
        let months = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'tokenkeeper.token_event_log'::regclass"
        let before = try database.psql(months)
        var daemon = try database.connect(user: "a_daemon")
        let refused = try sweep(&daemon)
        #expect(refused?.outcome == .failed && refused?.deletedEvents == 3)
        #expect(
            refused?.message?.contains("old months are empty") == true
                && refused?.message?.contains("no DDL at night") == true)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token_event_log") == "0", "truncated")
        #expect(try database.psql(months) == before)
        try database.psql("DROP EVENT TRIGGER refuse", user: "postgres")
        #expect(try sweep(&daemon)?.outcome == .finished)
        #expect(try Int(database.psql(months)) == Int(before).map { $0 - 2 })
    }
}
