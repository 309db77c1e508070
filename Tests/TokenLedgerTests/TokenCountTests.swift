import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Counting tokens` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func register(_ first: Int, _ last: Int, topic: String = "t", environment: String = "production") throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), '\(topic)', '\(environment)', registered_at => '2025-01-01Z'))
            FROM generate_series(\(first), \(last)) AS i
            """)
    }

    private func topic(_ name: String) throws -> Int32 {
        try #require(
            Int32(
                try database.psql(
                    "SELECT topic_id FROM tokenkeeper.topic WHERE topic = '\(name)' AND environment = 'production'")))
    }

    private static let counts =
        "SELECT string_agg(state || ' ' || tokens, ', ' ORDER BY state) FROM tokenkeeper.token_count"

    @Test func `another daemon continues an interrupted count, and each token counts once`() throws {
        try register(1, 10)
        let topic = try topic("t")
        var daemon = try database.connect(user: "a_daemon")
        var first = TokenCount(slice: 3)
        #expect(try first.count(topic, on: &daemon, stop: Wakeup()))
        #expect(try first.count(topic, on: &daemon, stop: Wakeup()))
        #expect(try database.psql(Self.counts) == "", "a partial count is not shown")
        #expect(try database.psql("SELECT sum(tokens) FROM tokenkeeper.token_count_part") == "6")
        // Some of the counted tokens change, and some of the uncounted ones are deleted.
        try database.psql(
            "SELECT tokenkeeper.unregister('00000002', 't'); DELETE FROM tokenkeeper.ledger WHERE token_key = '\\x0000000a'"
        )
        var other = try database.connect(user: "a_daemon")
        var second = TokenCount(slice: 3)
        for _ in 1...2 { try second.count(topic, on: &other, stop: Wakeup()) }
        #expect(try database.psql(Self.counts) == "active 9")
        #expect(
            try database.psql(
                "SELECT begun_at IS NULL, counted, (SELECT count(*) FROM tokenkeeper.token_count_part) FROM tokenkeeper.token_count_progress"
            )
                == "t|9|0")
        for _ in 1...4 { try second.count(topic, on: &other, stop: Wakeup()) }
        #expect(try database.psql(Self.counts) == "active 8, unregistered_by_app 1", "the next count shows it")
    }

    @Test func `two daemons do not count the same topic at once`() throws {
        try register(1, 10)
        let topic = try topic("t")
        var daemon = try database.connect(user: "a_daemon")
        var count = TokenCount(slice: 3)
        try count.count(topic, on: &daemon, stop: Wakeup())
        var other = try database.connect(user: "a_daemon")
        try other.execute("BEGIN; SELECT FROM tokenkeeper.token_count_progress FOR UPDATE")
        #expect(try !count.count(topic, on: &daemon, stop: Wakeup()))
        try other.execute("ROLLBACK")
        #expect(try count.count(topic, on: &daemon, stop: Wakeup()))
    }

    @Test func `a topic that vanishes in the middle leaves nothing behind`() throws {
        try register(1, 10)
        let topic = try topic("t")
        var daemon = try database.connect(user: "a_daemon")
        var count = TokenCount(slice: 3)
        try count.count(topic, on: &daemon, stop: Wakeup())
        try database.psql("DELETE FROM tokenkeeper.ledger; DELETE FROM tokenkeeper.topic")
        var later = TokenCount(.production)
        try later.refresh(on: &daemon, stop: Wakeup())
        #expect(
            try database.psql(
                """
                SELECT (SELECT count(*) FROM tokenkeeper.token_count_progress) + (SELECT count(*) FROM tokenkeeper.token_count_part)
                     + (SELECT count(*) FROM tokenkeeper.token_count)
                """) == "0")
    }

    @Test func `a small topic does not wait for a large one, nor a large one for many small ones`() throws {
        try register(1, 100, topic: "large")
        for n in 1...20 { try register(n, n, topic: "small\(n)") }
        var daemon = try database.connect(user: "a_daemon")
        var count = TokenCount(slice: 10)
        let large = try topic("large")
        try count.count(large, on: &daemon, stop: Wakeup())
        let order = try count.due(on: &daemon).map(\.number)
        #expect(order.count == 21)
        #expect(order.first == large, "a started count continues; the second turn goes to a small topic")
        for small in order.dropFirst() { try count.count(small, on: &daemon, stop: Wakeup()) }
        // All topics have been written since, and the small ones were counted last.
        try database.psql("UPDATE tokenkeeper.token_count_progress SET counted_at = counted_at - interval '1 minute'")
        try count.refresh(on: &daemon, stop: Wakeup())
        #expect(
            try database.psql("SELECT tokens FROM tokenkeeper.token_count WHERE topic_id = \(large)") == "100")
    }

    @Test func `of two due topics, the one with the older count comes first, whatever it costs`() throws {
        try register(1, 3000, topic: "large")
        try register(1, 1, topic: "small")
        var daemon = try database.connect(user: "a_daemon")
        var first = TokenCount(.production)
        try first.refresh(on: &daemon, stop: Wakeup())
        try database.psql(
            """
            UPDATE tokenkeeper.token_count_progress SET counted_at = clock_timestamp() - CASE counted WHEN 1 THEN interval '2 hours' ELSE interval '3 hours' END
            """)
        try register(3001, 3001, topic: "large")
        let later = TokenCount(slice: 10, writtenAt: try daemon.query("SELECT clock_timestamp()").value())
        #expect(try later.due(on: &daemon).map(\.number) == [try topic("large"), try topic("small")])
    }
}
