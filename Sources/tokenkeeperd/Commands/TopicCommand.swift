internal import ArgumentParser
internal import TokenLedger

/// Pauses sending to a topic, and resumes it.
struct TopicCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "topic",
        abstract: "Pause sending to a topic, or resume it.",
        discussion: "Needs the rights of tokenkeeper_operator.",
        subcommands: [Pause.self, Resume.self])

    struct Which: ParsableArguments {
        @Argument(help: "The topic: the apns-topic header.")
        var topic: String

        @Option(help: "production or sandbox.")
        var environment = "production"

        func validate() throws { try TopicOption.check(environment: environment) }
    }

    struct Pause: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Pause sending to a topic, within a second.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        @Option(help: "Why, for others who read the status.")
        var reason = "paused by an operator"

        func run() throws {
            try TopicCommand.change(
                .pause(reason: reason), which, options, done: "is paused", nothing: "was paused already")
        }
    }

    struct Resume: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "End a pause, and try what waits because APNs refused it.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            try TopicCommand.change(.resume, which, options, done: "goes on", nothing: "was paused by nobody")
        }
    }

    private static func change(
        _ change: TopicPause, _ which: Which, _ options: ConfigurationOptions, done: String, nothing: String
    ) throws {
        Signals.unblock()
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            do {
                let hasChanged = try change.apply(to: which.topic, environment: which.environment, on: &connection)
                print(
                    "sending to \(HistoryText.plain(which.topic)) (\(which.environment)) \(hasChanged ? done : nothing)"
                )
            } catch let error as DatabaseError where error.sqlState == "22023" {
                ConfigurationOptions.complain(error.message)
                throw ExitCode(ExitStatus.usage.rawValue)
            }
        }
    }
}
