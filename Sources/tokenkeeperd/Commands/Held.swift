internal import ArgumentParser
internal import TokenLedger

/// What the mass-failure guard holds, and what is to become of it.
struct Held: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "See, release or discard the results that the mass-failure guard holds.",
        discussion: """
            Suspects (BadDeviceToken, DeviceTokenNotForTopic, and 410s that are not from APNs) are held when, within a day, they would silence too many of a \
            topic's tokens (guard.allowance, guard.max_share): the sign of a misconfigured sender. Of a mistake: mend the sender, \
            `tokenkeeperd reinstate` what was recorded before the guard tripped, and `held discard`. If they are true: `held release`.
            """,
        subcommands: [List.self, Release.self, Discard.self], defaultSubcommand: List.self)

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "What is held, by topic, and whose guard is open.")

        @OptionGroup var options: ConfigurationOptions

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
                let held = try HeldSummary.all(on: &connection)
                print(held.isEmpty ? "nothing is held" : held.map(Self.text).joined(separator: "\n\n"))
            }
        }

        static func text(_ held: HeldSummary) -> String {
            let of = TopicOption.typed(topic: held.topic, environment: held.environment)
            var lines = [
                "\(held.topic) (\(held.environment)): \(held.results) results of \(held.tokens) tokens are held"
            ]
            if let reasons = held.reasons { lines.append("  reasons   \(reasons)") }
            if let queued = held.queued { lines.append("  queued    \(queued.first) to \(queued.last)") }
            lines.append("  guard     " + (held.openSince.map { "open since \($0)" } ?? "closed"))
            if held.undo != nil || held.results > 0 { lines.append("  a mistake? mend the sender, then:") }
            if let undo = held.undo { lines += ["    \(undo) --dry-run", "    \(undo)"] }
            if held.results > 0 {
                lines += ["    tokenkeeperd held discard \(of)", "  all true?  tokenkeeperd held release \(of)"]
            } else if held.openSince != nil {
                lines.append("  it closes when few tokens fail within a day, and ten minutes after the last one")
            }
            return lines.map(HistoryText.plain).joined(separator: "\n")
        }
    }

    struct Release: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Let the held results of a topic count: a daemon records them within seconds.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: TopicOption

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try HeldSummary.release(
                    topic: which.topic, environment: which.environment, on: &connection)
                print("\(results) results are back in the queue, and will be recorded")
            }
        }
    }

    struct Discard: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Delete the held results of a topic: they never count.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: TopicOption

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try HeldSummary.discard(
                    topic: which.topic, environment: which.environment, on: &connection)
                print("\(results) results are deleted, and have not been recorded")
            }
        }
    }
}
