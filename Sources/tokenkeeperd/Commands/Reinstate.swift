internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

struct Reinstate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Undo the suspects of requests that were sent within a window, including results that arrive later.",
        discussion: """
            Undoes the damage of a misconfigured sender. Whatever else is known about a token counts again: an older 410, suspect or \
            unregistration. 410s from APNs are not undone: a later registration revives their tokens. An instant without a zone is in UTC. \
            This cannot be undone; --dry-run counts first. \
            The suspects are undone in short transactions. If the command is interrupted, the daemons complete it; the view \
            tokenkeeper.reinstatement shows what is left.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var which: TopicOption

    @Option(
        help: "The start of the window: when the first bad request was sent, as in 2026-11-06T20:00:00Z.")
    var since: String

    @Option(help: "The end of the window. [default: now]")
    var until: String?

    @Flag(help: "Count only, and change nothing.")
    var dryRun = false

    func run() throws {
        Signals.unblock()
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            let undo = try Reinstatement(
                topic: which.topic, environment: which.environment, since: since, until: until, dryRun: dryRun,
                on: &connection)
            print("suspects of \(which.topic) (\(which.environment)) from \(undo.window.since) to \(undo.window.until)")
            if dryRun {
                print("\(counted(undo.suspects, "token", "tokens")) would be sendable again")
            } else {
                // The window is recorded: from now on the daemons undo it as well.
                let tokens = try undo.finish(on: &connection) { left, tokens in
                    ConfigurationOptions.complain(
                        "\(counted(tokens, "token is", "tokens are")) sendable again so far; still to be undone: "
                            + "\(left == 10_000 ? "10000 or more" : "\(left)") of \(counted(undo.suspects, "suspect", "suspects"))"
                    )
                }
                print("\(counted(tokens, "token is", "tokens are")) sendable again")
            }
            if undo.held > 0 {
                let of = TopicOption.typed(topic: which.topic, environment: which.environment)
                print("\(counted(undo.held, "result is", "results are")) still held: `tokenkeeperd held discard \(of)`")
            }
        }
    }
}
