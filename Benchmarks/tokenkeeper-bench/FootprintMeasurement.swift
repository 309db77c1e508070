import Foundation
import LedgerTestSupport

/// What the daemon itself uses: memory, time to start, processor time at rest, disk space.
struct FootprintMeasurement: LedgerMeasurement {
    let cluster: PrivateCluster
    let scale: Scale
    let report: Report
    let template: String
    let workload: Workload

    func run() throws {
        let database = try cluster.copy(of: template)
        defer { try? database.drop() }
        try bytesAToken(database)
        try strippedBinary()
        try start(database)
        try rest(database)
        let few = scale.deadEvery[0]
        try memory(database, overTLS: false, results: scale.manyResults, deadEvery: few, most: 30)
        try memory(database, overTLS: false, results: scale.staleResults, deadEvery: 1, most: 30)
        try memory(database, overTLS: true, results: scale.results, deadEvery: few, most: 36)
        try memory(database, overTLS: true, results: scale.staleResults, deadEvery: 1, most: 36)
    }

    private func bytesAToken(_ database: Database) throws {
        let session = try database.session()
        let rows = Double(workload.tokens + workload.stale)
        let key = try session.number(
            "SELECT pg_relation_size('tokenkeeper.ledger') + pg_relation_size('tokenkeeper.ledger_pkey')")
        let all = try session.number("SELECT pg_total_relation_size('tokenkeeper.ledger')")
        report.note(
            "bytes a token, heap and key; with all indexes", "\(Int(key / rows)); \(Int(all / rows))")
    }

    private func strippedBinary() throws {
        let stripped = NSTemporaryDirectory() + "tokenkeeperd-\(UUID().uuidString.prefix(8))"
        defer { try? FileManager.default.removeItem(atPath: stripped) }
        guard let run = try? ProgramRun(["strip", "-o", stripped, DaemonProcess.program]), run.status == 0 else {
            return report.note("size of the stripped binary", "not measured: no strip")
        }
        let size = try FileManager.default.attributesOfItem(atPath: stripped)[.size] as? Int ?? 0
        report.note("size of the stripped binary", String(format: "%.1f MB", Double(size) / 1_000_000))
    }

    /// From the start of the process to READY, and to the first results of a waiting backlog.
    private func start(_ database: Database) throws {
        let session = try database.session()
        var ready: [Double] = []
        var first: [Double] = []
        for round in 0..<scale.rounds {
            let positions = round * 20_000..<(round + 1) * 20_000
            try workload.queue(positions, deadEvery: 50, in: Partition.current(session), on: session)
            try session.run("CHECKPOINT")
            let before = try Drain.counted(session)
            let listener = try NotifyListener()
            let start = ContinuousClock.now
            let daemon = try MeasuredDaemon(database, environment: ["NOTIFY_SOCKET": listener.address])
            var readyAt: Double?
            var firstAt: Double?
            while readyAt == nil || firstAt == nil {
                let now = start.duration(to: .now) / .milliseconds(1)
                if readyAt == nil, listener.count("READY=1") > 0 { readyAt = now }
                if firstAt == nil, try Drain.counted(session) > before { firstAt = now }
                guard now < 30_000 else { throw TestFailure("not ready in 30 s: \(daemon.logged)") }
                usleep(500)
            }
            ready.append(readyAt ?? .nan)
            first.append(firstAt ?? .nan)
            try eventually("the backlog is drained") {
                try Drain.counted(session) - before == Double(positions.count)
            }
            daemon.stop()
        }
        report.compare("from the start of the process to READY", Spread(ready), digits: 0, unit: " ms")
        report.compare(
            "from the start of the process to the first batch, committed", Spread(first), atMost: 100, digits: 0,
            unit: " ms")
    }

    /// With the default settings, while no results arrive.
    private func rest(_ database: Database) throws {
        let daemons = try MeasuredDaemon.start(on: database, settings: [])
        defer { for daemon in daemons { daemon.stop() } }
        try MeasuredDaemon.rest(database.session(), seconds: scale.restSeconds)
        let stopwatch = try Stopwatch(cluster, daemons)
        Thread.sleep(forTimeInterval: Double(scale.restSeconds))
        let sample = try stopwatch.sample(rows: 1)
        report.note(
            "processor time at rest, daemon and server",
            String(
                format: "%.2f %% and %.2f %% of a core", sample.daemonSeconds / sample.seconds * 100,
                sample.serverSeconds / sample.seconds * 100))
        report.note("memory at rest", Self.memory(of: daemons[0].pid, peak: false).text)
    }

    private static func memory(of process: Int32, peak: Bool) -> (megabytes: Double, text: String) {
        let resident = Double(ProcessorTime.kilobytes(peak ? "VmHWM" : "VmRSS", of: process)) * 1024 / 1_000_000
        let anonymous = Double(ProcessorTime.kilobytes("RssAnon", of: process)) * 1024 / 1_000_000
        return (
            resident,
            String(
                format: "%@ %.1f MB, RssAnon %.1f MB%@", peak ? "greatest RSS" : "RSS", resident, anonymous,
                peak ? " at the end" : "")
        )
    }

    /// The greatest resident memory while a backlog is drained.
    private func memory(
        _ database: Database, overTLS: Bool, results: Int, deadEvery: Int, most: Double
    ) throws {
        let session = try database.session()
        let daemon = try MeasuredDaemon.start(on: database, overTLS: overTLS)[0]
        defer { daemon.stop() }
        try MeasuredDaemon.pause([daemon], on: session)
        try workload.queue(0..<results, deadEvery: deadEvery, in: Partition.past(session), on: session)
        try session.run("CHECKPOINT")
        let before = try Drain.counted(session)
        let stopwatch = try Stopwatch(cluster, [daemon])
        MeasuredDaemon.resume([daemon])
        _ = try Drain.follow(session, from: before, rows: results) { kill(daemon.pid, 0) == 0 }
        let sample = try stopwatch.sample(rows: results)
        let memory = Self.memory(of: daemon.pid, peak: true)
        let way = overTLS ? "over TLS" : "over a local socket"
        let work = "the drain of \(Scale.short(results)) results, \(Scale.percent(deadEvery)) 410s, \(way)"
        report.compare(
            "greatest RSS during \(work)", Spread([memory.megabytes]),
            atMost: most, digits: 1, unit: " MB")
        report.note(
            "during \(work)",
            memory.text
                + String(
                    format: "; %.0f results a second; daemon %.2f and server %.2f µs of processor a result",
                    sample.rate,
                    sample.daemonSeconds / Double(results) * 1_000_000,
                    sample.serverSeconds / Double(results) * 1_000_000))
    }
}
