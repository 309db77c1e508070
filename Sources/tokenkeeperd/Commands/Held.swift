internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Lists, releases or discards what the mass-failure guard holds.
struct Held: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "List, release or discard the results that the mass-failure guard holds.",
        discussion: """
            Suspects are BadDeviceToken, DeviceTokenNotForTopic, and 410s that are not from APNs. They are held if, within a day, they \
            would suppress too many of a topic's tokens (guard.allowance, guard.max_share): the sign of a misconfigured sender. \
            If the sender is at fault, fix it, run `tokenkeeperd reinstate` for what was recorded before the guard tripped, and then \
            `held discard`. If the tokens are really bad, run `held release`. \
            With guard.hold_stale_share, 410s are held as well when too many active tokens turn stale within a day.
            """,
        subcommands: [List.self, Release.self, Discard.self], defaultSubcommand: List.self)

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "List what is held, by topic, and which guards have tripped.")

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
                "\(held.topic) (\(held.environment)): "
                    + "\(counted(held.results, "result", "results")) of \(counted(held.tokens, "token", "tokens")) "
                    + (held.results == 1 ? "is held" : "are held")
            ]
            if let reasons = held.reasons { lines.append("  reasons   \(reasons)") }
            if let queued = held.queued { lines.append("  queued    \(queued.first) to \(queued.last)") }
            lines.append("  guard     " + (held.trippedAt.map { "tripped at \($0)" } ?? "has not tripped"))
            if held.undo != nil || held.results > 0 { lines.append("  If the sender is at fault, fix it, then run:") }
            if let undo = held.undo { lines += ["    \(undo) --dry-run", "    \(undo)"] }
            if held.results > 0 {
                lines += [
                    "    tokenkeeperd held discard \(of)", "  If the tokens are really bad, run:",
                    "    tokenkeeperd held release \(of)",
                ]
            } else if held.trippedAt != nil {
                lines.append(
                    "  It resets ten minutes after the last suspect, once the day's count is down to half of the limit."
                )
            }
            return lines.map(HistoryText.plain).joined(separator: "\n")
        }
    }

    struct Release: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Let the held results of a topic count. A daemon records them within seconds.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: TopicOption

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try HeldSummary.release(
                    topic: which.topic, environment: which.environment, on: &connection)
                print("\(counted(results, "result is", "results are")) back in the queue and will be recorded")
            }
        }
    }

    struct Discard: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Delete the held results of a topic. They will never count.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: TopicOption

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let results = try HeldSummary.discard(
                    topic: which.topic, environment: which.environment, on: &connection)
                print(
                    counted(results, "result is deleted and was", "results are deleted and were") + " not recorded")
            }
        }
    }
}
