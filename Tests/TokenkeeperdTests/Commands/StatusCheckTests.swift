import LedgerTestSupport
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

@Suite(.ownThread) struct `The status as a monitoring plug-in` {
    private func report(warnings: [String] = [], critical: [String] = []) -> StatusReport {
        StatusReport(
            json: "{}",
            fields: [
                .init(name: "queue_depth", kind: .number, value: "7"),
                .init(name: "oldest_result_age", kind: .seconds, value: "3"),
                .init(name: "last_sweep_outcome", kind: .text, value: "finished"),
                .init(name: "outbox_age", kind: .seconds, value: nil),
            ], warnings: warnings, criticalWarnings: critical)
    }

    @Test func `the worst warning decides, and comes first`() {
        let numbers = " | queue_depth=7 oldest_result_age=3s"
        let fine = StatusCheck(report())
        #expect(fine.state == .ok && fine.line == "TOKENKEEPER OK - no warnings" + numbers)
        let ticket = StatusCheck(report(warnings: ["a", "b"]))
        #expect(ticket.state == .warning && ticket.line == "TOKENKEEPER WARNING - a; b" + numbers)
        let page = StatusCheck(report(warnings: ["a", "b"], critical: ["b"]))
        #expect(page.state == .critical && page.line == "TOKENKEEPER CRITICAL - b; a" + numbers)
        #expect(StatusCheck(unknown: "away").line == "TOKENKEEPER UNKNOWN - away")
    }

    @Test func `the line stays short, and a topic cannot break it`() {
        let many = StatusCheck(report(warnings: ["a|b\n", "2", "3", "4", "5", "6"]))
        #expect(
            many.line.hasPrefix("TOKENKEEPER WARNING - a/b\u{FFFD}; 2; 3; 4; and 2 more: see `tokenkeeperd status` | "))
    }

    @Test func `a real database gives 0, 1, 2 and 3`() throws {
        let database = try TestCluster.shared.database()
        let never = try database.command("status", "--check", as: "a_reader")
        #expect(
            never.status == 2
                && never.output.hasPrefix("TOKENKEEPER CRITICAL - no daemon has ever run on this database | "),
            "\(never)")
        let daemon = try database.daemon()
        let fine = try database.command("status", "--check", as: "a_reader")
        #expect(fine.status == 0 && fine.output.hasPrefix("TOKENKEEPER OK - no warnings | "), "\(fine)")
        #expect(fine.output.contains(" live_daemons=1 ") && fine.output.split(separator: "\n").count == 1)
        #expect(fine.output.contains(" failed_sends=0") && fine.output.contains(" requests=0"))

        try database.psql(
            "INSERT INTO tokenkeeper.rejected_result (environment, topic, token, status, queued_at, error) VALUES ('production', 't', 'zz', 410, now(), 'e')"
        )
        let ticket = try database.command("status", "--check", as: "a_reader")
        #expect(ticket.status == 1 && ticket.output.contains("could not be understood"), "\(ticket)")
        try database.psql("SELECT tokenkeeper.ensure_topic('production', 't')")
        try database.psql("SELECT tokenkeeper.pause_sending('t')", user: "a_operator")
        let page = try database.command("status", "--check", as: "a_operator")
        #expect(page.status == 2 && page.output.hasPrefix("TOKENKEEPER CRITICAL - sending to t"), "\(page)")
        #expect(daemon.stop() == 0)
    }

    @Test func `without an answer the state is unknown, never critical`() throws {
        let database = try TestCluster.shared.database(migrated: false)
        let bare = try database.command("status", "--check", as: "owner")
        #expect(bare.status == 3 && bare.output.hasPrefix("TOKENKEEPER UNKNOWN - "), "\(bare)")
        let away = try ProgramRun(
            [DaemonProcess.program, "status", "--check"],
            environment: ["TOKENKEEPER_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/db"])
        #expect(away.status == 3 && away.output.hasPrefix("TOKENKEEPER UNKNOWN - "))
        #expect(!away.output.contains("hunter2") && away.output.split(separator: "\n").count == 1)
        let unset = try database.command("status", "--check", as: "owner", settings: ["sweep.interval=soon"])
        #expect(unset.status == 3 && unset.output.contains("sweep.interval"))
    }

    @Test func `a lock on the tables is a warning that names the holder`() throws {
        let locked = try TestCluster.shared.database()
        var other = try locked.connect()
        try other.run("BEGIN; LOCK TABLE tokenkeeper.daemon")
        let answer = try locked.command("status", "--check", as: "a_reader")
        #expect(answer.status == 1 && answer.output.contains("tokenkeeper.daemon is locked"), "\(answer)")
        try other.run("ROLLBACK")
    }
}
