import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Labels of topics` {
    @Test func `a topic with a registered token or a policy has a label, and keeps it`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 'registered'), tokenkeeper.unregister('bb', 'never.registered');
            INSERT INTO tokenkeeper.topic (environment, topic) VALUES ('production', 'seen');
            INSERT INTO tokenkeeper.topic (environment, topic, gate) VALUES ('sandbox', 'with.a.policy', 'observe');
            """)
        var daemon = try database.connect(user: "a_daemon")
        let labels = TopicLabels()
        #expect(labels.label(of: "registered") == "other")
        try labels.refresh(on: &daemon)
        #expect(labels.label(of: "registered") == "registered")
        #expect(labels.label(of: "with.a.policy") == "with.a.policy")
        for topic in ["never.registered", "seen", "unknown", nil] { #expect(labels.label(of: topic) == "other") }

        try database.psql(
            "UPDATE tokenkeeper.topic_policy SET gate = NULL; INSERT INTO tokenkeeper.topic_policy (topic, gate) VALUES ('later', 'observe')"
        )
        try labels.refresh(on: &daemon)
        #expect(labels.label(of: "later") == "other", "it is not time for another look")
        try labels.refresh(on: &daemon, at: .now + .seconds(301))
        #expect(labels.label(of: "later") == "later")
        #expect(labels.label(of: "with.a.policy") == "with.a.policy")
    }

    @Test func `of ten thousand topics, the largest have labels`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic (environment, topic)
            SELECT e, 'com.example.app' || i FROM generate_series(1, 10000) AS i, unnest('{production,sandbox}'::text[]) AS e;
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            SELECT topic_id, true, 'active', replace(topic, 'com.example.app', '')::bigint FROM tokenkeeper.topic;
            """)
        var daemon = try database.connect(user: "a_daemon")
        let labels = TopicLabels()
        try labels.refresh(on: &daemon)
        let labelled = (1...10_000).filter { labels.label(of: "com.example.app\($0)") != "other" }
        #expect(labelled == Array((10_001 - TopicLabels.most)...10_000))
    }

    @Test func `a topic whose name is too long for the rest has no label`() {
        let labels = TopicLabels()
        let long = String(repeating: "x", count: 512)
        let topics = (0..<60).map { "\($0)\(long)" } + ["short"]
        labels.take(topics)
        let escaped = TopicLabels()
        escaped.take([String(repeating: "\n", count: TopicLabels.mostBytes / 2 + 1), "short"])
        #expect(escaped.names == ["short"], "a line break takes two bytes")
        #expect(labels.label(of: topics[0]) == topics[0])
        #expect(labels.label(of: topics[59]) == "other")
        #expect(labels.label(of: "short") == "short")
    }

    @Test func `a topic that may be a device token has no label`() {
        let labels = TopicLabels()
        let token = String(repeating: "0123456789ABCDEF", count: 4)
        labels.take([token, "com.example.\(token)", "com.example.DEADBEEF-0123-4567-89AB-CDEF01234567"])
        #expect(labels.names == ["com.example.DEADBEEF-0123-4567-89AB-CDEF01234567"])
    }
}
