import Foundation

/// The report as people read it: a page of Markdown, and a plot.
struct Paper {
    let report: Report
    let machine: Machine
    let scale: Scale
    let isQuick: Bool
    /// False when only some of the measurements were asked for.
    let isWhole: Bool

    private static let plotName = "drain.svg"

    func write(to folder: String) throws {
        try FileManager.default.createDirectory(atPath: folder, withIntermediateDirectories: true)
        try markdown.write(toFile: "\(folder)/README.md", atomically: true, encoding: .utf8)
        if !report.bars.isEmpty {
            let plot = BarPlot(
                title: "Results drained a second, by share of 410s (each share to its own scale)", groups: report.bars)
            try plot.svg.write(toFile: "\(folder)/\(Self.plotName)", atomically: true, encoding: .utf8)
        }
    }

    var markdown: String {
        let day = ISO8601DateFormatter.string(from: .now, timeZone: .gmt, formatOptions: [.withFullDate])
        var lines = ["# Benchmarks", ""]
        lines += [
            "Written by `make bench` on \(day)"
                + (isQuick ? ", **with QUICK=1: small sizes, no result to keep**" : "")
                + (isWhole ? "" : ", **only some of the measurements**") + ".",
            "Rates depend on the machine; ratios are taken round by round, between contestants that did the same work in the same",
            "round of the same run, in an order that turns: the median of \(scale.rounds) rounds, with the least and the greatest.",
            "",
        ]
        if !report.bars.isEmpty { lines += ["![Results drained a second](\(Self.plotName))", ""] }
        lines += ["| measure | figure | target | |", "|---|---|---|---|"]
        for finding in report.findings {
            let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
            lines.append("| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |")
        }
        lines += report.failures.map { "| \($0) | **the measurement failed** | | |" }
        if !report.rates.isEmpty { lines += rates }
        lines += ["", "## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines.append("| settings | \(machine.settings.map { "`\($0)`" }.joined(separator: ", ")) |")
        lines += ["", "## How", ""] + Self.how
        return lines.joined(separator: "\n") + "\n"
    }

    private var rates: [String] {
        var lines = [
            "", "## Rates and processor time", "",
            "Rows are results, tokens or calls, as the work says. Processor time is that of all of the server's processes, and of the daemons.",
            "", "| work | contestant | rows a second | server, µs a row | daemon, µs a row |", "|---|---|---|---|---|",
        ]
        for rate in report.rates {
            let daemon = rate.daemonMicroseconds.median > 0 ? rate.daemonMicroseconds.text() : ""
            lines.append(
                "| \(rate.work) | \(rate.contestant) | \(rate.rowsPerSecond.text(0)) | \(rate.serverMicroseconds.text()) | \(daemon) |"
            )
        }
        return lines
    }

    private static let how = [
        "- **The cluster** is private, made by `initdb` for the run, durable, and goes away with it. A CHECKPOINT comes before each timed",
        "  section and none within; autovacuum is off, which spares the queues that leave dead rows the cost of clearing them away. Each",
        "  contestant of a round gets a fresh copy of the same ledger, in memory (of the large one: slices of its own of one copy).",
        "- **The ledger** has so many active tokens of 32 bytes, in three topics, and a tenth more that have been dead for long. Bodies are JSON",
        "  as Apple sends it; each 410 is of another active token, all over the ledger.",
        "- **The floor** is the same durable change by bare SQL in one session of libpq: lock the leaf, one statement that counts, upserts and",
        "  writes the history, TRUNCATE, COMMIT. The **bare bulk upsert** leaves out history and counts.",
        "- **The drain** is the real daemon as a process, a release build, over the local socket, from the moment it is let go (SIGCONT: it was stopped",
        "  while the backlog was laid before it) until the last result is counted. Nobody reads the queue meanwhile. It has two connections for",
        "  a backlog, and so two of the server's processes, where floor and peers have one: the table of processor time shows what that costs, and",
        "  \"one connection\" what it brings.",
        "- **The peers** record by the floor's own statement on the server, a batch a transaction, with synchronous_commit off as the daemon. They have no",
        "  client work at all: no row is fetched, parsed or sent. Their batch size is that at which each was the fastest here (with QUICK=1: 10,000). PgQ's rotation and its ticker",
        "  are not charged. pgmq is an emulation: its read and delete, written out as SQL.",
        "- **A wrong ledger disqualifies**: after each round, ledger, history (but for times and numbers) and counts of all contestants are compared.",
        "- **Freshness** is from the answer to the INSERT of a 410 until `is_sendable` says no, asked every half millisecond. Half load is half of what one",
        "  sender that queues hundreds in a statement and one daemon sustain together.",
        "- **Hostile**: half of the backlog in the current leaf, half in a past one. \"A dump\" is pg_dump again and again, which takes more than a core, and a",
        "  session that holds a dump's locks throughout. That a run does not slow down is shown by its last quarter over its first, each over the same quarter undisturbed; 0.9 allows for noise.",
        "- **Round trips** are of prepared statements by libpq over the local socket, synchronous_commit off on both sides, since a flush would be most of them.",
        "",
        "Not claimed: anything about other machines, other versions or a network between; that the peers, with clients of their own, would reach",
        "what they reach here; how any of it behaves when the ledger does not fit into memory.",
    ]
}
