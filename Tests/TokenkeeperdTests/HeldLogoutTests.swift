import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What the commands say about logouts that the guard holds.
@Suite(.ownThread) struct `Held logouts` {
    private func stage() throws -> TestDatabase {
        let database = try TestCluster.shared.database()
        try database.psql(
            """
            SELECT tokenkeeper.register(t, 't', registered_at => '2025-01-01Z') FROM unnest('{abcdef0123456789,fedcba9876543210}'::text[]) AS t;
            INSERT INTO tokenkeeper.registration_source (kind, name) VALUES ('attachment', 'public.devices');
            INSERT INTO tokenkeeper.tripped_guard (topic_id, cause, tripped_at, undo_since, tokens, active, max_tokens)
            VALUES (1, 'unregistered_by_app', '2025-02-01Z', '2025-01-31Z', 3, 4, 2);
            INSERT INTO tokenkeeper.held_registration (topic_id, token_key, invalidated_at, topic, token, registered_at, unregistered, source_id, queued_at)
            SELECT 1, decode(t, 'hex'), '2025-02-01Z', 't', t, '2025-02-01Z', true, 1, '2025-02-01Z'
            FROM unnest('{abcdef0123456789,fedcba9876543210}'::text[]) AS t;
            """)
        return database
    }

    private func command(_ database: TestDatabase, _ words: [String], user: String = "a_reader") throws -> String {
        try ProgramRun(
            [DaemonProcess.program] + words, environment: ["TOKENKEEPER_DATABASE_URL": database.url(user: user)]
        ).output
    }

    @Test func `held list names the sources and prints commands about logouts alone`() throws {
        let database = try stage()
        // Suspects of the same topic are another entry.
        try database.psql(
            """
            INSERT INTO tokenkeeper.held_result (topic_id, token_key, invalidated_at, reason, topic, queued_at)
            VALUES (1, '\\x02', '2025-02-01Z', 'BadDeviceToken', 't', '2025-02-01Z')
            """)
        let of = "--topic t --environment production --cause unregistered_by_app"
        let list = try command(database, ["held", "list"])
        #expect(
            list.hasSuffix(
                """
                t (production): 2 logouts of 2 tokens are held
                  sources   public.devices 2
                  queued    2025-02-01 00:00:00 UTC to 2025-02-01 00:00:00 UTC
                  guard     tripped at 2025-02-01 00:00:00 UTC
                  If nobody has logged out, stop what changes the table, then run:
                    tokenkeeperd reinstate --cause unregistered_by_app --topic t --environment production --since 2025-01-31T00:00:00.000000Z --dry-run
                    tokenkeeperd reinstate --cause unregistered_by_app --topic t --environment production --since 2025-01-31T00:00:00.000000Z
                    tokenkeeperd held discard \(of)
                  If these devices have really logged out, run:
                    tokenkeeperd held release \(of)

                """), "\(list)")
        #expect(
            list.hasPrefix("t (production): 1 result of 1 token is held\n  reasons   BadDeviceToken 1\n"), "\(list)")
        let words = of.split(separator: " ").map(String.init)
        let discarded = try command(database, ["held", "discard"] + words, user: "a_operator")
        #expect(discarded == "2 logouts are deleted and were not recorded\n")
        #expect(try database.psql("SELECT count(*) FROM tokenkeeper.held_result") == "1")
    }

    @Test func `explain shows a held logout, and one that was undone`() throws {
        let database = try stage()
        var daemon = try database.connect(user: "a_daemon")
        let explained = try command(database, ["explain", "abcdef0123456789"])
        #expect(
            explained.contains(
                "a logout that a source reported is held by the mass-failure guard; it would count as of 2025-02-01"),
            "\(explained)")
        try database.psql(
            """
            INSERT INTO tokenkeeper.receipt (topic_id, token_key, cause, invalidated_at, received_at, source_id, counted)
            VALUES (1, '\\xfedcba9876543210', 'unregistered_by_app', '2025-02-01Z', '2025-02-01Z', 1, true);
            UPDATE tokenkeeper.ledger SET unregistered_by_app_at = '2025-02-01Z' WHERE token_key = decode('fedcba9876543210', 'hex');
            SELECT tokenkeeper.recompute_tokens();
            SELECT tokenkeeper.reinstate('t', 'production', '2025-02-01Z', '2025-02-01Z', 'unregistered_by_app');
            """)
        while try Reinstatement.undo(within: .seconds(5), on: &daemon, while: { true }) {}
        let undone = try command(database, ["explain", "fedcba9876543210"])
        #expect(
            undone.contains(
                "reinstated: the logout from the attachment of public.devices as of 2025-02-01 00:00:00 UTC does not count any more"
            ), "\(undone)")
        #expect(
            undone.contains(
                "logouts from attached tables and files received from 2025-02-01 00:00:00 UTC to 2025-02-01 00:00:00 UTC do not count"
            ),
            "\(undone)")
    }
}
