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

    @Test func `a missing function that is none of ours is logged as a refusal, and not a reason to connect again`()
        throws
    {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            CREATE SEQUENCE tries;
            CREATE FUNCTION notify_crm() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
                BEGIN PERFORM nextval('public.tries'); PERFORM public.tell_crm(1); RETURN new; END $$;
            CREATE TRIGGER notify_crm BEFORE INSERT OR UPDATE ON tokenkeeper.ledger FOR EACH ROW EXECUTE FUNCTION notify_crm();
            """)
        let daemon = try DaemonProcess(database.url())
        try eventually("it works") { try database.psql("SELECT live_daemons FROM tokenkeeper.status") == "1" }
        try database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, \(goneBody))",
            user: "a_sender")
        try eventually("it is refused") { Int(try database.psql("SELECT last_value FROM tries")) ?? 0 > 1 }
        let before = try sessions(database)
        #expect(before.split(separator: " ").count == 2, "\(before)")
        try eventually("it tries again") { Int(try database.psql("SELECT last_value FROM tries")) ?? 0 > 7 }
        #expect(try sessions(database) == before)
        #expect(count("PostgreSQL refuses; trying again", in: daemon) == 1)
        #expect(daemon.logged.contains("function public.tell_crm(integer) does not exist"))
        try eventually("status says so") {
            try database.psql("SELECT warnings::text FROM tokenkeeper.status").contains(
                "results stay in the queue because PostgreSQL reports: function public.tell_crm(integer) does not exist"
            )
        }
        try database.psql("CREATE FUNCTION tell_crm(integer) RETURNS void LANGUAGE sql AS ''")
        try eventually("the result is recorded") {
            try database.psql("SELECT count(*) FROM tokenkeeper.suppressed_token") == "1"
        }
        try eventually("it says so") { daemon.logged.contains("PostgreSQL is back") }
        #expect(try sessions(database) == before)
        #expect(daemon.stop() == 0)
    }

    @Test func `a look for status that is refused is logged once, and keeps nothing else from being done`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("REVOKE SELECT ON tokenkeeper.sweep_progress FROM tokenkeeper_daemon")
        let daemon = try DaemonProcess(database.url(), settings: ["sweep.interval=off"])
        try eventually("it is refused") { daemon.logged.contains("this role lacks a right") }
        let before = try sessions(database)
        #expect(before.split(separator: " ").count == 2, "\(before)")
        try eventually("the other looks are stored, again and again", within: 120) {
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
