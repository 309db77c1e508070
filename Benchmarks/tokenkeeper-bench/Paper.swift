import Foundation

/// The report for people: a page of Markdown, and a plot.
struct Paper {
    /// The subject of a page.
    enum Subject: String {
        case ledger = "README.md"
        case sending = "sending.md"
    }

    let subject: Subject
    let report: Report
    let machine: Machine
    let scale: Scale
    let isQuick: Bool
    /// False if only some measurements were requested.
    let isWhole: Bool

    private static let plotName = "drain.svg"

    init(
        _ subject: Subject, report: Report, machine: Machine, scale: Scale, isQuick: Bool, isWhole: Bool = true
    ) {
        self.subject = subject
        self.report = report
        self.machine = machine
        self.scale = scale
        self.isQuick = isQuick
        self.isWhole = isWhole
    }

    func write(to folder: String) throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        try markdown.write(toFile: "\(folder)/\(subject.rawValue)", atomically: true, encoding: .utf8)
        if !report.bars.isEmpty {
            let plot = BarPlot(
                title: "Results drained per second, by share of 410s (each share has its own scale)",
                groups: report.bars)
            try plot.svg.write(toFile: "\(folder)/\(Self.plotName)", atomically: true, encoding: .utf8)
        }
    }

    var markdown: String {
        let day = ISO8601DateFormatter.string(from: .now, timeZone: .gmt, formatOptions: [.withFullDate])
        var lines = ["# \(title)", ""]
        lines += [
            "Written by `make bench` on \(day)"
                + (isQuick ? ", **with QUICK=1: small sizes, no figures to keep**" : "")
                + (isWhole ? "" : ", **only some of the measurements**")
                + (report.isFinished ? "." : ", **which did not finish**."),
            "Rates depend on the machine. Ratios are computed round by round, between contestants that did the same work in the same round",
            "of the same run, in a different order each time. A figure with a range in parentheses is the median of \(scale.rounds) rounds, with the",
            "minimum and the maximum. \"Once\" marks a single measurement.",
            "",
        ]
        if subject == .ledger {
            lines += ["[Sending to APNs](sending.md) has its own page.", ""]
        }
        if !report.bars.isEmpty { lines += ["![Results drained per second](\(Self.plotName))", ""] }
        lines += ["| measure | figure | target | |", "|---|---|---|---|"]
        for finding in report.findings {
            let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
            lines.append("| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |")
        }
        lines += report.failures.map { "| \($0.name) | **failed: \($0.error.replacing("\n", with: " "))** | | |" }
        if report.findings.contains(where: { $0.isReached == false }) {
            lines += [
                "", "Why some targets are not reached: [where the time goes](../decisions/where-the-time-goes.md).",
            ]
        }
        if !report.rates.isEmpty { lines += rates }
        lines += ["", "## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines.append("| settings | \(Self.code(machine.settings)) |")
        lines.append(
            "| the daemon's\(subject == .ledger ? ", except freshness, start and rest, which have the defaults" : "") | \(Self.code(MeasuredDaemon.brisk)) |"
        )
        lines +=
            ["", "## How", ""]
            + (subject == .ledger ? LedgerMethod(scale: scale).lines : SendingMethod(scale: scale).lines)
        return lines.joined(separator: "\n") + "\n"
    }

    private var title: String { subject == .ledger ? "Benchmarks" : "Benchmarks of sending" }

    private var rates: [String] {
        var lines = [
            "", "## Rates and processor time", "",
        ]
        switch subject {
        case .ledger:
            lines += [
                "Rows are results, tokens or calls, depending on the work. Processor time is the total of all server processes, and of the daemons.",
                "", "| work | contestant | rows per second | server, µs per row | daemon, µs per row |",
            ]
        case .sending:
            lines += [
                "Processor time is measured for the receiving and the sending process; for the outbox, for PostgreSQL's processes and the daemon.",
                "", "| work | contestant | requests per second | server, µs per request | client, µs per request |",
            ]
        }
        lines.append("|---|---|---|---|---|")
        for rate in report.rates {
            let daemon = rate.daemonMicroseconds.median > 0 ? rate.daemonMicroseconds.text() : ""
            lines.append(
                "| \(rate.work) | \(rate.contestant) | \(rate.rowsPerSecond.text(0)) | \(rate.serverMicroseconds.text()) | \(daemon) |"
            )
        }
        return lines
    }

    private static func code(_ words: [String]) -> String {
        words.map { "`\($0)`" }.joined(separator: ", ")
    }
}
