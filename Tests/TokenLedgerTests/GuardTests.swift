import APNsFeedback
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

@Suite(.ownThread) struct `The mass-failure guard` {
    let database: TestDatabase
    private let limits = GuardLimits(allowance: 50, maxShare: Share(millionths: 5_000))

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func makeDrain(_ limits: GuardLimits? = nil) -> Drain {
        Drain(
            lockTimeout: .milliseconds(50), guardLimits: limits ?? self.limits,
            interpret: Interpretation.verdict(on:))
    }

    /// Tokens number `first` to `last`, eight digits each.
    private func register(_ first: Int, _ last: Int, topic: String = "t") throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), '\(topic)', registered_at => now() - interval '30 days'))
            FROM generate_series(\(first), \(last)) AS i
            """)
    }

    /// BadDeviceToken for each of these tokens, queued this long ago.
    private func fail(_ first: Int, _ last: Int, topic: String = "t", ago: String = "1 minute") throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, queued_at)
            SELECT '\(topic)', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}',
                   now() - interval '\(ago)' - interval '1 second', now() - interval '\(ago)'
            FROM generate_series(\(first), \(last)) AS i
            """)
    }

    private func states() throws -> String {
        try database.psql(
            """
            SELECT (SELECT count(*) FROM tokenkeeper.token WHERE state = 'suspect'),
                   (SELECT count(DISTINCT token_key) FROM tokenkeeper.held_result)
            """)
    }

    private var isOpen: String { "SELECT coalesce(bool_or(tripped), false) FROM tokenkeeper.guard" }

    @Test func `fifty suspects a day are recorded, and a batch beyond the limit is held`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 50)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 50)
        #expect(try states() == "50|0")
        #expect(try database.psql(isOpen) == "f")
        try fail(51, 51)
        #expect(try drainAll(&daemon, drain: makeDrain()).held == 1)
        #expect(try states() == "50|1")
        #expect(
            try database.psql(
                "SELECT tripped, tokens, max_tokens, undo LIKE 'tokenkeeperd reinstate --topic t --environment production --since 20%Z' FROM tokenkeeper.guard"
            ) == "t|51|50|t")
        #expect(
            try database.psql("SELECT operation, topic, environment, rows, done_by FROM tokenkeeper.operation")
                == "guard_tripped|t|production|51|a_daemon")
        #expect(
            try database.psql(
                "SELECT status, reason, sum(results) FROM tokenkeeper.result_stat GROUP BY 1, 2")
                == "400|BadDeviceToken|51",
            "what is held is counted when it is taken from the queue")
    }

    @Test func `in a large topic the share counts`() throws {
        try register(1, 20_000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 100)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 100, "0.5 % of 20,000")
        try fail(101, 102)
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "100|2")
    }

    @Test func `a token counts once, however often it fails, even after it was revived`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        for _ in 1...5 {
            try fail(1, 40)
            try drainAll(&daemon, drain: makeDrain())
            try database.psql(
                "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 40) AS i")
        }
        #expect(try database.psql("SELECT tripped, tokens FROM tokenkeeper.guard") == "f|40")
        // Held suspects, too: ten more tokens, a hundred times.
        try fail(41, 60)
        try drainAll(&daemon, drain: makeDrain())
        for _ in 1...5 {
            try fail(41, 60)
            try drainAll(&daemon, drain: makeDrain())
        }
        #expect(try database.psql("SELECT tripped, tokens FROM tokenkeeper.guard") == "t|60", "when it tripped")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.suppressed_in_a_day(1, 'suspect', ARRAY[tokenkeeper.hour_of(now())], '{0}', 1000), count(*) FROM tokenkeeper.held_result"
            ) == "60|120")
    }

    @Test func `a suspect that suppresses nothing is not held: already suppressed, or registered since`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            "SELECT count(*) FROM (SELECT tokenkeeper.unregister(lpad(to_hex(i), 8, '0'), 't') FROM generate_series(1, 300) AS i) AS u"
        )
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(301, 600) AS i")
        try fail(1, 600)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 600)
        #expect(try database.psql(isOpen) == "f")
    }

    @Test func `genuine 410s are never held, and count before a suspect of the same batch`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410,
                   '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM now()) * 1000)::bigint || '}', now()
            FROM generate_series(1, 400) AS i
            """)
        try fail(1, 400)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 800)
        #expect(
            try database.psql("SELECT state, count(*) FROM tokenkeeper.suppressed_token GROUP BY 1") == "stale|400")
    }

    @Test func `it holds suspects that arrive slowly and in any order`() throws {
        try register(1, 30_000)
        var daemon = try database.connect(user: "a_daemon")
        // 100 every ten minutes for four hours, the latest first, each recorded before the next is queued.
        for slot in 0..<24 {
            try fail(slot * 100 + 1, slot * 100 + 100, ago: "\(slot * 10) minutes")
            try drainAll(&daemon, drain: makeDrain())
        }
        let (suspects, held) = try parts(try states())
        #expect(suspects <= 150 && suspects + held == 24 * 100, "0.5 % of 30,000 is 150")
    }

    @Test func `two days that are each within the limit are recorded`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 45, ago: "2 days")
        try fail(46, 90, ago: "10 minutes")
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 90)
        // A day that spans both would be over the limit.
        try fail(91, 96, ago: "30 hours")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "90|6")
    }

    private func parts(_ text: String) throws -> (Int, Int) {
        let numbers = text.split(separator: "|").compactMap { Int($0) }
        return (try #require(numbers.first), try #require(numbers.last))
    }

    @Test func `when the count has halved, suspects are recorded again, and held ones stay held`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60, ago: "3 days")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "0|60")
        // 30 are more than half of 50: still held, although 30 alone would not have tripped the guard.
        try fail(101, 130, ago: "40 hours")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "0|90")
        try fail(201, 225, ago: "1 minute")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "25|90")
        #expect(
            try database.psql("SELECT operation FROM tokenkeeper.operation ORDER BY operation_id")
                == "guard_tripped\nguard_reset")
    }

    @Test func `it resets when no suspects arrive`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60, ago: "3 days")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).isEmpty, "ten minutes have not passed")
        try database.psql("UPDATE tokenkeeper.tripped_guard SET held_at = now() - interval '11 minutes'")
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).map(\.topic) == ["t"])
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).isEmpty)
        #expect(try states() == "0|60")
        try fail(101, 160, ago: "1 hour")
        try drainAll(&daemon, drain: makeDrain())
        try database.psql("UPDATE tokenkeeper.tripped_guard SET held_at = now() - interval '11 minutes'")
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).isEmpty, "it was within this day")
    }

    @Test func `a topic's policy overrides the limits`() throws {
        try register(1, 1000)
        try register(1, 1000, topic: "u")
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            UPDATE tokenkeeper.topic_policy SET guard_max_share = 0.2 WHERE topic = 't';
            UPDATE tokenkeeper.topic_policy SET guard_allowance = 3 WHERE topic = 'u';
            """, user: "a_operator")
        try fail(1, 200)
        try fail(1, 6, topic: "u")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "200|6")
        try database.psql("UPDATE tokenkeeper.topic_policy SET guard_max_share = 1 WHERE topic = 'u'")
        try fail(1, 100, topic: "u")
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "300|6", "1 turns it off")
        #expect(
            try database.psql(
                "SELECT message FROM tokenkeeper.operation WHERE operation = 'policy_changed' AND topic = 't' ORDER BY 1"
            )
                == "guard_max_share is 0.2, was the default")
    }

    @Test func `a tripped guard follows its policy, and resets`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        for change in ["guard_max_share = 1", "guard_allowance = 1000, guard_max_share = NULL"] {
            try database.psql("UPDATE tokenkeeper.topic_policy SET guard_max_share = 0, guard_allowance = 0")
            try fail(1, 20)
            try drainAll(&daemon, drain: makeDrain())
            #expect(try database.psql(isOpen) == "t")
            try database.psql("UPDATE tokenkeeper.topic_policy SET \(change)", user: "a_operator")
            #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).map(\.topic) == ["t"])
        }
        try database.psql("UPDATE tokenkeeper.topic_policy SET guard_max_share = 0, guard_allowance = 0")
        try fail(21, 22)
        try drainAll(&daemon, drain: makeDrain())
        try database.psql("UPDATE tokenkeeper.topic_policy SET guard_max_share = 1", user: "a_operator")
        try fail(23, 24)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 2)
        #expect(try database.psql(isOpen) == "f", "also on the next suspect")
    }

    @Test func `a suspect that was sent long before does not extend the undo window`() throws {
        try register(1, 1000)
        try database.psql("SELECT tokenkeeper.register('aa', 't', registered_at => '2015-01-01Z')")
        try database.psql("SELECT tokenkeeper.register('bb', 't', registered_at => '2015-01-01Z')")
        var daemon = try database.connect(user: "a_daemon")
        // One before, one among the others. One statement queues them, so that they are in one batch.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            VALUES ('t', 'aa', 400, '{"reason":"BadDeviceToken"}', '2016-01-01Z')
            """)
        try drainAll(&daemon, drain: makeDrain())
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at)
            SELECT 't', CASE i WHEN 0 THEN 'bb' ELSE lpad(to_hex(i), 8, '0') END, 400, '{"reason":"BadDeviceToken"}',
                   CASE i WHEN 0 THEN '2016-01-01Z' ELSE now() END
            FROM generate_series(0, 60) AS i
            """)
        try drainAll(&daemon, drain: makeDrain())
        #expect(
            try database.psql("SELECT undo_since > now() - interval '1 hour', undo IS NOT NULL FROM tokenkeeper.guard")
                == "t|t")
        // Once undone, it is not offered again.
        try database.psql("SELECT tokenkeeper.reinstate('t', 'production', undo_since, now()) FROM tokenkeeper.guard")
        #expect(try database.psql("SELECT tripped, undo FROM tokenkeeper.guard") == "t|")
    }

    @Test func `discarded results never count; released results count and are not held again`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60)
        try drainAll(&daemon, drain: makeDrain())
        #expect(try database.psql("SELECT tokenkeeper.discard_held('t', 'production')", user: "a_operator") == "60")
        #expect(try states() == "0|0")
        try fail(1, 60)
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "0|60", "the guard is still tripped: the sender has not been fixed")
        #expect(try database.psql("SELECT tokenkeeper.release_held('t', 'production')", user: "a_operator") == "60")
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 60)
        #expect(try states() == "60|0")
        #expect(
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 400") == "120",
            "counted once each, when they came")
        try fail(61, 100)
        try drainAll(&daemon, drain: makeDrain())
        #expect(try states() == "100|0", "the count starts again")
    }

    @Test func `suspects and 410s of hundreds of topics are all recorded`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.topic (environment, topic) SELECT 'production', 't' || n FROM generate_series(1, 800) AS n;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't' || n, lpad(to_hex(n * 3 + i), 8, '0'), 400, '{"reason":"BadDeviceToken"}'
            FROM generate_series(1, 800) AS n, generate_series(0, 2) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't' || n, lpad(to_hex(n * 3), 10, '0'), 410, \(goneBody) FROM generate_series(1, 800, 8) AS n;
            """)
        #expect(try drainAll(&daemon, drain: makeDrain()).recorded == 2500)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(
            try database.psql("SELECT count(*), max(tokens), min(tokens) FROM tokenkeeper.guard") == "800|3|3")
    }

    @Test func `a guard that trips for one topic of a batch holds nothing of another`() throws {
        try register(1, 1000)
        try register(1, 1000, topic: "u")
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60)
        try fail(1, 40, topic: "u")
        let pass = try drainAll(&daemon, drain: makeDrain())
        #expect(pass.held == 60 && pass.recorded == 40)
        #expect(try database.psql("SELECT topic, tripped FROM tokenkeeper.guard ORDER BY topic") == "t|t\nu|f")
    }

    @Test func `the limit is a share of the tokens that are active at that moment`() throws {
        let limits = GuardLimits(allowance: 5, maxShare: .percent(10))
        try register(1, 100)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 10)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).recorded == 10, "10 % of 100")
        try fail(11, 11)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).held == 1, "11 are more than 10 % of 90")
        try register(101, 200)
        try database.psql("SELECT tokenkeeper.release_held('t', 'production')", user: "a_operator")
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).recorded == 1)
        try database.psql("TRUNCATE tokenkeeper.tripped_guard")
        try fail(12, 18)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).recorded == 7, "18 are less than 10 % of 189")
    }

    @Test func `tokens that were never registered are not active`() throws {
        try register(1, 100)
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            SELECT count(tokenkeeper.unregister(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 200) AS i;
            INSERT INTO tokenkeeper.registration (topic, token, returned, registered_at)
            SELECT 't', lpad(to_hex(i), 8, '0'), true, NULL FROM generate_series(101, 200) AS i
            """)
        try drainAll(&daemon)
        #expect(
            try database.psql(
                "SELECT registered, state, sum(tokens) FROM tokenkeeper.token_count GROUP BY 1, 2 HAVING sum(tokens) <> 0 ORDER BY 1"
            )
                == "f|active|100\nt|unregistered_by_app|100")
        try fail(101, 110)
        #expect(
            try drainAll(&daemon, drain: makeDrain(GuardLimits(allowance: 5, maxShare: .percent(50)))).held == 10,
            "half of none")
    }

    @Test func `daemons that judge at once may each record up to the limit, and then the guard trips`() throws {
        try register(1, 1000)
        var first = try database.connect(user: "a_daemon")
        var second = try database.connect(user: "a_daemon")
        func judge(_ numbers: ClosedRange<Int>) -> String {
            """
            SELECT cardinality(held) FROM tokenkeeper.record(ARRAY(
                SELECT tokenkeeper.invalidation_of(i, (SELECT t.topic_id FROM tokenkeeper.topic AS t), decode(lpad(to_hex(i), 8, '0'), 'hex'), 'suspect',
                    clock_timestamp(), 'BadDeviceToken', clock_timestamp()) FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS i), 50, 0.005, NULL)
            """
        }
        // Neither waits for the other.
        try first.execute("BEGIN; SET lock_timeout = '10ms'")
        try second.execute("BEGIN; SET lock_timeout = '10ms'")
        #expect(try first.scalar(judge(1...50)) == "0")
        #expect(try second.scalar(judge(51...100)) == "0")
        try first.execute("COMMIT")
        try second.execute("COMMIT")
        #expect(try first.scalar(judge(101...101)) == "1")
        // Two that trip it at once.
        try database.psql("DELETE FROM tokenkeeper.tripped_guard")
        try first.execute("BEGIN")
        #expect(try first.scalar(judge(102...102)) == "1")
        #expect(try second.scalar(judge(103...103)) == "1")
        try first.execute("COMMIT")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.tripped_guard") == "1")
    }

    @Test func `the undo begins with the first that was received, and another window leaves it`() throws {
        try register(1, 100)
        var daemon = try database.connect(user: "a_daemon")
        // Of each token two in one batch, the later one first.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at, queued_at)
            SELECT 't', lpad(to_hex(i), 8, '0'), 400, '{"reason":"BadDeviceToken"}', now() - interval '3 hours', now() - n * interval '1 hour'
            FROM generate_series(1, 5) AS i, generate_series(1, 2) AS n
            """)
        let limits = GuardLimits(allowance: 5, maxShare: .percent(0))
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).recorded == 10)
        try fail(6, 9)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).held == 4)
        let since =
            "SELECT now() - undo_since BETWEEN '119 minutes' AND '121 minutes' FROM tokenkeeper.guard WHERE tripped"
        #expect(try database.psql(since) == "t")
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', now() - interval '9 days', now() - interval '8 days')")
        #expect(try database.psql(since) == "t", "that window has nothing of it")
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', undo_since, now()) FROM tokenkeeper.guard WHERE tripped")
        #expect(try database.psql("SELECT undo_since IS NULL FROM tokenkeeper.guard WHERE tripped") == "t")
        try undo(&daemon)
        #expect(try states() == "0|4")
    }

    @Test func `a result that comes late resets nothing`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60)
        try drainAll(&daemon, drain: makeDrain())
        try fail(61, 61, ago: "80 hours")
        #expect(try drainAll(&daemon, drain: makeDrain()).held == 1)
        #expect(try database.psql(isOpen) == "t")
    }

    @Test func `held results are deleted unrecorded after thirty days`() throws {
        try register(1, 1000)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 60)
        try drainAll(&daemon, drain: makeDrain())
        try database.psql(
            "UPDATE tokenkeeper.held_result SET held_at = now() - interval '31 days' WHERE held_id % 2 = 0")
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 0,
            maxShare: .percent(10), batch: 7)
        let lease = try #require(try SweepLease.claim(.new(.cli, dryRun: false), holder: "d", on: &daemon))
        #expect(try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }.deletedHeld == 30)
        #expect(try states() == "0|30")
    }
}
