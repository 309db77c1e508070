internal import TokenLedger
internal import TokenModel

/// Start here: the first page. Pure. What is too long to fit is in `StatusTables.swift`; the parts have pages of their own.
struct StatusPage {
    let overview: Overview?
    let history: OverviewHistory?
    /// Nil if it is not known.
    let usual: UsualShare?
    /// What this daemon itself says, such as that PostgreSQL is away: as in `systemctl status`.
    let daemonStatus: String
    /// What keeps this daemon from working, in words; empty if nothing does.
    let obstacles: [String]
    /// Whether the overview could not be read for so long that it may no longer be true.
    let isOld: Bool
    let now: Instant

    /// - Parameter nonce: Allows the style sheet.
    func html(nonce: String) -> HTML {
        frame.html(
            nonce: nonce,
            """
            \(attention)
            \(overview.map(numbers) ?? "")
            \(overview.map(campaigns) ?? "")
            \(history.map(results) ?? "")
            \(tokens)
            \(history.map(topics) ?? "")
            \(overview.map(attachments) ?? "")
            \(history.map(sweeps) ?? "")
            \(overview.map(daemons) ?? "")
            """)
    }

    var frame: PageFrame { PageFrame(address: .overview, title: title, now: now) }

    /// What this daemon itself knows to be wrong.
    private var own: [String] {
        let old = "PostgreSQL cannot be read: everything below may be out of date; run `tokenkeeperd doctor`"
        return isOld && obstacles.isEmpty ? [old] : obstacles
    }

    private var problems: [String] { own + (overview?.status.warnings ?? []) }

    private var title: String { (problems.isEmpty ? "" : "(\(problems.count)) ") + "tokenkeeperd" }

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
        let critical = own.count + (overview?.status.criticalWarnings.count ?? 0)
        let items = problems.enumerated().map { index, problem -> HTML in
            index < critical
                ? "<li class=\"critical\">\(HTML.message(problem))</li>" : "<li>\(HTML.message(problem))</li>"
        }
        return """
            <section class="\(critical > 0 ? "attention critical" : "attention")"><h2>Needs attention</h2><ul>\(items)</ul>\(seen)</section>
            """
    }

    private func numbers(_ overview: Overview) -> HTML {
        let numbers = StatusNumbers(overview)
        let heading = own.isEmpty ? "Now" : "When the database was last read"
        return "<section><h2>\(heading)</h2><dl>\(numbers.html)</dl></section>"
    }

    private func campaigns(_ overview: Overview) -> HTML {
        if overview.campaigns.isEmpty { return "" }
        let rows = overview.campaigns.map { CampaignRow(campaign: $0, frame: frame).html }
        return "<section><h2>Campaigns</h2>\(rows)</section>"
    }

    private func results(_ history: OverviewHistory) -> HTML {
        let all = history.hours.reduce(0) { $0 + $1.total }
        if all == 0 { return "<section><h2>Results of the last 24 hours</h2><p class=\"muted\">None.</p></section>" }
        let kinds = PageTable(
            ["Status", "Reason", "Results#", "Share#"],
            history.kinds.map { kind in
                [
                    "\(kind.status.map { String($0) } ?? "–")", "\(kind.reason ?? "")",
                    "\(Figures.count(kind.results))",
                    "\(Figures.share(kind.results, of: all))",
                ]
            })
        return """
            <section><h2>Results of the last 24 hours, by hour (UTC)</h2>\(ResultCharts(hours: history.hours, usual: usual).html)
            \(kinds.html)</section>
            """
    }
}

/// The numbers under "Now", each with the time as of which it is true.
struct StatusNumbers {
    private let overview: Overview

    init(_ overview: Overview) { self.overview = overview }

    var html: [HTML] {
        let live = overview.daemons.filter { $0.isLive(at: overview.at) }.count
        return [
            item("results queued", queue("queue_depth", "queue_depth_estimated"), "queue_depth"),
            item("oldest result waits", age("oldest_result_age"), "oldest_result_age"),
            item("results per second", rate("results_per_second"), "results_per_second"),
            item(
                "registrations queued", queue("registration_queue_depth", "registration_queue_estimated"),
                "registration_queue_depth"),
            item("oldest registration waits", age("oldest_registration_age"), "oldest_registration_age"),
            item("registrations per second", rate("registrations_per_second"), "registrations_per_second"),
            item("requests waiting", requests, "requests"),
            item("of them in campaigns", count("campaign_requests"), "campaign_requests"),
            item("oldest due request waits", age("oldest_due_request_age"), "oldest_due_request_age"),
            item("requests per second", rate("requests_per_second"), "requests_per_second"),
            item("requests failed", count("failed_sends"), "failed_sends"),
            item("results held", count("held"), "held"),
            item("results rejected", count("rejected"), "rejected"),
            item("live daemons", Figures.count(Int64(live)), "live_daemons"),
        ]
    }

    private func item(_ name: String, _ value: String, _ column: String) -> HTML {
        let asOf = overview.status.asOf(column).map { Figures.time($0, at: Figures.text(overview.at)) }
        return
            "<div><dt>\(name)</dt><dd>\(value)</dd>\(asOf.map { "<dd class=\"asof\">as of \($0)</dd>" as HTML } ?? "")</div>\n"
    }

    private func text(_ column: String) -> String? { overview.status.fields.first { $0.name == column }?.value }

    private func count(_ column: String) -> String {
        overview[column].map { Figures.count($0) + ($0 == 10_000 ? " or more" : "") } ?? "–"
    }

    private var requests: String {
        guard let all = overview["requests"] else { return "–" }
        return Figures.count(all) + (all - (overview["campaign_requests"] ?? 0) == 10_000 ? " or more" : "")
    }

    private func queue(_ column: String, _ isEstimated: String) -> String {
        overview[column].map { (text(isEstimated) == "true" ? "about " : "") + Figures.count($0) } ?? "–"
    }

    private func age(_ column: String) -> String { overview[column].map { Figures.age(.seconds($0)) } ?? "–" }

    private func rate(_ column: String) -> String { text(column).flatMap { Double($0) }.map(Figures.rate) ?? "–" }
}
