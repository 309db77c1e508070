import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@Suite(.ownThread) struct `The process` {
    @Test func `SIGTERM and SIGINT finish the current batch and exit with 0`() throws {
        for number in [SIGTERM, SIGINT] {
            let database = try TestCluster.shared.database()
            try database.psql(
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', to_hex(4096 + i % 60000), CASE WHEN i % 5 = 0 THEN 410 ELSE 200 END, \(goneBody) FROM generate_series(1, 200000) AS i"
            )
            let daemon = try DaemonProcess(database.url())
            try eventually("it is at work") {
                try database.psql("SELECT count(*) FROM (SELECT FROM tokenkeeper.result_count LIMIT 1) AS r") == "1"
            }
            daemon.signal(number)
            #expect(daemon.wait() == 0)
            let left = try database.psql("SELECT count(*) FROM tokenkeeper.send_result")
            #expect(try database.psql("SELECT sum(results) + \(left) FROM tokenkeeper.result_stat") == "200000")
            #expect(try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "0")
            #expect(daemon.logged.contains("msg=stopped"))
        }
    }

    /// More results than eight full batches.
    private func backlog(_ database: TestDatabase) throws {
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', lpad(to_hex(i), 8, '0'), CASE i % 10 WHEN 0 THEN 410 ELSE 200 END, \(goneBody) FROM generate_series(1, 80000) AS i"
        )
    }

    @Test func `a second connection helps with a backlog and is closed afterwards`() throws {
        let database = try TestCluster.shared.database()
        func has(_ connections: Int) throws -> Bool {
            try database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = 'a_daemon'")
                == "\(connections)"
        }
        let daemon = try DaemonProcess(database.url(), timing: 0.05)
        try eventually("the drain and the sweep have one each") { try has(2) }
        try backlog(database)
        try eventually("the backlog has one more") { try has(3) }
        try eventually("everything is drained") {
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "80000"
        }
        try eventually("it is closed") { try has(2) }
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("level=warning"))
    }

    @Test(arguments: [true, false])
    func `without a second connection, one drains the backlog, which is logged unless configured`(
        wanted: Bool
    ) throws {
        let database = try TestCluster.shared.database()
        let role = "\(database.name)_limited"
        try database.psql("CREATE ROLE \(role) LOGIN CONNECTION LIMIT 2 IN ROLE tokenkeeper_daemon", user: "postgres")
        defer { _ = try? database.psql("DROP ROLE \(role)", user: "postgres") }
        let daemon = try DaemonProcess(
            database.url(user: role), settings: ["drain.second_connection=\(wanted ? "on" : "off")"])
        try eventually("the drain and the sweep have one each") {
            try database.psql("SELECT count(*) FROM pg_stat_activity WHERE usename = '\(role)'") == "2"
        }
        try backlog(database)
        try eventually("everything is drained") {
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "80000"
        }
        if wanted { try eventually("it is logged") { daemon.logged.contains("drained by one connection alone") } }
        #expect(daemon.stop() == 0)
        #expect(daemon.logged.contains("level=warning") == wanted)
        #expect(!daemon.logged.contains("waiting for PostgreSQL"), "the sweep has its own connection")
    }

    @Test func `a signal right after the start does not kill it`() throws {
        let database = try TestCluster.shared.database()
        for number in [SIGUSR1, SIGHUP] {
            let daemon = try DaemonProcess(database.url())
            for _ in 1...20 { daemon.signal(number) }
            try eventually("it works") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
            #expect(daemon.stop() == 0)
        }
    }

    @Test func `SIGUSR1 and request_sweep yield a row each`() throws {
        let database = try TestCluster.shared.database()
        let daemon = try DaemonProcess(database.url(), settings: ["sweep.interval=off"])
        try eventually("it works") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        daemon.signal(SIGUSR1)
        try eventually("the signal's sweep has finished") {
            try database.psql("SELECT trigger, outcome FROM tokenkeeper.sweep_run") == "signal|finished"
        }
        let id = try database.psql("SELECT tokenkeeper.request_sweep(dry_run => true)", user: "a_operator")
        try eventually("the request's sweep has finished") {
            try database.psql("SELECT trigger, outcome, dry_run FROM tokenkeeper.sweep_run WHERE run_id = \(id)")
                == "sql|finished|t"
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `the timer sweeps, and a restart does not restart the interval`() throws {
        let database = try TestCluster.shared.database()
        let first = try DaemonProcess(database.url(), settings: ["sweep.interval=1h"])
        try eventually("the first sweep has finished") {
            try database.psql("SELECT trigger, outcome FROM tokenkeeper.sweep_run") == "timer|finished"
        }
        #expect(first.stop() == 0)
        // Another start within the hour: nothing is due. Then the test moves the row back by an hour.
        let second = try DaemonProcess(database.url(), settings: ["sweep.interval=1h"])
        try eventually("the second daemon works") {
            try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1"
        }
        #expect(second.stop() == 0)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run") == "1")
        try database.psql("UPDATE tokenkeeper.sweep_run SET started_at = started_at - interval '3598 seconds'")
        let third = try DaemonProcess(database.url(), settings: ["sweep.interval=1h"])
        try eventually("the timer fires") {
            try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run WHERE outcome = 'finished'") == "2"
        }
        #expect(third.stop() == 0)
    }

    @Test func `it waits for PostgreSQL with one log line, and loses or doubles no row after a restart`()
        throws
    {
        let cluster = try TestCluster()
        let database = try cluster.emptyDatabase()
        cluster.stop()
        let daemon = try DaemonProcess(database.url(user: "postgres"), arguments: ["--migrate"])
        try eventually("it says that it waits") { daemon.logged.contains("waiting for PostgreSQL") }
        try cluster.start()
        func count(_ words: String) -> Int { daemon.logged.components(separatedBy: words).count - 1 }
        var queued = 0
        for mode in ["fast", "immediate"] {
            try eventually("it is connected") {
                (try? database.psql(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tokenkeeperd' AND xact_start IS NULL",
                    user: "postgres")) == "2"
            }
            try database.psql(
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', lpad(to_hex(\(queued) + i), 8, '0'), 410, \(goneBody) FROM generate_series(1, 50000) AS i",
                user: "postgres")
            queued += 50000
            cluster.stop(mode: mode)
            try cluster.start()
        }
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.send_result", user: "postgres") == "0"
        }
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat", user: "postgres") == "100000")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token", user: "postgres") == "100000")
        #expect(daemon.stop() == 0)
        // One line for the first outage, and at most one for each restart: an outage that ends before the next attempt is not
        // noticed.
        let waits = count("waiting for PostgreSQL")
        #expect((1...3).contains(waits) && count("PostgreSQL is back") == waits, "\(String(daemon.logged))")
    }

    @Test
    func `an application that locks a token for long neither fails nor waits, and the rest is recorded`()
        throws
    {
        let database = try TestCluster.shared.database()
        try database.psql(
            "SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z') FROM generate_series(1, 2000) AS i"
        )
        let daemon = try DaemonProcess(database.url(), settings: ["sweep.interval=off"])
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('000003e8', 't')")
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(goneBody) FROM generate_series(1, 2000) AS i"
        )
        try eventually("all others are recorded") {
            try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "1999"
        }
        // It keeps registering tokens that results keep arriving for, in the opposite order to the daemon's. Its short
        // statement_timeout would end it if it ever had to wait for the daemon for long.
        try app.execute("SET LOCAL statement_timeout = '900ms'")
        for round in 1...20 {
            try database.psql(
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', lpad(to_hex(i), 8, '0'), 410, \(goneBody) FROM generate_series(1, 2000) AS i"
            )
            for i in stride(from: 2000 - round * 50, to: 2000 - round * 50 - 50, by: -1) {
                try app.execute("SELECT tokenkeeper.register(lpad(to_hex(\(i)), 8, '0'), 't')")
            }
        }
        try app.execute("COMMIT")
        try eventually("the queue is empty") {
            try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "0"
        }
        #expect(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "42000")
        #expect(
            try database.psql("SELECT sum(deadlocks) FROM pg_stat_database WHERE datname = current_database()") == "0")
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("refused"))
    }

    @Test func `it never logs a whole token, and at rest it logs nothing and is small`() throws {
        let database = try TestCluster.shared.database()
        let token = String(repeating: "ab", count: 32)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '\(token)', 410, NULL), ('t', '\(token) ', 410, NULL), ('', '\(token)', 410, NULL), ('t', '\(token)', 400, '{\"reason\":\"BadTopic\"}'), ('t', '\(token)', 400, '{\"reason\":\"Bad \(token)\"}')"
        )
        let daemon = try DaemonProcess(database.url(), settings: ["log.level=trace"])
        try eventually("everything is recorded") {
            try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat") == "5"
        }
        let resident =
            try String(contentsOfFile: "/proc/\(daemon.pid)/status", encoding: .utf8)
            .split(separator: "\n").first { $0.hasPrefix("VmRSS") }.flatMap { Int($0.filter(\.isNumber)) } ?? .max
        #expect(resident < 40_000, "kB resident, in an unoptimized build")
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("ababababab"))
        #expect(
            daemon.logged.contains("results could not be understood")
                && daemon.logged.contains("reasons=\"(other) 1, BadTopic 1\""))
    }

    @Test func `a problem that a person must fix delays only what it affects, and status shows it`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("REVOKE INSERT ON tokenkeeper.rejected_result FROM tokenkeeper_daemon")
        try database.psql(
            """
            -- Otherwise, the topic is a warning, too.
            SELECT tokenkeeper.register('aa', 't');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT 't', lpad(to_hex(i), 8, '0'), CASE WHEN i = 3 THEN 999 WHEN i % 2 = 0 THEN 410 ELSE 200 END, \(goneBody) FROM generate_series(1, 500) AS i
            """)
        let daemon = try DaemonProcess(database.url())
        try eventually("the rest is recorded") {
            try database.psql("SELECT count(*) FROM tokenkeeper.send_result") == "1"
        }
        try eventually("status says so") {
            try database.psql("SELECT live_daemons, array_to_string(warnings, ' ') FROM tokenkeeper.status")
                == "1|results stay in the queue because PostgreSQL reports: permission denied for table rejected_result (SQLSTATE 42501)"
        }
        #expect(
            daemon.logged.components(separatedBy: "PostgreSQL refuses").count == 2,
            "told once: \(String(daemon.logged))")
        try database.psql("GRANT INSERT ON tokenkeeper.rejected_result TO tokenkeeper_daemon")
        try eventually("it continues without help") {
            try database.psql("SELECT token FROM tokenkeeper.rejected_result") == "00000003"
        }
        #expect(daemon.stop() == 0)
    }

    @Test func `a repeated refusal is logged once, and is not reported as over`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            CREATE SEQUENCE public.attempt;
            GRANT USAGE ON SEQUENCE public.attempt TO PUBLIC;
            CREATE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN PERFORM nextval('public.attempt'); RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$;
            CREATE TRIGGER f BEFORE INSERT OR UPDATE ON tokenkeeper.ledger EXECUTE FUNCTION public.full();
            CREATE TRIGGER f BEFORE INSERT OR UPDATE ON tokenkeeper.daemon EXECUTE FUNCTION public.full();
            CREATE TRIGGER f BEFORE UPDATE ON tokenkeeper.sweep_run EXECUTE FUNCTION public.full();
            SELECT tokenkeeper.request_sweep();
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', to_hex(4096 + i), 410, \(goneBody) FROM generate_series(1, 500) AS i
            """)
        let daemon = try DaemonProcess(database.url())
        try eventually("it has tried many times") {
            try database.psql("SELECT last_value > 20 FROM public.attempt") == "t"
        }
        func count(_ words: String) -> Int { daemon.logged.components(separatedBy: words).count - 1 }
        #expect(count("PostgreSQL refuses") == 1 && count("PostgreSQL is back") == 0, "\(String(daemon.logged))")
        for table in ["ledger", "daemon", "sweep_run"] { try database.psql("DROP TRIGGER f ON tokenkeeper.\(table)") }
        try eventually("it goes on") { try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "500" }
        try eventually("and says so") { count("PostgreSQL is back") == 1 }
        #expect(daemon.stop() == 0)
    }

    @Test func `a connection that is lost whenever it is used is logged`() throws {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            CREATE FUNCTION public.cut() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
                BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
            CREATE TRIGGER cut BEFORE INSERT ON tokenkeeper.daemon EXECUTE FUNCTION public.cut();
            """, user: "postgres")
        let daemon = try DaemonProcess(database.url())
        try eventually("it says so") { daemon.logged.contains("terminating connection due to administrator command") }
        try database.psql("DROP TRIGGER cut ON tokenkeeper.daemon", user: "postgres")
        try eventually("it goes on") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        #expect(daemon.stop() == 0)
    }

    @Test func `a lock on a part of the queue does not make status call the daemon dead`() throws {
        let database = try TestCluster.shared.database()
        var admin = try database.connect()
        try admin.execute("BEGIN; LOCK TABLE tokenkeeper.send_result_retry IN ACCESS EXCLUSIVE MODE")
        let daemon = try DaemonProcess(database.url())
        try eventually("it is alive") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        try admin.execute("COMMIT")
        #expect(daemon.stop() == 0)
    }
}
