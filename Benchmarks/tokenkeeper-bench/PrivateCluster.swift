import Foundation
import LedgerTestSupport
import TokenLedger

/// The PostgreSQL that is measured: private, durable, with checkpoints and vacuum kept out of the timed sections.
final class PrivateCluster {
    let cluster: TestCluster
    let settings: [String]
    private var copies = 0

    /// A quarter of the memory, 4 GB at most.
    static let sharedBuffersInMB = min(4096, Int(ProcessInfo.processInfo.physicalMemory >> 20) / 4)

    /// - Parameters:
    ///   - more: Settings in addition to the usual ones, or instead of them, `name=value`.
    ///   - hasPgQ: Whether databases have PgQ, one of the peers of the drain.
    init(more: [String] = [], sharedBuffersInMB: Int = sharedBuffersInMB, hasPgQ: Bool = false) throws {
        let usual = [
            "fsync=on", "full_page_writes=on", "synchronous_commit=on", "shared_buffers=\(sharedBuffersInMB)MB",
            "max_wal_size=24GB", "min_wal_size=2GB", "checkpoint_timeout=1d", "autovacuum=off", "work_mem=64MB",
            "maintenance_work_mem=512MB", "jit=off", "wal_level=replica", "max_wal_senders=0", "max_connections=50",
        ]
        func name(_ setting: String) -> Substring { setting.prefix { $0 != "=" } }
        settings = usual.filter { !more.map(name).contains(name($0)) } + more
        let certificate = try Certificate()
        cluster = try TestCluster(
            options: settings + ["ssl=on"],
            files: ["server.crt": certificate.certificate, "server.key": certificate.key])
        let admin = try session("postgres")
        try admin.run("CREATE ROLE owner LOGIN CREATEROLE")
        try admin.run("CREATE DATABASE bare OWNER owner")
        var owner = try cluster.connect(database: "bare", user: "owner")
        try Migrator(daemon: Version(major: 0, minor: 1, patch: 0)).migrate(&owner, createsRoles: true) { _ in }
        try admin.run("ALTER ROLE owner NOCREATEROLE")
        try admin.run("CREATE ROLE a_daemon LOGIN IN ROLE tokenkeeper_daemon")
        let database = try session("bare")
        try database.run("CREATE EXTENSION pg_prewarm")
        if hasPgQ { try database.run("CREATE EXTENSION pgq") }
    }

    func session(_ database: String, user: String = "postgres") throws -> Session {
        Session(try cluster.connect(database: database, user: user))
    }

    /// A database with a filled ledger, to be copied.
    func template(_ workload: Workload) throws -> String {
        let name = "ledger_\(workload.tokens)"
        try session("postgres").run("CREATE DATABASE \(name) TEMPLATE bare STRATEGY file_copy")
        try workload.fill(session(name))
        try session(name).run("SELECT tokenkeeper.recompute_tokens()")
        return name
    }

    /// A copy of the database under another name, with its ledger in memory.
    func copy(of template: String) throws -> Database {
        copies += 1
        let name = "copy_\(copies)"
        try session("postgres").run("CREATE DATABASE \(name) TEMPLATE \(template) STRATEGY file_copy")
        let database = Database(cluster: self, name: name)
        try database.session().run(
            """
            SELECT pg_prewarm('tokenkeeper.ledger'), pg_prewarm('tokenkeeper.ledger_pkey'),
                   pg_prewarm('tokenkeeper.suppression'), pg_prewarm('tokenkeeper.suppression_pkey')
            """)
        return database
    }

    func drop(_ name: String) throws {
        try session("postgres").run("DROP DATABASE \(name) WITH (FORCE)")
    }
}
