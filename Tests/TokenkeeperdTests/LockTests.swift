import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `Locks of other sessions` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 't', registered_at => '2025-01-01Z')")
    }

    private func queue() throws {
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', t, 410, '{"reason":"Unregistered","timestamp":1794000000123}' FROM unnest('{aa,bb}'::text[]) AS t
            """, user: "a_sender")
    }

    @Test func `a role without rights stops nothing by taking every advisory lock`() throws {
        try database.psql("CREATE ROLE \(database.name)_s LOGIN", user: "postgres")
        var stranger = try database.connect(user: "\(database.name)_s")
        // The numbers of the advisory locks that an unreleased version took: four fixed ones, one per partition, one per range.
        try stranger.execute(
            """
            SELECT count(pg_advisory_lock(29803, n)) FROM (
                SELECT generate_series(0, 3) UNION ALL SELECT 1 << 27 | generate_series(0, 9)
                UNION ALL SELECT 1 << 28 | l << 24 | generate_series(0, 3) FROM generate_series(0, 9) AS l) AS taken (n)
            """)
        let daemon = try DaemonProcess(database.url(user: "owner"), arguments: ["--migrate"])
        try queue()
        try eventually("the queue is drained") {
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token")
                == "aa,bb"
        }
        let run = try database.psql("SELECT tokenkeeper.request_sweep()", user: "a_operator")
        try eventually("it sweeps") {
            try database.psql("SELECT outcome FROM tokenkeeper.sweep_run WHERE run_id = \(run)") == "finished"
        }
        #expect(try database.psql("SELECT tokenkeeper.forget('aa') > 0", user: "a_app") == "t")
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("waiting for a lock"))
    }

    @Test func `a locked row of a sealed partition is reported, even while other rows are drained`() throws {
        let past = Int(try database.psql("SELECT (\(Partition.currentInSQL) + 4) % 8"))!
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, partition_number) SELECT 't', 'cc', 403, \(past) FROM generate_series(1, 20000)"
        )
        var holder = try database.connect()
        let pid = try #require(try holder.scalar("SELECT pg_backend_pid()"))
        try holder.execute("BEGIN; SELECT FROM tokenkeeper.send_result_\(past) LIMIT 1 FOR UPDATE")
        let daemon = try DaemonProcess(database.url())
        try eventually("the log says so") {
            try queue()
            return daemon.logged.contains(
                "rows of tokenkeeper.send_result_\(past) may be locked by pid \(pid), role owner")
        }
        #expect(try database.psql("SELECT count(*) < 20000 FROM tokenkeeper.send_result_\(past)") == "t")
        try holder.execute("COMMIT")
        try eventually("the queue is drained") {
            try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0"
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `a lock that blocks the heartbeat delays no result`() throws {
        var holder = try database.connect()
        try holder.execute("BEGIN; LOCK TABLE tokenkeeper.daemon IN SHARE MODE")
        let daemon = try DaemonProcess(database.url())
        try queue()
        try eventually("the queue is drained") {
            try database.psql("SELECT string_agg(token, ',' ORDER BY token) FROM tokenkeeper.suppressed_token")
                == "aa,bb"
        }
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.daemon") == "0")
        try holder.execute("COMMIT")
        try eventually("it reports") { try database.psql("SELECT count(*) FROM tokenkeeper.daemon") == "1" }
        #expect(daemon.stop() == 0)
    }
}

@Suite(.ownThread) struct `When a lock is worth a report` {
    private let start = ContinuousClock.now

    private func holder(_ pid: Int32, _ kind: LockHolder.Kind = .table, transaction: String = "3/1") -> LockHolder {
        LockHolder(
            kind: kind, pid: pid, transaction: transaction, table: "ledger", mode: "SHARE", role: "r", application: nil,
            since: nil, behind: nil)
    }

    /// The watch with locks met all the time, every quarter of a second, and a look whenever it wants one.
    private func watch(
        for seconds: Double, settled: Int = 0, _ holders: (Double) -> [LockHolder]
    ) -> (watch: LockWatch, reportedAfter: Double?) {
        var watch = LockWatch(.production)
        var reportedAfter: Double?
        for step in 0...Int(seconds * 4) {
            let now = start + .milliseconds(250 * step)
            watch.note(waits: 1, settled: settled, now: now)
            if watch.wantsLook(now: now) { watch.saw(holders(Double(step) / 4), now: now) }
            if watch.reported != nil { reportedAfter = reportedAfter ?? Double(step) / 4 }
        }
        return (watch, reportedAfter)
    }

    @Test func `a transaction seen for some seconds is, well within ten`() {
        let (watch, after) = watch(for: 12) { _ in [holder(1)] }
        #expect(after == 4 && watch.reported == [holder(1)])
    }

    @Test func `changing transactions are not, as long as work gets done`() {
        #expect(watch(for: 60, settled: 1) { [holder(1, transaction: "3/\($0)")] }.reportedAfter == nil)
    }

    @Test func `a standstill is, even if no holder is found`() {
        let (watch, after) = watch(for: 12) { [holder(1, transaction: "3/\($0)")] }
        #expect(after == 6 && watch.reported == [])
        #expect(watch.reported?.words == "no session holds one for long")
    }

    @Test func `a standstill is, even if work was done after the first lock was met`() {
        var watch = LockWatch(.production)
        var reportedAfter: Int?
        for second in 0...20 {
            let now = start + .seconds(second)
            watch.note(waits: 1, settled: second <= 5 ? 1 : 0, now: now)
            if watch.wantsLook(now: now) { watch.saw([holder(1, transaction: "3/\(second)")], now: now) }
            if watch.reported != nil { reportedAfter = reportedAfter ?? second }
        }
        #expect(reportedAfter == 11 && watch.reported == [])
    }

    @Test func `a long transaction is, whatever else gets done`() {
        let (watch, after) = watch(for: 12, settled: 1) { _ in [holder(1, .rows)] }
        #expect(after == 4 && watch.reported == [holder(1, .rows)])
    }

    @Test func `a daemon that reads a partition in bulk is not, and is no standstill; other holders are`() {
        #expect(watch(for: 60) { _ in [holder(1, .reading)] }.reportedAfter == nil)
        #expect(watch(for: 12) { _ in [holder(1, .reading), holder(2, .rows)] }.watch.reported == [holder(2, .rows)])
    }

    @Test func `the holder of a table is named, and holders of its rows are not`() {
        let (table, rows) = (holder(1), holder(2, .rows))
        #expect(watch(for: 12) { _ in [table, rows] }.watch.reported == [table])
        #expect(watch(for: 12) { _ in [rows] }.watch.reported == [rows])
    }

    @Test func `it is over once no lock has been met for a while`() {
        var (watch, _) = watch(for: 12) { _ in [holder(1)] }
        watch.note(waits: 0, settled: 100, now: start + .seconds(14))
        #expect(watch.reported != nil && watch.isMeeting)
        watch.note(waits: 0, settled: 0, now: start + .seconds(16))
        #expect(watch.reported == nil && !watch.isMeeting)
    }

    @Test func `holders are not looked up if no lock is met`() {
        var watch = LockWatch(.production)
        for second in 0..<60 {
            watch.note(waits: second == 0 ? 1 : 0, settled: 1, now: start + .seconds(second))
            #expect(watch.isMeeting == (second <= 3))
        }
        #expect(!watch.wantsLook(now: start + .seconds(60)) && watch.reported == nil)
    }
}
