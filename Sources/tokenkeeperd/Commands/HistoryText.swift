internal import TokenLedger
internal import TokenModel

/// A token's history as lines for people.
enum HistoryText {
    /// A heading, the verdict, what would revive the token, and its history.
    static func text(_ history: TokenHistory) -> String {
        var lines = ["\(history.topic) (\(history.environment)) \(history.token)"]
        if let device = history.deviceID { lines.append("  device: \(device)") }
        if let user = history.userID { lines.append("  user: \(user)") }
        if let tags = history.tags {
            lines.append("  tags: \(tags)")
        }
        lines.append("  now: \(Explanation.verdict(history)).")
        if let revival = Explanation.revival(history) {
            lines.append("  what would revive it: \(revival).")
        }
        lines.append("  history:")
        if history.isInterrupted { lines.append("    (there are earlier events; these are the latest)") }
        lines += history.events.map { "    \($0.at.toTheSecond)  \(Explanation.event($0))" }
        if history.events.isEmpty { lines.append("    (no event of it is kept)") }
        lines.append("  (repeated results and registrations that change nothing leave no event)")
        return lines.map(plain).joined(separator: "\n")
    }

    /// - Parameters:
    ///   - rejected: How many of the latest rejected results have such a token.
    ///   - retention: The setting `sweep.event_retention`.
    static func nothing(_ subject: TokenLookup.Subject, rejected: Int, retention: String) -> String {
        var words =
            switch subject {
            case .device: "no token of that device is known"
            case .user: "no token of that user is known"
            case .token(let digits) where digits.canBeWhole: "the token is not known: it may be sent to"
            case .token: "no token that begins with these digits is known: an unknown token may be sent to"
            }
        words += "\nhistory is kept for sweep.event_retention (\(retention))"
        if rejected > 0 {
            words +=
                "\n\(counted(rejected, "result", "results")) with such a token could not be understood and did not count; see `tokenkeeperd rejected list`"
        }
        return words
    }

    /// One line per token.
    static func list(_ histories: [TokenHistory], andMore: Bool) -> String {
        (histories.map { history in
            plain(
                "\(history.environment) \(history.topic) \(history.token.prefix(TokenDigits.shown))… \(history.state ?? "unknown")"
            )
        } + (andMore ? ["…"] : [])).joined(separator: "\n")
    }

    /// One line per token.
    static func list(_ tokens: [TaggedTokens.Token], hasMore: Bool) -> String {
        if tokens.isEmpty { return "no registered token of the topic matches" }
        return
            (tokens.map { plain("\($0.token.prefix(TokenDigits.shown))… \($0.state) \($0.tags)") }
            + (hasMore ? ["… (these are the first \(tokens.count))"] : [])).joined(separator: "\n")
    }

    /// One line without characters that could move a terminal's cursor or turn the order of others around: parts of the text come from
    /// applications and senders.
    static func plain(_ text: String) -> String {
        String(
            String.UnicodeScalarView(
                text.unicodeScalars.map { controls($0.properties) ? "\u{FFFD}" : $0 }))
    }

    private static func controls(_ scalar: Unicode.Scalar.Properties) -> Bool {
        switch scalar.generalCategory {
        case .control, .lineSeparator, .paragraphSeparator: true
        default: scalar.isBidiControl
        }
    }

    /// The text with what may be a device token shortened: an error of PostgreSQL, a topic that a sender made up, or a row's key may contain one.
    static func withoutTokens(_ text: String) -> String {
        text.replacing(#/([0-9a-fA-F]{8})[0-9a-fA-F]{13,}/#) { "\($0.output.1)…" }
    }
}
