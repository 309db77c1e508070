internal import TokenLedger
internal import TokenModel

/// The search for a token or a topic, and what it has found. Pure.
struct FindPage {
    /// What was found.
    enum Found {
        /// Nothing was searched for.
        case nothingYet
        case token(TokenDigits, TokenLookup.Answer)
        /// More than `most` if there are more.
        case topics([(environment: String, topic: String)], like: String)
    }

    let found: Found
    /// The setting `sweep.event_retention`.
    let retention: String
    let now: Instant

    /// The most topics that are listed, and the most tokens that are explained: of one in more topics, the first.
    static let (most, mostExplained) = (50, 20)

    func html(nonce: String) -> HTML {
        let frame = PageFrame(address: .find, title: "Find – tokenkeeperd", now: now, period: nil)
        var text = ""
        if case .topics(_, let like) = found { text = like }
        return frame.html(nonce: nonce, "<section><h2>Find</h2>\(frame.search(text))</section>\n\(answer(frame))")
    }

    private func answer(_ frame: PageFrame) -> HTML {
        switch found {
        case .nothingYet: return ""
        case .topics(let topics, _):
            if topics.isEmpty { return "<section><p>No topic has this in its name.</p></section>" }
            let rows = topics.prefix(Self.most).map { topic -> [HTML] in
                [frame.link(.topic(topic.topic, environment: topic.environment), topic.topic), "\(topic.environment)"]
            }
            let more: HTML = topics.count > Self.most ? "<p class=\"muted\">And more: give more of the name.</p>" : ""
            return "<section>\(PageTable(["Topic", "Environment"], rows).html)\(more)</section>"
        case .token(let digits, let answer): return explanation(of: digits, answer)
        }
    }

    /// What `tokenkeeperd explain` prints, with tokens cut.
    private func explanation(of digits: TokenDigits, _ answer: TokenLookup.Answer) -> HTML {
        switch answer {
        case .histories(let histories):
            let shown = histories.prefix(Self.mostExplained).map {
                "<section>\(Self.lines(HistoryText.text($0)))</section>\n" as HTML
            }
            return "\(shown)"
                + (histories.count > Self.mostExplained
                    ? "<p>It is known in \(histories.count) topics: these are the first.</p>" : "")
        case .nothing(let rejected):
            return """
                <section>\(Self.lines(HistoryText.nothing(.token(digits), rejected: rejected, retention: retention)))</section>
                """
        case .tooMany(let first, let more):
            let list = HistoryText.list(
                Array(first.prefix(Self.mostExplained)), andMore: more || first.count > Self.mostExplained)
            return "<section>\(Self.lines(list))<p>These digits fit too many tokens: give more of them.</p></section>"
        }
    }

    private static func lines(_ text: String) -> HTML {
        let lines = text.split(separator: "\n", omittingEmptySubsequences: false).map {
            "\(String($0))\n" as HTML
        }
        return "<pre>\(lines)</pre>"
    }
}
