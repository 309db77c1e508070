import Foundation
import LedgerTestSupport

/// Launches and results with autovacuum on, compared with the same while it is off. Autovacuum wakes up 12 times as often as by default, so a minute
/// shows what ten minutes do.
struct VacuumMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    private static let off = "autovacuum off"
    private static let on = "autovacuum on"
    /// Of these, 2 % are 410s.
    private static let resultsPerSecond = 10_000.0

    func run() throws {
        defer { try? vacuums(false) }
        var growth: [Double] = []
        var freezing: [Double] = []
        let contest = try Contest(
            "launches while a sender queues \(Int(Self.resultsPerSecond)) results a second", rounds: scale.rounds,
            [
                Contest.Contestant(name: Self.off) { _ in try launches(vacuums: false) { _ in } },
                Contest.Contestant(name: Self.on) { _ in
                    try launches(vacuums: true) { session in
                        growth.append(try size(session) / size(cluster.session(template)))
                        freezing.append(try freeze(session))
                    }
                },
            ])
        report.add(contest)
        report.compare(
            "launches with autovacuum on over off, while a sender queues \(Int(Self.resultsPerSecond)) results a second",
            contest.ratio(Self.on, over: Self.off), atLeast: 0.95)
        report.compare("size of the ledger with its indexes after that, over before", Spread(growth), atMost: 1.1)
        report.compare(
            "a vacuum of the ledger to prevent wraparound as autovacuum performs it, a million tokens",
            Spread(freezing), digits: 1, unit: " s")
    }

    private func vacuums(_ on: Bool) throws {
        let admin = try cluster.session("postgres")
        try admin.run("ALTER SYSTEM SET autovacuum = \(on ? "on" : "off")")
        try admin.run("ALTER SYSTEM SET autovacuum_naptime = '5s'")
        try admin.run("SELECT pg_reload_conf()")
    }

    /// Registers random known tokens, one call after the other, while a sender queues results and a daemon drains them.
    private func launches(vacuums on: Bool, _ atEnd: (Session) throws -> Void) throws -> Sample {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        let session = try database.session()
        let stock = min(scale.results, workload.tokens / 2)
        try SendersLoad.prepare(workload, rows: stock, on: session)
        let tokens = try session.texts(workload.tokens(0..<scale.calls * 6, of: 1))
        try vacuums(on)
        let daemons = try MeasuredDaemon.start(on: database, settings: ["sweep.interval=off"])
        defer { for daemon in daemons { daemon.stop() } }
        let load = try SendersLoad(on: database, stock: stock, perSecond: Self.resultsPerSecond)
        defer { load.end() }
        let client = try PreparedClient(database)
        try client.prepare("call", "SELECT tokenkeeper.register($1, $2)")
        for token in tokens.prefix(200) { try client.call("call", [token, Workload.topics[0]]) }
        let stopwatch = try Stopwatch(cluster, daemons)
        let deadline = ContinuousClock.now + .seconds(scale.loadSeconds * 3)
        var calls = 0
        while ContinuousClock.now < deadline {
            try client.call("call", [tokens[calls % tokens.count], Workload.topics[0]])
            calls += 1
        }
        let sample = try stopwatch.sample(rows: calls)
        try load.check()
        load.end()
        try atEnd(session)
        try vacuums(false)
        return sample
    }

    /// Of the ledger with its indexes, in bytes.
    private func size(_ session: Session) throws -> Double {
        try session.number("SELECT pg_total_relation_size('tokenkeeper.ledger')")
    }

    /// - Returns: The seconds that a vacuum takes that reads and freezes the whole table, with the pauses of autovacuum, per million tokens.
    private func freeze(_ session: Session) throws -> Double {
        try session.run("SET vacuum_cost_delay = '2ms'")
        let start = ContinuousClock.now
        try session.run("VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) tokenkeeper.ledger")
        return start.duration(to: .now) / .seconds(1) / (Double(workload.tokens) * 1.1 / 1_000_000)
    }
}
