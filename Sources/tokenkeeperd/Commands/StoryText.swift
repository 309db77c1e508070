internal import TokenLedger

/// Stories as lines for people.
enum StoryText {
    /// A heading, the verdict, what would revive it, and the story.
    static func text(_ story: TokenStory) -> String {
        var lines = ["\(story.topic) (\(story.environment)) \(story.token)"]
        if let device = story.deviceID { lines.append("  device: \(device)") }
        lines.append("  now: \(StoryWords.verdict(story)).")
        if let revival = StoryWords.revival(story) {
            lines.append("  what would revive it: \(revival).")
        }
        lines.append("  story:")
        if story.isCut { lines.append("    (there are earlier events; these are the latest)") }
        lines += story.events.map { "    \($0.at.toTheSecond)  \(StoryWords.event($0))" }
        if story.events.isEmpty { lines.append("    (no event of it is kept)") }
        lines.append("  (repeated news that changes nothing leaves no event)")
        return lines.map(plain).joined(separator: "\n")
    }

    /// - Parameters:
    ///   - rejected: How many results with such a token were rejected.
    ///   - retention: The setting `sweep.event_retention`.
    static func nothing(_ subject: StorySearch.Subject, rejected: Int, retention: String) -> String {
        var words =
            switch subject {
            case .device: "nothing is known of any token of that device"
            case .token(let digits) where digits.canBeWhole: "nothing is known of it: it may be sent to"
            case .token: "nothing is known of a token that begins so: it may be sent to, once it is whole"
            }
        words += "\nhistory is kept for sweep.event_retention (\(retention))"
        if rejected > 0 {
            words +=
                "\n\(rejected) results with it could not be understood and did not count; see `tokenkeeperd rejected list`"
        }
        return words
    }

    /// A line a token.
    static func list(_ stories: [TokenStory], andMore: Bool) -> String {
        (stories.map { story in
            plain(
                "\(story.environment) \(story.topic) \(story.token.prefix(TokenDigits.shown))… \(story.state ?? "unknown")"
            )
        } + (andMore ? ["…"] : [])).joined(separator: "\n")
    }

    /// One line, without what would move a terminal's cursor: applications and senders wrote part of it.
    static func plain(_ text: String) -> String {
        String(
            String.UnicodeScalarView(
                text.unicodeScalars.map { $0.properties.generalCategory == .control ? "\u{FFFD}" : $0 }))
    }
}
