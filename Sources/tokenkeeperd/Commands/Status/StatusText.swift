internal import TokenLedger

/// The status as lines for people.
enum StatusText {
    /// Warnings first: they are what a person must look at.
    static func lines(_ report: StatusReport) -> [String] {
        let shown = report.fields.filter { $0.value != nil }
        let width = shown.map(\.name.count).max() ?? 0
        let fields = shown.map { field in
            let label = String(field.name.map { $0 == "_" ? " " : $0 })
            return label + String(repeating: " ", count: width - label.count + 2) + value(of: field)
        }
        return (warnings(report) + fields).map(HistoryText.plain)
    }

    private static func warnings(_ report: StatusReport) -> [String] {
        report.warnings.map { (report.criticalWarnings.contains($0) ? "critical: " : "warning: ") + $0 }
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
