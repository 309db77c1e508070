internal import ArgumentParser
internal import TokenLedger

/// Lists campaigns, shows one, and pauses, resumes or cancels it, or sets its rate.
struct CampaignCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "campaign",
        abstract: "List campaigns, watch one, pause, resume or cancel it, or set its rate.",
        discussion: """
            tokenkeeper.enqueue and `send` create campaigns. Readers and operators see all campaigns, and operators \
            may change them. A sender sees and changes those that its login has created.
            """,
        subcommands: [List.self, Show.self, Pause.self, Resume.self, Cancel.self, Rate.self],
        defaultSubcommand: List.self)

    /// The role that list and show need.
    static let viewer = "tokenkeeper_reader, or for its own campaigns of tokenkeeper_sender"

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "List campaigns, newest first.")

        @OptionGroup var options: ConfigurationOptions

        @Option(help: "How many: 1 to 10000.")
        var limit = 20

        @Flag(help: "Print JSON.")
        var json = false

        func validate() throws {
            if !(1...10_000).contains(limit) { throw ValidationError("--limit is \(limit), expected 1 to 10000.") }
        }

        func run() throws {
            Signals.unblock()
            try options.load().withLedger(writes: false, as: CampaignCommand.viewer) { connection in
                if json {
                    let campaigns = try CampaignProgress.latestJSON(limit, on: &connection)
                    return print("[" + campaigns.joined(separator: ",\n ") + "]")
                }
                let campaigns = try CampaignProgress.latest(limit, on: &connection)
                print(
                    campaigns.isEmpty
                        ? "there is no campaign" : campaigns.map(CampaignText.line).joined(separator: "\n"))
            }
        }
    }

    /// Names a campaign.
    struct Which: ParsableArguments {
        @Argument(help: "The campaign's number.")
        var id: Int64

        /// Prints that there is no such campaign.
        ///
        /// - Parameter isHidden: Whether there may be one of another login, which this login does not see.
        func isUnknown(isHidden: Bool = false) -> ExitCode {
            let hidden = isHidden ? " that this login may see" : ""
            ConfigurationOptions.complain("there is no campaign \(id)\(hidden); see `tokenkeeperd campaign list`")
            return ExitCode(ExitStatus.usage.rawValue)
        }
    }

    struct Show: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Show the progress of a campaign.",
            discussion: """
                Ctrl-C ends --watch, and not the campaign.
                """)

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        @Flag(help: "Wait for the end, with a progress bar on a terminal. Exits with 70 if interrupted.")
        var watch = false

        @Flag(help: "Print JSON.")
        var json = false

        func run() throws {
            let configuration = try options.load()
            if watch {
                return try CampaignWatch(number: which.id, json: json).run(configuration) {
                    which.isUnknown(isHidden: true)
                }
            }
            Signals.unblock()
            try configuration.withLedger(writes: false, as: CampaignCommand.viewer) { connection in
                guard let text = try CampaignText.of(which.id, json: json, on: &connection) else {
                    throw which.isUnknown(isHidden: true)
                }
                print(text)
            }
        }
    }

    struct Pause: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Pause a campaign, within a second.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            try CampaignCommand.change(
                .pause, which, options, done: "is paused; to go on: tokenkeeperd campaign resume \(which.id)",
                nothing: "was not sending: it is paused already, or over")
        }
    }

    struct Resume: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "Resume a paused campaign.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            try CampaignCommand.change(.resume, which, options, done: "goes on", nothing: "was not paused")
        }
    }

    struct Cancel: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Cancel the rest for good, within a second.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        func run() throws {
            try CampaignCommand.change(.cancel, which, options, done: "is cancelled", nothing: "was over already")
        }
    }

    struct Rate: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Set how many requests are sent per second.")

        @OptionGroup var options: ConfigurationOptions
        @OptionGroup var which: Which

        @Argument(help: "Requests per second, of all daemons together: 1 to 1000000, or none.")
        var rate: String

        private static let range = 1...1_000_000

        /// Nil for no limit.
        private var perSecond: Int? { rate == "none" ? nil : Int(rate) }

        func validate() throws {
            if rate != "none", perSecond.map(Self.range.contains) != true {
                throw ValidationError("The rate is \(rate), expected 1 to 1000000, or none.")
            }
        }

        func run() throws {
            let text = perSecond.map { "\($0) requests per second" } ?? "any number of requests per second"
            try CampaignCommand.change(
                .rate(perSecond), which, options, done: "sends \(text)", nothing: "has this rate already, or is over")
        }
    }

    private static func change(
        _ change: CampaignChange, _ which: Which, _ options: ConfigurationOptions, done: String, nothing: String
    ) throws {
        Signals.unblock()
        try options.load().withLedger(as: "tokenkeeper_operator, or of the sender that created the campaign") {
            connection in
            do {
                let hasChanged = try change.apply(to: which.id, on: &connection)
                print("campaign \(which.id) \(hasChanged ? done : nothing)")
            } catch let error as DatabaseError where error.sqlState == "22023" {
                throw which.isUnknown()
            }
        }
    }
}
