import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing
import TokenLedger

@testable import tokenkeeperd

@Suite(.ownThread) struct `Command import --complete` {
    let database: TestDatabase
    let folder: TemporaryDirectory

    init() throws {
        database = try TestCluster.shared.database()
        folder = try TemporaryDirectory()
    }

    private func run(_ tokens: String..., at day: Int, named: String = "f.csv", _ more: [String] = []) throws
        -> ProgramRun
    {
        let file = try folder.write("token\n" + tokens.map { $0 + "\n" }.joined(), to: named)
        return try ProgramRun(
            [
                DaemonProcess.program, "import", file, "--format", "csv", "--topic", "t", "--complete", "nightly",
                "--as-of", "2026-01-0\(day)",
            ] + more, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")])
    }

    /// What is queued: the token, and whether it is logged out or back.
    private func queued() throws -> String {
        try database.psql(
            """
            WITH gone AS (DELETE FROM tokenkeeper.registration RETURNING *)
            SELECT string_agg(lower(token) || CASE WHEN unregistered THEN ' out ' || extract(day FROM registered_at AT TIME ZONE 'UTC') WHEN returned THEN ' back' ELSE '' END, ', '
                              ORDER BY queued_at, lower(token)) FROM gone
            """)
    }

    @Test func `it logs out who is gone, and a dry run says how many`() throws {
        let new = try run("aa", "bb", "cc", at: 1, ["--dry-run"])
        #expect(new.output.contains("list nightly: new, so nobody would be logged out"), "\(new)")
        #expect(
            try run("aa", "bb", "cc", at: 1).output.contains("list nightly: known from now on; nobody is logged out"))
        #expect(try queued() == "aa, bb, cc")
        let rehearsed = try run("aa", "AA", "dd", at: 2, ["--dry-run"])
        #expect(rehearsed.output.contains("list nightly: would log out 2 of 3, back 1"), "\(rehearsed)")
        let second = try run("aa", "AA", "dd", at: 2)
        #expect(
            second.status == 0 && second.output.contains("list nightly: queued 2 logouts, and 1 token that is back"),
            "\(second)")
        #expect(
            second.output.contains(
                "reinstate --cause unregistered_by_app --topic t --environment production --since TIME"), "\(second)")
        #expect(try queued() == "aa, aa, dd, dd back, bb out 2, cc out 2")
        #expect(try run("aa", at: 1, ["--dry-run"]).errors.contains("as of a later time"))
        #expect(try run("aa", at: 1).errors.contains("was imported as of"))
    }

    @Test func `refused rows and an empty file log nobody out`() throws {
        #expect(try run("aa", "bb", at: 1).status == 0)
        for more in [["--dry-run"], []] {
            let partial = try run("aa", "zz", at: 2, more)
            #expect(
                partial.status == 1 && partial.output.contains("because a refused row may have any token"), "\(partial)"
            )
            #expect(!partial.output.contains("import that file"), "\(partial)")
        }
        let empty = try run(at: 2, named: "empty.csv")
        #expect(empty.status == 70 && empty.errors.contains("an empty list would log everybody out"), "\(empty)")
        #expect(try queued() == "aa, bb, aa")
        #expect(try run("aa", at: 2, named: "fixed.csv").output.contains("queued 1 logout,"))
        let feedback = try run("aa", at: 3, ["--feedback"])
        #expect(feedback.errors.contains("--complete goes with registrations"))
    }

    @Test func `a row that its flag logs out is not in the list`() throws {
        let first = try folder.write("token,off\naa,f\nbb,f\n", to: "a.csv")
        let second = try folder.write("token,off\naa,f\nbb,t\n", to: "b.csv")
        for (day, file) in [first, second].enumerated() {
            let run = try ProgramRun(
                [
                    DaemonProcess.program, "import", file, "--format", "csv", "--topic", "t", "--complete", "nightly",
                    "--as-of", "2026-01-0\(day + 1)", "--column", "unregistered=off",
                ], environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: "a_app")])
            #expect(run.status == 0, "\(run)")
        }
        #expect(try queued() == "aa, bb, aa, bb out 1, bb out 2")
    }

    @Test func `an import that was killed before its logouts continues with them`() throws {
        #expect(try run("aa", "bb", at: 1).status == 0)
        #expect(try run("aa", at: 2, named: "g.csv").status == 0)
        // As after a kill between the last row and the logouts.
        try database.psql(
            """
            INSERT INTO tokenkeeper.list_member SELECT m.list_id, m.environment, m.topic, decode('bb', 'hex'), m.seen_by - 1 FROM tokenkeeper.list_member AS m;
            UPDATE tokenkeeper.registration_source SET finished_at = NULL WHERE source_id = 2;
            DELETE FROM tokenkeeper.registration;
            """)
        let rest = try run("aa", at: 2, named: "g.csv")
        #expect(rest.status == 0 && rest.errors.contains("continuing source 2"), "\(rest)")
        #expect(try queued() == "bb out 2")
        #expect(
            try database.psql("SELECT count(*) FROM tokenkeeper.registration_source WHERE finished_at IS NULL") == "0")
    }
}
