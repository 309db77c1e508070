internal import TokenLedger

/// What a monitoring plug-in says about a status. Pure.
///
/// https://www.monitoring-plugins.org/doc/guidelines.html
struct StatusCheck: Equatable {
    /// The raw value is the exit status.
    enum State: Int32 {
        case ok = 0
        case warning = 1
        case critical = 2
        case unknown = 3
    }

    let state: State
    /// The state, what is wrong, and after a `|` every number of the status.
    let line: String

    /// A monitoring system shows a line and no page. `status` shows the other warnings.
    private static let shown = 4

    init(_ report: StatusReport) {
        state = !report.criticalWarnings.isEmpty ? .critical : report.warnings.isEmpty ? .ok : .warning
        let rest = report.warnings.filter { !report.criticalWarnings.contains($0) }
        let warnings = report.criticalWarnings + rest
        var words = warnings.prefix(Self.shown).map(Self.plain)
        if warnings.count > Self.shown {
            words.append("and \(warnings.count - Self.shown) more: see `tokenkeeperd status`")
        }
        line =
            "TOKENKEEPER \(Self.name(state)) - " + (words.isEmpty ? "no warnings" : words.joined(separator: "; "))
            + " | "
            + Self.performance(report.fields)
    }

    /// - Parameter reason: Why there is no status.
    init(unknown reason: String) {
        state = .unknown
        line = "TOKENKEEPER \(Self.name(.unknown)) - \(Self.plain(reason))"
    }

    private static func name(_ state: State) -> String { "\(state)".uppercased() }

    /// The `|` separates the words from the numbers.
    private static func plain(_ text: String) -> String {
        String(HistoryText.plain(text).map { $0 == "|" ? "/" : $0 })
    }

    private static func performance(_ fields: [StatusReport.Field]) -> String {
        fields.compactMap { field in
            guard let value = field.value else { return nil }
            switch field.kind {
            case .number: return "\(field.name)=\(value)"
            case .seconds: return "\(field.name)=\(value)s"
            case .text: return nil
            }
        }.joined(separator: " ")
    }
}
