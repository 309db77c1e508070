internal import TokenLedger
internal import TokenModel

/// The findings as lines for people. Pure.
enum DoctorText {
    static func text(_ findings: [Finding], _ color: Color = .none) -> String {
        let grades = findings.map(\.grade.rawValue.count).max() ?? 0
        let subjects = findings.map(\.subject.count).max() ?? 0
        func padded(_ text: String, _ width: Int) -> String {
            text + String(repeating: " ", count: max(width - text.count, 0))
        }
        var lines: [String] = []
        for finding in findings {
            let grade = color.text(padded(finding.grade.rawValue, grades), finding.grade.color)
            lines.append("\(grade)  " + HistoryText.plain("\(padded(finding.subject, subjects))  \(finding.words)"))
            let indent = String(repeating: " ", count: grades + subjects + 6)
            lines += finding.commands.map { HistoryText.plain(indent + $0) }
        }
        let problems = findings.count { $0.grade == .problem }
        let unchecked = findings.count { $0.grade == .notChecked }
        var summary = problems == 0 ? "nothing to fix" : counted(problems, "problem", "problems") + " to fix"
        if unchecked > 0 { summary += "; \(unchecked) not checked" }
        return (lines + ["", summary]).joined(separator: "\n")
    }
}

extension Finding.Grade {
    /// Nil for what needs no person.
    fileprivate var color: Color.Grade? {
        switch self {
        case .passed: .good
        case .note: nil
        case .notChecked: .warning
        case .problem: .critical
        }
    }
}
