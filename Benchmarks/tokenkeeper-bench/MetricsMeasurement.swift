import Foundation
import LedgerTestSupport

/// What `metrics.listen` costs the drain: nothing listens, nobody asks, or a crowd of bad clients does.
struct MetricsMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let off = "no listener"
    private static let asked = "a listener that nobody asks"
    private static let crowded = "a listener with a crowd"

    func run() throws {
        for deadEvery in [scale.deadEvery[0], 1] { try drain(deadEvery: deadEvery) }
        try scrape()
    }

    private func drain(deadEvery: Int) throws {
        let results = deadEvery == 1 ? scale.staleResults : scale.manyResults / 5
        let port = try TestCluster.freePort()
        let listening = MeasuredDaemon.brisk + ["metrics.listen=127.0.0.1:\(port)"]
        var scrapes: [Double] = []
        func contestant(_ name: String, _ settings: [String], crowded: Bool = false) -> Contest.Contestant {
            Contest.Contestant(name: name) { round in
                let database = try cluster.copy(of: template)
                defer { try? database.drop() }
                let first = round * results
                var crowd: Crowd?
                defer { crowd?.leave() }
                let sample = try Drain(workload: workload, place: .both).drain(
                    first..<first + results, deadEvery: deadEvery, on: database, settings: settings
                ) { _ in
                    if crowded { crowd = Crowd(port: port) }
                    return crowd
                }
                if let crowd { scrapes.append(Double(crowd.scrapes) / sample.seconds) }
                return sample
            }
        }
        let work = "\(Scale.short(results)) results, \(Scale.percent(deadEvery)) 410s"
        let contest = try Contest(
            "\(work), metrics", rounds: scale.rounds,
            [
                contestant(Self.off, MeasuredDaemon.brisk), contestant(Self.asked, listening),
                contestant(Self.crowded, listening, crowded: true),
            ])
        report.add(contest)
        for name in [Self.asked, Self.crowded] {
            let pairs = Array(zip(contest.samples[name] ?? [], contest.samples[Self.off] ?? []))
            report.compare(
                "processor time of the drain and the server, \(work), \(name), over \(Self.off)",
                Spread(pairs.map { ($0.drainSeconds + $0.serverSeconds) / ($1.drainSeconds + $1.serverSeconds) }),
                atMost: 1.05)
            report.compare(
                "processor time of the daemon's drain threads alone, \(work), \(name), over \(Self.off)",
                Spread(pairs.map { $0.drainSeconds / $1.drainSeconds }), atMost: 1.05)
        }
        report.compare("scrapes that the crowd was served, a second, \(work)", Spread(scrapes), digits: 0)
    }

    /// How long a scrape takes while nobody else asks, with 500 labeled topics.
    private func scrape() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let names = "SELECT 'com.example.topic' || i AS topic FROM generate_series(1, 10000) AS i"
        try session.run(
            "INSERT INTO tokenkeeper.topic_policy (topic, gate) SELECT topic, 'enforce' FROM (\(names)) AS n")
        let port = try TestCluster.freePort()
        let daemons = try MeasuredDaemon.start(
            on: database, settings: MeasuredDaemon.brisk + ["metrics.listen=127.0.0.1:\(port)"])
        defer { for daemon in daemons { daemon.stop() } }
        try session.run(
            """
            INSERT INTO tokenkeeper.send_result (topic, token, status, body)
            SELECT topic, 'aa', status, '{"reason":"Forbidden"}' FROM (\(names)) AS n, (VALUES (200), (403), (429), (503)) AS s (status)
            """)
        try eventually("all are drained") {
            try session.number("SELECT coalesce(sum(results), 0) FROM tokenkeeper.result_count") >= 40_000
        }
        var milliseconds: [Double] = []
        var size = 0
        for _ in 0..<20 {
            // Longer than a page is kept.
            Thread.sleep(forTimeInterval: 1.1)
            let start = ContinuousClock.now
            size = PlainClient.get("/metrics", port).utf8.count
            milliseconds.append(start.duration(to: .now) / .milliseconds(1))
        }
        report.compare("a scrape, 10,000 topics, rendered anew", Spread(milliseconds), atMost: 5, unit: " ms")
        report.check(
            "size of the page, 10,000 topics", "\(size / 1000) kB", target: "at most 1 MB", isReached: size < 1_000_000)
    }
}
