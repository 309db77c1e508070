import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Gauges of the database` {
    private let labels = TopicLabels()

    init() {
        labels.take(["t", "u"])
    }

    private func look(_ database: TestDatabase) throws -> DatabaseGauges {
        var daemon = try database.connect(user: "a_daemon")
        return try DatabaseGauges(labels, on: &daemon)
    }

    /// `environment topic detail value`, one line each.
    private func lines(_ gauge: TopicGauge, _ gauges: DatabaseGauges) -> [String]? {
        gauges.byTopic[gauge]?.map { sample in
            let words = [sample.environment, sample.topic, sample.detail, "\(Int(sample.value))"]
            return words.compactMap { $0 }.joined(separator: " ")
        }
    }

    private func topics(_ database: TestDatabase) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) OVERRIDING SYSTEM VALUE
            SELECT e, t FROM unnest('{t,u,v,w}'::text[]) AS t, unnest('{production}'::text[]) AS e;
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('sandbox', 't')
            """)
    }

    /// The number of a topic in production.
    private func number(_ topic: String) -> String {
        "(SELECT topic_id FROM tokenkeeper.topic WHERE topic = '\(topic)' AND environment = 'production')"
    }

    @Test func `tokens by state; topics without a label are added up`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't') FROM unnest('{aa,bb}'::text[]) AS x;
            SELECT tokenkeeper.register('aa', 't', 'sandbox'), tokenkeeper.unregister('cc', 't');
            SELECT tokenkeeper.register('aa', x) FROM unnest('{v,w}'::text[]) AS x
            """)
        let expected = [
            "production other active 2", "production t active 2", "production t unregistered_by_app 1",
            "sandbox t active 1",
        ]
        #expect(lines(.tokens, try look(database))?.sorted() == expected)
    }

    @Test func `guards, pauses and refusals; of the topics without a label, the worst`() throws {
        let database = try TestCluster.shared.database()
        try topics(database)
        let calm = ["production other 0", "production t 0", "production u 0", "sandbox t 0"]
        let atRest = try look(database)
        #expect(lines(.guardTripped, atRest)?.sorted() == calm && lines(.topicPaused, atRest)?.sorted() == calm)
        #expect(lines(.sweepRefusedTokens, atRest) == [] && lines(.outboxOldestDue, atRest) == [])
        try database.psql(
            """
            INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, tokens, max_tokens)
            VALUES (\(number("t")), 'suspect', 1, 1), (\(number("t")), 'stale', 1, 1), (\(number("v")), 'suspect', 1, 1);
            SELECT tokenkeeper.pause_sending('u');
            INSERT INTO tokenkeeper.paused_topic (environment, topic, reason) VALUES ('sandbox', 'never.seen', '');
            INSERT INTO tokenkeeper.sweep_run (trigger, outcome, finished_at, dry_run) VALUES
                ('timer', 'finished', 'epoch', false), ('timer', 'failed', 'epoch', false), ('timer', 'finished', now(), true);
            INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused)
            SELECT r.run_id, 'production', x.topic, x.cause, x.tokens, x.refused
            FROM tokenkeeper.sweep_run AS r, (VALUES ('t', 'stale', 5, true), ('t', 'dormant', 2, true), ('u', 'stale', 9, false),
                                                     ('v', 'stale', 10, true), ('w', 'stale', 30, true)) AS x (topic, cause, tokens, refused)
            WHERE r.outcome = 'failed'
            """)
        let gauges = try look(database)
        #expect(
            lines(.guardTripped, gauges)?.sorted() == [
                "production other 1", "production t 1", "production u 0", "sandbox t 0",
            ])
        #expect(
            lines(.topicPaused, gauges)?.sorted() == [
                "production other 0", "production t 0", "production u 1", "sandbox other 1", "sandbox t 0",
            ])
        #expect(lines(.sweepRefusedTokens, gauges)?.sorted() == ["production other 40", "production t 7"])
        #expect(gauges.totals[.lastSweepSuccess] == 0, "neither a failed sweep nor a dry run")
    }

    @Test func `the oldest request that is due, except for scheduled, claimed and paused ones`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, queued_at, scheduled_at, claimed_by) VALUES
                ('production', 't', 'aa', '{}', to_timestamp(1000), NULL, 'somebody'),
                (NULL, 't', 'aa', '{}', to_timestamp(2000), NULL, NULL),
                ('production', 't', 'aa', '{}', to_timestamp(3000), NULL, NULL),
                ('production', 'u', 'aa', '{}', to_timestamp(1000), '2100-01-01Z', NULL),
                ('production', 'v', 'aa', '{}', to_timestamp(5000), NULL, NULL),
                ('production', 'w', 'aa', '{}', to_timestamp(1000), to_timestamp(4000), NULL),
                ('staging', NULL, 'aa', '{}', to_timestamp(6000), NULL, NULL),
                ('sandbox', 't', 'aa', '{}', to_timestamp(1000), NULL, NULL);
            SELECT tokenkeeper.pause_sending('t', 'sandbox')
            """)
        let gauges = try look(database)
        #expect(
            lines(.outboxOldestDue, gauges)?.sorted() == [
                "other other 6000", "production other 4000", "production t 2000",
            ])
        #expect(gauges.totals[.outboxRequests] == 8)
    }

    @Test func `newly stale tokens, their share and waves; of the topics without a label, the worst`() throws {
        let database = try TestCluster.shared.database()
        try topics(database)
        let atRest = try look(database)
        #expect(lines(.newlyStaleTokens, atRest) == [] && lines(.newlyStaleShare, atRest) == [])
        try database.psql(
            """
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens) VALUES
                (\(number("t")), true, 'active', 90), (\(number("v")), true, 'active', 50), (\(number("w")), true, 'active', 25),
                (\(number("t")), true, 'stale', 30), (\(number("v")), true, 'stale', 50), (\(number("w")), true, 'stale', 75);
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens) VALUES
                (tokenkeeper.hour_of(now()), \(number("t")), 'stale', 10), (tokenkeeper.hour_of(now()) - interval '5 hours', \(number("t")), 'stale', 20),
                (tokenkeeper.hour_of(now()), \(number("v")), 'stale', 50), (tokenkeeper.hour_of(now()), \(number("w")), 'stale', 75),
                (tokenkeeper.hour_of(now()), \(number("w")), 'suspect', 1000);
            INSERT INTO tokenkeeper.stale_wave (topic_id, since, tokens, active, undo) VALUES (\(number("w")), now(), 75, 100, 'undo')
            """)
        let gauges = try look(database)
        #expect(
            lines(.newlyStaleTokens, gauges)?.sorted() == [
                "production other day 125", "production other hour 125", "production t day 30", "production t hour 10",
            ])
        let shares = gauges.byTopic[.newlyStaleShare] ?? []
        #expect(
            shares.sorted { ($0.topic, $0.detail ?? "") < ($1.topic, $1.detail ?? "") }.map(\.value)
                == [0.75, 0.75, 0.25, 0.1])
        #expect(
            lines(.staleWave, gauges)?.sorted() == [
                "production other 1", "production t 0", "production u 0", "sandbox t 0",
            ])
    }

    @Test func `rows of small tables are counted, and daemons that are alive`() throws {
        let database = try TestCluster.shared.database()
        #expect(
            try look(database).totals
                == [
                    .outboxRequests: 0, .openCampaigns: 0, .heldResults: 0, .rejectedResults: 0,
                    .rejectedRegistrations: 0,
                    .failedSends: 0,
                    .liveDaemons: 0, .attachedTables: 0, .brokenAttachments: 0,
                ])
        try database.psql(
            """
            INSERT INTO tokenkeeper.failed_send (error, request_id, queued_at, attempts) SELECT 'e', i, now(), 1 FROM generate_series(1, 4) AS i;
            INSERT INTO tokenkeeper.rejected_result (error, queued_at) VALUES ('e', now()), ('e', now());
            INSERT INTO tokenkeeper.rejected_registration (error, queued_at) VALUES ('e', now()), ('e', now()), ('e', now());
            INSERT INTO tokenkeeper.held_result (topic_id, token_key, invalidated_at, reason, queued_at) VALUES (1, 'x', now(), 'r', now());
            INSERT INTO tokenkeeper.daemon (daemon_id, version, started_at, heartbeat_at, queue_depth, queue_depth_exact, stopped_at) VALUES
                ('a', '0.1.0', now(), now(), 0, true, NULL), ('b', '0.1.0', now(), now(), 0, true, now()),
                ('c', '0.1.0', now(), now() - interval '31 seconds', 0, true, NULL);
            """)
        #expect(
            try look(database).totals
                == [
                    .outboxRequests: 0, .openCampaigns: 0, .heldResults: 1, .rejectedResults: 2,
                    .rejectedRegistrations: 3,
                    .failedSends: 4,
                    .liveDaemons: 1, .attachedTables: 0, .brokenAttachments: 0,
                ])
    }

    @Test func `rows of a large table are those of the status cache, for three of its pauses`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            INSERT INTO tokenkeeper.rejected_result (error, token, queued_at)
            SELECT 'no token', repeat('x', 400), now() FROM generate_series(1, 12000) AS i
            """)
        #expect(try look(database).totals[.rejectedResults] == nil, "nobody has counted it")
        var daemon = try database.connect(user: "a_daemon")
        var cache = StatusCache(.production)
        try cache.refresh(on: &daemon)
        #expect(try look(database).totals[.rejectedResults] == 10_000)
        try database.psql(
            "UPDATE tokenkeeper.status_cache SET pause = '100 seconds', as_of = now() - interval '290 seconds'")
        #expect(try look(database).totals[.rejectedResults] == 10_000)
        try database.psql("UPDATE tokenkeeper.status_cache SET as_of = now() - interval '301 seconds'")
        let gauges = try look(database)
        #expect(gauges.totals[.rejectedResults] == nil && gauges.totals[.heldResults] == 0)
        var next = StatusCache(.production)
        try next.refresh(on: &daemon)
        #expect(
            try database.psql(
                "SELECT bool_and(pause BETWEEN '5 seconds' AND '5 minutes') FROM tokenkeeper.status_cache")
                == "t")
        #expect(try look(database).totals[.rejectedResults] == 10_000)
    }

    @Test func `a look that meets a lock or is refused leaves out its own gauge, and no other`() throws {
        let database = try TestCluster.shared.database()
        try topics(database)
        try database.psql("REVOKE SELECT ON tokenkeeper.tripped_guard, tokenkeeper.daemon FROM tokenkeeper_daemon")
        var owner = try database.connect()
        try owner.execute("BEGIN; LOCK TABLE tokenkeeper.token_count, tokenkeeper.held_result IN ACCESS EXCLUSIVE MODE")
        let gauges = try look(database)
        #expect(
            Set(gauges.byTopic.keys) == [
                .topicPaused, .sweepRefusedTokens, .campaignRequests, .outboxOldestDue, .staleWave,
            ])
        #expect(
            Set(gauges.totals.keys) == [
                .outboxRequests, .openCampaigns, .rejectedResults, .rejectedRegistrations, .failedSends,
                .attachedTables,
                .brokenAttachments,
            ])
        #expect(gauges.trouble?.sqlState == "42501" && gauges.trouble?.message.contains("tripped_guard") == true)
        try owner.execute("COMMIT")
        try database.psql("GRANT SELECT ON tokenkeeper.tripped_guard, tokenkeeper.daemon TO tokenkeeper_daemon")
        #expect(try look(database).trouble == nil)
    }

    @Test func `a topic that is called other shares its label with the rest`() throws {
        let database = try TestCluster.shared.database()
        labels.take(["other"])
        try topics(database)
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'other');
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            SELECT topic_id, true, 'active', 10 FROM tokenkeeper.topic WHERE environment = 'production'
            """)
        #expect(
            lines(.tokens, try look(database))?.sorted() == [
                "production other active 30", "production t active 10", "production u active 10",
            ])
    }
}
