import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

@Suite(.ownThread) struct `Many campaigns that have ended` {
    let stage: CampaignStage

    init() throws {
        stage = try CampaignStage(tokens: 3)
        // A sender that creates a campaign for each message to a person.
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.campaign (environment, topic, state, payload, push_type, audience_kind, audience, content_hash, is_addressed, ended_at)
            SELECT 'production', '\(CampaignStage.topic)', CASE WHEN i % 10 = 0 THEN 'cancelled' ELSE 'ended' END, '{}', 'alert',
                   (ARRAY['user', 'device', 'tokens', 'tags'])[1 + i % 4], CASE i % 4 WHEN 2 THEN NULL ELSE 'someone-' || i END, '', true,
                   now() - i * interval '1 second'
            FROM generate_series(1, 100000) AS i
            """)
    }

    /// How many rows of `campaign` a statement reads. It is rolled back.
    private func rowsRead(_ statement: String) throws -> Int {
        let read =
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'tokenkeeper.campaign'::regclass"
        // The session may not have reported earlier transactions yet: only the difference counts.
        let lines = try stage.database.psql("BEGIN; \(read); \(statement); \(read); ROLLBACK").split(separator: "\n")
        guard let before = lines.first.flatMap({ Int($0) }), let after = lines.last.flatMap({ Int($0) }) else {
            return -1
        }
        return after - before
    }

    @Test(arguments: [false, true]) func `are not read by forget, nor by the sweep`(isAnalyzed: Bool) throws {
        if isAnalyzed { try stage.database.psql("ANALYZE tokenkeeper.campaign") }
        for waiting in ["everyone => true", "tokens => '{aa}'", "user_id => 'u1'", "device_id => 'd1'"] {
            try stage.enqueue(waiting)
        }
        for statement in [
            "SELECT tokenkeeper.forget('\(CampaignStage.token(1))')", "SELECT tokenkeeper.forget('aa')",
            "SELECT tokenkeeper.forget_device('d1')", "SELECT tokenkeeper.forget_user('u1')",
            "SELECT tokenkeeper.forget_user('someone-4')",
            "SELECT tokenkeeper.delete_campaigns(now() - interval '30 days')",
            "SELECT tokenkeeper.unused_topics(ARRAY(SELECT t.topic_id FROM tokenkeeper.topic AS t), now())",
            "SELECT tokenkeeper.campaigns_due()",
        ] {
            #expect(try 0..<100 ~= rowsRead(statement), "\(statement)")
        }
    }

    @Test func `are deleted many at a time, the oldest first`() throws {
        func delete(_ most: Int) throws -> String {
            try stage.database.psql(
                "SELECT deleted, has_more FROM tokenkeeper.delete_campaigns(now() - interval '70000 seconds', \(most))",
                user: "a_daemon")
        }
        // In the order in which the sweep takes them, the first has more endings than a part.
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
            SELECT c.campaign_id, i, 1, 'accepted', '{1}'
            FROM (SELECT campaign_id FROM tokenkeeper.campaign ORDER BY ended_at LIMIT 1) AS c, generate_series(1, 4500) AS i
            """)
        #expect(
            try rowsRead("SELECT tokenkeeper.delete_campaigns(now() - interval '70000 seconds', 4000)") < 20_000)
        #expect(try delete(4000) == "3999|t", "the endings of one are not deleted yet")
        #expect(try delete(4000) == "4000|t")
        var rounds = 0
        while try delete(4000).hasSuffix("t") { rounds += 1 }
        #expect(rounds == 5)
        #expect(try stage.count("campaign_ending") == 0 && 69_990..<70_100 ~= stage.count("campaign"))
    }

    @Test func `finishing reads its own batches only, also in a session that began with one batch`() throws {
        func finish(_ campaign: String) -> String {
            """
            SELECT tokenkeeper.finish_requests('d', ARRAY[
                ROW(-(((\(campaign))::bigint << 32) | 513), 'returned', NULL, NULL, NULL, NULL, NULL, NULL, NULL)::tokenkeeper.request_ending]);
            """
        }
        func batches(of campaigns: String, _ numbers: String) -> String {
            """
            INSERT INTO tokenkeeper.campaign_batch (campaign_id, batch, requests, first_key, token_keys, claimed_by)
            SELECT c.campaign_id, n, 1, '\\x01', '{"\\\\x01"}', 'd' FROM tokenkeeper.campaign AS c CROSS JOIN generate_series(\(numbers)) AS n WHERE \(campaigns);
            """
        }
        let read = """
            SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'tokenkeeper.campaign_batch'::regclass;
            """
        let first = "SELECT min(campaign_id) FROM tokenkeeper.campaign"
        let lines = try stage.database.psql(
            """
            BEGIN;
            \(batches(of: "c.campaign_id = (\(first))", "1, 1"))
            ANALYZE tokenkeeper.campaign_batch;
            \(String(repeating: finish(first), count: 7))
            \(batches(of: "c.campaign_id > (\(first)) AND c.campaign_id < (\(first)) + 5000", "1, 1"))
            \(batches(of: "c.campaign_id = (\(first))", "2, 5000"))
            \(read)
            \(finish("SELECT min(campaign_id) + 2500 FROM tokenkeeper.campaign"))
            \(finish(first))
            \(read)
            ROLLBACK
            """
        ).split(separator: "\n").map { Int($0) ?? -1 }
        #expect(lines.count == 11 && lines[8] == 1, "it finishes one: \(lines)")
        #expect(lines[10] - lines[7] < 100, "\(lines)")
    }
}
