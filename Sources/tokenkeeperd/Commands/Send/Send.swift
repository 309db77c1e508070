internal import ArgumentParser
internal import TokenLedger
internal import TokenModel

/// Queues one push for a token, a device, a user or a tag.
struct Send: ParsableCommand {
    static let configuration = CommandConfiguration(
        abstract: "Send a push to a token, a device, a user or a tag, through the gate.",
        discussion: """
            Queues a campaign, which a running daemon with a credential for the topic sends. Needs the rights of \
            tokenkeeper_sender. Every user of this machine can read the arguments while the command runs. If no token \
            is sendable, queues nothing and exits with 1.
            """)

    @OptionGroup var options: ConfigurationOptions
    @OptionGroup var topic: TopicOption

    @Option(help: ArgumentHelp("To a device token.", valueName: "token"))
    var to: String?

    @Option(help: "To all tokens of this device (device_id).")
    var device: String?

    @Option(help: "To all tokens of this user (user_id).")
    var user: String?

    @Option(
        help: ArgumentHelp(
            "To the tokens that match this expression of tags, as in 'news && !muted'.", valueName: "expression"))
    var tag: String?

    @Option(help: "An alert with this text.")
    var alert: String?

    @Option(help: ArgumentHelp("The payload: a file with a JSON object; - for standard input.", valueName: "file"))
    var payload: String?

    @Option(help: "10 shows it at once, 5 saves power, 1 saves more. [default: by the payload]")
    var priority: Int?

    @Option(help: "How long APNs tries to deliver it, as in 1h. [default: up to 30 days]")
    var keepFor: String?

    @Option(help: "Replaces an earlier push with this identifier on the device.")
    var collapseID: String?

    @Flag(help: "So large an audience is meant: see topic_policy.confirm_share.")
    var confirm = false

    @Flag(help: "Only count, and check what would be refused.")
    var dryRun = false

    func validate() throws {
        if [to, device, user, tag].compactMap(\.self).count != 1 {
            throw ValidationError("Expected one of --to, --device, --user and --tag.")
        }
        if [alert, payload].compactMap(\.self).count != 1 {
            throw ValidationError("Expected one of --alert and --payload.")
        }
        if let keepFor, DurationText.duration(keepFor).map({ $0 < .seconds(1) }) ?? true {
            throw ValidationError(
                "--keep-for is \"\(HistoryText.plain(keepFor))\", expected a second or more, such as 30m or 1h.")
        }
    }

    func run() throws {
        Signals.unblock()
        let configuration = try options.load()
        let campaign = NewCampaign(
            topic: topic.topic, environment: topic.environment, to: audience, try content, priority: priority,
            keptFor: keepFor.flatMap(DurationText.duration), collapseID: collapseID, isConfirmed: confirm)
        try configuration.withLedger(as: "tokenkeeper_sender") { connection in
            try show(try campaign.enqueue(dryRun: dryRun, on: &connection) { if dryRun { printPlan($0) } })
        }
    }

    private var audience: NewCampaign.Audience {
        if let to {
            .token(to)
        } else if let device {
            .device(device)
        } else if let user {
            .user(user)
        } else {
            .tags(tag ?? "")
        }
    }

    private var content: NewCampaign.Payload {
        get throws {
            if let alert { return .alert(alert) }
            let text = try PayloadInput.contents(of: payload ?? "-")
            guard PayloadInput.isObject(text) else { throw ValidationError("the payload is not a JSON object.") }
            return .json(text)
        }
    }

    private func of(_ tokens: Int64) -> String {
        HistoryText.plain("\(counted(tokens, "token", "tokens")) of \(topic.topic) (\(topic.environment))")
    }

    /// Before anything that may be refused.
    private func printPlan(_ tokens: Int64) {
        let answer = to == nil ? "" : tokens > 0 ? "the gate lets this token pass: " : "the gate refuses this token: "
        print("\(answer)would send to \(of(tokens))")
    }

    private func show(_ outcome: NewCampaign.Outcome) throws {
        if outcome.tokens == 0 {
            ConfigurationOptions.complain(
                to == nil
                    ? "no sendable token is meant: nothing is queued" : "the gate refuses this token: nothing is queued"
            )
        } else if let obstacle = outcome.obstacle {
            ConfigurationOptions.complain(
                "warning: \(HistoryText.plain(obstacle)): it \(dryRun ? "would wait" : "waits")")
        }
        if let number = outcome.number {
            print("queued as campaign \(number), to \(of(outcome.tokens))")
            print("to see what becomes of it: tokenkeeperd campaign show \(number) --watch")
        }
        if let explaining { print("to see what is known of the token: tokenkeeperd explain \(explaining)") }
        if outcome.tokens == 0 { throw ExitCode(ExitStatus.somethingToFix.rawValue) }
    }

    /// The first digits of the token; nil if it is not written in plain hex.
    private var explaining: Substring? {
        to.flatMap { TokenDigits($0) }.map { $0.text.prefix(Self.shown) }
    }

    /// More than a log shows, so that they fit one token.
    private static let shown = 16
}
