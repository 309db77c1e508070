import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Comparison with an attached table` {
    private func devices(onDelete: String = "unregister") throws -> AttachedDevices {
        let devices = try AttachedDevices()
        try devices.attach("on_delete => '\(onDelete)'")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, device) SELECT lpad(to_hex(i), 4, '0'), now() - interval '1 day', 'd' || i FROM generate_series(1, 100) AS i"
        )
        return devices
    }

    @Test func `what the queue still holds is no difference, and then there is none`() throws {
        let devices = try devices()
        #expect(try devices.differences() == "")
        #expect(
            try devices.app("SELECT number FROM tokenkeeper.compare('app.devices') WHERE finding = 'queued'") == "100")
        try devices.drain()
        #expect(
            try devices.app("SELECT finding, number FROM tokenkeeper.compare('app.devices')") == "rows|100\ntokens|100")
        #expect(try devices.app("SELECT findings FROM tokenkeeper.attachment") == "{\"rows\": 100, \"tokens\": 100}")
    }

    @Test(arguments: ["unregister", "ignore"])
    func `after triggers were disabled it finds exactly what is missing, and reconcile repairs it`(onDelete: String)
        throws
    {
        let devices = try devices(onDelete: onDelete)
        try devices.drain()
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id <= 4")
        try devices.drain()
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        try devices.app("UPDATE app.devices SET logged_out_at = NULL WHERE id <= 2")  // Without a registration.
        try devices.app("UPDATE app.devices SET logged_out_at = NULL, last_seen = now() WHERE id = 3")
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id BETWEEN 11 AND 15")
        try devices.app("DELETE FROM app.devices WHERE id BETWEEN 21 AND 26")
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) SELECT lpad(to_hex(i), 4, 'f'), now() FROM generate_series(1, 7) AS i"
        )
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen) VALUES ('no hex', now()), ('ffee', now() + interval '1 day'), (NULL, NULL)"
        )
        // Another row has the token of row 11.
        try devices.app("INSERT INTO app.devices (push_token, last_seen) VALUES ('000B', now() - interval '2 days')")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        let expected =
            "behind 1, logged_in 2, logged_out 4, missing 7" + (onDelete == "unregister" ? ", without_row 6" : "")
        #expect(try devices.differences() == expected)
        #expect(
            try devices.app(
                "SELECT finding, number FROM tokenkeeper.compare('app.devices') WHERE finding IN ('refused', 'without_token', 'without_row', 'unregistered_by_app') ORDER BY 1"
            ) == "refused|2\nwithout_row|6\nwithout_token|1")
        // A dry run changes nothing.
        try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices')")
        #expect(try devices.queued() == [])
        try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)")
        #expect(try devices.queued().count == (onDelete == "unregister" ? 20 : 14))
        #expect(try devices.differences() == "")
        try devices.drain()
        #expect(try devices.differences() == "")
        #expect(
            try devices.database.psql("SELECT state, count(*) FROM tokenkeeper.token GROUP BY 1 ORDER BY 1")
                == (onDelete == "unregister"
                    ? "active|96\nunregistered_by_app|11" : "active|102\nunregistered_by_app|5"))
        #expect(
            try devices.app(
                "SELECT queued, finished_at IS NOT NULL FROM tokenkeeper.registration_source WHERE kind = 'reconciliation'"
            )
                == (onDelete == "unregister" ? "20|t" : "14|t"))
    }

    @Test func `a row that has taken back a logout is repaired at once, whatever its instant is`() throws {
        let devices = try devices()
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, logged_out_at) VALUES ('aaaa', now() - interval '1 day', now())"
        )
        try devices.app("UPDATE app.devices SET logged_out_at = now() WHERE id = 1")
        try devices.drain()
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        // A token that was never registered, and one that was registered before the logout.
        try devices.app("UPDATE app.devices SET logged_out_at = NULL")
        try devices.app("UPDATE app.devices SET last_seen = last_seen + interval '1 hour' WHERE id = 1")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        #expect(try devices.differences() == "behind 1, missing 1")
        try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)")
        try devices.drain()
        #expect(try devices.differences() == "")
        #expect(try devices.database.psql("SELECT DISTINCT state FROM tokenkeeper.token") == "active")
    }

    @Test func `a stale token that the table still has is no difference, nor is one that was pruned`() throws {
        let devices = try devices()
        try devices.drain()
        try devices.database.psql(
            "UPDATE tokenkeeper.ledger SET stale_at = clock_timestamp() WHERE token_key IN ('\\x0001', '\\x0002')")
        try devices.database.psql(
            """
            WITH gone AS (DELETE FROM tokenkeeper.ledger WHERE token_key = '\\x0002' RETURNING *)
            INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, registered_before) SELECT topic_id, token_key, 'pruned', registered_at FROM gone
            """)
        #expect(try devices.differences() == "")
        #expect(
            try devices.app("SELECT finding, number FROM tokenkeeper.compare('app.devices')")
                == "pruned|1\nrows|100\nstale|1\ntokens|99")
        try devices.app("UPDATE app.devices SET last_seen = now() WHERE id <= 2")
        try devices.drain()
        #expect(
            try devices.app("SELECT finding, number FROM tokenkeeper.compare('app.devices')") == "rows|100\ntokens|100")
    }

    @Test func `another user or other tags are a difference, and reconcile brings those of the table`() throws {
        let devices = try devices()
        try devices.app("UPDATE app.devices SET user_id = id, tags = '{a}'")
        try devices.drain()
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        try devices.app("UPDATE app.devices SET user_id = 99 WHERE id = 1")
        try devices.app("UPDATE app.devices SET tags = NULL WHERE id IN (2, 3)")
        // Suppressed: no push, so no difference. The next registration brings the user.
        try devices.app("UPDATE app.devices SET user_id = 99 WHERE id = 4")
        try devices.database.psql("SELECT tokenkeeper.unregister('0004', 't')")
        // Another row has the token with the user of the ledger, in another spelling.
        try devices.app(
            "INSERT INTO app.devices (push_token, last_seen, user_id, tags) VALUES ('<00 05>', now() - interval '2 days', 5, '{a}')"
        )
        try devices.app("UPDATE app.devices SET user_id = 99 WHERE id = 5")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        try devices.app("SELECT FROM tokenkeeper.compare('app.devices')")
        #expect(try devices.differences() == "details 3")
        try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)")
        #expect(try devices.differences() == "")
        try devices.drain()
        #expect(try devices.differences() == "")
        #expect(
            try devices.database.psql(
                "SELECT token, user_id, device_id, tags FROM tokenkeeper.token WHERE token <= '0005' ORDER BY 1")
                == "0001|99|d1|{a}\n0002|2|d2|{}\n0003|3|d3|{}\n0004|4|d4|{a}\n0005|5|d5|{a}")
    }

    @Test func `a change that the triggers queue during a reconciliation wins over what it has read`() throws {
        let devices = try devices()
        try devices.app("UPDATE app.devices SET user_id = 1")
        try devices.drain()
        try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER")
        try devices.app("UPDATE app.devices SET user_id = 2 WHERE id = 1")
        try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
        // The reconciliation reads row 1, and before its batch ends another session changes the row and commits.
        let run = try devices.app("SELECT tokenkeeper.begin_source('reconciliation', 'app.devices')")
        var reconciler = try devices.database.connect(user: "a_app")
        try reconciler.execute("BEGIN")
        try reconciler.execute(
            "SELECT FROM tokenkeeper.compare_next((SELECT source_id FROM tokenkeeper.attachment), NULL, 1000, \(run))")
        try devices.app("UPDATE app.devices SET user_id = 3 WHERE id = 1")
        try reconciler.execute("COMMIT")
        #expect(
            try devices.database.psql(
                "SELECT user_id, queued_at < (SELECT max(queued_at) FROM tokenkeeper.registration) FROM tokenkeeper.registration WHERE source_id = \(run)"
            ) == "2|t")
        try devices.drain()
        #expect(try devices.database.psql("SELECT user_id FROM tokenkeeper.token WHERE token = '0001'") == "3")
    }

    /// The same changes with triggers and without them, followed by a reconciliation.
    @Test(arguments: ["unregister", "ignore"])
    func `a token that changed without a registration ends as the trigger would leave it`(onDelete: String) throws {
        func ledger(reconciling: Bool) throws -> String {
            let devices = try devices(onDelete: onDelete)
            try devices.drain()
            if reconciling { try devices.app("ALTER TABLE app.devices DISABLE TRIGGER USER") }
            // Smaller and greater than the former token, which decides between equal instants.
            try devices.app("UPDATE app.devices SET push_token = '0000' WHERE id = 1")
            try devices.app("UPDATE app.devices SET push_token = '<ff ff>' WHERE id = 2")
            try devices.app(
                "UPDATE app.devices SET push_token = 'eeee', last_seen = last_seen - interval '1 hour' WHERE id = 3")
            // With a later instant it supersedes the former one.
            try devices.app(
                "UPDATE app.devices SET push_token = 'dddd', last_seen = last_seen + interval '1 hour' WHERE id = 4")
            // A second row of a device, whose token has a row: the trigger of an INSERT names the device.
            try devices.app(
                "INSERT INTO app.devices (push_token, last_seen, device) VALUES ('cccc', now() - interval '2 days', 'd5')"
            )
            // The former token is in another row: nobody has given it up.
            try devices.app(
                "INSERT INTO app.devices (push_token, last_seen) VALUES ('0006', now() - interval '3 days')")
            try devices.app(
                "UPDATE app.devices SET push_token = 'bbbb', last_seen = last_seen + interval '1 hour' WHERE id = 6")
            if reconciling {
                try devices.app("ALTER TABLE app.devices ENABLE TRIGGER USER")
                try devices.app("SELECT FROM tokenkeeper.reconcile('app.devices', dry_run => false)")
            }
            try devices.drain()
            #expect(try devices.differences() == "")
            return try devices.database.psql(
                "SELECT token, state, device_id FROM tokenkeeper.token WHERE token <= '0007' OR token > '0064' ORDER BY 1"
            )
        }
        let expected = try ledger(reconciling: false)
        #expect(expected.contains("0001|unregistered_by_app|d1") && expected.contains("0000|active|\n"), "\(expected)")
        #expect(try ledger(reconciling: true) == expected)
    }

    @Test func `reconcile returns the source that withdraw takes`() throws {
        let devices = try devices()
        try devices.forgetQueue()
        #expect(
            try devices.app("SELECT finding, source_id FROM tokenkeeper.reconcile('app.devices') WHERE is_difference")
                == "missing|")
        let source = try devices.app(
            "SELECT source_id FROM tokenkeeper.reconcile('app.devices', dry_run => false) WHERE is_difference")
        try devices.drain()
        #expect(try devices.app("SELECT withdrawn FROM tokenkeeper.withdraw(\(source))") == "100")
    }

    @Test func `reconciliations that have queued nothing are forgotten after a day`() throws {
        let devices = try devices()
        // Of a table that cannot be read, for example: the daemon tries again and again.
        for _ in 0..<3 { try devices.app("SELECT tokenkeeper.begin_source('reconciliation', 'app.devices')") }
        try devices.app("SELECT tokenkeeper.begin_source('backfill', 'app.devices')")
        try devices.database.psql(
            """
            UPDATE tokenkeeper.registration_source SET queued = 7 WHERE source_id = 2;
            UPDATE tokenkeeper.registration_source SET started_at = started_at - interval '2 days' WHERE source_id IN (1, 2, 3, 5)
            """)
        let last = try devices.app("SELECT tokenkeeper.begin_source('reconciliation', 'app.devices')")
        #expect(
            try devices.database.psql(
                "SELECT string_agg(source_id::text, ' ' ORDER BY source_id) FROM tokenkeeper.registration_source")
                == "1 2 4 5 \(last)")
    }

    @Test func `it goes on where it stopped, batch by batch`() throws {
        let devices = try devices()
        try devices.forgetQueue()
        let source = try devices.app("SELECT source_id FROM tokenkeeper.attachment")
        let run = try devices.app("SELECT tokenkeeper.begin_source('reconciliation', 'app.devices')")
        var steps = 0
        repeat {
            // Each in a session of its own, by what the last one has left in the database.
            try devices.database.psql(
                "SELECT FROM tokenkeeper.compare_next(\(source), (SELECT position FROM tokenkeeper.registration_source WHERE source_id = \(run)), 30, \(run))",
                user: "a_daemon")
            steps += 1
            if steps == 3 { try devices.drain() }
        } while try devices.app(
            "SELECT finished_at IS NULL FROM tokenkeeper.registration_source WHERE source_id = \(run)") == "t"
            && steps < 50
        try devices.drain()
        #expect(try devices.app("SELECT queued FROM tokenkeeper.registration_source WHERE source_id = \(run)") == "100")
        #expect(steps > 5 && steps < 50)
        #expect(try devices.differences() == "")
    }

    @Test func `only the owner, operators and the daemon compare`() throws {
        let devices = try devices()
        try devices.database.psql(
            "CREATE ROLE stranger LOGIN; GRANT tokenkeeper_app TO stranger; GRANT USAGE ON SCHEMA app TO stranger",
            user: "postgres")
        defer { _ = try? devices.database.psql("DROP OWNED BY stranger; DROP ROLE stranger", user: "postgres") }
        for user in ["a_app", "a_operator"] {
            try devices.database.psql(
                "SELECT FROM tokenkeeper.compare_next((SELECT source_id FROM tokenkeeper.attachment), NULL)", user: user
            )
        }
        #expect(throws: (any Error).self) {
            try devices.database.psql(
                "SELECT FROM tokenkeeper.compare_next((SELECT source_id FROM tokenkeeper.attachment), NULL)",
                user: "stranger")
        }
    }

    /// begin_backfill continues a backfill that is not finished, from the position that it has.
    @Test func `a stranger cannot begin or move the backfill of a table`() throws {
        let devices = try devices()
        try devices.database.psql("CREATE ROLE forger LOGIN; GRANT tokenkeeper_app TO forger", user: "postgres")
        defer { _ = try? devices.database.psql("DROP OWNED BY forger; DROP ROLE forger", user: "postgres") }
        for kind in ["backfill", "reconciliation"] {
            let error = #expect(throws: (any Error).self) {
                try devices.database.psql("SELECT tokenkeeper.begin_source('\(kind)', 'app.devices')", user: "forger")
            }
            #expect("\(String(describing: error))".contains("forger is no member of the table's owner"))
        }
        // Nor the owner by hand: the function that reads the rows notes the position.
        let source = try devices.app("SELECT source_id FROM tokenkeeper.begin_backfill('app.devices')")
        for user in ["forger", "a_app"] {
            #expect(throws: (any Error).self) {
                try devices.database.psql("SELECT tokenkeeper.advance_source(\(source), '99', 1, 0)", user: user)
            }
        }
        #expect(
            try devices.app("SELECT source_id, resumes FROM tokenkeeper.begin_backfill('app.devices')") == "\(source)|t"
        )
    }
}
