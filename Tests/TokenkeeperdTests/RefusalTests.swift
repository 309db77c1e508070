import Foundation
import LedgerTestSupport
import TestThreads
import Testing

/// What PostgreSQL refuses until a person acts. The daemon says so once, keeps its connections, and does everything else.
@Suite(.ownThread) struct `What PostgreSQL refuses` {
    private func count(_ words: String, in daemon: DaemonProcess) -> Int {
        daemon.logged.components(separatedBy: words).count - 1
    }

    /// The daemon's sessions: two, until it connects again.
    private func sessions(_ database: TestDatabase) throws -> String {
        try database.psql(
            """
            SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM pg_stat_activity
            WHERE usename = 'a_daemon' AND datname = current_database()
            """)
    }

    @Test func `a look for status that is refused is logged once, and keeps nothing else from being done`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("REVOKE SELECT ON tokenkeeper.sweep_progress FROM tokenkeeper_daemon")
        let daemon = try DaemonProcess(database.url(), settings: ["sweep.interval=off"])
        try eventually("it is refused") { daemon.logged.contains("this role lacks a right") }
        let before = try sessions(database)
        try eventually("the other looks are stored, again and again") {
            try database.psql(
                """
                SELECT count(*) FROM tokenkeeper.status_cache
                WHERE source = 'cleanup held back' AND as_of > (SELECT min(started_at) + interval '5 seconds' FROM tokenkeeper.daemon)
                """) == "1"
        }
        #expect(try sessions(database) == before)
        #expect(count("this role lacks a right", in: daemon) == 1)
        #expect(daemon.stop() == 0)
    }
}
