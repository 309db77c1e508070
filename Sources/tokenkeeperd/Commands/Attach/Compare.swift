internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Compares an attached table with the ledger.
struct Compare: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Compare an attached table with the ledger, in both directions, and change nothing.",
        discussion: """
            Reads the table and the ledger in batches. What is still queued is no difference. Exits with 1 if there are differences. For the \
            table's owner and for members of tokenkeeper_operator.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    @Flag(help: "Print one JSON array, for programs.")
    var json = false

    func run() throws {
        let run = ComparisonRun(table: table, isRepaired: false, json: json)
        if try run.perform(options.load()) > 0 { throw ExitCode(ExitStatus.somethingToFix.rawValue) }
    }
}

/// Repairs the differences.
struct Reconcile: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Say what differs between an attached table and the ledger; with --apply, repair the ledger.",
        discussion: """
            The table is never changed. With --apply, what is missing is queued as registrations and logouts, and a daemon records it; \
            logouts pass the mass-failure guard, and can be undone with `tokenkeeperd reinstate`. The daemon does the same on its own, see \
            attachments.reconcile_every. For the table's owner and for members of tokenkeeper_operator.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var table: TableOption

    @Flag(help: "Queue what repairs the differences.")
    var apply = false

    @Flag(help: "Print one JSON array, for programs.")
    var json = false

    func run() throws {
        _ = try ComparisonRun(table: table, isRepaired: apply, json: json).perform(options.load())
    }
}

/// The common part of both commands.
struct ComparisonRun {
    let table: TableOption
    let isRepaired: Bool
    let json: Bool

    /// Planning a batch takes as long as some thousand rows.
    private static let batchRows = 5000

    /// - Returns: The number of differences.
    func perform(_ configuration: Configuration) throws -> Int64 {
        let stop = ShutdownRequest.bySignal()
        var differences: Int64 = 0
        try table.run(configuration) { name, connection in
            var comparison = try Comparison(of: name, isRepaired: isRepaired, on: &connection)
            var bar = ProgressBar(name, items: "rows and tokens", total: nil)
            defer { bar.finish() }
            var isFinished = false
            while !isFinished {
                if stop.request.isAsked { throw ExitCode(ExitStatus.failed.rawValue) }
                let before = comparison.compared
                isFinished = try comparison.next(Self.batchRows, on: &connection)
                bar.advance(by: comparison.compared - before)
            }
            bar.clear()
            let findings = try comparison.findings(on: &connection)
            differences = findings.filter(\.isDifference).reduce(0) { $0 + $1.number }
            print(json ? try comparison.json(on: &connection) : text(findings, differences, of: comparison))
        }
        withExtendedLifetime(stop) {}
        return differences
    }

    private func text(_ findings: [Comparison.Finding], _ differences: Int64, of comparison: Comparison) -> String {
        var lines = [
            differences == 0
                ? "\(comparison.table) and the ledger agree"
                : "\(comparison.table) and the ledger differ in \(counted(differences, "row or token", "rows and tokens"))"
        ]
        lines += findings.filter { $0.number > 0 }.map { finding in
            let samples = finding.samples.isEmpty ? "" : "; such as \(finding.samples.joined(separator: ", "))"
            return "  \(finding.isDifference ? "!" : " ") \(finding.kind): \(finding.number)\(samples)"
        }
        if let repairs = comparison.repairs, differences > 0 {
            lines.append("what repairs them is queued (source \(repairs)), and will be recorded by a daemon")
        } else if differences > 0 {
            lines.append("to repair them: tokenkeeperd reconcile \(ShellWord.quoted(comparison.table)) --apply")
        }
        return lines.map(HistoryText.plain).joined(separator: "\n")
    }
}
