import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Counting tokens` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// `state tokens`, those without registration in brackets.
    private func counts() throws -> String {
        #expect(try database.psql(LedgerModel.wrongCounts) == "")
        return try database.psql(
            """
            SELECT string_agg(CASE WHEN registered THEN state || ' ' || tokens ELSE '(' || state || ' ' || tokens || ')' END, ', ' ORDER BY state, registered)
            FROM (SELECT state, registered, sum(tokens) AS tokens FROM tokenkeeper.token_count GROUP BY 1, 2 HAVING sum(tokens) <> 0) AS c
            """)
    }

    @Test func `each change of a state counts at once`() throws {
        try database.psql(
            "SELECT tokenkeeper.register(x, 't', registered_at => '2025-01-01Z') FROM unnest('{a1,a2,a3,a4,a5,a6,a7,a8}'::text[]) AS x"
        )
        #expect(try counts() == "active 8")
        try database.psql("SELECT tokenkeeper.unregister('a1', 't'), tokenkeeper.unregister('b1', 't')")
        #expect(try counts() == "active 7, (unregistered_by_app 1), unregistered_by_app 1")
        try database.psql("SELECT tokenkeeper.register(x, 't') FROM unnest('{a1,b1}'::text[]) AS x")
        #expect(try counts() == "active 9")
        try database.psql(
            "SELECT tokenkeeper.register('a2', 't', device_id => 'd'), tokenkeeper.register('a3', 't', device_id => 'd')"
        )
        #expect(try counts() == "active 8, superseded 1")
        try database.psql("SELECT tokenkeeper.register('a3', 't', device_id => 'e')")
        #expect(try counts() == "active 9", "the older token of the device is current again")
        var daemon = try database.connect(user: "a_daemon")
        try database.psql(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', x, 410, \(goneBody) FROM unnest('{a4,a5,c1}'::text[]) AS x;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'a5', 400, '{"reason":"BadDeviceToken"}');
            INSERT INTO tokenkeeper.registration (topic, token, unregistered) VALUES ('t', 'a6', true);
            INSERT INTO tokenkeeper.registration (topic, token) VALUES ('t', 'c2'), ('t', 'c3')
            """)
        try drainAll(&daemon)
        #expect(try counts() == "active 8, (stale 1), stale 1, suspect 1, unregistered_by_app 1")
        try database.psql("SELECT tokenkeeper.forget('a5'), tokenkeeper.forget('a7')", user: "a_app")
        #expect(try counts() == "active 7, (stale 1), stale 1, unregistered_by_app 1")
        try database.psql("DELETE FROM tokenkeeper.ledger")
        #expect(try counts() == "")
    }

    @Test func `an undo counts`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register(x, 't', registered_at => '2025-01-01Z') FROM unnest('{a1,a2,a3}'::text[]) AS x;
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) VALUES ('t', 'a3', 410, \(goneBody));
            INSERT INTO tokenkeeper.send_result (topic, token, status, body) SELECT 't', x, 400, '{"reason":"BadDeviceToken"}'
            FROM unnest('{a1,a3,b1}'::text[]) AS x
            """)
        var daemon = try database.connect(user: "a_daemon")
        try drainAll(&daemon)
        #expect(try counts() == "active 1, (suspect 1), suspect 2")
        try database.psql("SELECT tokenkeeper.reinstate('t', 'production', now() - interval '1 hour', now())")
        try undo(&daemon)
        #expect(try counts() == "active 2, stale 1")
    }

    @Test func `a transaction counts when it commits`() throws {
        var app = try database.connect()
        try app.execute("BEGIN; SELECT tokenkeeper.register('aa', 't')")
        #expect(try counts() == "")
        try app.execute("SAVEPOINT s; SELECT tokenkeeper.register('bb', 't'); ROLLBACK TO s; COMMIT")
        #expect(try counts() == "active 1")
    }

    @Test func `equal rows are added up, by two sessions at once too`() throws {
        let failures = Failures()
        let database = database
        atOnce(4) { worker in
            do {
                var session = try database.connect(user: worker < 2 ? "a_daemon" : "a_app")
                for n in 1...100 {
                    let token = "aa\(worker)\(n % 10)"
                    try session.execute(
                        worker < 2
                            ? "SELECT tokenkeeper.fold_token_count(7)"
                            : "SELECT tokenkeeper.register('\(token)', 't'), tokenkeeper.unregister('\(token)', 't')")
                }
            } catch { failures.add("\(error)") }
        }
        #expect(failures.all == [])
        #expect(try counts() == "unregistered_by_app 20")
        try database.psql("SELECT tokenkeeper.fold_token_count()")
        #expect(try database.psql("SELECT tokens, state FROM tokenkeeper.token_count") == "20|unregistered_by_app")
    }

    @Test func `after a change by hand, counts and suppressions are computed anew`() throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 10) AS i;
            UPDATE tokenkeeper.ledger SET suspect_at = registered_at WHERE token_key <= '\\x00000003';
            INSERT INTO tokenkeeper.ledger (topic_id, token_key) VALUES (1, '\\xff')
            """)
        #expect(try database.psql(LedgerModel.wrongCounts) == "1|f|active|1|0\n1|t|active|7|10\n1|t|suspect|3|0")
        #expect(try database.psql("SELECT tokenkeeper.recompute_tokens()") == "6")
        #expect(try counts() == "(active 1), active 7, suspect 3")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppression") == "3")
        #expect(try database.psql("SELECT tokenkeeper.recompute_tokens()") == "0")
        try database.psql("UPDATE tokenkeeper.ledger SET suspect_at = NULL WHERE token_key = '\\x00000002'")
        #expect(try database.psql("SELECT tokenkeeper.recompute_tokens()") == "3")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppression") == "2")
    }
}
