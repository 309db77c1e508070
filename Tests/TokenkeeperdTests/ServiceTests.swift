import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger
@testable import tokenkeeperd

@Suite(.ownThread) struct `As a service` {
    @Test func `READY is sent once the database has responded; until then STATUS says what it waits for`() throws {
        let cluster = try TestCluster()
        let database = try cluster.emptyDatabase()
        cluster.stop()
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(user: "postgres"), arguments: ["--migrate"],
            environment: ["NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "400000"])
        try eventually("it says what it waits for") { systemd.status.hasPrefix("waiting for PostgreSQL: ") }
        try eventually("the watchdog is fed meanwhile") { systemd.count("WATCHDOG=1") > 5 }
        #expect(systemd.count("READY=1") == 0)
        try cluster.start()
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        try eventually("it says how it is") { systemd.status.hasPrefix("the queue is empty; last sweep finished 20") }

        // Once ready, an outage changes only the status.
        cluster.stop()
        try eventually("it says what it waits for") { systemd.status.hasPrefix("waiting for PostgreSQL: ") }
        let fed = systemd.count("WATCHDOG=1")
        try eventually("the watchdog is fed meanwhile") { systemd.count("WATCHDOG=1") > fed + 5 }
        try cluster.start()
        try eventually("it goes on") { systemd.status.hasPrefix("the queue is empty") }
        #expect(systemd.count("READY=1") == 1 && systemd.count("STOPPING=1") == 0)
        #expect(daemon.stop() == 0)
        #expect(systemd.count("STOPPING=1") == 1)
        #expect(systemd.messages.flatMap { $0 }.allSatisfy { !$0.contains("RELOADING") })
    }

    @Test func `it waits for a server that does not respond, and says so`() throws {
        let cluster = try TestCluster()
        let database = try cluster.emptyDatabase()
        let systemd = try NotifyListener(abstract: true)
        let daemon = try DaemonProcess(
            database.url(user: "postgres"), arguments: ["--migrate"],
            environment: ["NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "400000"])
        try eventually("it works") { systemd.status.hasPrefix("the queue is empty") }
        try cluster.signal(SIGSTOP)
        try eventually("it says so") { systemd.status.contains("waiting for PostgreSQL to answer the drain for ") }
        let fed = systemd.count("WATCHDOG=1")
        try eventually("the watchdog is fed meanwhile") { systemd.count("WATCHDOG=1") > fed + 5 }
        try eventually("the log says so") { daemon.logged.contains("no answer for 1") }
        try cluster.signal(SIGCONT)
        try eventually("it goes on") { systemd.status.hasPrefix("the queue is empty") }
        try eventually("it has recovered") { daemon.logged.contains("PostgreSQL is back") }
        #expect(daemon.stop() == 0)
    }

    @Test func `a long migration extends the start, and only one worker performs it`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        var other = try database.connect()
        let embedded = SchemaFiles.embedded
        let first = SchemaFiles(
            versions: embedded.versions.dropLast(), repeatables: [],
            grants: Repeatable(file: embedded.grants.name + ".sql", sql: "SELECT 1"))
        try Migrator(first, daemon: Daemon.version).migrate(&other) { _ in }
        try other.execute("BEGIN; \(DrainLock.migration)")
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(user: "owner"), arguments: ["--migrate"],
            environment: ["NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "400000"])
        try eventually("it says so") {
            systemd.count("EXTEND_TIMEOUT_USEC=60000000") > 5 && systemd.status == "applying migrations"
        }
        #expect(
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'relation' AND datname = current_database()")
                == "1")
        #expect(systemd.count("READY=1") == 0)
        try other.execute("COMMIT")
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("level=error") && !daemon.logged.contains("level=warning"))
    }

    @Test func `required messages get through even if systemd does not read for a while`() throws {
        let database = try TestCluster.shared.database()
        let systemd = try NotifyListener(reads: false)
        systemd.fill()
        let daemon = try DaemonProcess(
            database.url(), environment: ["NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "400000"])
        // A reload before the daemon is ready reports nothing. It is ready when drain and sweep are at work.
        try eventually("it works") {
            try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1"
                && database.psql("SELECT count(*) FROM tokenkeeper.sweep_run") == "1"
        }
        for _ in 1...20 { daemon.signal(SIGHUP) }
        try eventually("it has reloaded") { daemon.logged.contains("msg=reloaded") }
        systemd.read()
        try eventually("it is ready") { systemd.count("READY=1") >= 2 }
        try eventually("every reload is ready again") {
            systemd.count("READY=1") == systemd.count("RELOADING=1") + 1
        }
        try eventually("and says how it is") { systemd.status.hasPrefix("the queue is empty") }
        #expect(daemon.stop() == 0)
    }

    @Test func `a configuration value cannot inject messages to systemd, however long it is`() throws {
        let database = try TestCluster.shared.database()
        let systemd = try NotifyListener()
        let file = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString).toml"
        defer { unlink(file) }
        try "".write(toFile: file, atomically: true, encoding: .utf8)
        let daemon = try DaemonProcess(
            database.url(), arguments: ["--config", file], environment: ["NOTIFY_SOCKET": systemd.address])
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        try "[sweep]\ninterval = \"1\\nMAINPID=1\\n\(String(repeating: "x", count: 9000))\"\n".write(
            toFile: file, atomically: true, encoding: .utf8)
        daemon.signal(SIGHUP)
        try eventually("it is ready again") { systemd.count("READY=1") == 2 }
        try eventually("it says what was wrong") { systemd.status.contains("reload refused") }
        #expect(systemd.count("MAINPID=1") == 0)
        #expect(systemd.messages.allSatisfy { $0.joined(separator: "\n").utf8.count < 1000 })
        #expect(daemon.stop() == 0)
    }

    @Test func `a sweep worker that cannot connect is reported`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            "CREATE ROLE \(database.name) LOGIN CONNECTION LIMIT 1 IN ROLE tokenkeeper_daemon", user: "postgres")
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(user: database.name), environment: ["NOTIFY_SOCKET": systemd.address])
        try eventually("it is in the log and in the status") {
            daemon.logged.contains("too many connections for role") && systemd.status.contains("too many connections")
        }
        #expect(systemd.count("READY=1") == 0)
        #expect(daemon.logged.components(separatedBy: "waiting for PostgreSQL").count == 2, "logged once")
        try database.psql("ALTER ROLE \(database.name) CONNECTION LIMIT 2", user: "postgres")
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        try eventually("it has recovered") { daemon.logged.contains("PostgreSQL is back") }
        #expect(daemon.stop() == 0)
    }

    @Test func `a schema that is missing is waited for`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(user: "owner"), environment: ["NOTIFY_SOCKET": systemd.address])
        try eventually("it has said why") {
            systemd.status.hasPrefix(
                "waits for migrate: \(SchemaFiles.embedded.versions.count) versions and \(SchemaFiles.embedded.repeatables.count) files of functions and views have not been applied to this database: run `tokenkeeperd migrate`"
            )
        }
        #expect(systemd.count("READY=1") == 0)
        let migrated = try ProgramRun(
            [DaemonProcess.program, "migrate"], environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "owner")])
        #expect(migrated.status == 0, "\(migrated)")
        try eventually("it works") { systemd.count("READY=1") == 1 && daemon.logged.contains("the schema fits") }
        #expect(daemon.logged.components(separatedBy: "level=critical").count == 2, "said once")
        // Somebody restores the database: the schema is gone for a while.
        try database.psql("DROP SCHEMA tokenkeeper CASCADE", user: "postgres")
        try eventually("it waits again") { systemd.status.hasPrefix("waits for migrate: ") }
        #expect(daemon.stop() == 0)
    }

    @Test func `another process's watchdog is not fed`() throws {
        let database = try TestCluster.shared.database()
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(),
            environment: ["NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"])
        try eventually("it is ready") { systemd.count("READY=1") == 1 }
        #expect(daemon.stop() == 0)
        #expect(systemd.count("WATCHDOG=1") == 0)
    }

    @Test func `SIGHUP applies what it can, names the rest, and a mistake changes nothing`() throws {
        let database = try TestCluster.shared.database()
        let systemd = try NotifyListener()
        let file = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString).toml"
        defer { unlink(file) }
        func write(_ text: String) throws { try text.write(toFile: file, atomically: true, encoding: .utf8) }
        try write("database_url = \"\(database.url())\"\n[sweep]\ninterval = \"1h\"\n")
        let daemon = try DaemonProcess(
            nil, arguments: ["--config", file], environment: ["NOTIFY_SOCKET": systemd.address])
        try eventually("it works") { systemd.status.hasPrefix("the queue is empty; last sweep") }
        func interval() throws -> String { try database.psql("SELECT sweep_interval FROM tokenkeeper.daemon") }
        #expect(try interval() == "01:00:00")

        try write(
            "database_url = \"\(database.url())&application_name=other\"\n[sweep]\ninterval = \"1m\"\n[log]\nlevel = \"debug\"\n"
        )
        var clock = timespec()
        clock_gettime(CLOCK_MONOTONIC, &clock)
        let before = clock.tv_sec * 1_000_000 + clock.tv_nsec / 1000
        daemon.signal(SIGHUP)
        try eventually("it is ready again") { systemd.count("READY=1") == 2 }
        let reloading = try #require(systemd.messages.first { $0.contains("RELOADING=1") })
        let since = try #require(reloading.first { $0.hasPrefix("MONOTONIC_USEC=") }.flatMap { Int($0.dropFirst(15)) })
        #expect(since >= before && since < before + 60_000_000)
        #expect(systemd.assignments.firstIndex(of: "RELOADING=1")! < systemd.assignments.lastIndex(of: "READY=1")!)
        try eventually("the interval is the new one") { try interval() == "00:01:00" }
        #expect(daemon.logged.contains("sweep.interval: 1h -> 1m, log.level: info -> debug"))
        #expect(
            daemon.logged.contains("level=warning msg=\"these settings take effect at a restart\" keys=database_url"))
        // With the new interval, the next sweep is due once the row is a minute old. This rings the bell.
        try database.psql("UPDATE tokenkeeper.sweep_run SET started_at = started_at - interval '2 minutes'")
        daemon.signal(SIGHUP)
        try eventually("it has swept by the new interval") {
            try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run WHERE trigger = 'timer'") == "2"
        }
        try eventually("it logs by the new level") { daemon.logged.contains("level=debug msg=\"sweep finished\"") }

        try write("[sweep]\ninterval = \"1 day\"\n")
        daemon.signal(SIGHUP)
        try eventually("it says that it was refused") {
            systemd.status.hasSuffix(
                "reload refused: \(file):2: sweep.interval is \"1 day\", expected a duration such as \"90s\" or \"30d\", from 1m to 30d, or \"off\""
            )
        }
        #expect(daemon.logged.contains("level=error msg=\"reload refused: the earlier configuration stays in force\""))
        #expect(systemd.count("READY=1") == systemd.count("RELOADING=1") + 1)
        try eventually("the daemon reports on") {
            try database.psql("SELECT heartbeat_at > clock_timestamp() - interval '6 s' FROM tokenkeeper.daemon") == "t"
        }
        #expect(try interval() == "00:01:00")
        #expect(daemon.stop() == 0)
    }
}

@Suite(.ownThread) struct `Service state` {
    private let start = SuspendingClock.now

    private func complete() -> ServiceState {
        var serviceState = ServiceState()
        for part in ServiceState.Part.allCases {
            serviceState.beat(part, heardOfBy: start + .seconds(10))
            serviceState.connected(part)
        }
        serviceState.phase = .running
        return serviceState
    }

    @Test func `a worker that misses its deadline hangs, whatever the others do`() {
        for hanging in ServiceState.Part.allCases {
            var serviceState = complete()
            #expect(serviceState.isAlive(at: start + .seconds(10)))
            for part in ServiceState.Part.allCases where part != hanging {
                serviceState.beat(part, heardOfBy: start + .seconds(1000))
            }
            #expect(!serviceState.isAlive(at: start + .seconds(11)))
            serviceState.beat(hanging, heardOfBy: start + .seconds(20))
            #expect(serviceState.isAlive(at: start + .seconds(11)))
        }
    }

    @Test func `a worker that reports its wait is alive, and one that has left is not expected`() {
        var serviceState = complete()
        serviceState.beat(.drain, heardOfBy: start + .seconds(300))
        for part in ServiceState.Part.allCases where part != .drain { serviceState.left(part) }
        #expect(serviceState.isAlive(at: start + .seconds(299)))
        #expect(!serviceState.isAlive(at: start + .seconds(301)))
    }

    @Test func `it is complete when every worker has been connected`() {
        var serviceState = ServiceState()
        #expect(!serviceState.isComplete)
        serviceState.beat(.drain, heardOfBy: start)
        serviceState.connected(.drain)
        serviceState.beat(.sweep, heardOfBy: start)
        #expect(!serviceState.isComplete)
        serviceState.connected(.sweep)
        #expect(serviceState.isComplete)
    }

    @Test func `it is incomplete while a worker reconnects; helpers do not count`() {
        var serviceState = complete()
        serviceState.left(.backlog)
        #expect(serviceState.isComplete)
        serviceState.connecting(.sweep, at: .now)
        #expect(!serviceState.isComplete && serviceState.phase == .running)
        serviceState.connected(.sweep)
        #expect(serviceState.isComplete)
    }

    @Test func `a backlog is many unread pages, or many full batches in a row`() {
        let backlog = BacklogWorker.Backlog()
        backlog.report(Drain.Pass(), pagesLeft: 1023)
        #expect(!backlog.take())
        backlog.report(Drain.Pass(), pagesLeft: 1024)
        #expect(backlog.take() && !backlog.take(), "once")
        var pass = Drain.Pass()
        // Seven full batches, one that is not full, and eight full ones.
        for batch in 1...16 {
            #expect(!backlog.take())
            pass.accepted += batch == 8 ? 999 : 1000
            backlog.report(pass, pagesLeft: 0)
        }
        #expect(backlog.take())
    }

    @Test func `the queue is called empty only if nothing waits and nothing is warned of`() {
        var state = complete()
        state.queue = .init(depth: 0, exact: true)
        #expect(state.status == "the queue is empty")
        state.queue = .init(depth: 0, exact: false)
        #expect(state.status == "the length of the queue is not known")
        state.queue = .init(depth: 0, exact: true)
        state.summary.requests = 1
        state.summary.oldestDue = Instant(microseconds: 1_795_000_000_000_000)
        #expect(
            state.status == "0 results are queued; 1 request is queued, the oldest due since 2026-11-18 11:06:40 UTC")
        state.summary.requests = 0
        state.summary.warnings = ["sending is paused"]
        #expect(state.status == "sending is paused; 0 results are queued")
        state.sendingProblems = ["no route"]
        #expect(state.status == "no route; 2 warnings, see `tokenkeeperd status`; 0 results are queued")
        state.summary.warnings = ["no route", "sending is paused"]
        #expect(state.status == "no route; 2 warnings, see `tokenkeeperd status`; 0 results are queued")
        state.obstacle(
            "waiting for a lock", knowsQueue: true, of: .send, at: Date(timeIntervalSince1970: 1_795_000_000))
        #expect(
            state.status
                == "waiting for a lock, says the sending (since 2026-11-18 11:06:40 UTC); 2 warnings, see `tokenkeeperd status`; 0 results are queued"
        )
        state.obstacle(nil, of: .send, at: .now)
        state.summary.warnings = [String(repeating: "x", count: 1000)]
        state.sendingProblems = []
        #expect(state.status == String(repeating: "x", count: 249) + "…; 0 results are queued")
        state.summary.warnings = []
        state.queue = .init(depth: 7, exact: true, oldest: Instant(microseconds: 1_795_000_000_000_000))
        state.waitReason = "the daemon is draining them"
        #expect(
            state.status
                == "7 results are queued, the oldest since 2026-11-18 11:06:40 UTC, because the daemon is draining them"
        )
    }

    @Test func `the status is one line`() {
        var serviceState = ServiceState()
        #expect(serviceState.status == "starting")
        serviceState = complete()
        #expect(serviceState.status == "has not looked at the queue yet")
        serviceState.queue = .init(depth: 0, exact: true)
        serviceState.lastSweep = (Date(timeIntervalSince1970: 1_795_000_000), "finished")
        #expect(serviceState.status == "the queue is empty; last sweep finished 2026-11-18 11:06:40 UTC")
        serviceState.queue = .init(depth: 1_234_567, exact: false)
        serviceState.isSweeping = true
        #expect(serviceState.status == "about 1234567 results are queued; sweeping")
        serviceState.isSweeping = false
        serviceState.beat(.drain, heardOfBy: start, unansweredFor: .seconds(4))
        serviceState.beat(.sweep, heardOfBy: start, unansweredFor: .seconds(61))
        #expect(
            serviceState.status
                == "about 1234567 results are queued; waiting for PostgreSQL to answer the sweep for 61 s; last sweep finished 2026-11-18 11:06:40 UTC"
        )
        serviceState.queue = nil
        serviceState.lastSweep = nil
        serviceState.beat(.sweep, heardOfBy: start)
        serviceState.obstacle("waiting for PostgreSQL: no", of: .drain, at: Date(timeIntervalSince1970: 1_795_000_000))
        serviceState.obstacle(
            "waiting for PostgreSQL: never", of: .drain, at: Date(timeIntervalSince1970: 1_795_000_009))
        serviceState.obstacle("waiting for PostgreSQL: no", of: .sweep, at: Date(timeIntervalSince1970: 1_795_000_009))
        #expect(serviceState.status == "waiting for PostgreSQL: never (since 2026-11-18 11:06:40 UTC)")
        serviceState.queue = .init(depth: 7, exact: true)
        serviceState.obstacle("PostgreSQL refuses: no", of: .drain, at: .now)
        #expect(
            serviceState.status == "PostgreSQL refuses: no (since 2026-11-18 11:06:40 UTC)", "the depth is not known")
        serviceState.obstacle("waiting for PostgreSQL: no", away: .connect, of: .drain, at: .now)
        #expect(
            serviceState.status == "waiting for PostgreSQL: no (since 2026-11-18 11:06:40 UTC)",
            "the depth is not known")
        serviceState.obstacle("waiting for a lock", knowsQueue: true, of: .drain, at: .now)
        #expect(
            serviceState.status == "waiting for a lock (since 2026-11-18 11:06:40 UTC); 7 results are queued",
            "a lock does not keep it from looking")
        serviceState.obstacle(nil, of: .drain, at: .now)
        #expect(
            serviceState.status
                == "waiting for PostgreSQL: no, says the sweep (since 2026-11-18 11:06:49 UTC); 7 results are queued")
        serviceState.queue = nil
        serviceState.obstacle(nil, of: .sweep, at: .now)
        #expect(serviceState.status == "has not looked at the queue yet")
        serviceState.connecting(.sweep, at: Date(timeIntervalSince1970: 1_795_000_000))
        #expect(serviceState.status == "connecting to PostgreSQL, says the sweep (since 2026-11-18 11:06:40 UTC)")
        serviceState.obstacle("waiting for PostgreSQL: no", away: .connect, of: .sweep, at: .now)
        serviceState.connecting(.sweep, at: .now)
        #expect(serviceState.status == "waiting for PostgreSQL: no, says the sweep (since 2026-11-18 11:06:40 UTC)")
        serviceState.connected(.sweep)
        #expect(serviceState.status == "has not looked at the queue yet")
        serviceState.stopping(failure: nil)
        #expect(serviceState.status == "stopping")
        serviceState.stopped(inTime: true)
        #expect(serviceState.status == "stopped")

        var migrating = ServiceState()
        migrating.beat(.drain, heardOfBy: start)
        migrating.obstacle("waiting for PostgreSQL: no", away: .connect, of: .drain, at: .now)
        migrating.isMigrating = true
        #expect(migrating.status == "applying migrations")

        var never = ServiceState()
        never.beat(.drain, heardOfBy: start)
        never.obstacle("waiting for PostgreSQL: no", away: .connect, of: .drain, at: .now)
        never.stopping(failure: nil)
        never.stopped(inTime: true)
        #expect(never.status == "never was ready; waiting for PostgreSQL: no")
    }
    @Test func `the reason why PostgreSQL is away is that of the drain, and ten seconds of silence are one`() {
        var state = ServiceState()
        let start = SuspendingClock.now
        #expect(state.away == .connect && !state.isReady)
        for part in [ServiceState.Part.drain, .sweep] {
            state.beat(part, heardOfBy: start)
            state.connected(part)
        }
        #expect(state.away == nil && state.isReady)
        state.beat(.drain, heardOfBy: start, unansweredFor: .seconds(9))
        #expect(state.away == nil && state.isReady)
        state.beat(.drain, heardOfBy: start, unansweredFor: .seconds(10))
        #expect(state.away == .connect && !state.isReady)
        state.beat(.drain, heardOfBy: start)
        state.obstacle("PostgreSQL refuses", away: .rights, of: .sweep, at: .now)
        #expect(state.away == nil)
        state.obstacle("PostgreSQL refuses", away: .rights, of: .drain, at: .now)
        state.connecting(.drain, at: .now)
        state.connected(.drain)
        #expect(state.away == .rights, "a connection shows nothing about rights")
        state.obstacle(nil, of: .drain, at: .now)
        #expect(state.away == nil && Away(refusedWith: "53100") == .disk && Away(refusedWith: "23505") == nil)
    }
}
