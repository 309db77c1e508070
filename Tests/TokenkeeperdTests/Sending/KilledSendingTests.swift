import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

/// What must hold whatever happens to the daemon.
@Suite(.ownThread) struct `Sending under kills` {
    /// In the full soak, 100,000 requests to 50,000 tokens, some of which become stale on the way; the daemon is killed ten
    /// times.
    @Test
    func `every request ends in exactly one way, none is sent more than twice, and the ledger matches the responses`()
        throws
    {
        let seed = Seed.next()
        var chance = SeededChance(seed: seed)
        let stage = try SendingStage { $0.provesFirst = true }
        defer { stage.apns.stop() }
        let tokens = Soak.size(4_000, whole: 50_000)
        try stage.register(1...tokens)
        // Queued results are soon gone, so their apns-ids are kept.
        try stage.database.psql(
            """
            CREATE TABLE answered (apns_id uuid);
            CREATE FUNCTION note_answer() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS
                $$ BEGIN INSERT INTO public.answered VALUES (new.apns_id::uuid); RETURN NULL; END $$;
            CREATE TRIGGER note_answer AFTER INSERT ON tokenkeeper.send_result FOR EACH ROW EXECUTE FUNCTION note_answer();
            CREATE TABLE asked (apns_id uuid)
            """, user: "postgres")
        // This many tokens become stale, each at an unpredictable moment of the run.
        let now = Int64(Date.now.timeIntervalSince1970 * 1000)
        for _ in 0..<tokens / 25 {
            let token = SendingStage.token(Int.random(in: 1...tokens, using: &chance))
            stage.apns.deaths.die(token, .init(at: now + Int64.random(in: 1...Int64(tokens) * 6 / 5, using: &chance)))
        }
        for _ in 0..<2 { #expect(try stage.enqueue() == tokens) }

        try stage.database.psql("INSERT INTO asked SELECT apns_id FROM tokenkeeper.send_request", user: "postgres")
        var daemon = try stage.daemon()
        for kill in 1...10 {
            let progress = kill * (tokens * 4 / 25) + Int.random(in: 0..<tokens / 50, using: &chance)
            try eventually("\(progress) are sent", within: SendingStage.longest) {
                stage.apns.records.requests >= progress
            }
            daemon.signal(SIGKILL)
            #expect(daemon.wait() == -SIGKILL)
            daemon = try stage.daemon()
        }
        try stage.settled()
        #expect(daemon.stop() == 0)

        let database = stage.database
        let answered = try stage.results(200) + stage.results(410)
        let (suppressed, failed) = (try stage.count("suppressed_send"), try stage.count("failed_send"))
        #expect(
            answered + suppressed + failed == 2 * tokens,
            "\(answered) answered, \(suppressed) suppressed, \(failed) failed")
        #expect(
            Int(try database.psql("SELECT sum(results) FROM tokenkeeper.result_stat")) == answered, "no other answers")
        let ended = """
            SELECT a.apns_id FROM answered AS a UNION ALL SELECT s.apns_id FROM tokenkeeper.suppressed_send AS s
            UNION ALL SELECT f.apns_id FROM tokenkeeper.failed_send AS f
            """
        #expect(
            try database.psql(
                "SELECT count(*), count(DISTINCT e.apns_id) FROM (\(ended)) AS e JOIN asked USING (apns_id)",
                user: "postgres")
                == "\(2 * tokens)|\(2 * tokens)", "each in exactly one way")
        #expect(try stage.count("failed_send", "error NOT LIKE 'it was interrupted twice%'") == 0)
        let sends = stage.sends
        print(
            "\(answered) answered, \(suppressed) suppressed, \(failed) failed; \(sends.values.filter { $0 > 1 }.count) sent twice, \(stage.apns.records.connections) connections"
        )
        #expect(sends.values.allSatisfy { $0 <= 2 })
        #expect(sends.count >= answered && sends.count <= answered + failed, "everything answered was sent")
        #expect(stage.apns.records.connections <= 2 * 11)

        // The ledger suppresses the tokens that got a 410, as of its timestamp.
        var died: [String: Int64] = [:]
        for exchange in stage.apns.records.exchanges where exchange.outcome.status == 410 {
            let token = exchange.request.token ?? ""
            died[token] = stage.apns.deaths.death(of: token, topic: stage.topic, at: exchange.request.time)?.at
        }
        let told = try database.psql(
            "SELECT string_agg(token || ' ' || (extract(epoch FROM invalidated_at) * 1000)::bigint, ',') FROM tokenkeeper.token WHERE state = 'stale'"
        )
        let stale = Set(told.split(separator: ",").map(String.init))
        #expect(!stale.isEmpty && stale.isSubset(of: died.map { "\($0.key) \($0.value)" }))
        // A 410 to a request that was interrupted twice is not known.
        let unheard = try stage.count(
            "failed_send", "token NOT IN (SELECT token FROM tokenkeeper.token WHERE state = 'stale')")
        #expect(stale.count >= died.count - unheard)
        #expect(try stage.count("token", "state NOT IN ('active', 'stale')") == 0)
        let registeredLater = try stage.count(
            "suppressed_send",
            "state <> 'stale' OR token_key NOT IN (SELECT token_key FROM tokenkeeper.token WHERE state = 'stale')")
        #expect(registeredLater == 0, "only stale tokens are suppressed")
    }

    /// What a server may send instead of a valid response.
    private static func garbage(_ chance: inout SeededChance) -> FakeAnswer {
        let bodies: [[UInt8]] = [
            [], Array("{".utf8), Array(#"{"reason":"#.utf8), Array(#"{"reason":7,"timestamp":"x"}"#.utf8),
            Array(#"["reason"]"#.utf8),
            Array(#"{"reason":"SomethingNew","timestamp":1508249865488}"#.utf8),
            Array(#"{"reason":"BadDeviceToken""#.utf8),
            Array(#"{"reason":null}"#.utf8), [0xff, 0xfe, 0, 0x7b], Array(repeating: 0x20, count: 300_000),
            (0..<Int.random(in: 1..<200, using: &chance)).map { _ in UInt8.random(in: 0...255, using: &chance) },
        ]
        let headers: [[(name: String, value: String)]] = [
            [], [("apns-id", "")], [("apns-id", String(repeating: "x", count: 5000))], [("content-length", "7")],
            [("apns-id", "a"), ("apns-id", "b")], [("content-type", "application/json"), ("content-encoding", "gzip")],
        ]
        let ends: [FakeAnswer.Raw.End] = [.normally, .normally, .normally, .reset(code: 0), .reset(code: 2)]
        switch Int.random(in: 0..<40, using: &chance) {
        case 0: return .reset(code: Int.random(in: 0...13, using: &chance))
        case 1: return .close
        case 2: return .goAway(.init(last: .thisNotProcessed, reason: nil, closing: .atOnce))
        case 3:
            // A truncated 410 says nothing.
            return .raw(
                .init(
                    status: "410", headers: [("content-length", "900")], body: Array(#"{"reason":"Unregis"#.utf8),
                    end: .reset(code: 2)))
        default:
            let status = [
                "200", "200", "400", "404", "429", "500", "503", "599", "302", "100", "999", "0", "abc", "",
            ].randomElement(using: &chance)!
            // Informational: the fake's HTTP/2 library sends no body after it, and a request without a response ends only after 30 s.
            let end = status == "100" ? .reset(code: 2) : ends.randomElement(using: &chance)!
            return .raw(
                .init(
                    status: status, headers: headers.randomElement(using: &chance)!,
                    body: bodies.randomElement(using: &chance)!, end: end))
        }
    }

    @Test func `garbage responses harm no token and no daemon, and every request still ends`() throws {
        let seed = Seed.next()
        let stage = try SendingStage { _ in
        } answer: { request in
            var chance = SeededChance(seed: seed &+ UInt64(request.ordinal))
            // Not so often that the server would rest.
            return Int.random(in: 0..<8, using: &chance) > 0 ? nil : Self.garbage(&chance)
        }
        defer { stage.apns.stop() }
        try stage.register(1...3000)
        try stage.enqueue()
        // A device rests after a 429, longer each time.
        let daemon = try stage.daemon(["send.max_in_flight=20"], timing: 0.01)
        try eventually("all requests have ended", within: 120) {
            // Continue with delayed requests.
            try stage.database.psql(
                "UPDATE tokenkeeper.send_request SET scheduled_at = NULL WHERE claimed_by IS NULL AND scheduled_at IS NOT NULL"
            )
            return try stage.count("send_request") == 0
        }
        try stage.settled()
        #expect(daemon.stop() == 0)
        #expect(try stage.count("token", "state = 'active'") == 3000)
        #expect(
            try stage.count("rejected_result", "status ~ '^[1-5][0-9][0-9]$'") == 0,
            "only invalid statuses are rejected")
        let ended = try stage.results(200) + stage.count("failed_send")
        #expect(ended == 3000)
    }
}
