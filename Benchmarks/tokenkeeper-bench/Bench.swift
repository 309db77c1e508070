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
    enum Measurement: String, CaseIterable, ExpressibleByArgument {
        case drain, peers
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
        if chosen.contains(.drain) || chosen.contains(.peers) {
            try DrainMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload,
                withPeers: chosen.contains(.peers)
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
