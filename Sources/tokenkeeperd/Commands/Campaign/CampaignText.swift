internal import TokenLedger

/// Campaigns as lines for people.
enum CampaignText {
    /// A campaign as a person, or with `json` a program, reads it; nil if there is none with this number.
    static func of(_ number: Int64, json: Bool, on connection: inout Connection) throws(DatabaseError) -> String? {
        json
            ? try CampaignProgress.json(number, on: &connection)
            : try CampaignProgress.find(number, on: &connection).map(text)
    }

    /// One line, for a list.
    static func line(_ campaign: CampaignProgress) -> String {
        let name = campaign.name.map { " \"\($0)\"" } ?? ""
        let ended = campaign.outcomes.filter { $0.requests > 0 }.map { ", \($0.requests) \($0.name)" }.joined()
        let waiting = campaign.waiting > 0 ? ", \(campaign.waiting) waiting" : ""
        return HistoryText.plain(
            "\(campaign.number)\(name)  \(campaign.createdAt)  \(campaign.topic) (\(campaign.environment))  \(campaign.state): "
                + "\(campaign.addressed) addressed\(waiting)\(ended)")
    }

    /// One line with a bar, for a terminal.
    static func progress(_ campaign: CampaignProgress, width: Int) -> String {
        var line = ProgressLine(
            "campaign \(campaign.number)" + (campaign.name.map { " \"\($0)\"" } ?? ""), items: "requests",
            total: campaign.total, steps: campaign.done, count: campaign.done)
        let end = campaign.expectedEnd.map { ", ends at about \($0)" } ?? ""
        line.waiting = campaign.waitsBecause.map(HistoryText.plain) ?? "\(Int64(campaign.perSecond ?? 0))/s\(end)"
        return line.text(width: width, at: .now)
    }

    static func text(_ campaign: CampaignProgress) -> String {
        let name = campaign.name.map { " \"\($0)\"" } ?? ""
        let more = campaign.isAddressed || campaign.isOver || campaign.state == "cancelled" ? "" : " so far"
        let estimate = more.isEmpty ? "" : campaign.expected.map { ", of about \($0)" } ?? ""
        var lines = [
            "campaign \(campaign.number)\(name) to \(campaign.topic) (\(campaign.environment)) is \(campaign.state)",
            "  audience     \(campaign.audience)",
            "  created      \(campaign.createdAt) by \(campaign.createdBy)",
        ]
        if let at = campaign.scheduledAt { lines.append("  scheduled    \(at)") }
        if let at = campaign.startedAt { lines.append("  started      \(at)") }
        if let at = campaign.endedAt { lines.append("  ended        \(at)") }
        lines.append("  addressed    \(campaign.addressed)\(more)\(estimate)")
        if campaign.waiting > 0 { lines.append("  waiting      \(campaign.waiting)") }
        for outcome in campaign.outcomes where outcome.requests > 0 || outcome.name == "accepted" {
            lines.append("  \(padded(outcome.name)) \(outcome.requests)")
        }
        if let rate = campaign.perSecond, rate > 0, !campaign.isOver {
            let end = campaign.expectedEnd.map { ", so it ends at about \($0)" } ?? ""
            lines.append("  now          \(Int64(rate)) per second\(end)")
        }
        if let reason = campaign.waitsBecause {
            lines.append("  It does not move: \(reason).")
        } else if campaign.state == "running", campaign.perSecond == 0 {
            lines.append("  No request has ended within the last ten seconds: `tokenkeeperd status` may say why.")
        }
        if campaign.state == "ended", campaign.addressed == 0 {
            let reason = campaign.isAddressed ? "no sendable token of the topic was meant" : "its expiration had passed"
            lines.append("  It addressed nobody: \(reason).")
        }
        return lines.map(HistoryText.plain).joined(separator: "\n")
    }

    private static func padded(_ word: String) -> String {
        word + String(repeating: " ", count: max(12 - word.count, 0))
    }
}
