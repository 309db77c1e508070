internal import TokenLedger

/// The status as lines for people.
enum StatusText {
    /// Warnings first: they are what a person must look at. Then the rates, and the other numbers.
    static func lines(_ report: StatusReport, _ color: Color = .none) -> [String] {
        let known = report.fields.filter { $0.value != nil && !$0.name.hasSuffix("as_of") }
        let shown = known.filter(isRate) + known.filter { !isRate($0) }
        let names = padded(shown.map { field in String(field.name.map { $0 == "_" ? " " : $0 }) })
        let values = padded(shown.map(value))
        let fields = shown.indices.map { index in
            guard let seen = report.asOf(shown[index].name) else { return names[index] + values[index] }
            return names[index] + values[index] + "as of " + seen
        }
        return warnings(report, color) + fields.map { trimmed(HistoryText.plain($0)) }
    }

    private static func isRate(_ field: StatusReport.Field) -> Bool { field.name.hasSuffix("_per_second") }

    /// All of them in one width.
    private static func padded(_ texts: [String]) -> [String] {
        let width = texts.map(\.count).max() ?? 0
        return texts.map { $0 + String(repeating: " ", count: width - $0.count + 2) }
    }

    private static func trimmed(_ text: String) -> String {
        String(text[...(text.lastIndex { $0 != " " } ?? text.startIndex)])
    }

    private static func warnings(_ report: StatusReport, _ color: Color) -> [String] {
        report.warnings.map { warning in
            let isCritical = report.criticalWarnings.contains(warning)
            let word = color.text(isCritical ? "critical" : "warning", isCritical ? .critical : .warning)
            return "\(word): \(HistoryText.plain(warning))"
        }
    }

    private static func value(of field: StatusReport.Field) -> String {
        let value = field.value ?? ""
        guard field.kind == .seconds, let seconds = Int(value) else { return value }
        return span(seconds)
    }

    /// A span of time as people say it, in two units at most: `45 s`, `12 min`, `3 h 5 min`, `2 days 4 h`.
    static func span(_ seconds: Int) -> String {
        switch seconds {
        case ..<120: return "\(seconds) s"
        case ..<7200: return "\(seconds / 60) min"
        case ..<172_800: return "\(seconds / 3600) h \(seconds % 3600 / 60) min"
        default: return "\(seconds / 86_400) days \(seconds % 86_400 / 3600) h"
        }
    }
}
