import ArgumentParser
import Foundation
import LedgerTestSupport

/// `make bench`: measures the daemon beside bare SQL and other queues, on a PostgreSQL of its own.
@main
struct Bench: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "tokenkeeper-bench",
        abstract: "Measures tokenkeeperd, which stands beside this program, on a private PostgreSQL.")

    /// The measurements, by the names that `--only` takes.
    enum Measurement: String, CaseIterable {
        case drain, peers, ledger, hostile, freshness, sweep, gate, register, producers, footprint, publication

        /// Whether it needs the large ledger.
        var isLarge: Bool { [.ledger, .sweep, .gate].contains(self) }
    }

    @Flag(help: "Small sizes, three rounds: a look in minutes, no result to keep.")
    var quick = false

    @Option(help: "Only these, with commas: \(Measurement.allCases.map(\.rawValue).joined(separator: ", ")).")
    var only: String?

    @Option(help: "The folder for the report.")
    var output: String

    func run() throws {
        let chosen = try only.map(Self.measurements) ?? Set(Measurement.allCases)
        let scale = quick ? Scale.quick : .full
        let report = Report()
        let cluster = try PrivateCluster()
        let workload = Workload(tokens: scale.tokens)
        Progress.say("filling a ledger of \(Scale.short(scale.tokens)) tokens")
        let template = try cluster.template(workload)
        report.attempt("drain", !chosen.isDisjoint(with: [.drain, .peers])) {
            try DrainMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload,
                withPeers: chosen.contains(.peers)
            ).run()
        }
        report.attempt("hostile", chosen.contains(.hostile)) {
            try HostileMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload
            ).run()
        }
        report.attempt("freshness", chosen.contains(.freshness)) {
            try FreshnessMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload
            ).run()
        }
        report.attempt("producers", chosen.contains(.producers)) {
            try ProducerMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload
            ).run()
        }
        report.attempt("register", chosen.contains(.register)) {
            try RegisterMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload
            ).run()
        }
        report.attempt("footprint", chosen.contains(.footprint)) {
            try FootprintMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload
            ).run()
        }
        if chosen.contains(where: \.isLarge) {
            let large = Workload(tokens: scale.manyTokens)
            Progress.say("filling a ledger of \(Scale.short(scale.manyTokens)) tokens")
            try runLarge(chosen, cluster, scale, report, (template, try cluster.template(large)), (workload, large))
        }
        report.attempt("publication", chosen.contains(.publication)) {
            try PublicationMeasurement(scale: scale, report: report).run()
        }
        let machine = try Machine(cluster)
        let paper = Paper(report: report, machine: machine, scale: scale, isQuick: quick, isWhole: only == nil)
        try paper.write(to: output)
        print(paper.markdown)
        if !report.failures.isEmpty { throw ExitCode.failure }
    }

    private func runLarge(
        _ chosen: Set<Measurement>, _ cluster: PrivateCluster, _ scale: Scale, _ report: Report,
        _ templates: (usual: String, large: String), _ workloads: (usual: Workload, large: Workload)
    ) throws {
        report.attempt("gate", chosen.contains(.gate)) {
            try GateMeasurement(
                cluster: cluster, scale: scale, report: report, template: templates.large, workload: workloads.large
            ).run()
        }
        report.attempt("ledger", chosen.contains(.ledger)) {
            try LargeLedgerMeasurement(
                cluster: cluster, scale: scale, report: report, templates: templates, workloads: workloads
            ).run()
        }
        report.attempt("sweep", chosen.contains(.sweep)) {
            try SweepMeasurement(
                cluster: cluster, scale: scale, report: report, template: templates.large, workload: workloads.large
            ).run()
        }
    }

    private static func measurements(_ text: String) throws -> Set<Measurement> {
        Set(
            try text.split(separator: ",").map { word in
                guard let measurement = Measurement(rawValue: String(word)) else {
                    throw ValidationError("--only \(word): expected \(Measurement.allCases.map(\.rawValue))")
                }
                return measurement
            })
    }
}
