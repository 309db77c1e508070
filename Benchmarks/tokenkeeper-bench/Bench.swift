import ArgumentParser
import Foundation
import LedgerTestSupport

/// `make bench`: compares the daemon with bare SQL and other queues, on a private PostgreSQL, and with other senders.
@main
struct Bench: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "tokenkeeper-bench",
        abstract: "Measures the tokenkeeperd next to this program, on a private PostgreSQL.",
        subcommands: [MeasureCommand.self, PushCommand.self], defaultSubcommand: MeasureCommand.self)
}

/// The default subcommand.
struct MeasureCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "measure", abstract: "Measures, and writes the report.")

    /// The measurements, by the names that `--only` takes.
    enum Measurement: String, CaseIterable {
        case drain, peers, ledger, hostile, metrics, freshness, sweep, gate, register, registration, attach,
            producers, footprint, vacuum,
            publication, extremes, sending, campaign, growth

        /// Whether it needs the large ledger.
        var isLarge: Bool { [.ledger, .sweep, .gate, .campaign].contains(self) }

        /// Whether it runs only if it is named: it takes an hour and 45 GB of disk.
        var isOptional: Bool { self == .growth }

        /// Whether it is in the report on sending.
        var isSending: Bool { [.sending, .campaign].contains(self) }
    }

    @Flag(help: "Small sizes, three rounds: a quick look in minutes, no figures to keep.")
    var quick = false

    @Option(help: "Only these, with commas: \(Measurement.allCases.map(\.rawValue).joined(separator: ", ")).")
    var only: String?

    @Option(
        help: ArgumentHelp(
            "An earlier build of this program, whose client is measured as well.", valueName: "revision=path"))
    var before: String?

    @Option(help: "The folder for the report.")
    var output: String

    func run() throws {
        let chosen = try only.map(Self.measurements) ?? Set(Measurement.allCases.filter { !$0.isOptional })
        let scale = quick ? Scale.quick : .full
        if chosen.contains(.growth) {
            guard chosen.count == 1 else { throw ValidationError("--only: growth runs alone") }
            return try growth(scale)
        }
        let cluster = try PrivateCluster(hasPgQ: chosen.contains(.peers))
        let (report, sendingReport) = (Report(), Report())
        let machine = try Machine(cluster)
        let paper = Paper(
            .ledger, report: report, machine: machine, isQuick: quick, isWhole: only == nil)
        // Sending has its own report, so that it can be measured again without the hour that the rest takes.
        let sendingPaper = Paper(
            .sending, report: sendingReport, machine: machine, isQuick: quick,
            isWhole: chosen.isSuperset(of: Measurement.allCases.filter(\.isSending)))
        // Writes after each measurement, so that an early end does not lose an hour of figures.
        let isLedger = !chosen.allSatisfy(\.isSending)
        if isLedger { report.onEach = { try? paper.write(to: output) } }
        sendingReport.onEach = { try? sendingPaper.write(to: output) }
        let workload = Workload(tokens: scale.tokens)
        Progress.say("filling a ledger of \(Scale.short(scale.tokens)) tokens")
        let template = try cluster.template(workload)
        if !chosen.isDisjoint(with: [.drain, .peers]) {
            DrainMeasurement(
                cluster: cluster, scale: scale, report: report, template: template, workload: workload,
                withPeers: chosen.contains(.peers)
            ).run()
        }
        let bench = (cluster, scale, report, chosen)
        attempt(
            [
                (.hostile, HostileMeasurement.self), (.metrics, MetricsMeasurement.self),
                (.freshness, FreshnessMeasurement.self),
                (.producers, ProducerMeasurement.self), (.register, RegisterMeasurement.self),
                (.registration, RegistrationMeasurement.self), (.attach, AttachMeasurement.self),
                (.footprint, FootprintMeasurement.self), (.vacuum, VacuumMeasurement.self),
            ], bench, template, workload)
        sendingReport.attempt("sending", chosen.contains(.sending)) {
            try SendingMeasurement(scale: scale, report: sendingReport, before: before.map(Self.earlier)).run()
            try OutboxMeasurement(
                cluster: cluster, scale: scale, report: sendingReport, template: template, workload: workload
            ).run()
        }
        if chosen.contains(where: \.isLarge) {
            (isLedger ? report : sendingReport).attempt("the large ledger", true) {
                let large = Workload(tokens: scale.manyTokens)
                Progress.say("filling a ledger of \(Scale.short(scale.manyTokens)) tokens")
                let largeTemplate = try cluster.template(large)
                attempt([(.gate, GateMeasurement.self)], bench, largeTemplate, large)
                report.attempt("ledger", chosen.contains(.ledger)) {
                    try LargeLedgerMeasurement(
                        cluster: cluster, scale: scale, report: report, templates: (template, largeTemplate),
                        workloads: (workload, large)
                    ).run()
                }
                attempt([(.sweep, SweepMeasurement.self)], bench, largeTemplate, large)
                attempt(
                    [(.campaign, CampaignMeasurement.self)], (cluster, scale, sendingReport, chosen), largeTemplate,
                    large)
            }
        }
        report.attempt("publication", chosen.contains(.publication)) {
            try PublicationMeasurement(scale: scale, report: report).run()
        }
        if chosen.contains(.extremes) { ExtremesMeasurement(cluster: cluster, scale: scale, report: report).run() }
        let written =
            (isLedger ? [(report, paper)] : [])
            + (chosen.contains(where: \.isSending) ? [(sendingReport, sendingPaper)] : [])
        for (report, paper) in written {
            report.isFinished = true
            try paper.write(to: output)
            print(paper.markdown)
        }
        if written.contains(where: { !$0.0.failures.isEmpty }) { throw ExitCode.failure }
    }

    /// The growing ledger, which has a cluster and a report of its own.
    private func growth(_ scale: Scale) throws {
        let report = Report()
        var page: GrowthPage?
        report.attempt("growth", true) {
            try GrowthMeasurement(scale: scale, report: report) { steps, cluster in
                page = GrowthPage(steps: steps, report: report, machine: try Machine(cluster), isQuick: quick)
                try page?.write(to: output)
            }.run()
        }
        report.isFinished = report.failures.isEmpty
        try page?.write(to: output)
        print(page?.markdown ?? "")
        if !report.failures.isEmpty { throw ExitCode.failure }
    }

    /// The chosen measurements among these, on one ledger.
    private func attempt(
        _ kinds: [(Measurement, any LedgerMeasurement.Type)],
        _ bench: (cluster: PrivateCluster, scale: Scale, report: Report, chosen: Set<Measurement>), _ template: String,
        _ workload: Workload
    ) {
        for (name, kind) in kinds {
            bench.report.attempt(name.rawValue, bench.chosen.contains(name)) {
                try kind.init(
                    cluster: bench.cluster, scale: bench.scale, report: bench.report, template: template,
                    workload: workload
                ).run()
            }
        }
    }

    private static func earlier(_ text: String) throws -> SendingClient.EarlierBuild {
        guard let middle = text.firstIndex(of: "=") else {
            throw ValidationError("--before \(text): expected revision=path")
        }
        return SendingClient.EarlierBuild(
            revision: String(text[..<middle]), program: String(text[text.index(after: middle)...]))
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

/// A measurement on copies of one ledger.
protocol LedgerMeasurement {
    /// - Parameter template: The database to copy.
    init(cluster: PrivateCluster, scale: Scale, report: Report, template: String, workload: Workload)
    func run() throws
}
