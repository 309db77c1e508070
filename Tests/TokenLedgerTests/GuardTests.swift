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

    /// For sessions that begin later: `deadlock_timeout` is one second, PostgreSQL's default.
    private func useOneSecondForDeadlocks() throws {
        try database.psql("ALTER DATABASE \(database.name) SET deadlock_timeout = '1s'", user: "postgres")
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
        #expect(try database.psql("SELECT sum(tokens) FROM tokenkeeper.topic_guard_count") == "40")
        #expect(try database.psql(isOpen) == "f")
        // Held suspects, too: ten more tokens, a hundred times.
        try fail(41, 60)
        try drainAll(&daemon, drain: makeDrain())
        for _ in 1...5 {
            try fail(41, 60)
            try drainAll(&daemon, drain: makeDrain())
        }
        #expect(try database.psql("SELECT sum(tokens) FROM tokenkeeper.topic_guard_count") == "60")
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
        try database.psql("UPDATE tokenkeeper.topic_guard SET touched_at = now() - interval '11 minutes'")
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).map(\.topic) == ["t"])
        #expect(try MassFailureGuard.resetQuiet(limits, on: &daemon).isEmpty)
        #expect(try states() == "0|60")
        try fail(101, 160, ago: "1 hour")
        try drainAll(&daemon, drain: makeDrain())
        try database.psql("UPDATE tokenkeeper.topic_guard SET touched_at = now() - interval '11 minutes'")
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

    @Test func `an operator who locks the guard delays suspects and nothing else`() throws {
        try register(1, 10)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 1)
        try drainAll(&daemon, drain: makeDrain())
        var someone = try database.connect()
        try someone.execute("BEGIN; SELECT FROM tokenkeeper.topic_guard FOR UPDATE")
        try fail(2, 2)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '00000003', 410, \(goneBody)), ('u', '00000004', 410, \(goneBody))"
        )
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 2 && pass.putBack == 1)
        try someone.execute("COMMIT")
        #expect(try drainAll(&daemon, drain: self.makeDrain()).recorded == 1)
    }

    @Test func `new tokens do not wait for a slow guard decision`() throws {
        try useOneSecondForDeadlocks()
        try register(1, 10)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 1)
        try database.psql("SELECT tokenkeeper.register('aa', 'u')")
        try drainAll(&daemon, drain: makeDrain())
        var someone = try database.connect()
        try someone.execute("BEGIN; SELECT FROM tokenkeeper.topic_guard FOR UPDATE")
        try fail(2, 2)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('u', '00000004', 410, \(goneBody)), ('u', '00000005', 410, \(goneBody))"
        )
        // Longer than half of deadlock_timeout.
        var drain = Drain(
            lockTimeout: .milliseconds(700), guardLimits: limits, interpret: Interpretation.verdict(on:))
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 2, "the two 410s of tokens that nobody has registered")
        try someone.execute("COMMIT")
    }

    @Test func `a retried batch that has to wait as a whole is tried row by row`() throws {
        try useOneSecondForDeadlocks()
        try register(1, 10)
        var daemon = try database.connect(user: "a_daemon")
        try fail(1, 1)
        try drainAll(&daemon, drain: makeDrain())
        var someone = try database.connect()
        try someone.execute("BEGIN; SELECT FROM tokenkeeper.topic_guard FOR UPDATE")
        // A new topic, and in the same batch a suspect that delays it for longer than half of deadlock_timeout.
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result_retry (topic, token, status, body, partition_number) VALUES
                ('t', '00000002', 400, '{"reason":"BadDeviceToken"}', 8), ('new', '00000004', 410, \(goneBody), 8)
            """)
        var drain = Drain(
            lockTimeout: .milliseconds(700), guardLimits: limits, interpret: Interpretation.verdict(on:))
        #expect(try drain.onePass(on: &daemon).recorded == 1)
        #expect(try database.psql("SELECT state FROM tokenkeeper.token WHERE topic = 'new'") == "stale")
        try someone.execute("COMMIT")
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
            try database.psql("SELECT count(*), max(tokens), min(tokens) FROM tokenkeeper.topic_guard") == "800|3|3")
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

    /// A count of topic t that was begun this long ago.
    private func counted(_ state: String, _ tokens: Int, ago: String) throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.token_count (topic_id, state, tokens, counted_at)
            SELECT topic_id, '\(state)', \(tokens), clock_timestamp() - interval '\(ago)' FROM tokenkeeper.topic WHERE topic = 't'
            """)
    }

    @Test func `a count is trusted for a day`() throws {
        let limits = GuardLimits(allowance: 5, maxShare: .percent(10))
        try register(1, 100)
        var daemon = try database.connect(user: "a_daemon")
        try counted("active", 1000, ago: "23 hours")
        try fail(1, 50)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).recorded == 50, "10 % of 1000, as counted")
        try database.psql("UPDATE tokenkeeper.token_count SET counted_at = counted_at - interval '2 hours'")
        try fail(51, 52)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).held == 2, "10 % of 50, as there are")
    }

    @Test func `a topic that has been counted and has no active token is not counted again`() throws {
        try register(1, 100)
        var daemon = try database.connect(user: "a_daemon")
        try counted("suspect", 3_000_000, ago: "1 minute")
        try fail(1, 10)
        #expect(
            try drainAll(&daemon, drain: makeDrain(GuardLimits(allowance: 5, maxShare: .percent(50)))).held == 10,
            "half of none, as counted")
    }

    @Test func `the guard's own count is kept for ten minutes`() throws {
        let limits = GuardLimits(allowance: 5, maxShare: .percent(1))
        try register(1, 2000)
        var daemon = try database.connect(user: "a_daemon")
        let isKept = "SELECT active, active_as_of IS NOT NULL FROM tokenkeeper.topic_guard"
        try fail(1, 4)
        try drainAll(&daemon, drain: makeDrain(limits))
        #expect(try database.psql(isKept) == "2000|f", "each time it counts only this many")
        try database.psql(
            """
            INSERT INTO tokenkeeper.ledger (topic_id, token_key, registered_at)
            SELECT topic_id, sha256(i::text::bytea), now() FROM tokenkeeper.topic, generate_series(1, 40000) AS i
            """)
        try fail(5, 6)
        try drainAll(&daemon, drain: makeDrain(limits))
        #expect(try database.psql(isKept) == "29996|t", "and at most 30,000 of many")
        try database.psql("UPDATE tokenkeeper.topic_guard SET active = 0")
        try fail(7, 8)
        #expect(try drainAll(&daemon, drain: makeDrain(limits)).held == 2, "not counted again")
    }

    @Test func `two drains of one process take turns at the guard, and move nothing to the retry partition`() throws {
        try register(1, 8000)
        try fail(1, 8000)
        let database = database
        // However slow the machine is, the two wait for their turn here, and not for a lock of PostgreSQL.
        let (pair, failures) = (DrainPair(patience: .seconds(120)), Failures())
        let sum = Mutex(Drain.Pass())
        atOnce(2) { worker in
            do {
                var daemon = try database.connect(user: "a_daemon")
                let drain = Drain(
                    lockTimeout: .milliseconds(10), guardLimits: .off, role: worker == 1 ? .helper : .primary,
                    pair: pair, interpret: Interpretation.verdict(on:))
                let done = try drainAll(&daemon, drain: drain)
                sum.withLock { $0.add(done) }
            } catch {
                failures.add("\(worker): \(error)")
            }
        }
        #expect(failures.all == [])
        let pass = sum.withLock { $0 }
        #expect(pass.recorded == 8000 && pass.putBack == 0)
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
