import FakeAPNs
import Foundation
import LedgerTestSupport
import TestRun
import TestThreads
import Testing

/// What happens on every ordinary day, watched by a real Prometheus with the alerts as people get them.
@Suite(.ownThread) struct `An ordinary day` {
    /// A daemon that is restarted is away for a moment, and so is PostgreSQL. These alerts wait for five minutes.
    private static let mayBePending: Set = ["NoLiveDaemon", "DatabaseAway"]

    @Test func `a large campaign, maintenance, a dump, restarts and a quiet night page nobody`() throws {
        // Three of a hundred devices are gone, as in a monthly campaign.
        let scene = try SendingStage(
            on: .prepared(),
            answer: { request in
                let isGone = request.token.map { Self.number($0) % 33 == 0 } ?? false
                return isGone ? .stale(at: Int64(Date.now.timeIntervalSince1970 * 1000)) : nil
            })
        try scene.register(1...3000)
        let ports = [try TestCluster.freePort(), try TestCluster.freePort()]
        func daemon(_ port: Int) throws -> DaemonProcess {
            try scene.daemon(["metrics.listen=127.0.0.1:\(port)"], timing: 0.2)
        }
        var daemons = try ports.map(daemon)
        let prometheus = try Prometheus(scraping: ports, rules: try PackagedProgram.monitoring("alerts.yml"))
        try eventually("the metrics are there") {
            // Before it is ready, its answers are no JSON.
            (try? prometheus.names().contains("tokenkeeper_database_live_daemons")) ?? false
        }

        // It has been running for two hours, and its rate lets it run on.
        let campaign = try scene.campaign("tags => 'World', max_per_second => 300")
        try eventually("it is sent") { try scene.progress(campaign)["accepted", default: 0] > 300 }
        try scene.database.psql(
            """
            UPDATE tokenkeeper.campaign SET created_at = created_at - interval '2 hours', started_at = started_at - interval '2 hours';
            UPDATE tokenkeeper.send_request SET queued_at = queued_at - interval '2 hours'
            """)
        for statement in [
            "VACUUM FULL tokenkeeper.ledger", "REINDEX SCHEMA CONCURRENTLY tokenkeeper", "VACUUM (ANALYZE)",
            "CHECKPOINT",
        ] { try scene.database.psql(statement, user: "postgres") }
        try TestCluster.run(["pg_dump", "-f", "/dev/null", "-d", scene.database.url(user: "postgres")])
        scene.database.cluster.stop(mode: "fast")
        try scene.database.cluster.start()
        // One after the other, as in a rolling upgrade.
        for (index, port) in ports.enumerated() {
            #expect(daemons[index].stop() == 0)
            daemons[index] = try daemon(port)
            try eventually("it is ready") { PlainClient.get("/ready", port).hasPrefix("HTTP/1.1 200 ") }
        }
        try scene.database.psql("SELECT tokenkeeper.request_sweep()", user: "a_operator")
        try scene.ended(campaign)
        #expect(try scene.progress(campaign) == ["addressed": 3000, "accepted": 2910, "stale": 90])

        // At night, nobody has sent, registered or queued for hours.
        try scene.database.psql(
            """
            UPDATE tokenkeeper.campaign SET ended_at = ended_at - interval '5 hours';
            UPDATE tokenkeeper.ledger SET registered_at = registered_at - interval '5 hours', stale_at = stale_at - interval '5 hours'
            """)
        let night = Date.now
        try eventually("that has been scraped") { try prometheus.hasScraped(since: night.addingTimeInterval(5)) }
        #expect(try prometheus.everPaged("firing") == [])
        #expect(try prometheus.everPaged("pending").subtracting(Self.mayBePending) == [])
        #expect(try prometheus.ruleErrors() == [])
    }

    private static func number(_ token: String) -> Int { Int(token.suffix(8), radix: 16) ?? 0 }
}
