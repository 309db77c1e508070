internal import TokenLedger

/// A campaign as a row: its state first, then how far it is. Without the audience, which may name a person.
struct CampaignRow {
    let campaign: CampaignProgress
    let frame: PageFrame

    var html: HTML {
        """
        <div class="campaign"><p><span class="state \(campaign.state)">\(campaign.state)</span> \
        \(frame.link(.campaign(campaign.number), "\(campaign.number)\(campaign.name.map { " " + $0 } ?? "")")) \
        <span class="muted">\(campaign.topic) (\(campaign.environment))</span></p>
        \(progress)</div>
        """
    }

    /// The bar, and the same in words.
    var progress: HTML {
        let outcomes = campaign.outcomes.filter { $0.requests > 0 }.map { "\(Figures.count($0.requests)) \($0.name)" }
        let bar = ShareBar(
            parts: zip(Self.classes, campaign.ended).map { (name: $0, size: $1) }, total: campaign.total ?? 0,
            label: words[0])
        return """
            \(bar.svg)<p class="figures">\(words.map { "<span>\($0)</span> " as HTML })</p>\
            \(HTML.unless(outcomes.isEmpty, "<p class=\"figures muted\">\(outcomes.map { "<span>\($0)</span> " as HTML })</p>"))\
            \(campaign.waitsBecause.map { "<p>\(HTML.message($0))</p>" as HTML } ?? "")
            """
    }

    /// In the style sheet, in the order of the outcomes.
    private static let classes = ["s200", "s410", "rest", "rest", "high", "rest", "rest"]

    private var words: [String] {
        let done =
            campaign.total.map { total in
                let isEstimate = !campaign.isAddressed && !campaign.isOver && campaign.state != "cancelled"
                return "\(total > 0 ? campaign.done * 100 / total : campaign.isOver ? 100 : 0) % of "
                    + (isEstimate ? "about " : "") + Figures.count(total)
            } ?? "\(Figures.count(campaign.done)) done"
        let rate =
            campaign.isOver || campaign.waitsBecause != nil
            ? nil : campaign.perSecond.map { "\(Figures.rate($0)) per second" }
        let end =
            campaign.endedAt.map { "ended at \($0)" } ?? campaign.expectedEnd.map { "ends at about \($0)" }
        return [done, rate, end].compactMap(\.self)
    }
}

/// The page of a campaign.
struct CampaignPage {
    let campaign: CampaignProgress
    let failures: [(error: String, requests: Int64)]
    let frame: PageFrame

    func html(nonce: String) -> HTML {
        let facts: [(String, String?)] = [
            ("topic", "\(campaign.topic) (\(campaign.environment))"), ("audience", audience),
            ("created", "\(campaign.createdAt) by \(campaign.createdBy)"), ("scheduled", campaign.scheduledAt),
            ("started", campaign.startedAt), ("ended", campaign.endedAt),
            ("addressed", Figures.count(campaign.addressed) + (campaign.isAddressed ? "" : " so far")),
            ("waiting", Figures.count(campaign.waiting)),
        ]
        let rows = facts.compactMap { name, value in value.map { ["\(name)", "\($0)"] as [HTML] } }
        let outcomes = campaign.outcomes.map { outcome -> [HTML] in
            [
                "\(outcome.name)", "\(Figures.count(outcome.requests))",
                "\(Figures.share(outcome.requests, of: campaign.addressed))",
            ]
        }
        return frame.html(
            nonce: nonce,
            """
            <section><h2><span class="state \(campaign.state)">\(campaign.state)</span> Campaign \(campaign.number)\(campaign.name.map { " " + $0 } ?? "")</h2>
            \(CampaignRow(campaign: campaign, frame: frame).progress)</section>
            <section><h2>What became of its requests</h2>\(PageTable(["Outcome", "Requests#", "Share#"], outcomes).html)</section>
            \(why)<section><h2>About it</h2>\(PageTable(["", "Value"], rows).html)</section>
            """)
    }

    /// Not the name of a device or a user, which says nothing about the campaign.
    private var audience: String {
        let kind = campaign.audience.prefix { $0 != ":" }
        return ["device", "user"].contains(kind) ? "one \(kind)" : campaign.audience
    }

    private var why: HTML {
        if failures.isEmpty { return "" }
        let rows = failures.map { ["\($0.error)", "\(Figures.count($0.requests))"] as [HTML] }
        return "<section><h2>Why requests failed</h2>\(PageTable(["Error", "Requests#"], rows).html)</section>\n"
    }
}
