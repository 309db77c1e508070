import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import tokenkeeperd

@Suite(.ownThread) struct `A chore that fails` {
    @Test func `is named in status and on ready, and keeps neither sweeps nor undos from running`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("REVOKE EXECUTE ON FUNCTION tokenkeeper.note_stale_waves() FROM tokenkeeper_daemon")
        let port = try TestCluster.freePort()
        let daemon = try DaemonProcess(database.url(), settings: ["metrics.listen=127.0.0.1:\(port)"])
        defer { daemon.stop() }
        let chore =
            "a daemon cannot look for waves of 410s: permission denied for function note_stale_waves (SQLSTATE 42501)"
        try eventually("status names it") {
            try database.psql("SELECT array_to_string(warnings, '; ') FROM tokenkeeper.status").contains(chore)
        }
        func ready() throws -> String {
            try ProgramRun(["curl", "-s", "-w", "%{http_code}", "http://127.0.0.1:\(port)/ready"]).output
        }
        #expect(try ready().contains(chore) && ready().hasSuffix("503"))
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 't', registered_at => '2026-01-01Z');
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'aa', 410, '{"reason":"Unregistered","timestamp":1794000000123}')
            """)
        try eventually("the 410 is recorded") { try database.psql("SELECT state FROM tokenkeeper.token") == "stale" }
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', now() - interval '1 hour', now(), 'stale'), tokenkeeper.request_sweep()",
            user: "a_operator")
        try eventually("the 410 is undone") { try database.psql("SELECT state FROM tokenkeeper.token") == "active" }
        try eventually("it has swept") {
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.sweep_run WHERE trigger = 'sql' AND outcome = 'finished'")
                == "1"
        }
        try database.psql("GRANT EXECUTE ON FUNCTION tokenkeeper.note_stale_waves() TO tokenkeeper_daemon")
        try eventually("all is well") {
            try ready() == "ok\n200"
                && !database.psql("SELECT array_to_string(warnings, '; ') FROM tokenkeeper.status").contains(chore)
        }
    }

    @Test func `of the sender keeps single requests from nothing`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...3)
        try stage.database.psql("REVOKE EXECUTE ON FUNCTION tokenkeeper.end_campaigns() FROM tokenkeeper_daemon")
        let daemon = try stage.daemon()
        defer { daemon.stop() }
        let chore = "a daemon cannot look for campaigns: permission denied for function end_campaigns (SQLSTATE 42501)"
        func warnings() throws -> String {
            try stage.database.psql("SELECT array_to_string(warnings, '; ') FROM tokenkeeper.status")
        }
        try eventually("status names it") { try warnings().contains(chore) }
        let campaign = try stage.campaign()
        try stage.enqueue()
        try stage.settled()
        #expect(try stage.results(200) == 3)
        #expect(try stage.state(campaign) != "ended")
        try stage.database.psql("GRANT EXECUTE ON FUNCTION tokenkeeper.end_campaigns() TO tokenkeeper_daemon")
        try stage.ended(campaign)
        #expect(try stage.results(200) == 6)
        try eventually("all is well") { try !warnings().contains(chore) }
    }
}
