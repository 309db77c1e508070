internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

struct Reinstate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Undo the suspects, 410s or logouts that were received within a window.",
        discussion: """
            Undoes the damage of a misconfigured sender (--cause suspect), of a mistaken wave of 410s (stale), or of \
            mistaken logouts from an attached table or a file (unregistered_by_app). The window is when they were \
            received (queued_at); results of the window that are recorded later are undone, too. If APNs repeats the \
            same 410 later, it counts. Logouts that the application reported with unregister stay. Whatever else is \
            known about a token, such as an older 410, counts again. Pruned tokens cannot be restored.

            This cannot be undone; --dry-run counts first. If the command is interrupted, the daemons complete it.
            """)

    @Option(help: "suspect, stale (410s) or unregistered_by_app (logouts).")
    var cause = "suspect"

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var which: TopicOption

    @Option(help: "When the first bad result or logout was received, as in 2026-11-06T20:00:00Z.")
    var since: String

    @Option(help: "The end of the window. [default: now]")
    var until: String?

    @Flag(help: "Only count.")
    var dryRun = false

    func validate() throws {
        if Reinstatement.Cause(rawValue: cause) == nil {
            throw Self.unknown(cause)
        }
    }

    /// For every command with this option.
    static func unknown(_ cause: String) -> ValidationError {
        ValidationError("--cause is \"\(HistoryText.plain(cause))\", expected suspect, stale or unregistered_by_app.")
    }

    func run() throws {
        Signals.unblock()
        let cause = Reinstatement.Cause(rawValue: cause) ?? .suspect
        let words: (one: String, many: String, window: String) =
            switch cause {
            case .suspect: ("suspect", "suspects", "suspects received for")
            case .stale: ("410", "410s", "410s received for")
            case .unregisteredByApp: ("logout", "logouts", "logouts from attached tables and files, received for")
            }
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            let undo = try Reinstatement(
                cause, topic: which.topic, environment: which.environment, since: since, until: until, dryRun: dryRun,
                on: &connection)
            print(
                "\(words.window) \(which.topic) (\(which.environment)) from \(undo.window.since) to \(undo.window.until)"
            )
            if dryRun {
                print("\(counted(undo.results, "token", "tokens")) would be sendable again")
            } else {
                // The window is recorded: from now on the daemons undo it as well.
                let tokens = try undo.finish(on: &connection) { left, tokens in
                    ConfigurationOptions.complain(
                        "\(counted(tokens, "token is", "tokens are")) sendable again so far; still to be undone: "
                            + "\(left == 10_000 ? "10000 or more" : "\(left)") of \(counted(undo.results, words.one, words.many))"
                    )
                }
                print("\(counted(tokens, "token is", "tokens are")) sendable again")
            }
            if undo.pruned > 0 {
                print(
                    "\(counted(undo.pruned, "token was", "tokens were")) pruned since these hours, and cannot be restored"
                )
            }
            if undo.held > 0 {
                let of = TopicOption.typed(topic: which.topic, environment: which.environment)
                print(
                    "\(cause == .unregisteredByApp ? counted(undo.held, "logout is", "logouts are") : counted(undo.held, "result is", "results are")) still held; to discard: tokenkeeperd held discard \(of) --cause \(cause.rawValue)"
                )
            }
        }
    }
}
