import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

@Suite(.ownThread) struct `A sweep that an operator asks for` {
    /// Makes tokens that have been suppressed for years: half of the topic, which is above the limit.
    private func fill(_ database: TestDatabase) throws {
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 64, '0'), 't')) FROM generate_series(1, 40) AS i",
            user: "a_app")
        try database.psql(
            """
            UPDATE tokenkeeper.ledger SET stale_at = '2100-01-01Z', stale_reason = 'Unregistered'
            WHERE token_key <= decode(lpad(to_hex(20), 64, '0'), 'hex');
            SELECT tokenkeeper.recompute_tokens();
            UPDATE tokenkeeper.suppression SET since = now() - interval '3 years'
            """)
    }

    private static let settings = ["sweep.interval=off", "sweep.prune_allowance=1"]

    @Test func `running daemons perform it, and the operator reads the same result`() throws {
        let database = try TestCluster.shared.database()
        try fill(database)
        let daemon = try database.daemon(Self.settings)
        let dry = try database.command("sweep", "--dry-run", as: "a_operator")
        #expect(dry.status == 0 && dry.output.contains("would delete"), "\(dry)")
        #expect(dry.errors.contains("requested sweep 1 from the running daemons"))
        #expect(dry.output.hasPrefix("sweep 1 finished: refused: t (production)"))

        let refused = try database.command("sweep", as: "a_operator")
        #expect(
            refused.status == 70 && refused.output.contains("refused to delete 20 tokens: see --force"), "\(refused)")
        let forced = try database.command("sweep", "--force", as: "a_operator")
        #expect(forced.status == 0 && forced.output.contains("deleted 20 suppressed tokens"), "\(forced)")
        #expect(forced.errors.split(separator: "\n").count == 1)
        #expect(
            try database.psql(
                "SELECT run_id, trigger, dry_run, forced, requested_by FROM tokenkeeper.sweep_run WHERE trigger = 'sql' ORDER BY 1"
            )
                == "1|sql|t|f|a_operator\n2|sql|f|f|a_operator\n3|sql|f|t|a_operator")
        #expect(daemon.stop() == 0)

        // The daemon's role sweeps itself, and prints the same lines.
        let own = try database.command("sweep", "--dry-run", as: "a_daemon")
        #expect(own.status == 0 && own.errors.isEmpty, "\(own)")
        #expect(
            own.output.split(separator: "\n").dropFirst().filter { $0.contains("past sweep") }.count
                == dry.output.split(separator: "\n").filter { $0.contains("past sweep") }.count)
    }

    @Test func `without a daemon nothing is requested, and the message says so`() throws {
        let database = try TestCluster.shared.database()
        let alone = try database.command("sweep", as: "a_operator")
        #expect(alone.status == 69 && alone.errors.contains("no daemon is running on this database"), "\(alone)")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run") == "0")
    }

    @Test func `a reader may not ask`() throws {
        let database = try TestCluster.shared.database()
        let daemon = try database.daemon(Self.settings)
        let refused = try database.command("sweep", as: "a_reader")
        #expect(
            refused.status == 69
                && refused.errors.contains("needs the rights of tokenkeeper_daemon or tokenkeeper_operator"),
            "\(refused)")
        #expect(daemon.stop() == 0)
    }

    @Test func `who waits is told when the daemons have stopped`() throws {
        let database = try TestCluster.shared.database()
        let daemon = try database.daemon(Self.settings)
        // Another sweep seems to run, so the request waits.
        try database.psql(
            "INSERT INTO tokenkeeper.sweep_run (trigger, outcome, started_at, heartbeat_at, daemon_id) VALUES ('timer', 'running', now(), now() + interval '1 hour', 'other')"
        )
        let waiting = DispatchQueue(label: "command")
        nonisolated(unsafe) var told: ProgramRun?
        let done = DispatchSemaphore(value: 0)
        waiting.async {
            told = try? database.command("sweep", as: "a_operator")
            done.signal()
        }
        try eventually("it is requested") {
            try database.psql("SELECT count(*) FROM tokenkeeper.sweep_run WHERE outcome = 'requested'") == "1"
        }
        #expect(daemon.stop() == 0)
        done.wait()
        #expect(
            told?.status == 69 && told?.errors.contains("the daemons have stopped") == true,
            "\(String(describing: told))")
    }
}
