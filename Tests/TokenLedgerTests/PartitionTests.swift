import APNsFeedback
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `The ring of partitions` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private static let death = #"'{"reason":"Unregistered","timestamp":1794000000123}'"#

    /// A partition that no sender writes to in the next minutes.
    private func past(_ ahead: Int = 4) throws -> Int {
        Int(try database.psql("SELECT (\(Partition.currentInSQL) + \(ahead)) % 8"))!
    }

    /// Queues results in a sealed partition: 200s, except that every fiftieth is a 410 of a token of its own.
    private func fill(_ partition: Int, _ results: Int, prefix: String = "") throws {
        // A vacuum would get in the way.
        try database.psql("ALTER TABLE tokenkeeper.send_result_\(partition) SET (autovacuum_enabled = off)")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
            SELECT 't', '\(prefix)' || lpad(to_hex(i), 8, '0'), CASE i % 50 WHEN 0 THEN 410 ELSE 200 END, \(Self.death), \(partition)
            FROM generate_series(1, \(results)) AS i
            """)
    }

    private func file(of partition: Int) throws -> String {
        try database.psql("SELECT pg_relation_filenode('tokenkeeper.send_result_\(partition)')")
    }

    private func makeDrain(truncates: Bool = true, role: Drain.Role = .primary, pair: DrainPair = DrainPair()) -> Drain
    {
        Drain(
            lockTimeout: .milliseconds(50), guardLimits: .off, truncates: truncates, role: role, pair: pair,
            interpret: Interpretation.verdict(on:))
    }

    @Test func `a sealed partition is read in bulk and truncated, and nothing is lost or counted twice`() throws {
        let partition = try past()
        try fill(partition, 20_000)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (environment, topic, token, status, body, partition_number) VALUES
                ('sandbox', 't', 'aa', 200, NULL, \(partition)), (NULL, NULL, NULL, 200, NULL, \(partition)),
                ('production', 't', 'no hex', 410, repeat('x', 3000000), \(partition)), (NULL, 't', 'aa', 403, NULL, \(partition)),
                (NULL, NULL, NULL, NULL, NULL, \(partition)), ('production', 't', '\(String(repeating: "aB", count: 40))', 410, NULL, \(partition))
            """)
        let before = try file(of: partition)
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.movedToBacklog == 404 && pass.accepted == 19_602)
        #expect(pass.recorded == 402 && pass.rejected == 2)
        #expect(try file(of: partition) != before, "truncated")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "20006")
        #expect(
            try database.psql(
                "SELECT environment, topic, results FROM tokenkeeper.result_stat WHERE status = 200 ORDER BY 3")
                == "production||1\nsandbox|t|1\nproduction|t|19600")
        #expect(
            try database.psql("SELECT length(body) FROM tokenkeeper.rejected_result WHERE token = 'no hex'")
                == "3000000")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "401")
    }

    @Test func `a writer with an open transaction delays neither the rest of its partition nor others`()
        throws
    {
        let (partition, other) = (try past(4), try past(5))
        try fill(partition, 5000)
        try fill(other, 5000, prefix: "cc")
        var sender = try database.connect()
        try sender.execute(
            "BEGIN; INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number) VALUES ('t', 'aabb', 410, \(Self.death), \(partition))"
        )
        let files = (try file(of: partition), try file(of: other))
        var daemon = try database.connect(user: "a_daemon")
        let pass = try drainAll(&daemon)
        #expect(pass.accepted == 9800 && pass.recorded == 200)
        #expect(try file(of: partition) == files.0, "not truncated while the writer uses it")
        #expect(try file(of: other) != files.1)
        try sender.execute("COMMIT")
        #expect(try drainAll(&daemon).recorded == 1)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token WHERE token = 'aabb'") == "1")
    }

    @Test func `without truncating, a sealed partition is drained in batches`() throws {
        let partition = try past()
        try fill(partition, 5000)
        let before = try file(of: partition)
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain(truncates: false)
        var sum = Drain.Pass()
        for _ in 1...3 { sum.add(try drain.onePass(on: &daemon)) }
        #expect(sum.accepted == 4900 && sum.recorded == 100 && sum.movedToBacklog == 0)
        #expect(try file(of: partition) == before)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
    }

    @Test func `a partition of mostly 410s is drained in batches, and truncated when it is empty`() throws {
        let partition = try past()
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(Self.death), \(partition) FROM generate_series(1, 5000) AS i
            """)
        let before = try file(of: partition)
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 5000 && pass.movedToBacklog == 0)
        try eventually("the partition is truncated") {
            _ = try drain.onePass(on: &daemon)
            return try file(of: partition) != before
        }
    }

    @Test func `the helper leaves bulk reads to the primary, and drains the rest`() throws {
        let (partition, deaths) = (try past(4), try past(5))
        try fill(partition, 5000)
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
            SELECT 't', 'dd' || lpad(to_hex(i), 8, '0'), 410, \(Self.death), \(deaths) FROM generate_series(1, 5000) AS i;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, \(Self.death));
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number) VALUES ('t', 'bb', 410, \(Self.death), 9)
            """)
        let files = (try file(of: partition), try file(of: deaths))
        var daemon = try database.connect(user: "a_daemon")
        #expect(try drainAll(&daemon, drain: makeDrain(role: .helper)).recorded == 5002)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result_\(partition)") == "5000")
        #expect(try (file(of: partition), file(of: deaths)) == files, "it truncates nothing")
        #expect(try drainAll(&daemon, drain: makeDrain()).movedToBacklog == 100)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "10002")
    }

    @Test func `the helper helps with what the primary cannot read in bulk`() throws {
        let partition = Partition(.results, try past())
        try fill(partition.number, 20_000)
        let pair = DrainPair()
        var second = makeDrain(role: .helper, pair: pair)
        var daemon = try database.connect(user: "a_daemon")
        #expect(try !second.onePass(on: &daemon).moved, "the primary tries first")
        pair.couldNotRead(partition, triesAgain: true)
        pair.couldNotRead(partition, triesAgain: true, now: .now + .seconds(60))
        #expect(try second.onePass(on: &daemon).moved)
        // While another session is using the partition, the primary lets the helper help.
        try fill(partition.number, 20_000, prefix: "cc")
        var sender = try database.connect()
        try sender.execute("BEGIN; LOCK TABLE \(partition.table) IN ROW EXCLUSIVE MODE")
        var first = makeDrain(pair: pair)
        #expect(try first.onePass(on: &daemon).bulkReads == 0)
        #expect(!pair.mayHelp(partition, now: .now + .seconds(61)), "it is drained")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "40000")
    }

    @Test func `the helper helps at intervals, so that the primary can try again`() {
        let (pair, partition, start) = (DrainPair(), Partition(.results, 3), ContinuousClock.now)
        func fails(_ milliseconds: Int) {
            pair.couldNotRead(partition, triesAgain: true, now: start + .milliseconds(milliseconds))
        }
        func mayHelp(_ milliseconds: Int) -> Bool { pair.mayHelp(partition, now: start + .milliseconds(milliseconds)) }
        #expect(!mayHelp(0))
        fails(0)
        fails(100)
        #expect(!mayHelp(101), "the helper itself may have been in the way")
        fails(301)
        #expect(mayHelp(302) && mayHelp(1300) && !mayHelp(1301))
        fails(1000)
        fails(1400)
        #expect(!mayHelp(1401))
        fails(1602)
        #expect(mayHelp(1603) && !pair.mayHelp(Partition(.results, 4), now: start + .milliseconds(1603)))
        pair.isDone(partition)
        #expect(!mayHelp(1603))
        pair.couldNotRead(partition, triesAgain: false, now: start)
        #expect(mayHelp(60_000))
    }

    @Test func `new results do not wait for a backlog`() throws {
        for ahead in 2...6 {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
                SELECT 't', '\(ahead)0' || lpad(to_hex(i), 8, '0'), 410, \(Self.death), \(try past(ahead)) FROM generate_series(1, 12000) AS i
                """)
        }
        var daemon = try database.connect(user: "a_daemon")
        var sender = try database.connect()
        var drain = makeDrain()
        var wasFresh = false
        // On a slow machine, one pass ends before the current partition's turn comes again, and the next has another current partition.
        var sum = Drain.Pass()
        while !wasFresh, sum.recorded < 40_000 {
            let before = sum.recorded
            var batches = 0
            // Addressed by name: the clock may move on in the meantime.
            var current: Int?
            let pass = try drain.pass(
                on: &daemon, report: { _ in },
                betweenBatches: { _, soFar, _ throws(DatabaseError) in
                    batches += 1
                    if batches == 1 { current = try sender.run("SELECT \(Partition.currentInSQL)").value(Int.self) }
                    if batches == 2, let current {
                        try sender.run(
                            "INSERT INTO tokenkeeper.send_result_\(current) (topic, token, status, body, partition_number) VALUES ('t', 'ff', 410, \(Self.death), \(current))"
                        )
                    }
                    let isSuppressed =
                        try sender.run("SELECT FROM tokenkeeper.suppressed_token WHERE token_key = '\\xff'").count == 1
                    if isSuppressed, before + soFar.recorded < 40_000 { wasFresh = true }
                    return true
                })
            sum.add(pass)
        }
        #expect(sum.recorded > 1)
        #expect(wasFresh, "recorded while the greater part of the backlog was still there")
    }

    @Test func `each committed result counts once, among several daemons, a dump and slow senders`()
        throws
    {
        let database = database
        let failures = Failures()
        let committed = Committed()
        atOnce(9) { worker in
            do {
                switch worker {
                case 0..<5:
                    defer { committed.finish() }
                    var chance = SeededChance(seed: UInt64(worker))
                    var sender = try database.connect()
                    var round = -1
                    // On a slow machine, it continues until a partition has been read in bulk.
                    while round < 24 || committed.bulkReads == 0 && round < 500 {
                        round += 1
                        let rows = Int.random(in: 1...2000, using: &chance)
                        try sender.run(
                            """
                            BEGIN;
                            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
                            SELECT 't', lpad(to_hex(\(worker * 10_000_000 + round * 2000) + i), 8, '0'), CASE i % 29 WHEN 0 THEN 410 ELSE 200 END,
                                   \(Self.death), (\(round) + i / 1000) % 8
                            FROM generate_series(1, \(rows)) AS i
                            """)
                        // Some transactions are open for several passes of the daemons.
                        if round % 10 == 0 { try sender.run("SELECT pg_sleep(0.3)") }
                        let rollsBack = round % 20 == 7
                        try sender.run(rollsBack ? "ROLLBACK" : "COMMIT")
                        if !rollsBack { committed.add(rows) }
                        // A bulk read needs a moment when nobody writes to the partition.
                        try sender.run("SELECT pg_sleep(0.05)")
                    }
                case 5:
                    var dump = try database.connect()
                    while committed.finished < 5 {
                        try dump.run(
                            "BEGIN; SELECT count(*) FROM tokenkeeper.send_result; SELECT pg_sleep(0.1); COMMIT; SELECT pg_sleep(0.3)"
                        )
                    }
                default:
                    var daemon = try database.connect(user: "a_daemon")
                    var drain = makeDrain(role: worker == 8 ? .helper : .primary)
                    while committed.finished < 5 { committed.add(bulkReads: try drain.onePass(on: &daemon).bulkReads) }
                }
            } catch {
                failures.add("\(worker): \(error)")
            }
        }
        #expect(failures.all == [])
        #expect(committed.bulkReads > 0, "sealed partitions were read in bulk meanwhile")
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "\(committed.rows)")
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token")
                == database.psql("SELECT sum(results) FROM tokenkeeper.result_stat WHERE status = 410"))
    }

    @Test func `a partition that cannot be read in bulk is drained in batches, and that is reported`() throws {
        let partition = try past()
        try fill(partition, 5000)
        try database.psql("REVOKE INSERT ON tokenkeeper.send_result_backlog FROM tokenkeeper_daemon")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        var told: [String?] = []
        let pass = try drain.pass(
            on: &daemon,
            report: { if case .bulkReadFailed(let error) = $0 { told.append(error.sqlState) } },
            betweenBatches: { _, _, _ in true })
        #expect(told == ["42501"])
        #expect(pass.accepted == 4900 && pass.recorded == 100 && pass.trouble == nil)
    }

    @Test func `tokens that an application is adding delay no others, wherever they are`() throws {
        // Holds however slow this machine is.
        try database.psql("ALTER DATABASE \(database.name) SET deadlock_timeout = '1min'", user: "postgres")
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        var app = try database.connect()
        try app.execute(
            "BEGIN; SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't') FROM unnest('{700,2900}'::int[]) AS i")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(Self.death) FROM generate_series(1, 4000) AS i
            """)
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 3998)
        #expect(pass.putBack == 2)
        try app.execute("COMMIT")
        #expect(try drainAll(&daemon).recorded == 2)
    }

    @Test func `results of locked tokens wait, however many they are`() throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z')) FROM generate_series(1, 1201) AS i"
        )
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, apns_id)
            SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(Self.death), i FROM generate_series(1, 1300) AS i
            """)
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger FOR UPDATE")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.putBack == 1201 && pass.recorded == 99)
        #expect(
            try database.psql("SELECT count(DISTINCT (token, apns_id, body)) FROM tokenkeeper.send_result") == "1201")
        try app.execute("COMMIT")
        #expect(try drainAll(&daemon).recorded == 1201)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "1300")
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "1300")
    }

    @Test(arguments: [1, 151])
    func `a deadlock with the daemon never ends the application's transaction`(newTokens: Int) throws {
        try database.psql("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01Z')")
        // Every waiting session checks for a deadlock at once.
        try database.psql("ALTER DATABASE \(database.name) SET deadlock_timeout = '1ms'", user: "postgres")
        let database = database
        let failures = Failures()
        let current = Mutex<Int?>(1000)
        atOnce(2) { worker in
            defer { current.withLock { $0 = nil } }
            do {
                if worker == 0 {
                    var app = try database.connect()
                    for token in 1000...1150 {
                        current.withLock { $0 = token }
                        try app.run(
                            "BEGIN; SELECT tokenkeeper.register('b\(token)0', 't'); SELECT pg_sleep(0.004); SELECT tokenkeeper.register('aa', 't'); COMMIT"
                        )
                    }
                } else {
                    var sender = try database.connect()
                    var daemon = try database.connect(user: "a_daemon")
                    var drain = Drain(
                        lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
                    while let token = current.withLock({ $0 }) {
                        let tokens = newTokens == 1 ? token...token : 1000...1150
                        try sender.run(
                            """
                            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
                            SELECT 't', 'aa', 410, '{"reason":"Unregistered","timestamp":' || (extract(epoch FROM clock_timestamp()) * 1000)::bigint || '}'
                            UNION ALL SELECT 't', 'b' || i || '0', 410, \(Self.death) FROM generate_series(\(tokens.lowerBound), \(tokens.upperBound)) AS i
                            """)
                        _ = try drain.onePass(on: &daemon)
                    }
                }
            } catch {
                failures.add("\(worker): \(error)")
            }
        }
        #expect(failures.all == [])
    }

    @Test func `a row far behind the cursor is found, wherever it is`() throws {
        // Uses the current partition, so that nothing is read in bulk. Its pages are drained and have room again.
        let fill = "SELECT 't', 'aa', 200, repeat('x', 1900) FROM generate_series(1, 8000)"
        try database.psql("INSERT INTO tokenkeeper.send_result (topic, token, status, body) \(fill)")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain(truncates: false)
        while try drain.onePass(on: &daemon).moved {}
        let partition = try database.psql(
            "SELECT relname FROM pg_class WHERE relname ~ '^send_result_[0-7]$' ORDER BY pg_relation_size(oid) DESC LIMIT 1"
        )
        try database.psql("VACUUM tokenkeeper.\(partition)", user: "postgres")
        for round in 1...3 {
            try database.psql(
                "INSERT INTO tokenkeeper.\(partition) (topic, token, status, body, partition_number) VALUES ('t', 'f\(round)', 410, \(Self.death), \(partition.suffix(1)))"
            )
            #expect(
                Int(try database.psql("SELECT (ctid::text::point)[0]::int FROM tokenkeeper.\(partition)"))! < 900,
                "on a page at its front")
            try eventually("it is recorded") { try drain.onePass(on: &daemon).recorded == 1 }
        }
    }

    @Test func `the rescan goes through all pages, and begins again`() {
        var behind = RescanSchedule()
        var now = ContinuousClock.now
        let point = 100_000 + RescanSchedule.near
        #expect(behind.next(before: RescanSchedule.near, now: now) == [])
        var seen = Set<Int>()
        var looks = 0
        while seen.count < 100_000, let range = behind.next(before: point, now: now).first {
            seen.formUnion(range)
            looks += 1
            now += .microseconds(500)
            behind.looked(foundAt: nil, now: now)
            #expect(behind.next(before: point, now: now) == [], "a tenth of the time at most")
            now += .milliseconds(5)
        }
        #expect(seen.count == 100_000 && looks < 10)
        #expect(behind.next(before: point, now: now).first?.lowerBound == 0)
        behind.looked(foundAt: 130, now: now)
        now += .seconds(1)
        let next = behind.next(before: point, now: now)
        #expect(next.map(\.lowerBound) == [130, 192], "the page that was filled again, and the rest")
        behind.looked(foundAt: 130, now: now)
        behind.note(7, before: 7)
        behind.note(8, before: 9)
        #expect(behind.next(before: point, now: now).map(\.lowerBound) == [130, 8, 192])
        for page in 1000..<1020 { behind.note(page, before: 5000) }
        #expect(behind.next(before: point, now: now).count == 17)
    }

    @Test func `a partition is in use before, during and shortly after its time`() {
        let sizes = PartitionSizes(
            queue: .results, pages: [9, 9, 9, 9, 0, 0, 0, 9, 9, 9], current: Partition(.results, 7),
            before: Partition(.results, 6))
        #expect(QueueName.results.ring.filter(sizes.isInUse).map(\.number) == [0, 6, 7])
        #expect(sizes.othersToVisit.map(\.number) == [9, 0, 1, 2, 3])
        #expect(!sizes.isInUse(Partition(.results, 9)))
    }
}

/// How many rows senders have committed, and how many senders are done.
private final class Committed: Sendable {
    private let state = Mutex((rows: 0, finished: 0, bulkReads: 0))
    var bulkReads: Int { state.withLock { $0.bulkReads } }
    func add(bulkReads: Int) { state.withLock { $0.bulkReads += bulkReads } }
    var rows: Int { state.withLock { $0.rows } }
    var finished: Int { state.withLock { $0.finished } }
    func add(_ rows: Int) { state.withLock { $0.rows += rows } }
    func finish() { state.withLock { $0.finished += 1 } }
}
