import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

/// From `enqueue` to the ledger, through a real daemon, real HTTP/2 and a fake APNs.
@Suite(.ownThread) struct `Sending` {
    @Test func `after a campaign by tag with 410s, the next one leaves out the stale tokens`() throws {
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        try stage.register(1...200)
        let diedAt = stage.apns.startedAt
        for number in 1...20 { stage.apns.deaths.die(SendingStage.token(number), .init(at: diedAt + 3_600_000)) }
        let daemon = try stage.daemon()
        #expect(try stage.enqueue() == 200)
        try stage.settled()
        #expect(try stage.results(200) == 200 && stage.apns.records.connections == 1)
        for number in 1...20 {
            stage.apns.deaths.die(SendingStage.token(number), .init(at: Int64(Date.now.timeIntervalSince1970 * 1000)))
        }
        #expect(try stage.enqueue() == 200)
        try stage.settled()
        #expect(try stage.results(410) == 20 && stage.results(200) == 380)
        #expect(try stage.count("token", "state = 'stale' AND reason = 'Unregistered'") == 20)
        #expect(try stage.enqueue() == 180)
        try stage.settled()
        #expect(try stage.results(410) == 20 && stage.results(200) == 560)
        #expect(stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
        #expect(!daemon.logged.contains(SendingStage.token(1)), "no whole token is logged")
    }

    /// All claimed at once, or two at a time before the ledger knows.
    @Test(arguments: [500, 1])
    func `of ten requests for one token, the first's 410 suppresses the other nine, until it registers again`(
        inFlight: Int
    )
        throws
    {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(7...7)
        let token = SendingStage.token(7)
        stage.apns.deaths.die(token, .init(at: Int64(Date.now.timeIntervalSince1970 * 1000)))
        for number in 1...10 { try stage.enqueue(payload: #"{"aps":{"alert":"\#(number)"}}"#) }
        let daemon = try stage.daemon(["send.max_in_flight=\(inFlight)"])
        try stage.settled()
        #expect(stage.apns.records.requests == 1)
        #expect(try stage.count("suppressed_send", "state = 'stale' AND token = '\(token)'") == 9)
        stage.apns.deaths.revive(token)
        try stage.register(7...7)
        #expect(try stage.enqueue() == 1)
        try stage.settled()
        #expect(try stage.results(200) == 1)
        #expect(daemon.stop() == 0)
    }

    @Test func `APNs receives what was queued`() throws {
        let stage = try SendingStage { $0.sandbox = true }
        defer { stage.apns.stop() }
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (environment, topic, token, payload, push_type, priority, expiration, collapse_id, apns_id)
            VALUES ('sandbox', 'com.example.app', 'ABCDEF', '{"aps":{"alert":"Hällo, \\"World\\": 1"},"n":[1,2]}', 'alert', 5,
                    '2040-01-01Z', 'a b', '6ba7b810-9dad-11d1-80b4-00c04fd430c8'),
                   ('sandbox', 'com.example.app', 'abcdee', '{"aps":{"content-available":1}}', NULL, NULL, 'epoch', NULL, DEFAULT)
            """, user: "a_sender")
        let daemon = try stage.daemon(["log.level=debug"])
        try stage.settled()
        let requests = stage.apns.records.exchanges.map(\.request).sorted { $0.token ?? "" > $1.token ?? "" }
        let first = try #require(requests.first)
        #expect(
            first.token == "abcdef" && first.topic == "com.example.app" && first.pushType == "alert"
                && first.priority == "5")
        #expect(
            first.expiration == "2208988800" && first.collapseID == "a b"
                && first.apnsID == "6ba7b810-9dad-11d1-80b4-00c04fd430c8")
        #expect(String(decoding: first.payload, as: UTF8.self) == #"{"n":[1,2],"aps":{"alert":"Hällo, \"World\": 1"}}"#)
        let second = try #require(requests.last)
        #expect(
            second.pushType == "background" && second.priority == "5" && second.expiration == "0"
                && second.collapseID == nil)
        #expect(try stage.results(200) == 2)
        let named = "apns_id=6ba7b810-9dad-11d1-80b4-00c04fd430c8 apns_unique_id="
        #expect(daemon.logged.contains(#"msg="the sandbox has answered" \#(named)"#), "\(daemon.logged)")
        #expect(daemon.stop() == 0)
    }

    // Trouble ----------------------------------------------------------------------------------------------------------

    @Test func `the server can be an IPv6 address`() throws {
        let stage = try SendingStage { $0.host = "::1" }
        defer { stage.apns.stop() }
        try stage.register(1...10)
        let daemon = try stage.daemon(["send.production_server=[::1]:\(stage.apns.port)"])
        #expect(try stage.enqueue() == 10)
        try stage.settled()
        #expect(try stage.results(200) == 10 && stage.apns.records.requests == 10)
        #expect(daemon.stop() == 0)
    }

    /// Responses of redirects, proxies and load balancers, which APNs does not send.
    @Test(arguments: [
        ("308", ""), ("401", "<html>Sign in</html>"), ("600", ""), ("999", #"{"reason":"BadPriority"}"#),
        ("410", "<html>Gone</html>"),
    ])
    func `responses that are not from APNs lose no request and no token, and all are sent once they end`(
        status: String, body: String
    ) throws {
        let isMended = Atomic(false)
        let stage = try SendingStage { _ in
        } answer: { _ in
            isMended.load(ordering: .acquiring) ? nil : .raw(.init(status: status, body: Array(body.utf8)))
        }
        defer { stage.apns.stop() }
        try stage.register(1...40)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try eventually("it is shown") {
            try stage.database.psql("SELECT array_to_string(problems, '; ') FROM tokenkeeper.sending_daemon").contains(
                "something between this daemon and APNs responds (main, production); check send.production_server and any proxy, and requests wait: "
                    + "the server answered \(status), but not as APNs does")
        }
        #expect(try stage.count("failed_send") == 0 && stage.count("suppressed_send") == 0)
        #expect(
            try stage.count("send_result") == 0 && stage.count("result_count") == 0, "they say nothing about a token")
        #expect(try stage.count("suppressed_token") == 0 && stage.count("held_result") == 0)

        isMended.store(true, ordering: .releasing)
        try eventually("all are sent") {
            try stage.database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL")
            return try stage.count("send_request") == 0
        }
        try stage.settled()
        #expect(try stage.count("failed_send") == 0)
        #expect(try stage.count("suppressed_send") == 0)
        #expect(stage.apns.records.count(200) == 40)
        #expect(daemon.stop() == 0)
    }

    @Test func `429 and 503 are retried with backoff and the same apns-id, and finally fail`() throws {
        let stage = try SendingStage { _ in
        } answer: { request in
            switch request.token?.suffix(1) {
            case "1": .refused(429, "TooManyRequests")
            case "2": .refused(503, "ServiceUnavailable")
            default: nil
            }
        }
        defer { stage.apns.stop() }
        try stage.register(1...3)
        try stage.enqueue()
        let daemon = try stage.daemon(timing: 0.01)
        func waits(_ attempts: Int) throws {
            try eventually("both wait for try \(attempts + 1)") {
                try stage.count(
                    "send_request",
                    "claimed_by IS NULL AND attempts = \(attempts) + (last_error LIKE '%503%')::integer AND scheduled_at > now() + interval '50 seconds'"
                )
                    == 2
            }
        }
        for attempts in 1...3 {
            try waits(attempts)
            try stage.database.psql("UPDATE tokenkeeper.send_request SET scheduled_at = NULL")
        }
        try waits(4)
        #expect(Set(stage.sends.values) == [1, 4, 5], "an error of the server is tried again at once")
        #expect(
            try stage.database.psql(
                "SELECT max(scheduled_at) > now() + interval '55 minutes' FROM tokenkeeper.send_request") == "t")
        // A day later.
        try stage.database.psql(
            "UPDATE tokenkeeper.send_request SET scheduled_at = NULL, first_sent_at = first_sent_at - interval '1 day'")
        try stage.settled()
        #expect(
            try stage.database.psql(
                "SELECT string_agg(error || ' ' || status, ', ' ORDER BY status) FROM tokenkeeper.failed_send")
                == "APNs answered 429 TooManyRequests; failed after 5 tries 429, APNs answered 503 ServiceUnavailable; failed after 6 tries 503"
        )
        #expect(try stage.results(200) == 1 && stage.results(429) == 5 && stage.results(503) == 6)
        #expect(daemon.stop() == 0)
    }

    @Test func `requests behind one that waits for its token wait as long, unsent`() throws {
        let stage = try SendingStage { _ in
        } answer: {
            $0.token == SendingStage.token(7) ? .refused(429, "TooManyRequests") : nil
        }
        defer { stage.apns.stop() }
        try stage.register(7...8)
        for number in 1...3 {
            try stage.enqueue("device_id => 'd7'", payload: #"{"aps":{"alert":"\#(number)"}}"#)
        }
        let daemon = try stage.daemon()
        try eventually("one was tried") { try stage.count("send_request", "claimed_by IS NULL AND attempts = 1") == 1 }
        try stage.enqueue("device_id => 'd8'")
        try eventually("the later request is sent") { try stage.results(200) == 1 }
        #expect(stage.apns.records.requests == 2)
        #expect(
            try stage.count(
                "send_request", "claimed_by IS NULL AND scheduled_at > now() + interval '30 seconds'") == 3)
        #expect(daemon.stop() == 0)
    }

    @Test func `a topic that cannot be claimed from is reported, and the others are sent`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.database.psql(
            """
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN IF NEW.topic = 'com.example.bad' THEN RAISE 'no' USING errcode = '22000'; END IF; RETURN NEW; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON tokenkeeper.send_request FOR EACH ROW EXECUTE FUNCTION public.refuse();
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT t, 'aa', '{"aps":{"alert":"1"}}' FROM unnest(ARRAY['com.example.a', 'com.example.bad', 'com.example.z']) AS t
            """, user: "postgres")
        let daemon = try stage.daemon()
        try eventually("the others are sent") { try stage.results(200) == 2 }
        try eventually("it is reported") {
            try stage.database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "requests for com.example.bad (production) cannot be claimed and wait: no (SQLSTATE 22000)")
        }
        #expect(daemon.logged.contains("requests for com.example.bad"))
        #expect(daemon.stop() == 0)
        #expect(try stage.count("send_request") == 1)
    }

    @Test func `a large campaign of one topic does not delay another topic`() throws {
        let stage = try SendingStage { _ in
        } answer: { _ in
            FakeAnswer.accepted.delayed(by: .milliseconds(5))
        }
        defer { stage.apns.stop() }
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT CASE WHEN i <= 4000 THEN 'com.example.app' ELSE 'com.example.other' END, lpad(to_hex(i), 8, '0'), '{"aps":{"alert":"1"}}'
            FROM generate_series(1, 4010) AS i
            """)
        let daemon = try stage.daemon(["send.max_in_flight=10"])
        try eventually("the other topic is sent") {
            try stage.count("send_request", "topic = 'com.example.other'") == 0
        }
        #expect(daemon.stop() == 0)
        // However late this test looks, the order of sending stays.
        let others = stage.apns.records.exchanges.map(\.request).filter { $0.topic == "com.example.other" }
        #expect(others.count == 10 && others.allSatisfy { $0.ordinal < 2000 })
    }

    @Test func `a server that returns errors is left alone and not tried for every request`() throws {
        let stage = try SendingStage { _ in
        } answer: { _ in
            .refused(503, "Shutdown")
        }
        defer { stage.apns.stop() }
        try stage.register(1...5000)
        try stage.enqueue()
        let daemon = try stage.daemon(["send.max_in_flight=50"])
        try eventually("it is logged") {
            daemon.logged.contains("APNs returns errors or cannot be reached (main, production), and requests wait")
        }
        try eventually("nothing is claimed") { try stage.count("send_request", "claimed_by IS NOT NULL") == 0 }
        #expect(stage.apns.records.requests <= 100, "the requests in flight when it noticed")
        try eventually("it is in the status") {
            try stage.database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "APNs returns errors or cannot be reached (main, production), and requests wait: APNs answered 503 Shutdown"
            )
        }
        #expect(daemon.stop() == 0)
        #expect(try stage.count("send_request") == 5000)
    }

    @Test func `GOAWAY, refused streams and lost connections cost at most a second send, and no request`() throws {
        // Each campaign has only one event that interrupts requests. A request that is interrupted twice may fail, and on a slow
        // machine two events could hit the same request.
        let sentBefore = Atomic(0)
        let stage = try SendingStage { _ in
        } answer: { request in
            let earlier = sentBefore.load(ordering: .acquiring)
            return switch (earlier == 0, request.ordinal - earlier) {
            case (_, 500), (_, 1500), (_, 2500): .goAway(.init(last: .thisNotProcessed, closing: .afterStreams))
            case (true, 1000): .goAway(.init(last: .thisProcessed, closing: .atOnce))
            case (true, 700...702): .reset(code: 7)
            case (false, 1000): .close
            default: nil
            }
        }
        defer { stage.apns.stop() }
        try stage.register(1...3000)
        let daemon = try stage.daemon()
        for campaign in 1...2 {
            sentBefore.store(stage.apns.records.requests, ordering: .releasing)
            try stage.enqueue()
            try eventually("requests that were not retried at once wait", within: 120) {
                try stage.database.psql(
                    "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND scheduled_at IS NOT NULL"
                )
                return try stage.count("send_request") == 0
            }
            try stage.settled()
            #expect(try stage.database.psql("SELECT DISTINCT error FROM tokenkeeper.failed_send") == "")
            #expect(try stage.results(200) == campaign * 3000)
        }
        #expect(stage.sends.count == 6000 && stage.sends.values.allSatisfy { $0 <= 3 })
        #expect(stage.apns.records.connections < 20)
        #expect(daemon.stop() == 0)
    }

    @Test func `a request that never gets a response is sent three times and fails`() throws {
        let stage = try SendingStage { _ in
        } answer: { _ in
            .reset(code: 2)
        }
        defer { stage.apns.stop() }
        try stage.register(1...3)
        try stage.enqueue()
        let daemon = try stage.daemon()
        try eventually("all have failed") {
            try stage.database.psql(
                "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND scheduled_at IS NOT NULL"
            )
            return try stage.count("failed_send", "error LIKE 'it was interrupted twice%'") == 3
        }
        #expect(stage.sends.count == 3 && stage.sends.values.allSatisfy { $0 == 3 })
        #expect(daemon.stop() == 0)
    }

    @Test func `nothing is sent to an untrusted server`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        try stage.register(1...10)
        try stage.enqueue()
        let stranger = try TestAuthority()
        let daemon = try stage.daemon(["send.ca_file=\(stranger.certificate)"])
        try eventually("it is tried") { try stage.count("send_request", "last_error IS NOT NULL") > 0 }
        #expect(daemon.stop() == 0)
        #expect(stage.apns.records.requests == 0)
        #expect(try stage.count("send_request", "claimed_by IS NULL") == 10)
        #expect(
            try stage.database.psql(
                "SELECT DISTINCT last_error FROM tokenkeeper.send_request WHERE last_error IS NOT NULL"
            ).contains("certificate"))
    }

    @Test func `an operator's pause reaches what waits behind another request, and costs it no try`() throws {
        let gate = FakeGate()
        let stage = try SendingStage { _ in
        } answer: { _ in
            .accepted.held(until: gate)
        }
        defer { stage.apns.stop() }
        try stage.register(7...7)
        for number in 1...3 { try stage.enqueue(payload: #"{"aps":{"alert":"\#(number)"}}"#) }
        let daemon = try stage.daemon()
        try eventually("one is under way") { stage.apns.records.requests == 1 }
        #expect(try stage.count("send_request", "claimed_by IS NOT NULL") == 3)
        try stage.database.psql("SELECT tokenkeeper.pause_sending('\(stage.topic)')", user: "a_operator")
        try eventually("the others are back") {
            try stage.count(
                "send_request", "claimed_by IS NULL AND attempts = 0 AND interruptions = 0 AND scheduled_at IS NULL")
                == 2
        }
        gate.open()
        try eventually("the one under way is answered") { try stage.results(200) == 1 }
        #expect(try stage.count("send_request") == 2)
        try stage.database.psql("SELECT tokenkeeper.resume_sending('\(stage.topic)')", user: "a_operator")
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(try stage.results(200) == 3 && stage.apns.records.requests == 3)
    }

    @Test func `what waits behind another request of a token is not sent once the token is forgotten`() throws {
        let gate = FakeGate()
        let stage = try SendingStage { _ in
        } answer: { _ in
            .accepted.held(until: gate)
        }
        defer { stage.apns.stop() }
        try stage.register(7...8)
        for number in 1...3 {
            try stage.enqueue("device_id => 'd7'", payload: #"{"aps":{"alert":"\#(number)"}}"#)
        }
        let daemon = try stage.daemon()
        try eventually("one is under way") { stage.apns.records.requests == 1 }
        #expect(try stage.count("send_request", "claimed_by IS NOT NULL") == 3)
        try stage.database.psql("SELECT tokenkeeper.forget('\(SendingStage.token(7))')", user: "a_operator")
        try stage.daemonHasLooked()
        gate.open()
        // Its response comes after that of the request that was under way.
        try stage.enqueue("device_id => 'd8'")
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(stage.apns.records.exchanges.map(\.request.token) == [SendingStage.token(7), SendingStage.token(8)])
        #expect(try stage.results(200) == 1, "the response for the forgotten token is not kept")
    }

    /// How a server keeps requests waiting in the client: with few streams, or with slow answers.
    @Test(arguments: [3, 1000])
    func `after an operator's pause, nothing arrives but what was under way, and the rest waits as if it was not tried`(
        streams: Int
    ) throws {
        let gate = FakeGate()
        let stage = try SendingStage {
            $0.maximumStreams = streams
        } answer: { request in
            // The connection opens more streams after its first answer.
            request.ordinal == 1 ? nil : .accepted.held(until: gate)
        }
        defer { stage.apns.stop() }
        try stage.register(1...1000)
        try stage.enqueue()
        let daemon = try stage.daemon(["send.max_in_flight=100", "send.max_connections=1"])
        let full = min(streams, 100)
        try eventually("all streams are used") { stage.apns.records.streams == full }
        #expect(try stage.count("send_request", "claimed_by IS NOT NULL") >= 100)
        try stage.database.psql("SELECT tokenkeeper.pause_sending('\(stage.topic)')", user: "a_operator")
        try eventually("what was not sent is back") {
            try stage.count("send_request", "claimed_by IS NOT NULL") <= full
        }
        gate.open()
        try eventually("the rest is answered") { try stage.count("send_request", "claimed_by IS NOT NULL") == 0 }
        let arrived = stage.apns.records.requests
        #expect(arrived == full + 1, "\(arrived) of 1000")
        #expect(
            try stage.count(
                "send_request", "attempts = 0 AND interruptions = 0 AND scheduled_at IS NULL AND first_sent_at IS NULL")
                == 1000 - arrived)
        try eventually("the answers are recorded") { try stage.results(200) == arrived }
        try stage.database.psql("SELECT tokenkeeper.resume_sending('\(stage.topic)')", user: "a_operator")
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(try stage.results(200) == 1000 && stage.count("failed_send") == 0)
        #expect(stage.sends.count == 1000 && stage.sends.values.allSatisfy { $0 == 1 })
    }

    @Test func `a request that waits in the client is not sent once its token is forgotten`() throws {
        let gate = FakeGate()
        let stage = try SendingStage {
            $0.maximumStreams = 1
        } answer: { request in
            request.ordinal == 1 ? .accepted.held(until: gate) : nil
        }
        defer { stage.apns.stop() }
        try stage.register(1...3)
        for number in 1...2 { try stage.enqueue("device_id => 'd\(number)'") }
        let daemon = try stage.daemon(["send.max_connections=1"])
        try eventually("one is under way") { stage.apns.records.exchanges.count == 1 }
        try eventually("both are claimed") { try stage.count("send_request", "claimed_by IS NOT NULL") == 2 }
        let waiting = stage.apns.records.exchanges.first?.request.token == SendingStage.token(1) ? 2 : 1
        try stage.database.psql("SELECT tokenkeeper.forget('\(SendingStage.token(waiting))')", user: "a_operator")
        try stage.daemonHasLooked()
        gate.open()
        try stage.enqueue("device_id => 'd3'")
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(
            stage.apns.records.exchanges.map(\.request.token)
                == [SendingStage.token(3 - waiting), SendingStage.token(3)])
        #expect(try stage.results(200) == 2)
    }

    // Starting and stopping --------------------------------------------------------------------------------------------

    @Test func `a stop finishes the requests in flight, returns the rest, and sends nothing twice`() throws {
        let stage = try SendingStage { _ in
        } answer: { _ in
            FakeAnswer.accepted.delayed(by: .milliseconds(20))
        }
        defer { stage.apns.stop() }
        try stage.register(1...4000)
        try stage.enqueue()
        for part in 1...3 {
            let daemon = try stage.daemon(["send.max_in_flight=100"])
            try eventually("a part is sent", within: SendingStage.longest) {
                stage.apns.records.requests >= part * 1000
            }
            #expect(daemon.stop() == 0)
            #expect(try stage.count("send_request", "claimed_by IS NOT NULL OR interruptions > 0") == 0)
            #expect(try stage.count("sending_daemon", "stopped_at IS NULL") == 0, "it signed off")
        }
        let daemon = try stage.daemon()
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(stage.sends.count == 4000 && stage.sends.values.allSatisfy { $0 == 1 })
    }

    @Test func `an outage of the database in the middle loses nothing`() throws {
        try sendAll { database in
            try database.psql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'a_daemon' AND datname = current_database()",
                user: "postgres")
        }
    }

    @Test func `a crash of PostgreSQL in the middle loses nothing, and nothing is sent twice`() throws {
        let cluster = try TestCluster.prepared()
        try sendAll(on: cluster) { _ in
            cluster.stop()
            try cluster.start()
        }
    }

    /// Sends a campaign that is disturbed four times, and expects each request to go out and be recorded once.
    private func sendAll(
        on cluster: TestCluster = .shared, disturbedBy disturb: (TestDatabase) throws -> Void
    ) throws {
        let stage = try SendingStage(on: cluster) { _ in
        } answer: { _ in
            FakeAnswer.accepted.delayed(by: .milliseconds(5))
        }
        defer { stage.apns.stop() }
        try stage.register(1...3000)
        try stage.enqueue()
        let daemon = try stage.daemon(["send.max_in_flight=100"])
        for part in 1...4 {
            try eventually("a part is sent", within: SendingStage.longest) { stage.apns.records.requests >= part * 500 }
            try disturb(stage.database)
        }
        try stage.settled()
        #expect(try stage.results(200) == 3000)
        #expect(stage.sends.count == 3000 && stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
    }

    @Test func `two daemons share a campaign, and each request goes out once, even when one stops`() throws {
        let stage = try SendingStage { _ in
        } answer: { _ in
            FakeAnswer.accepted.delayed(by: .milliseconds(10))
        }
        defer { stage.apns.stop() }
        try stage.register(1...4000)
        try stage.enqueue()
        let daemons = try [stage.daemon(["send.max_in_flight=100"]), stage.daemon(["send.max_in_flight=100"])]
        try eventually("both send", within: SendingStage.longest) {
            stage.apns.records.connections >= 2 && stage.apns.records.requests >= 1500
        }
        #expect(daemons[0].stop() == 0)
        try stage.settled()
        #expect(daemons[1].stop() == 0)
        #expect(try stage.results(200) == 4000)
        let logged = daemons.map(\.logged)
        #expect(stage.sends.count == 4000 && stage.sends.values.allSatisfy { $0 == 1 }, "\(logged)")
        #expect(Set(stage.apns.records.exchanges.map(\.request.connection)).count == 2, "\(logged)")
    }

    @Test func `after a lost connection the claims are those in the database`() throws {
        let gate = FakeGate()
        let stage = try SendingStage { _ in
        } answer: { _ in
            .accepted.held(until: gate)
        }
        defer { stage.apns.stop() }
        let daemon = try stage.daemon()
        try eventually("it sends") { try stage.count("sending_daemon") == 1 }
        // The response to a claim was lost with its connection. Of two requests of one token, another daemon has taken over the
        // second.
        let columns = "(topic, token, payload, claimed_by)"
        let alert = #"'{"aps":{"alert":"1"}}'"#
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request \(columns)
            VALUES ('\(stage.topic)', 'aa', \(alert), (SELECT daemon_id FROM tokenkeeper.sending_daemon)),
                   ('\(stage.topic)', 'bb', \(alert), NULL), ('\(stage.topic)', 'bb', \(alert), NULL);
            INSERT INTO tokenkeeper.sending_daemon VALUES ('other/1/1', 'elsewhere', now() + interval '1 hour', NULL, '[]', '{}')
            """)
        try eventually("both are claimed") { try stage.count("send_request", "claimed_by <> 'other/1/1'") == 3 }
        try eventually("one is in flight") { stage.apns.records.requests == 1 }
        let lost = try stage.database.psql(
            """
            UPDATE tokenkeeper.send_request SET claimed_by = 'other/1/1' WHERE request_id = (SELECT max(request_id) FROM tokenkeeper.send_request);
            SELECT max(clock_timestamp()) FROM (
                SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'a_daemon' AND datname = current_database()) AS ended
            """, user: "postgres")
        // Its first heartbeat over the next connection comes after it has read its claims.
        try eventually("it has connected again") {
            try stage.count("sending_daemon", "heartbeat_at > '\(lost)' AND daemon_id <> 'other/1/1'") == 1
        }
        gate.open()
        try eventually("the unknown claim is sent") { try stage.results(200) == 2 }
        try stage.register(1...1)
        try stage.enqueue()
        try eventually("the later request is sent") { try stage.results(200) == 3 }
        #expect(stage.apns.records.requests == 3, "the other daemon's request is not sent")
        #expect(try stage.count("send_request", "claimed_by = 'other/1/1'") == 1 && stage.count("send_request") == 1)
        #expect(daemon.stop() == 0)
    }

    @Test func `claims that are committed after the daemon has connected again are sent`() throws {
        let cluster = try TestCluster.prepared()
        let stage = try SendingStage(on: cluster)
        defer { stage.apns.stop() }
        let proxy = try CuttingProxy(to: cluster.port, seed: 0)
        proxy.behave()
        defer { proxy.close() }
        try stage.register(1...20)
        try stage.enqueue()
        // Heartbeats, which are as durable as claims, must not wait as well: the first one comes before any claim.
        try stage.database.psql(
            """
            CREATE FUNCTION public.at_once() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM set_config('synchronous_commit', 'off', true); RETURN NEW; END $$;
            CREATE TRIGGER at_once BEFORE INSERT OR UPDATE ON tokenkeeper.sending_daemon FOR EACH ROW EXECUTE FUNCTION public.at_once()
            """, user: "postgres")
        // A durable COMMIT now waits for a standby that does not exist.
        func waitForStandby(_ name: String) throws {
            try stage.database.psql("ALTER SYSTEM SET synchronous_standby_names = '\(name)'", user: "postgres")
            try stage.database.psql("SELECT pg_reload_conf()", user: "postgres")
        }
        try waitForStandby("nobody")
        try eventually("it is set") {
            try stage.database.psql("SHOW synchronous_standby_names", user: "postgres") == "nobody"
        }
        let daemon = try DaemonProcess(
            stage.database.url(port: proxy.port, overTCP: true), settings: stage.servers + stage.key,
            environment: ["RUNTIME_DIRECTORY": stage.runtime.path])
        try eventually("a claim waits in its COMMIT") {
            try stage.database.psql(
                "SELECT count(*) FROM pg_stat_activity WHERE usename = 'a_daemon' AND wait_event = 'SyncRep'",
                user: "postgres") == "1"
        }
        let before = try stage.database.psql("SELECT clock_timestamp()")
        proxy.cut()
        try eventually("it has connected again") {
            try stage.count("sending_daemon", "heartbeat_at > '\(before)'") == 1
        }
        #expect(try stage.count("send_request", "claimed_by IS NOT NULL") == 0, "the claim is not visible yet")
        try waitForStandby("")
        try stage.settled()
        #expect(stage.sends.count == 20 && stage.sends.values.allSatisfy { $0 == 1 })
        #expect(daemon.stop() == 0)
    }

    // Credentials ------------------------------------------------------------------------------------------------------

    @Test func `with several teams, each topic uses its own credential and connection`() throws {
        let files = try SendingStage.authority.get()
        let other = try files.makeKey(id: "OTHER12345", team: "TEAM654321")
        let stage = try SendingStage { $0.signingKeys.append(other.key) }
        defer { stage.apns.stop() }
        for (topic, token) in [
            ("com.example.app", "aa"), ("com.other.app", "bb"), ("com.other.app.voip", "cc"), ("org.nobody", "dd"),
        ] {
            try stage.database.psql(
                "INSERT INTO tokenkeeper.send_request (topic, token, payload) VALUES ('\(topic)', '\(token)', '{\"aps\":{\"alert\":\"1\"}}')"
            )
        }
        let daemon = try stage.daemon(
            credential: stage.key + [
                "credential.other.key_file=\(other.file)", "credential.other.key_id=OTHER12345",
                "credential.other.team_id=TEAM654321",
                "credential.other.topics=com.other.app com.other.app.voip",
            ])
        try eventually("three are sent") { try stage.count("send_request") == 1 }
        try eventually("the fourth is reported") {
            try stage.database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "no credential is configured for org.nobody (production): its requests wait")
        }
        #expect(daemon.logged.contains("no credential is configured for org.nobody (production)"))
        let exchanges = stage.apns.records.exchanges
        #expect(exchanges.allSatisfy { $0.outcome.status == 200 } && exchanges.count == 3)
        let teams = Dictionary(grouping: exchanges, by: \.request.connection).values.map {
            Set($0.map { $0.request.topic ?? "" })
        }
        #expect(Set(teams) == [["com.example.app"], ["com.other.app", "com.other.app.voip"]])
        #expect(daemon.stop() == 0)
    }

    @Test func `of many topics, one that is locked or refused by PostgreSQL keeps no other waiting`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        // A claim of this topic waits for the lock on its device's count.
        let key = "tokenkeeper.token_key('\(SendingStage.token(1))')"
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.background_send VALUES ('production', 'com.example.locked', \(key), '{}', now(), 3);
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.t' || t, lpad(to_hex(i), 64, '0'), '{"aps":{"alert":"x"}}'::json FROM generate_series(1, 120) AS t, generate_series(1, 3) AS i
            UNION ALL SELECT 'com.example.locked', '\(SendingStage.token(1))', '{"aps":{"content-available":1}}'
            UNION ALL SELECT 'com.example.failing', '\(SendingStage.token(1))', '{"aps":{"alert":"x"}}';
            """)
        try stage.database.psql(
            """
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no'' USING ERRCODE = ''22023''; END';
            CREATE TRIGGER refuse BEFORE UPDATE ON tokenkeeper.send_request FOR EACH ROW WHEN (NEW.topic = 'com.example.failing') EXECUTE FUNCTION public.refuse()
            """, user: "postgres")
        var other = try stage.database.connect()
        try other.execute("BEGIN; SELECT FROM tokenkeeper.background_send FOR UPDATE")
        let daemon = try stage.daemon()
        try eventually("the others are sent") { try stage.count("send_request") == 2 }
        #expect(stage.apns.records.requests == 360)
        try eventually("the failing one is reported") {
            try stage.database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                "requests for com.example.failing (production) cannot be claimed and wait")
        }
        try other.execute("COMMIT")
        try eventually("the locked one is sent") { try stage.count("send_request") == 1 }
        try stage.database.psql("DROP TRIGGER refuse ON tokenkeeper.send_request", user: "postgres")
        #expect(daemon.stop() == 0)
        #expect(stage.sends.values.allSatisfy { $0 == 1 })
    }

    @Test func `a client certificate works as PEM or PKCS#12, and status shows its expiry`() throws {
        let files = try SendingStage.authority.get()
        let stage = try SendingStage { options in
            options.clientAuthority = files.certificate
            options.signingKeys = []
        }
        defer { stage.apns.stop() }
        let identity = try files.clientCertificate(
            "push-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 20)
        let archive = try files.pkcs12(of: identity, password: "open sesame")
        let password = NSTemporaryDirectory() + "password-\(UUID().uuidString)"
        try "open sesame\n".write(toFile: password, atomically: true, encoding: .utf8)
        defer { try? FileManager.default.removeItem(atPath: password) }
        try stage.register(1...10)
        for credential in [
            ["certificate_file=\(identity.certificate)", "certificate_key_file=\(identity.key)"],
            ["certificate_file=\(archive)", "certificate_password_file=\(password)"],
        ] {
            try stage.enqueue()
            let daemon = try stage.daemon(
                credential: (credential + ["topics=com.example.app"]).map { "credential.old.\($0)" })
            try stage.settled()
            try eventually("its expiry is shown") {
                try stage.database.psql("SELECT unnest(warnings) FROM tokenkeeper.status").contains(
                    "the certificate of credential old expires at")
            }
            #expect(daemon.stop() == 0)
            #expect(!daemon.logged.contains("open sesame"))
        }
        #expect(stage.apns.records.count(200) == 20 && stage.apns.records.requests == 20)
    }
}
