internal import ArgumentParser
internal import TokenLedger

struct ShowStatus: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "status",
        abstract: "Print the view tokenkeeper.status.")

    @OptionGroup var options: ConfigurationOptions

    @Flag(help: "Print one JSON object, for programs. Ages are in seconds.")
    var json = false

    func run() throws {
        Signals.unblock()
        try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
            let report = try StatusReport(on: &connection)
            print(json ? report.json : Self.text(report))
        }
    }

    static func text(_ report: StatusReport) -> String {
        let width = report.fields.map(\.name.count).max() ?? 0
        var lines = report.fields.map { name, value in
            let label = name.map { $0 == "_" ? " " : $0 }
            return String(label) + String(repeating: " ", count: width - name.count + 2) + value
                + (name.hasSuffix("_age") ? " s" : "")
        }
        lines += report.warnings.map { "warning: \($0)" }
        return lines.map(HistoryText.plain).joined(separator: "\n")
    }
}
