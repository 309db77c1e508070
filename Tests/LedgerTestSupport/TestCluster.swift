import Foundation
import TestRun
import TokenLedger

/// A private PostgreSQL: `initdb` in a temporary folder, a Unix socket and a port of 127.0.0.1. It ends with the process that
/// started it, even after a `kill -9`, because it runs under a shell that reads from our pipe.
public final class TestCluster: @unchecked Sendable {  // Immutable, behind the lock, or set before others know it.
    public let folder: String
    public var port: Int { lock.withLock { chosenPort } }
    private var chosenPort: Int
    private let lock = NSLock()
    /// PostgreSQL copies a template to one database at a time.
    private let creating = NSLock()
    private var keepers: [(shell: Process, lifeline: Pipe)] = []
    private let options: [String]
    /// Of the server's processes, beside ours.
    private let environment: [String: String]
    /// Only of the shared cluster: of others, tests need one database or two.
    private var spares: SpareDatabases?

    /// The cluster that all tests of a run share.
    public static let shared: TestCluster = {
        let cluster = patient()
        cluster.spares = SpareDatabases(6) { [unowned cluster] in try cluster.create(migrated: true) }
        return cluster
    }()

    /// For tests of erasures. An erasure is finished when every transaction of its cluster from before has ended, and the tests of ``shared`` have some that
    /// take half a minute on a busy machine.
    public static let ofErasures = patient()

    /// A batch leaves the rest to the next one after half of `deadlock_timeout`. In a run with many tests at once, a process may stand still for
    /// half of PostgreSQL's usual second.
    private static func patient() -> TestCluster {
        do {
            return try prepared(options: ["deadlock_timeout=5s"])
        } catch {
            fatalError("no cluster for the tests: \(error)")
        }
    }

    /// A cluster with a migrated template database.
    ///
    /// - Parameters:
    ///   - options: More settings for the server, `name=value`.
    ///   - environment: More variables of the server.
    public static func prepared(options: [String] = [], environment: [String: String] = [:]) throws -> TestCluster {
        let cluster = try TestCluster(options: options, environment: environment)
        var admin = try cluster.connect(database: "postgres")
        try admin.run("CREATE ROLE owner LOGIN CREATEROLE")
        try admin.run("CREATE DATABASE template OWNER owner")
        var owner = try cluster.connect(database: "template", user: "owner")
        try Migrator(daemon: Version(major: 0, minor: 1, patch: 0)).migrate(&owner, createsRoles: true) { _ in }
        for role in ["sender", "app", "reader", "monitor", "operator", "daemon"] {
            try owner.run("CREATE ROLE a_\(role) LOGIN IN ROLE tokenkeeper_\(role)")
        }
        try admin.run("ALTER ROLE owner NOCREATEROLE")
        return cluster
    }

    /// PostgreSQL refuses to run as root. Then it runs as the user of Debian's package.
    static let asUser: [String] =
        getuid() == 0 ? ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] : []

    /// The version of the server, and the folder of its programs: the newest that is installed.
    fileprivate static let (version, programs): (Int, String) = {
        let root = "/usr/lib/postgresql"
        // `make test-matrix` brings others.
        if let folder = ProcessInfo.processInfo.environment["TEST_POSTGRESQL"] {
            let name = URL(fileURLWithPath: folder).lastPathComponent
            guard let version = Int(name) else { fatalError("TEST_POSTGRESQL must end in a version: \(folder)") }
            return (version, "\(folder)/bin")
        }
        let versions = (try? FileManager.default.contentsOfDirectory(atPath: root)) ?? []
        guard let newest = versions.compactMap(Int.init).max() else { fatalError("no PostgreSQL below \(root)") }
        return (newest, "\(root)/\(newest)/bin")
    }()

    /// - Parameters:
    ///   - rules: Lines for pg_hba.conf, before the line that trusts everybody.
    ///   - options: More settings for the server, `name=value`.
    ///   - files: More files for the data folder.
    ///   - environment: More variables of the server.
    public init(
        rules: [String] = [], options: [String] = [], files: [String: String] = [:], environment: [String: String] = [:]
    ) throws {
        folder = NSTemporaryDirectory() + "tk-\(UUID().uuidString.prefix(8))"
        chosenPort = Self.likelyFreePort()
        self.options = options
        self.environment = environment
        try Self.makeFolder(folder)
        try Self.run(Self.asUser + ["cp", "-a", try Self.blank.get().folder + "/data", "\(folder)/data"])
        for (name, text) in files { try write(text, to: name) }
        if !rules.isEmpty {
            let trusting = try String(contentsOfFile: "\(folder)/data/pg_hba.conf", encoding: .utf8)
            try write(rules.joined(separator: "\n") + "\n" + trusting, to: "pg_hba.conf")
        }
        try startOnFreePort()
    }

    /// The output of `initdb`, made once: a copy takes a tenth of the time.
    private static let blank = Result { try BlankCluster() }

    /// A standby of another cluster.
    ///
    /// - Parameter slot: The replication slot that is made for it; nil for none.
    public init(standbyOf primary: TestCluster, slot: String? = nil) throws {
        folder = NSTemporaryDirectory() + "tk-\(UUID().uuidString.prefix(8))"
        chosenPort = Self.likelyFreePort()
        options = []
        environment = primary.environment
        try Self.makeFolder(folder)
        try Self.run(
            Self.asUser + [
                "\(Self.programs)/pg_basebackup", "--pgdata=\(folder)/data", "--write-recovery-conf", "--no-sync",
                "--checkpoint=fast", "--dbname=postgresql://postgres@/?host=\(primary.folder)&port=\(primary.port)",
            ] + (slot.map { ["--create-slot", "--slot=\($0)"] } ?? []))
        try startOnFreePort()
    }

    static func makeFolder(_ folder: String) throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        if getuid() == 0 { try run(["chown", "postgres", folder]) }
    }

    private func write(_ text: String, to name: String) throws {
        try Self.run(Self.asUser + ["sh", "-c", "umask 077; cat >\(folder)/data/\(name)"], input: text)
    }

    /// Promotes a standby to primary.
    public func promote() throws {
        try Self.run(Self.asUser + ["\(Self.programs)/pg_ctl", "promote", "-D", "\(folder)/data", "-w"])
    }

    /// Sends a signal to all of the server's processes.
    public func signal(_ number: Int32) throws {
        let main = try String(contentsOfFile: "\(folder)/data/postmaster.pid", encoding: .utf8)
        guard let id = main.split(separator: "\n").first.flatMap({ Int32($0) }) else { throw TestFailure("no server") }
        let children = try Self.run(["pgrep", "-P", "\(id)"]).split(separator: "\n").compactMap { Int32($0) }
        for process in [id] + children { kill(process, number) }
    }

    deinit {
        stop()
        try? FileManager.default.removeItem(atPath: folder)
    }

    /// Starts the server for the first time, on another port if the port is taken.
    private func startOnFreePort() throws {
        for _ in 1...10 {
            do {
                return try start()
            } catch is PortTaken {
                lock.withLock { chosenPort = Self.likelyFreePort() }
            }
        }
        throw TestFailure("no free port")
    }

    private struct PortTaken: Error {}

    /// Starts the server and waits until it accepts connections.
    public func start() throws {
        let log = folder + "/log"
        let logged = (try? Data(contentsOf: URL(fileURLWithPath: log)).count) ?? 0
        let server = Process()
        server.executableURL = URL(fileURLWithPath: "/bin/sh")
        let postgres =
            (Self.asUser + [
                "\(Self.programs)/postgres", "-D", "\(folder)/data", "-k", folder, "-p", "\(port)",
                "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=200",
                "-c", "shared_buffers=256MB", "-c", "max_prepared_transactions=20", "-c", "wal_level=logical",
                // With hundreds of databases, the launcher would start ten workers a second.
                "-c", "autovacuum_naptime=1h", "-c", "full_page_writes=off",
            ] + options.flatMap { ["-c", $0] }).joined(separator: " ")
        // The shell's background job has no standard input, so the pipe ends when we do.
        server.arguments = [
            "-c",
            "\(postgres) >>\(folder)/log 2>&1 & p=$!; cat >/dev/null; kill -QUIT $p 2>/dev/null && wait $p; rm -rf \(folder)",
        ]
        server.environment = ProcessInfo.processInfo.environment.merging(environment) { $1 }
        let lifeline = Pipe()
        server.standardInput = lifeline
        // The shell outlives us while it removes the folder: a reader of our output must not wait for that.
        server.standardOutput = FileHandle.nullDevice
        server.standardError = FileHandle.nullDevice
        try server.run()
        lock.withLock { keepers.append((server, lifeline)) }
        try eventually("the server takes connections") {
            if (try? self.connect(database: "postgres", writes: false)) != nil { return true }
            let news = (try? Data(contentsOf: URL(fileURLWithPath: log)).dropFirst(logged)) ?? Data()
            if String(decoding: news, as: UTF8.self).contains("could not create any TCP/IP sockets") {
                throw PortTaken()
            }
            return false
        }
    }

    /// Stops the server, as `pg_ctl` does; `start` starts it again.
    public func stop(mode: String = "immediate") {
        _ = try? Self.run(Self.asUser + ["\(Self.programs)/pg_ctl", "stop", "-D", "\(folder)/data", "-m", mode, "-w"])
    }

    /// A connection string for libpq.
    public func url(database: String, user: String = "postgres", port: Int? = nil, overTCP: Bool = false) -> String {
        "postgresql://\(user)@/\(database)?host=\(overTCP ? "127.0.0.1" : folder)&port=\(port ?? self.port)"
    }

    /// - Parameter writes: Whether the primary is needed.
    public func connect(database: String, user: String = "postgres", writes: Bool = true) throws -> Connection {
        try Connection(asInPsql: DatabaseAddress(url(database: database, user: user)), writes: writes)
    }

    /// A new database in a prepared cluster: migrated, with roles and the logins a_sender, a_app, a_reader, a_operator, a_daemon.
    public func database(migrated: Bool = true) throws -> TestDatabase {
        let name =
            if migrated, let spares { try spares.take() } else { try create(migrated: migrated) }
        TestResources.note { [weak self] in
            self?.activity(in: name) ?? ""
        } end: { [weak self] in
            _ = self?.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '\(name)'")
        }
        return TestDatabase(cluster: self, name: name)
    }

    private func create(migrated: Bool) throws -> String {
        let name = "t_\(UUID().uuidString.prefix(8).lowercased())"
        // Files are copied in less time than pages are, and without WAL: 14 MB of it for each of a thousand databases.
        let copied = " TEMPLATE template" + (Self.version >= 15 ? " STRATEGY file_copy" : "")
        try creating.withLock {
            var admin = try connect(database: "postgres")
            try admin.run("CREATE DATABASE \(name) OWNER owner" + (migrated ? copied : ""))
        }
        return name
    }

    /// What the sessions of a database are doing.
    public func activity(in database: String) -> String {
        let rows = ask(
            """
            SELECT pid, usename, state, wait_event_type, wait_event, pg_blocking_pids(pid), left(query, 500)
            FROM pg_stat_activity WHERE datname = '\(database)' ORDER BY pid
            """)
        return "the sessions of \(database):\n\(rows)"
    }

    /// What a statement returns, from a session that does not hang: the server may.
    private func ask(_ sql: String) -> String {
        Stacks.shell("timeout 10 psql -XAt -d '\(url(database: "postgres"))&connect_timeout=5' -c \"\(sql)\"")
    }

    /// A new database in a cluster that is not prepared: it belongs to the superuser, and has neither our schema nor our roles.
    public func emptyDatabase() throws -> TestDatabase {
        var admin = try connect(database: "postgres")
        try admin.run("CREATE DATABASE d")
        return TestDatabase(cluster: self, name: "d")
    }

    /// A port outside the kernel's ephemeral range, because a restarted cluster needs the same port again.
    private static func likelyFreePort() -> Int { Int.random(in: 16_384..<32_768) }

    /// A port of 127.0.0.1 that nobody listens on.
    public static func freePort() throws -> Int {
        let listener = socket(AF_INET, Int32(SOCK_STREAM.rawValue), 0)
        defer { close(listener) }
        var address = sockaddr_in(family: AF_INET, port: 0, loopback: ())
        let bound = withUnsafeMutablePointer(to: &address) { pointer in
            pointer.withMemoryRebound(to: sockaddr.self, capacity: 1) { pointer in
                var length = socklen_t(MemoryLayout<sockaddr_in>.size)
                return bind(listener, pointer, length) == 0 && getsockname(listener, pointer, &length) == 0
            }
        }
        guard bound else { throw TestFailure("no free port") }
        return Int(UInt16(bigEndian: address.sin_port))
    }

    @discardableResult
    public static func run(_ command: [String], input: String? = nil) throws -> String {
        let finished = try ProgramRun(command, input: input)
        guard finished.status == 0 else {
            throw TestFailure("\(command.joined(separator: " ")): exit \(finished.status): \(finished.errors)")
        }
        return finished.output
    }
}

extension sockaddr_in {
    init(family: Int32, port: Int, loopback: Void) {
        self.init()
        sin_family = sa_family_t(family)
        sin_port = in_port_t(port).bigEndian
        sin_addr.s_addr = UInt32(0x7F00_0001).bigEndian
    }
}

/// The files of a cluster that has never been started. They are deleted with this process.
private final class BlankCluster: Sendable {
    let folder = NSTemporaryDirectory() + "tk-blank-\(UUID().uuidString.prefix(8))"
    private let lifeline = Pipe()

    init() throws {
        try TestCluster.makeFolder(folder)
        let keeper = Process()
        keeper.executableURL = URL(fileURLWithPath: "/bin/sh")
        keeper.arguments = ["-c", "cat >/dev/null; rm -rf \(folder)"]
        keeper.standardInput = lifeline
        keeper.standardOutput = FileHandle.nullDevice
        keeper.standardError = FileHandle.nullDevice
        try keeper.run()
        try TestCluster.run(
            TestCluster.asUser + [
                "\(TestCluster.programs)/initdb", "--pgdata=\(folder)/data", "--username=postgres", "--auth=trust",
                "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync",
            ])
    }
}

public struct TestFailure: Error, CustomStringConvertible {
    public let description: String
    public init(_ description: String) { self.description = description }
}

/// A program that has run to its end.
public struct ProgramRun {
    public let status: Int32
    public let output: String
    public let errors: String

    public init(_ command: [String], input: String? = nil, environment: [String: String] = [:]) throws {
        let program = Process()
        program.executableURL = URL(fileURLWithPath: "/usr/bin/env")
        program.arguments = command
        program.environment = ProcessInfo.processInfo.environment.merging(environment) { $1 }
        let (input, output, errors) = (input.map { Data($0.utf8) }, Pipe(), Pipe())
        program.standardOutput = output
        program.standardError = errors
        let feed = Pipe()
        program.standardInput = feed
        try program.run()
        // Weak, or the pipes of each program would stay open until the test ends.
        TestResources.note { [weak program] in
            if let program, program.isRunning { Stacks.of(program.processIdentifier) } else { "" }
        } end: { [weak program] in
            if let program, program.isRunning { kill(program.processIdentifier, SIGKILL) }
        }
        let reading = DispatchQueue(label: "errors")
        nonisolated(unsafe) var complaints = Data()
        let done = DispatchSemaphore(value: 0)
        reading.async {
            complaints = errors.fileHandleForReading.readDataToEndOfFile()
            done.signal()
        }
        if let input { try feed.fileHandleForWriting.write(contentsOf: input) }
        try feed.fileHandleForWriting.close()
        let text = output.fileHandleForReading.readDataToEndOfFile()
        done.wait()
        program.waitUntilExit()
        status = program.terminationReason == .uncaughtSignal ? -program.terminationStatus : program.terminationStatus
        self.output = String(decoding: text, as: UTF8.self)
        self.errors = String(decoding: complaints, as: UTF8.self)
    }
}
