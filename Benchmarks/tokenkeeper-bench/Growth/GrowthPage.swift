import Foundation

/// The page on a growing ledger: tables of Markdown, and a plot.
struct GrowthPage {
    let steps: [GrowthStep]
    let report: Report
    let machine: Machine
    let isQuick: Bool

    private static let (name, plotName) = ("ledger.md", "ledger.svg")

    func write(to folder: String) throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        try markdown.write(toFile: "\(folder)/\(Self.name)", atomically: true, encoding: .utf8)
        if steps.count > 1 {
            try plot.svg.write(toFile: "\(folder)/\(Self.plotName)", atomically: true, encoding: .utf8)
        }
    }

    var markdown: String {
        let day = ISO8601DateFormatter.string(from: .now, timeZone: .gmt, formatOptions: [.withFullDate])
        var lines = [
            "# A growing ledger", "",
            "Written by `make bench ONLY=growth` on \(day)"
                + (isQuick ? ", **with QUICK=1: small sizes, no figures to keep**" : "")
                + (report.isFinished ? "." : ", **which did not finish**."),
            "One ledger grows by steps. At each size, the same calls and the same work are measured. Pages are the pages of 8 kB that PostgreSQL",
            "looks at, in memory or not: they depend on the size and not on the load of the machine. Times are medians, and depend on both.",
            "",
        ]
        if steps.count > 1 { lines += ["![What grows with the ledger](\(Self.plotName))", ""] }
        lines += table("pages", costs { Self.number($0.pages) })
        lines += table(
            "milliseconds",
            costs { Self.number($0.milliseconds) })
        lines += table(
            "WAL, bytes (whole pages of them)",
            costs { $0.walBytes.isNaN ? "" : "\(Int($0.walBytes)) (\(Int($0.wholePages)))" }
                .filter { $0.0.hasPrefix("register") })
        lines += table(
            "drain of results, 2 % 410s",
            [
                ("results a second", steps.map { "\(Int($0.drainedPerSecond))" }),
                ("processor time of the server a result, µs", steps.map { Self.number($0.drainMicroseconds) }),
                ("WAL a result, bytes", steps.map { Self.number($0.drainWAL) }),
            ])
        lines += table("the longest statement, milliseconds", times(\.longest))
        lines += table("vacuum of the ledger, seconds", times(\.vacuums))
        lines += table(
            "bytes a token",
            (steps.last?.sizes ?? []).filter { $0.bytes / (steps.last?.rows ?? 1) >= 0.5 }.map { size in
                (
                    "`\(size.relation)`",
                    steps.map { step in
                        Self.number((step.sizes.first { $0.relation == size.relation }?.bytes ?? .nan) / step.rows)
                    }
                )
            } + [
                ("all", steps.map { "\(Int($0.bytes))" }),
                ("an event of the history", steps.map { "\(Int($0.bytesOfEvent))" }),
            ])
        lines += bounds
        lines += ["## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines.append("| settings | `\(machine.settings.joined(separator: "`, `"))` |")
        return lines.joined(separator: "\n") + "\n"
    }

    private func costs(_ value: (GrowthStep.Cost) -> String) -> [(String, [String])] {
        (steps.last?.costs ?? []).map { cost in (cost.name, steps.map { $0[cost.name].map(value) ?? "" }) }
    }

    private func times(_ list: (GrowthStep) -> [GrowthStep.Time]) -> [(String, [String])] {
        list(steps[0]).indices.map { index in
            (list(steps[0])[index].name, steps.map { Self.number(list($0)[index].value) })
        }
    }

    private func table(_ title: String, _ rows: [(name: String, values: [String])]) -> [String] {
        [
            "| \(title) | " + steps.map { Scale.short($0.tokens) }.joined(separator: " | ") + " |",
            "|---|" + String(repeating: "---|", count: steps.count),
        ] + rows.map { "| \($0.name) | " + $0.values.joined(separator: " | ") + " |" } + [""]
    }

    private var bounds: [String] {
        if report.findings.isEmpty { return [] }
        return ["## Bounds", "", "| measure | figure | target | |", "|---|---|---|---|"]
            + report.findings.map { finding in
                let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
                return "| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |"
            } + [""]
    }

    private var plot: LinePlot {
        func lines(_ value: (GrowthStep.Cost) -> Double) -> [LinePlot.Line] {
            (steps.last?.costs ?? []).filter { !Self.notPlotted.contains($0.name) }.map { cost in
                LinePlot.Line(
                    name: cost.name,
                    points: steps.compactMap { step in
                        guard let one = steps[0][cost.name], let this = step[cost.name] else { return nil }
                        return (Double(step.tokens), value(this) / value(one))
                    })
            }
        }
        let first = Scale.short(steps[0].tokens)
        return LinePlot(
            title: "What grows with the ledger: over the same with \(first) tokens",
            panels: [
                LinePlot.Panel(
                    title: "Pages",
                    lines: lines(\.pages) + [
                        LinePlot.Line(
                            name: "bytes a token", points: steps.map { (Double($0.tokens), $0.bytes / steps[0].bytes) })
                    ]),
                LinePlot.Panel(
                    title: "Time",
                    lines: lines(\.milliseconds) + [
                        LinePlot.Line(
                            name: "drain, server a result",
                            points: steps.map { (Double($0.tokens), $0.drainMicroseconds / steps[0].drainMicroseconds) }
                        )
                    ]),
            ], label: { Scale.short(Int($0)) })
    }

    /// Sums that say the same as another line.
    private static let notPlotted: Set = ["campaign to one in 1,000, all of it"]

    private static func number(_ value: Double) -> String {
        if value.isNaN { return "" }
        return String(format: value < 0.095 ? "%.4f" : value < 9.95 ? "%.2f" : value < 99.5 ? "%.1f" : "%.0f", value)
    }
}
