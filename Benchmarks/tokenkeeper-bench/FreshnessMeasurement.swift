import Foundation
import LedgerTestSupport

/// Freshness when idle, with the default settings, and at half of the rate that senders and one daemon sustain together.
struct FreshnessMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    func run() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let stock = min(scale.results, workload.tokens / 2)
        try SendersLoad.prepare(workload, rows: stock, on: session)
        let daemons = try MeasuredDaemon.start(on: database, settings: [])
        defer { for daemon in daemons { daemon.stop() } }
        let freshness = Freshness(workload: workload, database: database)
        var position = Freshness.firstPosition(workload)
        func positions(_ count: Int) -> Range<Int> {
            defer { position += count }
            return position..<position + count
        }

        try MeasuredDaemon.rest(session, seconds: scale.restSeconds)
        // Longer than the daemon's longest pause, and not in step with it.
        let idle = try freshness.probe(positions(scale.idleProbes), pause: 2.2...3.5)
        report.note(
            "freshness idle, p50 and the longest of \(idle.count)",
            String(format: "%.0f and %.0f ms", Freshness.quantile(0.5, of: idle), idle.max() ?? .nan))

        let sustained = try Self.sustained(database, stock: stock, seconds: scale.loadSeconds)
        report.note(
            "results a second that one sender and one daemon sustain together", "\(Int(sustained))")
        var waits: [[Double]] = []
        for _ in 0..<scale.rounds {
            try Self.settle(session)
            let load = try SendersLoad(on: database, stock: stock, perSecond: sustained / 2)
            defer { load.end() }
            Thread.sleep(forTimeInterval: 1)
            waits.append(
                try freshness.probe(
                    positions(scale.loadedProbes), pause: 0.005...0.035, within: scale.loadSeconds * 4))
            try load.check()
        }
        let when = "freshness at half load, \(Int(sustained / 2)) results a second"
        report.compare(
            "\(when), p50", Spread(waits.map { Freshness.quantile(0.5, of: $0) }), digits: 1, unit: " ms")
        report.compare(
            "\(when), p99", Spread(waits.map { Freshness.quantile(0.99, of: $0) }), atMost: 100, digits: 1,
            unit: " ms")
    }

    /// What one sender at full speed and one daemon sustain together: counted results per second, after the first third.
    static func sustained(_ database: Database, stock: Int, seconds: Int) throws -> Double {
        let session = try database.session()
        let load = try SendersLoad(on: database, stock: stock, perSecond: nil)
        defer { load.end() }
        Thread.sleep(forTimeInterval: Double(seconds) / 3)
        let before = try Drain.counted(session)
        let start = ContinuousClock.now
        Thread.sleep(forTimeInterval: Double(seconds))
        return (try Drain.counted(session) - before) / (start.duration(to: .now) / .seconds(1))
    }

    /// Waits until the queue stays empty.
    static func settle(_ session: Session) throws {
        var last = -1.0
        try eventually("the queue is drained") {
            let now = try Drain.counted(session)
            defer { last = now }
            Thread.sleep(forTimeInterval: 0.5)
            return now == last
        }
    }
}
