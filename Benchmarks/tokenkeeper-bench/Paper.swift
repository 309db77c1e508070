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
                + (isWhole ? "" : ", **only some of the measurements**")
                + (report.isFinished ? "." : ", **which has not come to its end**."),
            "Rates depend on the machine; ratios are taken round by round, between contestants that did the same work in the same",
            "round of the same run, in another order each time: the median of \(scale.rounds) rounds, with the least and the greatest. What was",
            "measured once says so.",
            "",
        ]
        if !report.bars.isEmpty { lines += ["![Results drained a second](\(Self.plotName))", ""] }
        lines += ["| measure | figure | target | |", "|---|---|---|---|"]
        for finding in report.findings {
            let reached = finding.isReached.map { $0 ? "reached" : "**not reached**" } ?? ""
            lines.append("| \(finding.measure) | \(finding.figure) | \(finding.target ?? "") | \(reached) |")
        }
        lines += report.failures.map { "| \($0.name) | **failed: \($0.error.replacing("\n", with: " "))** | | |" }
        if report.findings.contains(where: { $0.isReached == false }) {
            lines += [
                "", "What stands in the way of a target: [where the time goes](../decisions/where-the-time-goes.md).",
            ]
        }
        if !report.rates.isEmpty { lines += rates }
        lines += ["", "## Where", "", "| | |", "|---|---|"]
        lines += machine.lines.map { "| \($0.name) | \($0.value) |" }
        lines.append("| settings | \(Self.code(machine.settings)) |")
        lines.append(
            "| the daemon's, but for freshness, start and rest, which have the defaults | \(Self.code(MeasuredDaemon.brisk)) |"
        )
        lines += ["", "## How", ""] + how
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

    private static func code(_ words: [String]) -> String {
        words.map { "`\($0)`" }.joined(separator: ", ")
    }

    private var how: [String] {
        [
            "- **The cluster** is private, made by `initdb` for the run, durable, and goes away with it. Autovacuum is off, which spares the queues that leave",
            "  dead rows the cost of clearing them away, and leaves the dead entries of their indexes where they are. Drains, peers, sweeps, `register` and",
            "  inserts are each preceded by a CHECKPOINT, and none falls within.",
            "- **The ledger** has so many active tokens of 32 bytes, in three topics, and a tenth more that have been dead for long. Bodies are JSON",
            "  as Apple sends it; each 410 is of another active token, all over the ledger. For drains, peers and sweeps each contestant of a round gets a fresh copy, in",
            "  memory (of the large ledger: slices of its own of one copy); gate, `register` and inserts go on with theirs.",
            "- **The backlog** lies in one past leaf of the queue, where nobody writes any more: the daemon's fastest case, which a daemon that comes back after an",
            "  hour meets. \"The current leaf\" is the other one: it is deleted by ranges of pages, and truncated when its time is over, which is not in the figure.",
            "  The ten million of the memory's measurement are more than is read whole at once, and go by ranges, too. These measurements go on with one ledger: what",
            "  the ones over TLS have to record is recorded already, so their rates say nothing.",
            "- **The floor** is the same durable change by bare SQL in one session of libpq: lock the leaf, one statement that counts, upserts and",
            "  writes the history, TRUNCATE, COMMIT. The **bare bulk upsert** leaves out history and counts. These, the peers and the bare DELETE commit as the daemon does, with",
            "  synchronous_commit off in their transactions: a result that comes back after a crash is recorded again.",
            "- **The drain** is the real daemon as a process, a release build, over the local socket, from the moment it is let go (SIGCONT: it was stopped",
            "  while the backlog was laid before it) until the last result is counted. Nobody reads the queue meanwhile. It has two connections for",
            "  a backlog, and so two of the server's processes, where floor and peers have one: the table of processor time shows what that costs, and the",
            "  rows with drain.second_connection=off what it brings.",
            "- **The peers** record by the floor's own statement on the server, in one session, with no client work to speak of: no result is fetched, parsed or sent. Their batch",
            "  size is that at which each was the fastest here, of \(scale.batches.map(String.init).joined(separator: ", ")), tried once on a quarter of the results. PgQ's rotation and its ticker",
            "  are not charged. pgmq is an emulation: its read and delete, written out as SQL, a transaction each.",
            "- **A wrong ledger disqualifies**: after each round, ledger, history (but for times and numbers) and counts of floor, daemon and peers are compared; a figure of",
            "  one that differs has reached nothing.",
            "- **Freshness** is from the answer to the INSERT of a 410 until `is_sendable` says no, asked every half millisecond. Half load is half of what one",
            "  sender that queues a hundred in a statement and one daemon sustain together.",
            "- **Hostile**: half of the backlog in the current leaf, half in a past one. \"A dump\" is pg_dump again and again, which takes a core, and a",
            "  session that holds a dump's locks throughout. Whether a run slows down as it goes on is looked at in the current leaf alone, where nothing is truncated meanwhile; 0.9 allows for noise.",
            "- **The gate** is asked about tokens from all over the ledger, one in eleven of them dead.",
            "- **Round trips** are of prepared statements by libpq over the local socket, synchronous_commit off on both sides, since a flush would be most of them.",
            "- **MB** are millions of bytes.",
            "",
            "Not claimed: anything about other machines, other versions or a network between; that the peers, with clients or more sessions of their own, would reach",
            "what they reach here; how any of it behaves when the ledger does not fit into memory.",
        ]
    }
}
