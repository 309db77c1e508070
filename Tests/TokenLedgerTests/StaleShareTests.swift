import APNsFeedback
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `The share of 410s` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// Tokens number 1 to `count` of a topic that has been known for this long.
    private func register(_ count: Int, topic: String = "t", known: String = "20 days") throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), $$\(topic)$$, registered_at => now() - interval '30 days'))
            FROM generate_series(1, \(count)) AS i;
            UPDATE tokenkeeper.topic SET first_seen = now() - interval '\(known)' WHERE topic = $$\(topic)$$
            """)
    }

    private func gone(_ first: Int, _ last: Int, topic: String = "t", ago: String = "0 s") throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, queued_at, body)
            SELECT $$\(topic)$$, lpad(to_hex(i), 8, '0'), 410, now() - interval '\(ago)',
                   '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now() - interval '\(ago)') * 1000)::bigint || '}'
            FROM generate_series(\(first), \(last)) AS i
            """)
    }

    private func drain() throws {
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
    }

    /// Counts tokens as if they had turned stale in this hour and had been counted since.
    private func turned(_ tokens: Int, hoursAgo: Int) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
            SELECT tokenkeeper.hour_of(now()) - interval '\(hoursAgo) hours', topic_id, 'stale', \(tokens) FROM tokenkeeper.topic WHERE topic = 't'
            """)
    }

    private func row(_ period: String, _ columns: String = "newly_stale, active, share, usual_share, is_wave") throws
        -> String
    {
        try database.psql(
            "SELECT \(columns) FROM tokenkeeper.stale_share WHERE period = '\(period)'", user: "a_reader")
    }

    @Test func `only active tokens that turn stale count, each once a day`() throws {
        try register(100)
        try database.psql(
            "SELECT count(*) FROM (SELECT tokenkeeper.unregister(lpad(to_hex(i), 8, '0'), 't') FROM generate_series(1, 10) AS i) AS u"
        )
        // 10 were suppressed already, 5 are unknown, and some are repeated, in this batch and in the next one.
        try gone(1, 30)
        try gone(11, 20)
        try gone(101, 105)
        try drain()
        try gone(1, 30)
        try drain()
        #expect(try row("hour", "newly_stale") == "20")
        // They come back and turn stale once more.
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(11, 20) AS i")
        try gone(11, 20)
        try drain()
        #expect(try database.psql("SELECT state FROM tokenkeeper.token WHERE token = '0000000b'") == "stale")
        #expect(try row("day", "newly_stale, history_days") == "20|14")
        #expect(try database.psql("SELECT sum(tokens) FROM tokenkeeper.suppression_count") == "20")
        var daemon = try database.connect(user: "a_daemon")
        _ = try StaleWave.noticeNew(on: &daemon)
        #expect(try database.psql("SELECT tokens FROM tokenkeeper.suppression_count") == "20", "added up")
    }

    @Test func `they count by when they were received`() throws {
        try register(100)
        try gone(1, 30, ago: "5 hours")
        try gone(31, 40, ago: "30 hours")
        try drain()
        #expect(try row("hour", "newly_stale") == "0")
        #expect(try row("day", "newly_stale") == "30")
    }

    /// Of 10,000 active tokens, this many turned stale within the hour; before that, so many in each hour of the past.
    @Test(
        arguments: [
            (days: 20, now: 101, before: [(Int, Int)](), wave: true),
            (days: 20, now: 100, before: [], wave: false),
            (days: 20, now: 101, before: [(30, 33)], wave: true),
            (days: 20, now: 101, before: [(30, 34)], wave: false),
            (days: 20, now: 101, before: [(15 * 24, 34)], wave: true),
            (days: 6, now: 501, before: [], wave: true),
            (days: 6, now: 500, before: [], wave: false),
        ])
    func `a wave is more than 1 percent and three times the highest hour, or 5 percent without history`(
        days: Int, now: Int, before: [(hoursAgo: Int, tokens: Int)], wave: Bool
    ) throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('01', 't');
            UPDATE tokenkeeper.topic SET first_seen = now() - interval '\(days) days';
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            VALUES (1, true, 'active', \(10_000 - now - 1)), (1, true, 'stale', \(now));
            """)
        try turned(now, hoursAgo: 0)
        for past in before { try turned(past.tokens, hoursAgo: past.hoursAgo) }
        #expect(try row("hour", "active, is_wave") == "10000|\(wave ? "t" : "f")")
    }

    /// With 10,000 topics, two weeks are four million rows: 17 seconds, on each look at the metrics.
    @Test func `the history of two weeks is read only for what needs it`() throws {
        let history = "16 days"
        let plan = { (columns: String) in
            try database.psql("EXPLAIN SELECT \(columns) FROM tokenkeeper.stale_share", user: "a_reader")
        }
        #expect(
            try !plan("environment, topic, period, since, newly_stale, active, share, wave_since, undo").contains(
                history))
        #expect(try plan("usual_share").contains(history), "so it would show above")
        // A topic of its own: by the index of the topic, and only if more than 50 have turned stale.
        try register(1)
        try turned(50, hoursAgo: 0)
        let analyzed = try database.psql(
            "SET enable_seqscan = off; EXPLAIN (ANALYZE, COSTS OFF) SELECT is_wave FROM tokenkeeper.stale_share")
        #expect(analyzed.contains("never executed") && analyzed.contains("suppression_count_topic"), "\(analyzed)")
    }

    @Test func `fifty tokens are never a wave`() throws {
        try register(60, known: "1 day")
        try gone(1, 50)
        try drain()
        #expect(try row("hour") == "50|60|0.833333|0.000000|f")
        try gone(51, 51)
        try drain()
        #expect(try row("hour", "newly_stale, is_wave") == "51|t")
    }

    @Test func `a slow wave shows in the day`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('01', 't');
            UPDATE tokenkeeper.topic SET first_seen = now() - interval '20 days';
            INSERT INTO tokenkeeper.token_count (topic_id, registered, state, tokens)
            VALUES (1, true, 'active', 10000 - 240 - 1), (1, true, 'stale', 240);
            """)
        for hour in 0..<24 { try turned(10, hoursAgo: hour) }
        // The highest day before this one had 79.
        for hour in 100..<124 { try turned(hour == 100 ? 10 : 3, hoursAgo: hour) }
        #expect(try row("hour", "is_wave") == "f")
        #expect(try row("day") == "240|10000|0.024000|0.007900|t")
        try turned(1, hoursAgo: 110)
        #expect(try row("day", "usual_share, is_wave") == "0.008000|f")
    }

    @Test func `a wave is noticed once, and is over when it is undone`() throws {
        let topic = "-t'est.it$s"
        try register(1000, topic: topic)
        try gone(1, 300, topic: topic)
        try drain()
        var one = try database.connect(user: "a_daemon")
        var other = try database.connect(user: "a_daemon")
        let waves = try StaleWave.noticeNew(on: &one)
        #expect(waves.map(\.topic) == [topic] && waves.map(\.tokens) == [300])
        #expect(try StaleWave.noticeNew(on: &other).isEmpty)
        #expect(try StaleWave.noticeNew(on: &one).isEmpty)
        let undo = try #require(waves.first?.undo)
        #expect(
            undo.hasPrefix(
                #"tokenkeeperd reinstate --cause stale --topic='-t'"'"'est.it$s' --environment production --since 20"#))
        let warnings = try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status", user: "a_reader")
        #expect(warnings.contains("300 of 1000 active tokens of \(topic) (production) have turned stale (30%)"))
        #expect(warnings.contains("`\(undo)`"))
        #expect(try row("day", "undo") == undo)
        try gone(301, 310, topic: topic)
        try drain()
        #expect(try StaleWave.noticeNew(on: &one).isEmpty)
        #expect(
            try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "310 of 1000 active tokens of \(topic) (production) have turned stale (31%)"))

        try database.psql(
            "SELECT tokenkeeper.reinstate($$\(topic)$$, 'production', w.since, w.since + interval '1 day', 'stale') FROM tokenkeeper.stale_wave AS w"
        )
        try TokenLedgerTests.undo(&one)
        #expect(try StaleWave.noticeNew(on: &one).isEmpty)
        #expect(try row("hour", "newly_stale, is_wave, undo") == "0|f|")
        #expect(!(try database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains("turned stale")))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.sendable_token") == "1000")
    }

    @Test func `beyond the share that the guard allows, 410s are held, released and discarded`() throws {
        try register(1000)
        var daemon = try database.connect(user: "a_daemon")
        func drain() -> Drain {
            Drain(
                lockTimeout: .milliseconds(50),
                guardLimits: GuardLimits(allowance: 5, maxShare: .percent(1), holdStaleShare: .percent(10)),
                interpret: Interpretation.verdict(on:))
        }
        func stale() throws -> String {
            try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token WHERE state = 'stale'")
        }
        try gone(1, 100)
        #expect(try drainAll(&daemon, drain: drain()).recorded == 100, "a tenth")
        try gone(101, 200)
        // These turn no active token stale.
        try gone(1, 50)
        try gone(1001, 1010)
        let second = try drainAll(&daemon, drain: drain())
        #expect(second.held == 100 && second.recorded == 60)
        try gone(201, 202)
        #expect(try drainAll(&daemon, drain: drain()).held == 2, "with those of that day that are held")
        #expect(
            try database.psql("SELECT DISTINCT cause, reason FROM tokenkeeper.held_result", user: "a_reader")
                == "stale|Unregistered")
        #expect(try stale() == "110")
        #expect(
            try database.psql("SELECT cause, tripped, tokens, active, max_tokens FROM tokenkeeper.guard")
                == "stale|t|200|900|90",
            "of 100 that were recorded and 100 more")
        #expect(try database.psql("SELECT tokenkeeper.release_held('t')", user: "a_operator") == "102")
        #expect(try drainAll(&daemon, drain: drain()).recorded == 102, "what is released is not held again")
        #expect(try stale() == "212")
        #expect(
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 410") == "262",
            "each is counted once")
        // They are true, so what follows counts from nothing.
        try gone(301, 310)
        #expect(try drainAll(&daemon, drain: drain()).recorded == 10)
        try gone(401, 500)
        #expect(try drainAll(&daemon, drain: drain()).held == 100)
        // The wave was days ago. What is still held must not hold all that follows, day after day.
        try database.psql(
            """
            UPDATE tokenkeeper.suppression_count SET hour = hour - interval '2 days';
            UPDATE tokenkeeper.held_result SET queued_at = queued_at - interval '2 days'
            """)
        try gone(501, 502)
        #expect(try drainAll(&daemon, drain: drain()).recorded == 2)
        #expect(try database.psql("SELECT tokenkeeper.discard_held('t')", user: "a_operator") == "100")
        #expect(try stale() == "224")
    }
}
