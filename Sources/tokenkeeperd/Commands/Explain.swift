internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

struct Explain: ParsableCommand {
    static let configuration = CommandConfiguration(
        commandName: "explain",
        abstract: "Explain why a token may or may not be sent to: its history, and what would revive it.",
        discussion: """
            Needs the rights of tokenkeeper_reader. Works on a standby.
            """)

    private static let role = "tokenkeeper_reader"

    @OptionGroup var options: ConfigurationOptions

    // An array, because ArgumentParser's error about a second argument would show the whole token.
    @Argument(help: ArgumentHelp("A device token, or its first 8 or more digits.", valueName: "token"))
    var tokens: [String] = []

    @Option(help: "All tokens of this device.")
    var device: String?

    @Option(help: "All tokens of this user.")
    var user: String?

    @Option(
        help: ArgumentHelp(
            "List the tokens of --topic that match this expression of tags, as in 'news && !muted'.",
            valueName: "expression"))
    var tag: String?

    @Option(help: "Only this topic.")
    var topic: String?

    @Option(help: "Only this environment: production or sandbox.")
    var environment: String?

    @Flag(help: "Print JSON, on one line.")
    var json = false

    func validate() throws {
        let named =
            (device == nil ? [] : ["--device"]) + (user == nil ? [] : ["--user"]) + (tag == nil ? [] : ["--tag"])
        guard tokens.count + named.count == 1 else {
            throw ValidationError(
                "Expected one token, --device, --user or --tag, found \((["\(tokens.count) tokens"] + named).joined(separator: " and "))."
            )
        }
        if let token = tokens.first, TokenDigits(token) == nil {
            throw ValidationError(
                "The token is \"\(HistoryText.plain(String(token.prefix(TokenDigits.shown))))\(token.count > TokenDigits.shown ? "…" : "")\" "
                    + "(\(token.count) characters), expected 8 to 1024 hex digits.")
        }
        for (option, value) in [("--device", device), ("--user", user), ("--topic", topic)] {
            if let value, !(1...512).contains(value.utf8.count) {
                throw ValidationError("\(option) is \(value.utf8.count) bytes long, expected 1 to 512.")
            }
        }
        if tag != nil, topic == nil { throw ValidationError("--tag needs --topic.") }
        if let environment { try TopicOption.check(environment: environment) }
    }

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        if let tag {
            return try list(
                TaggedTokens(tag, topic: topic ?? "", environment: environment ?? "production"), configuration)
        }
        let subject: TokenLookup.Subject
        if let digits = tokens.first.flatMap({ TokenDigits($0) }) {
            subject = .token(digits)
        } else {
            subject = user.map { .user($0) } ?? .device(device ?? "")
        }
        let search = TokenLookup(subject, topic: topic, environment: environment)
        try configuration.withLedger(writes: false, as: Self.role) { connection in
            try show(try search.answer(on: &connection), to: search, configuration, on: &connection)
        }
    }

    private func show(
        _ answer: TokenLookup.Answer, to search: TokenLookup, _ configuration: Configuration,
        on connection: inout Connection
    ) throws {
        switch answer {
        case .histories(let histories):
            print(
                json
                    ? try HistoryJSON.array(of: histories, on: &connection)
                    : histories.map(HistoryText.text).joined(separator: "\n\n"))
        case .nothing(let rejected):
            let retention = configuration.values["sweep.event_retention"]?.value ?? "its default"
            print(json ? "[]" : HistoryText.nothing(search.subject, rejected: rejected, retention: retention))
            if let topic, try !search.isKnownTopic(on: &connection) {
                ConfigurationOptions.complain(
                    "warning: topic \(HistoryText.plain(topic)) is not known\(environment.map { " in \($0)" } ?? ""): `tokenkeeperd topic list` has those that are"
                )
            }
        case .tooMany(let first, let more):
            if !json { print(HistoryText.list(first, andMore: more)) }
            ConfigurationOptions.complain(
                "that fits \(more ? "more than " : "")\(counted(first.count, "token", "tokens")): "
                    + (tokens.isEmpty ? "give --topic or --environment" : "give more digits or --topic"))
            throw ExitCode(ExitStatus.usage.rawValue)
        }
    }

    private func list(_ search: TaggedTokens, _ configuration: Configuration) throws {
        try configuration.withLedger(writes: false, as: Self.role) { connection in
            let answer = try search.answer(on: &connection)
            print(json ? answer.json : HistoryText.list(answer.tokens, hasMore: answer.hasMore))
        }
    }
}
