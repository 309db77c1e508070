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
/// - Nothing is sent to a token that rests. Nothing is claimed for a server that rests, or for a topic that was just paused.
/// - After a rest, one request at a time tries the server out until it responds, each time of another token.
/// - A credential holds at most `limit` requests per environment. If more topics share a credential than it has room for, each
///   still gets one request, so that none starves.
struct SendState {
    /// The most requests of one credential in one environment, queued ones included.
    private let limit: Int
    /// The name of the credential for a topic; nil where no credential covers it.
    private let credential: (TopicScope) -> String?
    private var requests: [CredentialScope: RequestsInFlight] = [:]
    private var health = SendingHealth()
    private var trials = Trials()
    private var topics = DueTopics()
    private var tokens = RestingTokens()
    private var blocked = BlockedTopics()
    private var unwritten = UnwrittenEndings()

    init(limit: Int, credential: @escaping (TopicScope) -> String?) {
        self.limit = limit
        self.credential = credential
    }

    /// What the pipeline does outside the database.
    enum Action: Equatable {
        /// Give the requests to the client of the credential.
        case submit([PushRequest], credential: String)
        /// Log that a credential sends nothing in an environment for this time.
        case logRest(CredentialScope, Duration, lastError: String?)
    }

    /// The time by both clocks. Retries depend on the time of day, everything else on a clock that nobody sets.
    struct Moment: Sendable {
        var clock: ContinuousClock.Instant
        var timeOfDay: Instant

        static var now: Moment { Moment(clock: .now, timeOfDay: .now) }
    }

    /// Whether nothing is claimed and everything is written.
    var isEmpty: Bool { requests.values.allSatisfy(\.isEmpty) && unwritten.isEmpty }

    /// Topics whose requests all wait, one sentence each: no credential covers the topic, or claims from it fail.
    var blockedTopics: [String] {
        topics.uncovered.prefix(20).map { "no credential is configured for \($0): its requests wait" }
            + blocked.problems.prefix(20)
    }

    /// Everything that keeps requests waiting, one sentence each.
    func problems(at now: ContinuousClock.Instant) -> [String] {
        blockedTopics
            + Set(health.resting(at: now)).union(trials.underWay).sorted().map {
                "APNs returns errors or cannot be reached (\($0)), and requests wait: \(health.lastError(of: $0) ?? "")"
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
            let topic = address.scope
            let scope = CredentialScope(credential: credential, environment: topic.environment)
            guard let claimed = requests[scope]?.inFlight(address) else { continue }
            let step = policy.step(
                after: outcome.end, of: claimed.request, attempts: claimed.attempts, firstSentAt: claimed.firstSentAt,
                now: now.timeOfDay)
            unwritten.add(Self.ending(of: claimed, outcome, step))
            let isTrial = trials.isTrial(address, in: scope)
            switch health.note(step, of: topic, by: credential, isTrial: isTrial, at: now.clock) {
            case .none: break
            case .pauseTopic(let reason):
                topics.forget(topic)
                unwritten.pause(topic, reason: reason)
                giveBack(in: scope) { $0.request.address.scope == topic }
            case .rest(let pause): actions.append(.logRest(scope, pause, lastError: health.lastError(of: scope)))
            }
            if isTrial { trials.ended(in: scope, isUnanswered: outcome.sends > 0 && step.blame == .server) }
            if !trials.isEmpty, !health.isOnTrial(scope) { trials.succeeded(in: scope) }
            goOn(address, in: scope, after: step, at: now.clock)
        }
        return actions
    }

    private static func ending(
        of claimed: ClaimedRequest, _ outcome: PushOutcome, _ step: RetryPolicy.Step
    ) -> RequestEnding {
        var answer: RequestEnding.Answer?
        switch (outcome.end, step.blame) {
        // The response is not from APNs, so it says nothing about the token. Recorded as a result, it would make the token
        // suspect.
        case (.answered, .foreign): break
        case (.answered(let response), _):
            answer = RequestEnding.Answer(status: response.status, body: response.body, apnsID: response.apnsID)
        default: break
        }
        return RequestEnding(number: claimed.number, fate: step.fate, answer: answer, sentAt: outcome.sentAt)
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
            tokens.rest(address, at: now)
        case (.answered, _), (.failed, _):
            requests[scope]?.ended(address)
            return
        case (.later(let until, _), _), (.interrupted(let until, _), _): pause = until
        case (.returned(let until), _): pause = until
        }
        unwritten.giveBack(requests[scope]?.giveBack(address) ?? [], after: pause)
    }

    // MARK: - Requests that the client does not have

    /// The requests to look up before `handOver`: they were claimed a while ago.
    var next: [Int64] { requests.values.flatMap(\.next) }

    /// All requests that wait behind another one of their token.
    var unsent: [Int64] { requests.values.flatMap(\.unsent) }

    /// Takes what has changed for unsent requests since they were claimed.
    mutating func take(_ recalled: Outbox.Recalled) {
        if recalled.isEmpty { return }
        for scope in requests.keys {
            requests[scope]?.withdraw { recalled.gone.contains($0.number) }
            giveBack(in: scope) { recalled.paused.contains($0.number) }
        }
    }

    /// Gives back unsent requests at once, as if they had not been tried.
    private mutating func giveBack(in scope: CredentialScope, where isMeant: (ClaimedRequest) -> Bool) {
        unwritten.giveBack(requests[scope]?.withdraw(where: isMeant) ?? [], after: nil)
    }

    /// Lets the next request go of each token whose last one has ended.
    mutating func handOver() -> [Action] {
        requests.keys.compactMap { scope in
            let next = requests[scope]?.handOver() ?? []
            return next.isEmpty ? nil : .submit(next, credential: scope.credential)
        }
    }

    // MARK: - Writing

    /// What to write to the database next; nil when everything is written. Call `wrote` after the COMMIT.
    var nextWrite: UnwrittenEndings.Write? { unwritten.next }

    /// What `nextWrite` returned is in the database.
    mutating func wrote() { unwritten.wrote() }

    /// Compares the state with what this daemon has claimed according to the database. A COMMIT whose response was lost may have
    /// claimed or finished requests, and another daemon may have taken some over.
    mutating func reconcile(claimed: Set<Int64>) {
        let known = requests.values.reduce(into: unwritten.numbers) { $0.formUnion($1.numbers) }
        unwritten.giveBack(numbers: claimed.subtracting(known))
        for scope in requests.keys { requests[scope]?.withdraw { !claimed.contains($0.number) } }
    }

    // MARK: - Claims

    /// A topic's turn to be claimed from.
    struct Turn: Equatable {
        var topic: TopicScope
        /// The credential's name is empty if the topic is invalid: then all its requests fail in the claim.
        var scope: CredentialScope
        /// How many turns of this round share the credential's room.
        var sharers = 1
        /// Whether it claims candidates for a trial of the server.
        var isTrial = false
    }

    /// Whether so many endings are unwritten that they must be written before anything is claimed.
    var isBehind: Bool { unwritten.isBacklog }

    /// Whether the pipeline is to look for topics now, page by page.
    mutating func looksForTopics(at now: ContinuousClock.Instant) -> Bool { topics.beginsLook(at: now) }

    /// Where the next page of topics begins; nil for the first.
    var topicCursor: TopicScope? { topics.cursor }

    /// - Returns: Whether the look needs another page.
    mutating func add(_ page: Outbox.Scopes) -> Bool {
        topics.add(page) { [credential] in credential($0) != nil }
        if topics.isLookComplete { blocked.keep(only: topics.waiting) }
        return topics.needsAnotherPage
    }

    /// The topics to claim from in this round.
    mutating func turns(at now: ContinuousClock.Instant) -> [Turn] {
        if isBehind { return [] }
        tokens.prune(at: now)
        var turns = trials.narrow(topics.claimable.compactMap { turn(of: $0, at: now) })
        let sharers = Dictionary(grouping: turns, by: \.scope).mapValues(\.count)
        for index in turns.indices { turns[index].sharers = sharers[turns[index].scope] ?? 1 }
        return turns
    }

    private func turn(of topic: TopicScope, at now: ContinuousClock.Instant) -> Turn? {
        let scope = CredentialScope(credential: credential(topic) ?? "", environment: topic.environment)
        let isTrial = health.isOnTrial(scope)
        // Skip scopes with little room: a claim of one request costs about as much as a claim of many.
        let hasRoom = room(in: scope) >= (isTrial ? 1 : max(limit / 4, 1))
        return hasRoom && !blocked.isBlocked(topic, at: now) && !health.isResting(scope, at: now)
            ? Turn(topic: topic, scope: scope, isTrial: isTrial) : nil
    }

    private func room(in scope: CredentialScope) -> Int { limit - (requests[scope]?.count ?? 0) }

    /// How many requests a turn may claim: its share of the room that the earlier turns have left.
    func room(for turn: Turn) -> Int {
        let share = max(room(in: turn.scope) / turn.sharers, 1)
        return turn.isTrial ? min(share, Trials.candidates) : share
    }

    /// Where the claim of a turn begins.
    mutating func claimsFrom(_ turn: Turn, at now: ContinuousClock.Instant) -> Instant {
        topics.claimsFrom(turn.topic, at: now)
    }

    /// Takes what a turn has claimed.
    mutating func take(_ claim: Outbox.Claim, of turn: Turn, at now: ContinuousClock.Instant) -> [Action] {
        blocked.unblock(turn.topic)
        topics.claimed(turn.topic, until: claim.dueAt, at: now)
        var sendable: [ClaimedRequest] = []
        for request in claim.requests {
            if let rest = tokens.remaining(request.request.address, at: now) {
                unwritten.giveBack([request], after: rest)
            } else {
                sendable.append(request)
            }
        }
        if turn.isTrial { sendable = chooseTrial(from: sendable, in: turn.scope) }
        if sendable.isEmpty { return [] }
        precondition(!turn.scope.credential.isEmpty, "claimed without a credential: \(turn.topic)")
        let next = requests[turn.scope, default: RequestsInFlight()].take(sendable)
        return next.isEmpty ? [] : [.submit(next, credential: turn.scope.credential)]
    }

    /// Keeps one request, and gives the others back.
    private mutating func chooseTrial(from claimed: [ClaimedRequest], in scope: CredentialScope) -> [ClaimedRequest] {
        // A token's earlier request may still be in flight from before the rest.
        let candidates = claimed.filter { requests[scope]?.holds($0.request.address) != true }
        let chosen = trials.choose(from: candidates, in: scope)
        unwritten.giveBack(claimed.filter { $0.number != chosen?.number }, after: Trials.othersWait)
        return chosen.map { [$0] } ?? []
    }

    /// The claim of a turn failed because of the topic's own requests. The other topics go on.
    mutating func claimFailed(_ turn: Turn, _ error: String, at now: ContinuousClock.Instant) {
        blocked.block(turn.topic, error, at: now)
    }
}
