import FakeAPNs
import Foundation
import LedgerTestSupport
import Synchronization
import TestThreads
import Testing

@testable import tokenkeeperd

/// A daemon that sends to a fake APNs over HTTP/2, scraped.
@Suite(.ownThread) struct `Metrics of sending` {
    private static func requests(_ rest: String) -> String {
        #"apns_requests_total{credential="main",environment="production",\#(rest)}"#
    }

    @Test func `what is left of a campaign that has expired counts`() throws {
        let stage = try SendingStage()
        defer { stage.apns.stop() }
        let port = try TestCluster.freePort()
        let daemon = try stage.daemon(["metrics.listen=127.0.0.1:\(port)"])
        try stage.register(1...100)
        let campaign = try stage.campaign("tags => 'World', max_per_second => 1, expiration => '2040-01-01Z'")
        try eventually("some of it is sent") { try stage.progress(campaign)["accepted"] ?? 0 > 0 }
        try stage.database.psql("UPDATE tokenkeeper.campaign SET expiration = now()")
        try stage.ended(campaign)
        let failed = try #require(try stage.progress(campaign)["failed"])
        #expect(try failed > 0 && stage.count("failed_send") == 0)
        let sample = Self.requests(#"status="none",reason="",outcome="expired""#)
        try eventually("they are counted") { MetricsPage(port: port)[sample] == "\(failed)" }
        #expect(daemon.stop() == 0)
    }

    @Test func `each try counts once, by response and by what became of the request`() throws {
        let tries = Mutex<[Int: Int]>([:])
        let stage = try SendingStage { _ in
        } answer: { request in
            let token = Int(request.token ?? "", radix: 16) ?? 0
            let nth = tries.withLock { tries in
                tries[token, default: 0] += 1
                return tries[token, default: 0]
            }
            let now = Int64(Date.now.timeIntervalSince1970 * 1000)
            return switch (token, nth) {
            case (1...5, _): .stale(at: now)
            case (6...7, _): .refused(400, "BadCollapseId")
            case (8, _): .refused(503, "ServiceUnavailable")
            case (9, _): .refused(410, "NeverHeardOf", timestamp: now)
            case (10, 1): .raw(.init(status: "299"))
            // The client repeats it once.
            case (11, 1...2): .reset(code: 2)
            default: nil
            }
        }
        defer { stage.apns.stop() }
        let port = try TestCluster.freePort()
        let daemon = try stage.daemon(["metrics.listen=127.0.0.1:\(port)"])
        try eventually("the daemon sends") { MetricsPage(port: port)[Self.accepted] == "0" }
        #expect(MetricsPage(port: port)["apns_request_duration_seconds_count{environment=\"production\"}"] == "0")
        try stage.register(1...100)
        try stage.database.psql(
            "SELECT tokenkeeper.unregister(lpad(to_hex(i), 64, '0'), 'com.example.app') FROM generate_series(98, 100) AS i"
        )
        // enqueue leaves out what is suppressed; here the gate has to refuse it in the claim.
        try stage.database.psql(
            """
            INSERT INTO tokenkeeper.send_request (topic, token, payload)
            SELECT 'com.example.app', lpad(to_hex(i), 64, '0'), '{"aps":{"alert":"Hello"}}' FROM generate_series(1, 100) AS i
            """, user: "a_sender")
        let expected = [
            Self.accepted: "88",
            Self.requests(#"status="410",reason="Unregistered",outcome="answered""#): "5",
            Self.requests(#"status="410",reason="other",outcome="answered""#): "1",
            Self.requests(#"status="400",reason="BadCollapseId",outcome="failed""#): "2",
            Self.requests(#"status="503",reason="ServiceUnavailable",outcome="retried""#): "2",
            Self.requests(#"status="other",reason="(none given)",outcome="retried""#): "1",
            Self.requests(#"status="none",reason="connectionLost",outcome="interrupted""#): "1",
            Self.requests(#"status="none",reason="",outcome="suppressed""#): "3",
        ]
        for (sample, value) in expected.sorted(by: { $0.key < $1.key }) {
            try eventually("\(sample) is \(value)") { MetricsPage(port: port)[sample] == value }
        }
        let page = MetricsPage(port: port)
        #expect(
            page.samples("apns_requests_total").count { $0.contains(#"environment="production""#) } == expected.count)
        #expect(
            page[
                "apns_requests_total{credential=\"main\",environment=\"sandbox\",status=\"200\",reason=\"\",outcome=\"answered\"}"
            ] == "0")
        #expect(
            page["apns_request_duration_seconds_count{environment=\"production\"}"] == "99", "all that got a response")
        #expect(page["apns_request_duration_seconds_count{environment=\"sandbox\"}"] == "0")
        let sum = Double(page["apns_request_duration_seconds_sum{environment=\"production\"}"] ?? "") ?? 0
        #expect(sum > 0 && sum < 98 * 30)
        #expect(!page.text.contains("00000000"), "no token")
        #expect(page.samples("credential_expiry_timestamp_seconds") == [], "a provider token does not expire")
        #expect(daemon.stop() == 0)
    }

    private static let accepted = requests(#"status="200",reason="",outcome="answered""#)

    @Test func `requests without a response are in flight, over connections that are counted`() throws {
        let stage = try SendingStage { _ in
        } answer: { request in
            (Int(request.token ?? "", radix: 16) ?? 0) > 1 ? .never : nil
        }
        defer { stage.apns.stop() }
        let port = try TestCluster.freePort()
        let daemon = try stage.daemon(["metrics.listen=127.0.0.1:\(port)"])
        let place = #"{credential="main",environment="production"}"#
        try eventually("nothing is in flight") { MetricsPage(port: port)["apns_in_flight\(place)"] == "0" }
        #expect(MetricsPage(port: port)["apns_connections\(place)"] == "0")
        try stage.register(1...4)
        try stage.enqueue()
        // The first response proves the connection. Until then, no other request goes.
        try eventually("three wait for their response") {
            let page = MetricsPage(port: port)
            return page["apns_in_flight\(place)"] == "3" && page["apns_connections\(place)"] == "1"
        }
        #expect(MetricsPage(port: port)[#"apns_in_flight{credential="main",environment="sandbox"}"#] == "0")
        daemon.signal(SIGKILL)
        daemon.wait()
    }

    @Test func `a certificate has an expiry, and a credential only its environments`() throws {
        let files = try SendingStage.authority.get()
        let identity = try files.clientCertificate(
            "metrics-\(UUID().uuidString.prefix(8))", topic: "com.example.app", days: 30)
        let stage = try SendingStage { _ in }
        defer { stage.apns.stop() }
        let port = try TestCluster.freePort()
        let daemon = try stage.daemon(
            credential: [
                "credential.pair.certificate_file=\(identity.certificate)",
                "credential.pair.certificate_key_file=\(identity.key)", "credential.pair.topics=com.example.app",
                "credential.pair.environment=sandbox",
            ], ["metrics.listen=127.0.0.1:\(port)"])
        try eventually("it sends") { MetricsPage(port: port).samples("apns_in_flight").count == 1 }
        let page = MetricsPage(port: port)
        let expiry = Double(page[#"credential_expiry_timestamp_seconds{credential="pair"}"#] ?? "") ?? 0
        #expect(abs(expiry - Date.now.timeIntervalSince1970 - 30 * 86400) < 86400)
        #expect(page.samples("apns_in_flight") == [#"{credential="pair",environment="sandbox"} 0"#])
        #expect(page.samples("apns_request_duration_seconds_count") == [#"{environment="sandbox"} 0"#])
        #expect(daemon.stop() == 0)
    }

    @Test func `a daemon that sends nothing has no metrics of sending`() throws {
        var text = MetricsText()
        SendMetrics().add(to: &text)
        #expect(text.text == "")
    }
}
