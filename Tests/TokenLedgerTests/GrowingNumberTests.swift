import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// Numbers that grow with each call of an application, also with one that is rolled back.
@Suite(.ownThread) struct `Numbers that grow with use` {
    @Test func `a sender cannot use up the numbers of campaigns`() throws {
        let stage = try CampaignStage(tokens: 1)
        #expect(try stage.enqueue() == 1)
        try stage.database.psql("SELECT setval('tokenkeeper.campaign_campaign_id_seq', 1073741822)")
        #expect(try stage.enqueue() == 1_073_741_823)
        #expect(try stage.enqueue() == 2, "1 is in use")
        for campaign in [2, 1_073_741_823] {
            try stage.addressAll(campaign)
            #expect(try stage.claim(campaign).count == 1)
        }
    }

    @Test func `an application cannot use up the numbers of topics`() throws {
        let database = try TestCluster.shared.database()
        try database.psql("SELECT tokenkeeper.register('aa', 'a')", user: "a_app")
        try database.psql("SELECT setval('tokenkeeper.topic_topic_id_seq', 2147483646)")
        for topic in ["b", "c"] { try database.psql("SELECT tokenkeeper.register('aa', '\(topic)')", user: "a_app") }
        #expect(
            try database.psql(
                "SELECT string_agg(topic || ' ' || topic_id, ', ' ORDER BY topic) FROM tokenkeeper.topic")
                == "a 1, b 2147483647, c 2", "1 is in use")
        try database.psql("SELECT setval('tokenkeeper.topic_topic_id_seq', 2147483647)")
        try database.psql(
            "INSERT INTO tokenkeeper.topic_policy (topic, gate) SELECT 'd' || i, 'observe' FROM generate_series(1, 3) AS i",
            user: "a_operator")
        #expect(try database.psql("SELECT count(DISTINCT topic_id) FROM tokenkeeper.topic") == "6")
    }

    @Test func `no other number that the database counts up is smaller than a bigint`() throws {
        let database = try TestCluster.shared.database()
        #expect(
            try database.psql(
                """
                SELECT string_agg(s.sequencename, ',' ORDER BY 1) FROM pg_sequences AS s
                WHERE s.schemaname = 'tokenkeeper' AND s.max_value < 9223372036854775807 AND NOT s.cycle
                """) == "")
    }
}
