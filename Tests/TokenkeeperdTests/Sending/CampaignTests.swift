import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

@testable import tokenkeeperd

/// Campaigns from `enqueue` to the ledger, through real daemons and a fake APNs.
@Suite(.ownThread) struct `Campaigns` {
    @Test func `a campaign reaches each sendable token once, and its counts are exact`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try stage.register(1...3000)
        let now = Int64(Date.now.timeIntervalSince1970 * 1000)
        for number in 1...30 { stage.apns.deaths.die(SendingStage.token(number), .init(at: now + 1)) }
        try stage.database.psql(
            "INSERT INTO tokenkeeper.send_result (topic, token, status, body, sent_at) VALUES ('\(stage.topic)', '\(SendingStage.token(31))', 410, '{\"reason\":\"Unregistered\",\"timestamp\":\(now + 1)}', now())",
            user: "a_sender")
        let daemon = try stage.daemon()
        try eventually("one is stale") { try stage.count("token", "state = 'stale'") == 1 }
        let campaign = try stage.campaign(
            "tags => 'World && !muted', expiration => '2040-01-01Z', collapse_id => 'news'")
        try stage.ended(campaign)
        #expect(try stage.progress(campaign) == ["addressed": 2999, "accepted": 2969, "stale": 30])
        #expect(stage.sends.count == 2999 && stage.sends.values.allSatisfy { $0 == 1 })
        #expect(try stage.results(200) == 2969)
        #expect(try stage.count("token", "state = 'stale'") == 31)
        #expect(try stage.count("campaign_batch") == 0 && stage.count("send_request") == 0)
        let request = try #require(stage.apns.records.exchanges.first?.request)
        #expect(String(decoding: request.payload, as: UTF8.self) == #"{"aps":{"alert":"Hello"}}"#)
        #expect(
            request.topic == stage.topic && request.pushType == "alert" && request.collapseID == "news"
                && request.expiration == "2208988800" && request.priority == nil)
        #expect(
            try stage.database.psql("SELECT state FROM tokenkeeper.delivery('\(request.apnsID)')", user: "a_sender")
                == (request.token.map { Int($0, radix: 16)! <= 30 } == true ? "stale" : "accepted"))
        #expect(daemon.stop() == 0)
    }

    @Test func `a campaign that cannot be addressed keeps no other from being sent`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try stage.register(1...10)
        let broken = try stage.campaign("tags => 'World'")
        try stage.database.psql("UPDATE tokenkeeper.campaign SET audience = 'World &&'")
        let other = try stage.campaign("tags => 'World'")
        let daemon = try stage.daemon()
        try stage.ended(other)
        #expect(try stage.progress(other) == ["addressed": 10, "accepted": 10])
        #expect(try stage.state(broken) == "waiting")
        try stage.database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(stage.topic)', '\(SendingStage.token(1))', '{}')",
            user: "a_sender")
        try eventually("so is a single request") { try stage.count("send_request") == 0 }
        #expect(daemon.stop() == 0)
    }

    @Test func `an audience that takes long to find keeps nothing else waiting`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try stage.register(1...10)
        try stage.database.psql(
            "SELECT tokenkeeper.register(lpad(to_hex(i), 64, '0'), '\(stage.topic)', tags => '{slow}') FROM generate_series(11, 15) AS i",
            user: "a_app")
        try stage.database.slowAudience()
        let first = try stage.daemon()
        let slow = try stage.campaign("tags => 'slow'")
        let alsoSlow = try stage.campaign("tags => 'slow'")
        try eventually("a search is under way") { try stage.database.searchingSessions() > 0 }
        // A search on the sender's connection would take a minute.
        func othersAreSent() throws {
            let other = try stage.campaign()
            try stage.enqueue()
            try eventually("another campaign has ended") { try stage.state(other) == "ended" }
            try eventually("single requests are sent") { try stage.count("send_request") == 0 }
            #expect(try stage.progress(other) == ["addressed": 10, "accepted": 10])
        }
        try othersAreSent()
        #expect(first.stop() == 0)
        #expect(!first.logged.contains("did not end in time"), "\(first.logged)")

        let second = try stage.daemon()
        try othersAreSent()
        try eventually("the search of the second daemon is ended") {
            try stage.database.psql(
                """
                SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'active' AND query LIKE '%address_campaign%' AND pid <> pg_backend_pid()
                """, user: "postgres") != "0"
        }
        try othersAreSent()
        #expect(try stage.state(slow) == "waiting")
        #expect(try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(alsoSlow))", user: "a_sender") == "t")
        try stage.database.releaseSlowAudience()
        try stage.ended(slow)
        #expect(try stage.progress(slow) == ["addressed": 5, "accepted": 5])
        #expect(try stage.progress(alsoSlow) == [:])
        #expect(second.stop() == 0)
    }

    @Test func `a locked list of tokens keeps nothing else waiting`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try stage.register(1...10)
        let list = try stage.campaign("tokens => '{\(SendingStage.token(1))}'")
        let other = try stage.campaign()
        try stage.enqueue()
        var locking = try stage.database.connect(user: "postgres")
        try locking.execute("BEGIN; LOCK TABLE tokenkeeper.campaign_token")
        let daemon = try stage.daemon()
        try eventually("another campaign has ended") { try stage.state(other) == "ended" }
        try eventually("single requests are sent") { try stage.count("send_request") == 0 }
        #expect(try stage.state(list) == "waiting")
        try locking.execute("COMMIT")
        try stage.ended(list)
        #expect(try stage.progress(list) == ["addressed": 1, "accepted": 1])
        #expect(daemon.stop() == 0)
    }

    /// Each request waits a moment for its response, so that a campaign takes a while.
    private static func slowStage() throws -> SendingStage {
        try SendingStage { _ in
        } answer: { _ in
            .accepted.delayed(by: .milliseconds(50))
        }
    }

    @Test func `a second campaign is sent while the first runs, and a pause, a resumption and a cancellation hold`()
        throws
    {
        let stage = try Self.slowStage()
        defer { stage.apns.stop() }
        try stage.register(1...5000)
        let daemon = try stage.daemon(["send.max_in_flight=20"])
        let first = try stage.campaign()
        try eventually("the first is under way") { stage.apns.records.requests > 0 }
        let second = try stage.campaign("tokens => '{\((1...50).map(SendingStage.token).joined(separator: ","))}'")
        try stage.ended(second)
        #expect(try stage.progress(second) == ["addressed": 50, "accepted": 50])
        #expect(try stage.state(first) == "running")

        #expect(try stage.database.psql("SELECT tokenkeeper.pause_campaign(\(first))", user: "a_sender") == "t")
        try eventually("all that was claimed is back") {
            try stage.count("campaign_batch", "claimed_by IS NOT NULL") == 0
        }
        let sent = stage.apns.records.requests
        let third = try stage.campaign("tokens => '{\(SendingStage.token(1))}'")
        try stage.ended(third)
        #expect(stage.apns.records.requests == sent + 1, "a paused campaign sends nothing")
        var progress = try stage.progress(first)
        #expect(progress["accepted"] == sent - 50)
        #expect(progress["waiting"] == progress["addressed"]! - (sent - 50), "\(progress)")

        #expect(try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(first))", user: "a_sender") == "t")
        try eventually("it goes on") { stage.apns.records.requests > sent + 100 }
        #expect(try stage.database.psql("SELECT tokenkeeper.cancel_campaign(\(first))", user: "a_sender") == "t")
        try eventually("nothing of it waits") { try stage.progress(first)["waiting"] == nil }
        progress = try stage.progress(first)
        #expect(try stage.state(first) == "cancelled")
        #expect(
            progress["accepted"] == stage.apns.records.requests - 51 && progress["cancelled"] ?? 0 > 0, "\(progress)")
        #expect(progress["addressed"] == progress["accepted"]! + progress["cancelled"]!)
        #expect(try stage.count("failed_send") == 0 && stage.count("send_request") == 0)
        #expect(stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
    }

    @Test(arguments: ["pause_campaign", "cancel_campaign"])
    func `an open transaction of an operator delays its campaign, and nothing else`(change: String) throws {
        let stage = try Self.slowStage()
        defer { stage.apns.stop() }
        try stage.register(1...2000)
        let daemon = try stage.daemon(["send.max_in_flight=20"])
        let first = try stage.campaign()
        try eventually("the first is under way") { stage.apns.records.requests > 0 }
        var sender = try stage.database.connect(user: "a_sender")
        try sender.execute("BEGIN; SELECT tokenkeeper.\(change)(\(first))")
        let before = try #require(try stage.progress(first)["waiting"])

        let second = try stage.campaign("tokens => '{\((1...50).map(SendingStage.token).joined(separator: ","))}'")
        try stage.ended(second)
        #expect(try stage.progress(second) == ["addressed": 50, "accepted": 50])
        try stage.database.psql(
            "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(stage.topic)', '\(SendingStage.token(1))', '{}')",
            user: "a_sender")
        try eventually("so is a single request") { try stage.count("send_request") == 0 }
        #expect(try stage.progress(first)["waiting"] == before)

        try sender.execute("COMMIT")
        try eventually("all that was claimed is back") {
            try stage.count("campaign_batch", "claimed_by IS NOT NULL") == 0
        }
        if change == "pause_campaign" {
            try stage.database.psql("SELECT tokenkeeper.resume_campaign(\(first))", user: "a_sender")
            try stage.ended(first)
            #expect(try stage.progress(first) == ["addressed": 2000, "accepted": 2000])
        } else {
            let progress = try stage.progress(first)
            #expect(progress["accepted"] == stage.apns.records.requests - 51, "\(progress)")
            #expect(progress["addressed"] == progress["accepted"]! + (progress["cancelled"] ?? 0), "\(progress)")
        }
        #expect(stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
    }

    @Test(arguments: ["pause_campaign", "cancel_campaign"], [nil, 40])
    func `daemons give back what they have claimed and not sent when its campaign stops`(change: String, rate: Int?)
        throws
    {
        let stage = try SendingStage { _ in
        } answer: { request in
            // Each connection needs an answer to its first request before it opens more streams.
            request.stream == 1 ? nil : .never
        }
        defer { stage.apns.stop() }
        try stage.register(1...2000)
        let daemons = try (1...2).map { _ in try stage.daemon(["send.max_in_flight=20"]) }
        let campaign = try stage.campaign("tags => 'World', max_per_second => \(rate.map(String.init) ?? "NULL")")
        // The others are not answered. So each daemon holds some that it cannot send.
        try eventually("all that can be in flight is") { stage.apns.records.count(0, "never") == 40 }
        let held = "sum(requests - bit_count(ended | returned)) > 40"
        try eventually("more is claimed") {
            try stage.database.psql("SELECT \(held) FROM tokenkeeper.campaign_batch WHERE claimed_by IS NOT NULL")
                == "t"
        }
        #expect(try stage.database.psql("SELECT tokenkeeper.\(change)(\(campaign))", user: "a_sender") == "t")
        try eventually("only those in flight are claimed") {
            try stage.database.psql(
                "SELECT sum(requests - bit_count(ended | returned)) FROM tokenkeeper.campaign_batch WHERE claimed_by IS NOT NULL"
            ) == "40"
        }
        #expect(stage.apns.records.count(0, "never") == 40, "nothing was sent meanwhile")
        let progress = try stage.progress(campaign)
        let addressed = try #require(progress["addressed"])
        let accepted = stage.apns.records.count(200)
        #expect(progress["accepted"] == accepted)
        if change == "pause_campaign" {
            #expect(progress["waiting"] == addressed - accepted, "\(progress)")
        } else {
            #expect(progress["waiting"] == 40 && progress["cancelled"] == addressed - accepted - 40, "\(progress)")
        }
        for daemon in daemons { daemon.signal(SIGKILL) }
    }

    @Test func `what expires while it waits for its instant is not sent`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...600)
        let campaign = try stage.campaign("tags => 'World', expiration => now() + interval '2 seconds'")
        try stage.database.psql("SELECT tokenkeeper.address_campaign(\(campaign), 10000)", user: "a_daemon")
        try stage.database.psql("SELECT tokenkeeper.set_campaign_rate(\(campaign), 100)", user: "a_sender")
        let daemon = try stage.daemon()
        try stage.ended(campaign)
        #expect(daemon.stop() == 0)
        let progress = try stage.progress(campaign)
        let accepted = progress["accepted"] ?? 0
        #expect(accepted <= 300, "two seconds of the rate are 200: \(progress)")
        #expect(accepted == stage.apns.records.requests)
        #expect(accepted + (progress["failed"] ?? 0) == 600, "\(progress)")
    }

    @Test func `what is to be retried goes on as a single request with the same apns-id and payload`() throws {
        let stage = try SendingStage { _ in
        } answer: { request in
            request.ordinal <= 5 ? .refused(429, "TooManyRequests") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...20)
        let daemon = try stage.daemon()
        let campaign = try stage.campaign()
        try eventually("five wait") { try stage.count("send_request", "attempts = 1 AND scheduled_at > now()") == 5 }
        #expect(try stage.progress(campaign) == ["addressed": 20, "waiting": 5, "accepted": 15])
        #expect(try stage.count("send_request", "payload IS NOT NULL") == 0)
        try stage.database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL")
        try stage.ended(campaign)
        #expect(try stage.progress(campaign) == ["addressed": 20, "accepted": 20])
        #expect(stage.sends.values.sorted() == Array(repeating: 1, count: 15) + Array(repeating: 2, count: 5))
        #expect(Set(stage.apns.records.exchanges.map(\.request.payload)).count == 1)
        #expect(daemon.stop() == 0)
    }

    @Test func `a refused credential stops, and no request of the campaign is lost`() throws {
        let stage = try SendingStage { $0.signingKeys = [] }
        defer { stage.apns.stop() }
        try stage.register(1...2000)
        let daemon = try stage.daemon()
        let campaign = try stage.campaign()
        try eventually("it is shown") {
            try stage.database.psql("SELECT problems::text FROM tokenkeeper.sending_daemon").contains(
                "refuses the credential")
        }
        try eventually("all are back") { try stage.count("campaign_batch", "claimed_by IS NOT NULL") == 0 }
        #expect(stage.apns.records.requests <= 1500, "only a part was tried")
        #expect(daemon.stop() == 0)
        #expect(try stage.progress(campaign)["accepted"] == nil && stage.count("failed_send") == 0)

        let repaired = try FakeAPNs.start(FakeOptions(stage.files))
        defer { repaired.stop() }
        let next = try stage.daemon(["send.production_server=localhost:\(repaired.port)"])
        try eventually("what was refused is tried again") {
            try stage.database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL")
            return try stage.state(campaign) == "ended"
        }
        try stage.ended(campaign)
        #expect(try stage.progress(campaign) == ["addressed": 2000, "accepted": 2000])
        #expect(next.stop() == 0)
    }

    /// Both take longer than ten seconds. A busy machine only delays requests, so they are compared with their slots.
    @Test(arguments: [("a campaign", 100, 2100), ("single requests", 200, 2400)])
    func `three daemons together keep to max_per_second`(of: String, rate: Int, requests: Int) throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...requests)
        let isCampaign = of == "a campaign"
        // Notes the slots that each claim takes, and how long before it the last ones had ended.
        try stage.database.psql(
            """
            CREATE TABLE public.slots (first_at timestamptz, requests integer, lost interval, unasked interval);
            GRANT SELECT ON public.slots TO PUBLIC;
            CREATE FUNCTION public.note_slots() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
            DECLARE
                taken integer := (SELECT \(isCampaign
                    ? "sum(requests - bit_count(ended)) FROM tokenkeeper.campaign_batch" : "count(*) FROM tokenkeeper.send_request")
                    WHERE xmin = pg_current_xact_id()::xid AND claimed_by IS NOT NULL);
                first_at timestamptz := NEW.next_send_at - taken * interval '1 second' / \(rate);
            BEGIN
                INSERT INTO public.slots
                VALUES (first_at, taken, first_at - nullif(OLD.next_send_at, '-infinity'),
                        clock_timestamp() - interval '250 ms' - nullif(OLD.next_send_at, '-infinity'));
                RETURN NULL;
            END $$;
            """, user: "postgres")
        let daemons = try (1...3).map { _ in try stage.daemon() }
        // Before anything is counted, each daemon opens its connection.
        while stage.apns.records.connections < 3 { try stage.ended(try stage.campaign()) }
        let earlier = stage.apns.records.requests
        try stage.database.psql(
            """
            CREATE TRIGGER note_slots AFTER UPDATE ON tokenkeeper.\(isCampaign ? "campaign" : "topic_rate") FOR EACH ROW
            WHEN (OLD.next_send_at < NEW.next_send_at) EXECUTE FUNCTION public.note_slots()
            """, user: "postgres")
        if isCampaign {
            let campaign = try stage.campaign("tags => 'World', max_per_second => \(rate)")
            try stage.ended(campaign)
            #expect(try stage.progress(campaign) == ["addressed": requests, "accepted": requests])
        } else {
            try stage.database.psql(
                "INSERT INTO tokenkeeper.topic_policy (topic, max_per_second) VALUES ('\(stage.topic)', \(rate)) ON CONFLICT DO NOTHING; UPDATE tokenkeeper.topic_policy SET max_per_second = \(rate)",
                user: "a_operator")
            #expect(try stage.enqueue() == requests)
            try stage.settled()
        }
        let times = stage.apns.records.exchanges.suffix(requests).map(\.request.time).sorted()
        #expect(stage.apns.records.requests == earlier + requests)

        // In milliseconds.
        let claims = try stage.database.psql(
            """
            SELECT extract(epoch FROM first_at) * 1000, requests, coalesce(extract(epoch FROM lost) * 1000, 0), coalesce(extract(epoch FROM unasked) * 1000, 0)
            FROM public.slots ORDER BY first_at
            """
        ).split(separator: "\n").map { $0.split(separator: "|").compactMap { Double($0) } }
        let slots = claims.flatMap { claim in
            (0..<Int(claim[1])).map { claim[0] + Double($0) * 1000 / Double(rate) }
        }
        // What a daemon gives back on a busy machine, because it is ten seconds late, for example, takes another slot when it is
        // claimed again. Its first slot counts here although nothing was sent in it, which only makes the requests after it seem later.
        #expect(slots.count >= requests)
        // The times are whole milliseconds, rounded down.
        let late = zip(times, slots).map { Double($0 + 1) - $1 }
        let onTime = Arrivals(zip(times, late).lazy.filter { $1 <= 250 }.map(\.0)).most(within: 10_000)
        let all = Arrivals(times)
        print(
            "\(requests) requests of \(of) at \(rate) per second took \(times[requests - 1] - times[0]) ms in \(claims.count) claims, "
                + "each \(late.min() ?? 0) to \(late.max() ?? 0) ms after its slot, \(slots.count - requests) slots taken again; within any ten seconds \(all.fewest(within: 10_000) ?? 0) to "
                + "\(all.most(within: 10_000)), \(onTime) on time; \(claims.reduce(0) { $0 + $1[2] }) ms of the rate were lost"
        )
        #expect(late.allSatisfy { $0 >= -5 }, "none comes before its slot")
        #expect(onTime <= rate * 10 * 105 / 100)
        for claim in claims {
            #expect(claim[2] > -0.01, "no slot is given twice")
            #expect(claim[2] <= max(claim[3], 0) + 0.01, "only slots are lost for which no daemon asked within 250 ms")
        }
        for daemon in daemons { #expect(daemon.stop() == 0) }
    }

    @Test func `a changed rate applies to a campaign that is being sent`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...1500)
        let daemon = try stage.daemon()
        let campaign = try stage.campaign("tags => 'World', max_per_second => 1")
        try eventually("it is sent") { stage.apns.records.requests > 0 }
        // At this rate, it would take 25 minutes.
        #expect(
            try stage.database.psql("SELECT tokenkeeper.set_campaign_rate(\(campaign), NULL)", user: "a_sender") == "t")
        try stage.ended(campaign)
        #expect(try stage.progress(campaign) == ["addressed": 1500, "accepted": 1500])
        #expect(stage.sends.count == 1500 && stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
    }

    @Test func `an idle daemon sees a campaign long before poll_idle is over`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...1)
        let daemon = try stage.daemon(["drain.poll_idle=60s"])
        // Long after it has found nothing.
        try stage.ended(try stage.campaign())
        let campaign = try stage.campaign()
        try eventually("it is sent") { stage.apns.records.requests == 2 }
        try eventually("it has ended") { try stage.state(campaign) == "ended" }
        #expect(daemon.stop() == 0)
    }

    /// In the full soak, 100,000 tokens, ten kills and two crashes of PostgreSQL.
    @Test func `under kills and crashes of PostgreSQL, each request ends in exactly one way, and the counts are exact`()
        throws
    {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let cluster = try TestCluster.prepared()
        defer { cluster.stop() }
        let stage = try SendingStage(on: cluster) { $0.provesFirst = true }
        defer { stage.apns.stop() }
        let tokens = Soak.size(8_000, whole: 100_000)
        let (kills, crashes) = (Soak.size(3, whole: 10), Soak.size(1, whole: 2))
        try stage.register(1...tokens)
        let now = Int64(Date.now.timeIntervalSince1970 * 1000)
        var dead: Set<Int> = []
        for _ in 0..<tokens / 40 { dead.insert(Int.random(in: 1...tokens, using: &chance)) }
        for number in dead { stage.apns.deaths.die(SendingStage.token(number), .init(at: now + 1)) }
        var daemon = try stage.daemon(["send.max_in_flight=100"])
        let campaign = try stage.campaign("tags => 'World', idempotency_key => 'news'")
        #expect(try stage.campaign("tags => 'World', idempotency_key => 'news'") == campaign)
        for step in 1...(kills + crashes) {
            let progress = step * tokens / (kills + crashes + 1)
            try eventually("\(progress) are sent", within: SendingStage.longest) {
                stage.apns.records.requests >= progress
            }
            if step % ((kills + crashes) / crashes) == 0 {
                cluster.stop()
                try cluster.start()
            } else {
                daemon.signal(SIGKILL)
                #expect(daemon.wait() == -SIGKILL)
                daemon = try stage.daemon(["send.max_in_flight=100"])
            }
        }
        try stage.ended(campaign)
        #expect(daemon.stop() == 0)

        let progress = try stage.progress(campaign)
        let sends = stage.sends
        print("\(progress); \(sends.values.filter { $0 > 1 }.count) sent twice")
        #expect(progress["addressed"] == tokens && progress["waiting"] == nil)
        #expect(progress.filter { $0.key != "addressed" }.values.reduce(0, +) == tokens)
        #expect(try stage.count("campaign") == 1)
        #expect(sends.values.allSatisfy { $0 <= 2 })
        #expect(
            Set(stage.apns.records.exchanges.map { $0.request.token ?? "" }).count == sends.count,
            "one request per token")
        #expect(try stage.results(200) == progress["accepted"] ?? 0)
        #expect(try stage.results(410) == progress["stale"] ?? 0)
        #expect(try stage.count("failed_send") == progress["failed"] ?? 0)
        #expect(try stage.count("suppressed_send") == progress["suppressed"] ?? 0)
        #expect(try stage.count("failed_send", "error NOT LIKE 'it was interrupted twice%'") == 0)
        #expect(
            try stage.database.psql(
                """
                SELECT count(*), count(DISTINCT (e.batch, o)) FROM tokenkeeper.campaign_ending AS e CROSS JOIN unnest(e.ordinals) AS o
                WHERE e.outcome <> 'requeued'
                """) == "\(tokens)|\(tokens)", "each has one ending")
    }
}
