import Foundation
import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Reinstating` {
    /// The state of each token in the ledger, row by row.
    private static let ledger = """
        SELECT encode(token_key, 'hex'), registered_at, stale_at, suspect_at, coalesce(stale_reason, suspect_reason), unregistered_by_app_at
        FROM tokenkeeper.ledger ORDER BY token_key
        """

    /// 20,000 suspects, 410s or logouts, and a daemon that is killed again and again while it undoes them.
    @Test(arguments: ["suspect", "stale", "unregistered_by_app"])
    func `a daemon that is killed in the middle leaves the rest to the next one`(_ cause: String) throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        try owner.execute(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z')) FROM generate_series(1, 20000) AS i;
            SELECT count(*) FROM (SELECT tokenkeeper.unregister(lpad(to_hex(i), 8, '0'), 't', at => '2025-01-02Z') FROM generate_series(1, 20000, 7) AS i) AS u;
            """)
        let before = try owner.lines(Self.ledger, columns: 6)
        let reason = cause == "unregistered_by_app" ? "NULL" : "'BadDeviceToken'"
        let fact = cause == "unregistered_by_app" ? "" : ", \(cause)_reason = \(reason)"
        try owner.execute(
            """
            INSERT INTO tokenkeeper.receipt (topic_id, token_key, cause, invalidated_at, reason, source_id, received_at, counted)
            SELECT topic_id, token_key, '\(cause)', '2025-02-01Z', \(reason), 1, '2025-02-01Z', unregistered_by_app_at IS NULL FROM tokenkeeper.ledger;
            INSERT INTO tokenkeeper.suppression_count (hour, topic_id, cause, tokens)
            SELECT '2025-02-01Z', 1, '\(cause)', count(*) FROM tokenkeeper.receipt WHERE counted;
            UPDATE tokenkeeper.ledger SET \(cause)_at = '2025-02-01Z'\(fact);
            SELECT tokenkeeper.recompute_tokens()
            """)
        #expect(
            try owner.scalar(
                "SELECT tokenkeeper.reinstate('t', 'production', '2025-01-31Z', '2025-02-02Z', '\(cause)')") == "20000"
        )
        let undone = "SELECT 20000 - count(*) FROM tokenkeeper.receipt WHERE source_id IS NOT NULL"
        var kills = 0
        var seen = 0
        while seen < 20_000 {
            let daemon = try DaemonProcess(database.url(user: "a_daemon"), settings: ["sweep.interval=off"])
            let reached = seen
            try eventually("it continues where the killed daemon stopped") {
                seen = Int(try owner.scalar(undone) ?? "") ?? 0
                return seen > reached
            }
            daemon.signal(SIGKILL)
            #expect(daemon.wait() == -SIGKILL)
            kills += 1
            seen = Int(try owner.scalar(undone) ?? "") ?? 0
        }
        #expect(kills > 1, "killed in the middle")
        let last = try DaemonProcess(database.url(user: "a_daemon"), settings: ["sweep.interval=off"])
        try eventually("the window is finished") {
            try owner.scalar("SELECT count(*) FROM tokenkeeper.reinstatement WHERE finished_at IS NULL") == "0"
        }
        #expect(last.stop() == 0)
        #expect(try owner.lines(Self.ledger, columns: 6) == before)
        let back = 20_000 - (20_000 + 6) / 7
        #expect(
            try owner.lines(
                "SELECT operation, rows FROM tokenkeeper.operation WHERE operation = 'reinstated'", columns: 2)
                == ["reinstated|\(back)"])
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token_event WHERE event = 'reinstated'") == "20000")
        #expect(try owner.scalar("SELECT coalesce(sum(tokens), 0) FROM tokenkeeper.suppression_count") == "0")
    }

    @Test func `the command undoes a window without a daemon, and a dry run counts first`() throws {
        let database = try TestCluster.shared.database()
        var owner = try database.connect()
        try owner.execute(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => '2025-01-01Z')) FROM generate_series(1, 3000) AS i;
            UPDATE tokenkeeper.ledger SET suspect_at = '2025-02-01Z', suspect_reason = 'BadDeviceToken';
            SELECT tokenkeeper.recompute_tokens();
            INSERT INTO tokenkeeper.receipt (topic_id, token_key, cause, invalidated_at, reason, received_at, counted)
            SELECT topic_id, token_key, 'suspect', '2025-02-01Z', 'BadDeviceToken', '2025-02-01Z', true FROM tokenkeeper.ledger;
            SELECT tokenkeeper.register('00000007', 't');
            """)
        func command(_ more: String...) throws -> ProgramRun {
            try ProgramRun(
                [DaemonProcess.program, "reinstate", "--topic", "t", "--since", "2025-01-31"] + more,
                environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_operator")])
        }
        let dry = try command("--dry-run")
        #expect(dry.status == 0 && dry.output.contains("2999 tokens would be sendable again"), "\(dry)")
        let done = try command()
        #expect(done.status == 0 && done.output.contains("2999 tokens are sendable again"), "\(done)")
        #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.token WHERE NOT sendable") == "0")
    }
}
