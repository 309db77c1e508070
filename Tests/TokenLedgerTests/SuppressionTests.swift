import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// The table `suppression` has one row for each suppressed token. That it agrees with the ledger after any history, `LedgerModel` checks.
@Suite(.ownThread) struct `Suppressions` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
    }

    /// Records 410s of these tokens as a daemon does, received at this instant.
    private func gone(_ tokens: ClosedRange<Int>, received: String = "now()") -> String {
        """
        SELECT tokenkeeper.record(array_agg(tokenkeeper.invalidation_of(i, 1, decode(lpad(to_hex(i), 8, '0'), 'hex'), 'stale', now(), 'Unregistered',
                                            \(received))), 5, 0.02, 1)
        FROM generate_series(\(tokens.lowerBound), \(tokens.upperBound)) AS i
        """
    }

    @Test func `what was planned before a token was suppressed finds each by key`() throws {
        var owner = try database.connect()
        // An analysis would have the statements planned anew.
        try owner.execute("ALTER TABLE tokenkeeper.suppression SET (autovacuum_enabled = off)")
        try owner.execute("VACUUM ANALYZE tokenkeeper.suppression")
        try owner.execute("SET jit = off")
        try owner.execute(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '1 day')) FROM generate_series(1, 3000) AS i"
        )
        /// A registration in a batch, a single one, a deletion and an undo: each of 10 tokens from this one on.
        func change(from first: Int) throws {
            let last = first + 39
            try owner.execute(
                """
                SELECT tokenkeeper.merge_reports(array_agg(tokenkeeper.registration_of(
                    i, 1, decode(lpad(to_hex(i), 8, '0'), 'hex'), true, clock_timestamp(), NULL, NULL, NULL, clock_timestamp())), now(), false, tokenkeeper.patience_ends())
                FROM generate_series(\(first), \(first + 9)) AS i;
                SELECT tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't') FROM generate_series(\(first + 10), \(first + 19)) AS i;
                DELETE FROM tokenkeeper.ledger WHERE token_key IN (SELECT decode(lpad(to_hex(i), 8, '0'), 'hex') FROM generate_series(\(first + 20), \(first + 29)) AS i);
                SELECT tokenkeeper.reinstate('t', 'production', '2025-01-01Z'::timestamptz + \(first) * interval '1 day', '2025-01-01Z'::timestamptz + \(first) * interval '1 day', 'stale');
                SELECT tokenkeeper.undo_next() FROM generate_series(1, 3)
                """)
            #expect(
                try owner.scalar(
                    "SELECT count(*) FROM tokenkeeper.ledger WHERE suppressed AND token_key BETWEEN decode(lpad(to_hex(\(first)), 8, '0'), 'hex') AND decode(lpad(to_hex(\(last)), 8, '0'), 'hex')"
                ) == "0")
        }
        for first in [101, 201] {
            try owner.execute(gone(first...first + 29))
            try owner.execute(
                gone(first + 30...first + 39, received: "'2025-01-01Z'::timestamptz + \(first) * interval '1 day'"))
            if first == 101 {
                try change(from: first)
                #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.suppression") == "0")
                try owner.execute(gone(1001...3000))
            } else {
                try owner.execute("BEGIN")
                let before = try owner.rowsRead(of: "suppression")
                try change(from: first)
                let after = try owner.rowsRead(of: "suppression")
                try owner.execute("COMMIT")
                #expect(after - before < 400, "\(after - before) suppressed tokens were read for 40")
                #expect(try owner.scalar("SELECT count(*) FROM tokenkeeper.suppression") == "2000")
            }
        }
    }

    @Test func `one that a change by hand has left behind keeps nothing from being recorded`() throws {
        var owner = try database.connect()
        try owner.execute("SET jit = off")
        try owner.execute(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', registered_at => now() - interval '1 day')) FROM generate_series(1, 3) AS i;
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) SELECT now() - interval '100 days', 1, decode(lpad(to_hex(i), 8, '0'), 'hex') FROM generate_series(1, 5) AS i
            """)
        // Known, known, new, new: in a batch, and alone.
        try owner.execute(gone(1...1))
        try owner.execute(gone(4...4))
        try owner.execute("SELECT tokenkeeper.unregister('00000002', 't'), tokenkeeper.unregister('00000005', 't')")
        #expect(
            try owner.lines("SELECT token, state FROM tokenkeeper.token ORDER BY token", columns: 2)
                == [
                    "00000001|stale", "00000002|unregistered_by_app", "00000003|active", "00000004|stale",
                    "00000005|unregistered_by_app",
                ])
        #expect(
            try owner.scalar("SELECT count(*) FROM tokenkeeper.suppression WHERE since > now() - interval '1 hour'")
                == "4", "their retention starts now")
        #expect(try owner.scalar("SELECT tokenkeeper.recompute_tokens()") == "1", "the one of the active token")
    }

    @Test func `one of an active token that a change by hand has left behind goes with the token`() throws {
        try database.psql(
            """
            SELECT tokenkeeper.register('aa', 't');
            INSERT INTO tokenkeeper.suppression (since, topic_id, token_key) VALUES (now(), 1, '\\xaa');
            SELECT tokenkeeper.forget('aa')
            """)
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.suppression") == "0")
    }

    @Test func `a token is suppressed since the first report, until it is registered again`() throws {
        var owner = try database.connect()
        try owner.execute("SET jit = off")
        try owner.execute("SELECT tokenkeeper.register('00000001', 't', registered_at => now() - interval '1 day')")
        try owner.execute(gone(1...1))
        let since = "SELECT since FROM tokenkeeper.suppression"
        let first = try owner.scalar(since)
        try owner.execute(gone(1...1))
        #expect(try owner.scalar(since) == first)
        try owner.execute("SELECT tokenkeeper.unregister('00000001', 't')")
        #expect(try owner.scalar(since) == first)
        try owner.execute("SELECT tokenkeeper.register('00000001', 't')")
        #expect(try owner.scalar(since) == nil)
        try owner.execute(gone(1...1))
        #expect(try owner.scalar("SELECT since > '\(first ?? "")' FROM tokenkeeper.suppression") == "t")
    }
}
