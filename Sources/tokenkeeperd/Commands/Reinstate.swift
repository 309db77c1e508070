internal import ArgumentParser
internal import TokenLedger

struct Reinstate: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Undo suspects: those sent within a window do not count, now and whenever they arrive.",
        discussion: """
            For what a misconfigured sender has done. What else is known of a token counts again: an older 410, suspect or \
            unregistration. 410s are not undone: a later registration revives those. An instant without a zone is in UTC. \
            There is no undo of the undo; --dry-run counts first.
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
            let done = try Reinstatement(
                topic: which.topic, environment: which.environment, since: since, until: until, dryRun: dryRun,
                on: &connection)
            print("suspects of \(which.topic) (\(which.environment)) from \(done.window.since) to \(done.window.until)")
            print("\(done.tokens) tokens \(dryRun ? "would be" : "are") sendable again")
            if done.held > 0 {
                let of = TopicOption.typed(topic: which.topic, environment: which.environment)
                print("\(done.held) results are still held: `tokenkeeperd held discard \(of)`")
            }
        }
    }
}
