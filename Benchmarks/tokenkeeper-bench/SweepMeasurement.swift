import Foundation
import LedgerTestSupport
import Synchronization

/// The sweep compared with a bare DELETE of the same tokens, and its effect on the drain.
struct SweepMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let sweep = "tokenkeeperd sweep"
    private static let bare = "bare DELETE with history"
    private static let barest = "bare DELETE alone"
    private static let lightLoad = 2000.0

    func run() throws {
        let size = "\(Scale.short(workload.stale)) of \(Scale.short(workload.stale + workload.tokens))"
        let contest = try Contest(
            "prune \(size) tokens", rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.bare) { _ in
                    try onCopy { try timed($0) { try bareDelete($0) } }
                },
                Contest.Contestant(name: Self.barest) { _ in
                    try onCopy { database in
                        try timed(database, reports: false) {
                            try $0.session().run(
                                Recording.begin + "DELETE FROM tokenkeeper.ledger AS l WHERE \(Self.isDue); COMMIT")
                        }
                    }
                },
                Contest.Contestant(name: Self.sweep) { _ in
                    try onCopy { try timed($0) { try Self.sweep($0.url()) } }
                },
            ])
        report.add(contest)
        report.compare(
            "sweep of \(size) tokens over a bare DELETE that writes the same events",
            contest.ratio(Self.sweep, over: Self.bare), atLeast: 0.7)
        report.compare(
            "sweep of \(size) tokens over a bare DELETE that writes nothing",
            contest.ratio(Self.sweep, over: Self.barest))
        try meanwhile()
    }

    private func onCopy<Value>(_ work: (Database) throws -> Value) throws -> Value {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        return try work(database)
    }

    private static let isDue = """
        (l.topic_id, l.token_key) IN (
            SELECT s.topic_id, s.token_key FROM tokenkeeper.suppression AS s WHERE s.since < clock_timestamp() - interval '90 days')
        """

    private func timed(
        _ database: Database, reports: Bool = true, _ work: (Database) throws -> Void
    ) throws -> Sample {
        let session = try database.session()
        try session.run("CHECKPOINT")
        let stopwatch = try Stopwatch(cluster)
        try work(database)
        let sample = try stopwatch.sample(rows: workload.stale)
        let left = try session.number("SELECT count(*) FROM tokenkeeper.ledger")
        let told = try session.number("SELECT count(*) FROM tokenkeeper.token_event_log WHERE event = 'pruned'")
        guard Int(left) == workload.tokens, Int(told) == (reports ? workload.stale : 0) else {
            throw TestFailure("\(Int(left)) tokens left and \(Int(told)) told, of \(workload.stale) to be pruned")
        }
        return sample
    }

    private func bareDelete(_ database: Database) throws {
        try database.session().run(
            Recording.begin + """
                WITH gone AS (
                    DELETE FROM tokenkeeper.ledger AS l
                    WHERE \(Self.isDue) RETURNING l.*
                )
                INSERT INTO tokenkeeper.token_event_log (topic_id, token_key, event, cause, reason, device_id,
                    registered_before, invalidated_before)
                SELECT g.topic_id, g.token_key, 'pruned', 'stale', g.stale_reason, g.device_id, nullif(g.registered_at, '-infinity'),
                       greatest(g.stale_at, g.suspect_at, g.unregistered_by_app_at, g.superseded_at)
                FROM gone AS g;
                COMMIT
                """)
    }

    private static func sweep(_ url: String) throws {
        let run = try ProgramRun(
            [DaemonProcess.program, "sweep", "--force"], environment: ["TOKENKEEPER_DATABASE_URL": url])
        guard run.status == 0 else { throw TestFailure("the sweep: \(run.output)\(run.errors)") }
    }

    /// Freshness under a light load, without a sweep and while one runs.
    private func meanwhile() throws {
        var ratios: [Double] = []
        var p99s: (without: [Double], with: [Double]) = ([], [])
        for _ in 0..<scale.rounds {
            let (without, with) = try onCopy(probes)
            let p99 = (Freshness.quantile(0.99, of: without), Freshness.quantile(0.99, of: with))
            p99s.without.append(p99.0)
            p99s.with.append(p99.1)
            ratios.append(p99.1 / p99.0)
        }
        report.compare(
            "freshness p99 while a sweep runs over undisturbed, \(Int(Self.lightLoad)) results a second",
            Spread(ratios), atMost: 3)
        report.compare("freshness p99 undisturbed, light load", Spread(p99s.without), digits: 1, unit: " ms")
        report.compare("freshness p99 while a sweep runs", Spread(p99s.with), digits: 1, unit: " ms")
    }

    private func probes(_ database: Database) throws -> (without: [Double], with: [Double]) {
        let session = try database.session()
        let stock = min(scale.results, workload.tokens / 2)
        try SendersLoad.prepare(workload, rows: stock, on: session)
        let daemons = try MeasuredDaemon.start(on: database, settings: ["sweep.interval=off"])
        defer { for daemon in daemons { daemon.stop() } }
        let load = try SendersLoad(on: database, stock: stock, perSecond: Self.lightLoad)
        defer { load.end() }
        Thread.sleep(forTimeInterval: 1)
        try session.run("CHECKPOINT")
        let freshness = Freshness(workload: workload, database: database)
        let first = Freshness.firstPosition(workload)
        let pause = 0.005...0.035
        let without = try freshness.probe(
            first..<first + scale.loadedProbes, pause: pause, within: scale.loadSeconds * 2)
        let sweeping = DispatchGroup()
        let url = database.url()
        let failure = Mutex<(any Error)?>(nil)
        DispatchQueue.global().async(group: sweeping) {
            do { try Self.sweep(url) } catch { failure.withLock { $0 = error } }
        }
        let with = try freshness.probe(first + scale.loadedProbes..<first + 20 * scale.loadedProbes, pause: pause) {
            sweeping.wait(timeout: .now()) == .timedOut
        }
        sweeping.wait()
        if let error = failure.withLock({ $0 }) { throw error }
        try load.check()
        return (without, with)
    }
}
