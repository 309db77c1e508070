import Foundation

/// The report for people: a page of Markdown, and a plot.
struct Paper {
    /// The subject of a page.
    enum Subject: String {
        case ledger = "figures.md"
        case sending = "sending.md"
    }

    let subject: Subject
    let report: Report
    let machine: Machine
    let isQuick: Bool
    /// False if only some measurements were requested.
    let isWhole: Bool

    private static let plotName = "drain.svg"

    init(
        _ subject: Subject, report: Report, machine: Machine, isQuick: Bool, isWhole: Bool = true
    ) {
        self.subject = subject
        self.report = report
        self.machine = machine
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
            "",
        ]
        if !report.bars.isEmpty { lines += ["![Results drained per second](\(Self.plotName))", ""] }
        lines += ["| measure | figure | target | |", "|---|---|---|---|"]
        for finding in report.findings {
            let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
            lines.append("| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |")
        }
        lines += report.failures.map { "| \($0.name) | **failed: \($0.error.replacing("\n", with: " "))** | | |" }
        if !report.rates.isEmpty { lines += rates }
        lines += ["", "## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines.append("| settings | \(Self.code(machine.settings)) |")
        lines.append(
            "| the daemon's\(subject == .ledger ? ", except freshness, start and rest, which have the defaults" : "") | \(Self.code(MeasuredDaemon.brisk)) |"
        )
        return lines.joined(separator: "\n") + "\n"
    }

    private var title: String { subject == .ledger ? "Drain, gate and registration" : "Sending" }

    private var rates: [String] {
        var lines = [
            "", "## Rates and processor time", "",
        ]
        let row = subject == .ledger ? "row" : "request"
        lines += [
            "| contestant | \(row)s per second | server, µs per \(row) | \(subject == .ledger ? "daemon" : "client"), µs per \(row) |",
            "|---|---|---|---|",
        ]
        var work = ""
        for rate in report.rates {
            if rate.work != work { lines.append("| **\(rate.work)** | | | |") }
            work = rate.work
            let daemon = rate.daemonMicroseconds.median > 0 ? rate.daemonMicroseconds.text() : ""
            lines.append(
                "| \(rate.contestant) | \(rate.rowsPerSecond.text(0)) | \(rate.serverMicroseconds.text()) | \(daemon) |"
            )
        }
        return lines
    }

    private static func code(_ words: [String]) -> String {
        words.map { "`\($0)`" }.joined(separator: ", ")
    }
}
