import Dispatch
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing
import TokenModel

@testable import TokenLedger

/// The limits of `topic_policy`, as campaigns and single requests meet them together.
@Suite(.ownThread) struct `Limits on claims` {
    let database: TestDatabase

    init() throws {
        database = try TestCluster.shared.database()
        try database.psql(
            "SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't')) FROM generate_series(1, 1200) AS i",
            user: "a_app")
    }

    private func policy(_ change: String) throws {
        try database.psql("UPDATE tokenkeeper.topic_policy SET \(change) WHERE topic = 't'", user: "a_operator")
    }

    private func campaign(_ arguments: String = "everyone => true", payload: String = #"{"aps":{"alert":"A"}}"#) throws
        -> String
    {
        let number = try database.psql(
            "SET client_min_messages = warning; SELECT tokenkeeper.enqueue('\(payload)', 't', \(arguments))",
            user: "a_sender")
        while try database.psql(
            "SELECT is_addressed FROM tokenkeeper.campaign_progress WHERE campaign_id = \(number)") == "f"
        {
            try database.psql("SELECT tokenkeeper.address_campaign(\(number), 100000)", user: "a_daemon")
        }
        return number
    }

    private func claim(_ campaign: String, most: Int = 10_000) throws -> Int {
        Int(
            try database.psql(
                "SELECT count(*) FROM tokenkeeper.claim_campaign(\(campaign), 'd', \(most), 3) WHERE outcome = 'claimed'",
                user: "a_daemon"))
            ?? -1
    }

    /// Queues single alerts, and claims them.
    private func claimSingle(_ tokens: [Int], most: Int = 1000) throws -> String {
        if !tokens.isEmpty {
            try database.psql(
                """
                INSERT INTO tokenkeeper.send_request (topic, token, payload)
                SELECT 't', lpad(to_hex(t), 8, '0'), '{"aps":{"alert":"A"}}' FROM unnest(ARRAY\(tokens)) AS t
                """, user: "a_sender")
        }
        return try database.psql(
            """
            SELECT string_agg(n || ' ' || outcome, ', ' ORDER BY outcome) FROM (
                SELECT outcome, count(*) AS n FROM tokenkeeper.claim_requests('production', 't', 'd', \(most), 3, '-infinity') GROUP BY 1) AS c
            """, user: "a_daemon")
    }

    /// Gives back what the daemon has claimed of campaigns, unsent.
    private func giveBack() throws {
        try database.psql(
            """
            SELECT tokenkeeper.finish_requests('d', array_agg(ROW(c, 'returned', NULL, NULL, NULL, NULL, NULL, NULL, NULL)::tokenkeeper.request_ending))
            FROM tokenkeeper.claimed_campaign_requests('d') AS c
            """, user: "a_daemon")
    }

    private func suppressed(_ campaign: String) throws -> String {
        try database.psql("SELECT suppressed FROM tokenkeeper.campaign_progress WHERE campaign_id = \(campaign)")
    }

    // MARK: - Alerts per day

    @Test func `campaigns and single alerts share a device's day`() throws {
        try policy("alerts_per_day = 2")
        let first = try campaign()
        #expect(try claim(first) == 1200)
        #expect(try claimSingle([1, 1, 2]) == "2 claimed, 1 suppressed")
        let second = try campaign()
        #expect(try claim(second) == 1198)
        #expect(try suppressed(first) == "0" && suppressed(second) == "2")
        #expect(
            try database.psql(
                "SELECT string_agg(DISTINCT state || ': ' || reason, '; '), count(*), count(campaign_id) FROM tokenkeeper.suppressed_send"
            ) == "alerts: its device has had alerts_per_day|3|2")
        let third = try campaign()
        #expect(try claim(third) == 0)
        #expect(try suppressed(third) == "1200")
        try database.psql("SELECT tokenkeeper.end_campaigns()", user: "a_daemon")
        #expect(try database.psql("SELECT state FROM tokenkeeper.campaign WHERE campaign_id = \(third)") == "ended")
        let silent = try campaign(payload: #"{"aps":{"content-available":1}}"#)
        #expect(try claim(silent) == 1200, "a background push is no alert")
    }

    @Test func `an alert counts once, however often it is claimed`() throws {
        try policy("alerts_per_day = 1")
        let number = try campaign()
        #expect(try claim(number) == 1200)
        try giveBack()
        #expect(try claim(number) == 1200, "a batch that was given back")
        #expect(try suppressed(number) == "0")
        try policy("alerts_per_day = 2")
        #expect(try claimSingle([1]) == "1 claimed")
        try database.psql(
            "SELECT tokenkeeper.finish_requests('d', array_agg(ROW(request_id, 'later', 503, NULL, NULL, '2026-01-01Z', 0, 'x', NULL)::tokenkeeper.request_ending)) FROM tokenkeeper.send_request WHERE claimed_by IS NOT NULL",
            user: "a_daemon")
        #expect(try claimSingle([]) == "1 claimed", "a retry")
        #expect(try claimSingle([1]) == "1 suppressed")
    }

    // MARK: - Requests per second

    @Test func `campaigns and single requests share the rate of a topic`() throws {
        try policy("max_per_second = 400")
        let number = try campaign()
        #expect(
            try database.psql("SELECT max(requests) FROM tokenkeeper.campaign_batch") == "20", "batches of 50 ms")
        let claimed = try claim(number)
        #expect((480...500).contains(claimed), "what is late by 250 ms, and the next second's worth: \(claimed)")
        // Nothing more for a minute.
        try database.psql("UPDATE tokenkeeper.topic_rate SET next_send_at = clock_timestamp() + interval '1 minute'")
        #expect(try claim(number) == 0 && claimSingle([1, 2]) == "")
        #expect(
            try database.psql(
                "SELECT due_at > clock_timestamp() + interval '50 seconds' FROM tokenkeeper.campaigns_due()",
                user: "a_daemon"
            ) == "t")
        try database.psql("UPDATE tokenkeeper.topic_rate SET next_send_at = '-infinity'")
        #expect(try claimSingle([]) == "2 claimed")
        try policy("max_per_second = NULL")
        var rest = 0
        while case let more = try claim(number), more > 0 { rest += more }
        #expect(rest == 1200 - claimed)
    }

    /// Gives the rate of the topic its slots back, as time does. Of 100 per second, the next claim then gets up to 125, if it comes late.
    private func wait() throws {
        try database.psql("UPDATE tokenkeeper.topic_rate SET next_send_at = clock_timestamp()")
    }

    /// All that was claimed is accepted.
    private func answer() throws {
        try database.psql(
            """
            SELECT tokenkeeper.finish_requests('d', array_agg(ROW(c, 'answered', 200, NULL, NULL, now(), NULL, NULL, NULL)::tokenkeeper.request_ending))
            FROM tokenkeeper.claimed_campaign_requests('d') AS c HAVING count(*) > 0
            """, user: "a_daemon")
    }

    private let waiting =
        "SELECT sum(requests - bit_count(ended)) FROM tokenkeeper.campaign_batch WHERE claimed_by IS NULL"

    @Test func `batches made before a rate was set are claimed in parts, and never more than the rate allows`() throws {
        let number = try campaign()
        try policy("max_per_second = 100")
        var claims: [Int] = []
        while try database.psql("SELECT count(*) > 0 FROM tokenkeeper.campaign_batch") == "t", claims.count < 40 {
            try wait()
            claims.append(try claim(number))
            let ahead = try database.psql(
                "SELECT next_send_at <= clock_timestamp() + interval '1 second' FROM tokenkeeper.topic_rate")
            #expect(ahead == "t")
            try answer()
        }
        #expect(claims.reduce(0, +) == 1200 && (claims.max() ?? 0) <= 125, "\(claims)")
        try database.psql("SELECT tokenkeeper.end_campaigns()", user: "a_daemon")
        #expect(
            try database.psql("SELECT state, addressed, accepted FROM tokenkeeper.campaign_progress")
                == "ended|1200|1200")
    }

    @Test func `of a part of a batch, each alert counts once`() throws {
        let number = try campaign()
        try policy("max_per_second = 100, alerts_per_day = 1")
        try database.psql(
            """
            INSERT INTO tokenkeeper.alert_send (topic_id, token_key, day, alerts, room)
            SELECT 1, token_key, (now() AT TIME ZONE 'UTC')::date, 1, 0 FROM tokenkeeper.ledger ORDER BY token_key DESC LIMIT 300
            """)
        var claims: [Int] = []
        while try database.psql("SELECT count(*) > 0 FROM tokenkeeper.campaign_batch") == "t", claims.count < 40 {
            try wait()
            claims.append(try claim(number))
            try answer()
        }
        #expect(claims.reduce(0, +) == 900 && (claims.max() ?? 0) <= 125, "\(claims)")
        #expect(try database.psql("SELECT accepted, suppressed FROM tokenkeeper.campaign_progress") == "900|300")
        #expect(try database.psql("SELECT count(*), sum(alerts) FROM tokenkeeper.alert_send") == "1200|1200")
    }

    @Test func `of a part of a batch, only what is sent counts in the background share`() throws {
        let number = try campaign(payload: #"{"aps":{"content-available":1}}"#)
        try policy("max_per_second = 100")
        try wait()
        let first = try claim(number)
        try wait()
        let second = try claim(number)
        #expect(first == 50 && (75...125).contains(second))
        #expect(
            try database.psql("SELECT count(*), max(cardinality(sent_at)) FROM tokenkeeper.background_send")
                == "\(first + second)|1")
        #expect(try database.psql(waiting) == "650")
        try answer()
        #expect(try database.psql(waiting) == "\(1150 - second)", "the rest can be claimed again")
    }

    @Test func `only what is sent counts for the rates`() throws {
        try policy("max_per_second = 1000, alerts_per_day = 1")
        try database.psql(
            """
            UPDATE tokenkeeper.ledger SET stale_at = now()
            WHERE token_key > tokenkeeper.token_key(lpad(to_hex(100), 8, '0')) AND token_key <= tokenkeeper.token_key(lpad(to_hex(200), 8, '0'));
            SELECT tokenkeeper.recompute_tokens();
            INSERT INTO tokenkeeper.alert_send (topic_id, token_key, day, alerts, room)
            SELECT 1, tokenkeeper.token_key(lpad(to_hex(i), 8, '0')), (now() AT TIME ZONE 'UTC')::date, 1, 0 FROM generate_series(201, 250) AS i
            """)
        let list = (1...300).map { String(format: "%08x", $0) }.joined(separator: ",")
        try database.psql("UPDATE tokenkeeper.topic SET gate = 'observe' WHERE topic = 't'")
        let number = try campaign("tokens => '{\(list)}', max_per_second => 500")
        try database.psql("UPDATE tokenkeeper.topic SET gate = NULL WHERE topic = 't'")
        // The rates begin at an instant of the past, so that all slots are counted from it.
        func begin() throws -> Double {
            try database.psql("UPDATE tokenkeeper.campaign SET next_send_at = '-infinity'")
            try database.psql("DELETE FROM tokenkeeper.topic_rate")
            return Double(try database.psql("SELECT extract(epoch FROM clock_timestamp())")) ?? 0
        }
        func slots(_ table: String, since: Double, perSecond: Double) throws -> Double {
            let next = Double(try database.psql("SELECT extract(epoch FROM next_send_at) FROM tokenkeeper.\(table)"))
            return ((next ?? 0) - since) * perSecond
        }
        let before = try begin()
        let rows = try database.psql(
            "SELECT outcome, count(*) FROM tokenkeeper.claim_campaign(\(number), 'd', 1000, 3) GROUP BY 1 ORDER BY 1",
            user: "a_daemon")
        #expect(rows == "claimed|150\nsuppressed|150")
        // Its first slot is 250 ms before the claim, which came after "before".
        let after = Double(try database.psql("SELECT extract(epoch FROM clock_timestamp())")) ?? 0
        #expect(try slots("campaign", since: before - 0.25, perSecond: 500) >= 149)
        #expect(try slots("campaign", since: after - 0.25, perSecond: 500) <= 151)
        #expect(try slots("topic_rate", since: before - 0.25, perSecond: 1000) >= 149)
        #expect(try slots("topic_rate", since: after - 0.25, perSecond: 1000) <= 151)

        _ = try begin()
        try policy("alerts_per_day = 0")
        #expect(try claimSingle(Array(151...200)) == "50 suppressed")
        #expect(
            try database.psql("SELECT next_send_at FROM tokenkeeper.topic_rate") == "-infinity", "no slot is taken")
        #expect(try claimSingle(Array(51...150)) == "50 claimed, 50 suppressed")
        let end = Double(try database.psql("SELECT extract(epoch FROM clock_timestamp())")) ?? 0
        #expect(try slots("topic_rate", since: end - 0.25, perSecond: 1000) <= 51)
        #expect(
            try database.psql(
                "SELECT tokenkeeper.claim_topics('{production}', '{t}', 'd', '{10}', 3, '{-infinity}')",
                user: "a_daemon") == "")
    }

    @Test func `each request has its own instant, one after the other`() throws {
        try policy("max_per_second = 1000")
        let number = try campaign("everyone => true, max_per_second => 500")
        // All rows of a claim are read at once, so their instants differ by the rate only, apart from the clock going on.
        let first = try database.psql(
            """
            SELECT count(*) > 400, bool_and(gap BETWEEN 0 AND 2100) FROM (
                SELECT send_in - lag(send_in) OVER (ORDER BY send_in) AS gap FROM tokenkeeper.claim_campaign(\(number), 'd', 10000, 3)) AS c
            """, user: "a_daemon")
        #expect(first == "t|t")
    }

    // MARK: - Confirmation

    @Test func `a wide audience needs a confirmation if the topic says so`() throws {
        try database.psql(
            """
            SELECT count(tokenkeeper.register(lpad(to_hex(i), 8, '0'), 't', tags => CASE WHEN i <= 300 THEN '{some}'::text[] ELSE '{most}' END))
            FROM generate_series(1, 1200) AS i
            """, user: "a_app")
        try policy("confirm_share = 0.5")
        func enqueue(_ arguments: String) throws -> String {
            var sender = try database.connect(user: "a_sender")
            do {
                return try sender.query(
                    "SELECT tokenkeeper.enqueue('{\"aps\":{\"alert\":\"A\"}}', 't', \(arguments))::text", []
                ).value(String.self)
            } catch {
                #expect(error.sqlState == "22023")
                return error.description
            }
        }
        #expect(try enqueue("tags => 'some'") == "1")
        #expect(
            try enqueue("tags => '!some'").contains(
                "about 75 % of the tokens of t (production), and more than 50 % need"))
        #expect(try enqueue("everyone => true").contains("about 100 %"))
        #expect(try enqueue("everyone => true, confirm => NULL").contains("about 100 %"))
        #expect(try enqueue("tags => 'most || some', idempotency_key => 'k', confirm => true") == "2")
        #expect(try enqueue("tags => 'most || some', idempotency_key => 'k'") == "2", "a repetition is no new campaign")
        #expect(try enqueue("device_id => 'nobody'") == "3")
        try policy("confirm_share = NULL")
        #expect(try enqueue("everyone => true") == "4")
    }

    @Test func `a claim goes on when the rate of its topic is removed at the same moment`() throws {
        try policy("max_per_second = 100")
        #expect(try claimSingle([3]) == "1 claimed")
        // The claim has read the topic, and waits here.
        var owner = try database.connect(user: "owner")
        try owner.execute("BEGIN; LOCK TABLE tokenkeeper.paused_topic IN ACCESS EXCLUSIVE MODE")
        let claimed = Mutex<String?>(nil)
        let failures = Failures()
        let group = DispatchGroup()
        DispatchQueue.global().async(group: group) {
            do {
                let outcome = try claimSingle([1, 2])
                claimed.withLock { $0 = outcome }
            } catch {
                failures.add("\(error)")
            }
        }
        try eventually("the claim waits") {
            try database.psql(
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tokenkeeper.paused_topic'::regclass")
                == "1"
        }
        try owner.execute("UPDATE tokenkeeper.topic SET max_per_second = NULL WHERE topic = 't'; COMMIT")
        group.wait()
        #expect(failures.all == [])
        #expect(claimed.withLock { $0 } == "2 claimed")
    }
}
