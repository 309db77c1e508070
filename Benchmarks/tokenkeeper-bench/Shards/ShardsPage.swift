import Foundation

/// The page on shards and routers.
struct ShardsPage {
    let figures: ShardFigures
    let report: Report
    let machine: Machine
    let scale: Scale
    /// The load averages when the run began.
    let load: String
    let isQuick: Bool

    private static let name = "scale.md"

    func write(to folder: String) throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        try markdown.write(toFile: "\(folder)/\(Self.name)", atomically: true, encoding: .utf8)
    }

    var markdown: String {
        let day = ISO8601DateFormatter.string(from: .now, timeZone: .gmt, formatOptions: [.withFullDate])
        var lines = [
            "# Shards and routers", "",
            "Written by `make bench ONLY=scale` on \(day)"
                + (isQuick ? ", **with QUICK=1: small sizes, no figures to keep**" : "")
                + (report.isFinished ? "." : ", **which did not finish**."),
            "All shards and the router are on one machine with \(ProcessInfo.processInfo.activeProcessorCount) cores. So the rates are not those of several machines: what counts here is the",
            "processor time, which depends on other work on the machine less than rates do. It is the time of all processes of a PostgreSQL server, in microseconds a row: the",
            "router has a server of its own, and so has each shard. A figure with a range in parentheses is the median of \(scale.rounds) rounds, with the minimum and the",
            "maximum. Ratios are computed round by round. [How far it scales](../explanation/scale.md) uses these figures.",
            "",
        ]
        lines += calls + drain + every + bounds
        lines += ["## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines += [
            "| load averages (1, 5, 15 minutes) | \(load) at the start; \(Machine.load) at the end |",
            "| settings of a shard's server | `\(machine.settings.joined(separator: "`, `"))` |",
            "| the daemon's | `\(MeasuredDaemon.brisk.joined(separator: "`, `"))`, `shards.map` |",
        ]
        lines += ["", "## How", ""] + ShardsMethod(scale: scale).lines
        return lines.joined(separator: "\n") + "\n"
    }

    private static let most = ShardFigures.most

    /// The costs of each call with most shards, in short.
    private var calls: [String] {
        if figures.calls.isEmpty { return [] }
        return [
            "## A call, with \(Self.most) shards", "",
            "| µs of processor time | straight to the shard | through the router: router | shard | both | over straight |",
            "|---|---|---|---|---|---|",
        ]
            + figures.calls.map { call in
                let straight = call.cost(.straight, Self.most, \.allSeconds)
                let (router, shard, both) = (
                    call.cost(.routed, Self.most, \.routerSeconds), call.cost(.routed, Self.most, \.serverSeconds),
                    call.cost(.routed, Self.most, \.allSeconds)
                )
                let over = call.ratio((.routed, Self.most), over: (.straight, Self.most))
                return
                    "| \(call.contest.name), a \(call.unit) | \(straight.text(1)) | \(router.text(1)) | \(shard.text(1)) | \(both.text(1)) | \(over.text(1)) |"
            } + [""]
    }

    /// Results, with each number of shards.
    private var drain: [String] {
        guard let drain = figures.drain else { return [] }
        func queue(_ name: String, _ way: ShardClient.Way, _ count: Int, _ part: KeyPath<Sample, Double>) -> String {
            figures.calls.first { $0.contest.name == name }.map { $0.cost(way, count, part).text() } ?? ""
        }
        func row(_ name: String, _ value: (Int) -> String) -> String {
            "| \(name) | " + ShardFleet.counts.map(value).joined(separator: " | ") + " |"
        }
        let (insert, copy) = ("INSERT of 1,000 results", "COPY of results")
        return [
            "## Results", "",
            "| a result, 2 % 410s | "
                + ShardFleet.counts.map { $0 == 1 ? "1 shard" : "\($0) shards" }.joined(separator: " | ") + " |",
            "|---|" + String(repeating: "---|", count: ShardFleet.counts.count),
            row("queued by COPY straight to the shards: shards, µs") { queue(copy, .straight, $0, \.serverSeconds) },
            row("queued by INSERT of 1,000 through the router: router, µs") {
                queue(insert, .routed, $0, \.routerSeconds)
            },
            row("the same: shards, µs") { queue(insert, .routed, $0, \.serverSeconds) },
            row("drained: shards, µs") { drain.cost(.straight, $0, \.serverSeconds).text() },
            row("drained: daemons, µs") { drain.cost(.straight, $0, \.daemonSeconds).text() },
            row("drained: both, µs") { drain.cost(.straight, $0, \.allSeconds).text() },
            row("the same, when the shards drain one after the other, µs") {
                $0 == 1 ? "" : drain.cost(.straight, $0, \.allSeconds, .inTurn).text()
            },
            row("drained a second, all shards together on this machine: measured") {
                drain.rate(.straight, $0).text(0)
            },
            row("drained a second, each shard on a machine like this one: **computed**") {
                $0 == 1 ? "" : String(format: "%.0f", figures.computedDrain($0))
            },
            "",
            "The last line is a sum and was not measured: there was one machine. Its terms are the rates of the shards, each measured while the others had nothing to drain.",
            "It assumes that senders write straight to the shards, and that the machines share nothing.",
            "",
        ]
    }

    /// All costs.
    private var every: [String] {
        if figures.calls.isEmpty { return [] }
        var lines = [
            "## Every figure", "",
            "| call | way | shards | router, µs | shards, µs | rows a second of one client |",
            "|---|---|---|---|---|---|",
        ]
        for call in figures.calls {
            for way in ShardClient.Way.allCases {
                for count in ShardFleet.counts {
                    let router = way == .straight ? "" : call.cost(way, count, \.routerSeconds).text()
                    lines.append(
                        "| \(call.contest.name) | \(way.rawValue) | \(count) | \(router) | \(call.cost(way, count, \.serverSeconds).text()) | \(call.rate(way, count).text(0)) |"
                    )
                }
            }
        }
        return lines + [""]
    }

    private var bounds: [String] {
        if report.findings.isEmpty && report.failures.isEmpty { return [] }
        return ["## Whether the cost stays flat", "", "| measure | figure | target | |", "|---|---|---|---|"]
            + report.findings.map { finding in
                let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
                return "| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |"
            }
            + report.failures.map { "| \($0.name) | **failed: \($0.error.replacing("\n", with: " "))** | | |" } + [""]
    }
}
