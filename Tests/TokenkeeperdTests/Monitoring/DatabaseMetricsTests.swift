import APNsFeedback
import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `Metrics of the database` {
    private static let production = #"environment="production",topic="#

    @Test func `a look is told until it is too old`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        let metrics = DatabaseMetrics()
        func page(_ now: ContinuousClock.Instant) -> MetricsPage {
            var text = MetricsText()
            metrics.add(to: &text, at: now)
            return MetricsPage(text.text)
        }
        let now = ContinuousClock.now
        #expect(page(now).text == "")
        metrics.take(try DatabaseGauges(TopicLabels(), on: &daemon), until: now + .seconds(15))
        #expect(page(now + .seconds(14))["database_live_daemons"] == "0")
        #expect(page(now + .seconds(15)).text == "")
    }

    /// Every gauge has a value for each topic in both environments, and every result another status and reason.
    @Test func `with ten thousand topics at their worst, the whole page stays under a megabyte`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic (environment, topic)
            SELECT e, rpad('com.example.app' || i, \(TopicLabels.mostBytes / TopicLabels.most), 'x')
            FROM generate_series(1, 10000) AS i, unnest('{production,sandbox}'::text[]) AS e;
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            SELECT topic_id, true, s, 12345678
            FROM tokenkeeper.topic, unnest('{active,stale,suspect,superseded,unregistered_by_app,dormant}'::text[]) AS s;
            INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, tokens, max_tokens) SELECT topic_id, 'suspect', 1, 1 FROM tokenkeeper.topic;
            INSERT INTO tokenkeeper.paused_topic (environment, topic, reason) SELECT environment, topic, 'r' FROM tokenkeeper.topic;
            INSERT INTO tokenkeeper.stale_wave (topic_id, since, tokens, active, undo)
            SELECT topic_id, now(), 1, 1, 'undo' FROM tokenkeeper.topic;
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
            SELECT tokenkeeper.hour_of(now()), topic_id, 'stale', 1234567 FROM tokenkeeper.topic;
            INSERT INTO tokenkeeper.campaign (environment, topic, state, payload, push_type, audience_kind, content_hash, addressed)
            SELECT environment, topic, 'paused', '{}', 'alert', 'everyone', '', 12345678 FROM tokenkeeper.topic;
            INSERT INTO tokenkeeper.sweep_run (trigger, outcome, finished_at) VALUES ('timer', 'finished', now());
            INSERT INTO tokenkeeper.sweep_topic (run_id, environment, topic, cause, tokens, refused)
            SELECT r.run_id, t.environment, t.topic, 'stale', 12345678, true FROM tokenkeeper.sweep_run AS r, tokenkeeper.topic AS t;
            ANALYZE tokenkeeper.topic, tokenkeeper.token_count, tokenkeeper.suppression_count
            """)
        var daemon = try database.connect(user: "a_daemon")
        let labels = TopicLabels()
        try labels.refresh(on: &daemon)
        let topics = labels.names
        let metrics = ProcessMetrics(topicLabels: labels)
        // This is about the size of the page. On a loaded machine, a look may take longer than a daemon allows it.
        let gauges = try DatabaseGauges(labels, timeLimit: .seconds(600), on: &daemon)
        #expect(TopicGauge.allCases.allSatisfy { gauges.byTopic[$0] != nil })
        metrics.database.take(gauges, until: .now + .seconds(600))
        for environment in ["production", "sandbox"] {
            for status in Interpretation.statuses {
                for reason in Interpretation.reasons {
                    metrics.add(
                        topics.map {
                            let kind = ResultKind(environment: environment, topic: $0, status: status, reason: reason)
                            return ResultCount(kind: kind, results: 12_345_678)
                        }, took: .zero)
                }
            }
        }
        let text = metrics.text(ServiceState(), sweepInterval: nil)
        let page = MetricsPage(text)
        for gauge in TopicGauge.allCases where gauge != .outboxOldestDue {
            // Of the topics without a label, the rest of each environment.
            #expect(page.samples("database_\(gauge.rawValue)").count >= 2 * (TopicLabels.most + 1), "\(gauge)")
        }
        // Paused topics have no oldest request.
        let outbox = 2 * (TopicLabels.most + 1) * (TopicLabels.mostBytes / TopicLabels.most + 130)
        #expect(text.utf8.count + outbox < 1_000_000, "\(text.utf8.count) + \(outbox) bytes")
    }

    @Test func `a critical warning has the whole name of its topic and the words of status, but no device token`()
        throws
    {
        let database = try TestCluster.shared.database()
        let token = String(repeating: "0123abcd", count: 8)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at)
            SELECT t, 'aa', '{}', clock_timestamp() - interval '1 hour' FROM unnest('{com.example.nobody,x\(token)}'::text[]) AS t
            """)
        let metrics = ProcessMetrics(topicLabels: nil)
        var daemon = try database.connect(user: "a_daemon")
        metrics.database.take(try DatabaseGauges(TopicLabels(), on: &daemon), until: .now + .seconds(600))
        let page = metrics.text(ServiceState(), sweepInterval: nil)
        #expect(
            !page.contains(token) && page.contains("topic=\"x0123abcd…\",warning=\"requests of x0123abcd… (production)")
        )
        #expect(
            page.contains(
                #"critical{cause="requests_wait",environment="production",topic="com.example.nobody",warning="requests of com"#
            ))
        #expect(page.contains("process_resident_memory_bytes ") && page.contains("process_open_fds "))
    }

    /// The real daemon, real PostgreSQL.
    @Test func `a daemon exports what the database knows, whoever has counted it, and nothing once PostgreSQL is away`()
        throws
    {
        let cluster = try TestCluster.prepared()
        defer { cluster.stop() }
        let database = try cluster.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't') FROM unnest('{aa,bb}'::text[]) AS x;
            SELECT tokenkeeper.register('aa', E'a"b\\\\cd');
            INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, tokens, max_tokens) SELECT topic_id, 'suspect', 1, 1 FROM tokenkeeper.topic WHERE topic = 't';
            SELECT tokenkeeper.pause_sending(E'a"b\\\\cd');
            INSERT INTO tokenkeeper.paused_topic (environment, topic, reason) VALUES ('production', 'unknown', '');
            INSERT INTO tokenkeeper.failed_send (error, request_id, queued_at, attempts) VALUES ('e', 1, now(), 1);
            INSERT INTO tokenkeeper.send_request (topic, token, payload, queued_at) VALUES ('t', 'aa', '{}', to_timestamp(1234))
            """)
        let ports = [try TestCluster.freePort(), try TestCluster.freePort()]
        let daemons = try ports.map {
            try DaemonProcess(database.url(), settings: ["metrics.listen=127.0.0.1:\($0)"])
        }
        for port in ports {
            func eventuallyIs(_ sample: String, _ value: String) throws {
                try eventually("\(sample) is \(value)") { MetricsPage(port: port)[sample] == value }
            }
            try eventuallyIs(#"database_tokens{\#(Self.production)"t",state="active"}"#, "2")
            try eventuallyIs(#"database_tokens{\#(Self.production)"a\"b\\cd",state="active"}"#, "1")
            try eventuallyIs("database_live_daemons", "2")
            let page = MetricsPage(port: port)
            #expect(page[#"database_guard_tripped{\#(Self.production)"t"}"#] == "1")
            #expect(page[#"database_guard_tripped{\#(Self.production)"a\"b\\cd"}"#] == "0")
            #expect(page[#"database_topic_paused{\#(Self.production)"a\"b\\cd"}"#] == "1")
            #expect(page[#"database_topic_paused{\#(Self.production)"t"}"#] == "0")
            #expect(page[#"database_topic_paused{\#(Self.production)"other"}"#] == "1")
            #expect(page[#"database_outbox_oldest_due_timestamp_seconds{\#(Self.production)"t"}"#] == "1234")
            #expect(page["database_outbox_requests"] == "1" && page["database_failed_sends"] == "1")
            #expect(page["database_held_results"] == "0" && page["database_rejected_results"] == "0")
            try eventually("it has swept") {
                let swept = Double(MetricsPage(port: port)["database_sweep_last_success_timestamp_seconds"] ?? "") ?? 0
                return abs(swept - Date.now.timeIntervalSince1970) < 3600
            }
        }
        cluster.stop()
        for port in ports {
            try eventually("the gauges are too old") { MetricsPage(port: port)["database_live_daemons"] == nil }
            #expect(MetricsPage(port: port).samples("database_tokens") == [])
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a daemon without an address for scrapes has no connection for them`() throws {
        let database = try TestCluster.shared.database()
        let look = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'a_daemon'"
        let silent = try DaemonProcess(database.url())
        try eventually("it runs") {
            try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run WHERE outcome = 'finished'") == "1"
        }
        #expect(try database.psql(look) == "2")
        #expect(silent.stop() == 0)
        let port = try TestCluster.freePort()
        let served = try DaemonProcess(database.url(), settings: ["metrics.listen=127.0.0.1:\(port)"])
        try eventually("it looks") { MetricsPage(port: port)["database_live_daemons"] == "1" }
        #expect(try database.psql(look) == "3")
        #expect(served.stop() == 0)
    }
}
