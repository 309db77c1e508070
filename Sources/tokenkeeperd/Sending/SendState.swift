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
    private let limit: Int
    /// How many more requests all credentials together may hold, as of this round.
    private var roomOfAll: Int
    /// The name of the credential for a topic; nil where no credential covers it.
    private let credential: (TopicScope) -> String?
    private var requests: [CredentialScope: RequestsInFlight] = [:]
    private let timing: Timing
    private var evidence: ResponseEvidence
    private var unanswered: UnansweredRequests
    private var trials = Trials()
    private var topics = DueTopics()
    private var campaigns = DueCampaigns()
    private var tokens = RestingTokens()
    private var blocked: BlockedSources
    private var unwritten = UnwrittenEndings()
    private var recalls = RecallSchedule()
    private var paced = PacedRequests()
    private(set) var counts = SendCounts()

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
        unanswered = UnansweredRequests(timing)
        blocked = BlockedSources(timing)
        self.credential = credential
    }

    /// What the pipeline does outside the database.
    enum Action: Equatable {
        /// Give the requests to the client of the credential.
        case submit([ClaimedRequest], credential: String)
        /// Take requests back from the client, by `request_id`. The client keeps those that it has sent until they are answered.
        case withdraw([Int64], credential: String)
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

    /// Whether nothing is claimed and everything is written.
    var isEmpty: Bool { requests.values.allSatisfy(\.isEmpty) && paced.isEmpty && unwritten.isEmpty }

    /// Topics and campaigns whose requests all wait, one sentence each: no credential covers the topic, or claims fail.
    var blockedSources: [String] {
        topics.uncovered.map { "no credential is configured for \($0): its requests wait" }.first(20, of: "topics")
            + campaigns.uncovered.map {
                "no credential is configured for \($0.topic): campaign \($0.id) waits"
            }.first(20, of: "campaigns") + blocked.problems.first(20, of: "topics and campaigns")
    }

    /// Whether a request has been submitted, and none of its credential has been answered since.
    var awaitsAnswer: Bool { !unanswered.isEmpty }

    /// Everything that keeps requests waiting: one sentence for each cause.
    func problems(at now: ContinuousClock.Instant) -> [String] { waiting(at: now).map(\.words) }

    func waiting(at now: ContinuousClock.Instant) -> [WaitingProblem] {
        let unanswered = unanswered.problems(at: now)
        return blockedSources.map(WaitingProblem.init) + WaitingProblem.joined(unanswered.map(\.problem))
            + WaitingProblem.joined(evidence.problems(except: unanswered.map(\.scope), at: now)).first(20)
    }

    /// The credential's name is empty if none covers the topic.
    private func scope(of topic: TopicScope) -> CredentialScope {
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
        trials.keep { [evidence] in evidence.isOnTrial($0) }
    }

    /// A person wants these topics to be tried at once.
    mutating func resume(_ topics: [TopicScope]) {
        for topic in topics {
            let scope = self.scope(of: topic)
            evidence.resume { $0 == .topic(topic) || $0 == .server(scope) }
        }
        trials.keep { [evidence] in evidence.isOnTrial($0) }
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
            guard let claimed = requests[scope]?.inFlight(address) else { continue }
            var step = policy.step(
                after: outcome.end, of: claimed.request, attempts: claimed.attempts, firstSentAt: claimed.firstSentAt,
                now: now.timeOfDay)
            let trial = trials.trial(of: address, in: scope)
            let age = now.timeOfDay.microseconds - claimed.firstSentAt.microseconds
            let finding = evidence.note(
                step, of: claimed, in: scope, trial: trial, age: .microseconds(age), at: now.clock)
            step.fate = finding.fate
            unwritten.add(RequestEnding(of: claimed, outcome, step))
            counts.add(outcome, step.fate, in: scope)
            unanswered.ended(outcome.end, in: scope)
            if let trial { trials.ended(trial, isInVain: outcome.sends > 0 && step.blame != .nobody) }
            if !trials.isEmpty { trials.keep { [evidence] in evidence.isOnTrial($0) } }
            goOn(address, in: scope, after: step, at: now.clock)
            if let pause = finding.pause { actions += begin(pause, in: scope) }
        }
        return actions
    }

    /// Gives back what was not sent to a server or for a topic.
    private mutating func begin(_ pause: ResponseEvidence.Finding.Pause, in scope: CredentialScope) -> [Action] {
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
        let numbers = requests[scope]?.inFlight(where: isMeant) ?? []
        return numbers.isEmpty ? actions : actions + [.withdraw(numbers, credential: scope.credential)]
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
            requests[scope]?.ended(address)
            return
        case (.later(let until, _), .token):
            pause = until
            tokens.rest(address, for: timing.scaled(until), at: now)
        case (.later(let until, _), _), (.refused(let until, _), _), (.interrupted(let until, _), _): pause = until
        case (.returned(let until), _): pause = until
        }
        unwritten.giveBack(requests[scope]?.giveBack(address) ?? [], after: pause)
    }

    // MARK: - Requests that must not be sent any more

    /// The requests to look up now, before `handOver` and `release`.
    ///
    /// - Returns: Those that are sent next and were not looked up a moment before. Every quarter of a second, also what the clients have,
    ///   and one of those that wait for their instant from each topic and campaign.
    mutating func toLookUp(at now: ContinuousClock.Instant) -> [Int64] {
        // What waited behind another request may have waited for a minute.
        var numbers = Set(next).union(paced.toLookUp(at: now))
        if recalls.isDue(at: now) {
            numbers.formUnion(recalls.begin(with: submitted, and: paced.numbers, at: now))
            numbers.formUnion(paced.probes)
        }
        return Array(numbers)
    }

    /// The requests behind one that has ended.
    private var next: [Int64] { requests.values.flatMap(\.next) }

    /// The `request_id` of every request that was submitted and has not ended, and of those that wait behind one.
    private var submitted: Set<Int64> { requests.values.reduce(into: []) { $0.formUnion($1.numbers) } }

    /// The `request_id` of every claimed request that has not ended.
    private var held: Set<Int64> { submitted.union(paced.numbers) }

    /// Takes what has changed for requests since they were claimed.
    ///
    /// - Parameters:
    ///   - asked: The requests that were looked up.
    ///   - now: After the look-up.
    mutating func take(
        _ recalled: Outbox.Recalled, among asked: [Int64], at now: ContinuousClock.Instant
    ) -> [Action] {
        paced.lookedUp(Set(asked), paused: recalled.paused, at: now)
        if recalled.isEmpty { return [] }
        paced.withdraw(recalled.gone)
        unwritten.giveBack(paced.withdraw(recalled.paused), after: nil)
        for scope in requests.keys {
            requests[scope]?.withdraw { recalled.gone.contains($0.number) }
            giveBack(in: scope) { recalled.paused.contains($0.number) }
        }
        return withdraw { recalled.gone.contains($0.number) || recalled.paused.contains($0.number) }
    }

    /// Takes requests back from the clients. They end with the outcome that follows.
    private func withdraw(where isMeant: (ClaimedRequest) -> Bool) -> [Action] {
        requests.compactMap { scope, requests in
            let numbers = requests.inFlight(where: isMeant)
            return numbers.isEmpty ? nil : .withdraw(numbers, credential: scope.credential)
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

    // MARK: - Rates

    /// Lets the requests go whose instant has come, as far as there is room and as far as `toLookUp` does not want them first.
    mutating func release(at now: Moment) -> [Action] {
        var actions: [Action] = []
        for (source, scope) in paced.sources {
            if evidence.isOnTrial(.server(scope)) || evidence.isOnTrial(.topic(source.topic)) {
                unwritten.giveBack(paced.withdraw { $0.request.address.scope == source.topic }, after: nil)
                continue
            }
            let released = paced.release(source, at: now.clock, most: room(in: scope))
            // The database decides whether a request has expired, and ends it when it is claimed again.
            unwritten.giveBack(
                released.late + released.due.filter { $0.request.hasExpired(at: now.timeOfDay) }, after: nil)
            let sendable = released.due.filter { !$0.request.hasExpired(at: now.timeOfDay) }
            actions += submit(sendable, in: scope, at: now.clock)
        }
        return actions
    }

    /// Gives back what waits for its instant: the daemon shuts down.
    mutating func giveBackPaced() {
        unwritten.giveBack(paced.withdraw { _ in true }, after: nil)
    }

    // MARK: - Writing

    /// What to write to the database next; nil when everything is written. Call `wrote` after the COMMIT.
    var nextWrite: [RequestEnding]? { unwritten.next }

    /// What `nextWrite` returned is in the database, except the endings with these numbers: another session has locked their requests.
    mutating func wrote(except locked: Set<Int64> = [], at now: ContinuousClock.Instant = .now) {
        unwritten.wrote(except: locked, at: now)
        if isEmpty { campaigns.mayHaveEnded() }
    }

    /// Lets `nextWrite` return again what was locked, if it is time.
    mutating func retryLocked(at now: ContinuousClock.Instant) { unwritten.retryLocked(at: now) }

    /// Compares the state with what this daemon has claimed according to the database. A COMMIT whose response was lost may have
    /// claimed or finished requests, and another daemon may have taken some over.
    mutating func reconcile(claimed: Set<Int64>) -> [Action] {
        unwritten.giveBack(numbers: claimed.subtracting(held).subtracting(unwritten.numbers))
        paced.withdraw { !claimed.contains($0.number) }
        for scope in requests.keys { requests[scope]?.withdraw { !claimed.contains($0.number) } }
        return withdraw { !claimed.contains($0.number) }
    }

    // MARK: - Claims

    /// Whether so many endings are unwritten that they must be written before anything is claimed.
    var isBehind: Bool { unwritten.isBacklog }

    /// Whether the pipeline is to look for topics now, page by page.
    mutating func looksForTopics(at now: ContinuousClock.Instant) -> Bool {
        // While a campaign is sent, there is a turn every few milliseconds.
        if !campaigns.isEmpty, topics.isQuiet(at: now) { return false }
        return topics.beginsLook(at: now)
    }

    /// Where the next page of topics begins; nil for the first.
    var topicCursor: TopicScope? { topics.cursor }

    /// - Returns: Whether the look needs another page.
    mutating func add(_ page: Outbox.Scopes) -> Bool {
        topics.add(page) { [credential] in credential($0) != nil }
        if topics.isLookComplete {
            blocked.keep(only: Set(topics.waiting.map { Source(topic: $0) }).union(campaigns.sources))
            let waiting = Set(
                topics.waiting.union(campaigns.topics).compactMap { topic in
                    credential(topic).map { CredentialScope(credential: $0, environment: topic.environment) }
                })
            unanswered.keep { waiting.contains($0) || requests[$0]?.isEmpty == false }
            // What nothing waits for keeps nobody waiting.
            let waitingTopics = topics.waiting.union(campaigns.topics)
            evidence.keep { [requests] subject in
                switch subject {
                case .server(let scope): waiting.contains(scope) || requests[scope]?.isEmpty == false
                case .topic(let topic): waitingTopics.contains(topic) || requests.values.contains { $0.holds(topic) }
                }
            }
            trials.keep { [evidence] in evidence.isOnTrial($0) }
        }
        return topics.needsAnotherPage
    }

    /// Whether the pipeline is to look for campaigns now.
    mutating func looksForCampaigns(at now: ContinuousClock.Instant) -> Bool { campaigns.beginsLook(at: now) }

    /// Whether the look is also to note which campaigns have ended.
    mutating func endsCampaigns(at now: ContinuousClock.Instant) -> Bool { campaigns.beginsEnding(at: now) }

    mutating func take(_ found: [Outbox.DueCampaign], at now: ContinuousClock.Instant) {
        campaigns.take(found, at: now) { [credential] in credential($0) != nil }
    }

    /// Counts requests of campaigns that have expired. Those of topics without a credential here belong to no metric.
    mutating func count(expired: [TopicScope: Int]) {
        for (topic, requests) in expired {
            guard let credential = credential(topic) else { continue }
            counts.add(expired: requests, in: CredentialScope(credential: credential, environment: topic.environment))
        }
    }

    /// The campaigns whose audience is to be addressed further, in the order of their numbers.
    ///
    /// - Parameter areSlow: Whether those are meant whose audience takes long to find, or the others.
    func toAddress(areSlow: Bool = false, at now: ContinuousClock.Instant) -> [Source] {
        campaigns.toAddress(areSlow: areSlow).filter { !blocked.isBlocked($0, at: now) }
    }

    /// The campaigns whose audience takes long to find, including those that wait after a failure.
    var slowAudiences: [Source] { campaigns.toAddress(areSlow: true) }

    /// The audience of a campaign takes long to find.
    mutating func isSlow(_ campaign: Int64) { campaigns.isSlow(campaign) }

    /// Batches were appended to a campaign.
    mutating func addressed(_ campaign: Int64) { campaigns.addressed(campaign) }

    /// How long until something is to be done for a campaign or a rate.
    func pause(at now: ContinuousClock.Instant) -> Duration {
        // What is due already waits for room.
        let dues = [paced.next(after: now), topics.nextClaim(after: now)].compactMap { $0 }
        return dues.map { max(now.duration(to: $0), Self.grain) }.reduce(campaigns.pause(at: now), min)
    }

    /// Requests that are sent by a rate go in groups of this length of time.
    private static let grain: Duration = .milliseconds(5)

    /// The most topics of a round. The others come before them in the next one.
    private static let mostTopics = 200

    /// The most topics of a round from which a trial is chosen.
    private static let mostTriers = 20

    /// With more turns than this in a round, a topic is left at once when all that it had due is claimed.
    private static let manyTurns = 16

    /// The topics and campaigns to claim from in this round.
    mutating func turns(at now: ContinuousClock.Instant) -> [Turn] {
        if isBehind { return [] }
        roomOfAll = limit * Self.mostAtOnce - requests.values.reduce(0) { $0 + $1.count }
        tokens.prune(at: now)
        var ofTopics: [Turn] = []
        // Of the topics that wait for one trial, a few are enough: they must not keep the others out of the round.
        var triers: [ResponseEvidence.Subject: Int] = [:]
        for topic in topics.claimable(at: now) where ofTopics.count < Self.mostTopics {
            guard let turn = turn(of: Source(topic: topic), at: now) else { continue }
            if let trial = turn.trial {
                if triers[trial, default: 0] >= Self.mostTriers { continue }
                triers[trial, default: 0] += 1
            }
            ofTopics.append(turn)
        }
        let ofCampaigns = campaigns.claimable(at: now).compactMap {
            turn(of: Source(topic: $0.topic, campaign: $0.id), at: now)
        }
        var turns = trials.narrow(ofTopics + ofCampaigns)
        if topics.count > Self.mostTopics { topics.moveBack(turns.lazy.map(\.topic)) }
        let sharers = Dictionary(grouping: turns, by: \.scope).mapValues(\.count)
        for index in turns.indices { turns[index].sharers = sharers[turns[index].scope] ?? 1 }
        return turns
    }

    private func turn(of source: Source, at now: ContinuousClock.Instant) -> Turn? {
        let topic = source.topic
        let scope = self.scope(of: topic)
        let subjects: [ResponseEvidence.Subject] = evidence.isQuiet ? [] : [.server(scope), .topic(topic)]
        let trial = subjects.first { evidence.isOnTrial($0) }
        if let trial, trials.isUnderWay(trial) { return nil }
        let hasRoom = room(in: scope) >= (trial != nil ? 1 : leastRoom)
        // A batch is larger than a small share. Each credential may have one.
        if source.campaign != nil, trial == nil, roomOfAll <= 0, requests[scope]?.isEmpty == false { return nil }
        return hasRoom && !blocked.isBlocked(source, at: now)
            && !subjects.contains { evidence.isPausing($0, at: now) } && !paced.isLate(source, at: now)
            ? Turn(source: source, scope: scope, trial: trial) : nil
    }

    /// Scopes with less room are skipped: a claim of one request costs about as much as a claim of many.
    private var leastRoom: Int { max(limitOfEach / 4, 1) }

    private func room(in scope: CredentialScope) -> Int { limitOfEach - (requests[scope]?.count ?? 0) }

    /// How many requests each credential may hold in an environment. Many credentials at once get little each, so that memory is bounded.
    private var limitOfEach: Int { roomOfAll >= limit ? limit : smallShare }

    private var smallShare: Int { max(limit / Self.leastShare, 1) }

    /// All credentials together hold what so many of them may hold alone, and then a small share of it each.
    private static let (mostAtOnce, leastShare) = (4, 64)

    /// What the turns of one transaction ask for. Together they ask for no more than there is room for, and each for a small share at least.
    mutating func asked(_ group: some Sequence<Turn>, at now: ContinuousClock.Instant) -> [Outbox.Asked] {
        var left = roomOfAll
        var asked: [Outbox.Asked] = []
        for turn in group {
            let most = min(room(for: turn), max(left, smallShare))
            left -= most
            asked.append(Outbox.Asked(turn.topic, most: most, since: claimsFrom(turn, at: now)))
        }
        return asked
    }

    /// How many requests a turn may claim: its share of the room that the earlier turns have left. A campaign gets a whole batch or
    /// nothing, and then it is the first of a later round.
    func room(for turn: Turn) -> Int {
        let room = room(in: turn.scope)
        let share = max(room / turn.sharers, 1)
        if turn.source.campaign != nil {
            let hasRoom = room >= (turn.isTrial ? 1 : leastRoom)
            return hasRoom ? max(turn.isTrial ? 1 : share, Outbox.partOfBatch) : 0
        }
        return turn.isTrial ? min(share, Trials.candidates) : share
    }

    /// Where the claim of a turn begins.
    mutating func claimsFrom(_ turn: Turn, at now: ContinuousClock.Instant) -> Instant {
        topics.claimsFrom(turn.topic, at: now)
    }

    /// Whether a look has just found that the turn's topic has requests due, and nothing of it has been claimed since.
    func hasJustFound(_ turn: Turn) -> Bool { turn.source.campaign == nil && topics.isJustFound(turn.topic) }

    /// Takes what a turn has claimed.
    mutating func take(_ claim: Outbox.Claim, of turn: Turn, at now: ContinuousClock.Instant) -> [Action] {
        blocked.unblock(turn.source)
        roomOfAll -= claim.requests.count
        counts.add(suppressed: claim.suppressed, in: turn.scope)
        if let campaign = turn.source.campaign {
            campaigns.claimed(campaign, some: claim.dueAt != nil, lastSendAt: claim.lastSendAt)
        } else {
            let isDone = claim.isComplete && turn.sharers > Self.manyTurns
            topics.claimed(turn.topic, until: isDone ? nil : claim.dueAt, lastSendAt: claim.lastSendAt, at: now)
        }
        unwritten.areClaimedAgain(claim.requests)
        // While this process was stopped, another daemon may have had and returned what it holds.
        if !paced.isEmpty { paced.withdraw(Set(claim.requests.lazy.map(\.number))) }
        if let trial = turn.trial {
            let chosen = chooseTrial(
                of: trial, from: withoutResting(withoutHeld(claim.requests, in: turn.scope), at: now), turn)
            return submit(chosen, in: turn.scope, at: now)
        }
        guard claim.lastSendAt != nil else { return submit(claim.requests, in: turn.scope, at: now) }
        paced.add(withoutHeld(claim.requests, in: turn.scope), of: turn, at: now)
        return []
    }

    /// Leaves out the requests that were submitted under an earlier claim. They go on as they are.
    private func withoutHeld(_ claimed: [ClaimedRequest], in scope: CredentialScope) -> [ClaimedRequest] {
        claimed.filter { requests[scope]?.holds($0) != true }
    }

    /// Gives back the requests of tokens that rest.
    private mutating func withoutResting(
        _ claimed: [ClaimedRequest], at now: ContinuousClock.Instant
    ) -> [ClaimedRequest] {
        claimed.filter { request in
            guard let rest = tokens.remaining(request.request.address, at: now) else { return true }
            unwritten.giveBack([request], after: rest)
            return false
        }
    }

    private mutating func submit(
        _ claimed: [ClaimedRequest], in scope: CredentialScope, at now: ContinuousClock.Instant
    ) -> [Action] {
        let sendable = withoutResting(claimed, at: now)
        if sendable.isEmpty { return [] }
        precondition(!scope.credential.isEmpty, "claimed without a credential: \(sendable[0].request.address.scope)")
        let next = requests[scope, default: RequestsInFlight()].take(sendable)
        unanswered.submitted(in: scope, at: now)
        return next.isEmpty ? [] : [.submit(next, credential: scope.credential)]
    }

    /// Keeps one request, and gives the others back.
    private mutating func chooseTrial(
        of subject: ResponseEvidence.Subject, from claimed: [ClaimedRequest], _ turn: Turn
    ) -> [ClaimedRequest] {
        let scope = turn.scope
        // A token's earlier request may still be in flight from before the pause.
        let candidates = claimed.filter { requests[scope]?.holds($0.request.address) != true }
        let chosen = trials.choose(from: candidates, for: subject)
        // A campaign's batch stays together. The next trial chooses from another part of it.
        unwritten.giveBack(
            claimed.filter { $0.number != chosen?.number }, after: turn.source.campaign == nil ? Trials.othersWait : nil
        )
        return chosen.map { [$0] } ?? []
    }

    /// A claim from a topic or campaign failed because of its own requests, or a campaign could not be addressed. The others go on.
    ///
    /// - Parameter isPassing: Whether another session holds a lock, or the connection was lost: then it is soon tried again.
    mutating func failed(
        _ source: Source, _ error: String, isPassing: Bool = false, at now: ContinuousClock.Instant
    ) {
        blocked.block(source, error, isPassing: isPassing, at: now)
    }
}
