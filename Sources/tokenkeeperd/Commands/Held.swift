internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Lists, releases or discards what the mass-failure guard holds.
struct Held: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "List, release or discard what the mass-failure guard holds.",
        discussion: """
            Suspects (BadDeviceToken, DeviceTokenNotForTopic, and 410s that are not from APNs) are held if, within a \
            day, they would suppress too many of a topic's tokens (guard.allowance, guard.max_share). So are logouts \
            from attached tables and files, counted apart, and, with guard.hold_stale_share, other 410s. If the sender \
            is at fault, fix it, run `tokenkeeperd reinstate` for what was recorded before the guard tripped, and then \
            `held discard`. If the tokens are really bad, run `held release`.
            """,
        subcommands: [List.self, Release.self, Discard.self], defaultSubcommand: List.self)

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "List what is held, by topic, and which guards have tripped.")

        @OptionGroup var options: ConfigurationOptions

        @Flag(help: "Print JSON.")
        var json = false

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
                let held = try HeldSummary.all(on: &connection)
                if json { return print(try JSONOutput.array(held.map(Row.init))) }
                print(held.isEmpty ? "nothing is held" : held.map(Self.text).joined(separator: "\n\n"))
            }
        }

        private struct Row: Encodable {
            let environment, topic, cause: String
            let results, tokens: Int64
            let firstQueuedAt, lastQueuedAt, reasons, trippedAt, undo: String?

            init(_ held: HeldSummary) {
                (environment, topic, cause) = (held.environment, held.topic, held.cause.rawValue)
                (results, tokens, reasons, undo) = (held.results, held.tokens, held.reasons, held.undo)
                firstQueuedAt = (held.queued?.first).map(JSONOutput.instant)
                lastQueuedAt = (held.queued?.last).map(JSONOutput.instant)
                trippedAt = held.trippedAt.map(JSONOutput.instant)
            }
        }

        static func text(_ held: HeldSummary) -> String {
            let isOfLogouts = held.cause == .unregisteredByApp
            let of =
                TopicOption.typed(topic: held.topic, environment: held.environment) + " --cause \(held.cause.rawValue)"
            let count =
                isOfLogouts
                ? counted(held.results, "logout", "logouts") : counted(held.results, "result", "results")
            var lines = [
                "\(held.topic) (\(held.environment)): \(count) of \(counted(held.tokens, "token", "tokens")) "
                    + (held.results == 1 ? "is held" : "are held")
            ]
            if let reasons = held.reasons { lines.append("  \(isOfLogouts ? "sources" : "reasons")   \(reasons)") }
            if let queued = held.queued { lines.append("  queued    \(queued.first) to \(queued.last)") }
            lines.append("  guard     " + (held.trippedAt.map { "tripped at \($0)" } ?? "has not tripped"))
            if held.undo != nil || held.results > 0 {
                lines.append(
                    isOfLogouts
                        ? "  If nobody has logged out, stop what changes the table, then run:"
                        : "  If the sender is at fault, fix it, then run:")
            }
            if let undo = held.undo { lines += ["    \(undo) --dry-run", "    \(undo)"] }
            if held.results > 0 {
                lines += [
                    "    tokenkeeperd held discard \(of)",
                    isOfLogouts
                        ? "  If these devices have really logged out, run:" : "  If the tokens are really bad, run:",
                    "    tokenkeeperd held release \(of)",
                ]
            } else if held.trippedAt != nil {
                lines.append(
                    "  It resets once the day's count is down to half of the limit."
                )
            }
            return lines.map(HistoryText.plain).joined(separator: "\n")
        }
    }

    /// What a command decides about.
    struct Which: ParsableArguments {
        @OptionGroup var topic: TopicOption

        @Option(help: "suspect, stale (410s) or unregistered_by_app (logouts). [default: all]")
        var cause: String?

        func validate() throws {
            if let cause, Reinstatement.Cause(rawValue: cause) == nil { throw Reinstate.unknown(cause) }
        }
    }

    struct Release: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Release what is held: a daemon records it within seconds.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let rows = try HeldSummary.release(
                    topic: which.topic.topic, environment: which.topic.environment, cause: which.cause, on: &connection)
                print(
                    "\(Held.outcome(rows, of: which.cause, "is", "are")) back in the queue and will be recorded")
            }
        }
    }

    struct Discard: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Delete what is held: it never counts.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(as: "tokenkeeper_operator") { connection in
                let rows = try HeldSummary.discard(
                    topic: which.topic.topic, environment: which.topic.environment, cause: which.cause, on: &connection)
                print(
                    Held.outcome(rows, of: which.cause, "is deleted and was", "are deleted and were") + " not recorded")
            }
        }
    }

    private static func outcome(_ rows: Int64, of cause: String?, _ one: String, _ many: String) -> String {
        cause == GuardTransition.Cause.unregisteredByApp.rawValue
            ? counted(rows, "logout \(one)", "logouts \(many)")
            : counted(rows, "result \(one)", "results \(many)")
    }
}
