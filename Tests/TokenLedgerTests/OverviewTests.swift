import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `What the status page shows of the database` {
    @Test func `while a table is locked against reading, the counts are unknown, and a warning says why`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        func look() throws -> Overview { try Overview(within: .seconds(5), on: &daemon) }
        #expect(try look()["rejected"] == 0)
        #expect(try look().tokens == [0, 0, 0, 0, 0])
        #expect(try look().status.asOf("rejected")?.hasSuffix(" UTC") == true)
        var owner = try database.connect()
        try owner.execute("BEGIN; LOCK TABLE tokenkeeper.token_count")
        let locked = try look()
        #expect(locked["rejected"] == nil && locked.tokens == [nil, nil, nil, nil, nil])
        #expect(
            locked.status.warnings.contains { $0.contains("tokenkeeper.token_count is locked") },
            "\(locked.status.warnings)")
        try owner.execute("COMMIT")
        #expect(try look()["rejected"] == 0)
    }

    private func count(_ database: TestDatabase, hours: ClosedRange<Int>, _ topic: String, stale: Int, of all: Int)
        throws
    {
        try database.psql(
            """
            INSERT INTO tokenkeeper.result_count (hour, environment, topic, status, reason, results)
            SELECT date_bin('1 hour', now(), '2000-01-01Z') - h * interval '1 hour', 'production', '\(topic)', s, NULL, n
            FROM generate_series(\(hours.lowerBound), \(hours.upperBound)) AS h, (VALUES (410, \(stale)), (200, \(all - stale))) AS v (s, n)
            """)
    }

    @Test func `a share of 410s is usual if most hours of the two weeks before the last day had one like it`() throws {
        let database = try TestCluster.shared.database()
        var daemon = try database.connect(user: "a_daemon")
        func usual(_ scope: ResultScope = .all) throws -> UsualShare {
            try UsualShare(of: scope, within: .seconds(5), on: &daemon)
        }
        #expect(try usual().band == nil && usual().since == nil)
        try count(database, hours: 25...47, "t", stale: 1, of: 100)
        #expect(try usual().band == nil && usual().since != nil, "23 hours are no day")
        try count(database, hours: 48...48, "t", stale: 1, of: 100)
        #expect(try usual().band == 0.01...0.01)
        // Today, and an hour with hardly any results, say nothing about what is usual.
        try count(database, hours: 0...24, "t", stale: 90, of: 100)
        try count(database, hours: 49...340, "t", stale: 1, of: 19)
        #expect(try usual().band == 0.01...0.01)
        try count(database, hours: 49...340, "u", stale: 50, of: 100)
        #expect(try usual().band?.upperBound ?? 0 > 0.4)
        #expect(try usual(.topic("t", environment: "production")).band == 0.01...0.01)
        #expect(try usual(.topic("t", environment: "sandbox")).band == nil)
    }

    @Test func `a topic has its tokens, its state, and those that return again and again`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 'a/b', registered_at => now() - interval '2 days') FROM unnest('{aabbccddee,bb,cc}'::text[]) AS t;
            SELECT tokenkeeper.register('dd', 'other');
            SELECT tokenkeeper.unregister('cc', 'a/b'), tokenkeeper.pause_sending('a/b', reason => 'a test');
            UPDATE tokenkeeper.topic_policy SET gate = 'observe', alerts_per_day = 3 WHERE topic = 'a/b';
            INSERT INTO tokenkeeper.token_event_log (at, topic_id, token_key, event)
            SELECT now() - n * interval '1 day', t.topic_id, decode(k, 'hex'), 'revived'
            FROM tokenkeeper.topic AS t, (VALUES ('aabbccddee', 4), ('bb', 2)) AS v (k, times), generate_series(1, times) AS n;
            """)
        try count(database, hours: 1...1, "a/b", stale: 1, of: 5)
        try count(database, hours: 1...1, "other", stale: 4, of: 5)
        var daemon = try database.connect(user: "a_daemon")
        let found = try TopicDetail.find("a/b", environment: "production", within: .seconds(5), on: &daemon)
        let topic = try #require(found)
        #expect(topic.tokens == [2, 0, 0, 0, 1] && topic.isObserved && topic.pause?.reason == "a test")
        #expect(topic.policy.map(\.name) == ["alerts_per_day", "gate"] && topic.policy.first?.value == "3")
        #expect(topic.stale.map(\.period) == ["hour", "day"])
        #expect(topic.hours.count == 25 && topic.hours[23].stale == 1 && topic.hours[23].accepted == 4)
        #expect(topic.usual?.since != nil)
        let returning = try #require(topic.returning)
        #expect(
            returning.map(\.digits) == ["aabbccdd"] && returning.first?.times == 4 && returning.first?.state == "active"
        )
        #expect(try TopicDetail.find("a/b", environment: "sandbox", within: .seconds(5), on: &daemon) == nil)
        #expect(
            try TopicDetail.names(like: "A/", 5, within: .seconds(5), on: &daemon).map(\.topic) == ["a/b"])
    }

    @Test func `campaigns that are being sent come first, then the newest that have not ended, or ended within a day`()
        throws
    {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 't');
            SELECT tokenkeeper.enqueue('{"aps":{}}', 't', everyone => true) FROM generate_series(1, 24);
            UPDATE tokenkeeper.campaign SET state = 'running' WHERE campaign_id IN (2, 4);
            UPDATE tokenkeeper.campaign SET state = 'ended', ended_at = now() - interval '1 hour' WHERE campaign_id = 23;
            UPDATE tokenkeeper.campaign SET state = 'ended', ended_at = now() - interval '2 days' WHERE campaign_id = 24;
            """)
        var daemon = try database.connect(user: "a_daemon")
        let numbers = try Overview(within: .seconds(5), on: &daemon).campaigns.map(\.number)
        #expect(numbers == [4, 2] + (3...23).reversed().filter { $0 > 4 }.prefix(18).map(Int64.init), "\(numbers)")
    }
}
