internal import APNsFeedback
internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Creates, lists, shows and deletes the channels of an app, and sends to one.
struct ChannelCommand: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "channel",
        abstract: "Create, list, show or delete broadcast channels for Live Activities, or send to one.",
        discussion: """
            Apple stores the channels, at most 10,000 per app and environment. The commands use the daemon's \
            credential for the app: run them as a user who can read its files. Each sends one request, and does not \
            retry it.
            """,
        subcommands: [Create.self, List.self, Show.self, Delete.self, Send.self])

    /// Whose channels.
    struct App: ParsableArguments {
        @OptionGroup var options: ConfigurationOptions

        @Option(help: "The app's bundle identifier.")
        var app: String

        @Option(help: "production or sandbox.")
        var environment = "production"

        func validate() throws {
            try TopicOption.check(environment: environment)
            // It is a part of the URL.
            let isName = app.utf8.allSatisfy { byte in
                switch byte {
                case UInt8(ascii: "a")...UInt8(ascii: "z"), UInt8(ascii: "A")...UInt8(ascii: "Z"),
                    UInt8(ascii: "0")...UInt8(ascii: "9"), UInt8(ascii: "-"), UInt8(ascii: "_"), UInt8(ascii: "."):
                    true
                default: false
                }
            }
            if !isName || app.isEmpty || app.utf8.count > 255 || app.hasSuffix(Self.suffix) {
                throw ValidationError("--app is no bundle identifier, such as com.example.app.")
            }
        }

        /// What the topic of an app's Live Activities has more than its bundle identifier.
        private static let suffix = ".push-type.liveactivity"

        /// Calls APNs. Prints why it has not worked, and exits.
        func ask<Answer>(_ work: (BroadcastChannels) throws -> Answer) throws -> Answer {
            Signals.unblock()
            let configuration = try options.load()
            let credential = try credential(of: configuration)
            guard let topic = Topic(app), let environment = Environment(rawValue: environment) else {
                throw ValidationError("--app \(Topic.fault(of: app) ?? "")")
            }
            // APNs can refuse a new provider token while it knows that of the daemon.
            configuration.exchange(credential.token)
            do {
                let answer = try work(
                    BroadcastChannels(of: topic, in: environment, credential.identity, configuration.clientOptions))
                configuration.wasAccepted(credential.token)
                return answer
            } catch let error as BroadcastChannels.Failure {
                ConfigurationOptions.complain("\(error)\(ResponseEvidence.help(error.description))")
                throw ExitCode(ExitStatus.unavailable.rawValue)
            }
        }

        private func credential(of configuration: Configuration) throws -> LoadedCredential {
            let found = [app, app + Self.suffix].lazy.compactMap { topic in
                CredentialSettings.best(
                    of: configuration.credentials, for: TopicScope(environment: environment, topic: topic))
            }.first
            guard let found else {
                ConfigurationOptions.complain(
                    "no credential is configured for \(app) (\(environment)): add the topic to a [credential.NAME]")
                throw ExitCode(ExitStatus.configuration.rawValue)
            }
            var tokens = ProviderTokens(keptIn: configuration.providerTokenDirectory)
            do {
                return try LoadedCredential(found, folders: options.credentialFolders, &tokens)
            } catch {
                for problem in error.problems { ConfigurationOptions.complain(problem) }
                throw ExitCode(ExitStatus.configuration.rawValue)
            }
        }
    }

    struct Create: ParsableCommand {
        static let configuration = CommandConfiguration(abstract: "Create a channel, and print its identifier.")

        @OptionGroup var app: App

        @Flag(help: "APNs keeps the latest push for devices that subscribe or come online later.")
        var keepLatest = false

        func run() throws {
            print(try app.ask { try $0.create(keepsLatest: keepLatest) })
        }
    }

    struct List: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Print the identifiers of all channels.")

        @OptionGroup var app: App

        @Flag(help: "Print JSON.")
        var json = false

        func run() throws {
            let channels = try app.ask { try $0.list() }
            if json { return print(try JSONOutput.array(channels)) }
            for channel in channels { print(HistoryText.plain(channel)) }
        }
    }

    struct Show: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Say whether APNs keeps the latest push to a channel.")

        @OptionGroup var app: App

        @Argument(help: "The channel's identifier.")
        var channel: String

        func run() throws {
            let keepsLatest = try app.ask { try $0.keepsLatest(channel) }
            print(keepsLatest ? "keeps the latest push" : "keeps no push")
        }
    }

    struct Delete: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Delete a channel: devices get nothing more from it.")

        @OptionGroup var app: App

        @Argument(help: "The channel's identifier.")
        var channel: String

        func run() throws {
            try app.ask { try $0.delete(channel) }
            print("deleted")
        }
    }

    struct Send: ParsableCommand {
        static let configuration = CommandConfiguration(
            abstract: "Send a push to a channel, once.",
            discussion: """
                The payload is that of a Live Activity: {"aps":{"timestamp":…,"event":"update","content-state":{…}}}.
                """)

        @OptionGroup var app: App

        @Argument(help: "The channel's identifier.")
        var channel: String

        @Argument(help: "The payload, a JSON object; - for standard input.")
        var payload: String

        @Option(help: "10 shows it at once, 5 saves power.")
        var priority = 10

        @Option(help: "How long APNs keeps it, if the channel keeps the latest push, as in 1h. [default: not at all]")
        var keepFor: String?

        func validate() throws {
            if ![5, 10].contains(priority) { throw ValidationError("--priority is \(priority), expected 10 or 5.") }
            if let keepFor, DurationText.duration(keepFor).map({ $0 < .seconds(1) }) ?? true {
                throw ValidationError(
                    "--keep-for is \"\(HistoryText.plain(keepFor))\", expected a second or more, such as 30m or 1h.")
            }
        }

        func run() throws {
            Signals.unblock()
            let text = payload == "-" ? PayloadInput.standardInput() : payload
            guard PayloadInput.isObject(text) else { throw ValidationError("the payload is not a JSON object.") }
            let expiration = keepFor.flatMap(DurationText.duration).map {
                Instant.now.microseconds / 1_000_000 + $0.components.seconds
            }
            let push = BroadcastChannels.Push(
                payload: Array(text.utf8), priority: priority, expiration: expiration ?? 0)
            let id = try app.ask { try $0.send(push, to: channel) }
            print("accepted" + (id.map { " as \(HistoryText.plain($0))" } ?? ""))
        }
    }
}
