import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Logouts that a source reports: an attached table, a backfill or a file.
@Suite(.ownThread) struct `The guard for logouts` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.recordLogouts()
    }

    /// Registers tokens of the topic `t` on January 1: by number, four hex digits.
    private func register(_ numbers: ClosedRange<Int>) throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(n), 4, '0'), 't', registered_at => '2025-01-01Z'))
            FROM generate_series(\(numbers.lowerBound), \(numbers.upperBound)) AS n
            """)
    }

    private func limit(_ allowance: Int) throws {
        try database.psql(
            "UPDATE tokenkeeper.topic_policy SET guard_allowance = \(allowance), guard_max_share = 0",
            user: "a_operator")
    }

    private func loggedOut() throws -> String {
        try database.psql(
            "SELECT coalesce(string_agg(token, ' ' ORDER BY token), '') FROM tokenkeeper.token WHERE state = 'unregistered_by_app'"
        )
    }

    private func held() throws -> String {
        try database.psql(
            "SELECT coalesce(string_agg(token, ' ' ORDER BY held_id), '') FROM tokenkeeper.held_registration",
            user: "a_reader")
    }

    /// What the guard counts.
    private func counted() throws -> String {
        try database.psql(
            """
            SELECT coalesce(string_agg(cause || ' ' || tokens, ', ' ORDER BY cause), '') FROM (
                SELECT cause, sum(tokens) AS tokens FROM tokenkeeper.suppression_count GROUP BY 1 HAVING sum(tokens) <> 0) AS c
            """)
    }

    private var guardRow: String {
        get throws {
            try database.psql("SELECT cause, tripped, tokens, max_tokens FROM tokenkeeper.guard ORDER BY cause")
        }
    }

    @Test func `logouts that would suppress too many active tokens are held, complete`() throws {
        try register(1...20)
        try limit(5)
        #expect(try database.logOut(1...4, received: "2025-02-01Z") == "recorded 4")
        // A token counts once per day, also if it logs out twice.
        #expect(try database.logOut(1...4, received: "2025-02-01T05:00Z") == "recorded 4")
        #expect(try counted() == "unregistered_by_app 4")
        #expect(try database.logOut(4...8, received: "2025-02-01T10:00Z") == "held 4, recorded 1, tripped 1")
        #expect(try guardRow == "unregistered_by_app|t|8|5")
        #expect(try loggedOut() == "0001 0002 0003 0004")
        #expect(try held() == "0005 0006 0007 0008")
        #expect(try counted() == "unregistered_by_app 4", "held ones are counted where they are held")
        #expect(
            try database.psql("SELECT undo FROM tokenkeeper.guard")
                == "tokenkeeperd reinstate --cause unregistered_by_app --topic t --environment production --since 2025-02-01T00:00:00.000000Z"
        )
        #expect(
            try database.psql("SELECT message FROM tokenkeeper.operation WHERE operation = 'guard_tripped'")
                == "logouts from attached tables and files would suppress 8 of 16 active tokens within a day, more than 5: they are held"
        )
        let warnings = try database.psql("SELECT warnings FROM tokenkeeper.status", user: "a_reader")
        #expect(
            warnings.contains("logouts from attached tables and files would suppress 8 of 16 active tokens")
                && warnings.contains("4 logouts are held by the mass-failure guard; see `tokenkeeperd held list`"),
            "\(warnings)")
        // The guard for suspects has nothing to do with it, and the application is never held.
        try database.psql("SELECT tokenkeeper.unregister('0009', 't', at => '2025-02-01T10:00Z')", user: "a_app")
        #expect(try database.logOut(10...10, received: "2025-02-01T10:00Z", source: nil) == "recorded 1")
        #expect(try loggedOut().hasSuffix("0009 000a"))
    }

    @Test func `what loses nothing does not count`() throws {
        try register(1...7)
        try limit(0)
        // Unknown tokens, of a backfill for example; never registered ones; and such as are suppressed or registered later.
        try database.psql(
            """
            SELECT tokenkeeper.unregister('0002', 't', at => '2025-01-02Z');
            SELECT tokenkeeper.register('0003', 't', registered_at => '2025-06-01Z');
            SELECT tokenkeeper.unregister('0020', 't', at => '2025-01-02Z');
            """)
        #expect(try database.logOut(2...3, received: "2025-02-01Z") == "recorded 2")
        #expect(try database.logOut(32...40, received: "2025-02-01Z") == "recorded 9")
        // The device logs in again within the batch.
        #expect(
            try database.logOut(1...1, received: "2025-02-01Z", registeredAgain: "2025-02-02Z") == "recorded 1")
        // Before the registration.
        #expect(try database.logOut(5...5, at: "2024-12-31T23:59:59.999999Z", received: "2025-02-01Z") == "recorded 1")
        #expect(try counted() == "")
        #expect(
            try database.logOut(4...4, received: "2025-02-01Z", registeredAgain: "2025-01-15Z") == "held 1, tripped 1")
        // At the same instant, the logout counts.
        #expect(try database.logOut(6...6, at: "2025-01-01Z", received: "2025-02-01Z") == "held 1")
        #expect(
            try database.logOut(7...7, at: "2025-01-15Z", received: "2025-02-01Z", registeredAgain: "2025-01-15Z")
                == "held 1")
    }

    @Test func `an undo begins with the first logout that lost something, not with the old ones of a backfill`() throws
    {
        try register(1...9)
        try limit(3)
        #expect(try database.logOut(30...35, at: "2024-06-01Z", received: "2025-02-01T10:00Z") == "recorded 6")
        #expect(try database.logOut(1...2, received: "2025-02-01T11:00Z") == "recorded 2")
        #expect(try database.logOut(3...9, received: "2025-02-01T12:00Z") == "held 7, tripped 1")
        // Nor does it reach back to them.
        #expect(try database.logOut(36...38, at: "2024-06-01Z", received: "2025-02-01T09:00Z") == "recorded 3")
        #expect(
            try database.psql(
                "SELECT undo_since = '2025-02-01T11:00Z' FROM tokenkeeper.tripped_guard WHERE cause <> 'suspect'")
                == "t")
    }

    @Test func `a release lets them count without asking the guard again`() throws {
        try register(1...9)
        try limit(2)
        #expect(try database.logOut(1...5, received: "2025-02-01Z") == "held 5, tripped 1")
        #expect(
            try database.psql("SELECT tokenkeeper.release_held('t', cause => 'suspect')", user: "a_operator") == "0")
        #expect(try database.psql("SELECT tokenkeeper.release_held('t')", user: "a_operator") == "5")
        #expect(try held() == "")
        #expect(
            try database.psql(
                "SELECT count(*), min(token), bool_and(released AND unregistered AND source_id = 1 AND queued_at = '2025-02-01Z') FROM tokenkeeper.registration_retry"
            ) == "5|0001|t")
        #expect(try guardRow == "")
        #expect(try database.logOut(1...5, received: "2025-02-01Z", released: true) == "recorded 5")
        #expect(try counted() == "", "released logouts do not count")
        #expect(try database.logOut(6...7, received: "2025-02-01Z") == "recorded 2")
    }

    @Test func `a discard forgets them, and the guard resets`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try register(1...9)
        try limit(2)
        #expect(try database.logOut(1...5, received: "2025-02-01Z") == "held 5, tripped 1")
        #expect(
            try database.psql(
                "SELECT tokenkeeper.discard_held('t', cause => 'unregistered_by_app')", user: "a_operator") == "5")
        #expect(try counted() == "")
        let reset = try MassFailureGuard.resetQuiet(GuardLimits(allowance: 2, maxShare: .percent(0)), on: &daemon)
        #expect(reset.map(\.topic) == ["t"] && reset.map(\.cause) == [.unregisteredByApp])
        #expect(try guardRow == "")
        #expect(try loggedOut() == "")
        #expect(throws: (any Error).self) {
            try database.psql("SELECT tokenkeeper.discard_held('t', cause => 'superseded')", user: "a_operator")
        }
    }

    @Test func `an undo restores the ledger row by row, now and later`() throws {
        try register(1...6)
        try database.psql(
            """
            SELECT tokenkeeper.unregister('0002', 't', at => '2025-01-05Z');
            SELECT tokenkeeper.register('0003', 't', registered_at => '2025-03-01Z');
            UPDATE tokenkeeper.ledger SET stale_at = '2025-01-03Z', stale_reason = 'Unregistered' WHERE token_key = decode('0004', 'hex');
            SELECT tokenkeeper.recompute_tokens();
            """)
        var owner = try database.connect()
        let before = try owner.ledger()
        // 5 logs out before the window as well, 77 is unknown.
        _ = try database.logOut(5...5, at: "2025-01-10Z", received: "2025-01-10Z")
        let with5 = try owner.ledger()
        for round in 1...2 {
            _ = try database.logOut(1...6, at: "2025-02-01Z", received: "2025-02-01Z")
            _ = try database.logOut(119...119, at: "2025-02-01Z", received: "2025-02-01Z")
            if round == 1 {
                #expect(try loggedOut() == "0001 0002 0004 0005 0006 0077")
                #expect(
                    try database.psql(
                        "SELECT tokenkeeper.would_reinstate('t', 'production', '2025-01-31Z', '2025-02-02Z', 'unregistered_by_app')",
                        user: "a_operator") == "3")
                #expect(
                    try database.reinstate("2025-01-31Z", "2025-02-02Z", cause: "unregistered_by_app") == "3",
                    "1, 6 and 77")
            }
            #expect(try owner.ledger() == with5, "the second time, they arrive after the undo")
        }
        #expect(
            try database.psql(
                "SELECT count(*) FILTER (WHERE source_id IS NULL), count(source_id) FROM tokenkeeper.receipt"
            )
                == "1|1", "of 2, which the application has logged out, and of 5")
        #expect(try counted() == "unregistered_by_app 1")
        #expect(try database.reinstate("2025-01-10Z", "2025-01-10Z", cause: "unregistered_by_app") == "1")
        #expect(try owner.ledger() == before)
        #expect(try counted() == "")
        #expect(
            try owner.lines(
                "SELECT event, cause, reason, count(*) FROM tokenkeeper.token_event WHERE event = 'reinstated' GROUP BY 1, 2, 3",
                columns: 4) == ["reinstated|operator|logout from the attachment of public.devices|7"])
        #expect(
            try database.psql(
                "SELECT operation, rows, message FROM tokenkeeper.operation WHERE operation = 'reinstated' LIMIT 1")
                == "reinstated|3|logouts from attached tables and files received from 2025-01-31 00:00:00+00 to 2025-02-02 00:00:00+00 do not count"
        )
    }

    @Test func `an undone window has both of its ends, and concerns no other cause`() throws {
        try register(1...4)
        _ = try database.logOut(1...1, received: "2025-02-01Z")
        #expect(try database.reinstate("2025-02-01Z", "2025-02-03Z", cause: "unregistered_by_app") == "1")
        for (number, day) in [(1, "2025-02-01Z"), (2, "2025-02-02Z"), (3, "2025-02-03Z")] {
            #expect(try database.logOut(number...number, received: day) == "excluded 1")
        }
        #expect(try database.logOut(4...4, received: "2025-02-03T00:00:01Z") == "recorded 1")
        try database.psql("UPDATE tokenkeeper.exclusion SET cause = 'suspect'")
        #expect(try database.logOut(3...3, received: "2025-02-03Z") == "recorded 1")
    }

    /// Where the application's own logout lies, relative to the logout from the source that is undone.
    @Test(arguments: ["before", "between", "after", "earlier instant", "same batch"])
    func `a logout by the application survives the undo`(_ when: String) throws {
        try register(1...1)
        func direct(_ at: String) throws {
            try database.psql("SELECT tokenkeeper.unregister('0001', 't', at => '\(at)')", user: "a_app")
        }
        if when == "before" { try direct("2025-01-05Z") }
        _ = try database.logOut(1...1, at: "2025-02-01Z", received: "2025-02-01Z")
        if when == "between" { try direct("2025-02-05Z") }
        if when == "earlier instant" {
            try direct("2025-01-03Z")
            try direct("2025-01-07Z")
            try direct("2025-01-05Z")
        }
        if when == "same batch" {
            _ = try database.logOut(1...1, at: "2025-02-07Z", received: "2025-02-07Z", source: nil)
        }
        _ = try database.logOut(1...1, at: "2025-02-10Z", received: "2025-02-10Z")
        if when == "after" { try direct("2025-02-15Z") }
        #expect(
            try database.reinstate("2025-01-31Z", "2025-02-20Z", cause: "unregistered_by_app") == "0",
            "nothing became sendable")
        let expected =
            [
                "before": "2025-01-05", "between": "2025-02-05", "after": "2025-02-15", "earlier instant": "2025-01-07",
                "same batch": "2025-02-07",
            ][when] ?? ""
        #expect(
            try database.psql("SELECT state, invalidated_at::date FROM tokenkeeper.token")
                == "unregistered_by_app|\(expected)")
        // The next undo goes by the same rule.
        _ = try database.logOut(1...1, at: "2025-03-01Z", received: "2025-03-01Z")
        #expect(try database.reinstate("2025-03-01Z", "2025-03-01Z", cause: "unregistered_by_app") == "0")
        #expect(try database.psql("SELECT invalidated_at::date FROM tokenkeeper.token") == expected)
    }

    @Test func `a token that an application has locked is undone once it is free`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try register(1...3)
        _ = try database.logOut(1...3, received: "2025-02-01Z")
        var app = try database.connect()
        try app.execute("BEGIN; SELECT FROM tokenkeeper.ledger WHERE token_key = decode('0002', 'hex') FOR UPDATE")
        try database.psql(
            "SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-01Z', 'unregistered_by_app')",
            user: "a_operator")
        #expect(try Reinstatement.undo(within: .seconds(5), on: &daemon) { true } == false)
        #expect(try loggedOut() == "0002")
        #expect(
            try database.psql(
                "SELECT cause, remaining, finished_at IS NULL FROM tokenkeeper.reinstatement", user: "a_reader")
                == "unregistered_by_app|1|t")
        try app.execute("COMMIT")
        try undo(&daemon)
        #expect(try loggedOut() == "")
    }

    @Test func `the event of an undo names the user and where the logout came from`() throws {
        try database.psql("SELECT tokenkeeper.register('0001', 't', registered_at => '2025-01-01Z', user_id => 'ann')")
        _ = try database.logOut(1...1, at: "2025-02-01Z", received: "2025-02-01Z")
        #expect(try database.reinstate("2025-02-01Z", "2025-02-01Z", cause: "unregistered_by_app") == "1")
        #expect(
            try database.psql("SELECT reason, user_id FROM tokenkeeper.token_event WHERE event = 'reinstated'")
                == "logout from the attachment of public.devices|ann")
    }

    @Test func `logouts of the application pass no guard, and leave receipts`() throws {
        try register(1...3)
        try limit(0)
        #expect(try database.logOut(3...3, received: "2025-02-01Z", source: nil) == "recorded 1")
        try database.psql("SELECT tokenkeeper.unregister('0002', 't', at => '2025-02-02Z')")
        #expect(try counted() == "")
        #expect(try guardRow == "")
        #expect(
            try database.psql(
                "SELECT encode(token_key, 'hex'), invalidated_at::date, source_id, counted FROM tokenkeeper.receipt ORDER BY 1"
            ) == "0002|2025-02-02||f\n0003|2025-02-01||f")
    }

    @Test func `a logout by the application survives the undo of a table that reports for ever`() throws {
        try register(1...1)
        for day in 1...60 {
            if day == 25 { try database.psql("SELECT tokenkeeper.unregister('0001', 't', at => '2025-01-10Z')") }
            _ = try database.logOut(
                1...1, at: "2025-02-01Z", received: "\(day < 29 ? "2025-02" : "2025-03")-\(day % 28 + 1)Z")
        }
        #expect(try database.reinstate("2025-01-31Z", "2025-05-01Z", cause: "unregistered_by_app") == "0")
        #expect(
            try database.psql("SELECT state, invalidated_at::date FROM tokenkeeper.token")
                == "unregistered_by_app|2025-01-10")
    }

    @Test func `flags that are off and on again within a batch trip nothing`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try register(1...20)
        try limit(5)
        try database.psql(
            """
            INSERT INTO tokenkeeper.registration (topic, token, unregistered, returned, source_id, queued_at)
            SELECT 't', lpad(to_hex(i), 4, '0'), CASE n WHEN 1 THEN true END, CASE n WHEN 2 THEN true END, 1, timestamptz '2025-02-01Z' + n * interval '1 s'
            FROM generate_series(1, 20) AS i, generate_series(1, 2) AS n
            """)
        let pass = try drainAll(&daemon)
        #expect(pass.registrations.applied == 40 && pass.registrations.held == 0)
        #expect(try loggedOut() == "")
        #expect(try guardRow == "")
    }

    @Test func `forget erases the receipts and what is held`() throws {
        try register(1...9)
        try limit(2)
        _ = try database.logOut(1...2, received: "2025-02-01Z")
        _ = try database.logOut(3...4, received: "2025-02-01Z")
        for token in ["0001", "0003"] { try database.psql("SELECT tokenkeeper.forget('\(token)')", user: "a_app") }
        #expect(try held() == "0004")
        #expect(try database.psql("SELECT encode(token_key, 'hex') FROM tokenkeeper.receipt") == "0002")
    }

    @Test func `the sweep deletes receipts with their tokens, and held logouts after their retention`() throws {
        var daemon = try database.connect(user: "a_daemon")
        try register(1...6)
        try limit(2)
        _ = try database.logOut(1...2, received: "2025-02-01Z")
        _ = try database.logOut(3...4, received: "2025-02-01Z")
        // 1 is suppressed for too long; 2 has been registered again since.
        try database.psql(
            """
            SELECT tokenkeeper.register('0002', 't');
            UPDATE tokenkeeper.suppression SET since = now() - interval '100 days' WHERE token_key = decode('0001', 'hex');
            UPDATE tokenkeeper.held_registration SET held_at = now() - interval '31 days' WHERE token = '0003';
            """)
        let lease = try #require(try SweepLease.claim(.new(.cli, dryRun: false), holder: "test", on: &daemon))
        let plan = SweepPlan(
            suppressedRetention: .seconds(90 * 86400), dormantAfter: nil, eventRetention: .seconds(395 * 86400),
            rejectedRetention: .seconds(90 * 86400), heldRetention: .seconds(30 * 86400),
            sendRetention: .seconds(30 * 86400), allowance: 1000, maxShare: .percent(100), batch: 7)
        let report = try Sweep(lease, plan, lockTimeout: .milliseconds(50)).perform(on: &daemon) { true }
        #expect(report.deletedHeld == 1 && report.prunedSuppressed == 1)
        #expect(try held() == "0004")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.receipt") == "0")
    }
}

extension TestDatabase {
    /// Adds the function that `logOut` calls: what the drain does with a batch, without the queue.
    func recordLogouts() throws {
        try psql(
            """
            INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices');
            CREATE FUNCTION record_logouts(numbers integer[], at timestamptz, received timestamptz, source bigint, release boolean, again timestamptz)
            RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
            DECLARE
                before bigint := (SELECT count(*) FROM tokenkeeper.receipt);
                done record;
            BEGIN
                SELECT * INTO done FROM tokenkeeper.apply_registrations(ARRAY(
                    SELECT ROW('production', 't', lpad(to_hex(i), 4, '0'), k.at, NULL, NULL, NULL, k.is_logout, CASE WHEN k.is_logout THEN source END, NULL, NULL,
                               k.received, 0, NULL, release)::tokenkeeper.registration
                    FROM unnest(numbers) AS i
                    CROSS JOIN (VALUES (at, received, true), (again, greatest(again, received), false)) AS k (at, received, is_logout)
                    WHERE k.at IS NOT NULL ORDER BY i), 1000000, 1, 1000);
                RETURN (SELECT string_agg(f.fate || ' ' || f.n, ', ' ORDER BY f.fate) FROM (
                    SELECT 'recorded' AS fate, count(*) - before AS n FROM tokenkeeper.receipt
                    UNION ALL SELECT 'held', done.held
                    UNION ALL SELECT 'waiting', done.waiting
                    UNION ALL SELECT 'excluded', cardinality(numbers) - done.held - done.waiting - (SELECT count(*) - before FROM tokenkeeper.receipt)
                    UNION ALL SELECT 'tripped', count(*) FROM unnest(done.changes) AS c WHERE c.tripped
                    UNION ALL SELECT 'reset', count(*) FROM unnest(done.changes) AS c WHERE NOT c.tripped) AS f
                    WHERE f.n > 0);
            END
            $$;
            """)
    }

    /// Records logouts of tokens of the topic `t`, as a batch of the drain does, and returns their fates.
    ///
    /// - Parameters:
    ///   - at: When the devices logged out; nil for `received`.
    ///   - source: Nil for the application's own.
    ///   - registeredAgain: The tokens' registration in the same batch.
    func logOut(
        _ numbers: ClosedRange<Int>, at: String? = nil, received: String, source: Int? = 1, released: Bool = false,
        registeredAgain: String? = nil
    ) throws -> String {
        try psql(
            """
            SET lock_timeout = '100ms';
            SELECT record_logouts(ARRAY(SELECT generate_series(\(numbers.lowerBound), \(numbers.upperBound))), '\(at ?? received)', '\(received)',
                                  \(source.map(String.init) ?? "NULL"), \(released), \(registeredAgain.map { "'\($0)'" } ?? "NULL"))
            """, user: "a_daemon")
    }
}
