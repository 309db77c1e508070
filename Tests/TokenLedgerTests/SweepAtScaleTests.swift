import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `The sweep at scale` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func sweep(
        _ daemon: inout Connection, dryRun: Bool = false, batch: Int = 100, while goesOn: () -> Bool = { true }
    ) throws -> SweepReport {
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 0, maxShare: .percent(100), batch: batch)
        let lease = try #require(
            try SweepLease.claim(.new(.cli, dryRun: dryRun), holder: "test", on: &daemon))
        return try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon, while: goesOn)
    }

    /// Due tokens in some topics, this many in each.
    private func fill(_ topics: [String], tokens: Int) throws {
        for topic in topics {
            try database.psql(
                """
                INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at, stale_at, stale_reason)
                SELECT t.id, decode(lpad(to_hex(i), 8, '0'), 'hex'), '2020-01-01Z', '2021-01-01Z', 'Unregistered'
                FROM tokenkeeper.ensure_topic('production', '\(topic)') AS t (id), generate_series(1, \(tokens)) AS i;
                SELECT tokenkeeper.recompute_tokens();
                UPDATE tokenkeeper.suppression SET since = '2021-01-02Z'
                """)
        }
    }

    // Counts

    @Test func `counts are added up by hour, and not read again`() throws {
        let twice = """
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
            SELECT date_bin('1 hour', now(), '2000-01-01Z') - h * interval '1 hour', 'production', 't', s, NULL, 2
            FROM generate_series(3, 30) AS h, (VALUES (200), (410), (200)) AS k (s)
            """
        try database.psql(twice)
        var daemon = try database.connect(user: "a_daemon")
        var calls = 1
        while try daemon.query("SELECT tokenkeeper.roll_up_result_count(10)").value(Bool.self) { calls += 1 }
        #expect(calls > 5, "ten rows at a time")
        let sums = "SELECT count(*), sum(results), max(results) FROM tokenkeeper.result_count"
        #expect(try database.psql(sums) == "56|168|4")
        try database.psql(twice)
        try daemon.execute("SELECT tokenkeeper.roll_up_result_count()")
        #expect(try database.psql(sums) == "140|336|4", "those hours are done")
    }

    @Test func `an hour with more rows than one statement takes is added up in several`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
            SELECT date_bin('1 hour', now(), '2000-01-01Z') - interval '5 hours', 'production', 't' || i % 3, 200, 1
            FROM generate_series(1, 500) AS i
            """)
        var daemon = try database.connect(user: "a_daemon")
        var calls = 1
        while try daemon.query("SELECT tokenkeeper.roll_up_result_count(50)").value(Bool.self) { calls += 1 }
        #expect(calls >= 10)
        #expect(
            try database.psql("SELECT topic, results FROM tokenkeeper.result_count ORDER BY 1")
                == "t0|166\nt1|167\nt2|167")
    }

    @Test func `of invented topics, an hour keeps the known ones and those with the most results`()
        throws
    {
        try database.psql(
            """
            SELECT tokenkeeper.ensure_topic('production', 'known');
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, results)
            SELECT date_bin('1 hour', now(), '2000-01-01Z') - interval '5 hours', e, t, 200, n
            FROM (SELECT 'production', 'invented' || i, 1 FROM generate_series(1, 500) AS i
                  UNION ALL SELECT 'nowhere', 'invented', 1
                  UNION ALL VALUES ('production', 'known', 1), ('production', 'large', 10)) AS k (e, t, n)
            """)
        var daemon = try database.connect(user: "a_daemon")
        while try daemon.query("SELECT tokenkeeper.roll_up_result_count(50, 2)").value(Bool.self) {}
        #expect(
            try database.psql("SELECT environment, topic, results FROM tokenkeeper.result_stat ORDER BY 1, 2")
                == "(other)|(other)|1\nproduction|(other)|500\nproduction|known|1\nproduction|large|10")
    }

    @Test func `a sweep adds up the last hours and deletes the counts past their retention`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.result_count (hour, topic, status, results)
            SELECT date_bin('1 hour', now(), '2000-01-01Z') - make_interval(days => d), 't', 200, 1
            FROM unnest('{0,0,1,1,394,394,396,396,500}'::integer[]) AS d
            """)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon).outcome == .finished)
        #expect(try database.psql("SELECT count(*), sum(results) FROM tokenkeeper.result_count") == "3|6")
    }

    // Topics

    @Test func `a topic that fails is reported and does not stop the others`() throws {
        try fill(["a", "b", "c"], tokens: 10)
        try database.psql("ALTER TABLE tokenkeeper.sweep_topic ADD CONSTRAINT no CHECK (topic <> 'b')")
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon)
        #expect(report.outcome == .failed && report.prunedSuppressed == 20)
        #expect(report.message?.hasPrefix("b (production): ") == true)
        #expect(try database.psql("SELECT topic, count(*) FROM tokenkeeper.token GROUP BY 1") == "b|10")
    }

    @Test func `a table that cannot be cleared does not stop the others`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, queued_at, rejected_at) SELECT 'e', now(), now() - interval '91 days';
            INSERT INTO tokenkeeper.failed_send (request_id, queued_at, failed_at, attempts, error)
            SELECT 1, now(), now() - interval '91 days', 1, 'e';
            CREATE FUNCTION tokenkeeper.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
            CREATE TRIGGER no BEFORE DELETE ON tokenkeeper.rejected_result EXECUTE FUNCTION tokenkeeper.no();
            """)
        var daemon = try database.connect(user: "a_daemon")
        let report = try sweep(&daemon)
        #expect(report.message == "tokenkeeper.rejected_result: not today (SQLSTATE P0001)")
        #expect(report.outcome == .failed && report.deletedSends == 1)
    }

    @Test func `due tokens of a large topic are counted in slices, and the count can stop between two`() throws {
        try fill(["large"], tokens: 45_000)
        var daemon = try database.connect(user: "a_daemon")
        var asked = 0
        let stopped = try sweep(&daemon, dryRun: true) {
            asked += 1
            return asked <= 3
        }
        #expect(stopped.outcome == .interrupted && stopped.topics.isEmpty)
        let whole = try sweep(&daemon, dryRun: true)
        #expect(whole.prunedSuppressed == 45_000)
        #expect(whole.topics.map { "\($0.cause) \($0.tokens) \($0.samples.count)" } == ["stale 45000 5"])
    }

    @Test func `old rows are found by key, and a locked row is left for the next sweep`() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, queued_at, rejected_at)
            SELECT 'e', now(), now() - CASE WHEN i <= 50 THEN interval '91 days' ELSE interval '1 day' END FROM generate_series(1, 1000) AS i
            """)
        var person = try database.connect()
        try person.execute("BEGIN; SELECT FROM tokenkeeper.rejected_result WHERE rejected_id = 3 FOR UPDATE")
        var daemon = try database.connect(user: "a_daemon")
        var asked = 0
        let first = try sweep(&daemon, batch: 7) {
            asked += 1
            return true
        }
        #expect(first.outcome == .finished && first.deletedRejected == 49)
        #expect(asked < 60, "it does not read the recent rows")
        try person.execute("COMMIT")
        #expect(try sweep(&daemon).deletedRejected == 1)
    }

    // Reaping

    private let old = "UPDATE tokenkeeper.topic SET first_seen = first_seen - interval '2 days'"

    @Test func `topics that nothing refers to are deleted, all others stay`() throws {
        try fill(["token"], tokens: 1)
        try database.psql(
            """
            SELECT tokenkeeper.ensure_topic('production', t) FROM unnest('{invented,policy,undone,open,closed,pruned,long_pruned}'::text[]) AS t;
            UPDATE tokenkeeper.topic_policy SET gate = 'enforce' WHERE topic = 'policy';
            SELECT tokenkeeper.reinstate('undone', 'production', '2020-01-01Z', '2020-01-02Z');
            INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, tokens, max_tokens)
                SELECT topic_id, 'suspect', 1, 1 FROM tokenkeeper.topic WHERE topic = 'open';
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
                SELECT now(), topic_id, 'suspect', 1 FROM tokenkeeper.topic WHERE topic = 'closed';
            INSERT INTO tokenkeeper.topic_prune (topic_id, pruned_at)
                SELECT topic_id, now() - CASE topic WHEN 'pruned' THEN interval '394 days' ELSE interval '396 days' END
                FROM tokenkeeper.topic WHERE topic LIKE '%pruned';
            UPDATE tokenkeeper.suppression SET since = now();
            \(old);
            SELECT tokenkeeper.ensure_topic('production', 'new')
            """)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon).outcome == .finished)
        #expect(
            try database.psql("SELECT string_agg(topic, ' ' ORDER BY topic) FROM tokenkeeper.topic")
                == "new open policy pruned token undone")
        #expect(try database.psql("SELECT reaped_topics FROM tokenkeeper.sweep_run") == "3")
        #expect(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.suppression_count WHERE topic_id NOT IN (SELECT topic_id FROM tokenkeeper.topic)"
            )
                == "0")
    }

    @Test func `a topic is kept as long as the history of its pruned tokens`() throws {
        try fill(["t"], tokens: 3)
        try database.psql(old)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon).prunedSuppressed == 3)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'pruned'") == "3")
        try database.psql("UPDATE tokenkeeper.topic_prune SET pruned_at = pruned_at - interval '396 days'")
        #expect(try sweep(&daemon).outcome == .finished)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "0")
    }

    @Test func `a topic that another transaction has just read is not deleted`() throws {
        try database.psql("SELECT tokenkeeper.ensure_topic('production', 't'); \(old)")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('aa', 't')")
        var daemon = try database.connect(user: "a_daemon")
        let first = try sweep(&daemon)
        #expect(first.outcome == .finished && first.message == nil)
        try app.execute("COMMIT")
        #expect(try sweep(&daemon).outcome == .finished)
        #expect(try database.psql("SELECT topic, token, state FROM tokenkeeper.token") == "t|aa|active")
    }

    @Test func `a transaction with an older snapshot does not use a deleted topic`() throws {
        try database.psql("SELECT tokenkeeper.ensure_topic('production', 't'); \(old)")
        for call in ["register('aa', 't')", "unregister('aa', 't')"] {
            var app = try database.connect(user: "a_app")
            try app.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
            var daemon = try database.connect(user: "a_daemon")
            #expect(try sweep(&daemon).outcome == .finished)
            #expect(try database.psql("SELECT count(*) FROM tokenkeeper.topic") == "0")
            let error = #expect(throws: DatabaseError.self) { try app.execute("SELECT tokenkeeper.\(call)") }
            #expect(error?.sqlState == "40001")
            app.rollback()
            #expect(try database.psql("SELECT count(*) FROM tokenkeeper.ledger") == "0")
            try database.psql("SELECT tokenkeeper.ensure_topic('production', 't'); \(old)")
        }
    }

    // The history after a restore

    @Test func `after a restore, future transaction ids are reset`() throws {
        try fill(["t"], tokens: 3)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try sweep(&daemon).prunedSuppressed == 3)
        let ahead =
            "UPDATE tokenkeeper.token_event_log SET transaction_id = '900000000000' WHERE token_key = '\\x00000002'"
        try database.psql(ahead)
        #expect(try sweep(&daemon).outcome == .finished)
        let future =
            "SELECT count(*) FROM tokenkeeper.token_event WHERE transaction_id >= pg_snapshot_xmax(pg_current_snapshot())"
        #expect(try database.psql(future) == "1", "without a sign of a restore the history is not read")
        try database.psql("UPDATE tokenkeeper.sweep_progress SET transaction_id = '900000000001'")
        #expect(try sweep(&daemon).outcome == .finished)
        #expect(try database.psql(future) == "0")
        #expect(try database.psql("SELECT reset_events FROM tokenkeeper.sweep_run ORDER BY run_id") == "0\n0\n1")
        #expect(
            try database.psql(
                "SELECT transaction_id < pg_snapshot_xmax(pg_current_snapshot()) FROM tokenkeeper.sweep_progress")
                == "t")
    }

    @Test func `slices grow while they are quick and shrink when they are slow`() {
        var size = SliceSize(100, in: 10...300)
        size.took(.milliseconds(1))
        #expect(size.value == 200)
        size.took(.milliseconds(1))
        #expect(size.value == 300)
        size.took(.milliseconds(900))
        #expect(size.value == 300)
        size.took(.milliseconds(1500))
        #expect(size.value == 100)
        size.took(.milliseconds(1), for: size.value - 1)
        #expect(size.value == 100, "it may have been quick because it was little")
        let sizes = (1...3).map { _ in size.timedOut() ? size.value : 0 }
        #expect(sizes == [12, 10, 0])
    }
}
