internal import TokenLedger
internal import TokenModel

/// The tables of the first page.
extension StatusPage {
    /// The periods of the trends, in hours.
    private static let periods: [(name: String, hours: Int64)] = [("day", 24), ("week", 168), ("month", 744)]

    var tokens: HTML {
        guard let overview else { return "" }
        let rows = Overview.states.indices.map { index -> [HTML] in
            let now = overview.tokens[index]
            return ["\(Overview.states[index])", "\(now.map { Figures.count($0) } ?? "–")"]
                + Self.periods.map { change(of: index, now, $0, overview) }
        }
        let isKnown = overview.tokens.contains { $0 != nil }
        let asOf = Figures.time(overview.status.asOf("tokens_active") ?? "", at: Figures.text(overview.at))
        return """
            <section><h2>Tokens by state</h2>
            \(PageTable(["State", "Now#"] + Self.periods.map { "Last \($0.name)" }, rows).html)
            <p class="muted">\(isKnown ? "As of \(asOf). \(noHistory)" : "Not known while a table is locked.")</p></section>
            """
    }

    /// When the counts by hour began; empty if they are older than the periods.
    private var noHistory: String {
        guard let overview, let history else { return "" }
        guard let first = history.tokens.compactMap({ $0.first?.at }).min() else { return "No history yet." }
        let longest = overview.at.advanced(byMicroseconds: -742 * 3_600_000_000)
        return first > longest ? "No history before \(Figures.text(first))." : ""
    }

    /// How much the number of tokens has changed within a period, and how it went.
    private func change(
        of index: Int, _ now: Int64?, _ period: (name: String, hours: Int64), _ overview: Overview
    ) -> HTML {
        let since = overview.at.advanced(byMicroseconds: -period.hours * 3_600_000_000)
        let samples = history?.tokens[index].filter { $0.at >= since } ?? []
        guard let now, let first = samples.first else { return "<span class=\"muted\">no history yet</span>" }
        let trend = Trend(
            points: samples + [(overview.at, now)], from: since, to: overview.at,
            name: "\(Overview.states[index]) tokens within the last \(period.name)")
        // Less than a tenth of the period would be a dot.
        let isVisible = overview.at.microseconds - first.at.microseconds > period.hours * 360_000_000
        // An hour may be missing at the beginning.
        let isWhole = first.at < since.advanced(byMicroseconds: 7_200_000_000)
        let from = Figures.time(Figures.text(first.at), at: Figures.text(overview.at))
        let short: HTML = isWhole ? "" : " <span class=\"muted\">since \(from.dropLast(3).description)</span>"
        return "\(Figures.change(now - first.value))\(short)\(HTML.unless(!isVisible, trend.svg))"
    }

    func topics(_ history: OverviewHistory) -> HTML {
        if history.topics.isEmpty { return "" }
        let rows = history.topics.map { topic -> [HTML] in
            [
                frame.link(.topic(topic.topic, environment: topic.environment), topic.topic), "\(topic.environment)",
                "\(Figures.count(topic.active))", "\(Figures.count(topic.suppressed))",
                "\(Figures.count(topic.newlyStale))",
                "\(Figures.share(topic.newlyStale, of: topic.activeBefore))",
            ]
        }
        let left = history.topicCount - Int64(history.topics.count)
        let more: HTML =
            left > 0
            ? "<p class=\"muted\">And \(Figures.count(left)) with fewer tokens: \(frame.link(.find, "find one")).</p>"
            : ""
        return """
            <section><h2>Topics</h2>
            \(PageTable(["Topic", "Environment", "Active#", "Suppressed#", "New 410s, 24 h#", "Share#"], rows).html)\(more)</section>
            """
    }

    func sweeps(_ history: OverviewHistory) -> HTML {
        if history.sweeps.isEmpty { return "" }
        let rows = history.sweeps.map { sweep -> [HTML] in
            [
                "\(sweep.number)", "\(sweep.trigger)\(sweep.isDryRun ? " (dry run)" : "")",
                "\(sweep.outcome)\(sweep.message.map { ": \($0)" } ?? "")",
                "\((sweep.finishedAt ?? sweep.startedAt).map(Figures.text) ?? "–")", "\(Figures.count(sweep.pruned))",
                "\(Figures.count(sweep.refused))",
            ]
        }
        return """
            <section><h2>Sweeps</h2>
            \(PageTable(["Run", "Trigger", "Outcome", "When", "Pruned#", "Refused#"], rows).html)</section>
            """
    }

    func attachments(_ overview: Overview) -> HTML {
        if overview.attachments.isEmpty { return "" }
        let rows = overview.attachments.map { table -> [HTML] in
            [
                "\(table.table)", "\(table.fault ?? "works")", "\(Figures.count(table.failures))",
                "\(Figures.text(table.attachedAt))",
            ]
        }
        return """
            <section><h2>Attached tables</h2>\(PageTable(["Table", "State", "Failed changes#", "Attached"], rows).html)</section>
            """
    }

    func daemons(_ overview: Overview) -> HTML {
        let rows = overview.daemons.map { daemon -> [HTML] in
            let state =
                daemon.isLive(at: overview.at)
                ? (daemon.sends ? "drains and sends" : "drains")
                : daemon.stoppedAt != nil ? "stopped" : "silent since \(Figures.text(daemon.heartbeatAt))"
            return ["\(daemon.name)", "\(daemon.version)", "\(state)", "\(Figures.text(daemon.startedAt))"]
        }
        return "<section><h2>Daemons</h2>\(PageTable(["Daemon", "Version", "State", "Started"], rows).html)</section>"
    }
}
