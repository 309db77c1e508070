internal import ArgumentParser
internal import TokenLedger

struct Reinstate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Undo suspects: those sent within a window do not count, now and whenever they arrive.",
        discussion: """
            For what a misconfigured sender has done. What else is known of a token counts again: an older 410, suspect or \
            unregistration. 410s from APNs are not undone: a later registration revives their tokens. An instant without a zone is in UTC. \
            There is no undo of the undo; --dry-run counts first. \
            The suspects are undone in short transactions, and an interrupted command is completed by the daemons; the view \
            tokenkeeper.reinstatement shows what is left.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var which: TopicOption

    @Option(
        help: "The beginning of the window, such as 2026-11-06T20:00:00Z: when the first of those requests was sent.")
    var since: String

    @Option(help: "The end of the window. [default: now]")
    var until: String?

    @Flag(help: "Count only: change nothing.")
    var dryRun = false

    func run() throws {
        Signals.unblock()
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            let undo = try Reinstatement(
                topic: which.topic, environment: which.environment, since: since, until: until, dryRun: dryRun,
                on: &connection)
            print("suspects of \(which.topic) (\(which.environment)) from \(undo.window.since) to \(undo.window.until)")
            if dryRun {
                print("\(undo.suspects) tokens would be sendable again")
            } else {
                // The window is recorded: from here on the daemons do it, too.
                let tokens = try undo.finish(on: &connection) { left, tokens in
                    ConfigurationOptions.complain(
                        "\(tokens) tokens are sendable again so far; \(left == 10_000 ? "10000 or more" : "\(left)") of \(undo.suspects) suspects are left"
                    )
                }
                print("\(tokens) tokens are sendable again")
            }
            if undo.held > 0 {
                let of = TopicOption.typed(topic: which.topic, environment: which.environment)
                print("\(undo.held) results are still held: `tokenkeeperd held discard \(of)`")
            }
        }
    }
}
