internal import APNsFeedback
internal import TokenLedger
internal import TokenModel

/// Start here: everything that the sender decides. Pure: outcomes, claims and the time go in, actions come out.
///
/// `SendPipeline` performs the actions, with the clients and the database; `SendWorker` runs the pipeline in a loop. The state
/// survives a lost connection to the database: it keeps the claimed requests and the endings that are not written yet.
///
/// What it guarantees:
/// - Each claimed request ends exactly once.
/// - No two requests of one token are in flight at a time.
/// - Nothing is sent to a token that rests. Nothing is claimed for a server or a topic that pauses.
/// - After a pause, one request at a time tests the server or the topic until one is accepted. Each of these requests has another token.
/// - A credential holds at most `limit` requests per environment, and less if many credentials are busy. If more topics share a credential than it has room for, each
///   still gets one request, so that none starves. A campaign's whole batch may go beyond the limit.
/// - Campaigns take turns with each other and with the topics.
/// - With a rate, no request is sent before its instant. A request that waits for its instant does not count in `limit`.
struct SendState {
    /// The most requests of one credential in one environment, queued ones included.
    let limit: Int
    let timing: Timing
    /// The name of the credential for a topic; nil where no credential covers it.
    let credential: (TopicScope) -> String?

    // What waits in the outbox: see SendStateLooks.swift and SendStateClaims.swift.
    var topics = DueTopics()
    var campaigns = DueCampaigns()
    var blocked: BlockedSources
    /// How many more requests all credentials together may hold, as of this round.
    var roomOfAll: Int

    // What is claimed: see SendStateRecalls.swift.
    var servers: [CredentialScope: ServerState] = [:]
    var paced = PacedRequests()
    var recalls = RecallSchedule()

    // What has ended.
    var evidence: ResponseEvidence
    var tokens = RestingTokens()
    var unwritten = UnwrittenEndings()
    var counts = SendCounts()

    /// - Parameters:
    ///   - key: What tells the keys of credentials apart, by the credential's name.
    ///   - credential: The name of the credential for a topic; nil where no credential covers it.
    init(
        limit: Int, timing: Timing, key: @escaping (String) -> String = { $0 },
        credential: @escaping (TopicScope) -> String?
    ) {
        self.limit = limit
        roomOfAll = limit * Self.mostAtOnce
        self.timing = timing
        evidence = ResponseEvidence(timing, key: key)
        blocked = BlockedSources(timing)
        self.credential = credential
    }

    /// What the pipeline does outside the database.
    enum Action: Equatable {
        /// Give the requests to the client of the credential.
        case submit([ClaimedRequest], credential: String)
        /// Take requests back from the client, by `request_id`. The client keeps those that it has sent until they are answered.
        case withdraw([Int64], credential: String)
        /// The same, without those that the client has sent: it repeats them over another connection.
        case withdrawUnsent([Int64], credential: String)
        /// Leave the connections of a credential in an environment: what comes next goes over new ones.
        case reconnect(CredentialScope)
        /// Log that a server or a topic pauses for this time.
        case logPause(ResponseEvidence.Subject, Duration, why: String)
    }

    /// The time by both clocks. Retries depend on the time of day, everything else on a clock that nobody sets.
    struct Moment: Sendable {
        var clock: ContinuousClock.Instant
        var timeOfDay: Instant

        static var now: Moment { Moment(clock: .now, timeOfDay: .now) }
    }

    /// The time of day of the database, which notes when a request was first sent, and for which expirations are meant. This machine's clock may be wrong.
    struct DatabaseClock: Sendable {
        private var known: (time: Instant, at: ContinuousClock.Instant)?

        /// - Parameter at: When the time was read.
        mutating func note(_ time: Instant, at: ContinuousClock.Instant) { known = (time, at) }

        var now: Moment {
            guard let known else { return .now }
            let clock = ContinuousClock.now
            return Moment(
                clock: clock, timeOfDay: known.time.advanced(byMicroseconds: known.at.duration(to: clock).microseconds))
        }
    }

    /// Whether nothing is claimed and everything is written.
    var isEmpty: Bool { servers.values.allSatisfy(\.requests.isEmpty) && paced.isEmpty && unwritten.isEmpty }

    /// Topics and campaigns whose requests all wait, one sentence each: no credential covers the topic, or claims fail.
    var blockedSources: [String] {
        topics.uncovered.map { "no credential is configured for \($0): its requests wait" }.first(20, of: "topics")
            + campaigns.uncovered.map {
                "no credential is configured for \($0.topic): campaign \($0.id) waits"
            }.first(20, of: "campaigns") + blocked.problems.first(20, of: "topics and campaigns")
    }

    /// Whether a request has been submitted, and none of its credential has been answered since.
    var awaitsAnswer: Bool { servers.values.contains { $0.silence != nil } }

    /// Since when requests of a credential have been submitted without any response.
    var unanswered: [CredentialScope: ContinuousClock.Instant] {
        servers.compactMapValues { $0.requests.isEmpty && $0.silence?.failure == nil ? nil : $0.silence?.since }
    }

    /// Everything that keeps requests waiting: one sentence for each cause.
    func problems(at now: ContinuousClock.Instant) -> [String] { waiting(at: now).map(\.words) }

    func waiting(at now: ContinuousClock.Instant) -> [WaitingProblem] {
        let silent = servers.sorted { $0.key < $1.key }.compactMap { scope, server in
            server.problem(
                of: scope, after: timing.unanswered, isPausing: evidence.fails(scope), at: now
            ).map { (scope: scope, problem: $0) }
        }
        return blockedSources.map(WaitingProblem.init) + WaitingProblem.joined(silent.map(\.problem))
            + WaitingProblem.joined(evidence.problems(except: silent.map(\.scope), at: now)).first(20)
    }

    /// The credential's name is empty if none covers the topic.
    func scope(of topic: TopicScope) -> CredentialScope {
        CredentialScope(credential: credential(topic) ?? "", environment: topic.environment)
    }

    /// Whether a topic or its credential pauses, or is tried after a pause.
    func isOnTrial(_ topic: TopicScope) -> Bool {
        evidence.isOnTrial(.topic(topic)) || evidence.isOnTrial(.server(scope(of: topic)))
    }

    /// Whether a server or a topic pauses, or is tried after a pause.
    var isPausing: Bool { !evidence.isQuiet }

    /// The files of a credential have changed: it is tried at once.
    mutating func resume(credential: String) {
        let credentialOf = self.credential
        evidence.resume { subject in
            switch subject {
            case .server(let scope): scope.credential == credential
            case .topic(let topic): credentialOf(topic) == credential
            }
        }
    }

    /// A person wants these topics to be tried at once.
    mutating func resume(_ topics: [TopicScope]) {
        for topic in topics {
            let scope = self.scope(of: topic)
            evidence.resume { $0 == .topic(topic) || $0 == .server(scope) }
        }
    }

    // MARK: - Outcomes

    /// Takes what the client of a credential has finished.
    mutating func take(
        _ outcomes: [PushOutcome], of credential: String, by policy: RetryPolicy, at now: Moment
    ) -> [Action] {
        var actions: [Action] = []
        for outcome in outcomes {
            let address = outcome.request.address
            let scope = CredentialScope(credential: credential, environment: address.scope.environment)
            guard let claimed = servers[scope]?.requests.inFlight(address) else { continue }
            var step = policy.step(
                after: outcome.end, of: claimed.request, attempts: claimed.attempts, firstSentAt: claimed.firstSentAt,
                now: now.timeOfDay, isSilent: servers[scope]?.silence != nil)
            let trial = evidence.trial(of: address, in: scope)
            let age = now.timeOfDay.microseconds - claimed.firstSentAt.microseconds
            let finding = evidence.note(
                step, of: claimed, in: scope, trial: trial, age: .microseconds(age), retryFor: policy.retryFor,
                at: now.clock)
            step.fate = finding.fate
            // Another daemon may be able to send it.
            if step.blame != .nobody, step.blame != .token, evidence.isOnTrial(.server(scope)),
                case .later(let pause, let words) = step.fate
            {
                step.fate = .later(min(pause, Trial.othersWait), words)
            }
            unwritten.add(RequestEnding(of: claimed, outcome, step))
            counts.add(outcome, step.fate, in: scope)
            servers[scope]?.note(outcome.end)
            if let trial { evidence.ended(trial, isInVain: outcome.sends > 0 && step.blame != .nobody) }
            goOn(address, in: scope, after: step, at: now.clock)
            if let pause = finding.pause { actions += begin(pause, in: scope) }
        }
        return actions
    }

    /// Lets servers pause that have answered nothing for a while. What was not sent goes back: another daemon may be able to send it.
    mutating func pauseSilent(at now: ContinuousClock.Instant) -> [Action] {
        servers.flatMap { scope, server -> [Action] in
            guard let since = server.silence?.since, since.duration(to: now) >= timing.unanswered,
                let pause = evidence.isSilent(scope, at: now)
            else { return [] }
            return begin(pause, in: scope, keepsSent: true)
        }
    }

    /// Gives back what was not sent to a server or for a topic.
    ///
    /// - Parameter keepsSent: Whether the client may repeat what it has sent: nothing was refused.
    private mutating func begin(
        _ pause: ResponseEvidence.Finding.Pause, in scope: CredentialScope, keepsSent: Bool = false
    ) -> [Action] {
        let isMeant: (ClaimedRequest) -> Bool
        var actions: [Action] = [.logPause(pause.subject, pause.duration, why: evidence.words(of: pause.subject))]
        switch pause.subject {
        case .topic(let topic):
            isMeant = { $0.request.address.scope == topic }
            topics.forget(topic)
            campaigns.forget(topic)
            actions.append(.reconnect(scope))
        case .server:
            isMeant = { [credential] in
                let topic = $0.request.address.scope
                return topic.environment == scope.environment && credential(topic) == scope.credential
            }
            actions.append(.reconnect(scope))
        }
        giveBack(in: scope, where: isMeant)
        unwritten.giveBack(paced.withdraw(where: isMeant), after: nil)
        let numbers = servers[scope]?.requests.inFlight(where: isMeant) ?? []
        if numbers.isEmpty { return actions }
        let credential = scope.credential
        return actions
            + [
                keepsSent
                    ? .withdrawUnsent(numbers, credential: credential) : .withdraw(numbers, credential: credential)
            ]
    }

    /// Lets the token's next request go, unless it has to wait like the one that has ended.
    private mutating func goOn(
        _ address: TokenAddress, in scope: CredentialScope, after step: RetryPolicy.Step,
        at now: ContinuousClock.Instant
    ) {
        let pause: Duration?
        switch (step.fate, step.blame) {
        case (.answered, .token):
            pause = RestingTokens.untilRecorded
            tokens.rest(address, for: RestingTokens.untilRecorded, at: now)
        case (.failed, .token):
            pause = RetryPolicy.tooManyRequests.first
            tokens.rest(address, for: timing.scaled(RetryPolicy.tooManyRequests.first), at: now)
        case (.answered, _), (.failed, _):
            servers[scope]?.requests.ended(address)
            return
        case (.later(let until, _), .token):
            pause = until
            tokens.rest(address, for: timing.scaled(until), at: now)
        case (.later(let until, _), _), (.refused(let until, _), _), (.interrupted(let until, _), _): pause = until
        case (.returned(let until), _): pause = until
        }
        unwritten.giveBack(servers[scope]?.requests.giveBack(address) ?? [], after: pause)
    }
}
