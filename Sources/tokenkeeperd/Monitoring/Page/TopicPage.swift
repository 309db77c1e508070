internal import TokenLedger
internal import TokenModel

/// The page of a topic.
struct TopicPage {
    let detail: TopicDetail
    let frame: PageFrame

    func html(nonce: String) -> HTML {
        frame.html(
            nonce: nonce,
            """
            <section class="\(problems.isEmpty ? "fine" : "attention")"><h2>\(detail.topic) <span class="muted">\(detail.environment)</span></h2>
            <ul class="plain">\((problems + facts).map { "<li>\($0)</li>" as HTML })</ul></section>
            <section><h2>Tokens by state</h2>\(tokens.html)</section>
            <section><h2>Results of the last 24 hours, by hour (UTC)</h2>\(ResultCharts(hours: detail.hours, usual: detail.usual).html)</section>
            <section><h2>Tokens that newly turned stale</h2>\(stale.html)</section>
            <section><h2>Tokens that die and return again and again</h2>\(returning)</section>
            """)
    }

    private var problems: [HTML] {
        var problems: [HTML] = []
        if let pause = detail.pause {
            problems.append("sending is paused since \(Figures.text(pause.since)): \(pause.reason)")
        }
        for tripped in detail.guards where tripped.hasTripped {
            problems.append(
                "the mass-failure guard has tripped (\(tripped.cause)); see <code>tokenkeeperd held list</code>")
        }
        if detail.stale.contains(where: \.isWave) { problems.append("far more tokens than usual turn stale") }
        if let name = detail.movedTo { problems.append("it has moved to the database \(name)") }
        return problems
    }

    private var facts: [HTML] {
        [
            detail.isObserved ? "the gate only observes" : "the gate enforces",
            "known since \(Figures.text(detail.firstSeen))",
        ]
            + detail.policy.filter { $0.name != "gate" }.map { "\($0.name) is \($0.value)" as HTML }
    }

    private var tokens: PageTable {
        let all = detail.tokens.reduce(0, +)
        return PageTable(
            ["State", "Tokens#", "Share#"],
            zip(Overview.states, detail.tokens).map { state, tokens in
                ["\(state)", "\(Figures.count(tokens))", "\(Figures.share(tokens, of: all))"]
            })
    }

    private var stale: PageTable {
        PageTable(
            ["Within", "Tokens#", "Share of the active ones#", "At most in the two weeks before#"],
            detail.stale.map { stale in
                [
                    "\(stale.period == "hour" ? "an hour" : "a day")", "\(Figures.count(stale.tokens))",
                    "\(stale.share.map(Figures.percent) ?? "–")", "\(stale.usualShare.map(Figures.percent) ?? "–")",
                ]
            })
    }

    private var returning: HTML {
        guard let tokens = detail.returning else {
            return "<p class=\"muted\">Reading a month of history took too long.</p>"
        }
        if tokens.isEmpty {
            return "<p class=\"muted\">None was revived three times within 30 days.</p>"
        }
        let rows = tokens.map { token -> [HTML] in
            [
                """
                <form method="post" action="\(PageAddress.find.path(from: frame.address))">\
                <button name="q" value="\(token.digits)">\(token.digits)…</button></form>
                """, "\(Figures.count(token.times))", "\(Figures.text(token.lastAt))", "\(token.state ?? "unknown")",
            ]
        }
        return PageTable(["Token", "Revived within 30 days#", "Last", "Now"], rows).html
            + "<p class=\"muted\">Does another sender report old 410s, or does the app register a token that it no longer has?</p>"
    }
}
