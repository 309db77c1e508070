internal import TokenLedger
internal import TokenModel

/// Start here: the status page, one HTML document without scripts and without references. Pure.
struct StatusPage {
    let overview: Overview?
    let history: OverviewHistory?
    /// What this daemon itself says, such as that PostgreSQL is away: as in `systemctl status`.
    let daemonStatus: String
    /// What keeps this daemon from working, in words; empty if nothing does.
    let obstacles: [String]
    /// Whether the overview could not be read for so long that it may no longer be true.
    let isOld: Bool
    let now: Instant

    /// - Parameter nonce: Allows the style sheet; see `headers`.
    func html(nonce: String) -> HTML {
        """
        <!doctype html>
        <html lang="en"><head><meta charset="utf-8"><title>\(title)</title>
        <meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="\(Self.period)">
        <style nonce="\(nonce)">\(HTML(stringLiteral: PageStyle.text))</style></head><body>
        <header><h1>tokenkeeperd</h1><span class="muted">\(Figures.text(now)); refreshes every \(Self.period) s</span></header>
        \(attention)
        \(overview.map(numbers) ?? "")
        \(overview.map(campaigns) ?? "")
        \(history.map(results) ?? "")
        \(tokens)
        \(history.map(topics) ?? "")
        \(overview.map(attachments) ?? "")
        \(history.map(sweeps) ?? "")
        \(overview.map(daemons) ?? "")
        </body></html>

        """
    }

    /// Nothing but the page's own style is loaded, and no other site can frame the page.
    static func headers(nonce: String) -> [(name: String, value: String)] {
        [
            (
                "content-security-policy",
                "default-src 'none'; style-src 'nonce-\(nonce)'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            ("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer"), ("cache-control", "no-store"),
        ]
    }

    /// What this daemon itself knows to be wrong.
    private var own: [String] {
        let old = "PostgreSQL cannot be read: everything below may be out of date; run `tokenkeeperd doctor`"
        return isOld && obstacles.isEmpty ? [old] : obstacles
    }

    /// What somebody has to get up for.
    private var critical: [String] { own + (overview.map { $0.warnings.prefix($0.critical) } ?? []) }

    private var problems: [String] { own + (overview?.warnings ?? []) }

    private var title: String { (problems.isEmpty ? "" : "(\(problems.count)) ") + "tokenkeeperd" }

    /// In how many seconds the page is loaded again.
    private static let period = 15

    /// What a person should look at; the first thing on the page.
    private var attention: HTML {
        let seen: HTML =
            overview.map { overview in
                "<p class=\"muted\">The database was last read at \(Figures.text(overview.at)).</p>"
            } ?? "<p class=\"muted\">The database has not been read yet. This daemon says: \(daemonStatus)</p>"
        if problems.isEmpty {
            if overview == nil { return "<section><h2>Starting</h2>\(seen)</section>" }
            return "<section class=\"fine\"><h2>Nothing needs attention</h2>\(seen)</section>"
        }
        let critical = critical.count
        let items = problems.enumerated().map { index, problem -> HTML in
            index < critical
                ? "<li class=\"critical\">\(HTML.message(problem))</li>" : "<li>\(HTML.message(problem))</li>"
        }
        return """
            <section class="\(critical > 0 ? "attention critical" : "attention")"><h2>Needs attention</h2><ul>\(items)</ul>\(seen)</section>
            """
    }

    private func numbers(_ overview: Overview) -> HTML {
        func count(_ value: Int64?) -> String {
            value.map { Figures.count($0) + ($0 == 10_000 ? " or more" : "") } ?? "–"
        }
        let live = overview.daemons.filter { $0.isLive(at: overview.at) }.count
        let shown: [(String, String)] = [
            (
                "results queued",
                overview.queueDepth.map { (overview.isQueueEstimated ? "about " : "") + Figures.count($0) } ?? "–"
            ),
            ("oldest of them waits", overview.oldestResultAge.map(Figures.age) ?? "–"),
            ("results held", count(overview.held)),
            ("results rejected", count(overview.rejected)),
            ("requests in the outbox", count(overview.requests)),
            ("requests failed", count(overview.failedSends)),
            ("live daemons", Figures.count(Int64(live))),
        ]
        let heading = own.isEmpty ? "Now" : "When the database was last read"
        return
            "<section><h2>\(heading)</h2><dl>\(shown.map { "<div><dt>\($0)</dt><dd>\($1)</dd></div>" as HTML })</dl></section>"
    }

    /// Without the audience, which may name a person.
    private func campaigns(_ overview: Overview) -> HTML {
        if overview.campaigns.isEmpty { return "" }
        let rows = overview.campaigns.map { campaign -> HTML in
            let state = campaign.state + (campaign.waitsBecause.map { ": \($0)" } ?? "")
            let counts = [campaign.addressed, campaign.waiting] + campaign.ended
            let rate = campaign.perSecond.map { Figures.count(Int64($0)) } ?? "–"
            return """
                <tr><td>\(campaign.number)</td><td class="name">\(campaign.name ?? "")</td><td class="name">\(campaign.topic)</td>\
                <td>\(campaign.environment)</td><td class="name">\(state)</td>\
                \(counts.map { "<td class=\"number\">\(Figures.count($0))</td>" as HTML })<td class="number">\(rate)</td></tr>
                """
        }
        let outcomes = ["addressed", "waiting"] + CampaignProgress.outcomeNames + ["per second"]
        return """
            <section><h2>Campaigns</h2><div class="scroll"><table>
            <tr><th>Number</th><th>Name</th><th>Topic</th><th>Environment</th><th>State</th>\
            \(outcomes.map { "<th class=\"number\">\($0)</th>" as HTML })</tr>
            \(rows)</table></div></section>
            """
    }

    private func results(_ history: OverviewHistory) -> HTML {
        let all = history.hours.reduce(0) { $0 + $1.accepted + $1.stale + $1.other }
        if all == 0 { return "<section><h2>Results of the last 24 hours</h2><p class=\"muted\">None.</p></section>" }
        let columns = ResultColumns(
            hours: history.hours.map {
                .init(name: Figures.hour($0.at), accepted: $0.accepted, stale: $0.stale, other: $0.other)
            })
        let rows = history.kinds.map { kind -> HTML in
            """
            <tr><td>\(kind.status.map { String($0) } ?? "–")</td><td class="name">\(kind.reason ?? "")</td>\
            <td class="number">\(Figures.count(kind.results))</td><td class="number">\(Figures.share(kind.results, of: all))</td></tr>
            """
        }
        return """
            <section><h2>Results of the last 24 hours, by hour (UTC) <span class="legend"><span class="key s200"></span>200\
            <span class="key s410"></span>410<span class="key rest"></span>other</span></h2>\(columns.svg)
            <div class="scroll"><table><tr><th>Status</th><th>Reason</th><th class="number">Results</th><th class="number">Share</th></tr>
            \(rows)</table></div></section>
            """
    }

    /// The periods of the trends, in hours.
    private static let periods: [(name: String, hours: Int64)] = [("day", 24), ("week", 168), ("month", 744)]

    private var tokens: HTML {
        guard let overview else { return "" }
        let rows = Overview.states.indices.map { index -> HTML in
            let name = Overview.states[index]
            let now = overview.tokens[index]
            let samples = history?.tokens[index] ?? []
            let trends = Self.periods.map { period -> HTML in
                let since = overview.at.advanced(byMicroseconds: -period.hours * 3_600_000_000)
                let points = samples.filter { $0.at >= since } + (now.map { [(overview.at, $0)] } ?? [])
                guard points.count > 1, let first = points.first else { return "<td>–</td>" }
                let label = "\(name) tokens within the last \(period.name)"
                let trend = Trend(points: points, from: since, to: overview.at, name: label)
                return "<td>\(now.map { Figures.change($0 - first.value) } ?? "–")\(trend.svg)</td>"
            }
            return
                "<tr><td>\(name)</td><td class=\"number\">\(now.map { Figures.count($0) } ?? "–")</td>\(trends)</tr>"
        }
        let isKnown = overview.tokens.contains { $0 != nil }
        return """
            <section><h2>Tokens by state</h2><div class="scroll"><table>
            <tr><th>State</th><th class="number">Now</th>\(Self.periods.map { "<th>Last \($0.name)</th>" as HTML })</tr>
            \(rows)</table></div>\(isKnown ? "" : "<p class=\"muted\">Not known while a table is locked.</p>" as HTML)</section>
            """
    }

    private func topics(_ history: OverviewHistory) -> HTML {
        if history.topics.isEmpty { return "" }
        let rows = history.topics.map { topic -> HTML in
            """
            <tr><td class="name">\(topic.topic)</td><td>\(topic.environment)</td><td class="number">\(Figures.count(topic.active))</td>\
            <td class="number">\(Figures.count(topic.suppressed))</td><td class="number">\(Figures.count(topic.newlyStale))</td>\
            <td class="number">\(Figures.share(topic.newlyStale, of: topic.activeBefore))</td></tr>
            """
        }
        let left = history.topicCount - Int64(history.topics.count)
        let more: HTML = left > 0 ? "<p class=\"muted\">And \(Figures.count(left)) more.</p>" : ""
        return """
            <section><h2>Topics</h2><div class="scroll"><table>
            <tr><th>Topic</th><th>Environment</th><th class="number">Active</th><th class="number">Suppressed</th>\
            <th class="number">New 410s, 24 h</th><th class="number">Share</th></tr>
            \(rows)</table></div>\(more)</section>
            """
    }

    private func sweeps(_ history: OverviewHistory) -> HTML {
        if history.sweeps.isEmpty { return "" }
        let rows = history.sweeps.map { sweep -> HTML in
            """
            <tr><td>\(sweep.number)</td><td>\(sweep.trigger)\(sweep.isDryRun ? " (dry run)" : "")</td>\
            <td class="name">\(sweep.outcome)\(sweep.message.map { ": \($0)" } ?? "")</td>\
            <td>\((sweep.finishedAt ?? sweep.startedAt).map(Figures.text) ?? "–")</td>\
            <td class="number">\(Figures.count(sweep.pruned))</td><td class="number">\(Figures.count(sweep.refused))</td></tr>
            """
        }
        return """
            <section><h2>Sweeps</h2><div class="scroll"><table>
            <tr><th>Run</th><th>Trigger</th><th>Outcome</th><th>When</th><th class="number">Pruned</th><th class="number">Refused</th></tr>
            \(rows)</table></div></section>
            """
    }

    private func attachments(_ overview: Overview) -> HTML {
        if overview.attachments.isEmpty { return "" }
        let rows = overview.attachments.map { table -> HTML in
            """
            <tr><td class="name">\(table.table)</td><td class="name">\(table.fault ?? "works")</td>\
            <td class="number">\(Figures.count(table.failures))</td><td>\(Figures.text(table.attachedAt))</td></tr>
            """
        }
        return """
            <section><h2>Attached tables</h2><div class="scroll"><table>
            <tr><th>Table</th><th>State</th><th class="number">Failed changes</th><th>Attached</th></tr>
            \(rows)</table></div></section>
            """
    }

    private func daemons(_ overview: Overview) -> HTML {
        let rows = overview.daemons.map { daemon -> HTML in
            let state =
                daemon.isLive(at: overview.at)
                ? (daemon.sends ? "drains and sends" : "drains")
                : daemon.stoppedAt != nil ? "stopped" : "silent since \(Figures.text(daemon.heartbeatAt))"
            return """
                <tr><td class="name">\(daemon.name)</td><td>\(daemon.version)</td><td>\(state)</td><td>\(Figures.text(daemon.startedAt))</td></tr>
                """
        }
        return """
            <section><h2>Daemons</h2><div class="scroll"><table>
            <tr><th>Daemon</th><th>Version</th><th>State</th><th>Started</th></tr>
            \(rows)</table></div></section>
            """
    }
}
