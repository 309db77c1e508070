import APNsFeedback
import Dispatch
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Locks among daemons` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    private func makeDrain() -> Drain {
        Drain(lockTimeout: .milliseconds(50), guardLimits: .off, interpret: Interpretation.verdict(on:))
    }

    private var lockTables: [String] {
        get throws {
            try database.psql(
                "SELECT relname FROM pg_class WHERE relnamespace = 'tokenkeeper'::regnamespace AND relname ~ '^lock_' AND relkind = 'r'"
            ).split(separator: "\n").map(String.init)
        }
    }

    @Test(arguments: ["sender", "app", "reader", "operator", "daemon"])
    func `no role can take them directly`(role: String) throws {
        let tables = try lockTables
        #expect(tables.count == DrainLock.rangeSlots + 2)
        var connection = try database.connect(user: "a_\(role)")
        for table in tables {
            let error = #expect(throws: DatabaseError.self) {
                try connection.run("BEGIN; LOCK TABLE tokenkeeper.\(table) IN ACCESS SHARE MODE")
            }
            connection.rollback()
            #expect(error?.sqlState == "42501", "\(table)")
        }
        // Readers may only read the migrations: a migration's lock excludes only sessions that change the table.
        let error = #expect(throws: DatabaseError.self) {
            try connection.run("BEGIN; LOCK TABLE tokenkeeper.migration IN ROW SHARE MODE")
        }
        connection.rollback()
        #expect(error?.sqlState == "42501")
    }

    @Test func `a batch's locks take no transaction id and do not delay a dump`() throws {
        var daemon = try database.connect(user: "a_daemon")
        for partition in QueueName.allCases.flatMap(\.partitions) {
            try daemon.execute("BEGIN")
            #expect(try daemon.scalar("SELECT \(DrainLock.batch(partition, firstPage: 0))") == nil)
            try daemon.execute(DrainLock.sweepClaim)
            #expect(try daemon.scalar("SELECT pg_current_xact_id_if_assigned()") == nil)
            #expect(
                try daemon.scalar(
                    "SELECT string_agg(relation::regclass || ' ' || mode, ',' ORDER BY relation::regclass::text) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'tokenkeeper.%'"
                )
                    == [
                        "tokenkeeper.lock_drain RowShareLock",
                        "tokenkeeper.lock_range_\(DrainLock.slot(partition, firstPage: 0)) ShareUpdateExclusiveLock",
                        "tokenkeeper.lock_sweep_claim ExclusiveLock",
                        "\(partition.table) RowExclusiveLock",
                    ].joined(separator: ","))
            daemon.rollback()
        }
    }

    @Test func `while one daemon claims a sweep, another waits`() throws {
        var one = try database.connect(user: "a_daemon")
        try one.execute("BEGIN; \(DrainLock.sweepClaim)")
        var other = try database.connect(user: "a_daemon")
        let error = #expect(throws: DatabaseError.self) {
            try other.run("BEGIN; SET LOCAL lock_timeout = '50ms'; \(DrainLock.sweepClaim)")
        }
        other.rollback()
        #expect(error?.sqlState == "55P03")
        try one.execute("COMMIT")
        try other.run("BEGIN; SET LOCAL lock_timeout = '50ms'; \(DrainLock.sweepClaim); COMMIT")
    }

    @Test func `neighboring ranges of a partition never share a slot`() {
        for partition in QueueName.allCases.flatMap(\.partitions) {
            for first in 0..<100 {
                let slots = (first..<first + DrainLock.rangeSlots).map {
                    DrainLock.slot(partition, firstPage: $0 * Partition.pagesPerRange)
                }
                #expect(Set(slots).count == DrainLock.rangeSlots)
                #expect(slots.allSatisfy { (0..<DrainLock.rangeSlots).contains($0) })
            }
        }
    }

    @Test func `a range that another daemon is working on is skipped, and others are drained`() throws {
        // In one partition, the slot of its first range taken.
        let partition = Partition(.results, (Int(try database.psql("SELECT \(Partition.currentInSQL)"))! + 4) % 8)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'aa', 403, \(partition.number) FROM generate_series(1, 20000)"
        )
        var other = try database.connect(user: "a_daemon")
        try other.execute("BEGIN; SELECT \(DrainLock.batch(partition, firstPage: 0))")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        let firstPages =
            "SELECT count(*) FROM \(partition.table) WHERE \(RowRange.pages(0..<Partition.pagesPerRange).predicate)"
        let left = try database.psql("SELECT count(*) FROM tokenkeeper.send_result")
        #expect(try database.psql(firstPages) == left && left != "0")
        #expect(pass.recorded == 20000 - Int(left)! && pass.lockWaits == 0)
        try other.execute("COMMIT")
        #expect(try drainAll(&daemon, drain: drain).recorded == Int(left)!)
    }

    @Test func `a process begins with small batches, and batches become smaller while they are slow`() throws {
        let partition = Partition(.results, (Int(try database.psql("SELECT \(Partition.currentInSQL)"))! + 4) % 8)
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 't', registered_at => '2026-01-01');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body, partition_number)
            SELECT 't', 'aa', 410, format('{"reason":"Unregistered","timestamp":%s}', 1780000000000 + n), \(partition.number)
            FROM generate_series(1, 3000) AS n;
            CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM pg_sleep(2.1); RETURN NEW; END$$;
            CREATE TRIGGER slowly BEFORE UPDATE ON tokenkeeper.ledger FOR EACH ROW EXECUTE FUNCTION slowly();
            """)
        // How many rows lie on the pages that the first two batches take: 8, and then 8 * 0.5 s / 2.1 s at most, so 1.
        let rows = try database.psql(
            "SELECT count(*) FILTER (WHERE ctid < '(8,0)'), count(*) FILTER (WHERE ctid >= '(8,0)' AND ctid < '(9,0)') FROM \(partition.table)"
        ).split(separator: "|").map { Int($0)! }
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        var batches: [Int] = []
        while batches.count < 2 {
            _ = try drain.pass(
                on: &daemon,
                report: { incident in
                    if case .committed(let counts, _) = incident {
                        batches.append(counts.map(\.results).reduce(0, +))
                    }
                }, betweenBatches: { _, _, _ in batches.count < 2 })
        }
        #expect(batches == rows)
    }

    @Test(arguments: [(0, 403), (4, 403), (4, 200)])
    func `a locked row of the queue delays only its range`(
        partitionsAhead: Int, status: Int
    ) throws {
        let partition = Partition(
            .results, (Int(try database.psql("SELECT \(Partition.currentInSQL)"))! + partitionsAhead) % 8)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'aa', \(status), \(partition.number) FROM generate_series(1, 20000)"
        )
        var other = try database.connect()
        try other.execute("BEGIN; SELECT FROM \(partition.table) LIMIT 1 FOR UPDATE")
        var daemon = try database.connect(user: "a_daemon")
        // The default: two of these timeouts take longer than a partition's turn.
        var drain = Drain(lockTimeout: .milliseconds(100), guardLimits: .off, interpret: Interpretation.verdict(on:))
        let pass = try drain.onePass(on: &daemon)
        let firstPages =
            "SELECT count(*) FROM \(partition.table) WHERE \(RowRange.pages(0..<Partition.pagesPerRange).predicate)"
        let left = try database.psql("SELECT count(*) FROM tokenkeeper.send_result")
        #expect(try database.psql(firstPages) == left && left != "0")
        #expect(pass.settled == 20000 - Int(left)! && pass.settled > 0 && pass.lockWaits >= 2)
        // The next pass meets the lock again; once it is released, the row is taken.
        #expect(try drain.onePass(on: &daemon).lockWaits >= 2)
        try other.execute("COMMIT")
        #expect(try drainAll(&daemon, drain: drain).settled == Int(left)!)
    }

    @Test
    func `while an operator locks out the drains, a pass ends at once; afterwards the drain continues where it was`()
        throws
    {
        let partition = Partition(.results, (Int(try database.psql("SELECT \(Partition.currentInSQL)"))! + 4) % 8)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'aa', 403, \(partition.number) FROM generate_series(1, 400000)"
        )
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
        var person = try database.connect(user: "a_operator")
        try person.execute("BEGIN; SELECT tokenkeeper.release_held('t')")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        var batches = 0
        let pass = try drain.pass(
            on: &daemon, report: { _ in },
            betweenBatches: { _, _, _ in
                batches += 1
                return true
            })
        #expect(pass.lockWaits == 1 && !pass.moved)
        // That call comes before the first batch. There are more than a hundred ranges.
        #expect(batches == 1)
        try person.execute("COMMIT")
        #expect(try drainAll(&daemon, drain: drain).recorded == 400_000)
    }

    @Test func `a locked partition is left after one attempt, and counts as a lock wait`() throws {
        let partition = Partition(.results, (Int(try database.psql("SELECT \(Partition.currentInSQL)"))! + 4) % 8)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'aa', 403, n FROM unnest(ARRAY[\(partition.number), 9]) AS n CROSS JOIN generate_series(1, 20000)"
        )
        var other = try database.connect()
        try other.execute("BEGIN; LOCK TABLE \(partition.table) IN SHARE MODE")
        var daemon = try database.connect(user: "a_daemon")
        var drain = makeDrain()
        let pass = try drain.onePass(on: &daemon)
        #expect(pass.recorded == 20000 && pass.lockWaits == 1)
        try other.execute("COMMIT; BEGIN; LOCK TABLE \(partition.table) IN ACCESS EXCLUSIVE MODE")
        let blind = try drain.onePass(on: &daemon)
        #expect(blind.recorded == 0 && blind.lockWaits == 1)
        try other.execute("COMMIT")
        #expect(try drainAll(&daemon, drain: drain).recorded == 20000)
    }

    @Test func `the collation of an argument changes nothing`() throws {
        try database.psql(
            """
            CREATE COLLATION public.fuzzy (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
            SELECT tokenkeeper.register('aa', 't');
            INSERT INTO tokenkeeper.held_result (topic_id, token_key, invalidated_at, reason, environment, topic, token, queued_at, attempts)
            SELECT topic_id, token_key, now(), 'BadDeviceToken', 'production', 't', 'aa', now(), 0 FROM tokenkeeper.ledger;
            """, user: "postgres")
        for collation in ["\"C\"", "\"und-x-icu\"", "public.fuzzy"] {
            #expect(
                try database.psql(
                    "BEGIN; SELECT tokenkeeper.release_held('t' COLLATE \(collation), 'production' COLLATE \(collation)); ROLLBACK"
                ) == "1", "\(collation)")
            // A topic spelled differently is another topic.
            #expect(throws: TestFailure.self, "\(collation)") {
                try database.psql("SELECT tokenkeeper.release_held('T' COLLATE \(collation))")
            }
        }
    }
}

@Suite(.ownThread) struct `Who holds a lock` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 't')")
    }

    private func session(_ name: String) throws -> Connection {
        var session = try database.connect()
        try session.execute("SET application_name = '\(name)'")
        return session
    }

    @Test func `is named by table, mode, process, role and application, except a dump that only reads`() throws {
        var daemon = try database.connect(user: "a_daemon")
        #expect(try LockHolder.all(on: &daemon) == [])
        var dump = try database.connect()
        try dump.execute("BEGIN; LOCK TABLE tokenkeeper.ledger IN ACCESS SHARE MODE")
        var app = try session("backfill")
        try app.execute("BEGIN; SELECT tokenkeeper.register('ab', 't')")
        var builder = try session("psql")
        let (appPID, builderPID) = (
            try app.scalar("SELECT pg_backend_pid()")!, try builder.scalar("SELECT pg_backend_pid()")!
        )
        try builder.execute("BEGIN; LOCK TABLE tokenkeeper.result_count IN SHARE ROW EXCLUSIVE MODE")
        #expect(
            try LockHolder.all(on: &daemon).map(\.words) == [
                "tokenkeeper.result_count is locked (SHARE ROW EXCLUSIVE) by pid \(builderPID), role owner, application psql",
                "rows of tokenkeeper.ledger may be locked by pid \(appPID), role owner, application backfill",
            ])
        // A role that may see when the transaction began reports it.
        var owner = try database.connect()
        #expect(
            try LockHolder.all(on: &owner).allSatisfy {
                $0.words.contains(", in a transaction since 20") && $0.words.hasSuffix(" UTC")
            })
    }

    @Test func `a session that waits for a whole table is named with the sessions it waits for`() throws {
        var reader = try session("report")
        let readerPID = try reader.scalar("SELECT pg_backend_pid()")!
        try reader.execute("BEGIN; LOCK TABLE tokenkeeper.ledger IN ACCESS SHARE MODE")
        let database = database
        let failures = Failures()
        let done = DispatchSemaphore(value: 0)
        DispatchQueue.global().async {
            do {
                var altering = try database.connect()
                try altering.execute(
                    "SET application_name = 'migration'; BEGIN; LOCK TABLE tokenkeeper.ledger IN ACCESS EXCLUSIVE MODE; COMMIT"
                )
            } catch {
                failures.add("\(error)")
            }
            done.signal()
        }
        var daemon = try database.connect(user: "a_daemon")
        try eventually("it waits") { try !LockHolder.all(on: &daemon).isEmpty }
        let found = try LockHolder.all(on: &daemon)
        let waiter = try #require(found.first)
        #expect(found.count == 1 && waiter.kind == .queued)
        #expect(
            waiter.words
                == "pid \(waiter.pid ?? 0), role owner, application migration waits for tokenkeeper.ledger (ACCESS EXCLUSIVE) behind pid \(readerPID), role owner, application report"
        )
        try reader.execute("COMMIT")
        done.wait()
        #expect(failures.all == [])
    }

    @Test func `a session that locks rows of the queue is named; a sender that has not yet committed is not`() throws {
        var sender = try database.connect(user: "a_sender")
        try sender.execute("BEGIN; INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)")
        try database.psql("INSERT INTO tokenkeeper.send_result (topic, token, status) VALUES ('t', 'aa', 200)")
        var daemon = try database.connect(user: "a_daemon")
        #expect(try LockHolder.all(on: &daemon) == [])
        let partition = try database.psql("SELECT tableoid::regclass FROM tokenkeeper.send_result")
        for (statement, table) in [
            ("SELECT FROM tokenkeeper.send_result LIMIT 1 FOR UPDATE", "tokenkeeper.send_result"),
            ("DELETE FROM tokenkeeper.send_result", "tokenkeeper.send_result"),
            ("DELETE FROM \(partition)", partition),
        ] {
            var person = try session("psql")
            let pid = try person.scalar("SELECT pg_backend_pid()")!
            try person.execute("BEGIN; \(statement)")
            #expect(
                try LockHolder.all(on: &daemon).map(\.words) == [
                    "rows of \(table) may be locked by pid \(pid), role owner, application psql"
                ])
            person.rollback()
        }
    }

    @Test func `a daemon that reads a partition in bulk is recognized`() throws {
        var fellow = try database.connect(user: "a_daemon")
        try fellow.execute("SET application_name = 'tokenkeeperd'")
        let pid = try fellow.scalar("SELECT pg_backend_pid()")!
        try fellow.execute(
            "BEGIN; SELECT \(DrainLock.partition(Partition(.results, 3))); INSERT INTO tokenkeeper.send_result_backlog (topic, token, status, partition_number) VALUES ('t', 'aa', 200, 9)"
        )
        var daemon = try database.connect(user: "a_daemon")
        let holders = try LockHolder.all(on: &daemon)
        #expect(holders.map(\.kind) == [.reading])
        #expect(
            holders.first?.words.hasPrefix(
                "tokenkeeper.send_result_3 is being read by another daemon, pid \(pid), role a_daemon, application tokenkeeperd"
            ) == true)
        // Any other session that has locked the partition is named.
        fellow.rollback()
        var person = try database.connect()
        try person.execute("BEGIN; LOCK TABLE tokenkeeper.send_result_3 IN ACCESS EXCLUSIVE MODE")
        #expect(try LockHolder.all(on: &daemon).map(\.kind) == [.table])
    }

    @Test(arguments: [
        ("ShareLock", "SHARE"), ("AccessExclusiveLock", "ACCESS EXCLUSIVE"),
        ("ShareUpdateExclusiveLock", "SHARE UPDATE EXCLUSIVE"),
    ])
    func `a mode is named as in SQL`(mode: String, name: String) {
        #expect(LockHolder.sqlName(ofMode: mode) == name)
    }
}
