internal import ArgumentParser
internal import TokenLedger

/// What an operator decides about a topic.
struct TopicCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "topic",
        abstract: "List the topics; let the gate observe or enforce; pause, resume or slow down sending.",
        discussion: """
            Needs the rights of tokenkeeper_operator, and list those of tokenkeeper_reader. The view \
            tokenkeeper.topic_policy has the other settings of a topic.
            """,
        subcommands: [List.self, Observe.self, Enforce.self, Pause.self, Resume.self, Rate.self])

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "List the topics: gate, rate, and why sending is paused.")

        @OptionGroup var options: ConfigurationOptions

        @Flag(help: "Print JSON.")
        var json = false

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: "tokenkeeper_reader") { connection in
                let topics = try TopicPolicy.all(on: &connection)
                if json { return print(try JSONOutput.array(topics.map(Row.init))) }
                print(topics.isEmpty ? "no topic is known" : topics.map(Self.text).joined(separator: "\n"))
            }
        }

        private struct Row: Encodable {
            let environment, topic, gate: String
            let maxPerSecond: Int64?
            let paused: String?

            init(_ policy: TopicPolicy) {
                (environment, topic, gate) = (policy.environment, policy.topic, policy.gate)
                (maxPerSecond, paused) = (policy.maxPerSecond, policy.paused)
            }
        }

        static func text(_ policy: TopicPolicy) -> String {
            var parts = ["gate \(policy.gate)s"]
            if let rate = policy.maxPerSecond { parts.append("at most \(rate) a second") }
            if let paused = policy.paused { parts.append("paused: \(paused)") }
            return HistoryText.plain("\(policy.topic) (\(policy.environment)): \(parts.joined(separator: "; "))")
        }
    }

    struct Observe: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Let the gate withhold nothing, and only show what it would.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        @Flag(help: "The database does not know the topic yet.")
        var new = false

        func run() throws {
            try TopicCommand.set(.observe, which, options, isNew: new, done: "the gate of", "observes")
        }
    }

    struct Enforce: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Let the gate withhold suppressed tokens: the default.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws { try TopicCommand.set(.enforce, which, options, done: "the gate of", "enforces") }
    }

    struct Rate: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Limit how many requests a second all daemons send together.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        @Argument(help: "Requests per second, 1 or more; or none.")
        var perSecond: String

        func run() throws {
            let rate = Int32(perSecond).flatMap { $0 > 0 ? $0 : nil }
            if rate == nil, perSecond != "none" {
                throw ValidationError("the rate is \"\(HistoryText.plain(perSecond))\", expected 1 or more, or none.")
            }
            let done = rate.map { "is at most \($0) requests a second" } ?? "has no limit"
            try TopicCommand.set(.rate(perSecond: rate), which, options, done: "the rate of", done)
        }
    }

    struct Which: ParsableArguments {
        @Argument(help: "The topic (apns-topic).")
        var topic: String

        @Option(help: "production or sandbox.")
        var environment = "production"

        func validate() throws { try TopicOption.check(environment: environment) }
    }

    struct Pause: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Pause sending, within a second.")

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
            let hasChanged = try change.apply(to: which.topic, environment: which.environment, on: &connection)
            print("sending to \(HistoryText.plain(which.topic)) (\(which.environment)) \(hasChanged ? done : nothing)")
        }
    }

    /// - Parameters:
    ///   - subject: What the message is about.
    ///   - verb: What it does now.
    private static func set(
        _ change: TopicPolicy.Change, _ which: Which, _ options: ConfigurationOptions, isNew: Bool = false,
        done subject: String, _ verb: String
    ) throws {
        Signals.unblock()
        try options.load().withLedger(as: "tokenkeeper_operator") { connection in
            try change.apply(to: which.topic, environment: which.environment, isNew: isNew, on: &connection)
            print("\(subject) \(HistoryText.plain(which.topic)) (\(which.environment)) \(verb)")
        }
    }
}
