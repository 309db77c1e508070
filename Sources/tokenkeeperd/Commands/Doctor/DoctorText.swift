internal import TokenLedger
internal import TokenModel

/// The findings as lines for people. Pure.
enum DoctorText {
    static func text(_ findings: [Finding]) -> String {
        let grades = findings.map(\.grade.rawValue.count).max() ?? 0
        let subjects = findings.map(\.subject.count).max() ?? 0
        func padded(_ text: String, _ width: Int) -> String {
            text + String(repeating: " ", count: max(width - text.count, 0))
        }
        var lines: [String] = []
        for finding in findings {
            lines.append(
                "\(padded(finding.grade.rawValue, grades))  \(padded(finding.subject, subjects))  \(finding.words)")
            let indent = String(repeating: " ", count: grades + subjects + 6)
            lines += finding.commands.map { indent + $0 }
        }
        let problems = findings.count { $0.grade == .problem }
        let unchecked = findings.count { $0.grade == .notChecked }
        var summary = problems == 0 ? "nothing to fix" : counted(problems, "problem", "problems") + " to fix"
        if unchecked > 0 { summary += "; \(unchecked) not checked" }
        return (lines.map(HistoryText.plain) + ["", summary]).joined(separator: "\n")
    }
}
