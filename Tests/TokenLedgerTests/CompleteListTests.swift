import APNsFeedback
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `A complete list` {
    let database: TestDatabase

    init() throws { database = try TestCluster.shared.database() }

    /// Begins an import as of an instant, and queues tokens as it does.
    private func begin(
        _ tokens: [String], at instant: String, list: String = "nightly", from file: String = "f.csv", refused: Int = 0,
        as user: String = "a_app"
    ) throws -> String {
        let source = try database.psql(
            """
            WITH begun AS MATERIALIZED (SELECT tokenkeeper.begin_import('\(file)') AS source_id)
            SELECT b.source_id FROM begun AS b, LATERAL (SELECT tokenkeeper.begin_list(b.source_id, '\(list)', '\(instant)')) AS l (done)
            """, user: user)
        try queue(tokens, source, refused: refused, as: user)
        return source
    }

    private func queue(_ tokens: [String], _ source: String, refused: Int = 0, as user: String = "a_app") throws {
        let array = "'{\(tokens.joined(separator: ","))}'::text[]"
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, registered_at, source_id) SELECT 't', k, 'epoch', \(source) FROM unnest(\(array)) AS k;
            SELECT tokenkeeper.advance_source(\(source), 'x', \(tokens.count), \(refused)),
                   tokenkeeper.note_listed(\(source), array_fill('production'::text, ARRAY[\(tokens.count)]),
                                           array_fill('t'::text, ARRAY[\(tokens.count)]), \(array));
            """, user: user)
    }

    /// How many were logged out, by steps of fifty.
    @discardableResult
    private func end(_ source: String, as user: String = "a_app") throws -> Int {
        var queued = 0
        while true {
            let step = try database.psql(
                "SELECT gone, queued FROM tokenkeeper.log_out_unlisted(\(source), 50)", user: user
            ).split(separator: "|")
            queued += Int(step[1]) ?? 0
            if step[0] == "0" { break }
        }
        try database.psql("SELECT tokenkeeper.advance_source(\(source), 'x', 0, 0, true)", user: user)
        return queued
    }

    private func drain(_ limits: GuardLimits = .off) throws {
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(
            &daemon,
            drain: Drain(lockTimeout: .milliseconds(50), guardLimits: limits, interpret: Interpretation.verdict(on:)))
    }

    private func states() throws -> String {
        try database.psql(
            "SELECT string_agg(token || ' ' || state, ', ' ORDER BY token) FROM tokenkeeper.token", user: "a_reader")
    }

    private func error(_ work: () throws -> Void) -> String {
        do {
            try work()
            return "none"
        } catch { return "\(error)" }
    }

    @Test func `who is gone is logged out as of the list, and who returns is taken back`() throws {
        try end(try begin(["aa", "bb", "cc"], at: "2026-01-01Z"))
        #expect(try end(try begin(["aa", "BB", "dd"], at: "2026-01-02Z")) == 1)
        try drain()
        #expect(try states() == "aa active, bb active, cc unregistered_by_app, dd active")
        #expect(
            try database.psql("SELECT invalidated_at = '2026-01-02Z' FROM tokenkeeper.token WHERE token = 'cc'") == "t")
        // The application knows of aa and bb what is later than the next list.
        try database.psql(
            "SELECT tokenkeeper.unregister('aa', 't', at => '2026-01-05Z'), tokenkeeper.register('bb', 't', registered_at => '2026-01-05Z')",
            user: "a_app")
        #expect(try end(try begin(["aa", "cc"], at: "2026-01-03Z")) == 2)
        try drain()
        #expect(try states() == "aa unregistered_by_app, bb active, cc active, dd unregistered_by_app")
        // Being in the list again and again takes no logout back.
        #expect(try end(try begin(["aa", "cc"], at: "2026-01-06Z")) == 0)
        try drain()
        #expect(try states().hasPrefix("aa unregistered_by_app"))
        #expect(try database.psql("SELECT tokenkeeper.drop_list('nightly')", user: "a_operator") == "2")
    }

    @Test func `a file that loses most of its rows is held by the guard`() throws {
        let all = (0..<300).map { String(format: "%04x", $0) }
        try end(try begin(all, at: "2026-01-01Z"))
        try drain()
        try end(try begin(Array(all.prefix(3)), at: "2026-01-02Z"))
        try drain(GuardLimits(allowance: 100, maxShare: .percent(10)))
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.held_registration") == "297")
        #expect(try states().components(separatedBy: " active").count == 301)
        // As with an attached table, an operator decides about them: the next list says nothing new of them.
        try database.psql("SELECT tokenkeeper.discard_held('t', cause => 'unregistered_by_app')", user: "a_operator")
        #expect(try end(try begin(Array(all.prefix(3)), at: "2026-01-03Z")) == 0)
    }

    @Test func `a row that was refused may have any token, so nobody is logged out`() throws {
        try end(try begin(["aa", "bb"], at: "2026-01-01Z"))
        let partial = try begin(["aa"], at: "2026-01-02Z", refused: 1)
        #expect(error { try end(partial) }.contains("refused 1 rows"))
        try database.psql("SELECT tokenkeeper.advance_source(\(partial), 'x', 0, 0, true)", user: "a_app")
        let none = try begin([], at: "2026-01-02Z")
        #expect(error { try end(none) }.contains("queued 0"))
        try database.psql("SELECT tokenkeeper.advance_source(\(none), 'x', 0, 0, true)", user: "a_app")
        // The corrected file, as of the same time.
        #expect(try end(try begin(["aa"], at: "2026-01-02Z")) == 1)
    }

    @Test func `an older file, another login, and a second import at once are refused`() throws {
        let first = try begin(["aa", "bb"], at: "2026-01-02Z")
        #expect(
            error { _ = try begin(["aa"], at: "2026-01-03Z", from: "g.csv") }.contains(
                "source \(first) is importing the list"))
        try end(first)
        #expect(error { _ = try begin(["aa"], at: "2026-01-01Z") }.contains("was imported as of"))
        #expect(error { _ = try begin(["aa"], at: "2026-01-03Z", as: "owner") }.contains("is imported by a_app"))
        #expect(error { _ = try begin(["aa"], at: "2026-01-03Z", list: "a b") }.contains("list is 'a b'"))
        #expect(error { _ = try begin(["aa"], at: "2999-01-03Z") }.contains("between 2008 and now"))
        // One that was killed is superseded later, and cannot go on.
        let killed = try begin(["aa"], at: "2026-01-03Z")
        try database.psql("UPDATE tokenkeeper.list SET advanced_at = now() - interval '6 minutes'")
        let next = try begin(["bb"], at: "2026-01-04Z", from: "g.csv")
        #expect(error { try queue(["cc"], killed) }.contains("is not the latest import of a list"))
        #expect(error { try end(killed) }.contains("is not the latest import of a list"))
        #expect(try end(next) == 1)
    }

    @Test func `a file without a token says nothing, also not of the list's time`() throws {
        try end(begin(["aa"], at: "2026-01-01"))
        _ = try begin([], at: "2026-01-03")
        let source = try begin(["bb"], at: "2026-01-02")
        #expect(try end(source) == 1)
        #expect(throws: (any Error).self) { try begin(["aa"], at: "2026-01-01") }
    }

    @Test func `after a withdrawal, the next file logs nobody out, and a forgotten token is in no list`() throws {
        try end(try begin(["aa", "bb"], at: "2026-01-01Z"))
        let source = try begin(["aa", "cc"], at: "2026-01-02Z")
        try end(source)
        try drain()
        try database.psql("SELECT tokenkeeper.withdraw(\(source))", user: "a_app")
        #expect(try end(try begin(["dd"], at: "2026-01-03Z")) == 0)
        #expect(try end(try begin(["ee"], at: "2026-01-04Z")) == 1)
        try drain()
        #expect(
            try database.psql("SELECT tokenkeeper.move_fault('t')").contains("the complete list nightly has tokens"))
        try database.psql("SELECT tokenkeeper.forget('ee')", user: "a_app")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.list_member") == "0")
    }

    @Test(arguments: 1...3) func `it says what an attached table with the same rows says`(_: Int) throws {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let table = try AttachedDevices()
        try table.attach(
            arguments: "token => 'push_token', topic => 'bundle_id', on_delete => 'unregister'")
        let tokens = (0..<8).map { "000\($0)" }
        // One that stays, so that no list is empty.
        var listed: Set<String> = ["00ff"]
        try table.app("INSERT INTO app.devices (push_token) VALUES ('00ff')")
        try end(try begin(["00ff"], at: "2026-01-01Z"))
        for round in 1...Soak.size(12, whole: 60) {
            for token in tokens where chance.next() % 4 == 0 {
                let call = chance.next() % 2 == 0 ? "register" : "unregister"
                for one in [database, table.database] {
                    try one.psql("SELECT tokenkeeper.\(call)('\(token)', 't')", user: "a_app")
                }
            }
            let next = Set(tokens.filter { _ in chance.next() % 2 == 0 } + ["00ff"])
            try table.app(
                """
                DELETE FROM app.devices WHERE push_token <> ALL ('{\(next.joined(separator: ","))}'::text[]);
                INSERT INTO app.devices (push_token) SELECT k FROM unnest('{\(next.subtracting(listed).joined(separator: ","))}'::text[]) AS k;
                """)
            listed = next
            let instant = try database.psql("SELECT clock_timestamp()")
            try end(try begin(next.sorted(), at: instant))
            try table.drain()
            try drain()
            #expect(try states() == table.states(), "round \(round), \(seed)")
        }
    }
}
