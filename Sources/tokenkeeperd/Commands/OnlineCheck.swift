internal import APNsFeedback
internal import ArgumentParser
internal import FoundationEssentials
internal import TokenLedger
internal import TokenModel

/// `check-config --online`: tries each connection that the daemon would make.
struct OnlineCheck {
    let configuration: Configuration
    let credentials: [LoadedCredential]

    /// A connection to try.
    private struct Trial {
        var what: String
        /// Nil if it works.
        var failure: () -> String?
    }

    /// Prints a line for each connection.
    ///
    /// - Throws: The exit status, if a connection fails.
    func run() throws {
        var hasFailed = false
        for trial in [database] + apns {
            if let failure = trial.failure() {
                hasFailed = true
                ConfigurationOptions.complain("\(trial.what): \(failure)")
            } else {
                print("# \(trial.what): \(Color.ofOutput.text("works", .good))")
            }
        }
        if hasFailed { throw ExitCode(ExitStatus.unavailable.rawValue) }
    }

    private var database: Trial {
        Trial(what: "PostgreSQL") {
            do {
                var connection = try configuration.connectLikeService(writes: true)
                try Migrator(daemon: Daemon.version).check(&connection)
                // APNs can refuse a new provider token while it knows that of the daemon.
                ProviderTokens.take(try Outbox.sharedTokens(on: &connection), credentials.compactMap(\.token))
                return nil
            } catch {
                return "\(error)"
            }
        }
    }

    /// A request of each credential to each of its servers, for a token that no device has: APNs judges the credential first.
    private var apns: [Trial] {
        var options = configuration.clientOptions
        options.answerTimeout = .seconds(10)
        return credentials.flatMap { credential in
            Environment.allCases.filter(credential.settings.environments.contains).map { environment in
                Trial(what: "APNs \(environment.rawValue), credential \(credential.settings.name)") {
                    let failure =
                        ConnectionProbe(of: environment, credential.identity, options).failure()
                        ?? CredentialProbe(credential, environment, options).failure()
                    if failure == nil { configuration.wasAccepted(credential.token) }
                    return failure
                }
            }
        }
    }
}

/// Sends one request per topic for a token that no device can have, and reads what APNs says of the credential and the topic.
private struct CredentialProbe {
    private let credential: LoadedCredential
    private let environment: Environment
    private let options: PushClientOptions

    /// More topics of one credential are not tried.
    private static let most = 50

    init(_ credential: LoadedCredential, _ environment: Environment, _ options: PushClientOptions) {
        (self.credential, self.environment, self.options) = (credential, environment, options)
    }

    /// - Returns: Nil if APNs accepts the credential for its topics.
    func failure() -> String? {
        let requests = topics.compactMap(request)
        let bell = Wakeup()
        let client = PushClient(credential.identity, options, ended: { bell.ring() })
        WorkerThread.start("probe") { client.run() }
        defer { client.stop(patience: .zero) }
        client.submit(requests)
        var failures = Dictionary(uniqueKeysWithValues: requests.map { ($0.address.scope.topic, "no response") })
        var missing = requests.count
        let until = ContinuousClock.now + options.connectTimeout + options.answerTimeout * 2
        while missing > 0, .now < until {
            for outcome in client.collect() {
                failures[outcome.request.address.scope.topic] = failure(of: outcome.end)
                missing -= 1
            }
            if missing > 0 { bell.wait(for: .milliseconds(100)) }
        }
        return words(failures)
    }

    private func words(_ failures: [String: String]) -> String? {
        if failures.count == topics.count, Set(failures.values).count == 1 { return failures.values.first }
        let words = failures.sorted { $0.key < $1.key }.map { "topic \($0.key): \($0.value)" }
        return words.isEmpty ? nil : words.joined(separator: "; ")
    }

    private func request(_ topic: String) -> PushRequest? {
        guard let topic = Topic(topic), let token = DeviceToken(bytes: [UInt8](repeating: 0, count: 32)) else {
            return nil
        }
        return PushRequest(
            address: TokenAddress(environment: environment, topic: topic, token: token),
            payload: Array(#"{"aps":{}}"#.utf8), pushType: PushType(ofTopic: topic.name) ?? .alert, expiration: 0,
            id: UUID().uuidString.lowercased(), mayBeRepeated: false)
    }

    private var exactTopics: [String] { Set(credential.settings.topics.filter { !$0.hasSuffix("*") }).sorted() }

    /// If all have a wildcard, one of them without it: APNs judges the credential first.
    private var topics: [String] {
        if !exactTopics.isEmpty { return Array(exactTopics.prefix(Self.most)) }
        let beginning = credential.settings.topics.first?.split(separator: "*").first.map(String.init) ?? "com.example."
        return [beginning.hasSuffix(".") ? beginning + "check" : beginning]
    }

    private func failure(of end: PushOutcome.End) -> String? {
        switch end {
        case .answered(let response) where !Interpretation.isOfAPNs(response):
            return Interpretation.words(ofForeign: response.status)
        case .answered(let response):
            let reason = response.reason ?? ""
            // APNs looks at the token last, and at the topic before it.
            let isFine =
                [200, 410].contains(response.status) || ["BadDeviceToken", "DeviceTokenNotForTopic"].contains(reason)
                || (exactTopics.isEmpty && ["TopicDisallowed", "BadTopic"].contains(reason))
            return isFine ? nil : "APNs answered \(response.status) \(reason)\(ResponseEvidence.help(reason))"
        case .unanswered(let failure): return failure.message
        case .unsendable(let fault): return fault
        case .withdrawn: return "no response"
        }
    }
}
