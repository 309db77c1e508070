import Foundation
import LedgerTestSupport
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// What daemons do with campaigns.
@Suite(.ownThread) struct `Requests of a campaign` {
    @Test func `daemons that claim at once share the batches, and each request is claimed once`() throws {
        let stage = try CampaignStage(tokens: 6000)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let failures = Failures()
        let numbers = Failures()
        atOnce(4) { worker in
            do {
                while case let more = try stage.claim(campaign, by: "d\(worker)", most: 600), !more.isEmpty {
                    for (number, token) in more { numbers.add("\(number) \(token)") }
                    // Another claim may have this batch locked, though it does not take it. What stays claimed is finished again.
                    var ended = 0
                    for _ in 1...1000 where ended < more.count {
                        ended += try stage.finish(more.keys.map { .accepted($0) }, by: "d\(worker)")
                    }
                }
            } catch { failures.add("\(error)") }
        }
        #expect(failures.all == [])
        // A daemon may have found all batches locked, and left.
        while case let more = try stage.claim(campaign), !more.isEmpty {
            for (number, token) in more { numbers.add("\(number) \(token)") }
            try stage.finish(more.keys.map { .accepted($0) })
        }
        #expect(numbers.all.count == 6000 && Set(numbers.all).count == 6000)
        #expect(try stage.progress(campaign) == "6000|0|6000|0|0|0|0|0|0")
        #expect(try stage.count("campaign_batch") == 0 && stage.state(campaign) == "ended")
        #expect(try stage.count("send_result", "status = '200'") == 6000)
    }

    @Test func `a claim takes whole batches, and one if there is a little room`() throws {
        let stage = try CampaignStage(tokens: 2050)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        #expect(try stage.claim(campaign, most: 12).isEmpty, "50 in the first batch")
        #expect(try stage.claim(campaign, most: 13).count == 50)
        #expect(try stage.claim(campaign, most: 999).count == 950, "500 and 450")
    }

    @Test func `claims begin at the first batch that is left`() throws {
        let stage = try CampaignStage(tokens: 12_000)
        let campaign = try stage.enqueue()
        func first() throws -> String { try stage.database.psql("SELECT first_open_batch FROM tokenkeeper.campaign") }
        try stage.address(campaign, ahead: 500)
        // Batch 3 is not finished, and batch 2 comes back.
        #expect(try stage.claim(campaign, by: "a", most: 50).count == 50)
        let second = try stage.claim(campaign, by: "b", most: 500)
        #expect(try stage.claim(campaign, by: "c", most: 500).count == 450)
        #expect(try first() == "1")
        try stage.finish(Array(1...50).map { .accepted(-(campaign << 32 | 1 << 9 | $0)) })
        try stage.address(campaign, ahead: 500)
        #expect(try first() == "2")
        try stage.finish(second.keys.map { .returned($0) }, by: "b")
        #expect(try Set(stage.claim(campaign, most: 500).keys) == Set(second.keys))
        try stage.finish(second.keys.map { .accepted($0) })
        while case let more = try stage.claim(campaign), !more.isEmpty {
            try stage.finish(more.keys.map { .accepted($0) })
        }
        try stage.addressAll(campaign)
        #expect(try first() == "3")
        #expect(try stage.takeOver("c", sent: []) == "450|0")
        while case let more = try stage.claim(campaign), !more.isEmpty {
            try stage.finish(more.keys.map { .accepted($0) })
        }
        #expect(try stage.state(campaign) == "ended")
        #expect(try stage.progress(campaign) == "12000|0|12000|0|0|0|0|0|0")
    }

    @Test func `the gate is asked again, and what it refuses ends as suppressed`() throws {
        let stage = try CampaignStage(tokens: 20)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        try stage.suppress(3)
        try stage.suppress(20)
        #expect(Set(try stage.claim(campaign).values) == Set(1...20).subtracting([3, 20]))
        #expect(try stage.progress(campaign) == "20|18|0|0|0|2|0|0|0")
        #expect(
            try stage.database.psql(
                "SELECT state, push_type, campaign_id, apns_id IS NOT NULL, right(token, 2) FROM tokenkeeper.suppressed_send ORDER BY token"
            )
                == "stale|alert|\(campaign)|t|03\nstale|alert|\(campaign)|t|14")
    }

    @Test func `a batch of which the gate refuses all is gone`() throws {
        let stage = try CampaignStage(tokens: 5)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        for token in 1...5 { try stage.suppress(token) }
        #expect(try stage.claim(campaign).isEmpty)
        #expect(try stage.count("campaign_batch") == 0 && stage.state(campaign) == "ended")
        #expect(try stage.progress(campaign) == "5|0|0|0|0|5|0|0|0")
    }

    @Test func `after the expiration nobody is addressed, and what was addressed and not sent fails in sets`() throws {
        let stage = try CampaignStage(tokens: 1600)
        let campaign = try stage.enqueue("everyone => true, expiration => clock_timestamp() + interval '1 hour'")
        #expect(try stage.address(campaign) == 1000)
        let claimed = Array(try stage.claim(campaign, most: 100).keys)
        #expect(claimed.count == 50)
        try stage.database.psql("UPDATE tokenkeeper.campaign SET expiration = now() - interval '1 second'")
        #expect(try stage.claim(campaign).isEmpty && stage.address(campaign) == nil)
        #expect(try stage.due() == "")
        var daemon = try stage.database.connect(user: "a_daemon")
        let outbox = Outbox(daemonID: "a", processScope: "here", lockTimeout: .milliseconds(500))
        let app = TopicScope(environment: "production", topic: CampaignStage.topic)
        #expect(try outbox.campaignsDue(ending: true, on: &daemon).expired == [app: 950], "for metrics")
        #expect(try outbox.campaignsDue(ending: true, on: &daemon).expired == [:])
        #expect(try stage.progress(campaign) == "1000|50|0|0|0|0|950|0|0")
        #expect(try stage.state(campaign) == "running", "what is in flight ends with its response")
        try stage.finish(
            claimed[2...].map { .accepted($0) }
                + [.init(number: claimed[0], fate: "later", status: 503, pause: 0), .returned(claimed[1])])
        try stage.end()
        #expect(try stage.due() == "" && stage.claimSingle().isEmpty)
        #expect(try stage.state(campaign) == "ended")
        #expect(try stage.progress(campaign) == "1000|0|48|0|0|0|952|0|0")
        #expect(try stage.count("campaign", "is_addressed") == 0)
        #expect(try stage.count("failed_send") == 1, "one that had been sent")
        for number in [claimed[0], claimed[1], -(campaign << 32 | 2 << 9 | 7)] {
            #expect(
                try stage.delivery(number, "state, message") == "failed|its expiration passed before it could be sent")
        }
    }

    @Test func `a campaign that expires before it begins, or while it is paused, ends`() throws {
        let stage = try CampaignStage(tokens: 5)
        let hour = "everyone => true, expiration => clock_timestamp() + interval '1 hour'"
        let (unseen, paused) = (try stage.enqueue(hour), try stage.enqueue(hour))
        try stage.addressAll(paused)
        let number = try #require(try stage.claim(paused).keys.first)
        try stage.finish([.init(number: number, fate: "later", status: 503, pause: 0)])
        try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(paused))", user: "a_sender")
        #expect(try stage.takeOver("a", sent: []) == "4|0")
        #expect(try stage.state(paused) == "paused")
        try stage.database.psql("UPDATE tokenkeeper.campaign SET expiration = now() - interval '1 second'")
        #expect(try stage.state(unseen) == "ended" && stage.progress(unseen) == "0|0|0|0|0|0|0|0|0")
        #expect(try stage.claimSingle().isEmpty)
        #expect(try stage.state(paused) == "ended" && stage.progress(paused) == "5|0|0|0|0|0|5|0|0")
    }

    @Test func `a campaign that expires while it is being addressed does not end before that`() throws {
        let stage = try CampaignStage()
        let campaign = try stage.enqueue("everyone => true, expiration => clock_timestamp() + interval '1 hour'")
        try stage.database.psql("UPDATE tokenkeeper.campaign SET expiration = now() - interval '1 second'")
        var addressing = try stage.database.connect(user: "a_daemon")
        // address_campaign does the same, if it begins in time.
        try addressing.execute(
            """
            BEGIN; UPDATE tokenkeeper.campaign SET state = 'running', started_at = now(), addressed = 1, batches = 1;
            INSERT INTO tokenkeeper.campaign_batch (campaign_id, batch, requests, first_key, token_keys) VALUES (\(campaign), 1, 1, 'a', '{a}')
            """)
        try stage.end()
        try addressing.execute("COMMIT")
        #expect(try stage.database.psql("SELECT state FROM tokenkeeper.campaign") == "running")
        #expect(try stage.state(campaign) == "ended")
        #expect(try stage.progress(campaign) == "1|0|0|0|0|0|1|0|0")
    }

    @Test func `the content is that of the campaign, and a request that has moved takes it from there`() throws {
        let stage = try CampaignStage(tokens: 1)
        for payload in [
            #"{"a": "x, y", "aps": {"alert": "b"}}"#, #"{"a":""# + String(repeating: "x", count: 3000) + #""}"#,
        ] {
            let campaign = try stage.enqueue(
                "everyone => true, priority => 5, expiration => '2040-01-01Z', collapse_id => 'c'", payload: payload)
            #expect(
                try stage.database.psql(
                    "SELECT payload::jsonb = '\(payload)', push_type, priority, expiration, collapse_id FROM tokenkeeper.campaign_content(\(campaign))",
                    user: "a_daemon")
                    == "t|alert|5|2208988800|c")
            try stage.addressAll(campaign)
            let number = try #require(try stage.claim(campaign).keys.first)
            try stage.finish([.init(number: number, fate: "later", status: 503, pause: 0, error: "503")])
            #expect(
                try stage.database.psql(
                    """
                    SELECT outcome, payload::jsonb = '\(payload)', push_type, priority, expiration, collapse_id, attempts, apns_id
                    FROM tokenkeeper.claim_requests('production', 'com.example.app', 'a', 10, 0, '-infinity')
                    """, user: "a_daemon")
                    == "claimed|t|alert|5|2208988800|c|1|\(try stage.database.psql("SELECT tokenkeeper.campaign_apns_id(\(campaign), \(-number & 0xffff_ffff))"))"
            )
            let single = try stage.database.psql("SELECT request_id FROM tokenkeeper.send_request")
            try stage.finish([.accepted(Int(single)!)])
            #expect(try stage.progress(campaign) == "1|0|1|0|0|0|0|0|0")
            #expect(try stage.delivery(number) == "accepted" && stage.state(campaign) == "ended")
        }
    }

    @Test func `a request that has moved can be suppressed, fail, or expire there`() throws {
        let stage = try CampaignStage(tokens: 4)
        let campaign = try stage.enqueue("everyone => true, expiration => clock_timestamp() + interval '1 hour'")
        try stage.addressAll(campaign)
        let claimed = Dictionary(uniqueKeysWithValues: try stage.claim(campaign).map { ($1, $0) })
        try stage.finish((1...4).map { .init(number: claimed[$0]!, fate: "interrupted") })
        try stage.suppress(1)
        let singles = Dictionary(uniqueKeysWithValues: try stage.claimSingle().map { ($1, $0) })
        #expect(Set(singles.keys) == [2, 3, 4])
        try stage.finish([
            .init(number: singles[2]!, fate: "failed", error: "x"), .init(number: singles[3]!, fate: "interrupted"),
            .init(number: singles[4]!, status: 410, outcome: "suspect"),
        ])
        #expect(try stage.claimSingle().isEmpty, "interrupted twice")
        #expect(try stage.progress(campaign) == "4|0|0|0|1|1|2|0|0")
        #expect(try stage.state(campaign) == "ended")
        #expect(try stage.count("failed_send", "campaign_id = \(campaign) AND campaign_number IS NOT NULL") == 2)
    }

    // Repetitions and crashes ------------------------------------------------------------------------------------------

    @Test func `nothing ends twice: a repetition, another daemon, and a rollback change nothing`() throws {
        let stage = try CampaignStage(tokens: 30)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        try stage.database.psql(
            "BEGIN; SELECT count(*) FROM tokenkeeper.claim_campaign(\(campaign), 'a', 100, 0); ROLLBACK",
            user: "a_daemon")
        let claimed = Array(try stage.claim(campaign).keys)
        #expect(claimed.count == 30)
        let words: [CampaignStage.Word] =
            claimed[0..<10].map { .accepted($0) }
            + claimed[10..<20].map { .init(number: $0, fate: "later", status: 503, pause: 0) }
            + claimed[20..<25].map { .returned($0) }
        #expect(try stage.finish(words, by: "b") == 0, "it is not in this hand")
        try stage.database.psql("BEGIN; \(CampaignStage.finishing(words, by: "a")); ROLLBACK", user: "a_daemon")
        #expect(try stage.progress(campaign) == "30|30|0|0|0|0|0|0|0")
        #expect(try stage.finish(words) == 25)
        #expect(try stage.finish(words) == 0)
        #expect(try stage.finish(claimed[0..<25].map { .init(number: $0, fate: "failed", error: "x") }) == 0)
        #expect(
            try stage.finish([.accepted(-(campaign << 32 | 1 << 9 | 31)), .accepted(-(99 << 32 | 513)), .accepted(5)])
                == 0)
        #expect(try stage.progress(campaign) == "30|20|10|0|0|0|0|0|0")
        #expect(try stage.count("send_result") == 20)
        #expect(
            Set(
                try stage.database.psql("SELECT tokenkeeper.claimed_campaign_requests('a')", user: "a_daemon").split(
                    separator: "\n"
                ).map { Int($0)! })
                == Set(claimed[25...]))
        #expect(try stage.claim(campaign, by: "b").isEmpty, "the batch is still in a hand")
        try stage.finish(claimed[25...].map { .returned($0) })
        #expect(Set(try stage.claim(campaign, by: "b").keys) == Set(claimed[20...]))
    }

    @Test func `a request that a daemon finishes twice in one call ends once, with its response`() throws {
        let stage = try CampaignStage(tokens: 2)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let claimed = Array(try stage.claim(campaign).keys)
        #expect(
            try stage.finish([
                .returned(claimed[0]), .accepted(claimed[1]), .accepted(claimed[0]), .accepted(claimed[1]),
            ]) == 2)
        #expect(try stage.progress(campaign) == "2|0|2|0|0|0|0|0|0")
        #expect(try stage.count("send_result") == 2)
    }

    @Test func `an ended daemon's requests are taken over: those that may have been sent are interrupted`() throws {
        let stage = try CampaignStage(tokens: 1050)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let claimed = Array(try stage.claim(campaign, by: "dead").keys)
        try stage.finish(claimed[0..<100].map { .accepted($0) }, by: "dead")
        try stage.finish(claimed[100..<110].map { .returned($0) }, by: "dead")
        #expect(try stage.takeOver("dead", sent: Array(claimed[50..<150])) == "\(claimed.count - 110)|40")
        #expect(try stage.takeOver("dead", sent: Array(claimed[50..<150])) == "0|0")
        #expect(try stage.finish(claimed[110..<120].map { .accepted($0) }, by: "dead") == 0, "it comes back too late")
        #expect(try stage.count("send_request", "interruptions = 1 AND attempts = 1 AND claimed_by IS NULL") == 40)
        var rest = Set<Int>()
        while case let more = try stage.claim(campaign, by: "b"), !more.isEmpty { rest.formUnion(more.keys) }
        #expect(rest.isSuperset(of: claimed[150...]) && rest.isSuperset(of: claimed[100..<110]))
        #expect(rest.isDisjoint(with: claimed[0..<100]) && rest.isDisjoint(with: claimed[110..<150]))
        #expect(try stage.progress(campaign) == "1050|950|100|0|0|0|0|0|0")
        #expect(
            try stage.takeOver("b", sent: nil) == "\(rest.count)|\(rest.count)", "nothing is known about what it sent")
        #expect(try stage.count("campaign_batch") == 0 && stage.count("send_request") == 950)
    }

    @Test func `a daemon is told what it must not send any more`() throws {
        let stage = try CampaignStage(tokens: 4)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        let claimed = Dictionary(uniqueKeysWithValues: try stage.claim(campaign).map { ($1, $0) })
        func recalled(_ daemon: String = "a") throws -> [String] {
            try stage.database.psql(
                "SELECT number, is_gone FROM tokenkeeper.recalled_requests('\(daemon)', '{\(claimed.values.map(String.init).joined(separator: ","))}') ORDER BY 1 DESC",
                user: "a_daemon"
            ).split(separator: "\n").map(String.init)
        }
        #expect(try recalled() == [])
        #expect(try recalled("b").allSatisfy { $0.hasSuffix("|t") } && recalled("b").count == 4)
        try stage.database.psql("SELECT tokenkeeper.forget('\(CampaignStage.token(2))')", user: "a_app")
        #expect(try recalled() == ["\(claimed[2]!)|t"])
        try stage.database.psql("SELECT tokenkeeper.pause_sending('com.example.app')", user: "a_operator")
        #expect(try recalled().filter { $0.hasSuffix("|f") }.count == 3)
        try stage.database.psql("SELECT tokenkeeper.resume_sending('com.example.app')", user: "a_operator")
        #expect(try recalled().count == 1)
        try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(campaign))", user: "a_sender")
        #expect(try recalled().filter { $0.hasSuffix("|f") }.count == 3, "they are returned, and end as cancelled")
    }

    @Test func `a paused topic keeps its campaigns waiting`() throws {
        let stage = try CampaignStage(tokens: 4)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        try stage.database.psql("SELECT tokenkeeper.pause_sending('com.example.app')", user: "a_operator")
        #expect(try stage.due() == "" && stage.claim(campaign).isEmpty)
        try stage.database.psql("SELECT tokenkeeper.resume_sending('com.example.app')", user: "a_operator")
        #expect(try stage.claim(campaign).count == 4)
    }

    @Test func `a claim says what it withheld`() throws {
        let stage = try CampaignStage(tokens: 10)
        let campaign = try stage.enqueue()
        try stage.addressAll(campaign)
        for token in 1...3 { try stage.suppress(token) }
        let outbox = Outbox(daemonID: "a", processScope: "here", lockTimeout: .milliseconds(500))
        var daemon = try stage.database.connect(user: "a_daemon")
        func claim(_ campaign: Int) throws -> Outbox.Claim {
            let content = try #require(
                try outbox.content(
                    of: Int64(campaign), in: TopicScope(environment: "production", topic: CampaignStage.topic),
                    on: &daemon))
            return try outbox.claim(
                campaign: Int64(campaign), content, most: 500, backgroundPerHour: 0, on: &daemon)
        }
        let first = try claim(campaign)
        #expect(first.requests.count == 7 && first.suppressed == 3 && first.failed == 0 && first.lastSendAt == nil)
    }

    // Limits -----------------------------------------------------------------------------------------------------------

    /// Time passes by setting the rate back, so that nothing depends on how fast this runs: time that passes by itself only lets more be
    /// claimed, and never more than this.
    @Test(arguments: [100, 1000, 4000])
    func `daemons that ask at any time up to 700 ms apart use the whole rate, and never more`(rate: Int) throws {
        var chance = SeededChance(seed: 7)
        let stage = try CampaignStage(tokens: min(10 * rate, 30_000))
        let campaign = try stage.enqueue("everyone => true, max_per_second => \(rate)")
        try stage.addressAll(campaign)
        let batch = rate / 20
        /// Claims as if the last claim had left the rate taken up to an instant, in seconds from now, and returns how many slots it took.
        func claim(_ ahead: Double, by daemon: String) throws -> (claimed: Int, slots: Double) {
            let rows = try stage.database.psql(
                """
                BEGIN;
                UPDATE tokenkeeper.campaign SET next_send_at = clock_timestamp() + \(ahead) * interval '1 second';
                SELECT extract(epoch FROM next_send_at) FROM tokenkeeper.campaign;
                SELECT count(*) FROM tokenkeeper.claim_campaign(\(campaign), '\(daemon)', 100000, 0);
                SELECT extract(epoch FROM next_send_at) FROM tokenkeeper.campaign;
                COMMIT
                """, user: "a_daemon"
            ).split(separator: "\n").compactMap { Double($0) }
            return (Int(rows[1]), (rows[2] - rows[0]) * Double(rate))
        }
        var (ahead, claimed, passed) = (0.0, 0, 0.0)
        while passed < 3 {
            let (requests, slots) = try claim(ahead, by: ["a", "b", "c"][chance.dice(3)])
            #expect(abs(slots - Double(requests)) < 0.5, "nothing is lost, and nothing is given twice")
            if ahead < 0.49 { #expect(requests >= Int((1 - ahead) * Double(rate)) - batch, "up to a second ahead") }
            claimed += requests
            ahead += Double(requests) / Double(rate)
            #expect(ahead < 1.5, "time that passes by itself is little")
            let pause = Double(chance.dice(700)) / 1000
            passed += pause
            ahead -= pause
        }
        #expect(Double(claimed) >= (passed - 0.25) * Double(rate), "\(claimed) in \(passed) s")
    }

    @Test func `a campaign that has waited does not catch up on all of that time`() throws {
        let stage = try CampaignStage(tokens: 3000)
        let campaign = try stage.enqueue("everyone => true, max_per_second => 1000")
        try stage.addressAll(campaign)
        try stage.database.psql("UPDATE tokenkeeper.campaign SET next_send_at = now() - interval '1 hour'")
        #expect((1200...1250).contains(try stage.claim(campaign, most: 10_000).count))
        #expect(try stage.claim(campaign, by: "b", most: 10_000).isEmpty)
    }

    @Test func `a background campaign counts in the share of each device`() throws {
        let stage = try CampaignStage(tokens: 3)
        let background = #"{"aps":{"content-available":1}}"#
        let campaigns = try (1...4).map { _ in try stage.enqueue(payload: background) }
        for campaign in campaigns { try stage.addressAll(campaign) }
        let first = try stage.claim(campaigns[0], backgroundPerHour: 2)
        #expect(first.count == 3)
        try stage.finish(first.keys.map { .returned($0) })
        #expect(try stage.claim(campaigns[0], backgroundPerHour: 2).count == 3, "what was not sent does not count")
        #expect(try stage.claim(campaigns[1], backgroundPerHour: 2).count == 3)
        #expect(try stage.claim(campaigns[2], backgroundPerHour: 2).isEmpty)
        #expect(try stage.count("send_request") == 3)
        #expect(try stage.claimSingle(backgroundPerHour: 2).isEmpty)
        #expect(try stage.count("send_request", "postponed") == 3)
        #expect(try stage.claim(campaigns[3], backgroundPerHour: 2).isEmpty)
        #expect(try stage.claimSingle(backgroundPerHour: 2).isEmpty)
        #expect(try stage.progress(campaigns[2]) == "3|0|0|0|0|3|0|0|0", "only the newest is kept")
        #expect(try stage.progress(campaigns[3]) == "3|3|0|0|0|0|0|0|0")
        #expect(try stage.state(campaigns[2]) == "ended")
    }

    // Erasure ----------------------------------------------------------------------------------------------------------

    @Test func `forget erases a token from batches, lists and the place that was reached`() throws {
        let stage = try CampaignStage(tokens: 1500)
        let (first, second) = (try stage.enqueue(), try stage.enqueue())
        try stage.address(first)
        try stage.addressAll(second)
        let list = try stage.enqueue("tokens => '{\(CampaignStage.token(1)),\(CampaignStage.token(1000))}'")
        let claimed = Dictionary(uniqueKeysWithValues: try stage.claim(second, most: 2000).map { ($1, $0) })
        try stage.finish(
            [.accepted(claimed[2]!), .init(number: claimed[3]!, fate: "later", status: 503, pause: 0)], by: "a")
        // 1 begins a batch, 1000 is the place that the first campaign has reached.
        for token in [1, 2, 3, 50, 51, 1000] {
            try stage.database.psql("SELECT tokenkeeper.forget('\(CampaignStage.token(token))')", user: "a_app")
            let left = try stage.database.psql(
                """
                SELECT count(*) FROM tokenkeeper.campaign AS c WHERE c::text LIKE '%\(CampaignStage.token(token))%'
                UNION ALL SELECT count(*) FROM tokenkeeper.campaign_batch AS b WHERE b::text LIKE '%\(CampaignStage.token(token))%'
                UNION ALL SELECT count(*) FROM tokenkeeper.campaign_token AS t WHERE t::text LIKE '%\(CampaignStage.token(token))%'
                """)
            #expect(left == "0\n0\n0", "\(token)")
        }
        #expect(
            try stage.progress(first)
                == "1000|994|0|0|0|0|0|0|6")
        #expect(try stage.claimSingle().isEmpty, "what waits in the outbox is dropped when it is due")
        #expect(try stage.progress(second) == "1500|1494|1|0|0|0|0|0|5")
        #expect(try stage.finish([.accepted(claimed[1]!), .accepted(claimed[1000]!)]) == 0, "the response is not kept")
        try stage.addressAll(first)
        #expect(try stage.progress(first) == "1500|1494|0|0|0|0|0|0|6", "goes on at the same place")
        try stage.addressAll(list)
        #expect(try stage.progress(list) == "0|0|0|0|0|0|0|0|0" && stage.state(list) == "ended")
        #expect(try stage.delivery(claimed[3]!) == "forgotten")
    }

    @Test func `a campaign to a forgotten user or device alone is cancelled, and its content erased`() throws {
        let stage = try CampaignStage(tokens: 60)
        let called = "user_id => 'u5', name => 'Dear Anna', collapse_id => 'anna-1', idempotency_key => 'invoice-anna'"
        let payload = #"{"aps":{"alert":"Dear Anna, you owe us 5"}}"#
        let user = try stage.enqueue(called, payload: payload)
        let waiting = try stage.enqueue("device_id => 'd4', name => 'to d4'")
        let paused = try stage.enqueue("device_id => 'd4'")
        try stage.address(user)
        try stage.address(paused)
        try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(paused))", user: "a_sender")
        let claimed = Dictionary(uniqueKeysWithValues: try stage.claim(user).map { ($1, $0) })
        try stage.finish([
            .accepted(claimed[5]!), .init(number: claimed[15]!, fate: "later", status: 503, pause: 0),
            .init(number: claimed[25]!, fate: "failed", error: "too large"), .returned(claimed[35]!),
        ])
        for operation in ["pause_campaign", "resume_campaign"] {
            try stage.database.psql("SELECT tokenkeeper.\(operation)(\(user))", user: "a_sender")
        }
        // Most of the user's tokens have another user by now: they stay, and so would their requests.
        try stage.database.psql(
            "UPDATE tokenkeeper.ledger SET user_id = 'bob' WHERE user_id = 'u5' AND device_id NOT IN ('d5', 'd55')")
        try stage.database.psql("SELECT tokenkeeper.forget_user('u5')", user: "a_app")
        try stage.database.psql("SELECT tokenkeeper.forget_device('d4')", user: "a_app")

        #expect(try stage.progress(user) == "6|1|1|0|0|0|1|0|3", "one is still in flight")
        #expect(try stage.claimSingle().isEmpty && stage.claim(user, by: "b").isEmpty)
        #expect(try stage.database.psql("SELECT tokenkeeper.requeue_failed()", user: "a_operator") == "0")
        #expect(try stage.finish([.init(number: claimed[45]!, fate: "later", status: 503, pause: 0)]) == 1)
        #expect(try stage.progress(user) == "6|0|1|0|0|0|1|1|3")
        #expect(try stage.progress(waiting) == "0|0|0|0|0|0|0|0|0" && stage.progress(paused) == "1|0|0|0|0|0|0|0|1")
        for campaign in [user, waiting, paused] { #expect(try stage.state(campaign) == "cancelled") }
        #expect(try stage.due() == "" && stage.count("campaign", "ended_at IS NULL") == 0)
        #expect(try stage.count("campaign", "to_jsonb(campaign)::text ~ 'nna|d4|u5'") == 0)
        #expect(try stage.count("operation", "to_jsonb(operation)::text ~ 'nna'") == 0)
        #expect(try stage.count("operation", "message = 'campaign \(user)'") == 2)
        #expect(try stage.enqueue(called, payload: payload) != user, "the key is free again")
    }

    @Test func `neither forget nor a pause waits for a patient search, and what was forgotten is not addressed`() throws
    {
        let stage = try CampaignStage(tokens: 3)
        try stage.database.psql("UPDATE tokenkeeper.ledger SET tags = '{slow}'")
        try stage.database.slowAudience()
        let campaign = try stage.enqueue("tags => 'slow'")
        let paused = try stage.enqueue("tags => 'slow'")
        let failures = Failures()
        atOnce(3) { worker in
            do {
                if worker < 2 {
                    var searching = try stage.database.connect(user: "a_daemon")
                    try searching.execute(
                        "SELECT tokenkeeper.address_campaign(\([campaign, paused][worker]), 100, patiently => true)")
                    return
                }
                defer { try? stage.database.releaseSlowAudience() }
                while try stage.database.searchingSessions() < 2 {}
                let patience = "SET LOCAL lock_timeout = '20s'"
                try stage.database.psql(
                    "BEGIN; \(patience); SELECT tokenkeeper.forget('\(CampaignStage.token(2))'); COMMIT", user: "a_app")
                try stage.database.psql(
                    "BEGIN; \(patience); SELECT tokenkeeper.pause_campaign(\(paused)); COMMIT", user: "a_sender")
            } catch { failures.add("\(error)") }
        }
        #expect(failures.all == [])
        #expect(Set(try stage.claim(campaign).values) == [1, 3])
        #expect(try stage.progress(campaign) == "2|2|0|0|0|0|0|0|0")
        #expect(try stage.progress(paused) == "0|0|0|0|0|0|0|0|0")
        try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(paused))", user: "a_sender")
        try stage.database.psql(
            "SELECT tokenkeeper.address_campaign(\(paused), 100, true, in_ranges => true)", user: "a_daemon")
        #expect(try stage.progress(paused) == "2|2|0|0|0|0|0|0|0")
    }

    @Test func `what was addressed while it was forgotten goes later`() throws {
        let stage = try CampaignStage(tokens: 3, on: .ofErasures)
        let campaign = try stage.enqueue()
        var addressing = try stage.database.connect(user: "a_daemon")
        try addressing.execute("BEGIN")
        try addressing.execute("SELECT tokenkeeper.address_campaign(\(campaign), 100)")
        try stage.database.psql("SELECT tokenkeeper.forget('\(CampaignStage.token(2))')", user: "a_app")
        try addressing.execute("COMMIT")
        #expect(try stage.progress(campaign) == "3|3|0|0|0|0|0|0|0")
        try stage.database.finishErasures()
        #expect(try stage.progress(campaign) == "3|2|0|0|0|0|0|0|1")
        #expect(Set(try stage.claim(campaign).values) == [1, 3])
    }
}
