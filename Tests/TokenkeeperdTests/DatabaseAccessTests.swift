import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import TokenLedger

/// The ways in which operators connect to a database, through libpq, with the real daemon.
@Suite(.ownThread) struct `Ways to the database` {
    private let folder: String

    init() throws {
        folder = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString)"
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
    }

    /// Writes a file that nobody else can read, and returns its path.
    private func file(_ name: String, _ text: String) throws -> String {
        let path = folder + "/" + name
        try text.write(toFile: path, atomically: true, encoding: .utf8)
        chmod(path, 0o600)
        return path
    }

    /// Makes a cluster with a database `d` that the daemon migrates, and queues a 410.
    private func prepare(_ cluster: TestCluster, role: String = "keeper PASSWORD 'first secret'") throws -> TestDatabase
    {
        var admin = try cluster.connect(database: "postgres")
        try admin.execute(
            "CREATE ROLE \(role.split(separator: " ")[0]) LOGIN \(role.split(separator: " ").dropFirst().joined(separator: " "))"
        )
        try admin.execute("CREATE DATABASE d OWNER \(role.split(separator: " ")[0])")
        return TestDatabase(cluster: cluster, name: "d")
    }

    private func drains(_ daemon: DaemonProcess, _ database: TestDatabase, token: String) throws {
        try eventually("the queue is there") {
            (try? database.psql(
                "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', '\(token)', 410, \(goneBody))",
                user: "postgres")) != nil
        }
        try eventually("it drains") {
            guard daemon.isRunning else { throw TestFailure(daemon.logged) }
            // A reader can deadlock with a migration that is still under way: then it reads again.
            return
                (try? database.psql(
                    "SELECT count(*) FROM tokenkeeper.suppressed_token WHERE token = '\(token)'", user: "postgres"))
                == "1"
        }
    }

    @Test func `the password file is read for each connection, and the password is shown nowhere`() throws {
        let cluster = try TestCluster(rules: ["host d keeper 127.0.0.1/32 scram-sha-256"])
        let database = try prepare(cluster)
        let path = try file("database_password", "first secret\n")
        let systemd = try NotifyListener()
        let daemon = try DaemonProcess(
            database.url(user: "keeper", overTCP: true), arguments: ["--migrate"],
            environment: ["CREDENTIALS_DIRECTORY": folder, "NOTIFY_SOCKET": systemd.address])
        try drains(daemon, database, token: "aa")
        try database.psql("ALTER ROLE keeper PASSWORD 'second secret'", user: "postgres")
        try database.psql(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'keeper'", user: "postgres")
        try eventually("it is refused") { systemd.status.contains("password authentication failed") }
        try eventually("a person must act") {
            daemon.logged.contains("level=error msg=\"PostgreSQL refuses this login: check the password")
        }
        _ = try file("database_password", "second secret")
        try drains(daemon, database, token: "bb")
        try eventually("it names the server") {
            daemon.logged.split(separator: "\n").contains {
                $0.contains("PostgreSQL is back") && $0.contains("host=127.0.0.1:\(cluster.port)")
                    && $0.contains(" s\"")
            }
        }

        // Only root may read the daemon's command line and environment: see `Secrets`.
        for place in geteuid() == 0 ? ["environ", "cmdline"] : ["cmdline"] {
            let bytes = try Data(contentsOf: URL(fileURLWithPath: "/proc/\(daemon.pid)/\(place)"))
            #expect(!String(decoding: bytes, as: UTF8.self).contains("secret"))
        }
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("first secret") && !daemon.logged.contains("second secret"))
        unlink(path)
    }

    @Test func `the whole URL may be a credential`() throws {
        let cluster = try TestCluster(rules: ["host d keeper 127.0.0.1/32 scram-sha-256"])
        let database = try prepare(cluster)
        _ = try file(
            "database_url", "postgresql://keeper:first%20secret@127.0.0.1:\(cluster.port)/d\n")
        let daemon = try DaemonProcess(nil, arguments: ["--migrate"], environment: ["CREDENTIALS_DIRECTORY": folder])
        try drains(daemon, database, token: "aa")
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains("secret"))
    }

    @Test func `service files and password files of libpq work`() throws {
        let cluster = try TestCluster(rules: ["host d keeper 127.0.0.1/32 scram-sha-256"])
        let database = try prepare(cluster)
        let services = try file("services", "[push]\nhost=127.0.0.1\nport=\(cluster.port)\ndbname=d\nuser=keeper\n")
        let passwords = try file(".pgpass", "127.0.0.1:\(cluster.port):d:keeper:first secret\n")
        let files = ["PGSERVICEFILE": services, "PGPASSFILE": passwords]
        let named = try DaemonProcess("service=push", arguments: ["--migrate"], environment: files)
        try drains(named, database, token: "aa")
        #expect(named.stop() == 0)
        let byVariable = try DaemonProcess(nil, environment: files.merging(["PGSERVICE": "push"]) { $1 })
        try drains(byVariable, database, token: "bb")
        #expect(byVariable.stop() == 0)
    }

    @Test func `a URL or a service file overrides our defaults`() throws {
        func value(_ keyword: String, _ text: String, writes: Bool = true) throws -> String? {
            try DatabaseAddress(text).attempt(writes: writes).parameters.last { $0.keyword == keyword }?.value
        }
        #expect(try value("connect_timeout", "host=a") == "10")
        #expect(try value("keepalives_idle", "host=a") == "30")
        #expect(try value("target_session_attrs", "host=a") == "primary")
        #expect(try value("target_session_attrs", "host=a", writes: false) == nil)
        #expect(try value("connect_timeout", "postgresql://a/d?connect_timeout=4") == nil)
        #expect(try value("keepalives_idle", "host=a keepalives_idle=5") == nil)
        #expect(try value("target_session_attrs", "host=a target_session_attrs=read-write") == nil)
        #expect(
            try value("target_session_attrs", "host=a target_session_attrs=any") == nil,
            "said, though it is libpq's default")

        // For each host: a minute and a half for name lookups, and the timeout for each of eight addresses.
        func patience(_ text: String) throws -> Duration { try DatabaseAddress(text).attempt(writes: true).patience }
        #expect(try patience("host=a") == .seconds(90 + 80))
        #expect(try patience("host=a,b port=1,2") == .seconds(2 * (90 + 80)))
        #expect(try patience("hostaddr=10.0.0.1,10.0.0.2,10.0.0.3 connect_timeout=3") == .seconds(3 * (90 + 24)))
        #expect(try patience("host=a connect_timeout=0") == .seconds(90 + 1040))
    }

    @Test(arguments: [
        "postgresql://u:hunter2@x@h/d", "postgresql://u:hunter2/x@h/d", "host='hunter2 h'", "host=h port=hunter2",
        "host=h connect_timeout=hunter2",
    ])
    func `an ambiguous address is refused without being quoted`(text: String) {
        do {
            _ = try DatabaseAddress(text)
            Issue.record("taken")
        } catch {
            #expect(!error.message.contains("hunter2"))
        }
    }

    @Test func `client certificates work, and the server's is verified`() throws {
        let days = "2"
        func openssl(_ arguments: String...) throws { try TestCluster.run(["openssl"] + arguments) }
        func key(_ name: String, subject: String, host: String? = nil) throws {
            try openssl(
                "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
                "/CN=\(subject)", "-keyout", "\(folder)/\(name).key", "-out", "\(folder)/\(name).csr")
            let names = try file("\(name).ext", host.map { "subjectAltName=DNS:\($0)\n" } ?? "")
            try openssl(
                "x509", "-req", "-in", "\(folder)/\(name).csr", "-CA", "\(folder)/ca.crt", "-CAkey", "\(folder)/ca.key",
                "-CAcreateserial", "-days", days, "-extfile", names, "-out", "\(folder)/\(name).crt")
            chmod("\(folder)/\(name).key", 0o600)
        }
        try openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", days,
            "-subj", "/CN=test CA", "-keyout", "\(folder)/ca.key", "-out", "\(folder)/ca.crt")
        try key("server", subject: "localhost", host: "localhost")
        try key("keeper", subject: "keeper")
        try key("stranger", subject: "stranger")
        func text(_ name: String) throws -> String { try String(contentsOfFile: "\(folder)/\(name)", encoding: .utf8) }
        let cluster = try TestCluster(
            rules: ["hostssl d keeper 127.0.0.1/32 cert", "host d keeper 127.0.0.1/32 reject"],
            options: ["ssl=on", "ssl_ca_file=ca.crt"],
            files: ["server.crt": text("server.crt"), "server.key": text("server.key"), "ca.crt": text("ca.crt")])
        let database = try prepare(cluster, role: "keeper")
        func url(_ who: String, host: String = "localhost") -> String {
            "postgresql://keeper@\(host)/d?hostaddr=127.0.0.1&port=\(cluster.port)&sslmode=verify-full"
                + "&sslrootcert=\(folder)/ca.crt&sslcert=\(folder)/\(who).crt&sslkey=\(folder)/\(who).key"
        }
        let daemon = try DaemonProcess(url("keeper"), arguments: ["--migrate"])
        try drains(daemon, database, token: "aa")
        #expect(
            try database.psql(
                "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'keeper'",
                user: "postgres") == "t")
        #expect(daemon.stop() == 0)
        let stranger = try DaemonProcess(url("stranger"))
        try eventually("another authority's certificate is refused") {
            stranger.logged.contains("certificate authentication failed")
        }
        #expect(stranger.stop() == 0)
        let elsewhere = try DaemonProcess(url("keeper", host: "db.example"))
        try eventually("a server of another name is refused") {
            elsewhere.logged.contains("does not match host name")
        }
        #expect(elsewhere.stop() == 0)
    }

    @Test func `it uses the primary of several hosts, also after a failover, and loses no result`()
        throws
    {
        let first = try TestCluster()
        let database = try prepare(first, role: "keeper SUPERUSER")
        let second = try TestCluster(standbyOf: first)
        // The standby is first in the list: libpq's own default would use it.
        let daemon = try DaemonProcess(
            "postgresql://keeper@\(second.folder.replacingOccurrences(of: "/", with: "%2F")):\(second.port),\(first.folder.replacingOccurrences(of: "/", with: "%2F")):\(first.port)/d",
            arguments: ["--migrate"])
        try drains(daemon, database, token: "aa")
        // The queue fills while the daemon is stopped, and is replicated before the primary goes away.
        daemon.signal(SIGSTOP)
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', to_hex(4096 + i), 410, \(goneBody) FROM generate_series(1, 1000) AS i",
            user: "postgres")
        let written = try database.psql("SELECT pg_current_wal_lsn()", user: "postgres")
        let standby = TestDatabase(cluster: second, name: "d")
        try eventually("everything is replicated") {
            try standby.psql("SELECT pg_last_wal_replay_lsn() >= '\(written)'", user: "postgres") == "t"
        }
        first.stop()
        try second.promote()
        daemon.signal(SIGCONT)
        try eventually("the queue is drained on the new primary") {
            try standby.psql("SELECT count(*) FROM tokenkeeper.send_result", user: "postgres") == "0"
        }
        #expect(try standby.psql("SELECT sum(results) FROM tokenkeeper.result_stat", user: "postgres") == "1001")
        #expect(daemon.stop() == 0)
    }

    @Test func `a lone standby is refused with the reason, and its status can be read`() throws {
        let first = try TestCluster()
        _ = try prepare(first, role: "keeper SUPERUSER")
        let migrated = try ProgramRun([DaemonProcess.program, "migrate", "--database-url", first.url(database: "d")])
        #expect(migrated.status == 0 && migrated.errors.contains("this role is a superuser and owns what it creates"))
        let second = try TestCluster(standbyOf: first)
        let url = second.url(database: "d")
        let status = try ProgramRun([DaemonProcess.program, "status", "--database-url", url])
        #expect(status.status == 0 && status.output.contains("no daemon has ever run"), "\(status.errors)")
        let daemon = try DaemonProcess(url)
        try eventually("it says why it waits") { daemon.logged.contains("server is in hot standby mode") }
        #expect(daemon.stop() == 0)
        // A service file overrides our default.
        let services = try file("services", "[push]\ntarget_session_attrs=read-write\n")
        let byService = try DaemonProcess(url + "&service=push", environment: ["PGSERVICEFILE": services])
        try eventually("it says why it waits, in other words") { byService.logged.contains("session is read-only") }
        #expect(byService.stop() == 0)
    }

    @Test func `a server that stops responding counts as lost, even if a cancel request hangs`() throws {
        let cluster = try TestCluster()
        let suppresses = Silences()
        var connection = try Connection(
            to: DatabaseAddress(cluster.url(database: "postgres")), writes: true,
            patience: .init(usual: .seconds(2), stoppable: .seconds(3))
        ) { _, silent in suppresses.note(silent) }
        try cluster.signal(SIGSTOP)
        defer { try? cluster.signal(SIGCONT) }
        let bell = Wakeup()
        bell.ring()
        for stop in [nil, bell] {
            do {
                _ = try connection.query("SELECT 1", cancelWhen: stop).count
                Issue.record("it has answered")
            } catch {
                #expect(error.message.hasPrefix("the server has not answered for"))
            }
            // The next statement needs an idle connection.
            try cluster.signal(SIGCONT)
            connection = try Connection(
                to: DatabaseAddress(cluster.url(database: "postgres")), writes: true,
                patience: .init(usual: .seconds(2), stoppable: .seconds(3))
            ) { _, silent in suppresses.note(silent) }
            try cluster.signal(SIGSTOP)
        }
        #expect(suppresses.longest >= .seconds(1), "it has reported meanwhile")
    }

    @Test func `with a deadline, a question has half of the time that is left, and then the connection is lost`() throws
    {
        let address = try DatabaseAddress(TestCluster.shared.database().url())
        var soon = try Connection(to: address, until: .now + .seconds(4))
        do {
            _ = try soon.snapshot(within: .seconds(600)) { connection throws(DatabaseError) in
                try connection.query("SELECT 1 FROM pg_sleep(600)").count
            }
            Issue.record("it has answered")
        } catch {
            #expect(error.sqlState == "57014")
        }
        var late = try Connection(to: address, until: .now)
        do {
            _ = try late.query("SELECT 1 FROM pg_sleep(600)").count
            Issue.record("it has answered")
        } catch {
            #expect(error.message.hasPrefix("the server has not answered for"))
        }
    }

    @Test func `migrate needs a named database, and refuses the owner none`() throws {
        let cluster = try TestCluster()
        func run(_ arguments: String...) throws -> ProgramRun {
            try ProgramRun(
                [DaemonProcess.program] + arguments,
                environment: ["PGHOST": cluster.folder, "PGPORT": "\(cluster.port)", "PGUSER": "postgres"])
        }
        for command in ["migrate", "grants"] {
            let unnamed = try run(command)
            #expect(unnamed.status == 78 && unnamed.errors.contains("no database is named"), "\(unnamed.errors)")
        }
        let named = try run("migrate", "--database-url", "dbname=postgres", "--owner", "none")
        #expect(named.status == 69 && named.errors.contains("cannot SET ROLE to"), "\(named.errors)")
        #expect(
            try TestDatabase(cluster: cluster, name: "postgres").psql(
                "SELECT count(*) FROM pg_namespace WHERE nspname = 'tokenkeeper'", user: "postgres") == "0")
    }

    @Test func `an administrator migrates for an owner who cannot log in`() throws {
        let cluster = try TestCluster()
        var admin = try cluster.connect(database: "postgres")
        try admin.execute("CREATE ROLE push_owner CREATEROLE")
        try admin.execute("CREATE DATABASE d OWNER push_owner")
        for command in ["migrate", "grants"] {
            let run = try ProgramRun([
                DaemonProcess.program, command, "--owner", "push_owner", "--database-url", cluster.url(database: "d"),
            ])
            #expect(run.status == 0 && run.errors == "", "\(run.errors)")
            #expect(
                run.output.hasPrefix("database d on \(cluster.folder):\(cluster.port), as push_owner\n"),
                "\(run.output)")
            // `grants` creates the roles.
            let mayCreate = try admin.scalar("SELECT rolcreaterole FROM pg_roles WHERE rolname = 'push_owner'")
            #expect(mayCreate == (command == "grants" ? "f" : "t"))
            #expect(run.output.contains("took CREATEROLE from push_owner") == (command == "grants"))
        }
        let database = TestDatabase(cluster: cluster, name: "d")
        #expect(
            try database.psql(
                "SELECT string_agg(DISTINCT pg_get_userbyid(relowner), ',') FROM pg_class WHERE relnamespace = 'tokenkeeper'::regnamespace",
                user: "postgres") == "push_owner")
        let unknown = try ProgramRun([
            DaemonProcess.program, "migrate", "--owner", "nobody", "--database-url", cluster.url(database: "d"),
        ])
        #expect(unknown.status == 64 && unknown.errors.contains("role \"nobody\" does not exist"), "\(unknown.errors)")
    }
}

/// As on a managed server: its administrator may create roles and databases, and is no superuser.
@Suite(.ownThread) struct `An administrator without superuser` {
    private func run(_ cluster: TestCluster, _ arguments: [String], as user: String = "dba") throws -> ProgramRun {
        try ProgramRun(
            [DaemonProcess.program] + arguments + ["--database-url", cluster.url(database: "d", user: user)])
    }

    @Test(arguments: [false, true])
    func `migrates for an owner who may not create roles`(printed: Bool) throws {
        let cluster = try TestCluster()
        var admin = try cluster.connect(database: "postgres")
        try admin.execute("CREATE ROLE dba LOGIN CREATEROLE CREATEDB")
        var dba = try cluster.connect(database: "postgres", user: "dba")
        try dba.execute("CREATE ROLE push_owner CREATEROLE; GRANT push_owner TO dba")
        try dba.execute("CREATE DATABASE d OWNER push_owner")
        let migration = ["migrate", "--owner", "push_owner", "--grants"]
        if printed {
            let script = try run(cluster, migration + ["--print"])
            #expect(script.status == 0, "\(script.errors)")
            _ = try TestCluster.run(
                ["psql", "-Xq", "-d", cluster.url(database: "d", user: "dba")], input: script.output)
        } else {
            let migrated = try run(cluster, migration)
            #expect(migrated.status == 0 && migrated.errors == "", "\(migrated.errors)")
        }
        #expect(try admin.scalar("SELECT rolcreaterole FROM pg_roles WHERE rolname = 'push_owner'") == "f")
        #expect(try run(cluster, ["grants", "--owner", "push_owner"]).status == 0)
        try dba.execute("CREATE ROLE push_sender LOGIN IN ROLE tokenkeeper_sender")
        let database = TestDatabase(cluster: cluster, name: "d")
        #expect(
            try database.psql(
                "SELECT string_agg(DISTINCT pg_get_userbyid(relowner), ',') FROM pg_class WHERE relnamespace = 'tokenkeeper'::regnamespace",
                user: "postgres") == "push_owner")
        try database.psql("INSERT INTO tokenkeeper.send_result (topic) VALUES ('t')", user: "push_sender")
    }

    @Test func `who owns the schema keeps the right to create roles, and is told so`() throws {
        let cluster = try TestCluster()
        var admin = try cluster.connect(database: "postgres")
        try admin.execute("CREATE ROLE dba LOGIN CREATEROLE")
        try admin.execute("CREATE DATABASE d OWNER dba")
        let migrated = try run(cluster, ["migrate", "--grants"])
        #expect(migrated.status == 0 && migrated.errors.contains("ALTER ROLE dba NOCREATEROLE;"), "\(migrated)")
        #expect(try admin.scalar("SELECT rolcreaterole FROM pg_roles WHERE rolname = 'dba'") == "t")
        let doctor = try run(cluster, ["doctor"])
        #expect(
            doctor.output.contains("dba owns the schema, whose functions run with its rights, and has CREATEROLE")
                && doctor.output.contains("ALTER ROLE dba NOCREATEROLE;"), "\(doctor.output)")
    }
}

/// The longest silence that was reported.
private final class Silences: Sendable {
    private let value = Mutex(Duration.zero)
    func note(_ silent: Duration) { value.withLock { $0 = max($0, silent) } }
    var longest: Duration { value.withLock { $0 } }
}
