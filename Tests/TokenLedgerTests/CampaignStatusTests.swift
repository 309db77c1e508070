import LedgerTestSupport
import TestThreads
import Testing

@testable import TokenLedger

/// What status, the log and the metrics say about campaigns.
@Suite(.ownThread) struct `Campaigns as people see them` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 120) AS i",
            user: "a_app")
    }

    @discardableResult
    private func enqueue(_ arguments: String = "everyone => true", as user: String = "a_sender") throws -> String {
        try database.psql(
            "SET client_min_messages = warning; SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', 't', \(arguments))",
            user: user)
    }

    private func address(_ number: String) throws {
        try database.psql("SELECT tokenkeeper.address_campaign(\(number), 100000)", user: "a_daemon")
    }

    private func warnings(_ column: String) throws -> String {
        try database.psql(
            "SELECT array_to_string(ARRAY(SELECT w FROM unnest(\(column)) AS w WHERE w LIKE 'campaign%'), '; ') FROM tokenkeeper.status",
            user: "a_reader")
    }

    @Test func `status warns of a campaign that no daemon sends, and of no other`() throws {
        try enqueue()
        let later = try enqueue("everyone => true, scheduled_at => '2100-01-01Z'")
        let paused = try enqueue()
        try database.psql("SELECT tokenkeeper.pause_campaign(\(paused))", user: "a_sender")
        #expect(try warnings("warnings") == "", "a daemon that starts takes a moment")
        try database.psql("UPDATE tokenkeeper.campaign SET created_at = created_at - interval '2 minutes'")
        let warning = try warnings("warnings")
        #expect(warning.hasPrefix("campaign 1 of t (production) has been due since "))
        #expect(warning.hasSuffix(": no running daemon sends") && !warning.contains("campaign \(later)"))
        #expect(try warnings("critical_warnings") == "")
        try database.psql("UPDATE tokenkeeper.campaign SET created_at = created_at - interval '5 minutes'")
        #expect(try warnings("critical_warnings").hasPrefix("campaign 1 of t"))
        #expect(try database.psql("SELECT open_campaigns FROM tokenkeeper.status", user: "a_reader") == "2")
        // The pause of the topic has a warning of its own.
        try database.psql("SELECT tokenkeeper.pause_sending('t')", user: "a_operator")
        #expect(try warnings("warnings") == "")
        try database.psql("SELECT tokenkeeper.resume_sending('t')", user: "a_operator")
        try database.psql(
            "INSERT INTO tokenkeeper.sending_daemon VALUES ('d', 'here', now(), NULL, '[{\"name\":\"main\",\"topics\":[\"*\"]}]', '{}')"
        )
        #expect(try warnings("warnings") == "")
    }

    @Test func `what waits in campaigns counts as requests, each once`() throws {
        let look = "SELECT requests, campaign_requests FROM tokenkeeper.status"
        try database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) SELECT 't', 'aa', '{}' FROM generate_series(1, 3)",
            user: "a_sender")
        let number = try enqueue()
        #expect(try database.psql(look, user: "a_reader") == "3|0", "nobody is addressed yet")
        try address(number)
        #expect(try database.psql(look, user: "a_reader") == "123|120")
        try database.psql(
            """
            INSERT INTO tokenkeeper.campaign_ending (campaign_id, batch, requests, outcome, ordinals)
            VALUES (\(number), 1, 20, 'accepted', '{}'), (\(number), 1, 7, 'requeued', '{}');
            INSERT INTO tokenkeeper.send_request (topic, token, payload, campaign_id, campaign_number)
            SELECT 't', 'aa', '{}', \(number), i FROM generate_series(1, 7) AS i;
            UPDATE tokenkeeper.campaign_batch SET ended = rpad(repeat('1', 27), 512, '0')::bit(512) WHERE batch = 1;
            """)
        #expect(try database.psql(look, user: "a_reader") == "103|100", "one that is tried again is in both tables")
        var reader = try database.connect(user: "a_reader")
        #expect(try CampaignProgress.running(5, on: &reader).map(\.waiting) == [100])
        try database.psql(
            "DELETE FROM tokenkeeper.campaign_batch; DELETE FROM tokenkeeper.send_request WHERE campaign_id IS NOT NULL"
        )
        #expect(try database.psql(look, user: "a_reader") == "3|0")
    }

    @Test func `a sender sees its own campaigns, a reader and monitoring all`() throws {
        try enqueue()
        try enqueue(as: "owner")
        for view in ["campaign_progress", "campaign_wait"] {
            let query = "SELECT string_agg(campaign_id::text, ' ' ORDER BY campaign_id) FROM tokenkeeper.\(view)"
            #expect(try database.psql(query, user: "a_sender") == "1", "\(view)")
            for user in ["a_reader", "a_operator", "a_daemon", "a_monitor"] {
                #expect(try database.psql(query, user: user) == "1 2", "\(view) \(user)")
            }
        }
    }

    @Test func `each change of a large campaign is logged once, by any daemon`() throws {
        var one = try database.connect(user: "a_daemon")
        var other = try database.connect(user: "a_daemon")
        func taken() throws -> [String] {
            let first = try CampaignTransition.takeNew(on: &one)
            #expect(try CampaignTransition.takeNew(on: &other).isEmpty)
            return first.map { "\($0.number) \($0.before ?? "-") \($0.state) \($0.addressed)" }
        }
        let large = try enqueue("everyone => true, name => 'all'")
        let small = try enqueue("tokens => '{aa}'")
        #expect(try taken().isEmpty, "they wait")
        for number in [large, large, small] { try address(number) }
        #expect(try taken() == ["1 - running 120"], "a small one would fill the log")
        try database.psql("SELECT tokenkeeper.pause_campaign(\(large)), tokenkeeper.cancel_campaign(\(small))")
        #expect(try taken() == ["1 running paused 120", "2 - cancelled 1"])
        try database.psql("SELECT tokenkeeper.resume_campaign(\(large))")
        #expect(try taken() == ["1 paused running 120"])
        #expect(try taken().isEmpty)
        try database.psql("UPDATE tokenkeeper.campaign SET state = 'ended' WHERE campaign_id = \(large)")
        let ended = try CampaignTransition.takeNew(on: &one)
        #expect(ended.map(\.name) == ["all"] && ended.first?.outcomes.isEmpty == true)
    }

    @Test func `the metrics count open campaigns and their requests, and since when one is stuck`() throws {
        try address(try enqueue())
        try enqueue("everyone => true, scheduled_at => '2100-01-01Z'")
        try database.psql("UPDATE tokenkeeper.campaign SET created_at = '2026-01-01Z' WHERE campaign_id = 1")
        var daemon = try database.connect(user: "a_daemon")
        let labels = TopicLabels()
        labels.take(["t"])
        let gauges = try DatabaseGauges(labels, on: &daemon)
        #expect(gauges.trouble == nil && gauges.totals[.openCampaigns] == 2)
        #expect(
            gauges.byTopic[.campaignRequests] == [.init(environment: "production", topic: "t", value: 120)])
        #expect(
            gauges.byTopic[.outboxOldestDue] == [.init(environment: "production", topic: "t", value: 1_767_225_600)])
    }
}
